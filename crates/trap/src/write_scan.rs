//! Write scans: exactly the pages of a VM that were written between two scans, without stopping its writes.
//!
//! One page in `scale` is protected against writes by a userfaultfd, asynchronously: the first write to it takes a short fault
//! in which the kernel itself lifts the protection and records that in the page table. `PAGEMAP_SCAN` lists the
//! pages recorded, and then protects those of the sample again: each call lists a second time in the same step what it protects,
//! so that no write falls between two scans. A page that is unmapped, or was never present, keeps its record in a marker.
//!
//! KVM takes all that a protecting call covers out of the VM's page tables, also what was not written. A call therefore covers
//! pages of the sample that were written, with small gaps between them at most. A huge page of which a part were protected would
//! be split at once; it is protected as a whole, and split when the VM writes to it.
//!
//! Each period begins with a scan whose pages are discarded: they were written before it. When the time budget is used up, the
//! window closes: without another scan nothing is protected again, and the VM pays at most once for each page until the next
//! period. A period that took more than its budget with the minimum of two scans is followed by
//! periods without scans, until the mean is within the budget.
//!
//! **Rate.** Protecting a new sample in each period takes a call for each of its pages, whether it was written or not. If that would take more
//! than a share of the budget, by what a page took in the periods before, the sample is coarser. It is never finer than the rate given.
//! Of shared memory a coarse sample is queried page by page, because reading the page tables of everything else would take longer.
//!
//! Works on private RAM as well, locked or not, with swap or without, and on any process: on the memory that it had when a
//! period began. What the process maps anew at the same addresses while a period runs is observed too, with all that it holds by
//! then as written. Needs Linux 6.7.
//!
//! Cost: 1.3 to 1.9 µs of the VM for the first write to a page of the sample after a scan; a scan of 1 GiB 1 to 3 ms, and
//! a call for each page protected; tables for all shared RAM, 2 MiB a GiB, made as its pages are sampled.
//!
//! Not here: reads, and how often a page was written.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, PageNumber, Period, RamBacking, RamMapping, ReferenceBatch, ScanCounts,
    TraceMethod, Whole as _,
};

use crate::backend::{Backend, BackendRow, Observation, Scan, Sink, Yield};
use crate::config::TraceConfig;
use crate::debt::Debt;
use crate::error::TrapError;
use crate::hot_set::PageBits;
use crate::process::{TracedProcess, cpu_time};
use crate::ram::{HUGE_PAGE_BYTES, PAGE_BYTES, Presence, RamLayout};
use crate::rate::{RateRule, SCALE_MAX};
use crate::requirement::Requirement::{Injection, NoUserfault, SmallPages};
use crate::sample::Sample;
use crate::sys::{AddressRange, WrittenMemory};
use crate::target::TraceTarget;
use crate::trial::{TouchCost, Toucher, measure_write_fault_cost};
use crate::uffd::{PageQuery, PageScan, Userfault, UserfaultPurpose};

/// Scans in a period, unless their interval is given.
const SCANS: u32 = 16;
/// Pages between two of the sample that one call protects with them: the faults that they cost take no longer than another call.
const GAP_PAGES: u64 = 2;
/// Maximum number of periods without scans that follow one.
const PAID_MAX: u32 = 128;
/// One page in so many or fewer: a call for a page of the sample takes less time than reading the tables of all pages that it stands for.
const SPARSE_SCALE: u64 = 256;
/// Share of the budget that protecting a new sample may take; the rest is for other scans and for faults.
const PROTECTING_SHARE: f64 = 0.25;
/// Time for protecting a page where it has not been measured yet.
const PROTECTING_SECONDS: f64 = 3e-6;

/// The backend `write-scan`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::WriteScans,
    sees: "Write scans: exactly the pages written between two scans; reads are not observed",
    needs: "asynchronous write protection (Linux 6.7); any RAM, private, locked or swappable too; a VM or any process",
    costs: "under 2 µs of the VM's time for the first write to a sampled page after each scan, and under KVM a fault of the next access to it",
    loses: "pages that are only read",
    yields: Yield::Scans,
    sees_reads: false,
    options: &["--scan-interval"],
    rate_rules: &[RateRule::Fixed, RateRule::Budget],
    requirements: |_| &[SmallPages, NoUserfault, Injection],
    trial: measure_write_fault_cost,
    curve_cost: None,
    attach: |target, config| Ok(Box::new(WriteScanner::attach(target, config)?)),
    any_process: true,
    group: None,
};

