//! Errors of a device.

use std::io;

use crate::Status;

/// Why an operation on a device failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum FrontendError {
    /// A system call failed; nothing was sent.
    #[error("cannot {what}")]
    System {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// The daemon refused a step of the protocol or disconnected; the connection is no longer usable.
    #[error("the daemon did not {step}")]
    Protocol {
        step: &'static str,
        #[source]
        source: vhost::Error,
    },
    /// The daemon does not offer a requested feature.
    #[error("the daemon does not offer {0}")]
    NotOffered(&'static str),
    /// The connection is lost. Requests in flight stay in the queues until they are completed over another one.
    #[error("the daemon is gone")]
    Disconnected,
    /// Nothing was completed in the time given; requests stay in flight.
    #[error("nothing was completed in time")]
    TimedOut,
    /// The queue has no room for the request, which was not submitted.
    #[error("the queue is full")]
    Full,
    /// The device completed a request that was not in flight: the queue is no longer usable.
    #[error("the device completed entry {id} of queue {queue}, which is not in flight")]
    NotInFlight {
        queue: usize,
        /// The number of the request that the device reported.
        id: u32,
    },
    /// The device reports that the request failed.
    #[error("the device says {0:?}")]
    Failed(Status),
    /// The control disk's answer is invalid.
    #[error("the control disk gave a wrong {0}")]
    BadAnswer(&'static str),
    /// The host refused a command of the control disk.
    #[error("the host refused the command: {0}")]
    Refused(io::Error),
}

/// Adds the operation to an error of the operating system.
pub(crate) trait OperationContext<T> {
    fn to(self, what: &'static str) -> Result<T, FrontendError>;
}

impl<T> OperationContext<T> for io::Result<T> {
    fn to(self, what: &'static str) -> Result<T, FrontendError> {
        self.map_err(|source| FrontendError::System { what, source })
    }
}

impl<T> OperationContext<T> for rustix::io::Result<T> {
    fn to(self, what: &'static str) -> Result<T, FrontendError> {
        self.map_err(io::Error::from).to(what)
    }
}

impl<T> OperationContext<T> for vhost::Result<T> {
    fn to(self, step: &'static str) -> Result<T, FrontendError> {
        self.map_err(|source| FrontendError::Protocol { step, source })
    }
}
