//! `lcs`: libCacheSim's records after a header, little endian, versions 1 to 8.
//!
//! | header bytes | field | |
//! |---|---|---|
//! | 0..8 | `u64` magic number | `0x123456789abcdef0` |
//! | 8..16 | `u64` version | 1 to 8 |
//! | 16..8184 | statistics of the trace | ignored |
//! | 8184..8192 | `u64` magic number | the same |
//!
//! | version 1 | version 2 | versions 3 and above | field | read as |
//! |---|---|---|---|---|
//! | 0..4 | 0..4 | 0..4 | `u32` time in seconds | time, if asked for |
//! | 4..12 | 4..12 | 4..12 | `u64` object | page |
//! | 12..16 | 12..16 | 12..20 | size in bytes, `u32`, later `i64` | size, if asked for |
//! | | 16 | 20 | `u8` operation | kind |
//! | | 17..20 | 21..24 | `u24` tenant | device |
//! | | | 24..28 | `u32` TTL | ignored |
//! | 16..24 | 20..28 | 28..36 | `i64` number of the object's next record | ignored |
//! | | | 36.. | 1, 2, 4, 8 or 16 features of 4 bytes in versions 4 to 8 | ignored |
//!
//! Operations 1, 2 and 12 (get, gets, read) read; 3 to 8, 10, 11, 13 and 14 write; 9 (delete) makes no reference and is counted;
//! others are unknown.
//!
//! Source: the structures in libCacheSim's reader of the format.

use std::io::Read;

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source};

use crate::bytes::Bytes;
use crate::details::Wanted;
use crate::devices::Devices;
use crate::row::{FormatRow, Opening};
use crate::spans::Reading;
use crate::{Grouping, Options, SourceError, TraceOption};

/// Number of bytes read at a time.
const BUFFER_BYTES: usize = 256 << 10;
const HEADER_BYTES: usize = 8192;
const MAGIC: [u8; 8] = 0x1234_5678_9abc_def0_u64.to_le_bytes();
/// Bytes of a record by version, from 1.
const RECORD_BYTES: [usize; 8] = [24, 28, 36, 40, 44, 52, 68, 100];
const DELETE: u8 = 9;

/// The fields of a record that are used.
struct Record {
    time_s: u32,
    object: u64,
    /// `None` if it is negative or beyond 32 bits.
    size_bytes: Option<u32>,
    operation: u8,
    tenant: u32,
}

impl Record {
    fn of(record: &[u8], version: usize) -> Option<Self> {
        let u32_at = |at: usize| Some(u32::from_le_bytes(*record.get(at..)?.first_chunk()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(*record.get(at..)?.first_chunk()?));
        let (size_bytes, operation) = match version {
            1 => (Some(u32_at(12)?), 0),
            2 => (Some(u32_at(12)?), u32_at(16)?),
            _ => (u32::try_from(u64_at(12)?).ok(), u32_at(20)?),
        };
        Some(Self {
            time_s: u32_at(0)?,
            object: u64_at(4)?,
            size_bytes,
            operation: operation.to_le_bytes()[0],
            tenant: operation >> 8,
        })
    }

    fn kind(&self) -> AccessKind {
        match self.operation {
            1 | 2 | 12 => AccessKind::Read,
            3..=8 | 10 | 11 | 13 | 14 => AccessKind::Write,
            _ => AccessKind::Unknown,
        }
    }
}

/// Reader of `lcs` traces.
struct Reader<R> {
    bytes: Bytes<R>,
    /// From 1.
    version: usize,
    tenants: Devices,
    skipped: u64,
    wanted: Wanted,
    by_tenant: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    fn new(input: R, name: &str, options: &Options) -> Result<Self, SourceError> {
        let mut bytes = Bytes::new(input, name, BUFFER_BYTES);
        let header = bytes.at_least(HEADER_BYTES)?;
        if header.len() < HEADER_BYTES {
            return Err(bytes.truncated(HEADER_BYTES));
        }
        if !header.starts_with(&MAGIC) || header[HEADER_BYTES - 8..][..8] != MAGIC {
            let expected = "a header that begins and ends with 0x123456789abcdef0";
            return Err(bytes.unexpected(expected, 8));
        }
        let version = header[8..]
            .first_chunk()
            .copied()
            .map_or(0, u64::from_le_bytes);
        let version = usize::try_from(version).unwrap_or(0);
        if !(1..=RECORD_BYTES.len()).contains(&version) {
            bytes.take(8);
            return Err(bytes.unexpected("version 1 to 8", 8));
        }
        bytes.take(HEADER_BYTES);
        let wanted = Wanted::of(options, Grouping::Device);
        Ok(Self {
            bytes,
            version,
            tenants: Devices::new(options.device.as_deref()),
            skipped: 0,
            wanted,
            by_tenant: wanted.groups || options.device.is_some(),
        })
    }
}

impl<R: Read> Source for Reader<R> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        let record_bytes = RECORD_BYTES[self.version - 1];
        while !batch.is_full() {
            let bytes = self.bytes.at_least(record_bytes)?;
            if bytes.is_empty() {
                break;
            }
            let Some(record) =
                Record::of(bytes, self.version).filter(|_| bytes.len() >= record_bytes)
            else {
                return Err(self.bytes.truncated(record_bytes));
            };
            let mut tenant = 0;
            if self.by_tenant {
                match self.tenants.number_of(record.tenant.to_string().as_bytes()) {
                    Ok(Some(number)) => tenant = number,
                    Ok(None) => {
                        self.bytes.take(record_bytes);
                        continue;
                    }
                    Err(expected) => return Err(self.bytes.unexpected(expected, record_bytes)),
                }
            }
            if record.operation == DELETE {
                self.bytes.take(record_bytes);
                self.skipped += 1;
                continue;
            }
            let size_bytes = match record.size_bytes {
                None if self.wanted.sizes => {
                    let expected = "a record of an object below 4 GiB";
                    return Err(self.bytes.unexpected(expected, record_bytes));
                }
                size_bytes => size_bytes.unwrap_or_default(),
            };
            self.bytes.take(record_bytes);
            batch.push(PageNumber(record.object), record.kind());
            let time_us = u64::from(record.time_s) * 1_000_000;
            self.wanted.push(time_us, size_bytes, tenant, batch);
        }
        Ok(!batch.is_empty())
    }
}

