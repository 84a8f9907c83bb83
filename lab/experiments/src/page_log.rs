//! Page logs of guests of ours.

use std::ffi::OsStr;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::Context as _;
use plimsoll_estimator::FilteredLru;
use plimsoll_flow::{PageCount, PageNumber, WorkingSet};
use plimsoll_observe::page_log::{PageLog, PageLogArgs, Recording};
use plimsoll_pagelog::PageLogError;
use plimsoll_pagelog::TlbShape;
use plimsoll_pagelog::record::Record;
use plimsoll_rig::{AcceleratorChoice, GuestConfig};

/// Most recently used pages of a vCPU, whose references are not recorded.
const FILTER_PAGES: u32 = 64;

/// Smallest size of which [`FullTrace`] and [`ProcessTrace`] count the misses.
pub const FILTER: PageCount = PageCount(FILTER_PAGES as u64);

/// Makes the ring and the file for a guest of ours, and has its QEMU load the plugin. `args` must name a file.
///
/// # Errors
///
/// As [`PageLog::prepare`].
pub fn page_log_of(args: &PageLogArgs, guest: &mut GuestConfig) -> anyhow::Result<PageLog> {
    // As the rig starts guests.
    let memory = format!("{}M", guest.memory_mib);
    let line = ["-machine", "q35", "-m", &memory].map(str::to_owned);
    let log = PageLog::prepare(args, OsStr::new(plimsoll_vm::QEMU), &line)?
        .context("no file is named for the page log")?;
    guest.accelerator = AcceleratorChoice::Tcg;
    for word in log.arguments() {
        let word = word
            .into_string()
            .ok()
            .context("the plugin's path is not UTF-8")?;
        guest.extra_arguments.push(word);
    }
    Ok(log)
}

/// Of a trace that is processed and not kept.
fn of_every_reference() -> PageLogArgs {
    PageLogArgs {
        page_log: Some("/dev/null".into()),
        references: true,
        // With each interval's end come the accesses counted.
        interval: Some(1_000_000),
        filter: Some(FILTER_PAGES),
        no_walks: true,
        ..PageLogArgs::default()
    }
}

/// Ends the recording of a guest that has ended.
fn end(recording: Recording) -> anyhow::Result<()> {
    if let Err(error) = recording.end() {
        // The guest does not end by itself, so its log is always truncated.
        let cut = error.downcast_ref::<PageLogError>();
        if !matches!(cut, Some(PageLogError::Cut { .. })) {
            return Err(error);
        }
    }
    Ok(())
}

/// Every reference of a guest of ours, counted while it runs: by the plugin, which records what misses a small filter of
/// the most recently used pages. The misses of every larger LRU memory follow exactly.
pub struct FullTrace {
    lru: Arc<Mutex<FilteredLru>>,
    recording: Recording,
}

impl FullTrace {
    /// Has the QEMU of a guest load the plugin; counting begins at the guest's first mark.
    ///
    /// # Errors
    ///
    /// As [`page_log_of`].
    pub fn of(guest: &mut GuestConfig) -> anyhow::Result<Self> {
        let options = PageLogArgs {
            between_marks: true,
            ..of_every_reference()
        };
        let log = page_log_of(&options, guest)?;
        let lru = Arc::new(Mutex::new(FilteredLru::new(FILTER)));
        let recording = log.record_and({
            let lru = Arc::clone(&lru);
            move |records| {
                let mut lru = lru.lock().unwrap_or_else(PoisonError::into_inner);
                for record in records {
                    match *record {
                        Record::Enter { frame, .. } => lru.enter(frame),
                        Record::Leave { frame, .. } => lru.leave(frame),
                        Record::Accesses { count, .. } => lru.accesses(count),
                        _ => {}
                    }
                }
            }
        });
        Ok(Self { lru, recording })
    }

