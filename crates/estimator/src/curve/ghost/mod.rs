//! Ghost list: the misses of a real cache that more memory would have avoided.
//!
//! Behind a cache of `direct` pages, a list stores the numbers of the pages it evicted, most recent first,
//! without their contents. A miss whose page is at depth `d` of that list would have been a hit
//! in a cache of `direct + d + 1` pages, if both cache and list are in LRU order: together
//! they form one LRU stack. Hits are counted by *segment* of the list, which
//! gives the miss-ratio curve at `direct`, `direct + segment`, .. up to the list's end.
//!
//! **Finding the segment.** The usual method has a marker at the border of every segment, and each miss that
//! is not found moves all of them: O(segments). Here no borders are stored. Every page that enters gets the next
//! *timestamp*, a bit that is set until the page leaves; a page's depth is the number of set bits after its own. Unused
//! bits are set as well and are never before a used one, so entering costs only the next number; leaving subtracts one
//! from every later sum within its node on each level of a tree with 32 children per node: a few vector operations,
//! whatever the depth. Depths are exact, so the curve is exact at every border of a segment. (No list with exact depths
//! can be O(1): Fredman and Saks 1989. Four levels suffice for a million pages.) When the timestamps are used up, those
//! set are renumbered: O(1) per reference, amortised.
//!
//! **Uncertainty** is represented by the band. Below `direct` the curve is 1, with a band down to the
//! ratio at `direct`. Within a segment it is the ratio on the left, with a band down to that on
//! the right. Beyond the list it is the last ratio, with a band down to the share of
//! references that are certainly first ones: those made before any page was dropped from the list's end.
//!
//! Source: [LS07] §4.1 for counts by segment behind a memory, [Patterson95] and [Jones06] for the ghost buffer itself.
//! Departs in how the segment is found. Cost: O(levels of the tree) per reference, plus one sum for every 2^20 pages,
//! and one cache miss for the page, two if a page is dropped from the end; 53 bytes per page, all of it allocated at
//! the start. Not here: the cache and its contents; memories smaller than the direct one (`lru`, `shards`).

mod batches;
mod counts;
mod depths;
mod grid;
mod guest;
mod recency;
mod replacement;

use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, PageNumber};

use crate::estimator::Estimator;
use crate::parts::sys;
use counts::Counts;
pub use guest::{BandParts, GuestGhosts};
use recency::Recency;

/// The sizes of a ghost buffer, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GhostOptions {
    /// Size of the cache in front, when full. The curve begins there.
    pub direct: PageCount,
    /// Capacity of the ghost list in evicted pages, at least 1. The curve ends at `direct + ghost`.
    pub ghost: PageCount,
    /// Pages from one point of the curve to the next, at least 1; the last segment may be shorter.
    pub segment: PageCount,
}

impl GhostOptions {
    /// A segment of 4 MiB in pages of 4 KiB, \[LS07\] §4.1.
    pub const SEGMENT: PageCount = PageCount(1024);

    /// Returns options with segments of 4 MiB.
    #[must_use]
    pub fn new(direct: PageCount, ghost: PageCount) -> Self {
        Self {
            direct,
            ghost,
            segment: Self::SEGMENT,
        }
    }
}

/// Why a ghost buffer was not built or not resized. An existing one is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GhostError {
    /// The ghost list has no capacity.
    #[error("a ghost list must have at least one page")]
    NoGhost,
    /// The segment size is 0.
    #[error("a segment must have at least one page")]
    NoSegment,
    /// There are more pages than a 32-bit number can index.
    #[error("{pages} pages exceed the maximum of {max}")]
    TooLarge {
        /// Requested number of pages in the list.
        pages: PageCount,
        /// Maximum number of pages.
        max: PageCount,
    },
    /// The memory could not be allocated.
    #[error("out of memory for a list of {pages} pages")]
    NoMemory {
        /// Requested number of pages in the list.
        pages: PageCount,
    },
}

