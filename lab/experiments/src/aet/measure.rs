//! One program traced from outside, at three settings, while the plugin counts its references.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plimsoll_flow::{MissRatioCurve, PageCount, Period, TraceMethod};
use plimsoll_observe::even_sizes;
use plimsoll_rig::{GuestImage, ProgramGuest, ProgramsImage, Subject};
use plimsoll_trap::{RateRule, TraceConfig};
use plimsoll_vm::QemuVm;
use serde::{Deserialize, Serialize};

use super::Lengths;
use crate::page_log::{FullTrace, Misses};
use crate::steps::{STEPS_MIB, stepping_guest};
use crate::tracing::trace;

/// Time that a program runs before it is traced.
const SETTLING: Duration = Duration::from_secs(5);
/// Points of a kept curve.
const POINTS: usize = 96;
/// Share of misses that defines the working set, \[AET\] §4.2.
const WORKING_SET_RATIO: f64 = 0.05;

/// What was measured of a program with one seed.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProgramResult {
    pub program: String,
    /// Times that the program came to its end meanwhile.
    pub rounds: u64,
    /// Hot set of 2048 pages, no sampling, \[AET\] §4.2.
    pub published: Tracing,
    /// Hot set of 64 pages, rate 1/128, \[AET\] §3.4.
    pub fixed: Tracing,
    /// Default settings.
    pub default: Tracing,
}

/// What was measured at one setting.
#[derive(Debug, Serialize, Deserialize)]
pub struct Tracing {
    pub periods: Vec<PeriodRow>,
    /// Over all periods: distance of AET from exact LRU; `None` if no reuse was traced.
    pub aet_lru_error: Option<f64>,
    /// Distances from every reference, at sizes of twice what the hot set hides and above, as shares of the references
    /// that reach past it; `None` if nothing reaches so far.
    pub lru_error: Option<f64>,
    pub aet_error: Option<f64>,
    /// Sizes in pages, with the ratios of LRU, AET and every reference past what the hot set hides.
    pub curves: Vec<(u64, [f64; 3])>,
}

/// A period. Times are in seconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PeriodRow {
    pub length_s: f64,
    pub scale: u32,
    pub traps: u64,
    /// Tracked pages that were referenced.
    pub distinct_pages: u64,
    pub lost: u64,
    /// References of the guest meanwhile, by the plugin.
    pub references: u64,
    pub fault_s: f64,
    pub arm_s: f64,
    pub collect_s: f64,
    pub overhead_ratio: f64,
    /// Working sets in pages: by LRU, by AET, and of every reference.
    pub working_sets: [Option<u64>; 3],
}

/// The settings of \[AET\] §4.2.
pub fn published(seed: u64) -> TraceConfig {
    TraceConfig {
        hot_set_pages: 2048,
        scale: 1,
        ..fixed(seed)
    }
}

/// A fixed rate without a budget: 1/128 with a hot set of 64 pages.
pub fn fixed(seed: u64) -> TraceConfig {
    TraceConfig {
        budget: None,
        rate_rule: RateRule::Fixed,
        seed,
        ..TraceConfig::default()
    }
}

/// Boots a guest with the program, whose references are counted, for `measure`.
pub fn with_program<T>(
    image: &ProgramsImage,
    program: &str,
    measure: impl FnOnce(&mut ProgramGuest, &FullTrace) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut config = ProgramGuest::config(program);
    let references = FullTrace::of(&mut config)?;
    let mut guest = ProgramGuest::boot(image, &config)?;
    let measured = measure(&mut guest, &references)?;
    drop(guest);
    references.end()?;
    Ok(measured)
}

/// Measures a program at all three settings.
pub fn program(
    image: &ProgramsImage,
    program: &str,
    seed: u64,
    lengths: Lengths,
) -> anyhow::Result<ProgramResult> {
    with_program(image, program, |guest, references| {
        std::thread::sleep(SETTLING);
        let default = TraceConfig {
            seed,
            ..TraceConfig::default()
        };
        Ok(ProgramResult {
            program: program.to_owned(),
            published: tracing(&guest.vm, references, &published(seed), lengths.published)?,
            fixed: tracing(&guest.vm, references, &fixed(seed), lengths.fixed)?,
            default: tracing(&guest.vm, references, &default, lengths.default)?,
            rounds: guest.rounds()?,
        })
    })
}

/// Periods at each size of the program in steps.
const PERIODS_PER_STEP: u32 = 3;

