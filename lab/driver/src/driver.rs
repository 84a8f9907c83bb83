//! A driver of a vhost-user-blk device: its setup, use and reconnection.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use vhost::VhostBackend as _;
use vhost::vhost_user;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::error::OperationContext as _;
use crate::virtqueue::ID_BYTES;
use crate::{Bank, Completion, Config, FrontendError, Ram, Request, Segment, Status, Virtqueue};

/// `VHOST_USER_F_PROTOCOL_FEATURES`.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Maximum number of bytes that a blocking call moves at once.
const BOUNCE_BYTES: usize = 512 << 10;
/// Maximum number of queues.
const QUEUES_MAX: u64 = 64;
/// How long to wait for a daemon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of a driver.
#[derive(Debug, Clone)]
pub struct DriverOptions {
    /// Number of queues to use.
    pub queues: u16,
    /// Number of entries of each, a power of two.
    pub queue_size: u16,
    /// Whether requests have indirect descriptor tables, if the device supports them.
    pub indirect: bool,
    /// Whether event indices determine when to notify, if the device supports them.
    pub event_index: bool,
    /// Whether the driver announces that it sends flushes; without it writes must be stable when they complete.
    pub flush: bool,
    /// Whether requests in flight are tracked, so that another daemon can complete them.
    pub inflight: bool,
    /// Longest wait for a request.
    pub timeout: Duration,
}

impl Default for DriverOptions {
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size: 128,
            indirect: true,
            event_index: true,
            flush: true,
            inflight: true,
            timeout: Duration::from_secs(60),
        }
    }
}

impl DriverOptions {
    fn features(&self) -> u64 {
        let mut features = PROTOCOL_FEATURES | 1 << VIRTIO_F_VERSION_1;
        for bit in [
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_RO,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_TOPOLOGY,
            VIRTIO_BLK_F_MQ,
            VIRTIO_BLK_F_DISCARD,
            VIRTIO_BLK_F_WRITE_ZEROES,
        ] {
            features |= 1 << bit;
        }
        for (wanted, bit) in [
            (self.indirect, VIRTIO_RING_F_INDIRECT_DESC),
            (self.event_index, VIRTIO_RING_F_EVENT_IDX),
            (self.flush, VIRTIO_BLK_F_FLUSH),
            (self.flush, VIRTIO_BLK_F_CONFIG_WCE),
        ] {
            features |= u64::from(wanted) << bit;
        }
        features
    }
}

/// A connection.
struct Link {
    frontend: Frontend,
    stream: UnixStream,
}

/// A driver of one device.
pub struct Driver {
    ram: Arc<Ram>,
    socket: PathBuf,
    options: DriverOptions,
    link: Option<Link>,
    features: u64,
    config: Config,
    queues: Vec<Virtqueue>,
    /// The index at which each queue resumes, if the daemon reported one when it stopped.
    bases: Vec<Option<u16>>,
    inflight: Option<(VhostUserInflight, File)>,
    epoll: Epoll,
    bounce: u64,
    /// Of the last request that was executed here.
    tag: u64,
}

impl Driver {
    /// Connects to a device and starts it. Waits up to 30 s for a daemon that accepts the connection.
    ///
    /// # Errors
    /// If nobody listens, or the device is not a block device that supports these options.
    pub fn connect(
        ram: &Arc<Ram>,
        socket: &Path,
        options: DriverOptions,
    ) -> Result<Self, FrontendError> {
        let (features, config, link) = Link::establish(socket, options.features(), &options)?;
        let has = |bit: u32| features & 1 << bit != 0;
        if options.queues > 1 && config.queues < options.queues {
            return Err(FrontendError::NotOffered("so many queues"));
        }
        let epoll = Epoll::new().to("make an epoll")?;
        let mut queues = Vec::new();
        for number in 0..usize::from(options.queues) {
            let event_index = has(VIRTIO_RING_F_EVENT_IDX);
            let indirect = has(VIRTIO_RING_F_INDIRECT_DESC);
            let queue = Virtqueue::new(ram, number, options.queue_size, event_index, indirect)?;
            let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
            let event = EpollEvent::new(events, number as u64);
            let call = queue.call_descriptor();
            epoll
                .ctl(ControlOperation::Add, call, event)
                .to("watch a queue")?;
            queues.push(queue);
        }
        let mut driver = Self {
            ram: Arc::clone(ram),
            socket: socket.to_owned(),
            bases: vec![Some(0); queues.len()],
            options,
            link: None,
            features,
            config,
            queues,
            inflight: None,
            epoll,
            bounce: ram.allocate(Bank::High, BOUNCE_BYTES),
            tag: u64::MAX,
        };
        driver.start(link)?;
        Ok(driver)
    }

