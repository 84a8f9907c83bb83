//! Memory scheduler: how many bytes each client should have, and from whom to evict.
//!
//! **Targets.** Every client gets its floor. What is left is divided in proportion to
//!
//! ```text
//! weight * a / (a + c)        a = activity + IDLE,  c = min(mean of all a, BUSY)
//! ```
//!
//! where activity is the client's gets a second or its puts, whichever are more, decayed. (In the long run a client behind which the
//! store is exclusive puts as many pages as it gets; one that fills the store before it reads is active, too.) A client whose share would exceed its ceiling gets its ceiling, and
//! the others share the rest in the same proportion (water-filling), so the targets add up to the
//! capacity unless all clients are at their ceilings. A floor above the ceiling counts as the ceiling.
//! Floors that exceed the capacity together are scaled down in proportion.
//!
//! **Consequences.** If all are equally busy, or all idle, the weights alone decide. If a client becomes idle, its
//! factor `a / (a + c)` goes to 0, and its share goes to the others. Being busier than others has a diminishing effect:
//! no factor exceeds 1, and that of a client of activity `a` is at least `a / (a + BUSY)`, whatever the others do.
//! So beside a client of `BUSY` calls a second or more, no client has more than twice as much for its weight beyond the
//! floors, not even one that scans or puts a million pages a second and finds none. (If `c` were the mean without the limit,
//! there would be no such bound: the scanner alone would raise it and so reduce the factors of the others towards 0.)
//! Clients of few calls are protected less, at one a second 1 % of the weight; they have their floors.
//!
//! **Eviction.** From the client furthest above its target relative to the target. If no client is above its target,
//! the oldest page of all clients is evicted.
//!
//! **Shared pools.** The pages of a shared pool are charged to the pool. Each client's target is divided by the same formula,
//! with equal weights and by the client's own activity, between its private pools together, which have its floor, and each shared
//! pool that it uses. The target of a shared pool is the sum of its clients' parts. So no client's gets or puts take
//! from the private pages of another more than the client's own target allows, and a client that does not use a shared pool gives it next to nothing.
//! Ceilings are divided in the same way; a shared pool has none if one of its clients has none.
//!
//! Source: \[M08\] §2 for allocation by activity and an administrator's parameters, §3 for eviction from one
//! client or from all. It gives no formula; this one is ours.
//! Cost: O(n log n) for the targets of n clients, O(n) for a victim. Allocates only to make `targets` longer.
//! Not here: clock, locks, LRU lists, the eviction itself; hits and misses beyond their number (an observer
//! makes curves of them).

use std::f64::consts::LN_2;
use std::time::Duration;

/// Gets or puts a second from which a client counts as busy.
const BUSY: f64 = 100.0;

/// Calls a second added to each client's activity: so few that thousands of idle clients take next to nothing from a
/// busy one, but they share all that is left equally once no client had a call for half an hour.
const IDLE: f64 = 1e-9;

/// Half-life of the activity of a client that stops, in seconds.
const HALF_LIFE_S: f64 = 30.0;

/// The rate of a client's gets from a pool, or puts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Activity {
    /// Calls a second, decayed with a half-life of 30 s.
    pub(crate) rate: f64,
}

impl Activity {
    /// Adds the calls since the last turn, as if spread evenly over the time elapsed since. With no time
    /// elapsed they count as made at this time.
    pub(crate) fn update(&mut self, since_last_turn: u64, elapsed: Duration) {
        let elapsed_s = elapsed.as_secs_f64();
        let exponent = -LN_2 / HALF_LIFE_S * elapsed_s;
        let per_call = if elapsed.is_zero() {
            LN_2 / HALF_LIFE_S // the limit of the other
        } else {
            -exponent.exp_m1() / elapsed_s
        };
        self.rate = self.rate * exponent.exp() + since_last_turn as f64 * per_call;
    }
}

/// A client's inputs to the allocation of memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Claim {
    /// Its weight relative to the others'; 0 counts as 1.
    pub(crate) weight: u32,
    /// Minimum in bytes, even if idle.
    pub(crate) floor_bytes: u64,
    /// Maximum in bytes, `None` for no limit.
    pub(crate) ceiling_bytes: Option<u64>,
    /// Gets a second or puts, whichever are more, decayed ([`Activity::rate`]).
    pub(crate) activity: f64,
}

