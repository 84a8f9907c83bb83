//! The victim cache behind the guest's device-mapper target: pools of an hcache server.
//!
//! A block is stored in its pool as page `block % 2^20` of object `block / 2^20`. The server may end, stop or be
//! replaced at any time, and the guest must not wait for it: a call that is not answered within [`PATIENCE`] ends the
//! connection, and with it all pools. The next attempt follows after 100 ms, later ones after up to 10 s.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_disk::{Page, PoolRequest, VictimCache};
use plimsoll_hcache::{Handle, PoolId, PoolOptions};
use plimsoll_ring::protocol::Status;
use plimsoll_ring::{Completion, ConnectOptions, Connection, Error, Slot};

/// How long a server may take for a call.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two attempts to connect, first and at last.
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
    link: Option<Link>,
    /// Pools opened so far; their numbers are not reused.
    opened: u32,
    /// Earliest time of the next attempt to connect, and the wait after it.
    retry: (Instant, Duration),
}

/// A connection and its pools.
struct Link {
    connection: Connection,
    pools: HashMap<u32, PoolId>,
    /// Pages stored by puts since the last [`VictimCache::collect_puts`].
    stored: u64,
}

impl Link {
    /// A free slot; waits for puts in progress if there is none.
    fn slot(&mut self) -> Result<Slot, Error> {
        let Some(slot) = self.connection.reserve() else {
            // Half of them, so that the server has the other half while this process goes on.
            let left = self.connection.under_way() / 2;
            finish_puts(self, left)?;
            return self.connection.reserve().ok_or(LOST_SLOTS);
        };
        Ok(slot)
    }
}

impl HcacheClient {
    /// A client, called `name`, of the server at `socket`. It does not connect yet.
    #[must_use]
    pub fn new(socket: &Path, name: &str) -> Self {
        let mut options = ConnectOptions::new(name);
        options.timeout = PATIENCE;
        options.slots = SLOTS;
        options.entries = SLOTS + 1;
        Self {
            socket: socket.to_owned(),
            options,
            link: None,
            opened: 0,
            retry: (Instant::now(), RETRY.0),
        }
    }

    /// The connection, opened now if there is none and it is time to try.
    fn connected(&mut self) -> io::Result<&mut Link> {
        if self.link.is_none() {
            let (not_before, wait) = self.retry;
            if Instant::now() < not_before {
                return Err(io::ErrorKind::NotConnected.into());
            }
            let connected = Connection::connect(&self.socket, &self.options);
            // From the end of the attempt, which may have taken long.
            self.retry = (Instant::now() + wait, (wait * 2).min(RETRY.1));
            self.link = Some(Link {
                connection: connected.map_err(io::Error::other)?,
                pools: HashMap::new(),
                stored: 0,
            });
        }
        self.link.as_mut().ok_or(io::ErrorKind::NotConnected.into())
    }

    /// Calls `act` with a pool, when no put is in progress any more. An error that is not the pool's alone closes the
    /// connection.
    fn with<T>(
        &mut self,
        pool: u32,
        act: impl FnOnce(&mut Connection, PoolId) -> Result<T, Error>,
    ) -> io::Result<T> {
        let link = self.link.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let pool = *link.pools.get(&pool).ok_or(io::ErrorKind::NotFound)?;
        let done = finish_puts(link, 0).and_then(|()| act(&mut link.connection, pool));
        self.judged(done)
    }

    fn judged<T>(&mut self, done: Result<T, Error>) -> io::Result<T> {
        if let Err(error) = &done {
            self.judge(error);
        } else {
            self.retry.1 = RETRY.0;
        }
        done.map_err(io::Error::other)
    }

    fn judge(&mut self, error: &Error) {
        let of_the_pool = matches!(error, Error::NoSuchPool(_) | Error::TooManyPools);
        if !of_the_pool {
            self.link = None;
        }
    }
}

impl VictimCache for HcacheClient {
    fn open(&mut self, pool: PoolRequest) -> io::Result<u32> {
        let options = match pool {
            PoolRequest::Private => PoolOptions::private(),
            PoolRequest::Shared { key } => PoolOptions::shared(key),
        };
        let number = self.opened.checked_add(1);
        let number = number.ok_or(io::ErrorKind::QuotaExceeded)?;
        let link = self.connected()?;
        match link.connection.create_pool(options) {
            Ok(id) => {
                link.pools.insert(number, id);
                self.opened = number;
                Ok(number)
            }
            Err(error) => {
                self.judge(&error);
                Err(io::Error::other(error))
            }
        }
    }

