//! Recorded inputs and results of a policy as JSON, schema 1; decisions are replayed from them.
//!
//! Sizes are bytes here and pages of [`PlanInputs::page_bytes`] in the policy. [`PlanInputs::plan`] is pure: recorded
//! inputs, read back, give the same [`PlanJson`] bit for bit.

use std::fmt;

use plimsoll_flow::{MissRatioCurve, MissesPerSecond, PageCount, PageSize, PageSizeError, VmId};
use plimsoll_policy::{
    Allocation, Bound, Demand, PolicyError, Prediction, PredictionUnit, Relative, Rules, Target,
    allocate,
};
pub use plimsoll_policy::{Policy, Reason, Search, Suppression};
use serde::{Deserialize, Serialize};

use crate::curve_json::{CurveJson, CurveJsonError, MissesJson, SCHEMA};
use crate::size::ByteSize;

/// All inputs of a policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PlanInputs {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Bytes in a page, a power of two; all curves are of such pages.
    pub page_bytes: u64,
    /// How memory is allocated.
    pub policy: Policy,
    /// The limits of the host.
    pub rules: RulesJson,
    /// The VMs, each once.
    pub demands: Vec<DemandJson>,
}

/// The limits of the host.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RulesJson {
    /// All memory that can be allocated, in bytes.
    pub total_bytes: u64,
    /// Granularity of sizes in bytes; at least a page.
    pub unit_bytes: u64,
    /// Largest change of a VM's size, in bytes; `null` for no limit.
    pub step_bytes: Option<u64>,
    /// Smallest fall of the geometric mean that is worth a move, as a share of the present one; 0.0 or more.
    pub gain_min: f64,
    /// Miss ratios below this count as this; above 0.0.
    pub miss_ratio_min: f64,
}

/// One VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DemandJson {
    /// Name of the VM.
    pub vm: String,
    /// Its miss-ratio curve; `null` if unknown.
    pub curve: Option<CurveJson>,
    /// The size against which losses are measured, in bytes.
    pub baseline_bytes: u64,
    /// Its present size, in bytes: memory of its own and its cache.
    pub current_bytes: u64,
    /// Its minimum size, in bytes.
    pub floor_bytes: u64,
    /// Its maximum size, in bytes; `null` for no limit.
    pub ceiling_bytes: Option<u64>,
    /// Bound on the rise of its misses over those at the baseline, as a share, 0.0 or more; `null` for none.
    #[serde(default)]
    pub max_loss: Option<f64>,
    /// Bound on its misses per second, 0.0 or more; `null` for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_misses_per_second: Option<f64>,
    /// Its weight in proportional sharing, 1 or more.
    pub shares: u32,
    /// Its sampled working set, in bytes; `null` without one.
    pub working_set_bytes: Option<u64>,
}

/// The allocation that a policy gives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PlanJson {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The policy.
    pub policy: Policy,
    /// The search that was used, after `auto` has chosen; `null` for policies without one.
    pub search: Option<Search>,
    /// All memory that could be allocated, in bytes.
    pub total_bytes: u64,
    /// Each VM's size, in the order of the inputs.
    pub targets: Vec<TargetJson>,
    /// Predicted geometric mean of relative misses over the VMs whose curve is known; 1.0 without any.
    pub geometric_mean: f64,
    /// The same at the present sizes.
    pub geometric_mean_now: f64,
    /// Upper bound of the mean's relative distance to the optimum; `null` if the search has no bound.
    pub gap: Option<f64>,
    /// Memory that no VM is given, in bytes.
    pub spare_bytes: u64,
    /// Why no memory is moved although a better allocation exists.
    pub held: Option<Suppression>,
}

/// The size that one VM is given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TargetJson {
    /// The VM.
    pub vm: String,
    /// The size against which losses are measured, in bytes.
    pub baseline_bytes: u64,
    /// Its present size, in bytes.
    pub current_bytes: u64,
    /// Its new size, in bytes.
    pub target_bytes: u64,
    /// Bound on the rise of its misses over those at the baseline, as a share; `null` for none.
    #[serde(default)]
    pub max_loss: Option<f64>,
    /// Bound on its misses per second; `null` for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_misses_per_second: Option<f64>,
    /// Predicted misses at its present size over those at the baseline; `null` if its curve is not known.
    pub relative_now: Option<Relative>,
    /// The same at its new size.
    pub relative: Option<Relative>,
    /// Predicted misses per second at its new size; absent if its curve has no rate.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub misses: Option<MissesJson>,
    /// Why it is given this size.
    pub reason: Reason,
}

