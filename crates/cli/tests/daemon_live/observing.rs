//! A daemon that only looks.

use std::time::Instant;

use plimsoll_protocol::request::SettingsChange;

use plimsoll_rig::has_ended;

use rustix::process::Signal;

use crate::rig::{DaemonDirectory, MIB, alone, balloon_to, boot, wait, with_balloon};

#[test]
fn a_guest_is_found_and_traced_not_moved_and_outlives_its_daemon() {
    alone(|| {
        let [mut guest] = boot([with_balloon(
            "watched",
            192,
            "workload=zipf mib=64 write_ratio=0.3 seconds=90",
        )]);
        let place = DaemonDirectory::new();
        let daemon = place.start("");
        let found = Instant::now();
        daemon.until("curve and working set", |host| {
            host.vms
                .iter()
                .any(|vm| vm.vm == "watched" && vm.references > 0 && vm.working_set.is_some())
        });
        println!("curve and working set after {:?}", found.elapsed());
        let curve = daemon.client().curve("watched").unwrap();
        assert!(curve.points.len() > 1, "{curve:?}");
        daemon.pass_turns(3);
        let metrics = daemon.get("/metrics");
        for wanted in [
            "plimsoll_vm_demand_bytes{vm=\"watched\",promise=\"5%\"}",
            "plimsoll_vm_working_set_bytes{vm=\"watched\"",
        ] {
            assert!(metrics.contains(wanted), "{wanted}: {metrics}");
        }
        let vm = daemon.vm("watched");
        assert_eq!((vm.direct_bytes, vm.cache_bytes), (192 * MIB, 0));
        assert_eq!(vm.settings.baseline_bytes, 192 * MIB);
        assert!(daemon.decisions().is_empty());

        let change = SettingsChange {
            max_loss: Some(0.17),
            ..SettingsChange::default()
        };
        daemon.client().set("watched", &change).unwrap();
        daemon.client().pause().unwrap();
        let tracer = daemon.vm("watched").trace.unwrap().pid.unwrap();
        assert!(!has_ended(tracer));
        daemon.end_by(Signal::KILL);
        let killed = Instant::now();
        wait("the tracer's end", || has_ended(tracer).then_some(()));
        println!(
            "the tracer ended {:?} after the daemon was killed",
            killed.elapsed()
        );
        guest.assert_goes_on();

        // What it was found with is not what it has when it is found again.
        balloon_to(&mut guest, 176);
        let daemon = place.start("");
        let host = daemon.until("what was known before", |host| {
            host.vms.iter().any(|vm| vm.direct_bytes == 176 * MIB)
        });
        assert!(host.paused, "{host:#?}");
        let settings = &host.vms[0].settings;
        assert_eq!(settings.baseline_bytes, 192 * MIB);
        assert_eq!(settings.promise.max_loss, Some(0.17), "{settings:?}");
        daemon.until("a new tracer's curve", |host| {
            host.vms.iter().any(|vm| vm.references > 0)
        });
        guest.assert_ends_sound();
        daemon.until_logged("the VM has ended");
        daemon.until("nobody", |host| host.vms.is_empty());
        let (status, _) = daemon.end_by(Signal::TERM);
        assert_eq!(status.code(), Some(0));
    });
}
