//! Progress of memory towards its target, from recorded targets and sizes and their times. No I/O.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A size within this distance of its target has reached it: the largest page size of guest kernels.
const SLACK_BYTES: u64 = 64 << 10;
/// Sizes kept to compute the pace.
const SIZES_MAX: usize = 16;

/// How long a target may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Time without progress after which a part is stuck, in ms.
    pub stuck_ms: u64,
    /// Time before the target is reached after which a part is late, in ms.
    pub late_ms: u64,
}

impl Part {
    /// Whether a target can have an effect.
    pub fn is_resizable(&self) -> bool {
        !matches!(self.progress, Progress::Absent(_))
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            stuck_ms: 10_000,
            late_ms: 10_000,
        }
    }
}

/// Why a target has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// The VM has no balloon.
    NoDevice,
    /// The guest's balloon driver has never answered: there is none, or the guest is booting.
    NoDriver,
}

/// Progress of a part towards its target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// It cannot change.
    Absent(Absence),
    /// No target was set by this process.
    #[default]
    NoTarget,
    /// It has reached its target.
    Reached,
    /// It is changing.
    Following {
        /// Its pace over the last polls.
        bytes_per_second: u64,
        /// Distance to the target.
        left_bytes: u64,
    },
    /// It is changing for longer than [`Patience::late_ms`].
    Late {
        /// Its pace over the last polls.
        bytes_per_second: u64,
        /// Distance to the target.
        left_bytes: u64,
    },
    /// It has made no progress for [`Patience::stuck_ms`].
    Stuck {
        /// Time without progress, in ms.
        unchanged_ms: u64,
        /// Distance to the target.
        left_bytes: u64,
    },
}

/// Size and progress of one part of a VM's memory. A part that was never queried successfully counts with its maximum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Part {
    /// Its size.
    pub actual_bytes: u64,
    /// Its last target; `None` if this process has not set one.
    pub target_bytes: Option<u64>,
    /// Whether that target may not have arrived; setting it again resolves this.
    pub in_doubt: bool,
    /// The most that it may hold without a further request. A pending target of another process is not known, so
    /// a starting process sets every part to its present size once.
    pub reserved_bytes: u64,
    /// Its maximum, such as the VM's RAM; `None` if that is not known.
    pub max_bytes: Option<u64>,
    /// The size below which it cannot be set, such as that of plugged virtio-mem, which a balloon does not get.
    pub min_bytes: u64,
    /// Progress towards the target.
    pub progress: Progress,
    /// Age of the last successful query, in ms; `None` if there was none.
    pub age_ms: Option<u64>,
}

/// A target and the sizes since it was set.
#[derive(Debug)]
pub struct Tracker {
    patience: Patience,
    /// The last observed size, and its time.
    seen: Option<(u64, Instant)>,
    target: Option<Target>,
    /// The largest of the earlier targets that may still be in force.
    in_doubt_bytes: Option<u64>,
}

#[derive(Debug)]
struct Target {
    bytes: u64,
    told: Instant,
    /// Whether it has to shrink, otherwise grow; a size beyond the target is accepted.
    shrink: bool,
    /// Smallest distance so far, and when it was reached.
    nearest: Option<(u64, Instant)>,
    /// Recent distances.
    lately: VecDeque<(u64, Instant)>,
}

impl Target {
    fn left(&self, actual_bytes: u64) -> u64 {
        let left = match self.shrink {
            true => actual_bytes.saturating_sub(self.bytes),
            false => self.bytes.saturating_sub(actual_bytes),
        };
        if left <= SLACK_BYTES { 0 } else { left }
    }

    fn see(&mut self, actual_bytes: u64, now: Instant) {
        let left = self.left(actual_bytes);
        if self.nearest.is_none_or(|(nearest, _)| left < nearest) {
            self.nearest = Some((left, now));
        }
        if left == 0 {
            // Leaving the target again starts the measurement anew.
            self.lately.clear();
            self.nearest = None;
            self.told = now;
        }
        if self.lately.len() == SIZES_MAX {
            self.lately.pop_front();
        }
        self.lately.push_back((left, now));
    }

    fn pace(&self) -> u64 {
        let (Some((before, from)), Some((left, to))) = (self.lately.front(), self.lately.back())
        else {
            return 0;
        };
        let us = to.duration_since(*from).as_micros().max(1);
        let followed = u128::from(before.saturating_sub(*left));
        u64::try_from(followed * 1_000_000 / us).unwrap_or(u64::MAX)
    }

