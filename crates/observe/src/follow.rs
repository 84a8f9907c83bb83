//! A backend on a VM, a process or a control group that may change while it is observed.
//!
//! The memory of a process changes all the time, and executing another program exchanges it; groups come and go below a
//! control group. Their backend covers in each period what there is at its beginning.
//!
//! RAM and virtual CPUs may be added and removed: the backend is then attached anew, so that a period covers the RAM
//! and CPUs that exist at its beginning. While QEMU receives, sends or saves the VM's memory ([`Transfer`]) no backend
//! is attached: a period ends when that begins, with an error because QEMU's accesses may be among those observed, the backend
//! detaches at once, and the next period is refused until it is over.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::{PageCount, PageSize, Period};
use plimsoll_trap::{
    Backend, BackendRow, Observation, Refusal, Sink, TouchCost, Toucher, TraceConfig, TrapError,
};
use plimsoll_vm::{HostMemory, MemoryGroup, RamState, Target, Transfer, TransferWatch, VmError};

use crate::{group_of, pid_of, process_target, target_of};

/// Time limit of an exchange with a monitor.
pub const MONITOR_MAX: Duration = Duration::from_millis(300);
/// Pause after a monitor that did not answer, because it serves another client, such as libvirt, or hangs.
const QUIET: Duration = Duration::from_secs(60);
/// Interval at which the threads of a VM are counted within a period, and inspected if their number changed.
const INTERVAL: Duration = Duration::from_millis(40);
/// Longest time between two inspections of a VM whose process looks as it did.
const INSPECTION_MAX: Duration = Duration::from_secs(5);
/// Time limit after a failed call for the VM to end or for its change to become visible.
const CHANGE_MAX: Duration = Duration::from_secs(2);
/// Longest wait in a period for the removal of a control group whose last process has ended.
const REMOVAL_MAX: Duration = Duration::from_secs(1);
/// Number of changes of a process's memory while a backend attaches to it.
const CHANGES_MAX: u32 = 5;

/// A backend that is attached anew when its VM changes.
#[derive(Debug)]
pub struct Follower {
    target: Target,
    row: &'static BackendRow,
    config: TraceConfig,
    /// `None` while QEMU has exclusive use of the memory.
    backend: Option<Box<dyn Backend>>,
    touch_cost: TouchCost,
    ram_pages: u64,
    periods: u64,
    /// Until this time the monitor is not queried.
    quiet: Option<Instant>,
    /// Of a VM.
    watch: Option<TransferWatch>,
    /// When a VM was inspected last, and its process's extent before that.
    inspected: Option<(Instant, [u64; 2])>,
}

impl Follower {
    /// Attaches, unless QEMU has exclusive use of a VM's memory.
    pub fn attach(
        target: &Target,
        row: &'static BackendRow,
        config: &TraceConfig,
    ) -> Result<Self, crate::ObserveError> {
        let mut follower = Self {
            target: target.clone(),
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
            watch: target.vm().map(|vm| TransferWatch::new(vm.pid)),
            inspected: None,
        };
        let mut attached = follower.check_transfer().and_then(|()| follower.reattach());
        for _ in 1..CHANGES_MAX {
            if target.vm().is_some() || attached.is_ok() {
                break;
            }
            // The memory of a process may change at any time.
            attached = match attached.map_err(|error| follower.explain(error)) {
                Err(TrapError::RamChanged { .. }) => {
                    follower.has_changed();
                    follower.reattach()
                }
                other => other,
            };
        }
        attached.map_err(|source| crate::ObserveError::Trace {
            target: target.to_string(),
            source,
        })?;
        Ok(follower)
    }

