//! A guest that could be starved: most of its memory is idle, none of it can be evicted, and it allocates.

use std::thread;
use std::time::{Duration, Instant};

use plimsoll_rig::Subject;
use plimsoll_skip::longer;
use rustix::process::Signal;

use crate::rig::{Daemon, DaemonDirectory, MIB, alone, boot, wait, with_balloon};

/// RAM of the guest, and the part of it that is written once and then left alone.
const RAM_MIB: u64 = 768;
/// The rule wants much less than the guest can do without.
const RULES: &str = "
    mode = \"act\"
    [policy]
    cooldown = \"2s\"
    [guard]
    on_exit = \"give-back\"
    [[vm]]
    name = \"idler\"
    max = \"100M\"
";
/// How long the guest is squeezed, with an allocation of 20 MiB every two seconds.
const SQUEEZED: Duration = Duration::from_secs(30);

fn until_shrunk(daemon: &Daemon<'_>) {
    daemon.until("it gives what it can", |host| {
        let mut vms = host.vms.iter();
        vms.any(|vm| vm.vm == "idler" && vm.direct_bytes < (RAM_MIB - 12) * MIB)
    });
}

fn until_whole(guest: &mut Subject) {
    wait("all its memory", || {
        // A monitor has one client at a time, and the daemon needs it.
        thread::sleep(Duration::from_secs(1));
        let mut qmp = guest.guest.qmp().unwrap();
        (qmp.balloon_actual_bytes().unwrap() == RAM_MIB * MIB).then_some(())
    });
}

#[test]
fn a_guest_with_idle_memory_and_no_swap_is_not_starved_and_gets_all_back_at_the_end() {
    alone(|| {
        // 70 % of its RAM is idle.
        let [mut idler] = boot([with_balloon(
            "idler",
            RAM_MIB,
            "workload=steps steps_mib=16,538 step_ms=100000000 burst_mib=20 burst_ms=2000",
        )]);
        let place = DaemonDirectory::new();
        let daemon = place.start(RULES);
        until_shrunk(&daemon);
        let times = u32::try_from(longer(1)).unwrap();
        let until = Instant::now() + SQUEEZED * times;
        let (mut least, mut polls) = (u64::MAX, 0);
        while Instant::now() < until {
            let vm = daemon.vm("idler");
            least = least.min(vm.direct_bytes);
            polls += 1;
            idler.assert_goes_on();
        }
        println!(
            "{} MiB of {RAM_MIB} at least, in {polls} polls and {} decisions",
            least / MIB,
            daemon.decisions().len()
        );

        let (status, took) = daemon.end_by(Signal::TERM);
        println!("ended in {took:?}");
        assert_eq!(status.code(), Some(0));
        until_whole(&mut idler);
        // The same after a kill, by the process that waits for that.
        let daemon = place.start(RULES);
        until_shrunk(&daemon);
        daemon.end_by(Signal::KILL);
        until_whole(&mut idler);
        idler.assert_goes_on();
    });
}
