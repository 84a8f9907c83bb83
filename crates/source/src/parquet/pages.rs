//! The pages of a `parquet` column in one row group, in bounded memory.
//!
//! The crate `parquet` can read them too, but trusts their headers: it would allocate
//! 2 GiB, or 2^31 values of a dictionary, because a header of 20 bytes claims them. Here
//! claims are checked before anything is allocated, and decompression stops at the claimed
//! size. The crate decodes the contents of a page; encodings that make it allocate according to numbers
//! within the page (delta-encoded strings) are refused.
//!
//! Source: the format's `parquet.thrift`, in Thrift's compact protocol.

use std::io::Read;
use std::sync::Arc;

use ::parquet::basic::{Compression, Encoding, Type};
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::{ParquetError, Result as ParquetResult};
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::file::reader::ChunkReader;
use bytes::Bytes;
use flate2::Crc;
use flate2::read::MultiGzDecoder;

use super::{Chunks, general};

/// Maximum size of a page, before and after decompression, in bytes.
pub(super) const PAGE_BYTES_MAX: usize = 64 << 20;

/// Maximum size of a footer in bytes: each byte may claim an element of a list, for which the `parquet` crate allocates
/// some hundred bytes.
pub(super) const FOOTER_BYTES_MAX: usize = 4 << 20;

/// Maximum size of a dictionary in bytes: its decoded values take a multiple of that.
const DICTIONARY_BYTES_MAX: usize = 16 << 20;

/// Maximum size of a page header in bytes, including statistics.
const HEADER_BYTES_MAX: usize = 64 << 10;

/// Maximum nesting depth of structures in a header or a footer; actual files have a depth of 9.
const DEPTH_MAX: usize = 32;

/// Limit on the numbers of the fields that are inspected.
const FIELDS: usize = 9;

/// Indices of the structures in a header; its own fields belong to structure 0.
const PAGE: usize = 0;
const DATA: usize = 5;
const DICTIONARY: usize = 7;
const DATA_V2: usize = 8;

/// The integers and booleans of a page header by structure and field, both numbered as in `parquet.thrift`.
struct Header([[Option<i64>; FIELDS]; FIELDS]);

impl Header {
    /// Parses a header at the beginning of `bytes`; returns its length in bytes.
    fn parse(bytes: &[u8]) -> Option<(Self, usize)> {
        let mut header = Self([[None; FIELDS]; FIELDS]);
        let mut thrift = Thrift { rest: bytes };
        thrift.structure(DEPTH_MAX, &mut |path, number| {
            let place = match *path {
                [field] => (PAGE, field),
                [structure, field] => (structure, field),
                _ => return,
            };
            if let Some(fields) = header.0.get_mut(place.0)
                && let Some(here) = fields.get_mut(place.1)
            {
                *here = Some(number);
            }
        })?;
        Some((header, bytes.len() - thrift.rest.len()))
    }

    /// A required number that is a count.
    fn count(&self, structure: usize, field: usize) -> ParquetResult<u32> {
        let number = self.0[structure][field];
        number
            .and_then(|number| i32::try_from(number).ok()?.try_into().ok())
            .ok_or_else(|| general("a page header lacks a number".to_owned()))
    }

    fn bytes(&self, structure: usize, field: usize) -> ParquetResult<usize> {
        Ok(usize::try_from(self.count(structure, field)?)?)
    }

    fn flag(&self, structure: usize, field: usize) -> Option<bool> {
        self.0[structure][field].map(|flag| flag != 0)
    }

    /// The CRC-32 of the page as it is stored, which few writers add.
    fn checksum(&self) -> Option<u32> {
        let number = i32::try_from(self.0[PAGE][4]?).ok()?;
        Some(number.cast_unsigned())
    }
}

/// Whether a footer is a structure whose lists lie within it. The crate skips a list of 2^31
/// missing elements one by one, which takes seconds for each five bytes of a footer.
pub(super) fn is_footer(bytes: &[u8]) -> bool {
    let mut thrift = Thrift { rest: bytes };
    thrift.structure(DEPTH_MAX, &mut |_, _| ()).is_some()
}

