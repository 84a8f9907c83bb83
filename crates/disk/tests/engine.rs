//! The engine against a model: a guest, storage that completes in any order or fails, and every value that a sector may
//! have according to the acknowledged writes.
#![allow(clippy::cast_possible_truncation, reason = "all numbers are small")]
#![allow(clippy::single_range_in_vec_init, reason = "one range of several")]

use fastrand::Rng;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use plimsoll_disk::{
    Action, Buffer, ByteRange, CacheMode, Contents, DirtyPages, DiskNumber, Engine, EngineOptions,
    GuestData, Location, Notice, Operation, OutsideRam, PAGE_BYTES, Page, Request, Segment, Status,
    Submission, Tag, WriteMode,
};

const FRAMES: u64 = 32;
const BLOCKS: u64 = 20;
const SECTOR: u64 = 512;
const SECTORS: u64 = BLOCKS * 8;
const DISK: DiskNumber = DiskNumber(3);

/// Guest RAM.
struct Ram(Mutex<Vec<u8>>);

impl Ram {
    fn range(address: u64, bytes: usize) -> Result<std::ops::Range<usize>, OutsideRam> {
        let end = address.checked_add(bytes as u64);
        match end {
            Some(end) if end <= FRAMES * PAGE_BYTES as u64 => Ok(address as usize..end as usize),
            _ => Err(OutsideRam { address, bytes }),
        }
    }
}

impl GuestData for Ram {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        let range = Self::range(address, bytes.len())?;
        bytes.copy_from_slice(&self.0.lock().unwrap()[range]);
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        let range = Self::range(address, bytes.len())?;
        self.0.lock().unwrap()[range].copy_from_slice(bytes);
        Ok(())
    }

    fn is_ram(&self, frame: u64) -> bool {
        frame < FRAMES
    }
}

/// The dirty log: what outlives the process.
#[derive(Clone, Default)]
struct Log {
    pages: Arc<Mutex<BTreeMap<u64, Page>>>,
    /// Decides which of its operations fail.
    failures: Option<Rng>,
}

impl Log {
    fn happens(&mut self) -> io::Result<()> {
        let random = self.failures.as_mut();
        match random.is_some_and(|random| random.u64(..12) == 0) {
            true => Err(io::Error::other("broken")),
            false => Ok(()),
        }
    }
}

impl DirtyPages for Log {
    fn record(&mut self, location: Location, page: &Page) -> io::Result<()> {
        assert_eq!(location.disk(), DISK);
        self.happens()?;
        self.pages.lock().unwrap().insert(location.block(), *page);
        Ok(())
    }

    fn read(&mut self, location: Location, page: &mut Page) -> io::Result<()> {
        self.happens()?;
        let pages = self.pages.lock().unwrap();
        *page = *pages
            .get(&location.block())
            .ok_or(io::ErrorKind::NotFound)?;
        Ok(())
    }

    fn clean(&mut self, location: Location) {
        self.pages.lock().unwrap().remove(&location.block());
    }
}

/// A change of a sector: written with contents of this stamp, or made arbitrary.
#[derive(Debug, Clone, Copy)]
struct Change {
    stamp: Option<u64>,
    begun: u64,
    /// `None` while in progress. A change that failed may or may not have happened, and stays so.
    done: Option<u64>,
}

/// What each sector may hold.
struct Model {
    sectors: Vec<Vec<Change>>,
}

impl Model {
    /// Whether a read from `begun` to `ended` may return that stamp.
    fn allows(&self, sector: u64, stamp: u64, begun: u64, ended: u64) -> bool {
        let changes = &self.sectors[sector as usize];
        changes.iter().any(|change| {
            change.stamp.is_none_or(|own| own == stamp)
                && change.begun <= ended
                && !changes.iter().any(|later| {
                    change.done.is_some_and(|done| done < later.begun)
                        && later.done.is_some_and(|done| done < begun)
                })
        })
    }

    /// Whether storage may hold that stamp after the host died: everything done before `flushed` is there.
    fn allows_after_flush(&self, sector: u64, stamp: u64, flushed: u64) -> bool {
        self.allows(sector, stamp, flushed, u64::MAX)
    }

    fn begin(&mut self, sectors: std::ops::Range<u64>, stamps: Option<u64>, time: u64) {
        for (number, sector) in sectors.enumerate() {
            self.sectors[sector as usize].push(Change {
                stamp: stamps.map(|first| first + number as u64),
                begun: time,
                done: None,
            });
        }
    }

