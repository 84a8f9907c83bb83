//! Records the counts during counting.

use std::io::{self, Write};

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber, PageSize};

use super::coding::{bucket_of, put_varint, put_zigzag};
use super::{CounterStream, HEADER_BYTES, VERSION};
use crate::curve::counter_stacks::{
    CounterStacks, CounterStacksError, CounterStacksOptions, Recorder,
};
use crate::estimator::Estimator;

/// [`CounterStacks`] that records its counts.
///
/// Writes are small, so `out` should be a `BufWriter`. A write error stops the recording, not the
/// counting, and is returned by [`finish`](Self::finish).
///
/// ```
/// use plimsoll_estimator::{
///     CounterStacksOptions, CounterStream, Estimator, StreamWriter,
/// };
/// use plimsoll_flow::{PageCount, PageNumber, PageSize};
///
/// let pages: Vec<_> = (0..10_000).cycle().take(409_600)
///     .map(|page| PageNumber(page % 5_000 + page / 5_000 * 7))
///     .collect();
/// let options = CounterStacksOptions::default();
/// let mut writer = StreamWriter::new(options, PageSize::FOUR_KIB, Vec::new())?;
/// writer.observe(&pages);
/// let bytes = writer.finish()?;
/// let stream = CounterStream::open(bytes.as_slice())?;
/// let curve = stream.curve(204_800..409_600)?;
/// assert_eq!(curve.references(), 204_800);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StreamWriter<W> {
    pub(super) stacks: CounterStacks,
    pub(super) record: Record<W>,
}

#[derive(Debug)]
pub(super) struct Record<W> {
    pub(super) out: W,
    pub(super) failed: Option<io::Error>,
    /// Reuses in the present interval by [`bucket_of`] their distance.
    pub(super) reuses: Vec<u32>,
    pub(super) payload: Vec<u8>,
    pub(super) framed: Vec<u8>,
    pub(super) crc: u32,
    pub(super) bytes: u64,
}

impl<W: Write> StreamWriter<W> {
    /// Creates counters with these `options` that write their counts to `out`, starting with a header. The pages have
    /// `page_size`, by which readers tell sizes in bytes.
    ///
    /// # Errors
    ///
    /// [`CounterStacksError`] if an option is out of range; nothing was written.
    pub fn new(
        options: CounterStacksOptions,
        page_size: PageSize,
        out: W,
    ) -> Result<Self, CounterStacksError> {
        let delta = options.check()?;
        let stacks = CounterStacks::new(options)?;
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend(CounterStream::MAGIC);
        let page_shift = page_size.bytes().trailing_zeros();
        let precision = options.precision | page_shift << 16;
        for field in [VERSION, precision, options.interval, delta] {
            header.extend(field.to_le_bytes());
        }
        header.extend(options.seed.to_le_bytes());
        let crc = crc32fast::hash(&header);
        header.extend(crc.to_le_bytes());
        let buckets = bucket_of(options.interval - 1) as usize + 1;
        let mut record = Record {
            out,
            failed: None,
            reuses: vec![0; buckets],
            payload: Vec::new(),
            framed: Vec::new(),
            crc,
            bytes: 0,
        };
        record.write(&header);
        Ok(Self { stacks, record })
    }

    /// Number of bytes written.
    pub fn bytes(&self) -> u64 {
        self.record.bytes
    }

    /// Writes the remaining data, including the counts of all counters, and returns the flushed writer.
    ///
    /// # Errors
    ///
    /// The first write error since the start; the record is truncated there.
    pub fn finish(mut self) -> io::Result<W> {
        self.stacks.ended(&mut self.record);
        if let Some(error) = self.record.failed {
            return Err(error);
        }
        self.record.out.flush()?;
        Ok(self.record.out)
    }
}

impl<W: Write + Send> Estimator for StreamWriter<W> {
    fn observe(&mut self, pages: &[PageNumber]) {
        self.stacks.observe_into(pages, &mut self.record);
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        self.stacks.curve()
    }

    fn memory_bytes(&self) -> usize {
        let record = &self.record;
        self.stacks.memory_bytes()
            + record.reuses.capacity() * size_of::<u32>()
            + record.payload.capacity()
            + record.framed.capacity()
    }
}

impl<W: Write> Record<W> {
    pub(super) fn write(&mut self, bytes: &[u8]) {
        if self.failed.is_some() {
            return;
        }
        match self.out.write_all(bytes) {
            Ok(()) => self.bytes += bytes.len() as u64,
            Err(error) => self.failed = Some(error),
        }
    }
}

impl<W: Write> Recorder for Record<W> {
    fn reuse(&mut self, distance: u32) {
        self.reuses[bucket_of(distance) as usize] += 1;
    }

    fn interval(&mut self, references: u32, distinct: u32, last: bool) {
        self.payload.clear();
        put_varint(
            &mut self.payload,
            u64::from(references) << 1 | u64::from(last),
        );
        put_varint(&mut self.payload, u64::from(distinct));
        let entries = self.reuses.iter().filter(|&&reuses| reuses > 0).count();
        put_varint(&mut self.payload, entries as u64);
        let mut skipped = 0;
        for reuses in &mut self.reuses {
            if *reuses == 0 {
                skipped += 1;
            } else {
                put_varint(&mut self.payload, skipped);
                put_varint(&mut self.payload, u64::from(*reuses));
                skipped = 0;
                *reuses = 0;
            }
        }
    }

    fn rise(&mut self, amount: u64, younger: u64) {
        put_zigzag(
            &mut self.payload,
            younger.cast_signed() - amount.cast_signed(),
        );
    }

    fn done(&mut self) {
        let mut framed = std::mem::take(&mut self.framed);
        framed.clear();
        put_varint(&mut framed, self.payload.len() as u64);
        framed.extend(&self.payload);
        let mut crc = crc32fast::Hasher::new_with_initial(self.crc);
        crc.update(&self.payload);
        self.crc = crc.finalize();
        framed.extend(self.crc.to_le_bytes());
        self.write(&framed);
        self.framed = framed;
    }
}
