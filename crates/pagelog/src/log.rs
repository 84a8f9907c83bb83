//! Page logs as files.
//!
//! A header that describes the machine, blocks of at most [`BATCH_RECORDS`] records, and an end mark with their total number,
//! by which a truncated log is detected. Blocks have checksums and are independent. Within a block, a page frame is stored as
//! its distance from that of the previous record of the same kind; then the first bytes of all words are stored together,
//! then the second ones, and so on; zstd compresses the result. The format byte by byte: `docs/formats.md`.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;
use zstd::bulk::{Compressor, Decompressor};

use crate::check::Checker;
use crate::description::{DESCRIPTION_BYTES, PAGE_BYTES, VERSION};
use crate::error::{RecordFault, name_of};
use crate::record::Record;
use crate::{BATCH_RECORDS, Description, PageLogError, RecordSource};

/// First bytes of a log: not text, and damaged by any conversion of line ends.
const MAGIC: [u8; 8] = *b"\x89PLPG\r\n\x1a";
const HEAD_BYTES: usize = 104;
const BLOCK_HEAD_BYTES: usize = 16;
const END_BYTES: usize = 24;
/// Bytes in a word.
const PLANES: usize = 8;
/// Size of the largest block before compression.
const WORDS_BYTES_MAX: usize = PLANES * BATCH_RECORDS;
/// Compression level of zstd; higher ones save 3 % and take up to twice the time.
const ZSTD_LEVEL: i32 = 1;

const _: () = assert!(Description::AT + DESCRIPTION_BYTES + 8 == HEAD_BYTES);

/// Whether a file that begins with these bytes is a page log.
pub fn is_page_log(first_bytes: &[u8]) -> bool {
    first_bytes.starts_with(&MAGIC)
}

/// Losses of the writer's ring; stored at the end of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Times that the machine waited for its reader.
    pub waits: u64,
    /// Records missing from the log because the reader was gone.
    pub lost: u64,
}

/// Writer of a log.
pub struct LogWriter<W: Write> {
    out: W,
    zstd: Compressor<'static>,
    /// Words that are not yet part of a block.
    words: Vec<u64>,
    records: u64,
    bytes: u64,
}

impl LogWriter<BufWriter<File>> {
    /// Creates a log file, replacing an existing file.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Create`], and those of [`LogWriter::new`].
    pub fn create(path: &Path, description: &Description) -> Result<Self, PageLogError> {
        let file = File::create(path).map_err(|source| PageLogError::Create {
            path: path.to_owned(),
            source,
        })?;
        Self::new(BufWriter::new(file), description)
    }
}

impl<W: Write> LogWriter<W> {
    /// Starts a log.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Description`] for an invalid machine, [`PageLogError::Write`].
    pub fn new(out: W, description: &Description) -> Result<Self, PageLogError> {
        description.validate("the log")?;
        let zstd = Compressor::new(ZSTD_LEVEL).map_err(write_error)?;
        let mut writer = Self {
            out,
            zstd,
            words: Vec::with_capacity(BATCH_RECORDS),
            records: 0,
            bytes: 0,
        };
        let mut head = [0; HEAD_BYTES];
        head[..8].copy_from_slice(&MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_le_bytes());
        head[12..16].copy_from_slice(&PAGE_BYTES.to_le_bytes());
        head[Description::AT..][..DESCRIPTION_BYTES].copy_from_slice(&description.to_bytes());
        let sum = xxh3_64(&head[..HEAD_BYTES - 8]);
        head[HEAD_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
        writer.put(&head)?;
        Ok(writer)
    }

    /// Appends records. [`End`](Record::End) is not allowed.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Write`]; the log is then truncated, and nothing more may be written.
    pub fn write(&mut self, records: &[Record]) -> Result<(), PageLogError> {
        for &record in records {
            if record == Record::End {
                continue;
            }
            self.words.push(record.encode());
            if self.words.len() == BATCH_RECORDS {
                self.write_block()?;
            }
        }
        Ok(())
    }

    /// Ends the log; without this call it is truncated.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Write`].
    pub fn finish(mut self, totals: Totals) -> Result<W, PageLogError> {
        self.write_block()?;
        let numbers = [self.records, totals.waits, totals.lost];
        let mut end = [0; END_BYTES];
        for (bytes, number) in end.chunks_exact_mut(8).zip(numbers) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        self.put_block(0, &end)?;
        self.out.flush().map_err(write_error)?;
        Ok(self.out)
    }

    /// Writes what there is and leaves the log truncated: its records end early.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn cut(mut self) -> Result<(), PageLogError> {
        self.write_block()?;
        self.out.flush().map_err(write_error)
    }