/// A VM or process whose writes are recorded. Dropped, it removes the protection.
#[derive(Debug)]
struct WriteScanner {
    process: TracedProcess,
    /// Pages of a VM are numbered through its RAM, those of a process by address, so that a page keeps its number.
    layout: RamLayout,
    /// Number of pages in the layout.
    pages: u64,
    /// Of each range of the layout.
    memory: Vec<WrittenMemory>,
    /// Mappings of a process that are registered.
    registered: HashSet<AddressRange>,
    presence: Presence,
    userfault: Userfault,
    written: PageScan,
    /// Addresses of a mapping to protect again.
    spans: Vec<AddressRange>,
    config: TraceConfig,
    touch_cost: TouchCost,
    /// CPU time of calls for pages of the sample, and running mean of that of a new sample, for each of its pages.
    page_calls: Duration,
    protecting_seconds_per_page: f64,
    /// Pages passed on in this window, by their place in the layout.
    touched: PageBits,
    distinct_pages: u64,
    batch: ReferenceBatch,
    periods: u64,
    debt: Debt,
}

impl WriteScanner {
    fn attach(target: &TraceTarget, config: &TraceConfig) -> Result<Self, TrapError> {
        if !target.is_vm {
            // Whether the kernel can do it: if registering fails later, the memory has changed.
            measure_write_fault_cost(Toucher::Thread)?;
        }
        let mut process = TracedProcess::open(target)?;
        let purpose = UserfaultPurpose::AsyncWriteProtect;
        // What a process has mapped is registered one by one, because some of it may be gone by then, or cannot be.
        let at_once = RamLayout::new(target.layout().ranges().filter(|_| target.is_vm));
        let userfault = process.userfault(config, purpose, at_once.ranges())?;
        let mut scanner = Self::new(process, userfault, target, config)?;
        if target.is_vm {
            scanner.observe(target.layout(), memory_of(target));
        } else {
            let added = scanner.add(target);
            added.map_err(|source| scanner.process.unregistrable(purpose, source))?;
        }
        Ok(scanner)
    }

    /// A scanner of nothing yet.
    fn new(
        process: TracedProcess,
        userfault: Userfault,
        target: &TraceTarget,
        config: &TraceConfig,
    ) -> Result<Self, TrapError> {
        let presence = target.presence()?;
        let touch_cost = TouchCost::measure(target.pid, measure_write_fault_cost)?;
        Ok(Self {
            process,
            layout: RamLayout::new([]),
            pages: 0,
            memory: Vec::new(),
            registered: HashSet::new(),
            presence,
            userfault,
            written: PageScan::new(),
            spans: Vec::new(),
            touch_cost,
            page_calls: Duration::ZERO,
            protecting_seconds_per_page: PROTECTING_SECONDS,
            touched: PageBits::new(0),
            distinct_pages: 0,
            batch: ReferenceBatch::new(),
            periods: 0,
            debt: Debt::default(),
            config: config.clone(),
        })
    }

    /// Takes over a layout that is registered.
    fn observe(&mut self, layout: RamLayout, memory: Vec<WrittenMemory>) {
        let bytes: u64 = layout.ranges().map(|range| range.len_bytes).sum();
        self.pages = bytes / PAGE_BYTES;
        self.touched = PageBits::new(self.pages);
        (self.layout, self.memory) = (layout, memory);
    }

