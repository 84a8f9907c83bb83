//! `plimsoll mrc`: the miss-ratio curve of a recorded trace.
//!
//! Reads the trace once, batch by batch, into the chosen estimator, and prints
//! the curve as a table, CSV, JSON or a picture. Memory is the estimator's and its curve's.
//! `--compare` puts estimators beside the exact curve instead, and `--partial` and `--merge` cut the work into slices.

mod choice;
mod compare;
mod follow;
mod input;
mod partial;
mod prefix;
mod recorded;
mod report;
mod several;
mod simulated;
mod sized;

use std::io::Write;
use std::path::Path;
use std::str::FromStr;

use anyhow::Context as _;
use plimsoll_estimator::{CounterStream, StreamWindow};
use plimsoll_output::{bail_usage, printable_path};
use plimsoll_protocol::size::Interval;
use plimsoll_source::Column;

use crate::trace_args::{TraceArgs, is_same_file};
use choice::EstimatorArgs;
use follow::FollowArgs;
use input::{curve_of, read};
use partial::PartialArgs;
use report::ViewArgs;
use several::SeveralArgs;
use simulated::SimulationArgs;

/// Print the miss-ratio curve of a recorded trace.
///
/// The miss ratio at a size is the share of references that an LRU memory of that
/// size would miss, first references included.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    estimator: EstimatorArgs,
    /// Compare with the exact curve: error, speed and memory of the estimator, or of all of them
    #[arg(long)]
    compare: bool,
    /// Print the curve of this part of a recorded stream of counters: FROM..TO, in references. With --follow, of the last TIME: 5m
    #[arg(long, value_name = "WINDOW")]
    window: Option<WindowArg>,
    #[command(flatten)]
    follow: FollowArgs,
    #[command(flatten)]
    several: SeveralArgs,
    #[command(flatten)]
    simulation: SimulationArgs,
    /// Use the objects' sizes: curves over bytes, by requests and by requested bytes (estimators lru and shards)
    #[arg(long, conflicts_with_all = ["by", "every", "compare", "stream", "window", "cache_policy"])]
    object_sizes: bool,
    /// With --object-sizes: CSV column of the size in bytes [default: size]
    #[arg(long, value_name = "COLUMN", requires = "object_sizes", conflicts_with_all = ["by", "every", "follow", "compare", "stream", "window", "cache_policy", "prefix", "PartialArgs"])]
    size_column: Option<Column>,
    /// Count a block as a hit only if all earlier blocks of its request hit: key-value caches of language models
    #[arg(long, conflicts_with_all = ["by", "every", "compare", "stream", "window", "cache_policy", "object_sizes"])]
    prefix: bool,
    #[command(flatten)]
    partial: PartialArgs,
    #[command(flatten)]
    view: ViewArgs,
}

/// The part of a stream of which the curve is.
#[derive(Debug, Clone)]
enum WindowArg {
    Counters(StreamWindow),
    Time(Interval),
}