/// Bytes in Thrift's compact protocol. Each element of a list has at least one byte.
struct Thrift<'a> {
    rest: &'a [u8],
}

impl Thrift<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(byte)
    }

    fn skip(&mut self, length: u64) -> Option<()> {
        self.rest = self.rest.get(usize::try_from(length).ok()?..)?;
        Some(())
    }

    fn unsigned(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        let number = self.unsigned()?;
        Some((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }

    /// Skips a structure; calls `tell` with the path and value of each integer and boolean in it.
    fn structure(&mut self, depth: usize, tell: &mut dyn FnMut(&[usize], i64)) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        let mut last = 0i64;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Some(());
            }
            last = match head >> 4 {
                0 => self.signed()?,
                more => last.checked_add(more.into())?,
            };
            // A field with an impossible number is skipped like an unknown one.
            let field = usize::try_from(last).unwrap_or(usize::MAX);
            match head & 0xf {
                1 => tell(&[field], 1),
                2 => tell(&[field], 0),
                4..=6 => tell(&[field], self.signed()?),
                12 => self.structure(depth, &mut |path, number| match *path {
                    [inner] => tell(&[field, inner], number),
                    _ => tell(&[field, usize::MAX, usize::MAX], number),
                })?,
                kind => self.skip_value(kind, depth)?,
            }
        }
    }

    fn skip_value(&mut self, kind: u8, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        match kind {
            1..=3 => self.skip(1),
            4..=6 => self.unsigned().map(|_| ()),
            7 => self.skip(8),
            8 => {
                let length = self.unsigned()?;
                self.skip(length)
            }
            9 | 10 => {
                let head = self.byte()?;
                let length = match head >> 4 {
                    15 => self.unsigned()?,
                    length => length.into(),
                };
                (0..length).try_for_each(|_| self.skip_value(head & 0xf, depth))
            }
            11 => {
                let length = self.unsigned()?;
                let kinds = if length > 0 { self.byte()? } else { 0 };
                (0..length).try_for_each(|_| {
                    self.skip_value(kinds >> 4, depth)?;
                    self.skip_value(kinds & 0xf, depth)
                })
            }
            12 => self.structure(depth, &mut |_, _| ()),
            _ => None,
        }
    }
}

/// Reads the pages of a column.
pub(super) struct Pages {
    chunks: Arc<Chunks>,
    compression: Compression,
    values: Type,
    /// Whether values may be null, so that pages begin with levels.
    nullable: bool,
    /// Start of the next page, and number of bytes of the column from there on.
    offset_bytes: u64,
    rest_bytes: u64,
    has_dictionary: bool,
}

impl Pages {
    pub(super) fn new(chunks: &Arc<Chunks>, column: &ColumnChunkMetaData) -> Self {
        let (offset_bytes, rest_bytes) = column.byte_range();
        Self {
            chunks: chunks.clone(),
            compression: column.compression(),
            values: column.column_type(),
            nullable: column.column_descr().max_def_level() > 0,
            offset_bytes,
            rest_bytes,
            has_dictionary: false,
        }
    }

    /// Skips the header of the next page.
    fn next_header(&mut self) -> ParquetResult<Header> {
        let room = self.rest_bytes.min(HEADER_BYTES_MAX as u64);
        let head = self
            .chunks
            .head(self.offset_bytes, usize::try_from(room)?)?;
        let (header, length) = Header::parse(&head).ok_or_else(|| {
            general(format!(
                "there is no page header of at most {HEADER_BYTES_MAX} bytes at byte {}",
                self.offset_bytes
            ))
        })?;
        self.pass(length)?;
        Ok(header)
    }

    fn pass(&mut self, length: usize) -> ParquetResult<()> {
        let rest = self.rest_bytes.checked_sub(length as u64);
        self.rest_bytes =
            rest.ok_or_else(|| general("a page is longer than its column".to_owned()))?;
        self.offset_bytes += length as u64;
        Ok(())
    }

