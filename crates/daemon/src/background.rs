//! A thread that repeats an inspection, so that no turn waits for it.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The last result, and its time.
type Last<T> = Arc<(Mutex<Option<(T, Instant)>>, Condvar)>;

/// An inspection that is repeated until this is dropped.
#[derive(Debug)]
pub struct Background<T> {
    /// What it finds, as the beginning of a sentence.
    what: &'static str,
    last: Last<T>,
    began: Instant,
    /// Age of the last result from which on the thread counts as stuck.
    hangs_after: Duration,
    /// Ends the thread when dropped; or why there is none.
    thread: Result<Sender<()>, String>,
}

impl<T: Clone + Send + 'static> Background<T> {
    /// Starts a thread of this name that finds `what`, such as "VMs". `inspect` returns its result and the pause until it is
    /// called again; a result that is older than `hangs_after` counts as the last of a thread that is stuck.
    pub fn begin(
        name: &str,
        what: &'static str,
        hangs_after: Duration,
        mut inspect: impl FnMut() -> (T, Duration) + Send + 'static,
    ) -> Self {
        let last: Last<T> = Arc::default();
        let (end, ended) = mpsc::channel();
        let its = Arc::clone(&last);
        let run = move || {
            loop {
                let (result, pause) = inspect();
                *lock(&its.0) = Some((result, Instant::now()));
                its.1.notify_all();
                if ended.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run);
        Self {
            what,
            last,
            began: Instant::now(),
            hangs_after,
            thread: (thread.map(|_| end)).map_err(|error| error.to_string()),
        }
    }

    /// The last result, and a warning if no newer one is to be expected. Waits for the first result until the thread is
    /// `first_max` old.
    pub fn last(&self, first_max: Duration) -> (Option<T>, Option<String>) {
        let what = self.what;
        if let Err(error) = &self.thread {
            return (None, Some(format!("{what} cannot be discovered: {error}")));
        }
        let (last, age) = self.last_and_age(first_max);
        let hangs = || {
            let seconds = age.as_secs();
            format!("{what} have not been discovered for {seconds} s: an inspection hangs")
        };
        (last, (age > self.hangs_after).then(hangs))
    }

    /// The last result, and its age; without one, the age of the thread.
    fn last_and_age(&self, first_max: Duration) -> (Option<T>, Duration) {
        let left = first_max.saturating_sub(self.began.elapsed());
        let (last, changed) = &*self.last;
        let waited = changed.wait_timeout_while(lock(last), left, |last| last.is_none());
        let (last, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((result, at)) => (Some(result.clone()), at.elapsed()),
            None => (None, self.began.elapsed()),
        }
    }
}

fn lock<T>(last: &Mutex<Option<(T, Instant)>>) -> MutexGuard<'_, Option<(T, Instant)>> {
    // It is only ever replaced as a whole, so it is consistent.
    last.lock().unwrap_or_else(PoisonError::into_inner)
}
