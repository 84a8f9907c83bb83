//! Evictions, and compression of pages that become cold.

use super::{DESCRIPTION_BYTES, EvictionGain, Goal, RAW_BYTES, Shard, pool_in, slot, some};

use crate::PoolId;
use crate::arena::Frames;
use crate::contents::EntryId;
use crate::descriptor::Place;
use crate::sync::Ordering;

impl Shard {
    /// Frees `count` frames (or drops as many pages) from a pool's pages last used at `until` or before, the
    /// oldest first.
    pub(crate) fn evict(
        &mut self,
        pool: PoolId,
        until: u64,
        count: usize,
        goal: Goal,
    ) -> EvictionGain {
        let slot = slot(pool);
        if self.any_pool(pool).is_none() {
            return EvictionGain::default();
        }
        let before = self.magazine.balance;
        let mut won = EvictionGain::default();
        // A page that shares its content, has none stored, or does not shrink frees no frame.
        for _ in 0..count.saturating_mul(8).max(256) {
            let enough = match goal {
                Goal::Memory => won.frames,
                Goal::Pages => won.pages,
            };
            if enough >= count as u64 || !self.evict_one(slot, until, goal) {
                break;
            }
            won.pages += 1;
            won.frames = (self.magazine.balance - before).max(0).cast_unsigned();
        }
        self.magazine.spill();
        self.publish(slot);
        won
    }

    /// Drops or compresses the oldest page that is not dirty, if it is that old. Returns whether it did.
    fn evict_one(&mut self, slot: usize, until: u64, goal: Goal) -> bool {
        let Self {
            pools,
            descriptors,
            common,
            ..
        } = self;
        let pool = pool_in(pools, slot);
        let oldest = pool.oldest_clean(descriptors);
        let stamp = |id: &u32| descriptors[*id].stamp();
        if common.compression && goal == Goal::Memory {
            let cold_is_small = pool.cold_bytes.cast_signed() * 2 <= pool.charged_bytes;
            // A page that was dirty when younger ones became cold is too late for a position among them.
            let newest_cold = some(pool.cold.newest()).map_or(0, |id| stamp(&id));
            let [cold, warm] = oldest;
            let in_order = warm.filter(|id| stamp(id) > newest_cold);
            if let Some(id) = in_order.filter(|_| cold_is_small || cold.is_none())
                && self.cool(slot, id)
            {
                return true;
            }
        }
        self.drop_oldest(slot, until)
    }

    /// Drops the oldest page that is not dirty, if it is that old. Returns whether it did.
    fn drop_oldest(&mut self, slot: usize, until: u64) -> bool {
        let Self {
            pools,
            descriptors,
            tree,
            table,
            ..
        } = self;
        let pool = pool_in(pools, slot);
        let oldest = pool.oldest_clean(descriptors);
        let stamp = |id: &u32| descriptors[*id].stamp();
        let old = oldest.into_iter().flatten().filter(|id| stamp(id) <= until);
        let Some(id) = old.min_by_key(stamp) else {
            return false;
        };
        // Prefetches the path through the tree of the next page.
        if let Some(next) = some(descriptors[id].newer) {
            let next = &descriptors[next];
            tree.prefetch(table[next.object].root, next.index);
            descriptors.prefetch(next.newer);
        }
        pool.others.evicted_pages += 1;
        self.remove_page(slot, id);
        true
    }

    /// Moves the warm list's oldest clean page to the tail of the cold list, compressed if that saves memory. Returns
    /// whether it did.
    fn cool(&mut self, slot: usize, id: u32) -> bool {
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
        let Self {
            pools, descriptors, ..
        } = self;
        let pool = pool_in(pools, slot);
        descriptors[id].set_cold(true);
        pool.cold.push_tail(descriptors, id);
        pool.cold_bytes += cold_bytes;
        matches!(descriptors[id].place(), Place::Packed(_))
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
