//! The memory a server and a client share: mapping it, and every access to it.
//!
//! Each side that maps a region can write all of it at any time. So words are atomics, each load is a copy to be
//! validated, and pages are copied; no reference to shared bytes is formed, except for the slots that belong to the
//! client ([`Region::slot_mut`]).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use plimsoll_hcache::{PAGE_BYTES, Page};
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::protocol::{COMPLETION_WORDS, Geometry, MAGIC, SUBMISSION_WORDS, VERSION};
use crate::words::{SharedWords, Word};

/// A mapping of the memory that a server and a client share.
pub struct Region {
    base: NonNull<u8>,
    geometry: Geometry,
}

// SAFETY: the mapping belongs to no thread, and what lies in it is only touched through atomics and copies.
unsafe impl Send for Region {}

impl Region {
    const SEALS: SealFlags = SealFlags::SHRINK
        .union(SealFlags::GROW)
        .union(SealFlags::SEAL);

    /// Creates a region of zeroes after its head, of a size that nobody can change any more, and the descriptor
    /// by which it is shared.
    ///
    /// # Errors
    ///
    /// The kernel's, if memory or descriptors have run out.
    pub fn create(geometry: Geometry) -> io::Result<(Self, OwnedFd)> {
        let memory = memfd_create(
            "hcache-ring",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        ftruncate(&memory, geometry.region_bytes() as u64)?;
        fcntl_add_seals(&memory, Self::SEALS)?;
        let region = Self::map(&memory, geometry)?;
        for (word, value) in [
            (Word::Magic, MAGIC),
            (Word::Version, VERSION),
            (Word::Entries, geometry.entries()),
            (Word::Slots, geometry.slots()),
        ] {
            region.word(word).store(value, Relaxed);
        }
        Ok((region, memory))
    }

    /// Maps a region that another process created.
    ///
    /// # Errors
    ///
    /// `InvalidData` if it is not of that geometry, or its size could still be changed; else the kernel's.
    pub fn map(memory: impl AsFd, geometry: Geometry) -> io::Result<Self> {
        let bytes = geometry.region_bytes();
        let seals = fcntl_get_seals(&memory)?;
        let size = u64::try_from(fstat(&memory)?.st_size).unwrap_or(0);
        if size != bytes as u64 || !seals.contains(Self::SEALS) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where the kernel likes it touches no memory in use. The file is `bytes` long and sealed
        // so, hence no access to the mapping is past its end.
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
        Ok(Self { base, geometry })
    }

    /// Its geometry at its creation, whatever its head contains now.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// A word of its head.
    pub fn word(&self, word: Word) -> &AtomicU32 {
        // SAFETY: the offset is a multiple of 4 inside the first of the mapping's pages, which lives as long as
        // `self`. All accesses to it, here and (as far as the protocol goes) on the other side, are atomic.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(word as usize).cast()) }
    }

    /// Copies an entry of the submission ring, each of its words read once.
    pub fn submission(&self, position: u32) -> [u64; SUBMISSION_WORDS] {
        self.words(self.submission_at(position))
            .each_ref()
            .map(|word| word.load(Relaxed))
    }

    /// Writes an entry of the submission ring.
    pub fn write_submission(&self, position: u32, entry: &[u64; SUBMISSION_WORDS]) {
        let words = self.words::<SUBMISSION_WORDS>(self.submission_at(position));
        words
            .iter()
            .zip(entry)
            .for_each(|(word, value)| word.store(*value, Relaxed));
    }

    /// Copies an entry of the completion ring, each of its words read once.
    pub fn completion(&self, position: u32) -> [u64; COMPLETION_WORDS] {
        self.words(self.completion_at(position))
            .each_ref()
            .map(|word| word.load(Relaxed))
    }

    /// Writes an entry of the completion ring.
    pub fn write_completion(&self, position: u32, entry: &[u64; COMPLETION_WORDS]) {
        let words = self.words::<COMPLETION_WORDS>(self.completion_at(position));
        words
            .iter()
            .zip(entry)
            .for_each(|(word, value)| word.store(*value, Relaxed));
    }

    fn submission_at(&self, position: u32) -> usize {
        let place = position & (self.geometry.entries() - 1);
        Geometry::SUBMISSIONS_AT + place as usize * size_of::<[u64; SUBMISSION_WORDS]>()
    }

    fn completion_at(&self, position: u32) -> usize {
        let place = position & (self.geometry.entries() - 1);
        self.geometry.completions_at() + place as usize * size_of::<[u64; COMPLETION_WORDS]>()
    }

    fn words<const N: usize>(&self, at: usize) -> &[AtomicU64; N] {
        assert!(at.is_multiple_of(8) && at + 8 * N <= self.geometry.region_bytes());
        // SAFETY: aligned and inside the mapping, as just asserted, which lives as long as `self`; atomics have the
        // layout of their integers, and accesses to them are atomic, as in `word`.
        unsafe { &*self.base.as_ptr().add(at).cast::<[AtomicU64; N]>() }
    }

    fn slot_at(&self, slot: u32) -> *mut u8 {
        assert!(
            slot < self.geometry.slots(),
            "slot {slot} of {}",
            self.geometry.slots()
        );
        let at = self.geometry.slots_at() + slot as usize * PAGE_BYTES;
        // SAFETY: the mapping reaches to the end of the last slot.
        unsafe { self.base.as_ptr().add(at) }
    }

    /// Copies a slot into a page.
    ///
    /// # Panics
    ///
    /// If there is no such slot; so does [`write_slot`](Self::write_slot).
    pub fn read_slot(&self, slot: u32, page: &mut Page) {
        let from = self.slot_at(slot);
        // SAFETY: 4096 bytes of the mapping, and a page of ours that cannot overlap it. The other process may write the
        // slot meanwhile: bytes of any value are a page, and they are judged, if at all, where they were copied to.
        unsafe { copy_page(from, page.as_mut_ptr()) }
    }

    /// Copies a page into a slot.
    pub fn write_slot(&self, slot: u32, page: &Page) {
        let to = self.slot_at(slot);
        // SAFETY: a page of ours, and 4096 bytes of the mapping that cannot overlap it. What the other process reads or
        // writes there meanwhile is its affair: nothing here reads it back.
        unsafe { copy_page(page.as_ptr(), to) }
    }

    /// Returns the memory of the slots to the kernel, so that a process that keeps the descriptor does not keep it; they read as
    /// zeros. Only for a client that has closed its socket or violated the protocol: any other may still read pages that it got. The
    /// rings stay.
    pub fn empty_slots(&self) {
        let slots_at = self.geometry.slots_at();
        let bytes = self.geometry.region_bytes() - slots_at;
        // SAFETY: pages inside the mapping, to which there is no reference in the server. The kernel changes them as another
        // process might. Where it refuses, the memory goes with the last descriptor.
        let _ = unsafe {
            madvise(
                self.base.as_ptr().add(slots_at).cast(),
                bytes,
                Advice::LinuxRemove,
            )
        };
    }

    /// A slot as a page. Only for the client, who trusts the server not to touch a slot between its completion
    /// and its next submission, and for slots that are in no entry in flight.
    pub(crate) fn slot_mut(&mut self, slot: u32) -> &mut Page {
        // SAFETY: 4096 bytes of the mapping, alive as long as `self`, which is borrowed mutably, so no other
        // reference to the region exists in this process. The server writes a slot only while an entry names
        // it, by the protocol.
        unsafe { &mut *self.slot_at(slot).cast::<Page>() }
    }

    /// Overwrites bytes anywhere in the region, as a hostile other side can: for tests and fuzzing.
    ///
    /// # Panics
    ///
    /// If they reach past the end.
    pub fn overwrite(&self, at: usize, bytes: &[u8]) {
        assert!(
            at.checked_add(bytes.len())
                .is_some_and(|end| end <= self.geometry.region_bytes())
        );
        // SAFETY: inside the mapping, as just asserted; `bytes` are ours and do not overlap it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(at), bytes.len()) }
    }
}

/// Copies a page that another process may write, or read, meanwhile.
///
/// To the compiler this is no access to the page that it could repeat, leave out or assume to be alone, hence no data
/// race; atomic loads and stores of its words would be none either, but take 100 ns more.
///
/// # Safety
/// Both are valid for 4096 bytes, one for reads and one for writes, and do not overlap.
unsafe fn copy_page(from: *const u8, to: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: copies 4096 bytes between what the caller has promised; the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") PAGE_BYTES => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for at in 0..PAGE_BYTES / 8 {
        let (from, to) = (from.cast::<[u8; 8]>(), to.cast::<[u8; 8]>());
        // SAFETY: inside what the caller has promised.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) }
    }
}

impl SharedWords for Region {
    fn word(&self, word: Word) -> &AtomicU32 {
        Self::word(self, word)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let bytes = self.geometry.region_bytes();
        // SAFETY: the whole of a mapping that is ours; every reference into it borrowed `self`. munmap(2) of a
        // whole mapping does not fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), bytes) };
    }
}
