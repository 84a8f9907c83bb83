//! Which pages are drawn, and what becomes of them: the part of the backend that makes no call itself.
//!
//! A sample is a page and the time at which it was drawn. It ends with the first touch of the page afterwards, which
//! traps or is found afterwards; or untouched, when it is withdrawn ([`AGE_MAX`], [`WAITING_MAX`], traps over the budget) or its page loses its
//! contents. A page that is drawn while an earlier sample of it waits is a sample of its own, which ends with the same
//! touch and costs nothing: leaving it out would make pages that are seldom touched rarer among the samples.
//!
//! Cost: O(log samples) a draw and a touch; memory O(samples), whatever the size of the VM.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

use plimsoll_flow::{
    AccessKind, FirstTouch, PageNumber, PeriodLosses, ReferenceBatch, SampleCounts, Timestamp,
    TrapCounts,
};

use super::pace::{Dice, Pace, Spent};
use crate::error::TrapError;
use crate::sys::usize_of;

/// Age at which a sample is withdrawn, and the number of waiting samples above which the oldest is.
const AGE_MAX: Duration = Duration::from_secs(600);
const WAITING_MAX: usize = 1 << 15;
/// Number of ended samples at which no more are drawn, because nobody collects them.
const ENDED_MAX: usize = 1 << 16;
/// Pages armed, or disarmed, before accesses are served again, which wait meanwhile.
const ARM_PAGES: usize = 8;
const DISARM_PAGES: usize = 64;
/// Pages drawn for a batch, most of which may be empty.
const DRAWS_MAX: u64 = 1000;
/// Time within which every waiting page is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// CPU time for the checks of one page before and after the RAM is free, and the share of the budget that all may take.
const FINDING_SECONDS: f64 = 2e-6;
const FINDING_SHARE: f64 = 0.1;
/// Parts of the RAM of which each has the same number of draws: the sum over them varies less than with free draws.
const STRATA: u64 = 64;

/// A VM as the sampler uses it: the calls to the kernel, or a computed VM.
pub trait SampledVm: fmt::Debug {
    /// Wall time since any start.
    fn now(&self) -> Duration;

    /// CPU time of the VM since any start: the time of samples.
    fn vm_time(&self) -> Duration;

    /// Pages of the VM's RAM.
    fn pages(&self) -> u64;

    /// Pages that have contents.
    fn populated_pages(&mut self) -> Result<u64, TrapError>;

    /// Whether a page has contents.
    fn is_populated(&mut self, page: u64) -> Result<bool, TrapError>;

    /// Makes pages inaccessible, so that the next access to each traps; returns those that stayed accessible.
    fn arm(&mut self, pages: &[u64]) -> Result<Vec<u64>, TrapError>;

    /// The fault-around window of a page: of the pages in it, one fault may map several.
    fn window_of(&self, page: u64) -> u64;

    /// Those of some pages, rising, that are mapped, so that an access to them does not trap.
    fn accessible(&mut self, pages: &[u64]) -> Result<Vec<u64>, TrapError>;

    /// Makes a page accessible again.
    fn disarm(&mut self, page: u64) -> Result<(), TrapError>;

    /// Waits for accesses that trap, until `until` or for a shorter time, and lets each go on at once.
    fn serve(&mut self, until: Duration, traps: &mut Vec<Trap>) -> Result<(), TrapError>;

    /// What was taken from the VM since the last call.
    fn take_spent(&mut self) -> Spent;
}

/// An access that trapped.
#[derive(Debug, Clone, Copy)]
pub struct Trap {
    /// `None` if it is not in the RAM.
    pub page: Option<PageNumber>,
    pub kind: AccessKind,
    /// It happened after this time of the VM, and not after the other.
    pub after: Duration,
    pub by: Duration,
}

/// A sample that began, with both of its times.
#[derive(Debug)]
struct Begun {
    page: u64,
    armed: Duration,
    at: Duration,
}

/// The samples and results since the last report.
#[derive(Debug, Default)]
pub struct Report {
    pub ended: Vec<FirstTouch>,
    pub waiting: Vec<FirstTouch>,
    pub touched: ReferenceBatch,
    pub from: Timestamp,
    pub now: Timestamp,
    pub populated_pages: u64,
    pub samples: SampleCounts,
    pub traps: TrapCounts,
    pub losses: PeriodLosses,
    /// Pages made inaccessible.
    pub armed_pages: u64,
    /// Whether samples were withdrawn because traps were over the budget.
    pub is_overdrawn: bool,
}

