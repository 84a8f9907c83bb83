//! A move: VMs are resized from their current sizes to those of a decision.
//!
//! VMs that shrink go first, and memory is reassigned only after it has been observed to be free: the VMs together
//! never have more than the total, even if a balloon is stuck, a monitor hangs or a VM dies during the move. A part
//! that cannot be resized is requested to stay at its size, so that a guest that reacts later does not lose memory
//! unexpectedly.
//!
//! A VM is never shrunk below what its guest cannot give ([`guard`]). If its guest runs short meanwhile, or its balloon
//! is stuck, its part ends and it gets some memory back at once, which is therefore not granted to others before.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use plimsoll_actuator::{Absence, ActuatorError, Holding, MemoryStatus, Progress, VmMemory};
use plimsoll_output::exit::with_causes;
use plimsoll_protocol::decision::{HoldingView, Step, StepState};

use crate::guard::{self, GuestCounters};
use crate::polls::{self, BEGIN_MAX};

/// Differences between sizes of one VM below this are ignored.
pub const SAME_BYTES: u64 = 1 << 20;

/// Maximum duration of a move, however slowly its VMs follow.
const DURATION_MAX: Duration = Duration::from_secs(30 * 60);
/// Minimum amount of free memory for which a VM gets a new target before the rest is free.
pub const GRANT_MIN_BYTES: u64 = 4 << 20;
/// Difference to its target at which a cache counts as resized: it consists of whole pages.
const CACHE_SLACK_BYTES: u64 = 64 << 10;
/// Number of failed requests to a VM after which its part is abandoned.
const FAILURES_MAX: u32 = 5;
/// Time for which a VM may be held at its floor before its part ends: three reports of its guest.
const HELD_MAX: Duration = Duration::from_secs(6);
/// Age from which a size is not that of the last poll: the poll failed.
const SIZE_AGE_MS: u64 = 1000;
/// Time after which nothing more is requested at once: each VM whose monitor hangs, or whose libvirt does, is waited for.
pub const REQUESTS_MAX: Duration = Duration::from_secs(5);
/// Smallest change of a target for a floor that has changed.
const FLOOR_STEP_BYTES: u64 = 1 << 20;

/// One VM's part.
#[derive(Debug)]
struct Part {
    vm: String,
    from: Holding,
    to: Holding,
    /// Its last target.
    told: Holding,
    now: Holding,
    state: StepState,
    failures: u32,
    error: Option<String>,
    /// Its guest's counters at its first poll.
    before: Option<GuestCounters>,
    /// Whether its target is its floor, and since when that keeps it from giving more.
    at_floor: bool,
    held: Option<Instant>,
    /// Whether it gets memory back as soon as there is some.
    is_owed: bool,
    /// Whether a target was requested since the last poll of all VMs, or could not be because its cache follows the one
    /// before: what there is to grant then is known at the next.
    is_pending: bool,
}

/// A move in progress.
#[derive(Debug)]
pub struct Move {
    parts: Vec<Part>,
    began: Instant,
    /// All memory, as of the last second.
    divided_bytes: u64,
    /// Why memory is withheld from its VMs, if some is.
    pub why_withheld: Option<String>,
}

/// The progress of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveProgress {
    /// In progress.
    InProgress,
    /// Every VM has its new size.
    Done,
    /// Nothing more can be moved, and some VM does not have its new size.
    Partly,
}

/// Inputs of a move: a VM, and all memory.
pub struct MovableVm<'a> {
    /// Its actuator.
    pub actuator: &'a mut VmMemory,
    /// Its status when last polled; a move polls again.
    pub status: &'a mut MemoryStatus,
    /// Size of the swap that its guest is known to have.
    pub swap_bytes: u64,
    /// How long it waits for a miss, in ms.
    pub miss_cost_ms: f64,
    /// Its size when it was found.
    pub first_bytes: u64,
    /// What its parts may hold as long as they do not answer.
    pub unanswered: Holding,
}

impl MovableVm<'_> {
    fn reserved_bytes(&self) -> u64 {
        reserved_bytes(self.status, self.unanswered)
    }
}

