//! What a program touches: in closed form, or counted in the trace of its references.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use anyhow::Context as _;
use plimsoll_estimator::FilteredLru;
use plimsoll_flow::{MissRatioCurve, PageCount, WorkingSet};
use plimsoll_observe::even_sizes;

use super::program::Made;
use super::script::INTERVAL;
use crate::curves::Law;
use crate::page_log::{FILTER, Misses, SharedFrames};

pub const PAGE_BYTES: f64 = 4096.0;

pub const PAGES_PER_MIB: u64 = 256;

/// The truths of a program.
#[derive(Debug)]
pub enum Truth {
    Made(ClosedForm),
    Real(Counted),
}

/// Truths at the time of an estimate, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Truths {
    /// Touched in a second.
    pub touched: f64,
    /// Memory at which at most [`Truths::allowed`] pages miss in a second.
    pub needed: f64,
    /// Memory at which 5 % of the visits miss that a curve resolves; of methods with a curve.
    pub of_resolved: Option<f64>,
}

impl Truths {
    /// Misses a second that the memory needed may have, as a share of the pages touched in a second.
    pub const ALLOWED: f64 = 0.1;

    /// Misses a second that the memory needed may have: so much memory can be judged by every method, whatever it resolves.
    pub fn allowed(touched: f64) -> f64 {
        touched / PAGE_BYTES * Self::ALLOWED
    }
}

impl Truth {
    /// A method begins.
    pub fn begin(&mut self, method: &str, at: Instant) {
        match self {
            Self::Made(made) => made.since_begun = (0.0, 0.0),
            Self::Real(real) => real.begin(method, at),
        }
    }

