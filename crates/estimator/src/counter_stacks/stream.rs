//! The record of a counter stack: every count, and the curve of any window from it.
//!
//! Counts from all beginnings hold the curve of every part of the stream: for a window `from..to`, the
//! counters that began at `from` or later are those of that part taken as a stream of its own, whose first
//! references miss. What was last used before `from` is told apart by the counter that began
//! there or, if it was pruned, to within its neighbours.
//!
//! **Bytes.** Little-endian; `varint` is 7 bits a byte, low ones first, the high bit set on all bytes but the last, of at
//! most 10 bytes; `zigzag` is a varint of `(n << 1) ^ (n >> 63)`.
//!
//! ```text
//! header, 36 bytes
//!    0  8  magic "PLIMCSTK"
//!    8  4  version, 1
//!   12  4  precision
//!   16  4  interval, in references
//!   20  4  delta, in 2^-24
//!   24  8  seed
//!   32  4  CRC-32 (IEEE) of the 32 bytes before
//! record, one for each interval
//!    varint  length of the payload in bytes
//!    payload
//!    4       CRC-32 of the payload, begun with the previous record's (the header's, for the first)
//! payload
//!    varint  references << 1 | last. All but the last record have as many as the interval.
//!    varint  distinct pages of the interval
//!    varint  entries of the list that follows: reuses within the interval, by distance
//!            varint buckets skipped, varint reuses in this one (at least 1)
//!    zigzag  for each level counted and each of its counters, younger ones first: the next younger
//!            one's rise minus this one's
//! ```
//!
//! A distance below 32 is its own bucket; above, each power of two has 16. Which levels are counted after which
//! interval, and which counters there are, follows from the counts (`ladder`). The last record counts all levels.
//!
//! A record that is cut short or broken ends the stream: what follows cannot be understood without it.
//! How much that was is said. Nothing is allocated that the bytes at hand do not fill.
//!
//! Source: [Wires14] §3.2, §4 (windows, and the record of counts instead of counters).

use std::io::{self, Read, Write};
use std::ops::Range;

use plimsoll_flow::{CurveError, MissRatioCurve, ReferenceBatch};

use super::hyper_log_log::COUNT_MAX;
use super::ladder::{Cell, Counter, Ladder, Rise};
use super::sizes::{CountError, Sizes};
use super::{
    CounterStacks, CounterStacksError, CounterStacksOptions, DELTA_MAX, INTERVAL_MAX, PRECISIONS,
    Recorder, SHARE_ONE, place,
};
use crate::Estimator;

const VERSION: u32 = 1;
const HEADER_BYTES: usize = 36;
const CRC_BYTES: usize = 4;

