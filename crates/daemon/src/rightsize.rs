//! The right size of a VM over time: replay of the curves of its history at one size.
//!
//! For each curve there is a smallest size within the VM's bound. The right size is a percentile of these sizes. How far
//! it may be trusted is tested on the past: each day in turn is left out, the right size of the others computed, and
//! that day replayed with it. All curves have the same weight, because they are kept at equal intervals while a VM is observed.
//!
//! Not here: phases in which the VM was not observed.

use std::collections::BTreeMap;

use plimsoll_flow::{MissRatioCurve, PageCount, Whole as _};
use plimsoll_policy::{Rules, relative};

use crate::demand::Needs;
use crate::vm::pages;

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// What one curve needs.
#[derive(Debug, Clone, Copy)]
struct Need {
    day: u64,
    size: PageCount,
}

/// The right size, and what would have happened with it.
#[derive(Debug, PartialEq)]
pub struct Rightsize {
    /// Days with a curve.
    pub days: u64,
    /// The size.
    pub size: PageCount,
    /// Share of the days that the others predict; `None` below two days.
    pub confidence: Option<f64>,
    /// Share of the curves whose bound it keeps.
    pub kept_ratio: f64,
    /// The same on the worst day.
    pub kept_worst_day_ratio: f64,
    /// Geometric mean of the misses over those at the baseline, of the curves that resolve the size.
    pub relative: Option<f64>,
    /// Mean of the misses a second there and at the baseline, of the curves that have them.
    pub misses_per_second: Option<(f64, f64)>,
}

impl Rightsize {
    /// The right size by `curves` with their times, for a `percentile` above 0.0 to 1.0; `None` without curves.
    pub fn of(
        curves: &[(u64, MissRatioCurve)],
        needed: &Needs<'_>,
        percentile: f64,
    ) -> Option<Self> {
        let baseline = pages(needed.settings.baseline_bytes);
        let rules = Rules::new(baseline.max(PageCount(1)));
        let needs = curves.iter().map(|(unix_ms, curve)| Need {
            day: unix_ms / DAY_MS,
            size: needed.by(curve),
        });
        let needs: Vec<_> = needs.collect();
        let size = fits(needs.iter(), percentile)?;
        let mut by_day: BTreeMap<u64, Vec<Need>> = BTreeMap::new();
        for &need in &needs {
            by_day.entry(need.day).or_default().push(need);
        }
        let predicted = by_day.iter().filter(|&(day, own)| {
            let others = needs.iter().filter(|need| need.day != *day);
            fits(others, percentile).is_some_and(|size| kept(own, size) >= percentile)
        });
        let days = by_day.len();
        let confidence = (days > 1).then(|| predicted.count() as f64 / days as f64);
        let logs = curves.iter().filter_map(|(_, curve)| {
            let relative = relative(curve, baseline, size, &rules)?;
            Some(relative.expected.ln())
        });
        let logs: Vec<_> = logs.collect();
        let mean_log = logs.iter().sum::<f64>() / logs.len() as f64;
        let misses = curves.iter().filter_map(|(_, curve)| {
            let at = |size| Some(curve.misses_per_second(size)?.expected);
            Some((at(size)?, at(baseline)?))
        });
        let misses: Vec<_> = misses.collect();
        let count = misses.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| misses.iter().map(of).sum::<f64>() / count;
        Some(Self {
            days: days as u64,
            size,
            confidence,
            kept_ratio: kept(&needs, size),
            kept_worst_day_ratio: by_day
                .values()
                .map(|own| kept(own, size))
                .fold(1.0, f64::min),
            relative: (!logs.is_empty()).then(|| mean_log.exp()),
            misses_per_second: (!misses.is_empty()).then(|| (mean(|at| at.0), mean(|at| at.1))),
        })
    }
}

/// The smallest size that suffices for a share of `needs`; `None` if there are none.
fn fits<'a>(needs: impl Iterator<Item = &'a Need>, percentile: f64) -> Option<PageCount> {
    let mut sizes: Vec<_> = needs.map(|need| need.size).collect();
    sizes.sort_unstable();
    let rank = usize::whole((percentile * sizes.len() as f64).ceil());
    sizes.get(rank.max(1) - 1).copied()
}

