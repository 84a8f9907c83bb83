//! `plimsoll report hot`: the pages to load first when a snapshot of a VM resumes.
//!
//! From a page log or a trace of an earlier run, single pages; from the daemon's history of a traced VM, whole regions of
//! its RAM, which is as fine as that history is.

use std::collections::HashSet;
use std::io::Write;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::builder::NonEmptyStringValueParser;
use plimsoll_estimator::working_set::HotPages;
use plimsoll_flow::{PageNumber, PageSize};
use plimsoll_observe::wss::begins_as_page_log;
use plimsoll_output::{
    TextFormat, TextFormatArg, bail_usage, csv_table, printable, printable_path,
};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::client::Client;
use plimsoll_protocol::size::ByteSize;
use plimsoll_protocol::vm::HeatmapView;
use serde::Serialize;

use super::super::words::percent;
use super::super::{Daemon, SocketArg, write_json};
use super::uses::{Uses, uses_of};

/// Default length of an interval.
const INTERVAL: NonZeroU64 = NonZeroU64::new(100_000).unwrap();

/// Pages to load first when a snapshot resumes: those used in most intervals of a run; of equals, those used first.
///
/// The list (-o csv) has the position and length of each piece of RAM in bytes: pages from a file, regions from the daemon's
/// history.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of a traced VM, whose history the daemon has
    #[arg(value_parser = NonEmptyStringValueParser::new(), required_unless_present = "from", conflicts_with = "from")]
    vm: Option<String>,
    /// Page log (`plimsoll run --page-log`) or trace of an earlier run, instead of a VM
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Maximum size of the list
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    top: ByteSize,
    /// With --from: length of an interval of a trace, in references; a page log has its own [default: 100000]
    #[arg(long, value_name = "N", requires = "from", conflicts_with = "vm")]
    interval: Option<NonZeroU64>,
    /// With --from: page log or trace of another run, to measure how much of it the list covers
    #[arg(long, value_name = "FILE", requires = "from", conflicts_with = "vm")]
    check: Option<PathBuf>,
    #[command(flatten)]
    socket: SocketArg,
    #[command(flatten)]
    form: TextFormatArg,
}

/// What `-o json` writes.
#[derive(Debug, Serialize)]
struct Hot {
    schema: u32,
    /// The VM or the file.
    of: String,
    /// Length of the list.
    bytes: u64,
    /// What was used in all.
    used_bytes: u64,
    /// Share of all uses that the list covers.
    uses_covered: f64,
    /// Coverage of another run.
    check: Option<Check>,
    pieces: Vec<Piece>,
}

/// How much of another run the list covers.
#[derive(Debug, Serialize)]
struct Check {
    of: String,
    used_bytes: u64,
    uses_covered: f64,
    /// Share of the distinct pages.
    pages_covered: f64,
}

/// A piece of RAM.
#[derive(Debug, Clone, Serialize)]
struct Piece {
    begin_bytes: u64,
    length_bytes: u64,
    /// Intervals, or periods of tracing, in which it was used.
    intervals: u32,
    /// References or page walks; pages used, summed over the periods, in a region.
    uses: u64,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let hot = match (&args.from, &args.vm) {
        (Some(path), _) => of_file(args, path)?,
        (None, Some(vm)) => {
            let daemon = Daemon::to_read(&args.socket)?;
            of_history(&daemon.ask_of(vm, Client::heatmap)?, args.top)?
        }
        (None, None) => unreachable!("clap requires one of both"),
    };
    match args.form.output {
        TextFormat::Table => Ok(out.write_all(hot.to_text().as_bytes())?),
        TextFormat::Csv => Ok(out.write_all(hot.to_csv().as_bytes())?),
        TextFormat::Json => write_json(&hot, out),
    }
}

fn of_file(args: &Args, path: &Path) -> anyhow::Result<Hot> {
    let mut read = [path].into_iter().chain(args.check.as_deref());
    if args.interval.is_some() && read.all(begins_as_page_log) {
        bail_usage!("--interval: a page log has intervals of its own");
    }
    let interval = args.interval.unwrap_or(INTERVAL);
    let mut all = HotPages::new();
    let page_size = uses_of(path, interval, |uses| match uses {
        Uses::Pages(pages) => all.observe(pages),
        Uses::IntervalEnds => all.end_interval(),
    })?;
    ensure!(
        all.references() > 0,
        "'{}' has no page that was used",
        path.display()
    );
    let page_bytes = page_size.bytes();
    let hottest = all.hottest(args.top.0 / page_bytes);
    let listed: HashSet<PageNumber> = hottest.iter().map(|hot| hot.page).collect();
    let check = match &args.check {
        Some(path) => Some(check(path, interval, page_size, &listed)?),
        None => None,
    };
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
    let its_page_size = uses_of(path, interval, |seen| {
        if let Uses::Pages(pages) = seen {
            uses += pages.len() as u64;
            covered += pages.iter().filter(|page| listed.contains(page)).count() as u64;
            distinct.extend(pages.iter().copied());
        }
    })?;
    ensure!(
        its_page_size == page_size && uses > 0,
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
    })
}

/// The regions of a VM's RAM that were used in most periods.
fn of_history(map: &HeatmapView, top: ByteSize) -> anyhow::Result<Hot> {
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
        check: None,
        pieces,
    })
}

impl Hot {
    fn to_text(&self) -> String {
        let mut text = format!(
            "{}: {} of the {} used, in {} pieces, cover {} of all uses; -o csv lists them\n",
            printable(&self.of),
            ByteSize(self.bytes).rounded(),
            ByteSize(self.used_bytes).rounded(),
            self.pieces.len(),
            percent(self.uses_covered)
        );
        if let Some(check) = &self.check {
            text.push_str(&format!(
                "{}: {} used; the list covers {} of its uses and {} of its pages, at {:.2} times its size\n",
                printable(&check.of),
                ByteSize(check.used_bytes).rounded(),
                percent(check.uses_covered),
                percent(check.pages_covered),
                self.bytes as f64 / check.used_bytes as f64
            ));
        }
        text
    }

    fn to_csv(&self) -> String {
        csv_table!(&self.pieces, |piece| {
            "begin_bytes": piece.begin_bytes,
            "length_bytes": piece.length_bytes,
            "intervals": piece.intervals,
            "uses": piece.uses,
        })
    }
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