impl<R: Read> Reading for Reader<R> {
    fn skipped(&self) -> u64 {
        self.skipped
    }

    fn groups(&self) -> Vec<String> {
        self.tenants.names()
    }
}

/// `lcs`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "lcs",
    is_named: |last, _| last == "lcs",
    is_head: |head| head.bytes.starts_with(&MAGIC),
    also_named: &[],
    options: &[
        TraceOption::Device,
        TraceOption::ByDevice,
        TraceOption::Times,
        TraceOption::Sizes,
    ],
    opening: Opening::Stream(|input, name, options| {
        Ok(Box::new(Reader::new(input, name, options)?))
    }),
    writer: None,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drained::references_of;
    use AccessKind::{Read as R, Unknown as U, Write as W};

    fn header(version: u64) -> Vec<u8> {
        let mut header = [MAGIC, version.to_le_bytes()].concat();
        header.resize(HEADER_BYTES - 8, 7);
        header.extend(MAGIC);
        header
    }

    fn record(version: usize, object: u64, size: u32, operation: u8, tenant: u32) -> Vec<u8> {
        let operation = (u32::from(operation) | tenant << 8).to_le_bytes();
        let mut record = [
            &9_u32.to_le_bytes()[..],
            &object.to_le_bytes(),
            &size.to_le_bytes(),
        ]
        .concat();
        if version >= 3 {
            record.extend([0; 4]);
        }
        if version >= 2 {
            record.extend(operation);
        }
        record.resize(RECORD_BYTES[version - 1], 0xaa);
        record
    }

    fn trace(version: usize) -> Vec<u8> {
        let mut trace = header(version as u64);
        for (object, size, operation, tenant) in [
            (u64::MAX, 512, 1, 70_000),
            (3, 7, 9, 0),
            (3, 7, 3, 1),
            (4, 1, 255, 70_000),
        ] {
            trace.extend(record(version, object, size, operation, tenant));
        }
        trace
    }

    #[test]
    fn every_version_says_the_same() {
        let all = Options {
            times: true,
            sizes: true,
            groups: Some(Grouping::Device),
            ..Options::default()
        };
        for version in 2..=8 {
            let trace = trace(version);
            let mut reader = Reader::new(&trace[..], "t", &Options::default()).unwrap();
            let references = references_of(&mut reader).unwrap();
            assert_eq!(references, [(u64::MAX, R), (3, W), (4, U)], "{version}");
            assert_eq!(reader.skipped(), 1);
            let mut reader = Reader::new(&trace[..], "t", &all).unwrap();
            let mut batch = ReferenceBatch::new();
            assert!(reader.next_batch(&mut batch).unwrap());
            assert_eq!(batch.details().times_us, [9_000_000; 3]);
            assert_eq!(batch.details().sizes_bytes, [512, 7, 1]);
            assert_eq!(batch.details().groups, [0, 2, 0]);
            assert_eq!(reader.groups(), ["70000", "0", "1"]);
        }
        let trace = trace(1);
        let mut reader = Reader::new(&trace[..], "t", &Options::default()).unwrap();
        let references = references_of(&mut reader).unwrap();
        assert_eq!(references, [(u64::MAX, U), (3, U), (3, U), (4, U)]);
    }

    #[test]
    fn one_tenant_is_read_alone() {
        let options = Options {
            device: Some("1".to_owned()),
            ..Options::default()
        };
        let mut reader = Reader::new(&*trace(3).leak(), "t", &options).unwrap();
        assert_eq!(references_of(&mut reader).unwrap(), [(3, W)]);
    }

    #[test]
    fn a_damaged_header_and_a_record_cut_short_are_named() {
        let error = |bytes: &[u8]| {
            let reader = Reader::new(bytes, "t.lcs", &Options::default());
            let error = reader.and_then(|mut reader| references_of(&mut reader).map(|_| ()));
            error.unwrap_err().to_string()
        };
        assert!(error(&header(0)).starts_with("t.lcs, byte 8: expected version 1 to 8"));
        assert!(error(&header(9)).contains("version 1 to 8"));
        assert!(error(&header(1)[..9]).contains("has 9 bytes instead of 8192"));
        let mut damaged = header(1);
        damaged[HEADER_BYTES - 1] ^= 1;
        assert!(error(&damaged).contains("begins and ends with"));
        let whole = trace(2);
        let expected = "t.lcs, byte 8276: the last record has 27 bytes instead of 28";
        assert_eq!(error(&whole[..whole.len() - 1]), expected);
    }

    #[test]
    fn a_size_beyond_32_bits_is_refused_if_sizes_are_asked_for() {
        let mut trace = trace(3);
        trace[HEADER_BYTES + 19] = 0x80;
        let options = Options {
            sizes: true,
            ..Options::default()
        };
        let mut reader = Reader::new(&trace[..], "t", &options).unwrap();
        let error = references_of(&mut reader).unwrap_err().to_string();
        assert!(
            error.contains("byte 8192: expected a record of an object below 4 GiB"),
            "{error}"
        );
        let mut reader = Reader::new(&trace[..], "t", &Options::default()).unwrap();
        assert_eq!(references_of(&mut reader).unwrap().len(), 3);
    }
}
