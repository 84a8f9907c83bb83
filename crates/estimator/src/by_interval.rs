//! One estimator after another: the curves of all intervals of a trace's time from one reading.
//!
//! Each estimator sees its interval's references alone, as if the trace began with them: pages used before the interval miss at
//! first. Intervals begin with the first reference; one without references is left out. A reference whose time lies before
//! its interval counts in it, and is counted as late.

use plimsoll_flow::PageNumber;

use crate::estimator::Estimator;

/// The estimator of the present interval, and what becomes of those that end.
pub struct ByInterval<M, E> {
    every_us: u64,
    make: M,
    ended: E,
    /// Time of the first reference.
    first_us: Option<u64>,
    /// The present interval, from 0.
    number: u64,
    estimator: Box<dyn Estimator>,
    references: u64,
    late: u64,
    memory_bytes: usize,
}

impl<M, E> ByInterval<M, E>
where
    M: Fn() -> Box<dyn Estimator>,
    E: FnMut(u64, u64, &mut dyn Estimator),
{
    /// Intervals of this length, whose estimators `make` makes, all alike. `ended` gets the start of an interval since the first
    /// reference, in microseconds, its number of references, and its estimator.
    pub fn new(every_us: u64, make: M, ended: E) -> Self {
        let estimator = make();
        Self {
            every_us: every_us.max(1),
            make,
            ended,
            first_us: None,
            number: 0,
            estimator,
            references: 0,
            late: 0,
            memory_bytes: 0,
        }
    }

    /// Processes references, each with its time in microseconds.
    ///
    /// # Panics
    ///
    /// If there are not as many times as pages.
    pub fn observe(&mut self, pages: &[PageNumber], times_us: &[u64]) {
        assert_eq!(pages.len(), times_us.len(), "a time for each reference");
        let (mut pages, mut times) = (pages, times_us);
        while let Some(&time) = times.first() {
            let first = *self.first_us.get_or_insert(time);
            let every_us = self.every_us;
            let interval = |time: u64| time.saturating_sub(first) / every_us;
            if interval(time) > self.number {
                self.end();
                self.estimator = (self.make)();
                (self.number, self.references) = (interval(time), 0);
            }
            let number = self.number;
            let length = times.iter().take_while(|&&time| interval(time) <= number);
            let (here, later) = times.split_at(length.count());
            let late = here
                .iter()
                .filter(|&&time| time < first || interval(time) < number);
            self.late += late.count() as u64;
            let (observed, rest) = pages.split_at(here.len());
            self.estimator.observe(observed);
            self.references += here.len() as u64;
            (times, pages) = (later, rest);
        }
    }

    fn end(&mut self) {
        if self.references > 0 {
            let estimator = &mut *self.estimator;
            self.memory_bytes = self.memory_bytes.max(estimator.memory_bytes());
            let from_us = self.number * self.every_us;
            (self.ended)(from_us, self.references, estimator);
        }
    }

    /// Ends the last interval. Returns the number of late references, and the bytes of heap that an estimator took at most.
    pub fn finish(mut self) -> (u64, usize) {
        self.end();
        (self.late, self.memory_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ExactLru;
    use plimsoll_flow::PageCount;

    #[test]
    fn every_interval_has_the_curve_of_its_references_alone_and_empty_ones_have_none() {
        let mut found = Vec::new();
        let make = || Box::new(ExactLru::new()) as Box<dyn Estimator>;
        let ended = |from_us, references, estimator: &mut dyn Estimator| {
            let curve = estimator.curve().unwrap();
            found.push((from_us, references, curve.miss_ratio(PageCount(2))));
        };
        let mut all = ByInterval::new(10, make, ended);
        let pages = [1, 1, 2, 2, 2, 1, 1].map(PageNumber);
        // The reference at 104 is late: it counts in the interval from 10 on.
        all.observe(&pages[..2], &[100, 105]);
        all.observe(&pages[2..], &[110, 104, 119, 141, 142]);
        let (late, memory_bytes) = all.finish();
        assert_eq!(late, 1);
        assert!(memory_bytes > 0);
        assert_eq!(found, [(0, 2, 0.5), (10, 3, 1.0 / 3.0), (40, 2, 0.5)]);
    }
}