    fn end(&mut self, sectors: std::ops::Range<u64>, begun: u64, time: u64) {
        for sector in sectors {
            for change in &mut self.sectors[sector as usize] {
                if change.begun == begun {
                    change.done = Some(time);
                }
            }
        }
    }
}

/// The stamp that every word of a sector contains; zeros are stamp 0. `None` if it is a mixture.
fn stamp_of(bytes: &[u8]) -> Option<u64> {
    let mut words = bytes
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    let first = words.next()?;
    words.all(|word| word == first).then_some(first)
}

fn stamped(bytes: &mut [u8], first: u64) {
    for (number, sector) in bytes.chunks_exact_mut(SECTOR as usize).enumerate() {
        for word in sector.chunks_exact_mut(8) {
            word.copy_from_slice(&(first + number as u64).to_le_bytes());
        }
    }
}

enum SectorUse {
    Read { first: u64, segments: Vec<Segment> },
    Change { sectors: Vec<std::ops::Range<u64>> },
    Flush,
}

struct RequestInFlight {
    asked: SectorUse,
    begun: u64,
    frames: Vec<u64>,
}

/// The guest's behaviour.
#[derive(Clone, Copy)]
struct Guest {
    /// Sends an addition for every frame that it uses anew.
    tells_additions: bool,
    tells_migrations: bool,
    /// Changes pages without notification, as dm-crypt does, and loses notifications.
    sly: bool,
    /// Storage and the log fail sometimes.
    failures: bool,
    lazy: bool,
}

const HONEST: Guest = Guest {
    tells_additions: true,
    tells_migrations: true,
    sly: false,
    failures: false,
    lazy: false,
};

fn options(write: WriteMode) -> EngineOptions {
    EngineOptions {
        mode: CacheMode::Exclusive,
        cache_bytes: 1 << 20,
        cache_bytes_max: 1 << 20,
        write,
        dirty_pages_max: 5,
        dirty_age_max: Duration::from_secs(1),
        ..EngineOptions::default()
    }
}

struct World {
    random: Rng,
    guest: Guest,
    engine: Engine,
    ram: Arc<Ram>,
    log: Log,
    storage: Vec<u8>,
    /// What of it survives the host.
    stable: Vec<u8>,
    /// Begin of the newest flush that is done.
    flushed: u64,
    orders: Vec<Submission>,
    model: Model,
    under: BTreeMap<u64, RequestInFlight>,
    time: u64,
    stamp: u64,
    /// Frames of the page cache, with the guest's record of them: they hold what the last I/O moved.
    cached: Vec<bool>,
    wrong: u64,
    clock: Duration,
}

impl World {
    fn new(seed: u64, guest: Guest, options: EngineOptions) -> Self {
        let mut engine = Engine::new(options, None).unwrap();
        let log = Log {
            failures: guest.failures.then(|| Rng::with_seed(!seed)),
            ..Log::default()
        };
        engine.set_dirty_log(Box::new(log.clone()));
        let mut storage = vec![0; (SECTORS * SECTOR) as usize];
        stamped(&mut storage, 1);
        let initial = |sector: u64| Change {
            stamp: Some(sector + 1),
            begun: 0,
            done: Some(0),
        };
        Self {
            random: Rng::with_seed(seed),
            guest,
            engine,
            ram: Arc::new(Ram(Mutex::new(vec![0; FRAMES as usize * PAGE_BYTES]))),
            log,
            stable: storage.clone(),
            storage,
            flushed: 0,
            orders: Vec::new(),
            model: Model {
                sectors: (0..SECTORS).map(|sector| vec![initial(sector)]).collect(),
            },
            under: BTreeMap::new(),
            time: 1,
            stamp: 1 << 20,
            cached: vec![false; FRAMES as usize],
            wrong: 0,
            clock: Duration::ZERO,
        }
    }

    fn free_frames(&mut self, count: u64) -> Option<Vec<u64>> {
        let used = |frame: u64| {
            self.under
                .values()
                .any(|under| under.frames.contains(&frame))
        };
        let mut free: Vec<u64> = (0..FRAMES).filter(|frame| !used(*frame)).collect();
        let mut taken = Vec::new();
        for _ in 0..count {
            if free.is_empty() {
                return None;
            }
            let at = self.random.u64(..free.len() as u64) as usize;
            taken.push(free.swap_remove(at));
        }
        Some(taken)
    }

