//! Atomics of the words that both ends of a ring share. The model of `tests/memory_order` has its own in their place.

pub(crate) use std::sync::atomic::{AtomicU32, Ordering, fence};
