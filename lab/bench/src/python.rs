//! The Python package beside the crates that it wraps: the same pages, from an array of numpy and from batches.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::Context as _;
use plimsoll_estimator::registry::OptionValue;
use plimsoll_flow::ReferenceBatch;

use crate::measure::{Clock, Watch, at_least, median};
use crate::registered::{Set, registered};
use crate::workload::{Kind, Law};
use crate::{Cli, title};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Interpreter that has plimsoll-mrc
    #[arg(long, default_value = "target/python/venv/bin/python")]
    interpreter: PathBuf,
}

const LINES: [(&str, Set, &str); 7] = [
    ("lru", &[], ""),
    ("shards", &[], ""),
    (
        "shards",
        &[("rate", OptionValue::Rate(0.001))],
        "rate=0.001",
    ),
    ("shards-max", &[], ""),
    ("aet", &[], ""),
    ("counter-stacks", &[], ""),
    ("footprint", &[], ""),
];

/// Rate of numpy batches over that of Rust, at least.
const RATIO: f64 = 0.95;

pub(crate) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        "Python beside Rust, million references a second of CPU time",
    )?;
    let kind = Kind::new(Law::Zipf, 1_000_000);
    let batches = kind.batches(cli.millions * 1_000_000)?;
    let references: usize = batches.iter().map(ReferenceBatch::len).sum();
    let millions = references as f64 / 1e6;
    let mut file = tempfile::NamedTempFile::new()?;
    for batch in &batches {
        let bytes = batch.pages().iter().flat_map(|page| page.0.to_ne_bytes());
        file.write_all(&bytes.collect::<Vec<_>>())?;
    }
    let mut python = Command::new(&args.interpreter)
        .arg("python/bench/rates.py")
        .arg(file.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start '{}'", args.interpreter.display()))?;
    let mut requests = python.stdin.take().context("no standard input")?;
    let mut answers = BufReader::new(python.stdout.take().context("no standard output")?).lines();
    writeln!(
        out,
        "{kind}\n{:<28}{:>8}{:>8}{:>8}",
        "", "Rust", "numpy", "ratio"
    )?;
    for (name, set, options) in LINES {
        let label = format!("{name} {options}");
        if !cli.wants(&label) {
            continue;
        }
        let (mut rust, mut numpy) = (Vec::new(), Vec::new());
        for _ in 0..cli.runs.max(1) {
            let mut estimator = registered(name, set, 0);
            let watch = Watch::start(Clock::Cpu);
            batches
                .iter()
                .for_each(|batch| estimator.observe(batch.pages()));
            estimator.curve()?;
            rust.push(millions / watch.seconds());
            writeln!(requests, "{label}")?;
            let answer = answers.next().context("Python ended")??;
            numpy.push(millions / answer.parse::<f64>()?);
        }
        let ratios = numpy.iter().zip(&rust).map(|(numpy, rust)| numpy / rust);
        let ratio = median(ratios.collect());
        writeln!(
            out,
            "{label:<28}{:>8.1}{:>8.1}{ratio:>8.2}  {}",
            median(rust),
            median(numpy),
            at_least(ratio, RATIO, "")
        )?;
        out.flush()?;
    }
    drop(requests);
    let status = python.wait()?;
    anyhow::ensure!(status.success(), "{}: {status}", args.interpreter.display());
    Ok(())
}
