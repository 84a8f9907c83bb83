//! The pages that a running VM writes, scan by scan: how many distinct ones within a time.
//!
//! All RAM is scanned, without a time budget, so that no written page is missing; any RAM can be, private or locked.
//!
//! Not here: what follows for a migration (`plimsoll_estimator::working_set::precopy`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use plimsoll_estimator::working_set::{WriteCurve, WrittenPages};
use plimsoll_flow::{PageCount, TraceMethod};
use plimsoll_trap::{BackendRow, Observation, RateRule, TraceConfig, TrapError};
use plimsoll_vm::{QemuVm, Target};

use crate::{ObserveError, target_of};

/// Written pages of a VM.
#[derive(Debug)]
pub struct ObservedWrites {
    /// Distinct pages by time.
    pub curve: WriteCurve,
    /// Pages of its RAM.
    pub ram: PageCount,
    /// Whether `stop` ended the observation before its time.
    pub is_interrupted: bool,
    /// Share of the VM's CPU time that the observation took.
    pub overhead_ratio: f64,
}

/// Observes the writes of a VM for a time, by scans at an interval; `config` has what else concerns attaching.
///
/// Ends early when `stop` becomes true.
///
/// # Errors
///
/// [`ObserveError`], also if the VM has ended meanwhile; it is otherwise as it was.
pub fn writes(
    vm: &QemuVm,
    (length, interval): (Duration, Duration),
    config: &TraceConfig,
    stop: &AtomicBool,
) -> Result<Option<ObservedWrites>, ObserveError> {
    let failed = |source: TrapError| ObserveError::Trace {
        target: Target::from(vm).to_string(),
        source,
    };
    let config = TraceConfig {
        period: length,
        budget: None,
        scale: 1,
        rate_rule: RateRule::Fixed,
        scan_interval: Some(interval),
        ..config.clone()
    };
    let row = BackendRow::of(TraceMethod::WriteScans);
    let mut backend = row.attach(&target_of(vm)?, &config).map_err(failed)?;
    let mut written = WrittenPages::new();
    let mut sink = |observation: &Observation<'_>| {
        if let Observation::Scan(scan) = observation {
            written.scan(observation.pages(), scan.to.saturating_sub(scan.from));
        }
    };
    let period = backend.run_period(stop, &mut sink).map_err(failed)?;
    let ram = PageCount(backend.ram_pages());
    backend.detach().map_err(failed)?;
    let is_interrupted = period.length < length && stop.load(Ordering::Relaxed);
    // One that has ended but was not waited for has no memory.
    if vm.process().mapped_bytes().is_none_or(|bytes| bytes == 0) {
        return Err(failed(TrapError::VmGone { pid: vm.pid }));
    }
    Ok(written.curve().map(|curve| ObservedWrites {
        curve,
        ram,
        is_interrupted,
        overhead_ratio: period.overhead_ratio,
    }))
}
