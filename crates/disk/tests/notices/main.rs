//! The ring and the control disk, with a guest that follows the protocol and one that does not.
#![allow(clippy::cast_possible_truncation, reason = "of small test data")]

mod control;
mod guest;
mod store;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use guest::{CHUNK_BYTES, FRAMES_END, Guest, HEADER, HIGH, NONCE, RAM_BYTES, Ram, Record};
use plimsoll_disk::protocol::{record, ring};
use plimsoll_disk::{
    AttachError, BlockSink, Contents, DrainResult, FrameSink, GuestData as _, Notice, Notices,
    PAGE_BYTES, Page,
};
use proptest::prelude::*;

/// A page frame between the two pieces of RAM.
const IN_HOLE: u64 = HIGH / PAGE_BYTES as u64 - 1;

/// A call that a sink received. Of a page, the first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SinkCall {
    ForgetFrames,
    ForgetBlocks,
    Notice(Notice, Option<u8>),
    Put(u32, u64, u8),
    Flush(u32, u64, u32),
}

/// Records its calls, in order.
#[derive(Clone, Default)]
struct Notebook(Rc<RefCell<Vec<SinkCall>>>);

impl Notebook {
    fn take(&self) -> Vec<SinkCall> {
        self.0.take()
    }
}

impl FrameSink for Notebook {
    fn forget(&mut self) {
        self.0.borrow_mut().push(SinkCall::ForgetFrames);
    }

    fn notice(&mut self, notice: Notice, contents: Option<Contents<'_>>) {
        let first = contents.map(|contents| match contents {
            Contents::Copied(page) => {
                assert!(page.iter().all(|byte| *byte == page[0]), "a torn page");
                page[0]
            }
            Contents::Lazy(ram) => {
                let Notice::Evict { frame } = notice else {
                    panic!("contents with {notice:?}")
                };
                let mut byte = [0];
                ram.read(frame * PAGE_BYTES as u64, &mut byte).unwrap();
                byte[0]
            }
        });
        self.0.borrow_mut().push(SinkCall::Notice(notice, first));
    }
}

impl BlockSink for Notebook {
    fn put(&mut self, pool: u32, block: u64, page: &Page) {
        assert!(page.iter().all(|byte| *byte == page[0]), "a torn page");
        (self.0.borrow_mut()).push(SinkCall::Put(pool, block, page[0]));
    }

    fn flush(&mut self, pool: u32, block: u64, count: u32) {
        (self.0.borrow_mut()).push(SinkCall::Flush(pool, block, count));
    }

    fn forget(&mut self) {
        self.0.borrow_mut().push(SinkCall::ForgetBlocks);
    }

    fn end_of_batch(&mut self) {}
}

/// A guest, its reader, and what came out.
struct Pair {
    guest: Guest,
    notices: Notices,
    notebook: Notebook,
}

impl Pair {
    fn new() -> Self {
        let guest = Guest::new();
        let mut notices = Notices::default();
        notices.attach(guest.ram.clone(), HEADER, NONCE).unwrap();
        Self {
            guest,
            notices,
            notebook: Notebook::default(),
        }
    }

    fn drain(&mut self) -> (DrainResult, Vec<SinkCall>) {
        let drained = (self.notices).drain(&mut self.notebook.clone(), &mut self.notebook.clone());
        (drained, self.notebook.take())
    }

    /// Drains, and checks that the ring was released.
    fn fault(&mut self) -> Vec<SinkCall> {
        let (drained, told) = self.drain();
        assert_eq!(drained, DrainResult::Fault);
        assert_eq!(
            told[told.len() - 2..],
            [SinkCall::ForgetFrames, SinkCall::ForgetBlocks]
        );
        let stats = self.notices.stats();
        assert_eq!((stats.attached, stats.faults), (false, 1));
        self.guest.post(Record::new(record::ADD, 1));
        assert_eq!(self.drain(), (DrainResult::Nothing, vec![]));
        told
    }
}

fn add(frame: u64) -> SinkCall {
    SinkCall::Notice(Notice::Add { frame }, None)
}

