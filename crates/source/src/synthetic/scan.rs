//! Pages in turn: loops, steps and arrays, and their exact curves.
//!
//! When a scan of s pages returns to a page, exactly the s - 1 other pages lie
//! between. Where a step of s pages takes over from earlier ones, let j be the
//! last that reached page p, of s_j > p pages. Since its last touch of p there
//! came p + 1 .. s_j - 1, then only pages below p, all of which this step's first round has met
//! again: s_j - 1 other pages. So every reuse distance is the size of a scan less
//! one, and a memory of c pages hits iff c is at least that scan's size.

use std::collections::BTreeMap;

use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount};

use super::{check_pages, no_curve, refusal};
use crate::SourceError;

/// Pages in turn, with a number of rounds over each size; the last size is repeated indefinitely.
#[derive(Debug)]
pub(super) struct Scan {
    sizes: Vec<PageCount>,
    rounds: u64,
    step: usize,
    round: u64,
    page: u64,
}

impl Scan {
    /// Scans `sizes`, of which there must be at least one, and none may be 0.
    pub(super) fn new(sizes: Vec<PageCount>, rounds: u64) -> Self {
        Self {
            sizes,
            rounds,
            step: 0,
            round: 0,
            page: 0,
        }
    }

    /// The round over the present size to which the next page belongs, from 0.
    pub(super) fn round(&self) -> u64 {
        self.round
    }

    #[inline]
    pub(super) fn next_page(&mut self) -> u64 {
        let page = self.page;
        self.page += 1;
        if self.page == self.sizes[self.step].0 {
            self.page = 0;
            self.round += 1;
            if self.round == self.rounds && self.step + 1 < self.sizes.len() {
                self.round = 0;
                self.step += 1;
            }
        }
        page
    }
}

/// Returns the curve of an infinite loop over `pages`: all misses below that size, none from it on.
///
/// The curve's number of references is `u64::MAX`: the limit of ever longer traces.
///
/// # Errors
///
/// [`SourceError::Workload`] without pages, or with more than 2^48.
pub fn loop_curve(pages: PageCount) -> Result<MissRatioCurve, SourceError> {
    check_pages(pages)?;
    curve_of([(pages, u64::MAX)].into(), u64::MAX)
}

/// Returns the curve of `references` references of a loop over `pages`.
pub(super) fn finite_loop_curve(
    pages: PageCount,
    references: u64,
) -> Result<MissRatioCurve, SourceError> {
    curve_of(
        [(pages, references.saturating_sub(pages.0))].into(),
        references,
    )
}

/// Returns the curve of the step benchmark: `rounds` scans of each of `sizes`, in order.
///
/// # Errors
///
/// [`SourceError::Workload`] if a size is 0 or above 2^48, if there is no size or no
/// round, or if there are more than 2^64 references.
pub fn steps_curve(sizes: &[PageCount], rounds: u64) -> Result<MissRatioCurve, SourceError> {
    sizes.iter().try_for_each(|&size| check_pages(size))?;
    let mut references = 0u64;
    let mut hits = BTreeMap::new();
    for (step, &size) in sizes.iter().enumerate() {
        let scanned = size.0.checked_mul(rounds);
        references = scanned
            .and_then(|scanned| references.checked_add(scanned))
            .ok_or_else(|| refusal("there cannot be more than 2^64 references"))?;
        if rounds == 0 {
            continue;
        }
        *hits.entry(size).or_default() += size.0 * (rounds - 1);
        // The first round: pages below `met` were touched by an earlier step.
        let mut met = 0;
        for earlier in sizes[..step].iter().rev() {
            let reached = earlier.0.min(size.0);
            if reached > met {
                *hits.entry(*earlier).or_default() += reached - met;
                met = reached;
            }
        }
    }
    curve_of(hits, references)
}

/// Creates a curve from the numbers of references that hit from each size on.
fn curve_of(
    hits: BTreeMap<PageCount, u64>,
    references: u64,
) -> Result<MissRatioCurve, SourceError> {
    let mut misses = references;
    let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
    for (size, hits) in hits {
        misses -= hits;
        points.push(CurvePoint::exact(size, misses as f64 / references as f64));
    }
    MissRatioCurve::new(points, references).map_err(no_curve)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endless_loop_misses_always_or_never() {
        let curve = loop_curve(PageCount(100)).unwrap();
        let ratios = [0, 99, 100, 101].map(|size| curve.miss_ratio(PageCount(size)));
        assert_eq!(ratios, [1.0, 1.0, 0.0, 0.0]);
        assert!(loop_curve(PageCount(0)).is_err());
    }

    #[test]
    fn a_step_down_hits_from_the_size_of_the_step_before() {
        // 0 1 2 | 0 1 2 | 0 | 0: pages 1 and 2 never return, page 0 after 2 others, then after 0.
        let curve = steps_curve(&[PageCount(3), PageCount(1)], 2).unwrap();
        let ratios = [0, 1, 2, 3].map(|size| curve.miss_ratio(PageCount(size)));
        assert_eq!(ratios, [1.0, 7.0 / 8.0, 7.0 / 8.0, 3.0 / 8.0]);
        assert_eq!(curve.references(), 8);
    }
}
