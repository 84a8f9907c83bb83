//! Threads that serve rings: each polls those of its clients by turns, and sleeps when all are idle.
//!
//! Asleep, a worker waits for events of the clients' eventfds. They are edge-triggered and never read: a client
//! holds the same file, and could make a read of it block. For the same reason clients are woken by a byte on
//! their socket, whose other end only they have, and not by an eventfd.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::net::{SendFlags, Shutdown, send, shutdown};

use crate::StopHandle;
use crate::counters::Counts;
use crate::executor::{Executor, Tally};
use crate::words::server_announced;

/// Maximum number of entries of one client that are served before the next client's turn.
const TURN_ENTRIES: u32 = 64;

/// A client with a ring, owned by its worker. Dropped, it returns its share of the limits and closes its socket.
pub struct ServedClient {
    executor: Executor,
    /// The eventfd that the client writes when the server sleeps.
    bell: OwnedFd,
    /// Set when the client is to be dropped.
    gone: Arc<AtomicBool>,
    end: End,
}

/// Cleanup after everything else of a client has been dropped.
struct End {
    socket: Arc<OwnedFd>,
    counts: Arc<Counts>,
    region_bytes: u64,
}

impl Drop for End {
    fn drop(&mut self) {
        // Fails only if the client has already gone, which is harmless.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.counts.ring_bytes.fetch_sub(self.region_bytes, Relaxed);
        self.counts.clients_left.fetch_add(1, Release);
    }
}

impl ServedClient {
    /// Adds a client.
    pub fn new(
        executor: Executor,
        bell: OwnedFd,
        socket: Arc<OwnedFd>,
        gone: Arc<AtomicBool>,
        counts: Arc<Counts>,
    ) -> Self {
        let region_bytes = executor.region().geometry().region_bytes() as u64;
        counts.ring_bytes.fetch_add(region_bytes, Relaxed);
        counts.clients_joined.fetch_add(1, Relaxed);
        let end = End {
            socket,
            counts,
            region_bytes,
        };
        Self {
            executor,
            bell,
            gone,
            end,
        }
    }

    /// Serves a turn. Returns whether there was work, `None` if the ring cannot be served any more.
    fn turn(&mut self) -> Option<bool> {
        let mut tally = Tally::default();
        let counts = &self.end.counts;
        let Ok(turn) = self.executor.serve(TURN_ENTRIES, &mut tally) else {
            counts.closed_corrupt_ring.fetch_add(1, Relaxed);
            return None;
        };
        if turn.entries > 0 {
            counts.add(&tally);
        }
        if turn.wake {
            counts.client_wakes.fetch_add(1, Relaxed);
            // A full socket holds a byte that will wake the client; a closed one is noticed by the control thread.
            let _ = send(
                &self.end.socket,
                &[0],
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            );
        }
        Some(turn.entries > 0)
    }
}

/// A bell is not read: a worker wakes when it is rung once more.
const BELL_EDGES: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// State shared by the control thread and one worker.
pub struct Worker {
    /// Clients that it is to add.
    inbox: Mutex<Vec<ServedClient>>,
    /// Set when the inbox has entries, a client is gone, or the worker must end.
    rung: AtomicBool,
    /// The eventfd that wakes it.
    bell: OwnedFd,
    /// What it sleeps on: its bell, and those of its clients.
    epoll: OwnedFd,
    /// Number of clients that it has or will have.
    clients: AtomicUsize,
    stop: AtomicBool,
}

impl Worker {
    /// Makes a worker without a thread yet.
    pub fn new() -> io::Result<Self> {
        let bell = new_bell()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &bell, epoll::EventData::new_u64(0), BELL_EDGES)?;
        Ok(Self {
            inbox: Mutex::default(),
            rung: AtomicBool::new(false),
            bell,
            epoll,
            clients: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        })
    }

    /// Number of clients that it has or will have.
    pub fn clients(&self) -> usize {
        self.clients.load(Relaxed)
    }

    /// Passes a client to it.
    pub fn take(&self, served: ServedClient) {
        self.clients.fetch_add(1, Relaxed);
        self.lock_inbox().push(served);
        self.ring();
    }

    /// Wakes the worker, which then checks its inbox and its clients.
    pub fn ring(&self) {
        self.rung.store(true, Release);
        ring(&self.bell);
    }

    /// Ends it: it drops its clients and returns.
    pub fn stop(&self) {
        self.stop.store(true, Release);
        self.ring();
    }

    fn lock_inbox(&self) -> std::sync::MutexGuard<'_, Vec<ServedClient>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves its clients until it is stopped; `spin` is how long it polls idle rings before it sleeps. If it
    /// panics, `on_panic` stops the server.
    ///
    /// # Panics
    ///
    /// If an epoll fails.
    pub fn serve(&self, spin: Duration, sleeps: &AtomicU64, on_panic: StopHandle) {
        let _guard = StopOnPanic(on_panic);
        let mut clients: Vec<ServedClient> = Vec::new();
        let drop_client = |client: ServedClient| {
            // Not where the server ends: then clients still read the pages that they got.
            client.executor.region().empty_slots();
            // A client holds the eventfd as well, so closing ours would leave it in the epoll.
            epoll::delete(&self.epoll, &client.bell).expect("a client's bell in the epoll");
            drop(client);
            self.clients.fetch_sub(1, Relaxed);
        };
        let mut last_busy = Instant::now();
        let mut idle_rounds = 0_u32;
        loop {
            if self.rung.swap(false, Acquire) {
                if self.stop.load(Acquire) {
                    self.lock_inbox().clear();
                    return;
                }
                for client in self.lock_inbox().drain(..) {
                    let data = epoll::EventData::new_u64(0);
                    epoll::add(&self.epoll, &client.bell, data, BELL_EDGES)
                        .expect("a bell in the epoll");
                    clients.push(client);
                }
                let gone = |client: &mut ServedClient| client.gone.load(Acquire);
                clients.extract_if(.., gone).for_each(drop_client);
            }
            let mut busy = false;
            let broken = |client: &mut ServedClient| {
                let served = client.turn();
                busy |= served == Some(true);
                served.is_none()
            };
            clients.extract_if(.., broken).for_each(drop_client);
            if busy {
                last_busy = Instant::now();
            } else if last_busy.elapsed() < spin {
                std::hint::spin_loop();
                idle_rounds = idle_rounds.wrapping_add(1);
                if idle_rounds.is_multiple_of(64) {
                    // A client may be waiting for this processor.
                    std::thread::yield_now();
                }
            } else {
                self.sleep(&mut clients, sleeps);
                last_busy = Instant::now();
            }
        }
    }

    /// Waits for an eventfd, unless a client published something in the meantime.
    fn sleep(&self, clients: &mut [ServedClient], sleeps: &AtomicU64) {
        let say = |clients: &[ServedClient], sleeping| {
            for client in clients {
                client.executor.set_sleeping(sleeping);
            }
        };
        say(clients, true);
        server_announced();
        let idle = |client: &mut ServedClient| client.executor.ready() == Ok(0);
        if !self.rung.load(Acquire) && clients.iter_mut().all(idle) {
            sleeps.fetch_add(1, Relaxed);
            let mut events = Vec::with_capacity(64);
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                None,
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => (),
                Err(error) => panic!("waiting for bells: {error}"),
            }
        }
        say(clients, false);
    }
}

/// Stops the server if its worker panics, so that the panic is reported and no client waits for ever.
struct StopOnPanic(StopHandle);

impl Drop for StopOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

/// Makes an eventfd.
pub fn new_bell() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Signals an eventfd. It can only fail if its counter is full, that is, already signalled.
pub fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}
