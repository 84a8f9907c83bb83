//! `plimsoll disk serve`: a VM's disks over vhost-user, and the cache under them.

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;
use std::{panic, process};

use anyhow::Context as _;
use clap::ValueEnum;
use plimsoll_disk::{
    CacheMode, DiskOptions, EngineOptions, Location, Machine, MachineHandle, MachineOptions,
    MachineStats, Misses, Observer, PAGE_BYTES, Socket, WriteMode, misses,
};
use plimsoll_flow::{PageCount, PageSize, ReferenceBatch, Source as _};
use plimsoll_hcache::StoreOptions;
use plimsoll_source::Format;
use rustix::fs::{FileType, fstat};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, getpid, getppid, getrlimit,
    pidfd_getfd, pidfd_open, set_parent_process_death_signal, setrlimit,
};
use serde_json::{Value, json};

use super::admin::{Admin, Daemon, Request};
use super::ghosts::Ghosts;
use super::options::DiskSpec;
use super::report::{self, RecordReport, Report};
use super::second_chance::Behind;
use crate::hcache::serve::memory;
use crate::size::{ByteSize, Interval, Rate};
use plimsoll_output::{bail_usage, stop_flag};

/// How often the signals are looked at; each second, the ghosts follow the guest's memory.
const TURN: Duration = Duration::from_millis(100);
const TURNS_OF_A_SECOND: u32 = 10;
/// How far a cache can be resized unless told otherwise.
const CACHE_MAX: ByteSize = ByteSize(4 << 30);
/// Where the state of VMs is kept unless told otherwise.
const STATE_FOLDER: &str = "/run/plimsoll";
/// What management software is told of this program (vhost-user.json of QEMU).
const CAPABILITIES: &str =
    "{\n  \"type\": \"block\",\n  \"features\": [\"read-only\", \"blk-file\"]\n}\n";

/// Serve a VM's disks over vhost-user-blk, with an exclusive cache under them, until Ctrl-C or SIGTERM.
///
/// The cache stores pages that the guest evicts from its own memory (reported by the guest's module through the control
/// disk) and returns them when they are read again: docs/disk.md. A second Ctrl-C ends without writing back.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Disk to serve: a raw image or a block device, and socket=PATH, read-only, serial=TEXT, queues=N, direct=auto|on|off
    #[arg(long, value_name = "IMAGE,socket=PATH[,..]")]
    disk: Vec<DiskSpec>,
    /// Socket of the control disk, by which the guest's module communicates
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Socket for `disk stat`, `disk resize` and `disk enable`, for this user only
    #[arg(long, value_name = "SOCKET")]
    admin: Option<PathBuf>,
    /// Name of the VM [default: the first image's, without its extension]
    #[arg(long, value_parser = name)]
    name: Option<String>,
    #[command(flatten)]
    cache: CacheArgs,
    /// Guest memory size, if the guest's module does not report it; lower end of the curve
    #[arg(long, value_name = "SIZE")]
    direct_size: Option<ByteSize>,
    /// Print the capabilities of this vhost-user backend as JSON, and exit
    #[arg(long)]
    print_capabilities: bool,
    /// Socket of --blk-file
    #[arg(
        long,
        value_name = "PATH",
        requires = "blk_file",
        conflicts_with = "fd"
    )]
    socket_path: Option<PathBuf>,
    /// Open descriptor of the connection on which to serve --blk-file
    #[arg(long, value_name = "N", requires = "blk_file")]
    fd: Option<i32>,
    /// Disk to serve at --socket-path or --fd (the name used by other vhost-user programs)
    #[arg(long, value_name = "FILE", conflicts_with = "disk")]
    blk_file: Option<PathBuf>,
    /// Serve --blk-file read-only
    #[arg(long, requires = "blk_file")]
    read_only: bool,
    /// Exit, after writing back, when the process with this id ends; it must be the parent process
    #[arg(long, value_name = "PID", hide = true)]
    parent: Option<i32>,
}

