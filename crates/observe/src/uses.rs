//! The pages used in a run, interval by interval: from a page log or from a trace in any format.
//!
//! Not here: what follows from them.

use std::num::NonZeroU64;
use std::path::Path;

use plimsoll_flow::{PageNumber, PageSize, ReferenceBatch, Source as _};
use plimsoll_pagelog::RecordSource as _;
use plimsoll_pagelog::log::LogReader;
use plimsoll_pagelog::record::Record;

use crate::wss::{begins_as_page_log, interval_of, page_walked, read};

/// What is passed on of a run, in order.
#[derive(Debug)]
pub(crate) enum Uses<'a> {
    /// Pages, in order. Of a page log these are those of page walks: each page, as large as those of the TLB, that is used at least once in an interval.
    Pages(&'a [PageNumber]),
    /// An interval ended.
    IntervalEnds,
}

/// A run that was read.
#[derive(Debug)]
pub(crate) struct RunRead {
    pub page_size: PageSize,
    /// Why the page log is truncated; what came before has been passed on.
    pub cut: Option<String>,
    /// Records lost when the page log was recorded; `None` of a trace, and if it is truncated.
    pub lost: Option<u64>,
}

/// Passes on the uses of a run, and returns what was read. A trace's intervals have `interval` references, a page log has
/// its own. Pages of a page log are numbered as the guest's frames, without the hole below 4 GiB.
///
/// # Errors
///
/// Why the file cannot be read, or not further; what came before has been passed on.
pub(crate) fn uses_of(
    path: &Path,
    interval: NonZeroU64,
    mut each: impl FnMut(Uses<'_>),
) -> anyhow::Result<RunRead> {
    if begins_as_page_log(path) {
        return of_log(path, each);
    }
    let options = plimsoll_source::Options::default();
    let page_size = options.page_size;
    let mut trace = plimsoll_source::open(path, &options)?;
    let mut batch = ReferenceBatch::new();
    let mut left = interval.get();
    while trace.next_batch(&mut batch)? {
        let mut pages = batch.pages();
        while !pages.is_empty() {
            let now = usize::try_from(left).unwrap_or(usize::MAX).min(pages.len());
            let (of_this, rest) = pages.split_at(now);
            each(Uses::Pages(of_this));
            left -= now as u64;
            if left == 0 {
                each(Uses::IntervalEnds);
                left = interval.get();
            }
            pages = rest;
        }
    }
    Ok(RunRead {
        page_size,
        cut: None,
        lost: None,
    })
}

fn of_log(path: &Path, mut each: impl FnMut(Uses<'_>)) -> anyhow::Result<RunRead> {
    let mut log = LogReader::open(path)?;
    let description = log.description().clone();
    interval_of(&description, path)?;
    let mut pages = Vec::new();
    let cut = read(&mut log, |records| {
        for record in records {
            match record {
                Record::Walk(walk) => pages.push(page_walked(walk, &description)),
                Record::Interval { .. } => {
                    each(Uses::Pages(&pages));
                    each(Uses::IntervalEnds);
                    pages.clear();
                }
                _ => {}
            }
        }
        each(Uses::Pages(&pages));
        pages.clear();
    })?;
    Ok(RunRead {
        page_size: description.tlb_page,
        cut,
        lost: log.totals().map(|totals| totals.lost),
    })
}
