//! The objects of a shard: a hash of pools and objects to their pages.
//!
//! A slot names an object's record, or if it has one page, the descriptor of that page, with a seven-bit tag of the object's hash;
//! 16 slots are a line of 64 bytes, and 64 lines a block of one frame. An object is in the first line, from its home line on, that
//! had a free slot; the last line of a block is followed by its first. So a line that is not full ends a search, and a miss reads
//! one line and rarely a record or a descriptor: one of 128 slots has the same tag. A removal moves an object back from the
//! following lines, so there are no tombstones and searches stay short. A record stores the part of its hash that determines its
//! position; for an only page it is computed again.
//!
//! The table grows and shrinks by one block at a time (linear hashing with partial expansions): two blocks in their turn become
//! three, and when all have, three become four. So it never needs more than a frame at once, no operation moves more than three
//! blocks, and no block has more than one and a half times the mean number of objects.
//!
//! Source: the hash of objects of \[M08\]; linear hashing (Litwin, 1980), partial expansions (Larson, 1980); a line as a bucket that overflows into the
//! next, and removal (Knuth, The Art of Computer Programming 3, 6.4, algorithm R).
//! Cost: 7.1 bytes an object in slots; 24 in its record, unless it has one page.
//! Not here: the hash function, which must be keyed where clients could choose objects whose hashes collide;
//! an object's pages (`radix`).

use std::ops::{Index, IndexMut};

use crate::arena::{Arena, Frames, NIL, NoFrame, Slot};
use crate::descriptor::{Descriptor, Key, Owner};
use crate::radix::{Link, Tree};
use crate::sys::Block;

/// Bits of a slot that hold a reference; the others are a tag.
const REF_BITS: u32 = 25;

/// Numbers that a slot can hold are below this; that one, of a page under a tag of ones, would be `NIL`.
const IDS: u32 = (1 << (REF_BITS - 1)) - 1;

/// A hash function of objects.
pub(crate) trait Hasher {
    /// The hash of an object; its lower half is used.
    fn hash(&self, key: Key) -> u64;
}

/// What a slot refers to: the record of an object or its only page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ObjectRef(u32);

/// The target of a reference.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    Page(u32),
    Record(u32),
}

impl ObjectRef {
    /// No object.
    pub(crate) const NONE: Self = Self(NIL);

    const PAGE: u32 = 1 << (REF_BITS - 1);

    #[inline(always)]
    pub(crate) fn page(id: u32) -> Self {
        Self(Self::PAGE | id)
    }

    #[inline(always)]
    pub(crate) fn record(id: u32) -> Self {
        Self(id)
    }

    #[inline(always)]
    fn of_slot(slot: u32) -> Self {
        Self(slot % (1 << REF_BITS))
    }

    #[inline(always)]
    pub(crate) fn to(self) -> Target {
        let id = self.0 % Self::PAGE;
        if self.0 & Self::PAGE == 0 {
            Target::Record(id)
        } else {
            Target::Page(id)
        }
    }

    /// The object, if there is one.
    #[inline(always)]
    pub(crate) fn some(self) -> Option<Self> {
        (self != Self::NONE).then_some(self)
    }
}

const LINE_SLOTS: usize = 16;

/// Lines of a block.
const LINES: usize = Block::<Line>::ITEMS;

const BLOCK_SLOTS: usize = LINES * LINE_SLOTS;

/// Mean number of objects a block above which one is added: 9/16. A block whose turn has not come has up to one and a half times
/// as many.
const SPLIT_ABOVE: usize = BLOCK_SLOTS / 16 * 9;

/// Maximum number of objects of a block among which those of another are distributed.
const JOINED_MAX: usize = BLOCK_SLOTS / 4 * 3;

/// Mean number of objects a block below which one is removed.
const JOIN_BELOW: usize = BLOCK_SLOTS / 8;

/// Slots of one cache line; a free one is `NIL`.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u32; LINE_SLOTS]);

