//! The pages to load first when a snapshot of a VM resumes: those used in most intervals of a run.
//!
//! From a page log or a trace of an earlier run, single pages; from the daemon's history of a traced VM, whole regions of
//! its RAM, which is as fine as that history is.

use std::collections::HashSet;
use std::num::NonZeroU64;
use std::path::Path;

use anyhow::{Context as _, ensure};
use plimsoll_estimator::working_set::HotPages;
use plimsoll_flow::{PageNumber, PageSize};
use plimsoll_output::{printable, printable_path};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::size::ByteSize;
use plimsoll_protocol::vm::HeatmapView;
use serde::Serialize;

use crate::uses::{Uses, uses_of};

/// The pages to load first, with how much they cover.
#[derive(Debug, Serialize)]
pub struct Hot {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The VM or the file.
    pub of: String,
    /// Length of the list.
    pub bytes: u64,
    /// What was used in all.
    pub used_bytes: u64,
    /// Share of all uses that the list covers.
    pub uses_covered: f64,
    /// Why the page log is truncated, of which what came before counts.
    pub cut: Option<String>,
    /// Records lost when the page log was recorded, if known.
    pub lost: Option<u64>,
    /// Coverage of another run.
    pub check: Option<Check>,
    /// The pieces, the hottest first.
    pub pieces: Vec<Piece>,
}

/// How much of another run the list covers.
#[derive(Debug, Serialize)]
pub struct Check {
    /// The file.
    pub of: String,
    /// What was used in all.
    pub used_bytes: u64,
    /// Share of all uses that the list covers.
    pub uses_covered: f64,
    /// Share of the distinct pages.
    pub pages_covered: f64,
    /// As of the list's run.
    pub cut: Option<String>,
    /// As of the list's run.
    pub lost: Option<u64>,
}

/// A piece of RAM.
#[derive(Debug, Clone, Serialize)]
pub struct Piece {
    /// Its position.
    pub begin_bytes: u64,
    /// Its length.
    pub length_bytes: u64,
    /// Intervals, or periods of tracing, in which it was used.
    pub intervals: u32,
    /// References or page walks; pages used, summed over the periods, in a region.
    pub uses: u64,
}

/// The pages used in most intervals of the run in a file, up to `top_bytes`; of equals, those used first. A trace's intervals have
/// `interval` references. `other` is a file of another run, of which the list's coverage is measured.
///
/// # Errors
///
/// Why a file cannot be read, that no page was used, and that pages have no place in bytes.
pub fn of_file(
    path: &Path,
    interval: NonZeroU64,
    top_bytes: u64,
    other: Option<&Path>,
) -> anyhow::Result<Hot> {
    let mut all = HotPages::new();
    let run = uses_of(path, interval, |uses| match uses {
        Uses::Pages(pages) => all.observe(pages),
        Uses::IntervalEnds => all.end_interval(),
    })?;
    ensure!(
        all.references() > 0,
        "'{}' has no page that was used",
        path.display()
    );
    let page_bytes = run.page_size.bytes();
    let hottest = all.hottest(top_bytes / page_bytes);
    let listed: HashSet<PageNumber> = hottest.iter().map(|hot| hot.page).collect();
    let check = other.map(|path| check(path, interval, run.page_size, &listed));
    let check = check.transpose()?;
    let pieces = hottest.iter().map(|hot| {
        let begin_bytes = hot.page.0.checked_mul(page_bytes);
        let begin_bytes = begin_bytes.with_context(|| {
            let page = hot.page.0;
            format!("page {page} has no position in bytes below 2^64: are pages of '{}' numbers of something else, such as hashes?", printable_path(path))
        })?;
        Ok(Piece {
            begin_bytes,
            length_bytes: page_bytes,
            intervals: hot.intervals,
            uses: hot.uses,
        })
    });
    let pieces = pieces.collect::<anyhow::Result<Vec<_>>>()?;
    let covered: u64 = hottest.iter().map(|hot| hot.uses).sum();
    Ok(Hot {
        schema: SCHEMA,
        of: path.display().to_string(),
        bytes: listed.len() as u64 * page_bytes,
        used_bytes: all.distinct() * page_bytes,
        uses_covered: covered as f64 / all.references() as f64,
        cut: run.cut,
        lost: run.lost,
        check,
        pieces,
    })
}

