//! Partial states as bytes.
//!
//! All numbers are little endian, 8 bytes but where stated:
//!
//! ```text
//!    0  8  magic "PLIMPART"
//!    8  4  version, 1
//!   12  4  estimator: 0 lru, 1 shards, 2 shards-max
//!   16  8  lru: 0; shards: the rate, an IEEE 754 double; shards-max: the maximum number of pages
//!   24  8  seed; lru: 0
//!   32  8  bytes of a page
//!   40  8  references of the trace before the slice; 2^64 - 1 if unknown
//!   48  8  references of the slice
//!   56  8  length of the first list
//!   64  8  of the second
//!   72  8  of the third
//!   80     the lists, one after another, 8 bytes for each entry
//!       8  XXH3-64 (seed 0) of all bytes before
//! ```
//!
//! The lists:
//!
//! | estimator | first | second | third |
//! |---|---|---|---|
//! | `lru` | reuses at distance 0, 1, .. within the slice | pages in the order of first use | pages in the order of last use |
//! | `shards` | hashes of the references to sampled pages, in order | pages of the references in bursts, in order | empty |
//! | `shards-max` | hashes of the references after those in the second list, in order; those that cannot be sampled are left out | pages of the first references, in order | empty |
//!
//! Lengths are checked against the number of bytes before any list is read, so memory is proportional to the bytes.

use std::io::{self, Write};
use std::num::NonZeroUsize;

use plimsoll_flow::{PageNumber, PageSize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{Contents, ParsedPartial, Partial, PartialError, SliceOf};

pub(super) const MAGIC: &[u8; 8] = b"PLIMPART";
pub(super) const VERSION: u32 = 1;
const HEADER_BYTES: usize = 80;
const CHECKSUM_BYTES: usize = 8;
const ENTRY_BYTES: usize = 8;

/// The start of a slice that does not know it.
const UNKNOWN: u64 = u64::MAX;

/// Entries that are written at once.
const PIECE: usize = 8192;

/// A writer that adds up what it has written.
struct Summed<W> {
    out: W,
    sum: Xxh3,
}

impl<W: Write> Summed<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.update(bytes);
        self.out.write_all(bytes)
    }

    fn put_list(&mut self, list: impl ExactSizeIterator<Item = u64>) -> io::Result<()> {
        let mut piece = Vec::with_capacity(list.len().min(PIECE) * ENTRY_BYTES);
        for number in list {
            piece.extend(number.to_le_bytes());
            if piece.len() == PIECE * ENTRY_BYTES {
                self.put(&piece)?;
                piece.clear();
            }
        }
        self.put(&piece)
    }
}

impl Partial {
    /// Writes the partial state. Writes are of 64 KiB.
    ///
    /// # Errors
    ///
    /// Those of `out`, which then has an incomplete state.
    pub fn write(self, out: impl Write) -> io::Result<()> {
        let (estimator, parameter, seed) = match self.of {
            SliceOf::Lru => (0_u32, 0, 0),
            SliceOf::Shards { rate, seed } => (1, rate.to_bits(), seed),
            SliceOf::ShardsMax { max_samples, seed } => (2, max_samples.get() as u64, seed),
        };
        let Contents {
            references,
            numbers,
            pages: [first, second],
        } = self.slice.into_contents();
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend(estimator.to_le_bytes());
        for field in [
            parameter,
            seed,
            self.page_size.bytes(),
            self.start.unwrap_or(UNKNOWN),
            references,
            numbers.len() as u64,
            first.len() as u64,
            second.len() as u64,
        ] {
            header.extend(field.to_le_bytes());
        }
        let mut out = Summed {
            out,
            sum: Xxh3::new(),
        };
        out.put(&header)?;
        out.put_list(numbers.into_iter())?;
        out.put_list(first.into_iter().map(|page| page.0))?;
        out.put_list(second.into_iter().map(|page| page.0))?;
        let sum = out.sum.digest();
        out.out.write_all(&sum.to_le_bytes())?;
        out.out.flush()
    }

    /// The partial state as bytes.
    ///
    /// # Panics
    ///
    /// Never: memory accepts all bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes).expect("a vector accepts all bytes");
        bytes
    }

    /// Reads the bytes of a partial state, to be [appended](Self::append).
    ///
    /// # Errors
    ///
    /// [`PartialError::NoPartial`], [`PartialError::Version`], [`PartialError::Length`], [`PartialError::Damaged`], and
    /// [`PartialError::Invalid`] for options that are none.
    pub fn parse(bytes: &[u8]) -> Result<ParsedPartial, PartialError> {
        let (header, rest) = bytes
            .split_first_chunk::<HEADER_BYTES>()
            .filter(|(header, _)| header.starts_with(MAGIC))
            .ok_or(PartialError::NoPartial)?;
        let word = |at: usize| number(&header[at..at + ENTRY_BYTES]);
        let (version, estimator) = (word(8) & 0xffff_ffff, word(8) >> 32);
        if version != u64::from(VERSION) {
            let version = u32::try_from(version).unwrap_or(u32::MAX);
            return Err(PartialError::Version { version });
        }
        let lengths = [word(56), word(64), word(72)];
        let entries: u128 = lengths.iter().copied().map(u128::from).sum();
        let expected = (HEADER_BYTES + CHECKSUM_BYTES) as u128 + entries * ENTRY_BYTES as u128;
        if expected != bytes.len() as u128 {
            let bytes = bytes.len();
            return Err(PartialError::Length { expected, bytes });
        }
        let (lists, sum) = rest.split_at(rest.len() - CHECKSUM_BYTES);
        if xxh3_64(&bytes[..bytes.len() - CHECKSUM_BYTES]) != number(sum) {
            return Err(PartialError::Damaged);
        }
        let (parameter, seed) = (word(16), word(24));
        let of = match estimator {
            0 if parameter == 0 && seed == 0 => SliceOf::Lru,
            0 => return Err(PartialError::Invalid("exact LRU takes no options")),
            1 => {
                let rate = f64::from_bits(parameter);
                SliceOf::Shards { rate, seed }
            }
            2 => {
                let max_samples = usize::try_from(parameter).ok().and_then(NonZeroUsize::new);
                let max_samples = max_samples.ok_or(PartialError::Invalid(
                    "its maximum number of pages is out of range",
                ))?;
                SliceOf::ShardsMax { max_samples, seed }
            }
            _ => return Err(PartialError::Invalid("its estimator is unknown")),
        };
        let page_size = PageSize::new(word(32));
        let page_size =
            page_size.map_err(|_| PartialError::Invalid("its page size is no power of two"))?;
        let mut lists = lists.chunks_exact(ENTRY_BYTES).map(number);
        let [numbers, first, second] = lengths.map(|length| {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            lists.by_ref().take(length).collect::<Vec<u64>>()
        });
        let pages = |list: Vec<u64>| list.into_iter().map(PageNumber).collect();
        Ok(ParsedPartial {
            of,
            page_size,
            start: Some(word(40)).filter(|&start| start != UNKNOWN),
            contents: Contents {
                references: word(48),
                numbers,
                pages: [pages(first), pages(second)],
            },
        })
    }
}

/// A number of 8 bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.first_chunk().copied().map_or(0, u64::from_le_bytes)
}
