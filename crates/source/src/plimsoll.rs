//! `plimsoll`: our own compact binary format, designed to be read faster than references are processed.
//!
//! A trace is a header of 16 bytes, blocks of at most 16384 references (a batch), and an
//! end mark with their total number, by which a truncated trace is detected. Each block
//! is independent and has a checksum:
//!
//! | bytes | type | field |
//! |---|---|---|
//! | 0..8 | `u64` | XXH3-64 of all that follows in the block |
//! | 8..10 | `u16` | references, 1 to 16384; 0 is the end mark |
//! | 10 | `u8` | 0: the pages are numbers above the base; 1: steps from the page before |
//! | 11 | `u8` | kinds: 0 all read, 1 all write, 2 all unknown, 3 one of these each |
//! | 12..16 | | zero |
//! | 16..24 | `u64` | the base: the lowest page, or the page before the first; in the end mark, the references of the trace |
//! | 24..42 | 9 x `u16` | bytes stored of each plane |
//! | 42..48 | | zero |
//! | 48.. | | the planes |
//!
//! Plane `p` of the first eight is byte `p` of every number, lowest byte first; the ninth
//! contains the kinds, four per byte. A plane of which 0 bytes are stored is all zero; one of
//! which all bytes are stored is uncompressed; otherwise it is one zstd frame. High bytes of page
//! numbers repeat, so they compress well, while the low ones of most traces shrink by
//! less than two fifths, which is not worth the time, and are stored uncompressed.
//!
//! A step is the difference from the previous page, modulo 2^64, as a signed number `s`
//! stored as `2 s` or, if negative, `-2 s - 1`. The writer uses the smaller of the two forms.
//!
//! Cost of reading: the kernel's copy, the checksum, and zstd for the planes that need it.
//! Concatenated traces are read as one.

use std::io::{self, Read, Write};

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source};
use xxhash_rust::xxh3::xxh3_64;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::CParameter;

use crate::SourceError;
use crate::bytes::Bytes;
use crate::row::{FormatRow, Opening};
use crate::spans::Reading;
use crate::writing::ContentWriter;

/// First bytes of a trace: not text, and damaged by any conversion of line ends.
pub(crate) const MAGIC: [u8; 8] = *b"\x89PLIM\r\n\x1a";

const VERSION: u8 = 1;
const HEADER_BYTES: usize = 16;
const BLOCK_HEADER_BYTES: usize = 48;

/// Number of references in a full block, which fills a batch.
const BLOCK_REFERENCES: usize = ReferenceBatch::CAPACITY;

const PAGE_PLANES: usize = 8;
const PLANES: usize = PAGE_PLANES + 1;
const KINDS_PER_BYTE: usize = 4;

/// Size of the largest block in bytes.
const BLOCK_BYTES_MAX: usize = BLOCK_HEADER_BYTES + PLANES * BLOCK_REFERENCES;

/// Number of bytes read at a time.
const BUFFER_BYTES: usize = 512 << 10;

/// Minimum length of a repetition that zstd encodes: its maximum setting.
const MATCH_BYTES_MIN: u32 = 7;

/// Kinds by their number; the next number means that they are mixed.
const KINDS: [AccessKind; 3] = [AccessKind::Read, AccessKind::Write, AccessKind::Unknown];
const MIXED: u8 = 3;

const _: () = assert!(BLOCK_BYTES_MAX <= BUFFER_BYTES && BLOCK_REFERENCES <= u16::MAX as usize);

/// The header of a block, without its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    references: u16,
    steps: bool,
    kinds: u8,
    base: u64,
    stored: [u16; PLANES],
}

