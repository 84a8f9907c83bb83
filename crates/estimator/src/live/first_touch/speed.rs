//! The speed of the VM while samples waited: time as if it had always been the same.
//!
//! A VM's time is CPU time, but what it does in a second of it varies with what else uses its core, caches and memory.
//! Then a loop's passes differ in length and the edge of its curve would be a slope. Samples that were armed together
//! waited through the same stretch of the VM, so that they share a speed: if those of one batch waited half as long again as
//! the distribution of all leads to expect, each of them, then the VM was slower.
//!
//! The distribution of the batches' speeds, relative to the mean, is estimated from all of them, beginning with a normal one of
//! their logarithm. Times are multiplied by the mean of the batch's speed under it (empirical Bayes, \[Robbins56\]), and the
//! distribution of times is estimated again, some rounds long. This is done only where it makes all observations more
//! likely than one speed does, by [`GAIN_MIN`] in the logarithm. For pages that are touched at random it does not: a batch of some
//! samples determines their mean only roughly.
//!
//! Cost: half a millisecond for 1500 samples, without the estimates of the distribution.

use plimsoll_flow::Whole as _;

use super::cells::Time;
use super::median;

/// Standard deviation of the logarithm of a batch's speed at first: passes of a loop in CPU time differed as much on a busy
/// host.
const DEVIATION: f64 = 0.15;
/// Rounds in which the distribution of speeds is estimated.
const PRIOR_ROUNDS: u32 = 20;
/// Speeds that are tried: this many on either side of the mean, in steps of this logarithm.
const SPEEDS: i32 = 9;
const STEP: f64 = 0.05;
/// Minimum gain in the logarithm of the likelihood by speeds that differ.
pub(super) const GAIN_MIN: f64 = 10.0;
/// Gain from which on the distribution is estimated again.
pub(super) const GAIN_TRIED: f64 = 2.0;
/// Samples belong to a batch if they were armed within this share of the median wait, and at least this time, in seconds.
const BATCH_SHARE: f64 = 0.25;
const BATCH_MIN: f64 = 2e-3;
/// A distribution is looked up at times this fine, in logarithms.
const FINE_STEP: f64 = STEP / 5.0;
/// Range of the logarithms that are looked up: beyond 10 orders of magnitude below the longest time nothing differs.
const LOGARITHMS_MAX: f64 = 23.0;
/// Stands for a probability of 0, of which a logarithm is taken.
const NEARLY_ZERO: f64 = 1e-12;

/// Samples in batches of a common speed.
#[derive(Debug)]
pub(super) struct Batches {
    /// By batch: the indices of its samples.
    batches: Vec<Vec<usize>>,
    /// By sample.
    waits: Vec<Wait>,
}

/// What is known of a time, in logarithms of it.
#[derive(Debug, Clone, Copy)]
enum Wait {
    Exactly(f64),
    Between(f64, f64),
    Above(f64),
}

/// The speeds that fit a distribution.
#[derive(Debug)]
pub(super) struct Speeds {
    /// By sample: the factor of its times.
    pub(super) of_samples: Vec<f64>,
    /// Logarithm of the likelihood of all samples at these speeds, and at one.
    pub(super) likelihood: f64,
    pub(super) at_one_speed: f64,
}

/// A distribution at even logarithms of time.
#[derive(Debug)]
struct Table {
    from: f64,
    /// Logarithm of the slope, the share, and the logarithm of the rest.
    rows: Vec<[f64; 3]>,
}

impl Batches {
    /// Of samples with the times at which they were armed; `None` if hardly any were armed together.
    pub(super) fn new(samples: &[(f64, Time)]) -> Option<Self> {
        let waits = samples.iter().filter_map(|(_, time)| time.upto);
        let span = (median(waits.collect())? * BATCH_SHARE).max(BATCH_MIN);
        let mut order: Vec<usize> = (0..samples.len()).collect();
        order.sort_by(|&one, &other| samples[one].0.total_cmp(&samples[other].0));
        let mut batches: Vec<Vec<usize>> = Vec::new();
        for index in order {
            match batches.last_mut() {
                Some(batch) if samples[index].0 <= samples[batch[0]].0 + span => batch.push(index),
                _ => batches.push(vec![index]),
            }
        }
        let waits = samples.iter().map(|(_, time)| Wait::of(time)).collect();
        (batches.len() * 2 <= samples.len()).then_some(Self { batches, waits })
    }

