//! Ghost list: the misses of a real cache that more memory would have avoided.
//!
//! Behind a cache of `direct` pages, a list holds the pages it evicted, most recent first,
//! without their contents. A miss whose page is at depth `d` of that list would have been a hit
//! in a cache of `direct + d + 1` pages, if both cache and list are in LRU order: together
//! they form one LRU stack. Hits are counted by *segment* of the list, which
//! gives the miss-ratio curve at `direct`, `direct + segment`, .. up to the list's end.
//!
//! **Which segment.** The usual way keeps a marker at the border of every segment, and each miss that
//! is not found moves all of them: O(segments). Here no border is kept. Every page that enters takes the
//! next *timestamp*, a bit that is set until the page leaves; a page's depth is the number of
//! bits after its own. Unused bits are set as well and are never before
//! a used one, so entering costs only the next number; leaving subtracts one from every later sum
//! within its node on each level of a tree of 32 children a node: a few vector additions, whatever the depth. Depths
//! are exact, so at every border of a segment the curve is exact too. (No list that answers for
//! exact depths can be O(1): Fredman and Saks 1989. Four levels suffice for a million pages.) When
//! the timestamps are used up, those set are renumbered: O(1) per reference, amortised.
//!
//! **Uncertainty** is in the band. Below `direct` the curve is 1, with a band down to the
//! ratio at `direct`. Within a segment it is the ratio on the left, with a band down to that on
//! the right. Beyond the list it is the last ratio, with a band down to the share of
//! references that are certainly first ones: those made before any page fell off the list's end.
//!
//! Source: [LS07] §4.1 for counts by segment behind a memory, [Patterson95] and [Jones06] for the ghost
//! buffer itself. Departs in how the segment is found.
//! Cost: O(levels of the tree), and of a sum for every 2^20 pages, a reference with one trip to memory for the page, two for a page that falls off the end; 53
//! bytes a page, all of it allocated at the start.
//! Not here: the cache and its contents; memories smaller than the direct one (`lru`, `shards`).

use plimsoll_flow::{
    CurveError, CurvePoint, MissRatioCurve, PageCount, PageNumber, ReferenceBatch,
};

use crate::Estimator;
use crate::hash::PageHash;
use crate::sys;

/// The sizes of a ghost buffer, in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GhostOptions {
    /// Size of the cache in front, when full. The curve begins there.
    pub direct: PageCount,
    /// How many evicted pages are remembered, at least 1. The curve ends at `direct + ghost`.
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

/// Why a ghost buffer was not built or not resized. One that was there before is as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GhostError {
    /// Nothing to remember evicted pages in.
    #[error("a ghost list must have at least one page")]
    NoGhost,
    /// Segments that never end.
    #[error("a segment must have at least one page")]
    NoSegment,
    /// More pages than 32 bits number.
    #[error("{pages} pages exceed the maximum of {max}")]
    TooLarge {
        /// Pages that were to be kept in order.
        pages: PageCount,
        /// The most there can be.
        max: PageCount,
    },
    /// The host does not give as much.
    #[error("out of memory for a list of {pages} pages")]
    NoMemory {
        /// Pages that were to be kept in order.
        pages: PageCount,
    },
}

/// The most pages that one buffer keeps in order.
const PAGES_MAX: u64 = 1 << 30;

/// The ghost buffer behind a real cache, which reports what it does.
///
/// The cache calls [`hit_in_cache`](Self::hit_in_cache) for a hit; for a miss
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
    /// Pages in the cache, by its own reports.
    cached: u64,
}

impl GhostBuffer {
    /// Returns an empty buffer behind an empty cache. All memory is allocated here.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if the sizes are none, or the host has no memory for them.
    pub fn new(options: GhostOptions) -> Result<Self, GhostError> {
        let counts = Counts::new(options)?;
        Ok(Self {
            order: Recency::new(options.ghost.0)?,
            counts,
            cached: 0,
        })
    }

    /// A reference hit in the cache.
    pub fn hit_in_cache(&mut self) {
        self.hits_in_cache(1);
    }

    /// So many references hit in the cache.
    pub fn hits_in_cache(&mut self, hits: u64) {
        self.counts.hits += hits;
    }

