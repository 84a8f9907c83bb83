//! The first part of a turn: the running VMs, and how much memory each of them and the page store hold.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use plimsoll_output::exit::with_causes;

use super::{SAME_BYTES, STORE, Stage, Turns};
use crate::history::ResizeMark;
use crate::host::{DiscoveredVm, Host};
use crate::polls::{self, BEGIN_MAX};
use crate::vm::Vm;

/// Time within which polls are started of VMs that are new, or did not answer quickly the last time.
const SLOW_POLLS_BEGIN_MAX: Duration = Duration::from_millis(200);
/// The same for VMs that answered quickly the last time, of which all may fall silent at once.
const QUICK_POLLS_BEGIN_MAX: Duration = Duration::from_millis(300);

impl<H: Host> Turns<H> {
    /// Finds VMs that have started or ended since the last time.
    pub(super) fn discover(&mut self) {
        let (found, warnings) = self.host.vms();
        self.warnings.extend(warnings);
        let gone: Vec<String> = self
            .vms
            .iter()
            .filter(|(name, vm)| {
                !found
                    .iter()
                    .any(|found| found.vm == **name && found.process() == vm.found.process())
            })
            .map(|(name, _)| name.clone())
            .collect();
        let leaving = self.vms.iter().filter(|(name, _)| gone.contains(name));
        self.keep_last_curves(leaving);
        for name in gone {
            tracing::info!(vm = name, "the VM has ended");
            if let Some(vm) = self.vms.remove(&name).filter(|vm| vm.is_counted) {
                self.host_relief.vm_ended(vm.size_bytes());
            }
            // Another VM of its name neither takes part in its move nor is judged by what it was promised.
            if let Some(active) = &mut self.active {
                active.promises.retain(|promise| promise.vm != name);
                if let Stage::Moving(under_way) = &mut active.stage {
                    under_way.ended(&name);
                }
            }
        }
        for found in found {
            if let Some(vm) = self.vms.get_mut(&found.vm) {
                vm.found.backends = found.backends;
                vm.found.held = found.held;
                vm.found.receives = found.receives;
                continue;
            }
            self.add_vm(found);
        }
    }

    /// Marks VMs that are migrated to another process of this host, as to run a newer QEMU. Their memory counts once: that
    /// of the source until the target runs. A VM that comes from another host counts from its start.
    pub(super) fn count_copies_once(&mut self) {
        let (mut processes, mut receiving) = (BTreeMap::<String, usize>::new(), BTreeSet::new());
        for vm in self.vms.values() {
            let Some(uuid) = &vm.found.uuid else {
                continue;
            };
            *processes.entry(uuid.clone()).or_default() += 1;
            if vm.found.receives {
                receiving.insert(uuid.clone());
            }
        }
        let is_twin = |uuid: &&String| processes[*uuid] > 1;
        let is_copy = |vm: &Vm| {
            let uuid = vm.found.uuid.as_ref().filter(is_twin);
            uuid.is_some_and(|uuid| match receiving.contains(uuid) {
                true => vm.found.receives,
                false => vm.is_migrated(),
            })
        };
        let copies = self.vms.values().filter(|vm| is_copy(vm));
        let copied: BTreeSet<_> = copies.filter_map(|vm| vm.found.uuid.clone()).collect();
        for vm in self.vms.values_mut() {
            let is_counted = !is_copy(vm);
            let before = std::mem::replace(&mut vm.is_counted, is_counted);
            let uuid = vm.found.uuid.as_ref();
            vm.is_copied = uuid.is_some_and(|uuid| copied.contains(uuid));
            match (before, is_counted) {
                (false, true) => self.host_relief.vm_started(vm.size_bytes()),
                (true, false) => self.host_relief.vm_ended(vm.size_bytes()),
                _ => {}
            }
        }
    }

    /// The VMs whose memory counts.
    pub(super) fn counted_vms(&self) -> impl Iterator<Item = &Vm> {
        self.vms.values().filter(|vm| vm.is_counted)
    }

