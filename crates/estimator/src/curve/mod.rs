//! Miss-ratio curves of whole streams, one directory for each family of algorithms.

pub(crate) mod aet;
pub(crate) mod counter_stacks;
pub(crate) mod footprint;
pub(crate) mod ghost;
pub(crate) mod lru;
pub(crate) mod shards;
pub(crate) mod sized;
