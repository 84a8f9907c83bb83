//! What KVM logs of a real tiny machine: exactly the pages it wrote, by every tracker.

use plimsoll_skip::{Lack, skip};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_flow::{PageCount, PageNumber};
use plimsoll_migration::precopy::precopy;
use plimsoll_migration::tiny::{
    INCREMENT, MULTIPLIER, Machine, MachineConfig, Runner, Slot, Vcpu, Work,
};
use plimsoll_migration::{
    AsyncWriteProtect, Clearing, DirtyLog, DirtyRing, KvmError, Tracker, WriteProtect,
};

/// Longest work of a test, where each of its some thousand instructions is emulated.
const WORK_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TrackerKind {
    Log,
    LogLate,
    Ring,
    Faults,
    Scan,
}

const ALL: [TrackerKind; 5] = [
    TrackerKind::Log,
    TrackerKind::LogLate,
    TrackerKind::Ring,
    TrackerKind::Faults,
    TrackerKind::Scan,
];

impl TrackerKind {
    fn start(self, machine: &Arc<Machine>) -> Result<Box<dyn Tracker>, KvmError> {
        let machine = Arc::clone(machine);
        Ok(match self {
            Self::Log => Box::new(DirtyLog::start(machine, Clearing::WithRound)?),
            Self::LogLate => Box::new(DirtyLog::start(machine, Clearing::BeforeCopy)?),
            Self::Ring => Box::new(DirtyRing::start(machine)?),
            Self::Faults => Box::new(WriteProtect::start(machine)?),
            Self::Scan => Box::new(AsyncWriteProtect::start(machine)?),
        })
    }
}

fn slot(first: u64, pages: u64) -> Slot {
    Slot {
        first: PageNumber(first),
        pages: PageCount(pages),
    }
}

/// A slot of 4 MiB and one above 4 GiB whose length is no multiple of 64 pages.
fn slots() -> Vec<Slot> {
    vec![slot(1024, 1024), slot((1 << 20) + 512, 300)]
}

