//! The exclusive cache as a guest with our module uses it, without the guest: frames are filled by reads, reported and
//! used again.

mod faults_common;

use fastrand::Rng;
use std::collections::HashMap;
use std::sync::Arc;

use faults_common::{IMAGE_BYTES, MachineThread, Setup, ram};
use plimsoll_disk::{CacheMode, EngineStats, WriteMode};
use plimsoll_driver::{
    Bank, ControlDisk, Driver, DriverOptions, NoticeRing, Page, Ram, Request, RingOptions, Segment,
};

const BLOCKS: u64 = IMAGE_BYTES / 4096;

/// A machine with an exclusive cache and a guest with a few frames.
struct Guest {
    running: MachineThread,
    ram: Arc<Ram>,
    disk: Driver,
    control: ControlDisk,
    ring: NoticeRing,
    first_frame: u64,
}

impl Guest {
    fn new(mut setup: Setup, frames: u64, options: RingOptions) -> Self {
        setup.mode = CacheMode::Exclusive;
        let running = MachineThread::start(setup);
        let ram = ram();
        let disk = running.connect(&ram, 0, DriverOptions::default());
        let mut control = running.connect_control(&ram);
        let ring = NoticeRing::new(&ram, options);
        control.attach(&ring).unwrap();
        assert_eq!(ring.attached(), ring.nonce());
        let bytes = usize::try_from(frames * 4096).unwrap();
        let first_frame = ram.allocate(Bank::High, bytes) / 4096;
        Self {
            running,
            ram,
            disk,
            control,
            ring,
            first_frame,
        }
    }

    /// Creates a guest with a disk whose blocks contain their own numbers.
    fn with_blocks(write: WriteMode, options: RingOptions) -> Self {
        let setup = Setup {
            write,
            ..Setup::default()
        };
        let mut guest = Self::new(setup, 64, options);
        for block in 0..BLOCKS {
            guest.disk.write(block * 4096, &contents(block)).unwrap();
        }
        guest.disk.flush().unwrap();
        guest
    }

    /// The number of a frame.
    fn frame(&self, at: u64) -> u64 {
        self.first_frame + at
    }

    fn transfer(&mut self, block: u64, at: u64, write: bool) {
        let segments = [Segment {
            address: self.frame(at) * 4096,
            bytes: 4096,
        }];
        let (sector, segments) = (block * 8, &segments[..]);
        let request = match write {
            true => Request::Write { sector, segments },
            false => Request::Read { sector, segments },
        };
        self.disk.execute(&request).unwrap();
    }

    /// Reads a block into a frame; what the frame then holds.
    fn read(&mut self, block: u64, at: u64) -> Page {
        self.transfer(block, at, false);
        self.page(at)
    }

    fn page(&self, at: u64) -> Page {
        let mut page = [0; 4096];
        self.ram.read(self.frame(at) * 4096, &mut page);
        page
    }

    /// Writes a block from a frame.
    fn write(&mut self, block: u64, at: u64, page: &Page) {
        self.ram.write(self.frame(at) * 4096, page);
        self.transfer(block, at, true);
    }

    /// Evicts a frame with what it holds.
    fn evict(&mut self, at: u64) {
        let page = self.page(at);
        assert!(self.ring.evict(self.frame(at), Some(&page)));
    }

    /// The counters, after all notifications are drained.
    fn stats(&mut self) -> EngineStats {
        self.control.kick().unwrap();
        assert_eq!(self.ring.tail(), self.ring.head());
        let stats = self.running.stats();
        assert_eq!(stats.ring.bad_records, 0, "{stats:#?}");
        assert_eq!(stats.ring.faults, 0, "{stats:#?}");
        assert_eq!(stats.engine.wrong_served, 0, "{stats:#?}");
        stats.engine
    }
}

fn contents(block: u64) -> Page {
    let mut page = [0x11; 4096];
    page[..8].copy_from_slice(&block.to_le_bytes());
    page
}

fn guest() -> Guest {
    Guest::with_blocks(WriteMode::Through, RingOptions::default())
}

