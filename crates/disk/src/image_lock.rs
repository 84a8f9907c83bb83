//! The locks of an image: BSD's, and those by which QEMU's processes agree on an image.
//!
//! QEMU (`block/file-posix.c`) uses one-byte read locks of the open file description. Who needs permission *p* holds byte
//! 100 + *p*; who denies *p* to all others holds byte 200 + *p*. A process may use the image if, once its own locks are
//! set, nobody denies what it needs, and nobody needs what it denies.

use std::fmt::{self, Display, Formatter};
use std::fs::File;
use std::io;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, c_int, flock};
use rustix::fs::FlockOperation;

/// The lock by which another process uses an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageLock {
    /// `flock(2)`: held by another server of ours, and by programs that follow systemd's rule for block devices.
    Flock,
    /// A process of QEMU needs what is denied here: to write the image, or to change its size.
    QemuNeeds,
    /// A process of QEMU denies what is needed here: to read, or to write, the image.
    QemuDenies,
    /// The block device is mounted, or part of another device.
    Exclusive,
}

impl Display for ImageLock {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Flock => "another process holds its lock (flock)",
            Self::QemuNeeds => "a process of QEMU writes it, or may change its size",
            Self::QemuDenies => "a process of QEMU lets no other use it so",
            Self::Exclusive => "the device is mounted, or part of another device",
        })
    }
}

/// First byte of the permissions needed, and of those denied.
const NEEDED: i64 = 100;
const DENIED: i64 = 200;

// QEMU's permissions, by bit.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Locks the image for as long as the file is open. Returns the lock that is in the way, if there is one.
pub(crate) fn lock(file: &File, read_only: bool) -> io::Result<Option<ImageLock>> {
    let operation = if read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    match rustix::fs::flock(file, operation) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(Some(ImageLock::Flock)),
        Err(error) => return Err(error.into()),
    }
    let needed: &[i64] = if read_only {
        &[CONSISTENT_READ]
    } else {
        &[CONSISTENT_READ, WRITE]
    };
    // What the cache holds would no longer be what the image holds.
    let denied = [WRITE, RESIZE];
    let conflict = lock_as_qemu(file, needed, &denied)?;
    if conflict.is_some() {
        // All bytes at once.
        fcntl(file, FcntlArg::F_OFD_SETLK(&bytes(libc::F_UNLCK, 0, 0)))?;
    }
    Ok(conflict)
}

fn lock_as_qemu(file: &File, needed: &[i64], denied: &[i64]) -> io::Result<Option<ImageLock>> {
    let ours = needed
        .iter()
        .map(|bit| (NEEDED + bit, ImageLock::QemuDenies));
    let ours = ours.chain(
        denied
            .iter()
            .map(|bit| (DENIED + bit, ImageLock::QemuNeeds)),
    );
    // All locks before the first test: of two processes at the same time, one sees the other.
    for (byte, conflict) in ours {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&bytes(libc::F_RDLCK, byte, 1))) {
            Ok(_) => {}
            Err(Errno::EAGAIN | Errno::EACCES) => return Ok(Some(conflict)),
            Err(error) => return Err(error.into()),
        }
    }
    let theirs = needed
        .iter()
        .map(|bit| (DENIED + bit, ImageLock::QemuDenies));
    let theirs = theirs.chain(
        denied
            .iter()
            .map(|bit| (NEEDED + bit, ImageLock::QemuNeeds)),
    );
    for (byte, conflict) in theirs {
        let mut found = bytes(libc::F_WRLCK, byte, 1);
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
        if c_int::from(found.l_type) != libc::F_UNLCK {
            return Ok(Some(conflict));
        }
    }
    Ok(None)
}

/// A lock of `len` bytes from `start`; of all if `len` is 0.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the kernel's constants are of this type in this structure"
)]
fn bytes(kind: c_int, start: i64, len: i64) -> flock {
    flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: len,
        l_pid: 0,
    }
}
