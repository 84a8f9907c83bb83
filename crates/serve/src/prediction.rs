//! What both servers share in predicting hit ratios from a ghost list.

use std::sync::{Mutex, MutexGuard, PoisonError};

use plimsoll_flow::{MissRatioCurve, PageCount};

/// References behind a curve below which it predicts nothing: the ratios would be noise.
const REFERENCES_MIN: u64 = 100;

/// Locks the counts of a ghost list. A list that a panic left half updated is still a valid list.
pub fn lock<T>(counts: &Mutex<T>) -> MutexGuard<'_, T> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a curve rests on enough references to predict anything.
pub fn is_enough(curve: &MissRatioCurve) -> bool {
    curve.references() >= REFERENCES_MIN
}

/// The share of references, 0.0 to 1.0, that would hit at each size; `None` while the curve rests on
/// too few of them.
pub fn hit_ratios<const N: usize>(
    curve: &MissRatioCurve,
    sizes: [PageCount; N],
) -> Option<[f64; N]> {
    is_enough(curve).then(|| sizes.map(|size| 1.0 - curve.miss_ratio(size)))
}