impl Head {
    /// Parses the header of a block; returns the reason if it is invalid.
    fn parse(bytes: &[u8; BLOCK_HEADER_BYTES]) -> Result<Self, &'static str> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut base = [0; 8];
        base.copy_from_slice(&bytes[16..24]);
        let head = Self {
            references: u16_at(8),
            steps: bytes[10] == 1,
            kinds: bytes[11],
            base: u64::from_le_bytes(base),
            stored: std::array::from_fn(|plane| u16_at(24 + 2 * plane)),
        };
        if usize::from(head.references) > BLOCK_REFERENCES {
            return Err("a block of at most 16384 references");
        }
        let zeros = bytes[12..16].iter().chain(&bytes[42..]);
        if bytes[10] > 1 || head.kinds > MIXED || zeros.into_iter().any(|&byte| byte != 0) {
            return Err("a block of version 1");
        }
        for plane in 0..PLANES {
            if usize::from(head.stored[plane]) > head.plane_bytes(plane) {
                return Err("planes no longer than their block");
            }
        }
        Ok(head)
    }

    fn to_bytes(self) -> [u8; BLOCK_HEADER_BYTES] {
        let mut bytes = [0; BLOCK_HEADER_BYTES];
        bytes[8..10].copy_from_slice(&self.references.to_le_bytes());
        bytes[10] = self.steps.into();
        bytes[11] = self.kinds;
        bytes[16..24].copy_from_slice(&self.base.to_le_bytes());
        for (plane, stored) in self.stored.into_iter().enumerate() {
            bytes[24 + 2 * plane..][..2].copy_from_slice(&stored.to_le_bytes());
        }
        bytes
    }

    /// Size of a plane in bytes before compression.
    fn plane_bytes(&self, plane: usize) -> usize {
        let references = usize::from(self.references);
        if plane < PAGE_PLANES {
            references
        } else if self.kinds == MIXED {
            references.div_ceil(KINDS_PER_BYTE)
        } else {
            0
        }
    }

    fn payload_bytes(&self) -> usize {
        self.stored.into_iter().map(usize::from).sum()
    }
}

/// Reader of `plimsoll` traces.
pub(crate) struct Reader<R> {
    bytes: Bytes<R>,
    decoder: Decoder,
    /// Whether the next bytes are a trace's header instead of a block.
    at_header: bool,
    /// References since the last header.
    references: u64,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(input: R, name: &str) -> Result<Self, SourceError> {
        let decoder = Decoder::new().map_err(|source| SourceError::Read {
            name: name.to_owned(),
            offset_bytes: 0,
            source,
        })?;
        Ok(Self {
            bytes: Bytes::new(input, name, BUFFER_BYTES),
            decoder,
            at_header: true,
            references: 0,
        })
    }

    /// Skips a header; `false` at the end of the file.
    fn next_header(&mut self) -> Result<bool, SourceError> {
        let header = self.bytes.at_least(HEADER_BYTES)?;
        if header.is_empty() {
            return Ok(false);
        }
        let Some(header) = header.first_chunk::<HEADER_BYTES>() else {
            return Err(self.bytes.truncated(HEADER_BYTES));
        };
        let (magic, rest) = header.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(self
                .bytes
                .unexpected("the beginning of a plimsoll trace", MAGIC.len()));
        }
        if rest[0] != VERSION || rest[1..].iter().any(|&byte| byte != 0) {
            return Err(self
                .bytes
                .unexpected("a plimsoll trace of version 1", HEADER_BYTES));
        }
        self.bytes.take(HEADER_BYTES);
        self.references = 0;
        Ok(true)
    }
}

impl<R: Read> Source for Reader<R> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while batch.is_empty() {
            if std::mem::take(&mut self.at_header) && !self.next_header()? {
                self.at_header = true;
                return Ok(false);
            }
            let block = self.bytes.at_least(BLOCK_HEADER_BYTES)?;
            let Some(head) = block.first_chunk() else {
                return Err(self.bytes.truncated(BLOCK_HEADER_BYTES));
            };
            let head = match Head::parse(head) {
                Ok(head) => head,
                Err(expected) => return Err(self.bytes.unexpected(expected, BLOCK_HEADER_BYTES)),
            };
            let block_bytes = BLOCK_HEADER_BYTES + head.payload_bytes();
            let block = self.bytes.at_least(block_bytes)?;
            let Some(block) = block.get(..block_bytes) else {
                return Err(self.bytes.truncated(block_bytes));
            };
            if block.first_chunk() != Some(&xxh3_64(&block[8..]).to_le_bytes()) {
                return Err(self.bytes.unexpected("the checksum of the block", 8));
            }
            if head.references == 0 {
                if head.base != self.references {
                    let expected = format!("an end mark after {} references", self.references);
                    return Err(self.bytes.unexpected(expected, block_bytes));
                }
                self.at_header = true;
            } else if !self
                .decoder
                .decode(&head, &block[BLOCK_HEADER_BYTES..], batch)
            {
                let expected = "planes that decompress to their length";
                return Err(self.bytes.unexpected(expected, block_bytes));
            }
            self.bytes.take(block_bytes);
            self.references += u64::from(head.references);
        }
        Ok(true)
    }
}

