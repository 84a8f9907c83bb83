//! Histogram of unbounded whole numbers in bounded memory.
//!
//! Numbers below 2048 are counted individually. Above, every power of two is
//! divided into 1024 buckets, as in an HDR histogram, and the value of a bucket is the
//! mean of the numbers counted in it: off by less than 1/1024, and exact if they
//! are all equal, as the reuse times of a loop are.
//!
//! Numbers in batches are first counted in one word per bucket, count and mean together, and
//! moved before either can overflow.
//!
//! Cost: O(1) to count, about 1 ns in a batch; 16 bytes per bucket up to the largest number seen: 34 KiB for 2500,
//! 160 KiB for 10^6, 320 KiB for 10^9; half as much again for batches.

use crate::parts::sys::{Work, vectorised};

const BUCKET_BITS: u32 = 10;
const BUCKETS: u64 = 1 << BUCKET_BITS;

/// Returns the bucket that counts `value`; buckets are in the order of their values.
pub(crate) fn bucket_of(value: u64) -> usize {
    let shift = value.max(1).ilog2().saturating_sub(BUCKET_BITS);
    let bucket = u64::from(shift) * BUCKETS + (value >> shift);
    usize::try_from(bucket).expect("there are fewer than 2^16 buckets")
}

/// Returns the smallest number of `bucket`.
pub(crate) fn floor_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    match (bucket / BUCKETS).checked_sub(1) {
        None => bucket,
        Some(shift) => (bucket % BUCKETS + BUCKETS) << shift,
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    count: u64,
    /// Sum of the differences between the numbers and the bucket's smallest.
    excess: u64,
}

/// A histogram.
#[derive(Debug, Clone, Default)]
pub(crate) struct Histogram {
    buckets: Vec<Bucket>,
    /// Counts of batches: for each bucket up to the largest number's its count, times 2^40, plus its excess.
    packed: Vec<u64>,
    /// Number of counts in `packed`.
    pending: u32,
}

/// Bits below the count in a packed word.
const EXCESS_BITS: u32 = 40;

/// Limit of `pending`: the sum of this many excesses, each below 2^21, does not overflow into the count.
const PENDING_MAX: u32 = 1 << 18;

/// The work of [`Histogram::record_batch`].
struct Packing<'a> {
    packed: &'a mut Vec<u64>,
    values: &'a [u32],
}

impl Work for Packing<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let largest = self.values.iter().copied().max().unwrap_or(0);
        let buckets = bucket_of(largest.into()) + 1;
        if buckets > self.packed.len() {
            self.packed.resize(buckets, 0);
        }
        let packed = &mut self.packed[..];
        for &value in self.values {
            let shift = u64::BITS - 1 - BUCKET_BITS - (u64::from(value) | BUCKETS).leading_zeros();
            let leading = value >> (shift & 31);
            let excess = value & !(leading << (shift & 31));
            let bucket = (shift << BUCKET_BITS).wrapping_add(leading) as usize;
            let word = &mut packed[bucket];
            *word = word.wrapping_add(1 << EXCESS_BITS | u64::from(excess));
        }
    }
}

impl Histogram {
    /// Counts the numbers of a batch that are not 0.
    pub(crate) fn record_batch(&mut self, values: &[u32]) {
        for values in values.chunks(PENDING_MAX as usize) {
            let count = u32::try_from(values.len()).expect("a chunk is no longer than its limit");
            if self.pending + count > PENDING_MAX {
                self.unpack();
            }
            self.pending += count;
            vectorised(Packing {
                packed: &mut self.packed,
                values,
            });
        }
    }

    /// Moves the counts of batches to the buckets.
    fn unpack(&mut self) {
        // Zeros in a batch are not counted.
        if let Some(zeros) = self.packed.first_mut() {
            *zeros = 0;
        }
        let used = self.packed.iter().rposition(|&word| word != 0);
        let used = used.map_or(0, |last| last + 1);
        if used > self.buckets.len() {
            self.buckets.resize(used, Bucket::default());
        }
        for (bucket, word) in self.buckets.iter_mut().zip(&mut self.packed[..used]) {
            bucket.count += *word >> EXCESS_BITS;
            bucket.excess += *word & ((1 << EXCESS_BITS) - 1);
            *word = 0;
        }
        self.pending = 0;
    }

