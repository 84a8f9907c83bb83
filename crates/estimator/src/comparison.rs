//! Estimators beside the exact curve of the same references: error, speed and memory.
//!
//! Each batch goes to every estimator in turn, and each is timed on its own, curve included. Errors are taken at up to 1000 even
//! sizes up to the footprint; the largest error forgives sizes that are off by 1 %, or every estimator that puts a loop's cliff
//! one page beside its place would be wrong by the cliff's height.
//!
//! Not here: the clock.

use std::time::Duration;

use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, PageNumber};

use crate::curve::lru::ExactLru;
use crate::estimator::Estimator;
use crate::registry::BuiltEstimator;

/// Sizes at which curves are compared.
const SIZES: u64 = 1000;
/// How far off a size may be without counting into the largest error.
const SLACK: f64 = 0.01;

/// Estimators at work, and the exact one.
pub struct Comparison {
    exact: ExactLru,
    running: Vec<Running>,
    references: u64,
    /// Time so far.
    clock: fn() -> Duration,
}

/// An estimator with its time and memory.
struct Running {
    built: BuiltEstimator,
    time: Duration,
    peak_bytes: usize,
}

impl Running {
    /// Runs the estimator and adds its time.
    fn timed<T>(
        &mut self,
        clock: fn() -> Duration,
        work: impl FnOnce(&mut dyn Estimator) -> T,
    ) -> T {
        let start = clock();
        let result = work(&mut *self.built.estimator);
        self.time += clock().saturating_sub(start);
        self.peak_bytes = self.peak_bytes.max(self.built.estimator.memory_bytes());
        result
    }
}

impl Comparison {
    /// A comparison of these estimators, timed by this clock.
    pub fn new(estimators: Vec<BuiltEstimator>, clock: fn() -> Duration) -> Self {
        let running = estimators.into_iter().map(|built| Running {
            built,
            time: Duration::ZERO,
            peak_bytes: 0,
        });
        Self {
            exact: ExactLru::new(),
            running: running.collect(),
            references: 0,
            clock,
        }
    }

    /// Processes the pages of the next references.
    pub fn observe(&mut self, pages: &[PageNumber]) {
        self.exact.observe(pages);
        for running in &mut self.running {
            running.timed(self.clock, |estimator| estimator.observe(pages));
        }
        self.references += pages.len() as u64;
    }

    /// The curves of all.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if there were no references.
    pub fn finish(mut self) -> Result<Compared, CurveError> {
        let exact = self.exact.curve()?;
        let mut estimators = Vec::new();
        for mut running in self.running {
            let curve = match running.timed(self.clock, |estimator| estimator.curve()) {
                Ok(curve) => Some(curve),
                // Nothing was sampled.
                Err(CurveError::Empty) => None,
                Err(error) => return Err(error),
            };
            estimators.push(ComparedEstimator {
                smallest_size: running.built.estimator.smallest_size(),
                label: running.built.label,
                curve,
                time: running.time,
                peak_bytes: running.peak_bytes,
            });
        }
        Ok(Compared {
            references: self.references,
            footprint: PageCount(self.exact.distinct()),
            exact,
            estimators,
        })
    }
}

/// The curves of estimators, and what they are compared with.
#[derive(Debug)]
pub struct Compared {
    /// Number of references.
    pub references: u64,
    /// Distinct pages.
    pub footprint: PageCount,
    /// The exact curve.
    pub exact: MissRatioCurve,
    /// The estimators, in the order given.
    pub estimators: Vec<ComparedEstimator>,
}

/// An estimator with its curve, time and memory.
#[derive(Debug)]
pub struct ComparedEstimator {
    /// Its name with its main setting.
    pub label: String,
    /// Its curve; `None` if nothing was sampled.
    pub curve: Option<MissRatioCurve>,
    /// The time that it took, by the clock.
    pub time: Duration,
    /// Bytes of heap that it took at most.
    pub peak_bytes: usize,
    smallest_size: PageCount,
}

/// How far a curve is from the exact one; each is `None` where there is nothing to compare.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Errors {
    /// Mean absolute error, 0.0 to 1.0.
    pub mean_absolute: Option<f64>,
    /// Largest error outside 1 % of a size.
    pub max: Option<f64>,
    /// How far the steepest cliff stands from its place, as a share of its size.
    pub cliff_position: Option<f64>,
    /// Share of the sizes whose true ratio lies in the band.
    pub band_coverage: Option<f64>,
}

impl Compared {
    /// The errors of an estimator, at sizes that it resolves.
    pub fn errors(&self, of: &ComparedEstimator) -> Errors {
        let sizes = || {
            let sizes = self.footprint.even_steps(self.footprint.0.min(SIZES));
            sizes.filter(|&size| size >= of.smallest_size)
        };
        let curve = of.curve.as_ref();
        let distance = |slack| curve?.distance_up_to(&self.exact, sizes(), slack);
        Errors {
            mean_absolute: distance(0.0).map(|distance| distance.mean_absolute_error),
            max: distance(SLACK).map(|distance| distance.max_absolute_error),
            cliff_position: curve.and_then(|curve| curve.cliff_position_error(&self.exact)),
            band_coverage: curve.and_then(|curve| curve.band_coverage(&self.exact, sizes())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{OptionValue, Settings, algorithm};
    use plimsoll_flow::PageSize;

    #[test]
    fn the_exact_estimator_has_no_error_and_one_that_samples_nothing_has_none_to_show() {
        let built = |name: &str, rate: Option<f64>| {
            let mut settings = Settings::new(PageSize::FOUR_KIB);
            if let Some(rate) = rate {
                settings.set("rate", OptionValue::Rate(rate));
            }
            algorithm(name).unwrap().build(&settings).unwrap()
        };
        let estimators = vec![built("lru", None), built("shards", Some(1e-6))];
        let mut comparison = Comparison::new(estimators, || Duration::ZERO);
        let pages: Vec<_> = (0..100).cycle().take(1000).map(PageNumber).collect();
        comparison.observe(&pages);
        let compared = comparison.finish().unwrap();
        assert_eq!((compared.references, compared.footprint.0), (1000, 100));
        let [exact, sampled] = &compared.estimators[..] else {
            panic!("two estimators");
        };
        let errors = compared.errors(exact);
        assert_eq!((errors.mean_absolute, errors.max), (Some(0.0), Some(0.0)));
        assert_eq!(errors.cliff_position, Some(0.0));
        assert!(exact.peak_bytes > 0);
        assert_eq!(sampled.curve, None);
        assert_eq!(compared.errors(sampled).mean_absolute, None);
        let nothing = Comparison::new(Vec::new(), || Duration::ZERO).finish();
        assert_eq!(nothing.unwrap_err(), CurveError::Empty);
    }
}
