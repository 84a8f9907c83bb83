//! Pages in the order in which they came: a list through their descriptors. All operations are O(1).

use crate::arena::{Arena, NIL};
use crate::descriptor::Descriptor;

/// A list of pages. `NIL` means no page.
#[derive(Debug)]
pub(crate) struct List {
    oldest: u32,
    newest: u32,
    len: u32,
}

impl List {
    /// Returns an empty list.
    pub(crate) const fn new() -> Self {
        Self {
            oldest: NIL,
            newest: NIL,
            len: 0,
        }
    }

    /// Number of pages in it.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The page at its head.
    #[inline(always)]
    pub(crate) fn oldest(&self) -> u32 {
        self.oldest
    }

    /// Appends a page that is in no list.
    #[inline(always)]
    pub(crate) fn push_tail(&mut self, pages: &mut Arena<Descriptor>, id: u32) {
        let page = &mut pages[id];
        page.set_older(self.newest);
        page.set_newer(NIL);
        match self.newest {
            NIL => self.oldest = id,
            newest => pages[newest].set_newer(id),
        }
        self.newest = id;
        self.len += 1;
    }

    /// Takes a page of this list out of it.
    #[inline(always)]
    pub(crate) fn remove(&mut self, pages: &mut Arena<Descriptor>, id: u32) {
        let (older, newer) = (pages[id].older(), pages[id].newer());
        match older {
            NIL => self.oldest = newer,
            older => pages[older].set_newer(newer),
        }
        match newer {
            NIL => self.newest = older,
            newer => pages[newer].set_older(older),
        }
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::descriptor::{Owner, Place};
    use crate::radix::testing::Budget;

    proptest! {
        /// `None` appends a page, `Some` removes one.
        #[test]
        fn agrees_with_a_queue_of_pages(ops in prop::collection::vec(any::<Option<Index>>(), 1..300)) {
            let mut frames = Budget::new(16);
            let mut pages = Arena::new();
            let mut list = List::new();
            let mut twin: VecDeque<u32> = VecDeque::new();
            for op in ops {
                match op {
                    None => {
                        pages.ensure(1, &mut frames).unwrap();
                        let id = pages.insert(Descriptor::new(Owner::Record(0), 0, Place::Word(0), 0));
                        list.push_tail(&mut pages, id);
                        twin.push_back(id);
                    }
                    Some(_) if twin.is_empty() => {}
                    Some(at) => {
                        let id = twin.remove(at.index(twin.len())).unwrap();
                        list.remove(&mut pages, id);
                        pages.remove(id);
                    }
                }
                let follow = |from, next: fn(&Descriptor) -> u32| {
                    let some = |id: u32| (id != NIL).then_some(id);
                    std::iter::successors(some(from), |id| some(next(&pages[*id]))).collect::<VecDeque<_>>()
                };
                prop_assert_eq!(&follow(list.oldest, Descriptor::newer), &twin);
                let mut back = follow(list.newest, Descriptor::older);
                back.make_contiguous().reverse();
                prop_assert_eq!(&back, &twin);
                prop_assert_eq!(list.len() as usize, twin.len());
            }
        }
    }
}
