//! The victim cache behind the guest's device-mapper target: pools of an hcache server.
//!
//! A block is stored in its pool as page `block % 2^20` of object `block / 2^20`.
//!
//! The server may end, stop or be replaced at any time, and the thread that serves the VM's I/O must not wait for it. So
//! connecting is done by a thread of its own, and a call that is not answered within [`PATIENCE`] ends the connection,
//! and with it all pools: the disks go on without, and no other call waits for that server. The next attempt to connect
//! follows after 100 ms, later ones after up to 10 s; only a connection that lasted longer than that begins anew with
//! 100 ms. A server that is stopped again and again therefore costs a second in eleven at most.
//!
//! What the server does with the ring that was given up, when it goes on, is of no account: it finds the connection
//! closed and drops the client with its private pools; nobody reads the slots any more; and a put that it still
//! executes into the pool of an image is a block of that image. A flush that did not arrive concerns a private pool,
//! whose number is not used again.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_disk::{Page, PoolRequest, VictimCache};
use plimsoll_hcache::{Handle, PoolId, PoolOptions};
use plimsoll_ring::protocol::Status;
use plimsoll_ring::{Completion, ConnectOptions, Connection, Error, Slot};

/// How long a server may take for a call.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long it may take to answer a new client, for whose ring it may have to make room; nothing waits for that.
const CONNECTING_MAX: Duration = Duration::from_secs(10);
/// Time between the end of a connection, or of an attempt, and the next attempt, at first and at last.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Blocks of an object, as a power of two: 4 GiB.
const OBJECT_SHIFT: u32 = 20;
/// Pages that may be on their way to the server: so many a guest can put while the server does not run. A power of two less
/// one, as all ring sizes; the ring's 2 MiB are part of the server's capacity.
const SLOTS: u32 = 511;
/// Puts that are published together; each time, a server that sleeps is woken.
const PUTS_PUBLISHED: u32 = 16;
/// Blocks that are flushed one by one, in one batch; more are flushed as ranges.
const FLUSHES_MAX: u32 = 64;

/// A client of an hcache server that may be unreachable.
pub struct HcacheClient {
    socket: PathBuf,
    options: ConnectOptions,
    link: LinkState,
    /// Pools opened so far; their numbers are not reused.
    opened: u32,
    /// The next wait before an attempt to connect.
    wait: Duration,
    /// Why the last connection, or attempt, ended; `None` while there is one.
    failure: Option<String>,
}

/// The connection, or what is done for one.
enum LinkState {
    /// There is none until this time.
    Resting(Instant),
    /// A thread connects.
    Connecting(Receiver<Result<Connection, Error>>),
    Open(Box<Link>),
}

/// A connection and its pools.
struct Link {
    connection: Connection,
    pools: HashMap<u32, PoolId>,
    since: Instant,
    /// Pages stored by puts since the last [`VictimCache::collect_puts`].
    stored: u64,
    /// When the puts since then have waited for long enough; `None` while none waited.
    puts_until: Option<Instant>,
}

impl HcacheClient {
    /// A client, called `name`, of the server at `socket`, to which it begins to connect.
    pub fn new(socket: &Path, name: &str) -> Self {
        let mut options = ConnectOptions::new(name);
        options.timeout = CONNECTING_MAX;
        options.slots = SLOTS;
        options.entries = SLOTS + 1;
        let mut client = Self {
            socket: socket.to_owned(),
            options,
            link: LinkState::Resting(Instant::now()),
            opened: 0,
            wait: RETRY.0,
            failure: None,
        };
        client.begin_to_connect();
        client
    }

    fn begin_to_connect(&mut self) {
        // The thread may find the receiver gone, and never waits.
        let (sender, receiver) = sync_channel(1);
        let (socket, options) = (self.socket.clone(), self.options.clone());
        let connect = move || drop(sender.send(Connection::connect(&socket, &options)));
        let spawned = thread::Builder::new()
            .name("hcache-connect".to_owned())
            .spawn(connect);
        match spawned {
            Ok(_) => self.link = LinkState::Connecting(receiver),
            Err(error) => self.rest(&error.into()),
        }
    }

    /// Gives up the connection, or the attempt, for a while.
    fn rest(&mut self, why: &Error) {
        let source = std::error::Error::source(why).map(|source| format!(": {source}"));
        self.failure = Some(format!("{why}{}", source.unwrap_or_default()));
        if let LinkState::Open(link) = &self.link
            && link.since.elapsed() >= RETRY.1
        {
            self.wait = RETRY.0;
        }
        self.link = LinkState::Resting(Instant::now() + self.wait);
        self.wait = (self.wait * 2).min(RETRY.1);
    }

