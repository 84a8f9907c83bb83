//! What the guest prints, and the truth at its time.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Context as _;
use plimsoll_flow::WorkingSetBound;
use plimsoll_protocol::tracer::{PeriodLine, TracerLine};
use serde::{Deserialize, Serialize};

use super::truth::{PAGE_BYTES, Truth, Truths};

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
    /// Its confidence band; the kernel's interfaces report none.
    #[serde(default)]
    pub band: Option<Band>,
}

/// The band of an estimate in bytes, or what a bound excludes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Band {
    pub bound: WorkingSetBound,
    pub low: f64,
    /// `None` if nothing bounds it.
    pub high: Option<f64>,
}

impl Band {
    fn of(period: &PeriodLine) -> Option<Self> {
        let bytes = |pages: u64| pages as f64 * PAGE_BYTES;
        let size = period.working_set_pages.map(bytes)?;
        let low = period.working_set_low_pages.map(bytes);
        let high = period.working_set_high_pages.map(bytes);
        let bound = period.working_set_bound?;
        let (low, high) = match bound {
            WorkingSetBound::Estimate => (low.unwrap_or(0.0), high),
            WorkingSetBound::AtLeast => (low.unwrap_or(size), None),
            WorkingSetBound::AtMost => (0.0, Some(high.unwrap_or(size))),
        };
        Some(Self { bound, low, high })
    }

    pub fn holds(&self, truth: f64) -> bool {
        self.low <= truth && self.high.is_none_or(|high| truth <= high)
    }
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
    /// Share of the process's frames that were mapped while it watched, and are not in the truth; of real programs.
    pub new_frames: Option<f64>,
    /// What it said instead.
    pub message: Option<String>,
}

impl Shown {
    /// Share of the estimates with a band of which this is true, given the memory needed.
    pub fn share_of_bands(&self, is_so: impl Fn(&Band, f64) -> bool) -> Option<f64> {
        let estimates = self.estimates.iter();
        let each: Vec<bool> = estimates
            .filter_map(|one| Some(is_so(one.band.as_ref()?, one.needed)))
            .collect();
        let count = each.iter().filter(|&&is_so| is_so).count();
        (!each.is_empty()).then(|| count as f64 / each.len() as f64)
    }

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
    /// Methods that began since the process's frames were listed.
    pub since_list: Vec<String>,
}

impl Reader {
    pub fn new(truth: Truth) -> Self {
        Self {
            truth,
            judged: Judged::new(),
            method: None,
            begun: Instant::now(),
            costs: Vec::new(),
            folded: String::new(),
            since_list: Vec::new(),
        }
    }

    /// Takes a line.
    ///
    /// # Errors
    ///
    /// A list of frames that is none; all else that is malformed is not for this reader.
    pub fn take(&mut self, line: &str, at: Instant) -> anyhow::Result<()> {
        if line.starts_with("begin ") {
            self.folded.clear();
        }
        if line.starts_with('{') || !self.folded.is_empty() {
            self.folded.push_str(line);
            if self.folded.ends_with('}')
                && serde_json::from_str::<serde_json::Value>(&self.folded).is_ok()
            {
                let whole = std::mem::take(&mut self.folded);
                return self.take_line(&whole, at);
            }
            return Ok(());
        }
        self.take_line(line, at)
    }

