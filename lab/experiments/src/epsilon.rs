//! The footprint of a guest kernel: the minimum memory with which it survives (ε of \[PRL\] §4.4).
//!
//! A VM of the kernel that does nothing gets 5 % less memory again and again, until it no longer survives; the last
//! size at which it survived is ε. It survives if it reports so on its console, several times, after it got the size.
//! There are two methods, which need not agree:
//!
//! - *boot*: a new VM for each size, as in the paper. A kernel sizes its tables for the memory that it finds, so
//!   these sizes are the minimum.
//! - *balloon*: one VM whose balloon takes the memory. Tables made for the first size stay, a page to 64 of it, and a
//!   balloon stops where the guest would have to fight for pages. This is what can be taken from a VM that runs.
//!
//! A size that fails is tried once more before it counts: an emulated guest may fail by chance.
//!
//! Otherwise as in the paper. The initrd is included in these sizes: it stays in the guest's memory as long as the
//! guest lives.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use plimsoll_flow::{Accelerator, Whole as _};
use plimsoll_rig::{AcceleratorChoice, Guest, GuestConfig, GuestError, GuestImage};
use plimsoll_vm::{ConsoleEvent, Qmp, detect};
use serde::Serialize;

use plimsoll_output::exit::with_causes;
use plimsoll_output::{TextFormat, bail_usage};
use plimsoll_protocol::curve_json::SCHEMA;
use plimsoll_protocol::size::{ByteSize, Interval, Rate};

const MIB: u64 = 1 << 20;
/// Workload of the guest: none, with a sign of life twice a second.
const WORKLOAD: &str = "workload=idle memstat_ms=500";
/// Lines that show that the guest is alive.
const HEARTBEATS: u32 = 3;
/// A balloon that moved by less than this in [`STALL`] has stopped.
const MOVED_BYTES: u64 = 256 << 10;
const STALL: Duration = Duration::from_secs(8);
/// Difference within which a guest has reached its size, because a balloon moves whole pages.
const NEAR_BYTES: u64 = MIB;
/// First lines of a kernel's panic.
const COMPLAINTS: [&str; 2] = ["Kernel panic", "Out of memory"];
/// Maximum number of characters of a reason.
const WHY_LETTERS: usize = 160;

/// Find the minimum memory with which a guest kernel survives, in steps of 5 % (ε of the PRL paper).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The kernel, a Linux bzImage; may be repeated for a comparison
    #[arg(long, value_name = "VMLINUZ", required = true)]
    kernel: Vec<PathBuf>,
    /// Its initrd [default: our idle workload, with the modules in the directory `modules` beside the kernel]
    #[arg(long, value_name = "FILE", requires = "alive")]
    initrd: Option<PathBuf>,
    /// Text of the console line that shows that the guest has booted
    #[arg(long, value_name = "TEXT", requires = "initrd")]
    alive: Option<String>,
    /// Initial memory size
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    memory: ByteSize,
    /// Decrease from one size to the next
    #[arg(long, value_name = "SHARE", default_value = "5%")]
    step: Rate,
    /// How memory is removed
    #[arg(long, value_enum, default_value_t = ShrinkMethod::Both)]
    way: ShrinkMethod,
    /// Find the minimum size of a new VM by bisection, to 1 MiB, instead of in steps
    #[arg(long)]
    bisect: bool,
    /// Maximum time of a guest to boot, or to show that it is alive
    #[arg(long, value_name = "TIME", default_value = "60s")]
    patience: Interval,
    /// Output format
    #[arg(
        short = 'o',
        long,
        value_enum,
        value_name = "FORMAT",
        default_value_t,
        hide_default_value = true
    )]
    output: TextFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ShrinkMethod {
    /// A new VM for each size
    Boot,
    /// The balloon of one VM
    Balloon,
    /// Both
    Both,
}

/// The result of a VM at a size.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Trial {
    memory_bytes: u64,
    lived: bool,
    /// Time until it reported that it is alive.
    seconds: f64,
    /// Free memory as reported by the guest.
    available_bytes: Option<u64>,
    /// Why it failed.
    why: Option<String>,
}

