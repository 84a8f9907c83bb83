//! The workflow of [LS07] fig. 6: memory goes into the cache under a guest's disk, what it uses is seen there, and it goes back.

use plimsoll_protocol::decision::{Kind, Phase, State};
use plimsoll_protocol::vm::CurveSource;
use plimsoll_rig::{DiskGuest, GuestConfig, GuestDisk, PATIENCE, Setup};
use plimsoll_vm::ConsoleEvent;

use crate::rig::{DaemonDirectory, MIB, PLIMSOLL, alone, start, with_balloon};

#[test]
fn memory_goes_into_the_cache_is_seen_there_and_goes_back() {
    alone(|| {
        let setup = Setup {
            image_mib: 128,
            ..Setup::new("--verify --cache 4M", "")
        };
        let disks = DiskGuest::prepare(PLIMSOLL.as_ref(), &setup).unwrap();
        let config = GuestConfig {
            disks: ["disk.sock", "control.sock"]
                .map(|socket| GuestDisk::vhost_user(disks.folder().join(socket)))
                .into(),
            ..with_balloon(
                "served",
                192,
                "workload=disk-serve module=copy order=search files=16 report_s=1",
            )
        };
        let mut guest = start(&config);
        let serves = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Result { name, .. } if name == "serve");
        guest.guest.wait_for(PATIENCE, serves).unwrap();

        let place = DaemonDirectory::new();
        let daemon = place.start(
            "mode = \"act\"
            [curves]
            from = \"caches\"
            direct = \"50%\"
            trace_for = \"15s\"
            keep = false
            every = \"1h\"
            [trace]
            enabled = false
            ",
        );
        daemon.until("shrunk into the cache", |host| host.phase == Phase::Tracing);
        let into = daemon.decisions().into_iter().next().unwrap();
        let outcome = (into.kind, into.state);
        assert_eq!(outcome, (Kind::IntoCaches, State::Kept), "{:?}", into.steps);
        let vm = daemon.vm("served");
        assert_eq!((vm.direct_bytes, vm.cache_bytes), (98 * MIB, 98 * MIB));
        let host = daemon.until("a curve of its cache", |host| {
            host.vms.iter().any(|vm| vm.references > 100)
        });
        assert_eq!(host.vms[0].curve_source, Some(CurveSource::Disk));
        let hits = |host: &plimsoll_protocol::vm::HostView| {
            host.vms[0].cache.as_ref().map_or(0, |cache| cache.hits)
        };
        daemon.until("hits in its cache", |host| hits(host) > 0);

        daemon.until_decision("the way back", |decision| {
            decision.kind == Kind::GiveBack && decision.state == State::Kept
        });
        let host = daemon.until("whole", |host| host.phase == Phase::Whole);
        let vm = &host.vms[0];
        assert_eq!((vm.direct_bytes, vm.cache_bytes), (192 * MIB, 4 * MIB));
        println!(
            "{} hits in {} blocks",
            hits(&host),
            vm.cache.as_ref().unwrap().read_blocks
        );
        let kinds: Vec<_> = daemon.decisions().iter().map(|known| known.kind).collect();
        assert_eq!(kinds, [Kind::GiveBack, Kind::IntoCaches]);
        assert_eq!(vm.cache.as_ref().unwrap().disabled, None);
        guest.assert_goes_on();
    });
}
