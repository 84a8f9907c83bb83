//! One descriptor out of a running process: a userfaultfd on *its* address space.
//!
//! userfaultfd(2) opens on the address space of the process that calls it. So a thread
//! of the target is stopped, made to call it once at a `syscall` instruction that its
//! vDSO or C library already has, and set back to where it was; the descriptor is
//! copied out by pidfd_getfd(2) and closed in the target. No code is left behind.
//!
//! A target without the privilege for userfaultfd() (a QEMU that runs as its own user)
//! gets EPERM. It is then made to open a userfaultfd device node, put into its
//! view of the file system for that moment, which gives the same descriptor.
//!
//! The thread stands still for about a millisecond. Signals other than those it cannot block wait until
//! it goes on. Were the one who stopped it killed within that moment, it would go on with
//! borrowed registers. So a child process does it, which outlives us and sets the thread back
//! whatever becomes of us; only what kills every process of ours at once can come between.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::TrapError;
use crate::sys::{self, Registers};

/// The instruction `syscall`.
const SYSCALL_INSTRUCTION: [u8; 2] = [0x0f, 0x05];
/// Bytes below the stack pointer that a function may use without moving it.
const RED_ZONE_BYTES: u64 = 128;
/// Room for a path on the target's stack.
const PATH_BYTES: usize = 256;
const DEVICE: &str = "/dev/userfaultfd";

/// Takes a userfaultfd on the address space of `pid`.
pub fn take_userfaultfd(pid: u32, pidfd: BorrowedFd<'_>) -> Result<OwnedFd, TrapError> {
    let failed = |step: &str| {
        let step = step.to_owned();
        move |source| TrapError::Injection { pid, step, source }
    };
    let (ours, mut theirs) = UnixStream::pair().map_err(failed("making a pair of sockets"))?;
    let mut ours = Some(ours);
    let child = sys::fork(|| {
        // The child's copy, which would keep it from hearing that ours is closed.
        ours.take();
        let taken = take_as_tracer(pid, pidfd);
        // If nobody reads, there is nobody to take the descriptor: it goes with this process.
        let told = theirs.write_all(&Answer::of(&taken).to_bytes());
        let told = told.and_then(|()| theirs.shutdown(Shutdown::Write));
        // The other end closes when the descriptor has been copied.
        let _ = told.and_then(|()| theirs.read(&mut [0]));
    })
    .map_err(failed("forking"))?;
    drop(theirs);
    let mut bytes = Vec::new();
    let read = ours
        .as_mut()
        .map_or(Ok(0), |ours| ours.read_to_end(&mut bytes));
    let taken = match read.ok().and_then(|_| Answer::from_bytes(&bytes)) {
        Some(Answer::Taken(theirs)) => {
            let copied = open_pidfd(child.unsigned_abs()).and_then(|child| {
                pidfd_getfd(child.as_fd(), theirs).map_err(failed("pidfd_getfd()"))
            });
            Some(copied)
        }
        Some(Answer::Failed { errno, step }) => Some(Err(injection_error(
            pid,
            step,
            io::Error::from_raw_os_error(errno),
        ))),
        None => None,
    };
    drop(ours);
    sys::wait_for_thread(child).map_err(failed("waiting for the child process"))?;
    taken.unwrap_or_else(|| {
        Err(failed("a child process")(io::Error::other(
            "it ended before it was done",
        )))
    })
}

/// What the child process tells.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The number of the descriptor, in the child.
    Taken(u64),
    /// The step that failed and how.
    Failed { errno: i32, step: String },
}

impl Answer {
    fn of(taken: &Result<OwnedFd, StepError>) -> Self {
        match taken {
            Ok(descriptor) => Self::Taken(u64::from(descriptor.as_raw_fd().unsigned_abs())),
            Err(StepError { step, source }) => Self::Failed {
                errno: source.raw_os_error().unwrap_or(libc::EIO),
                step: (*step).to_owned(),
            },
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Taken(descriptor) => format!("taken {descriptor}").into_bytes(),
            Self::Failed { errno, step } => format!("failed {errno} {step}").into_bytes(),
        }
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let text = str::from_utf8(bytes).ok()?;
        let (what, rest) = text.split_once(' ')?;
        match what {
            "taken" => rest.parse().ok().map(Self::Taken),
            "failed" => {
                let (errno, step) = rest.split_once(' ')?;
                Some(Self::Failed {
                    errno: errno.parse().ok()?,
                    step: step.to_owned(),
                })
            }
            _ => None,
        }
    }
}

