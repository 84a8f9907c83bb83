//! Balloons of real guests.

use plimsoll_skip::{Lack, guests_wanted, skip};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use plimsoll_actuator::{
    Absence, Balloon, BalloonSettings, MemoryStatus, Patience, Progress, VmMemory,
};
use plimsoll_flow::RamBacking;
use plimsoll_rig::{AcceleratorChoice, Guest, GuestConfig, GuestImage};
use plimsoll_vm::{ConsoleEvent, QemuVm};

const MIB: u64 = 1 << 20;
/// How long an emulated guest may take on a loaded host.
const LONG: Duration = Duration::from_secs(180);

/// A guest and its memory; `None` where no guest can run.
fn start(config: GuestConfig) -> Option<(Guest, VmMemory)> {
    if !guests_wanted() {
        return None;
    }
    let name = format!("{}-{}", config.name, std::process::id());
    let config = GuestConfig {
        name,
        accelerator: AcceleratorChoice::Tcg,
        ..config
    };
    let qemu = Command::new("qemu-system-x86_64")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if let Err(error) = qemu {
        skip(Lack::Live, format_args!("qemu-system-x86_64: {error}"));
        return None;
    }
    let image = GuestImage::for_guest(&config)
        .inspect_err(|error| skip(Lack::Live, format_args!("{error}")))
        .ok()?;
    let mut guest = Guest::start(&image, &config).unwrap();
    let vm = guest.vm().unwrap();
    // The connection only shows that the monitor exists.
    drop(guest.qmp().unwrap());
    let settings = BalloonSettings {
        timeout: Duration::from_secs(20),
        patience: Patience {
            stuck_ms: 5000,
            late_ms: 1000,
        },
        stats_interval_s: 1,
    };
    let balloon = Balloon::new(
        vm.id.clone(),
        vm.monitor_sockets(),
        vm.memory_bytes,
        settings,
    );
    let memory = VmMemory::new(vm.id, Box::new(balloon), None);
    let is_up = |event: &ConsoleEvent| {
        matches!(
            event,
            ConsoleEvent::Round { .. } | ConsoleEvent::Ready { .. }
        )
    };
    guest.wait_for(LONG, is_up).unwrap();
    Some((guest, memory))
}

