//! What the feeds of a VM or of a control group show of its memory: curve, working set, heatmap, state of its tracer.

use std::collections::VecDeque;
use std::time::Duration;

use plimsoll_flow::{MissRatioCurve, PageCount, PageSize, WorkingSet};
use plimsoll_protocol::vm::{CurveSource, HeatRow, TraceView};

use crate::clock::Time;
use crate::host::{Feed, FeedReport};

/// Minimum number of references of a curve on which decisions are based, unless its band holds for any number of them.
const REFERENCES_MIN: u64 = 100;
/// Number of points of a curve that is displayed.
const SHOWN_POINTS: usize = 400;
/// Number of rows of a heatmap that are kept.
const HEAT_ROWS: usize = 240;

/// A curve, over sizes as the host counts them.
#[derive(Debug, Clone)]
pub struct KnownCurve {
    /// The curve.
    pub curve: MissRatioCurve,
    /// The same with few points, for display and history.
    pub shown: MissRatioCurve,
    /// Its source.
    pub source: CurveSource,
    /// Its time, since boot.
    pub since_boot: Duration,
}

/// The feeds of one VM or control group, with their results as of the last turn.
#[derive(Default)]
pub struct Observations {
    /// Its curve.
    pub known: Option<KnownCurve>,
    /// Its working set.
    pub working_set: Option<WorkingSet>,
    /// How it is traced; without the time of the last period.
    pub trace: Option<TraceView>,
    /// That time, since boot.
    pub last_period: Option<Duration>,
    /// Rows of its heatmap, newest last.
    pub heat: VecDeque<HeatRow>,
    /// Bytes of RAM that a cell of the heatmap covers.
    pub heat_cell_bytes: u64,
    /// Rows added since the turn before.
    heat_is_new: bool,
    feeds: Vec<Box<dyn Feed>>,
    /// Losses of its tracer that were already stored in the history.
    lost_before: u64,
}

impl Observations {
    /// Observes by these feeds; nothing is known before [`refresh`](Self::refresh).
    pub fn by(feeds: Vec<Box<dyn Feed>>) -> Self {
        Self {
            feeds,
            ..Self::default()
        }
    }

    /// Takes the results of the feeds; returns their warnings. Of several curves, one of `preferred` sources is taken
    /// first. `in_host_sizes` converts a curve of a source into one over sizes as the host counts them. What is shown of it keeps
    /// the misses at `baseline`.
    pub fn refresh(
        &mut self,
        baseline: Option<PageCount>,
        preferred: impl Fn(CurveSource) -> bool,
        in_host_sizes: impl Fn(CurveSource, MissRatioCurve) -> MissRatioCurve,
    ) -> Vec<String> {
        let mut warnings = Vec::new();
        let mut found: Vec<KnownCurve> = Vec::new();
        let mut new_heat = false;
        let mut new_set = None;
        for feed in &mut self.feeds {
            let source = feed.source();
            let FeedReport {
                curve,
                working_set,
                trace,
                last_period,
                heat,
                heat_cell_bytes,
                warning,
            } = feed.seen();
            warnings.extend(warning);
            if let Some(observed) = curve {
                let (page, host_page) = (observed.page_size.bytes(), PageSize::FOUR_KIB.bytes());
                if page == host_page {
                    let curve = in_host_sizes(source, observed.curve);
                    found.push(KnownCurve {
                        shown: curve.thinned_around(SHOWN_POINTS, baseline.as_slice()),
                        curve,
                        source,
                        since_boot: observed.since_boot,
                    });
                } else {
                    warnings.push(format!(
                        "invalid curve: its pages have {page} bytes, not {host_page}"
                    ));
                }
            }
            new_set = working_set.or(new_set);
            self.trace = trace.or(self.trace.take());
            self.last_period = last_period.or(self.last_period);
            if heat_cell_bytes > 0 && heat_cell_bytes != self.heat_cell_bytes {
                self.heat_cell_bytes = heat_cell_bytes;
                // Its rows lie elsewhere.
                self.heat.clear();
            }
            new_heat |= !heat.is_empty();
            self.heat.extend(heat);
        }
        self.heat_is_new = new_heat;
        self.working_set = new_set;
        while self.heat.len() > HEAT_ROWS {
            self.heat.pop_front();
        }
        found.sort_by_key(|known| !preferred(known.source));
        self.known = found.into_iter().find(|known| {
            let is_banded = known.source == CurveSource::FirstTouch;
            is_banded || known.curve.references() >= REFERENCES_MIN
        });
        warnings
    }

    /// How it is traced, with the time of the last period.
    pub fn trace_view(&self, now: Time) -> Option<TraceView> {
        self.trace.clone().map(|trace| TraceView {
            last_unix_ms: self.last_period.map(|at| now.unix_ms_at(at)),
            ..trace
        })
    }

    /// The newest row of its heatmap, if it was added since the turn before.
    pub fn new_heat(&self) -> Option<&HeatRow> {
        self.heat.back().filter(|_| self.heat_is_new)
    }

    /// References lost by its tracer since the previous call.
    pub fn newly_lost(&mut self) -> u64 {
        let lost = self.trace.as_ref().map_or(0, |trace| trace.lost);
        let new = lost.saturating_sub(self.lost_before);
        self.lost_before = lost;
        new
    }

    /// Discards what was observed so far, because memory was moved.
    pub fn forget(&mut self) {
        for feed in &mut self.feeds {
            feed.forget();
        }
    }
}
