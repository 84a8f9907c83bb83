//! A VM's disks: sockets, virtqueues, notifications, cache and storage, in one thread around one `io_uring`.
//!
//! Order rule: a request is taken from its virtqueue, then the guest's ring of notifications is drained, then the
//! request is served. So every notification sent before the request is applied before it is served.
//!
//! When a frontend closes its connection, its remaining requests in flight end, its disk is flushed, its cached pages
//! are dropped, and the next frontend may connect. Requests left unanswered are not completed in its rings: the
//! inflight region still has them, and a frontend that connects with that region gets them served again.
//!
//! Not here: decisions about requests (`engine`), the format of a ring (`queue`), the messages of a frontend (`vhost`).

mod connections;
mod device;
mod handle;
mod recovery;
mod requests;
mod token;

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use self::device::{Device, InFlight, Link, lock};
use self::handle::{Command, Resize};
use self::recovery::{ImageTimes, Recovered, SharedLog, Unsynced, recover};
use self::requests::QueueProgress;
use self::token::{Slab, Token};

use crate::queue::Piece;
use crate::storage::{PendingSubmission, Storage};
use crate::vhost::Geometry;
use crate::{
    CacheMode, ControlDisk, Direct, DiskError, DiskNumber, DiskStats, Engine, EngineOptions,
    Location, MachineStats, Observer, Ring, RingCompletion, RingStats, ServedImages, VictimCache,
};

pub use self::handle::MachineHandle;
pub use self::recovery::Recovery;

/// Maximum number of queues of a disk.
const QUEUES_MAX: u16 = 64;

/// Maximum number of requests taken from a queue, or messages from a socket, before the others are served.
const TURN: usize = 64;

/// Interval at which notifications are drained without a request, and the engine runs its periodic work.
const ALARM: Duration = Duration::from_millis(100);

/// If a batch had this many pages of evictions and puts, the next is taken after [`BURST_INTERVAL`]: a guest that is reclaimed
/// at once fills its ring faster than it can send requests. At most 160 000 pages a second are left to its requests.
const BURST_PAGES: u64 = 32;
const BURST_INTERVAL: Duration = Duration::from_micros(200);

/// Entries of the submission queue.
const RING_ENTRIES: u32 = 256;

/// Where frontends connect.
#[derive(Debug)]
pub enum Socket {
    /// A path to listen at. A stale socket of a daemon that died is replaced.
    Path(PathBuf),
    /// A descriptor: a listening socket, or one connected to the only frontend.
    Fd(OwnedFd),
}

/// A disk to serve.
#[derive(Debug)]
pub struct DiskOptions {
    /// A raw image or a block device. Its size is a multiple of 512 bytes.
    pub image: PathBuf,
    /// The socket of its frontend.
    pub socket: Socket,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Its serial number, at most 20 bytes.
    pub serial: String,
    /// Maximum number of virtqueues, 1 to 64.
    pub queues: u16,
    /// Whether the host's page cache is bypassed.
    pub direct: Direct,
}

/// Options of a machine.
pub struct MachineOptions {
    /// The disks.
    pub disks: Vec<DiskOptions>,
    /// The socket of the control disk's frontend, if there is a control disk.
    pub control: Option<Socket>,
    /// The cache.
    pub engine: EngineOptions,
    /// Receiver of references above the guest's memory.
    pub observer: Option<Box<dyn Observer>>,
    /// Page store of the guest's device-mapper target.
    pub victim_cache: Option<Box<dyn VictimCache>>,
    /// Directory of what outlives the daemon: which disks failed to sync, and the dirty log, for which it must be on tmpfs. Without
    /// one, neither does.
    pub state: Option<PathBuf>,
    /// Permissions of the sockets made at paths.
    pub socket_mode: u32,
    /// Whether page-table entries of the mapping of guest RAM are dropped periodically, so that the VM can be traced.
    pub sweep: bool,
}

impl Default for MachineOptions {
    /// Without disks and cache, for the user alone.
    fn default() -> Self {
        Self {
            disks: Vec::new(),
            control: None,
            engine: EngineOptions::default(),
            observer: None,
            victim_cache: None,
            state: None,
            socket_mode: 0o600,
            sweep: true,
        }
    }
}

