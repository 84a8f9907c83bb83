//! Exact LRU of a stream whose most recently used pages were filtered out during recording.
//!
//! A recorder tracks the `filter` pages that a processor used most recently, in LRU order, and records only when a page
//! enters this set and when another leaves it. A reference to a page in the set is only counted. This is sufficient for
//! all sizes from the filter's size up: pages leave in the order of their last use, so below the filter the LRU stack
//! consists of the pages outside in the order of leaving, and a page that enters has before it all pages in the filter
//! and those outside that left after it. Misses of a memory of `filter` pages or more are the same as of the whole
//! stream.
//!
//! With several processors each has a filter, and a page is outside when it has left all filters that it was in. The
//! order of leaving is then not exactly that of last use, and depths are off by less than the pages of all filters: the
//! curve begins at their sum.
//!
//! Source: [Mattson70] for the stack, [Olken81] for counting in it (`access_tree`). Cost: O(log pages) per record; 40
//! bytes for each page ever recorded. Not here: the filter itself; sizes below it, where the curve is 1 with a band
//! down to the ratio at the filter's size.

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount, PageNumber};

use crate::curve::lru::times_for;
use crate::parts::access_tree::AccessTree;
use crate::parts::hash::{PageMap, page_map};

/// Minimum number of times of a stack, so that a small one is not renumbered constantly.
const TIMES_MIN: usize = 512;

/// Position of a page.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// In the filters of this number of processors.
    Filter(u32),
    /// Outside since this time.
    Outside(u32),
}

/// Exact LRU estimator that is fed with the records of the filters.
///
/// ```
/// use plimsoll_estimator::FilteredLru;
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// // A loop over three pages behind a filter of one: every reference enters, and the one before leaves.
/// let mut lru = FilteredLru::new(PageCount(1));
/// for n in 0..300_u64 {
///     lru.enter(PageNumber(n % 3));
///     if let Some(before) = n.checked_sub(1) {
///         lru.leave(PageNumber(before % 3));
///     }
/// }
/// lru.accesses(3_000); // Each page was used ten times in a row.
/// let curve = lru.curve()?;
/// assert_eq!(curve.miss_ratio(PageCount(2)), 0.1);
/// assert_eq!(curve.miss_ratio(PageCount(3)), 0.001);
/// # Ok::<(), plimsoll_flow::CurveError>(())
/// ```
#[derive(Debug, Clone)]
pub struct FilteredLru {
    filter: PageCount,
    pages: PageMap<Place>,
    /// Number of pages in filters.
    held: usize,
    /// Pages outside, in the order of leaving.
    outside: AccessTree,
    reuses: Vec<u64>,
    /// Number of records of a page that entered.
    entered: u64,
    accesses: u64,
    /// Number of pages in the stack when counting began.
    known: u64,
    /// Number of records that contradict earlier ones.
    contradictions: u64,
}

impl FilteredLru {
    /// Returns an estimator behind filters with `filter` pages in total.
    pub fn new(filter: PageCount) -> Self {
        Self {
            filter,
            pages: page_map(),
            held: 0,
            outside: AccessTree::new(TIMES_MIN, 0),
            reuses: Vec::new(),
            entered: 0,
            accesses: 0,
            known: 0,
            contradictions: 0,
        }
    }

    /// Records a page that enters a processor's filter: a reference. The record of the page that makes room may come
    /// before or after this one.
    pub fn enter(&mut self, page: PageNumber) {
        self.entered += 1;
        match self.pages.insert(page, Place::Filter(1)) {
            None => self.held += 1,
            Some(Place::Outside(time)) => {
                let after = self.outside.remove(time as usize);
                let distance = self.held + after;
                if distance >= self.reuses.len() {
                    self.reuses.resize(distance + 1, 0);
                }
                self.reuses[distance] += 1;
                self.held += 1;
            }
            // Another processor's filter contains it: a hit at all sizes from the filters' up.
            Some(Place::Filter(filters)) => {
                self.pages
                    .insert(page, Place::Filter(filters.saturating_add(1)));
            }
        }
    }

    /// Records a page that leaves a processor's filter. If the page was in no filter, which is possible in a recording
    /// that begins in the middle, the record is only counted.
    ///
    /// # Panics
    ///
    /// At 2^32 pages, which take 160 GB of memory before.
    pub fn leave(&mut self, page: PageNumber) {
        match self.pages.get(&page) {
            Some(&Place::Filter(filters)) if filters > 1 => {
                self.pages.insert(page, Place::Filter(filters - 1));
            }
            Some(Place::Filter(_)) => {
                if self.outside.room() == 0 {
                    self.number_anew();
                }
                let time = u32::try_from(self.outside.next()).expect("times are below 2^32");
                self.outside.take(1);
                self.held -= 1;
                self.pages.insert(page, Place::Outside(time));
            }
            Some(Place::Outside(_)) | None => self.contradictions += 1,
        }
    }

