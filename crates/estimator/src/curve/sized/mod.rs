//! LRU of objects with sizes: the curve over bytes, by requests and by bytes.
//!
//! **Definition.** The byte distance of a reference is the size of all other objects referenced since the object's last
//! reference, plus its own size; an object has the size of its last reference, at least one byte. A reference is a hit at `c`
//! bytes if its distance is at most `c`. The curve by requests counts references, the one by bytes weights each with the size
//! that it asks for.
//!
//! **What that is.** With sizes LRU is no strict stack algorithm: a cache of `c` bytes that refuses objects larger than itself, as
//! real ones do, may lack an object that a smaller cache has, because the larger one made room for an object that the smaller
//! one refused. The definition is exactly the cache that admits every object, one larger than the cache emptying it, as
//! long as objects keep their size (a test simulates it). An object that becomes smaller brings older ones nearer, which
//! a cache has already evicted; the definition counts them as hits.
//!
//! **Sample.** At a rate `R` below 1 a share `R` of the objects is followed ([Waldspurger15]). Other objects' bytes are
//! scaled by `1 / R`, the object's own are not. The surplus of sampled references or bytes over the expected ones is
//! attributed to hot objects, which hit everywhere. The band is the spread of sixteen parts of the sample, each with
//! distances of its own.
//!
//! Source: [Mattson70], [Olken81] with sizes for leaves; [Waldspurger15] §3 for the sample.
//! Cost: O(log objects) per sampled reference; 32 to 56 bytes per sampled object and 24 for each distinct distance, twice
//! that at a rate below 1.
//! Not here: admission, and policies other than LRU (`simulation`).

mod stack;

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use crate::error::EstimatorError;
use crate::parts::hash::PageSample;
use crate::parts::steps::{REPLICATES, Steps, replicate_of};
use stack::SizedStack;

/// The two curves of a stream of objects. Sizes are bytes: pages of one byte.
#[derive(Debug, Clone, PartialEq)]
pub struct SizedCurves {
    /// Share of references that miss.
    pub by_requests: MissRatioCurve,
    /// Share of requested bytes that miss.
    pub by_bytes: MissRatioCurve,
}

/// LRU of objects with sizes, exact or on a sample of the objects.
///
/// ```
/// use plimsoll_estimator::SizedLru;
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let mut lru = SizedLru::exact();
/// lru.observe(&[1, 2, 1, 2].map(PageNumber), &[100, 900, 100, 900]);
/// let curves = lru.curves()?;
/// assert_eq!(curves.by_requests.miss_ratio(PageCount(999)), 1.0);
/// assert_eq!(curves.by_requests.miss_ratio(PageCount(1000)), 0.5);
/// # Ok::<(), plimsoll_flow::CurveError>(())
/// ```
#[derive(Debug, Clone)]
pub struct SizedLru {
    sample: PageSample,
    whole: Part,
    /// Disjoint parts of the sample; none if it is the whole.
    parts: Vec<Part>,
    /// Of all objects.
    total: Weight,
}

/// References, and the bytes that they ask for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Weight {
    requests: u64,
    bytes: u64,
}

impl Weight {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
    }
}

/// References by byte distance.
#[derive(Debug, Clone, Default)]
struct Reuses {
    /// Each by rising distance, each distance once, and at least twice as long as the next: they are merged in linear time.
    runs: Vec<Vec<(u64, Weight)>>,
    /// In the order of references.
    recent: Vec<(u64, Weight)>,
    /// With first references.
    all: Weight,
}

/// A sample of objects, with its own distances.
#[derive(Debug, Clone)]
struct Part {
    stack: SizedStack,
    reuses: Reuses,
}

impl Part {
    fn new() -> Self {
        Self {
            stack: SizedStack::new(),
            reuses: Reuses::default(),
        }
    }

    /// Records a reference; `scale` bytes of other objects stand for one of the sample.
    fn touch(&mut self, hash: u64, size: u32, scale: f64) {
        let distance = self.stack.touch(hash, size).map(|reuse| {
            let others = scaled(reuse.others_bytes, scale);
            others.saturating_add(reuse.own_bytes.into())
        });
        let weight = Weight {
            requests: 1,
            bytes: size.into(),
        };
        self.reuses.record(distance, weight);
    }
}

/// Number of reuses that are kept as they come.
const RECENT: usize = 1 << 16;

impl Reuses {
    fn record(&mut self, distance: Option<u64>, weight: Weight) {
        self.all.add(weight);
        if let Some(distance) = distance {
            self.recent.push((distance, weight));
            if self.recent.len() == RECENT {
                self.sort_recent();
            }
        }
    }

