//! A guest of ours, traced from outside while it says what it does: what demo and lab stand on.
//!
//! The guest's console tells the truth (working set of each step, visits, wrong pages); the
//! tracer sees only the VM's memory. Both are timed by the clock of this host.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_flow::{PageCount, TraceMethod, WorkingSetBound};
use plimsoll_observe::{Curves, ObservedPeriod, Observer, ObserverOptions};
use plimsoll_trap::{TraceConfig, TrapError};
use plimsoll_vm::{ConsoleEvent, Detection, Guest, GuestConfig, GuestImage, QemuVm, VmError};

/// Longest boot, on a host that does other things too.
const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

/// A guest that runs its workload.
#[derive(Debug)]
pub struct Subject {
    guest: Guest,
    /// The VM as its tracer finds it.
    pub vm: QemuVm,
    console: ConsoleLog,
}

/// What a guest said, with the time at which each line arrived here.
#[derive(Debug, Clone, Default)]
pub struct ConsoleLog(pub Vec<(Instant, ConsoleEvent)>);

/// A traced period and when it was.
#[derive(Debug)]
pub struct Traced {
    /// When it began.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
    /// What it showed.
    pub observed: ObservedPeriod,
}

/// What tracing a guest showed.
#[derive(Debug)]
pub struct Observed {
    /// The periods in order.
    pub periods: Vec<Traced>,
    /// The curves over all of them; `None` if no page was used twice.
    pub curves: Option<Curves>,
}

impl Subject {
    /// Boots a guest and waits until its array is populated.
    ///
    /// # Errors
    ///
    /// Why it did not come up; no guest is left.
    pub fn boot(image: &GuestImage, config: &GuestConfig) -> anyhow::Result<Self> {
        let mut guest = Guest::start(image, config)
            .with_context(|| format!("cannot start guest {}", config.name))?;
        guest
            .wait_for(BOOT_TIMEOUT, |event| {
                matches!(event, ConsoleEvent::Populated { .. })
            })
            .with_context(|| format!("guest {} did not come up", config.name))?;
        let vm = guest.vm()?;
        Ok(Self {
            guest,
            vm,
            console: ConsoleLog::default(),
        })
    }

    /// What runs the guest's instructions, and why.
    #[must_use]
    pub fn detection(&self) -> &Detection {
        self.guest.detection()
    }

    /// By what the guest runs: "kvm" or "tcg".
    #[must_use]
    pub fn accelerator(&self) -> String {
        self.guest.detection().accelerator.to_string()
    }

    /// Traces the guest as [`trace`] does.
    ///
    /// # Errors
    ///
    /// As [`trace`]; the guest runs on.
    pub fn trace(
        &mut self,
        config: &TraceConfig,
        limit: Duration,
        stop: &AtomicBool,
        each: &mut dyn FnMut(&Traced),
    ) -> anyhow::Result<Observed> {
        trace(&self.vm, config, limit, stop, each)
    }

