//! Balloons of monitors and guests that misbehave.

mod monitor;

use std::error::Error as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use monitor::{Answer, GREETING, Monitor, now_unix_s};
use plimsoll_actuator::{
    Absence, ActuatorError, Balloon, BalloonSettings, BlockReads, Delivery, MemoryPart as _,
    Patience, Progress,
};
use plimsoll_flow::VmId;
use plimsoll_vm::{PeerSocket, ProcessId};

const MIB: u64 = 1 << 20;

fn balloon_of(monitor: &Monitor) -> Balloon {
    let settings = BalloonSettings {
        timeout: Duration::from_secs(1),
        patience: Patience {
            stuck_ms: 50,
            late_ms: 0,
        },
        ..BalloonSettings::default()
    };
    Balloon::new(
        VmId("web".into()),
        vec![monitor.peer()],
        512 * MIB,
        settings,
    )
}

/// A balloon that was queried once.
fn seen(monitor: &Monitor) -> Balloon {
    let mut balloon = balloon_of(monitor);
    balloon.query().unwrap();
    balloon
}

/// MiB that it has, and MiB that are reserved for it.
fn mib(balloon: &Balloon) -> (u64, u64) {
    let part = balloon.part();
    (part.actual_bytes / MIB, part.reserved_bytes / MIB)
}

/// The error with its causes.
fn told(error: &ActuatorError) -> String {
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    format!("{error}: {cause}")
}

#[test]
fn a_guest_that_follows_is_seen_to() {
    let monitor = Monitor::new();
    let mut balloon = seen(&monitor);
    assert_eq!(balloon.part().progress, Progress::NoTarget);
    balloon.set(256 * MIB + 5000).unwrap();
    assert_eq!(monitor.targets(), [256 * MIB + 4096]);
    assert_eq!(mib(&balloon), (512, 512));
    monitor.state().actual_bytes = 300 << 20;
    balloon.query().unwrap();
    let progress = balloon.part().progress;
    let Progress::Late {
        left_bytes,
        bytes_per_second,
    } = progress
    else {
        panic!("{progress:?}");
    };
    assert_eq!(left_bytes, 44 * MIB - 4096);
    assert!(bytes_per_second > 0);
    monitor.state().actual_bytes = (256 << 20) + 4096;
    balloon.query().unwrap();
    assert_eq!(balloon.part().progress, Progress::Reached);
    assert_eq!(mib(&balloon), (256, 256));
    balloon.set(512 * MIB).unwrap();
    assert_eq!(mib(&balloon), (256, 512));
}

#[test]
fn a_target_that_cannot_be_is_not_sent() {
    let monitor = Monitor::new();
    let mut balloon = balloon_of(&monitor);
    for target_bytes in [0, 4095, 513 * MIB, u64::MAX] {
        let error = balloon.set(target_bytes).unwrap_err();
        assert!(matches!(error, ActuatorError::Target { .. }), "{error}");
    }
    assert_eq!(monitor.targets(), [0; 0]);
}

#[test]
fn one_that_does_not_move_is_stuck_and_its_memory_counted() {
    let monitor = Monitor::new();
    let mut balloon = seen(&monitor);
    balloon.set(128 * MIB).unwrap();
    std::thread::sleep(Duration::from_millis(60));
    balloon.query().unwrap();
    let part = balloon.part();
    assert!(
        matches!(part.progress, Progress::Stuck { left_bytes, .. } if left_bytes == 384 * MIB),
        "{part:?}"
    );
    assert_eq!(mib(&balloon), (512, 512));
}

#[test]
fn one_that_gives_more_than_asked_may_take_it_back() {
    let monitor = Monitor::new();
    let mut balloon = seen(&monitor);
    balloon.set(256 * MIB).unwrap();
    monitor.state().actual_bytes = 200 << 20;
    balloon.query().unwrap();
    assert_eq!(balloon.part().progress, Progress::Reached);
    assert_eq!(mib(&balloon), (200, 256));
}