    /// The speeds of all batches under a distribution: the share touched within a time.
    pub(super) fn speeds(&self, distribution: impl Fn(f64) -> f64) -> Speeds {
        let logarithms: Vec<f64> = (-SPEEDS..=SPEEDS).map(|at| f64::from(at) * STEP).collect();
        let table = Table::new(&self.waits, distribution);
        let batches = self.batches.iter().map(|batch| {
            let at_speeds = logarithms.iter().map(|&speed| {
                let of = |&index: &usize| table.log_likelihood(self.waits[index], speed);
                batch.iter().map(of).sum()
            });
            Likelihoods::new(at_speeds.collect())
        });
        let batches: Vec<Likelihoods> = batches.collect();
        let first = logarithms
            .iter()
            .map(|logarithm| (-(logarithm / DEVIATION).powi(2) / 2.0).exp());
        let mut prior = normalised(first.collect());
        for _ in 0..PRIOR_ROUNDS {
            let mut sums = vec![0.0; prior.len()];
            for batch in &batches {
                let all = batch.sum(&prior);
                for ((sum, one), prior) in sums.iter_mut().zip(&batch.shares).zip(&prior) {
                    *sum += one * prior / all;
                }
            }
            prior = normalised(sums);
        }
        let middle = logarithms.len() / 2;
        let mut speeds = Speeds {
            of_samples: vec![0.0; self.waits.len()],
            likelihood: 0.0,
            at_one_speed: batches.iter().map(|batch| batch.at_one_speed(middle)).sum(),
        };
        for (batch, indices) in batches.iter().zip(&self.batches) {
            let all = batch.sum(&prior);
            speeds.likelihood += batch.most + all.ln();
            let weighted = batch.shares.iter().zip(&prior).zip(&logarithms);
            let mean: f64 = weighted.map(|((one, prior), at)| one * prior * at).sum();
            for &index in indices {
                speeds.of_samples[index] = mean / all;
            }
        }
        // The mean speed stays that of the distribution.
        let mean = speeds.of_samples.iter().sum::<f64>() / self.waits.len() as f64;
        for speed in &mut speeds.of_samples {
            *speed = (*speed - mean).exp();
        }
        speeds
    }
}

impl Wait {
    fn of(time: &Time) -> Self {
        let logarithm = |time: f64| time.max(NEARLY_ZERO).ln();
        match time.upto {
            // Within two rows of the table that is an exact time.
            Some(upto) if logarithm(upto) - logarithm(time.above) < 2.0 * FINE_STEP => {
                Self::Exactly(f64::midpoint(logarithm(time.above), logarithm(upto)))
            }
            Some(upto) => Self::Between(logarithm(time.above), logarithm(upto)),
            None => Self::Above(logarithm(time.above)),
        }
    }

    fn ends(self) -> [f64; 2] {
        match self {
            Self::Exactly(at) | Self::Above(at) => [at, at],
            Self::Between(from, to) => [from, to],
        }
    }
}

impl Table {
    fn new(waits: &[Wait], distribution: impl Fn(f64) -> f64) -> Self {
        let ends = || waits.iter().flat_map(|wait| wait.ends());
        let reach = f64::from(SPEEDS) * STEP + FINE_STEP;
        let most = ends().fold(f64::NEG_INFINITY, f64::max) + reach;
        let least = ends().fold(f64::INFINITY, f64::min) - reach;
        // A time below that is as good as none.
        let from = least.max(most - LOGARITHMS_MAX);
        let mut rows = Vec::new();
        let mut at = from;
        while at <= most {
            let share = distribution(at.exp());
            // The mean over the row, so that an edge within it is half an edge.
            let (low, high) = ((at - FINE_STEP / 2.0).exp(), (at + FINE_STEP / 2.0).exp());
            let slope = (distribution(high) - distribution(low)) / (high - low);
            let logarithm = |probability: f64| probability.max(NEARLY_ZERO).ln();
            rows.push([logarithm(slope), share, logarithm(1.0 - share)]);
            at += FINE_STEP;
        }
        Self { from, rows }
    }

    fn at(&self, logarithm: f64) -> &[f64; 3] {
        let place = ((logarithm - self.from) / FINE_STEP).clamp(0.0, (self.rows.len() - 1) as f64);
        let place = usize::whole(place + 0.5);
        &self.rows[place.min(self.rows.len() - 1)]
    }

    fn log_likelihood(&self, wait: Wait, speed: f64) -> f64 {
        match wait {
            Wait::Exactly(at) => self.at(at + speed)[0] + speed,
            Wait::Between(from, to) => {
                let between = self.at(to + speed)[1] - self.at(from + speed)[1];
                between.max(NEARLY_ZERO).ln()
            }
            Wait::Above(at) => self.at(at + speed)[2],
        }
    }
}

/// The likelihoods of a batch's samples at each speed: shares of the largest, and the logarithm of that.
#[derive(Debug)]
struct Likelihoods {
    shares: Vec<f64>,
    most: f64,
}

impl Likelihoods {
    /// Of logarithms.
    fn new(mut logarithms: Vec<f64>) -> Self {
        let most = logarithms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        logarithms
            .iter_mut()
            .for_each(|one| *one = (*one - most).exp());
        Self {
            shares: logarithms,
            most,
        }
    }

    /// Weighted by a prior.
    fn sum(&self, prior: &[f64]) -> f64 {
        let weighted = self.shares.iter().zip(prior);
        weighted
            .map(|(one, prior)| one * prior)
            .sum::<f64>()
            .max(f64::MIN_POSITIVE)
    }

    /// The logarithm at the speed of 1, the `middle` one.
    fn at_one_speed(&self, middle: usize) -> f64 {
        self.most + self.shares[middle].max(f64::MIN_POSITIVE).ln()
    }
}

fn normalised(mut weights: Vec<f64>) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|weight| *weight /= sum);
    weights
}
