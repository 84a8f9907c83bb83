//! The gaps of pages in a stream of touches, each known to lie within bounds.

use plimsoll_flow::PageCount;

use super::FootprintError;
use super::average::{AverageWindow, Lengths, Tail, Windows};
use crate::parts::histogram::Histogram;

/// The gaps of pages, each known to lie within `(lo, hi]` ticks.
///
/// A tick is the unit of time: for example a reference, or a fraction of a scan's interval.
///
/// ```
/// use plimsoll_estimator::Footprint;
///
/// // Pages a b a, one a tick: `a` first at 1, again 2 later, last in the last tick.
/// let mut footprint = Footprint::new();
/// footprint.record_first(0, 1)?;
/// footprint.record(1, 2)?;
/// footprint.record_last(0, 1)?;
/// footprint.record_first(1, 2)?; // `b`
/// footprint.record_last(1, 2)?;
/// let average = footprint.over(3)?;
/// assert_eq!(average.at(1.0).pages, 1.0);
/// assert_eq!(average.at(2.0).pages, 2.0);
/// # Ok::<(), plimsoll_estimator::FootprintError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Footprint {
    pub(super) firsts: Gaps,
    pub(super) reuses: Gaps,
    pub(super) lasts: Gaps,
}

impl Footprint {
    /// Returns an empty footprint.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records a page that was touched again after more than `lo` and at most `hi` ticks.
    ///
    /// # Errors
    ///
    /// [`FootprintError::NoTime`] if `hi` is not above `lo`.
    pub fn record(&mut self, lo: u64, hi: u64) -> Result<(), FootprintError> {
        self.reuses.record(lo, hi)
    }

    /// Records a page's first touch, more than `lo` and at most `hi` ticks after the start.
    ///
    /// # Errors
    ///
    /// [`FootprintError::NoTime`] if `hi` is not above `lo`.
    pub fn record_first(&mut self, lo: u64, hi: u64) -> Result<(), FootprintError> {
        self.firsts.record(lo, hi)
    }

    /// Records a page's last touch, more than `lo` and at most `hi` ticks before the end; a touch in the last tick is 1
    /// before.
    ///
    /// # Errors
    ///
    /// [`FootprintError::NoTime`] if `hi` is not above `lo`.
    pub fn record_last(&mut self, lo: u64, hi: u64) -> Result<(), FootprintError> {
        self.lasts.record(lo, hi)
    }

    /// Number of pages touched.
    pub fn pages(&self) -> PageCount {
        PageCount(self.firsts.count)
    }

    /// Averages over all windows of a stream of `ticks`.
    ///
    /// # Errors
    ///
    /// [`FootprintError::Empty`] without pages or ticks, [`FootprintError::Unpaired`] if some page
    /// has a first touch and no last, or the reverse.
    pub fn over(&self, ticks: u64) -> Result<AverageWindow, FootprintError> {
        let (firsts, lasts) = (self.firsts.count, self.lasts.count);
        if firsts != lasts {
            return Err(FootprintError::Unpaired { firsts, lasts });
        }
        if firsts == 0 || ticks == 0 {
            return Err(FootprintError::Empty);
        }
        let gaps = [&self.firsts, &self.reuses, &self.lasts];
        let all = |length: fn(&Gaps) -> Lengths| {
            let lengths = gaps.into_iter().flat_map(length).collect();
            Windows {
                gaps: Tail::new(lengths),
                pages: firsts as f64,
                ticks: ticks as f64,
            }
        };
        let is_exact = gaps.iter().all(|gaps| gaps.censored == 0);
        Ok(AverageWindow {
            most: all(Gaps::shortest),
            middle: all(Gaps::middle),
            least: all(Gaps::longest),
            shortest: Tail::new(self.reuses.shortest()),
            middles: Tail::new(self.reuses.middle()),
            longest: Tail::new(self.reuses.longest()),
            lasts: [
                Tail::new(self.lasts.longest()),
                Tail::new(self.lasts.middle()),
                Tail::new(self.lasts.shortest()),
            ],
            width: self.reuses.mean_width() / 2.0,
            is_exact,
        })
    }

    /// Bytes of heap allocated now.
    pub fn memory_bytes(&self) -> usize {
        [&self.firsts, &self.reuses, &self.lasts]
            .iter()
            .map(|gaps| gaps.memory_bytes())
            .sum()
    }
}

/// Gaps of one kind.
#[derive(Debug, Clone, Default)]
pub(super) struct Gaps {
    /// Gaps that are exactly known.
    pub(super) known: Histogram,
    /// The minimum and maximum lengths of the other gaps.
    pub(super) short: Histogram,
    pub(super) long: Histogram,
    pub(super) twice_middle: Histogram,
    pub(super) count: u64,
    pub(super) censored: u64,
    /// Sum of the differences between maximum and minimum lengths.
    pub(super) widths: f64,
}

impl Gaps {
    pub(super) fn record(&mut self, lo: u64, hi: u64) -> Result<(), FootprintError> {
        if lo >= hi {
            return Err(FootprintError::NoTime { lo, hi });
        }
        self.count += 1;
        if lo + 1 == hi {
            self.known.record(hi);
        } else {
            self.censored += 1;
            self.short.record(lo + 1);
            self.long.record(hi);
            self.twice_middle.record((lo + 1).saturating_add(hi));
            self.widths += (hi - lo - 1) as f64;
        }
        Ok(())
    }

    pub(super) fn shortest(&self) -> Lengths {
        let counts = self.known.counts().chain(self.short.counts());
        counts
            .map(|(length, count)| (length as f64, count))
            .collect()
    }

    pub(super) fn longest(&self) -> Lengths {
        let counts = self.known.counts().chain(self.long.counts());
        counts
            .map(|(length, count)| (length as f64, count))
            .collect()
    }

    pub(super) fn middle(&self) -> Lengths {
        let known = self.known.counts();
        let known = known.map(|(length, count)| (length as f64, count));
        let censored = self.twice_middle.counts();
        let censored = censored.map(|(twice, count)| (twice as f64 / 2.0, count));
        known.chain(censored).collect()
    }

    /// Mean difference between the bounds of a gap that is not exactly known.
    pub(super) fn mean_width(&self) -> f64 {
        self.widths / self.censored.max(1) as f64
    }

    pub(super) fn memory_bytes(&self) -> usize {
        [&self.known, &self.short, &self.long, &self.twice_middle]
            .iter()
            .map(|histogram| histogram.memory_bytes())
            .sum()
    }
}
