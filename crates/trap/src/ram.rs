//! The location of a VM's pages: page numbers to addresses and back, populated pages, presence.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt as _};

use plimsoll_flow::{PageNumber, RamMapping};

use crate::sys::{AddressRange, usize_of};

/// Bytes in a page as this crate traps them; x86-64 has no smaller one.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes in a huge page of x86-64, as a page-table entry maps it.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Bytes in a block, in which a file system counts what a file takes.
const BLOCK_BYTES: u64 = 512;

/// Consecutive pages, the end excluded.
pub type PageRange = Range<u64>;

/// One mapping, with the number its first page has.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    first_page: u64,
    /// Its addresses.
    pub range: AddressRange,
}

impl Region {
    /// Its pages.
    pub fn pages(&self) -> PageRange {
        self.pages_at(self.range)
    }

    /// The pages at addresses that lie in it.
    pub fn pages_at(&self, addresses: AddressRange) -> PageRange {
        let first = self.first_page + (addresses.start - self.range.start) / PAGE_BYTES;
        first..first + addresses.len_bytes / PAGE_BYTES
    }

    /// The addresses of pages that lie in it.
    pub fn addresses(&self, pages: &PageRange) -> AddressRange {
        AddressRange {
            start: self.range.start + (pages.start - self.first_page) * PAGE_BYTES,
            len_bytes: (pages.end - pages.start) * PAGE_BYTES,
        }
    }
}

/// The RAM of a VM as one run of pages, numbered through its mappings in order.
#[derive(Debug, Clone)]
pub struct RamLayout {
    regions: Vec<Region>,
}

impl RamLayout {
    /// Numbers the pages of `ranges` from 0.
    pub fn new(ranges: impl IntoIterator<Item = AddressRange>) -> Self {
        let mut first_page = 0;
        let regions = ranges.into_iter().map(|range| {
            let region = Region { first_page, range };
            first_page = region.pages().end;
            region
        });
        Self {
            regions: regions.collect(),
        }
    }

    /// Numbers the pages of `ranges`, which rise, by their addresses.
    pub fn by_address(ranges: impl IntoIterator<Item = AddressRange>) -> Self {
        let regions = ranges.into_iter().map(|range| Region {
            first_page: range.start / PAGE_BYTES,
            range,
        });
        Self {
            regions: regions.collect(),
        }
    }

    /// Total number of pages.
    pub fn pages(&self) -> u64 {
        self.regions.last().map_or(0, |region| region.pages().end)
    }

    /// The mappings.
    pub fn regions(&self) -> impl Iterator<Item = Region> + '_ {
        self.regions.iter().copied()
    }

    /// The mappings' addresses.
    pub fn ranges(&self) -> impl Iterator<Item = AddressRange> + '_ {
        self.regions.iter().map(|region| region.range)
    }

    /// The page at an address, if it belongs to the RAM.
    pub fn page_at(&self, address: u64) -> Option<PageNumber> {
        self.regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.range.start)?;
            (offset < region.range.len_bytes)
                .then(|| PageNumber(region.first_page + offset / PAGE_BYTES))
        })
    }

    /// The addresses of `pages`, one range for each mapping they lie in.
    pub fn addresses<'layout>(
        &'layout self,
        pages: &PageRange,
    ) -> impl Iterator<Item = AddressRange> + use<'layout> {
        let pages = pages.clone();
        let ends_before = |region: &Region| region.pages().end <= pages.start;
        let first = self.regions.partition_point(ends_before);
        let regions = self.regions[first..].iter();
        let end = pages.end;
        let regions = regions.take_while(move |region| region.first_page < end);
        regions.filter_map(move |region| {
            let whole = region.pages();
            let (start, end) = (pages.start.max(whole.start), pages.end.min(whole.end));
            (start < end).then(|| region.addresses(&(start..end)))
        })
    }
}

/// Which pages the files behind a VM's RAM hold; the others were never touched.
///
/// Listing them requires a kernel walk over all (12 ms a GiB), so it is repeated only when the files' number of blocks
/// has changed, and periodically in case a page was added while another was removed.
#[derive(Debug)]
pub struct PopulatedPages {
    files: Vec<(PageRange, u64, File)>,
    /// Blocks of each file when the runs were listed.
    blocks: Vec<u64>,
    runs: Vec<PageRange>,
    /// How often the runs have been returned since.
    uses: u32,
}

/// How often runs are returned before they are listed again: five minutes of the usual periods.
const USES_MAX: u32 = 60;

