use super::{
    Cells, Duration, FirstTouch, FirstTouchCurve, FirstTouches, LiveEstimator, LiveInput,
    LiveOptions, LiveWindow,
};
use super::{Mixture, Shape, Time, change};
use crate::live::working_set;
use crate::parts::naive;
use crate::parts::streams::{Random, cycle, uniform};
use plimsoll_flow::WorkingSetBound;
use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount, Timestamp};
use proptest::prelude::*;

const POPULATION: u64 = 4000;

fn below(random: &mut Random, bound: u64) -> u64 {
    (random.share() * bound as f64) as u64
}

fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

fn touched(armed_ms: u64, after_ms: u64) -> FirstTouch {
    FirstTouch {
        armed: ms(armed_ms),
        untouched_until: ms(armed_ms + after_ms),
        touched_by: Some(ms(armed_ms + after_ms)),
        pages: 1,
    }
}

fn untouched(armed_ms: u64, now_ms: u64) -> FirstTouch {
    FirstTouch {
        armed: ms(armed_ms),
        untouched_until: ms(now_ms),
        touched_by: None,
        pages: 1,
    }
}

fn estimator() -> FirstTouchCurve {
    FirstTouchCurve::new(&LiveOptions {
        ram: PageCount(10_000),
        reach: None,
    })
}

/// The time of a VM that runs all the time.
fn at(time: Duration) -> Timestamp {
    Timestamp {
        vm: time,
        wall: time,
    }
}

fn observe(
    estimator: &mut FirstTouchCurve,
    ended: &[FirstTouch],
    waiting: &[FirstTouch],
    now: Duration,
) {
    let from = estimator.ends.back().copied().unwrap_or_default();
    estimator.observe(&LiveInput::FirstTouches(FirstTouches {
        ended,
        waiting,
        from,
        now: at(now),
        population_pages: POPULATION,
    }));
}

/// Samples of a VM that touches one page a millisecond, `pages` of the population in turn.
struct Loop {
    random: Random,
    pages: u64,
}

impl Loop {
    /// `count` samples, armed from one time to another and observed until a third: the ended and the waiting ones.
    fn samples(
        &mut self,
        count: u64,
        from_ms: u64,
        to_ms: u64,
        until_ms: u64,
    ) -> (Vec<FirstTouch>, Vec<FirstTouch>) {
        let (mut ended, mut waiting) = (Vec::new(), Vec::new());
        // One in each of as many equal ranges of pages.
        let mut ranges: Vec<u64> = (0..count).collect();
        for at in 0..count {
            let armed = from_ms + (to_ms - from_ms) * at / count;
            let other = at + below(&mut self.random, count - at);
            ranges.swap(at as usize, other as usize);
            let range = ranges[at as usize];
            let page = (range as f64 + self.random.share()) / count as f64 * POPULATION as f64;
            let wait = page as u64;
            // A page of the loop waits for its turn, from 1 ms on.
            let wait = (wait < self.pages).then_some(wait + 1);
            match wait.filter(|wait| armed + wait <= until_ms) {
                Some(wait) => ended.push(touched(armed, wait)),
                None => waiting.push(untouched(armed, until_ms)),
            }
        }
        (ended, waiting)
    }
}

fn a_loop(pages: u64) -> Loop {
    Loop {
        random: Random::new(7),
        pages,
    }
}

#[test]
fn a_vm_that_runs_a_quarter_of_the_time_has_the_same_curve_and_a_quarter_of_the_misses() {
    let curves = [1, 4].map(|wall_per_vm| {
        let mut estimator = estimator();
        let (ended, waiting) = a_loop(1000).samples(4000, 0, 10_000, 10_000);
        let wall = |time: Duration| time * wall_per_vm;
        estimator.observe(&LiveInput::FirstTouches(FirstTouches {
            ended: &ended,
            waiting: &waiting,
            from: Timestamp::default(),
            now: Timestamp {
                vm: ms(10_000),
                wall: wall(ms(10_000)),
            },
            population_pages: POPULATION,
        }));
        estimator.curve().unwrap()
    });
    let [always, seldom] = &curves;
    let ratios = |curve: &MissRatioCurve| {
        let points = curve.points().iter();
        let ratios: Vec<_> = points
            .map(|point| CurvePoint {
                misses: None,
                ..*point
            })
            .collect();
        ratios
    };
    assert_eq!(ratios(always), ratios(seldom));
    let rate = |curve: &MissRatioCurve| curve.points()[0].misses.unwrap().expected;
    assert!((rate(always) / rate(seldom) - 4.0).abs() < 1e-3);
}

