//! Counter Stacks: the LRU curve from counts of distinct pages, by counters started at regular intervals.
//!
//! A counter of the distinct pages since time `s` rises exactly at the references to a page not used
//! since `s`; its count is then the size from which a memory hits everything used since `s`. Counters
//! with many starting times thus give the curve, without a table of pages (`ladder` has the argument and its
//! bounds). A counter is a `HyperLogLog` of 2^p bytes, whatever the number of pages.
//!
//! Additions to the paper:
//!
//! - **Only one counter is updated per reference.** Pages are added to the counter of the present interval only; at its end
//!   it is merged into the older ones, youngest first. Each includes everything that the next younger one has counted, so
//!   a page that does not change one changes none of the older ones, and few marks get far (`hyper_log_log`).
//! - **Old counters are counted rarely.** A counter of age `t` is counted every share `delta` of `t` (`ladder`).
//! - **Distances within the present interval are exact** (`interval`), because no counter starts there.
//!   Counters receive only the first references of an interval.
//! - **A [recorded stream](StreamWriter)** contains every count, from which the curve of any window can be computed.
//!
//! **Band.** The bounds of `ladder` hold for exact counts; both limits are accumulated beside the estimate. Counts have a
//! relative error, so the limits are widened by 2.5 standard errors of one counter in size, and by a little more in
//! number of misses (`sizes`), although errors of many counters partly cancel.
//!
//! Source: [Wires14] for the stack, its pruning, and the stream. Departs as stated above and in `ladder`.
//! Cost: O(1) per reference for the interval, at worst `1 / delta` marks at an interval's end; about
//! `log2(intervals * delta) / delta` counters of 2^p bytes.
//! Not here: I/O beyond `Write` and `Read`; sampling.

mod hyper_log_log;
mod interval;
mod ladder;
mod sizes;
mod stream;

pub use stream::{CounterStream, StreamError, StreamWindow, StreamWriter};

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber, Whole as _};

use crate::estimator::Estimator;
use crate::parts::hash::PageHash;
use crate::parts::sys::{Work, vectorised};
use hyper_log_log::{HyperLogLog, Mark, Marks, PRECISIONS};
use interval::Interval;
use ladder::{Cell, Ladder, SHARE_ONE};
use sizes::{CountError, Sizes};

/// Precision of the counters. The defaults suit streams of 10^5 references and more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CounterStacksOptions {
    /// Each counter has `2^precision` one-byte registers, and a standard error of `1.04 / 2^(precision / 2)`. 4 to 18.
    pub precision: u32,
    /// Distance between counter starts, in references; distances within an interval are exact. 1 to 2^20.
    pub interval: u32,
    /// A counter whose neighbours agree within this share is removed, and counters are
    /// counted every such share of their age. From 0.0, where all are kept and always counted, to 0.5.
    pub delta: f64,
    /// Seed of the hash that assigns pages to registers.
    pub seed: u64,
}

impl Default for CounterStacksOptions {
    fn default() -> Self {
        Self {
            precision: 13,
            interval: 4_096,
            delta: 0.05,
            seed: 0,
        }
    }
}

/// Why counters cannot be created with these options. Nothing was built.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CounterStacksError {
    /// The precision is out of range.
    #[error("the precision must be from 4 to 18; got {precision}")]
    Precision {
        /// The requested precision.
        precision: u32,
    },
    /// The interval is empty or too long.
    #[error("the interval must be from 1 to 2^20 references; got {interval}")]
    Interval {
        /// The requested interval, in references.
        interval: u64,
    },
    /// Delta is out of range.
    #[error("delta must be from 0 to 0.5; got {delta}")]
    Delta {
        /// The requested share.
        delta: f64,
    },
}

/// Longest interval, in references.
const INTERVAL_MAX: u32 = 1 << 20;

/// Largest delta, in 2^-24.
const DELTA_MAX: u32 = SHARE_ONE / 2;

