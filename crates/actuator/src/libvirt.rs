//! VMs that libvirt manages, through its program `virsh`.
//!
//! A monitor serves one client. For a VM of libvirt that client is libvirt, so the balloon is set and queried through
//! it. `virsh` needs nothing at build time and cannot crash or block this process: it is killed at its time limit.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::VmId;
use plimsoll_vm::{BlockReads, GuestStats, StatsClock};

use crate::endpoints::{ActuatorRow, Role};
use crate::guest_need::STATS_AGE_MAX_S;
use crate::outdated_size::OutdatedSize;
use crate::progress::{Absence, Part, Tracker};
use crate::stats_interval::StatsInterval;
use crate::{ActuatorError, BalloonRecord, BalloonSettings, Delivery, MemoryPart, Observation};

pub(crate) static ROW: ActuatorRow = ActuatorRow {
    name: "libvirt",
    summary: "the balloon of a VM that libvirt manages, through virsh",
    role: Role::Direct,
    open: |endpoints| {
        let Some(uri) = &endpoints.libvirt_uri else {
            return Ok(None);
        };
        // The process identifies a VM of libvirt: its monitor may have no path, and belongs to libvirt in any case. libvirt
        // itself is not asked yet: it may be slow, or not there for now.
        let Some(name) = libvirt_names().remove(&endpoints.pid) else {
            return Ok(None);
        };
        Ok(Some(Box::new(Domain::new(
            Virsh::new(uri, endpoints.timeout),
            DomainInfo {
                name,
                uuid: endpoints.uuid.clone(),
                memory_bytes: endpoints.memory_bytes,
            },
            endpoints.balloon,
        ))))
    },
};

/// Limit on the output that is read.
const OUTPUT_BYTES_MAX: u64 = 16 << 20;
/// Interval of polling whether `virsh` has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Minimum interval between queries for a VM's maximum and the reads of its disks, and for an interval of statistics that are stale.
const DOMSTATS_INTERVAL: Duration = Duration::from_secs(10);
/// Directory in which the system's libvirt stores the process ids of its VMs.
const PID_FOLDER: &str = "/run/libvirt/qemu";
/// Errors that mean that nothing was sent to the VM.
const REFUSALS: &[&str] = &[
    "failed to connect to the hypervisor",
    "failed to get domain",
    "is not running",
    "without the balloon device",
    "cannot set memory higher than max",
];

/// A libvirt daemon, reached by `virsh`.
#[derive(Debug, Clone)]
pub struct Virsh {
    uri: String,
    timeout: Duration,
}

/// What the process of a VM of libvirt shows of it.
#[derive(Debug, Clone)]
pub struct DomainInfo {
    /// Its name.
    pub name: String,
    /// Its UUID, by its process.
    pub uuid: Option<String>,
    /// Its RAM, by its process.
    pub memory_bytes: u64,
}

/// Why a `virsh` command failed.
#[derive(Debug, thiserror::Error)]
enum VirshError {
    #[error("virsh cannot be started")]
    Start(#[source] io::Error),
    #[error("virsh did not end within {0:?}")]
    TimedOut(Duration),
    #[error("virsh ended with {status}: {text}")]
    Failed { status: ExitStatus, text: String },
    #[error("unexpected output of virsh: {0:?}")]
    Output(String),
    #[error("libvirt lists no running VM {0:?} with the UUID of its process")]
    NotListed(String),
}

impl Virsh {
    /// The libvirt at `uri`, such as `qemu:///system`; each command takes at most `timeout`.
    pub fn new(uri: &str, timeout: Duration) -> Self {
        Self {
            uri: uri.to_owned(),
            timeout,
        }
    }

