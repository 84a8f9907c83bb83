//! Sampled pages: random pages are unmapped once a period and checked at its end, the sampling of VMware's ESX.
//!
//! The share touched, times the memory, is ESX's estimate of the working set (\[Waldspurger02\] §5.3: 100 pages, 30 s).
//!
//! Departs from it in the pages drawn from: those never touched are left out, and of two pages in one aligned
//! 64 KiB only one is drawn (`process.rs`), which leaves each page's chance as it is.
//!
//! Cost: a minor fault of the VM for each page touched, and some 5 µs a page drawn.
//!
//! Not here: a curve, which one check of each page cannot give.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, PageNumber, Period, PeriodLosses, ReferenceBatch, ScanCounts, TraceMethod,
};

use crate::backend::{Backend, BackendRow, Observation, Scan, Sink, Yield};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::process::{Population, Session, cpu_time};
use crate::rate::RateRule;
use crate::requirement::Requirement::{NoSwap, PageAccess, SharedRam, Unlocked};
use crate::sample::mix;
use crate::target::TraceTarget;
use crate::trial::{TouchCost, measure_fault_cost};

/// The backend `sample`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::SampledPages,
    sees: "Sampled pages: whether random pages were touched in a period, as VMware's ESX does",
    needs: "process_madvise (Linux 5.10) and pagemap; shared RAM, neither locked nor swappable",
    costs: "a minor fault per page touched, 100 pages in a period by default",
    loses: "everything but one bit per page and period",
    yields: Yield::Sample,
    sees_reads: true,
    options: &["--sample"],
    rate_rules: &[RateRule::Fixed, RateRule::Budget],
    requirements: |_| &[SharedRam, Unlocked, NoSwap, PageAccess],
    trial: measure_fault_cost,
    curve_cost: None,
    attach: |target, config| Ok(Box::new(PageSampler::attach(target, config)?)),
    any_process: false,
    group: None,
};

/// A VM of which random pages are checked. Dropped, it leaves nothing in the VM.
#[derive(Debug)]
struct PageSampler {
    session: Session,
    config: TraceConfig,
    touch_cost: TouchCost,
    batch: ReferenceBatch,
    periods: u64,
}

/// Pages drawn for a period.
#[derive(Debug)]
struct Draw {
    /// Ascending.
    pages: Vec<u64>,
    /// How many of them were mapped again right after two attempts to unmap them: in constant use, or
    /// pinned, or mapped by a second process. They count as touched.
    stayed: u64,
    population: Population,
}

impl PageSampler {
    fn attach(target: &TraceTarget, config: &TraceConfig) -> Result<Self, TrapError> {
        let session = Session::open(target, config)?;
        let touch_cost = TouchCost::measure(target.pid, measure_fault_cost)?;
        Ok(Self {
            session,
            touch_cost,
            config: config.clone(),
            batch: ReferenceBatch::new(),
            periods: 0,
        })
    }

    /// Draws random populated pages and unmaps them. There are fewer than configured if the VM does not have as
    /// many in different 64 KiB.
    fn draw(&mut self) -> Result<Draw, TrapError> {
        // Each run with the rank of its first page among all populated ones.
        let (mut runs, mut ranks, mut populated) = (Vec::new(), Vec::new(), 0);
        let population = self.session.collect(|run| {
            ranks.push(populated);
            populated += run.end - run.start;
            runs.push(run);
        })?;
        let wanted = self.config.sample_pages;
        let seed = mix(self.config.seed ^ mix(self.periods + 1));
        let (mut pages, mut windows) = (Vec::new(), HashSet::new());
        // Each try meets a window that is taken with a chance of at most drawn * 16 / populated.
        for attempt in 0..wanted as u64 * 4 {
            if pages.len() == wanted || populated == 0 {
                break;
            }
            let rank = mix(seed ^ attempt) % populated;
            let run = ranks.partition_point(|&first| first <= rank) - 1;
            let page = runs[run].start + (rank - ranks[run]);
            if windows.insert(self.session.window_of(page)) {
                pages.push(page);
            }
        }
        pages.sort_unstable();
        let stayed = self.session.unmap_firmly(&pages)?;
        Ok(Draw {
            pages,
            stayed,
            population,
        })
    }
}

impl Backend for PageSampler {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        self.session.process.check_alive()?;
        let (start, cpu) = (Instant::now(), cpu_time());
        let draw = self.draw()?;
        let window_start = Instant::now();
        self.session.process.rest(stop, start + self.config.period);
        self.batch.advance();
        let batch = &mut self.batch;
        self.session.for_each_mapped(&draw.pages, |page, _| {
            batch.push(PageNumber(page), AccessKind::Unknown);
        })?;
        let window = window_start.elapsed();
        sink(&Observation::Scan(Scan {
            from: Duration::ZERO,
            to: window,
            touched: &self.batch,
        }));

