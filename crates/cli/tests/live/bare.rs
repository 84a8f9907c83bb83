//! Guests without an operating system, under TCG and, where it runs programs, KVM: the same tests on virtual CPUs of both kinds.

use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::Accelerator;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_rig::{AcceleratorChoice, Boot, GuestConfig, Subject};
use plimsoll_skip::{Lack, skip};
use plimsoll_vm::{KvmSupport, Stalls, detect};

use crate::nemesis::{SAMPLE, counted_vcpus, plug_vcpu, unplug_vcpu};
use crate::rig::{Attach, EVERYTHING, Ground, Line, MIB, ground, quiet_ground, shared_ground};

/// Boots a guest of one vCPU under each accelerator in turn, and passes it to a test.
fn under_each(ground: Option<Ground>, name: &str, workload: &str, test: impl Fn(&Ground, Subject)) {
    under_each_with(1, ground, name, workload, test);
}

/// The same with this number of vCPUs.
fn under_each_with(
    vcpus: u32,
    ground: Option<Ground>,
    name: &str,
    workload: &str,
    test: impl Fn(&Ground, Subject),
) {
    let Some(ground) = ground else { return };
    for accelerator in accelerators(name) {
        println!("under {accelerator}:");
        let config = GuestConfig {
            vcpus,
            ..bare(&ground, name, accelerator, workload)
        };
        let subject = Subject::boot(Boot::Bare, &config).unwrap();
        assert_eq!(subject.vm.accelerator, Some(accelerator));
        test(&ground, subject);
    }
}

/// The accelerators of this host; a lack of KVM is recorded for the test `name`.
fn accelerators(name: &str) -> Vec<Accelerator> {
    let detection = detect();
    if detection.kvm == KvmSupport::None {
        skip(Lack::Kvm, format_args!("{name}: {}", detection.reason));
        vec![Accelerator::Tcg]
    } else {
        vec![Accelerator::Tcg, Accelerator::Kvm]
    }
}

/// A guest of one vCPU under an accelerator.
fn bare(ground: &Ground, name: &str, accelerator: Accelerator, workload: &str) -> GuestConfig {
    GuestConfig {
        accelerator: match accelerator {
            Accelerator::Kvm => AcceleratorChoice::Kvm,
            Accelerator::Tcg => AcceleratorChoice::Tcg,
        },
        memory_mib: 128,
        ..ground.guest(&format!("{name}-{accelerator}"), workload)
    }
}

/// Sum of a number over periods.
fn sum(lines: &[Line], key: &str) -> f64 {
    let periods = lines.iter().filter(|line| !line.is_final());
    periods.map(|line| line.number(key)).sum()
}

#[test]
fn every_page_is_traced_and_hardly_an_access_is_lost() {
    let workload = "workload=uniform mib=32 write_ratio=0.5 work=32";
    under_each(ground(), "every", workload, |_, mut subject| {
        let footprint = subject.footprint();
        let options = format!("{EVERYTHING} --period 3s --periods 3");
        let ended = Attach::start(&subject.pid(), &options).end();
        ended.assert_quiet_success();
        let (traps, lost) = (sum(&ended.lines, "traps"), sum(&ended.lines, "lost"));
        println!("{traps} traps, {lost} lost");
        // A page in use by the kernel at the time stays accessible.
        assert!(traps > 5_000.0 && lost <= traps / 10_000.0);
        subject.assert_goes_on();
        subject.assert_no_trap_is_left();
        subject.assert_left_as(&footprint);
    });
}

