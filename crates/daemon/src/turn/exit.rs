//! The end of the daemon: VMs that it resized get back what they had when they were first found.

use std::time::{Duration, Instant};

use plimsoll_actuator::Holding;
use plimsoll_protocol::decision::{Initiator, Kind};
use plimsoll_vm::ProcessId;

use super::discover::poll_all;
use super::{CACHE_LEAST_BYTES, Move, PendingMove, SAME_BYTES, STORE, Turns};
use crate::host::Host;
use crate::moves::{GRANT_MIN_BYTES, is_fresh};
use crate::vm::Vm;

/// Time after which nothing more is begun: systemd waits for 60 s, and monitors or a libvirt that hang take some of it.
const RETURN_MAX: Duration = Duration::from_secs(20);
/// Time within which a process that has just begun finds VMs, and their monitors answer it: another client may hold one.
const DISCOVERY_MAX: Duration = Duration::from_secs(3);
const ANSWER_MAX: Duration = Duration::from_secs(8);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Pause before what a VM refused is tried again: its monitor or libvirt may be back then.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// What VMs and the page store may hold while VMs get back what they had.
#[derive(Debug, Clone, Copy)]
pub(super) struct Returnable {
    /// What they held at the beginning.
    held_bytes: u64,
    /// What they may hold: that, and what the host had available above the headroom, at the beginning or later. What VMs
    /// got since does not count again while they do not use it.
    pub bytes: u64,
}