        let (length, arm_time) = (start.elapsed(), cpu_time().saturating_sub(cpu));
        let (drawn, touched) = (draw.pages.len() as u64, self.batch.len() as u64);
        // Every page drawn is mapped again some time.
        let fault_time = self.touch_cost.time * u32::try_from(drawn).unwrap_or(u32::MAX);
        let process = &self.session.process;
        let scale = draw.population.pages.div_ceil(drawn.max(1)).max(1);
        let period = Period {
            index: self.periods,
            scale: u32::try_from(scale).unwrap_or(u32::MAX),
            populated_pages: draw.population.pages,
            tracked_pages: drawn,
            distinct_pages: touched,
            scans: ScanCounts {
                scans: 1,
                interval: window,
                touches: touched,
                resolution_pages: u32::try_from(touched).unwrap_or(u32::MAX),
                ..ScanCounts::default()
            },
            rearmed_pages: drawn,
            fault_time,
            arm_time,
            collect_time: draw.population.time,
            overhead_ratio: process.overhead_ratio(fault_time + arm_time, length),
            losses: PeriodLosses {
                stayed_accessible: draw.stayed,
                first_touches_unseen: draw.population.new_pages,
                ..PeriodLosses::default()
            },
            ..Period::empty(TraceMethod::SampledPages, length, window)
        };
        self.periods += 1;
        Ok(period)
    }

    fn touch_cost(&self) -> TouchCost {
        self.touch_cost
    }

    fn ram_pages(&self) -> u64 {
        self.session.ram_pages()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::stay_on_this_cpu;
    use crate::sys::SharedMemory;
    use crate::sys::usize_of;
    use std::sync::atomic::Ordering;

    const PAGES: usize = 1600;

    fn config(sample_pages: usize, seed: u64) -> TraceConfig {
        TraceConfig {
            period: Duration::from_millis(10),
            sample_pages,
            seed,
            ..TraceConfig::default()
        }
    }

    #[test]
    fn the_pages_drawn_that_were_touched_are_found_and_no_others() {
        stay_on_this_cpu().unwrap();
        let memory = SharedMemory::new(PAGES).unwrap();
        let target = memory.as_target();
        for seed in 0..4 {
            let mut sampler = match PageSampler::attach(&target, &config(50, seed)) {
                Ok(sampler) => sampler,
                Err(error) => {
                    plimsoll_skip::skip(
                        plimsoll_skip::Lack::Userfaultfd,
                        format_args!("no pages can be unmapped on this host: {error}"),
                    );
                    return;
                }
            };
            // Of 1600 pages there are 100 in 64 KiB of their own.
            let draw = sampler.draw().unwrap();
            assert_eq!(draw.population.pages, PAGES as u64);
            assert_eq!(draw.pages.len(), 50);
            let mapped = |sampler: &mut PageSampler| {
                let mut mapped = Vec::new();
                let all = sampler
                    .session
                    .for_each_mapped(&draw.pages, |page, _| mapped.push(page));
                all.unwrap();
                mapped
            };
            // The host may unmap a page by itself, or hold one for a short time.
            assert!(
                mapped(&mut sampler).len() <= 2 && draw.stayed <= 2,
                "{draw:?}"
            );
            let read: Vec<_> = draw.pages.iter().copied().step_by(2).collect();
            for &page in &read {
                memory.word(usize_of(page)).load(Ordering::Relaxed);
            }
            let found = mapped(&mut sampler);
            let differ = |a: &[u64], b: &[u64]| a.iter().filter(|page| !b.contains(page)).count();
            let strange = differ(&found, &read) + differ(&read, &found);
            assert!(strange <= 2, "{found:?} beside {read:?}");
        }
    }

    #[test]
    fn a_period_counts_the_pages_touched_in_it() {
        stay_on_this_cpu().unwrap();
        let memory = SharedMemory::new(PAGES).unwrap();
        let Ok(mut sampler) = ROW.attach(&memory.as_target(), &config(PAGES, 9)) else {
            plimsoll_skip::skip(
                plimsoll_skip::Lack::Userfaultfd,
                format_args!("no pages can be unmapped on this host"),
            );
            return;
        };
        assert_eq!(sampler.ram_pages(), PAGES as u64);
        let stop = AtomicBool::new(false);
        let mut found = 0;
        let mut sink = |seen: &Observation<'_>| {
            assert!(matches!(seen, Observation::Scan(_)), "{seen:?}");
            found += seen.pages().len() as u64;
        };
        let period = sampler.run_period(&stop, &mut sink).unwrap();
        // One more where the memory does not begin at a window's boundary.
        assert!((90..=101).contains(&period.tracked_pages), "{period:?}");
        assert_eq!(period.distinct_pages, found);
        // Nobody touched the memory.
        assert!(found <= 4, "{period:?}");
        sampler.detach().unwrap();
    }
}
