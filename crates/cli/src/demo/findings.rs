//! What follows from a run: how near the tracer came to the truth, and what it took.
//!
//! Truths past the hot set. A tracer sees the references that miss a queue of h = hot set x T pages, and T
//! changes from period to period. Over a run, the share of those that an LRU memory of c pages misses is
//!
//! ```text
//!     Zipf:   mean of m(c) / f(h) over the periods, by their length; for c above the largest h
//!     steps:  time at which the scanned size was above c / time at which it was above h
//! ```
//!
//! with m the closed form of LRU and f that of a queue (`lab::curves`). A cyclic scan larger than a
//! queue misses at every visit, a smaller one never; the few visits of a step's first pass
//! reach further back and are left out of account.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use plimsoll_flow::{
    CurveDistance, CurvePoint, MissRatioCurve, PageCount, WorkingSet, WorkingSetBound,
};

use plimsoll_trap::PeriodReport;

use crate::attach::size;
use crate::experiment::{Judged, Observed, Traced, judge};
use crate::observe::even_sizes;
use crate::plot::grouped;

use super::recording::{Recording, Watched};

/// Largest error of a working set that counts as found.
const TOLERANCE: f64 = 0.05;

/// Figures of a run.
#[derive(Debug)]
pub(super) struct Findings {
    /// Pages that the guests found wrong.
    pub mismatches: u64,
    /// Of the stepping guest.
    pub steps: OfGuest,
    /// Of the one with references of a known law.
    pub zipf: OfGuest,
    /// The stepping guest's working sets against the truth.
    pub working_sets: Accuracy,
    /// All of it as a table: what is told, of the stepping guest, of the other.
    pub rows: Vec<[String; 3]>,
}

/// Figures of a guest.
#[derive(Debug)]
pub(super) struct OfGuest {
    /// What tracing took, as its tracer accounts for it.
    pub overhead: Spread,
    /// Sizes up to here are hidden by the hot set in some period.
    pub hidden: PageCount,
    /// The curve of all periods; `None` if no page was used twice.
    pub curve: Option<AgainstTruth>,
    /// The guest's own speed, if it was left alone before and after.
    pub speed: Option<Speed>,
}

/// A traced curve and what it should be.
#[derive(Debug)]
pub(super) struct AgainstTruth {
    /// As traced.
    pub found: MissRatioCurve,
    /// Closed form past the hidden sizes; `None` if those are all there are.
    pub truth: Option<MissRatioCurve>,
    /// How far apart the two lie past the hidden sizes.
    pub distance: Option<CurveDistance>,
}

/// A share with its range over the periods.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Spread {
    /// Over all periods, by their length.
    pub mean: f64,
    /// Of the lowest period.
    pub low: f64,
    /// Of the highest.
    pub high: f64,
}

/// Visits a second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Speed {
    /// Left alone, before tracing.
    pub before: f64,
    /// Traced.
    pub traced: f64,
    /// Left alone, after tracing.
    pub after: f64,
}

impl Speed {
    /// How much slower the guest was while traced; negative if it was faster.
    pub fn slowdown(self) -> f64 {
        1.0 - self.traced / f64::midpoint(self.before, self.after)
    }

    /// How far apart the two stretches left alone lie: what the host's other work alone gives.
    pub fn noise(self) -> f64 {
        (self.before - self.after).abs() / f64::midpoint(self.before, self.after)
    }
}

/// Working sets against the truth, over periods that lie whole within a step.
#[derive(Debug, Default)]
pub(super) struct Accuracy {
    /// How many periods.
    pub periods: usize,
    /// How many of them within 5 % of the truth.
    pub good: usize,
    /// How many were the first after a change.
    pub firsts: usize,
    /// How many of these within 5 %.
    pub firsts_good: usize,
    /// Mean and largest absolute relative error of those that found an estimate.
    pub errors: Option<(f64, f64)>,
}

