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
    /// The size in whole pages.
    #[must_use]
    pub fn to_pages(self, page_size: PageSize) -> PageCount {
        match self {
            Self::Pages(pages) => pages,
            Self::Bytes(ByteSize(bytes)) => PageCount::from_bytes(bytes, page_size),
        }
    }
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
