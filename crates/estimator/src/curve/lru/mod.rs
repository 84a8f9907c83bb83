//! Exact LRU stack distances, online; the reference for every other estimator here.
//!
//! A reference hits in an LRU memory of `c` pages exactly when fewer than `c`
//! other pages were accessed since the page's last reference, so one pass over
//! the stream yields the answer for every `c` at once.
//!
//! Instead of moving pages in a list, each page has the timestamp of its last access; its
//! depth in the stack is the number of other pages' timestamps after it
//! ([Olken81], with bits for the leaves of the tree, `access_tree`). When
//! the timestamps are used up, those still valid are renumbered from 0 in their order. Then at
//! least three timestamps per page are free, so renumbering costs O(1) per reference.
//!
//! References are processed in blocks, in three passes: the table yields each page's last access, the bit vector of
//! timestamps the number of pages accessed since, and the distances are counted. In each pass
//! the addresses are known in advance, so cache misses overlap.
//!
//! Bounds: at a million pages in random order, half of the time is spent in the table (one cache line per
//! reference), a quarter in the bit vector (five lines in the caches, in a chain of stores and loads), a sixth in counting
//! distances (in 8 MiB). At 64 thousand pages all of these are in the caches, and the bit vector takes half.
//!
//! Source: [Mattson70] for stack distances, [Olken81] for counting them in a tree.
//! Cost: O(log pages) per reference; 17 to 25 bytes per page, and 8 for each possible distance.
//! Not here: sampling (`shards`, `window`), several processors (`parallel`), parts of a stream
//! that are merged later (`slice`).

mod filtered;
mod parallel;
mod prefix;
mod slice;

pub use filtered::FilteredLru;
pub use parallel::ParallelLru;
pub use prefix::PrefixLru;
pub(crate) use slice::LruSlice;

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use crate::estimator::Estimator;
use crate::parts::access_tree::AccessTree;
use crate::parts::last_use::{LastUse, NEVER};
use crate::parts::steps::Steps;
use crate::parts::sys;

/// The pages of a stream in the order of their last use.
///
/// ```
/// use plimsoll_estimator::LruStack;
/// use plimsoll_flow::PageNumber;
///
/// let mut stack = LruStack::new();
/// let distances = [7, 8, 8, 7].map(|page| stack.touch(PageNumber(page)));
/// assert_eq!(distances, [None, None, Some(0), Some(1)]);
/// ```
#[derive(Debug, Clone)]
pub struct LruStack {
    last_use: LastUse,
    times: AccessTree,
    /// Last accesses of the current pages; a work buffer.
    before: Vec<u32>,
}

/// References processed at once: enough for cache misses to overlap, few enough for the first-level cache.
pub(crate) const BLOCK: usize = 2048;

/// Minimum number of times of a stack, so that a small one is not renumbered constantly.
const TIMES_MIN: usize = 512;

/// Times per page after renumbering: three of four are free.
const TIMES_PER_PAGE: usize = 4;

/// Returns the number of times after renumbering `pages`, more than `room` of them free.
///
/// # Panics
///
/// At 2^32 pages, which would already take 100 GB of memory.
pub(crate) fn times_for(pages: usize, room: usize) -> usize {
    let most = NEVER as usize - 1023;
    let times = (pages * TIMES_PER_PAGE).max(pages + 2 * room).min(most);
    assert!(times - room >= pages, "more than 2^32 pages");
    times.max(TIMES_MIN)
}

impl LruStack {
    /// Returns an empty stack.
    pub fn new() -> Self {
        Self {
            last_use: LastUse::new(),
            times: AccessTree::new(TIMES_MIN, 0),
            before: Vec::new(),
        }
    }

    /// Moves a page to the top. Returns its reuse distance: the number of *other*
    /// pages touched since its last access, or `None` if there was none.
    ///
    /// # Panics
    ///
    /// At 2^32 pages, which would already take 100 GB of memory.
    pub fn touch(&mut self, page: PageNumber) -> Option<u64> {
        if self.times.room() == 0 {
            self.number_anew();
        }
        let now = self.times.next() as u64;
        match self.last_use.replace(page, now) {
            Some(before) => {
                let before = usize::try_from(before).expect("times are below 2^32");
                Some(self.times.replace_one(before) as u64)
            }
            None => {
                self.times.take(1);
                None
            }
        }
    }

