//! What can happen to a tracer or its VM at any time, against a guest that measures its own stalls.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_rig::host::Delays;
use plimsoll_rig::{GuestConfig, GuestImage, PATIENCE, Subject, send, wait_for};
use plimsoll_skip::{Lack, skip};
use plimsoll_vm::{QemuVm, Qmp, VmError};
use rustix::process::Signal;
use serde_json::json;

use crate::limits::UnitLimits;
use crate::rig::{Attach, EVERYTHING, Ground, Line, Outcome, PLIMSOLL, ground, quiet_ground};

/// Longest time that a guest may stand still because of its tracer.
pub const STALL_MAX: Duration = Duration::from_millis(300);
/// How long a client tries to enable background snapshots.
const ENABLING_MAX: Duration = Duration::from_secs(10);
/// How long a guest is observed after a nemesis, or without one.
const OBSERVED: Duration = Duration::from_secs(3);
/// Traces enough that the guest comes to an armed page at once, and little enough that its batches are not made of traps.
pub const SAMPLE: &str = "--backend trap --rate 1/8 --rate-rule fixed --budget none";
/// A guest that comes to its sampled pages often enough to wait for a stopped tracer at once.
pub const WORKLOAD: &str = "workload=uniform mib=16 write_ratio=0.5";

/// The guest's longest stall while `work` is done and for a while after it, beyond the longest delay of the host's CPUs.
pub fn longest_stall(subject: &mut Subject, work: impl FnOnce()) -> Duration {
    subject.assert_goes_on();
    let (from, delays) = (Instant::now(), Delays::watch());
    work();
    thread::sleep(OBSERVED);
    // The round that a stall is in ends after it.
    subject.assert_goes_on();
    let stall = subject.console().longest_stall(from, Instant::now());
    let stall =
        stall.expect("a guest that reports its longest batch; rebuild its /init if it does not");
    beyond(stall, delays)
}

/// What a stall has that no delay of the host's CPUs explains.
pub fn beyond(stall: Duration, delays: Delays) -> Duration {
    let delay = delays.end();
    println!("a stall of {stall:?}; the host's CPUs were late by {delay:?}");
    stall.saturating_sub(delay)
}

/// Fails if a stall is longer than allowed, beyond what this host does to a guest that nobody traces.
pub fn assert_bounded(nemesis: &str, stall: Duration, untraced: Duration) {
    println!("longest stall: {nemesis} {stall:?}, untraced {untraced:?}");
    assert!(stall <= STALL_MAX + untraced, "{nemesis}: {stall:?}");
}

/// Fails unless the watchdog ended a tracer and said so.
pub fn assert_ended_by_watchdog(ended: &Outcome, subject: &Subject) {
    let kill = Signal::KILL.as_raw();
    assert_eq!(ended.signal, Some(kill), "{}", ended.complaint);
    let said = format!("the tracer of process {} served no access", subject.pid());
    assert!(ended.complaint.contains(&said), "{:?}", ended.complaint);
}

#[test]
fn a_tracer_that_is_stopped_holds_its_guest_for_less_than_300_ms() {
    let Some(ground) = quiet_ground() else { return };
    let mut subject = ground.boot("stopped", WORKLOAD);
    let footprint = subject.footprint();
    let untraced = longest_stall(&mut subject, || ());
    let mut stalls = Vec::new();
    // At different places of a period and a window.
    for delay_ms in [0, 7, 40, 110, 260] {
        let tracer = Attach::start(&subject.pid(), &format!("{SAMPLE} --period 1s"));
        tracer.next();
        let stop = || {
            thread::sleep(Duration::from_millis(delay_ms));
            send(tracer.pid(), Signal::STOP).unwrap();
        };
        let stall = longest_stall(&mut subject, stop);
        stalls.push(stall);
        // Between two windows nothing is armed, and it may stand still for as long as it likes.
        let may_be_between = delay_ms == 0;
        let _ = send(tracer.pid(), Signal::KILL);
        let ended = tracer.end();
        if !may_be_between || !ended.complaint.is_empty() {
            assert_ended_by_watchdog(&ended, &subject);
        }
        subject.assert_no_trap_is_left();
        subject.assert_left_as(&footprint);
    }
    // The host may be busier than it was.
    let untraced = untraced.max(longest_stall(&mut subject, || ()));
    for stall in stalls {
        assert_bounded("SIGSTOP", stall, untraced);
    }
}

