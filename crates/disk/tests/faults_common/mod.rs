//! Daemons for tests, guests that drive them, and the expected contents of a disk.
#![allow(dead_code, reason = "each test file uses a part of it")]

use fastrand::Rng;
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plimsoll_disk::{
    CacheMode, Direct, DiskError, DiskOptions, EngineOptions, Machine, MachineHandle,
    MachineOptions, MachineStats, Socket, WriteErrorAction, WriteMode,
};
use plimsoll_driver::{
    Bank, ControlDisk, Driver, DriverOptions, FrontendError, Ram, RamOptions, Request, Segment,
    Status,
};
use plimsoll_skip::{Lack, skip};
use tempfile::TempDir;

/// Size of the images.
pub const IMAGE_BYTES: u64 = 8 << 20;
const SECTORS: u64 = IMAGE_BYTES / 512;

/// Configuration of a machine.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Setup {
    pub disks: usize,
    pub read_only: bool,
    pub mode: CacheMode,
    pub write: WriteMode,
    pub cache_bytes: u64,
    /// Compare what the cache serves with storage.
    pub verify: bool,
    pub dirty_pages_max: u64,
    pub dirty_age_ms: u64,
    pub direct: bool,
    pub pause_without_space: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            disks: 1,
            read_only: false,
            mode: CacheMode::None,
            write: WriteMode::Through,
            cache_bytes: 8 << 20,
            verify: true,
            dirty_pages_max: 512,
            dirty_age_ms: 300,
            direct: true,
            pause_without_space: false,
        }
    }
}

/// A directory with images of zeros and sockets, and one in memory with a dirty log.
pub struct Place {
    folder: TempDir,
    state: TempDir,
    pub setup: Setup,
}

impl Place {
    pub fn new(setup: Setup) -> Self {
        // On a disk, because direct I/O is not for tmpfs.
        Self::within(setup, Path::new("/var/tmp"), Path::new("/dev/shm"))
    }

    /// With images and log in directories of these.
    pub fn within(setup: Setup, images: &Path, state: &Path) -> Self {
        let place = Self {
            folder: tempfile::tempdir_in(images).unwrap(),
            state: tempfile::tempdir_in(state).unwrap(),
            setup,
        };
        for disk in 0..place.setup.disks {
            let image = File::create(place.image(disk)).unwrap();
            image.set_len(IMAGE_BYTES).unwrap();
        }
        place
    }

    pub fn image(&self, disk: usize) -> PathBuf {
        self.folder.path().join(format!("image{disk}"))
    }

    pub fn socket(&self, disk: usize) -> PathBuf {
        self.folder.path().join(format!("socket{disk}"))
    }

    pub fn log(&self) -> PathBuf {
        self.state.path().join("dirty.log")
    }

    pub fn control(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    pub fn options(&self) -> MachineOptions {
        options(self.folder.path(), self.state.path(), &self.setup)
    }
}

fn options(folder: &Path, state: &Path, setup: &Setup) -> MachineOptions {
    let disks = (0..setup.disks).map(|disk| DiskOptions {
        image: folder.join(format!("image{disk}")),
        socket: Socket::Path(folder.join(format!("socket{disk}"))),
        read_only: setup.read_only,
        serial: format!("disk{disk}"),
        queues: 4,
        direct: if setup.direct {
            Direct::Auto
        } else {
            Direct::Off
        },
    });
    MachineOptions {
        disks: disks.collect(),
        control: Some(Socket::Path(folder.join("control"))),
        engine: EngineOptions {
            mode: setup.mode,
            cache_bytes: setup.cache_bytes,
            cache_bytes_max: 4 * setup.cache_bytes,
            write: setup.write,
            dirty_pages_max: setup.dirty_pages_max,
            dirty_age_max: Duration::from_millis(setup.dirty_age_ms),
            write_error: if setup.pause_without_space {
                WriteErrorAction::NoSpace
            } else {
                WriteErrorAction::Report
            },
            verify: setup.verify,
            ..EngineOptions::default()
        },
        state: Some(state.to_owned()),
        ..MachineOptions::default()
    }
}

/// A machine that runs in a thread.
pub struct MachineThread {
    pub place: Place,
    pub handle: MachineHandle,
    thread: Option<JoinHandle<Result<(), DiskError>>>,
}

impl MachineThread {
    pub fn start(setup: Setup) -> Self {
        Self::at(Place::new(setup))
    }

