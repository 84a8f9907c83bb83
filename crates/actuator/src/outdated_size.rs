//! Detects that the size which QEMU reports for a VM is that of before a reset of its guest.
//!
//! QEMU reports the size that the guest's driver reported last. A driver that starts with a target of all RAM reports nothing,
//! so that QEMU reports the size before the reset until the next target: a VM with all of its RAM looks small, and the guest loses
//! the difference at once when it gets any other target, even a larger one. Such a guest reports more memory in total than the VM
//! is said to have.
//!
//! That is evidence only in a report that was made while QEMU reported the same size, because older reports are of the size before,
//! and only of a guest whose total excludes what its balloon took: the total of Linux falls with each page that the balloon takes,
//! but not if the balloon deflates when the guest runs out of memory, and that of Windows is always all of its RAM. So the total must have
//! fallen as the balloon grew, or have risen above the VM's size while nothing else changed.
//!
//! A guest may report a false total; its driver may report a false size just as well.
//!
//! Source: QEMU `hw/virtio/virtio-balloon.c` (`virtio_balloon_device_reset` keeps `actual`); Linux `drivers/virtio/virtio_balloon.c`
//! (`update_balloon_size`, `fill_balloon`); kvm-guest-drivers-windows `Balloon/app/memstat.cpp`.

use plimsoll_vm::GuestStats;

/// Compares sizes with reports; to be called at every poll.
#[derive(Debug, Default)]
pub(crate) struct OutdatedSize {
    /// Whether the guest's total excludes what its balloon took, as far as that was seen.
    pub total_excludes_balloon: bool,
    polled: Sizes,
    report: Option<Report>,
    is_outdated: bool,
}

/// A VM's sizes in bytes, by QEMU.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    reported: u64,
    ram: u64,
}

/// A guest's report, and the sizes when it and the one before were read.
#[derive(Debug)]
struct Report {
    updated_unix_s: u64,
    total_bytes: u64,
    sizes: Sizes,
    sizes_before: Sizes,
}

impl OutdatedSize {
    /// The VM's size at a poll, in bytes: what QEMU reports, or all of its RAM if that is outdated.
    pub fn resolve(
        &mut self,
        reported_bytes: u64,
        guest: Option<&GuestStats>,
        ram_bytes: u64,
    ) -> u64 {
        let sizes = Sizes {
            reported: reported_bytes,
            ram: ram_bytes,
        };
        let is_same = std::mem::replace(&mut self.polled, sizes) == sizes;
        self.is_outdated &= is_same;
        if let Some(guest) = guest {
            self.compare(guest, sizes, is_same);
        }
        match self.is_outdated {
            true => ram_bytes,
            false => reported_bytes,
        }
    }

    fn compare(&mut self, guest: &GuestStats, sizes: Sizes, is_same: bool) {
        let updated_unix_s = guest.updated_unix_s;
        let is_read = |report: &Report| report.updated_unix_s == updated_unix_s;
        let Some(total_bytes) = guest.total_bytes else {
            return;
        };
        if self.report.as_ref().is_some_and(is_read) {
            return;
        }
        let before = self.report.take();
        self.report = Some(Report {
            updated_unix_s,
            total_bytes,
            sizes,
            sizes_before: before.as_ref().map_or(sizes, |before| before.sizes),
        });
        // Nothing shows the size at the time of the first one.
        let Some(before) = before else {
            return;
        };
        let shrank = |from: Sizes| from.ram == sizes.ram && from.reported > sizes.reported;
        let has_shrunk = shrank(before.sizes) || shrank(before.sizes_before);
        self.total_excludes_balloon |= has_shrunk && total_bytes < before.total_bytes;
        if is_same {
            let is_evidence = self.is_outdated
                || self.total_excludes_balloon
                || before.total_bytes <= sizes.reported;
            self.is_outdated = is_evidence && total_bytes > sizes.reported;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Resolves sizes of a VM with 256 MiB of RAM: the one that QEMU reports, and the time of its guest's report and its total.
    fn sizes_mib(size: &mut OutdatedSize, polls: &[(u64, u64, u64)]) -> Vec<u64> {
        let polls = polls.iter().map(|&(mib, updated_unix_s, total_mib)| {
            let guest = GuestStats {
                updated_unix_s,
                total_bytes: Some(total_mib * MIB),
                ..GuestStats::default()
            };
            size.resolve(mib * MIB, Some(&guest), 256 * MIB) / MIB
        });
        polls.collect()
    }

    #[test]
    fn a_guest_with_more_memory_than_its_vm_is_said_to_have_has_its_ram() {
        let mut size = OutdatedSize::default();
        let before = [(120, 10, 82), (120, 12, 82)];
        assert_eq!(sizes_mib(&mut size, &before), [120, 120]);
        // It was reset, and its target is its RAM.
        let reset = [(120, 20, 218), (120, 20, 218), (120, 22, 218)];
        assert_eq!(sizes_mib(&mut size, &reset), [256; 3]);
        // Its driver reports a size when it follows a target; the reports are of sizes before.
        let shrunk = [
            (250, 22, 218),
            (200, 24, 212),
            (180, 24, 212),
            (180, 26, 142),
        ];
        assert_eq!(sizes_mib(&mut size, &shrunk), [250, 200, 180, 180]);
    }

    #[test]
    fn a_total_that_fell_with_the_balloon_is_evidence_for_a_later_process_too() {
        let mut size = OutdatedSize::default();
        // The report that comes first after the shrink is of a time in it.
        let shrunk = [
            (256, 10, 218),
            (256, 12, 218),
            (120, 14, 218),
            (120, 16, 82),
        ];
        assert_eq!(sizes_mib(&mut size, &shrunk), [256, 256, 120, 120]);
        assert!(size.total_excludes_balloon);
        let mut later = OutdatedSize {
            total_excludes_balloon: true,
            ..OutdatedSize::default()
        };
        // The first report may be of another size.
        let outdated = [(120, 20, 218), (120, 20, 218), (120, 22, 218)];
        assert_eq!(sizes_mib(&mut later, &outdated), [120, 120, 256]);
    }

    #[test]
    fn a_total_that_includes_the_balloon_is_none() {
        let mut size = OutdatedSize::default();
        let polls = [
            (256, 10, 255),
            (256, 12, 255),
            (120, 14, 255),
            (120, 16, 255),
        ];
        assert_eq!(sizes_mib(&mut size, &polls), [256, 256, 120, 120]);
        assert!(!size.total_excludes_balloon);
    }
}
