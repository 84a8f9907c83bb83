//! Evictions, and compression of pages that become cold.

use super::{COLD, DESCRIPTION_BYTES, EvictionGain, Goal, RAW_BYTES, Shard, pool_in, slot, some};

use crate::PoolId;
use crate::account::Ages;
use crate::arena::Frames;
use crate::contents::EntryId;
use crate::descriptor::{Owner, Place};
use crate::eviction::{Queue, Verdict};
use crate::sync::Ordering;

/// Minimum number of pages that are dropped, compressed or kept under one lock before it is released without success.
const STEPS: usize = 256;

/// In the place of uses of a cold page: it is remembered when it leaves.
const REMEMBERED: u8 = 1;

/// The result of one step of an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// A page was dropped or compressed.
    Gone,
    /// A page was used and stays.
    Kept,
    /// There is no page that is old enough.
    Nothing,
}

impl Shard {
    /// Frees `count` frames (or drops as many pages) of a pool, as long as the stamp of the next page to leave compares as
    /// `until` or before.
    pub(crate) fn evict(
        &mut self,
        pool: PoolId,
        (until, ages): (u64, Ages),
        count: usize,
        goal: Goal,
    ) -> EvictionGain {
        let slot = slot(pool);
        if self.any_pool(pool).is_none() {
            return EvictionGain::default();
        }
        let before = self.magazine.balance;
        let mut won = EvictionGain::default();
        // A page that shares its content, has none stored, or does not shrink frees no frame, and some are kept.
        for _ in 0..count.saturating_mul(8).max(STEPS) {
            let enough = match goal {
                Goal::Memory => won.frames,
                Goal::Pages => won.pages,
            };
            if enough >= count as u64 {
                break;
            }
            match self.evict_one(slot, (until, ages), goal) {
                Step::Gone => won.pages += 1,
                Step::Kept => won.kept += 1,
                Step::Nothing => break,
            }
            won.frames = (self.magazine.balance - before).max(0).cast_unsigned();
        }
        self.magazine.spill();
        self.publish(slot);
        won
    }

    /// Drops, compresses or keeps the next page.
    fn evict_one(&mut self, slot: usize, (until, ages): (u64, Ages), goal: Goal) -> Step {
        let Self {
            pools,
            descriptors,
            common,
            ..
        } = self;
        let pool = pool_in(pools, slot);
        let cold = pool.oldest_cold();
        let cold_is_small = pool.cold_bytes.cast_signed() * 2 <= pool.charged_bytes;
        let cools = common.compression && goal == Goal::Memory && (cold_is_small || cold.is_none());
        let judged = if cools || cold.is_none() {
            pool.next_judged()
        } else {
            None
        };
        let Some((queue, id)) = judged else {
            return cold.map_or(Step::Nothing, |id| self.drop_cold(slot, id, until));
        };
        let stamp = ages.comparable(descriptors[id].stamp(), queue == Queue::Second);
        if !cools && stamp > until {
            return Step::Nothing;
        }
        match pool.policy.judge(queue, descriptors[id].uses()) {
            Verdict::Kept { queue, uses } => {
                self.move_page(slot, id, queue, uses);
                Step::Kept
            }
            Verdict::Evicted { remembered } if cools => {
                if self.cool(slot, id, remembered) {
                    return Step::Gone;
                }
                let cold = pool_in(&mut self.pools, slot).oldest_cold();
                cold.map_or(Step::Nothing, |id| self.drop_cold(slot, id, until))
            }
            Verdict::Evicted { remembered } => {
                self.drop_page(slot, id, remembered);
                Step::Gone
            }
        }
    }

    /// Drops the oldest cold page, if it is that old.
    fn drop_cold(&mut self, slot: usize, id: u32, until: u64) -> Step {
        let page = &self.descriptors[id];
        if page.stamp() > until {
            return Step::Nothing;
        }
        self.drop_page(slot, id, page.uses() == REMEMBERED);
        Step::Gone
    }

    fn drop_page(&mut self, slot: usize, id: u32, remembered: bool) {
        let Self {
            pools,
            descriptors,
            tree,
            table,
            common,
            ..
        } = self;
        let page = &descriptors[id];
        // Prefetches the path through the tree of the next page.
        if let Some(next) = some(page.newer()) {
            let next = &descriptors[next];
            if let Owner::Record(record) = next.owner() {
                tree.prefetch(table[record].root, next.index);
            }
            descriptors.prefetch(next.newer());
        }
        let hash = remembered
            .then(|| common.page_hash(common.object_hash(table.key_of(page)), page.index));
        let pool = pool_in(pools, slot);
        pool.others.evicted_pages += 1;
        pool.ghosts.set_size(pool.pages());
        self.remove_page(slot, id);
        if let Some(hash) = hash {
            self.remember(slot, hash);
        }
    }

    /// Moves a page to the tail of the cold list, compressed if that saves memory. Returns whether it did.
    fn cool(&mut self, slot: usize, id: u32, remembered: bool) -> bool {
        self.unlink(slot, id);
        if let Place::Shared(entry) = self.descriptors[id].place()
            && let Some(frame) = self
                .common
                .contents
                .take_only(EntryId(entry), self.common.top.load(Ordering::SeqCst))
        {
            self.descriptors[id].set_place(Place::Frame(frame));
            self.pool(slot).frameless -= 1;
        }
        if let Place::Frame(frame) = self.descriptors[id].place()
            && !self.descriptors[id].is_incompressible()
        {
            self.compress(slot, id, frame);
        }
        let cold_bytes = self.content_bytes(self.descriptors[id].place()) + DESCRIPTION_BYTES;
        let pool = pool_in(&mut self.pools, slot);
        pool.cold_bytes += cold_bytes;
        if !self.common.eviction.is_stack {
            // Two queues have no order in common. With new stamps, cold pages stay equally long in all shards.
            let stamp = self.next_stamp();
            self.descriptors[id].set_stamp(stamp);
        }
        let page = &mut self.descriptors[id];
        page.set_uses(if remembered { REMEMBERED } else { 0 });
        let is_packed = matches!(page.place(), Place::Packed(_));
        self.append(slot, id, COLD);
        is_packed
    }

    fn compress(&mut self, slot: usize, id: u32, frame: u32) {
        let Self {
            common,
            packed,
            compressor,
            magazine,
            ..
        } = self;
        let Some(compressor) = compressor else { return };
        let Some(bytes) = common.slab.read(frame, |page| compressor.compress(page)) else {
            self.descriptors[id].set_incompressible(true);
            self.pool(slot).others.incompressible_pages += 1;
            return;
        };
        let saved = RAW_BYTES - (bytes.len() as u64).cast_signed();
        // If no packed frame has room, the page's own frame becomes one: the compressed bytes are in a buffer.
        let mut becomes_packed = false;
        let own_frame = || {
            becomes_packed = true;
            Some(frame)
        };
        let place = packed.insert(&common.slab, bytes, own_frame);
        let place = place.expect("it was offered a frame");
        if !becomes_packed {
            magazine.give(frame);
        }
        self.descriptors[id].set_place(Place::Packed(place.0));
        let pool = self.pool(slot);
        pool.packed += 1;
        pool.others.compressed_pages += 1;
        pool.charge(-saved);
    }
}
