//! Errors of a client's requests.

use std::io;
use std::path::PathBuf;

use plimsoll_hcache::PoolId;

use crate::protocol::Status;

/// Why a server refused a request on the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[non_exhaustive]
pub enum Refusal {
    /// A reason unknown to this version.
    Other = 0,
    /// This user may not use the server, or not request this.
    NotAllowed = 1,
    /// The server uses another version.
    Version = 2,
    /// More entries or slots than the server permits, or invalid numbers.
    Geometry = 3,
    /// A name that is too long, or not a line of text.
    Name = 4,
    /// The server has reached its maximum number of clients.
    TooManyClients = 5,
    /// The user has reached the maximum number of clients, or the places that are left are reserved for other users.
    TooManyOfUser = 6,
    /// The store refused; the text states its reason.
    Store = 7,
    /// The server lacks memory or descriptors.
    Resources = 8,
}

impl Refusal {
    /// Returns the refusal with this number.
    pub fn from_number(number: u32) -> Self {
        let all = [
            Self::NotAllowed,
            Self::Version,
            Self::Geometry,
            Self::Name,
            Self::TooManyClients,
            Self::TooManyOfUser,
            Self::Store,
            Self::Resources,
        ];
        let mut all = all.into_iter();
        all.find(|refusal| *refusal as u32 == number)
            .unwrap_or(Self::Other)
    }
}

/// Why a call of a client failed. Except after `Disconnected`, `TimedOut`, `Protocol` and `Io` the connection remains usable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum Error {
    /// No server answers at the socket.
    #[error("no hcache server answers at {}", path.display())]
    Unreachable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The server refused.
    #[error("the hcache server refuses: {text}")]
    Refused { refusal: Refusal, text: String },
    /// The server has ended, or has closed this client. Stored pages are lost; operations
    /// without a completion may or may not have been executed.
    #[error("the hcache server has closed the connection")]
    Disconnected,
    /// The server did not answer before the [deadline](crate::Connection::set_deadline). Operations without a completion
    /// may still be executed, until the connection is dropped.
    #[error("the hcache server does not answer in time")]
    TimedOut,
    /// The server violates the protocol.
    #[error("the hcache server violates the protocol: {0}")]
    Protocol(&'static str),
    /// A system call failed.
    #[error("the connection to the hcache server failed")]
    Io(#[from] io::Error),
    /// The pool does not exist, or is not this client's (the answer is the same for both).
    #[error("this client has no pool {0}")]
    NoSuchPool(PoolId),
    /// The client has the maximum number of pools, or those that are left are reserved for other users.
    #[error(
        "this client has its maximum number of pools, or its user has its share of the server's"
    )]
    TooManyPools,
    /// The server found the entry invalid; nothing was done.
    #[error("the hcache server rejects the entry: {0:?}")]
    Bad(Status),
}

impl From<rustix::io::Errno> for Error {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}
