//! Engine, dirty log and storage among crashes: the engine and the log are the real ones, storage is simulated.
//!
//! A *kill* ends the process: of each write in flight any sectors are stored or not, and the next process begins with the
//! log and the list of failed syncs. A *crash* ends the host: of all writes since the last sync any subset of sectors is
//! on storage, and the log is gone or there in any older state. Sectors go bad and stay so, syncs fail and drop what they
//! should have stored. Rules: a read returns what was written last; a flush that succeeded is never lost; what was
//! acknowledged survives a kill; every request ends, at the latest once storage is healthy again.
//!
//! Each run has other seeds. `PLIMSOLL_CRASH_SEED=N` repeats one; one that breaks a rule is repeated with ever fewer steps
//! until it no longer does, and the smallest number is printed (`PLIMSOLL_CRASH_STEPS=N`).
//!
//! Not here: storage that lies (lost or misdirected writes, torn sectors), which nothing could notice without checksums.
#![allow(clippy::cast_possible_truncation, reason = "all numbers are small")]

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;
use std::{env, fs, io};

use fastrand::Rng;
use plimsoll_disk::{
    Action, Buffer, ByteRange, CacheMode, DirtyLog, DiskIdentity, DiskNumber, Engine,
    EngineOptions, GuestData, Operation, OutsideRam, PAGE_BYTES, Request, Segment, Status,
    Submission, Tag, WriteErrorAction, WriteMode,
};
use plimsoll_skip::longer;

const BLOCKS: u64 = 16;
const SECTOR: usize = 512;
const SECTORS: u64 = BLOCKS * 8;
const DISK: DiskNumber = DiskNumber(0);
/// Requests in flight, each with this many pages of guest memory.
const PLACES: u64 = 12;
const PLACE_PAGES: u64 = 3;
const STEPS: u64 = 500;

struct Ram(Mutex<Vec<u8>>);

impl Ram {
    fn range(&self, address: u64, bytes: usize) -> Result<std::ops::Range<usize>, OutsideRam> {
        let range = address as usize..address as usize + bytes;
        match range.end <= self.0.lock().unwrap().len() {
            true => Ok(range),
            false => Err(OutsideRam { address, bytes }),
        }
    }
}

impl GuestData for Ram {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        let range = self.range(address, bytes.len())?;
        bytes.copy_from_slice(&self.0.lock().unwrap()[range]);
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        let range = self.range(address, bytes.len())?;
        self.0.lock().unwrap()[range].copy_from_slice(bytes);
        Ok(())
    }

    fn is_ram(&self, frame: u64) -> bool {
        frame < PLACES * PLACE_PAGES
    }
}

/// A rule of ours that is left out, to show that it is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Without {
    Nothing,
    /// A log of another boot is taken for one of this boot.
    Boot,
    /// The next process does not know which syncs failed.
    FailedSyncs,
}

/// What a seed may meet.
#[derive(Debug, Clone, Copy)]
struct Weather {
    write: WriteMode,
    write_error: WriteErrorAction,
    dirty_pages_max: u64,
    /// One of so many steps; 0 for never.
    kills: u64,
    crashes: u64,
    bad_sectors: u64,
    sync_failures: u64,
    flushes: u64,
}

impl Weather {
    fn of(random: &mut Rng) -> Self {
        let mut one_of = |choices: &[u64]| choices[random.usize(..choices.len())];
        Self {
            write: match one_of(&[0, 1, 1, 1]) {
                0 => WriteMode::Through,
                _ => WriteMode::Delayed,
            },
            write_error: match one_of(&[0, 0, 1, 2]) {
                0 => WriteErrorAction::Report,
                1 => WriteErrorAction::NoSpace,
                _ => WriteErrorAction::Stop,
            },
            dirty_pages_max: one_of(&[1, 3, 6, 12]),
            kills: one_of(&[0, 20, 60, 200]),
            crashes: one_of(&[0, 60, 150]),
            bad_sectors: one_of(&[0, 0, 30, 200]),
            sync_failures: one_of(&[0, 0, 5, 20]),
            flushes: one_of(&[6, 15, 40]),
        }
    }
}

/// A write of a sector.
#[derive(Debug, Clone, Copy)]
struct Change {
    /// `None`: any contents.
    stamp: Option<u64>,
    begun: u64,
    ended: Option<u64>,
    ok: bool,
    durable: bool,
}

