//! Page logs of guests of ours.

use std::ffi::OsStr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use plimsoll_estimator::FilteredLru;
use plimsoll_flow::PageCount;
use plimsoll_observe::page_log::{PageLog, PageLogArgs, Recording};
use plimsoll_pagelog::PageLogError;
use plimsoll_pagelog::record::Record;
use plimsoll_rig::{AcceleratorChoice, GuestConfig};

/// Most recently used pages of a vCPU, whose references are not recorded.
const FILTER_PAGES: u32 = 64;

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
            // The records are processed and not kept.
            page_log: Some("/dev/null".into()),
            references: true,
            // With each interval's end come the accesses counted.
            interval: Some(1_000_000),
            filter: Some(FILTER_PAGES),
            no_walks: true,
            between_marks: true,
            ..PageLogArgs::default()
        };
        let log = page_log_of(&options, guest)?;
        let lru = Arc::new(Mutex::new(FilteredLru::new(PageCount(FILTER_PAGES.into()))));
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
        if let Err(error) = self.recording.end() {
            // The guest does not end by itself, so its log is always truncated.
            let cut = error.downcast_ref::<PageLogError>();
            if !matches!(cut, Some(PageLogError::Cut { .. })) {
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Misses within a stretch of a run, by the size of the memory.
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
}
