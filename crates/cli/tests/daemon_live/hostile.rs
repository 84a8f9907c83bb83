//! Processes that pass themselves off as VMs, and monitors that never answer.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use plimsoll_skip::write_program;
use rustix::process::Signal;

use crate::rig::{
    Daemon, DaemonDirectory, alone, beside_another, signal, start, wait, with_balloon,
};

/// A user who owns nothing.
const NOBODY: u32 = 65534;

/// A program that runs; dropped, it is killed.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A victim's monitor, which only root may connect to and which counts who does.
fn victim(path: &Path) -> Arc<AtomicUsize> {
    let listener = UnixListener::bind(path).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    let clients = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&clients);
    thread::spawn(move || {
        for client in listener.incoming() {
            drop(client);
            seen.fetch_add(1, Ordering::SeqCst);
        }
    });
    clients
}

/// A shell called as an emulator, of this owner and run by this user, with a command line that names a monitor.
fn impostor(folder: &Path, owner: u32, user: u32, monitor: &Path) -> Program {
    fs::create_dir_all(folder).unwrap();
    let program = folder.join("qemu-system-evil");
    write_program(&program, fs::read("/bin/sh").unwrap());
    chown(&program, Some(owner), Some(owner)).unwrap();
    let child = Command::new("setpriv")
        .args([&format!("--reuid={user}"), "--clear-groups", "--"])
        .arg(&program)
        .args([
            "-c",
            "while sleep 1; do :; done",
            "-name",
            "web",
            "-m",
            "16",
        ])
        .arg("-qmp")
        .arg(format!("unix:{},server=on", monitor.display()))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let link = format!("/proc/{}/exe", child.id());
    let running = Program(child);
    wait("the impostor", || {
        (fs::read_link(&link).ok()? == program).then_some(())
    });
    running
}

#[test]
fn an_impostor_is_no_vm_and_the_monitor_that_it_names_sees_nobody() {
    beside_another(|| {
        let place = DaemonDirectory::new();
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path();
        // Its programs are run by others.
        fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
        let monitor = folder.join("victim.sock");
        let clients = victim(&monitor);
        let _other_user = impostor(&folder.join("a"), 0, NOBODY, &monitor);
        let _other_owner = impostor(&folder.join("b"), NOBODY, 0, &monitor);
        let daemon = place.start("mode = \"act\"\n");
        let host = daemon.pass_turns(5);
        assert!(host.vms.is_empty(), "{host:#?}");
        for why in ["is not in hosts.users", "not root"] {
            let warned = |warning: &String| {
                warning.contains("is not a VM of this host") && warning.contains(why)
            };
            assert!(host.warnings.iter().any(warned), "{:?}", host.warnings);
        }
        assert_eq!(clients.load(Ordering::SeqCst), 0);
    });
}

/// The longest of the next turns, in ms.
fn longest_turn_ms(daemon: &Daemon<'_>, turns: u32) -> f64 {
    let mut longest: f64 = 0.0;
    for _ in 0..turns {
        longest = longest.max(daemon.pass_turns(1).turn_took_ms);
    }
    longest
}

#[test]
fn monitors_that_never_answer_lengthen_no_turn() {
    alone(|| {
        let place = DaemonDirectory::new();
        let folder = tempfile::tempdir().unwrap();
        // Emulators of root's that are stopped: who connects to them waits for ever.
        let silent: Vec<Program> = (0..50)
            .map(|number| {
                let socket = folder.path().join(format!("{number}.sock"));
                let child = Command::new(plimsoll_vm::QEMU)
                    .args(["-machine", "none", "-nodefaults", "-display", "none"])
                    .arg("-qmp")
                    .arg(format!("unix:{},server=on,wait=off", socket.display()))
                    .stdin(Stdio::null())
                    .spawn()
                    .unwrap();
                let running = Program(child);
                wait("a monitor", || socket.exists().then_some(()));
                signal(running.0.id(), Signal::STOP);
                running
            })
            .collect();
        let daemon = place.start("[trace]\nenabled = false\n");
        let mut longest = longest_turn_ms(&daemon, 3);
        // A VM that starts now is found all the same.
        let guest = start(&with_balloon("web", 192, "workload=uniform mib=32"));
        daemon.until("the VM", |host| host.vms.iter().any(|vm| vm.vm == "web"));
        longest = longest.max(longest_turn_ms(&daemon, 10));
        let host = daemon.host();
        println!("50 silent monitors: the longest turn took {longest:.1} ms");
        assert!(longest < 2000.0, "{longest} ms");
        assert_eq!(host.vms.len(), 1, "{host:#?}");
        assert!(host.warnings.len() < 20, "{:#?}", host.warnings);
        drop((guest, silent));
    });
}
