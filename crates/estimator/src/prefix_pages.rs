//! Requests whose pages are of use only in order, for every estimator of pages: the blocks of a prompt in the cache of a language
//! model.
//!
//! The keys and values of a block depend on all tokens before it. A block is therefore identified by its own number and those of
//! all earlier blocks of its request, of which it gets one number of 64 bits. It is a hit only if all earlier blocks of its request
//! are hits too, and such numbers need no further rule for that: a block's reuse distance is at least as large as that of each
//! earlier block of its request. At the block's last use all of them were used just before it. If an earlier block was used by
//! another request since, fewer others were used since then. If not, the same others were used since both, except that the
//! earlier one counts the later one, and the later one the earlier one.
//!
//! Hence the miss-ratio curve of these numbers is that of a cache of prefixes, and a sample of them gives its curve as a sample of
//! pages does for any stream: a sampled block needs no block before it, and its distance is unbiased. Where the trace's own numbers
//! stand for all blocks before them, as those of language models' caches do, it is the curve of [`PrefixLru`](crate::PrefixLru). Where
//! they do not, that one counts a block after another beginning as the same block, and takes a request's largest distance so far, of which
//! a sample gives only a lower bound. (A sample of whole conversations, by the first block of a request, is small where they share a
//! few beginnings.)
//!
//! Mean absolute error and largest error of SHARDS at rates 1/10 and 1/100 over 20 seeds of a million blocks, at 600 sizes up to 1.2
//! times the footprint; *held* is the share of sizes whose true ratio lay in the 95 % band. The ignored test
//! `print_the_table_of_accuracy` prints this table:
//!
//! | stream | footprint | 1/10 | largest | held | 1/100 | largest | held |
//! |---|---|---|---|---|---|---|---|
//! | one prompt of 4 blocks, conversations | 231 769 | 0.0017 | 0.0119 | 1.00 | 0.0046 | 0.0239 | 1.00 |
//! | 100 prompts by Zipf 1.0, conversations | 72 733 | 0.0016 | 0.0272 | 0.99 | 0.0066 | 0.1928 | 1.00 |
//! | 5000 documents by Zipf 0.8, a question each | 253 494 | 0.0025 | 0.0198 | 1.00 | 0.0074 | 0.0616 | 1.00 |
//! | few long conversations | 45 482 | 0.0032 | 0.0284 | 1.00 | 0.0130 | 0.0830 | 0.99 |
//!
//! Two prefixes have the same number with a probability of `n^2 / 2^65` among `n`: below 0.0003 for 100 million.
//!
//! Source: the prefix is ours. Cost: one hash per reference.
//! Not here: the requests, which the source numbers; the estimators.

use plimsoll_flow::{PageNumber, mix};

/// Numbers the pages of requests by all pages of the request so far.
///
/// ```
/// use plimsoll_estimator::{Estimator, ExactLru, PrefixPages};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let (mut prefixes, mut lru) = (PrefixPages::new(), ExactLru::new());
/// // The second request has the first one's last block after another beginning.
/// lru.observe(prefixes.number(&[1, 2, 9, 2].map(PageNumber), &[1, 1, 2, 2]));
/// assert_eq!(lru.curve()?.miss_ratio(PageCount(9)), 1.0);
/// # Ok::<(), plimsoll_flow::CurveError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct PrefixPages {
    /// The last request, and the number of its last page.
    last: Option<(u32, u64)>,
    /// The numbers of the current references.
    numbers: Vec<PageNumber>,
}

impl PrefixPages {
    /// Returns a numbering before the first request.
    pub fn new() -> Self {
        Self::default()
    }

