//! The control disk, with which a guest announces its ring, opens pools and gets pages. docs/disk-protocol.md
//! specifies every byte.
//!
//! A command takes effect when its request completes, in the order in which requests are popped; before each request,
//! on any disk of the VM, the whole ring is [drained](ControlDisk::drain). Any program in the guest that may read block
//! devices can read this one (partition scans do): only a read with the length of a get, at the position of a pool, is
//! a get; all others return zeros.

use std::sync::Arc;

use rustix::io::Errno;

use crate::notices::{DrainResult, FrameSink, Notices, RingMemory};
use crate::protocol::{SECTOR_BYTES, VERSION, control, set_u32, set_u64, u32_at, u64_at};
use crate::{
    GuestPool, PAGE_BYTES, Page, Pools, RingStats, ServedImages, VictimCache, VictimCacheStats,
};

/// An unknown request of the control disk. Nothing was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a request of the control disk")]
pub struct BadRequest;

type Sector = [u8; SECTOR_BYTES];

/// A VM's control disk, its ring and its pools.
pub struct ControlDisk {
    ram: Option<Arc<dyn RingMemory>>,
    notices: Notices,
    pools: Pools,
    info: Sector,
    answer: Sector,
}

impl ControlDisk {
    /// Size of the disk in bytes.
    pub const BYTES: u64 = control::SECTORS * SECTOR_BYTES as u64;

    /// Creates a control disk; the guest reads from `has_cache` whether its notifications are useful. It can open pools
    /// of `images`.
    pub fn new(
        has_cache: bool,
        victim_cache: Option<Box<dyn VictimCache>>,
        images: ServedImages,
    ) -> Self {
        let pools = Pools::new(victim_cache, images);
        let mut info = [0; SECTOR_BYTES];
        let mut features = 0;
        if has_cache {
            features |= control::HAS_CACHE;
        }
        if pools.available() {
            features |= control::HAS_HCACHE;
        }
        set_u64(&mut info, control::INFO_MAGIC, control::MAGIC);
        set_u32(&mut info, control::INFO_VERSION, VERSION);
        set_u32(&mut info, control::INFO_FEATURES, features);
        Self {
            ram: None,
            notices: Notices::default(),
            pools,
            info,
            answer: [0; SECTOR_BYTES],
        }
    }

    /// Replaces the mapping of the guest's RAM. A ring that is not in the new mapping is abandoned.
    pub fn set_ram(&mut self, ram: Arc<dyn RingMemory>, frames: &mut dyn FrameSink) {
        if !self.notices.remap(&ram) {
            frames.forget();
            self.pools.close_all();
        }
        self.ram = Some(ram);
    }

    /// Handles a guest that was reset or is gone: its ring is no longer accessed, and its pools are closed.
    pub fn guest_gone(&mut self, frames: &mut dyn FrameSink) {
        self.notices.abandon();
        self.ram = None;
        self.answer = [0; SECTOR_BYTES];
        self.pools.close_all();
        frames.forget();
    }

    /// Releases the ring and marks it as released, because the daemon ends while the guest keeps running.
    pub fn close(&mut self) {
        self.notices.detach();
        self.pools.close_all();
    }

    /// Applies all notifications published so far. To be called after a request was popped from a queue of any disk and
    /// before it is served, and periodically.
    pub fn drain(&mut self, frames: &mut dyn FrameSink) -> DrainResult {
        let drained = self.notices.drain(frames, &mut self.pools);
        if drained == DrainResult::Fault {
            // No flush will arrive any more.
            self.pools.close_all();
        }
        drained
    }

    /// Position after the last page read from the ring; only increases while the same ring is attached.
    pub fn pages_read(&self) -> u64 {
        self.notices.slots_read()
    }

    /// To be called periodically (every 100 ms): checks whether a page store is available again.
    pub fn turn(&mut self) {
        self.pools.turn();
    }

    /// Serves a read of `bytes` bytes (a multiple of 512) at `offset` (in bytes, a multiple of 512): passes pieces with
    /// their position in the request to the caller, who leaves all other bytes unchanged.
    pub fn read(&mut self, offset: u64, bytes: usize, write: &mut dyn FnMut(usize, &[u8])) {
        match Get::of(offset, bytes) {
            Some(get) => self.get(&get, write),
            None => self.read_sectors(offset, bytes, write),
        }
    }

    fn get(&mut self, get: &Get, write: &mut dyn FnMut(usize, &[u8])) {
        let found = &mut |index: u32, page: &Page| write(index as usize * PAGE_BYTES, page);
        let hits = self.pools.get(get.pool, get.block, get.count, found);
        let mut last = [0; SECTOR_BYTES];
        set_u64(&mut last, control::GET_MAGIC, control::MAGIC);
        set_u64(&mut last, control::GET_HITS, hits);
        set_u64(&mut last, control::GET_POOL, get.pool.into());
        set_u64(&mut last, control::GET_BLOCK, get.block);
        set_u32(&mut last, control::GET_COUNT, get.count);
        write(get.count as usize * PAGE_BYTES, &last);
    }

    fn read_sectors(&self, offset: u64, bytes: usize, write: &mut dyn FnMut(usize, &[u8])) {
        const ZEROS: Page = [0; PAGE_BYTES];
        let mut done = 0;
        for sector in [&self.info, &self.answer]
            .into_iter()
            .skip(usize::try_from(offset / SECTOR_BYTES as u64).unwrap_or(usize::MAX))
        {
            if done + SECTOR_BYTES <= bytes {
                write(done, sector);
                done += SECTOR_BYTES;
            }
        }
        while done < bytes {
            let piece = (bytes - done).min(PAGE_BYTES);
            write(done, &ZEROS[..piece]);
            done += piece;
        }
    }