/// The cache and what stands beside it.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CacheArgs {
    /// Memory of the cache, including its metadata [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    pub cache: Option<ByteSize>,
    /// Largest size that `disk resize` may set [default: 4GiB, or --cache if larger]
    #[arg(long, value_name = "SIZE")]
    pub cache_max: Option<ByteSize>,
    /// How pages enter the cache [default: exclusive]
    #[arg(long, value_enum, value_name = "MODE")]
    pub cache_mode: Option<Mode>,
    /// When writes reach storage [default: through]
    #[arg(long, value_enum, value_name = "WHEN")]
    pub write: Option<WriteWhen>,
    /// With --write delayed: maximum share of the cache that may be dirty [default: 25%]
    #[arg(long, value_name = "RATE")]
    pub dirty: Option<Rate>,
    /// With --write delayed: maximum time that a page stays dirty [default: 30s]
    #[arg(long, value_name = "TIME")]
    pub dirty_age: Option<Interval>,
    /// Directory, preferably on tmpfs, for the log of delayed writes, which outlives the daemon [default: /run/plimsoll/NAME]
    #[arg(long, value_name = "FOLDER")]
    pub state: Option<PathBuf>,
    /// Size of the ghost list: how far the curve reaches beyond the cache; 0 for no curve [default: 256MiB]
    #[arg(long, value_name = "SIZE")]
    pub ghost: Option<ByteSize>,
    /// Socket of the hcache server behind the guest's device-mapper target
    #[arg(long, value_name = "SOCKET")]
    pub hcache: Option<PathBuf>,
    /// Record the blocks that the guest reads as a trace for `plimsoll mrc`
    #[arg(long, value_name = "TRACE")]
    pub record: Option<PathBuf>,
    /// Experiment: admit pages without checking their hash
    #[arg(long, hide = true)]
    pub no_hash_check: bool,
    /// Experiment: admit pages that are not the newest of their location
    #[arg(long, hide = true)]
    pub no_newest_check: bool,
    /// Experiment: compare data served from the cache with storage
    #[arg(long, hide = true)]
    pub verify: bool,
}

/// How pages enter the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// From guest memory, as the guest evicts them
    Exclusive,
    /// Read from storage again when the guest evicts them; for comparison
    FromStorage,
    /// No cache
    None,
}

/// When writes reach storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WriteWhen {
    /// Before they complete
    Through,
    /// At a flush, when too many pages are dirty, or after --dirty-age
    Delayed,
}

/// Checks the name of a VM.
///
/// # Errors
///
/// What a name is.
pub fn name(text: &str) -> Result<String, String> {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let fits = (1..=48).contains(&text.len()) && !text.starts_with('.');
    if fits && text.chars().all(allowed) {
        Ok(text.to_owned())
    } else {
        Err(
            "a name has 1 to 48 letters, digits, '-', '_' and '.', and does not begin with '.'"
                .into(),
        )
    }
}

/// A VM's name made from that of its first image.
#[must_use]
pub fn name_of(image: Option<&Path>) -> String {
    let stem = image.and_then(Path::file_stem);
    let stem = stem.map(|stem| stem.to_string_lossy().into_owned());
    let letters = stem.iter().flat_map(|stem| stem.chars().take(48));
    let made: String = letters
        .map(|letter| {
            if name(&format!("x{letter}")).is_ok() {
                letter
            } else {
                '-'
            }
        })
        .collect();
    name(&made).unwrap_or_else(|_| "vm".to_owned())
}

impl CacheArgs {
    fn mode(&self) -> CacheMode {
        match self.cache_mode {
            None | Some(Mode::Exclusive) => CacheMode::Exclusive,
            Some(Mode::FromStorage) => CacheMode::FromStorage,
            Some(Mode::None) => CacheMode::None,
        }
    }

    fn delayed(&self) -> bool {
        self.write == Some(WriteWhen::Delayed)
    }

    fn cache(&self) -> ByteSize {
        self.cache.unwrap_or(ByteSize(64 << 20))
    }

    fn ghost(&self) -> PageCount {
        let bytes = self.ghost.map_or(256 << 20, |size| size.0);
        PageCount(bytes / PAGE_BYTES as u64)
    }

