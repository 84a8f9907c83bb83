//! The inflight region: a disk's requests in flight, in memory that outlives the daemon.
//!
//! The frontend keeps the region (a memfd created by [`Inflight::make`]) and passes it to the next daemon, which
//! repeats the requests in flight, in the order in which they were fetched. Layout of a queue's part:
//! `QueueRegionSplit` of QEMU's docs/interop/vhost-user.rst, each part a multiple of 64 bytes. The last part is
//! followed by 64 bytes of our own, with the cache mode that the guest chose, because the guest does not send it again.
//!
//! The bytes are untrusted: any process with the file can write them.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstatfs, memfd_create};
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _, VolatileSlice};

use crate::memory::HUGETLBFS_MAGIC;

const VERSION: u16 = 1;
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const ALIGNMENT: usize = 64;
const TRAILER_BYTES: usize = 64;

// Of QueueRegionSplit.
const AT_VERSION: usize = 8;
const AT_LENGTH: usize = 10;
const AT_LAST_BATCH: usize = 12;
const AT_USED_INDEX: usize = 14;
// Of DescStateSplit.
const AT_IN_FLIGHT: usize = 0;
const AT_NEXT: usize = 6;
const AT_COUNTER: usize = 8;

/// Why a region cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadRegion {
    #[error("it is shorter than its queues need, or cannot be mapped")]
    Size,
    #[error("its file can shrink (it is not sealed)")]
    NotSealed,
    #[error("its file is of huge pages, of which none may be free")]
    HugePages,
    #[error("the part of a queue has another version or size, or is invalid")]
    Contents,
}

/// The region of one disk.
#[derive(Debug)]
pub(crate) struct Inflight {
    map: Arc<MmapRegion<()>>,
    queues: u16,
    entries: u16,
}

fn part_bytes(entries: u16) -> usize {
    (HEADER_BYTES + usize::from(entries) * ENTRY_BYTES).next_multiple_of(ALIGNMENT)
}

impl Inflight {
    /// Bytes of a region for `queues` queues of `entries` entries.
    pub(crate) fn bytes(queues: u16, entries: u16) -> u64 {
        (part_bytes(entries) * usize::from(queues) + TRAILER_BYTES) as u64
    }

    /// Makes a file for a region, all zeros, which cannot change its size.
    pub(crate) fn make(queues: u16, entries: u16) -> std::io::Result<File> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("plimsoll-inflight", flags)?);
        file.set_len(Self::bytes(queues, entries))?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    }

    /// Maps a region passed by a frontend.
    pub(crate) fn map(
        file: File,
        offset: u64,
        bytes: u64,
        queues: u16,
        entries: u16,
    ) -> Result<Self, BadRegion> {
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !sealed {
            return Err(BadRegion::NotSealed);
        }
        let system = fstatfs(&file).map_err(|_| BadRegion::Size)?;
        if system.f_type == HUGETLBFS_MAGIC {
            return Err(BadRegion::HugePages);
        }
        let length = file.metadata().map_err(|_| BadRegion::Size)?.len();
        let needed = Self::bytes(queues, entries);
        if bytes < needed || offset.checked_add(bytes).is_none_or(|end| end > length) {
            return Err(BadRegion::Size);
        }
        let needed = usize::try_from(needed).map_err(|_| BadRegion::Size)?;
        let map = MmapRegion::from_file(FileOffset::new(file, offset), needed)
            .map_err(|_| BadRegion::Size)?;
        Ok(Self {
            map: Arc::new(map),
            queues,
            entries,
        })
    }

    /// Whether the guest requires writes to be stable when they complete.
    pub(crate) fn writes_through(&self) -> bool {
        self.trailer().read_obj::<u8>(0).is_ok_and(|byte| byte == 1)
    }

    /// Records the guest's choice.
    pub(crate) fn set_writes_through(&self, through: bool) {
        let written = self.trailer().write_obj(u8::from(through), 0);
        debug_assert!(written.is_ok());
    }

    fn trailer(&self) -> VolatileSlice<'_> {
        let at = part_bytes(self.entries) * usize::from(self.queues);
        self.map
            .get_slice(at, TRAILER_BYTES)
            .expect("within what was mapped")
    }

    /// The part of a queue of `size` entries, if the region has one.
    pub(crate) fn queue(&self, index: u16, size: u16) -> Option<InflightQueue> {
        (index < self.queues && size <= self.entries).then(|| InflightQueue {
            map: Arc::clone(&self.map),
            start: part_bytes(self.entries) * usize::from(index),
            entries: self.entries,
            size,
            counter: 0,
        })
    }
}

