//! State at the end of each interval of a run, in bounded memory.

/// Maximum number of intervals kept; of a longer run, every second, fourth, .. one.
const KEPT_MAX: usize = 4096;

/// State at the end of an interval.
#[derive(Debug, Clone)]
pub struct Step {
    /// From 0.
    pub number: u64,
    /// Instructions, or references, since the start.
    pub at: u64,
    /// The columns of each method of the registry, in its order.
    pub columns: Vec<Vec<Option<u64>>>,
}

/// The steps of a run, thinned.
#[derive(Debug)]
pub struct Steps {
    kept: Vec<Step>,
    every: u64,
    last: Option<Step>,
}

impl Steps {
    pub(super) fn new() -> Self {
        Self {
            kept: Vec::new(),
            every: 1,
            last: None,
        }
    }

    pub(super) fn push(&mut self, step: Step) {
        self.last = Some(step.clone());
        if !step.number.is_multiple_of(self.every) {
            return;
        }
        if self.kept.len() == KEPT_MAX {
            self.every *= 2;
            let every = self.every;
            self.kept.retain(|step| step.number.is_multiple_of(every));
            if !step.number.is_multiple_of(every) {
                return;
            }
        }
        self.kept.push(step);
    }

    /// The distance between kept intervals.
    pub fn every(&self) -> u64 {
        self.every
    }

    /// The kept intervals, and the last one.
    pub fn iter(&self) -> impl Iterator<Item = &Step> {
        let newest = self.kept.last().map(|step| step.number);
        let last = self.last.as_ref();
        let last = last.filter(|step| Some(step.number) != newest);
        self.kept.iter().chain(last)
    }

    pub(super) fn last(&self) -> Option<&Step> {
        self.last.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_is_thinned_evenly_and_keeps_its_end() {
        let mut steps = Steps::new();
        for number in 0..100_001 {
            steps.push(Step {
                number,
                at: number,
                columns: Vec::new(),
            });
        }
        let numbers: Vec<_> = steps.iter().map(|step| step.number).collect();
        assert!(numbers.len() <= KEPT_MAX + 1 && numbers.len() > KEPT_MAX / 2);
        assert_eq!((numbers[0], numbers[numbers.len() - 1]), (0, 100_000));
        let even = numbers.windows(2).rev().skip(1);
        assert!(
            even.into_iter()
                .all(|pair| pair[1] - pair[0] == steps.every())
        );
    }
}
