//! `vscsi`: SCSI commands of a virtual disk as recorded by VMware's tracer and CloudPhysics.
//!
//! | version 1 | version 2 | field | read as |
//! |---|---|---|---|
//! | 0..4 | 4..8 | `u32` serial number | ignored |
//! | 4..8 | 8..12 | `u32` length in bytes | length |
//! | 8..12 | 12..16 | `u32` scatter-gather entries | ignored |
//! | 12..14 | 0..2 | `u16` SCSI operation code | kind |
//! | 14..16 | 2..4 | `u16` version, in the upper byte | checked |
//! | 16..24 | 16..24 | `u64` block of 512 bytes | offset |
//! | 24..32 | 24..32 | `u64` time in microseconds | time, if asked for |
//! | | 32..40 | `u64` response time | ignored |
//!
//! Little endian, without a header: the version is the one found in all records at the
//! beginning, and each later record is checked. Commands other than reads and
//! writes make no reference and are counted.
//!
//! Source: the records of libCacheSim's and Mimircache's readers.

use std::io::Read;

use plimsoll_flow::AccessKind;

use crate::bytes::Bytes;
use crate::requests::{Request, Requests, SECTOR_BYTES};
use crate::row::{FormatRow, Opening};
use crate::spans::SpanSource;
use crate::spans::{Span, Spans};
use crate::{Options, SourceError, TraceOption};

/// Number of bytes read at a time.
const BUFFER_BYTES: usize = 256 << 10;

/// Number of bytes from which the version is recognised.
const HEAD_BYTES: usize = 4096;

/// Number of records that must be valid commands before an unnamed trace is accepted as one.
const RECORDS_TO_TELL: usize = 4;

/// The two layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// The relevant fields of a record.
struct Command {
    version: u8,
    operation: u16,
    length_bytes: u64,
    block: u64,
    time_us: u64,
}

impl Version {
    fn record_bytes(self) -> usize {
        match self {
            Self::One => 32,
            Self::Two => 40,
        }
    }

    fn number(self) -> u8 {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }

    /// Parses a record of length [`Self::record_bytes`].
    fn command(self, record: &[u8]) -> Option<Command> {
        let (length, operation, version) = match self {
            Self::One => (4, 12, 14),
            Self::Two => (8, 0, 2),
        };
        let u16_at = |at: usize| Some(u16::from_le_bytes(*record.get(at..)?.first_chunk()?));
        Some(Command {
            version: u16_at(version)?.to_le_bytes()[1],
            operation: u16_at(operation)?,
            length_bytes: u32::from_le_bytes(*record.get(length..)?.first_chunk()?).into(),
            block: u64::from_le_bytes(*record.get(16..)?.first_chunk()?),
            time_us: u64::from_le_bytes(*record.get(24..)?.first_chunk()?),
        })
    }

    /// The version of all complete records of `head`, if they agree.
    fn of_head(head: &[u8]) -> Option<Self> {
        let mut told = [Self::One, Self::Two].into_iter().filter(|version| {
            let mut records = head.chunks_exact(version.record_bytes());
            let first = records.len() > 0;
            let bears = |record| version.command(record).map(|command| command.version);
            first && records.all(|record| bears(record) == Some(version.number()))
        });
        told.next().filter(|_| told.next().is_none())
    }
}

/// Whether a trace without a given format is certainly `vscsi`.
pub(crate) fn is_head(head: &[u8]) -> bool {
    let Some(version) = Version::of_head(head) else {
        return false;
    };
    let records = head.chunks_exact(version.record_bytes());
    let is_command = |record| {
        version.command(record).is_some_and(|command| {
            command.operation <= 0xff && command.length_bytes.is_multiple_of(SECTOR_BYTES)
        })
    };
    records.len() >= RECORDS_TO_TELL && { records }.all(is_command)
}

/// Distinguishes reads from writes; `None` for a command that transfers no data of the disk.
fn kind_of(operation: u16) -> Option<AccessKind> {
    match operation {
        0x08 | 0x28 | 0x88 | 0xa8 => Some(AccessKind::Read),
        // WRITE, WRITE AND VERIFY, WRITE SAME.
        0x0a | 0x2a | 0x8a | 0xaa | 0x2e | 0x8e | 0xae | 0x41 | 0x93 => Some(AccessKind::Write),
        _ => None,
    }
}

/// Reader of `vscsi` traces.
pub(crate) struct Reader<R> {
    bytes: Bytes<R>,
    requests: Requests,
    version: Version,
}

impl<R: Read> Reader<R> {
    /// Determines the version from the first records.
    pub(crate) fn new(input: R, name: &str, options: &Options) -> Result<Self, SourceError> {
        let mut bytes = Bytes::new(input, name, BUFFER_BYTES);
        let head = bytes.at_least(HEAD_BYTES)?;
        let head = &head[..head.len().min(HEAD_BYTES)];
        let version = match Version::of_head(head) {
            Some(version) => version,
            // Fewer bytes than a record: if there are any, reading them reports the error.
            None if head.len() < Version::One.record_bytes() => Version::One,
            None => {
                let expected = "records that all bear version 1, or all version 2";
                return Err(bytes.unexpected(expected, Version::One.record_bytes()));
            }
        };
        Ok(Self {
            bytes,
            // A trace has only one disk, so there is no device to select.
            requests: Requests::new(&Options {
                page_size: options.page_size,
                ..Options::default()
            }),
            version,
        })
    }
}

