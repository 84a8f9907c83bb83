//! The BPF programs that observe uses of the page cache in the kernel, loaded for one sample of pages.
//!
//! They are C (`bpf/page_cache.bpf.c`), compiled once and kept beside it (`./dev bpf`), so that building needs no clang; the loader
//! relocates them to the running kernel's structures. The kernel removes them when the process ends, however it does.
//!
//! Not here: what the uses mean.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::time::Duration;

use aya::maps::{HashMap, Map, MapData, MapError, PerCpuArray, RingBuf};
use aya::programs::fentry::FEntryLinkId;
use aya::programs::tp_btf::BtfTracePointLinkId;
use aya::programs::{BtfTracePoint, FEntry, Program, ProgramError};
use aya::sys::{Stats, enable_stats};
use aya::{Btf, Ebpf, EbpfError, EbpfLoader, Endianness};
use plimsoll_flow::PageNumber;

use crate::refusal::Refusal;

static OBJECT: &[u8] = aya::include_bytes_aligned!("../../bpf/page_cache.bpf.o");

/// The kernel's description of its own types.
const TYPES: &str = "/sys/kernel/btf/vmlinux";
/// The programs with the function, and the tracepoint, at which they run.
const ACCESSED: (&str, &str) = ("accessed", "folio_mark_accessed");
const DIRTIED: (&str, &str) = ("dirtied", "writeback_dirty_folio");

/// Of the map `counts`.
const LOST: u32 = 0;
const COUNTED: u32 = 1;
/// Of the uses of all pages one in 2^`COUNTED_BITS` is counted.
pub const COUNTED_BITS: u32 = 4;
/// Uses for which the ring has room, with their headers.
pub const RING_USES: u64 = (4 << 20) / 16;
/// Groups from which on those that were removed are observed no longer: half of those that the map can hold.
const GROUPS_MAX: usize = 32_768;

/// The programs in the kernel. Dropped, they are removed.
pub struct Programs {
    ebpf: Ebpf,
    uses: RingBuf<MapData>,
    groups: HashMap<MapData, u64, u8>,
    /// Inodes of the groups that are observed.
    observed: BTreeSet<u64>,
    counts: PerCpuArray<MapData, u64>,
    /// While it is open, the kernel measures the time that programs take.
    _clock: OwnedFd,
    /// While they run.
    on_access: Option<FEntryLinkId>,
    on_write: Option<BtfTracePointLinkId>,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Programs");
        text.field("on_access", &self.on_access);
        text.finish_non_exhaustive()
    }
}

impl Programs {
    /// Loads them for the pages whose hash with `seed` is one in `scale`, a power of two. They do not run yet.
    pub fn load(scale: u32, seed: u64) -> Result<Self, Refusal> {
        let refuse = |source| Refusal::NoPageCacheTracing { source };
        let types = Btf::parse_file(TYPES, Endianness::default()).map_err(|error| {
            let source = cause(&error);
            refuse(io::Error::new(source.kind(), format!("{TYPES}: {source}")))
        })?;
        Self::load_for(&types, scale, seed).map_err(|error| refuse(cause(&error)))
    }

    fn load_for(types: &Btf, scale: u32, seed: u64) -> Result<Self, EbpfError> {
        let mask = u64::from(scale) - 1;
        let mut ebpf = EbpfLoader::new()
            .btf(Some(types))
            .override_global("sample_mask", &mask, true)
            .override_global("seed", &seed, true)
            .override_global("counted_bits", &COUNTED_BITS, true)
            .load(OBJECT)?;
        accessed(&mut ebpf)?.load(ACCESSED.1, types)?;
        dirtied(&mut ebpf)?.load(DIRTIED.1, types)?;
        Ok(Self {
            uses: RingBuf::try_from(map(&mut ebpf, "uses")?)?,
            groups: HashMap::try_from(map(&mut ebpf, "groups")?)?,
            observed: BTreeSet::new(),
            counts: PerCpuArray::try_from(map(&mut ebpf, "counts")?)?,
            _clock: enable_stats(Stats::RunTime).map_err(ProgramError::from)?,
            on_access: None,
            on_write: None,
            ebpf,
        })
    }

    /// Observes the groups whose directories have the inodes `wanted`, and those that were removed since, to which pages stay charged.
    pub fn follow(&mut self, wanted: &[u64]) -> io::Result<()> {
        let new = wanted.iter().filter(|inode| !self.observed.contains(inode));
        let new: Vec<_> = new.copied().collect();
        if self.observed.len() + new.len() > GROUPS_MAX {
            let wanted: BTreeSet<_> = wanted.iter().copied().collect();
            for gone in self.observed.difference(&wanted) {
                self.groups.remove(gone).map_err(|error| cause(&error))?;
            }
            self.observed.retain(|inode| wanted.contains(inode));
        }
        for inode in new {
            let added = self.groups.insert(inode, 1, 0);
            added.map_err(|error| cause(&error))?;
            self.observed.insert(inode);
        }
        Ok(())
    }

    /// Lets them run, if they do not.
    pub fn attach(&mut self) -> io::Result<()> {
        let mut attach = || -> Result<(), EbpfError> {
            if self.on_access.is_none() {
                self.on_access = Some(accessed(&mut self.ebpf)?.attach()?);
            }
            if self.on_write.is_none() {
                self.on_write = Some(dirtied(&mut self.ebpf)?.attach()?);
            }
            Ok(())
        };
        attach().map_err(|error| cause(&error))
    }

