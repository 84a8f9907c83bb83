//! A host that runs short of memory: caches under disks shrink before any VM does.
//!
//! A cache frees its memory within milliseconds and loses copies of what storage has. A balloon needs its guest, so VMs
//! follow only in the next turns, within their limits: what the host lacks is withheld from the total.

use std::time::{Duration, Instant};

use plimsoll_protocol::decision::Mode;

use super::{CACHE_LEAST_BYTES, SAME_BYTES, Turns};
use crate::host::Host;
use crate::moves::chain;
use crate::vm::Vm;

/// Minimum time between two reactions: the kernel has then counted what the first one freed.
const REACTION_INTERVAL: Duration = Duration::from_millis(500);
/// Time for which the host must have had enough before memory is allocated again.
const CALM: Duration = Duration::from_mins(1);
/// Share of the time in which all of the host's tasks wait for memory, from which twice the headroom is required.
const STALLED_RATIO: f64 = 0.05;
/// The headroom by default, as a share of the host's RAM.
const HEADROOM_SHARE: u64 = 32;

/// What was done about a lack of memory.
#[derive(Debug, Default)]
pub(super) struct HostRelief {
    /// Memory that is allocated to nobody, because the host lacks it.
    pub withheld_bytes: u64,
    /// Time of the last reaction.
    reacted: Option<Instant>,
    /// Last time at which the host was short.
    short_at: Option<Instant>,
    /// Stall time of all tasks, and when it was read.
    stalled: Option<(Duration, Instant)>,
}

impl HostRelief {
    /// Whether the host is short, or was lately.
    pub fn is_short(&self) -> bool {
        self.short_at.is_some()
    }

    /// Whether the host's tasks waited for memory for a significant time since the last call.
    fn is_stalled(&mut self, full_total: Option<Duration>, now: Instant) -> bool {
        let before = self.stalled;
        self.stalled = full_total.map(|total| (total, now));
        let (Some((before, at)), Some(total)) = (before, full_total) else {
            return false;
        };
        let (lost, passed) = (total.saturating_sub(before), now.duration_since(at));
        !passed.is_zero() && lost.as_secs_f64() > passed.as_secs_f64() * STALLED_RATIO
    }
}

impl<H: Host> Turns<H> {
    /// Shrinks caches if the host runs short; to be called several times a second.
    pub(super) fn relieve_host(&mut self, now: Instant) {
        if self.config.mode != Mode::Act || self.paused {
            return;
        }
        let (total, available) = self.host.ram();
        let pressure = self.host.pressure();
        let full_total = pressure.map(|pressure| pressure.full_total);
        let headroom = self.config.headroom_bytes.unwrap_or(total / HEADROOM_SHARE);
        let required = match self.host_relief.is_stalled(full_total, now) {
            true => headroom.saturating_mul(2),
            false => headroom,
        };
        let lacking = required.saturating_sub(available);
        if lacking == 0 {
            let calm = |at| now.duration_since(at) >= CALM;
            let relief = &mut self.host_relief;
            let enough = headroom
                .saturating_mul(2)
                .saturating_add(relief.withheld_bytes);
            if relief.short_at.is_some_and(calm) && available > enough {
                relief.withheld_bytes = 0;
                relief.short_at = None;
                tracing::info!("the host has enough memory again");
            }
            return;
        }
        self.host_relief.short_at = Some(now);
        let reacted = self.host_relief.reacted;
        if reacted.is_some_and(|at| now.duration_since(at) < REACTION_INTERVAL) {
            return;
        }
        self.host_relief.reacted = Some(now);
        // What the VMs have above their reports is not theirs to lose: only what they hold can be withheld.
        let held = self.vms.values().map(|vm| vm.size_bytes());
        let most = held.fold(0, u64::saturating_add) / 2;
        let withheld = self.host_relief.withheld_bytes.saturating_add(lacking);
        self.host_relief.withheld_bytes = withheld.min(most);
        tracing::warn!(
            "the host has {} MiB available and should have {}: {} MiB are withheld",
            available >> 20,
            required >> 20,
            self.host_relief.withheld_bytes >> 20
        );
        self.stop("The host ran short of memory");
        self.shrink_caches(lacking);
    }

    /// Takes memory from the caches under disks, from each in proportion to what it can give.
    fn shrink_caches(&mut self, lacking_bytes: u64) {
        let has = |vm: &Vm| vm.status.holding().cache_bytes;
        let can_give = |vm: &Vm| match vm.settings().managed {
            true => has(vm).saturating_sub(CACHE_LEAST_BYTES),
            false => 0,
        };
        let all = self.vms.values().map(can_give);
        let all = all.fold(0, u64::saturating_add);
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
                tracing::warn!(vm = name, "{}", chain(&error));
            }
            vm.status = vm.actuator.poll();
        }
    }
}