    /// The counts up to now.
    pub fn now(&self) -> FilteredLru {
        self.lru
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Ends the recording of a guest that has ended.
    ///
    /// # Errors
    ///
    /// That records were lost or contradict each other.
    pub fn end(self) -> anyhow::Result<()> {
        end(self.recording)
    }
}

/// References to some of a guest's frames: those of one process, whoever makes them. Frames are named while the trace is made; what
/// was referenced before is forgotten.
#[derive(Debug)]
pub struct ChosenFrames {
    lru: FilteredLru,
    /// By number: whether it is chosen, whether the filter holds it, and when it last entered or left it.
    frames: Vec<Frame>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Frame {
    is_chosen: bool,
    is_held: bool,
    moved: Option<Instant>,
}

impl Default for ChosenFrames {
    fn default() -> Self {
        Self {
            lru: FilteredLru::new(FILTER),
            frames: Vec::new(),
        }
    }
}

impl ChosenFrames {
    /// Chooses these and no others. Those that were not chosen before count as used just now, so that none of them is referenced
    /// for the first time later. Returns how many these are.
    pub fn choose(&mut self, chosen: &[Range<u64>]) -> PageCount {
        let numbers = || {
            let all = chosen.iter().cloned().flatten();
            all.filter_map(|number| usize::try_from(number).ok())
        };
        let end = numbers().max().map_or(0, |last| last + 1);
        let end = end.max(self.frames.len());
        self.frames.resize(end, Frame::default());
        let mut is_chosen = vec![false; end];
        for number in numbers() {
            is_chosen[number] = true;
        }
        let mut new = PageCount(0);
        for (number, (frame, is_chosen)) in (0..).zip(self.frames.iter_mut().zip(is_chosen)) {
            let was_chosen = std::mem::replace(&mut frame.is_chosen, is_chosen);
            if is_chosen && !was_chosen {
                self.lru.enter(PageNumber(number));
                new.0 += 1;
            }
            if is_chosen != was_chosen && frame.is_held != is_chosen {
                self.lru.leave(PageNumber(number));
            }
        }
        new
    }

    /// Takes records that came at this time.
    pub fn take(&mut self, records: &[Record], at: Instant) {
        for record in records {
            let (frame, is_held) = match *record {
                Record::Enter { frame, .. } => (frame, true),
                Record::Leave { frame, .. } => (frame, false),
                _ => continue,
            };
            let Ok(index) = usize::try_from(frame.0) else {
                continue;
            };
            if index >= self.frames.len() {
                self.frames.resize(index + 1, Frame::default());
            }
            let of = &mut self.frames[index];
            (of.is_held, of.moved) = (is_held, Some(at));
            if of.is_chosen {
                match is_held {
                    true => self.lru.enter(frame),
                    false => self.lru.leave(frame),
                }
            }
        }
    }

    /// The counts up to now.
    pub fn now(&self) -> FilteredLru {
        self.lru.clone()
    }

    /// How many are chosen.
    pub fn count(&self) -> PageCount {
        let chosen = self.frames.iter().filter(|frame| frame.is_chosen);
        PageCount(chosen.count() as u64)
    }

    /// How many were referenced since: those that entered or left the filter, and those that it holds.
    pub fn touched_since(&self, since: Instant) -> PageCount {
        let touched = self.frames.iter().filter(|frame| {
            let moved = frame.moved.is_some_and(|moved| moved >= since);
            frame.is_chosen && (frame.is_held || moved)
        });
        PageCount(touched.count() as u64)
    }
}

/// The references to the frames of a process in a guest of ours, instruction fetches among them: by the plugin, from the
/// guest's beginning on.
pub struct ProcessTrace {
    frames: SharedFrames,
    recording: Recording,
}

/// The frames that a trace counts, while it does.
#[derive(Debug, Clone, Default)]
pub struct SharedFrames(Arc<Mutex<ChosenFrames>>);

impl SharedFrames {
    pub fn lock(&self) -> MutexGuard<'_, ChosenFrames> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProcessTrace {
    /// Has the QEMU of a guest, which has one vCPU, load the plugin. No frame is chosen yet.
    ///
    /// # Errors
    ///
    /// As [`page_log_of`].
    pub fn of(guest: &mut GuestConfig) -> anyhow::Result<Self> {
        let options = PageLogArgs {
            // Without its walks all that it decides is that fetches are recorded.
            itlb: Some(TlbShape::new(64, 4)?),
            ..of_every_reference()
        };
        let log = page_log_of(&options, guest)?;
        let frames = SharedFrames::default();
        let recording = log.record_and({
            let frames = frames.clone();
            move |records| frames.lock().take(records, Instant::now())
        });
        Ok(Self { frames, recording })
    }

    /// The frames, none of which is chosen in the beginning.
    pub fn frames(&self) -> SharedFrames {
        self.frames.clone()
    }