#[test]
fn one_that_takes_more_than_it_was_given_is_counted_with_it() {
    let monitor = Monitor::new();
    let mut balloon = seen(&monitor);
    balloon.set(256 * MIB).unwrap();
    monitor.state().actual_bytes = 256 << 20;
    balloon.query().unwrap();
    monitor.state().actual_bytes = 400 << 20;
    balloon.query().unwrap();
    assert!(!matches!(balloon.part().progress, Progress::Reached));
    assert_eq!(mib(&balloon), (400, 400));
}

#[test]
fn a_monitor_that_does_not_greet_was_sent_nothing() {
    for greeting in [
        Answer::Hang,
        Answer::Close,
        Answer::Text("SSH-2.0\n"),
        Answer::Slowly(Duration::from_millis(100)),
    ] {
        let monitor = Monitor::new();
        let mut balloon = seen(&monitor);
        monitor.state().quirk = Some((GREETING, greeting));
        let error = balloon.set(128 * MIB).unwrap_err();
        assert_eq!(error.sent(), Some(Delivery::No), "{greeting:?}");
        assert!(error.to_string().ends_with("its target is unchanged"));
        assert_eq!(monitor.targets(), [0; 0]);
        assert_eq!(balloon.part().target_bytes, None);
        let error = balloon.query().unwrap_err();
        assert!(matches!(error, ActuatorError::Query { .. }), "{error}");
        monitor.state().quirk = None;
        balloon.set(128 * MIB).unwrap();
    }
}

#[test]
fn a_target_that_is_not_answered_is_counted_beside_the_one_before() {
    for answer in [
        Answer::Hang,
        Answer::Close,
        Answer::Text("garbage\n"),
        Answer::Text("{\"return\": {}, \"id\": 77}\n"),
        Answer::Slowly(Duration::from_millis(100)),
    ] {
        let monitor = Monitor::new();
        let mut balloon = seen(&monitor);
        balloon.set(256 * MIB).unwrap();
        monitor.state().actual_bytes = 256 << 20;
        balloon.query().unwrap();
        monitor.state().quirk = Some(("balloon", answer));
        let error = balloon.set(384 * MIB).unwrap_err();
        assert_eq!(error.sent(), Some(Delivery::Maybe), "{answer:?}");
        assert_eq!(mib(&balloon), (256, 384), "{answer:?}");
        let error = balloon.set(128 * MIB).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("either this target or the previous one is in force")
        );
        assert_eq!(mib(&balloon), (256, 384), "{answer:?}");
        assert!(balloon.part().in_doubt);
        monitor.state().quirk = None;
        balloon.set(128 * MIB).unwrap();
        assert_eq!(mib(&balloon), (256, 256), "{answer:?}");
        assert!(!balloon.part().in_doubt);
    }
}

#[test]
fn a_refusal_leaves_the_target_before() {
    let monitor = Monitor::new();
    let mut balloon = seen(&monitor);
    balloon.set(256 * MIB).unwrap();
    let refusal = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"not now\"}, \"id\": 1}\n";
    monitor.state().quirk = Some(("balloon", Answer::Text(refusal)));
    let error = balloon.set(128 * MIB).unwrap_err();
    assert_eq!(error.sent(), Some(Delivery::No));
    assert!(
        told(&error).contains("not now (GenericError)"),
        "{}",
        told(&error)
    );
    let part = balloon.part();
    assert_eq!((part.target_bytes, part.in_doubt), (Some(256 * MIB), false));
}

#[test]
fn an_answer_byte_by_byte_is_an_answer() {
    let monitor = Monitor::new();
    let mut balloon = balloon_of(&monitor);
    monitor.state().quirk = Some(("query-balloon", Answer::Slowly(Duration::from_millis(1))));
    balloon.query().unwrap();
    assert_eq!(mib(&balloon), (512, 512));
}

