//! A guest of ours on disks of ours: images, disk daemon and VM.
//!
//! The daemon is a process of its own, as users run it, so that it can be killed; the guest runs a
//! workload of `guest/workload` that verifies what it reads; the images are made and checked by e2fsprogs.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use plimsoll_protocol::disk_admin;
use plimsoll_vm::ConsoleEvent;
use tempfile::TempDir;

use crate::{DiskBackend, Guest, GuestConfig, GuestDisk, GuestImage, GuestKernel, Server, host};

/// How long a daemon may take until it serves.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(30);
/// MiB of memory that each guest has beside what its test gives it: what a debug kernel takes for itself.
const EXTRA_MEMORY_VARIABLE: &str = "PLIMSOLL_GUEST_EXTRA_MIB";
/// The disk's image in the directory.
const IMAGE: &str = "disk.img";
/// The VM's monitor in the directory.
const MONITOR: &str = "monitor.sock";
/// Serial of the disk with programs, and its size.
const TOOLS_SERIAL: &str = "plimsoll-tools";
const TOOLS_MIB: u64 = 256;
/// Begins the line that a daemon prints when it serves.
const SERVES: &str = "disk: serving ";

/// Configuration of a guest on disks.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The guest's kernel.
    pub kernel: GuestKernel,
    /// The guest's memory in MiB.
    pub memory_mib: u64,
    /// The guest's CPUs.
    pub vcpus: u32,
    /// Size of its disk in MiB.
    pub image_mib: u64,
    /// Whether the disk begins with an ext4 file system of 4 KiB blocks.
    pub formatted: bool,
    /// Size in MiB of a second disk, with the serial `plimsoll-swap`; 0 for none.
    pub swap_mib: u64,
    /// An image that is there already, in place of one that is made.
    pub image: Option<PathBuf>,
    /// Whether the image is one of lab/programs, from which the guest boots; the workload is then a job of it.
    pub boots_image: bool,
    /// An image of programs, which QEMU itself serves as a disk that cannot be written.
    pub tools: Option<PathBuf>,
    /// Whether the daemon may pause the VM.
    pub monitor: bool,
    /// Queues of each disk.
    pub queues: u16,
    /// Whether the guest cannot write its disk.
    pub read_only: bool,
    /// The user as whom the daemon runs, if not our own; only root may choose one.
    pub user: Option<u32>,
    /// Arguments of `plimsoll disk serve` besides disks and sockets: `--cache 64M` and so on.
    pub serve: Vec<String>,
    /// What the guest runs: words `key=value` of guest/workload/README.md.
    pub workload: String,
}

impl Setup {
    /// A guest of 160 MiB and one CPU on a formatted disk of 256 MiB.
    pub fn new(serve: &str, workload: &str) -> Self {
        Self {
            kernel: GuestKernel::V6_1,
            memory_mib: 160,
            vcpus: 1,
            image_mib: 256,
            formatted: true,
            swap_mib: 0,
            image: None,
            boots_image: false,
            tools: None,
            monitor: false,
            queues: 1,
            read_only: false,
            user: None,
            serve: serve.split_ascii_whitespace().map(str::to_owned).collect(),
            workload: workload.to_owned(),
        }
    }
}

/// A line `plimsoll: result name=...` of a guest.
pub type Fields = BTreeMap<String, String>;

/// Output of a guest until it ended, in order.
#[derive(Debug, Clone, Default)]
pub struct GuestOutput {
    /// Its results by name.
    pub results: Vec<(String, Fields)>,
    /// Number of wrong blocks, by its last line; `None` if it did not end by itself.
    pub mismatches: Option<u64>,
    /// Kernel messages that report errors.
    pub kernel: Vec<String>,
    /// The last flush it reported.
    pub flushed: Option<u64>,
}

impl GuestOutput {
    /// A number of the last result of that name and, if given, phase.
    ///
    /// # Errors
    /// If there is none.
    pub fn number(&self, name: &str, phase: Option<&str>, key: &str) -> anyhow::Result<u64> {
        let found = self.results.iter().rev().find(|(own, fields)| {
            own == name
                && phase.is_none_or(|phase| fields.get("phase").is_some_and(|own| own == phase))
        });
        let text = found
            .and_then(|(_, fields)| fields.get(key))
            .with_context(|| format!("the guest reported no {key} in {name} {phase:?}"))?;
        text.parse()
            .with_context(|| format!("{key}={text} of {name}"))
    }
}

/// A daemon, and a guest on its disks.
pub struct DiskGuest {
    // Ended in this order.
    guest: Option<Guest>,
    daemon: Server,
    folder: TempDir,
    /// In memory, where delayed writes are kept.
    state: TempDir,
    program: PathBuf,
    setup: Setup,
    told: GuestOutput,
}

