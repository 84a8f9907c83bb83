//! Zballoond on a running VM: its balloon really takes memory, until the guest misses some; then it is given back.
//!
//! The rule is [`Refault`]; here are its eyes and hands. What the guest misses is told by its kernel (refaults of files, swap-ins), else by
//! its balloon (major faults, swap-ins). The VM starts at what its processes were promised or what is in use, whichever is
//! more. It is never told a size for which the guest, by its own words, has not the memory or the swap to make room: a guest
//! without swap is left its reserve and its figure is an upper bound.
//!
//! The VM gets its former size back at the end, at an error, at a signal; not if this process is killed, or gets a second signal.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use plimsoll_estimator::working_set::{Refault, RefaultObservation, RefaultOptions};
use plimsoll_flow::{PageCount, PageSize, WorkingSetBound};
use plimsoll_vm::{KernelMemory, QemuVm};

use super::inside::{Balloon, console_end, kernel_memory, kernel_memory_past};
use super::{Answer, Found, POLL, Subject, Way};
use crate::size::ByteSize;

/// What the guest must have left beside what a step takes.
const RESERVE_BYTES: u64 = 16 << 20;
/// Pages missed in a step that are none: a kernel never quite stops reading.
const QUIET_PAGES: u64 = 16;
/// How long the guest may take to have its former size again.
const RETURN_MAX: Duration = Duration::from_secs(60);
/// A balloon moves in blocks: a size is reached if it is missed by less than this share.
const SLACK: f64 = 0.01;
/// Connections by which a VM is told its former size.
const TRIES: u32 = 4;
/// How long the guest may be silent after a step.
const SILENCE_MAX: Duration = Duration::from_secs(15);

fn pages(bytes: u64) -> PageCount {
    PageCount::from_bytes(bytes, PageSize::FOUR_KIB)
}

/// A VM whose memory may be taken. Dropped, it is told its former size again.
struct Borrowed {
    /// None while a monitor that failed is left for another connection.
    balloon: Option<Balloon>,
    vm: QemuVm,
    former_bytes: u64,
    returned: bool,
}

impl Borrowed {
    fn from(vm: &QemuVm) -> anyhow::Result<Self> {
        let mut balloon = Balloon::of(vm)?;
        let former_bytes = balloon.qmp.balloon_actual_bytes()?;
        Ok(Self {
            balloon: Some(balloon),
            vm: vm.clone(),
            former_bytes,
            returned: false,
        })
    }

    fn balloon(&mut self) -> anyhow::Result<&mut Balloon> {
        let balloon = match self.balloon.take() {
            Some(balloon) => balloon,
            None => Balloon::of(&self.vm)?,
        };
        Ok(self.balloon.insert(balloon))
    }

    fn size(&mut self) -> anyhow::Result<u64> {
        Ok(self.balloon()?.qmp.balloon_actual_bytes()?)
    }

    /// Tells the VM its former size, by other connections if this one is of no more use: a monitor serves one at a time.
    fn tell_former(&mut self) -> anyhow::Result<()> {
        let former_bytes = self.former_bytes;
        let mut tries = TRIES;
        loop {
            let told = self
                .balloon()
                .and_then(|balloon| Ok(balloon.qmp.set_balloon(former_bytes)?));
            match told {
                Ok(()) => {
                    self.returned = true;
                    return Ok(());
                }
                Err(error) if tries == 1 => return Err(error),
                Err(_) => {
                    self.balloon = None;
                    tries -= 1;
                    std::thread::sleep(POLL);
                }
            }
        }
    }

    /// Gives everything back and waits until the VM has it; what it has then.
    fn give_back(mut self) -> anyhow::Result<u64> {
        self.tell_former().with_context(|| {
            format!(
                "the VM's former size of {} could not be restored",
                ByteSize(self.former_bytes).rounded()
            )
        })?;
        let deadline = Instant::now() + RETURN_MAX;
        loop {
            let size = self.size()?;
            if is_near(size, self.former_bytes) || Instant::now() >= deadline {
                return Ok(size);
            }
            std::thread::sleep(POLL);
        }
    }
}

fn is_near(size: u64, former: u64) -> bool {
    size as f64 >= former as f64 * (1.0 - SLACK)
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if !self.returned
            && let Err(error) = self.tell_former()
        {
            eprintln!(
                "plimsoll: VM {} was left with a smaller balloon target: {error:#}; its size was {} bytes",
                self.vm.id, self.former_bytes
            );
        }
    }
}

