//! How far something has followed its target. No input or output: it is told targets and sizes, and the time of each.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A size this near to its target is there: the largest pages of guests' kernels.
const SLACK_BYTES: u64 = 64 << 10;
/// Sizes kept to tell the pace by.
const SIZES_MAX: usize = 16;

/// How long a target may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// After so long without coming nearer to its target it is stuck, in ms.
    pub stuck_ms: u64,
    /// After so long on the way it is late, in ms.
    pub late_ms: u64,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            stuck_ms: 10_000,
            late_ms: 10_000,
        }
    }
}

/// Why a target is of no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// The VM has no balloon, or is no VM that could have one.
    NoDevice,
    /// The guest has never answered to its balloon: no driver, or it still boots. It follows when its driver comes.
    NoDriver,
}

/// How far a part has followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Nobody is there to follow.
    Absent(Absence),
    /// No target was told since this process looks.
    Untold,
    /// It is where it should be.
    Reached,
    /// It is on its way.
    Following {
        /// Its pace over the last looks.
        bytes_per_second: u64,
        /// What is missing.
        left_bytes: u64,
    },
    /// It is on its way for longer than [`Patience::late_ms`].
    Late {
        /// Its pace over the last looks.
        bytes_per_second: u64,
        /// What is missing.
        left_bytes: u64,
    },
    /// It has not come nearer for [`Patience::stuck_ms`].
    Stuck {
        /// Since when, in ms.
        unchanged_ms: u64,
        /// What is missing.
        left_bytes: u64,
    },
}

/// One of the memories of a VM, by the last answers. A part that never answered has its most, and is as old as can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// What it has.
    pub actual_bytes: u64,
    /// What it was last told to have; `None` if nothing was told since this process looks.
    pub target_bytes: Option<u64>,
    /// Whether that target may not have arrived; setting it again settles it.
    pub in_doubt: bool,
    /// What it may have at most without being told anything more. A target that another process told, and that
    /// is not reached, is not known here: whoever begins tells every part its size once.
    pub reserved_bytes: u64,
    /// What it can have at most, as the VM's RAM; `None` if that is not known.
    pub max_bytes: Option<u64>,
    /// How far it has followed.
    pub progress: Progress,
    /// How old the answer is, in ms; `None` if there was never one.
    pub age_ms: Option<u64>,
}

/// A target and who is to follow it.
#[derive(Debug)]
pub(crate) struct Follower {
    patience: Patience,
    /// The last size seen, and when.
    seen: Option<(u64, Instant)>,
    target: Option<Target>,
    /// Targets that may still be in force beside the last one: the largest of them.
    in_doubt_bytes: Option<u64>,
}

#[derive(Debug)]
struct Target {
    bytes: u64,
    told: Instant,
    /// What it should do: become smaller, or larger. A size beyond the target is all right.
    shrink: bool,
    /// How near it came, and when.
    nearest: Option<(u64, Instant)>,
    /// What was missing lately.
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
            // Whoever leaves its target again begins anew.
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
            // Told since the last look.
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

impl Follower {
    pub fn new(patience: Patience) -> Self {
        Self {
            patience,
            seen: None,
            target: None,
            in_doubt_bytes: None,
        }
    }

    /// A target was sent; `surely` if the answer came.
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
            // Told again: its time goes on.
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

    /// The size, as it is now.
    pub fn see(&mut self, actual_bytes: u64, now: Instant) {
        self.seen = Some((actual_bytes, now));
        if let Some(target) = &mut self.target {
            target.see(actual_bytes, now);
        }
    }

    /// The last size seen.
    pub fn seen(&self) -> Option<u64> {
        self.seen.map(|(bytes, _)| bytes)
    }

