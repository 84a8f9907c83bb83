//! A `HyperLogLog` counter: the number of distinct pages, in 2^p bytes regardless of that number.
//!
//! The first `p` bits of a page's hash select one of `m = 2^p` registers, and the number of zeros after
//! them gives a rank; a register stores the largest rank so far. Two counters are merged by taking the
//! maximum of each register, so the counter of a long interval is obtained from those of its sub-intervals,
//! and repeated pages have no effect.
//!
//! The count is computed from the number of registers with each rank. These numbers are updated
//! with the registers, so that a count costs a loop over the ranks instead of the
//! registers. The estimator needs no bias table and no
//! other estimator for small counts.
//!
//! Source: [Flajolet07] for the sketch, with [Heule13]'s 64-bit hashes; [Ertl17] §4 (algorithm 6, the improved raw estimator) for the count.
//! Standard error: `1.04 / sqrt(m)`, less below `m` pages.
//! Cost: O(1) per page, 2^p + 260 bytes.
//! Not here: sparse representations.

use std::f64::consts::LN_2;

use plimsoll_flow::Whole as _;

/// Smallest and largest supported `p`.
pub(super) const PRECISIONS: std::ops::RangeInclusive<u32> = 4..=18;

/// Number of ranks at the smallest `p`, where it is largest, plus one for zero.
const RANKS: usize = 64;

/// Upper bound on counts, whatever the registers: enough for every page of 2^64 bytes.
pub(super) const COUNT_MAX: u64 = 1 << 52;

/// The update of a counter by one page: a register and its new rank.
///
/// Packed, because counters are merged from lists of marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark(u32);

impl Mark {
    /// The mark of a page with this hash, for `2^precision` registers.
    #[inline(always)]
    pub(super) fn of(hash: u64, precision: u32) -> Self {
        let register = hash >> (u64::BITS - precision);
        // The bit below the last one of the hash limits the number of zeros.
        let rest = hash << precision | 1 << (precision - 1);
        #[expect(clippy::cast_possible_truncation, reason = "at most 18 bits")]
        Self((register as u32) << 8 | (rest.leading_zeros() + 1))
    }

    #[inline]
    fn new(register: usize, rank: u8) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "at most 18 bits")]
        Self((register as u32) << 8 | u32::from(rank))
    }

    #[inline]
    fn register(self) -> usize {
        (self.0 >> 8) as usize
    }

    #[inline]
    fn rank(self) -> u8 {
        (self.0 & 0xff) as u8
    }
}

/// A counter of distinct pages.
#[derive(Debug, Clone)]
pub(super) struct HyperLogLog {
    registers: Vec<u8>,
    /// Number of registers with each rank.
    held: [u32; RANKS],
    /// Largest rank of any register.
    top: u8,
}

impl HyperLogLog {
    /// An empty counter with `2^precision` registers.
    pub(super) fn new(precision: u32) -> Self {
        let mut counter = Self {
            registers: vec![0; 1 << precision],
            held: [0; RANKS],
            top: 0,
        };
        counter.held[0] = 1 << precision;
        counter
    }

    /// Resets the counter, keeping its memory.
    pub(super) fn clear(&mut self) {
        self.registers.fill(0);
        self.held = [0; RANKS];
        self.held[0] = 1 << self.registers.len().trailing_zeros();
        self.top = 0;
    }

    /// Adds `marks`, and keeps those in the list, in order, that changed a register.
    ///
    /// A counter that includes everything this one has counted is not changed by the removed marks.
    pub(super) fn absorb(&mut self, marks: &mut Vec<Mark>) {
        let mut kept = 0;
        for index in 0..marks.len() {
            let mark = marks[index];
            marks[kept] = mark;
            let register = &mut self.registers[mark.register()];
            let before = *register;
            if mark.rank() > before {
                *register = mark.rank();
                // Counts of registers, which stay below 2^19.
                let held = &mut self.held[usize::from(before % 64)];
                *held = held.wrapping_sub(1);
                let held = &mut self.held[usize::from(mark.rank() % 64)];
                *held = held.wrapping_add(1);
                self.top = self.top.max(mark.rank());
                kept += 1;
            }
        }
        marks.truncate(kept);
    }

    /// The estimated number of distinct pages, rounded to a whole one.
    ///
    /// Never decreases when pages are added.
    pub(super) fn count(&self) -> u64 {
        let registers = self.registers.len() as f64;
        // The largest rank that a hash can have: it means "this or more".
        let last = u64::BITS as usize - self.registers.len().trailing_zeros() as usize + 1;
        let top = usize::from(self.top);
        let mut sum = if top == last {
            registers * tau(1.0 - f64::from(self.held[last]) / registers)
        } else {
            0.0
        };
        for rank in (1..=top.min(last - 1)).rev() {
            sum = 0.5 * (sum + f64::from(self.held[rank]));
        }
        sum += registers * sigma(f64::from(self.held[0]) / registers);
        let count = registers * registers / (2.0 * LN_2 * sum);
        u64::whole(count.round().min(COUNT_MAX as f64))
    }

    /// Bytes of heap allocated.
    pub(super) fn memory_bytes(&self) -> usize {
        self.registers.capacity()
    }
}

/// Function sigma of [Ertl17], for registers without a rank, a share `x` of all; infinite for all of them.
fn sigma(mut x: f64) -> f64 {
    if x == 1.0 {
        return f64::INFINITY;
    }
    let (mut weight, mut sum) = (1.0, x);
    loop {
        x *= x;
        let before = sum;
        sum += x * weight;
        weight += weight;
        if sum == before {
            return sum;
        }
    }
}

