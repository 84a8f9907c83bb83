//! The distribution of a quantity of which some values are censored: only known to exceed a bound.
//!
//! The product-limit estimator processes the values in ascending order. At each observed value (an
//! *event*), the share `events / at risk` of the weight still *at risk* (values not below it, censored or
//! not) ends, and the rest continues:
//!
//! ```text
//!     S(v) = P(X > v) = product over event values u <= v of (1 - events(u) / at_risk(u))
//! ```
//!
//! An observation censored at `v` ("more than `v`") leaves the risk set just after `v`, so events of the same
//! value come first. The estimate is unbiased if censoring is independent of
//! the value. Without censoring it is the empirical distribution.
//!
//! The standard error is Greenwood's (1926), for weights, which assumes that observations are
//! independent. References to one page are not; if the sample was
//! divided into parts by page (`window`), their spread is used instead.
//!
//! Source: [KM58].
//! Cost: O(log values) to record. Values above 2048 are stored to 1/1024, as in `histogram`, so that
//! merging for weeks stays within some ten thousand cells.

use std::collections::BTreeMap;

use plimsoll_flow::Whole as _;

use super::LiveWindow;
use crate::parts::histogram::{bucket_of, floor_of};

/// Observations, some of them censored, and their product-limit estimate.
///
/// ```
/// use plimsoll_estimator::Survival;
///
/// let mut survival = Survival::new();
/// survival.record(10, 1.0);
/// survival.record_censored(15, 1.0); // more than 15
/// survival.record(20, 2.0);
/// assert_eq!(survival.tail(), [(10, 0.75), (20, 0.0)]);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Survival {
    /// By bucket of the values.
    cells: BTreeMap<usize, Cell>,
    observations: u64,
    events: u64,
    largest: u64,
    /// The distributions of disjoint parts of the sample, each estimated alone; may be empty.
    parts: Vec<Self>,
    clock: Clock,
}

/// Observations of a window that must be at risk for an estimate.
const AT_RISK_MIN: f64 = 5.0;

/// A number of references to all pages, and the time in which the VM made them.
#[derive(Debug, Clone, Copy, Default)]
struct Clock {
    references: f64,
    /// The same at least and at most, as far as the time is not known.
    limits: [f64; 2],
    seconds: f64,
}

/// Observations within one bucket.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    /// Sum of the events' weights.
    events: f64,
    /// Sum of the squares of these weights.
    events_squared: f64,
    /// Weighted sum of the differences between the events and the bucket's smallest value.
    excess: f64,
    /// Sum of the censored observations' weights.
    censored: f64,
}

impl Cell {
    fn add(&mut self, other: Self, factor: f64) {
        self.events += other.events * factor;
        self.events_squared += other.events_squared * factor * factor;
        self.excess += other.excess * factor;
        self.censored += other.censored * factor;
    }
}

/// The estimate at one event value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SurvivalStep {
    pub(crate) value: u64,
    /// P(X > value).
    pub(crate) share_above: f64,
    /// Standard error of that share.
    pub(crate) standard_error: f64,
}

impl Survival {
    /// Returns an empty distribution.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records a value with a weight above 0.0; any other weight is ignored.
    pub fn record(&mut self, value: u64, weight: f64) {
        if is_weight(weight) {
            self.record_repeatedly(value, weight, 1);
        }
    }

    /// Records a value `times` times, at least once, each time with the given weight.
    pub(crate) fn record_repeatedly(&mut self, value: u64, weight: f64, times: u64) {
        let bucket = bucket_of(value);
        let events = weight * times as f64;
        let cell = Cell {
            events,
            events_squared: weight * events,
            excess: events * (value - floor_of(bucket)) as f64,
            censored: 0.0,
        };
        self.cells.entry(bucket).or_default().add(cell, 1.0);
        self.observations += times;
        self.events += times;
        self.largest = self.largest.max(value);
    }

