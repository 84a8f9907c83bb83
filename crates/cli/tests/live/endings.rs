//! How tracing ends: what is left in the VM, and what is said, whoever ends first.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_trap::{TraceConfig, TraceTarget, Tracer};

use crate::rig::{Attach, EVERYTHING, Ended, Subject, ground, wait_until_ended};

/// Fails unless a VM can be traced, from attach to detach.
fn assert_traceable(subject: &Subject) {
    let ended = Attach::start(&subject.pid(), "--budget 10% --period 500ms --periods 1").end();
    ended.assert_quiet_success();
    assert!(ended.lines[0].number("traps") > 0.0);
}

#[test]
fn after_detach_the_guest_is_as_it_was() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("detach", "workload=uniform mib=64 write_ratio=0.5");
    let footprint = subject.footprint();
    let untraced = subject.speed(Duration::from_secs(3));

    let options = format!("{EVERYTHING} --period 1s");
    let tracer = Attach::start(&subject.pid(), &options);
    tracer.next();
    let traced = subject.speed(Duration::from_secs(2));
    // In mid trace, with all pages but the hot ones inaccessible.
    tracer.interrupt();
    let ended = tracer.end();
    ended.assert_quiet_success();

    let after = subject.speed(Duration::from_secs(3));
    println!("{untraced:.0} visits a second untraced, {traced:.0} traced, {after:.0} after");
    assert!(after >= untraced * 0.7, "{after} after {untraced}");
    assert!(traced < untraced, "every page was to be trapped");
    subject.assert_no_trap_is_left();
    assert_eq!(subject.footprint(), footprint);
    assert_traceable(&subject);
    assert_eq!(subject.footprint(), footprint);
    subject.assert_goes_on();
}

/// A child process of the tracer borrows a thread of QEMU to open the userfaultfd; as soon as
/// there is one, the tracer is killed.
#[test]
fn a_tracer_killed_while_it_attaches_leaves_the_guest_running_and_right() {
    let own = std::process::id();
    if !Path::new(&format!("/proc/{own}/task/{own}/children")).exists() {
        println!("SKIPPED: this kernel does not list the children of a process");
        return;
    }
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("attaching", "workload=uniform mib=32 write_ratio=0.5");
    let footprint = subject.footprint();
    let mut killed_in_time = 0;
    for _ in 0..40 {
        let tracer = Attach::start(&subject.pid(), EVERYTHING);
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut child = tracer.child();
        while child.is_none() && Instant::now() < deadline {
            child = tracer.child();
        }
        killed_in_time += u32::from(tracer.child().is_some());
        drop(tracer);
        // It may not even have begun; untraced until then proves nothing.
        if let Some(child) = child {
            wait_until_ended(child);
        }
        subject.wait_until_untraced();
        assert_eq!(subject.footprint(), footprint);
    }
    println!("{killed_in_time} of 40 tracers killed while a thread was borrowed");
    assert!(killed_in_time > 0);
    subject.assert_goes_on();
    assert_traceable(&subject);
}

#[test]
fn a_tracer_killed_in_mid_trace_leaves_the_guest_running_and_right() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot(
        "killed",
        "workload=uniform mib=64 write_ratio=0.5 seconds=22",
    );
    let footprint = subject.footprint();
    let options = format!("{EVERYTHING} --period 500ms");
    for delay_ms in [3, 9, 21, 48, 130, 340, 700, 1600] {
        let tracer = Attach::start(&subject.pid(), &options);
        thread::sleep(Duration::from_millis(delay_ms));
        drop(tracer);
        subject.assert_goes_on();
        subject.assert_no_trap_is_left();
        assert_eq!(subject.footprint(), footprint, "killed after {delay_ms} ms");
    }
    assert_traceable(&subject);
    subject.assert_ends_with_a_sound_audit();
}

#[test]
fn a_tracer_dropped_without_detaching_takes_its_traps_with_it() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("dropped", "workload=uniform mib=32 write_ratio=0.5");
    let target = TraceTarget {
        pid: subject.vm.pid,
        ram: subject.vm.ram.clone(),
        locked: false,
        vcpu_threads: subject.vm.vcpus.iter().map(|vcpu| vcpu.thread_id).collect(),
    };
    let config = TraceConfig {
        period: Duration::from_millis(500),
        scale: 1,
        budget: Some(0.5),
        ..TraceConfig::default()
    };
    let mut tracer = Tracer::attach(&target, config).unwrap();
    assert!(subject.vm.ram_states().unwrap()[0].userfaultfd);
    let (mut references, ram_pages) = (0, tracer.ram_pages());
    let report = tracer
        .run_period(&AtomicBool::new(false), &mut |batch| {
            references += batch.pages().len() as u64;
            assert!(batch.pages().iter().all(|page| page.0 < ram_pages));
        })
        .unwrap();
    assert!(references > 0);
    assert_eq!(references, report.traps.taken);
    drop(tracer);
    subject.assert_no_trap_is_left();
    subject.assert_goes_on();
}

/// Fails unless the run ended well, said that the VM ended, and told what it had seen.
fn assert_tells_of_the_end(ended: &Ended, pid: &str) {
    assert_eq!(ended.code, Some(0), "{}", ended.complaint);
    let said = format!("plimsoll: the VM ended: its process {pid} is gone\n");
    assert_eq!(ended.complaint, said);
    assert!(ended.last().is_final());
    let points = ended.last().json["curve"]["points"].as_array();
    assert!(points.is_some_and(|points| points.len() > 1));
}

#[test]
fn a_vm_that_quits_in_mid_trace_ends_the_run_with_what_was_seen() {
    let Some(ground) = ground() else { return };
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
    let mut subject = ground.boot("ends", "workload=uniform mib=32 write_ratio=0.5 seconds=4");
    let options = format!("{EVERYTHING} --period 1s");
    let ended = Attach::start(&subject.pid(), &options).end();
    assert_tells_of_the_end(&ended, &subject.pid());
    assert!(ended.periods().count() >= 2);
    subject.assert_ends_with_a_sound_audit();
}

#[test]
fn a_vm_that_ends_within_its_first_period_still_gives_its_curve() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("early", "workload=uniform mib=32");
    let tracer = Attach::start(&subject.pid(), &format!("{EVERYTHING} --period 1m"));
    thread::sleep(Duration::from_secs(3));
    subject.guest.qmp().unwrap().quit().unwrap();
    assert_tells_of_the_end(&tracer.end(), &subject.pid());
}