#[test]
fn records_come_in_order_with_their_pages() {
    let mut pair = Pair::new();
    assert_eq!(pair.guest.get(ring::AT_ATTACHED), NONCE);
    assert_eq!(pair.drain(), (DrainResult::Nothing, vec![]));
    let guest = &mut pair.guest;
    guest.set(ring::AT_MEMORY_PAGES, 77);
    guest.post(Record::new(record::ADD, 5));
    guest.post_page(Record::new(record::EVICT, 5), &[8; PAGE_BYTES]);
    guest.post(Record::new(record::EVICT, 6));
    guest.post_page(
        Record {
            flags: record::SWAP,
            ..Record::new(record::EVICT, FRAMES_END - 1)
        },
        &[9; PAGE_BYTES],
    );
    guest.post(Record {
        other: 8,
        ..Record::new(record::MIGRATE, 7)
    });
    guest.post(Record::new(record::RELEASE, 8));
    guest.put(31, (1 << 44) - 1, &[10; PAGE_BYTES]);
    guest.flush(1, 3, 4);
    let (drained, told) = pair.drain();
    assert_eq!(drained, DrainResult::Records);
    assert_eq!(
        told,
        [
            add(5),
            SinkCall::Notice(Notice::Evict { frame: 5 }, Some(8)),
            SinkCall::Notice(Notice::Evict { frame: 6 }, Some(0)),
            SinkCall::Notice(
                Notice::Evict {
                    frame: FRAMES_END - 1
                },
                Some(9)
            ),
            SinkCall::Notice(Notice::Migrate { frame: 7, to: 8 }, None),
            SinkCall::Notice(Notice::Release { frame: 8 }, None),
            SinkCall::Put(31, (1 << 44) - 1, 10),
            SinkCall::Flush(1, 3, 4),
        ]
    );
    assert_eq!(pair.guest.get(ring::AT_TAIL), 8);
    assert_eq!(pair.guest.get(ring::AT_SLOT_TAIL), 3);
    let stats = pair.notices.stats();
    assert_eq!((stats.attached, stats.records), (true, 8));
    assert_eq!((stats.bad_records, stats.lost, stats.faults), (0, 0, 0));
    assert_eq!(stats.guest_memory_pages, 77);
}

#[test]
fn a_loss_is_told_before_the_batch_to_frames_and_after_it_to_blocks() {
    let mut pair = Pair::new();
    pair.guest.put(1, 1, &[1; PAGE_BYTES]);
    pair.guest.lose(3);
    pair.guest.post(Record::new(record::ADD, 1));
    let told = pair.drain().1;
    assert_eq!(
        told,
        [
            SinkCall::ForgetFrames,
            SinkCall::Put(1, 1, 1),
            add(1),
            SinkCall::ForgetBlocks
        ]
    );
    assert_eq!(pair.notices.stats().lost, 3);
    pair.guest.post(Record::new(record::ADD, 2));
    assert_eq!(pair.drain().1, [add(2)], "told once");
}

#[test]
fn a_loss_without_a_record_behind_it_is_told() {
    let mut pair = Pair::new();
    pair.guest.lose(1);
    let forgotten = vec![SinkCall::ForgetFrames, SinkCall::ForgetBlocks];
    assert_eq!(pair.drain(), (DrainResult::Records, forgotten.clone()));
    assert_eq!(pair.drain(), (DrainResult::Nothing, vec![]));
    // A count that falls is no better.
    pair.guest.set(ring::AT_LOST, 0);
    assert_eq!(pair.drain(), (DrainResult::Records, forgotten));
    assert_eq!(pair.notices.stats().lost, 1);
}

#[test]
fn losses_from_before_the_ring_was_announced_are_not_counted() {
    let guest = Guest::new();
    guest.lose(9);
    let mut notices = Notices::default();
    notices.attach(guest.ram.clone(), HEADER, NONCE).unwrap();
    let notebook = Notebook::default();
    let drained = notices.drain(&mut notebook.clone(), &mut notebook.clone());
    assert_eq!((drained, notices.stats().lost), (DrainResult::Nothing, 0));
}

