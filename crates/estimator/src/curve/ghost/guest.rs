//! The ghost list behind a guest's own memory, with a band for what such a list cannot show.
//!
//! The list alone is exact for a memory in LRU order. A guest's kernel is not (active and inactive lists, generations),
//! its hits are not observed, and not every page that leaves it is reported. The band has these parts:
//!
//! - **Statistical.** Pages that are read again, counted in 8 to 16 batches of equal numbers of reads: two standard
//!   errors of the share that misses, from the differences between successive batches, so that a slow trend does not
//!   count as noise, and blocks that are read together count as one.
//! - **Replacement.** How much the order of replacement matters to these reads (`replacement`): the difference between
//!   LRU's misses and those of a memory that evicts in the order of reading, or, so far as this guest departs from that
//!   order, at random. The largest one within a factor of [`REACH`] of the added size counts, because a kernel moves a
//!   cliff. It is independent of the noise, so the root of the sum of both squares is on either side of the curve.
//! - **Unused.** A guest does not put all of added memory into its page cache: 0 to 8 % less in guests with uniform
//!   reads, where the order does not matter. The upper limit is that of a guest with [`UNUSED`] less of it.
//! - **In the guest.** A page that the guest overwrites without reading it stays in the list until it is written back, before
//!   pages that are deeper. As many as are overwritten in the list between an eviction and the next, times the guest's pages,
//!   are there at most; the lower limit is that of a list longer by their share.
//! - **Unreported.** Reads of pages that the guest held by all reports: their evictions were lost or refused, or they
//!   bypass its memory. More memory may have avoided these, so they lower the lower limit.
//!
//! All but [`UNUSED`] are measured on the reads of this guest. At its present size there is no error, because the reads
//! are counted there, and where no depth was found between two sizes, as in a loop, they do not differ.
//!
//! The error of the *quotient* of the misses at two sizes is by the same parts: those of the batches and of the size have both in
//! common, that of replacement is another at each size, the more so the farther they are apart. Coverage: docs/disk-measured.md, and `./dev bench bands`.
//!
//! Source: ours. Cost: a hash per event, and [`SIZES`] exponentials for one of as many pages as keep the samples
//! small; 3 MiB at most. Not here: sizes below the guest's own.

use std::f64::consts::FRAC_PI_2;

use plimsoll_flow::{
    CurveError, CurvePoint, LOG_ERRORS, LogErrors, MissRatioCurve, PageCount, PageNumber,
};

use super::batches::{Batches, PAIRS_MAX};
use super::grid::{SIZES, between, sizes};
use super::replacement::Replacement;
use super::{GhostBuffer, GhostError, GhostOptions};
use crate::parts::log_errors::permille;

/// Share of added memory that a guest may leave unused for its page cache.
const UNUSED: f64 = 0.04;
/// Factor by which a kernel may move a cliff of the curve beyond its own memory.
const REACH: f64 = 1.5;
/// Standard errors on either side of a statistical band of 95 %.
const ERRORS: f64 = 2.0;
/// Smaller shares of misses have the errors of this one, of which logarithms are finite.
const RATIO_MIN: f64 = 1e-3;
/// Parts of an error that are those of the guest's kernel.
const KERNEL_PARTS: usize = 8;
const _: () = assert!(KERNEL_PARTS + 1 + PAIRS_MAX <= LOG_ERRORS);

/// A ghost list behind a guest of `direct` pages, which is full and reports reads, evictions and releases.
#[derive(Debug, Clone)]
pub struct GuestGhosts {
    buffer: GhostBuffer,
    batches: Batches,
    replacement: Replacement,
    /// Pages that left the guest.
    evictions: u64,
    /// Pages that were overwritten or freed while they were in the list.
    overwritten: u64,
}

/// The parts of a band at one size, as shares of the reads, 0.0 to 1.0.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BandParts {
    /// Two standard errors of the share that misses.
    pub statistical: f64,
    /// What another order of replacement may change.
    pub replacement: f64,
    /// Reads of pages that the guest held by all reports; below the curve only.
    pub unreported: f64,
}

impl GuestGhosts {
    /// An empty list; all memory that depends on its length is allocated here.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if the sizes are invalid, or the host lacks the memory.
    pub fn new(options: GhostOptions) -> Result<Self, GhostError> {
        Ok(Self {
            buffer: GhostBuffer::new(options)?,
            batches: Batches::new(options.ghost),
            replacement: Replacement::new(options.ghost),
            evictions: 0,
            overwritten: 0,
        })
    }

