//! Traces a guest with known accesses by one backend after another and compares each backend's result and cost with the
//! truth.
//!
//! The guest is part of `plimsoll-vm` (crate `plimsoll-kvm-guest`). It scans an array repeatedly, so its working set is
//! the array, and it measures its stalls by its own clock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use plimsoll_flow::{Accelerator, WorkingSetBound};
use plimsoll_trap::{BackendRow, Toucher, TraceConfig};
use plimsoll_vm::{BareGuest, BareGuestEvent, ConsoleEvent, QEMU, QemuVm, Stalls, VmError};
use serde::Serialize;

use crate::{ObservedPeriod, Observer, ObserverOptions};

/// Size of the guest's array.
const ARRAY_MIB: u64 = 64;
const ARRAY_PAGES: u64 = ARRAY_MIB * 256;
const MEMORY_MIB: u64 = 128;
/// Time limit for a guest to boot and populate its array.
const BOOT: Duration = Duration::from_secs(60);
/// Traced periods of a backend; in the first ones its rate settles.
const PERIODS: usize = 6;
const PERIODS_SETTLING: usize = 2;
const PERIOD: Duration = Duration::from_secs(2);
/// Time for which the guest is observed untraced, before and after each backend.
const UNTRACED: Duration = Duration::from_secs(2);
/// How often it is checked whether to stop.
const TURN: Duration = Duration::from_millis(100);

/// Result and cost of a backend.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// Median of the relative errors of the working set; `null` if no period had an estimate.
    pub error_ratio: Option<f64>,
    /// Periods with an estimate, of those after the first ones.
    pub estimates: usize,
    /// Periods after the first ones.
    pub periods: usize,
    /// Share of the vCPU's time that the tracer reports as taken.
    pub overhead_ratio: f64,
    /// Increase of the guest's stall time over the untraced time, as a share, by its own clock. May be negative due to
    /// noise.
    pub guest_overhead_ratio: f64,
    /// Share of its time that it stalled untraced: the noise of this host.
    pub untraced_stalled_ratio: f64,
    /// Visits per second while traced, divided by those while untraced.
    pub speed_ratio: f64,
    /// Number of pages or accesses lost.
    pub lost: u64,
    /// Cost of a trap or fault, in µs.
    pub touch_cost_us: f64,
    /// Whether that cost was measured on a vCPU of KVM.
    pub touch_cost_by_kvm: bool,
    /// Pages that the guest found to have wrong contents.
    pub mismatches: u64,
}

/// The guest and its last report.
#[derive(Debug)]
pub struct Subject<'a> {
    guest: BareGuest,
    vm: QemuVm,
    latest: Reading,
    stop: &'a AtomicBool,
}

/// Cumulative visits and stalls of the guest at the end of a round.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    visits: u64,
    stalls: Stalls,
    mismatches: u64,
}

/// Visits and stalls of the guest within a time span.
#[derive(Debug, Clone, Copy)]
struct Pace {
    seconds: f64,
    visits: f64,
    stalled: f64,
}

impl Pace {
    fn between(from: &Reading, to: &Reading) -> Self {
        let lost = |stalls: &Stalls| (stalls.time + stalls.long_time).as_secs_f64();
        Self {
            seconds: (to.at - from.at).as_secs_f64().max(1e-9),
            visits: (to.visits - from.visits) as f64,
            stalled: lost(&to.stalls) - lost(&from.stalls),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            visits: self.visits + other.visits,
            stalled: self.stalled + other.stalled,
        }
    }
}

impl<'a> Subject<'a> {
    /// Boots a guest with an accelerator and this CPU model, and waits until it runs. When `stop` becomes true, this and
    /// all else that is done with the guest ends with an error.
    ///
    /// # Errors
    ///
    /// Why it does not run.
    pub fn boot(on: (Accelerator, &str), stop: &'a AtomicBool) -> anyhow::Result<Self> {
        let name = format!("plimsoll-selftest-{}-{}", on.0, std::process::id());
        let settings = format!("workload=sequential mib={ARRAY_MIB} write_ratio=0.2 seconds=600");
        let guest = BareGuest::start(&name, on, MEMORY_MIB, &settings);
        let mut guest = guest.with_context(|| format!("cannot start {QEMU}"))?;
        let latest = next_round(&mut guest, Instant::now() + BOOT, stop)
            .with_context(|| format!("a small guest under {} did not run", on.0))?;
        let vm: Result<_, VmError> = QemuVm::of_pid(guest.pid());
        Ok(Self {
            vm: vm?,
            guest,
            latest,
            stop,
        })
    }

