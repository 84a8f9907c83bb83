//! Observation of a running VM: connects a tracing backend to live estimators, period by period.
//!
//! ```text
//! backend (crate trap) ──> references or scans ──> live estimator ──> curve ──> working set
//! ```
//!
//! [`Observer`] is the library used by `plimsoll attach`, and therefore by the daemon's tracers. Only the selected
//! estimator runs, unless two are compared.
//!
//! | module | content |
//! |---|---|
//! | [`args`] | options of tracing, for every verb that traces |
//! | [`intermittent`] | when tracing may rest, and when it resumes |
//! | [`page_log`] | recording of an emulated machine's page walks |
//! | [`selftest`] | a guest with known accesses, traced by each backend and compared with the truth |
//! | [`wss`] | working sets of page logs and traces by each estimator |
//! | [`compare`] | working sets of one running VM by every available method |
//! | [`doctor`] | what a host can do for tracing, and by which backends a target can be traced |
//! | [`description`] | VMs, processes and control groups in a few words |
//! | [`hot`] | the pages to load first when a snapshot resumes |
//! | [`writes()`], [`migration`] | distinct pages written within a time, and how a live migration would go |
//!
//! Not here: how pages are observed (`plimsoll-trap`), how a curve is computed (`plimsoll-estimator`), output.
#![forbid(unsafe_code)]

pub mod args;
pub mod compare;
pub mod description;
pub mod doctor;
mod follow;
mod heat;
pub mod hot;
pub mod intermittent;
mod limits;
pub mod migration;
pub mod page_log;
pub mod selftest;
mod uses;
mod vcpu_share;
mod writes;
pub mod wss;

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plimsoll_estimator::live::{
    self, LIVE_ESTIMATORS, LiveEstimator, LiveEstimatorRow, LiveInput, LiveInputKind, LiveOptions,
    LiveWindow,
};
use plimsoll_estimator::working_set;
use plimsoll_estimator::working_set::SampledShare;
use plimsoll_flow::{
    CurveDistance, CurvePoint, MissRatioCurve, PageCount, Period, TraceMethod, VmId, WorkingSet,
    WorkingSetBound,
};
use plimsoll_trap::{
    Assessment, Backend, BackendRow, Choice, GroupTarget, Observation, Refusal, Scan, TouchCost,
    TraceConfig, TraceTarget, TrapError, Yield,
};
use plimsoll_vm::{HostKernel, MemoryGroup, MemoryProcess, RamState, Target, VmError};

pub use limits::{TracingLimit, WINDOW_MIN};
pub use writes::{ObservedWrites, writes};

use follow::Follower;
use heat::Heat;
pub use heat::HeatCells;
use intermittent::Intermittence;
use vcpu_share::VcpuShare;

/// Time span of the curves of first touches without a reach.
const FIRST_TOUCHES_REACH: Duration = Duration::from_secs(60);

/// Maximum number of changes of the RAM while a period begins.
const CHANGES_MAX: u32 = 5;

/// Why a target is not observed. It is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// Its process cannot be read.
    #[error("cannot inspect {target}")]
    Vm {
        /// Its kind and its name.
        target: String,
        /// Why.
        #[source]
        source: VmError,
    },
    /// It cannot be traced.
    #[error("cannot trace {target}")]
    Trace {
        /// Its kind and its name.
        target: String,
        /// Why, and what to do.
        #[source]
        source: TrapError,
    },
}

/// Computations on the observations, in addition to the working set of each period.
#[derive(Debug, Clone, Copy, Default)]
pub struct ObserverOptions {
    /// The estimator of curves; `None` for the first that accepts the backend's observations.
    pub estimator: Option<&'static LiveEstimatorRow>,
    /// Whether exact LRU and AET both run, on the same references, for [`Observer::curves`].
    pub is_compared: bool,
    /// Time span of a period's curve; `None` for the period alone.
    pub reach: Option<Duration>,
    /// Number of cells of RAM in which touched pages are counted; `None` to disable counting.
    pub heat_cells: Option<u32>,
}