#[test]
fn a_curve_is_renewed_when_its_touches_have_doubled_and_the_last_one_counts_all() {
    let mut estimator = estimator();
    let mut vm = a_loop(POPULATION);
    let mut periods = Vec::new();
    let (mut ended, mut all) = (Vec::new(), 0);
    for period in 0..5 {
        // Within an eighth of the window.
        let from = 20_000 + period * 500;
        let (new, _) = vm.samples(200, from - 10_000, from - 9_000, from);
        ended.clear();
        ended.extend(new);
        all += ended.len();
        observe(&mut estimator, &ended, &[], ms(from + 500));
        let curve = estimator.close_window(&LiveWindow::default()).unwrap();
        periods.push(curve.references());
    }
    let each = periods[0];
    assert_eq!(periods, [1, 2, 2, 4, 4].map(|times| each * times));
    assert_eq!(estimator.curve().unwrap().references(), all as u64);
    assert_eq!(each * 5, all as u64);
}

#[test]
fn samples_are_dropped_by_wall_time() {
    // Half a minute of the VM in two minutes: what counts is the last minute, in which it ran for 5 s.
    let mut estimator = estimator();
    let minute = Duration::from_secs(60);
    for (from, now) in [
        ((0, 0), (25_000, 60_000)),
        ((25_000, 60_000), (30_000, 120_000)),
    ] {
        let timestamp = |(vm, wall): (u64, u64)| Timestamp {
            vm: ms(vm),
            wall: ms(wall),
        };
        let (ended, waiting) = a_loop(1000).samples(400, from.0, now.0, now.0);
        estimator.observe(&LiveInput::FirstTouches(FirstTouches {
            ended: &ended,
            waiting: &waiting,
            from: timestamp(from),
            now: timestamp(now),
            population_pages: POPULATION,
        }));
    }
    assert_eq!(estimator.vm_time_at(minute), ms(25_000));
    assert!(estimator.samples().all(|sample| sample.armed >= ms(25_000)));
    // The VM begins anew as another process.
    estimator.observe(&LiveInput::FirstTouches(FirstTouches {
        ended: &[touched(10, 5)],
        waiting: &[],
        from: Timestamp::default(),
        now: at(ms(20)),
        population_pages: POPULATION,
    }));
    assert_eq!(estimator.samples().count(), 1);
    assert_eq!(estimator.ends, [Timestamp::default(), at(ms(20))]);
}

#[test]
fn a_loop_is_found_with_its_rate() {
    let mut estimator = estimator();
    assert!(estimator.curve().is_none());
    let (ended, waiting) = a_loop(1000).samples(4000, 0, 20_000, 20_000);
    observe(&mut estimator, &ended, &waiting, ms(20_000));
    let curve = estimator.close_window(&LiveWindow::default()).unwrap();
    assert!(curve.miss_ratio(PageCount(900)) > 0.9);
    assert!(curve.miss_ratio(PageCount(1100)) < 0.01);
    let rate = curve.points()[0].misses.unwrap().expected;
    assert!((rate - 1000.0).abs() < 60.0, "{rate}");
    let set = working_set(&curve);
    assert!(set.size.0.abs_diff(1000) < 50, "{set:?}");
    assert_eq!(set.bound, WorkingSetBound::Estimate);
    // The curve of the newest samples is that of all.
    assert_eq!(estimator.recent_curve(), estimator.curve());
}

#[test]
fn a_window_that_is_discarded_takes_its_samples_along_and_no_others() {
    let mut estimator = estimator();
    let (ended, waiting) = a_loop(1000).samples(4000, 0, 20_000, 20_000);
    observe(&mut estimator, &ended, &waiting, ms(20_000));
    let curve = estimator.close_window(&LiveWindow::default());
    // A window in which nothing was reported, and one in which every page was read from outside the VM.
    estimator.discard_window();
    assert_eq!(estimator.samples().count(), ended.len() + waiting.len());
    assert_eq!(estimator.curve(), curve);
    estimator.waiting.extend(&waiting);
    estimator.ended.truncate(ended.len());
    let mut read = vec![touched(20_001, 5)];
    read.extend(waiting.iter().map(|sample| FirstTouch {
        untouched_until: ms(20_005),
        touched_by: Some(ms(20_005)),
        ..*sample
    }));
    observe(
        &mut estimator,
        &read,
        &[untouched(20_002, 20_010)],
        ms(20_010),
    );
    estimator.discard_window();
    assert_eq!(estimator.samples().count(), ended.len() + waiting.len());
    let set = working_set(&estimator.curve().unwrap());
    assert!(set.size.0.abs_diff(1000) < 50, "{set:?}");
}

