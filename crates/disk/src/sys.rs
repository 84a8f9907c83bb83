//! The unsafe code of this crate: page-aligned buffers, an `io_uring` that owns the resources of transfers in flight, and
//! accesses to guest RAM whose pages may be inaccessible.
//!
//! Buffers of up to [`SLOT_BYTES`] come from an [`Arena`] that the ring has registered: the kernel then need not look up and
//! pin their pages for each transfer.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering, compiler_fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use std::{mem, slice};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::PollFlags;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use vm_memory::{
    GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _, GuestRegionMmap,
};

/// Alignment of buffers: the largest that direct I/O requires.
const ALIGNMENT: usize = 4096;

/// Bytes of a buffer of an [`Arena`], and how many it has: 4 MiB, half of what a process may pin by default.
pub(crate) const SLOT_BYTES: usize = 128 << 10;
const SLOTS: usize = 32;

/// Memory that is registered with a ring, as buffers.
pub(crate) struct Arena {
    start: NonNull<u8>,
    /// Numbers of the slots that are in no buffer.
    free: Mutex<Vec<usize>>,
}

// SAFETY: an Arena owns its memory, which only its buffers access, each its own slot.
unsafe impl Send for Arena {}
// SAFETY: as above; the numbers of free slots are behind a lock.
unsafe impl Sync for Arena {}

impl Arena {
    fn new() -> Arc<Self> {
        let layout = Self::layout();
        // SAFETY: the layout is not of size 0.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the range was just allocated, and the advice changes no contents. It may be refused.
        let _ = unsafe { madvise(start.as_ptr().cast(), layout.size(), Advice::LinuxHugepage) };
        Arc::new(Self {
            start,
            free: Mutex::new((0..SLOTS).rev().collect()),
        })
    }

    fn layout() -> Layout {
        Layout::from_size_align(SLOTS * SLOT_BYTES, 2 << 20).expect("a multiple of its alignment")
    }

    /// A buffer of that length, at most [`SLOT_BYTES`], with arbitrary contents; `None` if all are in use.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Option<Buffer> {
        assert!(len <= SLOT_BYTES, "{len} bytes in a slot");
        let slot = self.lock().pop()?;
        // SAFETY: the slot lies within the allocation.
        let start = unsafe { self.start.add(slot * SLOT_BYTES) };
        Some(Buffer {
            start,
            capacity: SLOT_BYTES,
            len,
            slot: Some((Arc::clone(self), slot)),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; its buffers hold an Arc of it, so none is left. A kernel that has registered it
        // holds pages of its own.
        unsafe { dealloc(self.start.as_ptr(), Self::layout()) }
    }
}

/// Memory for a transfer, aligned to 4 KiB.
pub struct Buffer {
    start: NonNull<u8>,
    capacity: usize,
    len: usize,
    /// The arena that it is of, and its slot there; otherwise it is an allocation of its own.
    slot: Option<(Arc<Arena>, usize)>,
}

// SAFETY: a Buffer owns its memory alone, and has no thread-bound state.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Returns a zeroed buffer of `len` bytes, at least 1.
    pub fn new(len: usize) -> Self {
        let capacity = len.max(1).next_multiple_of(ALIGNMENT);
        let layout = Self::layout(capacity);
        // SAFETY: the layout is not of size 0.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Self {
            start,
            capacity,
            len,
            slot: None,
        }
    }

    /// Whether it is a slot of this arena.
    pub(crate) fn is_of(&self, arena: Option<&Arc<Arena>>) -> bool {
        let slot = self.slot.as_ref().zip(arena);
        slot.is_some_and(|((own, _), arena)| Arc::ptr_eq(own, arena))
    }

    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, ALIGNMENT).expect("a multiple of its alignment")
    }

    /// Bytes it can be [set](Self::set_len) to hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes the length, up to the capacity. New bytes are arbitrary, but initialised.
    ///
    /// # Panics
    /// Beyond the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(
            len <= self.capacity,
            "{len} bytes in a buffer of {}",
            self.capacity
        );
        self.len = len;
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `capacity >= len` bytes from `start` are ours and were initialised when allocated.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only way to it.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match &self.slot {
            Some((arena, slot)) => arena.lock().push(*slot),
            // SAFETY: allocated with this layout.
            None => unsafe { dealloc(self.start.as_ptr(), Self::layout(self.capacity)) },
        }
    }
}

