//! A server with idle clients sleeps. A file of its own: the time of the whole process is measured.

mod common;

use std::thread;
use std::time::Duration;

use common::ServerThread;
use plimsoll_hcache::PoolOptions;
use plimsoll_ring::{ConnectOptions, Connection, ServerOptions};
use rustix::time::{ClockId, clock_gettime};

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap()
}

#[test]
fn an_idle_server_uses_no_processor_time() {
    let running = ServerThread::new(ServerOptions::default());
    let connect = |_| Connection::connect(running.path(), &ConnectOptions::new("idle")).unwrap();
    let mut clients: Vec<_> = (0..20).map(connect).collect();
    for client in &mut clients {
        client.create_pool(PoolOptions::private()).unwrap();
    }
    let before = processor_time();
    thread::sleep(Duration::from_secs(2));
    let used = processor_time() - before;
    assert!(used < Duration::from_millis(200), "{used:?} of 2 s");
    // And it wakes again.
    for client in &mut clients {
        client.create_pool(PoolOptions::private()).unwrap();
    }
}
