//! The client's end: simple calls, and batches that fill and read slots in place.

use std::collections::VecDeque;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use plimsoll_hcache::{ClientId, Handle, Page, PoolId, PoolKind, PoolOptions, PutOutcome};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, recvmsg, socket_with,
};

use crate::error::Error;
use crate::protocol::{
    CREATE_CAPACITY, CREATE_SHARED, Geometry, HEAD_BYTES, Op, REPLY_BYTES_MAX, RawCompletion,
    Reply, Request, Status, Submission, VERSION, word,
};
use crate::server::default_spin;
use crate::sys::Region;
use crate::words::ClientEnd;
use crate::worker::ring;

/// Options of a connection.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Name for display, a line of up to 64 bytes.
    pub name: String,
    /// Maximum number of operations in flight, a power of two.
    pub entries: u32,
    /// Number of slots for batches.
    pub slots: u32,
    /// How long to poll for completions before sleeping.
    pub spin: Duration,
    /// How long connecting and the server's whole answer on the socket may take together.
    pub timeout: Duration,
}

impl ConnectOptions {
    /// Returns 256 entries and 127 slots, half a mebibyte.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            entries: 256,
            slots: 127,
            spin: default_spin(),
            timeout: Duration::from_secs(5),
        }
    }
}

/// A page of the ring that belongs to the caller until it is submitted with a get or put; the completion returns it.
/// Calls of another connection than its own panic on it.
#[derive(Debug)]
pub struct Slot {
    number: u32,
    /// The connection to which it belongs.
    of: u32,
}

/// What is known of an operation in flight, whatever the server writes into the ring.
struct Pending {
    user_data: u64,
    slot: Option<Slot>,
}

/// The result of an operation of a batch.
#[derive(Debug)]
pub struct Completion {
    /// The value submitted with the operation.
    pub user_data: u64,
    /// Its status. A get that is [`Status::Ok`] has the page in its slot.
    pub status: Status,
    /// A put: 1 if it replaced or flushed a page. A flush: how many pages there were.
    pub value: u64,
    /// The slot submitted.
    pub slot: Option<Slot>,
}

/// A client of a server. All its pages are freed when it is dropped, and when its process ends.
///
/// Each of the simple calls ([`put`](Self::put), [`get`](Self::get), ...) waits for its answer. Batches
/// use the slots of the ring directly:
///
/// ```no_run
/// # use plimsoll_hcache::*; use plimsoll_ring::*;
/// # fn batch(connection: &mut Connection, pool: PoolId) -> Result<(), plimsoll_ring::Error> {
/// let mut stored = 0;
/// for index in 0..1000 {
///     while connection.free_slots() == 0 {
///         connection.wait()?;
///         while let Some(done) = connection.reap()? {
///             stored += usize::from(done.status == protocol::Status::Ok);
///             connection.release(done.slot);
///         }
///     }
///     let mut slot = connection.reserve().expect("a free slot");
///     connection.page(&mut slot).fill(7);
///     connection.submit_put(Handle { pool, object: 1, index }, slot, 0)?;
/// }
/// connection.publish();
/// # Ok(())
/// # }
/// ```
pub struct Connection {
    region: Region,
    socket: OwnedFd,
    bell: OwnedFd,
    client: ClientId,
    /// Distinguishes its slots from those of other connections.
    serial: u32,
    spin: Duration,
    /// When a wait fails.
    deadline: Option<Instant>,
    end: ClientEnd,
    /// The operations in flight, each at its position of the ring.
    pending: Box<[Option<Pending>]>,
    /// Free slots for batches.
    free: Vec<u32>,
    /// Completions of batches that arrived while a simple call waited.
    stash: VecDeque<Completion>,
}

