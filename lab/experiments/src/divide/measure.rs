//! Allocates memory among three real guests and compares predicted with measured misses, by policy.
//!
//! Web, search and scan ([`trio`](crate::trio)) are measured with their initial memory (misses per request) and
//! traced: from outside by first touches, then shrunk into the caches under their disks and through them, as in
//! \[LS07\] fig. 6. Each allocation that a policy makes from these curves is then set for real, without caches, and
//! the servers are measured again once they have read as many pages as they gained. All figures are ratios of counts:
//! none is a time, so emulation does not distort them.
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
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::builder::PossibleValuesParser;
use plimsoll_flow::{PageCount, PageSize};
use plimsoll_policy::{GivenOptions, POLICIES, PolicyOption, Relative, Rules};
use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};
use plimsoll_protocol::disk_admin;
use plimsoll_protocol::plan::{
    DemandJson, PlanInputs, PlanJson, Policy, Reason, RulesJson, Search,
};
use plimsoll_rig::program;
use serde::Serialize;

use crate::trio::{
    BASELINE_MIB, CACHE_MIB, RAM_MIB, SCAN, Server, ServerCounts, TRACED_MIB, Third, Trio,
};
use plimsoll_output::{TableOrJson, bail_usage, stop_flag};
use plimsoll_protocol::size::{Interval, Share};

/// How long sampling waits for an access to a page.
const SAMPLE_TIME: Duration = Duration::from_secs(30);
/// How long a disk's daemon may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// How far above its bound a VM may be measured: \[LS07\]'s largest is 3 points.
const TOLERANCE: f64 = 0.03;
/// The prediction for a VM without a curve.
const UNCHANGED: Relative = Relative {
    expected: 1.0,
    low: 1.0,
    high: 1.0,
};
/// Minimum number of references of a curve on which decisions are based.
const REFERENCES_MIN: u64 = 1000;

/// Allocate the memory of three guests by several policies; compare predicted with measured misses.
///
/// Takes about 20 minutes for a seed with emulated guests and the defaults.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Bound on the increase of a VM's misses under isolated sharing; may be repeated [default: 5% and 25%]
    #[arg(long, value_name = "SHARE")]
    max_loss: Vec<Share>,
    /// Only this policy; may be repeated [default: all]
    #[arg(long, value_parser = PossibleValuesParser::new(POLICIES.iter().map(|row| row.name)))]
    policy: Vec<String>,
    /// Only curves from this source; may be repeated [default: all]
    #[arg(long, value_enum)]
    curves: Vec<CurveSource>,
    /// Number of runs, each with other guests and another order of their requests
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    seeds: u32,
    /// Run scan's light background task too
    #[arg(long)]
    background: bool,
    /// Have the third server read needlessly and report false evictions, as if it needed memory; it is promised nothing
    #[arg(long, conflicts_with = "background")]
    hostile: bool,
    /// How long to wait at most, after a change, until the servers have filled the memory that they gained
    #[arg(long, default_value = "3m", value_name = "TIME")]
    warmup: Interval,
    /// Length of each measurement
    #[arg(long, default_value = "60s", value_name = "TIME")]
    measure: Interval,
    /// How long the VMs are traced for each source of curves
    #[arg(long, default_value = "90s", value_name = "TIME")]
    trace: Interval,
    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: TableOrJson,
}

/// Where the curves come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum CurveSource {
    /// The caches under the VMs' disks, into which part of their memory goes meanwhile
    Caches,
    /// First touches of the VMs' RAM, with the memory that they have
    FirstTouch,
}

impl CurveSource {
    fn name(self) -> &'static str {
        match self {
            Self::Caches => "caches",
            Self::FirstTouch => "first touches",
        }
    }
}

/// Results of all seeds.
#[derive(Debug, Serialize)]
struct Results {
    schema: u32,
    accelerator: String,
    background: bool,
    hostile: bool,
    baseline_bytes: u64,
    seeds: Vec<SeedResult>,
    summary: Summary,
}

/// Results with the same guests.
#[derive(Debug, Serialize)]
struct SeedResult {
    seed: u32,
    vms: Vec<InitialVm>,
    divisions: Vec<AllocationResult>,
}

