//! The host that this daemon runs on: QEMU processes, including those managed by libvirt.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use plimsoll_actuator::registry::open;
use plimsoll_actuator::{
    ActuatorError, BalloonSettings, Endpoints, MemoryPart, Patience, Role, VmMemory,
};
use plimsoll_flow::VmId;
use plimsoll_output::exit::with_causes;
use plimsoll_protocol::decision::Mode;
use plimsoll_vm::{
    AllowedUsers, CgroupMount, ControlGroup, GroupLimit, HostMemory, Listener, MemoryPressure,
    PeerSocket, ProcessId, QemuVm, VcpuClock, memory_limits, second_name,
};

use crate::clock::Clock;
use crate::config::{Config, VmRule};
use crate::discovery::{Discovery, DiscoveryResult, HostProcesses};
use crate::disk_feed::DiskFeed;
use crate::groups::GroupDiscovery;
use crate::host::{DiscoveredGroup, DiscoveredVm, Feed, FoundGroups, Host, VmHandles};
use crate::tracer::{Tracer, TracerTarget, Unobserved, lock};

/// Where `plimsoll run` keeps each VM's sockets.
const FOLDER: &str = "/run/plimsoll";
/// The admin socket of a disk daemon beside its disks' sockets.
const ADMIN_SOCKET: &str = "admin.sock";
/// Maximum duration of an exchange with a monitor. With that of a disk daemon it bounds the wait of a turn for VMs that
/// do not answer.
const MONITOR_MAX: Duration = Duration::from_secs(1);
/// Maximum duration of an exchange with libvirt or the page store.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Maximum interval between queries for a disk daemon's curve.
const CURVE_INTERVAL_MAX: Duration = Duration::from_secs(10);

/// QEMU processes of this host.
#[derive(Debug)]
pub struct QemuHost {
    discovery: Discovery,
    groups: GroupDiscovery,
    /// VMs of the last call.
    known: Vec<Arc<QemuVm>>,
    /// Their names, each of one VM.
    names: BTreeMap<ProcessId, GivenName>,
    /// Why those that are not traced cannot be.
    unobserved: Unobserved,
    /// The configuration by which VMs are assessed.
    config: Arc<Mutex<Config>>,
    /// Control groups in which they are alone.
    vm_groups: BTreeMap<ProcessId, ControlGroup>,
    /// Where control groups are mounted.
    mounts: Vec<CgroupMount>,
    users: AllowedUsers,
    store: Option<Box<dyn MemoryPart>>,
    dry_run: bool,
}

impl QemuHost {
    /// Starts to discover the VMs of this host, with the page store of the configuration. With `dry_run` no memory is
    /// ever moved.
    pub fn new(config: &Config, dry_run: bool) -> Self {
        let endpoints = Endpoints {
            hcache: config.store.clone(),
            timeout: ANSWER_MAX,
            dry_run,
            ..Endpoints::default()
        };
        let users = config.users.clone();
        let shared = Arc::new(Mutex::new(config.clone()));
        Self {
            discovery: Discovery::begin(HostProcesses::new(Arc::clone(&shared))),
            config: shared,
            groups: GroupDiscovery::begin(&config.groups),
            known: Vec::new(),
            names: BTreeMap::new(),
            unobserved: Unobserved::default(),
            vm_groups: BTreeMap::new(),
            mounts: Vec::new(),
            users,
            store: open(Role::Store, &endpoints, &mut Vec::new()),
            dry_run,
        }
    }
}

/// The name of a VM here.
#[derive(Debug, PartialEq, Eq)]
struct GivenName {
    name: String,
    /// UUID of the VM that has it.
    uuid: Option<String>,
}

/// Names the VMs that are new, by what they call themselves. A process chooses its own name, so the VM that had it first
/// keeps it; the others have another one as long as they run, because baseline and settings belong to a name. Only a VM with the UUID
/// of the one that ended takes its name over: it was migrated to another process of this host.
fn name<'a>(
    names: &mut BTreeMap<ProcessId, GivenName>,
    vms: impl Iterator<Item = (ProcessId, &'a str, Option<&'a str>)> + Clone,
) {
    let is_here = |process| vms.clone().any(|(known, ..)| known == process);
    let ended: Vec<_> = names
        .extract_if(.., |process, _| !is_here(*process))
        .collect();
    for (process, own, uuid) in vms {
        let given = GivenName {
            name: own.to_owned(),
            uuid: uuid.map(str::to_owned),
        };
        let is_continued = uuid.is_some() && ended.iter().any(|(_, former)| *former == given);
        if names.contains_key(&process) && !is_continued {
            continue;
        }
        names.remove(&process);
        let mut given = given;
        // No browser asks for a path that ends with one of these.
        let is_dots = |name: &str| matches!(name, "." | "..");
        while is_dots(&given.name) || names.values().any(|taken| taken.name == given.name) {
            given.name = second_name(&given.name, process.pid);
        }
        names.insert(process, given);
    }
}

