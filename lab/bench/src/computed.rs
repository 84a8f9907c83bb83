//! First touches of computed VMs from 512 MiB to 1 TiB: error, cost and memory of a curve after a minute at 1 %.
//!
//! The VM answers draws, arming and touches; everything above the calls to the kernel is that of a running VM.

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;
use plimsoll_estimator::live::{FIRST_TOUCH, LiveInput, LiveOptions, LiveWindow};
use plimsoll_flow::{MissRatioCurve, PageCount, Whole as _};
use plimsoll_trap::{Backend as _, ComputedVm, Observation, PageClass, TraceConfig};

use crate::measure::{Clock, Watch};

/// Length of a period and number of periods.
const PERIOD: Duration = Duration::from_secs(5);
const PERIODS: u32 = 12;
/// Sizes at which a curve is compared.
const SIZES: u32 = 64;
const GIB_PAGES: u64 = 1 << 18;

/// Share of the RAM and touches per second of each class.
type Classes = &'static [(f64, f64)];

/// Workloads by name.
const WORKLOADS: [(&str, Classes); 3] = [
    ("uniform", &[(0.75, 0.2)]),
    ("two classes", &[(0.1, 10.0), (0.6, 0.02)]),
    (
        "graded",
        &[
            (0.01, 100.0),
            (0.02, 30.0),
            (0.04, 10.0),
            (0.08, 3.0),
            (0.15, 1.0),
            (0.2, 0.1),
            (0.25, 0.01),
        ],
    ),
];

/// Runs all workloads at all sizes.
pub fn run(out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "{:<12} {:>9} {:>7} {:>7} {:>9} {:>8} {:>9} {:>10} {:>9}",
        "workload",
        "RAM",
        "traps",
        "arms",
        "overhead",
        "set err",
        "curve MAE",
        "samples",
        "CPU/curve"
    )?;
    for (name, classes) in WORKLOADS {
        for ram_pages in [
            GIB_PAGES / 2,
            4 * GIB_PAGES,
            64 * GIB_PAGES,
            1024 * GIB_PAGES,
        ] {
            let line = observe(name, classes, ram_pages)?;
            writeln!(out, "{line}")?;
            out.flush()?;
        }
    }
    Ok(())
}

fn observe(name: &str, classes: Classes, ram_pages: u64) -> anyhow::Result<String> {
    let class = |&(share, touches_per_second): &(f64, f64)| PageClass {
        share,
        touches_per_second,
    };
    let vm = ComputedVm {
        ram_pages,
        classes: classes.iter().map(class).collect(),
        arm_cost: Duration::from_micros(20),
        trap_cost: Duration::from_micros(60),
    };
    let config = TraceConfig {
        period: PERIOD,
        ..TraceConfig::default()
    };
    let mut sampler = vm.attach(&config)?;
    let mut estimator = (FIRST_TOUCH.make)(&LiveOptions {
        ram: PageCount(ram_pages),
        reach: Some(PERIOD * PERIODS),
    });
    let watch = Watch::start(Clock::Cpu);
    let (mut traps, mut arms, mut overhead, mut curve) = (0, 0, 0.0, None);
    for _ in 0..PERIODS {
        let period = sampler.run_period(&AtomicBool::new(false), &mut |seen| {
            if let Observation::FirstTouches { samples, .. } = seen {
                estimator.observe(&LiveInput::FirstTouches(*samples));
            }
        })?;
        traps += period.traps.taken;
        arms += period.rearmed_pages;
        overhead += period.overhead_ratio / f64::from(PERIODS);
        curve = estimator.close_window(&LiveWindow::of(&period)).or(curve);
    }
    let cpu_ms = watch.seconds() * 1e3 / f64::from(PERIODS);
    let curve = curve.context("no curve")?;
    let (set, error) = errors(&vm, &curve);
    Ok(format!(
        "{name:<12} {:>5} GiB {traps:>7} {arms:>7} {:>7.2} % {:>6.1} % {error:>9.4} {:>6} KiB {:>6.1} ms",
        ram_pages as f64 / GIB_PAGES as f64,
        overhead * 100.0,
        set * 100.0,
        sampler.waiting_bytes() >> 10,
        cpu_ms,
    ))
}

/// Error of the size at which a twentieth of the curve's misses are left, and the mean absolute error of the curve
/// above its smallest size, as a share of the misses there.
fn errors(vm: &ComputedVm, curve: &MissRatioCurve) -> (f64, f64) {
    let points = curve.points();
    let first = points.first().map_or(1, |point| point.size.0) as f64;
    let last = vm.footprint_pages(Duration::from_secs(1 << 30));
    let misses = |size: f64| vm.misses_per_second(span_of(vm, size));
    let most = misses(first);
    let sizes = (0..SIZES).map(|step| first + (last - first) * f64::from(step) / f64::from(SIZES));
    let error = sizes.map(|size| {
        let found = curve.miss_ratio(PageCount(u64::whole(size)));
        (found - misses(size) / most).abs()
    });
    let error = error.sum::<f64>() / f64::from(SIZES);
    let (mut low, mut high) = (first, last);
    while high - low > 1.0 {
        let middle = f64::midpoint(low, high);
        if misses(middle) > most * 0.05 {
            low = middle;
        } else {
            high = middle;
        }
    }
    let set = curve.size_for(0.05).map_or(last, |size| size.0 as f64);
    (set / high - 1.0, error)
}

/// The time within which a VM touches so many pages.
fn span_of(vm: &ComputedVm, size: f64) -> Duration {
    let (mut low, mut high) = (0.0, 1e9);
    for _ in 0..200 {
        let middle = f64::midpoint(low, high);
        if vm.footprint_pages(Duration::from_secs_f64(middle)) < size {
            low = middle;
        } else {
            high = middle;
        }
    }
    Duration::from_secs_f64(low)
}
