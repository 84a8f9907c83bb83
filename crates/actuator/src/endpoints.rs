//! Addresses of a VM's actuators, and the registry's entry of each actuator.

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_flow::VmId;
use plimsoll_vm::PeerSocket;

use crate::{ActuatorError, BalloonSettings, MemoryPart};

/// One actuator.
pub struct ActuatorRow {
    /// Its name.
    pub name: &'static str,
    /// The memory that it changes, and the method.
    pub summary: &'static str,
    /// The memory that it changes.
    pub role: Role,
    /// Opens it; `None` if the VM or host does not have it.
    pub(crate) open: fn(&Endpoints) -> Result<OptionalPart, ActuatorError>,
}

/// A part of memory that a VM or host may not have.
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

/// Addresses of the actuators of a VM or of the host.
#[derive(Debug, Clone)]
pub struct Endpoints {
    /// The VM; empty for the host.
    pub vm: VmId,
    /// Its QEMU process.
    pub pid: u32,
    /// Its UUID, by that process.
    pub uuid: Option<String>,
    /// Its RAM.
    pub memory_bytes: u64,
    /// Its monitors, in the order in which they are tried.
    pub monitors: Vec<PeerSocket>,
    /// Admin socket of the daemon under its disk.
    pub disk_admin: Option<PeerSocket>,
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
            uuid: None,
            memory_bytes: 0,
            monitors: Vec::new(),
            disk_admin: None,
            libvirt_uri: None,
            hcache: None,
            balloon: BalloonSettings::default(),
            timeout: Duration::from_secs(2),
            dry_run: false,
        }
    }
}