    pub fn at(place: Place) -> Self {
        let mut machine = Machine::new(place.options()).unwrap();
        let handle = machine.handle();
        let thread = Some(thread::spawn(move || machine.run()));
        Self {
            place,
            handle,
            thread,
        }
    }

    pub fn connect(&self, ram: &Arc<Ram>, disk: usize, options: DriverOptions) -> Driver {
        Driver::connect(ram, &self.place.socket(disk), options).unwrap()
    }

    pub fn connect_control(&self, ram: &Arc<Ram>) -> ControlDisk {
        let options = DriverOptions::default();
        ControlDisk::new(Driver::connect(ram, &self.place.control(), options).unwrap())
    }

    pub fn stats(&self) -> MachineStats {
        self.handle.stats().unwrap()
    }

    /// Waits at most 20 s for the machine's message.
    pub fn wait_for(&self, what: &str, ready: impl Fn(&MachineStats) -> bool) -> MachineStats {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let stats = self.stats();
            if ready(&stats) {
                return stats;
            }
            assert!(Instant::now() < end, "no {what}: {stats:#?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the machine, which must have run well.
    pub fn stop(&mut self) {
        self.end().unwrap();
    }

    /// Ends the machine.
    pub fn end(&mut self) -> Result<(), DiskError> {
        self.handle.stop().unwrap();
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for MachineThread {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A failed test reports the reason itself.
            let _ = self.handle.stop();
            let _ = thread.join();
        }
    }
}

const FOLDER: &str = "PLIMSOLL_FAULTS_FOLDER";
const STATE: &str = "PLIMSOLL_FAULTS_STATE";
const SETUP: &str = "PLIMSOLL_FAULTS_SETUP";

/// A machine in a process of its own: this test program again, with a test that [serves](serve_as_told).
pub struct Process {
    pub place: Place,
    child: Option<Child>,
}

impl Process {
    pub fn start(setup: Setup) -> Self {
        Self::at(Place::new(setup))
    }

    pub fn at(place: Place) -> Self {
        let mut process = Self { place, child: None };
        process.restart();
        process
    }

    pub fn restart(&mut self) {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "serves_until_it_is_killed", "--ignored"])
            .env(FOLDER, self.place.folder.path())
            .env(STATE, self.place.state.path())
            .env(SETUP, serde_json::to_string(&self.place.setup).unwrap())
            .stdout(Stdio::null())
            .spawn();
        self.child = Some(child.unwrap());
    }

    /// Ends it by SIGKILL.
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill();
        }
    }
}

/// What the child of a [`Process`] does.
pub fn serve_as_told() {
    let folder = PathBuf::from(env::var_os(FOLDER).expect("started by a test"));
    let state = PathBuf::from(env::var_os(STATE).unwrap());
    let setup = serde_json::from_str(&env::var(SETUP).unwrap()).unwrap();
    Machine::new(options(&folder, &state, &setup))
        .unwrap()
        .run()
        .unwrap();
}