impl Accuracy {
    fn of(judged: &[Judged]) -> Self {
        let good = |period: &&Judged| period.error().is_some_and(|e| e.abs() <= TOLERANCE);
        // The first period of all follows no change that the tracer could have seen.
        let firsts = || judged.iter().skip(1).filter(|period| period.first);
        let errors: Vec<f64> = judged
            .iter()
            .filter_map(Judged::error)
            .map(f64::abs)
            .collect();
        Self {
            periods: judged.len(),
            good: judged.iter().filter(good).count(),
            firsts: firsts().count(),
            firsts_good: firsts().filter(good).count(),
            errors: (!errors.is_empty()).then(|| {
                let largest = errors.iter().copied().fold(0.0, f64::max);
                (errors.iter().sum::<f64>() / errors.len() as f64, largest)
            }),
        }
    }
}

impl Findings {
    /// Works out the figures of a run.
    pub fn of(recording: &Recording) -> Self {
        let (steps, zipf) = (&recording.steps, &recording.zipf);
        let judged = judge(&steps.observed.periods, &steps.console.steps());
        let mut findings = Self {
            mismatches: steps.console.mismatches() + zipf.console.mismatches(),
            steps: OfGuest::of(recording, steps, truth_of_steps),
            zipf: OfGuest::of(recording, zipf, truth_of_law),
            working_sets: Accuracy::of(&judged),
            rows: Vec::new(),
        };
        findings.rows = findings.table(recording);
        findings
    }

    /// The table in columns for a terminal.
    pub fn text(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or_default()
        };
        let (first, second) = (width(0), width(1));
        let line = |row: &[String; 3]| {
            let [what, steps, zipf] = row;
            format!("  {what:<first$}  {steps:<second$}  {zipf}\n")
        };
        self.rows.iter().map(line).collect()
    }

    fn table(&self, recording: &Recording) -> Vec<[String; 3]> {
        let both = |what: &str, text: &dyn Fn(&Watched, &OfGuest) -> String| {
            [
                what.to_owned(),
                text(&recording.steps, &self.steps),
                text(&recording.zipf, &self.zipf),
            ]
        };
        let sets = &self.working_sets;
        let only_steps = |what: &str, text: String| [what.to_owned(), text, "–".to_owned()];
        vec![
            both("VM", &|guest, _| guest.vm.to_string()),
            both("RAM", &|guest, _| size(PageCount(guest.ram_bytes / 4096))),
            both("Periods traced", &|guest, _| {
                guest.observed.periods.len().to_string()
            }),
            both("References recorded", &|guest, _| {
                grouped(sum(&guest.observed, |traced| traced.period.report.traps) as f64)
            }),
            both("One page watched in", &|guest, _| {
                let scales = scales(&guest.observed);
                match (scales.first(), scales.last()) {
                    (Some(low), Some(high)) if low == high => low.to_string(),
                    (Some(low), Some(high)) => format!("{low} to {high}"),
                    _ => "–".to_owned(),
                }
            }),
            only_steps(
                "Working set within 5 % of the truth",
                format!("{} of {} periods", sets.good, sets.periods),
            ),
            only_steps(
                "  of these, first after a change",
                format!("{} of {}", sets.firsts_good, sets.firsts),
            ),
            only_steps(
                "  mean error, largest",
                sets.errors.map_or_else(
                    || "–".to_owned(),
                    |(mean, largest)| format!("{:.2} %, {:.2} %", mean * 100.0, largest * 100.0),
                ),
            ),
            both("Curve against closed form, mean error", &|_, figures| {
                let distance = figures.curve.as_ref().and_then(|curve| curve.distance);
                distance.map_or_else(
                    || "–".to_owned(),
                    |distance| format!("{:.4}", distance.mean_absolute_error),
                )
            }),
            both("  largest error, at", &|_, figures| {
                let distance = figures.curve.as_ref().and_then(|curve| curve.distance);
                distance.map_or_else(
                    || "–".to_owned(),
                    |distance| {
                        let at = size(distance.max_at);
                        format!("{:.4}, {at}", distance.max_absolute_error)
                    },
                )
            }),
            both("Overhead by the tracer's account", &|_, figures| {
                let Spread { mean, low, high } = figures.overhead;
                format!(
                    "{:.2} % ({:.2} to {:.2} %)",
                    mean * 100.0,
                    low * 100.0,
                    high * 100.0
                )
            }),
            both(
                "Guest slower while traced, by its own clock",
                &|_, figures| percent(figures.speed.map(Speed::slowdown)),
            ),
            both("  two stretches left alone differ by", &|_, figures| {
                percent(figures.speed.map(Speed::noise))
            }),
            both("References lost", &|guest, _| {
                sum(&guest.observed, |traced| traced.period.report.losses.lost()).to_string()
            }),
            both("Pages verified by the guest", &|guest, _| {
                let (visits, _) = guest.console.visits(recording.begin, recording.end);
                let audit = if guest.console.is_done() {
                    " and an audit of all"
                } else {
                    ""
                };
                grouped(visits as f64) + audit
            }),
            both("  found wrong", &|guest, _| {
                guest.console.mismatches().to_string()
            }),
        ]
    }
}