/// Why a recorded stream gives no curve. The stream is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Reading failed.
    #[error("cannot read the recorded stream")]
    Read(#[source] io::Error),
    /// Something else, or damaged in its first bytes.
    #[error("this is not a recorded counter stream, or its header is damaged")]
    NoStream,
    /// Recorded by a later version of this program.
    #[error("the recorded stream has version {version}; only version {VERSION} is supported")]
    Version {
        /// The version it says it is.
        version: u32,
    },
    /// Recorded with options that there are not.
    #[error("the recorded stream's options are invalid")]
    Options(#[source] CounterStacksError),
    /// A window is cut at interval borders, or at the stream's end.
    #[error("a window cannot begin or end at reference {at}, inside an interval of {interval}")]
    InsideInterval {
        /// Where the window was to begin or end.
        at: u64,
        /// Length of an interval, in references.
        interval: u32,
    },
    /// The window is empty or reaches beyond the end.
    #[error("the window {from}..{to} is empty or not within the {references} references recorded")]
    NoWindow {
        /// First reference of the window.
        from: u64,
        /// First reference after it.
        to: u64,
        /// How many were recorded and can be read.
        references: u64,
    },
    /// No reference, no curve.
    #[error(transparent)]
    Curve(#[from] CurveError),
}

/// Returns the bucket of a distance within an interval.
fn bucket_of(distance: u32) -> u32 {
    let shift = distance.max(1).ilog2().saturating_sub(4);
    shift * 16 + (distance >> shift)
}

/// Returns the smallest distance of a bucket, as wide as it may be.
fn floor_of(bucket: u64) -> u64 {
    match (bucket / 16).checked_sub(1) {
        None => bucket,
        Some(shift) => (bucket % 16 + 16) << shift,
    }
}

/// Buckets of the distances that intervals can have.
fn buckets_of(interval: u32) -> u64 {
    u64::from(bucket_of(interval - 1)) + 1
}

fn put_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push((value & 0x7f) as u8);
}

fn put_zigzag(bytes: &mut Vec<u8>, value: i64) {
    put_varint(bytes, (value << 1 ^ value >> 63).cast_unsigned());
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..u64::BITS).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return None;
        }
        value |= bits << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn take_zigzag(bytes: &mut &[u8]) -> Option<i64> {
    let value = take_varint(bytes)?;
    Some((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
}

/// [`CounterStacks`] that records its counts as it goes.
///
/// Writing is in small pieces: hand in a `BufWriter`. An error of the writer stops the record, not the
/// observing, and is returned by [`finish`](Self::finish).
///
/// ```
/// use plimsoll_estimator::{
///     CounterStacksOptions, CounterStream, Estimator, StreamWriter,
/// };
/// use plimsoll_flow::{AccessKind, PageCount, PageNumber, ReferenceBatch};
///
/// let mut batch = ReferenceBatch::new();
/// for page in (0..10_000).cycle().take(409_600) {
///     batch.push(PageNumber(page % 5_000 + page / 5_000 * 7), AccessKind::Read);
/// }
/// let options = CounterStacksOptions::default();
/// let mut writer = StreamWriter::new(options, Vec::new())?;
/// writer.observe(&batch);
/// let bytes = writer.finish()?;
/// let stream = CounterStream::open(bytes.as_slice())?;
/// let curve = stream.curve(204_800..409_600)?;
/// assert_eq!(curve.references(), 204_800);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StreamWriter<W> {
    stacks: CounterStacks,
    record: Record<W>,
}

#[derive(Debug)]
struct Record<W> {
    out: W,
    failed: Option<io::Error>,
    /// Reuses in the present interval by [`bucket_of`] their distance.
    reuses: Vec<u32>,
    payload: Vec<u8>,
    framed: Vec<u8>,
    crc: u32,
    bytes: u64,
}

impl<W: Write> StreamWriter<W> {
    /// Counts as `options` say, and writes to `out`, beginning with a header now.
    ///
    /// # Errors
    ///
    /// [`CounterStacksError`] says which of the options is out of its range; nothing was written.
    pub fn new(options: CounterStacksOptions, out: W) -> Result<Self, CounterStacksError> {
        let delta = options.check()?;
        let stacks = CounterStacks::new(options)?;
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend(CounterStream::MAGIC);
        for field in [VERSION, options.precision, options.interval, delta] {
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

    /// How many bytes were written.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.record.bytes
    }

    /// Writes what is left, counts of all counters among it, and returns the writer, flushed.
    ///
    /// # Errors
    ///
    /// The first error of the writer, whenever it was; the record is cut short there.
    pub fn finish(mut self) -> io::Result<W> {
        self.stacks.ended(&mut self.record);
        if let Some(error) = self.record.failed {
            return Err(error);
        }
        self.record.out.flush()?;
        Ok(self.record.out)
    }
}

impl<W: Write> Estimator for StreamWriter<W> {
    fn observe(&mut self, batch: &ReferenceBatch) {
        self.stacks.observe_into(batch.pages(), &mut self.record);
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
    fn write(&mut self, bytes: &[u8]) {
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

/// A recorded stream, checked and ready to be asked.
#[derive(Debug, Clone)]
pub struct CounterStream {
    options: CounterStacksOptions,
    delta: u32,
    /// Payloads that were understood, each after its length as a varint.
    records: Vec<u8>,
    references: u64,
    lost_bytes: u64,
    finished: bool,
}

/// One interval as recorded.
struct Column<'bytes> {
    references: u64,
    last: bool,
    distinct: u64,
    /// Pairs of bucket and reuses.
    reuses: Vec<(u64, u64)>,
    /// What is left of the payload.
    rises: &'bytes [u8],
}

impl<'bytes> Column<'bytes> {
    fn parse(mut bytes: &'bytes [u8], interval: u32) -> Option<Self> {
        let references = take_varint(&mut bytes)?;
        let (references, last) = (references >> 1, references & 1 == 1);
        let whole = references == u64::from(interval);
        if !(whole && !last || last && references < u64::from(interval)) {
            return None;
        }
        let distinct = take_varint(&mut bytes)?;
        let entries = take_varint(&mut bytes)?;
        let mut reuses = Vec::new();
        let (mut bucket, mut sum) = (0_u64, distinct);
        for _ in 0..entries {
            bucket = bucket.checked_add(take_varint(&mut bytes)?)?;
            let count = take_varint(&mut bytes)?;
            if count == 0 || bucket >= buckets_of(interval) {
                return None;
            }
            sum = sum.checked_add(count)?;
            reuses.push((bucket, count));
            bucket += 1;
        }
        // Every reference is its page's first in the interval, or a reuse; and there is no reuse of nothing.
        (sum == references && (distinct > 0 || references == 0)).then_some(Self {
            references,
            last,
            distinct,
            reuses,
            rises: bytes,
        })
    }
}

impl CounterStream {
    /// The eight bytes that a recorded stream begins with.
    pub const MAGIC: &[u8; 8] = b"PLIMCSTK";

    /// Reads a stream to its end, or to where it is cut short or broken.
    ///
    /// # Errors
    ///
    /// [`StreamError::Read`] if reading fails; [`StreamError::NoStream`], [`StreamError::Version`] and
    /// [`StreamError::Options`] if the header is not one. A broken record is no error: see [`lost_bytes`](Self::lost_bytes).
    pub fn open(mut from: impl Read) -> Result<Self, StreamError> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).map_err(StreamError::Read)?;
        let (header, records) = bytes
            .split_at_checked(HEADER_BYTES)
            .ok_or(StreamError::NoStream)?;
        let (options, delta, crc) = parse_header(header)?;
        let mut stream = Self {
            options,
            delta,
            records: Vec::new(),
            references: 0,
            lost_bytes: 0,
            finished: false,
        };
        stream.check_records(records, crc);
        Ok(stream)
    }

    /// Keeps what can be understood.
    fn check_records(&mut self, bytes: &[u8], mut crc: u32) {
        let mut player = Player::new(self);
        let mut left = bytes;
        let mut records = Vec::new();
        while !self.finished {
            let mut rest = left;
            let Some((payload, crc_after)) = take_record(&mut rest, crc) else {
                break;
            };
            let Some(column) = Column::parse(payload, self.options.interval) else {
                break;
            };
            if player.play(&column, |_| ()).is_none() {
                break;
            }
            put_varint(&mut records, payload.len() as u64);
            records.extend(payload);
            (left, crc) = (rest, crc_after);
            self.finished = column.last;
        }
        self.references = player.now;
        self.lost_bytes = left.len() as u64;
        self.records = records;
    }

    /// How the counters were set up.
    #[must_use]
    pub fn options(&self) -> CounterStacksOptions {
        self.options
    }

    /// How many references were recorded and can be read.
    #[must_use]
    pub fn references(&self) -> u64 {
        self.references
    }

    /// Bytes at the end that could not be read: cut short or broken. 0 for a whole stream.
    #[must_use]
    pub fn lost_bytes(&self) -> u64 {
        self.lost_bytes
    }

    /// Whether the stream was [finished](StreamWriter::finish); if not, its last part is only roughly counted.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// The curve of a window, in references from the stream's beginning, as if it were all there is: pages first
    /// used in it miss at every size. It begins at an interval's border and ends at one or at the stream's end.
    ///
    /// # Errors
    ///
    /// [`StreamError::InsideInterval`] and [`StreamError::NoWindow`] for other windows.
    pub fn curve(&self, window: Range<u64>) -> Result<MissRatioCurve, StreamError> {
        let Range {
            start: from,
            end: to,
        } = window;
        let interval = self.options.interval;
        if from >= to || to > self.references {
            return Err(StreamError::NoWindow {
                from,
                to,
                references: self.references,
            });
        }
        let inside = |&at: &u64| at != self.references && !at.is_multiple_of(u64::from(interval));
        if let Some(at) = [from, to].into_iter().find(inside) {
            return Err(StreamError::InsideInterval { at, interval });
        }
        let mut view = Window {
            from,
            to,
            sizes: Sizes::default(),
            distinct: 0,
        };
        let mut player = Player::new(self);
        let mut left = self.records.as_slice();
        while let Some(column) = take_column(&mut left, interval) {
            let began = player.now;
            if from <= began && began < to {
                view.add_reuses(&column.reuses);
            }
            // Stretches that reach beyond the window are wanted as well.
            if player.play(&column, |cell| view.add(cell)).is_none() || player.is_past(to) {
                break;
            }
        }
        player.forecast(|cell| view.add_forecast(cell));
        let error = CountError::new(self.options.precision, view.distinct);
        Ok(view.sizes.curve(to - from, error)?)
    }

    /// Bytes of heap held.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.records.capacity()
    }
}

fn parse_header(header: &[u8]) -> Result<(CounterStacksOptions, u32, u32), StreamError> {
    let field = |at: usize| {
        let bytes = header
            .get(at..at + 4)
            .and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_le_bytes).ok_or(StreamError::NoStream)
    };
    if !header.starts_with(CounterStream::MAGIC) {
        return Err(StreamError::NoStream);
    }
    let crc = field(32)?;
    if crc32fast::hash(&header[..32]) != crc {
        return Err(StreamError::NoStream);
    }
    let version = field(8)?;
    if version != VERSION {
        return Err(StreamError::Version { version });
    }
    let (precision, interval, delta) = (field(12)?, field(16)?, field(20)?);
    let options = CounterStacksOptions {
        precision,
        interval,
        delta: f64::from(delta) / f64::from(SHARE_ONE),
        seed: u64::from(field(24)?) | u64::from(field(28)?) << 32,
    };
    options.check().map_err(StreamError::Options)?;
    debug_assert!(interval <= INTERVAL_MAX && delta <= DELTA_MAX);
    debug_assert!(PRECISIONS.contains(&precision));
    Ok((options, delta, crc))
}