/// Maximum number of pages in one buffer.
const PAGES_MAX: u64 = 1 << 30;

/// The ghost buffer behind a real cache, which reports its hits, misses and evictions.
///
/// The cache calls [`hits_in_cache`](Self::hits_in_cache) for hits; for a miss
/// [`missed`](Self::missed), and then [`evicted`](Self::evicted) for each page that it evicts to make room.
///
/// ```
/// use plimsoll_estimator::{GhostBuffer, GhostOptions};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let mut ghost = GhostBuffer::new(GhostOptions {
///     direct: PageCount(1),
///     ghost: PageCount(4),
///     segment: PageCount(2),
/// })?;
/// assert_eq!(ghost.missed(PageNumber(7)), None);
/// assert_eq!(ghost.missed(PageNumber(8)), None);
/// ghost.evicted(PageNumber(7));
/// assert_eq!(ghost.missed(PageNumber(7)), Some(0)); // Two pages more would have kept it.
/// ghost.evicted(PageNumber(8));
/// let curve = ghost.curve()?;
/// assert_eq!(curve.miss_ratio(PageCount(1)), 1.0);
/// assert_eq!(curve.miss_ratio(PageCount(3)), 2.0 / 3.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct GhostBuffer {
    order: Recency,
    counts: Counts,
    /// Number of pages in the cache, by its own reports.
    cached: u64,
}

impl GhostBuffer {
    /// Returns an empty buffer behind an empty cache. All memory is allocated here.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if the sizes are invalid, or the host lacks the memory.
    pub fn new(options: GhostOptions) -> Result<Self, GhostError> {
        let counts = Counts::new(options)?;
        Ok(Self {
            order: Recency::new(options.ghost.0)?,
            counts,
            cached: 0,
        })
    }

    /// Records this number of hits in the cache.
    pub fn hits_in_cache(&mut self, hits: u64) {
        self.counts.hits += hits;
    }

    /// Records a reference that missed and whose page enters the cache. Returns the segment of the ghost list, from 0,
    /// in which the page was found, and removes it there; `None` if it was not found.
    ///
    /// Must be called before the page's arrival evicts another, because the depth is computed from the cache's contents
    /// at the time of the miss.
    pub fn missed(&mut self, page: PageNumber) -> Option<usize> {
        let depth = self.depth_of_missed(page)?;
        Some(self.counts.segment_of(depth))
    }

    /// As [`missed`](Self::missed), but returns the number of pages before it in cache and list.
    fn depth_of_missed(&mut self, page: PageNumber) -> Option<u64> {
        let below = self.cached;
        self.cached = below.saturating_add(1);
        let Some(depth) = self.order.remove(page) else {
            let reach = below.saturating_add(self.order.len());
            self.counts.not_found(reach, self.order.has_dropped());
            return None;
        };
        let depth = below.saturating_add(depth);
        self.counts.found(depth);
        Some(depth)
    }

    /// Whether a page was ever dropped from the end of the list.
    fn has_dropped(&self) -> bool {
        self.order.has_dropped()
    }

    /// Records an eviction. The page enters the ghost list as the most recent one; the oldest may be dropped.
    pub fn evicted(&mut self, page: PageNumber) {
        self.cached = self.cached.saturating_sub(1);
        self.order.touch(page);
    }

    /// Removes a page that can no longer be used (freed, overwritten) from the ghost list or, if
    /// it is not there, from the cache's count.
    pub fn released(&mut self, page: PageNumber) {
        if self.order.remove(page).is_none() {
            self.cached = self.cached.saturating_sub(1);
        }
    }

    /// Sets the number of pages in the cache, if it was not empty at the start or did not report everything.
    pub fn set_cached(&mut self, pages: PageCount) {
        self.cached = pages.0;
    }