/// Traces the program in steps of \[AET\] §4.2, which scans its array, at the published settings.
pub fn steps(image: &GuestImage, seed: u64) -> anyhow::Result<Tracing> {
    let config = published(seed);
    let step = config.period * PERIODS_PER_STEP;
    let mut guest = stepping_guest("steps", &STEPS_MIB, step);
    let references = FullTrace::of(&mut guest)?;
    let subject = Subject::boot(image, &guest)?;
    let periods = PERIODS_PER_STEP * u32::try_from(STEPS_MIB.len())?;
    let traced = tracing(&subject.vm, &references, &config, periods)?;
    drop(subject);
    references.end()?;
    Ok(traced)
}

/// Traces a VM for some periods.
pub fn tracing(
    vm: &QemuVm,
    references: &FullTrace,
    config: &TraceConfig,
    periods: u32,
) -> anyhow::Result<Tracing> {
    let before = references.now();
    let mut last = before.clone();
    let mut rows = Vec::new();
    let mut hidden = PageCount(0);
    let limit = config.period * periods - config.period / 2;
    let stop = AtomicBool::new(false);
    let method = (TraceMethod::Traps, config);
    let traced = trace(vm, method, (limit, None), &stop, &mut |traced| {
        let now = references.now();
        let misses = Misses {
            before: std::mem::replace(&mut last, now.clone()),
            after: now,
        };
        let period = &traced.observed.period;
        hidden = hidden.max(PageCount(period.resolution_pages()));
        let sizes = traced.observed.compared.as_ref();
        rows.push(row(
            period,
            &misses,
            [
                sizes.and_then(|curves| working_set(&curves.lru)),
                sizes.and_then(|curves| working_set(&curves.aet)),
                misses
                    .working_set(PageCount(period.resolution_pages()))
                    .map(|size| size.0),
            ],
        ));
    })?;
    let misses = Misses {
        before,
        after: last,
    };
    let mut result = Tracing {
        periods: rows,
        aet_lru_error: None,
        lru_error: None,
        aet_error: None,
        curves: Vec::new(),
    };
    let Some(curves) = &traced.curves else {
        return Ok(result);
    };
    result.aet_lru_error = curves
        .distance()
        .map(|distance| distance.mean_absolute_error);
    let first = PageCount(2 * hidden.0);
    let end = PageCount(misses.after.distinct().0 + hidden.0).max(first);
    let reaching = misses.at(first) as f64;
    let truth = |size| misses.at(size) as f64 / reaching;
    let error = |curve: &MissRatioCurve| {
        let past = curve.miss_ratio(first);
        let errors: Vec<f64> = even_sizes(first, end)
            .map(|size| (curve.miss_ratio(size) / past - truth(size)).abs())
            .collect();
        (past > 0.0 && reaching > 0.0).then(|| errors.iter().sum::<f64>() / errors.len() as f64)
    };
    result.lru_error = error(&curves.lru);
    result.aet_error = error(&curves.aet);
    let hides = misses.at(hidden) as f64;
    let sizes: Vec<_> = even_sizes(hidden, end).collect();
    let step = sizes.len().div_ceil(POINTS);
    result.curves = sizes
        .into_iter()
        .step_by(step.max(1))
        .map(|size| {
            let truth = if hides > 0.0 {
                misses.at(size) as f64 / hides
            } else {
                0.0
            };
            let ratios = [
                curves.lru.miss_ratio(size),
                curves.aet.miss_ratio(size),
                truth,
            ];
            (size.0, ratios)
        })
        .collect();
    Ok(result)
}

fn row(period: &Period, misses: &Misses, working_sets: [Option<u64>; 3]) -> PeriodRow {
    PeriodRow {
        length_s: period.length.as_secs_f64(),
        scale: period.scale,
        traps: period.traps.taken,
        distinct_pages: period.distinct_pages,
        lost: period.losses.lost(),
        references: misses.references(),
        fault_s: period.fault_time.as_secs_f64(),
        arm_s: period.arm_time.as_secs_f64(),
        collect_s: period.collect_time.as_secs_f64(),
        overhead_ratio: period.overhead_ratio,
        working_sets,
    }
}

/// Smallest size at which at most 5 % of a curve's references miss.
fn working_set(curve: &MissRatioCurve) -> Option<u64> {
    let points = curve.points().iter();
    let mut small = points.filter(|point| point.miss_ratio <= WORKING_SET_RATIO);
    small.next().map(|point| point.size.0)
}