    fn sort_recent(&mut self) {
        if self.recent.is_empty() {
            return;
        }
        self.recent.sort_unstable_by_key(|&(distance, _)| distance);
        self.runs.push(std::mem::take(&mut self.recent));
        self.unite_last();
        while let [.., before, last] = &self.runs[..]
            && before.len() < 2 * last.len()
        {
            self.merge_last();
        }
    }

    /// Merges the last two runs.
    fn merge_last(&mut self) {
        if let Some(mut last) = self.runs.pop()
            && let Some(run) = self.runs.last_mut()
        {
            run.append(&mut last);
            // This finds that there are two runs already, and merges them.
            run.sort_by_key(|&(distance, _)| distance);
            self.unite_last();
        }
    }

    /// Has each distance once in the last run.
    fn unite_last(&mut self) {
        let Some(run) = self.runs.last_mut() else {
            return;
        };
        run.dedup_by(|next, kept| {
            let is_same = next.0 == kept.0;
            if is_same {
                kept.1.add(next.1);
            }
            is_same
        });
        run.shrink_to_fit();
    }

    /// Makes a single run.
    fn merge_all<E>(&mut self, check: impl Fn() -> Result<(), E>) -> Result<(), E> {
        check()?;
        self.sort_recent();
        while self.runs.len() > 1 {
            check()?;
            self.merge_last();
        }
        Ok(())
    }

    fn memory_bytes(&self) -> usize {
        let reuses = self.runs.iter().map(Vec::capacity).sum::<usize>() + self.recent.capacity();
        reuses * size_of::<(u64, Weight)>()
    }
}

impl SizedLru {
    /// Follows all objects.
    pub fn exact() -> Self {
        Self::of(PageSample::whole(0))
    }

    /// Follows a share `rate` of the objects, above 0.0 and at most 1.0, selected by `seed`.
    ///
    /// # Errors
    ///
    /// [`EstimatorError::RateOutOfRange`] for any other rate.
    pub fn sampled(rate: f64, seed: u64) -> Result<Self, EstimatorError> {
        Ok(Self::of(PageSample::new(rate, seed)?))
    }

    fn of(sample: PageSample) -> Self {
        let parts = if sample.rate() < 1.0 { REPLICATES } else { 0 };
        Self {
            sample,
            whole: Part::new(),
            parts: vec![Part::new(); parts],
            total: Weight::default(),
        }
    }

    /// Processes the objects of the next references, with the size of each in bytes.
    ///
    /// # Panics
    ///
    /// If there are not as many sizes as objects, and at 2^32 sampled objects.
    pub fn observe(&mut self, objects: &[PageNumber], sizes_bytes: &[u32]) {
        assert_eq!(objects.len(), sizes_bytes.len(), "a size for each object");
        let scale = 1.0 / self.sample.rate();
        for (&object, &size) in objects.iter().zip(sizes_bytes) {
            let size = size.max(1);
            self.total.requests += 1;
            self.total.bytes += u64::from(size);
            let Some(hash) = self.sample.hash_if_sampled(object) else {
                continue;
            };
            self.whole.touch(hash, size, scale);
            if let Some(part) = self.parts.get_mut(replicate_of(hash)) {
                part.touch(hash, size, scale * REPLICATES as f64);
            }
        }
    }

    /// Number of references observed.
    pub fn references(&self) -> u64 {
        self.total.requests
    }

    /// Number of those to sampled objects.
    pub fn sampled_references(&self) -> u64 {
        self.whole.reuses.all.requests
    }

    /// Sum of the sizes of all distinct objects, scaled up from the sample.
    pub fn footprint_bytes(&self) -> u64 {
        scaled(self.whole.stack.total_bytes(), 1.0 / self.sample.rate())
    }

    /// The curves of everything observed so far.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if no reference was sampled.
    pub fn curves(&mut self) -> Result<SizedCurves, CurveError> {
        self.curves_checked(|| Ok(()))
    }

    /// The same, with checks between its steps, each of which takes time in proportion to the distinct distances: such as for an
    /// interrupt.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if no reference was sampled, and that of the check, which ends it; more may be observed then.
    pub fn curves_checked<E: From<CurveError>>(
        &mut self,
        check: impl Fn() -> Result<(), E>,
    ) -> Result<SizedCurves, E> {
        for part in self.parts.iter_mut().chain([&mut self.whole]) {
            part.reuses.merge_all(&check)?;
        }
        Ok(SizedCurves {
            by_requests: self.curve(|weight| weight.requests, &check)?,
            by_bytes: self.curve(|weight| weight.bytes, &check)?,
        })
    }

