//! Guests and monitors that do not do as they are told, and ends in the middle of a move.

use std::time::Duration;

use plimsoll_protocol::decision::{Decision, State, Step, StepState};
use plimsoll_protocol::vm::BalloonState;
use plimsoll_rig::{GuestConfig, GuestImage, PATIENCE, Subject};
use plimsoll_vm::Qmp;

use rustix::process::Signal;

use crate::rig::{
    Daemon, DaemonDirectory, MIB, alone, balloon_to, boot, signal, wait, with_balloon,
};

/// `poor` is to be raised by more than `rich` can give: its array and its kernel need 160 MiB and more, and the swap that
/// could take them is not there.
fn rules(patience: &str) -> String {
    format!(
        "mode = \"act\"
        total = \"336M\"
        [policy]
        cooldown = \"1s\"
        [balloon]
        patience = \"{patience}\"
        [[vm]]
        name = \"poor\"
        min = \"224M\"
        [[vm]]
        name = \"rich\"
        baseline = \"96M\"
        swap = \"1G\"
    "
    )
}

fn step<'a>(decision: &'a Decision, vm: &str) -> &'a Step {
    decision.steps.iter().find(|step| step.vm == vm).unwrap()
}

/// Waits until a division is under way, and `rich` has given all it can.
fn until_it_hangs(daemon: &Daemon<'_>) -> Decision {
    daemon.until_decision("a move that hangs", |decision| {
        let gives = |step: &&Step| step.vm == "rich";
        let rich = decision.steps.iter().find(gives);
        decision.state == State::Moving
            && rich.is_some_and(|rich| rich.now.direct_bytes < 180 * MIB)
    })
}

#[test]
fn whatever_happens_in_a_move_no_memory_is_given_twice() {
    alone(|| {
        let [mut rich, mut poor] = boot([
            with_balloon("rich", 224, "workload=uniform mib=96"),
            with_balloon("poor", 256, "workload=zipf mib=16"),
        ]);
        balloon_to(&mut poor, 112);
        let place = DaemonDirectory::new();

        // Another client has the monitor.
        let monitor = rich.guest.vm().unwrap().qmp_sockets.remove(0);
        let other = Qmp::connect(&monitor, PATIENCE).unwrap();
        let daemon = place.start(&rules("12s"));
        daemon.until("curves", |host| {
            host.vms.len() == 2 && host.vms.iter().all(|vm| vm.references > 1000)
        });
        let host = daemon.pass_turns(3);
        let warned = |word: &str| host.warnings.iter().any(|warning| warning.contains(word));
        assert!(warned("the balloon of VM rich"), "{:?}", host.warnings);
        // Whatever is decided, nobody gets what was not seen to be given.
        let mut sizes = host.vms.iter().map(|vm| (&*vm.vm, vm.direct_bytes / MIB));
        assert!(sizes.all(|size| [("rich", 224), ("poor", 112)].contains(&size)));
        drop(other);

        // The whole VM stands still in the middle, and goes on.
        let hanging = until_it_hangs(&daemon);
        signal(rich.guest.pid(), Signal::STOP);
        let turn = daemon.host().turn;
        let host = daemon.until("turns beside a VM that hangs", |host| host.turn >= turn + 2);
        let warned = |word: &str| host.warnings.iter().any(|warning| warning.contains(word));
        assert!(warned("rich: "), "{:?}", host.warnings);
        signal(rich.guest.pid(), Signal::CONT);

        // It cannot give all of it: what it gave is poor's, the rest stays where it is.
        let partly = daemon.until_state(State::Partly);
        assert_eq!(partly.id, hanging.id);
        daemon.client().pause().unwrap();
        let (gave, got) = (step(&partly, "rich"), step(&partly, "poor"));
        assert_eq!(gave.state, StepState::Stuck, "{partly:#?}");
        let why = gave.error.as_deref().unwrap_or_default();
        assert!(why.contains("its balloon has not changed for"), "{why}");
        daemon.until_logged("its balloon has not changed for");
        assert!(gave.now.direct_bytes > 128 * MIB && got.now.direct_bytes < 208 * MIB);
        // It was told to stay where it is, with some of what it gave.
        let host = daemon.until("rich at its target", |host| {
            let rich = host.vms.iter().find(|vm| vm.vm == "rich").unwrap();
            let target = rich.balloon.as_ref().unwrap().target_bytes.unwrap();
            target.abs_diff(rich.direct_bytes) <= MIB
        });
        let rich_bytes = host
            .vms
            .iter()
            .find(|vm| vm.vm == "rich")
            .unwrap()
            .direct_bytes;
        let back = rich_bytes.saturating_sub(gave.now.direct_bytes);
        assert!(back <= 32 * MIB, "{back}");
        rich.assert_goes_on();

        // Ended in the middle.
        daemon.client().resume().unwrap();
        daemon.end_by(Signal::TERM);
        let daemon = place.start(&rules("1h"));
        let hanging = until_it_hangs(&daemon);
        let (status, took) = daemon.end_by(Signal::TERM);
        assert_eq!(status.code(), Some(0));
        println!("ended in {took:?} in the middle of a move");
        assert!(took < Duration::from_secs(30), "{took:?}");
        let daemon = place.start("total = \"336M\"\n");
        let stopped = daemon.client().decision(hanging.id).unwrap();
        assert_eq!(stopped.state, State::Stopped);
        assert!(
            stopped
                .reason
                .contains("was shut down; what was moved stays")
        );
        daemon.until("both", |host| host.vms.len() == 2);
        daemon.end_by(Signal::TERM);

        // Killed in the middle: its successor says so.
        let daemon = place.start(&rules("1h"));
        let hanging = until_it_hangs(&daemon);
        daemon.end_by(Signal::KILL);
        let daemon = place.start(&rules("1h"));
        daemon.until_logged("a move was under way when the daemon ended; what was moved stays");
        let stopped = daemon.client().decision(hanging.id).unwrap();
        assert_eq!(stopped.state, State::Stopped);

        // One VM dies in the middle: what it had goes to the other.
        let hanging = until_it_hangs(&daemon);
        rich.guest.kill();
        let ended = daemon.until_decision("the end of a move", |decision| {
            decision.id == hanging.id && decision.state.has_ended()
        });
        assert_eq!(step(&ended, "rich").state, StepState::Gone, "{ended:#?}");
        assert_eq!(step(&ended, "poor").state, StepState::Done, "{ended:#?}");
        assert_eq!(ended.state, State::Partly);
        daemon.until_logged("it ended; its memory is free");
        assert_eq!(daemon.vm("poor").direct_bytes, 224 * MIB);
        poor.assert_goes_on();
    });
}

