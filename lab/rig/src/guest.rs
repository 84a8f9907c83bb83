//! A test guest: a VM that boots a workload, whose console is read, and which never outlives us.
//!
//! Its RAM is a memfd that QEMU maps shared, so that it can be traced from outside. Its
//! console is a pipe, read by a thread that stamps every line as it comes. QEMU is started by
//! that same thread: where `setpriv` is installed, the kernel is asked to kill QEMU when the
//! thread that started it is gone, and this one stays as long as the [`Guest`]. So a guest dies
//! with us even if we are killed; without `setpriv` it dies only when its [`Guest`] is dropped.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::Accelerator;
use plimsoll_vm::{
    ConsoleEvent, ConsoleLine, Detection, KvmSupport, QEMU, QemuVm, Qmp, detect, qemu_program,
};

use crate::{GuestError, GuestImage};

/// Bytes kept of a console line; the workload's own have under 200, those of our programs in a guest a few thousand.
const LINE_BYTES_MAX: usize = 16 << 10;
/// Console lines kept until they are read: about two hours of a workload's.
const LINES_MAX: usize = 1 << 16;
/// Maximum lines in error messages.
const LAST_LINES: usize = 8;
/// Maximum bytes of QEMU's standard error in an error message.
const STDERR_BYTES: usize = 1024;
/// How long QEMU may take from its start until RAM and CPUs are there, and to answer QMP.
const QEMU_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of polling something without notifications.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The firmware of a guest without an operating system, in its directory.
const ROM: &str = "guest.rom";
/// The balloon: it gives nothing back by itself when the guest runs out of memory.
const BALLOON: &str = "virtio-balloon-pci,id=balloon0,deflate-on-oom=off";
/// Longest serial of a virtio disk.
const SERIAL_BYTES_MAX: usize = 20;
/// Longest kernel command line of x86.
const KERNEL_LINE_BYTES_MAX: usize = 2047;

/// What a guest boots.
#[derive(Debug, Clone, Copy)]
pub enum Boot<'a> {
    /// Linux, with a workload as its `/init`.
    Linux(&'a GuestImage),
    /// A workload without an operating system, of guest/kvm; it has one virtual CPU and no drivers.
    Bare,
}

impl<'a> From<&'a GuestImage> for Boot<'a> {
    fn from(image: &'a GuestImage) -> Self {
        Self::Linux(image)
    }
}

/// Which accelerator a guest is to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AcceleratorChoice {
    /// Whatever [`detect`] returns for what the guest boots.
    #[default]
    Auto,
    /// KVM, or fail.
    Kvm,
    /// TCG.
    Tcg,
}

/// Which of our kernels a guest boots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GuestKernel {
    /// Debian 12's Linux 6.1.
    #[default]
    V6_1,
    /// Linux 6.12 of bookworm-backports.
    V6_12,
}

impl GuestKernel {
    /// Version and patch level, as `6.1`.
    #[must_use]
    pub fn series(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }
}

/// What serves a guest's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskBackend {
    /// A vhost-user-blk daemon, which also gives the disk its serial.
    VhostUser {
        /// The socket it listens at.
        socket: PathBuf,
        /// Queues, from 1.
        queues: u16,
        /// Time between two tries to reach a daemon that is gone, in s; 0: none, and its end
        /// is the end of the disk.
        reconnect_s: u32,
    },
    /// QEMU itself, from a raw image.
    Image {
        /// A file or a block device.
        path: PathBuf,
        /// The serial, at most 20 bytes: letters, digits, `-`, `_` and `.`; empty for none.
        serial: String,
        /// Whether the guest cannot write.
        read_only: bool,
    },
}

/// A virtio disk of a guest; the first one is its `/dev/vda`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestDisk {
    /// What serves it.
    pub backend: DiskBackend,
    /// Options of its device for QEMU beside ours, as `queue-size=64`; may be empty.
    pub options: String,
}

