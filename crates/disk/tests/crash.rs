//! Engine, dirty log and storage among crashes: the engine and the log are the real ones, storage is simulated.
//!
//! A *kill* ends the process, perhaps amid its recovery: of each write in flight any sectors are stored or not, and the next
//! process begins with the log and the list of failed syncs. A *crash* ends the host: of all writes since the last sync any
//! subset of sectors is on storage, and the log is gone or there in any older state. Sectors go bad, for a time or for
//! good; of a write that fails any other sectors are stored. Syncs fail and drop what they should have stored. The guest
//! evicts pages, changes them in place, and moves them. Rules:
//!
//! - A read returns what was written last, whether from the cache, the log or storage.
//! - A flush that succeeded is never lost; what was acknowledged survives a kill.
//! - A request waits for an order to storage, or for storage to be mended, never for nothing; every request ends, at
//!   the latest [`LAST_STEPS_MAX`] steps after storage is healthy again or the guest is gone.
//! - Comparing served pages with storage ([`EngineOptions::verify`]) finds no difference.
//!
//! Storage also *lies*: it loses writes, writes them elsewhere, and answers syncs without doing them. It has no checksums, so
//! a read cannot notice that. Excluded is therefore what storage then holds, in the very sectors of the lie and until they
//! are written again; all other sectors keep the rules. What can be noticed is: a page served from the cache that
//! differs from storage is counted by `verify`. A sector is stored whole or not at all, as disks guarantee.
//!
//! Each seed chooses which of these it meets, and how often. Each run has other seeds. `PLIMSOLL_CRASH_SEED=N` repeats one;
//! one that breaks a rule is repeated without each kind of trouble, then with ever fewer steps, as long as it still does, and
//! what is left is printed (`PLIMSOLL_CRASH_STEPS=N`, `PLIMSOLL_CRASH_WITHOUT=kills,...`).
#![allow(clippy::cast_possible_truncation, reason = "all numbers are small")]

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;
use std::{env, fs, io};

use fastrand::Rng;
use plimsoll_disk::{
    Action, Buffer, ByteRange, CacheMode, Contents, DirtyLog, DiskIdentity, DiskNumber, Engine,
    EngineOptions, GuestData, Notice, Operation, OutsideRam, PAGE_BYTES, Page, Request, Segment,
    Status, Submission, Tag, WriteErrorAction, WriteMode,
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
/// Orders carried out and turns, until all requests have ended.
const LAST_STEPS_MAX: u64 = 200;

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
    /// An evicted page enters the cache though the guest has changed it.
    HashCheck,
    /// As well, and though it is not the newest of its block. The hash alone would do for guests that change nothing.
    HashAndNewestCheck,
    /// Storage is taken for honest.
    Lies,
}

/// What a seed may meet.
#[derive(Debug, Clone, Copy)]
struct Weather {
    mode: CacheMode,
    write: WriteMode,
    /// Each process writes as it likes.
    write_changes: bool,
    write_error: WriteErrorAction,
    verify: bool,
    dirty_pages_max: u64,
    dirty_age_ms: u64,
    /// Bad sectors are mended now and then.
    mends: bool,
    trouble: Trouble,
    flushes: u64,
}

/// Each happens at one of so many occasions; 0 for never.
#[derive(Debug, Clone, Copy, Default)]
struct Trouble {
    kills: u64,
    recovery_kills: u64,
    crashes: u64,
    bad_sectors: u64,
    sync_failures: u64,
    lies: u64,
    notices: u64,
    scribbles: u64,
}

type Odds = fn(&mut Trouble) -> &mut u64;

const TROUBLE: [(&str, Odds); 8] = [
    ("kills", |trouble| &mut trouble.kills),
    ("recovery_kills", |trouble| &mut trouble.recovery_kills),
    ("crashes", |trouble| &mut trouble.crashes),
    ("bad_sectors", |trouble| &mut trouble.bad_sectors),
    ("sync_failures", |trouble| &mut trouble.sync_failures),
    ("lies", |trouble| &mut trouble.lies),
    ("notices", |trouble| &mut trouble.notices),
    ("scribbles", |trouble| &mut trouble.scribbles),
];

