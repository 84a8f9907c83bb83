//! What a daemon leaves in its state directory, and what the next one does with it: the dirty log, and which disks
//! failed to sync.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::fs::statfs;
use serde::{Deserialize, Serialize};

use crate::storage::Storage;
use crate::{
    Buffer, ChangeTimes, DirtyLog, DirtyLogError, DirtyPages, DiskError, DiskIdentity, DiskNumber,
    EngineOptions, Location, PAGE_BYTES, Page, SetAside, WriteMode, boot_id,
};

/// `statfs` types of file systems in memory: tmpfs and ramfs.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// Slots for pages whose new contents are stored before the old ones are removed.
const SPARE: u64 = 64;

/// The dirty log, shared with the engine so that it can be closed at the end.
#[derive(Clone)]
pub(super) struct SharedLog(Arc<Mutex<Option<DirtyLog>>>);

impl SharedLog {
    fn new(log: DirtyLog) -> Self {
        Self(Arc::new(Mutex::new(Some(log))))
    }

    /// How many pages can be dirty: while one is replaced, both are there.
    pub(super) fn pages_max(&self) -> Option<u64> {
        let log = self.lock();
        log.as_ref().map(|log| log.slots().saturating_sub(SPARE))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Option<DirtyLog>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DirtyPages for SharedLog {
    fn record(&mut self, location: Location, page: &Page) -> io::Result<()> {
        let mut log = self.lock();
        log.as_mut()
            .ok_or(io::ErrorKind::BrokenPipe)?
            .record(location, page)
    }

    fn read(&mut self, location: Location, page: &mut Page) -> io::Result<()> {
        let mut log = self.lock();
        log.as_mut()
            .ok_or(io::ErrorKind::BrokenPipe)?
            .read(location, page)
    }

    fn clean(&mut self, location: Location) {
        if let Some(log) = self.lock().as_mut() {
            log.clean(location);
        }
    }
}

/// What a machine found when it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Pages of the dirty log that were written to storage.
    pub written_pages: u64,
    /// Pages that could not be written. They are served from the log, and the writes are repeated.
    pub kept_pages: u64,
    /// The first error of those.
    pub error: Option<String>,
    /// Pages that were not written, and where they are.
    pub set_aside: Option<SetAside>,
    /// Images that an earlier daemon failed to sync: their flushes fail.
    pub unsynced: Vec<PathBuf>,
}

/// The log as it is after recovery.
#[derive(Default)]
pub(super) struct Recovered {
    pub(super) log: Option<SharedLog>,
    pub(super) kept: Vec<Location>,
    /// Disks whose storage could not make the pages stable; it may have dropped other writes as well.
    pub(super) unsynced: Vec<DiskNumber>,
    pub(super) recovery: Recovery,
}

fn identities(storages: &[Storage]) -> Result<Vec<DiskIdentity>, DiskError> {
    (0..)
        .zip(storages)
        .map(|(number, storage)| storage.identity(DiskNumber(number)))
        .collect()
}

/// Opens the dirty log and writes the pages that an earlier daemon left in it to storage.
pub(super) fn recover(
    folder: &Path,
    options: &EngineOptions,
    storages: &[Storage],
) -> Result<Recovered, DiskError> {
    let failed = |source: io::Error| DiskError::State {
        path: folder.to_owned(),
        source,
    };
    fs::create_dir_all(folder).map_err(failed)?;
    let delayed = options.write == WriteMode::Delayed;
    let path = folder.join("dirty.log");
    if !delayed && !fs::exists(&path).map_err(failed)? {
        return Ok(Recovered::default());
    }
    if delayed && !is_in_memory(folder).map_err(failed)? {
        return Err(DiskError::StateOnDisk {
            path: folder.to_owned(),
        });
    }
    let slots = options.dirty_pages_max.saturating_add(SPARE);
    let boot = boot_id().map_err(failed)?;
    let left =
        DirtyLog::open(&path, slots, &identities(storages)?, &boot).map_err(DiskError::DirtyLog)?;
    let unreadable = |source| {
        DiskError::DirtyLog(DirtyLogError::Io {
            path: path.clone(),
            what: "read",
            source,
        })
    };
    let mut found = Recovered::default();
    let mut touched = HashSet::new();
    let mut buffer = Buffer::new(PAGE_BYTES);
    for page in left.pages() {
        let (location, page) = page.map_err(unreadable)?;
        let storage = &storages[usize::from(location.disk().0)];
        if storage.read_only {
            return Err(DiskError::Image {
                image: storage.path.clone(),
                source: io::Error::other(
                    "it is served read-only, but the dirty log has acknowledged writes of it",
                ),
            });
        }
        left.writing(location.disk()).map_err(failed)?;
        touched.insert(location.disk());
        buffer.copy_from_slice(&page[..]);
        if let Err(error) = storage.restore(location.block(), &buffer) {
            found
                .recovery
                .error
                .get_or_insert_with(|| format!("image {}: {error}", storage.path.display()));
            found.kept.push(location);
        }
    }
    for disk in touched {
        let storage = &storages[usize::from(disk.0)];
        if let Err(error) = storage.make_stable() {
            // The kernel may have dropped any of them.
            found.unsynced.push(disk);
            found
                .recovery
                .error
                .get_or_insert_with(|| format!("image {}: {error}", storage.path.display()));
            found.kept.retain(|location| location.disk() != disk);
            let all = left.locations();
            found.kept.extend(all.filter(|at| at.disk() == disk));
        }
    }
    found.recovery.kept_pages = found.kept.len() as u64;
    found.recovery.written_pages = left.len() as u64 - found.recovery.kept_pages;
    found.recovery.set_aside = left.set_aside().cloned();
    let kept = found.kept.iter().copied().collect();
    let nothing = !delayed && found.kept.is_empty();
    if nothing && left.is_without_file() {
        return Ok(found);
    }
    // With the times that the images have now.
    let aside = left.set_aside().cloned();
    let log = left
        .finish(&identities(storages)?, &kept)
        .map_err(|error| {
            // The next start is to find it, and to say that it is set aside.
            if let Some(aside) = aside.filter(|aside| aside.pages == aside.of_pages) {
                let _ = fs::rename(&aside.now, &aside.log);
            }
            DiskError::DirtyLog(error)
        })?;
    if nothing {
        log.close().map_err(failed)?;
    } else {
        found.log = Some(SharedLog::new(log));
    }
    Ok(found)
}

fn is_in_memory(folder: &Path) -> io::Result<bool> {
    #[allow(clippy::useless_conversion, reason = "its type depends on the target")]
    let kind = i64::from(statfs(folder)?.f_type);
    Ok(IN_MEMORY.contains(&kind))
}

/// When our writes may have changed the images, for the dirty log's marks.
pub(super) struct ImageTimes {
    log: SharedLog,
    images: Vec<ImageTime>,
}

struct ImageTime {
    /// Changes in flight.
    changing: u32,
    /// Whether the mark says that changes are in flight.
    marked: bool,
    times: ChangeTimes,
    /// How far the clock of its file system is ahead of ours (a server's).
    ahead_ns: i64,
}

impl ImageTimes {
    pub(super) fn new(log: SharedLog, storages: &[Storage]) -> Self {
        let images = storages.iter().map(|storage| ImageTime {
            changing: 0,
            marked: false,
            times: ChangeTimes::at(storage.modified_ns().unwrap_or(0)),
            ahead_ns: 0,
        });
        Self {
            images: images.collect(),
            log,
        }
    }

