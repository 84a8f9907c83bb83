//! Copying a running VM: cost to the guest and duration, by the method of tracking written pages.
//!
//! After \[PRL\] §3.3, figs. 4 and 5: an application goes over an array and writes at 0, 50, 80 or 100 % of its pages,
//! while the memory is copied to a file in RAM and what was written meanwhile is copied again. Two subjects:
//!
//! - *machine*: a tiny machine under this host's KVM ([`tiny`](plimsoll_migration::tiny)), copied by each of our
//!   trackers ([`kvm`](plimsoll_migration)). Rounds end as in Xen.
//! - *qemu*: a guest of ours under QEMU, migrated by QEMU itself to a file and then to another QEMU. Both copies are
//!   started, and verify the signature of every page they visit.
//!
//! The paper compares PML with write protection of its hypervisor. Here the dirty log, with PML underneath only where
//! the processor has it, is compared with write protection by a userfaultfd, which costs more: each first write waits
//! for a thread. Results: docs/migration-measured.md.

mod machine;
mod qemu;

use std::io::Write;

use clap::ValueEnum;

use serde::Serialize;

use plimsoll_output::exit::with_causes;
use plimsoll_output::{TextFormat, bail_usage, csv_table};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::size::{ByteSize, Interval, Share};

use plimsoll_rig::median;
use plimsoll_vm::HostMemory;

const MIB: u64 = 1 << 20;
/// The paper's array.
const ARRAY_BYTES: u64 = 400 * MIB;
/// Part of the host's free memory that an array may take by default, because its copy needs memory too.
const PART_OF_FREE: u64 = 4;
/// Write share in percent; by how much less PML slows the application (fig. 4) and shortens the copying (fig. 5), in
/// percent.
const PAPER: [(f64, f64, f64); 4] = [
    (0.0, 0.06, 10.19),
    (50.0, 0.14, 5.99),
    (80.0, 0.39, 2.43),
    (100.0, 0.95, 0.98),
];

/// Copy running VMs with each method of tracking written pages: guest speed, rounds, pages, time.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only this subject [default: both]
    #[arg(long, value_enum)]
    only: Option<Subject>,
    /// Share of operations that write; may be repeated [default: 0, 50%, 80%, 100%]
    #[arg(long, value_name = "SHARE")]
    write: Vec<Share>,
    /// The machine's array [default: 400MiB, or a quarter of the free memory]
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteSize>,
    /// The QEMU guest's array
    #[arg(long, value_name = "SIZE", default_value = "96MiB")]
    guest_size: ByteSize,
    /// How long the guest's speed is measured before each copy
    #[arg(long, value_name = "TIME", default_value = "1s")]
    window: Interval,
    /// Copies of each kind; the median is reported
    #[arg(long, value_name = "N", default_value_t = 2)]
    repeats: u32,
    /// Entries of the machine's dirty ring, a power of two from 1024
    #[arg(long, value_name = "N", default_value_t = 16384)]
    ring_entries: u32,
    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t, value_name = "FORMAT")]
    output: TextFormat,
}

/// Subject of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Subject {
    /// A minimal machine under KVM, with our trackers
    Machine,
    /// A guest under QEMU, copied by QEMU
    Qemu,
}

/// Results of one method of copying at one share of writes.
#[derive(Debug, Clone, Serialize)]
struct Row {
    /// "machine" or "qemu".
    subject: &'static str,
    /// The guest's accelerator.
    under: String,
    way: &'static str,
    write_percent: f64,
    array_pages: u64,
    #[serde(flatten)]
    figures: Option<Figures>,
    /// The reason if there are no figures.
    error: Option<String>,
}

/// Medians over copies.
#[derive(Debug, Clone, Default, Serialize)]
struct Figures {
    /// Operations a ns before the copy, and during it; of a QEMU guest visits.
    operations_per_ns_before: f64,
    operations_per_ns_during: Option<f64>,
    /// Rounds, that of the stopped guest among them.
    rounds: f64,
    pages_sent: f64,
    took_ms: f64,
    stopped_ms: f64,
    /// Times a vCPU waited at a full ring.
    full_exits: f64,
    /// Entries of a log that named no page of the machine.
    lost: u64,
    /// Pages of copies that differed from the guest's.
    wrong_pages: u64,
    /// QEMU's estimate of the guest's dirty rate before the copy, by page sampling, in MiB/s.
    dirty_rate_mib_s: Option<f64>,
    /// Copies that did not end until they were allowed a long stop.
    forced: u64,
    /// Why a copy's guest did not run on; of several, the first one's reason.
    broken: Option<String>,
}

