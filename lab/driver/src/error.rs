//! Errors of a device.

use std::io;

use crate::Status;

/// Why something could not be done with a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrontendError {
    /// The operating system refused; nothing was sent.
    #[error("cannot {what}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// Its answer.
        #[source]
        source: io::Error,
    },
    /// The daemon refused a step of the protocol or broke off; the connection is of no more use.
    #[error("the daemon did not {step}")]
    Protocol {
        /// What it was to do.
        step: &'static str,
        /// Why it did not.
        #[source]
        source: vhost::Error,
    },
    /// The daemon does not offer what was asked for.
    #[error("the daemon does not offer {0}")]
    NotOffered(&'static str),
    /// The connection is gone. Requests in flight stay in the queues until they are done over another one.
    #[error("the daemon is gone")]
    Disconnected,
    /// Nothing was completed in the time given; requests stay in flight.
    #[error("nothing was completed in time")]
    TimedOut,
    /// The queue has no room for the request, which was not submitted.
    #[error("the queue is full")]
    Full,
    /// The device completed what was not in flight: the queue is of no more use.
    #[error("the device completed entry {id} of queue {queue}, which is not in flight")]
    NotInFlight {
        /// Which queue.
        queue: usize,
        /// What the device says it completed.
        id: u32,
    },
    /// The device says that the request failed.
    #[error("the device says {0:?}")]
    Failed(Status),
    /// The control disk's answer makes no sense.
    #[error("the control disk gave a wrong {0}")]
    BadAnswer(&'static str),
    /// The host refused a command of the control disk.
    #[error("the host refused the command: {0}")]
    Refused(io::Error),
}

/// Adds what was to be done to an error of the operating system.
pub(crate) trait ToDo<T> {
    fn to(self, what: &'static str) -> Result<T, FrontendError>;
}

impl<T> ToDo<T> for io::Result<T> {
    fn to(self, what: &'static str) -> Result<T, FrontendError> {
        self.map_err(|source| FrontendError::System { what, source })
    }
}

impl<T> ToDo<T> for rustix::io::Result<T> {
    fn to(self, what: &'static str) -> Result<T, FrontendError> {
        self.map_err(io::Error::from).to(what)
    }
}

impl<T> ToDo<T> for vhost::Result<T> {
    fn to(self, step: &'static str) -> Result<T, FrontendError> {
        self.map_err(|source| FrontendError::Protocol { step, source })
    }
}
