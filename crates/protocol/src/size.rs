//! Quantities as users write them: sizes, rates, intervals.
//!
//! | type | reads | writes |
//! |---|---|---|
//! | [`ByteSize`] | `4096`, `512M`, `2GiB`, `1.5G` | `4KiB`: exact, and read back as the same number |
//! | [`Rate`] | `1/128`, `0.01`, `1%` | `1/128` where exact, else the shorter of `2/3` and `0.3` |
//! | [`Share`] | `0`, `5%`, `0.05`, `1/20`, `150%`, but not `5` | `0.05`, `150%` |
//! | [`PerSecond`] | `20/s`, `0.5/s` | `20/s` |
//! | [`Interval`] | `5s`, `500ms`, `1.5m` | `500ms` |
//!
//! Units of memory are powers of 1024 with or without `iB`. `MB` is refused because it is ambiguous:
//! 1000 squared or 1024 squared.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use plimsoll_flow::rate_text;

/// A text that is not the expected quantity; the error quotes the text and states the expected form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not {expected}")]
pub struct QuantityError {
    text: String,
    /// The quantity and how to write it.
    expected: &'static str,
}

impl QuantityError {
    /// The error for `text`.
    fn of(text: &str, expected: &'static str) -> Self {
        Self {
            text: text.to_owned(),
            expected,
        }
    }
}

/// The quantities as errors describe them.
const SIZE: &str = "a size: write whole bytes, or a number with KiB, MiB, GiB or TiB (K, M, G, T), such as 4096, 512M \
    or 2GiB, below 16 EiB";
const RATE: &str = "a rate: write a share above 0 and at most 1, such as 1/128, 0.01 or 1%";
const SHARE: &str = "a share: write a number from 0 to 1, a fraction or a percentage, such as 0.05, 1/20, 5% or \
    150%";
const PER_SECOND: &str =
    "a number per second: write a number of 0 or more with /s, such as 0/s, 0.5/s or 20/s";
const BIT_RATE: &str = "a bandwidth: write whole bits per second above 0, or a number with K, M, G or T (powers of 1000), \
    such as 10G or 2.5G";
const COUNT: &str = "a count: write a whole number above 0, or a number with K, M, G or T (powers of 1000), such \
    as 50000, 500K or 10M";
const INTERVAL: &str = "a time: write a number above 0 with us, ms, s, m, h or d, in whole microseconds, such as 500ms, 5s or 2m";

/// A size of memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

const BINARY_UNITS: [(&str, u64); 4] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

impl ByteSize {
    /// Returns the size rounded for display: three digits and a unit, `1.46 GiB`.
    pub fn rounded(self) -> String {
        // A number that rounds up to the next unit is written in that unit: 1 MiB, not 1024 KiB.
        let unit = BINARY_UNITS
            .into_iter()
            .find(|(_, bytes)| self.0 as f64 / *bytes as f64 >= 1.0 - 0.5 / 1024.0);
        let Some((name, bytes)) = unit else {
            return format!("{} B", self.0);
        };
        let number = self.0 as f64 / bytes as f64;
        let decimals = if number < 9.995 {
            2
        } else if number < 99.95 {
            1
        } else {
            0
        };
        let digits = format!("{number:.decimals$}");
        let digits = match digits.split_once('.') {
            Some(_) => digits.trim_end_matches('0').trim_end_matches('.'),
            None => &digits,
        };
        format!("{digits} {name}")
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = BINARY_UNITS
            .iter()
            .find(|(_, bytes)| self.0 >= *bytes && self.0.is_multiple_of(*bytes));
        match unit {
            Some((name, bytes)) => write!(f, "{}{name}", self.0 / bytes),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FromStr for ByteSize {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let units = BINARY_UNITS.iter().flat_map(|&(name, bytes)| {
            [(name, u128::from(bytes)), (&name[..1], u128::from(bytes))]
        });
        scaled(text, units.chain([("B", 1), ("", 1)]))
            .map(Self)
            .ok_or_else(|| QuantityError::of(text, SIZE))
    }
}

/// A share above 0 and at most 1.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Rate(f64);

impl Rate {
    /// The share 1.
    pub const ONE: Self = Self(1.0);

    /// Returns the share; `None` unless it is above 0 and at most 1.
    pub fn new(share: f64) -> Option<Self> {
        (share > 0.0 && share <= 1.0).then_some(Self(share))
    }

    /// The share, above 0.0 and at most 1.0.
    pub fn get(self) -> f64 {
        self.0
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&rate_text(self.0))
    }
}

impl FromStr for Rate {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        part(text)
            .and_then(Self::new)
            .ok_or_else(|| QuantityError::of(text, RATE))
    }
}

