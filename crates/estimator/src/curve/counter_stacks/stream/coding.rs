//! Encoding of numbers in the record: varints, zigzags and buckets of distances.

/// Returns the bucket of a distance within an interval.
pub(super) fn bucket_of(distance: u32) -> u32 {
    let shift = distance.max(1).ilog2().saturating_sub(4);
    shift * 16 + (distance >> shift)
}

/// Returns the smallest distance of a bucket, as a wide integer.
pub(super) fn floor_of(bucket: u64) -> u64 {
    match (bucket / 16).checked_sub(1) {
        None => bucket,
        Some(shift) => (bucket % 16 + 16) << shift,
    }
}

/// Number of buckets for the distances within an interval.
pub(super) fn buckets_of(interval: u32) -> u64 {
    u64::from(bucket_of(interval - 1)) + 1
}

pub(super) fn put_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push((value & 0x7f) as u8);
}

pub(super) fn put_zigzag(bytes: &mut Vec<u8>, value: i64) {
    put_varint(bytes, (value << 1 ^ value >> 63).cast_unsigned());
}

pub(super) fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..u64::BITS).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return None;
        }
        value |= bits << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

pub(super) fn take_zigzag(bytes: &mut &[u8]) -> Option<i64> {
    let value = take_varint(bytes)?;
    Some((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
}
