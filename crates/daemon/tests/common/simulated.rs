//! A simulated host: VMs that miss by curves, with balloons that follow, lag, get stuck or report false values.
//!
//! The turn loop runs on it in tests and benchmarks as on a real one. The caller advances its time:
//! [`SimulatedHost::pass`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use plimsoll_actuator::{
    Absence, ActuatorError, BlockReads, Delivery, DiskStat, GuestStats, MemoryPart, Observation,
    Part, Patience, StatsClock, Tracker, VmMemory,
};
use plimsoll_flow::{
    Accelerator, CurvePoint, MissRatioCurve, PageCount, PageSize, TraceMethod, VmId, Whole as _,
    WorkingSet, WorkingSetBound,
};
use plimsoll_protocol::vm::{CurveSource, MissCost, MissCostSource, TraceState, TraceView};

use plimsoll_daemon::clock::Time;
use plimsoll_daemon::config::{Config, VmRule, Workflow};
use plimsoll_daemon::host::{
    DiscoveredGroup, DiscoveredVm, Feed, FeedReport, FoundGroups, GroupLimit, HeldRam, Host,
    MemoryPressure, ObservedCurve, VmHandles,
};
use plimsoll_daemon::vm::pages;

/// How a balloon follows its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalloonBehaviour {
    /// By this many bytes a second.
    Pace(u64),
    /// Not at all.
    Never,
    /// It gives its pages back to the guest by itself, by this many bytes a second.
    Back(u64),
    /// There is no balloon.
    Absent,
    /// Its guest boots: the driver is silent, and follows no target.
    Boots,
    /// Its monitor fails: commands may or may not arrive.
    Broken,
}

/// The time of day at the beginning: years after 1970, as that of the VMs' hosts.
const AHEAD_MS: u64 = 1_700_000_000_000;
/// What a simulated guest has read of its disks at its boot.
const BOOT_READS: u64 = 1000;
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
    /// The truth but for one statistic.
    False(Statistic, Lie),
    /// Many major page faults, and processes killed, in each report.
    Distress,
    /// Counters that go back.
    Backwards,
}

/// Who counts a VM's misses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// The daemon of its disk, with the references.
    Disk,
    /// Its guest, as major page faults.
    Faults,
    /// Its QEMU, as reads of disks.
    Reads,
    /// Nobody.
    Nobody,
}

/// A statistic of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statistic {
    /// Memory that it manages.
    Total,
    /// Unused memory.
    Free,
    /// Memory available without swapping.
    Available,
    /// Page cache.
    DiskCaches,
    /// Page faults that required disk I/O.
    MajorFaults,
    /// Bytes read from swap.
    SwapIn,
    /// Bytes written to swap.
    SwapOut,
    /// Processes killed for lack of memory.
    OomKills,
}

/// How a statistic is false.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// Nothing at all.
    Zero,
    /// A sixteenth.
    Little,
    /// Sixteen times as much, and a gigabyte.
    Much,
    /// The largest number.
    Max,
    /// What it was when the guest began to lie.
    Frozen,
    /// It is not reported.
    Missing,
}

impl Lie {
    fn apply(self, statistic: Statistic, stats: &mut GuestStats, last: Option<GuestStats>) {
        let mut last = last.unwrap_or(*stats);
        let before = *statistic.of(&mut last);
        let value = statistic.of(stats);
        *value = match self {
            Self::Zero => Some(0),
            Self::Little => value.map(|truth| truth / 16),
            Self::Much => value.map(|truth| truth.saturating_mul(16).saturating_add(1 << 30)),
            Self::Max => Some(u64::MAX),
            Self::Frozen => before,
            Self::Missing => None,
        };
    }
}

impl Statistic {
    fn of(self, stats: &mut GuestStats) -> &mut Option<u64> {
        match self {
            Self::Total => &mut stats.total_bytes,
            Self::Free => &mut stats.free_bytes,
            Self::Available => &mut stats.available_bytes,
            Self::DiskCaches => &mut stats.disk_caches_bytes,
            Self::MajorFaults => &mut stats.major_faults,
            Self::SwapIn => &mut stats.swap_in_bytes,
            Self::SwapOut => &mut stats.swap_out_bytes,
            Self::OomKills => &mut stats.oom_kills,
        }
    }
}

