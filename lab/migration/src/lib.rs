//! Which pages a small VM of our own wrote, as KVM and userfaultfd log it: the trackers that `plimsoll-lab migration`
//! compares.
//!
//! | [`Tracker`] | how a write is detected | what a round costs |
//! |---|---|---|
//! | [`DirtyLog`] | by KVM: write protection, or the processor's PML where it has one ([`hardware`]) | a bitmap of the slot, copied |
//! | [`DirtyRing`] | the same, each page an entry in a ring of its vCPU | the entries; a full ring stops its vCPU |
//! | [`WriteProtect`] | a userfaultfd: each first write waits until a thread of ours lets it continue | protecting again what was written |
//! | [`AsyncWriteProtect`] | a userfaultfd whose faults the kernel serves itself | `PAGEMAP_SCAN` over all page tables |
//!
//! A tracker hands out [`Round`]s: the pages written since the round before, each once. [`precopy`] copies a machine's
//! memory with any of them while the machine runs. [`tiny`] is the machine.
//!
//! KVM answers only the process that made a VM, so the first two are for VMs of our own process.
//!
//! Not here: the model of a processor's page logs (`plimsoll-pagelog`), tracing QEMU processes (`plimsoll-trap`).

mod dirty_log;
mod dirty_ring;
pub mod precopy;
mod rings;
mod slot;
mod sys;
pub mod tiny;
mod write_protect;
mod written;

use std::fs;
use std::io;
use std::path::Path;

use plimsoll_flow::PageNumber;

pub use dirty_log::{Clearing, DirtyLog};
pub use dirty_ring::DirtyRing;
pub use write_protect::{AsyncWriteProtect, WriteProtect};

/// Why pages are not logged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum KvmError {
    /// There is no KVM that we may use; nothing was made.
    #[error("cannot use /dev/kvm: {source}")]
    Unavailable { source: io::Error },
    /// The kernel lacks a required feature; nothing was changed.
    #[error("this kernel has no {what}")]
    Unsupported {
        /// The missing feature.
        what: &'static str,
    },
    /// An impossible machine, or work that it cannot do; nothing was changed.
    #[error("no such machine: {reason}")]
    Machine {
        /// What is invalid.
        reason: String,
    },
    /// A call failed: pages written since the round before may be missing, so the log is no longer usable.
    #[error("{call} failed: {source}")]
    Call {
        call: &'static str,
        source: io::Error,
    },
    /// A vCPU ended other than by a halt; the machine is no longer usable.
    #[error("vCPU {vcpu} stopped: {exit}")]
    Vcpu {
        vcpu: usize,
        /// The exit, as KVM reports it.
        exit: String,
    },
    /// A vCPU did not halt in time, or its thread is gone.
    #[error("vCPU {vcpu} did not halt within {seconds} s")]
    Stuck { vcpu: usize, seconds: u64 },
}

impl KvmError {
    /// Names the call that failed.
    fn call<E: Into<io::Error>>(call: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Call {
            call,
            source: source.into(),
        }
    }
}

/// Logs which pages a machine writes, from its creation until it is dropped.
pub trait Tracker: Send {
    /// Takes the pages that were written since the round before, or since the tracker was made, and has the next
    /// write to each of them logged anew.
    ///
    /// A vCPU that runs may still hold pages that the processor has logged for it; a round taken while all halt has
    /// all.
    ///
    /// # Errors
    ///
    /// [`KvmError::Call`].
    fn round(&mut self) -> Result<Round, KvmError>;

    /// Called before pages of the last round, ascending, are copied: trackers that protect late do so now.
    ///
    /// # Errors
    ///
    /// [`KvmError::Call`].
    fn before_copy(&mut self, _pages: &[PageNumber]) -> Result<(), KvmError> {
        Ok(())
    }
}

/// Pages written in a round.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Round {
    pages: Vec<PageNumber>,
    /// Entries that named no page of the machine.
    pub lost: u64,
    /// Times a vCPU stood still because its ring was full.
    pub full_exits: u64,
}

impl Round {
    fn of(pages: Vec<PageNumber>) -> Self {
        Self {
            pages,
            ..Self::default()
        }
    }

    /// The pages, ascending, each once: guest-physical page frames.
    pub fn pages(&self) -> &[PageNumber] {
        &self.pages
    }
}

/// Calls `each` with every set bit of a bitmap of `pages` pages, ascending; bits beyond are ignored.
fn each_set(bitmap: &[u64], pages: u64, mut each: impl FnMut(u64)) {
    for (index, &word) in bitmap.iter().enumerate() {
        let mut rest = word;
        while rest != 0 {
            let page = index as u64 * 64 + u64::from(rest.trailing_zeros());
            if page < pages {
                each(page);
            }
            rest &= rest - 1;
        }
    }
}

/// The hardware and modules by which KVM logs writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    /// KVM's modules, as `kvm_intel`; empty if they are built in or not loaded.
    pub modules: Vec<String>,
    /// Whether the processor logs pages by itself (PML); `None` if no module reports it.
    pub pml: Option<bool>,
}

/// Determines how KVM logs writes on this host.
pub fn hardware() -> Hardware {
    hardware_of(Path::new("/sys/module"))
}

fn hardware_of(modules: &Path) -> Hardware {
    let mut names: Vec<String> = fs::read_dir(modules)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("kvm_"))
        .collect();
    names.sort();
    let parameter = fs::read_to_string(modules.join("kvm_intel/parameters/pml"));
    // The other vendors' modules have no such log.
    let other = names
        .iter()
        .any(|name| name != "kvm_intel")
        .then_some(false);
    Hardware {
        pml: parameter
            .ok()
            .map(|text| matches!(text.trim(), "Y" | "1"))
            .or(other),
        modules: names,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_beyond_the_last_page_are_no_pages() {
        let mut found = Vec::new();
        each_set(&[1 | 1 << 63, 0b1011], 66, |page| found.push(page));
        assert_eq!(found, [0, 63, 64, 65]);
    }

    #[test]
    fn a_processors_log_is_told_by_its_module() {
        let folder = tempfile::tempdir().unwrap();
        let found = |folder: &Path| hardware_of(folder).pml;
        assert_eq!(found(folder.path()), None);
        fs::create_dir(folder.path().join("kvm_amd")).unwrap();
        assert_eq!(found(folder.path()), Some(false));
        let parameters = folder.path().join("kvm_intel/parameters");
        fs::create_dir_all(&parameters).unwrap();
        for (text, pml) in [("Y\n", true), ("N\n", false)] {
            fs::write(parameters.join("pml"), text).unwrap();
            assert_eq!(found(folder.path()), Some(pml));
        }
        assert_eq!(
            hardware_of(folder.path()).modules,
            ["kvm_amd", "kvm_intel"].map(str::to_owned)
        );
    }
}