/// All sizes of one kernel by one method.
#[derive(Debug, Serialize)]
struct Walk {
    schema: u32,
    kernel: String,
    accelerator: String,
    way: &'static str,
    initrd_bytes: u64,
    trials: Vec<Trial>,
    /// The last size that lived; `None`: see `error`.
    epsilon_bytes: Option<u64>,
    /// Why this method has no result for this kernel.
    error: Option<String>,
}

/// Runs the experiment.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let (memory_mib, step) = (args.memory.0 / MIB, args.step.get());
    if memory_mib == 0 || step >= 1.0 {
        bail_usage!("expected at least 1 MiB to begin with, and steps of less than 100 %");
    }
    if args.initrd.is_some() && args.way != ShrinkMethod::Boot {
        bail_usage!(
            "--initrd: whether it lives is heard once, when it has come up: add --way boot"
        );
    }
    if args.output == TextFormat::Csv {
        writeln!(
            out,
            "kernel,way,accelerator,memory_bytes,lived,seconds,available_bytes,why"
        )?;
    }
    let mut nothing = Vec::new();
    for kernel in &args.kernel {
        let ways: &[bool] = match args.way {
            ShrinkMethod::Boot => &[false],
            ShrinkMethod::Balloon => &[true],
            ShrinkMethod::Both => &[false, true],
        };
        for &balloon in ways {
            let image = match &args.initrd {
                Some(initrd) => GuestImage {
                    kernel: kernel.clone(),
                    initrd: initrd.clone(),
                },
                None => GuestImage::for_kernel(kernel, balloon)?,
            };
            let found = walk(args, &image, balloon, memory_mib, out)?;
            if let Some(error) = &found.error {
                nothing.push(format!("{}, {}: {error}", found.kernel, found.way));
            }
        }
    }
    out.flush()?;
    if !nothing.is_empty() {
        bail!("{}", nothing.join("; "));
    }
    Ok(())
}

/// Reduces the memory of one kernel by one method, and reports each size.
fn walk(
    args: &Args,
    image: &GuestImage,
    balloon: bool,
    memory_mib: u64,
    out: &mut dyn Write,
) -> anyhow::Result<Walk> {
    let accelerator = detect().accelerator;
    let lab = Lab {
        image,
        accelerator,
        alive: args.alive.as_deref(),
        patience: args.patience.get(),
    };
    let initrd = std::fs::metadata(&image.initrd)
        .with_context(|| format!("cannot read '{}'", image.initrd.display()))?;
    let mut walk = Walk {
        schema: SCHEMA,
        kernel: image.kernel.display().to_string(),
        accelerator: accelerator.to_string(),
        way: match (balloon, args.bisect) {
            (true, _) => "balloon",
            (false, true) => "boot-bisect",
            (false, false) => "boot",
        },
        initrd_bytes: initrd.len(),
        trials: Vec::new(),
        epsilon_bytes: None,
        error: None,
    };
    if args.output == TextFormat::Table {
        writeln!(
            out,
            "{}, {}, under {accelerator}, from {} by {} %; initrd of {}\n{:>10}  {:<6} {:>7}  {:>10}  why not",
            walk.kernel,
            walk.way,
            args.memory.rounded(),
            args.step.get() * 100.0,
            ByteSize(walk.initrd_bytes).rounded(),
            "memory",
            "lived",
            "s",
            "available",
        )?;
    }
    let step = args.step.get();
    let mut told = TrialWriter {
        args,
        kernel: &walk.kernel,
        way: walk.way,
        accelerator: &walk.accelerator,
        out,
    };
    let found = if balloon {
        let mut shrinking = BalloonVm::start(&lab, memory_mib);
        let mut lives = |mib| shrinking.lives(mib);
        steps(memory_mib, step, &mut lives, &mut |trial| told.tell(trial))
    } else if args.bisect {
        let mut lives = |mib| lab.lives(mib);
        halves(memory_mib, &mut lives, &mut |trial| told.tell(trial))
    } else {
        let mut lives = |mib| lab.lives(mib);
        steps(memory_mib, step, &mut lives, &mut |trial| told.tell(trial))
    };
    walk.trials = found?;
    let lived = walk.trials.iter().filter(|trial| trial.lived);
    let failed = walk.trials.iter().find(|trial| !trial.lived);
    // All balloons can be set to leave everything: such a size shows nothing.
    if lived.clone().count() > usize::from(balloon) {
        walk.epsilon_bytes = lived.map(|trial| trial.memory_bytes).min();
    } else if let Some(failed) = failed {
        let size = ByteSize(failed.memory_bytes).rounded();
        let why = failed.why.as_deref().unwrap_or_default();
        walk.error = Some(format!("it does not live with {size}: {why}"));
    }
    match (args.output, walk.epsilon_bytes) {
        (TextFormat::Json, _) => writeln!(out, "{}", serde_json::to_string(&walk)?)?,
        (TextFormat::Table, Some(bytes)) => writeln!(
            out,
            "epsilon by {}: {}, under {}\n",
            walk.way,
            ByteSize(bytes).rounded(),
            walk.accelerator
        )?,
        _ => {}
    }
    Ok(walk)
}