    /// Records written so far.
    pub fn records(&self) -> u64 {
        self.records + self.words.len() as u64
    }

    /// Bytes of the blocks written so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn write_block(&mut self) -> Result<(), PageLogError> {
        if self.words.is_empty() {
            return Ok(());
        }
        let planes = planes_of(&self.words);
        let packed = self.zstd.compress(&planes).map_err(write_error)?;
        self.put_block(self.words.len(), &packed)?;
        self.records += self.words.len() as u64;
        self.words.clear();
        Ok(())
    }

    fn put_block(&mut self, records: usize, stored: &[u8]) -> Result<(), PageLogError> {
        let number = |length: usize| u32::try_from(length).expect("a block is small");
        let mut block = Vec::with_capacity(BLOCK_HEAD_BYTES + stored.len());
        block.extend([0; 8]);
        block.extend(number(records).to_le_bytes());
        block.extend(number(stored.len()).to_le_bytes());
        block.extend(stored);
        let sum = xxh3_64(&block[8..]);
        block[..8].copy_from_slice(&sum.to_le_bytes());
        self.put(&block)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), PageLogError> {
        self.out.write_all(bytes).map_err(write_error)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

fn write_error(source: io::Error) -> PageLogError {
    PageLogError::Write { source }
}

/// The lower 32 bits of a word.
fn low_half(word: u64) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "that is what is asked for")]
    let low = word as u32;
    low
}

/// Low halves of the previous words (which contain page frames), by kind.
#[derive(Default)]
struct PreviousWords([u32; 8]);

impl PreviousWords {
    fn of(&mut self, word: u64) -> &mut u32 {
        &mut self.0[(word >> 61) as usize]
    }

    /// Replaces the low half of a word by its difference from that of the previous word of the same kind.
    fn shrink(&mut self, word: u64) -> u64 {
        let before = self.of(word);
        let low = low_half(word);
        let difference = low.wrapping_sub(*before);
        *before = low;
        let zigzag = difference << 1 ^ (difference >> 31).wrapping_neg();
        word >> 32 << 32 | u64::from(zigzag)
    }

    /// Reverses [`Self::shrink`].
    fn restore(&mut self, step: u64) -> u64 {
        let before = self.of(step);
        let zigzag = low_half(step);
        let difference = zigzag >> 1 ^ (zigzag & 1).wrapping_neg();
        *before = before.wrapping_add(difference);
        step >> 32 << 32 | u64::from(*before)
    }
}

/// The first bytes of all words, then the second ones, and so on.
fn planes_of(words: &[u64]) -> Vec<u8> {
    let mut planes = vec![0; PLANES * words.len()];
    let mut before = PreviousWords::default();
    for (index, &word) in words.iter().enumerate() {
        let bytes = before.shrink(word).to_le_bytes();
        for (plane, byte) in bytes.into_iter().enumerate() {
            planes[plane * words.len() + index] = byte;
        }
    }
    planes
}

/// Reader of a log.
pub struct LogReader<'a> {
    input: Box<dyn Read + Send + 'a>,
    name: String,
    description: Description,
    checker: Checker,
    zstd: Decompressor<'static>,
    /// A block, as stored and decompressed.
    stored: Vec<u8>,
    planes: Box<[u8]>,
    offset_bytes: u64,
    totals: Option<Totals>,
    failed: bool,
}

