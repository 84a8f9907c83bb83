//! A trial of traps on memory of our own: whether this host traps, and the cost of a trap.
//!
//! A thread, or a vCPU of a KVM machine of our own, touches pages that were made inaccessible, and the caller serves it
//! exactly as the tracer does. The time between the readings of the toucher's clock is the total loss of an access:
//! fault, wake-up of the handler, evicting and mapping a page, wake-up of the toucher. From outside a VM only the
//! middle part can be measured; the difference found here is the minimum that is added to it.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::barrier::{PageBarrier, RemotePageout};
use crate::error::TrapError;
use crate::frames::{IdleMarks, PagemapEntry, word};
use crate::inject::open_pidfd;
use crate::placement::{HandlerCpu, Placement, leave_cpu, stay_on_this_cpu};
use crate::process::{WINDOW_PAGES, cpu_time};
use crate::ram::{PAGE_BYTES, Presence};
use crate::refusal::Refusal;
use crate::sys::usize_of;
use crate::sys::{AddressRange, SharedMemory};
use crate::uffd::{Userfault, UserfaultPurpose};
use crate::vcpu::{Machine, OWN_PAGES, PRESENT_PAGE, TOUCHED_PAGE};

/// Touched pages: enough for a median that one preemption does not move.
const PAGES: usize = 201;
/// Pages that a vCPU touches in one run: its clock is read between runs alone.
const RUN_PAGES: usize = 8;
/// Number of times that the loss of a thread by interrupts is measured.
const TRIES: usize = 7;
/// Its turns before pages are unmapped.
const CALM_TURNS: u64 = 1 << 22;
/// CPU time that the thread must take meanwhile for its loss to be known.
const TOGETHER_MIN: Duration = Duration::from_micros(100);
/// Pages that one fault may map (fault-around).
const WINDOW: usize = WINDOW_PAGES as usize;
/// Pages of which a TLB holds fewer.
const TLB_PAGES: usize = 4096;

/// What touches the pages of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Toucher {
    /// A thread of this process, as a vCPU of an emulated guest is one of QEMU's.
    Thread,
    /// A vCPU of a KVM machine of our own.
    KvmVcpu,
}

/// The cost of an observed touch to a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TouchCost {
    /// From the access to its completion.
    pub time: Duration,
    /// What it was measured on.
    pub toucher: Toucher,
}

impl TouchCost {
    /// Measures a touch as the process `pid` would feel it.
    pub(crate) fn measure(
        pid: u32,
        measure: impl Fn(Toucher) -> Result<Duration, TrapError>,
    ) -> Result<Self, TrapError> {
        measure_for(pid, measure).map(|(time, toucher)| Self { time, toucher })
    }
}

/// Measures on a vCPU if KVM runs the process `pid`, and KVM can be used here; else on a thread.
pub fn measure_for<T>(
    pid: u32,
    measure: impl Fn(Toucher) -> Result<T, TrapError>,
) -> Result<(T, Toucher), TrapError> {
    if has_vcpus(pid)
        && let Ok(cost) = measure(Toucher::KvmVcpu)
    {
        return Ok((cost, Toucher::KvmVcpu));
    }
    measure(Toucher::Thread).map(|cost| (cost, Toucher::Thread))
}

/// Whether a process holds vCPUs of KVM.
fn has_vcpus(pid: u32) -> bool {
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    let mut links = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    links.any(|link| {
        let name = link.as_os_str().as_encoded_bytes();
        name.starts_with(b"anon_inode:kvm-vcpu")
    })
}

/// The cost of a trap on this host, medians over a trial.
#[derive(Debug, Clone, Copy)]
pub struct TrapCost {
    /// From the access to its completion.
    pub whole: Duration,
    /// The part of it outside the handler: fault and wake-ups.
    pub outside_handler: Duration,
    /// The same of the fastest quarter, which a busy host disturbs less.
    pub outside_handler_min: Duration,
    /// CPU time of the toucher itself, of the fastest quarter.
    pub running: Duration,
}

/// Durations of touches, and the CPU time of their toucher.
#[derive(Debug, Default)]
struct Touches {
    whole: Vec<Duration>,
    running: Vec<Duration>,
}

