//! The page cache of a control group: every use of sampled pages, in order, as BPF programs in the kernel see it.
//!
//! ```text
//!   a use of any page on the host ─> program: one of the sampled pages? of the group? ─> ring ─> references
//! ```
//!
//! The sample is spatial, as in \[Waldspurger15\] §3: a page is in it if a hash of its file and its place there is, so that every use of it is
//! observed, and nothing is marked, unmapped or checked. The stream goes on from period to period, which resolves reuses of minutes and
//! hours: only where the budget ends the observation before the period does is there a gap.
//!
//! **Uses** are what the kernel marks as such: `folio_mark_accessed`, which a read by a system call runs for each page, and the first
//! write to a page since it was written to its file (`writeback_dirty_folio`). **Units** are folios: of a large folio, which comes and goes
//! as one, all pages are used when one is.
//!
//! **Count.** Of all uses of the group one in 16, drawn at random, is counted: the sample has too many or too few references where it has
//! by chance a hot page or lacks it, which the estimator corrects.
//!
//! **Rate.** The first sample is as dense as it must be for [`SAMPLED`] of the pages now in the cache to be in it. The rate falls when
//! reading the ring takes more than half of the budget, or when the cache has grown, and never rises. Another rate is another sample, of
//! which everything is learnt anew.
//!
//! Cost: every use on the host, of whatever group, runs a program, whose time the kernel measures: 0.4 µs under emulation; a use of a
//! sampled page of the group takes the tracer and its estimator 6 µs there.
//! Not here: curves. Not seen: uses through mappings of files; further writes to a page until it is written to its file, during
//! which it cannot be evicted; anonymous memory and tmpfs; pages of groups that were removed before, which stay charged to those.
//!
//! Source: \[Waldspurger15\] §3 for the sample; Linux, mm/swap.c and mm/filemap.c, for what a use is.

mod programs;

use std::collections::HashSet;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::{
    AccessKind, PageCount, PageNumber, Period, PeriodLosses, ReferenceBatch, ScanCounts,
    TraceMethod,
};

use crate::backend::{Backend, BackendRow, GroupSupport, Observation, Sink, Yield};
use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::process::{cpu_time, overhead_ratio, rest_until};
use crate::ram::PAGE_BYTES;
use crate::rate::{RateRule, SCALE_MAX};
use crate::refusal::Refusal;
use crate::requirement::Requirement::ControlGroup;
use crate::target::GroupTarget;
use crate::trial::{TouchCost, Toucher};

use programs::{COUNTED_BITS, Programs, RING_USES};

/// Sampled pages that should be in the cache, and the most before the rate falls.
const SAMPLED: u64 = 8192;
const SAMPLED_MAX: u64 = 32_768;
/// One page in so many, at most, at first: what a use costs is not known then.
const SCALE_FIRST: u32 = 4;
/// Uses that are passed on at once.
const CHUNK: usize = 1024;
/// Time from the beginning of a period to the first reading of the ring, and the longest from one to the next, for which its 4 MiB
/// have room for 2.6 million uses a second. In between it doubles, so that no more is spent unseen than was before.
const INTERVALS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(100)];
/// Fewest counted uses from which those of all pages are estimated: within 3 %.
const COUNTED_MIN: u64 = 1000;
/// More uses lost than this between two readings interrupt the stream: 1 % of what the ring holds.
const LOST_MAX: u64 = RING_USES / 100;
/// Share of the budget that reading the ring may take.
const READING_SHARE: f64 = 0.5;