    /// Records a read of a page that the guest does not hold.
    pub fn missed(&mut self, page: PageNumber) {
        let direct = self.options().direct;
        self.buffer.set_cached(direct);
        let is_new = !self.buffer.has_dropped();
        let depth = self.buffer.depth_of_missed(page);
        let beyond = depth.map(|depth| depth.saturating_sub(direct.0));
        if depth.is_some() || !is_new {
            self.batches.read_again(beyond);
        }
        self.replacement.missed(page, beyond);
    }

    /// Records that a page left the guest and can be cached.
    pub fn evicted(&mut self, page: PageNumber) {
        self.evictions += 1;
        self.buffer.evicted(page);
        self.replacement.evicted(page);
    }

    /// Records that a page was overwritten or freed.
    pub fn released(&mut self, page: PageNumber) {
        let listed = self.remembered();
        self.buffer.released(page);
        self.overwritten += u64::from(self.remembered() < listed);
        self.replacement.released(page);
    }

    /// Changes the sizes; counts restart, and pages are kept as by [`GhostBuffer::resize`].
    ///
    /// # Errors
    ///
    /// [`GhostError`]; nothing has changed then.
    pub fn resize(&mut self, direct: PageCount, ghost: PageCount) -> Result<(), GhostError> {
        self.buffer.resize(direct, ghost)?;
        self.batches = Batches::new(ghost);
        self.replacement.restart(ghost);
        (self.evictions, self.overwritten) = (0, 0);
        Ok(())
    }

    /// Removes all pages and counts.
    pub fn clear(&mut self) {
        self.buffer.clear();
        let ghost = self.options().ghost;
        self.batches = Batches::new(ghost);
        self.replacement = Replacement::new(ghost);
        (self.evictions, self.overwritten) = (0, 0);
    }

    /// The present sizes.
    #[must_use]
    pub fn options(&self) -> GhostOptions {
        self.buffer.options()
    }

    /// Number of reads counted.
    #[must_use]
    pub fn references(&self) -> u64 {
        self.buffer.references()
    }

    /// Number of pages in the list.
    #[must_use]
    pub fn remembered(&self) -> PageCount {
        self.buffer.remembered()
    }

    /// Returns the curve of all reads counted, from the guest's own size on: with less, it would read more. Its band has the parts of
    /// [`band`](Self::band); while these are unknown, it is as wide as it can be.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if there were none.
    pub fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        let exact = self.buffer.curve()?;
        let GhostOptions { direct, ghost, .. } = self.options();
        let measured = self.measured();
        // At the guest's own size its reads are counted.
        let mut errors: Vec<_> = measured.iter().map(|_| [0; LOG_ERRORS]).collect();
        let beyond = exact.points().iter().filter(|point| point.size > direct);
        let points = beyond.map(|&point| {
            let beyond = PageCount(point.size.0 - direct.0);
            let Some(measured) = &measured else {
                return CurvePoint {
                    low: 0.0,
                    high: 1.0,
                    ..point
                };
            };
            let parts = measured.parts(ghost, beyond);
            let with = |beyond: PageCount| exact.at(PageCount(direct.0.saturating_add(beyond.0)));
            let unused = with(beyond.scaled(1.0 - UNUSED)).miss_ratio - point.miss_ratio;
            let least = with(beyond.scaled(1.0 + measured.in_guest))
                .low
                .min(point.low);
            let both = parts.statistical.hypot(parts.replacement);
            let by_size = unused + point.miss_ratio - least;
            let misses = point.miss_ratio;
            errors.push(measured.log_errors(ghost, beyond, parts, misses, by_size));
            CurvePoint {
                low: (least - both - parts.unreported).max(0.0),
                high: (point.high + both + unused).min(1.0),
                ..point
            }
        });
        let points = [exact.at(direct)].into_iter().chain(points).collect();
        let curve = MissRatioCurve::new(points, exact.references())?;
        Ok(curve.with_log_errors(errors))
    }

    /// The parts of the band where `beyond` pages are added to the guest; `None` while too few pages were read again.
    #[must_use]
    pub fn band(&self, beyond: PageCount) -> Option<BandParts> {
        Some(self.measured()?.parts(self.options().ghost, beyond))
    }

    fn measured(&self) -> Option<Measured> {
        let references = self.buffer.references() as f64;
        let share = |misses: f64| ERRORS * misses / references;
        let changes = self.batches.changes()?.into_iter();
        Some(Measured {
            statistical: self.batches.standard_errors()?.map(share),
            changes: changes.map(|change| change.map(share)).collect(),
            replacement: self.replacement.differences(),
            unreported: self.replacement.unreported(),
            in_guest: self.in_guest(),
        })
    }

    /// Share of the list that the guest may hold again, because it wrote these pages and had no need to read them.
    fn in_guest(&self) -> f64 {
        let overwritten = self.overwritten as f64 / self.evictions.max(1) as f64;
        let pages = overwritten * self.options().direct.0 as f64;
        (pages / self.remembered().0.max(1) as f64).min(1.0)
    }

    /// Share of evictions out of the order in which the pages were read, 0.0 to 1.0; 1.0 while too few were observed.
    #[must_use]
    pub fn out_of_order(&self) -> f64 {
        self.replacement.out_of_order()
    }

    /// Bytes of heap allocated.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.buffer.memory_bytes() + self.replacement.memory_bytes()
    }
}

