//! A simulated host: VMs that miss by curves, with balloons that follow, lag, get stuck or report false values.
//!
//! The turn loop runs on it in tests and benchmarks as on a real one. The caller advances its time:
//! [`SimulatedHost::pass`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use plimsoll_actuator::{
    Absence, ActuatorError, BlockReads, Delivery, DiskStat, GuestStats, MemoryPart, Observation,
    Part, Progress, VmMemory,
};
use plimsoll_flow::{Accelerator, MissRatioCurve, PageSize, TraceMethod, VmId, WorkingSet};
use plimsoll_protocol::vm::{CurveSource, MissCost, MissCostSource, TraceState, TraceView};

use plimsoll_daemon::config::{Config, VmRule, Workflow};
use plimsoll_daemon::host::{
    DiscoveredVm, Feed, FeedReport, Host, MemoryPressure, ObservedCurve, VmHandles,
};
use plimsoll_daemon::vm::pages;

/// Time without progress after which a simulated balloon reports it.
const STUCK_MS: u64 = 10_000;

/// How a balloon follows its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalloonBehaviour {
    /// By this many bytes a second.
    Pace(u64),
    /// Not at all.
    Never,
    /// There is no balloon.
    Absent,
    /// Its monitor fails: commands may or may not arrive.
    Broken,
}

/// Interval at which a simulated guest reports.
const REPORT_INTERVAL_MS: u64 = 2000;

/// What a guest reports of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reports {
    /// The truth.
    True,
    /// Nothing, ever.
    Nothing,
    /// Nothing more: the last report gets old.
    Ended,
    /// That this much is available.
    Available(u64),
    /// Many major page faults, and processes killed, in each report.
    Distress,
    /// Counters that go back.
    Backwards,
}

/// A simulated VM.
#[derive(Debug, Clone)]
pub struct SimulatedVm {
    /// Its process, which distinguishes it from an earlier VM of the same name.
    pub pid: u32,
    /// Start of that process, because process numbers are reused.
    pub start_ticks: u64,
    /// Its RAM.
    pub ram_bytes: u64,
    /// Memory of its own.
    pub direct_bytes: u64,
    /// Capacity of its cache; `None` if it has none.
    pub cache_bytes: Option<u64>,
    /// Its true miss-ratio curve.
    pub truth: MissRatioCurve,
    /// Its observed miss-ratio curve.
    pub claimed: Option<MissRatioCurve>,
    /// References a second.
    pub references_per_second: u64,
    /// How its balloon follows its target.
    pub follows: BalloonBehaviour,
    /// How long its monitor blocks a query without an answer.
    pub silence: Duration,
    /// Memory of processes that the guest, which has no swap, cannot give.
    pub used_bytes: u64,
    /// What the guest reports of its memory.
    pub reports: Reports,
    /// Processes that the guest has killed for lack of memory.
    pub oom_kills: u64,
    /// How far the time of day by which its reports are dated is ahead, in s.
    pub clock_step_s: u64,
    report: Option<(u64, GuestStats)>,
    /// Its working set as its tracer reports it.
    pub working_set: Option<WorkingSet>,
    /// How long it waits for a miss, and who measures that.
    pub miss_cost: MissCost,
    /// Share of the time in which its threads wait for memory of the host below a size in bytes; `None` without a
    /// control group of its own.
    pub stalls_below: Option<(u64, f64)>,
    stalled_ms: f64,
    waited_ms: f64,
    target_bytes: Option<u64>,
    /// When its target was set, or its size last changed.
    moved_at_ms: u64,
    references: u64,
    misses: f64,
}

impl SimulatedVm {
    /// A VM with this much RAM, all its own, whose true and observed curve is `truth`; its balloon moves 64 MiB a
    /// second.
    #[must_use]
    pub fn new(pid: u32, ram_bytes: u64, truth: MissRatioCurve) -> Self {
        Self {
            pid,
            start_ticks: 0,
            ram_bytes,
            direct_bytes: ram_bytes,
            cache_bytes: None,
            claimed: Some(truth.clone()),
            truth,
            references_per_second: 1000,
            follows: BalloonBehaviour::Pace(64 << 20),
            silence: Duration::ZERO,
            used_bytes: 16 << 20,
            reports: Reports::True,
            oom_kills: 0,
            clock_step_s: 0,
            report: None,
            working_set: None,
            miss_cost: MissCost::default(),
            stalls_below: None,
            stalled_ms: 0.0,
            waited_ms: 0.0,
            target_bytes: None,
            moved_at_ms: 0,
            references: 0,
            misses: 0.0,
        }
    }