    /// Refuses what cannot be, and says what the engine is to be.
    ///
    /// # Errors
    ///
    /// [`UsageError`](plimsoll_output::exit::UsageError), or that this machine's memory is not known.
    pub fn engine(&self) -> anyhow::Result<EngineOptions> {
        let mode = self.mode();
        if mode == CacheMode::None {
            if let Some(cache) = self.cache {
                bail_usage!(
                    "--cache {cache} and --cache-mode none: there is a cache or there is none"
                );
            }
            if self.delayed() {
                bail_usage!(
                    "--write delayed needs a cache to keep the writes in: not --cache-mode none"
                );
            }
        }
        if !self.delayed() {
            let dirty = self.dirty.map(|_| "--dirty");
            if let Some(option) = dirty.or(self.dirty_age.map(|_| "--dirty-age")) {
                bail_usage!("{option} goes with --write delayed: without it nothing is dirty");
            }
        }
        let (cache, memory) = (self.cache(), memory()?);
        let least = ByteSize(StoreOptions::MIN_CAPACITY_BYTES);
        if cache < least {
            bail_usage!("--cache {cache}: the minimum is {least}");
        }
        let most = self.cache_max.unwrap_or(cache.max(CACHE_MAX.min(memory)));
        if most < cache {
            bail_usage!("--cache-max {most} is less than --cache {cache}");
        }
        for (option, size) in [("--cache", cache), ("--cache-max", most)] {
            if size > memory {
                let memory = memory.rounded();
                bail_usage!("{option} {size} is more than this machine's memory, {memory}");
            }
        }
        let dirty = self.dirty.map_or(0.25, Rate::get);
        let cache_pages = PageCount(cache.0 / PAGE_BYTES as u64);
        Ok(EngineOptions {
            mode,
            cache_bytes: cache.0,
            cache_bytes_max: most.0,
            write: if self.delayed() {
                WriteMode::Delayed
            } else {
                WriteMode::Through
            },
            dirty_pages_max: cache_pages.scaled(dirty).0.max(1),
            dirty_age_max: self
                .dirty_age
                .map_or(Duration::from_secs(30), Interval::get),
            hash_check: !self.no_hash_check,
            newest_check: !self.no_newest_check,
            verify: self.verify,
        })
    }

    /// The same as arguments.
    #[must_use]
    pub fn arguments(&self) -> Vec<std::ffi::OsString> {
        let mut arguments = Vec::new();
        let mut add = |option: &str, value: Option<std::ffi::OsString>| {
            if let Some(value) = value {
                arguments.extend([option.into(), value]);
            }
        };
        let value = |value: &dyn ToString| Some(value.to_string().into());
        add("--cache", self.cache.and_then(|v| value(&v)));
        add("--cache-max", self.cache_max.and_then(|v| value(&v)));
        let possible = |v: clap::builder::PossibleValue| v.get_name().to_owned().into();
        let mode = self.cache_mode.and_then(|v| v.to_possible_value());
        add("--cache-mode", mode.map(possible));
        let write = self.write.and_then(|v| v.to_possible_value());
        add("--write", write.map(possible));
        add("--dirty", self.dirty.and_then(|v| value(&v)));
        add("--dirty-age", self.dirty_age.and_then(|v| value(&v)));
        add("--state", self.state.clone().map(Into::into));
        add("--ghost", self.ghost.and_then(|v| value(&v)));
        add("--hcache", self.hcache.clone().map(Into::into));
        add("--record", self.record.clone().map(Into::into));
        for (option, set) in [
            ("--no-hash-check", self.no_hash_check),
            ("--no-newest-check", self.no_newest_check),
            ("--verify", self.verify),
        ] {
            arguments.extend(set.then(|| option.into()));
        }
        arguments
    }
}

impl Args {
    fn disks(&self) -> anyhow::Result<Vec<DiskOptions>> {
        let mut disks = Vec::new();
        for disk in &self.disk {
            let Some(socket) = &disk.socket else {
                bail_usage!("--disk {}: it needs socket=PATH", disk.image.display());
            };
            disks.push(served(disk, Socket::Path(socket.clone())));
        }
        if let Some(image) = &self.blk_file {
            let socket = match (&self.socket_path, self.fd) {
                (Some(path), _) => Socket::Path(path.clone()),
                (None, Some(fd)) => Socket::Fd(inherited(fd)?),
                (None, None) => bail_usage!("--blk-file needs --socket-path or --fd"),
            };
            let mut disk = DiskSpec::new(image.clone());
            disk.read_only = self.read_only;
            disks.push(served(&disk, socket));
        }
        if disks.is_empty() {
            bail_usage!("there is nothing to serve: name a disk with --disk IMAGE,socket=PATH");
        }
        Ok(disks)
    }