#[test]
fn accesses_of_two_vcpus_are_traced_and_none_waits_for_ever() {
    let workload = "workload=sequential mib=32 write_ratio=0.5 work=32";
    under_each_with(2, ground(), "two", workload, |_, mut subject| {
        assert_eq!(subject.vm.vcpus.len(), 2);
        let footprint = subject.footprint();
        let options = format!("{EVERYTHING} --period 2s --periods 2");
        let ended = Attach::start(&subject.pid(), &options).end();
        ended.assert_quiet_success();
        let (traps, lost) = (sum(&ended.lines, "traps"), sum(&ended.lines, "lost"));
        println!("{traps} traps, {lost} lost");
        // A page in use by the kernel at the time stays accessible.
        assert!(traps > 1_000.0 && lost <= traps / 1_000.0);
        subject.assert_goes_on();

        let ended = Attach::start(&subject.pid(), "--budget 20% --period 2s --periods 5").end();
        ended.assert_quiet_success();
        let found: Vec<_> = ended.periods().map(Line::estimate).collect();
        println!("{} pages: {found:?}", 32 * MIB);
        // Both vCPUs and the tracer share the CPUs: one that does not run touches nothing.
        let each_us = sum(&ended.lines, "trap_seconds") / sum(&ended.lines, "traps") * 1e6;
        if each_us > 300.0 {
            let why = format!("two: the host is too busy, a trap takes {each_us:.0} µs");
            skip(Lack::Host, format_args!("{why}"));
        } else {
            let is_near = |found: f64| (found / (32 * MIB) as f64 - 1.0).abs() <= 0.1;
            // The rate settles in the first periods.
            assert!(found[2..].iter().flatten().any(|&found| is_near(found)));
        }

        drop(Attach::start(&subject.pid(), &options));
        subject.wait_until_untraced();
        subject.assert_goes_on();
        subject.assert_no_trap_is_left();
        subject.assert_left_as(&footprint);
    });
}

#[test]
fn a_vcpu_that_is_plugged_and_unplugged_is_traced_and_counted() {
    let Some(ground) = shared_ground() else {
        return;
    };
    for accelerator in accelerators("plugged") {
        println!("under {accelerator}:");
        let mut config = bare(&ground, "plugged", accelerator, "workload=uniform mib=16");
        config.extra_arguments = ["-smp", "1,maxcpus=2"].map(str::to_owned).to_vec();
        let mut subject = Subject::boot(Boot::Bare, &config).unwrap();
        let tracer = Attach::start(&subject.pid(), &format!("{SAMPLE} --period 500ms"));
        // Each vCPU visits a half of the array.
        let until_counted = |vcpus: f64| {
            let is_it = |line: &Line| {
                let touched = line.number("distinct_pages") / line.number("tracked_pages");
                let counted = counted_vcpus(line);
                println!("{counted} vCPUs, {touched} of the pages");
                (counted - vcpus).abs() < 0.01 && (touched > 0.7) == (vcpus > 1.0) && touched > 0.0
            };
            let mut lines = (0..40).map(|_| tracer.next());
            assert!(lines.any(|line| is_it(&line)), "{vcpus} vCPUs never traced");
        };
        until_counted(1.0);
        let mut monitor = subject.guest.qmp().unwrap();
        if let Err(error) = plug_vcpu(&mut monitor) {
            let why = format_args!("plugged: no vCPU is plugged under {accelerator}: {error}");
            skip(Lack::Kvm, why);
            assert_eq!(accelerator, Accelerator::Kvm, "{error}");
            continue;
        }
        until_counted(2.0);
        unplug_vcpu(&mut monitor);
        until_counted(1.0);
        drop(monitor);
        subject.assert_goes_on();
        tracer.interrupt();
        tracer.end().assert_quiet_success();
        subject.assert_no_trap_is_left();
    }
}

