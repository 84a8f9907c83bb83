//! A VM run as users run it.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_rig::{GuestKernel, make_image};
use plimsoll_serve::disk::Report;
use plimsoll_vm::ConsoleEvent;

use crate::rig::{PATIENCE, PLIMSOLL, assert_right, image, turn};

/// Runs `plimsoll disk VERB SOCKET ...`, which must succeed in silence, and returns what it wrote.
fn verb(verb: &str, socket: &Path, options: &[&str]) -> String {
    let mut command = Command::new(PLIMSOLL);
    command.args(["disk", verb]).arg(socket).args(options);
    let output = command.output().unwrap();
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), &*complaint), (Some(0), ""));
    String::from_utf8(output.stdout).unwrap()
}

fn report(socket: &Path) -> Report {
    let text = verb("stat", socket, &["--curve", "-o", "json"]);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_vm_runs_to_its_end_while_its_cache_is_looked_at_and_resized() {
    let Some(_turn) = turn() else { return };
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.raw");
    make_image(&disk, 128, true).unwrap();
    let boot = image(GuestKernel::V6_1).unwrap();
    let state = folder.path().join("vm");
    let console = folder.path().join("console");
    // Pauses after each line of a phase give time to look and to resize.
    let words =
        "workload=disk-signed module=copy order=random files=80 warmup=2 rounds=3 pause_ms=9000";
    let words: String = words
        .split(' ')
        .map(|word| format!(" plimsoll.{word}"))
        .collect();
    let mut vm = Command::new(PLIMSOLL)
        .args([
            "run", "--cache", "48M", "--verify", "--name", "user", "--disk",
        ])
        .arg(&disk)
        .arg("--state")
        .arg(&state)
        .args([
            "--",
            "qemu-system-x86_64",
            "-accel",
            "tcg",
            "-cpu",
            "qemu64,-cx16",
        ])
        .args([
            "-m",
            "128",
            "-display",
            "none",
            "-serial",
            "stdio",
            "-nodefaults",
            "-no-reboot",
        ])
        .arg("-kernel")
        .arg(&boot.kernel)
        .arg("-initrd")
        .arg(&boot.initrd)
        .arg("-append")
        .arg(format!(
            "console=ttyS0 quiet panic=-1 transparent_hugepage=never no_timer_check nokaslr cryptomgr.notests{words}"
        ))
        .stdin(Stdio::null())
        .stdout(File::create(&console).unwrap())
        .stderr(File::create(folder.path().join("errors")).unwrap())
        .spawn()
        .unwrap();
    let said = || fs::read_to_string(&console).unwrap();
    let admin = state.join("admin.sock");
    let deadline = Instant::now() + PATIENCE;
    let wait_for = |what: &dyn Fn(&ConsoleEvent) -> bool| {
        while !said()
            .lines()
            .filter_map(ConsoleEvent::parse)
            .any(|event| what(&event))
        {
            assert!(Instant::now() < deadline, "{}", said());
            thread::sleep(Duration::from_millis(50));
        }
    };
    let phase = |wanted: &'static str| move |event: &ConsoleEvent| matches!(event, ConsoleEvent::Phase { name, .. } if name == wanted);

    wait_for(&phase("measured"));
    let resized = |size: &str, bytes: u64| {
        verb("resize", &admin, &[size]);
        let report = report(&admin);
        let engine = &report.machine.engine;
        assert_eq!(engine.cache_bytes, bytes);
        assert!(engine.cached_pages * 4096 <= bytes, "{engine:?}");
        report
    };
    let full = report(&admin);
    let small = resized("8M", 8 << 20);
    let large = resized("64M", 64 << 20);
    println!(
        "{} pages cached in 48 MiB, {} in 8 MiB ({} dropped), {} in 64 MiB",
        full.machine.engine.cached_pages,
        small.machine.engine.cached_pages,
        small.machine.engine.dropped - full.machine.engine.dropped,
        large.machine.engine.cached_pages
    );
    assert!(full.machine.engine.cached_pages > 2048);
    // On a busy machine the guest goes on before both are done: a page is dropped, admitted or what it was.
    let (full, small, large) = (
        full.machine.engine,
        small.machine.engine,
        large.machine.engine,
    );
    let admitted = small.admitted - full.admitted;
    assert!(small.dropped - full.dropped <= full.cached_pages + admitted - small.cached_pages);
    assert!(small.dropped - full.dropped > 0);
    assert!(large.cached_pages <= small.cached_pages + large.admitted - small.admitted);

    wait_for(&phase("end"));
    let last = report(&admin);
    let (curve, ghosts) = (last.curve.unwrap(), last.ghosts.unwrap());
    let direct = ghosts.direct_pages.unwrap();
    assert_eq!(direct, last.machine.ring.guest_memory_pages);
    assert_eq!(curve.baseline_pages.map(|now| now > direct), Some(true));
    let at = |size: u64| {
        curve
            .points
            .iter()
            .rfind(|point| point.size_pages <= size)
            .map(|point| point.miss_ratio)
    };
    let (without, with) = (at(direct).unwrap(), at(direct + (64 << 8)).unwrap());
    println!(
        "curve from {direct} pages on: {without:.3} miss without a cache, {with:.3} with 64 MiB; {} reads",
        ghosts.reads
    );
    assert!(
        curve
            .points
            .windows(2)
            .all(|pair| pair[0].size_pages < pair[1].size_pages
                && pair[0].miss_ratio >= pair[1].miss_ratio)
    );
    assert!(without > 0.95 && with < 0.3, "{without} {with}");

    let status = vm.wait().unwrap();
    let errors = fs::read_to_string(folder.path().join("errors")).unwrap();
    assert_eq!(status.code(), Some(0), "{errors}");
    assert!(
        said().contains("plimsoll: done ") && said().contains(" mismatches=0"),
        "{}",
        said()
    );
    assert!(!said().contains("MISMATCH"));
    assert_right(&last.machine.engine);
    let whole = Command::new("e2fsck")
        .arg("-fn")
        .arg(&disk)
        .output()
        .unwrap();
    assert!(whole.status.success(), "{whole:?}");
}
