//! Working sets without a curve: from the pages that a VM touches, writes or misses.
//!
//! | estimator | input | result | file |
//! |---|---|---|---|
//! | [`Prl`] | every page walk, as logged | pages logged often, once their number is constant | `prl` |
//! | [`Pml`] | first writes of an interval | pages written, once there are no new ones | `pml` |
//! | [`Sampling`] | touches of a few random pages | share touched x memory, with its confidence interval | `sampling` |
//! | [`Refault`] | pages that the guest misses while it is shrunk | the smallest size at which it misses nothing | `refault` |
//! | [`TouchedPages`] | every touch | the working set by definition: the truth for the others | `touched` |
//!
//! Three answer other questions: [`HotPages`] which pages to load first, [`WriteCurve`] how many pages are written within a time,
//! and [`precopy()`] how a live migration goes.
//!
//! All others except [`Refault`] share the trait [`WorkingSetEstimator`] and have a row in
//! [`METHODS`](crate::registry::METHODS). They are fed page numbers, and the end of each *interval* (a step of
//! μ seconds, \[PRL\] §4.4). Cost is O(1) per page fed; memory is proportional to the number of distinct pages fed.
//!
//! Not here: curves (the 5 % point of any is [`MissRatioCurve::size_for`](plimsoll_flow::MissRatioCurve::size_for)),
//! clocks, sources of pages, and the definition of an interval.

mod estimator;
mod hot;
mod pml;
mod precopy;
mod prl;
mod refault;
mod sampling;
mod settling;
mod touched;
mod written;

pub use estimator::WorkingSetEstimator;
pub use hot::{HotPage, HotPages};
pub use pml::{Pml, PmlOptions, PmlStep};
pub use precopy::{Contents, Precopy, PrecopyOptions, precopy};
pub use prl::{Prl, PrlOptions, PrlStep};
pub use refault::{Refault, RefaultObservation, RefaultOptions, RefaultPhase};
pub use sampling::{SampledShare, Sampling, SamplingOptions, SamplingStep};
pub use settling::SettledSize;
pub use touched::{TouchedOptions, TouchedPages, TouchedStep};
pub use written::{WriteCurve, WrittenPages};
