//! The memory shared by a ring's writer and reader: its mapping and all accesses to it.
//!
//! Each process that maps it can write all of it at any time. All words are therefore atomics, and no reference to
//! shared bytes is created.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Seals that fix the size of a mapped file.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A shared mapping of words.
pub(crate) struct SharedMapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is not tied to a thread, and its contents are accessed only through atomics.
unsafe impl Send for SharedMapping {}

impl SharedMapping {
    /// Maps a memory file of words whose size is sealed.
    ///
    /// # Errors
    ///
    /// `InvalidData` if it is shorter than `bytes_min` or not a multiple of 8 bytes, or if its size could change;
    /// otherwise the kernel's error.
    pub(crate) fn map(memory: impl AsFd, bytes_min: usize) -> io::Result<Self> {
        let bytes = usize::try_from(fstat(&memory)?.st_size).unwrap_or(0);
        let seals = fcntl_get_seals(&memory)?;
        if bytes < bytes_min.max(1) || !bytes.is_multiple_of(8) || !seals.contains(SEALS) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address chosen by the kernel affects no memory in use. The file has `bytes` bytes
        // and its size is sealed, so no access to the mapping is past its end.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                memory,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, bytes })
    }

    /// Length of the mapping in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The 64-bit word at a byte offset.
    ///
    /// # Panics
    ///
    /// If it does not lie within the mapping or the offset is not a multiple of 8.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < self.bytes);
        // SAFETY: the offset is a multiple of 8 below the mapping's length, which is also a multiple of 8, and pages
        // are aligned to more; the mapping lives as long as `self`. All accesses to it here are atomic, and by the
        // protocol of the ring also those of the other side.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The 32-bit word at a byte offset; no other access in this program is to half of a 64-bit word.
    ///
    /// # Panics
    ///
    /// If it does not lie within the mapping or the offset is not a multiple of 4.
    pub(crate) fn half(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset < self.bytes);
        // SAFETY: as for `word`; the mapping's length is a multiple of 8, so the word does not extend past it.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `bytes` are the mapping's own, and no borrow of it outlives `self`. It is unmapped only
        // once.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
