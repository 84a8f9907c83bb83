//! A host that runs short of memory: caches under disks shrink before any VM does.
//!
//! A cache frees its memory within milliseconds and loses copies of what storage has. A balloon needs its guest, so VMs
//! follow only in the next turns, within their limits: what the host lacks is withheld from the total.
//!
//! What is withheld follows from what the VMs hold now: the total is to be what they hold less what the host lacks. While
//! they have not yet given what was withheld before, that is unchanged, however often the lack is observed; once the host lacks nothing,
//! no more is taken than moves in progress do. What VMs
//! that start or end hold is added to what all may hold, or subtracted. Plans divide at
//! least what the VMs' limits need ([`Turns::limit_withheld`]), so that an allocation exists; nothing is granted of what the host
//! lacks.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use plimsoll_actuator::{Holding, Progress};
use plimsoll_output::exit::with_causes;
use plimsoll_protocol::decision::Mode;

use super::{CACHE_LEAST_BYTES, SAME_BYTES, Stage, Turns};
use crate::host::Host;
use crate::vm::Vm;

/// Minimum time between two reactions, unless the caches that the first one shrank have reached their targets before: the kernel
/// has then counted what it freed.
const REACTION_INTERVAL: Duration = Duration::from_millis(500);
/// Time for which the host must have had enough before memory is allocated again.
const CALM: Duration = Duration::from_mins(1);
/// Share of the time in which all of the host's tasks wait for memory, from which twice the headroom is required, and the
/// time over which it is measured.
const STALLED_RATIO: f64 = 0.05;
const STALL_WINDOW: Duration = Duration::from_secs(2);

/// What was done about a lack of memory.
#[derive(Debug, Default)]
pub(super) struct HostRelief {
    /// What the VMs and the page store may hold, because the host lacks the rest of the total; `None` if it lacks nothing.
    left_bytes: Option<u64>,
    /// What plans divide at least: the VMs' limits need it.
    pub planned_least_bytes: u64,
    /// Earliest time of the next reaction.
    next_reaction: Option<Instant>,
    /// VMs whose caches the last reaction shrank and that have not reached their targets.
    shrinking: BTreeSet<String>,
    /// Last time at which the host was short; `None` once it has had enough for a while.
    short_at: Option<Instant>,
    /// Stall time of all tasks at the beginning of the window, and that beginning.
    stalled: Option<(Duration, Instant)>,
    /// Whether the tasks waited for memory for a significant time in the last window.
    is_stalled: bool,
}

impl HostRelief {
    /// Whether the host is short, or was lately.
    pub fn is_short(&self) -> bool {
        self.short_at.is_some()
    }

    /// A VM has started: all may hold as much more.
    pub fn vm_started(&mut self, held_bytes: u64) {
        self.left_bytes = (self.left_bytes).map(|left| left.saturating_add(held_bytes));
    }

    /// A VM has ended: the others may hold no more than before.
    pub fn vm_ended(&mut self, held_bytes: u64) {
        self.left_bytes = (self.left_bytes).map(|left| left.saturating_sub(held_bytes));
    }

    /// Whether the host's tasks waited for memory for a significant time in the last window.
    fn is_stalled(&mut self, full_total: Option<Duration>, now: Instant) -> bool {
        let Some(total) = full_total else {
            return false;
        };
        let (before, at) = *self.stalled.get_or_insert((total, now));
        let (lost, passed) = (total.saturating_sub(before), now.duration_since(at));
        if passed >= STALL_WINDOW {
            self.is_stalled = lost.as_secs_f64() > passed.as_secs_f64() * STALLED_RATIO;
            self.stalled = Some((total, now));
        }
        self.is_stalled
    }
}

impl<H: Host> Turns<H> {
    /// What the VMs and the page store hold. A VM that is copied to another process of the host counts once.
    pub(super) fn held_bytes(&self) -> u64 {
        let held = self.counted_vms().map(Vm::size_bytes);
        held.fold(self.store_bytes, u64::saturating_add)
    }

