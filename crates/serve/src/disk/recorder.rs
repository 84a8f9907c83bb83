//! Recording a guest's references as a trace, in a thread of its own.

use std::panic;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::thread;

use anyhow::Context as _;
use plimsoll_disk::{Location, Misses, Observer, misses};
use plimsoll_flow::{PageSize, ReferenceBatch, Source as _};
use plimsoll_source::Format;

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

/// A trace that a thread of its own writes.
pub(super) struct Recorder {
    /// Where the trace will be.
    pub(super) trace: PathBuf,
    /// References that could not be recorded.
    pub(super) lost: Arc<AtomicU64>,
    /// Tells the thread that the trace is to get its name; dropped, that what was written is to be removed.
    keep: mpsc::SyncSender<()>,
    thread: thread::JoinHandle<anyhow::Result<()>>,
}

impl Recorder {
    /// Begins the trace at `trace`, in our own format unless its name ends in that of another.
    /// Returns the observer that feeds it.
    pub(super) fn start(trace: &Path) -> anyhow::Result<(Self, Box<dyn Observer>)> {
        let (observer, misses) = misses();
        let lost = observer.lost();
        let (begun, beginning) = mpsc::sync_channel(1);
        let path = trace.to_owned();
        let thread = thread::Builder::new().name("record".into());
        let (keep, kept) = mpsc::sync_channel(1);
        let thread = thread.spawn(move || record(&path, misses, &begun, &kept))?;
        let recorder = Self {
            trace: trace.to_owned(),
            lost,
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
    path: &Path,
    mut misses: Misses,
    begun: &mpsc::SyncSender<()>,
    kept: &mpsc::Receiver<()>,
) -> anyhow::Result<()> {
    let format = Format::of_name(path).unwrap_or(Format::PLIMSOLL);
    let mut trace = plimsoll_source::create(path, Some(format), PageSize::FOUR_KIB)?;
    begun.send(())?;
    let mut batch = ReferenceBatch::new();
    while misses.next_batch(&mut batch)? {
        trace.write(&batch)?;
    }
    match kept.recv() {
        Ok(()) => Ok(trace.finish()?),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

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
}
