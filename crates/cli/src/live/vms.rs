//! `plimsoll vms`: the host's VMs and the control groups that are watched, a line each.

use std::collections::BTreeMap;
use std::io::Write;

use plimsoll_protocol::group::Groups;
use plimsoll_protocol::vm::{HostMemory, HostView, VmSummary};

use super::subject::Entry;
use super::words::{
    is_emulated, local_time, maybe_size, misses, name, name_of, percent, ratio, size, working_set,
};
use super::{Daemon, QueryArgs, write_json};
use plimsoll_output::{
    Columns, Side, TextFormat, csv_table, cut_front, duration, or_empty, printable,
};

/// Characters of a control group's path that the table shows.
const PATH_CHARACTERS: usize = 60;
/// Number of control groups that are named beside a reason.
const NAMED: usize = 4;

/// List the VMs: status, size, working set and reclaimable memory; and the control groups that are watched.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    look: QueryArgs,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// Those of asking the daemon and of writing.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let host = Daemon::to_read(&args.look.socket)?.host()?;
    match args.look.form.output {
        TextFormat::Table => Ok(out.write_all(text(&host).as_bytes())?),
        TextFormat::Csv => Ok(out.write_all(lines(&host).as_bytes())?),
        TextFormat::Json => write_json(&host, out),
    }
}

fn text(host: &HostView) -> String {
    let mut text = head(host);
    text.push('\n');
    if host.vms.is_empty() {
        text.push_str("No VM was found.\n");
    } else {
        text.push_str(&table(&host.vms));
        text.push_str(
            "\nsize: memory of its own and cache. uses: its working set. misses: predicted at its size over those at\n\
             its baseline, and the upper confidence limit. gives: what it could give within its limit. cost: share of its\n\
             CPU time that its tracer takes. backends: those that can trace it; `plimsoll doctor VM` shows why others cannot.\n",
        );
    }
    if host.vms.iter().any(is_emulated) {
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

fn table(vms: &[VmSummary]) -> String {
    let mut columns = Columns::new(&[
        ("VM", Side::Left),
        ("status", Side::Left),
        ("size", Side::Right),
        ("of it cache", Side::Right),
        ("target", Side::Right),
        ("uses", Side::Right),
        ("misses/s", Side::Right),
        ("misses", Side::Right),
        ("gives", Side::Right),
        ("cost", Side::Right),
        ("backends", Side::Left),
        ("traced", Side::Left),
    ]);
    for vm in vms {
        let relative = vm.relative.map_or_else(
            || super::words::UNKNOWN.to_owned(),
            |at| format!("{} ≤ {}", ratio(at.expected), ratio(at.high)),
        );
        let overhead = vm.trace.as_ref().map(|trace| percent(trace.overhead_ratio));
        columns.row([
            name(&vm.vm),
            name_of(vm.status),
            size(vm.size_bytes),
            if vm.cache.is_some() || vm.cache_bytes > 0 {
                size(vm.cache_bytes)
            } else {
                String::new()
            },
            vm.target_bytes.map(size).unwrap_or_default(),
            working_set(vm.working_set.as_ref()),
            misses(vm.misses.as_ref(), 1.0),
            relative,
            maybe_size(vm.reclaimable_bytes),
            overhead.unwrap_or_default(),
            backends(vm),
            Entry::Vm(vm).traced(),
        ]);
    }
    columns.text()
}

/// The control groups, with an account of those that are not watched or not traced.
fn groups_text(groups: &Groups) -> String {
    let mut text = String::new();
    if !groups.watched.is_empty() {
        let mut columns = Columns::new(&[
            ("control group", Side::Left),
            ("kind", Side::Left),
            ("charged", Side::Right),
            ("limit", Side::Right),
            ("uses", Side::Right),
            ("cost", Side::Right),
            ("traced", Side::Left),
            ("path", Side::Left),
        ]);
        for group in &groups.watched {
            let overhead = (group.trace.as_ref()).map(|trace| percent(trace.overhead_ratio));
            columns.row([
                name(&group.group),
                group.kind.to_string(),
                maybe_size(group.charged_bytes),
                group.limit_bytes.map(size).unwrap_or_default(),
                working_set(group.working_set.as_ref()),
                overhead.unwrap_or_default(),
                Entry::Group(group).traced(),
                cut_front(&printable(&group.path), PATH_CHARACTERS),
            ]);
        }
        text.push('\n');
        text.push_str(&columns.text());
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

fn lines(host: &HostView) -> String {
    csv_table(
        Entry::all(host),
        &[
            ("vm", &|line| printable(line.name())),
            ("pid", &|line| line.of_vm(|vm| vm.pid.to_string())),
            ("accelerator", &|line| {
                line.of_vm(|vm| or_empty(vm.accelerator))
            }),
            ("status", &|line| line.of_vm(|vm| name_of(vm.status))),
            ("size_bytes", &|line| {
                line.of_vm(|vm| vm.size_bytes.to_string())
            }),
            ("direct_bytes", &|line| {
                line.of_vm(|vm| vm.direct_bytes.to_string())
            }),
            ("cache_bytes", &|line| {
                line.of_vm(|vm| vm.cache_bytes.to_string())
            }),
            ("target_bytes", &|line| {
                line.of_vm(|vm| or_empty(vm.target_bytes))
            }),
            ("working_set_bytes", &|line| {
                or_empty(line.working_set().map(|set| set.bytes))
            }),
            ("working_set_bound", &|line| {
                or_empty(line.working_set().map(|set| set.bound.name()))
            }),
            ("relative", &|line| {
                line.of_vm(|vm| or_empty(vm.relative.map(|at| at.expected)))
            }),
            ("relative_low", &|line| {
                line.of_vm(|vm| or_empty(vm.relative.map(|at| at.low)))
            }),
            ("relative_high", &|line| {
                line.of_vm(|vm| or_empty(vm.relative.map(|at| at.high)))
            }),
            ("misses_per_second", &|line| {
                line.of_vm(|vm| or_empty(vm.misses.map(|at| at.misses_per_second)))
            }),
            ("misses_low_per_second", &|line| {
                line.of_vm(|vm| or_empty(vm.misses.map(|at| at.misses_low_per_second)))
            }),
            ("misses_high_per_second", &|line| {
                line.of_vm(|vm| or_empty(vm.misses.map(|at| at.misses_high_per_second)))
            }),
            ("vcpu_seconds_per_second", &|line| {
                line.of_vm(|vm| or_empty(vm.vcpu_seconds_per_second))
            }),
            ("reclaimable_bytes", &|line| {
                line.of_vm(|vm| or_empty(vm.reclaimable_bytes))
            }),
            ("promise_bytes", &|line| {
                line.of_vm(|vm| or_empty(vm.promise_bytes))
            }),
            ("overhead_ratio", &|line| {
                or_empty(line.trace().map(|trace| trace.overhead_ratio))
            }),
            ("trace_state", &|line| {
                or_empty(line.trace().map(|trace| name_of(trace.state)))
            }),
            ("lost", &|line| {
                or_empty(line.trace().map(|trace| trace.lost))
            }),
            ("backends", &|line| line.of_vm(backends)),
            ("kind", &|line| line.kind()),
            ("path", &|line| {
                line.of_group(|group| printable(&group.path))
            }),
            ("charged_bytes", &|line| {
                line.of_group(|group| or_empty(group.charged_bytes))
            }),
            ("limit_bytes", &|line| {
                line.of_group(|group| or_empty(group.limit_bytes))
            }),
        ],
    )
}
