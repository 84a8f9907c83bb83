//! Last access of each page: the table that an online estimator reads at every reference.
//!
//! At a million pages the table exceeds a core's caches, and a lookup is a cache miss. So every
//! page has one cache line, and a batch's lines are prefetched some dozens
//! of references before they are needed: misses overlap instead of queueing. If the line has arrived without the page,
//! the next line is prefetched, still ahead of its use.
//!
//! - **Times** are 4 bytes: what lies 2^32 references back or more is moved to a table of
//!   *elders* of 8 bytes, in one sweep every 2^31 references. No reuse is rounded or lost.
//! - **Neighbours.** Where at least a quarter of all small page numbers is in use, as with a guest's
//!   frames, they index a plain array: 4 to 16 bytes a page, and no hash.
//! - **All other pages** are in buckets of one line, five pages with their times in each. A full bucket
//!   overflows into the next. The position depends on a random key, so that no choice of pages makes the table slow,
//!   and buckets are in the order of the hash, so that growing scans the old and new
//!   tables sequentially. At most four fifths full: 16 to 24 bytes per page.
//!
//! Cost: one cache line per reference; in a batch 4 to 20 ns including processing, from caches to memory.
//! Not here: removing single pages; no user of this table does.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ops::Range;

use plimsoll_flow::PageNumber;

use crate::parts::hash::{PageMap, page_map};
use crate::parts::sys::{filled_huge, prefetch};

/// Value of [`LastUse::replace_batch`] for a page without a time.
pub(crate) const NEVER: u32 = u32::MAX;

/// Number of references by which a line is prefetched.
const AHEAD: usize = 64;

/// Number of references by which the prefetched line is read: late enough for its arrival, early enough to prefetch
/// another.
const SEEN_AHEAD: usize = 24;

/// Number of pages looked up between two checks for room: small compared with the table, so that small tables stay
/// small.
const STRETCH_MIN: usize = 64;
const STRETCH_MAX: usize = 4096;

/// Number of pages in buckets up to which the table stays in the first-level cache without prefetching.
const BUCKETED_NEAR: usize = 1024;

/// Number of pages that are always in the array. Page 0 must be, because it marks free slots in buckets.
const ARRAY_MIN: usize = 64;

/// The array ends where fewer than one in this number of its pages is used.
const ARRAY_PER_PAGE: usize = 4;

/// Pages in a bucket.
const PLACES: usize = 5;

#[expect(clippy::cast_possible_truncation, reason = "a small number")]
const NO_PLACE: u8 = PLACES as u8;

/// Maximum mean number of pages in a bucket, in fifths of [`PLACES`].
const FIFTHS_MAX: usize = 4;

/// Pages of one cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    pages: [u64; PLACES],
    /// [`NEVER`] for a free slot.
    times: [u32; PLACES],
    /// Number of slots in use: always the first ones.
    taken: u32,
}

const _: () = assert!(size_of::<Bucket>() == 64);

impl Bucket {
    const FREE: Self = Self {
        pages: [0; PLACES],
        times: [NEVER; PLACES],
        taken: 0,
    };

    /// Index of the page's slot, or [`PLACES`]. Without a branch, because the slot is unpredictable.
    #[inline(always)]
    fn place_of(&self, page: u64) -> usize {
        let mut found = 1_u32 << PLACES;
        for (place, &other) in self.pages.iter().enumerate() {
            found |= u32::from(other == page) << place;
        }
        found.trailing_zeros() as usize
    }
}

/// The time of last use of every page.
#[derive(Debug, Clone)]
pub(crate) struct LastUse {
    salt: [u64; 2],
    /// By page number; [`NEVER`] for unused pages.
    array: Vec<u32>,
    /// In the order of the hash; all pages beyond the array.
    buckets: Vec<Bucket>,
    /// Number of pages in buckets.
    bucketed: usize,
    /// The time that is stored as 0 in the array and in buckets.
    base: u64,
    /// Pages last used before it.
    elders: PageMap<u64>,
    /// Limit of times above `base`: [`NEVER`], less in tests.
    horizon: u32,
}

impl LastUse {
    pub(crate) fn new() -> Self {
        let random = RandomState::new();
        Self {
            salt: [random.hash_one(0_u64), random.hash_one(1_u64) | 1],
            array: vec![NEVER; ARRAY_MIN],
            buckets: filled_huge(Bucket::FREE, 1),
            bucketed: 0,
            base: 0,
            elders: page_map(),
            horizon: NEVER,
        }
    }

