//! The image of test guests: a kernel, and an initrd with the workload and the modules it needs.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use cpio::newc::Builder;

use crate::{GuestConfig, GuestError, GuestKernel};

/// Where the kernel of our guests lies, if not in the workspace.
const KERNEL_VARIABLE: &str = "PLIMSOLL_GUEST_KERNEL";
/// Where their initrd lies, if not in the workspace.
const INITRD_VARIABLE: &str = "PLIMSOLL_GUEST_INITRD";
/// Where the kernels and the workload of our guests lie, if not in the workspace.
const FOLDER_VARIABLE: &str = "PLIMSOLL_GUESTS";
/// The directory of the image, below any parent of the current directory or of this program.
const FOLDER: &str = "target/guest";

/// Modules of a guest with disks, a balloon or a memory device, in the directory of its kernel.
const MODULES: &str = "modules";
/// Their file of lines `GROUP FILE`, in the order in which they are loaded.
const ORDER: &str = "order";
/// Records in the directory of a kernel why it is unavailable.
const ABSENT: &str = "absent";
/// The directory of the kernel that tracks idle pages.
const MEMORY: &str = "memory";
/// What a guest whose root file system is on its first disk starts.
const ROOT_ON_DISK: &str = include_str!("../../programs/root.sh");
/// A static shell with its tools, of Debian's package of this name.
const BUSYBOX: &str = "/bin/busybox";

/// A kernel and an initrd that run a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestImage {
    /// A Linux `bzImage` with the 8250 serial console built in.
    pub kernel: PathBuf,
    /// An archive with the workload as `/init`.
    pub initrd: PathBuf,
}

/// A kernel and the disk of a Debian with real programs, made by lab/programs/build.sh. Guests do not write to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramsImage {
    /// A Linux `bzImage` with drivers of the serial console, NVMe and ext4 built in.
    pub kernel: PathBuf,
    /// An ext4 file system.
    pub disk: PathBuf,
}

impl ProgramsImage {
    /// Finds the image in the directory `target/guest`, for a guest with this kernel.
    ///
    /// # Errors
    ///
    /// [`GuestError::NoImage`] without the kernel, [`GuestError::NoPrograms`] without the disk.
    pub fn locate(kernel: GuestKernel) -> Result<Self, GuestError> {
        let folder = folder().ok_or_else(no_folder)?;
        let kernel = folder.join(kernel.series()).join("vmlinuz");
        if !kernel.is_file() {
            return Err(missing(&kernel));
        }
        let disk = folder.join("debian-programs.img");
        if !disk.is_file() {
            return Err(GuestError::NoPrograms { disk });
        }
        Ok(Self { kernel, disk })
    }
}