    fn name(&self) -> String {
        let first = self.disk.first().map(|disk| &disk.image);
        let made = || name_of(first.or(self.blk_file.as_ref()).map(PathBuf::as_path));
        self.name.clone().unwrap_or_else(made)
    }

    /// The folder for delayed writes. Where a former daemon of this VM may have left some, they are looked for
    /// even if this one delays none.
    fn state(&self, name: &str) -> anyhow::Result<Option<PathBuf>> {
        let default = Path::new(STATE_FOLDER).join(name);
        let state = match &self.cache.state {
            Some(state) => state.clone(),
            None if self.cache.delayed() || default.is_dir() => default,
            None => return Ok(None),
        };
        let made = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&state);
        made.with_context(|| {
            format!(
                "cannot create the directory {}: see --state",
                state.display()
            )
        })?;
        Ok(Some(state))
    }
}

/// A descriptor that this process was started with. It stays open beside the one returned.
fn inherited(fd: i32) -> anyhow::Result<OwnedFd> {
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    let copy = pidfd_getfd(own, fd, PidfdGetfdFlags::empty());
    let copy = copy.with_context(|| format!("--fd {fd}: no such descriptor"))?;
    let kind = FileType::from_raw_mode(fstat(&copy)?.st_mode);
    if !kind.is_socket() {
        bail_usage!("--fd {fd} is not a socket");
    }
    Ok(copy)
}

fn served(disk: &DiskSpec, socket: Socket) -> DiskOptions {
    DiskOptions {
        image: disk.image.clone(),
        socket,
        read_only: disk.read_only,
        serial: disk.serial.clone().unwrap_or_default(),
        queues: disk.queues.unwrap_or(64),
        direct: disk.direct,
    }
}

/// Lets the process have as many descriptors as it may: each queue of each disk takes three.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // What is refused leaves what was allowed before.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    );
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for what cannot be served as it is asked for, and why the disks cannot be,
/// or no longer, served.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.print_capabilities {
        return Ok(out.write_all(CAPABILITIES.as_bytes())?);
    }
    let engine = args.cache.engine()?;
    let disks = args.disks()?;
    let name = args.name();
    let stop = stop_flag()?;
    allow_descriptors();
    if let Some(parent) = args.parent {
        end_with(parent)?;
    }
    let ghosts = match args.cache.ghost() {
        PageCount(0) => None,
        beyond => {
            let direct = args
                .direct_size
                .map(|size| PageCount(size.0 / PAGE_BYTES as u64));
            let cache = PageCount(engine.cache_bytes / PAGE_BYTES as u64);
            Some(Ghosts::new(direct, cache, beyond).context("no curve")?)
        }
    };
    let recorder = args
        .cache
        .record
        .as_deref()
        .map(Recorder::start)
        .transpose()?;
    let mut observers: Vec<Box<dyn Observer>> = Vec::new();
    observers.extend(ghosts.clone().map(|ghosts| Box::new(ghosts) as _));
    let (record, recording) = match recorder {
        Some((recorder, observer)) => {
            observers.push(observer);
            (
                Some((recorder.trace.clone(), Arc::clone(&recorder.lost))),
                Some(recorder),
            )
        }
        None => (None, None),
    };
    let options = MachineOptions {
        disks,
        control: args.control.clone().map(Socket::Path),
        engine,
        observer: match observers.len() {
            0 => None,
            _ => Some(Box::new(Observers(observers))),
        },
        second_chance: match &args.cache.hcache {
            Some(socket) => Some(Box::new(Behind::new(socket, &name))),
            None => None,
        },
        state: args.state(&name)?,
        sweep: true,
    };

    thread::scope(|scope| {
        let (started, starting) = mpsc::sync_channel(1);
        let serving = scope.spawn(move || -> anyhow::Result<()> {
            let mut machine = Machine::new(options)?;
            // The other end waits for exactly this.
            let _ = started.send(machine.handle());
            Ok(machine.run()?)
        });
        let Ok(handle) = starting.recv() else {
            return joined(serving);
        };
        let told = Told {
            vm: name,
            handle,
            ghosts,
            record,
        };
        let served = told.serve(args, &stop, &serving, out);
        // It may have ended by itself.
        let _ = told.handle.stop();
        let ended = joined(serving);
        drop(told);
        served.and(ended)
    })?;
    recording.map_or(Ok(()), Recorder::finish)
}