    /// Registers what a process has mapped by now and had not before, and takes over its layout.
    ///
    /// # Errors
    ///
    /// ESRCH if the process executes another program, EBUSY if another userfaultfd is registered.
    fn add(&mut self, target: &TraceTarget) -> io::Result<()> {
        let (mappings, memory) = (target.layout(), memory_of(target));
        let mut ranges: HashSet<AddressRange> = mappings.ranges().collect();
        let known = std::mem::take(&mut self.registered);
        for range in mappings.ranges() {
            if known.contains(&range) {
                continue;
            }
            match self.userfault.add(range) {
                Err(error) if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::EBUSY)) => {
                    return Err(error);
                }
                // It is unmapped again, or nobody may write to it.
                Err(_) => {
                    ranges.remove(&range);
                }
                Ok(()) => {}
            }
        }
        self.userfault.set_ranges(ranges.iter().copied());
        self.registered = ranges;
        let (layout, memory) = joined(mappings.ranges().zip(memory));
        self.observe(layout, memory);
        Ok(())
    }

    /// Protects the pages of `sample` that lie in shared memory, mapped or not: one that the file has already would count as written
    /// when it is read first, where the kernel does not list what is not mapped. Pages of private memory show what they hold.
    fn protect_shared(&mut self, sample: Sample) -> Result<(), TrapError> {
        let cpu = cpu_time();
        let regions = self.layout.regions().zip(&self.memory);
        for (region, memory) in regions.filter(|(_, memory)| !memory.is_private) {
            self.spans.clear();
            for pages in sample.runs_in(region.pages()) {
                add_span(&mut self.spans, region.addresses(&pages));
            }
            for &span in &self.spans {
                let protected = self.userfault.protect(span);
                if memory.is_registered {
                    protected.map_err(self.process.failed("write-protecting its RAM"))?;
                }
            }
        }
        self.page_calls += cpu_time().saturating_sub(cpu);
        Ok(())
    }

    /// Collects the pages of `sample` that were written since the scan before; returns how many pages were protected again.
    fn scan(&mut self, sample: Sample) -> Result<u64, TrapError> {
        self.process.check_alive()?;
        self.batch.advance();
        let (mut protected, mut first_place) = (0, 0);
        for (region, &memory) in self.layout.regions().zip(&self.memory) {
            let (pagemap, range) = (self.presence.pagemap(), region.range);
            let failed = self.process.failed("ioctl(PAGEMAP_SCAN)");
            if !memory.is_registered {
                let mut is_mapped_anew = false;
                let asked = self
                    .written
                    .scan(pagemap, range, PageQuery::Unregistered, |_, _| {
                        is_mapped_anew = true;
                    });
                asked.map_err(failed)?;
                if is_mapped_anew {
                    // If it cannot be, it is passed over.
                    let _ = self.userfault.add(range);
                }
            }
            let spans = &mut self.spans;
            spans.clear();
            let mut list = |run: AddressRange, is_huge| {
                for pages in sample.runs_in(region.pages_at(run)) {
                    let mut span = region.addresses(&pages);
                    if is_huge {
                        span = whole_units(span, run);
                    }
                    add_span(spans, span);
                }
            };
            let (written, query) = (&mut self.written, PageQuery::Written(memory));
            let listed = if !memory.is_private && sample.scale() >= SPARSE_SCALE {
                let cpu = cpu_time();
                let listed = sample
                    .runs_in(region.pages())
                    .map(|pages| region.addresses(&pages))
                    .try_for_each(|page| written.scan(pagemap, page, query, &mut list));
                self.page_calls += cpu_time().saturating_sub(cpu);
                listed
            } else {
                written.scan(pagemap, range, query, list)
            };
            listed.map_err(failed)?;
            let mut visit = |run: AddressRange, _| {
                protected += run.len_bytes / PAGE_BYTES;
                for page in sample.runs_in(region.pages_at(run)).flatten() {
                    self.batch.push(PageNumber(page), AccessKind::Write);
                    let place = page - region.pages().start + first_place;
                    self.distinct_pages += u64::from(self.touched.set(place, true));
                }
            };
            let cpu = cpu_time();
            for &span in &self.spans {
                let query = PageQuery::WrittenAndProtected(memory);
                let scanned = self.written.scan(pagemap, span, query, &mut visit);
                scanned.map_err(failed)?;
            }
            self.page_calls += cpu_time().saturating_sub(cpu);
            first_place += range.len_bytes / PAGE_BYTES;
        }
        Ok(protected)
    }
}

/// One page in how many is in a sample, where protecting all pages takes `whole_seconds`.
fn scale_for(config: &TraceConfig, budget: Option<Duration>, whole_seconds: f64) -> u32 {
    let (RateRule::Budget, Some(budget)) = (config.rate_rule, budget) else {
        return config.scale;
    };
    let coarsest = whole_seconds / (budget.as_secs_f64() * PROTECTING_SHARE);
    u32::whole(coarsest.ceil()).min(SCALE_MAX).max(config.scale)
}

/// Adds addresses that follow those before, or joins them with the last where the gap is small.
fn add_span(spans: &mut Vec<AddressRange>, span: AddressRange) {
    match spans.last_mut() {
        Some(last) if span.start <= last.start + last.len_bytes + GAP_PAGES * PAGE_BYTES => {
            last.len_bytes = span.start + span.len_bytes - last.start;
        }
        _ => spans.push(span),
    }
}

