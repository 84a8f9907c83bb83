//! A VM's disks: sockets, virtqueues, notices, cache and storage, in one thread around one `io_uring`.
//!
//! Order rule: a request is taken from its virtqueue, then the guest's ring of notifications is drained, then the request is
//! served. So every notification sent before the request is applied before it is served.
//!
//! A frontend that closes its connection is gone: when its requests in flight have ended, its disk is flushed, its cached pages
//! are dropped, and the next frontend may connect. Requests left unanswered are not completed in its rings: the inflight region
//! still has them, and a frontend that connects with that region gets them served again.
//!
//! Not here: decisions about requests (`engine`), the format of a ring (`queue`), the messages of a frontend (`vhost`).

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::net::{RecvFlags, recv};
use vhost::vhost_user::BackendReqHandler;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};
use vm_memory::{Bytes as _, GuestAddress};

use crate::queue::{Asked, Piece, QueueFault, Refused, parse_request};
use crate::storage::{Running, Storage, in_time};
use crate::vhost::{Geometry, Vhost, needs_quiet};
use crate::{
    Buffer, CacheMode, ControlDisk, Direct, DirtyLog, DirtyPages, DiskError, DiskNumber, DiskStats,
    Engine, EngineOptions, GuestData, GuestRam, Location, MachineStats, Observer, Operation,
    OutsideRam, PAGE_BYTES, Page, Request, Ring, RingCompletion, RingMemory, Segment, Status, Tag,
    VictimCache, WriteMode,
};

/// Most queues of a disk.
const QUEUES_MAX: u16 = 64;
/// Bytes of a disk's serial number.
const SERIAL_BYTES: usize = 20;
/// No more requests are taken while those under way move so many bytes.
const IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;
/// Requests taken from a queue, and messages from a socket, before the others have their turn.
const TURN: usize = 64;
/// How often notices are taken without a request, and the engine has its turn.
const ALARM: Duration = Duration::from_millis(100);
/// How long the rest of a message may take once it has begun.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of the head of a vhost-user message: code, flags, size.
const MESSAGE_HEAD_BYTES: usize = 12;
/// Entries of the submission queue.
const RING_ENTRIES: u32 = 256;

/// Where frontends connect.
#[derive(Debug)]
pub enum Socket {
    /// A path to listen at. What a daemon that died left there is replaced.
    Path(PathBuf),
    /// A descriptor: a socket that listens, or one connected to the only frontend there will be.
    Fd(OwnedFd),
}

/// A disk to serve.
#[derive(Debug)]
pub struct DiskOptions {
    /// A raw image or a block device. Its size is a multiple of 512 bytes.
    pub image: PathBuf,
    /// Where its frontend connects.
    pub socket: Socket,
    /// Whether it cannot be written.
    pub read_only: bool,
    /// Its serial number, at most 20 bytes.
    pub serial: String,
    /// Most virtqueues, 1 to 64.
    pub queues: u16,
    /// Whether the host's page cache is passed by.
    pub direct: Direct,
}

/// What to serve, and how.
pub struct MachineOptions {
    /// The disks.
    pub disks: Vec<DiskOptions>,
    /// Where the control disk's frontend connects, if there is one.
    pub control: Option<Socket>,
    /// The cache.
    pub engine: EngineOptions,
    /// Who is told of references above the guest's memory.
    pub observer: Option<Box<dyn Observer>>,
    /// Where the guest's device-mapper target keeps pages.
    pub victim_cache: Option<Box<dyn VictimCache>>,
    /// Folder of the dirty log, on tmpfs. Without one, delayed writes do not survive the daemon's death.
    pub state: Option<PathBuf>,
    /// Whether page-table entries of the mapping of guest RAM are dropped now and then, so that the VM can be traced.
    pub sweep: bool,
}

/// A VM's disks. [`run`](Self::run) serves them.
pub struct Machine {
    ring: Ring,
    /// Listeners and connections. The ring watches this and not them: it would keep them open for a while after the daemon was
    /// killed, and frontends would connect to nobody.
    sockets: OwnedFd,
    engine: Engine,
    devices: Vec<Device>,
    storages: Vec<Storage>,
    control: Option<ControlDisk>,
    /// Whether the control disk's queue runs. While it does not (a reset guest), the ring may be anything.
    control_runs: bool,
    log: Option<SharedLog>,
    sweep: bool,
    began: Instant,
    requests: Slab<InFlight>,
    orders: Slab<Running>,
    in_flight_bytes: u64,
    /// Queues to look at: device, queue.
    active: Vec<(usize, usize)>,
    /// Queues with something to tell the guest.
    touched: Vec<(usize, usize)>,
    /// Number of the last run of a queue, or connection.
    serial: u64,
    pieces: Vec<Piece>,
    commands: Option<Receiver<Command>>,
    handle: MachineHandle,
    stopping: bool,
    /// Images whose last flush failed.
    not_flushed: Option<PathBuf>,
}

