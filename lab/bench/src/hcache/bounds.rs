//! What any store must do: minimal programs beside which the figures of the store are read.
//!
//! A page's metadata is in lines that are in no cache when it is looked up: a lookup reads one at least, which lies anywhere in a
//! table, within a lock; a put or get of a cold page uses some, besides the copy.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};

use crate::random::Random;

/// Words of a cache line.
const LINE_WORDS: usize = 8;

/// Lines of 64 bytes, of which each use takes one at random.
pub(crate) struct Lines {
    words: Vec<u64>,
}

impl Lines {
    /// Makes `mib` MiB of lines.
    pub(crate) fn new(mib: usize) -> Self {
        let words = mib * (1 << 20) / size_of::<u64>();
        Self {
            words: (0..words as u64).collect(),
        }
    }

    fn at(&self, random: &mut Random) -> usize {
        random.below(self.words.len() / LINE_WORDS) * LINE_WORDS
    }

    /// Reads a line.
    pub(crate) fn read(&self, random: &mut Random) -> u64 {
        self.words[self.at(random)]
    }

    /// Changes `lines` lines for each of `pages` pages. The lines do not depend on each other, as if all were prefetched.
    pub(crate) fn change(&mut self, pages: usize, lines: usize, random: &mut Random) {
        for _ in 0..pages * lines {
            let at = self.at(random);
            self.words[at] = self.words[at].wrapping_add(1);
        }
    }
}

/// Reads `count` random lines, each within a lock that nothing else takes.
pub(crate) fn locked_reads(lines: &Lines, count: usize, random: &mut Random) {
    let lock = Mutex::new(0_u64);
    for _ in 0..count {
        let mut sum = lock.lock().unwrap_or_else(PoisonError::into_inner);
        *sum = sum.wrapping_add(lines.read(random));
    }
    black_box(lock);
}