/// A target that was set, and what could be known when it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The VM.
    pub vm: String,
    /// Whether it is the target of its cache.
    pub is_cache: bool,
    /// The target.
    pub target_bytes: u64,
    /// The target in force before; `None` before the first one.
    pub before_bytes: Option<u64>,
    /// The size at that time.
    pub had_bytes: u64,
    /// Memory of its processes.
    pub used_bytes: u64,
    /// Age of its last answered poll, and at that time of the guest's last report.
    pub polled_ms: Option<(u64, Option<u64>)>,
    /// What all VMs have or may take by what the polls showed, before and after.
    pub reserved_bytes: (u64, u64),
}

/// A simulated VM.
#[derive(Debug, Clone)]
pub struct SimulatedVm {
    /// Its process, which distinguishes it from an earlier VM of the same name.
    pub pid: u32,
    /// Start of that process, because process numbers are reused.
    pub start_ticks: u64,
    /// Its UUID.
    pub uuid: Option<String>,
    /// Its RAM at its start.
    pub boot_ram_bytes: u64,
    /// Its RAM.
    pub ram_bytes: u64,
    /// Memory of its own.
    pub direct_bytes: u64,
    /// The part of it that its balloon does not get.
    pub plugged_bytes: u64,
    /// Capacity of its cache; `None` if it has none.
    pub cache_bytes: Option<u64>,
    /// How long its cache takes to reach a target.
    pub cache_lag_ms: u64,
    /// Time at which its cache reaches a target, and the target.
    cache_target: Option<(u64, u64)>,
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
    /// The same of requests to set its balloon, which then may or may not have arrived.
    pub set_silence: Duration,
    /// Whether its monitor answers; a target that is set although it does not may arrive.
    pub answers: bool,
    /// The state in which its vCPUs do not run.
    pub stopped: Option<&'static str>,
    /// Whether the daemon of its disk answers.
    pub disk_answers: bool,
    /// Memory of processes that the guest, which has no swap, cannot give.
    pub used_bytes: u64,
    /// What the guest reports of its memory.
    pub reports: Reports,
    /// Processes that the guest has killed for lack of memory.
    pub oom_kills: u64,
    report: Option<(u64, GuestStats)>,
    /// Why the host would not get what its balloon takes.
    pub held: Option<HeldRam>,
    /// Whether its process waits for its state.
    pub receives: bool,
    /// Whether it has been found.
    is_found: bool,
    /// Capacity of its cache at the last answered poll.
    polled_cache_bytes: Option<u64>,
    /// Time of its last answered poll, its size then, and the time of its last report.
    pub polled: Option<(u64, u64, Option<u64>)>,
    /// Its working set as its tracer reports it.
    pub working_set: Option<WorkingSet>,
    /// How long it waits for a miss, and who measures that.
    pub miss_cost: MissCost,
    /// Who counts its misses.
    pub counts: Counts,
    /// Share of the time in which its threads wait for memory of the host below a size in bytes; `None` without a
    /// control group of its own.
    pub stalls_below: Option<(u64, f64)>,
    stalled_ms: f64,
    /// Limits of memory of its control groups.
    pub group_limits: Vec<GroupLimit>,
    waited_ms: f64,
    /// Its balloon's target.
    pub target_bytes: Option<u64>,
    references: u64,
    misses: f64,
}

impl SimulatedVm {
    /// A VM with this much RAM, all its own, whose true and observed curve is `truth`; its balloon moves 64 MiB a
    /// second.
    pub fn new(pid: u32, ram_bytes: u64, truth: MissRatioCurve) -> Self {
        Self {
            pid,
            start_ticks: 0,
            uuid: None,
            boot_ram_bytes: ram_bytes,
            ram_bytes,
            direct_bytes: ram_bytes,
            plugged_bytes: 0,
            cache_bytes: None,
            cache_lag_ms: 0,
            cache_target: None,
            claimed: Some(truth.clone()),
            truth,
            references_per_second: 1000,
            follows: BalloonBehaviour::Pace(64 << 20),
            silence: Duration::ZERO,
            set_silence: Duration::ZERO,
            answers: true,
            stopped: None,
            disk_answers: true,
            used_bytes: 16 << 20,
            reports: Reports::True,
            oom_kills: 0,
            report: None,
            held: None,
            receives: false,
            is_found: false,
            polled_cache_bytes: None,
            polled: None,
            working_set: None,
            miss_cost: MissCost::default(),
            counts: Counts::Disk,
            stalls_below: None,
            stalled_ms: 0.0,
            group_limits: Vec::new(),
            waited_ms: 0.0,
            target_bytes: None,
            references: 0,
            misses: 0.0,
        }
    }

