//! Compressed pages, several to a frame.
//!
//! A packed frame is a header and then its pages, in the order of their slots and without gaps. Where a page
//! begins is thus the sum of the lengths before it, and what is free is one piece at the end:
//!
//! | bytes | |
//! |---|---|
//! | 0..32 | length of the page in each of 16 slots, 0 where there is none |
//! | 32..40 | neighbours in the list of frames with as much free space |
//! | 40..4096 | the pages |
//!
//! There is a list for every 64 bytes of free space; a frame whose slots are taken counts as one without any.
//! A page goes into a frame of the first list in which all have room for it: best fit, to 64 bytes.
//! Frames that become empty are freed, so the only other memory is that of the list heads.
//!
//! Cost of an insertion or a removal: at most one frame moved within itself, and the headers of four neighbours.
//! Not here: the decision which pages to compress; locks (a `Packed` belongs to one shard).

use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};

use crate::sys::Slab;
use crate::{PAGE_BYTES, Page};

/// Maximum bytes of a compressed page. Of the pages of files on a Linux system a limit of 3/4 of a page saves 41 %
/// of the frames, 1/2 saves 29 %, and 7/8 no more than 41 % either: such a page hardly leaves room for another,
/// and costs a decompression for each get.
pub(crate) const COMPRESSED_BYTES_MAX: usize = PAGE_BYTES * 3 / 4;

/// Pages of a frame.
const SLOTS: usize = 16;
const SLOT_BITS: u32 = SLOTS.trailing_zeros();
/// Where the links are in a frame.
const PREVIOUS: usize = SLOTS * 2;
const NEXT: usize = PREVIOUS + 4;
/// Where the pages begin.
const HEADER_BYTES: usize = NEXT + 4;
const ROOM_BYTES: usize = PAGE_BYTES - HEADER_BYTES;
/// Granularity in which free space is distinguished.
const GRANULE_BYTES: usize = 64;
const CLASSES: usize = ROOM_BYTES / GRANULE_BYTES + 1;
const _: () = assert!(CLASSES <= 64, "a bit of a word for each class");
/// No frame.
const NIL: u32 = u32::MAX;

/// The location of a compressed page: frame number and slot. It stays the same while other pages come and go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place(pub(crate) u32);

impl Place {
    /// Frames that can be named.
    pub(crate) const FRAMES_MAX: u32 = 1 << (u32::BITS - SLOT_BITS);

    fn new(frame: u32, slot: usize) -> Self {
        assert!(frame < Self::FRAMES_MAX && slot < SLOTS);
        #[expect(clippy::cast_possible_truncation, reason = "below SLOTS")]
        Self(frame << SLOT_BITS | slot as u32)
    }

    /// The packed frame it is in.
    pub(crate) fn frame(self) -> u32 {
        self.0 >> SLOT_BITS
    }

    /// The place it becomes when its frame is relocated to `frame`.
    pub(crate) fn moved_to(self, frame: u32) -> Self {
        Self::new(frame, self.slot())
    }

    fn slot(self) -> usize {
        self.0 as usize % SLOTS
    }
}

/// Packed frames of one shard.
pub(crate) struct Packed {
    /// First frame of each class.
    heads: [u32; CLASSES],
    /// A bit for each class that has a frame.
    classes: u64,
    frames: u32,
    stored_bytes: u64,
}

impl Packed {
    /// Returns a `Packed` without a frame.
    pub(crate) fn new() -> Self {
        Self {
            heads: [NIL; CLASSES],
            classes: 0,
            frames: 0,
            stored_bytes: 0,
        }
    }

    /// Number of frames it holds.
    pub(crate) fn frames(&self) -> u32 {
        self.frames
    }