    /// What the guest said so far.
    ///
    /// # Errors
    ///
    /// That the guest's workload failed, in its words, or that the guest ended before its workload was
    /// done; [`heard`](Self::heard) still has what it said.
    pub fn listen(&mut self) -> anyhow::Result<&ConsoleLog> {
        loop {
            match self.guest.next_line(Duration::ZERO) {
                Ok(Some(line)) => {
                    if let Some(ConsoleEvent::Error { message }) = line.event {
                        return Err(VmError::GuestFailed { message }.into());
                    }
                    let event = line.event.map(|event| (line.at, event));
                    self.console.0.extend(event);
                }
                Ok(None) => break,
                Err(VmError::GuestEnded { .. }) if self.console.is_done() => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(&self.console)
    }

    /// Waits until the guest's workload has come to its end and the guest is gone, at most `limit`.
    ///
    /// # Errors
    ///
    /// As [`listen`](Self::listen), and that the time is over.
    pub fn wait_for_end(&mut self, limit: Duration) -> anyhow::Result<()> {
        let begin = Instant::now();
        while !self.listen()?.is_done() {
            anyhow::ensure!(
                begin.elapsed() < limit,
                "the guest's workload did not end within {limit:?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        let gone = self.guest.wait(limit.saturating_sub(begin.elapsed()))?;
        anyhow::ensure!(
            gone.is_some(),
            "the guest did not power off within {limit:?}"
        );
        Ok(())
    }

    /// What the guest said up to the last [`listen`](Self::listen).
    #[must_use]
    pub fn heard(&self) -> &ConsoleLog {
        &self.console
    }

    /// The working sets of a stepping guest, as [`ConsoleLog::steps`].
    ///
    /// # Errors
    ///
    /// As [`listen`](Self::listen).
    pub fn steps(&mut self) -> anyhow::Result<Vec<(Instant, PageCount)>> {
        Ok(self.listen()?.steps())
    }

    /// Visits to pages between two moments, as [`ConsoleLog::visits`].
    ///
    /// # Errors
    ///
    /// As [`listen`](Self::listen).
    pub fn visits(&mut self, from: Instant, to: Instant) -> anyhow::Result<(u64, Duration)> {
        Ok(self.listen()?.visits(from, to))
    }

    /// Pages the guest found wrong so far.
    ///
    /// # Errors
    ///
    /// As [`listen`](Self::listen).
    pub fn mismatches(&mut self) -> anyhow::Result<u64> {
        Ok(self.listen()?.mismatches())
    }
}

/// Traces a VM period after period until `stop`, the VM's end, or `limit`; tells each to `each`.
///
/// # Errors
///
/// As [`Observer::attach`] and [`Observer::period`]; the VM runs on.
pub fn trace(
    vm: &QemuVm,
    config: &TraceConfig,
    limit: Duration,
    stop: &AtomicBool,
    each: &mut dyn FnMut(&Traced),
) -> anyhow::Result<Observed> {
    let options = ObserverOptions {
        is_compared: true,
        ..ObserverOptions::default()
    };
    let mut observer = Observer::attach(vm, TraceMethod::Traps, config, &options)?;
    let begin = Instant::now();
    let mut periods = Vec::new();
    let mut gone = false;
    while begin.elapsed() < limit && !stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        match observer.period(stop) {
            Ok(period) => {
                let traced = Traced {
                    start,
                    end: Instant::now(),
                    observed: period,
                };
                each(&traced);
                periods.push(traced);
            }
            Err(TrapError::VmGone { .. }) => {
                gone = true;
                break;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let curves = observer.curves();
    if !gone {
        observer.detach()?;
    }
    Ok(Observed { periods, curves })
}

/// A stretch of a guest's work, as it told of it.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// When it began.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
    /// Its working set.
    pub pages: PageCount,
    /// Visits to pages in it.
    pub visits: u64,
}

impl ConsoleLog {
    /// The working sets of a stepping guest: from when on each held.
    #[must_use]
    pub fn steps(&self) -> Vec<(Instant, PageCount)> {
        let steps = self.0.iter().filter_map(|(at, event)| match event {
            ConsoleEvent::Step { pages, .. } => Some((*at, *pages)),
            _ => None,
        });
        steps.collect()
    }

    /// The rounds that lie whole between two moments.
    pub fn rounds(&self, from: Instant, to: Instant) -> impl Iterator<Item = Round> {
        self.0
            .iter()
            .filter_map(|&(end, ref event)| match *event {
                ConsoleEvent::Round { ops, ms, pages, .. } => Some(Round {
                    start: end.checked_sub(Duration::from_millis(ms))?,
                    end,
                    pages,
                    visits: ops,
                }),
                _ => None,
            })
            .filter(move |round| round.start >= from && round.end <= to)
    }

    /// Visits to pages between two moments, with the time they took, whole rounds only.
    #[must_use]
    pub fn visits(&self, from: Instant, to: Instant) -> (u64, Duration) {
        self.rounds(from, to)
            .fold((0, Duration::ZERO), |(visits, took), round| {
                (visits + round.visits, took + (round.end - round.start))
            })
    }

    /// Pages the guest found wrong.
    #[must_use]
    pub fn mismatches(&self) -> u64 {
        let counts = self.0.iter().rev().find_map(|(_, event)| match event {
            ConsoleEvent::Round { mismatches, .. } | ConsoleEvent::Done { mismatches, .. } => {
                Some(*mismatches)
            }
            _ => None,
        });
        counts.unwrap_or_default()
    }

    /// Whether the workload and the audit of its pages came to their end.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.0
            .iter()
            .any(|(_, event)| matches!(event, ConsoleEvent::Done { .. }))
    }
}

/// A period held against the truth.
#[derive(Debug, Clone, Copy)]
pub struct Judged {
    /// The step's true working set.
    pub truth: PageCount,
    /// What was found; `None` if only a bound was.
    pub found: Option<PageCount>,
    /// Whether the period is the first that lies whole in its step.
    pub first: bool,
}

impl Judged {
    /// Relative error of what was found, 0.0 for none; `None` if only a bound was found.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        Some(self.found?.0 as f64 / self.truth.0 as f64 - 1.0)
    }
}

/// Holds every period that lies whole within one step against that step's working set.
#[must_use]
pub fn judge(periods: &[Traced], steps: &[(Instant, PageCount)]) -> Vec<Judged> {
    let ends = steps.iter().skip(1).map(|&(at, _)| Some(at)).chain([None]);
    let mut judged = Vec::new();
    for (&(begin, truth), end) in steps.iter().zip(ends) {
        let whole = periods
            .iter()
            .filter(|traced| traced.start >= begin && end.is_none_or(|end| traced.end <= end));
        judged.extend(whole.enumerate().map(|(index, traced)| {
            Judged {
                truth,
                found: traced
                    .observed
                    .working_set
                    .filter(|set| set.bound == WorkingSetBound::Estimate)
                    .map(|set| set.size),
                first: index == 0,
            }
        }));
    }
    judged
}
