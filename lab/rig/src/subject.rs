//! A guest of ours with the log of its console, which reports its true working set, visits and wrong pages.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_flow::PageCount;
use plimsoll_vm::{ConsoleEvent, QemuVm, Stalls};

use crate::{Boot, Guest, GuestConfig, GuestError, POLL, wait_for};

/// Longest wait for anything that must come: guests here may be emulated, and machines busy.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A guest that runs its workload.
#[derive(Debug)]
pub struct Subject {
    /// The guest itself.
    pub guest: Guest,
    /// The VM as its tracer finds it.
    pub vm: QemuVm,
    console: ConsoleLog,
}

/// What a guest reported, with the time at which each line arrived here.
#[derive(Debug, Clone, Default)]
pub struct ConsoleLog(pub Vec<(Instant, ConsoleEvent)>);

impl Subject {
    /// Boots a guest and waits until its array is populated.
    ///
    /// # Errors
    ///
    /// Why it did not come up; no guest is left.
    pub fn boot<'a>(boot: impl Into<Boot<'a>>, config: &GuestConfig) -> anyhow::Result<Self> {
        let mut subject = Self::start(boot, config)?;
        subject.until_populated()?;
        Ok(subject)
    }

    /// Starts a guest; it boots while the caller continues.
    ///
    /// # Errors
    ///
    /// Why it did not start; no guest is left.
    pub fn start<'a>(boot: impl Into<Boot<'a>>, config: &GuestConfig) -> anyhow::Result<Self> {
        let mut guest = Guest::start(boot, config)
            .with_context(|| format!("cannot start guest {}", config.name))?;
        Ok(Self {
            vm: guest.vm()?,
            guest,
            console: ConsoleLog::default(),
        })
    }

    /// Waits until the guest's array is populated; what it reported before is dropped.
    ///
    /// # Errors
    ///
    /// The reason why that did not happen.
    pub fn until_populated(&mut self) -> anyhow::Result<()> {
        let populated = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Populated { .. });
        let waited = self.guest.wait_for(PATIENCE, populated);
        waited.with_context(|| format!("guest {} did not come up", self.guest.name()))?;
        Ok(())
    }

    /// What executes the guest's instructions: "kvm" or "tcg".
    pub fn accelerator(&self) -> String {
        self.guest.detection().accelerator.to_string()
    }

    /// What the guest has reported so far.
    ///
    /// # Errors
    ///
    /// That the guest's workload failed, with its message, or that the guest ended before its workload was
    /// done; [`console`](Self::console) still has what it reported.
    pub fn listen(&mut self) -> Result<&ConsoleLog, GuestError> {
        loop {
            match self.guest.next_line(Duration::ZERO) {
                Ok(Some(line)) => {
                    if let Some(ConsoleEvent::Error { message }) = line.event {
                        return Err(GuestError::GuestFailed { message });
                    }
                    let event = line.event.map(|event| (line.at, event));
                    self.console.0.extend(event);
                }
                Ok(None) => break,
                Err(GuestError::GuestEnded { .. }) if self.console.is_done() => break,
                Err(error) => return Err(error),
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
            thread::sleep(POLL);
        }
        let gone = self.guest.wait(limit.saturating_sub(begin.elapsed()))?;
        anyhow::ensure!(
            gone.is_some(),
            "the guest did not power off within {limit:?}"
        );
        Ok(())
    }

    /// What the guest had reported at the last [`listen`](Self::listen).
    pub fn console(&self) -> &ConsoleLog {
        &self.console
    }

    /// As [`listen`](Self::listen), for tests: an end is no failure; earlier reports stay valid.
    pub fn reported(&mut self) -> &ConsoleLog {
        while let Ok(Some(line)) = self.guest.next_line(Duration::ZERO) {
            let event = line.event.map(|event| (line.at, event));
            self.console.0.extend(event);
        }
        &self.console
    }

    /// Waits until the console's log satisfies a test's condition.
    ///
    /// # Panics
    ///
    /// If it is not within [`PATIENCE`].
    pub fn until(&mut self, what: &str, mut is: impl FnMut(&ConsoleLog) -> bool) {
        wait_for(what, PATIENCE, || is(self.reported()).then_some(()));
    }

    /// Waits until the workload has completed three more rounds or results.
    ///
    /// # Panics
    ///
    /// If it does not, or found a page wrong.
    pub fn assert_goes_on(&mut self) {
        let from = Instant::now();
        // Of the rounds that come, the first may have ended before.
        self.until("a guest that goes on", |log| {
            let events = log.0.iter().filter(|(at, event)| {
                let is_work = matches!(
                    event,
                    ConsoleEvent::Round { .. } | ConsoleEvent::Result { .. }
                );
                *at > from && is_work
            });
            events.count() >= 3
        });
        self.assert_sound();
    }

    /// Waits until the workload has ended and read every page once more.
    ///
    /// # Panics
    ///
    /// If it does not, or found a page wrong.
    pub fn assert_ends_sound(&mut self) {
        self.until("the end of a guest's work", ConsoleLog::is_done);
        self.assert_sound();
    }

    /// Checks that the workload found no page wrong and did not give up.
    ///
    /// # Panics
    ///
    /// If it did.
    pub fn assert_sound(&mut self) {
        assert_eq!(self.reported().fault(), None);
    }
}

