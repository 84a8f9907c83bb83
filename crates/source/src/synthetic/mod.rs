//! Synthetic workloads whose miss-ratio curve is known without measuring.
//!
//! | pattern | references | its curve here |
//! |---|---|---|
//! | loop | pages in turn, repeatedly | exact |
//! | steps | as a loop, over one size after the other: the benchmark of \[AET\] §4.1 | exact |
//! | arrays | as a loop, reads and writes by round: the programs of \[PRL\] §5.1 | exact |
//! | uniform | every page equally likely | steady state exact; finite trace near |
//! | zipf | page of rank k (from 1) with a probability ~ 1/k^alpha | near |
//! | class | a tenth of the pages ten times as likely as the rest, after \[LS07\] §6.1 | near |
//!
//! *Near*: the expected miss ratio by Che's approximation, which is derived in the module
//! `independent`. In tests it is within 0.006 of simulations of 500 pages, and
//! within 0.015 for memories of fewer than 10 pages, where strong skew matters.
//!
//! The same workload gives the same references in every version of this crate; a
//! test with recorded values checks this. `zipf` computes in floating point, so
//! another mathematics library might differ in one of 2^50 references.
//!
//! Not here: workloads that run inside a VM (`guest/workload`); they have the same
//! curves, from the functions without a workload: [`loop_curve`], [`uniform_curve`],
//! [`zipf_curve`], [`class_curve`], [`steps_curve`].

mod independent;
mod permutation;
mod random;
mod scan;
mod zipf;

use std::fmt;
use std::str::FromStr;

use plimsoll_flow::{
    AccessKind, CurveError, MissRatioCurve, PageCount, PageNumber, ReferenceBatch, Source,
};

use crate::SourceError;
use independent::Popularity;
use permutation::Permutation;
use random::Random;
use scan::Scan;
use zipf::Zipf;

pub use independent::{class_curve, curve_sizes, uniform_curve, zipf_curve};
pub use scan::{loop_curve, steps_curve};

/// Maximum number of pages in a workload: counts below this are exact in floating point.
const PAGES_MAX: u64 = 1 << 48;

/// Separates the random numbers of the kinds from those of the pages.
const KIND_STREAM: u64 = 0x6b69_6e64;

/// The order in which pages are referenced. Pages are numbered from 0.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names of the others suffice")]
pub enum Pattern {
    /// Pages in turn, repeatedly.
    Loop { pages: PageCount, references: u64 },
    /// All pages equally likely, independent of earlier references.
    Uniform { pages: PageCount, references: u64 },
    /// Page k - 1 with a probability proportional to 1/k^alpha, independent of earlier references.
    Zipf {
        pages: PageCount,
        /// The exponent: 0 is uniform, 1 the classic law; any finite number of at least 0.
        alpha: f64,
        references: u64,
    },
    /// The first tenth of the pages (rounded up) ten times as likely as each of the rest.
    Class { pages: PageCount, references: u64 },
    /// For each size, `rounds` times all its pages in turn, from page 0.
    Steps {
        /// The sizes, in order.
        sizes: Vec<PageCount>,
        /// Number of rounds over each size.
        rounds: u64,
    },
    /// `rounds` times all pages in turn, each round with one kind of operation.
    Arrays {
        pages: PageCount,
        /// Which rounds read and which write.
        program: Program,
        rounds: u64,
    },
}

/// The array programs of \[PRL\] §5.1: one operation per page and round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Program {
    /// Rounds alternately read and write.
    Rwrw,
    /// The first half of the rounds (rounded up) reads, the rest writes.
    Rrww,
    /// The first half of the rounds (rounded up) writes, the rest reads.
    Wwrr,
}

impl Program {
    /// Every program.
    pub const ALL: [Self; 3] = [Self::Rwrw, Self::Rrww, Self::Wwrr];

