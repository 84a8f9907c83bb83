//! Average footprint: how many distinct pages a window of a given length touches, on the average.
//!
//! A page is missing from a window exactly when the window lies inside one of the page's *gaps*:
//! from the start to its first touch, from one touch to the next (its reuse times), from its last touch to
//! the end. A gap of `g` ticks holds `g - w` windows of length `w`. So over all windows of a
//! stream of `n` ticks and `m` pages,
//!
//! ```text
//!     fp(w)  =  m  -  sum over all gaps of max(g - w, 0) / (n - w + 1)
//! ```
//!
//! exactly. A memory of `c` pages holds about what the last `w` ticks touched, with `fp(w) = c`; it
//! misses what was not touched within them. That share of references is the slope of fp at `w`,
//! but for the windows at the stream's two ends ([Denning68]'s working sets, [DS78] for the slope; [Xiang13] for
//! finite streams). Here it is counted rather than differentiated: references with reuse times above `w`, first
//! references among them, which miss at every size as everywhere in this crate.
//!
//! **Scans.** If accessed pages are only checked periodically, a reuse time is known to lie between two
//! bounds. All gaps as long as they can be give a lower bound of fp and an upper bound of the
//! share above `w`, all as short as they can be the opposite; the curve's band is what
//! follows from the two together. The estimate takes each gap in the middle, for which fp at whole
//! intervals is the average over aligned windows, and without bias if scans and touches do not keep step.
//!
//! Source: [Xiang13] §2 for the formula, [Denning68] and [DS78]. Departs in counting first references, and
//! in bounding censored times; those from 2048 ticks on are kept to 1/1024 (`histogram`).
//! Cost: O(1) a touch with one trip to memory; a table entry a page. O(log) for fp at a window.
//! Not here: when to scan, and how. The model's own error, that of `aet`: right to 0.01 where references mix.

use plimsoll_flow::{
    CurveError, CurvePoint, MissRatioCurve, PageCount, PageNumber, ReferenceBatch,
};

use crate::Estimator;
use crate::hash::{PageMap, page_map};
use crate::histogram::Histogram;
use crate::last_use::{LastUse, map_bytes};
use crate::reuse_times::whole_pages;
use crate::steps::Steps;
use crate::witness::{Certain, Witness};

/// Why times were not taken in, or no average could be made of them. What was taken in before stays.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FootprintError {
    /// No whole number of ticks is above one and at most the other.
    #[error("no time lies above {lo} and up to {hi} ticks")]
    NoTime {
        /// The time is above this.
        lo: u64,
        /// The time is at most this.
        hi: u64,
    },
    /// A page with a first touch has a last one, and the reverse.
    #[error("{firsts} first touches and {lasts} last ones are not those of the same pages")]
    Unpaired {
        /// First touches recorded.
        firsts: u64,
        /// Last touches recorded.
        lasts: u64,
    },
    /// Nothing was touched, or no time passed.
    #[error("nothing was touched, so there is no footprint")]
    Empty,
    /// A number of references that no interval has.
    #[error("{references} references do not make an interval")]
    NoRate {
        /// The number that was given.
        references: f64,
    },
}

/// A number of pages known to lie within bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FootprintPoint {
    /// Lower bound, in pages.
    pub low: f64,
    /// Estimate, in pages.
    pub pages: f64,
    /// Upper bound, in pages.
    pub high: f64,
}

/// The gaps of pages, each known to lie within `(lo, hi]` ticks.
///
/// A tick is the unit of time, whatever that is: a reference, or a fraction of a scan's interval.
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
    firsts: Gaps,
    reuses: Gaps,
    lasts: Gaps,
    unseen: u64,
}

impl Footprint {
    /// Returns a footprint of nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A page was touched again after more than `lo` and at most `hi` ticks.
    ///
    /// # Errors
    ///
    /// [`FootprintError::NoTime`] if `hi` is not above `lo`.
    pub fn record(&mut self, lo: u64, hi: u64) -> Result<(), FootprintError> {
        self.reuses.record(lo, hi)
    }

    /// A page was touched for the first time, more than `lo` and at most `hi` ticks after the start.
    ///
    /// # Errors
    ///
    /// [`FootprintError::NoTime`] if `hi` is not above `lo`.
    pub fn record_first(&mut self, lo: u64, hi: u64) -> Result<(), FootprintError> {
        self.firsts.record(lo, hi)
    }