    /// Reads a page's bytes, of which the first `plain` are not compressed.
    fn content(&mut self, header: &Header, plain: usize, compressed: bool) -> ParquetResult<Bytes> {
        let [unpacked_bytes, stored_bytes] = [2, 3].map(|field| header.bytes(PAGE, field));
        let (unpacked_bytes, stored_bytes) = (unpacked_bytes?, stored_bytes?);
        let longest = unpacked_bytes.max(stored_bytes);
        if longest > PAGE_BYTES_MAX {
            return Err(general(format!(
                "a page has {longest} bytes; at most {PAGE_BYTES_MAX} are read"
            )));
        }
        let start = self.offset_bytes;
        self.pass(stored_bytes)?;
        let stored = self.chunks.get_bytes(start, stored_bytes)?;
        if let Some(expected) = header.checksum() {
            let mut found = Crc::new();
            found.update(&stored);
            if found.sum() != expected {
                return Err(general(format!(
                    "a page at byte {start} is damaged: its checksum is another"
                )));
            }
        }
        if self.compression == Compression::UNCOMPRESSED || !compressed {
            return Ok(stored);
        }
        let wrong = || {
            general(format!(
                "a page does not decompress to {unpacked_bytes} bytes"
            ))
        };
        let (levels, packed) = stored.split_at_checked(plain).ok_or_else(wrong)?;
        let wanted = unpacked_bytes.checked_sub(plain).ok_or_else(wrong)?;
        let unpacked = unpack(self.compression, packed, wanted)?;
        if unpacked.len() != wanted {
            return Err(wrong());
        }
        Ok(if plain == 0 {
            unpacked.into()
        } else {
            [levels, &unpacked].concat().into()
        })
    }

    fn dictionary(&mut self, header: &Header) -> ParquetResult<Page> {
        let buf = self.content(header, 0, true)?;
        let count = header.count(DICTIONARY, 1)?;
        let value_bytes = match self.values {
            Type::INT64 => 8,
            // 32-bit integers, and lengths of strings.
            _ => 4,
        };
        let is_plain = matches!(
            encoding(header.count(DICTIONARY, 2)?),
            Some(Encoding::PLAIN | Encoding::PLAIN_DICTIONARY)
        );
        let fits =
            buf.len() <= DICTIONARY_BYTES_MAX && u64::from(count) * value_bytes <= buf.len() as u64;
        if std::mem::replace(&mut self.has_dictionary, true) || !is_plain || !fits {
            return Err(general(format!(
                "a column has a dictionary that is none, or of more than {DICTIONARY_BYTES_MAX} bytes"
            )));
        }
        Ok(Page::DictionaryPage {
            buf,
            num_values: count,
            encoding: Encoding::PLAIN,
            is_sorted: header.flag(DICTIONARY, 3).unwrap_or(false),
        })
    }

    fn data(&mut self, header: &Header) -> ParquetResult<Page> {
        let encoding = self.encoding(header.count(DATA, 2)?)?;
        let buf = self.content(header, 0, true)?;
        if self.nullable {
            let levels = self::encoding(header.count(DATA, 3)?);
            let length = buf.first_chunk().map(|length| u32::from_le_bytes(*length));
            let fits = length.is_some_and(|length| u64::from(length) + 4 <= buf.len() as u64);
            if levels != Some(Encoding::RLE) || !fits {
                return Err(general("a page has no levels".to_owned()));
            }
        }
        Ok(Page::DataPage {
            buf,
            num_values: header.count(DATA, 1)?,
            encoding,
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        })
    }

    fn data_v2(&mut self, header: &Header) -> ParquetResult<Page> {
        let encoding = self.encoding(header.count(DATA_V2, 4)?)?;
        let def_levels_byte_len = header.count(DATA_V2, 5)?;
        let rep_levels_byte_len = header.count(DATA_V2, 6)?;
        let levels = u64::from(def_levels_byte_len) + u64::from(rep_levels_byte_len);
        let compressed = header.flag(DATA_V2, 7).unwrap_or(true);
        let buf = self.content(header, usize::try_from(levels)?, compressed)?;
        if levels > buf.len() as u64 {
            return Err(general("a page has no levels".to_owned()));
        }
        Ok(Page::DataPageV2 {
            buf,
            num_values: header.count(DATA_V2, 1)?,
            encoding,
            num_nulls: header.count(DATA_V2, 2)?,
            num_rows: header.count(DATA_V2, 3)?,
            def_levels_byte_len,
            rep_levels_byte_len,
            is_compressed: false,
            statistics: None,
        })
    }

