//! Every estimator that is exact gives the same curve, whatever the pages and wherever batches end;
//! the others give a curve that is one.
#![no_main]

use std::num::NonZeroUsize;

use libfuzzer_sys::fuzz_target;
use plimsoll_estimator::registry::{ALGORITHMS, OptionValue, Settings, algorithm};
use plimsoll_estimator::{Estimator, GhostLru, GhostOptions, Shards};
use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount, PageNumber};

/// Reads pages and the ends of batches out of the input: a byte is a page near 0, 64, or 2^64, a
/// page by its next eight bytes, a run, or the end of a batch.
fn batches(input: &[u8]) -> Vec<Vec<u64>> {
    let mut batches = vec![Vec::new()];
    let mut last = 0;
    let mut rest = input;
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        let batch = batches.last_mut().expect("there is always one");
        match byte {
            0..=199 => last = u64::from(byte % 67),
            200..=219 => last = u64::MAX - u64::from(byte - 200),
            220..=229 => {
                let Some((page, tail)) = rest.split_first_chunk() else {
                    break;
                };
                rest = tail;
                last = u64::from_le_bytes(*page);
            }
            230..=249 => {
                for _ in 0..(byte - 229) * 8 {
                    last = last.wrapping_add(1);
                    batch.push(last);
                }
                continue;
            }
            _ => {
                batches.push(Vec::new());
                continue;
            }
        }
        batch.push(last);
    }
    batches
}

/// LRU by a list moved to the front.
fn naive(pages: impl Iterator<Item = u64>) -> Result<MissRatioCurve, CurveError> {
    let mut list: Vec<u64> = Vec::new();
    let mut reuses: Vec<u64> = Vec::new();
    let mut references = 0;
    for page in pages {
        references += 1;
        if let Some(depth) = list.iter().position(|&other| other == page) {
            list.remove(depth);
            if depth >= reuses.len() {
                reuses.resize(depth + 1, 0);
            }
            reuses[depth] += 1;
        }
        list.insert(0, page);
    }
    let mut misses = references;
    let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
    for (size, &count) in (1..).zip(&reuses) {
        if count > 0 {
            misses -= count;
            points.push(CurvePoint::exact(
                PageCount(size),
                misses as f64 / references as f64,
            ));
        }
    }
    MissRatioCurve::new(points, references)
}

fn observed(
    estimator: &mut dyn Estimator,
    batches: &[Vec<u64>],
) -> Result<MissRatioCurve, CurveError> {
    for pages in batches {
        let pages: Vec<_> = pages.iter().copied().map(PageNumber).collect();
        estimator.observe(&pages);
    }
    estimator.curve()
}

fuzz_target!(|input: &[u8]| {
    let batches = batches(input);
    let expected = naive(batches.iter().flatten().copied());
    let is_empty = expected.is_err();
    let mut settings = Settings::default();
    settings.set("direct", OptionValue::Size(PageCount(3)));
    settings.set("ghost", OptionValue::Size(PageCount(64)));
    for row in ALGORITHMS {
        let curve = observed(
            &mut *row.build(&settings).expect("defaults").estimator,
            &batches,
        );
        // An estimate is a curve by its type; that there is one, and nothing panics, is what is left. A sample
        // may have drawn none of the pages.
        if row.is_exact {
            assert_eq!(curve, expected, "{}", row.name);
        } else if row.option("rate").is_err() || row.samples_on_request() {
            assert_eq!(curve.is_err(), is_empty, "{}", row.name);
        }
    }
    let two = NonZeroUsize::new(2).expect("two is not zero");
    let many = NonZeroUsize::new(1 << 16).expect("nor is this");
    settings.set("rate", OptionValue::Rate(0.3));
    settings.set("threads", OptionValue::Count(two));
    for name in ["shards", "aet"] {
        let row = algorithm(name).expect("a row");
        let _ = observed(
            &mut *row.build(&settings).expect("a rate").estimator,
            &batches,
        );
    }
    let parallel = ALGORITHMS[0].build(&settings);
    assert_eq!(
        observed(&mut *parallel.expect("two threads").estimator, &batches),
        expected
    );
    assert_eq!(
        observed(&mut Shards::new(1.0, 7).expect("a rate"), &batches),
        expected
    );
    assert_eq!(
        observed(&mut Shards::fixed_size(many, 7), &batches),
        expected
    );
    let _ = observed(&mut Shards::fixed_size(two, 7), &batches);
    let options = GhostOptions {
        direct: PageCount(3),
        ghost: PageCount(64),
        segment: PageCount(4),
    };
    let mut ghost = GhostLru::new(options).expect("sizes that fit");
    let ghost = observed(&mut ghost, &batches);
    assert_eq!(ghost.is_err(), is_empty);
    if let (Ok(ghost), Ok(exact)) = (ghost, &expected) {
        for size in (3..=67).step_by(4).map(PageCount) {
            let (found, truth) = (ghost.miss_ratio(size), exact.miss_ratio(size));
            assert!((found - truth).abs() < 1e-12, "at {size}: {found}, {truth}");
        }
    }
});