impl Host for QemuHost {
    fn reconfigured(&mut self, config: &Config) {
        *lock(&self.config) = config.clone();
    }

    fn has_discovered(&self) -> bool {
        self.discovery.has_ended_once()
    }

    fn vms(&mut self) -> (Vec<DiscoveredVm>, Vec<String>) {
        let DiscoveryResult {
            vms,
            mut warnings,
            mut backends,
            unobserved,
            held,
        } = self.discovery.last();
        *self
            .unobserved
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = unobserved;
        self.known = vms;
        self.known.retain(|vm| vm.process().is_there());
        self.vm_groups = groups_of(&self.known);
        self.mounts = CgroupMount::all().unwrap_or_default();
        let own = self.known.iter();
        let own = own.map(|vm| (vm.process(), vm.id.0.as_str(), vm.uuid.as_deref()));
        name(&mut self.names, own);
        // Its monitor shows nothing of that: libvirt passes it as an open socket.
        #[cfg(feature = "libvirt")]
        let of_libvirt = plimsoll_actuator::libvirt_names();
        #[cfg(not(feature = "libvirt"))]
        let of_libvirt = BTreeMap::<u32, String>::new();
        let found = self.known.iter().map(|vm| {
            let name = self.names[&vm.process()].name.clone();
            if name != vm.id.0 {
                warnings.push(format!(
                    "several VMs are or were named {:?}, or it is no part of an address: process {} is called {name}",
                    vm.id.0, vm.pid
                ));
            }
            DiscoveredVm {
                vm: name,
                pid: vm.pid,
                start_ticks: vm.start_ticks,
                uuid: vm.uuid.clone(),
                accelerator: vm.accelerator,
                libvirt: of_libvirt.contains_key(&vm.pid),
                ram_bytes: vm.memory_bytes,
                backends: backends.remove(&vm.process()).unwrap_or_default(),
                held: held.get(&vm.process()).copied(),
                receives: vm.waits_for_migration(),
            }
        });
        (found.collect(), warnings)
    }

    fn open(&mut self, found: &DiscoveredVm, rule: &VmRule, config: &Config) -> VmHandles {
        let process = found.process();
        let vm = self.known.iter().find(|vm| vm.process() == process);
        let by_rule = rule.disk_admin.clone().map(|path| PeerSocket {
            path,
            root: None,
            listener: Listener::Users(self.users.clone()),
        });
        let admin = by_rule.or_else(|| vm.and_then(|vm| admin_socket(&found.vm, vm)));
        let patience = u64::try_from(config.balloon_patience.as_millis()).unwrap_or(u64::MAX);
        let settings = BalloonSettings {
            timeout: MONITOR_MAX,
            patience: Patience {
                stuck_ms: patience,
                late_ms: patience,
            },
            ..BalloonSettings::default()
        };
        let endpoints = Endpoints {
            vm: VmId(found.vm.clone()),
            pid: found.pid,
            uuid: found.uuid.clone(),
            memory_bytes: found.ram_bytes,
            monitors: vm.map_or_else(Vec::new, |vm| vm.monitor_sockets()),
            disk_admin: admin.clone(),
            libvirt_uri: config.libvirt.clone(),
            hcache: None,
            balloon: settings,
            timeout: ANSWER_MAX,
            dry_run: self.dry_run,
        };
        let mut failures = Vec::new();
        let actuator = VmMemory::open(&endpoints, &mut failures);
        for failure in &failures {
            tracing::warn!("VM {}: {}", found.vm, with_causes(failure));
        }
        if let Some(why) = why_fixed(found.libvirt, &endpoints)
            && config.mode != Mode::Observe
        {
            tracing::warn!("VM {}: its own memory cannot be changed: {why}", found.vm);
        }
        let mut feeds: Vec<Box<dyn Feed>> = Vec::new();
        if let Some(socket) = admin {
            let interval = config.turn_interval.min(CURVE_INTERVAL_MAX);
            let mut vcpus = vm.map(|vm| VcpuClock::new(vm));
            let vcpu_time = move || vcpus.as_mut()?.read();
            let clock = Clock::of_host();
            feeds.push(Box::new(DiskFeed::new(socket, interval, clock, vcpu_time)));
        }
        if config.trace.enabled {
            let program = tracer_program(config);
            let target = TracerTarget::Vm {
                process,
                allow_namespaced: rule.allow_namespaced == Some(true),
            };
            let tracer = Tracer::new(target, program, &config.trace);
            feeds.push(Box::new(tracer.unless(&self.unobserved)));
        }
        VmHandles { actuator, feeds }
    }

