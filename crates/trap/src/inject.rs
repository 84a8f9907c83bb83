//! Takes a userfaultfd out of a running process: one on *its* address space.
//!
//! A userfaultfd belongs to the address space of the process that creates it, and one that handles the kernel's own
//! accesses (as KVM's) requires a privilege that a QEMU of an ordinary user does not have. So a descriptor of
//! `/dev/userfaultfd`, opened here, is lent to the target: a thread of it is stopped and made to call `socketpair()`,
//! to receive the descriptor from us over that, and to request a userfaultfd from the device. pidfd_getfd(2) copies
//! that out, and all that was opened is closed in the target. Nothing is created in any file system, no path is
//! resolved in the target, and no code is left behind. Where the device cannot be opened here, the target calls
//! `userfaultfd()` itself, which requires privilege there.
//!
//! The thread is stopped for about a millisecond. During that time another thread of the target could
//! copy the descriptors (docs/decisions/0001). If the process that stopped it were killed within that time, the thread
//! would continue with borrowed registers. So a child process does it, which outlives us and restores the thread
//! whatever happens to us; only an event that kills every process of ours at once can prevent that.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::error::TrapError;
use crate::refusal::Refusal;
use crate::registers::SYSCALL_INSTRUCTION;
use crate::seccomp::{self, SystemCallFilter};
use crate::stopped::{STOPPING, StepError, StoppedThread, at};
use crate::sys;

/// Takes a userfaultfd on the address space of `pid`.
pub fn take_userfaultfd(pid: u32, pidfd: BorrowedFd<'_>) -> Result<OwnedFd, TrapError> {
    let failed = |step: &str| {
        let step = step.to_owned();
        move |source| TrapError::Injection { pid, step, source }
    };
    let (ours, mut theirs) = UnixStream::pair().map_err(failed("making a pair of sockets"))?;
    let mut ours = Some(ours);
    let child = sys::fork(|| {
        // The child's copy, which would keep it from detecting that ours is closed.
        ours.take();
        let mut thread = None;
        let taken = take_as_tracer(pid, pidfd, &mut thread);
        if taken.is_err() {
            // The error is reported already; another one could only be that the target is gone, or holds the thread.
            let _ = thread.as_mut().map(StoppedThread::restore);
        }
        let held = thread.filter(StoppedThread::is_held);
        // If nobody reads, there is nobody to take the descriptor: it goes with this process.
        let told = theirs.write_all(&Answer::of(&taken, held.is_some()).to_bytes());
        let told = told.and_then(|()| theirs.shutdown(Shutdown::Write));
        match held {
            Some(thread) => thread.restore_when_released(),
            // The other end closes when the descriptor has been copied.
            None => drop(told.and_then(|()| theirs.read(&mut [0]))),
        }
    })
    .map_err(failed("forking"))?;
    drop(theirs);
    let mut bytes = Vec::new();
    let read = ours
        .as_mut()
        .map_or(Ok(0), |ours| ours.read_to_end(&mut bytes));
    let keeper = child.unsigned_abs();
    let taken = match read.ok().and_then(|_| Answer::from_bytes(&bytes)) {
        Some(Answer::Taken(theirs)) => {
            let copied = open_pidfd(keeper).and_then(|child| {
                pidfd_getfd(child.as_fd(), theirs).map_err(failed("pidfd_getfd()"))
            });
            Some(copied)
        }
        // The child outlives this attempt.
        Some(Answer::Held { step }) => return Err(TrapError::InjectionHeld { pid, step, keeper }),
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

/// The message of the child process.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The number of the descriptor, in the child.
    Taken(u64),
    /// The step that failed, and its error.
    Failed { errno: i32, step: String },
    /// The step that does not return. The child waits for it.
    Held { step: String },
}

impl Answer {
    fn of(taken: &Result<OwnedFd, StepError>, held: bool) -> Self {
        match taken {
            Err(StepError { step, .. }) if held => Self::Held {
                step: (*step).to_owned(),
            },
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
            Self::Held { step } => format!("held {step}").into_bytes(),
        }
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let text = str::from_utf8(bytes).ok()?;
        let (what, rest) = text.split_once(' ')?;
        match what {
            "taken" => rest.parse().ok().map(Self::Taken),
            "held" => Some(Self::Held {
                step: rest.to_owned(),
            }),
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

/// Takes the descriptor as the tracer of the target's main thread, which becomes `stopped`; the error names the step that
/// failed.
fn take_as_tracer(
    pid: u32,
    pidfd: BorrowedFd<'_>,
    stopped: &mut Option<StoppedThread>,
) -> Result<OwnedFd, StepError> {
    let device = open_device();
    // The VM waits for this process alone. Without the right to it, it waits as long as others run.
    let _ = rustix::process::setpriority_process(None, HIGHEST_PRIORITY);
    let thread = stopped.insert(StoppedThread::stop(pid)?);
    // Only now can the thread set no other filter.
    let filter = SystemCallFilter::of(pid).map_err(at("reading its status"))?;
    if filter != SystemCallFilter::None {
        let suspended = thread.suspend_filter();
        if filter != SystemCallFilter::QemuSandbox {
            suspended.map_err(at(SECCOMP))?;
        }
    }
    let remote = match device {
        Ok(device) => open_by_device(thread, pidfd, device.as_fd())?,
        // Enough for a process that has the privilege itself, or where everybody has it.
        Err(denied) => thread
            .call(libc::SYS_userfaultfd, [USERFAULTFD_FLAGS, 0, 0, 0])?
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EPERM) => at(USERFAULTFD)(denied),
                _ => at(USERFAULTFD)(error),
            })?,
    };
    thread.close_later(remote);
    let taken = pidfd_getfd(pidfd, remote).map_err(at("pidfd_getfd()"))?;
    check_kind(&taken)?;
    thread.restore().map_err(at("setting its thread back"))?;
    Ok(taken)
}

/// As nice(2) counts.
const HIGHEST_PRIORITY: i32 = -20;
/// The step that shows by its error what the host can do.
const USERFAULTFD: &str = "userfaultfd()";
/// The step that fails where the target may not have the device.
const RECEIVE: &str = "receiving a descriptor";
/// The step that fails where a filter might end the process.
const SECCOMP: &str = "suspending its seccomp filter";

const DEVICE: &str = "/dev/userfaultfd";
const USERFAULTFD_FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK).cast_unsigned() as u64;

