//! The actuators.
//!
//! [`ACTUATORS`] is the only list of them. A new actuator is a file with its [`ActuatorRow`] and a line in the list.

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_flow::VmId;

#[cfg(feature = "libvirt")]
use crate::libvirt;
use crate::{
    ActuatorError, BalloonSettings, DryRun, MemoryPart, balloon, disk_cache, fixed, hcache,
};

/// All actuators. Of one role, the first that a VM has is used.
pub static ACTUATORS: &[&ActuatorRow] = &[
    #[cfg(feature = "libvirt")]
    &libvirt::ROW,
    &balloon::ROW,
    &fixed::ROW,
    &disk_cache::ROW,
    &hcache::ROW,
];

/// One actuator.
pub struct ActuatorRow {
    /// Its name.
    pub name: &'static str,
    /// What it changes, and how.
    pub summary: &'static str,
    /// The memory that it changes.
    pub role: Role,
    /// Opens it; `None` if the VM or host does not have it.
    pub(crate) open: fn(&Endpoints) -> Result<OptionalPart, ActuatorError>,
}

/// Memory that a VM or host may not have.
type OptionalPart = Option<Box<dyn MemoryPart>>;

/// The memory that an actuator changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A VM's own memory: its RAM less its balloon.
    Direct,
    /// The cache under a VM's disk.
    Cache,
    /// The host's page store.
    Store,
}

/// Where the actuators of a VM, or of the host, can be reached.
#[derive(Debug, Clone)]
pub struct Endpoints {
    /// The VM; empty for the host.
    pub vm: VmId,
    /// Its QEMU process.
    pub pid: u32,
    /// Its RAM.
    pub memory_bytes: u64,
    /// Its monitor.
    pub qmp_socket: Option<PathBuf>,
    /// Admin socket of the daemon under its disk.
    pub disk_admin: Option<PathBuf>,
    /// URI of the host's libvirt.
    pub libvirt_uri: Option<String>,
    /// Socket of the host's page store.
    pub hcache: Option<PathBuf>,
    /// Limits of its balloon.
    pub balloon: BalloonSettings,
    /// Longest exchange with a disk daemon, the page store or libvirt.
    pub timeout: Duration,
    /// Whether targets are dropped instead of sent.
    pub dry_run: bool,
}

impl Default for Endpoints {
    fn default() -> Self {
        Self {
            vm: VmId(String::new()),
            pid: 0,
            memory_bytes: 0,
            qmp_socket: None,
            disk_admin: None,
            libvirt_uri: None,
            hcache: None,
            balloon: BalloonSettings::default(),
            timeout: Duration::from_secs(2),
            dry_run: false,
        }
    }
}

/// Opens the first actuator of this role that is there. One that cannot be queried is skipped, and its error added to
/// `failures`.
pub fn open(
    role: Role,
    endpoints: &Endpoints,
    failures: &mut Vec<ActuatorError>,
) -> Option<Box<dyn MemoryPart>> {
    let mut rows = ACTUATORS.iter().filter(|row| row.role == role);
    let part = rows.find_map(|row| {
        (row.open)(endpoints).unwrap_or_else(|error| {
            failures.push(error);
            None
        })
    })?;
    Some(if endpoints.dry_run {
        Box::new(DryRun::new(part))
    } else {
        part
    })
}