    /// Compressed bytes in them, excluding headers and free space.
    #[cfg(test)]
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    /// Stores 1 to [`COMPRESSED_BYTES_MAX`] bytes. Takes a frame if no frame has room; returns `None`, with nothing
    /// changed, if none is available.
    pub(crate) fn insert(
        &mut self,
        slab: &Slab,
        bytes: &[u8],
        new_frame: impl FnOnce() -> Option<u32>,
    ) -> Option<Place> {
        assert!((1..=COMPRESSED_BYTES_MAX).contains(&bytes.len()));
        let fitting = self.classes & u64::MAX << bytes.len().div_ceil(GRANULE_BYTES);
        let frame = if fitting == 0 {
            let frame = new_frame()?;
            slab.write(frame, |page| page[..HEADER_BYTES].fill(0));
            self.frames += 1;
            frame
        } else {
            let frame = self.heads[fitting.trailing_zeros() as usize];
            self.unlink(slab, frame);
            frame
        };
        let slot = slab.write(frame, |page| put(page, bytes));
        self.link(slab, frame);
        self.stored_bytes += bytes.len() as u64;
        Some(Place::new(frame, slot))
    }

    /// Reads the bytes stored at a place.
    pub(crate) fn read<R>(&self, slab: &Slab, place: Place, read: impl FnOnce(&[u8]) -> R) -> R {
        slab.read(place.frame(), |page| {
            let lengths = Lengths::of(page);
            let start = lengths.start(place.slot());
            let length = lengths.0[place.slot()];
            assert_ne!(length, 0, "there is a page at {place:?}");
            read(&page[start..start + usize::from(length)])
        })
    }

    /// Removes the bytes at a place. Passes the frame to the caller if it is now empty.
    pub(crate) fn remove(&mut self, slab: &Slab, place: Place) -> Option<u32> {
        let frame = place.frame();
        self.unlink(slab, frame);
        let (length, empty) = slab.write(frame, |page| take(page, place.slot()));
        self.stored_bytes -= length as u64;
        if empty {
            self.frames -= 1;
            return Some(frame);
        }
        self.link(slab, frame);
        None
    }

    /// Moves a packed frame to another one, held by the caller; the caller then holds the old one.
    /// Its pages are at their [places moved](Place::moved_to).
    pub(crate) fn relocate(&mut self, slab: &Slab, from_frame: u32, to_frame: u32) {
        self.unlink(slab, from_frame);
        slab.copy(from_frame, to_frame);
        self.link(slab, to_frame);
    }

    /// Puts a frame into the list of its class.
    fn link(&mut self, slab: &Slab, frame: u32) {
        let class = slab.read(frame, class);
        let next = std::mem::replace(&mut self.heads[class], frame);
        self.classes |= 1 << class;
        slab.write(frame, |page| {
            set_word(page, PREVIOUS, NIL);
            set_word(page, NEXT, next);
        });
        if next != NIL {
            slab.write(next, |page| set_word(page, PREVIOUS, frame));
        }
    }

    /// Takes a frame out of the list of its class.
    fn unlink(&mut self, slab: &Slab, frame: u32) {
        let (class, previous, next) = slab.read(frame, |page| {
            (class(page), word(page, PREVIOUS), word(page, NEXT))
        });
        if previous == NIL {
            self.heads[class] = next;
        } else {
            slab.write(previous, |page| set_word(page, NEXT, next));
        }
        if next != NIL {
            slab.write(next, |page| set_word(page, PREVIOUS, previous));
        }
        if self.heads[class] == NIL {
            self.classes &= !(1 << class);
        }
    }
}

/// Lengths of the pages of a packed frame, by slot.
struct Lengths([u16; SLOTS]);

impl Lengths {
    fn of(page: &Page) -> Self {
        Self(std::array::from_fn(|slot| {
            u16::from_ne_bytes([page[slot * 2], page[slot * 2 + 1]])
        }))
    }

    /// The offset at which the page of a slot begins (or would).
    fn start(&self, slot: usize) -> usize {
        HEADER_BYTES
            + self.0[..slot]
                .iter()
                .copied()
                .map(usize::from)
                .sum::<usize>()
    }

