//! Counts of references by the position of their page in cache and ghost list, and the curve of these counts.

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount};

use super::{GhostError, GhostOptions, as_index, check_pages, filled, too_large};

/// References counted by the position of their page in cache and ghost list.
///
/// The sizes distinguished are the *borders*: `direct`, `direct + segment`, .. `direct + ghost`.
#[derive(Debug, Clone)]
pub(super) struct Counts {
    pub(super) options: GhostOptions,
    /// Found at a depth below `direct`: hits at every border.
    pub(super) hits: u64,
    /// Found in a segment: hits from the border at its end on.
    pub(super) found: Vec<u64>,
    /// Found beyond the last border, when the cache had more than `direct` pages.
    pub(super) beyond: u64,
    /// Not found before any page was dropped: misses at every size.
    pub(super) first: u64,
    /// Not found, by the number of borders covered by the list: misses at these, unknown at the others.
    pub(super) lost: Vec<u64>,
}

impl Counts {
    pub(super) fn new(options: GhostOptions) -> Result<Self, GhostError> {
        let GhostOptions {
            direct,
            ghost,
            segment,
        } = options;
        if ghost.0 == 0 {
            return Err(GhostError::NoGhost);
        }
        if segment.0 == 0 {
            return Err(GhostError::NoSegment);
        }
        let pages = direct.0.saturating_add(ghost.0);
        check_pages(ghost.0)?;
        if direct.0.checked_add(ghost.0).is_none() {
            return Err(too_large(pages));
        }
        let segments = as_index(ghost.0.div_ceil(segment.0));
        Ok(Self {
            options,
            hits: 0,
            found: filled(0, segments, pages)?,
            beyond: 0,
            first: 0,
            lost: filled(0, segments + 2, pages)?,
        })
    }

    /// Counts a page that was found with `depth` others before it.
    #[inline]
    pub(super) fn found(&mut self, depth: u64) {
        let GhostOptions { direct, ghost, .. } = self.options;
        match depth.checked_sub(direct.0) {
            None => self.hits += 1,
            Some(depth) if depth < ghost.0 => {
                let segment = self.segment_of(direct.0 + depth);
                self.found[segment] += 1;
            }
            Some(_) => self.beyond += 1,
        }
    }

    /// The segment of a depth: the first or the last one for a depth outside the list.
    pub(super) fn segment_of(&self, depth: u64) -> usize {
        let GhostOptions {
            direct, segment, ..
        } = self.options;
        let depth = depth.saturating_sub(direct.0);
        as_index(depth / segment.0).min(self.found.len() - 1)
    }

    /// Counts a page that was not found among the `reach` most recent ones.
    #[inline]
    pub(super) fn not_found(&mut self, reach: u64, has_dropped: bool) {
        if has_dropped {
            let borders = self.borders_within(reach);
            self.lost[borders] += 1;
        } else {
            self.first += 1;
        }
    }

    /// Number of borders that are at most `size`.
    pub(super) fn borders_within(&self, size: u64) -> usize {
        let GhostOptions {
            direct,
            ghost,
            segment,
        } = self.options;
        match size.checked_sub(direct.0) {
            None => 0,
            Some(depth) if depth >= ghost.0 => self.found.len() + 1,
            Some(depth) => as_index(depth / segment.0) + 1,
        }
    }

    pub(super) fn references(&self) -> u64 {
        let found: u64 = self.found.iter().sum();
        let lost: u64 = self.lost.iter().sum();
        self.hits + found + self.beyond + self.first + lost
    }

    pub(super) fn segment_hits(&self) -> &[u64] {
        &self.found
    }

    pub(super) fn clear(&mut self) {
        self.hits = 0;
        self.found.fill(0);
        self.beyond = 0;
        self.first = 0;
        self.lost.fill(0);
    }

    pub(super) fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        let references = self.references();
        let ratio = |misses: u64| misses as f64 / references as f64;
        // Misses at a border: the possible ones, and of these the certain ones.
        let mut misses = references - self.hits;
        let mut least = misses - self.lost[0];
        let floor = ratio(self.first);
        let direct = self.options.direct.0;
        let end = direct + self.options.ghost.0;
        let at = |size, misses, low| point(size, ratio(misses), low, ratio(misses));
        let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
        if direct > 1 {
            points.push(point(1, 1.0, ratio(least), 1.0));
        }
        for (segment, &found) in self.found.iter().enumerate() {
            let border = direct + segment as u64 * self.options.segment.0;
            let next = border.saturating_add(self.options.segment.0).min(end);
            let next_least = least - found - self.lost[segment + 1];
            push(&mut points, at(border, misses, ratio(least)));
            if next > border + 1 {
                push(&mut points, at(border + 1, misses, ratio(next_least)));
            }
            misses -= found;
            least = next_least;
        }
        push(&mut points, at(end, misses, ratio(least)));
        push(&mut points, at(end.saturating_add(1), misses, floor));
        MissRatioCurve::new(points, references)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        (self.found.capacity() + self.lost.capacity()) * size_of::<u64>()
    }
}

pub(super) fn point(size: u64, miss_ratio: f64, low: f64, high: f64) -> CurvePoint {
    CurvePoint {
        size: PageCount(size),
        miss_ratio,
        low,
        high,
        misses: None,
    }
}

/// Appends a point, unless the last one has the same size and is more precise (a memory of no pages).
pub(super) fn push(points: &mut Vec<CurvePoint>, point: CurvePoint) {
    if points.last().is_none_or(|last| last.size < point.size) {
        points.push(point);
    }
}
