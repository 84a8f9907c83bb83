//! A guest's RAM, as its VM's vhost-user messages describe it.
//!
//! Data is copied with `pread` and `pwrite` on the file behind the RAM: a mapping that the daemon accesses keeps
//! page-table entries, and while there are any, the VM cannot be traced by `process_madvise(MADV_PAGEOUT)`. Rings,
//! request headers and status bytes are read through a mapping, whose page-table entries [`GuestRam::sweep`] drops. RAM
//! that cannot be written as a file (hugetlbfs) is written through the mapping.
//!
//! A page of the mapping may be inaccessible: no huge page is free for one that the guest gave back, its tmpfs is full,
//! its file has shrunk, or its memory is damaged. The access would end the process by SIGBUS; it fails instead
//! ([`MappedRam`]). The file is also sealed against shrinking if possible (memfd with sealing, as created by QEMU).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{SealFlags, fcntl_add_seals, fstatfs};
use vm_memory::{
    AtomicAccess, Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryError,
    GuestMemoryMmap, GuestRegionMmap,
};

use crate::{GuestData, OutsideRam, sys};

/// File system magic of hugetlbfs, whose files cannot be written with `pwrite`.
pub(crate) const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// A piece of guest RAM and the file behind it.
#[derive(Debug, Clone)]
pub struct RamRegion {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// The file that holds it.
    pub file: Arc<File>,
    /// Offset of its first byte in the file.
    pub offset: u64,
}

/// Why memory cannot be guest RAM.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RamError {
    /// The file is too short.
    #[error("{bytes} bytes at {offset} are beyond the end of the file of RAM")]
    FileTooShort {
        /// Offset in the file.
        offset: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// Regions overlap, are empty or end within a huge page, or there are none.
    #[error("there are no regions of RAM, or they overlap, are empty or end within a huge page")]
    Regions,
    /// It cannot be mapped.
    #[error("RAM cannot be mapped")]
    Map(#[source] io::Error),
}

/// The mapping of a guest's RAM. An access to a page that is inaccessible fails as one outside of RAM does; of one to
/// several pages, a part may have been done.
#[derive(Debug, Clone, Copy)]
pub struct MappedRam<'a> {
    ram: &'a GuestMemoryMmap<()>,
    /// Counts accesses to inaccessible pages.
    failures: Option<&'a AtomicU64>,
}

impl<'a> From<&'a GuestMemoryMmap<()>> for MappedRam<'a> {
    fn from(ram: &'a GuestMemoryMmap<()>) -> Self {
        Self {
            ram,
            failures: None,
        }
    }
}

impl MappedRam<'_> {
    /// Whether the whole range is RAM.
    pub fn contains(self, address: u64, bytes: u64) -> bool {
        address.checked_add(bytes).is_some()
            && usize::try_from(bytes)
                .is_ok_and(|bytes| self.ram.check_range(GuestAddress(address), bytes))
    }

    /// Loads a number at an aligned address.
    ///
    /// # Errors
    /// [`OutsideRam`], also if the address is not aligned.
    pub fn load<T: AtomicAccess>(self, address: u64, order: Ordering) -> Result<T, OutsideRam> {
        self.access(address, size_of::<T>(), |ram, address| {
            ram.load(address, order)
        })
    }

    /// Stores a number at an aligned address.
    ///
    /// # Errors
    /// As of [`load`](Self::load).
    pub fn store<T: AtomicAccess>(
        self,
        value: T,
        address: u64,
        order: Ordering,
    ) -> Result<(), OutsideRam> {
        self.access(address, size_of::<T>(), |ram, address| {
            ram.store(value, address, order)
        })
    }

    /// Copies from the guest.
    ///
    /// # Errors
    /// [`OutsideRam`].
    pub fn read(self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        self.access(address, bytes.len(), |ram, address| {
            ram.read_slice(bytes, address)
        })
    }

    /// Copies to the guest.
    ///
    /// # Errors
    /// [`OutsideRam`].
    pub fn write(self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        self.access(address, bytes.len(), |ram, address| {
            ram.write_slice(bytes, address)
        })
    }

    fn access<T>(
        self,
        address: u64,
        bytes: usize,
        access: impl FnOnce(&GuestMemoryMmap<()>, GuestAddress) -> Result<T, GuestMemoryError>,
    ) -> Result<T, OutsideRam> {
        let done = sys::without_bus_errors(self.ram, |ram| access(ram, GuestAddress(address)).ok());
        if let (None, Some(failures)) = (&done, self.failures) {
            failures.fetch_add(1, Ordering::Relaxed);
        }
        done.flatten().ok_or(OutsideRam { address, bytes })
    }
}

