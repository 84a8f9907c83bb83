//! `plimsoll attach`: trace a running VM, or another process or control group, and print what it needs, period by period.
//!
//! Not here: tracing and curves (`plimsoll-observe`), tables, lines and pictures (`plimsoll_report::tracing`).

use std::io::{self, Write};
use std::sync::atomic::Ordering;

use anyhow::{Context as _, bail};
use plimsoll_estimator::live::LiveEstimatorRow;
use plimsoll_observe::args::{TracingArgs, estimators};
use plimsoll_observe::{Observer, ObserverOptions, choose};
use plimsoll_output::{
    Format, OutputArgs, bail_usage, cannot_write, create_log, ignore_suspension, printable,
    stop_flag,
};
use plimsoll_plot::encode;
use plimsoll_trap::{BackendSetting, Refusal, TrapError, Yield, stay_ready};

use plimsoll_protocol::size::Interval;
use plimsoll_report::tracing::TracingReport;
use plimsoll_vm::Target;

/// Trace a running VM, process or control group: print its working set every period, and its miss-ratio curve at the end.
///
/// Works on an unmodified QEMU, which is stopped only for about a millisecond. Most backends need RAM that is shared memory
/// (memfd or tmpfs); idle, damon and write-scan also trace private RAM.
/// Any other process, and a control group with all groups below it, is traced by --backend idle or damon where the kernel has
/// them; the page cache of control groups by --backend page-cache; of processes, --backend write-scan lists the written pages.
/// Ends after --periods, when the target ends, or at Ctrl-C. The target is left as it was. Needs root.
///
/// Ctrl-Z is ignored. If plimsoll stops serving the VM's accesses, as after SIGSTOP, a watchdog process kills it after 150 ms, and the VM goes on untraced.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// VM to trace, by process id, name or UUID; process, by process id (with @ and its start time, only that one); or control
    /// group, by its path, by its name (a systemd unit's), or by the identifier of its container or pod
    #[arg(value_name = "PID|NAME|UUID|cgroup:PATH|cgroup:NAME")]
    target: String,
    #[command(flatten)]
    tracing: TracingArgs,
    /// Estimator of the curve of trapped references [default: lru]
    #[arg(long, value_parser = estimators())]
    estimator: Option<&'static LiveEstimatorRow>,
    /// Show AET and exact LRU on the same references, with their difference
    #[arg(long)]
    compare: bool,
    /// Number of periods [default: until the VM ends]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    periods: Option<u64>,
    /// With -o json, include each period's curve
    #[arg(long)]
    curve: bool,
    /// Time that the curve of --curve covers [default: the period]
    #[arg(long, value_name = "TIME", requires = "curve")]
    window: Option<Interval>,
    /// With -o json, count accesses by region of the VM's RAM, in this number of regions
    #[arg(long, value_name = "CELLS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    heatmap: Option<u32>,
    #[command(flatten)]
    output: OutputArgs,
}

/// It is not an error if the VM ends while it is traced: what was seen until then is reported.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let (mut backends, config) = args.tracing.watch()?;
    if args.estimator.is_some() || args.compare {
        backends.retain(|row| row.yields == Yield::References);
    }
    // Automatic choice for a curve is among backends that give one; a backend that is named is used all the same.
    if args.curve && args.tracing.backend == BackendSetting::Auto {
        backends.retain(|row| row.gives_curve());
    }
    if backends.is_empty() {
        bail_usage!(
            "--estimator and --compare go with --backend trap: the others have one estimator each"
        );
    }
    let format = args.output.format();
    if (args.curve || args.heatmap.is_some()) && format != Format::Json {
        bail_usage!(
            "--curve and --heatmap go with -o json, which has room for them in each period"
        );
    }
    let stop = stop_flag()?;
    ignore_suspension()?;
    let target = Target::find(&args.target)?;
    if target.vm().is_none() && (args.heatmap.is_some() || config.intermittent) {
        bail_usage!("--heatmap and --intermittent go with VMs, whose memory keeps its place");
    }
    let options = ObserverOptions {
        estimator: args.estimator,
        is_compared: args.compare,
        reach: args.window.map(Interval::get),
        heat_cells: args.heatmap,
    };
    let choice = match args.tracing.backend {
        BackendSetting::Auto => Some(choose(&target, &backends, &config)?),
        BackendSetting::Method(_) => None,
    };
    let backend = choice.as_ref().map_or(backends[0], |choice| choice.row);
    let mut observer = Observer::attach(&target, backend.method, &config, &options)?;
    // Without the right to, the backend's watchdog bounds what a late tracer can do to the VM.
    let _ = stay_ready();

    let picture = format.is_picture();
    let path = args.output.path().filter(|_| !picture);
    // What is written to standard output names itself.
    let named = |result: anyhow::Result<()>| match path {
        Some(path) => result.with_context(|| cannot_write(path)),
        None => result,
    };
    let mut file = None;
    if let Some(path) = path {
        let log = create_log(path).map(|log| file = Some(log));
        named(log.map_err(Into::into))?;
    }
    let mut nowhere = io::sink();
    let rows: &mut dyn Write = match &mut file {
        Some(file) => file,
        // A picture on standard output stands there alone.
        None if picture && args.output.path().is_none() => &mut nowhere,
        None => out,
    };
    let tracing = &args.tracing;
    let mut report = TracingReport::new(tracing, &target, backend, choice.as_ref(), &observer)
        .with(args.compare, args.curve);
    named(report.begin(format, &observer, rows).map_err(Into::into))?;
    let mut failure = None;
    let ended = loop {
        if stop.load(Ordering::Relaxed) || args.periods == Some(report.totals.periods) {
            break None;
        }
        match observer.period(&stop) {
            Ok(period) => named(report.period(format, &period, rows))?,
            Err(
                end @ (TrapError::VmGone { .. }
                | TrapError::ProcessGone { .. }
                | TrapError::GroupGone { .. }
                | TrapError::Interrupted(
                    Refusal::MemoryTransfer { .. } | Refusal::UserfaultInUse,
                )),
            ) => break Some(end),
            Err(error) => {
                failure = Some(
                    anyhow::Error::new(error).context(format!("{target} is no longer traced")),
                );
                break None;
            }
        }
    };
    let (curve, curves) = (observer.curve(), observer.curves());
    let set = observer.working_set();
    let compared = curves.as_ref();
    match ended {
        // What was seen stands; there is nothing to detach from.
        Some(end) => eprintln!("plimsoll: {}", printable(&end.to_string())),
        None if failure.is_none() => failure = observer.detach().err().map(Into::into),
        None => drop(observer),
    }
    if failure.is_none() || report.totals.periods > 0 {
        named(report.end(format, curve.as_ref(), set, compared, rows))?;
    }
    if picture {
        match curve {
            Some(curve) => {
                let svg = report.chart(&curve, compared).to_svg();
                args.output.write(&encode(svg, format)?, out)?;
            }
            None if failure.is_none() => bail!("no curve: {}", report.no_curve()),
            None => {}
        }
    }
    failure.map_or(Ok(()), Err)
}