#[test]
fn records_that_make_no_sense_are_counted_and_count_as_lost() {
    let good = Record::new(record::ADD, 3);
    let put = Record {
        other: 1,
        ..Record::new(record::PUT, 0)
    };
    let flush = Record {
        other: 1,
        count: 1,
        ..Record::new(record::FLUSH, 0)
    };
    let block_max = (1 << 44) - 1;
    for bad in [
        Record::default(),
        Record::new(7, 0),
        Record::new(u16::MAX, 0),
        Record { flags: 4, ..good },
        Record {
            flags: 0x8000,
            ..good
        },
        Record {
            flags: record::SWAP,
            ..flush
        },
        Record {
            page: FRAMES_END,
            ..good
        },
        Record {
            page: u64::MAX,
            ..good
        },
        Record::new(record::EVICT, FRAMES_END),
        Record::new(record::EVICT, IN_HOLE),
        Record::new(record::RELEASE, IN_HOLE),
        Record {
            other: IN_HOLE,
            ..Record::new(record::MIGRATE, 1)
        },
        Record::new(record::RELEASE, FRAMES_END),
        Record::new(record::MIGRATE, FRAMES_END),
        Record {
            other: FRAMES_END,
            ..Record::new(record::MIGRATE, 1)
        },
        put, // Without a page.
        Record { other: 0, ..flush },
        Record { other: 32, ..flush },
        Record {
            other: 1 << 32 | 1,
            ..flush
        },
        Record { count: 0, ..flush },
        Record {
            page: 1 << 44,
            ..flush
        },
        Record {
            page: block_max,
            count: 2,
            ..flush
        },
        Record {
            page: u64::MAX,
            count: u32::MAX,
            ..flush
        },
    ] {
        let mut pair = Pair::new();
        for record in [good, bad, bad, good] {
            pair.guest.post(record);
        }
        let (drained, told) = pair.drain();
        assert_eq!(drained, DrainResult::Records, "{bad:?}");
        assert_eq!(
            told,
            [
                add(3),
                SinkCall::ForgetFrames,
                add(3),
                SinkCall::ForgetBlocks
            ],
            "{bad:?}"
        );
        let stats = pair.notices.stats();
        assert_eq!((stats.records, stats.bad_records), (4, 2), "{bad:?}");
    }
}

#[test]
fn pages_with_records_that_make_no_sense_are_passed_over() {
    let put = Record {
        other: 1,
        ..Record::new(record::PUT, 0)
    };
    for bad in [
        Record {
            page: 1 << 44,
            ..put
        },
        Record { other: 0, ..put },
        Record {
            flags: record::SWAP,
            ..put
        },
        Record::new(record::ADD, 1),
        Record::new(record::MIGRATE, 1),
        Record::new(9, 1),
    ] {
        let mut pair = Pair::new();
        pair.guest.post_page(bad, &[1; PAGE_BYTES]);
        pair.guest.put(1, 2, &[2; PAGE_BYTES]);
        let told = pair.drain().1;
        assert_eq!(
            told,
            [
                SinkCall::ForgetFrames,
                SinkCall::Put(1, 2, 2),
                SinkCall::ForgetBlocks
            ],
            "{bad:?}"
        );
        assert_eq!(pair.guest.get(ring::AT_SLOT_TAIL), 2);
    }
}

#[test]
fn a_head_that_cannot_be_lets_the_ring_go() {
    for head in [257, u64::MAX, 1 << 63] {
        let mut pair = Pair::new();
        pair.guest.set(ring::AT_HEAD, head);
        assert_eq!(pair.fault().len(), 2);
        assert_eq!(pair.guest.get(ring::AT_ATTACHED), 0);
    }
    let mut pair = Pair::new();
    pair.guest.post(Record::new(record::ADD, 1));
    pair.drain();
    pair.guest.set(ring::AT_HEAD, 0);
    assert_eq!(pair.fault().len(), 2, "a head that falls");
}

/// Notes how many records the guest may reuse when each flush is passed on.
struct Progress<'a>(&'a Guest, Vec<u64>);

