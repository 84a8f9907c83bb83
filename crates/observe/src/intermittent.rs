//! Intermittent tracking: tracing rests while a VM's phase is steady, and wakes when it changes (\[AET\] §3.4).
//!
//! A phase is steady when the working sets of [`STEADY_PERIODS`] periods are alike. The backend then detaches. While it
//! rests, some hundred random pages are checked once a period, and the CPU time and the reads of the VM's process are
//! counted. Tracing resumes, with new estimates, when one of these differs from what it was in the first period of the
//! rest, or after [`REST_PERIODS_MAX`] periods. Until then the last curve and
//! working set remain valid.
//!
//! Departs from the source in the signals: its are counts of instructions and page faults in the VM.
//!
//! Not noticed: that other pages are used in the same number, with the same reads and CPU time, before the rest ends by
//! itself.

use std::collections::VecDeque;
use std::fs;
use std::time::Duration;

use plimsoll_flow::{MissRatioCurve, PageCount, Period, TraceMethod, WorkingSet, WorkingSetBound};
use plimsoll_trap::{Backend, BackendRow, TraceConfig, TrapError};
use plimsoll_vm::QemuVm;

use crate::ObserveError;
use crate::follow::Follower;

/// Periods of alike working sets after which tracing rests.
const STEADY_PERIODS: usize = 3;
/// Maximum length of a rest.
const REST_PERIODS_MAX: u32 = 60;
/// Working sets and rates that differ by less than this share are alike.
const ALIKE: f64 = 0.15;
/// Differences of the VM's CPU time (share of a CPU) and reads (bytes per second) that are always alike.
const CPU_ALIKE: f64 = 0.05;
const READS_ALIKE: f64 = 1e6;
/// Pages checked once a period of a rest.
const CHECKED_PAGES: usize = 400;
/// Standard deviations by which shares of touched pages may differ by chance.
const DEVIATIONS: f64 = 3.5;

/// Decides when tracing rests.
#[derive(Debug)]
pub struct Intermittence {
    vm: QemuVm,
    row: &'static BackendRow,
    config: TraceConfig,
    recent: VecDeque<PageCount>,
    rest: Option<Rest>,
}

/// A rest in progress.
#[derive(Debug)]
struct Rest {
    periods: u32,
    /// Counts at the end of the last period.
    counts: Option<Counts>,
    first: Option<Signals>,
    curve: Option<MissRatioCurve>,
    working_set: Option<WorkingSet>,
}

/// Counts of the VM's process since its start.
#[derive(Debug, Clone, Copy)]
struct Counts {
    cpu: Duration,
    read_bytes: u64,
}

/// What a period of a rest shows.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Signals {
    touched: u64,
    checked: u64,
    /// CPUs used, and bytes read per second.
    cpu: f64,
    reads: f64,
}

/// Results that remain valid during a rest.
#[derive(Debug, Clone)]
pub struct LastResults {
    /// The last curve.
    pub curve: Option<MissRatioCurve>,
    /// The last working set.
    pub working_set: Option<WorkingSet>,
}

impl Intermittence {
    pub fn new(vm: &QemuVm, row: &'static BackendRow, config: &TraceConfig) -> Self {
        Self {
            vm: vm.clone(),
            row,
            config: config.clone(),
            recent: VecDeque::new(),
            rest: None,
        }
    }

    pub fn is_resting(&self) -> bool {
        self.rest.is_some()
    }

    /// After a traced period: the backend for a rest, if the phase is steady and pages can be checked.
    pub fn settle(
        &mut self,
        curve: Option<&MissRatioCurve>,
        working_set: Option<WorkingSet>,
    ) -> Option<Box<dyn Backend>> {
        let is_estimate = |set: &WorkingSet| set.bound == WorkingSetBound::Estimate;
        let Some(set) = working_set.filter(is_estimate) else {
            self.recent.clear();
            return None;
        };
        self.recent.push_back(set.size);
        if self.recent.len() > STEADY_PERIODS {
            self.recent.pop_front();
        }
        let sizes = self.recent.iter().map(|size| size.0 as f64);
        let (least, most) = (
            sizes.clone().fold(f64::INFINITY, f64::min),
            sizes.fold(0.0, f64::max),
        );
        if self.recent.len() < STEADY_PERIODS || most - least > ALIKE * most {
            return None;
        }
        self.recent.clear();
        let config = TraceConfig {
            sample_pages: CHECKED_PAGES,
            ..self.config.clone()
        };
        let checker = BackendRow::of(TraceMethod::SampledPages);
        let checker = Follower::attach(&self.vm, checker, &config).ok()?;
        self.rest = Some(Rest {
            periods: 0,
            counts: Counts::of(self.vm.pid),
            first: None,
            curve: curve.cloned(),
            working_set: Some(set),
        });
        Some(Box::new(checker))
    }