/// The backend `page-cache`.
pub const ROW: BackendRow = BackendRow {
    method: TraceMethod::PageCache,
    sees: "Page cache: every use of sampled pages of a control group's page cache, in order, by BPF programs in the kernel",
    needs: "Linux 6.1 with BPF, fentry and CONFIG_DEBUG_INFO_BTF; root; a control group",
    costs: "a BPF program at every use of the page cache on the host, whose time the kernel measures, and the tracer's own time, within the time budget",
    loses: "anonymous memory; uses through mappings of files; all writes of a page but the first until it is written to its file",
    yields: Yield::Stream,
    sees_reads: true,
    options: &[],
    rate_rules: &[RateRule::Fixed, RateRule::Budget],
    requirements: |_| &[ControlGroup],
    trial: |_| {
        // A use is not delayed by a fault, and what the programs take is measured while they run.
        check()?;
        Ok(Duration::ZERO)
    },
    curve_cost: None,
    attach: |target, _| Err(Refusal::NoControlGroup { pid: target.pid }.into()),
    any_process: true,
    group: Some(GroupSupport {
        check: |_| check(),
        attach: |group, config| Ok(Box::new(PageCache::new(group, config)?)),
    }),
};

/// Refuses a kernel in which the programs cannot run, and a caller who may not let them.
fn check() -> Result<(), Refusal> {
    let mut programs = Programs::load(SCALE_MAX, 0)?;
    let attached = programs.attach();
    attached.map_err(|source| Refusal::NoPageCacheTracing { source })
}

/// A control group whose page cache is observed.
#[derive(Debug)]
struct PageCache {
    /// As it is to be observed from the next period on.
    wanted: GroupTarget,
    /// As it is observed.
    group: GroupTarget,
    programs: Programs,
    config: TraceConfig,
    scale: u32,
    batch: ReferenceBatch,
    /// Whether what is observed next continues what was observed before.
    follows: bool,
    distinct: HashSet<PageNumber>,
    /// At the end of the last period, if the programs run on.
    last: Option<Counts>,
    /// Uses that had found the ring full when it was read last.
    lost: u64,
    periods: u64,
}

/// What the programs had counted and taken at a time.
#[derive(Debug, Clone, Copy)]
struct Counts {
    at: Instant,
    uses: u64,
    lost: u64,
    run_time: Duration,
}

/// The beginning of a period.
#[derive(Debug, Clone, Copy)]
struct Began {
    /// CPU time of the tracer.
    cpu: Duration,
    counts: Counts,
    end: Instant,
}

/// What a period has taken so far.
#[derive(Debug, Clone, Copy, Default)]
struct Spent {
    programs: Duration,
    /// By the tracer.
    reading: Duration,
}

impl Spent {
    fn all(self) -> Duration {
        self.programs + self.reading
    }
}

/// What was found in the ring.
#[derive(Debug, Default)]
struct Reading {
    uses: u64,
    /// Uses that were not passed on.
    skipped: u64,
    /// CPU time of passing them on.
    cost: Duration,
    spent: Spent,
    /// If the budget is spent: what was counted until what came was dropped. The programs do not run any more.
    over: Option<Counts>,
}

/// What share `some` are of themselves and `others`.
fn share(some: u64, others: u64) -> f64 {
    let all = some + others;
    if all == 0 {
        1.0
    } else {
        some as f64 / all as f64
    }
}

/// One page in how many is sampled at first, where `pages` are in the cache.
fn first_scale(config: &TraceConfig, pages: u64) -> u32 {
    if config.rate_rule == RateRule::Fixed {
        return config.scale.next_power_of_two();
    }
    let scale = u32::try_from(pages / SAMPLED).unwrap_or(SCALE_MAX);
    scale.clamp(SCALE_FIRST, SCALE_MAX).next_power_of_two()
}

/// One page in how many is sampled after a period.
fn next_scale(scale: u32, config: &TraceConfig, reading: Duration, pages: u64) -> u32 {
    if config.rate_rule == RateRule::Fixed {
        return scale;
    }
    let budget = config
        .period_budget(1)
        .map(|budget| budget.as_secs_f64() * READING_SHARE);
    let over = budget.map_or(0.0, |budget| reading.as_secs_f64() / budget);
    let grown = pages as f64 / f64::from(scale) / SAMPLED_MAX as f64;
    let mut next = scale;
    let mut excess = over.max(grown);
    while excess > 1.0 && next < SCALE_MAX {
        next *= 2;
        excess /= 2.0;
    }
    next
}

