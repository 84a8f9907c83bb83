//! `lackey`: memory accesses as printed by `valgrind --tool=lackey --trace-mem=yes`.
//!
//! ```text
//! I  04016b80,3      instruction fetch of 3 bytes
//!  L 1ffeffe7e8,8    load
//!  S 1ffeffe7e0,8    store
//!  M 0421c7cc,4      modify: a load and a store of the same bytes
//! ```
//!
//! An access is one reference to each page it touches, lowest first. A modify is
//! one write, not a read and a write, because the second access can never miss. Fetches
//! count only with an option, as reads. Lines of valgrind itself (`==pid==`,
//! `--pid--`) and blank ones are skipped; anything else is an error, because the
//! traced program's own output may have split a line.

use std::io::Read;

use plimsoll_flow::{AccessKind, PageSize};

use crate::TraceOption;
use crate::lines::{Lines, parse_digits};
use crate::row::{FormatRow, Opening};
use crate::spans::SpanSource;
use crate::spans::{Span, Spans};
use crate::{Options, SourceError};

/// Maximum length of an access in bytes: far above any instruction's, to bound the effect of one line.
const ACCESS_BYTES_MAX: u64 = 1 << 20;

const EXPECTED: &str =
    "an access of 1 to 1048576 bytes like ' L 1ffeffe7e8,8', or a line '==pid== ...'";

/// Reader of `lackey` traces.
pub(crate) struct Reader<R> {
    lines: Lines<R>,
    page_size: PageSize,
    instructions: bool,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(input: R, name: &str, options: &Options) -> Self {
        Self {
            lines: Lines::new(input, name),
            page_size: options.page_size,
            instructions: options.instructions,
        }
    }
}

impl<R: Read> Spans for Reader<R> {
    fn next_span(&mut self) -> Result<Option<Span>, SourceError> {
        while let Some(line) = self.lines.next()? {
            if line.trim_ascii().is_empty() || is_of_valgrind(line) {
                continue;
            }
            let Some((operation, first, last)) = parse_access(line) else {
                let found = line.to_vec();
                return Err(self.lines.unexpected(EXPECTED, &found));
            };
            let kind = match operation {
                Operation::Fetch if !self.instructions => continue,
                Operation::Fetch | Operation::Load => AccessKind::Read,
                Operation::Store | Operation::Modify => AccessKind::Write,
            };
            return Ok(Some(Span::of_bytes(kind, first, last, self.page_size)));
        }
        Ok(None)
    }
}

enum Operation {
    Fetch,
    Load,
    Store,
    Modify,
}

/// Whether a line is an access; used to recognise the format.
pub(crate) fn is_access(line: &[u8]) -> bool {
    parse_access(line.strip_suffix(b"\r").unwrap_or(line)).is_some()
}

fn is_of_valgrind(line: &[u8]) -> bool {
    line.starts_with(b"==") || line.starts_with(b"--") || line.starts_with(b"**")
}

/// Returns the operation and the addresses of the first and the last byte.
fn parse_access(line: &[u8]) -> Option<(Operation, u64, u64)> {
    let (operation, rest) = match line {
        [b'I', b' ', b' ', rest @ ..] => (Operation::Fetch, rest),
        [b' ', b'L', b' ', rest @ ..] => (Operation::Load, rest),
        [b' ', b'S', b' ', rest @ ..] => (Operation::Store, rest),
        [b' ', b'M', b' ', rest @ ..] => (Operation::Modify, rest),
        _ => return None,
    };
    let rest = rest.trim_ascii();
    let comma = memchr::memchr(b',', rest)?;
    let address = parse_digits(&rest[..comma], 16)?;
    let length = parse_digits(&rest[comma + 1..], 10)?;
    if !(1..=ACCESS_BYTES_MAX).contains(&length) {
        return None;
    }
    Some((operation, address, address.checked_add(length - 1)?))
}

/// `lackey`.
pub(crate) const ROW: FormatRow = FormatRow {
    name: "lackey",
    is_named: |last, _| last == "lackey",
    is_head: |head| head.line_is(|line| line.starts_with(b"==") || is_access(line)),
    also_named: &[],
    options: &[TraceOption::Instructions],
    opening: Opening::Stream(|input, name, options| {
        let reader = Reader::new(input, name, options);
        Ok(Box::new(SpanSource::new(reader, options)))
    }),
    writer: None,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drained::references_of;
    use crate::spans::SpanSource;
    use AccessKind::{Read as R, Write as W};

    fn read(text: &str, options: &Options) -> Result<Vec<(u64, AccessKind)>, SourceError> {
        let mut reader = SpanSource::new(Reader::new(text.as_bytes(), "t", options), options);
        references_of(&mut reader)
    }

    const TRACE: &str = "==7== Lackey, an example Valgrind tool\n\
        I  00001000,3\n L 00002ff8,8\n S 00003000,8\n M 4000,4\n\n\
        --7-- warning\n S 00004fff,2\n";

    #[test]
    fn loads_read_stores_and_modifies_write_and_fetches_wait_to_be_asked_for() {
        let data = [(2, R), (3, W), (4, W), (4, W), (5, W)];
        assert_eq!(read(TRACE, &Options::default()).unwrap(), data);
        let options = Options {
            instructions: true,
            ..Options::default()
        };
        assert_eq!(
            read(TRACE, &options).unwrap(),
            [&[(1, R)], &data[..]].concat()
        );
    }

    #[test]
    fn an_access_touches_every_page_it_overlaps_even_across_batches() {
        let options = Options {
            page_size: PageSize::new(1).unwrap(),
            ..Options::default()
        };
        let read = read(" L 10,40000\n", &options).unwrap();
        let expected: Vec<_> = (16..40_016).map(|page| (page, R)).collect();
        assert_eq!(read, expected);
    }

    #[test]
    fn the_last_byte_of_the_address_space_is_an_access_and_one_more_is_not() {
        let last = read(" L ffffffffffffffff,1\n", &Options::default()).unwrap();
        assert_eq!(last, [(u64::MAX >> 12, R)]);
        for wrong in [
            " L ffffffffffffffff,2",
            " L 10,0",
            " L 10,1048577",
            " L 10",
            " X 10,1",
            "L 10,1",
            " L 0x10,1",
            "hello",
        ] {
            let error = read(wrong, &Options::default()).unwrap_err();
            assert!(
                matches!(error, SourceError::Line { line: 1, .. }),
                "{wrong}"
            );
        }
    }
}
