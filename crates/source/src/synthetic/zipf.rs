//! Ranks with an exact Zipf distribution, by rejection-inversion: no table, about one draw per rank.
//!
//! Source: Hörmann and Derflinger, "Rejection-inversion to generate variates from
//! monotone discrete distributions", 1996, §3. The hat over rank k is the integral of
//! h(x) = x^-alpha from k - 1/2 to k + 1/2, which is never less than h(k) because h is convex.
//! Departs from it in computing through `expm1` and `ln_1p`, so that exponents
//! near 1, where the integral turns into a logarithm, keep their accuracy.
//!
//! Cost: a logarithm and an exponential per draw; below 1.1 draws per rank on average.

use plimsoll_flow::Whole as _;

use super::random::Random;

/// Zipf's law over the ranks 1 to `ranks`.
#[derive(Debug)]
pub(super) struct Zipf {
    ranks: u64,
    alpha: f64,
    /// Integral up to the lower and the upper limit of the range from which ranks are drawn.
    low: f64,
    high: f64,
    /// Distance from its rank within which a point is accepted without computing.
    squeeze: f64,
}

impl Zipf {
    pub(super) fn new(ranks: u64, alpha: f64) -> Self {
        let squeeze = 2.0 - integral_inverse(integral(2.5, alpha) - density(2.0, alpha), alpha);
        Self {
            ranks,
            alpha,
            low: integral(1.5, alpha) - 1.0,
            high: integral(ranks as f64 + 0.5, alpha),
            squeeze,
        }
    }

    /// Draws a rank.
    #[inline]
    pub(super) fn rank(&self, random: &mut Random) -> u64 {
        loop {
            let area = self.high + random.unit() * (self.low - self.high);
            let point = integral_inverse(area, self.alpha);
            let rank = u64::whole(point + 0.5).clamp(1, self.ranks);
            let whole = rank as f64;
            if whole - point <= self.squeeze
                || area >= integral(whole + 0.5, self.alpha) - density(whole, self.alpha)
            {
                return rank;
            }
        }
    }
}

/// Returns x^-alpha.
pub(super) fn density(x: f64, alpha: f64) -> f64 {
    (-alpha * x.ln()).exp()
}

/// Returns the integral of [`density`] from 1 to `x`: (x^(1 - alpha) - 1) / (1 - alpha), or ln x.
pub(super) fn integral(x: f64, alpha: f64) -> f64 {
    let log = x.ln();
    let exponent = (1.0 - alpha) * log;
    // expm1(e) / e, continued at its removable singularity at 0.
    let factor = if exponent.abs() > 1e-8 {
        exponent.exp_m1() / exponent
    } else {
        1.0 + exponent / 2.0
    };
    factor * log
}

/// Returns the `x` whose [`integral`] is `area`.
fn integral_inverse(area: f64, alpha: f64) -> f64 {
    // Rounding must not push the logarithm's argument below 0.
    let growth = (area * (1.0 - alpha)).max(-1.0);
    let factor = if growth.abs() > 1e-8 {
        growth.ln_1p() / growth
    } else {
        1.0 - growth / 2.0
    };
    (factor * area).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranks_follow_the_law() {
        const RANKS: u64 = 50;
        const DRAWS: u32 = 200_000;
        for alpha in [0.0, 0.3, 0.99, 1.0, 1.000_000_001, 1.5, 4.0] {
            let zipf = Zipf::new(RANKS, alpha);
            let mut random = Random::new(9);
            let mut counts = vec![0u32; usize::try_from(RANKS).unwrap() + 1];
            for _ in 0..DRAWS {
                counts[usize::try_from(zipf.rank(&mut random)).unwrap()] += 1;
            }
            let sum: f64 = (1..=RANKS).map(|rank| (rank as f64).powf(-alpha)).sum();
            // Pearson's statistic; its mean is the number of ranks less one.
            let chi_square: f64 = (1..=RANKS)
                .map(|rank| {
                    let expected = (rank as f64).powf(-alpha) / sum * f64::from(DRAWS);
                    let count = f64::from(counts[usize::try_from(rank).unwrap()]);
                    (count - expected).powi(2) / expected
                })
                .sum();
            assert!(chi_square < 90.0, "alpha {alpha}: {chi_square}"); // p < 0.001
        }
    }

    #[test]
    fn the_rarest_rank_is_as_frequent_as_it_should_be_among_many() {
        let zipf = Zipf::new(1 << 40, 0.0);
        let mut random = Random::new(3);
        let upper = (0..10_000).filter(|_| zipf.rank(&mut random) > 1 << 39);
        assert!((4_800..5_200).contains(&upper.count()));
    }

    proptest! {
        #[test]
        fn any_exponent_draws_a_rank(ranks in 1u64..1 << 48, alpha in 0.0f64..1e3, seed: u64) {
            let zipf = Zipf::new(ranks, alpha);
            let mut random = Random::new(seed);
            for _ in 0..50 {
                prop_assert!((1..=ranks).contains(&zipf.rank(&mut random)));
            }
        }

        #[test]
        fn the_inverse_inverts(x in 0.5f64..1e6, alpha in 0.0f64..1.5) {
            let back = integral_inverse(integral(x, alpha), alpha);
            prop_assert!((back / x - 1.0).abs() < 1e-6, "{} for {}", back, x);
        }
    }
}