enum Asked {
    Read,
    Change { durable: bool },
    Flush,
}

struct InFlight {
    asked: Asked,
    begun: u64,
    first: u64,
    sectors: u64,
    place: u64,
}

/// A disk as the host sees it.
struct Storage {
    /// What is read.
    current: Vec<u64>,
    /// What a crash leaves at least.
    stable: Vec<u64>,
    /// Writes since the last sync, by sector, in order.
    unsynced: BTreeMap<u64, Vec<u64>>,
    bad: BTreeSet<u64>,
}

impl Storage {
    fn set(&mut self, sector: u64, stamp: u64) {
        self.current[sector as usize] = stamp;
        self.unsynced.entry(sector).or_default().push(stamp);
    }

    /// Writes until the first bad sector.
    fn write(&mut self, first: u64, bytes: &[u8]) -> io::Result<()> {
        for (sector, bytes) in (first..).zip(bytes.chunks_exact(SECTOR)) {
            if self.bad.contains(&sector) {
                return Err(bad_sector(sector));
            }
            self.set(sector, stamp_of(bytes));
        }
        Ok(())
    }

    fn sync(&mut self) {
        for (sector, stamps) in std::mem::take(&mut self.unsynced) {
            self.stable[sector as usize] = *stamps.last().unwrap();
        }
    }

    /// A failed sync: the kernel forgets any of the writes, though they are read until the crash.
    fn fail_sync(&mut self, random: &mut Rng) {
        self.unsynced.retain(|_, _| random.bool());
    }

    /// The host dies and comes back.
    fn crash(&mut self, random: &mut Rng) {
        for (sector, stamps) in std::mem::take(&mut self.unsynced) {
            if let Some(stamp) = stamps.get(random.usize(..=stamps.len())) {
                self.stable[sector as usize] = *stamp;
            }
        }
        self.current.clone_from(&self.stable);
    }
}

/// Half of the sectors fail for lack of space.
fn bad_sector(sector: u64) -> io::Error {
    // ENOSPC and EIO.
    match sector % 2 {
        0 => io::Error::from_raw_os_error(28),
        _ => io::Error::from_raw_os_error(5),
    }
}

/// The stamp of a sector, of which every word must be that stamp.
fn stamp_of(bytes: &[u8]) -> u64 {
    let mut words = bytes.as_chunks::<8>().0.iter();
    let first = words.next().unwrap();
    assert!(words.all(|word| word == first), "a mixed sector");
    u64::from_le_bytes(*first)
}

struct World {
    random: Rng,
    weather: Weather,
    without: Without,
    folder: tempfile::TempDir,
    engine: Engine,
    ram: Arc<Ram>,
    storage: Storage,
    orders: Vec<Submission>,
    changes: Vec<Vec<Change>>,
    in_flight: BTreeMap<u64, InFlight>,
    time: u64,
    stamp: u64,
    /// Begin of the newest flush that succeeded.
    flushed: u64,
    boot: u64,
    /// The disk failed to sync, as the state directory records.
    sync_failed: bool,
    /// States in which the log was in this boot.
    older_logs: Vec<Vec<u8>>,
    clock: Duration,
    counts: Counts,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    requests: u64,
    kills: u64,
    crashes: u64,
    older_logs: u64,
    kept: u64,
    failed: u64,
    pauses: u64,
}

impl World {
    fn new(seed: u64, without: Without) -> Self {
        let mut random = Rng::with_seed(seed);
        let mut weather = Weather::of(&mut random);
        match without {
            Without::Nothing => {}
            Without::Boot => (weather.write, weather.crashes) = (WriteMode::Delayed, 60),
            Without::FailedSyncs => {
                weather.sync_failures = 5;
                (weather.kills, weather.crashes) = (20, 60);
            }
        }
        let initial = |_| Change {
            stamp: Some(0),
            begun: 0,
            ended: Some(0),
            ok: true,
            durable: true,
        };
        let sectors = SECTORS as usize;
        Self {
            engine: engine(&weather),
            random,
            weather,
            without,
            folder: tempfile::tempdir_in("/dev/shm").unwrap(),
            ram: Arc::new(Ram(Mutex::new(vec![
                0;
                (PLACES * PLACE_PAGES) as usize
                    * PAGE_BYTES
            ]))),
            storage: Storage {
                current: vec![0; sectors],
                stable: vec![0; sectors],
                unsynced: BTreeMap::new(),
                bad: BTreeSet::new(),
            },
            orders: Vec::new(),
            changes: (0..sectors).map(|at| vec![initial(at)]).collect(),
            in_flight: BTreeMap::new(),
            time: 1,
            stamp: 1,
            flushed: 0,
            boot: 0,
            sync_failed: false,
            older_logs: Vec::new(),
            clock: Duration::ZERO,
            counts: Counts::default(),
        }
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("dirty.log")
    }

