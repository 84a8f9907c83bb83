//! Between turns: memory for guests that run short.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use plimsoll_actuator::Holding;
use plimsoll_protocol::decision::{Initiator, Kind, Mode};

use super::discover::poll_all;
use super::{CACHE_LEAST_BYTES, PendingMove, SAME_BYTES, Stage, Turns};
use crate::guard::{self, GuestCounters};
use crate::host::Host;
use crate::vm::Vm;

/// Interval between polls of VMs that are below their baselines: that of a guest's statistics.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Interval at which the log repeats that guests are short of memory and get none.
const LOGGED_AGAIN: Duration = Duration::from_mins(1);

/// The last log line about guests that are short of memory and get none: their names with the reason, and its time.
#[derive(Debug, Default)]
pub(super) struct LoggedShortage(Option<(String, Instant)>);

impl LoggedShortage {
    /// Whether to log that these VMs get no memory for this reason: at once if VMs or reason are new, otherwise once a minute.
    fn is_due(&mut self, short: &[ShortVm], why: &str, now: Instant) -> bool {
        let names = short.iter().map(|short| short.vm.as_str());
        let news = names.chain([why]).collect::<Vec<_>>().join("\0");
        let is_known = self.0.as_ref().is_some_and(|(logged, at)| {
            *logged == news && now.saturating_duration_since(*at) < LOGGED_AGAIN
        });
        if !is_known {
            self.0 = Some((news, now));
        }
        !is_known
    }
}

/// A VM that gets memory back.
struct ShortVm {
    vm: String,
    why: String,
    wanted_bytes: u64,
}

impl<H: Host> Turns<H> {
    /// Gives memory back to VMs below their baselines whose guests run short, or of which counts show only now that they
    /// miss more since a move than they are promised; to be called each second. A daemon that does not act watches the VMs
    /// that a decision resized. Moves in progress watch the VMs whose own memory they change.
    pub(super) fn relieve_guests(&mut self, now: Instant) {
        let due = |at: Instant| now.duration_since(at) >= POLL_INTERVAL;
        if !self.guests_polled.is_none_or(due) {
            return;
        }
        self.guests_polled = Some(now);
        let moving: Vec<String> = match &self.active {
            Some(active) => match &active.stage {
                Stage::Moving(_) if active.decision.kind == Kind::Rollback => return,
                Stage::Moving(under_way) => under_way.watched().map(str::to_owned).collect(),
                Stage::Checking(_) => Vec::new(),
            },
            None => Vec::new(),
        };
        let watched: BTreeSet<String> = self
            .vms
            .iter()
            .filter(|(name, vm)| is_squeezed(vm) && self.may_relieve(name, vm))
            .map(|(name, _)| name.clone())
            .collect();
        let began = Instant::now();
        let vms = self.vms.iter_mut();
        poll_all(vms.filter_map(|(name, vm)| watched.contains(name).then_some(vm)));
        let check_after = self.config.check_after;
        let mut short = Vec::new();
        for (name, vm) in &mut self.vms {
            let need = vm.status.need;
            let kills = need.and_then(|need| need.oom_kills);
            let before = GuestCounters {
                faults_per_second: vm.whole_faults_per_second,
                oom_kills: vm.oom_kills,
            };
            vm.oom_kills = kills.or(vm.oom_kills);
            if !is_squeezed(vm) {
                let faults = need.and_then(|need| need.major_faults_per_second);
                vm.whole_faults_per_second = faults.unwrap_or(vm.whole_faults_per_second);
                vm.unchecked = None;
                continue;
            }
            // A report of an earlier poll has had its effect.
            let polled = vm.polled_at().is_some_and(|at| at >= began);
            if !watched.contains(name) || !polled {
                continue;
            }
            vm.count(now);
            if moving.contains(name) {
                continue;
            }
            let faults_max = match vm.status.holding().cache_bytes > CACHE_LEAST_BYTES {
                true => f64::INFINITY,
                false => guard::faults_rise_max(vm.miss_cost.ms),
            };
            let shortage = guard::shortage(&vm.status, before, vm.swap_bytes(), faults_max);
            let shortage = shortage.map(|why| (why, guard::give_back_bytes(&vm.status)));
            let broken = || vm.broken_since(check_after, self.config.tolerance, now);
            if let Some((why, wanted_bytes)) = shortage.or_else(broken) {
                short.push(ShortVm {
                    vm: name.clone(),
                    why,
                    wanted_bytes,
                });
            }
        }
        if short.is_empty() {
            return;
        }
        // All at once: a guest that always reports to be short must not stand before the others.
        let reasons = short
            .iter()
            .map(|short| format!("{}: {}", short.vm, short.why));
        let reasons = reasons.collect::<Vec<_>>().join("; ");
        // Also if it gets nothing: what it has is too little.
        for short in &short {
            if let Some(vm) = self.vms.get_mut(&short.vm) {
                vm.spare(self.config.cooldown, now);
            }
        }
        let pending = match self.paused {
            true => None,
            false => self.relief(&short, &reasons),
        };
        let Some(pending) = pending else {
            let why = match self.paused {
                true => "the daemon is paused: nothing is moved",
                false => "no memory is free",
            };
            if self.logged_shortage.is_due(&short, why, now) {
                tracing::warn!("{reasons}, and {why}");
            }
            return;
        };
        for short in &short {
            if let Some(vm) = self.vms.get_mut(&short.vm) {
                // It is judged anew with what it gets.
                vm.unchecked
                    .iter_mut()
                    .for_each(|unchecked| unchecked.since = now);
            }
        }
        self.stop("Guests ran short of memory");
        self.begin(pending, Initiator::Daemon, None, now);
        self.cooldown_until = Some(now + self.config.cooldown);
    }

