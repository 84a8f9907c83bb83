//! When bursts come: a function of the position in the stream, so that any part of a stream knows its own.
//!
//! The stream is divided into stretches; each has one burst at a random position. Stretches get longer, from the length
//! of the burst itself to 128 times that.
//!
//! Not here: what a burst measures (`bursts`).

use std::ops::Range;

use plimsoll_flow::mix;

/// Length of a burst in references, per page of the largest distance.
const LENGTH: usize = 8;

/// Maximum length of a stretch, in bursts.
const STRETCH_MAX: u64 = 128;

/// Stretches grow by a burst at a time with bursts of this many references, and faster with longer ones.
const GROWTH_REFERENCES: u64 = 4096;

/// The positions of all bursts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schedule {
    seed: u64,
    /// Length of a burst in references.
    length: u64,
}

impl Schedule {
    /// Bursts that measure distances up to `distance_max`, eight times as long; none for 0.
    pub(crate) fn new(seed: u64, distance_max: usize) -> Self {
        Self {
            seed,
            length: (distance_max * LENGTH) as u64,
        }
    }

    /// Length of a burst.
    pub(crate) fn burst_references(&self) -> usize {
        usize::try_from(self.length).expect("it was computed as one")
    }

    /// The largest distance measured.
    pub(crate) fn distance_max(&self) -> usize {
        self.burst_references() / LENGTH
    }

    /// How much longer each stretch is than the one before, in bursts.
    fn growth(&self) -> u64 {
        (self.length / GROWTH_REFERENCES).max(1)
    }

    /// Length of a stretch, counted from 0, in bursts.
    pub(crate) fn weight(&self, stretch: u64) -> u64 {
        (stretch.saturating_mul(self.growth()) + 1).min(STRETCH_MAX)
    }

    /// The first stretch of the maximum length.
    fn longest(&self) -> u64 {
        (STRETCH_MAX - 1).div_ceil(self.growth())
    }

    /// Length of all stretches before this one, in bursts.
    fn bursts_before(&self, stretch: u64) -> u64 {
        let rising = stretch.min(self.longest());
        let rising_bursts = self.growth() * (rising * rising.saturating_sub(1) / 2) + rising;
        rising_bursts.saturating_add((stretch - rising).saturating_mul(STRETCH_MAX))
    }

    /// The positions of a stretch's burst.
    pub(crate) fn burst(&self, stretch: u64) -> Range<u64> {
        let begin = self.bursts_before(stretch).saturating_mul(self.length);
        let room = (self.weight(stretch) - 1) * self.length;
        // The first stretch has no room.
        let start = begin.saturating_add(mix(self.seed ^ mix(stretch)) % (room + 1));
        start..start.saturating_add(self.length)
    }

    /// The stretch in which a position lies.
    fn stretch_at(&self, position: u64) -> u64 {
        let bursts = position / self.length;
        let longest = self.longest();
        match bursts.checked_sub(self.bursts_before(longest)) {
            Some(beyond) => longest + beyond / STRETCH_MAX,
            None => (0..longest)
                .rfind(|&stretch| self.bursts_before(stretch) <= bursts)
                .unwrap_or(0),
        }
    }

    /// Number of references of bursts before a position.
    pub(crate) fn references_before(&self, position: u64) -> u64 {
        let stretch = self.stretch_at(position);
        let of_this = position.saturating_sub(self.burst(stretch).start);
        stretch * self.length + of_this.min(self.length)
    }

    /// The parts of a range of positions that lie within bursts, rising.
    pub(crate) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let bursts = (self.stretch_at(range.start)..).map(|stretch| self.burst(stretch));
        let bursts = bursts.take_while(move |burst| burst.start < range.end);
        bursts
            .map(move |burst| burst.start.max(range.start)..burst.end.min(range.end))
            .filter(|part| !part.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The bursts of the first stretches, by adding up one after another.
    fn bursts_in_turn(seed: u64, distance_max: u64, stretches: u64) -> Vec<Range<u64>> {
        let length = 8 * distance_max;
        let growth = (length / 4096).max(1);
        let mut begin = 0;
        let stretches = 0..stretches;
        let bursts = stretches.map(|stretch| {
            let weight = (stretch * growth + 1).min(128);
            let start = begin + mix(seed ^ mix(stretch)) % ((weight - 1) * length + 1);
            begin += weight * length;
            start..start + length
        });
        bursts.collect()
    }

    proptest! {
        #[test]
        fn a_burst_is_where_the_stretches_before_it_put_it(
            seed in any::<u64>(),
            distance_max in prop_oneof![Just(512_u64), Just(2048), 1_u64..3_000],
        ) {
            let schedule = Schedule::new(seed, distance_max as usize);
            for (stretch, burst) in (0..).zip(bursts_in_turn(seed, distance_max, 400)) {
                prop_assert_eq!(schedule.burst(stretch), burst.clone());
                prop_assert_eq!(schedule.references_before(burst.start), stretch * 8 * distance_max);
                prop_assert_eq!(schedule.references_before(burst.end - 1) + 1, (stretch + 1) * 8 * distance_max);
            }
        }

        #[test]
        fn a_range_has_the_bursts_that_it_cuts(
            seed in any::<u64>(),
            distance_max in 1_u64..40,
            (from, length) in (0_u64..200_000, 0_u64..200_000),
        ) {
            let to = from + length;
            let schedule = Schedule::new(seed, distance_max as usize);
            let all = bursts_in_turn(seed, distance_max, 60_000 / distance_max);
            let cut = all.into_iter().map(|burst| burst.start.max(from)..burst.end.min(to));
            let cut: Vec<_> = cut.filter(|part| !part.is_empty()).collect();
            let found: Vec<_> = schedule.within(from..to).collect();
            let references = schedule.references_before(to) - schedule.references_before(from);
            prop_assert_eq!(references, cut.iter().map(|part| part.end - part.start).sum::<u64>());
            prop_assert_eq!(found, cut);
        }
    }

    #[test]
    fn positions_at_the_end_of_all_numbers_are_computed_at_once() {
        for distance_max in [1, 512, 2048] {
            let schedule = Schedule::new(7, distance_max);
            let parts = schedule.within(u64::MAX - 10_000_000..u64::MAX);
            assert!(parts.count() < 10_000_000);
            assert!(schedule.references_before(u64::MAX) < u64::MAX / 100);
        }
    }
}
