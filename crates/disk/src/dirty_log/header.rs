//! The head of a dirty log: which boot, run and images its pages are of, and when those images last changed by us.
//!
//! Two copies of the header, of which the valid one with the higher number counts, so that it can be replaced while the
//! log holds pages. Behind them a *mark* for each disk: the first and last time at which our writes may have changed its
//! image.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::FallocateFlags;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::{Layout, Medium};
use crate::protocol::{set_u32, set_u64, u32_at, u64_at};
use crate::{DiskIdentity, DiskNumber, Location, PAGE_BYTES};

/// First word of a header: `PLMSDLG1`.
const MAGIC: u64 = u64::from_le_bytes(*b"PLMSDLG1");
const VERSION: u32 = 2;

const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 8;
const AT_JSON_BYTES: usize = 12;
const AT_SLOTS: usize = 16;
const AT_CHECKSUM: usize = 24;
const AT_NUMBER: usize = 32;
const AT_JSON: usize = 40;

/// Bytes reserved for a copy of the header: paths of 4 KiB for some hundred disks. What is not used is a hole.
const COPY_BYTES: u64 = 1 << 20;
/// Bytes of a mark; a divisor of the page size, so that none crosses a page boundary.
const MARK_BYTES: usize = 16;
/// Where the entries begin: behind the copies and the marks of all disks that a VM can have.
pub(super) const HEAD_BYTES: u64 =
    2 * COPY_BYTES + (Location::DISKS_MAX as usize * MARK_BYTES) as u64;
const _: () = assert!(
    HEAD_BYTES.is_multiple_of(PAGE_BYTES as u64),
    "entries cross no page boundary"
);

/// What a header says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Head {
    /// The host's boot, as the kernel names it.
    pub(super) boot: String,
    /// A random name of the daemon's run.
    pub(super) run: String,
    pub(super) disks: Vec<DiskIdentity>,
}

/// The head of a file.
pub(super) enum Found {
    /// Its creation was interrupted, and nothing was ever recorded in it.
    Unfinished,
    /// A log.
    Log {
        head: Head,
        layout: Layout,
        /// Number of the header.
        number: u64,
    },
    /// Something else; the reason.
    Foreign(String),
}

/// Allocates both copies of a header and a page more of each, so that one can be replaced while the file system is full.
pub(super) fn allocate(file: &File, head: &Head) -> io::Result<()> {
    let header_bytes = (AT_JSON + serde_json::to_vec(head)?.len() + PAGE_BYTES) as u64;
    for copy in 0..2 {
        let bytes = header_bytes.min(COPY_BYTES);
        rustix::fs::fallocate(file, FallocateFlags::empty(), copy * COPY_BYTES, bytes)?;
    }
    Ok(())
}

/// Writes the header of this number.
pub(super) fn write(file: &File, head: &Head, slots: u64, number: u64) -> io::Result<()> {
    let json = serde_json::to_vec(head)?;
    let mut bytes = vec![0; AT_JSON + json.len()];
    if bytes.len() as u64 > COPY_BYTES {
        return Err(io::Error::other("the names of the disks are too long"));
    }
    set_u64(&mut bytes, AT_MAGIC, MAGIC);
    set_u32(&mut bytes, AT_VERSION, VERSION);
    set_u32(
        &mut bytes,
        AT_JSON_BYTES,
        u32::try_from(json.len()).map_err(io::Error::other)?,
    );
    set_u64(&mut bytes, AT_SLOTS, slots);
    set_u64(&mut bytes, AT_NUMBER, number);
    bytes[AT_JSON..].copy_from_slice(&json);
    let sum = xxh3_64(&bytes); // Of a header without it.
    set_u64(&mut bytes, AT_CHECKSUM, sum);
    file.write_all_at(&bytes, number % 2 * COPY_BYTES)
}

/// Reads the head of a file.
pub(super) fn read(file: &File) -> io::Result<Found> {
    let file_bytes = file.metadata()?.len();
    if file_bytes == 0 {
        return Ok(Found::Unfinished);
    }
    if file_bytes < HEAD_BYTES {
        // A log of an earlier version says so.
        let mut start = vec![0; AT_JSON];
        let read = file.read_at(&mut start, 0)?;
        return Ok(Found::Foreign(if read == AT_JSON {
            refusal(&start).unwrap_or_else(|| format!("its size is {file_bytes} bytes"))
        } else {
            format!("its size is {file_bytes} bytes")
        }));
    }
    let mut newest: Option<(u64, Head, Layout)> = None;
    let mut reasons = Vec::new();
    for copy in 0..2 {
        match read_copy(file, copy * COPY_BYTES)? {
            Ok(Some(found)) if newest.as_ref().is_none_or(|newest| newest.0 < found.0) => {
                newest = Some(found);
            }
            Ok(_) => {}
            Err(reason) => reasons.push(reason),
        }
    }
    let Some((number, head, layout)) = newest else {
        return Ok(match reasons.into_iter().next() {
            Some(reason) => Found::Foreign(reason),
            None => Found::Unfinished,
        });
    };
    if file_bytes != layout.file_bytes() {
        let right = layout.file_bytes();
        return Ok(Found::Foreign(format!(
            "its size is {file_bytes} bytes, not {right}"
        )));
    }
    Ok(Found::Log {
        head,
        layout,
        number,
    })
}