/// A VM being observed, with the observations so far.
#[derive(Debug)]
pub struct Observer {
    /// Name of the VM.
    pub vm: VmId,
    backend: Box<dyn Backend>,
    row: &'static BackendRow,
    options: ObserverOptions,
    /// `None` if the backend's observations yield no curve.
    estimator: Option<Box<dyn LiveEstimator>>,
    /// Exact LRU and AET, if they are compared; one of them is the selected estimator.
    compared: Option<OtherEstimator>,
    has_reach: bool,
    /// Whether the target may grow up to the host's memory, so that curves end where they no longer fall.
    is_open_ended: bool,
    /// Whether uses of page cache by `read(2)` are not seen.
    is_cache_hidden: bool,
    /// Whether any page of a sample was of such page cache.
    has_hidden_cache: bool,
    vcpus: VcpuShare,
    heat: Option<Heat>,
    /// `None` if tracing never rests.
    intermittence: Option<Intermittence>,
    /// Of the backend that samples pages.
    sampled: SampledShare,
}

/// The second estimator of a comparison.
#[derive(Debug)]
struct OtherEstimator {
    other: Box<dyn LiveEstimator>,
    /// Whether the second estimator is exact LRU, and therefore the selected one AET.
    is_other_lru: bool,
}

impl OtherEstimator {
    fn curves(
        &self,
        chosen: Option<MissRatioCurve>,
        other: Option<MissRatioCurve>,
    ) -> Option<Curves> {
        let (lru, aet) = if self.is_other_lru {
            (other, chosen)
        } else {
            (chosen, other)
        };
        Some(Curves {
            lru: lru?,
            aet: aet?,
        })
    }
}

/// Results of one period.
#[derive(Debug)]
pub struct ObservedPeriod {
    /// Results, cost and losses of the backend.
    pub period: Period,
    /// The working set; `None` if nothing was touched.
    pub working_set: Option<WorkingSet>,
    /// The 95 % confidence interval of the working set, by the band of the curve from which it was
    /// read; `None` as upper limit if the curve does not fall that far.
    pub working_set_band: Option<(PageCount, Option<PageCount>)>,
    /// The period's curve, or that of the periods within reach; `None` if no reuse was observed.
    pub curve: Option<MissRatioCurve>,
    /// The period's curves by exact LRU and AET, if they are compared.
    pub compared: Option<Curves>,
    /// Pages touched in each cell of the RAM, if they are counted.
    pub heat: Option<HeatCells>,
    /// Whether page cache was sampled whose uses by `read(2)` are not seen, in this period or before.
    pub has_hidden_cache: bool,
    /// Whether tracing rested, so that working set and curve are those before the rest.
    pub is_resting: bool,
}

impl ObservedPeriod {
    /// Distance of AET from exact LRU on the period's references, if they are compared.
    pub fn distance(&self) -> Option<CurveDistance> {
        self.compared.as_ref()?.distance()
    }
}

/// The curves of two estimators over the same references.
#[derive(Debug)]
pub struct Curves {
    /// By exact reuse distances.
    pub lru: MissRatioCurve,
    /// By reuse times and the AET model.
    pub aet: MissRatioCurve,
}

impl Curves {
    /// Distance between the two over the sizes at which either has a step.
    pub fn distance(&self) -> Option<CurveDistance> {
        let ends = |curve: &MissRatioCurve| {
            let points = curve.points();
            Some((points.first()?.size, points.last()?.size))
        };
        let (lru, aet) = (ends(&self.lru)?, ends(&self.aet)?);
        let sizes = even_sizes(lru.0.max(aet.0), lru.1.max(aet.1));
        self.lru.distance(&self.aet, sizes)
    }
}

/// What is known of a working set from a part of the uses.
fn without_hidden_cache(set: WorkingSet) -> Option<WorkingSet> {
    let bound = WorkingSetBound::AtLeast;
    (set.bound != WorkingSetBound::AtMost).then_some(WorkingSet { bound, ..set })
}