impl PageCache {
    fn new(group: &GroupTarget, config: &TraceConfig) -> Result<Self, TrapError> {
        let scale = first_scale(config, cached_pages(group)?);
        let mut cache = Self {
            wanted: group.clone(),
            group: group.clone(),
            programs: Programs::load(scale, config.seed)?,
            config: config.clone(),
            scale,
            batch: ReferenceBatch::new(),
            follows: false,
            distinct: HashSet::new(),
            last: None,
            lost: 0,
            periods: 0,
        };
        let followed = cache.programs.follow(&group.inodes);
        followed.map_err(|error| failed(group, error))?;
        Ok(cache)
    }

    /// Samples one page in `scale` from now on.
    fn rescale(&mut self, scale: u32) -> Result<(), TrapError> {
        if scale != self.scale {
            let mut programs = Programs::load(scale, self.config.seed)?;
            let followed = programs.follow(&self.group.inodes);
            followed.map_err(|error| self.failed(error))?;
            (self.programs, self.scale) = (programs, scale);
            (self.follows, self.last, self.lost) = (false, None, 0);
        }
        Ok(())
    }

    fn counts(&self) -> Result<Counts, TrapError> {
        let counts = || {
            Ok(Counts {
                at: Instant::now(),
                uses: self.programs.uses()?,
                lost: self.programs.lost()?,
                run_time: self.programs.run_time()?,
            })
        };
        counts().map_err(|error| self.failed(error))
    }

    fn spent(&self, began: &Began) -> Result<Spent, TrapError> {
        let run_time = self.programs.run_time();
        let run_time = run_time.map_err(|error| self.failed(error))?;
        Ok(Spent {
            programs: run_time.saturating_sub(began.counts.run_time),
            reading: cpu_time().saturating_sub(began.cpu),
        })
    }

    /// Passes on what was used since the last call, until the ring is empty, the budget is spent or the period has been over for a while.
    fn read(
        &mut self,
        began: &Began,
        stop: &AtomicBool,
        sink: Sink<'_>,
    ) -> Result<Reading, TrapError> {
        let mut reading = Reading::default();
        let (before, entered) = (cpu_time(), Instant::now());
        let grace = INTERVALS[1];
        let budget = self.config.period_budget(1);
        // If uses were lost, the ring was full, and is: they come after what it holds.
        let mut has_gap = self.has_lost()?;
        let is_over = loop {
            self.batch.advance();
            while self.batch.len() < CHUNK
                && let Some(page) = self.programs.next()
            {
                self.distinct.insert(page);
                self.batch.push(page, AccessKind::Unknown);
            }
            if !self.batch.is_empty() {
                sink(&Observation::Stream {
                    references: &self.batch,
                    follows: self.follows,
                });
                self.follows = true;
            }
            reading.uses += self.batch.len() as u64;
            if has_gap && (reading.uses >= RING_USES || self.batch.len() < CHUNK) {
                (self.follows, has_gap) = (false, false);
            }
            reading.spent = self.spent(began)?;
            let is_over = budget.is_some_and(|budget| reading.spent.all() >= budget);
            let is_late = began.end.elapsed() >= grace
                || stop.load(Ordering::Relaxed) && entered.elapsed() >= grace;
            if is_over || is_late || self.batch.len() < CHUNK {
                break is_over;
            }
        };
        self.follows &= !has_gap && !self.has_lost()?;
        if reading.uses > 0 {
            reading.cost = cpu_time().saturating_sub(before);
        }
        if is_over {
            // What is left has been observed as far as it is counted, and what comes until the programs are detached is not.
            reading.skipped = self.drop_uses();
            reading.over = Some(self.counts()?);
            self.programs.detach().map_err(|error| self.failed(error))?;
            self.drop_uses();
            reading.spent = self.spent(began)?;
        }
        Ok(reading)
    }