    /// Refuses while QEMU has exclusive use of the memory; detaches first.
    fn check_transfer(&mut self) -> Result<(), TrapError> {
        let Target::Vm(vm) = &self.target else {
            return Ok(());
        };
        let monitor = self.quiet.is_none_or(|until| Instant::now() >= until);
        let transfer = vm.transfer(monitor.then_some(MONITOR_MAX));
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

    /// The error of a target that has ended.
    fn gone(&self) -> TrapError {
        match &self.target {
            Target::Vm(vm) => TrapError::VmGone { pid: vm.pid },
            Target::Process(process) => TrapError::ProcessGone {
                pid: process.process.pid,
            },
            Target::Group(group) => TrapError::GroupGone {
                directory: group.directory.clone(),
            },
        }
    }

    /// Whether memory or CPUs were added or removed, as far as it can be inspected; updates the target's description.
    fn has_changed(&mut self) -> bool {
        let now = self.target.refreshed();
        now.is_ok_and(|now| self.update(now))
    }

    /// Whether a VM's process looks as it did when it was inspected, not long ago: reading its memory map takes milliseconds.
    fn is_as_inspected(&mut self) -> bool {
        let Some(vm) = self.target.vm() else {
            return false;
        };
        let extent = vm.process().extent();
        let is_same = self
            .inspected
            .is_some_and(|(at, before)| extent == Some(before) && at.elapsed() < INSPECTION_MAX);
        if !is_same {
            self.inspected = extent.map(|extent| (Instant::now(), extent));
        }
        is_same
    }

    /// Takes over the target's description; whether memory or CPUs were added or removed.
    fn update(&mut self, now: Target) -> bool {
        let changed = match (&now, &self.target) {
            (Target::Vm(now), Target::Vm(vm)) => (&now.ram, &now.vcpus) != (&vm.ram, &vm.vcpus),
            (Target::Process(now), Target::Process(process)) => now.ram != process.ram,
            (Target::Group(now), Target::Group(group)) => now.inodes != group.inodes,
            _ => true,
        };
        // The processes of a group may be others without a change of what is observed.
        if changed || matches!(now, Target::Group(_)) {
            self.target = now;
        }
        changed
    }

    /// Observes what a process or a control group has by now: returns whether the backend can do that as it is; otherwise
    /// attaches anew.
    fn keep_up(&mut self) -> Result<bool, TrapError> {
        let kept = match (&self.target, &mut self.backend) {
            (Target::Process(process), Some(backend)) => {
                backend.follow(&process_target(process, RamState::default()))?
            }
            (Target::Group(group), Some(backend)) => {
                backend.follow_group(&group_of(group));
                true
            }
            _ => false,
        };
        if !kept {
            self.reattach()?;
        }
        Ok(kept)
    }

    fn reattach(&mut self) -> Result<(), TrapError> {
        self.backend = None;
        let backend = match &self.target {
            Target::Group(group) => self.row.attach_group(&group_of(group), &self.config)?,
            target => {
                let target = target_of(target).map_err(|_| self.gone())?;
                self.row.attach(&target, &self.config)?
            }
        };
        if let Target::Process(process) = &self.target
            && !process.process.is_there()
        {
            return Err(self.gone());
        }
        self.touch_cost = backend.touch_cost();
        self.ram_pages = match self.target {
            Target::Vm(_) => backend.ram_pages(),
            // Whatever it grows to.
            Target::Process(_) | Target::Group(_) => HostMemory::read().map_or_else(
                |_| backend.ram_pages(),
                |host| PageCount::from_bytes(host.total_bytes, PageSize::FOUR_KIB).0,
            ),
        };
        self.backend = Some(backend);
        Ok(())
    }

    /// Determines the cause of a failed call: the VM has ended, or changed, or neither; and of a foreign userfaultfd. After
    /// a failed call, no backend is attached.
    fn explain(&mut self, error: TrapError) -> TrapError {
        if let Target::Group(_) = self.target {
            return error;
        }
        let pid = pid_of(&self.target);
        if let TrapError::VmGone { .. } = error {
            // It also looks like an end when a thread other than the first executes another program.
            return match (&self.target, self.target.refreshed()) {
                (Target::Process(_), Ok(now)) => {
                    (self.target, self.backend) = (now, None);
                    TrapError::RamChanged { pid }
                }
                _ => self.gone(),
            };
        }
        if let TrapError::Interrupted(Refusal::UserfaultInUse) = error {
            self.backend = None;
            let why = Transfer::of_threads(pid).map(|transfer| transfer.to_string());
            return why.map_or(error, |why| {
                TrapError::Interrupted(Refusal::MemoryTransfer { why })
            });
        }
        if let TrapError::Interrupted(_) = error {
            // First, so that the VM can continue.
            self.backend = None;
        }
        // While such a thread ends the first one, into which calls are injected, that cannot be traced.
        let is_of_thread = matches!(
            error,
            TrapError::Injection { .. } | TrapError::Refused(Refusal::NoPrivilege { .. })
        );
        let may_execute = is_of_thread && self.target.vm().is_none() && self.periods > 0;
        if !may_execute && !matches!(error, TrapError::Call { .. }) {
            return error;
        }
        // First, so that the VM can continue.
        self.backend = None;
        let deadline = Instant::now() + CHANGE_MAX;
        while Instant::now() < deadline {
            if matches!(self.target.refreshed(), Err(VmError::NoSuchProcess { .. })) {
                return self.gone();
            }
            if self.has_changed() {
                return TrapError::RamChanged { pid };
            }
            thread::sleep(INTERVAL);
        }
        // A process that executes another program has no memory for a moment.
        match self.target.refreshed() {
            Err(VmError::NoMemory { .. }) => self.gone(),
            _ => error,
        }
    }
}

/// Whether a group was removed. If the last of its processes has ended, that may follow: it is waited for, `patience` in all.
fn is_removed(group: &MemoryGroup, patience: &mut Duration) -> bool {
    loop {
        match group.refreshed() {
            Err(_) => return true,
            Ok(now) if !now.processes.is_empty() || group.processes.is_empty() => return false,
            Ok(_) if patience.is_zero() => return false,
            Ok(_) => {
                let pause = INTERVAL.min(*patience);
                thread::sleep(pause);
                *patience -= pause;
            }
        }
    }
}

impl Backend for Follower {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        self.check_transfer()?;
        let has_changed = !self.is_as_inspected()
            && match (self.target.refreshed(), &self.target) {
                (Ok(now), _) => self.update(now),
                (Err(_), Target::Group(_)) => return Err(self.gone()),
                // The backend notices if it has ended.
                (Err(_), Target::Vm(_) | Target::Process(_)) => false,
            };
        if has_changed || self.backend.is_none() {
            let before = std::mem::take(&mut self.ram_pages);
            let kept = self.keep_up();
            if kept.map_err(|error| self.explain(error))? {
                self.ram_pages = before;
            }
            if let Target::Vm(vm) = &self.target
                && self.ram_pages != before
            {
                // Before a page is observed that the estimators do not expect.
                return Err(TrapError::RamChanged { pid: vm.pid });
            }
        }
        let gone = self.gone();
        let Some(backend) = &mut self.backend else {
            return Err(gone);
        };
        let interrupted = AtomicBool::new(false);
        let moving = OnceLock::new();
        let (watch, target) = (&mut self.watch, &self.target);
        // A group that is removed gave its memory back before: samples of it then do not show what it used.
        let mut has_ended = false;
        let mut removal_max = REMOVAL_MAX;
        let mut observe = |seen: &Observation<'_>| {
            has_ended = match (target, seen) {
                (Target::Group(group), Observation::FirstTouches { .. }) => {
                    is_removed(group, &mut removal_max)
                }
                _ => false,
            };
            // QEMU reads the memory as well.
            if !has_ended && moving.get().is_none() {
                sink(seen);
            }
        };
        let (period_runs, over) = mpsc::channel::<()>();
        let ran = thread::scope(|scope| {
            // Dropped also when the backend panics: the scope waits for its thread.
            let _period_runs = period_runs;
            scope.spawn(|| {
                let period_is_over = over;
                loop {
                    if let Some(transfer) = watch.as_mut().and_then(TransferWatch::check) {
                        let _ = moving.set(transfer.to_string());
                    }
                    if moving.get().is_some() || stop.load(Ordering::Relaxed) {
                        interrupted.store(true, Ordering::Relaxed);
                    }
                    if period_is_over.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Disconnected)
                    {
                        break;
                    }
                }
            });
            backend.run_period(&interrupted, &mut observe)
        });
        if has_ended {
            return Err(gone);
        }
        if moving.get().is_some() {
            self.backend = None;
        }
        let mut period = ran.map_err(|error| self.explain(error))?;
        if let Some(why) = moving.into_inner() {
            // Of this period it is not known which touches are the VM's.
            return Err(TrapError::Interrupted(Refusal::MemoryTransfer { why }));
        }
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;
    use std::panic::{self, AssertUnwindSafe};
    use std::path::PathBuf;

    use plimsoll_flow::{FirstTouches, ReferenceBatch, Timestamp};
    use plimsoll_trap::BACKENDS;
    use plimsoll_vm::CgroupVersion;

    use super::*;

    const COST: TouchCost = TouchCost {
        time: Duration::ZERO,
        toucher: Toucher::Thread,
    };

    /// A backend that samples a control group, which may be removed before or, with a pause, after that.
    #[derive(Debug)]
    struct Sampler {
        removed: Option<(PathBuf, Duration)>,
        /// Its list of processes, of which the last one ends.
        members: Option<PathBuf>,
    }

    impl Backend for Sampler {
        fn run_period(&mut self, _: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
            if let Some(members) = &self.members {
                fs::write(members, "").unwrap();
            }
            let remover = self.removed.take().map(|(directory, pause)| {
                thread::spawn(move || {
                    thread::sleep(pause);
                    fs::remove_dir_all(directory).unwrap();
                })
            });
            while self.members.is_none() && remover.as_ref().is_some_and(|it| !it.is_finished()) {
                thread::yield_now();
            }
            let time = Timestamp {
                vm: Duration::ZERO,
                wall: Duration::ZERO,
            };
            sink(&Observation::FirstTouches {
                samples: FirstTouches {
                    ended: &[],
                    waiting: &[],
                    from: time,
                    now: time,
                    population_pages: 0,
                },
                touched: &ReferenceBatch::default(),
            });
            if let Some(remover) = remover {
                remover.join().unwrap();
            }
            Err(TrapError::Refused(Refusal::Locked))
        }

        fn detach(self: Box<Self>) -> Result<(), TrapError> {
            Ok(())
        }

        fn touch_cost(&self) -> TouchCost {
            COST
        }

        fn ram_pages(&self) -> u64 {
            0
        }
    }

    /// Of a control group.
    fn follower(directory: PathBuf, backend: Sampler) -> Follower {
        let inode = fs::metadata(&directory).unwrap().ino();
        Follower {
            target: Target::Group(MemoryGroup {
                directory,
                version: CgroupVersion::V2,
                inode,
                inodes: vec![inode],
                processes: Vec::new(),
            }),
            row: BACKENDS[0],
            config: TraceConfig::default(),
            backend: Some(Box::new(backend)),
            touch_cost: COST,
            ram_pages: 0,
            periods: 0,
            quiet: None,
            watch: None,
            inspected: None,
        }
    }

    #[test]
    fn a_period_that_panics_ends() {
        let root = tempfile::tempdir().unwrap();
        let backend = Sampler {
            removed: None,
            members: None,
        };
        let mut follower = follower(root.path().to_owned(), backend);
        let (ended, end) = mpsc::channel();
        thread::spawn(move || {
            let period = panic::catch_unwind(AssertUnwindSafe(|| {
                follower.run_period(&AtomicBool::new(false), &mut |_| panic!("on purpose"))
            }));
            ended.send(period.is_err())
        });
        assert_eq!(end.recv_timeout(Duration::from_secs(30)), Ok(true));
    }

    #[test]
    fn the_samples_of_a_group_that_was_removed_are_not_what_it_used() {
        let later = Duration::from_millis(300);
        // With a process that has ended, the removal is waited for.
        for (removed_after, had_process) in [
            (None, false),
            (None, true),
            (Some(Duration::ZERO), false),
            (Some(later), true),
        ] {
            let is_removed = removed_after.is_some();
            let root = tempfile::tempdir().unwrap();
            let directory = root.path().join("web");
            fs::create_dir(&directory).unwrap();
            let members = had_process.then(|| directory.join("cgroup.procs"));
            if let Some(members) = &members {
                fs::write(members, "1\n").unwrap();
            }
            let backend = Sampler {
                removed: removed_after.map(|after| (directory.clone(), after)),
                members,
            };
            let mut follower = follower(directory, backend);
            let mut seen = 0;
            let ran = follower.run_period(&AtomicBool::new(false), &mut |_| seen += 1);
            let is_gone = matches!(ran, Err(TrapError::GroupGone { .. }));
            assert_eq!(
                (is_gone, seen),
                (is_removed, u32::from(!is_removed)),
                "{ran:?}"
            );
        }
    }
}
