//! AET with a hash table of last uses and a histogram with 256 buckets an octave.

use hashbrown::HashMap;
use plimsoll_estimator::Estimator;
use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber, Whole as _};

use super::Hits;

const BUCKETS: u64 = 256;

/// Every reference.
#[derive(Debug, Clone, Default)]
pub(crate) struct PlainAet {
    last: HashMap<u64, u64>,
    times: Vec<u64>,
    references: u64,
}

fn bucket_of(time: u64) -> usize {
    let shift = time.max(1).ilog2().saturating_sub(8);
    usize::try_from(u64::from(shift) * BUCKETS + (time >> shift)).unwrap_or(usize::MAX)
}

fn floor_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    match (bucket / BUCKETS).checked_sub(1) {
        None => bucket,
        Some(shift) => (bucket % BUCKETS + BUCKETS) << shift,
    }
}

impl PlainAet {
    pub(crate) fn new() -> Self {
        Self::default()
    }
}

impl Estimator for PlainAet {
    fn observe(&mut self, pages: &[PageNumber]) {
        for page in pages {
            if let Some(before) = self.last.insert(page.0, self.references) {
                let bucket = bucket_of(self.references - before);
                if bucket >= self.times.len() {
                    self.times.resize(bucket + 1, 0);
                }
                self.times[bucket] += 1;
            }
            self.references += 1;
        }
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let mut hits = Hits::default();
        let total = self.references as f64;
        let (mut area, mut longer, mut before) = (0.0, total, 0);
        for (bucket, &count) in self.times.iter().enumerate() {
            let time = floor_of(bucket);
            area += longer / total * (time - before) as f64;
            before = time;
            if count > 0 {
                hits.add(usize::whole(area.ceil()).max(1), count as f64);
                longer -= count as f64;
            }
        }
        hits.curve(total)
    }

    fn memory_bytes(&self) -> usize {
        self.last.allocation_size() + self.times.capacity() * 8
    }
}
