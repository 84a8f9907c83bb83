//! Known answers, and a naive twin that follows only the text of \[PRL\].

use super::*;
use crate::description::tests::machine as description;
use crate::log::{LogReader, LogWriter, Totals};
use crate::{Description, PageLogError, RecordSource};
use proptest::prelude::*;

/// All costs are zero, except one cycle per instruction.
const FREE: CostModel = CostModel {
    instruction_thousandths: 1000,
    walk_cycles: 0,
    logged_cycles: 0,
    exit_cycles: 0,
    entry_cycles: 0,
    reset_cycles: 0,
    latency_cycles: 0,
    interrupt_cycles: 0,
};

/// An event received by a sink.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SinkEvent {
    Drained(usize, Vec<u64>),
    Interval(usize, u64, u64),
    Mark(usize, u8),
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Listener(Vec<SinkEvent>);

impl Sink for Listener {
    fn drained(&mut self, vm: usize, pages: &[PageNumber]) {
        let pages = pages.iter().map(|page| page.0).collect();
        self.0.push(SinkEvent::Drained(vm, pages));
    }

    fn interval(&mut self, vm: usize, number: u64, instructions: u64) {
        self.0.push(SinkEvent::Interval(vm, number, instructions));
    }

    fn mark(&mut self, vm: usize, id: u8) {
        self.0.push(SinkEvent::Mark(vm, id));
    }
}

fn walk_of(vcpu: u8, frame: u64, step_instructions: u32, sets_dirty: bool) -> Record {
    Record::Walk(Walk {
        vcpu,
        frame: PageNumber(frame),
        step_instructions,
        write: sets_dirty,
        fetch: false,
        sets_accessed: false,
        sets_dirty,
    })
}

fn config(mode: Mode, buffer_entries: u32, costs: CostModel) -> Config {
    Config {
        mode,
        buffer_entries,
        costs,
    }
}

fn played(config: &Config, vcpus: u32, records: &[Record]) -> (Outcome, Listener) {
    let mut machine = Machine::new(config, &[vcpus]);
    let mut listener = Listener::default();
    for record in records {
        machine.push(0, record, &mut listener);
    }
    (machine.finish(&mut listener), listener)
}

/// Walks of frames from 0 on, at this distance in instructions, each of which sets the dirty flag.
fn walks(count: u64, step_instructions: u32) -> Vec<Record> {
    let walk = |frame| walk_of(0, frame, step_instructions, true);
    (0..count).map(walk).collect()
}

#[test]
fn pml_stops_the_vm_at_the_entry_after_the_last_and_misses_nothing() {
    let costs = CostModel {
        exit_cycles: 1000,
        entry_cycles: 10,
        reset_cycles: 5,
        logged_cycles: 2,
        walk_cycles: 3,
        ..FREE
    };
    let config = config(Mode::Pml, 512, costs);
    let (outcome, listener) = played(&config, 1, &walks(512, 100));
    // Disabling PML at the end drains the buffer.
    assert_eq!(listener.0, [SinkEvent::Drained(0, (0..512).collect())]);
    assert_eq!((outcome.vms[0].full_events, outcome.vms[0].exits), (0, 1));
    let (outcome, listener) = played(&config, 1, &walks(513, 100));
    let drained = [(0..512).collect(), vec![512]].map(|pages| SinkEvent::Drained(0, pages));
    assert_eq!(listener.0, drained);
    let expected = VmOutcome {
        instructions: 51_300,
        walks: 513,
        logged: 513,
        full_events: 1,
        exits: 2,
        drained: 513,
        base_cycles: 51_300 + 3 * 513,
        logging_cycles: 2 * 1005 + 10 * 513 + 2 * 513,
        ..VmOutcome::default()
    };
    assert_eq!(outcome.vms[0], expected);
    let slowdown = outcome.vms[0].slowdown();
    assert!((slowdown - 8166.0 / 52_839.0).abs() < 1e-12, "{slowdown}");
    assert_eq!(outcome.host.busy_cycles, 0);
}

