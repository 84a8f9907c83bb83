//! Opening and closing of pools, and removal of clients.

use super::Inner;
use super::registry::{POOLS_PER_CLIENT, PoolRecord};

use crate::account::{Account, PoolTotals};
use crate::descriptor::POOLS;
use crate::schedule::Activity;
use crate::shard::Pool;
use crate::sync::{Arc, lock};
use crate::{Counters, Error, PoolId, PoolKind, PoolOptions};

impl Inner {
    pub(super) fn create_pool(
        &self,
        account: &Arc<Account>,
        options: PoolOptions,
    ) -> Result<PoolId, Error> {
        let mut registry = lock(&self.registry);
        let shared = matches!(options.kind, PoolKind::SharedInclusive { .. });
        let existing = registry.pools.iter().find_map(|(id, pool)| {
            let same = shared && pool.kind == options.kind && pool.group == account.group;
            same.then(|| (*id, pool.members.contains(&account.id)))
        });
        if let Some((id, true)) = existing {
            return Ok(id);
        }
        if registry.pools_of(account.id).count() >= POOLS_PER_CLIENT {
            return Err(Error::TooManyPools(POOLS_PER_CLIENT));
        }
        if let Some((id, false)) = existing {
            let record = registry.pools.get_mut(&id).expect("it was just found");
            record.members.push(account.id);
            for shard in 0..self.shards.len() {
                self.shard(shard).join(id, account.id);
            }
            return Ok(id);
        }
        let id = registry
            .next_pool()
            .ok_or(Error::TooManyPools(POOLS as usize))?;
        let domain = if shared {
            registry.next_number()
        } else {
            account.id.0
        };
        let totals = Arc::new(PoolTotals::new(
            id,
            shared,
            options.capacity_pages,
            self.shards.len(),
        ));
        for shard in 0..self.shards.len() {
            self.shard(shard).add_pool(Pool::new(
                id,
                shared,
                domain,
                account.clone(),
                totals.clone(),
                self.common.eviction,
            ));
        }
        lock(&account.pools).push(totals.clone());
        let record = PoolRecord {
            totals,
            kind: options.kind,
            group: account.group,
            domain,
            members: vec![account.id],
            activity: Activity::default(),
            gets: 0,
            created: registry.now,
        };
        registry.pools.insert(id, record);
        self.retarget(&mut registry);
        Ok(id)
    }

    pub(super) fn leave_pool(&self, account: &Arc<Account>, id: PoolId) -> Result<(), Error> {
        let mut registry = lock(&self.registry);
        let record = registry
            .pools
            .get_mut(&id)
            .filter(|pool| pool.members.contains(&account.id));
        let record = record.ok_or(Error::NoSuchPool(id))?;
        let was_charged = record.members[0] == account.id;
        record.members.retain(|&member| member != account.id);
        let next = record.members.first().copied();
        let totals = record.totals.clone();
        if was_charged {
            lock(&account.pools).retain(|pool| pool.id != id);
        }
        let mut done = Counters::default();
        let mut heir = None;
        if let Some(next) = next {
            let next = registry.clients.get(&next).filter(|_| was_charged);
            let next = next.map(|record| record.account.clone());
            for shard in 0..self.shards.len() {
                done.add(&self.shard(shard).leave(id, account.id, next.as_ref()));
            }
            if let Some(next) = next {
                lock(&next.pools).push(totals);
                heir = Some(next);
            }
        } else {
            registry.pools.remove(&id);
            for shard in 0..self.shards.len() {
                self.shard(shard).close_pool(id);
            }
            drop(registry);
            let mut all = Counters::default();
            for shard in 0..self.shards.len() {
                while self.shard(shard).drain_pool(id) {}
                done.add(&self.shard(shard).leave(id, account.id, None));
                all.add(&self.shard(shard).remove_pool(id));
            }
            registry = lock(&self.registry);
            registry.departed.add(&all);
            registry.free_pool(id);
        }
        if let Some(client) = registry.clients.get_mut(&account.id) {
            client.departed.add(&done);
        }
        self.retarget(&mut registry);
        drop(registry);
        if let Some(heir) = heir {
            self.respect_ceiling(&heir);
        }
        Ok(())
    }

    pub(super) fn remove_client(&self, account: &Arc<Account>) {
        let pools: Vec<PoolId> = lock(&self.registry).pools_of(account.id).collect();
        for pool in pools {
            // It is a member: the pool is there.
            let _ = self.leave_pool(account, pool);
        }
        let mut registry = lock(&self.registry);
        registry.clients.remove(&account.id);
        lock(&self.accounts).retain(|other| other.id != account.id);
        self.retarget(&mut registry);
        drop(registry);
        self.release_outside(account.outside_bytes);
        // Regaining the room is not urgent: if it fails, the next turn does it.
        let _ = self.settle();
    }
}