    /// The guest gives a frame another use.
    fn reuse(&mut self, frame: u64) {
        let tells = self.guest.tells_additions && !(self.guest.sly && self.random.u64(..3) == 0);
        self.cached[frame as usize] = false;
        if tells {
            let add = self.random.u64(..2) == 0;
            let notice = if add {
                Notice::Add { frame }
            } else {
                Notice::Release { frame }
            };
            self.engine.notice(notice, None);
        }
    }

    fn submit(&mut self, operation: Operation, asked: SectorUse, frames: Vec<u64>) {
        self.time += 1;
        let tag = self.time;
        match &asked {
            SectorUse::Change { sectors } => {
                let stamps = matches!(operation, Operation::Write { .. }).then_some(self.stamp);
                let zero = matches!(operation, Operation::WriteZeroes { .. });
                for range in sectors {
                    if zero {
                        for sector in range.clone() {
                            self.model.begin(sector..sector + 1, Some(0), tag);
                        }
                    } else {
                        self.model.begin(range.clone(), stamps, tag);
                    }
                }
            }
            SectorUse::Read { .. } | SectorUse::Flush => {}
        }
        self.under.insert(
            tag,
            RequestInFlight {
                asked,
                begun: tag,
                frames,
            },
        );
        let ram: Arc<dyn GuestData> = self.ram.clone();
        self.engine.submit(Request {
            disk: DISK,
            tag: Tag(tag),
            operation,
            ram,
        });
        self.settle();
    }

    /// Takes the engine's submissions and completed requests.
    fn settle(&mut self) {
        while let Some(order) = self.engine.next_submission() {
            self.orders.push(order);
        }
        while let Some(done) = self.engine.next_completed() {
            self.time += 1;
            let time = self.time;
            let under = self.under.remove(&done.tag.0).expect("completed once");
            let ok = done.status == Status::Ok;
            assert!(ok || self.guest.failures, "nothing failed");
            match under.asked {
                SectorUse::Read { first, segments } if ok => {
                    let total: u32 = segments.iter().map(|segment| segment.bytes).sum();
                    let mut bytes = vec![0; total as usize];
                    let mut at = 0;
                    for segment in &segments {
                        let end = at + segment.bytes as usize;
                        self.ram.read(segment.address, &mut bytes[at..end]).unwrap();
                        at = end;
                    }
                    for (number, sector) in bytes.chunks_exact(SECTOR as usize).enumerate() {
                        let number = first + number as u64;
                        let right = stamp_of(sector).is_some_and(|stamp| {
                            self.model.allows(number, stamp, under.begun, time)
                        });
                        self.wrong += u64::from(!right);
                    }
                }
                SectorUse::Read { .. } => {
                    for frame in under.frames {
                        self.cached[frame as usize] = false;
                    }
                }
                SectorUse::Change { sectors } => {
                    if ok {
                        for range in sectors {
                            self.model.end(range, under.begun, time);
                        }
                    }
                }
                SectorUse::Flush => {
                    if ok {
                        self.flushed = self.flushed.max(under.begun);
                    }
                }
            }
        }
    }

    fn read(&mut self) {
        if self.random.u64(..5) == 0 {
            // Some sectors, to anywhere in frames that are no page cache.
            let first = self.random.u64(..SECTORS - 8);
            let sectors = 1 + self.random.u64(..8);
            let Some(frames) = self.free_frames(2) else {
                return;
            };
            for frame in &frames {
                self.reuse(*frame);
            }
            let cut = (1 + self.random.u64(..7)) * SECTOR;
            let bytes = sectors * SECTOR;
            let one = bytes.min(cut);
            let mut segments = vec![Segment {
                address: frames[0] * 4096 + 4096 - cut,
                bytes: one as u32,
            }];
            if bytes > one {
                segments.push(Segment {
                    address: frames[1] * 4096,
                    bytes: (bytes - one) as u32,
                });
            }
            let operation = Operation::Read {
                offset: first * SECTOR,
                segments: segments.clone(),
            };
            self.submit(operation, SectorUse::Read { first, segments }, frames);
            return;
        }
        let block = self.random.u64(..BLOCKS);
        let count = (1 + self.random.u64(..4)).min(BLOCKS - block);
        let Some(frames) = self.free_frames(count) else {
            return;
        };
        for frame in &frames {
            self.reuse(*frame);
            self.cached[*frame as usize] = true;
        }
        let segments: Vec<Segment> = frames
            .iter()
            .map(|frame| Segment {
                address: frame * 4096,
                bytes: 4096,
            })
            .collect();
        let operation = Operation::Read {
            offset: block * 4096,
            segments: segments.clone(),
        };
        self.submit(
            operation,
            SectorUse::Read {
                first: block * 8,
                segments,
            },
            frames,
        );
    }

