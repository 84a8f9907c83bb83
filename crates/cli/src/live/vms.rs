//! `plimsoll vms`: the host's VMs, a line each.

use std::io::Write;

use plimsoll_protocol::vm::{HostMemory, HostView, TraceState, VmSummary};

use super::words::{
    is_emulated, local_time, maybe_size, misses, name, name_of, percent, ratio, size, working_set,
};
use super::{Daemon, QueryArgs, write_json};
use plimsoll_output::{Columns, Side, TextFormat, csv_table, duration, or_empty, printable};

/// List the VMs: status, size, working set and reclaimable memory.
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
            traced(vm),
        ]);
    }
    columns.text()
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

/// How a VM is traced, in few words.
pub(super) fn traced(vm: &VmSummary) -> String {
    let mut words = match &vm.trace {
        None => vec!["no".to_owned()],
        Some(trace) if trace.state == TraceState::Tracing => Vec::new(),
        Some(trace) => vec![name_of(trace.state)],
    };
    if let Some(source) = vm.curve_source {
        words.push(name_of(source));
    }
    if is_emulated(vm) {
        words.push("tcg".to_owned());
    }
    if vm.trace.as_ref().is_some_and(|trace| trace.lost > 0) {
        words.push("losses".to_owned());
    }
    words.join(", ")
}

fn lines(host: &HostView) -> String {
    csv_table(
        &host.vms,
        &[
            ("vm", &|vm| printable(&vm.vm)),
            ("pid", &|vm| vm.pid.to_string()),
            ("accelerator", &|vm| or_empty(vm.accelerator)),
            ("status", &|vm| name_of(vm.status)),
            ("size_bytes", &|vm| vm.size_bytes.to_string()),
            ("direct_bytes", &|vm| vm.direct_bytes.to_string()),
            ("cache_bytes", &|vm| vm.cache_bytes.to_string()),
            ("target_bytes", &|vm| or_empty(vm.target_bytes)),
            ("working_set_bytes", &|vm| {
                or_empty(vm.working_set.as_ref().map(|set| set.bytes))
            }),
            ("working_set_bound", &|vm| {
                or_empty(vm.working_set.as_ref().map(|set| set.bound.name()))
            }),
            ("relative", &|vm| {
                or_empty(vm.relative.map(|at| at.expected))
            }),
            ("relative_low", &|vm| or_empty(vm.relative.map(|at| at.low))),
            ("relative_high", &|vm| {
                or_empty(vm.relative.map(|at| at.high))
            }),
            ("misses_per_second", &|vm| {
                or_empty(vm.misses.map(|at| at.misses_per_second))
            }),
            ("misses_low_per_second", &|vm| {
                or_empty(vm.misses.map(|at| at.misses_low_per_second))
            }),
            ("misses_high_per_second", &|vm| {
                or_empty(vm.misses.map(|at| at.misses_high_per_second))
            }),
            ("vcpu_seconds_per_second", &|vm| {
                or_empty(vm.vcpu_seconds_per_second)
            }),
            ("reclaimable_bytes", &|vm| or_empty(vm.reclaimable_bytes)),
            ("promise_bytes", &|vm| or_empty(vm.promise_bytes)),
            ("overhead_ratio", &|vm| {
                or_empty(vm.trace.as_ref().map(|trace| trace.overhead_ratio))
            }),
            ("trace_state", &|vm| {
                or_empty(vm.trace.as_ref().map(|trace| name_of(trace.state)))
            }),
            ("lost", &|vm| {
                or_empty(vm.trace.as_ref().map(|trace| trace.lost))
            }),
            ("backends", &|vm| backends(vm)),
        ],
    )
}