impl Move {
    /// Begins to give each VM the holding paired with its name, starting from its present one.
    pub fn begin(vms: Vec<(String, Holding, Holding)>, now: Instant) -> Self {
        let part = |(vm, from, to)| Part {
            vm,
            from,
            to,
            told: from,
            now: from,
            state: StepState::Waiting,
            failures: 0,
            error: None,
            before: None,
            at_floor: false,
            held: None,
            is_owed: false,
            is_pending: false,
        };
        Self {
            parts: vms.into_iter().map(part).collect(),
            began: now,
            divided_bytes: 0,
            why_withheld: None,
        }
    }

    /// Whether the VM takes part.
    pub fn involves(&self, vm: &str) -> bool {
        self.parts.iter().any(|part| part.vm == vm)
    }

    /// A VM has ended: another one may have its name from now on.
    pub fn ended(&mut self, vm: &str) {
        for part in self.parts.iter_mut().filter(|part| part.vm == vm) {
            part.state = StepState::Gone;
            part.is_owed = false;
            part.error = Some("it ended; its memory is free".to_owned());
        }
    }

    /// What each VM had at the beginning, and is to have.
    pub fn moves(&self) -> impl Iterator<Item = (Holding, Holding)> {
        self.parts.iter().map(|part| (part.from, part.to))
    }

    /// The VMs whose own memory it is still changing: it watches their guests.
    pub fn watched(&self) -> impl Iterator<Item = &str> {
        let parts = self.parts.iter().filter(|part| {
            !part.state.has_ended() && part.to.direct_bytes != part.from.direct_bytes
        });
        parts.map(|part| part.vm.as_str())
    }

    /// Whether the VM is to be polled before [`Self::advance`].
    pub fn polls(&self, vm: &str) -> bool {
        let mut parts = self.parts.iter();
        parts.any(|part| part.vm == vm && !part.state.has_ended())
    }

    /// Does what can be done now; `divided_bytes` is all memory. To be called about once a second, after a poll of the VMs
    /// whose parts have not ended. Requests to monitors that hang take a few seconds in all; what is left is requested the next
    /// time. `progress` is called between the VMs.
    pub fn advance(
        &mut self,
        vms: &mut BTreeMap<String, MovableVm<'_>>,
        divided_bytes: u64,
        now: Instant,
        progress: &mut dyn FnMut(),
    ) -> MoveProgress {
        self.divided_bytes = divided_bytes;
        let until = Instant::now() + REQUESTS_MAX;
        for part in &mut self.parts {
            if part.state.has_ended() {
                continue;
            }
            let Some(held) = vms.get_mut(&part.vm) else {
                continue;
            };
            part.now = held.status.holding();
            part.watch(held.status);
            part.watch_guest(held);
            part.watch_cache(held.status);
        }
        let mut free_bytes = self.free_bytes(vms);
        for part in self.parts.iter_mut().filter(|part| part.is_owed) {
            if Instant::now() >= until {
                break;
            }
            if let Some(held) = vms.get_mut(&part.vm) {
                part.give_back(held, &mut free_bytes);
                progress();
            }
        }
        for part in self.parts.iter_mut().filter(|part| !part.state.has_ended()) {
            part.is_pending = Instant::now() >= until;
            if part.is_pending {
                continue;
            }
            if let Some(held) = vms.get_mut(&part.vm) {
                part.shrink(held);
                progress();
            }
        }
        // What a VM that still shrinks may need back is granted to nobody.
        let kept_back = self.parts.iter().filter_map(|part| {
            let held = vms.get(&part.vm)?;
            Some(part.kept_back_bytes(held))
        });
        let mut free_bytes = self.free_bytes(vms).saturating_sub(kept_back.sum());
        for part in self.parts.iter_mut().filter(|part| !part.state.has_ended()) {
            if Instant::now() >= until {
                part.is_pending = true;
                continue;
            }
            if let Some(held) = vms.get_mut(&part.vm) {
                part.grow(held, &mut free_bytes);
                progress();
            }
        }
        for part in &mut self.parts {
            if let Some(held) = vms.get(&part.vm) {
                part.name(held.status, now);
            }
        }
        let too_long = now.duration_since(self.began) > DURATION_MAX;
        let moving = self.parts.iter().any(|part| {
            let moves = matches!(
                part.state,
                StepState::Shrinking | StepState::Growing | StepState::Late
            );
            moves || part.is_owed || (part.is_pending && !part.state.has_ended())
        });
        if moving && !too_long {
            return MoveProgress::InProgress;
        }
        if self
            .parts
            .iter()
            .all(|part| matches!(part.state, StepState::Done))
        {
            return MoveProgress::Done;
        }
        self.stop(vms, progress);
        MoveProgress::Partly
    }

