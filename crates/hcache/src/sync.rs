//! Locks and atomics: those of the standard library, or those of shuttle to explore schedules.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{
    Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard,
    atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{
    Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard,
    atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

/// Locks; a lock poisoned by a panic in a caller's closure is acquired all the same, because the data it guards
/// is consistent before such a closure is called.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Acquires a lock for shared use.
pub(crate) fn read(guard: &RwLock<()>) -> RwLockReadGuard<'_, ()> {
    guard
        .read()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits until all who shared a lock at the call have released it.
pub(crate) fn wait_for_readers(guard: &RwLock<()>) {
    drop(
        guard
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner),
    );
}