/// Samples in batches of eight, by the time that each waits at a speed of 1.
fn batches(speeds: &[f64], mut wait: impl FnMut() -> f64) -> Vec<(f64, Time)> {
    let batch = |(at, speed): (usize, &f64)| {
        let sample = |_| {
            let waited = wait() / speed;
            let time = Time {
                above: waited,
                upto: Some(waited),
            };
            (at as f64 * 0.2, time)
        };
        (0..8).map(sample).collect::<Vec<_>>()
    };
    speeds.iter().enumerate().flat_map(batch).collect()
}

#[test]
fn a_loop_of_passes_that_differ_in_length_has_an_edge() {
    // Most passes take 14 ms, every sixth 20.
    let mut random = Random::new(5);
    let speeds: Vec<f64> = (0..150)
        .map(|at| if at % 6 == 0 { 0.7 } else { 1.0 })
        .collect();
    let samples = batches(&speeds, || random.share() * 0.014);
    let times: Vec<_> = samples.iter().map(|&(_, time)| time).collect();
    let at = |samples: &[_]| {
        let (shape, speed) = Shape::at_even_speed(samples).unwrap();
        let curve = shape.curve(10_000, 1.0, 1.0).unwrap();
        (
            curve.miss_ratio(PageCount(9600)),
            curve.miss_ratio(PageCount(9990)),
            speed,
        )
    };
    let (below, beyond, speed) = at(&samples);
    assert!(below > 0.8 && beyond < 0.1, "{below}, {beyond}");
    assert!((speed - 1.0).abs() < 0.05, "{speed}");
    // Of passes of one length there is one speed.
    for _ in 0..20 {
        let even = batches(&[1.0; 150], || random.share() * 0.014);
        assert_eq!(at(&even).2, 1.0);
    }
    // Each alone they are taken for two loops.
    let apart: Vec<_> = times
        .iter()
        .enumerate()
        .map(|(at, &time)| (at as f64, time))
        .collect();
    assert!(at(&apart).0 < 0.3);
}

#[test]
fn pages_touched_at_random_have_one_speed() {
    let mut random = Random::new(9);
    for classes in [1, 2, 3].repeat(20) {
        let wait = || {
            let mean = 10_f64.powf((random.share() * f64::from(classes)).floor());
            -mean * (1.0 - random.share()).ln()
        };
        let samples = batches(&[1.0; 150], wait);
        assert_eq!(Shape::at_even_speed(&samples).unwrap().1, 1.0);
    }
}

/// Samples of a VM of which each of the first `pages` of the population is touched at random, each once in `mean_ms` in the
/// mean, armed within a minute.
fn seldom_touched(random: &mut Random, pages: f64, mean_ms: f64) -> [Vec<FirstTouch>; 2] {
    let mut samples = [Vec::new(), Vec::new()];
    for armed in (0..60_000).step_by(25) {
        let is_one = random.share() * POPULATION as f64 <= pages;
        let wait = (-mean_ms * (1.0 - random.share()).ln()) as u64;
        if is_one && armed + wait < 60_000 {
            samples[0].push(touched(armed, wait));
        } else {
            samples[1].push(untouched(armed, 60_000));
        }
    }
    samples
}

#[test]
fn a_vm_that_touches_nothing_misses_hardly_anything() {
    let [ended, waiting] = seldom_touched(&mut Random::new(1), 0.0, 1.0);
    assert_eq!((ended.len(), waiting.len()), (0, 2400));
    let mut estimator = estimator();
    observe(&mut estimator, &ended, &waiting, ms(60_000));
    let curve = estimator.curve().unwrap();
    assert_eq!(curve.references(), 0);
    // Of the population a share of 1 / 128.
    let size = PageCount(32);
    assert!(curve.resolves(size) && !curve.resolves(PageCount(31)));
    let misses = curve.misses_per_second(size).unwrap();
    // 3 touches in the 22,500 s for which samples waited from 15 to 30 s, of each page.
    assert_eq!((misses.low, misses.expected), (0.0, 0.0));
    assert!(
        (misses.high - 4000.0 * 3.0 / 22_500.0).abs() < 0.01,
        "{misses:?}"
    );
}

