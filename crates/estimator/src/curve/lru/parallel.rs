//! Exact LRU for recorded streams, on several processors.
//!
//! The stream is processed in waves. **Two threads** relay blocks of a wave: one looks up the pages' last uses, the other
//! counts in the bit vector of times (`access_tree`) how many last uses follow each. These take about equally long, and
//! neither repeats or redistributes any work of one thread. Counting the distances is done by whichever thread is ahead.
//!
//! The work of **more threads** is split in two ways, so that every step is parallel:
//!
//! 1. **By page**: the last use of each reference's page. Pages are split among tables, each of which processes
//!    all references to its pages, in order. Times are positions in the whole stream.
//! 2. **By time**: the number of last uses after that one. The wave is cut into
//!    segments. The bit vector of times (`access_tree`) at the start of a segment follows from the results
//!    of step 1 without counting: all earlier times are set, and the last uses before them are cleared. This takes one bit
//!    operation for each reference; each segment then counts in a vector of its own.
//!
//! When the vector is used up, the valid times are renumbered, each thread a part of them.
//!
//! Each thread thus does a share of the work of [`ExactLru`](crate::ExactLru), and only the counts by distance
//! have to be merged. In [Niu12] (PARDA) a segment finds the distances that lie within it, and
//! all first references of a segment are then looked up sequentially in the stack of those before: at a million pages,
//! a quarter of four million references. [Bender23] also splits by time, and sorts.
//!
//! Limits: the tables, as in `lru`. With three threads or more, distributing the pages and returning the results costs 5 to 10 ns per reference:
//! little where the tables wait for memory, a quarter more where they do not (Zipf-distributed pages). A later segment
//! has more bits to set than an earlier one (at an eighth of the cost of counting them), and is shorter for that
//! reason; beyond 8 threads this step gains no more.
//!
//! Source: ours; [Olken81] for counting last uses.
//! Cost: as `lru` per reference. Additional memory: 16 bytes for each reference of a wave with two threads, 28 with more,
//! 8 or 15 MB per thread; counts by distance for each thread (8 bytes per page), and with more than two
//! a vector of times (up to 0.6 bytes per page).
//! Not here: reading the stream.

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, TryRecvError};

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber, Whole as _};

use crate::curve::lru::{BLOCK, Distances, times_for};
use crate::estimator::Estimator;
use crate::parts::access_tree::AccessTree;
use crate::parts::hash::PageHash;
use crate::parts::last_use::{LastUse, NEVER};

/// Maximum number of threads; more do not help.
const THREADS_MAX: usize = 256;

/// Default number of references in a wave for each thread.
const SEGMENT_REFERENCES: usize = 1 << 19;

/// Number of references that two threads pass on at once: enough that a thread is rarely woken for the next.
const RELAYED: usize = 2 * BLOCK;

/// Tables per thread if there are more than two, so that threads finish at about the same time.
const TABLES_PER_THREAD: usize = 4;

/// Each segment of a wave is shorter than the one before by one part in this number.
const SHORTER: usize = 8;

/// The exact miss-ratio curve of an LRU memory, as from [`ExactLru`](crate::ExactLru), computed by several threads.
///
/// References are stored until there are enough for all threads, about half a million for
/// each. [`observe`](Estimator::observe) then returns after they have been processed.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use plimsoll_estimator::{Estimator, ParallelLru};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let pages: Vec<_> = (0..4).cycle().take(400).map(PageNumber).collect();
/// let mut lru = ParallelLru::new(NonZeroUsize::MIN.saturating_add(1));
/// lru.observe(&pages);
/// let curve = lru.curve()?;
/// assert_eq!(curve.miss_ratio(PageCount(3)), 1.0);
/// assert_eq!(curve.miss_ratio(PageCount(4)), 0.01); // 4 first references of 400
/// # Ok::<(), plimsoll_flow::CurveError>(())
/// ```
#[derive(Debug)]
pub struct ParallelLru {
    waves: Waves<Distances>,
}

impl ParallelLru {
    /// Returns an empty estimator that uses this many threads, at most 256, including the caller's.
    pub fn new(threads: NonZeroUsize) -> Self {
        Self {
            waves: Waves::new(threads.get().min(THREADS_MAX), SEGMENT_REFERENCES),
        }
    }

    /// Number of distinct pages referenced.
    pub fn distinct(&mut self) -> u64 {
        self.waves.finish(|_| {});
        self.waves.row.marked() as u64
    }
}

