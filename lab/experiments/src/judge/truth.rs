//! What a program touches, in closed form.

use plimsoll_flow::{MissRatioCurve, PageCount, WorkingSet};
use plimsoll_observe::even_sizes;

use super::program::Program;
use crate::curves::Law;

pub const PAGE_BYTES: f64 = 4096.0;

pub const PAGES_PER_MIB: u64 = 256;

/// The truths of a program at a time.
#[derive(Debug, Clone)]
pub struct Truth {
    pub program: Program,
    /// Pages that it uses now.
    pub pages: u64,
    /// Visits a second, of the last round.
    pub rate: f64,
    /// Visits, and the seconds that they took, of all rounds since the method began.
    pub since_begun: (f64, f64),
    pub curve: Option<MissRatioCurve>,
}

impl Truth {
    pub fn new(program: Program) -> anyhow::Result<Self> {
        let pages = program.mib * PAGES_PER_MIB;
        let curve = program.law.map(|law| law.lru_curve(PageCount(pages)));
        Ok(Self {
            program,
            pages,
            rate: 0.0,
            since_begun: (0.0, 0.0),
            curve: curve.transpose()?,
        })
    }

    /// Bytes at which 5 % of the visits miss that miss at `from`.
    pub fn needed(&self, from: PageCount) -> f64 {
        let of_curve = self.curve.as_ref();
        let size = of_curve.and_then(|curve| {
            let resolved = curve.miss_ratio(from);
            curve.size_for(resolved * WorkingSet::MISS_RATIO)
        });
        size.map_or(self.pages, |size| size.0) as f64 * PAGE_BYTES
    }

    /// Bytes touched in a second.
    pub fn touched(&self) -> f64 {
        let count = self.pages as f64;
        let pages = match self.program.law {
            None => count.min(self.rate),
            Some(law) => {
                let alpha = match law {
                    Law::Uniform => 0.0,
                    Law::Zipf(alpha) => alpha,
                };
                let weights = (1..=self.pages).map(|rank| (rank as f64).powf(-alpha));
                let sum: f64 = weights.clone().sum();
                let missed = weights.map(|weight| (-weight / sum * self.rate).exp());
                count - missed.sum::<f64>()
            }
        };
        pages * PAGE_BYTES
    }

    /// Takes a line that the program printed.
    pub fn follow(&mut self, line: &str) {
        let value = |key: &str| {
            let mut words = line.split(' ');
            words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        };
        let number = |key: &str| value(key)?.parse::<f64>().ok();
        let pages = value("pages").and_then(|pages| pages.parse().ok());
        if let (Some(pages), Some(ops), Some(ms)) = (pages, number("ops"), number("ms"))
            && ms > 0.0
        {
            if self.program.is_changing {
                self.pages = pages;
            }
            self.rate = ops / ms * 1e3;
            self.since_begun.0 += ops;
            self.since_begun.1 += ms / 1e3;
        }
    }

    /// Error of the misses a second of a curve, of the time since the method began, over the sizes that it resolves, as a share of the misses at the smallest of them;
    /// `None` if it resolves none that the program could miss.
    pub fn curve_error(&self, curve: &MissRatioCurve) -> Option<f64> {
        let (from, end) = (curve.points().first()?.size, PageCount(self.pages));
        let (visits, seconds) = self.since_begun;
        let misses = |size| {
            visits / seconds
                * match &self.curve {
                    Some(truth) => truth.miss_ratio(size),
                    None => f64::from(u8::from(size < end)),
                }
        };
        let most = misses(from);
        // Neither is one without a round.
        if from >= end || most.is_nan() || most <= 0.0 {
            return None;
        }
        let errors = even_sizes(from, end).map(|size| {
            let estimated = curve.misses_per_second(size)?.expected;
            Some((estimated - misses(size)).abs() / most)
        });
        let errors = errors.collect::<Option<Vec<f64>>>()?;
        Some(errors.iter().sum::<f64>() / errors.len() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::super::program::PROGRAMS;
    use super::*;

    #[test]
    fn pages_touched_in_a_second_follow_from_the_rate() {
        let mut truth = Truth::new(PROGRAMS[3]).unwrap();
        let pages = truth.pages as f64;
        truth.rate = pages;
        let share = truth.touched() / PAGE_BYTES / pages;
        assert!((share - (1.0 - (-1.0_f64).exp())).abs() < 1e-9, "{share}");
        // 5 % of the visits miss 95 % of the pages.
        let needed = |from: u64| truth.needed(PageCount(from)) / PAGE_BYTES / pages;
        assert!((needed(0) - 0.95).abs() < 0.001);
        // Of the half that misses half of the memory.
        // As far as points of the curve are apart.
        assert!((needed(truth.pages / 2) - 0.975).abs() < 0.002);
    }
}
