//! `csv`: comma-separated values, RFC 4180, one column of which is the page.
//!
//! A record is a line: a quoted field may contain commas and doubled quotes, but no
//! line end. The first record is a header if a column is selected by name, or if
//! its page field does not begin with a digit, or a sign and a digit.

use std::fmt;
use std::io::{self, Read, Write};
use std::str::FromStr;

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source};

use crate::TraceOption;
use crate::lines::{LINE_BYTES_MAX, Lines, parse_number};
use crate::row::{FormatRow, Opening};
use crate::spans::Reading;
use crate::writing::ContentWriter;
use crate::{Options, SourceError};

/// Maximum number of columns in a record.
const COLUMNS_MAX: usize = 4096;

/// The columns that are written, and the default columns when reading.
pub(crate) const PAGE: &str = "page";
pub(crate) const OP: &str = "op";

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
    /// Index of the page column, and of the operation column.
    page: usize,
    op: Option<usize>,
    /// Whether `record` contains a first record that is not a header.
    first_unread: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header, if there is one, and finds the columns in it.
    pub(crate) fn new(input: R, name: &str, options: &Options) -> Result<Self, SourceError> {
        let mut reader = Self {
            lines: Lines::new(input, name),
            record: Record::new(),
            page: 0,
            op: None,
            first_unread: false,
        };
        if !reader.next_record()? {
            return Ok(reader);
        }
        let first = &reader.record;
        let find = |column: &Column| match column {
            Column::Name(name) => first.position(name),
            Column::Place(place) => place.checked_sub(1).filter(|&index| index < first.len()),
        };
        let page = match &options.page_column {
            Some(column) => find(column),
            None if first.len() == 1 => Some(0),
            None => first.position(PAGE),
        };
        let op = match &options.op_column {
            Some(column) => find(column),
            None => first.position(OP).filter(|_| page.is_some()),
        };
        let missing = match (&options.page_column, page, &options.op_column, op) {
            (Some(column), None, ..) | (_, _, Some(column), None) => {
                Some(format!("a column {column}"))
            }
            (None, None, ..) => Some(format!("a column '{PAGE}' (or another, by --page-column)")),
            _ => None,
        };
        if let Some(expected) = missing {
            return Err(reader.lines.unexpected(expected, &first.joined()));
        }
        reader.page = page.unwrap_or(0);
        reader.op = op;
        let named = |column: &Option<Column>| matches!(column, Some(Column::Name(_)));
        // Also one with a sign, which no page has: a line that is no header is not left out.
        let digits = |field: &[u8]| {
            let number = field.strip_prefix(b"-").or(field.strip_prefix(b"+"));
            number
                .unwrap_or(field)
                .first()
                .is_some_and(u8::is_ascii_digit)
        };
        let is_header = named(&options.page_column)
            || named(&options.op_column)
            || !reader.record.get(reader.page).is_some_and(digits);
        reader.first_unread = !is_header;
        Ok(reader)
    }

    /// Reads the next record that is not a blank line; `false` at the end.
    fn next_record(&mut self) -> Result<bool, SourceError> {
        while let Some(line) = self.lines.next()? {
            if line.trim_ascii().is_empty() {
                continue;
            }
            if self.record.parse(line) {
                return Ok(true);
            }
            let found = line.to_vec();
            let expected = format!("a record of at most {COLUMNS_MAX} columns");
            return Err(self.lines.unexpected(expected, &found));
        }
        Ok(false)
    }

    fn reference(&self) -> Result<(PageNumber, AccessKind), SourceError> {
        let field = self.record.get(self.page).unwrap_or_default();
        let Some(page) = parse_number(field) else {
            let expected = format!(
                "a page number, decimal or 0x and hexadecimal, below 2^64, in column {}",
                self.page + 1
            );
            return Err(self.lines.unexpected(expected, field));
        };
        let op = self.op.and_then(|op| self.record.get(op));
        Ok((PageNumber(page), op.map_or(AccessKind::Unknown, kind_of)))
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
            let (page, kind) = self.reference()?;
            batch.push(page, kind);
        }
        Ok(!batch.is_empty())
    }
}

impl<R: Read> Reading for Reader<R> {}

/// The fields of one record.
struct Record {
    parser: csv_core::Reader,
    bytes: Box<[u8]>,
    ends: Box<[usize]>,
    len: usize,
    /// Number of bytes between the end of a field and the start of the next.
    gap: usize,
}

impl Record {
    fn new() -> Self {
        Self {
            parser: csv_core::Reader::new(),
            bytes: vec![0; LINE_BYTES_MAX].into_boxed_slice(),
            ends: vec![0; COLUMNS_MAX].into_boxed_slice(),
            len: 0,
            gap: 0,
        }
    }

    /// Parses a line; `false` if it has too many fields.
    fn parse(&mut self, line: &[u8]) -> bool {
        if self.parse_plain(line) {
            return true;
        }
        self.gap = 0;
        self.parser.reset();
        let (_, _, bytes, fields) = self
            .parser
            .read_record(line, &mut self.bytes, &mut self.ends);
        // The end of the input ends the record, as a line end does.
        let (result, _, _, last) =
            self.parser
                .read_record(&[], &mut self.bytes[bytes..], &mut self.ends[fields..]);
        self.len = fields + last;
        matches!(result, csv_core::ReadRecordResult::Record)
    }

    /// Splits a line at its commas if that is sufficient: no quotes, no carriage return
    /// within, not too many fields.
    fn parse_plain(&mut self, line: &[u8]) -> bool {
        if line.len() > self.bytes.len() {
            return false;
        }
        self.len = 0;
        for (place, &byte) in line.iter().enumerate() {
            if matches!(byte, b'"' | b'\r') {
                return false;
            }
            if byte == b',' {
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
    is_named: |last, _| last == "csv",
    is_head: |head| head.line_is(|line| line.contains(&b',')),
    may_be_csv: false,
    options: &[TraceOption::PageColumn, TraceOption::OpColumn],
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
        let options = Options {
            page_column: page.map(|column| column.parse().unwrap()),
            op_column: op.map(|column| column.parse().unwrap()),
            ..Options::default()
        };
        let mut reader = Reader::new(text.as_bytes(), "t.csv", &options)?;
        references_of(&mut reader)
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
            "t.csv, line 1: expected a column 'page' (or another, by --page-column), \
             found 'time,lbn'"
        );
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

    /// The fields of a record, or `None` if it has too many.
    fn fields_of(record: &mut Record, parse: impl Fn(&mut Record) -> bool) -> Option<Vec<Vec<u8>>> {
        parse(record).then(|| {
            let fields = (0..record.len()).filter_map(|index| record.get(index));
            fields.map(<[u8]>::to_vec).collect()
        })
    }

    proptest! {
        #[test]
        fn a_line_without_quotes_is_cut_as_the_csv_parser_cuts_it(
            line in "[a, ]{0,30}|,{4090,4100}",
        ) {
            let mut record = Record::new();
            let cut = fields_of(&mut record, |record| record.parse(line.as_bytes()));
            // An additional field with a quote forces the line to the full parser.
            let quoted = format!("{line},\"\"");
            let parsed = fields_of(&mut record, |record| record.parse(quoted.as_bytes()));
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
