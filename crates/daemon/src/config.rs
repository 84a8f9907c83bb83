//! The daemon's configuration, `/etc/plimsoll/plimsoll.toml` and `plimsoll.toml.d/*.toml`.
//!
//! The file itself is read first, then those of the drop-in directory in order of their names. If a key is set in
//! several files, the last one wins; rules for VMs are appended. docs/configuration.md describes all keys.

mod error;
mod file;
mod keys;
#[cfg(test)]
mod tests;
mod values;

use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_policy::{Policy, Search};
use plimsoll_protocol::decision::Mode;
use plimsoll_protocol::vm::{MissCost, Promise};
use plimsoll_trap::BackendSetting;
use plimsoll_vm::{AllowedUsers, GroupPattern};
use wildmatch::WildMatch;

pub use error::ConfigError;

/// The default configuration file, which need not exist.
pub const PATH: &str = "/etc/plimsoll/plimsoll.toml";

/// Minimum baseline of a VM: no guest runs in less, and one in bytes was meant otherwise.
pub(crate) const BASELINE_BYTES_MIN: u64 = 1 << 20;
/// The headroom by default, as a share of the host's RAM.
const HEADROOM_SHARE: u64 = 32;
/// Maximum weight of a VM in proportional sharing.
pub(crate) const SHARES_MAX: u32 = 1_000_000;

/// All settings, defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The host's name in all views; its kernel's by default. No key: an option of the program.
    pub host_name: String,
    /// Whether the daemon only observes, proposes or moves memory; `observe` by default.
    pub mode: Mode,
    /// Interval between turns, 1 s to an hour; 30 s by default.
    pub turn_interval: Duration,
    /// Memory to allocate; `None` for the sum of the VMs' sizes when they were discovered.
    pub total_bytes: Option<u64>,
    /// The allocation policy; isolated sharing by default.
    pub policy: Policy,
    /// Sizes are multiples of this; 4 MiB by default.
    pub unit_bytes: u64,
    /// Largest change of a VM's size in one move; `None` for no limit.
    pub step_bytes: Option<u64>,
    /// Smallest fall of the geometric mean that is worth a move; 0.02 by default.
    pub gain_min: f64,
    /// Minimum time between two reallocations; 5 min by default.
    pub cooldown: Duration,
    /// How long a VM waits for a miss where that is not measured, in ms; 1 by default.
    pub miss_cost_ms: f64,
    /// How long a VM is measured after a move before it is compared with its bound; 60 s by default.
    pub check_after: Duration,
    /// How far a VM's measured misses may be above its bound before the move is rolled back, as a share; 0.03 by
    /// default.
    pub tolerance: f64,
    /// Time without progress after which a balloon is stuck; 30 s by default.
    pub balloon_patience: Duration,
    /// RAM of the host that is to stay available; `None` for 1/32 of it.
    pub headroom_bytes: Option<u64>,
    /// Whether VMs get back what they had when the daemon ends; true by default.
    pub gives_back_on_exit: bool,
    /// Whether curves come from traced RAM or from caches under the disks.
    pub workflow: Workflow,
    /// How VMs are traced.
    pub trace: TraceSettings,
    /// File of the history; `None` for none. `/var/lib/plimsoll/history.redb` by default.
    pub history: Option<PathBuf>,
    /// Its maximum size in bytes; 256 MiB by default.
    pub history_bytes_max: u64,
    /// Maximum age of its records; a week by default.
    pub history_keep: Duration,
    /// Sockets of the API.
    pub serve: ServeSettings,
    /// URI of the libvirt through which its VMs are changed; `None` without.
    pub libvirt: Option<String>,
    /// Socket of the shared page store, which gets the memory of self-ballooning VMs; `None` without.
    pub store: Option<PathBuf>,
    /// Which control groups are watched; none by default.
    pub groups: GroupSettings,
    /// Users whose processes can be VMs of this host; by default root and libvirt's users.
    pub users: AllowedUsers,
    /// Rules for VMs; each setting comes from the first matching rule that has it.
    pub vms: Vec<VmRule>,
}