    /// Ends the recording of a guest that has ended.
    ///
    /// # Errors
    ///
    /// That records were lost or contradict each other.
    pub fn end(self) -> anyhow::Result<()> {
        end(self.recording)
    }
}

/// Misses within a stretch of a run, by the size of the memory.
#[derive(Debug)]
pub struct Misses {
    pub before: FilteredLru,
    pub after: FilteredLru,
}

impl Misses {
    /// Misses of a memory of `size`, which is above the plugin's filter.
    pub fn at(&self, size: PageCount) -> u64 {
        self.after.misses(size) - self.before.misses(size)
    }

    /// References, those that the filter held among them.
    pub fn references(&self) -> u64 {
        self.after.references() - self.before.references()
    }

    /// Smallest size at which at most 5 % of those references miss that miss at `from`, as sizes are at least the plugin's filter;
    /// `None` if none misses there, or more of them at every size.
    pub fn working_set(&self, from: PageCount) -> Option<PageCount> {
        let allowed = self.at(from) as f64 * WorkingSet::MISS_RATIO;
        (allowed > 0.0).then(|| self.size_for(allowed, from))?
    }

    /// Smallest size above `from` with at most so many misses; `None` if every size has more.
    pub fn size_for(&self, allowed: f64, from: PageCount) -> Option<PageCount> {
        let (mut low, mut high) = (from.0, self.after.distinct().0.max(from.0) + 1);
        if self.at(PageCount(high)) as f64 > allowed {
            return None;
        }
        while low + 1 < high {
            let middle = u64::midpoint(low, high);
            if self.at(PageCount(middle)) as f64 <= allowed {
                high = middle;
            } else {
                low = middle;
            }
        }
        Some(PageCount(high))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn enter(frame: u64) -> Record {
        let frame = PageNumber(frame);
        Record::Enter {
            vcpu: 0,
            frame,
            write: false,
        }
    }

    fn leave(frame: u64) -> Record {
        let frame = PageNumber(frame);
        Record::Leave { vcpu: 0, frame }
    }

    /// A filter of one page before a loop over the frames.
    fn cycle(frames: Range<u64>, rounds: usize) -> Vec<Record> {
        let one = frames
            .clone()
            .flat_map(|frame| [enter(frame), leave(frame)]);
        let one: Vec<_> = one.collect();
        one.repeat(rounds)
    }

    #[test]
    fn only_references_to_the_chosen_frames_count_and_none_is_a_first_one() {
        let at = Instant::now();
        let mut frames = ChosenFrames::default();
        frames.take(&cycle(0..500, 3), at);
        frames.choose(&[100..150, 200..250]);
        assert_eq!(frames.count(), PageCount(100));
        let before = frames.now();
        frames.take(&cycle(0..500, 3), at);
        let misses = Misses {
            before,
            after: frames.now(),
        };
        // The other 400 of the loop take no place.
        assert_eq!(misses.at(PageCount(99)), 300);
        assert_eq!(misses.at(PageCount(100)), 0);
        assert_eq!(misses.working_set(FILTER), Some(PageCount(100)));
        // A size at which nothing misses has no working set.
        assert_eq!(misses.working_set(PageCount(100)), None);
    }

    #[test]
    fn frames_chosen_anew_replace_those_before() {
        let at = Instant::now();
        let mut frames = ChosenFrames::default();
        frames.choose(&[0..4, 4..10]);
        frames.choose(&[5..9, 9..20]);
        assert_eq!(frames.count(), PageCount(15));
        let before = frames.now();
        frames.take(&cycle(0..5, 1), at);
        let misses = Misses {
            before,
            after: frames.now(),
        };
        assert_eq!(misses.at(PageCount(0)), 0);
    }

    #[test]
    fn touched_are_those_that_moved_since_and_those_in_the_filter() {
        let begin = Instant::now();
        let later = begin + Duration::from_secs(2);
        let mut frames = ChosenFrames::default();
        frames.choose(&[0..50, 50..100]);
        frames.take(&cycle(0..50, 1), begin);
        frames.take(&[enter(60)], begin);
        frames.take(&cycle(45..55, 1), later);
        frames.take(&[enter(300)], later);
        let since = begin + Duration::from_secs(1);
        assert_eq!(frames.touched_since(since), PageCount(11));
        assert_eq!(frames.touched_since(begin), PageCount(56));
    }
}