/// Opens the userfaultfd device so that it can be used for ioctl(2) alone.
fn open_device() -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, open};
    // The access mode 3 is neither of reading nor of writing: open(2).
    let flags = OFlags::from_bits_retain(libc::O_ACCMODE.cast_unsigned()) | OFlags::CLOEXEC;
    Ok(open(DEVICE, flags, Mode::empty())?)
}

/// Layout of the memory borrowed on the target's stack: two descriptors, a message for recvmsg(2), and its buffers.
const LENT_BYTES: usize = 144;
const MESSAGE_AT: u64 = 16;
const VECTOR_AT: u64 = 80;
const BYTE_AT: u64 = 96;
const CONTROL_AT: u64 = 112;
/// `CMSG_SPACE` of one descriptor.
const CONTROL_BYTES: usize = 24;

/// Makes the target open a userfaultfd by `device`, a descriptor of ours, which it receives over a socket; returns
/// the number in the target.
///
/// Its file system, its device filter and its user do not matter: those are checked when a device is opened.
fn open_by_device(
    thread: &mut StoppedThread,
    pidfd: BorrowedFd<'_>,
    device: BorrowedFd<'_>,
) -> Result<u64, StepError> {
    let base = thread.lend::<LENT_BYTES>()?;
    let word = |number: libc::c_int| i64::from(number).cast_unsigned();
    let kind = word(libc::SOCK_STREAM | libc::SOCK_CLOEXEC);
    thread
        .call(libc::SYS_socketpair, [word(libc::AF_UNIX), kind, 0, base])?
        .map_err(at("socketpair()"))?;
    let sockets: [u8; 8] = thread.read(base)?;
    let sender = descriptor_in(&sockets, 0, "socketpair()")?;
    let receiver = descriptor_in(&sockets, 4, "socketpair()")?;
    thread.close_later(sender);
    thread.close_later(receiver);
    let ours = pidfd_getfd(pidfd, sender).map_err(at("pidfd_getfd() of a socket"))?;
    send_descriptor(ours.as_fd(), device).map_err(at("sending a descriptor"))?;

    let [vector, byte, control] = [VECTOR_AT, BYTE_AT, CONTROL_AT].map(|offset| base + offset);
    // As in struct msghdr: no name, one vector, a control buffer, no flags; and struct iovec.
    let message = [0, 0, vector, 1, control, CONTROL_BYTES as u64, 0];
    thread.write(&message.map(u64::to_le_bytes).concat(), base + MESSAGE_AT)?;
    thread.write(&[byte, 1].map(u64::to_le_bytes).concat(), vector)?;
    let flags = word(libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT);
    thread
        .call(libc::SYS_recvmsg, [receiver, base + MESSAGE_AT, flags, 0])?
        .map_err(at("recvmsg()"))?;
    let device = received_descriptor(&thread.read::<CONTROL_BYTES>(control)?)?;
    thread.close_later(device);
    let arguments = [device, sys::USERFAULTFD_IOC_NEW, USERFAULTFD_FLAGS, 0];
    thread
        .call(libc::SYS_ioctl, arguments)?
        .map_err(at("ioctl(USERFAULTFD_IOC_NEW)"))
}

