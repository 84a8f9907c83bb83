//! Daemons killed at any time: no acknowledged write is lost, and requests in flight are completed.

mod faults_common;

use fastrand::Rng;
use faults_common::{Guest, Process, Setup, ram, serve_as_told};
use plimsoll_disk::{CacheMode, WriteMode};
use plimsoll_driver::{Driver, DriverOptions, FrontendError};
use plimsoll_skip::longer;

#[test]
#[ignore = "a daemon for the tests of this file"]
fn serves_until_it_is_killed() {
    serve_as_told();
}

/// Kills the daemon `kills` times under load.
fn survives(setup: Setup, kills: usize) {
    let mut process = Process::start(setup);
    let options = DriverOptions {
        queues: 2,
        queue_size: 32,
        ..DriverOptions::default()
    };
    let disk = Driver::connect(&ram(), &process.place.socket(0), options).unwrap();
    let mut guest = Guest::new(disk, 2, 12, kills as u64);
    let mut random = Rng::with_seed(1);
    let mut stored = 0;
    for _ in 0..kills {
        // From requests that are all in flight to a disk that is half written anew.
        let most = 1 << random.u64(..8);
        let requests = usize::try_from(random.u64(..most)).unwrap();
        guest.run(requests).unwrap();
        process.kill();
        let gone = guest.settle();
        assert!(
            matches!(gone, Ok(()) | Err(FrontendError::Disconnected)),
            "{gone:?}"
        );
        stored += usize::from(guest.is_stored_in(&process.place.image(0)));
        process.restart();
        guest.disk.reconnect().unwrap();
    }
    // Written-through data is on storage when it is acknowledged; delayed data only after a later flush.
    match process.place.setup.write {
        WriteMode::Through => assert_eq!(stored, kills),
        WriteMode::Delayed => assert!(stored < kills, "nothing was delayed"),
    }
    guest.settle().unwrap();
    guest.check();
    guest.disk.flush().unwrap();
    guest.model.check_image(&process.place.image(0));
}

#[test]
fn a_disk_that_writes_through_survives_kills() {
    survives(Setup::default(), longer(50));
}

#[test]
fn a_disk_that_delays_writes_survives_kills() {
    let setup = Setup {
        mode: CacheMode::Exclusive,
        write: WriteMode::Delayed,
        ..Setup::default()
    };
    survives(setup, longer(50));
}
