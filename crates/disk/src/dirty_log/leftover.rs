//! What a former daemon left in its dirty log: judged, read, and made the log of the next one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::hash::{BuildHasher as _, RandomState as RandomSeed};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use foldhash::fast::RandomState;
use rustix::fs::{CWD, FallocateFlags, RenameFlags};

use super::header::{self, ChangeTimes, HEAD_BYTES, Head};
use super::{
    DirtyLog, DirtyLogError, DiskIdentity, ENTRY_BYTES, ENTRY_CHECKSUM, ENTRY_LOCATION,
    ENTRY_SEQUENCE, LOCATION_BITS, Layout, SetAside, checksum, is_at, lock, open,
};
use crate::protocol::u64_at;
use crate::{DiskNumber, Location, PAGE_BYTES, Page};

/// What a former daemon left: the first step of opening a [`DirtyLog`]. The log is locked.
pub struct LeftoverPages {
    pub(super) path: PathBuf,
    pub(super) slots: u64,
    pub(super) boot: String,
    /// None if there was no log.
    pub(super) file: Option<File>,
    /// Layout and number of its header; none if it was never finished.
    pub(super) found: Option<(Layout, u64)>,
    /// Slot and newest valid sequence by location.
    pub(super) pages: HashMap<Location, (u64, u64), RandomState>,
    /// Slots whose entries are not free.
    pub(super) used: Vec<u64>,
    pub(super) torn: u64,
    pub(super) set_aside: Option<SetAside>,
}

impl LeftoverPages {
    /// Number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Entries ignored because they were not wholly written, and so never acknowledged.
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// What was set aside: all that was found, or the pages of some disks.
    pub fn set_aside(&self) -> Option<&SetAside> {
        self.set_aside.as_ref()
    }

    /// Whether there is no file: there was no log, or all of it was set aside.
    pub fn is_without_file(&self) -> bool {
        self.file.is_none()
    }

