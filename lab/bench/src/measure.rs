//! Clocks, medians, and the comparison of estimators.

use std::time::{Duration, Instant};

use plimsoll_estimator::{Estimator, ExactLru};
use plimsoll_flow::{MissRatioCurve, PageCount, ReferenceBatch};
use plimsoll_observe::compare::cpu_time;

/// Which clock is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    /// CPU time of the process: other programs on the machine do not count.
    Cpu,
    /// Time on the wall: where several threads work at once.
    Wall,
}

/// A running measurement.
#[derive(Debug)]
pub(crate) struct Watch {
    clock: Clock,
    cpu: Duration,
    wall: Instant,
}

impl Watch {
    pub(crate) fn start(clock: Clock) -> Self {
        Self {
            clock,
            cpu: cpu_time(),
            wall: Instant::now(),
        }
    }

    pub(crate) fn seconds(&self) -> f64 {
        match self.clock {
            Clock::Cpu => cpu_time().saturating_sub(self.cpu).as_secs_f64(),
            Clock::Wall => self.wall.elapsed().as_secs_f64(),
        }
    }
}

/// The middle of `values`, which must not be empty.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

/// References in memory and their exact curve.
pub(crate) struct Stream {
    pub(crate) batches: Vec<ReferenceBatch>,
    pub(crate) references: u64,
    pub(crate) exact: MissRatioCurve,
    pub(crate) footprint: u64,
}

impl Stream {
    pub(crate) fn new(batches: Vec<ReferenceBatch>) -> anyhow::Result<Self> {
        let mut lru = ExactLru::new();
        batches.iter().for_each(|batch| lru.observe(batch.pages()));
        Ok(Self {
            references: batches.iter().map(|batch| batch.len() as u64).sum(),
            exact: lru.curve()?,
            footprint: lru.distinct(),
            batches,
        })
    }

    /// Even sizes up to the footprint, a thousand less those below `from`.
    fn sizes(&self, from: PageCount) -> impl Iterator<Item = PageCount> {
        let sizes = (1..=1000).map(|step| PageCount(self.footprint * step / 1000));
        sizes.filter(move |&size| size >= from)
    }
}

/// Results of an estimator on a stream: medians of speed, means of errors, over its runs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Result {
    /// Million references a second.
    pub(crate) speed: f64,
    pub(crate) mean_absolute_error: f64,
    /// Outside 1 % of a size.
    pub(crate) max_error: f64,
    pub(crate) memory_bytes: usize,
}

/// Runs an estimator on a stream `runs` times, and compares its curve at sizes `from` up; `make` gets the
/// number of the run.
pub(crate) fn run(
    stream: &Stream,
    runs: u32,
    clock: Clock,
    from: PageCount,
    make: &dyn Fn(u64) -> Box<dyn Estimator>,
) -> anyhow::Result<Result> {
    let runs = runs.max(1);
    let mut speeds = Vec::new();
    let mut result = Result::default();
    for run in 0..runs {
        let mut estimator = make(u64::from(run) + 1);
        let watch = Watch::start(clock);
        stream
            .batches
            .iter()
            .for_each(|batch| estimator.observe(batch.pages()));
        let curve = estimator.curve()?;
        speeds.push(stream.references as f64 / 1e6 / watch.seconds());
        result.memory_bytes = result.memory_bytes.max(estimator.memory_bytes());
        let strict = curve.distance(&stream.exact, stream.sizes(from));
        let forgiving = curve.distance_up_to(&stream.exact, stream.sizes(from), 0.01);
        if let (Some(strict), Some(forgiving)) = (strict, forgiving) {
            result.mean_absolute_error += strict.mean_absolute_error / f64::from(runs);
            result.max_error += forgiving.max_absolute_error / f64::from(runs);
        }
    }
    result.speed = median(speeds);
    Ok(result)
}

/// Returns whether a figure with an upper limit of `bar` meets it.
pub(crate) fn at_most(figure: f64, bar: f64, unit: &str) -> String {
    judged(figure <= bar, &format!("<= {bar}{unit}"))
}

/// Returns whether a figure with a lower limit of `bar` meets it.
pub(crate) fn at_least(figure: f64, bar: f64, unit: &str) -> String {
    judged(figure >= bar, &format!(">= {bar}{unit}"))
}

fn judged(reached: bool, bar: &str) -> String {
    let verdict = if reached { "reached" } else { "NOT REACHED" };
    format!("bar {bar}: {verdict}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