    fn write(&mut self) {
        let partial = self.random.u64(..4) == 0;
        let (first, sectors) = if partial {
            let first = self.random.u64(..SECTORS - 8);
            (first, 1 + self.random.u64(..8))
        } else {
            let block = self.random.u64(..BLOCKS);
            (
                block * 8,
                (1 + self.random.u64(..3)).min(BLOCKS - block) * 8,
            )
        };
        let pages = sectors.div_ceil(8);
        let Some(frames) = self.free_frames(pages) else {
            return;
        };
        self.stamp += 64;
        let mut bytes = vec![0; (sectors * SECTOR) as usize];
        stamped(&mut bytes, self.stamp);
        let mut segments = Vec::new();
        for (frame, bytes) in frames.iter().zip(bytes.chunks(PAGE_BYTES)) {
            // A page that is dirtied, or a new one.
            if !self.cached[*frame as usize] || partial {
                self.reuse(*frame);
            }
            self.cached[*frame as usize] = !partial;
            self.ram.write(frame * 4096, bytes).unwrap();
            segments.push(Segment {
                address: frame * 4096,
                bytes: bytes.len() as u32,
            });
        }
        let durable = self.random.u64(..6) == 0;
        let operation = Operation::Write {
            offset: first * SECTOR,
            segments,
            durable,
        };
        self.submit(
            operation,
            SectorUse::Change {
                sectors: vec![first..first + sectors],
            },
            frames,
        );
    }

    fn range(&mut self) {
        let first = self.random.u64(..SECTORS);
        let sectors = 1 + self.random.u64(..(SECTORS - first).min(40));
        let range = ByteRange {
            offset: first * SECTOR,
            bytes: sectors * SECTOR,
        };
        let operation = if self.random.u64(..2) == 0 {
            Operation::Discard(vec![range])
        } else {
            Operation::WriteZeroes {
                durable: self.random.u64(..4) == 0,
                ranges: vec![range],
                unmap: self.random.u64(..2) == 0,
            }
        };
        self.submit(
            operation,
            SectorUse::Change {
                sectors: vec![first..first + sectors],
            },
            Vec::new(),
        );
    }

    fn evict(&mut self) {
        let Some(frames) = self.free_frames(FRAMES / 4) else {
            return;
        };
        let cached = |frame: &&u64| self.cached[**frame as usize];
        let frame = *frames.iter().find(cached).unwrap_or(&frames[0]);
        if !self.cached[frame as usize] && !self.guest.sly {
            return;
        }
        let mut page = [0; PAGE_BYTES];
        if self.guest.sly && self.random.u64(..3) == 0 {
            self.stamp += 64;
            stamped(&mut page, self.stamp);
            self.ram.write(frame * 4096, &page).unwrap();
        }
        self.ram.read(frame * 4096, &mut page).unwrap();
        let ram = self.ram.clone();
        if self.guest.lazy && self.random.u64(..4) == 0 {
            // Used again before the engine reads it.
            self.stamp += 64;
            let mut other = [0; PAGE_BYTES];
            stamped(&mut other, self.stamp);
            self.ram.write(frame * 4096, &other).unwrap();
        }
        let contents = if self.guest.lazy {
            Contents::Lazy(&*ram)
        } else {
            Contents::Copied(&page)
        };
        self.engine.notice(Notice::Evict { frame }, Some(contents));
        self.cached[frame as usize] = false;
        if self.random.u64(..2) == 0 {
            // The frame is used for something else.
            self.stamp += 64;
            stamped(&mut page, self.stamp);
            self.ram.write(frame * 4096, &page).unwrap();
        }
        self.settle();
    }

    /// A page of a file's hole enters the page cache: without I/O, and clean.
    fn hole(&mut self) {
        let Some(frame) = self.free_frames(1).map(|frames| frames[0]) else {
            return;
        };
        self.reuse(frame);
        self.cached[frame as usize] = true;
        self.ram.write(frame * 4096, &[0; PAGE_BYTES]).unwrap();
    }

