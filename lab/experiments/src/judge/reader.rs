//! What the guest prints, and the truth at its time.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Context as _;
use plimsoll_flow::{MissRatioCurve, MissesPerSecond, PageCount, WorkingSetBound};
use plimsoll_protocol::tracer::{PeriodLine, TracerLine};
use serde::{Deserialize, Serialize};

use super::truth::{PAGE_BYTES, Truth, Truths};

/// What a method estimates at a time, beside the truths of then.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Estimate {
    /// Since the method began.
    pub seconds: f64,
    /// Memory at which at most [`Truths::allowed`] pages miss in a second.
    pub needed: Judgement,
    /// Touched in a second.
    pub touched: Judgement,
    /// Working set: memory at which 5 % of the visits miss that the curve resolves; of methods with a curve.
    pub of_resolved: Option<Judgement>,
}

/// An estimate beside its truth, both in bytes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Judgement {
    pub bytes: f64,
    pub truth: f64,
    /// Its confidence band; the kernel's interfaces report none.
    pub band: Option<Band>,
}

impl Judgement {
    /// Relative distance from the truth.
    pub fn error(&self) -> f64 {
        (self.bytes / self.truth - 1.0).abs()
    }
}

/// The band of an estimate in bytes, or what a bound excludes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Band {
    pub bound: WorkingSetBound,
    pub low: f64,
    /// `None` if nothing bounds it.
    pub high: Option<f64>,
}

impl Band {
    fn of(period: &PeriodLine) -> Option<Self> {
        let bytes = |pages: u64| pages as f64 * PAGE_BYTES;
        let size = period.working_set_pages.map(bytes)?;
        let low = period.working_set_low_pages.map(bytes);
        let high = period.working_set_high_pages.map(bytes);
        let bound = period.working_set_bound?;
        let (low, high) = match bound {
            WorkingSetBound::Estimate => (low.unwrap_or(0.0), high),
            WorkingSetBound::AtLeast => (low.unwrap_or(size), None),
            WorkingSetBound::AtMost => (0.0, Some(high.unwrap_or(size))),
        };
        Some(Self { bound, low, high })
    }

    pub fn holds(&self, truth: f64) -> bool {
        self.low <= truth && self.high.is_none_or(|high| truth <= high)
    }
}

/// The memory at which a curve has at most so many misses a second, with its band: the first size if all have fewer, and the last if
/// all have more. `None` without a number of misses.
fn needed(curve: &MissRatioCurve, allowed: f64) -> Option<(f64, Band)> {
    let bytes = |size: PageCount| size.0 as f64 * PAGE_BYTES;
    let points = curve.points();
    let (first, last) = (points.first()?, points.last()?);
    first.misses?;
    let at = |of: fn(MissesPerSecond) -> f64| {
        let mut points = points.iter();
        points
            .find(|point| point.misses.is_some_and(|misses| of(misses) <= allowed))
            .map(|point| point.size)
    };
    let expected = at(|misses| misses.expected);
    let bound = match expected {
        None => WorkingSetBound::AtLeast,
        Some(size) if size == first.size => WorkingSetBound::AtMost,
        Some(_) => WorkingSetBound::Estimate,
    };
    let low = at(|misses| misses.low).unwrap_or(last.size);
    let band = Band {
        bound,
        low: if low == first.size { 0.0 } else { bytes(low) },
        high: at(|misses| misses.high).map(bytes),
    };
    Some((bytes(expected.unwrap_or(last.size)), band))
}

/// Pages touched in a second by a curve, in bytes: misses a second at a size are the rate at which pages come that were not touched for
/// as long as it takes to touch so many, so that the time for a size is the integral of their reciprocal. Up to the first size, at which the curve begins, they are taken to come evenly. `None` without a number of misses.
fn touched(curve: &MissRatioCurve) -> Option<f64> {
    let mut seconds = 0.0;
    let mut size = 0.0;
    let mut rate = curve.points().first()?.misses?.expected;
    for point in curve.points() {
        let next = point.size.0 as f64;
        let left = (1.0 - seconds) * rate;
        if next - size >= left {
            return Some((size + left) * PAGE_BYTES);
        }
        seconds += (next - size) / rate;
        size = next;
        rate = point.misses?.expected;
    }
    Some(size * PAGE_BYTES)
}

