//! Progress of reading a trace, for progress bars.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of bytes read of a trace as stored, before decompression. Clones share the count.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    read_bytes: Arc<AtomicU64>,
    total_bytes: Option<u64>,
}

impl Progress {
    pub(crate) fn of(total_bytes: Option<u64>) -> Self {
        Self {
            read_bytes: Arc::default(),
            total_bytes,
        }
    }

    /// Bytes read so far; may be ahead of the returned references by the size of some buffers.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Length of the file in bytes; `None` for a pipe.
    pub fn total_bytes(&self) -> Option<u64> {
        self.total_bytes
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Marks everything as read.
    pub(crate) fn complete(&self) {
        if let Some(total_bytes) = self.total_bytes {
            self.read_bytes.store(total_bytes, Ordering::Relaxed);
        }
    }
}

/// A reader that counts its bytes in a [`Progress`].
pub(crate) struct CountingReader<R> {
    pub(crate) input: R,
    pub(crate) progress: Progress,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.progress.add(read as u64);
        Ok(read)
    }
}