/// A completed part of a guest's work.
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
    pub fn steps(&self) -> Vec<(Instant, PageCount)> {
        let steps = self.0.iter().filter_map(|(at, event)| match event {
            ConsoleEvent::Step { pages, .. } => Some((*at, *pages)),
            _ => None,
        });
        steps.collect()
    }

    /// The rounds that lie whole between two times.
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

    /// What visits lost between two times, whole rounds only, with the time of these rounds; zero for guests with an
    /// operating system, which do not measure it.
    pub fn stalls(&self, from: Instant, to: Instant) -> (Stalls, Duration) {
        let rounds = self.0.iter().filter(|(at, _)| *at >= from && *at <= to);
        let mut rounds = rounds.filter_map(|(_, event)| match event {
            ConsoleEvent::Round { stalls, ms, .. } => {
                Some(((*stalls)?, Duration::from_millis(*ms)))
            }
            _ => None,
        });
        let Some((first, _)) = rounds.next() else {
            return Default::default();
        };
        let (mut last, mut longest, mut length) = (first, Duration::ZERO, Duration::ZERO);
        for (stalls, took) in rounds {
            (last, longest, length) = (stalls, longest.max(stalls.longest), length + took);
        }
        let stalls = Stalls {
            count: last.count - first.count,
            time: last.time.saturating_sub(first.time),
            long_time: last.long_time.saturating_sub(first.long_time),
            longest,
        };
        (stalls, length)
    }

    /// Visits to pages between two times, with the time they took, whole rounds only.
    pub fn visits(&self, from: Instant, to: Instant) -> (u64, Duration) {
        self.rounds(from, to)
            .fold((0, Duration::ZERO), |(visits, took), round| {
                (visits + round.visits, took + (round.end - round.start))
            })
    }

    /// The guest's longest stall in the rounds reported between two times, by its own clock.
    pub fn longest_stall(&self, from: Instant, to: Instant) -> Option<Duration> {
        let stalls = self.0.iter().filter_map(|&(at, ref event)| match *event {
            ConsoleEvent::Round { longest_ms, .. } if at >= from && at <= to => longest_ms,
            _ => None,
        });
        stalls.max().map(Duration::from_millis)
    }

    /// Pages the guest found wrong.
    pub fn mismatches(&self) -> u64 {
        let counts = self.0.iter().rev().find_map(|(_, event)| match event {
            ConsoleEvent::Round { mismatches, .. } | ConsoleEvent::Done { mismatches, .. } => {
                Some(*mismatches)
            }
            _ => None,
        });
        counts.unwrap_or_default()
    }

    /// The first event that reports a wrong page or block, or that the workload gave up.
    pub fn fault(&self) -> Option<&ConsoleEvent> {
        let mut events = self.0.iter().map(|(_, event)| event);
        events.find(|event| match event {
            ConsoleEvent::Mismatch { .. } | ConsoleEvent::Error { .. } => true,
            ConsoleEvent::Round { mismatches, .. } | ConsoleEvent::Done { mismatches, .. } => {
                *mismatches > 0
            }
            ConsoleEvent::Result { fields, .. } => fields
                .get("mismatches")
                .is_some_and(|mismatches| mismatches != "0"),
            _ => false,
        })
    }

    /// Whether the workload and the audit of its pages came to their end.
    pub fn is_done(&self) -> bool {
        self.0
            .iter()
            .any(|(_, event)| matches!(event, ConsoleEvent::Done { .. }))
    }
}
