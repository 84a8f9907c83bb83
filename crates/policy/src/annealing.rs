//! Simulated annealing (\[LS07\] §4.2 names it for more than three VMs).
//!
//! A move changes one VM to a candidate near its present one and, if that needs memory that is not free, another VM to
//! a smaller one. Improvements are accepted; deteriorations with a probability that falls with the loss and with time.
//!
//! Cost: `O(log k)` per move for `k` candidates per VM; the number of moves grows with the number of VMs.

use crate::candidate::Candidate;
use crate::hull::{Selection, largest_within, pages_of, spend};

/// Number of moves tried: a constant, and an addition for each VM.
const MOVES: usize = 5_000;
const MOVES_PER_VM: usize = 2_000;

/// Loss that is accepted with a probability of about one third: at the start, and at the end.
const HOT: f64 = 0.1;
const COLD: f64 = 1e-6;

/// Random number generator: splitmix64.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = self.0;
        let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `bound`, which is 1 or more.
    fn below(&mut self, bound: usize) -> usize {
        let product = u128::from(self.bits()) * bound as u128;
        usize::try_from(product >> 64).unwrap_or(0)
    }

    /// A number from 0.0 up to, not including, 1.0.
    fn share(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Searches allocations of `capacity`, beginning with `picks`, which must fit.
pub(crate) fn search(
    lists: &[Vec<Candidate>],
    picks: Vec<usize>,
    capacity: u64,
    seed: u64,
) -> Selection {
    let movable: Vec<_> = (0..lists.len()).filter(|&vm| lists[vm].len() > 1).collect();
    let mut best = Selection::new(lists, picks);
    if movable.is_empty() {
        return best;
    }
    let mut random = Random(seed);
    let mut now = best.picks.clone();
    let mut cost = best.cost;
    let mut free = capacity - pages_of(lists, &now);
    let moves = MOVES + MOVES_PER_VM * movable.len();
    let cooling = (COLD / HOT).powf(1.0 / moves as f64);
    let mut heat = HOT;
    for _ in 0..moves {
        heat *= cooling;
        let vm = movable[random.below(movable.len())];
        let to = near(&mut random, now[vm], lists[vm].len());
        let (from, into) = (lists[vm][now[vm]], lists[vm][to]);
        let other = movable[random.below(movable.len())];
        let left = (free + from.from).checked_sub(into.from);
        let payment = match left {
            Some(left) => Some((other, now[other], left)),
            None if other == vm => None,
            None => {
                let payer = lists[other][now[other]].from;
                let most = (free + from.from + payer).checked_sub(into.from);
                most.and_then(|most| {
                    let down = largest_within(&lists[other], most)?;
                    Some((other, down, most - lists[other][down].from))
                })
            }
        };
        let Some((other, down, left)) = payment else {
            continue;
        };
        let change =
            into.cost - from.cost + lists[other][down].cost - lists[other][now[other]].cost;
        if change <= 0.0 || random.share() < (-change / heat).exp() {
            // In this order: if memory is left, `other` keeps its candidate and may be `vm` itself.
            now[other] = down;
            now[vm] = to;
            free = left;
            cost += change;
            if cost < best.cost {
                best.cost = cost;
                best.picks.copy_from_slice(&now);
            }
        }
    }
    let slack = capacity - pages_of(lists, &best.picks);
    spend(lists, &mut best, slack);
    best
}

/// Draws a candidate other than `at`; nearer ones are more likely. There must be two or more.
fn near(random: &mut Random, at: usize, len: usize) -> usize {
    let bits = (len - 1).ilog2() as usize + 1;
    let reach = 1_usize << random.below(bits);
    let way = 1 + random.below(reach);
    let (up, down) = ((at + way).min(len - 1), at.saturating_sub(way));
    let up_first = random.bits() & 1 == 0;
    match (up_first, up == at, down == at) {
        (true, false, _) | (false, _, true) => up,
        _ => down,
    }
}