impl BlockSink for Progress<'_> {
    fn put(&mut self, _: u32, _: u64, _: &Page) {}

    fn flush(&mut self, _: u32, _: u64, _: u32) {
        self.1.push(self.0.get(ring::AT_TAIL));
    }

    fn forget(&mut self) {}

    fn end_of_batch(&mut self) {}
}

#[test]
fn a_guest_may_reuse_places_while_its_batch_is_read() {
    let mut pair = Pair::new();
    for block in 0..70 {
        pair.guest.flush(1, block, 1);
    }
    let mut progress = Progress(&pair.guest, Vec::new());
    let drained = (pair.notices).drain(&mut pair.notebook.clone(), &mut progress);
    assert_eq!(drained, DrainResult::Records);
    let expected = [[0; 32].as_slice(), &[32; 32], &[64; 6]].concat();
    assert_eq!(progress.1, expected);
    assert_eq!(pair.guest.get(ring::AT_TAIL), 70);
}

#[test]
fn a_slot_out_of_order_lets_the_ring_go() {
    let mut pair = Pair::new();
    let evict = |slot| Record {
        flags: record::DATA,
        slot,
        ..Record::new(record::EVICT, 1)
    };
    let evicted = SinkCall::Notice(Notice::Evict { frame: 1 }, Some(0));
    pair.guest.post(evict(1));
    assert_eq!(pair.drain().1, [evicted], "a slot may be left out");
    pair.guest.post(evict(2));
    pair.guest.post(evict(2));
    assert_eq!(
        pair.fault(),
        [evicted, SinkCall::ForgetFrames, SinkCall::ForgetBlocks]
    );
    // No more pages in a batch than there are slots.
    for slot in [4, u64::MAX] {
        let mut pair = Pair::new();
        for slot in [0, 1, 2, 3, slot] {
            pair.guest.post(evict(slot));
        }
        assert_eq!(pair.fault().len(), 6);
    }
    let guest = Guest::new();
    guest.set_u32(ring::AT_SLOTS, 0);
    let mut notices = Notices::default();
    notices.attach(guest.ram.clone(), HEADER, NONCE).unwrap();
    let notebook = Notebook::default();
    let mut pair = Pair {
        guest,
        notices,
        notebook,
    };
    pair.guest.post(evict(0));
    assert_eq!(pair.fault().len(), 2, "a ring without slots");
}

#[test]
fn contents_without_a_slot_are_those_of_the_frame() {
    for flags in [0, ring::LAZY] {
        contents_of_the_frame(flags);
    }
}

/// In a ring with these flags.
fn contents_of_the_frame(flags: u32) {
    let guest = Guest::new();
    guest.set_u32(ring::AT_FLAGS, flags);
    guest.ram.write(HIGH, &[42]).unwrap();
    let mut notices = Notices::default();
    notices.attach(guest.ram.clone(), HEADER, NONCE).unwrap();
    let notebook = Notebook::default();
    let mut pair = Pair {
        guest,
        notices,
        notebook,
    };
    let frame = HIGH / PAGE_BYTES as u64;
    pair.guest.post(Record::new(record::EVICT, frame));
    pair.guest.post(Record::new(record::RELEASE, frame));
    assert_eq!(
        pair.drain().1,
        [
            SinkCall::Notice(Notice::Evict { frame }, Some(42)),
            SinkCall::Notice(Notice::Release { frame }, None)
        ]
    );
}

