//! Miniatures of a client's pages at several sizes, for the curve of a policy that is not a stack algorithm.
//!
//! Each takes all events of the client's sampled pages and counts the gets that miss in it. At its size the curve is that
//! count; between two sizes it is on the line between theirs, and the band has both ends. Where a larger store would miss
//! more often, which such policies allow, the curve stays level and the band has what was counted.
//!
//! Source: \[Waldspurger17\] §3. Departs in this: the events are those of a store, so that the client's own pages are not
//! referenced, and puts follow what the store had. Cost: a miniature's cost for each size, so fifteen times that of one.

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount};
use plimsoll_hcache::{Event, EventKind, EvictionPolicyRow, Miniature};

/// Sizes in 32nds of the reach, which is twice the largest capacity: densest about the capacity.
const SIZES: [u32; 15] = [1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32];
/// Points of the curve from one size to the next.
pub(super) const STEPS: u64 = 8;
/// Points of the curve up to the reach, were they all as close as the first ones.
pub(super) const POINTS_OF_REACH: u64 = 32 * STEPS;

/// A client's miniatures.
#[derive(Debug)]
pub(super) struct Miniatures {
    /// Size, the smallest first, and gets that missed.
    all: Vec<(u32, Miniature, u64)>,
    gets: u64,
}