    /// Changes the sizes of the cache in front and of the ghost list.
    ///
    /// Pages are kept, except for the oldest of a smaller ghost list; the cache reports its evictions and insertions
    /// due to its new size as always. Counts restart, because a curve belongs
    /// to one size: read the old one before. A ghost list that grows after pages were dropped
    /// has unknown depths between its old and its new end until it has filled; the band reflects this.
    ///
    /// # Errors
    ///
    /// [`GhostError`]; the buffer is then unchanged.
    pub fn resize(&mut self, direct: PageCount, ghost: PageCount) -> Result<(), GhostError> {
        let segment = self.counts.options.segment;
        let counts = Counts::new(GhostOptions {
            direct,
            ghost,
            segment,
        })?;
        if ghost != self.counts.options.ghost {
            self.order = self.order.resized(ghost.0)?;
        }
        self.counts = counts;
        Ok(())
    }

    /// Resets all counts and keeps the pages: the next curve covers the references from here on.
    pub fn clear_counts(&mut self) {
        self.counts.clear();
    }

    /// Removes all pages and counts, and assumes that the cache is empty. Keeps the memory.
    pub fn clear(&mut self) {
        self.order.clear();
        self.counts.clear();
        self.cached = 0;
    }

    /// The present sizes.
    #[must_use]
    pub fn options(&self) -> GhostOptions {
        self.counts.options
    }

    /// Number of pages in the ghost list.
    #[must_use]
    pub fn remembered(&self) -> PageCount {
        PageCount(self.order.len())
    }

    /// Number of references counted: hits in the cache and misses.
    #[must_use]
    pub fn references(&self) -> u64 {
        self.counts.references()
    }

    /// Misses that a cache larger by `segment * (index + 1)` pages would have avoided and one by `segment * index` not.
    #[must_use]
    pub fn segment_hits(&self) -> &[u64] {
        self.counts.segment_hits()
    }

    /// Returns the curve of all counted references, from the direct size upward.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if there were none.
    pub fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        self.counts.curve()
    }

    /// Bytes of heap allocated, all of them since the start.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.order.memory_bytes() + self.counts.memory_bytes()
    }
}

/// The ghost list behind a simulated LRU memory: an estimator of a whole stream.
///
/// Memory and ghost list form one LRU stack of `direct + ghost` pages.
#[derive(Debug, Clone)]
pub struct GhostLru {
    stack: Recency,
    counts: Counts,
}

impl GhostLru {
    /// Returns an empty memory with an empty ghost list. All memory is allocated here.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if the sizes are invalid, or the host lacks the memory.
    pub fn new(options: GhostOptions) -> Result<Self, GhostError> {
        let counts = Counts::new(options)?;
        let pages = options.direct.0.saturating_add(options.ghost.0);
        Ok(Self {
            stack: Recency::new(pages)?,
            counts,
        })
    }

    /// Misses that a memory larger by `segment * (index + 1)` pages would have avoided and one by `segment * index`
    /// not.
    #[must_use]
    pub fn segment_hits(&self) -> &[u64] {
        self.counts.segment_hits()
    }
}

impl Estimator for GhostLru {
    fn observe(&mut self, pages: &[PageNumber]) {
        let (stack, counts) = (&mut self.stack, &mut self.counts);
        stack.touch_all(pages, |depth, reach, has_dropped| match depth {
            Some(depth) => {
                counts.found(depth);
            }
            None => counts.not_found(reach, has_dropped),
        });
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        self.counts.curve()
    }

    fn memory_bytes(&self) -> usize {
        self.stack.memory_bytes() + self.counts.memory_bytes()
    }

    fn smallest_size(&self) -> PageCount {
        self.counts.options.direct
    }
}

fn check_pages(pages: u64) -> Result<(), GhostError> {
    if pages > PAGES_MAX {
        return Err(too_large(pages));
    }
    Ok(())
}

fn too_large(pages: u64) -> GhostError {
    GhostError::TooLarge {
        pages: PageCount(pages),
        max: PageCount(PAGES_MAX),
    }
}