/// A VM with its initial memory.
#[derive(Debug, Serialize)]
struct InitialVm {
    vm: String,
    misses_per_request: f64,
    /// The same at the end, with the same memory again: the change in the servers' behaviour meanwhile.
    misses_per_request_again: f64,
    /// Touched within 30 s.
    touched_bytes: u64,
}

/// An allocation and its result.
#[derive(Debug, Serialize)]
struct AllocationResult {
    curves: CurveSource,
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
    predicted: Relative,
    measured: f64,
    /// Share of the memory that it gained which it had filled when it was measured, 0.0 to 1.0.
    filled: f64,
    above_bound: bool,
    /// It pretends to need memory: nothing is promised to it, and it counts in no mean.
    is_hostile: bool,
}

/// What all allocations with a bound come to.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Summary {
    /// VMs that were promised a bound, once for each allocation.
    promises: usize,
    /// Of them, those that missed more.
    broken: usize,
    /// VMs whose measured misses lie within the band of the prediction.
    within_band: usize,
    /// Allocations with a bound.
    divisions: usize,
    /// Of them, those whose measured geometric mean is within 10 % of the predicted one.
    within_tenth: usize,
}

/// Runs the experiment; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for times too short; why a guest did not come up, gave up, or
/// did not follow its balloon.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.measure.get() < Duration::from_secs(15) {
        bail_usage!("--measure: servers report their counts every 5 s; measure for 15s or longer");
    }
    let stop = stop_flag()?;
    let text = args.output == TableOrJson::Table;
    let mut quiet = std::io::sink();
    let mut results = Results {
        schema: SCHEMA,
        accelerator: String::new(),
        background: args.background,
        hostile: args.hostile,
        baseline_bytes: BASELINE_MIB << 20,
        seeds: Vec::new(),
        summary: Summary::default(),
    };
    for seed in 1..=args.seeds {
        let table: &mut dyn Write = if text { out } else { &mut quiet };
        let (accelerator, found) = run_seed(args, seed, &stop, table)?;
        results.accelerator = accelerator;
        results.seeds.push(found);
    }
    let divisions = results.seeds.iter().flat_map(|seed| &seed.divisions);
    results.summary = Summary::of(divisions);
    if text {
        write_summary(&results.summary, out)
    } else {
        serde_json::to_writer(&mut *out, &results)?;
        Ok(writeln!(out)?)
    }
}

