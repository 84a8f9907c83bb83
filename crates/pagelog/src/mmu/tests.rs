//! Known answers, and a naive twin made of lists.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use proptest::prelude::*;

/// References in memory.
struct MemoryReferences {
    references: Vec<(u64, AccessKind)>,
    batch: usize,
}

impl Source for MemoryReferences {
    type Error = std::convert::Infallible;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, Self::Error> {
        batch.advance();
        let count = self.references.len().min(self.batch);
        for (page, kind) in self.references.drain(..count) {
            batch.push(PageNumber(page), kind);
        }
        Ok(!batch.is_empty())
    }
}

fn records_of(references: &[(u64, AccessKind)], config: &Config) -> Vec<Record> {
    let source = MemoryReferences {
        references: references.to_vec(),
        batch: 100,
    };
    let mut log = EmulatedRecords::new(source, config).unwrap();
    let (mut all, mut batch) = (Vec::new(), Vec::new());
    while log.next_batch(&mut batch).unwrap() {
        assert!(batch.len() <= BATCH_RECORDS);
        all.append(&mut batch);
    }
    all
}

fn walks_of(references: &[(u64, AccessKind)], config: &Config) -> Vec<Walk> {
    let records = records_of(references, config);
    let walk = |record| match record {
        Record::Walk(walk) => Some(walk),
        _ => None,
    };
    records.into_iter().filter_map(walk).collect()
}

const R: AccessKind = AccessKind::Read;
const W: AccessKind = AccessKind::Write;

#[test]
fn a_write_to_a_page_that_was_read_walks_again_and_sets_the_dirty_flag_once() {
    let walks = walks_of(
        &[(7, R), (7, R), (7, W), (7, W), (7, R)],
        &Config::default(),
    );
    let seen: Vec<_> = walks
        .iter()
        .map(|walk| {
            (
                walk.step_instructions,
                walk.write,
                walk.sets_accessed,
                walk.sets_dirty,
            )
        })
        .collect();
    assert_eq!(seen, [(1, false, true, false), (2, true, false, true)]);
}

#[test]
fn pages_of_one_set_drive_each_other_out_and_others_do_not() {
    let tlb = TlbShape::new(8, 2).unwrap();
    let config = Config {
        tlb,
        ..Config::default()
    };
    // Four sets: pages 0, 4, 8 share one of two ways.
    let thrash: Vec<_> = [0, 4, 8]
        .repeat(10)
        .into_iter()
        .map(|page| (page, R))
        .collect();
    assert_eq!(walks_of(&thrash, &config).len(), 30);
    let spread: Vec<_> = [0, 1, 2, 4, 5]
        .repeat(10)
        .into_iter()
        .map(|page| (page, R))
        .collect();
    assert_eq!(walks_of(&spread, &config).len(), 5);
}

#[test]
fn an_interval_ends_with_clock_and_count_and_forgets_what_was_there() {
    let config = Config {
        interval_references: NonZeroU64::new(3),
        ..Config::default()
    };
    let walk = |sets_dirty| Walk {
        vcpu: 0,
        frame: PageNumber(0),
        step_instructions: 1,
        write: sets_dirty,
        fetch: false,
        sets_accessed: true,
        sets_dirty,
    };
    let end = |instructions, count| {
        let vcpu = 0;
        [
            Record::Clock { vcpu, instructions },
            Record::Accesses { vcpu, count },
        ]
    };
    let expected = [
        &[Record::Walk(walk(true))][..],
        &end(3, 3),
        &[Record::Interval { number: 0 }, Record::Walk(walk(false))],
        &end(5, 2),
    ];
    let references = [(99, W), (99, W), (99, R), (99, R), (99, R)];
    assert_eq!(records_of(&references, &config), expected.concat());
}

#[test]
fn a_walk_after_a_long_time_stands_behind_a_clock() {
    let mut references = vec![(1, R); 1 << 20];
    references.extend([(2, R), (3, R)]);
    let records = records_of(&references, &Config::default());
    let steps: Vec<_> = records
        .iter()
        .map(|record| match record {
            Record::Walk(walk) => (u64::from(walk.step_instructions), "walk"),
            Record::Clock { instructions, .. } => (*instructions, "clock"),
            Record::Accesses { count, .. } => (*count, "count"),
            _ => (0, "other"),
        })
        .collect();
    let long = (1 << 20) + 2;
    // The second walk comes 2^20 instructions after the first, one more than the field can represent.
    let expected = [
        (1, "walk"),
        (long - 1, "clock"),
        (0, "walk"),
        (1, "walk"),
        (long, "clock"),
        (long, "count"),
    ];
    assert_eq!(steps, expected);
}

