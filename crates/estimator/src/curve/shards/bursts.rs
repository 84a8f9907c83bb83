//! The curve at small sizes, from short intervals of the stream in which all pages are followed.
//!
//! A sample of one page in a hundred contains little information about sizes below a few hundred pages, and its number
//! of references depends on whether the few hottest pages are in it. Hits at
//! small sizes, however, can be measured in a short time if all pages are followed: a *burst*.
//! The stream is divided into stretches; each has one burst at a random position, which
//! represents the whole stretch. Stretches get longer, from the length of the burst itself to 128 times
//! that, so that a short stream has enough bursts and a long one costs little.
//!
//! A page's first reference in a burst only shows that its distance is at least the number
//! of pages seen in the burst so far: a censored observation. It is at risk up to that distance, and
//! the share of references that reach a distance is the product over the shorter distances of
//! one minus the share that ended there (the product-limit estimator, as in `survival`, here over all distances up
//! to a small bound).
//!
//! Source: [KM58]; bursts and their use as a stratum of SHARDS are ours.
//! Cost: 20 to 50 ns for a reference in a burst, nothing outside: at most 1 ns on average in a stream of millions.
//! Not here: the use of the shares (`reuses`).

use plimsoll_flow::PageNumber;

use crate::curve::shards::schedule::Schedule;
use crate::parts::access_bits::AccessBits;
use crate::parts::hash::PageHash;
use crate::parts::steps::{REPLICATES, UnseenShare};
use crate::parts::sys::{Work, prefetch, vectorised};

/// Positions prefetched ahead of their use.
const PREFETCHED: usize = 8;

/// An event not observed in `n` samples is less frequent than this over `n`, with 95 % confidence.
const UNSEEN: f64 = 3.0;

/// Shares of references whose distance is at least 0, 1, .. pages.
pub(crate) type TailShares = Vec<f64>;

/// Results of the bursts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shares {
    pub(crate) all: TailShares,
    /// By replicate; `None` for those without a burst.
    pub(crate) parts: Vec<Option<TailShares>>,
    /// Number of replicates of equal weight that would have the same variance.
    pub(crate) effective: f64,
}

#[derive(Debug, Clone)]
pub(crate) struct Bursts {
    hash: PageHash,
    schedule: Schedule,
    /// The burst's pages so far.
    pages: Vec<PageNumber>,
    /// The last position of each page in `pages`, plus 1; 0 for a free slot. Twice as many slots as references in a
    /// burst.
    places: Vec<u32>,
    order: AccessBits,
    /// References to skip before the burst begins.
    skip: u64,
    /// Number of the stretch, from 0, and its length in bursts.
    stretch: u64,
    weight: u64,
    /// By replicate, in turn: weights of references by distance, and those censored. Empty for one without a burst, so that
    /// thousands of short streams need little memory.
    groups: Vec<Vec<Risk>>,
}

/// References that reach a distance.
#[derive(Debug, Clone, Copy, Default)]
struct Risk {
    /// Number of these that have exactly this distance,
    ended: u64,
    /// and number of those censored there.
    cut_off: u64,
}

/// Pages of a burst.
struct BurstPages<'a> {
    bursts: &'a mut Bursts,
    pages: &'a [PageNumber],
}

impl Work for BurstPages<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.bursts.look_at(self.pages);
    }
}

impl Bursts {
    /// Measures distances up to `distance_max`, in bursts eight times as long.
    pub(crate) fn new(seed: u64, distance_max: usize) -> Self {
        Self {
            hash: PageHash::salted(),
            schedule: Schedule::new(seed, distance_max),
            pages: Vec::new(),
            places: Vec::new(),
            order: AccessBits::default(),
            skip: 0,
            stretch: 0,
            weight: 1,
            groups: vec![Vec::new(); REPLICATES],
        }
    }

    /// The largest distance measured.
    pub(crate) fn distance_max(&self) -> usize {
        self.schedule.distance_max()
    }

    /// Processes the next pages of the stream.
    pub(crate) fn observe(&mut self, mut pages: &[PageNumber]) {
        if self.schedule.burst_references() == 0 {
            return;
        }
        loop {
            let skipped = pages
                .len()
                .min(usize::try_from(self.skip).unwrap_or(usize::MAX));
            self.skip -= skipped as u64;
            pages = &pages[skipped..];
            if pages.is_empty() {
                return;
            }
            pages = self.follow(pages);
        }
    }

