//! A guest of X pages over a cache of Y pages has the hits of one of X + Y pages (\[LS07\] §3), and a guest that
//! changes pages in place loses its cache.
#![allow(clippy::cast_possible_truncation, reason = "all numbers are small")]

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use plimsoll_disk::{
    Action, CacheMode, Contents, DiskNumber, Engine, EngineOptions, EngineStats, GuestData,
    Location, Notice, Observer, Operation, OutsideRam, PAGE_BYTES, Page, Request, Segment, Status,
    Tag, WriteMode,
};
use plimsoll_estimator::{GhostBuffer, GhostOptions};
use plimsoll_flow::{PageCount, PageNumber};

const BLOCKS: u64 = 2048;

/// An LRU list of blocks.
#[derive(Default)]
struct Lru {
    order: BTreeMap<u64, u64>,
    last: HashMap<u64, u64>,
    time: u64,
}

impl Lru {
    fn touch(&mut self, block: u64) -> bool {
        self.time += 1;
        let was = self.last.insert(block, self.time);
        if let Some(was) = was {
            self.order.remove(&was);
        }
        self.order.insert(self.time, block);
        was.is_some()
    }

    fn pop_oldest(&mut self) -> Option<u64> {
        let (_, block) = self.order.pop_first()?;
        self.last.remove(&block);
        Some(block)
    }

    fn len(&self) -> usize {
        self.last.len()
    }
}

/// RAM of a few frames.
struct Ram(Mutex<Vec<Page>>);

impl GuestData for Ram {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        bytes
            .copy_from_slice(&self.0.lock().unwrap()[address as usize / PAGE_BYTES][..bytes.len()]);
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        self.0.lock().unwrap()[address as usize / PAGE_BYTES][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn is_ram(&self, frame: u64) -> bool {
        frame < self.0.lock().unwrap().len() as u64
    }
}

/// A guest with LRU memory, whose storage answers at once.
struct Guest {
    engine: Engine,
    ram: Arc<Ram>,
    memory: Lru,
    frames: HashMap<u64, u64>,
    dirty: HashMap<u64, bool>,
    free: Vec<u64>,
    storage: HashMap<u64, Page>,
    tag: u64,
    storage_reads: u64,
    in_place: bool,
}

impl Guest {
    fn new(pages: u64, options: EngineOptions, observer: Option<Box<dyn Observer>>) -> Self {
        Self {
            engine: Engine::new(options, observer).unwrap(),
            ram: Arc::new(Ram(Mutex::new(vec![[0; PAGE_BYTES]; pages as usize]))),
            memory: Lru::default(),
            frames: HashMap::new(),
            dirty: HashMap::new(),
            free: (0..pages).collect(),
            storage: HashMap::new(),
            tag: 0,
            storage_reads: 0,
            in_place: false,
        }
    }

    fn transfer(&mut self, block: u64, write: bool) {
        let segments = vec![Segment {
            address: self.frames[&block] * 4096,
            bytes: 4096,
        }];
        let offset = block * 4096;
        let operation = if write {
            Operation::Write {
                offset,
                segments,
                durable: false,
            }
        } else {
            Operation::Read { offset, segments }
        };
        self.tag += 1;
        let ram: Arc<dyn GuestData> = self.ram.clone();
        self.engine.submit(Request {
            disk: DiskNumber(0),
            tag: Tag(self.tag),
            operation,
            ram,
        });
        while let Some(submission) = self.engine.next_submission() {
            let mut buffer = None;
            match submission.action {
                Action::Read {
                    offset,
                    buffer: mut into,
                } => {
                    self.storage_reads += 1;
                    let page = self
                        .storage
                        .get(&(offset / 4096))
                        .unwrap_or(&[0; PAGE_BYTES]);
                    into.copy_from_slice(page);
                    buffer = Some(into);
                }
                Action::Write {
                    offset,
                    buffer: from,
                    ..
                } => {
                    for (number, page) in from.chunks_exact(PAGE_BYTES).enumerate() {
                        let block = offset / 4096 + number as u64;
                        self.storage.insert(block, page.try_into().unwrap());
                    }
                    buffer = Some(from);
                }
                _ => {}
            }
            self.engine.carried_out(submission.id, Ok(()), buffer);
        }
        assert_eq!(
            self.engine.next_completed().map(|done| done.status),
            Some(Status::Ok)
        );
    }

