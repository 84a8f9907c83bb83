//! When pages are drawn: a Poisson stream, in the time of the VM, whose rate spends the budget.
//!
//! The rate is the budget over the mean cost of a sample, learned from all that was spent and all samples that began in
//! the last seconds. What was spent above or below the budget corrects it within a second. Before anything is learned, a
//! sample is taken to trap, so the first second is within the budget like every other.

use std::time::Duration;

use crate::sample::mix;

/// Cost of arming a page, until it is learned.
const ARM_SECONDS: f64 = 30e-6;
/// Number of samples that the expected cost counts for.
const EXPECTED_SAMPLES: f64 = 20.0;
/// Time after which what was learned counts for a third.
const MEMORY_SECONDS: f64 = 10.0;
/// What may be saved and spent later, the debt above which nothing is drawn, and the debt of traps alone above which
/// nothing may trap, in seconds of the budget.
const CREDIT_MAX: f64 = 0.1;
const DEBT_MAX: f64 = 0.5;
/// The largest debt that is paid back, in seconds of the budget.
const DEBT_KEPT: f64 = 10.0;
/// Limit of the rate, and the rate without a budget, in samples per second.
const RATE_MAX: f64 = 10_000.0;
const RATE_UNBOUNDED: f64 = 1000.0;
/// Samples per batch, if they are due within [`TICK_MIN`] to [`TICK_MAX`].
const BATCH: f64 = 4.0;
/// Mean time between two batches, each of which costs a wake-up and some calls whatever its size.
const TICK_MIN: f64 = 0.005;
const TICK_MAX: f64 = 0.1;

/// What was taken from a VM.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spent {
    /// By traps.
    pub trapped: Duration,
    /// CPU time for all else.
    pub own: Duration,
}

/// The schedule of samples.
#[derive(Debug, Clone)]
pub struct Pace {
    /// vCPU seconds per second; `None` for no bound.
    budget: Option<f64>,
    /// Samples per second, if that is fixed.
    fixed: Option<f64>,
    /// Budget not spent, in seconds; negative if more was spent.
    credit: f64,
    /// The same if traps were all that is spent: withdrawing samples saves nothing else.
    trap_credit: f64,
    at: Duration,
    /// CPU time of the VM until then, and what it used and the time that passed; the past counts ever less.
    vm_at: Duration,
    ran: f64,
    passed: f64,
    /// What was spent and the samples that began for it; the past counts ever less.
    spent: f64,
    begun: f64,
    /// Expected number of draws so far, and that at which the next is due.
    expected: f64,
    next: f64,
    dice: Dice,
}

impl Pace {
    /// Starts at `now`, and at `vm_time` of the VM, for traps of `trap_cost`.
    pub fn new(
        budget: Option<f64>,
        fixed: Option<f64>,
        trap_cost: Duration,
        seed: u64,
        (now, vm_time): (Duration, Duration),
    ) -> Self {
        let mut dice = Dice::new(seed);
        Self {
            budget,
            fixed,
            credit: 0.0,
            trap_credit: 0.0,
            at: now,
            vm_at: vm_time,
            ran: 0.0,
            passed: 0.0,
            spent: (ARM_SECONDS + trap_cost.as_secs_f64()) * EXPECTED_SAMPLES,
            begun: EXPECTED_SAMPLES,
            expected: 0.0,
            next: dice.exponential(),
            dice,
        }
    }

    /// vCPU seconds that may be spent in a time; `None` for no bound.
    pub fn budget_over(&self, length: Duration) -> Option<f64> {
        Some(self.budget? * length.as_secs_f64())
    }

    /// Time until the next batch.
    pub fn tick(&mut self) -> Duration {
        let mean = (BATCH / self.rate().max(1e-9)).clamp(TICK_MIN, TICK_MAX);
        Duration::from_secs_f64(mean * (0.5 + self.dice.uniform()))
    }