impl LogReader<'static> {
    /// Opens a log file.
    ///
    /// # Errors
    ///
    /// [`PageLogError::Open`], and those of [`LogReader::new`].
    pub fn open(path: &Path) -> Result<Self, PageLogError> {
        let file = File::open(path).map_err(|source| PageLogError::Open {
            path: path.to_owned(),
            source,
        })?;
        Self::new(BufReader::new(file), &name_of(path))
    }
}

impl<'a> LogReader<'a> {
    /// Reads the header of a log; `name` identifies it in errors.
    ///
    /// # Errors
    ///
    /// [`PageLogError::NotAPageLog`], [`PageLogError::Damaged`], [`PageLogError::Description`] or
    /// [`PageLogError::Read`].
    pub fn new(input: impl Read + Send + 'a, name: &str) -> Result<Self, PageLogError> {
        let mut input: Box<dyn Read + Send + 'a> = Box::new(input);
        let mut head = Vec::with_capacity(HEAD_BYTES);
        let at_start = |source| PageLogError::Read {
            name: name.to_owned(),
            offset_bytes: 0,
            source,
        };
        let limit = HEAD_BYTES as u64;
        let read = input.by_ref().take(limit).read_to_end(&mut head);
        read.map_err(at_start)?;
        let foreign = |reason: &str| PageLogError::NotAPageLog {
            name: name.to_owned(),
            reason: reason.to_owned(),
        };
        if !is_page_log(&head) {
            return Err(foreign("it does not begin as one"));
        }
        let Some(head) = head.first_chunk::<HEAD_BYTES>() else {
            return Err(foreign("it ends within its head"));
        };
        let (described, sum) = head.split_at(HEAD_BYTES - 8);
        if sum != xxh3_64(described).to_le_bytes() {
            return Err(PageLogError::Damaged {
                name: name.to_owned(),
                offset_bytes: 0,
                expected: "the checksum of the head".to_owned(),
            });
        }
        let expected = [
            VERSION.to_le_bytes(),
            PAGE_BYTES.to_le_bytes(),
            [0; 4],
            [0; 4],
        ];
        if described[8..Description::AT] != *expected.as_flattened() {
            return Err(foreign("its head is of another version"));
        }
        let mut bytes = [0; DESCRIPTION_BYTES];
        bytes.copy_from_slice(&described[Description::AT..]);
        Ok(Self {
            input,
            name: name.to_owned(),
            description: Description::of_bytes(&bytes, name)?,
            checker: Checker::new(name),
            zstd: Decompressor::new().map_err(at_start)?,
            stored: Vec::new(),
            planes: vec![0; WORDS_BYTES_MAX].into_boxed_slice(),
            offset_bytes: limit,
            totals: None,
            failed: false,
        })
    }

    /// Losses during recording; available once the log has been read to its end.
    pub fn totals(&self) -> Option<Totals> {
        self.totals
    }