impl Estimator for ParallelLru {
    fn observe(&mut self, pages: &[PageNumber]) {
        self.waves.observe(pages, |_| {});
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        self.waves.finish(|_| {});
        let mut all = Distances::default();
        for segment in &self.waves.segments {
            all.add(&segment.sink);
        }
        all.curve()
    }

    fn memory_bytes(&self) -> usize {
        let segments = self.waves.segments.iter();
        self.waves.memory_bytes()
            + segments
                .map(|segment| segment.sink.memory_bytes())
                .sum::<usize>()
    }
}

/// Receiver of the distances of a segment.
trait Sink: Default + Send + Sync {
    /// Receives distances of consecutive references, the first of which is at this position of the wave; [`NEVER`] for a
    /// first reference.
    fn take(&mut self, position: usize, distances: &[u32]);
}

impl Sink for Distances {
    fn take(&mut self, _: usize, distances: &[u32]) {
        self.count(distances);
    }
}

/// A stream being processed, wave by wave.
#[derive(Debug)]
struct Waves<S> {
    /// Number of references in a wave.
    wave: usize,
    pending: Vec<PageNumber>,
    /// Assigns pages to tables.
    hash: PageHash,
    /// One for up to two threads, else a power of two.
    tables: Vec<LastUse>,
    /// State at the start of the next wave.
    row: AccessTree,
    /// For each reference of a wave the time of its page's previous use, or [`NEVER`].
    before: Vec<AtomicU32>,
    /// Blocks of a wave that two threads relay.
    blocks: Vec<Block>,
    /// One for each thread.
    segments: Vec<Segment<S>>,
}

/// State of a thread that persists between waves.
#[derive(Debug)]
struct Segment<S> {
    row: AccessTree,
    sink: S,
    /// References of a part of the wave, by table.
    shares: Vec<Vec<Reference>>,
    // Work buffers.
    before: Vec<u32>,
    distances: Vec<u32>,
}

/// Results for some references of a wave.
#[derive(Debug, Default)]
struct Block {
    before: Vec<u32>,
    distances: Vec<u32>,
}

/// A block and the position in the wave at which it begins.
type Relayed<'wave> = (usize, &'wave mut Block);

/// A reference to be processed by a table.
#[derive(Debug, Clone, Copy)]
struct Reference {
    /// The page's number in the table.
    page: PageNumber,
    /// Position in the wave.
    place: u32,
}

impl<S: Sink> Waves<S> {
    fn new(threads: usize, segment_references: usize) -> Self {
        // Fewer than 2^24 in a wave, so that a vector of 2^32 times has room for many waves.
        let wave = threads.saturating_mul(segment_references).min(1 << 24);
        let tables = match threads {
            1 | 2 => 1,
            several => several.min(1 << 10).next_power_of_two() * TABLES_PER_THREAD,
        };
        let segment = || Segment {
            row: AccessTree::new(0, 0),
            sink: S::default(),
            shares: vec![Vec::new(); tables],
            before: Vec::new(),
            distances: Vec::new(),
        };
        Self {
            wave,
            hash: PageHash::salted(),
            pending: Vec::new(),
            tables: std::iter::repeat_with(LastUse::new).take(tables).collect(),
            row: AccessTree::new(0, 0),
            before: Vec::new(),
            blocks: Vec::new(),
            segments: std::iter::repeat_with(segment).take(threads).collect(),
        }
    }

    /// Processes references; after each wave `each` is called with all segments, in the order of the stream.
    fn observe(&mut self, mut pages: &[PageNumber], mut each: impl FnMut(&mut [Segment<S>])) {
        while !pages.is_empty() {
            let (now, later) = pages.split_at(pages.len().min(self.wave - self.pending.len()));
            self.pending.extend_from_slice(now);
            if self.pending.len() == self.wave {
                self.finish(&mut each);
            }
            pages = later;
        }
    }

    /// Processes the pending references.
    fn finish(&mut self, mut each: impl FnMut(&mut [Segment<S>])) {
        if self.pending.is_empty() {
            return;
        }
        if self.row.room() < self.pending.len() {
            self.number_anew();
        }
        match self.segments.len() {
            1 => self.touch(),
            2 => self.relay(),
            _ => {
                self.look_up();
                self.count();
            }
        }
        self.pending.clear();
        each(&mut self.segments);
    }

