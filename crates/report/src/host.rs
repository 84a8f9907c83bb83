//! A host with its VMs and the control groups that are watched.

use std::collections::BTreeMap;

use plimsoll_output::{csv_table, cut_front, duration, printable, table};
use plimsoll_protocol::group::Groups;
use plimsoll_protocol::subject::Entry;
use plimsoll_protocol::vm::{HostMemory, HostView, VmSummary};

use crate::words::{
    NO_VM, known, local_time, maybe_size, misses, name, name_of, percent, ratio, size, working_set,
};

/// Characters of a control group's path that the table shows.
const PATH_CHARACTERS: usize = 60;
/// Number of control groups that are named beside a reason.
const NAMED: usize = 4;

/// The host, its VMs and its control groups as tables with their terms explained.
pub fn text(host: &HostView) -> String {
    let mut text = head(host);
    text.push('\n');
    if host.vms.is_empty() {
        text.push_str(NO_VM);
    } else {
        text.push_str(&vms_text(&host.vms));
        text.push_str(
            "\nsize: memory of its own and cache. uses: its working set. misses: predicted at its size over those at\n\
             its baseline, and the upper confidence limit. gives: what it could give within its limit. cost: share of its\n\
             CPU time that its tracer takes. backends: those that can trace it; `plimsoll doctor VM` shows why others cannot.\n",
        );
    }
    if host.vms.iter().any(VmSummary::is_emulated) {
        text.push_str("tcg: emulated; its times do not carry over to real hardware.\n");
    }
    text.push_str(&groups_text(&host.groups));
    for warning in &host.warnings {
        text.push_str(&format!("warning: {}\n", printable(warning)));
    }
    text
}

/// The host in a few lines.
fn head(host: &HostView) -> String {
    let HostMemory {
        divided_bytes,
        reclaimable_bytes,
        spare_bytes,
        ..
    } = host.memory;
    let paused = if host.paused { ", PAUSED" } else { "" };
    let mut head = format!(
        "host {}: {}{paused}, {}; turn {} of {} at {}\n\
         {} allocated, {} spare; {} could be reclaimed within all limits\n",
        printable(&host.host),
        name_of(host.mode),
        name_of(host.phase),
        host.turn,
        duration(host.turn_interval_ms as f64 / 1000.0),
        local_time(host.now_unix_ms),
        size(divided_bytes),
        size(spare_bytes),
        size(reclaimable_bytes),
    );
    if let Some(decision) = host.moving {
        head.push_str(&format!("decision {decision} is being carried out\n"));
    }
    head
}

fn vms_text(vms: &[VmSummary]) -> String {
    table!(vms, |vm| {
        Left "VM": name(&vm.vm),
        Left "status": status(vm),
        Right "size": size(vm.size_bytes),
        Right "of it cache": (vm.cache.is_some() || vm.cache_bytes > 0).then(|| size(vm.cache_bytes)),
        Right "target": vm.target_bytes.map(size),
        Right "uses": working_set(vm.working_set.as_ref()),
        Right "misses/s": misses(vm.misses.as_ref(), 1.0),
        Right "misses": known(vm.relative, |at| format!("{} ≤ {}", ratio(at.expected), ratio(at.high))),
        Right "gives": maybe_size(vm.reclaimable_bytes),
        Right "cost": vm.trace.as_ref().map(|trace| percent(trace.overhead_ratio)),
        Left "backends": backends(vm),
        Left "traced": Entry::Vm(vm).traced(),
    })
}

/// The control groups, with an account of those that are not watched or not traced.
fn groups_text(groups: &Groups) -> String {
    let mut text = String::new();
    if !groups.watched.is_empty() {
        text.push('\n');
        text.push_str(&table!(&groups.watched, |group| {
            Left "control group": name(&group.group),
            Left "kind": group.kind.to_string(),
            Right "charged": maybe_size(group.charged_bytes),
            Right "limit": group.limit_bytes.map(size),
            Right "uses": working_set(group.working_set.as_ref()),
            Right "cost": group.trace.as_ref().map(|trace| percent(trace.overhead_ratio)),
            Left "traced": Entry::Group(group).traced(),
            Left "path": cut_front(&printable(&group.path), PATH_CHARACTERS),
        }));
        text.push_str(
            "\ncharged: its memory and page cache, with the groups below it. Control groups are only observed: no allocation counts them.\n",
        );
    }
    let mut troubles: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for group in &groups.watched {
        for warning in &group.warnings {
            let names = troubles.entry(warning).or_default();
            names.push(name(&group.group));
        }
    }
    for (warning, names) in troubles {
        let count = names.len() as u64;
        text.push_str(&format!(
            "warning: {}: {}\n",
            some_of(&names, count),
            printable(warning)
        ));
    }
    for left in &groups.left_out {
        text.push_str(&format!(
            "not watched: {}: {}\n",
            some_of(&left.paths, left.count),
            printable(&left.why)
        ));
    }
    text
}