    /// The guest uses a block; a write overwrites it whole.
    fn reference(&mut self, block: u64, write: bool) {
        if !self.memory.touch(block) {
            let frame = self.free.pop().unwrap_or_else(|| self.evict());
            self.frames.insert(block, frame);
            self.engine.notice(Notice::Add { frame }, None);
            if !write {
                self.transfer(block, false);
            }
        }
        if write {
            self.dirty.insert(block, true);
        }
        if self.in_place {
            let mut pages = self.ram.0.lock().unwrap();
            pages[self.frames[&block] as usize].fill(0x5a);
        }
    }

    fn evict(&mut self) -> u64 {
        let block = self.memory.pop_oldest().unwrap();
        if self.dirty.remove(&block).is_some() {
            self.transfer(block, true);
        }
        let frame = self.frames.remove(&block).unwrap();
        let page = self.ram.0.lock().unwrap()[frame as usize];
        self.engine
            .notice(Notice::Evict { frame }, Some(Contents::Copied(&page)));
        frame
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }
}

fn options(write: WriteMode) -> EngineOptions {
    EngineOptions {
        mode: CacheMode::Exclusive,
        cache_bytes: 2 << 20,
        cache_bytes_max: 8 << 20,
        write,
        dirty_pages_max: 32,
        ..EngineOptions::default()
    }
}

/// References: sequential and skewed rounds, alternating.
fn references(count: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut state = 7_u64;
    (0..count).map(move |number| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let word = state >> 33;
        let block = match number / 3000 % 3 {
            0 => number % 700,
            1 => (word % BLOCKS) * (word / BLOCKS % BLOCKS) / BLOCKS,
            _ => word % 900,
        };
        (block, state >> 11 & 0xff)
    })
}

#[test]
fn memory_and_cache_are_one_lru_memory() {
    const DIRECT: u64 = 100;
    for (write, percent, slack) in [
        // How many pages the cache's bytes hold depends a little on which blocks they are.
        (WriteMode::Through, 0, 0.005),
        (WriteMode::Delayed, 0, 0.005),
        (WriteMode::Through, 10, 0.01),
        (WriteMode::Delayed, 10, 0.01),
        // What is overwritten without having been read leaves its old copy in the cache until it is written.
        (WriteMode::Through, 50, 0.02),
        (WriteMode::Delayed, 50, 0.02),
    ] {
        let mut guest = Guest::new(DIRECT, options(write), None);
        // Fills the cache, to determine how many pages it holds.
        for block in 0..1000 {
            guest.reference(block, false);
        }
        let cached = guest.stats().cached_pages;
        let mut whole = Lru::default();
        for block in 0..1000 {
            whole.touch(block);
        }
        while whole.len() as u64 > DIRECT + cached {
            whole.pop_oldest();
        }
        let before = guest.storage_reads;
        let mut misses = 0;
        let mut reads = 0;
        for (block, dice) in references(60_000) {
            let is_write = dice * 100 < percent * 256;
            let hit = whole.touch(block);
            if whole.len() as u64 > DIRECT + cached {
                whole.pop_oldest();
            }
            if !is_write {
                reads += 1;
                misses += u64::from(!hit);
            }
            guest.reference(block, is_write);
        }
        let stats = guest.stats();
        assert_eq!(stats.refused_mismatch, 0);
        let measured = guest.storage_reads - before;
        let error = (measured as f64 - misses as f64).abs() / reads as f64;
        assert!(
            error <= slack,
            "{write:?} {percent} %: {measured} reads of storage, {misses} misses of {reads} reads in one memory"
        );
        assert!(
            misses * 10 < reads * 9 && misses * 20 > reads,
            "{misses} of {reads}"
        );
    }
}

#[test]
fn what_the_guest_writes_and_still_holds_takes_no_room_from_what_it_evicted() {
    const DIRECT: u64 = 100;
    let mut options = options(WriteMode::Delayed);
    options.dirty_pages_max = DIRECT;
    let mut guest = Guest::new(DIRECT, options, None);
    for block in 0..1000 {
        guest.reference(block, false);
    }
    let before = guest.stats();
    assert!(before.dropped > 100, "the cache is full: {before:?}");
    for round in 0..3 {
        for block in 900..1000 {
            guest.reference(block, true);
            guest.transfer(block, true);
        }
        let stats = guest.stats();
        assert!(stats.dirty_pages > 20, "{stats:?}");
        assert_eq!(stats.delayed_blocks, (round + 1) * 100);
        assert_eq!(
            (stats.cached_pages, stats.dropped),
            (before.cached_pages, before.dropped)
        );
    }
    // They enter the cache when they are evicted, whether storage has them or not, and are served from it.
    for block in 0..100 {
        guest.reference(block, false);
    }
    let reads = guest.storage_reads;
    for block in 900..1000 {
        guest.reference(block, false);
    }
    assert_eq!(guest.storage_reads, reads);
    assert_eq!(guest.stats().refused_mismatch, 0);
}

