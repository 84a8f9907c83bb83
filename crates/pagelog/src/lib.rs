//! A source: the pages that a processor logs while a VM runs.
//!
//! *PML* logs a page when a write sets its dirty flag, *PRL* at every page walk (\[PRL\] §2, §4). A QEMU
//! plugin (`qemu/pagelog`) tells every walk of an emulated machine ([`record`]).
//!
//! Not here: estimating working sets (crate `plimsoll-estimator`), starting machines.

pub mod record;
