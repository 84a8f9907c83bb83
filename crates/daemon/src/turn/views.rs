//! Views of the turn loop for clients: the host, its VMs and their curves.

use std::collections::BTreeMap;
use std::sync::Arc;

use plimsoll_actuator::{Absence, Progress};
use plimsoll_flow::PageSize;
use plimsoll_policy::{PredictionUnit, Rules, promise_size, relative};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::curve_json::{CurveJson, MissesJson};
use plimsoll_protocol::vm::{
    BalloonState, BalloonView, CacheView, HeatmapView, HostMemory, HostView, Relative, VmStatus,
    VmSummary, WorkingSetView,
};

use super::Turns;
use crate::clock::Time;
use crate::demand::{PROMISES, demands};
use crate::host::Host;
use crate::shared::Snapshot;
use crate::vm::{Vm, bytes, pages, why_unpredicted};

/// Maximum number of VMs whose warnings of one kind are shown; the others are counted.
const WARNED: usize = 5;

/// Warnings of VMs, each with the VM's name. Those that differ only in the VM, or after their first colon, are of one kind.
fn folded<'a>(of_vms: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<String> {
    let (mut shown, mut counts) = (Vec::new(), BTreeMap::<String, usize>::new());
    for (name, warning) in of_vms {
        let kind = warning.replace(&format!("VM {name}"), "the VM");
        let kind = kind
            .split_once(": ")
            .map_or(kind.as_str(), |(kind, _)| kind);
        let count = counts.entry(kind.to_owned()).or_default();
        *count += 1;
        if *count <= WARNED {
            shown.push(format!("{name}: {warning}"));
        }
    }
    let more = counts.iter().filter(|(_, count)| **count > WARNED);
    shown.extend(more.map(|(kind, count)| format!("{} more VMs: {kind}", count - WARNED)));
    shown
}

impl<H: Host> Turns<H> {
    pub(super) fn relative_now(&self, vm: &Vm, rules: &Rules) -> Option<Relative> {
        let known = vm.seen.known.as_ref()?;
        let baseline = pages(vm.settings().baseline_bytes);
        let size = pages(vm.size_bytes());
        relative(&known.curve, baseline, size, rules)
    }

    pub(super) fn summary(&self, name: &str, vm: &Vm, now: Time) -> VmSummary {
        let rules = self.rules();
        let settings = vm.settings();
        let holding = vm.status.holding();
        let relative = self.relative_now(vm, &rules);
        let promise = vm.seen.known.as_ref().and_then(|known| {
            let baseline = pages(settings.baseline_bytes);
            let least = promise_size(&known.curve, baseline, &vm.bound(), &rules)?;
            Some(bytes(least).max(settings.min_bytes).max(vm.kept_bytes()))
        });
        let reclaimable = promise.map(|promise| holding.bytes().saturating_sub(promise));
        let (status, why) = self.status(vm, relative, reclaimable);
        VmSummary {
            vm: name.to_owned(),
            pid: vm.found.pid,
            uuid: vm.found.uuid.clone(),
            accelerator: vm.found.accelerator,
            libvirt: vm.found.libvirt,
            status,
            why,
            stopped: vm.status.stopped.clone(),
            ram_bytes: vm.ram_bytes(),
            direct_bytes: holding.direct_bytes,
            cache_bytes: holding.cache_bytes,
            size_bytes: holding.bytes(),
            target_bytes: vm.target_bytes,
            settings,
            working_set: vm.seen.working_set.map(|set| WorkingSetView {
                bytes: bytes(set.size),
                bound: set.bound,
            }),
            misses: (vm.seen.known.as_ref())
                .and_then(|known| known.curve.misses_per_second(pages(holding.bytes())))
                .map(MissesJson::from),
            vcpu_seconds_per_second: vm.seen.known.as_ref().and_then(|known| known.curve.vcpus()),
            miss_cost: vm.miss_cost,
            memory_stall_ratio: vm.stalled(),
            relative,
            reclaimable_bytes: reclaimable,
            promise_bytes: promise,
            kept_bytes: vm.kept_bytes(),
            curve_source: vm.seen.known.as_ref().map(|known| known.source),
            references: (vm.seen.known.as_ref()).map_or(0, |known| known.curve.references()),
            curve_unix_ms: (vm.seen.known.as_ref()).map(|known| now.unix_ms_at(known.since_boot)),
            trace: vm.seen.trace_view(now),
            balloon: balloon_view(vm),
            cache: cache_view(vm),
            backends: vm.found.backends.clone(),
            refused_claims: vm.refused_claims,
        }
    }