    /// Records that some value is larger than `value`; `u64::MAX` is infinity.
    pub fn record_censored(&mut self, value: u64, weight: f64) {
        if is_weight(weight) {
            self.cells.entry(bucket_of(value)).or_default().censored += weight;
            self.observations += 1;
            if value < u64::MAX {
                self.largest = self.largest.max(value);
            }
        }
    }

    /// Adds all of `other`'s observations, with their weights multiplied by `factor`, above 0.0.
    pub fn merge(&mut self, other: &Self, factor: f64) {
        self.merge_by(other, &|_| factor);
    }

    /// Adds the estimate of a window, as [`resolved`](Self::resolved), weighted by its number of references; without a
    /// clock, by `seconds`.
    pub(crate) fn pool(&mut self, window: &Self, seconds: f64) {
        self.merge_by(window, &|part| {
            if part.clock.seconds > 0.0 {
                part.clock.references
            } else {
                seconds
            }
        });
    }

    fn merge_by(&mut self, other: &Self, factor_of: &dyn Fn(&Self) -> f64) {
        // A window without references has a time, too.
        self.clock.references += other.clock.references;
        for (limit, other) in self.clock.limits.iter_mut().zip(other.clock.limits) {
            *limit += other;
        }
        self.clock.seconds += other.clock.seconds;
        let factor = factor_of(other);
        let adds = is_weight(factor) && !other.is_empty();
        if self.is_empty() && self.parts.len() != other.parts.len() {
            self.parts = vec![Self::new(); other.parts.len()];
        }
        if self.parts.len() == other.parts.len() {
            for (part, other) in self.parts.iter_mut().zip(&other.parts) {
                part.merge_by(other, factor_of);
            }
        } else if adds {
            // Parts of only some of the observations do not represent the whole.
            self.parts.clear();
        }
        if !adds {
            return;
        }
        for (&bucket, &cell) in &other.cells {
            self.cells.entry(bucket).or_default().add(cell, factor);
        }
        self.observations += other.observations;
        self.events += other.events;
        self.largest = self.largest.max(other.largest);
    }

    /// Returns the estimate itself as observations with a total weight of 1: each step as a value with its
    /// share, and the remainder above all of them as one censored observation at the largest.
    ///
    /// Use this with [`merge`](Self::merge) for observations from different conditions, such
    /// as phases of a VM. A censored value then depends on its condition, and
    /// must be resolved among observations of the same one; only the unresolved remainder is left to all of them.
    #[must_use]
    pub fn resolved(&self) -> Self {
        let mut resolved = Self::new();
        let mut above = 1.0;
        for step in self.steps() {
            resolved.record(step.value, above - step.share_above);
            above = step.share_above;
        }
        resolved.record_censored(self.largest, above);
        Self {
            observations: self.observations,
            events: self.events,
            largest: self.largest,
            parts: self.parts.iter().map(Self::resolved).collect(),
            clock: self.clock,
            ..resolved
        }
    }

    /// The same observations, censored where hardly any are at risk: beyond the last event at which [`AT_RISK_MIN`] were,
    /// or a tenth of all. There the estimate would be made by single ones, down to 0 with the last of all if that is an event. The
    /// parts stay as they are: how much they differ there belongs to the band.
    pub(crate) fn without_thin_tail(mut self) -> Self {
        let (mut at_risk, mut last) = (0.0, None);
        let enough = AT_RISK_MIN.min(self.weight() / 10.0);
        for (&bucket, cell) in self.cells.iter().rev() {
            at_risk += cell.events + cell.censored;
            if at_risk >= enough && cell.events > 0.0 {
                last = Some(bucket);
                break;
            }
        }
        if let Some(last) = last {
            let beyond = self.cells.split_off(&(last + 1));
            let weights = beyond.values().map(|cell| cell.events + cell.censored);
            let censored: f64 = weights.sum();
            self.cells.entry(last).or_default().censored += censored;
        }
        self
    }

