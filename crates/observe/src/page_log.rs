//! Recording of a page log of an emulated machine: the arguments that `plimsoll run --page-log` adds to QEMU's command
//! line, and the thread that moves the records from the ring into a file.
//!
//! The plugin (`qemu/pagelog`) reports walks and references; nothing is evaluated here. A full ring stops the machine
//! until this thread has emptied it. If the thread fails (a full disk), it detaches, and the machine continues
//! unrecorded.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_flow::Accelerator;
use plimsoll_pagelog::log::{LogWriter, Totals};
use plimsoll_pagelog::record::Record;
use plimsoll_pagelog::ring::{Ring, RingReader};
use plimsoll_pagelog::{RecordSource as _, TlbShape};
use plimsoll_protocol::size::{Count, QuantityError};
use plimsoll_vm::{CommandLine, escape_commas, qemu_options};

use plimsoll_output::{bail_usage, refuse_block_device};

/// Capacity of the ring in records: 8 MiB.
const RING_RECORDS: u64 = 1 << 20;
/// Time limit for QEMU to load the plugin.
const ATTACH_MAX: Duration = Duration::from_secs(60);
/// Directory of the plugins, below any directory above the current one or above this program.
const DIRECTORY: &str = "target/guest";
/// Directory of the plugins on a host on which Plimsoll is installed.
const INSTALLED: &str = "/usr/lib/plimsoll";
const GIB: u64 = 1 << 30;

/// Recording of an emulated machine.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Page log")]
pub struct PageLogArgs {
    /// Record the machine's page walks into this file; requires emulation (TCG)
    #[arg(long, value_name = "FILE")]
    pub page_log: Option<PathBuf>,
    /// Length of an interval in instructions of all vCPUs together, such as 10M
    #[arg(long, requires = "page_log", value_name = "COUNT", default_value = "10M", value_parser = instructions)]
    pub interval: Option<u64>,
    /// Also record references, except those to a vCPU's most recently used pages
    #[arg(long, requires = "page_log")]
    pub references: bool,
    /// Number of most recently used pages whose references are not recorded [default: 64]
    #[arg(long, requires = "references", conflicts_with = "tlb_page", value_name = "PAGES", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub filter: Option<u32>,
    /// Record only references, no walks
    #[arg(long, requires = "references", conflicts_with = "tlb_page")]
    pub no_walks: bool,
    /// Record only between two marks of the guest (those of guest/workload)
    #[arg(long, requires = "page_log")]
    pub between_marks: bool,
    /// The TLB of a vCPU: entries and ways [default: 64x4]
    #[arg(long, requires = "page_log", value_name = "ENTRIESxWAYS")]
    pub tlb: Option<TlbShape>,
    /// Its second level [default: none]
    #[arg(long, requires = "page_log", value_name = "ENTRIESxWAYS")]
    pub tlb2: Option<TlbShape>,
    /// Its TLB for instructions; without one, fetches are not recorded [default: none]
    #[arg(long, requires = "page_log", value_name = "ENTRIESxWAYS")]
    pub itlb: Option<TlbShape>,
    /// Page size of these TLBs, such as 2M; the 4 KiB pages within are then not distinguished [default: 4K]
    #[arg(long, requires = "page_log", conflicts_with = "references", value_name = "SIZE", value_parser = tlb_page)]
    pub tlb_page: Option<u64>,
    /// QEMU's plugin [default: plimsoll-pagelog-VERSION.so in target/guest or /usr/lib/plimsoll]
    #[arg(long, requires = "page_log", value_name = "FILE")]
    pub plugin: Option<PathBuf>,
}

fn tlb_page(text: &str) -> Result<u64, String> {
    match text {
        "4K" | "4KiB" | "4096" => Ok(4096),
        "2M" | "2MiB" | "2097152" => Ok(2 << 20),
        _ => Err(format!("'{text}': expected 4K or 2M")),
    }
}

/// Parses a number of instructions, such as `10M`.
fn instructions(text: &str) -> Result<u64, String> {
    let Count(number) = text
        .parse()
        .map_err(|error: QuantityError| error.to_string())?;
    match number.get() {
        ..1000 => Err(format!("'{text}': expected at least 1000")),
        number => Ok(number),
    }
}