    /// What is known; `max_bytes` stands for the size until one was seen.
    pub fn part(&self, max_bytes: Option<u64>, absence: Option<Absence>, now: Instant) -> Part {
        let actual_bytes = self.seen().or(max_bytes).unwrap_or(0);
        let target_bytes = self.target.as_ref().map(|target| target.bytes);
        let promised = target_bytes.max(self.in_doubt_bytes).unwrap_or(0);
        let promised = promised.min(max_bytes.unwrap_or(u64::MAX));
        let progress = match (absence, &self.target) {
            (Some(absence), _) => Progress::Absent(absence),
            (None, None) => Progress::Untold,
            (None, Some(target)) => target.progress(self.patience, now),
        };
        Part {
            actual_bytes,
            target_bytes,
            in_doubt: self.in_doubt_bytes.is_some(),
            reserved_bytes: actual_bytes.max(promised),
            max_bytes,
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

    /// Seconds after a moment.
    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    fn progress(follower: &Follower, now: Instant) -> Progress {
        follower.part(Some(512 * MIB), None, now).progress
    }

    fn reserved_mib(follower: &Follower, now: Instant) -> u64 {
        follower.part(Some(512 * MIB), None, now).reserved_bytes / MIB
    }

    #[test]
    fn one_that_follows_is_late_after_a_while_and_stuck_when_it_stops() {
        let start = Instant::now();
        let mut follower = Follower::new(Patience::default());
        follower.see(512 * MIB, start);
        assert_eq!(progress(&follower, start), Progress::Untold);
        follower.tell(400 * MIB, true, start);
        for second in 1..=5 {
            follower.see((512 - 4 * second) * MIB, at(start, second));
        }
        let following = Progress::Following {
            bytes_per_second: 4 * MIB,
            left_bytes: 92 * MIB,
        };
        assert_eq!(progress(&follower, at(start, 5)), following);
        assert_eq!(reserved_mib(&follower, at(start, 5)), 492);
        follower.see(490 * MIB, at(start, 10));
        let late = progress(&follower, at(start, 10));
        let Progress::Late {
            left_bytes,
            bytes_per_second,
        } = late
        else {
            panic!("{late:?}");
        };
        assert_eq!((left_bytes, bytes_per_second), (90 * MIB, 22 * MIB / 10));
        // Back a little, and no nearer.
        for second in 11..=20 {
            follower.see(491 * MIB, at(start, second));
        }
        let stuck = Progress::Stuck {
            unchanged_ms: 10_000,
            left_bytes: 91 * MIB,
        };
        assert_eq!(progress(&follower, at(start, 20)), stuck);
        follower.see(399 * MIB, at(start, 21));
        assert_eq!(progress(&follower, at(start, 21)), Progress::Reached);
        assert_eq!(reserved_mib(&follower, at(start, 21)), 400);
    }

    #[test]
    fn what_grows_is_reserved_from_the_moment_it_may_grow() {
        let start = Instant::now();
        let mut follower = Follower::new(Patience::default());
        follower.see(100 * MIB, start);
        follower.tell(200 * MIB, true, start);
        assert_eq!(reserved_mib(&follower, start), 200);
        follower.see(210 * MIB, at(start, 1));
        assert_eq!(progress(&follower, at(start, 1)), Progress::Reached);
        assert_eq!(reserved_mib(&follower, at(start, 1)), 210);
    }

    #[test]
    fn a_target_in_doubt_counts_beside_the_one_before_until_one_is_sure() {
        let now = Instant::now();
        let mut follower = Follower::new(Patience::default());
        follower.see(100 * MIB, now);
        follower.tell(200 * MIB, true, now);
        follower.tell(50 * MIB, false, now);
        assert_eq!(reserved_mib(&follower, now), 200);
        follower.tell(300 * MIB, false, now);
        follower.tell(40 * MIB, false, now);
        assert_eq!(reserved_mib(&follower, now), 300);
        follower.tell(40 * MIB, true, now);
        assert_eq!(reserved_mib(&follower, now), 100);
        assert!(!follower.part(None, None, now).in_doubt);
    }

    #[test]
    fn a_target_told_again_does_not_begin_anew() {
        let start = Instant::now();
        let mut follower = Follower::new(Patience::default());
        follower.see(512 * MIB, start);
        for second in 0..=10 {
            follower.tell(400 * MIB, true, at(start, second));
            follower.see(512 * MIB, at(start, second));
        }
        let stuck = progress(&follower, at(start, 10));
        assert!(matches!(stuck, Progress::Stuck { .. }), "{stuck:?}");
    }

    #[test]
    fn who_leaves_its_target_is_stuck_only_after_its_time() {
        let start = Instant::now();
        let mut follower = Follower::new(Patience::default());
        follower.see(512 * MIB, start);
        follower.tell(400 * MIB, true, start);
        follower.see(400 * MIB, at(start, 1));
        follower.see(400 * MIB, at(start, 100));
        follower.see(450 * MIB, at(start, 101));
        let following = progress(&follower, at(start, 101));
        assert!(
            matches!(following, Progress::Following { .. }),
            "{following:?}"
        );
        assert_eq!(reserved_mib(&follower, at(start, 101)), 450);
        follower.see(450 * MIB, at(start, 111));
        let stuck = progress(&follower, at(start, 111));
        assert!(matches!(stuck, Progress::Stuck { .. }), "{stuck:?}");
    }

    #[test]
    fn who_never_answered_has_all() {
        let follower = Follower::new(Patience::default());
        let part = follower.part(Some(512 * MIB), None, Instant::now());
        assert_eq!((part.actual_bytes, part.age_ms), (512 * MIB, None));
    }

    proptest! {
        #[test]
        fn all_that_may_be_in_force_is_reserved(
            steps in vec((0u64..3, 0u64..512), 1..40),
        ) {
            let now = Instant::now();
            let mut follower = Follower::new(Patience::default());
            let (mut actual_bytes, mut in_force) = (0, Vec::new());
            for (kind, mib) in steps {
                let bytes = mib * MIB;
                match kind {
                    0 => {
                        follower.see(bytes, now);
                        actual_bytes = bytes;
                    }
                    1 => {
                        follower.tell(bytes, true, now);
                        in_force = vec![bytes];
                    }
                    _ => {
                        follower.tell(bytes, false, now);
                        in_force.push(bytes);
                    }
                }
                let most = in_force.iter().copied().fold(actual_bytes, u64::max);
                let part = follower.part(None, None, now);
                prop_assert_eq!(part.reserved_bytes, most);
                prop_assert_eq!(part.actual_bytes, actual_bytes);
            }
        }
    }
}
