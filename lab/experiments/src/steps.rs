//! The step benchmark of \[AET\] §4.2: whether the working set is found, and how soon after a change.

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use plimsoll_flow::{PageCount, PageSize, WorkingSetBound};
use plimsoll_rig::GuestConfig;

use crate::guests::GuestArgs;
use crate::tracing::{TracedPeriod, judge, trace};
use plimsoll_observe::args::TracingArgs;
use plimsoll_protocol::size::ByteSize;

use plimsoll_rig::median;

/// Trace a guest that scans 32, 96, 160, 224, 160, 96, 32 MiB and compare the estimated working set with that.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How long the guest stays at each size, in periods
    #[arg(long, default_value_t = 4)]
    periods_per_step: u32,
    #[command(flatten)]
    guests: GuestArgs,
    #[command(flatten)]
    tracing: TracingArgs,
}

/// Working sets of the benchmark in turn.
pub const STEPS_MIB: [u64; 7] = [32, 96, 160, 224, 160, 96, 32];

/// Configures a guest that steps through `steps_mib`, staying `step` at each.
pub fn stepping_guest(name: &str, steps_mib: &[u64], step: Duration) -> GuestConfig {
    let list: Vec<_> = steps_mib.iter().map(u64::to_string).collect();
    let workload = format!(
        "workload=steps steps_mib={} step_ms={}",
        list.join(","),
        step.as_millis()
    );
    let largest = steps_mib.iter().copied().max().unwrap_or_default();
    GuestConfig {
        memory_mib: largest + 96,
        ..GuestConfig::new(name, &workload)
    }
}

/// Runs the experiment.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let (_, config) = args.tracing.watch()?;
    let step = config.period * args.periods_per_step;
    let guest = stepping_guest("steps", &STEPS_MIB, step);
    let Some(mut subject) = args.guests.prepare()?.boot(guest, out)? else {
        return Ok(());
    };
    let method = args.tracing.method_for(&subject.vm)?;
    writeln!(
        out,
        "Step benchmark under {}: backend {method}, {} s at each size, period {:?}\n",
        subject.accelerator(),
        step.as_secs(),
        config.period
    )?;
    let limit = step * u32::try_from(STEPS_MIB.len())? - config.period / 2;
    let observed = trace(
        &subject.vm,
        (method, &config),
        (limit, None),
        &AtomicBool::new(false),
        &mut |_: &TracedPeriod| (),
    )?;
    let steps = subject.listen()?.steps();
    let judged = judge(&observed.periods, &steps);

    writeln!(out, "true size      found    error")?;
    for period in &judged {
        let size = |pages: PageCount| ByteSize(pages.to_bytes(PageSize::FOUR_KIB)).rounded();
        let found = period.found.map_or_else(|| "bound only".to_owned(), size);
        let error = period
            .error()
            .map_or_else(String::new, |error| format!("{:+.1} %", error * 100.0));
        let first = if period.first {
            "  first period after the change"
        } else {
            ""
        };
        writeln!(
            out,
            "{:>9}  {found:>9}  {error:>7}{first}",
            size(period.truth)
        )?;
    }
    let noticed: Vec<_> = noticed_after(&observed.periods, &steps)
        .map(|after| {
            after.map_or("never".to_owned(), |after| {
                format!("{:.0} s", after.as_secs_f64())
            })
        })
        .collect();
    writeln!(
        out,
        "\nfrom a change to the first estimate within 10 % of the new size: {}",
        noticed.join(", ")
    )?;
    let errors: Vec<f64> = judged
        .iter()
        .filter_map(|period| Some(period.error()?.abs()))
        .collect();
    let within = |wanted: &dyn Fn(bool) -> bool| {
        let all: Vec<_> = judged
            .iter()
            .filter(|period| wanted(period.first))
            .collect();
        let good = all
            .iter()
            .filter(|period| period.error().is_some_and(|error| error.abs() <= 0.05));
        format!("{} of {}", good.count(), all.len())
    };
    writeln!(
        out,
        "within 5 % of the truth: {} steady periods",
        within(&|_| true)
    )?;
    writeln!(
        out,
        "  of the first after a change: {}",
        within(&|first| first)
    )?;
    if !errors.is_empty() {
        let worst = errors.iter().copied().fold(0.0, f64::max);
        writeln!(
            out,
            "median error {:.2} %, worst {:.2} %",
            median(errors) * 100.0,
            worst * 100.0
        )?;
    }
    let overhead: Vec<f64> = observed
        .periods
        .iter()
        .map(|traced| traced.observed.period.overhead_ratio)
        .collect();
    if !overhead.is_empty() {
        writeln!(
            out,
            "tracing took {:.2} % of the VM's CPU time (median of periods)",
            median(overhead.clone()) * 100.0
        )?;
    }
    if config.intermittent {
        let rested = observed.periods.iter();
        let rested = rested.filter(|traced| traced.observed.is_resting).count();
        let mean = overhead.iter().sum::<f64>() / overhead.len().max(1) as f64;
        writeln!(
            out,
            "tracing rested in {rested} of {} periods and took {:.3} % of the VM's CPU time in the mean",
            overhead.len(),
            mean * 100.0
        )?;
    }
    writeln!(
        out,
        "pages the guest found wrong: {}",
        subject.listen()?.mismatches()
    )?;
    Ok(())
}

/// By step: the time from its begin to the end of the first period with an estimate within 10 % of its size.
fn noticed_after(
    periods: &[TracedPeriod],
    steps: &[(Instant, PageCount)],
) -> impl Iterator<Item = Option<Duration>> {
    let ends = steps.iter().skip(1).map(|&(at, _)| Some(at)).chain([None]);
    steps.iter().zip(ends).map(move |(&(begin, truth), end)| {
        let of_step = periods
            .iter()
            .filter(|traced| traced.end > begin && end.is_none_or(|end| traced.end <= end));
        let is_right = |traced: &&TracedPeriod| {
            let set = traced.observed.working_set;
            set.is_some_and(|set| {
                set.bound == WorkingSetBound::Estimate
                    && (set.size.0 as f64 / truth.0 as f64 - 1.0).abs() <= 0.1
            })
        };
        let mut right = of_step.filter(is_right);
        right.next().map(|traced| traced.end - begin)
    })
}
