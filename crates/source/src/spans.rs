//! Accesses to byte ranges, converted to references to the pages they touch.
//!
//! A reader of addresses or of block I/O returns [`Span`]s; [`SpanSource`] converts them to
//! references, one per page, lowest first. A span may be split by the end of a batch.
//!
//! Not here: the device of a range (`requests`).

use plimsoll_flow::{AccessKind, PageNumber, PageSize, ReferenceBatch, Source};

use crate::{Options, SourceError};

/// Neighbouring pages that one access touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) kind: AccessKind,
    /// The lowest page that has not been returned yet.
    pub(crate) next: PageNumber,
    pub(crate) last: PageNumber,
    /// When it occurred, if times were asked for.
    pub(crate) time_us: u64,
    /// The number of its device, if groups were asked for.
    pub(crate) group: u32,
}

impl Span {
    /// The pages of the bytes from `first` to `last`.
    pub(crate) fn of_bytes(kind: AccessKind, first: u64, last: u64, page_size: PageSize) -> Self {
        Self {
            kind,
            next: page_size.page_of(first),
            last: page_size.page_of(last),
            time_us: 0,
            group: 0,
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

    /// See [`Trace::groups`](crate::Trace::groups).
    fn groups(&self) -> Vec<String> {
        Vec::new()
    }
}

/// A source that counts what it skipped, and names the groups of its references.
pub(crate) trait Reading: Source<Error = SourceError> {
    /// See [`Trace::skipped`](crate::Trace::skipped).
    fn skipped(&self) -> u64 {
        0
    }

    /// See [`Trace::groups`](crate::Trace::groups).
    fn groups(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The references of spans.
pub(crate) struct SpanSource<S> {
    spans: S,
    /// The part of a span that did not fit into the batch.
    pending: Option<Span>,
    with_times: bool,
    with_groups: bool,
}

impl<S: Spans> SpanSource<S> {
    pub(crate) fn new(spans: S, options: &Options) -> Self {
        Self {
            spans,
            pending: None,
            with_times: options.times,
            with_groups: options.groups.is_some(),
        }
    }

    /// Appends the pages of a span that fit into the batch; the others are pending.
    fn push(&mut self, mut span: Span, batch: &mut ReferenceBatch) {
        let before = batch.len();
        batch.push(span.next, span.kind);
        while span.next < span.last {
            span.next.0 += 1;
            if batch.is_full() {
                self.pending = Some(span);
                break;
            }
            batch.push(span.next, span.kind);
        }
        let added = batch.len() - before;
        if self.with_times {
            let times = std::iter::repeat_n(span.time_us, added);
            batch.details_mut().times_us.extend(times);
        }
        if self.with_groups {
            let groups = std::iter::repeat_n(span.group, added);
            batch.details_mut().groups.extend(groups);
        }
    }
}

impl<S: Spans> Source for SpanSource<S> {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while !batch.is_full() {
            let span = match self.pending.take() {
                Some(span) => span,
                None => match self.spans.next_span()? {
                    Some(span) => span,
                    None => break,
                },
            };
            self.push(span, batch);
        }
        Ok(!batch.is_empty())
    }
}

impl<S: Spans> Reading for SpanSource<S> {
    fn skipped(&self) -> u64 {
        self.spans.skipped()
    }

    fn groups(&self) -> Vec<String> {
        self.spans.groups()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Grouping;
    use plimsoll_flow::Details;
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
        let mut source = SpanSource::new(SpanList(vec![span].into_iter()), &Options::default());
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
                    time_us: first.into(),
                    group: first,
                })
                .collect();
            let options = Options {
                times: true,
                groups: Some(Grouping::Device),
                ..Options::default()
            };
            let mut source = SpanSource::new(SpanList(listed.into_iter()), &options);
            let mut batch = ReferenceBatch::new();
            let (mut pages, mut details) = (Vec::new(), Vec::new());
            let mut before_was_full = true;
            while source.next_batch(&mut batch).unwrap() {
                prop_assert!(before_was_full && batch.len() <= ReferenceBatch::CAPACITY);
                before_was_full = batch.is_full();
                pages.extend(batch.pages().iter().map(|page| page.0));
                let Details { times_us, groups, .. } = batch.details();
                prop_assert_eq!(times_us.len(), batch.len());
                details.extend(times_us.iter().copied().zip(groups.iter().copied()));
            }
            let firsts = spans.iter().flat_map(|&(first, more)| {
                let pages = usize::try_from(more + 1).unwrap();
                std::iter::repeat_n((first.into(), first), pages)
            });
            prop_assert_eq!(details, firsts.collect::<Vec<_>>());
            let expected: Vec<_> = spans
                .iter()
                .flat_map(|&(first, more)| u64::from(first)..=u64::from(first) + more)
                .collect();
            prop_assert_eq!(pages, expected);
        }
    }
}
