//! State of a VM in the control loop.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use plimsoll_actuator::{
    Absence, ActuatorError, GuestNeed, GuestStats, Holding, MemoryStatus, Progress, VmMemory,
};
use plimsoll_flow::{MissRatioCurve, PageCount, PageSize};
use plimsoll_output::exit::with_causes;
use plimsoll_policy::{Bound, Demand};
use plimsoll_protocol::decision::{Step, Verdict};
use plimsoll_protocol::disk_admin::DiskStat;
use plimsoll_protocol::request::SettingsChange;
use plimsoll_protocol::vm::{CurveSource, MissCost, Promise, Settings};

use crate::config::{Config, VmRule, Workflow};
use crate::guard;
use crate::host::{DiscoveredVm, MemoryPressure, Misses, VmHandles};
use crate::judgement::{self, MissCount};
use crate::miss_cost::MissCostMeter;
use crate::moves::{is_fresh, reserved_bytes};
use crate::observed::Observations;

/// What a limit of memory of a VM's control groups leaves it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupShare {
    /// The limit.
    pub limit_bytes: u64,
    /// What of that the VM and its QEMU may use.
    pub share_bytes: u64,
    /// Number of VMs for which the limit holds together.
    pub vms: usize,
}

/// Default minimum of a VM's memory, as a share of its baseline, and in bytes.
const MIN: (u64, u64) = (4, 64 << 20);
/// What remains to QEMU of the limit of its control group: in bytes, and as a share of the VM's RAM, as for page tables.
const QEMU_OWN: (u64, u64) = (128 << 20, 64);
/// Floors are rounded up to this, and follow a fall only if it is at least the VM's slack.
const FLOOR_UNIT_BYTES: u64 = 4 << 20;
/// Maximum duration of a poll of a VM whose monitor and disk daemon answer.
const QUICK: Duration = Duration::from_millis(500);
/// Number of times that the time for which nothing is taken from a VM doubles at most.
const BACK_OFF_MAX: u32 = 5;
/// How long a guest may boot: so long the driver of its balloon may be silent before it counts as missing.
const BOOT_MAX: Duration = Duration::from_mins(2);
/// How long miss counts are kept.
const COUNTS_KEEP: Duration = Duration::from_secs(3 * 3600);

/// A VM.
pub struct Vm {
    /// Its identity and process.
    pub found: DiscoveredVm,
    /// Its actuator.
    pub actuator: VmMemory,
    /// Its status when last polled.
    pub status: MemoryStatus,
    /// The last need that its guest reported, however long ago.
    last_need: Option<GuestNeed>,
    /// The last statistics of its guest, and when they were read.
    last_guest: Option<(GuestStats, Instant)>,
    /// The last answer of the daemon of its disks.
    pub last_disk: Option<DiskStat>,
    /// Its size when it was first discovered.
    pub first_bytes: u64,
    /// Whether that size is known and stored for later daemons.
    pub first_is_kept: bool,
    /// Whether it is only assumed, because the driver of its balloon is silent.
    first_is_assumed: bool,
    /// Since when that driver is silent, and its size in the turn before, until its baseline is known.
    settling: Option<(Instant, u64)>,
    /// Settings of the rules that match its name.
    pub rule: VmRule,
    /// Settings changed by hand.
    pub change: SettingsChange,
    /// What its feeds show of it.
    pub seen: Observations,
    /// Warnings about it.
    pub warnings: Vec<String>,
    /// The last check that found it above its limit.
    pub broken: Option<String>,
    /// The size allocated by a decision.
    pub target_bytes: Option<u64>,
    /// The part of its own memory that it keeps, because its guest cannot give it.
    pub floor_bytes: u64,
    /// Processes that its guest has killed for lack of memory.
    pub oom_kills: Option<u64>,
    /// Number of reported sizes that are impossible.
    pub refused_claims: u64,
    /// What the limits of its control groups leave it.
    pub group_share: Option<GroupShare>,
    /// The part of its RAM that the baseline accounts for.
    pub followed_ram_bytes: Option<u64>,
    /// The most that its cache had in the last decision of an earlier daemon.
    pub earlier_cache_bytes: u64,
    /// Its promise after a move that took memory from it, until its misses show whether it is kept.
    pub unchecked: Option<UncheckedPromise>,
    /// How often it broke its promise or ran short since it last kept it after it gave memory.
    breaks: u32,
    /// Until when nothing is taken from it, because it broke its promise or ran short.
    spared_until: Option<Instant>,
    /// Whether that time is not over, as of the last turn.
    is_spared: bool,
    /// Whether its memory counts: not that of a process to which another VM of the host is copied, nor that of one that
    /// was copied. False until its first turn.
    pub is_counted: bool,
    /// Whether it is, or was, the source or target of such a copy while the other process is there.
    pub is_copied: bool,
    /// Major page faults per second of its guest when it was last not below its baseline.
    pub whole_faults_per_second: f64,
    /// Time and duration of its last poll in a turn.
    polled: Option<(Instant, Duration)>,
    counts: VecDeque<(Instant, Misses)>,
    /// How long it waits for a miss.
    pub miss_cost: MissCost,
    meter: MissCostMeter,
    /// Time that its threads lost to a lack of the host's memory.
    stalls: VecDeque<(Instant, Duration)>,
}