    /// The connection, if there is one. Otherwise it is seen to that there will be one; nothing waits for that.
    fn connected(&mut self) -> io::Result<&mut Link> {
        match &mut self.link {
            LinkState::Open(_) => {}
            LinkState::Resting(until) => {
                if Instant::now() >= *until {
                    self.begin_to_connect();
                }
            }
            LinkState::Connecting(attempt) => match attempt.try_recv() {
                Err(TryRecvError::Empty) => {}
                Ok(Ok(connection)) => {
                    self.failure = None;
                    self.link = LinkState::Open(Box::new(Link {
                        connection,
                        pools: HashMap::new(),
                        since: Instant::now(),
                        stored: 0,
                        puts_until: None,
                    }));
                }
                Ok(Err(error)) => {
                    self.rest(&error);
                    return Err(io::Error::new(io::ErrorKind::NotConnected, error));
                }
                Err(TryRecvError::Disconnected) => self.rest(&Error::Disconnected),
            },
        }
        self.open_link()
    }

    fn open_link(&mut self) -> io::Result<&mut Link> {
        match &mut self.link {
            LinkState::Open(link) => Ok(link),
            LinkState::Resting(_) | LinkState::Connecting(_) => {
                Err(io::ErrorKind::NotConnected.into())
            }
        }
    }

    /// Calls `act` with a pool, when no put is in progress any more, for at most [`PATIENCE`]. An error that is not the
    /// pool's alone closes the connection.
    fn with<T>(
        &mut self,
        pool: u32,
        act: impl FnOnce(&mut Connection, PoolId) -> Result<T, Error>,
    ) -> io::Result<T> {
        let link = self.open_link()?;
        let pool = *link.pools.get(&pool).ok_or(io::ErrorKind::NotFound)?;
        link.begin_call();
        let done = finish_puts(link, 0).and_then(|()| act(&mut link.connection, pool));
        self.judge(done)
    }

    fn judge<T>(&mut self, done: Result<T, Error>) -> io::Result<T> {
        done.map_err(|error| {
            let of_the_pool = matches!(
                error,
                Error::NoSuchPool(_) | Error::TooManyPools | Error::Bad(Status::Failed)
            );
            if !of_the_pool {
                self.rest(&error);
            }
            match error {
                Error::TimedOut => io::Error::new(io::ErrorKind::TimedOut, error),
                error => io::Error::other(error),
            }
        })
    }
}

impl Link {
    fn begin_call(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        self.connection.set_deadline(Some(deadline));
    }

    /// A free slot; waits for puts in progress if there is none.
    fn slot(&mut self) -> Result<Slot, Error> {
        let Some(slot) = self.connection.reserve() else {
            // All puts of a batch together wait as long as one call may.
            let latest = Instant::now() + PATIENCE;
            let until = *self.puts_until.get_or_insert(latest);
            self.connection.set_deadline(Some(until));
            // Half of them, so that the server has the other half while this process goes on.
            let left = self.connection.under_way() / 2;
            finish_puts(self, left)?;
            return self.connection.reserve().ok_or(LOST_SLOTS);
        };
        Ok(slot)
    }
}

impl VictimCache for HcacheClient {
    fn is_in_reach(&mut self) -> bool {
        self.connected().is_ok()
    }

    fn failure(&self) -> Option<String> {
        self.failure.clone()
    }

    fn open(&mut self, pool: PoolRequest) -> io::Result<u32> {
        let options = match pool {
            PoolRequest::Private => PoolOptions::private(),
            PoolRequest::Shared { key } => PoolOptions::shared(key),
        };
        let number = self.opened.checked_add(1);
        let number = number.ok_or(io::ErrorKind::QuotaExceeded)?;
        let link = self.connected()?;
        link.begin_call();
        let made = link.connection.create_pool(options).inspect(|id| {
            link.pools.insert(number, *id);
        });
        self.judge(made)?;
        self.opened = number;
        Ok(number)
    }

    fn close(&mut self, pool: u32) -> io::Result<()> {
        // Several targets of a guest may have opened one shared pool, which it has until the last of them closes it.
        if let Ok(link) = self.open_link()
            && let Some(id) = link.pools.get(&pool).copied()
            && link.pools.values().filter(|other| **other == id).count() > 1
        {
            link.pools.remove(&pool);
            return Ok(());
        }
        // If the server cannot be reached, the end of the connection closes the pool.
        let closed = self.with(pool, Connection::destroy_pool);
        if let Ok(link) = self.open_link() {
            link.pools.remove(&pool);
        }
        closed
    }