    /// Its present size.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.direct_bytes + self.cache_bytes.unwrap_or(0)
    }

    /// Memory available to its processes.
    #[must_use]
    pub fn available_bytes(&self) -> u64 {
        self.direct_bytes.saturating_sub(self.used_bytes)
    }

    /// Its processes allocate so much memory more; one of them is killed if there is too little.
    pub fn allocate(&mut self, bytes: u64) {
        if bytes > self.available_bytes() {
            self.oom_kills += 1;
        } else {
            self.used_bytes += bytes;
        }
    }

    fn make_report(&mut self, now_ms: u64) {
        let due = self
            .report
            .is_none_or(|(at_ms, _)| now_ms >= at_ms + REPORT_INTERVAL_MS);
        if !due || matches!(self.reports, Reports::Nothing | Reports::Ended) {
            return;
        }
        let mut stats = GuestStats {
            updated_unix_s: now_ms / 1000 + self.clock_step_s,
            interval_s: REPORT_INTERVAL_MS / 1000,
            total_bytes: Some(self.direct_bytes),
            available_bytes: Some(self.available_bytes()),
            major_faults: Some(0),
            oom_kills: Some(self.oom_kills),
            ..GuestStats::default()
        };
        match self.reports {
            Reports::Available(bytes) => stats.available_bytes = Some(bytes),
            Reports::Distress => {
                stats.major_faults = Some(now_ms * 100);
                stats.oom_kills = Some(now_ms);
            }
            Reports::Backwards => {
                stats.major_faults = Some(u64::MAX - now_ms);
                stats.oom_kills = Some(u64::MAX - now_ms);
            }
            _ => {}
        }
        self.report = Some((now_ms, stats));
    }

    /// Its last report, with its age.
    fn stats(&self, now_ms: u64) -> Option<GuestStats> {
        let (at_ms, stats) = self.report?;
        let age_s = (now_ms - at_ms) / 1000;
        Some(GuestStats { age_s, ..stats })
    }

    fn pass(&mut self, time: Duration, now_ms: u64) {
        let seconds = time.as_secs_f64();
        let had = self.direct_bytes;
        if let (BalloonBehaviour::Pace(pace), Some(target)) = (self.follows, self.target_bytes) {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a pace and a time"
            )]
            let most = (pace as f64 * seconds) as u64;
            let step = self.direct_bytes.abs_diff(target).min(most);
            if self.direct_bytes > target {
                // Its balloon gets no memory of processes.
                self.direct_bytes -= step.min(self.available_bytes());
            } else {
                self.direct_bytes += step;
            }
        }
        if self.direct_bytes != had {
            self.moved_at_ms = now_ms;
        }
        let references = self.references_per_second as f64 * seconds;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate and a time"
        )]
        let whole = references as u64;
        self.references += whole;
        let misses = whole as f64 * self.truth.miss_ratio(pages(self.size_bytes()));
        self.misses += misses;
        self.waited_ms += misses * self.miss_cost.ms;
        if let Some((bytes, share)) = self.stalls_below
            && self.size_bytes() < bytes
        {
            self.stalled_ms += share * seconds * 1000.0;
        }
    }

    fn part(&self, now_ms: u64) -> Part {
        let left_bytes = self
            .target_bytes
            .map_or(0, |target| target.abs_diff(self.direct_bytes));
        let unchanged_ms = now_ms - self.moved_at_ms;
        let progress = match (self.follows, self.target_bytes) {
            (BalloonBehaviour::Absent, _) => Progress::Absent(Absence::NoDevice),
            (_, None) => Progress::NoTarget,
            (_, Some(_)) if left_bytes == 0 => Progress::Reached,
            (_, Some(_)) if unchanged_ms >= STUCK_MS => Progress::Stuck {
                unchanged_ms,
                left_bytes,
            },
            (_, Some(_)) => Progress::Following {
                bytes_per_second: 0,
                left_bytes,
            },
        };
        Part {
            actual_bytes: self.direct_bytes,
            target_bytes: self.target_bytes,
            in_doubt: false,
            reserved_bytes: self.direct_bytes.max(self.target_bytes.unwrap_or(0)),
            max_bytes: Some(self.ram_bytes),
            progress,
            age_ms: Some(0),
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count"
    )]
    fn disk(&self) -> DiskStat {
        DiskStat {
            cache_bytes: self.cache_bytes.unwrap_or(0),
            read_blocks: self.references,
            hits: self.references.saturating_sub(self.misses as u64),
            read_wait_ns: (self.miss_cost.source == MissCostSource::DiskDaemon)
                .then_some((self.waited_ms * 1e6) as u64),
            ..DiskStat::default()
        }
    }
}

impl SimulatedVm {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count and a time"
    )]
    fn blocks(&self) -> Option<BlockReads> {
        let counted = self.miss_cost.source == MissCostSource::BlockStatistics;
        counted.then_some(BlockReads {
            reads: self.misses as u64,
            wait_ns: (self.waited_ms * 1e6) as u64,
        })
    }
}

