//! Memory that a VM's balloon takes, and that its host does not get.
//!
//! The guest's driver inflates and QEMU reports a smaller size all the same, so neither shows it: QEMU's process keeps the pages, or whoever
//! pinned them does.
//!
//! Source: QEMU `hw/virtio/virtio-balloon.c` (`virtio_balloon_inhibited`, `balloon_inflate_page`) and its callers of `ram_block_discard_disable`;
//! madvise(2) on `MADV_DONTNEED`.

use std::fmt;
use std::fs;

use plimsoll_flow::{RamBacking, RamMapping};

use crate::process::QemuVm;

/// Files that only a process has open whose RAM is pinned for a device or encrypted: QEMU then leaves what a balloon takes as it is.
const PINNING: [&str; 3] = ["/dev/vfio/", "/dev/vhost-vdpa-", "/dev/sev"];

/// Why what a VM's balloon takes does not become free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldRam {
    /// It is locked (`mem-lock=on`, `<locked/>`): the kernel drops no page of private memory, and QEMU reports an error for each page, also where it
    /// frees it, as of shared memory.
    Locked,
    /// It is in huge pages: QEMU returns one only once the balloon has taken all of it, page after page.
    HugePages,
    /// It is pinned for a device (VFIO, vDPA), or encrypted.
    Pinned,
}

impl fmt::Display for HeldRam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Locked => "it is locked",
            Self::HugePages => "it is in huge pages",
            Self::Pinned => "it is pinned for a device",
        })
    }
}

impl QemuVm {
    /// Why the host would not get what its balloon takes, as far as that shows. `is_locked`: whether its RAM is locked.
    pub fn held_ram(&self, is_locked: bool) -> Option<HeldRam> {
        let is_huge = |mapping: &RamMapping| mapping.backing == RamBacking::HugeTlb;
        if is_locked {
            return Some(HeldRam::Locked);
        }
        if self.ram.iter().any(is_huge) {
            return Some(HeldRam::HugePages);
        }
        let fds = fs::read_dir(format!("/proc/{}/fd", self.pid)).ok()?;
        let mut links = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        let pins = links.any(|link| link.to_str().is_some_and(pins));
        pins.then_some(HeldRam::Pinned)
    }
}

fn pins(path: &str) -> bool {
    PINNING.iter().any(|file| path.starts_with(file))
}

#[cfg(test)]
mod tests {
    use plimsoll_flow::VmId;

    use super::*;

    #[test]
    fn ram_is_held_by_its_lock_and_by_huge_pages() {
        let held = |backing, is_locked| {
            let vm = QemuVm {
                pid: std::process::id(),
                id: VmId("vm".to_owned()),
                memory_bytes: 1 << 20,
                ram: vec![RamMapping {
                    address: 1 << 30,
                    len_bytes: 1 << 20,
                    file_offset_bytes: 0,
                    backing,
                }],
                ..QemuVm::default()
            };
            vm.held_ram(is_locked)
        };
        assert_eq!(held(RamBacking::Private, true), Some(HeldRam::Locked));
        assert_eq!(held(RamBacking::HugeTlb, false), Some(HeldRam::HugePages));
        assert_eq!(held(RamBacking::SharedMemfd, false), None);
    }

    #[test]
    fn devices_that_pin_memory_are_known_by_their_files() {
        assert!(pins("/dev/vfio/12") && pins("/dev/vhost-vdpa-0"));
        assert!(!pins("/dev/kvm") && !pins("/dev/vhost-net") && !pins("socket:[7]"));
    }
}
