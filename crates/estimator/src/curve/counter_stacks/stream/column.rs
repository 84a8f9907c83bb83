//! One interval of the record.

use super::coding::{buckets_of, take_varint};

/// One interval as recorded.
pub(super) struct Column<'bytes> {
    pub(super) references: u64,
    pub(super) last: bool,
    pub(super) distinct: u64,
    /// Pairs of bucket and reuses.
    pub(super) reuses: Vec<(u64, u64)>,
    /// The rest of the payload: the counters' rises.
    pub(super) rises: &'bytes [u8],
}

impl<'bytes> Column<'bytes> {
    pub(super) fn parse(mut bytes: &'bytes [u8], interval: u32) -> Option<Self> {
        let references = take_varint(&mut bytes)?;
        let (references, last) = (references >> 1, references & 1 == 1);
        let whole = references == u64::from(interval);
        if !(whole && !last || last && references < u64::from(interval)) {
            return None;
        }
        let distinct = take_varint(&mut bytes)?;
        let entries = take_varint(&mut bytes)?;
        let mut reuses = Vec::new();
        let (mut bucket, mut sum) = (0_u64, distinct);
        for _ in 0..entries {
            bucket = bucket.checked_add(take_varint(&mut bytes)?)?;
            let count = take_varint(&mut bytes)?;
            if count == 0 || bucket >= buckets_of(interval) {
                return None;
            }
            sum = sum.checked_add(count)?;
            reuses.push((bucket, count));
            bucket += 1;
        }
        // Every reference is either its page's first in the interval or a reuse, and a reuse needs an earlier
        // reference.
        (sum == references && (distinct > 0 || references == 0)).then_some(Self {
            references,
            last,
            distinct,
            reuses,
            rises: bytes,
        })
    }
}

/// Takes a record that has already been checked.
pub(super) fn take_column<'bytes>(
    bytes: &mut &'bytes [u8],
    interval: u32,
) -> Option<Column<'bytes>> {
    let length = usize::try_from(take_varint(bytes)?).ok()?;
    let (payload, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Column::parse(payload, interval)
}
