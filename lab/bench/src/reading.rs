//! Traces from files in the page cache.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::Path;

use plimsoll_flow::{PageSize, ReferenceBatch, Source};
use plimsoll_source::{Format, Options, create, open};

use crate::measure::{Clock, Watch, median};
use crate::workload::{Kind, Law};
use crate::{Cli, title};

/// A way to read a trace; returns the number of references.
type Reading = fn(&Path) -> anyhow::Result<u64>;

/// Writes a trace in each format and reads it back.
pub(crate) fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<()> {
    let references = cli.millions * 1_000_000;
    title(
        out,
        &format!(
            "Reading: {} M references of Zipf 1.0 over 2 M pages, files in the page cache, one core",
            cli.millions
        ),
    )?;
    let kind = Kind::new(Law::Zipf, 2_000_000);
    let batches = kind.batches(references)?;
    let folder = tempfile::tempdir()?;
    let formats = [
        (
            "oracle-general",
            Format::ORACLE_GENERAL,
            "t.oracleGeneral",
            200.0,
        ),
        ("plimsoll", Format::PLIMSOLL, "t.plimsoll", 300.0),
        ("csv (page,op)", Format::CSV, "t.csv", 10.0),
        ("ids", Format::IDS, "t.ids", 0.0),
    ];
    writeln!(out, "\n{:<34} {:>8} {:>12}", "format", "M/s", "bytes/ref")?;
    for (name, format, file, bar) in formats {
        if !cli.wants(name) {
            continue;
        }
        let path = folder.path().join(file);
        let mut writer = create(&path, Some(format), PageSize::FOUR_KIB)?;
        for batch in &batches {
            writer.write(batch)?;
        }
        writer.finish()?;
        let ours = repeated(cli, references, || count(&path))?;
        let bytes = path.metadata()?.len() as f64 / references as f64;
        let note = match bar {
            0.0 => String::new(),
            bar if ours >= bar => format!("bar: {bar} M/s: reached"),
            bar => format!("bar: {bar} M/s: NOT REACHED"),
        };
        writeln!(out, "{name:<34} {ours:>8.1} {bytes:>12.2}  {note}")?;
        let yardstick: Option<(&str, Reading)> = match format {
            Format::ORACLE_GENERAL => Some(("record by record", records)),
            Format::CSV => Some(("the csv crate", csv_records)),
            _ => None,
        };
        if let Some((name, read)) = yardstick {
            let theirs = repeated(cli, references, || read(&path))?;
            let ratio = ours / theirs;
            writeln!(
                out,
                "{:<34} {theirs:>8.1} {:>12}  ours is {ratio:.1} x as fast",
                format!("  beside: {name}"),
                ""
            )?;
        }
        std::fs::remove_file(&path)?;
    }
    Ok(())
}

/// Median speed, in million references a second; each reading must find them all.
fn repeated(
    cli: &Cli,
    references: u64,
    read: impl Fn() -> anyhow::Result<u64>,
) -> anyhow::Result<f64> {
    let mut speeds = Vec::new();
    for _ in 0..cli.runs.max(1) {
        let watch = Watch::start(Clock::Cpu);
        let found = read()?;
        speeds.push(references as f64 / 1e6 / watch.seconds());
        anyhow::ensure!(
            found == references,
            "read {found} of {references} references"
        );
    }
    Ok(median(speeds))
}

fn count(path: &Path) -> anyhow::Result<u64> {
    let mut trace = open(path, &Options::default())?;
    let mut batch = ReferenceBatch::new();
    let mut references = 0;
    while trace.next_batch(&mut batch)? {
        references += batch.len() as u64;
    }
    Ok(references)
}

/// `oracle-general` as a record reader has it.
fn records(path: &Path) -> anyhow::Result<u64> {
    let mut input = BufReader::new(File::open(path)?);
    let mut record = [0; 24];
    let (mut references, mut all) = (0, 0_u64);
    while input.read_exact(&mut record).is_ok() {
        let [_, _, _, _, a, b, c, d, e, f, g, h, ..] = record;
        all ^= u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        references += 1;
    }
    std::hint::black_box(all);
    Ok(references)
}

/// CSV by the usual crate.
fn csv_records(path: &Path) -> anyhow::Result<u64> {
    let mut reader = csv::Reader::from_path(path)?;
    let mut record = csv::ByteRecord::new();
    let (mut references, mut all) = (0, 0_u64);
    while reader.read_byte_record(&mut record)? {
        let page = std::str::from_utf8(&record[0])?;
        all ^= page.parse::<u64>()?;
        references += 1;
    }
    std::hint::black_box(all);
    Ok(references)
}
