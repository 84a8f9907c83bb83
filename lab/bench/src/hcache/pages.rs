//! Pages that contain their identity.

use plimsoll_hcache::{Handle, Page, PoolId};

/// Pages of each object unless stated otherwise.
const OBJECT_PAGES: u64 = 1024;

/// The handle of page `number` where objects have 1024 pages.
#[inline]
pub(crate) fn handle(pool: PoolId, number: u64) -> Handle {
    Handle {
        pool,
        object: number / OBJECT_PAGES,
        index: u32::try_from(number % OBJECT_PAGES).expect("below 1024"),
    }
}

/// Writes the page's number into each line of 64 bytes.
#[inline]
pub(crate) fn sign(page: &mut Page, number: u64) {
    for (line, bytes) in (0..).zip(page.chunks_exact_mut(64)) {
        bytes[..8].copy_from_slice(&word(number, line).to_le_bytes());
    }
}

/// Whether each line of a page is that of page `number`.
#[inline]
pub(crate) fn is_signed(page: &Page, number: u64) -> bool {
    let wrong = (0..)
        .zip(page.chunks_exact(64))
        .fold(0, |wrong, (line, bytes)| {
            let bytes = bytes[..8].try_into().expect("eight bytes");
            wrong | (u64::from_le_bytes(bytes) ^ word(number, line))
        });
    wrong == 0
}

#[inline]
fn word(number: u64, line: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (line << 56)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_of_one_page_and_of_every_line() {
        let mut page = [0; 4096];
        sign(&mut page, 7);
        assert!(is_signed(&page, 7) && !is_signed(&page, 8));
        page[4095 - 63] ^= 1;
        assert!(!is_signed(&page, 7));
    }
}
