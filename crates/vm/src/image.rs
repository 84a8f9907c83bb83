//! The image our guests boot: a kernel, and an initrd that holds the workload and what modules it needs.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::{GuestConfig, GuestKernel, VmError, initrd};

/// Where the kernel of our guests lies, if not in the workspace.
const KERNEL_VARIABLE: &str = "PLIMSOLL_GUEST_KERNEL";
/// Where their initrd lies, if not in the workspace.
const INITRD_VARIABLE: &str = "PLIMSOLL_GUEST_INITRD";
/// The folder of the image, under any folder above the current one or above this program.
const FOLDER: &str = "target/guest";

/// Modules of a guest with disks or a balloon, in the folder of its kernel.
const MODULES: &str = "modules";
/// Their file of lines `GROUP FILE`, in the order in which they are loaded.
const ORDER: &str = "order";
/// Says in the folder of a kernel why there is none.
const ABSENT: &str = "absent";

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

    /// Finds the image for a guest: as [`locate`](Self::locate) does if it has the default kernel and
    /// neither disks nor a balloon; else the kernel it asks for under `target/guest`, and if it has one of
    /// them, an initrd with the kernel modules they need.
    ///
    /// # Errors
    ///
    /// [`VmError::NoImage`] if a part is missing, with the reason where `./dev setup` left one; those
    /// of [`prepare`](Self::prepare).
    pub fn for_guest(config: &GuestConfig) -> Result<Self, VmError> {
        let modules = config.balloon || !config.disks.is_empty();
        if !modules && config.kernel == GuestKernel::default() {
            return Self::locate();
        }
        let folder = folder().ok_or_else(|| VmError::NoImage {
            what: format!("no folder {FOLDER} lies above the current folder or this program"),
        })?;
        Self::prepare_for(&folder, config.kernel, modules)
    }

    /// Takes a kernel by its file, and for it the initrd that `PLIMSOLL_GUEST_INITRD` names, else our workload: with the
    /// modules in the folder `modules` beside the kernel if `modules` are wanted and there are any.
    ///
    /// # Errors
    ///
    /// [`VmError::NoImage`] if a part is missing; those of [`prepare`](Self::prepare).
    pub fn for_kernel(kernel: &Path, modules: bool) -> Result<Self, VmError> {
        if !kernel.is_file() {
            return Err(missing(kernel));
        }
        let with = |initrd| Self {
            kernel: kernel.to_owned(),
            initrd,
        };
        if let Some(initrd) = named_by(INITRD_VARIABLE)? {
            return Ok(with(initrd));
        }
        let folder = folder().ok_or_else(|| VmError::NoImage {
            what: format!("no folder {FOLDER} lies above the current folder or this program"),
        })?;
        let init = folder.join("init");
        let own = kernel.parent().unwrap_or(Path::new("."));
        let beside = own.join(MODULES);
        if modules && beside.join(ORDER).exists() {
            let initrd = own.join("disks.cpio");
            pack_if_older(&init, Some(&beside), &initrd)?;
            return Ok(with(initrd));
        }
        let initrd = folder.join("initrd.cpio");
        pack_if_older(&init, None, &initrd)?;
        Ok(with(initrd))
    }

    /// Takes the kernel `kernel` below `folder`, with modules or without.
    fn prepare_for(folder: &Path, kernel: GuestKernel, modules: bool) -> Result<Self, VmError> {
        let own = folder.join(kernel.series());
        if let Ok(reason) = fs::read_to_string(own.join(ABSENT)) {
            return Err(VmError::NoImage {
                what: format!("Linux {}: {}", kernel.series(), reason.trim()),
            });
        }
        let image = Self {
            kernel: own.join("vmlinuz"),
            initrd: own.join(if modules { "disks.cpio" } else { "initrd.cpio" }),
        };
        if !image.kernel.exists() {
            return Err(missing(&image.kernel));
        }
        let modules = modules.then(|| own.join(MODULES));
        pack_if_older(&folder.join("init"), modules.as_deref(), &image.initrd)?;
        Ok(image)
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
        pack_if_older(&init, None, &image.initrd)?;
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

/// Packs the archive if it is older than what goes into it, or not there.
fn pack_if_older(init: &Path, modules: Option<&Path>, target: &Path) -> Result<(), VmError> {
    let changed = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
    let packed = changed(target);
    if packed.is_none() && !init.exists() {
        return Err(missing(init));
    }
    let mut files = vec![init.to_owned()];
    if let Some(folder) = modules {
        let order = folder.join(ORDER);
        if !order.exists() {
            return Err(missing(&order));
        }
        files.extend(
            modules_of(folder)?
                .into_iter()
                .map(|name| folder.join(name)),
        );
    }
    let is_newer = |file: &PathBuf| {
        changed(file).is_some_and(|file| packed.is_none_or(|packed| packed <= file))
    };
    if files.iter().any(is_newer) {
        pack(init, modules, target)?;
    }
    Ok(())
}

/// Names of all files in a folder of modules, `order` among them; each once.
fn modules_of(folder: &Path) -> Result<Vec<String>, VmError> {
    let order = folder.join(ORDER);
    let text = fs::read_to_string(&order).map_err(|source| VmError::of_file(&order, source))?;
    let mut names: Vec<String> = text
        .lines()
        .filter_map(|line| Some(line.split_once(' ')?.1.to_owned()))
        .collect();
    names.push(ORDER.to_owned());
    names.sort();
    names.dedup();
    Ok(names)
}

/// Writes the archive beside its place and then moves it there, so that others
/// who start guests at the same time see the old one or the new one.
fn pack(init: &Path, modules: Option<&Path>, target: &Path) -> Result<(), VmError> {
    let read = |path: &Path| fs::read(path).map_err(|source| VmError::of_file(path, source));
    let program = read(init)?;
    let mut packed = Vec::new();
    if let Some(folder) = modules {
        for name in modules_of(folder)? {
            let bytes = read(&folder.join(&name))?;
            packed.push((name, bytes));
        }
    }
    let archive = initrd(&program, &packed).ok_or_else(|| VmError::NoImage {
        what: format!("a part of {} has 4 GiB or more", target.display()),
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
            initrd(b"program", &[]).unwrap()
        );
        // Older than the archive: left alone.
        let init = fs::File::options().write(true).open(path("init")).unwrap();
        init.set_modified(std::time::UNIX_EPOCH).unwrap();
        fs::write(&image.initrd, "as it was").unwrap();
        GuestImage::prepare(folder.path()).unwrap();
        assert_eq!(fs::read(&image.initrd).unwrap(), b"as it was");
    }

    #[test]
    fn a_guest_with_disks_gets_its_kernels_modules() {
        let folder = tempfile::tempdir().unwrap();
        let prepare = || GuestImage::prepare_for(folder.path(), GuestKernel::V6_12, true);
        let refused = || prepare().unwrap_err().to_string();
        let own = folder.path().join("6.12");
        fs::create_dir_all(own.join("modules")).unwrap();
        fs::write(own.join("absent"), "no such package\n").unwrap();
        assert!(refused().contains("Linux 6.12: no such package"));
        fs::remove_file(own.join("absent")).unwrap();
        assert!(refused().contains("6.12/vmlinuz does not exist"));
        fs::write(own.join("vmlinuz"), "kernel").unwrap();
        fs::write(folder.path().join("init"), "program").unwrap();
        assert!(refused().contains("modules/order does not exist"));
        let order = "disk a.ko\ndm b.ko\ncrypt b.ko\n";
        fs::write(own.join("modules/order"), order).unwrap();
        fs::write(own.join("modules/a.ko"), "first").unwrap();
        assert!(refused().contains("b.ko"));
        fs::write(own.join("modules/b.ko"), "second").unwrap();
        let image = prepare().unwrap();
        let packed = |second: &str| {
            let modules = [("a.ko", "first"), ("b.ko", second), ("order", order)];
            let modules = modules.map(|(name, bytes)| (name.to_owned(), bytes.into()));
            initrd(b"program", &modules).unwrap()
        };
        assert_eq!(fs::read(&image.initrd).unwrap(), packed("second"));
        fs::write(own.join("modules/b.ko"), "new").unwrap();
        prepare().unwrap();
        assert_eq!(fs::read(&image.initrd).unwrap(), packed("new"));
        let bare = GuestImage::prepare_for(folder.path(), GuestKernel::V6_12, false).unwrap();
        assert_eq!(
            fs::read(bare.initrd).unwrap(),
            initrd(b"program", &[]).unwrap()
        );
    }
}
