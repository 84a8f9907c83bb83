//! Who is where: the load of each host, and whether more fits.

use std::cmp::Reverse;

use crate::fleet::{Amounts, Fleet};
use crate::rules::Resolved;

/// VMs that are moved as one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Item {
    pub(crate) vms: Vec<usize>,
    pub(crate) need: Amounts,
    /// Bytes of all of them.
    pub(crate) size_bytes: u64,
    /// The host that has most of these bytes.
    pub(crate) origin: usize,
    apart: Vec<usize>,
    /// By host; empty for any.
    hosts: Vec<bool>,
    /// The hosts that it must not leave: none, one, or several that contradict each other.
    stays_on: Vec<usize>,
}

/// Items and hosts; fixed while placing.
#[derive(Debug)]
pub(crate) struct Problem<'a> {
    pub(crate) fleet: &'a Fleet,
    pub(crate) items: Vec<Item>,
}

/// A placement of all items, or of some.
#[derive(Debug, Clone)]
pub(crate) struct Load {
    /// Each item's host; `None` while it has none.
    pub(crate) host_of: Vec<Option<usize>>,
    /// The items of each host.
    pub(crate) items_of: Vec<Vec<usize>>,
    /// What they need together. Does not overflow, because the sum of all needs is checked at the start.
    used: Vec<Amounts>,
}

impl<'a> Problem<'a> {
    pub(crate) fn new(fleet: &'a Fleet, rules: &Resolved) -> Self {
        let items = rules.items.iter().map(|vms| {
            let mut need = vec![0_u32; fleet.slots * 2];
            let mut bytes_on = vec![0_u64; fleet.hosts.len()];
            let mut hosts: Vec<bool> = Vec::new();
            let mut apart: Vec<usize> = Vec::new();
            let mut stays_on: Vec<usize> = Vec::new();
            for &vm in vms {
                let own = &fleet.vms[vm];
                for (sum, need) in need.iter_mut().zip(&own.need) {
                    *sum = sum.saturating_add(*need);
                }
                bytes_on[own.host] += own.size_bytes;
                apart.extend(&rules.apart[vm]);
                if rules.stays[vm] && !stays_on.contains(&own.host) {
                    stays_on.push(own.host);
                }
                if !rules.hosts[vm].is_empty() {
                    hosts.resize(fleet.hosts.len(), true);
                    for (all, own) in hosts.iter_mut().zip(&rules.hosts[vm]) {
                        *all &= own;
                    }
                }
            }
            // Of its own hosts, also if none has a byte of it.
            let own = vms.iter().map(|&vm| fleet.vms[vm].host);
            let most = own.max_by_key(|&host| (bytes_on[host], Reverse(host)));
            Item {
                size_bytes: bytes_on.iter().sum(),
                origin: most.unwrap_or_default(),
                vms: vms.clone(),
                need,
                apart,
                hosts,
                stays_on,
            }
        });
        Self {
            items: items.collect(),
            fleet,
        }
    }

    /// Bytes that move if the item gets to `host`.
    pub(crate) fn moved_bytes(&self, item: usize, host: usize) -> u64 {
        let vms = self.items[item].vms.iter().map(|&vm| &self.fleet.vms[vm]);
        vms.filter(|vm| vm.host != host)
            .map(|vm| vm.size_bytes)
            .sum()
    }

    /// Whether the item could run on the host, whoever else is there.
    pub(crate) fn can_run_on(&self, item: usize, host: usize) -> bool {
        let hosts = &self.items[item].hosts;
        hosts.is_empty() || hosts[host]
    }

    /// Whether a plan may have the item on the host, whoever else is there.
    pub(crate) fn may_be_on(&self, item: usize, host: usize) -> bool {
        let stays_on = &self.items[item].stays_on;
        self.can_run_on(item, host) && stays_on.iter().all(|&stays| stays == host)
    }

    /// Every item on its origin.
    pub(crate) fn load_now(&self) -> Load {
        self.load(self.items.iter().map(|item| item.origin))
    }

    /// Every item on its host of `host_of`.
    pub(crate) fn load(&self, host_of: impl Iterator<Item = usize>) -> Load {
        let mut load = self.nowhere();
        for (item, host) in host_of.enumerate() {
            load.put(self, item, host);
        }
        load
    }

    /// No item on any host.
    pub(crate) fn nowhere(&self) -> Load {
        Load {
            host_of: vec![None; self.items.len()],
            items_of: vec![Vec::new(); self.fleet.hosts.len()],
            used: vec![vec![0; self.fleet.slots * 2]; self.fleet.hosts.len()],
        }
    }

    /// The largest share of a host's capacity that the item needs in any slot; above 1.0 if it does not fit there.
    pub(crate) fn share(&self, item: usize, host: usize) -> f64 {
        let capacity = &self.fleet.hosts[host].capacity;
        largest_share(&self.items[item].need, capacity)
    }
}