    /// The smallest sizes with which `vm` keeps each of the promises that all VMs are compared by, by the upper limit of its
    /// curve's band; neither below its minimum nor below what its guest can do with now.
    fn demand_bytes(&self, vm: &Vm) -> Option<[u64; PROMISES.len()]> {
        let known = vm.seen.known.as_ref()?;
        let settings = vm.settings();
        let (baseline, rules) = (pages(settings.baseline_bytes), self.rules());
        let sizes = demands(&known.curve, baseline, &rules);
        let floor = settings.min_bytes.max(vm.kept_bytes());
        Some(sizes.map(|size| bytes(size).max(floor)))
    }

    pub(super) fn status(
        &self,
        vm: &Vm,
        relative: Option<Relative>,
        reclaimable: Option<u64>,
    ) -> (VmStatus, String) {
        if let Some(why) = &vm.broken {
            return (VmStatus::Violating, why.clone());
        }
        let size = pages(vm.size_bytes());
        let known = vm.seen.known.as_ref();
        let misses = known.and_then(|known| known.curve.misses_per_second(size));
        let predictions = vm.bound().predictions(relative, misses);
        let (Some(predictions), Some(reclaimable)) = (predictions, reclaimable) else {
            let why = match known {
                Some(known) => Some(why_unpredicted(&known.curve, size).to_owned()),
                None => vm.warnings.first().cloned(),
            };
            let why = why.unwrap_or_else(|| "its curve is not available yet".to_owned());
            return (VmStatus::Unknown, why);
        };
        if let Some(above) = predictions.iter().find(|prediction| {
            let scale = if prediction.unit == PredictionUnit::PerSecond {
                prediction.limit
            } else {
                1.0
            };
            prediction.expected > prediction.limit + scale * self.config.tolerance
        }) {
            let unit = above.unit;
            let why = format!(
                "predicted to miss {}, limit {}",
                unit.misses(above.expected),
                unit.text(above.limit)
            );
            (VmStatus::Violating, why)
        } else if let Some(above) = predictions
            .iter()
            .find(|prediction| prediction.margin() < 0.0)
        {
            let unit = above.unit;
            let why = format!(
                "predicted to miss {} (up to {}), limit {}: not certain",
                unit.misses(above.expected),
                unit.text(above.high),
                unit.text(above.limit)
            );
            (VmStatus::Tight, why)
        } else if reclaimable < self.config.unit_bytes {
            let why = match &vm.status.need {
                None if vm.is_resizable() => {
                    "it is within its limit; what it could give is not known, because its guest reports no statistics"
                }
                _ => "it is within its limit, and can give nothing",
            };
            (VmStatus::Tight, why.to_owned())
        } else {
            (
                VmStatus::Safe,
                format!(
                    "it stays within its limit even with {} MiB less",
                    reclaimable >> 20
                ),
            )
        }
    }

    pub(super) fn snapshot(&mut self) -> Snapshot {
        // One for all, or a step in between would date a curve wrongly.
        let now = self.shared.clock.now();
        let vms: Vec<_> = self
            .vms
            .iter()
            .map(|(name, vm)| self.summary(name, vm, now))
            .collect();
        let (total, available) = self.host_ram;
        let sum = |bytes: fn(&VmSummary) -> u64| vms.iter().map(bytes).fold(0, u64::saturating_add);
        let (direct, cache) = (sum(|vm| vm.direct_bytes), sum(|vm| vm.cache_bytes));
        let divided = self.divided_bytes();
        let reclaimable = vms.iter().filter(|vm| vm.settings.managed);
        let mut warnings = self.warnings.clone();
        warnings.extend(self.infeasible.clone());
        let of_vms = self.vms.iter().flat_map(|(name, vm)| {
            let its = vm.warnings.iter();
            its.map(move |warning| (name.as_str(), warning.as_str()))
        });
        warnings.extend(folded(of_vms));
        let held = self.held_bytes();
        if held > divided {
            warnings.push(format!(
                "the VMs have {} MiB, {} MiB more than the total to allocate",
                held >> 20,
                (held - divided) >> 20
            ));
        }
        let memory = HostMemory {
            total_bytes: total,
            divided_bytes: divided,
            vms_direct_bytes: direct,
            vms_cache_bytes: cache,
            store_bytes: self.store_bytes,
            spare_bytes: divided
                .saturating_sub(direct)
                .saturating_sub(cache)
                .saturating_sub(self.store_bytes),
            reclaimable_bytes: reclaimable
                .filter_map(|vm| vm.reclaimable_bytes)
                .fold(0, u64::saturating_add),
            available_bytes: available,
        };
        let curves = self.vms.iter();
        let curves = curves.filter_map(|(name, vm)| Some((name.clone(), curve_json(name, vm)?)));
        let demands = self.vms.iter();
        let demands = demands.filter_map(|(name, vm)| Some((name.clone(), self.demand_bytes(vm)?)));
        let heat = self.vms.iter().filter(|(_, vm)| !vm.seen.heat.is_empty());
        let heat = heat.map(|(name, vm)| {
            let view = HeatmapView {
                schema: SCHEMA,
                vm: name.clone(),
                cell_bytes: vm.seen.heat_cell_bytes,
                rows: vm.seen.heat.iter().cloned().collect(),
            };
            (name.clone(), Arc::new(view))
        });
        let groups = self.groups.groups.iter();
        let group_curves =
            groups.filter_map(|group| Some((group.path().to_owned(), group.curve_json()?)));
        Snapshot {
            curves: curves.collect(),
            group_curves: group_curves.collect(),
            demands: demands.collect(),
            heat: heat.collect(),
            inputs: self.inputs.clone(),
            proposal: self.proposal.as_ref().map(|(decision, _)| decision.clone()),
            host: HostView {
                schema: SCHEMA,
                host: self.config.host_name.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                mode: self.config.mode,
                paused: self.paused,
                phase: self.phase,
                since_unix_ms: self.since_unix_ms,
                now_unix_ms: now.unix_ms,
                turn: self.turn,
                turn_interval_ms: u64::try_from(self.config.turn_interval.as_millis())
                    .unwrap_or(u64::MAX),
                turn_took_ms: self.turn_took.as_secs_f64() * 1e3,
                memory,
                vms,
                groups: self.groups_view(now),
                moving: self.active.as_ref().map(|active| active.decision.id),
                warnings,
                history_bytes: self.history.bytes(),
                daemon_resident_bytes: resident_bytes(),
            },
        }
    }
}