    /// A page's last touch was more than `lo` and at most `hi` ticks before the end; in the last tick is 1 before.
    ///
    /// # Errors
    ///
    /// [`FootprintError::NoTime`] if `hi` is not above `lo`.
    pub fn record_last(&mut self, lo: u64, hi: u64) -> Result<(), FootprintError> {
        self.lasts.record(lo, hi)
    }

    /// Says that reuses after up to so many ticks may have gone unrecorded, as those between two scans do.
    pub fn set_unseen(&mut self, ticks: u64) {
        self.unseen = ticks;
    }

    /// How many pages were touched.
    #[must_use]
    pub fn pages(&self) -> PageCount {
        PageCount(self.firsts.count)
    }

    /// Averages over all windows of a time of `ticks`.
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
        let is_exact = gaps.iter().all(|gaps| gaps.censored == 0) && self.unseen == 0;
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
            unseen: self.unseen as f64,
            is_exact,
        })
    }

    /// Bytes of heap held now.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        [&self.firsts, &self.reuses, &self.lasts]
            .iter()
            .map(|gaps| gaps.memory_bytes())
            .sum()
    }
}

/// Lengths with their counts, in no order.
type Lengths = Vec<(f64, u64)>;

/// Gaps of one kind.
#[derive(Debug, Clone, Default)]
struct Gaps {
    /// Those known to the tick.
    known: Histogram,
    /// The shortest and the longest that the others can be.
    short: Histogram,
    long: Histogram,
    /// Twice the middle of each.
    twice_middle: Histogram,
    count: u64,
    censored: u64,
    /// Sum of how far the longest lies above the shortest.
    widths: f64,
}

impl Gaps {
    fn record(&mut self, lo: u64, hi: u64) -> Result<(), FootprintError> {
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

    fn shortest(&self) -> Lengths {
        let counts = self.known.counts().chain(self.short.counts());
        counts
            .map(|(length, count)| (length as f64, count))
            .collect()
    }

    fn longest(&self) -> Lengths {
        let counts = self.known.counts().chain(self.long.counts());
        counts
            .map(|(length, count)| (length as f64, count))
            .collect()
    }

    fn middle(&self) -> Lengths {
        let known = self.known.counts();
        let known = known.map(|(length, count)| (length as f64, count));
        let censored = self.twice_middle.counts();
        let censored = censored.map(|(twice, count)| (twice as f64 / 2.0, count));
        known.chain(censored).collect()
    }

    /// How far apart the bounds of a gap lie, on the average of those that are not known.
    fn mean_width(&self) -> f64 {
        self.widths / self.censored.max(1) as f64
    }

    fn memory_bytes(&self) -> usize {
        [&self.known, &self.short, &self.long, &self.twice_middle]
            .iter()
            .map(|histogram| histogram.memory_bytes())
            .sum()
    }
}

/// How many lengths lie above one, and what they sum to.
#[derive(Debug, Clone)]
struct Tail {
    /// Rising.
    lengths: Vec<f64>,
    /// Of the lengths from each index on, and 0 behind the last.
    counts: Vec<f64>,
    sums: Vec<f64>,
}

impl Tail {
    fn new(mut lengths: Lengths) -> Self {
        lengths.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let (mut counts, mut sums) = (vec![0.0], vec![0.0]);
        let (mut count, mut sum) = (0.0, 0.0);
        for &(length, times) in lengths.iter().rev() {
            count += times as f64;
            sum += length * times as f64;
            counts.push(count);
            sums.push(sum);
        }
        counts.reverse();
        sums.reverse();
        Self {
            lengths: lengths.into_iter().map(|(length, _)| length).collect(),
            counts,
            sums,
        }
    }

    /// Index of the first length above `length`.
    fn above(&self, length: f64) -> usize {
        self.lengths.partition_point(|&other| other <= length)
    }

    fn count_above(&self, length: f64) -> f64 {
        self.counts[self.above(length)]
    }

    /// Sum of how far lengths lie above `length`.
    fn excess(&self, length: f64) -> f64 {
        let index = self.above(length);
        self.sums[index] - length * self.counts[index]
    }

