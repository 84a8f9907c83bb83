//! The descriptor of a page: 32 bytes, two per cache line.

use crate::PoolId;
use crate::arena::{NIL, Slot};

/// Maximum number of pools of a store.
pub(crate) const POOLS: u32 = 4096;

/// The name of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Slot of its pool: two pools with pages have different ones.
    pub(crate) pool: u32,
    /// Number that the client assigned to it.
    pub(crate) object: u64,
}

impl Key {
    #[inline(always)]
    pub(crate) fn new(pool: PoolId, object: u64) -> Self {
        Self {
            pool: pool.0 % POOLS,
            object,
        }
    }
}

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

/// The object of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// This one, of which it is the only page.
    Sole(Key),
    /// The one of this record.
    Record(u32),
}

/// A page of the store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Descriptor {
    /// The object it belongs to, as the client numbered it if this is its only page; else the number of its record.
    object: u64,
    /// Frame, packed place, entry or word, depending on the flags.
    place: u32,
    /// Its index in the object.
    pub(crate) index: u32,
    /// Neighbours in its list, older and newer, 28 bits each; above them kind of place (two bits), incompressible (one), the only page of
    /// its object (one), the list (two), uses (two).
    links: u64,
    /// Bits 0..12 the pool if it is the only page of its object, bits 12.. the stamp.
    stamp: u64,
}

const _: () = assert!(size_of::<Descriptor>() == 32);

const ID_BITS: u32 = 28;

/// Numbers of descriptors are below this.
pub(crate) const IDS: u32 = ID_NIL;

/// No descriptor, in a link.
const ID_NIL: u32 = (1 << ID_BITS) - 1;

const OLDER_SHIFT: u32 = 0;
const NEWER_SHIFT: u32 = ID_BITS;
const KIND_SHIFT: u32 = 56;
const KIND: u64 = 0b11 << KIND_SHIFT;
const INCOMPRESSIBLE: u64 = 1 << 58;
const SOLE: u64 = 1 << 59;
const LIST_SHIFT: u32 = 60;
const LIST: u64 = 0b11 << LIST_SHIFT;
const USES_SHIFT: u32 = 62;
const USES: u64 = 0b11 << USES_SHIFT;
const STAMP_SHIFT: u32 = 12;
const _: () = assert!(POOLS == 1 << STAMP_SHIFT);

impl Descriptor {
    /// Returns the descriptor of a page that is in no list yet.
    pub(crate) fn new(owner: Owner, index: u32, place: Place, stamp: u64) -> Self {
        let mut new = Self {
            index,
            stamp: stamp << STAMP_SHIFT,
            ..Self::EMPTY
        };
        new.set_owner(owner);
        new.set_place(place);
        new
    }

