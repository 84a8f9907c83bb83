//! Processes that are no VMs, observed while they run: this program, started once more as a workload.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plimsoll_flow::{PageCount, TraceMethod, WorkingSetBound};
use plimsoll_observe::{Observer, ObserverOptions};
use plimsoll_skip::{Lack, skip};
use plimsoll_trap::{RateRule, TraceConfig, TrapError};
use plimsoll_vm::Target;

/// Tells this program how many pages to write, again and again.
const PAGES: &str = "PLIMSOLL_TEST_WRITES_PAGES";
/// Set if it is to do so until it is killed.
const FOREVER: &str = "PLIMSOLL_TEST_WRITES_FOREVER";
/// What it does otherwise: `anew` frees its pages and maps others in each round, `reads` writes nothing after the start.
const WAY: &str = "PLIMSOLL_TEST_WRITES_WAY";
const PAGE_BYTES: usize = 4096;

/// A workload that writes all its pages until its input ends, and then, if it is told another number of pages, executes
/// itself anew with that.
#[test]
fn a_workload_for_the_other_tests() {
    let Ok(pages) = std::env::var(PAGES) else {
        return;
    };
    let pages: usize = pages.parse().unwrap();
    let way = std::env::var(WAY).unwrap_or_default();
    let made = |value: u8| vec![value; pages * PAGE_BYTES];
    // Zeros are mapped, and not written.
    let mut memory = made(u8::from(way != "reads"));
    println!("ready");
    let input = std::thread::spawn(|| {
        let mut next = String::new();
        std::io::stdin().read_to_string(&mut next).map(|_| next)
    });
    while !input.is_finished() || std::env::var_os(FOREVER).is_some() {
        if way == "anew" {
            drop(std::mem::take(&mut memory));
            memory = made(1);
        }
        for page in memory.chunks_mut(PAGE_BYTES) {
            if way == "reads" {
                std::hint::black_box(page[0]);
                continue;
            }
            page[0] = std::hint::black_box(page[0].wrapping_add(1));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let next = input.join().unwrap().unwrap();
    if !next.is_empty() {
        panic!("{}", workload(&next).env(FOREVER, "1").exec());
    }
}

fn workload(pages: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "a_workload_for_the_other_tests", "--nocapture"])
        .env(PAGES, pages);
    command
}

/// A workload that runs, killed in the end.
struct Workload {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Workload {
    fn start(pages: usize) -> Self {
        Self::in_a_way(pages, "")
    }

    fn in_a_way(pages: usize, way: &str) -> Self {
        let mut command = workload(&pages.to_string());
        command.env(WAY, way);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        lines
            .find(|line| line.as_ref().is_ok_and(|line| line.contains("ready")))
            .unwrap()
            .unwrap();
        // Nobody reads what it prints later.
        std::thread::spawn(move || lines.for_each(drop));
        Self {
            stdin: child.stdin.take(),
            child,
        }
    }

