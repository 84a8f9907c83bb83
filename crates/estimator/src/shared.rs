//! Several VMs in one memory: the LRU curve of all together from the reuse times of each alone.
//!
//! In one LRU memory all pages not used for the same wall time leave it. Let VM `i` make `r_i`
//! references a second, a share P_i(t) of them with reuse times above `t` of its own references. A
//! page that leaves at the age of `T` seconds has seen `r_i T` references of its own VM, so the VM holds the
//! area under its P up to there, and misses as often as P says:
//!
//! ```text
//!              r_i T                       c = sum of o_i(T)
//!     o_i(T) =   ∫  P_i(t) dt
//!               0                          miss ratio at c = sum of r_i P_i(r_i T) / sum of r_i
//! ```
//!
//! The age that fills the memory is the same for all, which is why reuse times compose where
//! distances do not: who uses its pages more often keeps more of them.
//!
//! The band of a VM is that of its own curve at the size it holds, so it knows of the
//! model's error for each alone; that the VMs' references mix evenly is assumed.
//!
//! Source: [Hu16] for eviction times; the composition is that of footprints (Xiang, Ding, Luo, Bao,
//! HOTL, ASPLOS 2013, §3): occupancies add where the time is common.
//! Cost: O(buckets x VMs^2) for all curves, O(VMs log buckets) for a size.
//! Not here: memory divided by a policy, where every VM has its own age.

use plimsoll_flow::{CurveError, CurvePoint, MissRatioCurve, PageCount};

use crate::reuse_times::{ReuseTimes, whole_pages};

/// One of the VMs that share a memory. No two of them have a page in common.
#[derive(Debug, Clone, Copy)]
pub struct Share<'a> {
    /// Its reuse times, from any estimator that has them.
    pub reuse_times: &'a ReuseTimes,
    /// Its curve in a memory of its own, for the band.
    pub alone: &'a MissRatioCurve,
    /// References in a unit of wall time, above 0.0; which unit does not matter, if it is one for all.
    pub rate: f64,
}

/// Why shares do not make a shared memory. Nothing was built.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SharedError {
    /// No VM, or one without references.
    #[error("without references there is no miss ratio")]
    Empty,
    /// A VM that makes no references in a unit of time, or no number of them.
    #[error("share {index}: {rate} references in a unit of time is not above 0")]
    RateOutOfRange {
        /// Index of the share, from 0.
        index: usize,
        /// Its rate.
        rate: f64,
    },
}

/// Several VMs in one LRU memory, at every size of it; made by [`shared_curve`].
#[derive(Debug, Clone)]
pub struct SharedMemory {
    vms: Vec<Vm>,
    rate: f64,
}

/// How one VM fares in a shared memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedVm {
    /// Pages it is expected to hold.
    pub occupancy_pages: f64,
    /// Share of its references that miss, 0.0 to 1.0.
    pub miss_ratio: f64,
    /// Lower edge of the band, 0.0 to `miss_ratio`.
    pub low: f64,
    /// Upper edge of the band, `miss_ratio` to 1.0.
    pub high: f64,
}

/// One VM's P, from wall time 0.
#[derive(Debug, Clone)]
struct Vm {
    rate: f64,
    references: f64,
    alone: MissRatioCurve,
    /// Where P falls, rising; the first at 0.
    falls: Vec<Fall>,
}

/// P from one age to the next.
#[derive(Debug, Clone, Copy)]
struct Fall {
    /// In wall time.
    age: f64,
    /// Pages held at that age.
    occupancy: f64,
    miss_ratio: f64,
}