impl CounterStacksOptions {
    /// Returns these options with another interval, in references.
    ///
    /// # Errors
    ///
    /// [`CounterStacksError::Interval`] for one beyond 32 bits.
    pub fn with_interval(self, interval: usize) -> Result<Self, CounterStacksError> {
        let refused = |_| CounterStacksError::Interval {
            interval: interval as u64,
        };
        let interval = u32::try_from(interval).map_err(refused)?;
        Ok(Self { interval, ..self })
    }

    /// Returns delta in 2^-24.
    fn check(&self) -> Result<u32, CounterStacksError> {
        let &Self {
            precision,
            interval,
            delta,
            ..
        } = self;
        if !PRECISIONS.contains(&precision) {
            return Err(CounterStacksError::Precision { precision });
        }
        if !(1..=INTERVAL_MAX).contains(&interval) {
            let interval = interval.into();
            return Err(CounterStacksError::Interval { interval });
        }
        if !(0.0..=0.5).contains(&delta) {
            return Err(CounterStacksError::Delta { delta });
        }
        Ok(u32::whole((delta * f64::from(SHARE_ONE)).round()))
    }
}

/// The LRU curve from a stack of counters of distinct pages.
///
/// ```
/// use plimsoll_estimator::{CounterStacks, CounterStacksOptions, Estimator};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let pages: Vec<_> = (0..10_000).cycle().take(400_000).map(PageNumber).collect();
/// let mut stacks = CounterStacks::new(CounterStacksOptions::default())?;
/// stacks.observe(&pages);
/// let curve = stacks.curve()?;
/// assert!(curve.miss_ratio(PageCount(5_000)) > 0.95);
/// assert!(curve.miss_ratio(PageCount(15_000)) < 0.03); // 1/40 is for first references
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CounterStacks {
    options: CounterStacksOptions,
    hash: PageHash,
    interval: Interval,
    /// Reuses within intervals, by distance.
    within: Vec<u64>,
    stack: Stack,
    references: u64,
}

/// The counters, and the results derived from them.
#[derive(Debug, Clone)]
struct Stack {
    ladder: Ladder<HyperLogLog>,
    /// Pending input of each level's counters.
    marks: Vec<Marks>,
    /// Marks being passed to older counters; empty between intervals.
    list: Vec<Mark>,
    sizes: Sizes,
}

/// Receiver of the events of a growing stack. The counts at an interval's end follow its
/// [`interval`](Recorder::interval), levels rising, younger counters first.
trait Recorder {
    /// A page was used again within the interval.
    fn reuse(&mut self, distance: u32);
    /// The interval ends; the stream with it, if it is `last`.
    fn interval(&mut self, references: u32, distinct: u32, last: bool);
    /// A counter rose by `amount`, which is close to that of the next younger one.
    fn rise(&mut self, amount: u64, younger: u64);
    /// The interval is complete.
    fn done(&mut self);
}

/// Ignores all events.
impl Recorder for () {
    fn reuse(&mut self, _distance: u32) {}
    fn interval(&mut self, _references: u32, _distinct: u32, _last: bool) {}
    fn rise(&mut self, _amount: u64, _younger: u64) {}
    fn done(&mut self) {}
}

impl CounterStacks {
    /// Creates counters with these `options`.
    ///
    /// # Errors
    ///
    /// [`CounterStacksError`] if an option is out of range.
    pub fn new(options: CounterStacksOptions) -> Result<Self, CounterStacksError> {
        let delta = options.check()?;
        let counter = HyperLogLog::new(options.precision);
        Ok(Self {
            options,
            hash: PageHash::seeded(options.seed),
            interval: Interval::new(options.interval, PageHash::salted().of(PageNumber(0))),
            within: vec![0; options.interval as usize],
            stack: Stack {
                ladder: Ladder::new(options.interval, delta, counter),
                marks: vec![Marks::new(options.precision)],
                list: Vec::new(),
                sizes: Sizes::default(),
            },
            references: 0,
        })
    }

    /// Present number of counters.
    pub fn counters(&self) -> usize {
        self.stack.ladder.counters().count()
    }

