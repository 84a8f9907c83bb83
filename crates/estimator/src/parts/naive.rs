//! Reference implementations of the estimators for tests: straight from the definitions, slow, without shared code.

use std::collections::BTreeSet;

/// An LRU stack as a list, most recent first.
#[derive(Default)]
pub(crate) struct NaiveStack {
    pages: Vec<u64>,
}

impl NaiveStack {
    /// Moves a page to the front and returns the number of pages before it.
    pub(crate) fn touch(&mut self, page: u64) -> Option<u64> {
        let depth = self.pages.iter().position(|&other| other == page);
        if let Some(depth) = depth {
            self.pages.remove(depth);
        }
        self.pages.insert(0, page);
        depth.map(|depth| depth as u64)
    }

    /// The most recently used pages, at most `count` of them.
    pub(crate) fn top(&self, count: usize) -> &[u64] {
        &self.pages[..count.min(self.pages.len())]
    }

    /// Runs an LRU memory of `size` pages and counts its misses.
    pub(crate) fn misses(pages: &[u64], size: usize) -> usize {
        let mut memory: Vec<u64> = Vec::new();
        let mut misses = 0;
        for &page in pages {
            match memory.iter().position(|&other| other == page) {
                Some(depth) => {
                    memory.remove(depth);
                }
                None => misses += 1,
            }
            memory.insert(0, page);
            memory.truncate(size);
        }
        misses
    }
}

/// [AET] by its definition, except for the beginning of the stream: steps along the time axis until the area is `size`.
/// The area is that under the share, among references with `time` others before them, not used within `time`.
pub(crate) fn aet_miss_ratio(pages: &[u64], size: u64) -> f64 {
    let reuse_times: Vec<Option<usize>> = (0..pages.len())
        .map(|now| {
            let before = pages[..now].iter().rposition(|&page| page == pages[now]);
            before.map(|before| now - before)
        })
        .collect();
    let longer = |from: usize, time: usize| {
        let longer = reuse_times[from..]
            .iter()
            .filter(|&&t| t.is_none_or(|t| t > time));
        longer.count() as f64
    };
    let mut area = 0.0;
    for time in 0..=pages.len() {
        if time < pages.len() {
            area += longer(time, time) / (pages.len() - time) as f64;
        }
        // The share is constant from `time` to `time + 1`: is the area reached before its end?
        if area * (1.0 - 1e-10) > size as f64 || time == pages.len() {
            return longer(0, time) / pages.len() as f64;
        }
    }
    unreachable!("the last time returns")
}

/// The product-limit estimate at `value`, from pairs (value, whether censored).
pub(crate) fn product_limit(observations: &[(u64, bool)], value: u64) -> f64 {
    let mut share = 1.0;
    for at in 0..=value {
        let events = observations.iter().filter(|&&o| o == (at, false)).count();
        let at_risk = observations.iter().filter(|&&(v, _)| v >= at).count();
        if events > 0 {
            share *= 1.0 - events as f64 / at_risk as f64;
        }
    }
    share
}

/// [Wires14] by its definition, with sets as counters: one begins every `interval` references, none is ever
/// removed. Returns the minimum and maximum number of misses of an LRU memory of `size` pages that are consistent with
/// the counts at the intervals' borders.
pub(crate) fn counter_stack_misses(pages: &[u64], interval: usize, size: usize) -> (usize, usize) {
    let distinct = |pages: &[u64]| pages.iter().collect::<BTreeSet<_>>().len();
    let (mut fewest, mut most) = (0, 0);
    for from in (0..pages.len()).step_by(interval) {
        let until = pages.len().min(from + interval);
        let counters = (0..=from).step_by(interval).map(|start| {
            let before = distinct(&pages[start..from]);
            let after = distinct(&pages[start..until]);
            (before, after)
        });
        let counters: Vec<_> = counters.collect();
        // References that the stream's first counter counted as new miss everywhere.
        let cold = counters[0].1 - counters[0].0;
        let missed = counters.iter().filter(|&&(before, _)| before >= size);
        fewest += missed.map(|(b, a)| a - b).max().unwrap_or(0).max(cold);
        let missed = counters.iter().filter(|&&(_, after)| after <= size);
        most += missed.map(|(b, a)| a - b).min().unwrap_or(until - from);
    }
    (fewest, most)
}

/// Sum of the distinct pages in every window of `window` references, and the number of windows.
pub(crate) fn window_pages(pages: &[u64], window: usize) -> (usize, usize) {
    let windows = pages.len() + 1 - window;
    let distinct = |start: usize| {
        let window = &pages[start..start + window];
        window.iter().collect::<BTreeSet<_>>().len()
    };
    ((0..windows).map(distinct).sum(), windows)
}
