//! Observers with a backend that replays prepared data.

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, ScanCounts, TrapCounts};
use plimsoll_trap::{Observation, Refusal, Scan, Sink, TouchCost, Toucher};

use super::*;

/// Replays a loop over `pages`, in batches of `batch`, as references or as scans.
#[derive(Debug)]
struct Replay {
    method: TraceMethod,
    pages: u64,
    batch: usize,
    /// One page in so many is tracked, of 10,000.
    scale: u32,
    failing: bool,
}

impl Backend for Replay {
    fn run_period(&mut self, _: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let pages: Vec<u64> = (0..self.pages).cycle().take(4000).collect();
        let mut batch = ReferenceBatch::new();
        for (index, pages) in (0..).zip(pages.chunks(self.batch)) {
            batch.advance();
            for &page in pages {
                batch.push(PageNumber(page), AccessKind::Unknown);
            }
            sink(&match self.method {
                TraceMethod::Traps => Observation::References(&batch),
                _ => Observation::Scan(Scan {
                    from: Duration::from_millis(index),
                    to: Duration::from_millis(index + 1),
                    touched: &batch,
                }),
            });
        }
        if self.failing {
            return Err(TrapError::Refused(Refusal::Locked));
        }
        let is_trap = self.method == TraceMethod::Traps;
        let scans = ScanCounts {
            scans: 4000 / self.batch as u64,
            interval: Duration::from_millis(1),
            touches: 4000,
            writes: 0,
            resolution_pages: u32::try_from(self.batch).unwrap(),
            ..ScanCounts::default()
        };
        let traps = TrapCounts {
            taken: 4000,
            hot_set_pages: 16,
            ..TrapCounts::default()
        };
        Ok(Period {
            scale: self.scale,
            populated_pages: 10_000,
            tracked_pages: 10_000 / u64::from(self.scale),
            distinct_pages: self.pages,
            traps: if is_trap {
                traps
            } else {
                TrapCounts::default()
            },
            scans: if is_trap {
                ScanCounts::default()
            } else {
                scans
            },
            ..Period::empty(self.method, Duration::from_secs(5), Duration::from_secs(5))
        })
    }

    fn detach(self: Box<Self>) -> Result<(), TrapError> {
        Ok(())
    }

    fn touch_cost(&self) -> TouchCost {
        TouchCost {
            time: Duration::from_micros(1),
            toucher: Toucher::Thread,
        }
    }

    fn ram_pages(&self) -> u64 {
        10_000
    }
}

/// An observer of a loop over 400 sampled pages of 800.
fn observer(method: TraceMethod, options: &ObserverOptions) -> Observer {
    let replay = Replay {
        method,
        pages: 400,
        batch: 50,
        scale: 2,
        failing: false,
    };
    let row = BackendRow::of(method);
    Observer::of(VmId("a".into()), row, Box::new(replay), options)
}

/// An observer of a loop over 40 sampled pages, all of which are touched between two scans.
fn scanned_at_once() -> Observer {
    let replay = Replay {
        method: TraceMethod::AccessedPageScans,
        pages: 40,
        batch: 40,
        scale: 2,
        failing: false,
    };
    let options = ObserverOptions::default();
    let row = BackendRow::of(replay.method);
    Observer::of(VmId("a".into()), row, Box::new(replay), &options)
}

fn observe(observer: &mut Observer) -> ObservedPeriod {
    observer.period(&AtomicBool::new(false)).unwrap()
}

