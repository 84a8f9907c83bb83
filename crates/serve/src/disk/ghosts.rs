//! Miss ratios of a VM at other sizes, from a ghost list: the blocks it evicted, without their contents.
//!
//! The guest's memory of X pages lies in front, then the list in the order of evictions. A block that the guest
//! reads because it does not hold it, found at depth `d` of the list, would hit with X + d + 1 pages: as memory of
//! the guest, if that is in LRU order, or as an exclusive cache of d + 1 pages behind it (\[LS07\] §4.1). The
//! list does not depend on the present size of the cache, so one run predicts smaller and larger ones alike.
//!
//! Counts restart when X becomes known or changes (a balloon), when the list is made longer, and with another
//! guest, because a curve holds for one X. Otherwise they are those of the last minutes: after `WINDOW` they restart, or
//! later if few blocks were read again, and until half of the next window has passed, the last one counts.
//!
//! The error of the rate of reads is that of its mean over 8 to 16 blocks of the time of the window. It widens the band of misses
//! per second on both sides.
//!
//! Not here: written blocks. One that is overwritten or freed is removed from the list.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use plimsoll_disk::{Location, MachineStats, Observer};
use plimsoll_estimator::{BandParts, GhostError, GhostOptions, GuestGhosts, ratio_error};
use plimsoll_flow::{CurvePoint, MissRatioCurve, MissesPerSecond, PageCount, PageNumber, PageSize};
use plimsoll_protocol::curve_json::CurveJson;

use super::report::{BandReport, GhostsReport, HitPrediction, cache_pages};
use crate::prediction::{is_enough, lock};

/// Cache sizes for which hit ratios are predicted, as multiples of the present one.
const RATIOS: [f64; 4] = [0.5, 1.0, 1.5, 2.0];

/// Why a band covers everything.
const FEW: &str =
    "fewer than 256 blocks were read again since the counts began: no claim is made yet";

/// The list and its counts. Clones share them.
#[derive(Debug, Clone)]
pub struct Ghosts {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    list: GuestGhosts,
    /// X as set at the start; if `None`, the guest reports it.
    direct_set: Option<PageCount>,
    /// Pages of the list beyond those of the cache.
    beyond: PageCount,
    /// Reads and hits of the cache when the counts began; `None` until the next [`settle`](Ghosts::settle).
    before: Option<(u64, u64)>,
    /// When the counts of the list began.
    since: Instant,
    blocks: Blocks,
    /// The window before.
    last: Option<Window>,
}

/// What was counted in a window.
#[derive(Debug, Clone)]
struct Window {
    reads: u64,
    hits: u64,
    curve: Option<MissRatioCurve>,
    /// Parts of the band at the size that the cache has at its end.
    band: Option<BandParts>,
    out_of_order: f64,
}

/// Time after which the counts restart.
const WINDOW: Duration = Duration::from_mins(10);
/// Length of a block of time at first.
const BLOCK: Duration = Duration::from_secs(1);
/// Blocks at which two are merged into one.
const BLOCKS_MAX: usize = 16;

/// Reads of the list by blocks of the time since its counts began, by which their rate has an error.
#[derive(Debug)]
struct Blocks {
    /// Seconds and reads up to the end of each.
    ends: Vec<(f64, u64)>,
    /// Seconds of each, at least.
    seconds: f64,
}

impl Blocks {
    fn new() -> Self {
        Self {
            ends: Vec::new(),
            seconds: BLOCK.as_secs_f64(),
        }
    }

    /// Ends a block, if it is long enough.
    fn count(&mut self, seconds: f64, reads: u64) {
        let (begin, _) = self.ends.last().copied().unwrap_or_default();
        if seconds - begin < self.seconds {
            return;
        }
        self.ends.push((seconds, reads));
        if self.ends.len() == BLOCKS_MAX {
            let seconds: Vec<_> = self.ends.iter().skip(1).step_by(2).copied().collect();
            self.ends = seconds;
            self.seconds *= 2.0;
        }
    }

    /// Half of the width of the band of the rate of reads, per second; `None` below two blocks.
    fn rate_error(&self) -> Option<f64> {
        let begins = [(0.0, 0)].into_iter().chain(self.ends.iter().copied());
        let blocks: Vec<_> = (begins.zip(&self.ends))
            .map(|(begin, end)| [(end.1 - begin.1) as f64, end.0 - begin.0])
            .collect();
        ratio_error(&blocks)
    }
}

