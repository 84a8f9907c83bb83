//! Real guests with disks, served by QEMU itself: each test prints SKIPPED where it cannot run.

use plimsoll_skip::{Lack, guests_wanted, skip};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use plimsoll_rig::{
    AcceleratorChoice, Guest, GuestConfig, GuestDisk, GuestError, GuestImage, GuestKernel,
};
use plimsoll_vm::ConsoleEvent;

/// A guest under TCG on a busy machine boots in 5 to 20 s; the longest workload here takes another 60.
const WHOLE_RUN: Duration = Duration::from_secs(400);
const KERNELS: [GuestKernel; 2] = [GuestKernel::V6_1, GuestKernel::V6_12];

/// A guest that uses a disk, or `None` after printing why the test is skipped.
fn config(kernel: GuestKernel, disks: &[GuestDisk], workload: &str) -> Option<GuestConfig> {
    if !guests_wanted() {
        return None;
    }
    for tool in ["qemu-system-x86_64", "/sbin/mke2fs"] {
        let found = Command::new(tool)
            .arg(if tool.starts_with('/') {
                "-V"
            } else {
                "--version"
            })
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if let Err(error) = found {
            skip(Lack::Live, format_args!("{tool}: {error}"));
            return None;
        }
    }
    let name = format!("disk-{}-{}", kernel.series(), std::process::id());
    let config = GuestConfig {
        kernel,
        disks: disks.to_vec(),
        memory_mib: 160,
        accelerator: AcceleratorChoice::Tcg,
        ..GuestConfig::new(&name, workload)
    };
    GuestImage::for_guest(&config)
        .inspect_err(|error| skip(Lack::Live, format_args!("{error}")))
        .ok()
        .map(|_| config)
}

fn start(config: &GuestConfig) -> Guest {
    Guest::start(&GuestImage::for_guest(config).unwrap(), config).unwrap()
}

/// The console output of a guest until it ended.
fn events_of(config: &GuestConfig) -> Vec<ConsoleEvent> {
    let mut guest = start(config);
    let (mut events, deadline) = (Vec::new(), Instant::now() + WHOLE_RUN);
    loop {
        match guest.next_line(deadline.saturating_duration_since(Instant::now())) {
            Ok(Some(line)) => events.extend(line.event),
            Ok(None) => panic!("the guest is still not done; it told {events:?}"),
            Err(GuestError::GuestEnded { .. }) => return events,
            Err(error) => panic!("{error}"),
        }
    }
}

/// The last result of a name.
fn result<'a>(events: &'a [ConsoleEvent], wanted: &str) -> &'a BTreeMap<String, String> {
    let found = events.iter().rev().find_map(|event| match event {
        ConsoleEvent::Result { name, fields } if name == wanted => Some(fields),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("no result {wanted}: {events:?}"))
}

fn number(fields: &BTreeMap<String, String>, key: &str) -> u64 {
    fields[key].parse().unwrap()
}

/// Checks that a run came to its end without a wrong block or a complaint of the guest's kernel.
fn assert_clean(workload: &str, events: &[ConsoleEvent]) {
    let Some(ConsoleEvent::Done {
        ms, mismatches: 0, ..
    }) = events.last()
    else {
        panic!("{workload}: not done without mismatches: {events:?}");
    };
    assert_eq!(result(events, "kernel")["complaints"], "0", "{events:?}");
    println!("{workload}: {ms} ms of guest time");
}

/// A sparse file of this many MiB.
fn image(folder: &Path, name: &str, mib: u64) -> PathBuf {
    let path = folder.join(name);
    File::create(&path).unwrap().set_len(mib << 20).unwrap();
    path
}

fn ext4(folder: &Path, mib: u64) -> PathBuf {
    let path = image(folder, "ext4", mib);
    let made = Command::new("/sbin/mke2fs")
        .args(["-q", "-F", "-t", "ext4"])
        .arg(&path)
        .status();
    assert!(made.unwrap().success());
    path
}

fn assert_sound(image: &Path) {
    let checked = Command::new("/sbin/e2fsck")
        .arg("-fn")
        .arg(image)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success(), "{text}");
}