/// A guest's RAM. A request in flight keeps it alive by an `Arc`.
#[derive(Debug)]
pub struct GuestRam {
    mapped: GuestMemoryMmap<()>,
    regions: Vec<Region>,
    touched: AtomicBool,
    /// Accesses that failed although the address is RAM, since they were taken.
    failures: AtomicU64,
}

#[derive(Debug)]
struct Region {
    start: u64,
    end: u64,
    file: Arc<File>,
    offset: u64,
    /// Whether data is written through the mapping.
    writes_by_mapping: bool,
}

impl GuestRam {
    /// Maps RAM made of these regions, given in any order.
    ///
    /// # Errors
    /// See [`RamError`].
    pub fn new(mut regions: Vec<RamRegion>) -> Result<Self, RamError> {
        sys::handle_bus_errors().map_err(RamError::Map)?;
        regions.sort_by_key(|region| region.address);
        let mut mapped = Vec::new();
        let mut kept = Vec::new();
        for region in regions {
            // Refused by files that are no memfd, or were made without sealing.
            let _ = fcntl_add_seals(&region.file, SealFlags::SHRINK);
            let (offset, bytes) = (region.offset, region.bytes);
            let end = region.address.checked_add(bytes).ok_or(RamError::Regions)?;
            let file_bytes = region.file.metadata().map_err(RamError::Map)?.len();
            if offset.checked_add(bytes).is_none_or(|end| end > file_bytes) {
                return Err(RamError::FileTooShort { offset, bytes });
            }
            let system = fstatfs(&region.file).map_err(|error| RamError::Map(error.into()))?;
            let is_hugetlbfs = system.f_type == HUGETLBFS_MAGIC;
            let page_bytes = u64::try_from(system.f_bsize).unwrap_or(1);
            if is_hugetlbfs && !bytes.is_multiple_of(page_bytes) {
                return Err(RamError::Regions);
            }
            let length = usize::try_from(bytes).map_err(|_| RamError::Regions)?;
            let place = FileOffset::from_arc(Arc::clone(&region.file), offset);
            let start = GuestAddress(region.address);
            let mapping = GuestRegionMmap::from_range(start, length, Some(place))
                .map_err(|error| RamError::Map(io::Error::other(error)))?;
            mapped.push(mapping);
            kept.push(Region {
                start: region.address,
                end,
                file: region.file,
                offset,
                writes_by_mapping: is_hugetlbfs,
            });
        }
        let mapped = GuestMemoryMmap::from_regions(mapped).map_err(|_| RamError::Regions)?;
        Ok(Self {
            mapped,
            regions: kept,
            touched: AtomicBool::new(false),
            failures: AtomicU64::new(0),
        })
    }

    /// The mapping: for rings and headers, not for data.
    pub fn mapped(&self) -> MappedRam<'_> {
        if !self.touched.load(Ordering::Relaxed) {
            self.touched.store(true, Ordering::Relaxed);
        }
        MappedRam {
            ram: &self.mapped,
            failures: Some(&self.failures),
        }
    }

    /// Whether the whole range is RAM.
    pub fn contains(&self, address: u64, bytes: u64) -> bool {
        MappedRam::from(&self.mapped).contains(address, bytes)
    }

    /// How many accesses failed since the last call although the address is RAM.
    pub(crate) fn take_failures(&self) -> u64 {
        self.failures.swap(0, Ordering::Relaxed)
    }

    /// Drops the mapping's page-table entries, if there may be any.
    pub fn sweep(&self) {
        if self.touched.swap(false, Ordering::Relaxed) {
            for region in self.mapped.iter() {
                sys::drop_page_table_entries(region);
            }
        }
    }

    fn region(&self, address: u64) -> Option<&Region> {
        let after = self
            .regions
            .partition_point(|region| region.start <= address);
        let region = &self.regions[after.checked_sub(1)?];
        (address < region.end).then_some(region)
    }

    /// Calls `copy` with each region that the range lies in, the address where, and the part of `0..bytes` it holds.
    fn pieces(
        &self,
        address: u64,
        bytes: usize,
        mut copy: impl FnMut(&Region, u64, std::ops::Range<usize>) -> bool,
    ) -> Result<(), OutsideRam> {
        let outside = OutsideRam { address, bytes };
        let mut done = 0;
        while done < bytes {
            let at = address.checked_add(done as u64).ok_or(outside)?;
            let region = self.region(at).ok_or(outside)?;
            let left = usize::try_from(region.end - at).unwrap_or(usize::MAX);
            let end = bytes.min(done.saturating_add(left));
            if !copy(region, at, done..end) {
                return Err(outside);
            }
            done = end;
        }
        Ok(())
    }

    /// Whether a copy by the file behind the RAM was done; counted if not.
    fn is_done(&self, copied: &io::Result<()>) -> bool {
        if copied.is_err() {
            self.failures.fetch_add(1, Ordering::Relaxed);
        }
        copied.is_ok()
    }
}

