//! What the engine submits, when, and what it counts. That its answers are right is tested against models, in `tests/`.

use std::sync::Mutex;

use super::*;
use crate::{OutsideRam, Segment, WriteErrorAction, WriteMode};

const DISK: DiskNumber = DiskNumber(1);
const MIB: u64 = 1 << 20;

/// Memory of any size, in which each page holds the lowest byte of its number.
struct Ram;

impl GuestData for Ram {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        for (at, byte) in (address..).zip(bytes) {
            *byte = (at / PAGE_BYTES as u64).to_le_bytes()[0];
        }
        Ok(())
    }

    fn write(&self, _address: u64, _bytes: &[u8]) -> Result<(), OutsideRam> {
        Ok(())
    }

    fn is_ram(&self, _frame: u64) -> bool {
        true
    }
}

/// The same, where nothing can be written.
struct Lost;

impl GuestData for Lost {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        Ram.read(address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        let bytes = bytes.len();
        Err(OutsideRam { address, bytes })
    }

    fn is_ram(&self, frame: u64) -> bool {
        Ram.is_ram(frame)
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Observed {
    missed: u64,
    evicted: u64,
    released: u64,
    cleared: u64,
}

impl Observer for Arc<Mutex<Observed>> {
    fn missed(&mut self, _page: Location) {
        self.lock().unwrap().missed += 1;
    }
    fn evicted(&mut self, _page: Location) {
        self.lock().unwrap().evicted += 1;
    }
    fn released(&mut self, _page: Location) {
        self.lock().unwrap().released += 1;
    }
    fn cleared(&mut self) {
        self.lock().unwrap().cleared += 1;
    }
}

fn options(mode: CacheMode, write: WriteMode, dirty_pages_max: u64) -> EngineOptions {
    EngineOptions {
        mode,
        cache_bytes: 64 * MIB,
        cache_bytes_max: 64 * MIB,
        write,
        dirty_pages_max,
        dirty_age_max: Duration::from_secs(1),
        ..EngineOptions::default()
    }
}

/// Guest memory from the start of a page on, and as much as these blocks.
fn pages(frame: u64, blocks: u64) -> Vec<Segment> {
    vec![Segment {
        address: frame * PAGE_BYTES as u64,
        bytes: u32::try_from(blocks * PAGE_BYTES as u64).unwrap(),
    }]
}

struct Guest {
    engine: Engine,
    observed: Arc<Mutex<Observed>>,
    requests: u64,
}

impl Guest {
    fn new(options: EngineOptions) -> Self {
        let observed = Arc::<Mutex<Observed>>::default();
        let engine = Engine::new(options, Some(Box::new(Arc::clone(&observed)))).unwrap();
        Self {
            engine,
            observed,
            requests: 0,
        }
    }

    fn delayed(dirty_pages_max: u64) -> Self {
        Self::new(options(
            CacheMode::Exclusive,
            WriteMode::Delayed,
            dirty_pages_max,
        ))
    }

    fn submit(&mut self, operation: Operation) {
        self.requests += 1;
        self.engine.submit(Request {
            disk: DISK,
            tag: Tag(self.requests),
            operation,
            ram: Arc::new(Ram),
        });
    }

    /// Reads blocks into the frames of the same numbers.
    fn read(&mut self, block: u64, blocks: u64) {
        self.submit(Operation::Read {
            offset: block * PAGE_BYTES as u64,
            segments: pages(block, blocks),
        });
    }

    fn write(&mut self, block: u64, blocks: u64) {
        self.submit(Operation::Write {
            offset: block * PAGE_BYTES as u64,
            segments: pages(block, blocks),
            durable: false,
        });
    }

    fn orders(&mut self) -> Vec<Submission> {
        std::iter::from_fn(|| self.engine.next_submission()).collect()
    }

    /// First block and number of blocks of each transfer.
    fn transfers(orders: &[Submission]) -> Vec<(u64, usize)> {
        let transfers = orders.iter().map(|order| match &order.action {
            Action::Read { offset, buffer } | Action::Write { offset, buffer } => {
                (offset / PAGE_BYTES as u64, buffer.len() / PAGE_BYTES)
            }
            _ => panic!("no transfer"),
        });
        transfers.collect()
    }

    fn carry_out(&mut self, order: Submission, result: io::Result<()>) {
        let buffer = match order.action {
            Action::Read { buffer, .. } | Action::Write { buffer, .. } => Some(buffer),
            _ => None,
        };
        self.engine.carried_out(order.id, result, buffer);
    }

    fn carry_out_all(&mut self) {
        while let Some(order) = self.engine.next_submission() {
            self.carry_out(order, Ok(()));
        }
    }

    fn turn(&mut self, millis: u64) {
        self.engine.turn(Duration::from_millis(millis));
    }

    /// The turns, ten a second for 20 s, at which something is submitted, all of which fails.
    fn repeated(&mut self) -> Vec<u64> {
        let mut repeated = Vec::new();
        for tenths in 0..200 {
            self.turn(tenths * 100);
            for order in self.orders() {
                repeated.push(tenths);
                self.carry_out(order, Err(io::Error::other("broken")));
            }
        }
        repeated
    }

    fn completed(&mut self) -> Vec<(u64, Status)> {
        let completed = std::iter::from_fn(|| self.engine.next_completed());
        completed.map(|done| (done.tag.0, done.status)).collect()
    }

    /// Evicts a frame with the contents that it was written with.
    fn evict(&mut self, frame: u64) {
        let page = [frame.to_le_bytes()[0]; PAGE_BYTES];
        self.engine
            .notice(Notice::Evict { frame }, Some(Contents::Copied(&page)));
    }
}

#[test]
fn requests_are_submitted_in_mebibytes_and_counted_by_block() {
    let mut guest = Guest::new(options(CacheMode::Exclusive, WriteMode::Through, 0));
    guest.write(3, 600);
    let orders = guest.orders();
    let expected = [(3, 256), (259, 256), (515, 88)];
    assert_eq!(Guest::transfers(&orders), expected);
    for order in orders {
        guest.carry_out(order, Ok(()));
    }
    guest.read(3, 600);
    let orders = guest.orders();
    assert_eq!(Guest::transfers(&orders), expected);
    for order in orders {
        guest.carry_out(order, Ok(()));
    }
    // The last sector of a block, all of the next one in two places, and the first sector of a third.
    let segment = |address, bytes| Segment { address, bytes };
    let segments = vec![
        segment(512, 512),
        segment(3 * 4096, 2048),
        segment(5 * 4096, 2048 + 512),
    ];
    guest.submit(Operation::Read {
        offset: 2 * 4096 - 512,
        segments: segments.clone(),
    });
    guest.submit(Operation::Write {
        offset: 2 * 4096 - 512,
        segments,
        durable: false,
    });
    // One block, at an address that is no page's.
    guest.submit(Operation::Read {
        offset: 4096,
        segments: vec![segment(512, 4096)],
    });
    guest.carry_out_all();
    let stats = guest.engine.stats();
    let bytes = 600 * 4096 + 4096 + 1024;
    let expected = EngineStats {
        cache_bytes: stats.cache_bytes,
        // All but those of the block in two places.
        mapped_frames: 598,
        read_blocks: 602,
        written_blocks: 601,
        scattered_blocks: 3,
        read_parts: 2,
        written_parts: 2,
        storage_reads: 5,
        storage_read_bytes: bytes + 4096,
        storage_writes: 4,
        storage_written_bytes: bytes,
        ..EngineStats::default()
    };
    assert_eq!(stats, expected);
    let observed = Observed {
        missed: 602,
        released: 603,
        ..Observed::default()
    };
    assert_eq!(*guest.observed.lock().unwrap(), observed);
    assert_eq!(guest.completed().len(), 5);
}

#[test]
fn a_request_says_whether_it_read_storage() {
    let mut guest = Guest::delayed(8);
    guest.write(5, 1);
    guest.read(5, 1);
    guest.read(6, 1);
    guest.carry_out_all();
    let done = std::iter::from_fn(|| guest.engine.next_completed());
    let read: Vec<_> = done.map(|done| (done.tag.0, done.read_storage)).collect();
    assert_eq!(read, [(1, false), (2, false), (3, true)]);
    assert_eq!(guest.engine.stats().hits, 1);
}

#[test]
fn a_frame_to_which_a_block_of_the_cache_was_not_copied_does_not_hold_it() {
    let mut guest = Guest::new(EngineOptions {
        hash_check: false,
        ..options(CacheMode::Exclusive, WriteMode::Through, 0)
    });
    guest.write(5, 1);
    guest.carry_out_all();
    guest.evict(5);
    assert_eq!(guest.engine.stats().cached_pages, 1);
    guest.engine.submit(Request {
        disk: DISK,
        tag: Tag(9),
        operation: Operation::Read {
            offset: 5 * PAGE_BYTES as u64,
            segments: pages(7, 1),
        },
        ram: Arc::new(Lost),
    });
    assert_eq!(guest.completed(), [(1, Status::Ok), (9, Status::IoError)]);
    guest.evict(7);
    let stats = guest.engine.stats();
    assert_eq!((stats.cached_pages, stats.refused_unknown), (0, 1));
}

#[test]
fn a_dirty_block_is_written_when_it_is_too_old_and_not_before() {
    let mut guest = Guest::delayed(8);
    guest.turn(1000);
    guest.write(10, 1);
    guest.turn(2000);
    assert_eq!(guest.completed(), [(1, Status::Ok)]);
    assert!(guest.orders().is_empty());
    assert_eq!(guest.engine.dirty_pages(DISK), 1);
    guest.turn(2001);
    let orders = guest.orders();
    assert_eq!(Guest::transfers(&orders), [(10, 1)]);
    guest.carry_out(orders.into_iter().next().unwrap(), Ok(()));
    let stats = guest.engine.stats();
    assert_eq!((stats.delayed_blocks, stats.written_back_blocks), (1, 1));
    assert_eq!((stats.dirty_pages, stats.dirty_pages_max), (0, 8));
}

#[test]
fn half_of_the_dirty_pages_are_kept_back_and_no_more_than_all_are_dirty() {
    let mut guest = Guest::delayed(8);
    for block in [0, 2, 4, 6] {
        guest.write(block, 1);
    }
    assert!(guest.orders().is_empty());
    let mut orders = Vec::new();
    for (block, written) in [(8, 0), (10, 2), (12, 4), (14, 6)] {
        guest.write(block, 1);
        let order = guest.orders();
        assert_eq!(Guest::transfers(&order), [(written, 1)]);
        orders.extend(order);
    }
    // The log is full: but for blocks that are in it, writes go to storage.
    guest.write(8, 1);
    assert!(guest.orders().is_empty());
    guest.write(16, 1);
    assert_eq!(Guest::transfers(&guest.orders()), [(16, 1)]);
    assert_eq!(guest.engine.stats().delayed_blocks, 9);
    for order in orders {
        guest.carry_out(order, Ok(()));
    }
    assert!(guest.orders().is_empty());
    assert_eq!(guest.engine.stats().dirty_pages, 4);
    // A cache that is switched off keeps nothing back, and delays nothing.
    guest.engine.disabled = Some("for a test".into());
    guest.write(20, 1);
    let mut transfers = Guest::transfers(&guest.orders());
    transfers.sort_unstable();
    assert_eq!(transfers, [8, 10, 12, 14, 20].map(|block| (block, 1)));
}

#[test]
fn neighbours_are_written_back_together_and_after_a_failure_alone() {
    let mut guest = Guest::delayed(400);
    guest.write(0, 150);
    guest.write(200, 1);
    assert!(guest.orders().is_empty());
    guest.submit(Operation::Flush);
    let mut orders = guest.orders();
    let expected = [(0, 64), (64, 64), (128, 22), (200, 1)];
    assert_eq!(Guest::transfers(&orders), expected);
    let second = orders.remove(1);
    for order in orders {
        guest.carry_out(order, Ok(()));
    }
    guest.carry_out(second, Err(io::Error::other("broken")));
    let mut orders = guest.orders();
    let alone: Vec<_> = (64..128).map(|block| (block, 1)).collect();
    assert_eq!(Guest::transfers(&orders), alone);
    // Nobody was told, since all of them may be written now; but one fails by itself.
    assert_eq!(guest.engine.stats().write_back_errors, 0);
    let last = orders.pop().unwrap();
    for order in orders {
        guest.carry_out(order, Ok(()));
    }
    assert_eq!(guest.completed(), [(1, Status::Ok), (2, Status::Ok)]);
    let full = io::ErrorKind::StorageFull;
    guest.carry_out(last, Err(full.into()));
    assert_eq!(guest.completed(), [(3, Status::IoError)]);
    let stats = guest.engine.stats();
    assert_eq!((stats.write_back_errors, stats.storage_errors), (1, 2));
    assert_eq!((stats.written_back_blocks, stats.dirty_pages), (150, 1));
    let errors = StorageErrors {
        no_space: 1,
        io: 1,
        last: Some(io::Error::from(full).to_string()),
    };
    assert_eq!(guest.engine.storage_errors(DISK), (errors, 1));
    // A neighbour that is dirtied now is not written with it.
    guest.write(128, 1);
    guest.submit(Operation::Flush);
    let orders = guest.orders();
    assert_eq!(Guest::transfers(&orders), [(127, 1), (128, 1)]);
    for order in orders {
        guest.carry_out(order, Ok(()));
    }
    guest.carry_out_all();
    assert_eq!(guest.completed(), [(4, Status::Ok), (5, Status::Ok)]);
    assert_eq!(guest.engine.storage_errors(DISK).1, 0);
}

#[test]
fn at_most_1024_blocks_are_written_back_at_a_time() {
    let mut guest = Guest::delayed(4000);
    guest.write(0, 1200);
    guest.submit(Operation::Flush);
    let mut orders = guest.orders();
    assert_eq!(orders.len(), 16);
    guest.carry_out(orders.remove(0), Ok(()));
    assert_eq!(Guest::transfers(&guest.orders()), [(1024, 64)]);
}

#[test]
fn what_failed_is_repeated_at_growing_intervals_until_it_succeeds() {
    let mut guest = Guest::new(EngineOptions {
        write_error: WriteErrorAction::Stop,
        ..options(CacheMode::Exclusive, WriteMode::Through, 0)
    });
    guest.engine.attend(DISK, true);
    let broken = || Err(io::Error::other("broken"));
    guest.write(1, 1);
    let first = guest.orders().remove(0);
    guest.carry_out(first, broken());
    assert!(guest.engine.wants_pause());
    assert_eq!(guest.repeated(), [0, 1, 3, 7, 15, 31, 63, 113, 163]);
    // When something else fails, both are repeated at once, and when one succeeds, the other.
    guest.write(2, 1);
    let second = guest.orders().remove(0);
    guest.carry_out(second, broken());
    guest.turn(20_000);
    let mut orders = guest.orders();
    assert_eq!(Guest::transfers(&orders), [(1, 1), (2, 1)]);
    guest.carry_out(orders.remove(0), broken());
    guest.turn(20_050);
    assert!(guest.orders().is_empty());
    guest.carry_out(orders.remove(0), Ok(()));
    guest.turn(20_060);
    let mut orders = guest.orders();
    assert_eq!(Guest::transfers(&orders), [(1, 1)]);
    assert!(guest.engine.wants_pause(), "until it is done");
    guest.carry_out(orders.remove(0), Ok(()));
    assert!(!guest.engine.wants_pause());
    assert_eq!(guest.completed(), [(2, Status::Ok), (1, Status::Ok)]);
    assert_eq!(guest.engine.stats().storage_errors, 12);
    assert_eq!(guest.engine.storage_errors(DISK).0.io, 12);
}

#[test]
fn the_vm_is_paused_for_a_kind_of_failure_and_not_without_a_guest() {
    for (action, kind, pauses) in [
        (WriteErrorAction::Report, io::ErrorKind::StorageFull, false),
        (WriteErrorAction::NoSpace, io::ErrorKind::StorageFull, true),
        (
            WriteErrorAction::NoSpace,
            io::ErrorKind::QuotaExceeded,
            true,
        ),
        (WriteErrorAction::NoSpace, io::ErrorKind::Other, false),
        (WriteErrorAction::Stop, io::ErrorKind::Other, true),
    ] {
        for attended in [true, false] {
            let mut guest = Guest::new(EngineOptions {
                write_error: action,
                ..options(CacheMode::Exclusive, WriteMode::Through, 0)
            });
            guest.engine.attend(DISK, attended);
            guest.engine.attend(DiskNumber(2), true);
            guest.write(1, 1);
            let order = guest.orders().remove(0);
            guest.carry_out(order, Err(kind.into()));
            let pauses = pauses && attended;
            assert_eq!(guest.engine.stats().wants_pause, pauses, "{action:?}");
            assert_eq!(guest.completed().len(), usize::from(!pauses));
            guest.engine.attend(DiskNumber(2), false);
            assert_eq!(guest.engine.wants_pause(), pauses, "another one has gone");
            guest.engine.attend(DISK, false);
            assert!(!guest.engine.wants_pause());
            let failed = guest.completed();
            assert_eq!(failed.len(), usize::from(pauses));
            assert!(failed.iter().all(|(_, status)| *status == Status::IoError));
        }
    }
}

/// A guest that is there, whose writes are delayed.
fn delayed(write_error: WriteErrorAction) -> Guest {
    let mut guest = Guest::new(EngineOptions {
        write_error,
        ..options(CacheMode::Exclusive, WriteMode::Delayed, 8)
    });
    guest.engine.attend(DISK, true);
    guest
}

#[test]
fn a_vm_halts_for_a_dirty_block_until_it_is_written() {
    let mut guest = delayed(WriteErrorAction::Stop);
    guest.write(1, 1);
    guest.submit(Operation::Flush);
    let order = guest.orders().remove(0);
    guest.carry_out(order, Err(io::Error::other("broken")));
    guest.turn(0);
    assert!(guest.engine.wants_pause() && guest.engine.flushes_wait(DISK));
    assert_eq!(guest.completed(), [(1, Status::Ok)], "the flush waits");
    guest.carry_out_all();
    assert_eq!(guest.completed(), [(2, Status::Ok)]);
    guest.turn(10);
    assert!(!guest.engine.wants_pause() && !guest.engine.flushes_wait(DISK));
    // The guest goes while another one fails: its flush does, too.
    guest.write(1, 1);
    guest.submit(Operation::Flush);
    let order = guest.orders().remove(0);
    guest.carry_out(order, Err(io::Error::other("broken")));
    guest.engine.attend(DISK, false);
    assert!(!guest.engine.wants_pause());
    assert_eq!(guest.completed(), [(3, Status::Ok), (4, Status::IoError)]);
}

#[test]
fn a_vm_halts_for_blocks_without_space_and_not_for_others_that_fail() {
    let setup = || {
        let mut guest = delayed(WriteErrorAction::NoSpace);
        guest.write(1, 1);
        guest.write(9, 1);
        guest.submit(Operation::Flush);
        let orders = guest.orders();
        assert_eq!(Guest::transfers(&orders), [(1, 1), (9, 1)]);
        (guest, orders)
    };
    let full = || Err(io::ErrorKind::StorageFull.into());
    let broken = || Err(io::Error::other("broken"));
    let has_failed = |guest: &mut Guest| {
        assert!(!guest.engine.wants_pause());
        let flush = guest.completed().pop().unwrap();
        assert_eq!(flush, (3, Status::IoError));
    };
    // The same block then fails in another way.
    let (mut guest, mut orders) = setup();
    guest.carry_out(orders.remove(1), Ok(()));
    guest.carry_out(orders.remove(0), full());
    guest.turn(1000);
    assert!(guest.engine.wants_pause());
    let order = guest.orders().remove(0);
    guest.carry_out(order, broken());
    has_failed(&mut guest);
    // It is written, or discarded, and another one fails.
    for is_discarded in [false, true] {
        let (mut guest, mut orders) = setup();
        guest.carry_out(orders.remove(0), full());
        guest.carry_out(orders.remove(0), broken());
        assert!(guest.engine.wants_pause());
        if is_discarded {
            let (offset, bytes) = (PAGE_BYTES as u64, PAGE_BYTES as u64);
            guest.submit(Operation::Discard(vec![ByteRange { offset, bytes }]));
        } else {
            guest.turn(1000);
            let mut orders = guest.orders();
            guest.carry_out(orders.remove(0), Ok(()));
            assert!(guest.completed().iter().all(|done| done.0 != 3));
            guest.carry_out(orders.remove(0), broken());
        }
        assert!(!guest.engine.wants_pause());
        let completed = guest.completed();
        assert!(completed.contains(&(3, Status::IoError)), "{completed:?}");
    }
}

#[test]
fn flushes_are_not_told_of_blocks_that_are_tried_again() {
    let mut guest = delayed(WriteErrorAction::NoSpace);
    guest.write(1, 1);
    guest.write(9, 1);
    guest.submit(Operation::Flush);
    let mut orders = guest.orders();
    guest.carry_out(orders.remove(1), Err(io::Error::other("broken")));
    let completed = guest.completed();
    assert!(completed.contains(&(3, Status::IoError)), "{completed:?}");
    guest.submit(Operation::Flush);
    let mut again = guest.orders();
    assert_eq!(Guest::transfers(&again), [(9, 1)]);
    guest.carry_out(orders.remove(0), Err(io::ErrorKind::StorageFull.into()));
    guest.turn(1000);
    assert!(guest.engine.wants_pause());
    let order = guest.orders().remove(0);
    guest.carry_out(order, Ok(()));
    assert_eq!(guest.completed(), []);
    guest.carry_out(again.remove(0), Ok(()));
    guest.carry_out_all();
    assert_eq!(guest.completed(), [(4, Status::Ok)]);
}

#[test]
fn flushes_wait_for_blocks_that_failed_only_with_others() {
    let mut guest = delayed(WriteErrorAction::Stop);
    let broken = || Err(io::Error::other("broken"));
    guest.write(1, 2);
    guest.submit(Operation::Flush);
    let order = guest.orders().remove(0);
    guest.carry_out(order, broken());
    let mut orders = guest.orders();
    assert_eq!(Guest::transfers(&orders), [(1, 1), (2, 1)]);
    guest.carry_out(orders.remove(0), broken());
    guest.turn(1000);
    assert!(guest.engine.wants_pause());
    // The first is written, and the second one's write is still under way.
    let again = guest.orders().remove(0);
    guest.carry_out(again, Ok(()));
    assert!(!guest.engine.wants_pause());
    assert_eq!(guest.completed(), [(1, Status::Ok)], "the flush waits");
    guest.carry_out(orders.remove(0), Ok(()));
    guest.carry_out_all();
    assert_eq!(guest.completed(), [(2, Status::Ok)]);
}

#[test]
fn pages_are_read_into_the_cache_4096_at_a_time() {
    let mut guest = Guest::new(options(CacheMode::FromStorage, WriteMode::Through, 0));
    guest.read(0, 4097);
    guest.carry_out_all();
    for frame in 0..4097 {
        guest.evict(frame);
    }
    let mut orders = guest.orders();
    assert_eq!(orders.len(), 4096);
    assert_eq!(guest.observed.lock().unwrap().evicted, 4096);
    let stats = guest.engine.stats();
    assert_eq!((stats.refused_other, stats.admitted), (1, 0));
    guest.carry_out(orders.remove(0), Ok(()));
    guest.carry_out(orders.remove(0), Err(io::Error::other("broken")));
    let stats = guest.engine.stats();
    assert_eq!((stats.refused_other, stats.admitted), (2, 1));
    assert_eq!(stats.cached_pages, 1);
    guest.read(5000, 1);
    guest.carry_out_all();
    guest.evict(5000);
    assert_eq!(Guest::transfers(&guest.orders()), [(5000, 1)]);
}

#[test]
fn a_page_that_is_evicted_while_it_is_dirty_comes_from_the_log() {
    for mode in [CacheMode::Exclusive, CacheMode::FromStorage] {
        let mut guest = Guest::new(options(mode, WriteMode::Delayed, 8));
        guest.write(3, 1);
        guest.evict(3);
        assert!(guest.orders().is_empty(), "{mode:?}");
        let stats = guest.engine.stats();
        assert_eq!((stats.admitted, stats.cached_pages), (1, 1), "{mode:?}");
        assert_eq!((stats.evictions, stats.refused_other), (1, 0), "{mode:?}");
    }
}

#[test]
fn the_observer_is_told_of_ranges_of_256_mebibytes_and_not_of_longer_ones() {
    let mut guest = Guest::new(options(CacheMode::Exclusive, WriteMode::Through, 0));
    for (bytes, released) in [
        (256 * MIB, 1 << 16),
        (256 * MIB + 512, 1 << 16),
        (512, (1 << 16) + 1),
    ] {
        guest.submit(Operation::Discard(vec![ByteRange { offset: 0, bytes }]));
        assert_eq!(guest.observed.lock().unwrap().released, released);
    }
    assert_eq!(guest.orders().len(), 3);
    // Nothing is nothing.
    guest.submit(Operation::Discard(vec![ByteRange {
        offset: 0,
        bytes: 0,
    }]));
    assert!(guest.orders().is_empty());
}

#[test]
fn notifications_are_counted_by_kind() {
    let mut guest = Guest::new(options(CacheMode::Exclusive, WriteMode::Through, 0));
    guest.write(0, 8);
    guest.carry_out_all();
    let engine = &mut guest.engine;
    engine.notice(Notice::Release { frame: 0 }, None);
    engine.notice(Notice::Add { frame: 1 }, None);
    engine.notice(Notice::Migrate { frame: 2, to: 100 }, None);
    assert_eq!(engine.stats().mapped_frames, 6);
    engine.notice(Notice::Evict { frame: 3 }, None);
    engine.notice(Notice::Evict { frame: 0 }, None);
    engine.forget_frames();
    let stats = engine.stats();
    assert_eq!(
        (stats.releases, stats.additions, stats.migrations),
        (1, 1, 1)
    );
    assert_eq!((stats.evictions, stats.forgotten), (2, 1));
    assert_eq!((stats.refused_other, stats.refused_unknown), (1, 1));
    assert_eq!(stats.mapped_frames, 0);
}

#[test]
fn a_disk_that_is_forgotten_leaves_the_others_cached() {
    let mut guest = Guest::new(options(CacheMode::Exclusive, WriteMode::Through, 0));
    guest.write(0, 2);
    guest.engine.submit(Request {
        disk: DiskNumber(2),
        tag: Tag(9),
        operation: Operation::Write {
            offset: 0,
            segments: pages(50, 2),
            durable: false,
        },
        ram: Arc::new(Ram),
    });
    guest.carry_out_all();
    guest.evict(0);
    guest.evict(50);
    let stats = guest.engine.stats();
    assert_eq!((stats.cached_pages, stats.mapped_frames), (2, 2));
    guest.engine.forget_disk(DISK);
    let stats = guest.engine.stats();
    assert_eq!((stats.cached_pages, stats.mapped_frames), (1, 1));
    assert_eq!(guest.observed.lock().unwrap().cleared, 1);
}

#[test]
fn a_restored_page_is_served_and_written_alone() {
    let mut guest = Guest::delayed(8);
    let mut log = PagesInMemory::default();
    for block in [4, 5] {
        let location = Location::new(DISK, block);
        log.record(location, &[7; PAGE_BYTES]).unwrap();
    }
    guest.engine.set_dirty_log(Box::new(log));
    for block in [4, 5] {
        assert!(guest.engine.restore(Location::new(DISK, block)));
    }
    assert_eq!(guest.engine.storage_errors(DISK).1, 2);
    guest.turn(0);
    assert_eq!(Guest::transfers(&guest.orders()), [(4, 1), (5, 1)]);
    guest.read(4, 1);
    assert_eq!(guest.completed(), [(1, Status::Ok)]);
    let mut none = Guest::new(options(CacheMode::None, WriteMode::Through, 0));
    assert!(!none.engine.restore(Location::new(DISK, 4)));
}

#[test]
fn a_disk_that_failed_to_sync_fails_all_flushes_until_it_is_accepted() {
    let mut guest = Guest::new(options(CacheMode::None, WriteMode::Through, 0));
    guest.submit(Operation::Flush);
    let order = guest.orders().remove(0);
    guest.carry_out(order, Err(io::Error::other("broken")));
    assert_eq!(guest.completed(), [(1, Status::IoError)]);
    assert_eq!(guest.engine.unsynced().len(), 1);
    guest.submit(Operation::Flush);
    assert!(guest.orders().is_empty());
    assert_eq!(guest.completed(), [(2, Status::IoError)]);
    guest.engine.enable();
    guest.submit(Operation::Flush);
    guest.carry_out_all();
    assert_eq!(guest.completed(), [(3, Status::Ok)]);
    guest.engine.sync_failed(DISK);
    guest.submit(Operation::Flush);
    assert_eq!(guest.completed(), [(4, Status::IoError)]);
    assert_eq!(guest.engine.stats().flushes, 4);
}

#[test]
fn each_refusal_is_counted_by_its_reason() {
    let mut guest = Guest::new(options(CacheMode::Exclusive, WriteMode::Through, 0));
    guest.read(0, 1);
    guest.evict(0);
    assert_eq!(guest.engine.stats().refused_other, 1, "it is being read");
    guest.carry_out_all();
    guest.write(1, 4);
    guest.carry_out_all();
    let engine = &mut guest.engine;
    engine.notice(Notice::Evict { frame: 1 }, None);
    assert_eq!(engine.stats().refused_other, 2, "no contents");
    let other = [0xee; PAGE_BYTES];
    let copied = Some(Contents::Copied(&other));
    engine.notice(Notice::Evict { frame: 2 }, copied);
    assert_eq!(engine.stats().refused_mismatch, 1);
    // The memory of frame 259 is that of frame 3.
    engine.notice(Notice::Migrate { frame: 4, to: 259 }, None);
    engine.notice(Notice::Evict { frame: 259 }, Some(Contents::Lazy(&Ram)));
    assert_eq!(engine.stats().refused_stale, 1);
    engine.notice(Notice::Evict { frame: 3 }, Some(Contents::Lazy(&Ram)));
    assert_eq!(engine.stats().admitted, 1);
    engine.notice(Notice::Evict { frame: 99 }, copied);
    assert_eq!(engine.stats().refused_unknown, 1);
    // A block in two frames.
    guest.write(1, 1);
    guest.carry_out_all();
    guest.submit(Operation::Read {
        offset: 4096,
        segments: pages(50, 1),
    });
    guest.carry_out_all();
    guest.evict(1);
    let stats = guest.engine.stats();
    assert_eq!((stats.refused_not_newest, stats.admitted), (1, 1));
    assert_eq!((stats.refused_other, stats.refused_unknown), (2, 1));
    assert_eq!(guest.observed.lock().unwrap().evicted, 1);
}

#[test]
fn pages_that_were_read_are_admitted_and_served_once_and_a_discard_takes_its_own() {
    let mut guest = Guest::new(EngineOptions {
        verify: true,
        ..options(CacheMode::Exclusive, WriteMode::Through, 0)
    });
    let evict = |guest: &mut Guest, frame| {
        let page = [0; PAGE_BYTES];
        let contents = Some(Contents::Copied(&page));
        guest.engine.notice(Notice::Evict { frame }, contents);
    };
    guest.read(1, 5);
    guest.carry_out_all();
    for frame in 1..6 {
        evict(&mut guest, frame);
    }
    assert_eq!(guest.engine.stats().cached_pages, 5);
    guest.submit(Operation::Discard(vec![ByteRange {
        offset: 3 * 4096,
        bytes: 512,
    }]));
    guest.carry_out_all();
    assert_eq!(guest.engine.stats().cached_pages, 4);
    // Each page that is served is compared with storage, here alike and then not.
    for (block, wrong) in [(2, 0), (4, 1)] {
        guest.read(block, 1);
        let mut order = guest.orders().remove(0);
        let Action::Read { offset, buffer } = &mut order.action else {
            panic!("no read")
        };
        assert_eq!((*offset, buffer.len()), (block * 4096, 4096));
        buffer.fill(u8::from(wrong == 1));
        guest.carry_out(order, Ok(()));
        let stats = guest.engine.stats();
        assert_eq!((stats.wrong_served, stats.hits), (wrong, 1 + wrong));
    }
    assert_eq!(guest.engine.stats().cached_pages, 2);
    // What could not be read differs in nothing.
    guest.read(5, 1);
    let order = guest.orders().remove(0);
    guest.carry_out(order, Err(io::Error::other("broken")));
    assert_eq!(guest.engine.stats().wrong_served, 1);
    guest.engine.options.verify = false;
    guest.read(1, 1);
    assert!(guest.orders().is_empty());
}

#[test]
fn a_write_is_delayed_only_if_it_is_whole_and_need_not_be_durable() {
    for (mode, bytes, durable, dirty) in [
        (WriteMode::Delayed, 4096, false, 1),
        (WriteMode::Delayed, 4096, true, 0),
        (WriteMode::Delayed, 512, false, 0),
        (WriteMode::Through, 4096, false, 0),
    ] {
        let mut guest = Guest::new(options(CacheMode::Exclusive, mode, 8));
        guest.submit(Operation::Write {
            offset: 4096,
            segments: vec![Segment { address: 0, bytes }],
            durable,
        });
        assert_eq!(guest.engine.dirty_pages(DISK), dirty, "{bytes} {durable}");
        assert_eq!(guest.orders().len() as u64, 1 - dirty);
    }
}

#[test]
fn a_block_that_cannot_be_written_fails_the_flushes_of_its_disk_alone() {
    let mut guest = Guest::delayed(8);
    guest.write(1, 1);
    let second = |operation| Request {
        disk: DiskNumber(2),
        tag: Tag(9),
        operation,
        ram: Arc::new(Ram),
    };
    guest.engine.submit(second(Operation::Write {
        offset: 0,
        segments: pages(9, 1),
        durable: false,
    }));
    guest.submit(Operation::Flush);
    guest.engine.submit(second(Operation::Flush));
    let mut orders = guest.orders();
    assert_eq!(Guest::transfers(&orders), [(1, 1), (0, 1)]);
    let broken = || Err(io::Error::other("broken"));
    guest.carry_out(orders.remove(0), broken());
    let done = [(1, Status::Ok), (9, Status::Ok), (2, Status::IoError)];
    assert_eq!(guest.completed(), done);
    guest.carry_out(orders.remove(0), Ok(()));
    guest.carry_out_all();
    assert_eq!(guest.completed(), [(9, Status::Ok)]);
    // It is tried again like a request that waits, and at once when another one fails as well.
    assert_eq!(guest.repeated(), [0, 1, 3, 7, 15, 31, 63, 113, 163]);
    guest.write(4, 1);
    guest.submit(Operation::Flush);
    for order in guest.orders() {
        guest.carry_out(order, broken());
    }
    guest.turn(20_000);
    assert_eq!(Guest::transfers(&guest.orders()), [(1, 1), (4, 1)]);
}

#[test]
fn ranges_of_a_disk_change_dirty_blocks_of_that_disk_alone() {
    let mut guest = Guest::delayed(8);
    guest.write(7, 1);
    guest.engine.submit(Request {
        disk: DiskNumber(2),
        tag: Tag(9),
        operation: Operation::Write {
            offset: 7 * 4096,
            segments: pages(9, 1),
            durable: false,
        },
        ram: Arc::new(Ram),
    });
    let ranges = || {
        vec![ByteRange {
            offset: 0,
            bytes: 100 * 4096,
        }]
    };
    guest.submit(Operation::WriteZeroes {
        ranges: ranges(),
        unmap: false,
        durable: false,
    });
    for (disk, byte) in [(DISK, 0), (DiskNumber(2), 9)] {
        let mut page = [1; PAGE_BYTES];
        let location = Location::new(disk, 7);
        guest.engine.log.read(location, &mut page).unwrap();
        assert_eq!(page, [byte; PAGE_BYTES]);
    }
    guest.submit(Operation::Discard(ranges()));
    let dirty = [DISK, DiskNumber(2)].map(|disk| guest.engine.dirty_pages(disk));
    assert_eq!(dirty, [0, 1]);
}

/// A log that takes nothing.
struct BrokenLog;

impl DirtyPages for BrokenLog {
    fn record(&mut self, _: Location, _: &Page) -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }

    fn read(&mut self, _: Location, _: &mut Page) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn clean(&mut self, _: Location) {}
}

#[test]
fn what_the_log_does_not_take_goes_to_storage_and_is_counted() {
    let mut guest = Guest::delayed(8);
    guest.engine.set_dirty_log(Box::new(BrokenLog));
    guest.write(1, 2);
    assert_eq!(Guest::transfers(&guest.orders()), [(1, 2)]);
    let stats = guest.engine.stats();
    assert_eq!((stats.storage_errors, stats.delayed_blocks), (2, 0));
}

#[test]
fn a_cache_switches_itself_off_with_the_64th_page_of_other_contents() {
    let mut guest = Guest::new(options(CacheMode::Exclusive, WriteMode::Through, 0));
    guest.write(0, 66);
    guest.carry_out_all();
    guest.evict(65);
    let other = [0xee; PAGE_BYTES];
    for frame in 0..64 {
        let stats = guest.engine.stats();
        assert_eq!((stats.disabled, stats.cached_pages), (None, 1));
        let contents = Some(Contents::Copied(&other));
        guest.engine.notice(Notice::Evict { frame }, contents);
    }
    guest.evict(64);
    let stats = guest.engine.stats();
    assert!(stats.disabled.unwrap().starts_with("64 of the last 65 "));
    assert_eq!((stats.cached_pages, stats.mapped_frames), (0, 0));
    assert_eq!((stats.evictions, stats.admitted), (66, 1));
    guest.engine.enable();
    guest.write(0, 1);
    guest.carry_out_all();
    guest.evict(0);
    assert_eq!(guest.engine.stats().cached_pages, 1);
}

#[test]
fn pages_that_were_not_copied_do_not_outweigh_those_of_other_contents() {
    let mut guest = Guest::new(options(CacheMode::Exclusive, WriteMode::Through, 0));
    for _ in 0..1280 {
        guest.write(64, 1);
        guest.carry_out_all();
        let contents = Some(Contents::Lazy(&Ram));
        guest.engine.notice(Notice::Evict { frame: 64 }, contents);
    }
    guest.write(0, 64);
    guest.carry_out_all();
    let other = [0xee; PAGE_BYTES];
    for frame in 0..64 {
        assert_eq!(guest.engine.stats().disabled, None);
        let contents = Some(Contents::Copied(&other));
        guest.engine.notice(Notice::Evict { frame }, contents);
    }
    let stats = guest.engine.stats();
    assert!(stats.disabled.unwrap().starts_with("64 of the last 64 "));
    assert_eq!(stats.admitted, 1280);
}

#[test]
fn zeroing_a_part_of_a_dirty_block_leaves_the_rest() {
    let mut guest = Guest::delayed(8);
    guest.write(7, 1);
    guest.submit(Operation::WriteZeroes {
        ranges: vec![ByteRange {
            offset: 7 * 4096 + 512,
            bytes: 1024,
        }],
        unmap: false,
        durable: false,
    });
    let mut page = [1; PAGE_BYTES];
    let location = Location::new(DISK, 7);
    guest.engine.log.read(location, &mut page).unwrap();
    let mut expected = [7; PAGE_BYTES];
    expected[512..1536].fill(0);
    assert_eq!(page, expected);
}