impl Line {
    const EMPTY: Self = Self([NIL; LINE_SLOTS]);

    /// Returns a bit for each slot: whether `is` holds for it.
    #[inline(always)]
    fn which(&self, is: impl Fn(u32) -> bool) -> u32 {
        // Masks, not shifts by the position, because the compiler vectorises these.
        const BITS: [u32; LINE_SLOTS] = {
            let mut bits = [1; LINE_SLOTS];
            let mut at = 1;
            while at < LINE_SLOTS {
                bits[at] = bits[at - 1] << 1;
                at += 1;
            }
            bits
        };
        let masked = |(slot, bit): (&u32, &u32)| u32::from(is(*slot)).wrapping_neg() & bit;
        self.0
            .iter()
            .zip(&BITS)
            .map(masked)
            .fold(0, |all, bit| all | bit)
    }

    #[inline(always)]
    fn is_full(&self) -> bool {
        self.which(|slot| slot == NIL) == 0
    }
}

/// The positions of the bits that are set.
#[inline(always)]
fn ones(mut bits: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let place = bits.trailing_zeros() as usize;
        (bits != 0).then(|| {
            bits &= bits - 1;
            place
        })
    })
}

/// The half of a hash that is used: the tag from its highest bits, the home from its lowest.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
fn half(hash: u64) -> u32 {
    hash as u32
}

#[inline(always)]
fn slot_of(half: u32, object: ObjectRef) -> u32 {
    half >> REF_BITS << REF_BITS | object.0
}

/// The line of a block at which a search begins.
#[inline(always)]
fn home(half: u32) -> usize {
    half as usize % LINES
}

/// The preferred slot of an object in its line, so that finding it there needs one probe.
#[inline(always)]
fn preferred(half: u32) -> usize {
    (half >> 20) as usize % LINE_SLOTS
}

/// A free slot for an object: the preferred one if it is free in its home, else the first one from there on.
fn free_slot(block: &Block<Line>, half: u32) -> Option<(usize, usize)> {
    (0..LINES).find_map(|step| {
        let line = (home(half) + step) % LINES;
        let free = block[line].which(|slot| slot == NIL);
        let preferred = preferred(half);
        match free >> preferred & 1 {
            1 => Some((line, preferred)),
            _ => ones(free).next().map(|at| (line, at)),
        }
    })
}

/// Distance from line `from` to `line`, wrapping around.
fn behind(from: usize, line: usize) -> usize {
    (line + LINES - from) % LINES
}

/// Number of groups of blocks, of which every one has two to four when the table has `blocks`: blocks that are so far apart.
#[inline(always)]
fn groups(blocks: usize) -> usize {
    1 << (blocks | 2).ilog2() >> 1
}

/// The block in which an object is or would be, of `blocks`.
#[inline(always)]
fn block_of(half: u32, blocks: usize) -> usize {
    let groups = groups(blocks);
    let bits = half as usize / LINES;
    let group = bits & (groups - 1);
    let members = (blocks - group).div_ceil(groups);
    group + bits / groups % members * groups
}

/// An object with several pages in the store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Object {
    object: u64,
    pool: u32,
    /// Root of the tree of its pages.
    pub(crate) root: Link,
    pub(crate) pages: u32,
    /// Lower half of its hash; of a free record, the next free one.
    half: u32,
}

const _: () = assert!(size_of::<Object>() == 24);

impl Object {
    #[inline(always)]
    fn key(&self) -> Key {
        Key {
            pool: self.pool,
            object: self.object,
        }
    }
}

impl Slot for Object {
    const EMPTY: Self = Self {
        object: 0,
        pool: NIL,
        root: Link::EMPTY,
        pages: 0,
        half: NIL,
    };

    fn next_free(&self) -> u32 {
        self.half
    }

    fn set_free(&mut self, next: u32) {
        // Of no pool, so that it matches no object.
        *self = Self {
            half: next,
            ..Self::EMPTY
        };
    }
}

