//! `plimsoll report overhead`: cost of tracing, and reliability of its figures.

use std::io::Write;

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::answer::VmsView;
use plimsoll_protocol::vm::{HostView, TraceView, VmSummary};

use super::super::words::{UNKNOWN, age, is_emulated, name, name_of, percent, size};
use super::super::write_json;
use super::VmArgs;
use plimsoll_output::{
    Columns, Side, TextFormat, TextFormatArg, csv_table, or_empty, printable, short,
};

/// Cost of tracing, and reliability of its figures: losses, ages, references behind the curves.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    of: VmArgs,
    #[command(flatten)]
    form: TextFormatArg,
}

/// Runs the command; `out` is standard output, or a buffer in tests.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let daemon = args.of.daemon()?;
    let vms = daemon.vms(args.of.vm.as_deref())?;
    match args.form.output {
        TextFormat::Table => {
            let host = daemon.host()?;
            out.write_all(text(&vms, &host).as_bytes())?;
        }
        TextFormat::Csv => out.write_all(lines(&vms).as_bytes())?,
        TextFormat::Json => {
            let view = VmsView {
                schema: SCHEMA,
                vms,
            };
            write_json(&view, out)?;
        }
    }
    Ok(())
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
    let mut columns = Columns::new(&[
        ("VM", Side::Left),
        ("curve", Side::Left),
        ("state", Side::Left),
        ("overhead", Side::Right),
        ("watched", Side::Right),
        (seen, Side::Right),
        ("lost", Side::Right),
        ("restarts", Side::Right),
        ("references", Side::Right),
        ("curve age", Side::Right),
        ("guest stats", Side::Right),
    ]);
    let now = host.now_unix_ms;
    for vm in vms {
        let of = |form: fn(&TraceView) -> String| {
            vm.trace.as_ref().map_or_else(|| UNKNOWN.to_owned(), form)
        };
        let mut source = vm.curve_source.map_or_else(|| UNKNOWN.to_owned(), name_of);
        if is_emulated(vm) {
            source.push_str(", tcg");
        }
        let curve_age = vm.curve_unix_ms.map(|made| age(now, made));
        let statistics = vm
            .balloon
            .as_ref()
            .and_then(|balloon| balloon.statistics_age_ms);
        columns.row([
            name(&vm.vm),
            source,
            of(|trace| name_of(trace.state)),
            of(|trace| percent(trace.overhead_ratio)),
            of(|trace| percent(trace.tracking_rate)),
            of(|trace| {
                let seen = trace.traps_per_second + trace.touches_per_second;
                format!("{seen:.0}")
            }),
            of(|trace| trace.lost.to_string()),
            of(|trace| trace.restarts.to_string()),
            short(vm.references as f64),
            curve_age.unwrap_or_else(|| UNKNOWN.to_owned()),
            statistics.map_or_else(|| UNKNOWN.to_owned(), |ms| age(ms, 0)),
        ]);
    }
    let mut text = columns.text();
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
    if vms.iter().any(is_emulated) {
        text.push_str("tcg: emulated; its times do not carry over to real hardware.\n");
    }
    text
}

fn lines(vms: &[VmSummary]) -> String {
    let statistics = |vm: &VmSummary| vm.balloon.as_ref().and_then(|it| it.statistics_age_ms);
    csv_table(
        vms,
        &[
            ("vm", &|vm| printable(&vm.vm)),
            ("curve_source", &|vm| or_empty(vm.curve_source.map(name_of))),
            ("state", &|vm| of_trace(vm, |trace| name_of(trace.state))),
            ("overhead_ratio", &|vm| {
                of_trace(vm, |trace| trace.overhead_ratio)
            }),
            ("tracking_rate", &|vm| {
                of_trace(vm, |trace| trace.tracking_rate)
            }),
            ("traps_per_second", &|vm| {
                of_trace(vm, |trace| trace.traps_per_second)
            }),
            ("lost", &|vm| of_trace(vm, |trace| trace.lost)),
            ("restarts", &|vm| of_trace(vm, |trace| trace.restarts)),
            ("references", &|vm| vm.references.to_string()),
            ("curve_unix_ms", &|vm| or_empty(vm.curve_unix_ms)),
            ("statistics_age_ms", &|vm| or_empty(statistics(vm))),
            ("touches_per_second", &|vm| {
                of_trace(vm, |trace| trace.touches_per_second)
            }),
            ("lost_lines", &|vm| of_trace(vm, |trace| trace.lost_lines)),
        ],
    )
}

fn of_trace<T: ToString>(vm: &VmSummary, of: fn(&TraceView) -> T) -> String {
    or_empty(vm.trace.as_ref().map(of))
}
