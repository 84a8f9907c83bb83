//! How many distinct pages a VM writes within a time: from scans that each list the pages written since the one before.
//!
//! The number of distinct pages of a window of `k` scans, averaged over all windows, follows from the gaps between the
//! scans that list a page ([Xiang13], over scans instead of references): a page is missing from as many windows as fit into
//! its gaps, that before its first scan and that after its last one included. So one pass over the lists gives all lengths.
//!
//! Times between multiples of a scan's length are interpolated. Beyond the observed time, the rise over the second half of
//! it continues: an upper limit on average, because a steady VM writes fewer and fewer new pages.
//!
//! Cost: a lookup in a table for each page listed; 24 bytes for each distinct page.
//! Not here: scanning (crate `trap`), and what follows from the curve (`precopy`).

use std::time::Duration;

use plimsoll_flow::{PageNumber, Whole as _};

use crate::parts::hash::{PageMap, page_map};

/// The scans so far.
#[derive(Debug, Clone)]
pub struct WrittenPages {
    /// Number of the last scan that listed a page, from 1.
    last: PageMap<u64>,
    /// Gaps by their length in scans, from 1; those up to the present are not among them.
    gaps: Vec<u64>,
    scans: u64,
    length: Duration,
}

impl WrittenPages {
    /// Returns an empty record.
    pub fn new() -> Self {
        Self {
            last: page_map(),
            gaps: Vec::new(),
            scans: 0,
            length: Duration::ZERO,
        }
    }

    /// Adds a scan: the pages written in the time of this `length` since the scan before.
    pub fn scan(&mut self, pages: &[PageNumber], length: Duration) {
        self.scans += 1;
        self.length += length;
        for &page in pages {
            let before = self.last.insert(page, self.scans).unwrap_or(0);
            add_gap(&mut self.gaps, self.scans.saturating_sub(before + 1));
        }
    }

    /// The curve; `None` without a scan.
    pub fn curve(&self) -> Option<WriteCurve> {
        let mut gaps = self.gaps.clone();
        for last in self.last.values() {
            add_gap(&mut gaps, self.scans - last);
        }
        let distinct = self.last.len() as f64;
        let mut pages = vec![0.0; usize::try_from(self.scans).ok()? + 1];
        // Sums over the gaps of at least a length: of their number, and of the windows of that length in them.
        let (mut longer, mut missing) = (0_u64, 0_u64);
        for length in (1..pages.len()).rev() {
            longer += gaps.get(length).copied().unwrap_or(0);
            missing += longer;
            let windows = self.scans + 1 - length as u64;
            pages[length] = distinct - missing as f64 / windows as f64;
        }
        (self.scans > 0).then(|| WriteCurve {
            scan_seconds: self.length.as_secs_f64() / self.scans as f64,
            pages,
        })
    }
}

impl Default for WrittenPages {
    fn default() -> Self {
        Self::new()
    }
}

fn add_gap(gaps: &mut Vec<u64>, length: u64) {
    let length = usize::try_from(length).expect("scans are counted in memory");
    if length >= gaps.len() {
        gaps.resize(length + 1, 0);
    }
    gaps[length] += 1;
}

/// Distinct pages written within a time, on average.
#[derive(Debug, Clone, PartialEq)]
pub struct WriteCurve {
    scan_seconds: f64,
    /// Within 0, 1, .. scans.
    pages: Vec<f64>,
}

impl WriteCurve {
    /// Distinct pages written within so many seconds, 0 or more.
    pub fn pages_within(&self, seconds: f64) -> f64 {
        let scans = seconds / self.scan_seconds;
        let last = self.pages.len() - 1;
        let whole = usize::whole(scans);
        match self.pages.get(whole..=whole.saturating_add(1)) {
            Some(pages) => pages[0] + (pages[1] - pages[0]) * scans.fract(),
            None => {
                let half = last / 2;
                let rise = (self.pages[last] - self.pages[half]) / (last - half) as f64;
                self.pages[last] + rise * (scans - last as f64)
            }
        }
    }

    /// Time of a scan, on average: within less, it is not known how many pages are written.
    pub fn scan_seconds(&self) -> f64 {
        self.scan_seconds
    }

    /// The time that was observed.
    pub fn observed_seconds(&self) -> f64 {
        self.scan_seconds * (self.pages.len() - 1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn curve_of(scans: &[Vec<u64>]) -> WriteCurve {
        let mut written = WrittenPages::new();
        for pages in scans {
            let pages: Vec<_> = pages.iter().copied().map(PageNumber).collect();
            written.scan(&pages, Duration::from_millis(10));
        }
        written.curve().unwrap()
    }

    proptest! {
        #[test]
        fn a_windows_pages_are_the_mean_over_all_windows(
            scans in prop::collection::vec(prop::collection::btree_set(0_u64..30, 0..20), 1..40),
        ) {
            let lists: Vec<Vec<u64>> = scans.iter().map(|scan| scan.iter().copied().collect()).collect();
            let curve = curve_of(&lists);
            for length in 1..=scans.len() {
                let windows: Vec<_> = scans.windows(length).collect();
                let distinct = windows.iter().map(|window| {
                    window.iter().flatten().collect::<BTreeSet<_>>().len()
                });
                let mean = distinct.sum::<usize>() as f64 / windows.len() as f64;
                let found = curve.pages_within(length as f64 * 0.01);
                prop_assert!((found - mean).abs() < 1e-6, "{}: {} {}", length, found, mean);
            }
        }
    }

    #[test]
    fn between_scans_it_is_interpolated_and_beyond_the_last_it_rises_as_before() {
        // A new page in each scan.
        let scans: Vec<Vec<u64>> = (0..10).map(|page| vec![page]).collect();
        let curve = curve_of(&scans);
        for (seconds, pages) in [(0.0, 0.0), (0.005, 0.5), (0.1, 10.0), (0.2, 20.0)] {
            assert!(
                (curve.pages_within(seconds) - pages).abs() < 1e-6,
                "{seconds}"
            );
        }
        // The same page in each.
        let curve = curve_of(&vec![vec![7]; 10]);
        assert!((curve.pages_within(5.0) - 1.0).abs() < 1e-6);
        assert!((curve.observed_seconds() - 0.1).abs() < 1e-9);
        assert_eq!(WrittenPages::new().curve(), None);
        assert!(curve_of(&[vec![]]).pages_within(9.0).abs() < 1e-9);
    }
}
