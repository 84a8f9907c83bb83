//! Statistics of a store, added up over its shards.

use std::collections::HashMap;

use super::Inner;
use super::registry::{ClientRecord, PoolRecord, Usage};

use crate::account::OldestPage;
use crate::shard::Shard;
use crate::sync::lock;
use crate::{
    ClientId, ClientStats, Counters, PAGE_BYTES, PoolId, PoolStats, SharedPoolStats, StoreStats,
};

/// Sums over shards.
#[derive(Default)]
struct ShardTotals {
    pools: HashMap<PoolId, PoolCounts>,
    /// Each client's counters in the pools it uses.
    clients: HashMap<ClientId, Counters>,
    metadata_frames: u64,
    packed_frames: u64,
    free_frames: u64,
    /// Pages without a frame of their own.
    deduplicated_pages: u64,
}

#[derive(Clone, Copy, Default)]
struct PoolCounts {
    pages: u64,
    packed: u64,
    objects: u64,
    counters: Counters,
}

impl ShardTotals {
    pub(super) fn add(&mut self, shard: &Shard) {
        self.metadata_frames += shard.metadata_frames() as u64;
        self.packed_frames += shard.packed_frames();
        self.free_frames += shard.magazine.len() as u64;
        for pool in shard.pools.iter().flatten() {
            let sum = self.pools.entry(pool.id).or_default();
            sum.pages += pool.pages();
            sum.packed += pool.packed;
            // An object in several shards is counted in each; see `PoolStats::objects`.
            sum.objects += pool.objects;
            sum.counters.add(&pool.counters());
            for member in pool.members() {
                let of_client = self.clients.entry(member.id).or_default();
                of_client.add(&pool.counters_of(member));
            }
            self.deduplicated_pages += pool.frameless;
        }
    }
}

impl Inner {
    pub(super) fn stats(&self) -> StoreStats {
        let registry = lock(&self.registry);
        let mut shards = ShardTotals::default();
        for shard in 0..self.shards.len() {
            shards.add(&self.shard(shard));
        }
        let pool = |(id, record): (&PoolId, &PoolRecord)| {
            let counted = shards.pools.get(id).copied().unwrap_or_default();
            PoolStats {
                id: *id,
                kind: record.kind,
                members: record.members.iter().map(|member| member.client).collect(),
                capacity_pages: record.totals.capacity_pages(),
                pages: counted.pages,
                compressed_pages: counted.packed,
                objects: counted.objects,
                oldest_age: OldestPage::of(&record.totals).map(|oldest| registry.age(oldest.stamp)),
                created: record.created,
                counters: counted.counters,
            }
        };
        let since = |time| registry.now.saturating_sub(time).as_secs_f64();
        let usages = registry.usages();
        let client = |(id, record): (&ClientId, &ClientRecord)| {
            let private = registry
                .pools
                .iter()
                .filter(|(_, pool)| pool.account.id == *id);
            let pools: Vec<PoolStats> = private.map(pool).collect();
            let mut counters = record.departed;
            counters.add(&shards.clients.get(id).copied().unwrap_or_default());
            let options = &record.account.options;
            ClientStats {
                id: *id,
                name: options.name.clone(),
                group: options.group,
                weight: options.weight,
                floor_bytes: options.floor_bytes,
                ceiling_bytes: options.ceiling_bytes,
                target_bytes: record.account.target_bytes(),
                used_bytes: record.account.used_bytes(),
                outside_bytes: record.account.outside_bytes,
                pages: pools.iter().map(|pool| pool.pages).sum(),
                activity: usages.get(id).map_or(0.0, Usage::activity),
                age_seconds: since(record.created),
                idle_seconds: since(record.last_active),
                counters,
                pools,
            }
        };
        let mut counters = registry.departed;
        shards
            .pools
            .values()
            .for_each(|pool| counters.add(&pool.counters));
        let clients: Vec<ClientStats> = registry.clients.iter().map(client).collect();
        let shared = registry
            .pools
            .iter()
            .filter(|(_, pool)| pool.kind.is_shared());
        let shared_pools = shared
            .map(|(id, record)| SharedPoolStats {
                pool: pool((id, record)),
                target_bytes: record.account.target_bytes(),
                used_bytes: record.account.used_bytes(),
            })
            .collect();
        let age_seconds = registry.now.as_secs_f64();
        drop(registry);
        let heap_bytes = self.heap_bytes();
        let bound = lock(&self.bound);
        let free = u64::from(lock(&self.common.free).len()) + shards.free_frames;
        let frame_bytes = PAGE_BYTES as u64;
        // Of a shrink that is not finished, all that was not returned yet.
        let top = bound.top.max(bound.given_back_to);
        let held = u64::from(top).saturating_sub(free) * frame_bytes;
        let outside = heap_bytes + bound.outside_bytes + bound.clients_bytes;
        StoreStats {
            age_seconds,
            capacity_bytes: bound.capacity_bytes,
            max_capacity_bytes: self.options.max_capacity_bytes,
            used_bytes: held + outside,
            metadata_bytes: shards.metadata_frames * frame_bytes + outside,
            compressed_frame_bytes: shards.packed_frames * frame_bytes,
            compressed_raw_bytes: shards.pools.values().map(|pool| pool.packed).sum::<u64>()
                * frame_bytes,
            pages: shards.pools.values().map(|pool| pool.pages).sum(),
            deduplicated_pages: shards
                .deduplicated_pages
                .saturating_sub(self.common.contents.entries() as u64),
            counters,
            clients,
            shared_pools,
        }
    }
}