    /// Makes all counts visible to [`counts`](Self::counts).
    pub(crate) fn settle(&mut self) {
        if self.pending > 0 {
            self.unpack();
        }
    }

    /// Bytes of heap allocated now.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>() + self.packed.capacity() * size_of::<u64>()
    }

    pub(crate) fn record(&mut self, value: u64) {
        let index = bucket_of(value);
        if index >= self.buckets.len() {
            self.buckets.resize(index + 1, Bucket::default());
        }
        let bucket = &mut self.buckets[index];
        bucket.count += 1;
        bucket.excess += value - floor_of(index);
    }

    /// Resets all counts, keeping the memory.
    pub(crate) fn clear(&mut self) {
        self.buckets.clear();
        self.packed.fill(0);
        self.pending = 0;
    }

    /// The numbers, rising, each with its count.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        let counted = self.buckets.iter().enumerate().filter(|(_, b)| b.count > 0);
        counted.map(|(index, bucket)| {
            let mean = (bucket.excess + bucket.count / 2) / bucket.count;
            (floor_of(index) + mean, bucket.count)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_numbers_are_counted_one_by_one() {
        for value in 0..2_048 {
            assert_eq!(bucket_of(value) as u64, value);
            assert_eq!(floor_of(bucket_of(value)), value);
        }
        assert_eq!(bucket_of(2_048), bucket_of(2_049));
    }

    #[test]
    fn the_largest_numbers_overflow_nothing() {
        // More of the largest excess than fit into a packed word.
        let value = u32::MAX;
        let mut histogram = Histogram::default();
        let values = vec![value; 2 * PENDING_MAX as usize + 3];
        histogram.record_batch(&values);
        histogram.settle();
        let counts: Vec<_> = histogram.counts().collect();
        assert_eq!(counts, [(u64::from(value), values.len() as u64)]);
    }

    #[test]
    fn a_short_stream_takes_few_bytes() {
        let mut histogram = Histogram::default();
        histogram.record_batch(&[1, 2_500, 0, 600]);
        histogram.settle();
        assert!(histogram.memory_bytes() <= 24 * 2_304);
        assert_eq!(histogram.counts().map(|(_, count)| count).sum::<u64>(), 3);
    }

    proptest! {
        #[test]
        fn a_bucket_holds_numbers_within_a_thousandth(value in any::<u64>(), shift in 0_u32..64) {
            let value = value >> shift;
            let floor = floor_of(bucket_of(value));
            prop_assert!(floor <= value);
            prop_assert!(value - floor <= floor / 1_024);
            prop_assert_eq!(bucket_of(floor), bucket_of(value));
            if value < u64::MAX {
                prop_assert!(bucket_of(value) <= bucket_of(value + 1));
            }
        }

        #[test]
        fn a_batch_counts_as_its_numbers_one_by_one(
            values in prop::collection::vec((any::<u32>(), 0_u32..32), 0..500),
            cut in any::<prop::sample::Index>(),
        ) {
            let values: Vec<_> = values.into_iter().map(|(value, shift)| value >> shift).collect();
            let (mut single, mut batch) = (Histogram::default(), Histogram::default());
            let counted = values.iter().filter(|&&value| value > 0);
            counted.for_each(|&value| single.record(u64::from(value)));
            let (head, tail) = values.split_at(cut.index(values.len() + 1).min(values.len()));
            batch.record_batch(head);
            batch.settle();
            batch.record_batch(tail);
            batch.settle();
            let single: Vec<_> = single.counts().collect();
            let batch: Vec<_> = batch.counts().collect();
            prop_assert_eq!(single, batch);
        }

        #[test]
        fn one_number_is_kept_however_often(value in 0_u64..1 << 50, times in 1_u64..100) {
            let mut histogram = Histogram::default();
            (0..times).for_each(|_| histogram.record(value));
            let counts: Vec<_> = histogram.counts().collect();
            prop_assert_eq!(counts, [(value, times)]);
        }
    }
}