/// The first of `count` names or paths, and the number of the others.
fn some_of(names: &[String], count: u64) -> String {
    let shown = names.iter().take(NAMED).map(|name| printable(name));
    let shown: Vec<_> = shown.collect();
    match count - (shown.len() as u64).min(count) {
        0 => shown.join(", "),
        rest => format!("{} and {rest} more", shown.join(", ")),
    }
}

/// A VM's status, with the state in which its CPUs do not run.
fn status(vm: &VmSummary) -> String {
    let stopped = vm.stopped.iter().map(|state| printable(state));
    let words = std::iter::once(name_of(vm.status)).chain(stopped);
    words.collect::<Vec<_>>().join(", ")
}

/// The tracing backends that can observe a VM; empty if that is not known.
fn backends(vm: &VmSummary) -> String {
    let able = vm.backends.iter().filter(|view| view.refusals.is_empty());
    let able: Vec<_> = able.map(|view| view.backend.name()).collect();
    match able.len() {
        0 if vm.backends.is_empty() => String::new(),
        0 => "none".to_owned(),
        count if count == vm.backends.len() => "all".to_owned(),
        _ => able.join(", "),
    }
}

/// A line of comma-separated values for each VM and control group.
pub fn csv(host: &HostView) -> String {
    csv_table!(Entry::all(host), |line| {
        "vm": printable(line.name()),
        "pid": line.vm().map(|vm| vm.pid),
        "accelerator": line.vm().and_then(|vm| vm.accelerator).map(|accelerator| accelerator.to_string()),
        "status": line.vm().map(|vm| name_of(vm.status)),
        "size_bytes": line.vm().map(|vm| vm.size_bytes),
        "direct_bytes": line.vm().map(|vm| vm.direct_bytes),
        "cache_bytes": line.vm().map(|vm| vm.cache_bytes),
        "target_bytes": line.vm().and_then(|vm| vm.target_bytes),
        "working_set_bytes": line.working_set().map(|set| set.bytes),
        "working_set_bound": line.working_set().map(|set| set.bound.name()),
        "relative": line.vm().and_then(|vm| vm.relative).map(|at| at.expected),
        "relative_low": line.vm().and_then(|vm| vm.relative).map(|at| at.low),
        "relative_high": line.vm().and_then(|vm| vm.relative).map(|at| at.high),
        "misses_per_second": line.vm().and_then(|vm| vm.misses).map(|at| at.misses_per_second),
        "misses_low_per_second": line.vm().and_then(|vm| vm.misses).map(|at| at.misses_low_per_second),
        "misses_high_per_second": line.vm().and_then(|vm| vm.misses).map(|at| at.misses_high_per_second),
        "vcpu_seconds_per_second": line.vm().and_then(|vm| vm.vcpu_seconds_per_second),
        "reclaimable_bytes": line.vm().and_then(|vm| vm.reclaimable_bytes),
        "promise_bytes": line.vm().and_then(|vm| vm.promise_bytes),
        "overhead_ratio": line.trace().map(|trace| trace.overhead_ratio),
        "trace_state": line.trace().map(|trace| name_of(trace.state)),
        "lost": line.trace().map(|trace| trace.lost),
        "backends": line.vm().map(backends),
        "kind": line.kind(),
        "path": line.group().map(|group| printable(&group.path)),
        "charged_bytes": line.group().and_then(|group| group.charged_bytes),
        "limit_bytes": line.group().and_then(|group| group.limit_bytes),
        "stopped": line.vm().and_then(|vm| vm.stopped.as_deref()).map(printable),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;

    #[test]
    fn a_vm_that_is_paused_is_listed_as_that() {
        let mut host = example::host();
        let of = |host: &HostView, vm: &str| {
            let text = text(host);
            let line = text.lines().find(|line| line.starts_with(vm));
            line.unwrap().to_owned()
        };
        let runs = of(&host, "web");
        assert!(runs.contains(" safe "), "{runs}");
        let web = host.vms.iter_mut().find(|vm| vm.vm == "web").unwrap();
        web.stopped = Some("paused".to_owned());
        let paused = of(&host, "web");
        assert!(paused.contains(" safe, paused "), "{paused}");
        let csv = csv(&host);
        let mut lines = csv.lines();
        assert!(lines.next().unwrap().ends_with(",stopped"), "{csv}");
        assert!(lines.any(|line| line.starts_with("web,") && line.ends_with(",paused")));
    }
}