    /// Whether the sector may hold the stamp for a reader that began at `begun`, or after a crash of the host.
    fn allows(&self, sector: u64, stamp: u64, begun: u64, crashed: bool) -> bool {
        let changes = &self.changes[sector as usize];
        changes.iter().any(|change| {
            change.stamp.is_none_or(|own| own == stamp)
                && !changes.iter().any(|later| {
                    later.ok
                        && change.ended.is_some_and(|ended| ended < later.begun)
                        && later
                            .ended
                            .is_some_and(|ended| ended < begun || (crashed && later.durable))
                })
        })
    }

    /// Begins a process: recovers what the log has, as a machine does.
    fn start(&mut self) {
        self.engine = engine(&self.weather);
        let identity = [DiskIdentity {
            disk: 0,
            image: "image".into(),
            device: 1,
            inode: 1,
            size_bytes: SECTORS * SECTOR as u64,
            modified_ns: None,
        }];
        let boot = match self.without {
            Without::Boot => "one".to_owned(),
            _ => self.boot.to_string(),
        };
        let slots = self.weather.dirty_pages_max + 4;
        let left = DirtyLog::open(&self.log(), slots, &identity, &boot).unwrap();
        let mut kept = HashSet::new();
        let pages: Vec<_> = left.pages().map(Result::unwrap).collect();
        for (location, page) in &pages {
            if (self.storage.write(location.block() * 8, &page[..])).is_err() {
                kept.insert(*location);
            }
        }
        if !pages.is_empty() && self.sync().is_err() {
            kept = left.locations().collect();
        }
        let log = left.finish(&identity, &kept).unwrap();
        self.engine.set_dirty_log(Box::new(log));
        for location in &kept {
            assert!(self.engine.restore(*location));
        }
        self.counts.kept += kept.len() as u64;
        if self.sync_failed && self.without != Without::FailedSyncs {
            self.engine.sync_failed(DISK);
        }
        self.engine.attend(DISK, true);
        self.engine.turn(self.clock);
        self.settle();
    }

    fn sync(&mut self) -> io::Result<()> {
        let odds = self.weather.sync_failures;
        if odds > 0 && self.random.u64(..odds) == 0 {
            self.storage.fail_sync(&mut self.random);
            self.sync_failed = true;
            return Err(io::Error::from_raw_os_error(5));
        }
        self.storage.sync();
        Ok(())
    }

    /// Ends the process: of each write in flight any sectors are stored.
    fn end(&mut self) {
        for order in std::mem::take(&mut self.orders) {
            if let Action::Write { offset, buffer, .. } = order.action {
                let first = offset / SECTOR as u64;
                for (sector, bytes) in (first..).zip(buffer.chunks_exact(SECTOR)) {
                    if self.random.bool() && !self.storage.bad.contains(&sector) {
                        self.storage.set(sector, stamp_of(bytes));
                    }
                }
            }
        }
        // The log is closed with it.
        self.engine = engine(&self.weather);
        self.time += 1;
        for (_, request) in std::mem::take(&mut self.in_flight) {
            self.ended(&request, false);
        }
    }

    fn kill(&mut self) {
        self.counts.kills += 1;
        self.end();
        self.start();
        self.check(self.time, false);
    }

    fn crash(&mut self) {
        self.counts.crashes += 1;
        if self.log().exists() {
            self.older_logs.push(fs::read(self.log()).unwrap());
        }
        self.end();
        self.storage.crash(&mut self.random);
        let _ = fs::remove_file(self.log());
        self.boot += 1;
        self.sync_failed = false;
        if !self.older_logs.is_empty() && self.random.u64(..4) > 0 {
            let at = self.random.usize(..self.older_logs.len());
            fs::write(self.log(), &self.older_logs[at]).unwrap();
            self.counts.older_logs += 1;
        }
        self.older_logs.clear();
        self.start();
        self.check(self.flushed, true);
        // The guest begins anew with what is there.
        self.time += 1;
        for (sector, changes) in (0..).zip(&mut self.changes) {
            *changes = vec![Change {
                stamp: Some(self.storage.current[sector]),
                begun: self.time,
                ended: Some(self.time),
                ok: true,
                durable: true,
            }];
        }
        self.time += 1;
        self.flushed = self.time;
    }

