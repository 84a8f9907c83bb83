//! Reads binary traces in blocks, in bounded memory.

use std::io::{self, Read};
use std::ops::Range;

use crate::SourceError;
use crate::aligned::{AlignedBuffer, LINE_BYTES, move_to_front};
use crate::error::excerpt;
use crate::lines::read_some;

/// A window on the bytes of a trace that moves forward.
pub(crate) struct Bytes<R> {
    input: R,
    name: String,
    buffer: AlignedBuffer,
    /// The part of the buffer that has not been taken yet.
    unread: Range<usize>,
    /// Number of bytes read.
    read_bytes: u64,
    /// Why there are no more bytes; reported if the available ones are not sufficient.
    fault: Option<io::Error>,
}

impl<R: Read> Bytes<R> {
    /// Creates a window of `capacity` bytes on `input`.
    pub(crate) fn new(input: R, name: &str, capacity: usize) -> Self {
        Self {
            input,
            name: name.to_owned(),
            // A line more for what is moved to the front.
            buffer: AlignedBuffer::new(capacity + LINE_BYTES),
            unread: 0..0,
            read_bytes: 0,
            fault: None,
        }
    }

    /// Returns the next bytes: at least `wanted`, which must not exceed
    /// the window, and fewer only at the end of the trace.
    pub(crate) fn at_least(&mut self, wanted: usize) -> Result<&[u8], SourceError> {
        if self.unread.len() < wanted {
            self.refill(wanted);
        }
        if self.unread.len() < wanted
            && let Some(source) = self.fault.take()
        {
            return Err(SourceError::Read {
                name: self.name.clone(),
                offset_bytes: self.read_bytes,
                source,
            });
        }
        Ok(&self.buffer[self.unread.clone()])
    }

    /// Skips bytes that have been inspected.
    pub(crate) fn take(&mut self, length: usize) {
        self.unread.start = self.unread.end.min(self.unread.start + length);
    }

    /// Creates the error for a record at the window's start whose contents are not as expected.
    pub(crate) fn unexpected(&self, expected: impl Into<String>, length: usize) -> SourceError {
        let unread = &self.buffer[self.unread.clone()];
        SourceError::Record {
            name: self.name.clone(),
            offset_bytes: self.offset_bytes(),
            expected: expected.into(),
            found: excerpt(&unread[..length.min(unread.len())]),
        }
    }

    /// Creates the error for a record at the window's start that is truncated by the trace's end.
    pub(crate) fn truncated(&self, expected_bytes: usize) -> SourceError {
        SourceError::Truncated {
            name: self.name.clone(),
            offset_bytes: self.offset_bytes(),
            found_bytes: self.unread.len(),
            expected_bytes,
        }
    }

    /// Offset of the window's start in the trace.
    fn offset_bytes(&self) -> u64 {
        self.read_bytes - self.unread.len() as u64
    }

    /// Reads until `wanted` bytes are available or there are no more.
    fn refill(&mut self, wanted: usize) {
        self.unread = move_to_front(&mut self.buffer, self.unread.clone());
        while self.unread.len() < wanted && self.fault.is_none() {
            match read_some(&mut self.input, &mut self.buffer[self.unread.end..]) {
                Ok(0) => break,
                Ok(read) => {
                    self.unread.end += read;
                    self.read_bytes += read as u64;
                }
                Err(fault) => self.fault = Some(fault),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns bytes in blocks, then fails.
    struct FailingReader<'a>(&'a [u8], usize);

    impl Read for FailingReader<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.0.is_empty() {
                return Err(io::Error::other("broken"));
            }
            let length = self.1.min(buffer.len());
            self.0.read(&mut buffer[..length])
        }
    }

    #[test]
    fn what_came_before_a_fault_is_handed_out_before_it() {
        let mut bytes = Bytes::new(FailingReader(b"abcde", 2), "t", 4);
        assert!(bytes.at_least(4).unwrap().starts_with(b"abcd"));
        bytes.take(4);
        assert_eq!(bytes.at_least(1).unwrap(), b"e");
        let error = bytes.at_least(2).unwrap_err();
        assert!(
            matches!(
                error,
                SourceError::Read {
                    offset_bytes: 5,
                    ..
                }
            ),
            "{error}"
        );
    }

    proptest! {
        #[test]
        fn every_byte_passes_once(
            text in prop::collection::vec(any::<u8>(), 0..200),
            piece in 1usize..20,
            takes in prop::collection::vec(1usize..16, 1..8),
        ) {
            struct Pieces<'a>(&'a [u8], usize);
            impl Read for Pieces<'_> {
                fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                    let length = self.1.min(buffer.len());
                    self.0.read(&mut buffer[..length])
                }
            }
            let mut bytes = Bytes::new(Pieces(&text, piece), "t", 16);
            let mut passed = Vec::new();
            for &take in takes.iter().cycle() {
                let window = bytes.at_least(take).unwrap();
                let is_last = window.len() < take;
                let taken = take.min(window.len());
                passed.extend_from_slice(&window[..taken]);
                bytes.take(taken);
                if is_last {
                    break;
                }
            }
            prop_assert_eq!(passed, text);
        }
    }
}