    /// A reference missed, and its page enters the cache. Returns the segment of the ghost, from 0, that
    /// remembered it, and forgets it there; `None` if none did.
    ///
    /// To be called before the page's arrival evicts another: the depth is counted from the
    /// cache as it was when the reference missed.
    pub fn missed(&mut self, page: PageNumber) -> Option<usize> {
        let below = self.cached;
        self.cached = below.saturating_add(1);
        match self.order.remove(page) {
            Some(depth) => Some(self.counts.found(below.saturating_add(depth))),
            None => {
                let reach = below.saturating_add(self.order.len());
                self.counts.not_found(reach, self.order.has_dropped());
                None
            }
        }
    }

    /// The cache evicted a page. It enters the ghost as the most recent one; the oldest may fall off.
    pub fn evicted(&mut self, page: PageNumber) {
        self.cached = self.cached.saturating_sub(1);
        self.order.touch(page);
    }

    /// A page is no longer of use to anybody (freed, overwritten): it is taken out of the ghost or, if
    /// it is not there, was in the cache.
    pub fn released(&mut self, page: PageNumber) {
        if self.order.remove(page).is_none() {
            self.cached = self.cached.saturating_sub(1);
        }
    }

    /// Says how many pages the cache holds now, if it was not empty at the start or did not report everything.
    pub fn set_cached(&mut self, pages: PageCount) {
        self.cached = pages.0;
    }

    /// Changes the size of the cache in front and of the ghost.
    ///
    /// Pages stay, the oldest falling off a smaller ghost; what the cache evicts or takes in
    /// because of its new size it reports as always. Counts begin anew, since a curve is
    /// that of one size: take it before. A ghost that grew after pages had fallen off
    /// does not know the depths from there to its new end until it has filled; the curve's band says so.
    ///
    /// # Errors
    ///
    /// [`GhostError`], and everything is as before.
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

    /// Forgets all counts and keeps the pages: the next curve is that of the references from here on.
    pub fn clear_counts(&mut self) {
        self.counts.clear();
    }

    /// Forgets all pages and counts; the cache is taken to be empty. Keeps the memory.
    pub fn clear(&mut self) {
        self.order.clear();
        self.counts.clear();
        self.cached = 0;
    }

    /// The sizes.
    #[must_use]
    pub fn options(&self) -> GhostOptions {
        self.counts.options
    }

    /// How many pages are remembered.
    #[must_use]
    pub fn remembered(&self) -> PageCount {
        PageCount(self.order.len())
    }

    /// References counted: hits in the cache and misses.
    #[must_use]
    pub fn references(&self) -> u64 {
        self.counts.references()
    }

    /// Misses that a cache larger by `segment * (index + 1)` pages would have saved and one by `segment * index` not.
    #[must_use]
    pub fn segment_hits(&self) -> &[u64] {
        self.counts.segment_hits()
    }

    /// Returns the curve of everything counted, from the direct size upward.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if nothing was.
    pub fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        self.counts.curve()
    }

    /// Bytes of heap held, all of them since the start.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.order.memory_bytes() + self.counts.memory_bytes()
    }
}

/// The ghost buffer behind an LRU memory that is simulated as well: an estimator of a whole stream.
///
/// Memory and ghost are one LRU stack of `direct + ghost` pages.
#[derive(Debug, Clone)]
pub struct GhostLru {
    stack: Recency,
    counts: Counts,
}

impl GhostLru {
    /// Returns an empty memory with an empty ghost. All memory is allocated here.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if the sizes are none, or the host has no memory for them.
    pub fn new(options: GhostOptions) -> Result<Self, GhostError> {
        let counts = Counts::new(options)?;
        let pages = options.direct.0.saturating_add(options.ghost.0);
        Ok(Self {
            stack: Recency::new(pages)?,
            counts,
        })
    }

    /// Misses of the memory that one larger by `segment * (index + 1)` pages would have saved and one by `segment * index` not.
    #[must_use]
    pub fn segment_hits(&self) -> &[u64] {
        self.counts.segment_hits()
    }
}

