//! A guest without an operating system, whose workload runs in ring 3 and visits memory in a known order.
//!
//! It boots in a tenth of a second under TCG and KVM, also under a KVM that has no hardware support and emulates ring 0, where
//! ordinary kernels do not boot. What it accepts and prints is described in README.md beside this crate; the
//! lines are those of the workload guests with Linux.
//!
//! Not here: starting it.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::path::Path;

/// The firmware image: a file for QEMU's `-bios`.
pub const IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest.rom"));

/// QEMU's arguments for a machine that boots the image at `path` with settings such as `workload=uniform mib=64`.
///
/// The machine needs [`memory_mib`] of RAM, `-no-reboot`, and a first serial port for the console.
pub fn arguments(path: &Path, settings: &str) -> [OsString; 4] {
    let settings = settings.replace(',', ",,");
    [
        "-bios".into(),
        path.into(),
        "-fw_cfg".into(),
        format!("name=opt/plimsoll/workload,string={settings}").into(),
    ]
}

/// Largest number of virtual CPUs of its machine.
pub const VCPUS_MAX: u32 = 2;

/// RAM in MiB of a machine for an array of `array_mib`.
///
/// The array begins at 32 MiB if it ends below 2 GiB, and at 4 GiB otherwise: machines of the type q35 with much RAM have
/// a hole from 2 GiB to 4 GiB.
pub const fn memory_mib(array_mib: u64) -> u64 {
    array_mib + if array_mib + 32 <= 2048 { 32 } else { 2048 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_ends_with_a_jump_from_the_reset_vector() {
        assert_eq!(IMAGE.len(), 64 << 10);
        // The opcodes of jumps with displacements of 8 and 16 bits.
        assert!([0xeb, 0xe9].contains(&IMAGE[IMAGE.len() - 16]));
    }

    #[test]
    fn commas_of_settings_are_doubled_for_qemu() {
        let [.., settings] = arguments(Path::new("/x"), "workload=steps steps_mib=2,4");
        assert_eq!(
            settings,
            "name=opt/plimsoll/workload,string=workload=steps steps_mib=2,,4"
        );
    }
}
