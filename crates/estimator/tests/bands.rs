//! Every approximate curve has a band that contains the exact curve at 95 % of sizes or more:
//! for each estimator, on streams of each kind, pooled over 20 seeds.

use std::num::NonZeroUsize;

use plimsoll_estimator::{
    Aet, AverageFootprint, CounterStacks, CounterStacksOptions, Estimator, ExactLru, Shards,
    SpatialAet,
};
use plimsoll_flow::{MissRatioCurve, PageCount, PageNumber, ReferenceBatch, Source};
use plimsoll_source::synthetic::{Pattern, Workload};

const PAGES: u64 = 20_000;
const REFERENCES: u64 = 300_000;
const SEEDS: u64 = 20;
const SIZES: u64 = 200;

/// References of one kind of stream and seed.
fn made(pattern: Pattern, seed: u64) -> Vec<u64> {
    let workload = Workload {
        seed,
        scrambled: true,
        ..Workload::of(pattern)
    };
    let mut source = workload.source().unwrap();
    let (mut batch, mut pages) = (ReferenceBatch::new(), Vec::new());
    while source.next_batch(&mut batch).unwrap() {
        pages.extend(batch.pages().iter().map(|page| page.0));
    }
    pages
}

fn uniform(seed: u64) -> Vec<u64> {
    let (pages, references) = (PageCount(PAGES), REFERENCES);
    made(Pattern::Uniform { pages, references }, seed)
}

fn zipf(alpha: f64, seed: u64) -> Vec<u64> {
    let pages = PageCount(PAGES);
    let pattern = Pattern::Zipf {
        pages,
        alpha,
        references: REFERENCES,
    };
    made(pattern, seed)
}

fn classes(seed: u64) -> Vec<u64> {
    let (pages, references) = (PageCount(PAGES), REFERENCES);
    made(Pattern::Class { pages, references }, seed)
}

/// A loop, with different pages for each seed.
fn cycle(seed: u64) -> Vec<u64> {
    (0..REFERENCES)
        .map(|now| now % PAGES + (seed << 32))
        .collect()
}

/// Up and down repeatedly.
fn sawtooth(seed: u64) -> Vec<u64> {
    let at = |now: u64| (now % (2 * PAGES)).min(2 * PAGES - 1 - now % (2 * PAGES));
    (0..REFERENCES).map(|now| at(now) + (seed << 32)).collect()
}

/// Alternating loops over half of the pages and random references to the other half.
fn phases(seed: u64) -> Vec<u64> {
    let any = uniform(seed)
        .into_iter()
        .map(|page| page % (PAGES / 2) + (1 << 40));
    let by_turns = (0..)
        .zip(any)
        .map(|(now, any)| match now / (2 * PAGES) % 2 {
            0 => now % (PAGES / 2) + (seed << 32),
            _ => any,
        });
    by_turns.collect()
}

fn curve_of(mut estimator: Box<dyn Estimator>, pages: &[u64]) -> MissRatioCurve {
    let pages: Vec<_> = pages.iter().copied().map(PageNumber).collect();
    for piece in pages.chunks(ReferenceBatch::CAPACITY) {
        estimator.observe(piece);
    }
    estimator.curve().unwrap()
}

type Make = fn(u64) -> Box<dyn Estimator>;
type Stream = fn(u64) -> Vec<u64>;

const STREAMS: [(&str, Stream); 9] = [
    ("uniform", uniform),
    ("Zipf 0.6", |seed| zipf(0.6, seed)),
    ("Zipf 0.8", |seed| zipf(0.8, seed)),
    ("Zipf 1.0", |seed| zipf(1.0, seed)),
    ("Zipf 1.2", |seed| zipf(1.2, seed)),
    ("two classes", classes),
    ("loop", cycle),
    ("sawtooth", sawtooth),
    ("phases", phases),
];

/// Checks the bands of one estimator on every kind of stream.
fn held(name: &str, make: Make) {
    let mut found = Vec::new();
    for (stream, pages) in STREAMS {
        let (mut held, mut all) = (0, 0);
        for seed in 0..SEEDS {
            // Differs from the seed of the stream, so that the sample is independent of the stream.
            let pages = pages(seed + 7_000);
            let exact = curve_of(Box::new(ExactLru::new()), &pages);
            let curve = curve_of(make(seed), &pages);
            for size in (1..=SIZES).map(|step| PageCount(PAGES * step / SIZES)) {
                let (point, truth) = (curve.at(size), exact.miss_ratio(size));
                held += i32::from(point.low <= truth && truth <= point.high);
                all += 1;
            }
        }
        found.push((stream, f64::from(held) / f64::from(all)));
    }
    assert!(
        found.iter().all(|&(_, held)| held >= 0.95),
        "{name}: {found:.3?}"
    );
}

#[test]
fn of_shards_at_a_rate() {
    held("a twentieth", |seed| {
        Box::new(Shards::new(0.05, seed).unwrap())
    });
}

#[test]
fn of_shards_of_a_size() {
    held("1000 pages", |seed| {
        Box::new(Shards::fixed_size(NonZeroUsize::new(1_000).unwrap(), seed))
    });
}

#[test]
fn of_aet() {
    held("all references", |_| Box::new(Aet::new()));
}

#[test]
fn of_aet_of_a_sample_of_pages() {
    held("a twentieth of the pages", |seed| {
        Box::new(SpatialAet::new(0.05, seed).unwrap())
    });
}

#[test]
fn of_counter_stacks() {
    held("Counter Stacks", |seed| {
        let options = CounterStacksOptions {
            seed,
            ..CounterStacksOptions::default()
        };
        Box::new(CounterStacks::new(options).unwrap())
    });
}

#[test]
fn of_the_average_footprint() {
    held("footprint", |_| Box::new(AverageFootprint::new()));
}