#[test]
fn a_backend_chosen_by_its_cost_is_reported_with_the_reasons() {
    let workload = "workload=sequential mib=16";
    under_each(shared_ground(), "auto", workload, |_, mut subject| {
        let options = "--backend auto --period 1s --periods 2";
        let ended = Attach::start(&subject.pid(), options).end();
        ended.assert_quiet_success();
        let periods: Vec<_> = ended.periods().collect();
        let candidates = periods[0].json["choice"].as_array().unwrap();
        println!("{candidates:?}");
        assert!(candidates.len() >= 2 && periods[1].json["choice"].is_null());
        let cost = |candidate: &serde_json::Value| candidate["curve_seconds"].as_f64();
        let costs = candidates.iter().filter_map(|one| Some((cost(one)?, one)));
        // First touches also at up to 1.5 times the least cost.
        let worth = |(cost, one): &(f64, &serde_json::Value)| match one["backend"] == "first-touch"
        {
            true => cost / 1.5,
            false => *cost,
        };
        let best = costs
            .min_by(|a, b| worth(a).total_cmp(&worth(b)))
            .unwrap()
            .1;
        for candidate in candidates {
            let is_best = candidate["backend"] == best["backend"];
            assert_eq!(candidate["is_chosen"], is_best, "{candidate}");
            assert!(!candidate["why"].as_str().unwrap().is_empty());
        }
        assert_eq!(periods[0].json["method"], best["backend"]);

        // An option of one backend leaves no other.
        let options = "--backend auto --hot-set 32 --period 1s --periods 1";
        let ended = Attach::start(&subject.pid(), options).end();
        let first = ended.periods().next().unwrap();
        assert_eq!(first.json["method"], "trap");
        assert_eq!(first.json["choice"].as_array().unwrap().len(), 1);
        subject.assert_goes_on();
    });
}

#[test]
fn steps_of_the_working_set_are_found() {
    let workload = "workload=steps steps_mib=16,48,16 step_ms=6000";
    under_each(ground(), "steps", workload, |_, mut subject| {
        let from = Instant::now();
        let tracer = Attach::start(&subject.pid(), "--budget 10% --period 1s --periods 17");
        let ended = tracer.end();
        ended.assert_quiet_success();
        // A page in use by the kernel at the time stays accessible.
        let (traps, lost) = (sum(&ended.lines, "traps"), sum(&ended.lines, "lost"));
        assert!(lost <= traps / 1000.0, "{lost} of {traps} lost");
        let log = subject.listen().unwrap();
        // The first step began before.
        let mut steps = vec![(from, 16 * MIB)];
        steps.extend(
            log.steps()
                .iter()
                .filter(|step| step.0 > from)
                .map(|step| (step.0, step.1.0)),
        );
        let (mut judged, mut good) = (0, 0);
        for line in ended.periods() {
            let begin = line.at - Duration::from_secs_f64(line.number("seconds"));
            let within = |at: Instant| steps.iter().rfind(|step| step.0 <= at).map(|step| step.1);
            // A period and the one before lie whole in the step.
            let Some(truth) = within(line.at).filter(|&truth| {
                begin - Duration::from_millis(1100) > from
                    && within(begin - Duration::from_millis(1100)) == Some(truth)
            }) else {
                continue;
            };
            let found = line.estimate();
            println!("{truth} pages: {found:?}");
            judged += 1;
            let is_near = |found: f64| (found / truth as f64 - 1.0).abs() <= 0.1;
            good += usize::from(found.is_some_and(is_near));
        }
        assert!(judged >= 6 && good * 4 >= judged * 3, "{good} of {judged}");
        subject.assert_goes_on();
    });
}

/// Loops that take the guest less and more time than first touches resolve.
#[test]
fn misses_of_loops_at_the_speed_of_memory_are_those_that_the_guest_counts() {
    let Some(ground) = quiet_ground() else { return };
    if !accelerators("fast loops").contains(&Accelerator::Kvm) {
        return;
    }
    for mib in [16, 32, 64] {
        // What others do on the machine changes what a trap takes of the guest's time, by which its time is computed.
        let mut tries = Vec::new();
        while tries.len() < 3 && !tries.contains(&(true, true)) {
            tries.push(misses_of_a_loop(&ground, mib));
        }
        assert!(tries.iter().any(|(is_bounded, _)| *is_bounded), "{mib} MiB");
        if !tries.contains(&(true, true)) {
            // What docs/first-touch.md says of traps, which no trial shows.
            skip(
                Lack::Host,
                format_args!(
                    "a loop of {mib} MiB: pages that are armed take the guest more time here than in a trial, and its misses were found too few"
                ),
            );
        }
    }
}

