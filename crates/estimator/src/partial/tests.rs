use super::*;
use crate::parts::streams::{Random, batch_of, uniform, zipf};
use crate::{Estimator, ExactLru, Shards};
use proptest::prelude::*;
use std::cell::Cell;

fn shards(rate: f64, seed: u64) -> SliceOf {
    SliceOf::Shards { rate, seed }
}

fn shards_max(max_samples: usize, seed: u64) -> SliceOf {
    let max_samples = NonZeroUsize::new(max_samples).unwrap();
    SliceOf::ShardsMax { max_samples, seed }
}

/// The estimator itself.
fn plain(of: SliceOf, pages: &[PageNumber]) -> Result<MissRatioCurve, CurveError> {
    let mut estimator: Box<dyn Estimator> = match of {
        SliceOf::Lru => Box::new(ExactLru::new()),
        SliceOf::Shards { rate, seed } => Box::new(Shards::new(rate, seed).unwrap()),
        SliceOf::ShardsMax { max_samples, seed } => Box::new(Shards::fixed_size(max_samples, seed)),
    };
    estimator.observe(pages);
    estimator.curve()
}

fn mapped(of: SliceOf, start: Option<u64>, pages: &[PageNumber], batch: usize) -> Vec<u8> {
    let mut partial = Partial::new(of, PageSize::default(), start).unwrap();
    for pages in pages.chunks(batch) {
        partial.observe(pages);
    }
    partial.into_bytes()
}

fn merged(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut whole = Partial::from_bytes(&parts[0]).unwrap();
    for part in &parts[1..] {
        whole.append(Partial::parse(part).unwrap()).unwrap();
    }
    whole.into_bytes()
}

/// The parts of a stream cut at some places.
fn parts(of: SliceOf, pages: &[PageNumber], mut cuts: Vec<usize>, known: bool) -> Vec<Vec<u8>> {
    cuts.extend([0, pages.len()]);
    cuts.sort_unstable();
    let slices = cuts.windows(2).map(|pair| {
        let start = known.then_some(pair[0] as u64);
        mapped(of, start, &pages[pair[0]..pair[1]], 1 + pair[1] % 5_000)
    });
    slices.collect()
}

/// Merges neighbours at random, in any grouping, until one is left.
fn merged_at_random(mut parts: Vec<Vec<u8>>, random: &mut Random) -> Partial {
    while parts.len() > 1 {
        let from = (random.share() * (parts.len() - 1) as f64) as usize;
        let to = (from + 2 + (random.share() * 3.0) as usize).min(parts.len());
        let together = merged(&parts[from..to]);
        parts.splice(from..to, [together]);
    }
    Partial::from_bytes(&parts[0]).unwrap()
}

fn agrees(of: SliceOf, pages: &[PageNumber], cuts: Vec<usize>, known: bool, seed: u64) {
    let parts = parts(of, pages, cuts, known);
    let whole = merged_at_random(parts, &mut Random::new(seed));
    assert_eq!(whole.references(), pages.len() as u64);
    let expected = plain(of, pages).map_err(PartialError::Curve);
    assert_eq!(whole.curve(), expected, "{of}");
}

fn some_of(pages: usize, cuts: &[prop::sample::Index]) -> Vec<usize> {
    cuts.iter().map(|cut| cut.index(pages + 1)).collect()
}

proptest! {
    #[test]
    fn slices_of_any_stream_give_the_exact_curve(
        pages in prop_oneof![
            prop::collection::vec(0_u64..40, 0..600),
            prop::collection::vec(any::<u64>(), 0..60),
            prop::collection::vec((0_u64..900).prop_map(|page| page << 40), 0..3_000),
        ],
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..9),
        known in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let cuts = some_of(pages.len(), &cuts);
        agrees(SliceOf::Lru, &batch_of(pages), cuts, known, seed);
    }

    #[test]
    fn slices_of_any_stream_give_the_curve_of_shards(
        pages in prop::collection::vec(0_u64..300, 0..9_000),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..9),
        rate in prop_oneof![Just(1.0), 0.01_f64..1.0],
        seed in any::<u64>(),
    ) {
        let cuts = some_of(pages.len(), &cuts);
        agrees(shards(rate, seed), &batch_of(pages), cuts, true, seed);
    }

    #[test]
    fn slices_of_any_stream_give_the_curve_of_shards_of_a_fixed_size(
        pages in prop::collection::vec(0_u64..3_000, 0..9_000),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..9),
        max_samples in 1_usize..40,
        known in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let cuts = some_of(pages.len(), &cuts);
        agrees(shards_max(max_samples, seed), &batch_of(pages), cuts, known, seed);
    }
}