impl DiskGuest {
    /// Makes an image, starts the daemon and boots the guest. `program` is `plimsoll`.
    ///
    /// # Errors
    /// Why it did not come up; nothing is left running.
    pub fn start(program: &Path, setup: &Setup) -> anyhow::Result<Self> {
        let mut made = Self::prepare(program, setup)?;
        made.boot(&setup.workload)?;
        Ok(made)
    }

    /// Makes an image and starts the daemon, without a guest.
    ///
    /// # Errors
    /// Why it did not come up; nothing is left running.
    pub fn prepare(program: &Path, setup: &Setup) -> anyhow::Result<Self> {
        let folder = TempDir::with_prefix("plimsoll-disk-")?;
        if setup.image.is_none() {
            let image = folder.path().join(IMAGE);
            make_image(&image, setup.image_mib, setup.formatted)?;
        }
        if setup.swap_mib > 0 {
            make_image(&folder.path().join("swap.img"), setup.swap_mib, false)?;
        }
        let state = TempDir::with_prefix_in("plimsoll-disk-", "/dev/shm")?;
        let mut program = program.to_owned();
        if let Some(user) = setup.user {
            // Where it can reach it: the directory of a build may be its owner's alone.
            let copy = folder.path().join("plimsoll");
            std::fs::copy(&program, &copy)?;
            program = copy;
            give_to(user, folder.path())?;
            give_to(user, state.path())?;
        }
        let daemon = start_daemon(&program, folder.path(), state.path(), setup)?;
        Ok(Self {
            folder,
            state,
            program,
            setup: setup.clone(),
            daemon,
            guest: None,
            told: GuestOutput::default(),
        })
    }

    /// Boots a guest with this workload on the disks; the output of an earlier one is dropped.
    ///
    /// # Errors
    /// Why it did not start.
    pub fn boot(&mut self, workload: &str) -> anyhow::Result<()> {
        self.kill_guest();
        let name = self.folder.path().file_name().unwrap_or_default();
        let mut config = GuestConfig::new(&name.to_string_lossy().replace('.', "-"), workload);
        config.kernel = self.setup.kernel;
        config.memory_mib = self.setup.memory_mib + extra_memory_mib()?;
        config.vcpus = self.setup.vcpus;
        let mut disk = |socket: &str, queues: u16| {
            let mut disk = GuestDisk::vhost_user(self.folder.path().join(socket));
            if let DiskBackend::VhostUser { queues: own, .. } = &mut disk.backend {
                *own = queues;
            }
            config.disks.push(disk);
        };
        disk("disk.sock", self.setup.queues);
        if self.setup.swap_mib > 0 {
            disk("swap.sock", self.setup.queues);
        }
        disk("control.sock", 1);
        if let Some(tools) = &self.setup.tools {
            config.disks.push(GuestDisk {
                backend: DiskBackend::Image {
                    path: tools.clone(),
                    serial: TOOLS_SERIAL.to_owned(),
                    read_only: true,
                },
                options: String::new(),
            });
        }
        if self.setup.monitor {
            let monitor = self.folder.path().join(MONITOR);
            let monitor = format!("unix:{},server=on,wait=off", monitor.display());
            config.extra_arguments.extend(["-qmp".into(), monitor]);
        }
        let image = match self.setup.boots_image {
            true => GuestImage::with_root_on_disk(config.kernel, self.folder.path())?,
            false => GuestImage::for_guest(&config)?,
        };
        self.told = GuestOutput::default();
        self.guest = Some(Guest::start(&image, &config)?);
        Ok(())
    }

    /// The configuration for the next daemon and the next guest. The images are made already.
    pub fn setup(&mut self) -> &mut Setup {
        &mut self.setup
    }

    /// The daemon's process id.
    pub fn daemon_pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// The guest that runs, if one does.
    pub fn guest(&mut self) -> Option<&mut Guest> {
        self.guest.as_mut()
    }

    /// The directory with image, sockets and state.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The daemon's admin socket.
    pub fn admin(&self) -> PathBuf {
        self.folder.path().join("admin.sock")
    }

    /// Reads until the expected line of the guest; other lines are kept.
    ///
    /// # Errors
    /// If it does not within `timeout`, fails, or ends.
    pub fn listen(
        &mut self,
        timeout: Duration,
        until: impl FnMut(&ConsoleEvent) -> bool,
    ) -> anyhow::Result<()> {
        let heard = self.hears(timeout, until)?;
        ensure!(
            heard,
            "the guest printed nothing new for {timeout:?}: {:?}; flushed {:?}; its disks: {:?}",
            self.told.results.last(),
            self.told.flushed,
            disk_admin::stat(&self.admin(), DAEMON_TIMEOUT)
        );
        Ok(())
    }