/// A VM's curve as displayed.
pub(super) fn curve_json(name: &str, vm: &Vm) -> Option<CurveJson> {
    let known = vm.seen.known.as_ref()?;
    let baseline = Some(pages(vm.settings().baseline_bytes));
    Some(CurveJson::new(
        name,
        PageSize::FOUR_KIB,
        baseline,
        &known.shown,
    ))
}

/// Resident memory of this process; 0 if unavailable.
pub(super) fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_ascii_whitespace().nth(1);
    let pages: u64 = pages
        .and_then(|pages| pages.parse().ok())
        .unwrap_or_default();
    pages.saturating_mul(rustix::param::page_size() as u64)
}

/// The view of a VM's balloon; `None` if it has none.
fn balloon_view(vm: &Vm) -> Option<BalloonView> {
    let part = &vm.status.direct;
    let state = match part.progress {
        Progress::Absent(Absence::NoDevice) => return None,
        Progress::Absent(_) => BalloonState::Absent,
        Progress::NoTarget => BalloonState::Idle,
        Progress::Reached => BalloonState::Reached,
        Progress::Following { .. } => BalloonState::Following,
        Progress::Late { .. } => BalloonState::Late,
        Progress::Stuck { .. } => BalloonState::Stuck,
        _ => BalloonState::Unknown,
    };
    let guest = vm.last_guest();
    Some(BalloonView {
        actual_bytes: part.actual_bytes,
        target_bytes: part.target_bytes,
        state,
        guest_available_bytes: guest.and_then(|(guest, _)| guest.available_bytes),
        statistics_age_ms: guest.map(|(_, age)| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
    })
}

/// The view of the cache under a VM's disk.
fn cache_view(vm: &Vm) -> Option<CacheView> {
    let cache = vm.status.cache.as_ref()?;
    let disk = vm.last_disk.as_ref()?;
    Some(CacheView {
        capacity_bytes: cache.actual_bytes,
        used_bytes: disk.cached_pages.saturating_mul(PageSize::FOUR_KIB.bytes()),
        read_blocks: disk.read_blocks,
        hits: disk.hits,
        disabled: disk.disabled.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::folded;

    #[test]
    fn warnings_of_one_kind_are_shown_of_five_vms_and_counted_of_the_others() {
        let names: Vec<String> = (100..300).map(|number| format!("vm{number}")).collect();
        let silent = |name: &String| {
            format!(
                "the balloon of VM {name} cannot be queried; the last known value is kept: {name}.sock: no answer"
            )
        };
        let mut warnings: Vec<_> = names.iter().map(|name| (name, silent(name))).collect();
        warnings.push((&names[7], "its RAM is locked".to_owned()));
        let shown = folded(
            warnings
                .iter()
                .map(|(name, warning)| (name.as_str(), warning.as_str())),
        );
        assert_eq!(shown.len(), 7, "{shown:#?}");
        assert_eq!(shown[4], format!("vm104: {}", silent(&names[4])));
        assert_eq!(shown[5], "vm107: its RAM is locked");
        let rest =
            "195 more VMs: the balloon of the VM cannot be queried; the last known value is kept";
        assert_eq!(shown[6], rest);
    }
}
