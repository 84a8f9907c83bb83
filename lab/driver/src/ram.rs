//! RAM as QEMU's `memory-backend-memfd` provides it: one file, of which a low and a high part are mapped; or in other files.

use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{
    AtomicAccess, Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap,
};

use crate::FrontendError;
use crate::error::OperationContext as _;

/// Bytes of a page frame.
pub const PAGE_BYTES: usize = 4096;

/// The contents of a page frame.
pub type Page = [u8; PAGE_BYTES];

/// First address of the high part of RAM.
const HIGH: u64 = 4 << 30;

/// A part of RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bank {
    /// From address 0 up.
    Low,
    /// From 4 GiB up.
    High,
}

/// The size of the RAM.
#[derive(Debug, Clone)]
pub struct RamOptions {
    /// Bytes from address 0 up, a multiple of 4 KiB.
    pub low_bytes: u64,
    /// Bytes from 4 GiB up, a multiple of 4 KiB; 0 for none.
    pub high_bytes: u64,
    /// Whether the file is sealed against changes of its size, as QEMU does.
    pub sealed: bool,
}

impl Default for RamOptions {
    fn default() -> Self {
        Self {
            low_bytes: 32 << 20,
            high_bytes: 32 << 20,
            sealed: true,
        }
    }
}

/// RAM passed to daemons. Addresses are guest-physical; accesses outside of RAM panic.
pub struct Ram {
    memory: GuestMemoryMmap,
    file: Arc<File>,
    /// The free range of each bank: from, to.
    free: Mutex<[(u64, u64); 2]>,
}

impl Ram {
    /// Creates RAM filled with zeros.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn new(options: &RamOptions) -> Result<Arc<Self>, FrontendError> {
        let RamOptions {
            low_bytes,
            high_bytes,
            sealed,
        } = *options;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("plimsoll-driver", flags).to("make a memfd")?;
        ftruncate(&file, low_bytes + high_bytes).to("size a memfd")?;
        if sealed {
            let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
            fcntl_add_seals(&file, seals).to("seal a memfd")?;
        }
        let file = Arc::new(File::from(file));
        let high = FileOffset::from_arc(Arc::clone(&file), low_bytes);
        Self::of_files([
            (FileOffset::from_arc(file, 0), low_bytes),
            (high, high_bytes),
        ])
    }

    /// Maps the low and the high part, each of that many bytes, from places in files.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn of_files(parts: [(FileOffset, u64); 2]) -> Result<Arc<Self>, FrontendError> {
        let [(low, low_bytes), (_, high_bytes)] = &parts;
        let file = Arc::clone(low.arc());
        let (low_bytes, high_bytes) = (*low_bytes, *high_bytes);
        let mut ranges = Vec::new();
        for (start, (place, bytes)) in [0, HIGH].into_iter().zip(parts) {
            if bytes > 0 {
                let bytes = usize::try_from(bytes).map_err(io::Error::other);
                ranges.push((GuestAddress(start), bytes.to("map RAM")?, Some(place)));
            }
        }
        let memory = GuestMemoryMmap::from_ranges_with_files(ranges)
            .map_err(io::Error::other)
            .to("map RAM")?;
        // Address 0 stays unused, because drivers treat it as none.
        let free = [(PAGE_BYTES as u64, low_bytes), (HIGH, HIGH + high_bytes)];
        Ok(Arc::new(Self {
            memory,
            file,
            free: Mutex::new(free),
        }))
    }

    /// Allocates `bytes` bytes that begin at a page frame and are never freed; returns their address.
    ///
    /// # Panics
    /// If the bank does not have enough.
    pub fn allocate(&self, bank: Bank, bytes: usize) -> u64 {
        let bytes = bytes.next_multiple_of(PAGE_BYTES) as u64;
        let mut free = self.free.lock().expect("nobody panics with it");
        let (from, to) = &mut free[bank as usize];
        assert!(*from + bytes <= *to, "no {bytes} bytes left in {bank:?}");
        let address = *from;
        *from += bytes;
        address
    }

    /// One past the last address.
    pub fn end(&self) -> u64 {
        self.memory.last_addr().0 + 1
    }

    /// The file of the low part; of RAM that was [created](Self::new), the high part follows there.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Copies from RAM.
    ///
    /// # Panics
    /// Outside of RAM.
    pub fn read(&self, address: u64, bytes: &mut [u8]) {
        let outcome = self.memory.read_slice(bytes, GuestAddress(address));
        outcome.expect("an address in RAM");
    }

    /// Copies to RAM.
    ///
    /// # Panics
    /// Outside of RAM.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let outcome = self.memory.write_slice(bytes, GuestAddress(address));
        outcome.expect("an address in RAM");
    }

    pub(crate) fn load<T: AtomicAccess>(&self, address: u64, order: Ordering) -> T {
        let loaded = self.memory.load(GuestAddress(address), order);
        loaded.expect("an address in RAM")
    }

    pub(crate) fn store<T: AtomicAccess>(&self, address: u64, value: T, order: Ordering) {
        let stored = self.memory.store(value, GuestAddress(address), order);
        stored.expect("an address in RAM");
    }

    /// The virtual address in this process, by which vhost-user identifies the parts of a queue.
    pub(crate) fn host_address(&self, address: u64) -> u64 {
        let host = self.memory.get_host_address(GuestAddress(address));
        host.expect("an address in RAM").addr() as u64
    }

    /// The regions as described to a daemon.
    pub(crate) fn regions(&self) -> vhost::Result<Vec<VhostUserMemoryRegionInfo>> {
        let regions = self.memory.iter();
        regions
            .map(VhostUserMemoryRegionInfo::from_guest_region)
            .collect()
    }
}