#[test]
fn the_band_of_a_vm_that_touches_hardly_anything_holds_its_misses() {
    let mut random = Random::new(3);
    // 1 to 144 touches are observed, and in the last of them enough for a curve of several sizes.
    let vms = [
        (4000.0, 1e8),
        (4000.0, 2e7),
        (20.0, 3000.0),
        (30.0, 2e4),
        (4000.0, 2e6),
        (4000.0, 1e6),
        (4000.0, 5e5),
    ];
    for (pages, mean_ms) in vms {
        let (mut held, mut all) = (0, 0);
        for _ in 0..100 {
            let [ended, waiting] = seldom_touched(&mut random, pages, mean_ms);
            let mut estimator = estimator();
            observe(&mut estimator, &ended, &waiting, ms(60_000));
            let curve = estimator.curve().unwrap();
            for size in [0, curve.points().len() / 2].map(|at| curve.points()[at].size) {
                let misses = curve.misses_per_second(size).unwrap();
                let truth = (pages - size.0 as f64).max(0.0) * 1000.0 / mean_ms;
                held += usize::from(misses.low <= truth && truth <= misses.high);
                all += 1;
            }
        }
        assert!(
            held >= all * 95 / 100,
            "{pages} pages, each once in {mean_ms} ms: {held}"
        );
    }
}

#[test]
fn what_was_not_waited_for_is_a_lower_bound() {
    // A loop of 3 s, of which the first second was observed.
    let (ended, waiting) = a_loop(3000).samples(3000, 0, 1000, 1000);
    let mut estimator = estimator();
    observe(&mut estimator, &ended, &waiting, ms(1000));
    let curve = estimator.curve().unwrap();
    let set = working_set(&curve);
    assert_eq!(set.bound, WorkingSetBound::AtLeast);
    assert!((850..=1150).contains(&set.size.0), "{set:?}");
    // From here on it is not known whether the pages are touched again.
    let last = curve.at(PageCount(POPULATION));
    assert!(last.miss_ratio > 0.6 && last.high == 1.0, "{last:?}");
}

/// 400 samples in 10 s of a VM that goes through `pages` of the population every 0.15 ms. A thirtieth of the time it is at
/// something else for up to 4 ms, and the other pages are touched about once a second.
fn a_fast_loop(pages: u64, seed: u64) -> MissRatioCurve {
    let (mut random, mut estimator) = (Random::new(seed), estimator());
    let (mut ended, mut waiting) = (Vec::new(), Vec::new());
    for at in 0..400 {
        let armed = Duration::from_micros(at * 25_000);
        let seconds = if below(&mut random, POPULATION) >= pages {
            -(1.0 - random.share()).ln()
        } else if below(&mut random, 30) == 0 {
            4e-3 * random.share() + 1e-6
        } else {
            0.15e-3 * random.share() + 1e-6
        };
        let by = armed + Duration::from_secs_f64(seconds);
        let sample = FirstTouch {
            armed,
            untouched_until: by.min(ms(10_000)),
            touched_by: (by <= ms(10_000)).then_some(by),
            pages: 1,
        };
        if sample.touched_by.is_some() {
            ended.push(sample);
        } else {
            waiting.push(sample);
        }
    }
    observe(&mut estimator, &ended, &waiting, ms(10_000));
    estimator.curve().unwrap()
}

#[test]
fn a_loop_that_is_faster_than_the_resolution_has_no_point_below_its_size() {
    for (pages, seed) in [1000, 3000, 3900].into_iter().zip(0..) {
        let curves: Vec<_> = (0..20)
            .map(|turn| a_fast_loop(pages, seed * 20 + turn))
            .collect();
        let starts = curves.iter().map(|curve| curve.points()[0].size.0);
        // A thirtieth of the touches come later than the others.
        let below = starts.clone().filter(|&start| start * 100 < pages * 99);
        let below = below.count();
        println!("loop of {pages}: {:?}", starts.collect::<Vec<_>>());
        assert!(below <= 1, "{below} of 20 curves begin below {pages} pages");
    }
}

#[test]
fn quotients_of_misses_are_known_better_than_the_misses() {
    let (mut held, mut all, mut widths) = (0, 0, [0.0, 0.0]);
    for seed in 0..10 {
        // All pages alike, one touch in 4 s each.
        let mut random = Random::new(seed);
        let (mut ended, mut waiting) = (Vec::new(), Vec::new());
        for armed in (0..20_000).step_by(16) {
            let wait = (-4000.0 * (1.0 - random.share()).ln()) as u64 + 1;
            if armed + wait <= 20_000 {
                ended.push(touched(armed, wait));
            } else {
                waiting.push(untouched(armed, 20_000));
            }
        }
        let mut estimator = estimator();
        observe(&mut estimator, &ended, &waiting, ms(20_000));
        let curve = estimator.curve().unwrap();
        for baseline in [1500, 2500, 3500] {
            for below in [0.6, 0.9, 0.97] {
                let (baseline, size) = (PageCount(baseline), PageCount(baseline).scaled(below));
                let missed = |size: PageCount| (POPULATION - size.0) as f64;
                let truth = missed(size) / missed(baseline);
                let band = curve.quotient_band(size, baseline, 1e-3);
                held += u32::from(band.contains(&truth));
                all += 1;
                let (point, divisor) = (curve.at(size), curve.miss_ratio(baseline));
                widths[0] += band.end() - band.start();
                widths[1] += (point.high - point.low) / divisor;
            }
        }
    }
    assert!(held * 100 >= all * 95, "{held} of {all}");
    assert!(widths[0] < widths[1] / 2.0, "{widths:?}");
}