#[test]
fn each_backend_gives_its_working_set_with_the_bound_that_it_has() {
    use WorkingSetBound::{AtLeast, Estimate};
    for (method, bound, size) in [
        (TraceMethod::Traps, Estimate, 800),
        (TraceMethod::AccessedPageScans, Estimate, 800),
        (TraceMethod::WriteScans, AtLeast, 800),
        // 400 of 5000 pages, of 10,000.
        (TraceMethod::SampledPages, Estimate, 800),
    ] {
        let mut observer = observer(method, &ObserverOptions::default());
        let observed = observe(&mut observer);
        let set = observed.working_set.unwrap();
        assert_eq!(set.bound, bound, "{method}");
        assert!(set.size.0.abs_diff(size) <= 40, "{method}: {set:?}");
        let has_curve = method != TraceMethod::SampledPages;
        assert_eq!(observed.curve.is_some(), has_curve, "{method}");
        assert_eq!(observer.curve().is_some(), has_curve, "{method}");
        assert!(observer.curves().is_none() && observed.compared.is_none());
    }
}

#[test]
fn a_sampled_working_set_rises_fast_and_falls_slowly() {
    let mut averages = SampledShare::default();
    let mut period = Replay {
        method: TraceMethod::SampledPages,
        pages: 1,
        batch: 50,
        scale: 2,
        failing: false,
    }
    .run_period(&AtomicBool::new(false), &mut |_| {})
    .unwrap();
    // Of 10,000 populated pages, as shares of 5000 sampled.
    for (touched, size) in [(0, 0), (5000, 6000), (5000, 8400), (0, 3360)] {
        period.distinct_pages = touched;
        let set = working_set_of(&period, None, &mut averages).unwrap();
        assert!(set.size.0.abs_diff(size) <= 1, "{set:?} for {size}");
    }
    period.tracked_pages = 0;
    assert!(working_set_of(&period, None, &mut averages).is_none());
}

#[test]
fn a_working_set_below_the_resolution_is_an_upper_bound() {
    let mut observer = scanned_at_once();
    let set = observe(&mut observer).working_set.unwrap();
    assert_eq!(set.bound, WorkingSetBound::AtMost);
}

/// First touches resolve nothing below the first point: a curve that has fallen there gives an upper bound, and one that falls
/// nowhere a lower one.
#[test]
fn a_working_set_at_the_first_point_of_a_curve_is_the_bound_that_the_curve_has() {
    for method in [
        TraceMethod::FirstTouches,
        TraceMethod::Traps,
        TraceMethod::AccessedPageScans,
    ] {
        let row = BackendRow::of(method);
        let first = |miss_ratio| {
            let points = [488, 62_464].map(|size| CurvePoint::exact(PageCount(size), miss_ratio));
            read_from(&MissRatioCurve::new(points.to_vec(), 9).unwrap(), row)
        };
        let (fallen, uniform) = (first(0.0), first(1.0));
        assert_eq!(
            (fallen.size.0, fallen.bound),
            (488, WorkingSetBound::AtMost)
        );
        assert_eq!(uniform.bound, WorkingSetBound::AtLeast);
    }
}

/// A page of the cache in one period is in the group in later ones too, also if no sampled page was.
#[test]
fn without_the_uses_of_page_cache_there_is_no_upper_bound() {
    let mut observer = scanned_at_once();
    observer.is_cache_hidden = true;
    let known = observe(&mut observer).working_set.map(|set| set.bound);
    assert_eq!(known, Some(WorkingSetBound::AtMost));
    observer.has_hidden_cache = true;
    assert_eq!(observe(&mut observer).working_set, None);
    assert_eq!(observer.working_set(), None);
    let estimate = WorkingSet {
        size: PageCount(9),
        bound: WorkingSetBound::Estimate,
    };
    let known = without_hidden_cache(estimate).map(|set| set.bound);
    assert_eq!(known, Some(WorkingSetBound::AtLeast));
}

