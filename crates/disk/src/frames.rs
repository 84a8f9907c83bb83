//! Which guest page frame holds which block, and the reverse: P2S and S2P of \[LS07\] §3.
//!
//! Each I/O replaces the entries of both tables. A frame may hold a block's contents (P2S) although another frame is
//! the block's newest one (S2P); the tables *agree* on a frame where both name each other. With a frame's block goes
//! the hash of what the I/O moved, or, while the I/O is in flight, its ticket.
//!
//! Cost: 16 bytes a frame of guest RAM, allocated where used, in pieces of 16 MiB of guest RAM; and an entry of
//! a hash table (about 20 bytes) for each block that has a newest frame.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use crate::Location;

/// Frames are numbered below this: 16 TiB of guest-physical addresses. I/O to frames beyond is not recorded.
pub(crate) const FRAMES_MAX: u64 = 1 << 32;

/// Frames in a piece of the table.
const PIECE: usize = 1 << 12;

/// Marks `word` as a ticket.
const PENDING: u64 = 1 << 63;

/// Names the I/O that last filled a frame or was filled from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket(pub u64);

/// What a frame holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameContents {
    /// The contents that an I/O in flight will have moved.
    Pending(Location, Ticket),
    /// The block's contents, which have this hash.
    Contents(Location, u64),
}

impl FrameContents {
    pub(crate) fn location(self) -> Location {
        match self {
            Self::Pending(location, _) | Self::Contents(location, _) => location,
        }
    }
}

/// 0 if nothing is recorded; else the location + 1, with [`PENDING`], and the hash or ticket.
#[derive(Clone, Copy, Default)]
struct Entry {
    location: u64,
    word: u64,
}

/// Both tables alone, to measure what each operation costs.
#[doc(hidden)]
pub struct MappingTables(Frames);

#[doc(hidden)]
#[allow(missing_docs, reason = "for the benchmark alone")]
impl MappingTables {
    #[expect(clippy::new_without_default, reason = "used once")]
    pub fn new() -> Self {
        Self(Frames::new())
    }

    pub fn insert(&mut self, frame: u64, location: Location, hash: u64) {
        self.0.set(frame, FrameContents::Contents(location, hash));
    }

    /// Whether the tables agree on the frame.
    pub fn agree(&self, frame: u64) -> bool {
        let held = self.0.held(frame);
        held.is_some_and(|held| self.0.newest(held.location()) == Some(frame))
    }

    pub fn delete(&mut self, frame: u64) {
        self.0.release(frame);
    }
}

/// Both tables.
pub(crate) struct Frames {
    pieces: Vec<Option<Box<[Entry]>>>,
    newest: HashMap<Location, u32, RandomState>,
    known: u64,
}

impl Frames {
    pub(crate) fn new() -> Self {
        Self {
            pieces: Vec::new(),
            newest: HashMap::default(),
            known: 0,
        }
    }

    /// Number of frames that have a block.
    pub(crate) fn known(&self) -> u64 {
        self.known
    }

    /// The recorded contents of the frame.
    pub(crate) fn held(&self, frame: u64) -> Option<FrameContents> {
        let (piece, place) = place(frame)?;
        let entry = self.pieces.get(piece)?.as_ref()?[place];
        entry.held()
    }

    /// The frame that holds the block's newest contents, if any.
    pub(crate) fn newest(&self, location: Location) -> Option<u64> {
        self.newest.get(&location).copied().map(u64::from)
    }

    /// Records that an I/O between the frame and the block begins, or has moved these contents.
    /// Frames beyond [`FRAMES_MAX`] are not recorded, and the block then has no newest frame.
    pub(crate) fn set(&mut self, frame: u64, held: FrameContents) {
        self.release(frame);
        let location = held.location();
        let (Some((piece, place)), Ok(number)) = (place(frame), u32::try_from(frame)) else {
            self.newest.remove(&location);
            return;
        };
        if self.pieces.len() <= piece {
            self.pieces.resize_with(piece + 1, || None);
        }
        let entries =
            self.pieces[piece].get_or_insert_with(|| vec![Entry::default(); PIECE].into());
        entries[place] = Entry::of(held);
        self.newest.insert(location, number);
        self.known += 1;
    }

    /// Records that the I/O of that ticket moved contents of this hash. Does nothing if the entry has changed since.
    pub(crate) fn finish(&mut self, frame: u64, location: Location, ticket: Ticket, hash: u64) {
        if let Some(entry) = self.pending(frame, location, ticket) {
            entry.location &= !PENDING;
            entry.word = hash;
        }
    }