    fn target(&self) -> Target {
        Target::find(&self.child.id().to_string()).unwrap()
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn config() -> TraceConfig {
    TraceConfig {
        period: Duration::from_millis(500),
        budget: None,
        scale: 1,
        rate_rule: RateRule::Fixed,
        ..TraceConfig::default()
    }
}

/// An observer of its writes; `None` after saying why the test is skipped.
fn observe_writes(target: &Target) -> Option<Observer> {
    let options = ObserverOptions::default();
    Observer::attach(target, TraceMethod::WriteScans, &config(), &options)
        .inspect_err(|error| {
            skip(
                Lack::Userfaultfd,
                format_args!("writes of a process cannot be observed here: {error:?}"),
            );
        })
        .ok()
}

/// The pages that a period finds written.
fn written(observer: &mut Observer) -> PageCount {
    let period = observer.period(&AtomicBool::new(false)).unwrap();
    let set = period.working_set.unwrap();
    let found = PageCount(period.period.distinct_pages);
    assert_eq!(
        set.bound,
        WorkingSetBound::AtLeast,
        "what is only read is not seen"
    );
    // One visit in twenty may miss in it.
    assert!(
        (found.0 * 19 / 20..=found.0).contains(&set.size.0),
        "{found:?}, {set:?}"
    );
    found
}

/// Whether a size is that of an array, give or take the program's own pages.
fn is_about(found: PageCount, pages: u64) -> bool {
    (pages..pages + 200).contains(&found.0)
}

#[test]
fn what_is_mapped_anew_while_a_period_runs_is_observed() {
    // So many that the allocator maps and unmaps them.
    let pages = 9000;
    let workload = Workload::in_a_way(pages, "anew");
    let target = workload.target();
    let Some(mut observer) = observe_writes(&target) else {
        return;
    };
    // A period that begins while nothing is mapped finds nothing.
    let mut found = Vec::new();
    while !found
        .last()
        .is_some_and(|&found| is_about(PageCount(found), pages as u64))
    {
        assert!(found.len() < 20, "{found:?}");
        let period = observer.period(&AtomicBool::new(false)).unwrap();
        found.push(period.period.distinct_pages);
    }
    observer.detach().unwrap();
    assert!(target.refreshed().is_ok());
}

#[test]
fn zeros_that_are_only_read_are_not_written() {
    let workload = Workload::in_a_way(3000, "reads");
    let Some(mut observer) = observe_writes(&workload.target()) else {
        return;
    };
    for _ in 0..2 {
        let period = observer.period(&AtomicBool::new(false)).unwrap();
        let touched = period.period.distinct_pages;
        assert!(touched < 200, "{touched} pages");
    }
    observer.detach().unwrap();
}

#[test]
fn all_pages_that_a_process_writes_are_found_and_it_goes_on_unchanged() {
    let workload = Workload::start(3000);
    let target = workload.target();
    let Some(mut observer) = observe_writes(&target) else {
        return;
    };
    for _ in 0..2 {
        let found = written(&mut observer);
        assert!(is_about(found, 3000), "{found:?}");
    }
    observer.detach().unwrap();
    // Neither a userfaultfd nor anything else is left.
    let Target::Process(process) = target.refreshed().unwrap() else {
        panic!("it is a process");
    };
    assert!(!process.ram_state().unwrap().userfaultfd);
    let mut again = observe_writes(&target).unwrap();
    assert!(is_about(written(&mut again), 3000));
}

#[test]
fn a_process_that_executes_another_program_is_followed() {
    let mut workload = Workload::start(1000);
    let Some(mut observer) = observe_writes(&workload.target()) else {
        return;
    };
    assert!(is_about(written(&mut observer), 1000));
    workload.stdin.take().unwrap().write_all(b"4000").unwrap();
    // In the period in which it happens both are seen, or neither.
    let found = (0..20).map(|_| {
        let period = observer.period(&AtomicBool::new(false)).unwrap();
        period.working_set.map_or(PageCount(0), |set| set.size)
    });
    let found: Vec<_> = found.take_while(|&found| !is_about(found, 4000)).collect();
    assert!(found.len() < 20, "{found:?}");
}

#[test]
fn a_process_that_ends_ends_its_observation_with_its_number() {
    let mut workload = Workload::start(500);
    let Some(mut observer) = observe_writes(&workload.target()) else {
        return;
    };
    assert!(is_about(written(&mut observer), 500));
    drop(workload.stdin.take());
    workload.child.wait().unwrap();
    let pid = workload.child.id();
    let error = observer.period(&AtomicBool::new(false)).unwrap_err();
    assert!(
        matches!(error, TrapError::ProcessGone { pid: gone } if gone == pid),
        "{error}"
    );
}

#[test]
fn backends_that_observe_vms_alone_refuse_other_processes() {
    let workload = Workload::start(10);
    for method in [
        TraceMethod::Traps,
        TraceMethod::AccessedPageScans,
        TraceMethod::FirstTouches,
    ] {
        let options = ObserverOptions::default();
        let refused = Observer::attach(workload.target(), method, &config(), &options);
        let error = std::error::Error::source(&refused.unwrap_err())
            .unwrap()
            .to_string();
        assert!(error.contains("is not a VM"), "{error}");
    }
}
