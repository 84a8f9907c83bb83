//! Evaluates the records of a run in one pass by every estimator.

use plimsoll_estimator::FilteredLru;
use plimsoll_estimator::registry::{Feed, METHODS, Method, Settings};
use plimsoll_estimator::working_set::{SettledSize, WorkingSetEstimator};
use plimsoll_flow::{CurveError, MissRatioCurve, PageCount, PageNumber};
use plimsoll_pagelog::Description;
use plimsoll_pagelog::log::Totals;
use plimsoll_pagelog::machine::{HostOutcome, Machine, Mode, Sink, VmOutcome};
use plimsoll_pagelog::record::{MARK_BEGIN, MARK_END, Record, Walk};

use super::options::{CURVE, EstimatorArgs};
use super::steps::{Step, Steps};

/// Address at which RAM continues above the hole.
const ABOVE_HOLE: u64 = 4 << 30;
/// Shift from a frame number to its address.
const FRAME_SHIFT: u32 = 12;

/// When an estimator settled.
#[derive(Debug, Clone, Copy)]
pub(super) struct SettlingTime {
    /// The estimate and the interval.
    pub settled: SettledSize,
    /// Instructions, or references, since the start.
    pub at: u64,
    pub truth: Option<PageCount>,
}

/// A running method of the registry.
struct RunningMethod {
    method: &'static Method,
    estimator: Box<dyn WorkingSetEstimator>,
    /// The logging buffers in front of it, for methods that are fed logged pages.
    machine: Option<Machine>,
    settled: Option<SettlingTime>,
    /// Its columns of the last interval.
    columns: Vec<Option<u64>>,
}

/// Passes the pages that a machine drains to an estimator.
struct DrainSink<'a> {
    estimator: &'a mut dyn WorkingSetEstimator,
    columns: &'a mut Vec<Option<u64>>,
}

impl Sink for DrainSink<'_> {
    fn drained(&mut self, _vm: usize, pages: &[PageNumber]) {
        self.estimator.observe(pages);
    }

    fn interval(&mut self, _vm: usize, _number: u64, _instructions: u64) {
        *self.columns = self.estimator.end_interval();
    }
}

impl RunningMethod {
    fn new(
        method: &'static Method,
        args: &EstimatorArgs,
        settings: &Settings,
        description: &Description,
    ) -> Option<Self> {
        let mode = match method.feed {
            Feed::LoggedWalks => Some(Mode::Prl),
            Feed::LoggedWrites => Some(Mode::Pml),
            Feed::Walks | Feed::RamPages => None,
        };
        // A log that was not written by QEMU has no clock.
        let has_clock = description.plugin_api > 0;
        let machine = |mode| Machine::new(&args.machine(mode, has_clock), &[description.vcpus]);
        Some(Self {
            method,
            // Without the memory of the VM, one that samples from it is left out.
            estimator: method.build(settings).ok()?,
            machine: mode.map(machine),
            settled: None,
            columns: Vec::new(),
        })
    }

    fn push(&mut self, record: &Record) {
        if let Some(machine) = &mut self.machine {
            let (estimator, columns) = (&mut *self.estimator, &mut self.columns);
            machine.push(0, record, &mut DrainSink { estimator, columns });
        }
    }

    fn finish(mut self) -> MethodResult {
        let (estimator, columns) = (&mut *self.estimator, &mut self.columns);
        let mut sink = DrainSink { estimator, columns };
        let outcome = self.machine.map(|machine| machine.finish(&mut sink));
        MethodResult {
            method: self.method,
            estimator: self.estimator,
            settled: self.settled,
            logging: outcome.map(|outcome| LoggingEffect {
                vm: outcome.vms.first().copied().unwrap_or_default(),
                host: outcome.host,
            }),
        }
    }
}

/// Effects and cost of logging.
#[derive(Debug, Clone, Copy)]
pub struct LoggingEffect {
    /// For the VM.
    pub vm: VmOutcome,
    /// For the host.
    pub host: HostOutcome,
}

