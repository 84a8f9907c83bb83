//! A test guest: a VM that boots a workload, whose console is read, and which never outlives us.
//!
//! Its RAM is a memfd that QEMU maps shared, so that it can be traced from outside. Its
//! console is a pipe, read by a thread that stamps every line as it comes. QEMU is started by
//! that same thread: where `setpriv` is installed, the kernel is asked to kill QEMU when the
//! thread that started it is gone, and this one stays as long as the [`Guest`]. So a guest dies
//! with us even if we are killed; without `setpriv` it dies only when its [`Guest`] is dropped.

mod config;
mod console;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::Accelerator;
use plimsoll_vm::{
    ConsoleEvent, ConsoleLine, Detection, KvmSupport, QEMU, QemuVm, Qmp, detect, qemu_program,
};

use crate::GuestError;
use config::ROM;
pub use config::{AcceleratorChoice, Boot, DiskBackend, GuestConfig, GuestDisk, GuestKernel};
use console::{Console, ConsoleItem};

/// Maximum bytes of QEMU's standard error in an error message.
const STDERR_BYTES: usize = 1024;
/// How long QEMU may take from its start until RAM and CPUs are there, and to answer QMP.
const QEMU_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of polling something without notifications.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

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
    pub fn name(&self) -> &str {
        &self.name
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The guest's accelerator, and the reason for its choice.
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
    pub fn lost_lines(&self) -> u64 {
        self.console.lost_lines()
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

fn in_path(program: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuestImage;

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
}
