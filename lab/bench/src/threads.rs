//! Two threads of exact LRU beside one, in turn.
//!
//! The ratio is taken within a round: the load of the machine changes from second to second. CPU time shows what two
//! threads do in addition, whatever the load.

use std::io::Write;
use std::num::NonZeroUsize;

use plimsoll_estimator::{Estimator, ParallelLru};
use plimsoll_flow::ReferenceBatch;

use crate::measure::{Clock, Watch, at_least, median};
use crate::workload::{Kind, Law};
use crate::{Cli, title};

const BAR: f64 = 1.8;

/// Wall and CPU time of a run, in seconds.
struct Times {
    wall: f64,
    cpu: f64,
}

pub(crate) fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "Exact LRU offline, one and two threads in turn: {} M references from memory, medians of {} rounds",
            cli.millions, cli.runs
        ),
    )?;
    writeln!(
        out,
        "\n{:<18} {:>12} {:>12} {:>14} {:>12}",
        "stream", "1 thread, ms", "2, ms", "wall, 1 / 2", "CPU, 2 / 1"
    )?;
    for (law, pages) in [
        (Law::Uniform, 1_000_000),
        (Law::Zipf, 1_000_000),
        (Law::Uniform, 64 << 10),
        (Law::Zipf, 64 << 10),
    ] {
        let kind = Kind::new(law, pages);
        if !cli.wants(&kind.to_string()) {
            continue;
        }
        let batches = kind.batches(cli.millions * 1_000_000)?;
        let mut rounds = Vec::new();
        for _ in 0..cli.runs.max(1) {
            rounds.push((timed(&batches, 1)?, timed(&batches, 2)?));
        }
        let of = |figure: fn(&(Times, Times)) -> f64| median(rounds.iter().map(figure).collect());
        let ratio = of(|(one, two)| one.wall / two.wall);
        writeln!(
            out,
            "{:<18} {:>12.0} {:>12.0} {ratio:>14.2} {:>12.2}  {}",
            kind.to_string(),
            of(|(one, _)| one.wall * 1e3),
            of(|(_, two)| two.wall * 1e3),
            of(|(one, two)| two.cpu / one.cpu),
            at_least(ratio, BAR, " x"),
        )?;
        out.flush()?;
    }
    Ok(())
}

fn timed(batches: &[ReferenceBatch], threads: usize) -> anyhow::Result<Times> {
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    let (wall, cpu) = (Watch::start(Clock::Wall), Watch::start(Clock::Cpu));
    let mut lru = ParallelLru::new(threads);
    batches.iter().for_each(|batch| lru.observe(batch.pages()));
    lru.curve()?;
    Ok(Times {
        wall: wall.seconds(),
        cpu: cpu.seconds(),
    })
}