    /// Checks what a new process finds: the storage, and what it could not write there.
    fn check(&mut self, begun: u64, crashed: bool) {
        for sector in 0..SECTORS {
            let mut stamp = self.storage.current[sector as usize];
            if self.engine.stats().dirty_pages > 0 {
                // What could not be written is served all the same; nothing else is in flight.
                match self.read_now(sector) {
                    Some(read) => stamp = read,
                    None => continue,
                }
            }
            assert!(
                self.allows(sector, stamp, begun, crashed),
                "sector {sector} has {stamp} after a {}: {:?}",
                if crashed { "crash" } else { "kill" },
                self.changes[sector as usize]
            );
        }
    }

    /// Reads a sector at once, while no other request is in flight.
    fn read_now(&mut self, sector: u64) -> Option<u64> {
        let segments = vec![Segment {
            address: 0,
            bytes: SECTOR as u32,
        }];
        let offset = sector * SECTOR as u64;
        self.request(Operation::Read { offset, segments }, u64::MAX);
        let status = loop {
            if let Some(done) = self.engine.next_completed() {
                break done.status;
            }
            while let Some(order) = self.engine.next_submission() {
                self.orders.push(order);
            }
            let reads = |order: &Submission| matches!(order.action, Action::Read { .. });
            let at = self.orders.iter().position(reads).expect("a read");
            self.carry_out(at);
        };
        let mut bytes = [0; SECTOR];
        self.ram.read(0, &mut bytes).unwrap();
        (status == Status::Ok).then(|| stamp_of(&bytes))
    }

    fn request(&mut self, operation: Operation, tag: u64) {
        let ram: Arc<dyn GuestData> = self.ram.clone();
        self.engine.submit(Request {
            disk: DISK,
            tag: Tag(tag),
            operation,
            ram,
        });
    }

    /// The end of a request, or of the process amid it.
    fn ended(&mut self, request: &InFlight, ok: bool) {
        let time = self.time;
        match request.asked {
            Asked::Change { durable } => {
                for sector in request.first..request.first + request.sectors {
                    for change in &mut self.changes[sector as usize] {
                        if change.begun == request.begun {
                            (change.ended, change.ok, change.durable) = (Some(time), ok, durable);
                        }
                    }
                }
            }
            Asked::Flush if ok => self.flushed = self.flushed.max(request.begun),
            _ => {}
        }
    }