#[test]
fn a_ring_that_cannot_be_is_refused() {
    type Change = fn(&Guest);
    let cases: &[(&str, Change, AttachError)] = &[
        ("magic", |g| g.set(ring::AT_MAGIC, 1), AttachError::NotARing),
        (
            "version",
            |g| g.set_u32(ring::AT_VERSION, 2),
            AttachError::Version(2),
        ),
        ("nonce", |g| g.set(ring::AT_NONCE, 1), AttachError::Nonce),
        (
            "odd chunk",
            |g| g.set_u32(ring::AT_CHUNK_BYTES, 12288),
            AttachError::Sizes,
        ),
        (
            "small chunk",
            |g| g.set_u32(ring::AT_CHUNK_BYTES, 2048),
            AttachError::Sizes,
        ),
        (
            "no chunk size",
            |g| g.set_u32(ring::AT_CHUNK_BYTES, 0),
            AttachError::Sizes,
        ),
        (
            "odd records",
            |g| g.set_u32(ring::AT_RECORDS, 255),
            AttachError::Sizes,
        ),
        (
            "no records",
            |g| g.set_u32(ring::AT_RECORDS, 0),
            AttachError::Sizes,
        ),
        (
            "records beyond the chunks",
            |g| g.set_u32(ring::AT_RECORDS, 512),
            AttachError::Sizes,
        ),
        (
            "too many records",
            |g| {
                g.set_u32(ring::AT_RECORDS, 1 << 31);
                g.set_u32(ring::AT_CHUNK_BYTES, 1 << 31);
                g.set_u32(ring::AT_CHUNKS, 480);
            },
            AttachError::Sizes,
        ),
        (
            "odd slots",
            |g| g.set_u32(ring::AT_SLOTS, 3),
            AttachError::Sizes,
        ),
        (
            "slots beyond the chunks",
            |g| g.set_u32(ring::AT_SLOTS, 8),
            AttachError::Sizes,
        ),
        (
            "too few chunks",
            |g| g.set_u32(ring::AT_CHUNKS, 2),
            AttachError::Sizes,
        ),
        (
            "too many chunks",
            |g| g.set_u32(ring::AT_CHUNKS, 481),
            AttachError::Sizes,
        ),
        (
            "flags",
            |g| g.set_u32(ring::AT_FLAGS, 2),
            AttachError::Sizes,
        ),
        (
            "an odd chunk address",
            |g| g.set(ring::AT_CHUNK, 0x10_010),
            AttachError::Sizes,
        ),
        (
            "a chunk in no RAM",
            |g| g.set(ring::AT_CHUNK + 16, RAM_BYTES),
            AttachError::OutsideRam,
        ),
        (
            "a chunk half in RAM",
            |g| g.set(ring::AT_CHUNK, RAM_BYTES - CHUNK_BYTES / 2),
            AttachError::OutsideRam,
        ),
        (
            "a chunk at the end",
            |g| g.set(ring::AT_CHUNK, u64::MAX - 4095),
            AttachError::OutsideRam,
        ),
        (
            "head",
            |g| g.set(ring::AT_HEAD, 257),
            AttachError::Positions,
        ),
        ("tail", |g| g.set(ring::AT_TAIL, 1), AttachError::Positions),
        (
            "slot tail",
            |g| g.set(ring::AT_SLOT_TAIL, u64::MAX),
            AttachError::Positions,
        ),
        (
            "wrapping",
            |g| {
                g.set(ring::AT_TAIL, u64::MAX);
                g.set(ring::AT_HEAD, u64::MAX);
            },
            AttachError::Positions,
        ),
    ];
    for (name, change, error) in cases {
        let guest = Guest::new();
        change(&guest);
        let mut notices = Notices::default();
        let attached = notices.attach(guest.ram.clone(), HEADER, NONCE);
        assert_eq!(attached, Err(*error), "{name}");
        assert!(!notices.stats().attached, "{name}");
        assert_eq!(guest.get(ring::AT_ATTACHED), 0, "{name}");
    }
    let guest = Guest::new();
    let mut notices = Notices::default();
    for address in [
        HEADER + 8,
        RAM_BYTES,
        RAM_BYTES - 8,
        u64::MAX,
        u64::MAX - 4095,
    ] {
        assert!(notices.attach(guest.ram.clone(), address, NONCE).is_err());
    }
    guest.set(ring::AT_NONCE, 0);
    let attached = notices.attach(guest.ram.clone(), HEADER, 0);
    assert_eq!(attached, Err(AttachError::Nonce));
}

