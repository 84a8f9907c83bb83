//! Length, pages and kinds of access of a trace.

use std::collections::HashSet;

use foldhash::fast::RandomState;
use plimsoll_flow::{AccessKind, PageCount, PageNumber, ReferenceBatch, Source};

/// Statistics of a trace. One entry per distinct page is stored while it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TraceSummary {
    /// Number of references.
    pub references: u64,
    /// Number of distinct pages.
    pub distinct: PageCount,
    /// Number of references that read.
    pub reads: u64,
    /// Number of references that write; the kind of the remaining ones is unknown.
    pub writes: u64,
    /// Page of the first reference.
    pub first: Option<PageNumber>,
    /// Page of the last reference.
    pub last: Option<PageNumber>,
    /// Lowest page number.
    pub lowest: Option<PageNumber>,
    /// Highest page number.
    pub highest: Option<PageNumber>,
}

impl TraceSummary {
    /// Reads a trace to its end; `progress` is called with the number of references so far.
    ///
    /// # Errors
    ///
    /// Those of the trace.
    pub fn of<S: Source>(trace: &mut S, mut progress: impl FnMut(u64)) -> Result<Self, S::Error> {
        let mut batch = ReferenceBatch::new();
        let mut pages = HashSet::with_hasher(RandomState::default());
        let mut summary = Self::default();
        while trace.next_batch(&mut batch)? {
            summary.references += batch.len() as u64;
            pages.extend(batch.pages().iter().copied());
            for kind in batch.kinds() {
                match kind {
                    AccessKind::Read => summary.reads += 1,
                    AccessKind::Write => summary.writes += 1,
                    AccessKind::Unknown => {}
                }
            }
            summary.first = summary.first.or(batch.pages().first().copied());
            summary.last = batch.pages().last().copied().or(summary.last);
            progress(summary.references);
        }
        summary.distinct = PageCount(pages.len() as u64);
        summary.lowest = pages.iter().min().copied();
        summary.highest = pages.iter().max().copied();
        Ok(summary)
    }
}