#[test]
fn pml_sees_writes_that_set_the_dirty_flag_alone_and_prl_all_walks() {
    let records: Vec<_> = (0..8).map(|n| walk_of(0, n, 1, n % 2 == 0)).collect();
    let (pml, listener) = played(&config(Mode::Pml, 4, FREE), 1, &records);
    assert_eq!(listener.0, [SinkEvent::Drained(0, vec![0, 2, 4, 6])]);
    assert_eq!((pml.vms[0].walks, pml.vms[0].logged), (8, 4));
    let (prl, _) = played(&config(Mode::Prl, 4, FREE), 1, &records);
    assert_eq!((prl.vms[0].walks, prl.vms[0].logged), (8, 7));
}

#[test]
fn pml_gives_all_pages_of_an_interval_before_its_end() {
    let mut records = walks(3, 10);
    records.push(Record::Clock {
        vcpu: 0,
        instructions: 77,
    });
    records.push(Record::Interval { number: 0 });
    records.push(Record::Mark { vcpu: 0, id: 9 });
    records.push(Record::Interval { number: 1 });
    let (outcome, listener) = played(&config(Mode::Pml, 512, FREE), 1, &records);
    let told = [
        SinkEvent::Drained(0, vec![0, 1, 2]),
        SinkEvent::Interval(0, 0, 77),
        SinkEvent::Mark(0, 9),
        SinkEvent::Interval(0, 1, 77),
    ];
    assert_eq!(listener.0, told);
    assert_eq!((outcome.vms[0].exits, outcome.vms[0].intervals), (1, 2));
    let (outcome, listener) = played(&config(Mode::Prl, 512, FREE), 1, &records);
    assert_eq!(listener.0, told[1..]);
    assert_eq!((outcome.vms[0].left, outcome.vms[0].exits), (3, 0));
}

#[test]
fn prl_misses_the_page_that_finds_the_buffer_full_and_those_until_the_reset() {
    let costs = CostModel {
        latency_cycles: 20,
        interrupt_cycles: 30,
        entry_cycles: 1,
        reset_cycles: 6,
        ..FREE
    };
    // The fifth walk, at 50, finds it full; the handler begins at 70, and resets at 70 + 30 + 4 + 6 = 110.
    let (outcome, listener) = played(&config(Mode::Prl, 4, costs), 1, &walks(12, 10));
    let expected = VmOutcome {
        instructions: 120,
        walks: 12,
        logged: 6,
        full_events: 1,
        missed_at_full: 1,
        missed_in_handler: 5,
        drained: 4,
        left: 2,
        base_cycles: 120,
        ..VmOutcome::default()
    };
    assert_eq!(outcome.vms[0], expected);
    assert_eq!(outcome.vms[0].missed(), 6);
    assert_eq!(listener.0, [SinkEvent::Drained(0, vec![0, 1, 2, 3])]);
    let host = HostOutcome {
        interrupts: 1,
        passes: 1,
        busy_cycles: 40,
        elapsed_cycles: 120,
    };
    assert_eq!(outcome.host, host);
    assert!((outcome.host.load() - 1.0 / 3.0).abs() < 1e-12);
}

#[test]
fn a_handler_of_no_cost_misses_one_page_for_each_full_buffer() {
    let (outcome, listener) = played(&config(Mode::Prl, 512, FREE), 1, &walks(2000, 7));
    let vm = outcome.vms[0];
    // 512 logged, one missed, and so on.
    assert_eq!((vm.full_events, vm.missed()), (3, 3));
    assert_eq!((vm.drained, vm.left), (3 * 512, 2000 - 3 * 513));
    assert!(matches!(&listener.0[1], SinkEvent::Drained(0, pages) if pages[0] == 513));
}

#[test]
fn one_pass_takes_all_buffers_that_are_full_and_the_next_those_that_became_so() {
    let costs = CostModel {
        latency_cycles: 10,
        interrupt_cycles: 0,
        entry_cycles: 10,
        ..FREE
    };
    // Buffers of one entry: the second walk of each vCPU finds it full.
    let twice = |vcpu: u8, step| {
        let page = u64::from(vcpu);
        [walk_of(vcpu, page, step, true), walk_of(vcpu, 0, 0, true)]
    };
    let records: Vec<_> = [
        twice(0, 100), // full at 100: the handler begins at 110
        twice(1, 105), // full at 105: in the first pass, which ends at 130
        twice(2, 115), // full at 115: in the second, to 140
    ]
    .concat();
    let (outcome, listener) = played(&config(Mode::Prl, 1, costs), 3, &records);
    assert_eq!((outcome.host.interrupts, outcome.host.passes), (1, 2));
    assert_eq!(outcome.host.busy_cycles, 30);
    assert_eq!(outcome.host.elapsed_cycles, 140);
    let drained = [0, 1, 2].map(|page| SinkEvent::Drained(0, vec![page]));
    assert_eq!(listener.0, drained);
}

