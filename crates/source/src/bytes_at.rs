//! Bytes that are read at any position.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// How the addresses of objects in stores begin.
pub(crate) const OBJECTS: &str = "s3://";

/// What is read at any position: a file, or an object of a store.
pub(crate) trait ReadAt: Send + Sync {
    /// Reads some bytes at a position; none at the end.
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize>;

    /// Fills the buffer from a position on.
    fn read_exact_at(&self, mut buffer: &mut [u8], mut offset_bytes: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.read_at(buffer, offset_bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    buffer = &mut buffer[read..];
                    offset_bytes += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset_bytes)
    }
}