/// Whether the curve of a loop has no more misses than the guest counts, and whether it has no fewer and starts where it is resolved.
fn misses_of_a_loop(ground: &Ground, mib: u64) -> (bool, bool) {
    let workload = format!("workload=sequential mib={mib}");
    let config = bare(ground, "fast-loop", Accelerator::Kvm, &workload);
    let mut subject = Subject::boot(Boot::Bare, &config).unwrap();
    let from = Instant::now();
    let options = "--backend first-touch --budget 20% --period 1s --periods 2 --curve";
    let ended = Attach::start(&subject.pid(), options).end();
    let to = Instant::now();
    ended.assert_quiet_success();
    subject.assert_goes_on();
    let (visits, took) = subject.listen().unwrap().visits(from, to);
    // Every visit misses in a memory that is smaller than the loop.
    let truth = visits as f64 / took.as_secs_f64();
    let curve: CurveJson = serde_json::from_value(ended.last().json["curve"].clone()).unwrap();
    let edge = mib * MIB;
    let start = curve.points[0].size_pages;
    let pass_ms = edge as f64 / truth * curve.vcpu_seconds_per_second.unwrap() * 1e3;
    println!("{mib} MiB in {pass_ms:.2} ms: from {start} pages of {edge}");
    // What is reached within a millisecond is not resolved.
    let (mut is_bounded, mut is_found) = (true, pass_ms > 0.9 || start * 100 >= edge * 98);
    for percent in [50, 60, 70, 80, 90] {
        let Some(misses) = curve.misses_at(edge * percent / 100) else {
            continue;
        };
        let [low, found, high] = [
            misses.misses_low_per_second,
            misses.misses_per_second,
            misses.misses_high_per_second,
        ]
        .map(|misses| misses / truth);
        println!(
            "{percent} % of {mib} MiB: {found:.2} ({low:.2} to {high:.2}) of {truth:.3e} misses/s"
        );
        // On a busy host a trap takes more of the guest's time than in a trial, and the guest's speed changes.
        is_bounded &= low <= 1.3;
        is_found &= high >= 0.7;
    }
    (is_bounded, is_found)
}

#[test]
fn a_tracer_killed_in_mid_trace_leaves_the_guest_as_it_was() {
    let workload = "workload=uniform mib=32 write_ratio=0.5 work=32";
    under_each(shared_ground(), "killed", workload, |_, mut subject| {
        let footprint = subject.footprint();
        for delay_ms in [1, 40, 130, 250, 700, 1300] {
            let tracer = Attach::start(&subject.pid(), &format!("{EVERYTHING} --period 3s"));
            thread::sleep(Duration::from_millis(delay_ms));
            // Dropped, it is killed.
            drop(tracer);
            subject.wait_until_untraced();
            subject.assert_goes_on();
            subject.assert_no_trap_is_left();
        }
        subject.assert_left_as(&footprint);
    });
}

/// What the guest lost between two times, with the time of the rounds that it reported.
fn stalls(subject: &mut Subject, (from, to): (Instant, Instant)) -> (Stalls, Duration) {
    // The last round within it may be on its way.
    subject.assert_goes_on();
    subject.listen().unwrap().stalls(from, to)
}

/// Share of the time in which the guest stood still by its own clock; the time is what `work` returns.
fn stalled(subject: &mut Subject, work: impl FnOnce() -> (Instant, Instant)) -> f64 {
    let (stalls, length) = stalls(subject, work());
    (stalls.time + stalls.long_time).as_secs_f64() / length.as_secs_f64().max(1e-9)
}