#[test]
fn slices_of_long_streams_give_the_curves_of_all_estimators() {
    let mut random = Random::new(5);
    // Several bursts long, and with pages enough for a fixed size to end its bursts in the middle of a slice.
    let skewed = zipf(60_000, 0.7, 1).take(700_000);
    let even = uniform(40_000, 2).take(300_000);
    let pages = batch_of(skewed.chain(even));
    for of in [
        SliceOf::Lru,
        shards(0.01, 3),
        shards(0.3, 4),
        shards(0.002, 5),
        shards(0.0005, 6),
        shards_max(64, 7),
        shards_max(1_000, 8),
        shards_max(100_000, 9),
    ] {
        let places = pages.len() as f64;
        let cuts = (0..7).map(|_| (random.share() * places) as usize);
        agrees(of, &pages, cuts.collect(), true, 11);
    }
}

#[test]
fn a_partial_state_is_small() {
    let pages = batch_of(zipf(200_000, 0.8, 1).take(2_000_000));
    let size = |of| mapped(of, Some(10_000_000), &pages, 1 << 14).len() as f64;
    let rate = size(shards(0.01, 3)) / (8.0 * pages.len() as f64);
    assert!(rate < 0.01 + 0.01 + 0.01, "{rate}");
    // What the first 100 000 pages take is kept whole.
    let of_fixed_size = size(shards_max(100, 3)) / (8.0 * pages.len() as f64);
    assert!(of_fixed_size < 0.05, "{of_fixed_size}");
    let distinct = 200_000.0;
    assert!(size(SliceOf::Lru) <= 24.0 * distinct + 88.0);
}

#[test]
fn the_next_slice_is_kept_below_what_the_first_knows() {
    let pages = batch_of(uniform(200_000, 1).take(400_000));
    let of = shards_max(100, 3);
    let halves = parts(of, &pages, vec![200_000], false);
    let together = merged(&halves);
    assert!(together.len() < halves[0].len() + halves[1].len() / 20);
}

#[test]
fn what_does_not_follow_is_refused() {
    let pages = batch_of(0..1_000);
    let of = shards(0.5, 1);
    let slice = |of, start| mapped(of, start, &pages, 100);
    let append = |first: &[u8], next: &[u8]| {
        let mut first = Partial::from_bytes(first).unwrap();
        first.append(Partial::parse(next).unwrap()).unwrap_err()
    };
    let first = slice(of, Some(0));
    let error = append(&first, &slice(of, Some(3_000)));
    assert_eq!(
        error.to_string(),
        "it begins at reference 3000 of the trace, and those before it end at 1000: a slice is missing, or they are out of order"
    );
    for other in [
        shards(0.4, 1),
        shards(0.5, 2),
        SliceOf::Lru,
        shards_max(9, 1),
    ] {
        let error = append(&first, &slice(other, Some(1_000)));
        assert!(matches!(error, PartialError::Different { .. }), "{error}");
    }
    let mut large = Partial::new(of, PageSize::new(8192).unwrap(), Some(1_000)).unwrap();
    large.observe(&pages);
    assert_eq!(
        append(&first, &large.into_bytes()).to_string(),
        "the first is of SHARDS at rate 1/2, seed 1, pages of 4096 bytes, this one of SHARDS at rate 1/2, seed 1, \
         pages of 8192 bytes: they are of different curves"
    );
    let (known, unknown) = (slice(SliceOf::Lru, Some(1_000)), slice(SliceOf::Lru, None));
    assert_eq!(append(&unknown, &known), PartialError::StartOfSome);
    assert_eq!(append(&known, &unknown), PartialError::StartOfSome);
    let without_first = Partial::from_bytes(&known).unwrap().curve();
    assert_eq!(
        without_first,
        Err(PartialError::FirstMissing { start: 1_000 })
    );
    let needed = Partial::new(shards(0.01, 1), PageSize::default(), None);
    assert_eq!(
        needed.err(),
        Some(PartialError::NeedsStart {
            of: shards(0.01, 1)
        })
    );
    for of in [shards(1.0, 1), shards(0.0005, 1), shards_max(9, 1)] {
        assert!(Partial::new(of, PageSize::default(), None).is_ok());
    }
}

