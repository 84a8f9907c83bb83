//! The store's capacity: how it is set, maintained and divided, and whose pages are evicted.

use std::collections::HashMap;
use std::time::Duration;

use super::registry::{ClientRecord, MemberRecord, PoolRecord, Registry, Usage};
use super::{FEWEST_SHARD_FRAMES, HEAP_RESERVE_BYTES, HUGE_FROM_BYTES, Inner, allowed_heap_bytes};

use crate::account::{Account, Ages, OldestPage, PoolTotals};
use crate::arena::NoFrame;
use crate::schedule::{Claim, Use};
use crate::shard::{EvictionGain, Goal, Magazine};
use crate::sync::{Arc, Ordering, lock};
use crate::sys::HUGE_PAGE_FRAMES;
use crate::{ClientId, Counters, Error, PAGE_BYTES, PoolId, StoreOptions, schedule, sync};

/// How often a put tries to make room before it is refused.
pub(super) const TRIES: usize = 16;

/// Attempts in which nothing could be dropped before giving up: frames may be in transit through other threads.
const FUTILE: usize = 64;

/// Pages moved under one lock in a reduction that does not return before it is done.
const STEP_PAGES: usize = 1024;

/// Maximum number of frames or pages freed under one lock.
const BATCH: usize = 16;

/// The capacity, and what is subtracted from it.
#[derive(Default)]
pub(super) struct Bound {
    pub(super) capacity_bytes: u64,
    pub(super) outside_bytes: u64,
    /// The capacity that the last resize requested.
    pub(super) target_bytes: u64,
    /// Memory held for clients outside of the store.
    pub(super) clients_bytes: u64,
    /// Subtracted for memory outside the frames; a resize sets it anew.
    pub(super) allowed_heap_bytes: u64,
    /// End of the frames.
    pub(super) top: u32,
    /// Frames up to here may have memory: `top`, unless a shrink is not finished.
    pub(super) given_back_to: u32,
    pub(super) shrink: Shrink,
}

/// How far a shrink has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Shrink {
    /// Nothing is beyond `top`, and that memory is returned.
    #[default]
    Finished,
    /// Pages of so many frames are to be dropped, then metadata to be rebuilt that is unused.
    Dropping { frames: u64 },
    /// What is beyond `top` is to be moved below it.
    Moving,
    /// Memory beyond `top` is to be returned.
    Returning,
}

impl Inner {
    /// Bytes held outside the slab.
    pub(super) fn heap_bytes(&self) -> u64 {
        let shards: usize = (0..self.shards.len())
            .map(|shard| self.shard(shard).heap_bytes())
            .sum();
        let registry = lock(&self.registry);
        let pools = registry.pools.values().map(|pool| {
            let account = usize::from(pool.kind.is_shared()) * size_of::<Account>();
            let members = pool.members.capacity() * size_of::<MemberRecord>();
            pool.totals.heap_bytes() + size_of::<PoolRecord>() + account + members
        });
        let clients =
            registry.clients.len() * 2 * (size_of::<ClientRecord>() + size_of::<Account>());
        let ages = registry.ages.capacity() * size_of::<(u64, Duration)>();
        (shards + pools.sum::<usize>() + clients + ages) as u64 + self.common.contents.bytes()
    }

    /// Ensures that memory held outside the slab is subtracted from the capacity.
    pub(super) fn settle(&self) -> Result<(), Error> {
        let heap_bytes = self.heap_bytes();
        let mut bound = lock(&self.bound);
        let allowed = allowed_heap_bytes(heap_bytes, bound.target_bytes, self.options.sharing);
        let too_much = bound.allowed_heap_bytes.saturating_sub(allowed) > HEAP_RESERVE_BYTES * 2;
        if heap_bytes <= bound.allowed_heap_bytes && !too_much {
            return Ok(());
        }
        let Bound {
            target_bytes,
            outside_bytes,
            ..
        } = *bound;
        self.set_bound(&mut bound, target_bytes, outside_bytes)
    }

    /// Changes the capacity and what is subtracted from it.
    pub(super) fn set_bound(
        &self,
        bound: &mut Bound,
        capacity_bytes: u64,
        outside_bytes: u64,
    ) -> Result<(), Error> {
        self.finish_shrink(bound, capacity_bytes)?;
        self.move_top(bound, capacity_bytes, outside_bytes)?;
        self.finish_shrink(bound, capacity_bytes)?;
        bound.capacity_bytes = capacity_bytes;
        self.retarget(&mut lock(&self.registry));
        Ok(())
    }