    /// The offset at which the free space begins.
    fn end(&self) -> usize {
        self.start(SLOTS)
    }
}

fn set_length(page: &mut Page, slot: usize, length: usize) {
    let length = u16::try_from(length).expect("no longer than a page");
    page[slot * 2..slot * 2 + 2].copy_from_slice(&length.to_ne_bytes());
}

fn word(page: &Page, at: usize) -> u32 {
    u32::from_ne_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]])
}

fn set_word(page: &mut Page, at: usize, word: u32) {
    page[at..at + 4].copy_from_slice(&word.to_ne_bytes());
}

/// Class of a frame's free space.
fn class(page: &Page) -> usize {
    let lengths = Lengths::of(page);
    if lengths.0.contains(&0) {
        (PAGE_BYTES - lengths.end()) / GRANULE_BYTES
    } else {
        0
    }
}

/// Puts bytes into a frame that has room for them and returns their slot.
fn put(page: &mut Page, bytes: &[u8]) -> usize {
    let lengths = Lengths::of(page);
    let slot = lengths.0.iter().rposition(|&length| length == 0);
    let slot = slot.expect("a frame with a free slot");
    let start = lengths.start(slot);
    page.copy_within(start..lengths.end(), start + bytes.len());
    page[start..start + bytes.len()].copy_from_slice(bytes);
    set_length(page, slot, bytes.len());
    slot
}

/// Takes a slot's bytes out; returns how many they were and whether the frame is empty now.
fn take(page: &mut Page, slot: usize) -> (usize, bool) {
    let lengths = Lengths::of(page);
    let length = usize::from(lengths.0[slot]);
    assert_ne!(length, 0, "there is a page in slot {slot}");
    let start = lengths.start(slot);
    page.copy_within(start + length..lengths.end(), start);
    set_length(page, slot, 0);
    (length, lengths.end() - length == HEADER_BYTES)
}

/// Compresses pages (LZ4 blocks) with a table and a buffer of its own: nothing is allocated per page.
pub(crate) struct Compressor {
    table: CompressTable,
    out: Box<[u8; get_maximum_output_size(PAGE_BYTES)]>,
}

impl Compressor {
    /// Memory of one, in bytes: the buffer, and the table of 4096 numbers of 16 bits.
    pub(crate) const BYTES: usize = get_maximum_output_size(PAGE_BYTES) + 4096 * 2;

    pub(crate) fn new() -> Self {
        Self {
            table: CompressTable::small(),
            out: Box::new([0; _]),
        }
    }

    /// Compresses a page, if it shrinks to [`COMPRESSED_BYTES_MAX`] or below.
    pub(crate) fn compress(&mut self, page: &Page) -> Option<&[u8]> {
        let length = compress_into_with_table(page, &mut self.out[..], &mut self.table)
            .expect("a buffer for the worst case");
        (length <= COMPRESSED_BYTES_MAX).then(|| &self.out[..length])
    }
}