    /// The negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether the device cannot be written.
    pub fn read_only(&self) -> bool {
        self.features & 1 << VIRTIO_BLK_F_RO != 0
    }

    /// The device's configuration as of the last connection.
    pub fn config(&self) -> Config {
        self.config
    }

    /// The RAM passed to the device.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// A queue of the device.
    ///
    /// # Panics
    /// If it has no queue of this number.
    pub fn queue(&mut self, number: usize) -> &mut Virtqueue {
        &mut self.queues[number]
    }

    fn start(&mut self, mut link: Link) -> Result<(), FrontendError> {
        let frontend = &mut link.frontend;
        let queue_size = self.options.queue_size;
        if self.options.inflight {
            if self.inflight.is_none() {
                let wish = VhostUserInflight::new(0, 0, self.options.queues, queue_size);
                let (region, file) = frontend
                    .get_inflight_fd(&wish)
                    .to("give a region of requests in flight")?;
                // A field that the daemon omits from its answer has the requested value.
                let region = VhostUserInflight {
                    num_queues: self.options.queues,
                    queue_size,
                    ..region
                };
                self.inflight = Some((region, file));
            }
            let (region, file) = self.inflight.as_ref().expect("just made");
            frontend
                .set_inflight_fd(region, file.as_raw_fd())
                .to("take a region of requests in flight")?;
        }
        frontend.set_features(self.features).to("take features")?;
        let regions = self.ram.regions().to("know RAM")?;
        frontend.set_mem_table(&regions).to("take RAM")?;
        for (number, queue) in self.queues.iter().enumerate() {
            let (kick, call) = queue.eventfds();
            // As QEMU does after a daemon died: requests not used yet are to be repeated.
            let base = self.bases[number]
                .take()
                .unwrap_or_else(|| queue.raw_used_index());
            let steps = (|| {
                frontend.set_vring_num(number, queue.size())?;
                frontend.set_vring_base(number, base)?;
                frontend.set_vring_addr(number, &queue.addresses())?;
                frontend.set_vring_kick(number, kick)?;
                frontend.set_vring_call(number, call)?;
                frontend.set_vring_enable(number, true)
            })();
            steps.to("set up a queue")?;
            // Requests that were made available to a daemon that died.
            kick.write(1).to("kick a queue")?;
        }
        let hung_up = EpollEvent::new(EventSet::READ_HANG_UP | EventSet::HANG_UP, u64::MAX);
        self.epoll
            .ctl(ControlOperation::Add, link.stream.as_raw_fd(), hung_up)
            .to("watch a socket")?;
        self.link = Some(link);
        Ok(())
    }

    /// Closes the connection, as the death of a guest does. Requests in flight stay in flight.
    pub fn hang_up(&mut self) {
        self.link = None;
    }

    /// Stops the queues and then closes the connection, as a guest that shuts down does; the daemon must have completed
    /// the requests in flight.
    ///
    /// # Errors
    /// If the daemon refuses, or is unreachable.
    pub fn stop(&mut self) -> Result<(), FrontendError> {
        let link = self.link.take().ok_or(FrontendError::Disconnected)?;
        for (number, base) in self.bases.iter_mut().enumerate() {
            let said = link.frontend.get_vring_base(number).to("stop a queue")?;
            *base = u16::try_from(said).ok();
        }
        Ok(())
    }

    /// Connects again, to the same daemon or the next one, with queues and requests unchanged. Waits up to 30 s for a
    /// daemon that accepts the connection.
    ///
    /// # Errors
    /// If nobody listens, or the device no longer offers the negotiated features.
    pub fn reconnect(&mut self) -> Result<(), FrontendError> {
        self.link = None;
        let established = Link::establish(&self.socket, self.features, &self.options);
        let (features, config, link) = established?;
        if features != self.features {
            return Err(FrontendError::NotOffered("what was agreed on"));
        }
        self.config = config;
        self.start(link)
    }

