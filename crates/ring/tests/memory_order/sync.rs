//! loom's atomics, of whose accesses one can be weakened: an acquire or release to relaxed, a fence to none.

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::{Mutex, OnceLock, PoisonError};

pub use loom::sync::atomic::Ordering;

use crate::words::Word;

/// An access that is not relaxed, by its line.
#[derive(Debug, Clone)]
pub struct Site {
    pub number: u32,
    pub what: String,
}

static SITES: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());
static WEAKENED: OnceLock<u32> = OnceLock::new();

/// All sites met so far.
pub fn sites() -> Vec<Site> {
    let sites = SITES.lock().unwrap_or_else(PoisonError::into_inner);
    let sites = sites.iter().map(|(&number, what)| Site {
        number,
        what: what.clone(),
    });
    sites.collect()
}

/// Weakens a site in this process.
pub fn weaken(site: u32) {
    WEAKENED.set(site).expect("one site");
}

/// The ordering of an access, unless its site is the weakened one.
#[track_caller]
fn ordering(order: Ordering, what: impl FnOnce() -> String) -> Ordering {
    if order == Ordering::Relaxed {
        return order;
    }
    let line = Location::caller().line();
    let mut sites = SITES.lock().unwrap_or_else(PoisonError::into_inner);
    sites.entry(line).or_insert_with(what);
    if WEAKENED.get() == Some(&line) {
        Ordering::Relaxed
    } else {
        order
    }
}

/// A word of the ring.
pub struct AtomicU32 {
    pub of: Word,
    word: loom::sync::atomic::AtomicU32,
}

impl AtomicU32 {
    pub fn new(of: Word) -> Self {
        Self {
            of,
            word: loom::sync::atomic::AtomicU32::new(0),
        }
    }

    #[track_caller]
    pub fn load(&self, order: Ordering) -> u32 {
        let order = ordering(order, || format!("load of {:?}", self.of));
        self.word.load(order)
    }

    #[track_caller]
    pub fn store(&self, value: u32, order: Ordering) {
        let order = ordering(order, || format!("store of {:?}", self.of));
        self.word.store(value, order);
    }

    #[track_caller]
    pub fn swap(&self, value: u32, order: Ordering) -> u32 {
        let order = ordering(order, || format!("swap of {:?}", self.of));
        self.word.swap(value, order)
    }
}

#[track_caller]
pub fn fence(order: Ordering) {
    let line = Location::caller().line();
    if ordering(order, || format!("fence in line {line}")) != Ordering::Relaxed {
        loom::sync::atomic::fence(order);
    }
}