/// A page log prepared for recording.
pub struct PageLog {
    ring: Ring,
    file: File,
    path: PathBuf,
    argument: String,
}

impl PageLog {
    /// Creates the ring and the file for a machine of QEMU's command line; `None` if no recording is requested.
    ///
    /// # Errors
    ///
    /// A [`UsageError`](plimsoll_output::exit::UsageError) for a machine that cannot be recorded; an error if the
    /// plugin is missing, or if the ring or the file cannot be created.
    pub fn prepare(
        args: &PageLogArgs,
        qemu: &OsStr,
        line: &[String],
    ) -> anyhow::Result<Option<Self>> {
        let Some(path) = &args.page_log else {
            return Ok(None);
        };
        let memory = Memory::of(line)?;
        let plugin = match &args.plugin {
            Some(plugin) => plugin.clone(),
            None => find_plugin(plugin_for(&version_of(qemu)?)?)?,
        };
        let plugin = plugin
            .canonicalize()
            .with_context(|| format!("the plugin {}", plugin.display()))?;
        let ring = Ring::create(RING_RECORDS)?;
        let text = |path: &Path| match path.to_str() {
            Some(text) => Ok(escape_commas(text)),
            None => Err(anyhow::anyhow!("{} is not UTF-8", path.display())),
        };
        let mut argument = format!("file={}", text(&plugin)?);
        let mut option = |key: &str, value: &dyn std::fmt::Display| {
            argument.push_str(&format!(",{key}={value}"));
        };
        option("ring", &text(ring.path())?);
        option("ram", &memory.bytes);
        option("below_4g", &memory.below_4g_bytes);
        if let Some(interval) = args.interval {
            option("interval_instructions", &interval);
        }
        let on = |set| if set { "on" } else { "off" };
        option("walks", &on(!args.no_walks));
        option("references", &on(args.references));
        option("marks", &on(args.between_marks));
        if let Some(filter) = args.filter {
            option("filter", &filter);
        }
        for (key, shape) in [("tlb", args.tlb), ("tlb2", args.tlb2), ("itlb", args.itlb)] {
            if let Some(shape) = shape {
                option(key, &shape);
            }
        }
        if let Some(bytes) = args.tlb_page {
            option("tlb_page", &bytes);
        }
        // An existing file is overwritten when the machine runs, not before.
        let mut options = File::options();
        options.write(true).create(true).truncate(false);
        let file = refuse_block_device(path)
            .and_then(|()| options.open(path))
            .with_context(|| format!("cannot create the page log {}", path.display()))?;
        Ok(Some(Self {
            ring,
            file,
            path: path.clone(),
            argument,
        }))
    }

    /// Arguments of QEMU that load the plugin.
    pub fn arguments(&self) -> [OsString; 2] {
        ["-plugin".into(), self.argument.clone().into()]
    }

    /// Starts recording a QEMU with [`PageLog::arguments`], which must be started now.
    pub fn record(self) -> Recording {
        self.record_and(|_| ())
    }

    /// As [`PageLog::record`]; also passes each batch of records to `inspect`, in the recording thread.
    pub fn record_and(self, inspect: impl FnMut(&[Record]) + Send + 'static) -> Recording {
        let lives = Arc::new(AtomicBool::new(true));
        let alive = {
            let lives = Arc::clone(&lives);
            move || lives.load(Ordering::Acquire)
        };
        let path = self.path;
        let (ring, file) = (self.ring, self.file);
        let thread = thread::spawn(move || {
            let reader = ring.wait_for_writer(ATTACH_MAX, alive)?;
            if file.metadata()?.is_file() {
                file.set_len(0)?;
            }
            record(reader, file, inspect)
        });
        Recording {
            path,
            lives,
            thread: Some(thread),
        }
    }
}

/// A page log being recorded by a thread.
pub struct Recording {
    path: PathBuf,
    lives: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<RecordingSummary>>>,
}

impl Drop for Recording {
    fn drop(&mut self) {
        // The thread ends when no more records arrive.
        self.lives.store(false, Ordering::Release);
    }
}