#[test]
fn ctrl_z_does_not_stop_a_tracer() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("suspended", WORKLOAD);
    let tracer = Attach::start(&subject.pid(), &format!("{SAMPLE} --period 500ms"));
    tracer.next();
    send(tracer.pid(), Signal::TSTP).unwrap();
    for _ in 0..3 {
        assert!(tracer.next().number("traps") > 0.0);
    }
    subject.assert_goes_on();
    tracer.interrupt();
    tracer.end().assert_quiet_success();
}

#[test]
fn a_killed_tracer_and_a_monitor_that_is_taken_do_not_hold_the_guest() {
    let Some(ground) = quiet_ground() else { return };
    let mut subject = ground.boot("monitored", WORKLOAD);
    let untraced = longest_stall(&mut subject, || ());
    let options = format!("{SAMPLE} --period 500ms");
    let mut tracer = Attach::start(&subject.pid(), &options);
    tracer.next();
    let monitor = subject.guest.qmp().unwrap();
    let taken = longest_stall(&mut subject, || {
        for _ in 0..4 {
            tracer.next();
        }
    });
    drop(tracer);
    // It accepts connections and answers nobody, from before the tracer attaches until after it has ended.
    let pid = subject.pid();
    let hung = longest_stall(&mut subject, || {
        let tracer = Attach::start(&pid, &format!("{options} --periods 4"));
        tracer.end().assert_quiet_success();
    });
    drop(monitor);
    tracer = Attach::start(&subject.pid(), &options);
    tracer.next();
    let mut killed = Duration::ZERO;
    for delay_ms in [0, 30, 170, 390] {
        let kill = || {
            thread::sleep(Duration::from_millis(delay_ms));
            send(tracer.pid(), Signal::KILL).unwrap();
        };
        killed = killed.max(longest_stall(&mut subject, kill));
        subject.assert_no_trap_is_left();
        tracer = Attach::start(&subject.pid(), &options);
        tracer.next();
    }
    drop(tracer);
    let untraced = untraced.max(longest_stall(&mut subject, || ()));
    assert_bounded("monitor taken", taken, untraced);
    assert_bounded("monitor hung", hung, untraced);
    assert_bounded("SIGKILL", killed, untraced);
}

/// A control group of version 2. Dropped, it is removed.
pub struct Group(pub PathBuf);

impl Group {
    /// Makes one; `None` after saying why there is none.
    pub fn make() -> Option<Self> {
        let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(PathBuf::from);
        let root = roots
            .iter()
            .find(|root| root.join("cgroup.controllers").exists());
        let made = root.map(|root| {
            let folder = root.join(format!("plimsoll-test-{}", std::process::id()));
            fs::create_dir(&folder).map(|()| Self(folder))
        });
        match made {
            Some(Ok(group)) if group.0.join("cgroup.freeze").exists() => Some(group),
            made => {
                skip(
                    Lack::Host,
                    format_args!("no control group can be frozen here: {made:?}"),
                );
                None
            }
        }
    }

