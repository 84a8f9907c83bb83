//! SHARDS over a slice of a stream, to be merged with the slices before and after it: what the estimator would look at,
//! in order.
//!
//! The estimator itself runs over the merged slices, so that the curve is its curve, to the last bit.
//!
//! **Fixed rate.** It looks at the references to sampled pages, and at all references of bursts, about one in 128. A burst's
//! place depends on its position in the whole stream, so a slice must know where it begins, unless no bursts are used at the rate
//! (below 1/1024, and 1).
//!
//! **Fixed size.** The rate at which the estimator arrives at a slice is unknown, but bounded: it has at most `n` pages
//! below its limit at any time, those of the slice among them, so its limit is at most the `n + 1`-th smallest hash that
//! the slice has seen. References up to that hash are kept. As long as bursts may be used at that rate, all are kept: until
//! a slice has seen 256 `n` pages. A slice that is appended to others is kept below what is known by then.
//!
//! Not here: the estimator (`shards`, `fixed_size`).

use std::num::NonZeroUsize;

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use super::{NEAR_DISTANCE_MIN, Shards, burst_distance, fixed_size, near_at, near_for};
use crate::curve::shards::schedule::Schedule;
use crate::error::EstimatorError;
use crate::estimator::Estimator as _;
use crate::partial::{Contents, Refusal, Slice};
use crate::parts::check::{Check, PIECE, Stopped};
use crate::parts::hash::{FILTER_PAGES, PageMap, PageSample, SampledPage, page_map};

/// What fixed-rate SHARDS looks at.
#[derive(Debug)]
pub(crate) struct FixedRateSlice {
    /// Without references.
    estimator: Shards,
    sample: PageSample,
    /// `None` if no bursts are used.
    schedule: Option<Schedule>,
    references: u64,
    hashes: Vec<u64>,
    of_bursts: Vec<PageNumber>,
    chosen: Vec<SampledPage>,
}

impl FixedRateSlice {
    /// # Errors
    ///
    /// [`EstimatorError::RateOutOfRange`].
    pub(crate) fn new(rate: f64, seed: u64) -> Result<Self, EstimatorError> {
        let sample = PageSample::new(rate, seed)?;
        let near = near_for(sample.rate());
        let schedule = near_at(near, sample.rate()).map(|_| Schedule::new(seed, near));
        Ok(Self {
            estimator: Shards::new(rate, seed)?,
            sample,
            schedule,
            references: 0,
            hashes: Vec::new(),
            of_bursts: Vec::new(),
            chosen: Vec::new(),
        })
    }
}

const POSITION: &str = "a slice with bursts knows its position";

impl Slice for FixedRateSlice {
    fn needs_position(&self) -> bool {
        self.schedule.is_some()
    }

    fn observe(&mut self, position: Option<u64>, pages: &[PageNumber]) {
        for pages in pages.chunks(FILTER_PAGES) {
            self.sample.select(pages, &mut self.chosen);
            self.hashes.extend(self.chosen.iter().map(|page| page.hash));
        }
        if let Some(schedule) = self.schedule {
            let from = position.expect(POSITION);
            for burst in schedule.within(from..from + pages.len() as u64) {
                let place = |position: u64| {
                    usize::try_from(position - from).expect("it lies within the slice of pages")
                };
                self.of_bursts
                    .extend(&pages[place(burst.start)..place(burst.end)]);
            }
        }
        self.references += pages.len() as u64;
    }

    fn append(
        &mut self,
        position: Option<u64>,
        next: Contents,
        check: Check,
    ) -> Result<(), Refusal> {
        let [of_bursts, others] = next.pages;
        let expected = self.schedule.map_or(0, |schedule| {
            let from = position.expect(POSITION);
            schedule.references_before(from + next.references) - schedule.references_before(from)
        });
        if of_bursts.len() as u64 != expected || !others.is_empty() {
            return Err(Refusal::Invalid("its bursts are not those of its position"));
        }
        if next.numbers.len() as u64 > next.references {
            return Err(Refusal::Invalid("it has more samples than references"));
        }
        if next
            .numbers
            .iter()
            .any(|&hash| !self.sample.contains_hash(hash))
        {
            return Err(Refusal::Invalid("a page in it is not in the sample"));
        }
        check()?;
        self.references += next.references;
        self.hashes.extend(next.numbers);
        self.of_bursts.extend(of_bursts);
        Ok(())
    }

    fn into_contents(self: Box<Self>) -> Contents {
        Contents {
            references: self.references,
            numbers: self.hashes,
            pages: [self.of_bursts, Vec::new()],
        }
    }