/// Composes VMs that share one LRU memory.
///
/// ```
/// use plimsoll_estimator::{Aet, Estimator, Share, shared_curve};
/// use plimsoll_flow::{AccessKind, PageCount, PageNumber, ReferenceBatch};
///
/// // A loop over 1000 pages beside one over 3000, which goes round three times as fast.
/// let mut vms = [1_000_u64, 3_000].map(|pages| {
///     let mut batch = ReferenceBatch::new();
///     for page in (0..pages).cycle().take(10 * pages as usize) {
///         batch.push(PageNumber(page), AccessKind::Read);
///     }
///     let mut aet = Aet::new();
///     aet.observe(&batch);
///     aet
/// });
/// let times = vms.each_mut().map(Aet::reuse_times);
/// let alone = [vms[0].curve()?, vms[1].curve()?];
/// let memory = shared_curve(&[
///     Share { reuse_times: &times[0], alone: &alone[0], rate: 1.0 },
///     Share { reuse_times: &times[1], alone: &alone[1], rate: 3.0 },
/// ])?;
/// let curve = memory.curve()?;
/// assert_eq!(curve.miss_ratio(PageCount(3_999)), 1.0);
/// assert!((curve.miss_ratio(PageCount(4_000)) - 0.1).abs() < 1e-9);
/// assert!((memory.at(PageCount(2_000))[1].occupancy_pages - 1_500.0).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`SharedError::Empty`] without shares or if one has no references, and the first rate that is
/// not a finite number above 0.
pub fn shared_curve(shares: &[Share<'_>]) -> Result<SharedMemory, SharedError> {
    if shares.is_empty() {
        return Err(SharedError::Empty);
    }
    let vms = shares.iter().enumerate();
    let vms: Result<Vec<_>, _> = vms.map(|(index, share)| Vm::new(index, share)).collect();
    let vms = vms?;
    let rate = vms.iter().map(|vm| vm.rate).sum();
    Ok(SharedMemory { vms, rate })
}

impl SharedMemory {
    /// Returns how each VM fares in a memory of `size` pages, in the order of the shares.
    #[must_use]
    pub fn at(&self, size: PageCount) -> Vec<SharedVm> {
        let age = self.age_for(size.0 as f64);
        self.vms.iter().map(|vm| vm.at(age)).collect()
    }

    /// Returns the curve of all references together; its references are those of all VMs.
    ///
    /// # Errors
    ///
    /// None that shares which were accepted could lead to.
    pub fn curve(&self) -> Result<MissRatioCurve, CurveError> {
        let references: f64 = self.vms.iter().map(|vm| vm.references).sum();
        let mut ages: Vec<f64> = self.vms.iter().flat_map(Vm::ages).collect();
        ages.sort_unstable_by(f64::total_cmp);
        ages.dedup();
        let weighted = |vms: &[SharedVm], ratio: fn(&SharedVm) -> f64| {
            let ratios = vms.iter().zip(&self.vms);
            let sum: f64 = ratios.map(|(at, vm)| ratio(at) * vm.rate).sum();
            (sum / self.rate).clamp(0.0, 1.0)
        };
        self.points(&ages, references, |vms| {
            [
                weighted(vms, |vm| vm.low),
                weighted(vms, |vm| vm.miss_ratio),
                weighted(vms, |vm| vm.high),
            ]
        })
    }

    /// Returns the curve of one VM's references, by the size of the memory that all share.
    ///
    /// # Errors
    ///
    /// [`CurveError::Empty`] if there is no share of this index.
    pub fn curve_of(&self, index: usize) -> Result<MissRatioCurve, CurveError> {
        let vm = self.vms.get(index).ok_or(CurveError::Empty)?;
        let ages: Vec<f64> = vm.ages().collect();
        self.points(&ages, vm.references, |vms| {
            [vms[index].low, vms[index].miss_ratio, vms[index].high]
        })
    }

    /// The steps of low, ratio and high at rising `ages`.
    fn points(
        &self,
        ages: &[f64],
        references: f64,
        ratios: impl Fn(&[SharedVm]) -> [f64; 3],
    ) -> Result<MissRatioCurve, CurveError> {
        let mut points: Vec<CurvePoint> = Vec::new();
        for &age in ages {
            let vms: Vec<_> = self.vms.iter().map(|vm| vm.at(age)).collect();
            let size = PageCount(whole_pages(vms.iter().map(|vm| vm.occupancy_pages).sum()));
            let [low, mut miss_ratio, high] = ratios(&vms);
            if let Some(last) = points.last() {
                // Sums are rounded: never up.
                miss_ratio = miss_ratio.min(last.miss_ratio);
                if last.size == size {
                    points.pop();
                }
            }
            points.push(CurvePoint {
                size,
                miss_ratio,
                low: low.min(miss_ratio),
                high: high.max(miss_ratio),
            });
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and a count; at least one if there are any"
        )]
        let references = references.ceil() as u64;
        MissRatioCurve::new(points, references)
    }

    /// The age at which all VMs hold `size` pages together; infinite if they never do.
    fn age_for(&self, size: f64) -> f64 {
        let held = |age: f64| -> f64 { self.vms.iter().map(|vm| vm.occupancy(age)).sum() };
        let oldest = self.vms.iter().flat_map(Vm::ages).fold(0.0, f64::max);
        let (mut young, mut old) = (0.0, oldest);
        if held(oldest) < size {
            return f64::INFINITY;
        }
        for _ in 0..BISECTIONS {
            let middle = f64::midpoint(young, old);
            if held(middle) < size {
                young = middle;
            } else {
                old = middle;
            }
        }
        old
    }
}

/// Halvings after which an age is as narrow as a number is.
const BISECTIONS: u32 = 100;