/// Visits of the guest that met an absent page, in a second of `work`.
fn stalls_per_second(subject: &mut Subject, work: impl FnOnce()) -> f64 {
    let from = Instant::now();
    work();
    let (stalls, length) = stalls(subject, (from, Instant::now()));
    assert!(length > Duration::from_secs(1), "{length:?} were reported");
    stalls.count as f64 / length.as_secs_f64()
}

/// Under KVM every page that a scan may protect is taken out of the VM's page tables.
#[test]
fn write_scans_cost_a_guest_that_reads_no_faults() {
    let workload = "workload=uniform mib=64";
    under_each(quiet_ground(), "reader", workload, |_, mut subject| {
        let pid = subject.pid();
        let untraced = stalls_per_second(&mut subject, || thread::sleep(Duration::from_secs(3)));
        let traced = stalls_per_second(&mut subject, || {
            let options = "--backend write-scan --budget none --rate-rule fixed --scan-interval 25ms --period 2s --periods 3";
            Attach::start(&pid, options).end().assert_quiet_success();
        });
        println!("{untraced:.0} stalls a second untraced, {traced:.0} traced");
        assert!(traced < 2.0 * untraced + 1000.0);
    });
}

#[test]
fn the_account_is_what_the_guest_loses() {
    /// Largest factor between the tracer's account and the guest's.
    const FACTOR: f64 = 1.3;
    /// The same where the account is the larger one, with a budget: it also has what the guest does not count as a stall.
    const FACTOR_ABOVE: f64 = 1.5;
    /// A host on which an untraced guest stands still for more cannot judge.
    const QUIET: f64 = 0.06;
    let workload = "workload=uniform mib=64 think=200 write_ratio=0.1";
    under_each(quiet_ground(), "account", workload, |_, mut subject| {
        let pid = subject.pid();
        for (options, above) in [
            (&*format!("{EVERYTHING} --period 2s --periods 2"), FACTOR),
            ("--budget 20% --period 2s --periods 4", FACTOR_ABOVE),
        ] {
            let rest = |subject: &mut Subject| {
                stalled(subject, || {
                    let from = Instant::now();
                    thread::sleep(Duration::from_secs(2));
                    (from, Instant::now())
                })
            };
            // Of the noise, which is the larger of two untraced times, anything may be in the traced time too.
            let is_right = |&(untraced, traced, account): &(f64, f64, f64)| {
                ((traced - untraced) / FACTOR..=traced * above).contains(&account)
            };
            // More than one, if the host takes time from the guest beside the tracer, which is in no account.
            let mut tries: Vec<(f64, f64, f64)> = Vec::new();
            let mut before = rest(&mut subject);
            while tries.len() < 3
                && !tries
                    .last()
                    .is_some_and(|last| last.0 <= QUIET && is_right(last))
            {
                let mut account = 0.0;
                let traced = stalled(&mut subject, || {
                    let ended = Attach::start(&pid, options).end();
                    ended.assert_quiet_success();
                    account = ended.last().number("overhead_ratio");
                    let periods: Vec<_> = ended.periods().collect();
                    let length = Duration::from_secs_f64(periods[0].number("seconds"));
                    (periods[0].at - length, periods[periods.len() - 1].at)
                });
                let after = rest(&mut subject);
                tries.push((before.max(after), traced, account));
                before = after;
            }
            println!("{options}: untraced, traced, account: {tries:.3?}");
            tries.retain(|found| found.0 <= QUIET);
            if tries.is_empty() {
                skip(
                    Lack::Host,
                    format_args!("the host is too busy to compare the account of {options}"),
                );
            } else {
                let is_one_right = tries.iter().any(is_right);
                assert!(
                    is_one_right,
                    "{options}: untraced, traced, account: {tries:?}"
                );
            }
        }
        subject.assert_goes_on();
    });
}