#[test]
fn reads_of_disks_come_with_a_poll_and_do_without() {
    let monitor = Monitor::new();
    let mut balloon = balloon_of(&monitor);
    let mut polled = || {
        let mut failures = Vec::new();
        let blocks = balloon.poll(&mut failures).blocks;
        (blocks, failures.len())
    };
    let expected = BlockReads {
        reads: 40,
        wait_ns: 20_000_000,
    };
    assert_eq!(polled(), (Some(expected), 0));
    let refusal = "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"no\"}, \"id\": 3}\n";
    for answer in [
        refusal,
        "{\"return\": {}, \"id\": 3}\n",
        "{\"return\": [7], \"id\": 3}\n",
    ] {
        monitor.state().quirk = Some(("query-blockstats", Answer::Text(answer)));
        assert_eq!(polled(), (None, 0), "{answer}");
    }
    monitor.state().quirk = Some(("query-blockstats", Answer::Close));
    assert_eq!(polled(), (None, 1));
}

#[test]
fn the_last_known_value_stands_if_a_query_fails() {
    for answer in [
        Answer::Hang,
        Answer::Close,
        Answer::Text("garbage\n"),
        Answer::Text("{\"return\": {\"actual\": -4096}, \"id\": 4}\n"),
        Answer::Text("{\"return\": {\"actual\": \"all\"}, \"id\": 4}\n"),
        Answer::Text("{\"return\": [], \"id\": 4}\n"),
    ] {
        let mut monitor = Monitor::new();
        let mut balloon = seen(&monitor);
        balloon.set(256 * MIB).unwrap();
        monitor.state().actual_bytes = 300 << 20;
        balloon.query().unwrap();
        monitor.state().quirk = Some(("query-balloon", answer));
        let error = balloon.query().unwrap_err();
        assert!(matches!(error, ActuatorError::Query { .. }), "{error}");
        assert_eq!(mib(&balloon), (300, 300), "{answer:?}");
        monitor.end();
        let error = told(&balloon.query().unwrap_err());
        // A monitor that hung is not queried again at once: a turn has other VMs to poll.
        let expected = match answer {
            Answer::Hang => "not retried for 5 s",
            _ => "no QMP monitor answers",
        };
        assert!(error.contains(expected), "{error}");
        assert_eq!(mib(&balloon), (300, 300), "{answer:?}");
    }
}

#[test]
fn a_monitor_never_seen_counts_with_all_ram() {
    let mut monitor = Monitor::new();
    let mut balloon = balloon_of(&monitor);
    monitor.end();
    balloon.query().unwrap_err();
    assert_eq!(mib(&balloon), (512, 512));
    assert_eq!(balloon.part().age_ms, None);
    assert_eq!(
        balloon.set(256 * MIB).unwrap_err().sent(),
        Some(Delivery::No)
    );
}

#[test]
fn a_vm_without_a_balloon_keeps_its_ram() {
    let monitor = Monitor::new();
    monitor.state().device = false;
    let mut balloon = balloon_of(&monitor);
    assert_eq!(balloon.query().unwrap(), None);
    let absent = Progress::Absent(Absence::NoDevice);
    assert_eq!(balloon.part().progress, absent);
    assert_eq!(mib(&balloon), (512, 512));
    let error = balloon.set(128 * MIB).unwrap_err();
    assert_eq!(error.sent(), Some(Delivery::No));
    assert_eq!(balloon.part().progress, absent);
}

#[test]
fn a_guest_without_a_driver_is_absent_until_it_has_one() {
    let monitor = Monitor::new();
    monitor.state().told_unix_s = 0;
    let mut balloon = balloon_of(&monitor);
    balloon.query().unwrap();
    balloon.set(128 * MIB).unwrap();
    balloon.query().unwrap();
    let absent = Progress::Absent(Absence::NoDriver);
    assert_eq!(balloon.part().progress, absent);
    assert_eq!(mib(&balloon), (512, 512));
    monitor.state().told_unix_s = now_unix_s();
    monitor.state().actual_bytes = 128 << 20;
    balloon.query().unwrap();
    assert_eq!(balloon.part().progress, Progress::Reached);
}

