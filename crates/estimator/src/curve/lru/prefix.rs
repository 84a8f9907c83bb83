//! Exact LRU of requests whose pages are of use only in order: the blocks of a prompt in the cache of a language model.
//!
//! The keys and values of a block depend on all tokens before it, so a block is a hit only if all earlier blocks of its
//! request are hits too. LRU is a stack, and every block hits from its distance plus one on; a block of a request therefore hits from
//! the largest distance of the request so far. Every block, hit or miss, is used in the order of the request.
//!
//! Source: [Mattson70]; the prefix is ours. Cost: that of exact LRU.
//! Not here: the requests, which the source numbers; sampling, for which a block needs all blocks before it, unless its number is
//! theirs as well ([`PrefixPages`](crate::PrefixPages)).

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use super::{Distances, LruStack};

/// The exact miss-ratio curve of requests whose pages hit in order.
///
/// ```
/// use plimsoll_estimator::PrefixLru;
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let mut lru = PrefixLru::new();
/// // The second request repeats the first one's last block after another beginning.
/// lru.observe(&[1, 2, 9, 2].map(PageNumber), &[1, 1, 2, 2]);
/// assert_eq!(lru.curve()?.miss_ratio(PageCount(9)), 1.0);
/// # Ok::<(), plimsoll_flow::CurveError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct PrefixLru {
    stack: LruStack,
    distances: Distances,
    /// Distances of the current block of references; a work buffer.
    block: Vec<u32>,
    /// The last request, and the largest distance of its pages.
    request: Option<(u32, u32)>,
}

impl PrefixLru {
    /// Returns an estimator without observations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Processes references, each with the number of its request. Consecutive references of one number are one request.
    ///
    /// # Panics
    ///
    /// If there are not as many numbers as pages; at 2^32 pages.
    pub fn observe(&mut self, pages: &[PageNumber], requests: &[u32]) {
        assert_eq!(pages.len(), requests.len(), "a request for each reference");
        let (mut pages, mut requests) = (pages, requests);
        while !pages.is_empty() {
            let later = self.stack.touch_block(pages, &mut self.block);
            let (here, later_requests) = requests.split_at(pages.len() - later.len());
            for (distance, &request) in self.block.iter_mut().zip(here) {
                // A page that was never used has the largest number as its distance.
                if let Some((last, longest)) = self.request
                    && last == request
                {
                    *distance = longest.max(*distance);
                }
                self.request = Some((request, *distance));
            }
            self.distances.count(&self.block);
            (pages, requests) = (later, later_requests);
        }
    }

    /// The curve of everything observed so far.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if nothing was observed.
    pub fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        self.distances.curve()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::{numbered, requests};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;

    /// Runs a cache on requests and counts blocks that miss, or come after one that did.
    fn naive_misses(requests: &[Vec<u64>], size: usize) -> usize {
        let mut cache: Vec<u64> = Vec::new();
        let mut misses = 0;
        for request in requests {
            let mut is_whole = true;
            for &block in request {
                let place = cache.iter().position(|&other| other == block);
                is_whole &= place.is_some();
                misses += usize::from(!is_whole);
                if let Some(place) = place {
                    cache.remove(place);
                }
                cache.insert(0, block);
                cache.truncate(size);
            }
        }
        misses
    }

    proptest! {
        #[test]
        fn agrees_with_a_naive_cache_of_prefixes(
            requests in requests(40, 200),
            size in 0_usize..60,
            cut in 1_usize..300,
        ) {
            let mut lru = PrefixLru::new();
            let (blocks, numbers) = numbered(&requests);
            for (blocks, numbers) in blocks.chunks(cut).zip(numbers.chunks(cut)) {
                lru.observe(blocks, numbers);
            }
            let expected = naive_misses(&requests, size) as f64 / numbers.len() as f64;
            prop_assert_eq!(lru.curve().unwrap().miss_ratio(PageCount(size as u64)), expected);
        }
    }

    #[test]
    fn without_references_there_is_no_curve() {
        assert_eq!(PrefixLru::new().curve(), Err(CurveError::Empty));
    }
}
