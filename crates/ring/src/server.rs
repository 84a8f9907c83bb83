//! The server: its socket, access control, and the limits of each client.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_hcache::{ClientOptions, Store};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

use crate::control::{Control, SPARE_CONNECTIONS, is_privileged};
use crate::counters::{Counts, ServerCounters};
use crate::worker::{Worker, new_bell, ring};

/// Limits of each client of a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientLimits {
    /// Its weight in the store, 1 to 1 000 000.
    pub weight: u32,
    /// Minimum of the store in bytes that others cannot take from it.
    pub floor_bytes: u64,
    /// Maximum of the store in bytes, `None` for no limit.
    pub ceiling_bytes: Option<u64>,
    /// Maximum number of concurrent clients of the user.
    pub max_clients: usize,
    /// Maximum number of pools that it uses at a time.
    pub max_pools: usize,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self {
            weight: ClientOptions::WEIGHT,
            floor_bytes: 0,
            ceiling_bytes: None,
            max_clients: 64,
            // As many as a guest's module may have.
            max_pools: 32,
        }
    }
}

/// Options of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Mode of the socket's file.
    pub mode: u32,
    /// Users who may connect, by number. Root and the server's own user always may.
    pub allowed_uids: Vec<u32>,
    /// Limits of each client.
    pub limits: ClientLimits,
    /// Limits of each client of certain users.
    pub user_limits: BTreeMap<u32, ClientLimits>,
    /// Maximum number of concurrent clients; [a store](Store::MOST_CLIENTS) may have fewer.
    pub max_clients: usize,
    /// Number of threads that serve rings, at least 1.
    pub workers: usize,
    /// How long a worker polls idle rings before it sleeps.
    pub spin: Duration,
    /// How long a connection that has no ring may be silent.
    pub idle_timeout: Duration,
    /// How long a connection may be without a ring, whatever it requests.
    pub ringless_timeout: Duration,
}

impl Default for ServerOptions {
    /// Root and the own user, 256 clients, one worker for two processors.
    fn default() -> Self {
        let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            mode: 0o600,
            allowed_uids: Vec::new(),
            limits: ClientLimits::default(),
            user_limits: BTreeMap::new(),
            max_clients: 256,
            workers: processors.div_ceil(2),
            spin: default_spin(),
            idle_timeout: Duration::from_secs(5),
            ringless_timeout: Duration::from_secs(60),
        }
    }
}

impl ServerOptions {
    /// Maximum number of concurrent clients, as many as a store can have.
    pub fn clients_max(&self) -> usize {
        self.max_clients.min(Store::MOST_CLIENTS)
    }

    /// The number of descriptors that a server and its process may have open at a time.
    pub fn descriptors(&self) -> u64 {
        /// Of the process, for what it reads and for connections of root beyond the limits.
        const OTHERS: usize = 32;
        (2 * self.clients_max() + SPARE_CONNECTIONS + 2 * self.workers + OTHERS) as u64
    }
}

/// How long to poll before sleeping: not at all where the other side cannot run meanwhile.
pub(crate) fn default_spin() -> Duration {
    let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    Duration::from_micros(if processors > 1 { 50 } else { 0 })
}

/// Serves a store to other processes. Removes its socket when dropped.
pub struct Server {
    path: PathBuf,
    /// Device and inode of the socket's file, to remove no other.
    file: (u64, u64),
    pub(crate) listener: OwnedFd,
    pub(crate) store: Store,
    pub(crate) options: ServerOptions,
    pub(crate) counts: Arc<Counts>,
    pub(crate) stop: StopHandle,
    pub(crate) begin: Instant,
}

/// Changes the capacity of a server's store to so many bytes.
pub type Resize<'a> = dyn Fn(u64) -> Result<(), plimsoll_hcache::Error> + 'a;

/// Stops a server from another thread, or from a signal handler.
#[derive(Clone)]
pub struct StopHandle {
    pub(crate) stopped: Arc<AtomicBool>,
    pub(crate) bell: Arc<OwnedFd>,
}