/// A completion of a [`Ring`].
pub struct RingCompletion {
    /// Token of the submission.
    pub token: u64,
    /// Bytes transferred, or poll events, or an error.
    pub result: io::Result<u32>,
    /// The buffer of a transfer.
    pub buffer: Option<Buffer>,
    /// Whether more will come under this token (of [`Ring::watch`]).
    pub more: bool,
}

/// Token of the removal of a watch, whose completion is not returned.
const UNWATCH: u64 = u64::MAX;

/// Resources of a submission in flight: kept until the kernel has finished with them.
struct Flight {
    token: u64,
    buffer: Option<Buffer>,
    _file: Option<Arc<File>>,
    _timeout: Option<Box<types::Timespec>>,
}

impl Flight {
    fn new(token: u64) -> Self {
        Self {
            token,
            buffer: None,
            _file: None,
            _timeout: None,
        }
    }

    fn of(file: &Arc<File>, token: u64) -> Self {
        Self {
            _file: Some(Arc::clone(file)),
            ..Self::new(token)
        }
    }
}

/// An `io_uring` whose transfers own their buffers and files while they are in flight.
pub struct Ring {
    ring: IoUring,
    /// Whether it was made to be enabled by the thread that uses it.
    disabled: bool,
    /// Registered; `None` if the kernel refused.
    arena: Option<Arc<Arena>>,
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    in_flight: usize,
}

impl Ring {
    /// Makes a ring whose submission queue has `entries` entries (a power of two).
    ///
    /// # Errors
    /// The kernel's error: there is no `io_uring` before Linux 5.11, and it may be disabled
    /// (`/proc/sys/kernel/io_uring_disabled`).
    pub fn new(entries: u32) -> io::Result<Self> {
        let builder = || {
            let mut builder = IoUring::builder();
            builder.setup_cqsize(entries * 4).setup_clamp();
            builder
        };
        // The thread that uses it, and only when it asks, ends the transfers: no interruption for each. Linux 6.1.
        let mut deferred = builder();
        deferred
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag();
        let (ring, disabled) = match deferred.build(entries) {
            Ok(ring) => (ring, true),
            Err(_) => (builder().build(entries)?, false),
        };
        let arena = Arena::new();
        let memory = [libc::iovec {
            iov_base: arena.start.as_ptr().cast(),
            iov_len: Arena::layout().size(),
        }];
        // SAFETY: the memory is the arena's, which is kept as long as the ring; the kernel accesses it only for transfers of
        // its buffers.
        let registered = unsafe { ring.submitter().register_buffers(&memory) };
        Ok(Self {
            ring,
            disabled,
            // It may not be allowed to pin so much.
            arena: registered.is_ok().then_some(arena),
            flights: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
        })
    }

    /// The registered memory, of which to take buffers.
    pub(crate) fn arena(&self) -> Option<&Arc<Arena>> {
        self.arena.as_ref()
    }