impl Figures {
    /// Medians over at least one copy; counts of errors are sums.
    fn of(copies: &[Self]) -> Self {
        let middle = |value: &dyn Fn(&Self) -> f64| median(copies.iter().map(value));
        let known = |value: &dyn Fn(&Self) -> Option<f64>| {
            let values: Vec<f64> = copies.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| median(values))
        };
        let sum = |value: &dyn Fn(&Self) -> u64| copies.iter().map(value).sum();
        Self {
            operations_per_ns_before: middle(&|copy| copy.operations_per_ns_before),
            operations_per_ns_during: known(&|copy| copy.operations_per_ns_during),
            rounds: middle(&|copy| copy.rounds),
            pages_sent: middle(&|copy| copy.pages_sent),
            took_ms: middle(&|copy| copy.took_ms),
            stopped_ms: middle(&|copy| copy.stopped_ms),
            full_exits: middle(&|copy| copy.full_exits),
            lost: sum(&|copy| copy.lost),
            wrong_pages: sum(&|copy| copy.wrong_pages),
            dirty_rate_mib_s: known(&|copy| copy.dirty_rate_mib_s),
            forced: sum(&|copy| copy.forced),
            broken: copies.iter().find_map(|copy| copy.broken.clone()),
        }
    }

    /// Share of its speed that the guest kept, in percent.
    fn kept_percent(&self) -> Option<f64> {
        let during = self.operations_per_ns_during?;
        (self.operations_per_ns_before > 0.0)
            .then(|| during / self.operations_per_ns_before * 100.0)
    }
}

/// A tracker of the machine against write protection by faults, beside the paper's PML against its own.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct TrackerComparison {
    way: &'static str,
    write_percent: f64,
    /// How much more of its own speed the application kept.
    faster_percent: f64,
    /// How much sooner the copying ended.
    shorter_percent: f64,
    paper_faster_percent: Option<f64>,
    paper_shorter_percent: Option<f64>,
}

/// The whole result.
#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    /// KVM's modules on this host.
    kvm_modules: Vec<String>,
    /// Whether the processor logs pages by itself (PML).
    pml: Option<bool>,
    rows: Vec<Row>,
    against_faults: Vec<TrackerComparison>,
}

/// Runs the experiment.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let writes: Vec<f64> = if args.write.is_empty() {
        PAPER
            .iter()
            .map(|(percent, _, _)| percent / 100.0)
            .collect()
    } else {
        args.write.iter().map(|share| share.get()).collect()
    };
    let size = args.size.map_or_else(default_size, |size| size.0);
    if args.repeats == 0 || writes.iter().any(|&share| share > 1.0) {
        bail_usage!("expected at least one copy, and shares up to 100 %");
    }
    if size < MIB || args.guest_size.0 < MIB {
        bail_usage!(
            "an array of {size} or {} bytes: expected at least 1 MiB",
            args.guest_size.0
        );
    }
    let mut rows = Vec::new();
    if args.only != Some(Subject::Qemu) {
        rows.extend(machine::rows(args, &writes, size / 4096));
    }
    if args.only != Some(Subject::Machine) {
        rows.extend(qemu::rows(args, &writes));
    }
    let hardware = plimsoll_migration::hardware();
    let report = Report {
        schema: SCHEMA,
        kvm_modules: hardware.modules,
        pml: hardware.pml,
        against_faults: against_faults(&rows),
        rows,
    };
    match args.output {
        TextFormat::Table => table(&report, out)?,
        TextFormat::Csv => out.write_all(csv(&report.rows).as_bytes())?,
        TextFormat::Json => writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?,
    }
    // The measurements are printed above; a copy that differs from the guest's memory is a failure all the same.
    let wrong: u64 = figures(&report.rows)
        .map(|figures| figures.wrong_pages)
        .sum();
    anyhow::ensure!(wrong == 0, "{wrong} pages of copies were wrong");
    let broken = figures(&report.rows)
        .filter(|figures| figures.broken.is_some())
        .count();
    anyhow::ensure!(broken == 0, "of {broken} rows, a copy did not run on");
    anyhow::ensure!(
        figures(&report.rows).next().is_some(),
        "nothing could be copied"
    );
    Ok(())
}

fn figures(rows: &[Row]) -> impl Iterator<Item = &Figures> {
    rows.iter().filter_map(|row| row.figures.as_ref())
}

/// Adds a copy, unless one before it failed.
fn add(copies: &mut anyhow::Result<Vec<Figures>>, copy: impl FnOnce() -> anyhow::Result<Figures>) {
    if let Ok(made) = copies {
        match copy() {
            Ok(copy) => made.push(copy),
            Err(error) => *copies = Err(error),
        }
    }
}