/// A miss-ratio curve and its part of a report.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// The part of the report.
    pub report: GhostsReport,
    /// Reads that miss at each size from the guest's memory on, as a share and, once they were counted for two seconds, per
    /// second; `None` before the first read.
    pub curve: Option<MissRatioCurve>,
}

impl Ghosts {
    /// A list for a cache of `cache` pages and `beyond` more, behind a guest memory of `direct` pages or, if that is
    /// `None`, of as many as the guest reports.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if a list cannot be that long.
    pub fn new(
        direct: Option<PageCount>,
        cache: PageCount,
        beyond: PageCount,
    ) -> Result<Self, GhostError> {
        Self::with_segment(direct, cache, beyond, GhostOptions::SEGMENT)
    }

    fn with_segment(
        direct: Option<PageCount>,
        cache: PageCount,
        beyond: PageCount,
        segment: PageCount,
    ) -> Result<Self, GhostError> {
        let options = GhostOptions {
            direct: direct.unwrap_or_default(),
            ghost: PageCount(cache.0.saturating_add(beyond.0)),
            segment,
        };
        Ok(Self {
            inner: Arc::new(Mutex::new(Inner {
                list: GuestGhosts::new(options)?,
                direct_set: direct,
                beyond,
                before: Some((0, 0)),
                since: Instant::now(),
                blocks: Blocks::new(),
                last: None,
            })),
        })
    }

    /// Follows the guest's memory and the size of the cache. To be called about once a second.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if there is no memory for a longer list, which is then unchanged.
    pub fn settle(&self, stats: &MachineStats) -> Result<(), GhostError> {
        let mut inner = self.lock();
        let GhostOptions { direct, ghost, .. } = inner.list.options();
        let reported = PageCount(stats.ring.guest_memory_pages);
        // A guest that reports nothing (it boots again) is assumed to have what it had.
        let new_direct = match inner.direct_set {
            Some(set) => set,
            None if reported.0 > 0 => reported,
            None => direct,
        };
        let wanted = cache_pages(stats).0.saturating_add(inner.beyond.0);
        let new_ghost = ghost.max(PageCount(wanted));
        if (new_direct, new_ghost) != (direct, ghost) {
            inner.list.resize(new_direct, new_ghost)?;
            inner.restart();
            inner.last = None;
        }
        let elapsed = inner.since.elapsed();
        let reads = inner.list.references();
        inner.blocks.count(elapsed.as_secs_f64(), reads);
        if elapsed >= WINDOW && inner.list.band(PageCount(0)).is_some() {
            inner.last = Some(inner.window(stats));
            inner.list.resize(new_direct, new_ghost)?;
            inner.restart();
        }
        let now = (stats.engine.read_blocks, stats.engine.hits);
        inner.before.get_or_insert(now);
        Ok(())
    }