impl GuestData for GuestRam {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        self.pieces(address, bytes.len(), |region, at, part| {
            let offset = region.offset + (at - region.start);
            // Not through a mapping: what the guest gave back would be allocated again, or end the process if it cannot be.
            self.is_done(&region.file.read_exact_at(&mut bytes[part], offset))
        })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        self.pieces(address, bytes.len(), |region, at, part| {
            let from = &bytes[part];
            if region.writes_by_mapping {
                self.mapped().write(at, from).is_ok()
            } else {
                let offset = region.offset + (at - region.start);
                self.is_done(&region.file.write_all_at(from, offset))
            }
        })
    }

    fn is_ram(&self, frame: u64) -> bool {
        frame
            .checked_mul(4096)
            .is_some_and(|address| self.region(address).is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use plimsoll_skip::{Lack, skip};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn file(bytes: u64) -> Arc<File> {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file");
        file.set_len(bytes).expect("its length");
        Arc::new(file)
    }

    fn region(address: u64, bytes: u64, file: &Arc<File>, offset: u64) -> RamRegion {
        RamRegion {
            address,
            bytes,
            file: Arc::clone(file),
            offset,
        }
    }

    /// A file of huge pages, none of which it has yet; `None` after saying why the test is skipped.
    fn huge_file(bytes: u64) -> Option<Arc<File>> {
        let flags = MemfdFlags::HUGETLB | MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let Ok(made) = memfd_create("huge", flags) else {
            skip(Lack::Host, "this kernel has no huge pages");
            return None;
        };
        let file = File::from(made);
        file.set_len(bytes).expect("its length");
        Some(Arc::new(file))
    }

    #[test]
    fn data_crosses_regions_and_ends_where_ram_ends() {
        let file = file(0x4000);
        let ram = GuestRam::new(vec![
            region(0x1_0000_0000, 0x1000, &file, 0x3000),
            region(0x2000, 0x1000, &file, 0),
            region(0x1000, 0x1000, &file, 0x1000),
        ])
        .expect("RAM");
        let written: Vec<u8> = (0..=250).cycle().take(0x1800).collect();
        ram.write(0x1400, &written).expect("in RAM");
        let mut read = vec![0; 0x1800];
        ram.read(0x1400, &mut read).expect("in RAM");
        assert!(read == written);
        // The same bytes by the mapping, and where the file has them.
        ram.mapped().read(0x1400, &mut read).expect("mapped");
        assert!(read == written);
        let mut first = [0; 16];
        file.read_exact_at(&mut first, 0x1400).expect("a read");
        assert_eq!(first, written[..16]);

        assert!(ram.write(0x2fff, &[1, 2]).is_err());
        assert!(ram.read(0xfff, &mut [0]).is_err());
        assert!(ram.read(u64::MAX, &mut [0; 2]).is_err());
        assert!(ram.contains(0x1000, 0x2000) && !ram.contains(0x1000, 0x2001));
        assert!(!ram.contains(u64::MAX, 2) && !ram.contains(0x3000, 1));
        assert!(ram.is_ram(1) && ram.is_ram(0x10_0000));
        assert!(!ram.is_ram(0) && !ram.is_ram(3) && !ram.is_ram(0x10_0001));
        assert!(!ram.is_ram(1 << 52) && !ram.is_ram(u64::MAX));
    }

    #[test]
    fn a_sweep_keeps_what_was_written_by_the_mapping() {
        let file = file(0x2000);
        let ram = GuestRam::new(vec![region(0, 0x2000, &file, 0)]).expect("RAM");
        ram.mapped()
            .store(77u64, 0x1008, Ordering::Relaxed)
            .expect("in RAM");
        ram.sweep();
        assert_eq!(
            ram.mapped()
                .load::<u64>(0x1008, Ordering::Relaxed)
                .expect("in RAM"),
            77
        );
        let mut bytes = [0; 8];
        ram.read(0x1008, &mut bytes).expect("in RAM");
        assert_eq!(u64::from_le_bytes(bytes), 77);
    }

    #[test]
    fn regions_that_overlap_or_outgrow_their_file_are_refused() {
        let file = file(0x2000);
        let made = GuestRam::new(vec![
            region(0, 0x2000, &file, 0),
            region(0x1000, 0x1000, &file, 0),
        ]);
        assert!(matches!(made, Err(RamError::Regions)));
        let made = GuestRam::new(vec![region(0, 0x2000, &file, 0x1000)]);
        assert!(matches!(
            made,
            Err(RamError::FileTooShort {
                offset: 0x1000,
                bytes: 0x2000
            })
        ));
        assert!(matches!(GuestRam::new(Vec::new()), Err(RamError::Regions)));
    }

    #[test]
    fn ram_that_cannot_be_mapped_again_fails_for_good() {
        let Some(file) = huge_file(2 << 20) else {
            return;
        };
        let ram = GuestRam::new(vec![region(0, 2 << 20, &file, 0)]).expect("RAM");
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).expect("sealed");
        let load = || ram.mapped().load::<u64>(0, Ordering::Relaxed);
        if load().is_ok() {
            skip(Lack::Host, "huge pages are free");
            return;
        }
        assert!(load().is_err() && load().is_err());
    }

    #[test]
    fn parts_of_huge_pages_are_refused() {
        let Some(file) = huge_file(4 << 20) else {
            return;
        };
        let made = GuestRam::new(vec![region(0, 3 << 20, &file, 0)]);
        assert!(matches!(made, Err(RamError::Regions)));
        GuestRam::new(vec![region(0, 4 << 20, &file, 0)]).expect("whole pages");
    }

    #[test]
    fn reading_huge_pages_that_are_not_there_takes_none() {
        let bytes = 2 << 20;
        let Some(file) = huge_file(bytes) else {
            return;
        };
        let ram = GuestRam::new(vec![region(0, bytes, &file, 0)]).expect("RAM");
        let mut page = [1; 4096];
        ram.read(0x5000, &mut page).expect("in RAM");
        assert_eq!(page, [0; 4096]);
        assert_eq!(file.metadata().expect("its size").blocks(), 0);
    }

    #[test]
    fn data_beyond_a_file_that_shrank_is_outside_ram() {
        let file = file(0x2000);
        let ram = GuestRam::new(vec![region(0, 0x2000, &file, 0)]).expect("RAM");
        file.set_len(0x1000).expect("a shorter file");
        assert!(ram.read(0x1000, &mut [0; 8]).is_err());
    }

    #[test]
    fn the_mapping_of_a_file_that_shrank_fails_until_it_has_grown() {
        let file = file(0x3000);
        let ram = GuestRam::new(vec![
            region(0x1_0000, 0x1000, &file, 0x2000),
            region(0, 0x2000, &file, 0),
        ]);
        let ram = ram.expect("RAM");
        let mapped = ram.mapped();
        mapped.write(0xff8, &[7; 16]).expect("in RAM");
        file.set_len(0x1000).expect("a shorter file");
        for _ in 0..2 {
            assert!(mapped.load::<u64>(0x1000, Ordering::Relaxed).is_err());
            assert!(mapped.store(1u64, 0x1_0000, Ordering::Relaxed).is_err());
            assert!(mapped.write(0xff0, &[8; 32]).is_err());
            let mut bytes = [0; 32];
            assert!(mapped.read(0xff0, &mut bytes).is_err());
            mapped.read(0xff0, &mut bytes[..16]).expect("still in RAM");
            assert_eq!(bytes[8..16], [7; 8]);
        }
        file.set_len(0x3000).expect("its length");
        mapped
            .store(9u64, 0x1_0000, Ordering::Relaxed)
            .expect("in RAM");
        let mut bytes = [0; 8];
        ram.read(0x1_0000, &mut bytes).expect("in RAM");
        assert_eq!(u64::from_ne_bytes(bytes), 9);
        assert_eq!(mapped.load::<u64>(0x1000, Ordering::Relaxed), Ok(0));
    }
}