#[test]
fn touches_known_within_an_interval_give_the_same_loop() {
    let (mut ended, waiting) = a_loop(1000).samples(6000, 0, 20_000, 20_000);
    for sample in &mut ended {
        // Pages are checked every 100 ms after they were armed.
        let wait = (sample.untouched_until - sample.armed).as_millis() as u64;
        sample.untouched_until = sample.armed + ms((wait - 1) / 100 * 100);
        sample.touched_by = Some(sample.untouched_until + ms(100));
    }
    let mut estimator = estimator();
    observe(&mut estimator, &ended, &waiting, ms(20_000));
    let curve = estimator.curve().unwrap();
    // The resolution is an interval: a tenth of the loop.
    assert!(
        curve.points()[0].size.0.abs_diff(100) <= 20,
        "{:?}",
        curve.points()[0]
    );
    let set = working_set(&curve);
    assert!(set.size.0.abs_diff(1000) < 60, "{set:?}");
}

#[test]
fn a_few_touches_that_are_hardly_known_leave_the_others_resolved() {
    let (mut ended, waiting) = a_loop(1000).samples(6000, 0, 20_000, 20_000);
    for sample in ended.iter_mut().step_by(50) {
        sample.untouched_until = sample.armed;
        sample.touched_by = Some(sample.armed + ms(900));
    }
    let mut estimator = estimator();
    observe(&mut estimator, &ended, &waiting, ms(20_000));
    let first = estimator.curve().unwrap().points()[0].size.0;
    assert!(first < 50, "{first}");
}

/// Pages with these rates of touches a second, of which `count` are armed in each period of 5 s and checked at times that grow by
/// a quarter, the first after `first`.
fn observe_checked(estimator: &mut FirstTouchCurve, rates: &[f64], count: usize, first: f64) {
    let mut random = Random::new(11);
    for period in 0..12 {
        let armed = Duration::from_secs(5 * period);
        let seconds = |time: f64| armed + Duration::from_secs_f64(time);
        let first = first * 1.25_f64.powf((period as f64 * 0.618).fract());
        let mut ended = Vec::new();
        for _ in 0..count {
            let rate = rates[below(&mut random, rates.len() as u64) as usize];
            let touch = -(1.0 - random.share()).ln() / rate;
            let (mut last, mut check) = (0.0, first);
            while check < touch && check < 5.0 {
                (last, check) = (check, (check * 1.25).min(5.0));
                if last >= 5.0 {
                    break;
                }
            }
            ended.push(FirstTouch {
                armed,
                untouched_until: seconds(last),
                touched_by: (touch <= check).then(|| seconds(check)),
                pages: 1,
            });
        }
        let now = at(Duration::from_secs(5 * (period + 1)));
        estimator.observe(&LiveInput::FirstTouches(FirstTouches {
            ended: &ended,
            waiting: &[],
            from: at(armed),
            now,
            population_pages: rates.len() as u64,
        }));
    }
}