    /// Accounts for the time until `now`, and until `vm_time` of the VM, in which `spent` was spent and `begun` samples
    /// began. Draws come evenly in the VM's time, as many as the rate allows in the mean.
    pub fn settle(&mut self, now: Duration, vm_time: Duration, spent: Spent, begun: u64) {
        let length = now.saturating_sub(self.at).as_secs_f64();
        let trapped = spent.trapped.as_secs_f64();
        let spent = spent.own.as_secs_f64() + trapped;
        let ran = vm_time.saturating_sub(self.vm_at).as_secs_f64();
        (self.at, self.vm_at) = (now, vm_time);
        let keep = (-length / MEMORY_SECONDS).exp();
        self.spent = self.spent * keep + spent;
        self.begun = self.begun * keep + begun as f64;
        if let Some(budget) = self.budget {
            let after = |credit: f64, spent: f64| {
                let credit = credit + budget * length - spent;
                credit.clamp(-DEBT_KEPT * budget, CREDIT_MAX * budget)
            };
            self.credit = after(self.credit, spent);
            self.trap_credit = after(self.trap_credit, trapped);
        }
        self.ran = self.ran * keep + ran;
        self.passed = self.passed * keep + length;
        if self.ran > 0.0 {
            self.expected += self.rate() * ran * self.passed / self.ran;
        }
    }

    /// Whether another draw is due; counts it if so.
    pub fn is_due(&mut self) -> bool {
        let is_due = self.next <= self.expected;
        if is_due {
            self.next += self.dice.exponential();
        }
        is_due
    }

    /// Drops the draws that are due: they cannot be made now.
    pub fn skip(&mut self) {
        while self.is_due() {}
    }

    /// Whether so much was spent on traps that no page may trap any more for now.
    pub fn is_overdrawn(&self) -> bool {
        self.budget
            .is_some_and(|budget| self.trap_credit < -DEBT_MAX * budget)
    }

    /// Samples per second.
    fn rate(&self) -> f64 {
        match (self.budget, self.fixed) {
            (None, fixed) => fixed.unwrap_or(RATE_UNBOUNDED).min(RATE_MAX),
            (Some(_), Some(_)) if self.credit < 0.0 => 0.0,
            (Some(_), Some(fixed)) => fixed.min(RATE_MAX),
            (Some(budget), None) => {
                let cost = self.spent / self.begun.max(1e-9);
                ((budget + self.credit / DEBT_MAX).max(0.0) / cost.max(1e-9)).min(RATE_MAX)
            }
        }
    }
}

