//! Running VMs looked at without traps: presence scans, random samples, and the pages written between two scans.

use std::collections::HashSet;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::{AccessKind, Period, TraceMethod};
use plimsoll_observe::target_of;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_rig::{GuestConfig, PATIENCE, Subject, median, wait_for};
use plimsoll_skip::{Lack, skip};
use plimsoll_trap::{Backend, BackendRow, RateRule, TraceConfig, TraceTarget, TrapError};
use plimsoll_vm::ConsoleEvent;

use crate::rig::{Attach, Line, MIB, PLIMSOLL, boot_with, ground, quiet_ground, shared_ground};

/// The median of the working sets found; one that was only bounded counts as it stands.
fn median_working_set<'a>(lines: impl IntoIterator<Item = &'a Line>) -> f64 {
    let found: Vec<f64> = lines
        .into_iter()
        .map(|line| line.working_set().expect("a working set"))
        .collect();
    println!("working sets {found:?}");
    median(found)
}

#[test]
fn the_working_set_of_a_loop_is_found_without_a_trap() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("scan-loop", "workload=sequential mib=48");
    let footprint = subject.footprint();
    let scanner = Attach::start(
        &subject.pid(),
        "--backend scan --budget 10% --period 1s --periods 10 --curve --heatmap 16",
    );
    let first = scanner.next();
    subject.assert_no_trap_is_left();
    // But for its monitor's client, which the scanner is for some milliseconds between two periods.
    wait_for("the VM as it was", PATIENCE, || {
        (subject.footprint() == footprint).then_some(())
    });
    let ended = scanner.end();
    ended.assert_quiet_success();
    let later: Vec<&Line> = ended.periods().skip(3).collect();
    let found = median_working_set(later.iter().copied());
    let truth = (48 * MIB) as f64;
    assert!(
        (found / truth - 1.0).abs() <= 0.1,
        "{found} pages of {truth}"
    );
    for line in later.into_iter().chain([&first]) {
        assert!(line.number("scans") >= 2.0 && line.number("scan_interval_seconds") > 0.0);
        assert!(line.number("touches") >= line.number("distinct_pages"));
        assert!(
            line.number("write_touches") == 0.0 && line.number("traps") == 0.0,
            "{}",
            line.json
        );
        // One page in a window of fault-around at most.
        assert!(line.number("tracking_rate") <= 1.0 / 16.0);
        let low = line.number("working_set_low_pages");
        let set = line.working_set().unwrap();
        assert!(low <= set, "{}", line.json);
        let heat = line.json["heat_pages"].as_array().unwrap();
        assert_eq!(heat.len(), 16);
    }
    let curve: CurveJson = serde_json::from_value(ended.last().json["curve"].clone()).unwrap();
    assert_eq!((curve.schema, curve.page_bytes), (1, 4096));
    assert!(curve.points.len() > 10);
    subject.assert_goes_on();
    subject.assert_left_as(&footprint);
}

#[test]
fn the_cost_of_scanning_stays_within_its_budget() {
    let Some(ground) = quiet_ground() else { return };
    let mut subject = ground.boot("scan-budget", "workload=uniform mib=64 write_ratio=0.5");
    let (least_ratio, least_share) = Attach::least_cost(&subject.pid(), "--backend scan");
    let options = "--backend scan --period 1s --periods 10";
    let tracer = Attach::start(&subject.pid(), options);
    tracer.next();
    tracer.next();
    let (periods, share) = tracer.lines_and_share(8);
    tracer.end().assert_quiet_success();
    let ratios: Vec<f64> = periods
        .iter()
        .map(|period| period.number("overhead_ratio"))
        .collect();
    println!(
        "overhead by period {ratios:.4?}; the tracer used {share:.4} of a processor; with next to no budget {least_ratio:.4} and {least_share:.4}"
    );
    // Not by its own account.
    assert!(share - least_share <= 0.015, "{share}, {least_share}");
    // A window has three looks whatever they cost.
    let limit = (1.5 * least_ratio).max(0.015);
    assert!(median(ratios.iter().copied()) <= limit, "{ratios:.4?}");
    subject.assert_goes_on();
}

