//! The handle by which other threads query and control a running machine.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::{DiskError, MachineStats};

/// Sends queries and commands to a [`Machine`](super::Machine) that runs in another thread.
#[derive(Clone)]
pub struct MachineHandle {
    pub(super) commands: Sender<Command>,
    pub(super) wake: Arc<OwnedFd>,
}

pub(super) enum Command {
    Stats(Sender<MachineStats>),
    Resize(u64, Sender<Result<(), plimsoll_hcache::Error>>),
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

    /// Changes the memory of the cache, in bytes. Waits up to 10 s for the write-back of dirty pages that prevent it.
    ///
    /// # Errors
    /// [`DiskError::Resize`] if the size is not possible, [`DiskError::Ended`].
    pub fn resize(&self, cache_bytes: u64) -> Result<(), DiskError> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let resized = self.ask(|answer| Command::Resize(cache_bytes, answer))?;
            match resized {
                Err(plimsoll_hcache::Error::DirtyPages { .. }) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(20));
                }
                resized => return resized.map_err(DiskError::Resize),
            }
        }
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
