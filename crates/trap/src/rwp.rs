//! Read-write protection: which sampled pages were accessed since they were protected, exactly, without stopping an access.
//!
//! A userfaultfd protects the sampled pages against every access, asynchronously: the first access to a page takes a short fault in
//! which the kernel itself lifts the protection, and records that in the page table. `PAGEMAP_SCAN` lists the pages whose
//! protection was lifted. The period is that of all backends that mark sampled pages (`marks`).
//!
//! No memory is unmapped and no access waits, so it works on any small pages: private, shared, locked, swappable, mapped by several
//! processes; of those, on the accesses of the process whose memory is registered. If the tracer ends, however it does, its
//! userfaultfd is closed, and the kernel lifts all protection.
//!
//! The interface is that of Linux's `Documentation/admin-guide/mm/userfaultfd.rst`, "Read-Write Protection" (`UFFD_FEATURE_RWP_ASYNC`,
//! `UFFDIO_RWPROTECT`, `PAGE_IS_ACCESSED`), in kernels after Linux 7.1. **It has not run on such a kernel yet**: it is tested with a
//! model of the kernel's side, and refused where the kernel has no such feature.
//!
//! Cost: of the tracer, a system call for each run of pages that is protected and a walk over the page tables for each check; of the VM, a
//! fault for each page found touched, measured on attaching.
//!
//! Not seen: accesses by other processes and by devices.

use std::io;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use plimsoll_flow::TraceMethod;

use crate::backend::{BackendRow, Yield};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::marks::{MarkChecker, Marks};
use crate::process::TracedProcess;
use crate::ram::{PageRange, Presence, RamLayout};
use crate::rate::RateRule;
use crate::requirement::Requirement::{AccessProtection, Injection, NoUserfault, SmallPages};
use crate::sample::Sample;
use crate::sys::AddressRange;
use crate::target::TraceTarget;
use crate::target_pages::Drawn;
use crate::trial::{TouchCost, measure_access_fault_cost};
use crate::uffd::{PageQuery, PageScan, Userfault, UserfaultPurpose};

/// The backend `rwp`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::AccessProtection,
    sees: "Read-write protection: when sampled pages were first accessed after they were protected; any small pages, no access waits",
    needs: "asynchronous read-write protection of userfaultfd (kernels after Linux 7.1); a VM or any process",
    costs: "a short fault per sampled page touched, within the time budget",
    loses: "all touches of a page but the first, known to within a fifth of its time; accesses of other processes and of devices",
    yields: Yield::FirstTouches,
    sees_reads: true,
    options: &["--scan-interval"],
    rate_rules: &[RateRule::Fixed, RateRule::Budget],
    requirements: |_| &[SmallPages, NoUserfault, AccessProtection, Injection],
    trial: measure_access_fault_cost,
    curve_cost: None,
    attach: |target, config| {
        let marks = AccessMarks::attach(target, config)?;
        let cost = TouchCost::measure(target.pid, measure_access_fault_cost)?;
        Ok(Box::new(MarkChecker::new(marks, cost, config)))
    },
    any_process: true,
    group: None,
};

/// What protects pages of a process and lists them.
trait Protection: std::fmt::Debug + Send + 'static {
    /// Protects the pages of `range` that are present against every access.
    fn protect(&mut self, range: AddressRange) -> io::Result<()>;

    /// Calls `visit` for each run of pages in `range` that `query` asks for, in ascending order.
    fn list(
        &mut self,
        range: AddressRange,
        query: PageQuery,
        visit: &mut dyn FnMut(AddressRange),
    ) -> io::Result<()>;

    /// Lifts all protection.
    fn lift(&mut self, process: &TracedProcess) -> Result<(), TrapError>;
}

/// The kernel's.
#[derive(Debug)]
struct Userfaultfd {
    userfault: Userfault,
    presence: Presence,
    scan: PageScan,
}

impl Protection for Userfaultfd {
    fn protect(&mut self, range: AddressRange) -> io::Result<()> {
        self.userfault.protect(range)
    }

    fn list(
        &mut self,
        range: AddressRange,
        query: PageQuery,
        visit: &mut dyn FnMut(AddressRange),
    ) -> io::Result<()> {
        self.scan
            .scan(self.presence.pagemap(), range, query, |run, _| visit(run))
    }

