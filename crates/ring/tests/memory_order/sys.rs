//! Memory of which loom checks that its accesses are ordered.
#![allow(unsafe_code)]

use loom::cell::UnsafeCell;

/// An entry, a completion or a slot.
#[derive(Default)]
pub struct Place(UnsafeCell<u32>);

// SAFETY: accesses go through loom's cell alone, which ends the program before one that is not ordered after the others.
unsafe impl Sync for Place {}

impl Place {
    pub fn read(&self) -> u32 {
        // SAFETY: as above, nobody writes it meanwhile.
        self.0.with(|value| unsafe { *value })
    }

    pub fn write(&self, new: u32) {
        // SAFETY: as above, nobody accesses it meanwhile.
        self.0.with_mut(|value| unsafe { *value = new });
    }
}
