//! Curves of independent references: each reference is to a page with a fixed probability,
//! independent of earlier references (the *independent reference model*).
//!
//! Let p_i be page i's probability. Within t references page i is missing with
//! probability (1 - p_i)^t, and
//!
//! ```text
//! D(t) = sum over i of 1 - (1 - p_i)^t       distinct pages among t references
//! M(t) = sum over i of p_i (1 - p_i)^t       chance that a reference's page is not among the t before
//! ```
//!
//! An LRU memory of c pages contains the c pages used last. Che's approximation
//! [Che02] is that the time t(c) in which c distinct pages are referenced has no
//! variance: D(t(c)) = c. Then the steady-state miss ratio is M(t(c)). For equally likely
//! pages the result, 1 - c/N, is exact ([King71]); for skewed ones the error shrinks
//! as the memory grows (module `synthetic` has figures).
//! In [Che02] references arrive as a Poisson process, exp(-p_i t); counting them
//! instead, as here, is also exact for c = 1.
//!
//! *Finite trace* of n references, first ones counted as misses: the reference
//! after t others misses if its page is not among the last min(t, t(c)). Because
//! D(t + 1) - D(t) = M(t), the first t(c) references miss c times in all, the rest
//! with M(t(c)) each:
//!
//! ```text
//! ratio(c) = (c + (n - t(c)) M(t(c))) / n    if t(c) < n
//! ratio(c) = D(n) / n                        otherwise: nothing but first references
//! ```
//!
//! Cost: O(log pages) groups of pages of equal or nearly equal probability, times the number of sizes.

use plimsoll_flow::{CurvePoint, MissRatioCurve, PageCount};

use super::{check_alpha, check_pages, no_curve, refusal, zipf};
use crate::SourceError;

/// Ratio of the probabilities of a hot and a cold page in a class workload.
pub(super) const HOT_WEIGHT: u64 = 10;

/// Number of points of a curve for which no sizes are given.
const POINTS: u64 = 1000;

/// Largest Zipf rank that is evaluated individually; higher ranks are grouped by 1/512 of
/// their rank, within which the probability varies too little to matter (1e-6 of it).
const RANKS_ALONE: u64 = 512;

/// Number of hot pages in a class workload over `pages`: a tenth, rounded up.
pub(super) fn hot_pages(pages: PageCount) -> u64 {
    pages.0.div_ceil(10)
}

/// Returns the steady-state curve of uniform references over `pages`: 1 - c/N, exact,
/// at [`curve_sizes`].
///
/// The curve's number of references is `u64::MAX`: the limit of ever longer traces.
///
/// # Errors
///
/// [`SourceError::Workload`] without pages, or with more than 2^48.
pub fn uniform_curve(pages: PageCount) -> Result<MissRatioCurve, SourceError> {
    check_pages(pages)?;
    Popularity::uniform(pages).curve(&curve_sizes(pages), None)
}

/// Returns the steady-state curve of Zipf references over `pages`, at `sizes`, which must rise.
///
/// Che's approximation; the curve's number of references is `u64::MAX`.
///
/// # Errors
///
/// [`SourceError::Workload`] without pages or with more than 2^48, for an `alpha`
/// that is not a number from 0, and for sizes that do not rise.
pub fn zipf_curve(
    pages: PageCount,
    alpha: f64,
    sizes: &[PageCount],
) -> Result<MissRatioCurve, SourceError> {
    check_pages(pages)?;
    check_alpha(alpha)?;
    Popularity::zipf(pages, alpha).curve(sizes, None)
}

/// Returns the steady-state curve of class references over `pages`, at `sizes`, which must rise.
///
/// Che's approximation; the curve's number of references is `u64::MAX`.
///
/// # Errors
///
/// [`SourceError::Workload`] without pages or with more than 2^48, and for sizes that do not rise.
pub fn class_curve(pages: PageCount, sizes: &[PageCount]) -> Result<MissRatioCurve, SourceError> {
    check_pages(pages)?;
    Popularity::class(pages).curve(sizes, None)
}

/// Returns at most 1001 sizes from 0 to `pages`, denser at small sizes, where curves of
/// skewed references are steep.
pub fn curve_sizes(pages: PageCount) -> Vec<PageCount> {
    if pages.0 <= POINTS {
        return (0..=pages.0).map(PageCount).collect();
    }
    let size = |index: u64| {
        let size = u128::from(pages.0) * u128::from(index).pow(2) / u128::from(POINTS).pow(2);
        PageCount(u64::try_from(size).unwrap_or(pages.0))
    };
    let mut sizes: Vec<_> = (0..=POINTS).map(size).collect();
    sizes.dedup();
    sizes
}