    fn put(&mut self, pool: u32, block: u64, page: &Page) -> io::Result<()> {
        let link = self.open_link()?;
        let pool = *link.pools.get(&pool).ok_or(io::ErrorKind::NotFound)?;
        link.begin_call();
        let done = link.slot().and_then(|mut slot| {
            let connection = &mut link.connection;
            connection.page(&mut slot).copy_from_slice(page);
            connection.submit_put(handle(pool, block), slot, 0)?;
            if connection.under_way().is_multiple_of(PUTS_PUBLISHED) {
                connection.publish();
            }
            Ok(())
        });
        self.judge(done)
    }

    fn collect_puts(&mut self) -> io::Result<u64> {
        let LinkState::Open(link) = &mut self.link else {
            return Ok(0);
        };
        link.begin_call();
        let under_way = link.connection.under_way();
        link.puts_until = None;
        let done = finish_puts(link, under_way).map(|()| std::mem::take(&mut link.stored));
        self.judge(done)
    }

    fn get(
        &mut self,
        pool: u32,
        block: u64,
        count: u32,
        found: &mut dyn FnMut(u32, &Page),
    ) -> io::Result<()> {
        self.with(pool, |connection, pool| {
            let mut next = 0;
            while next < count {
                while next < count
                    && let Some(slot) = connection.reserve()
                {
                    let handle = handle(pool, block + u64::from(next));
                    connection.submit_get(handle, slot, next.into())?;
                    next += 1;
                }
                finish(connection, |connection, done| {
                    let index = u32::try_from(done.user_data);
                    if let (Ok(index), Status::Ok, Some(slot)) =
                        (index, done.status, &mut done.slot)
                    {
                        found(index, connection.page(slot));
                    }
                })?;
            }
            Ok(())
        })
    }

    fn flush(&mut self, pool: u32, block: u64, count: u32) -> io::Result<()> {
        self.with(pool, |connection, pool| {
            if count <= FLUSHES_MAX {
                for block in (block..).take(count as usize) {
                    connection.submit_flush(handle(pool, block), 0)?;
                }
                return finish(connection, |_, _| ());
            }
            // Any page may be dropped at any time, and a guest may request this repeatedly.
            if count >> OBJECT_SHIFT > 0 {
                return connection.flush_pool(pool).map(drop);
            }
            let end = block.saturating_add(count.into());
            let mut at = block;
            while at < end {
                let first = handle(pool, at);
                let next = (first.object + 1) << OBJECT_SHIFT;
                let last = handle(pool, next.min(end) - 1);
                connection.flush_range(pool, first.object, first.index..=last.index)?;
                at = next;
            }
            Ok(())
        })
    }

    fn flush_pool(&mut self, pool: u32) -> io::Result<()> {
        self.with(pool, |connection, pool| {
            connection.flush_pool(pool).map(drop)
        })
    }
}

/// Between two calls all slots are free.
const LOST_SLOTS: Error = Error::Protocol("no slot is free");

fn handle(pool: PoolId, block: u64) -> Handle {
    let in_object = block & ((1 << OBJECT_SHIFT) - 1);
    Handle {
        pool,
        object: block >> OBJECT_SHIFT,
        index: in_object as u32,
    }
}

/// Waits until at most `left` puts are in progress, and nothing else is.
fn finish_puts(link: &mut Link, left: u32) -> Result<(), Error> {
    let stored = &mut link.stored;
    finish_to(&mut link.connection, left, |_, done| {
        *stored += u64::from(done.status == Status::Ok);
    })
}

/// Waits for all operations in flight.
fn finish(
    connection: &mut Connection,
    each: impl FnMut(&mut Connection, &mut Completion),
) -> Result<(), Error> {
    finish_to(connection, 0, each)
}

/// Takes what has completed, and waits until at most `left` operations are in flight, up to [`PATIENCE`].
fn finish_to(
    connection: &mut Connection,
    left: u32,
    mut each: impl FnMut(&mut Connection, &mut Completion),
) -> Result<(), Error> {
    connection.publish();
    loop {
        while let Some(mut done) = connection.reap()? {
            if let Status::NoSuchPool = done.status {
                return Err(Error::Protocol("a pool has gone"));
            }
            each(connection, &mut done);
            connection.release(done.slot);
        }
        if connection.under_way() <= left {
            return Ok(());
        }
        connection.wait()?;
    }
}

#[cfg(test)]
mod tests;