    /// Sum of all weights.
    fn weight(&self) -> f64 {
        let cells = self.cells.values();
        cells.map(|cell| cell.events + cell.censored).sum()
    }

    /// Whether there are no observations.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.observations == 0
    }

    /// Number of observations, censored or not.
    #[must_use]
    pub fn observations(&self) -> u64 {
        self.observations
    }

    /// Number of uncensored observations.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// The largest observed value or bound; infinity is ignored.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.largest
    }

    /// Returns (v, P(X > v)) at each value v observed, rising.
    #[must_use]
    pub fn tail(&self) -> Vec<(u64, f64)> {
        let steps = self.steps().into_iter();
        steps.map(|step| (step.value, step.share_above)).collect()
    }

    /// Returns the share that lies above every observed value, at unknown values.
    #[must_use]
    pub fn unresolved(&self) -> f64 {
        self.steps().last().map_or(1.0, |step| step.share_above)
    }

    /// Attaches the distributions of the sample's parts.
    pub(crate) fn with_parts(self, parts: Vec<Self>) -> Self {
        Self { parts, ..self }
    }

    pub(crate) fn parts(&self) -> &[Self] {
        &self.parts
    }

    /// Attaches the time that `window` represents, of which the sample was there for a share, and the number of
    /// references in it, where one observed represents so many.
    pub(crate) fn timed(self, window: &LiveWindow, represents: f64, share: f64) -> Self {
        let seconds = window.seconds * share;
        let clock = if window.observed_seconds > 0.0 {
            let observed = self.observations as f64 * represents;
            let references = observed * window.seconds / window.observed_seconds;
            Clock {
                references,
                limits: window.rate_limits().map(|factor| references * factor),
                seconds,
            }
        } else {
            Clock::default()
        };
        Self { clock, ..self }
    }

    /// References to all pages per second; `None` if the time is not known.
    pub(crate) fn references_per_second(&self) -> Option<f64> {
        let Clock {
            references,
            seconds,
            ..
        } = self.clock;
        (seconds > 0.0).then(|| references / seconds)
    }

    /// Limits of that rate as shares of it, as far as the time is not known.
    pub(crate) fn rate_limits(&self) -> [f64; 2] {
        let Clock {
            references, limits, ..
        } = self.clock;
        if references > 0.0 {
            limits.map(|limit| limit / references)
        } else {
            [1.0; 2]
        }
    }

    pub(crate) fn steps(&self) -> Vec<SurvivalStep> {
        // From the top, so that the weight at risk is a sum and not a difference.
        let mut at_risk = 0.0;
        let mut risks: Vec<_> = self
            .cells
            .iter()
            .rev()
            .map(|(&bucket, &cell)| {
                at_risk += cell.events + cell.censored;
                (bucket, cell, at_risk)
            })
            .filter(|(_, cell, _)| cell.events > 0.0)
            .collect();
        risks.reverse();
        let (mut share_above, mut variance) = (1.0_f64, 0.0);
        let step = |(bucket, cell, at_risk): (usize, Cell, f64)| {
            let left = (at_risk - cell.events).max(0.0);
            share_above *= left / at_risk;
            variance += cell.events_squared / (at_risk * left);
            let excess = u64::whole((cell.excess / cell.events).round());
            SurvivalStep {
                value: floor_of(bucket).saturating_add(excess),
                share_above,
                // Where the share is 0, so is its variance: 0 times infinity is 0 here.
                standard_error: if share_above > 0.0 {
                    share_above * variance.sqrt()
                } else {
                    0.0
                },
            }
        };
        risks.into_iter().map(step).collect()
    }
}