    /// Its present size.
    pub fn size_bytes(&self) -> u64 {
        self.direct_bytes + self.cache_bytes.unwrap_or(0)
    }

    /// Memory available to its processes.
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

    /// The process that runs it.
    fn process(&self) -> (u32, u64) {
        (self.pid, self.start_ticks)
    }

    /// What it may hold without a further request, by what the last poll showed; nothing before it is found.
    fn reserved_bytes(&self) -> u64 {
        if !self.is_found {
            return 0;
        }
        let had = self.polled.map_or(self.direct_bytes, |(_, had, _)| had);
        let target = self.target_bytes.unwrap_or(0).min(self.ram_bytes);
        had.max(target) + self.cache_bytes.max(self.polled_cache_bytes).unwrap_or(0)
    }

    fn make_report(&mut self, now_ms: u64, unix_ms: u64) {
        let due = self
            .report
            .is_none_or(|(at_ms, _)| now_ms >= at_ms + REPORT_INTERVAL_MS);
        if !due || matches!(self.reports, Reports::Nothing | Reports::Ended) {
            return;
        }
        let mut stats = GuestStats {
            updated_unix_s: unix_ms / 1000,
            interval_s: REPORT_INTERVAL_MS / 1000,
            total_bytes: Some(self.direct_bytes),
            free_bytes: Some(self.available_bytes() / 2),
            available_bytes: Some(self.available_bytes()),
            disk_caches_bytes: Some(self.available_bytes() / 2),
            major_faults: Some(match self.counts {
                Counts::Faults => u64::whole(self.misses),
                _ => 0,
            }),
            swap_in_bytes: Some(0),
            swap_out_bytes: Some(0),
            oom_kills: Some(self.oom_kills),
            ..GuestStats::default()
        };
        match self.reports {
            Reports::False(statistic, lie) => {
                lie.apply(statistic, &mut stats, self.report.map(|(_, last)| last));
            }
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

    fn pass(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let most = |pace: u64| u64::whole(pace as f64 * seconds);
        if let BalloonBehaviour::Back(pace) = self.follows {
            self.direct_bytes = self.ram_bytes.min(self.direct_bytes + most(pace));
        }
        if let (BalloonBehaviour::Pace(pace), Some(target)) = (self.follows, self.target_bytes) {
            let target = target.min(self.ram_bytes);
            let most = most(pace);
            let step = self.direct_bytes.abs_diff(target).min(most);
            if self.direct_bytes > target {
                // Its balloon gets no memory of processes.
                self.direct_bytes -= step.min(self.available_bytes());
            } else {
                self.direct_bytes += step;
            }
        }
        let references = self.references_per_second as f64 * seconds;
        let whole = u64::whole(references);
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

    fn disk(&self) -> DiskStat {
        DiskStat {
            cache_bytes: self.cache_bytes.unwrap_or(0),
            read_blocks: self.references,
            hits: self.references.saturating_sub(u64::whole(self.misses)),
            read_wait_ns: (self.miss_cost.source == MissCostSource::DiskDaemon)
                .then_some(u64::whole(self.waited_ms * 1e6)),
            ..DiskStat::default()
        }
    }
}

impl SimulatedVm {
    fn blocks(&self) -> Option<BlockReads> {
        let counted = self.miss_cost.source == MissCostSource::BlockStatistics
            || self.counts == Counts::Reads;
        counted.then_some(BlockReads {
            reads: BOOT_READS + u64::whole(self.misses),
            wait_ns: u64::whole(self.waited_ms * 1e6),
        })
    }
}

/// State shared by all parts of the simulation.
#[derive(Debug)]
struct Inner {
    began: Instant,
    now_ms: u64,
    /// How far the time of day is ahead of the time since the beginning.
    ahead_ms: u64,
    vms: BTreeMap<String, SimulatedVm>,
    /// RAM of the host that is available or that VMs hold, and time in which all its tasks waited for memory.
    free_or_held_bytes: Option<u64>,
    stalled: Duration,
    /// Capacity of the page store and the one that was requested; `None` without a store.
    store: Option<(u64, u64)>,
    groups: FoundGroups,
    /// Tracers of groups that were started so far.
    group_tracers: usize,
    /// Maximum total of all VMs' memory and the store so far, with what they could still have taken.
    most_bytes: u64,
    /// The targets set since they were last taken, if they are recorded.
    settings: Option<Vec<Setting>>,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            now_ms: 0,
            ahead_ms: AHEAD_MS,
            vms: BTreeMap::new(),
            free_or_held_bytes: None,
            stalled: Duration::ZERO,
            store: None,
            groups: FoundGroups::default(),
            group_tracers: 0,
            most_bytes: 0,
            settings: None,
        }
    }
}

impl Inner {
    fn now(&self) -> Instant {
        self.began + Duration::from_millis(self.now_ms)
    }

