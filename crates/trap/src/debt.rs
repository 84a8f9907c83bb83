//! Time that periods took beyond their budgets. The following periods do not trace until their budgets have paid for it, so that tracing
//! which cannot be done within the budget of one period is within the budget in the mean.

use std::time::Duration;

/// What is owed.
#[derive(Debug, Default)]
pub struct Debt(Duration);

impl Debt {
    /// Whether the next period has to pay: all of its `budget` is owed. Without a budget nothing is.
    pub fn is_due(&self, budget: Option<Duration>) -> bool {
        budget.is_some_and(|budget| self.0 >= budget)
    }

    /// Settles what a period took. What exceeds the budgets of `periods_max` periods is not paid: results would be too old.
    pub fn settle(&mut self, taken: Duration, budget: Option<Duration>, periods_max: u32) {
        if let Some(budget) = budget {
            let owed = (self.0 + taken).saturating_sub(budget);
            self.0 = owed.min(budget * periods_max);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_period_took_is_paid_by_those_after_it() {
        let ms = Duration::from_millis;
        let budget = Some(ms(10));
        // Of 12 periods, those that trace: each takes `taken`.
        let tracing = |taken, periods_max| {
            let mut debt = Debt::default();
            let traces = |_: &usize| {
                let is_due = debt.is_due(budget);
                debt.settle(if is_due { ms(0) } else { taken }, budget, periods_max);
                !is_due
            };
            (0..12).filter(traces).collect::<Vec<_>>()
        };
        assert_eq!(tracing(ms(10), 8).len(), 12);
        assert_eq!(tracing(ms(40), 8), [0, 4, 8]);
        assert_eq!(tracing(ms(1000), 8), [0, 9]);
        assert_eq!(tracing(ms(1000), 128), [0]);
        // Half a budget too much: one in three.
        assert_eq!(tracing(ms(15), 8), [0, 1, 3, 4, 6, 7, 9, 10]);
        assert!(!Debt(ms(1000)).is_due(None));
    }
}