impl Claim {
    fn ceiling(&self) -> u64 {
        self.ceiling_bytes.unwrap_or(u64::MAX)
    }

    fn floor(&self) -> u64 {
        self.floor_bytes.min(self.ceiling())
    }

    /// Returns the weight times the factor, in units of 2^-32, at least 1.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the factor is from 0 to 1"
    )]
    fn share(&self, c: f64) -> u64 {
        let a = self.activity + IDLE;
        let factor = (a / (a + c) * f64::from(u32::MAX)) as u64;
        u64::from(self.weight.max(1)) * factor.max(1)
    }
}

/// Fills `targets` with each client's target in bytes. They add up to `capacity_bytes`, or to the
/// sum of the ceilings if that is less. Exact to a byte, with factors in steps of 2^-32.
pub(crate) fn targets(capacity_bytes: u64, claims: &[Claim], targets: &mut Vec<u64>) {
    targets.clear();
    let capacity = u128::from(capacity_bytes);
    let floors: u128 = claims.iter().map(|claim| u128::from(claim.floor())).sum();
    if floors > capacity {
        targets.extend(claims.iter().map(|claim| {
            let scaled = capacity * u128::from(claim.floor()) / floors;
            u64::try_from(scaled).expect("less than the floor")
        }));
        hand_out_rest(capacity_bytes, targets, claims.iter().map(Claim::floor));
        return;
    }

    let sum: f64 = claims.iter().map(|claim| claim.activity + IDLE).sum();
    let c = (sum / claims.len() as f64).min(BUSY);
    // Bytes a claim can take beyond its floor, and its part of `rest`, which is not more.
    let room = |claim: &Claim| claim.ceiling().min(capacity_bytes) - claim.floor();
    let part = |claim: &Claim, rest: u128, shares: u128| {
        let part = (rest * u128::from(claim.share(c))).checked_div(shares);
        let part = part.and_then(|part| u64::try_from(part).ok());
        part.map_or(room(claim), |part| part.min(room(claim)))
    };

    // In the order in which rising water fills them. The first that is not filled when those before it
    // are is not filled in the end either, nor is any after it.
    targets.extend(0..claims.len() as u64);
    #[expect(clippy::cast_possible_truncation, reason = "it was a usize")]
    let claim_at = |index: u64| &claims[index as usize];
    targets.sort_unstable_by(|&left, &right| {
        let (left, right) = (claim_at(left), claim_at(right));
        let left_level = u128::from(room(left)) * u128::from(right.share(c));
        let right_level = u128::from(room(right)) * u128::from(left.share(c));
        left_level.cmp(&right_level)
    });
    let mut rest = capacity - floors;
    let mut shares: u128 = claims.iter().map(|claim| u128::from(claim.share(c))).sum();
    for claim in targets.iter().map(|&index| claim_at(index)) {
        if part(claim, rest, shares) < room(claim) {
            break;
        }
        rest -= u128::from(room(claim));
        shares -= u128::from(claim.share(c));
    }

    // Those filled come out filled again: each one taken out only raised the level for all.
    targets.clear();
    targets.extend(
        claims
            .iter()
            .map(|claim| claim.floor() + part(claim, rest, shares)),
    );
    hand_out_rest(capacity_bytes, targets, claims.iter().map(Claim::ceiling));
}

/// Gives the rounding remainder, less than a byte for each target below its limit, to the first of them.
fn hand_out_rest(capacity_bytes: u64, targets: &mut [u64], limits: impl Iterator<Item = u64>) {
    let mut rest = capacity_bytes - targets.iter().sum::<u64>();
    for (target, limit) in targets.iter_mut().zip(limits) {
        if rest > 0 && *target < limit {
            *target += 1;
            rest -= 1;
        }
    }
}

/// What a client uses, or a part of its pools.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Use {
    pub(crate) used_bytes: u64,
    pub(crate) target_bytes: u64,
    /// Where the floors together exceed the capacity the targets are below them, and this must be the lesser of both: else all
    /// may stay below their floors and none can be chosen.
    pub(crate) floor_bytes: u64,
    /// Whether it has a page that can be evicted.
    pub(crate) is_evictable: bool,
}

