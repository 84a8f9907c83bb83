//! Compares traced curves with closed forms: guests whose references follow a known distribution.
//!
//! The tracer observes the references that miss its hot set, a queue that represents h pages. So the
//! traced curve at a size c above h is the share, of those, that an LRU memory of c pages
//! misses: m(c) / f(h), with m the closed form of LRU and f that of a queue (FIFO),
//! both by the distribution of the references. Pages in constant use besides the distribution's own (a kernel's, a
//! stack) trap each time they have passed through the queue, at sizes little above h; taken from 2h on, as
//! shares of the references that reach past 2h, both sides are free of them and of f: the
//! second column. The third is the absolute form, where the references
//! are counted by the guest itself: traps times T, times the curve, over the guest's visits, against m(c).

use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;
use plimsoll_flow::{MissRatioCurve, PageCount, TraceMethod};
use plimsoll_rig::GuestConfig;
use plimsoll_source::synthetic::{uniform_curve, zipf_curve};
use plimsoll_trap::{RateRule, TraceConfig};

use crate::guests::GuestArgs;
use crate::tracing::trace;
use plimsoll_observe::even_sizes;
use plimsoll_protocol::size::Interval;
use plimsoll_rig::Subject;

/// Trace guests with uniform and Zipf references and compare their curves with the closed forms.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Size of the guests' array, in MiB
    #[arg(long, default_value_t = 128)]
    mib: u64,
    /// How long each guest is traced at each rate
    #[arg(long, default_value = "60s")]
    length: Interval,
    /// Length of a period
    #[arg(long, default_value = "20s")]
    period: Interval,
    /// Number of pages for which one traced page stands
    #[arg(long, value_delimiter = ',', default_value = "16,64")]
    scales: Vec<u32>,
    /// Pages of the hot set
    #[arg(long, default_value_t = 64)]
    hot_set: u32,
    #[command(flatten)]
    guests: GuestArgs,
}

/// A distribution by which a guest chooses pages.
#[derive(Debug, Clone, Copy)]
pub enum Law {
    /// Uniform.
    Uniform,
    /// By 1 / rank^alpha.
    Zipf(f64),
}

impl Law {
    /// Words of the guest's workload.
    pub fn workload(self, mib: u64) -> String {
        match self {
            Self::Uniform => format!("workload=uniform mib={mib}"),
            Self::Zipf(alpha) => format!("workload=zipf alpha={alpha} mib={mib}"),
        }
    }

    /// Miss ratio of an LRU memory in the steady state, over `pages`.
    pub fn lru_curve(self, pages: PageCount) -> anyhow::Result<MissRatioCurve> {
        Ok(match self {
            Self::Uniform => uniform_curve(pages)?,
            Self::Zipf(alpha) => {
                let sizes: Vec<_> = even_sizes(PageCount(1), pages).collect();
                zipf_curve(pages, alpha, &sizes)?
            }
        })
    }

    /// Miss ratio of a queue of `size` pages in the steady state, over `pages`.
    ///
    /// Under independent references a page of probability p is in the queue for a share
    /// p t / (1 + p t) of the time, with t such that the shares sum to the size.
    pub fn queue_miss_ratio(self, pages: PageCount, size: PageCount) -> f64 {
        let alpha = match self {
            Self::Uniform => 0.0,
            Self::Zipf(alpha) => alpha,
        };
        let weights: Vec<f64> = (1..=pages.0)
            .map(|rank| (rank as f64).powf(-alpha))
            .collect();
        let sum: f64 = weights.iter().sum();
        let occupied = |time: f64| -> f64 {
            weights
                .iter()
                .map(|weight| weight / sum * time)
                .map(|x| x / (1.0 + x))
                .sum()
        };
        let (mut low, mut high) = (0.0, 1.0);
        while occupied(high) < size.0 as f64 && high < 1e18 {
            high *= 2.0;
        }
        for _ in 0..100 {
            let middle = (low + high) / 2.0;
            if occupied(middle) < size.0 as f64 {
                low = middle;
            } else {
                high = middle;
            }
        }
        weights
            .iter()
            .map(|weight| weight / sum)
            .map(|p| p / (1.0 + p * high))
            .sum()
    }
}