    /// Free memory: what no VM can take without a new target.
    fn free_bytes(&self, vms: &BTreeMap<String, MovableVm<'_>>) -> u64 {
        let reserved = vms.values().map(MovableVm::reserved_bytes);
        let reserved = reserved.fold(0, u64::saturating_add);
        self.divided_bytes.saturating_sub(reserved)
    }

    /// Sets the target of every VM that has not arrived to its present size.
    pub fn stop(&mut self, vms: &mut BTreeMap<String, MovableVm<'_>>, progress: &mut dyn FnMut()) {
        self.hold_those(|_| true, vms, progress);
    }

    /// The same, but VMs that grow keep their targets: nobody else gets the memory that was free for them.
    pub fn leave(&mut self, vms: &mut BTreeMap<String, MovableVm<'_>>, progress: &mut dyn FnMut()) {
        let grows = |part: &Part| part.told.direct_bytes > part.from.direct_bytes;
        self.hold_those(|part| !grows(part), vms, progress);
    }

    fn hold_those(
        &mut self,
        which: impl Fn(&Part) -> bool,
        vms: &mut BTreeMap<String, MovableVm<'_>>,
        progress: &mut dyn FnMut(),
    ) {
        let until = Instant::now() + REQUESTS_MAX;
        let why_waiting = match &self.why_withheld {
            Some(why) => format!("the memory that it was to get is {why}"),
            None => "the memory that it was to get was not freed".to_owned(),
        };
        let is_held =
            |part: &Part| !matches!(part.state, StepState::Done | StepState::Gone) && which(part);
        let parts = self.parts.iter().enumerate();
        let mut indices: Vec<_> = parts.filter(|(_, part)| is_held(part)).collect();
        let polled = vms.iter_mut();
        let polled = polled.filter(|(name, _)| indices.iter().any(|(_, part)| part.vm == **name));
        let polled = polled.map(|(_, held)| held).collect();
        polls::poll(polled, BEGIN_MAX, |held: &mut MovableVm<'_>| {
            *held.status = held.actuator.poll();
        });
        // The time is for those that answer first.
        let answers = |vm: &str| {
            vms.get(vm)
                .is_some_and(|held| is_fresh(&held.status.direct))
        };
        indices.sort_by_key(|(_, part)| !answers(&part.vm));
        let indices: Vec<_> = indices.into_iter().map(|(index, _)| index).collect();
        for index in indices {
            let free_bytes = self.free_bytes(vms);
            let part = &mut self.parts[index];
            if let Some(held) = vms.get_mut(&part.vm) {
                part.hold(held, free_bytes, Instant::now() < until, &why_waiting);
                progress();
            }
        }
    }

    /// The result of each VM's part.
    pub fn steps(&self) -> Vec<Step> {
        let step = |part: &Part| Step {
            vm: part.vm.clone(),
            from: view(part.from),
            to: view(part.to),
            now: view(part.now),
            state: part.state,
            error: part.error.clone(),
        };
        self.parts.iter().map(step).collect()
    }
}

/// Whether it answered the last poll, so that its size is the present one.
pub fn is_fresh(part: &plimsoll_actuator::Part) -> bool {
    part.age_ms.is_some_and(|age_ms| age_ms < SIZE_AGE_MS)
}

/// The most that a VM may hold without a further request. A part that has not answered this daemon may hold as much as an
/// earlier one knew of (`unanswered`): RAM that was plugged since the VM's start, a cache that it had grown.
pub fn reserved_bytes(status: &MemoryStatus, unanswered: Holding) -> u64 {
    let of = |part: &plimsoll_actuator::Part, unanswered_bytes: u64| match part.age_ms {
        Some(_) => part.reserved_bytes,
        None => part.reserved_bytes.max(unanswered_bytes),
    };
    let cache = status.cache.as_ref();
    let cache_bytes = cache.map_or(0, |cache| of(cache, unanswered.cache_bytes));
    of(&status.direct, unanswered.direct_bytes).saturating_add(cache_bytes)
}

/// A holding, as reported to the operator.
pub fn view(holding: Holding) -> HoldingView {
    HoldingView {
        direct_bytes: holding.direct_bytes,
        cache_bytes: holding.cache_bytes,
    }
}