/// Takes a record whose sum is right. Returns its payload and the sum.
fn take_record<'bytes>(bytes: &mut &'bytes [u8], crc: u32) -> Option<(&'bytes [u8], u32)> {
    let length = usize::try_from(take_varint(bytes)?).ok()?;
    let (payload, rest) = bytes.split_at_checked(length)?;
    let (sum, rest) = rest.split_at_checked(CRC_BYTES)?;
    *bytes = rest;
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(payload);
    let crc = hasher.finalize();
    (sum == crc.to_le_bytes()).then_some((payload, crc))
}

/// Takes a record that was checked before.
fn take_column<'bytes>(bytes: &mut &'bytes [u8], interval: u32) -> Option<Column<'bytes>> {
    let length = usize::try_from(take_varint(bytes)?).ok()?;
    let (payload, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Column::parse(payload, interval)
}

/// The counters as they were, from their counts.
struct Player {
    ladder: Ladder<()>,
    now: u64,
}

impl Player {
    fn new(stream: &CounterStream) -> Self {
        Self {
            ladder: Ladder::new(stream.options.interval, stream.delta, ()),
            now: 0,
        }
    }

    /// Plays an interval; `None` if that cannot be what happened.
    fn play(&mut self, column: &Column<'_>, mut cells: impl FnMut(&Cell)) -> Option<()> {
        let now = self.now.checked_add(column.references)?;
        let due = if column.last {
            self.ladder.levels.len() - 1
        } else {
            self.ladder.due()
        };
        let mut rises = column.rises;
        let mut measure = |counter: &mut Counter<()>, younger: Rise| {
            let rise = i64::try_from(younger.amount()).ok()?;
            let rise = rise.checked_sub(take_zigzag(&mut rises)?)?;
            let count = counter.count.checked_add_signed(rise)?;
            (rise >= 0 && count <= COUNT_MAX).then_some(count)
        };
        for level in 0..=due {
            self.ladder
                .end_stretch(level, now, column.distinct, &mut measure, &mut cells)?;
        }
        if !rises.is_empty() {
            return None;
        }
        self.now = now;
        if column.last {
            self.ladder
                .levels
                .iter_mut()
                .for_each(|level| level.began = now);
        } else {
            self.ladder.turn(now, due, |_| ());
        }
        Some(())
    }

