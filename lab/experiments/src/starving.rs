//! A guest that could be starved, beside guests whose reports or balloons cannot be trusted.
//!
//! Most of the first guest's memory is written once and then idle; it has no swap, so that none of it can be evicted, and it allocates
//! memory again and again. A daemon in mode `act` whose rule wants much less than that is to find the limit: nothing may be killed for lack of memory.
//! Meanwhile neighbours come and go, one at a time: guests that report false statistics (plimsoll_liar.ko of guest/module),
//! a guest without a balloon driver, and one that stands still in the middle of a move.
//!
//! Everything is read from outside: sizes and decisions from the daemon, the guest's own memory, its allocations and what its
//! kernel killed from its console. Results: docs/dividing-measured.md.

use std::fs;
use std::io::Write;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use plimsoll_output::{TableOrJson, stop_flag};
use plimsoll_protocol::client::Client;
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::decision::{State, StepState};
use plimsoll_protocol::vm::VmSummary;
use plimsoll_rig::{Guest, GuestConfig, GuestError, GuestImage, Server, program};
use plimsoll_vm::ConsoleEvent;
use serde::Serialize;
use tempfile::TempDir;

/// RAM of the guest that is not to starve, and of each neighbour, in MiB.
const RAM_MIB: u64 = 768;
const NEIGHBOUR_MIB: u64 = 384;
/// Share of a guest's RAM that is idle.
const IDLE_PERCENT: u64 = 70;
/// The guest's allocations.
const BURST_MIB: u64 = 20;
const BURST_S: u64 = 10;
/// Interval of looking at guests and daemon, and of the rows.
const POLL: Duration = Duration::from_millis(100);
const ROW: Duration = Duration::from_secs(15);
/// How long a daemon may take to answer.
const DAEMON_MAX: Duration = Duration::from_secs(30);
/// How long a guest that stands still does so at the longest.
const FROZEN_MAX: Duration = Duration::from_secs(40);
/// Difference within which a VM has all of its RAM.
const NEAR_BYTES: u64 = 2 << 20;
/// Decisions requested at a time.
const DECISIONS: usize = 20;
/// Part of a line by which a guest's kernel reports that it killed for lack of memory, or had nothing left to kill.
const OOM: [&str; 2] = ["Killed process", "deadlocked on memory"];

/// Squeeze a guest whose memory is idle but cannot be evicted, beside guests that lie or do not react.
///
/// Fails if the guest's kernel kills anything for lack of memory, if an allocation fails, or if a neighbour gets what it should not.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How long, in minutes; each neighbour has an equal part of it
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: u64,
    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: TableOrJson,
}

/// A guest beside the one that is not to starve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Neighbour {
    /// Reports a TiB as available.
    Generous,
    /// Reports nothing as available.
    Miserly,
    /// Reports ever more major faults.
    Distressed,
    /// Has no driver for its balloon.
    Deaf,
    /// Stands still from the beginning of a move, and goes on later.
    Frozen,
}

impl Neighbour {
    const ALL: [Self; 5] = [
        Self::Generous,
        Self::Miserly,
        Self::Distressed,
        Self::Deaf,
        Self::Frozen,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Generous => "generous",
            Self::Miserly => "miserly",
            Self::Distressed => "distressed",
            Self::Deaf => "deaf",
            Self::Frozen => "frozen",
        }
    }

    /// What it does wrong.
    fn fault(self) -> &'static str {
        match self {
            Self::Generous => "reports 1 TiB as available",
            Self::Miserly => "reports nothing as available",
            Self::Distressed => "reports ever more major faults",
            Self::Deaf => "has no balloon driver",
            Self::Frozen => "stands still from the beginning of a move",
        }
    }

    fn lie(self) -> &'static str {
        match self {
            Self::Generous => " liar.available_mib=1048576",
            Self::Miserly => " liar.available_mib=0",
            Self::Distressed => " liar.faults=5000",
            Self::Deaf | Self::Frozen => "",
        }
    }
}

/// The results.
#[derive(Debug, Serialize)]
struct Results {
    schema: u32,
    accelerator: String,
    minutes: u64,
    ram_bytes: u64,
    idle_bytes: u64,
    rows: Vec<Row>,
    guest: GuestResult,
    neighbours: Vec<NeighbourResult>,
    /// What should not have happened.
    failures: Vec<String>,
}

