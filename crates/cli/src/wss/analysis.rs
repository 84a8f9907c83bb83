//! One pass over the records of a run, and what every estimator made of it.

use plimsoll_estimator::FilteredLru;
use plimsoll_estimator::working_set::{
    Pml, PmlStep, Prl, PrlStep, Sampling, Settled, TouchedPages,
};
use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, PageNumber};
use plimsoll_pagelog::Description;
use plimsoll_pagelog::log::Totals;
use plimsoll_pagelog::machine::{HostOutcome, Machine, Mode, Sink, VmOutcome};
use plimsoll_pagelog::record::{MARK_BEGIN, MARK_END, Record};

use super::options::{EstimatorArgs, Method};
use super::steps::{Step, Steps};

/// Where RAM goes on above the hole.
const ABOVE_HOLE: u64 = 4 << 30;
/// From a frame to its address.
const FRAME_SHIFT: u32 = 12;

/// An estimator behind the logging buffers of a machine.
struct Logged<E> {
    machine: Machine,
    sink: E,
    settled: Option<Settling>,
}

/// When an estimator settled.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settling {
    pub(super) settled: Settled,
    /// Instructions, or references, since the start.
    pub(super) at: u64,
    /// The truth at that time.
    pub(super) truth: Option<PageCount>,
}

/// What takes drained pages, and may settle.
trait Estimating: Sink {
    fn settled(&self) -> Option<Settled>;
}

struct PrlSink {
    prl: Prl,
    step: Option<PrlStep>,
}

impl Sink for PrlSink {
    fn drained(&mut self, _vm: usize, pages: &[PageNumber]) {
        self.prl.log(pages);
    }

    fn interval(&mut self, _vm: usize, _number: u64, _instructions: u64) {
        self.step = Some(self.prl.end_interval());
    }
}

impl Estimating for PrlSink {
    fn settled(&self) -> Option<Settled> {
        self.prl.settled()
    }
}

struct PmlSink {
    pml: Pml,
    step: Option<PmlStep>,
}

impl Sink for PmlSink {
    fn drained(&mut self, _vm: usize, pages: &[PageNumber]) {
        self.pml.log(pages);
    }

    fn interval(&mut self, _vm: usize, _number: u64, _instructions: u64) {
        self.step = Some(self.pml.end_interval());
    }
}

impl Estimating for PmlSink {
    fn settled(&self) -> Option<Settled> {
        self.pml.settled()
    }
}

impl<E: Estimating> Logged<E> {
    fn new(machine: Machine, sink: E) -> Self {
        Self {
            machine,
            sink,
            settled: None,
        }
    }

    fn push(&mut self, record: &Record) {
        self.machine.push(0, record, &mut self.sink);
    }

    /// Takes note if it settled with the interval that just ended.
    fn note(&mut self, at: u64, truth: Option<PageCount>) {
        if self.settled.is_none() {
            let settled = self.sink.settled();
            self.settled = settled.map(|settled| Settling { settled, at, truth });
        }
    }

    fn finish(mut self) -> (E, Option<Settling>, Logging) {
        let outcome = self.machine.finish(&mut self.sink);
        let logging = Logging {
            vm: outcome.vms.first().copied().unwrap_or_default(),
            host: outcome.host,
        };
        (self.sink, self.settled, logging)
    }
}

/// What logging did and cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Logging {
    pub(super) vm: VmOutcome,
    pub(super) host: HostOutcome,
}

/// What an estimator behind logging buffers came to.
#[derive(Debug)]
pub(super) struct Found<E> {
    pub(super) estimator: E,
    pub(super) settled: Option<Settling>,
    pub(super) logging: Logging,
}

/// What all of them came to.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) prl: Option<Found<Prl>>,
    pub(super) pml: Option<Found<Pml>>,
    /// Of all references, and of those past the filter that were not first ones.
    pub(super) curves: Option<(Result<MissRatioCurve, CurveError>, Option<MissRatioCurve>)>,
    /// In pages of 4 KiB, as the curves are.
    pub(super) filter: PageCount,
    pub(super) has_walks: bool,
    pub(super) has_references: bool,
    pub(super) steps: Steps,
    pub(super) intervals: u64,
    pub(super) instructions: u64,
    pub(super) accesses: u64,
    pub(super) walks: u64,
    /// Whether the guest marked a part of its run, which alone was looked at.
    pub(super) marked: bool,
    pub(super) totals: Option<Totals>,
    /// Why the log ends early, if it does.
    pub(super) cut: Option<String>,
}