    /// Returns the end of the next round.
    fn read(&mut self) -> anyhow::Result<Reading> {
        let now = Instant::now();
        let deadline = now + Duration::from_secs(30);
        while self.latest.at < now {
            self.latest = next_round(&mut self.guest, deadline, self.stop)?;
        }
        Ok(self.latest)
    }

    /// Measures the guest untraced for a while.
    fn rest(&mut self) -> anyhow::Result<Pace> {
        let from = self.read()?;
        let end = Instant::now() + UNTRACED;
        while Instant::now() < end {
            go_on(self.stop)?;
            std::thread::sleep(TURN);
        }
        let to = self.read()?;
        Ok(Pace::between(&from, &to))
    }

    /// Traces the guest by a backend.
    ///
    /// # Errors
    ///
    /// Why the backend cannot trace it, that the guest has ended, or that this was interrupted.
    pub fn trace(&mut self, row: &BackendRow) -> anyhow::Result<Outcome> {
        let config = TraceConfig {
            period: PERIOD,
            ..TraceConfig::default()
        };
        let before = self.rest()?;
        let options = ObserverOptions::default();
        let mut observer = Observer::attach(&self.vm, row.method, &config, &options)?;
        let from = self.read()?;
        let periods = (0..PERIODS).map(|_| observer.period(self.stop));
        let periods: Vec<ObservedPeriod> = periods.collect::<Result<_, _>>()?;
        let to = self.read()?;
        let cost = observer.touch_cost();
        observer.detach()?;
        let untraced = before.and(self.rest()?);
        let traced = Pace::between(&from, &to);

        let mut errors: Vec<f64> = periods[PERIODS_SETTLING..]
            .iter()
            .filter_map(|period| period.working_set)
            .filter(|set| set.bound == WorkingSetBound::Estimate)
            .map(|set| (set.size.0 as f64 / ARRAY_PAGES as f64 - 1.0).abs())
            .collect();
        errors.sort_by(f64::total_cmp);
        let overheads = periods.iter().map(|period| period.period.overhead_ratio);
        Ok(Outcome {
            error_ratio: errors.get(errors.len() / 2).copied(),
            estimates: errors.len(),
            periods: PERIODS - PERIODS_SETTLING,
            overhead_ratio: overheads.sum::<f64>() / PERIODS as f64,
            guest_overhead_ratio: traced.stalled / traced.seconds
                - untraced.stalled / untraced.seconds,
            untraced_stalled_ratio: untraced.stalled / untraced.seconds,
            speed_ratio: traced.visits
                / traced.seconds
                / (untraced.visits / untraced.seconds).max(1e-9),
            lost: periods
                .iter()
                .map(|period| period.period.losses.lost())
                .sum(),
            touch_cost_us: cost.time.as_secs_f64() * 1e6,
            touch_cost_by_kvm: cost.toucher == Toucher::KvmVcpu,
            mismatches: self.latest.mismatches,
        })
    }
}

/// An error if this was interrupted.
fn go_on(stop: &AtomicBool) -> anyhow::Result<()> {
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// The guest's next round; an error if there is none.
fn next_round(
    guest: &mut BareGuest,
    deadline: Instant,
    stop: &AtomicBool,
) -> anyhow::Result<Reading> {
    loop {
        go_on(stop)?;
        match guest.next(deadline.min(Instant::now() + TURN)) {
            BareGuestEvent::Line(
                at,
                ConsoleEvent::Round {
                    total_ops,
                    mismatches,
                    stalls: Some(stalls),
                    ..
                },
            ) => {
                return Ok(Reading {
                    at,
                    visits: total_ops,
                    stalls,
                    mismatches,
                });
            }
            BareGuestEvent::Line(_, ConsoleEvent::Error { message }) => bail!("{message}"),
            BareGuestEvent::Line(..) => {}
            BareGuestEvent::Silence if Instant::now() < deadline => {}
            BareGuestEvent::Silence => bail!("the guest printed nothing in time"),
            BareGuestEvent::Ended(why) => bail!("it ended: {why}"),
        }
    }
}