/// Restores a page; `false` if the bytes are not those of a compressed page (`out` is then undefined).
pub(crate) fn decompress(bytes: &[u8], out: &mut Page) -> bool {
    matches!(decompress_into(bytes, out), Ok(PAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    /// Lengths of LZ4 blocks of 88 850 pages of files under /usr and of source code, at each 32nd.
    const LENGTHS: [usize; 33] = [
        28, 571, 833, 1022, 1177, 1301, 1387, 1440, 1514, 1603, 1692, 1778, 1864, 1950, 2036, 2121,
        2211, 2294, 2376, 2457, 2547, 2645, 2756, 2869, 2991, 3102, 3193, 3277, 3363, 3477, 3816,
        4098, 4114,
    ];

    fn bytes_of(number: usize, length: usize) -> Vec<u8> {
        (0..length)
            .map(|at| u8::try_from((number * 37 + at) % 251).unwrap())
            .collect()
    }

    /// Packed pages beside a map of them.
    struct Twins {
        slab: Slab,
        packed: Packed,
        free: Vec<u32>,
        frames: u32,
        map: HashMap<Place, Vec<u8>>,
        places: Vec<Place>,
    }

    impl Twins {
        fn new(frames: u32) -> Self {
            Self {
                slab: Slab::reserve(frames, false).unwrap(),
                packed: Packed::new(),
                free: (0..frames).collect(),
                frames,
                map: HashMap::new(),
                places: Vec::new(),
            }
        }

        fn insert(&mut self, bytes: Vec<u8>) -> Option<Place> {
            let place = self.packed.insert(&self.slab, &bytes, || self.free.pop())?;
            assert!(
                self.map.insert(place, bytes).is_none(),
                "{place:?} is taken"
            );
            self.places.push(place);
            Some(place)
        }

        fn remove(&mut self, which: usize) {
            let place = self.places.swap_remove(which % self.places.len());
            self.read(place);
            self.map.remove(&place);
            let emptied = self.packed.remove(&self.slab, place);
            let last = self.map.keys().all(|other| other.frame() != place.frame());
            assert_eq!(emptied, last.then_some(place.frame()));
            self.free.extend(emptied);
        }

        fn relocate(&mut self, which: usize) {
            let Some(to) = self.free.pop() else { return };
            let from = self.places[which % self.places.len()].frame();
            self.packed.relocate(&self.slab, from, to);
            self.slab.write(from, |page| page.fill(0xee));
            self.free.insert(0, from);
            for place in self.places.iter_mut().filter(|place| place.frame() == from) {
                let bytes = self.map.remove(place).unwrap();
                *place = place.moved_to(to);
                self.map.insert(*place, bytes);
            }
        }

        fn read(&self, place: Place) {
            let right = |bytes: &[u8]| bytes == self.map[&place];
            assert!(self.packed.read(&self.slab, place, right), "{place:?}");
        }

        fn check(&self) {
            let frames: HashSet<u32> = self.map.keys().map(|place| place.frame()).collect();
            assert_eq!(self.packed.frames() as usize, frames.len());
            assert_eq!(frames.len() + self.free.len(), self.frames as usize);
            let bytes: usize = self.map.values().map(Vec::len).sum();
            assert_eq!(self.packed.stored_bytes(), bytes as u64);
            for &place in self.map.keys() {
                self.read(place);
            }
        }

        fn empty(mut self) {
            while !self.places.is_empty() {
                self.remove(0);
            }
            self.check();
            self.free.sort_unstable();
            assert!(
                self.free.into_iter().eq(0..self.frames),
                "each frame came back once"
            );
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Insert { length: usize },
        Remove { which: usize },
        Relocate { which: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        let length = prop_oneof![
            1..=300usize,
            1..=COMPRESSED_BYTES_MAX,
            Just(COMPRESSED_BYTES_MAX)
        ];
        prop_oneof![
            5 => length.prop_map(|length| Step::Insert { length }),
            4 => any::<usize>().prop_map(|which| Step::Remove { which }),
            1 => any::<usize>().prop_map(|which| Step::Relocate { which }),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_a_map(steps in prop::collection::vec(step(), 1..200)) {
            let mut twins = Twins::new(24);
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert { length } => {
                        twins.insert(bytes_of(number, length));
                    }
                    Step::Remove { which } if !twins.places.is_empty() => twins.remove(which),
                    Step::Relocate { which } if !twins.places.is_empty() => twins.relocate(which),
                    Step::Remove { .. } | Step::Relocate { .. } => {}
                }
                twins.check();
            }
            twins.empty();
        }

        #[test]
        fn bytes_that_are_no_page_are_told(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            // 64 bytes are a page only if a match repeats most of it.
            let mut page = [0; PAGE_BYTES];
            let whole = lz4_flex::block::decompress(&bytes, 1 << 16).is_ok_and(|whole| whole.len() == PAGE_BYTES);
            prop_assert_eq!(decompress(&bytes, &mut page), whole);
        }
    }

    #[test]
    fn frames_stay_full_while_pages_come_and_go() {
        const PAGES: usize = 3000;
        let mut random = fastrand::Rng::with_seed(5);
        let mut twins = Twins::new(2000);
        for number in 0..PAGES * 8 {
            let at = random.usize(..32 * 64);
            let (low, high) = (LENGTHS[at / 64], LENGTHS[at / 64 + 1]);
            let length = low + (high - low) * (at % 64) / 64;
            if length > COMPRESSED_BYTES_MAX {
                continue;
            }
            if twins.places.len() == PAGES {
                twins.remove(random.usize(..PAGES));
            }
            twins.insert(bytes_of(number, length)).unwrap();
        }
        twins.check();
        let frame_bytes = u64::from(twins.packed.frames()) * PAGE_BYTES as u64;
        let fill_percent = twins.packed.stored_bytes() * 100 / frame_bytes;
        assert!((92..100).contains(&fill_percent), "{fill_percent} % full");
        twins.empty();
    }

    #[test]
    fn a_page_goes_into_the_fullest_frame_that_has_room() {
        let mut twins = Twins::new(4);
        let mut insert = |length| twins.insert(bytes_of(length, length)).unwrap();
        let roomy = insert(2100);
        let tight = insert(3000);
        assert_ne!(roomy.frame(), tight.frame());
        assert_eq!(insert(900).frame(), tight.frame());
        assert_eq!(insert(901).frame(), roomy.frame());
        assert_eq!(insert(100).frame(), tight.frame());
        twins.check();
    }

    #[test]
    fn sixteen_pages_are_the_most_of_a_frame() {
        let mut twins = Twins::new(2);
        let frames: Vec<u32> = (0..17)
            .map(|number| twins.insert(bytes_of(number, 20)).unwrap().frame())
            .collect();
        assert_eq!(frames, [vec![1; 16], vec![0]].concat());
        twins.empty();
    }

    #[test]
    fn without_a_frame_nothing_changes() {
        let mut twins = Twins::new(1);
        twins.insert(bytes_of(1, 3000)).unwrap();
        assert_eq!(twins.insert(bytes_of(2, 2000)), None);
        twins.check();
        assert!(twins.insert(bytes_of(3, 1000)).is_some());
        twins.empty();
    }

    #[test]
    fn pages_are_compressed_and_restored() {
        let mut compressor = Compressor::new();
        let mut random = fastrand::Rng::with_seed(3);
        for noise_bytes in [0, 10, 1000, 2000, 2500] {
            let mut page: Page = std::array::from_fn(|at| b"the quick brown fox "[at % 20]);
            page[..noise_bytes].fill_with(|| u8::try_from(random.usize(..256)).unwrap());
            let bytes = compressor.compress(&page).unwrap();
            let mut restored = [0xee; PAGE_BYTES];
            assert!(decompress(bytes, &mut restored));
            assert_eq!(restored, page);
            assert!(!decompress(&bytes[..bytes.len() - 1], &mut restored));
        }
        let two_pages = lz4_flex::block::compress(&[7; PAGE_BYTES * 2]);
        assert!(!decompress(&two_pages, &mut [0; PAGE_BYTES]));
    }

    #[test]
    fn pages_that_hardly_shrink_stay_as_they_are() {
        let mut compressor = Compressor::new();
        let mut random = fastrand::Rng::with_seed(3);
        let mut page = [0; PAGE_BYTES];
        for noise_bytes in [COMPRESSED_BYTES_MAX + 1, PAGE_BYTES] {
            page[..noise_bytes].fill_with(|| u8::try_from(random.usize(..256)).unwrap());
            assert_eq!(compressor.compress(&page), None);
        }
    }
}