impl GuestDisk {
    /// A disk of one queue served by a daemon, whose reconnection is tried each second.
    #[must_use]
    pub fn vhost_user(socket: impl Into<PathBuf>) -> Self {
        Self {
            backend: DiskBackend::VhostUser {
                socket: socket.into(),
                queues: 1,
                reconnect_s: 1,
            },
            options: String::new(),
        }
    }

    /// A disk served by QEMU from a raw image, with a serial or an empty one.
    #[must_use]
    pub fn image(path: impl Into<PathBuf>, serial: &str) -> Self {
        Self {
            backend: DiskBackend::Image {
                path: path.into(),
                serial: serial.to_owned(),
                read_only: false,
            },
            options: String::new(),
        }
    }

    /// QEMU's arguments for the guest's disk `index`.
    fn arguments(&self, index: usize) -> Result<Vec<OsString>, GuestError> {
        let with_path = |before: String, path: &Path, after: String| {
            let mut value = OsString::from(before);
            value.push(escape_commas(path));
            value.push(after);
            value
        };
        let (backend, mut device) = match &self.backend {
            DiskBackend::VhostUser {
                socket,
                queues,
                reconnect_s,
            } => {
                let before = format!("socket,id=disk{index},reconnect={reconnect_s},path=");
                (
                    ["-chardev".into(), with_path(before, socket, String::new())],
                    format!("vhost-user-blk-pci,chardev=disk{index},num-queues={queues}"),
                )
            }
            DiskBackend::Image {
                path,
                serial,
                read_only,
            } => {
                if serial.len() > SERIAL_BYTES_MAX || !is_plain(serial) {
                    return Err(GuestError::GuestConfig {
                        what: format!(
                            "the serial {serial:?}: expected at most {SERIAL_BYTES_MAX} letters, \
                             digits, '-', '_' and '.'"
                        ),
                    });
                }
                let before = format!("if=none,id=disk{index},format=raw,discard=unmap,file=");
                let read_only = if *read_only { "on" } else { "off" };
                let mut device = format!("virtio-blk-pci,drive=disk{index}");
                if !serial.is_empty() {
                    device.push_str(",serial=");
                    device.push_str(serial);
                }
                (
                    [
                        "-drive".into(),
                        with_path(before, path, format!(",read-only={read_only}")),
                    ],
                    device,
                )
            }
        };
        if !self.options.is_empty() {
            device.push(',');
            device.push_str(&self.options);
        }
        let mut arguments: Vec<OsString> = backend.into();
        arguments.extend(["-device".into(), device.into()]);
        Ok(arguments)
    }
}

/// Whether a text holds letters, digits, `-`, `_` and `.` alone.
fn is_plain(text: &str) -> bool {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    text.chars().all(allowed)
}

/// Configuration of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestConfig {
    /// Its name: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Its RAM in MiB. The kernel keeps about 70 MiB of it for itself.
    pub memory_mib: u64,
    /// Its virtual CPUs, from 1. Under TCG the workload starts all but the first.
    pub vcpus: u32,
    /// What it runs, as words `key=value` of guest/workload/README.md without their
    /// prefix: `"workload=zipf mib=64"`.
    pub workload: String,
    /// The accelerator.
    pub accelerator: AcceleratorChoice,
    /// The kernel that [`GuestImage::for_guest`] finds for it.
    pub kernel: GuestKernel,
    /// Its disks, in order.
    pub disks: Vec<GuestDisk>,
    /// Whether it has a balloon, whose driver it loads before the workload begins.
    pub balloon: bool,
    /// Whether it gets a monitor socket.
    pub qmp: bool,
    /// Arguments for QEMU beside ours.
    pub extra_arguments: Vec<String>,
    /// Arguments for machine and RAM in place of ours, which make the RAM a memfd that is mapped shared.
    pub ram: Option<Vec<String>>,
    /// Words before QEMU's command line, as `setpriv --reuid=nobody`.
    pub prefix: Vec<String>,
}

