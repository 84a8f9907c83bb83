//! Random numbers, the same in each run.

use plimsoll_flow::SplitMix;

/// Random numbers.
pub(crate) struct Random(SplitMix);

impl Random {
    /// The numbers after a seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix(seed))
    }

    /// 64 random bits.
    #[inline]
    pub(crate) fn bits(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number below `bound`, which is small beside 2^64.
    #[inline]
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.0.below(bound as u64)).expect("below a usize")
    }

    /// A number from 0.0 up to, not including, 1.0.
    pub(crate) fn unit(&mut self) -> f64 {
        self.0.unit()
    }

    /// Whether something of this probability, 0.0 to 1.0, happens.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// The numbers below `count`, in random order.
    pub(crate) fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<_> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_holds_each_number_once() {
        let mut order = Random::new(1).order(1000);
        assert_ne!(order, (0..1000).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..1000).collect::<Vec<_>>());
    }
}