    /// How many lie above, on the average over lengths within half of `width`.
    fn mean_count_above(&self, length: f64, width: f64) -> f64 {
        if width == 0.0 {
            return self.count_above(length);
        }
        let from = (length - width / 2.0).max(0.0);
        let to = length + width / 2.0;
        (self.excess(from) - self.excess(to)) / (to - from)
    }
}

/// The average window for gaps of given lengths.
#[derive(Debug, Clone)]
struct Windows {
    gaps: Tail,
    pages: f64,
    ticks: f64,
}

impl Windows {
    /// Pages in the average window of so many ticks.
    fn pages_in(&self, window: f64) -> f64 {
        let window = window.clamp(0.0, self.ticks);
        let windows = self.ticks - window + 1.0;
        // Whole numbers while they are below 2^53, so that only the division rounds.
        let pages = (self.pages * windows - self.gaps.excess(window)) / windows;
        pages.max(0.0)
    }

    /// The longest window whose average has at most so many pages.
    fn window_of(&self, pages: f64) -> f64 {
        if pages >= self.pages_in(self.ticks) {
            return self.ticks;
        }
        // Of gaps all else being equal, the first whose window has more pages.
        let lengths = &self.gaps.lengths;
        let index = lengths.partition_point(|&length| self.pages_in(length) <= pages);
        let from = index.checked_sub(1).map_or(0.0, |before| lengths[before]);
        let to = lengths
            .get(index)
            .map_or(self.ticks, |&length| length.min(self.ticks));
        // Up to there, no gap ends: pages * windows is a straight line in the window.
        let missing = self.pages - pages;
        let slope = self.gaps.counts[index] - missing;
        let window = (self.gaps.sums[index] - missing * (self.ticks + 1.0)) / slope;
        if slope > 0.0 {
            window.clamp(from, to)
        } else {
            from
        }
    }
}

/// What the average window touches, by its length; and the curve that follows.
#[derive(Debug, Clone)]
pub struct AverageWindow {
    /// All gaps as short as they can be: the most pages.
    most: Windows,
    middle: Windows,
    /// All gaps as long as they can be: the least pages.
    least: Windows,
    /// Reuse times.
    shortest: Tail,
    middles: Tail,
    longest: Tail,
    /// Ages of pages at the end: longest, middle, shortest.
    lasts: [Tail; 3],
    /// Ticks that a reuse time is spread over: half of what it is known to.
    width: f64,
    unseen: f64,
    is_exact: bool,
}

/// At most so many points on a curve from censored times, and the logarithm's few.
const POINTS: u64 = 512;

impl AverageWindow {
    /// Pages touched by a window of so many ticks, on the average over all of them: fp.
    #[must_use]
    pub fn at(&self, window: f64) -> FootprintPoint {
        let pages = self.middle.pages_in(window);
        FootprintPoint {
            low: self.least.pages_in(window).min(pages),
            pages,
            high: self.most.pages_in(window).max(pages),
        }
    }

    /// The working set: pages touched in the last so many ticks before the end, \[Denning68\].
    #[must_use]
    pub fn working_set(&self, window: f64) -> FootprintPoint {
        let [low, pages, high] = [0, 1, 2].map(|bound| {
            let lasts: &Tail = &self.lasts[bound];
            self.middle.pages - lasts.count_above(window)
        });
        FootprintPoint { low, pages, high }
    }

