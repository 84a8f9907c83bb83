//! Page logs: throughput of records, and the host's CPU time for draining them.

use std::io::Write;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use plimsoll_estimator::working_set::{Prl, PrlOptions};
use plimsoll_flow::{PageNumber, PageSize, Whole as _};
use plimsoll_pagelog::log::{LogReader, LogWriter, Totals};
use plimsoll_pagelog::machine::{self, Config, CostModel, Mode, Outcome, Sink};
use plimsoll_pagelog::record::{Record, Walk};
use plimsoll_pagelog::ring::{Ring, RingWriter};
use plimsoll_pagelog::{BATCH_RECORDS, Description, PageLogError, RecordSource, TlbShape};

use crate::measure::{Clock, Watch, at_most, median};
use crate::{Cli, title};

/// The array of \[PRL\] §3.1: 400 MB.
const ARRAY_PAGES: u64 = 102_400;
/// Records of each VM.
const RECORDS_MAX: usize = 2_000_000;
/// Instructions between two pages of the array: `random`, a comparison, a store, a loop (\[PRL\] Fig. 2), as on x86.
const VISIT_INSTRUCTIONS: u32 = 64;
/// Records in the ring of `plimsoll run`.
const RING_RECORDS: u64 = 1 << 16;
/// What \[PRL\] §5.3.2 reports for a VM: percent of one CPU.
const CPU_PERCENT_MAX: f64 = 1.5;

/// What is measured.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// A page log to take the records from [default: an array of 400 MB, written page after page]
    #[arg(long)]
    log: Option<PathBuf>,
    /// VMs on the host at most
    #[arg(long, default_value_t = 10)]
    vms: usize,
    /// Clock of the modelled processor, in GHz
    #[arg(long, default_value_t = 3.4)]
    ghz: f64,
    /// Cycles that an instruction takes there; 34 at 3.4 GHz is an emulated guest of 100 million instructions a second
    #[arg(long, default_value_t = 1.0)]
    cycles_per_instruction: f64,
}

/// A VM's records in memory, from any place on and then from the start.
struct MemoryRecords<'a> {
    description: &'a Description,
    ahead: [&'a [Record]; 2],
}

impl RecordSource for MemoryRecords<'_> {
    fn description(&self) -> &Description {
        self.description
    }

    fn next_batch(&mut self, batch: &mut Vec<Record>) -> Result<bool, PageLogError> {
        batch.clear();
        for part in &mut self.ahead {
            let count = part.len().min(BATCH_RECORDS - batch.len());
            let (now, later) = part.split_at(count);
            batch.extend_from_slice(now);
            *part = later;
        }
        Ok(!batch.is_empty())
    }
}

/// What the handler took, in its order.
#[derive(Default)]
struct DrainedPages {
    pages: Vec<PageNumber>,
    /// VM, and how many pages.
    buffers: Vec<(usize, usize)>,
}

impl Sink for DrainedPages {
    fn drained(&mut self, vm: usize, pages: &[PageNumber]) {
        self.pages.extend_from_slice(pages);
        self.buffers.push((vm, pages.len()));
    }
}

/// The array's walks.
fn array() -> (Description, Vec<Record>) {
    let bytes = (ARRAY_PAGES * 4096).next_power_of_two();
    let description = Description {
        ram_bytes: bytes,
        below_4g_bytes: bytes,
        vcpus: 1,
        walks: true,
        references: false,
        only_between_marks: true,
        interval_instructions: None,
        filter_pages: 0,
        tlb: Some(TlbShape::default()),
        tlb2: None,
        itlb: None,
        plugin_api: 0,
        tlb_page: PageSize::FOUR_KIB,
    };
    let walk = |visit: u64| {
        let first = visit < ARRAY_PAGES;
        Record::Walk(Walk {
            vcpu: 0,
            frame: PageNumber(visit % ARRAY_PAGES),
            step_instructions: VISIT_INSTRUCTIONS,
            write: true,
            fetch: false,
            sets_accessed: first,
            sets_dirty: first,
        })
    };
    (description, (0..RECORDS_MAX as u64).map(walk).collect())
}

