//! Which share of a VM's RAM has contents: pages that were ever touched and are not all zero.
//!
//! By a sample of pages, evenly spread over the RAM, that are read from outside. A page that is not in memory is not read, because reading
//! would make it so; one that is swapped out counts as one with contents.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use crate::error::VmError;
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
                    let found = has_contents(&pagemap, &memory, address);
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

fn has_contents(pagemap: &File, memory: &File, address: u64) -> io::Result<bool> {
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, address / PAGE_BYTES * 8)?;
    let entry = u64::from_le_bytes(entry);
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
}