    /// Reads a block; returns the number of its records, or 0 for the end mark.
    fn block(&mut self, batch: &mut Vec<Record>) -> Result<usize, PageLogError> {
        let mut head = [0; BLOCK_HEAD_BYTES];
        self.fill(&mut head)?;
        let number = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&head[at..at + 4]);
            u32::from_le_bytes(bytes) as usize
        };
        let (records, stored_bytes) = (number(8), number(12));
        let stored_max = match records {
            0 => END_BYTES,
            _ => zstd::zstd_safe::compress_bound(PLANES * records.min(BATCH_RECORDS)),
        };
        if records > BATCH_RECORDS || stored_bytes > stored_max {
            let expected = format!("a block of at most {BATCH_RECORDS} records");
            return Err(self.damaged(expected));
        }
        let mut stored = std::mem::take(&mut self.stored);
        stored.resize(stored_bytes + 8, 0);
        stored[..8].copy_from_slice(&head[8..]);
        let filled = self.fill(&mut stored[8..]);
        self.stored = stored;
        filled?;
        if head[..8] != xxh3_64(&self.stored).to_le_bytes() {
            return Err(self.damaged("the checksum of the block"));
        }
        if records == 0 {
            self.end()?;
        } else {
            self.unpack(records, batch)?;
        }
        self.offset_bytes += (BLOCK_HEAD_BYTES + stored_bytes) as u64;
        Ok(records)
    }

    fn unpack(&mut self, records: usize, batch: &mut Vec<Record>) -> Result<(), PageLogError> {
        let planes = &mut self.planes[..PLANES * records];
        let unpacked = self.zstd.decompress_to_buffer(&self.stored[8..], planes);
        if !matches!(unpacked, Ok(bytes) if bytes == planes.len()) {
            return Err(self.damaged("words that decompress to their length"));
        }
        let mut before = PreviousWords::default();
        for index in 0..records {
            let bytes = std::array::from_fn(|plane| self.planes[plane * records + index]);
            let word = before.restore(u64::from_le_bytes(bytes));
            let record = self.checker.record(word, &self.description)?;
            if record == Record::End {
                return Err(self.checker.fault(RecordFault::End));
            }
            batch.push(record);
        }
        Ok(())
    }

    /// Checks the end mark, and that nothing follows it.
    fn end(&mut self) -> Result<(), PageLogError> {
        let numbers = &self.stored[8..];
        let number = |index: usize| {
            let bytes = numbers.get(8 * index..8 * index + 8)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let numbers = (number(0), number(1), number(2));
        let (Some(records), Some(waits), Some(lost)) = numbers else {
            return Err(self.damaged("an end mark of 24 bytes"));
        };
        if records != self.checker.records() {
            let expected = format!("an end mark after {} records", self.checker.records());
            return Err(self.damaged(expected));
        }
        let mut behind = [0];
        match self.input.read(&mut behind) {
            Ok(0) => {}
            Ok(_) => {
                let mut error = self.damaged("nothing after the end mark");
                if let PageLogError::Damaged { offset_bytes, .. } = &mut error {
                    *offset_bytes += (BLOCK_HEAD_BYTES + END_BYTES) as u64;
                }
                return Err(error);
            }
            Err(source) => return Err(self.read_error(source)),
        }
        self.totals = Some(Totals { waits, lost });
        Ok(())
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), PageLogError> {
        match self.input.read_exact(buffer) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(self.checker.cut()),
            Err(source) => Err(self.read_error(source)),
        }
    }

    fn read_error(&self, source: io::Error) -> PageLogError {
        PageLogError::Read {
            name: self.name.clone(),
            offset_bytes: self.offset_bytes,
            source,
        }
    }

    fn damaged(&self, expected: impl Into<String>) -> PageLogError {
        PageLogError::Damaged {
            name: self.name.clone(),
            offset_bytes: self.offset_bytes,
            expected: expected.into(),
        }
    }
}

