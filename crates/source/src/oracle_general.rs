//! `oracle-general`: libCacheSim's records of 24 bytes, little endian.
//!
//! | bytes | field | read as | written as |
//! |---|---|---|---|
//! | 0..4 | `u32` time in seconds | time, if asked for | 0: references have an order, not a clock |
//! | 4..12 | `u64` object | page | page |
//! | 12..16 | `u32` size in bytes | size, if asked for | page size |
//! | 16..24 | `i64` number of the object's next record, from 1; -1 for none | ignored | exactly that |
//!
//! Because each record contains the position of the next one, the writer holds the trace in memory
//! until it is complete: 16 bytes per reference and one map entry per page.

use std::collections::HashMap;
use std::io::{self, Read, Write};

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source};

use crate::aligned::AlignedBuffer;
use crate::lines::read_full;
use crate::row::{FormatRow, Opening};
use crate::spans::Reading;
use crate::writing::ContentWriter;
use crate::{Options, SourceError, TraceOption};

const RECORD_BYTES: usize = 24;
const NO_NEXT: i64 = -1;

/// Reader of `oracle-general` traces.
pub(crate) struct Reader<R> {
    input: R,
    name: String,
    buffer: AlignedBuffer,
    /// Bytes read so far.
    offset_bytes: u64,
    with_times: bool,
    with_sizes: bool,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(input: R, name: &str, options: &Options) -> Self {
        Self {
            input,
            name: name.to_owned(),
            buffer: AlignedBuffer::new(RECORD_BYTES * ReferenceBatch::CAPACITY),
            offset_bytes: 0,
            with_times: options.times,
            with_sizes: options.sizes,
        }
    }
}

impl<R: Read> Source for Reader<R> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        let (filled, result) = read_full(&mut self.input, &mut self.buffer);
        let (records, rest) = self.buffer[..filled].as_chunks::<RECORD_BYTES>();
        let pages = records.iter().map(|record| {
            let [_, _, _, _, a, b, c, d, e, f, g, h, ..] = *record;
            PageNumber(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
        });
        batch.extend(pages, std::iter::repeat(AccessKind::Unknown));
        let word = |record: &[u8; RECORD_BYTES], at: usize| {
            record[at..]
                .first_chunk()
                .copied()
                .map_or(0, u32::from_le_bytes)
        };
        let details = batch.details_mut();
        if self.with_times {
            let times = records.iter().map(|record| u64::from(word(record, 0)));
            details.times_us.extend(times.map(|time| time * 1_000_000));
        }
        if self.with_sizes {
            let sizes = records.iter().map(|record| word(record, 12));
            details.sizes_bytes.extend(sizes);
        }
        self.offset_bytes += filled as u64;
        if let Err(source) = result {
            return Err(SourceError::Read {
                name: self.name.clone(),
                offset_bytes: self.offset_bytes,
                source,
            });
        }
        if !rest.is_empty() {
            return Err(SourceError::Truncated {
                name: self.name.clone(),
                offset_bytes: self.offset_bytes - rest.len() as u64,
                found_bytes: rest.len(),
                expected_bytes: RECORD_BYTES,
            });
        }
        Ok(!batch.is_empty())
    }
}

impl<R: Read> Reading for Reader<R> {}

/// `oracle-general`. The names of libCacheSim's files end in `.oracleGeneral`, `.oracleGeneral.bin` or
/// `.oracleGeneral.zst`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "oracle-general",
    is_named: |last, before| is_own(last) || last == "bin" && before.is_some_and(is_own),
    is_head: |_| false,
    also_named: &[],
    options: &[TraceOption::Times, TraceOption::Sizes],
    opening: Opening::Stream(|input, name, options| {
        Ok(Box::new(Reader::new(input, name, options)))
    }),
    writer: Some(|page_size| {
        let page_bytes = u32::try_from(page_size.bytes()).unwrap_or(u32::MAX);
        Ok(Box::new(Writer::new(page_bytes)))
    }),
};

fn is_own(part: &str) -> bool {
    part.contains("oraclegeneral") || part.contains("oracle-general")
}

/// The records of a trace to be written, collected until the next reference of each is known.
struct Writer {
    page_bytes: u32,
    pages: Vec<PageNumber>,
    next: Vec<i64>,
    /// Index of each page's last record.
    last: HashMap<PageNumber, usize>,
}

