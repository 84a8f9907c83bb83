//! Zballoond on a running VM: its balloon reclaims memory until the guest begins to miss pages; then the memory is
//! given back.
//!
//! The rule is [`Refault`]. Misses are reported by the guest's kernel (refaults of files, swap-ins), otherwise by its
//! balloon (major faults, swap-ins). The VM starts at the memory committed to its processes or in use, whichever is
//! larger. It never gets a target for which the guest, by its own statistics, has neither memory nor swap to make room:
//! a guest without swap keeps its reserve, and its figure is an upper bound.
//!
//! The balloon is changed only through the crate `plimsoll-actuator`, and never concurrently with plimsolld: a VM whose
//! memory it manages is refused ([`ManagedCheck`](super::ManagedCheck)).
//!
//! The VM's former size is restored at the end, after an error and after a signal, but not if this process is killed or
//! receives a second signal.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use plimsoll_actuator::{Absence, Balloon, BalloonSettings, MemoryPart as _, Progress};
use plimsoll_estimator::working_set::{Refault, RefaultObservation, RefaultOptions};
use plimsoll_flow::{PageCount, PageSize, VmId, WorkingSetBound};
use plimsoll_vm::{KernelMemory, QemuVm};

use super::inside::{BalloonStats, PATIENCE, console_end, kernel_memory, kernel_memory_past};
use super::{Answer, Figure, Method, POLL, Subject};
use plimsoll_protocol::size::ByteSize;

/// Memory that a step leaves to the guest.
const RESERVE_BYTES: u64 = 16 << 20;
/// Misses in a step that count as none, because a kernel never stops reading entirely.
const QUIET_PAGES: u64 = 16;
/// Time limit for the guest to return to its former size.
const RETURN_MAX: Duration = Duration::from_secs(60);
/// Tolerance as a share of the size, because balloons move in blocks.
const SLACK: f64 = 0.01;
/// Maximum number of attempts to restore a VM's size.
const TRIES: u32 = 4;
/// Maximum time without a report of the guest after a step.
const SILENCE_MAX: Duration = Duration::from_secs(15);

fn pages(bytes: u64) -> PageCount {
    PageCount::from_bytes(bytes, PageSize::FOUR_KIB)
}

/// A VM that is temporarily shrunk through its balloon. On drop, its former size is set as target again.
struct ShrunkVm {
    vm: VmId,
    balloon: Balloon,
    former_bytes: u64,
    returned: bool,
}

impl ShrunkVm {
    fn of(vm: &QemuVm) -> anyhow::Result<Self> {
        let settings = BalloonSettings {
            timeout: PATIENCE,
            // The statistics are read, and their interval restored, by `BalloonStats`.
            stats_interval_s: 0,
            ..BalloonSettings::default()
        };
        let mut shrunk = Self {
            vm: vm.id.clone(),
            balloon: Balloon::new(
                vm.id.clone(),
                vm.monitor_sockets(),
                vm.memory_bytes,
                settings,
            ),
            former_bytes: 0,
            // No memory has been taken yet.
            returned: true,
        };
        shrunk.former_bytes = shrunk.size()?;
        ensure!(
            shrunk.balloon.part().progress != Progress::Absent(Absence::NoDevice),
            "the VM has no balloon"
        );
        shrunk.returned = false;
        Ok(shrunk)
    }

    fn size(&mut self) -> anyhow::Result<u64> {
        self.balloon.query()?;
        Ok(self.balloon.part().actual_bytes)
    }

    /// Sets the former size as target. The monitor may be in use, because it serves one client at a time.
    fn return_memory(&mut self) -> anyhow::Result<()> {
        let mut tries = TRIES;
        loop {
            match self.balloon.set(self.former_bytes) {
                Ok(()) => {
                    self.returned = true;
                    return Ok(());
                }
                Err(error) if tries == 1 => return Err(error.into()),
                Err(_) => {
                    tries -= 1;
                    std::thread::sleep(POLL);
                }
            }
        }
    }

    /// Gives all memory back and waits until the VM has it; returns the size reached.
    fn give_back(mut self) -> anyhow::Result<u64> {
        self.return_memory().with_context(|| {
            format!(
                "the VM's former size of {} could not be restored",
                ByteSize(self.former_bytes).rounded()
            )
        })?;
        let deadline = Instant::now() + RETURN_MAX;
        loop {
            match self.size() {
                Ok(size) if is_near(size, self.former_bytes) || Instant::now() >= deadline => {
                    return Ok(size);
                }
                // The monitor may be in use.
                Err(error) if Instant::now() >= deadline => return Err(error),
                _ => std::thread::sleep(POLL),
            }
        }
    }
}

fn is_near(size: u64, former: u64) -> bool {
    size as f64 >= former as f64 * (1.0 - SLACK)
}

impl Drop for ShrunkVm {
    fn drop(&mut self) {
        if !self.returned
            && let Err(error) = self.return_memory()
        {
            eprintln!(
                "plimsoll: VM {} was left with a smaller balloon target: {error:#}; its size was {} bytes",
                self.vm, self.former_bytes
            );
        }
    }
}

/// The guest's statistics at the end of a step.
struct StepStats {
    /// Pages missed since it booted.
    missed: u64,
    /// Memory that it could release, without and with its swap.
    available_bytes: u64,
    spare_bytes: u64,
    committed_bytes: Option<u64>,
}