    /// The encoding of values, if it can be read in bounded memory.
    fn encoding(&self, number: u32) -> ParquetResult<Encoding> {
        use Encoding as E;
        let integers = self.values != Type::BYTE_ARRAY;
        let found = encoding(number).filter(|encoding| match encoding {
            E::PLAIN => true,
            E::PLAIN_DICTIONARY | E::RLE_DICTIONARY => self.has_dictionary,
            E::DELTA_BINARY_PACKED | E::BYTE_STREAM_SPLIT => integers,
            _ => false,
        });
        found.ok_or_else(|| {
            let what = if integers { "integers" } else { "strings" };
            general(format!(
                "a page has encoding number {number}, which is not read for {what}"
            ))
        })
    }
}

/// The supported encodings, by their number in `parquet.thrift`.
fn encoding(number: u32) -> Option<Encoding> {
    match number {
        0 => Some(Encoding::PLAIN),
        2 => Some(Encoding::PLAIN_DICTIONARY),
        3 => Some(Encoding::RLE),
        5 => Some(Encoding::DELTA_BINARY_PACKED),
        8 => Some(Encoding::RLE_DICTIONARY),
        9 => Some(Encoding::BYTE_STREAM_SPLIT),
        _ => None,
    }
}

/// Decompresses data with an expected size of `wanted` bytes; produces at most one byte more.
fn unpack(compression: Compression, packed: &[u8], wanted: usize) -> ParquetResult<Vec<u8>> {
    let failed = |error: &dyn std::fmt::Display| general(format!("a page is damaged: {error}"));
    match compression {
        // A page that contains only nulls has no bytes at all.
        _ if wanted == 0 => Ok(Vec::new()),
        Compression::SNAPPY => {
            if snap::raw::decompress_len(packed).ok() != Some(wanted) {
                return Ok(Vec::new());
            }
            let unpacked = snap::raw::Decoder::new().decompress_vec(packed);
            unpacked.map_err(|error| failed(&error))
        }
        Compression::GZIP(_) => {
            let mut unpacked = Vec::new();
            MultiGzDecoder::new(packed)
                .take(wanted as u64 + 1)
                .read_to_end(&mut unpacked)
                .map_err(|error| failed(&error))?;
            Ok(unpacked)
        }
        Compression::ZSTD(_) => {
            zstd::bulk::decompress(packed, wanted).map_err(|error| failed(&error))
        }
        other => Err(general(format!(
            "it is compressed by {other}; snappy, gzip and zstd are read"
        ))),
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        while self.rest_bytes > 0 {
            let header = self.next_header()?;
            return match header.count(PAGE, 1)? {
                0 => self.data(&header),
                1 => {
                    self.pass(header.bytes(PAGE, 3)?)?;
                    continue;
                }
                2 => self.dictionary(&header),
                3 => self.data_v2(&header),
                kind => Err(general(format!("a page is of unknown kind {kind}"))),
            }
            .map(Some);
        }
        Ok(None)
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        Err(ParquetError::NYI("pages are read one by one".to_owned()))
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        Err(ParquetError::NYI("pages are read one by one".to_owned()))
    }
}

impl Iterator for Pages {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Progress;
    use ::parquet::schema::parser::parse_message_type;
    use ::parquet::schema::types::SchemaDescriptor;
    use proptest::prelude::*;
    use std::io::Write as _;

    fn varint(mut number: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while number > 0x7f {
            bytes.push(u8::try_from(number & 0x7f).unwrap() | 0x80);
            number >>= 7;
        }
        bytes.push(u8::try_from(number).unwrap());
        bytes
    }