/// A method at the end of the run.
#[derive(Debug)]
pub(super) struct MethodResult {
    pub(super) method: &'static Method,
    pub(super) estimator: Box<dyn WorkingSetEstimator>,
    pub(super) settled: Option<SettlingTime>,
    /// For methods that are fed logged pages.
    pub(super) logging: Option<LoggingEffect>,
}

/// All methods at the end of the run.
#[derive(Debug)]
pub struct Results {
    /// Those that ran, in the order of the registry.
    pub(super) methods: Vec<MethodResult>,
    /// The curve of all references, and that of the references past the filter without first ones.
    pub(super) curves: Option<(Result<MissRatioCurve, CurveError>, Option<MissRatioCurve>)>,
    /// In pages of 4 KiB, as the curves are.
    pub(super) filter: PageCount,
    pub(super) has_walks: bool,
    /// Whether the records contain references.
    pub has_references: bool,
    /// State after each interval.
    pub steps: Steps,
    /// Intervals that ended.
    pub intervals: u64,
    /// Instructions of all vCPUs.
    pub instructions: u64,
    /// References.
    pub accesses: u64,
    /// Page walks.
    pub walks: u64,
    /// The highest page that was passed to an estimator that draws from the memory.
    pub(super) highest_page: Option<PageNumber>,
    /// Whether the guest marked a section of its run, to which the evaluation was limited.
    pub marked: bool,
    /// Of the recording, at its end.
    pub totals: Option<Totals>,
    /// Why the log is truncated, if it is.
    pub cut: Option<String>,
}

impl Results {
    /// Effects and cost of logging, by method.
    pub fn logging(&self) -> impl Iterator<Item = (&'static str, &LoggingEffect)> {
        let methods = self.methods.iter();
        methods.filter_map(|result| Some((result.method.name, result.logging.as_ref()?)))
    }
}

/// The running estimators.
pub(super) struct Analysis<'a> {
    args: &'a EstimatorArgs,
    description: &'a Description,
    settings: Settings,
    run: Run,
    /// Instructions of each vCPU since its start, and at the start of `run`.
    clocks: Vec<u64>,
    started: Vec<u64>,
    marked: bool,
    ended: bool,
}

/// State that is reset at the guest's mark.
struct Run {
    /// The first one is the truth with which the others are compared.
    methods: Vec<RunningMethod>,
    /// Walked pages not yet passed on, as numbered by the TLB.
    walked: Vec<PageNumber>,
    lru: Option<FilteredLru>,
    steps: Steps,
    intervals: u64,
    accesses: u64,
    walks: u64,
    highest_page: Option<PageNumber>,
}

/// Number of pages that are passed on at once.
const WALKED_MAX: usize = 4096;

impl Run {
    fn new(args: &EstimatorArgs, description: &Description, settings: &Settings) -> Self {
        let wanted = METHODS.iter().enumerate().filter(|(index, method)| {
            description.walks && (*index == 0 || args.wants(method.name))
        });
        let methods = wanted
            .filter_map(|(_, method)| RunningMethod::new(method, args, settings, description));
        Self {
            methods: methods.collect(),
            walked: Vec::with_capacity(WALKED_MAX),
            lru: (description.references && args.wants(CURVE))
                .then(|| FilteredLru::new(filter_of(description))),
            steps: Steps::new(),
            intervals: 0,
            accesses: 0,
            walks: 0,
            highest_page: None,
        }
    }

    /// A walk to a page of the TLB.
    fn walk(&mut self, page: PageNumber, description: &Description) {
        self.walks += 1;
        self.walked.push(page);
        if self.walked.len() == WALKED_MAX {
            self.hand_on(description);
        }
    }