#[test]
fn virtio_mem_that_the_balloon_does_not_count_is_memory_of_the_vm() {
    let monitor = Monitor::new();
    let mut balloon = seen(&monitor);
    monitor.state().virtio_mem_bytes = 256 << 20;
    balloon.query().unwrap();
    // It has what was plugged: a total that rises by that leaves nothing to others.
    assert_eq!(mib(&balloon), (768, 768));
    assert_eq!(balloon.part().max_bytes, Some(768 * MIB));
    balloon.set(700 * MIB).unwrap();
    assert_eq!(monitor.targets(), [444 * MIB]);
    monitor.state().actual_bytes = 444 << 20;
    balloon.query().unwrap();
    assert_eq!(balloon.part().progress, Progress::Reached);
    // All of its RAM can be reached again, and no balloon takes virtio-mem from it.
    balloon.set(768 * MIB).unwrap();
    assert_eq!(monitor.targets(), [444 * MIB, 512 * MIB]);
    let error = balloon.set(256 * MIB).unwrap_err();
    assert!(matches!(error, ActuatorError::Target { .. }), "{error}");
}

#[test]
fn hot_plugged_ram_counts() {
    let monitor = Monitor::new();
    let mut balloon = seen(&monitor);
    monitor.state().ram_bytes = 768 << 20;
    monitor.state().actual_bytes = 768 << 20;
    balloon.query().unwrap();
    assert_eq!(balloon.part().max_bytes, Some(768 * MIB));
    balloon.set(700 * MIB).unwrap();
}

#[test]
fn statistics_have_an_age() {
    let monitor = Monitor::new();
    let mut balloon = balloon_of(&monitor);
    let stats = balloon.query().unwrap().unwrap();
    assert!(!stats.is_stale(), "{stats:?}");
    assert_eq!((stats.free_bytes, stats.swap_in_bytes), (Some(MIB), None));
    assert_eq!(monitor.state().interval_s, 2);
    monitor.state().told_unix_s = now_unix_s() - 60;
    // The first that are read are dated by the time of day.
    let stats = balloon_of(&monitor).query().unwrap().unwrap();
    assert!(stats.is_stale() && stats.age_s >= 60, "{stats:?}");
}

#[test]
fn an_interval_is_set_only_where_it_is_wanted_and_restored() {
    let monitor = Monitor::new();
    let mut balloon = balloon_of(&monitor);
    balloon.want_statistics(false).unwrap();
    balloon.query().unwrap();
    assert_eq!(monitor.state().interval_s, 0);
    balloon.want_statistics(true).unwrap();
    balloon.query().unwrap();
    assert_eq!(monitor.state().interval_s, 2);
    balloon.want_statistics(false).unwrap();
    assert_eq!(monitor.state().interval_s, 0);
    monitor.state().interval_s = 30;
    balloon.want_statistics(true).unwrap();
    balloon.query().unwrap();
    balloon.want_statistics(false).unwrap();
    assert_eq!(monitor.state().interval_s, 30);
}

#[test]
fn an_interval_that_somebody_has_set_is_kept_until_the_balloon_is_moved_and_restored() {
    let monitor = Monitor::new();
    monitor.state().interval_s = 30;
    monitor.state().told_unix_s = now_unix_s() - 60;
    let mut balloon = balloon_of(&monitor);
    let stats = balloon.query().unwrap().unwrap();
    assert_eq!((stats.interval_s, stats.is_stale()), (30, false));
    assert_eq!(monitor.state().interval_s, 30);
    balloon.set(128 * MIB).unwrap();
    let stats = balloon.query().unwrap().unwrap();
    assert_eq!((stats.interval_s, monitor.state().interval_s), (2, 2));
    balloon.want_statistics(false).unwrap();
    assert_eq!(monitor.state().interval_s, 30);
    // A shorter one is left alone.
    monitor.state().interval_s = 1;
    balloon.want_statistics(true).unwrap();
    balloon.set(160 * MIB).unwrap();
    balloon.query().unwrap();
    assert_eq!(monitor.state().interval_s, 1);
}

#[test]
fn an_interval_that_a_killed_process_has_set_is_restored_by_the_next() {
    let monitor = Monitor::new();
    monitor.state().interval_s = 7;
    let mut killed = seen(&monitor);
    killed.set(128 * MIB).unwrap();
    killed.query().unwrap();
    assert_eq!(monitor.state().interval_s, 2);
    let mut next = balloon_of(&monitor);
    next.resume(killed.record());
    next.query().unwrap();
    next.want_statistics(false).unwrap();
    assert_eq!(monitor.state().interval_s, 7);
    assert_eq!(next.record().former_interval_s, None);
}

