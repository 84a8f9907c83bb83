//! Keyed hashing of page numbers, for sampling and for hash tables.
//!
//! Sampling needs a hash that treats all pages alike and gives the same result
//! on every machine; a table needs one whose collisions cannot be provoked. Both
//! use the same 64-bit bijection with a key: a stated seed for sampling, a
//! random one for tables.
//!
//! Not here: the bijection itself (`mix`); resistance to an attacker who can read the key.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use plimsoll_flow::{PageNumber, mix};

use crate::error::EstimatorError;
use crate::parts::filter::{Criterion, WORD_PAGES};
use crate::parts::sys::best_filter;

/// The hash of page numbers with one key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageHash {
    key: u64,
}

impl PageHash {
    /// The hash for a seed: the same everywhere for one seed, unrelated for any two seeds.
    pub(crate) fn seeded(seed: u64) -> Self {
        // The odd constant ensures that seed 0 is not key 0, with which page 0 would be a special case.
        Self {
            key: mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)),
        }
    }

    /// A hash with a new random key, for tables.
    pub(crate) fn salted() -> Self {
        Self {
            key: RandomState::new().hash_one(0_u64),
        }
    }

    /// Returns the page's hash, uniform over 64 bits.
    pub(crate) fn of(self, page: PageNumber) -> u64 {
        mix(page.0 ^ self.key)
    }
}

/// A table of pages that remains fast for any choice of page numbers.
pub(crate) type PageMap<V> = HashMap<PageNumber, V, PageHash>;

/// Returns an empty table with a key of its own.
pub(crate) fn page_map<V>() -> PageMap<V> {
    HashMap::with_hasher(PageHash::salted())
}

impl BuildHasher for PageHash {
    type Hasher = PageHasher;

    fn build_hasher(&self) -> PageHasher {
        PageHasher(self.key)
    }
}

/// [`PageHash`] as a hasher for a table; the state is the hash so far.
pub(crate) struct PageHasher(u64);

impl Hasher for PageHasher {
    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A sample of all pages: each page is permanently in it or not, with a stated probability.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageSample {
    hash: PageHash,
    /// The largest hash that is sampled.
    limit: u64,
}

impl PageSample {
    /// Samples a share `rate` of all pages, above 0.0 and at most 1.0.
    ///
    /// # Errors
    ///
    /// [`EstimatorError::RateOutOfRange`] for any other rate.
    pub(crate) fn new(rate: f64, seed: u64) -> Result<Self, EstimatorError> {
        check_rate(rate)?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "within 0 and 2^64"
        )]
        let sampled = (rate * HASHES) as u128;
        let limit = u64::try_from(sampled.max(1) - 1).unwrap_or(u64::MAX);
        Ok(Self {
            hash: PageHash::seeded(seed),
            limit,
        })
    }

    /// Samples every page.
    pub(crate) fn whole(seed: u64) -> Self {
        Self {
            hash: PageHash::seeded(seed),
            limit: u64::MAX,
        }
    }

    /// The share of pages sampled: the requested rate, to within 2^-64.
    pub(crate) fn rate(&self) -> f64 {
        (self.limit as f64 + 1.0) / HASHES
    }

    /// Returns the page's hash if it is sampled. Its low bits do not depend on that.
    pub(crate) fn hash_if_sampled(&self, page: PageNumber) -> Option<u64> {
        let hash = self.hash.of(page);
        (hash <= self.limit).then_some(hash)
    }

    /// Whether a page with this hash is sampled.
    pub(crate) fn contains_hash(&self, hash: u64) -> bool {
        hash <= self.limit
    }

    /// Restricts the sample to pages with hashes below `hash`, which is above 0.
    pub(crate) fn shrink_below(&mut self, hash: u64) {
        debug_assert!(hash > 0 && hash - 1 <= self.limit);
        self.limit = hash - 1;
    }

    /// Replaces the contents of `sampled` by those of `pages` that are sampled, in order, with their index and their
    /// hash. Gives the same result as [`hash_if_sampled`](Self::hash_if_sampled) for each, in a fraction of the time.
    ///
    /// Most efficient for some thousand pages at a time ([`FILTER_PAGES`]).
    pub(crate) fn select(&self, pages: &[PageNumber], sampled: &mut Vec<SampledPage>) {
        sampled.clear();
        let filter = best_filter();
        let criterion = Criterion {
            key: self.hash.key,
            limit: self.limit,
        };
        let mut chosen = [0; FILTER_PAGES / WORD_PAGES];
        let (blocks, tail) = pages.as_chunks::<WORD_PAGES>();
        let mut place = 0;
        for blocks in blocks.chunks(chosen.len()) {
            filter(blocks, criterion, &mut chosen[..blocks.len()]);
            for (block, &word) in blocks.iter().zip(&chosen) {
                let mut word = word;
                while word != 0 {
                    let bit = word.trailing_zeros() as usize;
                    word &= word - 1;
                    sampled.push(SampledPage {
                        place: place + bit,
                        hash: self.hash.of(block[bit]),
                    });
                }
                place += WORD_PAGES;
            }
        }
        for (place, &page) in (place..).zip(tail) {
            if let Some(hash) = self.hash_if_sampled(page) {
                sampled.push(SampledPage { place, hash });
            }
        }
    }
}