    /// Records that it is unknown what the I/O of that ticket moved. Does nothing if the entry has changed since.
    pub(crate) fn abandon(&mut self, frame: u64, location: Location, ticket: Ticket) {
        if self.pending(frame, location, ticket).is_some() {
            self.release(frame);
        }
    }

    fn pending(&mut self, frame: u64, location: Location, ticket: Ticket) -> Option<&mut Entry> {
        let (piece, place) = place(frame)?;
        let entry = &mut self.pieces.get_mut(piece)?.as_mut()?[place];
        (entry.held() == Some(FrameContents::Pending(location, ticket))).then_some(entry)
    }

    /// Removes the frame's entry.
    pub(crate) fn release(&mut self, frame: u64) {
        let Some(held) = self.take(frame) else { return };
        if self.newest(held.location()) == Some(frame) {
            self.newest.remove(&held.location());
        }
    }

    /// Moves the entry of one frame to another.
    pub(crate) fn migrate(&mut self, from: u64, to: u64) {
        if from == to {
            return;
        }
        self.release(to);
        let Some(held) = self.held(from) else { return };
        if self.newest(held.location()) == Some(from) {
            self.release(from);
            self.set(to, held);
        } else {
            // It never was the newest; nor is the new frame.
            self.release(from);
        }
    }

    /// Removes the block's entries: it was freed, or written in part.
    pub(crate) fn forget(&mut self, location: Location) {
        if let Some(frame) = self.newest.remove(&location) {
            self.take(u64::from(frame));
        }
    }

    /// Removes the entries of all blocks for which `gone` is true. Time is linear in the size of the table.
    pub(crate) fn forget_where(&mut self, mut gone: impl FnMut(Location) -> bool) {
        let locations: Vec<Location> = self.newest.keys().copied().filter(|l| gone(*l)).collect();
        for location in locations {
            self.forget(location);
        }
    }

    /// Number of blocks that have a newest frame.
    pub(crate) fn blocks(&self) -> usize {
        self.newest.len()
    }

    /// Removes all entries.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.newest.clear();
        self.known = 0;
    }

    fn take(&mut self, frame: u64) -> Option<FrameContents> {
        let (piece, place) = place(frame)?;
        let entry = &mut self.pieces.get_mut(piece)?.as_mut()?[place];
        let held = entry.held()?;
        *entry = Entry::default();
        self.known -= 1;
        Some(held)
    }
}

/// The position of the frame's entry.
fn place(frame: u64) -> Option<(usize, usize)> {
    let frame = usize::try_from(frame).ok().filter(|_| frame < FRAMES_MAX)?;
    Some((frame / PIECE, frame % PIECE))
}

impl Entry {
    fn of(held: FrameContents) -> Self {
        match held {
            FrameContents::Pending(location, Ticket(word)) => Self {
                location: (location.number() + 1) | PENDING,
                word,
            },
            FrameContents::Contents(location, word) => Self {
                location: location.number() + 1,
                word,
            },
        }
    }

