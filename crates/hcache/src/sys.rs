//! The memory of a store: one reserved mapping, divided into frames of a page each, with one safe function for each
//! operation on it; elsewhere in this crate there is no unsafe code.
//!
//! What makes these functions safe is an invariant of the crate: **a frame has one holder.** A frame's number
//! comes from the free list, and from then on one shard (under its lock), one table of shared contents (under
//! its lock), or one thread holds it, until it is pushed to the free list again. Bounds are checked here.
#![allow(unsafe_code)]

use std::io;
use std::ops::{Index, IndexMut, Range};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::sync::Arc;
use crate::{PAGE_BYTES, Page};

/// Bytes of a huge page.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Frames of a huge page.
pub(crate) const HUGE_PAGE_FRAMES: u32 = 512;

/// Frames in one private mapping. Reserving uses no memory; a frame takes its 4 KiB when first written.
pub(crate) struct Slab {
    /// Start of the mapping.
    mapping: NonNull<u8>,
    mapping_bytes: usize,
    /// First frame, on a huge page's border within the mapping.
    base: NonNull<u8>,
    frames: u32,
}

// SAFETY: the mapping belongs to the slab alone, and its frames are handed out under the module's invariant.
unsafe impl Send for Slab {}
// SAFETY: as above: two threads never hold the same frame.
unsafe impl Sync for Slab {}

impl Slab {
    /// Reserves `frames` frames; `huge` requests huge pages.
    pub(crate) fn reserve(frames: u32, huge: bool) -> io::Result<Self> {
        let bytes = frames as usize * PAGE_BYTES;
        let mapping_bytes = bytes + HUGE_PAGE_BYTES;
        // SAFETY: a new private mapping, at an address the kernel chooses.
        let mapping = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapping_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let mapping = NonNull::new(mapping.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let skip = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: `skip` is below HUGE_PAGE_BYTES, which the mapping has beyond the frames.
        let base = unsafe { mapping.add(skip) };
        let advice = if huge {
            Advice::LinuxHugepage
        } else {
            Advice::LinuxNoHugepage
        };
        // SAFETY: the range is the slab's own; the advice changes no contents. It is a hint: where it is
        // refused the frames work as well.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, advice) };
        Ok(Self {
            mapping,
            mapping_bytes,
            base,
            frames,
        })
    }

    #[inline(always)]
    fn page(&self, frame: u32) -> *mut Page {
        assert!(frame < self.frames, "frame {frame} of {}", self.frames);
        // SAFETY: within the mapping, as just checked.
        unsafe { self.base.add(frame as usize * PAGE_BYTES).as_ptr().cast() }
    }

    /// Reads a frame that the caller holds.
    #[inline(always)]
    pub(crate) fn read<R>(&self, frame: u32, read: impl FnOnce(&Page) -> R) -> R {
        // SAFETY: in bounds, any bytes are a page, and its holder is the only one who uses it.
        read(unsafe { &*self.page(frame) })
    }

    /// Writes a frame that the caller holds.
    #[inline(always)]
    pub(crate) fn write<R>(&self, frame: u32, write: impl FnOnce(&mut Page) -> R) -> R {
        // SAFETY: as in `read`.
        write(unsafe { &mut *self.page(frame) })
    }

    /// Copies one frame to another; the caller holds both.
    pub(crate) fn copy(&self, from: u32, to: u32) {
        assert_ne!(from, to);
        // SAFETY: in bounds and different, so they do not overlap; their holder is the caller.
        unsafe { std::ptr::copy_nonoverlapping(self.page(from), self.page(to), 1) };
    }

    /// Prefetches the first lines of a frame.
    #[inline(always)]
    pub(crate) fn prefetch(&self, frame: u32) {
        let page = self.page(frame).cast::<u8>();
        for line in 0..4 {
            prefetch(page.wrapping_add(line * 64));
        }
    }

    /// Returns the memory of unused frames to the kernel; they read as zeros afterwards.
    pub(crate) fn give_back(&self, frames: Range<u32>) -> io::Result<()> {
        if frames.is_empty() {
            return Ok(());
        }
        let start = self.page(frames.start);
        self.page(frames.end - 1);
        let bytes = frames.len() * PAGE_BYTES;
        // SAFETY: the range lies in the mapping, and no frame of it is in use.
        unsafe { rustix::mm::madvise(start.cast(), bytes, Advice::LinuxDontNeed)? };
        Ok(())
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the mapping is the slab's own, and whoever holds frames keeps the slab alive.
        let _ = unsafe { rustix::mm::munmap(self.mapping.as_ptr().cast(), self.mapping_bytes) };
    }
}

#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that the program can see and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = address;
    }
}

/// A frame full of items of one type: a small array that owns its frame.
pub(crate) struct Block<T: Copy> {
    items: NonNull<T>,
    frame: u32,
    slab: Arc<Slab>,
}

// SAFETY: a block owns its items, as a `Box<[T]>` would.
unsafe impl<T: Copy + Send> Send for Block<T> {}
// SAFETY: as above.
unsafe impl<T: Copy + Sync> Sync for Block<T> {}

impl<T: Copy> Block<T> {
    /// Number of items of a block.
    pub(crate) const ITEMS: usize = {
        assert!(size_of::<T>() > 0 && align_of::<T>() <= PAGE_BYTES);
        PAGE_BYTES / size_of::<T>()
    };

    /// Makes a block of a frame that the caller held, with all its items set to `value`.
    pub(crate) fn new(slab: &Arc<Slab>, frame: u32, value: T) -> Self {
        let items = NonNull::new(slab.page(frame).cast::<T>()).expect("a mapping is not at zero");
        for i in 0..Self::ITEMS {
            // SAFETY: ITEMS items fit the frame, which is aligned for them and held by this block.
            unsafe { items.add(i).write(value) };
        }
        Self {
            items,
            frame,
            slab: slab.clone(),
        }
    }

    /// The frame it occupies.
    pub(crate) fn frame(&self) -> u32 {
        self.frame
    }

    /// Releases its frame.
    pub(crate) fn into_frame(self) -> u32 {
        self.frame
    }

    /// Moves it to another frame, which the caller held; returns the old one.
    pub(crate) fn relocate(&mut self, to: u32) -> u32 {
        self.slab.copy(self.frame, to);
        self.items =
            NonNull::new(self.slab.page(to).cast::<T>()).expect("a mapping is not at zero");
        std::mem::replace(&mut self.frame, to)
    }

    /// Prefetches the cache line at this offset in bytes from an item's beginning.
    #[inline(always)]
    pub(crate) fn prefetch(&self, index: usize, offset_bytes: usize) {
        let item = self.items.as_ptr().wrapping_add(index).cast::<u8>();
        prefetch(item.wrapping_add(offset_bytes));
    }
}

impl<T: Copy> Index<usize> for Block<T> {
    type Output = T;

    #[inline(always)]
    fn index(&self, index: usize) -> &T {
        assert!(index < Self::ITEMS);
        // SAFETY: in bounds, written by `new`, and borrowed with the block.
        unsafe { self.items.add(index).as_ref() }
    }
}

impl<T: Copy> IndexMut<usize> for Block<T> {
    #[inline(always)]
    fn index_mut(&mut self, index: usize) -> &mut T {
        assert!(index < Self::ITEMS);
        // SAFETY: in bounds, written by `new`, and borrowed with the block.
        unsafe { self.items.add(index).as_mut() }
    }
}