    /// Touches the first pages of the slice in turn, up to a block; appends the reuse
    /// distance of each to `distances`, [`NEVER`] for a page not touched before. Returns the remaining pages.
    pub(crate) fn touch_block<'a>(
        &mut self,
        pages: &'a [PageNumber],
        distances: &mut Vec<u32>,
    ) -> &'a [PageNumber] {
        if self.times.room() == 0 {
            self.number_anew();
        }
        let block = pages.len().min(BLOCK).min(self.times.room());
        let (block, rest) = pages.split_at(block);
        let now = u32::try_from(self.times.next()).expect("times are below 2^32");
        self.last_use.replace_batch(block, now, &mut self.before);
        self.times.replace(&self.before, distances);
        rest
    }

    /// All pages in the order of their last use, the earliest first.
    pub(crate) fn in_order(&self) -> Vec<PageNumber> {
        let mut uses: Vec<_> = self.last_use.uses().collect();
        uses.sort_unstable();
        uses.into_iter().map(|(_, page)| page).collect()
    }

    /// Number of distinct pages ever touched.
    pub fn distinct(&self) -> u64 {
        self.times.marked() as u64
    }

    /// Removes all pages, keeping the memory for later ones.
    pub fn clear(&mut self) {
        self.last_use.clear();
        self.times.reset(TIMES_MIN, 0);
    }

    /// Bytes of heap allocated now.
    pub(crate) fn memory_bytes(&self) -> usize {
        let before = self.before.capacity() * size_of::<u32>();
        self.last_use.memory_bytes() + self.times.memory_bytes() + before
    }

    fn number_anew(&mut self) {
        self.times.number(self.last_use.times_mut());
        let pages = self.times.marked();
        self.times.reset(times_for(pages, 1), pages);
    }
}

impl Default for LruStack {
    fn default() -> Self {
        Self::new()
    }
}

/// The exact miss-ratio curve of an LRU memory; first references miss at every size.
///
/// ```
/// use plimsoll_estimator::{Estimator, ExactLru};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let pages: Vec<_> = (0..4).cycle().take(400).map(PageNumber).collect();
/// let mut lru = ExactLru::new();
/// lru.observe(&pages);
/// let curve = lru.curve()?;
/// assert_eq!(curve.miss_ratio(PageCount(3)), 1.0);
/// assert_eq!(curve.miss_ratio(PageCount(4)), 0.01); // 4 first references of 400
/// # Ok::<(), plimsoll_flow::CurveError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ExactLru {
    stack: LruStack,
    distances: Distances,
    /// Distances of the current block; a work buffer.
    block: Vec<u32>,
}

impl ExactLru {
    /// Returns an estimator without observations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of distinct pages referenced.
    pub fn distinct(&self) -> u64 {
        self.stack.distinct()
    }

    /// The references so far by distance, of which the curve is made.
    pub(crate) fn distances(&self) -> &Distances {
        &self.distances
    }
}

impl Estimator for ExactLru {
    fn observe(&mut self, mut pages: &[PageNumber]) {
        while !pages.is_empty() {
            pages = self.stack.touch_block(pages, &mut self.block);
            self.distances.count(&self.block);
        }
    }

    fn memory_bytes(&self) -> usize {
        let block = self.block.capacity() * size_of::<u32>();
        self.stack.memory_bytes() + self.distances.memory_bytes() + block
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        self.distances.curve()
    }
}

/// References counted by reuse distance.
#[derive(Debug, Clone, Default)]
pub(crate) struct Distances {
    reuses: Vec<u64>,
    references: u64,
}

impl Distances {
    /// Counts one reference per entry; [`NEVER`] for a first reference.
    pub(crate) fn count(&mut self, distances: &[u32]) {
        self.references += distances.len() as u64;
        // First references become 0 here and do not affect the maximum.
        let largest = distances.iter().map(|&d| d.wrapping_add(1)).max();
        let distances_needed = largest.unwrap_or(0) as usize;
        if distances_needed > self.reuses.len() {
            self.lengthen(distances_needed);
        }
        let reuses = &mut self.reuses[..];
        for &distance in distances {
            if distance != NEVER {
                let reuses = &mut reuses[distance as usize];
                *reuses = reuses.wrapping_add(1);
            }
        }
    }

    #[cold]
    fn lengthen(&mut self, distances: usize) {
        self.reuses.resize(distances, 0);
        sys::advise_huge(&mut self.reuses);
    }

    /// Adds reuses that were counted by distance.
    fn add_reuses(&mut self, reuses: &[u64]) {
        self.add(&Self {
            reuses: reuses.to_vec(),
            references: reuses.iter().sum(),
        });
    }

    /// Adds the counts of another histogram.
    pub(crate) fn add(&mut self, other: &Self) {
        self.references += other.references;
        if self.reuses.len() < other.reuses.len() {
            self.lengthen(other.reuses.len());
        }
        for (reuses, other) in self.reuses.iter_mut().zip(&other.reuses) {
            *reuses += other;
        }
    }

