//! What every policy takes and gives.

use plimsoll_flow::{MissRatioCurve, PageCount, VmId};

/// One VM as a policy sees it. Sizes are all memory that serves it: its own and its cache under the disk.
#[derive(Debug, Clone, PartialEq)]
pub struct Demand {
    /// The VM.
    pub vm: VmId,
    /// How often it misses at every size. `None` while nobody knows: it then keeps what it has.
    pub curve: Option<MissRatioCurve>,
    /// What it is entitled to, as far as its ceiling lets it: its misses at this size are what gains and losses are
    /// measured by.
    pub baseline: PageCount,
    /// What it has now.
    pub current: PageCount,
    /// It never gets less.
    pub floor: PageCount,
    /// It never gets more.
    pub ceiling: PageCount,
    /// The promise: its misses rise at most by this share of those at the baseline, 0.0 or more.
    pub max_loss: f64,
    /// Its proportional right to memory beside the others', 1 or more.
    pub shares: u32,
    /// Pages it uses by an estimate of its own (ESX samples them); only [`Policy::EsxSampling`] asks for it.
    pub working_set: Option<PageCount>,
}

/// What holds for all VMs of a host together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// All memory there is to divide.
    pub total: PageCount,
    /// Sizes are multiples of this, save where a floor, a ceiling, a baseline or what a VM has now is none; 1 or more.
    pub unit: PageCount,
    /// Most that a VM's size may change by, a unit or more; `None` for no limit. Floor, ceiling, promise and total hold
    /// all the same: who is below what it was promised is raised to it, and a host that is short takes more.
    pub step: Option<PageCount>,
    /// Hysteresis: the least fall of the geometric mean, as a share of the present one, that is worth a move; 0.0 or more.
    pub gain_min: f64,
    /// Miss ratios below this count as this: quotients of almost nothing say nothing (\[LS07\] §6.4); above 0.0.
    pub miss_ratio_min: f64,
}

impl Rules {
    /// The paper's unit, 4 MiB in pages of 4 KiB (\[LS07\] §6.5).
    pub const UNIT: PageCount = PageCount(1024);
    /// Least miss ratio told from none.
    pub const MISS_RATIO_MIN: f64 = 0.001;

    /// The paper's rules for so much memory: its unit, no step limit, no hysteresis.
    #[must_use]
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

/// How memory is divided.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Policy {
    /// The geometric mean of all VMs' relative misses is made as small as it gets while no VM loses more than it was
    /// promised (\[LS07\] §4.2).
    Isolated(Search),
    /// VMs whose curve is flat from a smaller size on give their surplus to those that gain, by shares (\[LS07\] §4.2).
    Esx {
        /// Share of the idle memory that is taken, 0.0 to 1.0.
        idle_tax: f64,
    },
    /// The same from sampled working sets, as the original does.
    EsxSampling {
        /// Share of the idle memory that is taken, 0.0 to 1.0.
        idle_tax: f64,
    },
}

impl Policy {
    /// ESX's default tax.
    pub const IDLE_TAX: f64 = 0.75;
}

/// How the best division is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Search {
    /// [`Optimal`](Self::Optimal) while it takes no longer than a turn may, [`Hull`](Self::Hull) beyond.
    #[default]
    Auto,
    /// Every division; at most three VMs.
    Exhaustive,
    /// A unit at a time from who loses least to who gains most.
    Greedy,
    /// Random moves, worse ones ever more rarely.
    Annealing {
        /// What the random numbers follow from.
        seed: u64,
    },
    /// Exact, by dynamic programming. Where that would take more than seconds, the best that was found, with a
    /// certified gap above 0.0.
    Optimal,
    /// On the curves' convex minorants, with a certified gap.
    Hull,
}

/// What a policy gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocation {
    /// Each VM's share, in the demands' order.
    pub targets: Vec<Target>,
    /// Predicted geometric mean of relative misses over the VMs whose curve is known; 1.0 without any.
    pub geometric_mean: f64,
    /// The same at what the VMs have now.
    pub geometric_mean_now: f64,
    /// The result is at most this share of itself above the least possible mean; 0.0 is the optimum, `None` if the
    /// search says nothing of it.
    pub gap: Option<f64>,
    /// Memory given to nobody.
    pub spare: PageCount,
    /// Why nobody is moved although some could be.
    pub held: Option<Held>,
    /// By which search, after `Auto` has chosen; `None` for policies that search for nothing.
    pub search: Option<Search>,
}

/// What one VM is to have.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// The VM.
    pub vm: VmId,
    /// Its new size.
    pub size: PageCount,
    /// Predicted misses over those at the baseline; `None` if its curve is not known.
    pub relative: Option<Relative>,
    /// The same at what it has now.
    pub relative_now: Option<Relative>,
    /// What made it so.
    pub reason: Reason,
}

/// Misses at a size over those at the baseline, with the band that the curve leaves; 1.0 is unchanged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Relative {
    /// What is expected.
    pub expected: f64,
    /// Lower edge.
    pub low: f64,
    /// Upper edge: what promises are kept by.
    pub high: f64,
}

/// Why a VM gets what it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// It has what it should have.
    Kept,
    /// Its curve is not known, so it keeps what it has.
    Unknown,
    /// It gains most by more.
    Gains,
    /// Others gain more than it loses, within its promise.
    Gives,
    /// It could give more, were it not for its promise.
    GivesToItsBound,
    /// It is below its floor or above its ceiling.
    Limits,
    /// The host has less than all have now.
    HostShort,
}

/// Why a better division is not taken.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Held {
    /// It would gain less than [`Rules::gain_min`].
    Hysteresis {
        /// What it would gain, as a share of the present geometric mean.
        gain: f64,
    },
}

/// Why there is no division. Nothing was decided.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A number that means nothing.
    #[error("{what} of {value}: expected {expected}")]
    Rule {
        /// Which.
        what: String,
        /// Its value.
        value: String,
        /// What is taken.
        expected: &'static str,
    },
    /// The same VM twice.
    #[error("VM {0} is there twice")]
    Twice(VmId),
    /// More than one can try all divisions of.
    #[error("{vms} VMs: every division is tried for at most {most}; take optimal or hull")]
    TooMany {
        /// VMs given.
        vms: usize,
        /// VMs taken.
        most: usize,
    },
    /// Promises and floors together need more than there is.
    #[error(
        "the VMs' floors and promises need {needed} pages, and the host has {total}: {} pages are missing",
        needed.0.saturating_sub(total.0)
    )]
    Infeasible {
        /// The least that keeps all promises.
        needed: PageCount,
        /// What there is.
        total: PageCount,
        /// The least that each VM needs, in the demands' order.
        least: Vec<PageCount>,
    },
}