/// Takes the descriptor as the tracer of the target's main thread; names the step that failed.
fn take_as_tracer(pid: u32, pidfd: BorrowedFd<'_>) -> Result<OwnedFd, StepError> {
    let mut thread = StoppedThread::stop(pid)?;
    let flags = u64::from((libc::O_CLOEXEC | libc::O_NONBLOCK).unsigned_abs());
    let opened = thread.call(libc::SYS_userfaultfd, [flags, 0, 0, 0])?;
    let opened = match opened {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => thread.open_by_device(flags)?,
        other => other,
    };
    let remote = opened.map_err(at(USERFAULTFD))?;
    let ours = pidfd_getfd(pidfd, remote);
    thread.close(remote)?;
    let ours = ours.map_err(at("pidfd_getfd()"))?;
    thread.restore().map_err(at("setting its thread back"))?;
    Ok(ours)
}

/// The step of the call itself, which tells by its error what the host can do.
const USERFAULTFD: &str = "userfaultfd()";

/// An error and the step it belongs to.
struct StepError {
    step: &'static str,
    source: io::Error,
}

/// Names the step that an error belongs to.
fn at(step: &'static str) -> impl FnOnce(io::Error) -> StepError + Copy {
    move |source| StepError { step, source }
}

fn pidfd_getfd(pidfd: BorrowedFd<'_>, remote: u64) -> io::Result<OwnedFd> {
    let remote = i32::try_from(remote).map_err(io::Error::other)?;
    Ok(rustix::process::pidfd_getfd(
        pidfd,
        remote,
        rustix::process::PidfdGetfdFlags::empty(),
    )?)
}

/// The main thread of a process, stopped; dropped, it goes on as if nothing had been.
struct StoppedThread {
    pid: u32,
    tid: libc::pid_t,
    saved: Registers,
    saved_mask: u64,
    syscall_address: u64,
    memory: File,
    stopped: bool,
}

impl StoppedThread {
    fn stop(pid: u32) -> Result<Self, StepError> {
        let tid = libc::pid_t::try_from(pid)
            .map_err(io::Error::other)
            .map_err(at("its number"))?;
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .map_err(at("opening its memory"))?;
        let syscall_address =
            find_syscall(pid, &memory).map_err(at("finding a syscall instruction"))?;
        sys::ptrace_seize(tid).map_err(at("ptrace(SEIZE)"))?;
        let stopped = stop_seized(tid);
        let state = stopped.and_then(|()| {
            let saved = sys::ptrace_registers(tid)?;
            let mask = sys::ptrace_signal_mask(tid)?;
            // Everything waits but SIGTRAP: the kernel would unblock that one by force
            // and reset its handler, were it blocked when the step ends.
            sys::ptrace_set_signal_mask(tid, !(1 << (libc::SIGTRAP - 1)))?;
            Ok((saved, mask))
        });
        match state {
            Ok((saved, saved_mask)) => Ok(Self {
                pid,
                tid,
                saved,
                saved_mask,
                syscall_address,
                memory,
                stopped: true,
            }),
            Err(source) => {
                // Nothing was set yet, so letting go restores all. Fails if the thread is gone.
                let _ = sys::ptrace_detach(tid);
                Err(at("stopping its main thread")(source))
            }
        }
    }

    /// Makes the thread do one system call; the inner result is the call's own.
    fn call(&mut self, number: libc::c_long, args: [u64; 4]) -> Result<io::Result<u64>, StepError> {
        self.step_over_syscall(number, args)
            .map_err(at("a step over a system call"))
    }

    fn step_over_syscall(
        &mut self,
        number: libc::c_long,
        args: [u64; 4],
    ) -> io::Result<io::Result<u64>> {
        let mut registers = self.saved;
        registers.0.rip = self.syscall_address;
        registers.0.rax = number.cast_unsigned();
        // No call to restart: the one that was interrupted is, once all is set back.
        registers.0.orig_rax = u64::MAX;
        [
            registers.0.rdi,
            registers.0.rsi,
            registers.0.rdx,
            registers.0.r10,
        ] = args;
        sys::ptrace_set_registers(self.tid, &registers)?;
        sys::ptrace_step(self.tid)?;
        let status = sys::wait_for_thread(self.tid)?;
        if !libc::WIFSTOPPED(status) {
            self.stopped = false;
            return Err(io::Error::other("the thread ended"));
        }
        let registers = sys::ptrace_registers(self.tid)?;
        if libc::WSTOPSIG(status) != libc::SIGTRAP
            || registers.0.rip != self.syscall_address + SYSCALL_INSTRUCTION.len() as u64
        {
            return Err(io::Error::other("the thread stopped for another reason"));
        }
        // The kernel returns errors as -4095..=-1.
        let result = registers.0.rax.cast_signed();
        Ok(match i32::try_from(result) {
            Ok(error @ -4095..=-1) => Err(io::Error::from_raw_os_error(-error)),
            _ => Ok(registers.0.rax),
        })
    }

