//! What the guest prints, and the truth at its time.

use std::collections::BTreeMap;
use std::time::Instant;

use plimsoll_flow::PageCount;
use plimsoll_protocol::tracer::TracerLine;
use serde::{Deserialize, Serialize};

use super::truth::{PAGE_BYTES, Truth};

/// An estimate beside the truths at its time.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Estimate {
    /// Since the method began.
    pub seconds: f64,
    pub bytes: f64,
    /// Memory at which 5 % of the visits miss.
    pub needed: f64,
    /// Touched in a second.
    pub touched: f64,
}

impl Estimate {
    pub fn error(self, truth: fn(Self) -> f64) -> f64 {
        (self.bytes / truth(self) - 1.0).abs()
    }
}

/// What one method showed of one program.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Shown {
    pub estimates: Vec<Estimate>,
    /// CPU time over that of the target.
    pub cost: Option<f64>,
    /// Smallest size of which its curve makes a claim.
    pub resolved_bytes: Option<f64>,
    /// Mean absolute error of its misses a second, as a share of those at the smallest size.
    pub curve_error: Option<f64>,
    /// What it said instead.
    pub message: Option<String>,
}

impl Shown {
    /// Whether its curve makes a claim of more than a tenth of what the program touches in a second.
    pub fn resolves_much(&self) -> bool {
        let touched = self.estimates.iter().map(|one| one.touched);
        let most = touched.fold(0.0, f64::max);
        self.resolved_bytes.is_some_and(|first| first < 0.9 * most)
    }
}

/// Of one program and seed: by method.
pub type Judged = BTreeMap<String, Shown>;

/// What is read from the guest's console.
#[derive(Debug)]
pub struct Reader {
    pub truth: Truth,
    pub judged: Judged,
    pub method: Option<String>,
    pub begun: Instant,
    pub costs: Vec<f64>,
    /// The beginning of a line of JSON that was folded.
    pub folded: String,
}

impl Reader {
    pub fn take(&mut self, line: &str, at: Instant) {
        if line.starts_with("begin ") {
            self.folded.clear();
        }
        if line.starts_with('{') || !self.folded.is_empty() {
            self.folded.push_str(line);
            if self.folded.ends_with('}')
                && serde_json::from_str::<serde_json::Value>(&self.folded).is_ok()
            {
                let whole = std::mem::take(&mut self.folded);
                self.take_line(&whole, at);
            }
            return;
        }
        self.take_line(line, at);
    }

    pub fn take_line(&mut self, line: &str, at: Instant) {
        if line.starts_with("plimsoll: round ") {
            self.truth.follow(line);
            return;
        }
        if let Some(method) = line.strip_prefix("begin ") {
            self.judged.entry(method.to_owned()).or_default();
            self.method = Some(method.to_owned());
            self.costs.clear();
            self.truth.since_begun = (0.0, 0.0);
            self.begun = at;
            return;
        }
        let words: Vec<&str> = line.split(' ').collect();
        let method = match words.as_slice() {
            // Of several that are read at the same time.
            ["estimate" | "cost", of, ..] => Some(*of),
            _ => self.method.as_deref(),
        };
        let Some(shown) = method.and_then(|method| self.judged.get_mut(method)) else {
            return;
        };
        let mut estimate = |bytes: f64| {
            shown.estimates.push(Estimate {
                seconds: at.saturating_duration_since(self.begun).as_secs_f64(),
                bytes,
                needed: self.truth.needed(PageCount(0)),
                touched: self.truth.touched(),
            });
        };
        match words.as_slice() {
            ["estimate", _, bytes] => bytes.parse().into_iter().for_each(estimate),
            ["cost", _, own, target, _] => {
                if let (Ok(own), Ok(target)) = (own.parse::<f64>(), target.parse::<f64>()) {
                    shown.cost = Some(own / target);
                }
            }
            _ if line.starts_with('{') => match TracerLine::read(line.as_bytes()) {
                Ok(TracerLine::Period(period)) => {
                    if let Some(pages) = period.working_set_pages {
                        estimate(pages as f64 * PAGE_BYTES);
                    }
                }
                Ok(TracerLine::Final(last)) => {
                    shown.cost = Some(last.overhead_ratio);
                    let curve = last.curve.as_ref().and_then(|curve| curve.to_curve().ok());
                    let first = curve.as_ref().and_then(|curve| curve.points().first());
                    if let (Some(curve), Some(first)) = (&curve, first) {
                        shown.resolved_bytes = Some(first.size.0 as f64 * PAGE_BYTES);
                        shown.curve_error = self.truth.curve_error(curve);
                        let needed = self.truth.needed(first.size);
                        for estimate in &mut shown.estimates {
                            estimate.needed = needed;
                        }
                    }
                }
                Err(error) => shown.message = Some(error.to_string()),
            },
            _ => {
                let fields: Vec<&str> = line.split(',').collect();
                let number = |index: usize| fields.get(index)?.parse::<f64>().ok();
                match (number(0), number(2), number(7)) {
                    (Some(_), Some(pages), Some(cost)) => {
                        estimate(pages * PAGE_BYTES);
                        self.costs.push(cost);
                        let mean = self.costs.iter().sum::<f64>() / self.costs.len() as f64;
                        shown.cost = Some(mean);
                    }
                    _ if line.starts_with("plimsoll") && line.contains("error") => {
                        shown.message = Some(line.to_owned());
                    }
                    _ => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::program::{PROGRAMS, Program};
    use super::*;

    fn reader(program: Program) -> Reader {
        Reader {
            truth: Truth::new(program).unwrap(),
            judged: Judged::new(),
            method: None,
            begun: Instant::now(),
            costs: Vec::new(),
            folded: String::new(),
        }
    }

    #[test]
    fn estimates_are_compared_with_what_the_program_says_at_their_time() {
        let mut reader = reader(PROGRAMS[2]);
        let mib = |mib: u64| (mib << 20) as f64;
        for line in [
            "estimate mglru 1",
            "begin mglru",
            "plimsoll: round index=1 pages=8192 ops=900000 ms=100 total_ops=1 mismatches=0",
            "estimate mglru 33554432",
            "estimate rss 5",
            "estimate mglru nonsense",
            "plimsoll: round index=2 pages=24576 ops=100 ms=100 total_ops=1 mismatches=0",
            "estimate mglru 50331648",
            "cost mglru 0.5 10.0 12.0",
            "begin idle",
            "3,5.000,12288,estimate,0.01,100,0,0.012000,0,300",
            "plimsoll: error: no such thing",
        ] {
            reader.take(line, Instant::now());
        }
        let shown = &reader.judged["mglru"];
        assert_eq!(shown.estimates.len(), 2);
        let [first, second] = shown.estimates[..] else {
            panic!()
        };
        assert_eq!((first.needed, first.touched), (mib(32), mib(32)));
        assert_eq!(first.error(|one| one.needed), 0.0);
        assert_eq!(
            (second.needed, second.touched),
            (mib(96), 1000.0 * PAGE_BYTES)
        );
        assert_eq!(shown.cost, Some(0.05));
        let idle = &reader.judged["idle"];
        assert_eq!((idle.estimates[0].bytes, idle.cost), (mib(48), Some(0.012)));
        assert!(idle.message.as_ref().unwrap().contains("no such thing"));
    }
}
