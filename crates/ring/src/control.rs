//! The control thread: connections, their requests, and the store's turns. It accesses no ring.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use plimsoll_hcache::{ClientOptions, Share};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with,
    recv, send, sendmsg,
};
use rustix::process::geteuid;

use crate::executor::Executor;
use crate::protocol::{
    Geometry, HEAD_BYTES, NAME_BYTES_MAX, REQUEST_BYTES_MAX, Reply, Request, RequestFault, VERSION,
};
use crate::sys::Region;
use crate::worker::{ServedClient, Worker, new_bell};
use crate::{Refusal, Resize, Server};

/// Maximum number of entries of a ring, and of its slots, each 4 KiB of memory that counts in the store's capacity.
const RING_MAX: u32 = 4096;

/// Time between turns of the store.
const TURN: Duration = Duration::from_secs(1);
/// Number of connections in addition to those of clients: of all users, and of each that is not privileged.
pub(crate) const SPARE_CONNECTIONS: usize = 64;
const SPARE_CONNECTIONS_OF_USER: usize = 8;
/// All rings together take at most one part in this many of the capacity.
const RINGS_ONE_IN: u64 = 2;
const LISTENER: u64 = 0;
const STOP: u64 = 1;
const FIRST_CONNECTION: u64 = 2;

/// A refusal and its reason as text.
type RefusalText = (Refusal, String);

/// A connection.
struct Connection {
    socket: Arc<OwnedFd>,
    uid: u32,
    /// Received bytes of an incomplete request.
    input: Vec<u8>,
    /// Bytes of replies not sent yet; nothing more is read before they are.
    output: Vec<u8>,
    /// Whether the epoll reports when more can be sent, instead of when more has arrived.
    waits_to_send: bool,
    /// Whether it is closed when everything is sent.
    closing: bool,
    /// When it is closed if nothing happens, unless it has a ring.
    deadline: Instant,
    /// When it is closed in any case, unless it has a ring.
    last_deadline: Instant,
    ring: Option<ConnectionRing>,
}

/// The ring of a connection.
struct ConnectionRing {
    /// Notifies its worker of the end.
    gone: Arc<AtomicBool>,
    worker: usize,
    bytes: u64,
}

/// The state of [`Server::run`].
pub struct Control<'a> {
    server: &'a Server,
    workers: &'a [Worker],
    stats: &'a dyn Fn() -> String,
    resize: &'a Resize<'a>,
    epoll: OwnedFd,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    /// Whether accepting is suspended until the next turn, because descriptors have run out.
    accept_paused: bool,
}

impl<'a> Control<'a> {
    pub fn new(
        server: &'a Server,
        workers: &'a [Worker],
        stats: &'a dyn Fn() -> String,
        resize: &'a Resize<'a>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (socket, token) in [(&server.listener, LISTENER), (&*server.stop.bell, STOP)] {
            let data = epoll::EventData::new_u64(token);
            epoll::add(&epoll, socket, data, epoll::EventFlags::IN)?;
        }
        Ok(Self {
            server,
            workers,
            stats,
            resize,
            epoll,
            connections: BTreeMap::new(),
            next: FIRST_CONNECTION,
            accept_paused: false,
        })
    }

    /// Serves until the server is stopped.
    pub fn run(mut self) -> io::Result<()> {
        let mut next_turn = Instant::now() + TURN;
        let mut events = Vec::with_capacity(64);
        while !self.server.stop.stopped.load(Acquire) {
            self.wait(&mut events, next_turn)?;
            for event in events.drain(..) {
                let epoll::Event { flags, data } = event;
                match data.u64() {
                    LISTENER => self.accept()?,
                    STOP => (),
                    token => self.attend(token, flags),
                }
            }
            let now = Instant::now();
            self.close_silent(now);
            if now >= next_turn {
                self.server.store.turn(self.server.begin.elapsed());
                next_turn = now + TURN;
                if self.accept_paused {
                    self.pause_accept(false)?;
                }
            }
        }
        Ok(())
    }