    /// Does what is left of a shrink.
    pub(super) fn finish_shrink(&self, bound: &mut Bound, asked_bytes: u64) -> Result<(), Error> {
        let cannot = |NoFrame| Error::CannotShrink { asked_bytes };
        if let Shrink::Dropping { frames } = bound.shrink {
            self.drop_frames(frames, usize::MAX);
            // Not again if it is interrupted: the next attempt begins here.
            bound.shrink = Shrink::Dropping { frames: 0 };
            self.trim_shards().map_err(cannot)?;
            bound.shrink = Shrink::Moving;
        }
        if bound.shrink == Shrink::Moving {
            if self.moves_in_steps() {
                // Under one lock, a shard as a whole would hold up the operations on a store of many GiB.
                while !self
                    .with_room(|| self.clear_some(bound.top, STEP_PAGES))
                    .map_err(cannot)?
                {}
            } else {
                self.clear_beyond(bound.top).map_err(cannot)?;
            }
            bound.shrink = Shrink::Returning;
        }
        if bound.shrink == Shrink::Returning {
            self.give_back(bound, u32::MAX)?;
        }
        Ok(())
    }

    /// Moves the end of the frames to where a capacity has it. Frames beyond a lower one are held as before: a shrink begins.
    pub(super) fn move_top(
        &self,
        bound: &mut Bound,
        capacity_bytes: u64,
        outside_bytes: u64,
    ) -> Result<(), Error> {
        let heap_bytes = self.heap_bytes();
        let sharing = self.options.sharing;
        let held_bytes = outside_bytes.saturating_add(bound.clients_bytes);
        let allowed = |capacity_bytes| allowed_heap_bytes(heap_bytes, capacity_bytes, sharing);
        let allowed_heap_bytes = allowed(capacity_bytes);
        let taken = allowed_heap_bytes.saturating_add(held_bytes);
        let frames = capacity_bytes.saturating_sub(taken) / PAGE_BYTES as u64;
        let least_frames = self.shards.len() as u64 * FEWEST_SHARD_FRAMES;
        if frames < least_frames || capacity_bytes < StoreOptions::MIN_CAPACITY_BYTES {
            let least_bytes = held_bytes.saturating_add(least_frames * PAGE_BYTES as u64);
            // What is taken off a capacity depends on it, by a hundredth: this converges.
            let least_bytes = (0..8).fold(0, |least, _| allowed(least).saturating_add(least_bytes));
            return Err(Error::CapacityTooSmall {
                asked_bytes: capacity_bytes,
                least_bytes: least_bytes.max(StoreOptions::MIN_CAPACITY_BYTES),
            });
        }
        let mut top = u32::try_from(frames).expect("checked when the store was made");
        if self.options.capacity_bytes >= HUGE_FROM_BYTES && top >= HUGE_PAGE_FRAMES {
            // A huge page across the end would take memory beyond it.
            top -= top % HUGE_PAGE_FRAMES;
        }
        let common = &self.common;
        let magazine_frames =
            (top as usize / (64 * self.shards.len())).clamp(1, Magazine::MOST_FRAMES);
        common
            .magazine_frames
            .store(magazine_frames, Ordering::Relaxed);
        self.spill_magazines();
        let held = bound.top - lock(&common.free).len();
        // In this order, so that a frame released meanwhile is neither handed out beyond the end nor lost below it.
        common.top.store(top, Ordering::SeqCst);
        lock(&common.free).set_top(top);
        // Threads that took frames before that have inserted them by then.
        sync::wait_for_readers(&common.in_flight);
        let old_top = std::mem::replace(&mut bound.top, top);
        bound.capacity_bytes = bound.capacity_bytes.max(capacity_bytes);
        bound.target_bytes = capacity_bytes;
        bound.outside_bytes = outside_bytes;
        bound.allowed_heap_bytes = allowed_heap_bytes;
        if top < old_top {
            let frames = self.frames_to_drop(held.into(), top.into());
            bound.shrink = Shrink::Dropping { frames };
            for shard in 0..self.shards.len() {
                self.shard(shard).restart_sweep();
            }
            bound.given_back_to = bound.given_back_to.max(old_top);
            self.retarget(&mut lock(&self.registry));
        }
        Ok(())
    }