impl Weather {
    fn of(random: &mut Rng) -> Self {
        let mut one_of = |choices: &[u64]| choices[random.usize(..choices.len())];
        Self {
            mode: match one_of(&[0, 1, 1, 1, 1, 1, 1, 2]) {
                0 => CacheMode::None,
                1 => CacheMode::Exclusive,
                _ => CacheMode::FromStorage,
            },
            write: match one_of(&[0, 1, 1, 1]) {
                0 => WriteMode::Through,
                _ => WriteMode::Delayed,
            },
            write_changes: one_of(&[0, 0, 0, 1]) == 1,
            write_error: match one_of(&[0, 0, 1, 2]) {
                0 => WriteErrorAction::Report,
                1 => WriteErrorAction::NoSpace,
                _ => WriteErrorAction::Stop,
            },
            verify: one_of(&[0, 1]) == 1,
            dirty_pages_max: one_of(&[1, 3, 6, 12]),
            dirty_age_ms: one_of(&[100, 1000, 100_000]),
            mends: one_of(&[0, 1, 1]) == 1,
            trouble: Trouble {
                kills: one_of(&[0, 20, 60, 200]),
                recovery_kills: one_of(&[0, 2, 8]),
                crashes: one_of(&[0, 60, 150]),
                bad_sectors: one_of(&[0, 0, 30, 200]),
                sync_failures: one_of(&[0, 0, 5, 20]),
                lies: one_of(&[0, 0, 0, 15, 50]),
                notices: one_of(&[0, 2, 2, 4]),
                scribbles: one_of(&[0, 4, 30]),
            },
            flushes: one_of(&[6, 15, 40]),
        }
    }

