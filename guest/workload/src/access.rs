//! Which page comes next: random numbers, Zipf's law, and a scattering of ranks.
//!
//! No generator here has a table, however large the array: a table would be
//! memory the workload uses beside the array, and would be traced with it.

/// Random numbers of 64 bits: `SplitMix64` (Steele, Lea, Flood 2014), period 2^64.
pub struct Random(u64);

impl Random {
    /// Starts the sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number, uniform over all `u64`.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, uniform but for a bias under `bound` / 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next()) * u128::from(bound);
        (wide >> 64) as u64
    }

    /// A number from 0.0 to under 1.0.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Ranks 0 to n - 1, rank i with probability proportional to 1 / (i + 1)^alpha.
///
/// Rejection-inversion (Hörmann & Derflinger 1996): a uniform number is turned
/// into a rank by the inverse of the integral of 1 / x^alpha, and thrown again if it
/// fell between that curve and the law's steps. Fewer than 1.2 draws a rank
/// for every n and every alpha >= 0; two logarithms and exponentials a draw.
pub struct Zipf {
    alpha: f64,
    ranks: f64,
    /// Integral up to 1.5, less the whole of the first rank.
    from: f64,
    /// Integral up to n + 0.5.
    to: f64,
    /// A draw this near to its rank from above is always under the steps.
    sure: f64,
}

impl Zipf {
    /// Takes the number of ranks, at least 1, and alpha, 0.0 (uniform) or above.
    pub fn new(ranks: u64, alpha: f64) -> Self {
        let mut zipf = Self {
            alpha,
            ranks: ranks as f64,
            from: 0.0,
            to: 0.0,
            sure: 0.0,
        };
        zipf.from = zipf.integral(1.5) - 1.0;
        zipf.to = zipf.integral(zipf.ranks + 0.5);
        zipf.sure = 2.0 - zipf.integral_inverse(zipf.integral(2.5) - zipf.density(2.0));
        zipf
    }

    /// Draws a rank, from 0.
    pub fn draw(&self, random: &mut Random) -> u64 {
        loop {
            let u = self.to + random.share() * (self.from - self.to);
            let x = self.integral_inverse(u);
            let rank = x.round().clamp(1.0, self.ranks);
            if rank - x <= self.sure || u >= self.integral(rank + 0.5) - self.density(rank) {
                return rank_from_zero(rank);
            }
        }
    }

    /// 1 / x^alpha.
    fn density(&self, x: f64) -> f64 {
        (-self.alpha * x.ln()).exp()
    }

    /// Integral of the density from 1 to x: (x^(1 - alpha) - 1) / (1 - alpha), or ln x.
    fn integral(&self, x: f64) -> f64 {
        let ln = x.ln();
        exp_m1_by((1.0 - self.alpha) * ln) * ln
    }

    fn integral_inverse(&self, area: f64) -> f64 {
        // Rounding may carry the product below -1, where the logarithm ends.
        let t = (area * (1.0 - self.alpha)).max(-1.0);
        (ln_1p_by(t) * area).exp()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rounded and clamped to 1 and the number of ranks, itself a u64"
)]
fn rank_from_zero(rank: f64) -> u64 {
    rank as u64 - 1
}

/// (e^x - 1) / x, also near 0.
fn exp_m1_by(x: f64) -> f64 {
    if x.abs() > 1e-8 {
        x.exp_m1() / x
    } else {
        1.0 + x / 2.0
    }
}

/// ln(1 + x) / x, also near 0.
fn ln_1p_by(x: f64) -> f64 {
    if x.abs() > 1e-8 {
        x.ln_1p() / x
    } else {
        1.0 - x / 2.0
    }
}

/// A permutation of 0 to n - 1: where in the array the page of a rank lies.
///
/// A Feistel network of four rounds over the next even power of two, walked until
/// the result is below n (Black & Rogaway 2002): under 4 walks on average.
pub struct Scatter {
    keys: [u64; 4],
    half_bits: u32,
    len: u64,
}

impl Scatter {
    /// Takes the length, at least 1, and a seed.
    pub fn new(len: u64, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let bits = u64::BITS - (len - 1).leading_zeros();
        Self {
            keys: [0; 4].map(|_| random.next()),
            half_bits: bits.div_ceil(2).max(1),
            len,
        }
    }

    /// Where `rank`, below the length, lies.
    pub fn place(&self, rank: u64) -> u64 {
        let mut place = rank;
        loop {
            place = self.network(place);
            if place < self.len {
                return place;
            }
        }
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            let mixed = Random::new(right ^ key).next() & mask;
            (left, right) = (right, left ^ mixed);
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_sequence_is_the_published_one() {
        // First outputs for seed 1234567, as in the reference implementation's test.
        let mut random = Random::new(1_234_567);
        assert_eq!(
            [random.next(), random.next(), random.next()],
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    /// The law itself, summed up: shares no code with the sampler.
    fn law(ranks: u64, alpha: f64) -> Vec<f64> {
        let weights: Vec<f64> = (1..=ranks).map(|i| (i as f64).powf(-alpha)).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / total).collect()
    }

    #[test]
    fn ranks_are_drawn_as_often_as_zipfs_law_says() {
        for alpha in [0.0, 0.5, 0.99, 1.0, 1.3, 3.0] {
            let (ranks, draws) = (50u64, 200_000);
            let zipf = Zipf::new(ranks, alpha);
            let mut random = Random::new(7);
            let mut counts = vec![0u64; 50];
            for _ in 0..draws {
                counts[usize::try_from(zipf.draw(&mut random)).unwrap()] += 1;
            }
            for (rank, (&count, share)) in counts.iter().zip(law(ranks, alpha)).enumerate() {
                let expected = share * f64::from(draws);
                // Five standard deviations: 300 comparisons, none by chance.
                let spread = 5.0 * expected.sqrt() + 1.0;
                assert!(
                    (count as f64 - expected).abs() < spread,
                    "alpha {alpha}, rank {rank}: {count} draws, {expected:.0} expected"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn a_scattering_reaches_every_place_once(len in 1u64..5000, seed: u64) {
            let scatter = Scatter::new(len, seed);
            let mut places: Vec<_> = (0..len).map(|rank| scatter.place(rank)).collect();
            places.sort_unstable();
            prop_assert!(places.into_iter().eq(0..len));
        }

        #[test]
        fn draws_stay_among_the_ranks(ranks in 1u64..1 << 40, alpha in 0.0f64..8.0, seed: u64) {
            let zipf = Zipf::new(ranks, alpha);
            let mut random = Random::new(seed);
            for _ in 0..50 {
                prop_assert!(zipf.draw(&mut random) < ranks);
                prop_assert!(random.below(ranks) < ranks);
            }
        }
    }
}