impl Connection {
    /// Becomes a client of the server at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Unreachable`] if no server is there, [`Error::Refused`] if it refuses the client, or others.
    pub fn connect(path: impl AsRef<Path>, options: &ConnectOptions) -> Result<Self, Error> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);

        let hello = Request::Hello {
            version: VERSION,
            entries: options.entries,
            // The last is for the simple calls.
            slots: options.slots.saturating_add(1),
            flags: 0,
            name: options.name.clone().into_bytes(),
        };
        let (socket, reply, descriptors) = ask(path.as_ref(), options.timeout, &hello)?;
        let Reply::Welcome {
            client,
            entries,
            slots,
        } = reply
        else {
            return Err(Error::Protocol("another answer than a welcome"));
        };
        let geometry = Geometry::new(entries, slots)
            .filter(|_| entries == options.entries && slots == options.slots.saturating_add(1))
            .ok_or(Error::Protocol("another geometry than requested"))?;
        let Ok::<[OwnedFd; 2], _>([memory, bell]) = descriptors.try_into() else {
            return Err(Error::Protocol("no descriptors"));
        };
        Ok(Self {
            region: Region::map(memory, geometry)?,
            socket: socket.into(),
            bell,
            client: ClientId(client),
            serial: SERIAL.fetch_add(1, Relaxed),
            spin: options.spin,
            deadline: None,
            end: ClientEnd::new(),
            pending: (0..entries).map(|_| None).collect(),
            free: (0..options.slots).rev().collect(),
            stash: VecDeque::new(),
        })
    }

    /// The number that the store assigned to this client.
    pub fn client(&self) -> ClientId {
        self.client
    }

    /// Lets every wait that lasts beyond `deadline` fail with [`Error::TimedOut`], until another is set. Then the
    /// connection can only be dropped: its ring is the server's until it notices that.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Creates a pool, or joins the shared pool of that key.
    ///
    /// # Errors
    ///
    /// [`Error::TooManyPools`] and what every call may fail with: [`Error::Disconnected`], [`Error::TimedOut`],
    /// [`Error::Protocol`], [`Error::Io`].
    pub fn create_pool(&mut self, options: PoolOptions) -> Result<PoolId, Error> {
        let (shared, key) = match options.kind {
            PoolKind::PrivateExclusive => (0, 0),
            PoolKind::SharedInclusive { key } => (CREATE_SHARED, key),
        };
        let limited = options.capacity_pages.map_or(0, |_| CREATE_CAPACITY);
        let done = self.call(Submission {
            op: Op::CreatePool as u8,
            flags: shared | limited,
            capacity_pages: options.capacity_pages.unwrap_or(0),
            key,
            ..Submission::default()
        })?;
        let pool = u32::try_from(done.value);
        pool.map(PoolId)
            .map_err(|_| Error::Protocol("a pool's number out of range"))
    }

    /// Leaves a pool.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchPool`] and what every call may fail with.
    pub fn destroy_pool(&mut self, pool: PoolId) -> Result<(), Error> {
        self.call(submission(Op::DestroyPool, pool, 0, 0..=0))
            .map(|_| ())
    }

    /// Puts a page.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchPool`] and what every call may fail with.
    pub fn put(&mut self, handle: Handle, page: &Page) -> Result<PutOutcome, Error> {
        let slot = self.own_slot();
        self.region.write_slot(slot, page);
        let done = self.call(Submission {
            slot,
            ..page_submission(Op::Put, handle)
        })?;
        Ok(match done.status {
            Status::Ok => PutOutcome::Stored {
                replaced: done.value != 0,
            },
            _ => PutOutcome::Refused {
                flushed: done.value != 0,
            },
        })
    }

    /// Gets a page into `page`, which is unchanged if there is none. Returns whether there was one.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchPool`] and what every call may fail with.
    pub fn get(&mut self, handle: Handle, page: &mut Page) -> Result<bool, Error> {
        let slot = self.own_slot();
        let done = self.call(Submission {
            slot,
            ..page_submission(Op::Get, handle)
        })?;
        let hit = done.status == Status::Ok;
        if hit {
            self.region.read_slot(slot, page);
        }
        Ok(hit)
    }

    /// Drops a page. Returns whether it was there.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchPool`] and what every call may fail with.
    pub fn flush(&mut self, handle: Handle) -> Result<bool, Error> {
        let done = self.call(page_submission(Op::Flush, handle))?;
        Ok(done.value != 0)
    }

    /// Drops an object's pages of a range of indices. Returns how many there were.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchPool`], [`Error::Bad`] for a range that ends before it begins, and what every call may fail with.
    pub fn flush_range(
        &mut self,
        pool: PoolId,
        object: u64,
        indices: RangeInclusive<u32>,
    ) -> Result<u64, Error> {
        let done = self.call(submission(Op::FlushRange, pool, object, indices))?;
        Ok(done.value)
    }

    /// Drops an object's pages. Returns how many there were.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchPool`] and what every call may fail with.
    pub fn flush_object(&mut self, pool: PoolId, object: u64) -> Result<u64, Error> {
        let done = self.call(submission(Op::FlushObject, pool, object, 0..=0))?;
        Ok(done.value)
    }

    /// Drops all pages of a pool. Returns how many there were.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchPool`] and what every call may fail with.
    pub fn flush_pool(&mut self, pool: PoolId) -> Result<u64, Error> {
        let done = self.call(submission(Op::FlushPool, pool, 0, 0..=0))?;
        Ok(done.value)
    }

    /// Number of slots that can be reserved now.
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Number of operations that can be submitted now without waiting.
    pub fn room(&self) -> u32 {
        self.region.geometry().entries() - self.under_way()
    }

    /// Number of operations submitted whose completions have not been reaped.
    pub fn under_way(&self) -> u32 {
        self.end.under_way()
    }

    /// Takes a slot, if one is free.
    pub fn reserve(&mut self) -> Option<Slot> {
        let number = self.free.pop()?;
        Some(Slot {
            number,
            of: self.serial,
        })
    }

    /// Releases a slot.
    pub fn release(&mut self, slot: impl Into<Option<Slot>>) {
        if let Some(slot) = slot.into() {
            self.free.push(self.number_of(&slot));
        }
    }

    /// The page in a slot. A new slot holds its previous contents.
    pub fn page(&mut self, slot: &mut Slot) -> &mut Page {
        let number = self.number_of(slot);
        self.region.slot_mut(number)
    }

    /// Submits a put of the page in `slot`. `user_data` is returned with the completion.
    ///
    /// Like every `submit`: the server may not see it before [`publish`](Self::publish) or
    /// [`wait`](Self::wait). If there is no [`room`](Self::room), waits for some.
    ///
    /// # Errors
    ///
    /// What every call may fail with.
    pub fn submit_put(&mut self, handle: Handle, slot: Slot, user_data: u64) -> Result<(), Error> {
        self.submit_slot(Op::Put, handle, slot, user_data)
    }

    /// Submits a get of a page into `slot`.
    ///
    /// # Errors
    ///
    /// What every call may fail with.
    pub fn submit_get(&mut self, handle: Handle, slot: Slot, user_data: u64) -> Result<(), Error> {
        self.submit_slot(Op::Get, handle, slot, user_data)
    }

    /// Submits the flush of a page.
    ///
    /// # Errors
    ///
    /// What every call may fail with.
    pub fn submit_flush(&mut self, handle: Handle, user_data: u64) -> Result<(), Error> {
        let entry = Submission {
            user_data,
            ..page_submission(Op::Flush, handle)
        };
        self.submit(entry, None)
    }

    /// Publishes the entries submitted, and wakes the server if it sleeps.
    pub fn publish(&mut self) {
        if self.end.publish(&self.region) {
            ring(&self.bell);
        }
    }

    /// Returns the next completion, in the order of submission; `None` if there is none yet.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`].
    pub fn reap(&mut self) -> Result<Option<Completion>, Error> {
        match self.stash.pop_front() {
            Some(done) => Ok(Some(done)),
            None => self.take(),
        }
    }

    /// Publishes, and waits until a completion can be reaped. Returns at once if nothing is in flight.
    ///
    /// # Errors
    ///
    /// What every call may fail with.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.publish();
        if !self.stash.is_empty() || self.under_way() == 0 || self.has_completion() {
            return Ok(());
        }
        let begin = Instant::now();
        while begin.elapsed() < self.spin {
            for _ in 0..64 {
                if self.has_completion() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            // The server may be waiting for this processor.
            std::thread::yield_now();
        }
        loop {
            let woken = if self.end.fall_asleep(&self.region) {
                self.sleep()
            } else {
                Ok(())
            };
            self.end.wake_up(&self.region);
            if self.has_completion() {
                return Ok(());
            }
            woken?;
            // Bytes wake it at once, as many as the server likes.
            if self.deadline.is_some_and(|end| Instant::now() >= end) {
                return Err(Error::TimedOut);
            }
        }
    }

    /// Waits for a byte from the server, its end, or the deadline.
    fn sleep(&self) -> Result<(), Error> {
        let mut socket = [PollFd::new(&self.socket, PollFlags::IN)];
        let left = self.deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match poll(&mut socket, left.as_ref()) {
            Ok(0) => return Err(Error::TimedOut),
            Ok(_) | Err(Errno::INTR) => (),
            Err(error) => return Err(error.into()),
        }
        match recv(&self.socket, &mut [0; 4096], RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Err(Error::Disconnected),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn has_completion(&self) -> bool {
        self.end.ready(&self.region) != Some(0)
    }

    /// Takes the next completion off the ring.
    fn take(&mut self) -> Result<Option<Completion>, Error> {
        let ready = self.end.ready(&self.region);
        if ready.ok_or(Error::Protocol("completions of nothing"))? == 0 {
            return Ok(None);
        }
        let position = self.end.reaped();
        let done = RawCompletion::from_words(&self.region.completion(position));
        if done.sequence != position.wrapping_add(1) {
            return Err(Error::Protocol("a completion out of order"));
        }
        let status = Status::from_number(done.status).ok_or(Error::Protocol("unknown status"))?;
        let place = self.place(position);
        let pending = self.pending[place].take();
        let Pending { user_data, slot } =
            pending.ok_or(Error::Protocol("a completion of nothing"))?;
        self.end.reap();
        Ok(Some(Completion {
            user_data,
            status,
            value: done.value,
            slot,
        }))
    }

    fn submit_slot(
        &mut self,
        op: Op,
        handle: Handle,
        slot: Slot,
        user_data: u64,
    ) -> Result<(), Error> {
        let entry = Submission {
            slot: self.number_of(&slot),
            user_data,
            ..page_submission(op, handle)
        };
        self.submit(entry, Some(slot))
    }

    fn submit(&mut self, mut entry: Submission, slot: Option<Slot>) -> Result<(), Error> {
        while self.room() == 0 {
            self.publish();
            match self.take()? {
                Some(done) => self.stash.push_back(done),
                None => self.wait_past_stash()?,
            }
        }
        let position = self.end.written();
        self.end.advance();
        entry.sequence = self.end.written();
        let place = self.place(position);
        self.pending[place] = Some(Pending {
            user_data: entry.user_data,
            slot,
        });
        self.region.write_submission(position, &entry.to_words());
        Ok(())
    }

    /// Waits for a completion in the ring, regardless of those stored earlier.
    fn wait_past_stash(&mut self) -> Result<(), Error> {
        let stash = std::mem::take(&mut self.stash);
        let waited = self.wait();
        self.stash = stash;
        waited
    }

    /// Executes one operation and waits for its completion.
    fn call(&mut self, entry: Submission) -> Result<Completion, Error> {
        self.submit(entry, None)?;
        let position = self.end.written().wrapping_sub(1);
        loop {
            let next = self.end.reaped();
            match self.take()? {
                Some(done) if next == position => return self.checked(entry.pool, done),
                Some(done) => self.stash.push_back(done),
                None => self.wait_past_stash()?,
            }
        }
    }

    fn checked(&self, pool: u32, done: Completion) -> Result<Completion, Error> {
        match done.status {
            Status::Ok | Status::Miss | Status::Refused => Ok(done),
            Status::NoSuchPool => Err(Error::NoSuchPool(PoolId(pool))),
            Status::TooManyPools => Err(Error::TooManyPools),
            status => Err(Error::Bad(status)),
        }
    }

    /// The slot of the simple calls.
    fn own_slot(&self) -> u32 {
        self.region.geometry().slots() - 1
    }

    fn number_of(&self, slot: &Slot) -> u32 {
        assert_eq!(slot.of, self.serial, "a slot of another connection");
        slot.number
    }

    fn place(&self, position: u32) -> usize {
        position as usize & (self.pending.len() - 1)
    }
}

fn submission(op: Op, pool: PoolId, object: u64, indices: RangeInclusive<u32>) -> Submission {
    Submission {
        op: op as u8,
        pool: pool.0,
        object,
        index: *indices.start(),
        last: *indices.end(),
        ..Submission::default()
    }
}

fn page_submission(op: Op, handle: Handle) -> Submission {
    submission(op, handle.pool, handle.object, handle.index..=0)
}

/// Requests the statistics of the server at `path`.
///
/// # Errors
///
/// [`Error::Unreachable`] if no server is there, [`Error::Refused`] if it refuses them, or others.
pub fn stats(path: impl AsRef<Path>, timeout: Duration) -> Result<String, Error> {
    match ask(path.as_ref(), timeout, &Request::Stats)?.1 {
        Reply::Stats(text) => Ok(text),
        _ => Err(Error::Protocol("another answer than statistics")),
    }
}

/// Changes the capacity of the store of the server at `path`; complete when this returns. Only root and
/// the server's own user may do so.
///
/// # Errors
///
/// [`Error::Unreachable`] if no server is there, [`Error::Refused`] if it is not permitted, or others.
pub fn resize(path: impl AsRef<Path>, capacity_bytes: u64, timeout: Duration) -> Result<(), Error> {
    match ask(path.as_ref(), timeout, &Request::Resize { capacity_bytes })?.1 {
        Reply::Resized { .. } => Ok(()),
        _ => Err(Error::Protocol("another answer than a resize")),
    }
}

/// Connects, sends a request, and returns the reply and the descriptors that came with it.
fn ask(
    path: &Path,
    timeout: Duration,
    request: &Request,
) -> Result<(UnixStream, Reply, Vec<OwnedFd>), Error> {
    let unreachable = |errno: Errno| Error::Unreachable {
        path: PathBuf::from(path),
        source: errno.into(),
    };
    let address = SocketAddrUnix::new(path).map_err(unreachable)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // One for all: a server that sends a byte now and then does not hold its client any longer.
    let deadline = (Instant::now().checked_add(timeout))
        .ok_or(std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    connect(&socket, &address).map_err(unreachable)?;
    let mut socket = UnixStream::from(socket);
    limit(&socket, Timeout::Send, deadline)?;
    // A client that is refused at once may find the connection closed already, with the reason in it.
    let _ = socket.write_all(&request.to_bytes());

    let mut descriptors = Vec::new();
    let mut head = [0; HEAD_BYTES];
    let begun = receive(&socket, &mut head, &mut descriptors, deadline)?;
    fill(&socket, &mut head[begun..], deadline)?;
    let (length, kind) = (word(&head, 0).unwrap_or(0), word(&head, 4).unwrap_or(0));
    if length > REPLY_BYTES_MAX {
        return Err(Error::Protocol("too long an answer"));
    }
    let mut payload = vec![0; length as usize];
    fill(&socket, &mut payload, deadline)?;
    match Reply::parse(kind, &payload) {
        None => Err(Error::Protocol("an answer that is none")),
        Some(Reply::Refused(refusal, text)) => Err(Error::Refused { refusal, text }),
        Some(reply) => Ok((socket, reply, descriptors)),
    }
}

/// Lets the next call on the socket wait until `deadline` at most.
fn limit(socket: &UnixStream, calls: Timeout, deadline: Instant) -> Result<(), Error> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Error::Io(std::io::ErrorKind::TimedOut.into()));
    }
    Ok(set_socket_timeout(socket, calls, Some(left))?)
}