/// A share of 0 or more; 1 is the whole.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Share(f64);

impl Share {
    /// The share, 0.0 or more and finite.
    pub fn get(self) -> f64 {
        self.0
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > 1.0 {
            write!(f, "{}%", self.0 * 100.0)
        } else {
            write!(f, "{}", self.0)
        }
    }
}

impl FromStr for Share {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let has_unit = text.contains(['%', '/']);
        part(text)
            .filter(|share| share.is_finite() && *share >= 0.0 && (has_unit || *share <= 1.0))
            .map(Self)
            .ok_or_else(|| QuantityError::of(text, SHARE))
    }
}

/// A number of events per second, 0 or more and finite.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct PerSecond(f64);

impl PerSecond {
    /// The number per second.
    pub fn get(self) -> f64 {
        self.0
    }
}

impl fmt::Display for PerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", self.0)
    }
}

impl FromStr for PerSecond {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let number = text.trim().strip_suffix("/s");
        number
            .and_then(|number| number.trim().parse::<f64>().ok())
            .filter(|number| number.is_finite() && *number >= 0.0)
            .map(Self)
            .ok_or_else(|| QuantityError::of(text, PER_SECOND))
    }
}

/// A rate of transfer in bits per second, above zero, as networks are described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BitRate(u64);

const DECIMAL_UNITS: [(&str, u128); 5] = [
    ("", 1),
    ("K", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

impl BitRate {
    /// Bytes per second, above 0.
    pub fn bytes_per_second(self) -> f64 {
        self.0 as f64 / 8.0
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = DECIMAL_UNITS.into_iter().rev();
        let mut whole = units.filter(|(_, unit)| u128::from(self.0).is_multiple_of(*unit));
        let (name, unit) = whole.next().unwrap_or(("", 1));
        write!(f, "{}{name}", u128::from(self.0) / unit)
    }
}

impl FromStr for BitRate {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        scaled(text, DECIMAL_UNITS)
            .filter(|&bits| bits > 0)
            .map(Self)
            .ok_or_else(|| QuantityError::of(text, BIT_RATE))
    }
}

/// A number of events, above zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Count(pub NonZeroU64);

impl FromStr for Count {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        scaled(text, DECIMAL_UNITS)
            .and_then(NonZeroU64::new)
            .map(Self)
            .ok_or_else(|| QuantityError::of(text, COUNT))
    }
}

/// Reads a decimal number, a fraction or a percentage; accepts any value of an `f64`.
fn part(text: &str) -> Option<f64> {
    let number = |text: &str| text.trim().parse::<f64>().ok();
    match (text.split_once('/'), text.strip_suffix('%')) {
        (Some((part, whole)), _) => number(part).zip(number(whole)).map(|(p, w)| p / w),
        (None, Some(percent)) => number(percent).map(|percent| percent / 100.0),
        (None, None) => number(text),
    }
}

/// A length of time above zero, in whole microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Interval(Duration);

const TIME_UNITS: [(&str, u128); 5] = [
    ("h", 3_600_000_000),
    ("m", 60_000_000),
    ("s", 1_000_000),
    ("ms", 1_000),
    ("us", 1),
];

impl Interval {
    /// Returns the length of so many microseconds; `None` for zero.
    pub fn from_micros(micros: u64) -> Option<Self> {
        (micros > 0).then_some(Self(Duration::from_micros(micros)))
    }

    /// The length, above zero.
    pub fn get(self) -> Duration {
        self.0
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        let (name, unit) = TIME_UNITS
            .into_iter()
            .find(|(_, unit)| micros.is_multiple_of(*unit))
            .unwrap_or(("us", 1));
        write!(f, "{}{name}", micros / unit)
    }
}

impl FromStr for Interval {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        // Not printed: hours are as short, and exact to read.
        scaled(text, TIME_UNITS.into_iter().chain([("d", 86_400_000_000)]))
            .and_then(Self::from_micros)
            .ok_or_else(|| QuantityError::of(text, INTERVAL))
    }
}

