//! Panics of libraries, which their callers must not pass on.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is caught, so that it need not be printed.
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a library on what comes from outside; `None`, with nothing printed, if it panics. State that it may have left
/// inconsistent must not be used again.
pub(crate) fn contained<T>(run: impl FnOnce() -> T) -> Option<T> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            // A thread whose thread-local variables have been destroyed is not reading a trace.
            if !CONTAINED.try_with(Cell::get).unwrap_or(false) {
                before(panic);
            }
        }));
    });
    CONTAINED.set(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    CONTAINED.set(false);
    result.ok()
}