/// Polls until `is_so` holds.
fn poll_until(memory: &mut VmMemory, is_so: impl Fn(&MemoryStatus) -> bool) -> MemoryStatus {
    let start = Instant::now();
    loop {
        let asked = Instant::now();
        let status = memory.poll();
        let took = asked.elapsed();
        assert!(status.failures.is_empty(), "{status:?}");
        assert!(
            status.reserved().direct_bytes >= status.holding().direct_bytes,
            "{status:?}"
        );
        if is_so(&status) {
            println!(
                "{:.1} s: {:?}; a status takes {took:?}",
                start.elapsed().as_secs_f64(),
                status.direct.progress
            );
            return status;
        }
        assert!(start.elapsed() < LONG, "{status:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn is_reached(status: &MemoryStatus) -> bool {
    status.direct.progress == Progress::Reached
}

#[test]
fn a_guest_gives_memory_and_takes_it_back() {
    let Some((mut guest, mut memory)) = start(GuestConfig {
        balloon: true,
        ..GuestConfig::new("balloon", "workload=zipf mib=32 seconds=0")
    }) else {
        return;
    };
    let status = poll_until(&mut memory, |status| status.guest.is_some());
    assert_eq!(status.direct.progress, Progress::NoTarget);
    assert_eq!(status.holding().direct_bytes, 192 * MIB);
    let before = status.guest.unwrap().total_bytes.unwrap();
    let vm = guest.vm().unwrap();
    let held_before = ram_held_bytes(&vm).unwrap();
    assert!(
        (32 * MIB..=192 * MIB).contains(&held_before),
        "{held_before}"
    );

    memory.set_direct(128 * MIB).unwrap();
    let status = poll_until(&mut memory, is_reached);
    assert_eq!(status.holding().direct_bytes, 128 * MIB);
    assert_eq!(status.reserved().direct_bytes, 128 * MIB);
    let held = ram_held_bytes(&vm).unwrap();
    assert!(held <= 128 * MIB, "{held}");
    println!(
        "the host held {} MiB, then {}",
        held_before / MIB,
        held / MIB
    );
    // The guest reports the same once it is queried again.
    poll_until(&mut memory, |status| {
        let stats = status.guest.unwrap();
        !stats.is_stale() && stats.total_bytes == Some(before - 64 * MIB)
    });

    memory.set_direct(192 * MIB).unwrap();
    assert_eq!(memory.poll().reserved().direct_bytes, 192 * MIB);
    let status = poll_until(&mut memory, is_reached);
    assert_eq!(status.holding().direct_bytes, 192 * MIB);
    let goes_on = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Round { mismatches: 0, .. });
    guest.wait_for(LONG, goes_on).unwrap();

    // A guest that is stopped reports nothing and does not change its balloon.
    let mut qmp = guest.qmp().unwrap();
    qmp.stop().unwrap();
    drop(qmp);
    memory.set_direct(128 * MIB).unwrap();
    let status = poll_until(&mut memory, |status| {
        let stuck = matches!(status.direct.progress, Progress::Stuck { .. });
        stuck && status.guest.unwrap().is_stale()
    });
    assert_eq!(status.holding().direct_bytes, 192 * MIB);
    guest.kill();
    let status = memory.poll();
    assert_eq!(status.failures.len(), 1, "{status:?}");
    assert_eq!(status.reserved().direct_bytes, 192 * MIB);
    assert_eq!(
        ram_held_bytes(&vm).unwrap_err().kind(),
        std::io::ErrorKind::NotFound
    );
}

#[test]
fn a_guest_that_cannot_give_is_stuck_and_comes_back() {
    let Some((mut guest, mut memory)) = start(GuestConfig {
        balloon: true,
        memory_mib: 128,
        ..GuestConfig::new("stuck", "workload=idle")
    }) else {
        return;
    };
    poll_until(&mut memory, |status| status.guest.is_some());
    memory.set_direct(8 * MIB).unwrap();
    let status = poll_until(&mut memory, |status| {
        matches!(status.direct.progress, Progress::Stuck { .. })
    });
    let has = status.holding().direct_bytes;
    assert!((9 * MIB..128 * MIB).contains(&has), "{status:?}");
    assert_eq!(status.reserved().direct_bytes, has);
    memory.set_direct(128 * MIB).unwrap();
    poll_until(&mut memory, is_reached);
    assert!(!guest.has_ended());
}

/// QEMU reports the size before the reset until the balloon's driver gets a target other than all RAM.
#[test]
fn a_guest_that_is_reset_with_a_target_of_its_ram_has_its_ram() {
    let Some((mut guest, mut memory)) = start(GuestConfig {
        balloon: true,
        // Without which it would end.
        extra_arguments: ["-action", "reboot=reset"].map(Into::into).to_vec(),
        ..GuestConfig::new("reset", "workload=idle")
    }) else {
        return;
    };
    poll_until(&mut memory, |status| status.guest.is_some());
    memory.set_direct(128 * MIB).unwrap();
    poll_until(&mut memory, is_reached);
    let total = |status: &MemoryStatus| status.guest.unwrap().total_bytes.unwrap();
    poll_until(&mut memory, |status| total(status) < 128 * MIB);
    assert!(memory.record().total_excludes_balloon);
    let mut qmp = guest.qmp().unwrap();
    qmp.execute("system_reset", serde_json::Value::Null)
        .unwrap();
    drop(qmp);
    memory.set_direct(192 * MIB).unwrap();
    let status = poll_until(&mut memory, is_reached);
    assert_eq!(status.holding().direct_bytes, 192 * MIB);
    assert!(total(&status) > 128 * MIB, "{status:?}");
    let balloon_bytes = guest.qmp().unwrap().balloon_actual_bytes().unwrap();
    assert_eq!(balloon_bytes, 128 * MIB);
    // The driver reports the size when it follows the next target.
    memory.set_direct(160 * MIB).unwrap();
    let status = poll_until(&mut memory, is_reached);
    assert_eq!(status.holding().direct_bytes, 160 * MIB);
}

#[test]
fn a_guest_without_a_driver_ignores_its_target() {
    let Some((_guest, mut memory)) = start(GuestConfig {
        extra_arguments: vec!["-device".into(), "virtio-balloon-pci".into()],
        ..GuestConfig::new("driverless", "workload=idle")
    }) else {
        return;
    };
    memory.set_direct(100 * MIB).unwrap();
    let status = memory.poll();
    let absent = Progress::Absent(Absence::NoDriver);
    assert_eq!(status.direct.progress, absent);
    assert_eq!(status.reserved().direct_bytes, 192 * MIB);
    assert_eq!(status.guest, None);
}

/// Unit of a file's blocks, whatever its file system (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// Returns how much of a VM's shared RAM the host holds, in memory or in its swap: what the guest has touched, less what its
/// balloon has given back. Costs no walk over pages.
///
/// # Errors
///
/// `Unsupported` if some of the RAM is not shared (memfd, tmpfs); `NotFound` if the VM has ended; the kernel's, as without
/// the right to see what another process maps (`CAP_CHECKPOINT_RESTORE`).
fn ram_held_bytes(vm: &QemuVm) -> io::Result<u64> {
    let folder = format!("/proc/{}/map_files", vm.pid);
    let mut mapped = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let name = entry?.file_name();
        let range = name.to_str().and_then(|name| {
            let (begin, end) = name.split_once('-')?;
            let address = |text| u64::from_str_radix(text, 16).ok();
            Some(address(begin)?..address(end)?)
        });
        mapped.extend(range.map(|range| (range, name)));
    }
    let (mut bytes, mut counted) = (0, BTreeSet::new());
    for ram in &vm.ram {
        let shared = matches!(
            ram.backing,
            RamBacking::SharedMemfd | RamBacking::SharedTmpfs
        );
        if !shared {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("the VM's RAM is {}, which is not counted", ram.backing),
            ));
        }
        let found = mapped
            .iter()
            .find(|(range, _)| range.contains(&ram.address));
        let (_, name) = found.ok_or(io::ErrorKind::NotFound)?;
        let file = fs::metadata(format!("{folder}/{}", name.display()))?;
        if counted.insert((file.dev(), file.ino())) {
            bytes += file.blocks() * BLOCK_BYTES;
        }
    }
    Ok(bytes)
}