impl GuestConfig {
    /// A guest of one virtual CPU and 192 MiB with a monitor.
    #[must_use]
    pub fn new(name: &str, workload: &str) -> Self {
        Self {
            name: name.to_owned(),
            memory_mib: 192,
            vcpus: 1,
            workload: workload.to_owned(),
            accelerator: AcceleratorChoice::Auto,
            kernel: GuestKernel::default(),
            disks: Vec::new(),
            balloon: false,
            qmp: true,
            extra_arguments: Vec::new(),
            ram: None,
            prefix: Vec::new(),
        }
    }

    /// The kernel's command line.
    fn kernel_line(&self, accelerator: Accelerator) -> Result<String, GuestError> {
        let wrong = |what: String| Err(GuestError::GuestConfig { what });
        if self.name.is_empty() || !is_plain(&self.name) {
            return wrong(format!(
                "the name {:?}: expected letters, digits, '-', '_' and '.'",
                self.name
            ));
        }
        if self.memory_mib == 0 || self.vcpus == 0 {
            return wrong(format!(
                "{} MiB and {} virtual CPUs: expected at least one of each",
                self.memory_mib, self.vcpus
            ));
        }
        // Quiet keeps the kernel's lines from running into ours; huge pages would hide
        // which pages are used; a panic must end QEMU, not wait; and on a loaded host an emulated
        // timer may be late, which the kernel's check would take for a broken one.
        let mut line =
            String::from("console=ttyS0 quiet panic=-1 transparent_hugepage=never no_timer_check");
        // QEMU 7.2's TCG may run an instruction that another CPU is just patching, as a kernel often
        // does while it starts: the workload starts the other CPUs itself when that is over.
        if accelerator == Accelerator::Tcg && self.vcpus > 1 {
            line.push_str(" maxcpus=1");
        }
        for word in self.workload.split_ascii_whitespace() {
            if !word
                .chars()
                .all(|letter| letter.is_ascii_graphic() && letter != '"')
            {
                return wrong(format!("the workload word {word:?}: expected plain ASCII"));
            }
            line.push_str(" plimsoll.");
            line.push_str(word);
        }
        if line.len() > KERNEL_LINE_BYTES_MAX {
            return wrong(format!(
                "a kernel command line of {} bytes: expected at most {KERNEL_LINE_BYTES_MAX}",
                line.len()
            ));
        }
        Ok(line)
    }

    /// QEMU's arguments.
    fn arguments(
        &self,
        boot: Boot<'_>,
        detection: &Detection,
        folder: &Path,
        socket: Option<&Path>,
    ) -> Result<Vec<OsString>, GuestError> {
        let accelerator = detection.accelerator;
        let kernel_line = self.kernel_line(accelerator)?;
        let memory = self.memory_mib;
        let mut arguments: Vec<OsString> = Vec::new();
        let mut add = |option: &str, value: String| {
            arguments.push(option.into());
            arguments.push(value.into());
        };
        add("-name", format!("guest={},debug-threads=on", self.name));
        add("-accel", accelerator.to_string());
        let cpu = match accelerator {
            Accelerator::Kvm => detection.cpu_model.as_str(),
            // QEMU 7.2's TCG gets 16-byte compare-and-exchange wrong in newer kernels.
            Accelerator::Tcg => "qemu64,-cx16",
        };
        add("-cpu", cpu.into());
        add("-smp", self.vcpus.to_string());
        if self.ram.is_none() {
            add("-machine", "q35,memory-backend=ram".into());
            add("-m", format!("{memory}M"));
            add(
                "-object",
                format!("memory-backend-memfd,id=ram,size={memory}M,share=on"),
            );
        }
        add("-display", "none".into());
        add("-chardev", "stdio,id=console,signal=off".into());
        add("-serial", "chardev:console".into());
        arguments.extend(self.ram.iter().flatten().map(Into::into));
        arguments.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(Into::into));
        match boot {
            Boot::Linux(image) => {
                arguments.extend(["-kernel".into(), image.kernel.clone().into()]);
                arguments.extend(["-initrd".into(), image.initrd.clone().into()]);
                arguments.extend(["-append".into(), kernel_line.into()]);
            }
            Boot::Bare => {
                let vcpus_max = plimsoll_kvm_guest::VCPUS_MAX;
                if self.vcpus > vcpus_max || self.balloon || !self.disks.is_empty() {
                    return Err(GuestError::GuestConfig {
                        what: format!(
                            "a guest without an operating system has at most {vcpus_max} virtual CPUs, no balloon and no disks"
                        ),
                    });
                }
                let rom = folder.join(ROM);
                arguments.extend(plimsoll_kvm_guest::arguments(&rom, &self.workload));
            }
        }
        if let Some(socket) = socket {
            let mut monitor = OsString::from("unix:");
            monitor.push(escape_commas(socket));
            monitor.push(",server=on,wait=off");
            arguments.extend(["-qmp".into(), monitor]);
        }
        for (index, disk) in self.disks.iter().enumerate() {
            arguments.extend(disk.arguments(index)?);
        }
        if self.balloon {
            arguments.extend(["-device", BALLOON].map(Into::into));
        }
        arguments.extend(self.extra_arguments.iter().map(Into::into));
        Ok(arguments)
    }
}

