//! Reading a record: its checks, and curves of its windows.

use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::Path;

use plimsoll_flow::{MissRatioCurve, PageSize};

use super::coding::{put_varint, take_varint};
use super::column::{Column, take_column};
use super::player::{Player, Window};
use super::{CRC_BYTES, HEADER_BYTES, StreamError, VERSION};
use crate::curve::counter_stacks::sizes::{CountError, Sizes};
use crate::curve::counter_stacks::{
    CounterStacksOptions, DELTA_MAX, INTERVAL_MAX, PRECISIONS, SHARE_ONE,
};

/// A recorded stream, checked and ready for queries.
#[derive(Debug, Clone)]
pub struct CounterStream {
    pub(super) options: CounterStacksOptions,
    pub(super) delta: u32,
    page_size: Option<PageSize>,
    /// Payloads of the valid records, each preceded by its length as a varint.
    pub(super) records: Vec<u8>,
    pub(super) references: u64,
    pub(super) lost_bytes: u64,
    pub(super) finished: bool,
}

impl CounterStream {
    /// The first eight bytes of a recorded stream.
    pub const MAGIC: &[u8; 8] = b"PLIMCSTK";

    /// Reads a stream from a file; `None` if the file does not begin with [`MAGIC`](Self::MAGIC), or if it is a pipe,
    /// from which the inspected bytes would be missing.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_file(path: &Path) -> Result<Option<Self>, StreamError> {
        let mut head = [0; Self::MAGIC.len()];
        let is_stream = path.is_file()
            && File::open(path).is_ok_and(|mut file| file.read_exact(&mut head).is_ok())
            && head == *Self::MAGIC;
        if !is_stream {
            return Ok(None);
        }
        let file = File::open(path).map_err(StreamError::Read)?;
        Self::open(BufReader::new(file)).map(Some)
    }

    /// Reads a stream to its end, or to where it is truncated or broken.
    ///
    /// # Errors
    ///
    /// [`StreamError::Read`] if reading fails; [`StreamError::NoStream`], [`StreamError::Version`] and
    /// [`StreamError::Options`] if the header is invalid. A broken record is no error: see
    /// [`lost_bytes`](Self::lost_bytes).
    pub fn open(mut from: impl Read) -> Result<Self, StreamError> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).map_err(StreamError::Read)?;
        let (header, records) = bytes
            .split_at_checked(HEADER_BYTES)
            .ok_or(StreamError::NoStream)?;
        let (options, delta, page_size, crc) = parse_header(header)?;
        let mut stream = Self {
            options,
            delta,
            page_size,
            records: Vec::new(),
            references: 0,
            lost_bytes: 0,
            finished: false,
        };
        stream.check_records(records, crc);
        Ok(stream)
    }

    /// Stores the valid records.
    pub(super) fn check_records(&mut self, bytes: &[u8], mut crc: u32) {
        let mut player = Player::new(self.options.interval, self.delta);
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

    /// The options of the counters.
    pub fn options(&self) -> CounterStacksOptions {
        self.options
    }

    /// Size of the pages; `None` in version 1, which does not record it.
    pub fn page_size(&self) -> Option<PageSize> {
        self.page_size
    }

    /// Number of recorded references that can be read.
    pub fn references(&self) -> u64 {
        self.references
    }

    /// Bytes at the end that could not be read because the record is truncated or broken; 0 for a complete stream.
    pub fn lost_bytes(&self) -> u64 {
        self.lost_bytes
    }

    /// Whether the stream was [finished](super::StreamWriter::finish); if not, its last part is counted only roughly.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// The curve of a window, in references from the stream's beginning, as if it were the whole stream: pages first
    /// used in it miss at every size. It must begin at an interval's border and end at one or at the stream's end.
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
        let mut player = Player::new(self.options.interval, self.delta);
        let mut left = self.records.as_slice();
        while let Some(column) = take_column(&mut left, interval) {
            let began = player.now;
            if from <= began && began < to {
                view.add_reuses(&column.reuses);
            }
            // Intervals that extend beyond the window are needed as well.
            if player.play(&column, |cell| view.add(cell)).is_none() || player.is_past(to) {
                break;
            }
        }
        player.forecast(|cell| view.add_forecast(cell));
        let error = CountError::new(self.options.precision, view.distinct);
        Ok(view.sizes.curve(to - from, error)?)
    }

    /// Bytes of heap allocated.
    pub fn memory_bytes(&self) -> usize {
        self.records.capacity()
    }
}

pub(super) fn parse_header(
    header: &[u8],
) -> Result<(CounterStacksOptions, u32, Option<PageSize>, u32), StreamError> {
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
    if !(1..=VERSION).contains(&version) {
        return Err(StreamError::Version { version });
    }
    let (precision, interval, delta) = (field(12)?, field(16)?, field(20)?);
    let (precision, page_size) = match version {
        1 => (precision, None),
        _ => {
            let bytes = 1_u64.checked_shl(precision >> 16);
            let size = bytes.and_then(|bytes| PageSize::new(bytes).ok());
            (precision & 0xffff, Some(size.ok_or(StreamError::NoStream)?))
        }
    };
    let options = CounterStacksOptions {
        precision,
        interval,
        delta: f64::from(delta) / f64::from(SHARE_ONE),
        seed: u64::from(field(24)?) | u64::from(field(28)?) << 32,
    };
    options.check().map_err(StreamError::Options)?;
    debug_assert!(interval <= INTERVAL_MAX && delta <= DELTA_MAX);
    debug_assert!(PRECISIONS.contains(&precision));
    Ok((options, delta, page_size, crc))
}

/// Takes a record whose checksum is valid. Returns its payload and the checksum.
pub(super) fn take_record<'bytes>(
    bytes: &mut &'bytes [u8],
    crc: u32,
) -> Option<(&'bytes [u8], u32)> {
    let length = usize::try_from(take_varint(bytes)?).ok()?;
    let (payload, rest) = bytes.split_at_checked(length)?;
    let (sum, rest) = rest.split_at_checked(CRC_BYTES)?;
    *bytes = rest;
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(payload);
    let crc = hasher.finalize();
    (sum == crc.to_le_bytes()).then_some((payload, crc))
}
