//! Waiting for what announces no change: by polling, with a deadline.

use std::thread;
use std::time::{Duration, Instant};

/// Time between two polls.
pub const POLL: Duration = Duration::from_millis(20);

/// Polls `check` until it returns something; `what` names it in the error.
///
/// # Errors
///
/// The first error of `check`, and that nothing came within `limit`.
pub fn try_wait_for<T>(
    what: &str,
    limit: Duration,
    mut check: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = check()? {
            return Ok(value);
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "this did not come within {limit:?}: {what}"
        );
        thread::sleep(POLL);
    }
}

/// As [`try_wait_for`], for tests.
///
/// # Panics
///
/// If nothing came within `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, mut check: impl FnMut() -> Option<T>) -> T {
    try_wait_for(what, limit, || Ok(check())).unwrap_or_else(|error| panic!("{error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_a_value_an_error_or_its_deadline() {
        let mut left = 2;
        let counted = try_wait_for("zero", Duration::from_secs(60), || {
            left -= 1;
            Ok((left == 0).then_some("zero"))
        });
        assert_eq!(counted.unwrap(), "zero");
        let failed = try_wait_for::<()>("x", Duration::from_secs(60), || anyhow::bail!("broken"));
        assert_eq!(failed.unwrap_err().to_string(), "broken");
        let late = try_wait_for::<()>("a miracle", Duration::ZERO, || Ok(None));
        assert!(late.unwrap_err().to_string().contains("a miracle"));
    }
}
