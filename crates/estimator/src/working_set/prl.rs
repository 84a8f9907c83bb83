//! Page reference logging: the pages logged often, once their number is constant.
//!
//! A processor that logs every page walk logs a page repeatedly as long as it is used. A page is *hot* when it was
//! logged at least τ times. Hot pages are counted at the end of each step of μ seconds; when their number equals that ω
//! steps before, the whole working set has been seen. Counts are never cleared, so the number of hot pages never falls.
//!
//! Source: \[PRL\] §4.4, with its τ = 50, ω = 4 steps (and μ = 30 s) as defaults; its text uses both "at least τ times"
//! and "more than τ times", of which the first is used here. Departs in two conditions, without which the rule fails on
//! real guests:
//!
//! - *warm-up*: if a step is short compared with the time in which a page is logged τ times, the first hot pages are a
//!   few of the timer's, and their number is constant long before the workload's pages are hot. A number therefore
//!   settles only when it is a share `warm_up` of the pages logged within the last ω steps.
//! - *tolerance*: pages of timers and of the kernel's bookkeeping reach τ one by one as long as a guest runs, and the
//!   difference is never 0. A change of up to a share `tolerance` of the hot pages is therefore ignored.
//!
//! Not observed: pages used from a TLB entry that is never evicted (practically none, because interval ends flush the
//! TLB); a working set that shrinks or moves, which requires a new estimator; pages missed while a log was drained,
//! unless they are logged again.
//! Cost: O(1) per logged page; 24 bytes for each page ever logged.

use std::num::{NonZeroU16, NonZeroU32};

use plimsoll_flow::{PageCount, PageNumber, WorkingSet, WorkingSetBound};

use super::estimator::WorkingSetEstimator;
use super::settling::{SettledSize, StopRule};
use crate::parts::hash::{PageMap, page_map};

/// Options of [`Prl`]: which pages are hot, and when the estimate is settled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrlOptions {
    /// τ: number of times a page must be logged to be hot.
    pub tau: NonZeroU32,
    /// ω: number of steps without a change of the number of hot pages.
    pub omega: NonZeroU16,
    /// Share, 0.0 to 1.0, of the pages logged within the last ω steps that must be hot before the number can settle.
    pub warm_up: f64,
    /// Growth within ω steps, as a share of the hot pages, that is ignored; 0.0 is the paper's rule.
    pub tolerance: f64,
    /// ε: additional need of the guest's kernel, \[PRL\] §4.4.
    pub epsilon: PageCount,
}

impl PrlOptions {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        tau: NonZeroU32::new(50).unwrap(),
        omega: NonZeroU16::new(4).unwrap(),
        warm_up: 0.1,
        tolerance: 0.001,
        epsilon: PageCount(0),
    };
}

impl Default for PrlOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// State at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrlStep {
    /// Number of hot pages.
    pub hot: PageCount,
    /// Increase of this number within ω steps; `None` in the first ω steps.
    pub growth: Option<u64>,
    /// Pages logged within the last ω steps, hot or not.
    pub recent: PageCount,
}

/// The PRL estimator.
///
/// ```
/// use plimsoll_estimator::working_set::{Prl, PrlOptions};
/// use plimsoll_flow::{PageCount, PageNumber};
///
/// let mut prl = Prl::new(PrlOptions::default());
/// while prl.settled().is_none() {
///     for _ in 0..10 {
///         prl.log(&[7, 8, 9].map(PageNumber));
///     }
///     prl.end_interval();
/// }
/// assert_eq!(prl.working_set().size, PageCount(3));
/// assert_eq!(prl.steps(), 9); // hot in the fifth, and four more that add nothing
/// ```
#[derive(Debug, Clone)]
pub struct Prl {
    options: PrlOptions,
    pages: PageMap<LoggedPage>,
    hot: u64,
    /// Number of pages by the step in which they were last logged: a ring of ω steps.
    last_logged: Vec<u64>,
    settling: StopRule,
}

#[derive(Debug, Clone, Copy)]
struct LoggedPage {
    /// Number of times logged, up to τ.
    times: u32,
    last_step: u64,
}

