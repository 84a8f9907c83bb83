//! `csv`: comma-separated values, RFC 4180, one column of which is the page, or a key.
//!
//! Or values separated by tabs or semicolons. A record is a line: a quoted field may contain separators and doubled quotes, but no line
//! end, so that a line with an open quote is an error. The first record is a header if a column is found by its name, or if a field in which a number is expected does not
//! begin with a digit, or a sign and a digit. A key is the page of its XXH3-64 hash (seed 0), as in `twitter`.

use std::fmt;
use std::io::{self, Read, Write};
use std::str::FromStr;

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source};

use xxhash_rust::xxh3::xxh3_64;

use crate::details::Wanted;
use crate::lines::{LINE_BYTES_MAX, Lines, parse_number, parse_seconds};
use crate::row::{FormatRow, Opening};
use crate::spans::Reading;
use crate::writing::ContentWriter;
use crate::{Grouping, Options, SourceError, TraceOption};

/// Maximum number of columns in a record.
const COLUMNS_MAX: usize = 4096;

/// The columns that are written, and the default columns when reading.
pub(crate) const PAGE: &str = "page";
pub(crate) const OP: &str = "op";
/// The default columns of details.
const SIZE: &str = "size";
const TIME: &str = "time";
/// What may be between the fields of a record, instead of commas where the first line with content has none.
const SEPARATORS: [u8; 3] = [b',', b'\t', b';'];

/// A column of a CSV file.
///
/// In text form, digits alone are a position, anything else is a name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Column {
    /// By its name in the header, case-insensitive.
    Name(String),
    /// By its position, counted from 1.
    Place(usize),
}

impl FromStr for Column {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(Self::Name(text.to_owned()));
        }
        match text.parse() {
            Ok(place @ 1..=COLUMNS_MAX) => Ok(Self::Place(place)),
            _ => Err(format!(
                "columns are counted from 1 and end at {COLUMNS_MAX}"
            )),
        }
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "'{name}'"),
            Self::Place(place) => write!(f, "number {place}"),
        }
    }
}

/// Reader of `csv` traces.
pub(crate) struct Reader<R> {
    lines: Lines<R>,
    record: Record,
    columns: Columns,
    wanted: Wanted,
    /// Whether `record` contains a first record that is not a header.
    first_unread: bool,
}

/// Indices of the columns that are read.
#[derive(Default)]
struct Columns {
    page: usize,
    /// Whether that is a key, any text, and not a number.
    is_key: bool,
    op: Option<usize>,
    size: Option<usize>,
    time: Option<usize>,
}

impl Columns {
    /// Finds them in the first record; the error names what it lacks.
    fn of(first: &Record, options: &Options) -> Result<Self, String> {
        let find = |column: &Column| match column {
            Column::Name(name) => first.position(name),
            Column::Place(place) => place.checked_sub(1).filter(|&index| index < first.len()),
        };
        // A column that was named, or else by default.
        let chosen = |column: Option<&Column>, or: &dyn Fn() -> Option<usize>| match column {
            Some(column) => find(column)
                .map(Some)
                .ok_or_else(|| format!("a column {column}")),
            None => Ok(or()),
        };
        let default = |name: &'static str| move || first.position(name);
        // A detail that is asked for, and the option for its column.
        let detail = |column: &Option<Column>, is_wanted: bool, name, option: TraceOption| {
            let index = chosen(column.as_ref(), &default(name))?;
            let missing = || format!("a column '{name}' (or another, by --{option})");
            match is_wanted {
                true => index.map(Some).ok_or_else(missing),
                false => Ok(index),
            }
        };
        let page_or_only = || match first.len() {
            1 => Some(0),
            _ => first.position(PAGE),
        };
        let page = options.key_column.as_ref().or(options.page_column.as_ref());
        let page = chosen(page, &page_or_only)?.ok_or_else(|| {
            format!("a column '{PAGE}' (or another, by --page-column or --key-column)")
        })?;
        Ok(Self {
            page,
            is_key: options.key_column.is_some(),
            op: chosen(options.op_column.as_ref(), &default(OP))?,
            size: detail(
                &options.size_column,
                options.sizes,
                SIZE,
                TraceOption::SizeColumn,
            )?,
            time: detail(
                &options.time_column,
                options.times,
                TIME,
                TraceOption::TimeColumn,
            )?,
        })
    }