    pub fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).unwrap();
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("cgroup.freeze"), "0");
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_tracer_whose_control_group_is_frozen_holds_its_guest_for_less_than_300_ms() {
    let Some(ground) = quiet_ground() else { return };
    let Some(group) = Group::make() else { return };
    let mut subject = ground.boot("frozen", WORKLOAD);
    let untraced = longest_stall(&mut subject, || ());
    // By hand, and as `systemctl freeze plimsolld` would freeze it.
    let limits = UnitLimits::read();
    let by_hand = Command::new(PLIMSOLL);
    let within_unit = limits.as_ref().map(|limits| limits.command(PLIMSOLL));
    for (what, program) in [("by hand", Some(by_hand)), ("within the unit", within_unit)] {
        let Some(program) = program else { continue };
        let mut command = Command::new("sh");
        command.args(["-c", "echo 0 >\"$1\"; shift; exec \"$@\"", "sh"]);
        command.arg(group.0.join("cgroup.procs"));
        command.arg(program.get_program()).args(program.get_args());
        command.args(["attach", &subject.pid(), "-o", "json"]);
        command.args(format!("{SAMPLE} --period 1s").split_ascii_whitespace());
        let tracer = Attach::spawn(&mut command);
        tracer.next();
        let freeze = || {
            thread::sleep(Duration::from_millis(250));
            group.write("cgroup.freeze", "1");
        };
        let stall = longest_stall(&mut subject, freeze);
        let _ = send(tracer.pid(), Signal::KILL);
        group.write("cgroup.freeze", "0");
        assert_bounded(&format!("frozen control group, {what}"), stall, untraced);
        assert_ended_by_watchdog(&tracer.end(), &subject);
        subject.assert_no_trap_is_left();
    }
}

/// Switches a migration capability on or off.
pub fn switch(qmp: &mut Qmp, capability: &str, state: bool) -> Result<(), VmError> {
    let switched = json!([{ "capability": capability, "state": state }]);
    let switched = json!({ "capabilities": switched });
    qmp.execute("migrate-set-capabilities", switched).map(drop)
}

/// Switches a migration capability on.
pub fn enable(qmp: &mut Qmp, capability: &str) -> Result<(), VmError> {
    switch(qmp, capability, true)
}

/// Waits until a migration has the status `wanted`.
fn until_migration(qmp: &mut Qmp, wanted: &str) {
    wait_for(wanted, PATIENCE, || {
        let answer = qmp.execute("query-migrate", json!(null)).unwrap();
        let status = answer["status"].as_str().unwrap_or_default().to_owned();
        assert_ne!(status, "failed", "{answer}");
        (status == wanted).then_some(())
    });
}

/// Fails unless a VM can be traced, from attach to detach.
fn assert_traceable(subject: &Subject) {
    let options = "--budget 10% --period 500ms --periods 2";
    Attach::start(&subject.pid(), options)
        .end()
        .assert_quiet_success();
}

#[test]
fn a_post_copy_migration_of_a_traced_vm_completes_and_its_destination_is_traced_after() {
    let Some(ground) = ground() else { return };
    let folder = tempfile::tempdir().unwrap();
    let uri = format!("unix:{}", folder.path().join("migration").display());
    let workload = "workload=uniform mib=64 write_ratio=0.5";
    let mut source = ground.boot("source", workload);
    let mut config = ground.guest("destination", workload);
    config.extra_arguments = vec!["-incoming".to_owned(), uri.clone()];
    let mut destination = Subject::start(&ground.image, &config).unwrap();

    let tracer = Attach::start(&source.pid(), &format!("{EVERYTHING} --period 1s"));
    tracer.next();
    for monitor_is_taken in [false, true] {
        let _taken = monitor_is_taken.then(|| destination.guest.qmp().unwrap());
        let refused = Attach::start(&destination.pid(), "").end();
        assert_eq!(refused.code, Some(1), "{}", refused.complaint);
        let said = "the destination of a migration";
        assert!(refused.complaint.contains(said), "{}", refused.complaint);
    }

    enable(&mut destination.guest.qmp().unwrap(), "postcopy-ram").unwrap();
    let mut monitor = source.guest.qmp().unwrap();
    enable(&mut monitor, "postcopy-ram").unwrap();
    let slow = json!({ "max-bandwidth": 32 << 20 });
    monitor.execute("migrate-set-parameters", slow).unwrap();
    monitor.execute("migrate", json!({ "uri": uri })).unwrap();
    // The monitor is ours, as libvirt's would be: the tracer sees it all the same.
    let ended = tracer.end();
    assert_eq!(ended.code, Some(0), "{}", ended.complaint);
    assert!(
        ended.complaint.contains("is being migrated"),
        "{}",
        ended.complaint
    );
    source.assert_no_trap_is_left();
    until_migration(&mut monitor, "active");
    monitor
        .execute("migrate-start-postcopy", json!(null))
        .unwrap();
    until_migration(&mut monitor, "completed");

    drop(monitor);
    let refused = Attach::start(&source.pid(), "").end();
    assert_eq!(refused.code, Some(1), "{}", refused.complaint);
    destination.assert_goes_on();
    assert!(destination.guest.qmp().unwrap().status().unwrap().running);
    assert_traceable(&destination);
    destination.assert_goes_on();
}