fn joined(thread: ScopedJoinHandle<'_, anyhow::Result<()>>) -> anyhow::Result<()> {
    thread
        .join()
        .unwrap_or_else(|panic| panic::resume_unwind(panic))
}

/// Has this process told to stop when its parent ends.
fn end_with(parent: i32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))?;
    let is_parent = getppid()
        .map(Pid::as_raw_nonzero)
        .is_some_and(|pid| pid.get() == parent);
    if !is_parent {
        bail_usage!(
            "--parent {parent}: the process that started {} is another",
            process::id()
        );
    }
    Ok(())
}

/// What answers on the admin socket.
#[derive(Clone)]
struct Told {
    vm: String,
    handle: MachineHandle,
    ghosts: Option<Ghosts>,
    record: Option<(PathBuf, Arc<AtomicU64>)>,
}

impl Told {
    /// Serves until it is to stop, or the machine has.
    fn serve(
        &self,
        args: &Args,
        stop: &AtomicBool,
        serving: &ScopedJoinHandle<'_, anyhow::Result<()>>,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let admin = args.admin.as_deref();
        let admin = admin.map(|path| Admin::serve(path, Arc::new(self.clone())));
        let _admin = admin.transpose()?;
        self.say(args, &self.handle.stats()?, out)?;
        let mut turns = 0_u32;
        while !stop.load(Ordering::Relaxed) && !serving.is_finished() {
            thread::sleep(TURN);
            turns = turns.wrapping_add(1);
            if let Some(ghosts) = &self.ghosts
                && turns.is_multiple_of(TURNS_OF_A_SECOND)
                && let Ok(stats) = self.handle.stats()
            {
                // Without memory for a longer list the curve ends where it did.
                let _ = ghosts.settle(&stats);
            }
        }
        Ok(())
    }

    /// Says what is served, and how.
    fn say(&self, args: &Args, stats: &MachineStats, out: &mut dyn Write) -> anyhow::Result<()> {
        for (number, disk) in stats.disks.iter().enumerate() {
            writeln!(
                out,
                "disk: {number} is {} ({}{}, {}) at {}",
                disk.image,
                ByteSize(disk.size_bytes).rounded(),
                if disk.read_only { ", read-only" } else { "" },
                if disk.direct_io {
                    "direct I/O"
                } else {
                    "through the host's page cache"
                },
                disk.socket,
            )?;
        }
        let engine = &stats.engine;
        let cache = ByteSize(engine.cache_bytes).rounded();
        let what = match engine.mode {
            CacheMode::None => "no cache".to_owned(),
            CacheMode::Exclusive => format!("exclusive cache of {cache}"),
            CacheMode::FromStorage => format!("cache of {cache} filled from storage"),
        };
        let write = match engine.write {
            WriteMode::Through => "writes go through".to_owned(),
            WriteMode::Delayed => format!(
                "up to {} of writes delayed",
                ByteSize(engine.dirty_pages_max * PAGE_BYTES as u64).rounded()
            ),
        };
        let control = match &args.control {
            Some(path) => format!("control disk at {}", path.display()),
            None if engine.mode == CacheMode::None => "no control disk".to_owned(),
            None => "no control disk: the guest cannot report evictions".to_owned(),
        };
        writeln!(out, "disk: serving {}, {what}, {write}, {control}", self.vm)?;
        Ok(out.flush()?)
    }
}

impl Daemon for Told {
    fn answer(&self, request: Request) -> anyhow::Result<Value> {
        Ok(match request {
            Request::Stat => {
                let stats = self.handle.stats()?;
                let told = self.ghosts.as_ref().map(|ghosts| ghosts.prediction(&stats));
                let record = self.record.as_ref().map(|(trace, lost)| RecordReport {
                    trace: trace.clone(),
                    lost: lost.load(Ordering::Relaxed),
                });
                json!(Report::new(&self.vm, stats, told.as_ref(), record))
            }
            Request::Curve => {
                let stats = self.handle.stats()?;
                let told = self.ghosts.as_ref().map(|ghosts| ghosts.prediction(&stats));
                json!(told.and_then(|told| report::curve(&self.vm, &stats, &told)))
            }
            Request::Resize { cache_bytes } => {
                self.handle.resize(cache_bytes)?;
                Value::Null
            }
            Request::Enable => {
                self.handle.enable()?;
                Value::Null
            }
        })
    }
}

