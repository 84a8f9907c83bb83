//! A run: three servers measured with their initial memory, with each allocation, and with their initial memory again.
//!
//! The sampling ESX of \[LS07\] §6.5 estimates a working set by the share of 100 random pages that are touched in 30 s.
//! Here all of a VM's pages stand for the sample: the kernel's own referenced bits of QEMU's mapping, cleared and read
//! again after 30 s. That is what the sampling estimates, without its noise (a standard deviation of up to 5 points).

use std::fs;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use plimsoll_flow::{PageCount, PageSize};
use plimsoll_observe::ObservedPeriod;
use plimsoll_policy::{Relative, Rules};
use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};
use plimsoll_protocol::disk_admin;
use plimsoll_protocol::plan::{DemandJson, PlanInputs, PlanJson, Policy, RulesJson};
use plimsoll_rig::program;
use serde::{Deserialize, Serialize};

use super::CurveSource;
use crate::trio::{
    BASELINE_MIB, CACHE_MIB, RAM_MIB, SCAN, Server, ServerCounts, TRACED_MIB, Third, Trio,
};

/// How long sampling waits for an access to a page.
const SAMPLE_TIME: Duration = Duration::from_secs(30);
/// How long a disk's daemon may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// How far above its bound a VM may be measured: \[LS07\]'s largest is 3 points.
pub const TOLERANCE: f64 = 0.03;
/// The prediction for a VM without a curve.
const UNCHANGED: Relative = Relative {
    expected: 1.0,
    low: 1.0,
    high: 1.0,
};
/// Minimum number of references of a curve on which decisions are based.
const REFERENCES_MIN: u64 = 1000;

/// How long what takes.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// The longest wait, after a change, until the servers have filled the memory that they gained.
    pub warmup: Duration,
    /// Each measurement.
    pub measure: Duration,
    /// Tracing for each source of curves.
    pub trace: Duration,
}

/// What is tried with the same guests.
#[derive(Debug)]
pub struct Trial {
    /// The source of the curves, from which the allocations are made.
    pub curves: CurveSource,
    /// The allocations, each with its bound.
    pub allocations: Vec<(Policy, Option<f64>)>,
}

/// Results with the same guests.
#[derive(Debug, Serialize, Deserialize)]
pub struct Run {
    pub third: Third,
    pub seed: u32,
    pub accelerator: String,
    pub vms: Vec<InitialVm>,
    pub allocations: Vec<AllocationResult>,
}

/// A VM with its initial memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct InitialVm {
    pub vm: String,
    pub misses_per_request: f64,
    /// The same at the end, with the same memory again: the change in the servers' behaviour meanwhile.
    pub misses_per_request_again: f64,
    /// Touched within 30 s.
    pub touched_bytes: u64,
}

