//! The 64-bit bijection used by every hash of a page.
//!
//! Source: the finaliser of `SplitMix64` (Steele, Lea, Flood 2014).

/// The factors of [`mix`]; also used by the vectorised filter.
pub(crate) const MIX_1: u64 = 0xbf58_476d_1ce4_e5b9;
pub(crate) const MIX_2: u64 = 0x94d0_49bb_1331_11eb;

/// Mixes all bits of `value` into all bits of the result; a bijection that maps 0 to 0.
pub(crate) fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(MIX_1);
    value = (value ^ (value >> 27)).wrapping_mul(MIX_2);
    value ^ (value >> 31)
}
