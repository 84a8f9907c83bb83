//! Misses per second belong to the VM, not to the way it is traced: guests with two classes of pages, by each backend that
//! gives a curve, at different rates, hot sets and budgets, against the closed form.
//!
//! What a tracer finds at two sizes is compared as a ratio: the closed form's must lie within what the two bands allow. The level is
//! compared with the guest's own count of its visits before and after, when nothing traps, both per second of vCPU time: what a VM
//! gets of a busy host's CPUs changes from second to second. What it does in a second of CPU time does so less, but it does.

use std::ops::RangeInclusive;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_rig::{Boot, GuestConfig, Subject};
use plimsoll_vm::QemuVm;

use crate::rig::{Attach, MIB, ground};

/// Options of the tracers, one after the other on the same guest. All give a curve.
const TRACERS: [&str; 7] = [
    "--backend trap --budget 5%",
    "--backend trap --budget none --rate-rule fixed --rate 1/32 --hot-set 16",
    "--backend trap --budget 30% --rate-rule fixed --rate 1/8 --hot-set 96",
    "--backend scan --budget 5%",
    "--backend scan --budget 30% --rate-rule fixed --rate 1/16",
    "--backend first-touch --budget 2%",
    "--backend first-touch --budget 20%",
];
/// The part of the run of each of which its curve is made.
const TRACED: &str = "--period 1s --periods 4 --curve";
/// The share of the ratios that must lie within the bands, which hold 95 % at each size.
const HELD_MIN: f64 = 0.95;
/// The largest mean factor between the ratios found by a tracer and those of the closed form, as the bands of short runs are wide.
const FACTOR_MAX: f64 = 1.25;
/// Misses per second of vCPU time over those by the guest's own count, mean of the sizes. One of the tracers takes four fifths of
/// the guest's time: it would be at a fifth if that time counted, and what it leaves is known within a factor of two.
const LEVEL: RangeInclusive<f64> = 0.4..=2.5;
/// The limits of the band at each size must meet these: what the guest does in a second of CPU time is not the same in the
/// seconds that are compared.
const HOST: RangeInclusive<f64> = 0.6..=1.7;
/// How long the guest's own count is observed without a tracer.
const COUNTED: Duration = Duration::from_secs(1);

/// A guest with two classes of pages.
struct Classes {
    mib: u64,
    hot_mib: u64,
    /// Share of the visits that go to the hot pages alone; the others choose any page.
    hot_ratio: f64,
}

/// Classes of several sizes and shares.
const GUESTS: [Classes; 3] = [
    Classes {
        mib: 64,
        hot_mib: 8,
        hot_ratio: 0.6,
    },
    Classes {
        mib: 40,
        hot_mib: 16,
        hot_ratio: 0.8,
    },
    Classes {
        mib: 96,
        hot_mib: 24,
        hot_ratio: 0.4,
    },
];

impl Classes {
    fn workload(&self) -> String {
        let Self {
            mib,
            hot_mib,
            hot_ratio,
        } = self;
        format!("workload=uniform mib={mib} hot_ratio={hot_ratio} hot_mib={hot_mib}")
    }

    /// Sizes below, between and above the classes, in pages.
    fn sizes(&self) -> [u64; 5] {
        let (all, hot) = (self.mib * MIB, self.hot_mib * MIB);
        let middle = u64::midpoint(hot, all);
        [hot / 2, hot, middle, all * 8 / 10, all * 9 / 10]
    }

    /// The miss ratio of an LRU memory of `size` pages: t visits touch as many pages as it has, and a visit misses if none
    /// of the t before it went to its page.
    fn miss_ratio(&self, size: u64) -> f64 {
        let (all, hot) = ((self.mib * MIB) as f64, (self.hot_mib * MIB) as f64);
        let cold_rate = (1.0 - self.hot_ratio) / all;
        let classes = [
            (hot, cold_rate + self.hot_ratio / hot),
            (all - hot, cold_rate),
        ];
        let sum = |of: &dyn Fn(f64) -> f64| {
            let sums = classes.iter().map(|(pages, rate)| pages * of(*rate));
            sums.sum::<f64>()
        };
        let (mut low, mut high) = (0.0, 100.0 * all);
        for _ in 0..100 {
            let middle = f64::midpoint(low, high);
            if sum(&|rate| -(-rate * middle).exp_m1()) < size as f64 {
                low = middle;
            } else {
                high = middle;
            }
        }
        sum(&|rate| rate * (-rate * low).exp())
    }
}

/// The curve by a tracer.
fn traced(subject: &Subject, options: &str) -> CurveJson {
    let ended = Attach::start(&subject.pid(), &format!("{options} {TRACED}")).end();
    ended.assert_quiet_success();
    serde_json::from_value(ended.last().json["curve"].clone()).unwrap()
}

/// The guest's visits per second of vCPU time, by its own count.
fn visits_per_vcpu_second(subject: &mut Subject) -> f64 {
    let vm = QemuVm::of_pid(subject.pid().parse().unwrap()).unwrap();
    let (from, before) = (Instant::now(), vm.vcpu_time().unwrap());
    thread::sleep(COUNTED);
    let (to, after) = (Instant::now(), vm.vcpu_time().unwrap());
    // The last round may be on its way.
    subject.assert_goes_on();
    let (visits, took) = subject.listen().unwrap().visits(from, to);
    let vcpus = (after - before).as_secs_f64() / (to - from).as_secs_f64();
    visits as f64 / took.as_secs_f64() / vcpus
}