impl Vm {
    /// Creates the state of a discovered VM; `first_bytes` is its size when it was first discovered, if that is known.
    pub fn new(
        found: DiscoveredVm,
        opened: VmHandles,
        rule: VmRule,
        change: SettingsChange,
        first_bytes: Option<u64>,
    ) -> Self {
        let VmHandles { actuator, feeds } = opened;
        let status = actuator.status();
        let has = status.holding().bytes();
        Self {
            found,
            actuator,
            last_need: None,
            last_guest: None,
            last_disk: None,
            status,
            first_bytes: first_bytes.unwrap_or(has),
            first_is_kept: first_bytes.is_some(),
            first_is_assumed: false,
            settling: None,
            rule,
            change,
            seen: Observations::by(feeds),
            warnings: Vec::new(),
            broken: None,
            target_bytes: None,
            floor_bytes: has,
            oom_kills: None,
            refused_claims: 0,
            group_share: None,
            followed_ram_bytes: None,
            earlier_cache_bytes: 0,
            unchecked: None,
            breaks: 0,
            spared_until: None,
            is_spared: false,
            is_counted: false,
            is_copied: false,
            whole_faults_per_second: 0.0,
            polled: None,
            counts: VecDeque::new(),
            miss_cost: MissCost::default(),
            meter: MissCostMeter::default(),
            stalls: VecDeque::new(),
        }
    }

    /// Polls its memory.
    pub fn poll(&mut self) {
        let began = Instant::now();
        self.status = self.actuator.poll();
        if let Some(guest) = &self.status.guest {
            self.last_guest = Some((*guest, began));
        }
        self.polled = Some((began, began.elapsed()));
    }

    /// Whether its monitor answered its last poll, and that was so short that the next one may be waited for.
    pub fn answers_quickly(&self) -> bool {
        // The pause after an unanswered poll ends soon, and then the monitor is queried again.
        is_fresh(&self.status.direct) && self.polled.is_some_and(|(_, took)| took < QUICK)
    }

    /// The last statistics of its guest with their age, also where the last polls gave none; `None` if there never were any.
    pub fn last_guest(&self) -> Option<(&GuestStats, Duration)> {
        let (guest, read) = self.last_guest.as_ref()?;
        let age = Duration::from_secs(guest.age_s).saturating_add(read.elapsed());
        Some((guest, age))
    }

    /// Time of its last poll.
    pub fn polled_at(&self) -> Option<Instant> {
        self.polled.map(|(at, _)| at)
    }

    /// Whether its size was ever reported by the VM, not assumed.
    pub fn is_known(&self) -> bool {
        self.status.direct.age_ms.is_some()
            || matches!(
                self.status.direct.progress,
                Progress::Absent(Absence::NoDevice)
            )
    }

    /// Whether the driver of its balloon is silent: there is none, or its guest still boots.
    pub fn is_driverless(&self) -> bool {
        matches!(
            self.status.direct.progress,
            Progress::Absent(Absence::NoDriver)
        )
    }

