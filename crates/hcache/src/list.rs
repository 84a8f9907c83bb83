//! Pages in the order in which they came: a list through their descriptors.
//!
//! Its *cursor* marks where pages that may be dropped begin: every page older than the cursor is dirty. Marking a
//! page dirty does not change the list: `oldest_clean` advances the cursor past pages that
//! became dirty. A page that becomes clean before the cursor moves the cursor back, and the stretch from there to the
//! old position is stored as a *gap* of dirty pages, so that it is not walked again when that page has gone.
//!
//! Cost: O(1), but for `oldest_clean`, which walks dirty pages. Where pages become clean, or leave, in
//! their order, it walks each once. Only the latest gap is stored: pages that become clean in another
//! order can make it walk the pages between them again.
//! Not here: marking pages dirty, and stamps, which never decrease from the oldest to the newest.

use crate::arena::{Arena, NIL};
use crate::descriptor::Descriptor;

/// A list of pages. `NIL` means no page.
#[derive(Debug)]
pub(crate) struct List {
    oldest: u32,
    newest: u32,
    /// Every page older than this one is dirty; `NIL`: every page is.
    cursor: u32,
    /// Every page between these two is dirty; a second one of `NIL` is behind the newest. The first is the cursor or
    /// newer, or `NIL` if there is no gap.
    gap: (u32, u32),
    len: u32,
}