/// Runs the experiment.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    let guests = args.guests.prepare()?;
    let pages = PageCount(args.mib * 256);
    writeln!(
        out,
        "{:33}mean absolute error of the curve{:17}past h\n\
         guest     rate   h        past h  past 2h   of all  references  traced   f(h)  lost  slowed to",
        "", ""
    )?;
    for (name, law) in [("uniform", Law::Uniform), ("zipf", Law::Zipf(1.0))] {
        let guest = GuestConfig {
            memory_mib: args.mib + 96,
            ..GuestConfig::new(name, &law.workload(args.mib))
        };
        let Some(mut subject) = guests.boot(guest, out)? else {
            continue;
        };
        let truth = law.lru_curve(pages)?;
        let untraced = rate_of(&mut subject, Duration::from_secs(5))?;
        for &scale in &args.scales {
            let config = TraceConfig {
                period: args.period.get(),
                budget: None,
                scale,
                rate_rule: RateRule::Fixed,
                hot_set_pages: args.hot_set,
                ..TraceConfig::default()
            };
            let stop = AtomicBool::new(false);
            let observed = trace(
                &subject.vm,
                (TraceMethod::Traps, &config),
                (args.length.get(), None),
                &stop,
                &mut |_| (),
            )?;
            let hidden = PageCount(u64::from(args.hot_set) * u64::from(scale));
            let curve = &observed.curves.context("no page was used twice")?.lru;
            let queue = law.queue_miss_ratio(pages, hidden);
            let (first, last) = match &observed.periods[..] {
                [first, .., last] => (first.start, last.end),
                [only] => (only.start, only.end),
                [] => anyhow::bail!("no period was traced"),
            };
            let (visits, took) = subject.listen()?.visits(first, last);
            let traps: u64 = observed
                .periods
                .iter()
                .map(|traced| traced.observed.period.traps.taken)
                .sum();
            let window: Duration = observed
                .periods
                .iter()
                .map(|traced| traced.observed.period.window)
                .sum();
            let visits_per_second = visits as f64 / took.as_secs_f64();
            let past_hot_set =
                traps as f64 * f64::from(scale) / (visits_per_second * window.as_secs_f64());
            let mean = |from: u64, error: &dyn Fn(PageCount) -> f64| {
                let errors: Vec<f64> = even_sizes(PageCount(from), pages).map(error).collect();
                errors.iter().sum::<f64>() / errors.len() as f64
            };
            let (found, wanted) = (|size| curve.miss_ratio(size), |size| truth.miss_ratio(size));
            let twice = PageCount(hidden.0 * 2);
            let past_h = mean(hidden.0, &|size| {
                (found(size) - (wanted(size) / queue).min(1.0)).abs()
            });
            let past_2h = mean(twice.0, &|size| {
                (found(size) / found(twice) - wanted(size) / wanted(twice)).abs()
            });
            let of_all = mean(hidden.0, &|size| {
                (found(size) * past_hot_set - wanted(size)).abs()
            });
            writeln!(
                out,
                "{name:<9} 1/{scale:<4} {:>4} MiB {past_h:>8.4} {past_2h:>8.4} {of_all:>8.4} \
                 {:>11} {past_hot_set:>7.3} {queue:>6.3} {:>5} {:>8.0} %",
                hidden.0 / 256,
                curve.references(),
                observed
                    .periods
                    .iter()
                    .map(|traced| traced.observed.period.losses.lost())
                    .sum::<u64>(),
                visits_per_second / untraced * 100.0,
            )?;
        }
        writeln!(
            out,
            "           (under {}; {} MiB; pages the guest found wrong: {})",
            subject.accelerator(),
            args.mib,
            subject.listen()?.mismatches()
        )?;
    }
    Ok(())
}

/// Visits a second of an untraced guest.
fn rate_of(subject: &mut Subject, length: Duration) -> anyhow::Result<f64> {
    let start = std::time::Instant::now();
    std::thread::sleep(length);
    let (visits, took) = subject.listen()?.visits(start, std::time::Instant::now());
    Ok(visits as f64 / took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Misses of a queue fed with pages of a distribution, counted.
    fn counted(weights: &[f64], size: u32) -> f64 {
        let sum: f64 = weights.iter().sum();
        let (mut queue, mut misses) = (std::collections::VecDeque::new(), 0u32);
        let mut state = 1u64;
        let count = 200_000;
        for _ in 0..count {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let mut left = (state >> 11) as f64 / (1u64 << 53) as f64 * sum;
            let page = weights.iter().position(|weight| {
                left -= weight;
                left < 0.0
            });
            let page = page.unwrap_or_default();
            if !queue.contains(&page) {
                misses += 1;
                queue.push_back(page);
                if queue.len() > size as usize {
                    queue.pop_front();
                }
            }
        }
        f64::from(misses) / f64::from(count)
    }

    #[test]
    fn the_queues_closed_form_agrees_with_counting() {
        let weights: Vec<f64> = (1..=100).map(|rank| 1.0 / f64::from(rank)).collect();
        for size in [5_u32, 20, 60] {
            let closed =
                Law::Zipf(1.0).queue_miss_ratio(PageCount(100), PageCount(u64::from(size)));
            let counted = counted(&weights, size);
            assert!(
                (closed - counted).abs() < 0.01,
                "{size}: {closed} {counted}"
            );
        }
        let uniform = Law::Uniform.queue_miss_ratio(PageCount(100), PageCount(30));
        assert!((uniform - 0.7).abs() < 1e-6);
    }
}