/// Sizes and bounds that need more memory than the host has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Shortfall {
    /// The smallest total that keeps all minimum sizes and loss bounds, in bytes.
    pub needed_bytes: u64,
    /// The host's total, in bytes.
    pub total_bytes: u64,
    /// The smallest size of each VM, in the order of the inputs.
    pub least: Vec<MinimumJson>,
}

/// The smallest size of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MinimumJson {
    /// The VM.
    pub vm: String,
    /// The smallest size that keeps its minimum and its loss bound, in bytes.
    pub bytes: u64,
}

/// Why there is no plan. Nothing was decided.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The inputs have another schema version.
    #[error("the inputs have schema {found}; only schema {SCHEMA} is supported")]
    Schema {
        /// The schema version of the inputs.
        found: u32,
    },
    /// An invalid page size.
    #[error(transparent)]
    PageSize(#[from] PageSizeError),
    /// A size of the rules is less than a page.
    #[error("the {what} must be at least a page, which has {page}; got {size}")]
    BelowPage {
        /// The rule's name.
        what: &'static str,
        /// Its size.
        size: ByteSize,
        /// The page size.
        page: ByteSize,
    },
    /// A VM's curve is invalid.
    #[error("VM {vm}: {error}")]
    Curve {
        /// The VM.
        vm: String,
        /// The error.
        error: CurveJsonError,
    },
    /// A VM's curve has another page size than the plan.
    #[error("VM {vm}: a curve of {found}-byte pages, where the others have {expected}")]
    OtherPages {
        /// The VM.
        vm: String,
        /// Bytes in a page of its curve.
        found: u64,
        /// Bytes in a page of the others.
        expected: u64,
    },
    /// Minimum sizes and loss bounds need more memory than the host has.
    #[error("{0}")]
    Infeasible(Shortfall),
    /// The policy's own error.
    #[error(transparent)]
    Policy(PolicyError),
}

/// Maximum number of VMs that a shortfall lists by name.
const LEAST_NAMED: usize = 16;

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the VMs' minimum sizes and loss bounds need {}, and the host has {}: {} are missing; at least",
            ByteSize(self.needed_bytes).rounded(),
            ByteSize(self.total_bytes).rounded(),
            ByteSize(self.needed_bytes.saturating_sub(self.total_bytes)).rounded()
        )?;
        let mut largest: Vec<_> = self.least.iter().collect();
        if largest.len() > LEAST_NAMED {
            largest.sort_by_key(|least| std::cmp::Reverse(least.bytes));
            largest.truncate(LEAST_NAMED);
        }
        for (index, least) in largest.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let size = ByteSize(least.bytes).rounded();
            write!(f, "{comma} {size} for {}", least.vm)?;
        }
        match self.least.len() - largest.len() {
            0 => Ok(()),
            1 => f.write_str(" and what 1 other needs"),
            others => write!(f, " and what {others} others need"),
        }
    }
}

impl PlanInputs {
    /// Records the inputs of a policy. Sizes of 16 EiB and more are recorded as `u64::MAX`, and such a ceiling as
    /// `null`.
    pub fn new(demands: &[Demand], rules: &Rules, policy: Policy, page_size: PageSize) -> Self {
        let bytes = |pages: PageCount| pages.to_bytes(page_size);
        let demands = demands.iter().map(|demand| DemandJson {
            vm: demand.vm.0.clone(),
            curve: demand
                .curve
                .as_ref()
                .map(|curve| CurveJson::new(&demand.vm.0, page_size, Some(demand.baseline), curve)),
            baseline_bytes: bytes(demand.baseline),
            current_bytes: bytes(demand.current),
            floor_bytes: bytes(demand.floor),
            ceiling_bytes: Some(bytes(demand.ceiling)).filter(|&bytes| bytes < u64::MAX),
            max_loss: demand.bound.max_loss,
            max_misses_per_second: demand.bound.max_misses_per_second,
            shares: demand.shares,
            working_set_bytes: demand.working_set.map(bytes),
        });
        Self {
            schema: SCHEMA,
            page_bytes: page_size.bytes(),
            policy,
            rules: RulesJson {
                total_bytes: bytes(rules.total),
                unit_bytes: bytes(rules.unit),
                step_bytes: rules.step.map(bytes),
                gain_min: rules.gain_min,
                miss_ratio_min: rules.miss_ratio_min,
            },
            demands: demands.collect(),
        }
    }

