//! Changes of phase: whether pages are touched at another rate since some time than before it.
//!
//! A sample belongs to the recent phase from the split on, whenever it was armed. At each waiting time after which samples
//! were touched, the log-rank test compares the touches in the recent phase with those expected if the rate were that of
//! before; the sums of the differences over rising waiting times are a random walk. Its largest distance from 0, in
//! standard deviations of its end, is the statistic: unlike the end alone it notices distributions that cross each
//! other. For large samples of one phase it exceeds x with a probability of at most 4 (1 - Φ(x)), the maximum of a
//! Brownian motion; [`DEVIATIONS_MIN`] makes that 1 in 10 000 for the splits of one period together, or one false
//! alarm in 14 hours of periods of 5 s. A false alarm costs the older samples.
//!
//! With few touches on one side, as of a VM that was idle until the split or is since, that approximation does not hold, and the
//! statistic is the signed root of the deviance: of n touches of which m are expected in the recent phase, at least, or at most,
//! k are in it with a probability of at most exp(-n K(k/n, m/n)), where K is the divergence of two Bernoulli distributions
//! (\[Hoeffding63\]). For the same value of the statistic that is at most seven times as likely as above.
//!
//! A working set that grows touches many waiting samples at once, which dates the change. A single pass over other pages does
//! the same and is no new phase: therefore the samples armed since the split must differ from the others too
//! ([`ARMED_DEVIATIONS_MIN`]), which for this are observed until the split only.
//!
//! Source: \[Fleming87\], \[Hoeffding63\].
//! Cost: sorting the samples twice, and a pass over them for each split.

use std::time::Duration;

use plimsoll_flow::FirstTouch;

/// Number of splits: the newest half of the window, and shares of it each of which is smaller by 2^(1/4).
const SPLITS: i32 = 21;
/// Number of splits by which a change is dated, on either side of the one that found it.
const DATES: i32 = 24;
/// Minimum statistic: 4 (1 - Φ(4.75)) is 1 in 250 000, for each of 21 splits.
const DEVIATIONS_MIN: f64 = 4.75;
/// Minimum statistic of the samples armed since the split, measured: a growth is still noticed with 100 samples a period.
const ARMED_DEVIATIONS_MIN: f64 = 3.0;
/// Number of touches on each side of a split from which the normal approximation holds.
const TOUCHES_MIN: usize = 20;

/// The start of the present phase, if it began after `from`.
pub(super) fn last_change<'a>(
    samples: impl Iterator<Item = &'a FirstTouch>,
    from: Duration,
    now: Duration,
) -> Option<Duration> {
    let window = now.saturating_sub(from).as_secs_f64();
    let samples = Samples::new(samples.map(|sample| Sample::new(sample, now)).collect());
    let ratio = 0.5_f64.powf(0.25);
    let splits = (0..SPLITS).map(|index| window / 2.0 * ratio.powi(index));
    let tests: Vec<_> = splits.map(|ago| (ago, samples.deviation(ago))).collect();
    let peaks = (0..tests.len()).filter_map(|at| {
        let (ago, deviation) = tests[at];
        let beside = [at.checked_sub(1), Some(at + 1)].map(|at| at.and_then(|at| tests.get(at)));
        let is_peak = beside
            .into_iter()
            .flatten()
            .all(|other| deviation >= other.1);
        (is_peak && deviation >= DEVIATIONS_MIN).then_some((ago, deviation))
    });
    // Not the strongest of all: that may be a pass before the change.
    let changes =
        peaks.filter(|&(ago, _)| samples.armed_apart(ago).deviation(ago) >= ARMED_DEVIATIONS_MIN);
    let (ago, _) = changes.reduce(stronger)?;
    let between =
        (-DATES..=DATES).map(|index| ago * ratio.powf(f64::from(index) / f64::from(DATES)));
    let dates = between.map(|ago| (ago, samples.deviation(ago)));
    let (ago, _) = dates.reduce(stronger)?;
    Some(now.saturating_sub(Duration::from_secs_f64(ago)))
}

fn stronger(one: (f64, f64), other: (f64, f64)) -> (f64, f64) {
    if other.1 > one.1 { other } else { one }
}

/// A sample in a test, in seconds.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// How long ago it was armed.
    armed_ago: f64,
    /// Until it was touched or no longer observed.
    waited: f64,
    is_touched: bool,
}