#[test]
fn an_evicted_page_is_served_once_without_storage() {
    let mut guest = guest();
    assert_eq!(guest.read(5, 0), contents(5));
    guest.evict(0);
    let before = guest.stats();
    assert_eq!((before.admitted, before.cached_pages), (1, 1));
    assert_eq!(guest.read(5, 1), contents(5));
    let after = guest.stats();
    assert_eq!((after.hits, after.cached_pages), (1, 0));
    assert_eq!(guest.read(5, 2), contents(5));
    assert_eq!(guest.stats().hits, 1);
}

#[test]
fn contents_that_are_not_those_of_the_last_transfer_are_counted_and_never_served() {
    let mut guest = guest();
    guest.read(5, 0);
    let frame = guest.frame(0);
    assert!(guest.ring.evict(frame, Some(&[0xee; 4096])));
    assert_eq!(guest.read(5, 1), contents(5));
    let stats = guest.stats();
    assert_eq!((stats.refused_mismatch, stats.admitted), (1, 0));
}

#[test]
fn frames_that_were_released_added_lost_or_never_read_are_not_admitted() {
    let mut guest = guest();
    guest.evict(9);
    guest.read(1, 0);
    let frame = guest.frame(0);
    assert!(guest.ring.release(frame));
    guest.evict(0);
    guest.read(2, 1);
    let frame = guest.frame(1);
    assert!(guest.ring.add(frame));
    guest.evict(1);
    guest.read(3, 2);
    guest.ring.lose(1);
    guest.evict(2);
    let stats = guest.stats();
    assert_eq!(
        (stats.refused_unknown, stats.admitted),
        (4, 0),
        "{stats:#?}"
    );
    assert_eq!(guest.running.stats().ring.lost, 1);
}

#[test]
fn a_page_that_moved_is_admitted_from_where_it_is() {
    let mut guest = guest();
    guest.read(7, 0);
    let (from, to) = (guest.frame(0), guest.frame(1));
    assert!(guest.ring.migrate(from, to));
    let page = guest.page(0);
    assert!(guest.ring.evict(from, Some(&page)));
    assert!(guest.ring.evict(to, Some(&page)));
    let stats = guest.stats();
    assert_eq!(
        (stats.refused_unknown, stats.admitted),
        (1, 1),
        "{stats:#?}"
    );
    assert_eq!(guest.read(7, 2), contents(7));
    assert_eq!(guest.stats().hits, 1);
}

#[test]
fn of_two_frames_of_a_block_the_newest_counts() {
    let mut guest = guest();
    guest.read(7, 0);
    guest.read(7, 1);
    guest.evict(0);
    let stats = guest.stats();
    assert_eq!((stats.refused_not_newest, stats.admitted), (1, 0));
    guest.evict(1);
    assert_eq!(guest.stats().admitted, 1);
}

#[test]
fn a_write_of_any_part_of_a_block_takes_its_copy_away() {
    for write in [WriteMode::Through, WriteMode::Delayed] {
        let mut guest = Guest::with_blocks(write, RingOptions::default());
        // A whole block, a sector of one, and neither, which are all zeroed or discarded afterwards.
        for block in 0..4 {
            guest.read(block, block);
            guest.evict(block);
        }
        assert_eq!(guest.stats().admitted, 4);
        guest.write(0, 9, &contents(1000));
        guest.disk.write(4096 + 512, &[0x22; 512]).unwrap();
        guest.disk.write_zeroes(2 * 4096, 4096, false).unwrap();
        guest.disk.discard(3 * 4096, 4096).unwrap();
        guest.disk.write(3 * 4096, &contents(3000)).unwrap();
        assert_eq!(guest.read(0, 10), contents(1000));
        let mut mixed = contents(1);
        mixed[512..1024].fill(0x22);
        assert_eq!(guest.read(1, 11), mixed);
        assert_eq!(guest.read(2, 12), [0; 4096]);
        assert_eq!(guest.read(3, 13), contents(3000));
        guest.stats();
    }
}