    /// Processes everything in one thread, without splitting.
    fn touch(&mut self) {
        let (table, segment) = (&mut self.tables[0], &mut self.segments[0]);
        for (position, pages) in in_blocks(&self.pending, BLOCK) {
            let now = u32::try_from(self.row.next()).expect("times are below 2^32");
            table.replace_batch(pages, now, &mut segment.before);
            self.row.replace(&segment.before, &mut segment.distances);
            segment.sink.take(position, &segment.distances);
        }
    }

    /// Processes everything in two threads: this one looks up, the other one counts. Distances are
    /// counted by the other thread while it has nothing else to do, and by both in the end.
    fn relay(&mut self) {
        let [mine, others] = &mut self.segments[..] else {
            panic!("two threads have two segments");
        };
        let (mine, others) = (&mut mine.sink, &mut others.sink);
        let (table, row) = (&mut self.tables[0], &mut self.row);
        let blocks = self.pending.len().div_ceil(RELAYED);
        if self.blocks.len() < blocks {
            self.blocks.resize_with(blocks, Block::default);
        }
        let start = row.next();
        let (looked_up, to_count) = mpsc::channel::<Relayed<'_>>();
        let (counted, finished) = mpsc::channel::<Relayed<'_>>();
        let finished = Mutex::new(finished);
        let finished = &finished;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while let Some((position, block)) = next_or_drain(&to_count, finished, others) {
                    row.replace(&block.before, &mut block.distances);
                    if counted.send((position, block)).is_err() {
                        break;
                    }
                }
                drop(counted);
                drain(finished, others);
            });
            let work = in_blocks(&self.pending, RELAYED).zip(&mut self.blocks);
            for ((position, pages), block) in work {
                let now = u32::try_from(start + position).expect("times are below 2^32");
                table.replace_batch(pages, now, &mut block.before);
                // It fails only if the other thread has panicked, as this one then does at the end of the scope.
                if looked_up.send((position, block)).is_err() {
                    break;
                }
            }
            drop(looked_up);
            drain(finished, mine);
        });
    }

    /// Fills `before`.
    fn look_up(&mut self) {
        let now = u32::try_from(self.row.next()).expect("times are below 2^32");
        let references = self.pending.len();
        if self.before.len() < references {
            self.before
                .resize_with(references, || AtomicU32::new(NEVER));
        }
        let length = references.div_ceil(self.segments.len());
        let parts = (0_u32..).step_by(length).zip(self.pending.chunks(length));
        let shared = self.segments.iter_mut().map(|segment| &mut segment.shares);
        let work: Vec<_> = shared.zip(parts).collect();
        let hash = self.hash;
        in_parallel(work, |(shares, (start, pages))| {
            share_out(shares, hash, start, pages);
        });

        let segments = &self.segments[..references.div_ceil(length)];
        let before = &self.before[..];
        let tables = Queue::new(self.tables.iter_mut().enumerate());
        in_parallel(vec![(); self.segments.len()], |()| {
            while let Some((index, table)) = tables.next() {
                for segment in segments {
                    look_up_share(table, &segment.shares[index], now, before);
                }
            }
        });
    }

    /// Passes the distances of the wave to the sinks.
    fn count(&mut self) {
        let starts = segment_starts(self.pending.len(), self.segments.len());
        let (row, before) = (&self.row, &self.before[..self.pending.len()]);
        let work: Vec<_> = self.segments.iter_mut().zip(starts.windows(2)).collect();
        in_parallel(work, |(segment, range)| {
            segment.count(row, before, range[0], range[1]);
        });
        let last = &mut self.segments.last_mut().expect("there is a thread").row;
        std::mem::swap(&mut self.row, last);
    }

    /// Renumbers the valid times from 0, in their order, and makes room for a wave.
    fn number_anew(&mut self) {
        let row = &self.row;
        // A single table in as many parts as there are threads.
        let parts = self.segments.len().div_ceil(self.tables.len());
        let tables = self.tables.iter_mut();
        let parts = Queue::new(tables.flat_map(|table| table.times_mut_in(parts)));
        in_parallel(vec![(); self.segments.len()], |()| {
            while let Some(times) = parts.next() {
                row.number(times);
            }
        });
        let pages = self.row.marked();
        self.row.reset(times_for(pages, self.pending.len()), pages);
    }

    /// Bytes of heap allocated now, excluding those of the sinks.
    fn memory_bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(LastUse::memory_bytes).sum();
        let segments: usize = self.segments.iter().map(Segment::memory_bytes).sum();
        let blocks = self.blocks.iter();
        let blocks = blocks.map(|block| block.before.capacity() + block.distances.capacity());
        let blocks =
            blocks.sum::<usize>() * size_of::<u32>() + self.blocks.capacity() * size_of::<Block>();
        self.pending.capacity() * size_of::<PageNumber>()
            + blocks
            + self.before.capacity() * size_of::<AtomicU32>()
            + self.tables.capacity() * size_of::<LastUse>()
            + self.segments.capacity() * size_of::<Segment<S>>()
            + self.row.memory_bytes()
            + tables
            + segments
    }
}

