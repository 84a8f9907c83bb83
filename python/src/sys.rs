//! Page numbers where they are: the one view of memory that the type system does not offer.
#![allow(unsafe_code)]

use plimsoll_flow::PageNumber;

/// The numbers as pages, without a copy.
pub(crate) fn pages(numbers: &[u64]) -> &[PageNumber] {
    // SAFETY: `PageNumber` is `repr(transparent)` over `u64`, so both slices have the same layout, and every number is a
    // valid page. The result borrows `numbers`, which is read alone as long as it lives.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) }
}