    /// # Errors
    ///
    /// [`CurveError::Empty`] if nothing was counted.
    pub(crate) fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        let mut steps = Steps::new();
        let mut misses = self.references;
        for (size, reuses) in (1..).zip(&self.reuses) {
            misses -= reuses;
            steps.down_to(size, misses as f64 / self.references as f64, 0.0);
        }
        steps.into_curve(self.references)
    }

    /// Bytes of heap allocated now.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.reuses.capacity() * size_of::<u64>()
    }
}

/// Counts a reuse in a list by distance. The list grows up to the largest distance,
/// which is less than the number of pages.
pub(crate) fn count_reuse(reuses: &mut Vec<u64>, distance: u64) {
    let distance = usize::try_from(distance).expect("a distance counts pages in memory");
    if distance >= reuses.len() {
        reuses.resize(distance + 1, 0);
    }
    reuses[distance] += 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::naive::NaiveStack;
    use crate::parts::streams::{batch_of, curve_of};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;

    fn exact(pages: impl IntoIterator<Item = u64>) -> MissRatioCurve {
        curve_of(&mut ExactLru::new(), pages)
    }

    #[test]
    fn a_loop_one_page_larger_than_the_memory_misses_always() {
        for pages in [1, 2, 63, 64, 65, 511, 512, 513, 5_000] {
            let curve = exact((0..pages).cycle().take(100 * pages as usize));
            if pages > 1 {
                assert_eq!(curve.miss_ratio(PageCount(pages - 1)), 1.0);
            }
            assert_eq!(curve.miss_ratio(PageCount(pages)), 0.01);
            assert_eq!(curve.miss_ratio(PageCount(u64::MAX)), 0.01);
        }
    }

    #[test]
    fn a_memory_without_pages_misses_always() {
        assert_eq!(exact([5, 5, 5, 5]).miss_ratio(PageCount(0)), 1.0);
        assert_eq!(exact([5, 5, 5, 5]).miss_ratio(PageCount(1)), 0.25);
    }

    #[test]
    fn pages_never_used_again_miss_at_every_size() {
        let curve = exact(0..1_000);
        assert_eq!(curve.miss_ratio(PageCount(1_000)), 1.0);
        assert_eq!(curve.references(), 1_000);
    }

    #[test]
    fn without_references_there_is_no_curve() {
        assert_eq!(ExactLru::new().curve(), Err(CurveError::Empty));
        let mut lru = ExactLru::new();
        lru.observe(&[]);
        assert_eq!(lru.curve(), Err(CurveError::Empty));
    }

    #[test]
    fn a_cleared_stack_is_a_new_one() {
        let mut stack = LruStack::new();
        for page in (0..3_000).chain(0..3_000) {
            stack.touch(PageNumber(page));
        }
        stack.clear();
        assert_eq!(stack.distinct(), 0);
        assert_eq!(stack.touch(PageNumber(5)), None);
        assert_eq!(stack.touch(PageNumber(5)), Some(0));
    }

    #[test]
    fn page_numbers_far_apart_are_pages_like_any_other() {
        let mut stack = LruStack::new();
        let pages: Vec<_> = (0..64).map(|bit| PageNumber(1 << bit)).collect();
        for &page in &pages {
            assert_eq!(stack.touch(page), None);
        }
        for &page in &pages {
            assert_eq!(stack.touch(page), Some(63));
        }
    }

    proptest! {
        #[test]
        fn every_distance_agrees_with_a_list_moved_to_the_front(
            // References to up to 40 pages use up the times many times;
            // references to up to 700 pages several times, with full blocks marked.
            pages in prop_oneof![
                prop::collection::vec(0_u64..40, 1..4_000),
                prop::collection::vec(0_u64..700, 1..6_000),
            ],
            spread in prop_oneof![Just(1_u64), Just(1 << 12), any::<u64>().prop_map(|n| n | 1)],
        ) {
            let (mut stack, mut naive) = (LruStack::new(), NaiveStack::default());
            for page in pages {
                let page = page.wrapping_mul(spread);
                prop_assert_eq!(stack.touch(PageNumber(page)), naive.touch(page));
            }
        }

        #[test]
        fn the_curve_agrees_with_running_the_memory(
            pages in prop::collection::vec(0_u64..48, 1..400),
            size in 0_usize..64,
        ) {
            let expected = NaiveStack::misses(&pages, size) as f64 / pages.len() as f64;
            let found = exact(pages).miss_ratio(PageCount(size as u64));
            prop_assert!((found - expected).abs() < 1e-12);
        }

        #[test]
        fn batches_do_not_matter(
            pages in prop::collection::vec(0_u64..48, 1..400),
            cut in any::<prop::sample::Index>(),
        ) {
            let (head, tail) = pages.split_at(cut.index(pages.len()));
            let mut lru = ExactLru::new();
            lru.observe(&batch_of(head.iter().copied()));
            lru.observe(&batch_of(tail.iter().copied()));
            prop_assert_eq!(lru.curve(), Ok(exact(pages)));
        }
    }
}