/// The descriptor at an offset of what the kernel wrote into the target's memory.
fn descriptor_in(bytes: &[u8], offset: usize, step: &'static str) -> Result<u64, StepError> {
    let number = bytes.get(offset..offset + 4).and_then(|bytes| {
        let number = i32::from_le_bytes(bytes.try_into().ok()?);
        u64::try_from(number).ok()
    });
    number.ok_or_else(|| at(step)(io::Error::other("the process changed its result")))
}

/// The descriptor in a control buffer with one message of `SCM_RIGHTS`.
fn received_descriptor(control: &[u8; CONTROL_BYTES]) -> Result<u64, StepError> {
    let mut expected = 20u64.to_le_bytes().to_vec();
    expected.extend(libc::SOL_SOCKET.to_le_bytes());
    expected.extend(libc::SCM_RIGHTS.to_le_bytes());
    if !control.starts_with(&expected) {
        // The kernel leaves out a descriptor that it may not or cannot install.
        return Err(at(RECEIVE)(io::Error::from_raw_os_error(libc::EACCES)));
    }
    descriptor_in(control, expected.len(), RECEIVE)
}

/// Sends one byte and `descriptor` without waiting.
fn send_descriptor(socket: BorrowedFd<'_>, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[io::IoSlice::new(&[0])], &mut control, flags)?;
    Ok(())
}

/// Refuses a descriptor that is no userfaultfd: another thread of the target can put any in its place.
fn check_kind(descriptor: &OwnedFd) -> Result<(), StepError> {
    let link = fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))
        .map_err(at("reading what was taken"))?;
    if link.as_os_str() == "anon_inode:[userfaultfd]" {
        return Ok(());
    }
    let other = format!("the process put {} in its place", link.display());
    Err(at("taking the userfaultfd")(io::Error::other(other)))
}

fn pidfd_getfd(pidfd: BorrowedFd<'_>, remote: u64) -> io::Result<OwnedFd> {
    let remote = i32::try_from(remote).map_err(io::Error::other)?;
    Ok(rustix::process::pidfd_getfd(
        pidfd,
        remote,
        rustix::process::PidfdGetfdFlags::empty(),
    )?)
}