/// Draws samples of a VM and follows them.
#[derive(Debug)]
pub struct Sampler<V> {
    pub vm: V,
    pace: Pace,
    dice: Dice,
    /// Strata in the order in which they are drawn from, and how many were since they were shuffled.
    strata: Vec<u64>,
    drawn: u64,
    /// Waiting samples by page and time of arming, with the time at which the page was last found to be armed, in the
    /// VM's time.
    waiting: BTreeMap<(u64, Duration), Duration>,
    /// Samples in the order in which they began; those that ended may be among them.
    begun: VecDeque<Begun>,
    /// First page that is checked next, and how many of the waiting pages are due.
    check_at: u64,
    checks_due: f64,
    checked: Duration,
    /// When the next batch begins.
    due: Duration,
    /// When the RAM was free last.
    rested: Duration,
    traps: Vec<Trap>,
    /// Samples begun since the pace was settled.
    unsettled: u64,
    report: Report,
    /// End of the last report.
    reported: Timestamp,
    populated_before: Option<u64>,
}

impl<V: SampledVm> Sampler<V> {
    pub fn new(vm: V, pace: Pace, seed: u64) -> Self {
        let now = vm.now();
        let reported = Timestamp {
            vm: vm.vm_time(),
            wall: now,
        };
        Self {
            vm,
            pace,
            dice: Dice::new(!seed),
            strata: (0..STRATA).collect(),
            drawn: 0,
            waiting: BTreeMap::new(),
            begun: VecDeque::new(),
            check_at: 0,
            checks_due: 0.0,
            checked: now,
            due: now,
            rested: now,
            traps: Vec::new(),
            unsettled: 0,
            report: Report::default(),
            reported,
            populated_before: None,
        }
    }

    /// Whether the budget allows that the RAM is free for a while, after which every waiting page is checked.
    pub fn affords_rest(&self) -> bool {
        let length = self.vm.now().saturating_sub(self.rested);
        let checks = FINDING_SECONDS * self.waiting.len() as f64;
        self.pace
            .budget_over(length)
            .is_none_or(|budget| checks <= budget * FINDING_SHARE)
    }

    /// Ends the samples of pages that are mapped although they wait, because they lost their contents and got new ones.
    pub fn end_vanished(&mut self) -> Result<(), TrapError> {
        for page in self.mapped()? {
            self.end_unknown(page, Duration::ZERO);
        }
        Ok(())
    }

    /// Ends the samples of the pages that were touched without a trap from `from` to `by`, in the VM's time.
    pub fn find_touched(&mut self, from: Duration, by: Duration) -> Result<(), TrapError> {
        self.rested = self.vm.now();
        let mapped = self.mapped()?;
        let is_same = |one: &u64, other: &u64| self.vm.window_of(*one) == self.vm.window_of(*other);
        let windows: Vec<&[u64]> = mapped.chunk_by(is_same).collect();
        for pages in windows {
            // One of them was touched, and may have mapped the others.
            let touched = pages[usize_of(self.dice.below(pages.len() as u64))];
            for &page in pages.iter().filter(|&&page| page != touched) {
                self.end_unknown(page, from);
            }
            self.report
                .touched
                .push(PageNumber(touched), AccessKind::Unknown);
            for armed in self.samples_of(touched).collect::<Vec<_>>() {
                self.waiting.remove(&(touched, armed));
                self.end_touched(armed, from, by);
            }
        }
        // Nothing was drawn meanwhile.
        let spent = self.vm.take_spent();
        let begun = std::mem::take(&mut self.unsettled);
        self.pace
            .settle(self.vm.now(), self.vm.vm_time(), spent, begun);
        self.pace.skip();
        Ok(())
    }

    /// Pages of waiting samples that are mapped, rising.
    fn mapped(&mut self) -> Result<Vec<u64>, TrapError> {
        let mut waiting: Vec<u64> = self.waiting_pages().collect();
        waiting.dedup();
        let mut mapped = Vec::new();
        for pages in waiting.chunks(DISARM_PAGES) {
            mapped.extend(self.vm.accessible(pages)?);
            self.serve(Duration::ZERO)?;
        }
        // Without those that trapped meanwhile.
        mapped.retain(|&page| self.is_waiting(page));
        Ok(mapped)
    }

    /// Ends the samples of a page of which nothing is known since they were checked, or since `from`.
    fn end_unknown(&mut self, page: u64, from: Duration) {
        for armed in self.samples_of(page).collect::<Vec<_>>() {
            if let Some(checked) = self.waiting.remove(&(page, armed)) {
                self.report.samples.vanished += 1;
                self.end_untouched(armed, checked.max(from));
            }
        }
    }