/// Corrects the checksum of changed bytes.
fn summed(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - 8;
    let sum = xxhash_rust::xxh3::xxh3_64(&bytes[..end]);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

#[test]
fn bytes_that_were_changed_anywhere_are_refused() {
    for of in [SliceOf::Lru, shards(0.5, 1), shards_max(3, 1)] {
        let bytes = mapped(of, Some(5), &batch_of((0..9).chain(3..9)), 4);
        assert!(Partial::from_bytes(&bytes).is_ok());
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x40;
            assert!(Partial::from_bytes(&changed).is_err(), "byte {at} of {of}");
            assert!(Partial::from_bytes(&bytes[..at]).is_err(), "up to {at}");
        }
        let longer = [&bytes[..], &[0; 8]].concat();
        assert!(matches!(
            Partial::from_bytes(&longer),
            Err(PartialError::Length { .. })
        ));
    }
    let mut later = mapped(SliceOf::Lru, None, &[], 1);
    later[8] = 2;
    assert_eq!(
        Partial::from_bytes(&later).err(),
        Some(PartialError::Version { version: 2 })
    );
}

#[test]
fn contents_that_are_of_no_slice_are_refused() {
    let changed = |of, at: usize, value: u64| {
        let mut bytes = mapped(of, Some(0), &batch_of((0..40).chain(0..40)), 1 << 10);
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        Partial::from_bytes(&summed(bytes)).unwrap_err().to_string()
    };
    for (of, at, value, expected) in [
        (SliceOf::Lru, 16, 1, "exact LRU takes no options"),
        (SliceOf::Lru, 12, 3, "its estimator is unknown"),
        (SliceOf::Lru, 32, 3, "its page size is no power of two"),
        (SliceOf::Lru, 48, 81, "distances are not those"),
        (SliceOf::Lru, 80, u64::MAX, "distances are not those"),
        // The first uses come after 40 distances, the last uses after these.
        (SliceOf::Lru, 80 + 8 * 40, 1, "not of the same pages"),
        (SliceOf::Lru, 80 + 8 * 80, 1, "not of the same pages"),
        (SliceOf::Lru, 80 + 8 * 80, 99, "not of the same pages"),
        (shards(0.5, 1), 48, 1, "its bursts are not those"),
        (shards(0.5, 1), 48, u64::MAX, "at most 2^63"),
        (shards(0.5, 1), 40, 70_000, "its bursts are not those"),
        (shards(0.5, 1), 80, u64::MAX, "not in the sample"),
        (shards(0.5, 1), 16, 0, "sampling rate must be above 0"),
        (
            shards(0.5, 1),
            16,
            u64::MAX,
            "sampling rate must be above 0",
        ),
        (shards(0.0005, 1), 64, 1, "should have"),
        (shards_max(5, 1), 48, 3, "more samples than references"),
        (shards_max(5, 1), 16, 0, "maximum number of pages"),
        (shards_max(5, 1), 48, 90, "that bursts may need"),
    ] {
        let (at, value) = match at {
            // Half a word: the version stays.
            12 => (8, 1 | value << 32),
            at => (at, value),
        };
        let found = changed(of, at, value);
        assert!(found.contains(expected), "{of}, {at}: {found}");
    }
}

#[test]
fn checks_are_made_every_million_pages_or_samples_and_end_a_merge_and_a_curve() {
    let pages = batch_of((0..2_500_000).map(|page| page * 7));
    let stopped = || PartialError::Invalid("stopped");
    // The last of so many checks fails.
    let after = |checks: usize| {
        let count = Cell::new(0);
        move || {
            count.set(count.get() + 1);
            if count.get() == checks {
                Err(stopped())
            } else {
                Ok(())
            }
        }
    };
    // Lists are checked and touched twice; samples are added at once, or kept; bursts and samples make a curve.
    for (of, of_merge, of_curve) in [
        (SliceOf::Lru, 12, 1),
        (shards(1.0, 1), 1, 3),
        (shards_max(9_000, 1), 2, 2),
    ] {
        let part = mapped(of, Some(0), &pages, 100_000);
        for checks in [1, of_merge] {
            let error = Partial::from_bytes_checked(&part, after(checks)).unwrap_err();
            assert_eq!(error, stopped(), "{of}, {checks}");
        }
        let whole = Partial::from_bytes_checked(&part, after(of_merge + 4)).unwrap();
        for checks in [1, of_curve] {
            let error = whole.curve_checked(after(checks)).unwrap_err();
            assert_eq!(error, stopped(), "{of}, {checks}");
        }
        assert_eq!(whole.curve(), whole.curve_checked(after(9)), "{of}");
    }
}
