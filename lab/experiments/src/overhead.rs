//! Cost of tracing: CPU time per visit of the guest, alternately traced and untraced.
//!
//! One guest; windows of equal length alternate, each traced one attached and detached anew at the given settings. The cost of a pair is
//! the CPU time per visit in the traced window over the mean of its two untraced neighbours, less one: drift of a shared
//! machine cancels, and time in which the host runs something else does not count. A trapped vCPU sleeps while the
//! tracer works, so that what the VM loses is its own CPU time and the tracer's.

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use plimsoll_observe::args::TracingArgs;
use plimsoll_observe::compare::cpu_time;
use plimsoll_rig::{GuestConfig, Subject};
use plimsoll_vm::QemuVm;
use serde::Serialize;

use crate::guests::GuestArgs;
use crate::results::{Conditions, KeepArgs, Measurement, Repetition, ResultSet, Unit};
use crate::tracing::trace;

/// Measure how much CPU time tracing adds to the work of a guest.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Workload of the guests, as keys of plimsoll-workload
    #[arg(long, default_values_t = default_workloads())]
    workload: Vec<String>,
    /// Memory of the guests, in MiB
    #[arg(long, default_value_t = 256)]
    memory_mib: u64,
    /// Pairs of windows, 10 or more
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(10..))]
    pairs: u32,
    /// Periods in a traced window; untraced windows have the same length
    #[arg(long, default_value_t = 1)]
    periods: u32,
    #[command(flatten)]
    guests: GuestArgs,
    #[command(flatten)]
    tracing: TracingArgs,
    #[command(flatten)]
    keep: KeepArgs,
}

fn default_workloads() -> Vec<String> {
    ["zipf", "uniform", "sequential"]
        .map(|name| format!("workload={name} mib=128"))
        .to_vec()
}

/// CPU time per visit in a window, in ns: of the vCPUs, and of the tracer.
#[derive(Debug, Clone, Copy, Serialize)]
struct Cost {
    vcpu_ns: f64,
    tracer_ns: f64,
}

impl Cost {
    fn both_ns(self) -> f64 {
        self.vcpu_ns + self.tracer_ns
    }
}

/// Costs of windows that alternate: one untraced window more than traced ones.
#[derive(Debug, Default, Serialize)]
struct Windows {
    untraced: Vec<Cost>,
    traced: Vec<Cost>,
    /// What the tracer reported of each traced window.
    reported: Vec<f64>,
}

impl Windows {
    /// Relative additions, one of each pair: of the vCPUs' time, or of both.
    fn added(&self, of: impl Fn(Cost) -> f64) -> Vec<f64> {
        let beside = self.untraced.windows(2);
        let beside = beside.map(|two| f64::midpoint(of(two[0]), of(two[1])));
        let pairs = self.traced.iter().zip(beside);
        pairs
            .map(|(traced, beside)| of(*traced) / beside - 1.0)
            .collect()
    }

    /// The same of untraced windows among themselves: what noise alone does.
    fn noise(&self) -> Vec<f64> {
        let three = self.untraced.windows(3);
        let of = Cost::both_ns;
        three
            .map(|three| of(three[1]) / f64::midpoint(of(three[0]), of(three[2])) - 1.0)
            .collect()
    }
}

/// Runs the experiment.
///
/// # Errors
///
/// Why a guest did not come up or could not be traced.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let guests = args.guests.prepare()?;
    let (_, config) = args.tracing.watch()?;
    let length = config.period * args.periods;
    let mut all = Vec::new();
    let mut about = None;
    let mut conditions = None;
    for workload in &args.workload {
        let guest = GuestConfig {
            memory_mib: args.memory_mib,
            ..GuestConfig::new("overhead", workload)
        };
        let Some(mut subject) = guests.boot(guest, out)? else {
            continue;
        };
        if conditions.is_none() {
            let guest = format!("one vCPU, {} MiB", args.memory_mib);
            conditions = Some(Conditions::begin(&subject.accelerator(), &guest)?);
        }
        let method = args.tracing.method_for(&subject.vm)?;
        about = Some(method);
        let mut windows = Windows::default();
        let untraced = |subject: &mut Subject| {
            cost_of(subject, || {
                std::thread::sleep(length);
                Ok(())
            })
        };
        windows.untraced.push(untraced(&mut subject)?);
        for pair in 1..=args.pairs {
            eprintln!("{workload}: pair {pair} of {}", args.pairs);
            let vm = subject.vm.clone();
            let mut reported = Vec::new();
            windows.traced.push(cost_of(&mut subject, || {
                let limit = length.saturating_sub(config.period / 2);
                let stop = AtomicBool::new(false);
                let observed = trace(&vm, (method, &config), (limit, None), &stop, &mut |_| ())?;
                let periods = observed.periods.iter();
                reported.extend(periods.map(|traced| traced.observed.period.overhead_ratio));
                Ok(())
            })?);
            let mean = reported.iter().sum::<f64>() / reported.len().max(1) as f64;
            windows.reported.push(mean);
            windows.untraced.push(untraced(&mut subject)?);
        }
        let wrong = subject.listen()?.mismatches();
        anyhow::ensure!(wrong == 0, "the guest found {wrong} pages wrong");
        all.push((workload.clone(), windows));
    }
    let (Some(conditions), Some(method)) = (conditions, about) else {
        anyhow::bail!("no guest has any of these workloads");
    };
    let set = ResultSet {
        title: "CPU time that tracing adds".to_owned(),
        method: format!(
            "Windows of {} s alternate, traced by {method} and untraced, {} of each; attaching and detaching are within the traced ones. Of a pair, the CPU time per \
             visit of the guest, traced over untraced, less one. The interval is that of the mean of the pairs, at 95 %.",
            length.as_secs_f64(),
            args.pairs,
        ),
        command: "./dev lab overhead".to_owned(),
        measurements: measurements(&all),
        limits: vec![
            "Time in which neither the vCPU nor the tracer runs, as until a processor is free for the one that was woken, is not in it.".to_owned(),
        ],
        raw: serde_json::to_value(&all)?,
        ..ResultSet::new(
            "overhead",
            conditions.ended()?,
            (args.pairs.into(), Repetition::Pair),
        )
    };
    args.keep.keep(set, Vec::new(), out)
}

