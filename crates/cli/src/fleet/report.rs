//! `plimsoll fleet report`: the hosts of a fleet as they are.

use std::cmp::Reverse;
use std::io::Write;

use plimsoll_fleet::archive::DAY_MS;
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

/// The first slot in which most is needed, by its time in the period, and that need.
fn busiest(report: &FleetReport) -> (String, u64) {
    const WEEK_MS: u64 = 7 * DAY_MS;
    /// From the day of 1970-01-01.
    const WEEKDAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    let peak = report.need_bytes.iter().zip(0_u64..);
    let peak = peak.max_by_key(|&(bytes, slot)| (*bytes, Reverse(slot)));
    let (need, slot) = peak.map_or((0, 0), |(bytes, slot)| (*bytes, slot));
    let slot_ms = slot * report.interval_ms;
    let clock = |ms: u64| format!("{:02}:{:02}", ms / 3_600_000, ms / 60_000 % 60);
    let time = match report.period_ms {
        DAY_MS => format!("{} UTC", clock(slot_ms)),
        WEEK_MS => {
            let mut days = WEEKDAYS.iter().zip(1_u64..);
            let day = days.find(|(_, end)| slot_ms < end * DAY_MS);
            let day = day.map_or("", |(name, _)| name);
            format!("{day} {} UTC", clock(slot_ms % DAY_MS))
        }
        _ => format!(
            "{} h of each {} h from 1970-01-01 00:00 UTC",
            clock(slot_ms),
            clock(report.period_ms)
        ),
    };
    (time, need)
}

fn table(report: &FleetReport) -> String {
    let mut text = hosts(&report.hosts);
    let (time, need) = busiest(report);
    text.push_str(&format!(
        "\nSizes of {} on {}: {} of {}. Need at the busiest time, {time}: {}; \
         the sum of what each needs at its own peak: {}.\n\
         At least {} must run for that.\n",
        counted(report.vms.len() as u64, "VM"),
        counted(report.hosts.len() as u64, "host"),
        size(report.size_bytes),
        size(report.capacity_bytes),
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

#[cfg(test)]
mod tests {
    use plimsoll_protocol::SCHEMA;

    use super::*;

    #[test]
    fn the_busiest_time_is_that_of_a_day_or_a_week_and_the_first_of_several() {
        let of = |period_hours: usize, busy: &[usize]| {
            let mut need_bytes = vec![1; period_hours];
            for &slot in busy {
                need_bytes[slot] = 2;
            }
            let report = FleetReport {
                schema: SCHEMA,
                period_ms: period_hours as u64 * 3_600_000,
                interval_ms: 3_600_000,
                need_bytes,
                sum_of_peaks_bytes: 0,
                size_bytes: 0,
                capacity_bytes: 0,
                hosts_at_least: 0,
                hosts: Vec::new(),
                vms: Vec::new(),
                clocks: Vec::new(),
                missing: Vec::new(),
                problems: Vec::new(),
            };
            busiest(&report)
        };
        assert_eq!(of(24, &[14, 20]), ("14:00 UTC".to_owned(), 2));
        assert_eq!(of(168, &[106]).0, "Mon 10:00 UTC");
        assert_eq!(of(168, &[0]).0, "Thu 00:00 UTC");
        assert_eq!(of(168, &[167]).0, "Wed 23:00 UTC");
        assert_eq!(
            of(240, &[106]).0,
            "106:00 h of each 240:00 h from 1970-01-01 00:00 UTC"
        );
    }
}