/// A working set of at most the RAM of a VM, which is not open-ended: the last tracked page may stand for less than the others.
fn within_ram(set: WorkingSet, backend: &dyn Backend, is_open_ended: bool) -> WorkingSet {
    if is_open_ended {
        return set;
    }
    let size = set.size.min(PageCount(backend.ram_pages()));
    WorkingSet { size, ..set }
}

/// Whether this backend sees no uses of the target's page cache by `read(2)`: on a kernel that reclaims by generations, they leave a
/// page idle.
fn is_cache_hidden(target: &Target, backend: &BackendRow) -> bool {
    let is_by_idle_marks = matches!(backend.method, TraceMethod::IdlePages | TraceMethod::Damon);
    let is_group = matches!(target, Target::Group(_));
    is_group
        && is_by_idle_marks
        && HostKernel::read(Path::new("/")).reclaims_by_generations() == Some(true)
}

/// What a live estimator takes of an observation.
pub fn input_of<'a>(seen: &Observation<'a>) -> LiveInput<'a> {
    match *seen {
        Observation::References(batch) => LiveInput::References(batch.pages()),
        Observation::Stream {
            references,
            follows,
        } => LiveInput::Stream {
            pages: references.pages(),
            follows,
        },
        Observation::Scan(Scan { touched, .. }) => LiveInput::Scan(touched.pages()),
        Observation::FirstTouches { samples, .. } => LiveInput::FirstTouches(samples),
    }
}

/// At most 1000 sizes from `first` to `last`, evenly spaced.
pub fn even_sizes(first: PageCount, last: PageCount) -> impl Iterator<Item = PageCount> {
    let width = last.0.saturating_sub(first.0);
    let step = width.div_ceil(1000).max(1);
    (0..=width / step).map(move |index| PageCount(first.0 + index * step))
}

impl Observer {
    /// Attaches to a running VM, or to another target, by `method`. Only on VMs does tracing rest.
    ///
    /// # Errors
    ///
    /// Why it cannot be traced, and how to change that; the VM is unchanged.
    pub fn attach(
        target: impl Into<Target>,
        method: TraceMethod,
        config: &TraceConfig,
        options: &ObserverOptions,
    ) -> Result<Self, ObserveError> {
        let (row, target) = (BackendRow::of(method), target.into());
        let backend = Box::new(Follower::attach(&target, row, config)?);
        let mut observer = Self::of(target.id(), row, backend, options);
        if let Target::Vm(vm) = &target {
            observer.vcpus = VcpuShare::of(vm);
            let rests = config.intermittent && row.gives_curve();
            observer.intermittence = rests.then(|| Intermittence::new(vm, row, config));
        }
        observer.is_open_ended = target.vm().is_none();
        observer.is_cache_hidden = is_cache_hidden(&target, row);
        Ok(observer)
    }

    fn of(
        vm: VmId,
        row: &'static BackendRow,
        backend: Box<dyn Backend>,
        options: &ObserverOptions,
    ) -> Self {
        let mut observer = Self {
            vm,
            backend,
            row,
            options: *options,
            estimator: None,
            compared: None,
            has_reach: options.reach.is_some(),
            is_open_ended: false,
            is_cache_hidden: false,
            has_hidden_cache: false,
            vcpus: VcpuShare::default(),
            heat: None,
            intermittence: None,
            sampled: SampledShare::default(),
        };
        observer.start_estimating();
        observer
    }