/// The estimators at work.
pub(super) struct Analysis<'a> {
    args: &'a EstimatorArgs,
    description: &'a Description,
    memory: Option<PageCount>,
    run: Run,
    /// Instructions of each vCPU since its start, and at the start of `run`.
    clocks: Vec<u64>,
    started: Vec<u64>,
    marked: bool,
    ended: bool,
}

/// What is begun anew at the guest's mark.
struct Run {
    truth: Option<TouchedPages>,
    prl: Option<Logged<PrlSink>>,
    pml: Option<Logged<PmlSink>>,
    esx: Option<Sampling>,
    lru: Option<FilteredLru>,
    steps: Steps,
    intervals: u64,
    accesses: u64,
    walks: u64,
}

impl Run {
    fn new(args: &EstimatorArgs, description: &Description, memory: Option<PageCount>) -> Self {
        let with_walks = |method| description.walks && args.wants(method);
        // What no QEMU wrote has no clock.
        let has_clock = description.plugin_api > 0;
        let machine = |mode| Machine::new(&args.machine(mode, has_clock), &[description.vcpus]);
        let prl = || PrlSink {
            prl: Prl::new(args.prl()),
            step: None,
        };
        let pml = || PmlSink {
            pml: Pml::new(args.pml()),
            step: None,
        };
        let sampled = memory.filter(|_| with_walks(Method::Esx));
        Self {
            truth: description.walks.then(|| TouchedPages::new(args.truth())),
            prl: with_walks(Method::Prl).then(|| Logged::new(machine(Mode::Prl), prl())),
            pml: with_walks(Method::Pml).then(|| Logged::new(machine(Mode::Pml), pml())),
            esx: sampled.map(|memory| Sampling::new(args.sampling(), memory)),
            lru: (description.references && args.wants(Method::Mrc))
                .then(|| FilteredLru::new(filter_of(description))),
            steps: Steps::new(),
            intervals: 0,
            accesses: 0,
            walks: 0,
        }
    }

    /// A walk to a page of the TLB.
    fn walk(&mut self, page: PageNumber, description: &Description) {
        self.walks += 1;
        if let Some(truth) = &mut self.truth {
            truth.touch(page);
        }
        if let Some(esx) = &mut self.esx {
            esx.touch(ram_page(page, description));
        }
    }

    /// An interval ended at so many instructions, and the machines know.
    fn interval(&mut self, at: u64) {
        let truth = self.truth.as_mut().map(TouchedPages::end_interval);
        let working_set = truth.map(|truth| truth.working_set);
        if let Some(prl) = &mut self.prl {
            prl.note(at, working_set);
        }
        if let Some(pml) = &mut self.pml {
            pml.note(at, working_set);
        }
        self.steps.push(Step {
            number: self.intervals,
            at,
            truth,
            prl: self.prl.as_ref().and_then(|prl| prl.sink.step),
            pml: self.pml.as_ref().and_then(|pml| pml.sink.step),
            esx: self.esx.as_mut().map(Sampling::end_interval),
        });
        self.intervals += 1;
    }
}

impl<'a> Analysis<'a> {
    pub(super) fn new(
        args: &'a EstimatorArgs,
        description: &'a Description,
        memory: Option<PageCount>,
    ) -> Self {
        let vcpus = vec![0; usize::try_from(description.vcpus).unwrap_or(0)];
        Self {
            args,
            description,
            memory,
            run: Run::new(args, description, memory),
            clocks: vcpus.clone(),
            started: vcpus,
            marked: false,
            ended: false,
        }
    }

    /// References so far.
    pub(super) fn accesses(&self) -> u64 {
        self.run.accesses
    }

    /// Takes the next records; where `by_marks`, only those between the guest's first mark of a begin and the end after it count.
    pub(super) fn take(&mut self, records: &[Record], by_marks: bool) {
        for record in records {
            if self.ended {
                return;
            }
            if let Record::Mark { id, .. } = *record
                && by_marks
            {
                self.mark(id);
            }
            self.one(record);
        }
    }

    fn mark(&mut self, id: u8) {
        if id == MARK_BEGIN && !self.marked {
            self.marked = true;
            self.started.clone_from(&self.clocks);
            // What the filters hold, and the order of what lies below, goes on.
            let lru = self.run.lru.take();
            self.run = Run::new(self.args, self.description, self.memory);
            self.run.lru = lru;
            if let Some(lru) = &mut self.run.lru {
                lru.clear_counts();
            }
        } else if id == MARK_END && self.marked {
            self.ended = true;
        }
    }

