//! The connections of a listener, and which of them makes room for a new one.
//!
//! A connection is a stranger's until a request on it is permitted, which needs credentials where the listener asks for
//! some. Strangers have places of their own, so that they cannot take those of clients, and only a short time. If all
//! their places are taken, a new connection displaces one: of the network that has most of them, the oldest. A network
//! that connects without end therefore displaces itself, and a client that shows its credentials at once is not affected.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::AbortHandle;

use super::logins::FailedLogins;

/// The other end of a connection; clones share whether it was admitted.
#[derive(Debug, Clone, Default)]
pub(super) struct Peer {
    /// Its address; `None` at a Unix socket.
    address: Option<IpAddr>,
    is_admitted: Arc<AtomicBool>,
    logins: Arc<FailedLogins>,
}

impl Peer {
    /// A stranger at this address, whose failed logins are counted.
    pub fn new(address: Option<IpAddr>, logins: Arc<FailedLogins>) -> Self {
        Self {
            address: address.map(|address| address.to_canonical()),
            logins,
            ..Self::default()
        }
    }

    /// Its credentials were wrong, or it showed none.
    pub fn login_failed(&self) {
        self.logins.add(self.address);
    }

    /// A request of it was permitted.
    pub fn admit(&self) {
        self.is_admitted.store(true, Ordering::Relaxed);
    }

    pub fn is_admitted(&self) -> bool {
        self.is_admitted.load(Ordering::Relaxed)
    }

    /// What one party has many addresses of: of version 6 the first half of an address.
    fn network(&self) -> Option<IpAddr> {
        self.address.map(|address| match address {
            IpAddr::V4(_) => address,
            IpAddr::V6(whole) => Ipv6Addr::from_bits(whole.to_bits() >> 64 << 64).into(),
        })
    }
}

/// Open connections, oldest first.
#[derive(Debug, Default)]
pub(super) struct Connections(Vec<(Peer, AbortHandle)>);

impl Connections {
    /// Adds one that `task` serves; of strangers there are then at most `strangers_max`.
    pub fn add(&mut self, peer: Peer, task: AbortHandle, strangers_max: usize) {
        self.0.push((peer, task));
        self.0.retain(|(_, task)| !task.is_finished());
        let strangers = self.0.iter().enumerate();
        let strangers: Vec<_> = strangers
            .filter(|(_, (peer, _))| !peer.is_admitted())
            .map(|(index, (peer, _))| (index, peer.network()))
            .collect();
        if strangers.len() > strangers_max {
            let crowd = |(_, network): &&(usize, Option<IpAddr>)| {
                let others = strangers.iter();
                others.filter(|(_, other)| other == network).count()
            };
            // Of several the last one is the maximum.
            if let Some(&(index, _)) = strangers.iter().rev().max_by_key(crowd) {
                self.0.remove(index).1.abort();
            }
        }
    }

    /// Ends the strangers' connections.
    pub fn dismiss_strangers(&self) {
        let strangers = self.0.iter().filter(|(peer, _)| !peer.is_admitted());
        strangers.for_each(|(_, task)| task.abort());
    }

    /// The number of clients.
    pub fn admitted(&self) -> usize {
        let clients = self.0.iter();
        clients
            .filter(|(peer, task)| peer.is_admitted() && !task.is_finished())
            .count()
    }
}

#[cfg(test)]
mod tests {
    use std::future;

    use tokio::runtime;

    use super::*;

    #[test]
    fn the_oldest_stranger_of_the_largest_crowd_makes_room() {
        let runtime = runtime::Builder::new_current_thread().build().unwrap();
        let mut open = Connections::default();
        let mut add = |address: &str| {
            let peer = Peer::new(Some(address.parse().unwrap()), Arc::default());
            let task = runtime.spawn(future::pending::<()>());
            open.add(peer.clone(), task.abort_handle(), 3);
            (peer, task)
        };
        // Runs the tasks that were aborted to their ends.
        let left = |all: &[&(Peer, tokio::task::JoinHandle<()>)]| {
            runtime.block_on(tokio::task::yield_now());
            let left = all.iter().map(|(_, task)| !task.is_finished());
            left.collect::<Vec<_>>()
        };
        let client = add("10.0.0.1");
        client.0.admit();
        let alone = add("::ffff:10.0.0.1");
        let first = add("2001:db8::1");
        let second = add("2001:db8::2");
        assert_eq!(left(&[&client, &alone, &first, &second]), [true; 4]);
        let third = add("2001:db8::3");
        assert_eq!(
            left(&[&client, &alone, &first, &second, &third]),
            [true, true, false, true, true]
        );
        // All are alike: the oldest goes.
        let other = add("2001:db8:0:1::");
        assert_eq!(
            left(&[&client, &alone, &second, &third, &other]),
            [true, true, false, true, true]
        );
        add("10.0.0.2");
        assert_eq!(
            left(&[&client, &alone, &third, &other]),
            [true, false, true, true]
        );
        assert_eq!(open.admitted(), 1);
        assert_eq!(open.0.len(), 4);
        open.dismiss_strangers();
        assert_eq!(left(&[&client, &third, &other]), [true, false, false]);
    }

    #[test]
    fn strangers_that_come_at_once_displace_as_many() {
        let runtime = runtime::Builder::new_current_thread().build().unwrap();
        let mut open = Connections::default();
        // No task runs meanwhile.
        for _ in 0..100 {
            let task = runtime.spawn(future::pending::<()>());
            open.add(Peer::default(), task.abort_handle(), 3);
        }
        assert_eq!(open.0.len(), 3);
    }
}