    /// Sets a page's time and returns the previous one, if any. Times may only rise.
    pub(crate) fn replace(&mut self, page: PageNumber, time: u64) -> Option<u64> {
        self.reserve(1);
        let young = self.young(time, 1);
        let before = self.replace_young(page.0, self.home_of(page.0), young);
        self.with_elders(page, before)
    }

    /// Sets the times of `pages` to `now`, `now + 1`, ..; appends one entry for each to `before`: the
    /// page's previous time, [`NEVER`] if there was none. A page may occur several times.
    ///
    /// All times must be below [`NEVER`], and no later time may ever have been set.
    pub(crate) fn replace_batch(&mut self, pages: &[PageNumber], now: u32, before: &mut Vec<u32>) {
        debug_assert!(self.base == 0 && self.elders.is_empty());
        before.clear();
        before.reserve(pages.len());
        let uses = |index| (pages[index], nth_moment(now, index));
        self.replace_young_batch(pages.len(), uses, |_, _, time| before.push(time));
    }

    /// Sets the time of a page for each of `uses`, in order; calls `before` with the number of the use and the
    /// page's previous time, [`NEVER`] if there was none. Times are as for [`replace_batch`](Self::replace_batch).
    pub(crate) fn replace_uses(
        &mut self,
        count: usize,
        uses: impl Fn(usize) -> (PageNumber, u32),
        mut before: impl FnMut(usize, u32),
    ) {
        debug_assert!(self.base == 0 && self.elders.is_empty());
        self.replace_young_batch(count, uses, |index, _, time| before(index, time));
    }

    /// Sets the times of `pages` to `now`, `now + 1`, ..; appends one entry for each to `times`: the time since the
    /// page's previous use, or 0 if that does not fit into 32 bits or there was none. In that case `others` is called
    /// with the use's time, and the time since the page's previous use, if there was any.
    pub(crate) fn reuse_times(
        &mut self,
        pages: &[PageNumber],
        now: u64,
        times: &mut Vec<u32>,
        mut others: impl FnMut(u64, Option<u64>),
    ) {
        times.clear();
        times.reserve(pages.len());
        let mut now = now;
        // In blocks of at most half the horizon.
        for pages in pages.chunks((self.horizon / 2).max(1) as usize) {
            let young = self.young(now, pages.len() as u64);
            let known = times.len();
            let uses = |index| (pages[index], nth_moment(young, index));
            self.replace_young_batch(pages.len(), uses, |_, time, before| {
                let time = time.wrapping_sub(before);
                times.push(if before == NEVER { 0 } else { time });
            });
            if times[known..].contains(&0) {
                let unknown = (now..).zip(pages).zip(&times[known..]);
                for ((now, &page), _) in unknown.filter(|&(_, &time)| time == 0) {
                    // Its first use here has also removed it from the elders.
                    let before = self.with_elders(page, NEVER);
                    others(now, before.map(|before| now - before));
                }
            }
            now += pages.len() as u64;
        }
    }

    /// The times of all pages, in unspecified order. They may be changed, but not to [`NEVER`].
    pub(crate) fn times_mut(&mut self) -> impl Iterator<Item = &mut u32> {
        let bucketed = self.buckets.iter_mut().flat_map(|bucket| &mut bucket.times);
        let times = self.array.iter_mut().chain(bucketed);
        times.filter(|time| **time != NEVER)
    }

    /// [`times_mut`](Self::times_mut) in this many parts of about equal length, for as many threads.
    pub(crate) fn times_mut_in(
        &mut self,
        parts: usize,
    ) -> impl Iterator<Item = impl Iterator<Item = &mut u32>> {
        let length = self.array.len().div_ceil(parts);
        let mut array = self.array.chunks_mut(length);
        let length = self.buckets.len().div_ceil(parts);
        let mut buckets = self.buckets.chunks_mut(length);
        (0..parts).map(move |_| {
            let array = array.next().unwrap_or_default();
            let buckets = buckets.next().unwrap_or_default();
            let bucketed = buckets.iter_mut().flat_map(|bucket| &mut bucket.times);
            let times = array.iter_mut().chain(bucketed);
            times.filter(|time| **time != NEVER)
        })
    }

    /// The times of all pages, in unspecified order.
    pub(crate) fn times(&self) -> impl Iterator<Item = u64> {
        let bucketed = self.buckets.iter().flat_map(|bucket| &bucket.times);
        let young = self.array.iter().chain(bucketed);
        let young = young.filter(|&&time| time != NEVER);
        let young = young.map(|&time| self.base + u64::from(time));
        young.chain(self.elders.values().copied())
    }