/// The probabilities of the pages.
pub(super) struct Popularity {
    groups: Vec<Group>,
}

/// Pages with equal, or nearly equal, probabilities.
struct Group {
    pages: f64,
    /// Probability of each page.
    share: f64,
    /// -ln(1 - share): a page is missing among t references with probability exp(-rate t).
    rate: f64,
}

impl Popularity {
    pub(super) fn uniform(pages: PageCount) -> Self {
        Self::of([(pages.0 as f64, 1.0)].into())
    }

    pub(super) fn class(pages: PageCount) -> Self {
        let hot = hot_pages(pages);
        Self::of(vec![
            (hot as f64, HOT_WEIGHT as f64),
            ((pages.0 - hot) as f64, 1.0),
        ])
    }

    pub(super) fn zipf(pages: PageCount, alpha: f64) -> Self {
        let mut weights: Vec<_> = (1..=pages.0.min(RANKS_ALONE))
            .map(|rank| (1.0, zipf::density(rank as f64, alpha)))
            .collect();
        let mut rank = RANKS_ALONE + 1;
        while rank <= pages.0 {
            let width = (rank / RANKS_ALONE).min(pages.0 - rank + 1);
            // The inverse midpoint rule, with an error below alpha^2 / 512^2 of the sum.
            let middle = rank as f64 + (width - 1) as f64 / 2.0;
            weights.push((width as f64, zipf::density(middle, alpha)));
            rank += width;
        }
        Self::of(weights)
    }

    /// Creates groups from their numbers of pages and each page's weight.
    fn of(weights: Vec<(f64, f64)>) -> Self {
        let sum: f64 = weights.iter().map(|(pages, weight)| pages * weight).sum();
        let groups = weights.into_iter().map(|(pages, weight)| {
            let share = (weight / sum).min(1.0);
            Group {
                pages,
                share,
                // Bounded, so that a page with probability 1 does not lead to infinity x 0.
                rate: (-(-share).ln_1p()).min(700.0),
            }
        });
        Self {
            groups: groups.collect(),
        }
    }

    /// Returns D(t), M(t) and D'(t).
    fn after(&self, time: f64) -> (f64, f64, f64) {
        let (mut distinct, mut misses, mut slope) = (0.0, 0.0, 0.0);
        for &Group { pages, share, rate } in &self.groups {
            let missing = (-rate * time).exp();
            distinct += pages * -(-rate * time).exp_m1();
            misses += pages * share * missing;
            slope += pages * rate * missing;
        }
        (distinct, misses, slope)
    }

    /// Returns t(c), starting at `from`, where D is at most c; infinite if c distinct pages are never reached.
    ///
    /// Newton's method: D is concave, so each step stays left of the root.
    fn time_of(&self, size: f64, from: f64) -> f64 {
        let mut time = from;
        for _ in 0..1000 {
            let (distinct, _, slope) = self.after(time);
            let step = (size - distinct) / slope;
            if !step.is_finite() {
                return f64::INFINITY;
            }
            // Also ends if rounding has carried a step beyond the root.
            if step <= time * 1e-13 {
                return time;
            }
            time += step;
        }
        time
    }

    /// Returns the curve at `sizes`, of a finite or an infinite number of references.
    pub(super) fn curve(
        &self,
        sizes: &[PageCount],
        references: Option<u64>,
    ) -> Result<MissRatioCurve, SourceError> {
        if let Some(pair) = sizes.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(refusal(format!(
                "sizes must rise, {} and {} do not",
                pair[0], pair[1]
            )));
        }
        let pages: f64 = self.groups.iter().map(|group| group.pages).sum();
        let length = references.map(|references| references as f64);
        let cold = length.map_or(0.0, |length| self.after(length).0 / length);
        let mut time = 0.0;
        let mut ratio = 1.0f64;
        let points = sizes.iter().map(|&size| {
            let held = size.0 as f64;
            if held >= pages {
                time = f64::INFINITY;
            } else if time < f64::INFINITY {
                time = self.time_of(held, time);
            }
            let next = match length {
                _ if size.0 == 0 => 1.0,
                _ if time == f64::INFINITY => cold,
                None => self.after(time).1,
                Some(length) if time < length => {
                    (held + (length - time) * self.after(time).1) / length
                }
                Some(_) => cold,
            };
            // Rounding must not make the curve rise.
            ratio = ratio.min(next.max(cold));
            CurvePoint::exact(size, ratio)
        });
        let points = points.collect();
        MissRatioCurve::new(points, references.unwrap_or(u64::MAX)).map_err(no_curve)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn uniform_references_hit_in_proportion_to_the_memory() {
        let curve = uniform_curve(PageCount(1000)).unwrap();
        for size in [0, 1, 250, 999, 1000] {
            let expected = 1.0 - size as f64 / 1000.0;
            let ratio = curve.miss_ratio(PageCount(size));
            assert!((ratio - expected).abs() < 1e-9, "{size}: {ratio}");
        }
    }