impl Estimator for GhostLru {
    fn observe(&mut self, batch: &ReferenceBatch) {
        let (stack, counts) = (&mut self.stack, &mut self.counts);
        stack.touch_all(batch.pages(), |depth, reach, has_dropped| match depth {
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
}

/// References by where in cache and ghost their page was.
///
/// The sizes told apart are the *borders*: `direct`, `direct + segment`, .. `direct + ghost`.
#[derive(Debug, Clone)]
struct Counts {
    options: GhostOptions,
    /// Found at a depth below `direct`: hits at every border.
    hits: u64,
    /// Found in a segment: hits from the border at its end on.
    found: Vec<u64>,
    /// Found beyond the last border, by a cache that held more than `direct`.
    beyond: u64,
    /// Not found before anything was dropped: misses at every size.
    first: u64,
    /// Not found, by the number of borders that the list reached: misses at these, unknown at the others.
    lost: Vec<u64>,
}

impl Counts {
    fn new(options: GhostOptions) -> Result<Self, GhostError> {
        let GhostOptions {
            direct,
            ghost,
            segment,
        } = options;
        if ghost.0 == 0 {
            return Err(GhostError::NoGhost);
        }
        if segment.0 == 0 {
            return Err(GhostError::NoSegment);
        }
        let pages = direct.0.saturating_add(ghost.0);
        check_pages(ghost.0)?;
        if direct.0.checked_add(ghost.0).is_none() {
            return Err(too_large(pages));
        }
        let segments = as_index(ghost.0.div_ceil(segment.0));
        Ok(Self {
            options,
            hits: 0,
            found: filled(0, segments, pages)?,
            beyond: 0,
            first: 0,
            lost: filled(0, segments + 2, pages)?,
        })
    }

    /// A page was found with `depth` others before it. Returns the segment.
    fn found(&mut self, depth: u64) -> usize {
        let GhostOptions {
            direct, segment, ..
        } = self.options;
        let Some(depth) = depth.checked_sub(direct.0) else {
            self.hits += 1;
            return 0;
        };
        let index = as_index(depth / segment.0);
        if depth < self.options.ghost.0 {
            self.found[index] += 1;
            index
        } else {
            self.beyond += 1;
            self.found.len() - 1
        }
    }

    /// A page was not found among the `reach` most recent ones.
    fn not_found(&mut self, reach: u64, has_dropped: bool) {
        if has_dropped {
            let borders = self.borders_within(reach);
            self.lost[borders] += 1;
        } else {
            self.first += 1;
        }
    }

    /// How many borders are at most `size`.
    fn borders_within(&self, size: u64) -> usize {
        let GhostOptions {
            direct,
            ghost,
            segment,
        } = self.options;
        match size.checked_sub(direct.0) {
            None => 0,
            Some(depth) if depth >= ghost.0 => self.found.len() + 1,
            Some(depth) => as_index(depth / segment.0) + 1,
        }
    }

    fn references(&self) -> u64 {
        let found: u64 = self.found.iter().sum();
        let lost: u64 = self.lost.iter().sum();
        self.hits + found + self.beyond + self.first + lost
    }

    fn segment_hits(&self) -> &[u64] {
        &self.found
    }

    fn clear(&mut self) {
        self.hits = 0;
        self.found.fill(0);
        self.beyond = 0;
        self.first = 0;
        self.lost.fill(0);
    }

    fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        let references = self.references();
        let ratio = |misses: u64| misses as f64 / references as f64;
        // Misses at a border: those possible, and of these the certain ones.
        let mut misses = references - self.hits;
        let mut least = misses - self.lost[0];
        let floor = ratio(self.first);
        let direct = self.options.direct.0;
        let end = direct + self.options.ghost.0;
        let at = |size, misses, low| point(size, ratio(misses), low, ratio(misses));
        let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
        if direct > 1 {
            points.push(point(1, 1.0, ratio(least), 1.0));
        }
        for (segment, &found) in self.found.iter().enumerate() {
            let border = direct + segment as u64 * self.options.segment.0;
            let next = border.saturating_add(self.options.segment.0).min(end);
            let next_least = least - found - self.lost[segment + 1];
            push(&mut points, at(border, misses, ratio(least)));
            if next > border + 1 {
                push(&mut points, at(border + 1, misses, ratio(next_least)));
            }
            misses -= found;
            least = next_least;
        }
        push(&mut points, at(end, misses, ratio(least)));
        push(&mut points, at(end.saturating_add(1), misses, floor));
        MissRatioCurve::new(points, references)
    }

    fn memory_bytes(&self) -> usize {
        (self.found.capacity() + self.lost.capacity()) * size_of::<u64>()
    }
}

fn point(size: u64, miss_ratio: f64, low: f64, high: f64) -> CurvePoint {
    CurvePoint {
        size: PageCount(size),
        miss_ratio,
        low,
        high,
    }
}

/// Appends a point, unless the last one is of that size and so knows more (a memory of no pages).
fn push(points: &mut Vec<CurvePoint>, point: CurvePoint) {
    if points.last().is_none_or(|last| last.size < point.size) {
        points.push(point);
    }
}

/// A bounded number of pages in the order of their last use, each with its exact depth.
#[derive(Debug, Clone)]
struct Recency {
    hash: PageHash,
    /// Open addressing with linear probing, homes in the order of the hash.
    slots: Vec<Slot>,
    /// The page that took each moment.
    pages: Vec<PageNumber>,
    depths: Depths,
    /// The moment to be taken next.
    next: usize,
    /// No moment stands before this one.
    oldest: usize,
    len: usize,
    capacity: usize,
    /// Pages that fell off the end.
    dropped: u64,
}

/// A page's place in the table.
#[derive(Debug, Clone, Copy)]
struct Slot {
    page: PageNumber,
    /// [`FREE`] if no page is here.
    moment: u32,
}

/// The moment that is never taken.
const FREE: u32 = u32::MAX;

/// How many references ahead the table's lines are asked for.
const AHEAD: usize = 32;

impl Recency {
    fn new(capacity: u64) -> Result<Self, GhostError> {
        check_pages(capacity)?;
        let pages = capacity;
        let capacity = as_index(capacity);
        // Half of the moments and more are free after numbering anew, and a third of the slots are at any time.
        let moments = capacity + capacity + capacity / 2 + 64;
        let slots = (capacity + 1) * 2;
        let free = Slot {
            page: PageNumber(0),
            moment: FREE,
        };
        Ok(Self {
            hash: PageHash::salted(),
            slots: filled(free, slots, pages)?,
            pages: filled(PageNumber(0), moments, pages)?,
            depths: Depths::new(moments, pages)?,
            next: 0,
            oldest: 0,
            len: 0,
            capacity,
            dropped: 0,
        })
    }

    fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether a page ever fell off the end: then one not found need not be new.
    fn has_dropped(&self) -> bool {
        self.dropped > 0
    }

    /// Makes a page the most recent. Returns how many were before it, if it was here.
    fn touch(&mut self, page: PageNumber) -> Option<u64> {
        self.touch_at(page, self.home_of(page))
    }

    /// Makes each of `pages` the most recent, in turn, and says how many were before it, if it was here;
    /// how many there were; and whether any had fallen off the end, both before it came.
    fn touch_all(&mut self, pages: &[PageNumber], mut each: impl FnMut(Option<u64>, u64, bool)) {
        let mut homes = [0; AHEAD];
        for (place, &page) in pages.iter().take(AHEAD).enumerate() {
            homes[place] = self.fetch(page);
        }
        for (index, &page) in pages.iter().enumerate() {
            let home = homes[index % AHEAD];
            if let Some(&page) = pages.get(index + AHEAD) {
                homes[index % AHEAD] = self.fetch(page);
            }
            // Its place has arrived by now; mostly it is at home there.
            let soon = homes[(index + AHEAD / 2) % AHEAD];
            self.depths.fetch(self.slots[soon].moment as usize);
            let (reach, has_dropped) = (self.len(), self.has_dropped());
            each(self.touch_at(page, home), reach, has_dropped);
        }
    }

    /// Brings a page's place on its way from memory and returns where it is.
    #[inline(always)]
    fn fetch(&self, page: PageNumber) -> usize {
        let home = self.home_of(page);
        sys::prefetch(&self.slots, home);
        home
    }

    #[inline(always)]
    fn touch_at(&mut self, page: PageNumber, home: usize) -> Option<u64> {
        if self.next == self.pages.len() {
            self.number_anew();
        }
        let index = self.index_from(page, home);
        let now = self.next;
        let before = std::mem::replace(
            &mut self.slots[index],
            Slot {
                page,
                moment: as_moment(now),
            },
        );
        self.pages[now] = page;
        self.next += 1;
        if before.moment == FREE {
            self.len += 1;
            if self.len > self.capacity {
                self.drop_oldest();
            }
            return None;
        }
        Some(self.depth_and_strike(before.moment))
    }

    /// Takes a page out. Returns how many were before it, if it was here.
    fn remove(&mut self, page: PageNumber) -> Option<u64> {
        let index = self.index_from(page, self.home_of(page));
        let moment = self.slots[index].moment;
        if moment == FREE {
            return None;
        }
        let depth = self.depth_and_strike(moment);
        self.free(index);
        self.len -= 1;
        Some(depth)
    }

    /// Strikes out a page's moment and returns how many other pages have later ones.
    #[inline(always)]
    fn depth_and_strike(&mut self, moment: u32) -> u64 {
        let moment = moment as usize;
        let deeper = u64::from(self.depths.standing_before(moment));
        self.depths.strike(moment);
        self.len as u64 - 1 - deeper
    }

    /// Lets the page at the end fall off.
    fn drop_oldest(&mut self) {
        if self.dropped.is_multiple_of(DROPS_FETCHED as u64) {
            self.fetch_oldest();
        }
        let oldest = self.depths.next_standing(self.oldest);
        let index = self.index_of(self.pages[oldest]);
        self.depths.strike(oldest);
        self.free(index);
        self.oldest = oldest + 1;
        self.len -= 1;
        self.dropped += 1;
    }

    /// Brings the places of the pages on their way that will fall off next but some.
    fn fetch_oldest(&self) {
        let mut moment = self.oldest;
        for nth in 0..2 * DROPS_FETCHED {
            moment = self.depths.next_standing(moment);
            if moment >= self.next {
                return;
            }
            if nth >= DROPS_FETCHED {
                // Freeing a place looks at those behind it, up to the next line.
                let home = self.fetch(self.pages[moment]);
                sys::prefetch(&self.slots, home + SLOTS_OF_A_LINE);
            }
            moment += 1;
        }
    }

    /// Moves the moments standing to the front, in their order.
    fn number_anew(&mut self) {
        for slot in &mut self.slots {
            if slot.moment != FREE {
                slot.moment = self.depths.standing_before(slot.moment as usize);
            }
        }
        let mut moment = self.oldest;
        for to in 0..self.len {
            moment = self.depths.next_standing(moment);
            self.pages[to] = self.pages[moment];
            moment += 1;
        }
        self.depths.reset();
        self.next = self.len;
        self.oldest = 0;
    }

    /// Returns the same pages with room for another number, the oldest falling off.
    fn resized(&self, capacity: u64) -> Result<Self, GhostError> {
        let mut resized = Self::new(capacity)?;
        let mut moment = self.oldest;
        for _ in 0..self.len {
            moment = self.depths.next_standing(moment);
            resized.touch(self.pages[moment]);
            moment += 1;
        }
        resized.dropped += self.dropped;
        Ok(resized)
    }

    /// Forgets all pages, keeping the memory.
    fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.moment = FREE;
        }
        self.depths.reset();
        self.next = 0;
        self.oldest = 0;
        self.len = 0;
        self.dropped = 0;
    }