    /// Serves accesses for a while, at most 50 ms without one, and begins the next batch of samples if it is due.
    /// `charged` is CPU time that others have spent for this backend since the last turn.
    pub fn turn(&mut self, charged: Duration) -> Result<(), TrapError> {
        self.serve(self.due)?;
        // Not only with each batch: the traps of a burst can be worth seconds of the budget.
        let mut spent = self.vm.take_spent();
        spent.own += charged;
        let now = self.vm.now();
        self.pace.settle(
            now,
            self.vm.vm_time(),
            spent,
            std::mem::take(&mut self.unsettled),
        );
        if self.pace.is_overdrawn() && !self.waiting.is_empty() {
            self.report.is_overdrawn = true;
            self.pace.skip();
            return self.withdraw_all();
        }
        if now < self.due {
            return Ok(());
        }
        self.due = now + self.pace.tick();
        self.draw()?;
        let since = std::mem::replace(&mut self.checked, now);
        self.check(now.saturating_sub(since))?;
        self.withdraw_old()
    }

    /// Returns what happened since the last report, and the samples that wait.
    pub fn report(&mut self) -> Result<Report, TrapError> {
        let mut report = std::mem::take(&mut self.report);
        let now = self.timestamp();
        report.from = std::mem::replace(&mut self.reported, now);
        report.now = now;
        report.populated_pages = self.vm.populated_pages()?;
        let before = self.populated_before.replace(report.populated_pages);
        report.losses.first_touches_unseen =
            before.map_or(0, |before| report.populated_pages.saturating_sub(before));
        report.samples.waiting = self.waiting.len() as u64;
        let waiting = self.waiting.keys().map(|&(_, armed)| FirstTouch {
            armed,
            untouched_until: now.vm,
            touched_by: None,
            pages: 1,
        });
        report.waiting = waiting.collect();
        Ok(report)
    }

    fn timestamp(&self) -> Timestamp {
        Timestamp {
            vm: self.vm.vm_time(),
            wall: self.vm.now(),
        }
    }

    /// Pages of the waiting samples.
    pub fn waiting_pages(&self) -> impl Iterator<Item = u64> {
        self.waiting.keys().map(|&(page, _)| page)
    }

    /// Bytes that waiting samples take, about.
    pub fn waiting_bytes(&self) -> usize {
        // Nodes of a B-tree are two thirds full.
        self.waiting.len() * size_of::<((u64, Duration), Duration)>() * 3 / 2
            + self.begun.capacity() * size_of::<Begun>()
    }

    fn serve(&mut self, until: Duration) -> Result<(), TrapError> {
        let mut traps = std::mem::take(&mut self.traps);
        traps.clear();
        let served = self.vm.serve(until, &mut traps);
        for trap in &traps {
            self.record(trap);
        }
        self.traps = traps;
        served
    }

    fn record(&mut self, trap: &Trap) {
        let Some(page) = trap.page.filter(|page| self.is_waiting(page.0)) else {
            // A second vCPU at the same page, or a page that nobody armed.
            self.report.traps.strays += 1;
            return;
        };
        self.report.traps.taken += 1;
        self.report.traps.writes += u64::from(trap.kind == AccessKind::Write);
        self.report.touched.push(page, trap.kind);
        let samples: Vec<_> = self.samples_of(page.0).collect();
        for armed in samples {
            self.waiting.remove(&(page.0, armed));
            self.end_touched(armed, trap.after, trap.by);
        }
    }

    /// Times at which the waiting samples of a page began.
    fn samples_of(&self, page: u64) -> impl Iterator<Item = Duration> {
        let all = (page, Duration::ZERO)..=(page, Duration::MAX);
        self.waiting.range(all).map(|(&(_, armed), _)| armed)
    }

    fn is_waiting(&self, page: u64) -> bool {
        self.samples_of(page).next().is_some()
    }

    /// Draws the pages that are due and begins a sample of each.
    fn draw(&mut self) -> Result<(), TrapError> {
        if self.report.ended.len() >= ENDED_MAX {
            self.pace.skip();
        }
        let (mut pages, mut draws) = (Vec::new(), 0);
        while self.pace.is_due() {
            let found = loop {
                if draws == DRAWS_MAX {
                    self.pace.skip();
                    break None;
                }
                draws += 1;
                self.report.samples.drawn += 1;
                let page = self.random_page();
                if self.is_waiting(page) || self.vm.is_populated(page)? {
                    break Some(page);
                }
                self.report.samples.empty += 1;
            };
            pages.extend(found);
        }
        for pages in pages.chunks(ARM_PAGES) {
            self.arm(pages)?;
            self.serve(Duration::ZERO)?;
        }
        Ok(())
    }