/// Reads a decimal number with a unit as a number of the smallest unit; `None` for anything else, and for a number beyond `u64`.
///
/// A decimal of a binary unit is rounded down, because few are a whole number of bytes; one of any other unit must be whole.
fn scaled<'a>(text: &str, units: impl IntoIterator<Item = (&'a str, u128)>) -> Option<u64> {
    let text = text.trim();
    let end = text
        .find(|letter: char| !(letter.is_ascii_digit() || letter == '.'))
        .unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim_start());
    let (_, factor) = units
        .into_iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
        Some(_) => return None,
        None => (number, ""),
    };
    // Ten decimals resolve less than a byte of a tebibyte; longer texts are considered mistakes.
    if whole.is_empty() || fraction.len() > 10 || fraction.contains('.') {
        return None;
    }
    let decimals = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    let digits = format!("{whole}{fraction}").parse::<u128>().ok()?;
    let product = digits.checked_mul(factor)?;
    let is_binary = factor > 1 && factor.is_power_of_two();
    if !is_binary && !product.is_multiple_of(decimals) {
        return None;
    }
    u64::try_from(product / decimals).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bandwidth_is_in_bits_by_powers_of_1000() {
        for (text, bits) in [
            ("10G", 10_000_000_000),
            ("2.5g", 2_500_000_000),
            ("800", 800),
        ] {
            let rate: BitRate = text.parse().unwrap();
            assert_eq!(rate.0, bits);
            assert_eq!(rate.to_string().parse(), Ok(rate));
        }
        assert_eq!("2.5G".parse::<BitRate>().unwrap().to_string(), "2500M");
        for wrong in ["", "0", "-1G", "10GiB", "G"] {
            assert!(wrong.parse::<BitRate>().is_err(), "{wrong}");
        }
    }
    use proptest::prelude::*;

    #[test]
    fn numbers_are_read_with_their_units() {
        let read = |text: &str| text.parse().map(|Count(number)| number.get()).ok();
        for (text, number) in [
            ("1", 1),
            ("10M", 10_000_000),
            ("1.5k", 1500),
            ("1.5M", 1_500_000),
            ("2.0", 2),
            ("2G", 2_000_000_000),
        ] {
            assert_eq!(read(text), Some(number), "{text}");
        }
        for wrong in [
            "",
            "0",
            "0.5",
            "1.5",
            "1.2345K",
            "-1",
            "M",
            "10 MiB",
            "99999999999G",
        ] {
            let error = wrong.parse::<Count>().unwrap_err().to_string();
            assert!(error.contains("500K or 10M"), "{wrong}: {error}");
        }
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let read = |text: &str| text.parse().map(|ByteSize(bytes)| bytes).ok();
        let known = [
            ("4096", 4096),
            ("512M", 512 << 20),
            ("2GiB", 2 << 30),
            ("2 GiB", 2 << 30),
            ("2gib", 2 << 30),
            ("1.5G", 3 << 29),
            ("0", 0),
            ("64K", 65_536),
            ("3T", 3 << 40),
            ("7B", 7),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in known {
            assert_eq!(read(text), Some(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_and_told_what_is() {
        let wrong = [
            "",
            "M",
            "-1",
            "1.",
            ".5G",
            "1.2.3",
            "12X",
            "5MB",
            "1.5",
            "0.5B",
            "1e9",
            "nan",
            "16777216T",
            "18446744073709551616",
            "0x10",
            "1 2",
            "٣",
            "1.00000000000",
        ];
        for text in wrong {
            let error = text.parse::<ByteSize>().unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("'{text}' is not a size")),
                "{error}"
            );
            assert!(error.contains("512M or 2GiB"), "{error}");
        }
    }

    #[test]
    fn sizes_are_written_exactly_for_programs_and_rounded_for_readers() {
        let known = [
            (0, "0", "0 B"),
            (1000, "1000", "1000 B"),
            (4096, "4KiB", "4 KiB"),
            ((1 << 20) - 1, "1048575", "1 MiB"),
            (3 << 29, "1536MiB", "1.5 GiB"),
            (100 << 20, "100MiB", "100 MiB"),
            (123_456_789, "123456789", "118 MiB"),
            (u64::MAX, "18446744073709551615", "16777216 TiB"),
        ];
        for (bytes, exact, rounded) in known {
            assert_eq!(ByteSize(bytes).to_string(), exact);
            assert_eq!(ByteSize(bytes).rounded(), rounded);
        }
    }

    #[test]
    fn rates_are_read_as_fractions_numbers_and_percent() {
        let read = |text: &str| text.parse().map(Rate::get).ok();
        assert_eq!(
            ["1/128", "0.01", "1%", "100%", "1", " 3 / 4 ", "1e-3"].map(read),
            [1.0 / 128.0, 0.01, 0.01, 1.0, 1.0, 0.75, 0.001].map(Some)
        );
        for text in [
            "", "0", "1.5", "-0.1", "1/0", "0/0", "2/1", "101%", "nan", "inf", "half",
        ] {
            let error = text.parse::<Rate>().unwrap_err().to_string();
            assert!(error.contains("above 0 and at most 1"), "{text}: {error}");
        }
        assert_eq!(Rate::new(1.0 / 128.0).unwrap().to_string(), "1/128");
        assert_eq!("2/3".parse::<Rate>().unwrap().to_string(), "2/3");
        assert_eq!(Rate::new(0.3).unwrap().to_string(), "0.3");
        assert_eq!(Rate::ONE.to_string(), "1");
    }

    #[test]
    fn shares_may_be_nothing_and_more_than_the_whole() {
        let read = |text: &str| text.parse().map(Share::get).ok();
        assert_eq!(
            ["0", "5%", "0.05", "1/20", "150 %", "0%", "1"].map(read),
            [0.0, 0.05, 0.05, 0.05, 1.5, 0.0, 1.0].map(Some)
        );
        for text in ["", "%", "-1%", "nan", "inf", "1/0", "0/0", "5 percent"] {
            let error = text.parse::<Share>().unwrap_err().to_string();
            assert!(error.contains("from 0 to 1, a fraction"), "{text}: {error}");
        }
        let written = |text: &str| text.parse::<Share>().unwrap().to_string();
        assert_eq!(["5%", "3/2"].map(written), ["0.05", "150%"]);
    }

    #[test]
    fn five_is_neither_five_percent_nor_five_hundred() {
        for text in ["5", "5.0", "1.01"] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
    }

    #[test]
    fn intervals_need_a_unit_and_some_length() {
        let read = |text: &str| text.parse::<Interval>().ok();
        let known = [
            ("5s", 5_000_000, "5s"),
            ("500ms", 500_000, "500ms"),
            ("2m", 120_000_000, "2m"),
            ("1.5h", 5_400_000_000, "90m"),
            ("250us", 250, "250us"),
        ];
        for (text, micros, written) in known {
            let interval = read(text).unwrap();
            assert_eq!(interval.get(), Duration::from_micros(micros));
            assert_eq!(interval.to_string(), written);
        }
        for text in ["5", "", "0s", "-1s", "5 days", "0.1us"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_written_size_is_read_back(bytes in any::<u64>(), shift in 0u32..64) {
            let size = ByteSize(bytes >> shift << (shift / 2));
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn a_rounded_size_is_read_back_within_half_a_percent(bytes in 0u64..1 << 50) {
            let read: ByteSize = ByteSize(bytes).rounded().parse().unwrap();
            prop_assert!(read.0.abs_diff(bytes) as f64 <= 0.005 * bytes as f64);
        }

        #[test]
        fn a_written_rate_is_read_back(share in 1e-9f64..=1.0, parts in 1u32..1_000_000) {
            for rate in [share, 1.0 / f64::from(parts), (f64::from(parts) / 1e6).max(1e-6)].map(|share| Rate::new(share).unwrap()) {
                prop_assert_eq!(rate.to_string().parse(), Ok(rate));
            }
        }

        #[test]
        fn a_written_interval_is_read_back(micros in 1u64..1 << 50) {
            let interval = Interval(Duration::from_micros(micros));
            prop_assert_eq!(interval.to_string().parse(), Ok(interval));
        }

        #[test]
        fn no_text_makes_a_parser_panic(text in ".{0,24}", digits in "[0-9.]{0,50}[KMGTiBsmu%/]{0,4}") {
            for text in [text, digits] {
                let _ = (text.parse::<ByteSize>(), text.parse::<Rate>(), text.parse::<Interval>());
            }
        }
    }
}
