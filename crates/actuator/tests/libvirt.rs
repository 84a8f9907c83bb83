//! A VM of a real libvirt.
#![cfg(feature = "libvirt")]

use plimsoll_skip::{Lack, guests_wanted, skip};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use plimsoll_actuator::{
    ActuatorError, BalloonSettings, Delivery, Domain, DomainInfo, Endpoints, MemoryPart as _,
    Progress, Virsh, VmMemory,
};
use plimsoll_rig::{GuestConfig, GuestImage};
use plimsoll_vm::QemuVm;

const MIB: u64 = 1 << 20;
const URI: &str = "qemu:///system";
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long an emulated guest may take on a loaded host.
const LONG: Duration = Duration::from_secs(180);

/// A running domain, which is destroyed on drop.
struct TestDomain {
    name: String,
    _folder: tempfile::TempDir,
}

fn virsh(words: &[&str]) -> bool {
    let mut command = Command::new("virsh");
    command.args(["--quiet", "--connect", URI]).args(words);
    command.output().is_ok_and(|output| output.status.success())
}

impl Drop for TestDomain {
    fn drop(&mut self) {
        virsh(&["destroy", &self.name]);
    }
}

/// Starts a domain of 192 MiB; `None` where there is no libvirt or no image.
fn start(balloon: &str) -> Option<TestDomain> {
    if !guests_wanted() {
        return None;
    }
    if !virsh(&["version"]) {
        skip(Lack::Live, format_args!("there is no libvirt at {URI}"));
        return None;
    }
    let config = GuestConfig {
        balloon: true,
        ..GuestConfig::new("libvirt", "")
    };
    let image = GuestImage::for_guest(&config)
        .inspect_err(|error| skip(Lack::Live, format_args!("{error}")))
        .ok()?;
    // libvirt's QEMU runs as another user, who must be able to read them.
    let folder = tempfile::tempdir().unwrap();
    let readable = |path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    readable(folder.path(), 0o755);
    let (kernel, initrd) = (folder.path().join("vmlinuz"), folder.path().join("initrd"));
    for (from, to) in [(&image.kernel, &kernel), (&image.initrd, &initrd)] {
        fs::copy(from, to).unwrap();
        readable(to, 0o644);
    }
    let name = format!("plimsoll-{balloon}-{}", std::process::id());
    let description = format!(
        "<domain type='qemu'><name>{name}</name><memory unit='MiB'>192</memory><vcpu>1</vcpu>\
         <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{}</kernel><initrd>{}</initrd>\
         <cmdline>console=ttyS0 quiet panic=-1 no_timer_check plimsoll.workload=idle</cmdline></os>\
         <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\
         <on_reboot>destroy</on_reboot><devices><memballoon model='{balloon}'/></devices></domain>",
        kernel.display(),
        initrd.display()
    );
    let file = folder.path().join("domain.xml");
    fs::write(&file, description).unwrap();
    let running = TestDomain {
        name,
        _folder: folder,
    };
    assert!(virsh(&["create", file.to_str().unwrap()]));
    Some(running)
}

/// Its process, found as libvirt starts it.
fn process_of(running: &TestDomain) -> QemuVm {
    let pid = fs::read_to_string(format!("/run/libvirt/qemu/{}.pid", running.name)).unwrap();
    QemuVm::of_pid(pid.trim().parse().unwrap()).unwrap()
}

fn memory_of(vm: &QemuVm) -> VmMemory {
    let endpoints = Endpoints {
        vm: vm.id.clone(),
        pid: vm.pid,
        uuid: vm.uuid.clone(),
        memory_bytes: vm.memory_bytes,
        libvirt_uri: Some(URI.to_owned()),
        balloon: BalloonSettings {
            stats_interval_s: 1,
            ..BalloonSettings::default()
        },
        timeout: TIMEOUT,
        ..Endpoints::default()
    };
    let mut failures = Vec::new();
    let memory = VmMemory::open(&endpoints, &mut failures);
    assert!(failures.is_empty(), "{failures:?}");
    memory
}