#[test]
fn a_vcpu_that_slept_takes_up_where_the_others_are() {
    let costs = CostModel {
        latency_cycles: 50,
        ..FREE
    };
    let records = [
        walk_of(0, 1, 1000, true),
        walk_of(0, 2, 0, true),  // full at 1000: reset at 1050
        walk_of(1, 3, 40, true), // runs its 41st instruction at 1000, not at 40
        walk_of(1, 4, 60, true), // 1060: the host has worked by now
        walk_of(0, 5, 0, true),
    ];
    let (outcome, listener) = played(&config(Mode::Prl, 1, costs), 2, &records);
    assert_eq!(outcome.host.elapsed_cycles, 1110);
    assert_eq!(outcome.vms[0].left, 1);
    let told = [vec![1], vec![3]].map(|pages| SinkEvent::Drained(0, pages));
    assert_eq!(listener.0, told);
    assert_eq!(outcome.vms[0].instructions, 1100);
}

/// Records of a machine in memory, returned in batches of a given size.
struct MemoryRecords {
    description: Description,
    records: Vec<Record>,
    next: usize,
    batch: usize,
}

impl MemoryRecords {
    fn new(vcpus: u32, records: &[Record], batch: usize) -> Self {
        Self {
            description: Description {
                vcpus,
                ..description()
            },
            records: records.to_vec(),
            next: 0,
            batch,
        }
    }
}

impl RecordSource for MemoryRecords {
    fn description(&self) -> &Description {
        &self.description
    }

    fn next_batch(&mut self, batch: &mut Vec<Record>) -> Result<bool, PageLogError> {
        batch.clear();
        let end = self.records.len().min(self.next + self.batch);
        batch.extend_from_slice(&self.records[self.next..end]);
        self.next = end;
        Ok(!batch.is_empty())
    }
}

/// Results of a cycle-by-cycle run of \[PRL\] §4.1-4.3.
#[derive(Debug, Default, PartialEq, Eq)]
struct NaiveRun {
    told: Vec<SinkEvent>,
    /// Logged, missed at full, missed in the handler; by VM.
    counts: Vec<[u64; 3]>,
    interrupts: u64,
    passes: u64,
    busy: u64,
    elapsed: u64,
}

