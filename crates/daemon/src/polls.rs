//! Polls of VMs, concurrently: a monitor that hangs delays few others.

use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// VMs polled at a time.
const AT_ONCE: usize = 64;
/// Time after which polls that are not finished get another thread: monitors that answer at once need one for all.
const THREAD_INTERVAL: Duration = Duration::from_millis(1);
/// Time within which polls are started of VMs of a move or its check, of which none is passed over.
pub const BEGIN_MAX: Duration = Duration::from_hours(1);

/// Polls VMs in their order; no poll is started after `time`. Returns whether all were.
pub fn poll<V: Send>(vms: Vec<V>, time: Duration, poll: impl Fn(V) + Sync) -> bool {
    let deadline = Instant::now() + time;
    let threads = vms.len().min(AT_ONCE);
    let vms = Mutex::new(vms.into_iter());
    let next = &|| vms.lock().unwrap_or_else(PoisonError::into_inner).next();
    let poll = &poll;
    let (end, ends) = channel();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let end = end.clone();
            scope.spawn(move || {
                while Instant::now() < deadline
                    && let Some(vm) = next()
                {
                    poll(vm);
                }
                let _ = end.send(());
            });
            // Once a thread has ended, no poll is left to start.
            if ends.recv_timeout(THREAD_INTERVAL).is_ok() {
                break;
            }
        }
    });
    next().is_none()
}
