//! Moves memory unit by unit from the VM that loses least to the VM that gains most (\[LS07\] §4.2).
//!
//! Starts at the present sizes and ends when no such move pays. It considers only one unit at a time: before a cliff,
//! where one unit changes nothing and many would change much, it does not move.
//!
//! Cost: `O(log n)` per move for `n` VMs, and at most [`MOVES_MAX`] moves.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::candidate::{self, Candidate, Grid};

/// Limit on the number of moves; the search then returns its current allocation.
pub(crate) const MOVES_MAX: usize = 1 << 22;

/// A gain below this is rounding.
const GAIN_MIN: f64 = 1e-12;

/// A VM's size and the candidate that it belongs to.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Place {
    candidate: usize,
    size: u64,
}

/// Value of a step up or down; an offer of an older version is out of date.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Offer {
    worth: f64,
    vm: usize,
    version: u64,
}

impl Eq for Offer {}

impl Ord for Offer {
    fn cmp(&self, other: &Self) -> Ordering {
        let worth = self.worth.total_cmp(&other.worth);
        // Among equals, the first VM.
        worth
            .then(other.vm.cmp(&self.vm))
            .then(other.version.cmp(&self.version))
    }
}

impl PartialOrd for Offer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

struct Market<'a> {
    lists: &'a [Vec<Candidate>],
    grids: &'a [Grid],
    places: Vec<Place>,
    gains: BinaryHeap<Offer>,
    losses: BinaryHeap<Reverse<Offer>>,
    /// The current version of each VM's offers.
    gain_versions: Vec<u64>,
    loss_versions: Vec<u64>,
    free: u64,
}

/// Searches allocations of `capacity`, starting at the present sizes. The smallest candidates of all must fit.
pub(crate) fn search(
    lists: &[Vec<Candidate>],
    grids: &[Grid],
    current: &[u64],
    capacity: u64,
) -> Vec<u64> {
    let places = lists.iter().zip(grids).zip(current);
    let places: Vec<_> = places
        .map(|((list, grid), &size)| {
            let size = candidate::at_or_below(list, grid, size);
            let candidate = list.partition_point(|candidate| candidate.to < size);
            Place { candidate, size }
        })
        .collect();
    let mut market = Market {
        lists,
        grids,
        gains: BinaryHeap::new(),
        losses: BinaryHeap::new(),
        gain_versions: vec![0; places.len()],
        loss_versions: vec![0; places.len()],
        places,
        free: 0,
    };
    for vm in 0..lists.len() {
        market.offer_gain(vm);
        market.offer_loss(vm);
    }
    market.fit(capacity);
    for _ in 0..MOVES_MAX {
        if !market.trade() {
            break;
        }
    }
    market.places.iter().map(|place| place.size).collect()
}

