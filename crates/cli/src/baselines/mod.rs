//! The working set of one running VM by every way there is, with what each cost and how long it took.
//!
//! The ways that look from outside would see each other's doings, so they take turns; a VM whose needs change meanwhile is
//! judged unfairly. What a way cannot say here it says why. Figures are of two kinds: pages that were used, and
//! sizes of the whole VM, in which the guest's kernel is (ε of \[PRL\] §4.4).
//!
//! | way | looks at | file |
//! |---|---|---|
//! | Committed_AS, memory in use | the guest's own words | `inside` |
//! | curve at 5 %, presence scan, write scan, sampling | pages, from outside | `outside` |
//! | Zballoond | what the guest misses while its balloon grows | `shrink` |
//! | Geiger, PRL, PML | what the disk's daemon and the page log recorded | `recorded` |
//!
//! Not here: any estimator; how the figures are written (`plimsoll report wss --compare`).

mod inside;
mod outside;
mod recorded;
mod shrink;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_vm::QemuVm;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

pub use inside::truth_of_console;

/// Time between two looks at something that tells of no change.
const POLL: Duration = Duration::from_millis(50);

/// How a VM is asked.
#[derive(Debug, Clone)]
pub struct Options {
    /// Length of a round.
    pub interval: Duration,
    /// Rounds of each way that has any, from 1.
    pub rounds: u32,
    /// Most that tracing or scanning may take of the VM's CPU time, above 0.0 and at most 1.0.
    pub budget: f64,
    /// Pages of a sample.
    pub sample_pages: usize,
    /// Whether memory may be taken from the VM, to see when it misses it.
    pub shrink: Option<ShrinkOptions>,
    /// A file that gets the console of a workload guest.
    pub console: Option<PathBuf>,
    /// A page log of this VM.
    pub page_log: Option<PathBuf>,
    /// The admin socket of the daemon under the VM's disk; `None`: looked for beside the disk's socket.
    pub disk: Option<PathBuf>,
}

/// How memory is taken.
#[derive(Debug, Clone, Copy)]
pub struct ShrinkOptions {
    /// How long the VM is watched at each size.
    pub step: Duration,
    /// The VM never gets a smaller size.
    pub floor_bytes: u64,
}

/// A figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Found {
    /// The working set.
    pub bytes: u64,
    /// Bounds between which it lies with 95 % confidence, where the way states any.
    pub low_bytes: Option<u64>,
    /// The upper one.
    pub high_bytes: Option<u64>,
    /// `estimate`, `at_least` or `at_most`.
    pub bound: &'static str,
}

impl Found {
    fn new(bytes: u64) -> Self {
        Self {
            bytes,
            low_bytes: None,
            high_bytes: None,
            bound: "estimate",
        }
    }

    fn bound(self, bound: &'static str) -> Self {
        Self { bound, ..self }
    }
}

/// What a way says of a VM.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    /// Name of the way.
    pub estimator: &'static str,
    /// What it looks at.
    pub sees: &'static str,
    /// Whether its figure is a size of the whole VM, the guest's kernel included.
    pub whole_vm: bool,
    /// The figure.
    pub working_set: Option<Found>,
    /// Why there is none, or no better one.
    pub not_available: Option<String>,
    /// How long it took.
    pub seconds: f64,
    /// CPU time of this process that it took.
    pub cpu_seconds: f64,
    /// Share of the VM's own time that it took; `None` where nobody measures that.
    pub overhead_ratio: Option<f64>,
    /// The figure of each round alone, in order.
    pub rounds_bytes: Vec<u64>,
    /// What else a reader should know.
    pub note: Option<String>,
}

/// A way before it is gone.
#[derive(Clone, Copy)]
struct Way {
    estimator: &'static str,
    sees: &'static str,
    whole_vm: bool,
}

/// What all ways look at.
struct Subject<'a> {
    vm: &'a QemuVm,
    options: &'a Options,
    stop: &'a AtomicBool,
}

impl Subject<'_> {
    /// Goes a way and takes the time.
    fn go(&self, way: Way, find: impl FnOnce(&mut Answer) -> anyhow::Result<()>) -> Answer {
        let mut answer = Answer {
            estimator: way.estimator,
            sees: way.sees,
            whole_vm: way.whole_vm,
            working_set: None,
            not_available: None,
            seconds: 0.0,
            cpu_seconds: 0.0,
            overhead_ratio: None,
            rounds_bytes: Vec::new(),
            note: None,
        };
        let (start, cpu) = (Instant::now(), cpu_time());
        if let Err(error) = find(&mut answer) {
            answer.not_available = Some(plimsoll_output::exit::with_causes(error.as_ref()));
        }
        answer.seconds = start.elapsed().as_secs_f64();
        answer.cpu_seconds = cpu_time().saturating_sub(cpu).as_secs_f64();
        answer
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Waits, unless it is to stop; false if so.
    fn wait(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        while !self.stopped() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(POLL));
        }
        false
    }
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Asks every way in turn, and hands each answer to `each` when it is there. Once `stop` is set, those left say so.
///
/// The VM is as it was when this returns: a size that was taken is given back, whatever went wrong.
pub fn compare(vm: &QemuVm, options: &Options, stop: &AtomicBool, each: &mut dyn FnMut(Answer)) {
    let subject = Subject { vm, options, stop };
    let ways: [fn(&Subject<'_>) -> Answer; 10] = [
        inside::committed,
        inside::in_use,
        recorded::geiger,
        outside::curve,
        outside::presence,
        outside::written,
        outside::sampled,
        recorded::prl,
        recorded::pml,
        shrink::zballoond,
    ];
    for way in ways {
        each(way(&subject));
    }
}