impl<R: Read> Spans for Reader<R> {
    fn next_span(&mut self) -> Result<Option<Span>, SourceError> {
        let record_bytes = self.version.record_bytes();
        let number = self.version.number();
        loop {
            let record = self.bytes.at_least(record_bytes)?;
            if record.is_empty() {
                return Ok(None);
            }
            if record.len() < record_bytes {
                return Err(self.bytes.truncated(record_bytes));
            }
            let command = self.version.command(record);
            let Some(command) = command.filter(|command| command.version == number) else {
                let expected = format!("a record of version {number}");
                return Err(self.bytes.unexpected(expected, record_bytes));
            };
            let Some(offset_bytes) = command.block.checked_mul(SECTOR_BYTES) else {
                return Err(self.bytes.unexpected("a block below 2^55", record_bytes));
            };
            let placed = self.requests.place(Request {
                device: b"",
                kind: kind_of(command.operation),
                offset_bytes,
                length_bytes: command.length_bytes,
            });
            let span = placed.map_err(|expected| self.bytes.unexpected(expected, record_bytes))?;
            self.bytes.take(record_bytes);
            if let Some(span) = span {
                let time_us = command.time_us;
                return Ok(Some(Span { time_us, ..span }));
            }
        }
    }

    fn skipped(&self) -> u64 {
        self.requests.skipped()
    }
}

/// `vscsi`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "vscsi",
    is_named: |last, _| last == "vscsi",
    is_head: |head| is_head(head.bytes),
    also_named: &[],
    options: &[TraceOption::Times],
    opening: Opening::Stream(|input, name, options| {
        let reader = Reader::new(input, name, options)?;
        Ok(Box::new(SpanSource::new(reader, options)))
    }),
    writer: None,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drained::references_of;
    use crate::spans::{Reading, SpanSource};
    use AccessKind::{Read as R, Write as W};
    use plimsoll_flow::PageSize;

    fn record(version: u8, operation: u16, length: u32, block: u64) -> Vec<u8> {
        let operation = operation.to_le_bytes();
        let version_field = [7, version];
        let [serial, length, gather] = [9, length, 1].map(u32::to_le_bytes);
        let [block, time] = [block, 11].map(u64::to_le_bytes);
        match version {
            1 => [
                &serial[..],
                &length,
                &gather,
                &operation,
                &version_field,
                &block,
                &time,
            ]
            .concat(),
            _ => [
                &operation[..],
                &version_field,
                &serial,
                &length,
                &gather,
                &block,
                &time,
                &time,
            ]
            .concat(),
        }
    }

    fn read(bytes: &[u8]) -> Result<(Vec<(u64, AccessKind)>, u64), SourceError> {
        let options = Options {
            page_size: PageSize::new(1024).unwrap(),
            ..Options::default()
        };
        let mut source = SpanSource::new(Reader::new(bytes, "t.vscsi", &options)?, &options);
        let all = references_of(&mut source)?;
        Ok((all, source.skipped()))
    }

    #[test]
    fn both_versions_say_the_same() {
        for version in [1, 2] {
            let trace: Vec<u8> = [
                record(version, 0x28, 2048, 5),
                record(version, 0x35, 0, 0),
                record(version, 0x8a, 512, 0),
                record(version, 0x12, 36, 0),
                record(version, 0x2a, 0, 4),
            ]
            .concat();
            let expected = vec![(2, R), (3, R), (4, R), (0, W)];
            assert_eq!(read(&trace).unwrap(), (expected, 3), "{version}");
        }
        assert_eq!(read(b"").unwrap(), (vec![], 0));
    }

    #[test]
    fn records_that_differ_in_version_are_refused() {
        let mut trace = record(1, 0x28, 512, 0).repeat(200);
        trace.extend(record(2, 0x28, 512, 0));
        let error = read(&trace).unwrap_err().to_string();
        assert!(
            error.starts_with("t.vscsi, byte 6400: expected a record of version 1, found '"),
            "{error}"
        );
        let error = read(&[0; 100]).unwrap_err().to_string();
        assert!(
            error.contains("byte 0: expected records that all bear version"),
            "{error}"
        );
    }

    #[test]
    fn a_record_cut_short_and_a_block_beyond_all_disks_are_named() {
        let trace = record(2, 0x28, 512, 0).repeat(3);
        let error = read(&trace[..90]).unwrap_err().to_string();
        assert_eq!(
            error,
            "t.vscsi, byte 80: the last record has 10 bytes instead of 40"
        );
        for block in [1 << 55, u64::MAX, 1 << 50] {
            let trace = [record(1, 0x28, 512, 1), record(1, 0x28, 512, block)].concat();
            let error = read(&trace).unwrap_err().to_string();
            assert!(
                error.starts_with("t.vscsi, byte 32: expected a "),
                "{error}"
            );
        }
    }

    #[test]
    fn without_a_name_only_what_is_beyond_doubt_is_told() {
        for version in [1, 2] {
            let trace = record(version, 0x28, 512, 0).repeat(4);
            assert!(is_head(&trace));
            assert!(!is_head(&trace[..trace.len() - 1]));
            assert!(!is_head(&record(version, 0x28, 511, 0).repeat(9)));
            assert!(!is_head(&record(version, 0x128, 512, 0).repeat(9)));
        }
        assert!(!is_head(&[1; 4096]) && !is_head(&[2; 4096]));
    }
}