    fn close(&mut self, descriptor: u64) -> Result<(), StepError> {
        self.call(libc::SYS_close, [descriptor, 0, 0, 0])?
            .map(drop)
            .map_err(at("close()"))
    }

    /// Opens a userfaultfd by a device node the target can reach.
    fn open_by_device(&mut self, flags: u64) -> Result<io::Result<u64>, StepError> {
        let mut answer = self.open_by_node(Path::new(DEVICE), flags)?;
        for folder in ["/dev", "/run", "/dev/shm", "/tmp", "/var/tmp"] {
            if answer.is_ok() {
                break;
            }
            match DeviceNode::make(self.pid, Path::new(folder)) {
                Ok(node) => answer = self.open_by_node(&node.inside, flags)?,
                Err(error) => answer = Err(error),
            }
        }
        Ok(answer)
    }

    fn open_by_node(&mut self, node: &Path, flags: u64) -> Result<io::Result<u64>, StepError> {
        let device = match self.open_in_target(node)? {
            Ok(device) => device,
            Err(error) => return Ok(Err(error)),
        };
        let answer = self.call(
            libc::SYS_ioctl,
            [device, sys::USERFAULTFD_IOC_NEW, flags, 0],
        )?;
        self.close(device)?;
        Ok(answer)
    }

    /// Makes the target open `path`, which lies on its stack for that moment.
    fn open_in_target(&mut self, path: &Path) -> Result<io::Result<u64>, StepError> {
        let path = CString::new(path.as_os_str().as_encoded_bytes())
            .ok()
            .filter(|path| path.as_bytes_with_nul().len() <= PATH_BYTES)
            .ok_or_else(|| at("passing a path")(io::ErrorKind::InvalidInput.into()))?;
        let address = (self.saved.0.rsp - RED_ZONE_BYTES - PATH_BYTES as u64) & !0xf;
        let mut before = [0; PATH_BYTES];
        self.memory
            .read_exact_at(&mut before, address)
            .map_err(at("lending its stack"))?;
        self.memory
            .write_all_at(path.as_bytes_with_nul(), address)
            .map_err(at("lending its stack"))?;
        let flags = u64::from((libc::O_RDWR | libc::O_CLOEXEC).unsigned_abs());
        let at_fdcwd = i64::from(libc::AT_FDCWD).cast_unsigned();
        let opened = self.call(libc::SYS_openat, [at_fdcwd, address, flags, 0]);
        let restored = self.memory.write_all_at(&before, address);
        restored.map_err(at("giving its stack back"))?;
        opened
    }

    /// Lets the thread go on where it was.
    fn restore(&mut self) -> io::Result<()> {
        if !self.stopped {
            return Ok(());
        }
        self.stopped = false;
        let registers = sys::ptrace_set_registers(self.tid, &self.saved);
        let mask = sys::ptrace_set_signal_mask(self.tid, self.saved_mask);
        let detached = sys::ptrace_detach(self.tid);
        registers.and(mask).and(detached)
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        // The error that led here is reported already; this one could only be that the
        // target is gone.
        let _ = self.restore();
    }
}

/// What a failed step means to the one who wants to trace.
fn injection_error(pid: u32, step: String, source: io::Error) -> TrapError {
    match source.raw_os_error() {
        Some(libc::ENOSYS) if step == USERFAULTFD => TrapError::KernelTooOld {
            missing: "userfaultfd",
            source,
        },
        Some(libc::EPERM | libc::EACCES) if step == USERFAULTFD => TrapError::NoPrivilege {
            what: format!("open a userfaultfd in process {pid}"),
            source,
        },
        Some(libc::EPERM | libc::EACCES) => TrapError::NoPrivilege {
            what: format!("trace process {pid} ({step})"),
            source,
        },
        Some(libc::ESRCH | libc::ENOENT) => TrapError::VmGone { pid },
        _ => TrapError::Injection { pid, step, source },
    }
}

/// Brings a seized thread to the stop that PTRACE_INTERRUPT asks for.
fn stop_seized(tid: libc::pid_t) -> io::Result<()> {
    sys::ptrace_interrupt(tid)?;
    loop {
        let status = sys::wait_for_thread(tid)?;
        if !libc::WIFSTOPPED(status) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if status >> 16 == libc::PTRACE_EVENT_STOP {
            return Ok(());
        }
        // A signal came first: it is delivered, and our stop comes after it.
        sys::ptrace_continue(tid, libc::WSTOPSIG(status))?;
    }
}

