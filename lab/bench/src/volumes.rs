//! Curves of as many volumes as Tencent's traces have, from one reading of a file, beside the curve of one volume.
//!
//! Both files have the same number of requests of one page, in Alibaba's layout. Volumes are chosen by Zipf's law, as are
//! pages of a volume, so that some volumes have a hundred thousand requests and most a few hundred. Files are read in turn, from
//! the page cache to the last curve; curves of many volumes are ended on all processors.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use plimsoll_estimator::ByGroup;
use plimsoll_estimator::registry::OptionValue;
use plimsoll_flow::{ReferenceBatch, Source};
use plimsoll_source::{Format, Grouping, Options, open};

use crate::measure::{Clock, Watch, at_least, median};
use crate::registered::{Set, registered};
use crate::workload::{Kind, Law};
use crate::{Cli, title};

/// Volumes of Tencent's traces.
const VOLUMES: u64 = 4_030;
/// Pages that a volume's requests are distributed over.
const PAGES: u64 = 20_000;
/// Rate of all volumes over that of one, at least.
const RATIO: f64 = 0.5;

const LINES: [(&str, Set); 3] = [
    ("lru", &[]),
    (
        "shards-max",
        &[("max-samples", OptionValue::Count(SAMPLES))],
    ),
    ("aet", &[]),
];

const SAMPLES: std::num::NonZeroUsize = std::num::NonZeroUsize::new(1024).unwrap();

pub(crate) fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<()> {
    let requests = cli.millions * 1_000_000 / 4;
    title(
        out,
        &format!(
            "Curves of {VOLUMES} volumes from one reading, {requests} requests in Alibaba's layout"
        ),
    )?;
    let folder = tempfile::tempdir()?;
    let [one, many] = ["one.csv", "many.csv"].map(|name| folder.path().join(name));
    write_trace(&one, requests, 1)?;
    write_trace(&many, requests, VOLUMES)?;
    writeln!(
        out,
        "{:<14}{:>10}{:>12}{:>8}{:>14}{:>14}",
        "", "one, M/s", "all, M/s", "ratio", "of CPU time", "memory, MiB"
    )?;
    for (name, set) in LINES {
        if !cli.wants(name) {
            continue;
        }
        let (mut of_one, mut of_many) = (Vec::new(), Vec::new());
        let (mut ratios, mut ratios_of_cpu) = (Vec::new(), Vec::new());
        let mut memory_bytes = 0;
        for _ in 0..cli.runs.max(1) {
            let ([rate, cpu_rate], _) = measured(&one, requests, 1, name, set)?;
            let ([rate_of_many, cpu_rate_of_many], bytes) =
                measured(&many, requests, VOLUMES, name, set)?;
            of_one.push(rate);
            of_many.push(rate_of_many);
            ratios.push(rate_of_many / rate);
            ratios_of_cpu.push(cpu_rate_of_many / cpu_rate);
            memory_bytes = bytes;
        }
        let ratio = median(ratios);
        writeln!(
            out,
            "{name:<14}{:>10.2}{:>12.2}{ratio:>8.2}{:>14.2}{:>14}  {}",
            median(of_one),
            median(of_many),
            median(ratios_of_cpu),
            memory_bytes >> 20,
            at_least(ratio, RATIO, "")
        )?;
        out.flush()?;
    }
    Ok(())
}

/// Writes requests of one page each.
fn write_trace(path: &Path, requests: u64, volumes: u64) -> anyhow::Result<()> {
    let kind = |pages| Kind::new(Law::Zipf, pages);
    let pages = kind(PAGES).batches(requests)?;
    // Of another length, so that the two sequences are independent.
    let volumes = kind(volumes).batches(requests + 1)?;
    let pages = pages.iter().flat_map(ReferenceBatch::pages);
    let volumes = volumes.iter().flat_map(ReferenceBatch::pages).skip(1);
    let mut file = BufWriter::new(File::create(path)?);
    for ((page, volume), time_us) in pages.zip(volumes).zip(1_577_808_000_000_000_u64..) {
        writeln!(file, "{volume},R,{},4096,{time_us}", page.0 << 12)?;
    }
    Ok(file.flush()?)
}

/// Million references a second of time and of CPU time from the file to all curves, and the estimators' memory.
fn measured(
    path: &Path,
    requests: u64,
    volumes: u64,
    name: &str,
    set: Set,
) -> anyhow::Result<([f64; 2], usize)> {
    let options = Options {
        format: Some(Format::ALIBABA),
        groups: (volumes > 1).then_some(Grouping::Device),
        ..Options::default()
    };
    let watches = [Clock::Wall, Clock::Cpu].map(Watch::start);
    let mut source = open(path, &options)?;
    let mut batch = ReferenceBatch::new();
    let mut all = ByGroup::new(|| registered(name, set, 0));
    let mut one = registered(name, set, 0);
    let mut references = 0;
    while source.next_batch(&mut batch)? {
        match options.groups {
            Some(_) => all.observe(batch.pages(), &batch.details().groups),
            None => one.observe(batch.pages()),
        }
        references += batch.len() as u64;
    }
    anyhow::ensure!(
        references == requests,
        "read {references} of {requests} references"
    );
    let memory_bytes = match options.groups {
        Some(_) => {
            let memory_bytes = all.memory_bytes();
            for curve in all.finish(|_, estimator| estimator.curve()) {
                curve?;
            }
            memory_bytes
        }
        None => {
            one.curve()?;
            one.memory_bytes()
        }
    };
    let rates = watches.map(|watch| references as f64 / 1e6 / watch.seconds());
    Ok((rates, memory_bytes))
}
