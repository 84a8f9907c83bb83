//! Pages that somebody waits for: few among many, asked after at every reference.
//!
//! Almost all references are to pages that nobody waits for, and that is what has to be
//! cheap to find out. Every page watched sets two bits of one word; a page
//! without both is not watched. With 16 bits or more for every page watched, one in
//! sixty others passes at most, and 10 000 pages take 32 KiB: the first-level cache, or just beyond.
//! The bits of a page no longer watched must go, or hot pages would pass for ever:
//! each bit has a count of those who set it.
//!
//! Cost: below 1 ns a reference that is not watched; some 100 bytes a page that is.
//! Not here: what they are watched for (`sampled_aet`).

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use plimsoll_flow::PageNumber;

use crate::hash::{PageMap, page_map};
use crate::last_use::map_bytes;
use crate::sys::sift_vectors;

/// Pages watched for every word of 64 bits, at most.
const PAGES_PER_WORD: usize = 4;

/// Words of the smallest filter.
const WORDS_MIN: usize = 64;

/// Pages sifted at once.
const BLOCK: usize = 4096;

/// Pages that wait, each with what it waits with.
#[derive(Debug, Clone)]
pub(crate) struct Watch<V> {
    watched: PageMap<V>,
    salt: [u64; 2],
    /// A power of two of them.
    words: Vec<u64>,
    /// How many pages set each bit. 255 stands for any more, and stays.
    setters: Vec<u8>,
}

/// The two bits of one word that a page sets; they may be the same one.
#[derive(Debug, Clone, Copy)]
struct Place {
    word: usize,
    bits: [u32; 2],
}

impl Place {
    #[inline(always)]
    fn mask(self) -> u64 {
        1 << self.bits[0] | 1 << self.bits[1]
    }

    fn setters(self) -> [usize; 2] {
        self.bits.map(|bit| self.word * 64 + bit as usize)
    }
}

impl<V> Watch<V> {
    pub(crate) fn new() -> Self {
        let random = RandomState::new();
        Self::salted([random.hash_one(0_u64), random.hash_one(1_u64)])
    }

    fn salted(salt: [u64; 2]) -> Self {
        Self {
            watched: page_map(),
            salt: [salt[0], salt[1] | 1],
            words: vec![0; WORDS_MIN],
            setters: vec![0; 64 * WORDS_MIN],
        }
    }

    /// Watches a page; it must not be watched.
    pub(crate) fn insert(&mut self, page: PageNumber, value: V) {
        if self.watched.len() >= self.words.len() * PAGES_PER_WORD {
            self.grow();
        }
        self.set(page);
        self.watched.insert(page, value);
    }

    /// Gives up watching a page, if it was watched.
    pub(crate) fn remove(&mut self, page: PageNumber) -> Option<V> {
        let value = self.watched.remove(&page)?;
        let place = self.place_of(page);
        for (setter, bit) in place.setters().into_iter().zip(place.bits) {
            let setters = &mut self.setters[setter];
            if *setters < u8::MAX {
                *setters -= 1;
            }
            if *setters == 0 {
                self.words[place.word] &= !(1 << bit);
            }
        }
        Some(value)
    }

    /// What those watched wait with, in no order.
    pub(crate) fn values(&self) -> impl Iterator<Item = &V> {
        self.watched.values()
    }

    /// Calls `suspect` with the index of each page that might be watched, in order; the others are not.
    pub(crate) fn suspects(&self, pages: &[PageNumber], mut suspect: impl FnMut(usize)) {
        for (start, pages) in (0..).step_by(BLOCK).zip(pages.chunks(BLOCK)) {
            let mut words = [0; BLOCK / 64];
            let (blocks, rest) = pages.as_chunks::<64>();
            if !sift_vectors(blocks, &self.words, self.salt, &mut words) {
                for (word, block) in words.iter_mut().zip(blocks) {
                    *word = self.sift(block);
                }
            }
            if let Some(word) = words.get_mut(blocks.len()) {
                *word = self.sift(rest);
            }
            let words = &words[..pages.len().div_ceil(64)];
            for (start, &word) in (start..).step_by(64).zip(words) {
                let mut word = word;
                while word != 0 {
                    suspect(start + word.trailing_zeros() as usize);
                    word &= word - 1;
                }
            }
        }
    }

