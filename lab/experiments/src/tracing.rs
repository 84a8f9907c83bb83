//! Guests traced from outside while they report what they do, and the comparison of estimates with the reports.
//!
//! Both are timed by the clock of this host.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{PageCount, TraceMethod, WorkingSetBound};
use plimsoll_trap::{TraceConfig, TrapError};
use plimsoll_vm::QemuVm;

use plimsoll_observe::{Curves, ObservedPeriod, Observer, ObserverOptions};

/// A traced period and its time.
#[derive(Debug)]
pub struct TracedPeriod {
    /// Begin of the period.
    pub start: Instant,
    /// End of the period.
    pub end: Instant,
    /// Its result.
    pub observed: ObservedPeriod,
}

/// The result of tracing a guest.
#[derive(Debug)]
pub struct TracingResult {
    /// The periods in order.
    pub periods: Vec<TracedPeriod>,
    /// The curves over all of them; `None` if no page was used twice.
    pub curves: Option<Curves>,
}

/// Traces a VM by `method` period by period until `stop`, the VM's end, or `limit`; passes each period to `each`. A
/// period's curve is that of the periods within `reach`, or its own.
///
/// # Errors
///
/// As [`Observer::attach`] and [`Observer::period`]; the VM runs on.
pub fn trace(
    vm: &QemuVm,
    (method, config): (TraceMethod, &TraceConfig),
    (limit, reach): (Duration, Option<Duration>),
    stop: &AtomicBool,
    each: &mut dyn FnMut(&TracedPeriod),
) -> anyhow::Result<TracingResult> {
    let options = ObserverOptions {
        is_compared: true,
        reach,
        ..ObserverOptions::default()
    };
    let mut observer = Observer::attach(vm, method, config, &options)?;
    let begin = Instant::now();
    let mut periods = Vec::new();
    let mut gone = false;
    while begin.elapsed() < limit && !stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        match observer.period(stop) {
            Ok(period) => {
                let traced = TracedPeriod {
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
    Ok(TracingResult { periods, curves })
}

/// A period compared with the guest's report.
#[derive(Debug, Clone, Copy)]
pub struct PeriodVerdict {
    /// The step's true working set.
    pub truth: PageCount,
    /// The estimate; `None` if there was only a bound.
    pub found: Option<PageCount>,
    /// Whether the period is the first that lies wholly in its step.
    pub first: bool,
}

impl PeriodVerdict {
    /// Relative error of the estimate, 0.0 for none; `None` if there was only a bound.
    pub fn error(&self) -> Option<f64> {
        Some(self.found?.0 as f64 / self.truth.0 as f64 - 1.0)
    }
}

/// Compares every period that lies wholly within one step with that step's working set.
pub fn judge(periods: &[TracedPeriod], steps: &[(Instant, PageCount)]) -> Vec<PeriodVerdict> {
    let ends = steps.iter().skip(1).map(|&(at, _)| Some(at)).chain([None]);
    let mut judged = Vec::new();
    for (&(begin, truth), end) in steps.iter().zip(ends) {
        let whole = periods
            .iter()
            .filter(|traced| traced.start >= begin && end.is_none_or(|end| traced.end <= end));
        judged.extend(whole.enumerate().map(|(index, traced)| {
            PeriodVerdict {
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