    /// Number of transfers and watches in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn push(&mut self, entry: squeue::Entry, flight: Flight) -> io::Result<()> {
        let place = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        self.flights[place] = Some(flight);
        self.in_flight += 1;
        let entry = entry.user_data(place as u64);
        loop {
            // SAFETY: what the entry points to is owned by the flight, which stays until its completion was seen.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return Ok(());
            }
            self.submit()?;
        }
    }

    /// Watches for input (or a hang-up) repeatedly until the watch is [removed](Self::unwatch).
    ///
    /// # Errors
    /// If the kernel accepts no submissions.
    pub fn watch(&mut self, descriptor: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let events = u32::from((PollFlags::IN | PollFlags::RDHUP).bits());
        let entry = opcode::PollAdd::new(types::Fd(descriptor.as_raw_fd()), events)
            .multi(true)
            .build();
        self.push(entry, Flight::new(token))
    }

    /// Removes a watch; its last completion is an error.
    ///
    /// # Errors
    /// If the kernel accepts no submissions.
    pub fn unwatch(&mut self, token: u64) -> io::Result<()> {
        let place = self
            .flights
            .iter()
            .position(|flight| flight.as_ref().is_some_and(|flight| flight.token == token));
        let Some(place) = place else { return Ok(()) };
        let entry = opcode::PollRemove::new(place as u64).build();
        self.push(entry, Flight::new(UNWATCH))
    }

    /// Reads into the buffer from its byte `from` on; `offset` is that byte's place in the file.
    ///
    /// # Errors
    /// If the kernel accepts no submissions; the buffer is lost.
    ///
    /// # Panics
    /// If `from` is beyond the buffer.
    pub fn read(
        &mut self,
        file: &Arc<File>,
        offset: u64,
        mut buffer: Buffer,
        from: usize,
        token: u64,
    ) -> io::Result<()> {
        let rest = &mut buffer[from..];
        let len = u32::try_from(rest.len()).map_err(io::Error::other)?;
        let (fd, start) = (types::Fd(file.as_raw_fd()), rest.as_mut_ptr());
        let entry = if buffer.is_of(self.arena.as_ref()) {
            opcode::ReadFixed::new(fd, start, len, 0)
                .offset(offset)
                .build()
        } else {
            opcode::Read::new(fd, start, len).offset(offset).build()
        };
        let flight = Flight {
            buffer: Some(buffer),
            ..Flight::of(file, token)
        };
        self.push(entry, flight)
    }

    /// Writes the buffer from its byte `from` on, whose position in the file is `offset`.
    ///
    /// # Errors
    /// If the kernel accepts no submissions; the buffer is lost.
    ///
    /// # Panics
    /// If `from` is beyond the buffer.
    pub fn write(
        &mut self,
        file: &Arc<File>,
        offset: u64,
        buffer: Buffer,
        from: usize,
        token: u64,
    ) -> io::Result<()> {
        let rest = &buffer[from..];
        let len = u32::try_from(rest.len()).map_err(io::Error::other)?;
        let (fd, start) = (types::Fd(file.as_raw_fd()), rest.as_ptr());
        let entry = if buffer.is_of(self.arena.as_ref()) {
            let write = opcode::WriteFixed::new(fd, start, len, 0);
            write.offset(offset).build()
        } else {
            let write = opcode::Write::new(fd, start, len);
            write.offset(offset).build()
        };
        let flight = Flight {
            buffer: Some(buffer),
            ..Flight::of(file, token)
        };
        self.push(entry, flight)
    }

    /// Makes the file's data stable.
    ///
    /// # Errors
    /// If the kernel accepts no submissions.
    pub fn sync(&mut self, file: &Arc<File>, token: u64) -> io::Result<()> {
        let entry = opcode::Fsync::new(types::Fd(file.as_raw_fd()))
            .flags(types::FsyncFlags::DATASYNC)
            .build();
        self.push(entry, Flight::of(file, token))
    }

    /// `fallocate(2)` with these mode bits.
    ///
    /// # Errors
    /// If the kernel accepts no submissions.
    pub fn allocate(
        &mut self,
        file: &Arc<File>,
        mode: i32,
        offset: u64,
        bytes: u64,
        token: u64,
    ) -> io::Result<()> {
        let entry = opcode::Fallocate::new(types::Fd(file.as_raw_fd()), bytes)
            .offset(offset)
            .mode(mode)
            .build();
        self.push(entry, Flight::of(file, token))
    }

    /// Completes under `token` after `after`, once.
    ///
    /// # Errors
    /// If the kernel accepts no submissions.
    pub fn alarm(&mut self, after: Duration, token: u64) -> io::Result<()> {
        let timeout = Box::new(types::Timespec::from(after));
        let entry = opcode::Timeout::new(&raw const *timeout).build();
        let flight = Flight {
            _timeout: Some(timeout),
            ..Flight::new(token)
        };
        self.push(entry, flight)
    }

    /// Submits the queued I/O to the kernel.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn submit(&mut self) -> io::Result<()> {
        self.enter(0)
    }

    /// Submits the queued I/O to the kernel and waits for a completion.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn wait(&mut self) -> io::Result<()> {
        self.enter(1)
    }

    fn enter(&mut self, want: usize) -> io::Result<()> {
        if self.disabled {
            self.ring.submitter().register_enable_rings()?;
            self.disabled = false;
        }
        loop {
            match self.ring.submit_and_wait(want) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The completion queue is full: its entries must be consumed first.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) =>
                {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The next completion, if there is one.
    #[expect(
        clippy::should_implement_trait,
        reason = "more may come after nothing has"
    )]
    pub fn next(&mut self) -> Option<RingCompletion> {
        loop {
            let entry = self.ring.completion().next()?;
            let place = usize::try_from(entry.user_data()).ok()?;
            let more = io_uring::cqueue::more(entry.flags());
            let slot = self.flights.get_mut(place)?;
            let (token, buffer) = if more {
                (slot.as_ref()?.token, None)
            } else {
                let flight = slot.take()?;
                self.free.push(place);
                self.in_flight -= 1;
                (flight.token, flight.buffer)
            };
            if token == UNWATCH {
                continue;
            }
            let result = u32::try_from(entry.result())
                .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
            return Some(RingCompletion {
                token,
                result,
                buffer,
                more,
            });
        }
    }
}