    /// Returns of how many frames pages are to be dropped, so that those left fit below `top` together with their metadata: it
    /// shrinks with them, if it is rebuilt.
    fn frames_to_drop(&self, held: u64, top: u64) -> u64 {
        let (mut metadata, mut needed) = (0, 0);
        for shard in 0..self.shards.len() {
            let shard = self.shard(shard);
            metadata += shard.page_metadata_frames() as u64;
            needed += shard.metadata_needed() as u64;
        }
        let pages = held.saturating_sub(metadata).max(1);
        // Each page dropped makes less metadata needed. Solved for `rebuilt`:
        // held - rebuilt - (metadata - needed * (1 - rebuilt / pages)) == top
        let excess = (held + needed).saturating_sub(metadata + top);
        let rebuilt = excess * pages / (pages + needed);
        let needed = needed - (needed * rebuilt / pages).min(needed);
        let is_rebuilt =
            metadata.saturating_sub(needed) > needed / 4 + 2 * self.shards.len() as u64;
        if is_rebuilt {
            rebuilt
        } else {
            held.saturating_sub(top)
        }
    }

    /// Takes memory that is held for a client outside of the store off the capacity.
    pub(super) fn hold_outside(&self, bytes: u64) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        let mut bound = lock(&self.bound);
        let Bound {
            target_bytes,
            outside_bytes,
            clients_bytes,
            ..
        } = *bound;
        bound.clients_bytes = clients_bytes.saturating_add(bytes);
        let set = self.set_bound(&mut bound, target_bytes, outside_bytes);
        if set.is_err() {
            bound.clients_bytes = clients_bytes;
        }
        set
    }

    /// The reverse.
    pub(super) fn release_outside(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let mut bound = lock(&self.bound);
        bound.clients_bytes -= bytes;
        let Bound {
            target_bytes,
            outside_bytes,
            ..
        } = *bound;
        // Regaining the room is not urgent: if it fails, another change does it.
        let _ = self.set_bound(&mut bound, target_bytes, outside_bytes);
    }

    /// Returns memory of up to `frames_max` frames beyond the end to the kernel, from its own end downward. Nothing remains there.
    pub(super) fn give_back(&self, bound: &mut Bound, frames_max: u32) -> Result<(), Error> {
        // A thread may still be reading a frame that it took from there.
        sync::wait_for_readers(&self.common.in_flight);
        let from = bound.given_back_to.saturating_sub(frames_max);
        let from = from.max(bound.top);
        let given = self.common.slab.give_back(from..bound.given_back_to);
        given.map_err(|error| Error::CannotGiveBack {
            reason: error.to_string(),
        })?;
        bound.given_back_to = from;
        if from == bound.top {
            bound.shrink = Shrink::Finished;
        }
        Ok(())
    }

    /// Drops pages until this many frames are freed, about so many pages are dropped, or none can be. Returns how many frames
    /// are still to be freed.
    pub(super) fn drop_frames(&self, mut frames: u64, mut pages_max: usize) -> u64 {
        while frames > 0 && pages_max > 0 {
            let count = usize::try_from(frames).unwrap_or(usize::MAX);
            let won = self.evict_somebody(count.min(self.large_batch()), Goal::Pages);
            if won.pages == 0 {
                return 0;
            }
            frames = frames.saturating_sub(won.frames);
            pages_max = pages_max.saturating_sub(usize::try_from(won.pages).unwrap_or(usize::MAX));
        }
        frames
    }

    /// Rebuilds metadata of which much is unused.
    fn trim_shards(&self) -> Result<(), NoFrame> {
        (0..self.shards.len()).try_for_each(|shard| self.with_room(|| self.shard(shard).trim()))
    }

    /// Moves everything out of frames from `top` on.
    fn clear_beyond(&self, top: u32) -> Result<(), NoFrame> {
        for shard in 0..self.shards.len() {
            self.with_room(|| self.shard(shard).relocate(top))?;
        }
        self.with_room(|| {
            let take = || lock(&self.common.free).pop();
            self.common.contents.relocate(&self.common.slab, top, take)
        })
    }

    /// Retries until there are enough frames, as long as something can be dropped, or may be soon.
    fn with_room<T>(&self, mut attempt: impl FnMut() -> Result<T, NoFrame>) -> Result<T, NoFrame> {
        let mut futile = 0;
        loop {
            match attempt() {
                Ok(done) => return Ok(done),
                Err(NoFrame) if futile == FUTILE => return Err(NoFrame),
                Err(NoFrame) if self.make_room() => {}
                Err(NoFrame) => {
                    futile += 1;
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Drops some pages, or else gives up frames in reserve. Returns whether pages were dropped.
    pub(super) fn make_room(&self) -> bool {
        let has_dropped = self.evict_somebody(self.large_batch(), Goal::Pages).pages > 0;
        if !has_dropped {
            self.spill_magazines();
        }
        has_dropped
    }

    fn spill_magazines(&self) {
        for shard in 0..self.shards.len() {
            self.shard(shard).magazine.spill();
        }
    }

    /// Recomputes the targets.
    pub(super) fn retarget(&self, registry: &mut Registry) {
        let frames_bytes = u64::from(self.common.top.load(Ordering::Relaxed)) * PAGE_BYTES as u64;
        let accounts = registry.clients.values().map(|record| &record.account);
        let outside_bytes: u64 = accounts.map(|account| account.outside_bytes).sum();
        let capacity_bytes = frames_bytes.saturating_add(outside_bytes);
        let mut usages = registry.usages();
        let claims: Vec<Claim> = registry
            .clients
            .iter()
            .map(|(id, record)| record.claim(usages.entry(*id).or_default().activity()))
            .collect();
        let mut targets = Vec::new();
        schedule::targets(capacity_bytes, &claims, &mut targets);
        let mut shared: HashMap<PoolId, Limits> = HashMap::new();
        for (((id, record), claim), target) in registry.clients.iter().zip(&claims).zip(targets) {
            let limits = Limits {
                target_bytes: target,
                ceiling_bytes: claim.ceiling_bytes,
            };
            let least_bytes = claim.floor_bytes.max(record.account.outside_bytes);
            let private = limits.divide(&usages[id], least_bytes, &mut shared);
            private.set(&record.account);
        }
        for (id, limits) in shared {
            limits.set(&registry.pools[&id].account);
        }
    }

    pub(super) fn turn(&self, now: Duration) {
        let mut operations: HashMap<ClientId, u64> = HashMap::new();
        let mut calls: HashMap<(PoolId, ClientId), [u64; 2]> = HashMap::new();
        for shard in 0..self.shards.len() {
            let mut shard = self.shard(shard);
            // Without the frames to do it, it waits for a later turn.
            let _ = shard.trim();
            for pool in shard.pools.iter().flatten() {
                for member in pool.members() {
                    let Counters { gets, puts, .. } = member.counters;
                    let of_member = calls.entry((pool.id, member.id)).or_default();
                    *of_member = [of_member[0] + gets, of_member[1] + puts];
                    *operations.entry(member.id).or_default() += gets + puts;
                }
            }
        }
        let mut registry = lock(&self.registry);
        let elapsed = now.saturating_sub(registry.now);
        registry.now = registry.now.max(now);
        let now = registry.now;
        registry.remember_age(self.common.clock.load(Ordering::Relaxed));
        for (id, record) in &mut registry.clients {
            // It falls when the client leaves a pool.
            let operations = operations.get(id).copied().unwrap_or_default();
            if operations > record.operations {
                record.last_active = now;
            }
            record.operations = operations;
        }
        for (id, record) in &mut registry.pools {
            for member in &mut record.members {
                let calls = calls.get(&(*id, member.client)).copied();
                member.count(calls.unwrap_or_default(), elapsed);
            }
        }
        self.retarget(&mut registry);
        drop(registry);
        self.respect_ceilings();
        // What does not fit is tried again at the next turn.
        let _ = self.settle();
    }

    /// Frees frames (or drops pages) of the clients chosen for eviction.
    pub(super) fn evict_somebody(&self, count: usize, goal: Goal) -> EvictionGain {
        let mut without: Vec<ClientId> = Vec::new();
        loop {
            let Some(victim) = self.victim(&without) else {
                return EvictionGain::default();
            };
            let won = self.evict_from(&victim, count, goal);
            if won.pages > 0 {
                return won;
            }
            without.push(victim.id);
        }
    }

    /// The account to evict from, excluding some.
    fn victim(&self, without: &[ClientId]) -> Option<Arc<Account>> {
        let accounts = lock(&self.accounts);
        let evictable = |account: &Account| account.has_pages() && !without.contains(&account.id);
        let uses = accounts.iter().map(|account| {
            let target_bytes = account.target_bytes();
            Use {
                used_bytes: account.used_bytes(),
                target_bytes,
                floor_bytes: account.floor_bytes().min(target_bytes),
                is_evictable: evictable(account),
            }
        });
        if let Some(victim) = schedule::victim(uses) {
            return Some(accounts[victim].clone());
        }
        let ages = self.common.ages();
        let oldest = |above_floor: bool| {
            let some = accounts.iter().filter(|account| {
                evictable(account) && (!above_floor || account.used_bytes() > account.floor_bytes())
            });
            some.min_by_key(|account| account.oldest(ages).map_or(u64::MAX, |oldest| oldest.stamp))
                .cloned()
        };
        oldest(true).or_else(|| oldest(false))
    }

    /// Drops pages of each account until it is below its ceiling.
    pub(super) fn respect_ceilings(&self) {
        let accounts = lock(&self.accounts).clone();
        for account in accounts {
            while account.is_above_ceiling()
                && self.evict_from(&account, BATCH, Goal::Pages).pages > 0
            {}
        }
    }

    /// Frees frames (or drops pages) of one client, in the order of its pools' policies.
    pub(super) fn evict_from(&self, account: &Account, count: usize, goal: Goal) -> EvictionGain {
        self.evict_oldest(|ages| account.oldest(ages), count, goal)
    }

    /// Drops pages of one pool, in the order of its policy.
    pub(super) fn evict_from_pool(&self, pool: &Arc<PoolTotals>, count: usize) -> EvictionGain {
        self.evict_oldest(
            |ages| OldestPage::next_evicted(pool, ages),
            count,
            Goal::Pages,
        )
    }

    /// Evicts from the shard with the oldest page.
    fn evict_oldest(
        &self,
        oldest: impl Fn(Ages) -> Option<OldestPage>,
        count: usize,
        goal: Goal,
    ) -> EvictionGain {
        // The published stamps may be out of date when the shard is locked: the page may be gone or young.
        // Then any page of that shard is evicted.
        let mut attempts = 0;
        while attempts <= self.shards.len() {
            let ages = self.common.ages();
            let Some(oldest) = oldest(ages) else { break };
            let slack = ages.clock.saturating_sub(oldest.stamp) / 64;
            let until = if attempts == 0 {
                oldest.next.max(oldest.stamp + slack)
            } else {
                u64::MAX
            };
            let won = self
                .shard(oldest.shard)
                .evict(oldest.pool.id, (until, ages), count, goal);
            if won.pages > 0 {
                return won;
            }
            // A page that is kept has fewer uses stored, so this ends.
            attempts += usize::from(won.kept == 0);
        }
        EvictionGain::default()
    }

    /// Number of pages to drop under one lock when many must go.
    fn large_batch(&self) -> usize {
        (self.common.top.load(Ordering::Relaxed) as usize / 128).clamp(1, 256)
    }

    /// Number of frames to free at once: few in a small store, where each counts.
    pub(super) fn batch(&self) -> usize {
        (self.common.top.load(Ordering::Relaxed) as usize / 8192).clamp(1, BATCH)
    }
}

/// Target and limit of an account.
struct Limits {
    target_bytes: u64,
    ceiling_bytes: Option<u64>,
}

impl Limits {
    fn set(&self, account: &Account) {
        account.set_target_bytes(self.target_bytes);
        account.set_ceiling_bytes(self.ceiling_bytes);
    }

    /// Divides a client's between its private pools together, whose limits are returned, and each shared pool that it uses, to
    /// which its part is added.
    fn divide(&self, usage: &Usage, floor_bytes: u64, shared: &mut HashMap<PoolId, Self>) -> Self {
        let claim = |floor_bytes, activity| Claim {
            weight: 1,
            floor_bytes,
            ceiling_bytes: None,
            activity,
        };
        let rates = usage.shared.iter().map(|(_, rate)| claim(0, *rate));
        let claims: Vec<_> = std::iter::once(claim(floor_bytes, usage.private))
            .chain(rates)
            .collect();
        let divided = |bytes| {
            let mut parts = Vec::new();
            schedule::targets(bytes, &claims, &mut parts);
            parts
        };
        let targets = divided(self.target_bytes);
        let ceilings = self.ceiling_bytes.map(divided);
        let part = |at: usize| Self {
            target_bytes: targets[at],
            ceiling_bytes: ceilings.as_ref().map(|ceilings| ceilings[at]),
        };
        for (at, (pool, _)) in (1..).zip(&usage.shared) {
            let part = part(at);
            shared
                .entry(*pool)
                .and_modify(|limits| {
                    limits.target_bytes += part.target_bytes;
                    let both = limits.ceiling_bytes.zip(part.ceiling_bytes);
                    limits.ceiling_bytes = both.map(|(left, right)| left.saturating_add(right));
                })
                .or_insert(part);
        }
        part(0)
    }
}
