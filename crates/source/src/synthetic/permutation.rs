//! Renumbering of pages at random, without a table.
//!
//! A balanced Feistel network of four rounds is a bijection on numbers with an even
//! number of bits; repeating it until the result is below `pages` restricts it to those
//! (Black and Rogaway 2002). As the power of four is below 4 x `pages`, this takes
//! fewer than four steps on average.

use plimsoll_flow::{SplitMix, mix};

/// A bijection of the numbers below `pages`.
#[derive(Debug)]
pub(super) struct Permutation {
    pages: u64,
    half_bits: u32,
    keys: [u64; 4],
}

impl Permutation {
    pub(super) fn new(pages: u64, seed: u64) -> Self {
        let mut counter = SplitMix(seed);
        let bits = u64::BITS - pages.saturating_sub(1).leading_zeros();
        Self {
            pages,
            half_bits: bits.div_ceil(2).max(1),
            keys: std::array::from_fn(|_| counter.bits()),
        }
    }

    /// Returns the new number of `page`, which must be below `pages`.
    #[inline]
    pub(super) fn apply(&self, page: u64) -> u64 {
        let mut page = self.encrypt(page);
        while page >= self.pages {
            page = self.encrypt(page);
        }
        page
    }

    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_number_is_met_once(pages in 1u64..2_000, seed: u64) {
            let permutation = Permutation::new(pages, seed);
            let mut met: Vec<_> = (0..pages).map(|page| permutation.apply(page)).collect();
            met.sort_unstable();
            prop_assert!(met.into_iter().eq(0..pages));
        }
    }
}
