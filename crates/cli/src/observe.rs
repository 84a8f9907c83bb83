//! A running VM under observation: its references, traced period by period, become curves
//! and working sets. This is where source and estimator meet for the live verbs.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use plimsoll_estimator::{Survival, WindowAet, WindowLru, aet_curve, lru_curve, working_set};
use plimsoll_flow::{
    CurveDistance, MissRatioCurve, PageCount, PageNumber, PageSize, ReferenceBatch, VmId,
    WorkingSet, WorkingSetBound,
};
use plimsoll_trap::{PeriodReport, TraceConfig, TraceTarget, Tracer, TrapError};
use plimsoll_vm::QemuVm;

/// By what a live curve is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LiveEstimator {
    /// Exact reuse distances of the traced references
    #[default]
    Lru,
    /// Reuse times by the AET model
    Aet,
}

/// A VM being traced, with what was seen of it so far.
#[derive(Debug)]
pub struct Observer {
    /// Name of the VM.
    pub vm: VmId,
    tracer: Tracer,
    estimator: LiveEstimator,
    lru: Whole<WindowLru>,
    aet: Whole<WindowAet>,
    /// How far back a period's curve reaches; `None`: to its own beginning.
    window: Option<Duration>,
    /// What the periods within it showed by the chosen estimator, with their lengths in seconds.
    recent: VecDeque<(Survival, f64)>,
    heat: Option<Heat>,
}

/// Counts where in its RAM a VM is busy.
#[derive(Debug)]
struct Heat {
    ram: PageCount,
    cells: u32,
    /// Watched pages used in this period.
    used: HashSet<PageNumber>,
}

impl Heat {
    /// Pages used in each cell, and begins anew. One that was seen stands for `scale`.
    fn take(&mut self, scale: u32) -> Vec<u32> {
        let mut pages = vec![0_u32; self.cells as usize];
        for page in self.used.drain() {
            let cell = u128::from(page.0) * u128::from(self.cells) / u128::from(self.ram.0.max(1));
            let last = pages.len() - 1;
            let cell = usize::try_from(cell).map_or(last, |cell| cell.min(last));
            pages[cell] = pages[cell].saturating_add(scale);
        }
        pages
    }
}

/// An estimator of windows, and all windows so far.
#[derive(Debug, Default)]
struct Whole<Window> {
    window: Window,
    pooled: Survival,
}

/// What one period showed.
#[derive(Debug)]
pub struct Period {
    /// What it did and cost.
    pub report: PeriodReport,
    /// The working set; `None` if nothing was touched.
    pub working_set: Option<WorkingSet>,
    /// The period's curve by the chosen estimator; `None` if it saw no reuse.
    pub curve: Option<MissRatioCurve>,
    /// How far AET and exact LRU lie apart on the period's references.
    pub distance: Option<CurveDistance>,
    /// Pages used in each cell of the RAM, if that is counted.
    pub heat: Option<Vec<u32>>,
}

/// The curves of all periods together, each counted by its length.
#[derive(Debug)]
pub struct Curves {
    /// By exact reuse distances.
    pub lru: MissRatioCurve,
    /// By reuse times.
    pub aet: MissRatioCurve,
}

impl Curves {
    /// The one by `estimator`.
    #[must_use]
    pub fn by(&self, estimator: LiveEstimator) -> &MissRatioCurve {
        match estimator {
            LiveEstimator::Lru => &self.lru,
            LiveEstimator::Aet => &self.aet,
        }
    }

    /// How far the two lie apart over the sizes at which either has a step.
    #[must_use]
    pub fn distance(&self) -> Option<CurveDistance> {
        let first = self
            .lru
            .points()
            .first()?
            .size
            .max(self.aet.points().first()?.size);
        let last = self
            .lru
            .points()
            .last()?
            .size
            .max(self.aet.points().last()?.size);
        self.lru.distance(&self.aet, even_sizes(first, last))
    }
}

/// At most 1000 sizes from `first` to `last`, evenly spaced.
pub fn even_sizes(first: PageCount, last: PageCount) -> impl Iterator<Item = PageCount> {
    let width = last.0.saturating_sub(first.0);
    let step = width.div_ceil(1000).max(1);
    (0..=width / step).map(move |index| PageCount(first.0 + index * step))
}

impl Observer {
    /// Attaches to a running VM.
    ///
    /// # Errors
    ///
    /// Why it cannot be traced, and what to do; the VM is as it was.
    pub fn attach(
        vm: &QemuVm,
        config: TraceConfig,
        estimator: LiveEstimator,
    ) -> anyhow::Result<Self> {
        let states = vm
            .ram_states()
            .with_context(|| format!("cannot look at VM {}", vm.id))?;
        let target = TraceTarget {
            pid: vm.pid,
            ram: vm.ram.clone(),
            locked: states.iter().any(|state| state.locked),
            vcpu_threads: vm.vcpus.iter().map(|vcpu| vcpu.thread_id).collect(),
        };
        let tracer = Tracer::attach(&target, config)
            .with_context(|| format!("cannot trace VM {}", vm.id))?;
        Ok(Self {
            vm: vm.id.clone(),
            tracer,
            estimator,
            lru: Whole::default(),
            aet: Whole::default(),
            window: None,
            recent: VecDeque::new(),
            heat: None,
        })
    }