/// A machine with vCPUs; `None` where there is no KVM.
fn machine(by: TrackerKind, vcpus: u32, slots: Vec<Slot>) -> Option<(Arc<Machine>, Vec<Vcpu>)> {
    let config = MachineConfig {
        slots,
        vcpus,
        ring_entries: if by == TrackerKind::Ring { 1024 } else { 0 },
    };
    match Machine::new(&config) {
        Ok(made) => Some(made),
        Err(error @ (KvmError::Unavailable { .. } | KvmError::Unsupported { .. })) => {
            skip(Lack::Kvm, format_args!("{by:?}: {error}"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn runner(machine: &Arc<Machine>, vcpus: Vec<Vcpu>) -> Runner {
    Runner::new(Arc::clone(machine), vcpus).unwrap()
}

fn work(array: Slot, write_ratio: f64, seed: u64) -> Work {
    Work {
        array,
        stride_pages: NonZeroU64::MIN,
        write_ratio,
        passes: Some(NonZeroU64::MIN),
        seed,
    }
}

/// The pages that a work writes, computed independently of the guest's code.
fn written_by(work: &Work) -> Vec<PageNumber> {
    let mut drawn = work.seed;
    let mut pages = std::collections::BTreeSet::new();
    for _ in 0..work.passes.unwrap().get() {
        let end = work.array.first.0 + work.array.pages.0;
        let stride = usize::try_from(work.stride_pages.get()).unwrap();
        for page in (work.array.first.0..end).step_by(stride) {
            drawn = drawn.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT);
            if ((drawn >> 33) as f64) < work.write_ratio * 2f64.powi(31) {
                pages.insert(PageNumber(page));
            }
        }
    }
    pages.into_iter().collect()
}

/// Waits until a machine has done more than `operations`; fails if it makes no progress.
fn wait_for_more(machine: &Machine, operations: u64) {
    let deadline = Instant::now() + WORK_TIMEOUT;
    while machine.operations() == operations {
        assert!(Instant::now() < deadline, "the machine stands still");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Runs works and takes the round that they make, protecting all of it again.
fn round_of(runner: &mut Runner, tracker: &mut dyn Tracker, works: &[Work]) -> Vec<PageNumber> {
    runner.begin(works).unwrap();
    runner.wait(WORK_TIMEOUT).unwrap();
    let round = tracker.round().unwrap();
    tracker.before_copy(round.pages()).unwrap();
    assert_eq!(round.lost, 0);
    round.pages().to_vec()
}

#[test]
fn each_round_has_the_pages_written_in_it_and_no_others() {
    for by in ALL {
        let Some((machine, vcpus)) = machine(by, 1, slots()) else {
            continue;
        };
        let mut runner = runner(&machine, vcpus);
        // Once before, so that every page is there; untracked writes are no round's.
        for array in slots() {
            runner.begin(&[work(array, 1.0, 1)]).unwrap();
            runner.wait(WORK_TIMEOUT).unwrap();
        }
        assert_eq!(machine.operations(), 300);
        let mut tracker = by.start(&machine).unwrap();
        let tracker = tracker.as_mut();
        assert_eq!(round_of(&mut runner, tracker, &[]), [], "{by:?}");
        for (round, (array, ratio)) in [
            (slots()[0], 1.0),
            (slots()[0], 0.0),
            (slots()[1], 0.5),
            (slots()[0], 0.1),
            (slots()[1], 0.0),
            (slots()[1], 1.0),
        ]
        .into_iter()
        .enumerate()
        {
            let work = work(array, ratio, round as u64);
            let found = round_of(&mut runner, tracker, &[work]);
            assert_eq!(found, written_by(&work), "{by:?}, round {round}");
        }
    }
}

#[test]
fn two_vcpus_write_into_two_slots_at_once() {
    for by in ALL {
        let Some((machine, vcpus)) = machine(by, 2, slots()) else {
            continue;
        };
        let mut runner = runner(&machine, vcpus);
        let mut tracker = by.start(&machine).unwrap();
        for round in 0..3 {
            let works = [work(slots()[0], 0.3, round), work(slots()[1], 0.7, round)];
            let found = round_of(&mut runner, tracker.as_mut(), &works);
            let expected: Vec<_> = works.iter().flat_map(written_by).collect();
            assert_eq!(found, expected, "{by:?}, round {round}");
            assert_eq!(machine.operations(), 1324);
        }
    }
}

#[test]
fn a_full_ring_stops_its_vcpu_and_nothing_is_missed() {
    // More pages than the ring has entries.
    let array = slot(1024, 5000);
    let Some((machine, vcpus)) = machine(TrackerKind::Ring, 1, vec![array]) else {
        return;
    };
    let mut runner = runner(&machine, vcpus);
    let mut ring = DirtyRing::start(Arc::clone(&machine)).unwrap();
    for seed in 0..2 {
        let work = work(array, 1.0, seed);
        runner.begin(&[work]).unwrap();
        runner.wait(WORK_TIMEOUT).unwrap();
        let round = ring.round().unwrap();
        let missing = written_by(&work).len() - round.pages().len();
        assert!(missing as u64 <= round.lost, "{missing} of {}", round.lost);
        if round.lost > 0 {
            // Whatever it stopped for, it went on, and the loss is counted.
            let lost = round.lost;
            skip(
                Lack::Kvm,
                format_args!("this host's KVM overwrote {lost} entries"),
            );
            return;
        }
        assert_eq!(round.pages(), written_by(&work));
        // Of 1024 entries KVM keeps some back.
        assert!((4..100).contains(&round.full_exits), "{}", round.full_exits);
    }
    assert_eq!(ring.round().unwrap().full_exits, 0);
}

#[test]
fn what_is_not_copied_is_told_again_when_protection_is_late() {
    let Some((machine, vcpus)) = machine(TrackerKind::LogLate, 1, slots()) else {
        return;
    };
    let mut runner = runner(&machine, vcpus);
    let mut log = DirtyLog::start(Arc::clone(&machine), Clearing::BeforeCopy).unwrap();
    let work = work(slots()[1], 1.0, 1);
    runner.begin(&[work]).unwrap();
    runner.wait(WORK_TIMEOUT).unwrap();
    let all = written_by(&work);
    assert_eq!(log.round().unwrap().pages(), all);
    log.before_copy(&all[100..]).unwrap();
    assert_eq!(log.round().unwrap().pages(), &all[..100]);
    log.before_copy(&all[..100]).unwrap();
    assert_eq!(log.round().unwrap().pages(), []);
}

#[test]
fn after_a_tracker_a_machine_writes_untold_and_can_be_tracked_again() {
    for by in ALL {
        let Some((machine, vcpus)) = machine(by, 1, slots()) else {
            continue;
        };
        let mut runner = runner(&machine, vcpus);
        let work = work(slots()[1], 1.0, 1);
        let mut tracker = by.start(&machine).unwrap();
        assert_eq!(round_of(&mut runner, tracker.as_mut(), &[work]).len(), 300);
        drop(tracker);
        runner.begin(&[work]).unwrap();
        runner.wait(WORK_TIMEOUT).unwrap();
        let mut tracker = by.start(&machine).unwrap();
        assert_eq!(round_of(&mut runner, tracker.as_mut(), &[]), [], "{by:?}");
        let again = round_of(&mut runner, tracker.as_mut(), &[work]);
        assert_eq!(again.len(), 300, "{by:?}");
    }
}

#[test]
fn a_machine_that_runs_is_copied_as_it_is() {
    let array = slot(1024, 4096);
    for by in ALL {
        let Some((machine, vcpus)) = machine(by, 1, vec![array, slot(1 << 20, 100)]) else {
            continue;
        };
        let mut runner = runner(&machine, vcpus);
        let endless = Work {
            passes: None,
            ..work(array, 0.8, 7)
        };
        runner.begin(&[endless]).unwrap();
        for _ in 0..2 {
            let start = || {
                let tracker = by.start(&machine)?;
                wait_for_more(&machine, machine.operations());
                Ok(Some(tracker))
            };
            let pass = precopy(&machine, &mut runner, start).unwrap();
            assert_eq!((pass.wrong_pages, pass.lost), (0, 0), "{by:?}");
            assert_eq!(pass.round_pages[0], 4196, "{by:?}");
            assert!((2..=6).contains(&pass.round_pages.len()), "{pass:?}");
            assert!(pass.operations > 0 && pass.stopped <= pass.took, "{pass:?}");
        }
        // It continues after its copy.
        wait_for_more(&machine, machine.operations());
        runner.pause().unwrap();
    }
}

#[test]
fn without_a_tracker_it_stands_still_while_it_is_copied() {
    let Some((machine, vcpus)) = machine(TrackerKind::Log, 1, slots()) else {
        return;
    };
    let mut runner = runner(&machine, vcpus);
    let endless = Work {
        passes: None,
        ..work(slots()[0], 1.0, 7)
    };
    runner.begin(&[endless]).unwrap();
    let pass = precopy(&machine, &mut runner, || Ok(None)).unwrap();
    assert_eq!((pass.round_pages, pass.wrong_pages), (vec![1324], 0));
}

#[test]
fn what_a_machine_cannot_do_is_refused_in_words() {
    let Some((machine, vcpus)) = machine(TrackerKind::Log, 1, slots()) else {
        return;
    };
    let refused = |result: Result<(), KvmError>| result.unwrap_err().to_string();
    let ring = DirtyRing::start(Arc::clone(&machine)).map(drop);
    assert_eq!(refused(ring), "no such machine: it was made without rings");
    let mut runner = runner(&machine, vcpus);
    for (array, ratio) in [
        (slot(1024, 1025), 0.5),
        (slot(1023, 2), 0.5),
        (slot(1024, 0), 0.5),
        (slot(u64::MAX, 2), 0.5),
        (slot(1024, 1), 1.5),
        (slot(1024, 1), f64::NAN),
    ] {
        runner.begin(&[work(array, ratio, 1)]).unwrap();
        let error = refused(runner.wait(WORK_TIMEOUT));
        assert!(error.contains("expected an array in one slot"), "{error}");
    }
    let overlapping = MachineConfig {
        slots: vec![slot(1024, 1024), slot(2047, 10)],
        vcpus: 1,
        ring_entries: 0,
    };
    let error = Machine::new(&overlapping).map(drop);
    assert!(refused(error).contains("KVM_SET_USER_MEMORY_REGION"));
    let Some((ringed, _)) = self::machine(TrackerKind::Ring, 1, slots()) else {
        return;
    };
    let log = DirtyLog::start(ringed, Clearing::WithRound).map(drop);
    assert_eq!(
        refused(log),
        "no such machine: one with rings has no dirty log"
    );
}
