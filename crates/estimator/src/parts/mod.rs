//! Components shared by several estimators: hashes, samples, orders of last use, and curves under construction.

pub(crate) mod access_bits;
pub(crate) mod access_tree;
pub(crate) mod check;
pub(crate) mod filter;
pub(crate) mod hash;
pub(crate) mod histogram;
pub(crate) mod last_use;
pub(crate) mod log_errors;
#[cfg(test)]
pub(crate) mod naive;
pub(crate) mod ratio;
pub(crate) mod steps;
#[cfg(test)]
pub(crate) mod streams;
pub(crate) mod sys;