    /// Which of up to 64 pages are suspects, as bits: those with both bits set.
    fn sift(&self, pages: &[PageNumber]) -> u64 {
        let mut suspects = 0;
        for (bit, &page) in (0_u32..64).zip(pages) {
            let place = self.place_of(page);
            let missing = place.mask() & !self.words[place.word];
            suspects |= u64::from(missing == 0) << bit;
        }
        suspects
    }

    /// Bytes of heap held now.
    pub(crate) fn memory_bytes(&self) -> usize {
        map_bytes(&self.watched)
            + self.words.capacity() * size_of::<u64>()
            + self.setters.capacity()
    }

    #[inline(always)]
    fn place_of(&self, page: PageNumber) -> Place {
        let product = (page.0 ^ self.salt[0]).wrapping_mul(self.salt[1]);
        let hash = product ^ (product >> 32);
        #[expect(clippy::cast_possible_truncation, reason = "six bits, and an index")]
        let place = Place {
            word: (hash >> 12) as usize & (self.words.len() - 1),
            bits: [hash as u32 & 63, (hash >> 6) as u32 & 63],
        };
        place
    }

    fn set(&mut self, page: PageNumber) {
        let place = self.place_of(page);
        self.words[place.word] |= place.mask();
        for setter in place.setters() {
            self.setters[setter] = self.setters[setter].saturating_add(1);
        }
    }

    fn grow(&mut self) {
        let words = self.words.len() * 2;
        self.words = vec![0; words];
        self.setters = vec![0; 64 * words];
        let pages: Vec<_> = self.watched.keys().copied().collect();
        for page in pages {
            self.set(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::streams::Random;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn few_pages_pass_that_nobody_waits_for() {
        for seed in 1..=5 {
            let mut random = Random::new(seed);
            let mut watch = Watch::salted([random.next(), random.next()]);
            for n in 0..10_000 {
                watch.insert(PageNumber(n << 7), ());
            }
            let pages: Vec<_> = (0..1_280_000)
                .map(PageNumber)
                .filter(|page| page.0 % 128 > 0)
                .collect();
            let mut passed = 0;
            watch.suspects(&pages, |_| passed += 1);
            let share = f64::from(passed) / pages.len() as f64;
            assert!(share <= 0.02, "seed {seed}: {share}");
        }
    }

    proptest! {
        #[test]
        fn who_is_watched_is_a_suspect_and_few_others_are(
            steps in prop::collection::vec((0_u64..2_000, any::<bool>()), 1..3_000),
            spread in prop_oneof![Just(1_u64), Just(1 << 40), any::<u64>().prop_map(|n| n | 1)],
        ) {
            let (mut watch, mut map) = (Watch::new(), BTreeMap::new());
            for (index, &(page, insert)) in steps.iter().enumerate() {
                let page = PageNumber(page.wrapping_mul(spread));
                prop_assert_eq!(watch.remove(page), map.remove(&page));
                if insert {
                    watch.insert(page, index);
                    map.insert(page, index);
                }
            }
            let pages: Vec<_> = (0..4_000_u64).map(|n| PageNumber(n.wrapping_mul(spread))).collect();
            let mut suspects = vec![false; pages.len()];
            for (start, pages) in (0..).step_by(61).zip(pages.chunks(61)) {
                watch.suspects(pages, |index| suspects[start + index] = true);
            }
            let mut all_at_once = vec![false; pages.len()];
            watch.suspects(&pages, |index| all_at_once[index] = true);
            prop_assert_eq!(&suspects, &all_at_once);
            // Whichever way they were sifted, these are the ones.
            for (pages, suspects) in pages.chunks(64).zip(suspects.chunks(64)) {
                let word = watch.sift(pages);
                for (bit, &suspect) in suspects.iter().enumerate() {
                    prop_assert_eq!(suspect, word >> bit & 1 == 1);
                }
            }
            for (page, suspect) in pages.iter().zip(suspects) {
                prop_assert!(suspect || !map.contains_key(page));
            }
            for (page, value) in map {
                prop_assert_eq!(watch.remove(page), Some(value));
            }
            prop_assert!(watch.words.iter().all(|&word| word == 0));
        }
    }
}