/// The guest at one time.
#[derive(Debug, Clone, Serialize)]
struct Row {
    seconds: u64,
    /// Its memory, by the daemon.
    direct_bytes: u64,
    target_bytes: Option<u64>,
    /// Available memory as its balloon reported it.
    reported_available_bytes: Option<u64>,
    /// Its memory less that: what it cannot give.
    needed_bytes: Option<u64>,
    /// Available memory by its own kernel.
    available_bytes: u64,
    allocations: u64,
    major_faults: u64,
    neighbour: Option<Neighbour>,
}

/// The guest over the whole time.
#[derive(Debug, Serialize)]
struct GuestResult {
    least_bytes: u64,
    least_available_bytes: u64,
    allocations: u64,
    allocations_due: u64,
    longest_allocation_ms: u64,
    major_faults: u64,
    oom_kills: u64,
    /// Why its machine ended, if it did.
    ended: Option<String>,
}

/// A neighbour over its time.
#[derive(Debug, Serialize)]
struct NeighbourResult {
    neighbour: Neighbour,
    ram_bytes: u64,
    /// The least and the most memory that it had.
    least_bytes: u64,
    most_bytes: u64,
    oom_kills: u64,
    /// Steps of decisions that ended because its guest ran short, or its balloon was stuck.
    short: usize,
    stuck: usize,
    /// Its memory and its target once its balloon was found stuck.
    at_stuck: Option<(u64, u64)>,
    ended: Option<String>,
}

/// A guest and what it reported.
struct Watched {
    name: &'static str,
    guest: Guest,
    populated: bool,
    allocations: u64,
    longest_allocation_ms: u64,
    /// Available now, and at the least.
    available_bytes: u64,
    least_available_bytes: u64,
    /// Major faults at its first report, and now.
    major_faults: Option<(u64, u64)>,
    oom_kills: u64,
    ended: Option<String>,
}

impl Watched {
    fn start(name: &'static str, mib: u64, more: &str, has_driver: bool) -> anyhow::Result<Self> {
        let idle_mib = mib * IDLE_PERCENT / 100;
        let workload = format!(
            "workload=steps steps_mib=16,{idle_mib} step_ms=100000000 memstat_ms=1000{more}"
        );
        let config = GuestConfig {
            memory_mib: mib,
            balloon: true,
            ..GuestConfig::new(name, &workload)
        };
        // The plain image has no drivers.
        let image = match has_driver {
            true => GuestImage::for_guest(&config),
            false => GuestImage::locate(),
        };
        Ok(Self {
            name,
            guest: Guest::start(&image?, &config)?,
            populated: false,
            allocations: 0,
            longest_allocation_ms: 0,
            available_bytes: 0,
            least_available_bytes: u64::MAX,
            major_faults: None,
            oom_kills: 0,
            ended: None,
        })
    }

    /// Takes its output.
    fn hear(&mut self) -> anyhow::Result<()> {
        while self.ended.is_none() {
            let line = match self.guest.next_line(Duration::ZERO) {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(ended @ GuestError::GuestEnded { .. }) => {
                    self.ended = Some(ended.to_string());
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            self.oom_kills += u64::from(OOM.iter().any(|text| line.text.contains(text)));
            match line.event {
                Some(ConsoleEvent::Populated { .. }) => self.populated = true,
                Some(ConsoleEvent::Burst { index, ms }) => {
                    self.allocations = index + 1;
                    self.longest_allocation_ms = self.longest_allocation_ms.max(ms);
                }
                Some(ConsoleEvent::Memory(memory)) if self.populated => {
                    self.available_bytes = memory.available_bytes;
                    self.least_available_bytes =
                        self.least_available_bytes.min(memory.available_bytes);
                    let (first, _) = self.major_faults.unwrap_or((memory.major_faults, 0));
                    self.major_faults = Some((first, memory.major_faults));
                }
                Some(ConsoleEvent::Round { mismatches, .. }) => {
                    ensure!(
                        mismatches == 0,
                        "VM {} found {mismatches} wrong pages",
                        self.name
                    );
                }
                Some(ConsoleEvent::Error { message }) => self.ended = Some(message),
                _ => {}
            }
        }
        Ok(())
    }

    fn until_populated(&mut self, stop: &AtomicBool) -> anyhow::Result<()> {
        let deadline = Instant::now() + plimsoll_rig::PATIENCE;
        while !self.populated {
            self.hear()?;
            let name = self.name;
            ensure!(self.ended.is_none(), "VM {name} ended: {:?}", self.ended);
            ensure!(Instant::now() < deadline, "VM {name} does not come up");
            ensure!(!stop.load(Ordering::Relaxed), "stopped");
            thread::sleep(POLL);
        }
        Ok(())
    }

    fn major_faults(&self) -> u64 {
        let (first, last) = self.major_faults.unwrap_or_default();
        last.saturating_sub(first)
    }
}

/// A run in progress.
struct Run<'a> {
    guest: Watched,
    client: Client,
    begin: Instant,
    stop: &'a AtomicBool,
    rows: Vec<Row>,
    least_bytes: u64,
    table: &'a mut dyn Write,
}

impl Run<'_> {
    /// Looks at the guest once. Returns all VMs as the daemon sees them.
    fn poll(&mut self, neighbour: Option<Neighbour>) -> anyhow::Result<Vec<VmSummary>> {
        ensure!(!self.stop.load(Ordering::Relaxed), "stopped");
        thread::sleep(POLL);
        self.guest.hear()?;
        let vms = self.client.host()?.vms;
        let Some(vm) = vms.iter().find(|vm| vm.vm == self.guest.name) else {
            return Ok(vms);
        };
        self.least_bytes = self.least_bytes.min(vm.direct_bytes);
        let elapsed = self.begin.elapsed();
        if elapsed >= ROW * u32::try_from(self.rows.len()).unwrap_or(u32::MAX) {
            let balloon = vm.balloon.as_ref();
            let reported = balloon.and_then(|balloon| balloon.guest_available_bytes);
            let row = Row {
                seconds: elapsed.as_secs(),
                direct_bytes: vm.direct_bytes,
                target_bytes: balloon.and_then(|balloon| balloon.target_bytes),
                reported_available_bytes: reported,
                needed_bytes: reported.map(|available| vm.direct_bytes.saturating_sub(available)),
                available_bytes: self.guest.available_bytes,
                allocations: self.guest.allocations,
                major_faults: self.guest.major_faults(),
                neighbour,
            };
            write_row(&row, self.table)?;
            self.rows.push(row);
        }
        Ok(vms)
    }

