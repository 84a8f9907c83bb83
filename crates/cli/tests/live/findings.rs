//! What is found out about a VM, against what its workload is known to need.

use std::time::{Duration, Instant};

use plimsoll_flow::PageCount;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_rig::{GuestConfig, Subject, median};
use plimsoll_vm::ConsoleEvent;

use crate::rig::{Attach, EVERYTHING, Ground, Line, MIB, Outcome, ground, quiet_ground};

/// The working set of a uniform workload over `pages`: all but 5 % of it.
fn of_uniform(pages: u64) -> f64 {
    pages as f64 * 0.95
}

/// Fails unless the working sets found lie within `share` of the truth, by the median of the
/// errors; a period that only found a bound is as wrong as can be.
fn assert_near<'a>(lines: impl IntoIterator<Item = &'a Line>, truth: f64, share: f64) {
    let found: Vec<_> = lines.into_iter().map(Line::estimate).collect();
    let error = |found: &Option<f64>| found.map_or(f64::INFINITY, |found| found / truth - 1.0);
    let median = median(found.iter().map(|found| error(found).abs()));
    println!(
        "working sets {found:?} where {truth} pages are used: {:.1} %",
        median * 100.0
    );
    assert!(
        median <= share,
        "{found:?} found where {truth} pages are used"
    );
}

/// The curve of a line, checked for what makes it one.
fn curve(line: &Line) -> CurveJson {
    let curve: CurveJson = serde_json::from_value(line.json["curve"].clone()).unwrap();
    assert_eq!((curve.schema, curve.page_bytes), (1, 4096));
    assert!(curve.references > 0 && !curve.points.is_empty());
    for pair in curve.points.windows(2) {
        assert!(pair[0].size_pages < pair[1].size_pages, "{pair:?}");
        assert!(pair[0].miss_ratio >= pair[1].miss_ratio, "{pair:?}");
    }
    for point in &curve.points {
        let within = 0.0 <= point.low && point.low <= point.miss_ratio;
        assert!(within && point.miss_ratio <= point.high && point.high <= 1.0);
    }
    curve
}

/// Mean distance of a curve from that of a uniform workload over `pages`, both taken over the
/// references that miss at 8 MiB. Those that hit there are not the workload's alone: a guest
/// that is slowed down does more for its clock and its console, visit by visit.
fn distance_from_uniform(curve: &CurveJson, pages: u64) -> f64 {
    let from = 8 * MIB;
    let uniform = |size: u64| 1.0 - size as f64 / pages as f64;
    let sizes = (0..100).map(|step| from + (pages - from) * step / 100);
    let errors = sizes.map(|size| {
        (curve.miss_ratio(size) / curve.miss_ratio(from) - uniform(size) / uniform(from)).abs()
    });
    errors.sum::<f64>() / 100.0
}

fn sum(ended: &Outcome, key: &str) -> f64 {
    ended.periods().map(|period| period.number(key)).sum()
}

#[test]
fn a_guest_traced_at_every_page_for_a_minute_keeps_its_memory() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot(
        "minute",
        "workload=uniform mib=64 write_ratio=0.5 seconds=72",
    );
    // Long enough that a period sees each page several times, even where a trap costs 100 µs.
    let options = format!("{EVERYTHING} --period 20s --periods 3");
    let ended = Attach::start(&subject.pid(), &options).end();
    ended.assert_quiet_success();
    assert_eq!(ended.periods().count(), 3);
    assert!(sum(&ended, "seconds") >= 60.0);

    let (traps, lost) = (sum(&ended, "traps"), sum(&ended, "lost"));
    println!("{traps} traps in a minute, {lost} lost");
    assert!(traps > 100_000.0);
    assert!(lost <= traps / 1000.0, "{lost} of {traps} lost");
    assert_eq!(ended.last().number("traps"), traps);
    assert_eq!(ended.last().number("lost"), lost);
    // References lost without being counted would lengthen the distances of others.
    let error = distance_from_uniform(&curve(ended.last()), 64 * MIB);
    println!("mean distance from the closed form {error:.4}");
    assert!(error <= 0.03, "{error}");

    subject.assert_ends_sound();
    subject.assert_no_trap_is_left();
}

