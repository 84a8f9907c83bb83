//! Partial states: what a slice of a stream contributes to the curve of the whole stream.
//!
//! Slices are observed apart, by other threads, processes or machines, and appended to each other in the order of the stream:
//!
//! ```text
//! map      slice ──> Partial      once per reference, in parallel
//! merge    Partial, Partial, .. ──> Partial      once per reference or page that was kept; associative
//! finish   Partial ──> curve
//! ```
//!
//! The curve is, to the last bit, that which the estimator itself computes of the whole stream, however the stream is
//! cut and in whatever groups the partial states are merged.
//!
//! | estimator | a partial state has | a slice must know where it begins |
//! |---|---|---|
//! | `lru` | reuses by distance, the first and the last use of each distinct page, in order | no |
//! | `shards` | references to sampled pages, and 1/128 of all references (bursts) at rates from 1/1024 on | if there are bursts |
//! | `shards-max` | all references until 256 times the samples were seen, then those of a sample whose rate falls | no |
//!
//! How, and why that is right: `curve/lru/slice`, `curve/shards/slice`. Every byte: `form`.
//!
//! Not here: reading traces; distributing slices.

mod form;

use std::fmt;
use std::num::NonZeroUsize;

use plimsoll_flow::{CurveError, MissRatioCurve, PageNumber, PageSize, rate_text};

use crate::curve::lru::LruSlice;
use crate::curve::shards::{FixedRateSlice, FixedSizeSlice};
use crate::error::EstimatorError;
use crate::parts::check::{Check, Stopped, checked};

/// The estimator that a partial state is of, with its options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SliceOf {
    /// [`ExactLru`](crate::ExactLru).
    Lru,
    /// [`Shards`](crate::Shards).
    Shards {
        /// The share of the pages that is sampled.
        rate: f64,
        /// Which pages.
        seed: u64,
    },
    /// [`Shards`](crate::Shards).
    ShardsMax {
        /// The maximum number of sampled pages.
        max_samples: NonZeroUsize,
        /// Which pages.
        seed: u64,
    },
}

impl fmt::Display for SliceOf {
    /// The label of the estimator in tables.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lru => f.write_str("exact LRU"),
            Self::Shards { rate, .. } => write!(f, "SHARDS at rate {}", rate_text(*rate)),
            Self::ShardsMax { max_samples, .. } => write!(f, "SHARDS of {max_samples} pages"),
        }
    }
}

/// The largest position in a stream. A batch after it does not exceed 2^64.
const POSITION_MAX: u64 = 1 << 63;

/// Why a slice was not appended. The state is then undefined.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Why the contents cannot be of any slice.
    Invalid(&'static str),
    Stopped,
}

impl From<Stopped> for Refusal {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

/// What an estimator keeps of a slice.
pub(crate) trait Slice: Send + Sync + fmt::Debug {
    /// Whether the slice must know its position in the stream.
    fn needs_position(&self) -> bool {
        false
    }

    /// Processes the references after those so far, which begin at `position` of the stream, if that is known.
    fn observe(&mut self, position: Option<u64>, pages: &[PageNumber]);

    /// Processes a slice that follows, as [`into_contents`](Self::into_contents) returned it; `position` is where it begins.
    ///
    /// # Errors
    ///
    /// Why the contents were not appended.
    fn append(
        &mut self,
        position: Option<u64>,
        next: Contents,
        check: Check,
    ) -> Result<(), Refusal>;

    /// What another slice needs for [`append`](Self::append).
    fn into_contents(self: Box<Self>) -> Contents;

    /// The curve, if this is the whole stream.
    ///
    /// # Errors
    ///
    /// That of the check.
    fn curve(&self, check: Check) -> Result<Result<MissRatioCurve, CurveError>, Stopped>;
}

/// The contents of a slice in a form that all estimators share; what each list is, its estimator knows.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) references: u64,
    pub(crate) numbers: Vec<u64>,
    pub(crate) pages: [Vec<PageNumber>; 2],
}

