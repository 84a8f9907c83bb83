//! Ends a tracer that no longer serves its VM, so that the VM continues to run.
//!
//! An access to a page that is armed waits for the tracer. A tracer that is stopped (SIGSTOP, a debugger, a frozen
//! control group) or gets no CPU would hold the VM for as long. So a child process counts the heartbeats of the thread
//! that serves the accesses, and kills the tracer when there is none for [`SILENCE_MAX`] while pages are armed: the
//! userfaultfd closes with the tracer, and the kernel serves all accesses that wait.
//!
//! Silence is counted in intervals in which the watchdog itself was awake. If the host gave neither of the two any
//! time, the interval does not count, and the heartbeat is read once more before each decision.
//!
//! The child has a session of its own (no Ctrl-Z reaches it), its memory locked and, where it may, the root control
//! group, so that freezing the tracer's group leaves it running. It cannot leave the group without the right to write
//! to the root's `cgroup.procs`; and a group frozen by version 1 of control groups ends nothing that is in it, not even
//! by SIGKILL.
//!
//! Cost: 40 wake-ups a second while pages are armed, none otherwise.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Pid, PidfdFlags, Resource, Signal};
use rustix::thread::CapabilitySet;

use crate::sys::{self, SharedMemory};

/// Longest silence of a tracer while pages are armed.
const SILENCE_MAX: Duration = Duration::from_millis(150);
/// Interval at which the heartbeat is read.
const TICK: Duration = Duration::from_millis(25);
/// Nice value of the watchdog and of the tracer: a VM waits for what they do.
const NICE: i32 = -10;
/// Pages of the shared memory: heartbeats, and whether pages are armed.
const BEATS: usize = 0;
const ARMED: usize = 1;
/// Where a process enters the root control group: of version 2, of version 2 beside version 1, and of version 1's
/// freezer.
const ROOT_GROUPS: [&str; 3] = [
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/unified/cgroup.procs",
    "/sys/fs/cgroup/freezer/cgroup.procs",
];

/// The watchdog of this process, a child of it. Dropped, it ends.
#[derive(Debug)]
pub struct Watchdog {
    words: SharedMemory,
    /// Wakes the child when pages are going to be armed.
    bell: OwnedFd,
    child: Pid,
}

impl Watchdog {
    /// Starts the watchdog of a tracer of process `vm_pid`.
    ///
    /// # Errors
    ///
    /// The system call's; there is no watchdog.
    pub fn start(vm_pid: u32) -> io::Result<Self> {
        let words = SharedMemory::new(2)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let tracer = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
        let epitaph = format!(
            "plimsoll: the tracer of process {vm_pid} served no access for {} ms and was ended by its watchdog; the VM \
             goes on\n",
            SILENCE_MAX.as_millis()
        );
        let child = sys::fork(|| {
            settle(&[bell.as_fd(), tracer.as_fd()]);
            if watch(&words, tracer.as_fd(), bell.as_fd()) {
                // First, because nobody may be reading our standard error.
                let _ = rustix::process::pidfd_send_signal(&tracer, Signal::KILL);
                report(&epitaph);
            }
        })?;
        let child = Pid::from_raw(child).ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { words, bell, child })
    }

    /// Starts to require the heartbeat.
    ///
    /// # Errors
    ///
    /// That the child has ended: nothing would end us.
    pub fn arm(&self) -> io::Result<()> {
        let ended =
            rustix::process::waitpid(Some(self.child), rustix::process::WaitOptions::NOHANG);
        if !matches!(ended, Ok(None)) {
            return Err(io::Error::other("the watchdog has ended"));
        }
        self.beat();
        self.words.word(ARMED).store(1, Ordering::Release);
        rustix::io::write(&self.bell, &1u64.to_ne_bytes())?;
        Ok(())
    }

    /// Records that no page is armed any more.
    pub fn disarm(&self) {
        self.words.word(ARMED).store(0, Ordering::Release);
    }

    /// Records that the thread that serves accesses is running.
    pub fn beat(&self) {
        self.words.word(BEATS).fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = rustix::process::kill_process(self.child, Signal::KILL);
        let _ = rustix::process::waitpid(Some(self.child), rustix::process::WaitOptions::empty());
    }
}