/// Contents of a sector written with this seed; 0 is zeros.
pub fn sector_of(seed: u64, sector: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    if seed != 0 {
        for (at, word) in bytes.chunks_mut(8).enumerate() {
            let value = (seed << 32 | sector << 8).wrapping_add(at as u64);
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

/// Expected contents of a disk by the acknowledged writes: the seed of each sector, `None` if it is arbitrary.
pub struct Model(Vec<Option<u64>>);

impl Model {
    pub fn zeros() -> Self {
        Self(vec![Some(0); usize::try_from(SECTORS).unwrap()])
    }

    fn set(&mut self, first: u64, count: u64, seed: Option<u64>) {
        let range = usize::try_from(first).unwrap()..usize::try_from(first + count).unwrap();
        self.0[range].fill(seed);
    }

    /// Asserts that these bytes, from sector `first` on, are the disk's expected contents.
    pub fn check(&self, first: u64, bytes: &[u8], what: &str) {
        for (sector, bytes) in (first..).zip(bytes.chunks(512)) {
            let seed = self.0[usize::try_from(sector).unwrap()];
            let Some(seed) = seed else { continue };
            let found = &bytes[..16];
            assert!(
                bytes == sector_of(seed, sector),
                "{what}: sector {sector} is not of seed {seed} but {found:x?}"
            );
        }
    }

    /// Asserts that an image holds it.
    pub fn check_image(&self, image: &Path) {
        self.check(0, &fs::read(image).unwrap(), "image");
    }
}

/// What a request in flight does.
#[derive(Clone, Copy)]
enum Operation {
    Read,
    Write(u64),
    Discard,
    Zero,
    Flush,
}

/// A request in flight.
struct Flight {
    doing: Operation,
    first: u64,
    count: u64,
    segments: Vec<Segment>,
}

/// A guest that submits random requests and checks their results.
pub struct Guest {
    pub disk: Driver,
    pub model: Model,
    random: Rng,
    queues: usize,
    buffers: Vec<u64>,
    flights: Vec<Option<Flight>>,
    next_seed: u64,
}

/// Maximum number of sectors of a request.
const COUNT_MAX: u64 = 128;

impl Guest {
    /// Creates a guest with `depth` requests in flight over `queues` queues.
    pub fn new(disk: Driver, queues: usize, depth: usize, seed: u64) -> Self {
        let ram = Arc::clone(disk.ram());
        let buffers = (0..depth).map(|at| {
            let bank = if at % 2 == 0 { Bank::Low } else { Bank::High };
            ram.allocate(bank, 512 * usize::try_from(COUNT_MAX).unwrap() + 4096)
        });
        Self {
            disk,
            model: Model::zeros(),
            random: Rng::with_seed(seed),
            queues,
            buffers: buffers.collect(),
            flights: (0..depth).map(|_| None).collect(),
            next_seed: 1,
        }
    }

    /// Submits a random request that overlaps none in flight.
    fn submit(&mut self, at: usize) -> Result<(), FrontendError> {
        let aligned = self.random.u64(..2) == 0;
        let (first, count) = loop {
            let (mut first, mut count) = (
                self.random.u64(..SECTORS - COUNT_MAX),
                1 + self.random.u64(..COUNT_MAX),
            );
            if aligned {
                first -= first % 8;
                count = count.next_multiple_of(8);
            }
            let free =
                self.flights.iter().flatten().all(|other| {
                    first + count <= other.first || other.first + other.count <= first
                });
            if free {
                break (first, count);
            }
        };
        let doing = match self.random.u64(..20) {
            0 => Operation::Flush,
            1 => Operation::Discard,
            2 => Operation::Zero,
            3..11 => Operation::Write(self.next_seed),
            _ => Operation::Read,
        };
        self.next_seed += 1;
        let segments = self.segments(self.buffers[at], count * 512, aligned);
        if let Operation::Write(seed) = doing {
            let bytes: Vec<u8> = (first..first + count)
                .flat_map(|sector| sector_of(seed, sector))
                .collect();
            let mut rest = &bytes[..];
            for segment in &segments {
                let (piece, others) = rest.split_at(segment.bytes as usize);
                self.disk.ram().write(segment.address, piece);
                rest = others;
            }
        }
        let ranges = [(first, u32::try_from(count).unwrap())];
        let sector = first;
        let unmap = self.random.u64(..2) == 0;
        let request = match doing {
            Operation::Read => Request::Read {
                sector,
                segments: &segments,
            },
            Operation::Write(_) => Request::Write {
                sector,
                segments: &segments,
            },
            Operation::Discard => Request::Discard(&ranges),
            Operation::Zero => Request::WriteZeroes {
                ranges: &ranges,
                unmap,
            },
            Operation::Flush => Request::Flush,
        };
        let queue = usize::try_from(self.random.u64(..self.queues as u64)).unwrap();
        self.disk.queue(queue).submit(&request, at as u64)?;
        self.flights[at] = Some(Flight {
            doing,
            first,
            count,
            segments,
        });
        Ok(())
    }

    /// Cuts a buffer into pieces: whole pages, or of any length at any place.
    fn segments(&mut self, buffer: u64, bytes: u64, aligned: bool) -> Vec<Segment> {
        let mut address = buffer;
        if !aligned {
            address += self.random.u64(..4096);
        }
        let mut segments = Vec::new();
        let mut left = bytes;
        while left > 0 {
            let piece = match aligned {
                true => 4096,
                // Few enough pieces.
                false => bytes / 40 + 1 + self.random.u64(..9000),
            };
            let piece = piece.min(left);
            segments.push(Segment {
                address,
                bytes: u32::try_from(piece).unwrap(),
            });
            address += piece;
            left -= piece;
        }
        segments
    }

    /// Completes `requests` requests, and leaves others in flight.
    ///
    /// # Errors
    /// If the daemon ends.
    pub fn run(&mut self, requests: usize) -> Result<(), FrontendError> {
        let mut done = 0;
        while done < requests {
            for at in 0..self.flights.len() {
                if self.flights[at].is_none() {
                    self.submit(at)?;
                }
            }
            done += self.complete()?;
        }
        Ok(())
    }

    /// Waits for all requests in flight.
    ///
    /// # Errors
    /// If the daemon ends.
    pub fn settle(&mut self) -> Result<(), FrontendError> {
        while self.flights.iter().any(Option::is_some) {
            self.complete()?;
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<usize, FrontendError> {
        for queue in 0..self.queues {
            self.disk.queue(queue).notify()?;
        }
        self.disk.wait()?;
        let mut done = 0;
        for queue in 0..self.queues {
            while let Some(completion) = self.disk.poll(queue)? {
                assert_eq!(completion.status, Status::Ok);
                let at = usize::try_from(completion.tag).unwrap();
                let flight = self.flights[at].take().unwrap();
                self.completed(&flight);
                done += 1;
            }
        }
        Ok(done)
    }

    fn completed(&mut self, flight: &Flight) {
        let Flight { first, count, .. } = *flight;
        match flight.doing {
            Operation::Read => {
                let mut bytes = Vec::new();
                for segment in &flight.segments {
                    let mut piece = vec![0; segment.bytes as usize];
                    self.disk.ram().read(segment.address, &mut piece);
                    bytes.append(&mut piece);
                }
                self.model.check(first, &bytes, "read");
            }
            Operation::Write(seed) => self.model.set(first, count, Some(seed)),
            Operation::Discard => self.model.set(first, count, None),
            Operation::Zero => self.model.set(first, count, Some(0)),
            Operation::Flush => {}
        }
    }

    /// Whether all that was acknowledged is in an image, apart from what requests in flight may have changed.
    pub fn is_stored_in(&self, image: &Path) -> bool {
        let image = fs::read(image).unwrap();
        let mut sectors = (0..).zip(image.chunks(512)).zip(&self.model.0);
        sectors.all(|((sector, bytes), seed)| {
            let changing = self
                .flights
                .iter()
                .flatten()
                .any(|flight| (flight.first..flight.first + flight.count).contains(&sector));
            changing || seed.is_none_or(|seed| bytes == sector_of(seed, sector))
        })
    }

    /// Reads the whole disk and checks its contents.
    pub fn check(&mut self) {
        let mut bytes = vec![0; usize::try_from(IMAGE_BYTES).unwrap()];
        self.disk.read(0, &mut bytes).unwrap();
        self.model.check(0, &bytes, "whole disk");
    }
}

/// A tmpfs of this size, mounted until it is dropped; `None` if that is not allowed here.
pub struct SmallTmpfs(tempfile::TempDir);

impl SmallTmpfs {
    pub fn new(mebibytes: u64) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mebibytes}m"), "none"])
            .arg(folder.path())
            .output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(folder)),
            _ => {
                skip(Lack::Root, "no right to mount a tmpfs");
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).output();
    }
}

/// RAM of two parts.
pub fn ram() -> Arc<Ram> {
    Ram::new(&RamOptions::default()).unwrap()
}
