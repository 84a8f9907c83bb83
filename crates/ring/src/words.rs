//! The words that both ends of a ring share: each end's positions, and the order in which it accesses the words.
//!
//! **Publication.** Each end writes entries (and slots), then stores its tail with release; the other end loads the tail
//! with acquire, then reads them. The reverse path is the completion head: the client has read completions before it
//! stores it with release, and the server writes over their places only after it has loaded it with acquire. Entries of
//! submissions and slots need none: they are written over only after their completion was read.
//!
//! **Sleep.** An end announces that it sleeps, then looks for work; the other end publishes work, then looks for the
//! announcement. Both have a sequentially consistent fence in between, so that at least one sees the other. Both ends
//! write the announcement, and do so by read-modify-writes alone, which have one order that both see.
//!
//! `tests/memory_order` runs both ends in all orders that weak memory permits, and with each of these orderings
//! weakened alone, which it must find.

use crate::sync::Ordering::{Acquire, Relaxed, Release, SeqCst};
use crate::sync::{AtomicU32, fence};

/// A 32-bit word of the head of a region, by its offset in bytes. Words that different sides write are a cache
/// line apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// `HCRG`.
    Magic = 0,
    /// Version of the protocol.
    Version = 4,
    /// Entries of each ring.
    Entries = 8,
    /// Slots.
    Slots = 12,
    /// Entries the client has published; the client writes.
    SubmissionTail = 64,
    /// Entries the server has taken; the server writes, and nothing depends on it.
    SubmissionHead = 128,
    /// Completions the server has published; the server writes.
    CompletionTail = 192,
    /// Completions the client has taken; the client writes.
    CompletionHead = 256,
    /// Not zero while the server must be woken; both write.
    ServerSleeping = 320,
    /// Not zero while the client must be woken; both write.
    ClientSleeping = 384,
}

/// Memory with the words of a ring.
pub(crate) trait SharedWords {
    /// A word of its head.
    fn word(&self, word: Word) -> &AtomicU32;
}

/// The client's positions in its ring are impossible. The ring is no longer usable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// More entries published than the ring holds.
    #[error("the submission tail is beyond the end of the ring")]
    SubmissionTail,
    /// More completions taken than were published, or fewer than before.
    #[error("the completion head is outside the published completions")]
    CompletionHead,
}

/// The server's positions in a ring, which it trusts nobody else with.
pub(crate) struct ServerEnd {
    entries: u32,
    /// Number of entries taken, and of completions written: each entry has one, in order.
    position: u32,
    /// Number of completions the client had taken when last read.
    reaped: u32,
}

impl ServerEnd {
    /// Of a new ring of `entries`.
    pub(crate) fn new(entries: u32) -> Self {
        Self {
            entries,
            position: 0,
            reaped: 0,
        }
    }

    /// Number of entries taken, and so the position of the next one and of its completion.
    pub(crate) fn position(&self) -> u32 {
        self.position
    }

    /// How many entries wait and have room for their completions.
    pub(crate) fn ready(&mut self, words: &impl SharedWords) -> Result<u32, RingFault> {
        let tail = words.word(Word::SubmissionTail).load(Acquire);
        let waiting = tail.wrapping_sub(self.position);
        if waiting > self.entries {
            return Err(RingFault::SubmissionTail);
        }
        if waiting == 0 {
            return Ok(0);
        }
        let head = words.word(Word::CompletionHead).load(Acquire);
        let unreaped = self.position.wrapping_sub(head);
        if unreaped > self.position.wrapping_sub(self.reaped) {
            return Err(RingFault::CompletionHead);
        }
        self.reaped = head;
        Ok(waiting.min(self.entries - unreaped))
    }

    /// The next completion is written: goes on to the next entry.
    pub(crate) fn advance(&mut self) {
        self.position = self.position.wrapping_add(1);
    }

    /// Publishes the completions written.
    pub(crate) fn publish(&self, words: &impl SharedWords) {
        words
            .word(Word::CompletionTail)
            .store(self.position, Release);
    }

