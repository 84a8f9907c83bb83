//! `ids`: one page per line, a decimal number or `0x` and hexadecimal digits.
//!
//! Blank lines and text after a `#` are skipped, and so is a single `*`, which
//! marks phases in the LIRS traces. Kinds are not recorded.

use std::io::{self, Read, Write};

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch, Source};

use crate::SourceError;
use crate::lines::{DIGITS_THAT_FIT, Lines, content, is_mark, parse_number};
use crate::row::{FormatRow, Opening};
use crate::spans::Reading;
use crate::writing::ContentWriter;

/// Reader of `ids` traces.
pub(crate) struct Reader<R> {
    lines: Lines<R>,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(input: R, name: &str) -> Self {
        Self {
            lines: Lines::new(input, name),
        }
    }
}

impl<R: Read> Source for Reader<R> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while !batch.is_full() {
            let (lines, length) = push_plain_lines(self.lines.unread(), batch);
            self.lines.pass(lines, length);
            if batch.is_full() {
                break;
            }
            let Some(line) = self.lines.next()? else {
                break;
            };
            let content = content(line);
            if let Some(page) = parse_number(content) {
                batch.push(PageNumber(page), AccessKind::Unknown);
            } else if !is_mark(content) {
                let found = content.to_vec();
                return Err(self.lines.unexpected(
                    "a page number, decimal or 0x and hexadecimal, below 2^64",
                    &found,
                ));
            }
        }
        Ok(!batch.is_empty())
    }
}

impl<R: Read> Reading for Reader<R> {}

/// Appends the lines at the beginning of `text` that consist of a decimal number only, as most
/// do, until the batch is full or another line follows. Returns the number of these lines and bytes.
fn push_plain_lines(text: &[u8], batch: &mut ReferenceBatch) -> (u64, usize) {
    let mut lines = 0;
    let mut passed = 0;
    let mut page = 0u64;
    let mut digits = 0;
    for (place, byte) in text.iter().enumerate() {
        let digit = byte.wrapping_sub(b'0');
        if digit < 10 && digits < DIGITS_THAT_FIT {
            page = page.wrapping_mul(10).wrapping_add(digit.into());
            digits += 1;
        } else if *byte == b'\n' && digits > 0 {
            batch.push(PageNumber(page), AccessKind::Unknown);
            lines += 1;
            passed = place + 1;
            (page, digits) = (0, 0);
            if batch.is_full() {
                break;
            }
        } else {
            break;
        }
    }
    (lines, passed)
}

/// Writes one reference.
pub(crate) fn write_reference(out: &mut dyn Write, page: PageNumber) -> io::Result<()> {
    writeln!(out, "{page}")
}

/// `ids`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "ids",
    is_named: |last, _| last == "ids",
    is_head: |head| match head.line {
        None => head.is_text,
        Some(line) => line.trim_ascii().first().is_some_and(u8::is_ascii_digit),
    },
    also_named: &[],
    options: &[],
    opening: Opening::Stream(|input, name, _| Ok(Box::new(Reader::new(input, name)))),
    writer: Some(|_| Ok(Box::new(Writer))),
};

struct Writer;

impl ContentWriter for Writer {
    fn write(&mut self, batch: &ReferenceBatch, out: &mut dyn Write) -> io::Result<()> {
        let mut pages = batch.pages().iter();
        pages.try_for_each(|&page| write_reference(out, page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Vec<u64>, SourceError> {
        let mut reader = Reader::new(text.as_bytes(), "t.ids");
        let mut batch = ReferenceBatch::new();
        let mut pages = Vec::new();
        while reader.next_batch(&mut batch)? {
            assert!(
                batch
                    .kinds()
                    .iter()
                    .all(|&kind| kind == AccessKind::Unknown)
            );
            pages.extend(batch.pages().iter().map(|page| page.0));
        }
        Ok(pages)
    }

    #[test]
    fn comments_blanks_marks_and_crlf_are_tolerated() {
        let text = "# a trace\r\n1\r\n\r\n  0x1F # the stack\n*\n18446744073709551615";
        assert_eq!(read(text).unwrap(), [1, 31, u64::MAX]);
        assert_eq!(read("").unwrap(), Vec::<u64>::new());
    }

    #[test]
    fn a_line_that_is_no_number_is_named_with_its_content() {
        let error = read("1\n2\n3 \x07 4\n").unwrap_err().to_string();
        assert_eq!(
            error,
            "t.ids, line 3: expected a page number, decimal or 0x and hexadecimal, \
             below 2^64, found '3 \\x07 4'"
        );
        for wrong in ["-1", "18446744073709551616", "0x", "1,2", "1 2"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    /// Parses each line separately, without the fast path.
    fn read_line_by_line(text: &str) -> Result<Vec<u64>, SourceError> {
        let lines = text
            .split('\n')
            .map(|line| read(&format!("# {line}\n {line}")));
        lines
            .collect::<Result<Vec<_>, _>>()
            .map(|pages| pages.concat())
    }

    proptest! {
        #[test]
        fn simple_lines_beside_others_are_read_as_by_themselves(
            lines in prop::collection::vec("[0-9]{1,21}|0x[0-9a-f]{1,3}|[0-9]{2} ?#|\\*|[0-9]\r|7x", 0..40),
            end in "\n?",
        ) {
            let text = lines.join("\n") + &end;
            let expected = read_line_by_line(&text);
            match read(&text) {
                Ok(pages) => prop_assert_eq!(pages, expected.unwrap()),
                Err(SourceError::Line { line, .. }) => {
                    let line = usize::try_from(line).unwrap() - 1;
                    prop_assert!(read(&lines[line]).is_err());
                    prop_assert!(read_line_by_line(&lines[..line].join("\n")).is_ok());
                }
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            }
        }

        #[test]
        fn what_is_written_is_read(pages in prop::collection::vec(any::<u64>(), 0..300)) {
            let mut text = Vec::new();
            for &page in &pages {
                write_reference(&mut text, PageNumber(page)).unwrap();
            }
            prop_assert_eq!(read(std::str::from_utf8(&text).unwrap()).unwrap(), pages);
        }
    }
}
