//! Exact LRU offline, by counting inversions in a merge sort.
//!
//! Of the references between two to a page, those that are not the first to their own page in
//! between have their previous one there too. So the distance is the time between, less
//! the earlier references whose previous one lies after this page's: inversions among previous times.

use hashbrown::HashMap;
use plimsoll_estimator::Estimator;
use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use super::Hits;

/// Keeps the whole trace and counts at the end.
#[derive(Debug, Clone, Default)]
pub(crate) struct InversionLru {
    pages: Vec<PageNumber>,
}

/// A reference with a previous one to its page.
#[derive(Debug, Clone, Copy, Default)]
struct Reuse {
    previous: u32,
    time: u32,
    /// Earlier reuses with a later previous reference.
    inversions: u32,
}

impl InversionLru {
    pub(crate) fn new() -> Self {
        Self::default()
    }
}

impl Estimator for InversionLru {
    fn observe(&mut self, pages: &[PageNumber]) {
        self.pages.extend_from_slice(pages);
    }

    fn curve(&mut self) -> Result<MissRatioCurve, CurveError> {
        let mut last = HashMap::new();
        let mut reuses: Vec<_> = (0..)
            .zip(&self.pages)
            .filter_map(|(time, page)| {
                let previous = last.insert(page.0, time)?;
                Some(Reuse {
                    previous,
                    time,
                    inversions: 0,
                })
            })
            .collect();
        let mut spare = vec![Reuse::default(); reuses.len()];
        count(&mut reuses, &mut spare);
        let mut hits = Hits::default();
        for reuse in &reuses {
            let between = reuse.time - reuse.previous - 1;
            hits.add((between - reuse.inversions) as usize + 1, 1.0);
        }
        hits.curve(self.pages.len() as f64)
    }

    fn memory_bytes(&self) -> usize {
        self.pages.capacity() * 8
    }
}

/// Sorts by previous time, rising, and counts for each reuse those before it that belong behind it.
fn count(reuses: &mut [Reuse], spare: &mut [Reuse]) {
    if reuses.len() < 2 {
        return;
    }
    let middle = reuses.len() / 2;
    {
        let (left, right) = reuses.split_at_mut(middle);
        let (spare_left, spare_right) = spare.split_at_mut(middle);
        count(left, spare_left);
        count(right, spare_right);
    }
    let (left, right) = reuses.split_at(middle);
    let (mut l, mut r) = (0, 0);
    for slot in &mut *spare {
        if r == right.len() || (l < left.len() && left[l].previous < right[r].previous) {
            *slot = left[l];
            l += 1;
        } else {
            *slot = right[r];
            // No vector here is as long as 2^32.
            slot.inversions += u32::try_from(left.len() - l).unwrap_or(u32::MAX);
            r += 1;
        }
    }
    reuses.copy_from_slice(spare);
}