    /// Drops what is in the ring; returns how many uses that were. Where more come all the time, as many as it holds.
    fn drop_uses(&mut self) -> u64 {
        let mut dropped = 0;
        while dropped < RING_USES && self.programs.next().is_some() {
            dropped += 1;
        }
        dropped
    }

    /// Whether more uses were lost since the last call than a stream can lack.
    fn has_lost(&mut self) -> Result<bool, TrapError> {
        let lost = self
            .programs
            .overflowed()
            .map_err(|error| self.failed(error))?;
        let before = std::mem::replace(&mut self.lost, lost);
        Ok(lost.saturating_sub(before) > LOST_MAX)
    }

    /// The error of a call for the programs.
    fn failed(&self, source: io::Error) -> TrapError {
        failed(&self.group, source)
    }
}

impl Backend for PageCache {
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError> {
        let cpu = cpu_time();
        let populated_pages = cached_pages(&self.group)?;
        self.distinct.clear();
        let followed = self.programs.follow(&self.wanted.inodes);
        followed.map_err(|error| self.failed(error))?;
        self.group = self.wanted.clone();
        let attached = self.programs.attach();
        attached.map_err(|error| self.failed(error))?;
        // What was used since the last period, while curves were computed, belongs to this one.
        let counts = match self.last.take() {
            Some(last) => last,
            None => {
                // What came before both programs ran.
                self.drop_uses();
                self.counts()?
            }
        };
        let began = Began {
            cpu,
            counts,
            end: Instant::now() + self.config.period,
        };
        let start = counts.at;
        let (mut readings, mut uses) = (0, 0);
        let (mut window, mut cost) = (Duration::ZERO, Duration::ZERO);
        let [mut interval, interval_max] = INTERVALS;
        let last = loop {
            rest_until(stop, began.end.min(Instant::now() + interval), || false);
            interval = (interval * 2).min(interval_max);
            let reading = self.read(&began, stop, sink)?;
            let until = reading.over.map_or_else(Instant::now, |over| over.at) - start;
            // What was skipped came last.
            window += (until - window).mul_f64(share(reading.uses, reading.skipped));
            uses += reading.uses;
            cost += reading.cost;
            readings += 1;
            let is_over = reading.over.is_some();
            if is_over || Instant::now() >= began.end || stop.load(Ordering::Relaxed) {
                break reading;
            }
        };
        let counts = match last.over {
            Some(over) => over,
            None => self.counts()?,
        };
        let lost = counts.lost.saturating_sub(began.counts.lost);
        let all = counts.uses.saturating_sub(began.counts.uses);
        let window = window.mul_f64(share(uses + last.skipped, lost));
        let is_over = last.over.is_some();
        // What is used from now on is not seen.
        self.follows &= !is_over;
        self.last = (!is_over).then_some(counts);
        rest_until(stop, began.end, || false);
        let length = start.elapsed();
        let scale = self.scale;
        let distinct_pages = self.distinct.len() as u64;
        let period = Period {
            index: self.periods,
            scale,
            populated_pages,
            tracked_pages: populated_pages / u64::from(scale),
            distinct_pages,
            scans: ScanCounts {
                scans: readings,
                interval: interval_max,
                touches: uses,
                touches_of_all: match all >> COUNTED_BITS >= COUNTED_MIN {
                    true => PageCount(all).scaled(share(uses, last.skipped + lost)).0,
                    false => 0,
                },
                ..ScanCounts::default()
            },
            fault_time: last.spent.programs,
            arm_time: last.spent.reading,
            overhead_ratio: overhead_ratio(last.spent.all(), length, 1),
            budget_exhausted: is_over,
            losses: PeriodLosses {
                overflowed: lost,
                ..PeriodLosses::default()
            },
            ..Period::empty(TraceMethod::PageCache, length, window)
        };
        self.periods += 1;
        // In a whole period.
        let cost = cost.mul_f64(length.as_secs_f64() / window.as_secs_f64().max(1e-3));
        let next = next_scale(scale, &self.config, cost, populated_pages);
        // Of which a short window says little.
        let next_max = match window < interval_max {
            true => scale.saturating_mul(4),
            false => SCALE_MAX,
        };
        self.rescale(next.min(next_max))?;
        Ok(period)
    }

