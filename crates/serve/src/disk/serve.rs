//! The disk server: a VM's disks over vhost-user, and the cache under them.

use std::cell::Cell;
use std::fs::File;
use std::io::{Read as _, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};
use std::{panic, process};

use anyhow::Context as _;
use plimsoll_disk::{
    CacheMode, DiskOptions, Machine, MachineHandle, MachineOptions, MachineStats, Observer,
    PAGE_BYTES, Recovery, Socket, WriteMode,
};
use plimsoll_flow::PageCount;
use plimsoll_output::{bail_usage, stop_flag};
use plimsoll_protocol::size::ByteSize;
use rustix::fs::{FileType, fstat};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, getpid, getppid, pidfd_getfd, pidfd_open,
    set_parent_process_death_signal,
};
use serde_json::{Value, json};

use super::admin::{Admin, Daemon, Request};
use super::ghosts::{Ghosts, Prediction};
use super::options::{CacheArgs, DiskSpec, check_distinct, name, name_of};
use super::recorder::{Observers, RecordProgress, Recorder};
use super::report::Report;
use super::state::StateDirectory;
use super::trouble::{Journal, Pause, SharedPause};
use super::victim_cache::HcacheClient;
use crate::socket_mode::mode;

/// Interval at which signals are polled; each second, the ghost list follows the guest's memory.
const TURN: Duration = Duration::from_millis(100);
const TURNS_OF_A_SECOND: u32 = 10;
/// The capabilities of this program for management software (vhost-user.json of QEMU).
const CAPABILITIES: &str =
    "{\n  \"type\": \"block\",\n  \"features\": [\"read-only\", \"blk-file\"]\n}\n";

/// Serve a VM's disks over vhost-user-blk, with an exclusive cache under them, until Ctrl-C or SIGTERM.
///
/// The cache stores the pages that the guest evicts from its own memory, which its module reports through the
/// control disk, and returns them when they are read again: docs/disk.md. A second Ctrl-C ends without writing back.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Disk to serve: a raw image or a block device, and socket=PATH, read-only, serial=TEXT, queues=N, direct=auto|on|off
    #[arg(long, value_name = "IMAGE,socket=PATH[,..]")]
    disk: Vec<DiskSpec>,
    /// Socket of the control disk, through which the guest's module reports evictions
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Socket for `disk stat`, `disk resize` and `disk enable`, for this user alone
    #[arg(long, value_name = "SOCKET")]
    admin: Option<PathBuf>,
    /// Name of the VM [default: that of the first image, without its extension]
    #[arg(long, value_parser = name)]
    name: Option<String>,
    /// Permissions of the sockets of --disk and --control, in octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = mode)]
    mode: u32,
    #[command(flatten)]
    cache: CacheArgs,
    /// Guest memory size, if the guest's module does not report it; lower end of the curve
    #[arg(long, value_name = "SIZE")]
    direct_size: Option<ByteSize>,
    /// Print this program's capabilities as a vhost-user backend, as JSON, and exit
    #[arg(long)]
    print_capabilities: bool,
    /// Socket of --blk-file
    #[arg(
        long,
        value_name = "PATH",
        requires = "blk_file",
        conflicts_with_all = ["disk", "fd"]
    )]
    socket_path: Option<PathBuf>,
    /// Open descriptor of the connection on which --blk-file is served
    #[arg(long, value_name = "N", requires = "blk_file", conflicts_with = "disk")]
    fd: Option<i32>,
    /// Disk to serve at --socket-path or --fd; the name that other vhost-user programs use
    #[arg(long, value_name = "FILE", conflicts_with = "disk")]
    blk_file: Option<PathBuf>,
    /// Refuse writes of guests to --blk-file
    #[arg(long, requires = "blk_file", conflicts_with = "disk")]
    read_only: bool,
    /// Write back and exit when this process ends, which must be the parent
    #[arg(long, value_name = "PID", hide = true)]
    parent: Option<i32>,
}