/// Why slices yield no curve, or no partial state.
#[derive(Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PartialError {
    /// The bytes are something else.
    #[error("this is no partial state of a curve")]
    NoPartial,
    /// Written by a later version of this program.
    #[error(
        "the partial state has version {version}; only version {} is supported",
        form::VERSION
    )]
    Version {
        /// The version in its header.
        version: u32,
    },
    /// The bytes end early, or go on after the end.
    #[error("the partial state should have {expected} bytes, and has {bytes}")]
    Length {
        /// As its header says.
        expected: u128,
        /// Those that there are.
        bytes: usize,
    },
    /// The bytes were changed.
    #[error("the partial state is damaged: its checksum is wrong")]
    Damaged,
    /// The bytes are intact, and of no slice.
    #[error("the partial state is not valid: {0}")]
    Invalid(&'static str),
    /// The estimator rejects its options.
    #[error(transparent)]
    Refused(#[from] EstimatorError),
    /// The position of a slice is needed, and was not given.
    #[error(
        "{of} measures small sizes at positions that depend on the whole trace: state the slice's start, the number of references before it"
    )]
    NeedsStart {
        /// The estimator.
        of: SliceOf,
    },
    /// Slices of different estimators, options or page sizes.
    #[error("the first is of {first}, this one of {next}: they are of different curves")]
    Different {
        /// What the first is of.
        first: String,
        /// What the next one is of.
        next: String,
    },
    /// A slice does not begin where the one before it ends.
    #[error(
        "it begins at reference {start} of the trace, and those before it end at {end}: a slice is missing, or they are out of order"
    )]
    OutOfOrder {
        /// Where the slice begins.
        start: u64,
        /// Where it should begin.
        end: u64,
    },
    /// Only one of two slices states where it begins.
    #[error("some slices state where they begin and others do not: state it for all or for none")]
    StartOfSome,
    /// The first slices of the stream are missing.
    #[error("the first {start} references of the trace are missing")]
    FirstMissing {
        /// Where the first slice begins.
        start: u64,
    },
    /// The stream is longer than any.
    #[error("a trace has at most 2^63 references")]
    TooLong,
    /// Nothing was observed, or sampled.
    #[error(transparent)]
    Curve(#[from] CurveError),
}

/// A partial state.
///
/// ```
/// use plimsoll_estimator::{Estimator, Partial, Shards, SliceOf};
/// use plimsoll_flow::{PageNumber, PageSize};
///
/// let pages: Vec<_> = (0..1000).cycle().take(50_000).map(PageNumber).collect();
/// let of = SliceOf::Shards { rate: 0.1, seed: 42 };
/// let mut parts = Vec::new();
/// for (place, slice) in (0..).zip(pages.chunks(17_000)) {
///     let mut part = Partial::new(of, PageSize::default(), Some(place * 17_000))?;
///     part.observe(slice);
///     parts.push(part.into_bytes());
/// }
/// let mut whole = Partial::from_bytes(&parts[0])?;
/// for part in &parts[1..] {
///     whole.append(Partial::parse(part)?)?;
/// }
///
/// let mut plain = Shards::new(0.1, 42)?;
/// plain.observe(&pages);
/// assert_eq!(whole.curve()?, plain.curve()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Partial {
    of: SliceOf,
    page_size: PageSize,
    start: Option<u64>,
    references: u64,
    slice: Box<dyn Slice>,
}

/// A partial state that was read, and is not checked further until it is appended.
#[derive(Debug)]
pub struct ParsedPartial {
    of: SliceOf,
    page_size: PageSize,
    start: Option<u64>,
    contents: Contents,
}

impl Partial {
    /// The first eight bytes of the form in which partial states are stored.
    pub const MAGIC: &[u8; 8] = form::MAGIC;

    /// A slice without references yet, which begins after `start` references of the stream, if that is known.
    ///
    /// # Errors
    ///
    /// [`PartialError::NeedsStart`], [`PartialError::TooLong`] and [`PartialError::Refused`].
    pub fn new(of: SliceOf, page_size: PageSize, start: Option<u64>) -> Result<Self, PartialError> {
        let slice: Box<dyn Slice> = match of {
            SliceOf::Lru => Box::new(LruSlice::default()),
            SliceOf::Shards { rate, seed } => Box::new(FixedRateSlice::new(rate, seed)?),
            SliceOf::ShardsMax { max_samples, seed } => {
                Box::new(FixedSizeSlice::new(max_samples, seed))
            }
        };
        if start.is_some_and(|start| start > POSITION_MAX) {
            return Err(PartialError::TooLong);
        }
        if start.is_none() && slice.needs_position() {
            return Err(PartialError::NeedsStart { of });
        }
        Ok(Self {
            of,
            page_size,
            start,
            references: 0,
            slice,
        })
    }

    /// Processes the next references of the slice.
    pub fn observe(&mut self, pages: &[PageNumber]) {
        let end = self.end();
        self.slice.observe(end, pages);
        self.references += pages.len() as u64;
    }

