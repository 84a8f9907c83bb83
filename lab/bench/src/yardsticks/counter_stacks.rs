//! Counter Stacks as in public engines: every reference is added to every live counter.

use plimsoll_estimator::Estimator;
use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber, Whole as _};

use super::{Hits, mix};

/// Counters that differ by less than this share are one.
const PRUNED: f64 = 0.02;

/// A HyperLogLog with its sum kept up to date.
#[derive(Debug, Clone)]
struct Counter {
    registers: Vec<u8>,
    /// Sum of 2^-register.
    sum: f64,
    zeros: usize,
    before: f64,
}

impl Counter {
    fn new(precision: u32) -> Self {
        let registers = 1 << precision;
        Self {
            registers: vec![0; registers],
            sum: registers as f64,
            zeros: registers,
            before: 0.0,
        }
    }

    fn add(&mut self, hash: u64) {
        let precision = self.registers.len().ilog2();
        #[expect(clippy::cast_possible_truncation, reason = "an index of registers")]
        let register = &mut self.registers[(hash >> (64 - precision)) as usize];
        let rank = u8::try_from((hash << precision | 1).leading_zeros() + 1).unwrap_or(u8::MAX);
        if rank > *register {
            self.zeros -= usize::from(*register == 0);
            self.sum += (-f64::from(rank)).exp2() - (-f64::from(*register)).exp2();
            *register = rank;
        }
    }

    fn count(&self) -> f64 {
        let m = self.registers.len() as f64;
        let raw = 0.7213 / (1.0 + 1.079 / m) * m * m / self.sum;
        if raw <= 2.5 * m && self.zeros > 0 {
            m * (m / self.zeros as f64).ln()
        } else {
            raw
        }
    }
}

/// A counter every `interval` references.
#[derive(Debug, Clone)]
pub(crate) struct PlainCounterStacks {
    precision: u32,
    interval: usize,
    /// Oldest first.
    counters: Vec<Counter>,
    hits: Hits,
    pending: Vec<PageNumber>,
    references: u64,
}

impl PlainCounterStacks {
    pub(crate) fn new(precision: u32, interval: usize) -> Self {
        Self {
            precision,
            interval,
            counters: Vec::new(),
            hits: Hits::default(),
            pending: Vec::new(),
            references: 0,
        }
    }

    fn end_interval(&mut self) {
        self.counters.push(Counter::new(self.precision));
        for &page in &self.pending {
            let hash = mix(page.0 ^ 0x5bd1_e995);
            for counter in &mut self.counters {
                counter.add(hash);
            }
        }
        // A counter grows by what none since its beginning has seen; what it does not grow by, but
        // the next younger does, was last seen between their beginnings.
        let mut younger_growth = self.pending.len() as f64;
        for index in (0..self.counters.len()).rev() {
            let count = self.counters[index].count();
            let growth = (count - self.counters[index].before).clamp(0.0, younger_growth);
            let size = self.counters.get(index + 1).map_or(1.0, Counter::count);
            self.hits
                .add(usize::whole(size).max(1), younger_growth - growth);
            younger_growth = growth;
        }
        for counter in &mut self.counters {
            counter.before = counter.count();
        }
        let mut index = 0;
        while index + 1 < self.counters.len() {
            if self.counters[index + 1].before >= (1.0 - PRUNED) * self.counters[index].before {
                self.counters.remove(index + 1);
            } else {
                index += 1;
            }
        }
        self.pending.clear();
    }
}

impl Estimator for PlainCounterStacks {
    fn observe(&mut self, pages: &[PageNumber]) {
        for &page in pages {
            self.pending.push(page);
            if self.pending.len() == self.interval {
                self.end_interval();
            }
        }
        self.references += pages.len() as u64;
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        if !self.pending.is_empty() {
            self.end_interval();
        }
        self.hits.curve(self.references as f64)
    }

    fn memory_bytes(&self) -> usize {
        self.counters
            .iter()
            .map(|counter| counter.registers.len())
            .sum()
    }
}
