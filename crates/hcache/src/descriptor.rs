//! The descriptor of a page: 32 bytes, two per cache line.

use crate::arena::{NIL, Slot};

/// The location of a page's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a frame of its own.
    Frame(u32),
    /// Compressed, in a packed frame.
    Packed(u32),
    /// In a frame that several pages share: an entry of the table of contents.
    Shared(u32),
    /// Nowhere: the contents are this word repeated.
    Word(u32),
}

/// A page of the store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Descriptor {
    /// Neighbours in its list.
    pub(crate) older: u32,
    pub(crate) newer: u32,
    /// The object it belongs to.
    pub(crate) object: u32,
    /// Its index in the object.
    pub(crate) index: u32,
    /// Frame, packed place, entry or word, depending on the flags.
    place: u32,
    /// Bits 0..2 kind of place, bit 2 incompressible, bits 4..6 the list, bits 6..8 uses, bits 8.. the stamp.
    bits: u64,
}

const KIND: u64 = 0b11;
const INCOMPRESSIBLE: u64 = 1 << 2;
const LIST: u64 = 0b11 << LIST_SHIFT;
const LIST_SHIFT: u32 = 4;
const USES: u64 = 0b11 << USES_SHIFT;
const USES_SHIFT: u32 = 6;
const STAMP_SHIFT: u32 = 8;

impl Descriptor {
    /// Returns the descriptor of a page that is in no list yet.
    pub(crate) fn new(object: u32, index: u32, place: Place, stamp: u64) -> Self {
        let mut new = Self {
            older: NIL,
            newer: NIL,
            object,
            index,
            place: 0,
            bits: stamp << STAMP_SHIFT,
        };
        new.set_place(place);
        new
    }

    /// The location of its contents.
    #[inline(always)]
    pub(crate) fn place(&self) -> Place {
        match self.bits & KIND {
            0 => Place::Frame(self.place),
            1 => Place::Packed(self.place),
            2 => Place::Shared(self.place),
            _ => Place::Word(self.place),
        }
    }

    /// Changes the location of its contents.
    #[inline(always)]
    pub(crate) fn set_place(&mut self, place: Place) {
        let (kind, number) = match place {
            Place::Frame(frame) => (0, frame),
            Place::Packed(place) => (1, place),
            Place::Shared(entry) => (2, entry),
            Place::Word(word) => (3, word),
        };
        self.place = number;
        self.bits = self.bits & !KIND | kind;
    }

    /// The order in which pages came to their places in lists: rises within a shard.
    #[inline(always)]
    pub(crate) fn stamp(&self) -> u64 {
        self.bits >> STAMP_SHIFT
    }

    /// Changes the stamp.
    #[inline(always)]
    pub(crate) fn set_stamp(&mut self, stamp: u64) {
        self.bits = self.bits & ((1 << STAMP_SHIFT) - 1) | stamp << STAMP_SHIFT;
    }

    /// The number of the list of its pool that it is in, 0 to 3.
    #[inline(always)]
    pub(crate) fn list(&self) -> usize {
        ((self.bits & LIST) >> LIST_SHIFT) as usize
    }

    /// Records which list it is in.
    #[inline(always)]
    pub(crate) fn set_list(&mut self, list: usize) {
        self.bits = self.bits & !LIST | (list as u64) << LIST_SHIFT & LIST;
    }

    /// What the eviction policy stored about its uses, 0 to 3.
    #[inline(always)]
    pub(crate) fn uses(&self) -> u8 {
        ((self.bits & USES) >> USES_SHIFT) as u8
    }

    /// Stores 0 to 3 uses.
    #[inline(always)]
    pub(crate) fn set_uses(&mut self, uses: u8) {
        self.bits = self.bits & !USES | u64::from(uses) << USES_SHIFT & USES;
    }

    /// Whether compression of its contents was tried and saved too little.
    pub(crate) fn is_incompressible(&self) -> bool {
        self.bits & INCOMPRESSIBLE != 0
    }

    /// Records or clears that compression saved too little.
    pub(crate) fn set_incompressible(&mut self, incompressible: bool) {
        self.bits = self.bits & !INCOMPRESSIBLE | if incompressible { INCOMPRESSIBLE } else { 0 };
    }
}

impl Slot for Descriptor {
    const EMPTY: Self = Self {
        older: NIL,
        newer: NIL,
        object: NIL,
        index: 0,
        place: 0,
        bits: 0,
    };

    fn next_free(&self) -> u32 {
        self.newer
    }

    fn set_free(&mut self, next: u32) {
        *self = Self {
            newer: next,
            ..Self::EMPTY
        };
    }

    fn later_free(&self) -> u32 {
        self.older
    }

    fn set_later_free(&mut self, later: u32) {
        self.older = later;
    }
}
