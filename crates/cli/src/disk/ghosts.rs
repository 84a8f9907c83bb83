//! What more or less memory would bring a VM: the list of the blocks it evicted, without their contents.
//!
//! The guest's memory of X pages lies in front, then the list in the order of evictions. A block that the guest
//! reads because it does not hold it, found at depth `d` of the list, would hit with X + d + 1 pages: as memory of
//! the guest, if that is in LRU order, or as an exclusive cache of d + 1 pages behind it (\[LS07\] §4.1). The
//! list does not care how large the cache is now, so one run tells of smaller and larger ones alike.
//!
//! Counts begin anew when X becomes known or changes (a balloon), when the list is made longer, and with another
//! guest: a curve is that of one X.
//!
//! Not here: blocks written. One that is overwritten or freed is taken out of the list.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plimsoll_disk::{Location, MachineStats, Observer};
use plimsoll_estimator::{GhostBuffer, GhostError, GhostOptions};
use plimsoll_flow::{MissRatioCurve, PageCount, PageNumber};

/// Reads behind a curve below which nothing is told of other sizes.
const REFERENCES_MIN: u64 = 100;
/// Cache sizes in question, as shares of the present one.
const RATIOS: [f64; 4] = [0.5, 1.0, 1.5, 2.0];

/// The list, the counts, and what they are compared with. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Ghosts {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    buffer: GhostBuffer,
    /// X as told at the start; else as the guest says.
    direct_set: Option<PageCount>,
    /// Pages of the list beyond those of the cache.
    beyond: PageCount,
    /// Reads and hits of the cache when the counts began; `None` until that is seen.
    before: Option<(u64, u64)>,
}

/// A curve and what stands beside it.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// The guest's memory X; `None` if nobody knows, and sizes are then those behind it.
    pub direct: Option<PageCount>,
    /// Pages of the list.
    pub reach: PageCount,
    /// Pages from one point of the curve to the next.
    pub segment: PageCount,
    /// Heap of the list.
    pub memory_bytes: u64,
    /// Share of reads that miss at each size, from X on; `None` before the first read.
    pub curve: Option<MissRatioCurve>,
    /// Reads and hits of the cache since the curve's counts began.
    pub counted: (u64, u64),
}

/// What a cache of another size would bring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AtSize {
    /// Size of the cache, whole segments.
    pub cache: PageCount,
    /// Share of the reads that would hit.
    pub hit_ratio: f64,
}