impl Recording {
    /// Stores the last records of a QEMU that has ended.
    ///
    /// # Errors
    ///
    /// Why the log is truncated or was not started; the records before are in the file.
    pub fn end(mut self) -> anyhow::Result<RecordingSummary> {
        self.lives.store(false, Ordering::Release);
        let joined = self.thread.take().map(JoinHandle::join);
        match joined.context("the page log has ended before")? {
            Ok(recorded) => recorded.with_context(|| format!("page log {}", self.path.display())),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Results of a recording.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecordingSummary {
    /// Records in the log.
    pub records: u64,
    /// Page walks among them.
    pub walks: u64,
    /// References among them.
    pub references: u64,
    /// Intervals that ended.
    pub intervals: u64,
    /// Instructions that the vCPUs executed while they were recorded.
    pub instructions: u64,
    /// Time from the first record to the end, in s.
    pub seconds: f64,
    /// Size of the file.
    pub bytes: u64,
    /// Times that the machine waited because the ring was full.
    pub waits: u64,
    /// Records that the machine dropped because the reader was gone.
    pub lost: u64,
}

impl std::fmt::Display for RecordingSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let per_record = self.bytes as f64 / self.records.max(1) as f64;
        let mips = self.instructions as f64 / self.seconds.max(1e-3) / 1e6;
        write!(
            f,
            "page log: {} records ({} walks, {} references, {} intervals), {} bytes ({per_record:.2} a record); \
             {:.1} M instructions in {:.1} s ({mips:.1} MIPS, emulated by TCG); {} waits, {} lost",
            self.records,
            self.walks,
            self.references,
            self.intervals,
            self.bytes,
            self.instructions as f64 / 1e6,
            self.seconds,
            self.waits,
            self.lost
        )
    }
}

fn record(
    mut reader: RingReader,
    file: File,
    mut inspect: impl FnMut(&[Record]),
) -> anyhow::Result<RecordingSummary> {
    let mut log = LogWriter::new(BufWriter::new(file), reader.description())?;
    let mut seen = Counts {
        is_begun_later: reader.description().only_between_marks,
        ..Counts::default()
    };
    let mut batch = Vec::new();
    loop {
        let more = reader.next_batch(&mut batch);
        log.write(&batch)?;
        seen.take(&batch);
        inspect(&batch);
        match more {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                log.cut()?;
                return Err(error.into());
            }
        }
    }
    let (waits, lost) = (reader.waits(), reader.lost());
    let seconds = seen
        .begin
        .map_or(0.0, |begin| begin.elapsed().as_secs_f64());
    let records = log.records();
    let file = log.finish(Totals { waits, lost })?;
    let bytes = file.get_ref().metadata().context("the log's size")?.len();
    Ok(RecordingSummary {
        records,
        walks: seen.walks,
        references: seen.references,
        intervals: seen.intervals,
        instructions: seen.clocks.values().map(|(first, last)| last - first).sum(),
        seconds,
        bytes,
        waits,
        lost,
    })
}

/// Sums over the records so far.
#[derive(Default)]
struct Counts {
    begin: Option<Instant>,
    walks: u64,
    references: u64,
    intervals: u64,
    /// Whether vCPUs are recorded only from a mark on.
    is_begun_later: bool,
    /// First and last clock of each vCPU.
    clocks: BTreeMap<u8, (u64, u64)>,
}

impl Counts {
    fn take(&mut self, batch: &[Record]) {
        if !batch.is_empty() {
            self.begin.get_or_insert_with(Instant::now);
        }
        for record in batch {
            match *record {
                Record::Walk(walk) => {
                    self.walks += 1;
                    let clock = self.clocks.entry(walk.vcpu).or_default();
                    clock.1 = clock.1.saturating_add(walk.step_instructions.into());
                }
                Record::Clock { vcpu, instructions } => {
                    // The first record of a vCPU starts its recording.
                    let begin = if self.is_begun_later { instructions } else { 0 };
                    let clock = self.clocks.entry(vcpu).or_insert((begin, 0));
                    clock.1 = instructions.max(clock.0);
                }
                Record::Interval { .. } => self.intervals += 1,
                Record::Enter { .. } => self.references += 1,
                _ => {}
            }
        }
    }
}