    /// What they will hold when they have given what moves in progress take from them.
    fn left_after_moves(&self) -> u64 {
        let left = self.counted_vms().map(|vm| {
            let held = vm.size_bytes();
            vm.target_bytes.map_or(held, |target| target.min(held))
        });
        left.fold(self.store_bytes, u64::saturating_add)
    }

    /// The memory that is allocated to nobody, because the host lacks it. Some is left for an allocation to be computed, even if
    /// it is far too little.
    pub(super) fn withheld_bytes(&self) -> u64 {
        let least = self.store_bytes.saturating_add(SAME_BYTES);
        let returnable = self.returnable.map(|returnable| returnable.bytes);
        let left = returnable.or(self.host_relief.left_bytes);
        let left = left.map(|left| left.max(least));
        let total = self.total_bytes();
        total.saturating_sub(left.unwrap_or(total))
    }

    /// Why a VM does not get memory, if some is withheld: the end of a sentence about that memory.
    pub(super) fn why_withheld(&self) -> Option<String> {
        let headroom = self.config.headroom_of(self.host_ram.0);
        (self.withheld_bytes() > 0).then(|| {
            format!(
                "withheld, because the host should keep {} MiB available",
                headroom >> 20
            )
        })
    }

    /// The memory that VMs may be given and none of them can take without a new target.
    pub(super) fn unreserved_bytes(&self) -> u64 {
        let reserved = self.counted_vms().map(Vm::reserved_bytes);
        let reserved = reserved.fold(self.store_bytes, u64::saturating_add);
        self.granted_bytes().saturating_sub(reserved)
    }

    /// Whether VMs have yet to give what was withheld.
    pub(super) fn is_withheld_outstanding(&self) -> bool {
        self.withheld_bytes() > 0
            && self.held_bytes() > self.divided_bytes().saturating_add(SAME_BYTES)
    }

    /// Shrinks caches if the host runs short; to be called several times a second.
    pub(super) fn relieve_host(&mut self, now: Instant) {
        if self.config.mode != Mode::Act || self.paused {
            self.host_relief = HostRelief::default();
            return;
        }
        self.follow_caches();
        let (total, available) = self.host.ram();
        let pressure = self.host.pressure();
        let full_total = pressure.map(|pressure| pressure.full_total);
        let headroom = self.config.headroom_of(total);
        let required = match self.host_relief.is_stalled(full_total, now) {
            true => headroom.saturating_mul(2),
            false => headroom,
        };
        let lacking = required.saturating_sub(available);
        if lacking == 0 {
            // What was withheld and not given yet is not taken any more.
            if let Some(left) = self.host_relief.left_bytes {
                self.host_relief.left_bytes = Some(left.max(self.left_after_moves()));
            }
            let calm = |at| now.duration_since(at) >= CALM;
            if self.host_relief.short_at.is_none_or(calm) {
                self.release(available.saturating_sub(headroom.saturating_mul(2)));
            }
            return;
        }
        let began = self.host_relief.short_at.replace(now).is_none();
        if self.host_relief.next_reaction.is_some_and(|at| now < at) {
            return;
        }
        self.host_relief.next_reaction = Some(now + REACTION_INTERVAL);
        let left = self.held_bytes().saturating_sub(lacking);
        let before = self.host_relief.left_bytes.unwrap_or(u64::MAX);
        self.host_relief.left_bytes = Some(left.min(before));
        if began {
            tracing::warn!(
                "the host has {} MiB available and should have {}: {} MiB are withheld",
                available >> 20,
                required >> 20,
                self.withheld_bytes() >> 20
            );
        }
        // Other moves go on: they get nothing until the host has what it lacks, and what shrinks helps it.
        if self.moves_between_parts() {
            self.stop("The host ran short of memory");
        }
        self.shrink_caches(lacking);
    }

    /// Withholds no more than would leave the host with `spare` bytes less.
    fn release(&mut self, spare_bytes: u64) {
        let may_hold = self.held_bytes().saturating_add(spare_bytes);
        let total = self.total_bytes();
        let relief = &mut self.host_relief;
        if let Some(left) = &mut relief.left_bytes {
            *left = may_hold.max(*left);
        }
        relief.left_bytes = relief.left_bytes.filter(|left| *left < total);
        relief.shrinking.clear();
        if relief.short_at.take().is_some() {
            tracing::info!(
                "the host has enough memory again: {} MiB are still withheld",
                self.withheld_bytes() >> 20
            );
        }
    }

