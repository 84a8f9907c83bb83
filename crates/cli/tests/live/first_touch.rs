//! Running VMs observed by first touches: what is found, what it costs, and what happens to the guest when the tracer stops.

use std::thread;
use std::time::Duration;

use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_rig::{median, send};
use rustix::process::Signal;

use crate::nemesis::{assert_bounded, assert_ended_by_watchdog, longest_stall};
use crate::rig::{Attach, Ground, Line, MIB, ground, quiet_ground};

/// The settings of a test's tracer.
const TRACING: &str = "--backend first-touch --budget 5% --period 2s --curve --window 60s";

#[test]
fn the_working_set_and_the_curve_of_even_references_are_found() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("touch-uniform", "workload=uniform mib=96");
    let footprint = subject.footprint();
    let tracer = Attach::start(
        &subject.pid(),
        &format!("{TRACING} --periods 15 --heatmap 16"),
    );
    let ended = tracer.end();
    ended.assert_quiet_success();
    subject.assert_no_trap_is_left();
    subject.assert_left_as(&footprint);
    let periods: Vec<&Line> = ended.periods().collect();
    for line in &periods {
        let samples = &line.json["samples"];
        println!(
            "{:?} pages, overhead {:.4}, {samples}",
            line.working_set(),
            line.number("overhead_ratio")
        );
        assert!(line.json.get("scans").is_none() && line.json.get("hot_set_pages").is_none());
        assert_eq!(line.json["heat_pages"].as_array().unwrap().len(), 16);
    }
    // A period in which the curve is computed may take more than its share, which those after it make up for.
    let overheads = periods.iter().map(|line| line.number("overhead_ratio"));
    let mean = overheads.clone().sum::<f64>() / periods.len() as f64;
    assert!(mean < 0.06, "{mean}");
    assert!(overheads.fold(0.0, f64::max) < 0.1, "{ended:?}");
    // The working set is the size at which 5 % miss.
    let truth = (96 * MIB) as f64 * 0.95;
    let found = median(periods[5..].iter().filter_map(|line| line.estimate()));
    assert!(
        (found / truth - 1.0).abs() <= 0.1,
        "{found} pages of {truth}"
    );
    let curve: CurveJson = serde_json::from_value(ended.last().json["curve"].clone()).unwrap();
    let pages = (96 * MIB) as f64;
    let at = |size: f64| {
        let points = &curve.points;
        let after = points.partition_point(|point| point.size_pages as f64 <= size);
        after
            .checked_sub(1)
            .map_or(1.0, |index| points[index].miss_ratio)
    };
    let from = pages / 16.0;
    let sizes = (0..100).map(|step| from + (pages - from) * f64::from(step) / 100.0);
    let uniform = |size: f64| 1.0 - size / pages;
    let errors = sizes.map(|size| (at(size) / at(from) - uniform(size) / uniform(from)).abs());
    let error = errors.sum::<f64>() / 100.0;
    println!("mean distance from the closed form {error:.4}");
    assert!(error <= 0.07, "{error}");
    subject.assert_goes_on();
}

#[test]
fn the_working_set_of_a_loop_is_found_and_the_budget_holds_from_the_first_second() {
    let Some(ground) = quiet_ground() else { return };
    // What a hypervisor takes from the host while an access waits counts as its cost.
    assert!((0..3).any(|_| does_the_budget_hold(&ground)));
}

fn does_the_budget_hold(ground: &Ground) -> bool {
    let mut subject = ground.boot("touch-loop", "workload=sequential mib=64");
    let options = "--backend first-touch --curve --window 60s";
    let (least_ratio, least_share) = Attach::least_cost(&subject.pid(), options);
    let tracer = Attach::start(&subject.pid(), &format!("{options} --period 1s"));
    let mut ratios = vec![tracer.next().number("overhead_ratio")];
    let (periods, share) = tracer.lines_and_share(19);
    ratios.extend(periods.iter().map(|line| line.number("overhead_ratio")));
    tracer.interrupt();
    tracer.end().assert_quiet_success();
    println!(
        "overhead by period {ratios:.4?}; the tracer used {share:.4} of a processor; with next to no budget {least_ratio:.4} and {least_share:.4}"
    );
    // Estimates and the ends of periods cost what they do on this host, and their time counts.
    let limit = |within: f64| (1.2 * least_ratio).max(within);
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    let typical = median(ratios.iter().copied());
    // The share is not by its own account.
    let is_within = ratios[0] <= limit(0.015)
        && mean <= limit(0.0115)
        && typical <= limit(0.011)
        && share - least_share <= 0.015;
    let truth = (64 * MIB) as f64;
    let found = median(periods[10..].iter().filter_map(Line::working_set));
    assert!(
        (found / truth - 1.0).abs() <= 0.1,
        "{found} pages of {truth}"
    );
    subject.assert_no_trap_is_left();
    subject.assert_goes_on();
    is_within
}

#[test]
fn a_tracer_that_is_stopped_or_killed_with_pages_armed_does_not_hold_its_guest() {
    let Some(ground) = quiet_ground() else { return };
    let mut subject = ground.boot("touch-stopped", "workload=uniform mib=16 write_ratio=0.5");
    let footprint = subject.footprint();
    let untraced = longest_stall(&mut subject, || ());
    let mut stalls = Vec::new();
    let options = "--backend first-touch --budget 20% --period 500ms";
    for (signal, delay_ms) in [
        (Signal::STOP, 0),
        (Signal::STOP, 260),
        (Signal::KILL, 0),
        (Signal::KILL, 170),
    ] {
        let tracer = Attach::start(&subject.pid(), options);
        tracer.next();
        let hit = || {
            thread::sleep(Duration::from_millis(delay_ms));
            send(tracer.pid(), signal).unwrap();
        };
        stalls.push((signal, longest_stall(&mut subject, hit)));
        if signal == Signal::STOP {
            // Pages are armed all the time, so it is ended wherever it was stopped.
            assert_ended_by_watchdog(&tracer.end(), &subject);
        }
        subject.assert_no_trap_is_left();
        subject.assert_left_as(&footprint);
    }
    // The host may be busier than it was.
    let untraced = untraced.max(longest_stall(&mut subject, || ()));
    for (signal, stall) in stalls {
        assert_bounded(&format!("{signal:?}"), stall, untraced);
    }
    subject.assert_goes_on();
}

#[test]
fn accesses_are_served_while_nobody_reads_what_the_tracer_prints() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("touch-unread", "workload=uniform mib=16 write_ratio=0.5");
    let untraced = longest_stall(&mut subject, || ());
    // Its pipe is full after some lines, each of 100 KiB.
    let mut command = std::process::Command::new(crate::rig::PLIMSOLL);
    command.args(["attach", &subject.pid(), "-o", "json"]);
    let options = "--backend first-touch --budget 20% --period 100ms --heatmap 4096";
    let mut tracer = command
        .args(options.split_ascii_whitespace())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_secs(3));
    let stall = longest_stall(&mut subject, || ());
    assert!(tracer.try_wait().unwrap().is_none());
    tracer.kill().unwrap();
    tracer.wait().unwrap();
    assert_bounded("nobody reads", stall, untraced);
    subject.assert_no_trap_is_left();
    subject.assert_goes_on();
}