/// Asks a [`Machine`] that runs in another thread.
#[derive(Clone)]
pub struct MachineHandle {
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
}

enum Command {
    Stats(Sender<MachineStats>),
    Resize(u64, Sender<Result<(), plimsoll_hcache::Error>>),
    Enable(Sender<()>),
    Stop,
}

/// A disk, or the control disk, as frontends see it.
struct Device {
    socket: String,
    listener: Option<Listener>,
    /// Which storage; none for the control disk.
    disk: Option<DiskNumber>,
    geometry: Geometry,
    serial: [u8; SERIAL_BYTES],
    link: Link,
    in_flight: u64,
    stats: DiskStats,
}

enum Link {
    /// No frontend.
    Idle,
    Open(Box<Connection>),
    /// The frontend is gone.
    Leaving {
        /// Whether the last flush is under way.
        flushing: bool,
    },
    /// There will be no other frontend.
    Over,
}

struct Connection {
    stream: UnixStream,
    handler: BackendReqHandler<Mutex<Vhost>>,
    vhost: Arc<Mutex<Vhost>>,
    serial: u64,
    /// Whether there may be a message.
    message: bool,
    /// Whether a message waits until no request is in flight.
    held: bool,
    /// The watch of each queue's kicks.
    kicks: Vec<Option<u64>>,
    /// Which of its queues are in [`Machine::active`].
    active: Vec<bool>,
}

struct Listener {
    listener: UnixListener,
    /// What to remove at the end, and its inode.
    path: Option<(PathBuf, u64)>,
}

/// A request under way.
struct InFlight {
    device: usize,
    queue: usize,
    run: u64,
    head: u16,
    status: u64,
    written: u32,
    data_bytes: u32,
}

/// What the ring tells of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Command,
    Alarm,
    /// Of [`Machine::sockets`].
    Sockets,
    Listener(usize),
    Connection(usize, u64),
    Kick(usize, usize, u64),
    Order(usize),
}

impl Token {
    const SERIAL_BITS: u32 = 40;

    fn number(self) -> u64 {
        let pack = |kind: u64, device: usize, queue: usize, serial: u64| {
            debug_assert!(device < 1 << 12 && queue < 1 << 8 && serial < 1 << Self::SERIAL_BITS);
            kind << 60 | (device as u64) << 48 | (queue as u64) << Self::SERIAL_BITS | serial
        };
        match self {
            Self::Command => pack(0, 0, 0, 0),
            Self::Alarm => pack(1, 0, 0, 0),
            Self::Sockets => pack(2, 0, 0, 0),
            Self::Listener(device) => pack(3, device, 0, 0),
            Self::Connection(device, serial) => pack(4, device, 0, serial),
            Self::Kick(device, queue, run) => pack(5, device, queue, run),
            Self::Order(index) => pack(6, 0, 0, index as u64),
        }
    }

    fn of(number: u64) -> Self {
        let device = (number >> 48 & 0xfff) as usize;
        let queue = (number >> Self::SERIAL_BITS & 0xff) as usize;
        let serial = number & ((1 << Self::SERIAL_BITS) - 1);
        match number >> 60 {
            0 => Self::Command,
            1 => Self::Alarm,
            2 => Self::Sockets,
            3 => Self::Listener(device),
            4 => Self::Connection(device, serial),
            5 => Self::Kick(device, queue, serial),
            _ => Self::Order(serial as usize),
        }
    }
}

/// Tags of the flush when a frontend is gone have this bit and the number of the device; others are places in
/// [`Machine::requests`].
const LAST_FLUSH: u64 = 1 << 63;

/// How far a queue was served.
enum Served {
    /// There is more.
    More,
    /// Until something ends, or the frontend's message is handled.
    Waiting,
    /// The driver notifies when there is more.
    All,
}

/// Things by small numbers.
struct Slab<T> {
    places: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Slab<T> {
    fn new() -> Self {
        let (places, free) = (Vec::new(), Vec::new());
        Self { places, free }
    }

    /// The place of the next thing to be put.
    fn next(&self) -> usize {
        self.free.last().copied().unwrap_or(self.places.len())
    }

    fn put(&mut self, thing: T) -> usize {
        let place = self.next();
        if self.free.pop().is_some() {
            self.places[place] = Some(thing);
        } else {
            self.places.push(Some(thing));
        }
        place
    }

    fn get(&mut self, place: usize) -> Option<&mut T> {
        self.places.get_mut(place)?.as_mut()
    }

    fn take(&mut self, place: usize) -> Option<T> {
        let thing = self.places.get_mut(place)?.take()?;
        self.free.push(place);
        Some(thing)
    }
}

/// The RAM of nobody: of a flush.
struct NoRam;

impl GuestData for NoRam {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        let bytes = bytes.len();
        Err(OutsideRam { address, bytes })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        let bytes = bytes.len();
        Err(OutsideRam { address, bytes })
    }

