//! Simulated annealing (\[LS07\] §4.2 names it for more than three VMs).
//!
//! A move changes one VM to a candidate near its present one and, if that needs memory that is not free, another VM to
//! a smaller one. Improvements are accepted; deteriorations with a probability that falls with the loss and with time.
//!
//! Cost: `O(log k)` per move for `k` candidates per VM; the number of moves grows with the number of VMs.

use plimsoll_flow::SplitMix;

use crate::candidate::Candidate;
use crate::hull::{Selection, largest_within, pages_of, spend};

/// Number of moves tried: a constant, and an addition for each VM.
const MOVES: usize = 5_000;
const MOVES_PER_VM: usize = 2_000;

/// Loss that is accepted with a probability of about one third: at the start, and at the end.
const HOT: f64 = 0.1;
const COLD: f64 = 1e-6;

/// A random index of `len` things, of which there is at least one.
fn index(random: &mut SplitMix, len: usize) -> usize {
    usize::try_from(random.below(len as u64)).unwrap_or(0)
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
    let mut random = SplitMix(seed);
    let mut now = best.picks.clone();
    let mut cost = best.cost;
    let mut free = capacity - pages_of(lists, &now);
    let moves = MOVES + MOVES_PER_VM * movable.len();
    let cooling = (COLD / HOT).powf(1.0 / moves as f64);
    let mut heat = HOT;
    for _ in 0..moves {
        heat *= cooling;
        let vm = movable[index(&mut random, movable.len())];
        let to = near(&mut random, now[vm], lists[vm].len());
        let (from, into) = (lists[vm][now[vm]], lists[vm][to]);
        let other = movable[index(&mut random, movable.len())];
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
        if change <= 0.0 || random.unit() < (-change / heat).exp() {
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
fn near(random: &mut SplitMix, at: usize, len: usize) -> usize {
    let bits = (len - 1).ilog2() as usize + 1;
    let reach = 1_usize << index(random, bits);
    let way = 1 + index(random, reach);
    let (up, down) = ((at + way).min(len - 1), at.saturating_sub(way));
    let up_first = random.bits() & 1 == 0;
    match (up_first, up == at, down == at) {
        (true, false, _) | (false, _, true) => up,
        _ => down,
    }
}