/// Makes the child independent of the tracer's fate. It works even where some of this is refused.
fn settle(kept: &[BorrowedFd<'_>; 2]) {
    let _ = rustix::thread::set_name(c"plimsoll-watch");
    let mut kept = [
        rustix::stdio::stderr().as_raw_fd(),
        kept[0].as_raw_fd(),
        kept[1].as_raw_fd(),
    ];
    kept.sort_unstable();
    // A copy of the userfaultfd would keep the VM waiting after the tracer's death.
    sys::close_all_but(&kept);
    for group in ROOT_GROUPS {
        // Opened as it is: with version 1 the first is a name in a tmpfs, where a write would make a file.
        let entered = fs::OpenOptions::new().write(true).open(group);
        let _ = entered.and_then(|mut file| file.write_all(b"0"));
    }
    let _ = stay_ready();
}

/// Waits until the tracer has ended, or is to be ended: then returns true.
fn watch(words: &SharedMemory, tracer: BorrowedFd<'_>, bell: BorrowedFd<'_>) -> bool {
    let tick = Timespec::try_from(TICK).ok();
    let (mut silence, mut heard) = (Duration::ZERO, 0);
    loop {
        let armed = words.word(ARMED).load(Ordering::Acquire) != 0;
        let begin = Instant::now();
        let mut fds = [
            PollFd::from_borrowed_fd(tracer, PollFlags::IN),
            PollFd::from_borrowed_fd(bell, PollFlags::IN),
        ];
        let timeout = if armed { tick.as_ref() } else { None };
        if poll(&mut fds, timeout).is_err() || !fds[0].revents().is_empty() {
            return false;
        }
        let _ = rustix::io::read(bell, &mut [0u8; 8]);
        let beats = words.word(BEATS).load(Ordering::Relaxed);
        if !armed || beats != heard || words.word(ARMED).load(Ordering::Acquire) == 0 {
            (silence, heard) = (Duration::ZERO, beats);
            continue;
        }
        // Where a tick took too long, neither process had a CPU.
        silence += begin.elapsed().min(TICK);
        if silence >= SILENCE_MAX {
            return true;
        }
    }
}

/// Writes to standard error, unless that would wait.
fn report(text: &str) {
    let stderr = rustix::stdio::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    if matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents() == PollFlags::OUT {
        let _ = rustix::io::write(stderr, text.as_bytes());
    }
}

/// Gives the calling thread a higher priority than that of ordinary processes.
///
/// # Errors
///
/// `EACCES` without CAP_SYS_NICE.
pub fn raise_priority() -> io::Result<()> {
    Ok(rustix::process::setpriority_process(None, NICE)?)
}

/// Makes the calling thread and the memory of its process ready at any time, because a VM waits for it: a higher
/// priority than that of ordinary processes, and no page that is in use, now or later, is reclaimed.
///
/// # Errors
///
/// `EACCES` without CAP_SYS_NICE; `EPERM` where `RLIMIT_MEMLOCK` bounds what may be locked and CAP_IPC_LOCK is missing,
/// and the system call's; what was not refused is done.
pub fn stay_ready() -> io::Result<()> {
    let raised = raise_priority();
    let limit = rustix::process::getrlimit(Resource::Memlock);
    let may_pass = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if limit.maximum.is_some() && !may_pass {
        // With a bound, later allocations could fail.
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    if limit.maximum.is_none() {
        let all = rustix::process::Rlimit {
            current: None,
            maximum: None,
        };
        rustix::process::setrlimit(Resource::Memlock, all)?;
    }
    // Only pages in use: address space that was merely reserved stays so.
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?;
    raised
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// The result of a process that arms pages and then does `work`: the signal that ended it.
    fn ended_by(work: impl FnOnce(&Watchdog)) -> Option<i32> {
        let child = sys::fork(|| {
            let watchdog = Watchdog::start(1).unwrap();
            watchdog.arm().unwrap();
            work(&watchdog);
        });
        let status = sys::wait_for_thread(child.unwrap()).unwrap();
        libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
    }

    fn silent(time: Duration) {
        thread::sleep(time);
    }

    #[test]
    fn a_tracer_that_stops_while_pages_are_armed_is_killed_in_time() {
        let begin = Instant::now();
        let stop = |_: &Watchdog| {
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
        };
        assert_eq!(ended_by(stop), Some(libc::SIGKILL));
        assert!(begin.elapsed() >= SILENCE_MAX, "{:?}", begin.elapsed());
    }

    #[test]
    fn one_that_beats_late_but_in_time_or_has_disarmed_is_not() {
        let slow = |watchdog: &Watchdog| {
            for _ in 0..9 {
                silent(SILENCE_MAX / 3);
                watchdog.beat();
            }
        };
        // A machine that stands still looks like silence.
        assert!((0..3).any(|_| ended_by(slow).is_none()));
        let disarmed = |watchdog: &Watchdog| {
            watchdog.disarm();
            silent(SILENCE_MAX * 3);
        };
        assert_eq!(ended_by(disarmed), None);
        let again = |watchdog: &Watchdog| {
            watchdog.disarm();
            silent(SILENCE_MAX);
            watchdog.arm().unwrap();
            silent(SILENCE_MAX * 4);
        };
        assert_eq!(ended_by(again), Some(libc::SIGKILL));
    }

    #[test]
    fn the_watchdog_goes_with_its_tracer_and_its_absence_is_noticed() {
        let watchdog = Watchdog::start(1).unwrap();
        let child = watchdog.child;
        watchdog.arm().unwrap();
        rustix::process::kill_process(child, Signal::KILL).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while watchdog.arm().is_ok() {
            assert!(Instant::now() < deadline);
            silent(TICK);
        }
        let watchdog = Watchdog::start(1).unwrap();
        let child = watchdog.child;
        drop(watchdog);
        assert!(rustix::process::test_kill_process(child).is_err());
    }
}