    /// Whether the first record is a header: a column was found by its name in it, or a field where a number is expected does not
    /// begin with one.
    fn is_header(&self, first: &Record, options: &Options) -> bool {
        let found = [
            (&options.page_column, None),
            (&options.key_column, None),
            (&options.op_column, self.op),
            (&options.size_column, self.size),
            (&options.time_column, self.time),
        ];
        let is_named = |(column, index): (&Option<Column>, Option<usize>)| match column {
            Some(column) => matches!(column, Column::Name(_)),
            None => index.is_some(),
        };
        // Also one with a sign, which no page has: a line that is no header is not left out.
        let is_number = |field: &[u8]| {
            let number = field.strip_prefix(b"-").or(field.strip_prefix(b"+"));
            number
                .unwrap_or(field)
                .first()
                .is_some_and(u8::is_ascii_digit)
        };
        let page = (!self.is_key).then_some(self.page);
        let size = self.size.filter(|_| options.sizes);
        let time = self.time.filter(|_| options.times);
        let mut numbers = [page, size, time].into_iter().flatten();
        found.into_iter().any(is_named)
            || numbers.any(|index| !first.get(index).is_some_and(is_number))
    }
}

impl<R: Read> Reader<R> {
    /// Reads the header, if there is one, and finds the columns in it.
    pub(crate) fn new(input: R, name: &str, options: &Options) -> Result<Self, SourceError> {
        let mut reader = Self {
            lines: Lines::new(input, name),
            record: Record::new(),
            columns: Columns::default(),
            wanted: Wanted::of(options, Grouping::Device),
            first_unread: false,
        };
        if !reader.next_record()? {
            return Ok(reader);
        }
        let first = &reader.record;
        reader.columns = Columns::of(first, options)
            .map_err(|expected| reader.lines.unexpected(expected, &first.joined()))?;
        reader.first_unread = !reader.columns.is_header(first, options);
        Ok(reader)
    }

    /// Reads the next record that is not a blank line; `false` at the end.
    fn next_record(&mut self) -> Result<bool, SourceError> {
        while let Some(line) = self.lines.next()? {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let Err(expected) = self.record.parse(line) else {
                return Ok(true);
            };
            let found = line.to_vec();
            return Err(self.lines.unexpected(expected, &found));
        }
        Ok(false)
    }

    /// Appends the reference of the record.
    fn push_reference(&self, batch: &mut ReferenceBatch) -> Result<(), SourceError> {
        let field = |index: usize| self.record.get(index).unwrap_or_default();
        let unexpected = |expected: &str, index: usize| {
            let expected = format!("{expected}, in column {}", index + 1);
            self.lines.unexpected(expected, field(index))
        };
        let columns = &self.columns;
        let page = match (columns.is_key, field(columns.page)) {
            (true, b"") => return Err(unexpected("a key", columns.page)),
            (true, key) => xxh3_64(key),
            (false, number) => parse_number(number).ok_or_else(|| {
                let expected = "a page number, decimal or 0x and hexadecimal, below 2^64 (or a key, by --key-column)";
                unexpected(expected, columns.page)
            })?,
        };
        let size_bytes = match columns.size.filter(|_| self.wanted.sizes) {
            Some(size) => parse_number(field(size))
                .and_then(|size| u32::try_from(size).ok())
                .ok_or_else(|| unexpected("a size in bytes, below 2^32", size))?,
            None => 0,
        };
        let time_us = match columns.time.filter(|_| self.wanted.times) {
            Some(time) => parse_seconds(field(time)).ok_or_else(|| {
                unexpected(
                    "a time in seconds, like 17 or 17.25, below 1.8e13 (2^64 us)",
                    time,
                )
            })?,
            None => 0,
        };
        let op = columns.op.and_then(|op| self.record.get(op));
        batch.push(PageNumber(page), op.map_or(AccessKind::Unknown, kind_of));
        self.wanted.push(time_us, size_bytes, 0, batch);
        Ok(())
    }
}

