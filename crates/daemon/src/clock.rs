//! The time of day, and the time since boot by which ages and time limits are measured.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// A time by both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time {
    /// Since the host booted, suspension included: it never steps, so ages are differences of it.
    pub since_boot: Duration,
    /// Milliseconds since 1970, for display: it steps when the clock is set.
    pub unix_ms: u64,
}

impl Time {
    /// The time of day, in ms since 1970, of what happened at `since_boot`, by the time of day of this time: the difference
    /// of the two is the age, also if the clock was set in between.
    pub fn unix_ms_at(self, since_boot: Duration) -> u64 {
        let age = self.since_boot.saturating_sub(since_boot).as_millis();
        self.unix_ms
            .saturating_sub(u64::try_from(age).unwrap_or(u64::MAX))
    }
}

/// The source of the time.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Time + Send + Sync>);

impl Clock {
    /// A clock that `time` reads.
    pub fn new(time: impl Fn() -> Time + Send + Sync + 'static) -> Self {
        Self(Arc::new(time))
    }

    /// The clocks of this host.
    pub fn of_host() -> Self {
        Self::new(|| {
            let boot = clock_gettime(ClockId::Boottime);
            Time {
                since_boot: Duration::try_from(boot).unwrap_or_default(),
                unix_ms: unix_ms(),
            }
        })
    }

    /// The time now.
    pub fn now(&self) -> Time {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

/// Milliseconds since 1970; 0 before.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}
