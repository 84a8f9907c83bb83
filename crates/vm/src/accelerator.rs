//! What runs a guest's instructions, and whether KVM really does so here.
//!
//! A host can show `/dev/kvm` and still run no guest in useful time: behind it may be an
//! emulator. So a device that opens is only believed after one of our guests has booted by it.
//! The verdict is kept in a file until the host, QEMU or the guest's kernel changes; one
//! against KVM for an hour only, since a busy host can be the reason.

use std::fmt;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::guest::qemu_program;
use crate::{AcceleratorChoice, ConsoleEvent, Guest, GuestConfig, GuestImage, VmError};

/// How long a guest may take to boot under KVM: ten times what a slow host needs.
const BOOT_TIMEOUT: Duration = Duration::from_secs(8);
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

/// Says which accelerator runs guests here: KVM if it boots `image` within 8 s, else TCG.
///
/// Takes no time if `/dev/kvm` cannot be opened or a verdict is kept, else up to 8 s.
/// The guest that tries is gone when this returns.
#[must_use]
pub fn detect(image: &GuestImage) -> Detection {
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        return Detection {
            accelerator: Accelerator::Tcg,
            reason: format!("/dev/kvm cannot be opened: {error}"),
        };
    }
    let verdict_file = verdict_file();
    let key = key(image);
    if let (Some(file), Some(key)) = (&verdict_file, &key)
        && let Some(detection) = kept(file, key, SystemTime::now())
    {
        return detection;
    }
    let detection = match boot_by_kvm(image) {
        Ok(()) => Detection {
            accelerator: Accelerator::Kvm,
            reason: "a guest booted by KVM".into(),
        },
        Err(error) => Detection {
            accelerator: Accelerator::Tcg,
            reason: format!("/dev/kvm opens, but no guest booted by it: {error}"),
        },
    };
    if let (Some(file), Some(key)) = (verdict_file, key) {
        // Without a kept verdict the next call tries again, which costs only time.
        let _ = keep(&file, key, detection.clone());
    }
    detection
}

fn boot_by_kvm(image: &GuestImage) -> Result<(), VmError> {
    let config = GuestConfig {
        accelerator: AcceleratorChoice::Kvm,
        qmp: false,
        ..GuestConfig::new(&probe_name(), "workload=idle seconds=1")
    };
    let mut guest = Guest::start(image, &config)?;
    let is_ready = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Ready { .. });
    guest.wait_for(BOOT_TIMEOUT, is_ready).map(drop)
}

/// A name that no other process gives its probe.
fn probe_name() -> String {
    format!("plimsoll-kvm-probe-{}", std::process::id())
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

/// What a verdict depends on: this boot, the host's kernel, QEMU and the guest's kernel.
fn key(image: &GuestImage) -> Option<String> {
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
        version(&image.kernel)?,
        version(&image.initrd)?,
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
