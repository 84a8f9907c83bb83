//! Daemons and VMs killed while writes are delayed: what was flushed is there.

use std::thread;
use std::time::Duration;

use plimsoll_rig::{DiskGuest, Setup};
use plimsoll_skip::longer;
use plimsoll_vm::ConsoleEvent;

use plimsoll_rig::host::printed_seed;

use crate::rig::{
    PATIENCE, PLIMSOLL, any_time, assert_right, assert_sound, finish, report, shared_turn,
};

const DAEMON_KILLS: usize = 5;
/// Whether the guest writes around its page cache, for each time QEMU is killed.
const QEMU_KILLS: [u64; 3] = [0, 1, 1];

#[test]
fn what_was_flushed_outlives_every_kill_of_daemon_and_vm() {
    let Some(_turn) = shared_turn() else { return };
    let mut random = fastrand::Rng::with_seed(printed_seed());
    let serve = "--cache 24M --write delayed --dirty 50% --verify";
    let mut setup = Setup::new(serve, "");
    (setup.formatted, setup.memory_mib, setup.image_mib) = (false, 112, 64);
    let mut guest = DiskGuest::prepare(PLIMSOLL.as_ref(), &setup).unwrap();
    for (number, direct) in QEMU_KILLS.into_iter().enumerate() {
        let about = format!("workload=disk-crash module=copy seed={}", number + 1);
        guest.boot(&format!("{about} direct={direct}")).unwrap();
        wait_for_flushes(&mut guest);
        if number == 0 {
            let (mut delayed, mut again) = (0, 0);
            for _ in 0..longer(DAEMON_KILLS) {
                thread::sleep(any_time(&mut random, 400));
                delayed += report(&guest).machine.engine.delayed_blocks;
                guest.kill_daemon();
                thread::sleep(any_time(&mut random, 100));
                guest.restart_daemon().unwrap();
                wait_for_flushes(&mut guest);
                again += report(&guest).machine.disks[0].resubmitted;
            }
            println!(
                "{} daemons killed: {delayed} writes delayed by them, {again} requests done again",
                longer(DAEMON_KILLS)
            );
            assert!(delayed > 0);
        }
        // Listening until the last moment: what it has told of by then must be there.
        let silent = guest
            .listen(any_time(&mut random, 400), |_| false)
            .unwrap_err();
        assert!(silent.to_string().contains("nothing new"), "{silent:#}");
        guest.kill_guest();
        if number + 1 == QEMU_KILLS.len() {
            // The host's other process goes at the same time.
            guest.restart_daemon().unwrap();
        }
        let upto = guest.told().flushed.unwrap();
        guest
            .boot(&format!("{about} verify=1 upto={upto}"))
            .unwrap();
        let (told, report) = finish(&mut guest);
        let engine = &report.machine.engine;
        let of_crash = |key| told.number("crash", None, key).unwrap();
        println!(
            "{upto} writes flushed, {} blocks verified, {} of them newer; {} delayed blocks, {} hits",
            of_crash("blocks"),
            of_crash("newer"),
            engine.delayed_blocks,
            engine.hits
        );
        assert_sound(&told);
        assert_right(engine);
        assert!(of_crash("blocks") > 0);
        assert_eq!((of_crash("old"), of_crash("torn")), (0, 0));
    }
    guest.check_image().unwrap();
}

/// Waits until the guest has flushed more than before, several times over.
fn wait_for_flushes(guest: &mut DiskGuest) {
    // What it printed before.
    guest.hears(Duration::ZERO, |_| false).unwrap();
    let mut flushes = 0;
    let enough = |event: &ConsoleEvent| {
        flushes += u64::from(matches!(event, ConsoleEvent::Flushed { .. }));
        flushes == 20
    };
    guest.listen(PATIENCE, enough).unwrap();
}