/// Random numbers.
#[derive(Debug, Clone)]
pub struct Dice {
    seed: u64,
    thrown: u64,
}

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self { seed, thrown: 0 }
    }

    /// Any number.
    pub fn whole(&mut self) -> u64 {
        self.thrown += 1;
        mix(self.seed ^ mix(self.thrown))
    }

    /// A number below `end`, which is above 0.
    pub fn below(&mut self, end: u64) -> u64 {
        let scaled = (u128::from(self.whole()) * u128::from(end)) >> 64;
        u64::try_from(scaled).expect("a product with a number below 2^64, divided by 2^64")
    }

    /// A number from 0.0 up to 1.0.
    pub fn uniform(&mut self) -> f64 {
        (self.whole() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A time until the next event of a Poisson process with one event in a unit of time.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn pace() -> Pace {
        Pace::new(
            Some(0.01),
            None,
            Duration::from_micros(70),
            1,
            (Duration::ZERO, Duration::ZERO),
        )
    }

    fn traps(trapped: Duration) -> Spent {
        Spent {
            trapped,
            own: Duration::ZERO,
        }
    }

    /// Draws for `ms` in which each draw costs `cost`, at once; returns their number.
    fn run(pace: &mut Pace, ms: u32, cost: Duration) -> u32 {
        let (mut draws, mut begun) = (0, 0);
        for step in 1..=ms {
            pace.settle(
                pace.at + MS,
                pace.vm_at + MS,
                traps(cost * begun),
                u64::from(begun),
            );
            begun = 0;
            while pace.is_due() {
                begun += 1;
            }
            draws += begun;
            assert!(step < 5 || !pace.is_overdrawn());
        }
        draws
    }

    #[test]
    fn the_first_second_and_all_later_ones_spend_the_budget_and_no_more() {
        for cost_us in [20, 50, 100] {
            let (mut pace, cost) = (pace(), Duration::from_micros(cost_us));
            let mut spent = run(&mut pace, 1000, cost) * cost;
            // 10 ms, and what chance adds to a hundred draws.
            assert!(spent <= Duration::from_millis(12), "{spent:?}");
            spent = run(&mut pace, 60_000, cost) * cost;
            let share = spent.as_secs_f64() / 60.0;
            assert!((0.0095..0.0102).contains(&share), "{cost_us} µs: {share}");
        }
    }

    #[test]
    fn a_burst_is_paid_back_before_more_is_drawn() {
        let mut pace = pace();
        run(&mut pace, 1000, Duration::from_micros(100));
        let estimated = Spent {
            trapped: Duration::ZERO,
            own: 20 * MS,
        };
        let mut other = pace.clone();
        other.settle(other.at, other.vm_at, estimated, 0);
        // Withdrawing samples would not pay for an estimate.
        assert!(!other.is_overdrawn() && other.credit < -0.01);
        pace.settle(pace.at, pace.vm_at, traps(20 * MS), 0);
        assert!(pace.is_overdrawn());
        // 20 ms are the budget of 2 s.
        let mut silent = 0;
        while !pace.is_due() && silent < 10_000 {
            silent += 1;
            pace.settle(pace.at + MS, pace.vm_at + MS, Spent::default(), 0);
        }
        assert!((1000..2500).contains(&silent), "{silent} ms");
        assert!(!pace.is_overdrawn());
    }

    #[test]
    fn a_vm_that_runs_in_bursts_is_sampled_while_it_runs() {
        // Draws in a minute while the VM runs, the first part of each second, and while it does not.
        let drawn = |running_ms: u64| {
            let mut pace = Pace::new(Some(0.01), None, MS, 3, (Duration::ZERO, Duration::ZERO));
            let mut drawn = [0_u32; 2];
            for step in 0..60_000 {
                let runs = step % 1000 < running_ms;
                let vm_time = pace.vm_at + if runs { MS } else { Duration::ZERO };
                pace.settle(pace.at + MS, vm_time, Spent::default(), 0);
                while pace.is_due() {
                    drawn[usize::from(!runs)] += 1;
                }
            }
            drawn
        };
        let [running, idle] = drawn(100);
        let [even, _] = drawn(1000);
        assert_eq!(idle, 0);
        assert!(even.abs_diff(running) < even / 5, "{even}, {running}");
    }

    #[test]
    fn draws_come_at_random_times() {
        let mut pace = Pace::new(None, Some(1000.0), MS, 3, (Duration::ZERO, Duration::ZERO));
        let counts: Vec<f64> = (0..4000)
            .map(|_| f64::from(run(&mut pace, 10, Duration::ZERO)))
            .collect();
        let mean = counts.iter().sum::<f64>() / 4000.0;
        let variance = counts.iter().map(|n| (n - mean).powi(2)).sum::<f64>() / 4000.0;
        // Of a Poisson distribution both are 10; four standard deviations.
        assert!((mean - 10.0).abs() < 0.2, "{mean}");
        assert!((variance - 10.0).abs() < 1.0, "{variance}");
    }

    #[test]
    fn numbers_below_an_end_fill_the_range() {
        let mut dice = Dice::new(5);
        let mut hits = [0; 7];
        for _ in 0..7000 {
            hits[crate::sys::usize_of(dice.below(7))] += 1;
        }
        assert!(
            hits.iter().all(|hits| (870..1130).contains(hits)),
            "{hits:?}"
        );
    }
}