    /// Makes a request available and notifies the device.
    ///
    /// # Errors
    /// [`FrontendError::Full`], or the operating system's error.
    pub fn submit(
        &mut self,
        queue: usize,
        request: &Request<'_>,
        tag: u64,
    ) -> Result<(), FrontendError> {
        self.queues[queue].submit(request, tag)?;
        self.queues[queue].notify()
    }

    /// The next completed request of a queue, if there is one.
    ///
    /// # Errors
    /// [`FrontendError::NotInFlight`].
    pub fn poll(&mut self, queue: usize) -> Result<Option<Completion>, FrontendError> {
        self.queues[queue].poll()
    }

    /// Waits until a request of any queue is completed.
    ///
    /// # Errors
    /// [`FrontendError::TimedOut`] or [`FrontendError::Disconnected`].
    pub fn wait(&mut self) -> Result<(), FrontendError> {
        let end = Instant::now() + self.options.timeout;
        loop {
            // All queues must request a call.
            if self
                .queues
                .iter_mut()
                .fold(false, |any, queue| any | queue.arm())
            {
                return Ok(());
            }
            if self.link.is_none() {
                return Err(FrontendError::Disconnected);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(FrontendError::TimedOut);
            }
            let left_ms = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
            let mut events = [EpollEvent::default(); 8];
            let count = match self.epoll.wait(left_ms, &mut events) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => return Err(error).to("wait"),
            };
            if events[..count].iter().any(|event| event.data() == u64::MAX) {
                self.link = None;
            }
        }
    }

    /// Executes a request on queue 0 and waits for it.
    ///
    /// # Errors
    /// [`FrontendError::Failed`] if the device reports a failure, or the errors of [`wait`](Self::wait): it is then
    /// still in flight.
    pub fn execute(&mut self, request: &Request<'_>) -> Result<Completion, FrontendError> {
        // Counted down from the end: distinct from the tags of callers, and below those of requests given up before.
        self.tag -= 1;
        let tag = self.tag;
        self.submit(0, request, tag)?;
        let end = Instant::now() + self.options.timeout;
        loop {
            if let Some(completion) = self.queues[0].poll_for(tag)? {
                return match completion.status {
                    Status::Ok => Ok(completion),
                    status => Err(FrontendError::Failed(status)),
                };
            }
            if Instant::now() >= end {
                return Err(FrontendError::TimedOut);
            }
            self.wait()?;
        }
    }

    /// Reads from `offset` on, in bytes; both it and the length are multiples of 512.
    ///
    /// # Errors
    /// The errors of [`execute`](Self::execute).
    pub fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), FrontendError> {
        let mut sector = offset / 512;
        for piece in bytes.chunks_mut(BOUNCE_BYTES) {
            let segments = [self.bounce(piece.len())];
            self.execute(&Request::Read {
                sector,
                segments: &segments,
            })?;
            self.ram.read(self.bounce, piece);
            sector += piece.len() as u64 / 512;
        }
        Ok(())
    }

    /// Writes from `offset` on, in bytes; both it and the length are multiples of 512.
    ///
    /// # Errors
    /// The errors of [`execute`](Self::execute); part of the data may then be written.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), FrontendError> {
        let mut sector = offset / 512;
        for piece in bytes.chunks(BOUNCE_BYTES) {
            let segments = [self.bounce(piece.len())];
            self.ram.write(self.bounce, piece);
            self.execute(&Request::Write {
                sector,
                segments: &segments,
            })?;
            sector += piece.len() as u64 / 512;
        }
        Ok(())
    }

    fn bounce(&self, bytes: usize) -> Segment {
        Segment {
            address: self.bounce,
            bytes: u32::try_from(bytes).expect("at most BOUNCE_BYTES"),
        }
    }

    /// Makes all writes stable.
    ///
    /// # Errors
    /// The errors of [`execute`](Self::execute).
    pub fn flush(&mut self) -> Result<(), FrontendError> {
        self.execute(&Request::Flush).map(drop)
    }

    /// Discards a range, in bytes that are multiples of 512.
    ///
    /// # Errors
    /// The errors of [`execute`](Self::execute).
    pub fn discard(&mut self, offset: u64, bytes: u32) -> Result<(), FrontendError> {
        let ranges = [(offset / 512, bytes / 512)];
        self.execute(&Request::Discard(&ranges)).map(drop)
    }

    /// Zeroes a range, in bytes that are multiples of 512.
    ///
    /// # Errors
    /// The errors of [`execute`](Self::execute).
    pub fn write_zeroes(
        &mut self,
        offset: u64,
        bytes: u32,
        unmap: bool,
    ) -> Result<(), FrontendError> {
        let ranges = &[(offset / 512, bytes / 512)];
        self.execute(&Request::WriteZeroes { ranges, unmap })
            .map(drop)
    }

    /// The device's identification, padded with zeros.
    ///
    /// # Errors
    /// The errors of [`execute`](Self::execute).
    pub fn identify(&mut self) -> Result<[u8; ID_BYTES as usize], FrontendError> {
        let completion = self.execute(&Request::Identify)?;
        Ok(self.queues[0].identification(&completion))
    }
}