/// The part of a queue.
#[derive(Debug)]
pub(crate) struct InflightQueue {
    map: Arc<MmapRegion<()>>,
    start: usize,
    /// Entries of the part; the queue may have fewer.
    entries: u16,
    size: u16,
    counter: u64,
}

impl InflightQueue {
    fn slice(&self) -> VolatileSlice<'_> {
        self.map
            .get_slice(self.start, part_bytes(self.entries))
            .expect("within what was mapped")
    }

    fn get(&self, at: usize) -> u16 {
        u16::from_le(self.slice().read_obj(at).expect("within a part"))
    }

    fn set(&self, at: usize, value: u16) {
        self.slice()
            .write_obj(value.to_le(), at)
            .expect("within a part");
    }

    fn entry(head: u16) -> usize {
        HEADER_BYTES + usize::from(head) * ENTRY_BYTES
    }

    fn set_in_flight(&self, head: u16, in_flight: bool) {
        self.slice()
            .write_obj(u8::from(in_flight), Self::entry(head) + AT_IN_FLIGHT)
            .expect("within a part");
    }

    /// Takes the part over, where `used` is the index of the guest's used ring. Returns the heads in flight, oldest
    /// first.
    ///
    /// # Errors
    /// [`BadRegion::Contents`].
    pub(crate) fn recover(&mut self, used: u16) -> Result<Vec<u16>, BadRegion> {
        if self.get(AT_VERSION) == 0 {
            self.set(AT_LENGTH, self.entries);
            self.set(AT_USED_INDEX, used);
            self.set(AT_VERSION, VERSION);
        }
        if self.get(AT_VERSION) != VERSION || self.get(AT_LENGTH) != self.entries {
            return Err(BadRegion::Contents);
        }
        // Killed after the guest was notified and before the region was updated: the last batch is complete.
        let batch = used.wrapping_sub(self.get(AT_USED_INDEX));
        if batch > self.size {
            return Err(BadRegion::Contents);
        }
        let mut head = self.get(AT_LAST_BATCH);
        for _ in 0..batch {
            if head >= self.size {
                return Err(BadRegion::Contents);
            }
            self.set_in_flight(head, false);
            head = self.get(Self::entry(head) + AT_NEXT);
        }
        self.set(AT_USED_INDEX, used);

        let slice = self.slice();
        let mut in_flight: Vec<(u64, u16)> = Vec::new();
        for head in 0..self.size {
            let at = Self::entry(head);
            let flag: u8 = slice.read_obj(at + AT_IN_FLIGHT).expect("within a part");
            if flag == 1 {
                let counter: u64 = slice.read_obj(at + AT_COUNTER).expect("within a part");
                in_flight.push((u64::from_le(counter), head));
            }
        }
        in_flight.sort_unstable();
        self.counter = in_flight
            .last()
            .map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(in_flight.into_iter().map(|(_, head)| head).collect())
    }

    /// A request was fetched from the available ring.
    pub(crate) fn fetched(&mut self, head: u16) {
        self.slice()
            .write_obj(self.counter.to_le(), Self::entry(head) + AT_COUNTER)
            .expect("within a part");
        self.counter = self.counter.wrapping_add(1);
        self.set_in_flight(head, true);
    }

    /// Records that a request is about to be returned to the guest: it joins the last batch.
    pub(crate) fn completing(&self, head: u16) {
        self.set(Self::entry(head) + AT_NEXT, self.get(AT_LAST_BATCH));
        self.set(AT_LAST_BATCH, head);
    }

    /// Records that the guest was notified of the batch: the index of its used ring is `used`.
    pub(crate) fn completed(&self, batch: impl Iterator<Item = u16>, used: u16) {
        // A kill at any instruction must find the stores made in this order.
        compiler_fence(Ordering::SeqCst);
        for head in batch {
            self.set_in_flight(head, false);
        }
        self.set(AT_USED_INDEX, used);
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_skip::{Lack, skip};

    use super::*;

    fn region(queues: u16, entries: u16) -> (File, Inflight) {
        let file = Inflight::make(queues, entries).expect("a memfd");
        let again = file.try_clone().expect("its descriptor");
        let map = Inflight::map(again, 0, Inflight::bytes(queues, entries), queues, entries)
            .expect("a region");
        (file, map)
    }

    #[test]
    fn what_was_in_flight_comes_back_oldest_first() {
        let (_file, region) = region(2, 8);
        let mut queue = region.queue(1, 8).expect("the second queue");
        assert_eq!(queue.recover(7), Ok(Vec::new()));
        for head in [3, 1, 5, 0] {
            queue.fetched(head);
        }
        queue.completing(1);
        queue.completed([1].into_iter(), 8);
        let mut after = region.queue(1, 8).expect("the second queue");
        assert_eq!(after.recover(8), Ok(vec![3, 5, 0]));
        // New requests come after those in flight.
        after.fetched(1);
        let mut third = region.queue(1, 8).expect("the second queue");
        assert_eq!(third.recover(8), Ok(vec![3, 5, 0, 1]));
        assert_eq!(
            region.queue(0, 8).expect("the first").recover(0),
            Ok(Vec::new())
        );
    }

    #[test]
    fn what_is_fetched_after_a_recovery_is_in_flight_and_the_newest() {
        let (_file, region) = region(1, 8);
        let part = || region.queue(0, 8).expect("the queue");
        let mut queue = part();
        // A guest that has run for long before it met an inflight region.
        assert_eq!(queue.recover(1000), Ok(Vec::new()));
        for head in [2, 5] {
            queue.fetched(head);
        }
        // Told to the guest alone; then it makes the same request again.
        queue.completing(2);
        let mut after = part();
        assert_eq!(after.recover(1001), Ok(vec![5]));
        after.fetched(2);
        assert_eq!(part().recover(1001), Ok(vec![5, 2]));
        after.completing(5);
        after.completed([5].into_iter(), 1002);
        after.fetched(5);
        assert_eq!(part().recover(1002), Ok(vec![2, 5]));
    }

    #[test]
    fn a_batch_may_be_a_whole_ring() {
        let (_file, region) = region(1, 8);
        let mut queue = region.queue(0, 8).expect("the queue");
        assert_eq!(queue.recover(0), Ok(Vec::new()));
        for head in 0..8 {
            queue.fetched(head);
            queue.completing(head);
        }
        let mut after = region.queue(0, 8).expect("the queue");
        assert_eq!(after.recover(8), Ok(Vec::new()));
    }

    #[test]
    fn the_file_of_a_region_keeps_its_size_for_good() {
        let file = Inflight::make(2, 8).expect("a memfd");
        // Two parts of 16 bytes and 8 entries of 16, each a multiple of 64; and 64 bytes of our own.
        let bytes = 2 * 192 + 64;
        assert_eq!(file.metadata().expect("its size").len(), bytes);
        for other in [bytes - 1, bytes + 1] {
            assert!(file.set_len(other).is_err(), "{other} bytes");
        }
        assert!(fcntl_add_seals(&file, SealFlags::WRITE).is_err());
    }

    #[test]
    fn a_region_beyond_the_end_of_its_file_is_refused() {
        let file = Inflight::make(1, 8).expect("a memfd");
        let bytes = Inflight::bytes(1, 8);
        for offset in [4096, u64::MAX] {
            let again = file.try_clone().expect("its descriptor");
            let map = Inflight::map(again, offset, bytes, 1, 8).map(drop);
            assert_eq!(map, Err(BadRegion::Size));
        }
    }

    #[test]
    fn a_region_of_huge_pages_is_refused() {
        let huge = MemfdFlags::HUGETLB | MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let Ok(made) = memfd_create("huge", huge) else {
            return skip(Lack::Host, "this kernel has no huge pages");
        };
        let file = File::from(made);
        file.set_len(2 << 20).expect("its length");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
        let map = Inflight::map(file, 0, Inflight::bytes(1, 8), 1, 8).map(drop);
        assert_eq!(map, Err(BadRegion::HugePages));
    }

    #[test]
    fn a_batch_told_to_the_guest_but_not_to_the_region_is_done() {
        let (_file, region) = region(1, 8);
        let mut queue = region.queue(0, 8).expect("the queue");
        queue.recover(0).expect("fresh");
        for head in [2, 4, 6] {
            queue.fetched(head);
        }
        queue.completing(4);
        queue.completing(6);
        // Killed here, after the used ring's index became 2 ...
        assert_eq!(
            region.queue(0, 8).expect("the queue").recover(2),
            Ok(vec![2])
        );
        // ... or before it did.
        let (_file, region) = self::region(1, 8);
        let mut queue = region.queue(0, 8).expect("the queue");
        queue.recover(0).expect("fresh");
        queue.fetched(2);
        queue.completing(2);
        assert_eq!(
            region.queue(0, 8).expect("the queue").recover(0),
            Ok(vec![2])
        );
    }

    #[test]
    fn foreign_bytes_are_refused() {
        let (file, region) = region(1, 8);
        let mut queue = region.queue(0, 8).expect("the queue");
        queue.recover(0).expect("fresh");
        // A batch larger than the queue; a head outside; another size; another version.
        assert_eq!(queue.recover(9), Err(BadRegion::Contents));
        queue.set(AT_LAST_BATCH, 8);
        assert_eq!(queue.recover(1), Err(BadRegion::Contents));
        queue.set(AT_LENGTH, 9);
        assert_eq!(queue.recover(0), Err(BadRegion::Contents));
        queue.set(AT_LENGTH, 8);
        queue.set(AT_VERSION, 2);
        assert_eq!(queue.recover(0), Err(BadRegion::Contents));

        let again = || file.try_clone().expect("its descriptor");
        let bytes = Inflight::bytes(1, 8);
        assert_eq!(
            Inflight::map(again(), 0, bytes, 2, 8).err(),
            Some(BadRegion::Size)
        );
        assert_eq!(
            Inflight::map(again(), 64, bytes, 1, 8).err(),
            Some(BadRegion::Size)
        );
        assert_eq!(
            Inflight::map(again(), u64::MAX, bytes, 1, 8).err(),
            Some(BadRegion::Size)
        );
        let plain = tempfile::tempfile_in("/dev/shm").expect("a file");
        plain.set_len(bytes).expect("its length");
        assert_eq!(
            Inflight::map(plain, 0, bytes, 1, 8).err(),
            Some(BadRegion::NotSealed)
        );
        assert!(region.queue(1, 8).is_none() && region.queue(0, 16).is_none());
    }

    #[test]
    fn the_guests_choice_of_cache_mode_is_kept() {
        let (file, region) = region(3, 16);
        assert!(!region.writes_through());
        region.set_writes_through(true);
        // Behind the three parts, each of 16 bytes and 16 entries of 16, as a multiple of 64.
        let mut bytes = [0; 3 * 320 + 64];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).expect("its bytes");
        assert_eq!(bytes.iter().position(|byte| *byte != 0), Some(3 * 320));
        let again = Inflight::map(file, 0, Inflight::bytes(3, 16), 3, 16).expect("a region");
        assert!(again.writes_through());
    }
}
