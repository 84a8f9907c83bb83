//! Exact LRU with a hash table and a Fenwick tree over times, numbered anew when they run out.

use hashbrown::HashMap;
use plimsoll_estimator::Estimator;
use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use super::Hits;

/// The stack alone.
#[derive(Debug, Clone)]
pub(super) struct FenwickStack {
    last: HashMap<u64, usize>,
    tree: Vec<u32>,
    now: usize,
}

impl FenwickStack {
    pub(super) fn new() -> Self {
        Self {
            last: HashMap::new(),
            tree: vec![0; 1 << 12],
            now: 0,
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.last.len()
    }

    /// Pages used since the page's last use, itself not counted.
    pub(super) fn touch(&mut self, page: u64) -> Option<usize> {
        if self.now + 1 == self.tree.len() {
            self.number_anew();
        }
        self.now += 1;
        let before = self.last.insert(page, self.now);
        self.add(self.now, 1);
        let before = before?;
        let deeper = self.sum(before);
        self.add(before, u32::MAX);
        Some(self.last.len() - deeper)
    }

    pub(super) fn forget(&mut self, page: u64) {
        if let Some(time) = self.last.remove(&page) {
            self.add(time, u32::MAX);
        }
    }

    /// Adds a number modulo 2^32.
    fn add(&mut self, mut at: usize, count: u32) {
        while at < self.tree.len() {
            self.tree[at] = self.tree[at].wrapping_add(count);
            at += at & at.wrapping_neg();
        }
    }

    fn sum(&self, mut at: usize) -> usize {
        let mut sum = 0_u32;
        while at > 0 {
            sum = sum.wrapping_add(self.tree[at]);
            at &= at - 1;
        }
        sum as usize
    }

    fn number_anew(&mut self) {
        let mut uses: Vec<_> = self
            .last
            .iter()
            .map(|(&page, &time)| (time, page))
            .collect();
        uses.sort_unstable();
        let times = (uses.len() * 4).max(1 << 12);
        self.tree.clear();
        self.tree.resize(times, 0);
        self.now = 0;
        for (_, page) in uses {
            self.now += 1;
            self.last.insert(page, self.now);
            self.add(self.now, 1);
        }
    }
}

/// The estimator on it.
#[derive(Debug, Clone)]
pub(crate) struct FenwickLru {
    stack: FenwickStack,
    hits: Hits,
    references: u64,
}

impl FenwickLru {
    pub(crate) fn new() -> Self {
        Self {
            stack: FenwickStack::new(),
            hits: Hits::default(),
            references: 0,
        }
    }
}

impl Estimator for FenwickLru {
    fn observe(&mut self, pages: &[PageNumber]) {
        for page in pages {
            if let Some(distance) = self.stack.touch(page.0) {
                self.hits.add(distance + 1, 1.0);
            }
        }
        self.references += pages.len() as u64;
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        self.hits.curve(self.references as f64)
    }

    fn memory_bytes(&self) -> usize {
        self.stack.last.allocation_size() + self.stack.tree.len() * 4
    }
}
