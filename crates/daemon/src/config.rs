//! The daemon's configuration, `/etc/plimsoll/plimsoll.toml` and `plimsoll.toml.d/*.toml`.
//!
//! The file itself is read first, then those of the folder by name; of a key that stands in several, the last counts.
//! Rules for VMs are appended. docs/configuration.md names all keys.

mod error;
mod keys;
mod source;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_policy::{Policy, Search};
use plimsoll_protocol::decision::Mode;
use wildmatch::WildMatch;

pub use error::ConfigError;

/// Where the configuration is looked for if nothing else is said; it need not exist.
pub const PATH: &str = "/etc/plimsoll/plimsoll.toml";

/// All settings, defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// What the daemon may do; `observe` by default.
    pub mode: Mode,
    /// From one turn to the next, 1 s to an hour; 30 s by default.
    pub turn_interval: Duration,
    /// Memory to divide; `None`: what the VMs were found with.
    pub total_bytes: Option<u64>,
    /// How it is divided; isolated sharing by default.
    pub policy: Policy,
    /// Sizes are multiples of this; 4 MiB by default.
    pub unit_bytes: u64,
    /// Most that a VM's size changes by in one move; `None` for no limit. 10 % of the VM's baseline would be `step_ratio`.
    pub step_bytes: Option<u64>,
    /// The least fall of the geometric mean that is worth a move; 0.02 by default.
    pub gain_min: f64,
    /// Least time from one division to the next; 5 min by default.
    pub cooldown: Duration,
    /// How long a VM is measured after a move before its promise is judged; 60 s by default.
    pub check_after: Duration,
    /// How far above its bound a VM may be measured before the move is taken back, as a share; 0.03 by default.
    pub tolerance: f64,
    /// How long a balloon may stand still before it counts as stuck; 30 s by default.
    pub balloon_patience: Duration,
    /// Whether curves come from traps or from caches under the disks.
    pub workflow: Workflow,
    /// How VMs are traced.
    pub trace: TraceSettings,
    /// Where history is kept; `None` for nowhere. `/var/lib/plimsoll/history.redb` by default.
    pub history: Option<PathBuf>,
    /// Most bytes of it; 256 MiB by default.
    pub history_bytes_max: u64,
    /// How long it is kept; a week by default.
    pub history_keep: Duration,
    /// Where the daemon serves.
    pub serve: ServeSettings,
    /// Whether libvirt's VMs are found and moved through it.
    pub libvirt: Option<String>,
    /// The shared page store that the memory of self-ballooning VMs backs: its socket; `None` without.
    pub store: Option<PathBuf>,
    /// Rules, the first that fits a VM's name decides each setting.
    pub vms: Vec<VmRule>,
}

/// How curves are got, \[LS07\] §4.3.
#[derive(Debug, Clone, PartialEq)]
pub enum Workflow {
    /// By traps on the VMs' RAM.
    Trap,
    /// By shrinking VMs into the caches under their disks (fig. 6).
    Cache {
        /// Share of a VM's size that stays its own while it is traced, above 0.0 and below 1.0; 0.25 by default.
        direct_ratio: f64,
        /// How long the VMs are traced before memory is divided; 10 min by default.
        trace_for: Duration,
        /// Whether the caches are kept, so that the host can be divided anew at any time, instead of given back.
        keep: bool,
        /// From one giving back to the next tracing; 6 h by default.
        every: Duration,
    },
}

/// How a VM's RAM is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceBackend {
    /// By traps: references in order.
    Trap,
    /// By presence scans: which pages were touched from one to the next.
    Scan,
}

/// How the daemon's tracers work; see `plimsoll attach --help`.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceSettings {
    /// Whether VMs are traced.
    pub enabled: bool,
    /// How their RAM is watched; by traps by default.
    pub backend: TraceBackend,
    /// The program `plimsoll`; found beside the daemon by default.
    pub program: Option<PathBuf>,
    /// Length of a period; 5 s by default.
    pub period: Duration,
    /// Share of a VM's CPU time that its tracer may take; 0.01 by default.
    pub budget: f64,
    /// How far back the curve reaches; 5 min by default.
    pub window: Duration,
}

/// Where and for whom the daemon serves.
#[derive(Debug, Clone, PartialEq)]
pub struct ServeSettings {
    /// The socket for those who may change things.
    pub socket: PathBuf,
    /// Its group; `None`: root's alone.
    pub group: Option<String>,
    /// The socket for those who may look; `None` without.
    pub read_only_socket: Option<PathBuf>,
    /// Its group; `None`: everybody.
    pub read_only_group: Option<String>,
    /// TCP, only when asked for.
    pub tcp: Option<TcpSettings>,
}

/// Serving over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpSettings {
    /// Address and port.
    pub listen: std::net::SocketAddr,
    /// File with the token that clients must show; at least one of token and client CA is needed, save for a read-only loopback.
    pub token_file: Option<PathBuf>,
    /// Certificate chain and key, PEM.
    pub tls: Option<TlsSettings>,
    /// Whether changes are refused.
    pub read_only: bool,
}

