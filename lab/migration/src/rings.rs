//! KVM's dirty rings in memory: entries in, written pages out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use kvm_ioctls::VmFd;

use super::slot::{FIRST_SLOT, Slot};
use super::sys::{self, RingEntry, RingMapping};
use super::written::WrittenBitmaps;
use super::{KvmError, Round};

/// The kernel wrote the entry.
const DIRTY: u32 = 1;
/// We took the entry.
const RESET: u32 = 2;

/// The rings of a machine, and what was drained from them.
#[derive(Debug)]
pub(super) struct Rings {
    state: Mutex<State>,
    full_exits: AtomicU64,
}

#[derive(Debug)]
struct State {
    rings: Vec<Ring<RingMapping>>,
    written: WrittenBitmaps,
}

/// A ring and the index of its next entry.
#[derive(Debug)]
struct Ring<E> {
    entries: E,
    next: usize,
}

impl<E: std::ops::Deref<Target = [RingEntry]>> Ring<E> {
    /// Takes the entries that are there, at most a whole ring; returns how many.
    fn take(&mut self, written: &mut WrittenBitmaps) -> usize {
        for taken in 0..self.entries.len() {
            let entry = &self.entries[self.next];
            if entry.flags.load(Ordering::Acquire) & (DIRTY | RESET) != DIRTY {
                return taken;
            }
            let slot = entry.slot.load(Ordering::Relaxed);
            let slot = slot.checked_sub(FIRST_SLOT);
            let slot = slot.and_then(|slot| usize::try_from(slot).ok());
            written.note(slot, entry.offset.load(Ordering::Relaxed));
            entry.flags.store(RESET, Ordering::Release);
            self.next = (self.next + 1) % self.entries.len();
        }
        self.entries.len()
    }

    /// Hands back the entries that KVM wrote twice, having written more than the ring holds; returns how many: so many writes
    /// are lost. KVM resets entries in order, and would wait for these.
    fn skip_overwritten(&mut self) -> u64 {
        let count = self.entries.len();
        let is_dirty = |entries: &E, index: usize| {
            entries[index].flags.load(Ordering::Acquire) & (DIRTY | RESET) == DIRTY
        };
        let ahead = (1..count).find(|ahead| is_dirty(&self.entries, (self.next + ahead) % count));
        let Some(overwritten) = ahead else { return 0 };
        // Entries are written in order, so this one is not merely late.
        if is_dirty(&self.entries, self.next) {
            return 0;
        }
        for _ in 0..overwritten {
            self.entries[self.next]
                .flags
                .store(RESET, Ordering::Release);
            self.next = (self.next + 1) % count;
        }
        overwritten as u64
    }
}

impl Rings {
    pub(super) fn new(rings: Vec<RingMapping>, slots: &[Slot]) -> Self {
        let ring = |entries| Ring { entries, next: 0 };
        Self {
            state: Mutex::new(State {
                rings: rings.into_iter().map(ring).collect(),
                written: WrittenBitmaps::new(slots),
            }),
            full_exits: AtomicU64::new(0),
        }
    }