/// Returns `len` copies of `item`, in huge pages if available; the error states for how many `pages` memory was
/// lacking.
fn filled<T: Clone>(item: T, len: usize, pages: u64) -> Result<Vec<T>, GhostError> {
    let mut items = Vec::new();
    items
        .try_reserve_exact(len)
        .map_err(|_| GhostError::NoMemory {
            pages: PageCount(pages),
        })?;
    sys::advise_huge(items.spare_capacity_mut());
    items.resize(len, item);
    Ok(items)
}

/// Converts a number of pages that has been checked against the maximum.
fn as_index(pages: u64) -> usize {
    usize::try_from(pages).expect("at most PAGES_MAX")
}

#[cfg(test)]
mod tests {
    use super::counts::point;
    use super::depths::Depths;
    use super::*;
    use crate::curve::lru::ExactLru;
    use crate::parts::naive::NaiveStack;
    use crate::parts::streams::{batch_of, curve_of, cycle, uniform, zipf};
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn options(direct: u64, ghost: u64, segment: u64) -> GhostOptions {
        GhostOptions {
            direct: PageCount(direct),
            ghost: PageCount(ghost),
            segment: PageCount(segment),
        }
    }

    /// `direct`, `direct + segment`, .. `direct + ghost`.
    fn borders(options: GhostOptions) -> impl Iterator<Item = u64> {
        let (direct, ghost) = (options.direct.0, options.ghost.0);
        let inner = (0..ghost).step_by(as_index(options.segment.0));
        inner.chain([ghost]).map(move |depth| direct + depth)
    }

    /// A cache in LRU order that reports to a ghost buffer.
    struct Cache {
        size: usize,
        pages: VecDeque<u64>,
    }

    impl Cache {
        fn touch(&mut self, page: u64, ghost: &mut GhostBuffer) -> Option<usize> {
            if let Some(place) = self.pages.iter().position(|&other| other == page) {
                self.pages.remove(place);
                self.pages.push_front(page);
                ghost.hits_in_cache(1);
                return None;
            }
            let segment = ghost.missed(PageNumber(page));
            self.pages.push_front(page);
            self.shrink(self.size, ghost);
            segment
        }

        fn shrink(&mut self, size: usize, ghost: &mut GhostBuffer) {
            self.size = size;
            while self.pages.len() > size {
                ghost.evicted(PageNumber(self.pages.pop_back().unwrap()));
            }
        }
    }

    /// Checks that every size's band contains the truth, and that the band has no width at the borders.
    fn check(curve: &MissRatioCurve, options: GhostOptions, truth: impl Fn(u64) -> f64) {
        for size in 0..options.direct.0 + options.ghost.0 + 50 {
            let (point, truth) = (curve.at(PageCount(size)), truth(size));
            assert!(
                point.low <= truth && truth <= point.high,
                "{size}: {point:?} {truth}"
            );
        }
        for size in borders(options).filter(|&size| size > 0) {
            assert_eq!(
                curve.at(PageCount(size)),
                point(size, truth(size), truth(size), truth(size))
            );
        }
    }

    #[test]
    fn a_loop_is_found_in_the_segment_that_makes_it_fit() {
        let sizes = options(100, 400, 50);
        for (pages, segment) in [(101, 0), (150, 0), (151, 1), (500, 7)] {
            let mut ghost = GhostLru::new(sizes).unwrap();
            let curve = curve_of(&mut ghost, cycle(pages).take(10 * pages as usize));
            assert_eq!(ghost.segment_hits()[segment], 9 * pages);
            assert_eq!(ghost.segment_hits().iter().sum::<u64>(), 9 * pages);
            let end = 100 + 50 * (segment as u64 + 1);
            assert_eq!(curve.miss_ratio(PageCount(end - 50)), 1.0);
            assert_eq!(curve.at(PageCount(end - 1)), point(end - 1, 1.0, 0.1, 1.0));
            assert_eq!(curve.at(PageCount(end)), point(end, 0.1, 0.1, 0.1));
        }
        // One page more than both can contain: all that is known is that 500 were first references.
        let curve = curve_of(&mut GhostLru::new(sizes).unwrap(), cycle(501).take(5_010));
        assert_eq!(curve.at(PageCount(500)), point(500, 1.0, 1.0, 1.0));
        let floor = 501.0 / 5_010.0;
        assert_eq!(curve.at(PageCount(501)), point(501, 1.0, floor, 1.0));
    }

