//! The stop rule of \[PRL\] §4.4: a size that does not change for ω steps is final.

use std::collections::VecDeque;
use std::num::NonZeroU16;

use plimsoll_flow::PageCount;

/// The time at which a size was first constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SettledSize {
    /// Number of the step at whose end it was, from 0.
    pub step: u64,
    /// The size at that time.
    pub size: PageCount,
}

/// Applies the stop rule to a size, step by step.
#[derive(Debug, Clone)]
pub(super) struct StopRule {
    omega: NonZeroU16,
    tolerance: f64,
    /// The sizes of the last ω steps.
    before: VecDeque<u64>,
    steps: u64,
    settled: Option<SettledSize>,
}

impl StopRule {
    /// A change of up to `tolerance`, a share of the size, is ignored.
    pub(super) fn new(omega: NonZeroU16, tolerance: f64) -> Self {
        Self {
            omega,
            tolerance,
            before: VecDeque::new(),
            steps: 0,
            settled: None,
        }
    }

    /// Adds the size at the end of a step; it settles only above 0 and at `least` or more. Returns its
    /// growth within ω steps, once there are as many.
    pub(super) fn step(&mut self, size: u64, least: u64) -> Option<u64> {
        let full = self.before.len() == usize::from(self.omega.get());
        let before = if full { self.before.pop_front() } else { None };
        self.before.push_back(size);
        let growth = before.map(|before| size.saturating_sub(before));
        let still = growth.is_some_and(|growth| growth as f64 <= self.tolerance * size as f64);
        if still && size >= least.max(1) && self.settled.is_none() {
            self.settled = Some(SettledSize {
                step: self.steps,
                size: PageCount(size),
            });
        }
        self.steps += 1;
        growth
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    pub(super) fn settled(&self) -> Option<SettledSize> {
        self.settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(omega: u16, tolerance: f64, sizes: &[u64]) -> Option<u64> {
        let mut settling = StopRule::new(NonZeroU16::new(omega).unwrap(), tolerance);
        for &size in sizes {
            settling.step(size, 0);
        }
        settling.settled().map(|settled| settled.step)
    }

    #[test]
    fn a_size_settles_when_it_is_that_of_omega_steps_before() {
        assert_eq!(settled(1, 0.0, &[5, 7, 7, 7]), Some(2));
        assert_eq!(settled(2, 0.0, &[5, 7, 7, 7]), Some(3));
        assert_eq!(settled(4, 0.0, &[7, 7, 7, 7]), None);
        assert_eq!(settled(4, 0.0, &[7, 7, 7, 7, 7]), Some(4));
    }

    #[test]
    fn nothing_never_settles() {
        assert_eq!(settled(1, 0.0, &[0; 9]), None);
    }

    #[test]
    fn a_size_below_the_least_waits() {
        let mut settling = StopRule::new(NonZeroU16::MIN, 0.0);
        for (size, least) in [(4, 5), (4, 5), (4, 5), (4, 4)] {
            settling.step(size, least);
        }
        assert_eq!(settling.settled().map(|settled| settled.step), Some(3));
    }

    #[test]
    fn a_creep_within_the_tolerance_is_no_change() {
        let creeping: Vec<_> = (1000..1020).collect();
        assert_eq!(settled(4, 0.0, &creeping), None);
        assert_eq!(settled(4, 0.003, &creeping), None);
        assert_eq!(settled(4, 0.004, &creeping), Some(4));
    }
}