    fn observe_into(&mut self, pages: &[PageNumber], recorder: &mut impl Recorder) {
        let mut pages = pages;
        while !pages.is_empty() {
            let room = self.options.interval - self.interval.references();
            let (now, later) = pages.split_at(pages.len().min(room as usize));
            vectorised(Feed {
                pages: now,
                hash: self.hash,
                precision: self.options.precision,
                interval: &mut self.interval,
                within: &mut self.within,
                marks: &mut self.stack.marks[0],
                recorder,
            });
            self.references += now.len() as u64;
            if self.interval.references() == self.options.interval {
                self.end_interval(recorder);
            }
            pages = later;
        }
    }

    fn end_interval(&mut self, recorder: &mut impl Recorder) {
        recorder.interval(self.interval.references(), self.interval.distinct(), false);
        let due = self.stack.ladder.due();
        let distinct = u64::from(self.interval.distinct());
        self.stack.end(due, self.references, distinct, recorder);
        recorder.done();
        self.stack
            .turn(self.references, due, self.options.precision);
        self.interval.clear();
    }

    /// Returns the stack as if the stream ended here, for the curve.
    fn ended(&self, recorder: &mut impl Recorder) -> Stack {
        recorder.interval(self.interval.references(), self.interval.distinct(), true);
        let mut stack = self.stack.clone();
        let levels = stack.ladder.levels.len();
        let distinct = u64::from(self.interval.distinct());
        stack.end(levels - 1, self.references, distinct, recorder);
        recorder.done();
        stack
    }
}

/// Input of the present interval, which has room for it.
struct Feed<'a, R> {
    pages: &'a [PageNumber],
    hash: PageHash,
    precision: u32,
    interval: &'a mut Interval,
    within: &'a mut [u64],
    marks: &'a mut Marks,
    recorder: &'a mut R,
}

impl<R: Recorder> Work for Feed<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for &page in self.pages {
            let hash = self.hash.of(page);
            match self.interval.touch(page.0, hash) {
                Some(distance) => {
                    self.within[distance as usize] += 1;
                    self.recorder.reuse(distance);
                }
                None => self.marks.add(Mark::of(hash, self.precision)),
            }
        }
    }
}

impl Stack {
    /// Ends the intervals of all levels up to `due`.
    fn end(&mut self, due: usize, now: u64, distinct: u64, recorder: &mut impl Recorder) {
        for level in 0..=due {
            let list = &mut self.list;
            self.marks[level].list_into(list);
            self.marks[level].clear();
            if let Some(above) = self.marks.get_mut(level + 1) {
                list.iter().for_each(|&mark| above.add(mark));
            }
            let sizes = &mut self.sizes;
            let ended = self.ladder.end_stretch(
                level,
                now,
                distinct,
                |counter, younger| {
                    counter.sketch.absorb(list);
                    let count = if list.is_empty() {
                        counter.count
                    } else {
                        counter.sketch.count()
                    };
                    recorder.rise(count - counter.count, younger.amount());
                    Some(count)
                },
                &mut |cell| place(cell, sizes),
            );
            debug_assert!(
                ended.is_some(),
                "counts that are made here are never refused"
            );
        }
    }

    fn turn(&mut self, now: u64, due: usize, precision: u32) {
        self.ladder.turn(now, due, |spare| match spare {
            Some(mut counter) => {
                counter.clear();
                counter
            }
            None => HyperLogLog::new(precision),
        });
        let levels = self.ladder.levels.len();
        self.marks.resize_with(levels, || Marks::new(precision));
    }
}

/// Number of points in time within an interval at which the counts are interpolated: enough for
/// small steps between them.
fn times_of(cell: &Cell) -> u64 {
    if cell.older.amount() * 16 <= cell.older.before {
        1
    } else {
        4
    }
}

