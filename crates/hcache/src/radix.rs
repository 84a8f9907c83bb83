//! The pages of an object by index: a radix tree whose memory follows its contents.
//!
//! A node distinguishes indices by six of their bits. It exists only where two or more pages differ, so bits
//! in which all pages of a subtree agree have no node, and a single page is attached where it differs from the others.
//! A link contains its node's level, so a lookup reads one slot per level and nothing else of a node. It does not
//! compare skipped bits: it ends at the only page that can have the index, and compares with that page's descriptor.
//!
//! Source: the radix tree of page descriptors of \[M08\]; paths are compressed as in PATRICIA (Morrison, 1968).
//! Cost: at most six levels; a full node of 64 pages is 4.3 bytes a page.
//! Not here: descriptors (`descriptor`); objects, which hold the roots (`table`).

use std::mem::offset_of;
use std::ops::RangeInclusive;

use crate::arena::{Arena, Frames, NIL, NoFrame, Slot};
use crate::descriptor::Descriptor;

/// Bits of an index that a node distinguishes.
const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;

/// Identifiers of pages are below this, and so are those of nodes, of which there are fewer than pages.
const IDS: u32 = 1 << 28;

/// A subtree: nothing, a page or a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link(u32);

/// The target of a link.
enum LinkTarget {
    Nothing,
    Page(u32),
    Node { id: u32, shift: u32 },
}

impl Link {
    /// A tree without a page.
    pub(crate) const EMPTY: Self = Self(NIL);

    /// Bit of a link to a node; three bits of level follow.
    const NODE: u32 = 1 << 31;

    /// A tree of one page.
    #[inline(always)]
    pub(crate) fn page(id: u32) -> Self {
        Self(id)
    }

    fn node(id: u32, shift: u32) -> Self {
        Self(Self::NODE | (shift / BITS * IDS) | id)
    }

    #[inline(always)]
    fn to(self) -> LinkTarget {
        if self.0 < Self::NODE {
            LinkTarget::Page(self.0)
        } else if self == Self::EMPTY {
            LinkTarget::Nothing
        } else {
            LinkTarget::Node {
                id: self.0 % IDS,
                shift: (self.0 - Self::NODE) / IDS * BITS,
            }
        }
    }

    /// The page of a tree of one page.
    pub(crate) fn only_page(self) -> Option<u32> {
        match self.to() {
            LinkTarget::Page(id) => Some(id),
            LinkTarget::Nothing | LinkTarget::Node { .. } => None,
        }
    }

    /// Whether the tree is empty.
    pub(crate) fn is_empty(self) -> bool {
        self == Self::EMPTY
    }
}

/// A node, at which indices differ: two or more of its slots are taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node {
    /// A bit for each slot that is taken.
    taken: u64,
    /// Lowest index it can hold; of a free node, the next free one.
    base: u32,
    slots: [Link; SLOTS],
}

const _: () = assert!(size_of::<Node>() == 272); // 15 to a frame

impl Node {
    #[inline(always)]
    fn slot(index: u32, shift: u32) -> usize {
        (index >> shift) as usize % SLOTS
    }

    /// Highest index it can hold, being of level `shift`.
    #[inline(always)]
    fn last(&self, shift: u32) -> u32 {
        self.base | below(shift)
    }

    fn set(&mut self, slot: usize, link: Link) {
        self.slots[slot] = link;
        if link.is_empty() {
            self.taken &= !(1 << slot);
        } else {
            self.taken |= 1 << slot;
        }
    }

    /// The first slot taken, from `slot` on.
    fn taken_from(&self, slot: usize) -> Option<usize> {
        let taken = if slot < SLOTS { self.taken >> slot } else { 0 };
        (taken != 0).then(|| slot + taken.trailing_zeros() as usize)
    }
}