/// A VM's disks. [`run`](Self::run) serves them.
pub struct Machine {
    ring: Ring,
    /// Polls listeners and connections. The ring watches this descriptor instead of the sockets themselves: it would
    /// keep them open for a while after the daemon was killed, and frontends would connect to a dead process.
    sockets: OwnedFd,
    engine: Engine,
    devices: Vec<Device>,
    storages: Vec<Storage>,
    control: Option<ControlDisk>,
    /// Whether the control disk's queue runs. While it does not (a reset guest), the ring's memory is undefined.
    control_runs: bool,
    /// [`ControlDisk::pages_read`] at the last pass, and whether the alarm of a burst is set.
    pages_read: u64,
    burst: bool,
    log: Option<SharedLog>,
    /// With a log.
    image_times: Option<ImageTimes>,
    unsynced: Option<Unsynced>,
    recovery: Recovery,
    sweep: bool,
    began: Instant,
    requests: Slab<InFlight>,
    submissions: Slab<PendingSubmission>,
    in_flight_bytes: u64,
    /// Queues to process: device, queue.
    active: Vec<(usize, usize)>,
    /// Queues with pending notifications of the guest.
    touched: Vec<(usize, usize)>,
    /// Number of the last run of a queue, or connection.
    serial: u64,
    pieces: Vec<Piece>,
    commands: Option<Receiver<Command>>,
    handle: MachineHandle,
    /// Resizes of the cache: the first is in progress.
    resizes: VecDeque<Resize>,
    stopping: bool,
    /// Disks whose last flush failed.
    not_flushed: BTreeSet<DiskNumber>,
}