    fn submit(&mut self) {
        let used: BTreeSet<u64> = self.in_flight.values().map(|under| under.place).collect();
        let Some(place) = (0..PLACES).find(|place| !used.contains(place)) else {
            return;
        };
        self.time += 1;
        let begun = self.time;
        let (first, sectors) = if self.random.u64(..4) == 0 {
            let first = self.random.u64(..SECTORS - 8);
            (first, 1 + self.random.u64(..8))
        } else {
            let block = self.random.u64(..BLOCKS);
            let blocks = 1 + self.random.u64(..PLACE_PAGES.min(BLOCKS - block));
            (block * 8, blocks * 8)
        };
        // Guests do not write a sector twice at a time.
        let overlaps =
            |under: &InFlight| first < under.first + under.sectors && under.first < first + sectors;
        let address = place * PLACE_PAGES * PAGE_BYTES as u64;
        let mut segments = Vec::new();
        for at in (0..sectors).step_by(8) {
            segments.push(Segment {
                address: address + at * SECTOR as u64,
                bytes: ((sectors - at).min(8) as usize * SECTOR) as u32,
            });
        }
        let offset = first * SECTOR as u64;
        let range = ByteRange {
            offset,
            bytes: sectors * SECTOR as u64,
        };
        let durable = self.random.u64(..8) == 0;
        let kind = self.random.u64(..24);
        let (operation, asked, stamps) = if self.random.u64(..self.weather.flushes) == 0 {
            (Operation::Flush, Asked::Flush, None)
        } else if kind < 6 {
            (Operation::Read { offset, segments }, Asked::Read, None)
        } else if self.in_flight.values().any(overlaps) {
            return;
        } else if kind == 6 {
            let ranges = vec![range];
            let unmap = self.random.bool();
            let operation = Operation::WriteZeroes {
                ranges,
                unmap,
                durable,
            };
            (operation, Asked::Change { durable }, Some(None))
        } else {
            self.stamp += 64;
            for (at, stamp) in (0..sectors).zip(self.stamp..) {
                let words = stamp.to_le_bytes().repeat(SECTOR / 8);
                self.ram
                    .write(address + at * SECTOR as u64, &words)
                    .unwrap();
            }
            let operation = Operation::Write {
                offset,
                segments,
                durable,
            };
            (operation, Asked::Change { durable }, Some(Some(self.stamp)))
        };
        if let Some(stamps) = stamps {
            for at in 0..sectors {
                self.changes[(first + at) as usize].push(Change {
                    stamp: Some(stamps.map_or(0, |stamp| stamp + at)),
                    begun,
                    ended: None,
                    ok: false,
                    durable: false,
                });
            }
        }
        let under = InFlight {
            asked,
            begun,
            first,
            sectors,
            place,
        };
        self.in_flight.insert(begun, under);
        self.counts.requests += 1;
        self.request(operation, begun);
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(order) = self.engine.next_submission() {
            self.orders.push(order);
        }
        while let Some(done) = self.engine.next_completed() {
            self.time += 1;
            let request = self.in_flight.remove(&done.tag.0).expect("ended once");
            let ok = done.status == Status::Ok;
            self.counts.failed += u64::from(!ok);
            if let (Asked::Read, true) = (&request.asked, ok) {
                for at in 0..request.sectors {
                    let mut bytes = [0; SECTOR];
                    let address = request.place * PLACE_PAGES * PAGE_BYTES as u64;
                    (self.ram.read(address + at * SECTOR as u64, &mut bytes)).unwrap();
                    let (sector, stamp) = (request.first + at, stamp_of(&bytes));
                    assert!(
                        self.allows(sector, stamp, request.begun, false),
                        "{stamp} is read in sector {sector}: {:?}",
                        self.changes[sector as usize]
                    );
                }
            }
            self.ended(&request, ok);
        }
        self.counts.pauses += u64::from(self.engine.wants_pause());
    }

    /// Carries out one of the storage's orders.
    fn carry_out(&mut self, at: usize) {
        let Submission { id, action, .. } = self.orders.swap_remove(at);
        let mut buffer: Option<Buffer> = None;
        let sector = |offset: u64| offset / SECTOR as u64;
        let result = match action {
            Action::Read {
                offset,
                buffer: mut into,
            } => {
                let mut result = Ok(());
                for (sector, bytes) in (sector(offset)..).zip(into.chunks_exact_mut(SECTOR)) {
                    if self.storage.bad.contains(&sector) {
                        result = Err(io::Error::from_raw_os_error(5));
                    }
                    let stamp = self.storage.current[sector as usize];
                    bytes.copy_from_slice(&stamp.to_le_bytes().repeat(SECTOR / 8));
                }
                buffer = Some(into);
                result
            }
            Action::Write {
                offset,
                buffer: from,
                durable,
            } => {
                let first = sector(offset);
                let result = self.storage.write(first, &from);
                if durable && result.is_ok() {
                    for sector in first..first + (from.len() / SECTOR) as u64 {
                        self.storage.unsynced.remove(&sector);
                        self.storage.stable[sector as usize] =
                            self.storage.current[sector as usize];
                    }
                }
                buffer = Some(from);
                result
            }
            Action::Sync => self.sync(),
            Action::Discard(_) => Ok(()),
            Action::Zero { range, .. } => {
                let zeros = vec![0; range.bytes as usize];
                self.storage.write(sector(range.offset), &zeros)
            }
        };
        self.engine.carried_out(id, result, buffer);
    }

    fn turn(&mut self) {
        self.clock += Duration::from_millis(100 * self.random.u64(1..8));
        self.engine.turn(self.clock);
        self.settle();
    }