    /// Takes its size as its baseline, unless it has one; returns whether it did. A guest that boots has all of its RAM until the driver of its
    /// balloon has taken what is not the VM's: the baseline is the size at which it settles then.
    pub fn settle(&mut self, now: Instant) -> bool {
        let is_silent = self.is_driverless();
        if !self.is_known() || self.first_is_kept && (is_silent || !self.first_is_assumed) {
            return false;
        }
        self.first_bytes = self.size_bytes();
        let settling = self.settling;
        if is_silent || settling.is_some() {
            let since = settling.map_or(now, |(since, _)| since);
            self.settling = Some((since, self.first_bytes));
        }
        self.first_is_assumed =
            is_silent && settling.is_some_and(|(since, _)| now.duration_since(since) >= BOOT_MAX);
        self.first_is_kept = match is_silent {
            true => self.first_is_assumed,
            false => settling.is_none_or(|(_, before)| before == self.first_bytes),
        };
        self.first_is_kept
    }

    /// Its size: its own memory and its cache.
    pub fn size_bytes(&self) -> u64 {
        self.status.holding().bytes()
    }

    /// Its RAM now, with memory plugged since its start and without what was unplugged; until that is known, its RAM at the start.
    pub fn ram_bytes(&self) -> u64 {
        let now = self.status.direct.max_bytes.filter(|_| self.is_known());
        now.unwrap_or(self.found.ram_bytes)
    }

    /// The most memory of its own that it can use: its RAM, as far as the limit of its control group has room for that and for
    /// QEMU. Above it the kernel would slow it down or kill it. What it has or had is its operator's choice, and not above it.
    pub fn own_most_bytes(&self) -> u64 {
        let ram_bytes = self.ram_bytes();
        let Some(share) = self.group_share else {
            return ram_bytes;
        };
        let room = share.share_bytes.saturating_sub(self.qemu_own_bytes());
        let chosen = self.first_bytes.max(self.status.direct.actual_bytes);
        room.max(chosen).min(ram_bytes)
    }

    /// What its QEMU may use beside its RAM.
    pub fn qemu_own_bytes(&self) -> u64 {
        let (bytes, of_ram) = QEMU_OWN;
        bytes + self.ram_bytes() / of_ram
    }

    /// The most that it may hold without a further request.
    pub fn reserved_bytes(&self) -> u64 {
        reserved_bytes(&self.status, self.unanswered())
    }

    /// What its parts may hold as long as they do not answer.
    pub fn unanswered(&self) -> Holding {
        Holding {
            direct_bytes: self.followed_ram_bytes.unwrap_or(0),
            cache_bytes: self.earlier_cache_bytes,
        }
    }

    /// Updates the baseline for RAM that was plugged or unplugged, also while no daemon ran, or with which the VM started
    /// anew. Returns whether its RAM is another one than the baseline accounted for.
    pub fn follow_ram(&mut self) -> bool {
        let ram_bytes = self.ram_bytes();
        let before = self.followed_ram_bytes.replace(ram_bytes);
        if before == Some(ram_bytes) {
            return false;
        }
        if let Some(before) = before {
            tracing::info!(vm = self.found.vm, "its RAM changed to {ram_bytes} bytes");
            let plugged = ram_bytes.saturating_sub(before);
            let unplugged = before.saturating_sub(ram_bytes);
            let first = self.first_bytes.saturating_add(plugged);
            // A VM that started anew with less RAM may have fewer bytes than were taken away.
            let least = self.first_bytes.min(self.size_bytes()).min(ram_bytes);
            self.first_bytes = first.saturating_sub(unplugged).max(least);
        }
        true
    }

    /// Size of the swap that its guest is known to have.
    pub fn swap_bytes(&self) -> u64 {
        self.rule.swap_bytes.unwrap_or(0)
    }

    /// The size below which a plan does not take memory from it: its own memory if that cannot be changed, otherwise
    /// what its balloon does not get, and what its guest cannot give, but of that no more than its baseline, so that no report of a
    /// guest makes the limits of all exceed the memory.
    pub fn kept_bytes(&self) -> u64 {
        let has = self.status.direct.actual_bytes;
        match self.is_resizable() {
            true => self
                .floor_bytes
                .min(self.settings().baseline_bytes)
                .max(self.status.direct.min_bytes)
                .min(has),
            false => has,
        }
    }

