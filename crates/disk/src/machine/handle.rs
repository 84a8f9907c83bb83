//! The handle by which other threads query and control a running machine.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use crate::{DiskError, MachineStats};

/// Sends queries and commands to a [`Machine`](super::Machine) that runs in another thread.
#[derive(Clone)]
pub struct MachineHandle {
    pub(super) commands: Sender<Command>,
    pub(super) wake: Arc<OwnedFd>,
}

/// A resize of the cache, and who waits for it.
pub(super) struct Resize {
    pub(super) cache_bytes: u64,
    pub(super) answer: Sender<Result<(), plimsoll_hcache::Error>>,
}

pub(super) enum Command {
    Stats(Sender<MachineStats>),
    Resize(Resize),
    Enable(Sender<()>),
    Stop,
}

impl MachineHandle {
    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Result<T, DiskError> {
        let (answer, answered) = channel();
        self.tell(command(answer))?;
        answered.recv().map_err(|_| DiskError::Ended)
    }

    fn tell(&self, command: Command) -> Result<(), DiskError> {
        self.commands.send(command).map_err(|_| DiskError::Ended)?;
        let woken = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        woken
            .map(drop)
            .map_err(|error| DiskError::Ring(error.into()))
    }

    /// Statistics of the machine.
    ///
    /// # Errors
    /// [`DiskError::Ended`].
    pub fn stats(&self) -> Result<MachineStats, DiskError> {
        self.ask(Command::Stats)
    }

    /// Changes the memory of the cache, in bytes. Returns when it is done: memory that a smaller cache does not need is
    /// returned to the kernel by then. The disks are served meanwhile. Of several resizes each begins when the one
    /// before it is done.
    ///
    /// # Errors
    /// [`DiskError::Resize`] if the size is not possible, [`DiskError::Ended`].
    pub fn resize(&self, cache_bytes: u64) -> Result<(), DiskError> {
        let command = |answer| {
            Command::Resize(Resize {
                cache_bytes,
                answer,
            })
        };
        self.ask(command)?.map_err(DiskError::Resize)
    }

    /// Restarts a cache that disabled itself.
    ///
    /// # Errors
    /// [`DiskError::Ended`].
    pub fn enable(&self) -> Result<(), DiskError> {
        self.ask(Command::Enable)
    }

    /// Ends the machine: [`Machine::run`](super::Machine::run) returns when the requests in flight have ended and the
    /// disks are flushed.
    ///
    /// # Errors
    /// [`DiskError::Ended`].
    pub fn stop(&self) -> Result<(), DiskError> {
        self.tell(Command::Stop)
    }
}