    /// The prediction for the cache of `stats`.
    #[must_use]
    pub fn prediction(&self, stats: &MachineStats) -> Prediction {
        let inner = self.lock();
        let GhostOptions {
            direct,
            ghost,
            segment,
        } = inner.list.options();
        let is_young = inner.since.elapsed() < WINDOW / 2;
        let last = inner.last.clone().filter(|_| is_young);
        let Window {
            reads,
            hits,
            curve,
            band,
            out_of_order,
        } = last.unwrap_or_else(|| inner.window(stats));
        let sizes = RATIOS.map(|ratio| {
            let cache = cache_pages(stats).scaled(ratio).0;
            cache.next_multiple_of(segment.0)
        });
        let expected = curve
            .as_ref()
            .filter(|curve| is_enough(curve))
            .map(|curve| {
                let hits_at = |cache_pages: u64| {
                    let point = curve.at(PageCount(direct.0.saturating_add(cache_pages)));
                    HitPrediction {
                        cache_pages,
                        hit_ratio: 1.0 - point.miss_ratio,
                        low: 1.0 - point.high,
                        high: 1.0 - point.low,
                    }
                };
                let mut expected = sizes.map(hits_at).to_vec();
                expected.dedup_by_key(|at| at.cache_pages);
                expected
            });
        Prediction {
            report: GhostsReport {
                direct_pages: (direct.0 > 0).then_some(direct.0),
                reach_pages: ghost.0,
                segment_pages: segment.0,
                memory_bytes: inner.list.memory_bytes() as u64,
                reads,
                hits,
                expected,
                band: BandReport {
                    statistical: band.map(|band| band.statistical),
                    replacement: band.map(|band| band.replacement),
                    unreported: band.map(|band| band.unreported),
                    out_of_order,
                    why_unknown: band.is_none().then(|| FEW.to_owned()),
                },
            },
            curve,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

impl Inner {
    /// Restarts the times of counts that were restarted.
    fn restart(&mut self) {
        self.before = None;
        self.since = Instant::now();
        self.blocks = Blocks::new();
    }

    /// The present window.
    fn window(&self, stats: &MachineStats) -> Window {
        let now = (stats.engine.read_blocks, stats.engine.hits);
        let before = self.before.unwrap_or(now);
        Window {
            reads: now.0.saturating_sub(before.0),
            hits: now.1.saturating_sub(before.1),
            curve: self.curve(),
            band: self.list.band(cache_pages(stats)),
            out_of_order: self.list.out_of_order(),
        }
    }

    /// The curve of the present window with its misses per second.
    fn curve(&self) -> Option<MissRatioCurve> {
        let curve = self.list.curve().ok()?;
        let rate = self.blocks.rate_error().map(|error| {
            let expected = curve.references() as f64 / self.since.elapsed().as_secs_f64();
            (expected, (expected - error).max(0.0), expected + error)
        });
        let points = curve.points().iter().map(|&point| CurvePoint {
            misses: rate.map(|(expected, low, high)| MissesPerSecond {
                expected: point.miss_ratio * expected,
                low: point.low * low,
                high: point.high * high,
            }),
            ..point
        });
        curve.with_points(points.collect()).ok()
    }
}

impl Prediction {
    /// The curve of a VM, whose baseline is what it has now, guest memory and cache.
    #[must_use]
    pub fn curve_json(&self, vm: &str, machine: &MachineStats) -> Option<CurveJson> {
        let direct = self.report.direct_pages.unwrap_or_default();
        let now = PageCount(direct.saturating_add(cache_pages(machine).0));
        let curve = self.curve.as_ref()?;
        Some(CurveJson::new(vm, PageSize::FOUR_KIB, Some(now), curve))
    }
}

impl Observer for Ghosts {
    fn missed(&mut self, page: Location) {
        self.lock().list.missed(PageNumber(page.number()));
    }

    fn evicted(&mut self, page: Location) {
        self.lock().list.evicted(PageNumber(page.number()));
    }

    fn released(&mut self, page: Location) {
        self.lock().list.released(PageNumber(page.number()));
    }

    fn cleared(&mut self) {
        let mut inner = self.lock();
        inner.list.clear();
        inner.restart();
        inner.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_disk::DiskNumber;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn block(number: u64) -> Location {
        Location::new(DiskNumber(0), number)
    }

    /// Statistics of a machine with a guest memory and a cache of these sizes.
    fn stats(guest_pages: u64, cache_pages: u64) -> MachineStats {
        let mut stats = MachineStats::default();
        stats.ring.guest_memory_pages = guest_pages;
        stats.engine.cache_bytes = cache_pages * 4096;
        stats
    }

    /// A guest that reads in a loop over `blocks`, whose memory holds `memory` of them.
    fn go_round(ghosts: &mut Ghosts, blocks: u64, memory: u64, rounds: u64) {
        for at in 0..blocks * rounds {
            ghosts.missed(block(at % blocks));
            if at >= memory {
                ghosts.evicted(block((at - memory) % blocks));
            }
        }
    }

    #[test]
    fn a_loop_hits_from_the_size_on_that_holds_it() {
        let (cache, beyond) = (PageCount(2048), PageCount(8192));
        let mut ghosts = Ghosts::new(None, cache, beyond).unwrap();
        ghosts.settle(&stats(3000, 2048)).unwrap();
        go_round(&mut ghosts, 6000, 3000, 10);
        let mut now = stats(3000, 2048);
        (now.engine.read_blocks, now.engine.hits) = (60_000, 0);
        let Prediction { report, curve } = ghosts.prediction(&now);
        let sizes = (report.direct_pages, report.reach_pages);
        assert_eq!(sizes, (Some(3000), 10_240));
        assert_eq!((report.reads, report.hits), (60_000, 0));
        // 3000 blocks behind the guest: three segments of 1024.
        let curve = curve.unwrap();
        assert_eq!(curve.miss_ratio(PageCount(3000 + 2048)), 1.0);
        assert_eq!(curve.miss_ratio(PageCount(3000 + 3072)), 0.1);
        let expected = report.expected.unwrap().into_iter();
        let hits: Vec<_> = expected.map(|at| (at.cache_pages, at.hit_ratio)).collect();
        assert_eq!(hits, [(1024, 0.0), (2048, 0.0), (3072, 0.9), (4096, 0.9)]);
    }

    #[test]
    fn counts_restart_with_another_memory_a_longer_list_or_another_guest() {
        let mut ghosts = Ghosts::new(None, PageCount(8), PageCount(8)).unwrap();
        let references = |ghosts: &Ghosts| {
            let curve = ghosts.prediction(&stats(0, 8)).curve;
            curve.map_or(0, |curve| curve.references())
        };
        ghosts.missed(block(1));
        ghosts.settle(&stats(0, 8)).unwrap();
        assert_eq!(references(&ghosts), 1);
        for (guest, cache) in [(100, 8), (120, 8), (120, 9)] {
            ghosts.settle(&stats(guest, cache)).unwrap();
            assert_eq!(references(&ghosts), 0);
            ghosts.missed(block(1));
            // The same again, a guest that reports nothing, a smaller cache.
            for (guest, cache) in [(guest, cache), (0, cache), (guest, 4)] {
                ghosts.settle(&stats(guest, cache)).unwrap();
                assert_eq!(references(&ghosts), 1);
            }
        }
        ghosts.cleared();
        assert_eq!(references(&ghosts), 0);
        let report = ghosts.prediction(&stats(0, 8)).report;
        assert_eq!((report.reads, report.hits), (0, 0));

        let set = Ghosts::new(Some(PageCount(50)), PageCount(8), PageCount(8)).unwrap();
        set.settle(&stats(120, 8)).unwrap();
        assert_eq!(set.prediction(&stats(120, 8)).report.direct_pages, Some(50));
    }

    #[test]
    fn misses_per_second_are_counts_over_the_time_since_the_counts_began() {
        let mut ghosts = Ghosts::new(None, PageCount(2048), PageCount(8192)).unwrap();
        ghosts.settle(&stats(3000, 2048)).unwrap();
        go_round(&mut ghosts, 6000, 3000, 10);
        let at = |ghosts: &Ghosts, seconds, pages| {
            let mut inner = ghosts.lock();
            inner.since = Instant::now() - Duration::from_secs(seconds);
            inner.blocks = Blocks::new();
            inner.blocks.count(seconds as f64 / 2.0, 30_000);
            inner.blocks.count(seconds as f64, 60_000);
            drop(inner);
            let curve = ghosts.prediction(&stats(3000, 2048)).curve.unwrap();
            Some(curve.misses_per_second(PageCount(pages))?.expected.round())
        };
        // 60 000 reads, of which 6000 are first ones.
        assert_eq!(at(&ghosts, 60, 3000 + 2048), Some(1000.0));
        assert_eq!(at(&ghosts, 60, 3000 + 3072), Some(100.0));
        assert_eq!(at(&ghosts, 120, 3000 + 3072), Some(50.0));
        // With less memory the guest would read more.
        assert_eq!(at(&ghosts, 60, 2999), None);
        assert_eq!(at(&ghosts, 0, 3000 + 3072), None);
        ghosts.cleared();
        assert!(ghosts.prediction(&stats(3000, 2048)).curve.is_none());
        assert!(ghosts.lock().since.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_rate_is_that_of_the_last_window_with_the_spread_of_its_blocks() {
        let mut ghosts = Ghosts::new(None, PageCount(2048), PageCount(8192)).unwrap();
        let now = stats(3000, 2048);
        ghosts.settle(&now).unwrap();
        let minutes = |ghosts: &mut Ghosts, minutes: u64, rounds: u64| {
            for _ in 0..minutes {
                let elapsed = ghosts.lock().since.elapsed();
                go_round(ghosts, 6000, 3000, rounds);
                // However long that took.
                ghosts.lock().since = Instant::now() - elapsed - Duration::from_mins(1);
                ghosts.settle(&now).unwrap();
            }
        };
        // The rate of reads, and its upper limit, behind the misses per second.
        let rate = |ghosts: &Ghosts| {
            let curve = ghosts.prediction(&now).curve.unwrap();
            let point = curve.at(PageCount(3000 + 2048));
            let misses = point.misses.unwrap();
            [misses.expected / point.miss_ratio, misses.high / point.high]
        };
        // The process may have been stopped for a moment.
        let assert_near = |found: f64, expected: f64| {
            assert!((found / expected - 1.0).abs() < 0.005, "{found} {expected}");
        };
        // A quiet window, and then ten times as many reads.
        minutes(&mut ghosts, 10, 1);
        minutes(&mut ghosts, 4, 10);
        for rate in rate(&ghosts) {
            assert_near(rate, 100.0);
        }
        minutes(&mut ghosts, 1, 10);
        for rate in rate(&ghosts) {
            assert_near(rate, 1000.0);
        }
        // Minutes of 1000 and of 100 reads a second: Student's quantile for 8 of them.
        minutes(&mut ghosts, 3, 1);
        let error = 2.365 * (900.0_f64.powi(2) * 15.0 / 8.0 / 7.0 / 8.0).sqrt();
        let [expected, high] = rate(&ghosts);
        assert_near(expected, 662.5);
        assert_near(high, 662.5 + error);
        // Few blocks that are read again restart nothing.
        ghosts.cleared();
        ghosts.missed(block(1));
        ghosts.lock().since -= WINDOW * 2;
        ghosts.settle(&now).unwrap();
        assert!(ghosts.prediction(&now).curve.is_some());
    }

    #[test]
    fn blocks_of_time_become_longer_and_the_first_seconds_have_a_wide_band() {
        let mut blocks = Blocks::new();
        blocks.count(0.9, 5);
        blocks.count(1.2, 100);
        assert_eq!(blocks.rate_error(), None);
        blocks.count(2.4, 300);
        // 83 and 167 reads a second: one degree of freedom.
        assert!(blocks.rate_error().unwrap() > 500.0);
        for second in 3..=600_u64 {
            blocks.count(second as f64, second * 125);
        }
        assert!((8..=15).contains(&blocks.ends.len()));
        assert!(blocks.rate_error().unwrap() < 1.0);
    }

    #[test]
    fn few_reads_predict_nothing() {
        let mut ghosts = Ghosts::new(None, PageCount(1024), PageCount(0)).unwrap();
        go_round(&mut ghosts, 33, 1, 3);
        let expected = |ghosts: &Ghosts| ghosts.prediction(&stats(0, 1024)).report.expected;
        assert_eq!(expected(&ghosts), None);
        go_round(&mut ghosts, 1, 1, 1);
        assert!(expected(&ghosts).is_some());
    }

    proptest! {
        /// An LRU guest, and behind it an exclusive cache of every size at once.
        #[test]
        fn the_curve_is_that_of_caches_of_every_size(
            accesses in prop::collection::vec((0_u64..40, prop::bool::weighted(0.1)), 1..400),
            memory in 1_usize..8,
        ) {
            let one = PageCount(1);
            let mut ghosts = Ghosts::with_segment(None, PageCount(10), PageCount(30), one).unwrap();
            ghosts.settle(&stats(memory as u64, 10)).unwrap();
            let mut caches = vec![Vec::new(); 41];
            let (mut reads, mut hits) = (0, [0; 41]);
            let mut own = VecDeque::new();
            for (page, written) in accesses {
                if let Some(place) = own.iter().position(|&other| other == page) {
                    own.remove(place);
                } else if written {
                    ghosts.released(block(page));
                    caches.iter_mut().for_each(|cache| cache.retain(|&other| other != page));
                } else {
                    reads += 1;
                    ghosts.missed(block(page));
                    for (cache, hits) in caches.iter_mut().zip(&mut hits) {
                        if let Some(place) = cache.iter().position(|&other| other == page) {
                            cache.remove(place);
                            *hits += 1;
                        }
                    }
                }
                own.push_back(page);
                if own.len() > memory {
                    let gone = own.pop_front().unwrap();
                    ghosts.evicted(block(gone));
                    for (size, cache) in caches.iter_mut().enumerate() {
                        cache.push(gone);
                        if cache.len() > size {
                            cache.remove(0);
                        }
                    }
                }
            }
            if reads > 0 {
                let curve = ghosts.prediction(&stats(0, 10)).curve.unwrap();
                for (size, hits) in hits.into_iter().enumerate() {
                    let expected = f64::from(reads - hits) / f64::from(reads);
                    let size = PageCount((memory + size) as u64);
                    prop_assert_eq!(curve.miss_ratio(size), expected);
                }
            }
        }
    }
}