    /// Returns the inputs of the policy. Sizes are rounded down to whole pages, floors up; no ceiling is the largest
    /// size.
    ///
    /// # Errors
    ///
    /// Another schema, an invalid page size, a unit or step below a page, and the first VM whose curve is invalid or has other pages.
    pub fn read(&self) -> Result<(Vec<Demand>, Rules, Policy), PlanError> {
        if self.schema != SCHEMA {
            return Err(PlanError::Schema { found: self.schema });
        }
        let page_size = PageSize::new(self.page_bytes)?;
        self.rules.check(page_size)?;
        let pages = |bytes| PageCount::from_bytes(bytes, page_size);
        let demands = self.demands.iter().map(|demand| {
            Ok(Demand {
                vm: VmId(demand.vm.clone()),
                curve: demand.read_curve(page_size)?,
                baseline: pages(demand.baseline_bytes),
                current: pages(demand.current_bytes),
                floor: PageCount(demand.floor_bytes.div_ceil(page_size.bytes())),
                ceiling: demand.ceiling_bytes.map_or(PageCount(u64::MAX), pages),
                bound: Bound {
                    max_loss: demand.max_loss,
                    max_misses_per_second: demand.max_misses_per_second,
                },
                shares: demand.shares,
                working_set: demand.working_set_bytes.map(pages),
            })
        });
        let rules = Rules {
            total: pages(self.rules.total_bytes),
            unit: pages(self.rules.unit_bytes),
            step: self.rules.step_bytes.map(pages),
            gain_min: self.rules.gain_min,
            miss_ratio_min: self.rules.miss_ratio_min,
        };
        Ok((
            demands.collect::<Result<_, PlanError>>()?,
            rules,
            self.policy,
        ))
    }

    /// Runs the policy.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read) and of the policy; nothing was decided.
    pub fn plan(&self) -> Result<PlanJson, PlanError> {
        let (demands, rules, policy) = self.read()?;
        let page_size = PageSize::new(self.page_bytes)?;
        let allocation = allocate(&demands, &rules, policy)
            .map_err(|error| PlanError::of_policy(error, &demands, page_size))?;
        Ok(PlanJson::new(
            &demands,
            &rules,
            policy,
            &allocation,
            page_size,
        ))
    }
}

impl RulesJson {
    /// Refuses sizes that would be no page at all.
    fn check(&self, page_size: PageSize) -> Result<(), PlanError> {
        for (what, bytes) in [("unit", Some(self.unit_bytes)), ("step", self.step_bytes)] {
            if let Some(bytes) = bytes.filter(|&bytes| bytes < page_size.bytes()) {
                return Err(PlanError::BelowPage {
                    what,
                    size: ByteSize(bytes),
                    page: ByteSize(page_size.bytes()),
                });
            }
        }
        Ok(())
    }
}

impl DemandJson {
    fn read_curve(&self, page_size: PageSize) -> Result<Option<MissRatioCurve>, PlanError> {
        let Some(json) = &self.curve else {
            return Ok(None);
        };
        let curve = json.to_curve().map_err(|error| PlanError::Curve {
            vm: self.vm.clone(),
            error,
        })?;
        if json.page_bytes != page_size.bytes() {
            return Err(PlanError::OtherPages {
                vm: self.vm.clone(),
                found: json.page_bytes,
                expected: page_size.bytes(),
            });
        }
        Ok(Some(curve))
    }
}

impl PlanError {
    /// The error of a policy about `demands`, with sizes in bytes instead of pages.
    pub fn of_policy(error: PolicyError, demands: &[Demand], page_size: PageSize) -> Self {
        match error {
            PolicyError::Infeasible {
                needed,
                total,
                least,
            } => Self::Infeasible(Shortfall {
                needed_bytes: needed.to_bytes(page_size),
                total_bytes: total.to_bytes(page_size),
                least: demands
                    .iter()
                    .zip(least)
                    .map(|(demand, least)| MinimumJson {
                        vm: demand.vm.0.clone(),
                        bytes: least.to_bytes(page_size),
                    })
                    .collect(),
            }),
            error => Self::Policy(error),
        }
    }
}

