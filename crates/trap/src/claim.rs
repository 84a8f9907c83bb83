//! One tracer of a VM at a time.
//!
//! A tracer registers the VM's RAM with its userfaultfd only while a window is open, so a second tracer could not detect
//! the first by that. Each therefore locks the `pagemap` of the VM's process (flock(2)), which only a process can open
//! that may trace the VM. The kernel releases the lock when the tracer ends, however it does.

use std::fs::File;
use std::io;
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use crate::refusal::Refusal;

/// Number of tries to lock, and the pause between two: an assessment of the VM holds the lock for some microseconds.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(2);

/// The exclusive right to register a VM's RAM. Dropped, it is released.
#[derive(Debug)]
pub struct Claim {
    _pagemap: File,
}

impl Claim {
    /// Claims the VM of process `pid`.
    ///
    /// # Errors
    ///
    /// [`Refusal::UserfaultInUse`] if another tracer has, [`Refusal::NoPrivilege`] if the process cannot be inspected.
    pub fn take(pid: u32) -> Result<Self, Refusal> {
        let no_privilege = |source| Refusal::NoPrivilege {
            what: format!("lock /proc/{pid}/pagemap"),
            source,
        };
        let pagemap = File::open(format!("/proc/{pid}/pagemap")).map_err(no_privilege)?;
        for _ in 0..TRIES {
            match flock(&pagemap, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { _pagemap: pagemap }),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
                    thread::sleep(PAUSE);
                }
                Err(error) => return Err(no_privilege(io::Error::from(error))),
            }
        }
        Err(Refusal::UserfaultInUse)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_claimed_once_until_the_claim_is_dropped() {
        // Not this process, which other tests assess.
        let mut sleeper = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = sleeper.id();
        for _ in 0..2 {
            let claim = Claim::take(pid).unwrap();
            let second = Claim::take(pid).unwrap_err();
            assert!(matches!(second, Refusal::UserfaultInUse), "{second}");
            drop(claim);
        }
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