    fn run(&self, words: &[&str]) -> Result<String, VirshError> {
        let deadline = Instant::now() + self.timeout;
        let mut child = Command::new("virsh")
            .args(["--quiet", "--connect", &self.uri])
            .args(words)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(VirshError::Start)?;
        let output = child.stdout.take().map(read_all);
        let errors = child.stderr.take().map(read_all);
        let Some(status) = wait(&mut child, deadline).map_err(VirshError::Start)? else {
            return Err(VirshError::TimedOut(self.timeout));
        };
        let text = |from: Option<Receiver<Vec<u8>>>| {
            let left = deadline.saturating_duration_since(Instant::now());
            let bytes = from.and_then(|from| from.recv_timeout(left.max(POLL_INTERVAL)).ok());
            String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
        };
        match status.success() {
            true => Ok(text(output)),
            false => Err(VirshError::Failed {
                status,
                text: text(errors)
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" "),
            }),
        }
    }
}

/// Waits for the end of the process; `None` if it was killed at the deadline.
fn wait(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            // Fails only if it has just ended.
            let _ = child.kill();
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Reads a pipe in a thread of its own, so that two pipes are read at once and neither blocks the caller.
fn read_all(pipe: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (send, received) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // A broken pipe ends the output.
        let _ = pipe.take(OUTPUT_BYTES_MAX).read_to_end(&mut bytes);
        let _ = send.send(bytes);
    });
    received
}

/// The UUID of the VM with this name in the output of `list --uuid --name`. Names are padded there, and may end with blanks, so that the
/// process's own UUID decides among them; without one, a name that is not the only one like it has no UUID.
fn uuid_of(list: &str, name: &str, by_process: Option<&str>) -> Option<String> {
    let lines = list.lines().filter_map(|line| line.split_once(' '));
    let mut uuids = lines
        .filter(|(uuid, its)| {
            its.trim() == name.trim() && by_process.is_none_or(|known| known == *uuid)
        })
        .map(|(uuid, _)| uuid.to_owned());
    let uuid = uuids.next()?;
    uuids.next().is_none().then_some(uuid)
}

/// A value of `domstats` in KiB, in bytes.
fn value(domstats: &str, key: &str) -> Option<u64> {
    let mut lines = domstats.lines();
    let kib = lines.find_map(|line| line.trim_start().strip_prefix(key)?.strip_prefix('='));
    kib?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The state in which a VM does not run, by `domstats` (virDomainState of libvirt, named as QEMU does).
fn stopped_state(domstats: &str) -> Option<&'static str> {
    let mut lines = domstats.lines();
    match lines.find_map(|line| line.trim_start().strip_prefix("state.state="))? {
        "3" => Some("paused"),
        "5" => Some("shutdown"),
        "6" => Some("guest-panicked"),
        "7" => Some("suspended"),
        _ => None,
    }
}

/// Names of the VMs of the system's libvirt by their processes, also while that does not run.
pub fn libvirt_names() -> BTreeMap<u32, String> {
    let files = fs::read_dir(PID_FOLDER).into_iter().flatten().flatten();
    let names = files.filter_map(|file| {
        let name = file.file_name().into_string().ok()?;
        let name = name.strip_suffix(".pid")?;
        let pid = fs::read_to_string(file.path()).ok()?.trim().parse().ok()?;
        Some((pid, name.to_owned()))
    });
    names.collect()
}

/// The memory devices in a VM's description that libvirt's maximum has and its balloon has not: all but DIMMs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct MemoryDevices {
    /// Sizes of all of them: memory that virtio-mem can have, and what is no RAM, as persistent memory and that of enclaves.
    size_bytes: u64,
    /// Whether there is virtio-mem among them, and memory that it has.
    has_virtio_mem: bool,
    plugged_bytes: u64,
}

impl MemoryDevices {
    fn of_description(description: &str) -> Self {
        let mut sum = Self::default();
        for device in description.split("<memory model='").skip(1) {
            let device = device.split("</memory>").next().unwrap_or(device);
            let bytes = |tag: &str| {
                let (_, rest) = device.split_once(&format!("<{tag} unit='KiB'>"))?;
                let (kib, _) = rest.split_once('<')?;
                kib.parse::<u64>().ok()?.checked_mul(1024)
            };
            if device.starts_with("dimm'") {
                continue;
            }
            let size_bytes = bytes("size").unwrap_or(0);
            sum.size_bytes = sum.size_bytes.saturating_add(size_bytes);
            if device.starts_with("virtio-mem'") {
                sum.has_virtio_mem = true;
                let plugged_bytes = bytes("current").unwrap_or(0);
                sum.plugged_bytes = sum.plugged_bytes.saturating_add(plugged_bytes);
            }
        }
        sum
    }
}