/// Function tau of [Ertl17], for registers at the largest rank, all but a share `x`.
fn tau(mut x: f64) -> f64 {
    if x == 0.0 || x == 1.0 {
        return 0.0;
    }
    let (mut weight, mut sum) = (1.0, 1.0 - x);
    loop {
        x = x.sqrt();
        let before = sum;
        weight *= 0.5;
        sum -= (1.0 - x) * (1.0 - x) * weight;
        if sum == before {
            return sum / 3.0;
        }
    }
}

/// Registers of an unfinished interval of the stream, with a list of those in use.
#[derive(Debug, Clone)]
pub(super) struct Marks {
    registers: Vec<u8>,
    touched: Vec<u32>,
}

impl Marks {
    pub(super) fn new(precision: u32) -> Self {
        Self {
            registers: vec![0; 1 << precision],
            touched: Vec::new(),
        }
    }

    #[inline(always)]
    pub(super) fn add(&mut self, mark: Mark) {
        let register = &mut self.registers[mark.register()];
        if mark.rank() > *register {
            if *register == 0 {
                self.touched.push(mark.0 >> 8);
            }
            *register = mark.rank();
        }
    }

    /// Appends a mark for each register in use.
    pub(super) fn list_into(&self, marks: &mut Vec<Mark>) {
        marks.clear();
        let registers = self.touched.iter().map(|&register| register as usize);
        marks.extend(registers.map(|register| Mark::new(register, self.registers[register])));
    }

    /// Resets the registers, keeping their memory.
    pub(super) fn clear(&mut self) {
        for register in self.touched.drain(..) {
            self.registers[register as usize] = 0;
        }
    }

    /// Bytes of heap allocated.
    pub(super) fn memory_bytes(&self) -> usize {
        self.registers.capacity() + self.touched.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::hash::PageHash;
    use plimsoll_flow::PageNumber;
    use proptest::prelude::*;

    fn count_of(precision: u32, pages: impl Iterator<Item = u64>, seed: u64) -> u64 {
        let hash = PageHash::seeded(seed);
        let mut counter = HyperLogLog::new(precision);
        let marks = pages.map(|page| Mark::of(hash.of(PageNumber(page)), precision));
        counter.absorb(&mut marks.collect());
        counter.count()
    }

    #[test]
    fn nothing_counts_as_nothing_and_one_page_as_one() {
        for precision in PRECISIONS {
            assert_eq!(count_of(precision, 0..0, 1), 0);
            assert_eq!(count_of(precision, [7, 7, 7].into_iter(), 1), 1);
        }
    }

    #[test]
    fn bias_and_spread_are_the_sketchs_own_from_one_page_to_ten_million() {
        const SEEDS: u64 = 20;
        let precision = 12;
        let stated = 1.04 / 64.0;
        let sizes = [
            1, 10, 100, 1_000, 4_000, 10_000, 30_000, 100_000, 1_000_000, 10_000_000,
        ];
        let mut counters: Vec<_> = (0..SEEDS)
            .map(|seed| (PageHash::seeded(seed), HyperLogLog::new(precision)))
            .collect();
        let mut seen = 0;
        for size in sizes {
            let (mut sum, mut squares) = (0.0, 0.0);
            for (hash, counter) in &mut counters {
                for start in (seen..size).step_by(1 << 16) {
                    let pages = start..size.min(start + (1 << 16));
                    let marks = pages.map(|page| Mark::of(hash.of(PageNumber(page)), precision));
                    counter.absorb(&mut marks.collect());
                }
                let error = counter.count() as f64 / size as f64 - 1.0;
                sum += error;
                squares += error * error;
            }
            seen = size;
            let seeds = SEEDS as f64;
            let (bias, spread) = (sum / seeds, (squares / seeds).sqrt());
            // The mean of 20 strays by a fifth of the spread, the spread of 20 by a sixth of itself.
            assert!(bias.abs() < 3.5 * stated / seeds.sqrt(), "{size}: {bias}");
            assert!(spread < 1.55 * stated, "{size}: {spread}");
            if size >= 100_000 {
                assert!(spread > 0.45 * stated, "{size}: {spread}");
            }
        }
    }

    #[test]
    fn a_full_counter_says_a_bounded_number() {
        let mut counter = HyperLogLog::new(4);
        let mut marks: Vec<_> = (0..16).map(|index| Mark::of(index << 60, 4)).collect();
        counter.absorb(&mut marks);
        assert_eq!(counter.top, 61);
        assert_eq!(counter.count(), COUNT_MAX);
    }

    proptest! {
        #[test]
        fn merging_counts_what_seeing_everything_counts(
            pages in prop::collection::vec(0_u64..5_000, 0..3_000),
            cut in any::<prop::sample::Index>(),
            precision in 4_u32..=10,
        ) {
            let (head, tail) = pages.split_at(cut.index(pages.len() + 1).min(pages.len()));
            let hash = PageHash::seeded(3);
            let mark = |&page: &u64| Mark::of(hash.of(PageNumber(page)), precision);
            let mut parts = Marks::new(precision);
            let mut merged = HyperLogLog::new(precision);
            let mut list = Vec::new();
            for part in [head, tail] {
                part.iter().for_each(|page| parts.add(mark(page)));
                parts.list_into(&mut list);
                parts.clear();
                let before = merged.count();
                merged.absorb(&mut list);
                prop_assert!(merged.count() >= before);
            }
            prop_assert_eq!(merged.count(), count_of(precision, pages.into_iter(), 3));
            // The numbers of registers by rank agree with the registers.
            for (rank, &held) in merged.held.iter().enumerate() {
                let registers = merged.registers.iter().filter(|&&r| usize::from(r) == rank);
                prop_assert_eq!(registers.count(), held as usize);
            }
        }
    }
}
