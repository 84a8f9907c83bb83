//! The inputs and results of every policy.

use std::fmt;

use plimsoll_flow::{MissRatioCurve, MissesPerSecond, PageCount, VmId};

use crate::policy::Search;

/// One VM. Sizes include all memory that serves it: its own and the cache under its disk.
#[derive(Debug, Clone, PartialEq)]
pub struct Demand {
    /// The VM.
    pub vm: VmId,
    /// Its miss-ratio curve; without one it keeps its present size.
    pub curve: Option<MissRatioCurve>,
    /// The size that it is entitled to, within its ceiling; gains and losses are relative to its misses there.
    pub baseline: PageCount,
    /// Its present size.
    pub current: PageCount,
    /// Minimum size.
    pub floor: PageCount,
    /// Maximum size; `u64::MAX` for no limit.
    pub ceiling: PageCount,
    /// What it is promised about its misses.
    pub bound: Bound,
    /// Its weight in proportional sharing, 1 or more; [`SHARES`](Self::SHARES) where nobody chose one.
    pub shares: u32,
    /// Its sampled working set, which only policies with [`from_working_sets`](crate::PolicyRow::from_working_sets) use.
    pub working_set: Option<PageCount>,
}

impl Demand {
    /// The default weight.
    pub const SHARES: u32 = 100;
}

/// Bounds on a VM's misses; all that are given hold. Each is finite and 0.0 or more.
///
/// Misses that `max_misses_per_second` allows count as none when allocations are compared: a VM that hardly misses
/// gives what it does not use, however much its few misses rise.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Bound {
    /// Bound on their rise, as a share of those at the baseline.
    pub max_loss: Option<f64>,
    /// Bound on their number per second. It can be checked only on a curve with a rate
    /// ([`MissRatioCurve::misses_per_second`]); a VM without one keeps its size.
    pub max_misses_per_second: Option<f64>,
}

/// Predicted misses of a VM, beside one of the bounds on them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// What is counted.
    pub unit: PredictionUnit,
    /// Expected value.
    pub expected: f64,
    /// Upper limit of its band.
    pub high: f64,
    /// The bound.
    pub limit: f64,
}

/// Unit of a [`Prediction`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PredictionUnit {
    /// Misses over those at the baseline.
    OfBaseline,
    /// Misses per second.
    PerSecond,
}

impl PredictionUnit {
    /// A number of this unit: `1.25`, `20.0/s`.
    pub fn text(self, value: f64) -> String {
        match self {
            Self::OfBaseline => format!("{value:.2}"),
            Self::PerSecond if value < 10.0 => format!("{value:.2}/s"),
            Self::PerSecond => format!("{value:.1}/s"),
        }
    }

    /// A number of misses of this unit, in words.
    pub fn misses(self, value: f64) -> String {
        let value = self.text(value);
        match self {
            Self::OfBaseline => format!("{value} times as often as at its baseline"),
            Self::PerSecond => value,
        }
    }
}

impl Prediction {
    /// Distance from the upper limit of the band to the bound; negative if that is above it.
    pub fn margin(&self) -> f64 {
        self.limit - self.high
    }

    /// Whether it needs no band: no misses, or as many as at the baseline.
    fn is_certain(&self) -> bool {
        let least = match self.unit {
            PredictionUnit::PerSecond => 0.0,
            PredictionUnit::OfBaseline => 1.0,
        };
        self.high == least
    }
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |value| self.unit.text(value);
        let limit = text(self.limit);
        write!(f, "planned {}", text(self.expected))?;
        if self.high > self.expected {
            write!(f, " (band to {})", text(self.high))?;
        }
        match self.margin() {
            ..0.0 => write!(
                f,
                ", above the limit of {limit}: its baseline, or a lower maximum, gives no less"
            ),
            _ if self.high > self.expected || self.is_certain() => {
                write!(f, " for a limit of {limit}")
            }
            _ => write!(
                f,
                " for a limit of {limit}; its band has no width, so nothing is kept for an error of the curve"
            ),
        }
    }
}

impl Bound {
    /// The predictions for its parts, from relative misses and misses per second; `None` if those of a part are not
    /// known, so that nothing can be said about the bound.
    pub fn predictions(
        &self,
        relative: Option<Relative>,
        misses: Option<MissesPerSecond>,
    ) -> Option<Vec<Prediction>> {
        let rise = self.max_loss.map(|max_loss| {
            relative.map(|relative| Prediction {
                unit: PredictionUnit::OfBaseline,
                expected: relative.expected,
                high: relative.high,
                limit: 1.0 + max_loss,
            })
        });
        let number = self.max_misses_per_second.map(|limit| {
            misses.map(|misses| Prediction {
                unit: PredictionUnit::PerSecond,
                expected: misses.expected,
                high: misses.high,
                limit,
            })
        });
        rise.into_iter().chain(number).collect()
    }

    /// A bound on the rise of misses alone.
    pub const fn on_loss(max_loss: f64) -> Self {
        Self {
            max_loss: Some(max_loss),
            max_misses_per_second: None,
        }
    }
}

/// The limits that hold for all VMs of a host together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// All memory that can be allocated, 1 to 2^52 pages.
    pub total: PageCount,
    /// Sizes are multiples of this, except for floors, ceilings, baselines and present sizes that are not; 1 or more.
    pub unit: PageCount,
    /// Largest change of a VM's size, a unit or more; `None` for no limit. Floor, ceiling, bound and total take
    /// precedence: a VM below its bound is raised at once, and a host that is short of memory takes more than a step.
    pub step: Option<PageCount>,
    /// Hysteresis: the smallest fall of the geometric mean, as a share of the present one, that is worth a move; 0.0 or
    /// more.
    pub gain_min: f64,
    /// Miss ratios below this are raised to it, because quotients of tiny ratios are noise (\[LS07\] §6.4); above 0.0.
    pub miss_ratio_min: f64,
}