/// Drops the page-table entries of a mapping of guest RAM. The contents of the RAM stay.
pub(crate) fn drop_page_table_entries(region: &GuestRegionMmap<()>) {
    if region.file_offset().is_none() {
        return; // Anonymous: its contents would go.
    }
    // SAFETY: the range is a mapping that `region` owns, made with MAP_SHARED of a file (as all with a file offset
    // are), so that its contents are the file's and are as they were afterwards. It is only accessed with volatile
    // operations.
    let dropped = unsafe { madvise(region.as_ptr().cast(), region.size(), Advice::LinuxDontNeed) };
    debug_assert!(dropped.is_ok(), "a mapping of ours: {dropped:?}");
}

thread_local! {
    /// The RAM that this thread accesses; null again if a page of it was inaccessible.
    static ACCESSED: AtomicPtr<GuestMemoryMmap<()>> = const { AtomicPtr::new(ptr::null_mut()) };
}

/// What handled SIGBUS before.
static EARLIER_ACTION: OnceLock<libc::sigaction> = OnceLock::new();

/// Lets [`without_bus_errors`] catch SIGBUS, in all threads.
pub(crate) fn handle_bus_errors() -> io::Result<()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if EARLIER_ACTION.get().is_some() {
        return Ok(());
    }
    // SAFETY: a sigaction is integers and a handler that may be null.
    let (mut earlier, mut action) = unsafe { mem::zeroed::<(libc::sigaction, libc::sigaction)>() };
    // SAFETY: it only writes to `earlier`.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut earlier) } != 0 {
        return Err(io::Error::last_os_error());
    }
    EARLIER_ACTION.get_or_init(|| earlier);
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature of SA_SIGINFO and only does what is safe in a handler.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Calls `access`, which may access this RAM and nothing else that raises SIGBUS. `None` if a page of the RAM was
/// inaccessible: what was read then is undefined, and of what was written, anything may be missing. The next access tries again.
///
/// As libwayland does for buffers of its clients: the handler maps private memory in place of the RAM, with which the access
/// ends, and then the RAM is mapped again. Nothing else may access the same mapping meanwhile.
pub(crate) fn without_bus_errors<T>(
    ram: &GuestMemoryMmap<()>,
    access: impl FnOnce(&GuestMemoryMmap<()>) -> T,
) -> Option<T> {
    /// Also if `access` panics, the handler uses the RAM no more.
    struct Access<'a>(&'a AtomicPtr<GuestMemoryMmap<()>>);

    impl Drop for Access<'_> {
        fn drop(&mut self) {
            self.0.store(ptr::null_mut(), Ordering::Relaxed);
        }
    }

    ACCESSED.with(|accessed| {
        let entered = Access(accessed);
        accessed.store(ptr::from_ref(ram).cast_mut(), Ordering::Relaxed);
        // The handler runs in this thread.
        compiler_fence(Ordering::SeqCst);
        let result = access(ram);
        compiler_fence(Ordering::SeqCst);
        let whole = !accessed.load(Ordering::Relaxed).is_null();
        drop(entered);
        if !whole {
            map_again(ram);
        }
        whole.then_some(result)
    })
}

extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo of SIGBUS, which has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    let caught = ACCESSED.with(|accessed| {
        // SAFETY: `without_bus_errors` has borrowed it, and sets the pointer to null before the borrow ends.
        let ram = unsafe { accessed.load(Ordering::Relaxed).as_ref() };
        let caught = ram.is_some_and(|ram| {
            let holds = |region: &GuestRegionMmap<()>| {
                let start = region.as_ptr().addr();
                (start..start + region.size()).contains(&address)
            };
            ram.iter().any(holds) && files(ram).all(|(region, _)| map_private(region))
        });
        if caught {
            accessed.store(ptr::null_mut(), Ordering::Relaxed);
        }
        caught
    });
    if !caught {
        // What the earlier action does, the signal does when it is raised again: by the access, which is repeated, or here if no
        // access of ours raised it.
        let earlier = EARLIER_ACTION.get().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: an action that sigaction(2) returned, and a siginfo as above.
        unsafe {
            libc::sigaction(libc::SIGBUS, earlier, ptr::null_mut());
            if (*info).si_code <= 0 || (*info).si_code == libc::BUS_MCEERR_AO {
                libc::raise(libc::SIGBUS);
            }
        }
    }
}

/// The regions that are mapped files.
fn files(
    ram: &GuestMemoryMmap<()>,
) -> impl Iterator<Item = (&GuestRegionMmap<()>, &vm_memory::FileOffset)> {
    ram.iter()
        .filter_map(|region| Some((region, region.file_offset()?)))
}

const PROTECTION: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Replaces the mapping of a region by private memory of zeros.
fn map_private(region: &GuestRegionMmap<()>) -> bool {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the range is a mapping that `region` owns, and is only accessed with volatile operations.
    unsafe { mmap_anonymous(region.as_ptr().cast(), region.size(), PROTECTION, flags) }.is_ok()
}

/// Replaces what the handler mapped by the RAM. If that is refused, later accesses fail as well.
#[cold]
fn map_again(ram: &GuestMemoryMmap<()>) {
    let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
    for (region, place) in files(ram) {
        let (start, bytes) = (region.as_ptr().cast(), region.size());
        // SAFETY: as above.
        let mapped = unsafe { mmap(start, bytes, PROTECTION, flags, place.file(), place.start()) };
        let mapped = mapped.or_else(|_| {
            let empty = memfd_create("no-ram", MemfdFlags::CLOEXEC)?;
            // SAFETY: as above.
            unsafe { mmap(start, bytes, PROTECTION, flags, empty, 0) }
        });
        if mapped.is_err() {
            // The guest's data would go to private memory.
            std::process::abort();
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still write to buffers in flight: they live on unless it is done with them. Of the rest it has
        // copies since it was submitted.
        for flight in self.flights.iter_mut().filter_map(Option::take) {
            if flight.buffer.is_some() {
                mem::forget(flight);
            }
        }
    }
}
