//! The working set of one running VM by every available method, with the cost and the duration of each.
//!
//! The methods that observe from outside would disturb each other, so they run one after another; results for a VM
//! whose needs change meanwhile are not comparable. A method that is not available here reports the reason. Figures are
//! of two kinds: pages that were used, and sizes of the whole VM, including the guest's kernel (ε of \[PRL\] §4.4).
//!
//! | method | observes | file |
//! |---|---|---|
//! | Committed_AS, memory in use | the guest's own statistics | `inside` |
//! | curve at 5 %, accessed-page scan, write scan, sampling | pages, from outside | `outside` |
//! | Zballoond | what the guest misses while its balloon grows | `shrink` |
//! | Geiger, PRL, PML | records of the disk's daemon and of the page log | `recorded` |
//!
//! Not here: the estimators; output of the figures (`plimsoll report wss --compare`).

mod inside;
mod outside;
mod recorded;
mod shrink;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::WorkingSetBound;
use plimsoll_vm::QemuVm;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

pub use inside::truth_of_console;

/// Polling interval.
const POLL: Duration = Duration::from_millis(50);

/// Settings of the methods.
#[derive(Debug, Clone)]
pub struct Options {
    /// Length of a round.
    pub interval: Duration,
    /// Rounds of each method that works in rounds, from 1.
    pub rounds: u32,
    /// Maximum share of the VM's CPU time that tracing or scanning may take, above 0.0 and at most 1.0.
    pub budget: f64,
    /// Number of pages in a sample.
    pub sample_pages: usize,
    /// Whether memory may be reclaimed from the VM, to find the size at which it begins to miss.
    pub shrink: Option<ShrinkOptions>,
    /// A file that receives the console of a workload guest.
    pub console: Option<PathBuf>,
    /// A page log of this VM.
    pub page_log: Option<PathBuf>,
    /// The admin socket of the daemon under the VM's disk; `None` for the one beside the disk's socket.
    pub disk: Option<PathBuf>,
}

/// How memory is reclaimed.
#[derive(Debug, Clone)]
pub struct ShrinkOptions {
    /// Observation time of the VM at each size.
    pub step: Duration,
    /// Minimum size of the VM.
    pub floor_bytes: u64,
}

/// A working set reported by a method.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figure {
    /// The working set.
    pub bytes: u64,
    /// Lower limit of its 95 % confidence interval, if the method has one.
    pub low_bytes: Option<u64>,
    /// Upper limit of the same interval.
    pub high_bytes: Option<u64>,
    /// Whether the size is an estimate or a bound.
    pub bound: WorkingSetBound,
}

impl Figure {
    fn new(bytes: u64) -> Self {
        Self {
            bytes,
            low_bytes: None,
            high_bytes: None,
            bound: WorkingSetBound::Estimate,
        }
    }

    fn bound(self, bound: WorkingSetBound) -> Self {
        Self { bound, ..self }
    }
}

/// The result of a method.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Answer {
    /// Name of the method.
    pub estimator: &'static str,
    /// What it observes.
    pub sees: &'static str,
    /// Whether its figure is a size of the whole VM, including the guest's kernel.
    pub whole_vm: bool,
    /// The figure.
    pub working_set: Option<Figure>,
    /// Why there is no figure, or no better one.
    pub not_available: Option<String>,
    /// Duration.
    pub seconds: f64,
    /// CPU time used by this process.
    pub cpu_seconds: f64,
    /// Share of the VM's own time that was taken; `None` if that is not measured.
    pub overhead_ratio: Option<f64>,
    /// The figure of each single round, in order.
    pub rounds_bytes: Vec<u64>,
    /// Remarks.
    pub note: Option<String>,
}

/// A method before it runs.
#[derive(Clone, Copy)]
struct Method {
    estimator: &'static str,
    sees: &'static str,
    whole_vm: bool,
}

/// Fails if another program manages the memory of a VM, which is given by its name and process id.
pub type ManagedCheck<'a> = &'a dyn Fn(&str, u32) -> anyhow::Result<()>;

/// Runs every method in turn and passes each answer to `each`. Once `stop` is set, the remaining ones report that.
/// `refuse_managed` is called before memory is reclaimed from the VM.
///
/// The VM is unchanged when this returns: reclaimed memory is given back, also after an error.
pub fn compare(
    vm: &QemuVm,
    options: &Options,
    refuse_managed: ManagedCheck<'_>,
    stop: &AtomicBool,
    each: &mut dyn FnMut(Answer),
) {
    let subject = Subject {
        vm,
        options,
        refuse_managed,
        stop,
    };
    let methods: [fn(&Subject<'_>) -> Answer; 10] = [
        inside::committed,
        inside::in_use,
        recorded::geiger,
        outside::curve,
        outside::accessed,
        outside::written,
        outside::sampled,
        recorded::prl,
        recorded::pml,
        shrink::zballoond,
    ];
    for method in methods {
        each(method(&subject));
    }
}

/// The inputs of all methods.
struct Subject<'a> {
    vm: &'a QemuVm,
    options: &'a Options,
    refuse_managed: ManagedCheck<'a>,
    stop: &'a AtomicBool,
}

impl Subject<'_> {
    /// Runs a method and measures its time.
    fn run(&self, method: Method, find: impl FnOnce(&mut Answer) -> anyhow::Result<()>) -> Answer {
        let mut answer = Answer {
            estimator: method.estimator,
            sees: method.sees,
            whole_vm: method.whole_vm,
            ..Answer::default()
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

    /// Waits; returns false if it was stopped.
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

/// CPU time of this process so far, of all its threads.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}