impl Rules {
    /// The paper's unit, 4 MiB in pages of 4 KiB (\[LS07\] §6.5).
    pub const UNIT: PageCount = PageCount(1024);
    /// Smallest miss ratio that is distinguished from 0.
    pub const MISS_RATIO_MIN: f64 = 0.001;

    /// The paper's rules for this amount of memory: its unit, no step limit, no hysteresis.
    pub fn new(total: PageCount) -> Self {
        Self {
            total,
            unit: Self::UNIT,
            step: None,
            gain_min: 0.0,
            miss_ratio_min: Self::MISS_RATIO_MIN,
        }
    }
}

/// The sizes that a policy gives to all VMs.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocation {
    /// Each VM's size, in the order of the demands.
    pub targets: Vec<Target>,
    /// Predicted geometric mean of relative misses over the VMs whose curve is known; 1.0 without any.
    pub geometric_mean: f64,
    /// The same at the present sizes.
    pub geometric_mean_now: f64,
    /// Upper bound on the mean's relative distance from the smallest possible one; 0.0 is the optimum, `None` if the
    /// search has no bound.
    pub gap: Option<f64>,
    /// Memory that is not allocated to any VM.
    pub spare: PageCount,
    /// Why no memory is moved although a better allocation exists.
    pub held: Option<Suppression>,
    /// The search that was used, after `Auto` has chosen; `None` for policies without one.
    pub search: Option<Search>,
}

/// The size that one VM is given.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// The VM.
    pub vm: VmId,
    /// Its new size.
    pub size: PageCount,
    /// Predicted misses over those at the baseline; `None` if its curve is not known or does not resolve the size.
    pub relative: Option<Relative>,
    /// The same at its present size.
    pub relative_now: Option<Relative>,
    /// Predicted misses per second; `None` if its curve has no rate.
    pub misses: Option<MissesPerSecond>,
    /// Why it is given this size.
    pub reason: Reason,
}

/// Misses at a size over those at the baseline, with the curve's confidence band; 1.0 is unchanged.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Relative {
    /// Expected value.
    pub expected: f64,
    /// Lower limit of the band.
    pub low: f64,
    /// Upper limit of the band, which `max_loss` bounds if it is given.
    pub high: f64,
}

/// Why a VM is given its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[non_exhaustive]
pub enum Reason {
    /// Its present size is the one that it should have.
    Kept,
    /// Its curve is not known, so it keeps its present size.
    Unknown,
    /// Its working set is not known, by which the policy decides, so it keeps its present size.
    NoWorkingSet,
    /// Its curve has no rate, which its bound on misses per second needs, so it keeps its present size.
    NoRate,
    /// It gains more from memory than the others.
    Gains,
    /// Others gain more than it loses within its bound.
    Gives,
    /// It gives all that its bound allows.
    GivesToItsBound,
    /// It is below its floor or above its ceiling.
    Limits,
    /// The host has less memory than all VMs have now.
    HostShort,
}

/// Why a better allocation is not applied.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "name", rename_all = "kebab-case"))]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[non_exhaustive]
pub enum Suppression {
    /// It would gain less than [`Rules::gain_min`].
    Hysteresis {
        /// What it would gain, as a share of the present geometric mean.
        gain: f64,
    },
}

/// Why there is no allocation. Nothing was decided.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A number is outside its range.
    #[error("{what} must be {expected}; got {value}")]
    Rule {
        /// The number's name, with its VM.
        what: String,
        /// Its value.
        value: String,
        /// The range, as a phrase that follows "must be".
        expected: &'static str,
    },
    /// A VM is listed twice.
    #[error("VM {0} appears twice")]
    Twice(VmId),
    /// There are too many VMs for the exhaustive search.
    #[error(
        "the exhaustive search takes at most {most} VMs, and there are {vms}; use optimal or hull"
    )]
    TooMany {
        /// Number of VMs.
        vms: usize,
        /// Maximum number of VMs.
        most: usize,
    },
    /// Floors and bounds together need more memory than the host has.
    #[error(
        "the VMs' minimum sizes and loss bounds need {needed} pages, and the host has {total}: {} pages are missing",
        needed.0.saturating_sub(total.0)
    )]
    Infeasible {
        /// The smallest total that keeps all bounds.
        needed: PageCount,
        /// The host's total.
        total: PageCount,
        /// The smallest size of each VM, in the order of the demands.
        least: Vec<PageCount>,
    },
    /// The policy's allocation breaks a limit: a mistake in its code.
    #[error("a mistake of the policy: it gives {0}")]
    Mistake(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kept => "has what it should have",
            Self::Unknown => "its curve is not known, keeps what it has",
            Self::NoWorkingSet => {
                "its working set, by which the policy decides, is not known, keeps what it has"
            }
            Self::NoRate => {
                "its curve has no rate to check its misses per second, keeps what it has"
            }
            Self::Gains => "gains more than the others",
            Self::Gives => "others gain more than it loses",
            Self::GivesToItsBound => "gives all that its bound allows",
            Self::Limits => "was outside its limits",
            Self::HostShort => "the host has less than all VMs have",
        })
    }
}