/// The source of curves, \[LS07\] §4.3.
#[derive(Debug, Clone, PartialEq)]
pub enum Workflow {
    /// The VMs' RAM is traced.
    Trap,
    /// VMs are shrunk into the caches under their disks (fig. 6).
    Cache {
        /// Share of a VM's size that it keeps while it is traced, above 0.0 and below 1.0; 0.25 by default.
        direct_ratio: f64,
        /// How long the VMs are traced before memory is allocated; 10 min by default.
        trace_for: Duration,
        /// Whether the caches stay, so that memory can be reallocated at any time, instead of being returned.
        keep: bool,
        /// Time from returning the caches' memory to the next tracing; 6 h by default.
        every: Duration,
    },
}

/// How the daemon's tracers work; see `plimsoll attach --help`.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceSettings {
    /// Whether VMs are traced.
    pub enabled: bool,
    /// How their RAM is traced; by default the backend that costs each VM least.
    pub backend: BackendSetting,
    /// The program `plimsoll`; by default the one beside the daemon.
    pub program: Option<PathBuf>,
    /// Length of a period; 5 s by default.
    pub period: Duration,
    /// Share of a VM's CPU time that its tracer may take; 0.01 by default.
    pub budget: f64,
    /// Length of time that the curve covers; 5 min by default.
    pub window: Duration,
    /// Whether tracing rests while a VM's phase is steady; not by default.
    pub intermittent: bool,
}

/// Which control groups are watched.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupSettings {
    /// Patterns of their paths; groups of earlier patterns come first.
    pub watch: Vec<GroupPattern>,
    /// Maximum number of groups watched at a time, 1 to 256; 16 by default.
    pub max: u64,
}

/// Sockets of the API, and their permissions.
#[derive(Debug, Clone, PartialEq)]
pub struct ServeSettings {
    /// The control socket.
    pub socket: PathBuf,
    /// Its group; `None` for root alone.
    pub group: Option<String>,
    /// The read-only socket; `None` without.
    pub read_only_socket: Option<PathBuf>,
    /// Its group; `None` for that of the control socket, `everybody` for all users.
    pub read_only_group: Option<String>,
    /// Whether the metrics contain every VM's curve, in up to 40 series.
    pub curve_buckets: bool,
    /// TCP; `None` without.
    pub tcp: Option<TcpSettings>,
}

/// Serving over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpSettings {
    /// Address and port.
    pub listen: std::net::SocketAddr,
    /// File with the clients' token; a token or a client CA is required, except for a read-only loopback address.
    pub token_file: Option<PathBuf>,
    /// TLS; `None` for plain HTTP.
    pub tls: Option<TlsSettings>,
    /// Whether it is read-only.
    pub read_only: bool,
}

/// TLS over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsSettings {
    /// The server's certificate chain.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// CA of the clients' certificates (mTLS); `None` without.
    pub client_ca: Option<PathBuf>,
}

