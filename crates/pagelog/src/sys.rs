//! The memory shared by a ring's writer and reader: mapping it, and every access to it.
//!
//! Each process that maps it can write all of it at any time. So all words are atomics, and no reference to shared bytes
//! is created.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// What keeps a mapped file as long as it is.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A shared mapping of words.
pub(crate) struct Shared {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and what lies in it is only touched through atomics.
unsafe impl Send for Shared {}

impl Shared {
    /// Maps a memory file of some words whose size is sealed.
    ///
    /// # Errors
    ///
    /// `InvalidData` if it is shorter than `bytes_min` or no multiple of 8 bytes, or if its size could change; else the kernel's.
    pub(crate) fn map(memory: impl AsFd, bytes_min: usize) -> io::Result<Self> {
        let bytes = usize::try_from(fstat(&memory)?.st_size).unwrap_or(0);
        let seals = fcntl_get_seals(&memory)?;
        if bytes < bytes_min.max(1) || !bytes.is_multiple_of(8) || !seals.contains(SEALS) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where the kernel likes it touches no memory in use. The file has `bytes` bytes and is
        // sealed so, hence no access to the mapping is past its end.
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

    /// Bytes that are mapped.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The word of 64 bits at an offset of bytes.
    ///
    /// # Panics
    ///
    /// If it does not lie in the mapping at a multiple of 8.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < self.bytes);
        // SAFETY: the offset is a multiple of 8 below the mapping's length, which is one too, and pages are aligned to
        // more; the mapping lives as long as `self`. Here all accesses to it are atomic, and by the protocol of the
        // ring those of the other side.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The word of 32 bits at an offset of bytes; no other access here is to half of a word of 64 bits.
    ///
    /// # Panics
    ///
    /// If it does not lie in the mapping at a multiple of 4.
    pub(crate) fn half(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset < self.bytes);
        // SAFETY: as for `word`; the mapping's length is a multiple of 8, so the word does not reach past it.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: `base` and `bytes` are the mapping's own, and no borrow of it outlives `self`. It is unmapped once.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