impl Market<'_> {
    fn up(&self, vm: usize) -> Option<Place> {
        let (place, list) = (self.places[vm], &self.lists[vm]);
        let next = self.grids[vm].at_or_above(place.size + 1);
        if next <= list[place.candidate].to {
            return Some(Place {
                size: next,
                ..place
            });
        }
        let after = list.get(place.candidate + 1)?;
        Some(Place {
            candidate: place.candidate + 1,
            size: after.from,
        })
    }

    fn down(&self, vm: usize) -> Option<Place> {
        let (place, list) = (self.places[vm], &self.lists[vm]);
        if place.size > list[place.candidate].from {
            let size = self.grids[vm].at_or_below(place.size - 1);
            return Some(Place { size, ..place });
        }
        let candidate = place.candidate.checked_sub(1)?;
        Some(Place {
            candidate,
            size: list[candidate].to,
        })
    }

    /// The next step down. Sizes at which the VM has the same misses are skipped in one step, as far as `pages` are
    /// needed, because there may be very many.
    fn down_by(&self, vm: usize, pages: u64) -> Option<Place> {
        let down = self.down(vm)?;
        let left = self.places[vm].size.saturating_sub(pages);
        let far = left.max(self.lists[vm][down.candidate].from);
        Some(Place {
            size: down.size.min(self.grids[vm].at_or_below(far)),
            ..down
        })
    }

    fn cost(&self, vm: usize, place: Place) -> f64 {
        self.lists[vm][place.candidate].cost
    }

    /// Computes the value of VM `vm`'s next step up and replaces its last offer.
    fn offer_gain(&mut self, vm: usize) {
        self.gain_versions[vm] += 1;
        if let Some(up) = self.up(vm) {
            let worth = self.cost(vm, self.places[vm]) - self.cost(vm, up);
            let version = self.gain_versions[vm];
            self.gains.push(Offer { worth, vm, version });
        }
    }

    /// Computes the value of VM `vm`'s next step down and replaces its last offer.
    fn offer_loss(&mut self, vm: usize) {
        self.loss_versions[vm] += 1;
        if let Some(down) = self.down(vm) {
            let worth = self.cost(vm, down) - self.cost(vm, self.places[vm]);
            let version = self.loss_versions[vm];
            self.losses.push(Reverse(Offer { worth, vm, version }));
        }
    }

    /// The smallest loss of a VM other than `but`.
    fn least_loss(&mut self, but: Option<usize>) -> Option<Offer> {
        let mut aside = None;
        let found = loop {
            let Some(Reverse(offer)) = self.losses.pop() else {
                break None;
            };
            if self.loss_versions[offer.vm] != offer.version {
                continue;
            }
            if Some(offer.vm) == but {
                aside = Some(Reverse(offer));
                continue;
            }
            break Some(offer);
        };
        self.losses.extend(aside);
        found
    }

    /// Takes memory from the VMs that lose least until the allocation fits.
    fn fit(&mut self, capacity: u64) {
        let sum = |market: &Self| -> u128 {
            let sizes = market.places.iter().map(|place| u128::from(place.size));
            sizes.sum()
        };
        let mut taken = sum(self);
        while taken > u128::from(capacity) {
            let Some(offer) = self.least_loss(None) else {
                break;
            };
            let over = u64::try_from(taken - u128::from(capacity)).unwrap_or(u64::MAX);
            let Some(down) = self.down_by(offer.vm, over) else {
                continue;
            };
            taken -= u128::from(self.places[offer.vm].size - down.size);
            self.places[offer.vm] = down;
            self.offer_gain(offer.vm);
            self.offer_loss(offer.vm);
        }
        let free = u128::from(capacity).saturating_sub(taken);
        self.free = u64::try_from(free).unwrap_or(u64::MAX);
    }

    /// Makes the best move, or the next best if that does not pay. Returns whether there was one.
    fn trade(&mut self) -> bool {
        while let Some(offer) = self.gains.pop() {
            if self.gain_versions[offer.vm] != offer.version {
                continue;
            }
            if offer.worth <= GAIN_MIN {
                return false;
            }
            let Some(up) = self.up(offer.vm) else {
                continue;
            };
            if self.buy(offer, up) {
                return true;
            }
        }
        false
    }

    /// Moves a VM up if the memory it needs is free or can be taken for less than its gain; otherwise changes nothing.
    fn buy(&mut self, offer: Offer, up: Place) -> bool {
        let needed = up.size - self.places[offer.vm].size;
        let (mut free, mut loss, mut sold) = (self.free, 0.0, Vec::new());
        while free < needed {
            let Some(seller) = self.least_loss(Some(offer.vm)) else {
                break;
            };
            loss += seller.worth;
            if loss > offer.worth - GAIN_MIN {
                self.losses.push(Reverse(seller));
                break;
            }
            if let Some(down) = self.down_by(seller.vm, needed - free) {
                sold.push((seller.vm, self.places[seller.vm]));
                free += self.places[seller.vm].size - down.size;
                self.places[seller.vm] = down;
                self.offer_loss(seller.vm);
            }
        }
        if free < needed {
            // Their offers to buy stay valid, tried or not; otherwise two VMs could trigger each other forever.
            for (vm, place) in sold.into_iter().rev() {
                self.places[vm] = place;
                self.offer_loss(vm);
            }
            return false;
        }
        self.free = free - needed;
        self.places[offer.vm] = up;
        self.offer_loss(offer.vm);
        self.offer_gain(offer.vm);
        for (vm, _) in sold {
            self.offer_gain(vm);
        }
        true
    }
}