    fn migrate(&mut self) {
        let Some(frames) = self.free_frames(2) else {
            return;
        };
        let (from, to) = (frames[0], frames[1]);
        let mut page = [0; PAGE_BYTES];
        self.ram.read(from * 4096, &mut page).unwrap();
        self.ram.write(to * 4096, &page).unwrap();
        if self.guest.tells_migrations {
            self.engine
                .notice(Notice::Migrate { frame: from, to }, None);
        }
        self.cached[to as usize] = self.cached[from as usize];
        self.cached[from as usize] = false;
    }

    /// Carries out one of the storage's submissions.
    fn carry_out(&mut self) {
        if self.orders.is_empty() {
            return;
        }
        let at = self.random.u64(..self.orders.len() as u64) as usize;
        let Submission { id, action, .. } = self.orders.swap_remove(at);
        let fails = self.guest.failures && self.random.u64(..12) == 0;
        let mut result = if fails {
            Err(io::Error::other("broken"))
        } else {
            Ok(())
        };
        let mut buffer: Option<Buffer> = None;
        match action {
            Action::Read {
                offset,
                buffer: mut into,
            } => {
                let from = offset as usize;
                let to = from + into.len();
                into.copy_from_slice(&self.storage[from..to]);
                buffer = Some(into);
            }
            Action::Write {
                offset,
                buffer: from,
            } => {
                let to = offset as usize;
                // A write that fails may have been done in part.
                let bytes = if fails {
                    from.len() / 1024 * 512
                } else {
                    from.len()
                };
                self.storage[to..to + bytes].copy_from_slice(&from[..bytes]);
                buffer = Some(from);
            }
            Action::Sync => {
                if !fails {
                    self.stable.copy_from_slice(&self.storage);
                }
            }
            Action::Discard(range) => {
                let bytes = &mut self.storage[range.offset as usize..][..range.bytes as usize];
                if !fails {
                    bytes.fill(0xee);
                }
            }
            Action::Zero { range, .. } => {
                let bytes = &mut self.storage[range.offset as usize..][..range.bytes as usize];
                if !fails {
                    bytes.fill(0);
                }
            }
        }
        if fails {
            result = Err(io::Error::other("broken"));
        }
        self.engine.carried_out(id, result, buffer);
        self.settle();
    }

    fn step(&mut self) {
        match self.random.u64(..32) {
            0..=3 => self.read(),
            4..=5 => self.write(),
            6 if self.random.u64(..3) == 0 => self.range(),
            7 if self.random.u64(..2) == 0 => {
                self.submit(Operation::Flush, SectorUse::Flush, Vec::new());
            }
            8..=14 => self.evict(),
            15 => self.migrate(),
            16 => self.hole(),
            17 if self.random.u64(..4) == 0 => {
                self.clock += Duration::from_millis(400);
                self.engine.turn(self.clock);
                self.settle();
            }
            17 if self.random.u64(..6) == 0 => self.engine.forget_frames(),
            _ => self.carry_out(),
        }
        self.time += 1;
    }

    /// State that a restarted process finds: storage, overwritten with the log's pages.
    fn recovered(&self) -> Vec<u8> {
        let mut storage = self.storage.clone();
        for (block, page) in self.log.pages.lock().unwrap().iter() {
            storage[*block as usize * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(page);
        }
        storage
    }

    /// Sectors that hold what was not acknowledged last. `allowed` judges a sector's stamp.
    fn lost(&self, storage: &[u8], allowed: impl Fn(u64, u64) -> bool) -> u64 {
        let sectors = storage.chunks_exact(SECTOR as usize).enumerate();
        sectors
            .filter(|(number, sector)| {
                !stamp_of(sector).is_some_and(|stamp| allowed(*number as u64, stamp))
            })
            .count() as u64
    }

    /// Runs for a while; the process may be killed, or the host, at any step.
    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            self.step();
            if self.random.u64(..8) == 0 {
                let now = self.time + 1;
                let killed = self.recovered();
                let lost = self.lost(&killed, |sector, stamp| {
                    self.model.allows(sector, stamp, now, now)
                });
                assert_eq!(lost, 0, "acknowledged writes are lost with the process");
                let lost = self.lost(&self.stable, |sector, stamp| {
                    self.model.allows_after_flush(sector, stamp, self.flushed)
                });
                assert_eq!(lost, 0, "flushed writes are lost with the host");
            }
        }
        // Everything in progress is completed.
        for _ in 0..100_000 {
            if self.under.is_empty() && self.orders.is_empty() {
                break;
            }
            self.carry_out();
            if self.orders.is_empty() {
                self.clock += Duration::from_millis(100);
                self.engine.turn(self.clock);
                self.settle();
            }
        }
        assert!(self.under.is_empty(), "every request completes");
    }
}