impl Miniatures {
    /// Miniatures of at most `reach_pages` sampled pages.
    pub(super) fn new(row: &EvictionPolicyRow, reach_pages: u32) -> Self {
        let mut sizes = SIZES
            .map(|part| {
                let pages = u64::from(reach_pages) * u64::from(part);
                u32::try_from(pages.div_ceil(32)).unwrap_or(u32::MAX)
            })
            .to_vec();
        sizes.dedup();
        let make = |pages| (pages, Miniature::new(row, pages), 0);
        Self {
            all: sizes.into_iter().map(make).collect(),
            gets: 0,
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let each = self.all.iter();
        each.map(|(_, miniature, _)| miniature.memory_bytes()).sum()
    }

    pub(super) fn observe(&mut self, event: &Event) {
        // The lower bits chose the sample.
        let page = (event.page >> 32) as u32;
        self.gets += u64::from(!matches!(event.kind, EventKind::Put | EventKind::Flushed));
        for (_, miniature, misses) in &mut self.all {
            let hit = match event.kind {
                EventKind::Hit => miniature.get(page, false, false),
                EventKind::Kept => miniature.get(page, true, false),
                EventKind::Missed => miniature.get(page, event.inclusive, true),
                EventKind::Put => {
                    miniature.put(page);
                    continue;
                }
                EventKind::Flushed => {
                    miniature.flush(page);
                    continue;
                }
            };
            *misses += u64::from(!hit);
        }
    }

    /// The curve, at sizes multiplied by `scale`.
    pub(super) fn curve(&self, scale: u64) -> Result<MissRatioCurve, CurveError> {
        let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
        let (mut before_size, mut before, mut before_high) = (0, 1.0_f64, 1.0_f64);
        for (pages, _, misses) in &self.all {
            let size = u64::from(*pages).saturating_mul(scale);
            let counted = *misses as f64 / (self.gets as f64).max(1.0);
            let ratio = counted.min(before);
            let high = counted.max(ratio);
            for step in 0..=STEPS {
                let share = step as f64 / STEPS as f64;
                let at = before_size + (size - before_size) * step / STEPS;
                let is_end = step == STEPS;
                let point = CurvePoint {
                    size: PageCount(at),
                    // The sum may be off by its rounding, which the band at the end does not allow.
                    miss_ratio: if is_end {
                        ratio
                    } else {
                        (before + (ratio - before) * share).clamp(ratio, before)
                    },
                    low: ratio,
                    high: if is_end { high } else { before_high.max(high) },
                    misses: None,
                };
                match points.last_mut() {
                    // The size that ends one line begins the next.
                    Some(last) if last.size == point.size => {
                        last.low = last.low.min(point.low);
                        last.high = last.high.max(point.high);
                    }
                    _ => points.push(point),
                }
            }
            (before_size, before, before_high) = (size, ratio, high);
        }
        MissRatioCurve::new(points, self.gets)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use plimsoll_flow::Whole as _;
    use plimsoll_hcache::{
        ClientOptions, EVICTION_POLICIES, Handle, Observer, PAGE_BYTES, PoolOptions, Store,
        StoreOptions,
    };
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    struct Observed(Mutex<Miniatures>);

    impl Observer for Observed {
        fn observe(&self, events: &[Event]) {
            let mut all = self.0.lock().unwrap();
            events.iter().for_each(|event| all.observe(event));
        }
    }

    /// Plays references on a pool of `size` pages, behind a client's own pages in LRU order if it is private. Returns the
    /// share of gets that hit, and the miniatures' curve.
    fn play(row: &'static EvictionPolicyRow, size: u64, shared: bool) -> (f64, MissRatioCurve) {
        const OWN_PAGES: usize = 100;
        let observed = Arc::new(Observed(Mutex::new(Miniatures::new(row, 2048))));
        let store = Store::new(StoreOptions {
            shards: 1,
            eviction: row,
            observer: Some(Arc::<Observed>::clone(&observed)),
            ..StoreOptions::new(16 << 20)
        });
        let client = store.unwrap();
        let client = client.create_client(ClientOptions::new("c")).unwrap();
        let kind = if shared {
            PoolOptions::shared(1)
        } else {
            PoolOptions::private()
        };
        let options = PoolOptions {
            capacity_pages: Some(size),
            ..kind
        };
        let pool = client.create_pool(options).unwrap();
        let mut random = fastrand::Rng::with_seed(7);
        let mut own = std::collections::VecDeque::new();
        let mut buffer = [0; PAGE_BYTES];
        for turn in 0..60_000_u32 {
            // Pages used by a power law, and every so often a scan.
            let popular = u32::whole(3000.0 * random.f64().powi(4));
            let page = if turn % 4000 < 600 {
                10_000 + turn % 3000
            } else {
                popular
            };
            let handle = |index| Handle {
                pool,
                object: 1,
                index,
            };
            if shared {
                if !client.get(handle(page), &mut buffer).unwrap() {
                    client.put(handle(page), &buffer).unwrap();
                }
                continue;
            }
            match own.iter().position(|&other| other == page) {
                Some(at) => drop(own.remove(at)),
                None => drop(client.get(handle(page), &mut buffer).unwrap()),
            }
            own.push_back(page);
            if own.len() > OWN_PAGES {
                let out = own.pop_front().unwrap();
                client.put(handle(out), &buffer).unwrap();
            }
        }
        let hit_ratio = client.store().stats().counters.hit_ratio().unwrap();
        let curve = observed.0.lock().unwrap().curve(1).unwrap();
        (hit_ratio, curve)
    }

    /// The curve that one store's events give is that of stores of other sizes, by every policy and kind of pool.
    #[test]
    fn a_stores_events_predict_stores_of_other_sizes() {
        let sizes = [256, 512, 1024, 1536];
        for row in EVICTION_POLICIES {
            for shared in [false, true] {
                let played = sizes.map(|size| play(row, size, shared));
                for (observed, (_, curve)) in sizes.iter().zip(&played) {
                    for (size, (hit_ratio, _)) in sizes.iter().zip(&played) {
                        let predicted = 1.0 - curve.miss_ratio(PageCount(*size));
                        assert!(
                            (predicted - hit_ratio).abs() < 0.02,
                            "{row:?}, shared {shared}: {predicted} of {hit_ratio} at {size}, observed at {observed}"
                        );
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_counts_are_a_curve(
            (gets, misses) in (1..1_000_000_u64).prop_flat_map(|gets| (Just(gets), vec(0..=gets, SIZES.len()))),
        ) {
            let mut all = Miniatures::new(EVICTION_POLICIES[0], 32);
            all.gets = gets;
            for (miniature, misses) in all.all.iter_mut().zip(misses) {
                miniature.2 = misses;
            }
            let curve = all.curve(8);
            prop_assert!(curve.is_ok(), "{:?}", curve);
        }
    }

    #[test]
    fn a_curve_is_level_where_more_memory_misses_more() {
        let mut all = Miniatures::new(EVICTION_POLICIES[0], 32);
        all.gets = 100;
        let misses = [90, 60, 70, 50, 50, 50, 50, 50, 50, 50, 50, 50, 50, 50, 40];
        for (miniature, misses) in all.all.iter_mut().zip(misses) {
            miniature.2 = misses;
        }
        let curve = all.curve(1000).unwrap();
        let at = |pages| {
            let CurvePoint {
                miss_ratio,
                low,
                high,
                ..
            } = curve.at(PageCount(pages));
            (miss_ratio, low, high)
        };
        assert_eq!(at(1000), (0.9, 0.6, 0.9));
        assert_eq!(at(1500), (0.75, 0.6, 0.9));
        assert_eq!(at(2500), (0.6, 0.6, 0.7));
        assert_eq!(at(3000), (0.6, 0.5, 0.7));
        assert_eq!(at(10_000), (0.5, 0.5, 0.5));
        assert_eq!(at(40_000), (0.4, 0.4, 0.4));
    }
}