/// The output of `dommemstat`.
struct MemoryStats<'text>(&'text str);

impl MemoryStats<'_> {
    fn count(&self, key: &str) -> Option<u64> {
        let mut lines = self.0.lines();
        lines.find_map(|line| {
            line.strip_prefix(key)?
                .strip_prefix(' ')?
                .trim()
                .parse()
                .ok()
        })
    }

    fn bytes(&self, key: &str) -> Option<u64> {
        self.count(key)?.checked_mul(1024)
    }

    /// The guest's statistics; `None` if it never reported any.
    fn guest(&self, interval_s: u64) -> Option<GuestStats> {
        let updated_unix_s = self.count("last_update").filter(|&time| time > 0)?;
        Some(GuestStats {
            age_s: GuestStats::age_s_of(updated_unix_s),
            updated_unix_s,
            interval_s,
            total_bytes: self.bytes("available"),
            free_bytes: self.bytes("unused"),
            available_bytes: self.bytes("usable"),
            disk_caches_bytes: self.bytes("disk_caches"),
            major_faults: self.count("major_fault"),
            swap_in_bytes: self.bytes("swap_in"),
            swap_out_bytes: self.bytes("swap_out"),
            oom_kills: None,
        })
    }
}

/// A VM that libvirt manages.
#[derive(Debug)]
pub struct Domain {
    vm: VmId,
    info: DomainInfo,
    /// Its UUID once libvirt lists it, because a name could be interpreted as the number of another VM.
    uuid: Option<String>,
    virsh: Virsh,
    /// Its maximum memory, as far as it has it: its RAM, and of its virtio-mem the part that is plugged.
    max_bytes: u64,
    /// libvirt's maximum; `None` until it is known.
    libvirt_max_bytes: Option<u64>,
    /// Whether its RAM changed and it was not described since.
    description_due: bool,
    devices: MemoryDevices,
    /// Interval of the guest's statistics, and when it was read; `None` until it is known.
    interval_s: Option<(u64, Instant)>,
    stats_interval: StatsInterval,
    absence: Option<Absence>,
    outdated_size: OutdatedSize,
    tracker: Tracker,
    stats_clock: StatsClock,
    /// Time of the last query for its state, its maximum and the reads of its disks.
    domstats_asked: Option<Instant>,
    /// The state in which its vCPUs did not run at that time.
    stopped: Option<&'static str>,
}

impl Domain {
    /// A running VM. Sends nothing yet; the time limit is that of `virsh`, not of the settings.
    pub fn new(virsh: Virsh, info: DomainInfo, settings: BalloonSettings) -> Self {
        Self {
            vm: VmId(info.name.clone()),
            uuid: None,
            virsh,
            max_bytes: info.memory_bytes,
            libvirt_max_bytes: None,
            description_due: false,
            devices: MemoryDevices::default(),
            info,
            interval_s: None,
            stats_interval: StatsInterval::new(settings.stats_interval_s),
            absence: None,
            outdated_size: OutdatedSize::default(),
            tracker: Tracker::new(settings.patience),
            stats_clock: StatsClock::default(),
            domstats_asked: None,
            stopped: None,
        }
    }

    /// Queries the VM's memory and the guest's statistics, if it reports any (`dommemstat`).
    ///
    /// # Errors
    ///
    /// [`ActuatorError::Query`].
    pub fn query(&mut self) -> Result<Option<GuestStats>, ActuatorError> {
        self.exchange().map_err(|source| ActuatorError::Query {
            what: self.name(),
            source: source.into(),
        })
    }

    fn name(&self) -> String {
        format!("the memory of libvirt VM {}", self.vm)
    }

    /// Runs a command on this VM, once libvirt lists it: also one that is paused.
    fn run(&mut self, words: &[&str]) -> Result<String, VirshError> {
        let uuid = self.identified()?;
        let (command, rest) = words.split_first().expect("a command");
        let domain = format!("--domain={uuid}");
        self.virsh.run(&[&[*command, &domain], rest].concat())
    }