#[test]
fn two_guests_traced_at_once_are_told_apart() {
    let Some(ground) = ground() else { return };
    let boot = |mib: u64| {
        let workload = format!("workload=uniform mib={mib} write_ratio=0.5");
        (mib, ground.boot(&format!("uniform-{mib}"), &workload))
    };
    let options = "--rate 1/16 --rate-rule fixed --budget none --period 2s --periods 5";
    let subjects = [boot(24), boot(64)];
    let tracers = subjects.each_ref().map(|(_, subject)| {
        let name = &subject.vm.id.0;
        Attach::start(name, options)
    });
    for ((mib, mut subject), tracer) in subjects.into_iter().zip(tracers) {
        let ended = tracer.end();
        ended.assert_quiet_success();
        let of_this_guest = |line: &Line| line.json["vm"] == subject.vm.id.0;
        assert!(ended.lines.iter().all(of_this_guest));
        assert_near(ended.periods(), of_uniform(mib * MIB), 0.1);
        let error = distance_from_uniform(&curve(ended.last()), mib * MIB);
        println!("{mib} MiB: mean distance from the closed form {error:.4}");
        assert!(error <= 0.04, "{mib} MiB: {error}");
        subject.assert_goes_on();
        subject.assert_no_trap_is_left();
    }
}

#[test]
fn two_vcpus_traced_at_every_page_keep_their_memory() {
    let Some(ground) = ground() else { return };
    let config = GuestConfig {
        vcpus: 2,
        ..ground.guest(
            "smp",
            "workload=uniform mib=32 threads=2 write_ratio=0.5 seconds=34",
        )
    };
    let mut subject = ground.boot_as(&config);
    assert_eq!(subject.vm.vcpus.len(), 2);
    let options = format!("{EVERYTHING} --period 2500ms --periods 4");
    let ended = Attach::start(&subject.pid(), &options).end();
    ended.assert_quiet_success();
    let (traps, lost) = (sum(&ended, "traps"), sum(&ended, "lost"));
    println!("{traps} traps, {lost} lost");
    assert!(traps > 10_000.0 && lost <= traps / 100.0);
    // Trapped at every page, such a guest does little but serve its clock; its working set shows
    // at a rate that lets it work.
    let options = "--rate 1/16 --rate-rule fixed --budget none --period 2s --periods 5";
    let ended = Attach::start(&subject.pid(), options).end();
    ended.assert_quiet_success();
    assert_near(ended.periods(), of_uniform(32 * MIB), 0.1);
    // Before its end: QEMU ends with it.
    subject.assert_no_trap_is_left();
    subject.assert_ends_sound();
}

#[test]
fn the_cost_of_tracing_stays_within_its_budget() {
    let Some(ground) = quiet_ground() else { return };
    // What a hypervisor takes from the host while an access waits counts as its cost.
    assert!((0..3).any(|_| does_the_budget_hold(&ground)));
}

fn does_the_budget_hold(ground: &Ground) -> bool {
    let mut subject = ground.boot("budget", "workload=sequential mib=64");
    let (least_ratio, least_share) = Attach::least_cost(&subject.pid(), "");
    let tracer = Attach::start(&subject.pid(), "--period 1s --periods 8");
    tracer.next();
    let (periods, share) = tracer.lines_and_share(7);
    tracer.end().assert_quiet_success();
    let ratios: Vec<f64> = periods
        .iter()
        .map(|period| period.number("overhead_ratio"))
        .collect();
    println!(
        "overhead by period {ratios:.4?}, {least_ratio:.4} with next to no budget; the tracer used {share:.4} of a processor, {least_share:.4} with next to no budget"
    );
    subject.assert_goes_on();
    // The share is not by its own account.
    ratios.iter().all(|&ratio| ratio <= 0.02) && share - least_share <= 0.015
}

/// From when on each working set held.
fn steps(subject: &mut Subject) -> Vec<(Instant, PageCount)> {
    let steps = subject
        .reported()
        .0
        .iter()
        .filter_map(|(at, event)| match event {
            ConsoleEvent::Step { pages, .. } => Some((*at, *pages)),
            _ => None,
        });
    steps.collect()
}

