//! The guest's one clock: `CLOCK_MONOTONIC`, which starts with the kernel.

use rustix::time::{ClockId, clock_gettime};

/// A point in time, in nanoseconds since the kernel started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    ns: u64,
}

impl Time {
    /// Reads the clock.
    pub fn now() -> Self {
        let time = clock_gettime(ClockId::Monotonic);
        let part = |value: i64| u64::try_from(value).unwrap_or(0);
        Self {
            ns: part(time.tv_sec) * 1_000_000_000 + part(time.tv_nsec),
        }
    }

    /// Milliseconds since the kernel started.
    pub fn ms(self) -> u64 {
        self.ns / 1_000_000
    }

    /// Whole milliseconds since `start`; 0 if that lies ahead.
    pub fn ms_since(self, start: Self) -> u64 {
        self.ns.saturating_sub(start.ns) / 1_000_000
    }

    /// Whole microseconds since `start`; 0 if that lies ahead.
    pub fn us_since(self, start: Self) -> u64 {
        self.ns.saturating_sub(start.ns) / 1000
    }
}