    /// Runs a neighbour beside the guest until `end`.
    fn beside(&mut self, which: Neighbour, end: Instant) -> anyhow::Result<NeighbourResult> {
        let has_driver = which != Neighbour::Deaf;
        let mut neighbour = Watched::start(which.name(), NEIGHBOUR_MIB, which.lie(), has_driver)?;
        let ram_bytes = NEIGHBOUR_MIB << 20;
        let (mut least_bytes, mut most_bytes) = (u64::MAX, 0);
        let (mut frozen, mut at_stuck) = (None, None);
        while Instant::now() < end {
            let vms = self.poll(Some(which))?;
            neighbour.hear()?;
            let Some(vm) = vms.iter().find(|vm| vm.vm == which.name()) else {
                continue;
            };
            let has_bytes = vm.direct_bytes;
            least_bytes = least_bytes.min(has_bytes);
            most_bytes = most_bytes.max(has_bytes);
            if which != Neighbour::Frozen || !neighbour.populated {
                continue;
            }
            match frozen {
                None if self.is_shrunk(which)? => {
                    neighbour.guest.qmp()?.stop()?;
                    frozen = Some((Instant::now(), false));
                }
                Some((since, false)) => {
                    let target = vm.balloon.as_ref().and_then(|balloon| balloon.target_bytes);
                    if self.steps(which, StepState::Stuck)? > 0 {
                        at_stuck = target.map(|target| (has_bytes, target));
                    }
                    let is_kept = at_stuck.is_some_and(|(has, target)| target >= has);
                    if is_kept || since.elapsed() > FROZEN_MAX {
                        neighbour.guest.qmp()?.cont()?;
                        frozen = Some((since, true));
                    }
                }
                _ => {}
            }
        }
        Ok(NeighbourResult {
            neighbour: which,
            ram_bytes,
            least_bytes,
            most_bytes,
            oom_kills: neighbour.oom_kills,
            short: self.steps(which, StepState::Short)?,
            stuck: self.steps(which, StepState::Stuck)?,
            at_stuck,
            ended: neighbour.ended.clone(),
        })
    }

    /// Whether a move shrinks the neighbour now.
    fn is_shrunk(&self, which: Neighbour) -> anyhow::Result<bool> {
        let newest = self.client.decisions(None, None, Some(1))?;
        Ok(newest.iter().any(|decision| {
            let mut steps = decision.steps.iter();
            let is_it =
                steps.any(|step| step.vm == which.name() && step.state == StepState::Shrinking);
            decision.state == State::Moving && is_it
        }))
    }

    /// Number of the neighbour's steps that ended in a state.
    fn steps(&self, which: Neighbour, state: StepState) -> anyhow::Result<usize> {
        let decisions = self.client.decisions(None, None, Some(DECISIONS))?;
        let steps = decisions.iter().flat_map(|decision| &decision.steps);
        let its = steps.filter(|step| step.vm == which.name() && step.state == state);
        Ok(its.count())
    }
}

