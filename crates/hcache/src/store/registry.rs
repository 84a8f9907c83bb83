//! Clients and pools of a store, by number.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use crate::account::{Account, PoolTotals};
use crate::descriptor::POOLS;
use crate::schedule::{Activity, Claim};
use crate::sync::{Arc, lock};
use crate::{ClientId, Counters, PoolId, PoolKind};

/// Maximum number of clients of a store.
pub(super) const CLIENTS: usize = 4096;

/// Maximum number of pools of a client.
pub(super) const POOLS_PER_CLIENT: usize = 256;

#[derive(Default)]
pub(super) struct Registry {
    pub(super) clients: BTreeMap<ClientId, ClientRecord>,
    pub(super) pools: BTreeMap<PoolId, PoolRecord>,
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
    pub(super) group: u64,
    /// Sharing domain of its contents.
    pub(super) domain: u32,
    /// The client to whom it is charged first.
    pub(super) members: Vec<ClientId>,
    pub(super) activity: Activity,
    /// Gets up to the last turn.
    pub(super) gets: u64,
    pub(super) created: Duration,
}

impl ClientRecord {
    /// The claim of a client with so many gets a second.
    pub(super) fn claim(&self, activity: f64) -> Claim {
        let options = lock(&self.account.options);
        Claim {
            weight: options.weight,
            floor_bytes: options.floor_bytes,
            ceiling_bytes: options.ceiling_bytes,
            activity,
        }
    }
}

/// The pools whose pages are charged to a client.
#[derive(Default)]
pub(super) struct Charged<'a> {
    /// Gets a second in its private ones, decayed.
    pub(super) private_activity: f64,
    pub(super) shared: Vec<&'a PoolRecord>,
}

impl Charged<'_> {
    /// Gets a second of all of them, whoever makes them.
    pub(super) fn activity(&self) -> f64 {
        let shared = self.shared.iter().map(|pool| pool.activity.rate);
        self.private_activity + shared.sum::<f64>()
    }
}

impl Registry {
    /// What is charged to each client.
    pub(super) fn charged(&self) -> HashMap<ClientId, Charged<'_>> {
        let mut charged: HashMap<ClientId, Charged<'_>> = HashMap::new();
        for pool in self.pools.values() {
            let Some(client) = pool.members.first() else {
                continue;
            };
            let of_client = charged.entry(*client).or_default();
            if pool.totals.shared {
                of_client.shared.push(pool);
            } else {
                of_client.private_activity += pool.activity.rate;
            }
        }
        charged
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
            .filter(move |(_, pool)| pool.members.contains(&client));
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