    /// Passes the walked pages to the methods that use all of them.
    fn hand_on(&mut self, description: &Description) {
        let mut ram_pages = Vec::new();
        for running in &mut self.methods {
            match running.method.feed {
                Feed::Walks => running.estimator.observe(&self.walked),
                Feed::RamPages => {
                    let pages = self.walked.iter();
                    ram_pages.extend(pages.map(|&page| ram_page(page, description)));
                    running.estimator.observe(&ram_pages);
                    let highest = ram_pages.iter().copied().max();
                    self.highest_page = self.highest_page.max(highest);
                    ram_pages.clear();
                }
                Feed::LoggedWalks | Feed::LoggedWrites => {}
            }
        }
        self.walked.clear();
    }

    /// Ends an interval at this number of instructions; the machines have already received its record.
    fn interval(&mut self, at: u64, description: &Description) {
        self.hand_on(description);
        for running in &mut self.methods {
            if running.machine.is_none() {
                running.columns = running.estimator.end_interval();
            }
        }
        let truth = self
            .methods
            .first()
            .and_then(|truth| truth.estimator.working_set());
        let truth = truth.map(|truth| truth.size);
        for running in &mut self.methods {
            if running.settled.is_none() {
                let settled = running.estimator.settled();
                running.settled = settled.map(|settled| SettlingTime { settled, at, truth });
            }
        }
        let columns = METHODS.iter().map(|method| {
            let mut running = self.methods.iter();
            let running = running.find(|running| running.method.name == method.name);
            running.map_or_else(|| vec![None; method.columns.len()], |r| r.columns.clone())
        });
        self.steps.push(Step {
            number: self.intervals,
            at,
            columns: columns.collect(),
        });
        self.intervals += 1;
    }
}

impl<'a> Analysis<'a> {
    pub(super) fn new(
        args: &'a EstimatorArgs,
        description: &'a Description,
        settings: Settings,
    ) -> Self {
        let vcpus = vec![0; usize::try_from(description.vcpus).unwrap_or(0)];
        Self {
            args,
            description,
            run: Run::new(args, description, &settings),
            settings,
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

    /// Processes the next records. With `by_marks`, only those between the guest's first begin mark and the end mark
    /// after it count.
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
            // The contents of the filters and the stack below them are kept.
            let lru = self.run.lru.take();
            self.run = Run::new(self.args, self.description, &self.settings);
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
                // For the machines, the run began at the mark.
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
        for running in &mut self.run.methods {
            running.push(&record);
        }
        if let Record::Interval { .. } = record {
            let at = self.instructions();
            self.run.interval(at, self.description);
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
        let mut run = self.run;
        run.hand_on(self.description);
        let curves = run.lru.map(|lru| (lru.curve(), lru.curve_past_filter()));
        Results {
            methods: run.methods.into_iter().map(RunningMethod::finish).collect(),
            curves,
            filter: filter_of(self.description),
            has_walks: self.description.walks,
            has_references: self.description.references,
            steps: run.steps,
            intervals: run.intervals,
            instructions,
            accesses: run.accesses,
            walks: run.walks,
            highest_page: run.highest_page,
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

/// The page of a walk, numbered as those of RAM without the hole.
pub(crate) fn page_walked(walk: &Walk, description: &Description) -> PageNumber {
    ram_page(
        tlb_page(walk.frame.0 << FRAME_SHIFT, description),
        description,
    )
}

/// The page of the TLB that contains an address.
fn tlb_page(address: u64, description: &Description) -> PageNumber {
    description.tlb_page.page_of(address)
}

/// Converts a page of the TLB to a page of RAM, numbered without the hole.
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
    use plimsoll_pagelog::mmu::{Config, EmulatedRecords};
    use plimsoll_source::synthetic::{Pattern, Workload};

    #[test]
    fn pages_above_the_hole_follow_those_below() {
        let source = Workload::of(Pattern::Uniform {
            pages: PageCount(1),
            references: 1,
        });
        let source = source.source().unwrap();
        let machine = EmulatedRecords::new(source, &Config::default()).unwrap();
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