impl PopulatedPages {
    /// Opens the files behind the mappings of process `pid`.
    pub fn open(pid: u32, layout: &RamLayout, mappings: &[RamMapping]) -> io::Result<Self> {
        let folder = format!("/proc/{pid}/map_files");
        let names: Vec<_> = fs::read_dir(&folder)?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        let mut files = Vec::new();
        for (region, mapping) in layout.regions.iter().zip(mappings) {
            let prefix = format!("{:x}-", mapping.address);
            let name = names
                .iter()
                .find(|name| name.starts_with(&prefix))
                .ok_or_else(|| {
                    io::Error::new(io::ErrorKind::NotFound, format!("{folder}/{prefix}*"))
                })?;
            let file = File::open(format!("{folder}/{name}"))?;
            files.push((region.pages(), mapping.file_offset_bytes, file));
        }
        Ok(Self::of_files(files))
    }

    /// Of one file that holds all pages from its start.
    #[cfg(test)]
    pub fn of_file(layout: &RamLayout, file: File) -> Self {
        Self::of_files(vec![(0..layout.pages(), 0, file)])
    }

    fn of_files(files: Vec<(PageRange, u64, File)>) -> Self {
        Self {
            files,
            blocks: Vec::new(),
            runs: Vec::new(),
            uses: USES_MAX,
        }
    }

    /// The runs of populated pages, in ascending order.
    pub fn runs(&mut self) -> io::Result<&[PageRange]> {
        let blocks = self
            .files
            .iter()
            .map(|(_, _, file)| Ok(file.metadata()?.blocks()));
        let blocks = blocks.collect::<io::Result<Vec<_>>>()?;
        if blocks != self.blocks || self.uses >= USES_MAX {
            self.runs = self.list()?;
            self.blocks = blocks;
            self.uses = 0;
        }
        self.uses += 1;
        Ok(&self.runs)
    }

    /// Number of populated pages: the blocks of the files, of which a file that holds more than RAM may have more.
    pub fn pages(&self) -> io::Result<u64> {
        let mut files = BTreeMap::new();
        let mut ram_pages = 0;
        for (pages, _, file) in &self.files {
            let metadata = file.metadata()?;
            files.insert((metadata.dev(), metadata.ino()), metadata.blocks());
            ram_pages += pages.end - pages.start;
        }
        let blocks: u64 = files.into_values().sum();
        Ok((blocks / (PAGE_BYTES / BLOCK_BYTES)).min(ram_pages))
    }

    /// Whether a page is populated: takes the same time for every size of the RAM.
    pub fn has(&self, page: u64) -> io::Result<bool> {
        use rustix::fs::{SeekFrom, seek};
        let mut files = self.files.iter();
        let Some((pages, offset_bytes, file)) = files.find(|(pages, ..)| pages.contains(&page))
        else {
            return Ok(false);
        };
        let at = offset_bytes + (page - pages.start) * PAGE_BYTES;
        match seek(file.as_fd(), SeekFrom::Data(at)) {
            Ok(data) => Ok(data < at + PAGE_BYTES),
            Err(rustix::io::Errno::NXIO) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn list(&self) -> io::Result<Vec<PageRange>> {
        use rustix::fs::{SeekFrom, seek};
        let mut runs = Vec::new();
        for (pages, offset_bytes, file) in &self.files {
            let end_bytes = offset_bytes + (pages.end - pages.start) * PAGE_BYTES;
            let page_at =
                |bytes: u64| pages.start + (bytes.min(end_bytes) - offset_bytes) / PAGE_BYTES;
            let mut at = *offset_bytes;
            while at < end_bytes {
                let start = match seek(file.as_fd(), SeekFrom::Data(at)) {
                    Ok(start) => start,
                    Err(rustix::io::Errno::NXIO) => break,
                    Err(error) => return Err(error.into()),
                };
                if start >= end_bytes {
                    break;
                }
                at = seek(file.as_fd(), SeekFrom::Hole(start))?;
                runs.push(page_at(start)..page_at(at));
            }
        }
        Ok(runs)
    }
}

/// State of a mapped page in its process's page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedPage {
    /// Whether the page is free of userfaultfd's write protection: it was written since it was
    /// protected, or never was protected.
    pub unprotected: bool,
}

/// Which pages a process has mapped, from its pagemap.
#[derive(Debug)]
pub struct Presence {
    pagemap: File,
    entries: Vec<u8>,
}

impl Presence {
    /// Opens the pagemap of process `pid`.
    pub fn open(pid: u32) -> io::Result<Self> {
        Ok(Self {
            pagemap: File::open(format!("/proc/{pid}/pagemap"))?,
            entries: Vec::new(),
        })
    }