/// Switches background snapshots on while the VM is traced, as a client would that tries again when QEMU finds the RAM
/// in use.
pub fn enable_snapshots(qmp: &mut Qmp) {
    wait_for("background snapshots", ENABLING_MAX, || {
        enable(qmp, "background-snapshot").ok()
    });
}

#[test]
fn a_background_snapshot_of_a_traced_vm_completes_and_the_vm_is_traced_after() {
    let Some(ground) = quiet_ground() else { return };
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    let mut source = ground.boot("snapshot", WORKLOAD);
    let off = |qmp: &mut Qmp| switch(qmp, "background-snapshot", false).unwrap();
    let take = |qmp: &mut Qmp| {
        let uri = format!("exec:cat >{}", snapshot.display());
        qmp.execute("migrate", json!({ "uri": uri })).unwrap();
        until_migration(qmp, "completed");
    };
    let alone = |source: &mut Subject| {
        let mut monitor = source.guest.qmp().unwrap();
        enable(&mut monitor, "background-snapshot").unwrap();
        let stall = longest_stall(source, || take(&mut monitor));
        off(&mut monitor);
        stall
    };
    let mut untraced = alone(&mut source);
    let mut stalls = Vec::new();
    for (options, monitor_is_held) in [
        (SAMPLE, false),
        (SAMPLE, true),
        ("--backend first-touch", false),
    ] {
        let tracer = Attach::start(&source.pid(), &format!("{options} --period 1s"));
        tracer.next();
        let mut monitor = source.guest.qmp().unwrap();
        enable_snapshots(&mut monitor);
        let ended = if monitor_is_held {
            // The tracer detects the snapshot itself.
            stalls.push(longest_stall(&mut source, || take(&mut monitor)));
            tracer.end()
        } else {
            // Its monitor shows the capability before the next period.
            drop(monitor);
            let ended = tracer.end();
            monitor = source.guest.qmp().unwrap();
            take(&mut monitor);
            ended
        };
        assert_eq!(ended.code, Some(0), "{}", ended.complaint);
        let said = if monitor_is_held {
            "a snapshot of its memory is being taken"
        } else {
            "its migration capability background-snapshot is on"
        };
        assert!(ended.complaint.contains(said), "{}", ended.complaint);
        drop(monitor);
        let refused = Attach::start(&source.pid(), "").end();
        assert_eq!(refused.code, Some(1), "{}", refused.complaint);
        off(&mut source.guest.qmp().unwrap());
        assert_traceable(&source);
        source.assert_goes_on();
    }
    // QEMU itself holds accesses to pages that it has not saved yet.
    untraced = untraced.max(alone(&mut source));
    for stall in stalls {
        assert_bounded("background snapshot", stall, untraced);
    }
    // These keep the RAM registered: QEMU refuses, and nothing else happens.
    for options in ["--backend write-scan", "--backend scan --writes"] {
        let tracer = Attach::start(&source.pid(), options);
        wait_for("a registered userfaultfd", PATIENCE, || {
            let states = source.vm.ram_states().unwrap();
            states.iter().any(|state| state.userfaultfd).then_some(())
        });
        enable(&mut source.guest.qmp().unwrap(), "background-snapshot").unwrap_err();
        source.assert_goes_on();
        tracer.interrupt();
        tracer.end().assert_quiet_success();
    }
    drop(source);

    let mut config = ground.guest("restored", WORKLOAD);
    let uri = format!("exec:cat {}", snapshot.display());
    config.extra_arguments = vec!["-incoming".to_owned(), uri];
    let mut restored = Subject::start(&ground.image, &config).unwrap();
    restored.assert_goes_on();
    assert_traceable(&restored);
}