impl Vm {
    fn new(index: usize, share: &Share<'_>) -> Result<Self, SharedError> {
        let rate = share.rate;
        if !(rate > 0.0 && rate.is_finite()) {
            return Err(SharedError::RateOutOfRange { index, rate });
        }
        if share.reuse_times.references() <= 0.0 {
            return Err(SharedError::Empty);
        }
        let falls = share.reuse_times.ages().into_iter().map(|age| Fall {
            age: age.references as f64 / rate,
            occupancy: age.pages,
            miss_ratio: age.miss_ratio,
        });
        let falls = falls.collect();
        Ok(Self {
            rate,
            references: share.reuse_times.references(),
            alone: share.alone.clone(),
            falls,
        })
    }

    fn ages(&self) -> impl Iterator<Item = f64> {
        self.falls.iter().map(|fall| fall.age)
    }

    /// Index of the fall that holds at an age, at least 0.
    fn fall_at(&self, age: f64) -> usize {
        self.falls.partition_point(|fall| fall.age <= age) - 1
    }

    /// Pages held at an age, at least 0; all it has beyond the longest that was seen.
    fn occupancy(&self, age: f64) -> f64 {
        let index = self.fall_at(age);
        let fall = self.falls[index];
        match self.falls.get(index + 1) {
            None => fall.occupancy,
            Some(next) => {
                let way = (age - fall.age) / (next.age - fall.age);
                fall.occupancy + way * (next.occupancy - fall.occupancy)
            }
        }
    }