impl PlanJson {
    /// Records the result of a policy for `demands`.
    pub fn new(
        demands: &[Demand],
        rules: &Rules,
        policy: Policy,
        allocation: &Allocation,
        page_size: PageSize,
    ) -> Self {
        let targets = demands.iter().zip(&allocation.targets);
        let targets = targets.map(|(demand, target)| TargetJson::new(demand, target, page_size));
        Self {
            schema: SCHEMA,
            policy,
            search: allocation.search,
            total_bytes: rules.total.to_bytes(page_size),
            targets: targets.collect(),
            geometric_mean: allocation.geometric_mean,
            geometric_mean_now: allocation.geometric_mean_now,
            gap: allocation.gap,
            spare_bytes: allocation.spare.to_bytes(page_size),
            held: allocation.held,
        }
    }
}

impl TargetJson {
    /// Its bounds as a table shows them: `1.05x`, `20.0/s`, `1.05x, 20.0/s`; `-` without any.
    pub fn bounds(&self) -> String {
        let loss = self.max_loss.map(|loss| format!("{:.2}x", 1.0 + loss));
        let number = self
            .max_misses_per_second
            .map(|misses| PredictionUnit::PerSecond.text(misses));
        let bounds: Vec<_> = loss.into_iter().chain(number).collect();
        if bounds.is_empty() {
            return "-".to_owned();
        }
        bounds.join(", ")
    }

    /// What is predicted at its new size beside each of its bounds; nothing if one of them has no prediction.
    pub fn predictions(&self) -> Vec<Prediction> {
        let bound = Bound {
            max_loss: self.max_loss,
            max_misses_per_second: self.max_misses_per_second,
        };
        let misses = self.misses.map(MissesPerSecond::from);
        bound.predictions(self.relative, misses).unwrap_or_default()
    }