    /// Processes pages of the next bursts only, as [`Schedule`] selects them from the stream.
    pub(crate) fn observe_selected(&mut self, mut pages: &[PageNumber]) {
        while !pages.is_empty() {
            pages = self.follow(pages);
        }
    }

    /// Processes pages up to the end of the burst, and returns the others.
    fn follow<'a>(&mut self, pages: &'a [PageNumber]) -> &'a [PageNumber] {
        let length = self.schedule.burst_references();
        let (now, later) = pages.split_at(pages.len().min(length - self.pages.len()));
        vectorised(BurstPages {
            bursts: self,
            pages: now,
        });
        if self.pages.len() == length {
            self.next_stretch();
        }
        later
    }

    #[inline(always)]
    fn look_at(&mut self, pages: &[PageNumber]) {
        if self.places.is_empty() {
            let length = self.schedule.burst_references();
            self.places.resize((2 * length).next_power_of_two(), 0);
            self.pages.reserve_exact(length);
        }
        let mask = self.places.len() - 1;
        let group = usize::try_from(self.stretch % REPLICATES as u64).unwrap_or(0);
        let distance_max = self.distance_max();
        let group = &mut self.groups[group];
        group.resize(distance_max + 1, Risk::default());
        let hash = self.hash;
        let home_of = |page: PageNumber| {
            #[expect(clippy::cast_possible_truncation, reason = "only the low bits count")]
            let home = hash.of(page) as usize & mask;
            home
        };
        for (here, &page) in pages.iter().enumerate() {
            if let Some(&ahead) = pages.get(here + PREFETCHED) {
                prefetch(&self.places, home_of(ahead));
            }
            let mut index = home_of(page);
            let place = loop {
                match self.places[index] {
                    0 => break None,
                    place if self.pages[place as usize - 1] == page => break Some(place - 1),
                    _ => index = (index + 1) & mask,
                }
            };
            match place {
                None => {
                    group[self.order.marked().min(distance_max)].cut_off += self.weight;
                }
                Some(place) => {
                    let distance = self.order.strike(place);
                    group[distance.min(distance_max)].ended += self.weight;
                }
            }
            self.places[index] = self.order.take() + 1;
            self.pages.push(page);
        }
    }

    fn next_stretch(&mut self) {
        self.pages.clear();
        self.places.fill(0);
        self.order.clear();
        let end = self.schedule.burst(self.stretch).end;
        self.stretch += 1;
        self.weight = self.schedule.weight(self.stretch);
        self.skip = self.schedule.burst(self.stretch).start - end;
    }

    /// Returns the shares of all references that reach each distance, and those of
    /// every replicate, `None` if it had no burst.
    pub(crate) fn reaching(&self) -> Shares {
        let mut all = vec![(0.0, 0.0); self.distance_max() + 1];
        let (mut sum, mut squares) = (0.0, 0.0);
        let parts = self.groups.iter().map(|group| {
            let weights = group.iter();
            let weights = weights.map(|risk| (risk.ended as f64, risk.cut_off as f64));
            let weights: Vec<_> = weights.collect();
            for (sum, weights) in all.iter_mut().zip(&weights) {
                sum.0 += weights.0;
                sum.1 += weights.1;
            }
            let total: f64 = weights.iter().map(|(ended, cut_off)| ended + cut_off).sum();
            sum += total;
            squares += total * total;
            (total > 0.0).then(|| product_limit(&weights))
        });
        let parts = parts.collect();
        Shares {
            parts,
            all: product_limit(&all),
            effective: if squares > 0.0 {
                sum * sum / squares
            } else {
                0.0
            },
        }
    }

    /// Returns the possible difference between the share of references that miss and the share that reaches, from size
    /// 0 on.
    pub(crate) fn unseen(&self) -> Vec<UnseenShare> {
        let risks = (0..=self.distance_max()).map(|distance| {
            let risks = self.groups.iter().filter_map(|group| group.get(distance));
            risks.fold((0.0, 0.0), |(ended, cut_off), risk| {
                (ended + risk.ended as f64, cut_off + risk.cut_off as f64)
            })
        });
        let risks: Vec<_> = risks.collect();
        let all: f64 = risks.iter().map(|(ended, cut_off)| ended + cut_off).sum();
        let reaching = product_limit(&risks);
        let (mut at_risk, mut surviving, mut below) = (all, all, 0.0_f64);
        let unseen = reaching
            .iter()
            .zip(&risks)
            .map(|(&share, (ended, cut_off))| {
                // A size hits references of shorter distances.
                let above = (surviving / all.max(1.0) - share).max(0.0);
                let unseen = UnseenShare { below, above };
                at_risk -= cut_off;
                let chance = UNSEEN * self.weight as f64 / at_risk.max(f64::MIN_POSITIVE);
                below = below.max(share * chance.min(1.0));
                at_risk -= ended;
                surviving -= ended;
                unseen
            });
        unseen.collect()
    }

    /// Bytes of heap allocated.
    pub(crate) fn memory_bytes(&self) -> usize {
        let groups = self.groups.iter().map(Vec::capacity).sum::<usize>();
        self.pages.capacity() * size_of::<PageNumber>()
            + self.places.capacity() * size_of::<u32>()
            + self.order.memory_bytes()
            + groups * size_of::<Risk>()
    }
}

