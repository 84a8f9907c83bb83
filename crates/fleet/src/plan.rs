//! A fleet as it is, and a placement, as JSON: sizes, hosts, moves, and how far it is from the best.

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::fleet::{
    BoundedBytes, BoundedCount, ClockNote, CollectedHost, FleetFile, FleetReport, Goal, HostPlace,
    MoveReason, PlacementJson, VmMove, VmPlace,
};

use crate::fleet::{Fleet, Host, Vm, bytes, processors};
use crate::load::Problem;
use crate::place::{Aim, PlaceError, Placement, as_it_is, place};
use crate::rules::Rules;
use crate::{bound, order};

/// Difference of a clock that is worth a note.
const CLOCK_DIFFERENCE_MS: u64 = 5000;

/// Plans where the VMs of `fleet` should run; with a bandwidth, in bytes per second, also how long copying takes.
///
/// # Errors
///
/// Any [`PlaceError`].
pub fn plan(
    fleet: &Fleet,
    rules: &Rules,
    aim: Aim,
    bandwidth: Option<f64>,
) -> Result<PlacementJson, PlaceError> {
    let placement = place(fleet, rules, aim)?;
    let problem = Problem::new(fleet, &rules.resolve(fleet)?);
    let hosts = Hosts::of(fleet, &placement.host_of);
    let before = Hosts::of(
        fleet,
        &fleet.vms.iter().map(|vm| vm.host).collect::<Vec<_>>(),
    );
    let in_use = |hosts: &Hosts| hosts.vms.iter().filter(|&&vms| vms > 0).count() as u64;
    let reason = |vm: usize| {
        let origin = fleet.vms[vm].host;
        if aim.goal == Goal::FewestHosts && hosts.vms[origin] == 0 {
            MoveReason::Emptying
        } else if before.is_within(fleet, origin) {
            MoveReason::Room
        } else {
            MoveReason::Relief
        }
    };
    let order = order::order(fleet, &placement, reason);
    let moves: Vec<VmMove> = order
        .moves
        .iter()
        .map(|step| {
            let vm = &fleet.vms[step.vm];
            VmMove {
                vm: vm.name.clone(),
                uuid: vm.uuid.clone(),
                from: fleet.hosts[step.from].name.clone(),
                to: fleet.hosts[step.to].name.clone(),
                size_bytes: vm.size_bytes,
                copy_s: bandwidth.map(|bandwidth| vm.size_bytes as f64 / bandwidth),
                reason: step.reason,
            }
        })
        .collect();
    let survives = |host: usize| {
        aim.survive_loss
            .then(|| placement.stranded[host].is_empty())
    };
    Ok(PlacementJson {
        schema: SCHEMA,
        goal: aim.goal,
        fits: placement.fits,
        survives_loss: aim
            .survive_loss
            .then(|| placement.stranded.iter().all(Vec::is_empty)),
        is_optimal: placement.is_optimal,
        hosts_used: BoundedCount {
            before: in_use(&before),
            after: in_use(&hosts) + placement.spare.len() as u64,
            at_least: bound::hosts(fleet, aim.survive_loss),
        },
        moved_bytes: BoundedBytes {
            planned: moves.iter().map(|step| step.size_bytes).sum(),
            at_least: bound::moved_bytes(&problem),
        },
        moves,
        vms: vms(fleet, &placement.host_of),
        hosts: (0..fleet.hosts.len())
            .map(|host| hosts.place(fleet, host, survives(host)))
            .collect(),
        problems: problems(fleet, &placement, order.at_once),
    })
}

/// What the VMs of each host need together.
struct Hosts {
    vms: Vec<u64>,
    used: Vec<Vec<u64>>,
    sum_of_peaks: Vec<u64>,
}

impl Hosts {
    fn of(fleet: &Fleet, host_of: &[usize]) -> Self {
        let count = fleet.hosts.len();
        let mut hosts = Self {
            vms: vec![0; count],
            used: vec![vec![0; fleet.slots * 2]; count],
            sum_of_peaks: vec![0; count],
        };
        for (vm, &host) in fleet.vms.iter().zip(host_of) {
            hosts.vms[host] += 1;
            hosts.sum_of_peaks[host] += bytes(most(&vm.need[..fleet.slots]));
            for (used, &need) in hosts.used[host].iter_mut().zip(&vm.need) {
                *used += u64::from(need);
            }
        }
        hosts
    }

    fn is_within(&self, fleet: &Fleet, host: usize) -> bool {
        let capacity = fleet.hosts[host].capacity.iter();
        let mut pairs = self.used[host].iter().zip(capacity);
        pairs.all(|(&used, &capacity)| used <= u64::from(capacity))
    }

