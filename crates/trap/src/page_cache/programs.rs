//! The BPF programs that observe uses of the page cache in the kernel, loaded for one sample of pages.
//!
//! They are C (`bpf/page_cache.bpf.c`), compiled once and kept beside it (`./dev bpf`), so that building needs no clang; the loader
//! relocates them to the running kernel's structures. The kernel removes them when the process ends, however it does.
//!
//! Not here: what the uses mean.

use std::error::Error;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
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

/// Of the map `counts`; one use in 2^`COUNTED_BITS` is counted.
const LOST: u32 = 0;
const COUNTED: u32 = 1;
pub const COUNTED_BITS: u32 = 4;

/// The programs in the kernel. Dropped, they are removed.
pub struct Programs {
    ebpf: Ebpf,
    uses: RingBuf<MapData>,
    groups: HashMap<MapData, u64, u8>,
    counts: PerCpuArray<MapData, u64>,
    /// While it is open, the kernel measures the time that programs take.
    _clock: OwnedFd,
    /// While they run.
    links: Option<(FEntryLinkId, BtfTracePointLinkId)>,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Programs");
        text.field("links", &self.links).finish_non_exhaustive()
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
            .load(OBJECT)?;
        accessed(&mut ebpf)?.load(ACCESSED.1, types)?;
        dirtied(&mut ebpf)?.load(DIRTIED.1, types)?;
        Ok(Self {
            uses: RingBuf::try_from(map(&mut ebpf, "uses")?)?,
            groups: HashMap::try_from(map(&mut ebpf, "groups")?)?,
            counts: PerCpuArray::try_from(map(&mut ebpf, "counts")?)?,
            _clock: enable_stats(Stats::RunTime).map_err(ProgramError::from)?,
            links: None,
            ebpf,
        })
    }

    /// Observes the groups whose directories have the inodes `wanted`, instead of those in `before`; both ascend.
    pub fn follow(&mut self, wanted: &[u64], before: &[u64]) -> io::Result<()> {
        let not_in = |others: &[u64], inode: &&u64| others.binary_search(inode).is_err();
        for gone in before.iter().filter(|inode| not_in(wanted, inode)) {
            self.groups.remove(gone).map_err(|error| cause(&error))?;
        }
        for new in wanted.iter().filter(|inode| not_in(before, inode)) {
            self.groups
                .insert(new, 1, 0)
                .map_err(|error| cause(&error))?;
        }
        Ok(())
    }

    /// Lets them run, if they do not.
    pub fn attach(&mut self) -> io::Result<()> {
        if self.links.is_none() {
            let mut attach = || -> Result<_, EbpfError> {
                let accessed = accessed(&mut self.ebpf)?.attach()?;
                Ok((accessed, dirtied(&mut self.ebpf)?.attach()?))
            };
            self.links = Some(attach().map_err(|error| cause(&error))?);
        }
        Ok(())
    }

    /// Stops them; they stay loaded.
    pub fn detach(&mut self) -> io::Result<()> {
        if let Some((on_access, on_write)) = self.links.take() {
            let detach = || -> Result<(), EbpfError> {
                accessed(&mut self.ebpf)?.detach(on_access)?;
                Ok(dirtied(&mut self.ebpf)?.detach(on_write)?)
            };
            detach().map_err(|error| cause(&error))?;
        }
        Ok(())
    }

    /// The next page used, in order; `None` if there is none yet.
    pub fn next(&mut self) -> Option<PageNumber> {
        let used = self.uses.next()?;
        let page = <[u8; 8]>::try_from(&*used).ok()?;
        Some(PageNumber(u64::from_ne_bytes(page)))
    }

    /// Uses so far that found the ring full.
    pub fn lost(&self) -> io::Result<u64> {
        self.count(LOST)
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

fn map(ebpf: &mut Ebpf, name: &str) -> Result<Map, EbpfError> {
    let map = ebpf.take_map(name);
    let missing = || MapError::InvalidName {
        name: name.to_owned(),
    };
    Ok(map.ok_or_else(missing)?)
}

/// The error of the kernel's call at the bottom of an error; otherwise its whole text, as of a program that the kernel rejects.
fn cause(error: &(dyn Error + 'static)) -> io::Error {
    let mut texts = error.to_string();
    let mut at = error.source();
    while let Some(source) = at {
        if let Some(os) = source
            .downcast_ref::<io::Error>()
            .and_then(io::Error::raw_os_error)
        {
            return io::Error::from_raw_os_error(os);
        }
        texts = format!("{texts}: {source}");
        at = source.source();
    }
    io::Error::other(texts)
}
