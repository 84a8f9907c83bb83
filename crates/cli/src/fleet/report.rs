//! `plimsoll fleet report`: the hosts of a fleet as they are.

use std::io::Write;

use plimsoll_fleet::plan;
use plimsoll_output::{TableOrJsonArg, percent, printable, table};
use plimsoll_protocol::fleet::{FleetReport, HostPlace};

use super::source::{Source, UNANSWERED, complain};
use plimsoll_report::words::{counted, known, size};

/// Show what the VMs of each host need together, and which hosts may be lost.
///
/// A VM's need is the size that its curves required for its limit; a host's, the most that its VMs needed at the same time.
/// The exit code is 5 if some hosts did not answer.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    format: TableOrJsonArg,
}

pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let (file, fleet) = args.source.fleet()?;
    let report = plan::report(&file, &fleet)?;
    args.format.write(out, || table(&report), &report)?;
    complain(&report.missing, UNANSWERED)
}

/// Hosts as a table.
pub fn hosts(places: &[HostPlace]) -> String {
    table!(places, |place| {
        Left "HOST": printable(&place.host),
        Right "VMS": place.vms,
        Right "FOR VMS": size(place.capacity_bytes),
        Right "NEED AT PEAK": size(place.peak_bytes),
        Right "SUM OF PEAKS": size(place.sum_of_peaks_bytes),
        Right "CPU": known(place.processors_ratio, percent),
        Left "IF IT IS LOST": match place.survives_loss {
            Some(true) => "its VMs fit elsewhere",
            Some(false) => "VMS HAVE NO PLACE",
            None => "",
        },
    })
}

fn table(report: &FleetReport) -> String {
    let mut text = hosts(&report.hosts);
    let peak = report
        .need_bytes
        .iter()
        .enumerate()
        .max_by_key(|(_, bytes)| **bytes);
    let (slot, need) = peak.map_or((0, 0), |(slot, bytes)| (slot as u64, *bytes));
    let minutes = slot * report.interval_ms / 60_000;
    text.push_str(&format!(
        "\nSizes of {} on {}: {} of {}. Need at the busiest time, {:02}:{:02} (UTC) of {}: {}; \
         the sum of what each needs at its own peak: {}.\n\
         At least {} must run for that.\n",
        counted(report.vms.len() as u64, "VM"),
        counted(report.hosts.len() as u64, "host"),
        size(report.size_bytes),
        size(report.capacity_bytes),
        minutes / 60,
        minutes % 60,
        plimsoll_output::duration(report.period_ms as f64 / 1000.0),
        size(need),
        size(report.sum_of_peaks_bytes),
        counted(report.hosts_at_least, "host"),
    ));
    for clock in &report.clocks {
        let direction = if clock.ahead_ms > 0 {
            "ahead"
        } else {
            "behind"
        };
        text.push_str(&format!(
            "The clock of {} is {:.0} s {direction}; its times were moved.\n",
            printable(&clock.host),
            clock.ahead_ms.unsigned_abs() as f64 / 1000.0
        ));
    }
    for missing in &report.missing {
        text.push_str(&format!(
            "No usable answer of {}: {}\n",
            printable(&missing.target),
            printable(&missing.why)
        ));
    }
    for problem in &report.problems {
        text.push_str(&format!("{}.\n", printable(problem)));
    }
    text
}
