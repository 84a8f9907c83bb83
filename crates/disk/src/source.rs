//! The references of a VM above its own memory, as a [`Source`].
//!
//! A reference is a whole block that a guest reads because its memory does not hold it: of kind `Read`, its page the
//! [number](Location::number) of its location. Evictions, writes and frees are not references. So LRU over these
//! references gives, exactly, the hits at each size of a cache that keeps what is read through it, as a host's page
//! cache does. The curve of the *exclusive* cache follows from the order of evictions, which a trace of
//! references does not hold: for it, put a ghost buffer behind an [`Observer`].
//!
//! The observer never waits for the reader: references that find no room are lost, and counted.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source};

use crate::{Location, Observer};

/// References handed over at once: 8 KiB of them.
const CHUNK: usize = 1024;
/// Chunks that wait for the reader: 2 MiB.
const CHUNKS_MAX: usize = 256;

/// Returns an observer, and the references that it records. They end when the observer is dropped.
pub fn misses() -> (MissObserver, Misses) {
    let (sender, receiver) = sync_channel(CHUNKS_MAX);
    let observer = MissObserver {
        pages: Vec::with_capacity(CHUNK),
        sender,
        lost: Arc::default(),
    };
    (observer, Misses { receiver })
}

/// Passes references to [`Misses`], the last of them when it is dropped.
#[derive(Debug)]
pub struct MissObserver {
    pages: Vec<PageNumber>,
    sender: SyncSender<Vec<PageNumber>>,
    lost: Arc<AtomicU64>,
}

impl MissObserver {
    /// Counts references that found no room.
    pub fn lost(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.lost)
    }
}

impl Observer for MissObserver {
    fn missed(&mut self, page: Location) {
        self.pages.push(PageNumber(page.number()));
        if self.pages.len() < CHUNK {
            return;
        }
        let chunk = std::mem::replace(&mut self.pages, Vec::with_capacity(CHUNK));
        if let Err(TrySendError::Full(chunk) | TrySendError::Disconnected(chunk)) =
            self.sender.try_send(chunk)
        {
            self.lost.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
    }

    fn evicted(&mut self, _: Location) {}

    fn released(&mut self, _: Location) {}

    fn cleared(&mut self) {}
}

impl Drop for MissObserver {
    fn drop(&mut self) {
        let rest = std::mem::take(&mut self.pages);
        let count = rest.len() as u64;
        // Nothing is in progress that could not wait.
        if count > 0 && self.sender.send(rest).is_err() {
            self.lost.fetch_add(count, Ordering::Relaxed);
        }
    }
}

/// Blocks that a VM reads because its memory does not hold them, as they happen: a batch waits for the next 1024.
#[derive(Debug)]
pub struct Misses {
    receiver: Receiver<Vec<PageNumber>>,
}

impl Source for Misses {
    type Error = Infallible;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, Infallible> {
        batch.advance();
        let Ok(first) = self.receiver.recv() else {
            return Ok(false);
        };
        let mut next = Some(first);
        while let Some(pages) = next {
            let kinds = std::iter::repeat_n(AccessKind::Read, pages.len());
            batch.extend(pages, kinds);
            let fits = batch.len() + CHUNK <= ReferenceBatch::CAPACITY;
            next = fits.then(|| self.receiver.try_recv().ok()).flatten();
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DiskNumber;

    fn block(number: u64) -> Location {
        Location::new(DiskNumber(1), number)
    }

    #[test]
    fn every_miss_is_a_read_in_order_and_nothing_else_is_a_reference() {
        let (mut observer, mut misses) = misses();
        for number in 0..2500 {
            observer.missed(block(number));
            observer.evicted(block(number + 1));
            observer.released(block(number + 2));
            observer.cleared();
        }
        drop(observer);
        let (mut batch, mut seen) = (ReferenceBatch::new(), Vec::new());
        while misses.next_batch(&mut batch).unwrap() {
            assert!(batch.len() <= ReferenceBatch::CAPACITY);
            assert!(batch.kinds().iter().all(|kind| *kind == AccessKind::Read));
            seen.extend_from_slice(batch.pages());
        }
        let expected = (0..2500).map(|number| PageNumber(1 << 50 | number));
        assert!(seen.into_iter().eq(expected));
        assert!(!misses.next_batch(&mut batch).unwrap());
        assert!(batch.is_empty());
    }

    #[test]
    fn what_nobody_takes_is_lost_and_counted() {
        let (mut observer, mut misses) = misses();
        let lost = observer.lost();
        let kept = (CHUNK * CHUNKS_MAX) as u64;
        for number in 0..kept + 3 * CHUNK as u64 {
            observer.missed(block(number));
        }
        assert_eq!(lost.load(Ordering::Relaxed), 3 * CHUNK as u64);
        let mut batch = ReferenceBatch::new();
        assert!(misses.next_batch(&mut batch).unwrap());
        assert_eq!(batch.len(), ReferenceBatch::CAPACITY);
        drop(misses);
        observer.missed(block(0));
        drop(observer);
        assert_eq!(lost.load(Ordering::Relaxed), 3 * CHUNK as u64 + 1);
    }
}
