//! The interface of writers of a format.

use std::io::{self, Write};

use plimsoll_flow::ReferenceBatch;

/// Writes the references of a format.
pub(crate) trait ContentWriter {
    /// Writes the header before the first reference.
    fn begin(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let _ = out;
        Ok(())
    }

    /// Writes a batch's references, or buffers them.
    fn write(&mut self, batch: &ReferenceBatch, out: &mut dyn Write) -> io::Result<()>;

    /// Writes the buffered references and the end of the trace.
    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let _ = out;
        Ok(())
    }
}