/// Writes trials where they are written one by one.
struct TrialWriter<'a> {
    args: &'a Args,
    kernel: &'a str,
    way: &'a str,
    accelerator: &'a str,
    out: &'a mut dyn Write,
}

impl TrialWriter<'_> {
    fn tell(&mut self, trial: &Trial) -> anyhow::Result<()> {
        let why = trial.why.clone().unwrap_or_default();
        match self.args.output {
            TextFormat::Table => writeln!(
                self.out,
                "{:>10}  {:<6} {:>7.1}  {:>10}  {why}",
                ByteSize(trial.memory_bytes).rounded(),
                if trial.lived { "yes" } else { "no" },
                trial.seconds,
                trial
                    .available_bytes
                    .map_or_else(|| "-".to_owned(), |bytes| ByteSize(bytes).rounded()),
            )?,
            TextFormat::Csv => {
                let cells = [
                    self.kernel.to_owned(),
                    self.way.to_owned(),
                    self.accelerator.to_owned(),
                    trial.memory_bytes.to_string(),
                    trial.lived.to_string(),
                    format!("{:.1}", trial.seconds),
                    trial
                        .available_bytes
                        .map(|bytes| bytes.to_string())
                        .unwrap_or_default(),
                    why,
                ];
                let line = plimsoll_output::csv(cells);
                self.out.write_all(line.as_bytes())?;
            }
            TextFormat::Json => {}
        }
        Ok(self.out.flush()?)
    }
}

/// Tries a size, in MiB.
type Lives<'a> = dyn FnMut(u64) -> anyhow::Result<Trial> + 'a;
/// Receives each size that was tried.
type TrialSink<'a> = dyn FnMut(&Trial) -> anyhow::Result<()> + 'a;

/// Tries a size, and once more if it failed.
fn twice(lives: &mut Lives<'_>, mib: u64) -> anyhow::Result<Trial> {
    let trial = lives(mib)?;
    if trial.lived { Ok(trial) } else { lives(mib) }
}

/// Sizes from `memory_mib` down, each less than the last by the share `step`, until one fails.
fn steps(
    memory_mib: u64,
    step: f64,
    lives: &mut Lives<'_>,
    each: &mut TrialSink<'_>,
) -> anyhow::Result<Vec<Trial>> {
    let mut trials = Vec::new();
    let mut mib = memory_mib;
    while mib > 0 {
        let trial = twice(lives, mib)?;
        each(&trial)?;
        let lived = trial.lived;
        trials.push(trial);
        if !lived {
            break;
        }
        let less = u64::whole(mib as f64 * (1.0 - step));
        mib = less.min(mib - 1);
    }
    Ok(trials)
}

/// Sizes between one that fails and one that lives, each in their middle, until they are neighbours.
fn halves(
    memory_mib: u64,
    lives: &mut Lives<'_>,
    each: &mut TrialSink<'_>,
) -> anyhow::Result<Vec<Trial>> {
    let first = twice(lives, memory_mib)?;
    each(&first)?;
    let (mut fails, mut alive) = (0, memory_mib);
    let mut trials = vec![first];
    while trials[0].lived && alive - fails > 1 {
        let mib = fails + (alive - fails) / 2;
        let trial = twice(lives, mib)?;
        each(&trial)?;
        if trial.lived {
            alive = mib;
        } else {
            fails = mib;
        }
        trials.push(trial);
    }
    Ok(trials)
}

