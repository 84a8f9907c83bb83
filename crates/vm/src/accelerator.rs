//! Detects the accelerator of a guest, and whether KVM works on this host.
//!
//! A host can offer `/dev/kvm` and still run no guest in useful time: behind it may be an
//! emulator. So a device that opens is believed only after QEMU's firmware has run to its end
//! under KVM. The verdict is kept in a file until the host or QEMU changes; one against KVM for
//! an hour only, since a busy host can be the reason.

use std::fmt;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

/// The emulator that runs guests.
pub const QEMU: &str = "qemu-system-x86_64";
/// How long the firmware may take under KVM: ten times what a slow host needs.
const FIRMWARE_TIMEOUT: Duration = Duration::from_secs(3);
/// Time between two checks whether the trial has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Most bytes of QEMU's complaint that a verdict repeats.
const COMPLAINT_BYTES_MAX: u64 = 1024;
/// How long a verdict against KVM holds.
const VERDICT_AGAINST_HOLDS: Duration = Duration::from_secs(3600);

/// What runs a guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The processor itself, by KVM.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// Which accelerator guests are to use here, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detection {
    /// The accelerator.
    pub accelerator: Accelerator,
    /// Why that one, as a sentence for people.
    pub reason: String,
}

/// Says which accelerator runs guests here: KVM if QEMU's firmware runs by it within 3 s, else TCG.
///
/// Takes no time if `/dev/kvm` cannot be opened or a verdict is kept, else up to 3 s.
/// The trial's process is gone when this returns.
#[must_use]
pub fn detect() -> Detection {
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        return Detection {
            accelerator: Accelerator::Tcg,
            reason: format!("/dev/kvm cannot be opened: {error}"),
        };
    }
    let verdict_file = verdict_file();
    let key = key();
    if let (Some(file), Some(key)) = (&verdict_file, &key)
        && let Some(detection) = kept(file, key, SystemTime::now())
    {
        return detection;
    }
    let detection = match run_firmware_by_kvm() {
        Ok(()) => Detection {
            accelerator: Accelerator::Kvm,
            reason: "QEMU's firmware ran under KVM".into(),
        },
        Err(why) => Detection {
            accelerator: Accelerator::Tcg,
            reason: format!("/dev/kvm opens, but QEMU's firmware did not run under it: {why}"),
        },
    };
    if let (Some(file), Some(key)) = (verdict_file, key) {
        // Without a kept verdict the next call tries again, which costs only time.
        let _ = keep(&file, key, detection.clone());
    }
    detection
}

/// Starts a machine without disks, whose firmware finds nothing to boot and resets it: QEMU then ends.
fn run_firmware_by_kvm() -> Result<(), String> {
    let program = qemu_program().map_err(|error| format!("{QEMU}: {error}"))?;
    let name = format!("plimsoll-kvm-probe-{}", std::process::id());
    let mut qemu = Command::new(program)
        .args(["-name", &name, "-accel", "kvm", "-cpu", "host", "-m", "32M"])
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-no-reboot", "-boot", "reboot-timeout=1"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{QEMU}: {error}"))?;
    let begin = Instant::now();
    let status = loop {
        match qemu.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) if begin.elapsed() < FIRMWARE_TIMEOUT => thread::sleep(POLL_INTERVAL),
            Ok(None) => break Err(format!("it has not ended after {FIRMWARE_TIMEOUT:?}")),
            Err(error) => break Err(error.to_string()),
        }
    };
    // Both fail only if it has ended already.
    let _ = qemu.kill();
    let _ = qemu.wait();
    let status = status?;
    if status.success() {
        return Ok(());
    }
    let mut complaint = Vec::new();
    if let Some(stderr) = qemu.stderr.take() {
        // What cannot be read is left out of the reason.
        let _ = stderr.take(COMPLAINT_BYTES_MAX).read_to_end(&mut complaint);
    }
    let complaint = String::from_utf8_lossy(&complaint);
    let complaint: Vec<_> = complaint.lines().collect();
    Err(format!("{status}: {}", complaint.join("; ")))
}

/// Finds [`QEMU`] in the directories of `PATH`.
///
/// # Errors
///
/// [`io::ErrorKind::NotFound`] if it is in none.
pub fn qemu_program() -> io::Result<PathBuf> {
    let directories = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&directories)
        .map(|directory| directory.join(QEMU))
        .find(|path| path.is_file())
        .ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// A verdict and what it was given on.
#[derive(Serialize, Deserialize)]
struct Verdict {
    key: String,
    detection: Detection,
}

/// A file that only this user, and no earlier boot, can have written; `None` if
/// the system has no place for such.
fn verdict_file() -> Option<PathBuf> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let folder = own.unwrap_or_else(|| PathBuf::from("/run"));
    folder
        .is_dir()
        .then(|| folder.join("plimsoll").join("accelerator.json"))
}

/// What a verdict depends on: this boot, the host's kernel and QEMU.
fn key() -> Option<String> {
    let read = |file: &str| fs::read_to_string(file).ok();
    let version = |file: &Path| {
        let data = fs::metadata(file).ok()?;
        let changed = data
            .modified()
            .ok()?
            .duration_since(SystemTime::UNIX_EPOCH)
            .ok()?;
        Some(format!(
            "{} {} {}",
            file.display(),
            data.len(),
            changed.as_nanos()
        ))
    };
    let parts = [
        read("/proc/sys/kernel/random/boot_id")?,
        read("/proc/sys/kernel/osrelease")?,
        version(&qemu_program().ok()?)?,
    ];
    Some(parts.map(|part| part.trim().to_owned()).join("; "))
}

fn kept(file: &Path, key: &str, now: SystemTime) -> Option<Detection> {
    let age = now
        .duration_since(fs::metadata(file).ok()?.modified().ok()?)
        .ok()?;
    let verdict: Verdict = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    let holds = verdict.key == key
        && (verdict.detection.accelerator == Accelerator::Kvm || age < VERDICT_AGAINST_HOLDS);
    holds.then_some(verdict.detection)
}

fn keep(file: &Path, key: String, detection: Detection) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let mut verdict = tempfile::NamedTempFile::new_in(folder)?;
    verdict.write_all(&serde_json::to_vec(&Verdict { key, detection })?)?;
    verdict.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_holds_for_its_key_and_one_against_kvm_for_an_hour() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new").join("accelerator.json");
        let (now, later) = (
            SystemTime::now() + Duration::from_secs(1),
            SystemTime::now() + Duration::from_secs(3700),
        );
        assert_eq!(kept(&file, "a", now), None);
        let verdict = |accelerator| Detection {
            accelerator,
            reason: "tried".into(),
        };
        keep(&file, "a".into(), verdict(Accelerator::Tcg)).unwrap();
        assert_eq!(kept(&file, "a", now), Some(verdict(Accelerator::Tcg)));
        assert_eq!(kept(&file, "b", now), None);
        assert_eq!(kept(&file, "a", later), None);
        keep(&file, "a".into(), verdict(Accelerator::Kvm)).unwrap();
        assert_eq!(kept(&file, "a", later), Some(verdict(Accelerator::Kvm)));
        fs::write(&file, "not a verdict").unwrap();
        assert_eq!(kept(&file, "a", now), None);
    }
}