    /// So that a rule that is left out is missed.
    fn without(&mut self, without: Without) {
        let trouble = &mut self.trouble;
        match without {
            Without::Nothing => {}
            Without::Boot => {
                (self.mode, self.write) = (CacheMode::Exclusive, WriteMode::Delayed);
                trouble.crashes = 60;
            }
            Without::FailedSyncs => {
                trouble.sync_failures = 5;
                (trouble.kills, trouble.crashes) = (20, 60);
            }
            Without::HashCheck => {
                self.mode = CacheMode::Exclusive;
                (trouble.notices, trouble.scribbles) = (2, 4);
            }
            Without::HashAndNewestCheck => {
                self.mode = CacheMode::Exclusive;
                (trouble.notices, trouble.scribbles) = (2, 0);
            }
            Without::Lies => trouble.lies = 15,
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

    /// What a sector holds, or may hold after a crash.
    fn possible(&self, sector: u64) -> BTreeSet<u64> {
        let unsynced = self.unsynced.get(&sector).into_iter().flatten();
        let known = [&self.stable, &self.current].map(|all| &all[sector as usize]);
        unsynced.chain(known).copied().collect()
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

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    requests: u64,
    kills: u64,
    crashes: u64,
    older_logs: u64,
    kept: u64,
    failed: u64,
    pauses: u64,
    recovery_kills: u64,
    lies: u64,
    noticed: u64,
    hits: u64,
    admitted: u64,
    last_steps_max: u64,
    /// The model's time and storage at the end: the same whenever a seed is repeated.
    end: u64,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.kills += other.kills;
        self.crashes += other.crashes;
        self.older_logs += other.older_logs;
        self.kept += other.kept;
        self.failed += other.failed;
        self.pauses += other.pauses;
        self.recovery_kills += other.recovery_kills;
        self.lies += other.lies;
        self.noticed += other.noticed;
        self.hits += other.hits;
        self.admitted += other.admitted;
        self.last_steps_max = self.last_steps_max.max(other.last_steps_max);
    }
}

impl World {
    fn new(seed: u64, without: Without, calm: &[&str]) -> Self {
        let mut random = Rng::with_seed(seed);
        let mut weather = Weather::of(&mut random);
        weather.without(without);
        for (_, odds) in TROUBLE.iter().filter(|(name, _)| calm.contains(name)) {
            *odds(&mut weather.trouble) = 0;
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
            engine: engine(&weather, without),
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

    /// Whether something happens that does at one of so many occasions. It draws a number in any case, so that without one
    /// kind of trouble the others stay as they are.
    fn happens(&mut self, odds: Odds) -> bool {
        let one_of = *odds(&mut self.weather.trouble);
        let number = self.random.u64(..);
        one_of > 0 && number.is_multiple_of(one_of)
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
        if self.weather.write_changes {
            self.weather.write = match self.random.bool() {
                true => WriteMode::Through,
                false => WriteMode::Delayed,
            };
        }
        self.engine = engine(&self.weather, self.without);
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
        let (left, kept) = loop {
            let left = DirtyLog::open(&self.log(), slots, &identity, &boot).unwrap();
            let mut kept = BTreeSet::new();
            let pages: Vec<_> = left.pages().map(Result::unwrap).collect();
            let dies = self.happens(|trouble| &mut trouble.recovery_kills);
            let some = self.random.usize(..=pages.len());
            for (location, page) in &pages[..if dies { some } else { pages.len() }] {
                if self.store(location.block() * 8, &page[..]).is_err() {
                    kept.insert(*location);
                }
            }
            if dies {
                self.counts.recovery_kills += 1;
                continue;
            }
            if !pages.is_empty() && self.sync().is_err() {
                kept = left.locations().collect();
            }
            break (left, kept);
        };
        let log = left
            .finish(&identity, &kept.iter().copied().collect())
            .unwrap();
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

    /// Writes sectors, honestly or not.
    fn store(&mut self, first: u64, bytes: &[u8]) -> io::Result<()> {
        let count = (bytes.len() / SECTOR) as u64;
        let stamps = bytes.chunks_exact(SECTOR).map(stamp_of);
        let bad = (first..first + count).find(|at| self.storage.bad.contains(at));
        if let Some(bad) = bad {
            for (sector, stamp) in (first..).zip(stamps) {
                if self.random.bool() && !self.storage.bad.contains(&sector) {
                    self.storage.set(sector, stamp);
                }
            }
            return Err(bad_sector(bad));
        }
        if self.happens(|trouble| &mut trouble.lies) {
            // It goes elsewhere, or nowhere.
            let to = self.random.u64(..2 * (SECTORS - count));
            if to < SECTORS - count {
                for (sector, stamp) in (to..).zip(stamps) {
                    self.storage.set(sector, stamp);
                }
                self.lied(to..to + count);
            }
            self.lied(first..first + count);
            return Ok(());
        }
        for (sector, stamp) in (first..).zip(stamps) {
            self.storage.set(sector, stamp);
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.happens(|trouble| &mut trouble.sync_failures) {
            self.storage.fail_sync(&mut self.random);
            self.sync_failed = true;
            return Err(io::Error::from_raw_os_error(5));
        }
        if self.happens(|trouble| &mut trouble.lies) {
            let unsynced: Vec<u64> = self.storage.unsynced.keys().copied().collect();
            self.lied(unsynced);
            return Ok(());
        }
        self.storage.sync();
        Ok(())
    }

    /// Storage has lied about these sectors: what it has or may have there is as if it had been written now.
    fn lied(&mut self, sectors: impl IntoIterator<Item = u64>) {
        self.counts.lies += 1;
        if self.without == Without::Lies {
            return;
        }
        self.time += 1;
        for sector in sectors {
            for stamp in self.storage.possible(sector) {
                self.changes[sector as usize].push(Change {
                    stamp: Some(stamp),
                    begun: self.time,
                    ended: Some(self.time),
                    ok: false,
                    durable: false,
                });
            }
        }
    }

    /// Ends the process: of each write in flight any sectors are stored.
    fn end(&mut self) {
        for order in std::mem::take(&mut self.orders) {
            let (offset, stamps): (u64, Vec<u64>) = match &order.action {
                Action::Write { offset, buffer, .. } => {
                    (*offset, buffer.chunks_exact(SECTOR).map(stamp_of).collect())
                }
                Action::Zero { range, .. } => {
                    (range.offset, vec![0; range.bytes as usize / SECTOR])
                }
                _ => continue,
            };
            for (sector, stamp) in (offset / SECTOR as u64..).zip(stamps) {
                if self.random.bool() && !self.storage.bad.contains(&sector) {
                    self.storage.set(sector, stamp);
                }
            }
        }
        self.count_engine();
        // The log is closed with it.
        self.engine = engine(&self.weather, self.without);
        self.time += 1;
        for (_, request) in std::mem::take(&mut self.in_flight) {
            self.ended(&request, false);
        }
    }

    fn count_engine(&mut self) {
        let stats = self.engine.stats();
        self.counts.hits += stats.hits;
        self.counts.admitted += stats.admitted;
        self.counts.noticed += stats.wrong_served;
        assert!(
            stats.wrong_served == 0 || self.counts.lies > 0,
            "{} served pages differ from storage, which was honest",
            stats.wrong_served
        );
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
        let pause = self.engine.wants_pause();
        self.counts.pauses += u64::from(pause);
        let (_, failing) = self.engine.storage_errors(DISK);
        assert!(
            self.in_flight.is_empty() || !self.orders.is_empty() || pause || failing > 0,
            "{} requests wait for nothing",
            self.in_flight.len()
        );
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
            } => {
                let result = self.store(sector(offset), &from);
                buffer = Some(from);
                result
            }
            Action::Sync => self.sync(),
            Action::Discard(_) => Ok(()),
            Action::Zero { range, .. } => {
                let zeros = vec![0; range.bytes as usize];
                self.store(sector(range.offset), &zeros)
            }
        };
        self.engine.carried_out(id, result, buffer);
    }

    fn turn(&mut self) {
        self.clock += Duration::from_millis(100 * self.random.u64(1..8));
        self.engine.turn(self.clock);
        self.settle();
    }

    /// The guest evicts, releases or moves a page that no request uses.
    fn notice(&mut self) {
        let used: BTreeSet<u64> = self.in_flight.values().map(|under| under.place).collect();
        let free = (0..PLACES * PLACE_PAGES).filter(|at| !used.contains(&(at / PLACE_PAGES)));
        let free: Vec<u64> = free.collect();
        let Some(frame) = self.random.choice(&free).copied() else {
            return;
        };
        let to = self.random.choice(&free).copied().unwrap_or(frame);
        let ram = Arc::clone(&self.ram);
        let mut page: Page = [0; PAGE_BYTES];
        ram.read(frame * PAGE_BYTES as u64, &mut page).unwrap();
        if self.happens(|trouble| &mut trouble.scribbles) {
            self.stamp += 64;
            page = self
                .stamp
                .to_le_bytes()
                .repeat(PAGE_BYTES / 8)
                .try_into()
                .unwrap();
            ram.write(frame * PAGE_BYTES as u64, &page).unwrap();
        }
        let lazy = Contents::Lazy(&*ram);
        let (notice, contents) = match self.random.u64(..8) {
            0 => (Notice::Release { frame }, None),
            1 => (Notice::Add { frame }, None),
            2 => {
                ram.write(to * PAGE_BYTES as u64, &page).unwrap();
                (Notice::Migrate { frame, to }, None)
            }
            3 | 4 => (Notice::Evict { frame }, Some(lazy)),
            _ => (Notice::Evict { frame }, Some(Contents::Copied(&page))),
        };
        self.engine.notice(notice, contents);
        self.settle();
    }

    fn step(&mut self) {
        if self.happens(|trouble| &mut trouble.bad_sectors) {
            let sector = self.random.u64(..SECTORS);
            // Some are mended: space is freed.
            if self.random.u64(..3) > 0 || !self.weather.mends {
                self.storage.bad.insert(sector);
            } else {
                self.storage.bad.clear();
            }
        }
        if self.happens(|trouble| &mut trouble.notices) {
            self.notice();
        }
        if self.happens(|trouble| &mut trouble.kills) {
            self.kill();
        } else if self.happens(|trouble| &mut trouble.crashes) {
            self.crash();
        } else if self.random.u64(..40) == 0 && self.older_logs.len() < 4 {
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
        for step in 0.. {
            if self.in_flight.is_empty() && self.orders.is_empty() && !self.engine.wants_pause() {
                self.counts.last_steps_max = step;
                break;
            }
            assert!(
                step < LAST_STEPS_MAX,
                "{} requests do not end, {} orders, pause: {}",
                self.in_flight.len(),
                self.orders.len(),
                self.engine.wants_pause()
            );
            if self.orders.is_empty() {
                self.turn();
            } else {
                let at = self.random.usize(..self.orders.len());
                self.carry_out(at);
                self.settle();
            }
        }
        self.crash();
        let (time, stamps) = (self.time, &self.storage.current);
        self.counts.end = stamps.iter().fold(time, |all, stamp| {
            all.rotate_left(5).wrapping_mul(31) ^ stamp
        });
        self.counts
    }
}

fn engine(weather: &Weather, without: Without) -> Engine {
    let options = EngineOptions {
        mode: weather.mode,
        cache_bytes: 1 << 20,
        cache_bytes_max: 1 << 20,
        write: weather.write,
        dirty_pages_max: weather.dirty_pages_max,
        dirty_age_max: Duration::from_millis(weather.dirty_age_ms),
        write_error: weather.write_error,
        hash_check: !matches!(without, Without::HashCheck | Without::HashAndNewestCheck),
        newest_check: without != Without::HashAndNewestCheck,
        verify: weather.verify,
    };
    Engine::new(options, None).unwrap()
}

thread_local! {
    /// Whether a panic of this thread is caught and told later.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs a seed, without the kinds of trouble named; what went wrong, if anything did.
fn runs(seed: u64, steps: u64, without: Without, calm: &[&str]) -> Result<Counts, String> {
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
    let ran = catch_unwind(AssertUnwindSafe(|| {
        World::new(seed, without, calm).run(steps)
    }));
    CAUGHT.set(false);
    ran.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_default()
    })
}

/// How to repeat a seed that fails, with as little as possible: its error, and the variables to set.
fn smallest(seed: u64, steps: u64, without: Without, calm: &[&str]) -> (String, String) {
    let fails = |steps, calm: &[&str]| runs(seed, steps, without, calm).err();
    let mut calm = calm.to_vec();
    for (name, _) in TROUBLE {
        calm.push(name);
        if fails(steps, &calm).is_none() {
            calm.pop();
        }
    }
    let fewest = (0..=steps).find_map(|steps| Some((steps, fails(steps, &calm)?)));
    let (steps, error) = fewest.expect("a seed is the same each time");
    let repeat = format!(
        "PLIMSOLL_CRASH_SEED={seed} PLIMSOLL_CRASH_STEPS={steps} PLIMSOLL_CRASH_WITHOUT={}",
        calm.join(",")
    );
    (error, repeat)
}

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok()?.parse().ok()
}

#[test]
fn no_crash_loses_what_was_flushed_and_no_kill_what_was_acknowledged() {
    let only = number("PLIMSOLL_CRASH_SEED");
    let steps = number("PLIMSOLL_CRASH_STEPS").unwrap_or(STEPS);
    let calm = env::var("PLIMSOLL_CRASH_WITHOUT").unwrap_or_default();
    let calm: Vec<&str> = calm.split(',').filter(|name| !name.is_empty()).collect();
    let first = only.unwrap_or_else(|| Rng::new().u64(..1 << 48));
    let count = only.map_or(longer(1000) as u64, |_| 1);
    println!("seeds {first} to {}", first + count - 1);
    let mut sum = Counts::default();
    for seed in first..first + count {
        match runs(seed, steps, Without::Nothing, &calm) {
            Ok(counts) => sum.add(counts),
            Err(error) => {
                let (smallest, repeat) = smallest(seed, steps, Without::Nothing, &calm);
                panic!(
                    "seed {seed}: {error}\nrepeat it: {repeat} \
                     cargo test -p plimsoll-disk --release --test crash\nwhich says: {smallest}"
                );
            }
        }
    }
    println!("{sum:?}");
    if only.is_none() {
        assert!(sum.kills > 1000 && sum.crashes > 1000, "{sum:?}");
        assert!(sum.recovery_kills > 100, "{sum:?}");
        assert!(sum.older_logs > 300 && sum.kept > 300, "{sum:?}");
        assert!(sum.failed > 300 && sum.pauses > 300, "{sum:?}");
        assert!(sum.admitted > 1000 && sum.hits > 1000, "{sum:?}");
        assert!(sum.lies > 1000, "{sum:?}");
    }
}

#[test]
fn a_page_served_from_the_cache_that_storage_has_lost_is_counted() {
    let noticed = |seed| runs(seed, STEPS, Without::Nothing, &[]).map(|counts| counts.noticed);
    assert!((0..1000).any(|seed| noticed(seed).unwrap() > 0));
}

#[test]
fn a_seed_is_the_same_each_time() {
    for seed in 0..100 {
        let [first, second] = [0, 1].map(|_| runs(seed, STEPS, Without::Nothing, &[]));
        assert_eq!(first, second, "seed {seed}");
    }
}

#[test]
fn each_rule_is_needed_and_a_seed_that_fails_is_made_smaller() {
    for without in [
        Without::Boot,
        Without::FailedSyncs,
        Without::HashCheck,
        Without::HashAndNewestCheck,
        Without::Lies,
    ] {
        let broken = (0..300).find(|seed| runs(*seed, STEPS, without, &[]).is_err());
        let Some(seed) = broken else {
            panic!("{without:?}: nothing was lost");
        };
        let (error, repeat) = smallest(seed, STEPS, without, &[]);
        println!("{without:?}: {repeat}: {error}");
        let whole = format!("PLIMSOLL_CRASH_STEPS={STEPS} ");
        assert!(!repeat.contains(&whole), "{without:?}: {repeat}");
    }
}