/// Configuration common to all VMs of a kernel.
struct Lab<'a> {
    image: &'a GuestImage,
    accelerator: Accelerator,
    alive: Option<&'a str>,
    patience: Duration,
}

impl Lab<'_> {
    fn guest(&self, mib: u64, balloon: bool) -> Result<Guest, GuestError> {
        let config = GuestConfig {
            memory_mib: mib,
            accelerator: match self.accelerator {
                Accelerator::Kvm => AcceleratorChoice::Kvm,
                Accelerator::Tcg => AcceleratorChoice::Tcg,
            },
            balloon,
            qmp: balloon,
            ..GuestConfig::new("epsilon", WORKLOAD)
        };
        Guest::start(self.image, &config)
    }

    /// Boots a VM of `mib` MiB and checks whether it survives.
    fn lives(&self, mib: u64) -> anyhow::Result<Trial> {
        let start = Instant::now();
        let mut guest = self.guest(mib, false)?;
        let alive = self.hear(&mut guest);
        Ok(trial(mib * MIB, start, alive))
    }

    /// Waits for the guest's sign of life; returns its free memory, if reported.
    fn hear(&self, guest: &mut Guest) -> Result<Option<u64>, String> {
        let deadline = Instant::now() + self.patience;
        let (mut beats, mut last, mut complaint) = (0, String::new(), None);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = match guest.next_line(left) {
                Ok(Some(line)) => line,
                Ok(None) => {
                    let waited = self.patience.as_secs_f64();
                    return Err(match &*last {
                        "" => format!("nothing heard for {waited} s"),
                        last => format!("no sign of life for {waited} s; last heard: {last}"),
                    });
                }
                Err(error) => return Err(complaint.unwrap_or_else(|| ended(&error))),
            };
            if complaint.is_none() && COMPLAINTS.iter().any(|words| line.text.contains(words)) {
                complaint = Some(line.text.clone());
            }
            match (self.alive, line.event) {
                (Some(text), _) if line.text.contains(text) => return Ok(None),
                (None, Some(ConsoleEvent::Memory(memory))) => {
                    beats += 1;
                    if beats == HEARTBEATS {
                        return Ok(Some(memory.available_bytes));
                    }
                }
                (None, Some(ConsoleEvent::Error { message })) => return Err(message),
                _ => {}
            }
            last = line.text;
        }
    }
}

fn trial(memory_bytes: u64, start: Instant, alive: Result<Option<u64>, String>) -> Trial {
    let (lived, available_bytes, why) = match alive {
        Ok(available) => (true, available, None),
        Err(why) => (false, None, Some(brief(&why))),
    };
    Trial {
        memory_bytes,
        lived,
        seconds: start.elapsed().as_secs_f64(),
        available_bytes,
        why,
    }
}

/// Why a guest ended: QEMU's error, else its last output.
fn ended(error: &GuestError) -> String {
    let GuestError::GuestEnded { status, last, qemu } = error else {
        return with_causes(error);
    };
    match last.last() {
        Some(line) if qemu == "nothing" => line.clone(),
        _ if qemu == "nothing" => {
            format!("the machine was reset before its kernel said a word ({status})")
        }
        _ => format!("QEMU: {qemu}"),
    }
}

/// A reason that fits into a line.
fn brief(why: &str) -> String {
    let clean = plimsoll_output::printable(why);
    clean.chars().take(WHY_LETTERS).collect()
}

/// A VM whose balloon takes its memory.
struct BalloonVm<'a> {
    lab: &'a Lab<'a>,
    memory_mib: u64,
    /// It and its monitor; anew after it has failed, as a failed size is tried twice.
    running: Option<(Guest, Qmp)>,
}