    fn identified(&mut self) -> Result<String, VirshError> {
        if let Some(uuid) = &self.uuid {
            return Ok(uuid.clone());
        }
        let list = self.virsh.run(&["list", "--uuid", "--name"])?;
        let uuid = uuid_of(&list, &self.info.name, self.info.uuid.as_deref());
        let uuid = uuid.ok_or_else(|| VirshError::NotListed(self.info.name.clone()))?;
        self.uuid = Some(uuid.clone());
        Ok(uuid)
    }

    /// A page, and what its balloon does not get: virtio-mem.
    fn min_bytes(&self) -> u64 {
        self.devices.plugged_bytes.saturating_add(4096)
    }

    /// Takes its maximum, of which only what is plugged can be used.
    fn follow_maximum(&mut self) {
        if let Some(maximum) = self.libvirt_max_bytes {
            let MemoryDevices {
                size_bytes,
                plugged_bytes,
                ..
            } = self.devices;
            self.max_bytes = maximum
                .saturating_sub(size_bytes)
                .saturating_add(plugged_bytes);
        }
    }

    /// Takes its maximum from the output of `domstats`: RAM may have been plugged or unplugged; with virtio-mem without a change of it.
    fn take_maximum(&mut self, domstats: &str) {
        let Some(maximum) = value(domstats, "balloon.maximum") else {
            return;
        };
        let before = self.libvirt_max_bytes.replace(maximum);
        self.follow_maximum();
        // The first description is read with the interval of the statistics.
        self.description_due |= before.is_some_and(|before| before != maximum);
        if self.description_due || self.devices.has_virtio_mem {
            // What has not answered is asked again soon.
            self.description_due = self.read_description().is_err();
        }
    }

    fn read_description(&mut self) -> Result<String, VirshError> {
        let description = self.run(&["dumpxml"])?;
        self.devices = MemoryDevices::of_description(&description);
        self.follow_maximum();
        Ok(description)
    }

    fn exchange(&mut self) -> Result<Option<GuestStats>, VirshError> {
        let interval_s = match self.interval_s {
            Some((interval_s, _)) => interval_s,
            None => self.begin_stats()?,
        };
        let text = self.run(&["dommemstat"])?;
        let stats = MemoryStats(&text);
        let now = Instant::now();
        let Some(actual_bytes) = stats.bytes("actual") else {
            if stats.count("rss").is_none() {
                return Err(VirshError::Output(text.chars().take(120).collect()));
            }
            self.absence = Some(Absence::NoDevice);
            self.tracker.see(self.max_bytes, now);
            return Ok(None);
        };
        let actual_bytes = actual_bytes.saturating_add(self.devices.plugged_bytes);
        if actual_bytes > self.max_bytes {
            // RAM was plugged since the maximum was queried.
            let domstats = self.run(&["domstats", "--balloon"])?;
            self.take_maximum(&domstats);
            self.max_bytes = self.max_bytes.max(actual_bytes);
        }
        let mut guest = stats.guest(interval_s);
        if let Some(guest) = &mut guest {
            self.stats_clock.measure(guest);
            // Somebody else may have turned them off.
            let is_stale = guest.age_s > STATS_AGE_MAX_S.max(2 * interval_s);
            self.interval_s
                .take_if(|(_, read)| is_stale && now.duration_since(*read) >= DOMSTATS_INTERVAL);
        }
        let size_bytes = (self.outdated_size).resolve(actual_bytes, guest.as_ref(), self.max_bytes);
        self.tracker.see(size_bytes, now);
        let silent = guest.is_none() && actual_bytes == self.max_bytes;
        self.absence = silent.then_some(Absence::NoDriver);
        Ok(guest)
    }

    fn set_interval(&mut self, interval_s: u64) -> Result<(), VirshError> {
        let period = interval_s.to_string();
        self.run(&["dommemstat", "--period", &period, "--live"])
            .map(drop)
    }