    fn curve(&self, check: Check) -> Result<Result<MissRatioCurve, CurveError>, Stopped> {
        let mut pages = self.estimator.clone();
        pages.observe_selected(self.references, &self.hashes, &self.of_bursts, check)?;
        Ok(pages.curve())
    }
}

/// What fixed-size SHARDS may look at.
#[derive(Debug)]
pub(crate) struct FixedSizeSlice {
    max_samples: NonZeroUsize,
    seed: u64,
    /// Contains every page that the estimator samples from here on.
    sample: PageSample,
    /// The hashes seen that are in the sample.
    distinct: PageMap<()>,
    references: u64,
    /// The first references, as long as all are kept.
    whole: Vec<PageNumber>,
    /// Those to the sample, after these.
    hashes: Vec<u64>,
    chosen: Vec<SampledPage>,
}

impl FixedSizeSlice {
    pub(crate) fn new(max_samples: NonZeroUsize, seed: u64) -> Self {
        Self {
            max_samples,
            seed,
            sample: PageSample::whole(seed),
            distinct: page_map(),
            references: 0,
            whole: Vec::new(),
            hashes: Vec::new(),
            chosen: Vec::new(),
        }
    }

    /// Whether the estimator may look at any reference from here on.
    fn needs_all(&self) -> bool {
        burst_distance(fixed_size::NEAR, self.sample.rate()) >= NEAR_DISTANCE_MIN
    }

    fn see(&mut self, hash: u64) {
        self.distinct.insert(PageNumber(hash), ());
    }

    /// Lowers the sample's limit to the smallest one that is known, if at least so many pages leave it by that.
    fn tighten(&mut self, pages: usize) {
        let most = self.max_samples.get();
        if self.distinct.len() <= most.saturating_add(pages) {
            return;
        }
        let mut hashes: Vec<u64> = self.distinct.keys().map(|page| page.0).collect();
        // Not the smallest of all, so it is above 0.
        let (_, &mut limit, _) = hashes.select_nth_unstable(most);
        self.sample.shrink_below(limit);
        self.distinct.retain(|page, ()| page.0 < limit);
    }

    /// Adds hashes of pages, those of them that are in the sample.
    fn keep(&mut self, hashes: impl Iterator<Item = u64>) {
        for hash in hashes {
            if self.sample.contains_hash(hash) {
                self.see(hash);
                self.hashes.push(hash);
            }
        }
        self.tighten(self.max_samples.get() / 8);
    }
}

impl Slice for FixedSizeSlice {
    fn observe(&mut self, _: Option<u64>, pages: &[PageNumber]) {
        let mut chosen = std::mem::take(&mut self.chosen);
        for pages in pages.chunks(FILTER_PAGES) {
            self.sample.select(pages, &mut chosen);
            if self.needs_all() {
                self.whole.extend(pages);
                chosen.iter().for_each(|page| self.see(page.hash));
                self.tighten(self.max_samples.get() / 8);
            } else {
                self.keep(chosen.iter().map(|page| page.hash));
            }
        }
        self.chosen = chosen;
        self.references += pages.len() as u64;
    }

    fn append(&mut self, _: Option<u64>, next: Contents, check: Check) -> Result<(), Refusal> {
        let [whole, others] = next.pages;
        let kept = whole.len() as u64 + next.numbers.len() as u64;
        if kept > next.references || !others.is_empty() {
            return Err(Refusal::Invalid("it has more samples than references"));
        }
        for whole in whole.chunks(PIECE) {
            check()?;
            self.observe(None, whole);
        }
        let sampled = next.references - whole.len() as u64;
        if sampled == 0 {
            return Ok(());
        }
        self.tighten(0);
        if self.needs_all() {
            return Err(Refusal::Invalid(
                "references were left out that bursts may need",
            ));
        }
        for hashes in next.numbers.chunks(PIECE) {
            check()?;
            for hashes in hashes.chunks(FILTER_PAGES) {
                self.keep(hashes.iter().copied());
            }
        }
        self.references += sampled;
        Ok(())
    }

    fn into_contents(self: Box<Self>) -> Contents {
        Contents {
            references: self.references,
            numbers: self.hashes,
            pages: [self.whole, Vec::new()],
        }
    }

    fn curve(&self, check: Check) -> Result<Result<MissRatioCurve, CurveError>, Stopped> {
        let mut pages = Shards::fixed_size(self.max_samples, self.seed);
        for whole in self.whole.chunks(PIECE) {
            check()?;
            pages.observe(whole);
        }
        let sampled = self.references - self.whole.len() as u64;
        pages.observe_selected(sampled, &self.hashes, &[], check)?;
        Ok(pages.curve())
    }
}