fn measurements(all: &[(String, Windows)]) -> Vec<Measurement> {
    type Values = fn(&Windows) -> Vec<f64>;
    // Those of noise have two windows in common, so that their mean has nearly no error, whatever they are.
    let topics: [(&str, Values, bool); 4] = [
        (
            "Added CPU time of vCPU and tracer",
            |windows| windows.added(Cost::both_ns),
            true,
        ),
        (
            "Added CPU time of the vCPU alone",
            |windows| windows.added(|cost| cost.vcpu_ns),
            true,
        ),
        (
            "The same among untraced windows: noise",
            Windows::noise,
            false,
        ),
        (
            "What the tracer reports",
            |windows| windows.reported.clone(),
            true,
        ),
    ];
    let mut made = Vec::new();
    for (what, values, has_interval) in topics {
        for (workload, windows) in all {
            let values = values(windows);
            made.push(Measurement {
                item: "AET table 1".to_owned(),
                what: what.to_owned(),
                of: workload.trim_start_matches("workload=").to_owned(),
                column: String::new(),
                unit: Unit::Percent,
                remark: if has_interval {
                    interval(&values)
                } else {
                    String::new()
                },
                values: values.into_iter().map(Some).collect(),
                paper: String::new(),
            });
        }
    }
    made
}

/// 97.5 % quantile of Student's distribution with so many degrees of freedom, 1 or more: its expansion for many, and 0.1 % above it
/// from 7 on.
fn student(degrees: usize) -> f64 {
    const FEW: [f64; 6] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447];
    const NORMAL: f64 = 1.96;
    let expansion = |many: f64| {
        let first = (NORMAL.powi(3) + NORMAL) / (4.0 * many);
        let second =
            (5.0 * NORMAL.powi(5) + 16.0 * NORMAL.powi(3) + 3.0 * NORMAL) / (96.0 * many * many);
        NORMAL + first + second
    };
    FEW.get(degrees - 1)
        .copied()
        .unwrap_or_else(|| 1.001 * expansion(degrees as f64))
}

/// Mean and 95 % interval of the mean.
fn interval(values: &[f64]) -> String {
    let count = values.len() as f64;
    if values.len() < 2 {
        return String::new();
    }
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    // Neighbours have an untraced window in common, so that they are not independent: the covariance of each two counts twice.
    let neighbours = values.windows(2);
    let products: f64 = neighbours
        .map(|two| (two[0] - mean) * (two[1] - mean))
        .sum();
    let variance = (squares + 2.0 * products.max(0.0)) / (count - 1.0) / count;
    let half = student(values.len() - 1) * variance.sqrt();
    let percent = |share: f64| format!("{:+.2}", share * 100.0);
    format!(
        "mean {} % ({} to {})",
        percent(mean),
        percent(mean - half),
        percent(mean + half)
    )
}

/// CPU time per visit while `window` runs.
fn cost_of(
    subject: &mut Subject,
    window: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Cost> {
    let before = (Instant::now(), vcpu_time(&subject.vm)?, cpu_time());
    window()?;
    let (end, vcpu, own) = (Instant::now(), vcpu_time(&subject.vm)?, cpu_time());
    let (start, vcpu_before, own_before) = before;
    let (visits, took) = subject.listen()?.visits(start, end);
    anyhow::ensure!(visits > 0, "the guest completed no round in a window");
    // Whole rounds only are counted: they are that part of the window.
    let part = took.as_secs_f64() / (end - start).as_secs_f64();
    let per_visit = |time: Duration| time.as_nanos() as f64 * part / visits as f64;
    Ok(Cost {
        vcpu_ns: per_visit(vcpu.saturating_sub(vcpu_before)),
        tracer_ns: per_visit(own.saturating_sub(own_before)),
    })
}

fn vcpu_time(vm: &QemuVm) -> anyhow::Result<Duration> {
    vm.vcpu_time()
        .ok_or_else(|| anyhow::anyhow!("the vCPUs of VM {} are unknown", vm.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drift_of_the_machine_cancels() {
        let cost = |vcpu_ns| Cost {
            vcpu_ns,
            tracer_ns: 0.0,
        };
        let windows = Windows {
            untraced: [100.0, 110.0, 120.0].map(cost).to_vec(),
            traced: vec![
                Cost {
                    vcpu_ns: 106.0,
                    tracer_ns: 1.1,
                },
                cost(115.0),
            ],
            reported: vec![0.0; 2],
        };
        let both = windows.added(Cost::both_ns);
        assert!(
            (both[0] - 0.02).abs() < 1e-9 && both[1].abs() < 1e-9,
            "{both:?}"
        );
        assert!(windows.noise()[0].abs() < 1e-9);
        assert_eq!(interval(&[0.01, 0.03]), "mean +2.00 % (-10.71 to +14.71)");
    }
}