impl<R: Read> Reading for Reader<R> {}

/// Decodes blocks to references.
struct Decoder {
    zstd: Decompressor<'static>,
    /// Decompressed planes; the last one is all zero.
    planes: Box<[[u8; BLOCK_REFERENCES]]>,
    pages: Box<[u64]>,
}

impl Decoder {
    fn new() -> io::Result<Self> {
        Ok(Self {
            zstd: Decompressor::new()?,
            planes: vec![[0; BLOCK_REFERENCES]; PLANES + 1].into_boxed_slice(),
            pages: vec![0; BLOCK_REFERENCES].into_boxed_slice(),
        })
    }

    /// Appends a block's references; `false`, and none, if its planes are damaged.
    fn decode(&mut self, head: &Head, payload: &[u8], batch: &mut ReferenceBatch) -> bool {
        let mut rest = payload;
        let mut stored = [&[][..]; PLANES];
        for (plane, stored) in stored.iter_mut().enumerate() {
            (*stored, rest) = rest.split_at(usize::from(head.stored[plane]));
            let whole = head.plane_bytes(plane);
            if (1..whole).contains(&stored.len()) {
                let buffer = &mut self.planes[plane][..whole];
                if !matches!(self.zstd.decompress_to_buffer(stored, buffer), Ok(length) if length == whole)
                {
                    return false;
                }
            }
        }
        let planes: [&[u8]; PLANES] = std::array::from_fn(|plane| {
            let whole = head.plane_bytes(plane);
            match stored[plane].len() {
                0 => &self.planes[PLANES][..whole],
                length if length == whole => stored[plane],
                _ => &self.planes[plane][..whole],
            }
        });
        let [planes @ .., kinds] = planes;
        let pages = &mut self.pages[..usize::from(head.references)];
        join(head, planes, pages);
        let pages = pages.iter().map(|&page| PageNumber(page));
        match KINDS.get(usize::from(head.kinds)) {
            Some(&kind) => batch.extend(pages, std::iter::repeat(kind)),
            None => {
                let kinds = kinds.iter().map(|&byte| FOUR_KINDS[usize::from(byte)]);
                batch.extend(pages, kinds.flatten());
            }
        }
        true
    }
}

/// The kinds in a byte, lowest two bits first; 3 is decoded as an unknown kind.
const FOUR_KINDS: [[AccessKind; KINDS_PER_BYTE]; 256] = {
    let mut four_kinds = [[AccessKind::Unknown; KINDS_PER_BYTE]; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut place = 0;
        while place < KINDS_PER_BYTE {
            let number = byte >> (2 * place) & 3;
            if number < KINDS.len() {
                four_kinds[byte][place] = KINDS[number];
            }
            place += 1;
        }
        byte += 1;
    }
    four_kinds
};