    /// Whether no plan takes memory from it for now: its misses are not counted, so that nothing would show whether its
    /// promise is kept, or it broke its promise or ran short lately, or it is copied to another process.
    pub fn gives_nothing(&self) -> bool {
        self.is_spared || self.is_copied || self.counts.is_empty()
    }

    /// Its baseline, as far as it is within its limits.
    pub fn whole_bytes(&self) -> u64 {
        let settings = self.settings();
        let most = settings.baseline_bytes.min(settings.max_bytes);
        most.max(settings.min_bytes)
    }

    /// Its size, as far as it is within its baseline and its limits.
    pub fn own_bytes(&self) -> u64 {
        let settings = self.settings();
        let most = settings.baseline_bytes.min(settings.max_bytes);
        self.size_bytes().min(most)
    }

    /// Takes nothing from it for a while, because it broke its promise or ran short: `cooldown`, doubled for each time
    /// since it last kept its promise.
    pub fn spare(&mut self, cooldown: Duration, now: Instant) {
        // A guest gets memory back step by step: all of that is one time.
        if self.spared_until.is_none_or(|until| now >= until) {
            self.breaks = (self.breaks + 1).min(BACK_OFF_MAX);
        }
        self.spared_until = Some(now + cooldown * 2_u32.pow(self.breaks));
        self.is_spared = true;
    }

    /// Why it gets memory back, and how much of it: the promise of a move by which it gave memory could not be judged at its
    /// end, and counts show now that it is broken. They are those of the last `length`, which must have passed since.
    /// Forgets the promise once counts show that it is kept, or once the VM has the memory again.
    pub fn broken_since(
        &mut self,
        length: Duration,
        tolerance: f64,
        now: Instant,
    ) -> Option<(String, u64)> {
        let unchecked = self.unchecked.as_ref()?;
        let had = unchecked.step.from.size_bytes();
        let missing = had.saturating_sub(self.size_bytes());
        if missing == 0 {
            self.unchecked = None;
            return None;
        }
        let from = now
            .checked_sub(length)
            .filter(|at| *at >= unchecked.since)?;
        // By what it is promised now.
        let promise = judgement::Promise {
            bound: self.bound(),
            max_stall: self.settings().promise.max_stall,
            ..unchecked.promise.clone()
        };
        let check = |from, to| {
            let counted = self.misses_between(from, to);
            judgement::judge(&promise, unchecked.before, counted, tolerance)
        };
        let whole = check(from, now);
        if whole.verdict == Verdict::Broken {
            return Some((whole.why, missing));
        }
        // Of a VM that has just begun to work a part of the time shows little.
        let half = from + length / 2;
        let is_kept = |from, to| {
            let check = check(from, to);
            check.verdict != Verdict::Broken && judgement::is_measured(&check, length / 2)
        };
        if is_kept(from, half) && is_kept(half, now) {
            self.keeps_promise();
            self.unchecked = None;
        }
        None
    }

    /// It kept its promise after it gave memory.
    pub fn keeps_promise(&mut self) {
        self.breaks = 0;
    }

    /// Updates its floor by the last poll. Small falls are ignored, so that a plan does not change with each report.
    fn follow_guest(&mut self) {
        let floor = guard::floor_bytes(&self.status, self.swap_bytes());
        let fell = floor.saturating_add(guard::slack_of(&self.status)) < self.floor_bytes;
        if floor > self.floor_bytes || fell {
            let has = self.status.direct.actual_bytes;
            self.floor_bytes = floor.next_multiple_of(FLOOR_UNIT_BYTES).min(has);
        }
    }

    /// Whether it was migrated away, by the state of its QEMU.
    pub fn is_migrated(&self) -> bool {
        self.status.stopped.as_deref() == Some("postmigrate")
    }

    /// Whether the VM's own memory can be changed, and what is taken from it becomes free.
    pub fn is_resizable(&self) -> bool {
        self.can_grow() && self.found.held.is_none()
    }

