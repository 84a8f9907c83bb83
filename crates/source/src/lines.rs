//! Reads lines and numbers of untrusted text, in bounded memory.

use std::io::{self, Read};
use std::iter;

use crate::SourceError;
use crate::aligned::{AlignedBuffer, move_to_front};
use crate::error::excerpt;

/// Maximum length of a line in bytes, excluding its end.
pub(crate) const LINE_BYTES_MAX: usize = 64 << 10;

/// UTF-8's byte-order mark, which may precede a text.
pub(crate) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Number of bytes read at a time, with room for an incomplete line.
const BUFFER_BYTES: usize = 4 * LINE_BYTES_MAX;

/// Splits a text into lines, independently of the blocks in which it is read.
///
/// A line ends with `\n` or `\r\n`, the last one also with the text. A byte-order mark before the
/// first line is skipped.
pub(crate) struct Lines<R> {
    input: R,
    name: String,
    buffer: AlignedBuffer,
    /// The part of the buffer that has not been returned yet.
    unread: std::ops::Range<usize>,
    /// The length of `unread` that is known to contain no line end.
    scanned: usize,
    /// Number of bytes read.
    read_bytes: u64,
    /// Number of the last returned line, from 1.
    line: u64,
    /// Whether a byte-order mark may still follow.
    at_start: bool,
}

impl<R: Read> Lines<R> {
    pub(crate) fn new(input: R, name: &str) -> Self {
        Self {
            input,
            name: name.to_owned(),
            buffer: AlignedBuffer::new(BUFFER_BYTES),
            unread: 0..0,
            scanned: 0,
            read_bytes: 0,
            line: 0,
            at_start: true,
        }
    }

    /// Returns the next line without its end, or `None` after the last.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, SourceError> {
        loop {
            let unread = &self.buffer[self.unread.clone()];
            if let Some(end) = memchr::memchr(b'\n', &unread[self.scanned..]) {
                let length = self.scanned + end;
                return self.hand_out(length, length + 1).map(Some);
            }
            self.scanned = unread.len();
            if self.scanned > LINE_BYTES_MAX + 1 {
                return Err(self.too_long());
            }
            if self.refill()? == 0 {
                return match self.unread.len() {
                    0 => Ok(None),
                    length => self.hand_out(length, length).map(Some),
                };
            }
        }
    }

    /// Returns the bytes that have been read but not returned yet: possibly many lines, the last possibly incomplete.
    ///
    /// For formats that parse simple lines faster than they are split; see [`Self::pass`].
    pub(crate) fn unread(&self) -> &[u8] {
        &self.buffer[self.unread.clone()]
    }

    /// Skips complete lines at the beginning of the unread bytes.
    pub(crate) fn pass(&mut self, lines: u64, length: usize) {
        self.unread.start = self.unread.end.min(self.unread.start + length);
        self.scanned = 0;
        self.line += lines;
    }

    /// Creates the error for the line returned last.
    pub(crate) fn unexpected(&self, expected: impl Into<String>, found: &[u8]) -> SourceError {
        SourceError::Line {
            name: self.name.clone(),
            line: self.line,
            expected: expected.into(),
            found: excerpt(found),
        }
    }

    fn hand_out(&mut self, length: usize, taken: usize) -> Result<&[u8], SourceError> {
        let start = self.unread.start;
        let mut end = start + length;
        if length > 0 && self.buffer[end - 1] == b'\r' {
            end -= 1;
        }
        if end - start > LINE_BYTES_MAX {
            return Err(self.too_long());
        }
        self.unread.start += taken;
        self.scanned = 0;
        self.line += 1;
        Ok(&self.buffer[start..end])
    }

    fn too_long(&self) -> SourceError {
        SourceError::LineTooLong {
            name: self.name.clone(),
            line: self.line + 1,
            limit_bytes: LINE_BYTES_MAX,
        }
    }

    /// Reads more bytes after the unread ones; there is room, because those are at most a line.
    fn refill(&mut self) -> Result<usize, SourceError> {
        self.unread = move_to_front(&mut self.buffer, self.unread.clone());
        let read =
            read_some(&mut self.input, &mut self.buffer[self.unread.end..]).map_err(|source| {
                SourceError::Read {
                    name: self.name.clone(),
                    offset_bytes: self.read_bytes,
                    source,
                }
            })?;
        self.unread.end += read;
        self.read_bytes += read as u64;
        // If the first line begins with the mark, its end is not before its third byte.
        if self.line == 0 && self.at_start && self.unread.len() >= BYTE_ORDER_MARK.len() {
            self.at_start = false;
            if self.unread().starts_with(BYTE_ORDER_MARK) {
                self.unread.start += BYTE_ORDER_MARK.len();
                self.scanned = 0;
            }
        }
        Ok(read)
    }
}

