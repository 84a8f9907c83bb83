//! The backends: what each observes of a running VM, its requirements, costs and losses, and how it is started.
//!
//! A backend is one file with an implementation of [`Backend`](crate::Backend) and a [`BackendRow`], and its row's
//! entry in [`BACKENDS`]. The command line's choices and help, and `doctor`, are generated from the rows.

use plimsoll_flow::TraceMethod;

use crate::backend::BackendRow;
use crate::{damon, first_touch, idle, page_cache, rwp, sampled_pages, scans, traps, write_scan};

/// Every backend.
pub const BACKENDS: &[&BackendRow] = &[
    &traps::ROW,
    &scans::ROW,
    &write_scan::ROW,
    &sampled_pages::ROW,
    &first_touch::ROW,
    &rwp::ROW,
    &idle::ROW,
    &damon::ROW,
    &page_cache::ROW,
];

impl BackendRow {
    /// The row of a method.
    ///
    /// # Panics
    ///
    /// If a method has no row, which a test excludes.
    pub fn of(method: TraceMethod) -> &'static Self {
        let mut rows = BACKENDS.iter();
        rows.find(|row| row.method == method)
            .expect("every method has a row")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_has_one_row() {
        for method in TraceMethod::ALL {
            let rows = BACKENDS.iter().filter(|row| row.method == method);
            assert_eq!(rows.count(), 1, "{method}");
            assert_eq!(BackendRow::of(method).name(), method.name());
        }
        assert_eq!(BACKENDS.len(), TraceMethod::ALL.len());
    }
}