    /// Creates estimators for the present RAM and drops the previous ones.
    fn start_estimating(&mut self) {
        let (ram, options) = (PageCount(self.backend.ram_pages()), &self.options);
        let live = LiveOptions {
            ram,
            reach: options.reach,
        };
        let takes = match self.row.yields {
            Yield::References => Some(LiveInputKind::References),
            Yield::Stream => Some(LiveInputKind::Stream),
            Yield::Scans => Some(LiveInputKind::Scans),
            Yield::FirstTouches => Some(LiveInputKind::FirstTouches),
            Yield::Sample => None,
        };
        let mut rows = options
            .estimator
            .into_iter()
            .chain(LIVE_ESTIMATORS.iter().copied());
        let chosen = takes.and_then(|takes| rows.find(|row| row.takes == takes));
        let compared =
            chosen.filter(|row| options.is_compared && row.takes == LiveInputKind::References);
        self.compared = compared.map(|chosen| {
            let is_other_lru = chosen.name != live::LRU.name;
            let other = if is_other_lru { live::LRU } else { live::AET };
            OtherEstimator {
                other: (other.make)(&LiveOptions { ram, reach: None }),
                is_other_lru,
            }
        });
        self.heat = options.heat_cells.map(|cells| Heat::new(ram, cells));
        self.estimator = chosen.map(|row| (row.make)(&live));
        self.sampled = SampledShare::default();
    }

    /// Whether uses of page cache by `read(2)` are not seen, so that working sets with page cache are lower bounds.
    pub fn is_cache_hidden(&self) -> bool {
        self.is_cache_hidden
    }

    /// Cost to the VM of an observed touch on this host: a trap, or a minor fault.
    pub fn touch_cost(&self) -> TouchCost {
        self.backend.touch_cost()
    }

    /// Observes for one period, or checks for one whether a rest is over. If RAM was plugged or unplugged, all
    /// estimates start anew.
    ///
    /// # Errors
    ///
    /// As [`Backend::run_period`], and [`TrapError::Interrupted`] while QEMU migrates or saves the VM;
    /// [`curve`](Self::curve) still covers the periods before.
    pub fn period(&mut self, stop: &AtomicBool) -> Result<ObservedPeriod, TrapError> {
        if self.is_resting() {
            return self.rest(stop);
        }
        for _ in 1..CHANGES_MAX {
            match self.try_period(stop) {
                Err(TrapError::RamChanged { .. }) => self.start_estimating(),
                other => return other.map(|period| self.settled(period)),
            }
        }
        self.try_period(stop)
    }

    /// Whether tracing rests because the phase of the VM is steady; see [`TraceConfig::intermittent`].
    pub fn is_resting(&self) -> bool {
        let intermittence = self.intermittence.as_ref();
        intermittence.is_some_and(Intermittence::is_resting)
    }

    /// Lets tracing rest if `period` shows that the phase is steady.
    fn settled(&mut self, period: ObservedPeriod) -> ObservedPeriod {
        if let Some(intermittence) = &mut self.intermittence
            && let Some(checker) = intermittence.settle(period.curve.as_ref(), period.working_set)
        {
            self.backend = checker;
        }
        period
    }

    /// A period of a rest, with the results before it.
    fn rest(&mut self, stop: &AtomicBool) -> Result<ObservedPeriod, TrapError> {
        let ran = self.backend.run_period(stop, &mut |_| {});
        let checked = ran.map(|mut period| {
            let checked = self.intermittence.as_mut();
            (checked.and_then(|found| found.check(&mut period)), period)
        });
        let is_kept = match &checked {
            Ok((found, _)) => matches!(found, Some((_, false))),
            Err(error) => !matches!(error, TrapError::RamChanged { .. }),
        };
        if !is_kept && let Some(intermittence) = &mut self.intermittence {
            self.backend = intermittence.wake()?;
            self.start_estimating();
        }
        match checked {
            Ok((Some((last, _)), period)) => Ok(ObservedPeriod {
                working_set_band: last.curve.as_ref().and_then(working_set_band),
                working_set: last.working_set,
                curve: last.curve,
                compared: None,
                heat: None,
                has_hidden_cache: self.has_hidden_cache,
                is_resting: true,
                period,
            }),
            Ok((None, _)) | Err(TrapError::RamChanged { .. }) => self.period(stop),
            Err(error) => Err(error),
        }
    }

