//! hcache for other processes: a server and a client, connected by a Unix socket and a ring in shared memory.
//!
//! The socket registers a client and shows when either side ends; everything else goes through the ring, without a
//! system call while both sides are busy. docs/hcache-protocol.md documents every byte; `include/plimsoll_hcache.h`
//! is the client in C.
//!
//! The server trusts nothing that a client can write: it reads each shared word once and validates the copy.
//! A faulty client damages only its own ring. Each operation is executed on behalf of the client that owns the ring, and the
//! store checks the owner of a pool: no entry can access the private pool of another client.
//!
//! ```
//! use plimsoll_hcache::{Handle, PoolOptions, Store, StoreOptions};
//! use plimsoll_ring::{Connection, ConnectOptions, Server, ServerOptions};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("hcache");
//! let store = Store::new(StoreOptions::new(16 << 20))?;
//! let server = Server::bind(&path, store.clone(), ServerOptions::default())?;
//! std::thread::scope(|scope| {
//!     scope.spawn(|| server.run(&|| String::from("{}"), &|bytes| store.resize(bytes)));
//!     let mut connection = Connection::connect(&path, &ConnectOptions::new("web"))?;
//!     let pool = connection.create_pool(PoolOptions::private())?;
//!     let handle = Handle { pool, object: 7, index: 3 };
//!     let mut page = [0; 4096];
//!     assert!(connection.put(handle, &[9; 4096])?.is_stored());
//!     assert!(connection.get(handle, &mut page)? && page == [9; 4096]);
//!     server.stop_handle().stop();
//!     Ok::<(), plimsoll_ring::Error>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod client;
mod control;
mod counters;
mod error;
mod executor;
pub mod protocol;
mod server;
mod sync;
mod sys;
mod words;
mod worker;

pub use client::{Completion, ConnectOptions, Connection, Slot, resize, stats};
pub use counters::ServerCounters;
pub use error::{Error, Refusal};
pub use executor::{Executor, Tally, Turn};
pub use server::{ClientLimits, Resize, Server, ServerOptions, StopHandle};
pub use sys::Region;
pub use words::{RingFault, Word};
