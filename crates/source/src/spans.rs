//! Accesses to byte ranges, converted to references to the pages they touch.
//!
//! A reader of addresses or of block I/O returns [`Span`]s; [`SpanSource`] converts them to
//! references, one per page, lowest first. A span may be split by the end of a batch.
//!
//! Not here: the device of a range (`requests`).

use plimsoll_flow::{AccessKind, PageNumber, PageSize, ReferenceBatch, Source};

use crate::SourceError;

/// Neighbouring pages that one access touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) kind: AccessKind,
    /// The lowest page that has not been returned yet.
    pub(crate) next: PageNumber,
    pub(crate) last: PageNumber,
}

impl Span {
    /// The pages of the bytes from `first` to `last`.
    pub(crate) fn of_bytes(kind: AccessKind, first: u64, last: u64, page_size: PageSize) -> Self {
        Self {
            kind,
            next: page_size.page_of(first),
            last: page_size.page_of(last),
        }
    }
}

/// A reader of spans.
pub(crate) trait Spans {
    /// Returns the next access that counts, or `None` after the last.
    fn next_span(&mut self) -> Result<Option<Span>, SourceError>;

    /// See [`Trace::skipped`](crate::Trace::skipped).
    fn skipped(&self) -> u64 {
        0
    }
}

/// A source that counts what it skipped.
pub(crate) trait Reading: Source<Error = SourceError> {
    /// See [`Trace::skipped`](crate::Trace::skipped).
    fn skipped(&self) -> u64 {
        0
    }
}

/// The references of spans.
pub(crate) struct SpanSource<S> {
    spans: S,
    /// The part of a span that did not fit into the batch.
    pending: Option<Span>,
}

impl<S: Spans> SpanSource<S> {
    pub(crate) fn new(spans: S) -> Self {
        Self {
            spans,
            pending: None,
        }
    }
}

impl<S: Spans> Source for SpanSource<S> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while !batch.is_full() {
            let mut span = match self.pending.take() {
                Some(span) => span,
                None => match self.spans.next_span()? {
                    Some(span) => span,
                    None => break,
                },
            };
            batch.push(span.next, span.kind);
            while span.next < span.last {
                span.next.0 += 1;
                if batch.is_full() {
                    self.pending = Some(span);
                    break;
                }
                batch.push(span.next, span.kind);
            }
        }
        Ok(!batch.is_empty())
    }
}

impl<S: Spans> Reading for SpanSource<S> {
    fn skipped(&self) -> u64 {
        self.spans.skipped()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct SpanList(std::vec::IntoIter<Span>);

    impl Spans for SpanList {
        fn next_span(&mut self) -> Result<Option<Span>, SourceError> {
            Ok(self.0.next())
        }
    }

    #[test]
    fn the_last_page_there_is_ends_a_span() {
        let size = PageSize::new(1).unwrap();
        let span = Span::of_bytes(AccessKind::Read, u64::MAX - 1, u64::MAX, size);
        let mut source = SpanSource::new(SpanList(vec![span].into_iter()));
        let mut batch = ReferenceBatch::new();
        assert!(source.next_batch(&mut batch).unwrap());
        assert_eq!(batch.pages(), [u64::MAX - 1, u64::MAX].map(PageNumber));
        assert!(!source.next_batch(&mut batch).unwrap());
    }

    proptest! {
        #[test]
        fn batches_are_full_and_hold_every_page_of_every_span(
            spans in prop::collection::vec((any::<u32>(), 0u64..40_000), 0..6),
        ) {
            let listed: Vec<_> = spans
                .iter()
                .map(|&(first, more)| Span {
                    kind: AccessKind::Write,
                    next: PageNumber(first.into()),
                    last: PageNumber(u64::from(first) + more),
                })
                .collect();
            let mut source = SpanSource::new(SpanList(listed.into_iter()));
            let mut batch = ReferenceBatch::new();
            let mut pages = Vec::new();
            let mut before_was_full = true;
            while source.next_batch(&mut batch).unwrap() {
                prop_assert!(before_was_full && batch.len() <= ReferenceBatch::CAPACITY);
                before_was_full = batch.is_full();
                pages.extend(batch.pages().iter().map(|page| page.0));
            }
            let expected: Vec<_> = spans
                .iter()
                .flat_map(|&(first, more)| u64::from(first)..=u64::from(first) + more)
                .collect();
            prop_assert_eq!(pages, expected);
        }
    }
}