/// Boots three servers, and measures them with their initial memory, with each allocation, and with their initial
/// memory again. Returns their accelerator and what was found.
fn run_seed(
    args: &Args,
    seed: u32,
    stop: &AtomicBool,
    out: &mut dyn Write,
) -> anyhow::Result<(String, SeedResult)> {
    let mut trio = Trio::boot(&program("plimsoll")?, args.third(), seed, stop)?;
    let accelerator = trio.servers[0].accelerator();
    write_head(args, seed, &accelerator, out)?;
    let settle = |trio: &mut Trio, filling| {
        let cold = trio.warm(&filling, args.warmup.get(), stop)?;
        Ok::<_, anyhow::Error>((cold, trio.measure(args.measure.get(), stop)?))
    };
    let filling = trio.filling_first()?;
    let (_, before) = settle(&mut trio, filling)?;
    clear_touched(&trio)?;
    trio.pass(SAMPLE_TIME, stop)?;
    let touched = touched_bytes(&trio)?;
    let mut found = SeedResult {
        seed,
        vms: Vec::new(),
        divisions: Vec::new(),
    };
    for (index, server) in trio.servers.iter().enumerate() {
        found.vms.push(InitialVm {
            vm: server.name.to_owned(),
            misses_per_request: per_request(&trio, &before, index)?,
            misses_per_request_again: f64::NAN,
            touched_bytes: touched[index],
        });
    }
    write_before(&found.vms, out)?;

    let whole = ((BASELINE_MIB - CACHE_MIB) << 20, CACHE_MIB << 20);
    // First touches are traced before the memory is changed.
    for source in [CurveSource::FirstTouch, CurveSource::Caches] {
        if !args.curves.is_empty() && !args.curves.contains(&source) {
            continue;
        }
        let from_bytes = trio.direct_bytes()?;
        trio.hold(&[whole; 3], stop)?;
        let filling = trio.filling(from_bytes)?;
        trio.warm(&filling, args.warmup.get(), stop)?;
        let curves = curves(&mut trio, source, args.trace.get(), stop)?;
        for (policy, max_loss) in args.divisions() {
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
                let initial = found.vms[index].misses_per_request;
                let measured = per_request(&trio, &after, index)? / initial;
                let is_hostile = args.hostile && target.vm == SCAN;
                let bound = max_loss.map(|loss| 1.0 + loss + TOLERANCE);
                let bound = bound.filter(|_| !is_hostile);
                let filled = cold.iter().find(|(vm, _)| *vm == target.vm);
                Ok(VmResult {
                    vm: target.vm.clone(),
                    bytes: target.target_bytes,
                    predicted: target.relative.unwrap_or(UNCHANGED),
                    measured,
                    filled: filled.map_or(1.0, |(_, filled)| *filled),
                    above_bound: bound.is_some_and(|bound| measured > bound),
                    is_hostile,
                })
            });
            let vms: Vec<_> = vms.collect::<anyhow::Result<_>>()?;
            let division = AllocationResult {
                curves: source,
                max_loss,
                predicted_mean: mean_of(&vms, |vm| vm.predicted.expected),
                measured_mean: mean_of(&vms, |vm| vm.measured),
                vms,
                plan,
            };
            write_division(&division, out)?;
            found.divisions.push(division);
        }
    }
    let from_bytes = trio.direct_bytes()?;
    trio.hold(&[whole; 3], stop)?;
    let filling = trio.filling(from_bytes)?;
    let (_, again) = settle(&mut trio, filling)?;
    for (index, vm) in found.vms.iter_mut().enumerate() {
        vm.misses_per_request_again = per_request(&trio, &again, index)?;
    }
    write_again(&found.vms, out)?;
    Ok((accelerator, found))
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
            let traced = (TRACED_MIB << 20, (BASELINE_MIB - TRACED_MIB) << 20);
            trio.hold(&[traced; 3], stop)?;
            trio.pass(time, stop)?;
            trio.servers.iter_mut().map(cache_curve).collect()
        }
        CurveSource::FirstTouch => {
            let views = trio.observe(time, stop)?;
            let named = trio.servers.iter().map(|server| server.name).zip(views);
            let curves = named.map(|(vm, view)| {
                let curve = view?.curve;
                let curve = curve.with_context(|| format!("VM {vm} has no curve"))?;
                let baseline = PageCount::from_bytes(BASELINE_MIB << 20, PageSize::FOUR_KIB);
                Ok(CurveJson::new(
                    vm,
                    PageSize::FOUR_KIB,
                    Some(baseline),
                    &curve,
                ))
            });
            curves.collect()
        }
    }
}

impl Args {
    fn third(&self) -> Third {
        match (self.background, self.hostile) {
            (true, _) => Third::ScanWithTask,
            (_, true) => Third::Hostile,
            _ => Third::Scan,
        }
    }

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

fn write_head(
    args: &Args,
    seed: u32,
    accelerator: &str,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let background = if args.background {
        ", scan with its background task"
    } else if args.hostile {
        ", the third one hostile"
    } else {
        ""
    };
    writeln!(
        out,
        "Three guests ({accelerator}) of {BASELINE_MIB} MiB each{background}, seed {seed}; misses per request are counts."
    )?;
    Ok(out.flush()?)
}

fn write_before(vms: &[InitialVm], out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "\nVM            misses per request  touched in 30 s")?;
    for vm in vms {
        writeln!(
            out,
            "{:<12}  {:>18.3}  {:>11} MiB",
            vm.vm,
            vm.misses_per_request,
            vm.touched_bytes >> 20,
        )?;
    }
    Ok(out.flush()?)
}