impl Part {
    /// Checks whether its balloon follows.
    fn watch(&mut self, status: &MemoryStatus) {
        if self.state.has_ended() {
            return;
        }
        if self.to.direct_bytes == self.from.direct_bytes {
            return;
        }
        let told = self.told.direct_bytes != self.from.direct_bytes;
        if !told && matches!(status.direct.progress, Progress::Stuck { .. }) {
            // That concerns a target of an earlier move.
            return;
        }
        let why = match status.direct.progress {
            Progress::Absent(Absence::NoDevice) => "it has no balloon".to_owned(),
            Progress::Absent(_) => "its guest does not answer to its balloon".to_owned(),
            Progress::Stuck {
                unchanged_ms,
                left_bytes,
            } => format!(
                "its balloon has not changed for {} s with {} MiB to go",
                unchanged_ms / 1000,
                left_bytes >> 20
            ),
            _ => return,
        };
        self.state = StepState::Stuck;
        self.is_owed = told && self.to.direct_bytes < self.from.direct_bytes;
        self.error = Some(format!("{why}; it keeps what it has"));
    }

    /// Whether it gives memory of its own, or is owed some of it.
    fn is_squeezed(&self) -> bool {
        let shrinks = !self.state.has_ended() && self.told.direct_bytes < self.from.direct_bytes;
        shrinks || self.is_owed
    }

    /// Checks whether its guest runs short.
    fn watch_guest(&mut self, held: &MovableVm<'_>) {
        let before = *self
            .before
            .get_or_insert_with(|| GuestCounters::of(held.status));
        if !self.is_squeezed() || self.state.has_ended() {
            return;
        }
        let into_cache = self.to.cache_bytes > self.from.cache_bytes;
        // What it has beyond that was lent, and others are owed it, whatever it does with it.
        let returns = self.to.bytes() >= held.first_bytes;
        let faults_max = if into_cache || returns {
            f64::INFINITY
        } else {
            guard::faults_rise_max(held.miss_cost_ms)
        };
        if let Some(why) = guard::shortage(held.status, before, held.swap_bytes, faults_max) {
            self.end_short(&why);
        }
    }

    /// Ends its part, and gives it memory back.
    fn end_short(&mut self, why: &str) {
        self.state = StepState::Short;
        self.is_owed = self.told.direct_bytes < self.from.direct_bytes;
        let back = if self.is_owed {
            "; it gets some memory back"
        } else {
            ""
        };
        self.error = Some(format!("{why}{back}"));
    }

    /// The memory that stays free for it while it shrinks.
    fn kept_back_bytes(&self, held: &MovableVm<'_>) -> u64 {
        let has_shrunk = self.told.direct_bytes == self.to.direct_bytes
            && matches!(held.status.direct.progress, Progress::Reached);
        if !self.is_squeezed() || has_shrunk {
            return 0;
        }
        // It never gets more than it had.
        let given = self
            .from
            .direct_bytes
            .saturating_sub(held.status.reserved().direct_bytes);
        guard::give_back_bytes(held.status).min(given)
    }

    /// Raises its target, as far as there is free memory.
    fn give_back(&mut self, held: &mut MovableVm<'_>, free_bytes: &mut u64) {
        *held.status = held.actuator.poll();
        let has = held.status.direct.actual_bytes;
        let back = guard::give_back_bytes(held.status).min(*free_bytes);
        let target = has
            .saturating_add(back)
            .min(self.from.direct_bytes)
            .max(has);
        self.is_owed = !self.request(held, target) && self.failures <= FAILURES_MAX;
        *free_bytes = free_bytes.saturating_sub(target - has);
        self.now = held.status.holding();
    }

    /// Checks whether its cache has reached its target: a failed resize is repeated.
    fn watch_cache(&mut self, status: &MemoryStatus) {
        let Some(cache) = status.cache.as_ref().filter(|_| !self.state.has_ended()) else {
            return;
        };
        let over = matches!(
            cache.progress,
            Progress::NoTarget | Progress::Reached | Progress::Late { .. } | Progress::Stuck { .. }
        );
        let told = self.told.cache_bytes != self.from.cache_bytes;
        if over && told && cache.actual_bytes.abs_diff(self.told.cache_bytes) > CACHE_SLACK_BYTES {
            self.told.cache_bytes = cache.actual_bytes;
            self.failures += 1;
            self.error = status.failures.last().map(|error| with_causes(error));
        }
    }

