//! `mrc --by` and `--every`: several curves from one reading of a trace.
//!
//! Devices have an estimator each, which sees the references that `--device` alone would leave. Intervals follow each
//! other, so that one estimator is made after another.

use std::io::Write;

use clap::ValueEnum;
use plimsoll_estimator::{ByGroup, ByInterval, Estimator, group_threads};
use plimsoll_flow::{CurveError, PageSize};
use plimsoll_output::bail_usage;
use plimsoll_plot::Figure as _;
use plimsoll_protocol::size::Interval;
use plimsoll_report::trace::{Part, SeveralReport};
use plimsoll_source::{Column, Grouping, Options};

use super::choice::EstimatorArgs;
use super::input::{no_curve, read};
use super::report::ViewArgs;
use crate::trace_args::TraceArgs;

/// What has a curve of its own. Flatten it into a verb's `Args`.
#[derive(Debug, clap::Args)]
pub struct SeveralArgs {
    /// Print a curve for each device, volume, tenant or client, from one reading (memory: that of an estimator for each)
    #[arg(long, conflicts_with = "every", value_name = "WHAT")]
    by: Option<By>,
    /// Print a curve for each interval of the trace's time: 1h, 30m, 10s
    #[arg(long, value_name = "TIME")]
    every: Option<Interval>,
    /// With --every: CSV column of the time in seconds [default: time]
    #[arg(long, value_name = "COLUMN", requires = "every", conflicts_with_all = ["by", "follow", "cache_policy", "object_sizes", "size_column", "prefix", "PartialArgs"])]
    time_column: Option<Column>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum By {
    /// The device, volume, tenant or client that the format records
    #[value(aliases = ["vm", "volume", "tenant", "client"])]
    Device,
}

impl SeveralArgs {
    /// Whether there is one curve alone.
    pub(super) fn is_one(&self) -> bool {
        self.by.is_none() && self.every.is_none()
    }

    /// Length of an interval of time.
    pub(super) fn every(&self) -> Option<Interval> {
        self.every
    }
}

/// A device's or an interval's curve, cut down to the selected points.
fn part(
    name: String,
    from_us: Option<u64>,
    references: u64,
    estimator: &mut dyn Estimator,
    view: &ViewArgs,
    page_size: PageSize,
) -> anyhow::Result<Part> {
    let shown = view.of(estimator, page_size)?;
    Ok(Part {
        name,
        from_us,
        references,
        working_set: shown.working_set,
        end: shown.end,
        curve: shown.curve,
    })
}

/// Reads the trace and prints its curves.
pub(super) fn run(
    args: &SeveralArgs,
    trace: &TraceArgs,
    estimator: &EstimatorArgs,
    view: &ViewArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    if estimator.is_all() || estimator.stream().is_some() {
        bail_usage!(
            "--by and --every print curves of one estimator: name it, and leave out --stream"
        );
    }
    let make = || estimator.build_one(trace.page_size());
    let method = make()?.label;
    // The options have been checked by the first one.
    let make = || make().expect("made before").estimator;
    let mut several = SeveralReport {
        name: trace.stem(),
        method,
        page_size: trace.page_size(),
        parts: Vec::new(),
        every: args.every,
        late: 0,
        memory_bytes: 0,
        sizes: view.sizes(trace.page_size())?,
    };
    match args.every {
        Some(every) => {
            let options = Options {
                times: true,
                time_column: args.time_column.clone(),
                ..trace.options()
            };
            by_interval(&mut several, every, trace, &options, &make, view)?;
        }
        None => by_device(&mut several, trace, &make, view)?,
    }
    if several.parts.is_empty() {
        return Err(no_curve(trace, CurveError::Empty, 0));
    }
    several.write(&view.output, out)?;
    let unsampled = several.parts.iter().filter(|part| part.curve.is_none());
    match unsampled.count() {
        0 => {}
        count => eprintln!(
            "plimsoll: {count} of {} parts have no curve, because none of their references was sampled; a higher --rate sees more",
            several.parts.len()
        ),
    }
    Ok(())
}

type Make<'a> = dyn Fn() -> Box<dyn Estimator> + Sync + 'a;

fn by_device(
    several: &mut SeveralReport,
    trace: &TraceArgs,
    make: &Make,
    view: &ViewArgs,
) -> anyhow::Result<()> {
    let mut source = trace.open_with(&Options {
        groups: Some(Grouping::Device),
        ..trace.options()
    })?;
    let mut all = ByGroup::new(make);
    read(&mut source, |batch| {
        all.observe(batch.pages(), &batch.details().groups);
    })?;
    let held_bytes = all.memory_bytes();
    let found = all.finish(|references, estimator| {
        // A device without references was in requests that made none.
        let part = (references > 0).then(|| {
            part(
                String::new(),
                None,
                references,
                estimator,
                view,
                trace.page_size(),
            )
        });
        (part.transpose(), estimator.memory_bytes())
    });
    // Of those that are made in the end there is one at a time on each thread.
    let largest = found.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
    several.memory_bytes = held_bytes + group_threads() * largest;
    for ((part, _), name) in found.into_iter().zip(source.groups()) {
        several
            .parts
            .extend(part?.map(|part| Part { name, ..part }));
    }
    several
        .parts
        .sort_by_key(|part| std::cmp::Reverse(part.references));
    Ok(())
}

fn by_interval(
    several: &mut SeveralReport,
    every: Interval,
    trace: &TraceArgs,
    options: &Options,
    make: &Make,
    view: &ViewArgs,
) -> anyhow::Result<()> {
    let mut source = trace.open_with(options)?;
    let every_us = u64::try_from(every.get().as_micros()).unwrap_or(u64::MAX);
    let mut parts = Vec::new();
    let mut all = ByInterval::new(every_us, make, |from_us, references, estimator| {
        let name = Part::start(from_us);
        let page_size = trace.page_size();
        parts.push(part(
            name,
            Some(from_us),
            references,
            estimator,
            view,
            page_size,
        ));
    });
    read(&mut source, |batch| {
        all.observe(batch.pages(), &batch.details().times_us);
    })?;
    (several.late, several.memory_bytes) = all.finish();
    several.parts = parts.into_iter().collect::<anyhow::Result<_>>()?;
    Ok(())
}