impl<S: Sink> Segment<S> {
    /// Computes the distances from `start` to `end` of a wave that starts with `row`.
    fn count(&mut self, row: &AccessTree, before: &[AtomicU32], start: usize, end: usize) {
        let earlier = &before[..start];
        self.row.copy_from(row);
        if !earlier.is_empty() {
            self.row.take(earlier.len());
            for before in earlier {
                let before = before.load(Ordering::Relaxed);
                if before != NEVER {
                    self.row.strike_uncounted(before);
                }
            }
            self.row.count_anew();
        }
        for (position, block) in in_blocks(&before[start..end], BLOCK) {
            self.before.clear();
            let before = block.iter().map(|before| before.load(Ordering::Relaxed));
            self.before.extend(before);
            self.row.replace(&self.before, &mut self.distances);
            self.sink.take(start + position, &self.distances);
        }
    }

    fn memory_bytes(&self) -> usize {
        let shares = self.shares.iter();
        shares
            .map(|share| share.capacity() * size_of::<Reference>())
            .sum::<usize>()
            + self.shares.capacity() * size_of::<Vec<Reference>>()
            + self.row.memory_bytes()
            + (self.before.capacity() + self.distances.capacity()) * size_of::<u32>()
    }
}

/// Blocks of so many items, with their positions.
fn in_blocks<T>(items: &[T], length: usize) -> impl Iterator<Item = (usize, &[T])> {
    (0..).step_by(length).zip(items.chunks(length))
}

/// The next block to be counted, `None` after the last. Until it comes, distances of finished ones are counted.
fn next_or_drain<'wave>(
    blocks: &Receiver<Relayed<'wave>>,
    finished: &Mutex<Receiver<Relayed<'wave>>>,
    sink: &mut impl Sink,
) -> Option<Relayed<'wave>> {
    loop {
        match blocks.try_recv() {
            Ok(block) => return Some(block),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => {}
        }
        // The other thread waits for finished blocks only when it has no others.
        let done = finished.try_lock().ok();
        let Some((position, block)) = done.and_then(|finished| finished.try_recv().ok()) else {
            return blocks.recv().ok();
        };
        sink.take(position, &block.distances);
    }
}

/// Counts the distances of finished blocks until there will be no more.
fn drain(finished: &Mutex<Receiver<Relayed<'_>>>, sink: &mut impl Sink) {
    loop {
        let next = finished.lock().expect("no thread panics here").recv();
        let Ok((position, block)) = next else { return };
        sink.take(position, &block.distances);
    }
}

/// Distributes a part of a wave, which begins at its reference `start`, over the tables.
///
/// Page numbers are grouped in runs as long as there are tables; every table gets one page of each run, and
/// identifies it by the run's number. Dense pages are therefore dense in each table, and
/// a hash determines which page of a run a table gets, so that strides do not overload any table.
fn share_out(shares: &mut [Vec<Reference>], hash: PageHash, start: u32, pages: &[PageNumber]) {
    let (bits, mask) = (shares.len().ilog2(), shares.len() as u64 - 1);
    shares.iter_mut().for_each(Vec::clear);
    for (place, &PageNumber(page)) in (start..).zip(pages) {
        let run = PageNumber(page >> bits);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "below the number of tables"
        )]
        let table = (page.wrapping_add(hash.of(run)) & mask) as usize;
        shares[table].push(Reference { page: run, place });
    }
}