#[test]
fn a_guest_that_has_more_than_qemu_reports_since_its_reset_is_not_shrunk_by_what_it_lost_before() {
    let monitor = Monitor::new();
    monitor.state().actual_bytes = 120 << 20;
    monitor.state().total_bytes = 82 << 20;
    let mut balloon = seen(&monitor);
    assert_eq!(mib(&balloon), (120, 120));
    monitor.state().total_bytes = 474 << 20;
    monitor.state().told_unix_s += 2;
    balloon.query().unwrap();
    assert_eq!(mib(&balloon), (512, 512));
}

#[test]
fn a_monitor_that_is_taken_says_so_and_is_free_again_later() {
    let monitor = Monitor::new();
    let mut balloon = seen(&monitor);
    let other = UnixStream::connect(&monitor.socket).unwrap();
    let error = balloon.set(128 * MIB).unwrap_err();
    assert_eq!(error.sent(), Some(Delivery::No));
    assert!(
        told(&error).contains("another client is connected to it"),
        "{}",
        told(&error)
    );
    drop(other);
    balloon.set(128 * MIB).unwrap();
    // Other clients can connect between two exchanges.
    let mut qmp = plimsoll_vm::Qmp::connect(&monitor.socket, Duration::from_secs(5)).unwrap();
    assert_eq!(qmp.balloon_actual_bytes().unwrap(), 512 * MIB);
}

#[test]
fn a_monitor_of_another_process_is_not_believed() {
    let monitor = Monitor::new();
    let mut other = std::process::Command::new("sleep")
        .arg("60")
        .spawn()
        .unwrap();
    let process = ProcessId::of_pid(other.id()).unwrap();
    let socket = PeerSocket::of_process(process, monitor.socket.clone());
    let mut balloon = Balloon::new(
        VmId("evil".into()),
        vec![socket],
        16 * MIB,
        BalloonSettings::default(),
    );
    let error = balloon.query().unwrap_err();
    let target = balloon.set(8 * MIB).unwrap_err();
    other.kill().unwrap();
    other.wait().unwrap();
    let why = error.source().unwrap().source().unwrap().to_string();
    assert!(why.contains("listens there, not the VM's process"), "{why}");
    assert_eq!(target.sent(), Some(Delivery::No));
    assert_eq!(balloon.part().reserved_bytes, 16 * MIB);
    assert!(monitor.state().commands.is_empty());
}

#[test]
fn ram_that_its_process_has_not_mapped_is_not_believed() {
    let monitor = Monitor::new();
    let process = ProcessId::of_pid(std::process::id()).unwrap();
    let socket = PeerSocket::of_process(process, monitor.socket.clone());
    let mut balloon = Balloon::new(
        VmId("web".into()),
        vec![socket],
        16 * MIB,
        BalloonSettings::default(),
    );
    monitor.state().ram_bytes = 1 << 60;
    let error = balloon.query().unwrap_err();
    assert!(matches!(error, ActuatorError::Claim { .. }), "{error}");
    assert_eq!(balloon.part().reserved_bytes, 16 * MIB);
}

#[test]
fn the_query_of_the_balloon_also_shows_whether_the_processors_run() {
    let monitor = Monitor::new();
    let mut balloon = balloon_of(&monitor);
    let mut stopped = |state: Option<&'static str>| {
        monitor.state().stopped = state;
        let mut failures = Vec::new();
        let observed = balloon.poll(&mut failures);
        assert!(failures.is_empty(), "{failures:?}");
        observed.stopped
    };
    assert_eq!(stopped(None), None);
    for state in ["paused", "postmigrate", "io-error"] {
        assert_eq!(stopped(Some(state)).as_deref(), Some(state));
    }
    assert_eq!(stopped(Some("\u{1b}[2J")).as_deref(), Some("stopped"));
    assert_eq!(stopped(None), None);
    // An old QEMU, or a monitor that does not tell.
    monitor.state().quirk = Some((
        "query-status",
        Answer::Text(
            "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"no\"}, \"id\": 8}\n",
        ),
    ));
    assert_eq!(stopped(Some("paused")), None);
}
