//! What can happen to a tracer or its VM at any time, against a guest that measures its own stalls.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_rig::{Subject, send};
use plimsoll_skip::{Lack, skip};
use rustix::process::Signal;

use crate::rig::{Attach, EVERYTHING, Ended, PLIMSOLL, ground};

/// Longest time that a guest may stand still because of its tracer.
const STALL_MAX: Duration = Duration::from_millis(300);
/// How long a guest is observed after a nemesis, or without one.
const OBSERVED: Duration = Duration::from_secs(3);
/// A guest that comes to its sampled pages often enough to wait for a stopped tracer at once.
const WORKLOAD: &str = "workload=uniform mib=16 write_ratio=0.5";

/// The guest's longest stall while `work` is done and for a while after it.
fn longest_stall(subject: &mut Subject, work: impl FnOnce()) -> Duration {
    subject.assert_goes_on();
    let from = Instant::now();
    work();
    thread::sleep(OBSERVED);
    // The round that a stall is in ends after it.
    subject.assert_goes_on();
    let stall = subject.console().longest_stall(from, Instant::now());
    stall.expect("a guest that reports its longest batch; rebuild its /init if it does not")
}

/// Fails if a stall is longer than allowed, beyond what this host does to a guest that nobody traces.
fn assert_bounded(nemesis: &str, stall: Duration, untraced: Duration) {
    println!("longest stall: {nemesis} {stall:?}, untraced {untraced:?}");
    assert!(stall <= STALL_MAX + untraced, "{nemesis}: {stall:?}");
}

/// Fails unless the watchdog ended a tracer and said so.
fn assert_ended_by_watchdog(ended: &Ended, subject: &Subject) {
    let kill = Signal::KILL.as_raw();
    assert_eq!(ended.signal, Some(kill), "{}", ended.complaint);
    let said = format!("the tracer of process {} served no access", subject.pid());
    assert!(ended.complaint.contains(&said), "{:?}", ended.complaint);
}

#[test]
fn a_tracer_that_is_stopped_holds_its_guest_for_less_than_300_ms() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("stopped", WORKLOAD);
    let footprint = subject.footprint();
    let untraced = longest_stall(&mut subject, || ());
    // At different places of a period and a window.
    for delay_ms in [0, 7, 40, 110, 260] {
        let tracer = Attach::start(&subject.pid(), &format!("{EVERYTHING} --period 500ms"));
        tracer.next();
        let stop = || {
            thread::sleep(Duration::from_millis(delay_ms));
            send(tracer.pid(), Signal::STOP).unwrap();
        };
        let stall = longest_stall(&mut subject, stop);
        assert_bounded("SIGSTOP", stall, untraced);
        // Between two windows nothing is armed, and it may stand still for as long as it likes.
        let may_be_between = delay_ms == 0;
        let _ = send(tracer.pid(), Signal::KILL);
        let ended = tracer.end();
        if !may_be_between || !ended.complaint.is_empty() {
            assert_ended_by_watchdog(&ended, &subject);
        }
        subject.assert_no_trap_is_left();
        assert_eq!(subject.footprint(), footprint);
    }
    subject.assert_goes_on();
}

#[test]
fn ctrl_z_does_not_stop_a_tracer() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("suspended", WORKLOAD);
    let tracer = Attach::start(&subject.pid(), &format!("{EVERYTHING} --period 500ms"));
    tracer.next();
    send(tracer.pid(), Signal::TSTP).unwrap();
    for _ in 0..3 {
        assert!(tracer.next().number("traps") > 0.0);
    }
    subject.assert_goes_on();
    tracer.interrupt();
    tracer.end().assert_quiet_success();
}

/// A control group of version 2. Dropped, it is removed.
struct Group(PathBuf);

impl Group {
    /// Makes one; `None` after saying why there is none.
    fn make() -> Option<Self> {
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
                    Lack::Live,
                    format_args!("no control group can be frozen here: {made:?}"),
                );
                None
            }
        }
    }

    fn write(&self, file: &str, text: &str) {
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
    let Some(ground) = ground() else { return };
    let Some(group) = Group::make() else { return };
    let mut subject = ground.boot("frozen", WORKLOAD);
    let untraced = longest_stall(&mut subject, || ());
    let mut command = Command::new("sh");
    command.args(["-c", "echo 0 >\"$1\"; shift; exec \"$@\"", "sh"]);
    command.arg(group.0.join("cgroup.procs"));
    command.args([PLIMSOLL, "attach", &subject.pid(), "-o", "json"]);
    command.args(format!("{EVERYTHING} --period 500ms").split_ascii_whitespace());
    let tracer = Attach::spawn(&mut command);
    tracer.next();
    let freeze = || {
        thread::sleep(Duration::from_millis(150));
        group.write("cgroup.freeze", "1");
    };
    let stall = longest_stall(&mut subject, freeze);
    assert_bounded("frozen control group", stall, untraced);
    let _ = send(tracer.pid(), Signal::KILL);
    assert_ended_by_watchdog(&tracer.end(), &subject);
    subject.assert_no_trap_is_left();
}