    pub(super) fn add_vm(&mut self, found: DiscoveredVm) {
        let rule = self.config.settings_for(&found.vm, found.uuid.as_deref());
        // A process may claim the UUID of a VM that runs.
        let uuid = found.uuid.as_deref();
        let is_taken = |vm: &Vm| uuid.is_some() && vm.found.uuid.as_deref() == uuid;
        let uuid = uuid.filter(|_| !self.vms.values().any(is_taken));
        self.history.identify(&found.vm, uuid);
        let change = self.history.settings(&found.vm);
        let first = self.history.baseline(&found.vm);
        let opened = self.host.open(&found, &rule, &self.config);
        tracing::info!(vm = found.vm, pid = found.pid, "a VM was found");
        let name = found.vm.clone();
        let mut vm = Vm::new(found, opened, rule, change, first);
        vm.followed_ram_bytes = self.history.ram(&name);
        vm.earlier_cache_bytes = self.history.cache(&name).unwrap_or(0);
        let balloon = self.history.balloon(&name, vm.found.process());
        vm.actuator.resume(balloon);
        self.vms.insert(name, vm);
    }

    /// Recognises VMs that continue in another process, after they were saved or migrated, with the size to which a decision brought them. One
    /// that began anew is not asked again, whatever size it gets.
    pub(super) fn recognise_restored(&mut self) {
        for (name, vm) in self.vms.iter().filter(|(_, vm)| vm.is_known()) {
            let process = vm.found.process();
            if !self.history.may_continue(name, process) {
                continue;
            }
            let is_small = vm.size_bytes() + SAME_BYTES < vm.first_bytes;
            let is_restored = vm.first_is_kept && is_small && !vm.is_driverless();
            if is_restored {
                let mark = ResizeMark {
                    process: Some(process),
                    ..self.history.mark(name)
                };
                let _ = self.history.put_mark(name, mark);
            } else if !vm.found.receives {
                let _ = self.history.put_began_anew(name, process);
            }
        }
    }

    /// Stores what a later daemon needs to go on with balloons.
    pub(super) fn keep_balloons(&self) {
        // Of others nothing is stored.
        for (name, vm) in self.vms.iter().filter(|(_, vm)| vm.first_is_kept) {
            let (process, record) = (vm.found.process(), vm.actuator.record());
            if record != self.history.balloon(name, process) {
                let _ = self.history.put_balloon(name, process, record);
            }
        }
    }

    pub(super) fn read_store(&mut self) {
        match self.host.store() {
            Some(Ok(bytes)) => {
                self.store_bytes = bytes;
                if self.store_first_bytes.is_none() {
                    // An earlier daemon may have grown it already.
                    let first = self.history.baseline(STORE).unwrap_or(bytes);
                    let _ = self.history.put_baseline(STORE, first);
                    self.store_first_bytes = Some(first);
                }
            }
            Some(Err(error)) => {
                if self.store_first_bytes.is_none() {
                    // It may have all that an earlier daemon gave it.
                    self.store_first_bytes = self.history.baseline(STORE);
                    let lent = self.history.cache(STORE).or(self.store_first_bytes);
                    self.store_bytes = lent.unwrap_or(0);
                }
                self.warnings
                    .push(format!("the page store: {}", with_causes(&error)));
            }
            None => self.store_bytes = 0,
        }
    }
}

/// Polls VMs concurrently: first those that answered quickly the last time, then the others (including new VMs) in the
/// order of their last poll, oldest first, until the time for starting polls is over. The remaining VMs keep their
/// status until the next turn, so that monitors that never answer lengthen a turn by one time limit, however many they
/// are.
pub(super) fn poll_all<'a>(vms: impl Iterator<Item = &'a mut Vm>) {
    let (quick, slow): (Vec<_>, Vec<_>) = vms.partition(|vm| vm.answers_quickly());
    if poll_for(quick, QUICK_POLLS_BEGIN_MAX) {
        poll_for(slow, SLOW_POLLS_BEGIN_MAX);
    }
}

/// Polls all of these VMs, concurrently.
pub(super) fn poll_now<'a>(vms: impl Iterator<Item = &'a mut Vm>) {
    poll_for(vms.collect(), BEGIN_MAX);
}

/// Polls VMs concurrently, the one that was not polled for longest first; no poll is started after `time`, and the VMs that are left
/// come first in the next turn. Returns whether none is.
fn poll_for(mut vms: Vec<&mut Vm>, time: Duration) -> bool {
    vms.sort_by_key(|vm| vm.polled_at());
    polls::poll(vms, time, |vm| vm.poll())
}