/// Chooses whose pages to evict, by position: of those above their target and their floor with an evictable
/// page, the one that uses most for each byte of its target (if equal, the one that uses most). `None` if there is
/// none: then the oldest page of all above their floors is to be evicted.
pub(crate) fn victim(uses: impl Iterator<Item = Use>) -> Option<usize> {
    uses.enumerate()
        .filter(|(_, one)| {
            one.is_evictable && one.used_bytes > one.target_bytes.max(one.floor_bytes)
        })
        .max_by(|(_, left), (_, right)| {
            let of = |one: &Use, other: &Use| {
                u128::from(one.used_bytes) * u128::from(other.target_bytes)
            };
            (of(left, right), left.used_bytes).cmp(&(of(right, left), right.used_bytes))
        })
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn busy(activity: f64) -> Claim {
        Claim {
            weight: 100,
            floor_bytes: 0,
            ceiling_bytes: None,
            activity,
        }
    }

    fn targets_of(capacity_bytes: u64, claims: &[Claim]) -> Vec<u64> {
        let mut of = vec![3; 2]; // former contents do not matter
        targets(capacity_bytes, claims, &mut of);
        of
    }

    /// The definition, in floats: the level of the water by bisection.
    fn naive_targets(capacity: f64, claims: &[Claim]) -> Vec<f64> {
        let bounds = |claim: &Claim| {
            let ceiling = claim.ceiling_bytes.map_or(f64::MAX, |bytes| bytes as f64);
            (
                (claim.floor_bytes as f64).min(ceiling),
                ceiling.min(capacity),
            )
        };
        let floors: f64 = claims.iter().map(|claim| bounds(claim).0).sum();
        if floors > capacity {
            return claims
                .iter()
                .map(|claim| bounds(claim).0 / floors * capacity)
                .collect();
        }
        let mean = claims.iter().map(|claim| claim.activity).sum::<f64>() / claims.len() as f64;
        let at_level = |level: f64| -> Vec<f64> {
            let fill = |claim: &Claim| {
                let (floor, ceiling) = bounds(claim);
                let factor = match claim.activity {
                    _ if mean == 0.0 => 1.0,
                    activity => activity / (activity + mean.min(100.0)),
                };
                (floor + level * f64::from(claim.weight) * factor.max(1e-12)).min(ceiling)
            };
            claims.iter().map(fill).collect()
        };
        let (mut low, mut high) = (0.0, capacity * 1e13);
        for _ in 0..200 {
            let middle = (low + high) / 2.0;
            if at_level(middle).iter().sum::<f64>() < capacity {
                low = middle;
            } else {
                high = middle;
            }
        }
        at_level(high)
    }

    #[test]
    fn weights_alone_divide_among_the_equally_busy_and_among_the_idle() {
        for activity in [0.0, 1e-30, 3.0, 1e6, f64::MAX] {
            let light = busy(activity);
            let heavy = Claim {
                weight: 300,
                ..light
            };
            assert_eq!(
                targets_of(4000, &[light, heavy]),
                [1000, 3000],
                "at {activity}"
            );
        }
    }

    #[test]
    fn busier_is_more_by_the_formula() {
        // The mean is 40: factors 20 / 60 and 60 / 100.
        let of = targets_of(14 * MIB, &[busy(20.0), busy(60.0)]);
        assert!(
            of[0].abs_diff(5 * MIB) <= 1 && of[0] + of[1] == 14 * MIB,
            "{of:?}"
        );
        // Above BUSY: factors 300 / 400 and 900 / 1000.
        let of = targets_of(11 * MIB, &[busy(300.0), busy(900.0)]);
        assert!(
            of[0].abs_diff(5 * MIB) <= 1 && of[0] + of[1] == 11 * MIB,
            "{of:?}"
        );
    }

    #[test]
    fn ceilings_clip_and_the_others_divide_what_is_left() {
        let claims = [
            Claim {
                ceiling_bytes: Some(100),
                ..busy(5.0)
            },
            Claim {
                ceiling_bytes: Some(330),
                ..busy(5.0)
            }, // reached only since the first stops at 100
            busy(5.0),
            Claim {
                floor_bytes: 40,
                ..busy(5.0)
            },
        ];
        assert_eq!(targets_of(1240, &claims), [100, 330, 385, 425]);
        let full = claims.map(|claim| Claim {
            ceiling_bytes: Some(100),
            ..claim
        });
        assert_eq!(targets_of(1240, &full), [100; 4]);
    }

    #[test]
    fn floors_beyond_the_capacity_are_scaled_down() {
        let floor = |floor_bytes| Claim {
            floor_bytes,
            ..busy(9.0)
        };
        assert_eq!(
            targets_of(100, &[floor(300), busy(9.0), floor(100)]),
            [75, 0, 25]
        );
        // 33.3 each: the byte left goes to the first that has a floor.
        assert_eq!(
            targets_of(100, &[busy(9.0), floor(70), floor(70), floor(70)]),
            [0, 34, 33, 33]
        );
        let above_its_ceiling = Claim {
            ceiling_bytes: Some(50),
            ..floor(400)
        };
        assert_eq!(targets_of(1000, &[above_its_ceiling, busy(9.0)]), [50, 950]);
    }

    #[test]
    fn a_weight_of_0_counts_as_1() {
        let claim = |weight| Claim {
            weight,
            ..busy(9.0)
        };
        assert_eq!(
            targets_of(400, &[claim(0), claim(1), claim(2)]),
            [100, 100, 200]
        );
    }

    #[test]
    fn nothing_to_divide_and_nobody_to_divide_among() {
        assert_eq!(targets_of(0, &[busy(1.0), busy(0.0)]), [0, 0]);
        assert_eq!(
            targets_of(
                0,
                &[Claim {
                    floor_bytes: 9,
                    ..busy(1.0)
                }]
            ),
            [0]
        );
        assert_eq!(targets_of(MIB, &[]), []);
        assert_eq!(
            targets_of(
                MIB,
                &[Claim {
                    weight: 0,
                    ..busy(0.0)
                }]
            ),
            [MIB]
        );
    }

    #[test]
    fn a_scanner_gets_at_most_twice_what_a_busy_client_gets() {
        for others in 1..20 {
            let mut claims = vec![busy(BUSY); others];
            claims.push(busy(1e9));
            let of = targets_of(MIB, &claims);
            assert!(of[others] <= 2 * of[0] + 1, "{of:?}");
            assert!(of[others] * 10 > of[0] * 11, "{of:?}");
        }
    }

    #[test]
    fn four_thousand_idle_clients_leave_the_busy_one_nearly_all() {
        let mut claims = vec![busy(0.0); 4095];
        claims.push(busy(1000.0));
        assert!(targets_of(1000 * MIB, &claims)[4095] > 999 * MIB);
    }

    #[test]
    fn the_part_of_a_client_that_falls_idle_flows_to_the_busy_one_down_to_its_floor() {
        let mut idle = Activity { rate: 10_000.0 };
        let mut last = vec![u64::MAX, 0];
        for _ in 0..25 {
            let claim = Claim {
                floor_bytes: 10 * MIB,
                ..busy(idle.rate)
            };
            let of = targets_of(100 * MIB, &[claim, busy(10_000.0)]);
            assert!(of[0] < last[0] && of[1] > last[1], "{last:?} {of:?}");
            last = of;
            idle.update(0, Duration::from_secs(30));
        }
        assert!(last[0] < 10 * MIB + 1000, "{last:?}");
    }

    #[test]
    fn clients_that_all_stop_are_equal_in_the_end() {
        let mut stopped = [Activity { rate: 50_000.0 }, Activity { rate: 50.0 }];
        for _ in 0..60 {
            stopped
                .iter_mut()
                .for_each(|activity| activity.update(0, Duration::from_secs(30)));
        }
        let of = targets_of(1000, &stopped.map(|activity| busy(activity.rate)));
        assert!(of[0].abs_diff(of[1]) <= 2, "{of:?}");
    }

    #[test]
    fn targets_are_written_where_they_were() {
        let mut of = Vec::with_capacity(100);
        let place = of.as_ptr();
        targets(MIB, &[busy(1.0); 100], &mut of);
        assert_eq!((of.len(), of.as_ptr()), (100, place));
    }

    #[test]
    fn activity_comes_to_the_rate_of_gets_and_halves_in_30_seconds() {
        let mut activity = Activity::default();
        activity.update(30 * 500, Duration::from_secs(30));
        assert!((activity.rate - 250.0).abs() < 1e-9);
        for _ in 0..1000 {
            activity.update(500, Duration::from_secs(1));
        }
        assert!((activity.rate - 500.0).abs() < 1e-6);
        activity.update(0, Duration::from_secs(30));
        assert!((activity.rate - 250.0).abs() < 1e-6);
    }

    #[test]
    fn gets_in_no_time_count_as_those_in_next_to_none() {
        let (mut none, mut little) = (Activity { rate: 7.0 }, Activity { rate: 7.0 });
        none.update(1000, Duration::ZERO);
        little.update(1000, Duration::from_nanos(1));
        assert!(none.rate > 30.0 && (none.rate - little.rate).abs() < 1e-6);
        none.update(0, Duration::ZERO);
        assert!((none.rate - little.rate).abs() < 1e-6);
    }

    /// Of (used bytes, target, floor, whether it has a page that can be evicted).
    fn victim_of(uses: &[(u64, u64, u64, bool)]) -> Option<usize> {
        let one = |&(used_bytes, target_bytes, floor_bytes, is_evictable): &_| Use {
            used_bytes,
            target_bytes,
            floor_bytes,
            is_evictable,
        };
        victim(uses.iter().map(one))
    }

    #[test]
    fn the_victim_is_the_one_furthest_above_its_target_relative_to_it() {
        let above = [(300, 200, 0, true), (30, 10, 0, true), (500, 400, 0, true)];
        assert_eq!(victim_of(&above), Some(1));
        let no_target = [(300, 1, 0, true), (3, 0, 0, true), (2, 0, 0, true)];
        assert_eq!(
            victim_of(&no_target),
            Some(1),
            "the larger of two without a target"
        );
        let extreme = [
            (u64::MAX, u64::MAX - 1, 0, true),
            (u64::MAX, u64::MAX - 2, 0, true),
        ];
        assert_eq!(victim_of(&extreme), Some(1));
    }

    #[test]
    fn no_victim_is_at_its_floor_or_its_target_or_has_only_pages_that_must_stay() {
        assert_eq!(victim_of(&[(200, 200, 0, true), (0, 0, 0, true)]), None);
        assert_eq!(victim_of(&[(200, 100, 200, true), (7, 0, 0, false)]), None);
        assert_eq!(
            victim_of(&[(200, 100, 200, true), (201, 200, 200, true)]),
            Some(1)
        );
        assert_eq!(victim_of(&[]), None);
    }

    fn any_claim() -> impl Strategy<Value = Claim> {
        let bytes = || prop_oneof![any::<u64>(), 0..1000u64, u64::MAX - 9..=u64::MAX];
        let activity = prop_oneof![
            0.0..1e7,
            Just(0.0),
            Just(f64::MAX),
            Just(f64::MIN_POSITIVE),
            Just(f64::INFINITY),
            Just(f64::NAN),
        ];
        let weight = prop_oneof![any::<u32>(), 0..200u32];
        (weight, bytes(), prop::option::of(bytes()), activity).prop_map(
            |(weight, floor_bytes, ceiling_bytes, activity)| Claim {
                weight,
                floor_bytes,
                ceiling_bytes,
                activity,
            },
        )
    }

    fn usual_claims() -> impl Strategy<Value = Vec<Claim>> {
        let floor = prop_oneof![Just(0), 0..300 * MIB];
        let ceiling = prop::option::of(0..500 * MIB);
        let activity = prop_oneof![Just(0.0), 1.0..50.0, 1.0..1e5];
        let claim = (1..100u32, floor, ceiling, activity).prop_map(
            |(weight, floor_bytes, ceiling_bytes, activity)| Claim {
                weight,
                floor_bytes,
                ceiling_bytes,
                activity,
            },
        );
        prop::collection::vec(claim, 1..9)
    }

    proptest! {
        #[test]
        fn targets_add_up_and_keep_floors_and_ceilings(
            capacity in prop_oneof![any::<u64>(), 0..2000u64, Just(u64::MAX)],
            claims in prop::collection::vec(any_claim(), 0..12),
        ) {
            let of = targets_of(capacity, &claims);
            prop_assert_eq!(of.len(), claims.len());
            let wide = |bytes: u64| u128::from(bytes);
            let ceilings = claims.iter().map(|claim| wide(claim.ceiling())).sum::<u128>();
            let floors = claims.iter().map(|claim| wide(claim.floor())).sum::<u128>();
            let sum = of.iter().map(|&target| wide(target)).sum::<u128>();
            prop_assert_eq!(sum, ceilings.min(wide(capacity)));
            for (target, claim) in of.iter().zip(&claims) {
                prop_assert!(*target <= claim.ceiling());
                let floor = if floors > wide(capacity) {
                    wide(capacity) * wide(claim.floor()) / floors
                } else {
                    wide(claim.floor())
                };
                prop_assert!(wide(*target) >= floor);
            }
        }

        #[test]
        fn targets_agree_with_the_naive_ones(
            capacity in 1..2000 * MIB,
            claims in usual_claims(),
        ) {
            let naive = naive_targets(capacity as f64, &claims);
            for (target, naive) in targets_of(capacity, &claims).iter().zip(&naive) {
                prop_assert!((*target as f64 - naive).abs() <= 1.0 + capacity as f64 * 1e-5, "{target} {naive}");
            }
        }

        #[test]
        fn equal_claims_have_equal_targets_wherever_they_stand(
            capacity: u64, claims in prop::collection::vec(any_claim(), 1..9), twice: prop::sample::Index,
        ) {
            let mut claims = claims;
            claims.push(*twice.get(&claims));
            let of = targets_of(capacity, &claims);
            let (first, second) = (of[twice.index(claims.len() - 1)], of[claims.len() - 1]);
            prop_assert!(first.abs_diff(second) <= 1, "{first} {second}");
        }

        #[test]
        fn more_weight_never_brings_less(
            capacity: u64, claims in prop::collection::vec(any_claim(), 1..9), more in 1..=u32::MAX,
        ) {
            let mut claims = claims;
            let before = targets_of(capacity, &claims);
            claims[0].weight = claims[0].weight.saturating_add(more);
            let after = targets_of(capacity, &claims);
            prop_assert!(after[0].saturating_add(1) >= before[0]);
            for (before, after) in before.iter().zip(&after).skip(1) {
                prop_assert!(after.saturating_sub(1) <= *before);
            }
        }

        #[test]
        fn more_activity_never_brings_less(
            capacity in 1..2000 * MIB, claims in usual_claims(), more in 1.0..1e6,
        ) {
            let mut claims = claims;
            let before = targets_of(capacity, &claims);
            claims[0].activity += more;
            let after = targets_of(capacity, &claims);
            prop_assert!(after[0] + 1 + capacity / 100_000 >= before[0]);
        }

        #[test]
        fn activity_stays_a_number(
            turns in prop::collection::vec((any::<u64>(), prop_oneof![
                any::<Duration>(), Just(Duration::ZERO), Just(Duration::MAX), (0..9u64).prop_map(Duration::from_nanos),
            ]), 1..50),
        ) {
            let mut activity = Activity::default();
            for (gets, elapsed) in turns {
                activity.update(gets, elapsed);
                prop_assert!(activity.rate >= 0.0 && activity.rate.is_finite());
            }
        }

        #[test]
        fn no_other_client_is_further_above_its_target_than_the_victim(
            clients in prop::collection::vec((0..50u64, 0..50u64, 0..20u64, any::<bool>()), 0..9),
        ) {
            let excess = |&(used, target, ..): &(u64, u64, u64, bool)| used as f64 / target as f64;
            let candidates = || clients.iter().filter(|(used, target, floor, evictable)| {
                used > target && used > floor && *evictable
            });
            match victim_of(&clients) {
                None => prop_assert_eq!(candidates().count(), 0),
                Some(index) => {
                    prop_assert!(candidates().any(|client| *client == clients[index]));
                    prop_assert!(candidates().all(|client| excess(client) <= excess(&clients[index])));
                }
            }
        }
    }
}