    /// Reads a partial state: the first of those to be merged.
    ///
    /// # Errors
    ///
    /// As [`parse`](Self::parse), and [`PartialError::Invalid`] for bytes that are of no slice.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PartialError> {
        Self::from_bytes_checked(bytes, || Ok(()))
    }

    /// The same, with a check every million pages or samples, such as one for an interrupt.
    ///
    /// # Errors
    ///
    /// Those of [`from_bytes`](Self::from_bytes), and that of the check, which ends it.
    pub fn from_bytes_checked<E: From<PartialError>>(
        bytes: &[u8],
        check: impl Fn() -> Result<(), E>,
    ) -> Result<Self, E> {
        let parsed = Self::parse(bytes)?;
        let mut partial = Self::new(parsed.of, parsed.page_size, parsed.start)?;
        partial.append_checked(parsed, check)?;
        Ok(partial)
    }

    /// Appends the slice that follows in the stream.
    ///
    /// # Errors
    ///
    /// [`PartialError::Different`], [`PartialError::OutOfOrder`] and [`PartialError::StartOfSome`] and [`PartialError::TooLong`], which leave this one as it was;
    /// [`PartialError::Invalid`], after which it must not be used any more.
    pub fn append(&mut self, next: ParsedPartial) -> Result<(), PartialError> {
        self.append_checked(next, || Ok(()))
    }

    /// The same, with a check every million pages or samples, such as one for an interrupt.
    ///
    /// # Errors
    ///
    /// Those of [`append`](Self::append), and that of the check, after which this must not be used any more.
    pub fn append_checked<E: From<PartialError>>(
        &mut self,
        next: ParsedPartial,
        check: impl Fn() -> Result<(), E>,
    ) -> Result<(), E> {
        let (end, total) = self.joint(&next)?;
        match checked(check, |check| self.slice.append(end, next.contents, check))? {
            Ok(()) => {}
            Err(Refusal::Invalid(why)) => return Err(PartialError::Invalid(why).into()),
            Err(Refusal::Stopped) => unreachable!("the check's error was returned"),
        }
        self.references = total;
        Ok(())
    }

    /// Where a slice that is appended begins, if that is known, and the number of references with it.
    fn joint(&self, next: &ParsedPartial) -> Result<(Option<u64>, u64), PartialError> {
        let label = |of: SliceOf, page_size: PageSize| match of {
            SliceOf::Lru => format!("{of}, pages of {} bytes", page_size.bytes()),
            SliceOf::Shards { seed, .. } | SliceOf::ShardsMax { seed, .. } => {
                format!("{of}, seed {seed}, pages of {} bytes", page_size.bytes())
            }
        };
        if (self.of, self.page_size) != (next.of, next.page_size) {
            return Err(PartialError::Different {
                first: label(self.of, self.page_size),
                next: label(next.of, next.page_size),
            });
        }
        let end = self.end();
        match (end, next.start) {
            (Some(end), Some(start)) if start != end => {
                return Err(PartialError::OutOfOrder { start, end });
            }
            (Some(_), None) | (None, Some(_)) => return Err(PartialError::StartOfSome),
            _ => {}
        }
        let references = next.contents.references;
        let total = self.references.checked_add(references);
        let last = total.and_then(|total| total.checked_add(self.start.unwrap_or(0)));
        let (Some(total), Some(..=POSITION_MAX)) = (total, last) else {
            return Err(PartialError::TooLong);
        };
        Ok((end, total))
    }

    /// The curve of the stream.
    ///
    /// # Errors
    ///
    /// [`PartialError::FirstMissing`] if this is known not to be a whole stream, and [`PartialError::Curve`] if nothing was
    /// observed, or sampled.
    pub fn curve(&self) -> Result<MissRatioCurve, PartialError> {
        self.curve_checked(|| Ok(()))
    }

    /// The same, with a check every million samples, such as one for an interrupt.
    ///
    /// # Errors
    ///
    /// Those of [`curve`](Self::curve), and that of the check, which ends it.
    pub fn curve_checked<E: From<PartialError>>(
        &self,
        check: impl Fn() -> Result<(), E>,
    ) -> Result<MissRatioCurve, E> {
        if let Some(start @ 1..) = self.start {
            return Err(PartialError::FirstMissing { start }.into());
        }
        let curve = match checked(check, |check| self.slice.curve(check))? {
            Ok(curve) => curve,
            Err(Stopped) => unreachable!("the check's error was returned"),
        };
        curve.map_err(|error| PartialError::from(error).into())
    }

    /// The estimator and its options.
    pub fn of(&self) -> SliceOf {
        self.of
    }

    /// The size of the pages.
    pub fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Number of references observed, sampled or not.
    pub fn references(&self) -> u64 {
        self.references
    }

    /// Where the next slice begins.
    fn end(&self) -> Option<u64> {
        self.start.map(|start| start + self.references)
    }
}

#[cfg(test)]
mod tests;