impl Args {
    fn disks(&self) -> anyhow::Result<Vec<DiskOptions>> {
        let mut disks = Vec::new();
        check_distinct(&self.disk, self.cache.record.as_deref())?;
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

    /// The directory of this VM's state. Without one nothing is remembered over a restart; that is allowed if none was named
    /// and no writes are delayed, and `out` gets a line that says so.
    fn state(&self, name: &str, out: &mut dyn Write) -> anyhow::Result<Option<StateDirectory>> {
        let made = match &self.cache.state {
            Some(path) => StateDirectory::at(path),
            None => StateDirectory::of(name),
        };
        match made {
            Err(error) if self.cache.state.is_none() && !self.cache.delayed() => {
                writeln!(
                    out,
                    "disk: failed syncs, and that the VM is paused, will be forgotten at a restart: {error:#}"
                )?;
                Ok(None)
            }
            made => made.map(Some),
        }
    }
}

/// A copy of a descriptor that this process inherited.
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

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for options that contradict each other or are out of range,
/// and why the disks cannot be served, or no longer.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.print_capabilities {
        return Ok(out.write_all(CAPABILITIES.as_bytes())?);
    }
    let engine = args.cache.engine()?;
    args.cache.check_monitor()?;
    if args.cache.hcache.is_some() && args.control.is_none() {
        bail_usage!("--hcache needs --control, the disk through which the guest reaches it");
    }
    let disks = args.disks()?;
    let name = args.name();
    let stop = stop_flag()?;
    crate::descriptors::allow_descriptors();
    crate::oom_score::lower_oom_score();
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
    let directory = args.state(&name, out)?;
    let state = directory
        .as_ref()
        .map(|directory| directory.path().to_owned());
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
            (Some(recorder.progress.clone()), Some(recorder))
        }
        None => (None, None),
    };
    let pause = Pause::new(&args.cache.monitors, state.as_deref());
    let options = MachineOptions {
        disks,
        control: args.control.clone().map(Socket::Path),
        engine,
        observer: match observers.len() {
            0 => None,
            _ => Some(Box::new(Observers(observers))),
        },
        victim_cache: match &args.cache.hcache {
            Some(socket) => Some(Box::new(HcacheClient::new(socket, &name))),
            None => None,
        },
        state,
        socket_mode: args.mode,
        sweep: true,
    };

    let has_begun = Cell::new(false);
    let result = thread::scope(|scope| {
        let (started, starting) = mpsc::sync_channel(1);
        let serving = scope.spawn(move || -> anyhow::Result<()> {
            let mut machine = Machine::new(options)?;
            // The receiver waits for exactly this.
            let _ = started.send((machine.handle(), machine.recovery().clone()));
            Ok(machine.run()?)
        });
        let Ok((handle, recovery)) = starting.recv() else {
            return joined(serving);
        };
        has_begun.set(true);
        tell_recovery(&recovery, out)?;
        let served = AdminState {
            vm: name,
            handle,
            ghosts,
            record,
            pause: pause.report(),
        };
        let result = served.serve(args, &stop, &serving, pause, out);
        // It may have ended by itself.
        let _ = served.handle.stop();
        let ended = joined(serving);
        drop(served);
        result.and(ended)
    });
    match recording {
        // The trace is whole whatever became of the disks then.
        Some(recording) if has_begun.get() => result.and(recording.finish()),
        _ => result,
    }
}

fn joined(thread: ScopedJoinHandle<'_, anyhow::Result<()>>) -> anyhow::Result<()> {
    thread
        .join()
        .unwrap_or_else(|panic| panic::resume_unwind(panic))
}

/// Prints what an earlier daemon had left, if it had.
fn tell_recovery(recovery: &Recovery, out: &mut dyn Write) -> anyhow::Result<()> {
    if let Some(aside) = &recovery.set_aside {
        writeln!(out, "disk: {aside}")?;
    }
    if recovery.written_pages > 0 {
        let pages = recovery.written_pages;
        writeln!(
            out,
            "disk: wrote {pages} pages of an earlier daemon to storage"
        )?;
    }
    if recovery.kept_pages > 0 {
        writeln!(
            out,
            "disk: {} pages of an earlier daemon cannot be written and stay dirty: {}",
            recovery.kept_pages,
            recovery.error.as_deref().unwrap_or_default()
        )?;
    }
    for image in &recovery.unsynced {
        writeln!(
            out,
            "disk: an earlier daemon failed to sync {}: its flushes fail until `plimsoll disk enable`",
            image.display()
        )?;
    }
    Ok(())
}

