//! Which share of a VM's RAM has contents: pages that were ever touched and are not all zero.
//!
//! By a sample of pages, evenly spread over the RAM, that are read from outside. A page of private RAM that is not in memory is not read,
//! because reading would make it so; one that is swapped out counts as one with contents. Pages of shared RAM are read from the file behind
//! it, where it has data: the VM's page table need not have an entry for them, and gets none. If some of such RAM is swapped out, the kernel
//! does not tell which pages: those with data that the page table lacks count as ones with contents then, and are not read.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::error::VmError;
use crate::maps::{MapEntry, parse_maps, swapped_out};
use crate::process::QemuVm;

const PAGE_BYTES: u64 = 4096;
/// An error of 1.6 points at most, with 95 % confidence.
const SAMPLES: u64 = 4096;
/// Flags of an entry of pagemap.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// The golden ratio in 2^-64: multiples of it, modulo 1, are spread evenly.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl QemuVm {
    /// The share with contents, 0.0 to 1.0, of the last so many pages of its RAM, or of all if it has not more.
    ///
    /// # Errors
    ///
    /// [`VmError::File`] if its memory cannot be read.
    pub fn share_with_contents(&self, last_pages: u64) -> Result<f64, VmError> {
        let open = |name: &str| {
            let path = format!("/proc/{}/{name}", self.pid);
            File::open(&path).map_err(|source| VmError::of_file(&path, source))
        };
        let (pagemap, memory) = (open("pagemap")?, open("mem")?);
        let files = shared_files(self.pid)?;
        let pages: u64 = self.ram.iter().map(|ram| ram.len_bytes / PAGE_BYTES).sum();
        let length = last_pages.min(pages);
        let samples = length.min(SAMPLES);
        let mut with_contents = 0;
        for sample in 0..samples {
            let at = u128::from(sample.wrapping_mul(SPREAD)) * u128::from(length);
            let mut page = pages - length + u64::try_from(at >> 64).unwrap_or(0);
            for ram in &self.ram {
                let of_this = ram.len_bytes / PAGE_BYTES;
                if page < of_this {
                    let address = ram.address + page * PAGE_BYTES;
                    let found = match files.iter().find(|file| file.range.contains(&address)) {
                        Some(file) => file.has_contents(&pagemap, address),
                        None => has_contents(&pagemap, &memory, address),
                    };
                    let path = format!("/proc/{}/mem", self.pid);
                    let found = found.map_err(|source| VmError::of_file(&path, source))?;
                    with_contents += u64::from(found);
                    break;
                }
                page -= of_this;
            }
        }
        Ok(with_contents as f64 / samples.max(1) as f64)
    }
}

/// A file that a process has mapped shared.
struct SharedFile {
    range: Range<u64>,
    /// Of the range's start in the file.
    offset_bytes: u64,
    /// Whether some of it is swapped out, so that reading may bring it back.
    is_swapped: bool,
    file: File,
}

impl SharedFile {
    fn has_contents(&self, pagemap: &File, address: u64) -> io::Result<bool> {
        let offset = self.offset_bytes + (address - self.range.start);
        match seek(&self.file, SeekFrom::Data(offset)) {
            Ok(data) if data < offset + PAGE_BYTES => {}
            Ok(_) | Err(Errno::NXIO) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        if self.is_swapped && entry_of(pagemap, address)? & PRESENT == 0 {
            return Ok(true);
        }
        let mut page = [0; 4096];
        let length = self.file.read_at(&mut page, offset)?;
        Ok(page[..length].iter().any(|&byte| byte != 0))
    }
}

/// The files that a process has mapped shared, as far as this user may open them.
fn shared_files(pid: u32) -> Result<Vec<SharedFile>, VmError> {
    let read = |name: &str| {
        let path = format!("/proc/{pid}/{name}");
        let bytes = fs::read(&path).map_err(|source| VmError::of_file(&path, source))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let entries = parse_maps(&read("maps")?)?;
    let swapped = swapped_out(&read("smaps")?);
    let shared = entries
        .iter()
        .filter(|entry| entry.is_shared && entry.is_data);
    let file = |entry: &MapEntry| {
        let path = format!("/proc/{pid}/map_files/{:x}-{:x}", entry.start, entry.end);
        // Devices are no memory, and opening some has effects.
        let is_file = fs::metadata(&path).is_ok_and(|data| data.is_file());
        Some(SharedFile {
            range: entry.start..entry.end,
            offset_bytes: entry.offset_bytes,
            is_swapped: swapped.contains(&entry.start),
            file: is_file.then(|| File::open(&path).ok()).flatten()?,
        })
    };
    Ok(shared.filter_map(file).collect())
}

/// The entry of pagemap.
fn entry_of(pagemap: &File, address: u64) -> io::Result<u64> {
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, address / PAGE_BYTES * 8)?;
    Ok(u64::from_le_bytes(entry))
}

fn has_contents(pagemap: &File, memory: &File, address: u64) -> io::Result<bool> {
    let entry = entry_of(pagemap, address)?;
    if entry & PRESENT == 0 {
        return Ok(entry & SWAPPED != 0);
    }
    let mut page = [0; 4096];
    memory.read_exact_at(&mut page, address)?;
    Ok(page.iter().any(|&byte| byte != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_contents_if_it_was_touched_and_is_not_zero() {
        let open = |name: &str| File::open(format!("/proc/self/{name}")).unwrap();
        let (pagemap, memory) = (open("pagemap"), open("mem"));
        // Large enough to be pages of its own, and not touched yet but for two bytes.
        let mut area = vec![0_u8; 64 * 4096];
        let start = (area.as_ptr() as u64).next_multiple_of(4096);
        let place =
            |page: u64| usize::try_from(start - area.as_ptr() as u64 + page * 4096 + 77).unwrap();
        let (with, without) = (place(5), place(9));
        area[with] = 1;
        area[without] = 1;
        area[without] = std::hint::black_box(0);
        let found = |page: u64| has_contents(&pagemap, &memory, start + page * 4096).unwrap();
        assert!(found(5) && !found(9) && !found(20));
        assert_eq!(area[with], 1);
    }

    #[test]
    fn a_page_of_shared_memory_has_contents_without_an_entry_of_the_page_table() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(8 * PAGE_BYTES).unwrap();
        file.write_all_at(&[1], 2 * PAGE_BYTES + 5).unwrap();
        file.write_all_at(&[0], 3 * PAGE_BYTES).unwrap();
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        // Nothing is mapped there. Without data, a page is not swapped out either.
        let start = 0x1000;
        for (is_swapped, with_contents) in [(false, vec![1]), (true, vec![1, 2])] {
            let shared = SharedFile {
                range: start..start + 7 * PAGE_BYTES,
                offset_bytes: PAGE_BYTES,
                is_swapped,
                file: file.try_clone().unwrap(),
            };
            let found = |page: &u64| shared.has_contents(&pagemap, start + page * PAGE_BYTES);
            let found: Vec<_> = (0..7).filter(|page| found(page).unwrap()).collect();
            assert_eq!(found, with_contents);
        }
    }
}
