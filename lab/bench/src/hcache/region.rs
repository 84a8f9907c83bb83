//! Memory used as source and target of pages, and the memory use of the process.

use std::fs;

use anyhow::Context;
use memmap2::{Advice, MmapMut};
use plimsoll_hcache::{PAGE_BYTES, Page};

/// Pages in a mapping of their own, all of them present.
pub(crate) struct Region {
    map: MmapMut,
}

impl Region {
    /// Maps `pages` pages, on huge pages or on none, and touches them all.
    pub(crate) fn new(pages: usize, huge: bool) -> anyhow::Result<Self> {
        let mut map = MmapMut::map_anon(pages * PAGE_BYTES)?;
        map.advise(if huge {
            Advice::HugePage
        } else {
            Advice::NoHugePage
        })?;
        for (number, page) in map.chunks_exact_mut(PAGE_BYTES).enumerate() {
            let number = (number as u64).to_le_bytes();
            page.chunks_exact_mut(8)
                .for_each(|word| word.copy_from_slice(&number));
        }
        Ok(Self { map })
    }

    pub(crate) fn pages(&self) -> usize {
        self.map.len() / PAGE_BYTES
    }

    pub(crate) fn page(&self, number: usize) -> &Page {
        let page = &self.map[number * PAGE_BYTES..][..PAGE_BYTES];
        page.try_into().expect("a page's length")
    }

    pub(crate) fn page_mut(&mut self, number: usize) -> &mut Page {
        let page = &mut self.map[number * PAGE_BYTES..][..PAGE_BYTES];
        page.try_into().expect("a page's length")
    }
}

/// A line of a file under /proc that counts in kB, in bytes.
pub(crate) fn proc_bytes(file: &str, field: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let count = line.and_then(|line| line.trim_start_matches(':').split_whitespace().next());
    let count: u64 = count
        .with_context(|| format!("{file} does not say {field}"))?
        .parse()?;
    Ok(count * 1024)
}

/// Bytes of the process on huge pages.
pub(crate) fn huge_bytes() -> anyhow::Result<u64> {
    proc_bytes("/proc/self/smaps_rollup", "AnonHugePages")
}

/// Other load on the machine, which distorts figures of wall time.
pub(crate) fn load_average() -> anyhow::Result<String> {
    let text = fs::read_to_string("/proc/loadavg")?;
    let recent = text.split_whitespace().next();
    Ok(format!(
        "load of the machine before: {}",
        recent.unwrap_or("unknown")
    ))
}