/// Combines planes to the block's pages. Planes above the highest in use are left out.
fn join(head: &Head, planes: [&[u8]; PAGE_PLANES], pages: &mut [u64]) {
    let stored = &head.stored[..PAGE_PLANES];
    let used = stored.iter().rposition(|&stored| stored > 0);
    let [a, b, c, d, e, f, g, h] = planes;
    // Steps are added up afterwards.
    let base = if head.steps { 0 } else { head.base };
    match used.map_or(0, |plane| plane + 1) {
        0 => pages.fill(base),
        1 => {
            for (page, &a) in pages.iter_mut().zip(a) {
                *page = base.wrapping_add(a.into());
            }
        }
        2 => {
            for (page, (&a, &b)) in pages.iter_mut().zip(a.iter().zip(b)) {
                *page = base.wrapping_add(u16::from_le_bytes([a, b]).into());
            }
        }
        3 => {
            for (page, ((&a, &b), &c)) in pages.iter_mut().zip(a.iter().zip(b).zip(c)) {
                *page = base.wrapping_add(u32::from_le_bytes([a, b, c, 0]).into());
            }
        }
        planes => {
            let low = a.iter().zip(b).zip(c.iter().zip(d));
            for (page, ((&a, &b), (&c, &d))) in pages.iter_mut().zip(low) {
                *page = base.wrapping_add(u32::from_le_bytes([a, b, c, d]).into());
            }
            if planes > 4 {
                let high = e.iter().zip(f).zip(g.iter().zip(h));
                for (page, ((&e, &f), (&g, &h))) in pages.iter_mut().zip(high) {
                    let high = u64::from(u32::from_le_bytes([e, f, g, h])) << 32;
                    *page = page.wrapping_add(high);
                }
            }
        }
    }
    if head.steps {
        let mut page = head.base;
        for number in pages {
            page = page.wrapping_add((*number >> 1) ^ (*number & 1).wrapping_neg());
            *number = page;
        }
    }
}

/// Writer of `plimsoll` traces.
pub(crate) struct Writer {
    /// The references that do not fill a block yet.
    pages: Vec<PageNumber>,
    kinds: Vec<AccessKind>,
    references: u64,
    zstd: Compressor<'static>,
}

impl Writer {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            pages: Vec::with_capacity(BLOCK_REFERENCES),
            kinds: Vec::with_capacity(BLOCK_REFERENCES),
            references: 0,
            zstd: compressor()?,
        })
    }
}

impl ContentWriter for Writer {
    fn begin(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let mut header = [0; HEADER_BYTES];
        header[..MAGIC.len()].copy_from_slice(&MAGIC);
        header[MAGIC.len()] = VERSION;
        out.write_all(&header)
    }

    /// Writes the blocks that are filled by a batch's references.
    fn write(&mut self, batch: &ReferenceBatch, out: &mut dyn Write) -> io::Result<()> {
        let (mut pages, mut kinds) = (batch.pages(), batch.kinds());
        while !pages.is_empty() {
            let room = BLOCK_REFERENCES - self.pages.len();
            let taken = room.min(pages.len());
            self.pages.extend_from_slice(&pages[..taken]);
            self.kinds.extend_from_slice(&kinds[..taken]);
            (pages, kinds) = (&pages[taken..], &kinds[taken..]);
            if taken == room {
                self.write_block(out)?;
            }
        }
        Ok(())
    }

    /// Writes the pending references and the end mark.
    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if !self.pages.is_empty() {
            self.write_block(out)?;
        }
        let end = Head {
            references: 0,
            steps: false,
            kinds: 0,
            base: self.references,
            stored: [0; PLANES],
        };
        write_summed(&end.to_bytes(), out)
    }
}

impl Writer {
    fn write_block(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let above = self.block(false)?;
        let steps = self.block(true)?;
        write_summed(
            if steps.len() < above.len() {
                &steps
            } else {
                &above
            },
            out,
        )?;
        self.references += self.pages.len() as u64;
        self.pages.clear();
        self.kinds.clear();
        Ok(())
    }