    fn frames_end(&self) -> u64 {
        0
    }
}

/// The dirty log, shared with the engine so that it can be closed in the end.
#[derive(Clone)]
struct SharedLog(Arc<Mutex<Option<DirtyLog>>>);

impl SharedLog {
    fn lock(&self) -> MutexGuard<'_, Option<DirtyLog>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DirtyPages for SharedLog {
    fn record(&mut self, location: Location, page: &Page) -> io::Result<()> {
        let mut log = self.lock();
        log.as_mut()
            .ok_or(io::ErrorKind::BrokenPipe)?
            .record(location, page)
    }

    fn clean(&mut self, location: Location) {
        if let Some(log) = self.lock().as_mut() {
            log.clean(location);
        }
    }
}

fn lock(vhost: &Mutex<Vhost>) -> MutexGuard<'_, Vhost> {
    vhost.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Listener {
    fn at(path: &Path) -> Result<Self, DiskError> {
        let failed = |source| DiskError::Socket {
            socket: path.display().to_string(),
            source,
        };
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                let path = path.to_owned();
                return Err(DiskError::NoSocket { path });
            }
            Ok(_) => {
                // What is left by a daemon that was killed: nobody listens, or soon nobody does.
                let gone = in_time(|| match UnixStream::connect(path) {
                    Ok(_) => Ok(false),
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
                    Err(error) => Err(failed(error)),
                })?;
                if !gone {
                    let path = path.to_owned();
                    return Err(DiskError::SocketInUse { path });
                }
                fs::remove_file(path).map_err(failed)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let inode = fs::symlink_metadata(path).map_err(failed)?.ino();
        Ok(Self {
            listener,
            path: Some((path.to_owned(), inode)),
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, inode)) = &self.path
            && fs::symlink_metadata(path).is_ok_and(|now| now.ino() == *inode)
        {
            let _ = fs::remove_file(path);
        }
    }
}

impl Device {
    fn new(
        socket: Socket,
        disk: Option<DiskNumber>,
        geometry: Geometry,
        serial: &str,
        stats: DiskStats,
    ) -> Result<(Self, Option<UnixStream>), DiskError> {
        if !(1..=QUEUES_MAX).contains(&geometry.queues) {
            return Err(DiskError::Options("a disk has 1 to 64 queues"));
        }
        let mut bytes = [0; SERIAL_BYTES];
        bytes
            .get_mut(..serial.len())
            .ok_or(DiskError::Options("a serial number has at most 20 bytes"))?
            .copy_from_slice(serial.as_bytes());
        let (socket, listener, stream) = match socket {
            Socket::Path(path) => (path.display().to_string(), Some(Listener::at(&path)?), None),
            Socket::Fd(fd) => {
                let name = format!("descriptor {}", std::os::fd::AsRawFd::as_raw_fd(&fd));
                let failed = |source| DiskError::Socket {
                    socket: name.clone(),
                    source,
                };
                let stream = UnixStream::from(fd);
                match stream.peer_addr() {
                    Ok(_) => (name, None, Some(stream)),
                    Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                        let listener = UnixListener::from(OwnedFd::from(stream));
                        listener.set_nonblocking(true).map_err(failed)?;
                        let path = None;
                        (name, Some(Listener { listener, path }), None)
                    }
                    Err(error) => return Err(failed(error)),
                }
            }
        };
        let device = Self {
            socket,
            listener,
            disk,
            geometry,
            serial: bytes,
            link: Link::Idle,
            in_flight: 0,
            stats,
        };
        Ok((device, stream))
    }

    fn connection(&mut self) -> Option<&mut Connection> {
        match &mut self.link {
            Link::Open(connection) => Some(connection),
            _ => None,
        }
    }
}

impl MachineHandle {
    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Result<T, DiskError> {
        let (answer, answered) = channel();
        self.tell(command(answer))?;
        answered.recv().map_err(|_| DiskError::Ended)
    }

    fn tell(&self, command: Command) -> Result<(), DiskError> {
        self.commands.send(command).map_err(|_| DiskError::Ended)?;
        let woken = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        woken
            .map(drop)
            .map_err(|error| DiskError::Ring(error.into()))
    }

    /// What the machine says of itself.
    ///
    /// # Errors
    /// [`DiskError::Ended`].
    pub fn stats(&self) -> Result<MachineStats, DiskError> {
        self.ask(Command::Stats)
    }