    /// The locations of the pages, in no order.
    pub fn locations(&self) -> impl Iterator<Item = Location> + '_ {
        self.pages.keys().copied()
    }

    /// The pages, in the order of their locations.
    pub fn pages(&self) -> impl Iterator<Item = io::Result<(Location, Box<Page>)>> + '_ {
        let mut places: Vec<_> = self
            .pages
            .iter()
            .map(|(at, (slot, _))| (*at, *slot))
            .collect();
        places.sort_unstable();
        let source = self.file.as_ref().zip(self.found);
        places.into_iter().filter_map(move |(location, slot)| {
            let (file, (layout, _)) = source?;
            let mut page = Box::new([0; PAGE_BYTES]);
            let read = file.read_exact_at(&mut page[..], layout.page(slot));
            Some(read.map(|()| (location, page)))
        })
    }

    /// Records that the disk's image changes now by us; to be called before a page is written to it.
    ///
    /// # Errors
    /// If it cannot be recorded.
    pub fn writing(&self, disk: DiskNumber) -> io::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let times = header::read_mark(file, disk.0)?.until(ChangeTimes::now_ns());
        header::write_mark(file, disk, times)
    }

    /// Goes on with the file as a log for these disks; to be called when all pages but those `kept` are on stable
    /// storage. It has the requested number of slots, unless there are pages that are kept: then that of the old log.
    ///
    /// # Errors
    /// If it cannot be written. What it held is then still there, or on storage.
    pub fn finish(
        mut self,
        disks: &[DiskIdentity],
        kept: &HashSet<Location>,
    ) -> Result<DirtyLog, DirtyLogError> {
        let path = self.path.clone();
        let failed = |what, source| DirtyLogError::Io {
            path: path.clone(),
            what,
            source,
        };
        let head = Head {
            boot: std::mem::take(&mut self.boot),
            run: run_name(),
            disks: disks.to_vec(),
        };
        self.pages.retain(|location, _| kept.contains(location));
        let wanted = Layout { slots: self.slots };
        let reused = self
            .found
            .filter(|(layout, _)| *layout == wanted || !self.pages.is_empty());
        let (file, layout) = match (self.file.take(), reused) {
            (Some(file), Some((layout, number))) => {
                self.reuse(&file, layout, number, &head)
                    .map_err(|error| failed("write", error))?;
                (file, layout)
            }
            (Some(file), None) => {
                // Nothing in it is needed, and its memory is: it is emptied before the new one is allocated.
                make(&file, wanted, &head).map_err(|error| failed("write", error))?;
                (file, wanted)
            }
            (None, _) => (self.create(wanted, &head)?, wanted),
        };
        let used: HashSet<u64> = self.pages.values().map(|(slot, _)| *slot).collect();
        Ok(DirtyLog {
            layout,
            file: Box::new(file),
            sequence: self.pages.values().map(|(_, n)| *n).max().unwrap_or(0),
            places: self
                .pages
                .into_iter()
                .map(|(location, (slot, _))| (location, slot))
                .collect(),
            free: (0..layout.slots)
                .rev()
                .filter(|slot| !used.contains(slot))
                .collect(),
            doubtful: Vec::new(),
            path,
        })
    }

    /// Frees all entries but those of the pages, then replaces the header.
    fn reuse(&self, file: &File, layout: Layout, number: u64, head: &Head) -> io::Result<()> {
        let kept: HashSet<u64> = self.pages.values().map(|(slot, _)| *slot).collect();
        for slot in self.used.iter().filter(|slot| !kept.contains(slot)) {
            file.write_all_at(&[0; ENTRY_BYTES], layout.entry(*slot))?;
        }
        write_marks(file, &head.disks)?;
        header::write(file, head, layout.slots, number + 1)
    }

    /// Makes a file where there was none: beside it, and moved there when it is whole.
    fn create(&self, layout: Layout, head: &Head) -> Result<File, DirtyLogError> {
        let failed = |what, source| DirtyLogError::Io {
            path: self.path.clone(),
            what,
            source,
        };
        let in_use = || DirtyLogError::InUse {
            path: self.path.clone(),
        };
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let beside = PathBuf::from(name);
        let file = open(&beside, true).map_err(|error| failed("make", error))?;
        lock(&file, &self.path)?;
        if !is_at(&file, &beside).map_err(|error| failed("make", error))? {
            return Err(in_use());
        }
        let made = make(&file, layout, head).and_then(|()| {
            // It must not replace one that another daemon has created since.
            Ok(rustix::fs::renameat_with(
                CWD,
                &beside,
                CWD,
                &self.path,
                RenameFlags::NOREPLACE,
            )?)
        });
        match made {
            Ok(()) => Ok(file),
            Err(error) => {
                // It is of no use, and its memory is.
                let _ = fs::remove_file(&beside);
                Err(match error.kind() {
                    io::ErrorKind::AlreadyExists => in_use(),
                    _ => failed("write", error),
                })
            }
        }
    }
}

/// Makes a file an empty log.
fn make(file: &File, layout: Layout, head: &Head) -> io::Result<()> {
    file.set_len(0)?;
    // Allocate all of it now: a file system that is full later must not turn a guest's write into an error.
    let bytes = layout.file_bytes() - HEAD_BYTES;
    let allocated = rustix::fs::fallocate(file, FallocateFlags::empty(), HEAD_BYTES, bytes);
    let allocated = allocated.map_err(io::Error::from);
    allocated
        .and_then(|()| header::allocate(file, head))
        .inspect_err(|_| {
            // The error is the one to report.
            let _ = file.set_len(0);
        })?;
    write_marks(file, &head.disks)?;
    header::write(file, head, layout.slots, 0)
}

fn write_marks(file: &File, disks: &[DiskIdentity]) -> io::Result<()> {
    for identity in disks {
        let times = ChangeTimes::at(identity.modified_ns.unwrap_or(0));
        header::write_mark(file, DiskNumber(identity.disk), times)?;
    }
    Ok(())
}

