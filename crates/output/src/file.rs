//! Files that are replaced whole or not at all.
//!
//! A file is written beside its name and renamed into place, so that a reader
//! never sees half of it and a failed run leaves the old one. An existing path
//! that is no regular file (a pipe, `/dev/stdout`) is written directly, and a
//! block device is refused.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tempfile::NamedTempFile;

use crate::stop::is_ignored;
use crate::text::printable_path;

/// Most symbolic links that are followed, as the kernel does.
const LINKS_MAX: usize = 40;

/// Replaces the file at `path` by `content`, whole or not at all.
///
/// # Errors
///
/// The cause with the file's name; an older file of that name is then as it was.
pub fn write_file(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let mut file = AtomicFile::create(path)?;
    let written = file.write_all(content);
    written.with_context(|| cannot_write(path))?;
    file.persist()
}

/// Refuses to write to a block device: whatever it has would be gone, as the disk of a VM.
///
/// # Errors
///
/// `InvalidInput` if `path` is one, or a link to one.
pub fn refuse_block_device(path: &Path) -> io::Result<()> {
    match fs::metadata(path).is_ok_and(|there| there.file_type().is_block_device()) {
        true => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a block device is not overwritten",
        )),
        false => Ok(()),
    }
}

/// Creates or empties a file that is written over time, always at its end: one that is truncated meanwhile, as by logrotate's
/// `copytruncate`, gets no hole.
///
/// # Errors
///
/// The system's, and [`refuse_block_device`]'s.
pub fn create_log(path: &Path) -> io::Result<File> {
    refuse_block_device(path)?;
    // Held meanwhile, so that the reader of a named pipe is not told of an end.
    let _created = File::create(path)?;
    File::options().append(true).open(path)
}

/// Removes the temporary file at `path` if SIGINT or SIGTERM ends the process, or SIGHUP or SIGQUIT that is not ignored; it still ends at
/// once, also while it waits for input.
///
/// # Errors
///
/// The system's, if no handler can be installed.
pub fn remove_at_signals(path: &Path) -> io::Result<()> {
    let path = path.to_owned();
    let unless_ignored = [SIGHUP, SIGQUIT].into_iter();
    let unless_ignored = unless_ignored.filter(|&signal| !is_ignored(signal));
    let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain(unless_ignored))?;
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // It is not there any more if the file has its name.
            let _ = fs::remove_file(&path);
            let _ = emulate_default_handler(signal);
        }
    });
    Ok(())
}

/// A file being written, which takes its name when it is complete; until then an older one keeps it.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    target: Target,
}

#[derive(Debug)]
enum Target {
    /// In the directory of the file that it will replace, with that file's path.
    Temporary(NamedTempFile, PathBuf),
    /// A pipe or a device, which cannot be replaced.
    Direct(File),
}

impl AtomicFile {
    /// Begins a file that will be at `path`.
    ///
    /// # Errors
    ///
    /// The cause with the file's name.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let open = || -> std::io::Result<Target> {
            refuse_block_device(path)?;
            if fs::metadata(path).is_ok_and(|old| !old.is_file()) {
                return Ok(Target::Direct(File::options().write(true).open(path)?));
            }
            let target = followed(path);
            let old = fs::metadata(&target).map(|old| old.permissions());
            if old.is_ok() {
                // A file that this user may not write must not be replaced.
                File::options().write(true).open(&target)?;
            }
            let mode = old.map_or(0o666, |old| old.mode());
            let mut options = File::options();
            options.write(true).create_new(true).mode(mode);
            // Errors of its own files name them.
            let file = tempfile::Builder::new()
                .prefix(".plimsoll-")
                .make_in(directory_of(&target), |path| options.open(path))?;
            Ok(Target::Temporary(file, target))
        };
        Ok(Self {
            path: path.to_owned(),
            target: open().with_context(|| cannot_write(path))?,
        })
    }

    /// As [`remove_at_signals`], if a signal ends the process before the file has its name: for files that take long to write.
    /// The process still ends at once, also while it waits for input.
    ///
    /// # Errors
    ///
    /// The system's, if no handler can be installed.
    pub fn remove_at_signals(&self) -> io::Result<()> {
        match &self.target {
            Target::Temporary(file, _) => remove_at_signals(file.path()),
            Target::Direct(_) => Ok(()),
        }
    }

    /// Gives the file its name.
    ///
    /// # Errors
    ///
    /// The cause with the file's name; an older file of that name is then as it was.
    pub fn persist(self) -> anyhow::Result<()> {
        if let Target::Temporary(file, target) = self.target {
            let persisted = file.persist(target).map_err(|failure| failure.error);
            persisted.with_context(|| cannot_write(&self.path))?;
        }
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match &mut self.target {
            Target::Temporary(file, _) => file.as_file_mut().write(bytes),
            Target::Direct(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match &mut self.target {
            Target::Temporary(file, _) => file.as_file_mut().flush(),
            Target::Direct(file) => file.flush(),
        }
    }
}

/// Through symbolic links, so that they stay and what they name is replaced, also if it does not exist yet.
fn followed(path: &Path) -> PathBuf {
    let mut target = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(next) = fs::read_link(&target) else {
            break;
        };
        target = directory_of(&target).join(next);
    }
    target
}

