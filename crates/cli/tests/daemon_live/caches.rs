//! The workflow of [LS07] fig. 6: memory goes into the cache under a guest's disk, what it uses is seen there, and it goes back.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use plimsoll::disk_guest::make_image;
use plimsoll_protocol::decision::{Kind, Phase, State};
use plimsoll_protocol::vm::CurveSource;
use plimsoll_vm::{ConsoleEvent, GuestConfig, GuestDisk, GuestImage};

use crate::rig::{MIB, Machine, PATIENCE, PLIMSOLL, Place, alone, wait, with_balloon};

/// The daemon under the disk; it is killed when this goes.
struct DiskDaemon(Child);

impl DiskDaemon {
    /// Serves `disk.img` in a folder, with a cache of 4 MiB, the least that the workflow leaves.
    fn start(folder: &Path) -> Self {
        let at = |name: &str| folder.join(name);
        let disk = format!(
            "{},socket={},serial=plimsoll-disk",
            at("disk.img").display(),
            at("disk.sock").display()
        );
        let log = File::create(at("disk.log")).unwrap();
        let child = Command::new(PLIMSOLL)
            .args([
                "disk", "serve", "--name", "served", "--verify", "--cache", "4M",
            ])
            .args(["--disk", &disk])
            .arg("--control")
            .arg(at("control.sock"))
            .arg("--admin")
            .arg(at("admin.sock"))
            .arg("--state")
            .arg(at("state"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        wait("the disk's daemon", || {
            at("admin.sock").exists().then_some(())
        });
        Self(child)
    }
}

impl Drop for DiskDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn memory_goes_into_the_cache_is_seen_there_and_goes_back() {
    alone(|| {
        let folder = tempfile::tempdir().unwrap();
        make_image(&folder.path().join("disk.img"), 128, true).unwrap();
        let _disks = DiskDaemon::start(folder.path());
        let config = GuestConfig {
            disks: ["disk.sock", "control.sock"]
                .map(|socket| GuestDisk::vhost_user(folder.path().join(socket)))
                .into(),
            ..with_balloon(
                "served",
                192,
                "workload=disk-serve module=copy order=search files=16 report_s=1",
            )
        };
        let image = GuestImage::for_guest(&config).unwrap();
        let mut guest = Machine::start(&image, &config);
        let serves = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Result { name, .. } if name == "serve");
        guest.guest.wait_for(PATIENCE, serves).unwrap();

        let place = Place::new();
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
        assert_eq!((into.kind, into.state), (Kind::IntoCaches, State::Kept));
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