impl Link {
    /// Connects and negotiates features. The listener may disconnect at once: a daemon that already has a guest, or the
    /// socket of a killed daemon, which the kernel has not removed yet. Then the connection is retried, as QEMU does.
    fn establish(
        socket: &Path,
        wanted: u64,
        options: &DriverOptions,
    ) -> Result<(u64, Config, Self), FrontendError> {
        let end = Instant::now() + CONNECT_TIMEOUT;
        loop {
            let established = Self::open(socket).and_then(|link| link.negotiate(wanted, options));
            match established {
                Err(error) if is_absence(&error) && Instant::now() < end => {
                    thread::sleep(Duration::from_millis(2));
                }
                established => return established,
            }
        }
    }

    fn open(socket: &Path) -> Result<Self, FrontendError> {
        let stream = UnixStream::connect(socket).to("connect")?;
        let own = stream.try_clone().to("duplicate a socket")?;
        Ok(Self {
            frontend: Frontend::from_stream(stream, QUEUES_MAX),
            stream: own,
        })
    }

    /// Negotiates features: those of `wanted` that the daemon offers.
    fn negotiate(
        mut self,
        wanted: u64,
        options: &DriverOptions,
    ) -> Result<(u64, Config, Self), FrontendError> {
        let frontend = &mut self.frontend;
        frontend.set_owner().to("take an owner")?;
        let offered = frontend.get_features().to("tell its features")?;
        if offered & PROTOCOL_FEATURES == 0 {
            return Err(FrontendError::NotOffered("protocol features"));
        }
        let offered_protocol = frontend
            .get_protocol_features()
            .to("tell its protocol features")?;
        let mut protocol = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ;
        if !offered_protocol.contains(protocol) {
            return Err(FrontendError::NotOffered("configuration and queues"));
        }
        if options.inflight {
            protocol |= VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        }
        if !offered_protocol.contains(protocol) {
            return Err(FrontendError::NotOffered("tracking of requests in flight"));
        }
        let acknowledges = offered_protocol.contains(VhostUserProtocolFeatures::REPLY_ACK);
        if acknowledges {
            protocol |= VhostUserProtocolFeatures::REPLY_ACK;
        }
        frontend
            .set_protocol_features(protocol)
            .to("take protocol features")?;
        if acknowledges {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let queues = frontend.get_queue_num().to("tell its queues")?;
        if queues < u64::from(options.queues) {
            return Err(FrontendError::NotOffered("so many queues"));
        }
        let nothing = [0; Config::BYTES as usize];
        let (_, bytes) = frontend
            .get_config(0, Config::BYTES, VhostUserConfigFlags::empty(), &nothing)
            .to("tell its configuration")?;
        let bytes = bytes
            .as_slice()
            .try_into()
            .map_err(|_| FrontendError::NotOffered("a whole configuration"))?;
        let features = offered & wanted;
        if features & 1 << VIRTIO_F_VERSION_1 == 0 {
            return Err(FrontendError::NotOffered("virtio 1"));
        }
        Ok((features, Config::parse(bytes), self))
    }
}

/// Whether nobody listened, or the listener disconnected.
fn is_absence(error: &FrontendError) -> bool {
    match error {
        FrontendError::System { what, .. } => *what == "connect",
        FrontendError::Protocol { source, .. } => matches!(
            source,
            vhost::Error::VhostUserProtocol(
                vhost_user::Error::Disconnected
                    | vhost_user::Error::SocketBroken(_)
                    | vhost_user::Error::SocketError(_)
                    | vhost_user::Error::PartialMessage
            )
        ),
        _ => false,
    }
}
