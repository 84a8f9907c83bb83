//! Contents of pages: each kind that a store may handle differently, and no two alike unless intended.

use plimsoll_hcache::{PAGE_BYTES, Page};

use crate::random::mixed;

/// The kind of a page's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Zeros.
    Zero,
    /// One word throughout.
    Word(u64),
    /// Noise of which there are 8, so that many pages are alike.
    Common(u8),
    /// Lines that differ little: shrinks to a part.
    Lines(u64),
    /// Noise for a length that the number determines, then zeros: shrinks by any amount, or none.
    Part(u64),
    /// Noise: does not shrink.
    Noise(u64),
}

impl Content {
    /// Returns content of the kind that `kind` chooses, signed with `signature` where the kind can be.
    pub fn new(kind: u8, signature: u64) -> Self {
        match kind % 16 {
            0 | 1 => Self::Zero,
            2 => Self::Word(signature),
            3 => Self::Word(u64::from(kind)),
            4..=6 => Self::Common(kind / 16 % 8),
            7..=10 => Self::Lines(signature),
            11..=12 => Self::Part(signature),
            _ => Self::Noise(signature),
        }
    }

    /// Returns the page.
    pub fn page(self) -> Page {
        let mut page = [0; PAGE_BYTES];
        let fill = |page: &mut [u8], word: &dyn Fn(u64) -> u64| {
            for (at, bytes) in (0..).zip(page.chunks_exact_mut(8)) {
                bytes.copy_from_slice(&word(at).to_le_bytes());
            }
        };
        let noise = |page: &mut [u8], seed: u64| {
            let seed = mixed(seed);
            fill(page, &|at| mixed(seed ^ at));
        };
        match self {
            Self::Zero => {}
            Self::Word(word) => fill(&mut page, &|_| word),
            Self::Common(which) => noise(&mut page, !u64::from(which)),
            Self::Lines(number) => fill(&mut page, &|at| match at % 4 {
                0 => number,
                1 => at,
                _ => 0x2e2e_2e2e_2e2e_2e2e,
            }),
            Self::Part(number) => {
                let words = usize::try_from(1 + mixed(number) % 512).expect("at most 512");
                noise(&mut page[..8 * words], number);
            }
            Self::Noise(number) => noise(&mut page, number),
        }
        page
    }
}