/// The bits of an index that a node of level `shift` and those below it distinguish.
#[inline(always)]
fn below(shift: u32) -> u32 {
    1_u32
        .checked_shl(shift + BITS)
        .map_or(u32::MAX, |end| end - 1)
}

impl Slot for Node {
    const EMPTY: Self = Self {
        taken: 0,
        base: NIL,
        slots: [Link::EMPTY; SLOTS],
    };

    fn next_free(&self) -> u32 {
        self.base
    }

    fn set_free(&mut self, next: u32) {
        self.base = next;
    }
}

/// A location that holds a link.
#[derive(Clone, Copy)]
enum Holder {
    Root,
    Slot { node: u32, slot: usize },
}

/// The trees of a shard's objects; each object has its root. `NIL` means no page.
pub(crate) struct Tree {
    nodes: Arena<Node>,
}

impl Tree {
    /// Returns an empty set of trees.
    pub(crate) fn new() -> Self {
        Self {
            nodes: Arena::new(),
        }
    }

    /// Number of frames it holds.
    pub(crate) fn frames(&self) -> usize {
        self.nodes.frames()
    }

    /// Number of frames it would hold without fragmentation.
    pub(crate) fn frames_needed(&self) -> usize {
        self.nodes.frames_needed()
    }

    /// Releases all frames; the trees are gone.
    pub(crate) fn clear(&mut self, frames: &mut impl Frames) {
        self.nodes.clear(frames);
    }