    /// Reads until the expected line of the guest, or until `timeout`; returns whether the line came.
    ///
    /// # Errors
    /// If the guest fails, or ends.
    pub fn hears(
        &mut self,
        timeout: Duration,
        mut until: impl FnMut(&ConsoleEvent) -> bool,
    ) -> anyhow::Result<bool> {
        let guest = self.guest.as_mut().context("no guest runs")?;
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(line) = guest.next_line(left)? else {
                return Ok(false);
            };
            let Some(event) = line.event else { continue };
            match &event {
                ConsoleEvent::Result { name, fields } => {
                    self.told.results.push((name.clone(), fields.clone()));
                }
                ConsoleEvent::Done { mismatches, .. } => self.told.mismatches = Some(*mismatches),
                ConsoleEvent::Kernel { text } => self.told.kernel.push(text.clone()),
                ConsoleEvent::Flushed { upto } => self.told.flushed = Some(*upto),
                ConsoleEvent::Error { message } => bail!("the guest gave up: {message}"),
                _ => {}
            }
            if until(&event) {
                return Ok(true);
            }
        }
    }

    /// Waits until the guest's workload is done and it has powered off. Returns its output.
    ///
    /// # Errors
    /// If it is not within `timeout`, or failed.
    pub fn finish(&mut self, timeout: Duration) -> anyhow::Result<GuestOutput> {
        self.listen(timeout, |event| matches!(event, ConsoleEvent::Done { .. }))?;
        if let Some(guest) = self.guest.as_mut() {
            guest.wait(Duration::from_secs(30))?;
        }
        self.kill_guest();
        Ok(self.told.clone())
    }

    /// Output of the guest so far.
    pub fn told(&self) -> &GuestOutput {
        &self.told
    }

    /// Ends the VM at once.
    pub fn kill_guest(&mut self) {
        if let Some(mut guest) = self.guest.take() {
            guest.kill();
        }
    }

    /// Ends the daemon at once, as by `kill -9`; beneath a QEMU that [may lose disks](host::qemu_may_lose_disks), once the guest
    /// uses all disks.
    pub fn kill_daemon(&mut self) {
        let deadline = Instant::now() + DAEMON_TIMEOUT;
        let unused = || {
            let stat = disk_admin::stat(&self.admin(), DAEMON_TIMEOUT);
            stat.is_ok_and(|stat| !stat.disks_used)
        };
        if self.guest.is_some() && host::qemu_may_lose_disks() {
            while unused() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(10));
            }
        }
        self.daemon.kill();
    }

    /// Starts the daemon again.
    ///
    /// # Errors
    /// Why it did not come up.
    pub fn restart_daemon(&mut self) -> anyhow::Result<()> {
        self.kill_daemon();
        self.daemon = start_daemon(
            &self.program,
            self.folder.path(),
            self.state.path(),
            &self.setup,
        )?;
        Ok(())
    }

    /// Ends the daemon as an operator would, so that it writes everything back, and has the file system checked.
    ///
    /// # Errors
    /// If it does not end successfully, or the file system is damaged.
    pub fn check_image(&mut self) -> anyhow::Result<()> {
        self.kill_guest();
        let status = self.daemon.end()?;
        ensure!(
            status.success(),
            "the daemon ended with {status}: {}",
            self.daemon.log()
        );
        if self.setup.formatted {
            check_files(&self.image())?;
        }
        Ok(())
    }

    /// The same after the VM was killed: the journal is replayed first.
    ///
    /// # Errors
    /// If the daemon does not end successfully, or the file system is damaged.
    pub fn check_image_after_kill(&mut self) -> anyhow::Result<()> {
        let formatted = std::mem::replace(&mut self.setup.formatted, false);
        let ended = self.check_image();
        self.setup.formatted = formatted;
        ended?;
        if formatted {
            let image = self.image();
            let replayed = Command::new("e2fsck").arg("-p").arg(&image).output()?;
            // 1: something was done, such as to remove files that were open.
            ensure!(
                matches!(replayed.status.code(), Some(0 | 1)),
                "e2fsck -p: {}",
                String::from_utf8_lossy(&replayed.stdout)
            );
            check_files(&image)?;
        }
        Ok(())
    }

    fn image(&self) -> PathBuf {
        let own = || self.folder.path().join(IMAGE);
        self.setup.image.clone().unwrap_or_else(own)
    }

    /// What the daemon has written to its log since it was started last.
    pub fn daemon_log(&self) -> String {
        self.daemon.log()
    }
}