/// Makes a row of copies made one after the other, up to the first that failed.
fn row(
    subject: &'static str,
    way: &'static str,
    (share, array_pages): (f64, u64),
    under: &str,
    copies: anyhow::Result<Vec<Figures>>,
) -> Row {
    let (figures, error) = match copies {
        Ok(copies) => (Some(Figures::of(&copies)), None),
        Err(error) => (None, Some(with_causes(error.as_ref()))),
    };
    Row {
        subject,
        under: under.to_owned(),
        way,
        write_percent: share * 100.0,
        array_pages,
        figures,
        error,
    }
}

/// The paper's array, or what the host's free memory allows.
fn default_size() -> u64 {
    HostMemory::read().map_or(ARRAY_BYTES, |memory| {
        ARRAY_BYTES.min(memory.available_bytes / PART_OF_FREE)
    })
}

fn against_faults(rows: &[Row]) -> Vec<TrackerComparison> {
    let machine = |way: &str, percent: f64| {
        rows.iter().find_map(|row| {
            let same = row.subject == "machine" && row.way == way && row.write_percent == percent;
            let figures = row.figures.as_ref().filter(|_| same)?;
            Some((figures.kept_percent()?, figures.took_ms))
        })
    };
    rows.iter()
        .filter(|row| row.subject == "machine" && machine::is_tracked(row.way))
        .filter_map(|row| {
            let percent = row.write_percent;
            let (kept, took) = machine(row.way, percent)?;
            let (kept_by_faults, took_by_faults) = machine(machine::FAULTS, percent)?;
            let paper = PAPER.iter().find(|(share, _, _)| *share == percent);
            let paper = paper.filter(|_| row.way == machine::LOG);
            Some(TrackerComparison {
                way: row.way,
                write_percent: percent,
                faster_percent: (kept / kept_by_faults - 1.0) * 100.0,
                shorter_percent: (1.0 - took / took_by_faults) * 100.0,
                paper_faster_percent: paper.map(|&(_, faster, _)| faster),
                paper_shorter_percent: paper.map(|&(_, _, shorter)| shorter),
            })
        })
        .collect()
}

