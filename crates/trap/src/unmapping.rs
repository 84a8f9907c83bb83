//! Whether a VM's pages can be made inaccessible at all: a second mapping of the RAM, or a pin, keeps them accessible.

use crate::error::TrapError;

/// Minimum number of pages from which to conclude that.
const TRIED_MIN: u64 = 16;
/// Number of recent pages that decide, about: a process may map the RAM while it is traced.
const RECENT: u64 = 1024;
/// One of so many may stay accessible. Those that do are not sampled, and they are pages in use: what is left shows too little.
const STAYED_MAX: u64 = 4;

/// Pages that were accessible and were to be made inaccessible. Pages without a mapping of the VM do not count: they become
/// inaccessible whatever else maps them.
#[derive(Debug, Default)]
pub struct Unmapping {
    tried: u64,
    stayed: u64,
}

impl Unmapping {
    /// Takes `tried` such pages, `stayed` of which stayed accessible.
    ///
    /// # Errors
    ///
    /// [`TrapError::StayedAccessible`] if more than a quarter of the recent pages did, of 16 or more.
    pub fn record(&mut self, tried: u64, stayed: u64) -> Result<(), TrapError> {
        self.tried += tried;
        self.stayed += stayed;
        if self.tried >= TRIED_MIN && self.stayed * STAYED_MAX > self.tried {
            return Err(TrapError::StayedAccessible {
                tried: self.tried,
                accessible: self.stayed,
            });
        }
        while self.tried > RECENT {
            self.tried /= 2;
            self.stayed /= 2;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_pages_prove_nothing_and_a_quarter_may_stay() {
        let mut unmapping = Unmapping::default();
        unmapping.record(15, 15).unwrap();
        unmapping.record(45, 0).unwrap();
        let error = unmapping.record(1, 1).unwrap_err();
        assert!(
            matches!(
                error,
                TrapError::StayedAccessible {
                    tried: 61,
                    accessible: 16
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn what_stays_after_a_long_time_counts_as_well() {
        let mut unmapping = Unmapping::default();
        unmapping.record(1_000_000, 100).unwrap();
        for _ in 0..50 {
            unmapping.record(8, 0).unwrap();
        }
        let stays = (0..200).find(|_| unmapping.record(8, 8).is_err());
        assert!(stays.is_some_and(|batches| batches < 60), "{stays:?}");
    }
}