    /// Encodes the pending references as a block, with room for its checksum.
    fn block(&mut self, steps: bool) -> io::Result<Vec<u8>> {
        let base = match steps {
            true => self.pages.first(),
            false => self.pages.iter().min(),
        };
        let base = base.map_or(0, |page| page.0);
        let mut before = base;
        let numbers: Vec<[u8; PAGE_PLANES]> = self
            .pages
            .iter()
            .map(|&PageNumber(page)| {
                let difference = page.wrapping_sub(before);
                if steps {
                    before = page;
                    (difference << 1 ^ (difference >> 63).wrapping_neg()).to_le_bytes()
                } else {
                    difference.to_le_bytes()
                }
            })
            .collect();
        let first = self.kinds.first().copied().unwrap_or_default();
        let alike = self.kinds.iter().all(|&kind| kind == first);
        let mut head = Head {
            references: u16::try_from(self.pages.len()).map_err(io::Error::other)?,
            steps,
            kinds: if alike { number_of(first) } else { MIXED },
            base,
            stored: [0; PLANES],
        };
        let mut block = vec![0; BLOCK_HEADER_BYTES];
        for plane in 0..PAGE_PLANES {
            let bytes: Vec<u8> = numbers.iter().map(|number| number[plane]).collect();
            head.stored[plane] = self.add_plane(&bytes, &mut block)?;
        }
        if !alike {
            let kinds = self.kinds.chunks(KINDS_PER_BYTE).map(|kinds| {
                let numbers = kinds.iter().rev().map(|&kind| number_of(kind));
                numbers.fold(0, |byte, number| byte << 2 | number)
            });
            let kinds: Vec<u8> = kinds.collect();
            head.stored[PAGE_PLANES] = self.add_plane(&kinds, &mut block)?;
        }
        block[..BLOCK_HEADER_BYTES].copy_from_slice(&head.to_bytes());
        Ok(block)
    }

    /// Appends a plane in the shorter form; returns the number of bytes.
    fn add_plane(&mut self, plane: &[u8], block: &mut Vec<u8>) -> io::Result<u16> {
        if plane.iter().all(|&byte| byte == 0) {
            return Ok(0);
        }
        let packed = self.zstd.compress(plane)?;
        let stored = if packed.len() * 5 < plane.len() * 3 {
            &packed
        } else {
            // Saving less than two fifths is not worth the time to decompress it: the
            // middle bytes of skewed traces save a third and would take most of the reading time.
            plane
        };
        block.extend_from_slice(stored);
        u16::try_from(stored.len()).map_err(io::Error::other)
    }
}

/// Planes are mostly skewed instead of repetitive: matches of a few bytes save little and
/// take most of the decompression time.
fn compressor() -> io::Result<Compressor<'static>> {
    let mut zstd = Compressor::new(1)?;
    zstd.set_parameter(CParameter::MinMatch(MATCH_BYTES_MIN))?;
    Ok(zstd)
}

fn number_of(kind: AccessKind) -> u8 {
    match kind {
        AccessKind::Read => 0,
        AccessKind::Write => 1,
        AccessKind::Unknown => 2,
    }
}

/// Writes a block with its checksum.
fn write_summed(block: &[u8], out: &mut dyn Write) -> io::Result<()> {
    out.write_all(&xxh3_64(&block[8..]).to_le_bytes())?;
    out.write_all(&block[8..])
}