    /// Whether memory may be moved to or from a VM because guests run short: any that is managed if the daemon acts, else
    /// those that a decision resized.
    fn may_relieve(&self, name: &str, vm: &Vm) -> bool {
        vm.settings().managed
            && (self.config.mode == Mode::Act || self.history.was_resized(name, vm.found.process()))
    }

    /// A move that gives VMs memory: of their own caches, else free memory, else of VMs above their baselines.
    fn relief(&self, short: &[ShortVm], reasons: &str) -> Option<PendingMove> {
        let mut free = self.unreserved_bytes();
        let above = |(name, vm): (&String, &Vm)| {
            let settings = vm.settings();
            let has = vm.status.holding();
            let kept = settings.baseline_bytes.max(settings.min_bytes);
            let own = has.direct_bytes.saturating_sub(vm.status.direct.min_bytes);
            let above = has.bytes().saturating_sub(kept).min(own);
            let may_give = self.may_relieve(name, vm) && vm.is_resizable();
            (may_give && above >= SAME_BYTES).then(|| (name.clone(), has, above))
        };
        // Who is short itself gives nothing.
        let is_short = |name: &String| short.iter().any(|one| one.vm == *name);
        let givers = self.vms.iter().filter(|(name, _)| !is_short(name));
        let mut givers: Vec<_> = givers.filter_map(above).collect();
        let mut moves = Vec::new();
        for ShortVm {
            vm: name,
            wanted_bytes,
            ..
        } in short
        {
            let Some(vm) = self.vms.get(name) else {
                continue;
            };
            let from = vm.status.holding();
            let whole = vm.whole_bytes().min(vm.own_most_bytes());
            let missing = whole.saturating_sub(from.direct_bytes);
            let wanted = (*wanted_bytes).min(missing);
            let of_cache = from
                .cache_bytes
                .saturating_sub(CACHE_LEAST_BYTES)
                .min(wanted);
            let of_free = (wanted - of_cache).min(free);
            free -= of_free;
            let mut given = of_cache + of_free;
            for (_, _, above) in &mut givers {
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
            if above > left {
                let to = Holding {
                    direct_bytes: has.direct_bytes - (above - left),
                    ..has
                };
                moves.push((name, has, to));
            }
        }
        let reason = format!("Guests get memory back. {reasons}.");
        Some(PendingMove::new(Kind::GiveBack, moves, reason))
    }
}

/// Whether a VM has less than its baseline, by a balloon that can return it.
fn is_squeezed(vm: &Vm) -> bool {
    let has = vm.status.direct.actual_bytes;
    vm.is_known()
        && vm.can_grow()
        && has.saturating_add(SAME_BYTES) < vm.whole_bytes().min(vm.own_most_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_that_lasts_is_logged_once_a_minute() {
        let short = |names: &[&str], available: u64| -> Vec<ShortVm> {
            let vm = |name: &&str| ShortVm {
                vm: (*name).to_owned(),
                why: format!("only {available} MiB are available in its guest"),
                wanted_bytes: 1,
            };
            names.iter().map(vm).collect()
        };
        let (mut logged, begin) = (LoggedShortage::default(), Instant::now());
        let mut lines = 0;
        for poll in 0..90 {
            let now = begin + POLL_INTERVAL * poll;
            let due = logged.is_due(&short(&["web"], 5 + u64::from(poll)), "it is paused", now);
            lines += u32::from(due);
        }
        assert_eq!(lines, 3, "in three minutes");
        let now = begin + POLL_INTERVAL * 90 + Duration::from_secs(1);
        assert!(logged.is_due(&short(&["web"], 5), "it is paused", now));
        assert!(logged.is_due(&short(&["web", "mail"], 5), "it is paused", now));
        assert!(logged.is_due(&short(&["web", "mail"], 5), "no memory is free", now));
        assert!(!logged.is_due(&short(&["web", "mail"], 4), "no memory is free", now));
    }
}
