//! Counters of a server.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::Refusal;
use crate::executor::Tally;
use crate::protocol::Status;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a server since it was bound.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct ServerCounters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl ServerCounters {
            /// Name and value of each.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }

        /// The counters behind [`ServerCounters`], for all threads.
        #[derive(Default)]
        pub struct Counts {
            $(pub $name: AtomicU64,)*
        }

        impl Counts {
            /// Reads all counters, one after the other.
            pub fn read(&self) -> ServerCounters {
                ServerCounters { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Connections accepted.
    connections,
    /// Clients that got a ring.
    clients_joined,
    /// Clients that have left.
    clients_left,
    /// Memory of rings and slots, in bytes, assuming that clients have accessed all of it: part of the store's capacity.
    ring_bytes,
    /// Requests for statistics answered.
    stats,
    /// Changes of the capacity.
    resizes,
    /// Refused: a user without permission to connect or to resize.
    refused_not_allowed,
    /// Refused: another version.
    refused_version,
    /// Refused: too many entries or slots, or numbers that make no ring.
    refused_geometry,
    /// Refused: a name that is too long, or not a line of text.
    refused_name,
    /// Refused: too many clients, or connections that are not clients yet.
    refused_too_many_clients,
    /// Refused: too many clients of one user.
    refused_too_many_of_user,
    /// Refused: by the store.
    refused_store,
    /// Refused: no memory or descriptors.
    refused_resources,
    /// Closed: the connection ended in the middle of a message.
    closed_torn,
    /// Closed: a message too long.
    closed_oversized,
    /// Closed: a message of an unknown type.
    closed_unknown,
    /// Closed: a payload that does not fit its type.
    closed_malformed,
    /// Closed: a message after the welcome, where none is permitted.
    closed_unexpected,
    /// Closed: silent, or not reading, for too long.
    closed_timeout,
    /// Closed: a ring with an invalid tail or head.
    closed_corrupt_ring,
    /// Entries served, invalid ones included.
    entries,
    /// Turns in which a client had entries.
    turns,
    /// Entries published before they were written.
    bad_torn,
    /// Entries of an unknown operation.
    bad_op,
    /// Entries with unknown flags.
    bad_flags,
    /// Entries with a slot past the last.
    bad_slot,
    /// Entries with a range that ends before it begins.
    bad_range,
    /// Entries with a pool that is not the client's.
    bad_no_such_pool,
    /// Entries that would open more pools than permitted.
    bad_too_many_pools,
    /// Entries that failed in the store.
    bad_failed,
    /// Times a sleeping client was woken.
    client_wakes,
    /// Times a worker went to sleep.
    worker_sleeps,
}

impl Counts {
    /// Adds the counts of a turn.
    pub fn add(&self, tally: &Tally) {
        self.turns.fetch_add(1, Relaxed);
        self.entries.fetch_add(tally.entries, Relaxed);
        for (status, count) in Status::BAD.into_iter().zip(tally.bad) {
            if count > 0 {
                self.bad(status).fetch_add(count, Relaxed);
            }
        }
    }

    fn bad(&self, status: Status) -> &AtomicU64 {
        match status {
            Status::Torn => &self.bad_torn,
            Status::BadOp => &self.bad_op,
            Status::BadFlags => &self.bad_flags,
            Status::BadSlot => &self.bad_slot,
            Status::BadRange => &self.bad_range,
            Status::NoSuchPool => &self.bad_no_such_pool,
            Status::TooManyPools => &self.bad_too_many_pools,
            _ => &self.bad_failed,
        }
    }

    /// Counts a request that is refused.
    pub fn refused(&self, refusal: Refusal) {
        let count = match refusal {
            Refusal::NotAllowed => &self.refused_not_allowed,
            Refusal::Version => &self.refused_version,
            Refusal::Geometry => &self.refused_geometry,
            Refusal::Name => &self.refused_name,
            Refusal::TooManyClients => &self.refused_too_many_clients,
            Refusal::TooManyOfUser => &self.refused_too_many_of_user,
            Refusal::Store => &self.refused_store,
            Refusal::Resources | Refusal::Other => &self.refused_resources,
        };
        count.fetch_add(1, Relaxed);
    }
}
