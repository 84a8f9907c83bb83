//! Twins of the estimators: straight from the definitions, slow, sharing no code with them.

/// An LRU stack as a list, most recent first.
#[derive(Default)]
pub(crate) struct NaiveStack {
    pages: Vec<u64>,
}

impl NaiveStack {
    /// Moves a page to the front and returns how many were before it.
    pub(crate) fn touch(&mut self, page: u64) -> Option<u64> {
        let depth = self.pages.iter().position(|&other| other == page);
        if let Some(depth) = depth {
            self.pages.remove(depth);
        }
        self.pages.insert(0, page);
        depth.map(|depth| depth as u64)
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

/// [AET] by its definition: walks the time axis until the area under P is `size`.
pub(crate) fn aet_miss_ratio(pages: &[u64], size: u64) -> f64 {
    let reuse_times: Vec<Option<usize>> = (0..pages.len())
        .map(|now| {
            let before = pages[..now].iter().rposition(|&page| page == pages[now]);
            before.map(|before| now - before)
        })
        .collect();
    let longer = |time: usize| {
        let longer = reuse_times.iter().filter(|&&t| t.is_none_or(|t| t > time));
        longer.count() as u64
    };
    // In units of one reference, so that the area is a whole number.
    let wanted = size * pages.len() as u64;
    let mut area = 0;
    for time in 0..=pages.len() {
        // P is flat from `time` to `time + 1`: is the area reached before its end?
        if area + longer(time) > wanted || time == pages.len() {
            return longer(time) as f64 / pages.len() as f64;
        }
        area += longer(time);
    }
    unreachable!("the last time returns")
}

/// The product-limit estimate at `value`, from (value, is it censored) pairs.
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