/// Distributes a cell's references over the sizes from which they hit.
fn place(cell: &Cell, sizes: &mut Sizes) {
    let Cell { younger, older, .. } = cell;
    let mass = younger.amount() as f64 - older.amount() as f64;
    if mass == 0.0 {
        return;
    }
    let times = times_of(cell);
    for time in 0..times {
        let height =
            |rise: &ladder::Rise| rise.before + rise.amount() * (2 * time + 1) / (2 * times);
        // The number of pages in the interval itself is exact and may exceed an older counter's estimate.
        let high = height(older);
        let low = height(younger).min(high);
        sizes.between(low, high, mass / times as f64);
    }
    let early = younger.before + 1;
    sizes.bounds(early, older.after.max(early), mass);
}

impl Estimator for CounterStacks {
    fn observe(&mut self, pages: &[PageNumber]) {
        self.observe_into(pages, &mut ());
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let Stack {
            ladder, mut sizes, ..
        } = self.ended(&mut ());
        for (size, &reuses) in (1..).zip(&self.within) {
            if reuses > 0 {
                sizes.exactly(size, reuses as f64);
            }
        }
        let error = CountError::new(self.options.precision, ladder.distinct());
        sizes.curve(self.references, error)
    }

    fn memory_bytes(&self) -> usize {
        let ladder = &self.stack.ladder;
        let sketches = ladder.sketches().map(HyperLogLog::memory_bytes);
        let marks = self.stack.marks.iter().map(Marks::memory_bytes);
        self.interval.memory_bytes()
            + self.within.capacity() * size_of::<u64>()
            + self.stack.sizes.memory_bytes()
            + self.stack.list.capacity() * size_of::<Mark>()
            + self.stack.marks.capacity() * size_of::<Marks>()
            + sketches.sum::<usize>()
            + marks.sum::<usize>()
            + ladder.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::lru::ExactLru;
    use crate::parts::streams::{batch_of, curve_of, cycle, uniform, zipf};
    use plimsoll_flow::PageCount;
    use proptest::prelude::*;

    const PAGES: u64 = 50_000;
    const REFERENCES: usize = 1_000_000;
    const SEEDS: u64 = 5;

    fn options(interval: u32, delta: f64, seed: u64) -> CounterStacksOptions {
        CounterStacksOptions {
            interval,
            delta,
            seed,
            ..CounterStacksOptions::default()
        }
    }

    fn counted(options: CounterStacksOptions, pages: &[u64]) -> MissRatioCurve {
        let mut stacks = CounterStacks::new(options).unwrap();
        curve_of(&mut stacks, pages.iter().copied())
    }

    /// Results of five seeds, at evenly spaced sizes and at even ratios of sizes.
    struct Accuracy {
        mean_error: f64,
        max_error: f64,
        /// The minimum over the seeds.
        held: f64,
    }

    fn accuracy(pages: &[u64], of: impl Fn(u64) -> CounterStacksOptions) -> Accuracy {
        let mut lru = ExactLru::new();
        let exact = curve_of(&mut lru, pages.iter().copied());
        let largest = lru.distinct() as f64 * 1.2;
        let even = (1..=600).map(|step| largest * f64::from(step) / 600.0);
        let ratios = (0..300).map(|step| largest.powf(f64::from(step) / 300.0));
        let even: Vec<_> = even.map(|size| PageCount(size as u64)).collect();
        let all: Vec<_> = ratios
            .map(|size| PageCount(size as u64))
            .chain(even.clone())
            .collect();
        let mut found = Accuracy {
            mean_error: 0.0,
            max_error: 0.0,
            held: 1.0,
        };
        for seed in 0..SEEDS {
            let curve = counted(of(seed), pages);
            let distance = curve.distance(&exact, even.iter().copied()).unwrap();
            found.mean_error += distance.mean_absolute_error / SEEDS as f64;
            let distance = curve.distance(&exact, all.iter().copied()).unwrap();
            found.max_error = found.max_error.max(distance.max_absolute_error);
            let holds = |&&size: &&PageCount| {
                let (point, truth) = (curve.at(size), exact.miss_ratio(size));
                (point.low - 1e-9..=point.high + 1e-9).contains(&truth)
            };
            let held = all.iter().filter(holds).count() as f64 / all.len() as f64;
            found.held = found.held.min(held);
        }
        found
    }

    fn streams() -> Vec<(&'static str, Vec<u64>, f64, f64)> {
        let uniform_of = |first: u64, pages, seed| uniform(pages, seed).map(move |p| first + p);
        let hot = uniform_of(0, PAGES / 10, 1).zip(uniform_of(PAGES, PAGES, 2));
        let two_classes = hot.flat_map(|(hot, cold)| [hot, cold]);
        let saw = |at: u64| (at % (2 * PAGES)).abs_diff(PAGES);
        let flips = |at: u64| match at / 100_000 % 3 {
            0 => at % 5_000,
            1 => u64::MAX - at * 7 % 20_000,
            _ => at / 3 % 500,
        };
        let streams: [(_, Box<dyn Iterator<Item = u64>>, _, _); 9] = [
            ("even", Box::new(uniform(PAGES, 1)), 0.01, 0.03),
            ("Zipf 0.6", Box::new(zipf(PAGES, 0.6, 1)), 0.01, 0.03),
            ("Zipf 0.8", Box::new(zipf(PAGES, 0.8, 1)), 0.01, 0.03),
            ("Zipf 1.0", Box::new(zipf(PAGES, 1.0, 1)), 0.01, 0.03),
            ("Zipf 1.2", Box::new(zipf(PAGES, 1.2, 1)), 0.01, 0.03),
            ("two classes", Box::new(two_classes), 0.01, 0.05),
            // The steepness of a cliff is limited by the distance between counters.
            ("loop", Box::new(cycle(PAGES)), 0.05, 1.0),
            ("saw", Box::new((0..).map(saw)), 0.03, 0.05),
            ("flips", Box::new((0..).map(flips)), 0.05, 1.0),
        ];
        let taken = streams.map(|(name, pages, mean, max)| {
            let pages = pages.take(REFERENCES).collect();
            (name, pages, mean, max)
        });
        taken.into()
    }

    #[test]
    fn curves_are_right_to_a_percent_and_bands_hold_the_truth() {
        for (name, pages, mean, max) in streams() {
            let found = accuracy(&pages, |seed| options(4_096, 0.05, seed));
            assert!(found.mean_error <= mean, "{name}: {}", found.mean_error);
            assert!(found.max_error <= max, "{name}: {}", found.max_error);
            assert!(found.held >= 0.95, "{name}: {}", found.held);
        }
    }

    #[test]
    fn bands_hold_the_truth_however_coarse_the_counters() {
        for (name, pages, ..) in streams() {
            for (precision, interval, delta) in [(10, 1_000, 0.3), (12, 30_000, 0.1)] {
                let found = accuracy(&pages[..300_000], |seed| CounterStacksOptions {
                    precision,
                    ..options(interval, delta, seed)
                });
                assert!(found.held >= 0.90, "{name} {precision}: {}", found.held);
            }
        }
    }

    #[test]
    fn a_stream_within_one_interval_is_exact() {
        let streams: [Vec<u64>; 6] = [
            vec![7],
            vec![0; 1_000],
            (0..4_000).map(|at| u64::MAX - at % 3).collect(),
            (0..4_096).collect(),
            (0..4_000).map(|at: u64| (at % 200).abs_diff(100)).collect(),
            zipf(1_000, 0.8, 1).take(3_000).collect(),
        ];
        for pages in streams {
            let curve = counted(CounterStacksOptions::default(), &pages);
            let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
            assert_eq!(curve.references(), exact.references());
            for size in (0..4_200).map(PageCount) {
                let difference = curve.miss_ratio(size) - exact.miss_ratio(size);
                assert!(difference.abs() < 1e-9, "{} at {size:?}", pages.len());
            }
        }
    }

    #[test]
    fn pages_never_used_again_miss_at_every_size() {
        let curve = counted(options(100, 0.05, 1), &(0..50_000).collect::<Vec<_>>());
        let last = curve.at(PageCount(u64::MAX));
        assert!(last.miss_ratio > 0.96, "{last:?}");
        assert_eq!(last.high, 1.0);
        assert_eq!(curve.references(), 50_000);
    }

    #[test]
    fn one_page_alone_always_hits() {
        let curve = counted(options(100, 0.05, 1), &[u64::MAX; 50_000]);
        assert!((curve.miss_ratio(PageCount(1)) - 1.0 / 50_000.0).abs() < 1e-9);
    }

    #[test]
    fn without_references_there_is_no_curve() {
        let mut stacks = CounterStacks::new(CounterStacksOptions::default()).unwrap();
        assert_eq!(stacks.curve(), Err(CurveError::Empty));
        stacks.observe(&[]);
        assert_eq!(stacks.curve(), Err(CurveError::Empty));
    }

    #[test]
    fn options_that_there_are_not_are_refused() {
        let refused = |options| CounterStacks::new(options).unwrap_err();
        for precision in [0, 3, 19, u32::MAX] {
            let options = CounterStacksOptions {
                precision,
                ..CounterStacksOptions::default()
            };
            assert_eq!(
                refused(options),
                CounterStacksError::Precision { precision }
            );
        }
        for interval in [0, INTERVAL_MAX + 1, u32::MAX] {
            let error = refused(options(interval, 0.1, 0));
            let interval = interval.into();
            assert_eq!(error, CounterStacksError::Interval { interval });
        }
        for delta in [-0.1, 0.51, f64::NAN, f64::INFINITY] {
            let error = refused(options(100, delta, 0));
            assert!(matches!(error, CounterStacksError::Delta { .. }));
        }
        for (interval, delta) in [(1, 0.0), (INTERVAL_MAX, 0.5), (1, 1e-9)] {
            assert!(CounterStacks::new(options(interval, delta, 0)).is_ok());
        }
    }

    #[test]
    fn memory_grows_with_the_counters_and_they_with_the_logarithm() {
        let mut stacks = CounterStacks::new(options(256, 0.1, 0)).unwrap();
        let held = [1, 1, 2, 4, 8].map(|times| {
            stacks.observe(&batch_of(
                uniform(1 << 40, times).take(100_000 * times as usize),
            ));
            (stacks.counters(), stacks.memory_bytes())
        });
        for (counters, bytes) in held {
            assert!(bytes >= counters << 13);
            assert!(bytes <= (counters << 14) + (3 << 20), "{held:?}");
        }
        assert!(held[4].0 < held[0].0 * 2, "{held:?}");
    }

    #[test]
    fn asking_for_a_curve_changes_nothing() {
        let pages: Vec<_> = zipf(3_000, 0.9, 1).take(50_000).collect();
        let mut asked = CounterStacks::new(options(100, 0.1, 1)).unwrap();
        for pages in pages.chunks(777) {
            asked.observe(&batch_of(pages.iter().copied()));
            asked.curve().unwrap();
        }
        assert_eq!(
            asked.curve().unwrap(),
            counted(options(100, 0.1, 1), &pages)
        );
    }

    proptest! {
        #[test]
        fn any_stream_makes_a_curve_whatever_the_batches(
            pages in prop::collection::vec(prop_oneof![0_u64..300, any::<u64>()], 1..3_000),
            cut in any::<prop::sample::Index>(),
            interval in 1_u32..500,
            delta in prop_oneof![Just(0.0), 0.01_f64..=0.5],
            precision in 4_u32..=8,
            seed in any::<u64>(),
        ) {
            let options = CounterStacksOptions { precision, interval, delta, seed };
            let (head, tail) = pages.split_at(cut.index(pages.len()));
            let mut stacks = CounterStacks::new(options).unwrap();
            stacks.observe(&batch_of(head.iter().copied()));
            stacks.observe(&batch_of(tail.iter().copied()));
            prop_assert_eq!(stacks.curve(), Ok(counted(options, &pages)));
        }
    }
}