/// The machine's memory layout, as required by the plugin.
#[derive(Debug, PartialEq, Eq)]
struct Memory {
    bytes: u64,
    below_4g_bytes: u64,
}

impl Memory {
    /// Parses QEMU's command line.
    fn of(line: &[String]) -> anyhow::Result<Self> {
        let parsed = CommandLine::parse(line);
        if parsed.accelerators.first() == Some(&Accelerator::Kvm) {
            bail_usage!("--page-log: QEMU must emulate the machine: -accel tcg, not KVM");
        }
        // With several backends, the start of RAM is not known; the plugin counts from the first.
        let [ram] = parsed.backends.as_slice() else {
            bail_usage!(
                "--page-log: a machine of several memory backends (-object memory-backend-..) cannot be recorded"
            )
        };
        let bytes = ram.size_bytes;
        if let Some(set) = parsed.memory_bytes.filter(|set| *set != bytes) {
            bail_usage!(
                "--page-log: -m sets {set} bytes, but the memory backend has {bytes}: only a machine whose RAM is the backend can be recorded"
            );
        }
        let (mut machine, mut moved) = (String::from("pc"), false);
        for (option, values) in qemu_options(line) {
            match option {
                "machine" | "M" => {
                    if let Some(name) = values.get("type").or(values.implied()) {
                        name.clone_into(&mut machine);
                    }
                    moved |= values.get("max-ram-below-4g").is_some();
                }
                "numa" => bail_usage!(
                    "--page-log: a machine of several memory nodes (-numa) cannot be recorded"
                ),
                _ => {}
            }
        }
        let Some(below) = (if moved {
            None
        } else {
            below_4g(&machine, bytes)
        }) else {
            bail_usage!(
                "--page-log: where this machine's memory above 2 GiB lies is not known: use -machine q35 or pc, \
                 without max-ram-below-4g"
            );
        };
        Ok(Self {
            bytes,
            below_4g_bytes: below,
        })
    }
}

/// The part of a machine's RAM below 4 GiB, as QEMU splits it; `None` if that is not known.
fn below_4g(machine: &str, bytes: u64) -> Option<u64> {
    let of_kind = |kind: &str| machine == kind || machine.starts_with(&format!("pc-{kind}-"));
    // For RAM of at least the first size, only the second lies below.
    let (from, below) = if of_kind("q35") {
        (0xb000_0000, 2 * GIB)
    } else if machine == "pc" || of_kind("i440fx") {
        (0xe000_0000, 3 * GIB)
    } else if machine == "microvm" {
        (3 * GIB, 3 * GIB)
    } else {
        return (bytes <= 2 * GIB).then_some(bytes);
    };
    Some(if bytes < from { bytes } else { below })
}

/// Queries the version of a QEMU, such as `7.2.22`.
fn version_of(qemu: &OsStr) -> anyhow::Result<String> {
    let output = Command::new(qemu)
        .arg("--version")
        .output()
        .with_context(|| format!("cannot run {}", qemu.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text
        .split_ascii_whitespace()
        .skip_while(|word| *word != "version")
        .nth(1);
    match version {
        Some(version) if output.status.success() => Ok(version.to_owned()),
        _ => anyhow::bail!("{} did not print its version", qemu.display()),
    }
}

/// The build of the plugin for a version of QEMU.
fn plugin_for(version: &str) -> anyhow::Result<&'static str> {
    let mut numbers = version
        .split('.')
        .map_while(|number| number.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(6..=7), _) | (Some(8), Some(0..=1)) => Ok("7.2"),
        (Some(10..), _) => Ok("10"),
        _ => bail_usage!("--page-log: there is no plugin for QEMU {version}, only for 7.2 and 10"),
    }
}