/// An allocation and its result.
#[derive(Debug, Serialize, Deserialize)]
pub struct AllocationResult {
    pub curves: CurveSource,
    pub max_loss: Option<f64>,
    /// Geometric mean of the VMs that are not hostile.
    pub predicted_mean: f64,
    pub measured_mean: f64,
    pub vms: Vec<VmResult>,
    pub plan: PlanJson,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct VmResult {
    pub vm: String,
    pub bytes: u64,
    /// Misses per request relative to those before.
    pub predicted: Relative,
    pub measured: f64,
    /// Half-width of the 95 % band of the logarithm of what was measured, by the servers' reports of both times; 0.0 in runs of
    /// former versions.
    #[serde(default)]
    pub measured_error: f64,
    /// Share of the memory that it gained which it had filled when it was measured, 0.0 to 1.0.
    pub filled: f64,
    pub above_bound: bool,
    /// It pretends to need memory: nothing is promised to it, and it counts in no mean.
    pub is_hostile: bool,
}

impl VmResult {
    /// Whether what was measured lies in the prediction's band, widened by the error of the measurement: the prediction compares two
    /// sizes on the same reads, the measurement two times, whose misses also differ by chance.
    pub fn is_within_band(&self) -> bool {
        let Relative {
            expected,
            low,
            high,
        } = self.predicted;
        let limit = if self.measured > expected { high } else { low };
        let error = (self.measured / expected).ln().abs();
        error <= (limit / expected).ln().hypot(self.measured_error)
    }
}

/// Boots three servers, and measures them with their initial memory, with each allocation, and with their initial
/// memory again.
///
/// # Errors
///
/// Why a guest did not come up, gave up, or did not follow its balloon.
pub fn measure(
    third: Third,
    seed: u32,
    trials: &[Trial],
    times: &Times,
    stop: &AtomicBool,
) -> anyhow::Result<Run> {
    let mut trio = Trio::boot(&program("plimsoll")?, third, seed, stop)?;
    let settle = |trio: &mut Trio, filling| {
        let cold = trio.warm(&filling, times.warmup, stop)?;
        Ok::<_, anyhow::Error>((cold, trio.measure(times.measure, stop)?))
    };
    let filling = trio.filling_first()?;
    let (_, before) = settle(&mut trio, filling)?;
    clear_touched(&trio)?;
    trio.pass(SAMPLE_TIME, stop)?;
    let touched = touched_bytes(&trio)?;
    let mut run = Run {
        third,
        seed,
        accelerator: trio.servers[0].accelerator(),
        vms: Vec::new(),
        allocations: Vec::new(),
    };
    for (index, server) in trio.servers.iter().enumerate() {
        run.vms.push(InitialVm {
            vm: server.name.to_owned(),
            misses_per_request: per_request(&trio, &before, index)?,
            misses_per_request_again: 0.0,
            touched_bytes: touched[index],
        });
    }

    let whole = ((BASELINE_MIB - CACHE_MIB) << 20, CACHE_MIB << 20);
    for trial in trials {
        let source = trial.curves;
        let from_bytes = trio.direct_bytes()?;
        trio.hold(&[source.traced_bytes(); 3], stop)?;
        let filling = trio.filling(from_bytes)?;
        trio.warm(&filling, times.warmup, stop)?;
        let curves = curves(&mut trio, source, times.trace, stop)?;
        for &(policy, max_loss) in &trial.allocations {
            let plan = inputs(policy, max_loss, &curves, &touched).plan()?;
            let own = plan.targets.iter().map(|target| {
                let cache = CACHE_MIB << 20;
                (target.target_bytes - cache, cache)
            });
            let from_bytes = trio.direct_bytes()?;
            trio.hold(&own.collect::<Vec<_>>(), stop)?;
            let filling = trio.filling(from_bytes)?;
            let (cold, after) = settle(&mut trio, filling)?;
            let vms = plan.targets.iter().enumerate().map(|(index, target)| {
                let initial = run.vms[index].misses_per_request;
                let measured = per_request(&trio, &after, index)? / initial;
                let is_hostile = third == Third::Hostile && target.vm == SCAN;
                let bound = max_loss.map(|loss| 1.0 + loss + TOLERANCE);
                let bound = bound.filter(|_| !is_hostile);
                let filled = cold.iter().find(|(vm, _)| *vm == target.vm);
                Ok(VmResult {
                    vm: target.vm.clone(),
                    bytes: target.target_bytes,
                    predicted: target.relative.unwrap_or(UNCHANGED),
                    measured,
                    measured_error: before[index].error.hypot(after[index].error),
                    filled: filled.map_or(1.0, |(_, filled)| *filled),
                    above_bound: bound.is_some_and(|bound| measured > bound),
                    is_hostile,
                })
            });
            let vms: Vec<_> = vms.collect::<anyhow::Result<_>>()?;
            run.allocations.push(AllocationResult {
                curves: source,
                max_loss,
                predicted_mean: mean_of(&vms, |vm| vm.predicted.expected),
                measured_mean: mean_of(&vms, |vm| vm.measured),
                vms,
                plan,
            });
        }
    }
    let from_bytes = trio.direct_bytes()?;
    trio.hold(&[whole; 3], stop)?;
    let filling = trio.filling(from_bytes)?;
    let (_, again) = settle(&mut trio, filling)?;
    for (index, vm) in run.vms.iter_mut().enumerate() {
        vm.misses_per_request_again = per_request(&trio, &again, index)?;
    }
    Ok(run)
}

/// Traces the servers and returns their curves, in sizes as the host counts them.
fn curves(
    trio: &mut Trio,
    source: CurveSource,
    time: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<Vec<CurveJson>> {
    match source {
        CurveSource::Caches => {
            trio.pass(time, stop)?;
            trio.servers.iter_mut().map(cache_curve).collect()
        }
        CurveSource::FirstTouch => {
            let views = trio.observe(time, stop)?;
            let observed = trio.servers.iter_mut().zip(views);
            let curves = observed.map(|(server, view)| touch_curve(server, view?));
            curves.collect()
        }
    }
}

fn inputs(
    policy: Policy,
    max_loss: Option<f64>,
    curves: &[CurveJson],
    touched: &[u64],
) -> PlanInputs {
    let demand = |(curve, touched): (&CurveJson, &u64)| DemandJson {
        vm: curve.vm.clone(),
        curve: Some(curve.clone()),
        baseline_bytes: BASELINE_MIB << 20,
        current_bytes: BASELINE_MIB << 20,
        floor_bytes: (TRACED_MIB + CACHE_MIB) << 20,
        ceiling_bytes: Some((RAM_MIB + CACHE_MIB) << 20),
        max_loss,
        max_misses_per_second: None,
        shares: 1,
        working_set_bytes: Some(*touched),
    };
    PlanInputs {
        schema: SCHEMA,
        page_bytes: 4096,
        policy,
        rules: RulesJson {
            total_bytes: (BASELINE_MIB << 20) * curves.len() as u64,
            unit_bytes: 4 << 20,
            step_bytes: None,
            gain_min: 0.0,
            miss_ratio_min: Rules::MISS_RATIO_MIN,
        },
        demands: curves.iter().zip(touched).map(demand).collect(),
    }
}

/// The curve of a server's first touches, in sizes as its host counts them: it has memory that it does not use and cannot
/// give.
fn touch_curve(server: &mut Server, view: ObservedPeriod) -> anyhow::Result<CurveJson> {
    let curve = view.curve;
    let curve = curve.with_context(|| format!("VM {} has no curve", server.name))?;
    Ok(CurveJson::new(
        server.name,
        PageSize::FOUR_KIB,
        Some(PageCount::from_bytes(
            BASELINE_MIB << 20,
            PageSize::FOUR_KIB,
        )),
        &server.in_vm_sizes(curve)?,
    ))
}

/// The curve of a server's cache, in sizes as its host counts them: its kernel manages less than its VM has.
fn cache_curve(server: &mut Server) -> anyhow::Result<CurveJson> {
    let disk = server.disk()?;
    let curve = disk_admin::curve(&server.admin(), ANSWER_MAX)?;
    let mut curve = curve.with_context(|| format!("VM {} has no curve", server.name))?;
    ensure!(
        curve.references >= REFERENCES_MIN,
        "VM {} made {} references while it was traced: trace it for longer",
        server.name,
        curve.references
    );
    let behind = (server.direct_bytes()? / curve.page_bytes).saturating_sub(disk.direct_pages);
    for point in &mut curve.points {
        point.size_pages = point.size_pages.saturating_add(behind);
    }
    server.name.clone_into(&mut curve.vm);
    curve.baseline_pages = Some((BASELINE_MIB << 20) / curve.page_bytes);
    Ok(curve)
}

fn per_request(trio: &Trio, counted: &[ServerCounts], index: usize) -> anyhow::Result<f64> {
    counted[index]
        .per_request()
        .with_context(|| format!("VM {} answered no request", trio.servers[index].name))
}

/// Makes the kernel clear the referenced bits of the VMs' pages.
fn clear_touched(trio: &Trio) -> anyhow::Result<()> {
    for server in &trio.servers {
        let path = format!("/proc/{}/clear_refs", server.pid());
        fs::write(&path, "1").context(path)?;
    }
    Ok(())
}

/// Bytes of each VM's RAM that were touched since.
fn touched_bytes(trio: &Trio) -> anyhow::Result<Vec<u64>> {
    let of = |server: &Server| {
        let path = format!("/proc/{}/smaps", server.pid());
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        referenced_bytes(&text).with_context(|| format!("{path} tells of no guest RAM"))
    };
    trio.servers.iter().map(of).collect()
}

/// Bytes referenced in mappings of a memfd backend, by the text of `/proc/PID/smaps`, proc(5).
fn referenced_bytes(smaps: &str) -> Option<u64> {
    let mut bytes = None;
    let mut is_ram = false;
    for line in smaps.lines() {
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        // Fields have one word before the colon; a mapping's line has several.
        if key.contains(' ') {
            is_ram = line.contains("memory-backend-memfd");
        } else if is_ram && key == "Referenced" {
            let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
            bytes = Some(bytes.unwrap_or(0) + (kib << 10));
        }
    }
    bytes
}

/// The geometric mean of those that pretend nothing.
fn mean_of(vms: &[VmResult], value: impl Fn(&VmResult) -> f64) -> f64 {
    let honest: Vec<f64> = vms.iter().filter(|vm| !vm.is_hostile).map(value).collect();
    geometric_mean(honest.into_iter())
}

fn geometric_mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    // A server that missed nothing would make the mean 0 whatever the others do.
    let logarithms = values.map(|value| value.max(Rules::MISS_RATIO_MIN).ln());
    (logarithms.sum::<f64>() / count).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_touched_is_that_of_the_guests_ram_alone() {
        let smaps = "\
7f0000000000-7f0010000000 rw-s 00000000 00:01 5 /memfd:memory-backend-memfd (deleted)
Size:             262144 kB
Referenced:        1000 kB
7f0010000000-7f0020000000 rw-s 10000000 00:01 5 /memfd:memory-backend-memfd (deleted)
Referenced:          24 kB
7f0020000000-7f0020001000 rw-p 00000000 00:00 0 
Referenced:           4 kB
";
        assert_eq!(referenced_bytes(smaps), Some(1024 << 10));
        assert_eq!(referenced_bytes("Referenced: 4 kB\n"), None);
    }

    #[test]
    fn the_error_of_a_measurement_widens_the_band() {
        let is_within = |measured, measured_error| {
            let vm = VmResult {
                vm: "demo-scan".to_owned(),
                bytes: 1 << 20,
                predicted: Relative {
                    expected: 1.0,
                    low: 1.0,
                    high: 1.04,
                },
                measured,
                measured_error,
                filled: 1.0,
                above_bound: false,
                is_hostile: false,
            };
            vm.is_within_band()
        };
        assert!(is_within(1.039, 0.0) && !is_within(0.999, 0.0));
        assert!(is_within(0.98, 0.03) && !is_within(0.96, 0.03));
        // Errors of both add up as squares.
        assert!(is_within(1.049, 0.03) && !is_within(1.06, 0.03));
    }

    #[test]
    fn the_geometric_mean_of_a_half_and_its_double_is_one() {
        let mean = geometric_mean([0.5, 2.0].into_iter());
        assert!((mean - 1.0).abs() < 1e-12);
        assert!(geometric_mean([0.0, 1.0].into_iter()) > 0.0);
    }
}