/// How much of the run in a file a list covers.
fn check(
    path: &Path,
    interval: NonZeroU64,
    page_size: PageSize,
    listed: &HashSet<PageNumber>,
) -> anyhow::Result<Check> {
    let (mut uses, mut covered) = (0_u64, 0_u64);
    let mut distinct = HashSet::new();
    let run = uses_of(path, interval, |seen| {
        if let Uses::Pages(pages) = seen {
            uses += pages.len() as u64;
            covered += pages.iter().filter(|page| listed.contains(page)).count() as u64;
            distinct.extend(pages.iter().copied());
        }
    })?;
    ensure!(
        run.page_size == page_size && uses > 0,
        "'{}' has no uses of pages of {} bytes",
        path.display(),
        page_size.bytes()
    );
    let pages_covered = distinct.intersection(listed).count();
    Ok(Check {
        of: path.display().to_string(),
        used_bytes: distinct.len() as u64 * page_size.bytes(),
        uses_covered: covered as f64 / uses as f64,
        pages_covered: pages_covered as f64 / distinct.len() as f64,
        cut: run.cut,
        lost: run.lost,
    })
}

/// The regions of a VM's RAM that were used in most periods, up to `top`.
///
/// # Errors
///
/// If nothing was recorded, or a region is larger than `top`.
pub fn of_history(map: &HeatmapView, top: ByteSize) -> anyhow::Result<Hot> {
    let cells = map
        .rows
        .iter()
        .map(|row| row.pages.len())
        .max()
        .unwrap_or(0);
    let mut pieces: Vec<Piece> = (0..cells)
        .map(|cell| {
            let pages = map
                .rows
                .iter()
                .filter_map(|row| row.pages.get(cell).copied());
            let used = pages.filter(|&pages| pages > 0);
            let (intervals, uses) = used.fold((0, 0), |(intervals, uses), pages| {
                (intervals + 1, uses + u64::from(pages))
            });
            Piece {
                begin_bytes: map.cell_bytes.saturating_mul(cell as u64),
                length_bytes: map.cell_bytes,
                intervals,
                uses,
            }
        })
        .filter(|piece| piece.intervals > 0)
        .collect();
    ensure!(
        !pieces.is_empty(),
        "nothing was recorded of VM {} yet",
        printable(&map.vm)
    );
    pieces.sort_by_key(|piece| std::cmp::Reverse((piece.intervals, piece.uses)));
    let used_bytes = map.cell_bytes.saturating_mul(pieces.len() as u64);
    let all: u64 = pieces.iter().map(|piece| piece.uses).sum();
    let listed = top.0 / map.cell_bytes.max(1);
    ensure!(
        listed > 0,
        "--top {top}: the history of VM {} has regions of {}",
        printable(&map.vm),
        ByteSize(map.cell_bytes)
    );
    pieces.truncate(usize::try_from(listed).unwrap_or(usize::MAX));
    let covered: u64 = pieces.iter().map(|piece| piece.uses).sum();
    Ok(Hot {
        schema: SCHEMA,
        of: map.vm.clone(),
        bytes: map.cell_bytes.saturating_mul(pieces.len() as u64),
        used_bytes,
        uses_covered: covered as f64 / all as f64,
        cut: None,
        lost: None,
        check: None,
        pieces,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_protocol::vm::HeatRow;

    #[test]
    fn regions_used_in_most_periods_come_first() {
        let row = |pages: [u32; 4]| HeatRow {
            unix_ms: 0,
            pages: pages.to_vec(),
        };
        let map = HeatmapView {
            schema: SCHEMA,
            vm: "web".to_owned(),
            cell_bytes: 1 << 20,
            rows: vec![row([9, 1, 0, 7]), row([0, 1, 0, 2]), row([0, 1, 0, 0])],
        };
        let hot = of_history(&map, ByteSize(2 << 20)).unwrap();
        let begins: Vec<u64> = hot
            .pieces
            .iter()
            .map(|piece| piece.begin_bytes >> 20)
            .collect();
        assert_eq!(begins, [1, 3]);
        assert_eq!((hot.bytes, hot.used_bytes), (2 << 20, 3 << 20));
        assert!((hot.uses_covered - 12.0 / 21.0).abs() < 1e-9);
        assert!(of_history(&map, ByteSize(1 << 19)).is_err());
        let empty = HeatmapView {
            rows: vec![],
            ..map
        };
        assert!(of_history(&empty, ByteSize(1 << 20)).is_err());
    }
}