    /// The pagemap itself.
    pub fn pagemap(&self) -> BorrowedFd<'_> {
        self.pagemap.as_fd()
    }

    /// Calls `visit` with the number of each page of `range` that is mapped, from 0.
    pub fn for_each_present(
        &mut self,
        range: AddressRange,
        mut visit: impl FnMut(u64, MappedPage),
    ) -> io::Result<()> {
        const ENTRY_BYTES: usize = 8;
        const CHUNK_PAGES: u64 = 8192;
        let pages = range.len_bytes / PAGE_BYTES;
        let mut first = 0;
        while first < pages {
            let count = CHUNK_PAGES.min(pages - first);
            self.entries.resize(usize_of(count) * ENTRY_BYTES, 0);
            let offset = (range.start / PAGE_BYTES + first) * ENTRY_BYTES as u64;
            self.pagemap.read_exact_at(&mut self.entries, offset)?;
            for (index, entry) in self.entries.chunks_exact(ENTRY_BYTES).enumerate() {
                // Bit 63 of the little-endian entry: the page is mapped; bit 57: it is protected.
                let flags = entry[ENTRY_BYTES - 1];
                if flags & 0x80 != 0 {
                    let unprotected = flags & 0x02 == 0;
                    visit(first + index as u64, MappedPage { unprotected });
                }
            }
            first += count;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> RamLayout {
        RamLayout::new([
            AddressRange {
                start: 0x10_0000,
                len_bytes: 4 * PAGE_BYTES,
            },
            AddressRange {
                start: 0x80_0000,
                len_bytes: 2 * PAGE_BYTES,
            },
        ])
    }

    #[test]
    fn pages_are_numbered_through_all_mappings() {
        let layout = layout();
        assert_eq!(layout.pages(), 6);
        assert_eq!(layout.page_at(0x10_0000), Some(PageNumber(0)));
        assert_eq!(layout.page_at(0x10_3fff), Some(PageNumber(3)));
        assert_eq!(layout.page_at(0x10_4000), None);
        assert_eq!(layout.page_at(0x80_1000), Some(PageNumber(5)));
    }

    #[test]
    fn pages_numbered_by_address_are_found_and_those_between_mappings_are_not() {
        let layout = RamLayout::by_address(layout().ranges());
        let address = |page| layout.addresses(&(page..page + 1)).next();
        let one = |start| {
            Some(AddressRange {
                start,
                len_bytes: PAGE_BYTES,
            })
        };
        assert_eq!((address(0x103), address(0x104)), (one(0x10_3000), None));
        assert_eq!((address(0x801), address(0x802)), (one(0x80_1000), None));
        assert_eq!(address(0), None);
    }

    #[test]
    fn pages_that_come_and_go_are_noticed() {
        use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
        let file = File::from(memfd_create("pages", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, 8 * PAGE_BYTES).unwrap();
        let layout = RamLayout::new([AddressRange {
            start: 0,
            len_bytes: 8 * PAGE_BYTES,
        }]);
        let mut populated = PopulatedPages::of_file(&layout, file.try_clone().unwrap());
        assert!(populated.runs().unwrap().is_empty());
        for page in [1, 2, 6] {
            file.write_all_at(&[1], page * PAGE_BYTES).unwrap();
        }
        assert_eq!(populated.runs().unwrap(), [1..3, 6..7]);
        assert_eq!(populated.pages().unwrap(), 3);
        let has = (0..8).filter(|&page| populated.has(page).unwrap());
        assert_eq!(has.collect::<Vec<_>>(), [1, 2, 6]);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, punch, PAGE_BYTES, PAGE_BYTES).unwrap();
        assert_eq!(populated.runs().unwrap(), [2..3, 6..7]);
        assert_eq!(populated.pages().unwrap(), 2);
        assert!(!populated.has(1).unwrap() && populated.has(2).unwrap());
    }

    #[test]
    fn a_run_over_two_mappings_has_two_address_ranges() {
        let ranges: Vec<_> = layout().addresses(&(3..5)).collect();
        assert_eq!(
            ranges,
            [
                AddressRange {
                    start: 0x10_3000,
                    len_bytes: PAGE_BYTES
                },
                AddressRange {
                    start: 0x80_0000,
                    len_bytes: PAGE_BYTES
                },
            ]
        );
    }
}