    fn place(&self, fleet: &Fleet, host: usize, survives_loss: Option<bool>) -> HostPlace {
        let own = &fleet.hosts[host];
        let (memory, time) = self.used[host].split_at(fleet.slots);
        let processors = own.capacity[fleet.slots];
        let peak = memory.iter().copied().max().unwrap_or_default();
        let busiest = time.iter().copied().max().unwrap_or_default();
        HostPlace {
            host: own.name.clone(),
            vms: self.vms[host],
            capacity_bytes: own.memory_bytes(),
            peak_bytes: peak.saturating_mul(bytes(1)),
            sum_of_peaks_bytes: self.sum_of_peaks[host],
            processors_ratio: (processors != u32::MAX && processors > 0)
                .then(|| busiest as f64 / f64::from(processors)),
            survives_loss,
        }
    }
}

fn most(amounts: &[u32]) -> u32 {
    amounts.iter().copied().max().unwrap_or_default()
}

fn problems(fleet: &Fleet, placement: &Placement, at_once: usize) -> Vec<String> {
    /// Names in a sentence, of many the first.
    fn names(fleet: &Fleet, vms: &[usize]) -> String {
        let first = vms
            .iter()
            .take(3)
            .map(|&vm| format!("{:?}", fleet.vms[vm].name));
        let mut text = first.collect::<Vec<_>>().join(", ");
        if vms.len() > 3 {
            text.push_str(&format!(" and {} more", vms.len() - 3));
        }
        text
    }
    let mut problems = fleet.notes.clone();
    let mut by_host: Vec<Vec<usize>> = vec![Vec::new(); fleet.hosts.len()];
    for &vm in &placement.unplaced {
        by_host[placement.host_of[vm]].push(vm);
    }
    for (host, vms) in fleet.hosts.iter().zip(&by_host) {
        if !vms.is_empty() {
            problems.push(format!(
                "{:?} cannot give its VMs what they need or what rules require, and no other host has room: {}",
                host.name,
                names(fleet, vms)
            ));
        }
    }
    for (host, vms) in fleet.hosts.iter().zip(&placement.stranded) {
        if !vms.is_empty() {
            problems.push(format!(
                "If {:?} is lost, {} of its VMs have no place: {}",
                host.name,
                vms.len(),
                names(fleet, vms)
            ));
        }
    }
    if at_once > 0 {
        problems.push(format!(
            "The last {at_once} moves need room at the same time: no third host can hold one of the VMs meanwhile"
        ));
    }
    problems
}

/// What the fleet of `file` has and needs, as it is.
///
/// # Errors
///
/// [`PlaceError::TooLarge`].
pub fn report(file: &FleetFile, fleet: &Fleet) -> Result<FleetReport, PlaceError> {
    let placement = as_it_is(fleet)?;
    let hosts = Hosts::of(fleet, &placement.host_of);
    let total = fleet.total_need();
    let need = total.iter().take(fleet.slots);
    let interval_ms = file
        .hosts
        .first()
        .map_or(0, |host| host.demands.interval_ms);
    let ahead = |host: &CollectedHost| ClockNote {
        host: host.demands.host.clone(),
        ahead_ms: host.clock_ahead_ms,
    };
    let clocks = file.hosts.iter().map(ahead);
    let survives = |host: usize| placement.stranded[host].is_empty();
    Ok(FleetReport {
        schema: SCHEMA,
        period_ms: interval_ms * fleet.slots as u64,
        interval_ms,
        need_bytes: need.map(|units| units.saturating_mul(bytes(1))).collect(),
        sum_of_peaks_bytes: hosts.sum_of_peaks.iter().sum(),
        size_bytes: fleet.vms.iter().map(|vm| vm.size_bytes).sum(),
        capacity_bytes: fleet.hosts.iter().map(Host::memory_bytes).sum(),
        hosts_at_least: bound::hosts(fleet, false),
        hosts: (0..fleet.hosts.len())
            .map(|host| hosts.place(fleet, host, Some(survives(host))))
            .collect(),
        vms: vms(fleet, &placement.host_of),
        clocks: clocks
            .filter(|clock| clock.ahead_ms.unsigned_abs() > CLOCK_DIFFERENCE_MS)
            .collect(),
        missing: file.missing.clone(),
        problems: problems(fleet, &placement, 0),
    })
}

fn vms(fleet: &Fleet, host_of: &[usize]) -> Vec<VmPlace> {
    let place = |(vm, &host): (&Vm, &usize)| VmPlace {
        vm: vm.name.clone(),
        uuid: vm.uuid.clone(),
        host: fleet.hosts[host].name.clone(),
        size_bytes: vm.size_bytes,
        need_bytes: bytes(most(&vm.need[..fleet.slots])),
        processors: vm
            .processors_known
            .then(|| processors(most(&vm.need[fleet.slots..]))),
        known_ratio: vm.known_ratio,
    };
    fleet.vms.iter().zip(host_of).map(place).collect()
}
