//! The added sizes at which the parts of a band are measured, and values at the sizes between them.

use plimsoll_flow::PageCount;

/// Number of sizes.
pub(super) const SIZES: usize = 16;

/// The sizes for a list of `ghost` pages: closer to each other near the guest, the last one the whole list.
pub(super) fn sizes(ghost: PageCount) -> [f64; SIZES] {
    std::array::from_fn(|before| ghost.0 as f64 * ((before + 1) as f64 / SIZES as f64).powi(2))
}

/// The value with `beyond` pages added, on the line between those at the two sizes about it; 0 with none.
pub(super) fn between(ghost: PageCount, values: &[f64; SIZES], beyond: f64) -> f64 {
    let mut before = (0.0, 0.0);
    for after in sizes(ghost).into_iter().zip(values.iter().copied()) {
        if beyond <= after.0 {
            let share = (beyond - before.0) / (after.0 - before.0);
            return before.1 + (after.1 - before.1) * share;
        }
        before = after;
    }
    before.1
}