    fn step(&mut self) {
        let Weather {
            kills,
            crashes,
            bad_sectors,
            ..
        } = self.weather;
        let happens = |random: &mut Rng, one_of: u64| one_of > 0 && random.u64(..one_of) == 0;
        if happens(&mut self.random, bad_sectors) {
            let sector = self.random.u64(..SECTORS);
            // Some are mended: space is freed.
            if self.random.u64(..3) > 0 {
                self.storage.bad.insert(sector);
            } else {
                self.storage.bad.clear();
            }
        }
        if happens(&mut self.random, kills) {
            self.kill();
        } else if happens(&mut self.random, crashes) {
            self.crash();
        } else if happens(&mut self.random, 40) && self.older_logs.len() < 4 {
            self.older_logs.push(fs::read(self.log()).unwrap());
        } else {
            match self.random.u64(..8) {
                0..4 => self.submit(),
                4 if self.random.u64(..4) == 0 => self.turn(),
                _ if self.orders.is_empty() => {}
                _ => {
                    let at = self.random.usize(..self.orders.len());
                    self.carry_out(at);
                    self.settle();
                }
            }
        }
        self.time += 1;
    }

    fn run(mut self, steps: u64) -> Counts {
        self.start();
        for _ in 0..steps {
            self.step();
        }
        if self.random.bool() {
            self.storage.bad.clear();
        } else {
            // Nobody waits any more for storage that stays bad.
            self.engine.attend(DISK, false);
            self.settle();
        }
        for _ in 0..10_000 {
            if self.in_flight.is_empty() && self.orders.is_empty() && !self.engine.wants_pause() {
                break;
            }
            if self.orders.is_empty() {
                self.turn();
            } else {
                let at = self.random.usize(..self.orders.len());
                self.carry_out(at);
                self.settle();
            }
        }
        assert!(self.in_flight.is_empty(), "a request does not end");
        assert!(!self.engine.wants_pause(), "the VM stays paused");
        self.crash();
        self.counts
    }
}

fn engine(weather: &Weather) -> Engine {
    let options = EngineOptions {
        mode: CacheMode::Exclusive,
        cache_bytes: 1 << 20,
        cache_bytes_max: 1 << 20,
        write: weather.write,
        dirty_pages_max: weather.dirty_pages_max,
        dirty_age_max: Duration::from_secs(1),
        write_error: weather.write_error,
        hash_check: true,
        newest_check: true,
        verify: false,
    };
    Engine::new(options, None).unwrap()
}

thread_local! {
    /// Whether a panic of this thread is caught and told later.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs a seed; what went wrong, if anything did.
fn runs(seed: u64, steps: u64, without: Without) -> Result<Counts, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !CAUGHT.get() {
                tell(panic);
            }
        }));
    });
    CAUGHT.set(true);
    let ran = catch_unwind(AssertUnwindSafe(|| World::new(seed, without).run(steps)));
    CAUGHT.set(false);
    ran.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_default()
    })
}

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok()?.parse().ok()
}

#[test]
fn no_crash_loses_what_was_flushed_and_no_kill_what_was_acknowledged() {
    let only = number("PLIMSOLL_CRASH_SEED");
    let steps = number("PLIMSOLL_CRASH_STEPS").unwrap_or(STEPS);
    let first = only.unwrap_or_else(|| Rng::new().u64(..1 << 48));
    let count = only.map_or(longer(300) as u64, |_| 1);
    println!("seeds {first} to {}", first + count - 1);
    let mut sum = Counts::default();
    for seed in first..first + count {
        match runs(seed, steps, Without::Nothing) {
            Ok(counts) => {
                sum.requests += counts.requests;
                sum.kills += counts.kills;
                sum.crashes += counts.crashes;
                sum.older_logs += counts.older_logs;
                sum.kept += counts.kept;
                sum.failed += counts.failed;
                sum.pauses += counts.pauses;
            }
            Err(error) => {
                let fewest = (1..=steps)
                    .find(|steps| runs(seed, *steps, Without::Nothing).is_err())
                    .unwrap_or(steps);
                panic!(
                    "seed {seed}: {error}\nrepeat it: PLIMSOLL_CRASH_SEED={seed} PLIMSOLL_CRASH_STEPS={fewest} \
                     cargo test -p plimsoll-disk --release --test crash"
                );
            }
        }
    }
    println!("{sum:?}");
    if only.is_none() {
        assert!(sum.kills > 500 && sum.crashes > 500, "{sum:?}");
        assert!(sum.older_logs > 100 && sum.kept > 100, "{sum:?}");
        assert!(sum.failed > 100 && sum.pauses > 100, "{sum:?}");
    }
}

#[test]
fn each_rule_is_needed() {
    for without in [Without::Boot, Without::FailedSyncs] {
        let broken = (0..300).any(|seed| runs(seed, STEPS, without).is_err());
        assert!(broken, "{without:?}: nothing was lost");
    }
}
