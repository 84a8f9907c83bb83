//! Keyed hashing of page numbers: which pages are sampled, and where tables keep them.
//!
//! Sampling needs a hash that treats every page alike and gives the same answer
//! on every machine; a table needs one whose collisions nobody can aim at. Both
//! get the same bijection of 64 bits under a key: a stated seed for the first, a
//! random one for the second.
//!
//! Source: the finaliser is the one of `SplitMix64` (Steele, Lea, Flood 2014).
//! Not here: anything that resists an attacker who can read the key.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use plimsoll_flow::PageNumber;

use crate::EstimatorError;

/// Mixes all bits of `value` into all bits of the result; a bijection that keeps 0.
pub(crate) fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The hash of page numbers under one key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageHash {
    key: u64,
}

impl PageHash {
    /// The same for one seed everywhere, unrelated for any two seeds.
    pub(crate) fn seeded(seed: u64) -> Self {
        // The odd constant keeps seed 0 from being the key 0, under which page 0 is special.
        Self {
            key: mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)),
        }
    }

    /// Another one each time, for tables.
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

/// A table of pages that no choice of page numbers makes slow.
pub(crate) type PageMap<V> = HashMap<PageNumber, V, PageHash>;

/// Returns an empty table under a key of its own.
pub(crate) fn page_map<V>() -> PageMap<V> {
    HashMap::with_hasher(PageHash::salted())
}

impl BuildHasher for PageHash {
    type Hasher = PageHasher;

    fn build_hasher(&self) -> PageHasher {
        PageHasher(self.key)
    }
}

/// [`PageHash`] at work for a table; the state is the hash so far.
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

/// A sample of all pages: each is in it or not for good, with a stated chance.
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

    /// The share of pages sampled: the rate asked for, to within 2^-64.
    pub(crate) fn rate(&self) -> f64 {
        (self.limit as f64 + 1.0) / HASHES
    }

    /// Returns the page's hash if it is sampled. Its low bits do not depend on that.
    pub(crate) fn hash_if_sampled(&self, page: PageNumber) -> Option<u64> {
        let hash = self.hash.of(page);
        (hash <= self.limit).then_some(hash)
    }
}

/// How many hashes there are: 2^64.
const HASHES: f64 = 18_446_744_073_709_551_616.0;

/// Refuses what is not a share of something.
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

    #[test]
    fn a_seed_samples_the_same_pages_on_every_machine() {
        let sample = PageSample::new(0.1, 7).unwrap();
        let pages = (0..60).map(PageNumber);
        let sampled: Vec<_> = pages
            .filter(|&page| sample.hash_if_sampled(page).is_some())
            .map(|page| page.0)
            .collect();
        // By a separate program, from the formula.
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