#[test]
fn the_curve_of_even_references_is_found_from_what_lies_between_looks() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("scan-uniform", "workload=uniform mib=64");
    let options =
        "--backend scan --rate 1/16 --rate-rule fixed --budget none --period 3s --periods 4";
    let ended = Attach::start(&subject.pid(), options).end();
    ended.assert_quiet_success();
    let curve: CurveJson = serde_json::from_value(ended.last().json["curve"].clone()).unwrap();
    let pages = (64 * MIB) as f64;
    let at = |size: f64| {
        let after = curve
            .points
            .partition_point(|point| point.size_pages as f64 <= size);
        after
            .checked_sub(1)
            .map_or(1.0, |index| curve.points[index].miss_ratio)
    };
    // A curve begins at what a window finds touched between two looks, which is more on a busy host; its level there is not known.
    let first = curve.points[0].size_pages as f64;
    let from = (first * 1.1).max(pages / 8.0);
    assert!(
        from < pages * 0.9,
        "the curve begins at {first} of {pages} pages"
    );
    let sizes = (0..100).map(|step| from + (pages - from) * f64::from(step) / 100.0);
    let uniform = |size: f64| 1.0 - size / pages;
    let errors = sizes.map(|size| (at(size) / at(from) - uniform(size) / uniform(from)).abs());
    let error = errors.sum::<f64>() / 100.0;
    println!("mean distance from the closed form {error:.4}, from {from:.0} pages");
    assert!(error <= 0.05, "{error}");
    subject.assert_goes_on();
}

/// Waits until a step of this number has begun.
fn wait_for_step(subject: &mut Subject, wanted: u64) {
    let deadline = Instant::now() + PATIENCE;
    let begun = |(_, event): &(Instant, ConsoleEvent)| matches!(event, ConsoleEvent::Step { index, .. } if *index == wanted);
    while !subject.reported().0.iter().any(begun) {
        assert!(Instant::now() < deadline, "step {wanted} does not begin");
        thread::sleep(Duration::from_millis(20));
    }
}

/// One scan of all pages in a period, whatever it costs.
fn writes_of_all_pages(period_s: u64) -> TraceConfig {
    let period = Duration::from_secs(period_s);
    TraceConfig {
        period,
        budget: None,
        scale: 1,
        scan_interval: Some(period),
        ..TraceConfig::default()
    }
}

/// A guest that reads its array for a while, and then writes it.
const READS_THEN_WRITES: &str = "workload=arrays array=RRWW mib=32 step_ms=12000 seconds=32";

#[test]
fn exactly_the_pages_written_are_told() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut subject = ground.boot("scan-writes", READS_THEN_WRITES);
    let footprint = subject.footprint();
    wait_for_step(&mut subject, 0);
    let target = target_of(&subject.vm).unwrap();
    let attach = |period_s| {
        let config = writes_of_all_pages(period_s);
        let scans = BackendRow::of(TraceMethod::WriteScans);
        scans.attach(&target, &config).unwrap()
    };
    let written_in = |mut scanner: Box<dyn Backend>| {
        let mut pages = HashSet::new();
        let period = scanner.run_period(&AtomicBool::new(false), &mut |seen| {
            let kinds = seen.references().kinds();
            assert!(kinds.iter().all(|&kind| kind == AccessKind::Write));
            pages.extend(seen.pages().iter().map(|page| page.0));
        });
        assert_eq!(period.unwrap().distinct_pages, pages.len() as u64);
        scanner.detach().unwrap();
        pages
    };
    let by_the_kernel = written_in(attach(2));
    wait_for_step(&mut subject, 1);
    thread::sleep(Duration::from_secs(3));
    let both = written_in(attach(4));
    let (array, beside) = (8192, by_the_kernel.len());
    println!(
        "{beside} pages written beside reads, {} with writes",
        both.len()
    );
    assert!(
        beside <= 400,
        "{beside} pages written by a guest that reads"
    );
    assert!(
        (array..=array + 400).contains(&both.len()),
        "{} pages written of an array of {array}",
        both.len()
    );
    subject.assert_no_trap_is_left();
    subject.assert_left_as(&footprint);
    subject.assert_ends_sound();
}