impl<R: Read> Source for Reader<R> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while !batch.is_full() {
            if !std::mem::take(&mut self.first_unread) && !self.next_record()? {
                break;
            }
            self.push_reference(batch)?;
        }
        Ok(!batch.is_empty())
    }
}

impl<R: Read> Reading for Reader<R> {}

/// What is expected of a line whose quotes are wrong.
const ONE_LINE: &str = "a record in one line, its quotes closed";

/// Where in a field a byte is.
#[derive(Clone, Copy)]
enum Place {
    /// Before its contents.
    Before,
    /// In an unquoted one.
    Plain,
    /// Within its quotes.
    Quoted,
    /// Behind a quote that ends it, or is the first of two that stand for one.
    Quote,
    /// Behind blanks that follow its quotes.
    After,
}

/// The fields of one record.
struct Record {
    /// What separates them, which the first record determines.
    separator: Option<u8>,
    bytes: Box<[u8]>,
    ends: Box<[usize]>,
    len: usize,
    /// Number of bytes between the end of a field and the start of the next.
    gap: usize,
}

impl Record {
    fn new() -> Self {
        Self {
            separator: None,
            bytes: vec![0; LINE_BYTES_MAX].into_boxed_slice(),
            ends: vec![0; COLUMNS_MAX].into_boxed_slice(),
            len: 0,
            gap: 0,
        }
    }

    /// Parses a line, of at most [`LINE_BYTES_MAX`]; the error is what was expected.
    fn parse(&mut self, line: &[u8]) -> Result<(), String> {
        let separator = *self.separator.get_or_insert_with(|| {
            let line = line.trim_ascii();
            let mut all = SEPARATORS.into_iter();
            let separator = all.find(|separator| line.contains(separator));
            separator.unwrap_or(SEPARATORS[0])
        });
        if self.parse_plain(line, separator) {
            return Ok(());
        }
        self.parse_quoted(line, separator)
    }

    /// Splits a line at its separators if that is sufficient: no quotes, no carriage return
    /// within, not too many fields.
    fn parse_plain(&mut self, line: &[u8], separator: u8) -> bool {
        self.len = 0;
        for (place, &byte) in line.iter().enumerate() {
            if matches!(byte, b'"' | b'\r') {
                return false;
            }
            if byte == separator {
                let Some(end) = self.ends.get_mut(self.len) else {
                    return false;
                };
                *end = place;
                self.len += 1;
            }
        }
        let Some(end) = self.ends.get_mut(self.len) else {
            return false;
        };
        *end = line.len();
        self.len += 1;
        self.gap = 1;
        self.bytes[..line.len()].copy_from_slice(line);
        true
    }

    /// Parses any line. Blanks before and after the quotes of a field are no part of it; quotes within an unquoted field are.
    fn parse_quoted(&mut self, line: &[u8], separator: u8) -> Result<(), String> {
        let Self { bytes, ends, .. } = self;
        let (mut fields, mut written) = (0, 0);
        let mut write = |byte| {
            bytes[written] = byte;
            written += 1;
            written
        };
        let (mut place, mut end) = (Place::Before, 0);
        for &byte in line.iter().chain([&separator]) {
            place = match (place, byte) {
                (Place::Quoted, b'"') => Place::Quote,
                (Place::Before, b'"') => Place::Quoted,
                (Place::Quoted, _) | (Place::Quote, b'"') => {
                    end = write(byte);
                    Place::Quoted
                }
                (_, byte) if byte == separator => {
                    let too_many = || format!("a record of at most {COLUMNS_MAX} columns");
                    *ends.get_mut(fields).ok_or_else(too_many)? = end;
                    fields += 1;
                    Place::Before
                }
                // Which ends a record for some programs.
                (_, b'\r') => return Err(ONE_LINE.to_owned()),
                (Place::Before, byte) if byte.is_ascii_whitespace() => Place::Before,
                (Place::Before | Place::Plain, byte) => {
                    end = write(byte);
                    Place::Plain
                }
                (Place::Quote | Place::After, byte) if byte.is_ascii_whitespace() => Place::After,
                (Place::Quote | Place::After, _) => return Err(ONE_LINE.to_owned()),
            };
        }
        (self.len, self.gap) = (fields, 0);
        match place {
            Place::Before => Ok(()),
            _ => Err(ONE_LINE.to_owned()),
        }
    }