    fn curve<E: From<CurveError>>(
        &self,
        of: impl Fn(Weight) -> u64 + Copy,
        check: &impl Fn() -> Result<(), E>,
    ) -> Result<MissRatioCurve, E> {
        // What all references or bytes would be in the sample on average.
        let expected = of(self.total) as f64 * self.sample.rate();
        check()?;
        let mut steps = steps_of(&self.whole.reuses, expected, of);
        let expected = expected / REPLICATES as f64;
        let mut replicates = Vec::new();
        for Part { reuses, .. } in &self.parts {
            check()?;
            let steps = steps_of(reuses, expected, of);
            // One without references has no curve.
            replicates.extend(steps.into_curve(reuses.all.requests).ok());
        }
        check()?;
        steps.band(&replicates, 1.0 - self.sample.rate());
        Ok(steps.into_curve(self.sampled_references())?)
    }

    /// Bytes of heap allocated now.
    pub fn memory_bytes(&self) -> usize {
        let parts = self.parts.iter().chain([&self.whole]);
        let bytes = parts.map(|part| part.reuses.memory_bytes() + part.stack.memory_bytes());
        bytes.sum()
    }
}

/// The steps of a curve in which hits are shares of `expected`, and what the sample has too many hits always.
fn steps_of(reuses: &Reuses, expected: f64, of: impl Fn(Weight) -> u64) -> Steps {
    let mut steps = Steps::new();
    let mut misses = of(reuses.all);
    // There is one, unless nothing was observed or no curve was asked for.
    for &(distance, weight) in reuses.runs.iter().flatten() {
        misses -= of(weight);
        steps.down_to(distance, misses as f64 / expected, 0.0);
    }
    steps
}

