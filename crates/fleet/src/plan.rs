//! A fleet as it is, and a placement, as JSON: sizes, hosts, moves, and how far it is from the best.

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::fleet::{
    BoundedBytes, BoundedCount, ClockNote, CollectedHost, FleetFile, FleetReport, Goal, HostPlace,
    MoveReason, PlacementJson, VmMove, VmPlace,
};

use crate::fleet::{Fleet, Host, Vm, bytes, processors};
use crate::load::{Load, Problem};
use crate::place::{Aim, PlaceError, Placement, as_it_is, placed, problem};
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
    let problem = problem(fleet, rules)?;
    let rules = rules.resolve(fleet)?;
    let placement = placed(&problem, aim);
    // Every VM by itself, on its host now and then.
    let vms_alone = Problem::new(fleet, &rules.one_by_one());
    let (before, after) = (
        vms_alone.load_now(),
        vms_alone.load(placement.host_of.iter().copied()),
    );
    let reason = |vm: usize| {
        let origin = fleet.vms[vm].host;
        if aim.goal == Goal::FewestHosts && after.items_of[origin].is_empty() {
            MoveReason::Emptying
        } else if before.is_within(&vms_alone, origin) && !rules.is_broken_by(vm, fleet) {
            MoveReason::Room
        } else {
            MoveReason::Relief
        }
    };
    let order = order::order(&vms_alone, &placement.host_of, reason);
    let mut held_bytes = vec![0_u64; fleet.hosts.len()];
    for vm in &fleet.vms {
        held_bytes[vm.host] += vm.size_bytes;
    }
    let moves: Vec<VmMove> = order
        .moves
        .iter()
        .map(|step| {
            let vm = &fleet.vms[step.vm];
            held_bytes[step.from] -= vm.size_bytes;
            held_bytes[step.to] += vm.size_bytes;
            VmMove {
                vm: vm.name.clone(),
                uuid: vm.uuid.clone(),
                from: fleet.hosts[step.from].name.clone(),
                to: fleet.hosts[step.to].name.clone(),
                size_bytes: vm.size_bytes,
                shrink_first_bytes: held_bytes[step.to]
                    .saturating_sub(fleet.hosts[step.to].memory_bytes()),
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
            before: before.hosts_in_use() as u64,
            after: (after.hosts_in_use() + placement.spare.len()) as u64,
            // With the goal `fit` all hosts run on, and count only with a VM.
            at_least: bound::hosts(fleet, aim.survive_loss && aim.goal == Goal::FewestHosts),
        },
        moved_bytes: BoundedBytes {
            planned: moves.iter().map(|step| step.size_bytes).sum(),
            at_least: bound::moved_bytes(&problem),
        },
        moves,
        moves_without_order: order.at_once as u64,
        vms: vms(fleet, &placement.host_of),
        hosts: (0..fleet.hosts.len())
            .map(|host| host_place(&vms_alone, &after, host, survives(host)))
            .collect(),
        problems: problems(fleet, &placement, order.at_once, |host, vms| {
            format!(
                "{host:?} cannot give its VMs what they need or what rules require, and no move was found that does: {vms}"
            )
        }),
    })
}

/// A host with its VMs, each an item of `problem`.
fn host_place(
    problem: &Problem<'_>,
    load: &Load,
    host: usize,
    survives_loss: Option<bool>,
) -> HostPlace {
    let slots = problem.fleet.slots;
    let own = &problem.fleet.hosts[host];
    let (memory, time) = load.used(host).split_at(slots);
    let processors = own.capacity[slots];
    let vms = &load.items_of[host];
    let is_measured = |&vm: &usize| problem.fleet.vms[vm].processors_known;
    let is_known = vms.is_empty() || vms.iter().any(is_measured);
    let peaks = vms
        .iter()
        .map(|&vm| peak_bytes(&problem.items[vm].need, slots));
    HostPlace {
        host: own.name.clone(),
        vms: vms.len() as u64,
        capacity_bytes: own.memory_bytes(),
        peak_bytes: bytes(most(memory)),
        sum_of_peaks_bytes: peaks.sum(),
        processors_ratio: (is_known && processors != u32::MAX && processors > 0)
            .then(|| f64::from(most(time)) / f64::from(processors)),
        survives_loss,
    }
}

/// The most memory that is needed in any slot.
fn peak_bytes(amounts: &[u32], slots: usize) -> u64 {
    bytes(most(&amounts[..slots]))
}

fn most(amounts: &[u32]) -> u32 {
    amounts.iter().copied().max().unwrap_or_default()
}

/// What is not as it should be, each a sentence; `short` is that of a host that is short, with its VMs.
fn problems(
    fleet: &Fleet,
    placement: &Placement,
    at_once: usize,
    short: impl Fn(&str, &str) -> String,
) -> Vec<String> {
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
            problems.push(short(&host.name, &names(fleet, vms)));
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
            "The last {at_once} moves wait for each other: no order was found in which each target has room and rules are kept, \
             and no third host may hold one of the VMs meanwhile"
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
    let problem = problem(fleet, &Rules::default())?;
    let placement = as_it_is(&problem);
    let load = problem.load_now();
    let vms = vms(fleet, &placement.host_of);
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
        sum_of_peaks_bytes: vms.iter().map(|vm| vm.need_bytes).sum(),
        size_bytes: fleet.vms.iter().map(|vm| vm.size_bytes).sum(),
        capacity_bytes: fleet.hosts.iter().map(Host::memory_bytes).sum(),
        hosts_at_least: bound::hosts(fleet, false),
        hosts: (0..fleet.hosts.len())
            .map(|host| host_place(&problem, &load, host, Some(survives(host))))
            .collect(),
        vms,
        clocks: clocks
            .filter(|clock| clock.ahead_ms.unsigned_abs() > CLOCK_DIFFERENCE_MS)
            .collect(),
        missing: file.missing.clone(),
        problems: problems(fleet, &placement, 0, |host, vms| {
            format!(
                "{host:?} cannot give its VMs what they need: {vms} (`plimsoll fleet place` looks for room elsewhere)"
            )
        }),
    })
}

fn vms(fleet: &Fleet, host_of: &[usize]) -> Vec<VmPlace> {
    let place = |(vm, &host): (&Vm, &usize)| VmPlace {
        vm: vm.name.clone(),
        uuid: vm.uuid.clone(),
        host: fleet.hosts[host].name.clone(),
        size_bytes: vm.size_bytes,
        need_bytes: peak_bytes(&vm.need, fleet.slots),
        processors: vm
            .processors_known
            .then(|| processors(most(&vm.need[fleet.slots..]))),
        known_ratio: vm.known_ratio,
    };
    fleet.vms.iter().zip(host_of).map(place).collect()
}