/// One page of a sample can stand for more than the VM has.
#[test]
fn a_few_tracked_pages_show_no_size_and_no_bound_is_above_the_ram() {
    for method in [
        TraceMethod::Traps,
        TraceMethod::AccessedPageScans,
        TraceMethod::WriteScans,
    ] {
        // 1, 19 and 20 tracked pages, which are used all the time.
        for (pages, scale) in [(1, 9999), (19, 526), (20, 500), (20, 499)] {
            let replay = Replay {
                method,
                pages,
                batch: 1,
                scale,
                failing: false,
            };
            let options = ObserverOptions::default();
            let row = BackendRow::of(method);
            let mut observer = Observer::of(VmId("a".into()), row, Box::new(replay), &options);
            let observed = observe(&mut observer);
            let is_known = pages == 20;
            assert_eq!(observed.working_set.is_some(), is_known, "{method} {pages}");
            assert_eq!(observer.working_set().is_some(), is_known, "{method}");
            assert!(is_known || observed.curve.is_none() && observer.curve().is_none());
            for set in observed
                .working_set
                .into_iter()
                .chain(observer.working_set())
            {
                assert!(set.size <= PageCount(10_000), "{method}: {set:?}");
            }
            let limit = TracingLimit::of(&observed.period, None);
            assert_eq!(limit.is_none(), is_known, "{method}: {limit:?}");
        }
    }
}

#[test]
fn both_estimators_run_only_for_a_comparison() {
    for estimator in [live::LRU, live::AET] {
        let options = ObserverOptions {
            estimator: Some(estimator),
            is_compared: true,
            ..ObserverOptions::default()
        };
        let mut observer = observer(TraceMethod::Traps, &options);
        let observed = observe(&mut observer);
        assert!(observed.distance().unwrap().mean_absolute_error < 0.1);
        let (curves, chosen) = (observer.curves().unwrap(), observer.curve().unwrap());
        let is_lru = estimator.name == live::LRU.name;
        let expected = if is_lru { &curves.lru } else { &curves.aet };
        assert_eq!(chosen.points(), expected.points());
    }
    let compared = ObserverOptions {
        is_compared: true,
        ..ObserverOptions::default()
    };
    let observer = observer(TraceMethod::AccessedPageScans, &compared);
    assert!(observer.compared.is_none());
}

#[test]
fn a_period_that_fails_leaves_nothing_in_the_curve() {
    let replay = Replay {
        method: TraceMethod::Traps,
        pages: 400,
        batch: 50,
        scale: 2,
        failing: true,
    };
    let options = ObserverOptions::default();
    let row = BackendRow::of(replay.method);
    let mut observer = Observer::of(VmId("a".into()), row, Box::new(replay), &options);
    assert!(observer.period(&AtomicBool::new(false)).is_err());
    assert!(observer.curve().is_none());
    observer.detach().unwrap();
}

#[test]
fn heat_is_counted_where_the_pages_lie() {
    let options = ObserverOptions {
        heat_cells: Some(4),
        ..ObserverOptions::default()
    };
    let mut observer = observer(TraceMethod::Traps, &options);
    // The first 400 of 10,000 pages, each for two.
    let heat = observe(&mut observer).heat.unwrap();
    assert_eq!((heat.ram.0, &heat.pages[..]), (10_000, &[800, 0, 0, 0][..]));
}

#[test]
fn a_curve_within_reach_is_that_of_the_newest_periods() {
    let options = ObserverOptions {
        reach: Some(Duration::from_secs(60)),
        ..ObserverOptions::default()
    };
    let mut observer = observer(TraceMethod::Traps, &options);
    observe(&mut observer);
    let curve = observe(&mut observer).curve.unwrap();
    assert_eq!(curve.points(), observer.curve().unwrap().points());
}

#[test]
fn even_sizes_begin_and_end_where_they_should() {
    let sizes = |first, last| even_sizes(PageCount(first), PageCount(last)).map(|size| size.0);
    assert_eq!(sizes(3, 6).collect::<Vec<_>>(), [3, 4, 5, 6]);
    let many: Vec<_> = sizes(64, 100_000).collect();
    assert!(many.len() <= 1001 && many[0] == 64 && many.last().is_some_and(|&size| size > 99_800));
    assert_eq!(sizes(5, 5).collect::<Vec<_>>(), [5]);
}