/// Looks up the references of a share in its table, and sets their times from `now` on.
fn look_up_share(table: &mut LastUse, share: &[Reference], now: u32, before: &[AtomicU32]) {
    let uses = |index: usize| {
        let reference: Reference = share[index];
        (reference.page, now.wrapping_add(reference.place))
    };
    table.replace_uses(share.len(), uses, |index, time| {
        before[share[index].place as usize].store(time, Ordering::Relaxed);
    });
}

/// The start of each segment of a wave with this many references, and the end.
fn segment_starts(references: usize, segments: usize) -> Vec<usize> {
    // Lengths fall by one part in SHORTER from segment to segment.
    let mut length = 1.0;
    let mut ends = vec![0.0];
    for segment in 0..segments {
        ends.push(ends[segment] + length);
        length *= 1.0 - 1.0 / SHORTER as f64;
    }
    let scale = references as f64 / ends[segments];
    let starts = ends
        .iter()
        .map(|end| usize::whole(end * scale).min(references));
    let mut starts: Vec<_> = starts.collect();
    starts[segments] = references;
    starts
}

/// Processes all of `work` in parallel, one item of it in this thread.
fn in_parallel<W: Send>(work: Vec<W>, each: impl Fn(W) + Sync) {
    let mut work = work.into_iter();
    let mine = work.next();
    std::thread::scope(|scope| {
        for work in work {
            let each = &each;
            scope.spawn(move || each(work));
        }
        mine.map(&each);
    });
}

/// Work items to be taken by idle threads.
struct Queue<I>(Mutex<I>);

impl<I: Iterator> Queue<I> {
    fn new(work: I) -> Self {
        Self(Mutex::new(work))
    }