#[test]
fn a_vm_of_libvirt_gives_memory_and_takes_it_back() {
    let Some(running) = start("virtio") else {
        return;
    };
    // Discovery finds it like any other VM, by the same name.
    let vm = process_of(&running);
    assert_eq!(vm.id.0, running.name);
    // Somebody's interval is kept until memory is moved, and restored.
    let period = || {
        let output = Command::new("virsh")
            .args(["--quiet", "--connect", URI, "dumpxml", &running.name])
            .output();
        let description = String::from_utf8(output.unwrap().stdout).unwrap();
        let (_, rest) = description.split_once("<stats period='").unwrap();
        rest.split_once('\'').unwrap().0.to_owned()
    };
    let name = format!("--domain={}", running.name);
    assert!(virsh(&["dommemstat", &name, "--period", "3", "--live"]));
    let mut memory = memory_of(&vm);
    assert_eq!(*memory.vm(), vm.id);
    let until = |memory: &mut VmMemory,
                 is_so: &dyn Fn(&plimsoll_actuator::MemoryStatus) -> bool| {
        let start = Instant::now();
        loop {
            let status = memory.poll();
            assert!(status.failures.is_empty(), "{status:?}");
            if is_so(&status) {
                return status;
            }
            assert!(start.elapsed() < LONG, "{status:?}");
            std::thread::sleep(Duration::from_millis(200));
        }
    };
    until(&mut memory, &|status| status.guest.is_some());
    assert_eq!(period(), "3");
    for target_bytes in [128 * MIB, 192 * MIB] {
        memory.set_direct(target_bytes).unwrap();
        let status = until(&mut memory, &|status| {
            status.direct.progress == Progress::Reached
        });
        assert_eq!(status.holding().direct_bytes, target_bytes);
        let free_bytes = status.guest.unwrap().free_bytes;
        assert!(free_bytes.is_some_and(|free| free > 0), "{status:?}");
    }
    assert_eq!(period(), "1");
    // Somebody turns them off.
    assert!(virsh(&["dommemstat", &name, "--period", "0", "--live"]));
    let is_stale = |status: &plimsoll_actuator::MemoryStatus| {
        status.guest.is_some_and(|guest| guest.age_s > 5)
    };
    until(&mut memory, &is_stale);
    until(&mut memory, &|status| !is_stale(status));
    assert_eq!(period(), "1");
    memory.want_statistics(false).unwrap();
    assert_eq!(period(), "3");
    for (command, state) in [("suspend", Some("paused")), ("resume", None)] {
        assert!(virsh(&[command, &running.name]));
        until(&mut memory, &|status| status.stopped.as_deref() == state);
    }
    let error = memory.set_direct(193 * MIB).unwrap_err();
    assert!(matches!(error, ActuatorError::Target { .. }), "{error}");
    drop(running);
    let status = memory.poll();
    assert!(
        matches!(status.failures[..], [ActuatorError::Query { .. }]),
        "{status:?}"
    );
    assert_eq!(status.reserved().direct_bytes, 192 * MIB);
    let error = memory.set_direct(128 * MIB).unwrap_err();
    assert_eq!(error.sent(), Some(Delivery::No), "{error:?}");
}

#[test]
fn a_vm_of_libvirt_without_a_balloon_keeps_its_ram() {
    let Some(running) = start("none") else {
        return;
    };
    let mut memory = memory_of(&process_of(&running));
    let status = memory.poll();
    assert!(
        matches!(status.direct.progress, Progress::Absent(_)),
        "{status:?}"
    );
    assert_eq!(status.reserved().direct_bytes, 192 * MIB);
    let error = memory.set_direct(128 * MIB).unwrap_err();
    assert_eq!(error.sent(), Some(Delivery::No), "{error:?}");
}

#[test]
fn without_libvirt_nothing_was_sent() {
    let virsh = Virsh::new("qemu+unix:///system?socket=/nonexistent", TIMEOUT);
    let info = DomainInfo {
        name: "web".into(),
        uuid: Some("7439cc3f-a71c-4ca7-b846-55793d6c6c2c".into()),
        memory_bytes: 192 * MIB,
    };
    let mut domain = Domain::new(virsh, info, BalloonSettings::default());
    let error = domain.query().unwrap_err();
    assert!(matches!(error, ActuatorError::Query { .. }), "{error}");
    assert_eq!(domain.set(MIB).unwrap_err().sent(), Some(Delivery::No));
    assert_eq!(domain.part().reserved_bytes, 192 * MIB);
}