    /// Adds to the number of references made, including those that entered a filter.
    pub fn accesses(&mut self, count: u64) {
        self.accesses = self.accesses.saturating_add(count);
    }

    /// Number of references: as counted, or those that entered if these are more.
    pub fn references(&self) -> u64 {
        self.accesses.max(self.entered)
    }

    /// Number of distinct pages ever referenced.
    pub fn distinct(&self) -> PageCount {
        PageCount(self.pages.len() as u64)
    }

    /// Number of pages recorded as leaving that were in no filter.
    pub fn contradictions(&self) -> u64 {
        self.contradictions
    }

    /// Number of references that miss in a memory of `size` pages, at least the filters' sum; first references miss.
    pub fn misses(&self, size: PageCount) -> u64 {
        let first = self.pages.len() as u64 - self.known;
        let from = usize::try_from(size.0).unwrap_or(usize::MAX);
        first + self.reuses.iter().skip(from).sum::<u64>()
    }

    /// Returns the curve of everything recorded so far.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if there was no reference.
    pub fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        let references = self.references();
        let ratio = |misses: u64| misses as f64 / references.max(1) as f64;
        let mut misses = self.misses(self.filter);
        let below = CurvePoint {
            low: ratio(misses),
            ..CurvePoint::exact(PageCount(0), 1.0)
        };
        let mut points = Vec::new();
        if self.filter.0 > 0 {
            points.push(below);
        }
        points.push(CurvePoint::exact(self.filter, ratio(misses)));
        let from = usize::try_from(self.filter.0).unwrap_or(usize::MAX);
        for (distance, &reuses) in self.reuses.iter().enumerate().skip(from) {
            if reuses > 0 {
                misses -= reuses;
                let size = PageCount(distance as u64 + 1);
                points.push(CurvePoint::exact(size, ratio(misses)));
            }
        }
        MissRatioCurve::new(points, references)
    }

    /// Returns the curve of only those references that miss in a memory of the filters' size and are not first ones;
    /// `None` if there were none.
    ///
    /// Above the filters' size it is therefore comparable with a trace by traps, whose hot set hides the same
    /// references.
    pub fn curve_past_filter(&self) -> Option<MissRatioCurve> {
        let from = usize::try_from(self.filter.0).unwrap_or(usize::MAX);
        let all: u64 = self.reuses.iter().skip(from).sum();
        let mut misses = all;
        let mut points = vec![CurvePoint::exact(self.filter, 1.0)];
        for (distance, &reuses) in self.reuses.iter().enumerate().skip(from) {
            if reuses > 0 {
                misses -= reuses;
                let size = PageCount(distance as u64 + 1);
                points.push(CurvePoint::exact(size, misses as f64 / all as f64));
            }
        }
        MissRatioCurve::new(points, all).ok()
    }

    /// Resets the counts and keeps the stack, so that a later reference to a page used before is not a first
    /// reference.
    pub fn clear_counts(&mut self) {
        self.reuses.clear();
        self.entered = 0;
        self.accesses = 0;
        self.known = self.pages.len() as u64;
    }

    /// Bytes of heap allocated now.
    pub fn memory_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<(PageNumber, Place)>()
            + self.outside.memory_bytes()
            + self.reuses.capacity() * size_of::<u64>()
    }

    fn number_anew(&mut self) {
        let times = self.pages.values_mut().filter_map(|place| match place {
            Place::Outside(time) => Some(time),
            Place::Filter(_) => None,
        });
        self.outside.number(times);
        let pages = self.outside.marked();
        self.outside.reset(times_for(pages, 1), pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::naive::NaiveStack;
    use proptest::prelude::*;

    /// An LRU filter in front of a processor.
    #[derive(Default)]
    struct Filter {
        stack: NaiveStack,
        pages: usize,
    }

    impl Filter {
        fn access(&mut self, page: u64, leave_first: bool, lru: &mut FilteredLru) {
            let held = self.stack.top(self.pages).to_vec();
            self.stack.touch(page);
            if !held.contains(&page) {
                let leaves = (held.len() == self.pages).then(|| PageNumber(held[held.len() - 1]));
                if let Some(page) = leaves.filter(|_| leave_first) {
                    lru.leave(page);
                }
                lru.enter(PageNumber(page));
                if let Some(page) = leaves.filter(|_| !leave_first) {
                    lru.leave(page);
                }
            }
            lru.accesses(1);
        }
    }

    proptest! {
        #[test]
        fn counted_from_the_middle_misses_are_the_whole_streams_less_those_before(
            pages in prop::collection::vec(0_u64..60, 2..2_000),
            middle in 0.0..1.0_f64,
        ) {
            let mut filter = Filter { pages: 8, ..Filter::default() };
            let mut lru = FilteredLru::new(PageCount(8));
            let middle = (middle * pages.len() as f64) as usize;
            for (at, &page) in pages.iter().enumerate() {
                if at == middle {
                    lru.clear_counts();
                }
                filter.access(page, true, &mut lru);
            }
            for size in 8..70 {
                let expected = NaiveStack::misses(&pages, size) - NaiveStack::misses(&pages[..middle], size);
                prop_assert_eq!(lru.misses(PageCount(size as u64)), expected as u64, "{}", size);
            }
            prop_assert_eq!(lru.references(), (pages.len() - middle) as u64);
        }

        #[test]
        fn misses_at_every_size_from_the_filters_up_are_those_of_the_whole_stream(
            pages in prop_oneof![
                prop::collection::vec(0_u64..60, 1..3_000),
                prop::collection::vec(0_u64..700, 1..3_000),
            ],
            filter_pages in 1_usize..12,
            leave_first: bool,
        ) {
            let mut filter = Filter { pages: filter_pages, ..Filter::default() };
            let mut lru = FilteredLru::new(PageCount(filter_pages as u64));
            for &page in &pages {
                filter.access(page, leave_first, &mut lru);
            }
            let curve = lru.curve().unwrap();
            for size in (filter_pages..70).chain([100, 300, 699, 700, 5_000]) {
                let expected = NaiveStack::misses(&pages, size);
                prop_assert_eq!(lru.misses(PageCount(size as u64)), expected as u64, "{}", size);
                let ratio = curve.miss_ratio(PageCount(size as u64));
                prop_assert!((ratio - expected as f64 / pages.len() as f64).abs() < 1e-12);
            }
            prop_assert_eq!(lru.contradictions(), 0);
        }

        #[test]
        fn any_records_make_a_curve(
            records in prop::collection::vec((0_u64..20, any::<bool>()), 1..500),
            accesses in prop_oneof![Just(0), Just(u64::MAX), 0_u64..1_000],
        ) {
            let mut lru = FilteredLru::new(PageCount(4));
            let entered = records.iter().filter(|(_, enter)| *enter).count() as u64;
            for (page, enter) in records {
                if enter {
                    lru.enter(PageNumber(page));
                } else {
                    lru.leave(PageNumber(page));
                }
            }
            lru.accesses(accesses);
            lru.accesses(accesses);
            prop_assert_eq!(lru.curve().is_ok(), entered > 0 || accesses > 0);
        }
    }

    #[test]
    fn filters_of_two_processors_blur_less_than_their_pages() {
        let mut filters = [(); 2].map(|()| Filter {
            pages: 4,
            ..Filter::default()
        });
        let mut lru = FilteredLru::new(PageCount(8));
        let pages: Vec<u64> = (0..40_u64).cycle().take(8_000).collect();
        for (n, &page) in pages.iter().enumerate() {
            filters[n / 3 % 2].access(page, false, &mut lru);
        }
        let curve = lru.curve().unwrap();
        assert_eq!(curve.miss_ratio(PageCount(32)), 1.0);
        assert_eq!(curve.miss_ratio(PageCount(48)), 40.0 / 8_000.0);
    }

    #[test]
    fn below_the_filter_only_the_band_says_anything() {
        let mut lru = FilteredLru::new(PageCount(64));
        lru.enter(PageNumber(1));
        lru.accesses(10);
        let curve = lru.curve().unwrap();
        let point = curve.at(PageCount(63));
        assert_eq!((point.low, point.miss_ratio, point.high), (0.1, 1.0, 1.0));
        assert_eq!(curve.miss_ratio(PageCount(64)), 0.1);
    }

    #[test]
    fn past_the_filter_only_repeated_references_that_reach_it_count() {
        let mut filter = Filter {
            pages: 4,
            ..Filter::default()
        };
        let mut lru = FilteredLru::new(PageCount(4));
        assert_eq!(lru.curve_past_filter(), None);
        for page in (0..10).cycle().take(30) {
            filter.access(page, false, &mut lru);
        }
        // Three more from ten pages below the top, hits in the filter, and one from five below.
        for page in (90..100).chain((90..93).cycle().take(500)).chain([98]) {
            filter.access(page, false, &mut lru);
        }
        let curve = lru.curve_past_filter().unwrap();
        assert_eq!(curve.references(), 24);
        let ratios = [4, 5, 9, 10].map(|size| curve.miss_ratio(PageCount(size)));
        assert_eq!(ratios, [1.0, 23.0 / 24.0, 23.0 / 24.0, 0.0]);
        assert_eq!(curve.size_for(0.05), Some(PageCount(10)));
    }

    #[test]
    fn without_references_there_is_no_curve() {
        assert_eq!(
            FilteredLru::new(PageCount(64)).curve(),
            Err(CurveError::Empty)
        );
    }
}