/// Reads once, ignoring interruptions by signals.
pub(crate) fn read_some(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Reads until the buffer is full or the input ends or fails; returns the number of bytes read.
pub(crate) fn read_full(input: &mut impl Read, buffer: &mut [u8]) -> (usize, io::Result<()>) {
    let mut filled = 0;
    while filled < buffer.len() {
        match read_some(input, &mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) => return (filled, Err(error)),
        }
    }
    (filled, Ok(()))
}

/// Parses an unsigned 64-bit number, decimal or hexadecimal with `0x`; the text must contain nothing else.
pub(crate) fn parse_number(text: &[u8]) -> Option<u64> {
    match text {
        [b'0', b'x' | b'X', digits @ ..] => parse_digits(digits, 16),
        digits => parse_digits(digits, 10),
    }
}

/// Number of decimal digits with which any number fits into 64 bits.
pub(crate) const DIGITS_THAT_FIT: usize = 19;

/// Decimal digits of a second's microseconds.
const MICROSECOND_DIGITS: usize = 6;

/// Parses an unsigned 64-bit number in base 10 or 16.
pub(crate) fn parse_digits(text: &[u8], radix: u32) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    if radix == 10 && text.len() <= DIGITS_THAT_FIT {
        return text.iter().try_fold(0u64, |number, byte| {
            let digit = byte.wrapping_sub(b'0');
            (digit < 10).then(|| number.wrapping_mul(10).wrapping_add(digit.into()))
        });
    }
    text.iter().try_fold(0u64, |number, &byte| {
        let digit = char::from(byte).to_digit(radix)?;
        number
            .checked_mul(u64::from(radix))?
            .checked_add(u64::from(digit))
    })
}

/// Parses seconds, after which may be a fraction and an exponent of ten (`5e-05`); returns microseconds, rounded down.
pub(crate) fn parse_seconds(text: &[u8]) -> Option<u64> {
    parse_plain_seconds(text).or_else(|| parse_scientific_seconds(text))
}

/// Those without an exponent, as of nearly all lines.
fn parse_plain_seconds(text: &[u8]) -> Option<u64> {
    let (seconds, fraction) = split_fraction(text);
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let mut digits = [b'0'; MICROSECOND_DIGITS];
    let kept = fraction.len().min(digits.len());
    digits[..kept].copy_from_slice(&fraction[..kept]);
    let seconds = parse_digits(seconds, 10)?.checked_mul(1_000_000)?;
    seconds.checked_add(parse_digits(&digits, 10)?)
}

fn parse_scientific_seconds(text: &[u8]) -> Option<u64> {
    let at = memchr::memchr2(b'e', b'E', text)?;
    let exponent = parse_exponent(&text[at + 1..])?;
    let (seconds, fraction) = split_fraction(&text[..at]);
    let digits = || seconds.iter().chain(fraction);
    if seconds.is_empty() || !digits().all(u8::is_ascii_digit) {
        return None;
    }
    let whole = (seconds.len() + MICROSECOND_DIGITS).saturating_add_signed(exponent);
    let padded = digits().copied().chain(iter::repeat(b'0'));
    padded.take(whole).try_fold(0_u64, |number, digit| {
        number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
    })
}

/// What is before a point, and behind it.
fn split_fraction(text: &[u8]) -> (&[u8], &[u8]) {
    match memchr::memchr(b'.', text) {
        Some(point) => (&text[..point], &text[point + 1..]),
        None => (text, b""),
    }
}

/// Parses an exponent of at most three digits.
fn parse_exponent(text: &[u8]) -> Option<isize> {
    let (is_negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] | digits => (false, digits),
    };
    let exponent = isize::try_from(parse_digits(digits, 10)?).ok()?;
    (digits.len() <= 3).then_some(if is_negative { -exponent } else { exponent })
}

/// Returns the content of a line before its comment, without surrounding blanks.
pub(crate) fn content(line: &[u8]) -> &[u8] {
    let end = memchr::memchr(b'#', line).unwrap_or(line.len());
    line[..end].trim_ascii()
}

/// Whether a line has no reference: it is empty, or a `*`, which marks phases in the LIRS traces.
pub(crate) fn is_mark(content: &[u8]) -> bool {
    matches!(content, b"" | b"*")
}