/// Runs many worlds; returns sectors read wrong, blocks served from the cache, and pages whose contents were refused.
fn worlds(count: u64, steps: u64, guest: Guest, options: &EngineOptions) -> (u64, u64, u64) {
    let mut sum = (0, 0, 0);
    for seed in 0..count {
        let mut world = World::new(seed, guest, options.clone());
        world.run(steps);
        let stats = world.engine.stats();
        sum.0 += world.wrong;
        sum.1 += stats.hits;
        sum.2 += stats.refused_mismatch + stats.refused_stale;
    }
    sum
}

#[test]
fn an_honest_guest_reads_what_it_wrote() {
    for write in [WriteMode::Through, WriteMode::Delayed] {
        let (wrong, hits, mismatches) = worlds(150, 600, HONEST, &options(write));
        assert_eq!((wrong, mismatches), (0, 0), "{write:?}");
        assert!(hits > 1000, "{write:?}: {hits} hits");
    }
}

#[test]
fn the_rules_suffice_without_the_hash_for_an_honest_guest() {
    for write in [WriteMode::Through, WriteMode::Delayed] {
        let options = EngineOptions {
            hash_check: false,
            ..options(write)
        };
        let (wrong, hits, _) = worlds(150, 600, HONEST, &options);
        assert_eq!(wrong, 0, "{write:?}");
        assert!(hits > 1000, "{write:?}: {hits} hits");
    }
}

#[test]
fn each_rule_is_needed_without_the_hash_and_none_with_it() {
    let no_additions = Guest {
        tells_additions: false,
        ..HONEST
    };
    let no_migrations = Guest {
        tells_migrations: false,
        ..HONEST
    };
    let sly = Guest {
        sly: true,
        ..HONEST
    };
    for (what, guest, newest_check) in [
        ("additions", no_additions, true),
        ("migrations", no_migrations, true),
        ("pages changed in place", sly, true),
        ("the newest check", HONEST, false),
    ] {
        let with = EngineOptions {
            newest_check,
            ..options(WriteMode::Through)
        };
        let without = EngineOptions {
            hash_check: false,
            ..with.clone()
        };
        let (wrong, ..) = worlds(150, 600, guest, &without);
        assert!(
            wrong > 0,
            "{what}: nothing wrong was served without the hash"
        );
        let (wrong, hits, _) = worlds(150, 600, guest, &with);
        assert_eq!(wrong, 0, "{what}: with the hash");
        assert!(hits > 100, "{what}: {hits} hits");
    }
}

#[test]
fn failing_storage_and_a_failing_log_lose_nothing_that_was_acknowledged() {
    for write in [WriteMode::Through, WriteMode::Delayed] {
        let guest = Guest {
            failures: true,
            sly: true,
            ..HONEST
        };
        let (wrong, ..) = worlds(150, 600, guest, &options(write));
        assert_eq!(wrong, 0, "{write:?}");
    }
}

#[test]
fn lazy_contents_are_served_only_if_they_are_those_of_the_last_transfer() {
    let guest = Guest {
        lazy: true,
        ..HONEST
    };
    let (wrong, hits, stale) = worlds(150, 600, guest, &options(WriteMode::Delayed));
    assert_eq!(wrong, 0);
    assert!(hits > 500 && stale > 500, "{hits} hits, {stale} stale");
}

#[test]
fn a_cache_filled_from_storage_is_right_too() {
    for write in [WriteMode::Through, WriteMode::Delayed] {
        let options = EngineOptions {
            mode: CacheMode::FromStorage,
            ..options(write)
        };
        let guest = Guest {
            sly: true,
            ..HONEST
        };
        let (wrong, hits, _) = worlds(150, 600, guest, &options);
        assert_eq!(wrong, 0, "{write:?}");
        assert!(hits > 500, "{write:?}: {hits} hits");
    }
}