    fn take_line(&mut self, line: &str, at: Instant) -> anyhow::Result<()> {
        if self
            .truth
            .follow(line)
            .with_context(|| format!("'{line}'"))?
        {
            if line == "frames end" {
                let new = self.truth.new_frames();
                for method in self.since_list.drain(..) {
                    self.judged.entry(method).or_default().new_frames = new;
                }
            }
            return Ok(());
        }
        if let Some(method) = line.strip_prefix("begin ") {
            self.judged.entry(method.to_owned()).or_default();
            self.method = Some(method.to_owned());
            self.costs.clear();
            self.since_list.push(method.to_owned());
            self.truth.begin(method, at);
            self.begun = at;
            return Ok(());
        }
        let words: Vec<&str> = line.split(' ').collect();
        let method = match words.as_slice() {
            // Of several that are read at the same time.
            ["estimate" | "cost", of, ..] => Some(*of),
            _ => self.method.as_deref(),
        };
        let shown = method.and_then(|method| Some((method, self.judged.get_mut(method)?)));
        let Some((method, shown)) = shown else {
            return Ok(());
        };
        let mut estimate = |bytes: f64, band| {
            let Truths { needed, touched } = self.truth.at(method, at);
            shown.estimates.push(Estimate {
                seconds: at.saturating_duration_since(self.begun).as_secs_f64(),
                bytes,
                needed,
                touched,
                band,
            });
        };
        match words.as_slice() {
            ["estimate", _, bytes] => bytes
                .parse()
                .into_iter()
                .for_each(|bytes| estimate(bytes, None)),
            ["cost", _, own, target, _] => {
                if let (Ok(own), Ok(target)) = (own.parse::<f64>(), target.parse::<f64>()) {
                    shown.cost = Some(own / target);
                }
            }
            _ if line.starts_with('{') => match TracerLine::read(line.as_bytes()) {
                Ok(TracerLine::Period(period)) => {
                    if let Some(pages) = period.working_set_pages {
                        estimate(pages as f64 * PAGE_BYTES, Band::of(&period));
                    }
                }
                Ok(TracerLine::Final(last)) => {
                    shown.cost = Some(last.overhead_ratio);
                    let curve = last.curve.as_ref().and_then(|curve| curve.to_curve().ok());
                    let first = curve.as_ref().and_then(|curve| curve.points().first());
                    if let (Some(curve), Some(first)) = (&curve, first) {
                        shown.resolved_bytes = Some(first.size.0 as f64 * PAGE_BYTES);
                        shown.curve_error = self.truth.curve_error(method, curve, at);
                        let needed = self.truth.needed_from(first.size, shown.estimates.len());
                        for (estimate, needed) in shown.estimates.iter_mut().zip(needed) {
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
                        estimate(pages * PAGE_BYTES, None);
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
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_flow::PageCount;

    use super::super::program::{Kind, MADE};
    use super::super::truth::{ClosedForm, Counted};
    use super::*;
    use crate::page_log::SharedFrames;

    #[test]
    fn estimates_are_compared_with_what_the_program_says_at_their_time() {
        let Kind::Made(program) = MADE[2].kind else {
            panic!()
        };
        let mut reader = Reader::new(Truth::Made(ClosedForm::new(program).unwrap()));
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
            reader.take(line, Instant::now()).unwrap();
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

    #[test]
    fn a_band_and_a_bound_hold_what_they_do_not_exclude() {
        let shown = |bound, low, high| {
            let band = Band { bound, low, high };
            let estimate = Estimate {
                seconds: 1.0,
                bytes: 10.0,
                needed: 20.0,
                touched: 0.0,
                band: Some(band),
            };
            Shown {
                estimates: vec![estimate],
                ..Shown::default()
            }
        };
        let holds = |shown: Shown| shown.share_of_bands(|band, truth| band.holds(truth));
        let near = shown(WorkingSetBound::Estimate, 9.0, Some(11.0));
        assert_eq!(holds(near), Some(0.0));
        let wide = shown(WorkingSetBound::Estimate, 9.0, Some(21.0));
        assert_eq!(holds(wide), Some(1.0));
        assert_eq!(holds(shown(WorkingSetBound::AtLeast, 9.0, None)), Some(1.0));
        assert_eq!(holds(Shown::default()), None);
    }

    #[test]
    fn frames_that_were_mapped_while_methods_watched_are_counted_for_each_of_them() {
        let counted = Counted::new(SharedFrames::default(), PageCount(100));
        let mut reader = Reader::new(Truth::Real(counted));
        for line in [
            "frames 0+4 5+4",
            "frames end",
            "begin rss",
            "begin cgroup",
            "estimate rss 4096",
            "frames 1+8",
            "frames end",
            "begin idle",
        ] {
            reader.take(line, Instant::now()).unwrap();
        }
        let new = |method: &str| reader.judged[method].new_frames;
        assert_eq!(
            [new("rss"), new("cgroup"), new("idle")],
            [Some(0.125), Some(0.125), None]
        );
        assert_eq!(reader.judged["rss"].estimates.len(), 1);
        assert!(reader.take("frames 99+9", Instant::now()).is_err());
    }
}
