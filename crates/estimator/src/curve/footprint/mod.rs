//! Average footprint: the mean number of distinct pages touched by a window of a given length.
//!
//! A page is missing from a window exactly when the window lies inside one of the page's *gaps*:
//! from the start to its first touch, from one touch to the next (its reuse times), from its last touch to
//! the end. A gap of `g` ticks holds `g - w` windows of length `w`. So over all windows of a
//! stream of `n` ticks and `m` pages,
//!
//! ```text
//!     fp(w)  =  m  -  sum over all gaps of max(g - w, 0) / (n - w + 1)
//! ```
//!
//! exactly. A memory of `c` pages contains about the pages touched in the last `w` ticks, with `fp(w) = c`; it misses
//! pages not touched within them. That share of references is the slope of fp at `w`, apart from the windows at the two
//! ends of the stream ([Denning68]'s working sets, [DS78] for the slope; [Xiang13] for finite streams). Here it is
//! counted instead of differentiated: references with reuse times above `w`, including first references, which miss at
//! every size as everywhere in this crate.
//!
//! **Scans.** If accessed pages are only checked periodically, a reuse time is known to lie between two
//! bounds. Taking all gaps at their longest gives a lower bound of fp and an upper bound of the
//! share above `w`; taking all at their shortest gives the opposite bounds. The curve's band
//! follows from both. The estimate takes the middle of each gap, for which fp at whole
//! intervals is the average over aligned windows, and is unbiased if scans and touches are not synchronised.
//!
//! Source: [Xiang13] §2 for the formula, [Denning68] and [DS78]. Departs in counting first references, and
//! in bounding censored times; those from 2048 ticks on are stored to 1/1024 (`histogram`).
//! Cost: O(1) and one cache miss per touch; a table entry per page. O(log) for fp at a window.
//! Not here: scanning itself and its schedule. The model's own error is that of `aet`: below 0.01 for mixed references.

mod average;
mod gaps;

pub use average::AverageWindow;
pub use gaps::Footprint;

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use crate::curve::shards::witness::{ExactCounts, Witness};
use crate::estimator::Estimator;
use crate::parts::last_use::LastUse;

/// Why times were not accepted, or no average could be computed. Times accepted before remain.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FootprintError {
    /// The interval between the bounds is empty.
    #[error("no time lies above {lo} and up to {hi} ticks")]
    NoTime {
        /// The time is above this.
        lo: u64,
        /// The time is at most this.
        hi: u64,
    },
    /// The numbers of first and last touches differ.
    #[error("{firsts} first touches and {lasts} last ones are not those of the same pages")]
    Unpaired {
        /// First touches recorded.
        firsts: u64,
        /// Last touches recorded.
        lasts: u64,
    },
    /// No page was touched, or no time passed.
    #[error("nothing was touched, so there is no footprint")]
    Empty,
}

/// A number of pages with bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FootprintPoint {
    /// Lower bound, in pages.
    pub low: f64,
    /// Estimate, in pages.
    pub pages: f64,
    /// Upper bound, in pages.
    pub high: f64,
}

/// The average footprint of a whole stream whose reuse times are all known.
///
/// The miss ratio is the model's; the band also contains that of a small exact sample of the pages
/// (`witness`), so that it covers the model's error.
#[derive(Debug, Clone)]
pub struct AverageFootprint {
    /// Without the last gaps, which change with every reference.
    footprint: Footprint,
    last_use: LastUse,
    references: u64,
    /// Reuse times of the current block of references; a work buffer.
    piece: Vec<u32>,
    witness: Witness,
}

/// Number of references looked up as a block, so that their reuse times fit into a core's first-level cache.
const PIECE: usize = 4096;

/// Selects the pages that the witness follows; arbitrary, but constant.
const WITNESS_SEED: u64 = 0x666f_6f74;

impl AverageFootprint {
    /// Returns an estimator without observations.
    pub fn new() -> Self {
        Self {
            footprint: Footprint::new(),
            last_use: LastUse::new(),
            references: 0,
            piece: Vec::new(),
            witness: Witness::new(WITNESS_SEED),
        }
    }

    /// Averages over all windows of the stream so far; a tick is a reference.
    ///
    /// # Errors
    ///
    /// [`FootprintError::Empty`] if nothing was observed.
    pub fn average(&self) -> Result<AverageWindow, FootprintError> {
        let mut footprint = self.footprint.clone();
        footprint.reuses.known.settle();
        for time in self.last_use.times() {
            let since = self.references - 1 - time;
            footprint.record_last(since, since + 1)?;
        }
        footprint.over(self.references)
    }
}

impl Default for AverageFootprint {
    fn default() -> Self {
        Self::new()
    }
}

