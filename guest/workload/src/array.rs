//! The array of a workload: signed pages that can be verified.
//!
//! `work` words spread evenly over a page carry its signature: its index, its
//! version (writes so far), words made of both, and last a checksum over those
//! before. A visit verifies all of them; a write visit then raises the version
//! and signs anew. Pages swapped, zeroed, torn or flipped are found by the next
//! visit. A write lost *whole* leaves a sound older page behind: that is
//! found by [`Pages::audit`], since the versions of all pages add up to the writes made.

/// Bytes in a page of the array.
pub const PAGE_BYTES: usize = 4096;
/// 64-bit words in a page of the array.
pub const PAGE_WORDS: usize = PAGE_BYTES / 8;
/// Words a signature needs at least: index, version, one of both, checksum.
pub const WORK_MIN: usize = 4;

/// A page of the array.
pub type Page = [u64; PAGE_WORDS];

/// Memory for the array; zeroed, and not touched until it is populated.
pub struct Memory {
    words: Vec<u64>,
    offset: usize,
    pages: usize,
}

impl Memory {
    /// Sets memory aside for `pages` pages.
    pub fn new(pages: usize) -> Self {
        let words = vec![0u64; (pages + 1) * PAGE_WORDS];
        let offset = words.as_ptr().align_offset(PAGE_BYTES);
        Self {
            words,
            offset,
            pages,
        }
    }

    /// The pages, aligned as the machine's own.
    pub fn pages_mut(&mut self) -> &mut [Page] {
        let words = &mut self.words[self.offset..];
        let (pages, _) = words.as_chunks_mut::<PAGE_WORDS>();
        &mut pages[..self.pages]
    }
}

/// A page that does not hold what was written to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// Index of the page in the whole array.
    pub page: u64,
    /// Index of the first wrong word in the page.
    pub word: usize,
    /// What the word should hold.
    pub expected: u64,
    /// What it holds.
    pub found: u64,
}

/// One thread's part of the array.
pub struct Pages<'array> {
    pages: &'array mut [Page],
    /// Index of the first page in the whole array.
    first: u64,
    work: usize,
    writes: u64,
    /// Whether a page was signed anew: its version is then no longer a count of writes.
    repaired: bool,
}

impl<'array> Pages<'array> {
    /// Takes pages that begin at index `first` of the array, with `work` words a visit.
    pub fn new(pages: &'array mut [Page], first: u64, work: usize) -> Self {
        assert!((WORK_MIN..=PAGE_WORDS).contains(&work));
        Self {
            pages,
            first,
            work,
            writes: 0,
            repaired: false,
        }
    }

    /// How many pages there are.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Where the page at `index` of this part lies in the program's memory.
    pub fn address(&self, index: usize) -> u64 {
        self.pages[index].as_ptr().addr() as u64
    }

    /// Signs every page with version 0.
    pub fn populate(&mut self) {
        for (index, page) in (self.first..).zip(self.pages.iter_mut()) {
            sign(page, index, 0, self.work);
        }
    }

    /// Verifies the page at `index` of this part.
    pub fn read(&mut self, index: usize) -> Result<(), Mismatch> {
        let page = &mut self.pages[index];
        let number = self.first + index as u64;
        let verified = verify(page, number, self.work);
        if verified.is_err() {
            // Signed anew, so that one wrong page is counted once.
            let version = page[place(1, self.work)];
            sign(page, number, version, self.work);
            self.repaired = true;
        }
        verified
    }

    /// Verifies the page at `index` of this part, then writes its next version.
    pub fn write(&mut self, index: usize) -> Result<(), Mismatch> {
        let verified = self.read(index);
        let page = &mut self.pages[index];
        let version = page[place(1, self.work)].wrapping_add(1);
        sign(page, self.first + index as u64, version, self.work);
        self.writes = self.writes.wrapping_add(1);
        verified
    }

    /// Reads every page once more and returns how many are wrong, lost writes among them.
    pub fn audit(&mut self, mut report: impl FnMut(Mismatch)) -> u64 {
        let mut wrong = 0;
        let mut versions = 0u64;
        for index in 0..self.pages.len() {
            if let Err(mismatch) = self.read(index) {
                report(mismatch);
                wrong += 1;
            }
            versions = versions.wrapping_add(self.pages[index][place(1, self.work)]);
        }
        if !self.repaired && versions != self.writes {
            // All pages are sound, but some are older than their last write. Which
            // ones is unknown; the line names the first page and the two sums.
            report(Mismatch {
                page: self.first,
                word: place(1, self.work),
                expected: self.writes,
                found: versions,
            });
            wrong = self.writes.abs_diff(versions);
        }
        wrong
    }
}