    /// Whether its target has been reached.
    fn is_settled(&self, status: &MemoryStatus) -> bool {
        let there =
            |progress: &Progress| matches!(progress, Progress::NoTarget | Progress::Reached);
        let direct =
            self.told.direct_bytes == self.from.direct_bytes || there(&status.direct.progress);
        direct
            && status
                .cache
                .as_ref()
                .is_none_or(|cache| there(&cache.progress))
    }

    /// A part that has less than its new size, though it was to shrink to that, did not answer when the move began: it grows
    /// instead, as far as there is free memory.
    fn correct(&mut self, has: Holding) {
        let correct = |has: u64, to: u64, from: &mut u64, told: &mut u64| {
            if *told == *from && to < *from && has < to {
                (*from, *told) = (has, has);
            }
        };
        let Self { from, to, told, .. } = self;
        correct(
            has.direct_bytes,
            to.direct_bytes,
            &mut from.direct_bytes,
            &mut told.direct_bytes,
        );
        correct(
            has.cache_bytes,
            to.cache_bytes,
            &mut from.cache_bytes,
            &mut told.cache_bytes,
        );
    }

    /// Releases its excess memory.
    fn shrink(&mut self, held: &mut MovableVm<'_>) {
        self.correct(held.status.holding());
        let floor = guard::floor_bytes(held.status, held.swap_bytes);
        let least = self.to.direct_bytes.max(floor);
        let has = held.status.direct.actual_bytes;
        let next = has.saturating_sub(guard::step_bytes(held.status, floor));
        // Fewer steps are as good where there is little left.
        let target = least.max(next.min(self.told.direct_bytes));
        self.at_floor = target == floor && target > self.to.direct_bytes;
        // What has never answered may have less than that already.
        let direct = held.status.direct.age_ms.is_some()
            && self.to.direct_bytes < self.from.direct_bytes
            && target <= self.from.direct_bytes
            && (target == self.to.direct_bytes
                || target.abs_diff(self.told.direct_bytes) >= FLOOR_STEP_BYTES)
            && target != self.told.direct_bytes;
        let cache = self.to.cache_bytes < self.told.cache_bytes;
        if direct {
            self.request(held, target);
        }
        if cache {
            match held.actuator.set_cache(self.to.cache_bytes) {
                Ok(()) => self.told.cache_bytes = self.to.cache_bytes,
                Err(ActuatorError::Busy { .. }) => {}
                Err(error) => self.failed(&error),
            }
        }
        if cache {
            *held.status = held.actuator.poll();
        }
        self.is_pending = direct || cache;
    }

    /// Takes from the free memory, never beyond its new size.
    fn grow(&mut self, held: &mut MovableVm<'_>, free_bytes: &mut u64) {
        if held.status.direct.in_doubt
            && self.told.direct_bytes < self.to.direct_bytes
            && let Some(target) = held.status.direct.target_bytes
        {
            // A target that may have been set is set again, and nothing more until that is settled.
            self.request(held, target);
            return;
        }
        let mut room = self
            .to
            .bytes()
            .saturating_sub(held.status.reserved().bytes())
            .min(*free_bytes);
        // From what it may take already, which can be less than its last target: another client may have set a smaller
        // one.
        let has = held.status.reserved();
        let mut grant = |told: u64, has: u64, to: u64| {
            let want = if told < to { to.saturating_sub(has) } else { 0 };
            let given = want.min(room);
            let worth = given > 0 && (given == want || given >= GRANT_MIN_BYTES);
            worth.then(|| {
                room -= given;
                has + given
            })
        };
        let direct = grant(
            self.told.direct_bytes,
            has.direct_bytes,
            self.to.direct_bytes,
        );
        let cache = grant(self.told.cache_bytes, has.cache_bytes, self.to.cache_bytes);
        if let Some(bytes) = direct {
            // Whatever the answer: the request may have arrived.
            *free_bytes -= bytes - has.direct_bytes;
            self.request(held, bytes);
        }
        if let Some(bytes) = cache {
            *free_bytes -= bytes - has.cache_bytes;
            match held.actuator.set_cache(bytes) {
                Ok(()) => self.told.cache_bytes = bytes,
                Err(ActuatorError::Busy { .. }) => {}
                Err(error) => self.failed(&error),
            }
        }
        if cache.is_some() {
            *held.status = held.actuator.poll();
        }
        self.is_pending |= direct.is_some() || cache.is_some();
    }

