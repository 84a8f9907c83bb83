//! Recording a guest's references as a trace, in a thread of its own.

use std::panic;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;

use anyhow::Context as _;
use plimsoll_disk::{Location, Misses, Observer, misses};
use plimsoll_flow::{PageSize, ReferenceBatch, Source as _};
use plimsoll_source::Format;

use super::report::RecordReport;

/// Several observers as one.
pub(super) struct Observers(pub(super) Vec<Box<dyn Observer>>);

impl Observer for Observers {
    fn missed(&mut self, page: Location) {
        self.0.iter_mut().for_each(|observer| observer.missed(page));
    }

    fn evicted(&mut self, page: Location) {
        self.0
            .iter_mut()
            .for_each(|observer| observer.evicted(page));
    }

    fn released(&mut self, page: Location) {
        self.0
            .iter_mut()
            .for_each(|observer| observer.released(page));
    }

    fn cleared(&mut self) {
        self.0.iter_mut().for_each(|observer| observer.cleared());
    }
}

/// What became of a trace until now.
#[derive(Debug, Clone)]
pub(super) struct RecordProgress {
    /// Where the trace will be.
    trace: PathBuf,
    /// References that could not be recorded.
    lost: Arc<AtomicU64>,
    /// Why the trace cannot be written.
    error: Arc<OnceLock<String>>,
}

impl RecordProgress {
    pub(super) fn report(&self) -> RecordReport {
        RecordReport {
            trace: self.trace.clone(),
            lost: self.lost.load(Ordering::Relaxed),
            error: self.error.get().cloned(),
        }
    }
}

/// A trace that a thread of its own writes.
pub(super) struct Recorder {
    pub(super) progress: RecordProgress,
    /// Tells the thread that the trace is to get its name; dropped, that what was written is to be removed.
    keep: mpsc::SyncSender<()>,
    thread: thread::JoinHandle<anyhow::Result<()>>,
}

impl Recorder {
    /// Begins the trace at `trace`, in our own format unless its name ends in that of another.
    /// Returns the observer that feeds it.
    pub(super) fn start(trace: &Path) -> anyhow::Result<(Self, Box<dyn Observer>)> {
        let (observer, misses) = misses();
        let progress = RecordProgress {
            trace: trace.to_owned(),
            lost: observer.lost(),
            error: Arc::default(),
        };
        let (begun, beginning) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name("record".into());
        let (keep, kept) = mpsc::sync_channel(1);
        let of_thread = progress.clone();
        let thread = thread.spawn(move || record(&of_thread, misses, &begun, &kept))?;
        let recorder = Self {
            progress,
            keep,
            thread,
        };
        match beginning.recv() {
            Ok(()) => Ok((recorder, Box::new(observer))),
            Err(_) => Err(recorder.finish().err().context("no trace was begun")?),
        }
    }

    /// Ends the trace, whose observer must have been dropped, and gives it its name.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        // It may have failed, which its result says.
        let _ = self.keep.send(());
        self.thread
            .join()
            .unwrap_or_else(|panic| panic::resume_unwind(panic))
    }
}

fn record(
    progress: &RecordProgress,
    mut misses: Misses,
    begun: &mpsc::SyncSender<()>,
    kept: &mpsc::Receiver<()>,
) -> anyhow::Result<()> {
    let path = &progress.trace;
    let format = Format::of_name(path).unwrap_or(Format::PLIMSOLL);
    let mut trace = plimsoll_source::create(path, Some(format), PageSize::FOUR_KIB)?;
    begun.send(())?;
    let mut batch = ReferenceBatch::new();
    let mut recorded = 0;
    while misses.next_batch(&mut batch)? {
        recorded += batch.len() as u64;
        if let Err(error) = trace.write(&batch) {
            // The unfinished file takes no more space.
            drop(trace);
            let _ = progress.error.set(error.to_string());
            // Nothing is kept of what was written, and nothing that comes is.
            let lost = |count| progress.lost.fetch_add(count, Ordering::Relaxed);
            lost(recorded);
            while misses.next_batch(&mut batch)? {
                lost(batch.len() as u64);
            }
            return Err(error.into());
        }
    }
    match kept.recv() {
        Ok(()) => Ok(trace.finish()?),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::ops::Range;
    use std::time::Duration;

    use plimsoll_disk::DiskNumber;

    use super::super::trouble::Journal;
    use super::*;

    #[test]
    fn a_server_that_does_not_start_leaves_an_earlier_trace() {
        let folder = tempfile::tempdir().unwrap();
        let trace = folder.path().join("t.ids");
        fs::write(&trace, "7\n").unwrap();
        let files = || fs::read_dir(folder.path()).unwrap().count();
        let (recorder, observer) = Recorder::start(&trace).unwrap();
        drop(observer);
        drop(recorder);
        while files() > 1 {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(fs::read_to_string(&trace).unwrap(), "7\n");
        let (recorder, observer) = Recorder::start(&trace).unwrap();
        drop(observer);
        recorder.finish().unwrap();
        assert_eq!(fs::read_to_string(&trace).unwrap(), "");
    }

    #[test]
    fn a_trace_that_cannot_be_written_is_reported_once_and_all_its_references_are_lost() {
        let (recorder, mut observer) = Recorder::start(Path::new("/dev/full")).unwrap();
        let progress = recorder.progress.clone();
        let count = 1 << 16;
        let mut missed = |pages: Range<u64>| {
            for page in pages {
                observer.missed(Location::new(DiskNumber(0), page));
            }
        };
        let mut all = 0;
        while progress.report().error.is_none() {
            missed(all..all + count);
            all += count;
        }
        let mut journal = Journal::default();
        let line = journal.record_line(&progress.report()).unwrap();
        assert!(
            line.contains("/dev/full") && line.contains("No space"),
            "{line}"
        );
        assert_eq!(journal.record_line(&progress.report()), None);
        missed(all..all + count);
        drop(observer);
        assert!(recorder.finish().is_err());
        assert_eq!(progress.report().lost, all + count);
    }
}
