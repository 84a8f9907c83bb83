//! References: accesses to pages, in the order in which they occurred.

use crate::PageNumber;

/// Kind of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AccessKind {
    /// The page was read.
    Read,
    /// The page was written.
    Write,
    /// The source does not record it.
    #[default]
    Unknown,
}

/// Position of a reference in its stream, counted from 0: references, not seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LogicalTime(pub u64);

/// One access to one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Reference {
    /// The page that was accessed.
    pub page: PageNumber,
    /// Kind of the access.
    pub kind: AccessKind,
    /// Its position, in references since the start of the stream.
    pub time: LogicalTime,
}

/// What some sources also record of references, in columns: each is empty, or has an entry for each reference of the batch.
///
/// A source fills the columns that it was asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Details {
    /// Time in microseconds since any fixed moment.
    pub times_us: Vec<u64>,
    /// Size of the referenced object in bytes.
    pub sizes_bytes: Vec<u32>,
    /// Number of the device, or of the request, to which the reference belongs.
    pub groups: Vec<u32>,
}

impl Details {
    fn clear(&mut self) {
        self.times_us.clear();
        self.sizes_bytes.clear();
        self.groups.clear();
    }
}

/// Consecutive references of one stream, in order: the unit that stages exchange.
///
/// Pages and kinds are stored in columns of equal length, so that an estimator that
/// uses only pages reads only pages. The time of a reference is
/// [`start`](Self::start) plus its index.
#[derive(Debug, Clone, Default)]
pub struct ReferenceBatch {
    start: LogicalTime,
    pages: Vec<PageNumber>,
    kinds: Vec<AccessKind>,
    details: Details,
}

impl ReferenceBatch {
    /// Number of references that a source normally puts into a batch:
    /// 9 bytes each, so that a batch fits into a core's second-level cache.
    pub const CAPACITY: usize = 1 << 14;

    /// Returns an empty batch at the start of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a reference; its time follows that of the last one.
    #[inline]
    pub fn push(&mut self, page: PageNumber, kind: AccessKind) {
        self.pages.push(page);
        self.kinds.push(kind);
    }

    /// Appends many references at once by copying their columns.
    ///
    /// Pages without a kind are of kind [`AccessKind::Unknown`]; kinds without a page are ignored.
    #[inline]
    pub fn extend(
        &mut self,
        pages: impl IntoIterator<Item = PageNumber>,
        kinds: impl IntoIterator<Item = AccessKind>,
    ) {
        self.pages.extend(pages);
        let added = self.pages.len() - self.kinds.len();
        self.kinds.extend(kinds.into_iter().take(added));
        self.kinds.resize(self.pages.len(), AccessKind::Unknown);
    }

    /// Empties the batch for the references that come next in the stream.
    pub fn advance(&mut self) {
        self.start.0 += self.pages.len() as u64;
        self.pages.clear();
        self.kinds.clear();
        self.details.clear();
    }

    /// Time of the batch's first reference, or of the next one if the batch is empty.
    pub fn start(&self) -> LogicalTime {
        self.start
    }

    /// The pages, in order.
    pub fn pages(&self) -> &[PageNumber] {
        &self.pages
    }

    /// Kind of each access; as long as [`pages`](Self::pages).
    pub fn kinds(&self) -> &[AccessKind] {
        &self.kinds
    }

    /// The columns that not every source has.
    pub fn details(&self) -> &Details {
        &self.details
    }

    /// The same, for a source, which appends to a column as many entries as there are references, or none.
    pub fn details_mut(&mut self) -> &mut Details {
        &mut self.details
    }

    /// Number of references in the batch.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Whether the batch holds [`CAPACITY`](Self::CAPACITY) references or more.
    pub fn is_full(&self) -> bool {
        self.pages.len() >= Self::CAPACITY
    }

    /// Iterates over the references with their times.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Reference> + '_ {
        let start = self.start.0;
        self.pages
            .iter()
            .zip(&self.kinds)
            .enumerate()
            .map(move |(index, (&page, &kind))| Reference {
                page,
                kind,
                time: LogicalTime(start + index as u64),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logical_time_runs_on_from_batch_to_batch() {
        let mut batch = ReferenceBatch::new();
        batch.push(PageNumber(7), AccessKind::Read);
        batch.push(PageNumber(9), AccessKind::Write);
        batch.advance();
        assert!(batch.is_empty());
        batch.push(PageNumber(7), AccessKind::Unknown);
        let references: Vec<_> = batch.iter().collect();
        assert_eq!(
            references,
            [Reference {
                page: PageNumber(7),
                kind: AccessKind::Unknown,
                time: LogicalTime(2),
            }]
        );
    }

    #[test]
    fn details_belong_to_the_references_of_one_batch() {
        let mut batch = ReferenceBatch::new();
        batch.push(PageNumber(7), AccessKind::Read);
        batch.details_mut().sizes_bytes.push(512);
        assert_eq!(batch.details().sizes_bytes, [512]);
        batch.advance();
        assert_eq!(batch.details(), &Details::default());
    }

    #[test]
    fn extending_is_pushing_one_by_one_and_the_columns_stay_equally_long() {
        use AccessKind::{Read, Unknown, Write};
        let mut batch = ReferenceBatch::new();
        batch.push(PageNumber(1), Write);
        batch.extend([2, 3].map(PageNumber), [Read, Write, Read]);
        batch.extend([4, 5].map(PageNumber), [Write]);
        batch.extend([], [Write]);
        batch.extend([6].map(PageNumber), []);
        assert_eq!(batch.pages(), [1, 2, 3, 4, 5, 6].map(PageNumber));
        assert_eq!(batch.kinds(), [Write, Read, Write, Write, Unknown, Unknown]);
    }
}