impl<H: Host> Turns<H> {
    /// As the daemon's end does it, for VMs that an earlier daemon left resized: finds them, gives them what they had
    /// and ends. Returns what they lack after that, a sentence for each VM.
    pub fn give_back_and_end(&mut self) -> Vec<String> {
        let begin = Instant::now();
        loop {
            self.discover();
            for (name, vm) in &mut self.vms {
                // Those above what they had give, which needs reports of their guests; in no other VM anything is changed.
                let was_resized = self.history.was_resized(name, vm.found.process());
                let _ = vm.actuator.want_statistics(was_resized);
            }
            poll_all(self.vms.values_mut());
            self.count_copies_once();
            self.recognise_restored();
            let all_answer =
                self.vms.values().all(Vm::is_known) && self.undiscovered().next().is_none();
            let longest = match self.vms.is_empty() {
                true => DISCOVERY_MAX,
                false if all_answer => Duration::ZERO,
                false => ANSWER_MAX,
            };
            if begin.elapsed() >= longest {
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let lacks = self.return_memory();
        self.want_statistics(false);
        let _ = self.history.flush();
        lacks
    }

    /// Gives the VMs that were resized what they had; waits for them, at most 20 s. Returns what they lack then.
    pub(super) fn return_memory(&mut self) -> Vec<String> {
        let until = Instant::now() + RETURN_MAX;
        self.begin_return(Instant::now());
        loop {
            while self.goes_on_returning(Instant::now()) && Instant::now() < until {
                std::thread::sleep(POLL_INTERVAL);
            }
            if Instant::now() + RETRY_INTERVAL >= until || !self.vms_lack_memory() {
                break;
            }
            std::thread::sleep(RETRY_INTERVAL);
            self.return_to_vms(Instant::now());
        }
        self.end_return(Instant::now());
        if let Some(first) = self.lent_store() {
            tracing::warn!(
                "the page store has {} MiB, {} more than before it got memory of VMs, which these lack",
                self.store_bytes >> 20,
                (self.store_bytes - first) >> 20
            );
        }
        let lacks = self.lacks();
        for lack in &lacks {
            tracing::warn!("{lack}");
        }
        lacks
    }

    /// What VMs that were resized, and are managed, lack of what they had.
    pub fn lacks(&self) -> Vec<String> {
        let resized = self
            .vms
            .iter()
            .filter(|(name, vm)| self.was_resized(name, vm) && vm.settings().managed);
        let why_withheld = self.why_withheld();
        let lacks = resized.filter_map(|(name, vm)| {
            if !vm.is_known() {
                return Some(format!(
                    "{name}: its monitor, or libvirt, does not answer: it keeps what it has, \
                     which may be less than it had"
                ));
            }
            let (has, had) = (vm.size_bytes(), vm.first_bytes);
            let lacks_bytes = had.saturating_sub(has);
            let direct = &vm.status.direct;
            let later = match &why_withheld {
                _ if direct.target_bytes > Some(direct.actual_bytes) => {
                    ", and gets them when its balloon follows".to_owned()
                }
                Some(why) => format!(", which are {why}"),
                None => String::new(),
            };
            (vm.first_is_kept && lacks_bytes >= SAME_BYTES).then(|| {
                format!(
                    "{name}: it lacks {} MiB of the {} MiB that it had{later}",
                    lacks_bytes >> 20,
                    had >> 20
                )
            })
        });
        let undiscovered = self.undiscovered().map(|(id, process)| {
            format!(
                "{id}: its process {} cannot be inspected: it keeps what it has, which may be less than it had",
                process.pid
            )
        });
        lacks.chain(undiscovered).collect()
    }

    /// Processes of VMs that were resized, and are managed, that run and were not discovered, by the VMs' UUIDs or names.
    fn undiscovered(&self) -> impl Iterator<Item = (String, ProcessId)> {
        let is_known = |process| self.vms.values().any(|vm| vm.found.process() == process);
        let is_managed = |id: &str| {
            let rule = self.config.settings_for(id, Some(id));
            let managed = self.history.settings(id).managed.or(rule.managed);
            managed.unwrap_or(true)
        };
        let resized = self.history.resized().into_iter();
        resized.filter(move |(id, process)| {
            !is_known(*process) && process.is_there() && is_managed(id)
        })
    }

    /// Whether memory was moved, by this daemon or by an earlier one, so that VMs may have less than they had.
    pub fn has_resized(&self) -> bool {
        let mut vms = self.vms.iter();
        self.has_moved || vms.any(|(name, vm)| self.was_resized(name, vm))
    }

    /// Whether a decision, of whatever daemon, resized this process of a VM. An earlier VM of its name is not the one that has its size now.
    pub(super) fn was_resized(&self, name: &str, vm: &Vm) -> bool {
        self.history.was_resized(name, vm.found.process())
    }

    /// Ends giving memory back. A VM that is paused, or slow, keeps its target, and so gets its memory when it follows: no daemon will
    /// give it to another.
    pub fn end_return(&mut self, now: Instant) {
        if self.active.is_none() && self.vms_lack_memory() {
            // Its balloon counted as stuck, so its target was taken back.
            self.return_to_vms(now);
        }
        self.stop_by(
            Move::leave,
            "The time for giving memory back was over; VMs that have not followed get the rest when they do.",
        );
    }

    /// Whether the size of a VM that was resized is unknown, because its monitor or libvirt has never answered.
    fn is_any_unknown(&self) -> bool {
        let mut vms = self.vms.iter();
        vms.any(|(name, vm)| !vm.is_known() && self.was_resized(name, vm))
    }

    /// Whether a VM that was resized has less than it had, as far as that is known.
    fn vms_lack_memory(&self) -> bool {
        let lacks =
            |(_, from, to): &(String, Holding, Holding)| from.direct_bytes < to.direct_bytes;
        self.is_any_unknown() || self.resized().iter().any(lacks)
    }

    /// Begins the move by which VMs get back what they had. VMs above that give first: memory is never given twice.
    ///
    /// What the page store was lent is taken from it at the same time; VMs get that when it has become free.
    pub fn begin_return(&mut self, now: Instant) {
        self.read_store();
        if let Some(first) = self.lent_store() {
            self.resize_store(first);
        }
        self.returnable = None;
        self.return_to_vms(now);
    }

    /// Begins that move, or another one for what VMs still lack if it can move anything.
    fn return_to_vms(&mut self, now: Instant) {
        poll_all(self.vms.values_mut());
        let is_first = self.returnable.is_none();
        self.follow_spare();
        let mut moves = self.resized();
        // Each request to one that does not answer would be waited for.
        moves.retain(|(name, ..)| is_fresh(&self.vms[name].status.direct));
        if moves.is_empty() || (!is_first && !self.can_move_any(&moves)) {
            return;
        }
        let reason =
            "The daemon ends, so the VMs get back what they had when they were first found.";
        let pending = PendingMove::new(Kind::GiveBack, moves, reason);
        self.begin(pending, Initiator::Daemon, None, now);
    }

    /// Updates what VMs may hold by what the host has available now.
    fn follow_spare(&mut self) {
        self.host_ram = self.host.ram();
        let (total, available) = self.host_ram;
        let spare = available.saturating_sub(self.config.headroom_of(total));
        let held_bytes = self.held_bytes();
        let returnable = self.returnable.get_or_insert(Returnable {
            held_bytes,
            bytes: held_bytes,
        });
        let bytes = returnable.held_bytes.saturating_add(spare);
        returnable.bytes = returnable.bytes.max(bytes);
    }

    /// Whether one of these moves frees memory, or gets some that is free.
    fn can_move_any(&self, moves: &[(String, Holding, Holding)]) -> bool {
        let free = self.unreserved_bytes();
        moves.iter().any(|(_, from, to)| {
            let frees = to.direct_bytes < from.direct_bytes || to.cache_bytes < from.cache_bytes;
            let lacks = to.direct_bytes.saturating_sub(from.direct_bytes);
            frees || free >= lacks.min(GRANT_MIN_BYTES)
        })
    }

    /// Advances that move; whether it goes on.
    pub fn goes_on_returning(&mut self, now: Instant) -> bool {
        let store_had = self.store_bytes;
        self.read_store();
        if let Some(first) = self.lent_store() {
            // An earlier change may still be in progress.
            let _ = self.host.resize_store(first);
        }
        self.advance(now);
        // A move does not wait for memory that no VM is giving.
        if self.active.is_none() && self.store_bytes < store_had {
            self.return_to_vms(now);
        }
        self.active.is_some() || self.lent_store().is_some()
    }

    /// The page store's initial capacity, if it has more because a daemon gave it memory of VMs. More than that was set by
    /// somebody else.
    fn lent_store(&self) -> Option<u64> {
        let lent = self.history.cache(STORE)?;
        let first = self.store_first_bytes?;
        (first < self.store_bytes && self.store_bytes <= lent).then_some(first)
    }

    /// Warns of VMs that a decision shrunk and that may not be resized since: nobody returns what they had.
    pub(super) fn warn_of_unreturned(&mut self) {
        for (name, vm) in &mut self.vms {
            let lacks = vm.size_bytes() + SAME_BYTES < vm.first_bytes;
            if lacks && !vm.settings().managed && self.history.was_resized(name, vm.found.process())
            {
                vm.warnings.push(format!(
                    "it is not managed, so it does not get back what a decision took: it has {} MiB of {} MiB",
                    vm.size_bytes() >> 20,
                    vm.first_bytes >> 20
                ));
            }
        }
    }

    /// What a VM has above what it had when it was first found, and no decision gave it.
    pub(super) fn kept_above_bytes(&self, name: &str, vm: &Vm) -> u64 {
        let above_bytes = vm.size_bytes().saturating_sub(vm.first_bytes);
        let mark = self.history.mark(name);
        mark.kept_above_bytes(vm.found.process(), above_bytes)
    }

    /// VMs that a decision resized and that do not have what they had: their present and their first holdings. What somebody else
    /// gave a VM above that stays.
    fn resized(&self) -> Vec<(String, Holding, Holding)> {
        let moves = self.vms.iter().filter_map(|(name, vm)| {
            let from = vm.status.holding();
            let own_bytes = vm.first_bytes + self.kept_above_bytes(name, vm);
            let least = from.cache_bytes.min(CACHE_LEAST_BYTES);
            let direct_bytes = own_bytes.saturating_sub(least).min(vm.ram_bytes());
            // Without a cache all of it is the VM's own.
            let direct_bytes = match vm.status.cache {
                Some(_) => direct_bytes,
                None => own_bytes.min(vm.ram_bytes()),
            };
            let to = Holding {
                direct_bytes,
                cache_bytes: own_bytes.saturating_sub(direct_bytes).min(from.cache_bytes),
            };
            let differs = |has: u64, had: u64| has.abs_diff(had) >= SAME_BYTES;
            let is_other = differs(from.direct_bytes, to.direct_bytes)
                || from.cache_bytes > to.cache_bytes.max(CACHE_LEAST_BYTES);
            let follows = match from.direct_bytes < to.direct_bytes {
                true => vm.can_grow(),
                false => vm.is_resizable(),
            };
            let movable = vm.first_is_kept && vm.settings().managed && vm.is_known() && follows;
            (movable && is_other && self.was_resized(name, vm)).then(|| (name.clone(), from, to))
        });
        moves.collect()
    }
}