/// `plimsoll`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "plimsoll",
    is_named: |last, _| last == "plimsoll",
    is_head: |head| head.bytes.starts_with(&MAGIC),
    also_named: &[],
    options: &[],
    opening: Opening::Stream(|input, name, _| Ok(Box::new(Reader::new(input, name)?))),
    writer: Some(|_| Ok(Box::new(Writer::new()?))),
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drained::{References, drained};
    use proptest::prelude::*;

    fn batches_of(references: &[(u64, AccessKind)], length: usize) -> Vec<ReferenceBatch> {
        let batch_of = |references: &[(u64, AccessKind)]| {
            let mut batch = ReferenceBatch::new();
            for &(page, kind) in references {
                batch.push(PageNumber(page), kind);
            }
            batch
        };
        references.chunks(length).map(batch_of).collect()
    }

    fn written(references: &[(u64, AccessKind)], batch_length: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = Writer::new().unwrap();
        writer.begin(&mut bytes).unwrap();
        for batch in batches_of(references, batch_length) {
            writer.write(&batch, &mut bytes).unwrap();
        }
        writer.finish(&mut bytes).unwrap();
        bytes
    }

    fn read(bytes: &[u8]) -> (References, Option<SourceError>) {
        let mut reader = Reader::new(bytes, "t.plimsoll").unwrap();
        drained(&mut reader)
    }

    /// Decodes a valid trace by the table of the format, one number at a time.
    fn naive(bytes: &[u8]) -> References {
        let number = |bytes: &[u8]| {
            let digits = bytes.iter().rev();
            digits.fold(0u64, |number, &byte| number << 8 | u64::from(byte))
        };
        let mut references = Vec::new();
        let mut rest = &bytes[16..];
        loop {
            let count = usize::try_from(number(&rest[8..10])).unwrap();
            if count == 0 {
                assert_eq!(number(&rest[16..24]), references.len() as u64);
                assert_eq!(rest.len(), 48);
                return references;
            }
            let mut planes = Vec::new();
            let mut at = 48;
            for plane in 0..9 {
                let stored = usize::try_from(number(&rest[24 + 2 * plane..][..2])).unwrap();
                let whole = match plane {
                    8 if rest[11] == 3 => count.div_ceil(4),
                    8 => 0,
                    _ => count,
                };
                let bytes = &rest[at..at + stored];
                at += stored;
                planes.push(match stored {
                    0 => vec![0; whole],
                    _ if stored == whole => bytes.to_vec(),
                    _ => zstd::decode_all(bytes).unwrap(),
                });
            }
            let mut page = number(&rest[16..24]);
            let base = page;
            for index in 0..count {
                let bytes: Vec<u8> = planes[..8].iter().map(|plane| plane[index]).collect();
                let value = number(&bytes);
                page = match rest[10] {
                    0 => base.wrapping_add(value),
                    _ if value % 2 == 0 => page.wrapping_add(value / 2),
                    _ => page.wrapping_sub(value / 2 + 1),
                };
                let kind = match rest[11] {
                    3 => planes[8][index / 4] >> (index % 4 * 2) & 3,
                    kind => kind,
                };
                let kinds = [AccessKind::Read, AccessKind::Write, AccessKind::Unknown];
                references.push((page, kinds[usize::from(kind)]));
            }
            rest = &rest[at..];
        }
    }

    fn kinds() -> impl Strategy<Value = AccessKind> {
        prop::sample::select(KINDS.to_vec())
    }

    /// Traces of every shape: near and far pages, walks up and down, kinds alike and mixed.
    fn traces() -> impl Strategy<Value = References> {
        let pages = prop_oneof![
            prop::collection::vec(any::<u64>(), 0..300),
            prop::collection::vec(0u64..70_000, 0..300),
            (any::<u64>(), 0u64..5, 0usize..40_000).prop_map(|(start, step, length)| {
                (0..length as u64)
                    .map(|n| start.wrapping_add(n * step))
                    .collect()
            }),
            (any::<u64>(), 1u64..999, 0usize..40_000).prop_map(|(start, round, length)| {
                let sawtooth = |n: u64| start.wrapping_sub(n % round);
                (0..length as u64).map(sawtooth).collect()
            }),
        ];
        (pages, prop::collection::vec(kinds(), 1..9)).prop_map(|(pages, kinds): (Vec<u64>, _)| {
            pages.into_iter().zip(kinds.into_iter().cycle()).collect()
        })
    }

    #[test]
    fn an_empty_trace_is_a_header_and_an_end_mark() {
        let bytes = written(&[], 1);
        assert_eq!(bytes.len(), HEADER_BYTES + BLOCK_HEADER_BYTES);
        assert!(matches!(read(&bytes), (references, None) if references.is_empty()));
        assert!(matches!(read(b""), (references, None) if references.is_empty()));
    }

    #[test]
    fn a_scan_takes_next_to_nothing_and_unshrinkable_pages_as_many_bytes_as_they_need() {
        let scan: Vec<_> = (0..100_000).map(|page| (page, AccessKind::Read)).collect();
        assert!(written(&scan, 999).len() < 1000);
        let mut page = 1u64;
        let noise = std::iter::repeat_with(|| {
            page = page.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (page >> 40, AccessKind::Unknown)
        });
        let noise: Vec<_> = noise.take(3 * BLOCK_REFERENCES).collect();
        let heads = HEADER_BYTES + 4 * BLOCK_HEADER_BYTES;
        assert_eq!(written(&noise, 5000).len(), heads + 3 * noise.len());
    }

    #[test]
    fn traces_one_after_the_other_read_as_one() {
        let [one, two] = [7, 8].map(|page| vec![(page, AccessKind::Write); 20_000]);
        let bytes = [written(&one, 64), written(&[], 1), written(&two, 64)].concat();
        let (references, error) = read(&bytes);
        assert!(error.is_none() && references == [one, two].concat());
    }

    #[test]
    fn a_trace_cut_short_is_never_taken_for_a_whole_one() {
        let references: Vec<_> = (0..40_000)
            .map(|n| (n * n % 977, AccessKind::Read))
            .collect();
        let bytes = written(&references, 16_000);
        for length in (1..bytes.len()).step_by(7) {
            let (read, error) = read(&bytes[..length]);
            assert!(
                matches!(error, Some(SourceError::Truncated { .. })),
                "{length}"
            );
            assert!(references.starts_with(&read));
        }
    }

    #[test]
    fn foreign_bytes_and_later_versions_are_refused_with_their_place() {
        let fault = |bytes: &[u8]| read(bytes).1.unwrap().to_string();
        let mut bytes = written(&[(1, AccessKind::Read)], 1);
        assert!(
            fault(b"0123456789abcdefg").contains("byte 0: expected the beginning of a plimsoll")
        );
        bytes[8] = 2;
        assert!(fault(&bytes).contains("byte 0: expected a plimsoll trace of version 1"));
        bytes[8] = 1;
        bytes[16] ^= 1;
        assert!(fault(&bytes).contains("byte 16: expected the checksum of the block, found '"));
        bytes[16] ^= 1;
        bytes[26] = 2;
        assert!(fault(&bytes).contains("byte 16: expected a block of version 1"));
        bytes[26] = 0;
        bytes[24..26].copy_from_slice(&u16::MAX.to_le_bytes());
        assert!(fault(&bytes).contains("byte 16: expected a block of at most 16384 references"));
    }

    #[test]
    fn a_block_that_bears_out_its_checksum_may_still_be_wrong() {
        let summed = |head: Head, payload: &[u8]| {
            let mut bytes = written(&[], 1)[..HEADER_BYTES].to_vec();
            let block = [&head.to_bytes(), payload].concat();
            write_summed(&block, &mut bytes).unwrap();
            bytes
        };
        let mut head = Head {
            references: 100,
            steps: false,
            kinds: 0,
            base: 0,
            stored: [0; PLANES],
        };
        head.stored[0] = 40;
        let (references, error) = read(&summed(head, &[b'x'; 40]));
        assert!(references.is_empty());
        assert!(
            error
                .unwrap()
                .to_string()
                .contains("planes that decompress to their length")
        );
        let end = Head {
            references: 0,
            base: 5,
            stored: [0; PLANES],
            ..head
        };
        let error = read(&summed(end, &[])).1.unwrap().to_string();
        assert!(
            error.contains("expected an end mark after 0 references"),
            "{error}"
        );
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_and_stands_as_documented(
            references in traces(),
            batch_length in prop::sample::select(vec![1, 100, 16_384, 50_000]),
        ) {
            let bytes = written(&references, batch_length);
            let (read, error) = read(&bytes);
            prop_assert!(error.is_none(), "{error:?}");
            prop_assert!(read == references);
            prop_assert!(naive(&bytes) == references);
        }

        #[test]
        fn a_changed_byte_is_noticed(
            references in prop::collection::vec((any::<u64>(), kinds()), 0..300),
            place in any::<prop::sample::Index>(),
            change in 1u8..,
        ) {
            let mut bytes = written(&references, 64);
            let place = place.index(bytes.len());
            bytes[place] ^= change;
            let (read, error) = read(&bytes);
            prop_assert!(error.is_some());
            prop_assert!(references.starts_with(&read));
        }
    }
}
