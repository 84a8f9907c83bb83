//! One disk of a machine: its listening socket, its storage, and the connection of its frontend.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use vhost::vhost_user::BackendReqHandler;

use super::{QUEUES_MAX, Socket};

use crate::listener::Listener;
use crate::protocol::control::SERIAL_BYTES;
use crate::vhost::{Geometry, Vhost};
use crate::{DiskError, DiskNumber, DiskStats};

/// A disk, or the control disk, as frontends see it.
pub(super) struct Device {
    pub(super) socket: String,
    pub(super) listener: Option<Listener>,
    /// Its storage; `None` for the control disk.
    pub(super) disk: Option<DiskNumber>,
    pub(super) geometry: Geometry,
    pub(super) serial: [u8; SERIAL_BYTES],
    pub(super) link: Link,
    pub(super) in_flight: u64,
    pub(super) stats: DiskStats,
}

pub(super) enum Link {
    /// No frontend.
    Idle,
    Open(Box<Connection>),
    /// The frontend has disconnected.
    Leaving {
        /// Whether the last flush is in progress.
        flushing: bool,
    },
    /// There will be no other frontend.
    Over,
}

pub(super) struct Connection {
    pub(super) stream: UnixStream,
    pub(super) handler: BackendReqHandler<Mutex<Vhost>>,
    pub(super) vhost: Arc<Mutex<Vhost>>,
    pub(super) serial: u64,
    /// Whether a message may be waiting.
    pub(super) message: bool,
    /// Whether a message waits until no request is in flight.
    pub(super) held: bool,
    /// The watch of each queue's kicks.
    pub(super) kicks: Vec<Option<u64>>,
    /// Which of its queues are in [`Machine::active`].
    pub(super) active: Vec<bool>,
}

/// A request in progress.
pub(super) struct InFlight {
    pub(super) device: usize,
    pub(super) queue: usize,
    pub(super) run: u64,
    pub(super) head: u16,
    pub(super) status: u64,
    pub(super) written: u32,
    pub(super) data_bytes: u32,
    /// When it was taken from its queue.
    pub(super) since: Instant,
}

pub(super) fn lock(vhost: &Mutex<Vhost>) -> MutexGuard<'_, Vhost> {
    vhost.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    pub(super) fn new(
        socket: Socket,
        mode: u32,
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
            Socket::Path(path) => (
                path.display().to_string(),
                Some(Listener::bind(&path, mode)?),
                None,
            ),
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
                        (name, Some(Listener::inherited(listener)), None)
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

    pub(super) fn connection(&mut self) -> Option<&mut Connection> {
        match &mut self.link {
            Link::Open(connection) => Some(connection),
            _ => None,
        }
    }
}