    fn detach(mut self: Box<Self>) -> Result<(), TrapError> {
        let detached = self.programs.detach();
        detached.map_err(|error| self.failed(error))
    }

    fn touch_cost(&self) -> TouchCost {
        TouchCost {
            time: Duration::ZERO,
            toucher: Toucher::Thread,
        }
    }

    fn ram_pages(&self) -> u64 {
        cached_pages(&self.group).unwrap_or_default()
    }

    fn follow_group(&mut self, group: &GroupTarget) {
        self.wanted = group.clone();
    }
}

/// Pages of the page cache that are charged to a group with all below it, without shared memory.
fn cached_pages(group: &GroupTarget) -> Result<u64, TrapError> {
    let stat = fs::read_to_string(group.directory.join("memory.stat"));
    let stat = stat.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV) => TrapError::GroupGone {
            directory: group.directory.clone(),
        },
        _ => failed(group, error),
    })?;
    Ok(cached_bytes(&stat) / PAGE_BYTES)
}

/// The same in bytes, by its `memory.stat`: of version 1, or else of version 2.
fn cached_bytes(stat: &str) -> u64 {
    let value = |name: &str| {
        let mut values = stat
            .lines()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        values.next()?.parse::<u64>().ok()
    };
    let without = |all, shared| Some(value(all)?.saturating_sub(value(shared).unwrap_or_default()));
    without("total_cache", "total_shmem")
        .or_else(|| without("file", "shmem"))
        .unwrap_or_default()
}

/// The error of a call for the programs.
fn failed(group: &GroupTarget, source: io::Error) -> TrapError {
    TrapError::GroupCall {
        directory: group.directory.clone(),
        call: "observing the page cache",
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_cache_of_a_group_is_read_in_both_versions() {
        let v2 = "anon 8192\nfile 4194304\nkernel 0\nshmem 1048576\nfile_mapped 4096\n";
        assert_eq!(cached_bytes(v2), 3 << 20);
        let v1 = "cache 4096\nrss 0\nshmem 0\ntotal_cache 2097152\ntotal_rss 0\ntotal_shmem 4096\n";
        assert_eq!(cached_bytes(v1), (2 << 20) - 4096);
        assert_eq!(cached_bytes("nonsense\nfile\nfile x\n"), 0);
    }

    #[test]
    fn the_rate_is_that_of_the_cache_and_falls_with_the_cost_of_reading() {
        let config = TraceConfig::default();
        assert_eq!(first_scale(&config, 0), SCALE_FIRST);
        // 16 GiB.
        assert_eq!(first_scale(&config, 4 << 20), 512);
        assert_eq!(first_scale(&config, u64::MAX), SCALE_MAX);
        let fixed = TraceConfig {
            rate_rule: RateRule::Fixed,
            scale: 100,
            ..TraceConfig::default()
        };
        assert_eq!(first_scale(&fixed, 4 << 20), 128);
        // Half of 1 % of 5 s.
        let next =
            |reading_ms, pages| next_scale(8, &config, Duration::from_millis(reading_ms), pages);
        assert_eq!(next(25, 100_000), 8);
        assert_eq!(next(26, 100_000), 16);
        assert_eq!(next(100, 100_000), 32);
        assert_eq!(next(0, 8 * 32_768 + 8), 16);
        assert_eq!(next(u64::MAX, 0), SCALE_MAX);
        assert_eq!(next_scale(128, &fixed, Duration::MAX, u64::MAX), 128);
    }
}
