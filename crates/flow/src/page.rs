//! Page numbers, page counts and page sizes.

use std::fmt;
use std::num::NonZeroU64;

use crate::number::Whole as _;

/// A page number: an index into the memory or storage that a source observes, from 0.
///
/// For a VM this is the index into its RAM mapping, which is the guest frame
/// number only below the hole that x86 leaves under 4 GiB. In memory it is the number itself.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageNumber(pub u64);

impl fmt::Display for PageNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A number of pages: a size of memory, a reuse distance, a capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageCount(pub u64);

impl PageCount {
    /// `count` sizes in even steps up to this one.
    pub fn even_steps(self, count: u64) -> impl Iterator<Item = Self> {
        let size = move |step| u128::from(self.0) * u128::from(step) / u128::from(count);
        (1..=count).map(move |step| Self(u64::try_from(size(step)).unwrap_or(u64::MAX)))
    }

    /// Returns the same size in bytes, saturating at the largest `u64`.
    pub fn to_bytes(self, page_size: PageSize) -> u64 {
        self.0.saturating_mul(page_size.bytes())
    }

    /// Returns the number of whole pages that fit into `bytes`.
    pub fn from_bytes(bytes: u64, page_size: PageSize) -> Self {
        Self(bytes / page_size.bytes())
    }

    /// Returns the size times a factor of at least 0, rounded down to whole pages.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        // Returned unchanged, because a conversion to a float is not exact from 2^53 on.
        if factor == 1.0 {
            return self;
        }
        Self(u64::whole(self.0 as f64 * factor))
    }
}

impl fmt::Display for PageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Bytes in a page: a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSize(NonZeroU64);

/// A size in bytes that is not a valid page size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a page cannot have {bytes} bytes: the size must be a power of two")]
pub struct PageSizeError {
    /// The requested size.
    pub bytes: u64,
}

impl PageSize {
    /// The small page of x86-64 and of most traces: 4096 bytes.
    pub const FOUR_KIB: Self = Self(NonZeroU64::new(4096).unwrap());

    /// Takes a size in bytes.
    ///
    /// # Errors
    ///
    /// [`PageSizeError`] if `bytes` is not a power of two.
    pub fn new(bytes: u64) -> Result<Self, PageSizeError> {
        match NonZeroU64::new(bytes) {
            Some(size) if size.is_power_of_two() => Ok(Self(size)),
            _ => Err(PageSizeError { bytes }),
        }
    }

    /// Bytes in one page.
    pub fn bytes(self) -> u64 {
        self.0.get()
    }

    /// Returns the page that holds the byte at `address`.
    pub fn page_of(self, address: u64) -> PageNumber {
        PageNumber(address >> self.0.trailing_zeros())
    }
}

impl Default for PageSize {
    fn default() -> Self {
        Self::FOUR_KIB
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_size_is_a_power_of_two() {
        assert_eq!(PageSize::new(2 << 20).map(PageSize::bytes), Ok(2 << 20));
        for bytes in [0, 3, 4095, u64::MAX] {
            assert_eq!(PageSize::new(bytes), Err(PageSizeError { bytes }));
        }
    }

    #[test]
    fn an_address_belongs_to_the_page_it_lies_in() {
        let page_of = |address| PageSize::FOUR_KIB.page_of(address).0;
        assert_eq!(
            [0, 4095, 4096, u64::MAX].map(page_of),
            [0, 0, 1, (1 << 52) - 1]
        );
    }

    #[test]
    fn even_steps_end_at_the_size() {
        let steps = |size: u64, count| -> Vec<_> {
            let steps = PageCount(size).even_steps(count);
            steps.map(|step| step.0).collect()
        };
        assert_eq!(steps(10, 3), [3, 6, 10]);
        assert_eq!(steps(1, 2), [0, 1]);
        assert_eq!(steps(u64::MAX, 2), [u64::MAX / 2, u64::MAX]);
        assert_eq!(steps(7, 0), [0; 0]);
    }

    #[test]
    fn sizes_beyond_the_number_line_saturate() {
        assert_eq!(PageCount(u64::MAX).to_bytes(PageSize::FOUR_KIB), u64::MAX);
        assert_eq!(
            PageCount::from_bytes(8191, PageSize::FOUR_KIB),
            PageCount(1)
        );
    }
}