impl OfGuest {
    fn of(
        recording: &Recording,
        guest: &Watched,
        truth: impl Fn(&Recording, &MissRatioCurve, PageCount) -> Option<MissRatioCurve>,
    ) -> Self {
        let periods = guest.observed.periods.iter();
        let hidden = periods.map(|traced| hidden_by(&traced.period.report)).max();
        let hidden = hidden.unwrap_or_default();
        let curve = guest.observed.curves.as_ref().map(|curves| {
            let found = curves.lru.clone();
            let truth = truth(recording, &found, hidden);
            let last = truth.as_ref().and_then(|truth| truth.points().last());
            let distance = truth
                .as_ref()
                .zip(last)
                .and_then(|(truth, last)| found.distance(truth, even_sizes(hidden, last.size)));
            AgainstTruth {
                found,
                truth,
                distance,
            }
        });
        Self {
            overhead: overhead(&guest.observed),
            hidden,
            curve,
            speed: speed(recording, guest),
        }
    }
}

/// A share for a reader.
fn percent(share: Option<f64>) -> String {
    share.map_or_else(
        || "–".to_owned(),
        |share| format!("{:.1} %", share * 100.0).replace('-', "\u{2212}"),
    )
}

/// Pages that a period's hot set stood for.
fn hidden_by(report: &PeriodReport) -> PageCount {
    PageCount(u64::from(report.hot_set_pages) * u64::from(report.scale))
}

/// The tracking rates of a run, each once, rising in T.
fn scales(observed: &Observed) -> Vec<u32> {
    let scales = observed
        .periods
        .iter()
        .map(|traced| traced.period.report.scale);
    let mut scales: Vec<_> = scales.collect();
    scales.sort_unstable();
    scales.dedup();
    scales
}

fn sum(observed: &Observed, of: impl Fn(&Traced) -> u64) -> u64 {
    observed.periods.iter().map(of).sum()
}

fn overhead(observed: &Observed) -> Spread {
    let reports = || observed.periods.iter().map(|traced| &traced.period.report);
    let length: f64 = reports().map(|report| report.length.as_secs_f64()).sum();
    let taken: f64 = reports()
        .map(|report| report.overhead_ratio * report.length.as_secs_f64())
        .sum();
    if length == 0.0 {
        return Spread::default();
    }
    Spread {
        mean: taken / length,
        low: reports()
            .map(|report| report.overhead_ratio)
            .fold(1.0, f64::min),
        high: reports()
            .map(|report| report.overhead_ratio)
            .fold(0.0, f64::max),
    }
}