impl Sample {
    fn new(sample: &FirstTouch, now: Duration) -> Self {
        let until = |time: Duration| time.saturating_sub(sample.armed);
        let least = until(sample.untouched_until);
        let touched = sample
            .touched_by
            .map(|by| least + until(by).saturating_sub(least) / 2);
        Self {
            armed_ago: now.saturating_sub(sample.armed).as_secs_f64(),
            waited: touched.unwrap_or(least).as_secs_f64(),
            is_touched: touched.is_some(),
        }
    }

    /// The time waited until the split; 0 if it was armed after it.
    fn entry(&self, ago: f64) -> f64 {
        (self.armed_ago - ago).max(0.0)
    }

    /// Whether it was armed or waited after the split.
    fn is_recent(&self, ago: f64) -> bool {
        let entry = self.entry(ago);
        entry == 0.0 || self.waited > entry
    }
}

/// The samples, by rising time since they were armed, and by rising time waited.
#[derive(Debug)]
struct Samples {
    by_armed: Vec<Sample>,
    by_waited: Vec<Sample>,
}

impl Samples {
    fn new(samples: Vec<Sample>) -> Self {
        let (mut by_armed, mut by_waited) = (samples.clone(), samples);
        by_armed.sort_unstable_by(|one, other| one.armed_ago.total_cmp(&other.armed_ago));
        by_waited.sort_unstable_by(|one, other| one.waited.total_cmp(&other.waited));
        Self {
            by_armed,
            by_waited,
        }
    }

    /// The same, with those armed before the split observed until then only.
    fn armed_apart(&self, ago: f64) -> Self {
        let censored = self.by_armed.iter().map(|sample| {
            let entry = sample.entry(ago);
            match entry > 0.0 && sample.waited > entry {
                true => Sample {
                    waited: entry,
                    is_touched: false,
                    ..*sample
                },
                false => *sample,
            }
        });
        Self::new(censored.collect())
    }

    /// The statistic for a split.
    fn deviation(&self, ago: f64) -> f64 {
        let is_recent = |sample: &&Sample| sample.is_recent(ago);
        let touches = self.by_waited.iter().filter(|sample| sample.is_touched);
        let touched_recently = touches.clone().filter(is_recent).count();
        let touched_before = touches.count() - touched_recently;
        let entries = self.by_armed.iter().filter(is_recent);
        let mut entries = entries.map(|sample| sample.entry(ago)).peekable();
        // Of all samples, and of the recent ones, those that wait at present.
        let (mut all, mut recent) = (self.by_waited.len() as f64, 0.0);
        let (mut walk, mut furthest, mut variance) = (0.0_f64, 0.0_f64, 0.0);
        let (mut counted, mut expected) = (0.0, 0.0);
        for equal in self
            .by_waited
            .chunk_by(|one, other| one.waited == other.waited)
        {
            let time = equal[0].waited;
            // One that enters as another is touched was there before.
            while entries
                .next_if(|&entry| entry < time || entry == 0.0)
                .is_some()
            {
                recent += 1.0;
            }
            let count = |counts: &dyn Fn(&&Sample) -> bool| {
                equal.iter().filter(|sample| counts(sample)).count() as f64
            };
            let touched = count(&|sample| sample.is_touched);
            if touched > 0.0 && all > 1.0 {
                let share = recent / all;
                counted += touched;
                expected += touched * share;
                walk += count(&|sample| sample.is_touched && is_recent(sample)) - touched * share;
                furthest = furthest.max(walk.abs());
                variance += touched * share * (1.0 - share) * (all - touched) / (all - 1.0);
            }
            recent -= count(&is_recent);
            all -= equal.len() as f64;
        }
        if touched_recently.min(touched_before) < TOUCHES_MIN {
            return root_of_deviance(walk + expected, counted, expected);
        }
        if variance > 0.0 {
            furthest / variance.sqrt()
        } else {
            0.0
        }
    }
}

/// The root of the deviance if `recent` of `all` touches are in the recent phase, and `expected` were expected there.
fn root_of_deviance(recent: f64, all: f64, expected: f64) -> f64 {
    let part = |touched: f64, expected: f64| match touched > 0.5 {
        true => touched * (touched / expected).ln(),
        // None, but for rounding.
        false => 0.0,
    };
    let divergence = part(recent, expected) + part(all - recent, all - expected);
    // Not finite where all samples are on one side, so that nothing can be compared.
    match divergence.is_finite() {
        true => (2.0 * divergence.max(0.0)).sqrt(),
        false => 0.0,
    }
}