impl Writer {
    fn new(page_bytes: u32) -> Self {
        Self {
            page_bytes,
            pages: Vec::new(),
            next: Vec::new(),
            last: HashMap::new(),
        }
    }
}

impl ContentWriter for Writer {
    fn write(&mut self, batch: &ReferenceBatch, _: &mut dyn Write) -> io::Result<()> {
        for &page in batch.pages() {
            let index = self.pages.len();
            self.pages.push(page);
            self.next.push(NO_NEXT);
            if let Some(before) = self.last.insert(page, index) {
                // A vector is never longer than i64::MAX.
                self.next[before] = i64::try_from(index + 1).unwrap_or(i64::MAX);
            }
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        for (page, next) in self.pages.iter().zip(&self.next) {
            out.write_all(&0u32.to_le_bytes())?;
            out.write_all(&page.0.to_le_bytes())?;
            out.write_all(&self.page_bytes.to_le_bytes())?;
            out.write_all(&next.to_le_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(time: u32, page: u64, size: u32, next: i64) -> Vec<u8> {
        let mut record = time.to_le_bytes().to_vec();
        record.extend(page.to_le_bytes());
        record.extend(size.to_le_bytes());
        record.extend(next.to_le_bytes());
        record
    }

    fn written(pages: &[u64]) -> Vec<u8> {
        let (mut writer, mut bytes) = (Writer::new(4096), Vec::new());
        let mut batch = ReferenceBatch::new();
        for &page in pages {
            batch.push(PageNumber(page), AccessKind::Unknown);
        }
        writer.write(&batch, &mut bytes).unwrap();
        writer.finish(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_object_is_the_page_and_all_else_is_ignored() {
        let bytes = [record(9, u64::MAX, 512, -1), record(9, 3, 0, 77)].concat();
        let mut batch = ReferenceBatch::new();
        assert!(
            Reader::new(&bytes[..], "t", &Options::default())
                .next_batch(&mut batch)
                .unwrap()
        );
        assert_eq!(batch.pages(), [PageNumber(u64::MAX), PageNumber(3)]);
        assert_eq!(batch.kinds(), [AccessKind::Unknown; 2]);
    }

    #[test]
    fn time_and_size_are_read_if_asked_for() {
        let bytes = [record(9, 1, 512, -1), record(u32::MAX, 3, 0, 77)].concat();
        let options = Options {
            times: true,
            sizes: true,
            ..Options::default()
        };
        let mut batch = ReferenceBatch::new();
        let mut reader = Reader::new(&bytes[..], "t", &options);
        assert!(reader.next_batch(&mut batch).unwrap());
        let latest = u64::from(u32::MAX) * 1_000_000;
        assert_eq!(batch.details().times_us, [9_000_000, latest]);
        assert_eq!(batch.details().sizes_bytes, [512, 0]);
    }

    #[test]
    fn a_record_cut_short_is_named_with_its_offset() {
        let bytes = [record(1, 1, 1, 1), record(2, 2, 2, 2)].concat();
        let mut batch = ReferenceBatch::new();
        let error = Reader::new(&bytes[..30], "t.bin", &Options::default())
            .next_batch(&mut batch)
            .unwrap_err();
        assert_eq!(batch.pages(), [PageNumber(1)]);
        assert_eq!(
            error.to_string(),
            "t.bin, byte 24: the last record has 6 bytes instead of 24"
        );
    }

    #[test]
    fn records_count_from_one_and_name_their_next() {
        let expected = [
            record(0, 7, 4096, 3),
            record(0, 8, 4096, -1),
            record(0, 7, 4096, -1),
        ];
        assert_eq!(written(&[7, 8, 7]), expected.concat());
    }

    proptest! {
        #[test]
        fn the_next_record_is_the_one_a_search_finds(
            pages in prop::collection::vec(0u64..20, 0..100),
        ) {
            let bytes = written(&pages);
            for (index, record) in bytes.chunks(RECORD_BYTES).enumerate() {
                let next = i64::from_le_bytes(record[16..].try_into().unwrap());
                let after = pages[index + 1..].iter().position(|&page| page == pages[index]);
                let expected = after.map_or(-1, |after| i64::try_from(index + 1 + after + 1).unwrap());
                prop_assert_eq!(next, expected);
            }
        }
    }
}