    /// Turns on the guest's statistics unless they are on and frequent enough; returns their interval in s.
    fn begin_stats(&mut self) -> Result<u64, VirshError> {
        let description = self.read_description()?;
        let mut interval_s = period_of(&description);
        if let Some(ours_s) = self.stats_interval.to_set(interval_s) {
            match self.set_interval(ours_s) {
                // A VM without a balloon has no statistics.
                Err(VirshError::Failed { .. }) => {}
                outcome => {
                    outcome?;
                    self.stats_interval.was_set(interval_s);
                    interval_s = ours_s;
                }
            }
        }
        self.interval_s = Some((interval_s, Instant::now()));
        Ok(interval_s)
    }
}

impl MemoryPart for Domain {
    fn poll(&mut self, failures: &mut Vec<ActuatorError>) -> Observation {
        let now = Instant::now();
        let recent = |at| now.duration_since(at) < DOMSTATS_INTERVAL;
        let mut text = None;
        if !self.domstats_asked.is_some_and(recent) {
            self.domstats_asked = Some(now);
            // Without an answer, the cost of a miss is one that was measured before, or assumed.
            let domstats = ["domstats", "--state", "--balloon", "--block"];
            text = self.run(&domstats).ok();
            self.stopped = text.as_deref().and_then(stopped_state);
        }
        let text = text.as_deref();
        if let Some(text) = text {
            self.take_maximum(text);
        }
        let observed = Observation::of_guest(self.query(), failures);
        Observation {
            blocks: text.and_then(BlockReads::of_virsh),
            stopped: self.stopped.map(str::to_owned),
            ..observed
        }
    }

    fn part(&self) -> Part {
        let max_bytes = Some(self.max_bytes);
        let part = self.tracker.part(max_bytes, self.absence, Instant::now());
        Part {
            min_bytes: self.min_bytes(),
            ..part
        }
    }

    fn record(&self) -> BalloonRecord {
        BalloonRecord::of(&self.outdated_size, &self.stats_interval)
    }

    fn resume(&mut self, record: BalloonRecord) {
        record.restore(&mut self.outdated_size, &mut self.stats_interval);
    }

    fn want_statistics(&mut self, wanted: bool) -> Result<(), ActuatorError> {
        if self.stats_interval.is_wanted() != wanted {
            self.interval_s = None;
        }
        let Some(former_s) = self.stats_interval.want(wanted) else {
            return Ok(());
        };
        let outcome = self.set_interval(former_s);
        outcome.map_err(|source| ActuatorError::Query {
            what: self.name(),
            source: source.into(),
        })
    }

    /// `virsh setmem --live`.
    fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        let target_bytes = target_bytes / 4096 * 4096;
        let plugged = self.devices.plugged_bytes;
        let min_bytes = self.min_bytes();
        if !(min_bytes..=self.max_bytes).contains(&target_bytes) {
            return Err(ActuatorError::Target {
                what: self.name(),
                target_bytes,
                why: format!("expected {min_bytes} to {}, its maximum", self.max_bytes),
            });
        }
        let kib = (target_bytes - plugged) / 1024;
        if self.stats_interval.target_is_set() {
            self.interval_s = None;
        }
        let outcome = self.run(&["setmem", "--size", &kib.to_string(), "--live"]);
        let sent = match &outcome {
            Err(VirshError::Start(_) | VirshError::NotListed(_)) => Delivery::No,
            // It was not named yet.
            Err(_) if self.uuid.is_none() => Delivery::No,
            Err(VirshError::Failed { text, .. })
                if REFUSALS.iter().any(|refusal| text.contains(refusal)) =>
            {
                Delivery::No
            }
            _ => Delivery::Maybe,
        };
        if outcome.is_ok() || sent == Delivery::Maybe {
            self.tracker
                .tell(target_bytes, outcome.is_ok(), Instant::now());
        }
        outcome.map(drop).map_err(|source| ActuatorError::Set {
            what: self.name(),
            target_bytes,
            sent,
            source: source.into(),
        })
    }
}