    #[inline(always)]
    fn link(&self, shift: u32) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "28 bits are meant")]
        let id = (self.links >> shift) as u32 & ID_NIL;
        if id == ID_NIL { NIL } else { id }
    }

    #[inline(always)]
    fn set_link(&mut self, shift: u32, id: u32) {
        let others = self.links & !(u64::from(ID_NIL) << shift);
        self.links = others | u64::from(id & ID_NIL) << shift;
    }

    /// Its older neighbour in its list.
    #[inline(always)]
    pub(crate) fn older(&self) -> u32 {
        self.link(OLDER_SHIFT)
    }

    /// Changes its older neighbour.
    #[inline(always)]
    pub(crate) fn set_older(&mut self, id: u32) {
        self.set_link(OLDER_SHIFT, id);
    }

    /// Its newer neighbour in its list.
    #[inline(always)]
    pub(crate) fn newer(&self) -> u32 {
        self.link(NEWER_SHIFT)
    }

    /// Changes its newer neighbour.
    #[inline(always)]
    pub(crate) fn set_newer(&mut self, id: u32) {
        self.set_link(NEWER_SHIFT, id);
    }

    /// Its object.
    #[inline(always)]
    pub(crate) fn owner(&self) -> Owner {
        #[expect(clippy::cast_possible_truncation, reason = "the number of a record")]
        if self.links & SOLE == 0 {
            Owner::Record(self.object as u32)
        } else {
            Owner::Sole(Key {
                pool: self.stamp as u32 % POOLS,
                object: self.object,
            })
        }
    }

    /// Changes its object.
    #[inline(always)]
    pub(crate) fn set_owner(&mut self, owner: Owner) {
        match owner {
            Owner::Sole(Key { pool, object }) => {
                self.object = object;
                self.links |= SOLE;
                self.stamp = self.stamp >> STAMP_SHIFT << STAMP_SHIFT | u64::from(pool);
            }
            Owner::Record(record) => {
                self.object = record.into();
                self.links &= !SOLE;
            }
        }
    }

    /// The location of its contents.
    #[inline(always)]
    pub(crate) fn place(&self) -> Place {
        match (self.links & KIND) >> KIND_SHIFT {
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
        self.links = self.links & !KIND | kind << KIND_SHIFT;
    }

    /// The order in which pages came to their places in lists: rises within a shard.
    #[inline(always)]
    pub(crate) fn stamp(&self) -> u64 {
        self.stamp >> STAMP_SHIFT
    }

    /// Changes the stamp.
    #[inline(always)]
    pub(crate) fn set_stamp(&mut self, stamp: u64) {
        self.stamp = self.stamp & ((1 << STAMP_SHIFT) - 1) | stamp << STAMP_SHIFT;
    }

    /// The number of the list of its pool that it is in, 0 to 3.
    #[inline(always)]
    pub(crate) fn list(&self) -> usize {
        ((self.links & LIST) >> LIST_SHIFT) as usize
    }

    /// Records which list it is in.
    #[inline(always)]
    pub(crate) fn set_list(&mut self, list: usize) {
        self.links = self.links & !LIST | (list as u64) << LIST_SHIFT & LIST;
    }

    /// What the eviction policy stored about its uses, 0 to 3.
    #[inline(always)]
    pub(crate) fn uses(&self) -> u8 {
        ((self.links & USES) >> USES_SHIFT) as u8
    }

    /// Stores 0 to 3 uses.
    #[inline(always)]
    pub(crate) fn set_uses(&mut self, uses: u8) {
        self.links = self.links & !USES | u64::from(uses) << USES_SHIFT & USES;
    }

    /// Whether compression of its contents was tried and saved too little.
    pub(crate) fn is_incompressible(&self) -> bool {
        self.links & INCOMPRESSIBLE != 0
    }

    /// Records or clears that compression saved too little.
    pub(crate) fn set_incompressible(&mut self, incompressible: bool) {
        self.links = self.links & !INCOMPRESSIBLE | if incompressible { INCOMPRESSIBLE } else { 0 };
    }
}

impl Slot for Descriptor {
    /// Of a record that does not exist, so that it matches no object.
    const EMPTY: Self = Self {
        object: NIL as u64,
        place: 0,
        index: 0,
        links: (1 << (2 * ID_BITS)) - 1,
        stamp: 0,
    };

    fn next_free(&self) -> u32 {
        self.newer()
    }

    fn set_free(&mut self, next: u32) {
        *self = Self::EMPTY;
        self.set_newer(next);
    }

    fn later_free(&self) -> u32 {
        self.older()
    }

    fn set_later_free(&mut self, later: u32) {
        self.set_older(later);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_field_changes_another(
            (older, newer, index, place) in (0..IDS, 0..IDS, any::<u32>(), any::<u32>()),
            (pool, object, record, stamp) in (0..POOLS, any::<u64>(), any::<u32>(), 0..1_u64 << 52),
            (list, uses, incompressible) in (0..3_usize, 0..4_u8, any::<bool>()),
            places in Just(vec![Place::Frame as fn(u32) -> Place, Place::Packed, Place::Shared, Place::Word]).prop_shuffle(),
            order in Just((0..9).collect::<Vec<usize>>()).prop_shuffle(),
        ) {
            let place = places[0](place);
            let sole = Owner::Sole(Key { pool, object });
            let mut page = Descriptor::new(Owner::Record(!record), index, places[1](!0), 1 << 51);
            for step in order {
                match step {
                    0 => page.set_older(older),
                    1 => page.set_newer(newer),
                    2 => page.set_place(place),
                    3 => page.set_stamp(stamp),
                    4 => page.set_list(list),
                    5 => page.set_uses(uses),
                    6 => page.set_incompressible(incompressible),
                    7 => page.set_owner(sole),
                    _ => prop_assert_eq!(page.index, index),
                }
            }
            prop_assert_eq!((page.older(), page.newer(), page.index), (older, newer, index));
            prop_assert_eq!((page.place(), page.owner(), page.stamp()), (place, sole, stamp));
            prop_assert_eq!((page.list(), page.uses(), page.is_incompressible()), (list, uses, incompressible));
            page.set_owner(Owner::Record(record));
            page.set_older(NIL);
            prop_assert_eq!((page.owner(), page.older(), page.newer()), (Owner::Record(record), NIL, newer));
            prop_assert_eq!((page.place(), page.stamp(), page.list()), (place, stamp, list));
        }
    }
}