/// What one method showed of one program.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Shown {
    pub estimates: Vec<Estimate>,
    /// CPU time over that of the target.
    pub cost: Option<f64>,
    /// Smallest size of which its curve makes a claim.
    pub resolved_bytes: Option<f64>,
    /// Mean absolute error of its misses a second, as a share of those at the smallest size.
    pub curve_error: Option<f64>,
    /// Share of the process's frames that were mapped while it watched, and are not in the truth; of real programs.
    pub new_frames: Option<f64>,
    /// What it said instead.
    pub message: Option<String>,
}

impl Shown {
    /// Whether its curve makes a claim of more than a tenth of what the program touches in a second.
    pub fn resolves_much(&self) -> bool {
        let touched = self.estimates.iter().map(|one| one.touched.truth);
        let most = touched.fold(0.0, f64::max);
        self.resolved_bytes.is_some_and(|first| first < 0.9 * most)
    }
}

/// Of one program and seed: by method.
pub type Judged = BTreeMap<String, Shown>;

/// What is read from the guest's console.
#[derive(Debug)]
pub struct Reader {
    pub truth: Truth,
    pub judged: Judged,
    pub method: Option<String>,
    pub begun: Instant,
    /// The beginning of a line of JSON that was folded.
    pub folded: String,
    /// Methods that began since the process's frames were listed.
    pub since_list: Vec<String>,
}

impl Reader {
    pub fn new(truth: Truth) -> Self {
        Self {
            truth,
            judged: Judged::new(),
            method: None,
            begun: Instant::now(),
            folded: String::new(),
            since_list: Vec::new(),
        }
    }

    /// Takes a line.
    ///
    /// # Errors
    ///
    /// A list of frames that is none; all else that is malformed is not for this reader.
    pub fn take(&mut self, line: &str, at: Instant) -> anyhow::Result<()> {
        if line.starts_with("begin ") {
            self.folded.clear();
        }
        // The program prints beside a method.
        let is_of_program = line.starts_with("plimsoll: round ");
        if line.starts_with('{') || !(self.folded.is_empty() || is_of_program) {
            self.folded.push_str(line);
            if self.folded.ends_with('}')
                && serde_json::from_str::<serde_json::Value>(&self.folded).is_ok()
            {
                let whole = std::mem::take(&mut self.folded);
                return self.take_line(&whole, at);
            }
            return Ok(());
        }
        self.take_line(line, at)
    }

