//! The ring in shared memory through which a running machine delivers its records.
//!
//! The reader creates it: a memory file of sealed size with a header of 4096 bytes, followed by the records
//! (`docs/formats.md`). The writer, a QEMU plugin, opens it by its path. A full ring blocks the writer, so nothing is
//! lost while the reader lives and holds its lock on the file. If the lock is free, the reader has died, and the writer
//! counts the records it drops.
//!
//! Whatever the writer does to the memory, the reader returns either records or an error.
//!
//! [`RingWriter`] is a writer for programs that create records without QEMU: measurements and tests.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{
    FlockOperation, MemfdFlags, SealFlags, fcntl_add_seals, flock, ftruncate, memfd_create,
};

use crate::check::Checker;
use crate::description::{DESCRIPTION_BYTES, PAGE_BYTES, VERSION};
use crate::error::RecordFault;
use crate::record::{RING_RECORDS_MAX, Record};
use crate::sys::{SEALS, SharedMapping};
use crate::{BATCH_RECORDS, Description, PageLogError, RecordSource};

/// First bytes of a ring.
const MAGIC: u64 = u64::from_le_bytes(*b"PLIMPLG1");
const HEAD_BYTES: usize = 4096;
/// Name of the ring in errors.
const NAME: &str = "the ring";

/// Offsets of words in the header.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 8;
    pub(super) const PAGE_BYTES: usize = 12;
    pub(super) const CAPACITY: usize = 16;
    /// Records written; written by the writer.
    pub(super) const HEAD: usize = 128;
    /// Records read; written by the reader.
    pub(super) const TAIL: usize = 192;
    pub(super) const STATE: usize = 256;
    /// Times that the writer found the ring full.
    pub(super) const WAITS: usize = 264;
    /// Records dropped because the reader was gone.
    pub(super) const LOST: usize = 272;
}

const WRITING: u32 = 1;
const ENDED: u32 = 2;

/// Shortest and longest sleep while waiting for the other side.
const SLEEP_MIN: Duration = Duration::from_micros(50);
const SLEEP_MAX: Duration = Duration::from_millis(4);

/// A ring without a writer.
pub struct Ring {
    shared: SharedMapping,
    /// Locked as long as the reader exists.
    memory: OwnedFd,
    capacity: u64,
    path: PathBuf,
}

impl Ring {
    /// Creates a ring of `capacity` records, a power of two.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Capacity`], or [`PageLogError::Ring`] if the system refuses the memory.
    pub fn create(capacity: u64) -> Result<Self, PageLogError> {
        if !capacity.is_power_of_two() || capacity > RING_RECORDS_MAX {
            return Err(PageLogError::Capacity { capacity });
        }
        let bytes = HEAD_BYTES as u64 + 8 * capacity;
        let make = || -> std::io::Result<_> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let memory = memfd_create("plimsoll-pagelog", flags)?;
            ftruncate(&memory, bytes)?;
            fcntl_add_seals(&memory, SEALS | SealFlags::SEAL)?;
            flock(&memory, FlockOperation::NonBlockingLockExclusive)?;
            Ok((SharedMapping::map(&memory, HEAD_BYTES)?, memory))
        };
        let (shared, memory) = make().map_err(|source| PageLogError::Ring { source })?;
        shared.half(at::VERSION).store(VERSION, Relaxed);
        shared.half(at::PAGE_BYTES).store(PAGE_BYTES, Relaxed);
        shared.word(at::CAPACITY).store(capacity, Relaxed);
        shared.word(at::MAGIC).store(MAGIC, Release);
        let descriptor = memory.as_raw_fd();
        Ok(Self {
            shared,
            memory,
            capacity,
            path: format!("/proc/{}/fd/{descriptor}", std::process::id()).into(),
        })
    }

    /// Path by which a process of the same user can open it, as long as this process lives.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until a writer has described its machine.
    ///
    /// `alive` is called immediately, and again whenever the ring is idle. `false` ends the wait, for example because
    /// the machine has ended or the user has cancelled.
    ///
    /// # Errors
    ///
    /// [`PageLogError::NoWriter`] if none attached in time, [`PageLogError::Description`] for an invalid machine.
    pub fn wait_for_writer(
        self,
        timeout: Duration,
        mut alive: impl FnMut() -> bool + Send + 'static,
    ) -> Result<RingReader, PageLogError> {
        let since = Instant::now();
        let mut sleep = Sleep::new();
        loop {
            let lives = alive();
            if self.shared.half(at::STATE).load(Acquire) != 0 {
                break;
            }
            if !lives || since.elapsed() > timeout {
                return Err(PageLogError::NoWriter);
            }
            sleep.once();
        }
        let mut bytes = [0; DESCRIPTION_BYTES];
        for (index, bytes) in bytes.chunks_mut(8).enumerate() {
            let word = self.shared.word(Description::AT + 8 * index).load(Relaxed);
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Ok(RingReader {
            description: Description::of_bytes(&bytes, NAME)?,
            shared: self.shared,
            _memory: self.memory,
            capacity: self.capacity,
            tail: 0,
            checker: Checker::new(NAME),
            alive: Box::new(alive),
            ended: false,
        })
    }
}