    /// After a period of a rest, which is then reported as one of the backend that rests: the last results, and whether
    /// the rest is over.
    pub fn check(&mut self, period: &mut Period) -> Option<(LastResults, bool)> {
        let rest = self.rest.as_mut()?;
        rest.periods += 1;
        let now = Counts::of(self.vm.pid);
        let seconds = period.length.as_secs_f64();
        let signals = rest.counts.zip(now).map(|(before, now)| Signals {
            touched: period.distinct_pages,
            checked: period.tracked_pages,
            cpu: now.cpu.saturating_sub(before.cpu).as_secs_f64() / seconds,
            reads: now.read_bytes.saturating_sub(before.read_bytes) as f64 / seconds,
        });
        rest.counts = now;
        let is_over = match (signals, rest.first) {
            (None, _) => true,
            (Some(now), None) => {
                rest.first = Some(now);
                false
            }
            (Some(now), Some(first)) => now.differ(first) || rest.periods >= REST_PERIODS_MAX,
        };
        period.method = self.row.method;
        let last = LastResults {
            curve: rest.curve.clone(),
            working_set: rest.working_set,
        };
        Some((last, is_over))
    }

    /// Ends a rest: attaches the backend again.
    pub fn wake(&mut self) -> Result<Box<dyn Backend>, TrapError> {
        self.rest = None;
        match Follower::attach(&self.vm, self.row, &self.config) {
            Ok(backend) => Ok(Box::new(backend)),
            Err(ObserveError::Trace { source, .. }) => Err(source),
            Err(ObserveError::Vm { .. }) => Err(TrapError::VmGone { pid: self.vm.pid }),
        }
    }
}

impl Counts {
    /// `None` if the process has ended, or may not be read.
    fn of(pid: u32) -> Option<Self> {
        let read = |file| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
        Self::parsed(&read("stat")?, &read("io")?)
    }

    fn parsed(stat: &str, io: &str) -> Option<Self> {
        // The name before may contain anything.
        let (_, rest) = stat.rsplit_once(')')?;
        let mut ticks = rest.split_whitespace().skip(11);
        let mut next = || ticks.next()?.parse::<u64>().ok();
        let ticks = next()?.saturating_add(next()?);
        let read = io.lines().find_map(|line| line.strip_prefix("rchar: "))?;
        Some(Self {
            // Ticks of 10 ms, as every architecture of KVM reports them.
            cpu: Duration::from_millis(ticks.saturating_mul(10)),
            read_bytes: read.trim().parse().ok()?,
        })
    }
}

impl Signals {
    fn differ(self, first: Self) -> bool {
        let far = |now: f64, before: f64, alike: f64| (now - before).abs() > ALIKE * before + alike;
        let (now, before) = (self.checked as f64, first.checked as f64);
        if now == 0.0 || before == 0.0 {
            return true;
        }
        let share = (self.touched + first.touched) as f64 / (now + before);
        let variance = share * (1.0 - share) * (1.0 / now + 1.0 / before);
        let shares = self.touched as f64 / now - first.touched as f64 / before;
        shares.abs() > DEVIATIONS * variance.sqrt()
            || far(self.cpu, first.cpu, CPU_ALIKE)
            || far(self.reads, first.reads, READS_ALIKE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Signals = Signals {
        touched: 120,
        checked: 400,
        cpu: 1.0,
        reads: 10e6,
    };

    #[test]
    fn a_rest_ends_when_a_signal_differs_by_more_than_chance() {
        for (now, differ) in [
            (FIRST, false),
            (
                Signals {
                    touched: 150,
                    ..FIRST
                },
                false,
            ),
            (
                Signals {
                    touched: 170,
                    ..FIRST
                },
                true,
            ),
            (
                Signals {
                    touched: 75,
                    ..FIRST
                },
                true,
            ),
            (Signals { cpu: 1.15, ..FIRST }, false),
            (Signals { cpu: 0.7, ..FIRST }, true),
            (
                Signals {
                    reads: 12e6,
                    ..FIRST
                },
                false,
            ),
            (
                Signals {
                    reads: 20e6,
                    ..FIRST
                },
                true,
            ),
            (
                Signals {
                    checked: 0,
                    ..FIRST
                },
                true,
            ),
        ] {
            assert_eq!(now.differ(FIRST), differ, "{now:?}");
        }
    }

    #[test]
    fn counts_are_read_past_a_name_with_brackets() {
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20";
        let counts = Counts::parsed(stat, "rchar: 77\nwchar: 1\n").unwrap();
        assert_eq!(
            (counts.cpu, counts.read_bytes),
            (Duration::from_secs(3), 77)
        );
        assert!(Counts::parsed("7 (a) S 1", "rchar: 7").is_none());
    }
}
