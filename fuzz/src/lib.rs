//! What the fuzz targets share: reading a trace to its end, in pieces of any size.
//!
//! Each target compares the parser with a naive one that shares no code, and with
//! itself when the same bytes arrive in other pieces.
#![forbid(unsafe_code)]

use std::io::{self, Read};

use plimsoll_flow::{AccessKind, ReferenceBatch, Source};
use plimsoll_source::{Options, SourceError, read};

/// References after which reading stops: compressed input may stand for any number.
pub const REFERENCES_MAX: usize = 1 << 16;

/// What a parser made of its input.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    /// Pages and kinds, in order.
    pub references: Vec<(u64, AccessKind)>,
    /// The fault that ended them, in words.
    pub fault: Option<String>,
}

/// Where a fault stands, as far as a naive parser can tell.
pub fn line_of(fault: &SourceError) -> Option<u64> {
    match fault {
        SourceError::Line { line, .. } | SourceError::LineTooLong { line, .. } => Some(*line),
        _ => None,
    }
}

/// Reads all of `bytes`, whole if `pieces` is empty, else in pieces of those sizes by turns.
pub fn references_of(
    bytes: &[u8],
    pieces: &[usize],
    options: &Options,
) -> (Vec<(u64, AccessKind)>, Option<SourceError>) {
    let mut references = Vec::new();
    let input = Pieces {
        bytes,
        pieces: pieces.iter().copied().cycle(),
    };
    let mut trace = match read(input, "fuzz", options) {
        Ok(trace) => trace,
        Err(fault) => return (references, Some(fault)),
    };
    let mut batch = ReferenceBatch::new();
    loop {
        let result = trace.next_batch(&mut batch);
        assert!(batch.len() <= ReferenceBatch::CAPACITY);
        assert_eq!(batch.start().0, references.len() as u64);
        references.extend(
            batch
                .iter()
                .map(|reference| (reference.page.0, reference.kind)),
        );
        match result {
            Ok(more) => {
                assert_eq!(more, !batch.is_empty());
                if !more || references.len() > REFERENCES_MAX {
                    return (references, None);
                }
            }
            Err(fault) => {
                assert!(!trace.next_batch(&mut batch).unwrap_or(true));
                return (references, Some(fault));
            }
        }
    }
}

/// Reads all of `bytes`, having made sure that pieces make no difference, except in how much a
/// decompressor hands out before it finds its input damaged.
pub fn outcome(bytes: &[u8], options: &Options) -> (Outcome, Option<u64>) {
    let (references, fault) = references_of(bytes, &[], options);
    let line = fault.as_ref().and_then(line_of);
    let is_damaged = matches!(fault, Some(SourceError::Read { .. }));
    let whole = Outcome {
        references,
        fault: fault.map(|fault| fault.to_string()),
    };
    let (references, fault) = references_of(bytes, &[1, 7, 2, 3, 5], options);
    if is_damaged {
        // What comes out before the fault is either way the beginning of the same.
        let length = references.len().min(whole.references.len());
        assert_eq!(references[..length], whole.references[..length]);
        assert!(fault.is_some());
        return (whole, line);
    }
    let in_pieces = Outcome {
        references,
        fault: fault.map(|fault| fault.to_string()),
    };
    assert_eq!(whole, in_pieces);
    (whole, line)
}

/// A reader that yields its bytes in pieces.
struct Pieces<'a, I> {
    bytes: &'a [u8],
    pieces: I,
}

impl<I: Iterator<Item = usize>> Read for Pieces<'_, I> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.pieces.next().unwrap_or(buffer.len());
        let length = length.min(buffer.len());
        self.bytes.read(&mut buffer[..length])
    }
}

/// The text that `bytes` are, without a byte-order mark before it.
pub fn text_of(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    Some(text.strip_prefix('\u{feff}').unwrap_or(text))
}

/// Parses a number the way the standard library does.
pub fn naive_number(text: &str) -> Option<u64> {
    let hexadecimal = text.strip_prefix("0x").or(text.strip_prefix("0X"));
    let (digits, radix) = hexadecimal.map_or((text, 10), |digits| (digits, 16));
    if digits.starts_with('+') {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

/// Whether text is taken for zstd: the only magic number that is valid UTF-8 begins a skippable frame.
pub fn is_skippable_frame(bytes: &[u8]) -> bool {
    matches!(bytes, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..])
}

/// Appends what a request for bytes of a disk touches: its pages of 4096 bytes, with the disk's number in the
/// sixteen highest bits. `None` if such a request is none.
pub fn naive_request_pages(
    references: &mut Vec<(u64, AccessKind)>,
    device: u128,
    kind: AccessKind,
    offset: u128,
    length: u128,
) -> Option<()> {
    let last = (offset + length - 1) / 4096;
    if length > u128::from(u32::MAX) || offset + length > 1 << 64 || last >= 1 << 48 {
        return None;
    }
    let page = |page| u64::try_from(device << 48 | page).expect("48 bits and 16");
    references.extend((offset / 4096..=last).map(|at| (page(at), kind)));
    Some(())
}