    /// Whether the VM can get back what its balloon has, if only what somebody else took.
    pub fn can_grow(&self) -> bool {
        self.status.direct.is_resizable()
    }

    /// The maximum of each of its limits: with a cache under its disk it can have more than its RAM.
    pub fn most_bytes(&self) -> u64 {
        match self.status.cache {
            Some(_) => u64::MAX,
            None => self.own_most_bytes(),
        }
    }

    /// A warning if the rules have a minimum or a baseline above what it can have.
    fn rule_warning(&self) -> Option<String> {
        let most_bytes = self.most_bytes();
        let parts = [
            ("minimum", self.rule.min_bytes),
            ("baseline", self.rule.baseline_bytes),
        ];
        let above = parts.into_iter().filter_map(|(name, bytes)| {
            let bytes = bytes.filter(|bytes| *bytes > most_bytes)?;
            Some(format!("a {name} of {} MiB", bytes >> 20))
        });
        let above: Vec<_> = above.collect();
        (self.is_known() && !above.is_empty()).then(|| {
            format!(
                "its rule asks for more than it can have: {}; it has {} MiB of RAM, and {} MiB count",
                above.join(", "),
                self.ram_bytes() >> 20,
                most_bytes >> 20
            )
        })
    }

    /// Its limits: set by hand, by the rules, or by default; none above what it can have.
    pub fn settings(&self) -> Settings {
        self.settings_with(&self.change)
    }

    /// The limits that would result from `change` as the settings changed by hand.
    pub fn settings_with(&self, change: &SettingsChange) -> Settings {
        let baseline_bytes = change
            .baseline_bytes
            .or(self.rule.baseline_bytes)
            .unwrap_or(self.first_bytes)
            .min(self.most_bytes());
        let min = (baseline_bytes / MIN.0).max(MIN.1).min(baseline_bytes);
        let max = self.own_most_bytes().max(baseline_bytes);
        Settings {
            min_bytes: (change.min_bytes.or(self.rule.min_bytes))
                .unwrap_or(min)
                .min(self.most_bytes()),
            max_bytes: (change.max_bytes.or(self.rule.max_bytes))
                .unwrap_or(max)
                .min(self.most_bytes()),
            baseline_bytes,
            shares: change.shares.or(self.rule.shares).unwrap_or(Demand::SHARES),
            promise: change
                .promise()
                .or(self.rule.promise)
                .unwrap_or(Promise::DEFAULT),
            managed: change.managed.or(self.rule.managed).unwrap_or(true),
        }
    }

    /// The bound that policies keep for it.
    pub fn bound(&self) -> Bound {
        let known = self.seen.known.as_ref();
        let vcpus = known.and_then(|known| known.curve.vcpus());
        self.settings().promise.bound(vcpus, self.miss_cost)
    }

    /// Whether a policy may give it another size.
    pub fn can_be_divided(&self) -> bool {
        self.settings().managed
            && self.rule.self_balloon != Some(true)
            && self.is_known()
            && self.first_is_kept
            && (self.is_resizable() || self.status.cache.is_some())
    }

