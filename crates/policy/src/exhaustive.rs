//! Every allocation among at most three VMs (\[LS07\] §4.2).
//!
//! A choice for the first VM leaves two VMs, and of these, the more one takes the less the other can: two indices that
//! move towards each other visit every pair that could be optimal.
//!
//! Cost: `O(k²)` for `k` candidates per VM.

use crate::candidate::Candidate;
use crate::hull::Selection;

/// Maximum number of VMs.
pub(crate) const VMS_MAX: usize = 3;

/// Maximum number of allocations that are tried.
pub(crate) const SELECTIONS_MAX: u64 = 1 << 30;

/// Number of allocations to try.
pub(crate) fn selections(lists: &[Vec<Candidate>]) -> u64 {
    let len = |at: usize| lists.get(at).map_or(1, Vec::len) as u64;
    len(0).saturating_mul(len(1).saturating_add(len(2)))
}

/// The best of all allocations. The smallest candidates of all must fit, and there must be no more than three lists.
pub(crate) fn search(lists: &[Vec<Candidate>], capacity: u64) -> Selection {
    let none = [Candidate {
        from: 0,
        to: 0,
        cost: 0.0,
    }];
    let list = |at: usize| lists.get(at).map_or(&none[..], Vec::as_slice);
    let (first, second, third) = (list(0), list(1), list(2));
    let mut best = (f64::INFINITY, [0, 0, 0]);
    for (at_first, one) in first.iter().enumerate() {
        let Some(left) = capacity.checked_sub(one.from) else {
            break;
        };
        let mut at_third = third.len();
        for (at_second, two) in second.iter().enumerate() {
            let Some(left) = left.checked_sub(two.from) else {
                break;
            };
            while at_third > 0 && third[at_third - 1].from > left {
                at_third -= 1;
            }
            let Some(last) = at_third.checked_sub(1) else {
                break;
            };
            let cost = one.cost + two.cost + third[last].cost;
            if cost < best.0 {
                best = (cost, [at_first, at_second, last]);
            }
        }
    }
    Selection::new(lists, best.1[..lists.len()].to_vec())
}