    fn new(demand: &Demand, target: &Target, page_size: PageSize) -> Self {
        Self {
            vm: target.vm.0.clone(),
            baseline_bytes: demand.baseline.to_bytes(page_size),
            current_bytes: demand.current.to_bytes(page_size),
            target_bytes: target.size.to_bytes(page_size),
            max_loss: demand.bound.max_loss,
            max_misses_per_second: demand.bound.max_misses_per_second,
            relative_now: target.relative_now,
            relative: target.relative,
            misses: target.misses.map(MissesJson::from),
            reason: target.reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::CurvePoint;
    use proptest::prelude::*;

    const PAGE: PageSize = PageSize::FOUR_KIB;

    fn demand(vm: &str, points: &[(u64, f64)], pages: u64) -> Demand {
        let points = points
            .iter()
            .map(|&(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
        Demand {
            vm: VmId(vm.to_owned()),
            curve: MissRatioCurve::new(points.collect(), 1000).ok(),
            baseline: PageCount(pages),
            current: PageCount(pages),
            floor: PageCount(0),
            ceiling: PageCount(u64::MAX),
            bound: Bound::on_loss(0.25),
            shares: 1,
            working_set: None,
        }
    }

    fn rules(total: u64) -> Rules {
        Rules {
            unit: PageCount(4),
            ..Rules::new(PageCount(total))
        }
    }

    const ISOLATED: Policy = Policy::isolated(Search::Optimal);

    /// Two VMs: one that needs 16 of its 64 pages, and one that would use 96.
    fn inputs() -> PlanInputs {
        let demands = [
            demand("idle", &[(1, 0.5), (16, 0.1)], 64),
            demand("busy", &[(1, 0.9), (64, 0.8), (96, 0.2)], 64),
        ];
        PlanInputs::new(&demands, &rules(128), ISOLATED, PAGE)
    }

    #[test]
    fn the_json_is_the_documented_one() {
        let mut inputs = inputs();
        inputs.demands.truncate(1);
        inputs.demands[0].curve = None;
        let known = r#"{"schema":1,"page_bytes":4096,"policy":{"name":"isolated","search":{"name":"optimal"}},"rules":{"total_bytes":524288,"unit_bytes":16384,"step_bytes":null,"gain_min":0.0,"miss_ratio_min":0.001},"demands":[{"vm":"idle","curve":null,"baseline_bytes":262144,"current_bytes":262144,"floor_bytes":0,"ceiling_bytes":null,"max_loss":0.25,"shares":1,"working_set_bytes":null}]}"#;
        assert_eq!(serde_json::to_string(&inputs).unwrap(), known);
        assert_eq!(serde_json::from_str::<PlanInputs>(known).unwrap(), inputs);
        let stranger = known.replacen("\"gain_min\"", "\"gain_max\":1,\"gain_min\"", 1);
        let error = serde_json::from_str::<PlanInputs>(&stranger).unwrap_err();
        assert!(error.to_string().contains("gain_max"), "{error}");
    }

    #[test]
    fn memory_goes_from_who_does_not_need_it_to_who_does() {
        let plan = inputs().plan().unwrap();
        let targets: Vec<_> = plan
            .targets
            .iter()
            .map(|target| (target.vm.as_str(), target.target_bytes >> 12, target.reason))
            .collect();
        assert_eq!(
            targets,
            [("idle", 32, Reason::Gives), ("busy", 96, Reason::Gains)]
        );
        let relative = plan.targets[1].relative.unwrap();
        assert!((relative.expected - 0.25).abs() < 1e-12, "{relative:?}");
        assert!((plan.geometric_mean - 0.5).abs() < 1e-12);
        assert_eq!((plan.gap, plan.spare_bytes), (Some(0.0), 0));
    }

    #[test]
    fn a_bound_that_was_computed_is_rounded() {
        let mut target = inputs().plan().unwrap().targets.remove(0);
        target.max_misses_per_second = Some(80.801_832_300_757_92);
        assert_eq!(target.bounds(), "1.25x, 80.8/s");
    }

    #[test]
    fn a_shortfall_says_who_needs_how_much() {
        let mut inputs = inputs();
        inputs.rules.total_bytes = 8 << 12;
        let error = inputs.plan().unwrap_err();
        let PlanError::Infeasible(shortfall) = &error else {
            panic!("{error}");
        };
        let least: u64 = shortfall.least.iter().map(|least| least.bytes).sum();
        assert_eq!(shortfall.needed_bytes, least);
        assert_eq!(shortfall.total_bytes, 8 << 12);
        let said = error.to_string();
        assert!(said.contains("and the host has 32 KiB: "), "{said}");
        assert!(said.contains("at least 64 KiB for idle, "), "{said}");
        assert!(said.ends_with(" for busy"), "{said}");
    }

    #[test]
    fn a_long_shortfall_names_the_largest() {
        let least = (1..=20).map(|index| MinimumJson {
            vm: format!("vm{index}"),
            bytes: index << 20,
        });
        let shortfall = Shortfall {
            needed_bytes: 210 << 20,
            total_bytes: 200 << 20,
            least: least.collect(),
        };
        let said = shortfall.to_string();
        assert!(
            said.starts_with(
                "the VMs' minimum sizes and loss bounds need 210 MiB, and the host has 200 MiB: 10 MiB are missing; \
                 at least 20 MiB for vm20, 19 MiB for vm19,"
            ),
            "{said}"
        );
        assert!(
            said.ends_with("5 MiB for vm5 and what 4 others need"),
            "{said}"
        );
    }

    #[test]
    fn inputs_that_are_none_are_refused_with_their_place() {
        type Spoil = fn(&mut PlanInputs);
        let cases: [(Spoil, &str); 7] = [
            (
                |inputs| inputs.schema = 2,
                "the inputs have schema 2; only schema 1",
            ),
            (|inputs| inputs.page_bytes = 0, "a page cannot have 0 bytes"),
            (
                |inputs| inputs.demands[1].curve.as_mut().unwrap().schema = 7,
                "VM busy: the curve has schema 7",
            ),
            (
                |inputs| inputs.demands[1].curve.as_mut().unwrap().page_bytes = 8192,
                "VM busy: a curve of 8192-byte pages, where the others have 4096",
            ),
            (
                |inputs| inputs.demands[1].curve.as_mut().unwrap().page_bytes = 12,
                "VM busy: a page cannot have 12 bytes",
            ),
            (
                |inputs| inputs.demands[0].curve.as_mut().unwrap().points.swap(0, 1),
                "VM idle: point 1: size of 1 pages",
            ),
            (
                |inputs| inputs.demands[1].vm = "idle".to_owned(),
                "VM idle appears twice",
            ),
        ];
        for (spoil, said) in cases {
            let mut inputs = inputs();
            spoil(&mut inputs);
            let error = inputs.plan().unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn every_policy_and_search_has_a_word_and_comes_back() {
        let searches = [
            Search::Auto,
            Search::Exhaustive,
            Search::Greedy,
            Search::Annealing { seed: u64::MAX },
            Search::Optimal,
            Search::Hull,
        ];
        let isolated = searches.map(Policy::isolated);
        let esx = [Policy::esx(0.75), Policy::esx_sampling(0.1)];
        for policy in isolated.into_iter().chain(esx) {
            let text = serde_json::to_string(&policy).unwrap();
            assert_eq!(serde_json::from_str::<Policy>(&text).unwrap(), policy);
        }
    }

    /// A demand with arbitrary values of its types.
    fn any_demand() -> impl Strategy<Value = Demand> {
        let steps = prop::collection::vec((1u64..500, 0.0f64..1.0, 0.0f64..0.2), 1..12);
        let curve = prop::option::weighted(0.9, (steps, 1u64..1_000_000));
        let sizes = (
            1u64..3000,
            1u64..3000,
            0u64..500,
            prop::option::of(3000u64..9000),
        );
        let bound = (
            prop::option::of(0.0f64..1.0),
            prop::option::of(0.0f64..50.0),
        );
        let rest = (bound, 1u32..9, prop::option::of(0u64..3000));
        (curve, sizes, rest).prop_map(|(curve, sizes, rest)| {
            let (baseline, current, floor, ceiling) = sizes;
            let ((max_loss, max_misses_per_second), shares, working_set) = rest;
            let curve = curve.and_then(|(steps, references)| {
                let (mut size, mut left) = (0, 1.0);
                let points = steps.into_iter().map(|(step, share, band)| {
                    size += step;
                    left *= share;
                    CurvePoint {
                        size: PageCount(size),
                        miss_ratio: left,
                        low: left * (1.0 - band),
                        high: (left * (1.0 + band)).min(1.0),
                        misses: None,
                    }
                });
                MissRatioCurve::new(points.collect(), references).ok()
            });
            Demand {
                vm: VmId(String::new()),
                curve,
                baseline: PageCount(baseline),
                current: PageCount(current),
                floor: PageCount(floor),
                ceiling: PageCount(ceiling.unwrap_or(u64::MAX)),
                bound: Bound {
                    max_loss,
                    max_misses_per_second,
                },
                shares,
                working_set: working_set.map(PageCount),
            }
        })
    }

    fn any_policy() -> impl Strategy<Value = Policy> {
        prop_oneof![
            Just(Policy::isolated(Search::Auto)),
            Just(Policy::isolated(Search::Greedy)),
            Just(Policy::isolated(Search::Hull)),
            any::<u64>().prop_map(|seed| Policy::isolated(Search::Annealing { seed })),
            (0.0f64..1.0).prop_map(Policy::esx),
            (0.0f64..1.0).prop_map(Policy::esx_sampling),
        ]
    }

    proptest! {
        #[test]
        fn recorded_inputs_are_the_inputs_and_give_the_same_plan(
            mut demands in prop::collection::vec(any_demand(), 1..5),
            total in 1000u64..12_000,
            unit in 1u64..64,
            step in prop::option::of(1u64..1000),
            gain_min in 0.0f64..0.3,
            policy in any_policy(),
        ) {
            for (index, demand) in demands.iter_mut().enumerate() {
                demand.vm = VmId(format!("vm \"{index}\""));
            }
            let rules = Rules {
                unit: PageCount(unit),
                step: step.map(PageCount),
                gain_min,
                ..Rules::new(PageCount(total))
            };
            let inputs = PlanInputs::new(&demands, &rules, policy, PAGE);
            prop_assert_eq!(inputs.read().unwrap(), (demands, rules, policy));
            let text = serde_json::to_string(&inputs).unwrap();
            let recorded: PlanInputs = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(&recorded, &inputs);
            let plan = inputs.plan();
            prop_assert_eq!(recorded.plan(), plan.clone());
            if let Ok(plan) = plan {
                let text = serde_json::to_string(&plan).unwrap();
                prop_assert_eq!(serde_json::from_str::<PlanJson>(&text).unwrap(), plan);
            }
        }
    }
}
