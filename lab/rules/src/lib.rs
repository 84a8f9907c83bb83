//! The rules that hold for the whole project. They are this crate's tests, which compile none of the others.

#![forbid(unsafe_code)]