impl Ghosts {
    /// A list for a cache of `cache` pages and `beyond` more, behind a memory of `direct` pages or of as many
    /// as the guest will say.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if there cannot be so long a list.
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
                buffer: GhostBuffer::new(options)?,
                direct_set: direct,
                beyond,
                before: Some((0, 0)),
            })),
        })
    }

    /// Follows the guest's memory and the size of the cache. To be called about once a second.
    ///
    /// # Errors
    ///
    /// [`GhostError`] if there is no memory for a longer list: it stays as it was.
    pub fn settle(&self, stats: &MachineStats) -> Result<(), GhostError> {
        let mut inner = self.lock();
        let GhostOptions { direct, ghost, .. } = inner.buffer.options();
        let told = PageCount(stats.ring.guest_memory_pages);
        // A guest that says nothing (it boots again) is taken to have what it had.
        let new_direct = match inner.direct_set {
            Some(set) => set,
            None if told.0 > 0 => told,
            None => direct,
        };
        let wanted = cache_pages(stats).0.saturating_add(inner.beyond.0);
        let new_ghost = ghost.max(PageCount(wanted));
        if (new_direct, new_ghost) != (direct, ghost) {
            inner.buffer.resize(new_direct, new_ghost)?;
            inner.before = None;
        }
        let now = (stats.engine.read_blocks, stats.engine.hits);
        inner.before.get_or_insert(now);
        Ok(())
    }

    /// What is known now, beside the counts of `stats`.
    #[must_use]
    pub fn prediction(&self, stats: &MachineStats) -> Prediction {
        let inner = self.lock();
        let GhostOptions {
            direct,
            ghost,
            segment,
        } = inner.buffer.options();
        let now = (stats.engine.read_blocks, stats.engine.hits);
        let before = inner.before.unwrap_or(now);
        Prediction {
            direct: (direct.0 > 0).then_some(direct),
            reach: ghost,
            segment,
            memory_bytes: inner.buffer.memory_bytes() as u64,
            curve: inner.buffer.curve().ok(),
            counted: (
                now.0.saturating_sub(before.0),
                now.1.saturating_sub(before.1),
            ),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Counts only: a list that a panic left half done is a list all the same.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Prediction {
    /// What caches of half the present size up to twice that would bring, rising; `None` while too little was read.
    #[must_use]
    pub fn at_sizes(&self, cache: PageCount) -> Option<Vec<AtSize>> {
        let curve = self.curve.as_ref()?;
        if curve.references() < REFERENCES_MIN {
            return None;
        }
        let direct = self.direct.unwrap_or_default();
        let sizes = RATIOS.map(|ratio| {
            let cache = cache.scaled(ratio).0.next_multiple_of(self.segment.0);
            let size = PageCount(direct.0.saturating_add(cache));
            AtSize {
                cache: PageCount(cache),
                hit_ratio: 1.0 - curve.miss_ratio(size),
            }
        });
        let mut sizes = sizes.to_vec();
        sizes.dedup_by_key(|at| at.cache);
        Some(sizes)
    }
}

impl Observer for Ghosts {
    fn missed(&mut self, page: Location) {
        let buffer = &mut self.lock().buffer;
        // The guest's memory is full, of what we need not know.
        buffer.set_cached(buffer.options().direct);
        buffer.missed(PageNumber(page.number()));
    }

    fn evicted(&mut self, page: Location) {
        self.lock().buffer.evicted(PageNumber(page.number()));
    }

    fn released(&mut self, page: Location) {
        self.lock().buffer.released(PageNumber(page.number()));
    }

    fn cleared(&mut self) {
        let mut inner = self.lock();
        inner.buffer.clear();
        inner.before = None;
    }
}

/// Pages that the cache may hold.
#[must_use]
pub fn cache_pages(stats: &MachineStats) -> PageCount {
    PageCount(stats.engine.cache_bytes / plimsoll_disk::PAGE_BYTES as u64)
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

    /// What a machine with a guest of so much memory and such a cache says.
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
        let told = ghosts.prediction(&now);
        assert_eq!((told.direct, told.reach.0), (Some(PageCount(3000)), 10_240));
        assert_eq!(told.counted, (60_000, 0));
        // 3000 blocks behind the guest: three segments of 1024.
        let curve = told.curve.as_ref().unwrap();
        assert_eq!(curve.miss_ratio(PageCount(3000 + 2048)), 1.0);
        assert_eq!(curve.miss_ratio(PageCount(3000 + 3072)), 0.1);
        let at = told.at_sizes(cache).unwrap();
        let hits: Vec<_> = at.iter().map(|at| (at.cache.0, at.hit_ratio)).collect();
        assert_eq!(hits, [(1024, 0.0), (2048, 0.0), (3072, 0.9), (4096, 0.9)]);
    }

    #[test]
    fn counts_begin_anew_with_another_memory_a_longer_list_or_another_guest() {
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
            // The same again, a guest that says nothing, a smaller cache.
            for (guest, cache) in [(guest, cache), (0, cache), (guest, 4)] {
                ghosts.settle(&stats(guest, cache)).unwrap();
                assert_eq!(references(&ghosts), 1);
            }
        }
        ghosts.cleared();
        assert_eq!(references(&ghosts), 0);
        assert_eq!(ghosts.prediction(&stats(0, 8)).counted, (0, 0));

        let set = Ghosts::new(Some(PageCount(50)), PageCount(8), PageCount(8)).unwrap();
        set.settle(&stats(120, 8)).unwrap();
        assert_eq!(set.prediction(&stats(120, 8)).direct, Some(PageCount(50)));
    }

    #[test]
    fn nothing_is_told_from_few_reads() {
        let mut ghosts = Ghosts::new(None, PageCount(1024), PageCount(0)).unwrap();
        go_round(&mut ghosts, 33, 1, 3);
        assert_eq!(
            ghosts.prediction(&stats(0, 1024)).at_sizes(PageCount(1024)),
            None
        );
        go_round(&mut ghosts, 1, 1, 1);
        let told = ghosts.prediction(&stats(0, 1024));
        assert!(told.at_sizes(PageCount(1024)).is_some());
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
