//! A backend on a VM that may change while it is observed.
//!
//! RAM and virtual CPUs may be added and removed: the backend is then attached anew, so that a period covers the RAM
//! and CPUs that exist at its beginning. While QEMU receives, sends or saves the VM's memory ([`Transfer`]) no backend
//! is attached: a period ends when that begins, the backend detaches at once, and the next period is refused until it
//! is over.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::Period;
use plimsoll_trap::{
    Backend, BackendRow, Refusal, Sink, TouchCost, Toucher, TraceConfig, TrapError,
};
use plimsoll_vm::{QemuVm, Transfer, TransferWatch, VmError};

use crate::target_of;

/// Time limit of an exchange with a monitor.
pub const MONITOR_MAX: Duration = Duration::from_millis(300);
/// Pause after a monitor that did not answer, because it serves another client, such as libvirt, or hangs.
const QUIET: Duration = Duration::from_secs(60);
/// Interval at which the threads of a VM are counted within a period, and inspected if their number changed.
const INTERVAL: Duration = Duration::from_millis(40);
/// Time limit after a failed call for the VM to end or for its change to become visible.
const CHANGE_MAX: Duration = Duration::from_secs(2);

/// A backend that is attached anew when its VM changes.
#[derive(Debug)]
pub struct Follower {
    vm: QemuVm,
    row: &'static BackendRow,
    config: TraceConfig,
    /// `None` while QEMU has exclusive use of the memory.
    backend: Option<Box<dyn Backend>>,
    touch_cost: TouchCost,
    ram_pages: u64,
    periods: u64,
    /// Until this time the monitor is not queried.
    quiet: Option<Instant>,
    watch: TransferWatch,
}

impl Follower {
    /// Attaches to a VM, unless QEMU has exclusive use of its memory.
    pub fn attach(
        vm: &QemuVm,
        row: &'static BackendRow,
        config: &TraceConfig,
    ) -> Result<Self, crate::ObserveError> {
        let mut follower = Self {
            vm: vm.clone(),
            row,
            config: config.clone(),
            backend: None,
            touch_cost: TouchCost {
                time: Duration::ZERO,
                toucher: Toucher::Thread,
            },
            ram_pages: 0,
            periods: 0,
            quiet: None,
            watch: TransferWatch::new(vm.pid),
        };
        let attached = follower.check_transfer().and_then(|()| follower.reattach());
        attached.map_err(|source| crate::ObserveError::Trace {
            vm: vm.id.clone(),
            source,
        })?;
        Ok(follower)
    }

    /// Refuses while QEMU has exclusive use of the memory; detaches first.
    fn check_transfer(&mut self) -> Result<(), TrapError> {
        let monitor = self.quiet.is_none_or(|until| Instant::now() >= until);
        let transfer = self.vm.transfer(monitor.then_some(MONITOR_MAX));
        let transfer = transfer.unwrap_or_else(|error| {
            if !matches!(error, VmError::QmpConnect { .. }) {
                self.quiet = Some(Instant::now() + QUIET);
            }
            None
        });
        let Some(transfer) = transfer else {
            return Ok(());
        };
        let was_attached = self.ram_pages > 0;
        // Dropping a backend restores the VM.
        self.backend = None;
        let refusal = Refusal::MemoryTransfer {
            why: transfer.to_string(),
        };
        Err(if was_attached {
            TrapError::Interrupted(refusal)
        } else {
            TrapError::Refused(refusal)
        })
    }

    /// Whether RAM or CPUs were added or removed; updates the VM's description.
    fn has_changed(&mut self) -> bool {
        // The backend notices if the VM has ended.
        let Ok(now) = QemuVm::of_pid(self.vm.pid) else {
            return false;
        };
        let is_same = now.start_ticks == self.vm.start_ticks;
        let changed = is_same && (&now.ram, &now.vcpus) != (&self.vm.ram, &self.vm.vcpus);
        if changed {
            self.vm = now;
        }
        changed
    }

    fn reattach(&mut self) -> Result<(), TrapError> {
        self.backend = None;
        let pid = self.vm.pid;
        let target = target_of(&self.vm).map_err(|_| TrapError::VmGone { pid })?;
        let backend = self.row.attach(&target, &self.config)?;
        (self.touch_cost, self.ram_pages) = (backend.touch_cost(), backend.ram_pages());
        self.backend = Some(backend);
        Ok(())
    }

    /// Determines the cause of a failed call: the VM has ended, or changed, or neither; and of a foreign userfaultfd. After
    /// a failed call, no backend is attached.
    fn explain(&mut self, error: TrapError) -> TrapError {
        let pid = self.vm.pid;
        if let TrapError::Interrupted(Refusal::UserfaultInUse) = error {
            self.backend = None;
            let why = Transfer::of_threads(pid).map(|transfer| transfer.to_string());
            return why.map_or(error, |why| {
                TrapError::Interrupted(Refusal::MemoryTransfer { why })
            });
        }
        if !matches!(error, TrapError::Call { .. }) {
            return error;
        }
        // First, so that the VM can continue.
        self.backend = None;
        let deadline = Instant::now() + CHANGE_MAX;
        while Instant::now() < deadline {
            if matches!(QemuVm::of_pid(pid), Err(VmError::NoSuchProcess { .. })) {
                return TrapError::VmGone { pid };
            }
            if self.has_changed() {
                return TrapError::RamChanged { pid };
            }
            thread::sleep(INTERVAL);
        }
        error
    }
}

impl Backend for Follower {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        self.check_transfer()?;
        if self.has_changed() || self.backend.is_none() {
            let before = std::mem::take(&mut self.ram_pages);
            self.reattach()?;
            if self.ram_pages != before {
                // Before a page is observed that the estimators do not expect.
                return Err(TrapError::RamChanged { pid: self.vm.pid });
            }
        }
        let pid = self.vm.pid;
        let Some(backend) = &mut self.backend else {
            return Err(TrapError::VmGone { pid });
        };
        let (interrupted, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let is_moving = AtomicBool::new(false);
        let watch = &mut self.watch;
        let ran = thread::scope(|scope| {
            let inspect = || {
                while !is_over.load(Ordering::Acquire) {
                    let moving = watch.check().is_some();
                    is_moving.fetch_or(moving, Ordering::Relaxed);
                    if moving || stop.load(Ordering::Relaxed) {
                        interrupted.store(true, Ordering::Relaxed);
                    }
                    thread::park_timeout(INTERVAL);
                }
            };
            let inspector = scope.spawn(inspect);
            let ran = backend.run_period(&interrupted, sink);
            is_over.store(true, Ordering::Release);
            inspector.thread().unpark();
            ran
        });
        if is_moving.load(Ordering::Relaxed) {
            self.backend = None;
        }
        let mut period = ran.map_err(|error| self.explain(error))?;
        period.index = self.periods;
        self.periods += 1;
        Ok(period)
    }

    fn detach(mut self: Box<Self>) -> Result<(), TrapError> {
        self.backend.take().map_or(Ok(()), Backend::detach)
    }

    fn touch_cost(&self) -> TouchCost {
        self.touch_cost
    }

    fn ram_pages(&self) -> u64 {
        self.ram_pages
    }
}
