//! What a format that is written has besides its row.

use std::io::{self, Write};

use plimsoll_flow::ReferenceBatch;

/// What writes the references of a format.
pub(crate) trait ContentWriter {
    /// Writes what stands before the first reference.
    fn begin(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let _ = out;
        Ok(())
    }

    /// Writes a batch's references, or holds them back.
    fn write(&mut self, batch: &ReferenceBatch, out: &mut dyn Write) -> io::Result<()>;

    /// Writes what is held back, and the end.
    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let _ = out;
        Ok(())
    }
}