#[test]
fn of_guests_whose_balloon_does_nothing_nothing_is_taken() {
    alone(|| {
        // The plain image has no modules, so no driver.
        let image = GuestImage::locate().unwrap();
        let workload = "workload=zipf mib=32";
        let mut deaf = Subject::start(&image, &with_balloon("deaf", 128, workload)).unwrap();
        let mut fixed = Subject::start(
            &image,
            &GuestConfig {
                memory_mib: 128,
                ..GuestConfig::new("fixed", workload)
            },
        )
        .unwrap();
        deaf.until_populated().unwrap();
        fixed.until_populated().unwrap();
        let place = DaemonDirectory::new();
        let daemon = place.start(
            "mode = \"act\"\n[policy]\ncooldown = \"1s\"\n[[vm]]\nname = \"*\"\nmin = \"64M\"\nmax_loss = \"1000%\"\n\
             baseline = \"96M\"\n",
        );
        let client = daemon.client();
        let host = wait("curves", || {
            let host = client.host().unwrap();
            let known = host.vms.iter().all(|vm| vm.references > 1000);
            (host.vms.len() == 2 && known && host.turn > 8).then_some(host)
        });
        // They have more than their baselines, and it stays theirs.
        assert_eq!(host.memory.divided_bytes, 256 * MIB);
        assert_eq!(host.memory.vms_direct_bytes, 256 * MIB);
        assert_eq!(host.memory.spare_bytes, 0);
        let state = |name: &str| {
            let vm = host.vms.iter().find(|vm| vm.vm == name).unwrap();
            vm.balloon.as_ref().map(|balloon| balloon.state)
        };
        assert_eq!(state("deaf"), Some(BalloonState::Absent));
        assert_eq!(state("fixed"), None);
        assert_eq!(daemon.decisions(), []);
        let told = |warning: &String| warning.contains("does not answer to its balloon");
        assert!(host.warnings.iter().any(told), "{:?}", host.warnings);
        deaf.assert_goes_on();
        fixed.assert_goes_on();
    });
}
