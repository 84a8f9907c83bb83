//! What Rust cannot check: ioctls, swap areas, mapped files, an instruction of no name.
#![allow(unsafe_code)]

use std::arch::asm;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output};
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes of `struct dm_ioctl`, the head of every request to the device mapper.
pub const DM_HEAD_BYTES: usize = 312;
/// Where its field `data_size` lies.
const DM_DATA_SIZE_AT: usize = 12;
/// `FITRIM`: `_IOWR('X', 121, struct fstrim_range)`.
const FITRIM: libc::Ioctl = 0xc018_5879;

/// Sends request `number` to the device mapper; `request` begins with a `struct dm_ioctl`
/// whose `data_size` is the length of the whole, and holds the answer afterwards.
pub fn device_mapper(control: &File, number: u8, request: &mut [u8]) -> io::Result<()> {
    assert!(request.len() >= DM_HEAD_BYTES);
    let (size, _) = request[DM_DATA_SIZE_AT..]
        .split_first_chunk()
        .expect("a whole head");
    assert_eq!(u32::from_ne_bytes(*size).try_into(), Ok(request.len()));
    // `_IOWR(0xfd, number, struct dm_ioctl)`.
    let command = 0xc138_fd00 | libc::Ioctl::from(number);
    // SAFETY: the kernel reads and writes at most `data_size` bytes, just compared with the
    // length of `request`, which is borrowed mutably; all bytes are valid values of it.
    let status = unsafe { libc::ioctl(control.as_raw_fd(), command, request.as_mut_ptr()) };
    check(status.into())
}

/// Discards the unused blocks of the file system of `directory` (`fstrim`); returns their size in bytes.
pub fn trim(directory: &File) -> io::Result<u64> {
    // `struct fstrim_range`: start, length, smallest extent.
    let mut range = [0, u64::MAX, 0];
    // SAFETY: the kernel reads and writes three words of 64 bits, which is what `range` is.
    let status = unsafe { libc::ioctl(directory.as_raw_fd(), FITRIM, range.as_mut_ptr()) };
    check(status.into())?;
    Ok(range[1])
}

/// Swaps to the area on `device`, which has a swap header.
pub fn swap_on(device: &CStr) -> io::Result<()> {
    // SAFETY: the call reads a string that ends with a zero, and keeps nothing of it.
    let status = unsafe { libc::syscall(libc::SYS_swapon, device.as_ptr(), 0) };
    check(status)
}

/// Runs a program below another root directory, and returns what it wrote.
pub fn run_in_root(command: &mut Command, root: &Path) -> io::Result<Output> {
    let root = CString::new(root.as_os_str().as_bytes())?;
    let change = move || {
        // SAFETY: both calls read a string that ends with a zero, and keep nothing of it.
        let status = unsafe { libc::chroot(root.as_ptr()) | libc::chdir(c"/".as_ptr()) };
        check(status.into())
    };
    // SAFETY: between fork and exec it only makes two system calls, and allocates nothing.
    unsafe { command.pre_exec(change) }.output()
}

/// Marks this place of the run for who watches each instruction: `nopl DISP32(%rax,%rax,1)` whose
/// DISP32 is `0x4d415200` and `ID`. A processor does nothing.
pub fn mark<const ID: u8>() {
    // SAFETY: a no-operation of 8 bytes, which touches neither registers nor flags nor memory. What is
    // done to memory before it in the program is done before it.
    unsafe {
        asm!(
            ".byte 0x0f, 0x1f, 0x84, 0x00, {id}, 0x52, 0x41, 0x4d",
            id = const ID,
            options(nostack, preserves_flags)
        );
    }
}

fn check(status: libc::c_long) -> io::Result<()> {
    if status == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// A file mapped shared, for reading and writing.
///
/// Nobody may shorten the file while it is mapped: the kernel ends a process that
/// touches what is no more. Our files are each used by one thread alone.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps the first `len` bytes of `file`, at least 1.
    pub fn new(file: &File, len: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a free place, so no memory of ours is replaced.
        let start = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Copies bytes from `at` on out of the file.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(
            at.checked_add(into.len())
                .is_some_and(|end| end <= self.len)
        );
        // SAFETY: the source lies inside the mapping, as asserted; `into` is memory of its own,
        // since the mapping is only reached through this type.
        unsafe {
            ptr::copy_nonoverlapping(self.start.as_ptr().add(at), into.as_mut_ptr(), into.len());
        }
    }

    /// Copies bytes into the file from `at` on.
    pub fn write(&mut self, at: usize, from: &[u8]) {
        assert!(
            at.checked_add(from.len())
                .is_some_and(|end| end <= self.len)
        );
        // SAFETY: the target lies inside the mapping, as asserted; `from` is memory of its own,
        // since the mapping is only reached through this type.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.start.as_ptr().add(at), from.len()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the whole mapping, and nobody else holds an address in it.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        unmapped.expect("a mapping of ours");
    }
}