#[test]
fn touches_between_checks_ever_further_apart_give_the_curve_of_a_law() {
    let pages = 24_576_usize;
    let mut held_in_all = 0.0;
    for (alpha, count, first) in [
        (1.0, 170, 0.01),
        (0.6, 170, 0.01),
        (0.0, 170, 0.01),
        (1.0, 1600, 0.002),
    ] {
        let weights: Vec<f64> = (1..=pages).map(|rank| (rank as f64).powf(-alpha)).collect();
        let total: f64 = weights.iter().sum();
        let rates: Vec<f64> = weights.iter().map(|weight| weight / total * 2e6).collect();
        let mut estimator = FirstTouchCurve::new(&LiveOptions {
            ram: PageCount(pages as u64),
            reach: None,
        });
        observe_checked(&mut estimator, &rates, count, first);
        let curve = estimator.curve().unwrap();
        let rate = curve.points()[0].misses.unwrap().expected;
        // [size, misses a second] of an LRU memory at rising times, from where the curve begins.
        let truth = (1..200).map(|step| {
            let time = 1e-4 * 1.06_f64.powi(step);
            let touched = rates.iter().map(|rate| -(-rate * time).exp_m1());
            let missed = rates.iter().map(|rate| rate * (-rate * time).exp());
            [touched.sum::<f64>(), missed.sum()]
        });
        let known = curve.points()[0].size.0 as f64..0.99 * pages as f64;
        let truth: Vec<_> = truth.filter(|[size, _]| known.contains(size)).collect();
        assert!(truth.len() > 20, "{alpha}: from {}", known.start);
        let found = |size: f64| curve.at(PageCount(size as u64));
        let mean = |error: &dyn Fn(&[f64; 2]) -> f64| {
            truth.iter().map(error).sum::<f64>() / truth.len() as f64
        };
        let shape = mean(&|[size, misses]| (found(*size).miss_ratio - misses / truth[0][1]).abs());
        let level = mean(&|[size, misses]| (found(*size).miss_ratio * rate / misses - 1.0).abs());
        let held = mean(&|[size, misses]| {
            let (point, ratio) = (found(*size), misses / truth[0][1]);
            f64::from(u8::from(point.low <= ratio && ratio <= point.high))
        });
        println!("{alpha} {count}: shape {shape:.4}, level {level:.3}, held {held:.2}");
        assert!(shape < 0.03 && level < 0.15);
        held_in_all += held / 4.0;
    }
    assert!(held_in_all > 0.95, "{held_in_all}");
}

#[test]
fn a_change_of_phase_drops_what_was_before() {
    let mut estimator = estimator();
    let (mut now, mut waiting) = (0, Vec::new());
    let mut periods = |estimator: &mut FirstTouchCurve, pages: u64, count: u64| {
        for _ in 0..count {
            // Armed early enough that every page of the loop has its turn before the period ends.
            let (ended, still) = a_loop(pages).samples(400, now, now + 2500, now + 5000);
            now += 5000;
            waiting.extend(still);
            for sample in &mut waiting {
                sample.untouched_until = ms(now);
            }
            observe(estimator, &ended, &waiting, ms(now));
        }
        working_set(&estimator.curve().unwrap()).size.0
    };
    assert!(periods(&mut estimator, 500, 10).abs_diff(500) < 50);
    assert_eq!(estimator.changed, Duration::ZERO);
    let after = periods(&mut estimator, 2000, 2);
    assert!(estimator.changed >= ms(45_000), "{:?}", estimator.changed);
    assert!(after.abs_diff(2000) < 150, "{after}");
}

/// Samples, 40 a second for 50 s and then for 10 s, of a VM of which each of a share of the pages is touched once in 2 s in the
/// mean, either before 50 s or from then on.
fn busy_on_one_side(random: &mut Random, share: f64, is_busy_before: bool) -> Vec<FirstTouch> {
    let sample = |armed: u64| {
        let from = if is_busy_before {
            armed
        } else {
            armed.max(50_000)
        };
        let to = if is_busy_before { 50_000 } else { 60_000 };
        let by = from + 1 + (-2000.0 * (1.0 - random.share()).ln()) as u64;
        match random.share() < share && by <= to {
            true => touched(armed, by - armed),
            false => untouched(armed, 60_000),
        }
    };
    (0..60_000).step_by(25).map(sample).collect()
}

/// Of an idle VM nothing is touched, which is as much of a phase as any other.
#[test]
fn a_vm_that_gets_busy_or_idle_is_in_another_phase() {
    let mut random = Random::new(5);
    for is_busy_before in [false, true] {
        let (mut found, mut near) = (0, 0);
        for _ in 0..20 {
            let samples = busy_on_one_side(&mut random, 0.2, is_busy_before);
            let change = change::last_change(samples.iter(), Duration::ZERO, ms(60_000));
            found += u32::from(change.is_some());
            near += u32::from(change.is_some_and(|at| at >= ms(49_000) && at <= ms(51_500)));
        }
        assert!(
            found == 20 && near >= 18,
            "{is_busy_before}: {found}, {near}"
        );
    }
}

/// The few touches of a VM that was idle are not those of the time before.
#[test]
fn the_misses_of_a_vm_that_begins_to_touch_a_few_pages_are_those_since_then() {
    let mut random = Random::new(9);
    let mut held = 0;
    for _ in 0..20 {
        let samples = busy_on_one_side(&mut random, 0.02, false);
        let (ended, waiting): (Vec<_>, Vec<_>) = samples
            .into_iter()
            .partition(|sample| sample.touched_by.is_some());
        let mut estimator = estimator();
        observe(&mut estimator, &ended, &waiting, ms(60_000));
        let curve = estimator.curve().unwrap();
        let first = curve.points()[0];
        let misses = first.misses.unwrap();
        // Each of the 80 pages that are not in that memory, once in 2 s.
        let truth = (80.0 - first.size.0 as f64).max(0.0) / 2.0;
        held += u32::from(misses.low <= truth && truth <= misses.high);
    }
    assert!(held >= 18, "{held} of 20");
}