/// Settings of the VMs whose name matches a glob; `None` leaves a setting to later rules.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VmRule {
    /// Glob over names: `web-*`.
    pub name: String,
    /// UUID of the one VM to which the rule applies, in lower case; `None` for VMs of any.
    pub uuid: Option<String>,
    /// Whether the daemon may change their memory.
    pub managed: Option<bool>,
    /// Minimum size.
    pub min_bytes: Option<u64>,
    /// Maximum size.
    pub max_bytes: Option<u64>,
    /// Size against which losses are measured; by default a VM's size when it is discovered.
    pub baseline_bytes: Option<u64>,
    /// Size of the guest's swap, which takes memory that the guest could not give otherwise; 0 by default.
    pub swap_bytes: Option<u64>,
    /// Weight in proportional sharing.
    pub shares: Option<u32>,
    /// What the VM is promised about its misses: one setting, whichever of its bounds a rule gives.
    pub promise: Option<Promise>,
    /// Whether a VM shrinks to its working set and frees memory for the page store (\[M08\] §7).
    pub self_balloon: Option<bool>,
    /// Admin socket of the daemon under its disk; by default the one that `plimsoll run` creates.
    pub disk_admin: Option<PathBuf>,
    /// Whether a VM in a user namespace of its own may be traced by calls made in its process.
    pub allow_namespaced: Option<bool>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::Observe,
            turn_interval: Duration::from_secs(30),
            total_bytes: None,
            policy: Policy::isolated(Search::Auto),
            unit_bytes: 4 << 20,
            step_bytes: None,
            gain_min: 0.02,
            cooldown: Duration::from_mins(5),
            miss_cost_ms: MissCost::default().ms,
            check_after: Duration::from_mins(1),
            tolerance: 0.03,
            balloon_patience: Duration::from_secs(30),
            headroom_bytes: None,
            host_name: kernel_host_name(),
            gives_back_on_exit: true,
            workflow: Workflow::Trap,
            trace: TraceSettings {
                enabled: true,
                backend: BackendSetting::Auto,
                program: None,
                period: Duration::from_secs(5),
                budget: 0.01,
                window: Duration::from_mins(5),
                intermittent: false,
            },
            history: Some(PathBuf::from("/var/lib/plimsoll/history.redb")),
            history_bytes_max: 256 << 20,
            history_keep: Duration::from_hours(7 * 24),
            serve: ServeSettings {
                socket: PathBuf::from(plimsoll_protocol::SOCKET),
                group: None,
                read_only_socket: Some(PathBuf::from(plimsoll_protocol::SOCKET_READ_ONLY)),
                read_only_group: None,
                curve_buckets: false,
                tcp: None,
            },
            libvirt: None,
            store: None,
            groups: GroupSettings {
                watch: Vec::new(),
                max: 16,
            },
            users: AllowedUsers::default(),
            vms: Vec::new(),
        }
    }
}

fn kernel_host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

impl Config {
    /// Reads `path` and its drop-in directory, or [`PATH`] and its directory if `None`.
    ///
    /// Also returns notes for the operator: the files that were read, or that there is none.
    ///
    /// # Errors
    ///
    /// An error, with its file and line; also if a given `path` does not exist.
    pub fn load(path: Option<&Path>) -> Result<(Self, Vec<String>), ConfigError> {
        let files = file::files(path.unwrap_or(Path::new(PATH)), path.is_some())?;
        let mut notes: Vec<String> = files
            .iter()
            .map(|file| format!("read {}", file.path().display()))
            .collect();
        if notes.is_empty() {
            notes.push(format!("no {PATH}: all settings have their defaults"));
        }
        Ok((keys::read(&files)?, notes))
    }

    /// The same without what is wrong in the files, for those to whom a VM matters more than a wrong line. Also returns the errors.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, or an error that leaves open which history is meant.
    pub fn load_tolerantly(path: Option<&Path>) -> Result<(Self, Vec<ConfigError>), ConfigError> {
        keys::read_tolerantly(&file::files(
            path.unwrap_or(Path::new(PATH)),
            path.is_some(),
        )?)
    }

    /// The settings of the VM called `vm`, of this UUID if it has one: each from the first matching rule that has it.
    ///
    /// If different rules give a minimum above the maximum, the minimum wins, because it is a guarantee.
    pub fn settings_for(&self, vm: &str, uuid: Option<&str>) -> VmRule {
        let mut merged = VmRule::for_name(vm);
        for rule in &self.vms {
            let is_of_uuid = rule.uuid.as_deref().is_none_or(|its| uuid == Some(its));
            if !is_of_uuid || !WildMatch::new(&rule.name).matches(vm) {
                continue;
            }
            merged.managed = merged.managed.or(rule.managed);
            merged.min_bytes = merged.min_bytes.or(rule.min_bytes);
            merged.max_bytes = merged.max_bytes.or(rule.max_bytes);
            merged.baseline_bytes = merged.baseline_bytes.or(rule.baseline_bytes);
            merged.swap_bytes = merged.swap_bytes.or(rule.swap_bytes);
            merged.shares = merged.shares.or(rule.shares);
            merged.promise = merged.promise.or(rule.promise);
            merged.self_balloon = merged.self_balloon.or(rule.self_balloon);
            merged.disk_admin = merged.disk_admin.or_else(|| rule.disk_admin.clone());
            merged.allow_namespaced = merged.allow_namespaced.or(rule.allow_namespaced);
        }
        merged.max_bytes = merged
            .max_bytes
            .max(merged.min_bytes.filter(|_| merged.max_bytes.is_some()));
        merged
    }

