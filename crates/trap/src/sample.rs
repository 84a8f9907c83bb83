//! The pages tracked in a period: a salted spatial sample of one page in `scale`.
//!
//! Pages are taken in small aligned groups, because neighbours are made inaccessible
//! by one call. The RAM is cut into strata of `scale` groups and a salted hash picks
//! one group of each. [AET] §3.3 takes every page whose hash is 0 modulo `scale`: there the
//! number of pages sampled from a working set varies like its square root. One group
//! in each stratum is as random to any page, but a contiguous working set is hit almost
//! exactly `size / scale` times, so its size is found with a far smaller error at the
//! same number of traps.

use crate::ram::PageRange;

/// A spatial sample of a VM's pages.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    scale: u64,
    group_pages: u64,
    salt: u64,
}

impl Sample {
    /// Samples one page in `scale` (at least 1), in aligned groups of `group_pages` (at least 1).
    pub fn new(scale: u32, group_pages: u32, salt: u64) -> Self {
        Self {
            scale: u64::from(scale.max(1)),
            group_pages: u64::from(group_pages.max(1)),
            salt,
        }
    }

    /// The sample of period `index`: another one in each.
    pub fn of_period(scale: u32, group_pages: u32, seed: u64, index: u64) -> Self {
        Self::new(scale, group_pages, mix(seed ^ mix(index + 1)))
    }

    /// One page in so many is sampled.
    pub fn scale(&self) -> u64 {
        self.scale
    }

    /// The group that represents its stratum.
    fn group_of(&self, stratum: u64) -> u64 {
        stratum * self.scale + mix(stratum ^ self.salt) % self.scale
    }

    /// Whether `page` is in the sample.
    pub fn contains(&self, page: u64) -> bool {
        let group = page / self.group_pages;
        group == self.group_of(group / self.scale)
    }

    /// The sampled runs within `pages`, rising.
    pub fn runs_in(&self, pages: PageRange) -> impl Iterator<Item = PageRange> + use<> {
        let sample = *self;
        let stratum_pages = sample.scale * sample.group_pages;
        let strata = pages.start / stratum_pages..pages.end.div_ceil(stratum_pages);
        // Every page is sampled at scale 1: one run instead of one for each group.
        let whole = (sample.scale == 1).then(|| pages.clone());
        let strata = if whole.is_some() { 0..0 } else { strata };
        let groups = strata.filter_map(move |stratum| {
            let first = sample.group_of(stratum) * sample.group_pages;
            let run = first.max(pages.start)..(first + sample.group_pages).min(pages.end);
            (!run.is_empty()).then_some(run)
        });
        whole
            .into_iter()
            .filter(|run| !run.is_empty())
            .chain(groups)
    }
}

/// Spreads every bit of `value` over the whole word (the finaliser of MurmurHash3).
pub fn mix(mut value: u64) -> u64 {
    value ^= value >> 33;
    value = value.wrapping_mul(0xff51_afd7_ed55_8ccd);
    value ^= value >> 33;
    value = value.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ value >> 33
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::usize_of;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_hold_exactly_the_pages_that_are_contained(
            scale in 1u32..40, group in 1u32..9, salt: u64, start in 0u64..500, len in 0u64..2000,
        ) {
            let sample = Sample::new(scale, group, salt);
            let pages = start..start + len;
            let from_runs: Vec<u64> = sample.runs_in(pages.clone()).flatten().collect();
            let one_by_one: Vec<u64> = pages.filter(|&page| sample.contains(page)).collect();
            prop_assert_eq!(from_runs, one_by_one);
        }

        #[test]
        fn a_contiguous_working_set_is_sampled_to_within_two_groups(
            scale in 1u32..200, group in 1u32..9, salt: u64, start in 0u64..100_000, len in 1u64..100_000,
        ) {
            let sampled: u64 = Sample::new(scale, group, salt)
                .runs_in(start..start + len)
                .map(|run| run.end - run.start)
                .sum();
            let expected = len as f64 / f64::from(scale);
            prop_assert!((sampled as f64 - expected).abs() <= 2.0 * f64::from(group));
        }
    }

    #[test]
    fn over_many_salts_every_page_is_sampled_alike() {
        let (scale, salts) = (16, 16_000);
        let mut hits = [0u32; 64];
        for salt in 0..salts {
            let sample = Sample::new(scale, 2, mix(salt));
            for page in sample.runs_in(0..64).flatten() {
                hits[usize_of(page)] += 1;
            }
        }
        // Binomial with mean 1000 and a standard deviation of 31: six of them.
        for (page, &count) in hits.iter().enumerate() {
            assert!(
                (814..=1186).contains(&count),
                "page {page} sampled {count} times"
            );
        }
    }
}