    /// Returns the miss-ratio curve.
    ///
    /// With the number of `references` known, its unit is misses per reference. Without, it is misses per
    /// touch recorded: a page touched several times between two scans counts once, and the curve stands
    /// higher than that of the references.
    ///
    /// The band is that of the times' bounds. For times known to the tick it has no width.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] for fewer than one reference.
    pub fn curve(&self, references: Option<f64>) -> Result<MissRatioCurve, CurveError> {
        let touches = self.middle.pages + self.middles.counts[0];
        let references = references.unwrap_or(touches);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of references; one beyond 2^64 is as good as 2^64"
        )]
        let whole = references.round() as u64;
        if whole == 0 {
            return Err(CurveError::Empty);
        }
        let ratio = |reuses: f64| ((self.middle.pages + reuses) / references).min(1.0);
        if self.is_exact {
            return self.exact_steps(ratio).into_curve(whole);
        }
        MissRatioCurve::new(self.bounded_points(ratio), whole)
    }

    fn exact_steps(&self, ratio: impl Fn(f64) -> f64) -> Steps {
        let mut steps = Steps::new();
        for (&time, &longer) in self.longest.lengths.iter().zip(&self.longest.counts[1..]) {
            let size = whole_pages(self.middle.pages_in(time));
            steps.down_to(size, ratio(longer), 0.0);
        }
        steps.flat_to(whole_pages(self.middle.pages));
        steps
    }

    fn bounded_points(&self, ratio: impl Fn(f64) -> f64) -> Vec<CurvePoint> {
        let pages = whole_pages(self.middle.pages);
        let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
        let sizes = sizes_below(pages);
        let mut before = 1.0;
        for (&size, next) in sizes.iter().zip(sizes.iter().skip(1).chain([&pages])) {
            let shortest_window = self.most.window_of(size as f64);
            let high = if shortest_window < self.unseen {
                1.0
            } else {
                ratio(self.longest.count_above(shortest_window))
            };
            let longest_window = self.least.window_of((next - 1) as f64);
            let low = ratio(self.shortest.count_above(longest_window)).min(high);
            let window = self.middle.window_of(size as f64);
            let share = ratio(self.middles.mean_count_above(window, self.width));
            before = share.clamp(low, high).min(before);
            points.push(CurvePoint {
                size: PageCount(size),
                miss_ratio: before,
                low,
                high,
            });
        }
        // Where everything fits, only first touches miss.
        points.push(CurvePoint::exact(PageCount(pages), ratio(0.0).min(before)));
        points
    }
}

/// Sizes from 1 on below `pages`, rising: powers of two, and from [`POINTS`] evenly spaced ones on those.
fn sizes_below(pages: u64) -> Vec<u64> {
    let step = pages.div_ceil(POINTS).max(1);
    let powers = (0..u64::BITS)
        .map(|bit| 1 << bit)
        .take_while(|&size| size < step);
    let even = (1..).map(|nth| nth * step).take_while(|&size| size < pages);
    powers.chain(even).filter(|&size| size < pages).collect()
}

/// The footprint of scans: at the end of every interval, which pages were touched during it.
///
/// ```
/// use plimsoll_estimator::ScanFootprint;
/// use plimsoll_flow::PageNumber;
///
/// let mut scans = ScanFootprint::new(None)?;
/// for interval in 0..10 {
///     scans.scan(&[PageNumber(0), PageNumber(1 + interval % 2)]);
/// }
/// assert_eq!(scans.average()?.at(scans.ticks(1)).pages, 2.0);
/// assert_eq!(scans.average()?.at(scans.ticks(2)).pages, 3.0);
/// # Ok::<(), plimsoll_estimator::FootprintError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ScanFootprint {
    /// Without the last gaps, which every scan changes.
    footprint: Footprint,
    /// Scan that saw the page last, from 1.
    last_scan: PageMap<u64>,
    scans: u64,
    ticks_per_interval: u64,
    references_per_interval: Option<f64>,
}

/// Ticks of an interval whose references nobody knows, and the most of one.
const TICKS: u64 = 1 << 10;