    /// Bytes it takes outside its frames.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.nodes.heap_bytes()
    }

    /// Moves nodes out of frames from `top` on. If frames run out, the nodes already moved stay moved.
    pub(crate) fn relocate(
        &mut self,
        top: u32,
        take: impl FnMut() -> Option<u32>,
    ) -> Result<(), NoFrame> {
        self.nodes.relocate(top, take)
    }

    /// Finds the page of an index.
    #[inline(always)]
    pub(crate) fn find(&self, root: Link, index: u32, pages: &Arena<Descriptor>) -> u32 {
        let mut link = root;
        loop {
            match link.to() {
                LinkTarget::Nothing => return NIL,
                LinkTarget::Page(id) if pages[id].index == index => return id,
                LinkTarget::Page(_) => return NIL,
                LinkTarget::Node { id, shift } => {
                    let node = &self.nodes[id];
                    let slot = Node::slot(index, shift);
                    // `taken` is one line of the node, its slots are on up to five: a miss that ends here reads the line that is
                    // cached more often. A hit need not wait for it: the branch is predicted.
                    if node.taken >> slot & 1 == 0 {
                        return NIL;
                    }
                    link = node.slots[slot];
                }
            }
        }
    }

    /// The page to which an index leads, which may have another index.
    #[inline(always)]
    pub(crate) fn candidate(&self, root: Link, index: u32) -> u32 {
        let mut link = root;
        loop {
            match link.to() {
                LinkTarget::Nothing => return NIL,
                LinkTarget::Page(id) => return id,
                LinkTarget::Node { id, shift } => {
                    link = self.nodes[id].slots[Node::slot(index, shift)];
                }
            }
        }
    }

    /// Prefetches the two lines of the lowest node on the way to an index that a lookup, insertion or removal uses.
    #[inline(always)]
    pub(crate) fn prefetch(&self, root: Link, index: u32) {
        let mut link = root;
        while let LinkTarget::Node { id, shift } = link.to() {
            if shift == 0 {
                let slot = Node::slot(index, 0) * size_of::<Link>();
                let slot = offset_of!(Node, slots) + slot;
                self.nodes.prefetch_within(id, slot);
                self.nodes.prefetch_within(id, offset_of!(Node, taken));
                return;
            }
            link = self.nodes[id].slots[Node::slot(index, shift)];
        }
    }

    /// Inserts a page under an index that has none.
    ///
    /// # Errors
    ///
    /// [`NoFrame`] if it needs a node and there is no frame for one. The tree is then unchanged.
    #[inline(always)]
    pub(crate) fn insert(
        &mut self,
        root: &mut Link,
        index: u32,
        id: u32,
        pages: &Arena<Descriptor>,
        frames: &mut impl Frames,
    ) -> Result<(), NoFrame> {
        let page = Link::page(id);
        let (mut holder, mut link) = (Holder::Root, *root);
        // Descends to the level at which the index differs from the subtree there, which starts with `there`.
        let there = loop {
            match link.to() {
                LinkTarget::Nothing => {
                    self.hold(root, holder, page);
                    return Ok(());
                }
                LinkTarget::Page(other) => break pages[other].index,
                LinkTarget::Node { id, shift } => {
                    let node = &self.nodes[id];
                    if (index ^ node.base) & !below(shift) != 0 {
                        break node.base;
                    }
                    let slot = Node::slot(index, shift);
                    holder = Holder::Slot { node: id, slot };
                    link = node.slots[slot];
                }
            }
        };
        assert_ne!(index, there, "index {index} has a page");
        self.nodes.ensure(1, frames)?;
        let shift = (index ^ there).ilog2() / BITS * BITS;
        let mut node = Node {
            base: index & !below(shift),
            ..Node::EMPTY
        };
        node.set(Node::slot(index, shift), page);
        node.set(Node::slot(there, shift), link);
        let node = Link::node(self.nodes.insert(node), shift);
        self.hold(root, holder, node);
        Ok(())
    }

    /// Removes an index's page and returns it.
    #[inline(always)]
    pub(crate) fn remove(&mut self, root: &mut Link, index: u32, pages: &Arena<Descriptor>) -> u32 {
        let (mut above, mut holder, mut link) = (Holder::Root, Holder::Root, *root);
        let found = loop {
            match link.to() {
                LinkTarget::Nothing => return NIL,
                LinkTarget::Page(id) if pages[id].index == index => break id,
                LinkTarget::Page(_) => return NIL,
                LinkTarget::Node { id, shift } => {
                    let slot = Node::slot(index, shift);
                    (above, holder) = (holder, Holder::Slot { node: id, slot });
                    link = self.nodes[id].slots[slot];
                }
            }
        };
        self.hold(root, holder, Link::EMPTY);
        if let Holder::Slot { node, .. } = holder
            && let Some(left) = self.dissolve(node)
        {
            self.hold(root, above, left);
        }
        found
    }

    /// Removes up to `most` pages of a range of indices, in order, and passes each to `removed`.
    ///
    /// Cost: O(pages removed + 1), however wide the range.
    pub(crate) fn drain_range(
        &mut self,
        root: &mut Link,
        range: RangeInclusive<u32>,
        most: usize,
        pages: &Arena<Descriptor>,
        mut removed: impl FnMut(u32),
    ) {
        let mut left = most;
        *root = self.drain(*root, &range, &mut left, pages, &mut removed);
    }

    /// Drains a subtree and returns the link that replaces it.
    fn drain(
        &mut self,
        link: Link,
        range: &RangeInclusive<u32>,
        left: &mut usize,
        pages: &Arena<Descriptor>,
        removed: &mut impl FnMut(u32),
    ) -> Link {
        match link.to() {
            LinkTarget::Nothing => Link::EMPTY,
            LinkTarget::Page(id) => {
                if *left == 0 || !range.contains(&pages[id].index) {
                    return link;
                }
                *left -= 1;
                removed(id);
                Link::EMPTY
            }
            LinkTarget::Node { id, shift } => {
                let node = &self.nodes[id];
                let (low, high) = (node.base, node.last(shift));
                if *range.end() < low || *range.start() > high {
                    return link;
                }
                let last = Node::slot(high.min(*range.end()), shift);
                let mut next = node.taken_from(Node::slot(low.max(*range.start()), shift));
                while let Some(slot) = next.filter(|slot| *slot <= last && *left > 0) {
                    let child = self.nodes[id].slots[slot];
                    let child = self.drain(child, range, left, pages, removed);
                    self.nodes[id].set(slot, child);
                    next = self.nodes[id].taken_from(slot + 1);
                }
                self.dissolve(id).unwrap_or(link)
            }
        }
    }

    /// Frees a node with fewer than two slots taken, and returns the link that replaces it.
    fn dissolve(&mut self, id: u32) -> Option<Link> {
        let node = &self.nodes[id];
        if node.taken.count_ones() > 1 {
            return None;
        }
        let left = node
            .taken_from(0)
            .map_or(Link::EMPTY, |slot| node.slots[slot]);
        self.nodes.remove(id);
        Some(left)
    }

    #[inline(always)]
    fn hold(&mut self, root: &mut Link, holder: Holder, link: Link) {
        match holder {
            Holder::Root => *root = link,
            Holder::Slot { node, slot } => self.nodes[node].set(slot, link),
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::sync::Arc;
    use crate::sys::Slab;

    /// Frames of a slab of their own, of which at most `left` are handed out.
    pub(crate) struct Budget {
        slab: Arc<Slab>,
        free: Vec<u32>,
        pub(crate) left: u32,
    }

    impl Budget {
        pub(crate) fn new(count: u32) -> Self {
            Self {
                slab: Arc::new(Slab::reserve(count, false).unwrap()),
                free: (0..count).rev().collect(),
                left: count,
            }
        }
    }

    impl Frames for Budget {
        fn slab(&self) -> &Arc<Slab> {
            &self.slab
        }

        fn take(&mut self) -> Option<u32> {
            self.left = self.left.checked_sub(1)?;
            self.free.pop()
        }

        fn give(&mut self, frame: u32) {
            self.left += 1;
            self.free.push(frame);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::testing::Budget;
    use super::*;
    use crate::descriptor::{Owner, Place};

    /// Tree, its pages, and the expected contents.
    struct Fixture {
        frames: Budget,
        pages: Arena<Descriptor>,
        tree: Tree,
        root: Link,
        twin: BTreeMap<u32, u32>,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                frames: Budget::new(4096),
                pages: Arena::new(),
                tree: Tree::new(),
                root: Link::EMPTY,
                twin: BTreeMap::new(),
            }
        }

        fn page(&mut self, index: u32) -> u32 {
            self.pages.ensure(1, &mut self.frames).unwrap();
            self.pages
                .insert(Descriptor::new(Owner::Record(0), index, Place::Word(0), 0))
        }

        fn insert(&mut self, index: u32) -> Result<(), NoFrame> {
            let id = self.page(index);
            let done = self
                .tree
                .insert(&mut self.root, index, id, &self.pages, &mut self.frames);
            match done {
                Ok(()) => assert_eq!(self.twin.insert(index, id), None),
                Err(NoFrame) => self.pages.remove(id),
            }
            done
        }

        fn remove(&mut self, index: u32) {
            let found = self.tree.remove(&mut self.root, index, &self.pages);
            assert_eq!(found, self.twin.remove(&index).unwrap_or(NIL));
            if found != NIL {
                self.pages.remove(found);
            }
        }

        fn drain(&mut self, range: RangeInclusive<u32>, most: usize) {
            let expected: Vec<u32> = if range.is_empty() {
                Vec::new()
            } else {
                self.twin
                    .range(range.clone())
                    .take(most)
                    .map(|(index, _)| *index)
                    .collect()
            };
            let mut found = Vec::new();
            self.tree
                .drain_range(&mut self.root, range, most, &self.pages, |id| {
                    found.push(id);
                });
            let expected: Vec<u32> = expected
                .iter()
                .map(|index| self.twin.remove(index).unwrap())
                .collect();
            assert_eq!(found, expected);
            for id in found {
                self.pages.remove(id);
            }
        }

        /// Asserts that the tree has its expected contents, and no more nodes than levels at which indices differ.
        fn check(&self) {
            for (index, id) in &self.twin {
                assert_eq!(self.tree.find(self.root, *index, &self.pages), *id);
            }
            let mut partings: Vec<(u32, u32)> = self
                .twin
                .keys()
                .zip(self.twin.keys().skip(1))
                .map(|(a, b)| {
                    let shift = (a ^ b).ilog2() / BITS * BITS;
                    (shift, a & !below(shift))
                })
                .collect();
            partings.sort_unstable();
            partings.dedup();
            assert_eq!(self.tree.nodes.live() as usize, partings.len());
        }
    }

    #[derive(Debug, Clone)]
    enum Op {
        Insert(u32),
        Remove(u32),
        Drain(u32, u32, usize),
    }

    /// Indices that often differ late, at every level, and at both ends.
    fn index() -> impl Strategy<Value = u32> {
        prop_oneof![
            0_u32..200,
            any::<u32>(),
            (0_u32..32, 0_u32..4).prop_map(|(shift, low)| (1 << shift) + low),
            (0_u32..200).prop_map(|back| u32::MAX - back),
        ]
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => index().prop_map(Op::Insert),
            4 => index().prop_map(Op::Remove),
            1 => (index(), index(), 0_usize..40).prop_map(|(a, b, most)| Op::Drain(a, b, most)),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_a_sorted_map(ops in prop::collection::vec(op(), 1..400)) {
            let mut fixture = Fixture::new();
            for op in ops {
                match op {
                    Op::Insert(index) if fixture.twin.contains_key(&index) => {
                        let found = fixture.tree.find(fixture.root, index, &fixture.pages);
                        prop_assert_eq!(found, fixture.twin[&index]);
                    }
                    Op::Insert(index) => {
                        prop_assert_eq!(fixture.tree.find(fixture.root, index, &fixture.pages), NIL);
                        fixture.insert(index).unwrap();
                    }
                    Op::Remove(index) => fixture.remove(index),
                    Op::Drain(a, b, most) => fixture.drain(a..=b, most),
                }
                fixture.check();
            }
            fixture.drain(0..=u32::MAX, usize::MAX);
            prop_assert!(fixture.root.is_empty());
            prop_assert_eq!(fixture.tree.nodes.live(), 0);
        }

        #[test]
        fn a_node_that_gets_no_frame_leaves_the_tree_as_it_was(
            indices in prop::collection::btree_set(index(), 1..200),
            order in any::<prop::sample::Index>(),
        ) {
            let mut fixture = Fixture::new();
            let mut indices: Vec<u32> = indices.into_iter().collect();
            let middle = order.index(indices.len());
            indices.rotate_left(middle);
            for index in indices {
                // Pages first, so that it is a node which goes without.
                fixture.pages.ensure(1, &mut fixture.frames).unwrap();
                let (root, nodes) = (fixture.root, fixture.tree.nodes.live());
                let left = std::mem::take(&mut fixture.frames.left);
                let refused = fixture.insert(index);
                fixture.frames.left = left;
                if refused == Err(NoFrame) {
                    prop_assert_eq!((fixture.root, fixture.tree.nodes.live()), (root, nodes));
                    prop_assert_eq!(fixture.tree.find(fixture.root, index, &fixture.pages), NIL);
                    fixture.check();
                    fixture.insert(index).unwrap();
                }
                fixture.check();
            }
        }
    }

    #[test]
    fn a_lone_page_needs_no_node_and_a_full_node_needs_one() {
        let mut fixture = Fixture::new();
        fixture.insert(7).unwrap();
        assert_eq!(fixture.tree.nodes.live(), 0);
        (64..128).for_each(|index| fixture.insert(index).unwrap());
        assert_eq!(fixture.tree.nodes.live(), 2);
        fixture.remove(7);
        assert_eq!(fixture.tree.nodes.live(), 1);
    }
}