/// Why a header's first bytes are not of this version, if they are not.
fn refusal(start: &[u8]) -> Option<String> {
    if u64_at(start, AT_MAGIC) != MAGIC {
        return Some("it begins otherwise".into());
    }
    let version = u32_at(start, AT_VERSION);
    (version != VERSION).then(|| format!("version {version}, not {VERSION}"))
}

/// Reads a copy: number, contents and layout; `None` if none was begun; or why it is none.
#[expect(
    clippy::type_complexity,
    reason = "an outcome of three kinds, used once"
)]
fn read_copy(file: &File, at: u64) -> io::Result<Result<Option<(u64, Head, Layout)>, String>> {
    let mut start = vec![0; AT_JSON];
    file.read_exact_at(&mut start, at)?;
    if start.iter().all(|byte| *byte == 0) {
        return Ok(Ok(None));
    }
    if let Some(reason) = refusal(&start) {
        return Ok(Err(reason));
    }
    let damaged = || Ok(Err("its header is damaged".into()));
    let json_bytes = u32_at(&start, AT_JSON_BYTES) as usize;
    let slots = u64_at(&start, AT_SLOTS);
    if (AT_JSON + json_bytes) as u64 > COPY_BYTES || !(1..=super::SLOTS_MAX).contains(&slots) {
        return damaged();
    }
    let mut bytes = vec![0; AT_JSON + json_bytes];
    file.read_exact_at(&mut bytes, at)?;
    let sum = u64_at(&bytes, AT_CHECKSUM);
    set_u64(&mut bytes, AT_CHECKSUM, 0);
    if sum != xxh3_64(&bytes) {
        return damaged();
    }
    match serde_json::from_slice(&bytes[AT_JSON..]) {
        Ok(head) => Ok(Ok(Some((
            u64_at(&bytes, AT_NUMBER),
            head,
            Layout { slots },
        )))),
        Err(_) => damaged(),
    }
}

/// When our writes may have changed an image: from the first to the last of these times, in ns since 1970 by the clock of
/// the image's file system.
///
/// While writes are in flight, the last is the present and [`LATE_NS`](Self::LATE_NS), or later if the clock was set back; otherwise both are the image's time of
/// modification. So an image whose time lies outside was changed by someone else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeTimes {
    /// Earliest.
    pub first_ns: i64,
    /// Latest.
    pub last_ns: i64,
}

impl ChangeTimes {
    /// How long after it was submitted a write may change the image's time: a write in flight ends after its daemon was
    /// killed, when its storage lets it.
    pub const LATE_NS: i64 = 60 * 1_000_000_000;

    /// The present, in ns since 1970.
    pub fn now_ns() -> i64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.map_or(0, |now| i64::try_from(now.as_nanos()).unwrap_or(i64::MAX))
    }

    /// No write is in flight, and the image's time is this.
    pub fn at(time_ns: i64) -> Self {
        Self {
            first_ns: time_ns,
            last_ns: time_ns,
        }
    }

    /// Writes are in flight at `now_ns`.
    #[must_use]
    pub fn until(self, now_ns: i64) -> Self {
        Self {
            // The clock may have been set back, and the image's time is what it was until a write ends.
            first_ns: self.first_ns.min(now_ns),
            last_ns: self.last_ns.max(now_ns.saturating_add(Self::LATE_NS)),
        }
    }

    /// Whether the image may have got this time by our writes.
    pub(super) fn contain(self, time_ns: i64) -> bool {
        (self.first_ns..=self.last_ns).contains(&time_ns)
    }
}

fn mark_at(disk: u16) -> u64 {
    2 * COPY_BYTES + u64::from(disk) * MARK_BYTES as u64
}

/// Writes the mark of a disk.
pub(super) fn write_mark(
    file: &dyn Medium,
    disk: DiskNumber,
    times: ChangeTimes,
) -> io::Result<()> {
    let mut bytes = [0; MARK_BYTES];
    set_u64(&mut bytes, 0, times.first_ns.cast_unsigned());
    set_u64(&mut bytes, 8, times.last_ns.cast_unsigned());
    file.write_at(&bytes, mark_at(disk.0))
}

/// Reads the mark of a disk.
pub(super) fn read_mark(file: &File, disk: u16) -> io::Result<ChangeTimes> {
    let mut bytes = [0; MARK_BYTES];
    file.read_exact_at(&mut bytes, mark_at(disk))?;
    Ok(ChangeTimes {
        first_ns: u64_at(&bytes, 0).cast_signed(),
        last_ns: u64_at(&bytes, 8).cast_signed(),
    })
}
