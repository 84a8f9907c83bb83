//! Exact LRU over a slice of a stream, to be merged with the slices before and after it.
//!
//! Within a slice all distances are known but those of the pages' first uses in it. Later slices do not change a
//! distance, so they are counted at once. The first uses are kept in order: all pages of the slice that were used before one
//! of them are the first uses before it, so touching the first uses alone, on a stack of what precedes the slice, yields
//! their distances in the whole stream. The order of last uses is the stack that the next slice is then put on.
//!
//! Source: [Niu12] (PARDA), whose processors exchange the same lists.
//! Cost of a merge: three accesses to a stack for each distinct page of the slice that is appended. The state of a slice has 16 to 24 bytes for
//! each of its distinct pages.

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber};

use crate::curve::lru::{Distances, LruStack};
use crate::partial::{Contents, Refusal, Slice};
use crate::parts::check::{Check, PIECE, Stopped};
use crate::parts::last_use::NEVER;

/// The stack has no more than 2^32 pages.
const PAGES_MAX: u64 = 1 << 31;

/// What is known of the references of a slice.
#[derive(Debug, Default)]
pub(crate) struct LruSlice {
    stack: LruStack,
    /// Of all references so far; those of `first_uses` count as first references.
    distances: Distances,
    first_uses: Vec<PageNumber>,
    /// Distances of the current block; a work buffer.
    block: Vec<u32>,
}

impl LruSlice {
    /// Moves pages to the top of the stack; `each` gets every block of them with their distances.
    fn touch(&mut self, mut pages: &[PageNumber], each: impl Fn(&mut Self, &[PageNumber], &[u32])) {
        let mut distances = std::mem::take(&mut self.block);
        while !pages.is_empty() {
            let rest = self.stack.touch_block(pages, &mut distances);
            each(self, &pages[..pages.len() - rest.len()], &distances);
            pages = rest;
        }
        self.block = distances;
    }

    fn count(&mut self, pages: &[PageNumber]) {
        self.touch(pages, |this, pages, distances| {
            this.distances.count(distances);
            let uses = pages.iter().zip(distances);
            let firsts = uses.filter(|&(_, &distance)| distance == NEVER);
            this.first_uses.extend(firsts.map(|(&page, _)| page));
        });
    }
}

/// Whether both lists are of the same pages, each once.
fn are_of_the_same_pages(
    first_uses: &[PageNumber],
    last_uses: &[PageNumber],
    check: Check,
) -> Result<bool, Stopped> {
    let mut stack = LruStack::new();
    if first_uses.len() != last_uses.len() {
        return Ok(false);
    }
    for pages in last_uses.chunks(PIECE) {
        check()?;
        if !pages.iter().all(|&page| stack.touch(page).is_none()) {
            return Ok(false);
        }
    }
    // A page has at least as many others before it as precede it in the list, unless it is there twice.
    let mut place = 0..;
    for pages in first_uses.chunks(PIECE) {
        check()?;
        // The pages first: a place must not be lost at their end.
        let mut placed = pages.iter().zip(place.by_ref());
        if !placed.all(|(&page, place)| stack.touch(page).is_some_and(|distance| distance >= place))
        {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Slice for LruSlice {
    fn observe(&mut self, _: Option<u64>, pages: &[PageNumber]) {
        self.count(pages);
    }

    fn append(&mut self, _: Option<u64>, next: Contents, check: Check) -> Result<(), Refusal> {
        let (reuses, [first_uses, last_uses]) = (next.numbers, next.pages);
        let counted = reuses
            .iter()
            .try_fold(first_uses.len() as u64, |sum, &reuses| {
                sum.checked_add(reuses)
            });
        if counted != Some(next.references) {
            return Err(Refusal::Invalid(
                "its distances are not those of all its references",
            ));
        }
        if reuses.len() > first_uses.len() {
            return Err(Refusal::Invalid(
                "a distance exceeds the number of its pages",
            ));
        }
        if self.stack.distinct() + first_uses.len() as u64 > PAGES_MAX {
            return Err(Refusal::Invalid("there are more than 2^31 distinct pages"));
        }
        if !are_of_the_same_pages(&first_uses, &last_uses, check)? {
            return Err(Refusal::Invalid(
                "its first uses and its last uses are not of the same pages",
            ));
        }
        self.distances.add_reuses(&reuses);
        for pages in first_uses.chunks(PIECE) {
            check()?;
            self.count(pages);
        }
        for pages in last_uses.chunks(PIECE) {
            check()?;
            self.touch(pages, |_, _, _| ());
        }
        Ok(())
    }

    fn into_contents(self: Box<Self>) -> Contents {
        Contents {
            references: self.distances.references,
            pages: [self.first_uses, self.stack.in_order()],
            numbers: self.distances.reuses,
        }
    }

    fn curve(&self, check: Check) -> Result<Result<MissRatioCurve, CurveError>, Stopped> {
        check()?;
        Ok(self.distances.curve())
    }
}