/// The objects of a shard.
pub(crate) struct Table<H> {
    hasher: H,
    objects: u32,
    records: Arena<Object>,
    blocks: Vec<Block<Line>>,
}

impl<H: Hasher> Table<H> {
    /// Returns a table without a frame.
    pub(crate) fn new(hasher: H) -> Self {
        Self {
            hasher,
            objects: 0,
            records: Arena::new(),
            blocks: Vec::new(),
        }
    }

    /// Whether a reference that was valid at some time is to this object now.
    #[inline(always)]
    pub(crate) fn is(&self, object: ObjectRef, key: Key, pages: &Arena<Descriptor>) -> bool {
        match object.to() {
            Target::Page(id) => {
                let page = pages.get(id);
                page.is_some_and(|page| page.owner() == Owner::Sole(key))
            }
            Target::Record(id) => self.is_record(id, key),
        }
    }

    #[inline(always)]
    fn is_record(&self, id: u32, key: Key) -> bool {
        let record = self.records.get(id);
        record.is_some_and(|record| record.key() == key)
    }

    /// Whether a page, which may be free, is one of this object.
    #[inline(always)]
    pub(crate) fn has(&self, page: &Descriptor, key: Key) -> bool {
        match page.owner() {
            Owner::Sole(sole) => sole == key,
            Owner::Record(id) => self.is_record(id, key),
        }
    }

    /// The object of a page.
    pub(crate) fn key_of(&self, page: &Descriptor) -> Key {
        match page.owner() {
            Owner::Sole(key) => key,
            Owner::Record(id) => self.records[id].key(),
        }
    }

    /// The tree of an object's pages.
    #[inline(always)]
    pub(crate) fn root(&self, object: ObjectRef) -> Link {
        match object.to() {
            Target::Page(id) => Link::page(id),
            Target::Record(id) => self.records[id].root,
        }
    }

    fn half_of(&self, object: ObjectRef, pages: &Arena<Descriptor>) -> u32 {
        match object.to() {
            Target::Page(id) => half(self.hasher.hash(self.key_of(&pages[id]))),
            Target::Record(id) => self.records[id].half,
        }
    }

    /// Number of frames it holds.
    pub(crate) fn frames(&self) -> usize {
        self.records.frames() + self.blocks.len()
    }

    /// Number of frames it would hold without fragmentation.
    pub(crate) fn frames_needed(&self) -> usize {
        self.records.frames_needed() + self.blocks.len()
    }

    /// Releases all frames; all objects are gone.
    pub(crate) fn clear(&mut self, frames: &mut impl Frames) {
        self.objects = 0;
        self.records.clear(frames);
        for block in self.blocks.drain(..) {
            frames.give(block.into_frame());
        }
    }