    fn close(&mut self, pool: u32) {
        // If the server cannot be reached, the end of the connection closes the pool.
        let _ = self.with(pool, |connection, pool| {
            is_awake(connection, pool)?;
            connection.destroy_pool(pool)
        });
        if let Some(link) = &mut self.link {
            link.pools.remove(&pool);
        }
    }

    fn put(&mut self, pool: u32, block: u64, page: &Page) -> io::Result<()> {
        let link = self.link.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let pool = *link.pools.get(&pool).ok_or(io::ErrorKind::NotFound)?;
        let done = link.slot().and_then(|mut slot| {
            let connection = &mut link.connection;
            connection.page(&mut slot).copy_from_slice(page);
            connection.submit_put(handle(pool, block), slot, 0)?;
            if connection.under_way().is_multiple_of(PUTS_PUBLISHED) {
                connection.publish();
            }
            Ok(())
        });
        self.judged(done)
    }

    fn collect_puts(&mut self) -> io::Result<u64> {
        let Some(link) = &mut self.link else {
            return Ok(0);
        };
        let under_way = link.connection.under_way();
        let done = finish_puts(link, under_way).map(|()| std::mem::take(&mut link.stored));
        self.judged(done)
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
            is_awake(connection, pool)?;
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
            is_awake(connection, pool)?;
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

/// Checks that the server answers, before a call that waits without limit.
fn is_awake(connection: &mut Connection, pool: PoolId) -> Result<(), Error> {
    // No block stands there: a disk has fewer than 2^44.
    let nothing = Handle {
        pool,
        object: u64::MAX,
        index: 0,
    };
    connection.submit_flush(nothing, 0)?;
    finish(connection, |_, _| ())
}

/// Waits until at most `left` puts are in progress, and nothing else is.
fn finish_puts(link: &mut Link, left: u32) -> Result<(), Error> {
    let stored = &mut link.stored;
    finish_to(&mut link.connection, left, |_, done| {
        *stored += u64::from(done.status == Status::Ok);
    })
}

/// Waits for all operations in flight, up to [`PATIENCE`].
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
    let begin = Instant::now();
    loop {
        if let Some(mut done) = connection.reap()? {
            if let Status::NoSuchPool = done.status {
                return Err(Error::Protocol("a pool has gone"));
            }
            each(connection, &mut done);
            connection.release(done.slot);
            continue;
        }
        if connection.under_way() <= left {
            return Ok(());
        }
        match begin.elapsed() {
            waited if waited < SPIN => std::hint::spin_loop(),
            waited if waited < PATIENCE => thread::sleep(NAP),
            _ => return Err(Error::Disconnected),
        }
    }
}

/// Time of polling for an answer before sleeping, and length of the sleep.
const SPIN: Duration = Duration::from_micros(20);
const NAP: Duration = Duration::from_micros(20);

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_hcache::{Store, StoreOptions};
    use plimsoll_ring::{Server, ServerOptions};

    /// A server in a thread, until it is dropped.
    struct ServerThread {
        stop: plimsoll_ring::StopHandle,
        thread: Option<thread::JoinHandle<()>>,
    }

    impl ServerThread {
        fn at(socket: &Path) -> Self {
            let store = Store::new(StoreOptions::new(32 << 20)).unwrap();
            let server = Server::bind(socket, store, ServerOptions::default()).unwrap();
            let stop = server.stop_handle();
            let serve = move || server.run(&|| "{}".to_owned()).unwrap();
            Self {
                stop,
                thread: Some(thread::spawn(serve)),
            }
        }
    }

    impl Drop for ServerThread {
        fn drop(&mut self) {
            self.stop.stop();
            if let Some(thread) = self.thread.take() {
                thread.join().unwrap();
            }
        }
    }

    fn found(behind: &mut HcacheClient, pool: u32, block: u64, count: u32) -> Vec<(u32, u8)> {
        let mut found = Vec::new();
        let each = &mut |index, page: &Page| found.push((index, page[4095]));
        behind.get(pool, block, count, each).unwrap();
        found.sort_unstable();
        found
    }

