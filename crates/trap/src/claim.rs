//! One tracer of a VM at a time.
//!
//! A tracer registers the VM's RAM with its userfaultfd only while a window is open, so a second tracer could not detect
//! the first by that. Each therefore locks the `pagemap` of the VM's process (flock(2)), which only a process can open
//! that may trace the VM. The kernel releases the lock when the tracer ends, however it does.

use std::fs::File;
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::refusal::Refusal;

/// Number of tries to lock, and the pause between two: an assessment of the VM holds the lock for some microseconds, and a process that
/// executes another program has no memory for a moment.
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
        let path = format!("/proc/{pid}/pagemap");
        let mut refusal = Refusal::UserfaultInUse;
        for _ in 0..TRIES {
            let claimed = File::open(&path).and_then(|pagemap| {
                flock(&pagemap, FlockOperation::NonBlockingLockExclusive)?;
                Ok(Self { _pagemap: pagemap })
            });
            let error = match claimed {
                Ok(claim) => return Ok(claim),
                Err(error) => error,
            };
            refusal = match Errno::from_io_error(&error) {
                Some(Errno::WOULDBLOCK | Errno::INTR) => Refusal::UserfaultInUse,
                Some(Errno::SRCH) => no_privilege(error),
                _ => return Err(no_privilege(error)),
            };
            thread::sleep(PAUSE);
        }
        Err(refusal)
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
        // A process that has ended and is not waited for has no memory either.
        let ended = loop {
            match Claim::take(pid) {
                Ok(_) | Err(Refusal::UserfaultInUse) => {}
                Err(refusal) => break refusal,
            }
        };
        assert!(ended.to_string().contains("lock /proc/"), "{ended}");
        sleeper.wait().unwrap();
    }
}
