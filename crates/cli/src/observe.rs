//! A running VM under observation: its references, traced or scanned period by period, become curves
//! and working sets. This is where source and estimator meet for the live verbs.

mod scanned;

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use plimsoll_estimator::{Survival, WindowAet, WindowLru, aet_curve, lru_curve, working_set};
use plimsoll_flow::{
    CurveDistance, CurvePoint, MissRatioCurve, PageCount, PageNumber, PageSize, ReferenceBatch,
    VmId, WorkingSet, WorkingSetBound,
};
use plimsoll_trap::{
    PresenceScanner, Scan, ScanConfig, TraceConfig, TraceTarget, Tracer, TrapError,
};
use plimsoll_vm::QemuVm;

use scanned::{MeanCurve, ScanWindow};

/// Estimator of a live curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LiveEstimator {
    /// Exact reuse distances of the traced references
    #[default]
    Lru,
    /// Reuse times by the AET model
    Aet,
}

/// How a VM is watched.
#[derive(Debug, Clone)]
pub enum WatchConfig {
    /// By traps.
    Traps(TraceConfig),
    /// By presence scans.
    Scans(ScanConfig),
}

impl From<TraceConfig> for WatchConfig {
    fn from(config: TraceConfig) -> Self {
        Self::Traps(config)
    }
}

/// A VM being watched, with what was seen of it so far.
#[derive(Debug)]
pub struct Observer {
    /// Name of the VM.
    pub vm: VmId,
    watch: Watch,
    /// How far back a period's curve reaches; `None`: to its own beginning.
    window: Option<Duration>,
    heat: Option<Heat>,
}

/// By what it is watched.
#[derive(Debug)]
enum Watch {
    Traps(Box<Traps>),
    Scans(Box<Scans>),
}

/// References in order, and what they showed.
#[derive(Debug)]
struct Traps {
    tracer: Tracer,
    estimator: LiveEstimator,
    lru: Whole<WindowLru>,
    aet: Whole<WindowAet>,
    /// What the periods within the window showed by the chosen estimator, with their lengths in seconds.
    recent: VecDeque<(Survival, f64)>,
}