/// One false alarm is expected in 10 000 periods.
#[test]
fn samples_of_one_phase_are_not_taken_for_two() {
    let mut random = Random::new(3);
    for _ in 0..300 {
        let samples: Vec<_> = (0..600)
            .map(|armed| {
                touched(
                    armed * 100,
                    1 + below(&mut random, 1000) * below(&mut random, 1000) / 1000,
                )
            })
            .collect();
        let change = change::last_change(samples.iter(), Duration::ZERO, ms(60_000));
        assert_eq!(change, None);
    }
}

/// Samples of a VM that touches each page of its working set every 10 ms, and others in bursts of some hundred ms: 20
/// samples a second, as of a budget of 1 % under KVM.
struct Bursts {
    random: Random,
    now_ms: u64,
    ended: Vec<FirstTouch>,
    waiting: Vec<(u64, FirstTouch)>,
}

impl Bursts {
    fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            now_ms: 0,
            ended: Vec::new(),
            waiting: Vec::new(),
        }
    }

    /// A period of 5 s that begins with a pass over all pages below `burst`; the last change of phase, if one is found.
    fn period(&mut self, pages: u64, burst: u64) -> Option<Duration> {
        let begin = self.now_ms;
        self.now_ms += 5000;
        for (page, sample) in std::mem::take(&mut self.waiting) {
            if page < burst {
                let wait =
                    begin + 1 + below(&mut self.random, 300) - sample.armed.as_millis() as u64;
                self.ended
                    .push(touched(sample.armed.as_millis() as u64, wait));
            } else {
                self.waiting.push((page, sample));
            }
        }
        for at in 0..100 {
            let armed = begin + at * 50 + below(&mut self.random, 50);
            let page = below(&mut self.random, POPULATION);
            let wait = 1 + below(&mut self.random, 10);
            if page < pages && armed + wait <= self.now_ms {
                self.ended.push(touched(armed, wait));
            } else {
                self.waiting.push((page, untouched(armed, self.now_ms)));
            }
        }
        for (_, sample) in &mut self.waiting {
            sample.untouched_until = ms(self.now_ms);
        }
        let samples = self.ended.iter().chain(self.waiting.iter().map(|it| &it.1));
        change::last_change(samples, Duration::ZERO, ms(self.now_ms))
    }
}

#[test]
fn a_growing_working_set_is_noticed_within_a_period() {
    let mut noticed = 0;
    for seed in 0..20 {
        let mut vm = Bursts::new(seed);
        for _ in 0..12 {
            assert_eq!(vm.period(400, 0), None);
        }
        let at_once = vm.period(1000, 1000);
        noticed += u64::from(at_once.is_some());
        // What was before the change is dropped, and little else.
        let found = at_once.or_else(|| vm.period(1000, 0));
        let is_near = |found: Duration| found >= ms(59_700) && found <= ms(60_300);
        assert!(found.is_some_and(is_near), "{found:?}");
    }
    assert!(noticed >= 15, "{noticed} of 20");
}

#[test]
fn one_pass_over_other_pages_is_not_taken_for_a_phase() {
    for seed in 0..20 {
        let mut vm = Bursts::new(seed);
        for _ in 0..12 {
            vm.period(400, 0);
        }
        assert_eq!(vm.period(400, 1500), None, "{seed}");
    }
}

#[test]
fn samples_older_than_the_window_do_not_count() {
    let mut estimator = estimator();
    observe(
        &mut estimator,
        &[touched(0, 5), touched(1000, 5)],
        &[],
        ms(2000),
    );
    observe(&mut estimator, &[], &[untouched(0, 60_500)], ms(60_500));
    assert_eq!(estimator.ended.len(), 1);
    assert!(estimator.waiting.is_empty());
    // The two ended in a window that is still open; one of them is gone already.
    estimator.discard_window();
    assert!(estimator.ended.is_empty());
}