impl Prl {
    /// Returns an estimator without observations.
    pub fn new(options: PrlOptions) -> Self {
        Self {
            options,
            pages: page_map(),
            hot: 0,
            last_logged: vec![0; usize::from(options.omega.get())],
            settling: StopRule::new(options.omega, options.tolerance),
        }
    }

    /// Records logged pages, in any order.
    pub fn log(&mut self, pages: &[PageNumber]) {
        let now = self.settling.steps();
        let omega = self.last_logged.len() as u64;
        for &page in pages {
            let logged = self.pages.entry(page).or_insert_with(|| {
                self.last_logged[slot(now, omega)] += 1;
                LoggedPage {
                    times: 0,
                    last_step: now,
                }
            });
            if logged.last_step != now {
                if now - logged.last_step < omega {
                    self.last_logged[slot(logged.last_step, omega)] -= 1;
                }
                self.last_logged[slot(now, omega)] += 1;
                logged.last_step = now;
            }
            if logged.times < self.options.tau.get() {
                logged.times += 1;
                self.hot += u64::from(logged.times == self.options.tau.get());
            }
        }
    }

    /// Ends a step.
    pub fn end_interval(&mut self) -> PrlStep {
        let recent: u64 = self.last_logged.iter().sum();
        let least = PageCount(recent).scaled(self.options.warm_up.max(0.0));
        let growth = self.settling.step(self.hot, least.0);
        // The slot of the step that begins had the pages of ω steps before.
        let omega = self.last_logged.len() as u64;
        self.last_logged[slot(self.settling.steps(), omega)] = 0;
        PrlStep {
            hot: PageCount(self.hot),
            growth,
            recent: PageCount(recent),
        }
    }

    /// Number of steps that ended.
    pub fn steps(&self) -> u64 {
        self.settling.steps()
    }

    /// The time at which the number of hot pages was first constant.
    pub fn settled(&self) -> Option<SettledSize> {
        self.settling.settled()
    }

    /// Hot pages when their number settled, plus ε; before that, the hot pages so far, as a lower bound.
    pub fn working_set(&self) -> WorkingSet {
        let (hot, bound) = match self.settled() {
            Some(settled) => (settled.size.0, WorkingSetBound::Estimate),
            None => (self.hot, WorkingSetBound::AtLeast),
        };
        WorkingSet {
            size: PageCount(hot.saturating_add(self.options.epsilon.0)),
            bound,
        }
    }

    /// Number of pages ever logged.
    pub fn distinct(&self) -> PageCount {
        PageCount(self.pages.len() as u64)
    }

    /// Bytes of heap allocated now.
    pub fn memory_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<(PageNumber, LoggedPage)>()
            + self.last_logged.capacity() * size_of::<u64>()
    }
}

/// Index of a step's count in a ring of `omega`.
fn slot(step: u64, omega: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "below ω, of 16 bits")]
    let slot = (step % omega) as usize;
    slot
}

impl WorkingSetEstimator for Prl {
    fn observe(&mut self, pages: &[PageNumber]) {
        self.log(pages);
    }

    fn end_interval(&mut self) -> Vec<Option<u64>> {
        let step = self.end_interval();
        vec![Some(step.hot.0), step.growth]
    }

    fn working_set(&self) -> Option<WorkingSet> {
        (self.steps() > 0).then(|| self.working_set())
    }

    fn settled(&self) -> Option<SettledSize> {
        self.settled()
    }