    /// Has each period's curve reach back as far as `window`, instead of to the period's beginning.
    pub fn reach_back(&mut self, window: Duration) {
        self.window = Some(window);
    }

    /// Counts where in the RAM of `vm` it is busy, in so many cells, 1 or more.
    pub fn count_heat(&mut self, vm: &QemuVm, cells: u32) {
        let bytes = vm.ram.iter().map(|ram| ram.len_bytes).sum();
        self.heat = Some(Heat {
            ram: PageCount::from_bytes(bytes, PageSize::FOUR_KIB),
            cells: cells.max(1),
            used: HashSet::new(),
        });
    }

    /// The tracer.
    #[must_use]
    pub fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// Traces one period.
    ///
    /// # Errors
    ///
    /// As [`Tracer::run_period`]; what was seen up to there counts in [`curves`](Self::curves).
    pub fn period(&mut self, stop: &AtomicBool) -> Result<Period, TrapError> {
        let (lru, aet) = (&mut self.lru.window, &mut self.aet.window);
        let heat = &mut self.heat;
        let report = self
            .tracer
            .run_period(stop, &mut |batch: &ReferenceBatch| {
                lru.observe(batch.pages());
                aet.observe(batch.pages());
                if let Some(heat) = heat {
                    heat.used.extend(batch.pages());
                }
            })?;
        let scale = u64::from(report.scale);
        let (lru, aet) = (self.lru.window.finish(scale), self.aet.window.finish(scale));
        // Over the run every period counts by its length: how many references the VM made
        // in it nobody can tell from outside. Each is resolved by itself, as the VM may
        // be in another phase in the next.
        let seconds = report.length.as_secs_f64();
        let resolved = (lru.resolved(), aet.resolved());
        self.lru.pooled.merge(&resolved.0, seconds);
        self.aet.pooled.merge(&resolved.1, seconds);

        let curves = curves(&lru, &aet);
        let of_period = curves
            .as_ref()
            .map(|curves| curves.by(self.estimator).clone());
        let working_set = working_set_of(&report, of_period.as_ref());
        let curve = match self.window {
            None => of_period,
            Some(window) => {
                let chosen = match self.estimator {
                    LiveEstimator::Lru => resolved.0,
                    LiveEstimator::Aet => resolved.1,
                };
                self.recent.push_back((chosen, seconds));
                self.recent_curve(window)
            }
        };
        Ok(Period {
            working_set,
            distance: curves.as_ref().and_then(Curves::distance),
            curve,
            heat: self.heat.as_mut().map(|heat| heat.take(report.scale)),
            report,
        })
    }

    /// The curve of the newest periods that make up `window`, each counted by its length.
    fn recent_curve(&mut self, window: Duration) -> Option<MissRatioCurve> {
        let mut reach: f64 = self.recent.iter().map(|(_, seconds)| seconds).sum();
        while let Some((_, oldest)) = self.recent.front()
            && reach - oldest >= window.as_secs_f64()
        {
            reach -= oldest;
            self.recent.pop_front();
        }
        let mut pooled = Survival::new();
        for (period, seconds) in &self.recent {
            pooled.merge(period, *seconds);
        }
        if pooled.events() == 0 {
            return None;
        }
        match self.estimator {
            LiveEstimator::Lru => lru_curve(&pooled).ok(),
            LiveEstimator::Aet => aet_curve(&pooled).ok(),
        }
    }

    /// The curves of all periods so far; `None` if no page was used twice.
    #[must_use]
    pub fn curves(&self) -> Option<Curves> {
        curves(&self.lru.pooled, &self.aet.pooled)
    }

    /// Removes the traps and ends.
    ///
    /// # Errors
    ///
    /// As [`Tracer::detach`].
    pub fn detach(self) -> Result<(), TrapError> {
        self.tracer.detach()
    }
}

/// Reads the working set off a period's curve; without one, off the pages touched.
fn working_set_of(report: &PeriodReport, curve: Option<&MissRatioCurve>) -> Option<WorkingSet> {
    if report.distinct_pages == 0 {
        return None;
    }
    let size = PageCount(report.distinct_pages * u64::from(report.scale));
    let hot_set_pages = u64::from(report.hot_set_pages);
    Some(match curve {
        Some(curve) => working_set(curve),
        // All that was touched fits into what the hot set hides.
        None if report.distinct_pages <= hot_set_pages && !report.budget_ran_out => WorkingSet {
            size,
            bound: WorkingSetBound::AtMost,
        },
        None => WorkingSet {
            size,
            bound: WorkingSetBound::AtLeast,
        },
    })
}

fn curves(lru: &Survival, aet: &Survival) -> Option<Curves> {
    if lru.events() == 0 {
        return None;
    }
    Some(Curves {
        lru: lru_curve(lru).ok()?,
        aet: aet_curve(aet).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_sizes_begin_and_end_where_they_should() {
        let sizes = |first, last| even_sizes(PageCount(first), PageCount(last)).map(|size| size.0);
        assert_eq!(sizes(3, 6).collect::<Vec<_>>(), [3, 4, 5, 6]);
        let many: Vec<_> = sizes(64, 100_000).collect();
        assert!(
            many.len() <= 1001 && many[0] == 64 && many.last().is_some_and(|&size| size > 99_800)
        );
        assert_eq!(sizes(5, 5).collect::<Vec<_>>(), [5]);
    }
}