#[test]
fn a_scan_tells_writes_from_reads() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut subject = ground.boot("scan-kinds", READS_THEN_WRITES);
    wait_for_step(&mut subject, 0);
    let config = TraceConfig {
        period: Duration::from_secs(3),
        budget: None,
        scale: 16,
        rate_rule: RateRule::Fixed,
        scan_interval: Some(Duration::from_millis(100)),
        writes: true,
        ..TraceConfig::default()
    };
    let target = target_of(&subject.vm).unwrap();
    let scans = BackendRow::of(TraceMethod::AccessedPageScans);
    let mut scanner = scans.attach(&target, &config).unwrap();
    let stop = AtomicBool::new(false);
    let mut share_written = || {
        let mut kinds = [0_u64; 2];
        let report = scanner.run_period(&stop, &mut |seen| {
            for kind in seen.references().kinds() {
                match kind {
                    AccessKind::Read => kinds[0] += 1,
                    AccessKind::Write => kinds[1] += 1,
                    AccessKind::Unknown => panic!("a kind that is not told"),
                }
            }
        });
        let report = report.unwrap();
        assert_eq!(report.scans.writes, kinds[1]);
        assert_eq!(report.scans.touches, kinds[0] + kinds[1]);
        assert!(report.distinct_pages > 400, "{report:?}");
        kinds[1] as f64 / report.scans.touches as f64
    };
    let reading = share_written();
    wait_for_step(&mut subject, 1);
    share_written();
    let writing = share_written();
    println!("{reading:.3} written while it reads, {writing:.3} while it writes");
    assert!(reading < 0.1, "{reading}");
    assert!(writing > 0.9, "{writing}");
    scanner.detach().unwrap();
    subject.assert_no_trap_is_left();
    subject.assert_ends_sound();
}

#[test]
fn writes_to_private_ram_are_told_as_well() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let workload = "workload=uniform mib=32 write_ratio=1";
    let mut guest = boot_with(&ground, &[], &["-m", "192M"], workload);
    let vm = plimsoll_vm::find(&guest.pid()).unwrap();
    let scans = BackendRow::of(TraceMethod::WriteScans);
    let target = target_of(&vm).unwrap();
    let mut scanner = scans.attach(&target, &writes_of_all_pages(3)).unwrap();
    let period = scanner.run_period(&AtomicBool::new(false), &mut |_| ());
    let period = period.unwrap();
    assert!(period.distinct_pages > 32 * MIB / 2, "{period:?}");
    assert!(period.distinct_pages < 48 * MIB, "{period:?}");
    scanner.detach().unwrap();
    guest.assert_goes_on();
}

#[test]
fn a_scanner_killed_leaves_the_guest_running_and_right() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut subject = ground.boot("scan-killed", "workload=uniform mib=32 write_ratio=0.5");
    let footprint = subject.footprint();
    for options in ["", "--writes", "--writes --rate 1/16", "--rate 1/16"] {
        let all = format!(
            "--backend scan --rate-rule fixed --budget none --scan-interval 2ms --period 500ms {options}"
        );
        let scanner = Attach::start(&subject.pid(), &all);
        scanner.next();
        thread::sleep(Duration::from_millis(170));
        // SIGKILL.
        drop(scanner);
        subject.wait_until_untraced();
        subject.assert_left_as(&footprint);
        subject.assert_goes_on();
    }
    let ended = Attach::start(&subject.pid(), "--budget 10% --period 500ms --periods 1").end();
    ended.assert_quiet_success();
    assert!(ended.lines[0].number("traps") > 0.0);
    subject.assert_goes_on();
}

