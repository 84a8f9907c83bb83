//! Limits of memory of control groups, of one VM or of several together.

use std::collections::BTreeMap;

use super::Turns;
use crate::host::Host;
use crate::vm::{GroupShare, Vm};

impl<H: Host> Turns<H> {
    /// Sets what the limits of its control groups leave each VM.
    ///
    /// Of a limit that several VMs share, each keeps what it may hold, or had when it was found, and what is left is divided evenly: so
    /// they cannot exceed it together, whatever any of them gets. If nobody else is managed and the total to allocate fits
    /// into the limit, the total keeps it for them.
    pub(super) fn share_group_limits(&mut self) {
        let mut groups = BTreeMap::new();
        for (name, vm) in &mut self.vms {
            vm.group_share = None;
            for limit in self.host.memory_limits_of(&vm.found) {
                let (limit_bytes, names) = groups
                    .entry(limit.directory)
                    .or_insert((limit.bytes, Vec::new()));
                // It may be changed meanwhile.
                *limit_bytes = limit.bytes.min(*limit_bytes);
                names.push(name.clone());
            }
        }
        for (limit_bytes, names) in groups.into_values() {
            let sum = |bytes: fn(&Vm) -> u64| {
                let vms = names.iter().filter_map(|name| self.vms.get(name));
                vms.map(bytes).fold(0, u64::saturating_add)
            };
            let left_bytes = limit_bytes.saturating_sub(sum(Vm::qemu_own_bytes));
            let spare_bytes = left_bytes.saturating_sub(sum(entitled_bytes));
            let is_kept_by_total = self
                .total_of(&names)
                .is_some_and(|total| total <= left_bytes);
            for name in &names {
                let Some(vm) = self.vms.get_mut(name) else {
                    continue;
                };
                let part = spare_bytes / names.len() as u64;
                let share_bytes = match is_kept_by_total {
                    true => limit_bytes,
                    false => entitled_bytes(vm) + vm.qemu_own_bytes() + part,
                };
                let share = GroupShare {
                    limit_bytes,
                    share_bytes: share_bytes.min(limit_bytes),
                    vms: names.len(),
                };
                let least = vm.group_share.get_or_insert(share);
                if share.share_bytes < least.share_bytes {
                    *least = share;
                }
            }
        }
    }

    /// The memory that these VMs can have together at most; `None` if memory of others is allocated as well.
    fn total_of(&self, names: &[String]) -> Option<u64> {
        let mut others = self.vms.iter().filter(|(name, _)| !names.contains(name));
        let fixed_bytes = others.try_fold(0_u64, |fixed_bytes, (_, vm)| {
            (!vm.settings().managed).then(|| fixed_bytes.saturating_add(vm.size_bytes()))
        });
        Some(self.total_bytes().saturating_sub(fixed_bytes?))
    }
}

/// What a VM may hold without a further request, or had when it was found, whichever is more.
fn entitled_bytes(vm: &Vm) -> u64 {
    vm.first_bytes.max(vm.reserved_bytes())
}