/// A comma ends a value in QEMU's option lists unless it is doubled.
fn escape_commas(path: &Path) -> OsString {
    use std::os::unix::ffi::OsStringExt as _;
    let mut escaped = Vec::new();
    for &byte in path.as_os_str().as_bytes() {
        escaped.push(byte);
        if byte == b',' {
            escaped.push(byte);
        }
    }
    OsString::from_vec(escaped)
}

fn in_path(program: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}

/// A running guest. Dropping it ends it at once.
#[derive(Debug)]
pub struct Guest {
    name: String,
    vcpus: u32,
    child: Child,
    detection: Detection,
    console: Arc<Console>,
    socket: Option<PathBuf>,
    /// Keeps the thread that started QEMU; dropped after QEMU has ended.
    _starter: mpsc::Sender<()>,
    /// Holds the monitor socket and QEMU's standard error; goes with the guest.
    folder: tempfile::TempDir,
}

impl Guest {
    /// Starts a guest; it boots while the caller continues.
    ///
    /// # Errors
    ///
    /// [`GuestError::GuestConfig`] and [`GuestError::GuestStart`]. What QEMU itself
    /// refuses is reported by the first wait: [`GuestError::GuestEnded`].
    pub fn start<'a>(boot: impl Into<Boot<'a>>, config: &GuestConfig) -> Result<Self, GuestError> {
        let boot = boot.into();
        let chosen = |accelerator| Detection {
            accelerator,
            reason: "it was requested".into(),
            ..detect()
        };
        let program = qemu_program().map_err(|source| GuestError::GuestStart {
            program: QEMU.into(),
            source,
        })?;
        let detection = match config.accelerator {
            AcceleratorChoice::Auto => for_boot(boot, detect()),
            AcceleratorChoice::Kvm => chosen(Accelerator::Kvm),
            AcceleratorChoice::Tcg => chosen(Accelerator::Tcg),
        };
        let failed = |source| GuestError::GuestStart {
            program: program.display().to_string(),
            source,
        };
        let folder = tempfile::Builder::new()
            .prefix("plimsoll-")
            .tempdir()
            .map_err(failed)?;
        let socket = config.qmp.then(|| folder.path().join("qmp"));
        let arguments = config.arguments(boot, &detection, folder.path(), socket.as_deref())?;
        if matches!(boot, Boot::Bare) {
            fs::write(folder.path().join(ROM), plimsoll_kvm_guest::IMAGE).map_err(failed)?;
        }
        let errors = fs::File::create(folder.path().join("stderr")).map_err(failed)?;
        let mut command = command_that_dies_with_us(&config.prefix, &program);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors);
        let console = Arc::new(Console::default());
        let (starter, release) = mpsc::channel();
        let child = start_and_listen(command, Arc::clone(&console), release).map_err(failed)?;
        Ok(Self {
            name: config.name.clone(),
            vcpus: config.vcpus,
            child,
            detection,
            console,
            socket,
            _starter: starter,
            folder,
        })
    }

    /// The guest's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// QEMU's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The guest's accelerator, and the reason for its choice.
    #[must_use]
    pub fn detection(&self) -> &Detection {
        &self.detection
    }

    /// Returns the next console line, or `None` if none came within `timeout`.
    ///
    /// # Errors
    ///
    /// [`GuestError::GuestEnded`] if the guest has ended and all its lines were taken.
    pub fn next_line(&mut self, timeout: Duration) -> Result<Option<ConsoleLine>, GuestError> {
        match self.console.take(Instant::now() + timeout) {
            ConsoleItem::Line(line) => Ok(Some(line)),
            ConsoleItem::Nothing => Ok(None),
            ConsoleItem::Ended => Err(self.ended()),
        }
    }

    /// Waits for an event that `is_it`, and returns its line. Lines before it are dropped.
    ///
    /// # Errors
    ///
    /// [`GuestError::GuestSilent`] if it did not come within `timeout`,
    /// [`GuestError::GuestFailed`] if the workload gave up instead, [`GuestError::GuestEnded`].
    pub fn wait_for(
        &mut self,
        timeout: Duration,
        mut is_it: impl FnMut(&ConsoleEvent) -> bool,
    ) -> Result<ConsoleLine, GuestError> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(line) = self.next_line(left)? else {
                return Err(GuestError::GuestSilent {
                    timeout,
                    last: self.console.last_lines(),
                });
            };
            match &line.event {
                Some(event) if is_it(event) => return Ok(line),
                Some(ConsoleEvent::Error { message }) => {
                    return Err(GuestError::GuestFailed {
                        message: message.clone(),
                    });
                }
                _ => {}
            }
        }
    }

    /// Number of console lines dropped because they were not read: the oldest of more than 65536.
    #[must_use]
    pub fn lost_lines(&self) -> u64 {
        self.console.lock().lost
    }

    /// Describes the guest as a VM of this host, once its RAM and CPUs are there.
    ///
    /// # Errors
    ///
    /// Those of [`QemuVm::of_pid`], and [`GuestError::GuestEnded`].
    pub fn vm(&mut self) -> Result<QemuVm, GuestError> {
        let deadline = Instant::now() + QEMU_TIMEOUT;
        loop {
            if self.has_ended() {
                return Err(self.ended());
            }
            let vm = QemuVm::of_pid(self.pid());
            let is_whole = vm.as_ref().is_ok_and(|vm| {
                let vcpus = u32::try_from(vm.vcpus.len());
                !vm.ram.is_empty() && vcpus.is_ok_and(|vcpus| vcpus >= self.vcpus)
            });
            if is_whole || Instant::now() >= deadline {
                return Ok(vm?);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Connects to the guest's monitor. One connection at a time is served.
    ///
    /// # Errors
    ///
    /// [`GuestError::NoQmp`] if it was started without one, those of [`Qmp::connect`],
    /// and [`GuestError::GuestEnded`].
    pub fn qmp(&mut self) -> Result<Qmp, GuestError> {
        let Some(socket) = self.socket.clone() else {
            return Err(GuestError::NoQmp {
                name: self.name.clone(),
            });
        };
        let deadline = Instant::now() + QEMU_TIMEOUT;
        while !socket.exists() && Instant::now() < deadline {
            if self.has_ended() {
                return Err(self.ended());
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(Qmp::connect(&socket, QEMU_TIMEOUT)?)
    }

    /// Whether QEMU has ended.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Waits until QEMU has ended by itself; `None` if it has not within `timeout`.
    ///
    /// # Errors
    ///
    /// [`GuestError::GuestStart`] if the process no longer exists.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>, GuestError> {
        let deadline = Instant::now() + timeout;
        loop {
            let status = self
                .child
                .try_wait()
                .map_err(|source| GuestError::GuestStart {
                    program: QEMU.into(),
                    source,
                })?;
            if status.is_some() || Instant::now() >= deadline {
                return Ok(status);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Ends the guest at once and waits until it is gone.
    pub fn kill(&mut self) {
        // Both fail only if it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn ended(&mut self) -> GuestError {
        let status = match self.wait(QEMU_TIMEOUT) {
            Ok(Some(status)) => status.to_string(),
            _ => "its console is closed".into(),
        };
        let errors = fs::read(self.folder.path().join("stderr")).unwrap_or_default();
        let end = &errors[errors.len().saturating_sub(STDERR_BYTES)..];
        let end = String::from_utf8_lossy(end);
        let qemu = match end.trim() {
            "" => "nothing".to_owned(),
            text => text.lines().collect::<Vec<_>>().join("; "),
        };
        GuestError::GuestEnded {
            status,
            last: self.console.last_lines(),
            qemu,
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The accelerator of a guest that boots this: a KVM that runs only user programs is enough for a guest without an
/// operating system.
fn for_boot(boot: Boot<'_>, detection: Detection) -> Detection {
    match (boot, detection.kvm) {
        (Boot::Bare, KvmSupport::Programs | KvmSupport::Full) => Detection {
            accelerator: Accelerator::Kvm,
            ..detection
        },
        _ => detection,
    }
}

fn command_that_dies_with_us(prefix: &[String], program: &Path) -> Command {
    // It replaces itself by the program, so the process id stays.
    let setpriv = in_path("setpriv").map(|setpriv| {
        let words = ["--pdeathsig", "KILL", "--"].map(OsString::from);
        std::iter::once(setpriv.into()).chain(words)
    });
    let mut words = (setpriv.into_iter().flatten())
        .chain(prefix.iter().map(Into::into))
        .chain([program.into()]);
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    command
}

/// Starts the command in a thread that then reads its output until the end, and stays
/// until `release` is closed: QEMU closes its output a while before it has ended.
fn start_and_listen(
    mut command: Command,
    console: Arc<Console>,
    release: mpsc::Receiver<()>,
) -> io::Result<Child> {
    let (started, starting) = mpsc::channel();
    thread::Builder::new()
        .name("console".into())
        .spawn(move || {
            let mut child = command.spawn();
            let output = child.as_mut().ok().and_then(|child| child.stdout.take());
            // The other end waits for exactly this.
            let _ = started.send(child);
            if let Some(output) = output {
                console.read_from(output);
            }
            console.end();
            // Nothing is ever sent: this ends when the sender is dropped.
            let _ = release.recv();
        })?;
    starting
        .recv()
        .unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
}

/// Lines between the thread that reads them and their consumers.
#[derive(Debug, Default)]
struct Console {
    lines: Mutex<Lines>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Lines {
    waiting: VecDeque<ConsoleLine>,
    /// The newest lines, taken or not.
    last: VecDeque<String>,
    lost: u64,
    ended: bool,
}

enum ConsoleItem {
    Line(ConsoleLine),
    Nothing,
    Ended,
}

impl Console {
    fn lock(&self) -> MutexGuard<'_, Lines> {
        // Lines are whole at every point where a holder could panic.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_from(&self, output: ChildStdout) {
        let mut output = BufReader::new(output);
        while let Ok(Some(text)) = read_line(&mut output) {
            self.put(text, Instant::now());
        }
    }

    fn put(&self, text: String, at: Instant) {
        let line = ConsoleLine {
            at,
            event: ConsoleEvent::parse(&text),
            text: text.clone(),
        };
        let mut lines = self.lock();
        if lines.waiting.len() == LINES_MAX {
            lines.waiting.pop_front();
            lines.lost += 1;
        }
        if lines.last.len() == LAST_LINES {
            lines.last.pop_front();
        }
        lines.last.push_back(text);
        lines.waiting.push_back(line);
        self.changed.notify_all();
    }

    fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    fn take(&self, deadline: Instant) -> ConsoleItem {
        let mut lines = self.lock();
        loop {
            if let Some(line) = lines.waiting.pop_front() {
                return ConsoleItem::Line(line);
            }
            if lines.ended {
                return ConsoleItem::Ended;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return ConsoleItem::Nothing;
            }
            let waited = self.changed.wait_timeout(lines, left);
            lines = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn last_lines(&self) -> Vec<String> {
        self.lock().last.iter().cloned().collect()
    }
}

/// Reads a line, keeps at most its first [`LINE_BYTES_MAX`] bytes; `None` at the end.
fn read_line(output: &mut impl io::BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    let mut limited = output.by_ref().take(LINE_BYTES_MAX as u64);
    limited.read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') {
        // Cut off, or the end of the output.
        output.skip_until(b'\n')?;
    }
    let text = String::from_utf8_lossy(&line);
    Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_end_is_cut_and_the_next_one_is_whole() {
        let mut bytes = vec![b'x'; LINE_BYTES_MAX * 3];
        bytes.extend(b"\nplimsoll: populated ms=1\r\n\nrest");
        let mut bytes = &bytes[..];
        let mut next = || read_line(&mut bytes).unwrap();
        assert_eq!(next().map(|line| line.len()), Some(LINE_BYTES_MAX));
        assert_eq!(next().as_deref(), Some("plimsoll: populated ms=1"));
        assert_eq!(next().as_deref(), Some(""));
        assert_eq!(next().as_deref(), Some("rest"));
        assert_eq!(next(), None);
    }

    #[test]
    fn the_oldest_lines_give_way_to_the_newest() {
        let console = Console::default();
        for number in 0..LINES_MAX + 3 {
            console.put(number.to_string(), Instant::now());
        }
        assert_eq!(console.lock().lost, 3);
        assert!(
            matches!(console.take(Instant::now()), ConsoleItem::Line(line) if line.text == "3")
        );
        let last = console.last_lines();
        assert_eq!(last.len(), LAST_LINES);
        assert_eq!(last[LAST_LINES - 1], (LINES_MAX + 2).to_string());
    }

    #[test]
    fn a_console_that_ended_says_so_after_its_last_line() {
        let console = Console::default();
        console.put("bye".into(), Instant::now());
        assert!(matches!(console.take(Instant::now()), ConsoleItem::Line(_)));
        assert!(matches!(console.take(Instant::now()), ConsoleItem::Nothing));
        console.end();
        assert!(matches!(console.take(Instant::now()), ConsoleItem::Ended));
    }

    #[test]
    fn words_reach_the_kernel_with_their_prefix() {
        let config = GuestConfig::new("a", "workload=zipf  mib=64");
        let line = config.kernel_line(Accelerator::Tcg).unwrap();
        assert!(line.ends_with(" plimsoll.workload=zipf plimsoll.mib=64"));
    }

    #[test]
    fn only_an_emulated_kernel_starts_on_one_cpu_of_several() {
        let boots_on_one = |accelerator, vcpus| {
            let config = GuestConfig {
                vcpus,
                ..GuestConfig::new("a", "workload=idle")
            };
            let line = config.kernel_line(accelerator).unwrap();
            line.contains(" maxcpus=1 ")
        };
        assert!(boots_on_one(Accelerator::Tcg, 2));
        assert!(!boots_on_one(Accelerator::Tcg, 1));
        assert!(!boots_on_one(Accelerator::Kvm, 2));
    }

    #[test]
    fn a_guest_that_cannot_be_is_refused_before_anything_starts() {
        let image = GuestImage {
            kernel: "/none".into(),
            initrd: "/none".into(),
        };
        let good = GuestConfig {
            accelerator: AcceleratorChoice::Tcg,
            ..GuestConfig::new("a", "workload=idle")
        };
        let tcg = Detection {
            accelerator: Accelerator::Tcg,
            kvm: KvmSupport::None,
            cpu_model: "host".into(),
            reason: String::new(),
        };
        let refused = |config: GuestConfig| {
            config
                .arguments((&image).into(), &tcg, Path::new("/none"), None)
                .unwrap_err()
                .to_string()
        };
        let with_name = |name: &str| GuestConfig {
            name: name.into(),
            ..good.clone()
        };
        assert!(refused(with_name("a,b")).contains("the name \"a,b\""));
        assert!(refused(with_name("")).contains("the name"));
        let no_cpu = GuestConfig {
            vcpus: 0,
            ..good.clone()
        };
        assert!(refused(no_cpu).contains("0 virtual CPUs"));
        let long = GuestConfig {
            workload: "workload=idle ".repeat(200),
            ..good.clone()
        };
        assert!(refused(long).contains("expected at most 2047"));
        let three = GuestConfig {
            vcpus: 3,
            ..good.clone()
        };
        let bare = three.arguments(Boot::Bare, &tcg, Path::new("/none"), None);
        let refused = bare.unwrap_err().to_string();
        assert!(refused.contains("at most 2 virtual CPUs"), "{refused}");
    }

    #[test]
    fn kvm_for_programs_alone_runs_guests_without_an_operating_system() {
        let image = GuestImage {
            kernel: "/none".into(),
            initrd: "/none".into(),
        };
        let detected = |kvm| Detection {
            accelerator: if kvm == KvmSupport::Full {
                Accelerator::Kvm
            } else {
                Accelerator::Tcg
            },
            kvm,
            cpu_model: "qemu64,-cx16".into(),
            reason: String::new(),
        };
        let under = |boot, kvm| for_boot(boot, detected(kvm)).accelerator;
        let linux = Boot::Linux(&image);
        assert_eq!(under(Boot::Bare, KvmSupport::Programs), Accelerator::Kvm);
        assert_eq!(under(linux, KvmSupport::Programs), Accelerator::Tcg);
        assert_eq!(under(Boot::Bare, KvmSupport::None), Accelerator::Tcg);
        assert_eq!(under(linux, KvmSupport::Full), Accelerator::Kvm);
    }

    #[test]
    fn disks_become_arguments_in_order() {
        let words = |disk: &GuestDisk| -> Vec<String> {
            let arguments = disk.arguments(3).unwrap().into_iter();
            arguments.map(|word| word.into_string().unwrap()).collect()
        };
        assert_eq!(
            words(&GuestDisk::vhost_user("/run/a,b")),
            [
                "-chardev",
                "socket,id=disk3,reconnect=1,path=/run/a,,b",
                "-device",
                "vhost-user-blk-pci,chardev=disk3,num-queues=1",
            ]
        );
        let disk = GuestDisk {
            options: "queue-size=64".into(),
            ..GuestDisk::image("/tmp/x", "plimsoll-swap")
        };
        assert_eq!(
            words(&disk),
            [
                "-drive",
                "if=none,id=disk3,format=raw,discard=unmap,file=/tmp/x,read-only=off",
                "-device",
                "virtio-blk-pci,drive=disk3,serial=plimsoll-swap,queue-size=64",
            ]
        );
        let refused = GuestDisk::image("/tmp/x", "a,b").arguments(0).unwrap_err();
        assert!(
            refused.to_string().contains("the serial \"a,b\""),
            "{refused}"
        );
    }

    #[test]
    fn commas_in_a_path_are_doubled() {
        assert_eq!(escape_commas(Path::new("/a,b")), OsString::from("/a,,b"));
    }
}