#[test]
fn a_vm_that_quits_in_mid_scan_ends_the_run_with_what_was_seen() {
    let Some(ground) = shared_ground() else {
        return;
    };
    for options in ["", "--writes"] {
        let mut subject = ground.boot("scan-quits", "workload=uniform mib=32");
        let all = format!("--backend scan --budget 20% --period 1s {options}");
        let scanner = Attach::start(&subject.pid(), &all);
        scanner.next();
        thread::sleep(Duration::from_millis(300));
        subject.guest.qmp().unwrap().quit().unwrap();
        let ended = scanner.end();
        assert_eq!(ended.code, Some(0), "{}", ended.complaint);
        let said = format!(
            "plimsoll: the VM ended: its process {} is gone\n",
            subject.pid()
        );
        assert_eq!(ended.complaint, said);
        assert!(ended.last().is_final());
        let points = ended.last().json["curve"]["points"].as_array();
        assert!(points.is_some_and(|points| points.len() > 1));
    }
}

/// Runs `plimsoll attach` to its end; returns its exit code and what it said.
fn attach(arguments: &[&str]) -> (Option<i32>, String) {
    let run = Command::new(PLIMSOLL)
        .arg("attach")
        .args(arguments)
        .output();
    let run = run.unwrap();
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    (run.status.code(), said)
}

#[test]
fn options_of_the_other_backend_are_refused() {
    let cases = [
        ("--backend scan --hot-set 3", "--backend trap"),
        ("--backend scan --group 2", "--backend trap"),
        ("--backend scan --least-pages 9", "--backend trap"),
        ("--backend scan --estimator aet", "--backend trap"),
        ("--backend scan --compare", "--backend trap"),
        (
            "--backend scan --rate-rule log",
            "--rate-rule budget or fixed",
        ),
        ("--backend scan --budget none", "--rate-rule fixed"),
        ("--backend trap --writes", "--backend scan"),
        ("--backend trap --scan-interval 5ms", "--backend scan"),
    ];
    for (options, way_out) in cases {
        let mut arguments = vec!["a-name-nobody-has"];
        arguments.extend(options.split_ascii_whitespace());
        let (code, said) = attach(&arguments);
        assert_eq!(code, Some(2), "{options}: {said}");
        assert!(said.contains(way_out), "{options}: {said}");
    }
}

#[test]
fn what_cannot_be_made_absent_is_refused() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let workload = "workload=uniform mib=32 write_ratio=0.5";
    let config = GuestConfig {
        extra_arguments: ["-overcommit", "mem-lock=on"].map(str::to_owned).to_vec(),
        ..ground.guest("scan-locked", workload)
    };
    let mut subject = ground.boot_as(&config);
    let (code, said) = attach(&[&subject.pid(), "--backend", "scan"]);
    assert!(
        code == Some(1) && said.contains("locked in memory"),
        "{said}"
    );
    subject.assert_goes_on();
    drop(subject);

    let mut guest = boot_with(&ground, &[], &["-m", "192M"], workload);
    let (code, said) = attach(&[&guest.pid(), "--backend", "scan"]);
    assert!(code == Some(1) && said.contains("private memory"), "{said}");
    guest.assert_goes_on();
}

/// Maps a file whole, touches every page, says so, and waits to be killed.
const SECOND_MAPPER: &str = "
import mmap, sys, time
with open(sys.argv[1], 'r+b') as ram:
    mapped = mmap.mmap(ram.fileno(), 0)
for at in range(0, len(mapped), 4096):
    mapped[at]
print('mapped', flush=True)
time.sleep(600)
";

/// A process that has mapped a VM's RAM, as a vhost-user daemon does. Dropped, it is killed.
struct SecondMapper(Child);