    /// What all VMs have or may take, by what the last polls showed.
    fn known_reserved_bytes(&self) -> u64 {
        self.vms.values().map(SimulatedVm::reserved_bytes).sum()
    }

    /// Memory that the VMs and the page store have, or may take without a request.
    fn reserved_bytes(&self) -> u64 {
        let vms = self.vms.values();
        let vms = vms.map(|vm| {
            vm.direct_bytes.max(vm.target_bytes.unwrap_or(0)) + vm.cache_bytes.unwrap_or(0)
        });
        self.store.map_or(0, |(has, target)| has.max(target)) + vms.sum::<u64>()
    }

    fn held_bytes(&self) -> u64 {
        self.vms.values().map(SimulatedVm::size_bytes).sum()
    }

    /// The host's available RAM: what its VMs give becomes available.
    fn available_bytes(&self) -> u64 {
        self.free_or_held_bytes
            .map_or(1 << 39, |bytes| bytes.saturating_sub(self.held_bytes()))
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

    /// Sets the host's available RAM; from then on it follows the sizes of the VMs.
    pub fn set_available(&self, bytes: u64) {
        let mut inner = self.lock();
        inner.free_or_held_bytes = Some(bytes + inner.held_bytes());
    }

    /// Sets the control groups that are to be watched.
    pub fn put_groups(&self, groups: FoundGroups) {
        self.lock().groups = groups;
    }

    /// Tracers of control groups that were started so far.
    pub fn group_tracers(&self) -> usize {
        self.lock().group_tracers
    }

    /// Adds a page store of this capacity.
    pub fn put_store(&self, bytes: u64) {
        self.lock().store = Some((bytes, bytes));
    }

    /// Capacity of the page store, 0 without one.
    pub fn store_bytes(&self) -> u64 {
        self.lock().store.map_or(0, |(has, _)| has)
    }

    /// All tasks of the host waited for memory for so long.
    pub fn stall(&self, time: Duration) {
        self.lock().stalled += time;
    }

    /// Steps the time of day.
    pub fn step_clock(&self, by_ms: i64) {
        let mut inner = self.lock();
        inner.ahead_ms = inner.ahead_ms.saturating_add_signed(by_ms);
    }

    /// The times since the beginning and of day.
    pub fn time(&self) -> Time {
        let inner = self.lock();
        Time {
            since_boot: Duration::from_millis(inner.now_ms),
            unix_ms: inner.ahead_ms + inner.now_ms,
        }
    }

    /// The time since the beginning as the parts of the simulation read it.
    pub fn now(&self) -> Instant {
        self.lock().now()
    }

    /// The targets set since the last call; the first call begins to record them.
    pub fn take_settings(&self) -> Vec<Setting> {
        self.lock().settings.replace(Vec::new()).unwrap_or_default()
    }

    /// Ends a VM.
    pub fn end(&self, name: &str) {
        self.lock().vms.remove(name);
    }

    /// The state of a VM.
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
        let (now_ms, unix_ms) = (inner.now_ms, inner.ahead_ms + inner.now_ms);
        for vm in inner.vms.values_mut() {
            vm.pass(time);
            vm.make_report(now_ms, unix_ms);
            if let Some((_, target_bytes)) = vm.cache_target.take_if(|(at_ms, _)| *at_ms <= now_ms)
            {
                vm.cache_bytes = Some(target_bytes);
            }
        }
        if let Some((has, target)) = &mut inner.store {
            // It drops pages as slowly as a balloon takes them.
            *has = has.saturating_sub(64 << 20).max(*target);
        }
        inner.watch();
    }

