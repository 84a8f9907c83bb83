//! A guest of the campaign from its start to its end.

use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use plimsoll_protocol::disk_admin::Request;
use plimsoll_rig::{DiskGuest, Fields, Server};
use plimsoll_serve::disk::admin;
use plimsoll_skip::longer;
use plimsoll_vm::ConsoleEvent;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::Verified;
use super::plan::{End, Plan};
use crate::rig::{PATIENCE, PLIMSOLL, any_time, assert_right, assert_sound, finish, report};
use crate::second_chance::serve_at;

/// Longest time from one thing that happens to the next.
const CALM_MS: u64 = 2500;
/// When a VM is killed, at the latest.
const LIFE_MS: u64 = 15_000;

/// Runs the guest, and fails where anything it read was wrong.
pub fn run(plan: &Plan) -> Verified {
    let mut verified = Verified {
        guests: 1,
        ..Verified::default()
    };
    // What happens is not what the guest is, although both follow from the seed.
    let mut random = Rng::with_seed(plan.seed ^ 0x6b69_6c6c);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("hcache");
    let mut hcache = plan.hcache.then(|| serve_at(&socket));
    let mut setup = plan.setup.clone();
    if plan.hcache {
        setup.serve.push("--hcache".into());
        setup.serve.push(socket.display().to_string());
    }
    let mut guest = DiskGuest::start(PLIMSOLL.as_ref(), &setup).unwrap();
    let deadline = Instant::now() + PATIENCE * u32::try_from(longer(1)).unwrap();
    let works = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Phase { .. });
    heard(&mut guest, PATIENCE, works);
    let life = (plan.end != End::ByItself).then(|| Instant::now() + any_time(&mut random, LIFE_MS));
    let done = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Done { .. });
    while !heard(&mut guest, any_time(&mut random, CALM_MS), done) {
        assert!(Instant::now() < deadline, "it takes too long: {plan}");
        if life.is_some_and(|life| Instant::now() > life) {
            break;
        }
        let what = match random.u8(..8) {
            0 | 1 => Event::DaemonKilled,
            2 => Event::DaemonStopped,
            3 => Event::VmStopped,
            4 if plan.hcache => Event::StoreKilled,
            5 if plan.hcache => Event::StoreStopped,
            _ if plan.cached => Event::CacheResized,
            _ => continue,
        };
        happens(what, &mut guest, &mut hcache, &mut random, &mut verified);
        if what == Event::StoreKilled {
            hcache = Some(serve_at(&socket));
        }
    }
    verified.pages += pages_read(&guest);
    if plan.end == End::ByItself {
        assert_sound(guest.told());
        count_served(&guest, &mut verified);
        guest
            .guest()
            .unwrap()
            .wait(Duration::from_secs(30))
            .unwrap();
        guest
            .check_image()
            .unwrap_or_else(|error| panic!("{error:#}: {plan}"));
        return verified;
    }
    assert_nothing_wrong(&guest);
    guest.kill_guest();
    verified.kills += 1;
    if plan.end == End::KilledAndVerified {
        let upto = guest.told().flushed.unwrap_or(0);
        let words = &plan.setup.workload;
        guest
            .boot(&format!("{words} verify=1 upto={upto}"))
            .unwrap();
        let (output, _) = finish(&mut guest);
        assert_sound(&output);
        let of_crash = |key| output.number("crash", None, key).unwrap();
        assert_eq!((of_crash("old"), of_crash("torn")), (0, 0), "{plan}");
        verified.pages += of_crash("blocks");
    }
    count_served(&guest, &mut verified);
    let checked = guest.check_image_after_kill();
    checked.unwrap_or_else(|error| panic!("{error:#}: {plan}"));
    verified
}

/// Whether the guest prints such a line within this time.
fn heard(guest: &mut DiskGuest, limit: Duration, until: impl FnMut(&ConsoleEvent) -> bool) -> bool {
    guest.hears(limit, until).unwrap_or_else(|error| {
        let (output, log) = (guest.told(), guest.daemon_log());
        panic!("{error:#}\n{output:?}\ndaemon: {log}")
    })
}

/// Fails if a guest that is not done has found anything.
fn assert_nothing_wrong(guest: &DiskGuest) {
    let output = guest.told();
    let wrong =
        |(_, fields): &&(String, Fields)| fields.get("mismatches").is_some_and(|n| n != "0");
    assert_eq!(output.results.iter().find(wrong), None);
    assert_eq!(output.kernel, [""; 0]);
}

/// Pages that a guest has read and compared, from its last line of each kind.
fn pages_read(guest: &DiskGuest) -> u64 {
    let output = guest.told();
    let last = |name: &str| output.number(name, None, "reads").ok();
    let phases =
        ["warmup", "measured"].map(|phase| output.number("files", Some(phase), "reads").ok());
    ["stress", "raw", "fio"]
        .iter()
        .find_map(|name| last(name))
        .or_else(|| last("round"))
        .unwrap_or(0)
        + phases.iter().flatten().sum::<u64>()
}

/// Adds what this daemon has served from memory; it must have been right.
fn count_served(guest: &DiskGuest, verified: &mut Verified) {
    let engine = report(guest).machine.engine;
    assert_right(&engine);
    verified.served += engine.hits;
}

/// Stops a process for a while.
fn stop(pid: u32, time: Duration) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    thread::sleep(time);
    kill_process(pid, Signal::CONT).unwrap();
}

/// What happens beneath a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    DaemonKilled,
    DaemonStopped,
    VmStopped,
    StoreKilled,
    StoreStopped,
    CacheResized,
}

/// Does it; a store that was killed is not there afterwards.
fn happens(
    what: Event,
    guest: &mut DiskGuest,
    hcache: &mut Option<Server>,
    random: &mut Rng,
    verified: &mut Verified,
) {
    match what {
        Event::DaemonKilled => {
            count_served(guest, verified);
            guest.kill_daemon();
            thread::sleep(any_time(random, 300));
            guest.restart_daemon().unwrap();
            verified.kills += 1;
        }
        Event::DaemonStopped => {
            stop(guest.daemon_pid(), any_time(random, 1500));
            verified.stops += 1;
        }
        Event::VmStopped => {
            stop(guest.guest().unwrap().pid(), any_time(random, 500));
            verified.stops += 1;
        }
        Event::StoreKilled => {
            *hcache = None;
            thread::sleep(any_time(random, 500));
            verified.kills += 1;
        }
        Event::StoreStopped => {
            stop(hcache.as_ref().unwrap().pid(), any_time(random, 2500));
            verified.stops += 1;
        }
        Event::CacheResized => {
            let cache_bytes = random.u64(8..=80) << 20;
            let request = Request::Resize { cache_bytes };
            admin::ask::<Value>(&guest.admin(), request).unwrap();
            verified.resizes += 1;
        }
    }
}
