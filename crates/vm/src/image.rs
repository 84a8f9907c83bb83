//! The image our guests boot: a kernel, and an initrd that holds the workload.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::{VmError, initrd};

/// Where the kernel of our guests lies, if not in the workspace.
const KERNEL_VARIABLE: &str = "PLIMSOLL_GUEST_KERNEL";
/// Where their initrd lies, if not in the workspace.
const INITRD_VARIABLE: &str = "PLIMSOLL_GUEST_INITRD";
/// The folder of the image, under any folder above the current one or above this program.
const FOLDER: &str = "target/guest";

/// A kernel and an initrd that run a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestImage {
    /// A Linux `bzImage` with the 8250 serial console built in.
    pub kernel: PathBuf,
    /// An archive with the workload as `/init`.
    pub initrd: PathBuf,
}

impl GuestImage {
    /// Finds the image: by `PLIMSOLL_GUEST_KERNEL` and `PLIMSOLL_GUEST_INITRD` where
    /// they are set, else in the folder `target/guest`, as [`prepare`](Self::prepare) does.
    ///
    /// # Errors
    ///
    /// [`VmError::NoImage`] if there is none; those of [`prepare`](Self::prepare).
    pub fn locate() -> Result<Self, VmError> {
        let (kernel, initrd) = (named_by(KERNEL_VARIABLE)?, named_by(INITRD_VARIABLE)?);
        if let (Some(kernel), Some(initrd)) = (&kernel, &initrd) {
            return Ok(Self {
                kernel: kernel.clone(),
                initrd: initrd.clone(),
            });
        }
        let folder = folder().ok_or_else(|| VmError::NoImage {
            what: format!(
                "neither {KERNEL_VARIABLE} nor {INITRD_VARIABLE} is set for both parts, and no \
                 folder {FOLDER} lies above the current folder or this program"
            ),
        })?;
        let prepared = Self::prepare(&folder)?;
        Ok(Self {
            kernel: kernel.unwrap_or(prepared.kernel),
            initrd: initrd.unwrap_or(prepared.initrd),
        })
    }

    /// Takes the image in `folder`: `vmlinuz`, and `initrd.cpio`, which is packed
    /// from the static program `init` beside it if that is newer.
    ///
    /// # Errors
    ///
    /// [`VmError::NoImage`] if a part is missing, [`VmError::File`] or
    /// [`VmError::NotPermitted`] if one cannot be read or written; an older
    /// `initrd.cpio` is then still whole.
    pub fn prepare(folder: &Path) -> Result<Self, VmError> {
        let image = Self {
            kernel: folder.join("vmlinuz"),
            initrd: folder.join("initrd.cpio"),
        };
        let init = folder.join("init");
        if !image.kernel.exists() {
            return Err(missing(&image.kernel));
        }
        let changed = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
        match (changed(&init), changed(&image.initrd)) {
            (None, None) => return Err(missing(&init)),
            (None, Some(_)) => {}
            (Some(init), Some(initrd)) if init < initrd => {}
            (Some(_), _) => pack(&init, &image.initrd)?,
        }
        Ok(image)
    }
}

fn missing(path: &Path) -> VmError {
    VmError::NoImage {
        what: format!("{} does not exist", path.display()),
    }
}

fn named_by(variable: &str) -> Result<Option<PathBuf>, VmError> {
    let Some(path) = std::env::var_os(variable).map(PathBuf::from) else {
        return Ok(None);
    };
    if path.is_file() {
        Ok(Some(path))
    } else {
        Err(VmError::NoImage {
            what: format!("{variable} names {}, which is no file", path.display()),
        })
    }
}

fn folder() -> Option<PathBuf> {
    [std::env::current_dir(), std::env::current_exe()]
        .into_iter()
        .flatten()
        .find_map(|start| {
            let folders = start.ancestors().map(|above| above.join(FOLDER));
            folders.into_iter().find(|folder| folder.is_dir())
        })
}

/// Writes the archive beside its place and then moves it there, so that others
/// who start guests at the same time see the old one or the new one.
fn pack(init: &Path, target: &Path) -> Result<(), VmError> {
    let program = fs::read(init).map_err(|source| VmError::of_file(init, source))?;
    let archive = initrd(&program).ok_or_else(|| VmError::NoImage {
        what: format!("{} has 4 GiB or more", init.display()),
    })?;
    let folder = target.parent().unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(&archive)?;
        file.persist(target)?;
        Ok(())
    };
    write().map_err(|source| VmError::of_file(target, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_packed_when_its_program_is_newer() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name| folder.path().join(name);
        let refused = GuestImage::prepare(folder.path()).unwrap_err();
        assert!(
            refused.to_string().contains("vmlinuz does not exist"),
            "{refused}"
        );
        fs::write(path("vmlinuz"), "kernel").unwrap();
        let refused = GuestImage::prepare(folder.path()).unwrap_err();
        assert!(refused.to_string().contains("./dev setup"), "{refused}");
        fs::write(path("init"), "program").unwrap();
        let image = GuestImage::prepare(folder.path()).unwrap();
        assert_eq!(
            fs::read(&image.initrd).unwrap(),
            initrd(b"program").unwrap()
        );
        // Older than the archive: left alone.
        let init = fs::File::options().write(true).open(path("init")).unwrap();
        init.set_modified(std::time::UNIX_EPOCH).unwrap();
        fs::write(&image.initrd, "as it was").unwrap();
        GuestImage::prepare(folder.path()).unwrap();
        assert_eq!(fs::read(&image.initrd).unwrap(), b"as it was");
    }
}
