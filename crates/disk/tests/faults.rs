//! Disks in use: a read returns what was written, whatever the guest does meanwhile.

mod faults_common;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use faults_common::{Guest, IMAGE_BYTES, MachineThread, Setup, ram};
use plimsoll_disk::{CacheMode, WriteMode};
use plimsoll_driver::{Driver, DriverOptions, FrontendError, Status};

fn four_queues() -> DriverOptions {
    DriverOptions {
        queues: 4,
        queue_size: 32,
        ..DriverOptions::default()
    }
}

#[test]
fn random_requests_over_queues_of_all_kinds_agree_with_a_model() {
    for (seed, setup) in [
        Setup::default(),
        Setup {
            mode: CacheMode::Exclusive,
            ..Setup::default()
        },
        Setup {
            mode: CacheMode::Exclusive,
            write: WriteMode::Delayed,
            ..Setup::default()
        },
    ]
    .into_iter()
    .enumerate()
    {
        for (indirect, event_index) in [(true, true), (false, false)] {
            let mut running = MachineThread::start(setup.clone());
            let options = DriverOptions {
                indirect,
                event_index,
                queue_size: 512,
                ..four_queues()
            };
            let disk = running.connect(&ram(), 0, options);
            let mut guest = Guest::new(disk, 4, 12, seed as u64);
            guest.run(1500).unwrap();
            guest.settle().unwrap();
            guest.check();
            guest.disk.flush().unwrap();
            guest.model.check_image(&running.place.image(0));
            let stats = running.stats();
            assert_eq!(stats.disks[0].bad_requests, 0, "{stats:#?}");
            assert_eq!(stats.disks[0].in_flight, 0, "{stats:#?}");
            running.stop();
        }
    }
}

#[test]
fn what_is_written_without_a_flush_is_stable_where_the_guest_knows_no_flush() {
    let setup = Setup {
        mode: CacheMode::Exclusive,
        write: WriteMode::Delayed,
        ..Setup::default()
    };
    let running = MachineThread::start(setup);
    let options = DriverOptions {
        flush: false,
        ..DriverOptions::default()
    };
    let mut disk = running.connect(&ram(), 0, options);
    for at in 0..64 {
        disk.write(at * 4096, &[7; 4096]).unwrap();
    }
    let stats = running.stats();
    assert_eq!(stats.engine.dirty_pages, 0, "{stats:#?}");
    let image = fs::read(running.place.image(0)).unwrap();
    assert!(image[..64 * 4096].iter().all(|&byte| byte == 7));
}

#[test]
fn a_read_only_disk_is_read_and_refuses_all_else() {
    let running = MachineThread::start(Setup {
        read_only: true,
        ..Setup::default()
    });
    let mut disk = running.connect(&ram(), 0, DriverOptions::default());
    assert!(disk.read_only());
    disk.read(4096, &mut [0; 4096]).unwrap();
    let refused = [
        disk.write(0, &[1; 512]),
        disk.discard(0, 4096),
        disk.write_zeroes(0, 4096, false),
    ];
    for refused in refused {
        assert!(
            matches!(
                refused,
                Err(FrontendError::Failed(Status::IoError | Status::Unsupported))
            ),
            "{refused:?}"
        );
    }
    let image = fs::read(running.place.image(0)).unwrap();
    assert!(image.iter().all(|&byte| byte == 0));
}

#[test]
fn requests_beyond_the_disk_fail_and_touch_nothing() {
    let running = MachineThread::start(Setup::default());
    let mut disk = running.connect(&ram(), 0, DriverOptions::default());
    assert_eq!(disk.config().capacity_sectors, IMAGE_BYTES / 512);
    let mut page = [0; 4096];
    for offset in [IMAGE_BYTES - 512, IMAGE_BYTES, u64::MAX - 511] {
        let refused = [
            disk.read(offset, &mut page),
            disk.write(offset, &page),
            disk.discard(offset, 4096),
            disk.write_zeroes(offset, 4096, true),
        ];
        for refused in refused {
            assert!(matches!(refused, Err(FrontendError::Failed(_))));
        }
    }
    let stats = running.stats();
    assert_eq!(
        (stats.disks[0].bad_requests, stats.disks[0].unshared),
        (12, false)
    );
    let image = fs::metadata(running.place.image(0)).unwrap();
    assert_eq!(image.len(), IMAGE_BYTES);
}

/// Connections to a socket that are not yet accepted.
fn waiting_connections(socket: &Path) -> usize {
    // Lines `Num RefCount Protocol Flags Type State Inode Path`; such a connection's state is SS_CONNECTING.
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let waiting = sockets.lines().filter(|line| {
        let mut words = line.split_whitespace();
        words.nth(5) == Some("02") && words.nth(1).is_some_and(|path| Path::new(path) == socket)
    });
    waiting.count()
}

#[test]
fn a_second_guest_waits_until_the_first_is_gone() {
    let running = MachineThread::start(Setup::default());
    let mut first = running.connect(&ram(), 0, DriverOptions::default());
    let path = running.place.socket(0);
    let socket = path.clone();
    let second = thread::spawn(move || {
        let mut second = Driver::connect(&ram(), &socket, DriverOptions::default())?;
        let mut page = [0; 4096];
        second.read(0, &mut page)?;
        Ok::<_, FrontendError>(page[0])
    });
    // The connection is in the queue of the socket.
    let deadline = Instant::now() + Duration::from_secs(60);
    while waiting_connections(&path) == 0 {
        assert!(Instant::now() < deadline, "the second never connected");
        thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..20 {
        first.write(0, &[5; 4096]).unwrap();
        assert_eq!(waiting_connections(&path), 1);
    }
    assert_eq!(running.stats().disks[0].connections, 1);
    assert!(!second.is_finished());
    first.stop().unwrap();
    assert_eq!(second.join().unwrap().unwrap(), 5);
}

#[test]
fn guests_that_vanish_with_requests_in_flight_come_back_to_all_of_them_done() {
    let running = MachineThread::start(Setup {
        mode: CacheMode::Exclusive,
        write: WriteMode::Delayed,
        ..Setup::default()
    });
    let disk = running.connect(&ram(), 0, four_queues());
    let mut guest = Guest::new(disk, 4, 12, 9);
    for life in 0..30 {
        guest.run(life * 3).unwrap();
        guest.disk.hang_up();
        guest.disk.reconnect().unwrap();
    }
    guest.settle().unwrap();
    guest.check();
    let stats = running.stats();
    assert_eq!(stats.disks[0].connections, 31);
    assert!(stats.disks[0].resubmitted > 0, "{stats:#?}");
}

#[test]
fn the_cache_is_resized_under_load() {
    let running = MachineThread::start(Setup {
        mode: CacheMode::Exclusive,
        write: WriteMode::Delayed,
        ..Setup::default()
    });
    let disk = running.connect(&ram(), 0, four_queues());
    let mut guest = Guest::new(disk, 4, 12, 11);
    for mib in [2, 16, 1, 32, 4, 8] {
        let handle = running.handle.clone();
        let resize = thread::spawn(move || handle.resize(mib << 20));
        guest.run(200).unwrap();
        resize.join().unwrap().unwrap();
        assert_eq!(running.stats().engine.cache_bytes, mib << 20);
    }
    guest.settle().unwrap();
    guest.check();
}