/// State shared by all parts of the simulation.
#[derive(Debug, Default)]
struct Inner {
    now_ms: u64,
    vms: BTreeMap<String, SimulatedVm>,
    /// RAM of the host that is available, and time in which all its tasks waited for memory.
    available_bytes: Option<u64>,
    stalled: Duration,
    /// Maximum total of all VMs' memory so far, with what they could still have taken.
    most_bytes: u64,
}

impl Inner {
    /// Memory that the VMs have, or may take without a request.
    fn reserved_bytes(&self) -> u64 {
        let vms = self.vms.values();
        vms.map(|vm| {
            vm.direct_bytes.max(vm.target_bytes.unwrap_or(0)) + vm.cache_bytes.unwrap_or(0)
        })
        .sum()
    }

    fn watch(&mut self) {
        self.most_bytes = self.most_bytes.max(self.reserved_bytes());
    }
}

/// A simulated host. Clones share their state.
#[derive(Debug, Clone, Default)]
pub struct SimulatedHost {
    inner: Arc<Mutex<Inner>>,
}

impl SimulatedHost {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a VM, or changes it.
    pub fn put(&self, name: &str, vm: SimulatedVm) {
        let mut inner = self.lock();
        inner.vms.insert(name.to_owned(), vm);
        inner.watch();
    }

    /// Sets the host's available RAM.
    pub fn set_available(&self, bytes: u64) {
        self.lock().available_bytes = Some(bytes);
    }

    /// All tasks of the host waited for memory for so long.
    pub fn stall(&self, time: Duration) {
        self.lock().stalled += time;
    }

    /// Ends a VM.
    pub fn end(&self, name: &str) {
        self.lock().vms.remove(name);
    }

    /// The state of a VM.
    #[must_use]
    pub fn vm(&self, name: &str) -> Option<SimulatedVm> {
        self.lock().vms.get(name).cloned()
    }

    /// Changes a VM.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut SimulatedVm)) {
        if let Some(vm) = self.lock().vms.get_mut(name) {
            change(vm);
        }
    }

    /// Advances the time.
    pub fn pass(&self, time: Duration) {
        let mut inner = self.lock();
        inner.now_ms += u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let now_ms = inner.now_ms;
        for vm in inner.vms.values_mut() {
            vm.pass(time, now_ms);
            vm.make_report(now_ms);
        }
        inner.watch();
    }

    /// Memory that the VMs have now, or may take without a request.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.lock().reserved_bytes()
    }

    /// Maximum of the VMs' total memory, including memory they could still have taken without a request.
    #[must_use]
    pub fn most_bytes(&self) -> u64 {
        self.lock().most_bytes
    }
}

impl Host for SimulatedHost {
    fn vms(&mut self) -> (Vec<DiscoveredVm>, Vec<String>) {
        let inner = self.lock();
        let found = inner.vms.iter().map(|(name, vm)| DiscoveredVm {
            vm: name.clone(),
            pid: vm.pid,
            start_ticks: vm.start_ticks,
            uuid: None,
            accelerator: Some(Accelerator::Tcg),
            libvirt: false,
            ram_bytes: vm.ram_bytes,
            backends: Vec::new(),
        });
        (found.collect(), Vec::new())
    }

    fn open(&mut self, found: &DiscoveredVm, _rule: &VmRule, config: &Config) -> VmHandles {
        let source = match config.workflow {
            Workflow::Trap => CurveSource::Trap,
            Workflow::Cache { .. } => CurveSource::Disk,
        };
        let vm = VmId(found.vm.clone());
        let part = |is_cache| {
            Box::new(SimulatedPart {
                vm: vm.clone(),
                is_cache,
                host: self.clone(),
            }) as Box<dyn MemoryPart>
        };
        let has_cache = self
            .vm(&found.vm)
            .is_some_and(|vm| vm.cache_bytes.is_some());
        let cache = has_cache.then(|| part(true));
        VmHandles {
            actuator: VmMemory::new(vm.clone(), part(false), cache),
            feeds: vec![Box::new(SimulatedFeed {
                vm: found.vm.clone(),
                source,
                host: self.clone(),
            })],
        }
    }

    fn ram(&mut self) -> (u64, u64) {
        (1 << 40, self.lock().available_bytes.unwrap_or(1 << 39))
    }

    fn pressure(&mut self) -> Option<MemoryPressure> {
        Some(MemoryPressure {
            full_total: self.lock().stalled,
            ..MemoryPressure::default()
        })
    }

