//! Reads of pages that were read before, counted in batches of equal length, and the noise of their counts.

use plimsoll_flow::PageCount;

use super::grid::{SIZES, sizes};

/// Batches at which two are merged into one.
const BATCHES_MAX: usize = 16;
/// The most pairs of batches.
pub(super) const PAIRS_MAX: usize = BATCHES_MAX / 2;
/// Batches below which nothing is known of the noise.
const BATCHES_MIN: usize = 4;
/// Reads of a batch at the start.
const READS: u64 = 64;

/// Counts by batch.
#[derive(Debug, Clone)]
pub(super) struct Batches {
    sizes: [f64; SIZES],
    batches: Vec<Batch>,
    /// Reads of a batch now.
    reads: u64,
}

#[derive(Debug, Clone, Default)]
struct Batch {
    reads: u64,
    /// Of them, misses with so many pages added.
    misses: [u64; SIZES],
}

impl Batches {
    pub(super) fn new(ghost: PageCount) -> Self {
        Self {
            sizes: sizes(ghost),
            batches: Vec::new(),
            reads: READS,
        }
    }

    /// Counts a page that was read before, found with `beyond` others before it, or not found.
    pub(super) fn read_again(&mut self, beyond: Option<u64>) {
        if self
            .batches
            .last()
            .is_none_or(|last| last.reads >= self.reads)
        {
            if self.batches.len() == BATCHES_MAX {
                self.merge();
            }
            self.batches.push(Batch::default());
        }
        let Some(batch) = self.batches.last_mut() else {
            return;
        };
        batch.reads += 1;
        for (misses, &size) in batch.misses.iter_mut().zip(&self.sizes) {
            *misses += u64::from(beyond.is_none_or(|beyond| beyond as f64 >= size));
        }
    }

    fn merge(&mut self) {
        let merged = self.batches.chunks_exact(2).map(|pair| {
            let mut both = pair[0].clone();
            both.reads += pair[1].reads;
            for (misses, more) in both.misses.iter_mut().zip(pair[1].misses) {
                *misses += more;
            }
            both
        });
        self.batches = merged.collect();
        self.reads *= 2;
    }

    /// The batches that are whole, and how many of them all reads are; `None` while there are too few.
    fn whole(&self) -> Option<(Vec<&Batch>, f64)> {
        let whole = self
            .batches
            .iter()
            .filter(|batch| batch.reads >= self.reads);
        let whole: Vec<&Batch> = whole.collect();
        let reads: u64 = self.batches.iter().map(|batch| batch.reads).sum();
        (whole.len() >= BATCHES_MIN).then(|| (whole, reads as f64 / self.reads as f64))
    }

    /// Standard error of the number of misses with so many pages added; `None` while there are too few batches.
    pub(super) fn standard_errors(&self) -> Option<[f64; SIZES]> {
        let (whole, count) = self.whole()?;
        Some(std::array::from_fn(|size| {
            let steps = whole.windows(2).map(|pair| {
                let step = pair[1].misses[size] as f64 - pair[0].misses[size] as f64;
                step * step
            });
            let mean = steps.sum::<f64>() / (whole.len() - 1) as f64;
            (count * mean / 2.0).sqrt()
        }))
    }

    /// The standard error in independent parts, the changes within pairs of batches: the root of the sum of their squares is that
    /// of the number of misses, and that of the differences between two sizes is that of the difference of their misses. At most
    /// [`PAIRS_MAX`].
    pub(super) fn changes(&self) -> Option<Vec<[f64; SIZES]>> {
        let (whole, count) = self.whole()?;
        let scale = (count / (whole.len() / 2) as f64 / 2.0).sqrt();
        let change = |pair: &[&Batch]| {
            let of = |size: usize| pair[1].misses[size] as f64 - pair[0].misses[size] as f64;
            std::array::from_fn(|size| scale * of(size))
        };
        Some(whole.chunks_exact(2).map(change).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_noise_of_coins_is_the_binomial_one_and_a_trend_is_none() {
        let mut batches = Batches::new(PageCount(256));
        let mut state = 1_u64;
        for _ in 0..READS * 3 {
            batches.read_again(None);
        }
        assert_eq!(batches.standard_errors(), None);
        let mut batches = Batches::new(PageCount(256));
        for _ in 0..100_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            batches.read_again(Some((state >> 33) % 256));
        }
        let errors = batches.standard_errors().unwrap();
        // Half of them miss with 128 pages more; the 11th of 16 sizes is 121.
        let binomial = (100_000.0 * 0.4727 * 0.5273_f64).sqrt();
        assert!((errors[10] / binomial - 1.0).abs() < 0.6, "{errors:?}");
        let changes = batches.changes().unwrap();
        assert!(changes.len() <= PAIRS_MAX);
        let squares: f64 = changes.iter().map(|change| change[10].powi(2)).sum();
        assert!((squares.sqrt() / binomial - 1.0).abs() < 0.6, "{changes:?}");
        assert_eq!(errors[15], 0.0);

        let mut batches = Batches::new(PageCount(256));
        for at in 0..100_000_u64 {
            // From none to all that miss.
            batches.read_again(Some(if at * 7919 % 100_000 < at { 255 } else { 0 }));
        }
        let trend = batches.standard_errors().unwrap()[10];
        assert!(trend < 0.05 * 100_000.0, "{trend}");
    }
}