    fn take_line(&mut self, line: &str, at: Instant) -> anyhow::Result<()> {
        if self
            .truth
            .follow(line)
            .with_context(|| format!("'{line}'"))?
        {
            if line == "frames end" {
                let new = self.truth.new_frames();
                for method in self.since_list.drain(..) {
                    self.judged.entry(method).or_default().new_frames = new;
                }
            }
            return Ok(());
        }
        if let Some(method) = line.strip_prefix("begin ") {
            self.judged.entry(method.to_owned()).or_default();
            self.method = Some(method.to_owned());
            self.since_list.push(method.to_owned());
            self.truth.begin(method, at);
            self.begun = at;
            return Ok(());
        }
        let words: Vec<&str> = line.split(' ').collect();
        let method = match words.as_slice() {
            // Of several that are read at the same time.
            ["estimate" | "cost", of, ..] => Some(*of),
            _ => self.method.as_deref(),
        };
        let shown = method.and_then(|method| Some((method, self.judged.get_mut(method)?)));
        let Some((method, shown)) = shown else {
            return Ok(());
        };
        let seconds = at.saturating_duration_since(self.begun).as_secs_f64();
        let judged = |bytes, truth, band| Judgement { bytes, truth, band };
        match words.as_slice() {
            ["estimate", _, bytes] => {
                if let Ok(bytes) = bytes.parse() {
                    let truths = self.truth.at(method, at, None);
                    shown.estimates.push(Estimate {
                        seconds,
                        needed: judged(bytes, truths.needed, None),
                        touched: judged(bytes, truths.touched, None),
                        of_resolved: None,
                    });
                }
            }
            ["cost", _, own, target, _] => {
                if let (Ok(own), Ok(target)) = (own.parse::<f64>(), target.parse::<f64>()) {
                    shown.cost = Some(own / target);
                }
            }
            _ if line.starts_with('{') => match TracerLine::read(line.as_bytes()) {
                Ok(TracerLine::Period(period)) => {
                    let curve = period.curve.as_ref().and_then(Option::as_ref);
                    let curve = curve.and_then(|curve| curve.to_curve().ok());
                    let resolved = curve.as_ref().map(|curve| curve.points()[0].size);
                    // Also of a period without an estimate: truths are of the time since the last.
                    let truths = self.truth.at(method, at, resolved);
                    let of_curve = curve.as_ref().and_then(|curve| {
                        let allowed = Truths::allowed(truths.touched);
                        Some((needed(curve, allowed)?, touched(curve)?))
                    });
                    if let Some(((bytes, band), touched)) = of_curve {
                        let size = period.working_set_pages.zip(truths.of_resolved);
                        shown.estimates.push(Estimate {
                            seconds,
                            needed: judged(bytes, truths.needed, Some(band)),
                            touched: judged(touched, truths.touched, None),
                            of_resolved: size.map(|(pages, truth)| {
                                judged(pages as f64 * PAGE_BYTES, truth, Band::of(&period))
                            }),
                        });
                    }
                }
                Ok(TracerLine::Final(last)) => {
                    shown.cost = Some(last.overhead_ratio);
                    let curve = last.curve.as_ref().and_then(|curve| curve.to_curve().ok());
                    let first = curve.as_ref().and_then(|curve| curve.points().first());
                    if let (Some(curve), Some(first)) = (&curve, first) {
                        shown.resolved_bytes = Some(first.size.0 as f64 * PAGE_BYTES);
                        shown.curve_error = self.truth.curve_error(method, curve, at);
                    }
                }
                Err(error) => shown.message = Some(error.to_string()),
            },
            _ if line.starts_with("plimsoll") && line.contains("error") => {
                shown.message = Some(line.to_owned());
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_flow::{CurvePoint, PageSize};
    use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};

    use super::super::program::{Kind, MADE};
    use super::super::truth::{ClosedForm, Counted};
    use super::*;
    use crate::page_log::SharedFrames;

    #[test]
    fn estimates_are_compared_with_what_the_program_says_at_their_time() {
        let Kind::Made(program) = MADE[2].kind else {
            panic!()
        };
        let mut reader = Reader::new(Truth::Made(ClosedForm::new(program).unwrap()));
        let mib = |mib: u64| (mib << 20) as f64;
        for line in [
            "estimate mglru 1",
            "begin mglru",
            "plimsoll: round index=1 pages=8192 ops=900000 ms=100 total_ops=1 mismatches=0",
            "estimate mglru 33554432",
            "estimate rss 5",
            "estimate mglru nonsense",
            "plimsoll: round index=2 pages=24576 ops=100 ms=100 total_ops=1 mismatches=0",
            "estimate mglru 50331648",
            "cost mglru 0.5 10.0 12.0",
            "begin idle",
            "plimsoll: error: no such thing",
        ] {
            reader.take(line, Instant::now()).unwrap();
        }
        let shown = &reader.judged["mglru"];
        assert_eq!(shown.estimates.len(), 2);
        let [first, second] = shown.estimates[..] else {
            panic!()
        };
        assert_eq!(
            (first.needed.truth, first.touched.truth),
            (mib(32), mib(32))
        );
        assert_eq!(first.needed.error(), 0.0);
        assert_eq!(
            (second.needed.truth, second.touched.truth),
            (mib(96), 1000.0 * PAGE_BYTES)
        );
        assert_eq!(shown.cost, Some(0.05));
        let idle = &reader.judged["idle"];
        assert!(idle.message.as_ref().unwrap().contains("no such thing"));
    }

    /// Of pages of which each is touched once a second, at random: so many misses a second at each size.
    fn at_random(pages: u64, sizes: impl Iterator<Item = u64>) -> MissRatioCurve {
        let points = sizes.map(|size| {
            let ratio = 1.0 - size as f64 / pages as f64;
            let misses = ratio * pages as f64;
            CurvePoint {
                misses: Some(MissesPerSecond {
                    expected: misses,
                    low: misses * 0.8,
                    high: misses * 1.2,
                }),
                ..CurvePoint::exact(PageCount(size), ratio)
            }
        });
        MissRatioCurve::new(points.collect(), 1).unwrap()
    }

    #[test]
    fn what_a_curve_needs_and_what_is_touched_follow_from_its_misses_a_second() {
        let pages = |bytes: f64| bytes / PAGE_BYTES;
        let curve = at_random(10_000, (100..=10_000).step_by(10));
        let (bytes, band) = needed(&curve, 1000.0).unwrap();
        assert_eq!(pages(bytes), 9000.0);
        assert_eq!(band.bound, WorkingSetBound::Estimate);
        assert_eq!(pages(band.low), 8750.0);
        assert_eq!(band.high.map(pages), Some(9170.0));
        let share = pages(touched(&curve).unwrap()) / 10_000.0;
        assert!((share - (1.0 - (-1.0_f64).exp())).abs() < 0.001, "{share}");
        // All that it resolves has fewer misses, or more.
        let end = at_random(10_000, (9500..=9900).step_by(100));
        let (bytes, band) = needed(&end, 1000.0).unwrap();
        assert_eq!(
            (pages(bytes), band.bound),
            (9500.0, WorkingSetBound::AtMost)
        );
        assert_eq!((band.low, band.high.map(pages)), (0.0, Some(9500.0)));
        let (bytes, band) = needed(&end, 50.0).unwrap();
        assert_eq!(
            (pages(bytes), band.bound),
            (9900.0, WorkingSetBound::AtLeast)
        );
        assert_eq!((pages(band.low), band.high), (9900.0, None));
        // Less than the first size is touched in a second.
        let start = at_random(10_000, 9000..9001);
        assert_eq!(
            touched(&start).map(|bytes| pages(bytes).round()),
            Some(1000.0)
        );
        assert!(
            needed(
                &MissRatioCurve::new(vec![CurvePoint::exact(PageCount(1), 0.5)], 1).unwrap(),
                1.0
            )
            .is_none()
        );
    }

    #[test]
    fn a_period_of_a_curve_is_judged_by_it_though_the_program_prints_beside_it() {
        let Kind::Made(program) = MADE[3].kind else {
            panic!()
        };
        let mut closed = ClosedForm::new(program).unwrap();
        let pages = closed.pages;
        closed.rate = pages as f64;
        let curve = at_random(pages, (pages / 100..pages).step_by(100));
        let curve = CurveJson::new("judged", PageSize::FOUR_KIB, None, &curve);
        let period = serde_json::json!({
            "schema": SCHEMA, "vm": "judged", "method": "idle", "page_bytes": 4096, "period": 0, "seconds": 5.0, "window_seconds": 5.0,
            "working_set_pages": pages * 95 / 100, "working_set_bound": "estimate", "working_set_low_pages": null,
            "working_set_high_pages": null, "tracking_rate": 0.5, "populated_pages": pages, "tracked_pages": 100, "distinct_pages": 100,
            "traps": 0, "write_traps": 0, "stray_traps": 0, "rearmed_pages": 0, "trap_seconds": 0.0, "rearm_seconds": 0.0,
            "collect_seconds": 0.0, "overhead_ratio": 0.01, "budget_ran_out": false, "lost": 0, "first_touches_unseen": 0,
            "curve": curve,
        });
        let text = period.to_string();
        let (one, other) = text.split_at(100);
        let mut reader = Reader::new(Truth::Made(closed));
        let round = format!(
            "plimsoll: round index=2 pages={pages} ops={pages} ms=1000 total_ops=1 mismatches=0"
        );
        for line in ["begin idle", one, &round, other] {
            reader.take(line, Instant::now()).unwrap();
        }
        let [estimate] = reader.judged["idle"].estimates[..] else {
            panic!("{:?}", reader.judged)
        };
        assert!(
            estimate.needed.error() < 0.01 && estimate.touched.error() < 0.01,
            "{estimate:?}"
        );
        let of_resolved = estimate.of_resolved.unwrap();
        assert!(of_resolved.error() < 0.01, "{of_resolved:?}");
    }

    #[test]
    fn a_band_and_a_bound_hold_what_they_do_not_exclude() {
        let holds = |bound, low, high| Band { bound, low, high }.holds(20.0);
        assert!(!holds(WorkingSetBound::Estimate, 9.0, Some(11.0)));
        assert!(holds(WorkingSetBound::Estimate, 9.0, Some(21.0)));
        assert!(holds(WorkingSetBound::AtLeast, 9.0, None));
        assert!(!holds(WorkingSetBound::AtMost, 0.0, Some(19.0)));
    }

    #[test]
    fn frames_that_were_mapped_while_methods_watched_are_counted_for_each_of_them() {
        let counted = Counted::new(SharedFrames::default(), PageCount(100));
        let mut reader = Reader::new(Truth::Real(counted));
        for line in [
            "frames 0+4 5+4",
            "frames end",
            "begin rss",
            "begin cgroup",
            "estimate rss 4096",
            "frames 1+8",
            "frames end",
            "begin idle",
        ] {
            reader.take(line, Instant::now()).unwrap();
        }
        let new = |method: &str| reader.judged[method].new_frames;
        assert_eq!(
            [new("rss"), new("cgroup"), new("idle")],
            [Some(0.125), Some(0.125), None]
        );
        assert_eq!(reader.judged["rss"].estimates.len(), 1);
        assert!(reader.take("frames 99+9", Instant::now()).is_err());
    }
}