/// The walks of a log, its first ones, with the instructions between them.
fn walks_of(path: &std::path::Path) -> anyhow::Result<(Description, Vec<Record>)> {
    let mut log = LogReader::open(path)?;
    let (mut records, mut batch) = (Vec::new(), Vec::new());
    while records.len() < RECORDS_MAX && log.next_batch(&mut batch)? {
        let walks = batch
            .iter()
            .filter(|record| matches!(record, Record::Walk(_)));
        records.extend(walks);
    }
    records.truncate(RECORDS_MAX);
    anyhow::ensure!(!records.is_empty(), "{} has no page walks", path.display());
    Ok((log.description().clone(), records))
}

/// Runs a number of VMs with the same records, each a little ahead of the one before.
fn run_vms(
    vms: usize,
    config: &Config,
    description: &Description,
    records: &[Record],
    sink: &mut dyn Sink,
) -> anyhow::Result<Outcome> {
    let mut kept: Vec<_> = (0..vms)
        .map(|vm| {
            let (before, ahead) = records.split_at(vm * records.len() / vms);
            MemoryRecords {
                description,
                ahead: [ahead, before],
            }
        })
        .collect();
    let mut sources: Vec<_> = kept
        .iter_mut()
        .map(|vm| vm as &mut dyn RecordSource)
        .collect();
    Ok(machine::run(config, &mut sources, sink)?)
}

/// Runs the benchmark.
pub(crate) fn run(cli: &Cli, args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let (description, records) = match &args.log {
        Some(path) => walks_of(path)?,
        None => array(),
    };
    let what = match &args.log {
        Some(path) => path.display().to_string(),
        None => "an array of 400 MB, written page after page".to_owned(),
    };
    let millions = records.len() as f64 / 1e6;
    title(out, &format!("Page logs: {millions:.1} M walks of {what}"))?;
    writeln!(out, "\n{:<34} {:>8} {:>12}", "", "M/s", "bytes/record")?;
    speeds(cli, &description, &records, out)?;
    let costs = CostModel {
        instruction_thousandths: u32::whole(args.cycles_per_instruction * 1000.0),
        ..CostModel::default()
    };
    host(cli, args, costs, &description, &records, out)?;
    missed(costs, &description, &records, out)
}

/// Records a second through each part.
fn speeds(
    cli: &Cli,
    description: &Description,
    records: &[Record],
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut line = |name: &str, seconds: Vec<f64>, bytes: Option<f64>| {
        let speed = records.len() as f64 / 1e6 / median(seconds);
        let bytes = bytes.map_or(String::new(), |bytes| format!("{bytes:.2}"));
        writeln!(out, "{name:<34} {speed:>8.1} {bytes:>12}")
    };
    let repeated = |clock, work: &mut dyn FnMut() -> anyhow::Result<()>| {
        let run = |_| {
            let watch = Watch::start(clock);
            work()?;
            Ok(watch.seconds())
        };
        (0..cli.runs.max(1))
            .map(run)
            .collect::<anyhow::Result<Vec<_>>>()
    };
    let through_ring = repeated(Clock::Wall, &mut || {
        let ring = Ring::create(RING_RECORDS)?;
        let mut writer = RingWriter::attach(ring.path(), description)?;
        let mut reader = ring.wait_for_writer(Duration::ZERO, || true)?;
        thread::scope(|scope| {
            scope.spawn(move || {
                records.chunks(64).for_each(|records| writer.write(records));
                writer.finish()
            });
            let mut batch = Vec::new();
            while reader.next_batch(&mut batch)? {}
            Ok(())
        })
    })?;
    line("ring, two threads, wall time", through_ring, Some(8.0))?;
    let mut file = Vec::new();
    let writing = repeated(Clock::Cpu, &mut || {
        let mut writer = LogWriter::new(Vec::new(), description)?;
        writer.write(records)?;
        file = writer.finish(Totals::default())?;
        Ok(())
    })?;
    let bytes = Some(file.len() as f64 / records.len() as f64);
    line("file, written", writing, bytes)?;
    let reading = repeated(Clock::Cpu, &mut || {
        let mut reader = LogReader::new(&file[..], "the log")?;
        let mut batch = Vec::new();
        while reader.next_batch(&mut batch)? {}
        Ok(())
    })?;
    line("file, read", reading, bytes)?;
    for (name, mode) in [("model of PRL", Mode::Prl), ("model of PML", Mode::Pml)] {
        let modelled = repeated(Clock::Cpu, &mut || {
            let config = Config::new(mode);
            run_vms(
                1,
                &config,
                description,
                records,
                &mut DrainedPages::default(),
            )?;
            Ok(())
        })?;
        line(name, modelled, None)?;
    }
    Ok(())
}

