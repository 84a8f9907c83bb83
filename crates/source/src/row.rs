//! A row of the table of formats.

use std::io;
use std::sync::Arc;

use plimsoll_flow::PageSize;

use crate::bytes_at::ReadAt;
use crate::compression::DecompressedReader;
use crate::lines::{BYTE_ORDER_MARK, is_empty_line};
use crate::progress::Progress;
use crate::spans::Reading;
use crate::writing::ContentWriter;
use crate::{Options, SourceError, TraceOption};

/// A row of the table.
pub(crate) struct FormatRow {
    /// The name on the command line.
    pub(crate) name: &'static str,
    /// Whether a file's name identifies the format, by its extension without that of a compression and by the part
    /// before.
    pub(crate) is_named: fn(&str, Option<&str>) -> bool,
    /// Whether the first bytes of a trace are of this format.
    pub(crate) is_head: fn(&Head) -> bool,
    /// Formats by whose names files of this one go as well; their content decides.
    pub(crate) also_named: &'static [&'static str],
    /// The options that it uses, besides the page size.
    pub(crate) options: &'static [TraceOption],
    pub(crate) opening: Opening,
    /// Constructor of its writer, if it can be written.
    pub(crate) writer: Option<MakeWriter>,
}

/// Creates a writer of a trace with pages of that size.
pub(crate) type MakeWriter = fn(PageSize) -> io::Result<Box<dyn ContentWriter>>;

/// A reader of a trace's references that borrows its bytes.
pub(crate) type BoxedReading<'a> = Box<dyn Reading + Send + 'a>;

/// Opens a file or an object of a length in bytes.
pub(crate) type OpenSeeking = fn(
    Arc<dyn ReadAt>,
    u64,
    &str,
    &Progress,
    &Options,
) -> Result<BoxedReading<'static>, SourceError>;

/// The way in which a format is read.
pub(crate) enum Opening {
    /// From beginning to end.
    Stream(
        for<'a> fn(DecompressedReader<'a>, &str, &Options) -> Result<BoxedReading<'a>, SourceError>,
    ),
    /// From a file or an object of the given length in bytes, in any order. Such a file begins with `magic`.
    Seek {
        magic: &'static [u8],
        open: OpenSeeking,
    },
}

/// The first bytes of a trace. It may end anywhere.
pub(crate) struct Head<'a> {
    pub(crate) bytes: &'a [u8],
    /// Whether it contains no zero bytes.
    pub(crate) is_text: bool,
    /// For a text, the first line that is neither empty nor a comment.
    pub(crate) line: Option<&'a [u8]>,
}

impl<'a> Head<'a> {
    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        let is_text = !bytes.contains(&0);
        let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
        let mut lines = text.split(|&byte| byte == b'\n');
        let line = lines
            .find(|line| !is_empty_line(line) && !line.starts_with(b"Input file "))
            .filter(|_| is_text);
        Self {
            bytes,
            is_text,
            line,
        }
    }

    /// Whether the first line with content satisfies a test.
    pub(crate) fn line_is(&self, test: impl FnOnce(&[u8]) -> bool) -> bool {
        self.line.is_some_and(test)
    }
}