/// The naive twin: steps through all cycles, and checks in each whether the handler starts or ends something.
fn naive(costs: &CostModel, entries: usize, vms: &[(u32, Vec<Record>)]) -> NaiveRun {
    let mut result = NaiveRun {
        counts: vec![[0; 3]; vms.len()],
        ..NaiveRun::default()
    };
    // By VM and vCPU: pages, whether logging is suspended, the vCPU's cycle.
    let mut vcpus: Vec<Vec<(Vec<u64>, bool, u64)>> = Vec::new();
    for vm in vms {
        vcpus.push(vec![(Vec::new(), false, 0); vm.0 as usize]);
    }
    let mut ran = vec![0u64; vms.len()];
    let mut next = vec![0; vms.len()];
    let mut now = vec![0u64; vms.len()];
    let mut full = Vec::new();
    let mut called = None;
    let mut pass: Option<(Vec<(usize, usize)>, u64)> = None;
    let mut cycle = 0;
    loop {
        let time_of = |vm: usize| match vms[vm].1.get(next[vm]) {
            Some(Record::Walk(walk)) => {
                let own = vcpus[vm][usize::from(walk.vcpu)].2 + u64::from(walk.step_instructions);
                Some(own.max(now[vm]))
            }
            Some(_) => Some(now[vm]),
            None => None,
        };
        let times = (0..vms.len()).filter_map(|vm| Some((time_of(vm)?, vm)));
        let event = times.min();
        // After the last event, continue until the handler has finished.
        while event.map_or(called.is_some() || pass.is_some(), |event| cycle <= event.0) {
            let mut before = 0;
            let mut begins = false;
            if called == Some(cycle) {
                called = None;
                before = u64::from(costs.interrupt_cycles);
                begins = true;
            }
            loop {
                if pass.as_ref().is_some_and(|pass| pass.1 == cycle) {
                    for (vm, vcpu) in pass.take().unwrap().0 {
                        let pages = std::mem::take(&mut vcpus[vm][vcpu].0);
                        result.told.push(SinkEvent::Drained(vm, pages));
                        vcpus[vm][vcpu].1 = false;
                    }
                    begins = !full.is_empty();
                }
                if !std::mem::take(&mut begins) {
                    break;
                }
                let each = entries as u64 * u64::from(costs.entry_cycles);
                let each = each + u64::from(costs.reset_cycles);
                let buffers: Vec<_> = std::mem::take(&mut full);
                let cycles = std::mem::take(&mut before) + each * buffers.len() as u64;
                result.passes += 1;
                result.busy += cycles;
                result.elapsed = cycle + cycles;
                pass = Some((buffers, cycle + cycles));
            }
            if event.is_some_and(|event| event.0 == cycle) {
                break;
            }
            cycle += 1;
        }
        let Some((time, vm)) = event else {
            result.elapsed = result.elapsed.max(now.into_iter().max().unwrap_or(0));
            return result;
        };
        let record = vms[vm].1[next[vm]];
        next[vm] += 1;
        now[vm] = time;
        let Record::Walk(walk) = record else {
            if let Record::Interval { number } = record {
                result.told.push(SinkEvent::Interval(vm, number, ran[vm]));
            }
            continue;
        };
        ran[vm] += u64::from(walk.step_instructions);
        let vcpu = usize::from(walk.vcpu);
        let (pages, suspended, own) = &mut vcpus[vm][vcpu];
        *own = time + u64::from(costs.walk_cycles);
        if *suspended {
            result.counts[vm][2] += 1;
        } else if pages.len() < entries {
            pages.push(walk.frame.0);
            *own += u64::from(costs.logged_cycles);
            result.counts[vm][0] += 1;
        } else {
            *suspended = true;
            result.counts[vm][1] += 1;
            full.push((vm, vcpu));
            if called.is_none() && pass.is_none() {
                result.interrupts += 1;
                called = Some(time + u64::from(costs.latency_cycles));
            }
        }
    }
}

fn vms() -> impl Strategy<Value = Vec<(u32, Vec<Record>)>> {
    let record = (0u8..3, 0u64..50, 0u32..12, 0u8..20);
    let vm = (1u32..4, prop::collection::vec(record, 0..150));
    let vm = vm.prop_map(|(vcpus, records)| {
        let mut number = 0;
        let record = |(vcpu, frame, step, kind): (u8, u64, u32, u8)| {
            let vcpu = vcpu % u8::try_from(vcpus).unwrap();
            if kind == 0 {
                number += 1;
                Record::Interval { number: number - 1 }
            } else {
                walk_of(vcpu, frame, step, true)
            }
        };
        (vcpus, records.into_iter().map(record).collect())
    });
    prop::collection::vec(vm, 1..4)
}