/// The addresses in `run`, which is mapped by huge pages, of all huge pages that `span` has a part of.
fn whole_units(span: AddressRange, run: AddressRange) -> AddressRange {
    let start = (span.start / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES).max(run.start);
    let end = (span.start + span.len_bytes).next_multiple_of(HUGE_PAGE_BYTES);
    AddressRange {
        start,
        len_bytes: end.min(run.start + run.len_bytes) - start,
    }
}

/// Joins neighbours of one kind, numbered by address: a scan costs a call to the kernel for each range.
fn joined(
    mappings: impl Iterator<Item = (AddressRange, WrittenMemory)>,
) -> (RamLayout, Vec<WrittenMemory>) {
    let mut ranges: Vec<AddressRange> = Vec::new();
    let mut memory = Vec::new();
    for (range, of) in mappings {
        match (ranges.last_mut(), memory.last()) {
            (Some(last), Some(&other))
                if last.start + last.len_bytes == range.start && other == of =>
            {
                last.len_bytes += range.len_bytes;
            }
            _ => {
                ranges.push(range);
                memory.push(of);
            }
        }
    }
    (RamLayout::by_address(ranges), memory)
}

/// The kind of memory of each mapping, in the order of the layout.
fn memory_of(target: &TraceTarget) -> Vec<WrittenMemory> {
    let of_mapping = |mapping: &RamMapping| WrittenMemory {
        is_private: mapping.backing == RamBacking::Private,
        is_registered: target.is_vm,
    };
    target.ram.iter().map(of_mapping).collect()
}

impl Backend for WriteScanner {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let start = Instant::now();
        let end = start + self.config.period;
        let interval = self
            .config
            .scan_interval
            .unwrap_or(self.config.period / SCANS);
        let budget = self.config.period_budget(self.process.vcpus);
        let is_paying = self.debt.is_due(budget);
        let scale = scale_for(
            &self.config,
            budget,
            self.pages as f64 * self.protecting_seconds_per_page,
        );
        let sample = Sample::of_period(scale, 1, self.config.seed, self.periods);
        let tracked_pages = self.pages / u64::from(scale);
        let cpu = cpu_time();
        if is_paying {
            self.process.check_alive()?;
        } else {
            self.page_calls = Duration::ZERO;
            self.protect_shared(sample)?;
            // Written before this period.
            self.scan(sample)?;
            let latest = self.page_calls.as_secs_f64() / tracked_pages.max(1) as f64;
            self.protecting_seconds_per_page += (latest - self.protecting_seconds_per_page) / 4.0;
        }
        self.touched.clear();
        self.distinct_pages = 0;
        let window_start = Instant::now();
        let (mut scans, mut fault_time) = (ScanCounts::default(), Duration::ZERO);
        let mut rearmed_pages = 0;
        let (mut from, mut budget_exhausted) = (Duration::ZERO, is_paying);
        while !budget_exhausted && !stop.load(Ordering::Relaxed) && Instant::now() < end {
            let due = window_start + from + interval;
            // A remainder too short for another interval belongs to this one.
            let due = if due + interval / 2 > end { end } else { due };
            self.process.rest(stop, due);
            let protected = match self.scan(sample) {
                Err(TrapError::VmGone { .. }) if scans.touches > 0 => break,
                other => other?,
            };
            let to = window_start.elapsed();
            sink(&Observation::Scan(Scan {
                from,
                to,
                touched: &self.batch,
            }));
            from = to;
            scans.scans += 1;
            scans.touches += self.batch.len() as u64;
            rearmed_pages += protected;
            fault_time += self.touch_cost.time * u32::try_from(protected).unwrap_or(u32::MAX);
            let taken = fault_time + cpu_time().saturating_sub(cpu);
            budget_exhausted = budget.is_some_and(|budget| taken >= budget);
        }
        let window = if is_paying {
            Duration::ZERO
        } else {
            window_start.elapsed()
        };
        self.process.rest(stop, end);

