//! A migration that is predicted from write scans, and then carried out by QEMU over a link of known bandwidth.

use std::io::Read as _;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_rig::{PATIENCE, wait_for};
use serde_json::{Value, json};

use crate::rig::{Ground, PLIMSOLL, quiet_ground};

/// How much later than asked for a thread may wake up.
const LATE_MAX: Duration = Duration::from_millis(3);
/// Time between two of QEMU's looks for written pages.
const STEP_MS: f64 = 50.0;

/// Takes what a connection brings, at a bandwidth.
fn take_slowly(link: &UnixListener, bytes_per_second: f64) {
    let (mut connection, _) = link.accept().unwrap();
    let mut free = Instant::now();
    let mut piece = vec![0; 64 << 10];
    loop {
        let bytes = connection.read(&mut piece).unwrap();
        if bytes == 0 {
            return;
        }
        // What a link did not carry while nothing was sent it does not carry later; only a late wake-up is made up for.
        let now = Instant::now();
        free = free.max(now.checked_sub(LATE_MAX).unwrap())
            + Duration::from_secs_f64(bytes as f64 / bytes_per_second);
        thread::sleep(free.saturating_duration_since(now));
    }
}

#[test]
fn a_migration_by_qemu_goes_as_predicted() {
    let Some(ground) = quiet_ground() else { return };
    for (name, workload, megabits) in [
        (
            "no-writes",
            "workload=sequential mib=64 write_ratio=0",
            400.0,
        ),
        (
            "few-writes",
            "workload=zipf mib=64 alpha=1.2 write_ratio=0.02",
            400.0,
        ),
        (
            "more-writes",
            "workload=zipf mib=64 alpha=1.2 write_ratio=0.1",
            800.0,
        ),
    ] {
        // The guest writes as much as predicted if its share of the host stays the same.
        let is_one_right =
            (0..3).any(|_| does_it_go_as_predicted(&ground, name, workload, megabits));
        assert!(is_one_right, "{name}");
    }
}

fn does_it_go_as_predicted(ground: &Ground, name: &str, workload: &str, megabits: f64) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let mut subject = ground.boot(name, workload);
    let estimate = Command::new(PLIMSOLL)
        .args([
            "migrate",
            "estimate",
            &subject.pid(),
            "--for",
            "6s",
            "-o",
            "json",
        ])
        .args([
            "--scan-interval",
            "50ms",
            "--bandwidth",
            &format!("{megabits}M"),
        ])
        .output()
        .unwrap();
    assert!(
        estimate.status.success(),
        "{}",
        String::from_utf8_lossy(&estimate.stderr)
    );
    let estimate: Value = serde_json::from_slice(&estimate.stdout).unwrap();
    assert_eq!(estimate["ends"], true, "{estimate}");

    let socket = folder.path().join(name);
    let link = UnixListener::bind(&socket).unwrap();
    let reader = thread::spawn(move || take_slowly(&link, megabits * 1e6 / 8.0));
    let mut qmp = subject.guest.qmp().unwrap();
    // The link alone bounds the bandwidth.
    qmp.execute(
        "migrate-set-parameters",
        json!({ "max-bandwidth": 1_u64 << 40 }),
    )
    .unwrap();
    let uri = format!("unix:{}", socket.display());
    qmp.execute("migrate", json!({ "uri": uri })).unwrap();
    let done = wait_for("the migration", PATIENCE, || {
        let state = qmp.execute("query-migrate", Value::Null).unwrap();
        assert_ne!(state["status"], "failed", "{state}");
        (state["status"] == "completed").then_some(state)
    });
    reader.join().unwrap();

    let number = |value: &Value| value.as_f64().unwrap();
    let rounds = estimate["rounds"].as_array().unwrap().len() as f64;
    let predicted = [
        number(&estimate["copied_bytes"]) / 1e6,
        number(&estimate["downtime_seconds"]) * 1e3,
        // QEMU counts the beginning and the stop, too.
        rounds + 2.0,
    ];
    let measured = [
        number(&done["ram"]["transferred"]) / 1e6,
        number(&done["downtime"]),
        number(&done["ram"]["dirty-sync-count"]),
    ];
    println!("{name}: MB, ms stopped, rounds: predicted {predicted:.0?}, measured {measured:.0?}");
    // QEMU stops a VM earlier than predicted as the link's bandwidth looks lower to it: on a host that leaves it no CPU, and
    // while it copies pages that are all zero.
    let is_downtime_right = measured[1] <= 1.2 * predicted[1] + STEP_MS;
    (predicted[0] / measured[0] - 1.0).abs() <= 0.2
        && is_downtime_right
        && (predicted[2] - measured[2]).abs() <= 1.0
}