/// Touches pages of `memory`, each `stride` pages after the one before.
fn touch(toucher: Toucher, memory: &SharedMemory, stride: usize) -> io::Result<Touches> {
    let mut touches = Touches::default();
    match toucher {
        Toucher::Thread => {
            for index in 0..PAGES {
                // Unlike the other clock, that of CPU time is a system call, which is no part of the access.
                let (running, start) = (cpu_time(), Instant::now());
                memory.word(index * stride).fetch_add(1, Ordering::Relaxed);
                touches.whole.push(start.elapsed());
                touches.running.push(cpu_time().saturating_sub(running));
            }
        }
        Toucher::KvmVcpu => {
            let own = SharedMemory::new(OWN_PAGES)?;
            let mut machine = Machine::new(&own, memory)?;
            let mut run = |first: u64, stride: u64| -> io::Result<(Duration, Duration)> {
                let (start, running) = (Instant::now(), cpu_time());
                machine.touch(first, RUN_PAGES as u64, stride)?;
                Ok((start.elapsed(), cpu_time().saturating_sub(running)))
            };
            // Duration of a run where every page is present.
            let present = (0..16).map(|_| run(PRESENT_PAGE, 1));
            let present = present.collect::<io::Result<Vec<_>>>()?;
            let (mut whole, mut running): (Vec<_>, Vec<_>) = present.into_iter().unzip();
            let present = (median(&mut whole), median(&mut running));
            let each =
                |taken: Duration, present| taken.saturating_sub(present).div_f64(RUN_PAGES as f64);
            for index in 0..PAGES / RUN_PAGES {
                let first = TOUCHED_PAGE + (index * RUN_PAGES * stride) as u64;
                let (whole, running) = run(first, stride as u64)?;
                touches.whole.push(each(whole, present.0));
                touches.running.push(each(running, present.1));
            }
        }
    }
    Ok(touches)
}