    /// Serves a write at `offset` (in bytes): a command, whose answer can be read afterwards.
    ///
    /// # Errors
    /// If it is not a command; the last answer stays.
    pub fn write(
        &mut self,
        offset: u64,
        bytes: &[u8],
        frames: &mut dyn FrameSink,
    ) -> Result<(), BadRequest> {
        if offset != 0
            || bytes.len() != SECTOR_BYTES
            || u64_at(bytes, control::COMMAND_MAGIC) != control::MAGIC
        {
            return Err(BadRequest);
        }
        let (status, value) = match self.command(bytes, frames) {
            Ok(value) => (0, value),
            Err(errno) => (errno, 0),
        };
        let sequence = u64_at(bytes, control::COMMAND_SEQUENCE);
        self.answer = [0; SECTOR_BYTES];
        set_u64(&mut self.answer, control::ANSWER_MAGIC, control::MAGIC);
        set_u64(&mut self.answer, control::ANSWER_SEQUENCE, sequence);
        set_u32(&mut self.answer, control::ANSWER_STATUS, status);
        set_u64(&mut self.answer, control::ANSWER_VALUE, value);
        Ok(())
    }

    /// Executes a command; returns its value, or a number of `errno(3)`.
    fn command(&mut self, bytes: &[u8], frames: &mut dyn FrameSink) -> Result<u64, u32> {
        let errno = |errno: Errno| errno.raw_os_error().unsigned_abs();
        if u32_at(bytes, control::COMMAND_VERSION) != VERSION {
            return Err(errno(Errno::PROTONOSUPPORT));
        }
        let arg = |index: usize| u64_at(bytes, control::COMMAND_ARG + 8 * index);
        match u32_at(bytes, control::COMMAND_COMMAND) {
            control::ATTACH => {
                // Another ring, or the same after a pause: there may have been notifications in between.
                frames.forget();
                self.pools.close_all();
                self.notices.detach();
                let ram = self.ram.clone().ok_or(errno(Errno::FAULT))?;
                self.notices
                    .attach(ram, arg(0), arg(1))
                    .map_err(|error| error.errno())?;
                Ok(0)
            }
            control::DETACH => {
                // With another nonce it holds already that the ring is not touched.
                if self.notices.nonce() == Some(arg(0)) {
                    frames.forget();
                    self.pools.close_all();
                    self.notices.detach();
                }
                Ok(0)
            }
            // The ring, if there is one, was drained before.
            control::KICK => self.notices.nonce().map(|_| 0).ok_or(errno(Errno::NOTCONN)),
            control::POOL_OPEN => {
                if self.notices.nonce().is_none() {
                    return Err(errno(Errno::NOTCONN));
                }
                let request = match arg(0) & ((1 << control::POOL_KIND_BITS) - 1) {
                    control::POOL_PRIVATE => GuestPool::Private,
                    control::POOL_IMAGE => GuestPool::Image {
                        serial: serial(&bytes[control::COMMAND_ARG + 8..]),
                        first_block: arg(0) >> control::POOL_KIND_BITS,
                    },
                    _ => return Err(errno(Errno::INVAL)),
                };
                let pool = self.pools.open(&request).map_err(|error| {
                    let code = if error.kind() == std::io::ErrorKind::Unsupported {
                        Errno::OPNOTSUPP
                    } else {
                        Errno::from_io_error(&error).unwrap_or(Errno::IO)
                    };
                    code.raw_os_error().unsigned_abs()
                })?;
                Ok(pool.into())
            }
            control::POOL_CLOSE => match u32::try_from(arg(0)) {
                Ok(pool) if self.pools.close(pool) => Ok(0),
                _ => Err(errno(Errno::NOENT)),
            },
            _ => Err(errno(Errno::NOSYS)),
        }
    }

    /// Statistics of the ring.
    pub fn ring_stats(&self) -> RingStats {
        self.notices.stats()
    }

    /// Statistics of the pools.
    #[must_use]
    pub fn victim_cache_stats(&mut self) -> VictimCacheStats {
        self.pools.stats()
    }
}

/// The serial number at the beginning of the bytes.
fn serial(bytes: &[u8]) -> String {
    let bytes = &bytes[..control::SERIAL_BYTES];
    let end = bytes.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
}

/// A read that is a get of pages.
struct Get {
    pool: u32,
    block: u64,
    count: u32,
}

impl Get {
    fn of(offset: u64, bytes: usize) -> Option<Self> {
        let pages = bytes.checked_sub(SECTOR_BYTES)? / PAGE_BYTES;
        if !(1..=control::GET_PAGES_MAX).contains(&pages) || bytes != control::get_bytes(pages) {
            return None;
        }
        if !offset.is_multiple_of(PAGE_BYTES as u64) {
            return None;
        }
        let sector = offset / SECTOR_BYTES as u64;
        let pool = u32::try_from(sector >> control::POOL_SHIFT).ok()?;
        let block = (sector >> control::BLOCK_SHIFT) & (control::BLOCKS_MAX - 1);
        let count = u32::try_from(pages).ok()?;
        let fits = (1..=control::POOLS_MAX).contains(&pool)
            && block + u64::from(count) <= control::BLOCKS_MAX;
        fits.then_some(Self { pool, block, count })
    }
}
