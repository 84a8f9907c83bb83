//! More than 2^32 references: a loop, whose curve is known, through the counters of exact LRU, AET and SHARDS.

use std::io::Write;
use std::num::NonZeroUsize;

use anyhow::ensure;
use plimsoll_estimator::{Aet, Estimator, ExactLru, Shards};
use plimsoll_flow::PageCount;

use crate::measure::{Clock, Watch};
use crate::title;
use crate::workload::{Kind, Law};

/// Pages of the loop: a whole number of batches.
const PAGES: u64 = 1 << 16;
const ROUNDS: u64 = (1 << 16) + 8;

/// Runs the loop through each and compares with the formula.
pub(crate) fn run(out: &mut dyn Write) -> anyhow::Result<()> {
    let references = PAGES * ROUNDS;
    title(
        out,
        &format!("{references} references (more than 2^32): a loop over {PAGES} pages"),
    )?;
    let kind = Kind::new(Law::Loop, PAGES);
    let round = kind.batches(PAGES)?;
    let size = NonZeroUsize::new(8192).unwrap_or(NonZeroUsize::MIN);
    let estimators: [(&str, Box<dyn Estimator>, f64); 4] = [
        ("exact LRU", Box::new(ExactLru::new()), 0.0),
        ("AET", Box::new(Aet::new()), 0.0),
        ("SHARDS at 1/100", Box::new(Shards::new(0.01, 1)?), 0.05),
        (
            "SHARDS of 8192 pages",
            Box::new(Shards::fixed_size(size, 1)),
            0.05,
        ),
    ];
    for (name, mut estimator, slack) in estimators {
        let watch = Watch::start(Clock::Cpu);
        for _ in 0..ROUNDS {
            round
                .iter()
                .for_each(|batch| estimator.observe(batch.pages()));
        }
        let curve = estimator.curve()?;
        let speed = references as f64 / 1e6 / watch.seconds();
        // First references miss, all others hit from the loop's size on.
        let expected = PAGES as f64 / references as f64;
        let below = curve.miss_ratio(PageCount(PAGES - 1).scaled(1.0 - slack));
        let above = curve.miss_ratio(PageCount(PAGES).scaled(1.0 + slack));
        let right =
            (below - 1.0).abs() < 1e-9 && (above - expected).abs() < 1e-9 + slack * expected;
        writeln!(
            out,
            "{name:<24} {speed:>8.1} M/s   misses below the loop's size {below:.9}, from it on {above:.9} (formula {expected:.9})"
        )?;
        out.flush()?;
        ensure!(right, "{name} does not agree with the formula");
    }
    Ok(())
}