/// The shares that reach each distance, from the weights that end there and that are censored there.
fn product_limit(risks: &[(f64, f64)]) -> TailShares {
    let mut at_risk: f64 = risks.iter().map(|(ended, cut_off)| ended + cut_off).sum();
    let mut share = 1.0;
    let mut reaching = Vec::with_capacity(risks.len());
    for &(ended, cut_off) in risks {
        reaching.push(share);
        // Known to reach this distance, but not further.
        at_risk -= cut_off;
        if at_risk > 0.0 {
            share *= 1.0 - ended / at_risk;
        }
        at_risk -= ended;
    }
    reaching
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::naive::{self, NaiveStack};
    use crate::parts::streams::{uniform, zipf};
    use proptest::prelude::*;

    fn pages_of(pages: impl Iterator<Item = u64>) -> Vec<PageNumber> {
        pages.map(PageNumber).collect()
    }

    proptest! {
        #[test]
        fn one_burst_is_the_product_limit_of_its_distances(
            pages in prop::collection::vec(0_u64..60, 1..256),
        ) {
            // The first burst has 256 references and begins at once.
            let mut bursts = Bursts::new(1, 32);
            bursts.observe(&pages_of(pages.iter().copied()));
            let mut stack = NaiveStack::default();
            let mut seen = 0;
            let observations = pages.iter().map(|&page| match stack.touch(page) {
                Some(distance) => (distance, false),
                None => {
                    seen += 1;
                    // At least as many as were seen: more than one less.
                    (seen - 1, true)
                }
            });
            // The twin censors after events of the same value, so half a step is needed between the two kinds.
            let observations: Vec<_> = observations
                .map(|(distance, cut_off)| (2 * distance + u64::from(!cut_off), cut_off))
                .collect();
            let Shares { all: reaching, parts: by_part, .. } = bursts.reaching();
            for (distance, share) in reaching.iter().enumerate() {
                let expected = naive::product_limit(&observations, 2 * distance as u64);
                prop_assert!((share - expected).abs() < 1e-9, "{}: {} {}", distance, share, expected);
            }
            prop_assert_eq!(by_part.iter().flatten().count(), 1);
        }

        #[test]
        fn batches_do_not_matter(
            cuts in prop::collection::vec(1_usize..3_000, 1..20),
            seed in any::<u64>(),
        ) {
            let pages = pages_of(zipf(500, 1.0, seed).take(20_000));
            let (mut whole, mut cut) = (Bursts::new(seed, 16), Bursts::new(seed, 16));
            whole.observe(&pages);
            let mut rest = &pages[..];
            for length in cuts.into_iter().cycle() {
                let (now, later) = rest.split_at(length.min(rest.len()));
                cut.observe(now);
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(whole.reaching(), cut.reaching());
        }
    }

    #[test]
    fn an_even_stream_reaches_distances_in_proportion() {
        for seed in 0..5 {
            let mut bursts = Bursts::new(seed, 512);
            bursts.observe(&pages_of(uniform(1_024, seed).take(1_000_000)));
            let Shares {
                all: reaching,
                parts: by_part,
                ..
            } = bursts.reaching();
            assert_eq!(by_part.iter().flatten().count(), REPLICATES);
            for distance in [0, 1, 100, 512] {
                let expected = 1.0 - distance as f64 / 1_024.0;
                assert!((reaching[distance] - expected).abs() < 0.01, "{distance}");
            }
        }
    }

    #[test]
    fn without_distances_nothing_is_looked_at() {
        let mut bursts = Bursts::new(1, 0);
        bursts.observe(&pages_of(0..1_000));
        assert_eq!(bursts.reaching().all, [1.0]);
    }
}