impl GuestResult {
    /// What should not have happened.
    fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        if self.oom_kills > 0 {
            failures.push(format!("the guest killed {} times", self.oom_kills));
        }
        if let Some(why) = &self.ended {
            failures.push(format!("the guest ended: {why}"));
        }
        if self.allocations + 1 < self.allocations_due {
            let (made, due) = (self.allocations, self.allocations_due);
            failures.push(format!("the guest made {made} allocations of {due}"));
        }
        if self.least_bytes + NEAR_BYTES >= RAM_MIB << 20 {
            failures.push("nothing was taken from the guest, so nothing was tried".to_owned());
        }
        failures
    }
}

impl NeighbourResult {
    /// What should not have happened. A guest that exaggerates what it can give harms itself alone.
    fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        let name = self.neighbour.name();
        let mut expect = |holds: bool, what: &str| {
            if !holds {
                failures.push(format!("{name}: {what}"));
            }
        };
        expect(self.most_bytes > 0, "the daemon never saw it");
        expect(
            self.most_bytes <= self.ram_bytes,
            "it had more than its RAM",
        );
        let keeps_all = self.least_bytes + NEAR_BYTES >= self.ram_bytes;
        match self.neighbour {
            Neighbour::Generous => {
                let idle_bytes = self.ram_bytes / 100 * IDLE_PERCENT;
                expect(
                    self.least_bytes < idle_bytes + (96 << 20) || self.ended.is_some(),
                    "its lie was not believed, so nothing was tried",
                );
            }
            Neighbour::Miserly | Neighbour::Deaf => {
                expect(keeps_all, "memory was taken from it");
                expect(self.ended.is_none(), "it ended");
            }
            Neighbour::Distressed => {
                expect(self.short > 0, "it got nothing back for its faults");
                expect(self.ended.is_none(), "it ended");
            }
            Neighbour::Frozen => {
                expect(self.stuck > 0, "its balloon was not found stuck");
                let is_kept = self.at_stuck.is_some_and(|(has, target)| target >= has);
                expect(is_kept, "its target was not taken back");
                expect(self.ended.is_none(), "it ended");
            }
        }
        failures
    }
}

/// Runs the experiment; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// Why a guest or the daemon did not come up; at the end, everything that should not have happened.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let stop = stop_flag()?;
    let text = args.output == TableOrJson::Table;
    let mut quiet = std::io::sink();
    let bursts = format!(" burst_mib={BURST_MIB} burst_ms={}", BURST_S * 1000);
    let mut guest = Watched::start("idler", RAM_MIB, &bursts, true)?;
    guest.until_populated(&stop)?;
    let accelerator = guest.guest.detection().accelerator.to_string();
    let table: &mut dyn Write = if text { &mut *out } else { &mut quiet };
    write_head(&accelerator, args.minutes, table)?;

    let folder = TempDir::with_prefix("plimsoll-starving-")?;
    let (daemon, client) = start_daemon(&folder)?;
    let begin = Instant::now();
    let length = Duration::from_secs(60 * args.minutes);
    let allocations_before = guest.allocations;
    let mut run = Run {
        guest,
        client,
        begin,
        stop: &stop,
        rows: Vec::new(),
        least_bytes: u64::MAX,
        table,
    };
    let mut neighbours = Vec::new();
    let each = length.div_f64(Neighbour::ALL.len() as f64);
    for (which, number) in Neighbour::ALL.into_iter().zip(1..) {
        let end = begin + each * number;
        neighbours.push(run.beside(which, end)?);
    }
    let guest = GuestResult {
        least_bytes: run.least_bytes,
        least_available_bytes: run.guest.least_available_bytes,
        allocations: run.guest.allocations - allocations_before,
        allocations_due: length.as_secs() / BURST_S,
        longest_allocation_ms: run.guest.longest_allocation_ms,
        major_faults: run.guest.major_faults(),
        oom_kills: run.guest.oom_kills,
        ended: run.guest.ended,
    };
    let mut failures = guest.failures();
    failures.extend(neighbours.iter().flat_map(NeighbourResult::failures));
    let results = Results {
        schema: SCHEMA,
        accelerator,
        minutes: args.minutes,
        ram_bytes: RAM_MIB << 20,
        idle_bytes: (RAM_MIB * IDLE_PERCENT / 100) << 20,
        rows: run.rows,
        guest,
        neighbours,
        failures,
    };
    if text {
        write_results(&results, out)?;
    } else {
        serde_json::to_writer(&mut *out, &results)?;
        writeln!(out)?;
    }
    let failures = results.failures.join("; ");
    ensure!(
        failures.is_empty(),
        "{failures}; the daemon's log:\n{}",
        daemon.log()
    );
    Ok(())
}