    fn one(&mut self, record: &Record) {
        let mut record = *record;
        match &mut record {
            Record::Walk(walk) => {
                self.clocks[usize::from(walk.vcpu)] += u64::from(walk.step_instructions);
                walk.frame = tlb_page(walk.frame.0 << FRAME_SHIFT, self.description);
                self.run.walk(walk.frame, self.description);
            }
            Record::Clock { vcpu, instructions } => {
                let vcpu = usize::from(*vcpu);
                self.clocks[vcpu] = self.clocks[vcpu].max(*instructions);
                // To the machines, the run began at the mark.
                *instructions = instructions.saturating_sub(self.started[vcpu]);
            }
            Record::Accesses { count, .. } => {
                self.run.accesses = self.run.accesses.saturating_add(*count);
                if let Some(lru) = &mut self.run.lru {
                    lru.accesses(*count);
                }
            }
            Record::Enter { frame, .. } => {
                if let Some(lru) = &mut self.run.lru {
                    lru.enter(*frame);
                }
            }
            Record::Leave { frame, .. } => {
                if let Some(lru) = &mut self.run.lru {
                    lru.leave(*frame);
                }
            }
            Record::Interval { .. } | Record::Mark { .. } | Record::End => {}
        }
        if let Some(prl) = &mut self.run.prl {
            prl.push(&record);
        }
        if let Some(pml) = &mut self.run.pml {
            pml.push(&record);
        }
        if let Record::Interval { .. } = record {
            let at = self.instructions();
            self.run.interval(at);
        }
    }

    /// Instructions of all vCPUs since the run began.
    fn instructions(&self) -> u64 {
        let each = self.clocks.iter().zip(&self.started);
        each.fold(0, |sum, (now, started)| {
            sum.saturating_add(now.saturating_sub(*started))
        })
    }

    pub(super) fn finish(self) -> Results {
        let instructions = self.instructions();
        let run = self.run;
        let curves = run.lru.map(|lru| (lru.curve(), lru.curve_past_filter()));
        Results {
            prl: run.prl.map(|prl| {
                let (sink, settled, logging) = prl.finish();
                Found {
                    estimator: sink.prl,
                    settled,
                    logging,
                }
            }),
            pml: run.pml.map(|pml| {
                let (sink, settled, logging) = pml.finish();
                Found {
                    estimator: sink.pml,
                    settled,
                    logging,
                }
            }),
            curves,
            filter: filter_of(self.description),
            has_walks: self.description.walks,
            has_references: self.description.references,
            steps: run.steps,
            intervals: run.intervals,
            instructions,
            accesses: run.accesses,
            walks: run.walks,
            marked: self.marked,
            totals: None,
            cut: None,
        }
    }
}

/// Pages of all vCPUs' filters.
fn filter_of(description: &Description) -> PageCount {
    PageCount(u64::from(description.filter_pages) * u64::from(description.vcpus))
}

/// The page of the TLB that an address belongs to.
fn tlb_page(address: u64, description: &Description) -> PageNumber {
    description.tlb_page.page_of(address)
}

/// A page of the TLB as one of RAM, counted without the hole.
fn ram_page(page: PageNumber, description: &Description) -> PageNumber {
    match page.0.checked_sub(tlb_page(ABOVE_HOLE, description).0) {
        Some(above) => PageNumber(tlb_page(description.below_4g_bytes, description).0 + above),
        None => page,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::PageSize;
    use plimsoll_pagelog::RecordSource;
    use plimsoll_pagelog::mmu::{Config, Emulated};
    use plimsoll_source::synthetic::{Pattern, Workload};

    #[test]
    fn pages_above_the_hole_follow_those_below() {
        let source = Workload::of(Pattern::Uniform {
            pages: PageCount(1),
            references: 1,
        });
        let source = source.source().unwrap();
        let machine = Emulated::new(source, &Config::default()).unwrap();
        let mut machine = machine.description().clone();
        (machine.ram_bytes, machine.below_4g_bytes) = (6 << 30, 3 << 30);
        for (bytes, per_gib) in [(4096, 1 << 18), (2 << 20, 1 << 9)] {
            machine.tlb_page = PageSize::new(bytes).unwrap();
            let page = |address| ram_page(tlb_page(address, &machine), &machine).0;
            assert_eq!(page((3 << 30) - 1), 3 * per_gib - 1);
            assert_eq!(page(4 << 30), 3 * per_gib);
            assert_eq!(page((7 << 30) - 1), 6 * per_gib - 1);
        }
    }
}