    fn held(self) -> Option<FrameContents> {
        let location = Location::from_number((self.location & !PENDING).checked_sub(1)?);
        Some(if self.location & PENDING == 0 {
            FrameContents::Contents(location, self.word)
        } else {
            FrameContents::Pending(location, Ticket(self.word))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::DiskNumber;

    fn block(number: u64) -> Location {
        Location::new(DiskNumber(0), number)
    }

    #[derive(Debug, Clone)]
    enum Step {
        Set(u64, u64, u64),
        Begin(u64, u64, u64),
        Finish(u64, u64, u64, u64),
        Abandon(u64, u64, u64),
        Release(u64),
        Migrate(u64, u64),
        Forget(u64),
        ForgetEven,
    }

    fn step() -> impl Strategy<Value = Step> {
        // Frames of three pieces, so that their boundaries are tested.
        let frame = || (0..3u64, 0..4u64).prop_map(|(piece, at)| piece * PIECE as u64 + at);
        let block = || 0..6u64;
        prop_oneof![
            3 => (frame(), block(), 0..9u64).prop_map(|(f, b, h)| Step::Set(f, b, h)),
            3 => (frame(), block(), 0..4u64).prop_map(|(f, b, t)| Step::Begin(f, b, t)),
            2 => (frame(), block(), 0..4u64, 0..9u64).prop_map(|(f, b, t, h)| Step::Finish(f, b, t, h)),
            1 => (frame(), block(), 0..4u64).prop_map(|(f, b, t)| Step::Abandon(f, b, t)),
            2 => frame().prop_map(Step::Release),
            2 => (frame(), frame()).prop_map(|(f, t)| Step::Migrate(f, t)),
            1 => block().prop_map(Step::Forget),
            1 => Just(Step::ForgetEven),
        ]
    }

    /// Both tables as two plain maps, after the rules of the paper and of migration.
    #[derive(Default)]
    struct Twin {
        p2s: BTreeMap<u64, FrameContents>,
        s2p: BTreeMap<Location, u64>,
    }

    impl Twin {
        fn release(&mut self, frame: u64) {
            if let Some(held) = self.p2s.remove(&frame)
                && self.s2p.get(&held.location()) == Some(&frame)
            {
                self.s2p.remove(&held.location());
            }
        }

        fn set(&mut self, frame: u64, held: FrameContents) {
            self.release(frame);
            self.p2s.insert(frame, held);
            self.s2p.insert(held.location(), frame);
        }

        fn forget(&mut self, location: Location) {
            if let Some(frame) = self.s2p.remove(&location) {
                self.p2s.remove(&frame);
            }
        }

        fn apply(&mut self, step: &Step) {
            match *step {
                Step::Set(f, b, h) => self.set(f, FrameContents::Contents(block(b), h)),
                Step::Begin(f, b, t) => self.set(f, FrameContents::Pending(block(b), Ticket(t))),
                Step::Finish(f, b, t, h) => {
                    if self.p2s.get(&f) == Some(&FrameContents::Pending(block(b), Ticket(t))) {
                        self.p2s.insert(f, FrameContents::Contents(block(b), h));
                    }
                }
                Step::Abandon(f, b, t) => {
                    if self.p2s.get(&f) == Some(&FrameContents::Pending(block(b), Ticket(t))) {
                        self.release(f);
                    }
                }
                Step::Release(f) => self.release(f),
                Step::Migrate(f, t) if f != t => {
                    self.release(t);
                    if let Some(&held) = self.p2s.get(&f) {
                        let newest = self.s2p.get(&held.location()) == Some(&f);
                        self.release(f);
                        if newest {
                            self.set(t, held);
                        }
                    }
                }
                Step::Migrate(..) => {}
                Step::Forget(b) => self.forget(block(b)),
                Step::ForgetEven => {
                    for b in [0, 2, 4] {
                        self.forget(block(b));
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn the_tables_are_two_maps(steps in prop::collection::vec(step(), 1..80)) {
            let (mut frames, mut twin) = (Frames::new(), Twin::default());
            for step in &steps {
                twin.apply(step);
                match *step {
                    Step::Set(f, b, h) => frames.set(f, FrameContents::Contents(block(b), h)),
                    Step::Begin(f, b, t) => frames.set(f, FrameContents::Pending(block(b), Ticket(t))),
                    Step::Finish(f, b, t, h) => frames.finish(f, block(b), Ticket(t), h),
                    Step::Abandon(f, b, t) => frames.abandon(f, block(b), Ticket(t)),
                    Step::Release(f) => frames.release(f),
                    Step::Migrate(f, t) => frames.migrate(f, t),
                    Step::Forget(b) => frames.forget(block(b)),
                    Step::ForgetEven => frames.forget_where(|l| l.block() % 2 == 0),
                }
                prop_assert_eq!(frames.known(), twin.p2s.len() as u64);
                prop_assert_eq!(frames.blocks(), twin.s2p.len());
                for frame in (0..3).flat_map(|p| (0..4).map(move |at| p * PIECE as u64 + at)) {
                    prop_assert_eq!(frames.held(frame), twin.p2s.get(&frame).copied());
                }
                for b in 0..6 {
                    prop_assert_eq!(frames.newest(block(b)), twin.s2p.get(&block(b)).copied());
                }
            }
        }
    }

    #[test]
    fn a_frame_beyond_all_ram_is_not_recorded() {
        let mut frames = Frames::new();
        frames.set(7, FrameContents::Contents(block(1), 5));
        frames.set(FRAMES_MAX, FrameContents::Contents(block(1), 6));
        frames.set(u64::MAX, FrameContents::Contents(block(2), 6));
        assert_eq!(frames.held(FRAMES_MAX), None);
        assert_eq!(
            frames.newest(block(1)),
            None,
            "frame 7 holds older contents"
        );
        assert_eq!(frames.known(), 1);
    }
}