    fn try_period(&mut self, stop: &AtomicBool) -> Result<ObservedPeriod, TrapError> {
        let (heat, compared) = (&mut self.heat, &mut self.compared);
        let estimator = &mut self.estimator;
        let is_open_ended = self.is_open_ended;
        self.vcpus.begin();
        let ran = self.backend.run_period(stop, &mut |seen| {
            let input = input_of(seen);
            if let Some(estimator) = estimator {
                estimator.observe(&input);
            }
            if let Some(compared) = compared {
                compared.other.observe(&input);
            }
            if let Some(heat) = heat {
                heat.count(seen.pages());
            }
        });
        let period = match ran {
            Ok(period) => period,
            Err(error) => {
                // The observations of this period are incomplete.
                if let Some(estimator) = estimator {
                    estimator.discard_window();
                }
                if let Some(compared) = compared {
                    compared.other.discard_window();
                }
                return Err(error);
            }
        };
        let shows_sizes = !limits::has_few_pages(&period);
        let window = LiveWindow::of(&period);
        let close = |estimator: &mut Box<dyn LiveEstimator>| {
            if !shows_sizes {
                estimator.discard_window();
                return None;
            }
            estimator.close_window(&window)
        };
        let curve = estimator.as_mut().and_then(close);
        let compared = compared.as_mut().and_then(|compared| {
            let other = close(&mut compared.other);
            compared.curves(curve.clone(), other)
        });
        self.has_hidden_cache |= self.is_cache_hidden && period.scans.cache_pages > 0;
        let mut working_set = working_set_of(&period, curve.as_ref(), &mut self.sampled);
        working_set = working_set.filter(|_| shows_sizes);
        if self.has_hidden_cache {
            working_set = working_set.and_then(without_hidden_cache);
        }
        working_set = working_set.map(|set| within_ram(set, &*self.backend, is_open_ended));
        let working_set_band = curve.as_ref().and_then(working_set_band);
        let curve = if self.has_reach {
            estimator
                .as_ref()
                .and_then(|estimator| estimator.recent_curve())
        } else {
            curve
        };
        self.vcpus.end(
            match self.row.yields {
                Yield::FirstTouches => self.options.reach.unwrap_or(FIRST_TOUCHES_REACH),
                _ => self.options.reach.unwrap_or_default(),
            },
            &period.undisturbed,
        );
        let curve =
            curve.map(|curve| until_lowest(curve, is_open_ended).with_vcpus(self.vcpus.recent()));
        Ok(ObservedPeriod {
            working_set,
            working_set_band,
            curve,
            compared,
            has_hidden_cache: self.has_hidden_cache,
            is_resting: false,
            heat: heat.as_mut().map(|heat| heat.take(period.scale)),
            period,
        })
    }

    /// The working set by the curve of all periods so far; `None` without one, or if only an upper bound is known and uses of page cache
    /// are missing.
    pub fn working_set(&self) -> Option<WorkingSet> {
        let set = read_from(&self.curve()?, self.row);
        let set = within_ram(set, &*self.backend, self.is_open_ended);
        if self.has_hidden_cache {
            return without_hidden_cache(set);
        }
        Some(set)
    }

    /// The curve of all periods so far, weighted by their lengths; `None` if no page was used twice.
    pub fn curve(&self) -> Option<MissRatioCurve> {
        let curve = until_lowest(self.estimator.as_ref()?.curve()?, self.is_open_ended);
        Some(curve.with_vcpus(match self.row.yields {
            Yield::FirstTouches => self.vcpus.recent(),
            _ => self.vcpus.whole(),
        }))
    }

    /// The curves of all periods so far by both estimators; `None` if no page was used twice, or if they are not
    /// compared.
    pub fn curves(&self) -> Option<Curves> {
        let compared = self.compared.as_ref()?;
        compared.curves(self.curve(), compared.other.curve())
    }

