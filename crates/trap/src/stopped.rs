//! The main thread of a process, stopped, through which system calls are made in that process.
//!
//! The thread is made to step over a `syscall` instruction that its vDSO or C library already has. In every case it
//! continues with its registers, its signal mask, its stack and its process's descriptors unchanged. Other threads of
//! the process run meanwhile: what they can access (descriptors, memory) may have changed between two calls, so nothing
//! that is read back is trusted.
//!
//! Signals other than those it cannot block wait until it continues.
//!
//! A call may not return: another thread of the process can exchange the file that a descriptor refers to for one of a
//! file system that the process serves itself (FUSE). Such a call is interrupted after [`CALL_MAX`]. One that cannot be
//! interrupted leaves the thread held in it, and it is restored whenever the call returns: [`StoppedThread::is_held`].

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use crate::registers::SYSCALL_INSTRUCTION;
use crate::sys::{self, Registers};

/// How often a process may be stopped by others within one instruction.
const STOPS_MAX: u32 = 100;
/// How long a call may take before it is interrupted, and then until the interrupt takes effect. All calls of ours
/// return at once, so only a process that delays them, or that gets no CPU, comes to this.
pub const CALL_MAX: Duration = Duration::from_secs(1);
/// How long a thread may take to stop: longer than it waits for a busy disk in a call of its own.
const STOP_MAX: Duration = Duration::from_secs(10);

/// The step before any call.
pub const STOPPING: &str = "stopping its main thread";

/// An error and the step in which it occurred.
pub struct StepError {
    pub step: &'static str,
    pub source: io::Error,
}

/// Adds the step to an error.
pub fn at(step: &'static str) -> impl FnOnce(io::Error) -> StepError + Copy {
    move |source| StepError { step, source }
}

/// The main thread of a process, stopped; when dropped, it continues as before.
pub struct StoppedThread {
    tid: libc::pid_t,
    saved: Registers,
    saved_mask: u64,
    syscall_address: u64,
    memory: File,
    /// Memory of its stack that was lent, with its original contents.
    lent: Option<(u64, Vec<u8>)>,
    /// Descriptors that were opened in its process.
    open: Vec<u64>,
    /// The signal to be delivered when it continues; 0 for none.
    signal: libc::c_int,
    stopped: bool,
    /// Whether it is in a call that cannot be interrupted.
    held: bool,
}

