//! How tracing ends: what is left in the VM, and what is said, whoever ends first.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::TraceMethod;
use plimsoll_skip::{Lack, skip};
use plimsoll_trap::{BackendRow, TraceConfig, TraceTarget};

use plimsoll_rig::{PATIENCE, Subject, send, wait_for};
use rustix::process::Signal;

use crate::rig::{
    Attach, EVERYTHING, MIB, Outcome, PLIMSOLL, ground, shared_ground, until_ended, with_backend,
};

/// Fails unless a VM can be traced, from attach to detach.
fn assert_traceable(subject: &Subject) {
    let ended = Attach::start(&subject.pid(), "--budget 10% --period 500ms --periods 1").end();
    ended.assert_quiet_success();
    assert!(ended.lines[0].number("traps") > 0.0);
}

#[test]
fn after_detach_the_guest_is_as_it_was() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut subject = ground.boot("detach", "workload=uniform mib=64 write_ratio=0.5");
    let footprint = subject.footprint();
    let untraced = page_faults_of_rounds(&mut subject);

    let options = format!("{EVERYTHING} --period 1s");
    let before = page_faults(subject.vm.pid);
    let tracer = Attach::start(&subject.pid(), &options);
    let traps = tracer.next().number("traps");
    // In mid trace, with all pages but the hot ones inaccessible.
    tracer.interrupt();
    let ended = tracer.end();
    ended.assert_quiet_success();
    // The kernel's count of what was trapped.
    let traced = page_faults(subject.vm.pid) - before;
    assert!(
        traps > 0.0 && traced as f64 >= traps,
        "{traps} traps, {traced} faults"
    );

    subject.assert_no_trap_is_left();
    // Each page may be missing once.
    subject.assert_goes_on();
    let after = page_faults_of_rounds(&mut subject);
    println!("page faults in rounds: {untraced} untraced, {after} after; {traced} while traced");
    assert!(
        after <= untraced + 64 * MIB / 10,
        "{after} after {untraced}"
    );
    subject.assert_left_as(&footprint);
    assert_traceable(&subject);
    subject.assert_left_as(&footprint);
    subject.assert_goes_on();
}

/// Page faults of a process so far, with those that a tracer served.
fn page_faults(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // proc(5): minflt is field 10, majflt field 12; the name before them may have blanks.
    let after_name = stat.rsplit_once(") ").unwrap().1;
    let fields: Vec<_> = after_name.split(' ').collect();
    [10, 12]
        .map(|field| fields[field - 3].parse::<u64>().unwrap())
        .iter()
        .sum()
}

/// Page faults of a VM while its guest does a few rounds.
fn page_faults_of_rounds(subject: &mut Subject) -> u64 {
    let before = page_faults(subject.vm.pid);
    subject.assert_goes_on();
    page_faults(subject.vm.pid) - before
}

/// Whether calls of a tracer's child can be told apart here; says so if not.
fn has_strace() -> bool {
    let own = std::process::id();
    if !Path::new(&format!("/proc/{own}/task/{own}/children")).exists() {
        skip(
            Lack::Live,
            "this kernel does not list the children of a process",
        );
        return false;
    }
    let version = Command::new("strace").arg("-V").output();
    if version.is_err() {
        skip(Lack::Program, "strace");
    }
    version.is_ok()
}

/// Attaches under strace, which stops the child of the tracer after its call number `call` of ptrace(), from 1.
fn attach_stopped_at(call: u32, log: &Path, subject: &Subject, options: &str) -> Attach {
    let stop = format!("inject=ptrace:signal=SIGSTOP:when={call}");
    let mut command = Command::new("strace");
    // -D: the program is our child, and strace apart from both.
    command.args(["-D", "-f", "-qq", "-e", "trace=ptrace", "-e", &stop, "-o"]);
    command
        .arg(log)
        .args([PLIMSOLL, "attach", &subject.pid(), "-o", "json"]);
    Attach::spawn(command.args(with_backend(options)))
}

