//! A thread that repeats an inspection, so that no turn waits for it.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The last result, and its time.
type Last<T> = Arc<(Mutex<Option<(T, Instant)>>, Condvar)>;

/// An inspection that is repeated until this is dropped.
#[derive(Debug)]
pub struct Background<T> {
    last: Last<T>,
    began: Instant,
    _end: Sender<()>,
}

impl<T: Clone + Send + 'static> Background<T> {
    /// Starts the thread. `inspect` returns its result and the pause until it is called again.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn begin(
        name: &str,
        mut inspect: impl FnMut() -> (T, Duration) + Send + 'static,
    ) -> io::Result<Self> {
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
        thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Self {
            last,
            began: Instant::now(),
            _end: end,
        })
    }

    /// The last result, and its age; without one, the age of the thread. Waits for the first result until the thread is
    /// `first_max` old.
    pub fn last(&self, first_max: Duration) -> (Option<T>, Duration) {
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
