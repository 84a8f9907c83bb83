//! The storage of a disk: a raw image or a block device.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::fs::{AtFlags, FallocateFlags, OFlags, StatxFlags, ioctl_blksszget, statx};
use rustix::io::Errno;

use crate::image_lock::{self, ImageLock};
use crate::{
    Action, Buffer, ByteRange, DiskError, DiskIdentity, DiskNumber, Ring, RingCompletion,
    Submission, SubmissionId,
};

/// Whether the host's page cache is bypassed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direct {
    /// If the file system supports it.
    #[default]
    Auto,
    /// Yes, or an error.
    On,
    /// No.
    Off,
}

/// Maximum number of zero bytes written at once where the storage has no better way.
const ZEROS_BYTES: u64 = 1 << 20;

/// An image or device, locked.
#[derive(Debug)]
pub(crate) struct Storage {
    pub(crate) path: PathBuf,
    pub(crate) size_bytes: u64,
    /// Unit of transfers: 512 or 4096.
    pub(crate) block_bytes: u32,
    pub(crate) direct: bool,
    pub(crate) read_only: bool,
    file: Arc<File>,
    /// Of a block device that is written: opened exclusively, so that the kernel refuses to mount it.
    _claim: Option<File>,
}

/// A submission in progress.
#[derive(Debug)]
pub(crate) struct PendingSubmission {
    pub(crate) id: SubmissionId,
    pub(crate) disk: usize,
    step: Step,
}

impl PendingSubmission {
    /// Whether it changes the storage's contents.
    pub(crate) fn is_change(&self) -> bool {
        !matches!(self.step, Step::Read { .. } | Step::Sync)
    }
}

#[derive(Debug)]
enum Step {
    /// `done` bytes of the buffer are filled.
    Read {
        offset: u64,
        done: usize,
    },
    /// `done` bytes of the buffer are stored.
    Write {
        offset: u64,
        done: usize,
    },
    Sync,
    Discard,
    /// Zeroing by `fallocate`; the modes still to be tried, last first.
    Zero {
        range: ByteRange,
        ways: Vec<FallocateFlags>,
    },
    WriteZeros {
        range: ByteRange,
        done: u64,
    },
}

/// The result of a submission.
pub(crate) struct SubmissionResult {
    pub(crate) result: io::Result<()>,
    pub(crate) buffer: Option<Buffer>,
}

impl Storage {
    /// Opens and locks an image.
    pub(crate) fn open(path: &Path, read_only: bool, direct: Direct) -> Result<Self, DiskError> {
        let failed = |source| DiskError::Image {
            image: path.to_owned(),
            source,
        };
        let open = |direct: bool| {
            let flags = if direct {
                OFlags::DIRECT
            } else {
                OFlags::empty()
            };
            OpenOptions::new()
                .read(true)
                .write(!read_only)
                .custom_flags(flags.bits().cast_signed())
                .open(path)
        };
        let buffered = open(false).map_err(failed)?;
        let kind = buffered.metadata().map_err(failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(failed(io::Error::other(
                "neither a file nor a block device",
            )));
        }
        let claim = if kind.is_block_device() && !read_only {
            Some(claim(path)?)
        } else {
            None
        };
        let size_bytes = (&buffered).seek(SeekFrom::End(0)).map_err(failed)?;
        let mut file = buffered;
        let mut block_bytes = 512;
        let mut is_direct = false;
        if direct != Direct::Off {
            match open(true)
                .and_then(|file| Ok((transfer_unit(&file, kind.is_block_device())?, file)))
            {
                Ok((unit, opened))
                    if direct == Direct::On || size_bytes.is_multiple_of(unit.into()) =>
                {
                    (file, block_bytes, is_direct) = (opened, unit, true);
                }
                Err(error) if direct == Direct::On => return Err(failed(error)),
                _ => {}
            }
        }
        // The locks of a daemon that was killed persist until its transfers in flight have ended.
        let mut conflict = None;
        in_time(|| {
            conflict = image_lock::lock(&file, read_only).map_err(failed)?;
            Ok(conflict.is_none())
        })?;
        if let Some(lock) = conflict {
            let image = path.to_owned();
            return Err(DiskError::Locked { image, lock });
        }
        if size_bytes == 0 || !size_bytes.is_multiple_of(block_bytes.into()) {
            return Err(DiskError::Size {
                image: path.to_owned(),
                bytes: size_bytes,
                block_bytes,
            });
        }
        Ok(Self {
            path: path.to_owned(),
            size_bytes,
            block_bytes,
            direct: is_direct,
            read_only,
            file: Arc::new(file),
            _claim: claim,
        })
    }

