//! Detects the accelerator for guests, and how far KVM works on this host.
//!
//! A host can offer `/dev/kvm` and still boot no operating system: the KVM behind it may run guests' user code
//! on the processor and emulate their kernels. KVM is therefore used only after a small test guest has run to its end
//! under it (crate `plimsoll-kvm-guest`), with a kernel about as fast as its user code. The result is cached in a file
//! until the host or QEMU changes; a negative one for an hour only, because a busy host can be the reason.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use plimsoll_flow::Accelerator;
use serde::{Deserialize, Serialize};

use crate::{BareGuest, BareGuestEvent, ConsoleEvent};

/// The emulator that runs guests.
pub const QEMU: &str = "qemu-system-x86_64";
/// Time limit of the test guest under KVM: ten times what a slow host needs.
const GUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// RAM of the test guest.
const MEMORY_MIB: u64 = 64;
/// CPU models for QEMU under KVM, best first. QEMU 7.2 aborts with the first one on hosts where the processor's
/// capabilities cannot be set.
const CPU_MODELS: [&str; 3] = ["host", "host,-arch-capabilities", "qemu64,-cx16"];
/// Slowdown of a guest's kernel relative to its user code from which the kernel counts as emulated; measured values
/// were a thousand or more.
const EMULATED_SLOWDOWN: u64 = 20;
/// Lifetime of a cached result against KVM.
const VERDICT_AGAINST_HOLDS: Duration = Duration::from_secs(3600);

/// How far KVM runs guests on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvmSupport {
    /// No guest runs.
    None,
    /// Guests' user code runs on the processor, their kernels are emulated: operating systems do not boot, or too
    /// slowly.
    Programs,
    /// Guests run.
    Full,
}

impl fmt::Display for KvmSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Programs => "programs",
            Self::Full => "full",
        })
    }
}

/// The accelerator for guests on this host, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detection {
    /// The accelerator of guests with an operating system.
    pub accelerator: Accelerator,
    /// How far KVM works.
    pub kvm: KvmSupport,
    /// A CPU model with which QEMU starts under KVM; `host` if none was found.
    pub cpu_model: String,
    /// The reason for this choice, in a sentence.
    pub reason: String,
}

impl Detection {
    /// The result for a given degree of KVM support.
    fn new(kvm: KvmSupport, cpu_model: &str, reason: String) -> Self {
        Self {
            accelerator: match kvm {
                KvmSupport::Full => Accelerator::Kvm,
                KvmSupport::None | KvmSupport::Programs => Accelerator::Tcg,
            },
            kvm,
            cpu_model: cpu_model.to_owned(),
            reason,
        }
    }
}

/// Returns the accelerator for guests on this host: KVM if a small test guest, kernel and user code, runs under it
/// within 3 s, otherwise TCG.
///
/// Returns at once if `/dev/kvm` cannot be opened or a result is cached, otherwise takes up to 3 s for each of three
/// CPU models. The process of the test guest has ended when this returns.
pub fn detect() -> Detection {
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        let reason = format!("/dev/kvm cannot be opened: {error}");
        return Detection::new(KvmSupport::None, CPU_MODELS[0], reason);
    }
    let verdict_file = verdict_file();
    let key = key();
    if let (Some(file), Some(key)) = (&verdict_file, &key)
        && let Some(detection) = kept(file, key, SystemTime::now())
    {
        return detection;
    }
    let detection = try_kvm();
    if let (Some(file), Some(key)) = (verdict_file, key) {
        // Without a cached result the next call repeats the test, which costs only time.
        let _ = keep(&file, key, detection.clone());
    }
    detection
}

/// Runs the test guest with each CPU model until one succeeds.
fn try_kvm() -> Detection {
    let mut refusals = Vec::new();
    for model in CPU_MODELS {
        match run_guest_by_kvm(model) {
            Ok(slowdown) => return judge(slowdown, model),
            Err(why) => refusals.push(format!("-cpu {model}: {why}")),
        }
    }
    let reason = format!(
        "/dev/kvm opens, but a small guest did not run under it: {}",
        refusals.join("; ")
    );
    Detection::new(KvmSupport::None, CPU_MODELS[0], reason)
}