impl ScanFootprint {
    /// Returns a footprint before the first scan. Where the caller knows how many references an
    /// interval has on the average, the curve is per reference, else per touch seen.
    ///
    /// # Errors
    ///
    /// [`FootprintError::NoRate`] if that is not a number of at least 1.
    pub fn new(references_per_interval: Option<f64>) -> Result<Self, FootprintError> {
        let ticks_per_interval = match references_per_interval {
            None => TICKS,
            Some(references) if references >= 1.0 && references.is_finite() => {
                // A reference a tick at most, so that a scan of every reference knows times to the tick.
                let ticks = references.min(TICKS as f64).round();
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "1 to TICKS"
                )]
                let ticks = ticks as u64;
                ticks
            }
            Some(references) => return Err(FootprintError::NoRate { references }),
        };
        let mut footprint = Footprint::new();
        footprint.set_unseen(ticks_per_interval - 1);
        Ok(Self {
            footprint,
            last_scan: page_map(),
            scans: 0,
            ticks_per_interval,
            references_per_interval,
        })
    }

    /// Takes in the pages touched since the last scan, in any order. One named twice counts once.
    pub fn scan(&mut self, touched: &[PageNumber]) {
        self.take_in(touched.iter().copied());
    }

    /// Takes in the pages touched since the last scan: page `64 * i + b` if bit `b` of word `i` is set.
    pub fn scan_bits(&mut self, touched: &[u64]) {
        let pages = (0_u64..)
            .step_by(64)
            .zip(touched)
            .flat_map(|(base, &word)| {
                let bits = (0..64).filter(move |bit| word >> bit & 1 == 1);
                bits.map(move |bit| PageNumber(base + bit))
            });
        self.take_in(pages);
    }

    fn take_in(&mut self, touched: impl Iterator<Item = PageNumber>) {
        self.scans += 1;
        let (now, ticks) = (self.scans, self.ticks_per_interval);
        for page in touched {
            let recorded = match self.last_scan.insert(page, now) {
                None => self.footprint.record_first((now - 1) * ticks, now * ticks),
                Some(before) if before == now => Ok(()),
                Some(before) => {
                    let gap = now - before;
                    let longest = (gap + 1) * ticks - 1;
                    self.footprint.record((gap - 1) * ticks, longest)
                }
            };
            recorded.expect("a gap has a tick");
        }
    }

    /// How many scans were taken in.
    #[must_use]
    pub fn scans(&self) -> u64 {
        self.scans
    }

    /// Ticks of so many intervals: the unit in which [`AverageWindow`] takes windows.
    #[must_use]
    pub fn ticks(&self, intervals: u64) -> f64 {
        intervals as f64 * self.ticks_per_interval as f64
    }

    /// Averages over all windows of the scans so far.
    ///
    /// # Errors
    ///
    /// [`FootprintError::Empty`] before a scan that saw a page.
    pub fn average(&self) -> Result<AverageWindow, FootprintError> {
        let mut footprint = self.footprint.clone();
        let ticks = self.ticks_per_interval;
        for &scan in self.last_scan.values() {
            let since = self.scans - scan;
            footprint.record_last(since * ticks, (since + 1) * ticks)?;
        }
        footprint.over(self.scans * ticks)
    }

    /// Returns the miss-ratio curve: per reference if their number is known, else per touch seen.
    ///
    /// Sizes below what one interval touches are not told apart: the band reaches up to 1 there.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] before a scan that saw a page.
    pub fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        let average = self.average().map_err(|_| CurveError::Empty)?;
        let references = self.references_per_interval;
        average.curve(references.map(|references| references * self.scans as f64))
    }

    /// Bytes of heap held now.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.footprint.memory_bytes() + map_bytes(&self.last_scan)
    }
}

/// The average footprint of a whole stream, every reuse time known.
///
/// The miss ratio is the model's; the band holds that of a small exact sample of the pages as
/// well (`witness`), so that it tells where the model is wrong.
#[derive(Debug, Clone)]
pub struct AverageFootprint {
    /// Without the last gaps, which every reference changes.
    footprint: Footprint,
    last_use: LastUse,
    references: u64,
    /// Reuse times of the references at hand; only room to work in.
    piece: Vec<u32>,
    witness: Witness,
}

/// References looked up at once, so that their reuse times stay in a core's first-level cache.
const PIECE: usize = 4096;

/// Which pages the witness follows: any number does.
const WITNESS_SEED: u64 = 0x666f_6f74;

impl AverageFootprint {
    /// Returns an estimator that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self {
            footprint: Footprint::new(),
            last_use: LastUse::new(),
            references: 0,
            piece: Vec::new(),
            witness: Witness::new(WITNESS_SEED),
        }
    }

    /// Averages over all windows of the stream so far; a tick is a reference.
    ///
    /// # Errors
    ///
    /// [`FootprintError::Empty`] if there was none.
    pub fn average(&self) -> Result<AverageWindow, FootprintError> {
        let mut footprint = self.footprint.clone();
        footprint.reuses.known.settle();
        for moment in self.last_use.moments() {
            let since = self.references - 1 - moment;
            footprint.record_last(since, since + 1)?;
        }
        footprint.over(self.references)
    }
}

impl Default for AverageFootprint {
    fn default() -> Self {
        Self::new()
    }
}

impl Estimator for AverageFootprint {
    fn observe(&mut self, batch: &ReferenceBatch) {
        let Footprint { firsts, reuses, .. } = &mut self.footprint;
        for pages in batch.pages().chunks(PIECE) {
            let others = |now, time: Option<u64>| match time {
                Some(time) => reuses.known.record(time),
                None => {
                    firsts.known.record(now + 1);
                    firsts.count += 1;
                }
            };
            self.last_use
                .reuse_times(pages, self.references, &mut self.piece, others);
            reuses.known.record_batch(&self.piece);
            self.references += pages.len() as u64;
        }
        reuses.count = self.references - firsts.count;
        self.witness.observe(batch);
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let average = self.average().map_err(|_| CurveError::Empty)?;
        let certain = Certain {
            first_references: self.footprint.pages().0,
            references: self.references,
        };
        certain.narrow(&self.witness.widen(&average.curve(None)?)?)
    }

