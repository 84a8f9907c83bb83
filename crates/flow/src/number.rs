//! Arithmetic that several stages share: whole parts, and reproducible random numbers.

/// The factors of [`mix`], for code that computes it in vectors.
pub const MIX_FACTORS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// Mixes all bits of `value` into all bits of the result; a bijection that maps 0 to 0.
///
/// Source: the finaliser of `SplitMix64` (Steele, Lea, Flood 2014).
#[inline]
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(MIX_FACTORS[0]);
    value = (value ^ (value >> 27)).wrapping_mul(MIX_FACTORS[1]);
    value ^ (value >> 31)
}

/// Random numbers, the same after the same seed: `SplitMix64`, period 2^64.
#[derive(Debug, Clone)]
pub struct SplitMix(pub u64);

impl SplitMix {
    /// 64 random bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, which is at least 1; its bias is `bound` / 2^64.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        let product = u128::from(self.bits()) * u128::from(bound);
        u64::try_from(product >> 64).unwrap_or(0)
    }

    /// A number from 0.0 up to, not including, 1.0.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The whole part of a float.
pub trait Whole {
    /// `number` without its fraction: 0 for a negative number or NaN, and the largest integer for any above it.
    fn whole(number: f64) -> Self;
}

macro_rules! impl_whole {
    ($($integer:ty),*) => {$(
        impl Whole for $integer {
            #[inline]
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "it saturates, as documented"
            )]
            fn whole(number: f64) -> Self {
                number as Self
            }
        }
    )*};
}

impl_whole!(u32, u64, usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_mix_gives_its_authors_numbers() {
        let mut random = SplitMix(1_234_567);
        let bits: [u64; 3] = std::array::from_fn(|_| random.bits());
        assert_eq!(
            bits,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn a_whole_part_saturates() {
        let parts = [-1.0, f64::NAN, 0.9, 7.9, 1e30].map(u32::whole);
        assert_eq!(parts, [0, 0, 0, 7, u32::MAX]);
        assert_eq!(u64::whole(1e30), u64::MAX);
    }
}