    /// Whether a key of rules, where it is given, differs in `new`.
    fn rules_differ<T: PartialEq>(&self, new: &Self, key: impl Fn(&VmRule) -> Option<T>) -> bool {
        let given = |config: &Self| -> Vec<_> {
            let rules = config.vms.iter();
            let given = rules.map(|rule| Some((rule.name.clone(), rule.uuid.clone(), key(rule)?)));
            given.flatten().collect()
        };
        given(self) != given(new)
    }

    /// RAM that stays available on a host with `ram_bytes` of it. A headroom that leaves VMs nothing counts as none that is set.
    pub fn headroom_of(&self, ram_bytes: u64) -> u64 {
        let set = self.headroom_bytes.filter(|headroom| *headroom < ram_bytes);
        set.unwrap_or(ram_bytes / HEADROOM_SHARE)
    }

    /// Warnings about sizes that do not fit a host with `ram_bytes` of RAM.
    pub fn warnings_for_ram(&self, ram_bytes: u64) -> Vec<String> {
        let total = self.total_bytes.filter(|total| *total > ram_bytes);
        let total = total.map(|total| {
            format!(
                "the configured total of {} MiB exceeds the host's RAM: {} MiB are allocated",
                total >> 20,
                ram_bytes >> 20
            )
        });
        let is_much = |headroom: &u64| *headroom > ram_bytes / 2;
        let headroom = self.headroom_bytes.filter(is_much).map(|headroom| {
            let what = match headroom < ram_bytes {
                true => "is more than half of the host's RAM",
                false => "cannot be kept with the host's RAM",
            };
            format!(
                "the configured headroom of {} MiB {what} of {} MiB: {} MiB are to stay available",
                headroom >> 20,
                ram_bytes >> 20,
                self.headroom_of(ram_bytes) >> 20
            )
        });
        total.into_iter().chain(headroom).collect()
    }

    /// The keys that differ in `new` and take effect only after a restart.
    pub fn changes_needing_restart(&self, new: &Self) -> Vec<&'static str> {
        let (serve, then) = (&self.serve, &new.serve);
        let keys = [
            ("history.file", self.history != new.history),
            (
                "history.size_max",
                self.history_bytes_max != new.history_bytes_max,
            ),
            ("history.keep", self.history_keep != new.history_keep),
            ("serve.socket", serve.socket != then.socket),
            ("serve.group", serve.group != then.group),
            (
                "serve.read_only_socket",
                serve.read_only_socket != then.read_only_socket,
            ),
            (
                "serve.read_only_group",
                serve.read_only_group != then.read_only_group,
            ),
            (
                "serve.curve_buckets",
                serve.curve_buckets != then.curve_buckets,
            ),
            ("[tcp]", serve.tcp != then.tcp),
            ("[trace]", self.trace != new.trace),
            (
                "balloon.patience",
                self.balloon_patience != new.balloon_patience,
            ),
            ("libvirt.uri", self.libvirt != new.libvirt),
            ("store.socket", self.store != new.store),
            ("hosts.users", self.users != new.users),
            ("[groups]", self.groups != new.groups),
            (
                "vm.disk_admin",
                self.rules_differ(new, |rule| rule.disk_admin.clone()),
            ),
            (
                "vm.allow_namespaced",
                self.rules_differ(new, |rule| rule.allow_namespaced),
            ),
        ];
        let changed = keys.into_iter().filter(|(_, differs)| *differs);
        changed.map(|(key, _)| key).collect()
    }
}

impl VmRule {
    /// An empty rule for the VMs whose name matches `name`.
    pub fn for_name(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..Self::default()
        }
    }
}
