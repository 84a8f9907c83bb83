//! Moves of VMs whose parts follow their targets a bit at each poll, however many polls a second has.

use std::collections::BTreeMap;
use std::time::Instant;

use plimsoll_actuator::{
    ActuatorError, Holding, MemoryPart, Observation, Part, Patience, Tracker, VmMemory,
};
use plimsoll_daemon::moves::{MovableVm, Move, MoveProgress};
use plimsoll_flow::VmId;

const MIB: u64 = 1 << 20;

/// A part that answers from some poll on, and moves by so much at each.
#[derive(Debug)]
struct PacedPart {
    tracker: Tracker,
    actual_bytes: u64,
    target_bytes: u64,
    max_bytes: u64,
    pace_bytes: u64,
    silent_polls: u32,
}

impl PacedPart {
    fn new(actual_mib: u64, max_mib: u64, pace_mib: u64) -> Self {
        Self {
            tracker: Tracker::new(Patience::default()),
            actual_bytes: actual_mib * MIB,
            target_bytes: actual_mib * MIB,
            max_bytes: max_mib * MIB,
            pace_bytes: pace_mib * MIB,
            silent_polls: 0,
        }
    }
}

impl MemoryPart for PacedPart {
    fn poll(&mut self, _failures: &mut Vec<ActuatorError>) -> Observation {
        let left = self.target_bytes.abs_diff(self.actual_bytes);
        let step = left.min(self.pace_bytes);
        match self.target_bytes > self.actual_bytes {
            true => self.actual_bytes += step,
            false => self.actual_bytes -= step,
        }
        match self.silent_polls.checked_sub(1) {
            Some(left) => self.silent_polls = left,
            None => self.tracker.see(self.actual_bytes, Instant::now()),
        }
        Observation::default()
    }

    fn part(&self) -> Part {
        (self.tracker).part(Some(self.max_bytes), None, Instant::now())
    }

    fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        self.target_bytes = target_bytes;
        self.tracker.tell(target_bytes, true, Instant::now());
        Ok(())
    }
}

fn memory(name: &str, direct: PacedPart, cache: Option<PacedPart>) -> (String, VmMemory) {
    let cache = cache.map(|cache| Box::new(cache) as Box<dyn MemoryPart>);
    let memory = VmMemory::new(VmId(name.to_owned()), Box::new(direct), cache);
    (name.to_owned(), memory)
}

fn mib(direct: u64, cache: u64) -> Holding {
    Holding {
        direct_bytes: direct * MIB,
        cache_bytes: cache * MIB,
    }
}

/// Moves until that ends; returns how, and what all VMs could have held at most since all have answered.
fn run(
    vms: Vec<(String, VmMemory)>,
    parts: Vec<(String, Holding, Holding)>,
    divided_mib: u64,
) -> (MoveProgress, u64) {
    let mut vms: Vec<_> = vms
        .into_iter()
        .map(|(name, memory)| (name, memory.status(), memory))
        .collect();
    let now = Instant::now();
    let mut under_way = Move::begin(parts, now);
    let mut most_bytes = 0;
    for _ in 0..10_000 {
        for (_, status, memory) in &mut vms {
            *status = memory.poll();
        }
        let held = vms.iter_mut().map(|(name, status, actuator)| {
            let vm = MovableVm {
                actuator,
                status,
                // It can give all that it has.
                swap_bytes: 1 << 40,
                miss_cost_ms: 1.0,
                first_bytes: 0,
                unanswered: Holding::default(),
            };
            (name.clone(), vm)
        });
        let mut held: BTreeMap<_, _> = held.collect();
        let progress = under_way.advance(&mut held, divided_mib * MIB, now, &mut || ());
        drop(held);
        if vms
            .iter()
            .all(|(_, status, _)| status.direct.age_ms.is_some())
        {
            let reserved = vms.iter().map(|(_, status, _)| status.reserved().bytes());
            most_bytes = reserved.sum::<u64>().max(most_bytes);
        }
        if progress != MoveProgress::InProgress {
            return (progress, most_bytes);
        }
    }
    panic!("the move does not end: {:?}", under_way.steps());
}

#[test]
fn memory_goes_into_a_cache_whenever_the_balloon_arrives() {
    for pace_mib in 1..=100 {
        let direct = PacedPart::new(192, 192, pace_mib);
        let vm = memory("one", direct, Some(PacedPart::new(4, 196, 1000)));
        let part = ("one".to_owned(), mib(192, 4), mib(98, 98));
        let (progress, most_bytes) = run(vec![vm], vec![part], 196);
        assert_eq!(progress, MoveProgress::Done, "{pace_mib} MiB a poll");
        assert!(
            most_bytes <= 196 * MIB,
            "{pace_mib} MiB a poll: {most_bytes}"
        );
    }
}

#[test]
fn a_vm_that_has_less_than_was_assumed_grows_into_free_memory_alone() {
    // It is to have 500 of its 512 MiB of RAM, and turns out to have 300; another has what it lacks, and gives it slowly.
    let late = PacedPart {
        silent_polls: 3,
        ..PacedPart::new(300, 512, 1000)
    };
    let vms = vec![
        memory("late", late, None),
        memory("other", PacedPart::new(600, 1024, 10), None),
    ];
    let parts = vec![
        ("late".to_owned(), mib(512, 0), mib(500, 0)),
        ("other".to_owned(), mib(600, 0), mib(400, 0)),
    ];
    let (progress, most_bytes) = run(vms, parts, 900);
    assert_eq!(progress, MoveProgress::Done);
    assert_eq!(most_bytes, 900 * MIB);
}