impl List {
    /// Returns an empty list.
    pub(crate) const fn new() -> Self {
        Self {
            oldest: NIL,
            newest: NIL,
            cursor: NIL,
            gap: (NIL, NIL),
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

    /// The page at its tail.
    #[inline(always)]
    pub(crate) fn newest(&self) -> u32 {
        self.newest
    }

    /// The oldest page that is not dirty.
    #[inline(always)]
    pub(crate) fn oldest_clean(&mut self, pages: &Arena<Descriptor>) -> u32 {
        while self.cursor != NIL && pages[self.cursor].is_dirty() {
            self.pass_cursor(pages[self.cursor].newer);
        }
        self.cursor
    }

    /// Moves the cursor to the next page, `newer`, or over the gap.
    #[inline(always)]
    fn pass_cursor(&mut self, newer: u32) {
        if self.cursor == self.gap.0 {
            self.cursor = self.gap.1;
            self.gap = (NIL, NIL);
        } else {
            self.cursor = newer;
        }
    }

    /// Appends a page that is in no list; no stamp is above its own.
    #[inline(always)]
    pub(crate) fn push_tail(&mut self, pages: &mut Arena<Descriptor>, id: u32) {
        let page = &mut pages[id];
        page.older = self.newest;
        page.newer = NIL;
        if !page.is_dirty() {
            if self.cursor == NIL {
                self.cursor = id;
            } else if self.gap.1 == NIL {
                // If there is a gap, it ends here.
                self.gap.1 = id;
            }
        }
        match self.newest {
            NIL => self.oldest = id,
            newest => pages[newest].newer = id,
        }
        self.newest = id;
        self.len += 1;
    }

    /// Takes a page of this list out of it.
    #[inline(always)]
    pub(crate) fn remove(&mut self, pages: &mut Arena<Descriptor>, id: u32) {
        let Descriptor { older, newer, .. } = pages[id];
        match older {
            NIL => self.oldest = newer,
            older => pages[older].newer = newer,
        }
        match newer {
            NIL => self.newest = older,
            newer => pages[newer].older = older,
        }
        if self.gap.1 == id {
            self.gap.1 = newer;
        }
        if self.cursor == id {
            self.pass_cursor(newer);
        } else if self.gap.0 == id {
            self.gap.0 = older;
        }
        self.len -= 1;
    }

    /// Updates the cursor; called when a page of this list is no longer dirty.
    pub(crate) fn mark_clean(&mut self, pages: &Arena<Descriptor>, id: u32) {
        let at = |id: u32| match id {
            NIL => u64::MAX,
            id => pages[id].stamp(),
        };
        let stamp = at(id);
        if stamp < at(self.cursor) {
            self.gap = (id, self.cursor);
            self.cursor = id;
            return;
        }
        if self.gap.0 != NIL && at(self.gap.0) <= stamp && stamp <= at(self.gap.1) {
            // The part of the gap after it is the longer one where pages become clean in order. Among equal stamps it
            // is unknown whether the page is in the gap.
            let within = at(self.gap.0) < stamp && stamp < at(self.gap.1);
            self.gap = if within { (id, self.gap.1) } else { (NIL, NIL) };
        }
        // Among equal stamps the cursor goes back as far as the page may be.
        while stamp == at(self.cursor) && at(pages[self.cursor].older) == stamp {
            self.cursor = pages[self.cursor].older;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::descriptor::Place;
    use crate::radix::testing::Budget;

    #[derive(Debug, Clone)]
    enum Op {
        Push { dirty: bool },
        Remove(Index),
        Renew(Index),
        Dirty(Index),
        Clean(Index),
        OldestClean,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => any::<bool>().prop_map(|dirty| Op::Push { dirty }),
            2 => any::<Index>().prop_map(Op::Remove),
            2 => any::<Index>().prop_map(Op::Renew),
            2 => any::<Index>().prop_map(Op::Dirty),
            2 => any::<Index>().prop_map(Op::Clean),
            2 => Just(Op::OldestClean),
        ]
    }

    fn oldest_clean(twin: &VecDeque<(u32, bool)>) -> u32 {
        let clean = twin.iter().find(|(_, dirty)| !dirty);
        clean.map_or(NIL, |(id, _)| *id)
    }

    fn some(id: u32) -> Option<u32> {
        (id != NIL).then_some(id)
    }

    proptest! {
        #[test]
        fn agrees_with_a_queue_of_pages_and_flags(
            ops in prop::collection::vec(op(), 1..300),
            // Several pages may have one stamp.
            alike in prop_oneof![Just(1), Just(4), Just(1000)],
        ) {
            let mut frames = Budget::new(16);
            let mut pages = Arena::new();
            let mut list = List::new();
            let mut twin: VecDeque<(u32, bool)> = VecDeque::new();
            for (turn, op) in (1_u64..).zip(ops) {
                let stamp = turn / alike;
                let place = |at: Index| at.index(twin.len());
                match op {
                    Op::Push { dirty } => {
                        pages.ensure(1, &mut frames).unwrap();
                        let id = pages.insert(Descriptor::new(0, 0, Place::Word(0), stamp, 0));
                        pages[id].set_dirty(dirty);
                        list.push_tail(&mut pages, id);
                        twin.push_back((id, dirty));
                    }
                    Op::OldestClean => {
                        prop_assert_eq!(list.oldest_clean(&pages), oldest_clean(&twin));
                    }
                    _ if twin.is_empty() => {}
                    Op::Remove(at) => {
                        let (id, _) = twin.remove(place(at)).unwrap();
                        list.remove(&mut pages, id);
                        pages.remove(id);
                    }
                    Op::Renew(at) => {
                        let page = twin.remove(place(at)).unwrap();
                        list.remove(&mut pages, page.0);
                        pages[page.0].set_stamp(stamp);
                        list.push_tail(&mut pages, page.0);
                        twin.push_back(page);
                    }
                    Op::Dirty(at) => {
                        let at = place(at);
                        twin[at].1 = true;
                        pages[twin[at].0].set_dirty(true);
                    }
                    Op::Clean(at) => {
                        let at = place(at);
                        twin[at].1 = false;
                        pages[twin[at].0].set_dirty(false);
                        list.mark_clean(&pages, twin[at].0);
                    }
                }
                let ids: Vec<u32> = twin.iter().map(|(id, _)| *id).collect();
                let follow = |from, next: fn(&Descriptor) -> u32| {
                    std::iter::successors(some(from), |id| some(next(&pages[*id]))).collect::<Vec<_>>()
                };
                prop_assert_eq!(&follow(list.oldest, |page| page.newer), &ids);
                let mut back = follow(list.newest, |page| page.older);
                back.reverse();
                prop_assert_eq!(&back, &ids);
                prop_assert_eq!(list.len() as usize, ids.len());
                prop_assert_eq!(list.oldest(), ids.first().copied().unwrap_or(NIL));
                prop_assert_eq!(list.newest(), ids.last().copied().unwrap_or(NIL));
            }
            prop_assert_eq!(list.oldest_clean(&pages), oldest_clean(&twin));
        }
    }
}
