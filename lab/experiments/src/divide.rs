//! Allocates memory among three real guests and compares predicted with measured misses, by policy.
//!
//! Web, search and scan ([`trio`](crate::trio)) are measured with their initial memory (misses per request), then
//! shrunk into the caches under their disks and traced through them, as in \[LS07\] fig. 6. Each allocation that a
//! policy makes from these curves is then set for real, without caches, and the servers are measured again once their
//! memory is warm. All figures are ratios of counts: none is a time, so emulation does not distort them.
//!
//! The sampling ESX of \[LS07\] §6.5 estimates a working set by the share of 100 random pages that are touched in 30 s.
//! Here all of a VM's pages stand for the sample: the kernel's own referenced bits of QEMU's mapping, cleared and read
//! again after 30 s. That is what the sampling estimates, without its noise (a standard deviation of up to 5 points).
//!
//! Source of the experiments and of the yardstick: \[LS07\] tables 2 and 3 (docs/papers.md). Departs from it in the
//! servers, which are models of theirs, in sizes, and in that all is emulated where there is no KVM.
//! Results: docs/dividing-measured.md.

use std::fs;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::builder::PossibleValuesParser;
use plimsoll_policy::{GivenOptions, POLICIES, PolicyOption, Rules};
use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};
use plimsoll_protocol::disk_admin;
use plimsoll_protocol::plan::{
    DemandJson, PlanInputs, PlanJson, Policy, Reason, RulesJson, Search,
};
use plimsoll_rig::program;
use serde::Serialize;

use crate::trio::{BASELINE_MIB, CACHE_MIB, RAM_MIB, Server, ServerCounts, TRACED_MIB, Trio};
use plimsoll_output::{TableOrJson, bail_usage, stop_flag};
use plimsoll_protocol::size::{Interval, Share};

/// How long sampling waits for an access to a page.
const SAMPLE_TIME: Duration = Duration::from_secs(30);
/// How long a disk's daemon may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// How far above its bound a VM may be measured: \[LS07\]'s largest is 3 points.
const TOLERANCE: f64 = 0.03;
/// Minimum number of references of a curve on which decisions are based.
const REFERENCES_MIN: u64 = 1000;

/// Allocate the memory of three guests by several policies; compare predicted and measured misses.
///
/// Takes about 20 minutes with emulated guests and the defaults.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Bound on the increase of a VM's misses under isolated sharing; may be repeated [default: 5% and 25%]
    #[arg(long, value_name = "SHARE")]
    max_loss: Vec<Share>,
    /// Only this policy; may be repeated [default: all]
    #[arg(long, value_parser = PossibleValuesParser::new(POLICIES.iter().map(|row| row.name)))]
    policy: Vec<String>,
    /// Run scan's light background task too
    #[arg(long)]
    background: bool,
    /// How long the servers run after a change before they are measured
    #[arg(long, default_value = "90s", value_name = "TIME")]
    warmup: Interval,
    /// Length of each measurement
    #[arg(long, default_value = "60s", value_name = "TIME")]
    measure: Interval,
    /// How long the VMs are traced through their caches
    #[arg(long, default_value = "120s", value_name = "TIME")]
    trace: Interval,
    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: TableOrJson,
}

/// Results.
#[derive(Debug, Serialize)]
struct Results {
    schema: u32,
    accelerator: String,
    background: bool,
    baseline_bytes: u64,
    vms: Vec<InitialVm>,
    divisions: Vec<AllocationResult>,
}

/// A VM with its initial memory.
#[derive(Debug, Serialize)]
struct InitialVm {
    vm: String,
    misses_per_request: f64,
    /// The same at the end, with the same memory again: the change in the servers' behaviour meanwhile.
    misses_per_request_again: Option<f64>,
    /// Touched within 30 s.
    touched_bytes: u64,
    curve: CurveJson,
}

/// An allocation and its result.
#[derive(Debug, Serialize)]
struct AllocationResult {
    max_loss: Option<f64>,
    predicted_mean: f64,
    measured_mean: f64,
    vms: Vec<VmResult>,
    plan: PlanJson,
}

#[derive(Debug, Serialize)]
struct VmResult {
    vm: String,
    bytes: u64,
    predicted: f64,
    measured: f64,
    above_bound: bool,
}

