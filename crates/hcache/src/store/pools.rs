//! Opening and closing of pools, and removal of clients.

use super::Inner;
use super::registry::{MemberRecord, POOLS_PER_CLIENT, PoolRecord};

use crate::account::{Account, PoolTotals};
use crate::descriptor::POOLS;
use crate::shard::Pool;
use crate::sync::{Arc, lock};
use crate::{ClientId, ClientOptions, Counters, Error, PoolId, PoolOptions};

/// The part of the capacity that pools may take for themselves, without their pages.
const POOLS_CAPACITY_SHARE: u64 = 8;
/// The number of pools that there may be however small the capacity is.
const POOLS_MIN: u64 = 16;
/// What a pool takes in a shard: itself, its place in the list, a member, and its counts on lines of their own.
const POOL_SHARD_BYTES: usize = size_of::<Pool>() + 192;

impl Inner {
    pub(super) fn create_pool(
        &self,
        account: &Arc<Account>,
        options: PoolOptions,
    ) -> Result<PoolId, Error> {
        let most = self.most_pools();
        let mut registry = lock(&self.registry);
        let shared = options.kind.is_shared();
        let existing = registry.pools.iter().find_map(|(id, pool)| {
            let same = shared && pool.kind == options.kind && pool.account.group == account.group;
            same.then(|| (*id, pool.has_member(account.id)))
        });
        if let Some((id, true)) = existing {
            return Ok(id);
        }
        if registry.pools_of(account.id).count() >= POOLS_PER_CLIENT {
            return Err(Error::TooManyPools(POOLS_PER_CLIENT));
        }
        if let Some((id, false)) = existing {
            let record = registry.pools.get_mut(&id).expect("it was just found");
            record.members.push(MemberRecord::new(account.id));
            for shard in 0..self.shards.len() {
                self.shard(shard).join(id, account.id);
            }
            self.retarget(&mut registry);
            return Ok(id);
        }
        let share = registry.pool_share(account.group, most);
        let is_allowed = share.available > 0;
        let id = is_allowed.then(|| registry.next_pool()).flatten();
        let id = id.ok_or(Error::NoPoolLeft {
            group: account.group,
            own: share.own,
            free: share.free,
            most,
        })?;
        let domain = if shared {
            registry.next_number()
        } else {
            account.id.0
        };
        let totals = Arc::new(PoolTotals::new(
            id,
            options.capacity_pages,
            self.shards.len(),
        ));
        let charged = if shared {
            let of_pool = ClientOptions {
                group: account.group,
                ..ClientOptions::new("")
            };
            let of_pool = Arc::new(Account::new(ClientId(domain), of_pool));
            lock(&self.accounts).push(of_pool.clone());
            of_pool
        } else {
            account.clone()
        };
        for shard in 0..self.shards.len() {
            self.shard(shard).add_pool(Pool::new(
                id,
                shared,
                domain,
                (account.id, charged.clone()),
                totals.clone(),
                self.common.eviction,
            ));
        }
        lock(&charged.pools).push(totals.clone());
        let record = PoolRecord {
            totals,
            kind: options.kind,
            domain,
            account: charged,
            members: vec![MemberRecord::new(account.id)],
            created: registry.now,
        };
        registry.pools.insert(id, record);
        self.retarget(&mut registry);
        Ok(id)
    }

    /// How many pools there may be: their own memory, in every shard and taken off everybody's capacity, is bounded.
    fn most_pools(&self) -> u64 {
        let pool_bytes = (self.shards.len() * POOL_SHARD_BYTES) as u64;
        let of_capacity = lock(&self.bound).target_bytes / POOLS_CAPACITY_SHARE;
        (of_capacity / pool_bytes).clamp(POOLS_MIN, POOLS.into())
    }

    pub(super) fn leave_pool(&self, account: &Arc<Account>, id: PoolId) -> Result<(), Error> {
        self.take_leave(account, id)?;
        self.retarget(&mut lock(&self.registry));
        self.respect_ceilings();
        Ok(())
    }

    /// Leaves a pool, and the targets as they are.
    fn take_leave(&self, account: &Arc<Account>, id: PoolId) -> Result<(), Error> {
        let mut registry = lock(&self.registry);
        let record = registry
            .pools
            .get_mut(&id)
            .filter(|pool| pool.has_member(account.id));
        let record = record.ok_or(Error::NoSuchPool(id))?;
        record.members.retain(|member| member.client != account.id);
        let is_used = !record.members.is_empty();
        let charged = record.account.clone();
        let mut done = Counters::default();
        if is_used {
            for shard in 0..self.shards.len() {
                done.add(&self.shard(shard).leave(id, account.id));
            }
        } else {
            lock(&charged.pools).retain(|pool| pool.id != id);
            registry.pools.remove(&id);
            for shard in 0..self.shards.len() {
                self.shard(shard).close_pool(id);
            }
            drop(registry);
            for shard in 0..self.shards.len() {
                while self.shard(shard).drain_pool(id) {}
            }
            // Only now, and under the registry's lock: the counters must be missing from no report meanwhile.
            registry = lock(&self.registry);
            let mut all = Counters::default();
            for shard in 0..self.shards.len() {
                let mut shard = self.shard(shard);
                done.add(&shard.leave(id, account.id));
                all.add(&shard.remove_pool(id));
            }
            if charged.id == account.id {
                // What happened to its pages counts for nobody else.
                done = all;
            } else {
                lock(&self.accounts).retain(|other| other.id != charged.id);
            }
            registry.departed.add(&all);
            registry.free_pool(id);
        }
        if let Some(client) = registry.clients.get_mut(&account.id) {
            client.departed.add(&done);
        }
        Ok(())
    }

    pub(super) fn remove_client(&self, account: &Arc<Account>) {
        let pools: Vec<PoolId> = lock(&self.registry).pools_of(account.id).collect();
        for pool in pools {
            // It is a member: the pool is there.
            let _ = self.take_leave(account, pool);
        }
        let mut registry = lock(&self.registry);
        registry.clients.remove(&account.id);
        lock(&self.accounts).retain(|other| other.id != account.id);
        self.retarget(&mut registry);
        drop(registry);
        self.respect_ceilings();
        self.release_outside(account.outside_bytes);
        // Regaining the room is not urgent: if it fails, the next turn does it.
        let _ = self.settle();
    }
}
