//! A stream of page numbers as it comes: at intervals, the curve of the last while.
//!
//! Lines are read by a thread of their own and observed within a fraction of an interval. Each estimator begins at a tick and is shown and
//! dropped a window later, so there is one for each interval of the window, and a reference costs that many observations. Until
//! the first window has passed, the curve is that of all references so far.
//!
//! A writer that is faster than the estimators waits in its pipe: nothing is lost here. What traced events are lost before the
//! pipe is for their tracer to report.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Cursor, Read, Write};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use plimsoll_estimator::registry::BuiltEstimator;
use plimsoll_flow::{CurveError, MissRatioCurve, ReferenceBatch, Source as _, WorkingSet};
use plimsoll_output::{Format, bail_usage, grouped, local_time, printable_path, stop_flag};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::curve_json::{CurveJson, FollowedCurve};
use plimsoll_protocol::size::{ByteSize, Interval};
use plimsoll_source::{Options, decompressed};

use super::choice::EstimatorArgs;
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// Maximum number of intervals in a window.
const INTERVALS_MAX: u128 = 100;
/// Bytes that are read at once, and parts of the stream that may wait.
const PART_BYTES: usize = 64 << 10;
const PARTS_MAX: usize = 16;
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
    let intervals = window.map(|window| window.get().as_nanos().div_ceil(every.get().as_nanos()));
    if intervals.is_some_and(|intervals| intervals > INTERVALS_MAX) {
        bail_usage!(
            "--window has more than {INTERVALS_MAX} times --every: each reference would be observed as often"
        );
    }
    let new = || -> anyhow::Result<Window> {
        Ok(Window {
            built: estimator.build_one(trace.page_bytes)?,
            references: 0,
            since: Instant::now(),
        })
    };
    let mut windows = VecDeque::from([new()?]);
    let parts = parts(&trace.trace)?;
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
                let name = match lines {
                    0 => trace.label(),
                    lines => format!("{} after line {lines}", trace.label()),
                };
                let mut source = plimsoll_source::read(Cursor::new(text), &name, &options)?;
                while source.next_batch(&mut batch)? {
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
                let content = show(oldest, trace, view, format, is_first)?;
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

/// The decompressed stream in parts that end with a line, from a thread that reads it.
fn parts(path: &Path) -> anyhow::Result<Receiver<io::Result<Vec<u8>>>> {
    let input: Box<dyn Read + Send> = match path == Path::new("-") {
        true => Box::new(io::stdin()),
        false => Box::new(
            File::open(path).with_context(|| format!("cannot open '{}'", printable_path(path)))?,
        ),
    };
    let (sender, parts) = mpsc::sync_channel(PARTS_MAX);
    thread::Builder::new()
        .name("stream".to_owned())
        .spawn(move || match decompressed(input) {
            Ok((input, _)) => send_parts(input, &sender),
            Err(error) => {
                let _ = sender.send(Err(error));
            }
        })?;
    Ok(parts)
}

fn send_parts(mut input: impl Read, parts: &SyncSender<io::Result<Vec<u8>>>) {
    let mut rest: Vec<u8> = Vec::new();
    loop {
        let begin = rest.len();
        rest.resize(begin + PART_BYTES, 0);
        let read = match input.read(&mut rest[begin..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            result => result.map(Some),
        };
        rest.truncate(begin + read.as_ref().map_or(0, |read| read.unwrap_or(0)));
        let part = match read {
            Ok(Some(0)) => {
                if !rest.is_empty() {
                    let _ = parts.send(Ok(rest));
                }
                return;
            }
            Ok(_) => match rest[begin..].iter().rposition(|&byte| byte == b'\n') {
                Some(end) => {
                    let later = rest.split_off(begin + end + 1);
                    Ok(std::mem::replace(&mut rest, later))
                }
                // A line that never ends is no line.
                None if rest.len() > PART_BYTES => Err(io::Error::other("a line is too long")),
                None => continue,
            },
            Err(error) => Err(error),
        };
        let is_last = part.is_err();
        if parts.send(part).is_err() || is_last {
            return;
        }
    }
}

/// A window's curve as text; `with_head` for the first one.
fn show(
    window: &mut Window,
    trace: &TraceArgs,
    view: &ViewArgs,
    format: Format,
    with_head: bool,
) -> anyhow::Result<String> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let unix_ms = u64::try_from(now.unwrap_or_default().as_millis())?;
    let elapsed = window.since.elapsed();
    let curve = match window.built.estimator.curve() {
        Ok(curve) => Some(curve),
        Err(CurveError::Empty) => None,
        Err(error) => return Err(error.into()),
    };
    let working_set = curve
        .as_ref()
        .and_then(|curve| curve.size_for(WorkingSet::MISS_RATIO));
    let curve = curve
        .map(|curve| view.select(&curve, trace.page_bytes))
        .transpose()?;
    let points = || curve.iter().flat_map(MissRatioCurve::points);
    let mut text = String::new();
    match format {
        Format::Json => {
            let curve = curve
                .as_ref()
                .map(|curve| CurveJson::new(trace.stem(), trace.page_bytes, None, curve));
            let followed = FollowedCurve {
                schema: SCHEMA,
                unix_ms,
                window_ms: u64::try_from(elapsed.as_millis())?,
                references: window.references,
                curve,
            };
            text = serde_json::to_string(&followed)? + "\n";
        }
        Format::Csv => {
            if with_head {
                text.push_str("unix_ms,references,size_pages,miss_ratio,low,high\n");
            }
            for point in points() {
                let (size, ratio) = (point.size, point.miss_ratio);
                text.push_str(&format!(
                    "{unix_ms},{},{size},{ratio},{},{}\n",
                    window.references, point.low, point.high
                ));
            }
        }
        _ => {
            let sizes = view.sizes(trace.page_bytes)?;
            let bytes = |pages: plimsoll_flow::PageCount| {
                ByteSize(pages.to_bytes(trace.page_bytes)).rounded()
            };
            if with_head {
                text.push_str(
                    "time                   references    per second   working set  least misses",
                );
                for &size in &sizes {
                    text.push_str(&format!("  {:>10}", bytes(size)));
                }
                text.push('\n');
            }
            let least = points().last().map_or(f64::NAN, |point| point.miss_ratio);
            let set = match (&curve, working_set) {
                (None, _) => String::new(),
                (Some(_), Some(size)) => bytes(size),
                (Some(_), None) => "more".to_owned(),
            };
            let rate = window.references as f64 / elapsed.as_secs_f64();
            text.push_str(&format!(
                "{}  {:>12}  {:>12}  {set:>12}",
                local_time(unix_ms),
                grouped(window.references as f64),
                grouped(rate.round())
            ));
            if curve.is_some() {
                text.push_str(&format!("  {:>10.2} %", least * 100.0));
                for point in points().filter(|_| !sizes.is_empty()) {
                    text.push_str(&format!("  {:>8.2} %", point.miss_ratio * 100.0));
                }
            }
            text.push('\n');
            text = text.replace('\u{a0}', " ");
        }
    }
    Ok(text)
}