    fn assumed(&self) -> PageCount {
        self.options.epsilon
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn options(tau: u32, omega: u16) -> PrlOptions {
        PrlOptions {
            tau: NonZeroU32::new(tau).unwrap(),
            omega: NonZeroU16::new(omega).unwrap(),
            ..PrlOptions::default()
        }
    }

    /// The definition: all pages logged so far, counted at the end of each step.
    fn naive(steps: &[Vec<u64>], options: &PrlOptions) -> (Vec<PrlStep>, Option<SettledSize>) {
        let omega = usize::from(options.omega.get());
        let tau = options.tau.get() as usize;
        let mut told = Vec::new();
        let mut settled = None;
        for end in 1..=steps.len() {
            let so_far = steps[..end].concat();
            let times = |page: u64| so_far.iter().filter(|&&other| other == page).count();
            let pages: BTreeSet<u64> = so_far.iter().copied().collect();
            let hot = pages.iter().filter(|&&page| times(page) >= tau).count() as u64;
            let recent: BTreeSet<u64> = steps[end.saturating_sub(omega)..end]
                .concat()
                .into_iter()
                .collect();
            let before = end.checked_sub(omega + 1);
            let growth = before.map(|at| hot - told[at]);
            let warm = hot >= (options.warm_up * recent.len() as f64) as u64;
            let still =
                growth.is_some_and(|growth| growth as f64 <= options.tolerance * hot as f64);
            if hot > 0 && warm && still && settled.is_none() {
                settled = Some(SettledSize {
                    step: end as u64 - 1,
                    size: PageCount(hot),
                });
            }
            told.push(hot);
        }
        let steps = (1..=steps.len()).map(|end| PrlStep {
            hot: PageCount(told[end - 1]),
            growth: end
                .checked_sub(omega + 1)
                .map(|at| told[end - 1] - told[at]),
            recent: PageCount(
                steps[end.saturating_sub(omega)..end]
                    .concat()
                    .into_iter()
                    .collect::<BTreeSet<_>>()
                    .len() as u64,
            ),
        });
        (steps.collect(), settled)
    }

    fn found(steps: &[Vec<u64>], options: PrlOptions) -> (Vec<PrlStep>, Option<SettledSize>) {
        let mut prl = Prl::new(options);
        let told = steps.iter().map(|pages| {
            let pages: Vec<_> = pages.iter().copied().map(PageNumber).collect();
            prl.log(&pages);
            prl.end_interval()
        });
        (told.collect(), prl.settled())
    }

    proptest! {
        #[test]
        fn agrees_with_counting_everything_anew_at_each_step(
            steps in prop::collection::vec(prop::collection::vec(0_u64..30, 0..40), 1..30),
            tau in 1_u32..8,
            omega in 1_u16..6,
            warm_up in prop_oneof![Just(0.0), Just(0.1), Just(0.7)],
            tolerance in prop_oneof![Just(0.0), Just(0.001), Just(0.2)],
        ) {
            let options = PrlOptions { warm_up, tolerance, ..options(tau, omega) };
            prop_assert_eq!(found(&steps, options), naive(&steps, &options));
        }
    }

    #[test]
    fn timer_pages_do_not_settle_before_the_array_is_hot() {
        // Twelve pages of the kernel are logged ten times per step; of an array, each page once.
        let step: Vec<u64> = (0..120).map(|n| n % 12).chain(1_000..3_000).collect();
        let steps = vec![step; 60];
        let (_, settled) = found(&steps, options(50, 4));
        assert_eq!(
            settled,
            Some(SettledSize {
                step: 53,
                size: PageCount(2_012)
            })
        );
        let unguarded = PrlOptions {
            warm_up: 0.0,
            ..options(50, 4)
        };
        let settled = found(&steps, unguarded).1.unwrap();
        assert_eq!((settled.step, settled.size), (8, PageCount(12)));
    }

    #[test]
    fn pages_that_creep_past_tau_do_not_keep_it_from_settling() {
        let steps: Vec<Vec<u64>> = (0..40)
            .map(|step| {
                let array = (0..20_000).chain(0..20_000);
                // A new page of the kernel becomes hot at each step.
                array.chain([1_000_000 + step; 4]).collect()
            })
            .collect();
        assert!(found(&steps, options(4, 4)).1.is_some());
        let strict = PrlOptions {
            tolerance: 0.0,
            ..options(4, 4)
        };
        assert_eq!(found(&steps, strict).1, None);
    }

    #[test]
    fn what_has_not_settled_is_a_lower_bound_and_epsilon_is_added() {
        let mut prl = Prl::new(PrlOptions {
            epsilon: PageCount(100),
            ..options(1, 1)
        });
        prl.log(&[PageNumber(1), PageNumber(2)]);
        prl.end_interval();
        let expected = |bound| WorkingSet {
            size: PageCount(102),
            bound,
        };
        assert_eq!(prl.working_set(), expected(WorkingSetBound::AtLeast));
        prl.end_interval();
        assert_eq!(prl.working_set(), expected(WorkingSetBound::Estimate));
    }
}