    fn put(behind: &mut HcacheClient, pool: u32, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            let content = [block.to_le_bytes()[0]; 4096];
            behind.put(pool, block, &content).unwrap();
        }
    }

    #[test]
    fn puts_in_progress_are_counted_once_and_precede_every_later_call() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("hcache");
        let served = ServerThread::at(&socket);
        let mut behind = HcacheClient::new(&socket, "test");
        let pool = behind.open(PoolRequest::Private).unwrap();
        // More than there are slots.
        put(&mut behind, pool, 0..1000);
        // A get waits for them.
        assert_eq!(found(&mut behind, pool, 1000, 1), []);
        assert_eq!(behind.collect_puts().unwrap(), 1000);
        assert_eq!(behind.collect_puts().unwrap(), 0);
        put(&mut behind, pool, 1000..1003);
        behind.flush(pool, 1001, 1).unwrap();
        assert_eq!(
            found(&mut behind, pool, 999, 4),
            [(0, 231), (1, 232), (3, 234)]
        );
        put(&mut behind, pool, [7]);
        put(&mut behind, pool, [7]);
        behind.flush_pool(pool).unwrap();
        assert_eq!(found(&mut behind, pool, 0, 100), []);
        assert_eq!(behind.collect_puts().unwrap(), 5);
        drop(served);
        put(&mut behind, pool, [1]);
        assert!(behind.get(pool, 1, 1, &mut |_, _| panic!("found")).is_err());
        assert!(behind.put(pool, 1, &[0; 4096]).is_err());
        assert_eq!(behind.collect_puts().unwrap(), 0, "of no connection");
    }

    #[test]
    fn pages_come_back_until_they_are_taken_or_flushed() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("hcache");
        let _served = ServerThread::at(&socket);
        let mut behind = HcacheClient::new(&socket, "test");
        let private = behind.open(PoolRequest::Private).unwrap();
        let shared = behind.open(PoolRequest::Shared { key: 7 }).unwrap();
        // Across the border of two objects, and more than there are slots.
        let begin: u32 = (3 << OBJECT_SHIFT) - 100;
        for pool in [private, shared] {
            put(&mut behind, pool, (begin..begin + 200).map(u64::from));
        }
        let all: Vec<_> = (0..200_u32)
            .map(|i| (i, (begin + i).to_le_bytes()[0]))
            .collect();
        let begin = u64::from(begin);
        assert_eq!(found(&mut behind, private, begin, 200), all);
        assert_eq!(found(&mut behind, private, begin, 200), []);
        assert_eq!(found(&mut behind, shared, begin, 200), all);
        // A few one by one, many as ranges.
        behind.flush(shared, begin + 10, 2).unwrap();
        behind.flush(shared, begin + 50, 100).unwrap();
        let left = found(&mut behind, shared, begin, 200);
        let kept = |i| !(10..12).contains(&i) && !(50..150).contains(&i);
        let expected: Vec<_> = all.iter().copied().filter(|(i, _)| kept(*i)).collect();
        assert_eq!(left, expected);
        // What another client of the same key has.
        let mut other = HcacheClient::new(&socket, "other");
        let same = other.open(PoolRequest::Shared { key: 7 }).unwrap();
        assert_eq!(found(&mut other, same, begin, 200), expected);
        behind.flush_pool(shared).unwrap();
        assert_eq!(found(&mut other, same, begin, 200), []);

        put(&mut behind, private, [1]);
        behind.close(private);
        assert!(behind.put(private, 1, &[0; 4096]).is_err());
        let again = behind.open(PoolRequest::Private).unwrap();
        assert!(again > shared);
        assert_eq!(found(&mut behind, again, 1, 1), []);
    }

    #[test]
    fn a_server_that_goes_takes_its_pools_and_another_is_found_later() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("hcache");
        let mut behind = HcacheClient::new(&socket, "test");
        assert!(behind.open(PoolRequest::Private).is_err());
        // Not tried again at once.
        let again = behind.open(PoolRequest::Private).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::NotConnected);
        let served = ServerThread::at(&socket);
        let pool = reopened(&mut behind);
        put(&mut behind, pool, [1]);
        drop(served);
        assert!(behind.get(pool, 1, 1, &mut |_, _| panic!("found")).is_err());
        assert!(behind.flush(pool, 1, 1).is_err());
        let _served = ServerThread::at(&socket);
        let other = reopened(&mut behind);
        assert!(other > pool);
        assert!(behind.put(pool, 1, &[0; 4096]).is_err());
        assert_eq!(found(&mut behind, other, 1, 1), []);
        put(&mut behind, other, [1]);
    }

    fn reopened(behind: &mut HcacheClient) -> u32 {
        loop {
            match behind.open(PoolRequest::Private) {
                Ok(pool) => return pool,
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}