/// What the estimators of several VMs take of the host's CPU: by the model, and measured here at the same rate.
fn host(
    cli: &Cli,
    args: &Args,
    costs: CostModel,
    description: &Description,
    records: &[Record],
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    writeln!(
        out,
        "\nPRL, percent of one CPU, if guests ran at {} GHz, {} cycles an instruction and {} a walk\n",
        args.ghz, args.cycles_per_instruction, costs.walk_cycles
    )?;
    let heads = [
        "VMs", "walks/s", "model", "per VM", "measured", "per VM", "ns/entry", "missed %",
    ];
    for head in heads {
        write!(out, "{head:>10}")?;
    }
    writeln!(out)?;
    let config = Config {
        costs,
        ..Config::new(Mode::Prl)
    };
    for vms in 1..=args.vms.max(1) {
        let mut taken = DrainedPages::default();
        let outcome = run_vms(vms, &config, description, records, &mut taken)?;
        let guest_seconds = outcome.host.elapsed_cycles as f64 / (args.ghz * 1e9);
        let mut times = Vec::new();
        for _ in 0..cli.runs.max(1) {
            let mut estimators = vec![Prl::new(PrlOptions::default()); vms];
            let watch = Watch::start(Clock::Cpu);
            let mut rest = &taken.pages[..];
            for &(vm, count) in &taken.buffers {
                let (pages, later) = rest.split_at(count);
                estimators[vm].log(pages);
                rest = later;
            }
            times.push(watch.seconds());
        }
        let seconds = median(times);
        let walks: u64 = outcome.vms.iter().map(|vm| vm.walks).sum();
        let missed: u64 = outcome.vms.iter().map(|vm| vm.missed_in_handler).sum();
        let each = vms as f64;
        let model = 100.0 * outcome.host.load();
        let measured = 100.0 * seconds / guest_seconds;
        writeln!(
            out,
            "{vms:>10}{:>9.1}M{model:>10.2}{:>10.2}{measured:>10.2}{:>10.2}{:>10.1}{:>10.2}  {}",
            walks as f64 / guest_seconds / 1e6,
            model / each,
            measured / each,
            1e9 * seconds / taken.pages.len() as f64,
            100.0 * missed as f64 / walks as f64,
            at_most(measured / each, CPU_PERCENT_MAX, " %")
        )?;
    }
    Ok(())
}

/// How many pages one VM's log misses, and what that costs, over what taking an entry costs.
fn missed(
    costs: CostModel,
    description: &Description,
    records: &[Record],
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    writeln!(out, "\nOne VM, over what taking an entry costs\n")?;
    let heads = [
        "cycles",
        "missed, 512",
        "missed, 1024",
        "PRL: host",
        "PML: guest",
    ];
    for head in heads {
        write!(out, "{head:>14}")?;
    }
    writeln!(out)?;
    for entry_cycles in [0, 5, 20, 50, 100, 500] {
        let costs = CostModel {
            entry_cycles,
            ..costs
        };
        let outcome = |mode, buffer_entries| {
            let config = Config {
                mode,
                buffer_entries,
                costs,
            };
            run_vms(
                1,
                &config,
                description,
                records,
                &mut DrainedPages::default(),
            )
        };
        let (prl, large) = (outcome(Mode::Prl, 512)?, outcome(Mode::Prl, 1024)?);
        let pml = outcome(Mode::Pml, 512)?;
        let share = |outcome: &Outcome| {
            let vm = outcome.vms[0];
            100.0 * vm.missed_in_handler as f64 / vm.walks.max(1) as f64
        };
        writeln!(
            out,
            "{entry_cycles:>14}{:>12.2} %{:>12.2} %{:>12.2} %{:>12.2} %",
            share(&prl),
            share(&large),
            100.0 * prl.host.load(),
            100.0 * pml.vms[0].slowdown()
        )?;
    }
    Ok(())
}
