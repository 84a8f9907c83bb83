//! Ends long work between two of its pieces, such as after an interrupt.

use std::cell::Cell;

/// References or pages that are processed between two checks of a merge or of a curve.
pub(crate) const PIECE: usize = 1 << 20;

/// Whether to go on, such as after an interrupt.
pub(crate) type Check<'a> = &'a dyn Fn() -> Result<(), Stopped>;

/// A check ended the work.
#[derive(Debug)]
pub(crate) struct Stopped;

/// Calls a function with a check that ends its work, and returns the check's own error if it did.
pub(crate) fn checked<T, E>(
    check: impl Fn() -> Result<(), E>,
    work: impl FnOnce(Check) -> T,
) -> Result<T, E> {
    let stopped_by = Cell::new(None);
    let done = work(&|| {
        check().map_err(|error| {
            stopped_by.set(Some(error));
            Stopped
        })
    });
    stopped_by.into_inner().map_or(Ok(done), Err)
}