/// Runs the experiment; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for times too short; why a guest did not come up, gave up, or
/// did not follow its balloon.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.measure.get() < Duration::from_secs(15) {
        bail_usage!("--measure: servers tell what they do every 5 s; measure for 15s or longer");
    }
    let stop = stop_flag()?;
    let program = program("plimsoll")?;
    let mut trio = Trio::boot(&program, args.background, &stop)?;
    let sleep = |trio: &mut Trio, time: Interval| trio.pass(time.get(), &stop);

    sleep(&mut trio, args.warmup)?;
    let before = trio.measure(args.measure.get(), &stop)?;
    clear_touched(&trio)?;
    trio.pass(SAMPLE_TIME, &stop)?;
    let touched = touched_bytes(&trio)?;

    let traced = (TRACED_MIB << 20, (BASELINE_MIB - TRACED_MIB) << 20);
    trio.hold(&[traced; 3], &stop)?;
    sleep(&mut trio, args.trace)?;
    let curves: Vec<_> = trio
        .servers
        .iter_mut()
        .map(curve)
        .collect::<anyhow::Result<_>>()?;

    let mut found = Results {
        schema: SCHEMA,
        accelerator: trio.servers[0].accelerator(),
        background: args.background,
        baseline_bytes: BASELINE_MIB << 20,
        vms: Vec::new(),
        divisions: Vec::new(),
    };
    for (index, curve) in curves.iter().enumerate() {
        found.vms.push(InitialVm {
            vm: curve.vm.clone(),
            misses_per_request: per_request(&trio, &before, index)?,
            misses_per_request_again: None,
            touched_bytes: touched[index],
            curve: curve.clone(),
        });
    }
    let text = args.output == TableOrJson::Table;
    if text {
        write_before(&found, out)?;
    }
    for (policy, max_loss) in args.divisions() {
        let plan = inputs(policy, max_loss, &curves, &touched).plan()?;
        let own = plan.targets.iter().map(|target| {
            let cache = CACHE_MIB << 20;
            (target.target_bytes - cache, cache)
        });
        trio.hold(&own.collect::<Vec<_>>(), &stop)?;
        sleep(&mut trio, args.warmup)?;
        let after = trio.measure(args.measure.get(), &stop)?;
        let vms = plan.targets.iter().enumerate().map(|(index, target)| {
            let measured = per_request(&trio, &after, index)? / found.vms[index].misses_per_request;
            let bound = max_loss.map(|loss| 1.0 + loss + TOLERANCE);
            Ok(VmResult {
                vm: target.vm.clone(),
                bytes: target.target_bytes,
                predicted: target.relative.map_or(1.0, |relative| relative.expected),
                measured,
                above_bound: bound.is_some_and(|bound| measured > bound),
            })
        });
        let vms: Vec<_> = vms.collect::<anyhow::Result<_>>()?;
        let division = AllocationResult {
            max_loss,
            predicted_mean: geometric_mean(vms.iter().map(|vm| vm.predicted)),
            measured_mean: geometric_mean(vms.iter().map(|vm| vm.measured)),
            vms,
            plan,
        };
        if text {
            write_division(&division, out)?;
        }
        found.divisions.push(division);
    }
    let whole = ((BASELINE_MIB - CACHE_MIB) << 20, CACHE_MIB << 20);
    trio.hold(&[whole; 3], &stop)?;
    sleep(&mut trio, args.warmup)?;
    let again = trio.measure(args.measure.get(), &stop)?;
    for (index, vm) in found.vms.iter_mut().enumerate() {
        vm.misses_per_request_again = Some(per_request(&trio, &again, index)?);
    }
    if text {
        write_again(&found, out)?;
    } else {
        serde_json::to_writer(&mut *out, &found)?;
        writeln!(out)?;
    }
    Ok(())
}