/// The guest's speed at the size it had while it was left alone.
fn speed(recording: &Recording, guest: &Watched) -> Option<Speed> {
    let (from, to) = recording.traced;
    let pages = guest.console.rounds(recording.begin, from).next()?.pages;
    let between = |from: Instant, to: Instant| {
        let rounds = guest.console.rounds(from, to);
        let (visits, seconds) = rounds.filter(|round| round.pages == pages).fold(
            (0, 0.0),
            |(visits, seconds), round| {
                let took = (round.end - round.start).as_secs_f64();
                (visits + round.visits, seconds + took)
            },
        );
        (seconds > 0.0).then(|| visits as f64 / seconds)
    };
    Some(Speed {
        before: between(recording.begin, from)?,
        traced: between(from, to)?,
        after: between(to, recording.end)?,
    })
}

/// The closed form for references of a known law; see the head of this file.
fn truth_of_law(
    recording: &Recording,
    found: &MissRatioCurve,
    hidden: PageCount,
) -> Option<MissRatioCurve> {
    let pages = recording.law_pages;
    let mut seconds_by_queue = BTreeMap::new();
    for traced in &recording.zipf.observed.periods {
        let report = &traced.period.report;
        *seconds_by_queue.entry(hidden_by(report)).or_insert(0.0) += report.length.as_secs_f64();
    }
    // The curve is the mean over the periods of m(c) / f(h), each by its length.
    let seconds: f64 = seconds_by_queue.values().sum();
    let per_miss: f64 = seconds_by_queue
        .iter()
        .map(|(&queue, seconds)| seconds / recording.law.queue_miss_ratio(pages, queue))
        .sum::<f64>()
        / seconds;
    if hidden >= pages || !per_miss.is_finite() {
        return None;
    }
    let lru = recording.law.lru_curve(pages).ok()?;
    let points = even_sizes(hidden, pages)
        .chain([pages])
        .map(|size| CurvePoint::exact(size, (lru.miss_ratio(size) * per_miss).min(1.0)));
    curve_of(points, found.references())
}

/// The closed form for a scan of known sizes; see the head of this file.
fn truth_of_steps(
    recording: &Recording,
    found: &MissRatioCurve,
    hidden: PageCount,
) -> Option<MissRatioCurve> {
    let guest = &recording.steps;
    let mut time_by_pages = BTreeMap::new();
    for traced in &guest.observed.periods {
        let queue = hidden_by(&traced.period.report);
        for round in guest.console.rounds(traced.start, traced.end) {
            if round.pages > queue {
                *time_by_pages.entry(round.pages).or_insert(Duration::ZERO) +=
                    round.end - round.start;
            }
        }
    }
    let all: Duration = time_by_pages.values().sum();
    let mut left = all;
    let first = CurvePoint::exact(PageCount(0), 1.0);
    let points = time_by_pages.into_iter().map(|(pages, time)| {
        left -= time;
        CurvePoint::exact(pages, left.div_duration_f64(all))
    });
    let curve = curve_of([first].into_iter().chain(points), found.references())?;
    curve.points().last().filter(|last| last.size > hidden)?;
    Some(curve)
}

/// Makes a curve of points that rise in size, of which the last may be there twice.
fn curve_of(points: impl Iterator<Item = CurvePoint>, references: u64) -> Option<MissRatioCurve> {
    let mut points: Vec<_> = points.collect();
    points.dedup_by_key(|point| point.size);
    MissRatioCurve::new(points, references).ok()
}

/// How a period's working set stands to the truth of its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// An estimate, and the true size did not change.
    Steady,
    /// An estimate over a change of the true size.
    AcrossChange,
    /// Only a lower bound.
    AtLeast,
    /// Only an upper bound.
    AtMost,
}

/// Returns how a period's working set stands, with it; `None` if the VM was idle.
pub(super) fn standing(traced: &Traced, sizes_during: usize) -> Option<(Standing, WorkingSet)> {
    let set = traced.period.working_set?;
    let standing = match set.bound {
        WorkingSetBound::AtLeast => Standing::AtLeast,
        WorkingSetBound::AtMost => Standing::AtMost,
        WorkingSetBound::Estimate if sizes_during > 1 => Standing::AcrossChange,
        WorkingSetBound::Estimate => Standing::Steady,
    };
    Some((standing, set))
}

#[cfg(test)]
mod tests {
    use super::super::recording::made_up::{self, MIB};
    use super::*;