    fn mark(&self, disk: usize) {
        if let (Ok(number), Some(log)) = (u16::try_from(disk), self.log.lock().as_ref()) {
            // The mark's bytes are allocated. Should it fail, the next daemon sets the log aside and says so.
            let _ = log.mark(DiskNumber(number), self.images[disk].times);
        }
    }

    /// A change is about to be submitted.
    pub(super) fn begin(&mut self, disk: usize) {
        let image = &mut self.images[disk];
        image.changing += 1;
        if !image.marked {
            image.marked = true;
            image.times = image
                .times
                .until(ChangeTimes::now_ns().saturating_add(image.ahead_ns));
            self.mark(disk);
        }
    }

    /// A change has ended.
    pub(super) fn end(&mut self, disk: usize) {
        self.images[disk].changing -= 1;
    }

    /// Follows the clock while changes are in flight, and the images when none is.
    pub(super) fn turn(&mut self, storages: &[Storage]) {
        for (disk, storage) in storages.iter().enumerate() {
            let image = &mut self.images[disk];
            if !image.marked {
                continue;
            }
            let now_ns = ChangeTimes::now_ns();
            match storage.modified_ns() {
                Some(time_ns) if image.changing == 0 => {
                    image.marked = false;
                    image.times = ChangeTimes::at(time_ns);
                    image.ahead_ns = time_ns.saturating_sub(now_ns).max(0);
                }
                _ => image.times = image.times.until(now_ns.saturating_add(image.ahead_ns)),
            }
            self.mark(disk);
        }
    }
}

/// The disks that failed to sync, in the state directory: what the kernel dropped stays lost whoever serves the disk.
pub(super) struct Unsynced {
    path: PathBuf,
    /// The disks that the file names.
    recorded: HashSet<DiskNumber>,
    /// When to try again what could not be written.
    again_at: Option<Instant>,
}

/// Time after which a file that could not be written is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// The file of [`Unsynced`].
#[derive(Serialize, Deserialize)]
struct UnsyncedFile {
    /// A new boot has nothing but what is on storage.
    boot: String,
    images: Vec<DiskIdentity>,
}

impl Unsynced {
    /// Reads which of the disks failed to sync since the host was booted.
    pub(super) fn read(
        folder: &Path,
        storages: &[Storage],
    ) -> Result<(Self, Vec<DiskNumber>), DiskError> {
        let path = folder.join("unsynced.json");
        let failed = |source| DiskError::State {
            path: path.clone(),
            source,
        };
        let mut disks = Vec::new();
        match fs::read(&path) {
            Ok(text) => {
                let file: UnsyncedFile =
                    serde_json::from_slice(&text).map_err(|error| failed(error.into()))?;
                if file.boot == boot_id().map_err(failed)? {
                    for now in identities(storages)? {
                        let same =
                            |was: &DiskIdentity| (was.device, was.inode) == (now.device, now.inode);
                        if file.images.iter().any(same) {
                            disks.push(DiskNumber(now.disk));
                        }
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let recorded = disks.iter().copied().collect();
        let again_at = None;
        Ok((
            Self {
                path,
                recorded,
                again_at,
            },
            disks,
        ))
    }

    /// Records these disks, if they are others than before.
    ///
    /// # Errors
    /// If the file cannot be written: a restart then forgets them, unless a later call succeeds. Calls within a second of the error do nothing.
    pub(super) fn record(
        &mut self,
        disks: &HashSet<DiskNumber>,
        storages: &[Storage],
    ) -> io::Result<()> {
        if *disks == self.recorded {
            return Ok(());
        }
        if self.again_at.is_some_and(|at| Instant::now() < at) {
            return Ok(());
        }
        let written = self.write(disks, storages);
        self.again_at = written.is_err().then(|| Instant::now() + AGAIN);
        written?;
        self.recorded.clone_from(disks);
        Ok(())
    }

    fn write(&self, disks: &HashSet<DiskNumber>, storages: &[Storage]) -> io::Result<()> {
        if disks.is_empty() {
            return match fs::remove_file(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            };
        }
        let images = identities(storages).map_err(io::Error::other)?;
        let file = UnsyncedFile {
            boot: boot_id()?,
            images: images
                .into_iter()
                .filter(|identity| disks.contains(&DiskNumber(identity.disk)))
                .collect(),
        };
        let beside = self.path.with_extension("new");
        fs::write(&beside, serde_json::to_vec(&file)?)?;
        fs::rename(&beside, &self.path)
    }
}