/// Interval of a guest's statistics in a VM's description, in s; 0 for none.
fn period_of(description: &str) -> u64 {
    let period = description
        .split_once("<stats period='")
        .and_then(|(_, rest)| {
            let (period, _) = rest.split_once('\'')?;
            period.parse().ok()
        });
    period.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_vm_is_the_one_with_its_name_and_the_uuid_of_its_process() {
        let list = "1-2 web \n3-4  a'b \n5-6 web\n\n";
        let uuid = |name, by_process| uuid_of(list, name, by_process);
        assert_eq!(uuid("a'b", None), Some("3-4".to_owned()));
        assert_eq!(uuid("web ", Some("1-2")), Some("1-2".to_owned()));
        assert_eq!(uuid("web", Some("5-6")), Some("5-6".to_owned()));
        assert_eq!(uuid("web", None), None);
        assert_eq!(uuid("web", Some("3-4")), None);
        assert_eq!(uuid("1-2", None), None);
        assert_eq!(
            value("d\n  balloon.maximum=4\n", "balloon.maximum"),
            Some(4096)
        );
        let huge = "balloon.maximum=18446744073709551615";
        assert_eq!(value(huge, "balloon.maximum"), None);
    }

    #[test]
    fn memory_devices_are_read_from_a_description() {
        let device = |size: &str, current: &str| {
            format!(
                "<memory model='virtio-mem'><target><size unit='KiB'>{size}</size><node>0</node>\
                 <requested unit='KiB'>8</requested><current unit='KiB'>{current}</current></target></memory>"
            )
        };
        let fixed = |model: &str| {
            format!(
                "<memory model='{model}' access='shared'><target><size unit='KiB'>64</size><node>0</node></target></memory>"
            )
        };
        let dimm = fixed("dimm");
        let both = format!("{}{dimm}{}", device("512", "128"), device("256", "x"));
        let expected = MemoryDevices {
            size_bytes: 768 << 10,
            has_virtio_mem: true,
            plugged_bytes: 128 << 10,
        };
        assert_eq!(MemoryDevices::of_description(&both), expected);
        let none = MemoryDevices::default();
        assert_eq!(MemoryDevices::of_description(&dimm), none);
        // libvirt counts persistent memory, and that of enclaves, as memory of the VM.
        for model in ["nvdimm", "virtio-pmem", "sgx-epc"] {
            let expected = MemoryDevices {
                size_bytes: 64 << 10,
                ..none
            };
            let of_both = MemoryDevices::of_description(&(fixed(model) + &dimm));
            assert_eq!(of_both, expected, "{model}");
        }
    }

    #[test]
    fn statistics_are_read_and_what_is_missing_is_none() {
        let stats = MemoryStats(
            "actual 1024\nswap_in 0\nmajor_fault 7\nunused 4\nusable x\nlast_update 1\n",
        );
        let guest = stats.guest(2).unwrap();
        let expected = GuestStats {
            age_s: guest.age_s,
            updated_unix_s: 1,
            interval_s: 2,
            free_bytes: Some(4096),
            major_faults: Some(7),
            swap_in_bytes: Some(0),
            ..GuestStats::default()
        };
        assert_eq!(guest, expected);
        assert_eq!(stats.bytes("actual"), Some(1 << 20));
        assert_eq!(MemoryStats("actual 1\nrss 2\n").guest(2), None);
        assert_eq!(MemoryStats("last_update 0\n").guest(2), None);
    }

    #[test]
    fn the_period_is_found_in_a_description() {
        assert_eq!(
            period_of("<memballoon model='virtio'>\n<stats period='5'/>"),
            5
        );
        assert_eq!(period_of("<memballoon model='none'/>"), 0);
        assert_eq!(period_of("<stats period='5"), 0);
    }

    proptest! {
        #[test]
        fn no_output_makes_it_panic(text in "((Domain: ')?(balloon.current)?[=' \\n0-9a-z]{0,9}){0,9}") {
            let _ = uuid_of(&text, &text, None);
            let _ = MemoryDevices::of_description(&text);
            let _ = MemoryStats(&text).guest(1);
            let _ = period_of(&text);
        }
    }
}