/// Number of pages filtered before the sampled ones are processed.
pub(crate) const FILTER_PAGES: usize = 2048;

/// A sampled page of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SampledPage {
    /// Its index in the slice.
    pub(crate) place: usize,
    /// Its hash: no other page has the same.
    pub(crate) hash: u64,
}

/// Number of hashes: 2^64.
const HASHES: f64 = 18_446_744_073_709_551_616.0;

/// Returns an error for a rate outside its range.
pub(crate) fn check_rate(rate: f64) -> Result<(), EstimatorError> {
    if rate > 0.0 && rate <= 1.0 {
        Ok(())
    } else {
        Err(EstimatorError::RateOutOfRange { rate })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_seed_samples_the_same_pages_on_every_machine() {
        let sample = PageSample::new(0.1, 7).unwrap();
        let pages = (0..60).map(PageNumber);
        let sampled: Vec<_> = pages
            .filter(|&page| sample.hash_if_sampled(page).is_some())
            .map(|page| page.0)
            .collect();
        // Computed by a separate program, from the formula.
        assert_eq!(sampled, [1, 6, 9, 29, 31, 34, 38, 46, 49, 54]);
    }

    #[test]
    fn every_page_has_the_same_chance() {
        for page in [0, 1, 4096, u64::MAX].map(PageNumber) {
            let hits = (0..20_000)
                .filter(|&seed| {
                    let sample = PageSample::new(0.25, seed).unwrap();
                    sample.hash_if_sampled(page).is_some()
                })
                .count();
            // Five standard deviations of a binomial count: 306.
            assert!((4_694..=5_306).contains(&hits), "page {page}: {hits}");
        }
    }

    #[test]
    fn neighbouring_pages_are_sampled_as_if_by_chance() {
        for seed in 0..5 {
            let sample = PageSample::new(0.01, seed).unwrap();
            let pages = (0..1_000_000).map(PageNumber);
            let hits = pages
                .filter(|&page| sample.hash_if_sampled(page).is_some())
                .count();
            assert!((9_500..=10_500).contains(&hits), "seed {seed}: {hits}");
        }
    }

    /// Pearson's statistic of the hashes' top eight bits, in standard deviations of a normal variable
    /// (255 degrees of freedom).
    fn unevenness(hashes: impl Iterator<Item = u64>) -> f64 {
        let mut counts = [0.0_f64; 256];
        let mut all = 0.0;
        for hash in hashes {
            counts[(hash >> 56) as usize] += 1.0;
            all += 1.0;
        }
        let expected = all / 256.0;
        let statistic: f64 = counts.iter().map(|c| (c - expected).powi(2)).sum();
        (statistic / expected - 255.0) / 510.0_f64.sqrt()
    }

    #[test]
    fn dense_strided_and_random_pages_spread_evenly() {
        let mut random = crate::parts::streams::Random::new(5);
        for seed in 0..5 {
            let hash = PageHash::seeded(seed);
            for stride_bits in [0, 1, 8, 12, 20, 32, 44] {
                let hashes = (0..1 << 18).map(|n: u64| hash.of(PageNumber(n << stride_bits)));
                let deviations = unevenness(hashes);
                assert!(deviations.abs() < 6.0, "2^{stride_bits}: {deviations}");
            }
            let hashes = (0..1 << 18).map(|_| hash.of(PageNumber(random.next())));
            let deviations = unevenness(hashes);
            assert!(deviations.abs() < 6.0, "random: {deviations}");
        }
    }

    proptest! {
        #[test]
        fn a_slice_is_sampled_as_each_of_its_pages(
            pages in prop::collection::vec(
                prop_oneof![any::<u64>(), 0_u64..99, (0_u64..9).prop_map(|n| u64::MAX - n)],
                0..300,
            ),
            copies in 1_usize..40,
            rate in prop_oneof![Just(1.0), Just(1e-12), 1e-3_f64..1.0],
            seed in any::<u64>(),
        ) {
            let pages: Vec<_> = pages.into_iter().map(PageNumber).collect::<Vec<_>>().repeat(copies);
            let sample = PageSample::new(rate, seed).unwrap();
            let mut sampled = vec![SampledPage { place: 9, hash: 9 }];
            sample.select(&pages, &mut sampled);
            let one_by_one = pages.iter().enumerate().filter_map(|(place, &page)| {
                let hash = sample.hash_if_sampled(page)?;
                Some(SampledPage { place, hash })
            });
            prop_assert_eq!(sampled, one_by_one.collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_whole_is_a_sample_and_no_share_beyond_it() {
        let whole = PageSample::new(1.0, 3).unwrap();
        assert_eq!(whole.rate(), 1.0);
        assert!((0..10_000).all(|page| whole.hash_if_sampled(PageNumber(page)).is_some()));
        for rate in [0.0, -0.5, 1.000_001, f64::NAN, f64::INFINITY] {
            let refused = PageSample::new(rate, 3).unwrap_err();
            assert!(matches!(refused, EstimatorError::RateOutOfRange { .. }));
        }
    }
}