/// A guest to which memory and CPUs can be plugged: of its RAM, one mapping is virtio-mem's.
fn growing(ground: &Ground, name: &str) -> GuestConfig {
    let mut config = ground.guest(name, "workload=uniform mib=32 write_ratio=0.5");
    let words = [
        "-machine",
        "q35,memory-backend=ram",
        "-m",
        "192M,slots=4,maxmem=2G",
        "-object",
        "memory-backend-memfd,id=ram,size=192M,share=on",
    ];
    config.ram = Some(words.map(str::to_owned).to_vec());
    let extra = [
        "-smp",
        "1,maxcpus=2",
        "-object",
        "memory-backend-memfd,id=virtio,size=512M,share=on",
        "-device",
        "virtio-mem-pci,id=virtio-mem,memdev=virtio,requested-size=0",
    ];
    config.extra_arguments = extra.map(str::to_owned).to_vec();
    config
}

/// Boots such a guest, without a driver for virtio-mem.
pub fn boot_growing(ground: &Ground, name: &str) -> Subject {
    ground.boot_as(&growing(ground, name))
}

/// Requests that a guest has this much of its virtio-mem device, and waits until its driver has plugged or unplugged it.
fn request_memory(monitor: &mut Qmp, mib: u64) {
    let begin = Instant::now();
    let bytes = mib << 20;
    let property = |name: &str| json!({ "path": "virtio-mem", "property": name });
    let mut requested = property("requested-size");
    requested["value"] = json!(bytes);
    monitor.execute("qom-set", requested).unwrap();
    wait_for("a guest that plugs its memory", PATIENCE, || {
        let size = monitor.execute("qom-get", property("size")).unwrap();
        (size == bytes).then_some(())
    });
    println!("the guest has {mib} MiB of it after {:?}", begin.elapsed());
}

/// Plugs memory into a guest, by a DIMM and by its virtio-mem device, and unplugs it; calls `changed` after each step with the
/// number of mappings that its RAM consists of.
fn plug_and_unplug(monitor: &mut Qmp, mut changed: impl FnMut(usize)) {
    let object = json!({ "qom-type": "memory-backend-memfd", "id": "more", "size": 128 << 20, "share": true });
    monitor.execute("object-add", object).unwrap();
    let device = json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" });
    monitor.execute("device_add", device).unwrap();
    changed(3);
    // The last request is lower, so the driver gives memory back, which QEMU discards.
    for mib in [64, 128, 0] {
        request_memory(monitor, mib);
        changed(3);
    }
    wait_for("a guest that lets its memory go", PATIENCE, || {
        // Refused while the guest has not answered the last request.
        let _ = monitor.execute("device_del", json!({ "id": "dimm" }));
        thread::sleep(Duration::from_millis(300));
        let gone = monitor.execute("object-del", json!({ "id": "more" }));
        gone.ok()
    });
    changed(2);
}