    fn lift(&mut self, process: &TracedProcess) -> Result<(), TrapError> {
        process.unregister(&self.userfault)
    }
}

/// A process whose sampled pages are protected.
#[derive(Debug)]
struct AccessMarks<P> {
    process: TracedProcess,
    layout: RamLayout,
    protection: P,
    /// The sample, ascending.
    watched: Vec<u64>,
    /// Those of it that are not known to be touched, ascending.
    waiting: Vec<u64>,
}

impl AccessMarks<Userfaultfd> {
    fn attach(target: &TraceTarget, config: &TraceConfig) -> Result<Self, TrapError> {
        let mut process = TracedProcess::open(target)?;
        let layout = target.layout();
        let purpose = UserfaultPurpose::AsyncAccessProtect;
        let userfault = process.userfault(config, purpose, layout.ranges())?;
        let protection = Userfaultfd {
            userfault,
            presence: target.presence()?,
            scan: PageScan::new(),
        };
        Ok(Self::new(process, layout, protection))
    }
}

impl<P: Protection> AccessMarks<P> {
    fn new(process: TracedProcess, layout: RamLayout, protection: P) -> Self {
        Self {
            process,
            layout,
            protection,
            watched: Vec::new(),
            waiting: Vec::new(),
        }
    }

    /// Calls `visit` for each run of page numbers that `query` asks for, in ascending order.
    fn list(
        &mut self,
        query: PageQuery,
        mut visit: impl FnMut(PageRange),
    ) -> Result<(), TrapError> {
        for region in self.layout.regions() {
            let range = region.range;
            let listed = (self.protection).list(range, query, &mut |run| {
                visit(region.pages_at(run));
            });
            listed.map_err(self.process.failed("ioctl(PAGEMAP_SCAN)"))?;
        }
        Ok(())
    }
}

impl<P: Protection> Marks for AccessMarks<P> {
    const METHOD: TraceMethod = TraceMethod::AccessProtection;
    const FIRST_CHECK_MIN: Duration = Duration::from_millis(1);

    fn renew(&mut self) -> Result<(), TrapError> {
        self.process.check_alive()
    }

    fn check_alive(&self) -> Result<(), TrapError> {
        self.process.check_alive()
    }

    fn draw(&mut self, sample: Sample) -> Result<Drawn, TrapError> {
        let mut watched = std::mem::take(&mut self.watched);
        watched.clear();
        self.list(PageQuery::Present, |run| {
            watched.extend(sample.runs_in(run).flatten());
        })?;
        let present = watched.len();
        // They are touched when they are present again.
        self.list(PageQuery::Swapped, |run| {
            watched.extend(sample.runs_in(run).flatten());
        })?;
        let swapped = (watched.len() - present) as u64;
        watched.sort_unstable();
        // A page may have moved in between.
        watched.dedup();
        self.watched = watched;
        Ok(Drawn {
            swapped,
            ..Drawn::default()
        })
    }

    fn watched(&self) -> u64 {
        self.watched.len() as u64
    }

    fn arm(&mut self) -> Result<(), TrapError> {
        self.waiting.clone_from(&self.watched);
        let runs = self.watched.chunk_by(|page, next| page + 1 == *next);
        for run in runs {
            let pages = run[0]..run[0] + run.len() as u64;
            for range in self.layout.addresses(&pages) {
                let protected = self.protection.protect(range);
                protected.map_err(self.process.failed("ioctl(UFFDIO_RWPROTECT)"))?;
            }
        }
        Ok(())
    }

    fn waiting(&self) -> u64 {
        self.waiting.len() as u64
    }

    fn check(&mut self, touched: &mut Vec<u64>) -> Result<(), TrapError> {
        let waiting = std::mem::take(&mut self.waiting);
        let mut rest = waiting.as_slice();
        let known = touched.len();
        let listed = self.list(PageQuery::Accessed, |run| {
            rest = &rest[rest.partition_point(|&page| page < run.start)..];
            let found = rest.partition_point(|&page| page < run.end);
            touched.extend(&rest[..found]);
            rest = &rest[found..];
        });
        self.waiting = waiting;
        listed?;
        let mut found = touched[known..].iter().copied().peekable();
        self.waiting.retain(|page| found.next_if_eq(page).is_none());
        Ok(())
    }

    fn rest(&self, stop: &AtomicBool, due: Instant) {
        self.process.rest(stop, due);
    }

