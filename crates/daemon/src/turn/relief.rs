//! Between turns: memory for guests that run short.

use std::time::{Duration, Instant};

use plimsoll_actuator::Holding;
use plimsoll_protocol::decision::{Initiator, Kind, Mode};

use super::discover::poll_quick;
use super::{CACHE_LEAST_BYTES, FIRST_MOVE_TURN, PendingMove, SAME_BYTES, Stage, Turns};
use crate::guard::{self, GuestCounters};
use crate::host::Host;
use crate::vm::Vm;

/// Interval between polls of VMs that are below their baselines: that of a guest's statistics.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

impl<H: Host> Turns<H> {
    /// Gives memory back to a VM whose guest runs short while it has less than its baseline; to be called each second.
    /// Moves in progress watch the VMs that they shrink themselves.
    pub(super) fn relieve_guests(&mut self, now: Instant) {
        let due = |at: Instant| now.duration_since(at) >= POLL_INTERVAL;
        if self.config.mode != Mode::Act
            || self.paused
            || self.turn < FIRST_MOVE_TURN
            || !self.guests_polled.is_none_or(due)
        {
            return;
        }
        self.guests_polled = Some(now);
        let moving: Vec<String> = match &self.active {
            Some(active) => match &active.stage {
                Stage::Moving(_) if active.decision.kind == Kind::Rollback => return,
                Stage::Moving(under_way) => under_way.unfinished().map(str::to_owned).collect(),
                Stage::Checking(_) => Vec::new(),
            },
            None => Vec::new(),
        };
        let squeezed = |vm: &Vm| {
            let settings = vm.settings();
            let has = vm.status.direct.actual_bytes;
            settings.managed
                && vm.is_known()
                && vm.is_resizable()
                && has.saturating_add(SAME_BYTES) < settings.baseline_bytes.min(vm.ram_bytes())
        };
        poll_quick(self.vms.values_mut().filter(|vm| squeezed(vm)));
        let mut short = Vec::new();
        for (name, vm) in &mut self.vms {
            let kills = vm.status.need.and_then(|need| need.oom_kills);
            let before = GuestCounters {
                // The check after a move judges misses.
                faults_per_second: f64::INFINITY,
                oom_kills: vm.oom_kills,
            };
            vm.oom_kills = kills.or(vm.oom_kills);
            if !squeezed(vm) || moving.contains(name) {
                continue;
            }
            if let Some(why) = guard::shortage(&vm.status, before, vm.swap_bytes(), false) {
                short.push((name.clone(), why));
            }
        }
        if short.is_empty() {
            return;
        }
        // All at once: a guest that always reports to be short must not stand before the others.
        let reasons = short.iter().map(|(name, why)| format!("{name}: {why}"));
        let reasons = reasons.collect::<Vec<_>>().join("; ");
        let Some(pending) = self.relief(&short, &reasons) else {
            tracing::warn!("{reasons}, and no memory is free");
            return;
        };
        self.stop("Guests ran short of memory");
        self.begin(pending, Initiator::Daemon, None, now);
        self.cooldown_until = Some(now + self.config.cooldown);
    }

    /// A move that gives VMs memory: of their own caches, else free memory, else of VMs above their baselines.
    fn relief(&self, short: &[(String, String)], reasons: &str) -> Option<PendingMove> {
        let reserved = self.vms.values().map(Vm::reserved_bytes);
        let reserved = reserved.fold(self.store_bytes, u64::saturating_add);
        let mut free = self.divided_bytes().saturating_sub(reserved);
        let above = |(name, vm): (&String, &Vm)| {
            let settings = vm.settings();
            let has = vm.status.holding();
            let above = has.bytes().saturating_sub(settings.baseline_bytes);
            let may_give = settings.managed && vm.is_resizable();
            (may_give && above >= SAME_BYTES)
                .then(|| (name.clone(), has, above.min(has.direct_bytes)))
        };
        let mut givers: Vec<_> = self.vms.iter().filter_map(above).collect();
        let mut moves = Vec::new();
        for (name, _) in short {
            let Some(vm) = self.vms.get(name) else {
                continue;
            };
            let from = vm.status.holding();
            let whole = vm.settings().baseline_bytes.min(vm.ram_bytes());
            let missing = whole.saturating_sub(from.direct_bytes);
            let wanted = guard::give_back_bytes(&vm.status).min(missing);
            let of_cache = from
                .cache_bytes
                .saturating_sub(CACHE_LEAST_BYTES)
                .min(wanted);
            let of_free = (wanted - of_cache).min(free);
            free -= of_free;
            let mut given = of_cache + of_free;
            for (_, _, above) in givers.iter_mut().filter(|(giver, ..)| giver != name) {
                let taken = (wanted - given).min(*above);
                *above -= taken;
                given += taken;
            }
            if given >= SAME_BYTES {
                let to = Holding {
                    direct_bytes: from.direct_bytes + given,
                    cache_bytes: from.cache_bytes - of_cache,
                };
                moves.push((name.clone(), from, to));
            }
        }
        if moves.is_empty() {
            return None;
        }
        for (name, has, left) in givers {
            let vm = self.vms.get(&name)?;
            let (_, _, above) = above((&name, vm))?;
            let is_short = moves.iter().any(|(short, ..)| *short == name);
            if above > left && !is_short {
                let to = Holding {
                    direct_bytes: has.direct_bytes - (above - left),
                    ..has
                };
                moves.push((name, has, to));
            }
        }
        Some(PendingMove {
            kind: Kind::GiveBack,
            inputs: None,
            plan: None,
            moves,
            promises: Vec::new(),
            reason: format!("Guests get memory back. {reasons}."),
            takes_back: None,
        })
    }
}