    /// Whether all that happened before `to` was counted.
    fn is_past(&self, to: u64) -> bool {
        self.ladder.levels.iter().all(|level| level.began >= to)
    }

    /// Levels not counted when the record is cut short: as their counters rose last.
    fn forecast(&self, mut cells: impl FnMut(&Cell)) {
        let mut seam_after = 0;
        for stretch in &self.ladder.levels {
            let mut younger = Rise {
                after: seam_after,
                ..stretch.seam
            };
            for counter in stretch.counters.iter().rev() {
                let (rise, during) = counter.rose;
                let length = u128::from(self.now - stretch.began);
                let rise = u128::from(rise) * length / u128::from(during.max(1));
                let rise = u64::try_from(rise)
                    .unwrap_or(u64::MAX)
                    .min(younger.amount());
                let older = Rise {
                    start: counter.start,
                    before: counter.count,
                    after: counter.count + rise,
                };
                if length > 0 {
                    cells(&Cell {
                        younger,
                        older,
                        from: stretch.began,
                        until: self.now,
                    });
                }
                younger = older;
                seam_after = older.after;
            }
        }
    }
}

/// What happened within a part of the stream to pages last used in it.
struct Window {
    from: u64,
    to: u64,
    sizes: Sizes,
    /// Largest count of a counter that began in the window.
    distinct: u64,
}