    /// Takes the results of its feeds after a poll.
    pub fn refresh(&mut self, config: &Config, now: Instant) {
        self.count(now);
        self.is_spared = self.spared_until.is_some_and(|until| now < until);
        let assumed = MissCost::assumed(config.miss_cost_ms);
        self.miss_cost = self.meter.cost().unwrap_or(assumed);
        self.follow_guest();
        let failures = self.status.failures.iter();
        let claims = failures
            .clone()
            .filter(|failure| matches!(failure, ActuatorError::Claim { .. }));
        self.refused_claims += claims.count() as u64;
        self.warnings = failures.map(|failure| with_causes(failure)).collect();
        if self.is_driverless() {
            let silent = "its guest does not answer to its balloon: no driver, or it still boots";
            self.warnings.push(silent.to_owned());
        }
        if let Some(held) = self.found.held {
            self.warnings.push(format!(
                "its size is left as it is: the host would not get what a balloon takes of its RAM, because {held}"
            ));
        }
        if let Some(share) = self.group_share
            && self.own_most_bytes() < self.ram_bytes()
        {
            let whom = match share.vms {
                1 => "it".to_owned(),
                vms => format!("{vms} VMs together"),
            };
            self.warnings.push(format!(
                "its control group limits {whom} to {} MiB, with QEMU: it is given at most {} MiB of its RAM of {} MiB",
                share.limit_bytes >> 20,
                self.own_most_bytes() >> 20,
                self.ram_bytes() >> 20
            ));
        }
        self.warnings.extend(self.rule_warning());
        let from_disk = matches!(config.workflow, Workflow::Cache { .. });
        let baseline = self.settings().baseline_bytes / PageSize::FOUR_KIB.bytes();
        let baseline = PageCount(baseline);
        self.last_need = self.status.need.or(self.last_need);
        self.last_disk = self.status.disk.clone().or(self.last_disk.take());
        let (status, need, swap_bytes) = (&self.status, self.last_need, self.swap_bytes());
        let warnings = self.seen.refresh(
            Some(baseline),
            |source| (source == CurveSource::Disk) == from_disk,
            |source, curve| in_host_sizes(status, need, swap_bytes, source, curve),
        );
        self.warnings.extend(warnings);
    }

    /// Counts its misses; to be called at every tick that polled it.
    pub fn count(&mut self, now: Instant) {
        self.meter.observe(&self.status);
        let last = self.counts.back().map(|(_, last)| *last);
        let passes = |misses: &Misses| last.is_some_and(|last| last.is_rare() && !misses.is_rare());
        if let Some(misses) = Misses::of(&self.status).filter(|misses| !passes(misses)) {
            // A counter that decreased was restarted by another guest or daemon.
            if last.is_some_and(|last| {
                last.count > misses.count || last.of > misses.of || last.by != misses.by
            }) {
                self.counts.clear();
            }
            // A turn may come with a tick.
            self.counts.pop_back_if(|(at, _)| *at == now);
            self.counts.push_back((now, misses));
        }
        while let Some((at, _)) = self.counts.front()
            && now.duration_since(*at) > COUNTS_KEEP
        {
            self.counts.pop_front();
        }
    }

    /// The last count of its misses.
    pub fn misses(&self) -> Option<Misses> {
        self.counts.back().map(|(_, misses)| *misses)
    }

    /// Time of its last count of misses.
    pub fn counted_at(&self) -> Option<Instant> {
        self.counts.back().map(|(at, _)| *at)
    }

    /// Its misses from `from` to `until`, as far as they were counted.
    pub fn misses_between(&self, from: Instant, until: Instant) -> Option<MissCount> {
        let within = |at: &Instant| (from..=until).contains(at);
        let mut counts = self.counts.iter().filter(|(at, _)| within(at));
        let (begin, first) = counts.next()?;
        let (end, last) = counts.next_back()?;
        let seconds = end.duration_since(*begin).as_secs_f64();
        Some(MissCount::between(*first, *last, seconds))
    }

    /// Its misses a second between the last two counts, unless `now` is longer after them than they lie apart.
    pub fn misses_per_second(&self, now: Instant) -> Option<f64> {
        let (end, last) = self.counts.back()?;
        let (begin, first) = self.counts.iter().rev().nth(1)?;
        let length = end.duration_since(*begin);
        let seconds = length.as_secs_f64();
        (seconds > 0.0 && now.duration_since(*end) <= length)
            .then(|| (last.count - first.count) as f64 / seconds)
    }

    /// Takes the pressure of its control group, if it has one of its own.
    pub fn feel(&mut self, pressure: Option<MemoryPressure>, now: Instant) {
        let total = pressure.map(|pressure| pressure.some_total);
        let decreased = |(_, last): &(Instant, Duration)| total.is_none_or(|total| total < *last);
        if self.stalls.back().is_some_and(decreased) {
            self.stalls.clear();
        }
        // A turn may come with a tick.
        self.stalls.pop_back_if(|(at, _)| *at == now);
        self.stalls.extend(total.map(|total| (now, total)));
        while let Some((at, _)) = self.stalls.front()
            && now.duration_since(*at) > COUNTS_KEEP
        {
            self.stalls.pop_front();
        }
    }