    /// All pages with their times, in unspecified order; as for [`replace_batch`](Self::replace_batch), all times are below
    /// [`NEVER`].
    pub(crate) fn uses(&self) -> impl Iterator<Item = (u32, PageNumber)> {
        debug_assert!(self.base == 0 && self.elders.is_empty());
        let array = self.array.iter().zip(0..);
        let buckets = self.buckets.iter();
        let bucketed = buckets.flat_map(|bucket| bucket.times.iter().zip(bucket.pages));
        let uses = array.chain(bucketed);
        uses.filter(|&(&time, _)| time != NEVER)
            .map(|(&time, page)| (time, PageNumber(page)))
    }

    /// Removes all pages, keeping the memory.
    pub(crate) fn clear(&mut self) {
        self.array.fill(NEVER);
        self.buckets.fill(Bucket::FREE);
        self.bucketed = 0;
        self.base = 0;
        self.elders.clear();
    }

    /// Bytes of heap allocated now.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.array.capacity() * size_of::<u32>()
            + self.buckets.capacity() * size_of::<Bucket>()
            + map_bytes(&self.elders)
    }

    #[inline(always)]
    fn replace_young_batch(
        &mut self,
        count: usize,
        uses: impl Fn(usize) -> (PageNumber, u32),
        mut each: impl FnMut(usize, u32, u32),
    ) {
        let mut start = 0;
        while start < count {
            let stretch = (self.bucketed / 4).clamp(STRETCH_MIN, STRETCH_MAX);
            let end = count.min(start + stretch);
            // No growth until the end of the block: pages stay where they are.
            self.reserve(end - start);
            if self.bucketed <= BUCKETED_NEAR {
                self.replace_near(start..end, &uses, &mut each);
            } else {
                self.replace_far(start..end, &uses, &mut each);
            }
            start = end;
        }
    }

    /// Processes a block while there are few buckets: only the array is prefetched.
    #[inline(always)]
    fn replace_near(
        &mut self,
        stretch: Range<usize>,
        uses: &impl Fn(usize) -> (PageNumber, u32),
        each: &mut impl FnMut(usize, u32, u32),
    ) {
        let Range { start, end } = stretch;
        for index in start..end.min(start + AHEAD) {
            self.fetch_entry(uses(index).0.0);
        }
        for index in start..end {
            let ahead = index.wrapping_add(AHEAD);
            if ahead < end {
                self.fetch_entry(uses(ahead).0.0);
            }
            let (PageNumber(page), time) = uses(index);
            let before = if let Some(index) = self.array_index(page) {
                std::mem::replace(&mut self.array[index], time)
            } else {
                self.replace_young(page, self.home_of(page), time)
            };
            each(index, time, before);
        }
    }

    /// Processes a block when lines are far from the processor, in three overlapping stages: prefetch the line of one
    /// reference, find the page in the line of an earlier one, and replace the time of a still earlier one. A full
    /// bucket's neighbour is thus prefetched, too.
    #[inline(always)]
    fn replace_far(
        &mut self,
        stretch: Range<usize>,
        uses: &impl Fn(usize) -> (PageNumber, u32),
        each: &mut impl FnMut(usize, u32, u32),
    ) {
        let page = |index| uses(index).0.0;
        let Range { start, end } = stretch;
        let mut homes = [0_usize; AHEAD];
        let mut places = [NO_PLACE; AHEAD];
        for index in start..end.min(start + AHEAD) {
            homes[index % AHEAD] = self.fetch_page(page(index));
        }
        for index in start..end.min(start + SEEN_AHEAD) {
            places[index % AHEAD] = self.see_page(page(index), homes[index % AHEAD]);
        }
        for index in start..end {
            let (home, place) = (homes[index % AHEAD], places[index % AHEAD]);
            let ahead = index.wrapping_add(AHEAD);
            if ahead < end {
                homes[ahead % AHEAD] = self.fetch_page(page(ahead));
            }
            let seen = index.wrapping_add(SEEN_AHEAD);
            if seen < end {
                places[seen % AHEAD] = self.see_page(page(seen), homes[seen % AHEAD]);
            }
            let (page, time) = uses(index);
            let before = if let Some(index) = self.array_index(page.0) {
                std::mem::replace(&mut self.array[index], time)
            } else if let Some(known) = self.buckets[home].times.get_mut(usize::from(place)) {
                std::mem::replace(known, time)
            } else {
                self.replace_or_add(page.0, home, time)
            };
            each(index, time, before);
        }
    }

    /// Searches for a page in its home bucket and returns its slot there, or [`NO_PLACE`]. If
    /// it is not there it may be in the next bucket, which is prefetched.
    #[inline(always)]
    fn see_page(&self, page: u64, home: usize) -> u8 {
        if self.array_index(page).is_some() {
            return NO_PLACE;
        }
        let place = self.buckets[home].place_of(page);
        // Without a branch; for most pages this is the line already present.
        prefetch(&self.buckets, home + usize::from(place == PLACES));
        #[expect(clippy::cast_possible_truncation, reason = "at most PLACES")]
        let place = place as u8;
        place
    }

    /// Prefetches the page's line; returns its home bucket.
    #[inline(always)]
    fn fetch_page(&self, page: u64) -> usize {
        if let Some(index) = self.array_index(page) {
            prefetch(&self.array, index);
            return 0;
        }
        let home = self.home_of(page);
        prefetch(&self.buckets, home);
        home
    }

    /// Prefetches the page's entry in the array, if it has one.
    #[inline(always)]
    fn fetch_entry(&self, page: u64) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a hint, for which any index will do"
        )]
        prefetch(&self.array, page as usize);
    }

    #[inline(always)]
    fn array_index(&self, page: u64) -> Option<usize> {
        usize::try_from(page)
            .ok()
            .filter(|&index| index < self.array.len())
    }

    /// The home bucket of a page: its hash as a share of all buckets.
    #[inline(always)]
    fn home_of(&self, page: u64) -> usize {
        let product = u128::from(page ^ self.salt[0]).wrapping_mul(u128::from(self.salt[1]));
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the two halves of a product"
        )]
        let hash = (product >> 64) as u64 ^ product as u64;
        let share = u128::from(hash).wrapping_mul(self.buckets.len() as u128);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "below the number of buckets"
        )]
        let home = (share >> 64) as usize;
        home
    }

    /// Sets a page's time above the base; there must be room for a new page.
    #[inline(always)]
    fn replace_young(&mut self, page: u64, home: usize, time: u32) -> u32 {
        if let Some(index) = self.array_index(page) {
            return std::mem::replace(&mut self.array[index], time);
        }
        let bucket = &mut self.buckets[home];
        let place = bucket.place_of(page);
        if place < PLACES {
            return std::mem::replace(&mut bucket.times[place], time);
        }
        self.replace_or_add(page, home, time)
    }

    /// Handles a page that is not in its home bucket.
    #[inline(never)]
    fn replace_or_add(&mut self, page: u64, home: usize, time: u32) -> u32 {
        let mut index = home;
        loop {
            let bucket = &mut self.buckets[index];
            let place = bucket.place_of(page);
            if place < PLACES {
                return std::mem::replace(&mut bucket.times[place], time);
            }
            let taken = bucket.taken as usize;
            if taken < PLACES {
                bucket.pages[taken] = page;
                bucket.times[taken] = time;
                bucket.taken += 1;
                self.bucketed += 1;
                return NEVER;
            }
            index += 1;
            if index == self.buckets.len() {
                index = 0;
            }
        }
    }

    /// Makes room for this number of new pages.
    fn reserve(&mut self, pages: usize) {
        if (self.bucketed + pages) > self.buckets.len() * FIFTHS_MAX {
            self.grow(pages);
        }
    }

    #[cold]
    fn grow(&mut self, pages: usize) {
        self.widen_array();
        let mut rest = 0;
        for bucket in &self.buckets {
            for &page in &bucket.pages[..bucket.taken as usize] {
                rest += usize::from(self.array_index(page).is_none());
            }
        }
        let wanted = (rest + rest / 2 + pages).div_ceil(FIFTHS_MAX);
        let old = std::mem::replace(&mut self.buckets, filled_huge(Bucket::FREE, wanted));
        self.bucketed = 0;
        for bucket in &old {
            for place in 0..bucket.taken as usize {
                let page = bucket.pages[place];
                self.replace_young(page, self.home_of(page), bucket.times[place]);
            }
        }
    }

    /// Extends the array as far as its pages, and those in buckets, fill it sufficiently.
    fn widen_array(&mut self) {
        // Number of pages by the bit length of their number, and the largest of each.
        let mut counts = [0_usize; 65];
        let mut largest = [0_u64; 65];
        for bucket in &self.buckets {
            for &page in &bucket.pages[..bucket.taken as usize] {
                let bits = (u64::BITS - page.leading_zeros()) as usize;
                counts[bits] += 1;
                largest[bits] = largest[bits].max(page);
            }
        }
        let mut below = self.array.iter().filter(|&&m| m != NEVER).count();
        let mut length = self.array.len();
        for (count, largest) in counts.into_iter().zip(largest) {
            below += count;
            // An eighth more, for later pages.
            let wanted = usize::try_from(largest)
                .ok()
                .and_then(|largest| largest.checked_add(largest / 8 + 1));
            if let Some(wanted) = wanted.filter(|&wanted| wanted / ARRAY_PER_PAGE <= below) {
                length = length.max(wanted);
            }
        }
        if length > self.array.len() {
            let mut array = filled_huge(NEVER, length);
            array[..self.array.len()].copy_from_slice(&self.array);
            self.array = array;
        }
    }

    fn with_elders(&mut self, page: PageNumber, before: u32) -> Option<u64> {
        if before != NEVER {
            return Some(self.base + u64::from(before));
        }
        if self.elders.is_empty() {
            return None;
        }
        self.elders.remove(&page)
    }

    /// Returns `time` above the base, with room for `count` more times.
    fn young(&mut self, time: u64, count: u64) -> u32 {
        if (time - self.base).saturating_add(count) > u64::from(self.horizon) {
            self.raise_base(time - u64::from(self.horizon / 2).min(time));
        }
        u32::try_from(time - self.base).expect("the base was raised")
    }

    /// Moves pages last used before `base` to the elders, and makes `base` the new base.
    #[cold]
    fn raise_base(&mut self, base: u64) {
        let raise = base - self.base;
        let mut young = Vec::new();
        for (page, time) in (0..).zip(&mut self.array) {
            if *time != NEVER && u64::from(*time) < raise {
                self.elders
                    .insert(PageNumber(page), self.base + u64::from(*time));
                *time = NEVER;
            } else if *time != NEVER {
                *time = lowered(*time, raise);
            }
        }
        for bucket in &mut self.buckets {
            for place in 0..bucket.taken as usize {
                let (page, time) = (bucket.pages[place], bucket.times[place]);
                if u64::from(time) < raise {
                    self.elders
                        .insert(PageNumber(page), self.base + u64::from(time));
                } else {
                    young.push((page, lowered(time, raise)));
                }
            }
            *bucket = Bucket::FREE;
        }
        self.bucketed = 0;
        for (page, time) in young {
            self.replace_young(page, self.home_of(page), time);
        }
        self.base = base;
    }
}

