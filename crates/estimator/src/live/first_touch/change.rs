//! Changes of phase: whether recently armed samples are touched at other times than older ones.
//!
//! At each time at which samples were touched, the log-rank test compares the touches among the recent samples with those
//! expected if they were like all others; the sums of the differences over rising times are a random walk. Its
//! largest distance from 0, in standard deviations of its end, is the statistic: unlike the end alone it notices
//! distributions that cross each other. For large samples of one phase it exceeds x with a probability of at most
//! 4 (1 - Φ(x)), the maximum of a Brownian motion; [`DEVIATIONS_MIN`] makes that 1 in 10 000 for the splits of one
//! period together, or one false alarm in 14 hours of periods of 5 s. A false alarm costs the older samples.
//!
//! Older samples are censored at the split, because what happens to them later belongs to the recent phase.
//!
//! Source: \[Fleming87\].
//! Cost: sorting the samples once for each split.

use std::time::Duration;

use plimsoll_flow::FirstTouch;

/// Shares of the window that are compared with the rest of it.
const RECENT: [f64; 4] = [0.5, 0.25, 0.125, 0.0625];
/// Minimum statistic: 4 (1 - Φ(4.37)) is 1 in 40 000, for each of four splits.
const DEVIATIONS_MIN: f64 = 4.37;
/// Minimum number of touched samples on each side of a split, below which the normal approximation does not hold.
const TOUCHES_MIN: usize = 20;

/// The start of the present phase, if it began after `from`.
pub(super) fn last_change<'a>(
    samples: &(impl Iterator<Item = &'a FirstTouch> + Clone),
    from: Duration,
    now: Duration,
) -> Option<Duration> {
    let window = now.saturating_sub(from);
    let splits = RECENT.map(|share| now.saturating_sub(window.mul_f64(share)));
    let tests = splits.map(|split| (split, deviation(samples.clone(), split)));
    let found = tests.into_iter().filter(|test| test.1 >= DEVIATIONS_MIN);
    let strongest = found.reduce(|one, other| if other.1 > one.1 { other } else { one });
    strongest.map(|(split, _)| split)
}

/// A sample in a test: seconds until it was touched or no longer observed.
struct Entry {
    seconds: f64,
    is_touched: bool,
    is_recent: bool,
}

impl Entry {
    fn new(sample: &FirstTouch, split: Duration) -> Self {
        let is_recent = sample.armed >= split;
        let until = |time: Duration| time.saturating_sub(sample.armed);
        let least = until(sample.untouched_until);
        let touched = sample
            .touched_by
            .map(|by| least + until(by).saturating_sub(least) / 2);
        let end = if is_recent {
            Duration::MAX
        } else {
            until(split)
        };
        Self {
            seconds: touched.unwrap_or(least).min(end).as_secs_f64(),
            is_touched: touched.is_some_and(|touched| touched <= end),
            is_recent,
        }
    }
}

/// The statistic for the samples armed before and after a split; 0 if one side has too few touches.
fn deviation<'a>(samples: impl Iterator<Item = &'a FirstTouch>, split: Duration) -> f64 {
    let mut entries: Vec<_> = samples.map(|sample| Entry::new(sample, split)).collect();
    let touches = |recent| {
        let counts = |entry: &&Entry| entry.is_touched && entry.is_recent == recent;
        entries.iter().filter(counts).count()
    };
    if touches(false).min(touches(true)) < TOUCHES_MIN {
        return 0.0;
    }
    entries.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    let mut recent = entries.iter().filter(|entry| entry.is_recent).count() as f64;
    let mut all = entries.len() as f64;
    let (mut walk, mut furthest, mut variance) = (0.0_f64, 0.0_f64, 0.0);
    for equal in entries.chunk_by(|one, other| one.seconds == other.seconds) {
        let count = |counts: &dyn Fn(&Entry) -> bool| {
            equal.iter().filter(|&entry| counts(entry)).count() as f64
        };
        let touched = count(&|entry| entry.is_touched);
        if touched > 0.0 && all > 1.0 {
            let share = recent / all;
            walk += count(&|entry| entry.is_touched && entry.is_recent) - touched * share;
            furthest = furthest.max(walk.abs());
            variance += touched * share * (1.0 - share) * (all - touched) / (all - 1.0);
        }
        recent -= count(&|entry| entry.is_recent);
        all -= equal.len() as f64;
    }
    if variance > 0.0 {
        furthest / variance.sqrt()
    } else {
        0.0
    }
}