/// The context of an error of writing to `path`.
pub fn cannot_write(path: &Path) -> String {
    format!("cannot write '{}'", printable_path(path))
}

/// The directory that holds `path`.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::process::Command;

    use plimsoll_skip::{Lack, skip};

    #[test]
    fn an_error_names_the_file_and_nothing_hidden() {
        let directory = tempfile::tempdir().unwrap();
        let said = |outcome: anyhow::Result<()>| format!("{:#}", outcome.unwrap_err());
        let expected = |path: &Path, why: &str| format!("cannot write '{}': {why}", path.display());
        let path = directory.path().join("nowhere/curve.csv");
        let none = expected(&path, "No such file or directory (os error 2)");
        assert_eq!(said(write_file(&path, b"x")), none);
        let path = directory.path().join("curve.csv");
        let file = AtomicFile::create(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let taken = expected(&path, "Is a directory (os error 21)");
        assert_eq!(said(file.persist()), taken);
        // A disk that is full.
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (_, hidden) = NamedTempFile::new_in(directory.path())
            .unwrap()
            .into_parts();
        let mut file = AtomicFile {
            target: Target::Temporary(NamedTempFile::from_parts(full, hidden), path.clone()),
            path,
        };
        let error = file.write_all(b"x").unwrap_err();
        assert_eq!(error.to_string(), "No space left on device (os error 28)");
    }

    #[test]
    fn a_file_is_replaced_whole_and_leaves_nothing_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("curve.csv");
        for content in ["first, and longer", "second"] {
            write_file(&path, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_log_that_is_truncated_meanwhile_goes_on_at_its_beginning() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("periods.csv");
        fs::write(&path, "old").unwrap();
        let mut log = create_log(&path).unwrap();
        log.write_all(b"first").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        File::create(&path).unwrap();
        log.write_all(b"second").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
    }

    #[test]
    fn a_link_stays_and_what_it_names_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_file(&link, b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        // And one that names nothing yet.
        fs::remove_file(&file).unwrap();
        write_file(&link, b"newer").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "newer");
    }

    #[test]
    fn a_private_file_stays_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("curve.csv");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        write_file(&path, b"new").unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }

    #[test]
    fn a_block_device_is_not_written_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        // A number of no driver: what is written to it goes nowhere.
        let made = Command::new("mknod")
            .arg(&path)
            .args(["b", "42", "0"])
            .status();
        if !made.is_ok_and(|status| status.success()) {
            return skip(Lack::Root, "mknod made no block device");
        }
        let refused = "a block device is not overwritten";
        let error = write_file(&path, b"x").unwrap_err();
        assert!(format!("{error:#}").ends_with(refused), "{error:#}");
        assert_eq!(create_log(&path).unwrap_err().to_string(), refused);
    }

    #[test]
    fn a_directory_is_not_written_over() {
        let directory = tempfile::tempdir().unwrap();
        let error = write_file(directory.path(), b"x").unwrap_err();
        assert!(format!("{error:#}").contains("Is a directory"), "{error:#}");
    }
}