/// A name that no other run has.
fn run_name() -> String {
    format!("{:016x}", RandomSeed::new().hash_one(std::process::id()))
}

impl LeftoverPages {
    /// Finds the newest valid entry of each location.
    pub(super) fn scan(&mut self, file: &File, layout: Layout) -> io::Result<()> {
        let mut entries = [0; PAGE_BYTES];
        let mut page = Box::new([0; PAGE_BYTES]);
        for first in (0..layout.slots).step_by(PAGE_BYTES / ENTRY_BYTES) {
            // To the end of a page: the first page of the pages is behind it.
            file.read_exact_at(&mut entries, layout.entry(first))?;
            for (slot, entry) in (first..layout.slots).zip(entries.chunks_exact(ENTRY_BYTES)) {
                if entry.iter().all(|byte| *byte == 0) {
                    continue;
                }
                self.used.push(slot);
                let number = u64_at(entry, ENTRY_LOCATION);
                let sequence = u64_at(entry, ENTRY_SEQUENCE);
                file.read_exact_at(&mut page[..], layout.page(slot))?;
                if number >> LOCATION_BITS != 0
                    || checksum(number, sequence, &page) != u64_at(entry, ENTRY_CHECKSUM)
                {
                    self.torn += 1;
                    continue;
                }
                let location = Location::from_number(number);
                let newest = self.pages.entry(location).or_insert((slot, sequence));
                if newest.1 < sequence {
                    *newest = (slot, sequence);
                }
            }
        }
        Ok(())
    }

    /// Which pages must not be written to these disks, if there is a reason: those of the disks of which it is true.
    pub(super) fn stale(
        &self,
        file: &File,
        was: &Head,
        now: &[DiskIdentity],
    ) -> Result<Option<Stale>, DirtyLogError> {
        let mut pages: BTreeMap<u16, (u64, u64)> = BTreeMap::new();
        for location in self.pages.keys() {
            let (count, blocks) = pages.entry(location.disk().0).or_default();
            *count += 1;
            *blocks = (*blocks).max(location.block() + 1);
        }
        if was.boot != self.boot && !pages.is_empty() {
            return Ok(Some(Stale {
                disks: pages.into_keys().collect(),
                reason: "the host was booted since it was written, and the images may be newer"
                    .to_owned(),
            }));
        }
        let mut disks = HashSet::new();
        let mut reasons = Vec::new();
        for (disk, (count, blocks)) in pages {
            let find = |disks: &[DiskIdentity]| disks.iter().find(|id| id.disk == disk).cloned();
            let (old, new) = match (find(&was.disks), find(now)) {
                (Some(old), Some(new))
                    if (old.device, old.inode) == (new.device, new.inode)
                        || old.image == new.image =>
                {
                    (old, new)
                }
                (old, new) => {
                    let describe = |identity: Option<DiskIdentity>, none: &str| {
                        identity.map_or(none.to_owned(), |identity| identity.describe())
                    };
                    return Err(DirtyLogError::OtherImage {
                        path: self.path.clone(),
                        disk: DiskNumber(disk),
                        pages: count,
                        was: describe(old, "an unknown image"),
                        now: describe(new, "not served"),
                    });
                }
            };
            let marked = header::read_mark(file, disk).map_err(|source| DirtyLogError::Io {
                path: self.path.clone(),
                what: "read",
                source,
            })?;
            let image = &new.image;
            let fits = blocks <= new.size_bytes.div_ceil(PAGE_BYTES as u64);
            if (old.device, old.inode) != (new.device, new.inode)
                || new.size_bytes < old.size_bytes
                || !fits
            {
                reasons.push(format!(
                    "the image {image} was replaced: it was {}, and is now {}",
                    old.describe(),
                    new.describe()
                ));
            } else if new.modified_ns.is_some_and(|time| !marked.contain(time)) {
                reasons.push(format!(
                    "the image {image} was changed by others after the daemon of the log had written to it"
                ));
            } else {
                continue;
            }
            disks.insert(disk);
        }
        Ok((!disks.is_empty()).then(|| Stale {
            disks,
            reason: reasons.join("; "),
        }))
    }