/// The result for a KVM under which the test guest ran, with a kernel `slowdown` times slower than its user code.
fn judge(slowdown: u64, model: &str) -> Detection {
    if slowdown < EMULATED_SLOWDOWN {
        let reason = format!("a small guest ran under KVM (-cpu {model})");
        return Detection::new(KvmSupport::Full, model, reason);
    }
    let reason = format!(
        "KVM runs guests' programs on the processor, but emulates their kernels, {slowdown} times slower (-cpu {model}): \
         guests without an operating system use it"
    );
    Detection::new(KvmSupport::Programs, model, reason)
}

/// Runs the test guest under KVM; returns the slowdown of its kernel relative to its user code.
fn run_guest_by_kvm(cpu_model: &str) -> Result<u64, String> {
    let name = format!("plimsoll-kvm-probe-{}", std::process::id());
    let on = (Accelerator::Kvm, cpu_model);
    let workload = "workload=uniform mib=1 visits=10000";
    let guest = BareGuest::start(&name, on, MEMORY_MIB, workload);
    let mut guest = guest.map_err(|error| format!("{QEMU}: {error}"))?;
    let deadline = Instant::now() + GUEST_TIMEOUT;
    let mut slowdown = None;
    loop {
        match guest.next(deadline) {
            BareGuestEvent::Line(
                _,
                ConsoleEvent::Ready {
                    kernel_slowdown, ..
                },
            ) => {
                slowdown = kernel_slowdown;
            }
            BareGuestEvent::Line(_, ConsoleEvent::Done { mismatches: 0, .. }) => {
                return slowdown.ok_or_else(|| "it did not time its kernel".to_owned());
            }
            BareGuestEvent::Line(..) => {}
            BareGuestEvent::Silence => {
                return Err(format!("it has not ended after {GUEST_TIMEOUT:?}"));
            }
            BareGuestEvent::Ended(why) => return Err(why),
        }
    }
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

/// A result and the data it depends on.
#[derive(Serialize, Deserialize)]
struct Verdict {
    key: String,
    detection: Detection,
}

/// Path of the cache file. Only this user can have written the file, and only since the last boot; `None` if
/// the system has no directory for such files.
fn verdict_file() -> Option<PathBuf> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let folder = own.unwrap_or_else(|| PathBuf::from("/run"));
    folder
        .is_dir()
        .then(|| folder.join("plimsoll").join("accelerator.json"))
}

/// The data that a result depends on: this boot, the host's kernel and QEMU.
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
        && (verdict.detection.kvm == KvmSupport::Full || age < VERDICT_AGAINST_HOLDS);
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
        let verdict = |kvm| Detection::new(kvm, "host", "tried".into());
        for against in [KvmSupport::None, KvmSupport::Programs] {
            keep(&file, "a".into(), verdict(against)).unwrap();
            assert_eq!(kept(&file, "a", now), Some(verdict(against)));
            assert_eq!(kept(&file, "b", now), None);
            assert_eq!(kept(&file, "a", later), None);
        }
        keep(&file, "a".into(), verdict(KvmSupport::Full)).unwrap();
        assert_eq!(kept(&file, "a", later), Some(verdict(KvmSupport::Full)));
        fs::write(&file, "not a verdict").unwrap();
        assert_eq!(kept(&file, "a", now), None);
    }

    #[test]
    fn a_kernel_far_slower_than_its_program_is_emulated() {
        let full = judge(1, "host");
        assert_eq!(
            (full.accelerator, full.kvm),
            (Accelerator::Kvm, KvmSupport::Full)
        );
        let programs = judge(3000, "qemu64,-cx16");
        assert_eq!(programs.accelerator, Accelerator::Tcg);
        assert_eq!(programs.kvm, KvmSupport::Programs);
        assert_eq!(programs.cpu_model, "qemu64,-cx16");
    }
}