fn write_division(division: &AllocationResult, out: &mut dyn Write) -> anyhow::Result<()> {
    let policy = division.plan.policy.row().title;
    let bound = division
        .max_loss
        .map(|loss| format!(", at most {:.0} % more misses", loss * 100.0));
    writeln!(
        out,
        "\n{policy}{}, curves from {}\nVM            memory    predicted           measured",
        bound.unwrap_or_default(),
        division.curves.name()
    )?;
    for (vm, target) in division.vms.iter().zip(&division.plan.targets) {
        let mut note = if vm.above_bound {
            "  ABOVE ITS BOUND"
        } else if vm.is_hostile {
            "  hostile"
        } else if target.reason == Reason::Kept {
            "  kept"
        } else {
            ""
        }
        .to_owned();
        if vm.filled < 1.0 {
            note.push_str(&format!("  {:.0} % filled", vm.filled * 100.0));
        }
        writeln!(
            out,
            "{:<12}  {:>4} MiB  {:>9.2} {:.2}..{:.2}  {:>8.2}{note}",
            vm.vm,
            vm.bytes >> 20,
            vm.predicted.expected,
            vm.predicted.low,
            vm.predicted.high,
            vm.measured,
        )?;
    }
    writeln!(
        out,
        "geometric mean          {:>9.2}             {:>8.2}",
        division.predicted_mean, division.measured_mean
    )?;
    Ok(out.flush()?)
}

fn write_again(vms: &[InitialVm], out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "\nwith the memory of the beginning again")?;
    for vm in vms {
        let drift = vm.misses_per_request_again / vm.misses_per_request;
        writeln!(out, "{:<12}  {drift:>28.2}", vm.vm)?;
    }
    Ok(writeln!(out).and_then(|()| out.flush())?)
}

fn write_summary(summary: &Summary, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "{} promises, {} broken; {} measured within the predicted band. Geometric mean within 10 % of the predicted one \
         in {} of {} allocations.",
        summary.promises,
        summary.broken,
        summary.within_band,
        summary.within_tenth,
        summary.divisions
    )?;
    Ok(out.flush()?)
}

impl Summary {
    fn of<'a>(divisions: impl Iterator<Item = &'a AllocationResult>) -> Self {
        let mut summary = Self::default();
        for division in divisions.filter(|division| division.max_loss.is_some()) {
            let vms = division.vms.iter().filter(|vm| !vm.is_hostile);
            for vm in vms {
                let band = vm.predicted.low..=vm.predicted.high;
                summary.promises += 1;
                summary.broken += usize::from(vm.above_bound);
                summary.within_band += usize::from(band.contains(&vm.measured));
            }
            summary.divisions += 1;
            let off = division.measured_mean / division.predicted_mean - 1.0;
            summary.within_tenth += usize::from(off.abs() <= 0.1);
        }
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::{CurvePoint, MissRatioCurve};

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
    fn what_exceeds_its_bound_or_its_band_is_counted() {
        let points = vec![CurvePoint::exact(PageCount(1), 0.5)];
        let curve = MissRatioCurve::new(points, 1000).unwrap();
        let curve = CurveJson::new("web", PageSize::FOUR_KIB, None, &curve);
        let demands = |max_loss| {
            let policy = Policy::isolated(Search::Optimal);
            inputs(policy, max_loss, std::slice::from_ref(&curve), &[0])
        };
        let division = |max_loss, measured: f64| AllocationResult {
            curves: CurveSource::Caches,
            max_loss,
            predicted_mean: 1.0,
            measured_mean: measured,
            vms: vec![VmResult {
                vm: "web".to_owned(),
                bytes: 0,
                predicted: Relative {
                    expected: 1.0,
                    low: 0.9,
                    high: 1.1,
                },
                measured,
                filled: 1.0,
                above_bound: max_loss.is_some_and(|loss| measured > 1.0 + loss + TOLERANCE),
                is_hostile: false,
            }],
            plan: demands(max_loss).plan().unwrap(),
        };
        let divisions = [
            division(Some(0.25), 1.05),
            division(Some(0.25), 1.2),
            division(Some(0.05), 1.2),
            division(None, 2.0),
        ];
        let expected = Summary {
            promises: 3,
            broken: 1,
            within_band: 1,
            divisions: 3,
            within_tenth: 1,
        };
        assert_eq!(Summary::of(divisions.iter()), expected);
    }

    #[test]
    fn the_geometric_mean_of_a_half_and_its_double_is_one() {
        let mean = geometric_mean([0.5, 2.0].into_iter());
        assert!((mean - 1.0).abs() < 1e-12);
        assert!(geometric_mean([0.0, 1.0].into_iter()) > 0.0);
    }
}