    #[test]
    fn below_the_direct_size_nothing_is_known_but_a_floor() {
        let curve = curve_of(
            &mut GhostLru::new(options(10, 10, 10)).unwrap(),
            cycle(5).take(50),
        );
        assert_eq!(curve.at(PageCount(0)), point(0, 1.0, 1.0, 1.0));
        assert_eq!(curve.at(PageCount(1)), point(1, 1.0, 0.1, 1.0));
        assert_eq!(curve.at(PageCount(9)), point(9, 1.0, 0.1, 1.0));
        assert_eq!(curve.at(PageCount(10)), point(10, 0.1, 0.1, 0.1));
        assert_eq!(
            curve.at(PageCount(u64::MAX)),
            point(u64::MAX, 0.1, 0.1, 0.1)
        );
    }

    #[test]
    fn what_is_not_a_ghost_buffer_is_refused() {
        let refused = |direct, ghost, segment| {
            let options = options(direct, ghost, segment);
            let error = GhostLru::new(options).unwrap_err();
            (error, GhostBuffer::new(options).err())
        };
        assert_eq!(
            refused(5, 0, 1),
            (GhostError::NoGhost, Some(GhostError::NoGhost))
        );
        assert_eq!(
            refused(5, 1, 0),
            (GhostError::NoSegment, Some(GhostError::NoSegment))
        );
        // A cache in front may have any size; a simulated one may not.
        assert_eq!(refused(1 << 40, 1, 1), (too_large((1 << 40) + 1), None));
        let whole = too_large(u64::MAX);
        assert_eq!(refused(1, u64::MAX, 1), (whole, Some(whole)));
        assert_eq!(refused(u64::MAX, 1, 1), (whole, Some(whole)));
        assert!(GhostLru::new(options(0, 1, u64::MAX)).is_ok());
        let mut ghost = GhostBuffer::new(options(5, 10, 1)).unwrap();
        ghost.missed(PageNumber(1));
        ghost.evicted(PageNumber(1));
        assert_eq!(
            ghost.resize(PageCount(5), PageCount(0)),
            Err(GhostError::NoGhost)
        );
        assert_eq!(
            (ghost.options(), ghost.references()),
            (options(5, 10, 1), 1)
        );
        assert_eq!(ghost.missed(PageNumber(1)), Some(0));
    }

    #[test]
    fn without_references_there_is_no_curve() {
        let mut lru = GhostLru::new(options(1, 1, 1)).unwrap();
        assert_eq!(lru.curve(), Err(CurveError::Empty));
        lru.observe(&[]);
        assert_eq!(lru.curve(), Err(CurveError::Empty));
        let mut ghost = GhostBuffer::new(options(1, 1, 1)).unwrap();
        assert_eq!(ghost.curve(), Err(CurveError::Empty));
        ghost.hits_in_cache(3);
        ghost.missed(PageNumber(5));
        assert_eq!(ghost.curve().unwrap().miss_ratio(PageCount(1)), 0.25);
        ghost.clear_counts();
        assert_eq!(ghost.curve(), Err(CurveError::Empty));
    }