/// Which pages were touched between looks, and what that showed.
#[derive(Debug)]
struct Scans {
    scanner: PresenceScanner,
    window: ScanWindow,
    pooled: MeanCurve,
    nothing: MeanCurve,
    /// Curves of the periods within the window, with their lengths in seconds.
    recent: VecDeque<(Option<MissRatioCurve>, f64)>,
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
    pub report: plimsoll_flow::Period,
    /// The working set; `None` if nothing was touched.
    pub working_set: Option<WorkingSet>,
    /// The period's curve by the chosen estimator; `None` if it saw no reuse.
    pub curve: Option<MissRatioCurve>,
    /// How far AET and exact LRU lie apart on the period's references; not known of scans.
    pub distance: Option<CurveDistance>,
    /// Between which sizes the working set lies with a confidence of 95 %, by the band of the curve it was
    /// read off; the upper one may not have been seen.
    pub working_set_band: Option<(PageCount, Option<PageCount>)>,
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
    /// Attaches to a running VM. The estimator is that of references in order: scans have their own.
    ///
    /// # Errors
    ///
    /// Why it cannot be traced, and what to do; the VM is as it was.
    pub fn attach(
        vm: &QemuVm,
        config: impl Into<WatchConfig>,
        estimator: LiveEstimator,
    ) -> anyhow::Result<Self> {
        let target = target_of(vm)?;
        let cannot = || format!("cannot trace VM {}", vm.id);
        let watch = match config.into() {
            WatchConfig::Traps(config) => Watch::Traps(Box::new(Traps {
                tracer: Tracer::attach(&target, config).with_context(cannot)?,
                estimator,
                lru: Whole::default(),
                aet: Whole::default(),
                recent: VecDeque::new(),
            })),
            WatchConfig::Scans(config) => {
                let scanner = PresenceScanner::attach(&target, config).with_context(cannot)?;
                let nothing = MeanCurve::new(PageCount(scanner.ram_pages()));
                Watch::Scans(Box::new(Scans {
                    scanner,
                    window: ScanWindow::default(),
                    pooled: nothing.clone(),
                    nothing,
                    recent: VecDeque::new(),
                }))
            }
        };
        Ok(Self {
            vm: vm.id.clone(),
            watch,
            window: None,
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

    /// What a touch that is noticed costs on this host: a trap, or a minor fault.
    #[must_use]
    pub fn touch_cost(&self) -> Duration {
        match &self.watch {
            Watch::Traps(traps) => traps.tracer.trap_cost().whole,
            Watch::Scans(scans) => scans.scanner.fault_cost(),
        }
    }

    /// Watches for one period.
    ///
    /// # Errors
    ///
    /// As [`Tracer::run_period`]; what was seen up to there counts in [`curve`](Self::curve).
    pub fn period(&mut self, stop: &AtomicBool) -> Result<Period, TrapError> {
        let heat = &mut self.heat;
        let mut period = match &mut self.watch {
            Watch::Traps(traps) => traps.period(stop, heat, self.window)?,
            Watch::Scans(scans) => scans.period(stop, heat, self.window)?,
        };
        period.heat = heat.as_mut().map(|heat| heat.take(period.report.scale));
        Ok(period)
    }

    /// The curve of all periods so far, by the chosen estimator; `None` if no page was used twice.
    #[must_use]
    pub fn curve(&self) -> Option<MissRatioCurve> {
        match &self.watch {
            Watch::Traps(traps) => Some(traps.curves()?.by(traps.estimator).clone()),
            Watch::Scans(scans) => scans.pooled.curve(),
        }
    }

    /// The curves of all periods so far by both estimators; `None` if no page was used twice, and of scans.
    #[must_use]
    pub fn curves(&self) -> Option<Curves> {
        match &self.watch {
            Watch::Traps(traps) => traps.curves(),
            Watch::Scans(_) => None,
        }
    }

    /// Leaves the VM as it was and ends.
    ///
    /// # Errors
    ///
    /// As [`Tracer::detach`].
    pub fn detach(self) -> Result<(), TrapError> {
        match self.watch {
            Watch::Traps(traps) => traps.tracer.detach(),
            Watch::Scans(scans) => scans.scanner.detach(),
        }
    }
}

/// A VM as its tracer sees it.
///
/// # Errors
///
/// Why its process cannot be looked at.
pub fn target_of(vm: &QemuVm) -> anyhow::Result<TraceTarget> {
    let states = vm
        .ram_states()
        .with_context(|| format!("cannot inspect VM {}", vm.id))?;
    Ok(TraceTarget {
        pid: vm.pid,
        ram: vm.ram.clone(),
        locked: states.iter().any(|state| state.locked),
        vcpu_threads: vm.vcpus.iter().map(|vcpu| vcpu.thread_id).collect(),
    })
}

impl Traps {
    fn period(
        &mut self,
        stop: &AtomicBool,
        heat: &mut Option<Heat>,
        window: Option<Duration>,
    ) -> Result<Period, TrapError> {
        let (lru, aet) = (&mut self.lru.window, &mut self.aet.window);
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
        let working_set_band = of_period.as_ref().and_then(working_set_band);
        let curve = match window {
            None => of_period,
            Some(window) => {
                let chosen = match self.estimator {
                    LiveEstimator::Lru => resolved.0,
                    LiveEstimator::Aet => resolved.1,
                };
                keep_recent(&mut self.recent, chosen, seconds, window);
                self.recent_curve()
            }
        };
        Ok(Period {
            working_set,
            working_set_band,
            distance: curves.as_ref().and_then(Curves::distance),
            curve,
            heat: None,
            report,
        })
    }

    /// The curve of the newest periods, each counted by its length.
    fn recent_curve(&self) -> Option<MissRatioCurve> {
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

    fn curves(&self) -> Option<Curves> {
        curves(&self.lru.pooled, &self.aet.pooled)
    }
}

impl Scans {
    fn period(
        &mut self,
        stop: &AtomicBool,
        heat: &mut Option<Heat>,
        window: Option<Duration>,
    ) -> Result<Period, TrapError> {
        let looks = &mut self.window;
        let report = self.scanner.run_period(stop, &mut |scan: &Scan<'_>| {
            let pages = scan.touched.pages();
            looks.observe(pages);
            if let Some(heat) = heat {
                heat.used.extend(pages);
            }
        });
        // What was seen of a period that failed is not whole.
        let of_period = self
            .window
            .finish(report.as_ref().map_or(1, |report| u64::from(report.scale)));
        let report = report?;
        let seconds = report.length.as_secs_f64();
        if let Some(curve) = &of_period {
            self.pooled.add(curve, seconds);
        }
        let working_set = working_set_of_scans(&report, of_period.as_ref());
        let working_set_band = of_period.as_ref().and_then(working_set_band);
        let curve = match window {
            None => of_period,
            Some(window) => {
                keep_recent(&mut self.recent, of_period, seconds, window);
                let mut mean = self.nothing.clone();
                for (curve, seconds) in &self.recent {
                    curve.iter().for_each(|curve| mean.add(curve, *seconds));
                }
                mean.curve()
            }
        };
        Ok(Period {
            working_set,
            working_set_band,
            distance: None,
            curve,
            heat: None,
            report,
        })
    }
}

/// Appends a period and lets those go that `window` does not need.
fn keep_recent<T>(recent: &mut VecDeque<(T, f64)>, newest: T, seconds: f64, window: Duration) {
    recent.push_back((newest, seconds));
    let mut reach: f64 = recent.iter().map(|(_, seconds)| seconds).sum();
    while let Some((_, oldest)) = recent.front()
        && reach - oldest >= window.as_secs_f64()
    {
        reach -= oldest;
        recent.pop_front();
    }
}

/// Between which sizes a curve's band falls to the miss ratio of a working set; `None` if no edge does.
pub(crate) fn working_set_band(curve: &MissRatioCurve) -> Option<(PageCount, Option<PageCount>)> {
    let first = |edge: fn(&CurvePoint) -> f64| {
        let mut points = curve.points().iter();
        let reached = points.find(|point| edge(point) <= WorkingSet::MISS_RATIO);
        reached.map(|point| point.size)
    };
    Some((first(|point| point.low)?, first(|point| point.high)))
}

/// Reads the working set off the curve of a window of looks. What fits into what is touched between two of them
/// is only known to fit.
fn working_set_of_scans(
    report: &plimsoll_flow::Period,
    curve: Option<&MissRatioCurve>,
) -> Option<WorkingSet> {
    let set = working_set(curve?);
    let bound = match set.bound {
        WorkingSetBound::Estimate if set.size.0 <= report.resolution_pages() => {
            WorkingSetBound::AtMost
        }
        bound => bound,
    };
    Some(WorkingSet { bound, ..set })
}

/// Reads the working set off a period's curve; without one, off the pages touched.
fn working_set_of(
    report: &plimsoll_flow::Period,
    curve: Option<&MissRatioCurve>,
) -> Option<WorkingSet> {
    if report.distinct_pages == 0 {
        return None;
    }
    let size = PageCount(report.distinct_pages * u64::from(report.scale));
    let hot_set_pages = u64::from(report.traps.hot_set_pages);
    Some(match curve {
        Some(curve) => working_set(curve),
        // All that was touched fits into what the hot set hides.
        None if report.distinct_pages <= hot_set_pages && !report.budget_exhausted => WorkingSet {
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