/// Starts a daemon that wants every VM of ours to have 100 MiB at most, and leaves others alone.
fn start_daemon(folder: &TempDir) -> anyhow::Result<(Server, Client)> {
    let names = std::iter::once("idler").chain(Neighbour::ALL.map(Neighbour::name));
    let rules =
        names.map(|name| format!("[[vm]]\nname = \"{name}\"\nmanaged = true\nmax = \"100M\"\n"));
    let at = folder.path().display();
    let config = format!(
        "mode = \"act\"\nturn_interval = \"1s\"\n[policy]\ncooldown = \"2s\"\n[check]\nafter = \"3s\"\n[balloon]\npatience = \"5s\"\n\
         [trace]\nbackend = \"trap\"\nperiod = \"1s\"\nbudget = \"20%\"\nwindow = \"1m\"\n\
         [history]\nfile = \"{at}/history.redb\"\n[serve]\nsocket = \"{at}/socket\"\nread_only_socket = \"none\"\n\
         {}[[vm]]\nname = \"*\"\nmanaged = false\n",
        rules.collect::<String>()
    );
    let file = folder.path().join("plimsoll.toml");
    fs::write(&file, config)?;
    let socket = folder.path().join("socket");
    let log = folder.path().join("log");
    let mut command = Command::new(program("plimsolld")?);
    command.arg("--config").arg(&file);
    let server = Server::start(&mut command, &log, DAEMON_MAX, |_| {
        Client::connect(&socket).is_ok()
    })?;
    let client = Client::connect(&socket).context("plimsolld does not answer")?;
    Ok((server, client))
}

fn mib(bytes: u64) -> String {
    (bytes >> 20).to_string()
}

fn write_head(accelerator: &str, minutes: u64, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "A guest ({accelerator}) of {RAM_MIB} MiB, {IDLE_PERCENT} % of it idle, without swap, allocates {BURST_MIB} MiB each {BURST_S} s; \
         plimsolld may take all but 100 MiB, for {minutes} min. Neighbours have {NEIGHBOUR_MIB} MiB. Sizes in MiB.\n\n\
         time   memory  target  available  (reported)  needed  allocations  major faults  neighbour"
    )?;
    Ok(out.flush()?)
}

fn write_row(row: &Row, out: &mut dyn Write) -> anyhow::Result<()> {
    let known = |bytes: Option<u64>| bytes.map_or("-".to_owned(), mib);
    writeln!(
        out,
        "{:>4} s {:>7} {:>7} {:>10} {:>11} {:>7} {:>12} {:>13}  {}",
        row.seconds,
        mib(row.direct_bytes),
        known(row.target_bytes),
        mib(row.available_bytes),
        known(row.reported_available_bytes),
        known(row.needed_bytes),
        row.allocations,
        row.major_faults,
        row.neighbour.map_or("", Neighbour::name),
    )?;
    Ok(out.flush()?)
}

fn write_results(results: &Results, out: &mut dyn Write) -> anyhow::Result<()> {
    let guest = &results.guest;
    writeln!(
        out,
        "\nat least {} MiB, of which {} available; {} allocations of {}, the longest {} ms; {} major faults; {} OOM kills",
        mib(guest.least_bytes),
        mib(guest.least_available_bytes),
        guest.allocations,
        guest.allocations_due,
        guest.longest_allocation_ms,
        guest.major_faults,
        guest.oom_kills
    )?;
    for result in &results.neighbours {
        let ended = result.ended.as_ref().map_or("", |_| ", its machine ended");
        writeln!(
            out,
            "{:<10} ({}): {} to {} MiB; steps short {}, stuck {}; {} OOM kills{ended}",
            result.neighbour.name(),
            result.neighbour.fault(),
            mib(result.least_bytes),
            mib(result.most_bytes),
            result.short,
            result.stuck,
            result.oom_kills,
        )?;
        if let Some((has, target)) = result.at_stuck {
            writeln!(
                out,
                "           stuck at {} MiB, and its target was {} then",
                mib(has),
                mib(target)
            )?;
        }
    }
    let verdict = if results.failures.is_empty() {
        "Nothing starved, and nobody harmed another."
    } else {
        "FAILED."
    };
    writeln!(out, "{verdict}")?;
    Ok(out.flush()?)
}
