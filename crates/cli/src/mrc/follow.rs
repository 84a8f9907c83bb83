//! A stream of page numbers as it comes: at intervals, the curve of the last while.
//!
//! Lines are read by a thread of their own and observed within a fraction of an interval. Each estimator begins at a tick and is shown and
//! dropped a window later, so there is one for each interval of the window, and a reference costs that many observations. Until
//! the first window has passed, the curve is that of all references so far.
//!
//! A writer that is faster than the estimators waits in its pipe: nothing is lost here. What traced events are lost before the
//! pipe is for their tracer to report.

use std::collections::VecDeque;
use std::io::{Cursor, Write};
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use plimsoll_estimator::registry::BuiltEstimator;
use plimsoll_flow::{ReferenceBatch, Source as _};
use plimsoll_output::{bail_usage, printable_path, stop_flag};
use plimsoll_protocol::size::Interval;
use plimsoll_report::trace::FollowedReport;
use plimsoll_source::{Options, SourceError, parts};

use super::choice::EstimatorArgs;
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Maximum number of intervals in a window.
const INTERVALS_MAX: u128 = 100;
/// How long a request to stop may take to be noticed.
const POLL: Duration = Duration::from_millis(100);

/// What follows a stream. Flatten it into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct FollowArgs {
    /// Follow a stream of page numbers, one a line, plain or compressed: print the curve of the last --window (default: all) every --every of wall time
    #[arg(long, requires = "every", conflicts_with_all = ["by", "compare", "stream", "cache_policy", "object_sizes", "prefix", "PartialArgs"])]
    follow: bool,
}

impl FollowArgs {
    pub(super) fn is_given(&self) -> bool {
        self.follow
    }
}

/// An estimator and the references since it began.
struct Window {
    built: BuiltEstimator,
    references: u64,
    since: Instant,
}

/// Follows the stream until it ends or a signal asks to stop.
pub(super) fn run(
    every: Interval,
    window: Option<Interval>,
    trace: &TraceArgs,
    estimator: &EstimatorArgs,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let format = view.output.format();
    if format.is_picture() {
        bail_usage!("--follow: a stream has no picture; choose table, csv or json");
    }
    let ids: plimsoll_source::Format = "ids".parse().context("no format ids")?;
    if trace.format.is_some_and(|format| format != ids) {
        bail_usage!(
            "--follow: only streams of page numbers, one a line (format ids), can be followed"
        );
    }
    let nanoseconds = |interval: Interval| interval.get().as_nanos();
    if window.is_some_and(|window| !nanoseconds(window).is_multiple_of(nanoseconds(every))) {
        bail_usage!(
            "--window: expected a multiple of --every, because the window moves by one such interval at a time"
        );
    }
    let intervals = window.map(|window| nanoseconds(window) / nanoseconds(every));
    if intervals.is_some_and(|intervals| intervals > INTERVALS_MAX) {
        bail_usage!(
            "--window has more than {INTERVALS_MAX} times --every: each reference would be observed as often"
        );
    }
    let new = || -> anyhow::Result<Window> {
        Ok(Window {
            built: estimator.build_one(trace.page_size())?,
            references: 0,
            since: Instant::now(),
        })
    };
    let mut windows = VecDeque::from([new()?]);
    let parts = parts(&trace.trace)
        .with_context(|| format!("cannot open '{}'", printable_path(&trace.trace)))?;
    let stop = stop_flag()?;
    let options = Options {
        format: Some(ids),
        ..trace.options()
    };
    let mut batch = ReferenceBatch::new();
    let mut lines = 0_u64;
    let mut is_first = true;
    let mut tick = Instant::now() + every.get();
    loop {
        let left = tick.saturating_duration_since(Instant::now());
        let part = parts.recv_timeout(left.min(POLL));
        match &part {
            Ok(Ok(text)) => {
                let name = trace.label();
                let mut source = plimsoll_source::read(Cursor::new(text), &name, &options)?;
                while source
                    .next_batch(&mut batch)
                    .map_err(|error| after(lines, error))?
                {
                    for window in &mut windows {
                        window.built.estimator.observe(batch.pages());
                        window.references += batch.len() as u64;
                    }
                }
                lines += text.iter().filter(|&&byte| byte == b'\n').count() as u64;
            }
            Ok(Err(error)) => anyhow::bail!("cannot read '{}': {error}", trace.label()),
            Err(_) => {}
        }
        let is_over =
            matches!(part, Err(RecvTimeoutError::Disconnected)) || stop.load(Ordering::Relaxed);
        if is_over || Instant::now() >= tick {
            if let Some(oldest) = windows.front_mut() {
                let content = report(oldest, trace, view, is_first)?.text(format)?;
                view.output.write(content.as_bytes(), out)?;
                out.flush()?;
                is_first = view.output.path().is_some();
            }
            if is_over {
                return Ok(());
            }
            tick += every.get();
            if let Some(intervals) = intervals {
                if windows.len() as u128 == intervals {
                    windows.pop_front();
                }
                windows.push_back(new()?);
            }
        }
    }
}

/// The error of a part of the stream that is preceded by `lines` lines.
fn after(lines: u64, mut error: SourceError) -> SourceError {
    if let SourceError::Line { line, .. } | SourceError::LineTooLong { line, .. } = &mut error {
        *line += lines;
    }
    error
}

/// A window's curve; with its head for the first one.
fn report(
    window: &mut Window,
    trace: &TraceArgs,
    view: &ViewArgs,
    has_head: bool,
) -> anyhow::Result<FollowedReport> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let unix_ms = u64::try_from(now.unwrap_or_default().as_millis())?;
    let length = window.since.elapsed();
    let shown = view.of(&mut *window.built.estimator, trace.page_size())?;
    Ok(FollowedReport {
        name: trace.stem(),
        page_size: trace.page_size(),
        unix_ms,
        length,
        references: window.references,
        working_set: shown.working_set,
        end: shown.end,
        curve: shown.curve,
        sizes: view.sizes(trace.page_size())?,
        has_head,
    })
}