#[test]
fn another_reader_goes_on_where_the_first_one_stopped() {
    let mut pair = Pair::new();
    pair.guest.put(1, 0, &[1; PAGE_BYTES]);
    pair.drain();
    pair.guest.put(1, 1, &[2; PAGE_BYTES]);
    let mut second = Notices::default();
    second
        .attach(pair.guest.ram.clone(), HEADER, NONCE)
        .unwrap();
    let mut third = Notices::default();
    let drained = second.drain(&mut pair.notebook.clone(), &mut pair.notebook.clone());
    assert_eq!(drained, DrainResult::Records);
    assert_eq!(pair.notebook.take(), [SinkCall::Put(1, 1, 2)]);
    // One that died between its two words.
    pair.guest.set(ring::AT_SLOT_TAIL, 1);
    pair.guest.put(1, 2, &[3; PAGE_BYTES]);
    third.attach(pair.guest.ram.clone(), HEADER, NONCE).unwrap();
    third.drain(&mut pair.notebook.clone(), &mut pair.notebook.clone());
    assert_eq!(pair.notebook.take(), [SinkCall::Put(1, 2, 3)]);
}

#[test]
fn memory_that_is_a_ring_no_more_is_not_written() {
    let mut pair = Pair::new();
    pair.guest.post(Record::new(record::ADD, 1));
    pair.guest.set(ring::AT_NONCE, 1);
    assert_eq!(pair.fault().len(), 2);
    assert_eq!(pair.guest.get(ring::AT_TAIL), 0);
    assert_eq!(pair.guest.get(ring::AT_ATTACHED), NONCE, "left alone");
    let mut pair = Pair::new();
    pair.notices.abandon();
    assert_eq!(pair.guest.get(ring::AT_ATTACHED), NONCE, "left alone");
    let mut pair = Pair::new();
    pair.notices.detach();
    assert_eq!(pair.guest.get(ring::AT_ATTACHED), 0);
}

#[test]
fn ram_that_is_mapped_anew_keeps_its_ring_if_it_has_it() {
    let mut pair = Pair::new();
    let same: Arc<dyn plimsoll_disk::RingMemory> = Arc::new(Ram(pair.guest.ram.0.clone()));
    assert!(pair.notices.remap(&same));
    pair.guest.post(Record::new(record::ADD, 1));
    assert_eq!(pair.drain().1, [add(1)]);
    let range = [(vm_memory::GuestAddress(0), RAM_BYTES as usize)];
    let less = vm_memory::GuestMemoryMmap::from_ranges(&range).unwrap();
    let less: Arc<dyn plimsoll_disk::RingMemory> = Arc::new(Ram(less));
    assert!(!pair.notices.remap(&less));
    assert_eq!(pair.notices.stats().faults, 1);
    assert!(pair.notices.remap(&less), "no ring, nothing to lose");
}

proptest! {
    /// In whatever way posts and drains alternate, records come out in the order in which they went in.
    #[test]
    fn a_ring_is_a_queue(steps in proptest::collection::vec((0u8..8, 0u64..100), 1..1500)) {
        let mut pair = Pair::new();
        let mut twin = VecDeque::new();
        for (number, (kind, page)) in steps.into_iter().enumerate() {
            let byte = (number % 251) as u8;
            let guest = &mut pair.guest;
            match kind {
                0..3 if guest.has_room() => {
                    guest.post(Record::new(record::ADD, page));
                    twin.push_back(add(page));
                }
                3..5 if guest.has_room() && guest.has_slot() => {
                    guest.put(2, page, &[byte; PAGE_BYTES]);
                    twin.push_back(SinkCall::Put(2, page, byte));
                }
                5 if guest.has_room() => {
                    guest.flush(3, page, 9);
                    twin.push_back(SinkCall::Flush(3, page, 9));
                }
                6 => {
                    guest.lose(1);
                    let (_, told) = pair.drain();
                    let expected = std::iter::once(SinkCall::ForgetFrames)
                        .chain(twin.drain(..))
                        .chain([SinkCall::ForgetBlocks]);
                    prop_assert!(told.into_iter().eq(expected));
                }
                _ => prop_assert!(pair.drain().1.into_iter().eq(twin.drain(..))),
            }
        }
        prop_assert!(pair.drain().1.into_iter().eq(twin));
        prop_assert_eq!(pair.notices.stats().faults, 0);
    }
}