    /// Takes a line of what the program touches; false for one of other things.
    pub fn follow(&mut self, line: &str) -> anyhow::Result<bool> {
        match self {
            Self::Made(made) if line.starts_with("plimsoll: round ") => made.follow(line),
            Self::Real(real) if line.starts_with("frames ") => real.follow(line)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Share of the frames of the process that were mapped since the list before the latest; of real programs.
    pub fn new_frames(&self) -> Option<f64> {
        match self {
            Self::Made(_) => None,
            Self::Real(real) => real.new_frames,
        }
    }

    /// When a method estimates, by a curve that begins at a size if it has one.
    pub fn at(&mut self, method: &str, at: Instant, resolved: Option<PageCount>) -> Truths {
        match self {
            Self::Made(made) => {
                let touched = made.touched();
                Truths {
                    touched,
                    needed: made.needed(Truths::allowed(touched)),
                    of_resolved: resolved.map(|from| made.of_resolved(from)),
                }
            }
            Self::Real(real) => real.at(method, at, resolved),
        }
    }

    /// Error of the misses a second of a curve, of the time since the method began, over the sizes that it resolves, as a share of
    /// the misses at the smallest of them; `None` if it resolves none that the program could miss.
    pub fn curve_error(&self, method: &str, curve: &MissRatioCurve, at: Instant) -> Option<f64> {
        match self {
            Self::Made(made) => made.curve_error(curve),
            Self::Real(real) => real.curve_error(method, curve, at),
        }
    }
}

/// Mean distance of the misses a second of a curve from the true ones, up to a size at which nothing misses.
fn error_of(
    curve: &MissRatioCurve,
    end: PageCount,
    misses: impl Fn(PageCount) -> f64,
) -> Option<f64> {
    let from = curve.points().first()?.size;
    let most = misses(from);
    // Neither is one without a round.
    if from >= end || most.is_nan() || most <= 0.0 {
        return None;
    }
    let errors = even_sizes(from, end).map(|size| {
        let estimated = curve.misses_per_second(size)?.expected;
        Some((estimated - misses(size)).abs() / most)
    });
    let errors = errors.collect::<Option<Vec<f64>>>()?;
    Some(errors.iter().sum::<f64>() / errors.len() as f64)
}

/// References counted by the plugin, to the frames of the process.
#[derive(Debug)]
pub struct Counted {
    frames: SharedFrames,
    /// Frames of the guest's memory.
    memory: PageCount,
    /// A list that the guest is printing.
    listed: Vec<Range<u64>>,
    /// Lists until now.
    lists: u32,
    /// By method: when it began, with the counts of then.
    begun: BTreeMap<String, (Instant, FilteredLru)>,
    /// By method: its last estimate, with the counts of then.
    last: BTreeMap<String, (Instant, FilteredLru)>,
    /// Share of the frames of the latest list that were not in the one before.
    new_frames: Option<f64>,
}

impl Counted {
    pub fn new(frames: SharedFrames, memory: PageCount) -> Self {
        Self {
            frames,
            memory,
            listed: Vec::new(),
            lists: 0,
            begun: BTreeMap::new(),
            last: BTreeMap::new(),
            new_frames: None,
        }
    }

    /// Takes a line `frames START+COUNT ...`, in hexadecimal digits, or `frames end`, after which the frames named are those of the
    /// process.
    fn follow(&mut self, line: &str) -> anyhow::Result<()> {
        for word in line.split(' ').skip(1) {
            if word == "end" {
                let listed = std::mem::take(&mut self.listed);
                let all: u64 = listed.iter().map(|range| range.end - range.start).sum();
                let new = self.frames.lock().choose(&listed);
                self.lists += 1;
                let is_first = self.lists == 1;
                self.new_frames = (all > 0 && !is_first).then(|| new.0 as f64 / all as f64);
                return Ok(());
            }
            let range = || {
                let (start, count) = word.split_once('+')?;
                let start = u64::from_str_radix(start, 16).ok()?;
                let end = start.checked_add(u64::from_str_radix(count, 16).ok()?)?;
                (end <= self.memory.0).then_some(start..end)
            };
            let range =
                range().with_context(|| format!("'{word}' names no frames of the guest"))?;
            self.listed.push(range);
        }
        Ok(())
    }

    fn begin(&mut self, method: &str, at: Instant) {
        let now = self.frames.lock().now();
        self.last.insert(method.to_owned(), (at, now.clone()));
        self.begun.insert(method.to_owned(), (at, now));
    }

    fn at(&mut self, method: &str, at: Instant, resolved: Option<PageCount>) -> Truths {
        let (after, touched) = {
            let frames = self.frames.lock();
            let since = at.checked_sub(INTERVAL).unwrap_or(at);
            (frames.now(), frames.touched_since(since))
        };
        let last = self.last.insert(method.to_owned(), (at, after.clone()));
        let (begun, before) = last.unwrap_or_else(|| (at, after.clone()));
        let seconds = at.saturating_duration_since(begun).as_secs_f64();
        let stretch = Misses { before, after };
        let bytes = |size: PageCount| size.0 as f64 * PAGE_BYTES;
        let touched = bytes(touched);
        let allowed = Truths::allowed(touched) * seconds;
        let needed = match stretch.at(FILTER) as f64 > allowed {
            true => stretch.size_for(allowed, FILTER),
            false => Some(FILTER),
        };
        let of_resolved = resolved.map(|from| {
            let from = from.max(FILTER);
            match stretch.at(from) {
                0 => from,
                _ => stretch
                    .working_set(from)
                    .unwrap_or(stretch.after.distinct()),
            }
        });
        Truths {
            touched,
            needed: bytes(needed.unwrap_or(stretch.after.distinct())),
            of_resolved: of_resolved.map(bytes),
        }
    }

    fn curve_error(&self, method: &str, curve: &MissRatioCurve, at: Instant) -> Option<f64> {
        let (begun, before) = self.begun.get(method)?;
        let seconds = at.saturating_duration_since(*begun).as_secs_f64();
        let frames = self.frames.lock();
        let misses = Misses {
            before: before.clone(),
            after: frames.now(),
        };
        let end = frames.count();
        drop(frames);
        error_of(curve, end, |size| {
            misses.at(size.max(FILTER)) as f64 / seconds
        })
    }
}

/// The truths of a made program at a time.
#[derive(Debug, Clone)]
pub struct ClosedForm {
    pub program: Made,
    /// Pages that it uses now.
    pub pages: u64,
    /// Visits a second, of the last round.
    pub rate: f64,
    /// Visits, and the seconds that they took, of all rounds since the method began.
    pub since_begun: (f64, f64),
    pub curve: Option<MissRatioCurve>,
}

impl ClosedForm {
    pub fn new(program: Made) -> anyhow::Result<Self> {
        let pages = program.mib * PAGES_PER_MIB;
        let curve = program.law.map(|law| law.lru_curve(PageCount(pages)));
        Ok(Self {
            program,
            pages,
            rate: 0.0,
            since_begun: (0.0, 0.0),
            curve: curve.transpose()?,
        })
    }

    /// Bytes at which so many visits a second miss.
    pub fn needed(&self, allowed: f64) -> f64 {
        self.at_ratio(allowed / self.rate)
    }

    /// Bytes at which 5 % of the visits miss that miss at `from`.
    pub fn of_resolved(&self, from: PageCount) -> f64 {
        let of_curve = self.curve.as_ref();
        let resolved = of_curve.map_or(1.0, |curve| curve.miss_ratio(from));
        self.at_ratio(resolved * WorkingSet::MISS_RATIO)
    }

    /// Bytes at which this share of the visits misses.
    fn at_ratio(&self, ratio: f64) -> f64 {
        let of_curve = self.curve.as_ref();
        let size = of_curve.and_then(|curve| curve.size_for(ratio));
        size.map_or(self.pages, |size| size.0) as f64 * PAGE_BYTES
    }

    /// Bytes touched in a second.
    pub fn touched(&self) -> f64 {
        let count = self.pages as f64;
        let pages = match self.program.law {
            None => count.min(self.rate),
            Some(law) => {
                let alpha = match law {
                    Law::Uniform => 0.0,
                    Law::Zipf(alpha) => alpha,
                };
                let weights = (1..=self.pages).map(|rank| (rank as f64).powf(-alpha));
                let sum: f64 = weights.clone().sum();
                let missed = weights.map(|weight| (-weight / sum * self.rate).exp());
                count - missed.sum::<f64>()
            }
        };
        pages * PAGE_BYTES
    }

    /// Takes a line that the program printed.
    pub fn follow(&mut self, line: &str) {
        let value = |key: &str| {
            let mut words = line.split(' ');
            words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        };
        let number = |key: &str| value(key)?.parse::<f64>().ok();
        let pages = value("pages").and_then(|pages| pages.parse().ok());
        if let (Some(pages), Some(ops), Some(ms)) = (pages, number("ops"), number("ms"))
            && ms > 0.0
        {
            if self.program.is_changing {
                self.pages = pages;
            }
            self.rate = ops / ms * 1e3;
            self.since_begun.0 += ops;
            self.since_begun.1 += ms / 1e3;
        }
    }

    fn curve_error(&self, curve: &MissRatioCurve) -> Option<f64> {
        let end = PageCount(self.pages);
        let (visits, seconds) = self.since_begun;
        error_of(curve, end, |size| {
            visits / seconds
                * match &self.curve {
                    Some(truth) => truth.miss_ratio(size),
                    None => f64::from(u8::from(size < end)),
                }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use plimsoll_flow::{CurvePoint, PageNumber};
    use plimsoll_pagelog::record::Record;

    use super::super::program::{Kind, MADE};
    use super::*;

    #[test]
    fn pages_touched_in_a_second_follow_from_the_rate() {
        let Kind::Made(program) = MADE[3].kind else {
            panic!()
        };
        let mut truth = ClosedForm::new(program).unwrap();
        let pages = truth.pages as f64;
        truth.rate = pages;
        let share = truth.touched() / PAGE_BYTES / pages;
        assert!((share - (1.0 - (-1.0_f64).exp())).abs() < 1e-9, "{share}");
        // 5 % of the visits miss 95 % of the pages.
        let of_resolved = |from: u64| truth.of_resolved(PageCount(from)) / PAGE_BYTES / pages;
        assert!((of_resolved(0) - 0.95).abs() < 0.001);
        // Of the half that misses half of the memory.
        // As far as points of the curve are apart.
        assert!((of_resolved(truth.pages / 2) - 0.975).abs() < 0.002);
        // Each page is visited once a second in the mean.
        let needed = truth.needed(pages / 4.0) / PAGE_BYTES / pages;
        assert!((needed - 0.75).abs() < 0.002, "{needed}");
    }

    /// A loop over frames behind a filter of one page.
    fn pass(frames: &SharedFrames, over: Range<u64>, rounds: usize, at: Instant) {
        let mut records = Vec::new();
        for frame in over.map(PageNumber) {
            records.push(Record::Enter {
                vcpu: 0,
                frame,
                write: false,
            });
            records.push(Record::Leave { vcpu: 0, frame });
        }
        frames.lock().take(&records.repeat(rounds), at);
    }

    #[test]
    fn counted_truths_are_of_the_frames_named_and_the_time_since_the_last_estimate() {
        let bytes = |pages: u64| pages as f64 * PAGE_BYTES;
        let frames = SharedFrames::default();
        let mut truth = Truth::Real(Counted::new(frames.clone(), PageCount(0x1000)));
        let start = Instant::now();
        let second = |count: u64| start + Duration::from_secs(count);
        for line in ["frames 100+80 200+100", "frames 400+10", "frames end"] {
            assert!(truth.follow(line).unwrap(), "{line}");
        }
        assert_eq!(frames.lock().count(), PageCount(0x190));
        assert!(!truth.follow("estimate rss 5").unwrap());
        truth.begin("mglru", second(0));
        pass(&frames, 0..0x1000, 2, second(1));
        let first = truth.at("mglru", second(1), Some(PageCount(0x100)));
        assert_eq!((first.needed, first.touched), (bytes(0x190), bytes(0x190)));
        assert_eq!(first.of_resolved, Some(bytes(0x190)));
        // In a loop of 20 rounds over a part, the first round misses all sizes up to those of the pages since.
        pass(&frames, 0x200..0x280, 20, second(3));
        let part = truth.at("mglru", second(3), Some(PageCount(0x100)));
        assert_eq!(part.touched, bytes(0x80));
        // Its pages were last used before 0x110 others.
        assert_eq!(part.of_resolved, Some(bytes(0x110)));
        // In 2 s 0x80 misses are more than a tenth of the pages a second.
        assert_eq!(part.needed, bytes(0x110));
        // Two rounds over all, and the first over the part, in 4 s.
        let at_first = f64::from(2 * 0x190 + 0x80);
        let two_rounds = f64::from(2 * 0x190) / at_first;
        let ratios = [
            (0x100, 1.0),
            (0x10f, 1.0),
            (0x110, two_rounds),
            (0x18f, two_rounds),
            (0x190, 0.0),
        ];
        let points = ratios.map(|(size, ratio)| CurvePoint::exact(PageCount(size), ratio));
        let curve = MissRatioCurve::new(points.to_vec(), 1000).unwrap();
        let error = |rate| {
            let curve = curve.clone().with_references_per_second(rate);
            truth.curve_error("mglru", &curve, second(4)).unwrap()
        };
        assert!(error(at_first / 4.0) < 1e-9);
        let twice = error(at_first / 2.0);
        assert!((two_rounds..1.0).contains(&twice), "{twice}");
        // Without a number of visits a second a curve says nothing of misses.
        assert_eq!(truth.curve_error("mglru", &curve, second(4)), None);
        // In 40 s they are not, and the loop's own misses need its pages.
        pass(&frames, 0x200..0x280, 20, second(43));
        pass(&frames, 0x100..0x180, 1, second(43));
        let slow = truth.at("mglru", second(43), None);
        assert_eq!((slow.needed, slow.of_resolved), (bytes(0x80), None));
    }

    #[test]
    fn lists_of_frames_that_are_malformed_or_outside_of_the_memory_are_errors() {
        let mut truth = Truth::Real(Counted::new(SharedFrames::default(), PageCount(100)));
        for words in ["x", "1", "1+x", "64+1", "0+65", "ffffffffffffffff+1"] {
            assert!(truth.follow(&format!("frames {words}")).is_err(), "{words}");
        }
        assert!(truth.follow("frames 0+64 ").is_err());
        assert!(truth.follow("frames 0+64").unwrap());
    }

    #[test]
    fn frames_mapped_since_the_list_before_are_a_share_of_the_latest() {
        let mut counted = Counted::new(SharedFrames::default(), PageCount(100));
        counted.follow("frames 0+8").unwrap();
        counted.follow("frames end").unwrap();
        assert_eq!(counted.new_frames, None);
        counted.follow("frames 4+8").unwrap();
        counted.follow("frames end").unwrap();
        assert_eq!(counted.new_frames, Some(0.5));
    }
}