/// Reader of a ring. Dropping it releases the lock.
pub struct RingReader {
    description: Description,
    shared: SharedMapping,
    /// Holds the lock on the file.
    _memory: OwnedFd,
    capacity: u64,
    tail: u64,
    checker: Checker,
    alive: Box<dyn FnMut() -> bool + Send>,
    ended: bool,
}

impl RingReader {
    /// Times that the writer found the ring full and waited, as reported by the writer.
    pub fn waits(&self) -> u64 {
        self.shared.word(at::WAITS).load(Relaxed)
    }

    /// Records that the writer dropped because the reader was gone, as reported by the writer.
    pub fn lost(&self) -> u64 {
        self.shared.word(at::LOST).load(Relaxed)
    }

    /// Waits for records and returns their number; 0 means the end.
    fn wait(&mut self) -> Result<usize, PageLogError> {
        let mut sleep = Sleep::new();
        loop {
            // The order matters: a writer that reports its end has written its last record before.
            let more = (self.alive)() && self.shared.half(at::STATE).load(Acquire) != ENDED;
            let ready = self.ready()?;
            if ready > 0 || !more {
                return Ok(ready);
            }
            sleep.once();
        }
    }

    /// Number of records that can be read now.
    fn ready(&self) -> Result<usize, PageLogError> {
        let head = self.shared.word(at::HEAD).load(Acquire);
        let ready = head.wrapping_sub(self.tail);
        if ready > self.capacity {
            return Err(PageLogError::Position {
                head,
                tail: self.tail,
                capacity: self.capacity,
            });
        }
        Ok(usize::try_from(ready).unwrap_or(usize::MAX))
    }

    /// Reads available records and frees their space in the ring.
    fn take(&mut self, ready: usize, batch: &mut Vec<Record>) -> Result<(), PageLogError> {
        let count = ready.min(BATCH_RECORDS);
        for index in 0..count {
            let word = self.record(self.tail + index as u64);
            match self.checker.record(word, &self.description)? {
                Record::End if index + 1 < ready => {
                    return Err(self.checker.fault(RecordFault::End));
                }
                Record::End => self.ended = true,
                record => batch.push(record),
            }
        }
        self.tail += count as u64;
        self.shared.word(at::TAIL).store(self.tail, Release);
        Ok(())
    }

    fn record(&self, position: u64) -> u64 {
        self.shared
            .word(place(position, self.capacity))
            .load(Relaxed)
    }
}

impl RecordSource for RingReader {
    fn description(&self) -> &Description {
        &self.description
    }

