//! The results of the estimators for a run, with the truth of the same run.

use plimsoll_estimator::registry::{METHODS, Method};
use plimsoll_flow::{MissRatioCurve, PageCount, WorkingSet, WorkingSetBound};
use serde::{Serialize, Serializer};

use super::Origin;
use super::analysis::Results;
use super::options::{CURVE, EstimatorArgs};

const NO_WALKS: &str = "the log has no page walks";
const NO_REFERENCES: &str = "the log has no references: record with references=on";
const NO_MEMORY: &str = "give --memory, the size of the VM that made the trace";
const NO_INTERVAL: &str = "the run is shorter than an interval";

/// Result of an estimator.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Finding {
    /// Name of the method.
    pub estimator: &'static str,
    /// In pages of the TLB.
    pub working_set_pages: Option<u64>,
    /// The same in bytes.
    pub working_set_bytes: Option<u64>,
    /// Whether the size is an estimate or a bound.
    #[serde(serialize_with = "bound_name")]
    pub bound: Option<WorkingSetBound>,
    /// Lower limit of the 95 % confidence interval.
    pub low_pages: Option<u64>,
    /// Upper limit of the same.
    pub high_pages: Option<u64>,
    /// The truth at the time of the estimate; for esx, that of the last interval alone.
    pub truth_pages: Option<u64>,
    /// Estimate divided by truth, minus 1; without ε.
    pub error_ratio: Option<f64>,
    /// Interval at which it settled, from 0.
    pub settled_step: Option<u64>,
    /// Instructions or references until the end of that interval.
    pub settled_at: Option<u64>,
    /// Why there is no estimate.
    pub reason: Option<&'static str>,
    /// The time to which the size of a method that does not settle refers.
    #[serde(skip)]
    pub reported: Option<&'static str>,
}

#[expect(clippy::ref_option, reason = "serde's signature")]
fn bound_name<S: Serializer>(
    bound: &Option<WorkingSetBound>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    bound.map(|bound| bound.to_string()).serialize(serializer)
}

impl Finding {
    fn none(estimator: &'static str, reason: &'static str) -> Self {
        Self {
            estimator,
            reason: Some(reason),
            ..Self::default()
        }
    }

    /// Adds the truth, with which `found` is compared.
    fn beside(self, truth: Option<PageCount>, found: PageCount) -> Self {
        Self {
            truth_pages: truth.map(|truth| truth.0),
            error_ratio: truth
                .filter(|truth| truth.0 > 0)
                .map(|truth| found.0 as f64 / truth.0 as f64 - 1.0),
            ..self
        }
    }
}

impl Results {
    /// The results of all selected estimators, in the order of the registry; those of curves last.
    pub fn findings(&self, origin: &Origin, args: &EstimatorArgs) -> Vec<Finding> {
        let wanted = METHODS.iter().filter(|method| args.wants(method.name));
        let mut findings: Vec<_> = wanted.map(|method| self.finding(origin, method)).collect();
        if args.wants(CURVE) {
            findings.extend(self.curve_findings(origin));
        }
        findings
    }

    /// The truth at the end of the run, or the pages touched in its last interval.
    fn last_truth(&self, of_last_interval: bool) -> Option<PageCount> {
        let columns = self.steps.last()?.columns.first()?;
        let column = if of_last_interval { 0 } else { 1 };
        columns[column].map(PageCount)
    }

    /// A size, of which `assumed` was not measured, with the truth at that time.
    fn found(
        origin: &Origin,
        estimator: &'static str,
        working_set: WorkingSet,
        assumed: PageCount,
        truth: Option<PageCount>,
        reported: Option<&'static str>,
    ) -> Finding {
        let size = working_set.size;
        Finding {
            working_set_pages: Some(size.0),
            working_set_bytes: Some(size.to_bytes(origin.page_size)),
            bound: Some(working_set.bound),
            reason: None,
            reported,
            ..Finding::none(estimator, "")
        }
        .beside(truth, PageCount(size.0.saturating_sub(assumed.0)))
    }

    /// The result of a method of the registry.
    fn finding(&self, origin: &Origin, method: &Method) -> Finding {
        let mut results = self.methods.iter();
        let Some(result) = results.find(|result| result.method.name == method.name) else {
            return match self.has_walks {
                true => Finding::none(method.name, NO_MEMORY),
                false => Finding::none(method.name, NO_WALKS),
            };
        };
        let Some(working_set) = result.estimator.working_set() else {
            return Finding::none(method.name, NO_INTERVAL);
        };
        let truth = match result.settled {
            Some(settling) => settling.truth,
            None if method.name == METHODS[0].name => None,
            None => self.last_truth(method.of_last_interval),
        };
        let assumed = result.estimator.assumed();
        let limits = result.estimator.confidence();
        Finding {
            low_pages: limits.map(|(low, _)| low.0),
            high_pages: limits.map(|(_, high)| high.0),
            settled_step: result.settled.map(|settling| settling.settled.step),
            settled_at: result.settled.map(|settling| settling.at),
            ..Self::found(
                origin,
                method.name,
                working_set,
                assumed,
                truth,
                method.reported,
            )
        }
    }

    /// The sizes at which the miss-ratio curves reach 5 %.
    fn curve_findings(&self, origin: &Origin) -> Vec<Finding> {
        let (all, past) = ("mrc", "mrc-past-filter");
        let Some((curve, past_filter)) = &self.curves else {
            return [all, past]
                .map(|name| Finding::none(name, NO_REFERENCES))
                .into();
        };
        let of = |name, curve: Option<&MissRatioCurve>, none| {
            let size = curve.and_then(|curve| curve.size_for(WorkingSet::MISS_RATIO));
            let Some(size) = size else {
                return Finding::none(name, none);
            };
            // Smaller sizes are not resolved.
            let bound = if size <= self.filter {
                WorkingSetBound::AtMost
            } else {
                WorkingSetBound::Estimate
            };
            let size = PageCount(size.0.div_ceil(origin.frames_per_page));
            let truth = self.last_truth(false);
            let working_set = WorkingSet { size, bound };
            Self::found(
                origin,
                name,
                working_set,
                PageCount(0),
                truth,
                Some("5 % misses"),
            )
        };
        vec![
            of(all, curve.as_ref().ok(), "more than 5 % miss at every size"),
            of(
                past,
                past_filter.as_ref(),
                "no page was used again after it left the filter",
            ),
        ]
    }
}