    /// Changes the memory of the cache, in bytes. Waits up to 10 s for dirty pages that are in the way to be written back.
    ///
    /// # Errors
    /// [`DiskError::Resize`] if it cannot be so, [`DiskError::Ended`].
    pub fn resize(&self, cache_bytes: u64) -> Result<(), DiskError> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let resized = self.ask(|answer| Command::Resize(cache_bytes, answer))?;
            match resized {
                Err(plimsoll_hcache::Error::DirtyPages { .. }) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(20));
                }
                resized => return resized.map_err(DiskError::Resize),
            }
        }
    }

    /// Lets a cache that disabled itself begin again.
    ///
    /// # Errors
    /// [`DiskError::Ended`].
    pub fn enable(&self) -> Result<(), DiskError> {
        self.ask(Command::Enable)
    }

    /// Ends the machine: when the requests under way have ended and the disks are flushed, [`Machine::run`] returns.
    ///
    /// # Errors
    /// [`DiskError::Ended`].
    pub fn stop(&self) -> Result<(), DiskError> {
        self.tell(Command::Stop)
    }
}

impl Machine {
    /// Opens images and sockets. Pages that a former daemon had not written to storage are written.
    ///
    /// # Errors
    /// See [`DiskError`].
    pub fn new(options: MachineOptions) -> Result<Self, DiskError> {
        let engine_options = options.engine;
        if options.disks.is_empty() {
            return Err(DiskError::Options("there is no disk to serve"));
        }
        let mut storages = Vec::new();
        for disk in &options.disks {
            storages.push(Storage::open(&disk.image, disk.read_only, disk.direct)?);
        }
        let log = match &options.state {
            Some(folder) => recover(folder, &engine_options, &storages)?,
            None => None,
        };
        let mut devices = Vec::new();
        let mut streams = Vec::new();
        for ((number, disk), storage) in (0..).zip(options.disks).zip(&storages) {
            if number >= Location::DISKS_MAX {
                return Err(DiskError::Options("too many disks"));
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
                None,
                geometry,
                "plimsoll-control",
                DiskStats::default(),
            )?;
            streams.extend(stream.map(|stream| (devices.len(), stream)));
            devices.push(device);
            let has_cache = engine_options.mode != CacheMode::None;
            control = Some(ControlDisk::new(has_cache, options.victim_cache));
        }
        let mut engine = Engine::new(engine_options, options.observer).map_err(DiskError::Cache)?;
        if let Some(log) = &log {
            engine.set_dirty_log(Box::new(log.clone()));
        }
        let (commands, receiver) = channel();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| DiskError::Ring(error.into()))?;
        let handle = MachineHandle {
            commands,
            wake: Arc::new(wake),
        };
        let sockets = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|error| DiskError::Ring(error.into()))?;
        let mut machine = Self {
            ring: Ring::new(RING_ENTRIES).map_err(DiskError::Ring)?,
            sockets,
            engine,
            devices,
            storages,
            control,
            control_runs: false,
            log,
            sweep: options.sweep,
            began: Instant::now(),
            requests: Slab::new(),
            orders: Slab::new(),
            in_flight_bytes: 0,
            active: Vec::new(),
            touched: Vec::new(),
            serial: 0,
            pieces: Vec::new(),
            commands: Some(receiver),
            handle,
            stopping: false,
            not_flushed: None,
        };
        machine.watch(streams).map_err(DiskError::Ring)?;
        Ok(machine)
    }

    /// To ask the machine while it runs.
    #[must_use]
    pub fn handle(&self) -> MachineHandle {
        self.handle.clone()
    }

    /// Serves the disks until [stopped](MachineHandle::stop), or until no frontend can come any more.
    ///
    /// # Errors
    /// [`DiskError::NotFlushed`] if a disk could not be flushed in the end, [`DiskError::Ring`].
    pub fn run(&mut self) -> Result<(), DiskError> {
        let ran = self.serve().map_err(DiskError::Ring);
        // Whoever still asks learns that it has ended.
        self.commands = None;
        self.devices.clear();
        ran?;
        if let Some(image) = self.not_flushed.take() {
            return Err(DiskError::NotFlushed { image });
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
                self.watch_socket(listener.listener.as_fd(), Token::Listener(index))?;
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

    /// Something ended in the ring.
    fn ended(&mut self, completion: RingCompletion) -> io::Result<()> {
        let token = Token::of(completion.token);
        match token {
            Token::Order(place) => {
                let Some(running) = self.orders.get(place) else {
                    return Ok(());
                };
                let storage = &self.storages[running.disk];
                let done = storage.proceed(&mut self.ring, running, completion, token.number())?;
                if let Some(done) = done
                    && let Some(running) = self.orders.take(place)
                {
                    self.engine
                        .carried_out(running.id, done.result, done.buffer);
                }
            }
            Token::Alarm => {
                self.tick();
                self.ring.alarm(ALARM, token.number())?;
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

    /// Tells of a socket's input, once each time there is more.
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

    /// Does what there is to do, each in its turn; whether there is more.
    fn pass(&mut self) -> io::Result<bool> {
        let mut busy = false;
        for index in 0..self.devices.len() {
            busy |= self.messages(index)?;
        }
        let mut queues = std::mem::take(&mut self.active);
        queues.retain(|&(index, queue)| {
            let served = self.serve_queue(index, queue);
            busy |= matches!(served, Served::More);
            let keep = !matches!(served, Served::All);
            if let Some(connection) = self.devices[index].connection() {
                connection.active[queue] = keep;
            }
            keep
        });
        // Others may have been added meanwhile.
        queues.append(&mut self.active);
        self.active = queues;
        // Whoever came first must not take every byte that comes free.
        if !self.active.is_empty() {
            self.active.rotate_left(1);
        }
        for index in 0..self.devices.len() {
            self.take_leave(index)?;
        }
        self.carry_out()?;
        self.publish();
        Ok(busy)
    }

    /// Every 100 ms.
    fn tick(&mut self) {
        self.drain();
        if let Some(control) = &mut self.control {
            control.turn();
        }
        self.engine.turn(self.began.elapsed());
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

    /// Takes the guest's notices.
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
            // Who asked may have gone.
            match command {
                Command::Stats(answer) => {
                    let _ = answer.send(self.stats());
                }
                Command::Resize(bytes, answer) => {
                    let _ = answer.send(self.engine.resize(bytes));
                }
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
            stats.connected = !matches!(device.link, Link::Idle | Link::Over);
            if let Some(connection) = device.connection() {
                let vhost = lock(&connection.vhost);
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
            ring: control.map(ControlDisk::ring_stats).unwrap_or_default(),
            victim_cache: control
                .map(ControlDisk::victim_cache_stats)
                .unwrap_or_default(),
        }
    }

    /// Takes a frontend that waits, if there is none: the others wait until it is gone.
    fn accept(&mut self, index: usize) -> io::Result<()> {
        let device = &mut self.devices[index];
        let (Some(listener), Link::Idle, false) = (&device.listener, &device.link, self.stopping)
        else {
            return Ok(());
        };
        match listener.listener.accept() {
            Ok((stream, _)) => self.open(index, stream),
            // Nobody, or one who left again, or no descriptors: who waits is taken when another comes.
            Err(_) => Ok(()),
        }
    }

    fn open(&mut self, index: usize, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
        let device = &mut self.devices[index];
        let vhost = Arc::new(Mutex::new(Vhost::new(device.geometry)));
        self.serial += 1;
        let queues = usize::from(device.geometry.queues);
        let connection = Connection {
            handler: BackendReqHandler::from_stream(stream.try_clone()?, Arc::clone(&vhost)),
            stream,
            vhost,
            serial: self.serial,
            message: true,
            held: false,
            kicks: vec![None; queues],
            active: vec![false; queues],
        };
        device.stats.connections += 1;
        let token = Token::Connection(index, self.serial);
        self.watch_socket(connection.stream.as_fd(), token)?;
        self.devices[index].link = Link::Open(Box::new(connection));
        Ok(())
    }

    /// Handles what a frontend says; whether there is more.
    fn messages(&mut self, index: usize) -> io::Result<bool> {
        for _ in 0..TURN {
            let stopping = self.stopping;
            if self.devices[index].disk.is_none() {
                // What the message changes may end the ring, or let disks run before it.
                self.drain();
            }
            let device = &mut self.devices[index];
            let Link::Open(connection) = &mut device.link else {
                return Ok(false);
            };
            if stopping {
                self.leave(index)?;
                return Ok(false);
            }
            if !connection.message {
                return Ok(false);
            }
            let mut head = [0; MESSAGE_HEAD_BYTES];
            match recv(
                &connection.stream,
                &mut head,
                RecvFlags::PEEK | RecvFlags::DONTWAIT,
            ) {
                Ok((MESSAGE_HEAD_BYTES, _)) => {}
                Err(rustix::io::Errno::INTR) => continue,
                // No message, or part of one.
                Ok((1.., _)) | Err(rustix::io::Errno::AGAIN) if !hung_up(&connection.stream) => {
                    connection.message = false;
                    return Ok(false);
                }
                Ok(_) | Err(_) => {
                    self.leave(index)?;
                    return Ok(false);
                }
            }
            let code = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
            connection.held = needs_quiet(code) && device.in_flight > 0;
            if connection.held {
                return Ok(false);
            }
            // One that takes no answers would make us wait.
            if !writable(&connection.stream) || connection.handler.handle_request().is_err() {
                self.leave(index)?;
                return Ok(false);
            }
            self.follow(index)?;
        }
        Ok(true)
    }

    /// Starts and stops queues as the frontend's last message wants.
    fn follow(&mut self, index: usize) -> io::Result<()> {
        let device = &mut self.devices[index];
        let is_control = device.disk.is_none();
        let Link::Open(connection) = &mut device.link else {
            return Ok(());
        };
        let mut guard = lock(&connection.vhost);
        let vhost = &mut *guard;
        let begun = vhost.start(&mut self.serial);
        for (queue, (vring, watched)) in vhost.vrings.iter().zip(&mut connection.kicks).enumerate()
        {
            let token = Token::Kick(index, queue, vring.run).number();
            let wanted = vring.queue.is_some().then_some(token);
            if *watched == wanted {
                continue;
            }
            if let Some(token) = watched.take() {
                self.ring.unwatch(token)?;
            }
            if let (Some(token), Some(kick)) = (wanted, &vring.kick) {
                self.ring.watch(kick.as_fd(), token)?;
                *watched = Some(token);
            }
        }
        for &queue in &begun {
            let vring = &vhost.vrings[queue];
            if vring.faulty {
                device.stats.bad_requests += 1;
                vring.signal_error();
            } else {
                // A daemon before us may have died between its used ring and its signal.
                vring.signal();
            }
        }
        if is_control && let Some(control) = &mut self.control {
            let running = vhost.vrings.iter().find_map(|vring| vring.queue.as_ref());
            self.control_runs = running.is_some();
            if let (Some(queue), false) = (running, begun.is_empty()) {
                if queue.next_available() == 0 {
                    // A driver that begins anew: of another kernel than the ring, if there is one.
                    control.guest_gone(&mut self.engine);
                }
                control.set_ram(
                    Arc::clone(queue.ram()) as Arc<dyn RingMemory>,
                    &mut self.engine,
                );
            }
        }
        drop(guard);
        for queue in begun {
            self.activate(index, queue);
        }
        Ok(())
    }

    /// The frontend is gone.
    fn leave(&mut self, index: usize) -> io::Result<()> {
        if self.devices[index].disk.is_none() {
            self.control_runs = false;
        }
        let device = &mut self.devices[index];
        let gone = std::mem::replace(&mut device.link, Link::Leaving { flushing: false });
        if let Link::Open(connection) = gone {
            for token in connection.kicks.iter().flatten() {
                self.ring.unwatch(*token)?;
            }
            // Watches must be taken back before their descriptors are closed.
            self.ring.submit()?;
        }
        self.active.retain(|&(device, _)| device != index);
        self.touched.retain(|&(device, _)| device != index);
        Ok(())
    }

    /// Flushes the disk of a frontend that is gone when nothing of it is under way any more.
    fn take_leave(&mut self, index: usize) -> io::Result<()> {
        let device = &mut self.devices[index];
        match &mut device.link {
            Link::Leaving { flushing: false } if device.in_flight == 0 => match device.disk {
                Some(disk) => {
                    device.link = Link::Leaving { flushing: true };
                    self.engine.submit(Request {
                        disk,
                        tag: Tag(LAST_FLUSH | index as u64),
                        operation: Operation::Flush,
                        ram: Arc::new(NoRam),
                    });
                    Ok(())
                }
                None => {
                    if let Some(control) = &mut self.control {
                        if self.stopping {
                            control.close();
                        } else {
                            control.guest_gone(&mut self.engine);
                        }
                    }
                    self.left(index)
                }
            },
            Link::Idle if self.stopping => {
                device.link = Link::Over;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn left(&mut self, index: usize) -> io::Result<()> {
        let device = &mut self.devices[index];
        let more = device.listener.is_some() && !self.stopping;
        device.link = if more { Link::Idle } else { Link::Over };
        self.accept(index)
    }

    fn flushed_last(&mut self, index: usize, status: Status) -> io::Result<()> {
        let Some(disk) = self.devices[index].disk else {
            return Ok(());
        };
        let image = &self.storages[usize::from(disk.0)].path;
        if status == Status::Ok {
            self.engine.forget_disk(disk);
            if self.not_flushed.as_ref() == Some(image) {
                self.not_flushed = None;
            }
        } else {
            // Its pages are still right: nobody else writes to an image that is locked.
            self.engine.forget_frames();
            self.not_flushed = Some(image.clone());
        }
        self.left(index)
    }

    /// Serves what is in a queue.
    fn serve_queue(&mut self, index: usize, number: usize) -> Served {
        let device = &mut self.devices[index];
        let Link::Open(connection) = &mut device.link else {
            return Served::All;
        };
        if connection.held {
            return Served::Waiting;
        }
        let mut guard = lock(&connection.vhost);
        let vhost = &mut *guard;
        let shape = vhost.shape();
        let vring = &mut vhost.vrings[number];
        let run = vring.run;
        let Some(queue) = &mut vring.queue else {
            return Served::All;
        };
        let ram = Arc::clone(queue.ram());
        let served = (|| -> Result<Served, QueueFault> {
            queue.disable_notifications()?;
            for _ in 0..TURN {
                // A disk with nothing under way may always begin something.
                if self.in_flight_bytes >= IN_FLIGHT_BYTES_MAX && device.in_flight > 0 {
                    return Ok(Served::Waiting);
                }
                let Some((head, again)) = queue.pop()? else {
                    if queue.enable_notifications()? {
                        continue;
                    }
                    return Ok(Served::All);
                };
                device.stats.resubmitted += u64::from(again);
                let wanted = match queue.chain(head, &mut self.pieces) {
                    Ok(()) => parse_request(&ram, &self.pieces, &shape),
                    Err(_) => Err(Refused::UNANSWERABLE),
                };
                // Everything the guest told before it asked.
                if let Some(control) = &mut self.control
                    && self.control_runs
                {
                    control.drain(&mut self.engine);
                }
                let (status, answer, written) = match wanted {
                    Err(refused) => {
                        device.stats.bad_requests += 1;
                        (
                            refused.status,
                            refused.answer,
                            u32::from(refused.status.is_some()),
                        )
                    }
                    Ok(wanted) => match (wanted.asked, device.disk) {
                        (Asked::Disk(operation), Some(disk)) => {
                            self.in_flight_bytes += u64::from(wanted.data_bytes);
                            device.in_flight += 1;
                            let place = self.requests.put(InFlight {
                                device: index,
                                queue: number,
                                run,
                                head,
                                status: wanted.status,
                                written: wanted.written,
                                data_bytes: wanted.data_bytes,
                            });
                            self.engine.submit(Request {
                                disk,
                                tag: Tag(place as u64),
                                operation,
                                ram: Arc::clone(&ram) as Arc<dyn GuestData>,
                            });
                            continue;
                        }
                        (asked, _) => {
                            device.stats.requests += 1;
                            let ok = match asked {
                                Asked::Disk(operation) => {
                                    let control = self.control.as_mut();
                                    control.is_some_and(|control| {
                                        serve_control(control, &mut self.engine, &ram, &operation)
                                    })
                                }
                                Asked::Identity(segments) => {
                                    scatter(&ram, &segments, 0, &device.serial)
                                }
                                Asked::Nothing => true,
                            };
                            let answer = if ok {
                                VIRTIO_BLK_S_OK
                            } else {
                                VIRTIO_BLK_S_IOERR
                            };
                            #[expect(clippy::cast_possible_truncation, reason = "0 or 1")]
                            let answer = answer as u8;
                            (
                                Some(wanted.status),
                                answer,
                                if ok { wanted.written } else { 1 },
                            )
                        }
                    },
                };
                if let Some(status) = status {
                    // In RAM: checked with the request.
                    let _ = ram.mapped().write_obj(answer, GuestAddress(status));
                }
                queue.done(head, written);
                if self.touched.last() != Some(&(index, number)) {
                    self.touched.push((index, number));
                }
            }
            Ok(Served::More)
        })();
        served.unwrap_or_else(|_| {
            device.stats.bad_requests += 1;
            vring.fail();
            Served::All
        })
    }

    /// Gives orders to storage, and what is done to the queues.
    fn carry_out(&mut self) -> io::Result<()> {
        loop {
            let mut any = false;
            while let Some(order) = self.engine.next_order() {
                let storage = &self.storages[usize::from(order.disk.0)];
                let token = Token::Order(self.orders.next()).number();
                let running = storage.begin(&mut self.ring, order, token)?;
                self.orders.put(running);
            }
            while let Some(completed) = self.engine.next_completed() {
                any = true;
                if completed.tag.0 & LAST_FLUSH != 0 {
                    self.flushed_last((completed.tag.0 & !LAST_FLUSH) as usize, completed.status)?;
                } else {
                    #[expect(clippy::cast_possible_truncation, reason = "made of an index")]
                    self.completed(completed.tag.0 as usize, completed.status);
                }
            }
            if !any {
                return Ok(());
            }
        }
    }

    fn completed(&mut self, place: usize, status: Status) {
        let Some(request) = self.requests.take(place) else {
            return;
        };
        let device = &mut self.devices[request.device];
        device.in_flight -= 1;
        device.stats.requests += 1;
        self.in_flight_bytes -= u64::from(request.data_bytes);
        let Link::Open(connection) = &mut device.link else {
            return;
        };
        let mut vhost = lock(&connection.vhost);
        let vring = &mut vhost.vrings[request.queue];
        if vring.run != request.run {
            return;
        }
        let Some(queue) = &mut vring.queue else {
            return;
        };
        let (answer, written) = match status {
            Status::Ok => (VIRTIO_BLK_S_OK, request.written),
            Status::IoError => (VIRTIO_BLK_S_IOERR, 1),
            Status::Unsupported => (VIRTIO_BLK_S_UNSUPP, 1),
        };
        #[expect(clippy::cast_possible_truncation, reason = "0 to 2")]
        let answer = answer as u8;
        // In RAM: checked with the request.
        let _ = queue
            .ram()
            .mapped()
            .write_obj(answer, GuestAddress(request.status));
        queue.done(request.head, written);
        let touched = (request.device, request.queue);
        if self.touched.last() != Some(&touched) {
            self.touched.push(touched);
        }
    }

    /// Tells the guest what is done.
    fn publish(&mut self) {
        for (index, number) in self.touched.drain(..) {
            let device = &mut self.devices[index];
            let Link::Open(connection) = &mut device.link else {
                continue;
            };
            let mut vhost = lock(&connection.vhost);
            let vring = &mut vhost.vrings[number];
            let Some(queue) = &mut vring.queue else {
                continue;
            };
            match queue.publish() {
                Ok(true) => vring.signal(),
                Ok(false) => {}
                Err(_) => {
                    device.stats.bad_requests += 1;
                    vring.fail();
                }
            }
        }
    }
}

/// Opens the dirty log and writes what a former daemon left in it to storage.
fn recover(
    folder: &Path,
    options: &EngineOptions,
    storages: &[Storage],
) -> Result<Option<SharedLog>, DiskError> {
    let path = folder.join("dirty.log");
    fs::create_dir_all(folder).map_err(|source| DiskError::State {
        path: folder.to_owned(),
        source,
    })?;
    let mut identities = Vec::new();
    for (number, storage) in (0..).zip(storages) {
        identities.push(storage.identity(DiskNumber(number))?);
    }
    // A page's new contents are there before its old ones go.
    let slots = options.dirty_pages_max.saturating_add(64);
    let left = DirtyLog::open(&path, slots, &identities).map_err(DiskError::DirtyLog)?;
    let mut buffer = Buffer::new(PAGE_BYTES);
    for page in left.pages() {
        let (location, page) = page.map_err(|source| DiskError::State {
            path: path.clone(),
            source,
        })?;
        buffer.copy_from_slice(&page[..]);
        storages[usize::from(location.disk().0)].restore(location.block(), &buffer)?;
    }
    if !left.is_empty() {
        for storage in storages {
            storage.make_stable()?;
        }
    }
    let log = left.finish().map_err(DiskError::DirtyLog)?;
    if options.write == WriteMode::Through {
        let _ = log.close();
        return Ok(None);
    }
    Ok(Some(SharedLog(Arc::new(Mutex::new(Some(log))))))
}

/// Serves a request of the control disk; whether it could be.
fn serve_control(
    control: &mut ControlDisk,
    engine: &mut Engine,
    ram: &Arc<GuestRam>,
    operation: &Operation,
) -> bool {
    match operation {
        Operation::Read { offset, segments } => {
            let bytes = segments.iter().map(|segment| segment.bytes as usize).sum();
            let mut ok = true;
            control.read(*offset, bytes, &mut |at, piece| {
                ok &= scatter(ram, segments, at, piece);
            });
            ok
        }
        Operation::Write {
            offset, segments, ..
        } => {
            let mut command = [0; 512];
            let bytes: usize = segments.iter().map(|segment| segment.bytes as usize).sum();
            if bytes != command.len() {
                return false;
            }
            let mut at = 0;
            for segment in segments {
                let end = at + segment.bytes as usize;
                if ram.read(segment.address, &mut command[at..end]).is_err() {
                    return false;
                }
                at = end;
            }
            control.write(*offset, &command, engine).is_ok()
        }
        Operation::Flush => true,
        Operation::Discard(_) | Operation::WriteZeroes { .. } => false,
    }
}

/// Copies bytes to where byte `at` of the segments is and following; what does not fit is left. Whether all is RAM.
fn scatter(ram: &Arc<GuestRam>, segments: &[Segment], at: usize, bytes: &[u8]) -> bool {
    let mut skip = at;
    let mut rest = bytes;
    for segment in segments {
        let length = segment.bytes as usize;
        let skipped = skip.min(length);
        skip -= skipped;
        let (now, later) = rest.split_at(rest.len().min(length - skipped));
        if !now.is_empty() && ram.write(segment.address + skipped as u64, now).is_err() {
            return false;
        }
        rest = later;
    }
    true
}

fn ready(stream: &UnixStream, wanted: PollFlags) -> PollFlags {
    let mut fds = [PollFd::new(stream, wanted)];
    match poll(&mut fds, Some(&Timespec::default())) {
        Ok(_) => fds[0].revents(),
        Err(_) => PollFlags::empty(),
    }
}

fn hung_up(stream: &UnixStream) -> bool {
    ready(stream, PollFlags::RDHUP).intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

fn writable(stream: &UnixStream) -> bool {
    ready(stream, PollFlags::OUT).contains(PollFlags::OUT)
}