/// What the parts of a band are computed from, as shares of the reads.
struct Measured {
    /// Two standard errors of the share that misses, and the same in parts by batches.
    statistical: [f64; SIZES],
    changes: Vec<[f64; SIZES]>,
    replacement: [f64; SIZES],
    unreported: f64,
    in_guest: f64,
}

impl Measured {
    /// The parts with `beyond` pages added, for a list of `ghost` pages.
    fn parts(&self, ghost: PageCount, beyond: PageCount) -> BandParts {
        let at = |values: &[f64; SIZES], beyond: f64| between(ghost, values, beyond);
        let beyond = beyond.0 as f64;
        let reach = beyond / REACH..=beyond * REACH;
        let largest = sizes(ghost)
            .into_iter()
            .zip(self.replacement)
            .filter(|(size, _)| reach.contains(size))
            .map(|(_, difference)| difference)
            .fold(at(&self.replacement, beyond), f64::max);
        BandParts {
            statistical: at(&self.statistical, beyond),
            replacement: largest,
            unreported: self.unreported,
        }
    }

    /// The errors of the logarithm of the share `misses` with `beyond` pages added, where the band has these `parts`: of the guest's
    /// kernel, of the size, which changes the share by at most `by_size`, and of each batch.
    fn log_errors(
        &self,
        ghost: PageCount,
        beyond: PageCount,
        parts: BandParts,
        misses: f64,
        by_size: f64,
    ) -> LogErrors {
        let batches = (self.changes.iter()).map(|change| between(ghost, change, beyond.0 as f64));
        let kernel = parts.replacement + parts.unreported;
        // Sizes near each other are next to each other in these parts, others have none in common.
        let place = (beyond.0 as f64 / ghost.0 as f64).sqrt() * (KERNEL_PARTS - 1) as f64;
        let kernels = (0..KERNEL_PARTS).map(|at| {
            let far = (place - at as f64).abs().min(1.0);
            kernel * (far * FRAC_PI_2).cos()
        });
        let mut errors = kernels.chain([by_size]).chain(batches);
        std::array::from_fn(|_| permille(errors.next().unwrap_or_default() / misses.max(RATIO_MIN)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::{cycle, uniform, zipf};
    use std::collections::{BTreeSet, VecDeque};

    /// A guest that evicts the page it read first, or the one it used last longest ago.
    struct Guest {
        pages: VecDeque<u64>,
        size: usize,
        is_lru: bool,
    }

    impl Guest {
        fn new(size: usize, is_lru: bool) -> Self {
            Self {
                pages: VecDeque::new(),
                size,
                is_lru,
            }
        }

        /// Whether the page was not there, and which page left.
        fn touch(&mut self, page: u64) -> (bool, Option<u64>) {
            let place = self.pages.iter().position(|&other| other == page);
            if let Some(place) = place {
                if self.is_lru {
                    self.pages.remove(place);
                    self.pages.push_back(page);
                }
                return (false, None);
            }
            let full = self.pages.len() == self.size;
            let gone = full.then(|| self.pages.pop_front()).flatten();
            self.pages.push_back(page);
            (true, gone)
        }
    }

    fn list(direct: u64, ghost: u64) -> GuestGhosts {
        GuestGhosts::new(GhostOptions {
            direct: PageCount(direct),
            ghost: PageCount(ghost),
            segment: PageCount(16),
        })
        .unwrap()
    }

    /// The list behind a guest of 200 pages, and the share of its reads that one of `size` pages would have done.
    fn observed(pages: &[u64], size: usize, is_lru: bool) -> (GuestGhosts, f64) {
        let mut ghosts = list(200, 1024);
        let (mut own, mut other) = (Guest::new(200, is_lru), Guest::new(size, is_lru));
        let (mut reads, mut fewer) = (0.0, 0.0);
        for &page in pages {
            let (missed, gone) = own.touch(page);
            if missed {
                reads += 1.0;
                ghosts.missed(PageNumber(page));
            }
            if let Some(gone) = gone {
                ghosts.evicted(PageNumber(gone));
            }
            fewer += f64::from(u8::from(other.touch(page).0));
        }
        (ghosts, fewer / reads)
    }

    fn widths(ghosts: &GuestGhosts) -> Vec<f64> {
        let curve = ghosts.curve().unwrap();
        let points = curve.points().iter();
        points.map(|point| point.high - point.low).collect()
    }

    #[test]
    fn a_loop_leaves_nothing_to_the_order_and_has_no_noise() {
        let pages: Vec<u64> = cycle(600).take(20_000).collect();
        let (ghosts, truth) = observed(&pages, 700, true);
        assert_eq!(ghosts.out_of_order(), 0.0);
        let point = ghosts.curve().unwrap().at(PageCount(712));
        assert!(point.high - point.low < 0.001, "{point:?}");
        assert!(
            point.low <= truth && truth <= point.high,
            "{point:?} {truth}"
        );
    }

    #[test]
    fn the_band_has_no_width_at_the_present_size_and_little_for_a_uniform_stream() {
        let pages: Vec<u64> = uniform(1000, 1).take(40_000).collect();
        let (ghosts, truth) = observed(&pages, 600, true);
        let curve = ghosts.curve().unwrap();
        let now = curve.at(PageCount(200));
        assert_eq!((now.low, now.high), (1.0, 1.0));
        let point = curve.at(PageCount(600));
        assert!(
            point.low <= truth && truth <= point.high,
            "{point:?} {truth}"
        );
        assert!(point.high - point.low < 0.08, "{point:?}");
    }

    #[test]
    fn a_guest_that_is_not_lru_misses_more_than_the_line_but_no_more_than_the_band() {
        let pages: Vec<u64> = zipf(1000, 0.6, 1).take(60_000).collect();
        for (size, border) in [(504, 504), (696, 696)] {
            let (ghosts, truth) = observed(&pages, size, false);
            let point = ghosts.curve().unwrap().at(PageCount(border));
            let parts = ghosts.band(PageCount(border - 200)).unwrap();
            assert!(
                truth > point.miss_ratio + parts.statistical,
                "{point:?} {truth}"
            );
            assert!(truth <= point.high, "{point:?} {truth}");
        }
    }

    /// The list behind an LRU guest of 200 pages that overwrites every so manyth of its pages and writes it back when it evicts
    /// it, and the share of its reads that one of `size` pages would have done.
    fn written(pages: &[u64], every: usize, size: usize) -> (GuestGhosts, f64) {
        let mut ghosts = list(200, 1024);
        let (mut own, mut other) = (Guest::new(200, true), Guest::new(size, true));
        let (mut reads, mut fewer, mut dirty) = (0.0, 0.0, BTreeSet::new());
        for (at, &page) in pages.iter().enumerate() {
            let writes = at % every == 0;
            let (missed, gone) = own.touch(page);
            let missed_there = other.touch(page).0;
            if writes {
                dirty.insert(page);
            } else {
                reads += f64::from(u8::from(missed));
                fewer += f64::from(u8::from(missed_there));
                if missed {
                    ghosts.missed(PageNumber(page));
                }
            }
            if let Some(gone) = gone {
                if dirty.remove(&gone) {
                    ghosts.released(PageNumber(gone));
                }
                ghosts.evicted(PageNumber(gone));
            }
        }
        (ghosts, fewer / reads)
    }

    #[test]
    fn pages_that_were_written_and_not_read_are_no_disorder() {
        let pages: Vec<u64> = cycle(601).take(30_000).collect();
        let (ghosts, _) = written(&pages, 10, 400);
        for beyond in [200, 350, 700] {
            let parts = ghosts.band(PageCount(beyond)).unwrap();
            assert!(parts.replacement < 0.01, "{beyond}: {parts:?}");
        }
    }

    #[test]
    fn pages_in_the_list_that_the_guest_has_written_lower_the_band() {
        let pages: Vec<u64> = uniform(1000, 1).take(60_000).collect();
        let (ghosts, truth) = written(&pages, 3, 696);
        // A third of the guest's 200 pages, of 800 others and themselves.
        let in_guest = ghosts.in_guest();
        assert!((0.06..0.1).contains(&in_guest), "{in_guest}");
        let list = ghosts.buffer.curve().unwrap();
        let longer = list.at(PageCount(200 + PageCount(496).scaled(1.0 + in_guest).0));
        let expected = list.miss_ratio(PageCount(696));
        assert!(
            longer.low <= truth && truth < expected - 0.02,
            "{longer:?} {truth}"
        );
        let point = ghosts.curve().unwrap().at(PageCount(696));
        let parts = ghosts.band(PageCount(496)).unwrap();
        let both = parts.statistical.hypot(parts.replacement);
        assert!((point.low + both - longer.low).abs() < 1e-9, "{point:?}");
    }

    #[test]
    fn a_quotient_has_the_errors_of_both_sizes_and_none_at_the_baseline() {
        let pages: Vec<u64> = zipf(1000, 0.6, 1).take(60_000).collect();
        let (ghosts, truth) = observed(&pages, 504, false);
        let curve = ghosts.curve().unwrap();
        assert_eq!(curve.points()[0].size, PageCount(200));
        let baseline = PageCount(504);
        let band = |size| curve.quotient_band(PageCount(size), baseline, 1e-3);
        assert_eq!(band(504), 1.0..=1.0);
        // What the guest misses is counted, what it would miss at the baseline is not.
        let now = band(200);
        assert!(now.contains(&(1.0 / truth)), "{now:?} {truth}");
        assert!(now.end() / now.start() > 1.05, "{now:?}");
    }

    #[test]
    fn few_reads_claim_nothing() {
        let mut ghosts = list(10, 64);
        for page in 0..100 {
            ghosts.missed(PageNumber(page));
            ghosts.evicted(PageNumber(page));
        }
        assert_eq!(ghosts.band(PageCount(20)), None);
        let point = ghosts.curve().unwrap().at(PageCount(26));
        assert_eq!((point.low, point.high), (0.0, 1.0));
    }

    #[test]
    fn reads_of_pages_whose_eviction_was_lost_lower_the_band() {
        let pages: Vec<u64> = cycle(600).take(20_000).collect();
        let mut ghosts = list(200, 1024);
        let mut guest = Guest::new(200, true);
        for (at, &page) in pages.iter().enumerate() {
            let (missed, gone) = guest.touch(page);
            if missed {
                ghosts.missed(PageNumber(page));
            }
            if let Some(gone) = gone.filter(|_| at % 10 != 0) {
                ghosts.evicted(PageNumber(gone));
            }
        }
        let parts = ghosts.band(PageCount(500)).unwrap();
        assert!((0.08..0.12).contains(&parts.unreported), "{parts:?}");
        let point = ghosts.curve().unwrap().at(PageCount(712));
        assert!(point.low <= 0.03 && point.miss_ratio > 0.08, "{point:?}");
    }

    #[test]
    fn counts_and_band_restart_with_another_size_and_memory_stays_bounded() {
        let pages: Vec<u64> = uniform(50_000, 1).take(400_000).collect();
        let (mut ghosts, _) = observed(&pages, 10, true);
        assert!(ghosts.memory_bytes() < 4 << 20);
        assert!(
            widths(&ghosts)
                .iter()
                .all(|width| (0.0..=1.0).contains(width))
        );
        ghosts.resize(PageCount(300), PageCount(1024)).unwrap();
        assert_eq!(ghosts.band(PageCount(100)), None);
        assert!(ghosts.curve().is_err());
        ghosts.clear();
        assert_eq!(ghosts.remembered(), PageCount(0));
    }
}