    /// Share of the time from `from` to `until` in which a thread of its QEMU waited for memory of the host, as far as
    /// that was read.
    pub fn stalled_between(&self, from: Instant, until: Instant) -> Option<f64> {
        let within = |(at, _): &&(Instant, Duration)| (from..=until).contains(at);
        let mut stalls = self.stalls.iter().filter(within);
        let (begin, first) = stalls.next()?;
        let (end, last) = stalls.next_back()?;
        let seconds = end.duration_since(*begin).as_secs_f64();
        (seconds > 0.0).then(|| (*last - *first).as_secs_f64() / seconds)
    }

    /// The same between the last two readings.
    pub fn stalled(&self) -> Option<f64> {
        let (end, _) = self.stalls.back()?;
        let (begin, _) = self.stalls.iter().rev().nth(1)?;
        self.stalled_between(*begin, *end)
    }

    /// Discards observations made before its memory was moved.
    pub fn moved(&mut self) {
        self.seen.forget();
    }
}

/// A promise to a VM that gave memory, of which nothing shows yet whether it is kept.
#[derive(Debug, Clone)]
pub struct UncheckedPromise {
    /// The promise.
    pub promise: judgement::Promise,
    /// Its part of the move.
    pub step: Step,
    /// Its misses before the move.
    pub before: Option<MissCount>,
    /// Since when its misses count.
    pub since: Instant,
}

impl UncheckedPromise {
    /// This one and an earlier one: what both moves took is owed, and is judged by the misses before the earlier one.
    #[must_use]
    pub fn after(self, earlier: &Self) -> Self {
        Self {
            promise: judgement::Promise {
                before: earlier.promise.before,
                by_ratio: self.promise.by_ratio && earlier.promise.by_ratio,
                ..self.promise
            },
            step: Step {
                from: earlier.step.from,
                ..self.step
            },
            before: earlier.before,
            since: self.since,
        }
    }
}

/// A VM's curve over its sizes as the host counts them.
fn in_host_sizes(
    status: &MemoryStatus,
    need: Option<GuestNeed>,
    swap_bytes: u64,
    source: CurveSource,
    curve: MissRatioCurve,
) -> MissRatioCurve {
    let own_bytes = status.direct.actual_bytes;
    match (source, &status.disk, need) {
        // It begins at the pages that the guest's kernel manages, which are fewer than those the guest has.
        (CurveSource::Disk, Some(disk), _) if disk.direct_pages > 0 => {
            let further = PageCount(pages(own_bytes).0.saturating_sub(disk.direct_pages));
            curve.shifted(further, further)
        }
        (CurveSource::Disk, ..) | (_, _, None) => curve,
        (_, _, Some(need)) => need.in_vm_sizes(curve, own_bytes, swap_bytes),
    }
}

/// Why nothing is said about a bound on the misses of a VM with this curve at `size`.
pub fn why_unpredicted(curve: &MissRatioCurve, size: PageCount) -> &'static str {
    match curve.resolves(size) {
        true => {
            "its curve has no rate, so its misses per second cannot be predicted; it keeps its size"
        }
        false => {
            "its curve does not resolve a size that small, so its misses there cannot be predicted"
        }
    }
}

/// Number of pages of 4 KiB in `bytes`.
pub fn pages(bytes: u64) -> PageCount {
    PageCount::from_bytes(bytes, PageSize::FOUR_KIB)
}

/// Bytes of this many pages.
pub fn bytes(pages: PageCount) -> u64 {
    pages.to_bytes(PageSize::FOUR_KIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_hits_that_falls_makes_no_more_misses_than_references() {
        let at = |count, of| Misses {
            count,
            of,
            by: "a count",
        };
        let between = |first, last| {
            let counted = MissCount::between(first, last, 10.0);
            (counted.misses, counted.references)
        };
        let honest = between(at(10, Some(100)), at(40, Some(200)));
        assert_eq!(honest, (30, Some(100)));
        let lying = between(at(10, Some(100)), at(5000, Some(200)));
        assert_eq!(lying, (100, Some(100)));
        assert_eq!(between(at(10, None), at(5000, None)), (4990, None));
    }
}
