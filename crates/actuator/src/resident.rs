//! The host memory that a VM's RAM really occupies; a guest's report does not prove that a balloon is full.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;

use plimsoll_flow::RamBacking;
use plimsoll_vm::QemuVm;

/// Unit of a file's blocks, whatever its file system (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// Returns how much of a VM's shared RAM the host holds, in memory or in its swap: what the guest has touched, less what its
/// balloon has given back. Costs no walk over pages.
///
/// # Errors
///
/// `Unsupported` if some of the RAM is not shared (memfd, tmpfs); `NotFound` if the VM has ended; the kernel's, as without
/// the right to see what another process maps (`CAP_CHECKPOINT_RESTORE`).
pub fn ram_held_bytes(vm: &QemuVm) -> io::Result<u64> {
    let folder = format!("/proc/{}/map_files", vm.pid);
    let mut mapped = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let name = entry?.file_name();
        let range = name.to_str().and_then(|name| {
            let (begin, end) = name.split_once('-')?;
            let address = |text| u64::from_str_radix(text, 16).ok();
            Some(address(begin)?..address(end)?)
        });
        mapped.extend(range.map(|range| (range, name)));
    }
    let (mut bytes, mut counted) = (0, BTreeSet::new());
    for ram in &vm.ram {
        let shared = matches!(
            ram.backing,
            RamBacking::SharedMemfd | RamBacking::SharedTmpfs
        );
        if !shared {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("the VM's RAM is {}, which is not counted", ram.backing),
            ));
        }
        let found = mapped
            .iter()
            .find(|(range, _)| range.contains(&ram.address));
        let (_, name) = found.ok_or(io::ErrorKind::NotFound)?;
        let file = fs::metadata(format!("{folder}/{}", name.display()))?;
        if counted.insert((file.dev(), file.ino())) {
            bytes += file.blocks() * BLOCK_BYTES;
        }
    }
    Ok(bytes)
}