    /// Restores the VM and ends the observation.
    ///
    /// # Errors
    ///
    /// As [`Backend::detach`].
    pub fn detach(self) -> Result<(), TrapError> {
        self.backend.detach()
    }
}

/// Assesses every backend for a target, in the order of the registry. Does not change it.
///
/// # Errors
///
/// Its process cannot be read.
pub fn assess(
    target: impl Into<Target>,
    config: &TraceConfig,
) -> Result<Vec<Assessment>, ObserveError> {
    let target = target.into();
    if let Target::Group(group) = &target {
        return Ok(plimsoll_trap::assess_group(&group_of(group)));
    }
    let mut assessments = plimsoll_trap::assess(&target_of(&target)?, config);
    // As on attaching, a monitor that does not answer is no obstacle.
    if let Target::Vm(vm) = &target
        && let Ok(Some(transfer)) = vm.transfer(Some(follow::MONITOR_MAX))
    {
        for assessment in &mut assessments {
            let why = transfer.to_string();
            let refusal = Refusal::MemoryTransfer { why };
            assessment.refusals.insert(0, refusal);
        }
    }
    Ok(assessments)
}

/// Chooses among `candidates` the backend that costs a target least for the same error. Does not change it.
///
/// # Errors
///
/// None of them can attach, or its process cannot be read.
pub fn choose(
    target: impl Into<Target>,
    candidates: &[&BackendRow],
    config: &TraceConfig,
) -> Result<Choice, ObserveError> {
    let target = target.into();
    let mut assessments = assess(&target, config)?;
    assessments.retain(|found| candidates.iter().any(|row| row.method == found.row.method));
    let choice = match &target {
        Target::Vm(vm) => Choice::of(assessments, vm.pid),
        Target::Process(_) | Target::Group(_) => Choice::of_any_memory(assessments),
    };
    choice.map_err(|source| ObserveError::Trace {
        target: target.to_string(),
        source,
    })
}

/// The process of a target; this one for a control group, which has none of its own.
pub fn pid_of(target: &Target) -> u32 {
    match target {
        Target::Vm(vm) => vm.pid,
        Target::Process(process) => process.process.pid,
        Target::Group(_) => std::process::id(),
    }
}

/// The description of a VM or a process for a backend.
///
/// # Errors
///
/// Its process cannot be read.
///
/// # Panics
///
/// For a control group.
pub fn target_of(target: impl Into<Target>) -> Result<TraceTarget, ObserveError> {
    let target = target.into();
    let unreadable = |source| ObserveError::Vm {
        target: target.to_string(),
        source,
    };
    match &target {
        Target::Vm(vm) => {
            let states = vm.ram_states().map_err(unreadable)?;
            Ok(TraceTarget {
                pid: vm.pid,
                is_vm: true,
                ram: vm.ram.clone(),
                locked: states.iter().any(|state| state.locked),
                userfault: states.iter().any(|state| state.userfaultfd),
                vcpu_threads: vm.vcpus.iter().map(|vcpu| vcpu.thread_id).collect(),
            })
        }
        Target::Process(process) => {
            let state = process.ram_state().map_err(unreadable)?;
            Ok(process_target(process, state))
        }
        Target::Group(_) => panic!("a control group is no process"),
    }
}

fn process_target(process: &MemoryProcess, state: RamState) -> TraceTarget {
    TraceTarget {
        pid: process.process.pid,
        is_vm: false,
        ram: process.ram.mappings.clone(),
        locked: state.locked,
        userfault: state.userfaultfd,
        vcpu_threads: vec![],
    }
}

/// The description of a control group for a backend.
fn group_of(group: &MemoryGroup) -> GroupTarget {
    GroupTarget {
        directory: group.directory.clone(),
        inodes: group.inodes.clone(),
    }
}