    fn groups(&mut self) -> FoundGroups {
        self.groups.last()
    }

    fn open_group(&mut self, found: &DiscoveredGroup, config: &Config) -> Vec<Box<dyn Feed>> {
        if !config.trace.enabled {
            return Vec::new();
        }
        let directory = found.listed.directory.clone();
        let target = TracerTarget::Group { directory };
        let tracer = Tracer::new(target, tracer_program(config), &config.trace);
        vec![Box::new(tracer)]
    }

    fn ram(&mut self) -> (u64, u64) {
        let memory = HostMemory::read().unwrap_or_default();
        (memory.total_bytes, memory.available_bytes)
    }

    fn pressure(&mut self) -> Option<MemoryPressure> {
        MemoryPressure::of_host()
    }

    fn pressure_of(&mut self, found: &DiscoveredVm) -> Option<MemoryPressure> {
        self.vm_groups.get(&found.process())?.pressure()
    }

    fn memory_limits_of(&mut self, found: &DiscoveredVm) -> Vec<GroupLimit> {
        memory_limits(found.pid, &self.mounts)
    }

    fn store(&mut self) -> Option<Result<u64, ActuatorError>> {
        let store = self.store.as_mut()?;
        let mut failures = Vec::new();
        store.poll(&mut failures);
        let failure = failures.pop();
        Some(failure.map_or_else(|| Ok(store.part().reserved_bytes), Err))
    }

    fn resize_store(&mut self, capacity_bytes: u64) -> Result<(), ActuatorError> {
        match &mut self.store {
            Some(store) => store.set(capacity_bytes),
            None => Ok(()),
        }
    }
}

/// Why nothing leads to a VM's balloon, if nothing does.
fn why_fixed(is_of_libvirt: bool, endpoints: &Endpoints) -> Option<&'static str> {
    if is_of_libvirt {
        let is_unset = endpoints.libvirt_uri.is_none();
        return is_unset.then_some("it is libvirt's, and libvirt.uri is not set");
    }
    endpoints.monitors.is_empty().then_some(
        "it has no QMP socket that plimsolld may use, and no libvirt of the system has it; VMs of a user's libvirt session cannot be resized",
    )
}

/// The control groups of VMs, without those in which there are other VMs, or this process.
fn groups_of(vms: &[Arc<QemuVm>]) -> BTreeMap<ProcessId, ControlGroup> {
    let group_of = |vm: &Arc<QemuVm>| Some((vm.process(), ControlGroup::of_vm(vm.pid)?));
    let groups: BTreeMap<_, _> = vms.iter().filter_map(group_of).collect();
    let ours = ControlGroup::of_vm(std::process::id());
    let mut alone = groups.clone();
    alone.retain(|process, group| {
        let mut others = groups.iter().filter(|(of, _)| *of != process);
        let is_ours = ours.as_ref().is_some_and(|ours| group.contains(ours));
        !is_ours && !others.any(|(_, other)| group.contains(other))
    });
    alone
}

