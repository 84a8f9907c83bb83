//! A server in this process, and a handwritten client that can violate every rule of the protocol.
#![allow(dead_code, missing_docs, reason = "each test file uses a part of it")]

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plimsoll_hcache::{Handle, Page, PoolId, Store, StoreOptions};
use plimsoll_ring::protocol::{
    Geometry, HEAD_BYTES, Op, RawCompletion, Reply, Request, Status, Submission, VERSION, word,
};
use plimsoll_ring::{Region, Server, ServerCounters, ServerOptions, Word};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Time limit for events that must happen, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server that runs; dropped, it is stopped.
pub struct ServerThread {
    pub store: Store,
    server: Option<Arc<Server>>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
    folder: tempfile::TempDir,
}

impl ServerThread {
    pub fn new(options: ServerOptions) -> Self {
        Self::with_stats(options, || String::from("{}"))
    }

    pub fn with_stats(options: ServerOptions, stats: impl Fn() -> String + Send + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hcache");
        let mut store = StoreOptions::new(64 << 20);
        store.max_capacity_bytes = 128 << 20;
        let store = Store::new(store).unwrap();
        let server = Arc::new(Server::bind(&path, store.clone(), options).unwrap());
        let (running, resized) = (server.clone(), store.clone());
        let run = move || running.run(&stats, &|bytes| resized.resize(bytes));
        let thread = thread::spawn(move || run().unwrap());
        Self {
            store,
            server: Some(server),
            thread: Some(thread),
            path,
            folder,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn counters(&self) -> ServerCounters {
        self.server.as_ref().unwrap().counters()
    }

    /// Ends the server and removes its socket.
    pub fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop_handle().stop();
            self.thread.take().unwrap().join().unwrap();
        }
    }

    /// Waits for a count to be reached.
    pub fn wait_for(&self, what: &str, reached: impl Fn(&ServerCounters) -> bool) {
        wait_until(what, || reached(&self.counters()));
    }

    /// Waits until all clients have left, and checks that none of their data is left.
    pub fn wait_until_empty(&self) {
        // The server counts one a moment before or after the store does.
        self.wait_for("all clients gone", |counters| {
            counters.clients_left == counters.clients_joined
                && self.store.stats().clients.is_empty()
        });
        assert_eq!(self.store.stats().pages, 0);
        assert_eq!(self.counters().ring_bytes, 0);
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        self.stop();
    }
}

pub fn wait_until(what: &str, reached: impl Fn() -> bool) {
    let begin = Instant::now();
    while !reached() {
        assert!(begin.elapsed() < PATIENCE, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A page that contains its owner in every word.
pub fn signed(handle: Handle, of: u64) -> Page {
    let mut page = [0; 4096];
    let words = [
        u64::from(handle.pool.0),
        handle.object,
        u64::from(handle.index),
        of,
    ];
    for (at, bytes) in page.chunks_exact_mut(8).enumerate() {
        let word = words[at % 4] ^ (at as u64) << 32;
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    page
}

/// A socket on which messages are sent by hand.
pub fn dial(path: &Path) -> UnixStream {
    let socket = UnixStream::connect(path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Reads one reply, and the descriptors that came with it.
pub fn reply(socket: &mut UnixStream) -> (Reply, Vec<OwnedFd>) {
    let mut descriptors = Vec::new();
    let mut head = [0; HEAD_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut head)];
    let received = recvmsg(
        &*socket,
        &mut parts,
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    );
    let begun = received.unwrap().bytes;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    socket.read_exact(&mut head[begun..]).unwrap();
    let mut payload = vec![0; word(&head, 0).unwrap() as usize];
    socket.read_exact(&mut payload).unwrap();
    let reply = Reply::parse(word(&head, 4).unwrap(), &payload).unwrap();
    (reply, descriptors)
}

/// Waits for the end of the stream, skipping what comes before it.
pub fn wait_for_end(socket: &mut UnixStream) {
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Ok(_) => (),
            Err(error) => panic!("no end: {error}"),
        }
    }
}

/// A client that need not follow the protocol.
pub struct Raw {
    pub region: Region,
    pub socket: UnixStream,
    pub bell: OwnedFd,
    pub written: u32,
    pub reaped: u32,
}

impl Raw {
    pub fn connect(path: &Path, entries: u32, slots: u32) -> Self {
        let mut socket = dial(path);
        let hello = Request::Hello {
            version: VERSION,
            entries,
            slots,
            flags: 0,
            name: b"raw".to_vec(),
        };
        socket.write_all(&hello.to_bytes()).unwrap();
        let (reply, descriptors) = reply(&mut socket);
        assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
        let [memory, bell] = descriptors.try_into().unwrap();
        Self {
            region: Region::map(memory, Geometry::new(entries, slots).unwrap()).unwrap(),
            socket,
            bell,
            written: 0,
            reaped: 0,
        }
    }

    /// Writes an entry with the sequence it should have.
    pub fn write(&mut self, entry: Submission) {
        let sequence = self.written.wrapping_add(1);
        self.write_torn(Submission { sequence, ..entry });
    }

    /// Writes an entry unchanged.
    pub fn write_torn(&mut self, entry: Submission) {
        self.region
            .write_submission(self.written, &entry.to_words());
        self.written = self.written.wrapping_add(1);
    }

    /// Publishes what was written and wakes the server.
    pub fn publish(&self) {
        self.publish_tail(self.written);
    }

    pub fn publish_tail(&self, tail: u32) {
        self.region.word(Word::SubmissionTail).store(tail, Release);
        self.ring();
    }

    pub fn ring(&self) {
        rustix::io::write(&self.bell, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Completions published and not reaped.
    pub fn ready(&self) -> u32 {
        let tail = self.region.word(Word::CompletionTail).load(Acquire);
        tail.wrapping_sub(self.reaped)
    }

    /// Waits for the next completion, and reads it without publishing that.
    pub fn completion(&mut self) -> RawCompletion {
        wait_until("a completion", || self.ready() > 0);
        let completion = RawCompletion::from_words(&self.region.completion(self.reaped));
        self.reaped = self.reaped.wrapping_add(1);
        assert_eq!(completion.sequence, self.reaped);
        completion
    }

    /// Publishes how far completions were read.
    pub fn tell_head(&self, head: u32) {
        self.region.word(Word::CompletionHead).store(head, Release);
        self.ring();
    }

    /// Executes one entry. Returns its result.
    pub fn call(&mut self, entry: Submission) -> (Status, u64) {
        self.write(entry);
        self.publish();
        let completion = self.completion();
        self.tell_head(self.reaped);
        assert_eq!(completion.user_data, entry.user_data);
        (
            Status::from_number(completion.status).unwrap(),
            completion.value,
        )
    }

    /// Makes a private pool.
    pub fn pool(&mut self) -> PoolId {
        let (status, pool) = self.call(entry(Op::CreatePool, PoolId(0)));
        assert_eq!(status, Status::Ok);
        PoolId(u32::try_from(pool).unwrap())
    }
}

pub fn entry(op: Op, pool: PoolId) -> Submission {
    Submission {
        op: op as u8,
        pool: pool.0,
        user_data: 0x1234_5678_9abc_def0,
        ..Submission::default()
    }
}

/// Compiles tests/client.c with the header, with the strictest warnings.
pub fn c_client(folder: &Path) -> PathBuf {
    let program = folder.join("client");
    let crate_folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let status = Command::new("gcc")
        .args(["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(crate_folder.join("include"))
        .arg(crate_folder.join("tests/client.c"))
        .arg("-o")
        .arg(&program)
        .status()
        .unwrap();
    assert!(status.success());
    program
}