/// What the guest says at the end of a step.
struct Said {
    /// Pages missed since it booted.
    missed: u64,
    /// Memory it could part with, and that with its swap.
    available_bytes: u64,
    spare_bytes: u64,
    committed_bytes: Option<u64>,
}

impl From<KernelMemory> for Said {
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

/// Asks the guest; `by_kernel`: by its console, past `end`, or its agent, else by its balloon.
fn listen(
    subject: &Subject<'_>,
    vm: &mut Borrowed,
    by_kernel: bool,
    end: u64,
) -> anyhow::Result<Said> {
    if by_kernel {
        // What it said while the step still lasted tells too little missed.
        return kernel_memory_past(subject, end, SILENCE_MAX).map(Into::into);
    }
    let stats = vm.balloon()?.stats()?;
    let swapped_in = stats.swap_in_bytes.map(|bytes| pages(bytes).0);
    // A swap-in is a major fault too.
    let missed = stats.major_faults.max(swapped_in);
    let available_bytes = stats.available_bytes;
    let available_bytes =
        available_bytes.context("the guest's balloon does not report available memory")?;
    Ok(Said {
        missed: missed.context("the guest's balloon does not report major faults")?,
        available_bytes,
        spare_bytes: available_bytes,
        committed_bytes: None,
    })
}

/// The next size: what the rule wants, but no more taken than the guest has to spare.
fn allowed(wanted: u64, size: u64, spare: u64) -> u64 {
    wanted.max(size.saturating_sub(spare.saturating_sub(RESERVE_BYTES)))
}

/// The smallest size at which the guest misses nothing.
pub(super) fn zballoond(subject: &Subject<'_>) -> Answer {
    let way = Way {
        estimator: "Zballoond",
        sees: "what the guest misses while it is shrunk",
        whole_vm: true,
    };
    subject.go(way, |answer| {
        let options = subject.options.shrink;
        let options = options.context("it takes memory from the VM, so it requires --shrink")?;
        ensure!(!subject.stopped(), "stopped");
        let mut vm = Borrowed::from(subject.vm)?;
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
    vm: &mut Borrowed,
    step: Duration,
    floor_bytes: u64,
    answer: &mut Answer,
) -> anyhow::Result<Found> {
    let by_kernel = kernel_memory(subject).is_ok();
    let mut rule = Refault::new(RefaultOptions {
        quiet: QUIET_PAGES,
        ..RefaultOptions::between(pages(floor_bytes), pages(vm.former_bytes))
    });
    let mut before = None;
    loop {
        let said = listen(subject, vm, by_kernel, console_end(subject)?)?;
        let size = vm.size()?;
        answer.rounds_bytes.push(size);
        let in_use = size.saturating_sub(said.available_bytes);
        let in_use = in_use.saturating_add(RESERVE_BYTES);
        let wanted = rule.step(RefaultObservation {
            size: pages(size),
            refaults: said.missed.saturating_sub(before.unwrap_or(said.missed)),
            committed: Some(pages(said.committed_bytes.unwrap_or(0).max(in_use))),
        });
        before = Some(said.missed);
        answer.note = Some(format!(
            "{} steps, {} pages missed, by {}",
            rule.steps(),
            rule.refaults(),
            if by_kernel {
                "its kernel's words"
            } else {
                "its balloon's statistics"
            }
        ));
        if let Some(set) = rule.working_set() {
            let bytes = set.size.to_bytes(PageSize::FOUR_KIB);
            return Ok(Found::new(bytes).bound(match set.bound {
                WorkingSetBound::Estimate => "estimate",
                WorkingSetBound::AtLeast => "at_least",
                WorkingSetBound::AtMost => "at_most",
            }));
        }
        let wanted = wanted.to_bytes(PageSize::FOUR_KIB);
        let next = allowed(wanted, size, said.spare_bytes);
        if wanted < next && is_near(next, size) {
            answer.not_available =
                Some("the guest refaulted nothing and has no more memory to give".into());
            return Ok(Found::new(size).bound("at_most"));
        }
        vm.balloon()?.qmp.set_balloon(next)?;
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
        // It wants more, and that is its to have.
        assert_eq!(next(120, 0), 120);
    }
}