/// Whether a line has no content.
pub(crate) fn is_empty_line(line: &[u8]) -> bool {
    is_mark(content(line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lines_of(text: &[u8], piece: usize) -> Vec<Vec<u8>> {
        struct Pieces<'a>(&'a [u8], usize);
        impl Read for Pieces<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let length = self.1.min(buffer.len());
                self.0.read(&mut buffer[..length])
            }
        }
        let mut lines = Lines::new(Pieces(text, piece), "text");
        let mut all = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            all.push(line.to_vec());
        }
        all
    }

    #[test]
    fn a_line_ends_with_lf_crlf_or_the_text() {
        let lines = lines_of(b"one\r\n\ntwo\r\r\nthree", 2);
        assert_eq!(lines, [&b"one"[..], b"", b"two\r", b"three"]);
        assert!(lines_of(b"", 1).is_empty());
    }

    #[test]
    fn the_longest_line_passes_and_one_byte_more_does_not() {
        for end in [&b""[..], b"\n", b"\r\n"] {
            let mut text = b"1\n".to_vec();
            text.resize(2 + LINE_BYTES_MAX, b'x');
            text.extend_from_slice(end);
            assert_eq!(lines_of(&text, 4096)[1].len(), LINE_BYTES_MAX);
        }
        let mut text = b"1\n".to_vec();
        text.resize(2 + LINE_BYTES_MAX + 1, b'x');
        let mut lines = Lines::new(&text[..], "text");
        lines.next().unwrap();
        let error = lines.next().unwrap_err();
        assert!(matches!(error, SourceError::LineTooLong { line: 2, .. }));
    }

    #[test]
    fn seconds_have_a_fraction_and_an_exponent_or_neither() {
        for (text, time_us) in [
            ("17", 17_000_000),
            ("17.", 17_000_000),
            ("0.1234569", 123_456),
            ("5e-05", 50),
            ("1.5E-6", 1),
            ("1e-07", 0),
            ("9e-999", 0),
            ("1.7000000001234e+09", 1_700_000_000_123_400),
            ("12e3", 12_000_000_000),
            ("0e999", 0),
            ("18446744073709.551615", u64::MAX),
        ] {
            assert_eq!(parse_seconds(text.as_bytes()), Some(time_us), "{text}");
        }
        for wrong in [
            "",
            ".5",
            "-1",
            "nan",
            "1e",
            "e5",
            "1e5.0",
            "1e0000",
            "1e 5",
            "1.2.3",
            "1e++5",
            "18446744073709.551616",
            "1e999",
        ] {
            assert_eq!(parse_seconds(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn numbers_are_decimal_or_hexadecimal_and_fit_64_bits() {
        assert_eq!(parse_number(b"0"), Some(0));
        assert_eq!(parse_number(b"007"), Some(7));
        assert_eq!(parse_number(b"0xfF"), Some(255));
        assert_eq!(parse_number(b"18446744073709551615"), Some(u64::MAX));
        for wrong in [
            "",
            "0x",
            "-1",
            "+1",
            "1 ",
            "1.0",
            "ff",
            "18446744073709551616",
        ] {
            assert_eq!(parse_number(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn a_byte_order_mark_is_skipped_where_it_stands_first() {
        for (text, lines) in [
            ("\u{feff}1\n2", vec!["1", "2"]),
            ("\u{feff}", vec![]),
            ("\u{feff}\n1\n", vec!["", "1"]),
            ("1\n\u{feff}2\n", vec!["1", "\u{feff}2"]),
            ("\n\u{feff}2\n", vec!["", "\u{feff}2"]),
            ("\u{feff}\u{feff}2", vec!["\u{feff}2"]),
            ("\u{fefe}2", vec!["\u{fefe}2"]),
        ] {
            let lines: Vec<_> = lines.iter().map(|line| line.as_bytes().to_vec()).collect();
            for piece in 1..9 {
                assert_eq!(
                    lines_of(text.as_bytes(), piece),
                    lines,
                    "{text:?} by {piece}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn numbers_are_what_the_standard_library_says(
            text in "[0-9]{0,22}|[0-9a-g+ -]{0,20}|000[0-9]{16,20}",
        ) {
            let expected = text.parse::<u64>().ok().filter(|_| !text.starts_with('+'));
            prop_assert_eq!(parse_digits(text.as_bytes(), 10), expected);
        }

        #[test]
        fn lines_do_not_depend_on_the_pieces_they_arrive_in(
            text in "[ab\r\n]{0,200}",
            piece in 1usize..9,
        ) {
            let mut expected: Vec<_> = text.split('\n').collect();
            if expected.last() == Some(&"") {
                expected.pop();
            }
            let expected = expected.into_iter().map(|line| line.strip_suffix('\r').unwrap_or(line));
            let expected: Vec<_> = expected.map(|line| line.as_bytes().to_vec()).collect();
            prop_assert_eq!(lines_of(text.as_bytes(), piece), expected);
        }
    }
}
