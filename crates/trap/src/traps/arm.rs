//! Making the sample inaccessible, page by page as they leave the hot set, and accessible again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_flow::PageNumber;

use super::Tracer;
use crate::backend::Sink;
use crate::barrier::{PageBarrier, RANGES_MAX};
use crate::error::TrapError;
use crate::process::cpu_time;
use crate::ram::PageRange;

/// Pages made inaccessible, or accessible, before waiting accesses are served again.
pub(super) const CHUNK_PAGES: u64 = 512;
/// Factor by which making a page inaccessible takes longer if the vCPU is on another CPU than this thread, at least.
const SLOW: u32 = 2;

impl<B: PageBarrier> Tracer<B> {
    /// Phase 2: makes the sampled pages inaccessible, some of them if `stop` becomes true; serves accesses that trap
    /// meanwhile.
    pub(super) fn arm(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<(), TrapError> {
        let watched = std::mem::take(&mut self.watched);
        let armed = self.arm_runs(&watched, stop, sink);
        self.watched = watched;
        self.counts.losses.stayed_accessible = armed?;
        Ok(())
    }

    fn arm_runs(
        &mut self,
        runs: &[PageRange],
        stop: &AtomicBool,
        sink: Sink<'_>,
    ) -> Result<u64, TrapError> {
        let tried = self.accessible_of(runs, stop, sink)?.len() as u64;
        self.raise_all(runs, stop, sink)?;
        // A page in use by the kernel at that time stays accessible: once more for those.
        let missed = self.missed_of(runs, stop, sink)?;
        self.raise_all(&missed, stop, sink)?;
        let escaped = self.missed_of(&missed, stop, sink)?;
        for page in escaped.iter().cloned().flatten() {
            self.raised.set(page, false);
        }
        let stayed = escaped.len() as u64;
        self.session.unmapping.record(tried, stayed)?;
        Ok(stayed)
    }

    fn raise_all(
        &mut self,
        runs: &[PageRange],
        stop: &AtomicBool,
        sink: Sink<'_>,
    ) -> Result<(), TrapError> {
        for chunk in chunks(runs) {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            self.raise(&chunk)?;
            self.serve(Duration::ZERO, sink)?;
        }
        Ok(())
    }

    fn raise(&mut self, runs: &[PageRange]) -> Result<(), TrapError> {
        let start = cpu_time();
        self.session.raise(runs)?;
        for page in runs.iter().cloned().flatten() {
            self.counts.rearmed_pages += u64::from(self.raised.set(page, true));
        }
        self.counts.arm_time += cpu_time().saturating_sub(start);
        Ok(())
    }

    /// Lists the pages of `runs` that should be inaccessible and are not.
    fn missed_of(
        &mut self,
        runs: &[PageRange],
        stop: &AtomicBool,
        sink: Sink<'_>,
    ) -> Result<Vec<PageRange>, TrapError> {
        let mut missed = self.accessible_of(runs, stop, sink)?;
        missed.retain(|page| self.raised.get(page.start));
        Ok(missed)
    }

    /// Lists the pages of `runs` that are accessible, each as a run of its own.
    fn accessible_of(
        &mut self,
        runs: &[PageRange],
        stop: &AtomicBool,
        sink: Sink<'_>,
    ) -> Result<Vec<PageRange>, TrapError> {
        let mut accessible = Vec::new();
        for chunk in chunks(runs) {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            self.find_accessible(&chunk, &mut accessible)?;
            self.serve(Duration::ZERO, sink)?;
        }
        Ok(accessible)
    }

    fn find_accessible(
        &mut self,
        runs: &[PageRange],
        accessible: &mut Vec<PageRange>,
    ) -> Result<(), TrapError> {
        let start = cpu_time();
        for run in runs {
            for range in self.session.layout.addresses(run) {
                let Some(PageNumber(first)) = self.session.layout.page_at(range.start) else {
                    continue;
                };
                self.session
                    .barrier
                    .for_each_down(range, &mut |index| {
                        let page = first + index;
                        accessible.push(page..page + 1);
                    })
                    .map_err(self.session.process.failed("reading pagemap"))?;
            }
        }
        self.counts.arm_time += cpu_time().saturating_sub(start);
        Ok(())
    }

    /// Makes the page that leaves the hot set inaccessible.
    pub(super) fn rearm_head(&mut self, head: u64) -> Result<(), TrapError> {
        let start = Instant::now();
        self.counts.rearmed_pages += 1;
        // A page in use by the kernel at that time stays accessible: once more, then later.
        if !self.try_rearm(head)? && !self.try_rearm(head)? {
            self.counts.losses.left_hot_set_accessible += 1;
            self.stuck.push(head);
        }
        let took = start.elapsed();
        if took > self.rearming * SLOW {
            self.session.suspect_other_cpu();
        }
        // Follows a fast one at once, slow ones by and by.
        self.rearming = took.min(self.rearming + self.rearming / 64 + Duration::from_nanos(10));
        Ok(())
    }

    /// Retries pages that could not be made inaccessible when they left the hot set: [`RANGES_MAX`] of them, because
    /// accesses wait meanwhile.
    pub(super) fn rearm_stuck(&mut self) -> Result<(), TrapError> {
        let start = cpu_time();
        let chunk = self.stuck.len().min(RANGES_MAX);
        let mut tried = self.stuck.drain(..chunk).collect::<Vec<_>>().into_iter();
        let mut failed = Ok(());
        for page in tried.by_ref() {
            match self.try_rearm(page) {
                Ok(true) => {}
                Ok(false) => self.stuck.push(page),
                Err(error) => {
                    self.stuck.push(page);
                    failed = Err(error);
                    break;
                }
            }
        }
        self.stuck.extend(tried);
        self.counts.arm_time += cpu_time().saturating_sub(start);
        failed
    }

    /// Makes a page inaccessible; returns whether it is.
    fn try_rearm(&mut self, page: u64) -> Result<bool, TrapError> {
        let run = page..page + 1;
        self.session.raise(std::slice::from_ref(&run))?;
        let mut accessible = false;
        for range in self.session.layout.addresses(&run) {
            self.session
                .barrier
                .for_each_down(range, &mut |_| accessible = true)
                .map_err(self.session.process.failed("reading pagemap"))?;
        }
        self.raised.set(page, !accessible);
        Ok(!accessible)
    }

    /// Makes the window's pages accessible again.
    pub(super) fn disarm(&mut self, sink: Sink<'_>) -> Result<(), TrapError> {
        let watched = std::mem::take(&mut self.watched);
        let pieces = chunks(&watched);
        self.watched = watched;
        for piece in pieces {
            let start = cpu_time();
            let still = piece.into_iter().flatten();
            let still = still.filter(|&page| self.raised.get(page));
            let still: Vec<PageRange> = still.map(|page| page..page + 1).collect();
            for run in join_neighbours(&still) {
                for range in self.session.layout.addresses(&run) {
                    self.session
                        .barrier
                        .lower(&self.userfault, range)
                        .map_err(self.session.process.failed("making pages accessible again"))?;
                }
            }
            self.counts.arm_time += cpu_time().saturating_sub(start);
            self.serve(Duration::ZERO, sink)?;
        }
        Ok(())
    }
}

/// Cuts runs into lists of at most [`CHUNK_PAGES`] pages and [`RANGES_MAX`] runs.
pub(super) fn chunks(runs: &[PageRange]) -> Vec<Vec<PageRange>> {
    let mut chunks = vec![Vec::new()];
    let mut pages = 0;
    for run in runs {
        let mut rest = run.clone();
        while !rest.is_empty() {
            if pages == CHUNK_PAGES || chunks.last().is_some_and(|chunk| chunk.len() == RANGES_MAX)
            {
                chunks.push(Vec::new());
                pages = 0;
            }
            let cut = rest.end.min(rest.start + CHUNK_PAGES - pages);
            pages += cut - rest.start;
            if let Some(chunk) = chunks.last_mut() {
                chunk.push(rest.start..cut);
            }
            rest.start = cut;
        }
    }
    chunks
}

/// Joins runs that follow each other without a gap.
pub(super) fn join_neighbours(runs: &[PageRange]) -> Vec<PageRange> {
    let mut joined: Vec<PageRange> = Vec::new();
    for run in runs {
        match joined.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => joined.push(run.clone()),
        }
    }
    joined
}