#[test]
fn a_filter_that_cannot_be_is_refused() {
    let source = MemoryReferences {
        references: Vec::new(),
        batch: 1,
    };
    let config = Config {
        filter_pages: Some(0),
        ..Config::default()
    };
    let error = EmulatedRecords::new(source, &config).err().unwrap();
    assert!(matches!(error, PageLogError::Description { .. }));
}

/// A TLB as a list of (page, dirty) for each set, the last used last.
#[derive(Default)]
struct Lists(BTreeMap<u64, Vec<(u64, bool)>>);

impl Lists {
    fn take(&mut self, page: u64, sets: u64) -> Option<bool> {
        let set = self.0.entry(page % sets).or_default();
        let place = set.iter().position(|entry| entry.0 == page)?;
        Some(set.remove(place).1)
    }

    fn put(&mut self, page: u64, dirty: bool, shape: TlbShape) {
        let set = self.0.entry(page % u64::from(shape.sets())).or_default();
        set.push((page, dirty));
        if set.len() > shape.ways() as usize {
            set.remove(0);
        }
    }
}

/// The records by the same rules, with lists and sets.
fn naive(references: &[(u64, AccessKind)], config: &Config) -> Vec<Record> {
    let vcpu = 0;
    let (mut first, mut second) = (Lists::default(), Lists::default());
    let (mut accessed, mut dirty) = (BTreeSet::new(), BTreeSet::new());
    let mut frames: Vec<u64> = Vec::new();
    let mut filter: Vec<u64> = Vec::new();
    let mut records = Vec::new();
    let (mut told, mut counted, mut intervals) = (0, 0, 0);
    for (index, &(page, kind)) in references.iter().enumerate() {
        let now = index as u64 + 1;
        let write = kind == W;
        let mut frame_of = |page: u64| {
            let place = frames.iter().position(|&there| there == page);
            let place = place.unwrap_or_else(|| {
                frames.push(page);
                frames.len() - 1
            });
            PageNumber(place as u64)
        };
        if let Some(pages) = config.filter_pages {
            let place = filter.iter().position(|&there| there == page);
            filter.retain(|&there| there != page);
            filter.push(page);
            if place.is_none() {
                let frame = frame_of(page);
                records.push(Record::Enter { vcpu, frame, write });
                if filter.len() > pages as usize {
                    let frame = frame_of(filter.remove(0));
                    records.push(Record::Leave { vcpu, frame });
                }
            }
        }
        let held = first.take(page, config.tlb.sets().into());
        let serves = |held: Option<bool>| held.is_some_and(|dirty| dirty || !write);
        if serves(held) {
            first.put(page, held.unwrap(), config.tlb);
        } else {
            let below = config.tlb2.and_then(|tlb2| {
                let held = second.take(page, tlb2.sets().into());
                if serves(held) {
                    second.put(page, held.unwrap(), tlb2);
                }
                held
            });
            if serves(below) {
                first.put(page, below.unwrap(), config.tlb);
            } else {
                first.put(page, write, config.tlb);
                if let Some(tlb2) = config.tlb2 {
                    second.put(page, write, tlb2);
                }
                records.push(Record::Walk(Walk {
                    vcpu,
                    frame: frame_of(page),
                    step_instructions: u32::try_from(now - told).unwrap(),
                    write,
                    fetch: false,
                    sets_accessed: accessed.insert(page),
                    sets_dirty: write && dirty.insert(page),
                }));
                told = now;
            }
        }
        let last = index + 1 == references.len();
        let ends = config
            .interval_references
            .is_some_and(|n| now.is_multiple_of(n.get()));
        for _ in 0..usize::from(ends) + usize::from(last) {
            let count = now - counted;
            records.push(Record::Clock {
                vcpu,
                instructions: now,
            });
            records.push(Record::Accesses { vcpu, count });
            (told, counted) = (now, now);
            if ends && intervals < now / config.interval_references.unwrap() {
                records.push(Record::Interval { number: intervals });
                intervals += 1;
                (first, second) = (Lists::default(), Lists::default());
                accessed.clear();
                dirty.clear();
            }
        }
    }
    records
}

proptest! {
    #[test]
    fn agrees_with_a_model_of_lists(
        references in prop::collection::vec((0u64..40, prop::sample::select(vec![R, W, AccessKind::Unknown])), 1..400),
        tlb in prop::sample::select(vec!["4x1", "4x4", "8x2", "6x3"]),
        tlb2 in prop::option::of(prop::sample::select(vec!["8x4", "16x2", "12x12"])),
        filter_pages in prop::option::of(1u32..20),
        interval in prop::option::of(1u64..90),
    ) {
        let config = Config {
            tlb: tlb.parse().unwrap(),
            tlb2: tlb2.map(|tlb2| tlb2.parse().unwrap()),
            filter_pages,
            interval_references: interval.and_then(NonZeroU64::new),
        };
        prop_assert_eq!(records_of(&references, &config), naive(&references, &config));
    }
}
