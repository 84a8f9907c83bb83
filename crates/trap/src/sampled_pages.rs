//! Random pages made absent once, and asked after later: the sampling of VMware's ESX on a live VM.
//!
//! [`SampledPages::draw`] picks pages at random among those that hold something and makes them absent;
//! [`SampledPages::look`] tells which came back since. The share touched, times the memory, is ESX's estimate of
//! the working set (\[Waldspurger02\] §5.3: 100 pages, 30 s).
//!
//! Departs from it in the pages drawn from: those never touched are left out, and of two pages in one aligned
//! 64 KiB only one is drawn (`absent.rs`), which leaves each page's chance as it is.
//!
//! Cost: a minor fault of the VM for each page touched, and some 5 µs a page drawn.

use std::collections::HashSet;

use plimsoll_flow::PageNumber;

use crate::absent::Absentees;
use crate::error::TrapError;
use crate::ram::usize_of;
use crate::sample::mix;
use crate::target::TraceTarget;

/// A VM of which random pages are asked after.
#[derive(Debug)]
pub struct SampledPages {
    absentees: Absentees,
    /// The pages drawn, rising.
    drawn: Vec<u64>,
    lost: u64,
}

/// What became of the pages drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampledTouches {
    /// The pages drawn, rising.
    pub sampled: Vec<PageNumber>,
    /// Those of them that were touched since, rising.
    pub touched: Vec<PageNumber>,
    /// Pages that were there again right after two attempts to make them absent: in constant use, or not to
    /// be made absent (pinned, or mapped by a second process). They count as touched.
    pub lost: u64,
}

impl SampledPages {
    /// Opens what shows a VM's pages; changes nothing in it.
    ///
    /// # Errors
    ///
    /// Why its pages cannot be made absent, as a tracer would tell.
    pub fn attach(target: &TraceTarget) -> Result<Self, TrapError> {
        Ok(Self {
            absentees: Absentees::reach(target)?,
            drawn: Vec::new(),
            lost: 0,
        })
    }

    /// Pages of the VM that hold something now.
    ///
    /// # Errors
    ///
    /// [`TrapError::VmGone`], [`TrapError::Call`].
    pub fn populated_pages(&mut self) -> Result<u64, TrapError> {
        self.absentees.check_alive()?;
        let runs = self.absentees.populated()?;
        Ok(runs.iter().map(|run| run.end - run.start).sum())
    }

    /// Draws up to `pages` random pages that hold something and makes them absent; returns how many. There
    /// are fewer where the VM has not as many in 64 KiB of their own. What was drawn before is forgotten.
    ///
    /// # Errors
    ///
    /// [`TrapError::VmGone`], [`TrapError::Call`], and [`TrapError::StayedAccessible`] if more than half of them
    /// stay: the VM loses nothing by it.
    pub fn draw(&mut self, pages: usize, seed: u64) -> Result<usize, TrapError> {
        self.absentees.check_alive()?;
        let runs = self.absentees.populated()?.to_vec();
        // The number of the first populated page of each run among all populated ones.
        let mut firsts = Vec::with_capacity(runs.len());
        let mut populated = 0;
        for run in &runs {
            firsts.push(populated);
            populated += run.end - run.start;
        }
        let (mut drawn, mut windows) = (Vec::new(), HashSet::new());
        // Each try meets a window that is taken with a chance of at most drawn * 16 / populated.
        for attempt in 0..pages as u64 * 4 {
            if drawn.len() == pages || populated == 0 {
                break;
            }
            let nth = mix(mix(seed) ^ attempt) % populated;
            let run = firsts.partition_point(|&first| first <= nth) - 1;
            let page = runs[run].start + (nth - firsts[run]);
            if windows.insert(self.absentees.window_of(page)) {
                drawn.push(page);
            }
        }
        drawn.sort_unstable();
        let stayed = self.absentees.make_absent(&drawn)?.len();
        self.drawn = drawn;
        self.lost = stayed as u64;
        if stayed * 2 > self.drawn.len() {
            return Err(TrapError::StayedAccessible {
                tried: self.drawn.len() as u64,
                accessible: self.lost,
            });
        }
        Ok(self.drawn.len())
    }

    /// Tells which of the pages drawn were touched since; may be asked again and again.
    ///
    /// # Errors
    ///
    /// [`TrapError::VmGone`], [`TrapError::Call`].
    pub fn look(&mut self) -> Result<SampledTouches, TrapError> {
        self.absentees.check_alive()?;
        let mut touched = Vec::with_capacity(usize_of(self.lost));
        self.absentees
            .for_each_mapped(&self.drawn, |page, _| touched.push(PageNumber(page)))?;
        Ok(SampledTouches {
            sampled: self.drawn.iter().copied().map(PageNumber).collect(),
            touched,
            lost: self.lost,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::absent::stay_on_this_cpu;
    use crate::sys::SharedMemory;
    use plimsoll_skip::{Lack, skip};
    use std::sync::atomic::Ordering;

    const PAGES: usize = 1600;

    #[test]
    fn the_pages_drawn_that_were_touched_since_are_told_and_no_others() {
        stay_on_this_cpu();
        let memory = SharedMemory::new(PAGES).unwrap();
        let attached = SampledPages::attach(&memory.as_target());
        let mut sample = match attached {
            Ok(sample) => sample,
            Err(error) => {
                skip(
                    Lack::Userfaultfd,
                    format_args!("no pages can be made absent on this host: {error}"),
                );
                return;
            }
        };
        assert_eq!(sample.populated_pages().unwrap(), PAGES as u64);
        for seed in 0..4 {
            // Of 1600 pages there are 100 in 64 KiB of their own.
            let drawn = sample.draw(50, seed).unwrap();
            assert_eq!(drawn, 50);
            let before = sample.look().unwrap();
            // The host may unmap a page by itself, or hold one for a moment.
            assert!(before.touched.len() <= 2 && before.lost <= 2, "{before:?}");
            let read: Vec<_> = before.sampled.iter().copied().step_by(2).collect();
            for page in &read {
                memory.word(usize_of(page.0)).load(Ordering::Relaxed);
            }
            let after = sample.look().unwrap();
            let differ = |a: &[PageNumber], b: &[PageNumber]| {
                a.iter().filter(|page| !b.contains(page)).count()
            };
            let strange = differ(&after.touched, &read) + differ(&read, &after.touched);
            assert!(strange <= 2, "{:?} beside {read:?}", after.touched);
        }
        let all = sample.draw(PAGES, 9).unwrap();
        // One more where the memory does not begin at a window's edge.
        assert!((90..=101).contains(&all), "{all}");
    }
}