    /// Bytes it takes outside its frames.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.records.heap_bytes() + self.blocks.capacity() * size_of::<Block<Line>>()
    }

    #[inline(always)]
    fn block(&self, half: u32) -> usize {
        block_of(half, self.blocks.len())
    }

    /// Finds an object by its hash.
    #[inline(always)]
    pub(crate) fn find(&self, hash: u64, key: Key, pages: &Arena<Descriptor>) -> ObjectRef {
        if self.blocks.is_empty() {
            return ObjectRef::NONE;
        }
        let half = half(hash);
        let block = &self.blocks[self.block(half)];
        let is_it = |slot: u32| {
            // A free slot matches a tag of ones.
            slot != NIL && self.is(ObjectRef::of_slot(slot), key, pages)
        };
        let has_tag = |slot: u32| slot >> REF_BITS == half >> REF_BITS;
        let slot = block[home(half)].0[preferred(half)];
        if has_tag(slot) && is_it(slot) {
            return ObjectRef::of_slot(slot);
        }
        for step in 0..LINES {
            let line = &block[(home(half) + step) % LINES];
            for at in ones(line.which(has_tag)) {
                if is_it(line.0[at]) {
                    return ObjectRef::of_slot(line.0[at]);
                }
            }
            if !line.is_full() {
                break;
            }
        }
        ObjectRef::NONE
    }

    /// Inserts an object that is not there, whose hash this is, with its only page.
    ///
    /// # Errors
    ///
    /// [`NoFrame`] if there is none of the two frames it may need, if there are too many objects, or if so many hashes
    /// are alike that their block is full. The objects are as they were.
    pub(crate) fn insert(
        &mut self,
        hash: u64,
        id: u32,
        pages: &mut Arena<Descriptor>,
        frames: &mut impl Frames,
    ) -> Result<(), NoFrame> {
        if id >= IDS {
            self.ensure_record(frames)?;
        }
        if self.objects as usize >= self.blocks.len() * SPLIT_ABOVE {
            self.split(pages, frames)?;
        }
        let half = half(hash);
        let block = self.block(half);
        let (line, at) = free_slot(&self.blocks[block], half).ok_or(NoFrame)?;
        let object = if id < IDS {
            ObjectRef::page(id)
        } else {
            self.insert_record(half, id, pages)
        };
        self.objects += 1;
        self.blocks[block][line].0[at] = slot_of(half, object);
        Ok(())
    }

    fn ensure_record(&mut self, frames: &mut impl Frames) -> Result<(), NoFrame> {
        if self.records.live() == IDS {
            return Err(NoFrame);
        }
        self.records.ensure(1, frames)
    }

    /// Makes a record of an object's only page.
    fn insert_record(&mut self, half: u32, id: u32, pages: &mut Arena<Descriptor>) -> ObjectRef {
        let Key { pool, object } = self.key_of(&pages[id]);
        let record = self.records.insert(Object {
            object,
            pool,
            root: Link::page(id),
            pages: 1,
            half,
        });
        pages[id].set_owner(Owner::Record(record));
        ObjectRef::record(record)
    }

    /// Adds a page, so far the only one of its object, to the pages that its object has already. On failure nothing is changed.
    ///
    /// # Errors
    ///
    /// [`NoFrame`].
    #[inline(always)]
    pub(crate) fn add_page(
        &mut self,
        tree: &mut Tree,
        descriptors: &mut Arena<Descriptor>,
        (hash, object): (u64, ObjectRef),
        id: u32,
        frames: &mut impl Frames,
    ) -> Result<(), NoFrame> {
        let Some(object) = object.some() else {
            return self.insert(hash, id, descriptors, frames);
        };
        let record = self.expand(object, descriptors, frames)?;
        let Object { root, pages, .. } = &mut self[record];
        let inserted = tree.insert(root, descriptors[id].index, id, descriptors, frames);
        if inserted.is_ok() {
            *pages += 1;
            descriptors[id].set_owner(Owner::Record(record));
        } else if *pages == 1 {
            self.contract(record, descriptors);
        }
        inserted
    }

    /// Gives an object that has one page a record, so that it can have more; returns that record's number.
    ///
    /// # Errors
    ///
    /// [`NoFrame`] if there is none of the frame it may need, or if there are too many records.
    pub(crate) fn expand(
        &mut self,
        object: ObjectRef,
        pages: &mut Arena<Descriptor>,
        frames: &mut impl Frames,
    ) -> Result<u32, NoFrame> {
        let id = match object.to() {
            Target::Record(record) => return Ok(record),
            Target::Page(id) => id,
        };
        self.ensure_record(frames)?;
        let half = self.half_of(object, pages);
        let (block, line, at) = self.position(half, object);
        let record = self.insert_record(half, id, pages);
        self.blocks[block][line].0[at] = slot_of(half, record);
        Ok(record.0)
    }

    /// Frees the record of an object that has one page left.
    pub(crate) fn contract(&mut self, record: u32, pages: &mut Arena<Descriptor>) {
        let Object { root, half, .. } = self.records[record];
        let Some(id) = root.only_page().filter(|&id| id < IDS) else {
            return;
        };
        let (block, line, at) = self.position(half, ObjectRef::record(record));
        self.blocks[block][line].0[at] = slot_of(half, ObjectRef::page(id));
        pages[id].set_owner(Owner::Sole(self.records[record].key()));
        self.records.remove(record);
    }

    /// Removes an object that has no pages, or whose only page is about to be freed.
    pub(crate) fn remove(
        &mut self,
        object: ObjectRef,
        pages: &Arena<Descriptor>,
        frames: &mut impl Frames,
    ) {
        self.take_out(self.half_of(object, pages), object, pages);
        if let Target::Record(id) = object.to() {
            assert!(self.records[id].root.is_empty(), "object {id} has pages");
            self.records.remove(id);
        }
        self.objects -= 1;
        if (self.objects as usize) < (self.blocks.len() - 1) * JOIN_BELOW {
            self.join(pages, frames);
        }
    }

    /// Block, line and place in it of an object's slot.
    fn position(&self, half: u32, object: ObjectRef) -> (usize, usize, usize) {
        let number = self.block(half);
        let block = &self.blocks[number];
        let slot = slot_of(half, object);
        (0..LINES)
            .map(|step| (home(half) + step) % LINES)
            .find_map(|line| {
                let at = ones(block[line].which(|other| other == slot)).next()?;
                Some((number, line, at))
            })
            .expect("an object has a slot")
    }

    /// Empties an object's slot, and moves others back so that none remains after a line that is not full.
    fn take_out(&mut self, half: u32, object: ObjectRef, pages: &Arena<Descriptor>) {
        let (number, start, mut at) = self.position(half, object);
        let mut hole = start;
        let mut was_full = self.blocks[number][hole].is_full();
        self.blocks[number][hole].0[at] = NIL;
        for step in 1..LINES {
            // An object is after a line only because that line was full.
            if !was_full {
                break;
            }
            let line = (start + step) % LINES;
            let slots = self.blocks[number][line];
            was_full = slots.is_full();
            let back = ones(slots.which(|slot| slot != NIL)).find(|&from| {
                let home = home(self.half_of(ObjectRef::of_slot(slots.0[from]), pages));
                behind(home, line) >= behind(hole, line)
            });
            if let Some(from) = back {
                self.blocks[number][hole].0[at] = slots.0[from];
                self.blocks[number][line].0[from] = NIL;
                (hole, at) = (line, from);
            }
        }
    }

    /// Adds a block, and moves to it the objects of its group that belong to it. Where hashes are so alike that a block would
    /// overflow, it is not added.
    fn split(
        &mut self,
        pages: &Arena<Descriptor>,
        frames: &mut impl Frames,
    ) -> Result<(), NoFrame> {
        let frame = frames.take().ok_or(NoFrame)?;
        let new = self.blocks.len();
        self.blocks
            .push(Block::new(frames.slab(), frame, Line::EMPTY));
        if !self.distribute(new, new + 1, BLOCK_SLOTS, pages) {
            self.drop_last(frames);
        }
        Ok(())
    }

    /// Moves the objects of the last block to the others of its group, if these have room, and releases its frame.
    fn join(&mut self, pages: &Arena<Descriptor>, frames: &mut impl Frames) {
        let last = self.blocks.len() - 1;
        if self.distribute(last, last, JOINED_MAX, pages) {
            self.drop_last(frames);
        }
    }

    fn drop_last(&mut self, frames: &mut impl Frames) {
        if let Some(block) = self.blocks.pop() {
            frames.give(block.into_frame());
        }
    }

    /// Moves the objects of the last block's group to where they are in a table of `blocks`, unless one would then have more than
    /// `objects_max`. Returns whether it did.
    fn distribute(
        &mut self,
        last: usize,
        blocks: usize,
        objects_max: usize,
        pages: &Arena<Descriptor>,
    ) -> bool {
        let groups = groups(last);
        let members = || (last % groups..=last).step_by(groups);
        let lines = members().flat_map(|block| (0..LINES).map(move |line| (block, line)));
        let slots = lines.flat_map(|(block, line)| self.blocks[block][line].0);
        let objects: Vec<(usize, u32, u32)> = slots
            .filter(|&slot| slot != NIL)
            .map(|slot| {
                let half = self.half_of(ObjectRef::of_slot(slot), pages);
                (block_of(half, blocks), half, slot)
            })
            .collect();
        let count = |member| {
            objects
                .iter()
                .filter(|(block, ..)| *block == member)
                .count()
        };
        if members().any(|member| count(member) > objects_max) {
            return false;
        }
        for block in members() {
            for line in 0..LINES {
                self.blocks[block][line] = Line::EMPTY;
            }
        }
        for (block, half, slot) in objects {
            let block = &mut self.blocks[block];
            let (line, at) = free_slot(block, half).expect("no more objects than slots");
            block[line].0[at] = slot;
        }
        true
    }

    /// Moves everything in frames from `top` on elsewhere. If frames run out, the blocks already moved stay moved.
    pub(crate) fn relocate(
        &mut self,
        top: u32,
        mut take: impl FnMut() -> Option<u32>,
    ) -> Result<(), NoFrame> {
        self.records.relocate(top, &mut take)?;
        for block in self.blocks.iter_mut().filter(|block| block.frame() >= top) {
            block.relocate(take().ok_or(NoFrame)?);
        }
        Ok(())
    }
}