    /// Waits as long as the writer lives and `alive` returns true.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Cut`] if the writer died before ending its log; otherwise the error of the records.
    fn next_batch(&mut self, batch: &mut Vec<Record>) -> Result<bool, PageLogError> {
        batch.clear();
        if self.ended {
            return Ok(false);
        }
        let taken = match self.ready() {
            Ok(0) => self.wait(),
            ready => ready,
        };
        let taken = taken.and_then(|ready| match ready {
            0 => Err(self.checker.cut()),
            _ => self.take(ready, batch),
        });
        self.ended |= taken.is_err();
        taken?;
        Ok(!batch.is_empty())
    }
}

/// The offset of the record at a position.
fn place(position: u64, capacity: u64) -> usize {
    let index = usize::try_from(position & (capacity - 1)).expect("a ring fits into memory");
    HEAD_BYTES + 8 * index
}

/// Writer of a ring.
pub struct RingWriter {
    shared: SharedMapping,
    memory: File,
    capacity: u64,
    head: u64,
    /// Whether the reader has been found dead.
    alone: bool,
}

impl RingWriter {
    /// Time to wait for a full ring before testing the reader's lock.
    const PATIENCE: Duration = Duration::from_secs(1);

    /// Opens a ring and stores the description of its machine.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Ring`] if it does not exist, [`PageLogError::NotAPageLog`] if it has another version or already has a writer.
    pub fn attach(path: &Path, description: &Description) -> Result<Self, PageLogError> {
        let of_ring = |source| PageLogError::Ring { source };
        let mut options = File::options();
        let memory = options.read(true).write(true).open(path).map_err(of_ring)?;
        let shared = SharedMapping::map(&memory, HEAD_BYTES).map_err(of_ring)?;
        let capacity = shared.word(at::CAPACITY).load(Relaxed);
        let whole = usize::try_from(capacity)
            .ok()
            .and_then(|records| records.checked_mul(8)?.checked_add(HEAD_BYTES));
        let reason = if shared.word(at::MAGIC).load(Acquire) != MAGIC
            || shared.half(at::VERSION).load(Relaxed) != VERSION
            || shared.half(at::PAGE_BYTES).load(Relaxed) != PAGE_BYTES
        {
            "wrong first bytes or version"
        } else if !capacity.is_power_of_two() || whole != Some(shared.bytes()) {
            "its capacity does not match the size of its memory"
        } else if shared.half(at::STATE).load(Relaxed) != 0 {
            "it already has a writer"
        } else {
            let words = description.to_bytes();
            for (index, bytes) in words.chunks_exact(8).enumerate() {
                let mut word = [0; 8];
                word.copy_from_slice(bytes);
                let at = Description::AT + 8 * index;
                shared.word(at).store(u64::from_le_bytes(word), Relaxed);
            }
            shared.half(at::STATE).store(WRITING, Release);
            return Ok(Self {
                shared,
                memory,
                capacity,
                head: 0,
                alone: false,
            });
        };
        Err(PageLogError::NotAPageLog {
            name: NAME.to_owned(),
            reason: reason.to_owned(),
        })
    }

    /// Writes records, waiting for room; without a reader they are dropped and counted.
    pub fn write(&mut self, mut records: &[Record]) {
        while !records.is_empty() {
            let room = self.room();
            if room == 0 {
                let lost = self.shared.word(at::LOST);
                lost.fetch_add(records.len() as u64, Relaxed);
                return;
            }
            let (now, later) = records.split_at(room.min(records.len()));
            for &record in now {
                let place = place(self.head, self.capacity);
                self.shared.word(place).store(record.encode(), Relaxed);
                self.head += 1;
            }
            self.shared.word(at::HEAD).store(self.head, Release);
            records = later;
        }
    }

    /// Ends the log; returns the number of dropped records.
    pub fn finish(mut self) -> u64 {
        let lost = self.shared.word(at::LOST).load(Relaxed);
        if lost == 0 {
            self.write(&[Record::End]);
        }
        self.shared.half(at::STATE).store(ENDED, Release);
        lost
    }