impl StoppedThread {
    pub fn stop(pid: u32) -> Result<Self, StepError> {
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
                tid,
                saved,
                saved_mask,
                syscall_address,
                memory,
                lent: None,
                open: Vec::new(),
                signal: 0,
                stopped: true,
                held: false,
            }),
            Err(source) => {
                // Nothing was set yet, so detaching restores everything. Fails if the thread is gone.
                let _ = sys::ptrace_detach(tid, 0);
                Err(at(STOPPING)(source))
            }
        }
    }

    /// Suspends the process's filter of system calls for this thread until it continues. Needs `CAP_SYS_ADMIN`, and
    /// no filter of our own.
    pub fn suspend_filter(&self) -> io::Result<()> {
        sys::ptrace_suspend_seccomp(self.tid)
    }

    /// Makes the thread do one system call; the inner result is the call's own.
    pub fn call(
        &mut self,
        number: libc::c_long,
        args: [u64; 4],
    ) -> Result<io::Result<u64>, StepError> {
        let called = self.step_over_syscall(number, args);
        called.map_err(at(if self.held {
            "a system call"
        } else {
            "a step over a system call"
        }))
    }

    fn step_over_syscall(
        &mut self,
        number: libc::c_long,
        args: [u64; 4],
    ) -> io::Result<io::Result<u64>> {
        let mut registers = self.saved;
        registers.set_call(self.syscall_address, number, args);
        sys::ptrace_set_registers(self.tid, &registers)?;
        let (status, interrupted) = self.step()?;
        let registers = sys::ptrace_registers(self.tid)?;
        if libc::WSTOPSIG(status) != libc::SIGTRAP || !registers.has_called(self.syscall_address) {
            return Err(io::Error::other("the thread stopped for another reason"));
        }
        // The kernel returns errors as -4095..=-1.
        let result = registers.result().cast_signed();
        Ok(match i32::try_from(result) {
            Ok(error @ -4095..=-1) if interrupted && is_interruption(-error) => {
                Err(io::Error::from_raw_os_error(libc::ETIME))
            }
            Ok(error @ -4095..=-1) => Err(io::Error::from_raw_os_error(-error)),
            _ => Ok(registers.result()),
        })
    }

    /// Executes one instruction. Returns how the thread stopped, and whether the call was interrupted.
    fn step(&mut self) -> io::Result<(libc::c_int, bool)> {
        sys::ptrace_step(self.tid)?;
        if let Some(status) = self.until_stepped(Some(CALL_MAX))? {
            return Ok((status, false));
        }
        sys::ptrace_interrupt(self.tid)?;
        if let Some(status) = self.until_stepped(Some(CALL_MAX))? {
            return Ok((status, true));
        }
        self.held = true;
        Err(io::Error::from_raw_os_error(libc::ETIME))
    }

    /// Waits for the end of a step; `None` if it takes longer than `limit`. Another process may stop the process
    /// meanwhile, which cannot be blocked: the thread continues all the same, and is stopped as it should be when we
    /// detach.
    fn until_stepped(&mut self, limit: Option<Duration>) -> io::Result<Option<libc::c_int>> {
        for _ in 0..STOPS_MAX {
            let status = match limit {
                Some(limit) => sys::wait_for_thread_within(self.tid, limit)?,
                None => Some(sys::wait_for_thread(self.tid)?),
            };
            let Some(status) = status else {
                return Ok(None);
            };
            if !libc::WIFSTOPPED(status) {
                self.stopped = false;
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            let is_of_group = status >> 16 == libc::PTRACE_EVENT_STOP;
            if !is_of_group && libc::WSTOPSIG(status) != libc::SIGSTOP {
                return Ok(Some(status));
            }
            // The kernel itself records that the group is stopped.
            if !is_of_group {
                self.signal = libc::SIGSTOP;
            }
            sys::ptrace_step(self.tid)?;
        }
        Err(io::Error::other("the process is stopped again and again"))
    }

    /// Whether the thread is in a call that could not be interrupted. It cannot be restored before that returns, and
    /// would continue with borrowed registers if this process ended.
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Waits, for as long as it takes, until the thread can be restored, and restores it. For a process of which
    /// nothing else is left to do: it gives up all other descriptors.
    pub fn restore_when_released(mut self) {
        sys::close_all_but(&[self.memory.as_raw_fd()]);
        while self.held {
            self.held = false;
            // Fails if the thread is gone.
            let _ = self.until_stepped(None);
            let _ = self.restore();
        }
    }

    /// Memory below the thread's stack, lent to it until it continues.
    pub fn lend<const BYTES: usize>(&mut self) -> Result<u64, StepError> {
        let address = (self.saved.stack_end() - BYTES as u64) & !0xf;
        let mut before = vec![0; BYTES];
        self.memory
            .read_exact_at(&mut before, address)
            .map_err(at("reading its stack"))?;
        self.lent = Some((address, before));
        Ok(address)
    }

    pub fn write(&self, bytes: &[u8], address: u64) -> Result<(), StepError> {
        self.memory
            .write_all_at(bytes, address)
            .map_err(at("writing to its stack"))
    }

    pub fn read<const BYTES: usize>(&self, address: u64) -> Result<[u8; BYTES], StepError> {
        let mut bytes = [0; BYTES];
        self.memory
            .read_exact_at(&mut bytes, address)
            .map_err(at("reading its stack"))?;
        Ok(bytes)
    }

    /// Closes a descriptor in the process when the thread continues, if not before.
    pub fn close_later(&mut self, descriptor: u64) {
        self.open.push(descriptor);
    }

    /// Closes what was opened in the process and restores its stack.
    fn clean_up(&mut self) -> io::Result<()> {
        let mut cleaned = Ok(());
        while let Some(descriptor) = self.open.pop() {
            let closed = self.step_over_syscall(libc::SYS_close, [descriptor, 0, 0, 0]);
            if self.held {
                return closed.map(drop);
            }
            cleaned = cleaned.and(closed.and_then(|closed| closed.map(drop)));
        }
        if let Some((address, before)) = self.lent.take() {
            cleaned = cleaned.and(self.memory.write_all_at(&before, address));
        }
        cleaned
    }

    /// Lets the thread continue where it was, with nothing left behind in its process.
    pub fn restore(&mut self) -> io::Result<()> {
        if !self.stopped || self.held {
            return Ok(());
        }
        let cleaned = self.clean_up();
        if self.held {
            return cleaned;
        }
        self.stopped = false;
        let registers = sys::ptrace_set_registers(self.tid, &self.saved);
        let mask = sys::ptrace_set_signal_mask(self.tid, self.saved_mask);
        let detached = sys::ptrace_detach(self.tid, self.signal);
        cleaned.and(registers).and(mask).and(detached)
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        // The error that led here is reported already; this one could only be that the
        // target is gone.
        let _ = self.restore();
    }
}

/// Whether a system call returns `error` because it was interrupted: EINTR, or one of the kernel's own numbers from
/// ERESTARTSYS to ERESTART_RESTARTBLOCK.
fn is_interruption(error: i32) -> bool {
    const ERESTARTSYS: i32 = 512;
    const ERESTART_RESTARTBLOCK: i32 = 516;
    error == libc::EINTR || (ERESTARTSYS..=ERESTART_RESTARTBLOCK).contains(&error)
}

/// Brings a seized thread to the stop that PTRACE_INTERRUPT requests.
fn stop_seized(tid: libc::pid_t) -> io::Result<()> {
    sys::ptrace_interrupt(tid)?;
    loop {
        let status = sys::wait_for_thread_within(tid, STOP_MAX)?;
        // When this process ends, the thread was never stopped.
        let status = status.ok_or_else(|| io::Error::from_raw_os_error(libc::ETIME))?;
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
    let instruction = SYSCALL_INSTRUCTION.ok_or(io::ErrorKind::Unsupported)?;
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
        if let Some(at) = bytes.windows(2).position(|pair| pair == instruction) {
            return Ok(start + at as u64);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        "neither its vDSO nor its C library has one",
    ))
}