    fn at(&self, age: f64) -> SharedVm {
        let miss_ratio = self.falls[self.fall_at(age)].miss_ratio;
        let occupancy_pages = self.occupancy(age);
        // Between two sizes, either may hold: pages are whole, shares of them are not.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and a size beyond 2^64 pages is as good as 2^64"
        )]
        let below = self.alone.at(PageCount(occupancy_pages as u64));
        let above = self.alone.at(PageCount(whole_pages(occupancy_pages)));
        SharedVm {
            occupancy_pages,
            miss_ratio,
            low: above.low.min(below.low).min(miss_ratio),
            high: below.high.max(above.high).max(miss_ratio),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aet::Aet;
    use crate::lru::ExactLru;
    use crate::naive::NaiveStack;
    use crate::streams::{Random, batch_of, curve_of, cycle, uniform, zipf};
    use crate::{Estimator, LruStack};
    use plimsoll_flow::PageNumber;

    type Pages = Box<dyn Iterator<Item = u64>>;

    /// Two streams in one, each reference drawn by rate; pages of the second are odd.
    fn interleaved(streams: [Pages; 2], rates: [f64; 2], seed: u64, references: usize) -> Vec<u64> {
        let mut random = Random::new(seed ^ 0x5eed);
        let [mut first, mut second] = streams;
        let drawn = std::iter::repeat_with(|| {
            if random.share() < rates[0] / (rates[0] + rates[1]) {
                first.next().unwrap() * 2
            } else {
                second.next().unwrap() * 2 + 1
            }
        });
        drawn.take(references).collect()
    }

    fn composed(pages: &[u64], rates: [f64; 2]) -> SharedMemory {
        let mut vms = [0, 1].map(|odd| {
            let mut aet = Aet::new();
            aet.observe(&batch_of(
                pages.iter().copied().filter(|page| page % 2 == odd),
            ));
            aet
        });
        let alone = vms.each_mut().map(|vm| vm.curve().unwrap());
        let times = vms.each_mut().map(Aet::reuse_times);
        let shares = [0, 1].map(|vm| Share {
            reuse_times: &times[vm],
            alone: &alone[vm],
            rate: rates[vm],
        });
        shared_curve(&shares).unwrap()
    }

    #[test]
    fn mixes_are_what_an_lru_memory_of_both_does() {
        type Mix = (&'static str, fn(u64) -> [Pages; 2]);
        let mixes: [Mix; 3] = [
            ("zipf and uniform", |seed| {
                [
                    Box::new(zipf(10_000, 1.0, seed)),
                    Box::new(uniform(4_000, seed + 9)),
                ]
            }),
            ("loop and zipf", |seed| {
                [Box::new(cycle(3_000)), Box::new(zipf(10_000, 0.8, seed))]
            }),
            ("two zipfs", |seed| {
                [
                    Box::new(zipf(8_000, 1.2, seed)),
                    Box::new(zipf(8_000, 0.6, seed + 9)),
                ]
            }),
        ];
        for (name, mix) in mixes {
            for rates in [[1.0, 1.0], [1.0, 4.0], [4.0, 1.0]] {
                let (mut error, mut error_of) = (0.0, [0.0; 2]);
                for seed in 1..=5 {
                    let pages = interleaved(mix(seed), rates, seed, 200_000);
                    let memory = composed(&pages, rates);
                    let sizes = || (1..=160).map(|step| PageCount(step * 100));
                    let exact = curve_of(&mut ExactLru::new(), pages.iter().copied());
                    let found = memory.curve().unwrap();
                    error += found.distance(&exact, sizes()).unwrap().mean_absolute_error / 5.0;
                    for (vm, error_of) in error_of.iter_mut().enumerate() {
                        let exact = exact_of(&pages, vm as u64);
                        let found = memory.curve_of(vm).unwrap();
                        *error_of +=
                            found.distance(&exact, sizes()).unwrap().mean_absolute_error / 5.0;
                    }
                }
                println!("{name} {rates:?}: {error:.4} {error_of:.4?}");
                assert!(error <= 0.003, "{name} {rates:?}: {error}");
                assert!(
                    error_of.iter().all(|&error| error <= 0.005),
                    "{name} {rates:?}: {error_of:?}"
                );
            }
        }
    }

    /// The exact curve of one stream's references in the memory of both.
    fn exact_of(pages: &[u64], odd: u64) -> MissRatioCurve {
        let mut stack = LruStack::new();
        let mut distances = Vec::new();
        let mut references = 0;
        for &page in pages {
            let distance = stack.touch(PageNumber(page));
            if page % 2 == odd {
                references += 1;
                distances.extend(distance);
            }
        }
        distances.sort_unstable();
        let mut points = vec![CurvePoint::exact(PageCount(0), 1.0)];
        for (index, &distance) in distances.iter().enumerate() {
            let misses = (references - index - 1) as f64 / references as f64;
            let point = CurvePoint::exact(PageCount(distance + 1), misses);
            if points.last().unwrap().size == point.size {
                points.pop();
            }
            points.push(point);
        }
        MissRatioCurve::new(points, references as u64).unwrap()
    }

    #[test]
    fn each_holds_what_it_holds_in_an_lru_memory_of_both() {
        for seed in 1..=5 {
            let rates = [1.0, 4.0];
            let streams: [Pages; 2] = [
                Box::new(uniform(2_000, seed)),
                Box::new(uniform(2_000, seed + 9)),
            ];
            let pages = interleaved(streams, rates, seed, 40_000);
            let memory = composed(&pages, rates);
            for size in [500, 1_000, 2_000, 3_000] {
                // Mean over many moments of how many of the pages used last are the first one's.
                let (mut held, mut moments) = (0, 0);
                let mut stack = NaiveStack::default();
                for (now, &page) in pages.iter().enumerate() {
                    stack.touch(page);
                    if now > 20_000 && now % 100 == 0 {
                        held += stack.top(size).iter().filter(|&page| page % 2 == 0).count();
                        moments += 1;
                    }
                }
                let expected = held as f64 / f64::from(moments);
                let found = memory.at(PageCount(size as u64));
                let error = (found[0].occupancy_pages - expected).abs() / size as f64;
                assert!(
                    error <= 0.03,
                    "{size}: {} {expected}",
                    found[0].occupancy_pages
                );
                let both = found[0].occupancy_pages + found[1].occupancy_pages;
                assert!((both - size as f64).abs() < 1e-6, "{both}");
            }
        }
    }

    #[test]
    fn one_vm_alone_has_its_own_curve() {
        let pages: Vec<_> = zipf(5_000, 0.9, 4).take(50_000).collect();
        let mut aet = Aet::new();
        aet.observe(&batch_of(pages));
        let (alone, times) = (aet.curve().unwrap(), aet.reuse_times());
        for rate in [1e-9, 1.0, 123.4] {
            let share = Share {
                reuse_times: &times,
                alone: &alone,
                rate,
            };
            let memory = shared_curve(&[share]).unwrap();
            for curve in [memory.curve().unwrap(), memory.curve_of(0).unwrap()] {
                for size in (0..6_000).map(PageCount) {
                    let (found, expected) = (curve.miss_ratio(size), alone.miss_ratio(size));
                    assert!(
                        (found - expected).abs() < 1e-9,
                        "{size}: {found} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_is_no_share_is_refused() {
        let mut aet = Aet::new();
        aet.observe(&batch_of([1, 2, 1]));
        let (alone, times) = (aet.curve().unwrap(), aet.reuse_times());
        assert_eq!(shared_curve(&[]).unwrap_err(), SharedError::Empty);
        let share = Share {
            reuse_times: &ReuseTimes::new(),
            alone: &alone,
            rate: 1.0,
        };
        assert_eq!(shared_curve(&[share]).unwrap_err(), SharedError::Empty);
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let share = Share {
                reuse_times: &times,
                alone: &alone,
                rate,
            };
            let refused = shared_curve(&[share]).unwrap_err();
            assert!(matches!(
                refused,
                SharedError::RateOutOfRange { index: 0, .. }
            ));
        }
        let share = Share {
            reuse_times: &times,
            alone: &alone,
            rate: 1.0,
        };
        assert!(shared_curve(&[share]).unwrap().curve_of(1).is_err());
    }
}
