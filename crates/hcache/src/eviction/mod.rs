//! Eviction policies: which page a pool gives up when memory runs short.
//!
//! In each shard a pool has two [queues](Queue) of pages. A policy chooses the queue whose tail a page enters, what a use
//! in place does, and what becomes of the oldest page of a queue when the store needs room. The store does the rest:
//! it keeps the queues, chooses the shard, the pool and the client to evict from, and, if it
//! compresses, puts the pages that a policy gives up into one more queue of cold pages, which it drops in
//! their order. A use of a cold page makes it enter a queue of the policy again, as one that was remembered.
//!
//! [`EVICTION_POLICIES`] is the only list of policies: the options of `plimsoll hcache serve`, its report, the benches and the
//! tests take names and descriptions from it. A new policy is a file with its [`EvictionPolicyRow`] and a line in the list.
//!
//! **Private pools.** A get takes the page out, so only a put over a page that is there uses it in place. LRU and SIEVE
//! then evict in the order of puts. S3-FIFO remembers the pages that were taken out like those that were evicted: one that
//! is put again was used before and enters the main queue, while pages that pass through once stay in the small one.
//!
//! Cost: a call through a pointer for each page that enters, is used in place or is judged. Not here: curves of a policy
//! ([`Miniature`](crate::Miniature)), and whose pages are evicted (`store`).

mod lru;
mod s3_fifo;
mod sieve;

/// One of the two queues of a pool in a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// The queue of a policy that needs only one.
    First,
    /// The other one.
    Second,
}

impl Queue {
    /// The other queue.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }

    /// Its place in arrays of both.
    pub fn index(self) -> usize {
        self as usize
    }
}

/// Maximum number of uses that is stored for a page.
pub const USES_MAX: u8 = 3;

/// The effect of a use of a page that stays in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UseEffect {
    /// The page moves to the tail of this queue.
    Moved(Queue),
    /// The page keeps its place; so many uses are stored, at most [`USES_MAX`].
    Counted(u8),
}

/// The judgement of the oldest page of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It moves to the tail of `queue`, with `uses` stored.
    Kept {
        /// Its new queue.
        queue: Queue,
        /// Number of uses to store.
        uses: u8,
    },
    /// It leaves.
    Evicted {
        /// Whether the store remembers it: if it is put again soon, it enters as a remembered page.
        remembered: bool,
    },
}

/// The policy of one pool in one shard, with its state.
pub trait EvictionPolicy: Send {
    /// The queue whose tail a page enters, with no use stored. `remembered`: it left not long ago and was remembered; `pages`
    /// are in the queues, this one not included.
    fn enter(&self, remembered: bool, pages: [u32; 2]) -> Queue;

    /// The effect of a get that leaves the page in place, or of a put that replaces its contents. `uses`: those stored.
    fn used(&self, uses: u8) -> UseEffect;

    /// The queue whose oldest page is judged next, by the number of pages in each: one that has a page, if one has.
    fn next(&self, pages: [u32; 2]) -> Queue;

    /// Judges the oldest page of `queue`, with `uses` stored.
    fn judge(&mut self, queue: Queue, uses: u8) -> Verdict;

    /// Whether a page that a get takes out of a private pool is remembered.
    fn remembers_taken(&self) -> bool {
        false
    }
}

/// A policy by name.
pub struct EvictionPolicyRow {
    /// The name in options and reports.
    pub name: &'static str,
    /// Description in one line of help.
    pub summary: &'static str,
    /// The publication, by its key in docs/papers.md.
    pub source: &'static str,
    /// Time and memory per page.
    pub cost: &'static str,
    /// A larger store always holds the pages of a smaller one, so that one list yields the hits of all sizes
    /// (\[Mattson70\]). Other policies are predicted by miniatures.
    pub is_stack: bool,
    /// How many times as long as in the first queue a page stays in the second one, where all shards are alike. Ages there count
    /// for that much less in the choice of the shard, so that a shard that has pages only there is not emptied first.
    pub second_stays: u64,
    /// It remembers pages that left.
    pub remembers: bool,
    /// Makes the policy of one pool in one shard, whose queues are empty.
    pub make: fn() -> Box<dyn EvictionPolicy>,
}

impl std::fmt::Debug for EvictionPolicyRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// All policies, the default first.
pub static EVICTION_POLICIES: [&EvictionPolicyRow; 3] = [&s3_fifo::ROW, &sieve::ROW, &lru::ROW];

/// The policy under which the page unused for the longest time is evicted.
pub static LRU: &EvictionPolicyRow = &lru::ROW;

/// The policy of a name.
pub fn eviction_policy(name: &str) -> Option<&'static EvictionPolicyRow> {
    EVICTION_POLICIES.into_iter().find(|row| row.name == name)
}