/// A child process of the tracer borrows a thread of QEMU to open the userfaultfd. strace stops it after each of its calls
/// of ptrace() in turn, and the tracer is killed then.
#[test]
fn a_tracer_killed_while_it_attaches_leaves_the_guest_running_and_right() {
    if !has_strace() {
        return;
    }
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut subject = ground.boot("attaching", "workload=uniform mib=32 write_ratio=0.5");
    let footprint = subject.footprint();
    let folder = tempfile::tempdir().unwrap();
    let (mut calls, mut borrowed) = (0, 0);
    loop {
        let log = folder.path().join(format!("{calls}"));
        let tracer = attach_stopped_at(calls + 1, &log, &subject, EVERYTHING);
        let Some(child) = stopped_child(&tracer, &log, &subject) else {
            break;
        };
        calls += 1;
        let status = fs::read_to_string(format!("/proc/{}/status", subject.vm.pid)).unwrap();
        borrowed += u32::from(status.contains(&format!("TracerPid:\t{child}\n")));
        drop(tracer);
        send(child, Signal::CONT).unwrap();
        until_ended(child);
        subject.wait_until_untraced();
        println!("killed after call {calls}");
        subject.assert_left_as(&footprint);
    }
    println!("killed after each of {calls} calls, {borrowed} times while a thread was borrowed");
    // The last call lets the thread go.
    assert!(
        borrowed >= 10 && borrowed + 1 == calls,
        "{borrowed} of {calls}"
    );
    subject.wait_until_untraced();
    subject.assert_goes_on();
    assert_traceable(&subject);
}

/// SIGSTOP cannot be kept from a borrowed thread; who sent it finds the VM stopped, though later.
#[test]
fn a_vm_that_is_stopped_while_a_tracer_attaches_is_traced_and_stays_stopped() {
    if !has_strace() {
        return;
    }
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut subject = ground.boot("stopping", "workload=uniform mib=32 write_ratio=0.5");
    let footprint = subject.footprint();
    let folder = tempfile::tempdir().unwrap();
    let mut calls = 0;
    loop {
        let log = folder.path().join(format!("{calls}"));
        // No access waits for it, so that strace, which makes it slow, harms nobody.
        let options = "--backend write-scan --period 500ms --periods 1";
        let tracer = attach_stopped_at(calls + 1, &log, &subject, options);
        let Some(child) = stopped_child(&tracer, &log, &subject) else {
            break;
        };
        calls += 1;
        send(subject.vm.pid, Signal::STOP).unwrap();
        send(child, Signal::CONT).unwrap();
        tracer.end().assert_quiet_success();
        subject.wait_until_untraced();
        wait_for("a stopped VM", PATIENCE, || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", subject.vm.pid)).unwrap();
            stat.rsplit_once(") ")
                .unwrap()
                .1
                .starts_with('T')
                .then_some(())
        });
        send(subject.vm.pid, Signal::CONT).unwrap();
        println!("stopped at call {calls}");
        subject.assert_left_as(&footprint);
    }
    println!("stopped at each of {calls} calls");
    assert!(calls >= 20, "{calls}");
    subject.assert_goes_on();
}

/// Waits until strace has stopped the child of a tracer; `None` if it traps accesses, having made fewer calls than that.
fn stopped_child(tracer: &Attach, log: &Path, subject: &Subject) -> Option<u32> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let stopped = fs::read_to_string(log).is_ok_and(|log| log.contains("stopped by SIGSTOP"));
        if stopped {
            return Some(tracer.child().expect("a stopped child"));
        }
        let states = subject.vm.ram_states().unwrap();
        if states.iter().any(|state| state.userfaultfd) {
            return None;
        }
        assert!(
            Instant::now() < deadline,
            "the tracer neither stops nor attaches"
        );
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_tracer_killed_in_mid_trace_leaves_the_guest_running_and_right() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot(
        "killed",
        "workload=uniform mib=64 write_ratio=0.5 seconds=32",
    );
    let footprint = subject.footprint();
    let options = format!("{EVERYTHING} --period 500ms");
    for delay_ms in [3, 9, 21, 48, 130, 340, 700, 1600] {
        let tracer = Attach::start(&subject.pid(), &options);
        thread::sleep(Duration::from_millis(delay_ms));
        drop(tracer);
        subject.assert_goes_on();
        subject.assert_no_trap_is_left();
        println!("killed after {delay_ms} ms");
        subject.assert_left_as(&footprint);
    }
    assert_traceable(&subject);
    subject.assert_ends_sound();
}