    fn next(&self) -> Option<I::Item> {
        self.0.lock().expect("no thread panics at the queue").next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::lru::{ExactLru, LruStack};
    use crate::parts::naive::NaiveStack;
    use crate::parts::streams::{batch_of, curve_of, uniform, zipf};
    use proptest::prelude::*;

    /// Distances by their positions in the wave.
    type Placed = Vec<(usize, Vec<u32>)>;

    impl Sink for Placed {
        fn take(&mut self, position: usize, distances: &[u32]) {
            self.push((position, distances.to_vec()));
        }
    }

    fn page_numbers(pages: &[u64]) -> Vec<PageNumber> {
        pages.iter().copied().map(PageNumber).collect()
    }

    /// Every distance, in the order of the stream, of references that come in batches.
    fn parallel(
        threads: usize,
        segment_references: usize,
        batch: usize,
        pages: &[u64],
    ) -> Vec<u32> {
        let mut waves = Waves::<Placed>::new(threads, segment_references);
        let mut distances = Vec::new();
        let mut each = |segments: &mut [Segment<Placed>]| {
            let mut wave: Placed = Vec::new();
            for segment in segments {
                wave.append(&mut segment.sink);
            }
            wave.sort_unstable();
            distances.extend(wave.into_iter().flat_map(|(_, distances)| distances));
        };
        for pages in page_numbers(pages).chunks(batch) {
            waves.observe(pages, &mut each);
        }
        waves.finish(&mut each);
        distances
    }

    fn online(batch: usize, pages: &[u64]) -> Vec<u32> {
        let mut stack = LruStack::new();
        let (mut all, mut block) = (Vec::new(), Vec::new());
        for pages in page_numbers(pages).chunks(batch) {
            let mut pages = pages;
            while !pages.is_empty() {
                pages = stack.touch_block(pages, &mut block);
                all.extend(&block);
            }
        }
        all
    }

    fn naive(pages: &[u64]) -> Vec<u32> {
        let mut stack = NaiveStack::default();
        let distance = |&page| stack.touch(page).map_or(NEVER, |distance| distance as u32);
        pages.iter().map(distance).collect()
    }

    /// Streams that strain one thing or another.
    fn streams() -> Vec<Vec<u64>> {
        let saw = |pages: u64| (0..pages).chain((1..pages - 1).rev());
        vec![
            vec![],
            vec![0],
            vec![u64::MAX],
            vec![7; 5_000],
            vec![0; 5_000],
            (0..5_000).collect(),
            (0..5_000).map(|page| page << 12).collect(),
            (0..5_000).map(|page| u64::MAX - page).collect(),
            (0..1_000).cycle().take(9_000).collect(),
            (0..1_000).rev().cycle().take(9_000).collect(),
            saw(700).cycle().take(9_000).collect(),
            (0..9_000)
                .map(|i| i % 300 + i / 2_000 % 2 * (1 << 40))
                .collect(),
            uniform(3_000, 1).take(9_000).collect(),
            zipf(3_000, 1.0, 2).take(9_000).collect(),
            zipf(3_000, 1.0, 3)
                .map(|page| u64::MAX - page)
                .take(9_000)
                .collect(),
        ]
    }

    #[test]
    fn streams_that_strain_agree_with_a_list_moved_to_the_front() {
        for (index, pages) in streams().iter().enumerate() {
            let expected = naive(pages);
            for batch in [1, 777, 1 << 20] {
                assert!(
                    online(batch, pages) == expected,
                    "stream {index} by {batch}"
                );
            }
            for (threads, segment) in [(1, 500), (2, 1 << 19), (2, 777), (3, 300), (16, 90)] {
                let found = parallel(threads, segment, 1 << 20, pages);
                assert!(
                    found == expected,
                    "stream {index}, {threads} threads by {segment}"
                );
            }
        }
    }

    #[test]
    fn curves_are_those_of_one_thread() {
        for seed in 0..5 {
            let pages: Vec<u64> = zipf(20_000, 0.9, seed).take(300_000).collect();
            let expected = curve_of(&mut ExactLru::new(), pages.iter().copied());
            for threads in [1, 2, 3, 7] {
                let mut lru = ParallelLru::new(NonZeroUsize::new(threads).unwrap());
                assert_eq!(curve_of(&mut lru, pages.iter().copied()), expected);
            }
        }
    }

    #[test]
    fn observing_may_go_on_after_a_curve() {
        let pages: Vec<u64> = uniform(5_000, 4).take(60_000).collect();
        let mut exact = ExactLru::new();
        let mut lru = ParallelLru::new(NonZeroUsize::new(2).unwrap());
        assert_eq!(lru.curve(), Err(CurveError::Empty));
        for pages in pages.chunks(9_999) {
            for estimator in [&mut exact as &mut dyn Estimator, &mut lru] {
                estimator.observe(&batch_of(pages.iter().copied()));
            }
            assert_eq!(lru.curve(), exact.curve());
            assert_eq!(lru.distinct(), exact.distinct());
        }
        assert!(lru.memory_bytes() > 5_000 * 16);
    }

    #[test]
    fn segments_are_all_of_a_wave_and_get_shorter() {
        for (references, segments) in [(1, 1), (1, 5), (1_000, 2), (1 << 24, 64)] {
            let starts = segment_starts(references, segments);
            assert_eq!((starts[0], starts[segments]), (0, references));
            let lengths: Vec<_> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
            // Equal up to rounding, by one reference.
            assert!(
                lengths.windows(2).all(|pair| pair[1] <= pair[0] + 1),
                "{lengths:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn every_distance_agrees_with_a_list_moved_to_the_front(
            pages in prop_oneof![
                prop::collection::vec(0_u64..40, 0..3_000),
                prop::collection::vec(0_u64..700, 0..3_000),
            ],
            spread in prop_oneof![Just(1_u64), Just(1 << 12), any::<u64>().prop_map(|n| n | 1)],
            threads in 1_usize..5,
            segment in prop_oneof![1_usize..40, 40_usize..2_000],
            batch in prop_oneof![1_usize..40, 40_usize..2_000],
        ) {
            let pages: Vec<u64> = pages.iter().map(|page| page.wrapping_mul(spread)).collect();
            let expected = naive(&pages);
            prop_assert_eq!(&online(batch, &pages), &expected);
            // With a thread for each of the many waves of a long stream, this would be slow.
            let pages = &pages[..pages.len().min(60 * threads * segment)];
            let found = parallel(threads, segment, batch, pages);
            prop_assert_eq!(&found[..], &expected[..pages.len()]);
        }

        #[test]
        fn no_two_pages_are_one_in_a_table(pages in prop::collection::vec(any::<u64>(), 2..50)) {
            let mut shares = vec![Vec::new(); 8];
            share_out(&mut shares, PageHash::salted(), 0, &page_numbers(&pages));
            for share in &shares {
                for (one, other) in share.iter().flat_map(|one| share.iter().map(move |o| (one, o))) {
                    let same = pages[one.place as usize] == pages[other.place as usize];
                    prop_assert_eq!(one.page == other.page, same);
                }
            }
            prop_assert_eq!(shares.iter().map(Vec::len).sum::<usize>(), pages.len());
        }
    }
}