fn find_plugin(build: &str) -> anyhow::Result<PathBuf> {
    let name = format!("plimsoll-pagelog-{build}.so");
    let starts = [std::env::current_dir().ok(), std::env::current_exe().ok()];
    let above = starts.iter().flatten().flat_map(|start| start.ancestors());
    let mut places = above
        .map(|above| above.join(DIRECTORY))
        .chain([INSTALLED.into()]);
    let found = places.find_map(|place| {
        let file = place.join(&name);
        file.is_file().then_some(file)
    });
    found.with_context(|| {
        format!("there is no {name} in {DIRECTORY} or {INSTALLED}: `./dev setup` builds it, or see --plugin")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn memory_is_divided_as_the_machine_divides_it() {
        for (text, bytes, below_4g_bytes) in [
            ("", 128 << 20, 128 << 20),
            ("-m 2G -M q35", 2 * GIB, 2 * GIB),
            ("-m 2815M -machine q35", 2815 << 20, 2815 << 20),
            ("-m 2816M -machine q35,accel=tcg", 2816 << 20, 2 * GIB),
            ("-machine type=pc-q35-7.2 -m 5G", 5 * GIB, 2 * GIB),
            ("-m 3G", 3 * GIB, 3 * GIB),
            ("-m 3584M", 3584 << 20, 3 * GIB),
            ("-m 5G -M pc-i440fx-9.0", 5 * GIB, 3 * GIB),
            ("-m 5G -M microvm", 5 * GIB, 3 * GIB),
            ("-m 2G -M isapc", 2 * GIB, 2 * GIB),
            (
                "-object memory-backend-memfd,id=m,size=1G -machine q35,memory-backend=m",
                GIB,
                GIB,
            ),
        ] {
            let expected = Memory {
                bytes,
                below_4g_bytes,
            };
            assert_eq!(Memory::of(&line(text)).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn machines_that_cannot_be_recorded_are_refused_with_the_reason() {
        for (text, reason) in [
            ("-enable-kvm", "must emulate"),
            ("-m 3G -M xenfv", "not known"),
            ("-m 5G -M q35,max-ram-below-4g=1G", "not known"),
            ("-numa node,memdev=a", "several memory nodes"),
            (
                "-m 1G -object memory-backend-ram,id=b,size=1G -device pc-dimm,memdev=b",
                "several memory backends",
            ),
            (
                "-m 1G -object memory-backend-ram,id=a,size=512M -machine pc,memory-backend=a",
                "-m sets",
            ),
        ] {
            let error = Memory::of(&line(text)).unwrap_err();
            assert!(error.to_string().contains(reason), "{text}: {error}");
            assert!(
                error
                    .downcast_ref::<plimsoll_output::exit::UsageError>()
                    .is_some()
            );
        }
    }

    #[test]
    fn a_version_of_qemu_has_the_plugin_of_its_interface_or_none() {
        let build = |version| plugin_for(version).ok();
        assert_eq!(build("7.2.22"), Some("7.2"));
        assert_eq!(build("8.1.0"), Some("7.2"));
        assert_eq!(build("10.0.2"), Some("10"));
        assert_eq!(build("9.0.0"), None);
        assert_eq!(build("8.2"), None);
        assert_eq!(build("x"), None);
    }

    #[test]
    fn instructions_are_read_with_their_units() {
        assert_eq!(instructions("10M"), Ok(10_000_000));
        assert_eq!(instructions("1000"), Ok(1000));
        for text in ["999", "0K", "", "K", "-1", "99999999999G", "0.9K"] {
            assert!(instructions(text).is_err(), "{text}");
        }
    }

    #[test]
    fn instructions_are_counted_from_a_vcpus_first_clock() {
        let clock = |vcpu, instructions| Record::Clock { vcpu, instructions };
        let records = [clock(0, 500), clock(1, 70), clock(0, 900), clock(1, 100)];
        for (is_begun_later, begun) in [(true, [500, 70]), (false, [0, 0])] {
            let mut seen = Counts {
                is_begun_later,
                ..Counts::default()
            };
            seen.take(&records);
            assert_eq!(seen.clocks[&0], (begun[0], 900));
            assert_eq!(seen.clocks[&1], (begun[1], 100));
        }
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(
            arguments in prop::collection::vec("-(machine|M|numa|m|accel)|[a-z0-9=,.]{0,30}", 0..12),
        ) {
            let _ = Memory::of(&arguments);
        }
    }
}