impl RecordSource for LogReader<'_> {
    fn description(&self) -> &Description {
        &self.description
    }

    fn next_batch(&mut self, batch: &mut Vec<Record>) -> Result<bool, PageLogError> {
        batch.clear();
        if self.failed || self.totals.is_some() {
            return Ok(false);
        }
        let records = self.block(batch);
        self.failed = records.is_err();
        Ok(records? > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::tests::machine;
    use crate::record::Walk;
    use plimsoll_flow::PageNumber;
    use proptest::prelude::*;

    fn written(records: &[Record]) -> Vec<u8> {
        let mut writer = LogWriter::new(Vec::new(), &machine()).unwrap();
        for records in records.chunks(1000) {
            writer.write(records).unwrap();
        }
        assert_eq!(writer.records(), records.len() as u64);
        writer.finish(Totals { waits: 3, lost: 2 }).unwrap()
    }

    fn read(bytes: &[u8]) -> (Vec<Record>, Result<Totals, PageLogError>) {
        let mut all = Vec::new();
        let mut reader = match LogReader::new(bytes, "t") {
            Ok(reader) => reader,
            Err(error) => return (all, Err(error)),
        };
        assert_eq!(*reader.description(), machine());
        let mut batch = Vec::new();
        loop {
            let more = reader.next_batch(&mut batch);
            all.append(&mut batch);
            match more {
                Ok(true) => {}
                Ok(false) => return (all, Ok(reader.totals().unwrap())),
                Err(error) => {
                    assert!(matches!(reader.next_batch(&mut batch), Ok(false)));
                    return (all, Err(error));
                }
            }
        }
    }

    /// Decodes a valid log by the table of the format, one number at a time.
    fn naive(bytes: &[u8]) -> Vec<u64> {
        let number = |bytes: &[u8]| {
            let digits = bytes.iter().rev();
            digits.fold(0u64, |number, &byte| number << 8 | u64::from(byte))
        };
        let mut words = Vec::new();
        let mut rest = &bytes[104..];
        loop {
            let count = usize::try_from(number(&rest[8..12])).unwrap();
            let stored = usize::try_from(number(&rest[12..16])).unwrap();
            if count == 0 {
                assert_eq!(number(&rest[16..24]), words.len() as u64);
                assert_eq!(rest.len(), 40);
                return words;
            }
            let planes = zstd::decode_all(&rest[16..16 + stored]).unwrap();
            let mut lows = [0i64; 8];
            for index in 0..count {
                let bytes: Vec<u8> = (0..8).map(|plane| planes[plane * count + index]).collect();
                let step = i64::try_from(number(&bytes[..4])).unwrap();
                let low = &mut lows[usize::from(bytes[7] / 32)];
                *low += if step % 2 == 0 {
                    step / 2
                } else {
                    -(step + 1) / 2
                };
                *low = low.rem_euclid(1 << 32);
                words.push(number(&bytes[4..]) << 32 | u64::try_from(*low).unwrap());
            }
            rest = &rest[16 + stored..];
        }
    }

    fn records() -> impl Strategy<Value = Vec<Record>> {
        let frame = prop_oneof![
            (0u64..(3 << 18)).prop_map(PageNumber),
            ((1u64 << 20)..(7 << 18)).prop_map(PageNumber),
        ];
        let record = prop_oneof![
            (0u8..2, frame.clone(), 0u32..1 << 20, any::<[bool; 4]>()).prop_map(
                |(vcpu, frame, step_instructions, [write, fetch, sets_accessed, sets_dirty])| {
                    Record::Walk(Walk {
                        vcpu,
                        frame,
                        step_instructions,
                        write,
                        fetch,
                        sets_accessed,
                        sets_dirty,
                    })
                }
            ),
            (0u8..2, frame.clone(), any::<bool>()).prop_map(|(vcpu, frame, write)| Record::Enter {
                vcpu,
                frame,
                write
            }),
            (0u8..2, frame).prop_map(|(vcpu, frame)| Record::Leave { vcpu, frame }),
            (0u8..2, 0..=crate::record::COUNT_MAX)
                .prop_map(|(vcpu, count)| Record::Accesses { vcpu, count }),
            (0u8..2, any::<u8>()).prop_map(|(vcpu, id)| Record::Mark { vcpu, id }),
        ];
        prop::collection::vec(record, 0..200)
    }

    fn loops(records: u64) -> Vec<Record> {
        let walk = |number: u64| Walk {
            vcpu: 0,
            frame: PageNumber(1000 + number % 600),
            step_instructions: 12,
            write: number.is_multiple_of(3),
            fetch: false,
            sets_accessed: false,
            sets_dirty: false,
        };
        (0..records)
            .map(|number| Record::Walk(walk(number)))
            .collect()
    }

    #[test]
    fn an_empty_log_is_a_head_and_an_end_mark() {
        let bytes = written(&[]);
        assert_eq!(bytes.len(), HEAD_BYTES + BLOCK_HEAD_BYTES + END_BYTES);
        let (records, totals) = read(&bytes);
        assert!(records.is_empty());
        assert_eq!(totals.unwrap(), Totals { waits: 3, lost: 2 });
        assert!(is_page_log(&bytes) && !is_page_log(&bytes[1..]) && !is_page_log(b""));
    }

    #[test]
    fn a_loop_takes_next_to_nothing() {
        let bytes = written(&loops(100_000));
        assert!(bytes.len() < 100_000 / 20, "{}", bytes.len());
    }

    #[test]
    fn a_log_cut_short_gives_its_whole_blocks_and_an_error() {
        let records = loops(40_000);
        let bytes = written(&records);
        for length in HEAD_BYTES..bytes.len() {
            let (read, end) = read(&bytes[..length]);
            let whole = read.len() as u64;
            assert!(
                matches!(end, Err(PageLogError::Cut { records, .. }) if records == whole),
                "{length}"
            );
            assert!(
                records.starts_with(&read) && read.len() % BATCH_RECORDS == 0
                    || read.len() == 40_000
            );
        }
    }

    #[test]
    fn foreign_bytes_and_what_follows_the_end_are_refused() {
        let fault = |bytes: &[u8]| read(bytes).1.unwrap_err().to_string();
        let whole = written(&loops(3));
        assert!(fault(b"").contains("does not begin as one"));
        assert!(fault(b"PLIMPLG1 and more").contains("does not begin as one"));
        assert!(fault(&whole[..50]).contains("ends within its head"));
        let longer = [&whole[..], b"x"].concat();
        let place = format!("byte {}: expected nothing after the end mark", whole.len());
        assert!(fault(&longer).contains(&place), "{}", fault(&longer));
        let mut later = whole.clone();
        later[8] = 2;
        let sum = xxh3_64(&later[..96]);
        later[96..104].copy_from_slice(&sum.to_le_bytes());
        assert!(fault(&later).contains("another version"));
    }

    #[test]
    fn a_block_that_bears_out_its_checksum_may_still_be_wrong() {
        let with = |records: usize, stored: &[u8]| {
            let mut writer = LogWriter::new(Vec::new(), &machine()).unwrap();
            writer.put_block(records, stored).unwrap();
            let (read, end) = read(&writer.out);
            (read.len(), end.unwrap_err().to_string())
        };
        let words = |words: &[u64]| zstd::encode_all(&planes_of(words)[..], 1).unwrap();
        let mark = Record::Mark { vcpu: 0, id: 9 }.encode();
        let cases: [(usize, Vec<u8>, usize, &str); 7] = [
            (1, b"no zstd".to_vec(), 0, "decompress to their length"),
            (2, words(&[mark]), 0, "decompress to their length"),
            (1, words(&[mark, mark]), 0, "decompress to their length"),
            (16_385, vec![], 0, "at most 16384 records"),
            (1, vec![0; 1000], 0, "at most 16384 records"),
            (0, vec![0; 16], 0, "an end mark of 24 bytes"),
            (
                2,
                words(&[mark, 7 << 61]),
                1,
                "record 3: the end of the log",
            ),
        ];
        for (records, stored, intact, fault) in cases {
            let (read, error) = with(records, &stored);
            assert_eq!(read, intact, "{error}");
            assert!(error.contains(fault), "{error}");
        }
        let mut five = [0; 24];
        five[0] = 5;
        assert!(with(0, &five).1.contains("an end mark after 0 records"));
        assert!(with(2, &words(&[mark, 1 << 60])).1.contains("vCPU 16"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_and_stands_as_documented(records in records()) {
            let bytes = written(&records);
            let (read, end) = read(&bytes);
            prop_assert!(end.is_ok());
            let words: Vec<_> = records.iter().map(|record| record.encode()).collect();
            prop_assert_eq!(naive(&bytes), words);
            prop_assert_eq!(read, records);
        }

        #[test]
        fn a_changed_byte_is_noticed(
            records in records(),
            place in any::<prop::sample::Index>(),
            change in 1u8..,
        ) {
            let mut bytes = written(&records);
            let place = place.index(bytes.len());
            bytes[place] ^= change;
            let (read, end) = read(&bytes);
            prop_assert!(end.is_err());
            prop_assert!(records.starts_with(&read));
        }

        #[test]
        fn steps_lead_back(words: Vec<u64>) {
            let (mut there, mut back) = (PreviousWords::default(), PreviousWords::default());
            for word in words {
                prop_assert_eq!(back.restore(there.shrink(word)), word);
            }
        }
    }
}