    /// Any page of the RAM, with the same chance.
    fn random_page(&mut self) -> u64 {
        let turn = self.drawn % STRATA;
        self.drawn += 1;
        if turn == 0 {
            for last in (1..STRATA).rev() {
                let other = self.dice.below(last + 1);
                self.strata.swap(usize_of(last), usize_of(other));
            }
        }
        let pages = u128::from(self.vm.pages());
        let stratum = u128::from(self.strata[usize_of(turn)]);
        // A place in the stratum in units of 2^-64 of it, so that strata need not begin at pages.
        let place = stratum << 64 | u128::from(self.dice.whole());
        let page = (place >> 32) * pages / (u128::from(STRATA) << 32);
        u64::try_from(page).expect("a number below that of the pages")
    }

    fn arm(&mut self, pages: &[u64]) -> Result<(), TrapError> {
        let mut new: Vec<u64> = pages.to_vec();
        new.retain(|&page| !self.is_waiting(page));
        new.sort_unstable();
        new.dedup();
        let stayed = if new.is_empty() {
            Vec::new()
        } else {
            self.vm.arm(&new)?
        };
        self.report.armed_pages += (new.len() - stayed.len()) as u64;
        self.report.losses.stayed_accessible += stayed.len() as u64;
        let (at, now) = (self.vm.now(), self.vm.vm_time());
        for &page in pages.iter().filter(|page| !stayed.contains(page)) {
            // Two samples of a page differ in their times.
            let mut armed = now;
            while self.waiting.contains_key(&(page, armed)) {
                armed += Duration::from_nanos(1);
            }
            self.waiting.insert((page, armed), armed);
            self.begun.push_back(Begun { page, armed, at });
            self.report.samples.begun += 1;
            self.unsettled += 1;
        }
        Ok(())
    }

    /// Checks some of the waiting pages, all of them in [`CHECK_INTERVAL`]: a page that lost its contents gets new ones
    /// at its next touch, without a trap.
    fn check(&mut self, length: Duration) -> Result<(), TrapError> {
        self.checks_due +=
            self.waiting.len() as f64 * length.as_secs_f64() / CHECK_INTERVAL.as_secs_f64();
        let mut checked = 0;
        while self.checks_due >= 1.0 && checked < DISARM_PAGES {
            self.checks_due -= 1.0;
            checked += 1;
            let mut later = self.waiting.range((self.check_at, Duration::ZERO)..);
            let Some((&(page, _), _)) = later.next() else {
                self.check_at = 0;
                continue;
            };
            self.check_at = page + 1;
            let is_armed = self.vm.accessible(&[page])?.is_empty() && self.vm.is_populated(page)?;
            let now = self.vm.vm_time();
            let samples: Vec<_> = self.samples_of(page).collect();
            for armed in samples {
                if is_armed {
                    self.waiting.insert((page, armed), now);
                } else if let Some(found) = self.waiting.remove(&(page, armed)) {
                    self.report.samples.vanished += 1;
                    self.end_untouched(armed, found);
                }
            }
        }
        Ok(())
    }

    /// Withdraws samples that are too old or too many.
    fn withdraw_old(&mut self) -> Result<(), TrapError> {
        if self.begun.len() > self.waiting.len() * 2 + 1024 {
            let waiting = &self.waiting;
            self.begun
                .retain(|begun| waiting.contains_key(&(begun.page, begun.armed)));
        }
        for _ in 0..DISARM_PAGES {
            let Some(&Begun { page, armed, at }) = self.begun.front() else {
                break;
            };
            let is_old = self.vm.now().saturating_sub(at) > AGE_MAX;
            if !is_old && self.waiting.len() <= WAITING_MAX {
                break;
            }
            self.begun.pop_front();
            if self.waiting.remove(&(page, armed)).is_some() {
                self.report.samples.withdrawn += 1;
                self.end_untouched(armed, self.vm.vm_time());
                if !self.is_waiting(page) {
                    self.vm.disarm(page)?;
                }
            }
        }
        Ok(())
    }

    /// Withdraws all samples, so that nothing traps any more.
    fn withdraw_all(&mut self) -> Result<(), TrapError> {
        self.begun.clear();
        loop {
            for _ in 0..DISARM_PAGES {
                let Some(((page, armed), _)) = self.waiting.pop_first() else {
                    return Ok(());
                };
                self.report.samples.withdrawn += 1;
                self.end_untouched(armed, self.vm.vm_time());
                self.vm.disarm(page)?;
            }
            self.serve(Duration::ZERO)?;
        }
    }

    /// Ends a sample by a touch after one time and not after another.
    fn end_touched(&mut self, armed: Duration, after: Duration, by: Duration) {
        self.report.samples.touched += 1;
        self.report.ended.push(FirstTouch {
            armed,
            untouched_until: after.max(armed),
            touched_by: Some(by.max(armed)),
            pages: 1,
        });
    }

    fn end_untouched(&mut self, armed: Duration, untouched_until: Duration) {
        self.report.ended.push(FirstTouch {
            armed,
            untouched_until,
            touched_by: None,
            pages: 1,
        });
    }
}