    fn len(&self) -> usize {
        self.len
    }

    /// Returns a field without surrounding blanks.
    fn get(&self, index: usize) -> Option<&[u8]> {
        let ends = &self.ends[..self.len];
        let end = *ends.get(index)?;
        let start = index
            .checked_sub(1)
            .map_or(0, |before| ends[before] + self.gap);
        Some(self.bytes[start..end].trim_ascii())
    }

    fn position(&self, name: &str) -> Option<usize> {
        (0..self.len).find(|&index| {
            self.get(index)
                .is_some_and(|field| field.eq_ignore_ascii_case(name.as_bytes()))
        })
    }

    fn joined(&self) -> Vec<u8> {
        let fields: Vec<_> = (0..self.len).filter_map(|index| self.get(index)).collect();
        fields.join(&b","[..])
    }
}

/// Distinguishes reads from writes by the words and SCSI operation codes used in traces.
pub(crate) fn kind_of(op: &[u8]) -> AccessKind {
    let mut lower = [0; 5];
    let Some(lower) = lower.get_mut(..op.len()) else {
        return AccessKind::Unknown;
    };
    lower.copy_from_slice(op);
    lower.make_ascii_lowercase();
    match &*lower {
        b"r" | b"read" | b"rd" | b"l" | b"load" | b"get" | b"08" | b"28" | b"88" | b"a8" => {
            AccessKind::Read
        }
        b"w" | b"write" | b"wr" | b"s" | b"store" | b"set" | b"put" | b"0a" | b"2a" | b"8a"
        | b"aa" => AccessKind::Write,
        _ => AccessKind::Unknown,
    }
}

/// Writes the header.
pub(crate) fn write_header(out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{PAGE},{OP}")
}

/// Writes one reference.
pub(crate) fn write_reference(
    out: &mut dyn Write,
    page: PageNumber,
    kind: AccessKind,
) -> io::Result<()> {
    let op = match kind {
        AccessKind::Read => "r",
        AccessKind::Write => "w",
        AccessKind::Unknown => "",
    };
    writeln!(out, "{page},{op}")
}

/// `csv`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "csv",
    is_named: |last, _| matches!(last, "csv" | "tsv"),
    is_head: |head| head.line_is(|line| line.contains(&b',')),
    also_named: &[],
    options: &[
        TraceOption::PageColumn,
        TraceOption::KeyColumn,
        TraceOption::OpColumn,
        TraceOption::SizeColumn,
        TraceOption::TimeColumn,
        TraceOption::Times,
        TraceOption::Sizes,
    ],
    opening: Opening::Stream(|input, name, options| {
        Ok(Box::new(Reader::new(input, name, options)?))
    }),
    writer: Some(|_| Ok(Box::new(Writer))),
};

struct Writer;

impl ContentWriter for Writer {
    fn begin(&mut self, out: &mut dyn Write) -> io::Result<()> {
        write_header(out)
    }