/// The admin socket of the daemon under a VM's disk: where `plimsoll run` puts it, or beside the disks' sockets.
///
/// A process states its name and its sockets itself, so neither is trusted: a socket counts only if the process's user
/// owns it, and only processes of that user may listen on it.
fn admin_socket(name: &str, vm: &QemuVm) -> Option<PeerSocket> {
    let owner = fs::metadata(format!("/proc/{}", vm.pid)).ok()?.uid();
    let beside = |folder: &Path, root| PeerSocket {
        path: folder.join(ADMIN_SOCKET),
        root,
        listener: Listener::Users(AllowedUsers::of_ids([owner])),
    };
    let plain = !name.contains('/') && name != "." && name != "..";
    let made = plain.then(|| beside(&Path::new(FOLDER).join(name), None));
    let folders = vm.sockets.iter().filter_map(|socket| socket.parent());
    let theirs = folders.map(|folder| beside(folder, Some(vm.process())));
    made.into_iter()
        .chain(theirs)
        .find(|socket| socket.owner().is_ok_and(|user_id| user_id == owner))
}

/// The program of tracers: the configured one, else `plimsoll` beside this program, else in the path.
fn tracer_program(config: &Config) -> PathBuf {
    if let Some(program) = &config.trace.program {
        return program.clone();
    }
    let beside = std::env::current_exe().map(|us| us.with_file_name("plimsoll"));
    match beside {
        Ok(path) if path.exists() => path,
        _ => "plimsoll".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_to_whose_balloon_nothing_leads_is_warned_of() {
        let monitors = vec![PeerSocket {
            path: "/run/vm/qmp".into(),
            root: None,
            listener: Listener::Users(AllowedUsers::of_ids([0])),
        }];
        let endpoints = |uri: Option<&str>, monitors: &[PeerSocket]| Endpoints {
            monitors: monitors.to_vec(),
            libvirt_uri: uri.map(str::to_owned),
            ..Endpoints::default()
        };
        let system = Some("qemu:///system");
        assert_eq!(why_fixed(true, &endpoints(system, &[])), None);
        assert_eq!(why_fixed(false, &endpoints(None, &monitors)), None);
        let unset = why_fixed(true, &endpoints(None, &monitors)).unwrap();
        assert!(unset.contains("libvirt.uri is not set"));
        let of_session = why_fixed(false, &endpoints(Some("qemu:///session"), &[])).unwrap();
        assert!(of_session.contains("session"));
    }

    #[test]
    fn a_vm_keeps_its_name_when_the_one_that_had_it_first_ends() {
        let mut names = BTreeMap::new();
        let process = |pid| ProcessId {
            pid,
            start_ticks: 1,
        };
        let mut named = |vms: &[(u32, &str)]| {
            let vms = vms.iter().map(|&(pid, own)| (process(pid), own, None));
            name(&mut names, vms.clone());
            let names = vms.map(|(process, ..)| names[&process].name.clone());
            names.collect::<Vec<_>>()
        };
        assert_eq!(named(&[(7, "web")]), ["web"]);
        // Whatever the order in which they are found, and whatever a third one calls itself.
        let all = [(9, "web-5"), (5, "web"), (7, "web")];
        assert_eq!(named(&all), ["web-5", "web-5-5", "web"]);
        assert_eq!(named(&all[..2]), ["web-5", "web-5-5"]);
        assert_eq!(named(&[(8, "web"), (5, "web")]), ["web", "web-5-5"]);
        // No browser would ask for these.
        assert_eq!(named(&[(18, ".."), (15, ".")]), ["..-18", ".-15"]);
    }

    #[test]
    fn a_vm_that_was_migrated_to_another_process_takes_its_name_over() {
        let mut names = BTreeMap::new();
        let mut named = |vms: &[(u32, Option<&'static str>)]| {
            let vms = vms.iter().map(|&(pid, uuid)| {
                let start_ticks = 1;
                (ProcessId { pid, start_ticks }, "web", uuid)
            });
            name(&mut names, vms.clone());
            let names = vms.map(|(process, ..)| names[&process].name.clone());
            names.collect::<Vec<_>>()
        };
        let (source, target) = ((5, Some("u")), (9, Some("u")));
        assert_eq!(named(&[source, target]), ["web", "web-9"]);
        assert_eq!(named(&[target]), ["web"]);
        // Another VM of that name does not.
        let others = [target, (7, Some("v")), (8, None)];
        assert_eq!(named(&others), ["web", "web-7", "web-8"]);
        assert_eq!(named(&others[1..]), ["web-7", "web-8"]);
        // Two of them do not share it.
        let copies = [(1, Some("w")), (2, Some("w")), (3, Some("w"))];
        assert_eq!(named(&copies), ["web", "web-2", "web-3"]);
        assert_eq!(named(&copies[1..]), ["web", "web-3"]);
    }
}