impl Estimator for AverageFootprint {
    fn observe(&mut self, pages: &[PageNumber]) {
        let Footprint { firsts, reuses, .. } = &mut self.footprint;
        for pages in pages.chunks(PIECE) {
            let others = |now, time: Option<u64>| match time {
                Some(time) => reuses.known.record(time),
                None => {
                    firsts.known.record(now + 1);
                    firsts.count += 1;
                }
            };
            self.last_use
                .reuse_times(pages, self.references, &mut self.piece, others);
            reuses.known.record_batch(&self.piece);
            self.references += pages.len() as u64;
        }
        reuses.count = self.references - firsts.count;
        self.witness.observe(pages);
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let average = self.average().map_err(|_| CurveError::Empty)?;
        let certain = ExactCounts {
            first_references: self.footprint.pages().0,
            references: self.references,
        };
        certain.narrow(&self.witness.widen(&average.curve(None)?)?)
    }

    fn memory_bytes(&self) -> usize {
        self.footprint.memory_bytes()
            + self.last_use.memory_bytes()
            + self.piece.capacity() * size_of::<u32>()
            + self.witness.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::aet::Aet;
    use crate::curve::lru::ExactLru;
    use crate::parts::naive;
    use crate::parts::streams::{batch_of, curve_of, cycle, uniform, zipf};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn averaged(pages: &[u64]) -> AverageFootprint {
        let mut average = AverageFootprint::new();
        average.observe(&batch_of(pages.iter().copied()));
        average
    }

    /// The model's curve, without a witness.
    fn model(pages: &[u64]) -> MissRatioCurve {
        averaged(pages).average().unwrap().curve(None).unwrap()
    }

    /// The footprint of scans after every `interval` references, with one tick per reference; an incomplete last
    /// interval is left out.
    fn scanned(pages: &[u64], interval: usize) -> AverageWindow {
        let ticks = interval as u64;
        let mut footprint = Footprint::new();
        let mut last_scan = BTreeMap::new();
        let mut now = 0;
        for pages in pages.chunks_exact(interval) {
            now += 1;
            for &page in pages {
                match last_scan.insert(page, now) {
                    None => footprint.record_first((now - 1) * ticks, now * ticks),
                    Some(before) if before == now => Ok(()),
                    Some(before) => {
                        let gap = now - before;
                        footprint.record((gap - 1) * ticks, (gap + 1) * ticks - 1)
                    }
                }
                .unwrap();
            }
        }
        for scan in last_scan.into_values() {
            let since = now - scan;
            footprint
                .record_last(since * ticks, (since + 1) * ticks)
                .unwrap();
        }
        footprint.over(now * ticks).unwrap()
    }

    fn error(found: &MissRatioCurve, exact: &MissRatioCurve, from: u64, to: u64) -> f64 {
        let sizes = (0..200).map(|step| PageCount(from + (to - from) * step / 200));
        let distance = found.distance(exact, sizes).unwrap();
        distance.mean_absolute_error
    }

    /// The curve by its definition: references not repeated within the longest window with at most `size` pages.
    fn naive_miss_ratio(pages: &[u64], size: u64) -> f64 {
        let fits = |&window: &usize| {
            let (sum, windows) = naive::window_pages(pages, window);
            sum as u64 <= size * windows as u64
        };
        let window = (0..=pages.len()).rev().find(fits).unwrap();
        let misses = (0..pages.len()).filter(|&now| {
            let from = now.saturating_sub(window);
            !pages[from..now].contains(&pages[now])
        });
        misses.count() as f64 / pages.len() as f64
    }

    #[test]
    fn a_loop_fits_at_its_size_and_not_a_page_below() {
        for pages in [1, 2, 100, 2_000, 5_003] {
            let stream: Vec<_> = cycle(pages).take(20 * pages as usize).collect();
            let curve = model(&stream);
            assert_eq!(curve.miss_ratio(PageCount(pages - 1)), 1.0);
            assert_eq!(curve.miss_ratio(PageCount(pages)), 0.05);
        }
    }

    #[test]
    fn streams_that_mix_are_right_to_a_hundredth_and_as_good_as_aet() {
        for seed in 0..5 {
            let streams: [Vec<u64>; 3] = [
                uniform(10_000, seed).take(300_000).collect(),
                zipf(10_000, 1.0, seed).take(300_000).collect(),
                zipf(20_000, 0.7, seed).take(200_000).collect(),
            ];
            for pages in streams {
                let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
                let aet = curve_of(&mut Aet::new(), pages.iter().copied());
                let found = error(&model(&pages), &exact, 0, 20_000);
                let aet = error(&aet, &exact, 0, 20_000);
                assert!(found <= 0.01, "seed {seed}: {found}");
                assert!(found <= aet + 0.002, "seed {seed}: {found} {aet}");
            }
        }
    }

    #[test]
    fn what_makes_no_footprint_is_refused() {
        let mut footprint = Footprint::new();
        assert_eq!(footprint.over(5).unwrap_err(), FootprintError::Empty);
        let refused = FootprintError::NoTime { lo: 3, hi: 3 };
        assert_eq!(footprint.record(3, 3), Err(refused));
        footprint.record_first(0, u64::MAX).unwrap();
        let unpaired = FootprintError::Unpaired {
            firsts: 1,
            lasts: 0,
        };
        assert_eq!(footprint.over(5).unwrap_err(), unpaired);
        footprint.record_last(0, u64::MAX).unwrap();
        assert_eq!(footprint.over(0).unwrap_err(), FootprintError::Empty);
        let average = footprint.over(5).unwrap();
        for window in [-1.0, 0.0, 3.5, 5.0, 1e300, f64::INFINITY] {
            let point = average.at(window);
            assert!(0.0 <= point.low && point.high <= 1.0, "{window} {point:?}");
        }
        assert!(average.curve(None).is_ok());
        assert_eq!(AverageFootprint::new().curve(), Err(CurveError::Empty));
    }

    #[test]
    fn streams_of_every_kind_make_a_curve_whatever_their_batches() {
        let up_and_down = (0..10).flat_map(|_| (0..700).chain((0..700).rev()));
        let phases = (0..6).flat_map(|phase| {
            uniform(500, phase)
                .take(3_000)
                .map(move |page| page << (10 * phase))
        });
        let streams: [Vec<u64>; 6] = [
            vec![0],
            vec![u64::MAX; 1_000],
            (0..5_000).map(|page| u64::MAX - page).collect(),
            up_and_down.collect(),
            phases.collect(),
            cycle(3_000).take(10_000).collect(),
        ];
        for pages in streams {
            let mut whole = averaged(&pages);
            let mut parts = AverageFootprint::new();
            for batch in pages.chunks(13) {
                parts.observe(&batch_of(batch.iter().copied()));
            }
            let curve = whole.curve().unwrap();
            assert_eq!(parts.curve().as_ref(), Ok(&curve));
            assert_eq!(curve.references(), pages.len() as u64);
            assert_eq!(curve.miss_ratio(PageCount(0)), 1.0);
            let distinct = whole.footprint.pages().0 as f64;
            assert_eq!(
                curve.miss_ratio(PageCount(u64::MAX)),
                distinct / pages.len() as f64
            );
        }
    }

    proptest! {
        #[test]
        fn every_window_agrees_with_counting_in_it(
            pages in prop_oneof![
                prop::collection::vec(0_u64..8, 1..60),
                prop::collection::vec(0_u64..80, 1..160),
            ],
        ) {
            let average = averaged(&pages).average().unwrap();
            for window in 0..=pages.len() {
                let (sum, windows) = naive::window_pages(&pages, window);
                let expected = sum as f64 / windows as f64;
                let point = average.at(window as f64);
                prop_assert_eq!([point.low, point.pages, point.high], [expected; 3]);
                let (last, _) = naive::window_pages(&pages[pages.len() - window..], window);
                prop_assert_eq!(average.working_set(window as f64).pages, last as f64);
            }
        }

        #[test]
        fn the_curve_agrees_with_its_words(
            pages in prop::collection::vec(0_u64..30, 1..120),
            size in 0_u64..40,
        ) {
            let found = model(&pages).miss_ratio(PageCount(size));
            let expected = naive_miss_ratio(&pages, size);
            prop_assert!((found - expected).abs() < 1e-12, "{} {}", found, expected);
        }

        #[test]
        fn the_bounds_of_scans_hold_the_footprint_of_every_window(
            pages in prop::collection::vec(0_u64..40, 20..400),
            interval in 2_usize..12,
        ) {
            let whole = pages.len() / interval * interval;
            let truth = averaged(&pages[..whole]).average().unwrap();
            let average = scanned(&pages, interval);
            for window in interval - 1..=whole {
                let (point, truth) = (average.at(window as f64), truth.at(window as f64).pages);
                prop_assert!(
                    point.low <= truth + 1e-9 && truth <= point.high + 1e-9,
                    "{} {:?} {}", window, point, truth
                );
            }
        }

        #[test]
        fn a_window_is_the_longest_with_so_many_pages(
            pages in prop::collection::vec(0_u64..30, 1..200),
            size in 0.0_f64..32.0,
        ) {
            let average = averaged(&pages).average().unwrap().middle;
            let window = average.window_of(size);
            prop_assert!(average.pages_in(window) <= size + 1e-9);
            if window < average.ticks {
                prop_assert!(average.pages_in(window + 1e-3) >= size - 1e-9);
            }
        }
    }
}