/// Whether an observation with this weight counts.
fn is_weight(weight: f64) -> bool {
    weight > 0.0 && weight.is_finite()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::naive;
    use proptest::prelude::*;

    fn survival_of(observations: &[(u64, bool)]) -> Survival {
        let mut survival = Survival::new();
        for &(value, censored) in observations {
            if censored {
                survival.record_censored(value, 1.0);
            } else {
                survival.record(value, 1.0);
            }
        }
        survival
    }

    fn share_above(survival: &Survival, value: u64) -> f64 {
        let tail = survival.tail();
        let upto = tail.partition_point(|&(at, _)| at <= value);
        upto.checked_sub(1).map_or(1.0, |last| tail[last].1)
    }

    /// [KM58]: deaths at 0.8, 3.1, 5.4, 9.2, losses at 1.0, 2.7, 7.0, 12.1; here in tenths.
    #[test]
    fn the_example_of_the_paper_comes_out() {
        let survival = survival_of(&[
            (8, false),
            (31, false),
            (54, false),
            (92, false),
            (10, true),
            (27, true),
            (70, true),
            (121, true),
        ]);
        let expected = [
            (8, 7.0 / 8.0),
            (31, 7.0 / 10.0),
            (54, 21.0 / 40.0),
            (92, 21.0 / 80.0),
        ];
        for ((value, share), (expected_value, expected)) in
            survival.tail().into_iter().zip(expected)
        {
            assert_eq!(value, expected_value);
            assert!((share - expected).abs() < 1e-12);
        }
        assert!((survival.unresolved() - 21.0 / 80.0).abs() < 1e-12);
        assert_eq!((survival.observations(), survival.events()), (8, 4));
        assert_eq!(survival.largest(), 121);
    }

    #[test]
    fn an_event_comes_before_a_cut_off_of_the_same_value() {
        let survival = survival_of(&[(5, false), (5, true)]);
        assert_eq!(survival.tail(), [(5, 0.5)]);
    }

    #[test]
    fn greenwoods_error_without_cut_offs_is_the_binomial_one() {
        let survival = survival_of(&[(1, false), (2, false), (3, false), (4, false)]);
        for step in survival.steps() {
            let share = step.share_above;
            assert!((step.standard_error - (share * (1.0 - share) / 4.0).sqrt()).abs() < 1e-12);
        }
    }

    #[test]
    fn phases_are_mixed_by_weight_once_each_is_resolved_by_itself() {
        // Half of the time 10 pages are used repeatedly, the other half 100: each window begins
        // with that many censored observations.
        let window = |pages: u64| {
            let mut window = Survival::new();
            (0..pages).for_each(|seen| window.record_censored(seen, 1.0));
            window.record_repeatedly(pages, 1.0, 3 * pages);
            window
        };
        let mut mixed = Survival::new();
        mixed.merge(&window(10).resolved(), 5.0);
        mixed.merge(&window(100).resolved(), 5.0);
        assert_eq!(mixed.tail(), [(10, 0.5), (100, 0.0)]);
        assert_eq!((mixed.observations(), mixed.events()), (440, 330));
        // Censored observations of one phase spread over both give another result.
        let mut spread = window(10);
        spread.merge(&window(100), 0.1);
        assert!((share_above(&spread, 10) - 0.5).abs() > 0.01);
    }

    #[test]
    fn what_a_window_cannot_resolve_is_left_to_the_others() {
        let mut short = Survival::new();
        short.record(10, 1.0);
        short.record_censored(20, 1.0);
        let mut long = Survival::new();
        long.record(30, 3.0);
        long.record(40, 1.0);
        let mut mixed = Survival::new();
        mixed.merge(&short.resolved(), 1.0);
        mixed.merge(&long.resolved(), 1.0);
        // Three quarters of the half of the short window that lies above 20 end at 30.
        for (value, expected) in [(10, 0.75), (30, 0.1875), (40, 0.0)] {
            assert!((share_above(&mixed, value) - expected).abs() < 1e-12);
        }
    }

    #[test]
    fn the_last_of_many_observations_does_not_end_the_distribution() {
        // 60 events at 10, 40 cut off at 20, and one event at 50.
        let mut all = vec![(10, false); 60];
        all.extend([(20, true); 40]);
        all.push((50, false));
        assert_eq!(survival_of(&all).unresolved(), 0.0);
        let cut = survival_of(&all).without_thin_tail();
        assert_eq!(cut.tail().len(), 1);
        assert!((cut.unresolved() - 41.0 / 101.0).abs() < 1e-12);
        assert_eq!((cut.observations(), cut.largest()), (101, 50));
        // A loop ends with many at risk, and of few observations each counts.
        for certain in [vec![(10, false); 60], vec![(10, false), (20, false)]] {
            let survival = survival_of(&certain);
            assert_eq!(survival.clone().without_thin_tail().tail(), survival.tail());
        }
    }

    #[test]
    fn what_has_no_weight_is_no_observation() {
        let mut survival = Survival::new();
        for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            survival.record(1, weight);
            survival.record_censored(1, weight);
        }
        assert!(survival.is_empty());
        assert_eq!(survival.unresolved(), 1.0);
    }

    fn observations() -> impl Strategy<Value = Vec<(u64, bool)>> {
        prop::collection::vec((0_u64..60, any::<bool>()), 1..200)
    }

    proptest! {
        #[test]
        fn what_is_resolved_has_the_same_estimate(observations in observations()) {
            let survival = survival_of(&observations);
            let resolved = survival.resolved();
            for value in 0..60 {
                let (before, after) = (share_above(&survival, value), share_above(&resolved, value));
                prop_assert!((before - after).abs() < 1e-9);
            }
            prop_assert!((survival.unresolved() - resolved.unresolved()).abs() < 1e-9);
        }

        #[test]
        fn the_estimate_agrees_with_its_definition(observations in observations()) {
            let survival = survival_of(&observations);
            for value in 0..60 {
                let expected = naive::product_limit(&observations, value);
                prop_assert!((share_above(&survival, value) - expected).abs() < 1e-9);
            }
        }

        #[test]
        fn without_cut_offs_it_is_the_plain_distribution(
            values in prop::collection::vec(0_u64..60, 1..200),
        ) {
            let survival = survival_of(&values.iter().map(|&v| (v, false)).collect::<Vec<_>>());
            for value in 0..60 {
                let above = values.iter().filter(|&&v| v > value).count();
                let expected = above as f64 / values.len() as f64;
                prop_assert!((share_above(&survival, value) - expected).abs() < 1e-9);
            }
        }

        #[test]
        fn cut_off_at_infinity_counts_as_larger_than_everything(observations in observations()) {
            let mut survival = Survival::new();
            for &(value, infinite) in &observations {
                if infinite {
                    survival.record_censored(u64::MAX, 1.0);
                } else {
                    survival.record(value, 1.0);
                }
            }
            for value in 0..60 {
                let above = observations.iter().filter(|&&(v, infinite)| infinite || v > value);
                let expected = above.count() as f64 / observations.len() as f64;
                prop_assert!((share_above(&survival, value) - expected).abs() < 1e-9);
            }
        }

        #[test]
        fn merging_is_recording_with_other_weights(
            ours in observations(),
            theirs in observations(),
            factor in 1_u32..5,
        ) {
            let mut merged = survival_of(&ours);
            merged.merge(&survival_of(&theirs), f64::from(factor));
            let mut recorded = survival_of(&ours);
            for &(value, censored) in &theirs {
                if censored {
                    recorded.record_censored(value, f64::from(factor));
                } else {
                    recorded.record(value, f64::from(factor));
                }
            }
            prop_assert_eq!(merged.observations(), recorded.observations());
            prop_assert_eq!(merged.largest(), recorded.largest());
            for ((v, a), (w, b)) in merged.tail().into_iter().zip(recorded.tail()) {
                prop_assert_eq!(v, w);
                prop_assert!((a - b).abs() < 1e-9);
            }
        }
    }
}