#[test]
fn delayed_writes_reach_storage_with_the_next_flush() {
    let mut guest = Guest::with_blocks(WriteMode::Delayed, RingOptions::default());
    let before = guest.stats();
    for block in 0..32 {
        guest.write(block, block, &contents(500 + block));
    }
    let dirty = guest.stats();
    assert_eq!(dirty.delayed_blocks, before.delayed_blocks + 32);
    for block in 0..32 {
        assert_eq!(guest.read(block, 40), contents(500 + block));
    }
    guest.disk.flush().unwrap();
    assert_eq!(guest.stats().dirty_pages, 0);
    let image = std::fs::read(guest.running.place.image(0)).unwrap();
    for (block, page) in (0..32).zip(image.chunks(4096)) {
        assert!(page == contents(500 + block), "block {block}");
    }
}

#[test]
fn dirty_pages_are_bounded_and_do_not_stay_for_long() {
    let mut guest = Guest::with_blocks(WriteMode::Delayed, RingOptions::default());
    for block in 0..BLOCKS {
        guest.write(block, 0, &contents(block + 9000));
        if block % 100 == 0 {
            let stats = guest.stats();
            assert!(stats.dirty_pages <= stats.dirty_pages_max, "{stats:#?}");
        }
    }
    let clean = |stats: &plimsoll_disk::MachineStats| stats.engine.dirty_pages == 0;
    guest.running.wait_for("write-back by age", clean);
    let image = std::fs::read(guest.running.place.image(0)).unwrap();
    for (block, page) in (0..).zip(image.chunks(4096)) {
        assert!(page == contents(block + 9000), "block {block}");
    }
}

#[test]
fn a_lazy_eviction_is_admitted_while_the_frame_is_as_it_was() {
    let options = RingOptions {
        lazy: true,
        slots: 0,
        ..RingOptions::default()
    };
    let mut guest = Guest::with_blocks(WriteMode::Through, options);
    guest.read(1, 0);
    guest.read(2, 1);
    let frames = [guest.frame(0), guest.frame(1)];
    guest.ram.write(frames[1] * 4096, &[3; 100]);
    for frame in frames {
        assert!(guest.ring.evict(frame, None));
    }
    let stats = guest.stats();
    assert_eq!((stats.admitted, stats.refused_stale), (1, 1), "{stats:#?}");
    assert_eq!(guest.read(1, 2), contents(1));
    assert_eq!(guest.read(2, 3), contents(2));
    assert_eq!(guest.stats().hits, 1);
}

#[test]
fn a_cache_that_is_told_wrong_contents_switches_itself_off_and_can_be_switched_on() {
    let mut guest = guest();
    for block in 0..200 {
        // As a guest that decrypts in place.
        let mut page = guest.read(block, block % 64);
        page.iter_mut().for_each(|byte| *byte ^= 0x80);
        let frame = guest.frame(block % 64);
        assert!(guest.ring.evict(frame, Some(&page)));
    }
    let stats = guest.stats();
    assert!(stats.disabled.is_some(), "{stats:#?}");
    assert!(stats.refused_mismatch >= 64, "{stats:#?}");
    for block in 0..200 {
        assert_eq!(guest.read(block, 0), contents(block));
    }
    guest.read(3, 1);
    guest.evict(1);
    assert_eq!(guest.stats().admitted, 0);
    guest.running.handle.enable().unwrap();
    guest.read(3, 1);
    guest.evict(1);
    assert_eq!(guest.read(3, 2), contents(3));
    let stats = guest.stats();
    assert_eq!((stats.disabled, stats.hits), (None, 1));
}

#[test]
fn a_guest_that_dies_leaves_nothing_cached_and_the_next_one_reads_storage() {
    let mut guest = guest();
    guest.read(4, 0);
    guest.evict(0);
    assert_eq!(guest.stats().cached_pages, 1);
    guest.disk.hang_up();
    let gone = |stats: &plimsoll_disk::MachineStats| !stats.disks[0].connected;
    let stats = guest.running.wait_for("guest gone", gone);
    assert_eq!(stats.engine.cached_pages, 0);
    let ram = ram();
    let mut next = guest.running.connect(&ram, 0, DriverOptions::default());
    let mut page = [0; 4096];
    next.read(4 * 4096, &mut page).unwrap();
    assert_eq!(page, contents(4));
}