/// The time of the use with this index; the first one's is `now`.
#[inline(always)]
fn nth_moment(now: u32, index: usize) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a batch has room below the horizon"
    )]
    let index = index as u32;
    now.wrapping_add(index)
}

/// Converts a time to a later base, which is not after it.
fn lowered(time: u32, by: u64) -> u32 {
    u32::try_from(u64::from(time) - by).expect("less than before")
}

/// Bytes of heap of a map of pages: 8/7 entries and a byte of tag each, as documented by its authors.
pub(crate) fn map_bytes<V>(map: &PageMap<V>) -> usize {
    let entry = size_of::<(PageNumber, V)>() + 1;
    map.capacity() * entry * 8 / 7
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::Random;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Pages of all kinds: neighbours, strides, near both ends of the numbers.
    fn page() -> impl Strategy<Value = u64> {
        prop_oneof![
            4 => 0_u64..600,
            2 => (0_u64..300).prop_map(|n| n << 20),
            2 => (0_u64..300).prop_map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            1 => (0_u64..20).prop_map(|n| u64::MAX - n),
        ]
    }

    proptest! {
        #[test]
        fn the_table_agrees_with_an_ordered_map(
            uses in prop::collection::vec((page(), 0_u64..3), 1..3_000),
        ) {
            let (mut table, mut map) = (LastUse::new(), BTreeMap::new());
            let mut time = 0;
            for &(page, gap) in &uses {
                time += gap;
                prop_assert_eq!(table.replace(PageNumber(page), time), map.insert(page, time));
            }
            let mut times: Vec<_> = table.times_mut().map(|time| u64::from(*time)).collect();
            let mut expected: Vec<_> = map.into_values().collect();
            times.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(times, expected);
            table.clear();
            prop_assert_eq!(table.times_mut().count(), 0);
            prop_assert_eq!(table.replace(PageNumber(uses[0].0), 1), None);
        }

        #[test]
        fn a_batch_is_its_references_one_by_one(
            pages in prop::collection::vec(page(), 1..3_000),
            cut in any::<prop::sample::Index>(),
        ) {
            let (mut table, mut map) = (LastUse::new(), BTreeMap::new());
            let pages: Vec<_> = pages.into_iter().map(PageNumber).collect();
            let mut before = vec![7];
            let mut now = 0;
            let (head, tail) = pages.split_at(cut.index(pages.len()));
            for pages in [head, tail] {
                table.replace_batch(pages, now, &mut before);
                prop_assert_eq!(before.len(), pages.len());
                for (&page, &before) in pages.iter().zip(&before) {
                    prop_assert_eq!(before, map.insert(page, now).unwrap_or(NEVER));
                    now += 1;
                }
            }
        }

        #[test]
        fn no_reuse_time_is_lost_beyond_the_horizon(
            pages in prop::collection::vec(page(), 1..3_000),
            horizon in 2_u32..500,
            batch in 1_usize..700,
        ) {
            let (mut table, mut one_by_one) = (LastUse::new(), LastUse::new());
            table.horizon = horizon;
            one_by_one.horizon = horizon;
            let mut map = BTreeMap::new();
            let (mut found, mut expected) = (Vec::new(), Vec::new());
            let mut now = 0;
            for pages in pages.chunks(batch) {
                let pages: Vec<_> = pages.iter().copied().map(PageNumber).collect();
                let mut times = Vec::new();
                table.reuse_times(&pages, now, &mut times, |_, time| found.extend(time));
                prop_assert_eq!(times.len(), pages.len());
                found.extend(times.into_iter().map(u64::from).filter(|&time| time > 0));
                for page in pages {
                    let before = map.insert(page, now);
                    prop_assert_eq!(one_by_one.replace(page, now), before);
                    expected.extend(before.map(|before| now - before));
                    now += 1;
                }
            }
            for table in [&table, &one_by_one] {
                let mut times: Vec<_> = table.times().collect();
                times.sort_unstable();
                let mut last: Vec<_> = map.values().copied().collect();
                last.sort_unstable();
                prop_assert_eq!(times, last);
            }
            found.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_batch_agrees_with_an_ordered_map_also_where_buckets_are_many() {
        for seed in 1..=5 {
            let mut random = Random::new(seed);
            let (mut table, mut map) = (LastUse::new(), BTreeMap::new());
            let (mut now, mut before) = (0, Vec::new());
            for batch in [1, 63, 64, 65, 1_000, 16_384, 30_000, 16_384] {
                let page = |_| {
                    let page = random.next() % 20_000;
                    // Some are neighbours, some far apart; the latter are reused soon as well as late.
                    let page = match random.next() % 8 {
                        0 => page,
                        1 => (page % 30) << 32,
                        _ => page.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                    };
                    PageNumber(page)
                };
                let pages: Vec<_> = (0..batch).map(page).collect();
                table.replace_batch(&pages, now, &mut before);
                assert_eq!(before.len(), pages.len());
                for (&page, &before) in pages.iter().zip(&before) {
                    assert_eq!(before, map.insert(page, now).unwrap_or(NEVER));
                    now += 1;
                }
            }
            assert!(table.bucketed > BUCKETED_NEAR);
        }
    }

    #[test]
    fn neighbours_take_few_bytes_and_strangers_not_many() {
        let pages = 200_000_u64;
        let bytes = |page: fn(u64) -> u64| {
            let mut table = LastUse::new();
            for n in 0..pages {
                assert_eq!(table.replace(PageNumber(page(n)), n), None);
            }
            for n in 0..pages {
                assert_eq!(table.replace(PageNumber(page(n)), pages + n), Some(n));
            }
            table.memory_bytes() as f64 / pages as f64
        };
        assert!(bytes(|n| n) <= 6.0);
        assert!(bytes(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)) <= 25.0);
    }

    #[test]
    fn moments_far_apart_are_right() {
        let mut table = LastUse::new();
        let times = [0, 5, 1 << 33, (1 << 33) + 1, 1 << 62, u64::MAX - 1];
        for page in [0, 1_000_000].map(PageNumber) {
            table.clear();
            let found = times.map(|time| table.replace(page, time));
            let expected = [None; 6];
            let expected: Vec<_> = expected
                .iter()
                .take(1)
                .copied()
                .chain(times.map(Some))
                .take(6)
                .collect();
            assert_eq!(found.to_vec(), expected);
        }
    }
}
