//! Whole processes from a trace's file to its curve: start-up, reading, estimating and printing.
//!
//! The yardstick is what one would write in an afternoon: records read one by one, exact LRU by a hash table and a Fenwick
//! tree. The bound is a program that only reads the file into one aligned buffer and adds up the pages' numbers. All
//! programs run in turn, and ratios are taken within a round, so that a change of the machine's speed affects both sides.

use std::fs::{self, File};
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::Context;
use plimsoll_estimator::Estimator;
use plimsoll_flow::{AccessKind, PageCount, PageNumber, PageSize, ReferenceBatch};
use plimsoll_source::{Format, create};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::child::ourselves;
use crate::measure::{at_least, median};
use crate::workload::{Kind, Law};
use crate::yardsticks::FenwickLru;
use crate::{Cli, title};

const RECORD_BYTES: usize = 24;

/// Size of the bound's buffer: of those from 48 KiB to 8 MiB none was faster.
const BUFFER_BYTES: usize = RECORD_BYTES << 14;
const LINE_BYTES: usize = 64;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// The program to measure [default: the `plimsoll` beside this one]
    #[arg(long)]
    program: Option<PathBuf>,
}

/// A yardstick as a process of its own.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct YardstickArgs {
    yardstick: Yardstick,
    trace: PathBuf,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Yardstick {
    Fenwick,
    ReadOnly,
}

/// Estimators of `plimsoll mrc`, with the least ratio to the yardstick that is wanted of them; 0 for none.
const LINES: [(&str, &[&str], f64); 3] = [
    (
        "SHARDS at 1/100",
        &["--estimator", "shards", "--rate", "0.01"],
        100.0,
    ),
    ("AET", &["--estimator", "aet"], 15.0),
    ("exact LRU", &["--estimator", "lru"], 0.0),
];

/// Measures the programs on files of two kinds of references.
pub(crate) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "From file to curve: whole processes, oracle-general of {} M references in the page cache, median of {} rounds",
            cli.millions, cli.runs
        ),
    )?;
    let program = match &args.program {
        Some(program) => program.clone(),
        None => std::env::current_exe()?.with_file_name("plimsoll"),
    };
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("t.oracleGeneral");
    for law in [Law::Zipf, Law::Uniform] {
        let kind = Kind::new(law, 1_000_000);
        if !cli.wants(&kind.to_string()) {
            continue;
        }
        let mut writer = create(&path, Some(Format::ORACLE_GENERAL), PageSize::FOUR_KIB)?;
        for batch in &kind.batches(cli.millions * 1_000_000)? {
            writer.write(batch)?;
        }
        writer.finish()?;
        let yardstick = |name: &str| -> anyhow::Result<f64> {
            let mut command = ourselves(["file-yardstick", name])?;
            cpu_seconds(command.arg(&path))
        };
        let (mut plain, mut bound) = (Vec::new(), Vec::new());
        let mut ours = vec![Vec::new(); LINES.len()];
        for _ in 0..cli.runs.max(1) {
            plain.push(yardstick("fenwick")?);
            bound.push(yardstick("read-only")?);
            for (times, (_, options, _)) in ours.iter_mut().zip(LINES) {
                let mut command = Command::new(&program);
                let command = command.arg("mrc").args(options).arg(&path);
                times.push(cpu_seconds(command)?);
            }
        }
        let columns = ["CPU ms", "yardstick / it", "it / bound"];
        let [milliseconds, ratio, above] = columns;
        writeln!(
            out,
            "\n{kind:<34} {milliseconds:>8} {ratio:>16} {above:>12}"
        )?;
        let ratios = |times: &[f64], to: &[f64]| {
            let pairs = times.iter().zip(to);
            median(pairs.map(|(one, other)| one / other).collect())
        };
        let named = LINES.iter().map(|&(name, _, bar)| (name, bar));
        let named = named
            .zip(&ours)
            .map(|((name, bar), times)| (name, bar, times));
        let others = [
            ("  beside: hash table, Fenwick tree", 0.0, &plain),
            ("  beside: only reads the file", 0.0, &bound),
        ];
        for (name, bar, times) in named.chain(others) {
            let ratio = ratios(&plain, times);
            let note = match bar {
                0.0 => String::new(),
                bar => at_least(ratio, bar, " x"),
            };
            writeln!(
                out,
                "{name:<34} {:>8.1} {ratio:>16.1} {:>12.2}  {note}",
                median(times.clone()) * 1e3,
                ratios(times, &bound),
            )?;
        }
        out.flush()?;
    }
    Ok(())
}

/// CPU time of a program with one thread, from its start to its end.
fn cpu_seconds(command: &mut Command) -> anyhow::Result<f64> {
    let mut child = command.stdout(Stdio::null()).spawn()?;
    let seconds = cpu_seconds_at_end(&child);
    let status = child.wait()?;
    anyhow::ensure!(status.success(), "{command:?}: {status}");
    seconds
}

/// Waits for the end of a process. Its account remains readable until it is reaped.
fn cpu_seconds_at_end(child: &Child) -> anyhow::Result<f64> {
    let pid = Pid::from_child(child);
    waitid(
        WaitId::Pid(pid),
        WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
    )?;
    let account = fs::read_to_string(format!("/proc/{}/schedstat", child.id()))?;
    let nanoseconds = account.split_whitespace().next();
    let nanoseconds: u64 = nanoseconds.context("schedstat is empty")?.parse()?;
    Ok(nanoseconds as f64 / 1e9)
}

/// Runs a yardstick.
pub(crate) fn run_yardstick(args: &YardstickArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    match args.yardstick {
        Yardstick::Fenwick => fenwick(&args.trace, out),
        Yardstick::ReadOnly => read_only(&args.trace, out),
    }
}

/// Exact LRU of records that are read one by one; prints the curve.
fn fenwick(path: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut input = BufReader::new(File::open(path)?);
    let mut record = [0; RECORD_BYTES];
    let mut lru = FenwickLru::new();
    let mut batch = ReferenceBatch::new();
    loop {
        batch.advance();
        while !batch.is_full() && input.read_exact(&mut record).is_ok() {
            batch.push(PageNumber(page_of(&record)), AccessKind::Unknown);
        }
        if batch.is_empty() {
            break;
        }
        lru.observe(batch.pages());
    }
    let curve = lru.curve()?;
    for step in 0..=20 {
        let size = PageCount(50_000 * step);
        writeln!(out, "{size} {}", curve.miss_ratio(size))?;
    }
    Ok(())
}

/// What cannot be avoided: the kernel's copy, and one access to each record.
fn read_only(path: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut input = File::open(path)?;
    let mut memory = vec![0; BUFFER_BYTES + LINE_BYTES];
    let start = memory.as_ptr().align_offset(LINE_BYTES).min(LINE_BYTES);
    let buffer = &mut memory[start..][..BUFFER_BYTES];
    let mut all = 0;
    loop {
        let read = input.read(buffer)?;
        if read == 0 {
            break;
        }
        let (records, _) = buffer[..read].as_chunks();
        all = records
            .iter()
            .fold(all, |all, record| all ^ page_of(record));
    }
    Ok(writeln!(out, "{all}")?)
}

fn page_of(record: &[u8; RECORD_BYTES]) -> u64 {
    let [_, _, _, _, a, b, c, d, e, f, g, h, ..] = *record;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}