    fn failed(&self, source: io::Error) -> DiskError {
        let image = self.path.clone();
        DiskError::Image { image, source }
    }

    /// The identity of the image, by which it is distinguished from others.
    pub(crate) fn identity(&self, disk: DiskNumber) -> Result<DiskIdentity, DiskError> {
        DiskIdentity::of(disk, &self.path, &self.file, self.size_bytes)
            .map_err(|error| self.failed(error))
    }

    /// The open image.
    pub(crate) fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    /// When the image was last modified, if it tells.
    pub(crate) fn modified_ns(&self) -> Option<i64> {
        let identity = self.identity(DiskNumber(0)).ok()?;
        identity.modified_ns
    }

    /// Writes a page to a block synchronously; the part beyond the end of the image is ignored.
    pub(crate) fn restore(&self, block: u64, page: &Buffer) -> io::Result<()> {
        let offset = block.saturating_mul(page.len() as u64);
        let left = usize::try_from(self.size_bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        let page = &page[..page.len().min(left)];
        self.file.write_all_at(page, offset)
    }

    /// Waits until all writes are on stable storage.
    pub(crate) fn make_stable(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Begins a submission. The ring's completions under `token` are to be passed to [`proceed`](Self::proceed).
    ///
    /// # Errors
    /// If the ring accepts no submission.
    pub(crate) fn begin(
        &self,
        ring: &mut Ring,
        submission: Submission,
        token: u64,
    ) -> io::Result<PendingSubmission> {
        let file = &self.file;
        let step = match submission.action {
            Action::Read { offset, buffer } => {
                ring.read(file, offset, buffer, 0, token)?;
                Step::Read { offset, done: 0 }
            }
            Action::Write { offset, buffer } => {
                ring.write(file, offset, buffer, 0, token)?;
                Step::Write { offset, done: 0 }
            }
            Action::Sync => {
                ring.sync(file, token)?;
                Step::Sync
            }
            Action::Discard(range) => {
                self.allocate(ring, punch(), range, token)?;
                Step::Discard
            }
            Action::Zero { range, unmap } => {
                let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
                let (first, ways) = if unmap {
                    (punch(), vec![zero])
                } else {
                    (zero, Vec::new())
                };
                self.allocate(ring, first, range, token)?;
                Step::Zero { range, ways }
            }
        };
        Ok(PendingSubmission {
            id: submission.id,
            disk: usize::from(submission.disk.0),
            step,
        })
    }

    /// Processes a completion of an I/O submission: continues it, or returns its outcome.
    ///
    /// # Errors
    /// If the ring accepts no submission.
    pub(crate) fn proceed(
        &self,
        ring: &mut Ring,
        running: &mut PendingSubmission,
        completion: RingCompletion,
        token: u64,
    ) -> io::Result<Option<SubmissionResult>> {
        let mut buffer = completion.buffer;
        // Nothing moved without an interruption: the end of the image.
        let (moved, ended, interrupted) = match completion.result {
            Ok(moved) => (moved as usize, moved == 0, false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (0, false, true),
            Err(error) => return self.refused(ring, running, error, buffer, token),
        };
        let result = match &mut running.step {
            Step::Read { offset, done } => {
                *done += moved;
                let Some(part) = buffer.take_if(|buffer| *done < buffer.len() && !ended) else {
                    return Ok(Some(carried_out(ended, buffer)));
                };
                ring.read(&self.file, *offset + *done as u64, part, *done, token)
            }
            Step::Write { offset, done } => {
                *done += moved;
                let Some(part) = buffer.take_if(|buffer| *done < buffer.len() && !ended) else {
                    return Ok(Some(carried_out(ended, None)));
                };
                ring.write(&self.file, *offset + *done as u64, part, *done, token)
            }
            Step::WriteZeros { range, done } => {
                *done += moved as u64;
                let Some(zeros) = buffer.take_if(|_| *done < range.bytes && !ended) else {
                    return Ok(Some(carried_out(ended, None)));
                };
                self.write_zeros(ring, *range, *done, zeros, token)
            }
            Step::Sync if interrupted => ring.sync(&self.file, token),
            Step::Zero { range, .. } if interrupted => {
                let range = *range;
                let zeros = Buffer::new(range.bytes.min(ZEROS_BYTES) as usize);
                running.step = Step::WriteZeros { range, done: 0 };
                self.write_zeros(ring, range, 0, zeros, token)
            }
            // Ranges that were not discarded keep contents on which nobody may rely.
            Step::Sync | Step::Discard | Step::Zero { .. } => {
                return Ok(Some(carried_out(false, None)));
            }
        };
        result.map(|()| None)
    }

    fn refused(
        &self,
        ring: &mut Ring,
        running: &mut PendingSubmission,
        error: io::Error,
        buffer: Option<Buffer>,
        token: u64,
    ) -> io::Result<Option<SubmissionResult>> {
        let unsupported = [Errno::OPNOTSUPP, Errno::NOSYS, Errno::INVAL]
            .iter()
            .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()));
        match &mut running.step {
            // Contents become arbitrary, so the old ones are valid.
            Step::Discard if unsupported => Ok(Some(carried_out(false, None))),
            Step::Zero { range, ways } if unsupported => {
                let range = *range;
                if let Some(mode) = ways.pop() {
                    self.allocate(ring, mode, range, token)?;
                } else {
                    let zeros = Buffer::new(range.bytes.min(ZEROS_BYTES) as usize);
                    running.step = Step::WriteZeros { range, done: 0 };
                    self.write_zeros(ring, range, 0, zeros, token)?;
                }
                Ok(None)
            }
            _ => Ok(Some(SubmissionResult {
                result: Err(error),
                buffer,
            })),
        }
    }

    fn write_zeros(
        &self,
        ring: &mut Ring,
        range: ByteRange,
        done: u64,
        mut zeros: Buffer,
        token: u64,
    ) -> io::Result<()> {
        zeros.set_len((range.bytes - done).min(ZEROS_BYTES) as usize);
        ring.write(&self.file, range.offset + done, zeros, 0, token)
    }

    fn allocate(
        &self,
        ring: &mut Ring,
        mode: FallocateFlags,
        range: ByteRange,
        token: u64,
    ) -> io::Result<()> {
        let mode = mode.bits().cast_signed();
        ring.allocate(&self.file, mode, range.offset, range.bytes, token)
    }
}

/// Opens a block device exclusively.
fn claim(device: &Path) -> Result<File, DiskError> {
    let image = || device.to_owned();
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(OFlags::EXCL.bits().cast_signed());
    options.open(device).map_err(|source| match source.kind() {
        io::ErrorKind::ResourceBusy => DiskError::Locked {
            image: image(),
            lock: ImageLock::Exclusive,
        },
        _ => DiskError::Image {
            image: image(),
            source,
        },
    })
}

fn punch() -> FallocateFlags {
    FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
}

fn carried_out(ended: bool, buffer: Option<Buffer>) -> SubmissionResult {
    let result = if ended {
        Err(io::ErrorKind::UnexpectedEof.into())
    } else {
        Ok(())
    };
    SubmissionResult { result, buffer }
}

/// Retries for up to two seconds: the kernel tears down the `io_uring` of a process that was killed, and releases the
/// files it holds, some time after the process.
pub(crate) fn in_time<E>(mut attempt: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
    for _ in 0..20 {
        if attempt()? {
            return Ok(true);
        }
        thread::sleep(Duration::from_millis(100));
    }
    attempt()
}

/// The alignment of offsets and lengths of direct transfers: 512 or 4096.
fn transfer_unit(file: &File, device: bool) -> io::Result<u32> {
    // A file system may accept the flag and refuse the transfer.
    file.read_at(&mut Buffer::new(4096), 0)?;
    let unit = if device {
        ioctl_blksszget(file)?
    } else {
        let told = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
            .map_or(0, |told| told.stx_dio_offset_align);
        match told {
            0 if file.read_at(&mut Buffer::new(512), 512).is_ok() => 512,
            0 => 4096,
            told => told,
        }
    };
    match unit {
        ..=512 => Ok(512),
        513..=4096 => Ok(4096),
        _ => Err(io::Error::other(
            "direct transfers need more than 4096 bytes",
        )),
    }
}