proptest! {
    #[test]
    fn prl_agrees_with_a_run_cycle_by_cycle(
        vms in vms(),
        entries in 1u32..6,
        costs in prop::array::uniform6(0u32..15),
        batch in 1usize..40,
    ) {
        let [walk_cycles, logged_cycles, entry_cycles, reset_cycles, latency_cycles, interrupt_cycles] = costs;
        let costs = CostModel {
            walk_cycles,
            logged_cycles,
            entry_cycles,
            reset_cycles,
            latency_cycles,
            interrupt_cycles,
            ..FREE
        };
        let expected = naive(&costs, entries as usize, &vms);
        let mut kept: Vec<_> = vms.iter().map(|vm| MemoryRecords::new(vm.0, &vm.1, batch)).collect();
        let mut sources: Vec<_> = kept.iter_mut().map(|vm| vm as &mut dyn RecordSource).collect();
        let mut listener = Listener::default();
        let config = config(Mode::Prl, entries, costs);
        let outcome = run(&config, &mut sources, &mut listener).unwrap();
        let counts = outcome.vms.iter().map(|vm| {
            prop_assert_eq!(vm.logged, vm.drained + vm.left);
            prop_assert_eq!(vm.walks, vm.logged + vm.missed());
            prop_assert_eq!(vm.full_events, vm.missed_at_full);
            Ok([vm.logged, vm.missed_at_full, vm.missed_in_handler])
        });
        let counts: Vec<_> = counts.collect::<Result<_, _>>()?;
        let found = NaiveRun {
            told: listener.0,
            counts,
            interrupts: outcome.host.interrupts,
            passes: outcome.host.passes,
            busy: outcome.host.busy_cycles,
            elapsed: outcome.host.elapsed_cycles,
        };
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn pml_brings_every_page_in_its_interval_and_in_its_vcpus_order(
        vms in vms(),
        entries in 1u32..6,
    ) {
        for (vcpus, records) in vms {
            let costs = CostModel::default();
            let (outcome, listener) = played(&config(Mode::Pml, entries, costs), vcpus, &records);
            let (mut pages, mut expected) = (Vec::new(), Vec::new());
            for record in records {
                match record {
                    Record::Walk(walk) => pages.push(walk.frame.0),
                    _ => expected.push(std::mem::take(&mut pages)),
                }
            }
            expected.push(pages);
            let (mut pages, mut found) = (Vec::new(), Vec::new());
            for told in listener.0 {
                match told {
                    SinkEvent::Drained(_, drained) => pages.extend(drained),
                    _ => found.push(std::mem::take(&mut pages)),
                }
            }
            found.push(pages);
            if vcpus > 1 {
                // Buffers of several vCPUs are interleaved.
                expected.iter_mut().chain(&mut found).for_each(|pages| pages.sort_unstable());
            }
            prop_assert_eq!(found, expected);
            prop_assert_eq!((outcome.vms[0].missed(), outcome.vms[0].left), (0, 0));
            prop_assert_eq!(outcome.host, HostOutcome {
                elapsed_cycles: outcome.host.elapsed_cycles,
                ..HostOutcome::default()
            });
        }
    }

    #[test]
    fn a_log_replayed_is_the_run_it_was_taken_from(vms in vms(), entries in 1u32..6) {
        for (vcpus, records) in vms {
            for mode in [Mode::Pml, Mode::Prl] {
                let config = config(mode, entries, CostModel::default());
                let live = played(&config, vcpus, &records);
                let machine = Description { vcpus, ..description() };
                let mut writer = LogWriter::new(Vec::new(), &machine).unwrap();
                writer.write(&records).unwrap();
                let file = writer.finish(Totals::default()).unwrap();
                let mut reader = LogReader::new(&file[..], "t").unwrap();
                let mut listener = Listener::default();
                let outcome = run(&config, &mut [&mut reader], &mut listener).unwrap();
                prop_assert_eq!((outcome, listener), live);
            }
        }
    }
}

#[test]
fn a_source_that_fails_ends_the_run_with_its_error() {
    let mut writer = LogWriter::new(Vec::new(), &description()).unwrap();
    writer.write(&walks(20, 1)).unwrap();
    let file = writer.finish(Totals::default()).unwrap();
    let cut = &file[..file.len() - 1];
    let mut reader = LogReader::new(cut, "t").unwrap();
    let mut listener = Listener::default();
    let result = run(&Config::new(Mode::Prl), &mut [&mut reader], &mut listener);
    assert!(matches!(result, Err(PageLogError::Cut { records: 20, .. })));
}

#[test]
fn times_beyond_the_number_line_saturate() {
    let records = [
        Record::Clock {
            vcpu: 0,
            instructions: crate::record::COUNT_MAX,
        },
        walk_of(0, 1, crate::record::STEP_MAX, true),
        walk_of(0, 2, crate::record::STEP_MAX, true),
        walk_of(0, 3, 0, true),
    ];
    let costs = CostModel {
        instruction_thousandths: u32::MAX,
        interrupt_cycles: u32::MAX,
        ..CostModel::default()
    };
    let (outcome, _) = played(&config(Mode::Prl, 1, costs), 1, &records);
    assert_eq!(outcome.vms[0].walks, 3);
    assert_eq!(outcome.host.elapsed_cycles, u64::MAX / Time::PER_CYCLE);
}
