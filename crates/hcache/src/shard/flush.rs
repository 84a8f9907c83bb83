//! Flushes of pages, ranges and pools.

use std::ops::RangeInclusive;

use super::{DRAIN_PAGES, FlushResult, Shard, slot};

use crate::descriptor::Key;
use crate::table::Target;
use crate::{ClientId, Error, EventKind, Handle, PoolId};

impl Shard {
    /// Drops a page.
    pub(crate) fn flush(
        &mut self,
        client: ClientId,
        hash: u64,
        handle: &Handle,
    ) -> Result<bool, Error> {
        let found = self.find_pool(client, handle.pool)?;
        self.observe(client, found.slot, hash, handle.index, EventKind::Flushed);
        self.counters(found).flushes += 1;
        let Some(id) = self.find(hash, handle) else {
            return Ok(false);
        };
        self.counters(found).flushed_pages += 1;
        self.remove_page(found.slot, id);
        self.publish(found.slot);
        Ok(true)
    }

    /// Drops up to a thousand pages of an object.
    pub(crate) fn flush_range(
        &mut self,
        client: ClientId,
        hash: u64,
        pool: PoolId,
        object: u64,
        indices: RangeInclusive<u32>,
        first: bool,
    ) -> Result<FlushResult, Error> {
        let found = self.find_pool(client, pool)?;
        let slot = found.slot;
        self.counters(found).flushes += u64::from(first);
        let large = self.pool(slot).totals.is_large();
        let key = Key::new(pool, object);
        let Some(object) = self.table.find(hash, key, &self.descriptors).some() else {
            return Ok(FlushResult {
                pages: 0,
                next: None,
                large,
            });
        };
        let mut flushed = Vec::new();
        let end = *indices.end();
        match object.to() {
            Target::Page(id) if indices.contains(&self.descriptors[id].index) => {
                self.remove_object(slot, object);
                flushed.push(id);
            }
            Target::Page(_) => {}
            Target::Record(record) => {
                self.tree.drain_range(
                    &mut self.table[record].root,
                    indices,
                    DRAIN_PAGES,
                    &self.descriptors,
                    |id| flushed.push(id),
                );
                let count = u32::try_from(flushed.len()).expect("DRAIN_PAGES at most");
                self.lose_pages(slot, record, count);
            }
        }
        let last = flushed.last().map(|&id| self.descriptors[id].index);
        let full = flushed.len() == DRAIN_PAGES;
        let next = last.filter(|&last| full && last < end).map(|last| last + 1);
        for &id in &flushed {
            self.observe(
                client,
                slot,
                hash,
                self.descriptors[id].index,
                EventKind::Flushed,
            );
            self.unlink(slot, id);
            self.forget(slot, id);
        }
        self.counters(found).flushed_pages += flushed.len() as u64;
        self.publish(slot);
        self.clear_if_empty();
        Ok(FlushResult {
            pages: flushed.len() as u64,
            next,
            large,
        })
    }

    /// Drops all pages of a pool; returns how many. All under one lock, so that no page that is there now is
    /// left, even if it is used meanwhile.
    pub(crate) fn flush_pool(
        &mut self,
        client: ClientId,
        pool: PoolId,
        first: bool,
    ) -> Result<u64, Error> {
        let found = self.find_pool(client, pool)?;
        self.counters(found).flushes += u64::from(first);
        let mut dropped = 0;
        while let Some(id) = self.oldest(found.slot) {
            if self.common.observer.is_some() {
                let page = &self.descriptors[id];
                let hash = self.common.object_hash(self.table.key_of(page));
                self.observe(client, found.slot, hash, page.index, EventKind::Flushed);
            }
            self.remove_page(found.slot, id);
            dropped += 1;
        }
        self.counters(found).flushed_pages += dropped;
        self.publish(found.slot);
        self.clear_if_empty();
        Ok(dropped)
    }

    /// Drops up to a thousand pages of a pool that is closed; returns whether there may be more.
    pub(crate) fn drain_pool(&mut self, pool: PoolId) -> bool {
        let slot = slot(pool);
        for _ in 0..DRAIN_PAGES {
            let Some(id) = self.oldest(slot) else {
                self.clear_if_empty();
                return false;
            };
            self.remove_page(slot, id);
        }
        true
    }
}