#[test]
fn a_tracer_dropped_without_detaching_takes_its_traps_with_it() {
    let Some(ground) = ground() else {
        return;
    };
    let mut subject = ground.boot("dropped", "workload=uniform mib=32 write_ratio=0.5");
    let target = TraceTarget {
        is_vm: true,
        pid: subject.vm.pid,
        ram: subject.vm.ram.clone(),
        locked: false,
        userfault: false,
        vcpu_threads: subject.vm.vcpus.iter().map(|vcpu| vcpu.thread_id).collect(),
    };
    let config = TraceConfig {
        period: Duration::from_millis(500),
        scale: 1,
        budget: Some(0.5),
        ..TraceConfig::default()
    };
    let traps = BackendRow::of(TraceMethod::Traps);
    let mut tracer = traps.attach(&target, &config).unwrap();
    let (mut references, ram_pages) = (0, tracer.ram_pages());
    let (is_registered, is_done) = (AtomicBool::new(false), AtomicBool::new(false));
    let states = || subject.vm.ram_states().unwrap();
    let report = thread::scope(|scope| {
        // In a window: batches may be delivered after it.
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) && !states()[0].userfaultfd {
                thread::sleep(Duration::from_millis(2));
            }
            is_registered.store(!is_done.load(Ordering::Relaxed), Ordering::Relaxed);
        });
        let report = tracer.run_period(&AtomicBool::new(false), &mut |batch| {
            references += batch.pages().len() as u64;
            assert!(batch.pages().iter().all(|page| page.0 < ram_pages));
        });
        is_done.store(true, Ordering::Relaxed);
        report.unwrap()
    });
    assert!(references > 0 && is_registered.into_inner());
    assert_eq!(references, report.traps.taken);
    drop(tracer);
    subject.assert_no_trap_is_left();
    subject.assert_goes_on();
}

/// Fails unless the run ended well, said that the VM ended, and told what it had seen.
fn assert_tells_of_the_end(ended: &Outcome, pid: &str) {
    assert_eq!(ended.code, Some(0), "{}", ended.complaint);
    let said = format!("plimsoll: the VM ended: its process {pid} is gone\n");
    assert_eq!(ended.complaint, said);
    assert!(ended.last().is_final());
    let points = ended.last().json["curve"]["points"].as_array();
    assert!(points.is_some_and(|points| points.len() > 1));
}

#[test]
fn a_vm_that_quits_in_mid_trace_ends_the_run_with_what_was_seen() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut subject = ground.boot("quits", "workload=uniform mib=32");
    let options = format!("{EVERYTHING} --period 1s");
    let tracer = Attach::start(&subject.pid(), &options);
    tracer.next();
    tracer.next();
    thread::sleep(Duration::from_millis(300));
    subject.guest.qmp().unwrap().quit().unwrap();
    assert_tells_of_the_end(&tracer.end(), &subject.pid());
}

#[test]
fn a_guest_that_powers_off_in_mid_trace_ends_the_run_with_what_was_seen() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("ends", "workload=uniform mib=32 write_ratio=0.5 seconds=10");
    let options = format!("{EVERYTHING} --period 1s");
    let ended = Attach::start(&subject.pid(), &options).end();
    assert_tells_of_the_end(&ended, &subject.pid());
    assert!(ended.periods().count() >= 2);
    subject.assert_ends_sound();
}

#[test]
fn a_vm_that_ends_within_its_first_period_still_gives_its_curve() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut subject = ground.boot("early", "workload=uniform mib=32");
    let tracer = Attach::start(&subject.pid(), &format!("{EVERYTHING} --period 1m"));
    thread::sleep(Duration::from_secs(3));
    subject.guest.qmp().unwrap().quit().unwrap();
    assert_tells_of_the_end(&tracer.end(), &subject.pid());
}
