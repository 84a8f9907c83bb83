//! The objects of a shard: a hash of pools and objects to records.
//!
//! A slot is a record's number with an eight-bit tag of its hash; 16 slots are a line of 64 bytes, and 64 lines a
//! block of one frame. An object is in the first line, from its home line on, that had a free slot; the last line of
//! a block is followed by its first. So a line that is not full ends a search, and a miss reads one line and rarely
//! a record: one of 256 slots has the same tag. A removal moves an object back from the following lines, so there are
//! no tombstones and searches stay short. A record stores the part of its hash that determines
//! its position: nothing is hashed twice.
//!
//! The table grows and shrinks by one block at a time, each in its turn split in two or joined again (linear
//! hashing), so it never needs more than a frame at once, and no operation moves more than a block.
//!
//! Source: the hash of objects of \[M08\]; linear hashing (Litwin, 1980); a line as a bucket that overflows into the
//! next, and removal (Knuth, The Art of Computer Programming 3, 6.4, algorithm R).
//! Cost: 10.7 bytes an object in slots, 24 in its record.
//! Not here: the hash function, which must be keyed where clients could choose objects whose hashes collide;
//! an object's pages (`radix`).

use std::ops::{Index, IndexMut};

use crate::arena::{Arena, Frames, NIL, NoFrame, Slot};
use crate::radix::Link;
use crate::sys::Block;

/// Bits of a slot that hold a record's number; the others are its tag.
const ID_BITS: u32 = 24;

/// Maximum number of objects of a shard; one more, under a tag of ones, would be `NIL`.
const MOST_OBJECTS: u32 = (1 << ID_BITS) - 1;

const LINE_SLOTS: usize = 16;

/// Lines of a block.
const LINES: usize = Block::<Line>::ITEMS;

const BLOCK_SLOTS: usize = LINES * LINE_SLOTS;

/// Mean number of objects a block above which one is split: 3/8. A block not yet split has up to twice as many.
const SPLIT_ABOVE: usize = BLOCK_SLOTS / 8 * 3;