/// Finds a `syscall` instruction in the vDSO or the C library of a process.
fn find_syscall(pid: u32, memory: &File) -> io::Result<u64> {
    const CHUNK_BYTES: u64 = 1 << 20;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let mut code: Vec<(bool, u64, u64)> = maps
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let (start, end) = fields.next()?.split_once('-')?;
            let executable = fields.next()?.contains('x');
            let name = fields.nth(3)?;
            let vdso = name == "[vdso]";
            let library = name.contains("libc.so") || name.contains("libc-");
            (executable && (vdso || library)).then_some(())?;
            let address = |text| u64::from_str_radix(text, 16).ok();
            Some((!vdso, address(start)?, address(end)?))
        })
        .collect();
    code.sort_unstable();
    for (_, start, end) in code {
        let len_bytes = end.saturating_sub(start).min(CHUNK_BYTES);
        let mut bytes = vec![0; usize::try_from(len_bytes).map_err(io::Error::other)?];
        if memory.read_exact_at(&mut bytes, start).is_err() {
            continue;
        }
        if let Some(at) = bytes
            .windows(2)
            .position(|pair| pair == SYSCALL_INSTRUCTION)
        {
            return Ok(start + at as u64);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        "neither its vDSO nor its C library has one",
    ))
}

/// A userfaultfd device node in the target's view of the file system, gone when dropped.
struct DeviceNode {
    inside: PathBuf,
    outside: PathBuf,
}

impl DeviceNode {
    fn make(pid: u32, folder: &Path) -> io::Result<Self> {
        use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Uid, chownat, mknodat};
        let device = fs::metadata(DEVICE)?.rdev();
        let inside = folder.join(format!(
            ".plimsoll-userfaultfd-{pid}-{}",
            std::process::id()
        ));
        let outside = PathBuf::from(format!("/proc/{pid}/root{}", inside.display()));
        mknodat(
            CWD,
            &outside,
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o600),
            device,
        )?;
        let node = Self { inside, outside };
        let (uid, gid) = file_system_ids(pid)?;
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        chownat(
            CWD,
            &node.outside,
            Some(uid),
            Some(gid),
            AtFlags::SYMLINK_NOFOLLOW,
        )?;
        Ok(node)
    }
}

/// User and group by which a process opens files (not the owner of its /proc folder, which
/// is root once it has changed its user).
fn file_system_ids(pid: u32) -> io::Result<(u32, u32)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    // Real, effective, saved, file system.
    let id = |key| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_ascii_whitespace().nth(3)?.parse().ok()
    };
    id("Uid:")
        .zip(id("Gid:"))
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

impl Drop for DeviceNode {
    fn drop(&mut self) {
        // Could only fail if somebody else removed it first.
        let _ = fs::remove_file(&self.outside);
    }
}

/// Opens a pidfd, by which a process cannot be mistaken for a later one of its number.
pub fn open_pidfd(pid: u32) -> Result<OwnedFd, TrapError> {
    let gone = TrapError::VmGone { pid };
    let Some(number) = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw)
    else {
        return Err(gone);
    };
    rustix::process::pidfd_open(number, rustix::process::PidfdFlags::NONBLOCK).map_err(|error| {
        match error {
            rustix::io::Errno::SRCH => gone,
            _ => TrapError::KernelTooOld {
                missing: "pidfd_open",
                source: error.into(),
            },
        }
    })
}

/// Whether the process behind a pidfd has ended.
pub fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let pidfd = pidfd.as_fd();
    let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(poll(&mut fds, Some(&now)), Ok(1..))
}

/// Whether the process behind a pidfd ends within the time an exit takes.
pub fn ends_soon(pidfd: BorrowedFd<'_>) -> bool {
    let deadline = Instant::now() + Duration::from_secs(2);
    while Instant::now() < deadline {
        if has_ended(pidfd) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_child_process_tells_is_read_back() {
        let failed = Answer::Failed {
            errno: libc::EPERM,
            step: "ptrace(SEIZE)".to_owned(),
        };
        for answer in [Answer::Taken(7), failed] {
            assert_eq!(Answer::from_bytes(&answer.to_bytes()), Some(answer));
        }
        for cut_short in ["", "taken", "taken x", "failed 1", "other 1 2"] {
            assert_eq!(Answer::from_bytes(cut_short.as_bytes()), None);
        }
    }

    #[test]
    fn a_failed_step_says_what_it_means() {
        let meaning = |step: &str, errno| {
            injection_error(42, step.to_owned(), io::Error::from_raw_os_error(errno)).to_string()
        };
        assert!(meaning(USERFAULTFD, libc::ENOSYS).contains("kernel has no userfaultfd"));
        assert!(meaning(USERFAULTFD, libc::EPERM).contains("open a userfaultfd in process 42"));
        assert!(meaning("ptrace(SEIZE)", libc::EPERM).contains("ptrace(SEIZE)"));
        assert!(meaning("ptrace(SEIZE)", libc::ESRCH).contains("is gone"));
        assert!(meaning("close()", libc::EIO).contains("continues unchanged"));
    }
}