    fn cpu_time(&self) -> Option<Duration> {
        self.process.cpu_time().ok()
    }

    fn vcpus(&self) -> usize {
        self.process.vcpus
    }

    fn ram_pages(&self) -> u64 {
        self.layout.pages()
    }

    fn detach(mut self) -> Result<(), TrapError> {
        self.protection.lift(&self.process)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use plimsoll_flow::{PageNumber, RamBacking, RamMapping};

    use super::*;
    use crate::backend::{Backend, Observation};
    use crate::ram::PAGE_BYTES;
    use crate::trial::Toucher;

    const START: u64 = 0x7f00_0000_0000;
    const PAGES: usize = 64;

    /// A page as the kernel sees it.
    #[derive(Debug, Clone, Copy, Default, PartialEq)]
    struct ModelPage {
        present: bool,
        swapped: bool,
        /// Its bit in the page table, which swapping keeps.
        protected: bool,
    }

    /// The kernel's side, by the description of its interface.
    #[derive(Debug, Clone)]
    struct Model(Arc<Mutex<Vec<ModelPage>>>);

    impl Model {
        fn new() -> Self {
            Self(Arc::new(Mutex::new(vec![ModelPage::default(); PAGES])))
        }

        fn access(&self, page: usize) {
            let mut pages = self.0.lock().unwrap();
            // A page that was absent is populated without protection; swapped in by an access, it loses it in the same access.
            pages[page] = ModelPage {
                present: true,
                ..ModelPage::default()
            };
        }

        fn swap_out(&self, page: usize) {
            let page = &mut self.0.lock().unwrap()[page];
            (page.present, page.swapped) = (false, true);
        }

        fn discard(&self, page: usize) {
            self.0.lock().unwrap()[page] = ModelPage::default();
        }

        fn protected(&self) -> usize {
            let pages = self.0.lock().unwrap();
            pages.iter().filter(|page| page.protected).count()
        }

        fn indexes(range: AddressRange) -> std::ops::Range<usize> {
            let index = |address: u64| usize::try_from((address - START) / PAGE_BYTES).unwrap();
            index(range.start)..index(range.start + range.len_bytes)
        }
    }

    impl Protection for Model {
        fn protect(&mut self, range: AddressRange) -> io::Result<()> {
            for page in &mut self.0.lock().unwrap()[Self::indexes(range)] {
                page.protected |= page.present;
            }
            Ok(())
        }

        fn list(
            &mut self,
            range: AddressRange,
            query: PageQuery,
            visit: &mut dyn FnMut(AddressRange),
        ) -> io::Result<()> {
            let pages = self.0.lock().unwrap().clone();
            let is_asked = |&index: &usize| match query {
                PageQuery::Present => pages[index].present,
                PageQuery::Swapped => pages[index].swapped,
                PageQuery::Accessed => pages[index].present && !pages[index].protected,
                PageQuery::Written(_)
                | PageQuery::WrittenAndProtected(_)
                | PageQuery::Unregistered => {
                    unreachable!("reads are observed as well")
                }
            };
            let indexes: Vec<usize> = Self::indexes(range).filter(is_asked).collect();
            for run in indexes.chunk_by(|index, next| index + 1 == *next) {
                visit(AddressRange {
                    start: START + run[0] as u64 * PAGE_BYTES,
                    len_bytes: run.len() as u64 * PAGE_BYTES,
                });
            }
            Ok(())
        }

        fn lift(&mut self, _: &TracedProcess) -> Result<(), TrapError> {
            for page in self.0.lock().unwrap().iter_mut() {
                page.protected = false;
            }
            Ok(())
        }
    }

    fn target() -> TraceTarget {
        TraceTarget {
            pid: std::process::id(),
            is_vm: true,
            ram: vec![RamMapping {
                address: START,
                len_bytes: PAGES as u64 * PAGE_BYTES,
                file_offset_bytes: 0,
                backing: RamBacking::Private,
            }],
            locked: false,
            userfault: false,
            vcpu_threads: vec![],
        }
    }

    fn marks(model: &Model) -> AccessMarks<Model> {
        let target = target();
        let process = TracedProcess::open(&target).unwrap();
        AccessMarks::new(process, target.layout(), model.clone())
    }

    /// All pages, or one in `scale`.
    fn sample(scale: u32) -> Sample {
        Sample::of_period(scale, 1, 1, 0)
    }

    fn checked(marks: &mut AccessMarks<Model>) -> Vec<u64> {
        let mut touched = Vec::new();
        marks.check(&mut touched).unwrap();
        touched
    }

    #[test]
    fn a_check_finds_first_accesses_and_no_other() {
        let model = Model::new();
        for page in 0..16 {
            model.access(page);
        }
        model.swap_out(4);
        let mut marks = marks(&model);
        let drawn = marks.draw(sample(1)).unwrap();
        assert_eq!((marks.watched(), drawn.swapped), (16, 1));
        marks.arm().unwrap();
        assert!(checked(&mut marks).is_empty());
        model.access(3);
        model.access(9);
        model.access(9);
        // Swapped in.
        model.access(4);
        // It was not there when the sample was drawn.
        model.access(40);
        assert_eq!(checked(&mut marks), [3, 4, 9]);
        // A second time does not count. What is gone was not accessed; what goes to swap keeps its protection.
        model.access(3);
        model.discard(5);
        model.swap_out(6);
        assert!(checked(&mut marks).is_empty());
        model.access(6);
        assert_eq!(checked(&mut marks), [6]);
        assert_eq!(marks.waiting(), 12);
        assert!(model.protected() > 0);
        marks.detach().unwrap();
        assert_eq!(model.protected(), 0);
    }

    #[test]
    fn pages_outside_the_sample_are_not_protected() {
        let model = Model::new();
        for page in 0..PAGES {
            model.access(page);
        }
        let mut marks = marks(&model);
        marks.draw(sample(8)).unwrap();
        marks.arm().unwrap();
        assert_eq!(model.protected(), PAGES / 8);
        for page in 0..PAGES {
            model.access(page);
        }
        assert_eq!(checked(&mut marks).len(), PAGES / 8);
    }

    #[test]
    fn of_each_page_of_a_period_the_first_touch_is_known_between_two_checks() {
        let model = Model::new();
        for page in 0..16 {
            model.access(page);
        }
        let config = TraceConfig {
            period: Duration::from_millis(200),
            budget: None,
            rate_rule: RateRule::Fixed,
            scale: 1,
            scan_interval: Some(Duration::from_millis(10)),
            ..TraceConfig::default()
        };
        let cost = TouchCost {
            time: Duration::from_micros(1),
            toucher: Toucher::Thread,
        };
        let mut checker: Box<dyn Backend> =
            Box::new(MarkChecker::new(marks(&model), cost, &config));
        let stop = AtomicBool::new(false);
        let ran = || crate::sys::process_cpu_time(std::process::id()).unwrap();
        let accessing = std::thread::spawn({
            let model = model.clone();
            move || -> Duration {
                while model.protected() < 16 {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(60));
                model.access(7);
                ran()
            }
        });
        let mut found = Vec::new();
        let period = checker.run_period(&stop, &mut |seen| {
            let Observation::FirstTouches { samples, touched } = seen else {
                panic!("{seen:?}");
            };
            assert_eq!(samples.population_pages, 16);
            assert_eq!(touched.pages(), [PageNumber(7)]);
            found.extend_from_slice(samples.ended);
        });
        let (period, accessed) = (period.unwrap(), accessing.join().unwrap());
        assert!(period.scans.scans >= 5, "{period:?}");
        let counts = period.samples;
        assert_eq!(
            (counts.touched, counts.withdrawn, counts.vanished),
            (1, 15, 0)
        );
        assert_eq!(found.len(), 16);
        let touch = found.iter().find(|touch| touch.touched_by.is_some());
        let touch = touch.unwrap();
        let slack = Duration::from_millis(10);
        assert!(
            touch.untouched_until < accessed + slack,
            "{touch:?} {accessed:?}"
        );
        assert!(
            touch.touched_by.unwrap() + slack > accessed,
            "{touch:?} {accessed:?}"
        );
        assert!(found.iter().all(|one| one.armed == touch.armed));
    }

    #[test]
    fn a_kernel_without_it_is_refused_by_name() {
        match measure_access_fault_cost(Toucher::Thread) {
            Ok(_) => {}
            Err(error) => assert!(
                error.to_string().contains("read-write protection")
                    || error.to_string().contains("userfaultfd"),
                "{error}"
            ),
        }
    }
}