/// Where the signature's word of index `nth` lies in the page.
fn place(nth: usize, work: usize) -> usize {
    nth * PAGE_WORDS / work
}

/// A word that depends on every bit of all three numbers.
fn mix(page: u64, version: u64, nth: usize) -> u64 {
    let folded = page
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(version.rotate_left(32) ^ nth as u64);
    let folded = (folded ^ (folded >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    folded ^ (folded >> 32)
}

/// One step of the checksum, whose order matters.
fn add(checksum: u64, word: u64) -> u64 {
    (checksum.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The signature's words: where each lies and what it holds.
fn signature(number: u64, version: u64, work: usize) -> impl Iterator<Item = (usize, u64)> {
    let mut checksum = 0;
    (0..work).map(move |nth| {
        let word = match nth {
            0 => number,
            1 => version,
            _ if nth == work - 1 => checksum,
            _ => mix(number, version, nth),
        };
        checksum = add(checksum, word);
        (place(nth, work), word)
    })
}

fn sign(page: &mut Page, number: u64, version: u64, work: usize) {
    for (place, word) in signature(number, version, work) {
        page[place] = word;
    }
}

fn verify(page: &Page, number: u64, work: usize) -> Result<(), Mismatch> {
    let version = page[place(1, work)];
    for (place, expected) in signature(number, version, work) {
        if page[place] != expected {
            return Err(Mismatch {
                page: number,
                word: place,
                expected,
                found: page[place],
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pages_are_aligned_as_the_machines() {
        let mut memory = Memory::new(3);
        let pages = memory.pages_mut();
        assert_eq!(pages.len(), 3);
        assert_eq!(pages.as_ptr().addr() % PAGE_BYTES, 0);
    }

    #[test]
    fn a_sound_array_stays_sound() {
        let mut memory = Memory::new(8);
        let mut pages = Pages::new(memory.pages_mut(), 100, 8);
        pages.populate();
        for index in [0, 3, 3, 7] {
            assert_eq!(pages.write(index), Ok(()));
            assert_eq!(pages.read(index), Ok(()));
        }
        assert_eq!(pages.audit(|_| panic!("no page is wrong")), 0);
    }

    #[test]
    fn two_pages_swapped_are_both_found() {
        let mut memory = Memory::new(4);
        Pages::new(memory.pages_mut(), 0, 8).populate();
        memory.pages_mut().swap(1, 2);
        let mut pages = Pages::new(memory.pages_mut(), 0, 8);
        assert_eq!(
            pages.read(1),
            Err(Mismatch {
                page: 1,
                word: 0,
                expected: 1,
                found: 2
            })
        );
        assert!(pages.write(2).is_err());
        assert_eq!([pages.read(1), pages.read(2)], [Ok(()), Ok(())]);
    }

    #[test]
    fn a_page_that_lost_a_whole_write_is_found_by_the_audit() {
        let mut memory = Memory::new(4);
        let mut pages = Pages::new(memory.pages_mut(), 0, 8);
        pages.populate();
        let old = pages.pages[2];
        assert_eq!(pages.write(2), Ok(()));
        pages.pages[2] = old;
        assert_eq!(pages.read(2), Ok(()), "the old page is sound in itself");
        let mut seen = Vec::new();
        assert_eq!(pages.audit(|mismatch| seen.push(mismatch)), 1);
        assert_eq!((seen[0].expected, seen[0].found), (1, 0));
    }

    proptest! {
        #[test]
        fn a_flipped_bit_in_any_signed_word_is_found(
            work in WORK_MIN..=64,
            nth in 0usize..64,
            bit in 0u32..64,
            index in 0usize..4,
        ) {
            let mut memory = Memory::new(4);
            let mut pages = Pages::new(memory.pages_mut(), 9, work);
            pages.populate();
            pages.write(index).unwrap();
            pages.pages[index][place(nth % work, work)] ^= 1 << bit;
            prop_assert!(pages.read(index).is_err());
        }

        #[test]
        fn the_words_of_a_signature_lie_apart(work in WORK_MIN..=PAGE_WORDS) {
            let places: Vec<_> = signature(1, 2, work).map(|(place, _)| place).collect();
            prop_assert!(places.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(places.iter().all(|&place| place < PAGE_WORDS));
        }
    }
}