    fn write(&mut self, batch: &ReferenceBatch, out: &mut dyn Write) -> io::Result<()> {
        let mut references = batch.pages().iter().zip(batch.kinds());
        references.try_for_each(|(&page, &kind)| write_reference(out, page, kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drained::references_of;
    use AccessKind::{Read as R, Unknown as U, Write as W};
    use proptest::prelude::*;

    fn read(
        text: &str,
        page: Option<&str>,
        op: Option<&str>,
    ) -> Result<Vec<(u64, AccessKind)>, SourceError> {
        read_with(
            text,
            &Options {
                page_column: page.map(|column| column.parse().unwrap()),
                op_column: op.map(|column| column.parse().unwrap()),
                ..Options::default()
            },
        )
    }

    fn read_with(text: &str, options: &Options) -> Result<Vec<(u64, AccessKind)>, SourceError> {
        references_of(&mut Reader::new(text.as_bytes(), "t.csv", options)?)
    }

    /// Pages, sizes in bytes and times in microseconds.
    fn details(text: &str, options: &Options) -> Result<[Vec<u64>; 3], SourceError> {
        let mut reader = Reader::new(text.as_bytes(), "t.csv", options)?;
        let (mut batch, mut all) = (ReferenceBatch::new(), <[Vec<u64>; 3]>::default());
        while reader.next_batch(&mut batch)? {
            all[0].extend(batch.pages().iter().map(|page| page.0));
            all[1].extend(
                batch
                    .details()
                    .sizes_bytes
                    .iter()
                    .map(|&size| u64::from(size)),
            );
            all[2].extend(&batch.details().times_us);
        }
        Ok(all)
    }

    const TRACE: &str = "version,time,op,lbn\r\n1,5,2a,0x10\r\n1,6, 28 ,17\r\n\r\n1,7,ff,18";

    #[test]
    fn columns_are_found_by_name_and_by_place() {
        let expected = [(16, W), (17, R), (18, U)];
        assert_eq!(read(TRACE, Some("lbn"), Some("op")).unwrap(), expected);
        assert_eq!(read(TRACE, Some("LBN"), None).unwrap(), expected);
        assert_eq!(read(TRACE, Some("4"), Some("3")).unwrap(), expected);
        let (_, body) = TRACE.split_once('\n').unwrap();
        assert_eq!(read(body, Some("4"), Some("3")).unwrap(), expected);
        assert_eq!(
            read(body, Some("4"), None).unwrap(),
            expected.map(|(page, _)| (page, U))
        );
    }

    #[test]
    fn without_a_choice_the_column_page_or_the_only_one_is_taken() {
        let two = read("op,Page\nread,1\nSTORE,2\n,3\n", None, None);
        assert_eq!(two.unwrap(), [(1, R), (2, W), (3, U)]);
        assert_eq!(read("1\n2\n", None, None).unwrap(), [(1, U), (2, U)]);
        // No header, and no page.
        assert!(read("-5\n1\n2\n", None, None).is_err());
        assert_eq!(read("id\n2\n", None, None).unwrap(), [(2, U)]);
        assert_eq!(read("\n", None, None).unwrap(), []);
        let error = read("time,lbn\n1,2\n", None, None).unwrap_err().to_string();
        assert_eq!(
            error,
            "t.csv, line 1: expected a column 'page' (or another, by --page-column or --key-column), \
             found 'time,lbn'"
        );
    }

    #[test]
    fn keys_are_hashed_and_sizes_and_times_are_read_if_asked_for() {
        let text = "time,url,bytes\n0.5,\"/a,b?x=1\",10\n7,9f1c-22,0x20\n8.25, /a ,4294967295\n";
        let hashes = ["/a,b?x=1", "9f1c-22", "/a"].map(|key| xxh3_64(key.as_bytes()));
        let column = |name: &str| Some(name.parse().unwrap());
        let options = Options {
            key_column: column("URL"),
            size_column: column("bytes"),
            sizes: true,
            times: true,
            ..Options::default()
        };
        let times_us = vec![500_000, 7_000_000, 8_250_000];
        let sizes = vec![10, 32, u64::from(u32::MAX)];
        let expected = [hashes.to_vec(), sizes, times_us];
        assert_eq!(details(text, &options).unwrap(), expected);
        // Without a header, and with the default columns.
        let (_, body) = text.split_once('\n').unwrap();
        let by_place = Options {
            key_column: column("2"),
            size_column: column("3"),
            time_column: column("1"),
            ..options.clone()
        };
        assert_eq!(details(body, &by_place).unwrap(), expected);
        assert_eq!(details(text, &by_place).unwrap(), expected);
        let renamed = text.replace("bytes", "Size");
        let by_default = Options {
            size_column: None,
            ..options.clone()
        };
        assert_eq!(details(&renamed, &by_default).unwrap(), expected);
        // A column that is found by its default name is in a header too.
        let only_key = Options {
            key_column: column("2"),
            ..Options::default()
        };
        assert_eq!(details(text, &only_key).unwrap()[0], hashes);
        let without_names = details(
            "url\n/a\n",
            &Options {
                key_column: column("1"),
                ..Options::default()
            },
        );
        assert_eq!(without_names.unwrap()[0].len(), 2);
        // Neither asked for nor read.
        let neither = Options {
            sizes: false,
            times: false,
            ..options.clone()
        };
        let strange = "time,url,bytes\nnoon,/a,-\n";
        let only_pages = [vec![xxh3_64(b"/a")], vec![], vec![]];
        assert_eq!(details(strange, &neither).unwrap(), only_pages);

        let error = |text: &str, options: &Options| details(text, options).unwrap_err().to_string();
        for (text, expected) in [
            (
                strange,
                "line 2: expected a size in bytes, below 2^32, in column 3, found '-'",
            ),
            (
                "time,url,bytes\nnoon,/a,1\n",
                "line 2: expected a time in seconds, like 17 or 17.25, below 1.8e13 (2^64 us), in column 1, found 'noon'",
            ),
            (
                "time,url,bytes\n1,,1\n",
                "line 2: expected a key, in column 2, found nothing",
            ),
            (
                "url,bytes\n/a,1\n",
                "line 1: expected a column 'time' (or another, by --time-column), found 'url,bytes'",
            ),
        ] {
            let error = error(text, &options);
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn tabs_and_semicolons_separate_where_the_first_line_has_no_comma() {
        let expected = [(1, R), (2, W)];
        for text in [
            "op\tpage\nr\t1\nw\t2\n",
            "op;page\nr;1\nw;\"2\"\n",
            "op;page\nr;1;a,b\nw;2\n",
        ] {
            assert_eq!(read(text, None, None).unwrap(), expected, "{text:?}");
        }
        assert_eq!(read("op,page\n\"a;b\",1\n", None, None).unwrap(), [(1, U)]);
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_first_field() {
        assert_eq!(
            read("\u{feff}page,op\n1,r\n", None, None).unwrap(),
            [(1, R)]
        );
        assert_eq!(read("\u{feff}\n1\n", None, None).unwrap(), [(1, U)]);
        assert_eq!(read("\u{feff}", None, None).unwrap(), []);
        assert_eq!(read("\u{feff}\"page\"\n7\n", None, None).unwrap(), [(7, U)]);
    }

    #[test]
    fn a_missing_column_is_named() {
        let error = |page, op| read(TRACE, page, op).unwrap_err().to_string();
        assert!(error(Some("lba"), None).contains("expected a column 'lba', found 'version,time,"));
        assert!(error(Some("5"), None).contains("expected a column number 5, found"));
        assert!(error(Some("lbn"), Some("kind")).contains("expected a column 'kind'"));
        assert!("0".parse::<Column>().is_err());
        assert!("4097".parse::<Column>().is_err());
    }

    #[test]
    fn a_bad_field_is_named_with_its_line() {
        let error = read("page\n1\n\n-2\n", None, None).unwrap_err().to_string();
        assert!(
            error.starts_with("t.csv, line 4: expected a page number"),
            "{error}"
        );
        assert!(error.ends_with("in column 1, found '-2'"), "{error}");
        let short = read("a,page\n1,2\n3\n", None, None)
            .unwrap_err()
            .to_string();
        assert!(
            short.contains("line 3:") && short.ends_with("found nothing"),
            "{short}"
        );
    }

    #[test]
    fn quotes_hide_commas_and_too_many_columns_are_refused() {
        let text = "name,page\n\"a, \"\"b\"\"\",\"7\"\n";
        assert_eq!(read(text, None, None).unwrap(), [(7, U)]);
        let wide = ",".repeat(COLUMNS_MAX);
        let error = read(&wide, Some("1"), None).unwrap_err();
        assert!(matches!(error, SourceError::Line { line: 1, .. }));
        let widest = format!("1{}", ",".repeat(COLUMNS_MAX - 1));
        assert_eq!(read(&widest, Some("1"), None).unwrap(), [(1, U)]);
    }

    #[test]
    fn a_line_whose_quotes_are_wrong_is_an_error() {
        let expected = "line 2: expected a record in one line, its quotes closed, found '";
        for line in [
            "\"http://a/\nx\",r",
            "\"a,r",
            "a,\"r",
            "\"a\"x,r",
            "\"a\" \"b\",r",
            "\"a\"\"",
            "\"",
            "\"a\",r\rb,w",
        ] {
            let error = read(&format!("page,op\n{line}\n"), Some("1"), None).unwrap_err();
            assert!(error.to_string().contains(expected), "{line:?}: {error}");
        }
        let header = read("\"page\n\",op\n1,r\n", None, None).unwrap_err();
        assert!(matches!(header, SourceError::Line { line: 1, .. }));
    }

    #[test]
    fn quoted_fields_are_taken_out_of_their_quotes() {
        for (line, expected) in [
            ("\"a\"\"b\",\"\"", vec!["a\"b", ""]),
            ("\"\"\"\"\"\",\"a\",", vec!["\"\"", "a", ""]),
            ("1, \"a, b\" ,\"c\" ", vec!["1", "a, b", "c"]),
            ("a\"b,c\"", vec!["a\"b", "c\""]),
            ("\"a\rb\",c", vec!["a\rb", "c"]),
        ] {
            let fields = fields_of(&mut Record::new(), line).unwrap();
            let fields = fields.into_iter().map(String::from_utf8);
            let fields: Vec<_> = fields.map(Result::unwrap).collect();
            assert_eq!(fields, expected, "{line}");
        }
        let longest = format!("a\"{}", "b".repeat(LINE_BYTES_MAX - 2));
        let fields = fields_of(&mut Record::new(), &longest).unwrap();
        assert_eq!(fields, [longest.as_bytes()]);
    }

    /// The fields of a line, or `None` if it is no record.
    fn fields_of(record: &mut Record, line: &str) -> Option<Vec<Vec<u8>>> {
        record.parse(line.as_bytes()).ok()?;
        let fields = (0..record.len()).filter_map(|index| record.get(index));
        Some(fields.map(<[u8]>::to_vec).collect())
    }

    proptest! {
        #[test]
        fn a_line_without_quotes_is_cut_as_one_with_quotes(
            line in "[a, ]{0,30}|,{4090,4100}",
        ) {
            let mut record = Record::new();
            let cut = fields_of(&mut record, &line);
            // An additional field with a quote forces the line to the full parser.
            let parsed = fields_of(&mut record, &format!("{line},\"\""));
            if let (Some(cut), Some(mut parsed)) = (cut, parsed) {
                prop_assert_eq!(parsed.pop(), Some(vec![]));
                prop_assert_eq!(cut, parsed);
            } else {
                prop_assert!(line.len() >= 4094);
            }
        }

        #[test]
        fn what_is_written_is_read(
            references in prop::collection::vec(
                (any::<u64>(), prop::sample::select(vec![R, W, U])), 0..300),
        ) {
            let mut text = Vec::new();
            write_header(&mut text).unwrap();
            for &(page, kind) in &references {
                write_reference(&mut text, PageNumber(page), kind).unwrap();
            }
            let text = String::from_utf8(text).unwrap();
            prop_assert_eq!(read(&text, None, None).unwrap(), references);
        }
    }
}
