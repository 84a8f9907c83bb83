//! The first part of a turn: which VMs run, and how much memory each of them and the page store hold.

use super::{STORE, Turns};
use crate::host::{DiscoveredVm, Host};
use crate::moves::{self};
use crate::vm::Vm;

/// VMs inspected at a time: one whose monitor hangs delays few others.
const POLLS_AT_ONCE: usize = 16;

impl<H: Host> Turns<H> {
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
        for name in gone {
            tracing::info!(vm = name, "the VM has ended");
            self.vms.remove(&name);
        }
        for found in found {
            if let Some(vm) = self.vms.get_mut(&found.vm) {
                vm.found.backends = found.backends;
                continue;
            }
            self.add_vm(found);
        }
    }

    pub(super) fn add_vm(&mut self, found: DiscoveredVm) {
        let rule = self.config.settings_for(&found.vm, found.uuid.as_deref());
        let change = self.history.settings(&found.vm);
        let first = self.history.baseline(&found.vm);
        let opened = self.host.open(&found, &rule, &self.config);
        tracing::info!(vm = found.vm, pid = found.pid, "a VM was found");
        let name = found.vm.clone();
        let vm = Vm::new(found, opened, rule, change, first);
        self.vms.insert(name, vm);
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
            Some(Err(error)) => self
                .warnings
                .push(format!("the page store: {}", moves::chain(&error))),
            None => self.store_bytes = 0,
        }
    }
}

/// Looks at VMs, several at once.
pub(super) fn poll_all<'a>(vms: impl Iterator<Item = &'a mut Vm>) {
    let mut vms: Vec<_> = vms.collect();
    let each = vms.len().div_ceil(POLLS_AT_ONCE).max(1);
    std::thread::scope(|scope| {
        for some in vms.chunks_mut(each) {
            scope.spawn(|| {
                for vm in some {
                    vm.status = vm.actuator.poll();
                }
            });
        }
    });
}