    /// Where a search for the page begins.
    #[inline(always)]
    fn home_of(&self, page: PageNumber) -> usize {
        let scaled = u128::from(self.hash.of(page)) * self.slots.len() as u128;
        #[expect(clippy::cast_possible_truncation, reason = "below the number of slots")]
        let home = (scaled >> 64) as usize;
        home
    }

    fn index_of(&self, page: PageNumber) -> usize {
        self.index_from(page, self.home_of(page))
    }

    /// Where the page is, or the free place where it belongs.
    #[inline(always)]
    fn index_from(&self, page: PageNumber, home: usize) -> usize {
        let mut index = home;
        loop {
            let slot = self.slots[index];
            if slot.page == page || slot.moment == FREE {
                // A free place may hold the number of a page that left.
                return index;
            }
            index = self.after(index);
        }
    }

    #[inline(always)]
    fn after(&self, index: usize) -> usize {
        if index + 1 == self.slots.len() {
            0
        } else {
            index + 1
        }
    }

    /// Frees a place, moving pages back that would not be found behind it.
    fn free(&mut self, index: usize) {
        let slots = self.slots.len();
        let way = |from: usize, to: usize| {
            if to >= from {
                to - from
            } else {
                to + slots - from
            }
        };
        let mut hole = index;
        let mut index = self.after(index);
        while self.slots[index].moment != FREE {
            let home = self.home_of(self.slots[index].page);
            if way(home, index) >= way(hole, index) {
                self.slots[hole] = self.slots[index];
                hole = index;
            }
            index = self.after(index);
        }
        self.slots[hole].moment = FREE;
    }

    fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
            + self.pages.capacity() * size_of::<PageNumber>()
            + self.depths.memory_bytes()
    }
}

const SLOTS_OF_A_LINE: usize = 64 / size_of::<Slot>();

/// Pages that fall off between two looks ahead for those to come.
const DROPS_FETCHED: usize = 16;

/// A row of moments, with how many stand before each.
///
/// A moment not yet taken stands. It is after all that were, so it is counted for none.
#[derive(Debug, Clone)]
struct Depths {
    words: Vec<u64>,
    /// Standing before each word, within its group of 32.
    groups: Vec<[u16; CHILDREN]>,
    /// Standing before each group, within its block of 32.
    blocks: Vec<[u16; CHILDREN]>,
    /// Standing before each block, within its region of 32.
    regions: Vec<[u32; CHILDREN]>,
    /// Standing before each region.
    totals: Vec<u32>,
}

const CHILDREN: usize = 32;
const WORD_BITS: usize = 64;
const GROUP_BITS: usize = CHILDREN * WORD_BITS;
const BLOCK_BITS: usize = CHILDREN * GROUP_BITS;
const REGION_BITS: usize = CHILDREN * BLOCK_BITS;

impl Depths {
    fn new(moments: usize, pages: u64) -> Result<Self, GhostError> {
        // One more, so that a search beyond the last moment ends.
        let moments = moments + 1;
        let mut depths = Self {
            words: filled(0, moments.div_ceil(WORD_BITS), pages)?,
            groups: filled([0; CHILDREN], moments.div_ceil(GROUP_BITS), pages)?,
            blocks: filled([0; CHILDREN], moments.div_ceil(BLOCK_BITS), pages)?,
            regions: filled([0; CHILDREN], moments.div_ceil(REGION_BITS), pages)?,
            totals: filled(0, moments.div_ceil(REGION_BITS), pages)?,
        };
        depths.reset();
        Ok(depths)
    }