#[test]
fn the_working_set_follows_the_steps_of_the_workload() {
    let Some(ground) = ground() else { return };
    let workload = "workload=steps steps_mib=16,48,32 step_ms=8000 seconds=25";
    let mut subject = ground.boot("steps", workload);
    // As many traps a period as the defaults pay for, in a fifth of the time.
    let options = "--budget 5% --period 1s --periods 24";
    let ended = Attach::start(&subject.pid(), options).end();
    ended.assert_quiet_success();
    let steps = steps(&mut subject);
    let sizes: Vec<u64> = steps.iter().map(|(_, pages)| pages.0 / MIB).collect();
    assert_eq!(sizes[..3], [16, 48, 32]);
    for (index, &(begin, pages)) in steps.iter().enumerate().take(3) {
        let end = steps.get(index + 1).map(|&(at, _)| at);
        let whole: Vec<&Line> = ended
            .periods()
            .filter(|period| {
                let length = Duration::from_secs_f64(period.number("seconds"));
                period
                    .at
                    .checked_sub(length)
                    .is_some_and(|from| from >= begin)
                    && end.is_none_or(|end| period.at <= end)
            })
            .collect();
        // The first period after the change still has the rate of the step before.
        assert!(whole.len() >= 4, "{} whole periods", whole.len());
        assert_near(whole[1..].iter().copied(), pages.0 as f64, 0.05);
    }
    subject.assert_sound();
}

#[test]
fn the_lines_of_json_keep_their_contract() {
    let Some(ground) = ground() else { return };
    let subject = ground.boot("contract", "workload=zipf mib=32");
    // A rate at which the hot set does not hide all reuse, which would leave a period without a curve.
    let options = "--curve --rate 1/8 --rate-rule fixed --budget none --period 1s --periods 3";
    let ended = Attach::start(&subject.pid(), options).end();
    ended.assert_quiet_success();
    assert_eq!(ended.lines.len(), 4);
    for line in &ended.lines {
        assert_eq!(line.json["schema"], 1);
        assert_eq!(line.json["vm"], subject.vm.id.0);
        let curve = curve(line);
        assert_eq!(curve.vm, subject.vm.id.0);
        assert_eq!(curve.baseline_pages, Some(192 * MIB));
    }
    for (index, period) in ended.periods().enumerate() {
        assert_eq!(period.json["period"], index);
        assert!((0.9..5.0).contains(&period.number("seconds")));
        assert!(period.working_set().is_some_and(|pages| pages > 0.0));
        let rate = period.number("tracking_rate");
        assert!(rate > 0.0 && rate <= 1.0);
        for key in ["tracked_pages", "traps", "lost"] {
            assert!(period.json[key].is_u64(), "{key} in {}", period.json);
        }
        assert!((0.0..1.0).contains(&period.number("overhead_ratio")));
    }
    assert!(ended.last().is_final());
}

#[test]
fn a_paused_guest_is_idle_and_found_again_when_it_goes_on() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("paused", "workload=sequential mib=48");
    let tracer = Attach::start(&subject.pid(), "--budget 10% --period 1s");
    let first: Vec<Line> = (0..3).map(|_| tracer.next()).collect();
    assert_near(&first, (48 * MIB) as f64, 0.1);

    subject.guest.qmp().unwrap().stop().unwrap();
    // In the first it still ran, for a while.
    tracer.next();
    for _ in 0..3 {
        let period = tracer.next();
        assert_eq!(period.number("traps"), 0.0, "{}", period.json);
        assert!(period.json["working_set_pages"].is_null());
        assert!((0.9..5.0).contains(&period.number("seconds")));
    }

    subject.guest.qmp().unwrap().cont().unwrap();
    // In the first it did not run yet; the next still have the rate of a guest that idles.
    for _ in 0..3 {
        tracer.next();
    }
    let again: Vec<Line> = (0..4).map(|_| tracer.next()).collect();
    assert_near(&again, (48 * MIB) as f64, 0.1);
    tracer.interrupt();
    let ended = tracer.end();
    ended.assert_quiet_success();
    subject.assert_goes_on();
    subject.assert_no_trap_is_left();
}