    /// The program's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rwrw => "rwrw",
            Self::Rrww => "rrww",
            Self::Wwrr => "wwrr",
        }
    }

    /// The operation of a round; rounds are counted from 0.
    pub fn kind(self, round: u64, rounds: u64) -> AccessKind {
        let first_half = round < rounds.div_ceil(2);
        let reads = match self {
            Self::Rwrw => round.is_multiple_of(2),
            Self::Rrww => first_half,
            Self::Wwrr => !first_half,
        };
        if reads {
            AccessKind::Read
        } else {
            AccessKind::Write
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Program {
    type Err = SourceError;

    fn from_str(name: &str) -> Result<Self, SourceError> {
        let program = Self::ALL.into_iter().find(|program| program.name() == name);
        program.ok_or_else(|| refusal("the array programs are rwrw, rrww and wwrr"))
    }
}

/// A workload: a pattern, and the kinds and numbering of its accesses.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// The order in which pages are referenced.
    pub pattern: Pattern,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Share of references that write, 0.0 to 1.0; ignored for arrays, which have kinds of their own.
    pub write_ratio: f64,
    /// Whether pages are renumbered at random, so that adjacent pages no longer
    /// behave alike. The curve is unchanged.
    pub scrambled: bool,
}

impl Workload {
    /// A workload of reads, not scrambled, with seed 0.
    pub fn of(pattern: Pattern) -> Self {
        Self {
            pattern,
            seed: 0,
            write_ratio: 0.0,
            scrambled: false,
        }
    }

    /// Starts the workload.
    ///
    /// # Errors
    ///
    /// [`SourceError::Workload`] if it has no page or no reference, more than 2^48
    /// pages or 2^64 references, or a write ratio or exponent out of its range.
    pub fn source(&self) -> Result<Synthetic, SourceError> {
        self.pattern.check()?;
        if !(0.0..=1.0).contains(&self.write_ratio) {
            return Err(refusal(format!(
                "a write ratio lies within 0 and 1, not at {}",
                self.write_ratio
            )));
        }
        let pages = self.pattern.pages();
        Ok(Synthetic {
            stream: Stream::of(&self.pattern),
            remaining: self.pattern.references()?,
            random: Random::new(self.seed),
            kinds: Random::new(self.seed ^ KIND_STREAM),
            write_ratio: self.write_ratio,
            permutation: self.scrambled.then(|| Permutation::new(pages.0, self.seed)),
        })
    }

    /// Returns the miss-ratio curve of exactly this number of references, first ones
    /// counted as misses: the expected result of an exact LRU stack.
    ///
    /// For uniform, zipf and class the curve has points at `sizes`, which must rise
    /// ([`curve_sizes`] returns suitable ones). For loop, steps and arrays it has one point at
    /// each size where it falls, so that it is exact at all sizes.
    ///
    /// # Errors
    ///
    /// [`SourceError::Workload`] as [`source`](Self::source), or for sizes that do not rise.
    pub fn expected_curve(&self, sizes: &[PageCount]) -> Result<MissRatioCurve, SourceError> {
        self.pattern.check()?;
        match self.pattern {
            Pattern::Loop { pages, references } => scan::finite_loop_curve(pages, references),
            Pattern::Steps { ref sizes, rounds } => steps_curve(sizes, rounds),
            Pattern::Arrays { pages, rounds, .. } => steps_curve(&[pages], rounds),
            Pattern::Uniform { pages, references } => {
                Popularity::uniform(pages).curve(sizes, Some(references))
            }
            Pattern::Zipf {
                pages,
                alpha,
                references,
            } => Popularity::zipf(pages, alpha).curve(sizes, Some(references)),
            Pattern::Class { pages, references } => {
                Popularity::class(pages).curve(sizes, Some(references))
            }
        }
    }
}

impl Pattern {
    /// Number of pages of the pattern.
    pub fn pages(&self) -> PageCount {
        match self {
            Self::Loop { pages, .. }
            | Self::Uniform { pages, .. }
            | Self::Zipf { pages, .. }
            | Self::Class { pages, .. }
            | Self::Arrays { pages, .. } => *pages,
            Self::Steps { sizes, .. } => sizes.iter().copied().max().unwrap_or_default(),
        }
    }

    /// Number of references of the pattern.
    ///
    /// # Errors
    ///
    /// [`SourceError::Workload`] if the number exceeds a `u64`.
    pub fn references(&self) -> Result<u64, SourceError> {
        let scanned = |pages: Option<u64>, rounds| {
            pages
                .and_then(|pages| pages.checked_mul(rounds))
                .ok_or_else(|| refusal("there cannot be more than 2^64 references"))
        };
        match self {
            Self::Loop { references, .. }
            | Self::Uniform { references, .. }
            | Self::Zipf { references, .. }
            | Self::Class { references, .. } => Ok(*references),
            Self::Arrays { pages, rounds, .. } => scanned(Some(pages.0), *rounds),
            Self::Steps { sizes, rounds } => {
                let mut sizes = sizes.iter();
                scanned(
                    sizes.try_fold(0u64, |sum, size| sum.checked_add(size.0)),
                    *rounds,
                )
            }
        }
    }

    fn check(&self) -> Result<(), SourceError> {
        check_pages(self.pages())?;
        if let Self::Steps { sizes, .. } = self {
            sizes.iter().try_for_each(|&size| check_pages(size))?;
        }
        if let Self::Zipf { alpha, .. } = self {
            check_alpha(*alpha)?;
        }
        if self.references()? == 0 {
            return Err(refusal("it has no reference"));
        }
        Ok(())
    }
}

/// The references of a [`Workload`].
#[derive(Debug)]
pub struct Synthetic {
    stream: Stream,
    remaining: u64,
    random: Random,
    kinds: Random,
    write_ratio: f64,
    permutation: Option<Permutation>,
}

/// The generator of the next page.
#[derive(Debug)]
enum Stream {
    Uniform {
        pages: u64,
    },
    Zipf(Zipf),
    Class {
        hot: u64,
        cold: u64,
    },
    Scan {
        scan: Scan,
        program: Option<(Program, u64)>,
    },
}

impl Stream {
    fn of(pattern: &Pattern) -> Self {
        match *pattern {
            Pattern::Uniform { pages, .. } => Self::Uniform { pages: pages.0 },
            Pattern::Zipf { pages, alpha, .. } => Self::Zipf(Zipf::new(pages.0, alpha)),
            Pattern::Class { pages, .. } => {
                let hot = independent::hot_pages(pages);
                Self::Class {
                    hot,
                    cold: pages.0 - hot,
                }
            }
            Pattern::Loop { pages, .. } => Self::Scan {
                scan: Scan::new(vec![pages], u64::MAX),
                program: None,
            },
            Pattern::Steps { ref sizes, rounds } => Self::Scan {
                scan: Scan::new(sizes.clone(), rounds),
                program: None,
            },
            Pattern::Arrays {
                pages,
                program,
                rounds,
            } => Self::Scan {
                scan: Scan::new(vec![pages], rounds),
                program: Some((program, rounds)),
            },
        }
    }

    /// Returns the next page, and its kind if the pattern defines kinds.
    #[inline]
    fn next(&mut self, random: &mut Random) -> (u64, Option<AccessKind>) {
        match self {
            Self::Uniform { pages } => (random.below(*pages), None),
            Self::Zipf(zipf) => (zipf.rank(random) - 1, None),
            Self::Class { hot, cold } => {
                let ticket = random.below(independent::HOT_WEIGHT * *hot + *cold);
                let page = match ticket.checked_sub(independent::HOT_WEIGHT * *hot) {
                    None => ticket / independent::HOT_WEIGHT,
                    Some(among_cold) => *hot + among_cold,
                };
                (page, None)
            }
            Self::Scan { scan, program } => {
                let round = scan.round();
                let kind = program.map(|(program, rounds)| program.kind(round, rounds));
                (scan.next_page(), kind)
            }
        }
    }
}

impl Source for Synthetic {
    type Error = SourceError;

    fn next_batch(&mut self, batch: &mut ReferenceBatch) -> Result<bool, SourceError> {
        batch.advance();
        while self.remaining > 0 && !batch.is_full() {
            self.remaining -= 1;
            let (page, kind) = self.stream.next(&mut self.random);
            let page = match &self.permutation {
                Some(permutation) => permutation.apply(page),
                None => page,
            };
            let kind = kind.unwrap_or_else(|| {
                if self.kinds.unit() < self.write_ratio {
                    AccessKind::Write
                } else {
                    AccessKind::Read
                }
            });
            batch.push(PageNumber(page), kind);
        }
        Ok(!batch.is_empty())
    }
}

fn refusal(reason: impl Into<String>) -> SourceError {
    SourceError::Workload {
        reason: reason.into(),
    }
}

fn no_curve(error: CurveError) -> SourceError {
    refusal(format!("its curve is none: {error}"))
}

fn check_pages(pages: PageCount) -> Result<(), SourceError> {
    match pages.0 {
        1..=PAGES_MAX => Ok(()),
        pages => Err(refusal(format!(
            "it takes 1 to {PAGES_MAX} pages, not {pages}"
        ))),
    }
}

fn check_alpha(alpha: f64) -> Result<(), SourceError> {
    if alpha.is_finite() && alpha >= 0.0 {
        Ok(())
    } else {
        Err(refusal(format!(
            "a zipf exponent is a number from 0, not {alpha}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const PAGES: PageCount = PageCount(500);

    fn references(workload: &Workload) -> Vec<(u64, AccessKind)> {
        let mut source = workload.source().unwrap();
        let mut batch = ReferenceBatch::new();
        let mut all = Vec::new();
        while source.next_batch(&mut batch).unwrap() {
            all.extend(
                batch
                    .iter()
                    .map(|reference| (reference.page.0, reference.kind)),
            );
        }
        assert_eq!(all.len() as u64, workload.pattern.references().unwrap());
        all
    }

    /// Misses at every size up to `pages`, by a list kept in order of use.
    fn naive_miss_ratios(pages: u64, references: &[(u64, AccessKind)]) -> Vec<f64> {
        let mut stack: Vec<u64> = Vec::new();
        let mut hits = vec![0u64; usize::try_from(pages).unwrap() + 1];
        for &(page, _) in references {
            if let Some(depth) = stack.iter().rev().position(|&other| other == page) {
                stack.remove(stack.len() - 1 - depth);
                hits[depth + 1] += 1;
            }
            stack.push(page);
        }
        let mut misses = references.len() as u64;
        let ratio = |&hits: &u64| {
            misses -= hits;
            misses as f64 / references.len() as f64
        };
        hits.iter().map(ratio).collect()
    }

    /// Differences between the expected curve and the mean of several simulations, by size.
    fn errors(pattern: &Pattern, runs: u64) -> Vec<f64> {
        let mut workload = Workload {
            scrambled: true,
            ..Workload::of(pattern.clone())
        };
        let sizes: Vec<_> = (0..=pattern.pages().0).map(PageCount).collect();
        let expected = workload.expected_curve(&sizes).unwrap();
        let mut simulated = vec![0.0; sizes.len()];
        for seed in 0..runs {
            workload.seed = seed;
            let ratios = naive_miss_ratios(pattern.pages().0, &references(&workload));
            for (sum, ratio) in simulated.iter_mut().zip(ratios) {
                *sum += ratio / runs as f64;
            }
        }
        let error = |(ratio, size): (f64, PageCount)| (ratio - expected.miss_ratio(size)).abs();
        simulated.into_iter().zip(sizes).map(error).collect()
    }

    fn max(errors: &[f64]) -> f64 {
        errors.iter().copied().fold(0.0, f64::max)
    }

    #[test]
    fn curves_of_scans_are_exact() {
        let steps = |sizes: &[u64], rounds| Pattern::Steps {
            sizes: sizes.iter().copied().map(PageCount).collect(),
            rounds,
        };
        for pattern in [
            steps(&[10, 30, 50, 70, 50, 30, 10], 3),
            steps(&[7, 3, 5, 3, 9, 1, 8], 1),
            steps(&[5, 5], 2),
            Pattern::Loop {
                pages: PageCount(40),
                references: 1234,
            },
            Pattern::Loop {
                pages: PageCount(40),
                references: 17,
            },
            Pattern::Arrays {
                pages: PageCount(25),
                program: Program::Rrww,
                rounds: 4,
            },
        ] {
            let error = max(&errors(&pattern, 1));
            assert!(error < 1e-12, "{pattern:?}: {error}");
        }
    }

    #[test]
    fn curves_of_independent_references_are_as_near_to_simulation_as_stated() {
        let pages = PAGES;
        // Enough runs that the random error stays below 0.003.
        for (references, runs) in [(300, 100), (2_000, 30), (60_000, 2)] {
            let mut patterns = vec![
                Pattern::Uniform { pages, references },
                Pattern::Class { pages, references },
            ];
            patterns.extend([0.0, 0.6, 1.0, 1.3, 3.0].map(|alpha| Pattern::Zipf {
                pages,
                alpha,
                references,
            }));
            for pattern in patterns {
                let errors = errors(&pattern, runs);
                let (few, more) = (max(&errors[..10]), max(&errors[10..]));
                assert!(few <= 0.015, "{pattern:?}: {few} below 10 pages");
                assert!(more <= 0.006, "{pattern:?}: {more} from 10 pages on");
            }
        }
    }

    #[test]
    fn scrambling_renumbers_pages_and_changes_nothing_else() {
        let mut workload = Workload::of(Pattern::Zipf {
            pages: PAGES,
            alpha: 0.9,
            references: 5_000,
        });
        let plain = references(&workload);
        workload.scrambled = true;
        let scrambled = references(&workload);
        let pairs: BTreeSet<_> = plain
            .iter()
            .zip(&scrambled)
            .map(|(plain, scrambled)| (plain.0, scrambled.0))
            .collect();
        let of: BTreeSet<_> = pairs.iter().map(|pair| pair.0).collect();
        let to: BTreeSet<_> = pairs.iter().map(|pair| pair.1).collect();
        assert_eq!(pairs.len(), of.len());
        assert_eq!(pairs.len(), to.len());
        assert!(to.last().unwrap() < &PAGES.0);
        assert!(pairs.iter().filter(|(of, to)| of == to).count() < 10);
    }

    #[test]
    fn the_write_ratio_is_kept_and_leaves_the_pages_alone() {
        let mut workload = Workload::of(Pattern::Uniform {
            pages: PAGES,
            references: 40_000,
        });
        let reads = references(&workload);
        assert!(reads.iter().all(|&(_, kind)| kind == AccessKind::Read));
        workload.write_ratio = 0.25;
        let mixed = references(&workload);
        assert!(reads.iter().zip(&mixed).all(|(a, b)| a.0 == b.0));
        let writes = mixed.iter().filter(|&&(_, kind)| kind == AccessKind::Write);
        assert!((9_600..10_400).contains(&writes.count()));
        workload.write_ratio = 1.0;
        let writes = references(&workload);
        assert!(writes.iter().all(|&(_, kind)| kind == AccessKind::Write));
    }

    #[test]
    fn array_programs_read_and_write_in_their_order() {
        let kinds = |program: Program, rounds| {
            references(&Workload::of(Pattern::Arrays {
                pages: PageCount(2),
                program,
                rounds,
            }))
            .iter()
            .map(|&(page, kind)| match kind {
                AccessKind::Read => format!("r{page}"),
                _ => format!("w{page}"),
            })
            .collect::<String>()
        };
        assert_eq!(kinds(Program::Rwrw, 4), "r0r1w0w1r0r1w0w1");
        assert_eq!(kinds(Program::Rrww, 4), "r0r1r0r1w0w1w0w1");
        assert_eq!(kinds(Program::Wwrr, 3), "w0w1w0w1r0r1");
    }

    #[test]
    fn the_hot_tenth_of_a_class_takes_ten_tickets_a_page() {
        let references = references(&Workload::of(Pattern::Class {
            pages: PAGES,
            references: 190_000,
        }));
        // 50 hot pages of weight 10, 450 of weight 1: hot pages have 500 of the total weight 950.
        let hot = references.iter().filter(|&&(page, _)| page < 50).count();
        assert!((99_000..101_000).contains(&hot), "{hot}");
    }

    #[test]
    fn a_workload_is_the_same_in_every_version() {
        let first = |pattern| {
            let workload = Workload {
                seed: 42,
                scrambled: true,
                write_ratio: 0.5,
                ..Workload::of(pattern)
            };
            let all = references(&workload);
            all.iter().map(|&(page, _)| page).collect::<Vec<_>>()
        };
        let (pages, references) = (PageCount(1000), 6);
        let uniform = first(Pattern::Uniform { pages, references });
        assert_eq!(uniform, [960, 767, 798, 741, 275, 970]);
        let zipf = first(Pattern::Zipf {
            pages,
            alpha: 1.0,
            references,
        });
        assert_eq!(zipf, [460, 691, 38, 631, 729, 815]);
        let class = first(Pattern::Class { pages, references });
        assert_eq!(class, [241, 96, 656, 982, 55, 500]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let steps = |sizes: Vec<PageCount>, rounds| Pattern::Steps { sizes, rounds };
        let zipf = |alpha| Pattern::Zipf {
            pages: PAGES,
            alpha,
            references: 1,
        };
        for pattern in [
            steps(vec![], 1),
            steps(vec![PAGES, PageCount(0)], 1),
            steps(vec![PAGES], 0),
            steps(vec![PAGES], u64::MAX),
            zipf(-0.1),
            zipf(f64::NAN),
            zipf(f64::INFINITY),
            Pattern::Loop {
                pages: PAGES,
                references: 0,
            },
            Pattern::Uniform {
                pages: PageCount(PAGES_MAX + 1),
                references: 1,
            },
        ] {
            let workload = Workload::of(pattern);
            assert!(workload.source().is_err(), "{workload:?}");
            let curve = workload.expected_curve(&[PageCount(1)]);
            assert!(curve.is_err(), "{workload:?}");
        }
        for write_ratio in [-0.1, 1.1, f64::NAN] {
            let workload = Workload {
                write_ratio,
                ..Workload::of(zipf(1.0))
            };
            assert!(workload.source().is_err());
        }
    }
}