/// Requests SIGTERM for this process when its parent ends.
fn end_with(parent: i32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))?;
    let is_parent = getppid()
        .map(Pid::as_raw_nonzero)
        .is_some_and(|pid| pid.get() == parent);
    if !is_parent {
        bail_usage!(
            "--parent {parent} is not the process that started {}",
            process::id()
        );
    }
    Ok(())
}

/// The server as the admin socket sees it.
#[derive(Clone)]
struct AdminState {
    vm: String,
    handle: MachineHandle,
    ghosts: Option<Ghosts>,
    record: Option<RecordProgress>,
    pause: SharedPause,
}

impl AdminState {
    /// Serves until `stop`, or until the machine has stopped.
    fn serve(
        &self,
        args: &Args,
        stop: &AtomicBool,
        serving: &ScopedJoinHandle<'_, anyhow::Result<()>>,
        mut pause: Pause,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let admin = args.admin.as_deref();
        let admin = admin.map(|path| Admin::serve(path, Arc::new(self.clone())));
        let _admin = admin.transpose()?;
        self.announce(args, &self.handle.stats()?, out)?;
        let mut turns = 0_u32;
        let mut journal = Journal::default();
        while !stop.load(Ordering::Relaxed) && !serving.is_finished() {
            thread::sleep(TURN);
            turns = turns.wrapping_add(1);
            let is_second = turns.is_multiple_of(TURNS_OF_A_SECOND);
            if !is_second && !pause.is_possible() {
                continue;
            }
            let Ok(stats) = self.handle.stats() else {
                continue;
            };
            let now = Instant::now();
            let mut lines: Vec<_> = pause.follow(&stats, now).into_iter().collect();
            if is_second {
                let record = self.record.as_ref().map(RecordProgress::report);
                lines.extend(record.and_then(|record| journal.record_line(&record)));
                lines.extend(journal.lines(&stats.disks, now));
                lines.extend(journal.hcache_line(&stats.victim_cache, now));
                if let Some(ghosts) = &self.ghosts {
                    // Without memory for a longer list the curve ends where it ended before.
                    let _ = ghosts.settle(&stats);
                }
            }
            for line in lines {
                // Nobody may read it any more: the disks are served all the same.
                let _ = writeln!(out, "{line}").and_then(|()| out.flush());
            }
        }
        Ok(())
    }

    fn prediction(&self, stats: &MachineStats) -> Option<Prediction> {
        self.ghosts.as_ref().map(|ghosts| ghosts.prediction(stats))
    }

    /// Prints what is served, and how.
    fn announce(
        &self,
        args: &Args,
        stats: &MachineStats,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
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
            if is_qcow2(&disk.image) {
                writeln!(
                    out,
                    "disk: {number} begins as a qcow2 image does, and is served as raw: the guest sees and changes its tables"
                )?;
            }
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

/// Whether the image begins as files of that format do.
fn is_qcow2(image: &str) -> bool {
    let mut magic = [0; 4];
    let read = File::open(image).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == *b"QFI\xfb"
}

impl Daemon for AdminState {
    fn answer(&self, request: Request) -> anyhow::Result<Value> {
        Ok(match request {
            Request::Stat => {
                let stats = self.handle.stats()?;
                let prediction = self.prediction(&stats);
                let ghosts = prediction.map(|prediction| prediction.report);
                let mut report = Report::new(&self.vm, stats, ghosts);
                report.record = self.record.as_ref().map(RecordProgress::report);
                report.pause = self.pause.get();
                json!(report)
            }
            Request::Curve => {
                let stats = self.handle.stats()?;
                let prediction = self.prediction(&stats);
                json!(prediction.and_then(|prediction| prediction.curve_json(&self.vm, &stats)))
            }
            Request::Resize { cache_bytes } => {
                anyhow::ensure!(
                    self.handle.stats()?.engine.mode != CacheMode::None,
                    "there is no cache: it is served with --cache-mode none"
                );
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