    /// Stops them; they stay loaded.
    pub fn detach(&mut self) -> io::Result<()> {
        let mut detach = || -> Result<(), EbpfError> {
            if let Some(link) = self.on_access.take() {
                accessed(&mut self.ebpf)?.detach(link)?;
            }
            if let Some(link) = self.on_write.take() {
                dirtied(&mut self.ebpf)?.detach(link)?;
            }
            Ok(())
        };
        detach().map_err(|error| cause(&error))
    }

    /// The next page used, in order; `None` if there is none yet.
    pub fn next(&mut self) -> Option<PageNumber> {
        let used = self.uses.next()?;
        let page = <[u8; 8]>::try_from(&*used).ok()?;
        Some(PageNumber(u64::from_ne_bytes(page)))
    }

    /// Uses so far that found the ring full.
    pub fn overflowed(&self) -> io::Result<u64> {
        self.count(LOST)
    }

    /// Those, and uses that found a program running on their processor already.
    pub fn lost(&self) -> io::Result<u64> {
        let mut lost = self.overflowed()?;
        for (_, program) in self.ebpf.programs() {
            let fd = program.fd().map_err(|error| cause(&error))?;
            let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
            lost = lost.saturating_add(skipped_runs(&fs::read_to_string(path)?));
        }
        Ok(lost)
    }

    /// Uses so far of all pages of the groups, in the sample or not: an estimate.
    pub fn uses(&self) -> io::Result<u64> {
        Ok(self.count(COUNTED)? << COUNTED_BITS)
    }

    fn count(&self, which: u32) -> io::Result<u64> {
        let counts = self.counts.get(&which, 0).map_err(|error| cause(&error))?;
        Ok(counts.iter().sum())
    }

    /// Time that they have taken so far, on all processors.
    pub fn run_time(&self) -> io::Result<Duration> {
        let times = self.ebpf.programs().map(|(_, program)| {
            let found = program.info().map_err(|error| cause(&error));
            Ok(found?.run_time())
        });
        times.sum()
    }
}

fn accessed(ebpf: &mut Ebpf) -> Result<&mut FEntry, EbpfError> {
    Ok(program(ebpf, ACCESSED.0)?.try_into()?)
}

fn dirtied(ebpf: &mut Ebpf) -> Result<&mut BtfTracePoint, EbpfError> {
    Ok(program(ebpf, DIRTIED.0)?.try_into()?)
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Program, EbpfError> {
    let program = ebpf.program_mut(name);
    Ok(program.ok_or(ProgramError::UnexpectedProgramType)?)
}

/// How often a program was not run because it ran on the processor already, by the kernel's description of its descriptor.
fn skipped_runs(fdinfo: &str) -> u64 {
    let mut values = fdinfo
        .lines()
        .filter_map(|line| line.strip_prefix("recursion_misses:"));
    let value = values.next().and_then(|value| value.trim().parse().ok());
    value.unwrap_or(0)
}

fn map(ebpf: &mut Ebpf, name: &str) -> Result<Map, EbpfError> {
    let map = ebpf.take_map(name);
    let missing = || MapError::InvalidName {
        name: name.to_owned(),
    };
    Ok(map.ok_or_else(missing)?)
}

/// The error of the kernel's call at the bottom of an error, with the last words of the kernel about a program that it rejects;
/// otherwise its whole text.
fn cause(error: &(dyn Error + 'static)) -> io::Error {
    let mut texts = error.to_string();
    let mut at = Some(error);
    while let Some(source) = at {
        if let Some(ProgramError::LoadError {
            io_error,
            verifier_log,
        }) = source.downcast_ref()
            && let Some(words) = last_words(&verifier_log.to_string())
        {
            return io::Error::new(io_error.kind(), format!("{io_error}: {words}"));
        }
        if let Some(os) = source
            .downcast_ref::<io::Error>()
            .and_then(io::Error::raw_os_error)
        {
            return io::Error::from_raw_os_error(os);
        }
        at = source.source();
        if let Some(source) = at {
            texts = format!("{texts}: {source}");
        }
    }
    io::Error::other(texts)
}

/// The last line of the verifier's log, before its statistics.
fn last_words(log: &str) -> Option<&str> {
    let is_statistic =
        |line: &&str| line.starts_with("verification time ") || line.starts_with("processed ");
    log.lines().take_while(|line| !is_statistic(line)).last()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_the_kernel_skipped_are_found_in_what_it_says_of_a_program() {
        let fdinfo = "pos:\t0\nprog_type:\t26\nrun_time_ns:\t7\nrun_cnt:\t3\nrecursion_misses:\t12\nverified_insns:\t9\n";
        assert_eq!(skipped_runs(fdinfo), 12);
        assert_eq!(skipped_runs("pos:\t0\n"), 0);
    }

    #[test]
    fn the_last_words_about_a_rejected_program_are_those_before_the_statistics() {
        let log = "0: R1=ctx()\nR1 bitwise operator &= on pointer prohibited\nverification time 31 usec\nprocessed 2 insns\n";
        let words = "R1 bitwise operator &= on pointer prohibited";
        assert_eq!(last_words(log), Some(words));
        assert_eq!(last_words(""), None);
    }
}