    /// Lets all moments stand.
    fn reset(&mut self) {
        self.words.fill(u64::MAX);
        self.groups
            .fill(std::array::from_fn(|child| as_short(child * WORD_BITS)));
        self.blocks
            .fill(std::array::from_fn(|child| as_short(child * GROUP_BITS)));
        self.regions
            .fill(std::array::from_fn(|child| as_moment(child * BLOCK_BITS)));
        for (region, total) in self.totals.iter_mut().enumerate() {
            *total = as_moment(region * REGION_BITS);
        }
    }

    #[inline(always)]
    fn standing_before(&self, moment: usize) -> u32 {
        let within = self.words[moment / WORD_BITS] & ((1 << (moment % WORD_BITS)) - 1);
        // No sum exceeds the number of moments, which 32 bits hold.
        self.totals[moment / REGION_BITS]
            .wrapping_add(self.regions[moment / REGION_BITS][moment / BLOCK_BITS % CHILDREN])
            .wrapping_add(u32::from(
                self.blocks[moment / BLOCK_BITS][moment / GROUP_BITS % CHILDREN],
            ))
            .wrapping_add(u32::from(
                self.groups[moment / GROUP_BITS][moment / WORD_BITS % CHILDREN],
            ))
            .wrapping_add(within.count_ones())
    }

