//! The state of a pool in one shard.

use super::{COLD, some};

use crate::account::{Account, PoolTotals};
use crate::eviction::{EvictionPolicy, EvictionPolicyRow, Queue};
use crate::ghost::PoolGhosts;
use crate::list::List;
use crate::sync::Arc;
use crate::{ClientId, Counters, PoolId};

/// A client that uses a pool.
#[repr(align(64))] // the next shard's must not share its lines
pub(crate) struct Member {
    pub(crate) id: ClientId,
    /// Its counters in one shard.
    pub(crate) counters: Counters,
}

impl Member {
    pub(super) fn new(id: ClientId) -> Self {
        let counters = Counters::default();
        Self { id, counters }
    }
}

/// A pool that was found, and the member that requested it.
#[derive(Clone, Copy)]
pub(super) struct PoolMember {
    pub(super) slot: usize,
    pub(super) member: usize,
}

/// The state of a pool in one shard.
#[repr(align(64))] // as above
pub(crate) struct Pool {
    pub(crate) id: PoolId,
    /// Whether a get leaves the page.
    pub(super) inclusive: bool,
    /// Whether it is being destroyed and cannot be found.
    pub(super) leaving: bool,
    pub(super) members: Vec<Member>,
    /// Counters of members that left, and of events without a member.
    pub(super) others: Counters,
    /// Sharing domain: contents are shared only with pages of the same domain.
    pub(super) domain: u32,
    /// To whom its pages are charged.
    pub(super) account: Arc<Account>,
    pub(super) totals: Arc<PoolTotals>,
    /// The queues of the eviction policy, and the cold list.
    pub(super) lists: [List; COLD + 1],
    pub(super) policy: Box<dyn EvictionPolicy>,
    pub(super) ghosts: PoolGhosts,
    /// Bytes charged for the pages in the cold list.
    pub(super) cold_bytes: u64,
    /// Bytes charged for its pages here. Below zero if contents shared with other shards were charged
    /// there.
    pub(super) charged_bytes: i64,
    pub(crate) packed: u64,
    /// Pages that share a frame or need none.
    pub(crate) frameless: u64,
    pub(crate) objects: u64,
    /// The lists' oldest pages, and the next to be judged or dropped, when their stamps were last published; `None` if they
    /// must be published again.
    pub(super) published: Option<[Option<u32>; 4]>,
}

impl Pool {
    /// Returns the state of a new pool in a shard: empty, with its first client and to whom it is charged.
    pub(crate) fn new(
        id: PoolId,
        inclusive: bool,
        domain: u32,
        (client, account): (ClientId, Arc<Account>),
        totals: Arc<PoolTotals>,
        eviction: &EvictionPolicyRow,
    ) -> Self {
        Self {
            id,
            inclusive,
            leaving: false,
            members: vec![Member::new(client)],
            others: Counters::default(),
            domain,
            account,
            totals,
            lists: [const { List::new() }; COLD + 1],
            policy: (eviction.make)(),
            ghosts: PoolGhosts::default(),
            cold_bytes: 0,
            charged_bytes: 0,
            packed: 0,
            frameless: 0,
            objects: 0,
            published: None,
        }
    }

    /// The oldest cold page.
    #[inline(always)]
    pub(super) fn oldest_cold(&self) -> Option<u32> {
        some(self.lists[COLD].oldest())
    }

    /// Number of pages in the queues.
    #[inline(always)]
    pub(super) fn queue_pages(&self) -> [u32; 2] {
        [self.lists[0].len(), self.lists[1].len()]
    }

    /// The page to be judged next, and its queue.
    #[inline(always)]
    pub(super) fn next_judged(&self) -> Option<(Queue, u32)> {
        let queue = self.policy.next(self.queue_pages());
        Some((queue, some(self.lists[queue.index()].oldest())?))
    }

    /// The page to be dropped or judged next.
    #[inline(always)]
    pub(super) fn next_evicted(&self) -> Option<u32> {
        let cold = self.oldest_cold();
        cold.or_else(|| self.next_judged().map(|(_, id)| id))
    }

    /// Number of pages it has in this shard.
    pub(crate) fn pages(&self) -> u64 {
        self.lists.iter().map(|list| u64::from(list.len())).sum()
    }

    /// Its members.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Its counters.
    pub(crate) fn counters(&self) -> Counters {
        let mut sum = self.others;
        for member in &self.members {
            sum.add(&member.counters);
        }
        sum
    }

    /// Counters of a member. Those of events without a member count for the client of a private pool.
    pub(crate) fn counters_of(&self, member: &Member) -> Counters {
        if self.inclusive {
            member.counters
        } else {
            self.counters()
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of::<Self>()
            + self.members.capacity() * size_of::<Member>()
            + size_of_val(&*self.policy)
    }

    pub(super) fn charge(&mut self, bytes: i64) {
        self.charged_bytes += bytes;
        self.account.charge(bytes);
    }
}