/// Mean number of objects a block below which two are joined.
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

    fn slots(&self) -> impl Iterator<Item = u32> {
        self.0.into_iter().filter(|slot| *slot != NIL)
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
fn slot_of(half: u32, id: u32) -> u32 {
    half >> ID_BITS << ID_BITS | id
}

#[inline(always)]
fn id_of(slot: u32) -> u32 {
    slot % (1 << ID_BITS)
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

/// The block that `block` was split from.
fn parent(block: usize) -> usize {
    block ^ 1 << block.ilog2()
}

/// An object with pages in the store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Object {
    /// Number that the client assigned to it.
    pub(crate) object: u64,
    pub(crate) pool: u32,
    /// Root of the tree of its pages.
    pub(crate) root: Link,
    pub(crate) pages: u32,
    /// Lower half of its hash; of a free record, the next free one.
    half: u32,
}

const _: () = assert!(size_of::<Object>() == 24);

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
pub(crate) struct Table {
    records: Arena<Object>,
    blocks: Vec<Block<Line>>,
}

impl Table {
    /// Returns a table without a frame.
    pub(crate) fn new() -> Self {
        Self {
            records: Arena::new(),
            blocks: Vec::new(),
        }
    }

    /// Whether a number that was valid at some time is this object's now.
    #[inline(always)]
    pub(crate) fn is(&self, id: u32, pool: u32, object: u64) -> bool {
        let record = self.records.get(id);
        record.is_some_and(|record| record.object == object && record.pool == pool)
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
        self.records.clear(frames);
        for block in self.blocks.drain(..) {
            frames.give(block.into_frame());
        }
    }

    /// Bytes it takes outside its frames.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.records.heap_bytes() + self.blocks.capacity() * size_of::<Block<Line>>()
    }

    /// The block in which an object is or would be.
    #[inline(always)]
    fn block(&self, half: u32) -> usize {
        let mask = self.blocks.len().next_power_of_two() - 1;
        let block = (half as usize / LINES) & mask;
        // The objects of a block that does not exist yet are in its parent.
        if block < self.blocks.len() {
            block
        } else {
            block & mask >> 1
        }
    }

    /// Finds an object, or returns `NIL`. The lower 32 bits of `hash`, which must be the same at each call, are used.
    #[inline(always)]
    pub(crate) fn find(&self, hash: u64, pool: u32, object: u64) -> u32 {
        if self.blocks.is_empty() {
            return NIL;
        }
        let half = half(hash);
        let block = &self.blocks[self.block(half)];
        let slot = block[home(half)].0[preferred(half)];
        if slot >> ID_BITS == half >> ID_BITS && self.is(id_of(slot), pool, object) {
            return id_of(slot);
        }
        for step in 0..LINES {
            let line = &block[(home(half) + step) % LINES];
            for at in ones(line.which(|slot| slot >> ID_BITS == half >> ID_BITS)) {
                let slot = line.0[at];
                // A free slot matches a tag of ones.
                if slot != NIL {
                    let record = &self.records[id_of(slot)];
                    if record.object == object && record.pool == pool {
                        return id_of(slot);
                    }
                }
            }
            if !line.is_full() {
                break;
            }
        }
        NIL
    }

    /// Inserts an object that is not there, without pages.
    ///
    /// # Errors
    ///
    /// [`NoFrame`] if there is none of the two frames it may need, if there are 2^24 - 1 objects, or if so many hashes
    /// are alike that their block is full. The objects are as they were.
    pub(crate) fn insert(
        &mut self,
        hash: u64,
        pool: u32,
        object: u64,
        frames: &mut impl Frames,
    ) -> Result<u32, NoFrame> {
        let live = self.records.live();
        if live == MOST_OBJECTS {
            return Err(NoFrame);
        }
        self.records.ensure(1, frames)?;
        if live as usize >= self.blocks.len() * SPLIT_ABOVE {
            self.split(frames)?;
        }
        let half = half(hash);
        let block = self.block(half);
        let (line, at) = free_slot(&self.blocks[block], half).ok_or(NoFrame)?;
        let id = self.records.insert(Object {
            object,
            pool,
            half,
            ..Object::EMPTY
        });
        self.blocks[block][line].0[at] = slot_of(half, id);
        Ok(id)
    }

    /// Removes an object that has no pages.
    pub(crate) fn remove(&mut self, id: u32, frames: &mut impl Frames) {
        let Object { root, half, .. } = self.records[id];
        assert!(root.is_empty(), "object {id} has pages");
        self.take_out(half, id);
        self.records.remove(id);
        if (self.records.live() as usize) < (self.blocks.len() - 1) * JOIN_BELOW {
            self.join(frames);
        }
    }

    /// Empties an object's slot, and moves others back so that none remains after a line that is not full.
    fn take_out(&mut self, half: u32, id: u32) {
        let number = self.block(half);
        let block = &mut self.blocks[number];
        let slot = slot_of(half, id);
        let (start, mut at) = (0..LINES)
            .map(|step| (home(half) + step) % LINES)
            .find_map(|line| Some((line, ones(block[line].which(|other| other == slot)).next()?)))
            .expect("an object has a slot");
        let mut hole = start;
        let mut was_full = block[hole].is_full();
        block[hole].0[at] = NIL;
        for step in 1..LINES {
            // An object is after a line only because that line was full.
            if !was_full {
                break;
            }
            let line = (start + step) % LINES;
            was_full = block[line].is_full();
            let back = ones(block[line].which(|slot| slot != NIL)).find(|&from| {
                let home = home(self.records[id_of(block[line].0[from])].half);
                behind(home, line) >= behind(hole, line)
            });
            if let Some(from) = back {
                block[hole].0[at] = block[line].0[from];
                block[line].0[from] = NIL;
                (hole, at) = (line, from);
            }
        }
    }

    /// Adds a block, and moves to it the objects of its parent that belong to it.
    fn split(&mut self, frames: &mut impl Frames) -> Result<(), NoFrame> {
        let frame = frames.take().ok_or(NoFrame)?;
        let new = self.blocks.len();
        self.blocks
            .push(Block::new(frames.slab(), frame, Line::EMPTY));
        if new > 0 {
            let old = &mut self.blocks[parent(new)];
            let lines: [Line; LINES] =
                std::array::from_fn(|line| std::mem::replace(&mut old[line], Line::EMPTY));
            lines
                .iter()
                .flat_map(Line::slots)
                .for_each(|slot| self.place(slot));
        }
        Ok(())
    }

    /// Moves the objects of the last block to its parent, if that has room, and releases its frame.
    fn join(&mut self, frames: &mut impl Frames) {
        let last = self.blocks.len() - 1;
        let count = |block: usize| -> usize {
            (0..LINES)
                .map(|line| self.blocks[block][line].slots().count())
                .sum()
        };
        if count(last) + count(parent(last)) > SPLIT_ABOVE * 2 {
            return;
        }
        if let Some(block) = self.blocks.pop() {
            for line in 0..LINES {
                block[line].slots().for_each(|slot| self.place(slot));
            }
            frames.give(block.into_frame());
        }
    }

    /// Inserts an object that was in another block; there is room.
    fn place(&mut self, slot: u32) {
        let half = self.records[id_of(slot)].half;
        let block = self.block(half);
        let block = &mut self.blocks[block];
        let (line, at) = free_slot(block, half).expect("two halves of a block fit a block");
        block[line].0[at] = slot;
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

impl Index<u32> for Table {
    type Output = Object;

    #[inline(always)]
    fn index(&self, id: u32) -> &Object {
        &self.records[id]
    }
}

impl IndexMut<u32> for Table {
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
    use crate::radix::testing::Budget;

    const POOLS: u32 = 3;

    /// A table, and its expected contents.
    struct Fixture {
        frames: Budget,
        table: Table,
        twin: BTreeMap<(u32, u64), u32>,
        hashes: Hashes,
    }

    /// Which bits of a hash vary, and which are ones. If few vary, objects collide.
    #[derive(Debug, Clone, Copy)]
    struct Hashes {
        varied: u64,
        ones: u64,
    }

    impl Hashes {
        fn of(self, pool: u32, object: u64) -> u64 {
            let hash = (object ^ u64::from(pool) << 60).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash.rotate_left(32) & self.varied | self.ones
        }
    }

    impl Fixture {
        fn new(hashes: Hashes) -> Self {
            Self {
                frames: Budget::new(512),
                table: Table::new(),
                twin: BTreeMap::new(),
                hashes,
            }
        }

        fn find(&self, pool: u32, object: u64) -> u32 {
            self.table.find(self.hashes.of(pool, object), pool, object)
        }

        fn insert(&mut self, pool: u32, object: u64) -> Result<(), NoFrame> {
            let hash = self.hashes.of(pool, object);
            let id = self.table.insert(hash, pool, object, &mut self.frames)?;
            assert_eq!(self.twin.insert((pool, object), id), None);
            Ok(())
        }

        fn remove(&mut self, pool: u32, object: u64) {
            let id = self.twin.remove(&(pool, object)).unwrap();
            self.table.remove(id, &mut self.frames);
        }

        /// Whether the block an object would be in is full.
        fn is_full(&self, pool: u32, object: u64) -> bool {
            let half = half(self.hashes.of(pool, object));
            let block = &self.table.blocks[self.table.block(half)];
            (0..LINES).all(|line| block[line].is_full())
        }

        fn check(&self) {
            for ((pool, object), id) in &self.twin {
                assert_eq!(self.find(*pool, *object), *id);
                assert_eq!(
                    (self.table[*id].pool, self.table[*id].object),
                    (*pool, *object)
                );
            }
            assert_eq!(self.table.records.live() as usize, self.twin.len());
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
            let _ = (1000..1000 + at_first).try_for_each(|object| fixture.insert(0, object));
            fixture.check();
            for op in ops {
                match op {
                    Op::Insert(pool, object) | Op::Miss(pool, object)
                        if fixture.twin.contains_key(&(pool, object)) =>
                    {
                        let id = fixture.twin[&(pool, object)];
                        prop_assert_eq!(fixture.find(pool, object), id);
                    }
                    Op::Miss(pool, object) => prop_assert_eq!(fixture.find(pool, object), NIL),
                    Op::Insert(pool, object) => {
                        let left = fixture.frames.left;
                        if fixture.insert(pool, object) == Err(NoFrame) {
                            prop_assert!(left < 2 || fixture.is_full(pool, object));
                            prop_assert_eq!(fixture.find(pool, object), NIL);
                        }
                    }
                    Op::Remove(_) if fixture.twin.is_empty() => {}
                    Op::Remove(at) => {
                        let (pool, object) = *fixture.twin.keys().nth(at.index(fixture.twin.len())).unwrap();
                        fixture.remove(pool, object);
                        prop_assert_eq!(fixture.find(pool, object), NIL);
                    }
                    Op::Frames(left) => fixture.frames.left = left,
                }
            }
            fixture.check();
            while let Some((pool, object)) = fixture.twin.keys().next().copied() {
                fixture.remove(pool, object);
                if fixture.twin.len().is_multiple_of(64) {
                    fixture.check();
                }
            }
        }
    }

    #[test]
    fn memory_follows_the_number_of_objects() {
        const OBJECTS: usize = 50_000;
        let mut fixture = Fixture::new(SPREAD);
        for object in 0..OBJECTS {
            fixture.insert(0, object as u64).unwrap();
        }
        fixture.check();
        assert_eq!(fixture.table.blocks.len(), OBJECTS.div_ceil(SPLIT_ABOVE));
        assert_eq!(fixture.table.records.frames(), OBJECTS.div_ceil(170));
        let left = fixture.frames.left;
        for object in 0..OBJECTS {
            fixture.remove(0, object as u64);
            if object % 5_000 == 0 {
                fixture.check();
            }
        }
        assert_eq!(fixture.table.blocks.len(), 1);
        assert_eq!(fixture.frames.left - left, 130);
    }

    #[test]
    fn a_block_of_hashes_that_are_all_alike_refuses_one_more() {
        let mut fixture = Fixture::new(Hashes { varied: 0, ones: 7 });
        for object in 0..BLOCK_SLOTS as u64 {
            fixture.insert(1, object).unwrap();
        }
        assert_eq!(fixture.insert(1, u64::MAX), Err(NoFrame));
        assert_eq!(fixture.find(1, u64::MAX), NIL);
        fixture.check();
        fixture.remove(1, 0);
        fixture.insert(1, u64::MAX).unwrap();
        fixture.check();
    }

    #[test]
    fn blocks_that_would_not_fit_one_are_not_joined() {
        let mut frames = Budget::new(128);
        let mut table = Table::new();
        let mut insert = |hash: u64| {
            let id = table.insert(hash, 0, hash, &mut frames).unwrap();
            (hash, id)
        };
        let spread: Vec<_> = (1..=6200)
            .map(|object| insert(SPREAD.of(0, object)))
            .collect();
        // Block 16 was split from block 0.
        let home = |block: u64| {
            move |number: u64| (number << 32) + block * LINES as u64 + number % LINES as u64
        };
        let crowd: Vec<_> = (0..600)
            .map(home(0))
            .chain((0..600).map(home(16)))
            .map(insert)
            .collect();
        for (_, id) in spread {
            table.remove(id, &mut frames);
        }
        assert_eq!(table.blocks.len(), 17);
        for (hash, id) in &crowd {
            assert_eq!(table.find(*hash, 0, *hash), *id);
        }
        for (_, id) in crowd {
            table.remove(id, &mut frames);
        }
        assert_eq!(table.blocks.len(), 1);
    }
}