    /// Fields 1, 2, ... of a structure as 32-bit integers.
    fn integers(numbers: &[u32]) -> Vec<u8> {
        let field = |&number: &u32| [vec![0x15], varint(u64::from(number) * 2)].concat();
        numbers.iter().flat_map(field).collect()
    }

    /// A page of `kind` with the given claims in its header.
    fn page(kind: u32, unpacked: u32, stored: u32, inner: &[u32], body: &[u8]) -> Vec<u8> {
        // From field 3 on to the structure of that kind.
        let (structure, kinds) = match kind {
            0 => (DATA, integers(inner)),
            _ => (DICTIONARY, integers(inner)),
        };
        let step = u8::try_from(structure - 3).unwrap() << 4 | 12;
        let head = integers(&[kind, unpacked, stored]);
        [head, vec![step], kinds, vec![0, 0], body.to_vec()].concat()
    }

    /// The first page of a column that is stored as `bytes`, or the error.
    fn first(bytes: &[u8], kind: &str, compression: Compression) -> Result<Page, String> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let chunks = Arc::new(Chunks {
            file: Arc::new(file),
            length_bytes: bytes.len() as u64,
            progress: Progress::of(None),
        });
        let schema = format!("message t {{ required {kind} page; }}");
        let schema = Arc::new(parse_message_type(&schema).unwrap());
        let column = SchemaDescriptor::new(schema).column(0);
        let column = ColumnChunkMetaData::builder(column)
            .set_compression(compression)
            .set_total_compressed_size(i64::try_from(bytes.len()).unwrap())
            .build()
            .unwrap();
        let page = Pages::new(&chunks, &column).get_next_page();
        page.map(Option::unwrap).map_err(|error| error.to_string())
    }

    const CODECS: [fn() -> Compression; 4] = [
        || Compression::UNCOMPRESSED,
        || Compression::SNAPPY,
        || Compression::GZIP(Default::default()),
        || Compression::ZSTD(Default::default()),
    ];

    #[test]
    fn a_page_is_no_larger_than_its_header_may_claim() {
        let most = u32::try_from(PAGE_BYTES_MAX).unwrap();
        for codec in CODECS {
            for (unpacked, stored) in [(i32::MAX as u32, 8), (most + 1, 8), (8, most + 1)] {
                let bytes = page(0, unpacked, stored, &[1, 0, 3, 3], &[0; 8]);
                let error = first(&bytes, "int64", codec()).unwrap_err();
                let claimed = format!("a page has {} bytes", unpacked.max(stored));
                assert!(error.contains(&claimed), "{error}");
            }
            // Below the limit, the number of available bytes decides.
            for (unpacked, stored) in [(8, 9), (u32::MAX, 8)] {
                let bytes = page(0, unpacked, stored, &[1, 0, 3, 3], &[0; 8]);
                assert!(first(&bytes, "int64", codec()).is_err());
            }
        }
        let bytes = page(0, 8, 8, &[1, 0, 3, 3], &[7; 8]);
        let page = first(&bytes, "int64", Compression::UNCOMPRESSED).unwrap();
        assert_eq!((page.num_values(), &page.buffer()[..]), (1, &[7; 8][..]));
    }

    #[test]
    fn a_page_with_a_checksum_is_checked() {
        let body = [7; 8];
        let mut crc = Crc::new();
        crc.update(&body);
        for (checksum, is_right) in [(crc.sum(), true), (crc.sum() ^ 1, false)] {
            let zigzag = (checksum.cast_signed() << 1) ^ (checksum.cast_signed() >> 31);
            let head = integers(&[0, 8, 8]);
            let checksum = [vec![0x15], varint(zigzag.cast_unsigned().into())].concat();
            // Field 5, the one after the checksum.
            let data = [vec![0x1c], integers(&[1, 0, 3, 3]), vec![0, 0]].concat();
            let bytes = [head, checksum, data, body.to_vec()].concat();
            let page = first(&bytes, "int64", Compression::UNCOMPRESSED);
            match page {
                Ok(page) => assert!(is_right && page.buffer()[..] == body),
                Err(error) => assert!(!is_right && error.contains("is damaged"), "{error}"),
            }
        }
    }

    #[test]
    fn decompression_stops_at_what_the_header_claims() {
        let zeros = vec![0; 1 << 20];
        let gzip = {
            let mut gzip =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            gzip.write_all(&zeros).unwrap();
            gzip.finish().unwrap()
        };
        let zstd = zstd::encode_all(&zeros[..], 1).unwrap();
        let snappy = snap::raw::Encoder::new().compress_vec(&zeros).unwrap();
        let lying = [varint(u32::MAX.into()), snappy[3..].to_vec()].concat();
        let whole = 1 << 20;
        for (codec, body) in CODECS.into_iter().skip(1).zip([&snappy, &gzip, &zstd]) {
            let stored = u32::try_from(body.len()).unwrap();
            let fine = page(0, whole, stored, &[1, 0, 3, 3], body);
            assert_eq!(first(&fine, "int64", codec()).unwrap().buffer(), &zeros);
            for wrong in [whole - 1, whole + 1, 10, 0] {
                let bytes = page(0, wrong, stored, &[1, 0, 3, 3], body);
                let page = first(&bytes, "int64", codec());
                // A page that claims no bytes has none.
                let is_empty = page.as_ref().is_ok_and(|page| page.buffer().is_empty());
                assert!(page.is_err() || wrong == 0 && is_empty, "{wrong}");
            }
        }
        let stored = u32::try_from(lying.len()).unwrap();
        let bytes = page(0, whole, stored, &[1, 0, 3, 3], &lying);
        let error = first(&bytes, "int64", Compression::SNAPPY).unwrap_err();
        assert!(
            error.contains("does not decompress to 1048576 bytes"),
            "{error}"
        );
    }

    #[test]
    fn a_dictionary_has_no_more_values_than_its_bytes_can_be() {
        let plain = Compression::UNCOMPRESSED;
        let dictionary = |count| page(2, 8, 8, &[count, 0], &[0; 8]);
        for (kind, most) in [("int64", 1), ("int32", 2), ("binary", 2)] {
            assert!(first(&dictionary(most), kind, plain).is_ok(), "{kind}");
            for more in [most + 1, 1 << 30, i32::MAX as u32] {
                assert!(first(&dictionary(more), kind, plain).is_err(), "{kind}");
            }
        }
    }

    #[test]
    fn encodings_that_allocate_by_their_content_are_refused() {
        let data = |encoding| page(0, 8, 8, &[1, encoding, 3, 3], &[0; 8]);
        for (kind, read) in [("int64", &[0, 5, 9][..]), ("binary", &[0])] {
            for encoding in 0..20 {
                let page = first(&data(encoding), kind, Compression::UNCOMPRESSED);
                assert_eq!(page.is_ok(), read.contains(&encoding), "{kind} {encoding}");
            }
        }
    }

    #[test]
    fn a_header_that_does_not_end_is_none() {
        for bytes in [
            vec![],
            vec![0x15],
            vec![0x1c; 2 * HEADER_BYTES_MAX],
            vec![0x15; 2 * HEADER_BYTES_MAX],
            vec![0x19, 0xf3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        ] {
            assert!(first(&[bytes, vec![0xff]].concat(), "int64", CODECS[0]()).is_err());
        }
    }

    #[test]
    fn a_footer_has_the_elements_its_lists_claim() {
        let list = |kind: u8, length| {
            let head = [0x19, 0xf0 | kind];
            [&head[..], &varint(length), &[0, 0, 0]].concat()
        };
        for kind in 1..13 {
            assert!(!is_footer(&list(kind, u64::MAX)), "{kind}");
            assert!(!is_footer(&list(kind, 1 << 31)), "{kind}");
        }
        assert!(is_footer(&list(1, 2)));
        assert!(!is_footer(&list(1, 3)));
        assert!(!is_footer(b""));
    }

    proptest! {
        #[test]
        fn a_header_of_any_bytes_is_parsed_within_them(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some((_, length)) = Header::parse(&bytes) {
                prop_assert!((1..=bytes.len()).contains(&length));
            }
        }
    }
}