/// Pages in order of use; the front is the oldest.
struct NaiveLru {
    pages: Vec<u64>,
    capacity: usize,
}

impl NaiveLru {
    /// Whether the page was there; what had to go.
    fn touch(&mut self, page: u64) -> (bool, Option<u64>) {
        let hit = self.pages.iter().position(|&other| other == page);
        if let Some(at) = hit {
            self.pages.remove(at);
        }
        self.pages.push(page);
        let full = self.pages.len() > self.capacity;
        (hit.is_some(), full.then(|| self.pages.remove(0)))
    }
}

/// \[LS07\]: memory of X pages and a cache of Y behind it hit exactly as memory of X + Y pages does.
#[test]
fn memory_and_cache_together_hit_as_memory_of_both_sizes_does() {
    const FRAMES: usize = 150;
    for write_ratio in [0, 10, 50] {
        let setup = Setup {
            cache_bytes: 2 << 20,
            // Pages written while they are compared are not admitted; contents are checked below.
            verify: false,
            ..Setup::default()
        };
        let options = RingOptions::default();
        let mut guest = Guest::new(setup, FRAMES as u64 + 1, options);
        let mut memory = NaiveLru {
            pages: Vec::new(),
            capacity: FRAMES,
        };
        let mut references = Vec::new();
        let mut frames: HashMap<u64, u64> = HashMap::new();
        let mut free: Vec<u64> = (0..=FRAMES as u64).collect();
        let mut versions = vec![0_u64; usize::try_from(BLOCKS).unwrap()];
        let mut random = Rng::with_seed(write_ratio);
        let mut memory_hits = 0_u64;
        for number in 1..=20_000_u64 {
            // Skewed, so that all sizes have some hits.
            let bound = (0..2).fold(BLOCKS, |bound, _| 1 + random.u64(..bound));
            let block = random.u64(..bound);
            references.push(block);
            let (hit, evicted) = memory.touch(block);
            if let Some(evicted) = evicted {
                let at = frames.remove(&evicted).unwrap();
                guest.evict(at);
                free.push(at);
            }
            if hit {
                memory_hits += 1;
            } else {
                let at = free.remove(0);
                let frame = guest.frame(at);
                assert!(guest.ring.add(frame));
                let page = guest.read(block, at);
                let version = versions[usize::try_from(block).unwrap()];
                let expected = if version == 0 {
                    [0; 4096]
                } else {
                    signed(block, version)
                };
                assert!(page == expected, "block {block}, reference {number}");
                frames.insert(block, at);
            }
            if random.u64(..100) < write_ratio {
                versions[usize::try_from(block).unwrap()] = number;
                guest.write(block, frames[&block], &signed(block, number));
            }
        }
        let stats = guest.stats();
        assert!(stats.dropped > 0, "the cache was never full: {stats:#?}");
        assert_eq!(stats.refused_mismatch, 0, "{stats:#?}");
        let mut both = NaiveLru {
            pages: Vec::new(),
            capacity: FRAMES + usize::try_from(stats.cached_pages).unwrap(),
        };
        let hits = references
            .iter()
            .filter(|&&page| both.touch(page).0)
            .count() as f64;
        let ours = (memory_hits + stats.hits) as f64;
        assert!(
            (ours - hits).abs() <= 0.01 * hits,
            "{ours} hits where LRU has {hits}, writes {write_ratio} %: {stats:#?}"
        );
    }
}

fn signed(block: u64, version: u64) -> Page {
    let mut page = [0x33; 4096];
    page[..8].copy_from_slice(&block.to_le_bytes());
    page[4088..].copy_from_slice(&version.to_le_bytes());
    page
}