    #[test]
    fn large_streams_agree_with_the_exact_curve_and_allocate_nothing() {
        let streams: [Vec<u64>; 6] = [
            zipf(40_000, 0.8, 1).take(400_000).collect(),
            uniform(20_000, 2).take(300_000).collect(),
            // Up and down again, at the upper end of the numbers.
            (0..20)
                .flat_map(|_| (0..9_000).chain((0..9_000).rev()))
                .map(|page| u64::MAX - page)
                .collect(),
            // Phases that share nothing.
            (0..10)
                .flat_map(|phase| {
                    uniform(8_000, phase)
                        .take(30_000)
                        .map(move |page| (page << 40) | (phase % 3))
                })
                .collect(),
            (0..200_000).collect(),
            cycle(16_001).take(200_000).collect(),
        ];
        for pages in streams {
            let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
            for sizes in [options(4_000, 12_000, 1_000), options(0, 7_000, 333)] {
                let mut ghost = GhostLru::new(sizes).unwrap();
                let bytes = ghost.memory_bytes();
                for batch in pages.chunks(7_777) {
                    ghost.observe(&batch_of(batch.iter().copied()));
                }
                assert_eq!(ghost.memory_bytes(), bytes);
                check(&ghost.curve().unwrap(), sizes, |size| {
                    exact.miss_ratio(PageCount(size))
                });
            }
        }
    }

    #[test]
    fn memory_is_fifty_three_bytes_a_page() {
        let pages = 100_000;
        let ghost = GhostLru::new(GhostOptions::new(PageCount(0), PageCount(pages))).unwrap();
        assert!((52..54).contains(&(ghost.memory_bytes() as u64 / pages)));
    }