        let (length, arm_time) = (start.elapsed(), cpu_time().saturating_sub(cpu));
        // With more scans than the fewest, a period ends when its budget does.
        if scans.scans <= 1 {
            self.debt.settle(fault_time + arm_time, budget, PAID_MAX);
        }
        let count = scans.scans.max(1);
        let period = Period {
            index: self.periods,
            scale,
            populated_pages: self.pages,
            tracked_pages,
            distinct_pages: self.distinct_pages,
            scans: ScanCounts {
                interval: from.div_f64(count as f64),
                writes: scans.touches,
                resolution_pages: u32::try_from(scans.touches.div_ceil(count)).unwrap_or(u32::MAX),
                ..scans
            },
            rearmed_pages,
            fault_time,
            arm_time,
            overhead_ratio: self.process.overhead_ratio(fault_time + arm_time, length),
            budget_exhausted,
            ..Period::empty(TraceMethod::WriteScans, length, window)
        };
        self.periods += 1;
        Ok(period)
    }

    fn detach(self: Box<Self>) -> Result<(), TrapError> {
        self.process.unregister(&self.userfault)
    }

    fn touch_cost(&self) -> TouchCost {
        self.touch_cost
    }

    fn ram_pages(&self) -> u64 {
        self.pages
    }

    fn follow(&mut self, target: &TraceTarget) -> Result<bool, TrapError> {
        // If not, the process executes another program, or another userfaultfd is registered: attaching tells.
        Ok(!target.is_vm && self.add(target).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::SharedMemory;
    use crate::sys::usize_of;

    /// More runs than one call to the kernel lists.
    const PAGES: usize = 12_288;

    #[test]
    fn a_scan_lists_the_pages_written_and_no_other() {
        scans_list_what_was_written(1);
    }

    #[test]
    fn pages_outside_the_sample_are_neither_listed_nor_protected() {
        scans_list_what_was_written(16);
    }

    #[test]
    fn pages_of_a_sparse_sample_are_listed_one_by_one() {
        scans_list_what_was_written(512);
    }

    #[test]
    fn pages_of_memory_that_is_not_registered_are_not_listed() {
        let memory = SharedMemory::new(16).unwrap();
        let target = memory.as_target();
        memory.word(3).fetch_add(1, Ordering::Relaxed);
        let query = PageQuery::Written(WrittenMemory {
            is_private: false,
            is_registered: false,
        });
        let presence = target.presence().unwrap();
        for range in target.layout().ranges() {
            let visit = |run: AddressRange, _| panic!("{run:?}");
            let listed = PageScan::new().scan(presence.pagemap(), range, query, visit);
            if let Err(error) = listed {
                plimsoll_skip::skip(plimsoll_skip::Lack::Userfaultfd, error);
            }
        }
    }

    /// `None` after saying that this host cannot.
    fn scanner_of(memory: &SharedMemory, config: &TraceConfig) -> Option<WriteScanner> {
        // A page that is read first after the scanner attached was not written.
        memory.map_anew();
        let target = memory.as_target();
        // A process cannot inject a call into itself.
        let purpose = UserfaultPurpose::AsyncWriteProtect;
        let userfault = match Userfault::open(purpose, target.layout().ranges()) {
            Ok(userfault) => userfault,
            Err(error) => {
                plimsoll_skip::skip(
                    plimsoll_skip::Lack::Userfaultfd,
                    format_args!("no asynchronous write protection on this host: {error}"),
                );
                return None;
            }
        };
        let process = TracedProcess::open(&target).unwrap();
        let mut scanner = WriteScanner::new(process, userfault, &target, config).unwrap();
        scanner.observe(target.layout(), memory_of(&target));
        Some(scanner)
    }

    #[test]
    fn scans_that_take_more_than_the_budget_are_paid_by_the_next_periods() {
        let memory = SharedMemory::new(PAGES).unwrap();
        let config = TraceConfig {
            period: Duration::from_millis(20),
            // 20 ns a period.
            budget: Some(1e-6),
            scale: 1,
            rate_rule: RateRule::Fixed,
            ..TraceConfig::default()
        };
        let Some(mut scanner) = scanner_of(&memory, &config) else {
            return;
        };
        let stop = AtomicBool::new(false);
        let mut scans = 0;
        for periods in 1..=3 {
            let period = scanner.run_period(&stop, &mut |_| scans += 1).unwrap();
            assert_eq!(scans, 1, "after {periods} periods");
            assert!(period.budget_exhausted);
            assert!(period.length >= config.period);
            assert_eq!(period.window.is_zero(), periods > 1);
            memory.word(1).fetch_add(1, Ordering::Relaxed);
        }
        Box::new(scanner).detach().unwrap();
    }

    #[test]
    fn protecting_a_sample_of_large_memory_takes_its_share_of_the_budget() {
        let config = TraceConfig::default();
        let budget = Some(Duration::from_millis(50));
        let whole = |gib: u64| (gib << 30) as f64 / PAGE_BYTES as f64 * PROTECTING_SECONDS;
        assert_eq!(scale_for(&config, budget, whole(1)), 128);
        assert_eq!(scale_for(&config, budget, whole(128)), 8054);
        assert_eq!(scale_for(&config, budget, 1e9), SCALE_MAX);
        assert_eq!(scale_for(&config, None, whole(128)), 128);
        let fixed = TraceConfig {
            rate_rule: RateRule::Fixed,
            ..config
        };
        assert_eq!(scale_for(&fixed, budget, whole(128)), 128);
    }

    #[test]
    fn a_sample_is_as_coarse_as_protecting_it_was_expensive() {
        let memory = SharedMemory::new(PAGES).unwrap();
        let config = TraceConfig {
            period: Duration::from_millis(20),
            budget: Some(0.47),
            scale: 1,
            ..TraceConfig::default()
        };
        let Some(mut scanner) = scanner_of(&memory, &config) else {
            return;
        };
        let stop = AtomicBool::new(false);
        // 37 ms for all pages; a sixteenth takes a quarter of 9.4 ms.
        let period = scanner.run_period(&stop, &mut |_| {}).unwrap();
        assert_eq!((period.scale, period.tracked_pages), (16, 768));
        // A period that was much cheaper than expected.
        scanner.protecting_seconds_per_page = 3e-4;
        let period = scanner.run_period(&stop, &mut |_| {}).unwrap();
        assert!((1500..=1600).contains(&period.scale), "{period:?}");
        let period = scanner.run_period(&stop, &mut |_| {}).unwrap();
        assert!(period.scale < 1300, "{period:?}");
        Box::new(scanner).detach().unwrap();
    }

    fn scans_list_what_was_written(scale: u32) {
        let memory = SharedMemory::new(PAGES).unwrap();
        let config = TraceConfig {
            // Time for many more scans than are needed, on a busy machine too.
            period: Duration::from_millis(600),
            budget: None,
            scale,
            scan_interval: Some(Duration::from_millis(20)),
            ..TraceConfig::default()
        };
        let Some(mut scanner) = scanner_of(&memory, &config) else {
            return;
        };
        let rounds: [Vec<usize>; 4] = [
            vec![],
            (0..PAGES).step_by(2).collect(),
            (1..100).chain([PAGES - 1]).collect(),
            vec![],
        ];
        let sample = Sample::of_period(scale, 1, config.seed, 0);
        let sampled = |round: &[usize]| -> Vec<usize> {
            let pages = round.iter().copied();
            pages.filter(|&page| sample.contains(page as u64)).collect()
        };
        let (mut scans, mut touches) = (0, 0);
        let mut written_before = Vec::new();
        let stop = AtomicBool::new(false);
        let mut sink = |seen: &Observation<'_>| {
            let Observation::Scan(scan) = seen else {
                panic!("{seen:?}");
            };
            let kinds = scan.touched.kinds();
            assert!(kinds.iter().all(|&kind| kind == AccessKind::Write));
            let found: Vec<_> = seen.pages().iter().map(|page| usize_of(page.0)).collect();
            assert_eq!(found, sampled(&written_before));
            for page in 0..PAGES {
                memory.word(page).load(Ordering::Relaxed);
            }
            written_before.clone_from(rounds.get(scans + 1).unwrap_or(&vec![]));
            for &page in &written_before {
                memory.word(page).fetch_add(1, Ordering::Relaxed);
            }
            scans += 1;
            touches += found.len() as u64;
        };
        let period = scanner.run_period(&stop, &mut sink).unwrap();
        assert!(scans >= rounds.len(), "{scans} scans");
        assert_eq!(period.method, TraceMethod::WriteScans);
        assert_eq!(period.scans.scans, scans as u64);
        let counted = (period.scans.touches, period.scans.writes);
        assert_eq!(counted, (touches, touches));
        let all: HashSet<usize> = rounds.iter().flatten().copied().collect();
        let all: Vec<usize> = all.into_iter().collect();
        assert_eq!(period.distinct_pages, sampled(&all).len() as u64);
        if scale > 1 {
            // With those in small gaps.
            let protected = period.rearmed_pages;
            assert!(
                (touches..touches * 5 / 4).contains(&protected),
                "{protected}"
            );
        }
        // Nothing was written since.
        let mut nothing = 0;
        scanner
            .run_period(&stop, &mut |seen| nothing += seen.pages().len())
            .unwrap();
        assert_eq!(nothing, 0);
        Box::new(scanner).detach().unwrap();
    }
}