impl<H> Index<u32> for Table<H> {
    type Output = Object;

    #[inline(always)]
    fn index(&self, id: u32) -> &Object {
        &self.records[id]
    }
}

impl<H> IndexMut<u32> for Table<H> {
    #[inline(always)]
    fn index_mut(&mut self, id: u32) -> &mut Object {
        &mut self.records[id]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::descriptor::Place;
    use crate::radix::testing::Budget;

    const POOLS: u32 = 3;

    /// A table, its pages, and its expected contents: the pages of each object, by index.
    struct Fixture {
        frames: Budget,
        table: Table<Hashes>,
        tree: Tree,
        pages: Arena<Descriptor>,
        twin: BTreeMap<Key, BTreeMap<u32, u32>>,
    }

    /// Which bits of a hash vary, and which are ones. If few vary, objects collide.
    #[derive(Debug, Clone, Copy)]
    struct Hashes {
        varied: u64,
        ones: u64,
    }

    impl Hasher for Hashes {
        fn hash(&self, Key { pool, object }: Key) -> u64 {
            let hash = (object ^ u64::from(pool) << 60).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash.rotate_left(32) & self.varied | self.ones
        }
    }

    fn key(pool: u32, object: u64) -> Key {
        Key { pool, object }
    }

    impl Fixture {
        fn new(hashes: Hashes) -> Self {
            Self {
                frames: Budget::new(1024),
                table: Table::new(hashes),
                tree: Tree::new(),
                pages: Arena::new(),
                twin: BTreeMap::new(),
            }
        }

        fn find(&self, key: Key) -> ObjectRef {
            self.table
                .find(self.table.hasher.hash(key), key, &self.pages)
        }

        /// Inserts a page, with an index of its own.
        fn insert(&mut self, key: Key) -> Result<(), NoFrame> {
            self.pages.ensure(1, &mut self.frames)?;
            let index = self
                .twin
                .get(&key)
                .and_then(|pages| pages.keys().last().map(|last| last + 1));
            let page = Descriptor::new(Owner::Sole(key), index.unwrap_or(0), Place::Word(0), 0);
            let id = self.pages.insert(page);
            let object = (self.table.hasher.hash(key), self.find(key));
            let Self {
                frames,
                table,
                tree,
                pages,
                ..
            } = self;
            if let Err(error) = table.add_page(tree, pages, object, id, frames) {
                self.pages.remove(id);
                return Err(error);
            }
            self.twin
                .entry(key)
                .or_default()
                .insert(index.unwrap_or(0), id);
            Ok(())
        }

        /// Removes the first page of an object.
        fn remove(&mut self, key: Key) {
            let object = self.find(key);
            let pages = self.twin.get_mut(&key).unwrap();
            let (index, id) = pages.pop_first().unwrap();
            let left = pages.len();
            if left == 0 {
                self.twin.remove(&key);
            }
            if let Target::Record(record) = object.to() {
                let root = &mut self.table[record].root;
                assert_eq!(self.tree.remove(root, index, &self.pages), id);
                self.table[record].pages -= 1;
            }
            match (object.to(), left) {
                (_, 0) => self.table.remove(object, &self.pages, &mut self.frames),
                (Target::Record(record), 1) => self.table.contract(record, &mut self.pages),
                _ => {}
            }
            self.pages.remove(id);
        }

        /// Whether the block an object would be in is full.
        fn is_full(&self, key: Key) -> bool {
            let half = half(self.table.hasher.hash(key));
            let block = &self.table.blocks[self.table.block(half)];
            (0..LINES).all(|line| block[line].is_full())
        }

        fn check(&self) {
            let mut records = 0;
            for (&key, pages) in &self.twin {
                let object = self.find(key);
                assert!(self.table.is(object, key, &self.pages));
                records += u32::from(matches!(object.to(), Target::Record(_)));
                assert_eq!(matches!(object.to(), Target::Page(_)), pages.len() == 1);
                let root = self.table.root(object);
                for (&index, &id) in pages {
                    assert_eq!(self.tree.find(root, index, &self.pages), id);
                    assert!(self.table.has(&self.pages[id], key));
                    assert_eq!(self.table.key_of(&self.pages[id]), key);
                }
            }
            assert_eq!(self.table.objects as usize, self.twin.len());
            assert_eq!(self.table.records.live(), records);
        }
    }

    #[derive(Debug, Clone)]
    enum Op {
        Insert(u32, u64),
        Remove(prop::sample::Index),
        Miss(u32, u64),
        /// Number of frames available from now on.
        Frames(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        let key = || (0..POOLS, prop_oneof![0_u64..400, any::<u64>()]);
        prop_oneof![
            8 => key().prop_map(|(pool, object)| Op::Insert(pool, object)),
            3 => any::<prop::sample::Index>().prop_map(Op::Remove),
            1 => key().prop_map(|(pool, object)| Op::Miss(pool, object)),
            1 => prop_oneof![Just(0), 0_u32..4, Just(400)].prop_map(Op::Frames),
        ]
    }

    const SPREAD: Hashes = Hashes {
        varied: u64::MAX,
        ones: 0,
    };

    /// Hashes that spread, that share a tag, that share a block, and whose homes are the last lines, so that
    /// searches wrap around to the first.
    fn hashes() -> impl Strategy<Value = Hashes> {
        let few = |varied, ones| Just(Hashes { varied, ones });
        prop_oneof![
            Just(SPREAD),
            few(0xffff, 0),
            few(0xff00_003f, 0),
            few(0xff00_ffc3, 0x3c)
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_a_sorted_map(
            hashes in hashes(),
            at_first in 0_u64..1200,
            ops in prop::collection::vec(op(), 1..400),
        ) {
            let mut fixture = Fixture::new(hashes);
            let _ = (1000..1000 + at_first).try_for_each(|object| fixture.insert(key(0, object)));
            fixture.check();
            for op in ops {
                match op {
                    Op::Miss(pool, object) => {
                        let found = fixture.find(key(pool, object)) != ObjectRef::NONE;
                        prop_assert_eq!(found, fixture.twin.contains_key(&key(pool, object)));
                    }
                    Op::Insert(pool, object) => {
                        let key = key(pool, object);
                        let left = fixture.frames.left;
                        let before = fixture.twin.get(&key).map_or(0, BTreeMap::len);
                        if fixture.insert(key) == Err(NoFrame) {
                            prop_assert!(left < 3 || before == 0 && fixture.is_full(key));
                            prop_assert_eq!(fixture.find(key) == ObjectRef::NONE, before == 0);
                        }
                    }
                    Op::Remove(_) if fixture.twin.is_empty() => {}
                    Op::Remove(at) => {
                        let key = *fixture.twin.keys().nth(at.index(fixture.twin.len())).unwrap();
                        fixture.remove(key);
                        let found = fixture.find(key) != ObjectRef::NONE;
                        prop_assert_eq!(found, fixture.twin.contains_key(&key));
                    }
                    Op::Frames(left) => fixture.frames.left = left,
                }
            }
            fixture.check();
            while let Some(&key) = fixture.twin.keys().next() {
                fixture.remove(key);
                if fixture.twin.len().is_multiple_of(64) {
                    fixture.check();
                }
            }
        }
    }

    #[test]
    fn memory_follows_the_number_of_objects() {
        const OBJECTS: u64 = 50_000;
        let mut fixture = Fixture::new(SPREAD);
        for object in 0..OBJECTS {
            fixture.insert(key(0, object)).unwrap();
        }
        fixture.check();
        let blocks = usize::try_from(OBJECTS).unwrap().div_ceil(SPLIT_ABOVE);
        assert_eq!(fixture.table.blocks.len(), blocks);
        assert_eq!(fixture.table.frames(), blocks);
        for object in 0..1700 {
            fixture.insert(key(0, object)).unwrap();
        }
        fixture.check();
        assert_eq!(fixture.table.frames(), blocks + 10);
        for object in (0..1700).chain(0..OBJECTS) {
            fixture.remove(key(0, object));
            if object % 5_000 == 0 {
                fixture.check();
            }
        }
        assert_eq!(fixture.table.frames_needed(), 1);
    }

    #[test]
    fn a_block_of_hashes_that_are_all_alike_refuses_one_more() {
        let mut fixture = Fixture::new(Hashes { varied: 0, ones: 7 });
        for object in 0..BLOCK_SLOTS as u64 {
            fixture.insert(key(1, object)).unwrap();
        }
        assert_eq!(fixture.insert(key(1, u64::MAX)), Err(NoFrame));
        assert_eq!(fixture.find(key(1, u64::MAX)), ObjectRef::NONE);
        fixture.insert(key(1, 1)).unwrap();
        fixture.check();
        fixture.remove(key(1, 0));
        fixture.insert(key(1, u64::MAX)).unwrap();
        fixture.check();
    }

    /// Hashes that are the numbers of objects.
    #[derive(Clone, Copy)]
    struct Plain;

    impl Hasher for Plain {
        fn hash(&self, key: Key) -> u64 {
            key.object
        }
    }

    #[test]
    fn blocks_that_would_not_fit_one_are_not_joined() {
        let mut frames = Budget::new(256);
        let mut pages = Arena::new();
        let mut table = Table::new(Plain);
        let mut insert = |object: u64| {
            pages.ensure(1, &mut frames).unwrap();
            let page = Descriptor::new(Owner::Sole(key(0, object)), 0, Place::Word(0), 0);
            let id = pages.insert(page);
            table.insert(object, id, &mut pages, &mut frames).unwrap();
            (object, ObjectRef::page(id))
        };
        let spread: Vec<_> = (1..=9300)
            .map(|object| insert(SPREAD.hash(key(0, object))))
            .collect();
        // Blocks 0, 8 and 16 are a group.
        let home = |block: u64| {
            move |number: u64| (number << 32) + block * LINES as u64 + number % LINES as u64
        };
        let crowd: Vec<_> = (0..500)
            .map(home(0))
            .chain((0..500).map(home(16)))
            .map(insert)
            .collect();
        for (_, object) in spread {
            table.remove(object, &pages, &mut frames);
        }
        assert_eq!(table.blocks.len(), 17);
        for (hash, object) in &crowd {
            assert_eq!(table.find(*hash, key(0, *hash), &pages), *object);
        }
        for (_, object) in crowd {
            table.remove(object, &pages, &mut frames);
        }
        assert_eq!(table.blocks.len(), 1);
    }
}