    /// Reports its present size.
    fn name(&mut self, status: &MemoryStatus, now: Instant) {
        if self.state.has_ended() {
            return;
        }
        let settled = self.is_settled(status);
        self.now = status.holding();
        // Its floor keeps it from giving more.
        let is_held = self.at_floor && self.failures == 0 && settled;
        self.held = is_held.then(|| self.held.unwrap_or(now));
        if self
            .held
            .is_some_and(|since| now.duration_since(since) >= HELD_MAX)
        {
            let why = guard::why_kept(status);
            self.end_short(&why);
            self.is_owed &= status.need.is_none();
            return;
        }
        self.state = if self.failures > FAILURES_MAX {
            StepState::Failed
        } else if self.told == self.to && settled {
            self.error = None;
            StepState::Done
        } else if matches!(status.direct.progress, Progress::Late { .. }) {
            StepState::Late
        } else if is_held {
            StepState::Shrinking
        } else if !settled || self.failures > 0 {
            let gives = status.direct.actual_bytes > self.told.direct_bytes;
            if gives {
                StepState::Shrinking
            } else {
                StepState::Growing
            }
        } else if self.told.direct_bytes > self.to.direct_bytes {
            // Between two steps.
            StepState::Shrinking
        } else {
            StepState::Waiting
        };
    }

    /// Requests a size of its own memory. One that did not answer its last poll is not waited for again, and polled with all
    /// others. Returns whether the request succeeded.
    fn request(&mut self, held: &mut MovableVm<'_>, target_bytes: u64) -> bool {
        if !is_fresh(&held.status.direct) {
            self.failures += 1;
            let failures = held.status.failures.iter();
            self.error = failures.map(|error| with_causes(error)).next();
            return false;
        }
        let outcome = held.actuator.set_direct(target_bytes);
        match &outcome {
            Ok(()) => self.told.direct_bytes = target_bytes,
            Err(error) => self.failed(error),
        }
        // Its status before the request is no evidence of the new target.
        *held.status = held.actuator.poll();
        outcome.is_ok()
    }

    fn failed(&mut self, error: &ActuatorError) {
        self.failures += 1;
        self.error = Some(with_causes(error));
    }

    /// Sets its target to its present size, by the last poll, unless the time for that is over.
    ///
    /// Memory that it freed for its own cache, and that did not get there, is returned: a VM that was to keep its size
    /// does, as far as that memory is free.
    fn hold(
        &mut self,
        held: &mut MovableVm<'_>,
        free_bytes: u64,
        is_in_time: bool,
        why_waiting: &str,
    ) {
        let has = held.status.holding();
        let gets_back = self.state.has_ended() && self.told.direct_bytes > has.direct_bytes;
        if gets_back && self.to.direct_bytes < self.from.direct_bytes {
            return;
        }
        let direct = &held.status.direct;
        let in_force = direct.target_bytes.unwrap_or(self.told.direct_bytes);
        let mut direct_bytes = has.direct_bytes;
        if !is_fresh(&held.status.direct) {
            // It may have grown since.
            direct_bytes = direct_bytes.max(in_force);
        }
        if self.to.cache_bytes > self.from.cache_bytes {
            let keep = self.from.bytes().min(self.to.bytes());
            let most = held.status.direct.max_bytes.unwrap_or(u64::MAX);
            let reserved = held.status.reserved();
            let own = keep.saturating_sub(reserved.cache_bytes).min(most);
            let own = own.min(reserved.direct_bytes.saturating_add(free_bytes));
            direct_bytes = direct_bytes.max(own);
        }
        let direct = in_force != direct_bytes || held.status.direct.in_doubt;
        let cache = self.told.cache_bytes != has.cache_bytes;
        self.now = has;
        let mut failure = None;
        if direct && is_in_time {
            failure = held.actuator.set_direct(direct_bytes).err();
        }
        if cache {
            failure = failure.or(held.actuator.set_cache(has.cache_bytes).err());
        }
        if (direct && is_in_time) || cache {
            // What it may take now is given to nobody else.
            *held.status = held.actuator.poll();
        }
        let why = match failure {
            Some(error) => Some(with_causes(&error)),
            None if direct && !is_in_time => {
                Some("VMs before it did not answer in time".to_owned())
            }
            None => None,
        };
        if let Some(why) = why {
            self.error = Some(format!("its target could not be reset to its size: {why}"));
        } else if self.state == StepState::Waiting {
            self.error = Some(why_waiting.to_owned());
        }
    }
}