/// A curve without the sizes beyond the first at which it is as low as at its end, if it `is_open_ended`.
fn until_lowest(curve: MissRatioCurve, is_open_ended: bool) -> MissRatioCurve {
    let points = curve.points();
    let lowest = points.last().map_or(0.0, |point| point.miss_ratio);
    let mut ratios = points.iter().map(|point| point.miss_ratio);
    let last = ratios.position(|ratio| ratio <= lowest);
    let Some(last) = last.filter(|_| is_open_ended) else {
        return curve;
    };
    let shorter = curve.with_points(points[..=last].to_vec());
    shorter.unwrap_or(curve)
}

/// The sizes at which the limits of a curve's band fall to the miss ratio of a working set; `None` if not even the
/// lower limit does.
pub fn working_set_band(curve: &MissRatioCurve) -> Option<(PageCount, Option<PageCount>)> {
    let first = |limit: fn(&CurvePoint) -> f64| {
        let mut points = curve.points().iter();
        let reached = points.find(|point| limit(point) <= WorkingSet::MISS_RATIO);
        reached.map(|point| point.size)
    };
    Some((first(|point| point.low)?, first(|point| point.high)))
}

/// The working set by a curve of a backend.
fn read_from(curve: &MissRatioCurve, backend: &BackendRow) -> WorkingSet {
    let set = working_set(curve);
    let is_first = |size| {
        curve
            .points()
            .first()
            .is_none_or(|first| first.size >= size)
    };
    let bound = match backend.yields {
        // Pages that are only read need memory too.
        _ if !backend.sees_reads => WorkingSetBound::AtLeast,
        // A control group needs memory beside its page cache.
        Yield::Stream => WorkingSetBound::AtLeast,
        // A curve begins at the smallest size that is resolved, and need not fall there.
        Yield::FirstTouches | Yield::References | Yield::Scans
            if set.bound == WorkingSetBound::Estimate && is_first(set.size) =>
        {
            WorkingSetBound::AtMost
        }
        _ => set.bound,
    };
    WorkingSet { bound, ..set }
}

/// The working set of a period: read from its curve; without one, from the pages touched.
fn working_set_of(
    period: &Period,
    curve: Option<&MissRatioCurve>,
    sampled: &mut SampledShare,
) -> Option<WorkingSet> {
    use WorkingSetBound::{AtLeast, AtMost, Estimate};
    let backend = BackendRow::of(period.method);
    let is_empty = match backend.yields {
        // The curve covers more than the period.
        Yield::FirstTouches => false,
        Yield::Sample => period.tracked_pages == 0,
        Yield::References | Yield::Stream | Yield::Scans => period.distinct_pages == 0,
    };
    if is_empty {
        return None;
    }
    let touched = PageCount(period.distinct_pages * u64::from(period.scale));
    let set = curve.map(|curve| read_from(curve, backend));
    let (size, bound) = match (backend.yields, set) {
        (_, None) if !backend.sees_reads => (touched, AtLeast),
        (Yield::Stream, None) => (touched, AtLeast),
        // All touched pages fit into the hot set, below which nothing is resolved.
        (Yield::References, None) => {
            let hot_set_pages = u64::from(period.traps.hot_set_pages);
            let is_resolved = period.distinct_pages > hot_set_pages || period.budget_exhausted;
            (touched, if is_resolved { AtLeast } else { AtMost })
        }
        // For a size below the resolution, only an upper bound is known.
        (Yield::Scans, Some(set)) => {
            let is_resolved = set.size.0 > period.resolution_pages();
            let bound = match set.bound {
                Estimate if !is_resolved => AtMost,
                bound => bound,
            };
            (set.size, bound)
        }
        (Yield::Scans | Yield::FirstTouches, None) => return None,
        (Yield::References | Yield::Stream | Yield::FirstTouches, Some(set)) => {
            (set.size, set.bound)
        }
        (Yield::Sample, _) => {
            let share = period.distinct_pages as f64 / period.tracked_pages as f64;
            let share = sampled.add(share);
            (PageCount(period.populated_pages).scaled(share), Estimate)
        }
    };
    Some(WorkingSet { size, bound })
}

#[cfg(test)]
mod tests;