    /// Ends a turn in which completions were published. Returns whether the client sleeps and must be woken.
    pub(crate) fn end_turn(&self, words: &impl SharedWords) -> bool {
        words
            .word(Word::SubmissionHead)
            .store(self.position, Relaxed);
        // The client stores "sleeping", then checks for completions; we publish those, then check whether it sleeps.
        fence(SeqCst);
        let sleeping = words.word(Word::ClientSleeping);
        sleeping.load(Relaxed) != 0 && sleeping.swap(0, Relaxed) != 0
    }

    #[cfg(test)]
    pub(crate) fn set_position(&mut self, position: u32) {
        (self.position, self.reaped) = (position, position);
    }
}

/// Publishes whether the server must be woken by the client of this ring.
pub(crate) fn set_server_sleeping(words: &impl SharedWords, sleeping: bool) {
    words
        .word(Word::ServerSleeping)
        .swap(sleeping.into(), Relaxed);
}

/// To be called between the announcement that the server sleeps, to any number of clients, and the last read of their
/// rings: a client publishes, then checks whether we sleep; we publish that, then check for its entries.
pub(crate) fn server_announced() {
    fence(SeqCst);
}

/// The client's positions in its ring.
pub(crate) struct ClientEnd {
    /// Number of entries written.
    written: u32,
    /// Number of entries published.
    published: u32,
    /// Number of completions read.
    reaped: u32,
}

impl ClientEnd {
    /// Of a new ring.
    pub(crate) fn new() -> Self {
        Self {
            written: 0,
            published: 0,
            reaped: 0,
        }
    }

    /// Number of entries written, and so the position of the next one.
    pub(crate) fn written(&self) -> u32 {
        self.written
    }

    /// Number of completions read, and so the position of the next one.
    pub(crate) fn reaped(&self) -> u32 {
        self.reaped
    }

    /// Number of entries written whose completions were not read.
    pub(crate) fn under_way(&self) -> u32 {
        self.written.wrapping_sub(self.reaped)
    }

    /// The next entry is written.
    pub(crate) fn advance(&mut self) {
        self.written = self.written.wrapping_add(1);
    }

    /// The next completion was read.
    pub(crate) fn reap(&mut self) {
        self.reaped = self.reaped.wrapping_add(1);
    }

    /// Publishes the entries written. Returns whether the server sleeps and must be woken.
    pub(crate) fn publish(&mut self, words: &impl SharedWords) -> bool {
        if self.published == self.written {
            return false;
        }
        self.published = self.written;
        // Before the entries are published, so that none of them waits for room for its completion.
        words.word(Word::CompletionHead).store(self.reaped, Release);
        words
            .word(Word::SubmissionTail)
            .store(self.written, Release);
        // The server stores "sleeping", then checks for entries; we publish those, then check whether it sleeps.
        fence(SeqCst);
        let sleeping = words.word(Word::ServerSleeping);
        sleeping.load(Relaxed) != 0 && sleeping.swap(0, Relaxed) != 0
    }

    /// How many completions can be read; `None` if there are more than entries were published.
    pub(crate) fn ready(&self, words: &impl SharedWords) -> Option<u32> {
        let tail = words.word(Word::CompletionTail).load(Acquire);
        let ready = tail.wrapping_sub(self.reaped);
        (ready <= self.published.wrapping_sub(self.reaped)).then_some(ready)
    }

    /// Announces that the client sleeps. Returns whether it may: if not, there are completions.
    pub(crate) fn fall_asleep(&self, words: &impl SharedWords) -> bool {
        words.word(Word::ClientSleeping).swap(1, Relaxed);
        // As in `publish`, with the roles exchanged.
        fence(SeqCst);
        self.ready(words) == Some(0)
    }

    /// The client sleeps no longer.
    pub(crate) fn wake_up(&self, words: &impl SharedWords) {
        words.word(Word::ClientSleeping).swap(0, Relaxed);
    }
}
