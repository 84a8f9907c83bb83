//! A size of memory, in pages or in bytes.

use std::str::FromStr;

use plimsoll_flow::{PageCount, PageSize};

use crate::size::{ByteSize, QuantityError};

/// A size of memory: a plain number is in pages, one with a unit in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CurveSize {
    /// In pages.
    Pages(PageCount),
    /// In bytes.
    Bytes(ByteSize),
}

impl CurveSize {
    /// The size in whole pages, rounded down.
    ///
    /// # Errors
    ///
    /// [`BelowPage`] for bytes that are less than a page.
    pub fn to_pages(self, page_size: PageSize) -> Result<PageCount, BelowPage> {
        match self {
            Self::Pages(pages) => Ok(pages),
            Self::Bytes(ByteSize(bytes)) if bytes < page_size.bytes() => Err(BelowPage {
                size: ByteSize(bytes),
                page: ByteSize(page_size.bytes()),
            }),
            Self::Bytes(ByteSize(bytes)) => Ok(PageCount::from_bytes(bytes, page_size)),
        }
    }
}

/// A size in bytes that is less than a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a size of {size} is less than a page, which has {page}")]
pub struct BelowPage {
    size: ByteSize,
    page: ByteSize,
}

impl FromStr for CurveSize {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        match text.trim().parse() {
            Ok(pages) => Ok(Self::Pages(PageCount(pages))),
            Err(_) => text.parse().map(Self::Bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_whole_pages_and_at_least_one() {
        let pages = |text: &str| {
            let size: CurveSize = text.parse().unwrap();
            size.to_pages(PageSize::FOUR_KIB).map(|pages| pages.0)
        };
        assert_eq!(
            ["0", "7", "4K", "9K"].map(|text| pages(text).unwrap()),
            [0, 7, 1, 2]
        );
        let error = pages("1K").unwrap_err().to_string();
        assert_eq!(error, "a size of 1KiB is less than a page, which has 4KiB");
    }
}