impl From<KernelMemory> for StepStats {
    fn from(memory: KernelMemory) -> Self {
        Self {
            missed: memory
                .refaulted_pages
                .saturating_add(memory.swapped_in_pages),
            available_bytes: memory.available_bytes,
            spare_bytes: memory
                .available_bytes
                .saturating_add(memory.swap_free_bytes),
            committed_bytes: Some(memory.committed_bytes),
        }
    }
}

/// Queries the guest's statistics: without `balloon` from its console after `end`, or from its agent.
fn query(
    subject: &Subject<'_>,
    balloon: Option<&mut BalloonStats>,
    end: u64,
) -> anyhow::Result<StepStats> {
    let Some(balloon) = balloon else {
        // A report from before the end of the step would count too few misses.
        return kernel_memory_past(subject, end, SILENCE_MAX).map(Into::into);
    };
    let stats = balloon.stats()?;
    let swapped_in = stats.swap_in_bytes.map(|bytes| pages(bytes).0);
    // A swap-in also counts as a major fault.
    let missed = stats.major_faults.max(swapped_in);
    let available_bytes = stats.available_bytes;
    let available_bytes =
        available_bytes.context("the guest's balloon does not report available memory")?;
    Ok(StepStats {
        missed: missed.context("the guest's balloon does not report major faults")?,
        available_bytes,
        spare_bytes: available_bytes,
        committed_bytes: None,
    })
}

/// The next size: the rule's target, limited by the memory that the guest can spare.
fn allowed(wanted: u64, size: u64, spare: u64) -> u64 {
    wanted.max(size.saturating_sub(spare.saturating_sub(RESERVE_BYTES)))
}

/// The smallest size at which the guest misses nothing.
pub(super) fn zballoond(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "Zballoond",
        sees: "what the guest misses while it is shrunk",
        whole_vm: true,
    };
    subject.run(method, |answer| {
        let options = subject.options.shrink.as_ref();
        let options = options.context("it takes memory from the VM, so it requires --shrink")?;
        ensure!(!subject.stopped(), "stopped");
        // The daemon may have begun to manage the VM.
        (subject.refuse_managed)(&subject.vm.id.0, subject.vm.pid)?;
        let mut vm = ShrunkVm::of(subject.vm)?;
        let found = shrink(subject, &mut vm, options.step, options.floor_bytes, answer);
        let (former, size) = (vm.former_bytes, vm.give_back()?);
        if !is_near(size, former) {
            let note = format!(
                "the VM's target is its former {}, but it still has {}",
                ByteSize(former).rounded(),
                ByteSize(size).rounded()
            );
            answer.note = Some(
                answer
                    .note
                    .take()
                    .map_or(note.clone(), |told| format!("{told}; {note}")),
            );
        }
        answer.working_set = Some(found?);
        Ok(())
    })
}

fn shrink(
    subject: &Subject<'_>,
    vm: &mut ShrunkVm,
    step: Duration,
    floor_bytes: u64,
    answer: &mut Answer,
) -> anyhow::Result<Figure> {
    let mut balloon = match kernel_memory(subject) {
        Ok(_) => None,
        Err(_) => Some(BalloonStats::of(subject.vm)?),
    };
    let mut rule = Refault::new(RefaultOptions {
        quiet: QUIET_PAGES,
        ..RefaultOptions::between(pages(floor_bytes), pages(vm.former_bytes))
    });
    let mut before = None;
    loop {
        let stats = query(subject, balloon.as_mut(), console_end(subject)?)?;
        let size = vm.size()?;
        answer.rounds_bytes.push(size);
        let in_use = size.saturating_sub(stats.available_bytes);
        let in_use = in_use.saturating_add(RESERVE_BYTES);
        let wanted = rule.step(RefaultObservation {
            size: pages(size),
            refaults: stats.missed.saturating_sub(before.unwrap_or(stats.missed)),
            committed: Some(pages(stats.committed_bytes.unwrap_or(0).max(in_use))),
        });
        before = Some(stats.missed);
        answer.note = Some(format!(
            "{} steps, {} pages missed, by {}",
            rule.steps(),
            rule.refaults(),
            if balloon.is_none() {
                "its kernel's statistics"
            } else {
                "its balloon's statistics"
            }
        ));
        if let Some(set) = rule.working_set() {
            let bytes = set.size.to_bytes(PageSize::FOUR_KIB);
            return Ok(Figure::new(bytes).bound(set.bound));
        }
        let wanted = wanted.to_bytes(PageSize::FOUR_KIB);
        let next = allowed(wanted, size, stats.spare_bytes);
        if wanted < next && is_near(next, size) {
            answer.not_available =
                Some("the guest refaulted nothing and has no more memory to give".into());
            return Ok(Figure::new(size).bound(WorkingSetBound::AtMost));
        }
        vm.balloon.set(next)?;
        ensure!(
            subject.wait(step),
            "stopped; the VM has its former size again"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_guest_is_left_its_reserve() {
        let reserve = RESERVE_BYTES / MIB;
        let next = |wanted, spare| allowed(wanted * MIB, 100 * MIB, spare * MIB) / MIB;
        assert_eq!(next(95, 50), 95);
        assert_eq!(next(40, 50), 50 + reserve);
        assert_eq!(next(95, reserve), 100);
        assert_eq!(next(95, 0), 100);
        // The rule wants to grow the VM, which is always allowed.
        assert_eq!(next(120, 0), 120);
    }
}