    #[test]
    fn a_memory_of_one_page_hits_what_comes_twice_in_a_row() {
        let curve = zipf_curve(PageCount(3), 1.0, &[PageCount(1)]).unwrap();
        // Shares 6/11, 3/11, 2/11.
        let expected = 1.0 - (36.0 + 9.0 + 4.0) / 121.0;
        assert!((curve.miss_ratio(PageCount(1)) - expected).abs() < 1e-9);
    }

    #[test]
    fn two_pages_of_three_are_near_the_exact_answer_of_king() {
        // All pairs (i, j) that the memory may contain, j used before i: p_i p_j / (1 - p_i).
        let shares = [6.0 / 11.0, 3.0 / 11.0, 2.0 / 11.0];
        let mut expected = 0.0;
        for i in 0..3 {
            for j in (0..3).filter(|&j| j != i) {
                let held = shares[i] * shares[j] / (1.0 - shares[i]);
                expected += held * (1.0 - shares[i] - shares[j]);
            }
        }
        let curve = zipf_curve(PageCount(3), 1.0, &[PageCount(2)]).unwrap();
        let ratio = curve.miss_ratio(PageCount(2));
        assert!((ratio - expected).abs() < 0.02, "{ratio} for {expected}");
    }

    #[test]
    fn the_groups_of_a_large_zipf_stand_for_all_its_ranks() {
        let (pages, alpha) = (PageCount(200_000), 0.8);
        let grouped = Popularity::zipf(pages, alpha);
        let single = (1..=pages.0).map(|rank| (1.0, (rank as f64).powf(-alpha)));
        let single = Popularity::of(single.collect());
        assert_eq!(
            grouped.groups.iter().map(|group| group.pages).sum::<f64>(),
            200_000.0
        );
        for time in [1.0, 1e3, 1e5, 1e6] {
            let ((distinct, misses, _), (distinct_single, misses_single, _)) =
                (grouped.after(time), single.after(time));
            assert!((distinct / distinct_single - 1.0).abs() < 1e-5);
            assert!((misses / misses_single - 1.0).abs() < 1e-5);
        }
    }

    #[test]
    fn sizes_are_dense_where_curves_are_steep() {
        assert_eq!(curve_sizes(PageCount(2)), [0, 1, 2].map(PageCount));
        let sizes = curve_sizes(PageCount(1_000_000));
        assert_eq!(sizes.len(), 1001);
        assert_eq!(sizes[..4], [0, 1, 4, 9].map(PageCount));
        assert_eq!(sizes[1000], PageCount(1_000_000));
        assert!(
            curve_sizes(PageCount(1001))
                .windows(2)
                .all(|pair| pair[0] < pair[1])
        );
    }

    #[test]
    fn sizes_that_do_not_rise_are_refused() {
        let sizes = [PageCount(2), PageCount(2)];
        assert!(zipf_curve(PageCount(3), 1.0, &sizes).is_err());
        assert!(class_curve(PageCount(3), &[]).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn a_longer_trace_is_nearer_to_the_steady_state(
            pages in 2u64..100_000, alpha in 0.0f64..5.0, references in 1u64..1_000_000,
        ) {
            let popularity = Popularity::zipf(PageCount(pages), alpha);
            let mut sizes: Vec<_> = (0..=10).map(|tenth| PageCount(pages * tenth / 10)).collect();
            sizes.dedup();
            let steady = popularity.curve(&sizes, None).unwrap();
            let short = popularity.curve(&sizes, Some(references)).unwrap();
            let long = popularity.curve(&sizes, Some(references * 2)).unwrap();
            for &size in &sizes {
                let [steady, short, long] =
                    [&steady, &short, &long].map(|curve| curve.miss_ratio(size));
                prop_assert!(steady <= long + 1e-9 && long <= short + 1e-9);
            }
        }

        #[test]
        fn any_exponent_has_a_curve(pages in 1u64..1 << 48, alpha in 0.0f64..1e3) {
            let mut sizes = [0, pages / 2, pages].map(PageCount).to_vec();
            sizes.dedup();
            let curve = zipf_curve(PageCount(pages), alpha, &sizes).unwrap();
            prop_assert_eq!(curve.miss_ratio(PageCount(0)), 1.0);
            prop_assert_eq!(curve.miss_ratio(PageCount(pages)), 0.0);
        }
    }
}