impl FromStr for WindowArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(time) => Ok(Self::Time(time)),
            Err(_) => text.parse().map(Self::Counters),
        }
    }
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.view.check()?;
    args.check_files()?;
    let (trace, view) = (&args.trace, &args.view);
    // Objects are counted in bytes, and partial states have a page size of their own.
    if !args.object_sizes && !args.partial.is_merge() {
        view.sizes(trace.page_size())?;
    }
    if args.follow.is_given() {
        return args.run_follow(out);
    }
    let window = match args.window {
        None => None,
        Some(WindowArg::Counters(window)) => Some(window),
        Some(WindowArg::Time(time)) => {
            bail_usage!("--window {time}: a length of time needs --follow")
        }
    };
    if args.partial.is_given() {
        return args.run_partial(out);
    }
    let recorded = match &*trace.trace {
        path if path == Path::new("-") => None,
        path => CounterStream::open_file(path)
            .with_context(|| format!("cannot read '{}'", printable_path(path)))?,
    };
    if let Some(stream) = recorded {
        let kind = format!("'{}' is a record of counters, not a trace", trace.label());
        if let Some(option) = trace.option_given() {
            bail_usage!("{option}: {kind}");
        }
        if !args.estimator.is_default() || args.compare || !args.is_of_whole_trace() {
            bail_usage!("{kind}: omit the options of estimators");
        }
        return recorded::show(trace, &stream, window, view, out);
    }
    if window.is_some() {
        bail_usage!(
            "--window: '{}' is no stream recorded by --stream",
            trace.label()
        );
    }
    if args.simulation.is_given() {
        return simulated::run(&args.simulation, trace, &args.estimator, view, out);
    }
    if args.prefix {
        return prefix::run(trace, &args.estimator, view, out);
    }
    if args.object_sizes {
        return sized::run(trace, args.size_column.as_ref(), &args.estimator, view, out);
    }
    if !args.several.is_one() {
        if args.compare {
            bail_usage!("--compare takes the whole trace: leave out --by and --every");
        }
        return several::run(&args.several, trace, &args.estimator, view, out);
    }
    let estimators = args.estimator.build(trace.page_size())?;
    if args.compare || args.estimator.is_all() {
        if args.estimator.stream().is_some() {
            bail_usage!("--stream: a comparison records nothing; leave out --compare");
        }
        return compare::run(trace, estimators, view, out);
    }
    if let Some(path) = args.estimator.stream() {
        let options = args.estimator.counter_stacks_options()?;
        return recorded::record(trace, options, path, view, out);
    }
    let mut source = trace.open()?;
    // Just one: where there are several, they were compared.
    for mut built in estimators {
        let estimator = &mut *built.estimator;
        let references = read(&mut source, |batch| estimator.observe(batch.pages()))?;
        let curve = curve_of(trace, estimator, references)?;
        view.write(trace, built.label, references, &curve, out)?;
    }
    Ok(())
}

impl Args {
    /// Whether there is one curve of an estimator alone.
    fn is_of_whole_trace(&self) -> bool {
        self.several.is_one() && !self.simulation.is_given() && !self.object_sizes && !self.prefix
    }

    fn run_follow(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let window = match self.window {
            None => None,
            Some(WindowArg::Time(time)) => Some(time),
            Some(WindowArg::Counters(_)) => {
                bail_usage!("--window: with --follow it is a length of time, such as 5m")
            }
        };
        let Some(every) = self.several.every() else {
            bail_usage!("--follow needs --every");
        };
        if self.trace.trace.starts_with("s3:") {
            bail_usage!("--follow: an object of a store does not grow");
        }
        follow::run(every, window, &self.trace, &self.estimator, &self.view, out)
    }

    /// Maps a slice or merges partial states.
    fn run_partial(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let Self {
            trace,
            estimator,
            partial,
            view,
            ..
        } = self;
        partial.check(view)?;
        if partial.is_merge() {
            if !estimator.is_default() {
                bail_usage!("--merge: partial states have their estimator: omit its options");
            }
            return partial.merge(trace, view, out);
        }
        match partial.path() {
            Some(path) => partial.map(trace, estimator.slice(trace.page_size())?, path),
            None => Ok(()),
        }
    }

    /// Refuses to replace the trace by what is computed from it.
    fn check_files(&self) -> anyhow::Result<()> {
        let output = self.view.output.path();
        for (option, path) in [
            ("--out", output),
            ("--stream", self.estimator.stream()),
            ("--partial", self.partial.path()),
        ] {
            let is_lost = |read: &Path| path.is_some_and(|path| is_same_file(path, read));
            if is_lost(&self.trace.trace) || self.partial.others().iter().any(|read| is_lost(read))
            {
                bail_usage!("{option}: that is a file to read, which would be lost");
            }
        }
        for (option, path) in [
            ("--stream", self.estimator.stream()),
            ("--partial", self.partial.path()),
        ] {
            if path == Some(Path::new("-")) {
                bail_usage!("{option} -: name a file; it is not written to standard output");
            }
        }
        if let (Some(output), Some(stream)) = (output, self.estimator.stream())
            && is_same_file(output, stream)
        {
            bail_usage!("--stream and --out name one file: one of them would be lost");
        }
        Ok(())
    }
}