/// Feeds a ghost buffer.
struct Ghost(Arc<Mutex<GhostBuffer>>);

fn page(location: Location) -> PageNumber {
    PageNumber(location.number())
}

impl Observer for Ghost {
    fn missed(&mut self, location: Location) {
        self.0.lock().unwrap().missed(page(location));
    }

    fn evicted(&mut self, location: Location) {
        self.0.lock().unwrap().evicted(page(location));
    }

    fn released(&mut self, location: Location) {
        self.0.lock().unwrap().released(page(location));
    }

    fn cleared(&mut self) {
        self.0.lock().unwrap().clear();
    }
}

#[test]
fn the_ghost_predicts_other_sizes_exactly() {
    const DIRECT: u64 = 100;
    let ghost = GhostBuffer::new(GhostOptions {
        direct: PageCount(DIRECT),
        ghost: PageCount(1500),
        segment: PageCount(100),
    });
    let ghost = Arc::new(Mutex::new(ghost.unwrap()));
    let observer: Box<dyn Observer> = Box::new(Ghost(Arc::clone(&ghost)));
    let mut guest = Guest::new(DIRECT, options(WriteMode::Through), Some(observer));
    for (block, _) in references(60_000) {
        guest.reference(block, false);
    }
    let curve = ghost.lock().unwrap().curve().unwrap();
    let above = guest.stats().read_blocks as f64;
    for size in [100, 200, 400, 700, 1000, 1500] {
        // That memory without a cache.
        let none = EngineOptions {
            mode: CacheMode::None,
            ..options(WriteMode::Through)
        };
        let mut other = Guest::new(size, none, None);
        for (block, _) in references(60_000) {
            other.reference(block, false);
        }
        let predicted = curve.miss_ratio(PageCount(size)) * above;
        assert!(
            (predicted - other.storage_reads as f64).abs() < 0.5,
            "{size} pages: {predicted} predicted, {} measured",
            other.storage_reads
        );
    }
}

#[test]
fn a_guest_that_changes_pages_in_place_loses_its_cache_until_it_is_enabled() {
    let mut guest = Guest::new(50, options(WriteMode::Through), None);
    guest.in_place = true;
    for block in 0..400 {
        guest.reference(block, false);
    }
    let stats = guest.stats();
    let why = stats.disabled.expect("disabled");
    assert!(why.contains("dm-crypt"), "{why}");
    assert_eq!(
        (stats.admitted, stats.cached_pages, stats.refused_mismatch),
        (0, 0, 64)
    );
    guest.in_place = false;
    guest.engine.enable();
    for block in 0..800 {
        guest.reference(block % 200, false);
    }
    let stats = guest.stats();
    assert_eq!(stats.disabled, None);
    assert!(stats.hits > 300, "{} hits", stats.hits);
}

#[test]
fn a_cache_that_shrinks_keeps_its_newest_pages() {
    let mut guest = Guest::new(50, options(WriteMode::Through), None);
    for block in 0..500 {
        guest.reference(block, false);
    }
    let before = guest.stats().cached_pages;
    let mut sizes = vec![guest.stats().cache_bytes];
    while !guest.engine.resize_step(1 << 20).unwrap() {
        // Requests are served between the steps.
        guest.reference(499, false);
        sizes.push(guest.stats().cache_bytes);
    }
    sizes.push(guest.stats().cache_bytes);
    assert!(
        sizes.len() > 2 && sizes.is_sorted_by(|left, right| left >= right),
        "{sizes:?}"
    );
    let after = guest.stats().cached_pages;
    assert!(
        after < before && after > 150,
        "{before} pages, then {after}"
    );
    // A batch of evictions, here of two pages, is of one shard: the second may be younger than the oldest of another.
    let oldest_kept = 450 - after + 1;
    let reads = guest.storage_reads;
    // Not those that would push others out: a hit makes room.
    for block in oldest_kept..450 {
        guest.reference(block, false);
    }
    assert_eq!(guest.storage_reads, reads);
    assert!(guest.engine.resize_step(1 << 30).is_err());
    assert!(guest.engine.resize_step(1000).is_err());
    assert_eq!(guest.stats().cache_bytes, 1 << 20);
}