/// Waits until all of a VM's RAM, `mappings` of it, is traced, while its tracer prints at most three lines.
fn until_traced(tracer: &Attach, pid: u32, mappings: usize) {
    let is_traced = || {
        let vm = QemuVm::of_pid(pid).unwrap();
        let states = vm.ram_states().unwrap();
        states.len() == mappings && states.iter().all(|state| state.userfaultfd)
    };
    // From now on.
    tracer.lines_so_far();
    for _ in 0..3 {
        tracer.next();
        // The RAM is registered when the next window opens, soon after the line.
        for _ in 0..10 {
            if is_traced() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
    panic!("{mappings} mappings of RAM are not traced");
}

#[test]
fn plugged_memory_is_traced_within_a_period_and_unplugged_memory_ends_nothing() {
    let Some(ground) = quiet_ground() else { return };
    let config = GuestConfig {
        memory_device: true,
        ..growing(&ground, "plugged")
    };
    let image = match GuestImage::for_guest(&config) {
        Ok(image) => image,
        Err(error) => {
            skip(Lack::Live, format_args!("{error}"));
            return;
        }
    };
    let mut subject = Subject::boot(&image, &config).unwrap();
    let mut monitor = subject.guest.qmp().unwrap();
    // Plugging holds the guest up by itself, the more the busier the host is.
    let alone = |subject: &mut Subject, monitor: &mut Qmp| {
        longest_stall(subject, || plug_and_unplug(monitor, |_| ()))
    };
    let pid = subject.vm.pid;
    let before = alone(&mut subject, &mut monitor);
    let tracer = Attach::start(&subject.pid(), &format!("{SAMPLE} --period 1s"));
    until_traced(&tracer, pid, 2);
    let stall = longest_stall(&mut subject, || {
        plug_and_unplug(&mut monitor, |mappings| {
            until_traced(&tracer, pid, mappings);
        });
    });
    tracer.interrupt();
    tracer.end().assert_quiet_success();
    subject.assert_no_trap_is_left();
    let untraced = before.max(alone(&mut subject, &mut monitor));
    assert_bounded("memory plugged and unplugged", stall, untraced);
}

/// The number of vCPUs among which the overhead of a period was divided.
pub fn counted_vcpus(line: &Line) -> f64 {
    let taken = line.number("trap_seconds") + line.number("rearm_seconds");
    taken / (line.number("seconds") * line.number("overhead_ratio"))
}

/// Plugs the second virtual CPU.
pub fn plug_vcpu(monitor: &mut Qmp) -> Result<(), VmError> {
    let slots = monitor.execute("query-hotpluggable-cpus", json!(null))?;
    let slots = slots.as_array().unwrap();
    let free = slots.iter().find(|slot| slot.get("qom-path").is_none());
    let mut plug = free.unwrap()["props"].clone();
    plug["driver"] = free.unwrap()["type"].clone();
    plug["id"] = json!("second");
    monitor.execute("device_add", plug).map(drop)
}

/// Requests that the guest lets it go.
pub fn unplug_vcpu(monitor: &mut Qmp) {
    let unplug = json!({ "id": "second" });
    monitor.execute("device_del", unplug).unwrap();
}

#[test]
fn virtual_cpus_that_come_and_go_are_counted() {
    let Some(ground) = quiet_ground() else { return };
    let mut subject = boot_growing(&ground, "cpus");
    let untraced = longest_stall(&mut subject, || ());
    let tracer = Attach::start(&subject.pid(), &format!("{SAMPLE} --period 500ms"));
    let until_counted = |vcpus: f64| {
        let mut lines = (0..40).map(|_| tracer.next());
        let counted = lines.any(|line| (counted_vcpus(&line) - vcpus).abs() < 0.01);
        assert!(counted, "{vcpus} vCPUs were never counted");
    };
    until_counted(1.0);
    let mut monitor = subject.guest.qmp().unwrap();
    let (from, delays) = (Instant::now(), Delays::watch());
    plug_vcpu(&mut monitor).unwrap();
    until_counted(2.0);
    unplug_vcpu(&mut monitor);
    until_counted(1.0);
    drop(monitor);
    subject.assert_goes_on();
    let stall = subject.console().longest_stall(from, Instant::now());
    let stall = beyond(stall.unwrap(), delays);
    assert_bounded("vCPU plugged and unplugged", stall, untraced);
    tracer.interrupt();
    tracer.end().assert_quiet_success();
    subject.assert_no_trap_is_left();
}
