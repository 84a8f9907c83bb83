//! Speed of the estimators over references in memory, and of a trap.

use std::io::Write;
use std::time::Instant;

use plimsoll_estimator::{Aet, Estimator, ExactLru, Shards};
use plimsoll_flow::{PageCount, ReferenceBatch};
use plimsoll_source::Source;
use plimsoll_source::synthetic::{Pattern, Workload};
use plimsoll_trap::{HandlerCpu, measure_trap_cost};

use super::median;

/// Measure references a second of each estimator, one core, and what a trap costs.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// References in each run, in millions
    #[arg(long, default_value_t = 20)]
    millions: u64,
    /// Runs of each; the median counts
    #[arg(long, default_value_t = 3)]
    runs: u32,
}

/// Runs the experiment.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let references = args.millions * 1_000_000;
    let patterns = [
        (
            "zipf 1.0 over 2 M",
            Pattern::Zipf {
                pages: PageCount(2_000_000),
                alpha: 1.0,
                references,
            },
        ),
        (
            "uniform over 1 M",
            Pattern::Uniform {
                pages: PageCount(1_000_000),
                references,
            },
        ),
        (
            "loop over 1 M",
            Pattern::Loop {
                pages: PageCount(1_000_000),
                references,
            },
        ),
    ];
    writeln!(
        out,
        "million references a second, one core, median of {}\n",
        args.runs
    )?;
    writeln!(
        out,
        "{:<20} {:>9} {:>12} {:>12} {:>9} {:>10}",
        "references", "lru", "shards .01", "shards .001", "aet", "aet .01"
    )?;
    for (name, pattern) in patterns {
        let batches = batches(&Workload::of(pattern))?;
        let speed = |make: &dyn Fn() -> anyhow::Result<Box<dyn Estimator>>| -> anyhow::Result<f64> {
            let mut speeds = Vec::new();
            for _ in 0..args.runs.max(1) {
                let mut estimator = make()?;
                let start = Instant::now();
                batches.iter().for_each(|batch| estimator.observe(batch));
                estimator.curve()?;
                speeds.push(references as f64 / 1e6 / start.elapsed().as_secs_f64());
            }
            Ok(median(speeds))
        };
        writeln!(
            out,
            "{name:<20} {:>9.1} {:>12.1} {:>12.1} {:>9.1} {:>10.1}",
            speed(&|| Ok(Box::new(ExactLru::new())))?,
            speed(&|| Ok(Box::new(Shards::new(0.01, 1)?)))?,
            speed(&|| Ok(Box::new(Shards::new(0.001, 1)?)))?,
            speed(&|| Ok(Box::new(Aet::new())))?,
            speed(&|| Ok(Box::new(Aet::sampled(0.01, 1)?)))?,
        )?;
    }
    for (name, cpu) in [
        ("on the accessing thread's CPU", HandlerCpu::Follow),
        ("anywhere", HandlerCpu::Any),
    ] {
        match measure_trap_cost(cpu) {
            Ok(cost) => writeln!(
                out,
                "\na trap with its handler {name}: {:.1} µs, of which {:.1} µs outside the handler",
                cost.whole.as_secs_f64() * 1e6,
                cost.outside_handler.as_secs_f64() * 1e6
            )?,
            Err(error) => writeln!(out, "\nSKIPPED: the cost of a trap: {error}")?,
        }
    }
    Ok(())
}

/// Makes a workload's references in memory.
fn batches(workload: &Workload) -> anyhow::Result<Vec<ReferenceBatch>> {
    let mut source = workload.source()?;
    let mut batches = Vec::new();
    loop {
        let mut batch = ReferenceBatch::new();
        if !source.next_batch(&mut batch)? {
            return Ok(batches);
        }
        batches.push(batch);
    }
}