/// Reads as many bytes as the buffer has.
fn fill(mut socket: &UnixStream, mut buffer: &mut [u8], deadline: Instant) -> Result<(), Error> {
    while !buffer.is_empty() {
        limit(socket, Timeout::Recv, deadline)?;
        match socket.read(buffer) {
            Ok(0) => return Err(Error::Disconnected),
            Ok(length) => buffer = &mut buffer[length..],
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => (),
            Err(error) => return Err(ended(error)),
        }
    }
    Ok(())
}

/// Receives the first bytes of an answer, and the descriptors that come with them.
fn receive(
    socket: &UnixStream,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    deadline: Instant,
) -> Result<usize, Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(buffer)];
    let length = loop {
        limit(socket, Timeout::Recv, deadline)?;
        match recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.bytes == 0 => return Err(Error::Disconnected),
            Ok(message) => break message.bytes,
            Err(Errno::INTR) => (),
            Err(error) => return Err(ended(error.into())),
        }
    };
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok(length)
}

/// The error for the end of the stream in the middle of an answer.
fn ended(error: std::io::Error) -> Error {
    use std::io::ErrorKind::{ConnectionReset, TimedOut, WouldBlock};
    match error.kind() {
        ConnectionReset => Error::Disconnected,
        WouldBlock => Error::Io(TimedOut.into()),
        _ => Error::Io(error),
    }
}
