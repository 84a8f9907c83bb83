//! SHARDS as public engines have it: at a fixed rate with the deficit added to the first
//! bucket (SHARDS-adj), and of a fixed size with each reference weighted by the rate of its time.

use std::collections::BinaryHeap;

use plimsoll_estimator::Estimator;
use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber, Whole as _};

use super::fenwick::FenwickStack;
use super::{Hits, mix};

/// Fixed rate.
#[derive(Debug, Clone)]
pub(crate) struct PlainShards {
    rate: f64,
    limit: u64,
    stack: FenwickStack,
    hits: Hits,
    sampled: u64,
    references: u64,
}

fn limit_of(rate: f64) -> u64 {
    u64::whole(rate * u64::MAX as f64)
}

fn scaled(distance: usize, rate: f64) -> usize {
    usize::whole(distance as f64 / rate) + 1
}

impl PlainShards {
    pub(crate) fn new(rate: f64) -> Self {
        Self {
            rate,
            limit: limit_of(rate),
            stack: FenwickStack::new(),
            hits: Hits::default(),
            sampled: 0,
            references: 0,
        }
    }
}

impl Estimator for PlainShards {
    fn observe(&mut self, pages: &[PageNumber]) {
        for page in pages {
            if mix(page.0 ^ 0x5bd1_e995) > self.limit {
                continue;
            }
            self.sampled += 1;
            if let Some(distance) = self.stack.touch(page.0) {
                self.hits.add(scaled(distance, self.rate), 1.0);
            }
        }
        self.references += pages.len() as u64;
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let expected = self.references as f64 * self.rate;
        let mut hits = self.hits.clone();
        if self.rate < 1.0 {
            hits.add(1, expected - self.sampled as f64);
        }
        hits.curve(expected)
    }

    fn memory_bytes(&self) -> usize {
        self.hits.weights.capacity() * 8
    }
}

/// Fixed size.
#[derive(Debug, Clone)]
pub(crate) struct PlainFixedSizeShards {
    pages_max: usize,
    limit: u64,
    stack: FenwickStack,
    /// Hashes and pages of the sample, the largest hash on top.
    heap: BinaryHeap<(u64, u64)>,
    hits: Hits,
    weight: f64,
    references: u64,
}

impl PlainFixedSizeShards {
    pub(crate) fn new(pages_max: usize) -> Self {
        Self {
            pages_max,
            limit: u64::MAX,
            stack: FenwickStack::new(),
            heap: BinaryHeap::new(),
            hits: Hits::default(),
            weight: 0.0,
            references: 0,
        }
    }
}

impl Estimator for PlainFixedSizeShards {
    fn observe(&mut self, pages: &[PageNumber]) {
        for page in pages {
            let hash = mix(page.0 ^ 0x5bd1_e995);
            if hash > self.limit {
                continue;
            }
            let rate = if self.limit == u64::MAX {
                1.0
            } else {
                self.limit as f64 / u64::MAX as f64
            };
            self.weight += 1.0 / rate;
            match self.stack.touch(page.0) {
                Some(distance) => self.hits.add(scaled(distance, rate), 1.0 / rate),
                None => self.heap.push((hash, page.0)),
            }
            while self.stack.pages() > self.pages_max {
                let Some((largest, page)) = self.heap.pop() else {
                    break;
                };
                self.limit = largest - 1;
                self.stack.forget(page);
            }
        }
        self.references += pages.len() as u64;
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let mut hits = self.hits.clone();
        hits.add(1, self.references as f64 - self.weight);
        hits.curve(self.references as f64)
    }

    fn memory_bytes(&self) -> usize {
        self.hits.weights.capacity() * 8
    }
}
