//! KVM's dirty log: a bitmap of each slot's written pages (`KVM_GET_DIRTY_LOG`).

use std::sync::Arc;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, kvm_enable_cap,
};
use plimsoll_flow::PageNumber;

use super::tiny::Machine;
use super::{KvmError, Round, Tracker, each_set, sys};

/// Pages of a slot that are protected in one step when that is done late: 16 MiB, in words of a bitmap.
const CHUNK_WORDS: usize = 64;
const CHUNK_PAGES: u64 = CHUNK_WORDS as u64 * 64;

/// When a written page is protected again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clearing {
    /// All pages of a slot, when its bitmap is read.
    WithRound,
    /// A range of pages, before it is copied (`KVM_CLEAR_DIRTY_LOG`). Pages that are not copied stay marked as written,
    /// and are in the next round again.
    BeforeCopy,
}

/// The dirty log of a machine.
#[derive(Debug)]
pub struct DirtyLog {
    machine: Arc<Machine>,
    clearing: Clearing,
}

impl DirtyLog {
    /// Begins to log a machine that has no rings.
    ///
    /// # Errors
    ///
    /// [`KvmError::Unsupported`] if the kernel cannot protect late, [`KvmError::Machine`] if the machine has rings,
    /// [`KvmError::Call`].
    pub fn start(machine: Arc<Machine>, clearing: Clearing) -> Result<Self, KvmError> {
        if machine.has_rings() {
            return Err(KvmError::Machine {
                reason: "one with rings has no dirty log".into(),
            });
        }
        let cap = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
        let late = machine.vm().check_extension_raw(cap.into()) > 0;
        if clearing == Clearing::BeforeCopy && !late {
            return Err(KvmError::Unsupported {
                what: "KVM_CLEAR_DIRTY_LOG",
            });
        }
        if late {
            let mut set = kvm_enable_cap {
                cap,
                ..Default::default()
            };
            // Disable it too: the setting outlives the log that requested it.
            set.args[0] = match clearing {
                Clearing::BeforeCopy => KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE.into(),
                Clearing::WithRound => 0,
            };
            let set = machine.vm().enable_cap(&set);
            set.map_err(KvmError::call("KVM_ENABLE_CAP"))?;
        }
        machine.set_logging(true)?;
        Ok(Self { machine, clearing })
    }
}

impl Tracker for DirtyLog {
    fn round(&mut self) -> Result<Round, KvmError> {
        let mut pages = Vec::new();
        for (number, slot) in self.machine.numbered_slots() {
            let bitmap = self.machine.vm().get_dirty_log(number, slot.len_bytes());
            let bitmap = bitmap.map_err(KvmError::call("KVM_GET_DIRTY_LOG"))?;
            each_set(&bitmap, slot.pages.0, |page| {
                pages.push(PageNumber(slot.first.0 + page));
            });
        }
        pages.sort_unstable();
        Ok(Round::of(pages))
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most CHUNK_PAGES")]
    fn before_copy(&mut self, pages: &[PageNumber]) -> Result<(), KvmError> {
        if self.clearing == Clearing::WithRound {
            return Ok(());
        }
        for (number, slot) in self.machine.numbered_slots() {
            let offsets: Vec<u64> = pages
                .iter()
                .filter_map(|&page| slot.offset_of(page))
                .collect();
            for chunk in offsets.chunk_by(|a, b| a / CHUNK_PAGES == b / CHUNK_PAGES) {
                let first = chunk[0] / CHUNK_PAGES * CHUNK_PAGES;
                let mut bitmap = [0u64; CHUNK_WORDS];
                for page in chunk.iter().map(|page| page - first) {
                    // Below `CHUNK_PAGES`.
                    bitmap[page as usize / 64] |= 1 << (page % 64);
                }
                let count = (slot.pages.0 - first).min(CHUNK_PAGES) as u32;
                sys::clear_dirty_log(self.machine.vm(), number, first, count, &mut bitmap)
                    .map_err(KvmError::call("KVM_CLEAR_DIRTY_LOG"))?;
            }
        }
        Ok(())
    }
}

impl Drop for DirtyLog {
    fn drop(&mut self) {
        // If it stays enabled, the machine only loses some time.
        let _ = self.machine.set_logging(false);
    }
}