    fn pressure_of(&mut self, found: &DiscoveredVm) -> Option<MemoryPressure> {
        let inner = self.lock();
        let vm = inner.vms.get(&found.vm)?;
        vm.stalls_below?;
        Some(MemoryPressure {
            some_total: Duration::from_secs_f64(vm.stalled_ms / 1000.0),
            ..MemoryPressure::default()
        })
    }

    fn store(&mut self) -> Option<Result<u64, ActuatorError>> {
        None
    }

    fn resize_store(&mut self, _capacity_bytes: u64) -> Result<(), ActuatorError> {
        Ok(())
    }
}

/// A VM's own memory, or the cache under its disk.
#[derive(Debug)]
struct SimulatedPart {
    vm: VmId,
    is_cache: bool,
    host: SimulatedHost,
}

impl SimulatedPart {
    fn broken(&self, target_bytes: u64) -> ActuatorError {
        ActuatorError::Set {
            what: format!("balloon of VM {}", self.vm),
            target_bytes,
            sent: Delivery::Maybe,
            source: "the monitor closed the connection".into(),
        }
    }
}

impl MemoryPart for SimulatedPart {
    fn poll(&mut self, failures: &mut Vec<ActuatorError>) -> Observation {
        let vms = self.host.lock();
        let vm = vms.vms.get(&self.vm.0);
        let silence = vm.map_or(Duration::ZERO, |vm| vm.silence);
        drop(vms);
        if !silence.is_zero() {
            std::thread::sleep(silence);
            failures.push(ActuatorError::Query {
                what: format!("balloon of VM {}", self.vm),
                source: "no answer".into(),
            });
            return Observation::default();
        }
        let inner = self.host.lock();
        let vm = inner.vms.get(&self.vm.0);
        let own = vm.filter(|_| !self.is_cache);
        Observation {
            disk: vm.map(SimulatedVm::disk),
            guest: own.and_then(|vm| vm.stats(inner.now_ms)),
            blocks: own.and_then(SimulatedVm::blocks),
        }
    }

    fn part(&self) -> Part {
        let inner = self.host.lock();
        let Some(vm) = inner.vms.get(&self.vm.0) else {
            // It has ended, which the loop notices next.
            return Part {
                actual_bytes: 0,
                target_bytes: None,
                in_doubt: false,
                reserved_bytes: 0,
                max_bytes: None,
                progress: Progress::NoTarget,
                age_ms: None,
            };
        };
        if !self.is_cache {
            return vm.part(inner.now_ms);
        }
        let bytes = vm.cache_bytes.unwrap_or(0);
        Part {
            actual_bytes: bytes,
            target_bytes: Some(bytes),
            in_doubt: false,
            reserved_bytes: bytes,
            max_bytes: None,
            progress: Progress::Reached,
            age_ms: Some(0),
        }
    }

    fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        let mut inner = self.host.lock();
        let now_ms = inner.now_ms;
        let Some(vm) = inner.vms.get_mut(&self.vm.0) else {
            return Ok(());
        };
        if self.is_cache {
            vm.cache_bytes = Some(target_bytes);
        } else {
            match vm.follows {
                BalloonBehaviour::Absent => return Err(ActuatorError::NoBalloon(self.vm.clone())),
                BalloonBehaviour::Broken => return Err(self.broken(target_bytes)),
                BalloonBehaviour::Pace(_) | BalloonBehaviour::Never => {}
            }
            let target = Some(target_bytes.min(vm.ram_bytes));
            if vm.target_bytes == target {
                return Ok(());
            }
            vm.target_bytes = target;
            vm.moved_at_ms = now_ms;
        }
        inner.watch();
        Ok(())
    }
}

struct SimulatedFeed {
    vm: String,
    source: CurveSource,
    host: SimulatedHost,
}

impl Feed for SimulatedFeed {
    fn source(&self) -> CurveSource {
        self.source
    }

    fn seen(&mut self) -> FeedReport {
        let inner = self.host.lock();
        let Some(vm) = inner.vms.get(&self.vm) else {
            return FeedReport::default();
        };
        let curve = vm.claimed.as_ref().map(|curve| ObservedCurve {
            curve: curve.clone(),
            page_size: PageSize::FOUR_KIB,
            since_boot: Duration::from_millis(inner.now_ms),
        });
        FeedReport {
            curve,
            working_set: vm.working_set,
            trace: Some(TraceView {
                state: TraceState::Tracing,
                method: TraceMethod::Traps,
                error: None,
                pid: None,
                periods: 1,
                tracking_rate: 1.0 / 128.0,
                tracked_pages: 1000,
                traps_per_second: 100.0,
                touches_per_second: 0.0,
                overhead_ratio: 0.01,
                lost: 0,
                lost_lines: 0,
                restarts: 0,
                last_unix_ms: None,
            }),
            ..FeedReport::default()
        }
    }
}
