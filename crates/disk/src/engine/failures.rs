//! Storage that fails: what is counted, tried again, and held back until it succeeds.
//!
//! A dirty block whose write-back failed stays dirty. It is written alone from then on, so that it holds no neighbour
//! back, at growing intervals, and at once when the guest flushes; flushes fail as long as it fails. Other requests that
//! fail are answered with an error.
//!
//! If [`WriteErrorAction`] asks for it, and a guest is there, the VM is to be paused instead: a write that failed is not
//! answered but submitted again until it succeeds, and flushes wait for blocks that fail.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::time::Duration;

use super::{Engine, Outstanding};
use crate::{Action, Buffer, DiskNumber, Location, Submission, SubmissionId, WriteErrorAction};

/// Shortest and longest interval at which writes that failed are repeated.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Errors of a disk's storage since the engine's start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StorageErrors {
    /// No space (ENOSPC, EDQUOT).
    pub no_space: u64,
    /// Others.
    pub io: u64,
    /// The last one.
    pub last: Option<String>,
}

/// An order of a request that waits until it is submitted again.
struct HeldOrder {
    id: SubmissionId,
    disk: DiskNumber,
    action: Action,
    outstanding: Outstanding,
}

/// Failures, and what is done about them.
#[derive(Default)]
pub(super) struct Failures {
    errors: BTreeMap<DiskNumber, StorageErrors>,
    /// Disks with a guest.
    attended: HashSet<DiskNumber>,
    held: Vec<HeldOrder>,
    /// Orders that were held before.
    repeated: HashSet<SubmissionId>,
    /// Blocks that could not be written alone, so that the VM is to be paused.
    halted: BTreeSet<Location>,
    retry_at: Duration,
    wait: Duration,
    /// Whether something that had failed has succeeded, or something else failed, since the last repetition.
    news: bool,
}

impl Failures {
    /// Something that had failed has succeeded, or something else has failed.
    pub(super) fn has_news(&mut self) {
        self.news = true;
    }
}

fn is_no_space(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

impl Engine {
    /// Counts an error. Returns whether the VM is to be paused for it.
    pub(super) fn failed(&mut self, disk: DiskNumber, error: &io::Error) -> bool {
        self.stats.storage_errors += 1;
        let errors = self.failures.errors.entry(disk).or_default();
        let no_space = is_no_space(error);
        if no_space {
            errors.no_space += 1;
        } else {
            errors.io += 1;
        }
        errors.last = Some(error.to_string());
        let pauses = match self.options.write_error {
            WriteErrorAction::Report => false,
            WriteErrorAction::NoSpace => no_space,
            WriteErrorAction::Stop => true,
        };
        pauses && self.failures.attended.contains(&disk)
    }

    /// Holds an order that failed if it can be submitted again; else returns it.
    pub(super) fn hold(
        &mut self,
        id: SubmissionId,
        disk: DiskNumber,
        outstanding: Outstanding,
        buffer: Option<Buffer>,
    ) -> Option<(Outstanding, Option<Buffer>)> {
        let action = match (&outstanding, buffer) {
            (&Outstanding::Write { offset, .. }, Some(buffer)) => Action::Write { offset, buffer },
            (
                &Outstanding::Change {
                    zeroed: Some((range, unmap)),
                    ..
                },
                zeros,
            ) => {
                if let Some(zeros) = zeros {
                    self.buffers.give_back(zeros);
                }
                Action::Zero { range, unmap }
            }
            (_, buffer) => return Some((outstanding, buffer)),
        };
        if !self.failures.repeated.contains(&id) {
            self.failures.news = true;
        }
        self.failures.held.push(HeldOrder {
            id,
            disk,
            action,
            outstanding,
        });
        None
    }

    /// A request's order is over.
    pub(super) fn no_longer_held(&mut self, id: SubmissionId, ok: bool) {
        if self.failures.repeated.remove(&id) && ok {
            self.failures.news = true;
        }
    }

    /// A block alone could not be written, and the VM is to be paused for it.
    pub(super) fn halt(&mut self, block: Location) {
        self.failures.halted.insert(block);
    }

    /// A block was written, is not needed, or fails so that the VM is not paused for it. Returns whether it was.
    pub(super) fn no_longer_halts(&mut self, block: Location) -> bool {
        self.failures.halted.remove(&block)
    }

    /// Fails the disk's flushes that wait, if a block of it cannot be written and the VM is paused for none. Blocks that are tried again,
    /// or that were only tried together with others, are told of by their own results.
    pub(super) fn tell_flushes(&mut self, disk: DiskNumber) {
        if !self.flushes_wait(disk) && self.dirty.is_held(disk) {
            self.fail_flushes(disk);
        }
    }

    /// Whether the disk's flushes wait for blocks that cannot be written, instead of failing, because the VM is to be paused for one.
    pub fn flushes_wait(&self, disk: DiskNumber) -> bool {
        let mut halted = self.failures.halted.range(Location::new(disk, 0)..);
        halted.next().is_some_and(|block| block.disk() == disk)
    }

    /// Repeats what failed, if it is time.
    pub(super) fn repeat(&mut self) {
        let failures = &mut self.failures;
        if self.now < failures.retry_at && !failures.news {
            return;
        }
        failures.wait = match std::mem::take(&mut failures.news) {
            true => RETRY.0,
            false => (failures.wait * 2).clamp(RETRY.0, RETRY.1),
        };
        failures.retry_at = self.now + failures.wait;
        self.dirty.retry(None);
        for order in std::mem::take(&mut failures.held) {
            let HeldOrder {
                id,
                disk,
                action,
                outstanding,
            } = order;
            failures.repeated.insert(id);
            self.submissions.insert(id, (disk, outstanding));
            self.ready.push_back(Submission { id, disk, action });
        }
    }

    /// Says whether a guest is there that waits while the VM is paused. Without one, what is held fails.
    pub fn attend(&mut self, disk: DiskNumber, attended: bool) {
        if attended {
            self.failures.attended.insert(disk);
            return;
        }
        self.failures.attended.remove(&disk);
        self.failures.halted.retain(|block| block.disk() != disk);
        let (given_up, held) = std::mem::take(&mut self.failures.held)
            .into_iter()
            .partition(|order| order.disk == disk);
        self.failures.held = held;
        let given_up: Vec<HeldOrder> = given_up;
        for order in given_up {
            self.concluded(order.id, order.outstanding, false, None);
        }
        // Requests of repeated orders fail when these end; flushes, when their blocks do.
        if self.dirty.failed(disk) > 0 {
            self.fail_flushes(disk);
        }
        self.pump();
    }

    /// Whether the VM is to be paused until writes succeed again.
    pub fn wants_pause(&self) -> bool {
        let failures = &self.failures;
        // Including what is just being repeated.
        !failures.held.is_empty() || !failures.repeated.is_empty() || !failures.halted.is_empty()
    }

    /// Errors of the disk's storage, and how many of its dirty blocks could not be written when it was last tried.
    pub fn storage_errors(&self, disk: DiskNumber) -> (StorageErrors, u64) {
        let errors = self.failures.errors.get(&disk).cloned();
        (errors.unwrap_or_default(), self.dirty.failed(disk) as u64)
    }
}