impl<'a> BalloonVm<'a> {
    fn start(lab: &'a Lab<'a>, memory_mib: u64) -> Self {
        Self {
            lab,
            memory_mib,
            running: None,
        }
    }

    fn lives(&mut self, mib: u64) -> anyhow::Result<Trial> {
        let start = Instant::now();
        let alive = self.shrink(mib * MIB);
        if alive.is_err() {
            self.running = None;
        }
        Ok(trial(mib * MIB, start, alive))
    }

    /// Shrinks the guest to `bytes`, and checks whether it survives.
    fn shrink(&mut self, bytes: u64) -> Result<Option<u64>, String> {
        let (guest, qmp) = match &mut self.running {
            Some(running) => running,
            None => {
                let said = |error: GuestError| with_causes(&error);
                let mut guest = self.lab.guest(self.memory_mib, true).map_err(said)?;
                self.lab.hear(&mut guest)?;
                let qmp = guest.qmp().map_err(said)?;
                self.running.insert((guest, qmp))
            }
        };
        qmp.set_balloon(bytes)
            .map_err(|error| with_causes(&error))?;
        let (mut moved, mut least) = (Instant::now(), u64::MAX);
        loop {
            let actual = match qmp.balloon_actual_bytes() {
                Ok(actual) => actual,
                // The console has the reason.
                Err(error) => {
                    return Err(match self.lab.hear(guest) {
                        Err(why) => why,
                        Ok(_) => with_causes(&error),
                    });
                }
            };
            if actual <= bytes.saturating_add(NEAR_BYTES) {
                break;
            }
            if actual.saturating_add(MOVED_BYTES) <= least {
                (moved, least) = (Instant::now(), actual);
            } else if moved.elapsed() > STALL {
                let kept = ByteSize(actual).rounded();
                return Err(if actual >= self.memory_mib * MIB {
                    format!("the balloon takes nothing of {kept}: has the guest a driver?")
                } else {
                    format!("the balloon stopped: the guest keeps {kept}")
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        // Its output before it had the size does not count.
        while let Ok(Some(_)) = guest.next_line(Duration::ZERO) {}
        self.lab.hear(guest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel that lives with `least_mib` or more, and every other time fails by chance.
    fn kernel(least_mib: u64, by_chance: bool) -> impl FnMut(u64) -> anyhow::Result<Trial> {
        let mut tries = 0;
        move |mib| {
            tries += 1;
            let lived = mib >= least_mib && !(by_chance && tries % 2 == 1);
            let alive = if lived {
                Ok(None)
            } else {
                Err("panic".to_owned())
            };
            Ok(trial(mib * MIB, Instant::now(), alive))
        }
    }

    fn lived(trials: &[Trial]) -> Option<u64> {
        let lived = trials.iter().filter(|trial| trial.lived);
        lived.map(|trial| trial.memory_bytes / MIB).min()
    }

    #[test]
    fn steps_end_at_the_first_size_that_fails() {
        let trials = steps(100, 0.1, &mut kernel(70, true), &mut |_| Ok(())).unwrap();
        let sizes: Vec<_> = trials
            .iter()
            .map(|trial| trial.memory_bytes / MIB)
            .collect();
        assert_eq!(sizes, [100, 90, 81, 72, 64]);
        assert_eq!(lived(&trials), Some(72));
        assert_eq!(trials[4].why.as_deref(), Some("panic"));
    }

    #[test]
    fn steps_come_to_an_end_with_a_kernel_that_needs_nothing() {
        let trials = steps(20, 0.05, &mut kernel(0, false), &mut |_| Ok(())).unwrap();
        assert_eq!((trials.len(), lived(&trials)), (20, Some(1)));
    }

    #[test]
    fn halves_find_the_least_size() {
        for least in [1, 2, 63, 64, 65, 127, 128] {
            let trials = halves(128, &mut kernel(least, true), &mut |_| Ok(())).unwrap();
            assert_eq!(lived(&trials), Some(least), "{least}");
            assert!(trials.len() <= 9, "{}", trials.len());
        }
        let never = halves(128, &mut kernel(129, false), &mut |_| Ok(())).unwrap();
        assert_eq!((never.len(), lived(&never)), (1, None));
    }
}