#[test]
fn signed_files_are_read_as_they_were_written_by_both_kernels() {
    let folder = tempfile::tempdir().unwrap();
    for kernel in KERNELS {
        let path = ext4(folder.path(), 192);
        let workload = "workload=disk-signed files=120 file_kib=1024 order=class write_percent=10 \
                        warmup=1 rounds=1 seed=7 mglru=0";
        let disks = [GuestDisk::image(&path, "signed")];
        let Some(config) = config(kernel, &disks, workload) else {
            continue;
        };
        let events = events_of(&config);
        assert_clean(workload, &events);
        let phases: Vec<_> = events
            .iter()
            .filter_map(|event| match event {
                ConsoleEvent::Phase { name, .. } => Some(name.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(phases, ["populate", "warmup", "measured", "end"]);
        let files = result(&events, "files");
        assert_eq!(files["phase"], "measured");
        let pages = number(files, "reads") + number(files, "writes");
        assert_eq!(pages, 120 * 256, "{files:?}");
        // 120 MiB of files in 160 MiB of RAM, of which the kernel takes its part.
        assert!(number(files, "pgsteal_file") > 1000, "{files:?}");
        assert!(number(files, "disk_read_sectors") > 0, "{files:?}");
        let machine = result(&events, "machine");
        assert!(
            machine["kernel"].starts_with(&format!("{}.", kernel.series())),
            "{machine:?}"
        );
        assert_eq!(machine["mglru"], "0x0000");
        println!("{files:?}");
        assert_sound(&path);
    }
}

#[test]
fn stressed_files_stay_as_they_should_be_on_both_kernels() {
    let folder = tempfile::tempdir().unwrap();
    for (kernel, swap, vcpus) in [(KERNELS[0], "disk", 2), (KERNELS[1], "zram", 1)] {
        let path = ext4(folder.path(), 128);
        let workload = format!(
            "workload=disk-stress rounds=4 steps=60 threads=2 files=6 file_kib=4096 swap={swap} \
             anon_mib=110 seed=3"
        );
        let disks = [
            GuestDisk::image(&path, "stress"),
            GuestDisk::image(image(folder.path(), "swap", 64), "plimsoll-swap"),
        ];
        let Some(config) = config(kernel, &disks, &workload) else {
            continue;
        };
        let events = events_of(&GuestConfig { vcpus, ..config });
        assert_clean(&workload, &events);
        let stress = result(&events, "stress");
        assert_eq!(number(stress, "steps"), 4 * 60 * 2);
        assert!(number(stress, "reads") > 10_000, "{stress:?}");
        assert!(number(stress, "pswpout") > 0, "{stress:?}");
        println!("{stress:?}");
        assert_sound(&path);
    }
}

#[test]
fn what_was_flushed_before_a_guest_is_killed_is_found_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), "crash", 16);
    let disks = [GuestDisk::image(&path, "crash")];
    let write = "workload=disk-crash blocks=2048 seed=5";
    let Some(config) = config(KERNELS[0], &disks, write) else {
        return;
    };
    let mut guest = start(&config);
    let enough = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Flushed { upto: 500.. });
    let line = guest.wait_for(WHOLE_RUN, enough).unwrap();
    let Some(ConsoleEvent::Flushed { upto }) = line.event else {
        panic!("{line:?}");
    };
    guest.kill();
    let verify = |upto: u64| {
        let workload = format!("{write} verify=1 upto={upto}");
        events_of(&GuestConfig {
            workload,
            ..config.clone()
        })
    };
    let events = verify(upto);
    assert_clean("disk-crash", &events);
    assert!(number(result(&events, "crash"), "blocks") > 300);
    // The block written last loses its write.
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let newest = newest_block(&file, upto);
    file.write_all_at(&[0; 4096], newest * 4096).unwrap();
    let events = verify(upto);
    assert!(
        matches!(
            events.last(),
            Some(ConsoleEvent::Done { mismatches: 1, .. })
        ),
        "{events:?}"
    );
    assert_eq!(result(&events, "crash")["old"], "1");
}

/// The block that bears write `generation`: its second word is generation and seed.
fn newest_block(file: &File, generation: u64) -> u64 {
    let mut word = [0; 8];
    (0..2048)
        .find(|block| {
            file.read_exact_at(&mut word, block * 4096 + 8).unwrap();
            u64::from_le_bytes(word) >> 32 == generation
        })
        .expect("the last write is on the disk")
}

#[test]
fn an_encrypted_device_and_direct_reads_work_on_both_kernels() {
    let folder = tempfile::tempdir().unwrap();
    for kernel in KERNELS {
        let disks = [GuestDisk::image(image(folder.path(), "raw", 96), "raw")];
        let crypt = "workload=disk-crypt files=160 file_kib=256 order=random write_percent=20 \
                     warmup=0 rounds=1";
        let Some(config) = config(kernel, &disks, crypt) else {
            continue;
        };
        let config = GuestConfig {
            memory_mib: 112,
            ..config
        };
        let events = events_of(&config);
        assert_clean(crypt, &events);
        let files = result(&events, "files");
        assert_eq!(number(files, "reads") + number(files, "writes"), 160 * 64);
        for depth in [1, 32] {
            let workload = format!("workload=disk-io depth={depth} seconds=1");
            let events = events_of(&GuestConfig {
                workload: workload.clone(),
                ..config.clone()
            });
            assert_clean(&workload, &events);
            let io = result(&events, "io");
            assert!(number(io, "iops") > 0 && number(io, "p50_us") <= number(io, "p99_us"));
            // Of two in the queue that are neighbours the guest's kernel makes one.
            let sectors = number(io, "disk_read_sectors");
            assert!(sectors >= 8 * number(io, "reads"), "{io:?}");
            println!("{io:?}");
        }
    }
}

#[test]
fn a_disk_workload_without_what_it_needs_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let disks = [GuestDisk::image(image(folder.path(), "small", 1), "small")];
    for (workload, expected) in [
        (
            "workload=disk-crash blocks=100000",
            "390 MiB requested, but the disk has 1",
        ),
        ("workload=disk-io disk=other", "there is no disk other"),
        ("workload=disk-signed", "mounting /dev/vda"),
        (
            "workload=disk-io module=copy",
            "no disk has the serial plimsoll-control",
        ),
    ] {
        let Some(config) = config(KERNELS[0], &disks, workload) else {
            return;
        };
        let mut guest = start(&config);
        let error = guest
            .wait_for(WHOLE_RUN, |_| false)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
        let status = guest.wait(Duration::from_secs(20)).unwrap();
        assert!(status.is_some(), "it powers off by itself");
    }
}
