//! Counts of whole numbers without a bound, in bounded memory.
//!
//! Numbers below 2048 are counted one by one. Above, every power of two is
//! divided into 1024 buckets, as in an HDR histogram, and a bucket stands for the
//! mean of what fell into it: off by less than 1/1024, and not at all if that was
//! one number only, as the reuse times of a loop are.
//!
//! Cost: O(1) to count; 16 bytes a bucket up to the largest number seen: 160 KiB for 10^6,
//! 320 KiB for 10^9.

const BUCKET_BITS: u32 = 10;
const BUCKETS: u64 = 1 << BUCKET_BITS;

/// Returns the bucket that counts `value`; buckets rise with the values in them.
pub(crate) fn bucket_of(value: u64) -> usize {
    let shift = value.max(1).ilog2().saturating_sub(BUCKET_BITS);
    let bucket = u64::from(shift) * BUCKETS + (value >> shift);
    usize::try_from(bucket).expect("there are fewer than 2^16 buckets")
}

/// Returns the smallest number that `bucket` counts.
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
    /// Sum of how far the numbers lie above the bucket's smallest.
    excess: u64,
}

/// Numbers counted.
#[derive(Debug, Clone, Default)]
pub(crate) struct Histogram {
    buckets: Vec<Bucket>,
}

impl Histogram {
    pub(crate) fn record(&mut self, value: u64) {
        let index = bucket_of(value);
        if index >= self.buckets.len() {
            self.buckets.resize(index + 1, Bucket::default());
        }
        let bucket = &mut self.buckets[index];
        bucket.count += 1;
        bucket.excess += value - floor_of(index);
    }

    /// Adds another's counts to these.
    pub(crate) fn add(&mut self, other: &Self) {
        let buckets = self.buckets.len().max(other.buckets.len());
        self.buckets.resize(buckets, Bucket::default());
        for (bucket, other) in self.buckets.iter_mut().zip(&other.buckets) {
            bucket.count += other.count;
            bucket.excess += other.excess;
        }
    }

    /// Forgets all counts, keeping the memory.
    pub(crate) fn clear(&mut self) {
        self.buckets.clear();
    }

    /// The numbers counted, rising, each with its count.
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
        fn one_number_is_kept_however_often(value in 0_u64..1 << 50, times in 1_u64..100) {
            let mut histogram = Histogram::default();
            (0..times).for_each(|_| histogram.record(value));
            let mut twice = histogram.clone();
            twice.add(&histogram);
            let counts: Vec<_> = twice.counts().collect();
            prop_assert_eq!(counts, [(value, 2 * times)]);
        }
    }
}