    /// Sets the stale pages aside, and goes on as if they had never been there.
    pub(super) fn set_stale_aside(
        mut self,
        file: File,
        head: &Head,
        stale: Stale,
    ) -> Result<Self, DirtyLogError> {
        let Stale { disks, reason } = stale;
        let is_stale = |location: &Location| disks.contains(&location.disk().0);
        let pages = self.pages.keys().filter(|at| is_stale(at)).count() as u64;
        let failed = |source| DirtyLogError::Io {
            path: self.path.clone(),
            what: "set aside",
            source,
        };
        let all = self.pages.len() as u64;
        let now = if pages == all {
            self.move_to_name(&self.path, &head.run).map_err(failed)?
        } else {
            self.copy_aside(&file, head, pages, &is_stale)
                .map_err(failed)?
        };
        if pages == all {
            self.found = None;
            self.used.clear();
        } else {
            self.file = Some(file);
        }
        self.pages.retain(|location, _| !is_stale(location));
        self.set_aside = Some(SetAside {
            log: self.path.clone(),
            now,
            pages,
            of_pages: all,
            reason,
        });
        Ok(self)
    }

    /// Copies the stale pages into a log of their own, with which the old image can be served. Their entries here are freed
    /// at the [end](Self::finish).
    fn copy_aside(
        &self,
        from: &File,
        head: &Head,
        pages: u64,
        is_stale: &dyn Fn(&Location) -> bool,
    ) -> io::Result<PathBuf> {
        let (layout, _) = self.found.ok_or(io::ErrorKind::NotFound)?;
        let mut name = self.path.clone().into_os_string();
        name.push(".aside");
        let beside = PathBuf::from(name);
        let file = open(&beside, true)?;
        let copy = || {
            let to = Layout { slots: pages };
            make(&file, to, head)?;
            for identity in &head.disks {
                let times = header::read_mark(from, identity.disk)?;
                header::write_mark(&file, DiskNumber(identity.disk), times)?;
            }
            let mut entry = [0; ENTRY_BYTES];
            let mut page = Box::new([0; PAGE_BYTES]);
            let stale = self.pages.iter().filter(|(location, _)| is_stale(location));
            for (slot, (_, (old, _))) in (0..).zip(stale) {
                from.read_exact_at(&mut entry, layout.entry(*old))?;
                from.read_exact_at(&mut page[..], layout.page(*old))?;
                file.write_all_at(&page[..], to.page(slot))?;
                file.write_all_at(&entry, to.entry(slot))?;
            }
            self.move_to_name(&beside, &head.run)
        };
        copy().inspect_err(|_| {
            // It is of no use, and its memory is. The error is the one to report.
            let _ = fs::remove_file(&beside);
        })
    }

    /// Renames a file to the log's name and that of its daemon's run; with a number if an earlier attempt got no further.
    fn move_to_name(&self, file: &Path, run: &str) -> io::Result<PathBuf> {
        // Contents of a file must not become a path.
        let run: String = run.chars().filter(char::is_ascii_alphanumeric).collect();
        for number in 1_u64.. {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".aside-{run}"));
            if number > 1 {
                name.push(format!("-{number}"));
            }
            let now = PathBuf::from(name);
            match rustix::fs::renameat_with(CWD, file, CWD, &now, RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(now),
                Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }
}

/// Pages that must not be written to storage.
pub(super) struct Stale {
    /// Numbers of the disks whose pages they are.
    disks: HashSet<u16>,
    /// Why, with the names of the images.
    reason: String,
}