/// Several observers as one.
struct Observers(Vec<Box<dyn Observer>>);

impl Observer for Observers {
    fn missed(&mut self, page: Location) {
        self.0.iter_mut().for_each(|observer| observer.missed(page));
    }

    fn evicted(&mut self, page: Location) {
        self.0
            .iter_mut()
            .for_each(|observer| observer.evicted(page));
    }

    fn released(&mut self, page: Location) {
        self.0
            .iter_mut()
            .for_each(|observer| observer.released(page));
    }

    fn cleared(&mut self) {
        self.0.iter_mut().for_each(|observer| observer.cleared());
    }
}

/// A trace being written by a thread of its own.
struct Recorder {
    trace: PathBuf,
    lost: Arc<AtomicU64>,
    thread: thread::JoinHandle<anyhow::Result<()>>,
}

impl Recorder {
    /// Begins the trace at `trace`, of our own format unless its name tells another. Returns the
    /// observer that feeds it.
    fn start(trace: &Path) -> anyhow::Result<(Self, Box<dyn Observer>)> {
        let (observer, misses) = misses();
        let lost = observer.lost();
        let (begun, beginning) = mpsc::sync_channel(1);
        let path = trace.to_owned();
        let thread = thread::Builder::new().name("record".into());
        let thread = thread.spawn(move || record(&path, misses, &begun))?;
        let recorder = Self {
            trace: trace.to_owned(),
            lost,
            thread,
        };
        match beginning.recv() {
            Ok(()) => Ok((recorder, Box::new(observer))),
            Err(_) => Err(recorder.finish().err().context("no trace was begun")?),
        }
    }

    /// Ends the trace, whose observer must be gone, and gives it its name.
    fn finish(self) -> anyhow::Result<()> {
        self.thread
            .join()
            .unwrap_or_else(|panic| panic::resume_unwind(panic))
    }
}

fn record(path: &Path, mut misses: Misses, begun: &mpsc::SyncSender<()>) -> anyhow::Result<()> {
    let format = Format::of_name(path).unwrap_or(Format::Plimsoll);
    let mut trace = plimsoll_source::create(path, Some(format), PageSize::FOUR_KIB)?;
    begun.send(())?;
    let mut batch = ReferenceBatch::new();
    while misses.next_batch(&mut batch)? {
        trace.write(&batch)?;
    }
    Ok(trace.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        cache: CacheArgs,
    }

    fn parsed(arguments: Vec<std::ffi::OsString>) -> CacheArgs {
        let line = std::iter::once("x".into()).chain(arguments);
        Line::try_parse_from(line).unwrap().cache
    }

    #[test]
    fn arguments_made_from_arguments_say_the_same() {
        let line = "--cache 96M --cache-max 1G --cache-mode from-storage --write delayed --dirty 1/3 \
                    --dirty-age 1500ms --state /s --ghost 0 --hcache /h --record /r --no-hash-check \
                    --no-newest-check --verify";
        let given = parsed(line.split_whitespace().map(Into::into).collect());
        let again = parsed(given.arguments());
        assert_eq!(format!("{given:?}"), format!("{again:?}"));
        assert!(again.verify && again.no_hash_check && again.no_newest_check);
        assert_eq!(again.dirty_age.unwrap().get(), Duration::from_millis(1500));
        assert_eq!(CacheArgs::default().arguments(), [""; 0]);
    }

    #[test]
    fn a_vm_is_called_after_its_first_image() {
        let of = |image: &str| name_of(Some(Path::new(image)));
        assert_eq!(of("/srv/web-1.raw"), "web-1");
        assert_eq!(of("/dev/vg0/data"), "data");
        assert_eq!(of("my image (old).img"), "my-image--old-");
        assert_eq!(of("…"), "-");
        assert_eq!(of(".hidden"), "vm");
        assert_eq!(name_of(None), "vm");
        for wrong in ["", ".x", "a/b", "a b", &"x".repeat(49)] {
            assert!(name(wrong).is_err(), "{wrong}");
        }
    }
}