    #[test]
    fn a_released_page_is_known_to_nobody() {
        let mut ghost = GhostBuffer::new(options(2, 8, 1)).unwrap();
        for page in [1, 2] {
            ghost.missed(PageNumber(page));
        }
        for (missed, evicted) in [(3, 1), (4, 2), (5, 3)] {
            assert_eq!(ghost.missed(PageNumber(missed)), None);
            ghost.evicted(PageNumber(evicted));
        }
        ghost.released(PageNumber(2));
        assert_eq!(ghost.remembered(), PageCount(2));
        // Page 1 is behind page 3 only.
        assert_eq!(ghost.missed(PageNumber(1)), Some(1));
        // Evicted from the cache: the next miss finds room.
        ghost.evicted(PageNumber(4));
        ghost.released(PageNumber(5));
        assert_eq!(ghost.missed(PageNumber(4)), Some(0));
        assert_eq!(ghost.segment_hits(), [0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(ghost.curve().unwrap().miss_ratio(PageCount(2)), 6.0 / 7.0);
    }

    proptest! {
        #[test]
        fn at_every_border_the_ratio_is_that_of_the_exact_stack(
            pages in prop_oneof![
                prop::collection::vec(0_u64..60, 1..1_500),
                prop::collection::vec(0_u64..600, 1..3_000),
            ],
            spread in prop_oneof![Just(1_u64), any::<u64>().prop_map(|n| n | 1)],
            (direct, ghost, segment) in (0_u64..80, 1_u64..200, 1_u64..30),
            batch in 1_usize..100,
        ) {
            let pages: Vec<_> = pages.iter().map(|page| page.wrapping_mul(spread)).collect();
            let sizes = options(direct, ghost, segment);
            let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
            let mut lru = GhostLru::new(sizes).unwrap();
            for batch in pages.chunks(batch) {
                lru.observe(&batch_of(batch.iter().copied()));
            }
            let curve = lru.curve().unwrap();
            check(&curve, sizes, |size| exact.miss_ratio(PageCount(size)));
            // The same with an external cache.
            let mut buffer = GhostBuffer::new(sizes).unwrap();
            let mut cache = Cache { size: as_index(direct), pages: VecDeque::new() };
            for &page in &pages {
                cache.touch(page, &mut buffer);
            }
            prop_assert_eq!(buffer.segment_hits(), lru.segment_hits());
            prop_assert_eq!(buffer.curve().unwrap(), curve);
            buffer.clear();
            let mut cache = Cache { size: as_index(direct), pages: VecDeque::new() };
            for &page in &pages {
                cache.touch(page, &mut buffer);
            }
            prop_assert_eq!(buffer.segment_hits(), lru.segment_hits());
        }

        #[test]
        fn every_segment_is_that_of_a_list(
            steps in prop::collection::vec((0_u64..40, 0..4), 1..600),
            (direct, ghost, segment) in (0_u64..20, 1_u64..30, 1_u64..6),
        ) {
            // A cache without any order.
            let mut buffer = GhostBuffer::new(options(direct, ghost, segment)).unwrap();
            buffer.set_cached(PageCount(direct));
            let mut list: Vec<u64> = Vec::new();
            for (page, step) in steps {
                let place = list.iter().position(|&other| other == page);
                if let Some(place) = place {
                    list.remove(place);
                }
                match step {
                    0 => {
                        buffer.set_cached(PageCount(direct));
                        let expected = place.map(|place| place / segment as usize);
                        prop_assert_eq!(buffer.missed(PageNumber(page)), expected);
                    }
                    1 => buffer.released(PageNumber(page)),
                    _ => {
                        buffer.evicted(PageNumber(page));
                        list.insert(0, page);
                        list.truncate(ghost as usize);
                    }
                }
                prop_assert_eq!(buffer.remembered(), PageCount(list.len() as u64));
            }
        }

        #[test]
        fn after_a_change_of_size_the_curve_is_of_what_came_since(
            before in prop::collection::vec(0_u64..80, 0..600),
            after in prop::collection::vec(0_u64..80, 1..600),
            sizes in (0_u64..40, 1_u64..50, 1_u64..12),
            (direct, ghost) in (0_u64..40, 1_u64..50),
        ) {
            let mut buffer = GhostBuffer::new(options(sizes.0, sizes.1, sizes.2)).unwrap();
            let mut cache = Cache { size: as_index(sizes.0), pages: VecDeque::new() };
            let mut stack = NaiveStack::default();
            for page in before {
                cache.touch(page, &mut buffer);
                stack.touch(page);
            }
            buffer.resize(PageCount(direct), PageCount(ghost)).unwrap();
            cache.shrink(as_index(direct), &mut buffer);
            let mut distances = Vec::new();
            for &page in &after {
                cache.touch(page, &mut buffer);
                distances.push(stack.touch(page));
            }
            prop_assert_eq!(buffer.references(), after.len() as u64);
            let curve = buffer.curve().unwrap();
            let truth = |size: u64| {
                let misses = distances.iter().filter(|d| d.is_none_or(|d| d >= size));
                misses.count() as f64 / after.len() as f64
            };
            for size in 0..direct + ghost + 10 {
                let (point, truth) = (curve.at(PageCount(size)), truth(size));
                prop_assert!(point.low <= truth && truth <= point.high, "{} {:?} {}", size, point, truth);
            }
            // A stack that only lost its end had complete information about the rest.
            if direct <= sizes.0 && direct + ghost <= sizes.0 + sizes.1 {
                for size in borders(buffer.options()).filter(|&size| size > 0) {
                    let point = curve.at(PageCount(size));
                    prop_assert_eq!((point.low, point.high), (truth(size), truth(size)));
                }
            }
        }

        #[test]
        fn depths_agree_with_a_list_of_the_standing_moments(
            strikes in prop::collection::vec(0_usize..150_000, 1..300),
        ) {
            let mut depths = Depths::new(150_000, 0).unwrap();
            let mut struck = std::collections::BTreeSet::new();
            for time in strikes {
                if struck.insert(time) {
                    depths.strike(time);
                }
                for at in [time, 0, 63, 64, 2_047, 2_048, 65_535, 65_536, 149_999] {
                    let marked = at - struck.range(..at).count();
                    prop_assert_eq!(depths.marked_before(at) as usize, marked);
                }
                let next = (time..).find(|next| !struck.contains(next)).unwrap();
                prop_assert_eq!(depths.next_marked(time), next);
            }
        }
    }
}