    fn wait(&self, events: &mut Vec<epoll::Event>, next_turn: Instant) -> io::Result<()> {
        let ringless = self.connections.values().filter(|peer| peer.ring.is_none());
        let next = ringless
            .map(|peer| peer.deadline)
            .fold(next_turn, Instant::min);
        let timeout = next.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(events),
            Some(&timeout),
        ) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn pause_accept(&mut self, pause: bool) -> io::Result<()> {
        self.accept_paused = pause;
        let data = epoll::EventData::new_u64(LISTENER);
        let flags = if pause {
            epoll::EventFlags::empty()
        } else {
            epoll::EventFlags::IN
        };
        Ok(epoll::modify(
            &self.epoll,
            &self.server.listener,
            data,
            flags,
        )?)
    }

    fn accept(&mut self) -> io::Result<()> {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match accept_with(&self.server.listener, flags) {
                Ok(socket) => self.admit(socket),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => (),
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    self.server.counts.refused(Refusal::Resources);
                    return self.pause_accept(true);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Accepts a connection, if its user may connect.
    fn admit(&mut self, socket: OwnedFd) {
        let server = self.server;
        server.counts.connections.fetch_add(1, Relaxed);
        let Ok(peer) = getsockopt(&socket, PeerCredentials) else {
            return server.counts.refused(Refusal::NotAllowed);
        };
        let uid = peer.uid();
        let token = self.next;
        self.next += 1;
        let data = epoll::EventData::new_u64(token);
        if epoll::add(&self.epoll, &socket, data, epoll::EventFlags::IN).is_err() {
            return server.counts.refused(Refusal::Resources);
        }
        let own = self.connections.values().filter(|peer| peer.uid == uid);
        let connections_max = (server.options.clients_max() + SPARE_CONNECTIONS) as u64;
        // Nobody shuts out others, and nobody the privileged.
        let full = !is_privileged(uid)
            && (own.count() >= server.limits_of(uid).max_clients + SPARE_CONNECTIONS_OF_USER
                || self.share(uid, connections_max, |_| 1).available == 0);
        let now = Instant::now();
        self.connections.insert(
            token,
            Connection {
                socket: Arc::new(socket),
                uid,
                input: Vec::new(),
                output: Vec::new(),
                waits_to_send: false,
                closing: false,
                deadline: now + server.options.idle_timeout,
                last_deadline: now + server.options.ringless_timeout,
                ring: None,
            },
        );
        if !is_privileged(uid) && !server.options.allowed_uids.contains(&uid) {
            let text = format!("user {uid} may not connect");
            self.refuse(token, (Refusal::NotAllowed, text));
        } else if full {
            let text = "too many connections".to_owned();
            self.refuse(token, (Refusal::TooManyClients, text));
        }
    }

    /// What a user has, and may have, of an amount that connections take: each of them as many as `taken` returns.
    fn share(&self, uid: u32, amount: u64, taken: impl Fn(&Connection) -> u64) -> Share {
        let held = (self.connections.values()).map(|peer| (user_of(peer.uid), taken(peer)));
        Share::of(user_of(uid), self.server.users(), amount, held)
    }

    /// Processes a connection that is ready.
    fn attend(&mut self, token: u64, flags: epoll::EventFlags) {
        let Some(peer) = self.connections.get_mut(&token) else {
            return;
        };
        if flags.contains(epoll::EventFlags::OUT) {
            self.send(token);
            return self.answer(token);
        }
        if !flags.contains(epoll::EventFlags::IN) {
            return self.close(token);
        }
        let mut buffer = [0; HEAD_BYTES + REQUEST_BYTES_MAX as usize];
        let length = match recv(&peer.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok((length, _)) => length,
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => 0,
        };
        let counts = &self.server.counts;
        if length == 0 {
            if !peer.input.is_empty() {
                counts.closed_torn.fetch_add(1, Relaxed);
            }
            return self.close(token);
        }
        if peer.ring.is_some() {
            counts.closed_unexpected.fetch_add(1, Relaxed);
            return self.close(token);
        }
        peer.input.extend_from_slice(&buffer[..length]);
        self.answer(token);
    }

    /// Answers the requests received, as long as the answers can be sent.
    fn answer(&mut self, token: u64) {
        while let Some(peer) = self.connections.get_mut(&token) {
            if !peer.output.is_empty() || peer.closing {
                return;
            }
            let counts = &self.server.counts;
            if peer.ring.is_some() {
                if !peer.input.is_empty() {
                    counts.closed_unexpected.fetch_add(1, Relaxed);
                    self.close(token);
                }
                return;
            }
            let request = match Request::take(&mut peer.input) {
                Ok(Some(request)) => request,
                Ok(None) => return,
                Err(fault) => {
                    let count = match fault {
                        RequestFault::Oversized => &counts.closed_oversized,
                        RequestFault::Unknown => &counts.closed_unknown,
                        RequestFault::Malformed => &counts.closed_malformed,
                    };
                    count.fetch_add(1, Relaxed);
                    return self.close(token);
                }
            };
            let idle = Instant::now() + self.server.options.idle_timeout;
            peer.deadline = idle.min(peer.last_deadline);
            let uid = peer.uid;
            match request {
                Request::Hello {
                    version,
                    entries,
                    slots,
                    flags,
                    name,
                } => match self.hello(token, [version, entries, slots, flags], name) {
                    Ok(()) => (),
                    Err(refused) => self.refuse(token, refused),
                },
                Request::Stats => {
                    counts.stats.fetch_add(1, Relaxed);
                    self.reply(token, &Reply::Stats((self.stats)()));
                }
                Request::Resize { capacity_bytes } => match self.resize(uid, capacity_bytes) {
                    Ok(()) => self.reply(token, &Reply::Resized { capacity_bytes }),
                    Err(refused) => self.refuse(token, refused),
                },
            }
        }
    }

    fn resize(&self, uid: u32, capacity_bytes: u64) -> Result<(), RefusalText> {
        if !is_privileged(uid) {
            let text = format!("user {uid} may not change the capacity");
            return Err((Refusal::NotAllowed, text));
        }
        (self.resize)(capacity_bytes).map_err(|error| (Refusal::Store, error.to_string()))?;
        self.server.counts.resizes.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Makes a peer a client with a ring.
    fn hello(
        &mut self,
        token: u64,
        [version, entries, slots, flags]: [u32; 4],
        name: Vec<u8>,
    ) -> Result<(), RefusalText> {
        let server = self.server;
        let options = &server.options;
        if version != VERSION || flags != 0 {
            let text = format!("this server speaks version {VERSION} without flags");
            return Err((Refusal::Version, text));
        }
        let geometry = Geometry::new(entries, slots)
            .filter(|_| entries <= RING_MAX && slots <= RING_MAX)
            .ok_or_else(|| {
                let text = format!(
                    "a ring has a power of two up to {RING_MAX} entries and 1 to {RING_MAX} slots"
                );
                (Refusal::Geometry, text)
            })?;
        let name = String::from_utf8(name)
            .ok()
            .filter(|name| name.len() <= NAME_BYTES_MAX && !name.contains(char::is_control))
            .ok_or_else(|| {
                let text = format!("a name is a line of text of up to {NAME_BYTES_MAX} bytes");
                (Refusal::Name, text)
            })?;
        let uid = self.connections[&token].uid;
        let limits = server.limits_of(uid);
        let rings = (self.connections.values()).filter(|peer| peer.ring.is_some());
        let own = rings.filter(|peer| peer.uid == uid).count();
        let clients_max = options.clients_max() as u64;
        let places = self.share(uid, clients_max, |peer| peer.ring.is_some().into());
        if places.free == 0 {
            let text = format!("the server has its {clients_max} clients");
            return Err((Refusal::TooManyClients, text));
        }
        if own >= limits.max_clients {
            let text = format!("user {uid} has its {own} clients");
            return Err((Refusal::TooManyOfUser, text));
        }
        if places.available == 0 {
            let text = format!(
                "user {uid} has {} clients, and the {} places that are free are reserved for users with fewer than {}",
                places.own, places.free, places.reserved
            );
            return Err((Refusal::TooManyOfUser, text));
        }
        let rings_max = server.store.capacity_bytes() / RINGS_ONE_IN;
        let rings = self.share(uid, rings_max, |peer| {
            peer.ring.as_ref().map_or(0, |ring| ring.bytes)
        });
        let bytes = geometry.region_bytes() as u64;
        if bytes > rings.available {
            let text = format!(
                "there is no room for a ring of {bytes} bytes: rings of user {uid} have {} bytes and may have {} more, of {rings_max} bytes for all rings",
                rings.own, rings.available
            );
            return Err((Refusal::Store, text));
        }
        let no_resources = |error: io::Error| (Refusal::Resources, error.to_string());
        let (region, memory) = Region::create(geometry).map_err(no_resources)?;
        let bell = new_bell().map_err(no_resources)?;
        let client = server
            .store
            .create_client(ClientOptions {
                name,
                weight: limits.weight,
                floor_bytes: limits.floor_bytes,
                ceiling_bytes: limits.ceiling_bytes,
                group: uid.into(),
                outside_bytes: bytes,
            })
            .map_err(|error| (Refusal::Store, error.to_string()))?;
        let welcome = Reply::Welcome {
            client: client.id().0,
            entries,
            slots,
        };
        let worker = (0..self.workers.len())
            .min_by_key(|at| self.workers[*at].clients())
            .expect("at least one worker");
        let Some(peer) = self.connections.get_mut(&token) else {
            return Ok(());
        };
        if send_with_descriptors(&peer.socket, &welcome.to_bytes(), &memory, &bell).is_err() {
            // Nothing has been sent to it before, so there was room, and only a peer that has gone has none.
            self.close(token);
            return Ok(());
        }
        let gone = Arc::<AtomicBool>::default();
        peer.ring = Some(ConnectionRing {
            gone: gone.clone(),
            worker,
            bytes,
        });
        let socket = peer.socket.clone();
        let executor = Executor::new(region, client, limits.max_pools);
        self.workers[worker].take(ServedClient::new(
            executor,
            bell,
            socket,
            gone,
            server.counts.clone(),
        ));
        Ok(())
    }

    /// Sends a refusal, counts it and closes.
    fn refuse(&mut self, token: u64, (refusal, text): RefusalText) {
        self.server.counts.refused(refusal);
        if let Some(peer) = self.connections.get_mut(&token) {
            peer.closing = true;
        }
        self.reply(token, &Reply::Refused(refusal, text));
    }

    fn reply(&mut self, token: u64, reply: &Reply) {
        if let Some(peer) = self.connections.get_mut(&token) {
            peer.output = reply.to_bytes();
            self.send(token);
        }
    }

    /// Sends as much as possible without blocking.
    fn send(&mut self, token: u64) {
        let Some(peer) = self.connections.get_mut(&token) else {
            return;
        };
        while !peer.output.is_empty() {
            match send(
                &peer.socket,
                &peer.output,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Ok(length) => drop(peer.output.drain(..length)),
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN) => break,
                Err(_) => return self.close(token),
            }
        }
        let sent = peer.output.is_empty();
        if sent && peer.closing {
            return self.close(token);
        }
        if sent == peer.waits_to_send {
            peer.waits_to_send = !sent;
            let flags = if sent {
                epoll::EventFlags::IN
            } else {
                epoll::EventFlags::OUT
            };
            let data = epoll::EventData::new_u64(token);
            if epoll::modify(&self.epoll, &peer.socket, data, flags).is_err() {
                self.close(token);
            }
        }
    }

    fn close_silent(&mut self, now: Instant) {
        let silent = |peer: &Connection| peer.ring.is_none() && peer.deadline <= now;
        let peers = self.connections.iter().filter(|(_, peer)| silent(peer));
        let tokens: Vec<_> = peers.map(|(token, _)| *token).collect();
        for token in tokens {
            self.server.counts.closed_timeout.fetch_add(1, Relaxed);
            self.close(token);
        }
    }

    fn close(&mut self, token: u64) {
        let Some(peer) = self.connections.remove(&token) else {
            return;
        };
        // The worker may hold the socket for a short time yet.
        let _ = epoll::delete(&self.epoll, &peer.socket);
        if let Some(ring) = peer.ring {
            ring.gone.store(true, Release);
            self.workers[ring.worker].ring();
        }
    }
}

/// Root, and the server's own user.
pub(crate) fn is_privileged(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// The user that a share is counted for: root and the server's own are one.
fn user_of(uid: u32) -> u64 {
    let uid = if is_privileged(uid) { 0 } else { uid };
    uid.into()
}

/// Sends a whole message with the descriptors of a ring.
fn send_with_descriptors(
    socket: &OwnedFd,
    bytes: &[u8],
    memory: &OwnedFd,
    bell: &OwnedFd,
) -> io::Result<()> {
    let descriptors = [memory.as_fd(), bell.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}