    fn progress(&self, patience: Patience, now: Instant) -> Progress {
        let since = |at: Instant| as_ms(now.saturating_duration_since(at));
        let Some(&(left_bytes, _)) = self.lately.back() else {
            // The target was set after the last observation.
            return Progress::Following {
                bytes_per_second: 0,
                left_bytes: self.nearest.map_or(0, |(left, _)| left),
            };
        };
        if left_bytes == 0 {
            return Progress::Reached;
        }
        let unchanged_ms = self.nearest.map_or(0, |(_, at)| since(at));
        let bytes_per_second = self.pace();
        if unchanged_ms >= patience.stuck_ms {
            Progress::Stuck {
                unchanged_ms,
                left_bytes,
            }
        } else if since(self.told) >= patience.late_ms {
            Progress::Late {
                bytes_per_second,
                left_bytes,
            }
        } else {
            Progress::Following {
                bytes_per_second,
                left_bytes,
            }
        }
    }
}

pub(crate) fn as_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Tracker {
    /// A tracker of a part of which nothing is known.
    pub fn new(patience: Patience) -> Self {
        Self {
            patience,
            seen: None,
            target: None,
            in_doubt_bytes: None,
        }
    }

    /// Records a target that was sent; `surely` if it was confirmed.
    pub fn tell(&mut self, target_bytes: u64, surely: bool, now: Instant) {
        self.in_doubt_bytes = match surely {
            true => None,
            false => {
                let before = self.target.as_ref().map(|target| target.bytes);
                let before = before.max(self.in_doubt_bytes).unwrap_or(0);
                Some(before.max(target_bytes))
            }
        };
        if self
            .target
            .as_ref()
            .is_some_and(|target| target.bytes == target_bytes)
        {
            // The same target was set again: its elapsed time continues.
            return;
        }
        let actual_bytes = self.seen.map(|(bytes, _)| bytes);
        let mut target = Target {
            bytes: target_bytes,
            told: now,
            shrink: actual_bytes.is_none_or(|actual| target_bytes <= actual),
            nearest: None,
            lately: VecDeque::new(),
        };
        if let Some(actual_bytes) = actual_bytes {
            target.see(actual_bytes, now);
        }
        self.target = Some(target);
    }

    /// Records the present size.
    pub fn see(&mut self, actual_bytes: u64, now: Instant) {
        self.seen = Some((actual_bytes, now));
        if let Some(target) = &mut self.target {
            target.see(actual_bytes, now);
        }
    }

    /// The last size recorded.
    pub fn seen(&self) -> Option<u64> {
        self.seen.map(|(bytes, _)| bytes)
    }

    /// Size and progress; `max_bytes` is used as the size until one is recorded.
    pub fn part(&self, max_bytes: Option<u64>, absence: Option<Absence>, now: Instant) -> Part {
        let actual_bytes = self.seen().or(max_bytes).unwrap_or(0);
        let target_bytes = self.target.as_ref().map(|target| target.bytes);
        let promised = target_bytes.max(self.in_doubt_bytes).unwrap_or(0);
        let promised = promised.min(max_bytes.unwrap_or(u64::MAX));
        let progress = match (absence, &self.target) {
            (Some(absence), _) => Progress::Absent(absence),
            (None, None) => Progress::NoTarget,
            (None, Some(target)) => target.progress(self.patience, now),
        };
        Part {
            actual_bytes,
            target_bytes,
            in_doubt: self.in_doubt_bytes.is_some(),
            reserved_bytes: actual_bytes.max(promised),
            max_bytes,
            min_bytes: 0,
            progress,
            age_ms: self
                .seen
                .map(|(_, at)| as_ms(now.saturating_duration_since(at))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    /// Time `seconds` after `start`.
    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    fn progress(tracker: &Tracker, now: Instant) -> Progress {
        tracker.part(Some(512 * MIB), None, now).progress
    }

    fn reserved_mib(tracker: &Tracker, now: Instant) -> u64 {
        tracker.part(Some(512 * MIB), None, now).reserved_bytes / MIB
    }

    #[test]
    fn one_that_follows_is_late_after_a_while_and_stuck_when_it_stops() {
        let start = Instant::now();
        let mut tracker = Tracker::new(Patience::default());
        tracker.see(512 * MIB, start);
        assert_eq!(progress(&tracker, start), Progress::NoTarget);
        tracker.tell(400 * MIB, true, start);
        for second in 1..=5 {
            tracker.see((512 - 4 * second) * MIB, at(start, second));
        }
        let following = Progress::Following {
            bytes_per_second: 4 * MIB,
            left_bytes: 92 * MIB,
        };
        assert_eq!(progress(&tracker, at(start, 5)), following);
        assert_eq!(reserved_mib(&tracker, at(start, 5)), 492);
        tracker.see(490 * MIB, at(start, 10));
        let late = progress(&tracker, at(start, 10));
        let Progress::Late {
            left_bytes,
            bytes_per_second,
        } = late
        else {
            panic!("{late:?}");
        };
        assert_eq!((left_bytes, bytes_per_second), (90 * MIB, 22 * MIB / 10));
        // Slightly back, and no nearer.
        for second in 11..=20 {
            tracker.see(491 * MIB, at(start, second));
        }
        let stuck = Progress::Stuck {
            unchanged_ms: 10_000,
            left_bytes: 91 * MIB,
        };
        assert_eq!(progress(&tracker, at(start, 20)), stuck);
        tracker.see(399 * MIB, at(start, 21));
        assert_eq!(progress(&tracker, at(start, 21)), Progress::Reached);
        assert_eq!(reserved_mib(&tracker, at(start, 21)), 400);
    }

    #[test]
    fn what_grows_is_reserved_from_the_moment_it_may_grow() {
        let start = Instant::now();
        let mut tracker = Tracker::new(Patience::default());
        tracker.see(100 * MIB, start);
        tracker.tell(200 * MIB, true, start);
        assert_eq!(reserved_mib(&tracker, start), 200);
        tracker.see(210 * MIB, at(start, 1));
        assert_eq!(progress(&tracker, at(start, 1)), Progress::Reached);
        assert_eq!(reserved_mib(&tracker, at(start, 1)), 210);
    }

    #[test]
    fn a_target_in_doubt_counts_beside_the_one_before_until_one_is_sure() {
        let now = Instant::now();
        let mut tracker = Tracker::new(Patience::default());
        tracker.see(100 * MIB, now);
        tracker.tell(200 * MIB, true, now);
        tracker.tell(50 * MIB, false, now);
        assert_eq!(reserved_mib(&tracker, now), 200);
        tracker.tell(300 * MIB, false, now);
        tracker.tell(40 * MIB, false, now);
        assert_eq!(reserved_mib(&tracker, now), 300);
        tracker.tell(40 * MIB, true, now);
        assert_eq!(reserved_mib(&tracker, now), 100);
        assert!(!tracker.part(None, None, now).in_doubt);
    }

    #[test]
    fn a_target_told_again_does_not_begin_anew() {
        let start = Instant::now();
        let mut tracker = Tracker::new(Patience::default());
        tracker.see(512 * MIB, start);
        for second in 0..=10 {
            tracker.tell(400 * MIB, true, at(start, second));
            tracker.see(512 * MIB, at(start, second));
        }
        let stuck = progress(&tracker, at(start, 10));
        assert!(matches!(stuck, Progress::Stuck { .. }), "{stuck:?}");
    }

    #[test]
    fn who_leaves_its_target_is_stuck_only_after_its_time() {
        let start = Instant::now();
        let mut tracker = Tracker::new(Patience::default());
        tracker.see(512 * MIB, start);
        tracker.tell(400 * MIB, true, start);
        tracker.see(400 * MIB, at(start, 1));
        tracker.see(400 * MIB, at(start, 100));
        tracker.see(450 * MIB, at(start, 101));
        let following = progress(&tracker, at(start, 101));
        assert!(
            matches!(following, Progress::Following { .. }),
            "{following:?}"
        );
        assert_eq!(reserved_mib(&tracker, at(start, 101)), 450);
        tracker.see(450 * MIB, at(start, 111));
        let stuck = progress(&tracker, at(start, 111));
        assert!(matches!(stuck, Progress::Stuck { .. }), "{stuck:?}");
    }

    #[test]
    fn who_never_answered_has_all() {
        let tracker = Tracker::new(Patience::default());
        let part = tracker.part(Some(512 * MIB), None, Instant::now());
        assert_eq!((part.actual_bytes, part.age_ms), (512 * MIB, None));
    }

    proptest! {
        #[test]
        fn all_that_may_be_in_force_is_reserved(
            steps in vec((0u64..3, 0u64..512), 1..40),
        ) {
            let now = Instant::now();
            let mut tracker = Tracker::new(Patience::default());
            let (mut actual_bytes, mut in_force) = (0, Vec::new());
            for (kind, mib) in steps {
                let bytes = mib * MIB;
                match kind {
                    0 => {
                        tracker.see(bytes, now);
                        actual_bytes = bytes;
                    }
                    1 => {
                        tracker.tell(bytes, true, now);
                        in_force = vec![bytes];
                    }
                    _ => {
                        tracker.tell(bytes, false, now);
                        in_force.push(bytes);
                    }
                }
                let most = in_force.iter().copied().fold(actual_bytes, u64::max);
                let part = tracker.part(None, None, now);
                prop_assert_eq!(part.reserved_bytes, most);
                prop_assert_eq!(part.actual_bytes, actual_bytes);
            }
        }
    }
}
