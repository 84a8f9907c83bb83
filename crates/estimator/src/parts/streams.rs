//! Streams for the tests, each generated from a seed.

use plimsoll_flow::{MissRatioCurve, PageNumber};
use proptest::prelude::*;

use crate::estimator::Estimator;

/// An independent random number generator, so that no hash under test affects the streams.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0xda94_2042_e4dd_58b5) | 1);
        for _ in 0..8 {
            random.next();
        }
        random
    }

    /// Xorshift with a multiplied output (xorshift64*).
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// At least 0.0, below 1.0.
    pub(crate) fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// All pages equally likely: misses 1 - c / pages.
pub(crate) fn uniform(pages: u64, seed: u64) -> impl Iterator<Item = u64> {
    let mut random = Random::new(seed);
    std::iter::repeat_with(move || (random.share() * pages as f64) as u64)
}

/// Page `i` with a probability proportional to (i + 1)^-exponent.
pub(crate) fn zipf(pages: u64, exponent: f64, seed: u64) -> impl Iterator<Item = u64> {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=pages)
        .map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        })
        .collect();
    let mut random = Random::new(seed);
    std::iter::repeat_with(move || {
        let at = random.share() * sum;
        sums.partition_point(|&below| below <= at) as u64
    })
}

/// The pages in turn, repeatedly.
pub(crate) fn cycle(pages: u64) -> impl Iterator<Item = u64> {
    (0..pages).cycle()
}

pub(crate) fn batch_of(pages: impl IntoIterator<Item = u64>) -> Vec<PageNumber> {
    pages.into_iter().map(PageNumber).collect()
}

pub(crate) fn curve_of(
    estimator: &mut dyn Estimator,
    pages: impl IntoIterator<Item = u64>,
) -> MissRatioCurve {
    estimator.observe(&batch_of(pages));
    estimator.curve().unwrap()
}

/// Up to so many requests to a language model, each of which continues one of a few conversations with up to 5 blocks below `blocks`.
pub(crate) fn requests(blocks: u64, most: usize) -> impl Strategy<Value = Vec<Vec<u64>>> {
    let request = (prop::collection::vec(0..blocks, 1..6), 0_u64..4, 1_u64..8);
    let request = request.prop_map(|(blocks, talk, turns)| {
        let shared = (0..turns).map(|turn| 100 + 10 * talk + turn);
        shared.chain(blocks).collect()
    });
    prop::collection::vec(request, 1..most)
}

/// The blocks of all requests, and the request of each.
pub(crate) fn numbered(requests: &[Vec<u64>]) -> (Vec<PageNumber>, Vec<u32>) {
    let numbered = (7_u32..).zip(requests);
    let (blocks, numbers): (Vec<_>, _) = numbered
        .flat_map(|(number, request)| request.iter().map(move |&block| (block, number)))
        .unzip();
    (batch_of(blocks), numbers)
}