    /// Strikes out a moment that stands.
    #[inline(always)]
    fn strike(&mut self, moment: usize) {
        self.words[moment / WORD_BITS] &= !(1 << (moment % WORD_BITS));
        let word = moment / WORD_BITS % CHILDREN;
        take_one(&mut self.groups[moment / GROUP_BITS], &ONE_AFTER, word);
        let group = moment / GROUP_BITS % CHILDREN;
        take_one(&mut self.blocks[moment / BLOCK_BITS], &ONE_AFTER, group);
        let block = moment / BLOCK_BITS % CHILDREN;
        for standing in &mut self.regions[moment / REGION_BITS][block + 1..] {
            *standing = standing.wrapping_sub(1);
        }
        for total in &mut self.totals[moment / REGION_BITS + 1..] {
            *total = total.wrapping_sub(1);
        }
    }

    /// Brings what says the depth of a moment on its way from memory. Any number is allowed.
    #[inline(always)]
    fn fetch(&self, moment: usize) {
        sys::prefetch(&self.words, moment / WORD_BITS);
        sys::prefetch(&self.groups, moment / GROUP_BITS);
    }

    /// The first moment from `moment` on that stands, taken or not.
    fn next_standing(&self, moment: usize) -> usize {
        let mut word = moment / WORD_BITS;
        let mut bits = self.words[word] & (u64::MAX << (moment % WORD_BITS));
        while bits == 0 {
            word += 1;
            bits = self.words[word];
        }
        word * WORD_BITS + bits.trailing_zeros() as usize
    }

    fn memory_bytes(&self) -> usize {
        self.words.capacity() * size_of::<u64>()
            + (self.groups.capacity() + self.blocks.capacity()) * size_of::<[u16; CHILDREN]>()
            + self.regions.capacity() * size_of::<[u32; CHILDREN]>()
            + self.totals.capacity() * size_of::<u32>()
    }
}

/// From index `CHILDREN - 1 - child` on, what is taken off the children when one leaves from `child`.
const ONE_AFTER: [u16; 2 * CHILDREN] = {
    let mut ones = [0; 2 * CHILDREN];
    let mut index = CHILDREN;
    while index < ones.len() {
        ones[index] = 1;
        index += 1;
    }
    ones
};

/// Takes one off the sums of all children after `child`: a few vector subtractions.
#[inline(always)]
fn take_one(sums: &mut [u16; CHILDREN], ones: &[u16; 2 * CHILDREN], child: usize) {
    for (sum, one) in sums
        .iter_mut()
        .zip(&ones[CHILDREN - 1 - child..][..CHILDREN])
    {
        *sum = sum.wrapping_sub(*one);
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

/// Returns `len` copies of `item`, in huge pages if the kernel has them, or says for how many `pages` there was no memory.
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

/// A number of pages that was checked against what memory holds.
fn as_index(pages: u64) -> usize {
    usize::try_from(pages).expect("at most PAGES_MAX")
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "there are fewer than 2^32 moments"
)]
fn as_moment(moment: usize) -> u32 {
    moment as u32
}

#[expect(clippy::cast_possible_truncation, reason = "at most 31 * 2048")]
fn as_short(standing: usize) -> u16 {
    standing as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lru::ExactLru;
    use crate::naive::NaiveStack;
    use crate::streams::{batch_of, curve_of, cycle, uniform, zipf};
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
                ghost.hit_in_cache();
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

    /// Every size's band holds the truth, and at the borders there is no band.
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
        // One page more than both hold: all that is known is that 500 were first ones.
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
        // A cache in front may be of any size; one that is simulated may not.
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
        lru.observe(&ReferenceBatch::new());
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
        // From the cache: the next miss finds room, and a page was not deep but late.
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
            // The same behind a cache of its own.
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
            // A cache that is in no order at all.
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
            // A stack that only lost its end knew all the rest.
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
            for moment in strikes {
                if struck.insert(moment) {
                    depths.strike(moment);
                }
                for at in [moment, 0, 63, 64, 2_047, 2_048, 65_535, 65_536, 149_999] {
                    let standing = at - struck.range(..at).count();
                    prop_assert_eq!(depths.standing_before(at) as usize, standing);
                }
                let next = (moment..).find(|next| !struck.contains(next)).unwrap();
                prop_assert_eq!(depths.next_standing(moment), next);
            }
        }
    }
}
