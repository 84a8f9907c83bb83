//! The directory of what outlives a disk daemon: delayed writes, which disks failed to sync, and whether the VM is paused.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Parent of the directories of root's VMs, where plimsolld's sockets are too.
const DIRECTORY: &str = "/run/plimsoll";
/// How long a daemon that was killed may keep its lock.
const ENDING_MAX: Duration = Duration::from_secs(1);

/// A VM's directory, locked for this process.
#[derive(Debug)]
pub(super) struct StateDirectory {
    path: PathBuf,
    /// Whether it is removed at the end, if it is empty then.
    is_default: bool,
    _lock: File,
}

impl StateDirectory {
    /// The directory that is named after the VM.
    ///
    /// # Errors
    ///
    /// As for [`at`](Self::at).
    pub(super) fn of(name: &str) -> anyhow::Result<Self> {
        let mut directory = Self::at(&directories().join(name))?;
        directory.is_default = true;
        Ok(directory)
    }

    /// Makes the directory if it is not there, for this user alone.
    ///
    /// # Errors
    ///
    /// If it cannot be made, or another daemon uses it.
    pub(super) fn at(path: &Path) -> anyhow::Result<Self> {
        let begin = Instant::now();
        loop {
            create(path)?;
            let name = path.display();
            if let Some(lock) =
                lock(path).with_context(|| format!("cannot lock the directory {name}"))?
            {
                return Ok(Self {
                    path: path.to_owned(),
                    is_default: false,
                    _lock: lock,
                });
            }
            anyhow::ensure!(
                begin.elapsed() < ENDING_MAX,
                "the state directory {name} is in use by another daemon: give this VM another --name or --state, or stop that one"
            );
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for StateDirectory {
    fn drop(&mut self) {
        if self.is_default {
            // It stays if anything is in it.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// Parent of the directories of this user's VMs.
pub fn directories() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|own| !own.is_empty());
    match own {
        Some(own) if !rustix::process::geteuid().is_root() => PathBuf::from(own).join("plimsoll"),
        _ => PathBuf::from(DIRECTORY),
    }
}

/// Makes a directory for this user alone. Its parent may be [`DIRECTORY`], which others may enter.
///
/// # Errors
///
/// Why it cannot be made, with the option that names another.
pub fn create(path: &Path) -> anyhow::Result<()> {
    let all = Path::new(DIRECTORY);
    let is_first = path.starts_with(all) && fs::create_dir(all).is_ok();
    if is_first {
        // Whatever the umask is. It holds nothing yet.
        let _ = fs::set_permissions(all, Permissions::from_mode(0o755));
    }
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path);
    made.with_context(|| {
        let name = path.display();
        format!("cannot create the directory {name}: see --state")
    })
}

/// Locks the directory at this path; `None` if another daemon has it, or has just removed it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let directory = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let (ours, there) = (directory.metadata()?, fs::metadata(path));
    let is_there = there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino()));
    Ok(is_there.then_some(directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_belongs_to_one_daemon_and_is_removed_if_it_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        let own = |is_default| {
            let mut directory = StateDirectory::at(&path).unwrap();
            directory.is_default = is_default;
            directory
        };
        let first = own(true);
        assert_eq!(first.path(), path);
        let refused = StateDirectory::at(&path).unwrap_err().to_string();
        assert!(refused.contains("in use by another daemon"), "{refused}");
        fs::write(path.join("unsynced.json"), "").unwrap();
        drop(first);
        drop(own(false));
        fs::remove_file(path.join("unsynced.json")).unwrap();
        drop(own(false));
        assert!(path.exists());
        drop(own(true));
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_that_its_daemon_removes_meanwhile_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        let mut first = StateDirectory::at(&path).unwrap();
        first.is_default = true;
        let ends = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(first);
        });
        let second = StateDirectory::at(&path).unwrap();
        ends.join().unwrap();
        assert!(StateDirectory::at(&path).is_err(), "it is locked");
        assert_eq!(
            fs::metadata(second.path()).unwrap().permissions().mode() & 0o777,
            0o700
        );
    }
}
