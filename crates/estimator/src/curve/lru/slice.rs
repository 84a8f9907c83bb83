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
use crate::partial::{Contents, Slice};
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
fn are_of_the_same_pages(first_uses: &[PageNumber], last_uses: &[PageNumber]) -> bool {
    let mut stack = LruStack::new();
    let new = |&page: &PageNumber| stack.touch(page).is_none();
    if first_uses.len() != last_uses.len() || !last_uses.iter().all(new) {
        return false;
    }
    // A page has at least as many others before it as precede it in the list, unless it is there twice.
    let mut placed = (0..).zip(first_uses);
    placed.all(|(place, &page)| stack.touch(page).is_some_and(|distance| distance >= place))
}

impl Slice for LruSlice {
    fn observe(&mut self, _: Option<u64>, pages: &[PageNumber]) {
        self.count(pages);
    }

    fn append(&mut self, _: Option<u64>, next: Contents) -> Result<(), &'static str> {
        let (reuses, [first_uses, last_uses]) = (next.numbers, next.pages);
        let counted = reuses
            .iter()
            .try_fold(first_uses.len() as u64, |sum, &reuses| {
                sum.checked_add(reuses)
            });
        if counted != Some(next.references) {
            return Err("its distances are not those of all its references");
        }
        if reuses.len() > first_uses.len() {
            return Err("a distance exceeds the number of its pages");
        }
        if self.stack.distinct() + first_uses.len() as u64 > PAGES_MAX {
            return Err("there are more than 2^31 distinct pages");
        }
        if !are_of_the_same_pages(&first_uses, &last_uses) {
            return Err("its first uses and its last uses are not of the same pages");
        }
        self.distances.add_reuses(&reuses);
        self.count(&first_uses);
        self.touch(&last_uses, |_, _, _| ());
        Ok(())
    }

    fn into_contents(self: Box<Self>) -> Contents {
        Contents {
            references: self.distances.references,
            pages: [self.first_uses, self.stack.in_order()],
            numbers: self.distances.reuses,
        }
    }

    fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        self.distances.curve()
    }
}
