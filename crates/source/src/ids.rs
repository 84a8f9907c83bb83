//! `ids`: one page a line, a decimal number or `0x` and hexadecimal digits.
//!
//! Blank lines and what follows a `#` say nothing, nor does a `*` alone, with
//! which the LIRS traces mark phases. Kinds are not recorded.

use std::io::{self, Read, Write};

use plimsoll_flow::{AccessKind, PageNumber, ReferenceBatch};

use crate::lines::{Lines, parse_number};
use crate::{Source, SourceError};

/// Reads `ids`.
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
    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while !batch.is_full() {
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

/// Writes one reference.
pub(crate) fn write_reference(out: &mut dyn Write, page: PageNumber) -> io::Result<()> {
    writeln!(out, "{page}")
}

/// Whether a line is one that says nothing.
pub(crate) fn is_empty_line(line: &[u8]) -> bool {
    is_mark(content(line))
}

/// Returns what stands on a line before its comment, without blanks around it.
fn content(line: &[u8]) -> &[u8] {
    let end = memchr::memchr(b'#', line).unwrap_or(line.len());
    line[..end].trim_ascii()
}

fn is_mark(content: &[u8]) -> bool {
    matches!(content, b"" | b"*")
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
        assert_eq!(read("").unwrap(), []);
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

    proptest! {
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