impl SecondMapper {
    fn of(vm: u32) -> Option<Self> {
        use std::io::BufRead as _;
        let folder = format!("/proc/{vm}/fd");
        let ram = fs::read_dir(folder).unwrap().find_map(|entry| {
            let path = entry.unwrap().path();
            let name = fs::read_link(&path).ok()?;
            name.to_string_lossy().contains("memfd:").then_some(path)
        });
        let child = Command::new("python3")
            .args(["-c", SECOND_MAPPER])
            .arg(ram.expect("RAM in a memfd"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => {
                skip(Lack::Program, format_args!("python3: {error}"));
                return None;
            }
        };
        let mut said = String::new();
        let output = child.stdout.take().unwrap();
        std::io::BufReader::new(output)
            .read_line(&mut said)
            .unwrap();
        assert_eq!(said, "mapped\n");
        Some(Self(child))
    }
}

impl Drop for SecondMapper {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn ram_that_a_second_process_has_mapped_is_refused() {
    let Some(ground) = shared_ground() else {
        return;
    };
    // Most of the RAM is none that the guest uses, and becomes inaccessible whoever has mapped it.
    let config = GuestConfig {
        memory_mib: 448,
        ..ground.guest("scan-mapped", "workload=uniform mib=32 write_ratio=0.5")
    };
    let mut subject = ground.boot_as(&config);
    let Some(mapper) = SecondMapper::of(subject.vm.pid) else {
        return;
    };
    for backend in ["scan", "first-touch", "trap"] {
        let (code, said) = attach(&[&subject.pid(), "--backend", backend, "--periods", "3"]);
        assert_eq!(code, Some(1), "{backend}: {said}");
        assert!(
            said.contains("another process has mapped the VM's RAM"),
            "{backend}: {said}"
        );
    }
    let second = Duration::from_secs(1);
    // Of the pages with contents, one in ten or so is in use.
    assert!(sampled(&subject, 500, second).is_err());
    drop(mapper);
    assert_eq!(sampled(&subject, 100, second).unwrap().tracked_pages, 100);
    subject.assert_goes_on();
}

/// One period of random pages.
fn sampled(subject: &Subject, pages: usize, length: Duration) -> Result<Period, TrapError> {
    let config = TraceConfig {
        period: length,
        sample_pages: pages,
        ..TraceConfig::default()
    };
    let target = target_of(&subject.vm).unwrap();
    let mut backend = BackendRow::of(TraceMethod::SampledPages).attach(&target, &config)?;
    let mut touched = HashSet::new();
    let period = backend.run_period(&AtomicBool::new(false), &mut |seen| {
        touched.extend(seen.pages().iter().copied());
    })?;
    assert_eq!(touched.len() as u64, period.distinct_pages);
    assert!(touched.iter().all(|page| page.0 < backend_pages(&target)));
    backend.detach()?;
    Ok(period)
}

/// Pages of the RAM that a backend observes.
fn backend_pages(target: &TraceTarget) -> u64 {
    target.ram.iter().map(|ram| ram.len_bytes / 4096).sum()
}

#[test]
fn random_pages_tell_how_much_is_in_use() {
    let Some(ground) = ground() else { return };
    let mut subject = ground.boot("scan-sample", "workload=sequential mib=48");
    let share_of = |subject: &Subject, length: Duration| {
        let period = sampled(subject, 400, length).unwrap();
        assert_eq!(period.tracked_pages, 400);
        let share = period.distinct_pages as f64 / period.tracked_pages as f64;
        (share, period.populated_pages)
    };
    let (busy, populated) = share_of(&subject, Duration::from_secs(3));
    let truth = (48 * MIB) as f64 / populated as f64;
    // The kernel's own pages come on top, and a binomial's error: five deviations of 2.5 %.
    assert!(
        (busy - truth).abs() < 0.15,
        "{busy} where {truth} is in use"
    );
    subject.guest.qmp().unwrap().stop().unwrap();
    let (paused, _) = share_of(&subject, Duration::from_secs(1));
    assert!(
        paused < 0.01,
        "{paused} touched by a guest that stands still"
    );
    subject.guest.qmp().unwrap().cont().unwrap();
    subject.assert_goes_on();
}