    /// Makes room in a full ring of any vCPU.
    pub(super) fn drain_full(&self, vm: &VmFd) -> Result<(), KvmError> {
        self.full_exits.fetch_add(1, Ordering::Relaxed);
        self.state().drain(vm)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn round(&self, vm: &VmFd) -> Result<Round, KvmError> {
        let mut state = self.state();
        state.drain(vm)?;
        let mut round = state.written.take();
        round.full_exits = self.full_exits.swap(0, Ordering::Relaxed);
        Ok(round)
    }
}

impl State {
    fn drain(&mut self, vm: &VmFd) -> Result<(), KvmError> {
        loop {
            for ring in &mut self.rings {
                ring.take(&mut self.written);
            }
            // Even if nothing was taken: KVM may have reset only a part of what was taken before.
            sys::reset_dirty_rings(vm).map_err(KvmError::call("KVM_RESET_DIRTY_RINGS"))?;
            let skipped = self.rings.iter_mut().map(Ring::skip_overwritten);
            let lost: u64 = skipped.sum();
            if lost == 0 {
                return Ok(());
            }
            self.written.lose(lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_flow::{PageCount, PageNumber};

    use super::*;

    fn entry(flags: u32, slot: u32, offset: u64) -> RingEntry {
        RingEntry {
            flags: flags.into(),
            slot: slot.into(),
            offset: offset.into(),
        }
    }

    fn written() -> WrittenBitmaps {
        WrittenBitmaps::new(&[(512, 70), (1 << 20, 8)].map(|(first, pages)| Slot {
            first: PageNumber(first),
            pages: PageCount(pages),
        }))
    }

    #[test]
    fn entries_are_taken_in_order_up_to_the_first_that_is_not_there_yet() {
        let entries = [(1, 1, 69), (1, 2, 7), (0, 1, 3), (1, 1, 4)]
            .map(|(flags, slot, offset)| entry(flags, slot, offset));
        let (mut ring, mut written) = (
            Ring {
                entries: entries.as_slice(),
                next: 0,
            },
            written(),
        );
        assert_eq!(ring.take(&mut written), 2);
        let pages = [512 + 69, (1 << 20) + 7].map(PageNumber);
        assert_eq!(written.take(), Round::of(pages.into()));
        assert_eq!(ring.take(&mut written), 0);
        ring.entries[2].flags.store(DIRTY, Ordering::Release);
        assert_eq!(ring.take(&mut written), 2);
        assert_eq!(
            written.take().pages(),
            [512 + 3, 512 + 4].map(PageNumber).as_slice()
        );
        // The ring has come round to entries that are not reset yet.
        assert_eq!(ring.take(&mut written), 0);
    }

    #[test]
    fn entries_that_name_no_page_are_counted_and_nothing_else() {
        let wrong = [
            (0, 0),
            (3, 0),
            (1, 70),
            (2, 8),
            (1, u64::MAX),
            (1 << 16 | 1, 0),
            (u32::MAX, 0),
        ];
        let entries: Vec<_> = wrong
            .iter()
            .map(|&(slot, offset)| entry(DIRTY, slot, offset))
            .collect();
        let mut written = written();
        let mut ring = Ring {
            entries: entries.as_slice(),
            next: 0,
        };
        assert_eq!(ring.take(&mut written), wrong.len());
        let round = written.take();
        assert_eq!((round.lost, round.pages()), (wrong.len() as u64, &[][..]));
    }

    #[test]
    fn what_kvm_overwrote_is_counted_and_the_rest_is_taken() {
        let flags = [DIRTY, DIRTY, 0, 0, DIRTY];
        let entries: Vec<_> = flags.iter().map(|&flags| entry(flags, 1, 3)).collect();
        let mut ring = Ring {
            entries: entries.as_slice(),
            next: 2,
        };
        let mut written = written();
        assert_eq!((ring.take(&mut written), ring.skip_overwritten()), (0, 2));
        let handed_back = |index: usize| entries[index].flags.load(Ordering::Acquire);
        assert_eq!((handed_back(2), handed_back(3)), (RESET, RESET));
        assert_eq!((ring.take(&mut written), ring.skip_overwritten()), (3, 0));
    }

    #[test]
    fn a_ring_that_never_ends_is_taken_once_around() {
        struct EndlessRing(Vec<RingEntry>);
        impl std::ops::Deref for EndlessRing {
            type Target = [RingEntry];
            fn deref(&self) -> &[RingEntry] {
                for entry in &self.0 {
                    entry.flags.store(DIRTY, Ordering::Relaxed);
                }
                &self.0
            }
        }
        let entries = (0..8).map(|page| entry(DIRTY, 1, page)).collect();
        let mut ring = Ring {
            entries: EndlessRing(entries),
            next: 0,
        };
        assert_eq!(ring.take(&mut written()), 8);
    }
}
