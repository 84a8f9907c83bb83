//! Times to first touches, counted in cells between a limited number of edges.
//!
//! An observation states that the time lies in one or more adjacent cells, or beyond an edge: exact times, times known
//! within an interval and censored times are all of this form. Times are rounded outward to edges, which are quantiles of
//! the observed times, so that a cell holds about one in [`EDGES_MAX`] of them; each uncertainty grows by a cell at most.

use std::collections::BTreeMap;

/// Maximum number of edges above 0.
const EDGES_MAX: usize = 200;
/// Minimum time in seconds: a clock's step.
const TIME_MIN: f64 = 1e-9;

/// The time to the first touch of one sample, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Time {
    /// It is longer than this.
    pub(super) above: f64,
    /// It is at most this; `None` if no touch was observed.
    pub(super) upto: Option<f64>,
}

/// Observations that lie in the same cells.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cell {
    /// Edge above which the times lie.
    pub(super) from: usize,
    /// Edge up to which they lie; `None` if no touch was observed.
    pub(super) to: Option<usize>,
    /// Number of observations.
    pub(super) count: f64,
}

/// Observations in cells.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cells {
    /// Rising; the first is 0, the last the longest time observed.
    pub(super) edges: Vec<f64>,
    pub(super) cells: Vec<Cell>,
    /// By observation: its cell.
    pub(super) places: Vec<usize>,
    /// Number of observations.
    pub(super) total: f64,
}

impl Cells {
    /// `None` if nothing was touched, or observed for any time.
    pub(super) fn new(times: &[Time]) -> Option<Self> {
        let ends = times.iter().flat_map(|time| {
            let is_exact = time.upto == Some(time.above);
            [(!is_exact).then_some(time.above), time.upto]
        });
        let mut ends: Vec<f64> = ends.flatten().filter(|&end| end >= TIME_MIN).collect();
        ends.sort_by(f64::total_cmp);
        ends.dedup();
        let touched = times.iter().filter_map(|time| time.upto);
        let last_touch = touched.reduce(f64::max)?.max(TIME_MIN);
        if ends.is_empty() {
            ends.push(TIME_MIN);
        }
        let edges_wanted = ends.len().min(EDGES_MAX);
        let mut edges = vec![0.0];
        edges.extend((1..=edges_wanted).map(|edge| ends[edge * ends.len() / edges_wanted - 1]));
        // Where touches end, the distribution may end.
        if let Err(at) = edges.binary_search_by(|edge| edge.total_cmp(&last_touch)) {
            edges.insert(at, last_touch);
        }
        let places: Vec<_> = times.iter().map(|time| place(&edges, time)).collect();
        let mut counts: BTreeMap<(usize, Option<usize>), f64> = BTreeMap::new();
        for &place in &places {
            *counts.entry(place).or_default() += 1.0;
        }
        let numbers: BTreeMap<_, _> = counts.keys().copied().zip(0..).collect();
        let cell = |((from, to), count)| Cell { from, to, count };
        Some(Self {
            edges,
            places: places.iter().map(|place| numbers[place]).collect(),
            cells: counts.into_iter().map(cell).collect(),
            total: times.len() as f64,
        })
    }

    /// The longest time observed.
    pub(super) fn longest(&self) -> f64 {
        self.edges[self.edges.len() - 1]
    }
}

/// The edges between which a time lies.
fn place(edges: &[f64], time: &Time) -> (usize, Option<usize>) {
    let below = edges.partition_point(|&edge| edge <= time.above) - 1;
    let Some(upto) = time.upto else {
        return (below, None);
    };
    let to = edges.partition_point(|&edge| edge < upto);
    let to = to.clamp(1, edges.len() - 1);
    if time.above == upto {
        (to - 1, Some(to))
    } else {
        (below.min(to - 1), Some(to))
    }
}