    /// Memory that the VMs have now, or may take without a request.
    pub fn reserved_bytes(&self) -> u64 {
        self.lock().reserved_bytes()
    }

    /// What all VMs have or may take, by what the last polls showed.
    pub fn known_reserved_bytes(&self) -> u64 {
        self.lock().known_reserved_bytes()
    }

    /// The host's available RAM.
    pub fn available_bytes(&self) -> u64 {
        self.lock().available_bytes()
    }

    /// Maximum of the VMs' total memory, including memory they could still have taken without a request.
    pub fn most_bytes(&self) -> u64 {
        self.lock().most_bytes
    }
}

impl Host for SimulatedHost {
    fn vms(&mut self) -> (Vec<DiscoveredVm>, Vec<String>) {
        let mut inner = self.lock();
        inner.vms.values_mut().for_each(|vm| vm.is_found = true);
        let found = inner.vms.iter().map(|(name, vm)| DiscoveredVm {
            vm: name.clone(),
            pid: vm.pid,
            start_ticks: vm.start_ticks,
            uuid: vm.uuid.clone(),
            accelerator: Some(Accelerator::Tcg),
            libvirt: false,
            ram_bytes: vm.boot_ram_bytes,
            backends: Vec::new(),
            held: vm.held,
            receives: vm.receives,
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
                process: (found.pid, found.start_ticks),
                is_cache,
                host: self.clone(),
                tracker: Tracker::new(Patience::default()),
                max_bytes: (!is_cache).then_some(found.ram_bytes),
                absence: None,
                stats_clock: StatsClock::default(),
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
                process: (found.pid, found.start_ticks),
                source,
                host: self.clone(),
            })],
        }
    }

    fn groups(&mut self) -> FoundGroups {
        self.lock().groups.clone()
    }

    fn open_group(&mut self, found: &DiscoveredGroup, _: &Config) -> Vec<Box<dyn Feed>> {
        self.lock().group_tracers += 1;
        vec![Box::new(SimulatedGroupFeed {
            touched_bytes: found.listed.charged_bytes.unwrap_or(0) / 2,
        })]
    }

    fn ram(&mut self) -> (u64, u64) {
        (1 << 40, self.lock().available_bytes())
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

    fn memory_limits_of(&mut self, found: &DiscoveredVm) -> Vec<GroupLimit> {
        let state = self.lock();
        let groups = state.vms.get(&found.vm).map(|vm| vm.group_limits.clone());
        groups.unwrap_or_default()
    }

    fn store(&mut self) -> Option<Result<u64, ActuatorError>> {
        let (has, target) = self.lock().store?;
        Some(Ok(has.max(target)))
    }

    fn resize_store(&mut self, capacity_bytes: u64) -> Result<(), ActuatorError> {
        let mut inner = self.lock();
        if let Some((_, target)) = &mut inner.store {
            *target = capacity_bytes;
        }
        inner.watch();
        Ok(())
    }
}

/// A VM's own memory, or the cache under its disk.
#[derive(Debug)]
struct SimulatedPart {
    vm: VmId,
    process: (u32, u64),
    is_cache: bool,
    host: SimulatedHost,
    tracker: Tracker,
    max_bytes: Option<u64>,
    absence: Option<Absence>,
    stats_clock: StatsClock,
}

