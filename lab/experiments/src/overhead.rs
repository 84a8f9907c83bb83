//! Cost of tracing: the guest's own speed, alternately traced and untraced.
//!
//! One guest; windows of equal length alternate, each traced one attached and detached anew at
//! the given settings. The slowdown of a pair is one minus the ratio of the guest's
//! visits a second in the traced window to the mean of its two untraced neighbours, so
//! that drift of a shared machine cancels; the figure is the median over pairs.

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use plimsoll_rig::GuestConfig;

use crate::guests::GuestArgs;
use crate::tracing::trace;
use plimsoll_observe::args::TracingArgs;
use plimsoll_rig::Subject;

use plimsoll_rig::median;

/// Measure how much slower a guest runs while it is traced.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Workload of the guests, as keys of plimsoll-workload
    #[arg(long, default_values_t = default_workloads())]
    workload: Vec<String>,
    /// Memory of the guests, in MiB
    #[arg(long, default_value_t = 256)]
    memory_mib: u64,
    /// Pairs of windows
    #[arg(long, default_value_t = 12)]
    pairs: u32,
    /// Periods in a traced window; untraced windows have the same length
    #[arg(long, default_value_t = 1)]
    periods: u32,
    #[command(flatten)]
    guests: GuestArgs,
    #[command(flatten)]
    tracing: TracingArgs,
}

fn default_workloads() -> Vec<String> {
    ["zipf", "uniform", "sequential"]
        .map(|name| format!("workload={name} mib=128"))
        .to_vec()
}

/// Runs the experiment.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let guests = args.guests.prepare()?;
    let (_, config) = args.tracing.watch()?;
    let length = config.period * args.periods;
    for workload in &args.workload {
        let guest = GuestConfig {
            memory_mib: args.memory_mib,
            ..GuestConfig::new("overhead", workload)
        };
        let Some(mut subject) = guests.boot(guest, out)? else {
            continue;
        };
        let method = args.tracing.method_for(&subject.vm)?;
        let mut untraced = vec![untraced_window(&mut subject, length)?];
        let mut traced = Vec::new();
        let mut estimated = Vec::new();
        for _ in 0..args.pairs {
            let start = Instant::now();
            let stop = AtomicBool::new(false);
            let limit = length.saturating_sub(config.period / 2);
            let observed = trace(&subject.vm, (method, &config), limit, &stop, &mut |_| ())?;
            traced.push(visits_per_second(&mut subject, start, Instant::now())?);
            estimated.extend(
                observed
                    .periods
                    .iter()
                    .map(|traced| traced.observed.period.overhead_ratio),
            );
            untraced.push(untraced_window(&mut subject, length)?);
        }
        let beside = untraced
            .windows(2)
            .map(|pair| f64::midpoint(pair[0], pair[1]));
        let slowdowns: Vec<f64> = traced
            .iter()
            .zip(beside)
            .map(|(traced, beside)| 1.0 - traced / beside)
            .collect();
        // The same measure on windows of which none is traced gives the effect of noise alone.
        let noise = untraced
            .windows(3)
            .map(|three| 1.0 - three[1] / f64::midpoint(three[0], three[2]));
        let noise: Vec<f64> = noise.map(f64::abs).collect();
        writeln!(
            out,
            "{workload} under {}, {} windows of {length:?} each way",
            subject.accelerator(),
            args.pairs
        )?;
        let percent = |values: &[f64]| {
            values
                .iter()
                .map(|value| format!("{:+.1}", value * 100.0))
                .collect::<Vec<_>>()
                .join(" ")
        };
        writeln!(out, "  slowdown of each pair, %: {}", percent(&slowdowns))?;
        writeln!(
            out,
            "  median slowdown          {:+.2} %",
            median(slowdowns) * 100.0
        )?;
        if !noise.is_empty() {
            writeln!(
                out,
                "  median between untraced  ±{:.2} %",
                median(noise) * 100.0
            )?;
        }
        writeln!(
            out,
            "  the tracer's own estimate {:.2} %",
            median(estimated) * 100.0
        )?;
        writeln!(
            out,
            "  pages the guest found wrong: {}",
            subject.listen()?.mismatches()
        )?;
    }
    Ok(())
}

fn untraced_window(subject: &mut Subject, length: Duration) -> anyhow::Result<f64> {
    let start = Instant::now();
    std::thread::sleep(length);
    visits_per_second(subject, start, Instant::now())
}

fn visits_per_second(subject: &mut Subject, from: Instant, to: Instant) -> anyhow::Result<f64> {
    let (visits, took) = subject.listen()?.visits(from, to);
    Ok(visits as f64 / took.as_secs_f64().max(1e-9))
}