fn table(report: &Report, out: &mut dyn Write) -> anyhow::Result<()> {
    let pml = match report.pml {
        Some(true) => "the processor logs pages (PML)",
        Some(false) => "no PML underneath",
        None => "nobody says whether PML is underneath",
    };
    writeln!(out, "KVM here: {}; {pml}", report.kvm_modules.join(", "))?;
    let mut subject = "";
    for row in &report.rows {
        if row.subject != subject {
            subject = row.subject;
            let pages = ByteSize(row.array_pages * 4096).rounded();
            writeln!(out, "\n{subject}: {}, array of {pages}", row.under)?;
            writeln!(
                out,
                "writes  {:<22} {:>9} {:>9} {:>6} {:>6} {:>9} {:>9} {:>9}  ",
                "way", "ops/ns", "during", "kept", "rounds", "pages", "ms", "stop ms"
            )?;
        }
        write!(out, "{:>4} %  {:<22} ", row.write_percent, row.way)?;
        match (&row.figures, &row.error) {
            (Some(figures), _) => writeln!(
                out,
                "{:>9} {:>9} {:>6} {:>6} {:>9} {:>9.0} {:>9.1}  {}",
                format!("{:.6}", figures.operations_per_ns_before),
                or_dash(
                    figures
                        .operations_per_ns_during
                        .map(|rate| format!("{rate:.6}"))
                ),
                or_dash(figures.kept_percent().map(|kept| format!("{kept:.0} %"))),
                figures.rounds,
                figures.pages_sent,
                figures.took_ms,
                figures.stopped_ms,
                remarks(figures)
            )?,
            (None, error) => writeln!(out, "{}", error.as_deref().unwrap_or_default())?,
        }
    }
    if !report.against_faults.is_empty() {
        writeln!(
            out,
            "\nagainst write protection by faults; the paper: PML against its own"
        )?;
        writeln!(
            out,
            "writes  {:<22} {:>9} {:>9} {:>9} {:>9}",
            "way", "faster", "paper", "shorter", "paper"
        )?;
        for against in &report.against_faults {
            let percent = |value: f64| format!("{value:+.2} %");
            writeln!(
                out,
                "{:>4} %  {:<22} {:>9} {:>9} {:>9} {:>9}",
                against.write_percent,
                against.way,
                percent(against.faster_percent),
                or_dash(against.paper_faster_percent.map(percent)),
                percent(against.shorter_percent),
                or_dash(against.paper_shorter_percent.map(percent)),
            )?;
        }
    }
    let wrong: u64 = figures(&report.rows)
        .map(|figures| figures.wrong_pages)
        .sum();
    writeln!(out, "\npages of copies found wrong: {wrong}")?;
    Ok(())
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

fn remarks(figures: &Figures) -> String {
    let mut remarks = Vec::new();
    let mut add = |value: f64, words: &str| {
        if value > 0.0 {
            remarks.push(format!("{value:.0} {words}"));
        }
    };
    add(figures.full_exits, "stops at a full ring");
    add(figures.lost as f64, "entries lost");
    add(figures.wrong_pages as f64, "PAGES WRONG");
    add(figures.forced as f64, "forced to end");
    if let Some(rate) = figures.dirty_rate_mib_s {
        remarks.push(format!("{rate:.0} MiB/s written, says QEMU"));
    }
    if let Some(reason) = &figures.broken {
        remarks.push(format!("A COPY DID NOT RUN ON: {reason}"));
    }
    remarks.join(", ")
}

fn csv(rows: &[Row]) -> String {
    csv_table!(rows.iter().map(|row| (row, row.figures.as_ref())), |(row, figures)| {
        "subject": row.subject,
        "under": row.under.as_str(),
        "way": row.way,
        "write_percent": row.write_percent,
        "array_pages": row.array_pages,
        "operations_per_ns_before": figures.map(|it| it.operations_per_ns_before),
        "operations_per_ns_during": figures.and_then(|it| it.operations_per_ns_during),
        "rounds": figures.map(|it| it.rounds),
        "pages_sent": figures.map(|it| it.pages_sent),
        "took_ms": figures.map(|it| it.took_ms),
        "stopped_ms": figures.map(|it| it.stopped_ms),
        "full_exits": figures.map(|it| it.full_exits),
        "lost": figures.map(|it| it.lost),
        "wrong_pages": figures.map(|it| it.wrong_pages),
        "dirty_rate_mib_s": figures.and_then(|it| it.dirty_rate_mib_s),
        "forced": figures.map(|it| it.forced),
        "broken": figures.and_then(|it| it.broken.as_deref()),
        "error": row.error.as_deref(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(way: &'static str, share: f64, during: f64, took_ms: f64) -> Row {
        let copy = Figures {
            operations_per_ns_before: 0.01,
            operations_per_ns_during: Some(during),
            took_ms,
            ..Figures::default()
        };
        row("machine", way, (share, 256), "kvm", Ok(vec![copy]))
    }

    #[test]
    fn a_tracker_is_set_against_faults_at_the_same_share_of_writes() {
        let rows = [
            machine(machine::LOG, 0.5, 0.009, 100.0),
            machine(machine::FAULTS, 0.5, 0.006, 400.0),
            machine(machine::LOG, 0.8, 0.009, 100.0),
        ];
        let against = against_faults(&rows);
        assert_eq!(against.len(), 1);
        assert!((against[0].faster_percent - 50.0).abs() < 1e-9);
        assert!((against[0].shorter_percent - 75.0).abs() < 1e-9);
        assert_eq!(against[0].paper_faster_percent, Some(0.14));
        assert_eq!(against[0].paper_shorter_percent, Some(5.99));
    }

    #[test]
    fn a_copy_that_failed_is_a_row_that_says_why() {
        let failed = row(
            "qemu",
            "to a file",
            (1.0, 256),
            "tcg",
            Err(anyhow::anyhow!("no, \"never\"")),
        );
        let text = csv(&[machine(machine::LOG, 0.0, 0.01, 1.0), failed]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        let columns = lines[0].split(',').count();
        assert_eq!(lines[1].split(',').count(), columns);
        assert!(lines[2].ends_with(r#","no, ""never""""#), "{}", lines[2]);
    }

    #[test]
    fn medians_are_taken_of_what_is_known_and_faults_added_up() {
        let copy = |took_ms, during, wrong_pages| Figures {
            took_ms,
            operations_per_ns_during: during,
            wrong_pages,
            ..Figures::default()
        };
        let figures = Figures::of(&[
            copy(1.0, None, 1),
            copy(2.0, Some(0.5), 0),
            copy(9.0, None, 2),
        ]);
        assert!((figures.took_ms - 2.0).abs() < 1e-12);
        assert_eq!(figures.operations_per_ns_during, Some(0.5));
        assert_eq!(figures.wrong_pages, 3);
    }
}
