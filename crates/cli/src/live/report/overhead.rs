//! `plimsoll report overhead`: cost of tracing, and reliability of its figures.

use std::io::Write;

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::answer::VmsView;
use plimsoll_protocol::vm::{HostView, TraceView, VmSummary};

use super::VmArgs;
use plimsoll_output::{TextFormatArg, csv_table, printable, short, table};
use plimsoll_report::words::{NO_VM, age, known, name, name_of, percent, size};

/// Cost of tracing, and reliability of its figures: losses, ages, references behind the curves.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    #[command(flatten)]
    form: TextFormatArg,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = args.of.daemon()?;
    let vms = daemon.vms(args.of.vm.as_deref())?;
    let view = VmsView {
        schema: SCHEMA,
        vms,
    };
    args.form.write(
        out,
        || Ok(text(&view.vms, &daemon.host()?)),
        || Ok(lines(&view.vms)),
        &view,
    )
}

fn text(vms: &[VmSummary], host: &HostView) -> String {
    let by_scans = |vm: &VmSummary| {
        let trace = vm.trace.as_ref();
        trace.is_some_and(|trace| !trace.method.traps())
    };
    let seen = match (vms.iter().any(by_scans), vms.iter().all(by_scans)) {
        (false, _) => "traps/s",
        (true, true) => "touches/s",
        (true, false) => "traps or touches/s",
    };
    let now = host.now_unix_ms;
    let table = table!(traced(vms), |(vm, trace)| {
        Left "VM": name(&vm.vm),
        Left "curve": source(vm),
        Left "state": known(trace, |trace| name_of(trace.state)),
        Right "overhead": known(trace, |trace| percent(trace.overhead_ratio)),
        Right "watched": known(trace, |trace| percent(trace.tracking_rate)),
        Right seen: known(trace, |trace| {
            format!("{:.0}", trace.traps_per_second + trace.touches_per_second)
        }),
        Right "lost": known(trace, |trace| trace.lost.to_string()),
        Right "restarts": known(trace, |trace| trace.restarts.to_string()),
        Right "references": short(vm.references as f64),
        Right "curve age": known(vm.curve_unix_ms, |made| age(now, made)),
        Right "guest stats": known(statistics_age_ms(vm), |ms| age(ms, 0)),
    });
    let mut text = match vms {
        [] => NO_VM.to_owned(),
        _ => table,
    };
    for vm in vms {
        if let Some(error) = vm.trace.as_ref().and_then(|trace| trace.error.as_deref()) {
            text.push_str(&format!("{}: {}\n", printable(&vm.vm), printable(error)));
        }
    }
    text.push_str(&format!(
        "\noverhead: share of a VM's CPU time that its tracer takes. watched: share of its pages. lost: references that\n\
         may be missing. guest stats: age of what the guest last said of its memory.\n\
         The daemon: {:.1} ms for the last turn, {} resident{}.\n",
        host.turn_took_ms,
        size(host.daemon_resident_bytes),
        host.history_bytes.map_or_else(String::new, |bytes| format!(", {} of history", size(bytes))),
    ));
    if vms.iter().any(VmSummary::is_emulated) {
        text.push_str("tcg: emulated; its times do not carry over to real hardware.\n");
    }
    text
}

/// The VMs with their tracers.
fn traced(vms: &[VmSummary]) -> impl Iterator<Item = (&VmSummary, Option<&TraceView>)> {
    vms.iter().map(|vm| (vm, vm.trace.as_ref()))
}

/// The source of its curve.
fn source(vm: &VmSummary) -> String {
    let source = known(vm.curve_source, name_of);
    match vm.is_emulated() {
        true => source + ", tcg",
        false => source,
    }
}

fn statistics_age_ms(vm: &VmSummary) -> Option<u64> {
    vm.balloon.as_ref()?.statistics_age_ms
}

fn lines(vms: &[VmSummary]) -> String {
    csv_table!(traced(vms), |(vm, trace)| {
        "vm": printable(&vm.vm),
        "curve_source": vm.curve_source.map(name_of),
        "state": trace.map(|trace| name_of(trace.state)),
        "overhead_ratio": trace.map(|trace| trace.overhead_ratio),
        "tracking_rate": trace.map(|trace| trace.tracking_rate),
        "traps_per_second": trace.map(|trace| trace.traps_per_second),
        "lost": trace.map(|trace| trace.lost),
        "restarts": trace.map(|trace| trace.restarts),
        "references": vm.references,
        "curve_unix_ms": vm.curve_unix_ms,
        "statistics_age_ms": statistics_age_ms(vm),
        "touches_per_second": trace.map(|trace| trace.touches_per_second),
        "lost_lines": trace.map(|trace| trace.lost_lines),
    })
}