    /// Plans divide at least what the VMs' limits need, although the host withholds that or has less: an allocation that
    /// keeps the limits must exist, and VMs that have more are to give the rest. To be called each turn.
    pub(super) fn limit_withheld(&mut self) {
        self.host_relief.planned_least_bytes = 0;
        let (held, total) = (self.held_bytes(), self.total_bytes());
        let withheld = self.withheld_bytes();
        if withheld == 0 && held <= total {
            return;
        }
        if let Some(shortfall) = self.shortfall() {
            let needed = shortfall.needed_bytes.saturating_add(self.store_bytes);
            self.host_relief.planned_least_bytes = needed;
            if needed > total {
                self.warnings.push(shortfall.to_string());
            }
        }
        if withheld > 0 {
            let (ram_bytes, available) = self.host_ram;
            self.warnings.push(format!(
                "the host runs or ran short of memory: it has {} MiB available and should keep {}; {} MiB are withheld from the VMs",
                available >> 20,
                self.config.headroom_of(ram_bytes) >> 20,
                withheld >> 20
            ));
        }
    }

    /// Whether a move is in progress that takes memory from a VM for the VM's own cache, or the reverse: while the host
    /// is short, the second part would not get what the first one frees.
    fn moves_between_parts(&self) -> bool {
        let under_way = self.active.as_ref().and_then(|active| match &active.stage {
            Stage::Moving(under_way) => Some(under_way),
            Stage::Checking(_) => None,
        });
        let opposite = |from: Holding, to: Holding| {
            (to.direct_bytes > from.direct_bytes && to.cache_bytes < from.cache_bytes)
                || (to.direct_bytes < from.direct_bytes && to.cache_bytes > from.cache_bytes)
        };
        under_way.is_some_and(|under_way| under_way.moves().any(|(from, to)| opposite(from, to)))
    }

    /// Polls the caches that shrink. Once all have, the next reaction need not wait.
    fn follow_caches(&mut self) {
        let relief = &mut self.host_relief;
        if relief.shrinking.is_empty() {
            return;
        }
        let (vms, mut is_known) = (&mut self.vms, true);
        relief.shrinking.retain(|name| {
            let Some(vm) = vms.get_mut(name) else {
                return false;
            };
            let failures = vm.status.failures.len();
            vm.actuator.poll_cache(&mut vm.status);
            // The others are not to wait for one that does not answer.
            let is_answered = vm.status.failures.len() == failures;
            is_known &= is_answered;
            let cache = vm.status.cache;
            is_answered && cache.is_some_and(|cache| cache.progress != Progress::Reached)
        });
        if relief.shrinking.is_empty() && is_known {
            relief.next_reaction = None;
        }
    }

    /// Takes memory from the caches under disks, from each in proportion to what it can give. Waits for none of them.
    fn shrink_caches(&mut self, lacking_bytes: u64) {
        let has = |vm: &Vm| vm.status.holding().cache_bytes;
        let can_give = |vm: &Vm| match vm.settings().managed {
            true => has(vm).saturating_sub(CACHE_LEAST_BYTES),
            false => 0,
        };
        let all = self.vms.values().map(can_give);
        let all = all.fold(0, u64::saturating_add);
        let mut shrinking = BTreeSet::new();
        for (name, vm) in &mut self.vms {
            let own = can_give(vm);
            let share =
                u128::from(lacking_bytes.min(all)) * u128::from(own) / u128::from(all.max(1));
            let given = u64::try_from(share)
                .unwrap_or(own)
                .next_multiple_of(SAME_BYTES)
                .min(own);
            if given == 0 {
                continue;
            }
            if let Err(error) = vm.actuator.set_cache(has(vm) - given) {
                tracing::warn!(vm = name, "{}", with_causes(&error));
            }
            shrinking.insert(name.clone());
        }
        self.host_relief.shrinking = shrinking;
    }
}