fn scaled(bytes: u64, scale: f64) -> u64 {
    plimsoll_flow::PageCount(bytes).scaled(scale).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::{Random, batch_of, uniform, zipf};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;
    use std::cell::Cell;

    fn curves(lru: &mut SizedLru, references: &[(u64, u32)]) -> SizedCurves {
        let (pages, sizes): (Vec<_>, Vec<_>) = references.iter().copied().unzip();
        lru.observe(&batch_of(pages), &sizes);
        lru.curves().unwrap()
    }

    /// Hits by the definition, on a list of objects and their sizes, most recent first.
    fn naive_hits(references: &[(u64, u32)], cache_bytes: u64) -> Vec<bool> {
        let mut list: Vec<(u64, u32)> = Vec::new();
        let hits = references.iter().map(|&(object, size)| {
            let place = list.iter().position(|&(other, _)| other == object);
            let bytes = |place: usize| {
                list[..=place]
                    .iter()
                    .map(|&(_, size)| u64::from(size))
                    .sum::<u64>()
            };
            let hit = place.is_some_and(|place| bytes(place) <= cache_bytes);
            if let Some(place) = place {
                list.remove(place);
            }
            list.insert(0, (object, size));
            hit
        });
        hits.collect()
    }

    /// A cache that admits every object and evicts the least recently used until it fits.
    fn simulated_hits(references: &[(u64, u32)], cache_bytes: u64) -> Vec<bool> {
        let mut cache: Vec<(u64, u32)> = Vec::new();
        let hits = references.iter().map(|&(object, size)| {
            let before = cache.len();
            cache.retain(|&(other, _)| other != object);
            let hit = cache.len() < before;
            cache.insert(0, (object, size));
            while cache.iter().map(|&(_, size)| u64::from(size)).sum::<u64>() > cache_bytes {
                cache.pop();
            }
            hit
        });
        hits.collect()
    }

    fn ratios(references: &[(u64, u32)], hits: &[bool]) -> [f64; 2] {
        let bytes = |(_, size): &(u64, u32)| u64::from(*size);
        let missed = references.iter().zip(hits).filter(|&(_, hit)| !hit);
        let missed: Vec<_> = missed.map(|(reference, _)| reference).copied().collect();
        let all: u64 = references.iter().map(bytes).sum();
        let missed_bytes: u64 = missed.iter().map(bytes).sum();
        [
            missed.len() as f64 / references.len() as f64,
            missed_bytes as f64 / all as f64,
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition_whatever_the_sizes(
            references in prop::collection::vec((0_u64..30, 1_u32..40), 1..400),
            cache_bytes in 1_u64..900,
        ) {
            let curves = curves(&mut SizedLru::exact(), &references);
            let size = PageCount(cache_bytes);
            let expected = ratios(&references, &naive_hits(&references, cache_bytes));
            prop_assert_eq!([curves.by_requests.miss_ratio(size), curves.by_bytes.miss_ratio(size)], expected);
        }

        #[test]
        fn agrees_with_a_simulated_cache_where_objects_keep_their_size(
            objects in prop::collection::vec(0_u64..30, 1..400),
            sizes in prop::collection::vec(1_u32..99, 30),
            cache_bytes in 1_u64..2_000,
        ) {
            let references: Vec<_> = objects.iter().map(|&object| (object, sizes[object as usize])).collect();
            let curves = curves(&mut SizedLru::exact(), &references);
            let size = PageCount(cache_bytes);
            let expected = ratios(&references, &simulated_hits(&references, cache_bytes));
            prop_assert_eq!([curves.by_requests.miss_ratio(size), curves.by_bytes.miss_ratio(size)], expected);
        }

        #[test]
        fn a_sample_of_all_objects_is_exact(
            references in prop::collection::vec((0_u64..99, 1_u32..40), 1..9_000),
            seed in any::<u64>(),
        ) {
            let exact = curves(&mut SizedLru::exact(), &references);
            prop_assert_eq!(curves(&mut SizedLru::sampled(1.0, seed).unwrap(), &references), exact);
        }
    }

    #[test]
    fn a_check_ends_a_curve_and_leaves_what_was_observed() {
        let references: Vec<_> = uniform(9_000, 1)
            .zip(uniform(99, 2))
            .map(|(object, size)| (object, size as u32 + 1))
            .take(300_000)
            .collect();
        let (pages, sizes): (Vec<_>, Vec<_>) = references.iter().copied().unzip();
        for rate in [1.0, 0.5] {
            let mut lru = SizedLru::sampled(rate, 1).unwrap();
            let expected = curves(&mut lru.clone(), &references);
            lru.observe(&batch_of(pages.iter().copied()), &sizes);
            for checks in 0.. {
                let left = Cell::new(checks);
                let check = || match left.get() {
                    0 => Err(CurveError::Empty),
                    more => {
                        left.set(more - 1);
                        Ok(())
                    }
                };
                if let Ok(curves) = lru.clone().curves_checked(check) {
                    assert_eq!(curves, expected);
                    // Of one run each, a few merges and two curves at least.
                    assert!(checks >= 6, "{checks}");
                    break;
                }
                assert_eq!(left.get(), 0);
            }
            assert_eq!(lru.curves().unwrap(), expected);
        }
    }

    #[test]
    fn objects_of_one_size_have_the_curve_of_pages() {
        let pages: Vec<_> = zipf(500, 0.8, 1).take(9_000).collect();
        let references: Vec<_> = pages.iter().map(|&page| (page, 7)).collect();
        let curves = curves(&mut SizedLru::exact(), &references);
        let exact = crate::parts::streams::curve_of(&mut crate::ExactLru::new(), pages);
        for size in [1, 10, 77, 400, 500] {
            let expected = exact.miss_ratio(PageCount(size));
            for curve in [&curves.by_requests, &curves.by_bytes] {
                assert_eq!(curve.miss_ratio(PageCount(7 * size)), expected);
            }
        }
    }

    #[test]
    fn a_tenth_of_objects_of_very_different_sizes_is_right_to_two_and_a_half_percent() {
        let mut random = Random::new(1);
        // Sizes over three orders of magnitude.
        let sizes: Vec<_> = (0..20_000)
            .map(|_| 10_f64.powf(2.0 + 3.0 * random.share()) as u32)
            .collect();
        let pages: Vec<_> = zipf(20_000, 0.8, 1).take(200_000).collect();
        let references: Vec<_> = pages
            .iter()
            .map(|&page| (page, sizes[page as usize]))
            .collect();
        let mut exact = SizedLru::exact();
        let truth = curves(&mut exact, &references);
        let footprint = exact.footprint_bytes();
        let (mut error, mut held) = ([0.0; 2], 0);
        for seed in 0..5 {
            let mut sampled = SizedLru::sampled(0.1, seed).unwrap();
            let estimate = curves(&mut sampled, &references);
            for step in 1..=100 {
                let size = PageCount(footprint * step / 100);
                let pairs = [
                    (&estimate.by_requests, &truth.by_requests),
                    (&estimate.by_bytes, &truth.by_bytes),
                ];
                for (error, (estimate, truth)) in error.iter_mut().zip(pairs) {
                    let (point, truth) = (estimate.at(size), truth.miss_ratio(size));
                    *error += (point.miss_ratio - truth).abs() / 500.0;
                    held += u32::from(point.low <= truth && truth <= point.high);
                }
            }
        }
        assert!(error[0] <= 0.025 && error[1] <= 0.025, "{error:?}");
        assert!(held >= 850, "{held} of 1000");
    }

    #[test]
    fn without_a_sampled_object_there_are_no_curves() {
        let mut lru = SizedLru::sampled(1e-12, 1).unwrap();
        lru.observe(&batch_of(0..9), &[1; 9]);
        assert_eq!(lru.curves(), Err(CurveError::Empty));
        assert!(SizedLru::sampled(0.0, 1).is_err());
    }
}
