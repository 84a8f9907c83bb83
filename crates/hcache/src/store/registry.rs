//! Clients and pools of a store, by number.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use crate::account::{Account, PoolTotals};
use crate::descriptor::POOLS;
use crate::schedule::{Activity, Claim};
use crate::sync::Arc;
use crate::{ClientId, Counters, PoolId, PoolKind, Share};

/// Maximum number of pools of a client.
pub(super) const POOLS_PER_CLIENT: usize = 256;

#[derive(Default)]
pub(super) struct Registry {
    pub(super) clients: BTreeMap<ClientId, ClientRecord>,
    pub(super) pools: BTreeMap<PoolId, PoolRecord>,
    /// Number of groups that share the numbers of pools; 0 counts as 1.
    pub(super) groups: usize,
    /// Numbers assigned to clients and shared pools.
    pub(super) numbers: u32,
    /// The last generation used of each slot.
    pub(super) generations: Vec<u32>,
    pub(super) free_slots: BTreeSet<u32>,
    /// Counters of pools that are gone.
    pub(super) departed: Counters,
    pub(super) now: Duration,
    /// Clock and time at past turns.
    pub(super) ages: Vec<(u64, Duration)>,
}

pub(super) struct ClientRecord {
    pub(super) account: Arc<Account>,
    pub(super) operations: u64,
    pub(super) created: Duration,
    pub(super) last_active: Duration,
    pub(super) departed: Counters,
}

pub(super) struct PoolRecord {
    pub(super) totals: Arc<PoolTotals>,
    pub(super) kind: PoolKind,
    /// Sharing domain of its contents.
    pub(super) domain: u32,
    /// To whom its pages are charged: its client or, if it is shared, itself.
    pub(super) account: Arc<Account>,
    pub(super) members: Vec<MemberRecord>,
    pub(super) created: Duration,
}

/// A client that uses a pool.
pub(super) struct MemberRecord {
    pub(super) client: ClientId,
    pub(super) activity: Activity,
    /// Its gets from the pool and its puts up to the last turn.
    calls: [u64; 2],
}

impl MemberRecord {
    pub(super) fn new(client: ClientId) -> Self {
        Self {
            client,
            activity: Activity::default(),
            calls: [0; 2],
        }
    }

    /// Counts its gets and puts so far: those since the last turn are its activity, gets or puts, whichever are more.
    pub(super) fn count(&mut self, calls: [u64; 2], elapsed: Duration) {
        let last = std::mem::replace(&mut self.calls, calls);
        let since = [0, 1].map(|kind| calls[kind].saturating_sub(last[kind]));
        self.activity.update(since[0].max(since[1]), elapsed);
    }
}

impl PoolRecord {
    pub(super) fn has_member(&self, client: ClientId) -> bool {
        self.members.iter().any(|member| member.client == client)
    }
}

impl ClientRecord {
    /// The claim of a client of such an activity.
    pub(super) fn claim(&self, activity: f64) -> Claim {
        let options = &self.account.options;
        Claim {
            weight: options.weight,
            floor_bytes: options.floor_bytes,
            ceiling_bytes: options.ceiling_bytes,
            activity,
        }
    }
}

/// A client's activity.
#[derive(Default)]
pub(super) struct Usage {
    /// In its private pools.
    pub(super) private: f64,
    /// In each shared pool that it uses.
    pub(super) shared: Vec<(PoolId, f64)>,
}

impl Usage {
    /// In all pools.
    pub(super) fn activity(&self) -> f64 {
        self.private + self.shared.iter().map(|(_, rate)| rate).sum::<f64>()
    }
}

impl Registry {
    /// What each client uses. A client without pools is not in it.
    pub(super) fn usages(&self) -> HashMap<ClientId, Usage> {
        let mut usages: HashMap<ClientId, Usage> = HashMap::new();
        for (id, pool) in &self.pools {
            for member in &pool.members {
                let usage = usages.entry(member.client).or_default();
                if pool.kind.is_shared() {
                    usage.shared.push((*id, member.activity.rate));
                } else {
                    usage.private += member.activity.rate;
                }
            }
        }
        usages
    }

    /// A number that differs from all clients' numbers and all pools' domains.
    pub(super) fn next_number(&mut self) -> u32 {
        loop {
            self.numbers = self.numbers.checked_add(1).unwrap_or(1);
            let number = self.numbers;
            let taken = self.clients.contains_key(&ClientId(number))
                || self.pools.values().any(|pool| pool.domain == number);
            if !taken {
                return number;
            }
        }
    }

    /// What a group of clients has of the pools, of which there may be so many.
    pub(super) fn pool_share(&self, group: u64, most: u64) -> Share {
        let held = self.pools.values().map(|pool| (pool.account.group, 1));
        Share::of(group, self.groups, most, held)
    }

    /// A number for a pool: its slot, and how often the slot was used, modulo a million.
    pub(super) fn next_pool(&mut self) -> Option<PoolId> {
        let slot = match self.free_slots.pop_first() {
            Some(slot) => slot,
            None => {
                let slot = u32::try_from(self.generations.len()).ok();
                let slot = slot.filter(|&slot| slot < POOLS)?;
                self.generations.push(0);
                slot
            }
        };
        let generation = &mut self.generations[slot as usize];
        *generation = (*generation + 1) % (u32::MAX / POOLS);
        Some(PoolId(*generation * POOLS + slot))
    }

    pub(super) fn free_pool(&mut self, id: PoolId) {
        self.free_slots.insert(id.0 % POOLS);
    }

    pub(super) fn pools_of(&self, client: ClientId) -> impl Iterator<Item = PoolId> {
        let mine = self
            .pools
            .iter()
            .filter(move |(_, pool)| pool.has_member(client));
        mine.map(|(id, _)| *id)
    }

    /// Time since a page of that stamp was last used, to the precision of a turn.
    pub(super) fn age(&self, stamp: u64) -> Duration {
        let after = self.ages.partition_point(|&(clock, _)| clock < stamp);
        let used = self.ages.get(after).map_or(self.now, |&(_, at)| at);
        self.now.saturating_sub(used)
    }

    pub(super) fn remember_age(&mut self, clock: u64) {
        const AGES: usize = 4096;
        if self.ages.len() == AGES {
            // Older times are stored with less precision.
            let mut n = 0;
            self.ages.retain(|_| {
                n += 1;
                n % 2 == 0 || n > AGES / 2
            });
        }
        self.ages.push((clock, self.now));
    }
}