impl Args {
    /// The allocations to try, each with its max_loss.
    fn divisions(&self) -> Vec<(Policy, Option<f64>)> {
        let given = self.max_loss.iter().map(|loss| loss.get());
        let losses: Vec<f64> = if self.max_loss.is_empty() {
            vec![0.05, 0.25]
        } else {
            given.collect()
        };
        let mut divisions = Vec::new();
        for row in POLICIES {
            if !self.policy.is_empty() && !self.policy.iter().any(|name| name == row.name) {
                continue;
            }
            if row.options.contains(&PolicyOption::Search) {
                let exact = Policy::isolated(Search::Optimal);
                divisions.extend(losses.iter().map(|loss| (exact, Some(*loss))));
            } else if let Ok(policy) = Policy::by_name(row.name, GivenOptions::default()) {
                divisions.push((policy, None));
            }
        }
        divisions
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

/// A server's curve, in sizes as its host counts them: its kernel manages less than its VM has.
fn curve(server: &mut Server) -> anyhow::Result<CurveJson> {
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

fn geometric_mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    // A server that missed nothing would make the mean 0 whatever the others do.
    let logarithms = values.map(|value| value.max(Rules::MISS_RATIO_MIN).ln());
    (logarithms.sum::<f64>() / count).exp()
}

fn write_before(found: &Results, out: &mut dyn Write) -> anyhow::Result<()> {
    let background = if found.background {
        ", scan with its background task"
    } else {
        ""
    };
    writeln!(
        out,
        "Three guests ({}) of {} MiB each{background}; misses per request are counts.\n\n\
         VM            misses per request  touched in 30 s  references of its curve",
        found.accelerator,
        found.baseline_bytes >> 20,
    )?;
    for vm in &found.vms {
        writeln!(
            out,
            "{:<12}  {:>18.3}  {:>11} MiB  {:>23}",
            vm.vm,
            vm.misses_per_request,
            vm.touched_bytes >> 20,
            vm.curve.references
        )?;
    }
    Ok(out.flush()?)
}

fn write_division(division: &AllocationResult, out: &mut dyn Write) -> anyhow::Result<()> {
    let policy = division.plan.policy.row().title;
    let name = match division.max_loss {
        None => policy.to_owned(),
        Some(loss) => format!("{policy}, at most {:.0} % more misses", loss * 100.0),
    };
    writeln!(out, "\n{name}\nVM            memory    predicted  measured",)?;
    for (vm, target) in division.vms.iter().zip(&division.plan.targets) {
        let note = if vm.above_bound {
            "  ABOVE ITS BOUND"
        } else if target.reason == Reason::Kept {
            "  kept"
        } else {
            ""
        };
        writeln!(
            out,
            "{:<12}  {:>4} MiB  {:>9.2}  {:>8.2}{note}",
            vm.vm,
            vm.bytes >> 20,
            vm.predicted,
            vm.measured,
        )?;
    }
    writeln!(
        out,
        "geometric mean          {:>9.2}  {:>8.2}",
        division.predicted_mean, division.measured_mean
    )?;
    Ok(out.flush()?)
}

fn write_again(found: &Results, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "\nwith the memory of the beginning again")?;
    for vm in &found.vms {
        let again = vm.misses_per_request_again.unwrap_or(f64::NAN);
        let drift = again / vm.misses_per_request;
        writeln!(out, "{:<12}  {drift:>28.2}", vm.vm)?;
    }
    Ok(out.flush()?)
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
    fn esx_is_bound_by_no_promise_and_isolated_sharing_by_each_given() {
        use clap::Parser as _;
        #[derive(Debug, clap::Parser)]
        struct Cli {
            #[command(flatten)]
            args: Args,
        }
        let of = |line: &str| Cli::parse_from(line.split(' ')).args.divisions();
        let losses = |line: &str| of(line).iter().map(|(_, loss)| *loss).collect::<Vec<_>>();
        assert_eq!(losses("x"), [Some(0.05), Some(0.25), None, None]);
        let line = "x --policy isolated --max-loss 10%";
        assert_eq!(losses(line), [Some(0.1)]);
        assert_eq!(losses("x --policy esx"), [None]);
    }

    #[test]
    fn the_geometric_mean_of_a_half_and_its_double_is_one() {
        let mean = geometric_mean([0.5, 2.0].into_iter());
        assert!((mean - 1.0).abs() < 1e-12);
        assert!(geometric_mean([0.0, 1.0].into_iter()) > 0.0);
    }
}