/// Misses per second of vCPU time over those by the guest's count, with the limits of their band; `None` where the curve
/// says nothing.
fn levels(
    classes: &Classes,
    curve: &CurveJson,
    visits_per_vcpu_second: f64,
) -> impl Iterator<Item = [f64; 3]> {
    let vcpus = curve.vcpu_seconds_per_second.unwrap();
    let level = move |size| {
        let misses = curve.misses_at(size)?;
        let truth = visits_per_vcpu_second * vcpus * classes.miss_ratio(size);
        let of_truth = [
            misses.misses_low_per_second,
            misses.misses_per_second,
            misses.misses_high_per_second,
        ];
        Some(of_truth.map(|misses| misses / truth))
    };
    classes.sizes().into_iter().filter_map(level)
}

#[test]
fn ratios_of_misses_per_second_are_those_of_the_guest_whatever_the_options_of_its_tracer() {
    let Some(ground) = ground() else { return };
    // Of each tracer: the logarithms of its factors, and whether the bands allow each.
    let mut found: [Vec<(f64, bool)>; TRACERS.len()] = Default::default();
    for (guest, classes) in GUESTS.into_iter().enumerate() {
        let config = GuestConfig {
            memory_mib: Boot::Bare.memory_mib(classes.mib),
            ..ground.guest("misses", &classes.workload())
        };
        let mut subject = Subject::boot(Boot::Bare, &config).unwrap();
        println!("{} ({}):", classes.workload(), ground.accelerator());
        let mut visits_before = visits_per_vcpu_second(&mut subject);
        for (number, (options, found)) in TRACERS.into_iter().zip(&mut found).enumerate() {
            // Each traces two of the guests.
            if number % GUESTS.len() == guest {
                continue;
            }
            let curve = traced(&subject, options);
            let visits_after = visits_per_vcpu_second(&mut subject);
            let visits = f64::midpoint(visits_before, visits_after);
            // How much the host's speed changed meanwhile, which it may do by more where others use it too.
            let change = (visits_after / visits_before).ln().abs().exp();
            visits_before = visits_after;
            let levels: Vec<_> = levels(&classes, &curve, visits).collect();
            let shown = levels
                .iter()
                .map(|[low, level, high]| format!(" {level:.2} ({low:.2}..{high:.2})"));
            println!(
                "  {options}:{}; the guest's speed changed by {change:.2}",
                shown.collect::<String>()
            );
            for pair in levels.windows(2) {
                let [[low, level, high], [next_low, next_level, next_high]] = [pair[0], pair[1]];
                // The truth is 1 at both.
                let is_held = low <= next_high && next_low <= high;
                found.push(((next_level / level).ln().abs(), is_held));
            }
            // The level of first touches is not corrected for the time of the traps (docs/operating.md).
            if options.contains("first-touch") {
                continue;
            }
            let logarithms = levels.iter().map(|[_, level, _]| level.ln());
            let mean = (logarithms.sum::<f64>() / levels.len() as f64).exp();
            assert!(
                (LEVEL.start() / change..=LEVEL.end() * change).contains(&mean),
                "{options}: {mean} of the guest's misses, whose speed changed by {change}"
            );
            for [low, level, high] in levels {
                assert!(
                    low <= HOST.end() * change && high >= HOST.start() / change,
                    "{options}: {level} ({low} to {high}) of the guest's misses, whose speed changed by {change}"
                );
            }
        }
        subject.assert_no_trap_is_left();
        subject.assert_goes_on();
    }
    for (options, found) in TRACERS.into_iter().zip(&found) {
        let factors = found.iter().map(|(logarithm, _)| logarithm);
        let factor = (factors.sum::<f64>() / found.len() as f64).exp();
        println!("{options}: {} ratios, mean factor {factor:.3}", found.len());
        // A scanned curve may begin above most of the sizes.
        assert!(!found.is_empty() && factor <= FACTOR_MAX);
    }
    let is_held: Vec<bool> = found
        .iter()
        .flatten()
        .map(|(_, is_held)| *is_held)
        .collect();
    let held = is_held.iter().filter(|is_held| **is_held).count() as f64 / is_held.len() as f64;
    println!(
        "{held:.3} of {} ratios lie within their bands",
        is_held.len()
    );
    assert!(held >= HELD_MIN);
}

#[test]
fn the_closed_form_of_two_classes_agrees_with_counting() {
    let classes = Classes {
        mib: 4,
        hot_mib: 1,
        hot_ratio: 0.5,
    };
    let mut random = fastrand::Rng::with_seed(1);
    let pages = classes.mib * MIB;
    let visits = (0..400_000).map(|_| {
        let hot = random.f64() < classes.hot_ratio;
        random.u64(..if hot { classes.hot_mib * MIB } else { pages })
    });
    let visits: Vec<u64> = visits.collect();
    for size in classes.sizes() {
        // In a queue by last use, oldest first, a page is stale where it was used again since.
        let mut used = vec![None; usize::try_from(pages).unwrap()];
        let mut queue = std::collections::VecDeque::new();
        let (mut held, mut misses) = (0, 0);
        for (at, page) in visits.iter().enumerate() {
            let last = &mut used[usize::try_from(*page).unwrap()];
            if last.replace(at).is_none() {
                misses += u64::from(at >= visits.len() / 2);
                held += 1;
            }
            queue.push_back((at, *page));
            while held > size {
                let (then, oldest) = queue.pop_front().unwrap();
                let last = &mut used[usize::try_from(oldest).unwrap()];
                if *last == Some(then) {
                    *last = None;
                    held -= 1;
                }
            }
        }
        let counted = misses as f64 / (visits.len() / 2) as f64;
        let closed = classes.miss_ratio(size);
        assert!(
            (counted - closed).abs() < 0.01,
            "{size}: {counted} {closed}"
        );
    }
}
