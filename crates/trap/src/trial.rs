//! A trap tried out on memory of our own: does this host trap, and what does one cost?
//!
//! A thread touches pages that were made inaccessible, exactly as a vCPU does, and the
//! caller serves it exactly as the tracer does. Between the thread's clock
//! readings lies all that an access loses: fault, wake-up of the handler, evicting and
//! mapping a page, wake-up of the thread. From outside a VM only the middle part
//! can be measured; the difference found here is added to it.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::barrier::{PageBarrier, RemotePageout};
use crate::error::TrapError;
use crate::inject::open_pidfd;
use crate::placement::{HandlerCpu, Placement};
use crate::process::WINDOW_PAGES;
use crate::ram::{PAGE_BYTES, Presence};
use crate::refusal::Refusal;
use crate::sys::usize_of;
use crate::sys::{AddressRange, SharedMemory};
use crate::uffd::{Userfault, UserfaultPurpose};

/// Touched pages: enough for a median that one preemption does not move.
const PAGES: usize = 201;

/// What a trap costs here, medians over a trial.
#[derive(Debug, Clone, Copy)]
pub struct TrapCost {
    /// From the access to its completion.
    pub whole: Duration,
    /// Of that, what passes outside the handler: fault and wake-ups.
    pub outside_handler: Duration,
}

/// Traps accesses of a thread of ours and measures them.
///
/// # Errors
///
/// What is missing, as [`TrapError::Refused`] or [`TrapError::StayedAccessible`].
pub fn measure_trap_cost(cpu: HandlerCpu) -> Result<TrapCost, TrapError> {
    let pid = std::process::id();
    let failed = |call| move |source| TrapError::Call { pid, call, source };
    let missing =
        |missing| move |source: io::Error| TrapError::Refused(Refusal::of_missing(missing, source));
    let memory = SharedMemory::new(PAGES).map_err(failed("memfd_create()"))?;
    let userfault = Userfault::open(UserfaultPurpose::Minor, [memory.range()])
        .map_err(missing("userfaultfd minor faults on shared memory"))?;
    let presence = Presence::open(pid).map_err(missing("pagemap"))?;
    let mut barrier = RemotePageout::new(open_pidfd(pid)?, presence);
    let page = |index: usize| AddressRange {
        start: memory.range().start + index as u64 * PAGE_BYTES,
        len_bytes: PAGE_BYTES,
    };
    barrier
        .raise(&[memory.range()])
        .map_err(missing("process_madvise(MADV_PAGEOUT)"))?;
    let mut accessible = 0;
    barrier
        .for_each_down(memory.range(), &mut |_| accessible += 1)
        .map_err(failed("reading pagemap"))?;
    if accessible * 2 > PAGES as u64 {
        return Err(TrapError::StayedAccessible {
            tried: PAGES as u64,
            accessible,
        });
    }

    let mut inside = Vec::with_capacity(PAGES);
    let (sender, receiver) = mpsc::channel();
    let mut whole = thread::scope(|scope| {
        let toucher = scope.spawn(|| {
            let sent = sender.send(
                rustix::thread::gettid()
                    .as_raw_nonzero()
                    .get()
                    .unsigned_abs(),
            );
            let touch = |index| {
                let start = Instant::now();
                memory.word(index).fetch_add(1, Ordering::Relaxed);
                start.elapsed()
            };
            sent.map(|()| (0..PAGES).map(touch).collect::<Vec<_>>())
        });
        let mut serve = || -> io::Result<()> {
            let thread = receiver.recv().map_err(io::Error::other)?;
            let mut placement = Placement::new(cpu, pid, &[thread]);
            let mut faults = Vec::new();
            while !toucher.is_finished() {
                placement.follow(|| ());
                wait_readable(&userfault)?;
                userfault.read_faults(&mut faults)?;
                for fault in &faults {
                    let start = Instant::now();
                    let index = usize_of((fault.address - memory.range().start) / PAGE_BYTES);
                    // As in the tracer: a page leaves the hot set before the access goes on.
                    barrier.raise(&[page(index.saturating_sub(1))])?;
                    barrier.lower(&userfault, page(index))?;
                    inside.push(start.elapsed());
                }
            }
            Ok(())
        };
        let served = serve();
        // Whatever happened, the thread must not wait for us for ever.
        let unregistered = userfault.unregister();
        let touched = toucher
            .join()
            .map_err(|_| io::Error::other("the touching thread panicked"));
        served
            .and(unregistered)
            .and(touched)?
            .map_err(io::Error::other)
    })
    .map_err(failed("serving a trap"))?;
    if inside.len() * 2 < PAGES {
        return Err(TrapError::StayedAccessible {
            tried: PAGES as u64,
            accessible: (PAGES - inside.len()) as u64,
        });
    }
    let whole = median(&mut whole);
    Ok(TrapCost {
        whole,
        outside_handler: whole.saturating_sub(median(&mut inside)),
    })
}