impl SimulatedPart {
    fn name(&self) -> String {
        let part = if self.is_cache { "cache" } else { "balloon" };
        format!("{part} of VM {}", self.vm)
    }

    /// Its VM, unless another process has its name now.
    fn vm<'a>(&self, inner: &'a mut Inner) -> Option<&'a mut SimulatedVm> {
        let vm = inner.vms.get_mut(&self.vm.0);
        vm.filter(|vm| vm.process() == self.process)
    }

    /// Whether the VM's monitor, or its disk daemon, answers.
    fn is_answered(&self, vm: &SimulatedVm) -> bool {
        match self.is_cache {
            true => vm.disk_answers,
            false => vm.answers,
        }
    }

    fn unanswered(&self) -> ActuatorError {
        ActuatorError::Query {
            what: self.name(),
            source: "no answer".into(),
        }
    }

    /// Puts a target into force, and records it.
    fn put(&self, inner: &mut Inner, target_bytes: u64) {
        let (before, now_ms) = (inner.known_reserved_bytes(), inner.now_ms);
        let Some(vm) = self.vm(inner) else { return };
        let mut setting = Setting {
            vm: self.vm.0.clone(),
            is_cache: self.is_cache,
            target_bytes,
            before_bytes: vm.target_bytes,
            had_bytes: vm.direct_bytes,
            used_bytes: vm.used_bytes,
            polled_ms: vm.polled.map(|(at_ms, _, reported_ms)| {
                (now_ms - at_ms, reported_ms.map(|reported| at_ms - reported))
            }),
            reserved_bytes: (before, before),
        };
        if self.is_cache {
            setting.before_bytes = vm.cache_bytes;
            setting.had_bytes = vm.cache_bytes.unwrap_or(0);
            match vm.cache_lag_ms {
                0 => vm.cache_bytes = Some(target_bytes),
                lag_ms => vm.cache_target = Some((now_ms + lag_ms, target_bytes)),
            }
        } else {
            vm.target_bytes = Some(target_bytes);
        }
        inner.watch();
        setting.reserved_bytes.1 = inner.known_reserved_bytes();
        inner
            .settings
            .iter_mut()
            .for_each(|all| all.push(setting.clone()));
    }
}

impl MemoryPart for SimulatedPart {
    fn poll(&mut self, failures: &mut Vec<ActuatorError>) -> Observation {
        let host = self.host.clone();
        let mut inner = host.lock();
        let silence = self.vm(&mut inner).map_or(Duration::ZERO, |vm| vm.silence);
        if !silence.is_zero() {
            drop(inner);
            std::thread::sleep(silence);
            failures.push(self.unanswered());
            return Observation::default();
        }
        let (now, now_ms, unix_ms) = (inner.now(), inner.now_ms, inner.ahead_ms + inner.now_ms);
        let (is_cache, part) = (self.is_cache, &*self);
        let vm = part.vm(&mut inner).filter(|vm| part.is_answered(vm));
        let Some(vm) = vm else {
            failures.push(self.unanswered());
            return Observation::default();
        };
        let disk = match vm.cache_bytes {
            None => vm.counts == Counts::Disk,
            Some(_) => vm.disk_answers,
        };
        let disk = disk.then(|| vm.disk());
        if is_cache {
            vm.polled_cache_bytes = vm.cache_bytes;
            self.tracker.see(vm.cache_bytes.unwrap_or(0), now);
            return Observation {
                disk,
                ..Observation::default()
            };
        }
        self.max_bytes = Some(vm.ram_bytes);
        self.absence = match vm.follows {
            BalloonBehaviour::Absent => Some(Absence::NoDevice),
            BalloonBehaviour::Boots => Some(Absence::NoDriver),
            _ => None,
        };
        self.tracker.see(vm.direct_bytes, now);
        vm.polled = Some((now_ms, vm.direct_bytes, vm.report.map(|(at_ms, _)| at_ms)));
        let mut guest = vm.report.map(|(_, stats)| stats);
        if let Some(stats) = &mut guest {
            stats.age_s = unix_ms.saturating_sub(stats.updated_unix_s * 1000) / 1000;
            let since_boot = Duration::from_millis(now_ms);
            self.stats_clock.measure_at(stats, since_boot);
        }
        let blocks = vm.blocks();
        Observation {
            disk,
            guest,
            blocks,
            stopped: vm.stopped.map(str::to_owned),
        }
    }