fn extra_memory_mib() -> anyhow::Result<u64> {
    let Some(extra) = std::env::var_os(EXTRA_MEMORY_VARIABLE) else {
        return Ok(0);
    };
    let number = extra.to_str().and_then(|extra| extra.parse().ok());
    number.with_context(|| format!("{EXTRA_MEMORY_VARIABLE}={}", extra.display()))
}

/// Gives a directory and its files to a user.
fn give_to(user: u32, folder: &Path) -> anyhow::Result<()> {
    let give = |path: &Path| {
        chown(path, Some(user), Some(user)).with_context(|| path.display().to_string())
    };
    give(folder)?;
    for entry in folder.read_dir()? {
        give(&entry?.path())?;
    }
    Ok(())
}

/// Has an ext4 file system checked that was unmounted.
fn check_files(image: &Path) -> anyhow::Result<()> {
    let check = Command::new("e2fsck").arg("-fn").arg(image).output()?;
    ensure!(
        check.status.success(),
        "e2fsck: {}",
        String::from_utf8_lossy(&check.stdout)
    );
    Ok(())
}

/// Makes an ext4 image with this program and the libraries it is linked with, at their places, and the directories in which
/// the workload mounts what the program uses.
///
/// # Errors
/// Why it cannot be made.
pub fn make_tools_image(path: &Path, program: &Path) -> anyhow::Result<()> {
    let root = TempDir::with_prefix("plimsoll-tools-")?;
    for name in ["dev", "proc", "disk", "tmp"] {
        std::fs::create_dir(root.path().join(name))?;
    }
    let linked = Command::new("ldd").arg(program).output().context("ldd")?;
    ensure!(linked.status.success(), "ldd {}", program.display());
    let linked = String::from_utf8(linked.stdout)?;
    let libraries = linked
        .split_ascii_whitespace()
        .filter(|word| word.starts_with('/'));
    for file in libraries.map(Path::new).chain([program]) {
        let inside = root.path().join(file.strip_prefix("/")?);
        let parent = inside.parent().context("a file in a directory")?;
        std::fs::create_dir_all(parent)?;
        std::fs::copy(file, &inside).with_context(|| file.display().to_string())?;
    }
    make_files(path, TOOLS_MIB, &["-d".as_ref(), root.path().as_ref()])
}

/// Makes an image of this many MiB, empty or with an ext4 file system of 4 KiB blocks.
///
/// # Errors
/// Why it cannot be made.
pub fn make_image(path: &Path, mib: u64, formatted: bool) -> anyhow::Result<()> {
    if formatted {
        return make_files(path, mib, &[]);
    }
    File::create(path)?.set_len(mib << 20)?;
    Ok(())
}

/// Makes an image of this many MiB with an ext4 file system of 4 KiB blocks, by more options of mke2fs.
fn make_files(path: &Path, mib: u64, options: &[&OsStr]) -> anyhow::Result<()> {
    File::create(path)?.set_len(mib << 20)?;
    let made = Command::new("mke2fs")
        .args(["-q", "-t", "ext4", "-b", "4096"])
        .args(options)
        .arg(path)
        .output()
        .context("mke2fs")?;
    ensure!(
        made.status.success(),
        "mke2fs: {}",
        String::from_utf8_lossy(&made.stderr)
    );
    Ok(())
}

fn start_daemon(
    program: &Path,
    folder: &Path,
    state: &Path,
    setup: &Setup,
) -> anyhow::Result<Server> {
    let at = |name: &str| folder.join(name);
    let disk = |image: PathBuf, socket: &str, serial: &str| {
        let mut spec = OsString::from(image);
        spec.push(",socket=");
        spec.push(at(socket));
        spec.push(format!(",serial={serial},queues={}", setup.queues));
        spec
    };
    let image = setup.image.clone().unwrap_or_else(|| at(IMAGE));
    let mut first = disk(image, "disk.sock", "plimsoll-disk");
    if setup.read_only {
        first.push(",read-only");
    }
    let mut command = Command::new(program);
    command.args(["disk", "serve", "--name", "experiment", "--disk"]);
    command.arg(first);
    if setup.swap_mib > 0 {
        command
            .arg("--disk")
            .arg(disk(at("swap.img"), "swap.sock", "plimsoll-swap"));
    }
    command.arg("--control").arg(at("control.sock"));
    command.arg("--admin").arg(at("admin.sock"));
    command.arg("--state").arg(state);
    command.arg("--parent").arg(std::process::id().to_string());
    if setup.monitor {
        command.arg("--monitor").arg(at(MONITOR));
    }
    command.args(&setup.serve);
    if let Some(user) = setup.user {
        command.uid(user).gid(user);
    }
    Server::start(&mut command, &at("daemon.log"), DAEMON_TIMEOUT, |daemon| {
        daemon.log().lines().any(|line| line.starts_with(SERVES))
    })
}