impl StopHandle {
    /// Makes [`Server::run`] return. Later calls have no effect.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        ring(&self.bell);
    }
}

impl Server {
    /// Listens at `path`, replacing a socket at which nobody listens any more.
    ///
    /// # Errors
    ///
    /// `AddrInUse` if a server listens there, `AlreadyExists` if the path exists and is not a socket; else
    /// the kernel's.
    pub fn bind(path: impl AsRef<Path>, store: Store, options: ServerOptions) -> io::Result<Self> {
        let path = path.as_ref().to_owned();
        let stop = StopHandle {
            stopped: Arc::default(),
            bell: Arc::new(new_bell()?),
        };
        let address = SocketAddrUnix::new(&path)?;
        let listener = socket()?;
        match bind(&listener, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(&path, &address)?;
                bind(&listener, &address)?;
            }
            bound => bound?,
        }
        // Nobody can connect before `listen`, so the mode that the umask left is harmless.
        let entry = fs::symlink_metadata(&path)?;
        let server = Self {
            file: (entry.dev(), entry.ino()),
            path,
            listener,
            store,
            options,
            counts: Arc::default(),
            stop,
            begin: Instant::now(),
        };
        server.store.set_groups(server.users());
        fs::set_permissions(&server.path, Permissions::from_mode(server.options.mode))?;
        listen(&server.listener, 128)?;
        Ok(server)
    }

    /// Serves until it is stopped, on this thread and those of its workers; then every client is closed.
    /// `stats` makes the text that is sent in reply to requests for statistics, and `resize` changes the store's capacity to so many
    /// bytes ([`Store::resize`], with what else depends on it). Once a second the store runs its turn.
    ///
    /// # Errors
    ///
    /// The kernel's, if the server cannot continue.
    ///
    /// # Panics
    ///
    /// If a worker panicked; its clients were closed.
    pub fn run(&self, stats: &dyn Fn() -> String, resize: &Resize<'_>) -> io::Result<()> {
        let workers = (0..self.options.workers.max(1)).map(|_| Worker::new());
        let workers = workers.collect::<io::Result<Vec<_>>>()?;
        thread::scope(|scope| {
            for worker in &workers {
                let on_panic = self.stop.clone();
                let serve =
                    move || worker.serve(self.options.spin, &self.counts.worker_sleeps, on_panic);
                thread::Builder::new()
                    .name("hcache-worker".to_owned())
                    .spawn_scoped(scope, serve)
                    .inspect_err(|_| workers.iter().for_each(Worker::stop))?;
            }
            let result = Control::new(self, &workers, stats, resize).and_then(Control::run);
            workers.iter().for_each(Worker::stop);
            result
        })
    }

    /// Returns a handle that stops it from elsewhere.
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Its counters so far.
    pub fn counters(&self) -> ServerCounters {
        self.counts.read()
    }

    /// The path of its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of users who may connect; root and the server's own count as one.
    pub(crate) fn users(&self) -> usize {
        let allowed = self.options.allowed_uids.iter();
        let others: BTreeSet<_> = allowed.filter(|uid| !is_privileged(**uid)).collect();
        1 + others.len()
    }

    /// The limits of a user's clients.
    pub(crate) fn limits_of(&self, uid: u32) -> &ClientLimits {
        let own = self.options.user_limits.get(&uid);
        own.unwrap_or(&self.options.limits)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|entry| (entry.dev(), entry.ino()) == self.file);
        if ours {
            // If it stayed, it would be replaced by the next server.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes a socket at which nobody listens.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        let what = format!("{} is there and no socket", path.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    }
    match connect(&socket()?, address) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        Ok(()) | Err(Errno::AGAIN) => {
            let what = format!("a server listens at {} already", path.display());
            Err(io::Error::new(io::ErrorKind::AddrInUse, what))
        }
        Err(error) => Err(error.into()),
    }
}
