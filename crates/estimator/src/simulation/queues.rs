//! Queues of pages, of which each is in one at most: linked lists whose links are in one array, indexed by the page.
//!
//! Pages are the numbers 0, 1, .. of a stream's distinct pages, so that no table is needed to find one.
//!
//! Cost: 12 bytes a page; a line of memory for each page whose links change.

/// No page.
pub(super) const NONE: u32 = u32::MAX;
/// The queue of a page that is in none.
const NOWHERE: u8 = u8::MAX;

/// The links of a page, and a small number for the policy.
#[derive(Debug, Clone, Copy)]
struct Links {
    older: u32,
    newer: u32,
    queue: u8,
    mark: u8,
}

#[derive(Debug, Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
    pages: u32,
}

/// `QUEUES` queues over the same pages.
#[derive(Debug)]
pub(super) struct Queues<const QUEUES: usize> {
    links: Vec<Links>,
    ends: [Ends; QUEUES],
}

impl<const QUEUES: usize> Queues<QUEUES> {
    /// Empty queues of pages below `pages`.
    pub(super) fn new(pages: u32) -> Self {
        let nowhere = Links {
            older: NONE,
            newer: NONE,
            queue: NOWHERE,
            mark: 0,
        };
        let empty = Ends {
            oldest: NONE,
            newest: NONE,
            pages: 0,
        };
        Self {
            links: vec![nowhere; pages as usize],
            ends: [empty; QUEUES],
        }
    }

    /// The queue that a page is in.
    pub(super) fn queue_of(&self, page: u32) -> Option<usize> {
        let queue = self.links[page as usize].queue;
        (queue != NOWHERE).then_some(queue.into())
    }

    /// Number of pages in a queue.
    pub(super) fn len(&self, queue: usize) -> u32 {
        self.ends[queue].pages
    }

    /// The page that entered first, [`NONE`] if there is none.
    pub(super) fn oldest(&self, queue: usize) -> u32 {
        self.ends[queue].oldest
    }

    /// The page that entered the same queue after this one, [`NONE`] if there is none.
    pub(super) fn newer(&self, page: u32) -> u32 {
        self.links[page as usize].newer
    }

    /// The policy's number of a page, 0 at first.
    pub(super) fn mark(&self, page: u32) -> u8 {
        self.links[page as usize].mark
    }

    pub(super) fn set_mark(&mut self, page: u32, mark: u8) {
        self.links[page as usize].mark = mark;
    }

    /// Puts a page at the new end of a queue, out of the one that it is in.
    pub(super) fn push(&mut self, queue: usize, page: u32) {
        self.remove(page);
        let ends = &mut self.ends[queue];
        let before = ends.newest;
        ends.newest = page;
        ends.pages += 1;
        match before {
            NONE => ends.oldest = page,
            before => self.links[before as usize].newer = page,
        }
        let links = &mut self.links[page as usize];
        links.older = before;
        links.newer = NONE;
        links.queue = u8::try_from(queue).expect("few queues");
    }

    /// Takes a page out of its queue, if it is in one.
    pub(super) fn remove(&mut self, page: u32) {
        let Links {
            older,
            newer,
            queue,
            ..
        } = self.links[page as usize];
        if queue == NOWHERE {
            return;
        }
        let ends = &mut self.ends[usize::from(queue)];
        ends.pages -= 1;
        match older {
            NONE => ends.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => ends.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.links[page as usize].queue = NOWHERE;
    }

    /// Takes the oldest page out of a queue that is not empty.
    pub(super) fn pop(&mut self, queue: usize) -> u32 {
        let page = self.oldest(queue);
        self.remove(page);
        page
    }
}