/// Share of `needs` for which a size suffices.
fn kept(needs: &[Need], size: PageCount) -> f64 {
    let enough = needs.iter().filter(|need| need.size <= size).count();
    enough as f64 / needs.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{History, TurnRecord};
    use plimsoll_flow::{CurvePoint, PageSize};
    use plimsoll_protocol::curve_json::CurveJson;
    use plimsoll_protocol::vm::{MissCost, Sample, Settings};

    const MIB: u64 = 256;
    const SETTINGS: &str = r#"{"min_bytes":0,"max_bytes":1073741824,"baseline_bytes":536870912,"shares":1,"max_loss":0.05,"managed":true}"#;

    fn settings() -> Settings {
        serde_json::from_str(SETTINGS).unwrap()
    }

    fn needs(settings: &Settings, kept_bytes: u64) -> Needs<'_> {
        Needs {
            settings,
            cost: MissCost::default(),
            kept_bytes,
        }
    }

    fn sample(unix_ms: u64) -> Sample {
        Sample {
            unix_ms,
            direct_bytes: 1,
            ..Sample::default()
        }
    }

    /// A loop over so many MiB.
    fn curve(mib: u64) -> MissRatioCurve {
        let points = [(1, 0.9), (mib * MIB, 0.1)];
        let points = points.map(|(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
        MissRatioCurve::new(points.to_vec(), 1000).unwrap()
    }

    /// Days of 144 curves; the last `peaks` of each need 400 MiB, the others 100.
    fn days(peaks: &[u64]) -> Vec<(u64, MissRatioCurve)> {
        let days = (0..).zip(peaks);
        days.flat_map(|(day, &peaks)| {
            (0..144).map(move |at| {
                let mib = if at >= 144 - peaks { 400 } else { 100 };
                (day * DAY_MS + at * 600_000, curve(mib))
            })
        })
        .collect()
    }

    fn of(peaks: &[u64], percentile: f64) -> Rightsize {
        Rightsize::of(&days(peaks), &needs(&settings(), 0), percentile).unwrap()
    }

    #[test]
    fn a_short_peak_is_left_out_and_a_longer_one_is_not() {
        // 7 of 144 are 4.9 %.
        let found = of(&[7; 14], 0.95);
        assert_eq!((found.size.0, found.days), (100 * MIB, 14));
        assert_eq!(found.confidence, Some(1.0));
        assert!((found.kept_ratio - 137.0 / 144.0).abs() < 1e-9);
        // In the peaks it misses nine times as much: 0.9 for 0.1.
        assert!((found.relative.unwrap().ln() - 9_f64.ln() * 7.0 / 144.0).abs() < 1e-9);
        assert_eq!(of(&[8; 14], 0.95).size.0, 400 * MIB);
        assert_eq!(of(&[8; 14], 0.95).kept_ratio, 1.0);
        assert_eq!(of(&[1; 14], 1.0).size.0, 400 * MIB);
    }

    #[test]
    fn a_size_that_the_guest_cannot_give_up_is_never_right() {
        let (curves, settings) = (days(&[0; 2]), settings());
        let found = Rightsize::of(&curves, &needs(&settings, 300 << 20), 0.95).unwrap();
        assert_eq!((found.size.0, found.kept_ratio), (300 * MIB, 1.0));
    }

    #[test]
    fn the_curves_of_a_history_are_replayed() {
        let history = History::nowhere();
        let found = |since_ms| {
            let curves = history.curves("web", since_ms).into_iter();
            let curves = curves.map(|(made, curve)| (made, curve.to_curve().unwrap()));
            Rightsize::of(&curves.collect::<Vec<_>>(), &needs(&settings(), 0), 0.9)
        };
        // On the second of three days it needs more, for half of the day.
        for at in 0..3 * 288_u64 {
            let is_peak = (288 + 144..288 * 2).contains(&at);
            let curve = curve(if is_peak { 400 } else { 100 });
            let curve = CurveJson::new("web", PageSize::FOUR_KIB, None, &curve);
            let unix_ms = 100 * DAY_MS + at * 300_000;
            history.record_turn(&[TurnRecord {
                vm: "web",
                sample: sample(unix_ms),
                heat: None,
                curve: Some(&curve),
            }]);
        }
        let all = found(0).unwrap();
        assert_eq!((all.days, all.size.0), (3, 400 * MIB));
        // The other two days need less than the second.
        assert!((all.confidence.unwrap() - 2.0 / 3.0).abs() < 1e-9);
        let last = found(102 * DAY_MS).unwrap();
        assert_eq!((last.days, last.size.0), (1, 100 * MIB));
        assert!(found(103 * DAY_MS).is_none());
    }

    #[test]
    fn a_day_unlike_the_others_lowers_the_confidence() {
        let mut peaks = [0; 20];
        peaks[13] = 72;
        let found = of(&peaks, 0.95);
        assert_eq!(found.size.0, 100 * MIB);
        assert_eq!(found.confidence, Some(0.95));
        assert!((found.kept_worst_day_ratio - 0.5).abs() < 1e-9);
        assert_eq!(of(&[0], 0.95).confidence, None);
        assert!(Rightsize::of(&[], &needs(&settings(), 0), 0.95).is_none());
    }
}