/// TLS over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsSettings {
    /// The server's certificate chain.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Who signs clients' certificates (mTLS); `None` without.
    pub client_ca: Option<PathBuf>,
}

/// What VMs whose name fits a glob are promised; what is `None` is left to later rules.
#[derive(Debug, Clone, PartialEq)]
pub struct VmRule {
    /// Glob over names: `web-*`.
    pub name: String,
    /// Whether the daemon may move them.
    pub managed: Option<bool>,
    /// They never get less.
    pub min_bytes: Option<u64>,
    /// They never get more.
    pub max_bytes: Option<u64>,
    /// What their misses are measured by; by default what a VM has when it is found.
    pub baseline_bytes: Option<u64>,
    /// Their proportional right.
    pub shares: Option<u32>,
    /// Most rise of misses, as a share.
    pub max_loss: Option<f64>,
    /// Whether a VM shrinks to its working set, its freed memory backing the page store (\[M08\] §7).
    pub self_balloon: Option<bool>,
    /// Admin socket of the daemon under its disk; by default the one that `plimsoll run` made.
    pub disk_admin: Option<PathBuf>,
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
            check_after: Duration::from_mins(1),
            tolerance: 0.03,
            balloon_patience: Duration::from_secs(30),
            workflow: Workflow::Trap,
            trace: TraceSettings {
                enabled: true,
                backend: TraceBackend::Trap,
                program: None,
                period: Duration::from_secs(5),
                budget: 0.01,
                window: Duration::from_mins(5),
            },
            history: Some(PathBuf::from("/var/lib/plimsoll/history.redb")),
            history_bytes_max: 256 << 20,
            history_keep: Duration::from_hours(7 * 24),
            serve: ServeSettings {
                socket: PathBuf::from(plimsoll_protocol::SOCKET),
                group: None,
                read_only_socket: Some(PathBuf::from(plimsoll_protocol::SOCKET_READ_ONLY)),
                read_only_group: None,
                tcp: None,
            },
            libvirt: None,
            store: None,
            vms: Vec::new(),
        }
    }
}

impl Config {
    /// Reads `path` and its folder of additions, or [`PATH`] and its folder if `None`.
    ///
    /// Gives what an operator should know with it: which files were read, or that there is none.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong, with its file and line; also if a `path` that was asked for is not there.
    pub fn load(path: Option<&Path>) -> Result<(Self, Vec<String>), ConfigError> {
        let files = source::files(path.unwrap_or(Path::new(PATH)), path.is_some())?;
        let mut notes: Vec<String> = files
            .iter()
            .map(|file| format!("read {}", file.path().display()))
            .collect();
        if notes.is_empty() {
            notes.push(format!("no {PATH}: all settings have their defaults"));
        }
        Ok((keys::read(&files)?, notes))
    }

    /// What the VM called `vm` is promised: of each setting, what the first rule that fits and has it says.
    ///
    /// Different rules may give a floor above the ceiling; then the floor is kept, being the promise.
    #[must_use]
    pub fn settings_for(&self, vm: &str) -> VmRule {
        let mut merged = VmRule::for_name(vm);
        for rule in &self.vms {
            if !WildMatch::new(&rule.name).matches(vm) {
                continue;
            }
            merged.managed = merged.managed.or(rule.managed);
            merged.min_bytes = merged.min_bytes.or(rule.min_bytes);
            merged.max_bytes = merged.max_bytes.or(rule.max_bytes);
            merged.baseline_bytes = merged.baseline_bytes.or(rule.baseline_bytes);
            merged.shares = merged.shares.or(rule.shares);
            merged.max_loss = merged.max_loss.or(rule.max_loss);
            merged.self_balloon = merged.self_balloon.or(rule.self_balloon);
            merged.disk_admin = merged.disk_admin.or_else(|| rule.disk_admin.clone());
        }
        merged.max_bytes = merged
            .max_bytes
            .max(merged.min_bytes.filter(|_| merged.max_bytes.is_some()));
        merged
    }

    /// The keys that differ in `new` and that a running daemon cannot take over.
    #[must_use]
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
            ("[tcp]", serve.tcp != then.tcp),
            ("[trace]", self.trace != new.trace),
            (
                "balloon.patience",
                self.balloon_patience != new.balloon_patience,
            ),
            ("libvirt.uri", self.libvirt != new.libvirt),
            ("store.socket", self.store != new.store),
        ];
        let changed = keys.into_iter().filter(|(_, differs)| *differs);
        changed.map(|(key, _)| key).collect()
    }
}

impl VmRule {
    /// A rule that says nothing yet of the VMs whose name fits `name`.
    #[must_use]
    pub fn for_name(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            managed: None,
            min_bytes: None,
            max_bytes: None,
            baseline_bytes: None,
            shares: None,
            max_loss: None,
            self_balloon: None,
            disk_admin: None,
        }
    }
}