    /// Waits for room; 0 if the reader is dead.
    fn room(&mut self) -> usize {
        let since = Instant::now();
        let mut sleep = Sleep::new();
        let mut waited = false;
        loop {
            let tail = self.shared.word(at::TAIL).load(Acquire);
            let room = self
                .capacity
                .saturating_sub(self.head.wrapping_sub(tail))
                .min(self.capacity);
            if self.alone {
                return 0;
            }
            if room > 0 {
                return usize::try_from(room).unwrap_or(usize::MAX);
            }
            if !std::mem::replace(&mut waited, true) {
                self.shared.word(at::WAITS).fetch_add(1, Relaxed);
            }
            if since.elapsed() > Self::PATIENCE {
                let lock = FlockOperation::NonBlockingLockShared;
                self.alone = flock(&self.memory, lock).is_ok();
            }
            sleep.once();
        }
    }
}

/// Sleeps of increasing length.
struct Sleep(Duration);

impl Sleep {
    fn new() -> Self {
        Self(SLEEP_MIN)
    }

    fn once(&mut self) {
        thread::sleep(self.0);
        self.0 = (self.0 * 2).min(SLEEP_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::tests::machine;
    use plimsoll_flow::PageNumber;

    fn leaves(range: std::ops::Range<u64>) -> Vec<Record> {
        let frame = |frame| PageNumber(frame % 1000);
        range
            .map(|number| Record::Leave {
                vcpu: 0,
                frame: frame(number),
            })
            .collect()
    }

    fn pair(capacity: u64) -> (RingReader, RingWriter) {
        let ring = Ring::create(capacity).unwrap();
        let writer = RingWriter::attach(ring.path(), &machine()).unwrap();
        let reader = ring.wait_for_writer(Duration::ZERO, || true).unwrap();
        (reader, writer)
    }

    fn drain(reader: &mut RingReader) -> (Vec<Record>, Option<PageLogError>) {
        let (mut all, mut batch) = (Vec::new(), Vec::new());
        loop {
            let more = reader.next_batch(&mut batch);
            assert!(batch.len() <= BATCH_RECORDS);
            all.append(&mut batch);
            match more {
                Ok(true) => {}
                Ok(false) => return (all, None),
                Err(error) => {
                    assert!(matches!(reader.next_batch(&mut batch), Ok(false)));
                    return (all, Some(error));
                }
            }
        }
    }

    #[test]
    fn all_records_come_in_order_through_a_ring_that_is_often_full() {
        let (mut reader, mut writer) = pair(64);
        assert_eq!(*reader.description(), machine());
        let records = leaves(0..10_000);
        let sent = records.clone();
        let thread = thread::spawn(move || {
            sent.chunks(150).for_each(|chunk| writer.write(chunk));
            writer.finish()
        });
        let (read, error) = drain(&mut reader);
        assert_eq!(thread.join().unwrap(), 0);
        assert!(error.is_none() && read == records);
        assert!(reader.waits() > 0 && reader.lost() == 0);
    }

    #[test]
    fn a_dead_readers_writer_goes_on_and_counts_what_it_drops() {
        let (reader, mut writer) = pair(8);
        drop(reader);
        let since = Instant::now();
        writer.write(&leaves(0..20));
        assert!(since.elapsed() > RingWriter::PATIENCE);
        writer.write(&leaves(0..5));
        assert_eq!(writer.finish(), 12 + 5);
    }

    #[test]
    fn a_writer_that_dies_leaves_a_log_that_is_known_to_be_cut_short() {
        let ring = Ring::create(64).unwrap();
        let mut writer = RingWriter::attach(ring.path(), &machine()).unwrap();
        let mut asked = 0;
        let alive = move || {
            asked += 1;
            asked < 4
        };
        let mut reader = ring.wait_for_writer(Duration::ZERO, alive).unwrap();
        writer.write(&leaves(0..5));
        let (read, error) = drain(&mut reader);
        assert_eq!(read, leaves(0..5));
        let error = error.unwrap().to_string();
        assert_eq!(error, "the ring is truncated after 5 records");
    }

    #[test]
    fn an_end_without_its_record_is_a_log_cut_short() {
        let (mut reader, writer) = pair(64);
        writer.shared.half(at::STATE).store(ENDED, Release);
        assert!(matches!(
            drain(&mut reader).1,
            Some(PageLogError::Cut { records: 0, .. })
        ));
    }

    #[test]
    fn nobody_is_waited_for_longer_than_asked() {
        let wait = |timeout, alive: fn() -> bool| {
            let ring = Ring::create(8).unwrap();
            ring.wait_for_writer(timeout, alive)
        };
        let never = wait(Duration::from_millis(20), || true);
        assert!(matches!(never, Err(PageLogError::NoWriter)));
        let dead = wait(Duration::MAX, || false);
        assert!(matches!(dead, Err(PageLogError::NoWriter)));
    }

    #[test]
    fn positions_that_cannot_be_are_errors() {
        for head in [17, u64::MAX, 1 << 40] {
            let (mut reader, writer) = pair(16);
            writer.shared.word(at::HEAD).store(head, Release);
            assert!(matches!(
                drain(&mut reader).1,
                Some(PageLogError::Position { tail: 0, .. })
            ));
        }
        let (mut reader, mut writer) = pair(16);
        writer.write(&leaves(0..10));
        let mut batch = Vec::new();
        assert!(reader.next_batch(&mut batch).unwrap());
        writer.shared.word(at::HEAD).store(9, Release);
        assert!(matches!(
            drain(&mut reader).1,
            Some(PageLogError::Position {
                head: 9,
                tail: 10,
                ..
            })
        ));
    }

    #[test]
    fn words_that_are_no_records_end_the_reading_behind_those_that_are() {
        for (word, fault) in [
            (7 << 61 | 1, "is no record"),
            (u64::from(u32::MAX), "outside"),
            (5 << 61 | 30 << 56, "vCPU 30"),
            (Record::End.encode(), "the end of the log is followed by"),
        ] {
            let (mut reader, mut writer) = pair(16);
            writer.write(&leaves(0..4));
            writer.shared.word(place(2, 16)).store(word, Relaxed);
            let (read, error) = drain(&mut reader);
            assert_eq!(read, leaves(0..2));
            let error = error.unwrap().to_string();
            assert!(error.starts_with("the ring, record"), "{error}");
            assert!(error.contains(fault), "{error}");
        }
    }

    #[test]
    fn a_head_of_nonsense_is_refused_on_either_side() {
        for at in (24..96).step_by(8) {
            let ring = Ring::create(8).unwrap();
            let _writer = RingWriter::attach(ring.path(), &machine()).unwrap();
            ring.shared.word(at).store(u64::MAX, Relaxed);
            let result = ring.wait_for_writer(Duration::ZERO, || true);
            // Any number of instructions can be an interval.
            assert_eq!(result.is_ok(), at == 48, "{at}");
        }
        for at in [at::MAGIC, at::VERSION, at::CAPACITY] {
            let ring = Ring::create(8).unwrap();
            ring.shared.word(at).fetch_add(1 << 32 | 1, Relaxed);
            let result = RingWriter::attach(ring.path(), &machine());
            assert!(matches!(result, Err(PageLogError::NotAPageLog { .. })));
        }
        let (_reader, writer) = pair(8);
        let path = format!("/proc/self/fd/{}", writer.memory.as_raw_fd());
        let second = RingWriter::attach(Path::new(&path), &machine()).err();
        assert!(
            second
                .unwrap()
                .to_string()
                .contains("it already has a writer")
        );
        let foreign = tempfile::NamedTempFile::new().unwrap();
        let result = RingWriter::attach(foreign.path(), &machine());
        assert!(matches!(result, Err(PageLogError::Ring { .. })));
        assert!(matches!(
            Ring::create(100),
            Err(PageLogError::Capacity { capacity: 100 })
        ));
    }
}
