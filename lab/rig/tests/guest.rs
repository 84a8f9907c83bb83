//! Real guests: each test boots one under QEMU, and prints SKIPPED where it cannot run.

use plimsoll_skip::{Lack, guests_wanted, skip};
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use plimsoll_flow::{Accelerator, PageCount, RamBacking, VmId};
use plimsoll_rig::{AcceleratorChoice, Boot, Guest, GuestConfig, GuestError, GuestImage};
use plimsoll_vm::{ConsoleEvent, KvmSupport, QemuVm, RamState, VmError, detect, find, running};

/// A guest under TCG on a busy machine boots in 5 to 20 s.
const BOOT: Duration = Duration::from_secs(90);

/// The image, or `None` after printing why the test is skipped.
fn image() -> Option<GuestImage> {
    if !guests_wanted() {
        return None;
    }
    let has_qemu = Command::new("qemu-system-x86_64")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if let Err(error) = has_qemu {
        skip(Lack::Live, format_args!("qemu-system-x86_64: {error}"));
        return None;
    }
    GuestImage::locate()
        .inspect_err(|error| skip(Lack::Live, format_args!("{error}")))
        .ok()
}

/// A name that no other run of these tests gives at the same time.
fn unique(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

fn config(name: &str, workload: &str) -> GuestConfig {
    GuestConfig {
        accelerator: AcceleratorChoice::Tcg,
        ..GuestConfig::new(&unique(name), workload)
    }
}

fn is_populated(event: &ConsoleEvent) -> bool {
    matches!(event, ConsoleEvent::Populated { .. })
}

fn is_round(event: &ConsoleEvent) -> bool {
    matches!(event, ConsoleEvent::Round { .. })
}

/// All lines of a workload, from the first to the last line of the protocol.
fn events_of<'a>(boot: impl Into<Boot<'a>>, config: &GuestConfig) -> Vec<ConsoleEvent> {
    let mut guest = Guest::start(boot, config).unwrap();
    let (mut events, deadline) = (Vec::new(), Instant::now() + BOOT);
    loop {
        match guest.next_line(deadline.saturating_duration_since(Instant::now())) {
            Ok(Some(line)) => events.extend(line.event),
            Ok(None) => panic!("the guest is still not done; it told {events:?}"),
            Err(GuestError::GuestEnded { .. }) => return events,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Checks the output of a run, prints its speed, returns the working sets of its steps.
fn checked(workload: &str, events: &[ConsoleEvent]) -> Vec<u64> {
    let boot = events.iter().find_map(|event| match event {
        ConsoleEvent::Ready { kernel_ms, .. } => Some(*kernel_ms),
        _ => None,
    });
    let Some(ConsoleEvent::Done {
        ops,
        ms,
        mismatches: 0,
    }) = events.last()
    else {
        panic!("{workload}: not done without mismatches: {events:?}");
    };
    let rounds: Vec<(u64, u64)> = events
        .iter()
        .filter_map(|event| match event {
            ConsoleEvent::Round { ops, total_ops, .. } => Some((*ops, *total_ops)),
            _ => None,
        })
        .collect();
    let sum: u64 = rounds.iter().map(|(ops, _)| ops).sum();
    assert_eq!(
        (Some(*ops), sum),
        (rounds.last().map(|(_, total)| *total), *ops),
        "{workload}: the rounds do not add up"
    );
    println!(
        "{workload}: ready after {} ms of guest time, {ops} visits in {ms} ms, {:.0} a second",
        boot.expect("every run is ready first"),
        *ops as f64 / *ms as f64 * 1000.0
    );
    events
        .iter()
        .filter_map(|event| match event {
            ConsoleEvent::Step { pages, .. } => Some(pages.0),
            _ => None,
        })
        .collect()
}

#[test]
fn every_workload_runs_to_its_end_without_a_mismatch() {
    let Some(image) = image() else { return };
    for (workload, steps) in [
        (
            "workload=steps steps_mib=16,48,16 step_ms=400 write_ratio=0.1",
            vec![16 * 256, 48 * 256, 16 * 256],
        ),
        (
            "workload=arrays array=RWRW mib=32 step_ms=400",
            vec![8192; 2],
        ),
        (
            "workload=arrays array=RRWW mib=32 step_ms=400",
            vec![8192; 2],
        ),
        (
            "workload=arrays array=WWRR pages=8192 step_ms=400",
            vec![8192; 2],
        ),
        (
            "workload=uniform mib=64 seconds=1 write_ratio=0.5",
            vec![16_384],
        ),
        (
            "workload=zipf mib=64 seconds=1 alpha=0.9 write_ratio=0.1",
            vec![16_384],
        ),
        (
            "workload=sequential mib=100 seconds=1 work=16",
            vec![25_600],
        ),
    ] {
        let events = events_of(&image, &config("workload", workload));
        assert_eq!(checked(workload, &events), steps, "{workload}");
    }
    let events = events_of(&image, &config("idle", "workload=idle seconds=1"));
    assert!(
        matches!(
            events[..],
            [
                ConsoleEvent::Ready { .. },
                ConsoleEvent::Done { ops: 0, .. }
            ]
        ),
        "{events:?}"
    );
}

#[test]
fn several_threads_share_the_array_on_several_cpus() {
    let Some(image) = image() else { return };
    let config = GuestConfig {
        vcpus: 2,
        ..config(
            "threads",
            "workload=steps steps_mib=16,32 step_ms=500 threads=2 write_ratio=0.2",
        )
    };
    let mut guest = Guest::start(&image, &config).unwrap();
    let vm = guest.vm().unwrap();
    let indexes: Vec<u32> = vm.vcpus.iter().map(|vcpu| vcpu.index).collect();
    assert_eq!(indexes, [0, 1]);
    let done = guest.wait_for(BOOT, |event| matches!(event, ConsoleEvent::Done { .. }));
    let event = done.unwrap().event;
    assert!(
        matches!(event, Some(ConsoleEvent::Done { mismatches: 0, ops, .. }) if ops > 8192),
        "{event:?}"
    );
}

#[test]
fn a_running_guest_is_found_with_its_ram_and_cpus() {
    let Some(image) = image() else { return };
    let config = config("found", "workload=sequential mib=32 seconds=0");
    let mut guest = Guest::start(&image, &config).unwrap();
    guest.wait_for(BOOT, is_populated).unwrap();
    let vms = running().unwrap();
    let vm = vms.iter().find(|vm| vm.pid == guest.pid()).unwrap();
    assert_eq!(vm.id, VmId(config.name.clone()));
    assert_eq!(vm.accelerator, Some(Accelerator::Tcg));
    assert_eq!(vm.memory_bytes, 192 << 20);
    assert_eq!(vm.ram.len(), 1);
    assert_eq!(vm.ram[0].len_bytes, 192 << 20);
    assert_eq!(vm.ram[0].backing, RamBacking::SharedMemfd);
    assert_eq!(vm.vcpus.len(), 1);
    assert_eq!(vm.ram_states().unwrap(), [RamState::default()]);
    assert_eq!(find(&config.name).unwrap(), *vm);
    assert_eq!(find(&vm.pid.to_string()).unwrap(), *vm);
    let monitor_vcpus = guest.qmp().unwrap().vcpus().unwrap();
    assert_eq!(monitor_vcpus, vm.vcpus);
    guest.kill();
    assert!(matches!(
        QemuVm::of_pid(guest.pid()),
        Err(VmError::NoSuchProcess { .. })
    ));
}

#[test]
fn two_guests_of_one_name_are_told_apart_by_process() {
    let Some(image) = image() else { return };
    let config = config("twin", "workload=idle");
    let mut guests = [0, 1].map(|_| Guest::start(&image, &config).unwrap());
    let mut expected = guests.each_mut().map(|guest| {
        guest.vm().unwrap();
        guest.pid()
    });
    expected.sort_unstable();
    match find(&config.name) {
        Err(VmError::AmbiguousName { pids, .. }) => assert_eq!(pids, expected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn ram_without_a_memory_backend_is_found_by_its_length() {
    if image().is_none() {
        return;
    }
    let name = unique("plain");
    let mut child = Command::new("qemu-system-x86_64")
        .args([
            "-S",
            "-accel",
            "tcg",
            "-m",
            "96",
            "-nodefaults",
            "-display",
            "none",
            "-name",
            &name,
        ])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let vm = loop {
        match find(&name) {
            Ok(vm) => break Some(vm),
            Err(_) if Instant::now() > deadline => break None,
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let vm = vm.expect("found within 20 s");
    assert_eq!(vm.ram.len(), 1);
    assert_eq!(
        (vm.ram[0].len_bytes, &vm.ram[0].backing),
        (96 << 20, &RamBacking::Private)
    );
    assert!(vm.qmp_sockets.is_empty());
}

#[test]
fn a_stopped_guest_tells_nothing_until_it_goes_on() {
    let Some(image) = image() else { return };
    let config = config("stopped", "workload=uniform mib=32 seconds=0");
    let mut guest = Guest::start(&image, &config).unwrap();
    guest.wait_for(BOOT, is_round).unwrap();
    let mut qmp = guest.qmp().unwrap();
    assert!(qmp.status().unwrap().running);
    qmp.stop().unwrap();
    let status = qmp.status().unwrap();
    assert_eq!((status.running, status.status.as_str()), (false, "paused"));
    // Output from before the stop may still be on its way.
    while guest
        .next_line(Duration::from_millis(300))
        .unwrap()
        .is_some()
    {}
    assert_eq!(guest.next_line(Duration::from_millis(700)).unwrap(), None);
    qmp.cont().unwrap();
    guest.wait_for(Duration::from_secs(20), is_round).unwrap();
    assert!(matches!(
        qmp.execute("no-such-command", serde_json::Value::Null),
        Err(VmError::QmpRefused { .. })
    ));
    qmp.quit().unwrap();
    let status = guest.wait(Duration::from_secs(20)).unwrap();
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
}

#[test]
fn a_guest_whose_memory_is_changed_from_outside_says_so() {
    let Some(image) = image() else { return };
    let config = config("changed", "workload=sequential pages=8192 seconds=0");
    let mut guest = Guest::start(&image, &config).unwrap();
    guest.wait_for(BOOT, is_round).unwrap();
    let vm = guest.vm().unwrap();
    let mut qmp = guest.qmp().unwrap();
    qmp.stop().unwrap();
    let page = flip_a_signature(&vm, PageCount(8192));
    qmp.cont().unwrap();
    let is_mismatch = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Mismatch { .. });
    let line = guest
        .wait_for(Duration::from_secs(20), is_mismatch)
        .unwrap();
    assert!(
        matches!(line.event, Some(ConsoleEvent::Mismatch { page: found, .. }) if found == page),
        "{line:?}, expected page {page}"
    );
    let counts_one =
        |event: &ConsoleEvent| matches!(event, ConsoleEvent::Round { mismatches: 1, .. });
    guest.wait_for(Duration::from_secs(20), counts_one).unwrap();
}

/// Overwrites the last word of the signature of some page in the middle of the array, and
/// returns the page's index. Pages are identified by their signature: index, and 64 words on, version 0.
fn flip_a_signature(vm: &QemuVm, pages: PageCount) -> u64 {
    use std::os::unix::fs::FileExt as _;
    let memory = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{}/mem", vm.pid))
        .unwrap();
    let ram = &vm.ram[0];
    let wanted = pages.0 / 2;
    let mut page = [0; 4096];
    for address in (ram.address..ram.address + ram.len_bytes).step_by(4096) {
        memory.read_exact_at(&mut page, address).unwrap();
        let word = |nth: usize| u64::from_ne_bytes(page[nth * 8..][..8].try_into().unwrap());
        if word(0) == wanted && word(64) == 0 && word(128) != 0 && word(448) != 0 {
            let flipped = word(448) ^ 1;
            memory
                .write_all_at(&flipped.to_ne_bytes(), address + 448 * 8)
                .unwrap();
            return wanted;
        }
    }
    panic!("no page of the guest bears the signature of page {wanted}");
}

#[test]
fn a_workload_that_cannot_be_says_why() {
    let Some(image) = image() else { return };
    for (workload, expected) in [
        ("workload=zipf mib=64 alhpa=1", "plimsoll.alhpa is unknown"),
        ("workload=zipf mib=4000", "4000 MiB requested, but only"),
        ("", "plimsoll.workload is missing"),
    ] {
        let mut guest = Guest::start(&image, &config("wrong", workload)).unwrap();
        let error = guest.wait_for(BOOT, |_| false).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        let status = guest.wait(Duration::from_secs(20)).unwrap();
        assert!(status.is_some(), "it powers off by itself");
    }
}

#[test]
fn what_qemu_refuses_is_told_in_its_words() {
    let Some(image) = image() else { return };
    let config = GuestConfig {
        extra_arguments: vec!["-device".into(), "no-such-device".into()],
        ..config("refused", "workload=idle")
    };
    let mut guest = Guest::start(&image, &config).unwrap();
    let error = guest.wait_for(BOOT, |_| false).unwrap_err().to_string();
    assert!(error.contains("no-such-device"), "{error}");
}

#[test]
fn detection_leaves_no_guest_behind() {
    let detection = detect();
    println!("{}: {}", detection.accelerator, detection.reason);
    assert!(!detection.reason.is_empty());
    let left = running().unwrap();
    let probe = VmId(unique("plimsoll-kvm-probe"));
    assert!(left.iter().all(|vm| vm.id != probe), "{left:?}");
}

#[test]
fn a_guest_without_an_operating_system_runs_under_both_accelerators() {
    if image().is_none() {
        return;
    }
    let mut accelerators = vec![AcceleratorChoice::Tcg];
    let detection = detect();
    if detection.kvm == KvmSupport::None {
        skip(Lack::Kvm, format_args!("{}", detection.reason));
    } else {
        accelerators.push(AcceleratorChoice::Kvm);
    }
    for accelerator in accelerators {
        let config = GuestConfig {
            accelerator,
            ..config(
                "bare",
                "workload=steps steps_mib=2,4 step_ms=300 write_ratio=0.2 seconds=1",
            )
        };
        let events = events_of(Boot::Bare, &config);
        let steps: Vec<_> = events
            .iter()
            .filter_map(|event| match event {
                ConsoleEvent::Step { pages, .. } => Some(pages.0),
                _ => None,
            })
            .collect();
        assert!(steps.starts_with(&[512, 1024, 512]), "{steps:?}");
        let stalls = |event: &ConsoleEvent| {
            matches!(
                event,
                ConsoleEvent::Round {
                    stalls: Some(_),
                    ..
                }
            )
        };
        assert!(events.iter().any(stalls), "{events:?}");
        let sound = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Done { mismatches: 0, ms, .. } if (1000..4000).contains(ms));
        assert!(events.last().is_some_and(sound), "{events:?}");
        let emulated = events.iter().find_map(|event| match event {
            ConsoleEvent::Ready {
                kernel_slowdown, ..
            } => *kernel_slowdown,
            _ => None,
        });
        assert!(emulated.is_some(), "{events:?}");
    }
    let wrong = config("bare", "workload=unknown");
    let events = events_of(Boot::Bare, &wrong);
    assert!(
        matches!(events.last(), Some(ConsoleEvent::Error { .. })),
        "{events:?}"
    );
}

#[test]
fn a_guest_dies_with_the_process_that_started_it() {
    const HOLDER: &str = "PLIMSOLL_TEST_HOLDS_A_GUEST";
    let Some(image) = image() else { return };
    if std::env::var_os(HOLDER).is_some() {
        // This is the process that is about to be killed.
        let guest = Guest::start(&image, &config("held", "workload=idle")).unwrap();
        println!("\nguest {}", guest.pid());
        std::thread::sleep(BOOT);
        return;
    }
    if Command::new("setpriv")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        skip(Lack::Program, "setpriv is not installed");
        return;
    }
    // Killed, it cannot clean up after itself.
    let folder = tempfile::tempdir().unwrap();
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_guest_dies_with_the_process_that_started_it",
            "--nocapture",
        ])
        .env(HOLDER, "1")
        .env("TMPDIR", folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(holder.stdout.take().unwrap());
    let pid: u32 = output
        .lines()
        .find_map(|line| line.unwrap().strip_prefix("guest ")?.parse().ok())
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while QemuVm::of_pid(pid).is_err() {
        assert!(Instant::now() < deadline, "QEMU did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    holder.kill().unwrap();
    holder.wait().unwrap();
    while QemuVm::of_pid(pid).is_ok() {
        assert!(
            Instant::now() < deadline,
            "QEMU outlived the process that started it"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