    #[test]
    fn a_run_that_found_every_size_counts_no_error() {
        let sizes = [(MIB * 64, MIB * 64), (MIB * 128, MIB * 128)];
        let findings = Findings::of(&made_up::recording(&sizes, 16));
        let sets = &findings.working_sets;
        assert_eq!((sets.periods, sets.good), (6, 6));
        assert_eq!((sets.firsts, sets.firsts_good), (1, 1));
        assert_eq!(sets.errors, Some((0.0, 0.0)));
        assert_eq!(findings.mismatches, 0);
    }

    #[test]
    fn a_size_that_is_a_tenth_off_is_not_found() {
        let sizes = [(MIB * 100, MIB * 110), (MIB * 50, MIB * 50)];
        let sets = Findings::of(&made_up::recording(&sizes, 16)).working_sets;
        assert_eq!((sets.periods, sets.good), (6, 3));
        let (mean, largest) = sets.errors.unwrap();
        assert!((mean - 0.05).abs() < 1e-9 && (largest - 0.1).abs() < 1e-9);
    }

    #[test]
    fn overhead_and_speed_are_those_of_the_run() {
        let sizes = [(MIB * 64, MIB * 64), (MIB * 128, MIB * 128)];
        let findings = Findings::of(&made_up::recording(&sizes, 16));
        let Spread { mean, low, high } = findings.zipf.overhead;
        assert!((mean - 0.01).abs() < 1e-12 && low == high);
        let speed = findings.zipf.speed.unwrap();
        assert!((speed.slowdown() - 0.1).abs() < 1e-9, "{speed:?}");
        assert!(speed.noise() < 1e-9);
    }

    #[test]
    fn the_truth_of_a_scan_falls_at_each_size_that_the_hot_set_does_not_hide() {
        let sizes = [
            (MIB * 32, MIB * 32),
            (MIB * 64, MIB * 64),
            (MIB * 96, MIB * 96),
        ];
        // A hot set of 64 pages at 1 in 128 stands for 32 MiB.
        let recording = made_up::recording(&sizes, 128);
        let found = MissRatioCurve::new(vec![CurvePoint::exact(PageCount(1), 1.0)], 7).unwrap();
        let truth = truth_of_steps(&recording, &found, PageCount(MIB * 32)).unwrap();
        let points: Vec<_> = truth
            .points()
            .iter()
            .map(|p| (p.size.0 / MIB, p.miss_ratio))
            .collect();
        assert_eq!(points, [(0, 1.0), (64, 0.5), (96, 0.0)]);
    }

    #[test]
    fn the_truth_of_a_law_is_lru_over_the_queue_weighed_by_time() {
        let recording = made_up::recording(&[(MIB * 64, MIB * 64)], 2);
        let (law, pages) = (recording.law, recording.law_pages);
        let found = MissRatioCurve::new(vec![CurvePoint::exact(PageCount(1), 1.0)], 7).unwrap();
        let truth = truth_of_law(&recording, &found, PageCount(128)).unwrap();
        let queue = law.queue_miss_ratio(pages, PageCount(128));
        let lru = law.lru_curve(pages).unwrap();
        let middle = truth.points()[truth.points().len() / 2];
        assert!((middle.miss_ratio - lru.miss_ratio(middle.size) / queue).abs() < 1e-9);
        assert_eq!(truth.miss_ratio(pages), 0.0);
        assert!(truth_of_law(&recording, &found, pages).is_none());
    }

    #[test]
    fn the_table_stands_in_columns() {
        let text = Findings::of(&made_up::recording(&[(MIB * 64, MIB * 64)], 16)).text();
        let lines: Vec<_> = text.lines().collect();
        let column = |line: &str, word: &str| {
            let at = line.find(word).unwrap();
            line[..at].chars().count()
        };
        let ram = lines.iter().find(|line| line.contains("RAM")).unwrap();
        assert_eq!(column(lines[0], "steps"), column(ram, "320 MiB"));
    }
}