/// Traps accesses of a thread or a vCPU of ours and measures them.
///
/// # Errors
///
/// What is missing, as [`TrapError::Refused`] or [`TrapError::StayedAccessible`]; [`TrapError::Call`] where KVM cannot
/// be used.
pub fn measure_trap_cost(cpu: HandlerCpu, toucher: Toucher) -> Result<TrapCost, TrapError> {
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
    let mut touches = thread::scope(|scope| {
        let touching = scope.spawn(|| {
            // The usual case: the handler is where the toucher is. Else luck decides on the trial's whole figure.
            if cpu == HandlerCpu::Follow {
                // Where that is refused, chance decides.
                let _ = stay_on_this_cpu();
            }
            let sent = sender.send(
                rustix::thread::gettid()
                    .as_raw_nonzero()
                    .get()
                    .unsigned_abs(),
            );
            sent.map_err(io::Error::other)?;
            touch(toucher, &memory, 1)
        });
        let mut serve = || -> io::Result<()> {
            let thread = receiver.recv().map_err(io::Error::other)?;
            let mut placement = Placement::new(cpu, pid, &[thread]);
            let mut faults = Vec::new();
            while !touching.is_finished() {
                placement.follow(|| ());
                wait_readable(&userfault)?;
                userfault.read_faults(&mut faults)?;
                for fault in &faults {
                    let start = Instant::now();
                    let index = usize_of((fault.address - memory.range().start) / PAGE_BYTES);
                    // As in the tracer: a page leaves the hot set before the access continues.
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
        let touched = touching
            .join()
            .map_err(|_| io::Error::other("the touching thread panicked"));
        served.and(unregistered).and(touched?)
    })
    .map_err(failed("serving a trap"))?;
    if inside.len() * 2 < PAGES {
        return Err(TrapError::StayedAccessible {
            tried: PAGES as u64,
            accessible: (PAGES - inside.len()) as u64,
        });
    }
    let whole = median(&mut touches.whole);
    Ok(TrapCost {
        whole,
        outside_handler: whole.saturating_sub(median(&mut inside)),
        outside_handler_min: fast(&mut touches.whole).saturating_sub(fast(&mut inside)),
        running: fast(&mut touches.running),
    })
}

/// Memory of ours with [`PAGES`] pages to touch, one in each [`WINDOW`], and what unmaps them.
fn own_windows() -> Result<(SharedMemory, RemotePageout), TrapError> {
    let pid = std::process::id();
    let memory = SharedMemory::new(PAGES * WINDOW).map_err(|source| TrapError::Call {
        pid,
        call: "memfd_create()",
        source,
    })?;
    let presence = Presence::open(pid).map_err(|source| Refusal::KernelTooOld {
        missing: "pagemap",
        source,
    })?;
    Ok((memory, RemotePageout::new(open_pidfd(pid)?, presence)))
}

/// Measures the cost of an access to a page that is absent from the page table and present in the page cache.
///
/// # Errors
///
/// As [`measure_trap_cost`].
pub fn measure_fault_cost(toucher: Toucher) -> Result<Duration, TrapError> {
    let pid = std::process::id();
    let failed = |call| move |source| TrapError::Call { pid, call, source };
    let (memory, mut barrier) = own_windows()?;
    let raised = barrier.raise(&[memory.range()]);
    raised.map_err(|source| Refusal::KernelTooOld {
        missing: "process_madvise(MADV_PAGEOUT)",
        source,
    })?;
    let mut accessible = 0;
    barrier
        .for_each_down(memory.range(), &mut |_| accessible += 1)
        .map_err(failed("reading pagemap"))?;
    let tried = memory.range().len_bytes / PAGE_BYTES;
    if accessible * 2 > tried {
        return Err(TrapError::StayedAccessible { tried, accessible });
    }
    let touched = touch(toucher, &memory, WINDOW);
    let mut touches = touched.map_err(failed("touching pages"))?;
    Ok(median(&mut touches.whole))
}

/// Measures the share of its CPU time that a thread loses while pages of its process are unmapped on another CPU: the kernel
/// interrupts it to flush its TLB. Unlike the time for each page, it does not depend on how long the two ran together. Under KVM
/// more is lost, as a vCPU leaves its guest for it. 0 where all threads share one CPU.
pub fn measure_interruption() -> Result<f64, TrapError> {
    let pid = std::process::id();
    let failed = |call| move |source| TrapError::Call { pid, call, source };
    let (memory, mut barrier) = own_windows()?;
    let first = memory.range().start;
    let pages = (0..PAGES).map(|index| AddressRange {
        start: first + (index * WINDOW) as u64 * PAGE_BYTES,
        len_bytes: PAGE_BYTES,
    });
    let pages: Vec<_> = pages.collect();
    let mut losses = Vec::new();
    for _ in 0..TRIES {
        for index in 0..PAGES {
            memory.word(index * WINDOW).fetch_add(1, Ordering::Relaxed);
        }
        let stage = &AtomicU8::new(0);
        let turns_in = move |wanted, count_max| {
            let (start, mut count) = (cpu_time(), 0_u64);
            while stage.load(Ordering::Relaxed) == wanted && count < count_max {
                count += 1;
            }
            Turns {
                count,
                ran: cpu_time().saturating_sub(start),
            }
        };
        let mut unmap = || {
            while stage.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            let raised = barrier.raise(&pages);
            stage.store(2, Ordering::Relaxed);
            raised
        };
        let (raised, turns) = thread::scope(|scope| {
            // A thread of its own, as it stays on one CPU.
            let (sender, receiver) = mpsc::channel();
            let turning = scope.spawn(move || {
                let apart = receiver.recv().is_ok_and(|cpu| leave_cpu(cpu).is_ok());
                let before = turns_in(0, CALM_TURNS);
                stage.store(1, Ordering::Relaxed);
                apart.then(|| [before, turns_in(1, u64::MAX)])
            });
            let unmapping = scope.spawn(|| {
                let cpu = stay_on_this_cpu();
                // Without an answer the other thread turns anywhere, and that does not count.
                let _ = cpu.map(|cpu| sender.send(cpu));
                drop(sender);
                unmap()
            });
            (unmapping.join(), turning.join())
        });
        let panicked = |_| io::Error::other("a thread of the trial panicked");
        let raised = raised.map_err(panicked).flatten();
        raised.map_err(failed("process_madvise(MADV_PAGEOUT)"))?;
        losses.extend(turns.ok().flatten().and_then(loss_share));
    }
    losses.sort_by(f64::total_cmp);
    Ok(losses.get(losses.len() / 2).copied().unwrap_or_default())
}

/// Turns of a loop, and their CPU time.
#[derive(Debug, Clone, Copy)]
struct Turns {
    count: u64,
    ran: Duration,
}

/// Share of its CPU time that a thread lost in its later turns, by the time that its earlier ones took; `None` if it ran too little.
fn loss_share([before, meanwhile]: [Turns; 2]) -> Option<f64> {
    let turn = before.ran.as_secs_f64() / before.count as f64;
    let lost = 1.0 - meanwhile.count as f64 * turn / meanwhile.ran.as_secs_f64();
    (meanwhile.ran >= TOGETHER_MIN && before.count > 0).then(|| lost.max(0.0))
}

/// Measures the cost of the first write to a present page that is protected asynchronously.
pub fn measure_write_fault_cost(toucher: Toucher) -> Result<Duration, TrapError> {
    measure_protection_cost(toucher, UserfaultPurpose::AsyncWriteProtect)
}

/// Measures the cost of the first access to a present page that is protected against every access asynchronously.
pub fn measure_access_fault_cost(toucher: Toucher) -> Result<Duration, TrapError> {
    measure_protection_cost(toucher, UserfaultPurpose::AsyncAccessProtect)
}

fn measure_protection_cost(
    toucher: Toucher,
    purpose: UserfaultPurpose,
) -> Result<Duration, TrapError> {
    let pid = std::process::id();
    let failed = |call| move |source| TrapError::Call { pid, call, source };
    let memory = SharedMemory::new(PAGES).map_err(failed("memfd_create()"))?;
    let userfault = Userfault::open(purpose, [memory.range()])
        .map_err(|source| Refusal::of_missing(purpose.kernel_feature(), source))?;
    let protected = userfault.protect(memory.range());
    protected.map_err(failed("protecting pages"))?;
    let touches = touch(toucher, &memory, 1);
    let mut touches = touches.map_err(failed("touching pages"))?;
    Ok(median(&mut touches.whole))
}

/// Measures what the first access to a page that was marked idle costs more than another one.
pub fn measure_idle_cost(_: Toucher) -> Result<Duration, TrapError> {
    let pid = std::process::id();
    let failed = |call| move |source| TrapError::Call { pid, call, source };
    let marks = IdleMarks::open()?;
    let memory = SharedMemory::new(PAGES).map_err(failed("memfd_create()"))?;
    // Too many pages for a TLB to hold beside them: an access that a TLB serves sets no accessed bit.
    let others = SharedMemory::new(TLB_PAGES).map_err(failed("memfd_create()"))?;
    let measure = || -> io::Result<Duration> {
        for page in 0..TLB_PAGES {
            others.word(page).fetch_add(1, Ordering::Relaxed);
        }
        Ok(median(&mut touch(Toucher::Thread, &memory, 1)?.whole))
    };
    let tried = || -> io::Result<(Duration, usize)> {
        let pagemap = fs::File::open("/proc/self/pagemap")?;
        let first = memory.range().start / PAGE_BYTES;
        let mut heads = Vec::with_capacity(PAGES);
        for page in first..first + PAGES as u64 {
            heads.extend(PagemapEntry(word(&pagemap, page)?).frame());
        }
        heads.sort_unstable();
        let before = measure()?;
        marks.make_idle(&heads)?;
        let mut marked = 0;
        for &head in &heads {
            marked += usize::from(marks.is_idle(head)?);
        }
        Ok((measure()?.saturating_sub(before), marked))
    };
    let (cost, marked) = tried().map_err(failed("marking pages idle"))?;
    // A few cannot be marked, because reclaim does not list them yet.
    if marked * 2 < PAGES {
        let source = io::Error::other(format!("{marked} of {PAGES} pages can be marked"));
        return Err(failed("marking pages idle")(source));
    }
    Ok(cost)
}

/// The upper limit of the shortest quarter.
fn fast(durations: &mut [Duration]) -> Duration {
    durations.sort_unstable();
    durations[durations.len() / 4]
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
        for toucher in [Toucher::Thread, Toucher::KvmVcpu] {
            match measure_trap_cost(HandlerCpu::Follow, toucher) {
                Ok(cost) => {
                    assert!(cost.whole > cost.outside_handler);
                    assert!(cost.whole < Duration::from_millis(50), "{cost:?}");
                    println!("{cost:?}");
                }
                Err(error) if toucher == Toucher::KvmVcpu => {
                    skip(Lack::Kvm, format_args!("no vCPU can trap: {error}"));
                }
                Err(error) => skip(
                    Lack::Userfaultfd,
                    format_args!("no traps on this host: {error}"),
                ),
            }
        }
    }

    #[test]
    fn a_thread_loses_what_it_ran_without_a_turn() {
        let turns = |count, ms| Turns {
            count,
            ran: Duration::from_millis(ms),
        };
        let lost = |meanwhile| Some((loss_share([turns(2000, 2), meanwhile])? * 100.0).round());
        // At 1 µs a turn, of 6 ms of CPU time 2 ms passed without one, or of 3 ms 1 ms.
        assert_eq!(lost(turns(4000, 6)), Some(33.0));
        assert_eq!(lost(turns(2000, 3)), Some(33.0));
        assert_eq!(lost(turns(7000, 6)), Some(0.0));
        // It had no CPU.
        assert_eq!(lost(turns(0, 0)), None);
        assert_eq!(loss_share([turns(0, 0), turns(7000, 6)]), None);
    }

    #[test]
    fn what_a_thread_loses_by_interrupts_is_measured_here() {
        match measure_interruption() {
            Ok(share) => {
                println!("{share}");
                assert!((0.0..1.0).contains(&share));
            }
            Err(error) => skip(Lack::Root, format_args!("no page is unmapped: {error}")),
        }
    }

    #[test]
    fn a_minor_fault_costs_less_than_a_trap() {
        let costs = measure_fault_cost(Toucher::KvmVcpu).and_then(|fault| {
            Ok((
                fault,
                measure_trap_cost(HandlerCpu::Follow, Toucher::KvmVcpu)?,
            ))
        });
        match costs {
            Ok((fault, trap)) => {
                println!("{fault:?} {trap:?}");
                assert!(fault < trap.whole, "{fault:?} {trap:?}");
            }
            Err(error) => skip(Lack::Kvm, format_args!("no vCPU can fault: {error}")),
        }
    }
}
