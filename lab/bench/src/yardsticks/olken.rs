//! Exact LRU with a balanced search tree over last uses (Olken 1981), a treap here.

use hashbrown::HashMap;
use plimsoll_estimator::Estimator;
use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use super::{Hits, mix};

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Node {
    time: u64,
    priority: u32,
    left: u32,
    right: u32,
    /// Nodes in this subtree.
    count: u32,
}

/// One node a page; a use takes the node out and puts it in as the latest.
#[derive(Debug, Clone)]
pub(crate) struct OlkenLru {
    last: HashMap<u64, u32>,
    nodes: Vec<Node>,
    root: u32,
    hits: Hits,
    references: u64,
}

impl OlkenLru {
    pub(crate) fn new() -> Self {
        Self {
            last: HashMap::new(),
            nodes: Vec::new(),
            root: NONE,
            hits: Hits::default(),
            references: 0,
        }
    }

    fn count(&self, node: u32) -> u32 {
        if node == NONE {
            0
        } else {
            self.nodes[node as usize].count
        }
    }

    fn update(&mut self, node: u32) {
        let Node { left, right, .. } = self.nodes[node as usize];
        self.nodes[node as usize].count = 1 + self.count(left) + self.count(right);
    }

    /// Joins two trees, all of the first before all of the second.
    fn join(&mut self, left: u32, right: u32) -> u32 {
        if left == NONE || right == NONE {
            return left.min(right);
        }
        if self.nodes[left as usize].priority > self.nodes[right as usize].priority {
            let inner = self.nodes[left as usize].right;
            self.nodes[left as usize].right = self.join(inner, right);
            self.update(left);
            left
        } else {
            let inner = self.nodes[right as usize].left;
            self.nodes[right as usize].left = self.join(left, inner);
            self.update(right);
            right
        }
    }

    /// Takes the node of `time` out; returns how many were later.
    fn take_out(&mut self, time: u64) -> u32 {
        let mut later = 0;
        let mut path = None;
        let mut at = self.root;
        while self.nodes[at as usize].time != time {
            self.nodes[at as usize].count -= 1;
            let node = self.nodes[at as usize];
            let goes_left = time < node.time;
            if goes_left {
                later += 1 + self.count(node.right);
            }
            path = Some((at, goes_left));
            at = if goes_left { node.left } else { node.right };
        }
        let Node { left, right, .. } = self.nodes[at as usize];
        later += self.count(right);
        let joined = self.join(left, right);
        match path {
            None => self.root = joined,
            Some((parent, true)) => self.nodes[parent as usize].left = joined,
            Some((parent, false)) => self.nodes[parent as usize].right = joined,
        }
        later
    }
}

impl Estimator for OlkenLru {
    fn observe(&mut self, pages: &[PageNumber]) {
        for page in pages {
            let time = self.references;
            self.references += 1;
            let fresh = Node {
                time,
                // The high half of the bits.
                priority: u32::try_from(mix(time) >> 32).unwrap_or(0),
                left: NONE,
                right: NONE,
                count: 1,
            };
            let node = match self.last.get(&page.0) {
                Some(&node) => {
                    let before = self.nodes[node as usize].time;
                    let distance = self.take_out(before);
                    self.hits.add(distance as usize + 1, 1.0);
                    self.nodes[node as usize] = fresh;
                    node
                }
                None => {
                    let node = u32::try_from(self.nodes.len()).unwrap_or(NONE);
                    self.nodes.push(fresh);
                    self.last.insert(page.0, node);
                    node
                }
            };
            self.root = self.join(self.root, node);
        }
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        self.hits.curve(self.references as f64)
    }

    fn memory_bytes(&self) -> usize {
        self.last.allocation_size() + self.nodes.capacity() * size_of::<Node>()
    }
}
