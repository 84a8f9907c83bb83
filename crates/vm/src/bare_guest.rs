//! A guest without an operating system, with which the capabilities of this host are tested.
//!
//! The crate `plimsoll-kvm-guest` contains its image. The guest is killed when its [`BareGuest`] is dropped, and by the
//! kernel when the thread that started it ends, if `setpriv` is installed; set `seconds` or `visits` so that it also ends
//! without.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::{ConsoleEvent, LastSignal, dying_with_us, qemu_program};
use plimsoll_flow::Accelerator;

/// Maximum bytes of QEMU's error output in a message.
const COMPLAINT_BYTES_MAX: usize = 1024;
/// Maximum bytes kept of a console line.
const LINE_BYTES_MAX: u64 = 1024;

/// A running guest, which is killed on drop.
#[derive(Debug)]
pub struct BareGuest {
    child: Child,
    events: Receiver<(Instant, ConsoleEvent)>,
    /// Holds the image and QEMU's standard error.
    folder: tempfile::TempDir,
}

/// The next output of a guest.
#[derive(Debug)]
pub enum BareGuestEvent {
    /// A line of its console, and the time it arrived.
    Line(Instant, ConsoleEvent),
    /// No output within the time limit.
    Silence,
    /// It has ended; QEMU's status and error output.
    Ended(String),
}

impl BareGuest {
    /// Starts a guest of `memory_mib`, with the settings of guest/kvm's README.
    ///
    /// # Errors
    ///
    /// QEMU is not installed or cannot be started. If QEMU refuses its arguments, the guest ends.
    pub fn start(
        name: &str,
        (accelerator, cpu_model): (Accelerator, &str),
        memory_mib: u64,
        settings: &str,
    ) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("plimsoll-").tempdir()?;
        let image = folder.path().join("guest.rom");
        fs::write(&image, plimsoll_kvm_guest::IMAGE)?;
        let ram = format!("memory-backend-memfd,id=ram,size={memory_mib}M,share=on");
        let mut child = dying_with_us(qemu_program()?.as_os_str(), LastSignal::Kill)
            .args(["-name", &format!("guest={name},debug-threads=on")])
            .args(["-accel", &accelerator.to_string(), "-cpu", cpu_model])
            .args(["-machine", "q35,memory-backend=ram", "-object", &ram])
            .args(["-m", &format!("{memory_mib}M"), "-display", "none"])
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-serial", "stdio"])
            .args(plimsoll_kvm_guest::arguments(&image, settings))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(errors_of(folder.path()))?)
            .spawn()?;
        let (sender, events) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            // The thread ends with the guest, or when the receiver is dropped.
            thread::spawn(move || {
                let mut output = BufReader::new(output);
                let mut line = String::new();
                while let Ok(1..) = output.by_ref().take(LINE_BYTES_MAX).read_line(&mut line) {
                    let event = ConsoleEvent::parse(&line);
                    line.clear();
                    if event.is_some_and(|event| sender.send((Instant::now(), event)).is_err()) {
                        break;
                    }
                }
            });
        }
        Ok(Self {
            child,
            events,
            folder,
        })
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the next line of its console; waits at most until `deadline`.
    pub fn next(&mut self, deadline: Instant) -> BareGuestEvent {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.events.recv_timeout(left) {
            Ok((at, event)) => BareGuestEvent::Line(at, event),
            Err(RecvTimeoutError::Timeout) => BareGuestEvent::Silence,
            Err(RecvTimeoutError::Disconnected) => BareGuestEvent::Ended(self.end()),
        }
    }

    /// Waits for the process, whose output is closed, and describes its end.
    fn end(&mut self) -> String {
        let deadline = Instant::now() + Duration::from_secs(3);
        let status = loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
                Ok(Some(status)) => break status.to_string(),
                _ => break "its console is closed".to_owned(),
            }
        };
        let errors = fs::read(errors_of(self.folder.path())).unwrap_or_default();
        let errors = &errors[..errors.len().min(COMPLAINT_BYTES_MAX)];
        let errors = String::from_utf8_lossy(errors);
        let lines: Vec<_> = errors.lines().collect();
        format!("{status}: {}", lines.join("; "))
    }
}

fn errors_of(folder: &Path) -> std::path::PathBuf {
    folder.join("stderr")
}

impl Drop for BareGuest {
    fn drop(&mut self) {
        // Both fail only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