impl Window {
    /// Reuses within an interval.
    fn add_reuses(&mut self, reuses: &[(u64, u64)]) {
        for &(bucket, reuses) in reuses {
            // A reuse at distance d hits from size d + 1 on.
            let (low, high) = (floor_of(bucket), floor_of(bucket + 1));
            if high - low == 1 {
                self.sizes.exactly(high, reuses as f64);
            } else {
                self.sizes.between(low, high, reuses as f64);
                self.sizes.bounds(low + 1, high, reuses as f64);
            }
        }
    }

    fn add(&mut self, cell: &Cell) {
        self.add_cell(cell, false);
    }

    fn add_forecast(&mut self, cell: &Cell) {
        self.add_cell(cell, true);
    }

    fn add_cell(&mut self, cell: &Cell, forecast: bool) {
        let &Cell {
            younger,
            older,
            from,
            until,
        } = cell;
        // Pages last used before the window are new to it.
        if younger.start < self.from || younger.start >= self.to || from >= self.to {
            return;
        }
        let inner = if older.start >= self.from {
            older
        } else {
            younger
        };
        self.distinct = self.distinct.max(inner.after);
        let whole = older.start >= self.from && until <= self.to && !forecast;
        if whole {
            place(cell, &mut self.sizes);
            return;
        }
        // Part of the stretch lies behind the window's end, and of the beginnings between the
        // two counters', some before its beginning: in proportion.
        let inside = (self.to.min(until) - from) as f64 / (until - from) as f64;
        let since = |start: u64| (younger.start - start) as f64;
        let known = if older.start >= self.from {
            1.0
        } else {
            since(self.from) / since(older.start)
        };
        let mass = (younger.amount() as f64 - older.amount() as f64) * inside;
        let part = |from: u64, to: u64, share: f64| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "between two counts"
            )]
            let way = ((to - from) as f64 * share).round() as u64;
            from + way.min(to - from)
        };
        let low = part(younger.before, younger.after, inside / 2.0);
        let high = part(older.before, older.after, inside / 2.0);
        self.sizes
            .between(low, part(low, high.max(low), known), mass * known);
        // As few misses as there may be: the part is all of it, or older pages rise no more.
        let all = if forecast {
            younger.amount() as f64
        } else {
            mass / inside
        };
        self.sizes.early(younger.before + 1, all.max(0.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lru::ExactLru;
    use crate::streams::{Random, batch_of, curve_of, cycle, uniform, zipf};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;

    fn options(interval: u32, delta: f64, seed: u64) -> CounterStacksOptions {
        CounterStacksOptions {
            precision: 12,
            interval,
            delta,
            seed,
        }
    }

    fn recorded(options: CounterStacksOptions, pages: &[u64]) -> Vec<u8> {
        let mut writer = StreamWriter::new(options, Vec::new()).unwrap();
        writer.observe(&batch_of(pages.iter().copied()));
        writer.finish().unwrap()
    }

    fn counted(options: CounterStacksOptions, pages: &[u64]) -> MissRatioCurve {
        let mut stacks = CounterStacks::new(options).unwrap();
        curve_of(&mut stacks, pages.iter().copied())
    }

    /// Where records begin, and where the last one ends.
    fn borders(bytes: &[u8]) -> Vec<usize> {
        let mut at = HEADER_BYTES;
        let mut borders = vec![at];
        while at < bytes.len() {
            let mut rest = &bytes[at..];
            let length = take_varint(&mut rest).unwrap() as usize;
            at = bytes.len() - rest.len() + length + CRC_BYTES;
            borders.push(at);
        }
        borders
    }

    /// The same records with right sums, whatever is in them.
    fn resealed(bytes: &[u8], payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut sealed = bytes[..HEADER_BYTES].to_vec();
        let mut crc = u32::from_le_bytes(bytes[32..36].try_into().unwrap());
        for payload in payloads {
            put_varint(&mut sealed, payload.len() as u64);
            sealed.extend(payload);
            let mut hasher = crc32fast::Hasher::new_with_initial(crc);
            hasher.update(payload);
            crc = hasher.finalize();
            sealed.extend(crc.to_le_bytes());
        }
        sealed
    }

    fn assert_same(a: &MissRatioCurve, b: &MissRatioCurve) {
        assert_eq!(a.references(), b.references());
        for size in (0..400).chain((400..200_000).step_by(97)).map(PageCount) {
            let (a, b) = (a.at(size), b.at(size));
            for (a, b) in [
                (a.miss_ratio, b.miss_ratio),
                (a.low, b.low),
                (a.high, b.high),
            ] {
                assert!((a - b).abs() < 1e-9, "{size:?}: {a} {b}");
            }
        }
    }

    #[test]
    fn the_whole_stream_has_the_curve_that_was_counted() {
        // Within intervals of 32, distances have buckets of their own.
        let pages: Vec<_> = zipf(3_000, 0.9, 1).take(30_010).collect();
        for delta in [0.05, 0.3] {
            let options = options(32, delta, 4);
            let stream = CounterStream::open(recorded(options, &pages).as_slice()).unwrap();
            assert!(stream.is_finished());
            assert_eq!((stream.references(), stream.lost_bytes()), (30_010, 0));
            assert_same(&stream.curve(0..30_010).unwrap(), &counted(options, &pages));
        }
    }

    #[test]
    fn a_window_from_the_first_reference_is_a_shorter_stream() {
        let pages: Vec<_> = zipf(3_000, 0.9, 1).take(32_768).collect();
        let options = options(32, 0.1, 4);
        let stream = CounterStream::open(recorded(options, &pages).as_slice()).unwrap();
        // A power of two of intervals: every level is counted there.
        let window = stream.curve(0..16_384).unwrap();
        assert_same(&window, &counted(options, &pages[..16_384]));
    }

    /// Mean absolute error of windows against exact LRU over the window alone, and the share of sizes in the band.
    fn windows(pages: &[u64], interval: u32, cut: Option<usize>) -> (f64, f64) {
        let length = pages.len() as u64;
        let step = u64::from(interval);
        let (mut error, mut held, mut count) = (0.0, 0, 0);
        for seed in 0..5 {
            let mut bytes = recorded(options(interval, 0.05, seed), pages);
            if let Some(records) = cut {
                bytes.truncate(borders(&bytes)[records] + 3);
            }
            let stream = CounterStream::open(bytes.as_slice()).unwrap();
            assert_eq!(stream.lost_bytes(), if cut.is_some() { 3 } else { 0 });
            let end = stream.references();
            let third = end / 3 / step * step;
            for (from, to) in [(third, 2 * third), (third + step, end), (5 * step, third)] {
                let truth = &pages[from as usize..to as usize];
                let mut lru = ExactLru::new();
                let truth = curve_of(&mut lru, truth.iter().copied());
                let curve = stream.curve(from..to).unwrap();
                assert_eq!(curve.references(), to - from);
                let sizes = (1..=240).map(|part| PageCount((part * lru.distinct() / 200).max(1)));
                let distance = curve.distance(&truth, sizes.clone()).unwrap();
                error += distance.mean_absolute_error;
                for size in sizes {
                    let (point, truth) = (curve.at(size), truth.miss_ratio(size));
                    held += i32::from(point.low - 1e-9 <= truth && truth <= point.high + 1e-9);
                    count += 1;
                }
            }
            assert!(end <= length);
        }
        (error / 15.0, f64::from(held) / f64::from(count))
    }

    #[test]
    fn any_window_is_right_as_a_stream_of_its_own() {
        let flips = (0..600_000_u64).map(|at| match at / 50_000 % 3 {
            0 => at % 5_000,
            1 => 5_000 + at * 7 % 20_000,
            _ => at / 3 % 500,
        });
        let saw = (0..600_000_u64).map(|at| (at % 40_000).abs_diff(20_000));
        let streams: [(&str, Vec<u64>, f64); 6] = [
            ("even", uniform(20_000, 1).take(600_000).collect(), 0.01),
            (
                "zipf 0.8",
                zipf(50_000, 0.8, 1).take(600_000).collect(),
                0.01,
            ),
            (
                "zipf 1.2",
                zipf(50_000, 1.2, 1).take(600_000).collect(),
                0.01,
            ),
            ("loop", cycle(20_000).take(600_000).collect(), 0.05),
            ("saw", saw.collect(), 0.03),
            ("flips", flips.collect(), 0.06),
        ];
        for (name, pages, bound) in streams {
            let (error, held) = windows(&pages, 1_000, None);
            assert!(error <= bound, "{name}: {error}");
            assert!(held >= 0.95, "{name}: {held}");
            // Cut short, the oldest counters were last counted a while ago.
            let (error, held) = windows(&pages, 1_000, Some(490));
            assert!(error <= bound, "{name}, cut: {error}");
            assert!(held >= 0.95, "{name}, cut: {held}");
        }
    }

    #[test]
    fn a_window_of_one_interval_is_exact() {
        let pages: Vec<_> = zipf(500, 0.8, 1).take(3_200).collect();
        let stream = recorded(options(32, 0.05, 1), &pages);
        let stream = CounterStream::open(stream.as_slice()).unwrap();
        for at in [0, 32, 1_600, 3_168] {
            let window = pages[at..at + 32].iter().copied();
            let exact = curve_of(&mut ExactLru::new(), window);
            let curve = stream.curve(at as u64..at as u64 + 32).unwrap();
            for size in (0..64).map(PageCount) {
                let difference = curve.miss_ratio(size) - exact.miss_ratio(size);
                assert!(difference.abs() < 1e-9, "{at} {size:?}");
            }
        }
    }

    #[test]
    fn what_is_no_window_is_refused() {
        let stream = recorded(options(100, 0.1, 0), &[1; 450]);
        let stream = CounterStream::open(stream.as_slice()).unwrap();
        assert!(stream.curve(0..450).is_ok());
        assert!(stream.curve(400..450).is_ok());
        for (from, to) in [(100, 100), (200, 100), (0, 500), (0, u64::MAX)] {
            let refused = stream.curve(from..to).unwrap_err();
            assert!(
                matches!(refused, StreamError::NoWindow { .. }),
                "{from} {to}"
            );
        }
        for (from, to) in [(50, 100), (0, 449), (1, 450)] {
            let refused = stream.curve(from..to).unwrap_err();
            assert!(
                matches!(refused, StreamError::InsideInterval { .. }),
                "{from} {to}"
            );
        }
    }

    #[test]
    fn a_stream_of_nothing_is_one() {
        let stream = recorded(CounterStacksOptions::default(), &[]);
        let stream = CounterStream::open(stream.as_slice()).unwrap();
        assert!(stream.is_finished());
        assert_eq!(stream.references(), 0);
        assert!(stream.curve(0..0).is_err());
    }

    #[test]
    fn a_stream_cut_anywhere_ends_at_the_last_whole_record() {
        let pages: Vec<_> = zipf(300, 0.9, 1).take(3_000).collect();
        let bytes = recorded(options(100, 0.2, 3), &pages);
        let borders = borders(&bytes);
        assert_eq!(borders.len(), 32);
        for end in 0..bytes.len() {
            let Ok(stream) = CounterStream::open(&bytes[..end]) else {
                assert!(end < HEADER_BYTES);
                continue;
            };
            let records = borders.iter().filter(|&&border| border <= end).count() - 1;
            assert_eq!(stream.references(), (100 * records as u64).min(3_000));
            assert_eq!(stream.lost_bytes(), (end - borders[records]) as u64);
            assert!(!stream.is_finished());
            if records > 0 {
                stream.curve(0..stream.references()).unwrap();
            }
        }
    }

    #[test]
    fn a_flipped_bit_ends_the_stream_where_it_is() {
        let pages: Vec<_> = zipf(300, 0.9, 1).take(2_000).collect();
        let bytes = recorded(options(100, 0.2, 3), &pages);
        let borders = borders(&bytes);
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 1 << (at % 8);
            let Ok(stream) = CounterStream::open(broken.as_slice()) else {
                assert!(at < HEADER_BYTES);
                continue;
            };
            assert!(at >= HEADER_BYTES);
            let whole = borders.iter().filter(|&&border| border <= at).count() - 1;
            assert_eq!(stream.references(), 100 * whole as u64, "byte {at}");
            assert_eq!(stream.lost_bytes(), (bytes.len() - borders[whole]) as u64);
        }
    }

    #[test]
    fn later_versions_and_impossible_options_are_told_apart() {
        let bytes = recorded(options(100, 0.2, 3), &[1, 2, 3]);
        let with = |at: usize, value: u32| {
            let mut bytes = bytes.clone();
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let crc = crc32fast::hash(&bytes[..32]);
            bytes[32..36].copy_from_slice(&crc.to_le_bytes());
            CounterStream::open(bytes.as_slice()).map(|_| ())
        };
        assert!(with(8, 1).is_ok());
        assert!(matches!(
            with(8, 2),
            Err(StreamError::Version { version: 2 })
        ));
        for (at, value) in [
            (12, 3),
            (12, 19),
            (16, 0),
            (16, u32::MAX),
            (20, DELTA_MAX + 1),
        ] {
            assert!(
                matches!(with(at, value), Err(StreamError::Options(_))),
                "{at}"
            );
        }
        assert!(matches!(with(0, 0), Err(StreamError::NoStream)));
    }

    /// Takes 100 bytes, then fails.
    #[derive(Debug)]
    struct Full(usize);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            if self.0 > 100 {
                return Err(io::Error::from(io::ErrorKind::StorageFull));
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_writer_that_fails_stops_the_record_and_not_the_counting() {
        let pages: Vec<_> = cycle(50).take(1_000).collect();
        let options = options(100, 0.1, 0);
        let mut writer = StreamWriter::new(options, Full(0)).unwrap();
        writer.observe(&batch_of(pages.iter().copied()));
        assert_same(&writer.curve().unwrap(), &counted(options, &pages));
        assert!(writer.bytes() <= 100);
        let error = writer.finish().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }

    proptest! {
        #[test]
        fn numbers_come_back(value in any::<u64>(), shift in 0_u32..64) {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value >> shift);
            put_zigzag(&mut bytes, value.cast_signed() >> shift);
            let mut rest = bytes.as_slice();
            prop_assert_eq!(take_varint(&mut rest), Some(value >> shift));
            prop_assert_eq!(take_zigzag(&mut rest), Some(value.cast_signed() >> shift));
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn a_bucket_of_distances_is_narrow(distance in 0..INTERVAL_MAX) {
            let bucket = u64::from(bucket_of(distance));
            let (floor, next) = (floor_of(bucket), floor_of(bucket + 1));
            prop_assert!((floor..next).contains(&u64::from(distance)));
            prop_assert!(next - floor <= (floor / 16).max(1));
        }

        #[test]
        fn borders_of_batches_leave_no_trace(
            pages in prop::collection::vec(0_u64..400, 1..2_000),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
            interval in 1_u32..300,
        ) {
            let options = options(interval, 0.2, 1);
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(pages.len())).collect();
            cuts.extend([0, pages.len()]);
            cuts.sort_unstable();
            let mut writer = StreamWriter::new(options, Vec::new()).unwrap();
            for cut in cuts.windows(2) {
                writer.observe(&batch_of(pages[cut[0]..cut[1]].iter().copied()));
            }
            prop_assert_eq!(writer.finish().unwrap(), recorded(options, &pages));
        }

        #[test]
        fn broken_records_under_right_sums_are_no_danger(
            seed in any::<u64>(),
            changes in 1_usize..8,
            interval in prop_oneof![Just(1_u32), Just(2), 3_u32..200],
            delta in prop_oneof![Just(0.0), 0.05_f64..0.5],
        ) {
            let pages: Vec<_> = zipf(300, 0.9, seed).take(1_500).collect();
            let bytes = recorded(options(interval, delta, 3), &pages);
            let borders = borders(&bytes);
            let mut payloads: Vec<Vec<u8>> = borders.windows(2).map(|border| {
                let mut rest = &bytes[border[0]..border[1] - CRC_BYTES];
                take_varint(&mut rest).unwrap();
                rest.to_vec()
            }).collect();
            let mut random = Random::new(seed);
            for _ in 0..changes {
                let index = (random.share() * payloads.len() as f64) as usize;
                let payload = &mut payloads[index];
                let at = (random.share() * payload.len() as f64) as usize;
                match random.next() % 4 {
                    0 => payload[at] = random.next() as u8,
                    1 => payload.truncate(at),
                    // The largest number there is.
                    2 => drop(payload.splice(at..=at, [255; 9].into_iter().chain([1]))),
                    _ => payload.insert(at, 0),
                }
                if payload.is_empty() {
                    payload.push(0);
                }
            }
            let stream = CounterStream::open(resealed(&bytes, &payloads).as_slice()).unwrap();
            if stream.references() > 0 {
                let curve = stream.curve(0..stream.references()).unwrap();
                prop_assert_eq!(curve.references(), stream.references());
            }
        }

        #[test]
        fn bytes_of_any_kind_are_no_danger(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            with_header in any::<bool>(),
        ) {
            let mut stream = Vec::new();
            if with_header {
                stream.extend(&recorded(options(7, 0.1, 0), &[])[..HEADER_BYTES]);
            }
            stream.extend(bytes);
            let _ = CounterStream::open(stream.as_slice());
        }
    }
}