/// Refuses a process into which no calls should be injected: one in a user namespace of its own, unless
/// `allow_namespaced`, one of 32 bits, and one whose filter of system calls might end it. Changes nothing in it.
///
/// # Errors
///
/// [`Refusal::ForeignUserNamespace`], [`Refusal::NarrowProgram`], [`Refusal::SeccompFilter`], and [`Refusal::NoPrivilege`] if the process hides
/// these.
pub fn assess_injection(pid: u32, allow_namespaced: bool) -> Result<(), Refusal> {
    if SYSCALL_INSTRUCTION.is_none() {
        return Err(Refusal::NoInjection);
    }
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/user"));
    // A kernel without user namespaces has no such file, nor one of the other process.
    if let Ok(ours) = namespace("self") {
        let theirs = namespace(&pid.to_string()).map_err(|source| Refusal::NoPrivilege {
            what: format!("read /proc/{pid}/ns/user"),
            source,
        })?;
        if !allow_namespaced && ours != theirs {
            return Err(Refusal::ForeignUserNamespace { pid });
        }
    }
    if is_narrow(pid) {
        return Err(Refusal::NarrowProgram { pid });
    }
    seccomp::check(pid)
}

/// Whether the process runs a 32-bit program, as far as its file can be read.
fn is_narrow(pid: u32) -> bool {
    let mut header = [0; 5];
    let read =
        File::open(format!("/proc/{pid}/exe")).and_then(|mut file| file.read_exact(&mut header));
    read.is_ok() && header == *b"\x7fELF\x01"
}

/// Refuses a process in which no userfaultfd can be opened, neither by the device nor by its own privilege. Changes
/// nothing.
pub fn check_userfaultfd(pid: u32) -> Result<(), Refusal> {
    const CAP_SYS_PTRACE: u32 = 19;
    let Err(source) = open_device() else {
        return Ok(());
    };
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let is_open_to_all = read("/proc/sys/vm/unprivileged_userfaultfd").trim() == "1";
    let status = read(&format!("/proc/{pid}/status"));
    let capabilities = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    if is_open_to_all || capabilities.is_some_and(|bits| bits >> CAP_SYS_PTRACE & 1 == 1) {
        return Ok(());
    }
    Err(Refusal::NoUserfaultfd { pid, source })
}

/// The error that a failed step means for the caller.
fn injection_error(pid: u32, step: String, source: io::Error) -> TrapError {
    match source.raw_os_error() {
        _ if step == SECCOMP => Refusal::SeccompFilter { pid }.into(),
        Some(libc::ENOSYS) if step == USERFAULTFD => Refusal::KernelTooOld {
            missing: "userfaultfd",
            source,
        }
        .into(),
        _ if step == USERFAULTFD => Refusal::NoUserfaultfd { pid, source }.into(),
        Some(libc::EACCES) if step == RECEIVE => Refusal::DescriptorWithheld { pid }.into(),
        Some(libc::EPERM | libc::EACCES) => Refusal::NoPrivilege {
            what: format!("trace process {pid} ({step})"),
            source,
        }
        .into(),
        Some(libc::ETIME) if step != STOPPING => TrapError::InjectionDelayed { pid, step },
        Some(libc::ESRCH | libc::ENOENT) => TrapError::VmGone { pid },
        _ => TrapError::Injection { pid, step, source },
    }
}

/// Opens a pidfd, so that a process cannot be confused with a later one of its number.
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
            _ => Refusal::KernelTooOld {
                missing: "pidfd_open",
                source: error.into(),
            }
            .into(),
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
        let held = Answer::Held {
            step: "a system call".into(),
        };
        for answer in [Answer::Taken(7), failed, held] {
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
        assert!(meaning(USERFAULTFD, libc::EACCES).contains("nor may process 42"));
        assert!(meaning(SECCOMP, libc::EPERM).contains("seccomp filter"));
        assert!(meaning(RECEIVE, libc::EACCES).contains("too many files open"));
        assert!(meaning("ptrace(SEIZE)", libc::EPERM).contains("ptrace(SEIZE)"));
        assert!(meaning("ptrace(SEIZE)", libc::ESRCH).contains("is gone"));
        assert!(meaning("close()", libc::EIO).contains("continues unchanged"));
    }
}