    fn memory_bytes(&self) -> usize {
        self.footprint.memory_bytes()
            + self.last_use.memory_bytes()
            + self.piece.capacity() * size_of::<u32>()
            + self.witness.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aet::Aet;
    use crate::lru::ExactLru;
    use crate::naive;
    use crate::streams::{batch_of, curve_of, cycle, uniform, zipf};
    use proptest::prelude::*;

    fn averaged(pages: &[u64]) -> AverageFootprint {
        let mut average = AverageFootprint::new();
        average.observe(&batch_of(pages.iter().copied()));
        average
    }

    /// The model's curve, without a witness.
    fn model(pages: &[u64]) -> MissRatioCurve {
        averaged(pages).average().unwrap().curve(None).unwrap()
    }

    /// Scans after every `interval` references; a last interval that is not whole is left out.
    fn scanned(pages: &[u64], interval: usize, rate: Option<f64>) -> ScanFootprint {
        let mut scans = ScanFootprint::new(rate).unwrap();
        for pages in pages.chunks_exact(interval) {
            let touched: Vec<_> = pages.iter().copied().map(PageNumber).collect();
            scans.scan(&touched);
        }
        scans
    }

    fn error(found: &MissRatioCurve, exact: &MissRatioCurve, from: u64, to: u64) -> f64 {
        let sizes = (0..200).map(|step| PageCount(from + (to - from) * step / 200));
        let distance = found.distance(exact, sizes).unwrap();
        distance.mean_absolute_error
    }

    /// The curve by its words: of the windows with at most `size` pages the longest, and what is not used within it.
    fn naive_miss_ratio(pages: &[u64], size: u64) -> f64 {
        let fits = |&window: &usize| {
            let (sum, windows) = naive::window_pages(pages, window);
            sum as u64 <= size * windows as u64
        };
        let window = (0..=pages.len()).rev().find(fits).unwrap();
        let misses = (0..pages.len()).filter(|&now| {
            let from = now.saturating_sub(window);
            !pages[from..now].contains(&pages[now])
        });
        misses.count() as f64 / pages.len() as f64
    }

    #[test]
    fn a_loop_fits_at_its_size_and_not_a_page_below() {
        for pages in [1, 2, 100, 2_000, 5_003] {
            let stream: Vec<_> = cycle(pages).take(20 * pages as usize).collect();
            let curve = model(&stream);
            assert_eq!(curve.miss_ratio(PageCount(pages - 1)), 1.0);
            assert_eq!(curve.miss_ratio(PageCount(pages)), 0.05);
        }
    }

    #[test]
    fn streams_that_mix_are_right_to_a_hundredth_and_as_good_as_aet() {
        for seed in 0..5 {
            let streams: [Vec<u64>; 3] = [
                uniform(10_000, seed).take(300_000).collect(),
                zipf(10_000, 1.0, seed).take(300_000).collect(),
                zipf(20_000, 0.7, seed).take(200_000).collect(),
            ];
            for pages in streams {
                let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
                let aet = curve_of(&mut Aet::new(), pages.iter().copied());
                let found = error(&model(&pages), &exact, 0, 20_000);
                let aet = error(&aet, &exact, 0, 20_000);
                assert!(found <= 0.01, "seed {seed}: {found}");
                assert!(found <= aet + 0.002, "seed {seed}: {found} {aet}");
            }
        }
    }

    #[test]
    fn the_band_of_scans_holds_the_exact_curve() {
        for seed in 0..5 {
            let (mut held, mut all) = (0, 0);
            let streams: [(u64, Vec<u64>); 2] = [
                (10_000, uniform(10_000, seed).take(300_000).collect()),
                (10_000, zipf(10_000, 0.9, seed).take(300_000).collect()),
            ];
            for (footprint, pages) in streams {
                let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
                for interval in [30, 100, 300, 1_000] {
                    let curve = scanned(&pages, interval, Some(interval as f64))
                        .curve()
                        .unwrap();
                    let mut here = 0;
                    for size in (0..240).map(|step| PageCount(step * footprint / 200)) {
                        let (point, truth) = (curve.at(size), exact.miss_ratio(size));
                        here += i32::from(point.low <= truth && truth <= point.high);
                    }
                    let seen = interval as u64;
                    let error = error(&curve, &exact, seen, footprint);
                    assert!(error <= 0.02, "seed {seed} interval {interval}: {error}");
                    held += here;
                    all += 240;
                }
            }
            let share = f64::from(held) / f64::from(all);
            assert!(share >= 0.95, "seed {seed}: {share}");
        }
    }

    #[test]
    fn a_scan_of_a_loop_knows_the_cliff_to_three_intervals() {
        let pages: Vec<_> = cycle(1_000).take(50_000).collect();
        // One interval that divides the loop, and one that does not.
        for interval in [100, 90] {
            let curve = scanned(&pages, interval, Some(interval as f64))
                .curve()
                .unwrap();
            let slack = 3 * interval as u64;
            assert!(curve.at(PageCount(1_000 - slack)).low > 0.9);
            assert!(curve.at(PageCount(1_000)).low <= 0.021);
            assert!((curve.miss_ratio(PageCount(1_000)) - 0.02).abs() < 1e-3);
            assert!(curve.at(PageCount(999)).high > 0.9);
        }
    }

    #[test]
    fn without_the_rate_a_touch_seen_is_a_touch() {
        // Each page several times within an interval, then the next.
        let pages = (0..4_000_u64).map(|index| index / 4 % 50);
        let pages: Vec<_> = pages.collect();
        let known = scanned(&pages, 40, Some(40.0)).curve().unwrap();
        let unknown = scanned(&pages, 40, None).curve().unwrap();
        assert_eq!((known.references(), unknown.references()), (4_000, 1_000));
        for size in [10, 15, 20, 50] {
            let size = PageCount(size);
            assert!((unknown.miss_ratio(size) - 4.0 * known.miss_ratio(size)).abs() < 1e-9);
        }
    }

    #[test]
    fn bits_are_a_list_of_pages() {
        let (mut list, mut bits) = (
            ScanFootprint::new(None).unwrap(),
            ScanFootprint::new(None).unwrap(),
        );
        for touched in [&[0, 63, 64, 191][..], &[], &[64, 65], &[0, 65, 65]] {
            let pages: Vec<_> = touched.iter().copied().map(PageNumber).collect();
            let mut words = [0; 3];
            for page in touched {
                words[*page as usize / 64] |= 1 << (page % 64);
            }
            list.scan(&pages);
            bits.scan_bits(&words);
        }
        assert_eq!(list.scans(), 4);
        assert_eq!(list.curve(), bits.curve());
        let sets = [1, 2, 3].map(|n| list.average().unwrap().working_set(list.ticks(n)).low);
        // Whole intervals: what the last ones touched for certain.
        assert_eq!(sets, [2.0, 3.0, 3.0]);
    }

    #[test]
    fn what_makes_no_footprint_is_refused() {
        let mut footprint = Footprint::new();
        assert_eq!(footprint.over(5).unwrap_err(), FootprintError::Empty);
        let refused = FootprintError::NoTime { lo: 3, hi: 3 };
        assert_eq!(footprint.record(3, 3), Err(refused));
        footprint.record_first(0, u64::MAX).unwrap();
        let unpaired = FootprintError::Unpaired {
            firsts: 1,
            lasts: 0,
        };
        assert_eq!(footprint.over(5).unwrap_err(), unpaired);
        footprint.record_last(0, u64::MAX).unwrap();
        assert_eq!(footprint.over(0).unwrap_err(), FootprintError::Empty);
        let average = footprint.over(5).unwrap();
        for window in [-1.0, 0.0, 3.5, 5.0, 1e300, f64::INFINITY] {
            let point = average.at(window);
            assert!(0.0 <= point.low && point.high <= 1.0, "{window} {point:?}");
        }
        assert!(average.curve(None).is_ok());
        for rate in [0.0, 0.5, -3.0, f64::NAN, f64::INFINITY] {
            let refused = ScanFootprint::new(Some(rate)).err();
            assert!(
                matches!(refused, Some(FootprintError::NoRate { .. })),
                "{rate}"
            );
        }
        let mut scans = ScanFootprint::new(Some(1e18)).unwrap();
        assert_eq!(scans.curve(), Err(CurveError::Empty));
        scans.scan(&[]);
        assert_eq!(scans.curve(), Err(CurveError::Empty));
        scans.scan(&[PageNumber(u64::MAX)]);
        assert!(scans.curve().is_ok());
        assert_eq!(AverageFootprint::new().curve(), Err(CurveError::Empty));
    }

    #[test]
    fn streams_of_every_kind_make_a_curve_whatever_their_batches() {
        let up_and_down = (0..10).flat_map(|_| (0..700).chain((0..700).rev()));
        let phases = (0..6).flat_map(|phase| {
            uniform(500, phase)
                .take(3_000)
                .map(move |page| page << (10 * phase))
        });
        let streams: [Vec<u64>; 6] = [
            vec![0],
            vec![u64::MAX; 1_000],
            (0..5_000).map(|page| u64::MAX - page).collect(),
            up_and_down.collect(),
            phases.collect(),
            cycle(3_000).take(10_000).collect(),
        ];
        for pages in streams {
            let mut whole = averaged(&pages);
            let mut parts = AverageFootprint::new();
            for batch in pages.chunks(13) {
                parts.observe(&batch_of(batch.iter().copied()));
            }
            let curve = whole.curve().unwrap();
            assert_eq!(parts.curve().as_ref(), Ok(&curve));
            assert_eq!(curve.references(), pages.len() as u64);
            assert_eq!(curve.miss_ratio(PageCount(0)), 1.0);
            let distinct = whole.footprint.pages().0 as f64;
            assert_eq!(
                curve.miss_ratio(PageCount(u64::MAX)),
                distinct / pages.len() as f64
            );
        }
    }

    proptest! {
        #[test]
        fn every_window_agrees_with_counting_in_it(
            pages in prop_oneof![
                prop::collection::vec(0_u64..8, 1..60),
                prop::collection::vec(0_u64..80, 1..160),
            ],
        ) {
            let average = averaged(&pages).average().unwrap();
            for window in 0..=pages.len() {
                let (sum, windows) = naive::window_pages(&pages, window);
                let expected = sum as f64 / windows as f64;
                let point = average.at(window as f64);
                prop_assert_eq!([point.low, point.pages, point.high], [expected; 3]);
                let (last, _) = naive::window_pages(&pages[pages.len() - window..], window);
                prop_assert_eq!(average.working_set(window as f64).pages, last as f64);
            }
        }

        #[test]
        fn the_curve_agrees_with_its_words(
            pages in prop::collection::vec(0_u64..30, 1..120),
            size in 0_u64..40,
        ) {
            let found = model(&pages).miss_ratio(PageCount(size));
            let expected = naive_miss_ratio(&pages, size);
            prop_assert!((found - expected).abs() < 1e-12, "{} {}", found, expected);
        }

        #[test]
        fn scans_of_every_reference_are_the_stream(
            pages in prop::collection::vec(0_u64..30, 1..300),
        ) {
            let scans = scanned(&pages, 1, Some(1.0)).curve().unwrap();
            prop_assert_eq!(scans, model(&pages));
        }

        #[test]
        fn the_bounds_of_scans_hold_the_footprint_of_every_window(
            pages in prop::collection::vec(0_u64..40, 20..400),
            interval in 2_usize..12,
        ) {
            let whole = pages.len() / interval * interval;
            let truth = averaged(&pages[..whole]).average().unwrap();
            let average = scanned(&pages, interval, Some(interval as f64)).average().unwrap();
            for window in interval - 1..=whole {
                let (point, truth) = (average.at(window as f64), truth.at(window as f64).pages);
                prop_assert!(
                    point.low <= truth + 1e-9 && truth <= point.high + 1e-9,
                    "{} {:?} {}", window, point, truth
                );
            }
        }

        #[test]
        fn a_window_is_the_longest_with_so_many_pages(
            pages in prop::collection::vec(0_u64..30, 1..200),
            size in 0.0_f64..32.0,
        ) {
            let average = averaged(&pages).average().unwrap().middle;
            let window = average.window_of(size);
            prop_assert!(average.pages_in(window) <= size + 1e-9);
            if window < average.ticks {
                prop_assert!(average.pages_in(window + 1e-3) >= size - 1e-9);
            }
        }
    }
}