    fn part(&self) -> Part {
        let now = self.host.now();
        let vm = (!self.is_cache).then(|| self.host.vm(&self.vm.0)).flatten();
        Part {
            min_bytes: vm.map_or(0, |vm| vm.plugged_bytes + 4096),
            ..self.tracker.part(self.max_bytes, self.absence, now)
        }
    }

    fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        let host = self.host.clone();
        let mut inner = host.lock();
        let (now, now_ms) = (inner.now(), inner.now_ms);
        let vm = self.vm(&mut inner).cloned();
        let failed = |sent, why: &str| ActuatorError::Set {
            what: self.name(),
            target_bytes,
            sent,
            source: why.into(),
        };
        let Some(vm) = vm else {
            return Err(failed(Delivery::No, "the process has ended"));
        };
        if !vm.set_silence.is_zero() && !self.is_cache {
            drop(inner);
            std::thread::sleep(vm.set_silence);
            let error = failed(Delivery::Maybe, "no answer");
            self.tracker.tell(target_bytes, false, now);
            return Err(error);
        }
        if self.max_bytes.is_some_and(|most| target_bytes > most)
            || target_bytes <= vm.plugged_bytes && !self.is_cache
        {
            return Err(ActuatorError::Target {
                what: self.name(),
                target_bytes,
                why: "more than its RAM, or nothing".to_owned(),
            });
        }
        if let Some((_, pending_bytes)) = vm.cache_target
            && self.is_cache
        {
            return Err(ActuatorError::Busy {
                what: self.name(),
                target_bytes: pending_bytes,
            });
        }
        let arrives = match vm.follows {
            _ if !self.is_answered(&vm) => now_ms / 1000 % 2 == 0,
            BalloonBehaviour::Absent if !self.is_cache => {
                return Err(ActuatorError::NoBalloon(self.vm.clone()));
            }
            BalloonBehaviour::Broken if !self.is_cache => false,
            _ => {
                self.put(&mut inner, target_bytes);
                self.tracker.tell(target_bytes, true, now);
                if self.is_cache && vm.cache_lag_ms == 0 {
                    self.tracker.see(target_bytes, now);
                    if let Some(vm) = self.vm(&mut inner) {
                        vm.polled_cache_bytes = Some(target_bytes);
                    }
                }
                return Ok(());
            }
        };
        let error = failed(Delivery::Maybe, "the monitor closed the connection");
        if arrives {
            self.put(&mut inner, target_bytes);
        }
        self.tracker.tell(target_bytes, false, now);
        Err(error)
    }
}

/// The tracer of a control group of which half is used evenly.
struct SimulatedGroupFeed {
    touched_bytes: u64,
}

impl Feed for SimulatedGroupFeed {
    fn source(&self) -> CurveSource {
        CurveSource::Scan
    }

    fn seen(&mut self) -> FeedReport {
        let touched = pages(self.touched_bytes);
        let points = vec![
            CurvePoint::exact(PageCount(touched.0 / 2), 0.5),
            CurvePoint::exact(touched, 0.0),
        ];
        FeedReport {
            curve: MissRatioCurve::new(points, 1000)
                .ok()
                .map(|curve| ObservedCurve {
                    curve,
                    page_size: PageSize::FOUR_KIB,
                    since_boot: Duration::ZERO,
                }),
            working_set: Some(WorkingSet {
                size: touched,
                bound: WorkingSetBound::Estimate,
            }),
            ..FeedReport::default()
        }
    }
}

struct SimulatedFeed {
    vm: String,
    process: (u32, u64),
    source: CurveSource,
    host: SimulatedHost,
}

impl Feed for SimulatedFeed {
    fn source(&self) -> CurveSource {
        self.source
    }

    fn seen(&mut self) -> FeedReport {
        let inner = self.host.lock();
        let vm = inner.vms.get(&self.vm);
        let Some(vm) = vm.filter(|vm| vm.process() == self.process) else {
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
