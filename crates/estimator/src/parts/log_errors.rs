//! The error of the logarithm of a point's misses, by what weightings of the same sample make of them.
//!
//! Weightings may be random ones of its stretches of time (the Bayesian bootstrap of \[Rubin81\]), leave out a part of the sample each
//! (the jackknife), or stand for a part that is independent of the others. The same weighting has the same place at every size, so that what it changes at two of them alike
//! cancels out in their quotient.
//!
//! Not here: the factor by which deviations make a band, which depends on the kind of weightings.

use plimsoll_flow::{LOG_ERRORS, LogErrors};

/// Number of weightings: one part of the errors is the model's own.
pub(crate) const WEIGHTINGS: usize = LOG_ERRORS - 1;

/// Shares of the misses below this count as this.
const SHARE_MIN: f64 = 1e-6;

/// The logarithm of a share of the misses.
pub(crate) fn log_share(share: f64) -> f64 {
    share.max(SHARE_MIN).ln()
}

/// The errors of a share `own` of the misses, by those of the weightings, whose deviations count `factor` times, and the
/// `model`'s own, in the logarithm.
pub(crate) fn log_errors(
    own: f64,
    others: impl Iterator<Item = f64>,
    factor: f64,
    model: f64,
) -> LogErrors {
    let own = log_share(own);
    let mut errors = [0; LOG_ERRORS];
    for (error, other) in errors.iter_mut().zip(others.take(WEIGHTINGS)) {
        *error = permille((log_share(other) - own) * factor);
    }
    errors[WEIGHTINGS] = permille(model);
    errors
}

/// The errors where the model may have found misses of which only the share `left` is real.
pub(crate) fn with_model_error(mut errors: LogErrors, left: f64) -> LogErrors {
    // The model's own error is larger for small shares, which are negative logarithms: the two do not cancel out.
    errors[WEIGHTINGS] = errors[WEIGHTINGS].saturating_sub(permille(log_share(left)));
    errors
}

/// A part of an error of a logarithm in thousandths; the nearest that fits.
pub(crate) fn permille(part: f64) -> i16 {
    #[expect(clippy::cast_possible_truncation, reason = "it saturates at e^32")]
    let permille = (part * 1000.0).round() as i16;
    permille
}
