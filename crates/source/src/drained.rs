//! Test helpers that read a source to its end.

use plimsoll_flow::{AccessKind, ReferenceBatch, Source};

use crate::SourceError;

/// References as pages and kinds.
pub(crate) type References = Vec<(u64, AccessKind)>;

/// Returns all references, or the error that ended them.
pub(crate) fn references_of(
    source: &mut impl Source<Error = SourceError>,
) -> Result<References, SourceError> {
    match drained(source) {
        (all, None) => Ok(all),
        (_, Some(fault)) => Err(fault),
    }
}

/// Returns the references before the end or an error, and the error.
pub(crate) fn drained(
    source: &mut impl Source<Error = SourceError>,
) -> (References, Option<SourceError>) {
    let mut batch = ReferenceBatch::new();
    let mut all = Vec::new();
    loop {
        let result = source.next_batch(&mut batch);
        assert!(batch.len() <= ReferenceBatch::CAPACITY);
        all.extend(
            batch
                .iter()
                .map(|reference| (reference.page.0, reference.kind)),
        );
        match result {
            Ok(true) => {}
            Ok(false) => return (all, None),
            Err(fault) => return (all, Some(fault)),
        }
    }
}