impl GuestImage {
    /// Finds the image: by `PLIMSOLL_GUEST_KERNEL` and `PLIMSOLL_GUEST_INITRD` where
    /// they are set, else in the directory `target/guest`, as [`prepare`](Self::prepare) does.
    ///
    /// # Errors
    ///
    /// [`GuestError::NoImage`] if there is none; those of [`prepare`](Self::prepare).
    pub fn locate() -> Result<Self, GuestError> {
        let (kernel, initrd) = (named_by(KERNEL_VARIABLE)?, named_by(INITRD_VARIABLE)?);
        if let (Some(kernel), Some(initrd)) = (&kernel, &initrd) {
            return Ok(Self {
                kernel: kernel.clone(),
                initrd: initrd.clone(),
            });
        }
        let folder = folder().ok_or_else(|| GuestError::NoImage {
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
    /// neither disks, a balloon nor a memory device; else the kernel it requires under `target/guest`, and if it has one of
    /// them, an initrd with the kernel modules they need.
    ///
    /// # Errors
    ///
    /// [`GuestError::NoImage`] if a part is missing, with the reason where `./dev setup` left one; those
    /// of [`prepare`](Self::prepare).
    pub fn for_guest(config: &GuestConfig) -> Result<Self, GuestError> {
        let modules = config.balloon || config.memory_device || !config.disks.is_empty();
        if !modules && config.kernel == GuestKernel::default() {
            return Self::locate();
        }
        let folder = folder().ok_or_else(no_folder)?;
        Self::prepare_for(&folder, config.kernel, modules)
    }

    /// Takes a kernel by its file, and for it the initrd that `PLIMSOLL_GUEST_INITRD` names, else our workload: with
    /// the modules in the directory `modules` beside the kernel if `modules` are wanted and there are any.
    ///
    /// # Errors
    ///
    /// [`GuestError::NoImage`] if a part is missing; those of [`prepare`](Self::prepare).
    pub fn for_kernel(kernel: &Path, modules: bool) -> Result<Self, GuestError> {
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
        let folder = folder().ok_or_else(no_folder)?;
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
    fn prepare_for(folder: &Path, kernel: GuestKernel, modules: bool) -> Result<Self, GuestError> {
        let own = folder.join(kernel.series());
        if let Ok(reason) = fs::read_to_string(own.join(ABSENT)) {
            return Err(GuestError::NoImage {
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

    /// Uses the image in `folder`: `vmlinuz`, and `initrd.cpio`, which is packed
    /// from the static program `init` beside it if that is newer.
    ///
    /// # Errors
    ///
    /// [`GuestError::NoImage`] if a part is missing, [`GuestError::File`] if one cannot be
    /// read or written; an older `initrd.cpio` is then still whole.
    pub fn prepare(folder: &Path) -> Result<Self, GuestError> {
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

impl GuestImage {
    /// The same kernel with all files below `root`, of which it starts `init`, packed as the file `initrd`.
    ///
    /// # Errors
    ///
    /// [`GuestError::File`].
    pub fn with_root(&self, root: &Path, initrd: &Path) -> Result<Self, GuestError> {
        let pack = || {
            let mut archive = Archive::new()?;
            archive.add_below(root, "")?;
            fs::write(initrd, archive.finish()?)
        };
        pack().map_err(|source| file_error(initrd, source))?;
        Ok(Self {
            kernel: self.kernel.clone(),
            initrd: initrd.to_owned(),
        })
    }

    /// The kernel that tracks idle pages (guest/kernel/memory.config), with an initrd packed in `folder`: the shell script
    /// `init`, which busybox runs, the workload as `/workload`, and `programs` at the root with the libraries they need.
    ///
    /// # Errors
    ///
    /// [`GuestError::NoImage`] if a part is missing, with the reason where `./dev setup` left one; [`GuestError::File`].
    pub fn tracking_idle_pages(
        init: &str,
        programs: &[&Path],
        folder: &Path,
    ) -> Result<Self, GuestError> {
        let what = "the kernel that tracks idle pages";
        Self::of_script((MEMORY, what), init, programs, false, folder)
    }

    /// The same with a kernel of Debian.
    ///
    /// # Errors
    ///
    /// As [`tracking_idle_pages`](Self::tracking_idle_pages).
    pub fn with_script(
        kernel: GuestKernel,
        init: &str,
        programs: &[&Path],
        folder: &Path,
    ) -> Result<Self, GuestError> {
        let series = kernel.series();
        let what = format!("Linux {series}");
        Self::of_script((series, &what), init, programs, false, folder)
    }

    /// The same with an initrd that goes on with `/init.sh` of the guest's first disk: an image of lab/programs.
    ///
    /// # Errors
    ///
    /// As [`tracking_idle_pages`](Self::tracking_idle_pages).
    pub fn with_root_on_disk(kernel: GuestKernel, folder: &Path) -> Result<Self, GuestError> {
        let series = kernel.series();
        let what = format!("Linux {series}");
        Self::of_script((series, &what), ROOT_ON_DISK, &[], true, folder)
    }

    /// The kernel in the directory `kernel`, which is `what`, with an initrd that runs a script, with the kernel's modules if wanted.
    fn of_script(
        (kernel, what): (&str, &str),
        init: &str,
        programs: &[&Path],
        modules: bool,
        folder: &Path,
    ) -> Result<Self, GuestError> {
        let image = self::folder().ok_or_else(no_folder)?;
        let own = image.join(kernel);
        if let Ok(reason) = fs::read_to_string(own.join(ABSENT)) {
            return Err(GuestError::NoImage {
                what: format!("{what}: {}", reason.trim()),
            });
        }
        let kernel = own.join("vmlinuz");
        let (busybox, workload) = (Path::new(BUSYBOX), image.join("init"));
        for part in [&*kernel, busybox, &*workload] {
            if !part.is_file() {
                return Err(missing(part));
            }
        }
        let root = folder.join("root");
        let place = |from: &Path, to: &str| {
            let to = root.join(to.trim_start_matches('/'));
            let placed = fs::create_dir_all(to.parent().unwrap_or(&root));
            let placed = placed.and_then(|()| fs::copy(from, &to));
            placed.map(drop).map_err(|source| file_error(from, source))
        };
        place(busybox, BUSYBOX)?;
        place(&workload, "workload")?;
        for program in programs {
            place(
                program,
                &program.file_name().unwrap_or_default().to_string_lossy(),
            )?;
            for library in libraries_of(program)? {
                place(Path::new(&library), &library)?;
            }
        }
        if modules {
            let modules = own.join(MODULES);
            for name in modules_of(&modules)? {
                place(&modules.join(&name), &format!("{MODULES}/{name}"))?;
            }
        }
        let script = root.join("init");
        fs::write(&script, format!("#!{BUSYBOX} sh\n{init}"))
            .and_then(|()| fs::set_permissions(&script, Permissions::from_mode(0o755)))
            .map_err(|source| file_error(&script, source))?;
        let without_initrd = Self {
            kernel,
            initrd: PathBuf::new(),
        };
        without_initrd.with_root(&root, &folder.join("initrd.cpio"))
    }

    /// Copies kernel and initrd into a directory of `folder` that any user can read.
    ///
    /// # Errors
    ///
    /// [`GuestError::File`].
    pub fn public_copy(&self, folder: &Path) -> Result<Self, GuestError> {
        let allow = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
        let copy = |from: &Path, name: &str| -> Result<PathBuf, GuestError> {
            let to = folder.join(name);
            let copied = fs::copy(from, &to).and_then(|_| allow(&to, 0o644));
            copied.map_err(|source| file_error(&to, source))?;
            Ok(to)
        };
        allow(folder, 0o755).map_err(|source| file_error(folder, source))?;
        Ok(Self {
            kernel: copy(&self.kernel, "vmlinuz")?,
            initrd: copy(&self.initrd, "initrd")?,
        })
    }
}

/// The files that a program is linked with when it starts.
fn libraries_of(program: &Path) -> Result<Vec<String>, GuestError> {
    let listed = Command::new("ldd").arg(program).output();
    let listed = listed.map_err(|source| file_error(Path::new("ldd"), source))?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let words = text.split_ascii_whitespace();
    Ok(words
        .filter(|word| word.starts_with('/'))
        .map(str::to_owned)
        .collect())
}

fn no_folder() -> GuestError {
    GuestError::NoImage {
        what: format!("no folder {FOLDER} lies above the current folder or this program"),
    }
}

fn missing(path: &Path) -> GuestError {
    GuestError::NoImage {
        what: format!("{} does not exist", path.display()),
    }
}

fn named_by(variable: &str) -> Result<Option<PathBuf>, GuestError> {
    let Some(path) = std::env::var_os(variable).map(PathBuf::from) else {
        return Ok(None);
    };
    if path.is_file() {
        Ok(Some(path))
    } else {
        Err(GuestError::NoImage {
            what: format!("{variable} names {}, which is no file", path.display()),
        })
    }
}

fn folder() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(FOLDER_VARIABLE) {
        return Some(named.into());
    }
    [std::env::current_dir(), std::env::current_exe()]
        .into_iter()
        .flatten()
        .find_map(|start| {
            let folders = start.ancestors().map(|above| above.join(FOLDER));
            folders.into_iter().find(|folder| folder.is_dir())
        })
}

/// Packs the archive if it is older than what goes into it, or not there.
fn pack_if_older(init: &Path, modules: Option<&Path>, target: &Path) -> Result<(), GuestError> {
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

/// Names of all files in a directory of modules, `order` among them; each once.
fn modules_of(folder: &Path) -> Result<Vec<String>, GuestError> {
    let order = folder.join(ORDER);
    let text = fs::read_to_string(&order).map_err(|source| file_error(&order, source))?;
    let mut names: Vec<String> = text
        .lines()
        .filter_map(|line| Some(line.split_once(' ')?.1.to_owned()))
        .collect();
    names.push(ORDER.to_owned());
    names.sort();
    names.dedup();
    Ok(names)
}

/// An uncompressed initrd. Equal files make equal archives.
///
/// Devices are only described in it, so no privilege is needed.
struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    /// With `/dev/console`, to which the kernel connects the first process, and places for file systems.
    fn new() -> io::Result<Self> {
        let mut archive = Self {
            bytes: Vec::new(),
            inode: 0,
        };
        archive.add_directory("dev")?;
        let console = Builder::new("dev/console").mode(0o020_600);
        archive.add(console.rdev_major(5).rdev_minor(1), &[])?;
        archive.add_directory("proc")?;
        archive.add_directory("sys")?;
        Ok(archive)
    }

    /// # Errors
    ///
    /// [`io::ErrorKind::FileTooLarge`] for 4 GiB or more, which the format cannot describe.
    fn add(&mut self, builder: Builder, bytes: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let size = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let mut file = builder.ino(self.inode).write(&mut self.bytes, size);
        file.write_all(bytes)?;
        file.finish().map(drop)
    }

    fn add_directory(&mut self, name: &str) -> io::Result<()> {
        self.add(Builder::new(name).mode(0o040_755).nlink(2), &[])
    }

    /// Adds all files and directories below `folder`, whose names in the archive begin with `prefix`.
    fn add_below(&mut self, folder: &Path, prefix: &str) -> io::Result<()> {
        let mut entries: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let name = format!("{prefix}{}", entry.file_name().display());
            let path = entry.path();
            if path.is_dir() {
                self.add_directory(&name)?;
                self.add_below(&path, &format!("{name}/"))?;
            } else {
                let mode = fs::metadata(&path)?.permissions().mode();
                self.add(Builder::new(&name).mode(mode), &fs::read(&path)?)?;
            }
        }
        Ok(())
    }

    fn finish(self) -> io::Result<Vec<u8>> {
        cpio::newc::trailer(self.bytes)
    }
}

/// Returns an initrd that holds `init` as `/init`, and `modules`, by name, in the directory `/modules` if there are any.
///
/// # Errors
///
/// As [`Archive::add`].
fn initrd(init: &[u8], modules: &[(String, Vec<u8>)]) -> io::Result<Vec<u8>> {
    let mut archive = Archive::new()?;
    archive.add(Builder::new("init").mode(0o100_755), init)?;
    if !modules.is_empty() {
        archive.add_directory("modules")?;
    }
    for (name, bytes) in modules {
        let builder = Builder::new(&format!("modules/{name}")).mode(0o100_644);
        archive.add(builder, bytes)?;
    }
    archive.finish()
}

fn file_error(path: &Path, source: io::Error) -> GuestError {
    GuestError::File {
        path: path.to_owned(),
        source,
    }
}

/// Writes the archive beside its place and then moves it there, so that others
/// who start guests at the same time see the old one or the new one.
fn pack(init: &Path, modules: Option<&Path>, target: &Path) -> Result<(), GuestError> {
    let read = |path: &Path| fs::read(path).map_err(|source| file_error(path, source));
    let program = read(init)?;
    let mut packed = Vec::new();
    if let Some(folder) = modules {
        for name in modules_of(folder)? {
            let bytes = read(&folder.join(&name))?;
            packed.push((name, bytes));
        }
    }
    let archive = initrd(&program, &packed).map_err(|source| file_error(target, source))?;
    let folder = target.parent().unwrap_or(Path::new("."));
    let write = || -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(&archive)?;
        file.persist(target)?;
        Ok(())
    };
    write().map_err(|source| file_error(target, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, modes and contents, read as the format's description says; shares
    /// no code with the writer.
    fn unpack(archive: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let (mut files, mut at) = (Vec::new(), 0);
        loop {
            let header = std::str::from_utf8(&archive[at..at + 110]).unwrap();
            assert_eq!(&header[..6], "070701");
            let number = |nth: usize| u32::from_str_radix(&header[6 + 8 * nth..][..8], 16).unwrap();
            let (mode, bytes_len) = (number(1), number(6) as usize);
            let name_end = at + 110 + number(11) as usize;
            let name = String::from_utf8(archive[at + 110..name_end - 1].to_vec()).unwrap();
            assert_eq!(archive[name_end - 1], 0);
            let bytes_start = name_end.div_ceil(4) * 4;
            let bytes = archive[bytes_start..bytes_start + bytes_len].to_vec();
            at = (bytes_start + bytes_len).div_ceil(4) * 4;
            if name == "TRAILER!!!" {
                assert_eq!(at, archive.len());
                return files;
            }
            files.push((name, mode, bytes));
        }
    }

    #[test]
    fn the_first_header_is_the_known_one() {
        let archive = initrd(b"", &[]).unwrap();
        let expected = concat!(
            "070701",
            "00000001",
            "000041ed",
            "00000000",
            "00000000",
            "00000002",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000004",
            "00000000",
            "dev\0\0\0"
        );
        assert_eq!(&archive[..expected.len()], expected.as_bytes());
    }

    #[test]
    fn what_is_packed_is_unpacked() {
        // Lengths of all remainders by four, to which names and contents are padded.
        for length in 0..9 {
            let (init, module) = (vec![1; length], vec![2; 8 - length]);
            let files = unpack(&initrd(&init, &[]).unwrap());
            let names: Vec<_> = files.iter().map(|(name, ..)| name.as_str()).collect();
            assert_eq!(names, ["dev", "dev/console", "proc", "sys", "init"]);
            assert_eq!(files[4].1, 0o100_755);
            assert_eq!(files[4].2, init);
            let modules = [
                ("a.ko".to_owned(), module.clone()),
                ("order".to_owned(), vec![7]),
            ];
            let more = unpack(&initrd(&init, &modules).unwrap());
            assert_eq!(more[..5], files[..]);
            let names: Vec<_> = more[5..].iter().map(|(name, ..)| name.as_str()).collect();
            assert_eq!(names, ["modules", "modules/a.ko", "modules/order"]);
            assert_eq!(more[6].2, module);
        }
    }

    #[test]
    fn a_root_is_packed_with_all_that_is_below_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        fs::create_dir_all(root.join("lib/deep")).unwrap();
        fs::write(root.join("init"), "program").unwrap();
        fs::set_permissions(root.join("init"), Permissions::from_mode(0o755)).unwrap();
        fs::write(root.join("lib/deep/file"), "file").unwrap();
        let kernel = folder.path().join("vmlinuz");
        let initrd = folder.path().join("initrd");
        let image = GuestImage {
            initrd: PathBuf::new(),
            kernel: kernel.clone(),
        };
        let image = image.with_root(&root, &initrd).unwrap();
        assert_eq!((image.kernel, &image.initrd), (kernel, &initrd));
        let files = unpack(&fs::read(initrd).unwrap());
        let names: Vec<_> = files.iter().map(|(name, ..)| name.as_str()).collect();
        let below = ["init", "lib", "lib/deep", "lib/deep/file"];
        assert_eq!(names[..4], ["dev", "dev/console", "proc", "sys"]);
        assert_eq!(names[4..], below);
        assert_eq!(files[4].1, 0o100_755);
        assert_eq!(
            (files[6].1, files[7].2.as_slice()),
            (0o040_755, &b"file"[..])
        );
    }

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