    /// The numbers of the next references, each of which is given with the number of its request. Consecutive references of one
    /// number are one request.
    ///
    /// # Panics
    ///
    /// If there are not as many requests as pages.
    pub fn number(&mut self, pages: &[PageNumber], requests: &[u32]) -> &[PageNumber] {
        assert_eq!(pages.len(), requests.len(), "a request for each reference");
        self.numbers.clear();
        for (page, &request) in pages.iter().zip(requests) {
            let before = match self.last {
                Some((last, number)) if last == request => number,
                _ => 0,
            };
            // The odd constant distinguishes a request of page 0 from none.
            let number = mix(mix(before.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ page.0);
            self.last = Some((request, number));
            self.numbers.push(PageNumber(number));
        }
        &self.numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::streams::{Random, numbered, requests, zipf};
    use crate::{Estimator, ExactLru, Shards};
    use plimsoll_flow::{MissRatioCurve, PageCount};
    use proptest::prelude::*;

    /// Runs a cache of prefixes on requests, and counts the blocks that miss or come after one that did.
    fn naive_misses(requests: &[Vec<u64>], size: usize) -> usize {
        let mut cache: Vec<&[u64]> = Vec::new();
        let mut misses = 0;
        for request in requests {
            let mut is_whole = true;
            for end in 1..=request.len() {
                let prefix = &request[..end];
                let place = cache.iter().position(|&other| other == prefix);
                is_whole &= place.is_some();
                misses += usize::from(!is_whole);
                if let Some(place) = place {
                    cache.remove(place);
                }
                cache.insert(0, prefix);
                cache.truncate(size);
            }
        }
        misses
    }

    proptest! {
        #[test]
        fn exact_lru_agrees_with_a_naive_cache_of_prefixes(
            // Blocks that occur after several beginnings.
            requests in requests(3, 150),
            size in 0_usize..60,
            cut in 1_usize..300,
        ) {
            let (mut prefixes, mut lru) = (PrefixPages::new(), ExactLru::new());
            let (blocks, numbers) = numbered(&requests);
            for (blocks, numbers) in blocks.chunks(cut).zip(numbers.chunks(cut)) {
                lru.observe(prefixes.number(blocks, numbers));
            }
            let expected = naive_misses(&requests, size) as f64 / numbers.len() as f64;
            prop_assert_eq!(lru.curve().unwrap().miss_ratio(PageCount(size as u64)), expected);
        }
    }

    /// Requests to a language model until there are so many blocks. A new conversation begins with one of `prompts` shared
    /// beginnings (by Zipf) of `shared` blocks on average; one of `open` conversations in progress continues, with all its blocks and up to
    /// 2 `added` new ones, until it has ended after 1 / `ends` requests on average.
    fn conversations(
        blocks: usize,
        (prompts, shared, exponent): Prompts,
        (open, added, ends): Talks,
        seed: u64,
    ) -> Vec<Vec<u64>> {
        let mut random = Random::new(seed);
        let mut beginnings = zipf(prompts, exponent, seed + 1);
        let mut next_block = 0;
        let mut new_blocks = |blocks: &mut Vec<u64>, count: u64| {
            blocks.extend(next_block..next_block + count);
            next_block += count;
        };
        let shared: Vec<Vec<u64>> = (0..prompts)
            .map(|_| {
                let mut blocks = Vec::new();
                new_blocks(&mut blocks, 1 + random.next() % (2 * shared));
                blocks
            })
            .collect();
        let mut talks: Vec<Vec<u64>> = vec![Vec::new(); open];
        let (mut requests, mut count) = (Vec::new(), 0);
        while count < blocks {
            // Some conversations are quicker than others.
            let talk = (random.share().powi(2) * open as f64) as usize;
            let talk = &mut talks[talk];
            if talk.is_empty() || random.share() < ends {
                let beginning = beginnings.next().unwrap();
                talk.clone_from(&shared[beginning as usize]);
            }
            new_blocks(talk, 1 + random.next() % (2 * added));
            count += talk.len();
            requests.push(talk.clone());
        }
        requests
    }

    /// Number of shared beginnings, blocks of one on average, and the exponent of their popularity.
    type Prompts = (u64, u64, f64);

    /// Number of conversations in progress, blocks that a request adds on average, and the probability that one ends before it.
    type Talks = (usize, u64, f64);

    /// What the table is of.
    const KINDS: [(&str, Prompts, Talks); 4] = [
        (
            "one prompt of 4 blocks, conversations",
            (1, 4, 1.0),
            (3_000, 8, 0.2),
        ),
        (
            "100 prompts by Zipf 1.0, conversations",
            (100, 20, 1.0),
            (1_000, 4, 0.2),
        ),
        (
            "5000 documents by Zipf 0.8, a question each",
            (5_000, 60, 0.8),
            (1, 1, 1.0),
        ),
        ("few long conversations", (10, 10, 1.0), (200, 10, 0.03)),
    ];

    /// The curve of a stream by an estimator.
    fn curve(
        estimator: &mut dyn Estimator,
        blocks: &[PageNumber],
        requests: &[u32],
    ) -> MissRatioCurve {
        estimator.observe(PrefixPages::new().number(blocks, requests));
        estimator.curve().unwrap()
    }

    /// Mean absolute and largest error of SHARDS over seeds, and the share of sizes whose ratio lay in the band.
    fn errors(
        exact: &MissRatioCurve,
        rate: f64,
        seeds: u64,
        blocks: &[PageNumber],
        requests: &[u32],
    ) -> [f64; 3] {
        let footprint = exact.points().last().unwrap().size.0;
        let sizes: Vec<_> = (1..=600)
            .map(|step| PageCount(step * footprint / 500))
            .collect();
        let [mut mean, mut largest, mut held] = [0.0_f64; 3];
        for seed in 0..seeds {
            let sampled = curve(&mut Shards::new(rate, seed).unwrap(), blocks, requests);
            for &size in &sizes {
                let (point, truth) = (sampled.at(size), exact.miss_ratio(size));
                let error = (point.miss_ratio - truth).abs();
                mean += error;
                largest = largest.max(error);
                held += f64::from(u8::from(
                    point.low - 1e-9 <= truth && truth <= point.high + 1e-9,
                ));
            }
        }
        let all = (seeds * 600) as f64;
        [mean / all, largest, held / all]
    }

    /// Prints the module's table; run with `--ignored --nocapture` in a release build.
    #[test]
    #[ignore = "a table to be read, not a test"]
    fn print_the_table_of_accuracy() {
        println!("| stream | footprint | 1/10 | largest | held | 1/100 | largest | held |");
        for (name, prompts, talks) in KINDS {
            let (blocks, requests) = numbered(&conversations(1_000_000, prompts, talks, 1));
            let exact = curve(&mut ExactLru::new(), &blocks, &requests);
            let rows = [0.1, 0.01].map(|rate| errors(&exact, rate, 20, &blocks, &requests));
            let rows = rows.map(|row| row.map(|error| format!("{error:.4}")).join(" | "));
            let footprint = exact.points().last().unwrap().size.0;
            println!("| {name} | {footprint} | {} |", rows.join(" | "));
        }
    }

    #[test]
    fn a_sample_of_prefixes_is_right_to_a_percent() {
        for (name, prompts, talks) in KINDS {
            let (blocks, requests) = numbered(&conversations(200_000, prompts, talks, 1));
            let exact = curve(&mut ExactLru::new(), &blocks, &requests);
            let [error, ..] = errors(&exact, 0.1, 3, &blocks, &requests);
            assert!(error <= 0.01, "{name}: {error}");
        }
    }
}
