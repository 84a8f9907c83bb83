//! Monitors of QEMUs that were not simply started by a shell.

use std::os::unix::net::UnixListener;
use std::time::Duration;

use plimsoll_rig::{Guest, GuestConfig, GuestImage};
use plimsoll_vm::{ConsoleEvent, Qmp};
use rustix::process::Signal;

use crate::rig::{DaemonDirectory, MIB, beside_another, boot, wait, with_balloon};

const PATIENCE: Duration = Duration::from_secs(120);
const WORKLOAD: &str = "workload=zipf mib=16 work=4";
const RAM_MIB: u64 = 144;
/// The size that only a monitor shows.
const SIZE_MIB: u64 = 128;

fn with_arguments(name: &str, arguments: &[&str]) -> GuestConfig {
    GuestConfig {
        extra_arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
        ..with_balloon(name, RAM_MIB, WORKLOAD)
    }
}

#[test]
fn the_monitor_is_found_of_a_vm_that_has_several_or_left_its_directory_or_has_other_process_ids() {
    beside_another(|| {
        let place = DaemonDirectory::new();
        let (own, events) = (place.path("managed"), place.path("events"));
        // As Proxmox VE: QEMU is the client of the manager's server.
        let _manager = UnixListener::bind(&events).unwrap();
        let server = format!("socket,id=qmp,path={},server=on,wait=off", own.display());
        let client = format!("socket,id=events,path={}", events.display());
        let managed = GuestConfig {
            qmp: false,
            ..with_arguments(
                "managed",
                &[
                    "-chardev",
                    &server,
                    "-mon",
                    "chardev=qmp,mode=control",
                    "-chardev",
                    &client,
                    "-mon",
                    "chardev=events,mode=control",
                ],
            )
        };
        let cage = place.path("cage");
        std::fs::create_dir(&cage).unwrap();
        let caged = with_arguments("caged", &["-chroot", cage.to_str().unwrap()]);
        // The threads have no names that show the virtual CPUs.
        let contained = GuestConfig {
            prefix: ["unshare", "--pid", "--fork", "--kill-child"]
                .map(Into::into)
                .into(),
            ..with_arguments("contained", &["-name", "debug-threads=off"])
        };
        // The process that was started is not QEMU, but its parent.
        let image = GuestImage::for_guest(&contained).unwrap();
        let mut contained = Guest::start(&image, &contained).unwrap();
        let [managed, mut caged] = boot([managed, caged]);
        let populated = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Populated { .. });
        contained.wait_for(PATIENCE, populated).unwrap();
        let connect = || Qmp::connect(&own, Duration::from_secs(10)).unwrap();
        let monitors = [
            connect(),
            caged.guest.qmp().unwrap(),
            contained.qmp().unwrap(),
        ];
        for mut qmp in monitors {
            qmp.set_balloon(SIZE_MIB * MIB).unwrap();
            wait("the balloon", || {
                (qmp.balloon_actual_bytes().unwrap() == SIZE_MIB * MIB).then_some(())
            });
        }
        let daemon = place.start("[trace]\nenabled = false\n");
        let host = daemon.until("the sizes of all", |host| {
            host.vms.len() == 3 && host.vms.iter().all(|vm| vm.direct_bytes == SIZE_MIB * MIB)
        });
        assert!(host.vms.iter().all(|vm| vm.ram_bytes == RAM_MIB * MIB));
        daemon.end_by(Signal::TERM);
        for mut guest in [managed, caged] {
            guest.assert_goes_on();
        }
        let worked = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Round { .. });
        contained.wait_for(PATIENCE, worked).unwrap();
    });
}