/// Measures what an access costs that finds its page absent from the page table and in the page cache.
///
/// # Errors
///
/// As [`measure_trap_cost`].
pub fn measure_fault_cost() -> Result<Duration, TrapError> {
    let pid = std::process::id();
    let failed = |call| move |source| TrapError::Call { pid, call, source };
    let missing =
        |missing| move |source| TrapError::Refused(Refusal::KernelTooOld { missing, source });
    // One page in each window of fault-around, which one fault maps whole.
    let window = WINDOW_PAGES as usize;
    let memory = SharedMemory::new(PAGES * window).map_err(failed("memfd_create()"))?;
    let presence = Presence::open(pid).map_err(missing("pagemap"))?;
    let mut barrier = RemotePageout::new(open_pidfd(pid)?, presence);
    barrier
        .raise(&[memory.range()])
        .map_err(missing("process_madvise(MADV_PAGEOUT)"))?;
    let mut accessible = 0;
    barrier
        .for_each_down(memory.range(), &mut |_| accessible += 1)
        .map_err(failed("reading pagemap"))?;
    let tried = (PAGES * window) as u64;
    if accessible * 2 > tried {
        return Err(TrapError::StayedAccessible { tried, accessible });
    }
    let touch = |index: usize| {
        let start = Instant::now();
        memory.word(index * window).fetch_add(1, Ordering::Relaxed);
        start.elapsed()
    };
    let mut faults: Vec<_> = (0..PAGES).map(touch).collect();
    Ok(median(&mut faults))
}

/// Measures what the first write to a page costs that is protected asynchronously.
///
/// # Errors
///
/// As [`measure_trap_cost`].
pub fn measure_write_fault_cost() -> Result<Duration, TrapError> {
    let pid = std::process::id();
    let failed = |call| move |source| TrapError::Call { pid, call, source };
    let memory = SharedMemory::new(PAGES).map_err(failed("memfd_create()"))?;
    let purpose = UserfaultPurpose::AsyncWriteProtect;
    let userfault = Userfault::open(purpose, [memory.range()])
        .map_err(|source| Refusal::of_missing(purpose.kernel_feature(), source))?;
    let protected = userfault.write_protect(memory.range());
    protected.map_err(failed("write-protecting pages"))?;
    let write = |index: usize| {
        let start = Instant::now();
        memory.word(index).fetch_add(1, Ordering::Relaxed);
        start.elapsed()
    };
    let mut faults: Vec<_> = (0..PAGES).map(write).collect();
    Ok(median(&mut faults))
}

fn median(durations: &mut [Duration]) -> Duration {
    durations.sort_unstable();
    durations[durations.len() / 2]
}

fn wait_readable(userfault: &Userfault) -> io::Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::from_borrowed_fd(userfault.as_fd(), PollFlags::IN)];
    let while_the_thread_may_end = Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    match poll(&mut fds, Some(&while_the_thread_may_end)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_skip::{Lack, skip};

    #[test]
    fn a_trap_costs_more_than_what_its_handler_does() {
        match measure_trap_cost(HandlerCpu::Follow) {
            Ok(cost) => {
                assert!(cost.whole > cost.outside_handler);
                assert!(cost.whole < Duration::from_millis(50), "{cost:?}");
            }
            Err(error) => skip(
                Lack::Userfaultfd,
                format_args!("no traps on this host: {error}"),
            ),
        }
    }
}