impl Machine {
    /// Opens images and sockets. Pages that an earlier daemon had not written to storage are written.
    ///
    /// # Errors
    /// See [`DiskError`].
    pub fn new(options: MachineOptions) -> Result<Self, DiskError> {
        let mut engine_options = options.engine;
        if options.disks.is_empty() {
            return Err(DiskError::Options("there is no disk to serve"));
        }
        let mut storages = Vec::new();
        for disk in &options.disks {
            storages.push(Storage::open(&disk.image, disk.read_only, disk.direct)?);
        }
        let Recovered {
            log,
            kept,
            unsynced: just_failed,
            mut recovery,
        } = match &options.state {
            Some(folder) => recover(folder, &engine_options, &storages)?,
            None => Recovered::default(),
        };
        if let Some(most) = log.as_ref().and_then(SharedLog::pages_max) {
            engine_options.dirty_pages_max = engine_options.dirty_pages_max.min(most);
        }
        let unsynced = match &options.state {
            Some(folder) => Some(Unsynced::read(folder, &storages)?),
            None => None,
        };
        let images = ServedImages::default();
        let mut devices = Vec::new();
        let mut streams = Vec::new();
        for ((number, disk), storage) in (0..).zip(options.disks).zip(&storages) {
            if number >= Location::DISKS_MAX {
                return Err(DiskError::Options("too many disks"));
            }
            if storage.read_only && !disk.serial.is_empty() {
                let file = storage.file();
                images.add(DiskNumber(number), &disk.serial, file, storage.size_bytes);
            }
            let geometry = Geometry {
                size_bytes: storage.size_bytes,
                block_bytes: storage.block_bytes,
                read_only: storage.read_only,
                plain: false,
                queues: disk.queues,
            };
            let stats = DiskStats {
                image: storage.path.display().to_string(),
                size_bytes: storage.size_bytes,
                read_only: storage.read_only,
                direct_io: storage.direct,
                ..DiskStats::default()
            };
            let (device, stream) = Device::new(
                disk.socket,
                options.socket_mode,
                Some(DiskNumber(number)),
                geometry,
                &disk.serial,
                stats,
            )?;
            streams.extend(stream.map(|stream| (devices.len(), stream)));
            devices.push(device);
        }
        let mut control = None;
        if let Some(socket) = options.control {
            let geometry = Geometry {
                size_bytes: ControlDisk::BYTES,
                block_bytes: 512,
                read_only: false,
                plain: true,
                queues: 1,
            };
            let (device, stream) = Device::new(
                socket,
                options.socket_mode,
                None,
                geometry,
                "plimsoll-control",
                DiskStats::default(),
            )?;
            streams.extend(stream.map(|stream| (devices.len(), stream)));
            devices.push(device);
            let has_cache = engine_options.mode != CacheMode::None;
            control = Some(ControlDisk::new(
                has_cache,
                options.victim_cache,
                images.clone(),
            ));
        }
        let mut engine = Engine::new(engine_options, options.observer).map_err(DiskError::Cache)?;
        engine.record_reads(images);
        if let Some(log) = &log {
            engine.set_dirty_log(Box::new(log.clone()));
        }
        // Once they are written, they are to be stable too.
        let not_flushed = kept.iter().map(|location| location.disk()).collect();
        for location in kept {
            if !engine.restore(location) {
                return Err(DiskError::NotRecovered {
                    image: storages[usize::from(location.disk().0)].path.clone(),
                    pages: recovery.kept_pages,
                    reason: recovery.error.unwrap_or_default(),
                });
            }
        }
        for disk in just_failed {
            engine.sync_failed(disk);
        }
        let image_times = log
            .as_ref()
            .map(|log| ImageTimes::new(log.clone(), &storages));
        let unsynced = unsynced.map(|(unsynced, disks)| {
            for disk in disks {
                engine.sync_failed(disk);
                let image = &storages[usize::from(disk.0)].path;
                recovery.unsynced.push(image.clone());
            }
            unsynced
        });
        let (commands, receiver) = channel();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| DiskError::Ring(error.into()))?;
        let handle = MachineHandle {
            commands,
            wake: Arc::new(wake),
        };
        let sockets = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| DiskError::Ring(error.into()))?;
        let ring = Ring::new(RING_ENTRIES).map_err(DiskError::Ring)?;
        if let Some(arena) = ring.arena() {
            engine.use_arena(Arc::clone(arena));
        }
        let mut machine = Self {
            ring,
            sockets,
            engine,
            devices,
            storages,
            control,
            control_runs: false,
            pages_read: 0,
            burst: false,
            log,
            image_times,
            unsynced,
            recovery,
            sweep: options.sweep,
            began: Instant::now(),
            requests: Slab::new(),
            submissions: Slab::new(),
            in_flight_bytes: 0,
            active: Vec::new(),
            touched: Vec::new(),
            serial: 0,
            pieces: Vec::new(),
            commands: Some(receiver),
            handle,
            resizes: VecDeque::new(),
            stopping: false,
            not_flushed,
        };
        machine.watch(streams).map_err(DiskError::Ring)?;
        Ok(machine)
    }

    /// Returns a handle for queries and commands while the machine runs.
    pub fn handle(&self) -> MachineHandle {
        self.handle.clone()
    }

    /// What an earlier daemon had left.
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// Serves the disks until [stopped](MachineHandle::stop), or until no frontend can connect any more.
    ///
    /// # Errors
    /// [`DiskError::NotFlushed`] if the final flush of a disk failed, [`DiskError::Ring`].
    pub fn run(&mut self) -> Result<(), DiskError> {
        let ran = self.serve().map_err(DiskError::Ring);
        // Queries sent from now on return that the machine has ended.
        self.commands = None;
        self.resizes.clear();
        self.devices.clear();
        ran?;
        if !self.not_flushed.is_empty() {
            let image = |disk: &DiskNumber| self.storages[usize::from(disk.0)].path.clone();
            let log_pages = self
                .not_flushed
                .iter()
                .map(|disk| self.engine.dirty_pages(*disk));
            return Err(DiskError::NotFlushed {
                images: self.not_flushed.iter().map(image).collect(),
                log_pages: log_pages.sum(),
            });
        }
        if let Some(log) = self.log.as_ref().and_then(|log| log.lock().take()) {
            // What stays of it is empty, and the next daemon's.
            let _ = log.close();
        }
        Ok(())
    }

    fn watch(&mut self, streams: Vec<(usize, UnixStream)>) -> io::Result<()> {
        self.ring
            .watch(self.handle.wake.as_fd(), Token::Command.number())?;
        self.ring
            .watch(self.sockets.as_fd(), Token::Sockets.number())?;
        self.ring.alarm(ALARM, Token::Alarm.number())?;
        for (index, device) in self.devices.iter().enumerate() {
            if let Some(listener) = &device.listener {
                self.watch_socket(listener.socket.as_fd(), Token::Listener(index))?;
            }
        }
        for (device, stream) in streams {
            self.open(device, stream)?;
        }
        Ok(())
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            while let Some(completion) = self.ring.next() {
                self.ended(completion)?;
            }
            let busy = self.pass()?;
            if self
                .devices
                .iter()
                .all(|device| matches!(device.link, Link::Over))
            {
                return Ok(());
            }
            if busy {
                self.ring.submit()?;
            } else {
                self.ring.wait()?;
            }
        }
    }

    /// Handles a completion of the ring.
    fn ended(&mut self, completion: RingCompletion) -> io::Result<()> {
        let token = Token::of(completion.token);
        match token {
            Token::Submission(place) => {
                let Some(running) = self.submissions.get(place) else {
                    return Ok(());
                };
                let storage = &self.storages[running.disk];
                let done = storage.proceed(&mut self.ring, running, completion, token.number())?;
                if let Some(done) = done
                    && let Some(running) = self.submissions.take(place)
                {
                    if let Some(times) = &mut self.image_times
                        && running.is_change()
                    {
                        times.end(running.disk);
                    }
                    self.engine
                        .carried_out(running.id, done.result, done.buffer);
                }
            }
            Token::Alarm => {
                self.tick();
                self.ring.alarm(ALARM, token.number())?;
            }
            Token::Burst => {
                self.burst = false;
                self.drain();
            }
            Token::Command => {
                self.obey();
                if !completion.more {
                    self.ring.watch(self.handle.wake.as_fd(), token.number())?;
                }
            }
            Token::Sockets => {
                if !completion.more {
                    self.ring.watch(self.sockets.as_fd(), token.number())?;
                }
                self.sockets_ready()?;
            }
            // Told by the sockets.
            Token::Listener(_) | Token::Connection(..) => {}
            Token::Kick(index, queue, run) => self.kicked(index, queue, run, &completion)?,
        }
        Ok(())
    }

    /// Reports a socket's input, once each time more arrives.
    fn watch_socket(&self, socket: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        use epoll::{EventData, EventFlags};
        let wanted = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(
            &self.sockets,
            socket,
            EventData::new_u64(token.number()),
            wanted,
        )?;
        Ok(())
    }

    fn sockets_ready(&mut self) -> io::Result<()> {
        loop {
            let empty = epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            };
            let mut events = [empty; 16];
            let count = epoll::wait(&self.sockets, &mut events, Some(&Timespec::default()))?;
            for event in &events[..count] {
                match Token::of(event.data.u64()) {
                    Token::Listener(index) => self.accept(index)?,
                    Token::Connection(index, serial) => {
                        if let Some(connection) = self.devices[index].connection()
                            && connection.serial == serial
                        {
                            connection.message = true;
                        }
                    }
                    _ => {}
                }
            }
            if count < events.len() {
                return Ok(());
            }
        }
    }

    fn kicked(
        &mut self,
        index: usize,
        queue: usize,
        run: u64,
        completion: &RingCompletion,
    ) -> io::Result<()> {
        let device = &mut self.devices[index];
        let Link::Open(connection) = &mut device.link else {
            return Ok(());
        };
        let token = Token::Kick(index, queue, run).number();
        if connection.kicks[queue] != Some(token) {
            return Ok(());
        }
        if !completion.more {
            let mut vhost = lock(&connection.vhost);
            let vring = &mut vhost.vrings[queue];
            match (&completion.result, &vring.kick) {
                (Ok(_), Some(kick)) => self.ring.watch(kick.as_fd(), token)?,
                // A descriptor that cannot be polled.
                _ => {
                    connection.kicks[queue] = None;
                    device.stats.bad_requests += 1;
                    vring.fail();
                    return Ok(());
                }
            }
        }
        self.activate(index, queue);
        Ok(())
    }

    fn activate(&mut self, index: usize, queue: usize) {
        if let Some(connection) = self.devices[index].connection()
            && !std::mem::replace(&mut connection.active[queue], true)
        {
            self.active.push((index, queue));
        }
    }

    /// Serves all active queues and sockets once, in turn; returns whether there is more work.
    fn pass(&mut self) -> io::Result<bool> {
        let mut busy = false;
        for index in 0..self.devices.len() {
            busy |= self.messages(index)?;
        }
        let mut queues = std::mem::take(&mut self.active);
        queues.retain(|&(index, queue)| {
            let served = self.serve_queue(index, queue);
            busy |= matches!(served, QueueProgress::More);
            let keep = !matches!(served, QueueProgress::All);
            if let Some(connection) = self.devices[index].connection() {
                connection.active[queue] = keep;
            }
            keep
        });
        // Others may have been added meanwhile.
        queues.append(&mut self.active);
        self.active = queues;
        // The first queue must not take every byte of the limit that becomes free.
        if !self.active.is_empty() {
            self.active.rotate_left(1);
        }
        for index in 0..self.devices.len() {
            self.take_leave(index)?;
        }
        self.follow_burst()?;
        self.carry_out()?;
        self.publish();
        Ok(busy | self.resize_step())
    }

    /// Does a step of the first resize; returns whether there is more to do.
    fn resize_step(&mut self) -> bool {
        let Some(Resize { cache_bytes, .. }) = self.resizes.front() else {
            return false;
        };
        let resized = match self.engine.resize_step(*cache_bytes) {
            Ok(false) => return true,
            Ok(true) => Ok(()),
            Err(error) => Err(error),
        };
        if let Some(Resize { answer, .. }) = self.resizes.pop_front() {
            // The requester may have gone.
            let _ = answer.send(resized);
        }
        !self.resizes.is_empty()
    }

    /// Drains again soon if the guest is evicting many pages.
    fn follow_burst(&mut self) -> io::Result<()> {
        let Some(control) = &self.control else {
            return Ok(());
        };
        let before = std::mem::replace(&mut self.pages_read, control.pages_read());
        if self.pages_read.saturating_sub(before) < BURST_PAGES || self.burst {
            return Ok(());
        }
        self.burst = true;
        self.ring.alarm(BURST_INTERVAL, Token::Burst.number())
    }

    /// Periodic work, every 100 ms.
    fn tick(&mut self) {
        self.drain();
        if let Some(control) = &mut self.control {
            control.turn();
        }
        self.engine.turn(self.began.elapsed());
        if let Some(times) = &mut self.image_times {
            times.turn(&self.storages);
        }
        if self.sweep {
            for device in &mut self.devices {
                if let Some(connection) = device.connection()
                    && let Some(ram) = lock(&connection.vhost).ram()
                {
                    ram.sweep();
                }
            }
        }
    }

    /// Drains the guest's notifications.
    fn drain(&mut self) {
        if let Some(control) = &mut self.control
            && self.control_runs
        {
            control.drain(&mut self.engine);
        }
    }

    fn obey(&mut self) {
        while let Some(command) = self
            .commands
            .as_ref()
            .and_then(|commands| commands.try_recv().ok())
        {
            // The requester may have gone.
            match command {
                Command::Stats(answer) => {
                    let _ = answer.send(self.stats());
                }
                Command::Resize(resize) => self.resizes.push_back(resize),
                Command::Enable(answer) => {
                    self.engine.enable();
                    let _ = answer.send(());
                }
                Command::Stop => self.stopping = true,
            }
        }
    }

    fn stats(&mut self) -> MachineStats {
        let mut disks = Vec::new();
        for device in self
            .devices
            .iter_mut()
            .filter(|device| device.disk.is_some())
        {
            let mut stats = device.stats.clone();
            stats.socket.clone_from(&device.socket);
            stats.in_flight = device.in_flight;
            // Until its disk is flushed and forgotten.
            if let Some(disk) = device.disk {
                let (errors, unwritable) = self.engine.storage_errors(disk);
                stats.no_space_errors = errors.no_space;
                stats.io_errors = errors.io;
                stats.last_error = errors.last;
                stats.unwritable_pages = unwritable;
                stats.flushes_wait = self.engine.flushes_wait(disk);
                stats.unsynced = self.engine.unsynced().contains(&disk);
            }
            stats.connected = !matches!(device.link, Link::Idle | Link::Over);
            if let Some(connection) = device.connection() {
                let vhost = lock(&connection.vhost);
                stats.unshared |= vhost.has_unshared_queue();
                let running = vhost.vrings.iter().filter(|vring| vring.queue.is_some());
                stats.queues = u32::try_from(running.count()).unwrap_or(u32::MAX);
            }
            disks.push(stats);
        }
        let control = self.control.as_ref();
        MachineStats {
            uptime_seconds: self.began.elapsed().as_secs_f64(),
            engine: self.engine.stats(),
            disks,
            ring: RingStats {
                control_used: control.map(|_| self.control_runs),
                ..control.map(ControlDisk::ring_stats).unwrap_or_default()
            },
            victim_cache: self
                .control
                .as_mut()
                .map(ControlDisk::victim_cache_stats)
                .unwrap_or_default(),
        }
    }
}
