//! A VM traced while its disk is served: the daemon does not hold the pages that the tracer takes away.

use std::fs;
use std::process::Command;

use plimsoll_rig::{DiskGuest, Setup};
use plimsoll_skip::{Lack, skip};
use plimsoll_vm::ConsoleEvent;
use serde_json::Value;

use crate::rig::{PATIENCE, PLIMSOLL, assert_right, assert_sound, finish, report, tell, turn};

/// Most of a guest's RAM that the daemon may have mapped, in KiB: rings, not pages.
const MAPPED_KIB_MAX: u64 = 4096;

#[test]
fn pages_that_the_disk_touched_trap_while_it_is_served() {
    let Some(_turn) = turn() else { return };
    if !rustix::process::geteuid().is_root() {
        skip(Lack::Root, "only root may trace a VM");
        return;
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().count() > 1 {
        skip(Lack::Swap, "this host swaps, so its VMs are not traced");
        return;
    }
    let workload = "workload=disk-signed module=copy order=sequential files=80 warmup=1 rounds=30";
    let mut setup = Setup::new("--cache 40M --verify", workload);
    setup.memory_mib = 144;
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup).unwrap();
    let measured = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Phase { name, .. } if name == "measured");
    guest.listen(PATIENCE, measured).unwrap();
    let before = report(&guest).machine.engine;
    let pid = guest.guest().unwrap().pid().to_string();
    let attached = Command::new(PLIMSOLL)
        .args(["attach", &pid, "-o", "json", "--backend", "trap"])
        .args(["--rate", "1/16", "--rate-rule", "fixed", "--budget", "none"])
        .args(["--period", "2s", "--periods", "4"])
        .output()
        .unwrap();
    let after = report(&guest).machine.engine;
    let complaint = String::from_utf8(attached.stderr).unwrap();
    assert_eq!((attached.status.code(), &*complaint), (Some(0), ""));
    let text = String::from_utf8(attached.stdout).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let periods: Vec<_> = lines.iter().filter(|line| line["final"] != true).collect();
    assert_eq!(periods.len(), 4);
    let each = |key: &str| -> Vec<u64> {
        periods
            .iter()
            .filter_map(|period| period[key].as_u64())
            .collect()
    };
    let (traps, lost) = (each("traps"), each("lost"));
    let moved = (
        after.read_blocks - before.read_blocks,
        after.hits - before.hits,
    );
    let mapped: u64 = mapped_kib(guest.daemon_pid()).iter().sum();
    println!(
        "{traps:?} traps, {lost:?} lost while the guest read {} blocks, {} of them from the cache; \
         {mapped} KiB of its RAM mapped by the daemon",
        moved.0, moved.1
    );
    assert!(mapped <= MAPPED_KIB_MAX);
    // Nearly all of the guest's memory are pages of files, each filled by the daemon, read and given up in turn.
    assert!(moved.1 > 1000);
    assert!(traps.iter().all(|&traps| traps > 500), "{traps:?}");
    // Without a daemon nothing is lost; with it some are, and counted.
    assert!(
        lost.iter().sum::<u64>() <= traps.iter().sum::<u64>() / 10,
        "{lost:?}"
    );
    let (told, report) = finish(&mut guest);
    tell("traced", &told, &report.machine.engine);
    assert_sound(&told);
    assert_right(&report.machine.engine);
    guest.check_image().unwrap();
}

/// What a process has in its page tables of each mapping of a guest's RAM.
fn mapped_kib(pid: u32) -> Vec<u64> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut of_guest = false;
    let mut found = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("Rss:") if of_guest => {
                found.extend(words.next().and_then(|kib| kib.parse::<u64>().ok()));
            }
            Some(word) if !word.ends_with(':') => of_guest = line.contains("memfd:memory-backend"),
            _ => {}
        }
    }
    found
}
