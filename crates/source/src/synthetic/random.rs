//! Reproducible random numbers: xoshiro256++ 1.0, seeded by splitmix64, as
//! recommended by their authors (Blackman and Vigna).
//!
//! Implemented here because traces must be reproducible in every version, which
//! libraries of random numbers do not guarantee.

use plimsoll_flow::SplitMix;

/// A stream of random numbers.
#[derive(Debug)]
pub(super) struct Random {
    state: [u64; 4],
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        let mut counter = SplitMix(seed);
        Self {
            state: std::array::from_fn(|_| counter.bits()),
        }
    }

    /// Returns 64 random bits.
    #[inline]
    pub(super) fn bits(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let result = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c, d) = (c ^ a, d ^ b);
        self.state = [a ^ d, b ^ c, c ^ (b << 17), d.rotate_left(45)];
        result
    }

    /// Returns a uniformly distributed number below `bound`, which is not 0 (Lemire 2019).
    #[inline]
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        let draw = |random: &mut Self| {
            let product = u128::from(random.bits()) * u128::from(bound);
            #[expect(clippy::cast_possible_truncation, reason = "the two halves are meant")]
            ((product >> 64) as u64, product as u64)
        };
        let (mut high, mut low) = draw(self);
        if low < bound {
            let unfair = bound.wrapping_neg() % bound;
            while low < unfair {
                (high, low) = draw(self);
            }
        }
        high
    }

    /// Returns a number of at least 0.0 and below 1.0, in steps of 2^-53.
    #[inline]
    pub(super) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generators_give_their_authors_numbers() {
        let mut random = Random {
            state: [1, 2, 3, 4],
        };
        let bits: [u64; 5] = std::array::from_fn(|_| random.bits());
        assert_eq!(
            bits,
            [
                41_943_041,
                58_720_359,
                3_588_806_011_781_223,
                3_591_011_842_654_386,
                9_228_616_714_210_784_205
            ]
        );
    }

    #[test]
    fn numbers_below_a_bound_are_equally_likely() {
        let mut random = Random::new(1);
        let mut counts = [0u32; 6];
        for _ in 0..60_000 {
            counts[usize::try_from(random.below(6)).unwrap()] += 1;
        }
        assert!(counts.iter().all(|count| (9_600..10_400).contains(count)));
        assert!((0..1000).all(|_| random.below(1) == 0));
    }

    #[test]
    fn a_unit_never_reaches_one() {
        let mut random = Random::new(2);
        assert!((0..10_000).all(|_| (0.0..1.0).contains(&random.unit())));
    }
}