fn largest_share(amounts: &[u32], capacity: &[u32]) -> f64 {
    let shares = amounts.iter().zip(capacity);
    let shares = shares.map(|(&amount, &capacity)| match (amount, capacity) {
        (0, _) => 0.0,
        (_, 0) => f64::INFINITY,
        _ => f64::from(amount) / f64::from(capacity),
    });
    shares.fold(0.0, f64::max)
}

impl Load {
    pub(crate) fn put(&mut self, problem: &Problem<'_>, item: usize, host: usize) {
        debug_assert!(self.host_of[item].is_none(), "it has a host");
        self.host_of[item] = Some(host);
        self.items_of[host].push(item);
        let need = &problem.items[item].need;
        for (used, need) in self.used[host].iter_mut().zip(need) {
            *used += need;
        }
    }

    /// Takes the item from its host, and returns that.
    pub(crate) fn take(&mut self, problem: &Problem<'_>, item: usize) -> Option<usize> {
        let host = self.host_of[item].take()?;
        self.items_of[host].retain(|&other| other != item);
        let need = &problem.items[item].need;
        for (used, need) in self.used[host].iter_mut().zip(need) {
            *used -= need;
        }
        Some(host)
    }

    /// The placement without the items of a host.
    pub(crate) fn clone_without(&self, problem: &Problem<'_>, host: usize) -> Self {
        let mut rest = self.clone();
        for &item in &self.items_of[host] {
            rest.take(problem, item);
        }
        rest
    }

    /// Number of hosts that have an item.
    pub(crate) fn hosts_in_use(&self) -> usize {
        let in_use = self.items_of.iter().filter(|items| !items.is_empty());
        in_use.count()
    }

    /// What the host's items need together.
    pub(crate) fn used(&self, host: usize) -> &Amounts {
        &self.used[host]
    }

    /// Whether the needs of the host's items are within its capacity.
    pub(crate) fn is_within(&self, problem: &Problem<'_>, host: usize) -> bool {
        let capacity = &problem.fleet.hosts[host].capacity;
        self.used[host]
            .iter()
            .zip(capacity)
            .all(|(used, capacity)| used <= capacity)
    }

    /// An item that rules forbid on its host because of the host, or of a smaller or equal one because of another item there.
    pub(crate) fn forbidden(&self, problem: &Problem<'_>, host: usize) -> Option<usize> {
        let items = &self.items_of[host];
        let wrong = items.iter().find(|&&item| !problem.may_be_on(item, host));
        let clash = || {
            let mut by_size = items.clone();
            by_size.sort_by_key(|&item| problem.items[item].size_bytes);
            by_size
                .into_iter()
                .find(|&item| self.clashes(problem, item, host))
        };
        wrong.copied().or_else(clash)
    }

    /// Whether another item of the host must not be with this one, or the item's own VMs must not be together.
    fn clashes(&self, problem: &Problem<'_>, item: usize, host: usize) -> bool {
        let apart = &problem.items[item].apart;
        if apart.is_empty() {
            return false;
        }
        let is_twice = |(at, group): (usize, &usize)| apart[..at].contains(group);
        let others = self.items_of[host].iter().filter(|&&other| other != item);
        apart.iter().enumerate().any(is_twice)
            || others
                .flat_map(|&other| &problem.items[other].apart)
                .any(|group| apart.contains(group))
    }

    /// Whether the item, which is not there, may be put on the host.
    pub(crate) fn fits(&self, problem: &Problem<'_>, item: usize, host: usize) -> bool {
        self.has_room(problem, item, host) && problem.may_be_on(item, host)
    }

    /// Whether the item, which is not there, could run on the host.
    pub(crate) fn has_room(&self, problem: &Problem<'_>, item: usize, host: usize) -> bool {
        let capacity = &problem.fleet.hosts[host].capacity;
        let need = &problem.items[item].need;
        let used = &self.used[host];
        // Without an early end: that is one loop of vectors.
        let exceeds = used.iter().zip(need).zip(capacity);
        let exceeds = exceeds.fold(0, |exceeds, ((used, need), capacity)| {
            exceeds | u32::from(used.wrapping_add(*need) > *capacity)
        });
        exceeds == 0 && problem.can_run_on(item, host) && !self.clashes(problem, item, host)
    }

    /// The largest share of the host's capacity that its items and `item` need in any slot.
    pub(crate) fn share_with(&self, problem: &Problem<'_>, item: usize, host: usize) -> f64 {
        let capacity = &problem.fleet.hosts[host].capacity;
        let need = &problem.items[item].need;
        let with: Amounts = self.used[host]
            .iter()
            .zip(need)
            .map(|(used, need)| used + need)
            .collect();
        largest_share(&with, capacity)
    }

    /// The largest share of the host's capacity that its items need in any slot.
    pub(crate) fn share(&self, problem: &Problem<'_>, host: usize) -> f64 {
        largest_share(&self.used[host], &problem.fleet.hosts[host].capacity)
    }
}