/// Every reference of a stream, observed from every 37th time on; and its misses per reference, by their definition.
fn observed_whole(pages: &[u64], population: u64) -> (MissRatioCurve, Vec<usize>) {
    let observed = pages.len() / 2;
    let mut times = Vec::new();
    for start in (0..observed).step_by(37) {
        let mut waits = vec![None; population as usize];
        for (wait, &page) in (1_u32..).zip(&pages[start..start + observed]) {
            waits[page as usize].get_or_insert(f64::from(wait));
        }
        times.extend(waits.iter().map(|wait| Time {
            above: wait.unwrap_or(observed as f64),
            upto: *wait,
        }));
    }
    let samples: Vec<_> = times.iter().map(|&time| (0.0, time)).collect();
    // All of one batch, so that its speed is the mean.
    let (shape, _) = Shape::at_even_speed(&samples).unwrap();
    let curve = shape.curve(population, 1.0, 1.0).unwrap();
    let sizes = (1..=8).map(|step| (population * step / 8) as usize);
    (curve, sizes.collect())
}

#[test]
fn all_pages_at_all_times_give_the_curve_of_lru() {
    let population = 256;
    let streams: [(Vec<u64>, f64); 2] = [
        (uniform(population, 5).take(10_000).collect(), 0.02),
        (cycle(population).take(10_000).collect(), 0.001),
    ];
    for (pages, most) in streams {
        let (curve, sizes) = observed_whole(&pages, population);
        let rate = curve.points()[0].misses.unwrap().expected;
        for size in sizes {
            let misses = naive::NaiveStack::misses(&pages, size) as f64;
            // First references are no part of a steady state.
            let truth = (misses - population as f64) / (pages.len() - population as usize) as f64;
            let found = curve.miss_ratio(PageCount(size as u64)) * rate;
            assert!(
                (found - truth).abs() < most,
                "{size}: {found} instead of {truth}"
            );
        }
    }
}

fn durations() -> impl Strategy<Value = Duration> {
    prop_oneof![
        3 => (0_u64..100_000_000).prop_map(Duration::from_micros),
        1 => Just(Duration::ZERO),
        1 => Just(Duration::MAX),
        1 => (0_u64..5).prop_map(Duration::from_nanos),
        1 => any::<u64>().prop_map(Duration::from_secs),
    ]
}

fn samples() -> impl Strategy<Value = Vec<FirstTouch>> {
    let sample = (
        durations(),
        durations(),
        prop::option::of(durations()),
        any::<u32>(),
    );
    let sample = sample.prop_map(|(armed, untouched_until, touched_by, pages)| FirstTouch {
        armed,
        untouched_until,
        touched_by,
        pages,
    });
    prop::collection::vec(sample, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Times reversed, empty, of zero and of endless length: whatever arrives, the answer is a curve or none.
    #[test]
    fn any_samples_give_a_curve_or_none(
        periods in prop::collection::vec(
            (samples(), samples(), durations(), durations(), any::<u64>()),
            1..4,
        ),
    ) {
        let mut estimator = estimator();
        for (ended, waiting, now, wall, population_pages) in &periods {
            estimator.observe(&LiveInput::FirstTouches(FirstTouches {
                ended,
                waiting,
                from: Timestamp::default(),
                now: Timestamp { vm: *now, wall: *wall },
                population_pages: *population_pages,
            }));
            if let Some(curve) = estimator.curve() {
                prop_assert!(curve.points().iter().all(|point| point.size.0 <= 10_000));
            }
            estimator.discard_window();
            estimator.close_window(&LiveWindow::default());
        }
    }

    /// For times whose density falls, the majorant of the product-limit estimate is as near to the truth as the estimate
    /// itself (Marshall's lemma): both are within 1.95 / sqrt(n) of it, Kolmogorov's limit of 99.9 %.
    #[test]
    fn the_mixture_agrees_with_the_product_limit(
        scales in prop::collection::vec(10_u64..500, 1..4),
        seed in any::<u64>(),
        limit in 100_u64..600,
    ) {
        let mut random = Random::new(seed);
        let observations: Vec<(u64, bool)> = (0..400)
            .map(|at| {
                let time = 1 + below(&mut random, scales[at % scales.len()]);
                (time.min(limit), time > limit)
            })
            .collect();
        let times: Vec<_> = observations
            .iter()
            .map(|&(time, is_censored)| Time {
                above: time as f64,
                upto: (!is_censored).then_some(time as f64),
            })
            .collect();
        let cells = Cells::new(&times);
        prop_assume!(cells.is_some());
        let mixture = Mixture::fit(&cells.unwrap());
        for time in (0..limit).step_by(10) {
            let weighted = mixture.components.iter().zip(&mixture.weights);
            let share: f64 = weighted.map(|(one, weight)| weight * one.share(time as f64)).sum();
            let naive = 1.0 - naive::product_limit(&observations, time);
            prop_assert!((share - naive).abs() < 2.0 * 1.95 / 20.0, "{time}: {share}, {naive}");
        }
    }
}
