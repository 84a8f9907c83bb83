//! A fleet: hosts with their capacities, VMs with their needs over time.
//!
//! Each host's intervals are moved to the collecting machine's clock, to the nearest slot, and folded into a period: a slot holds
//! the largest need of its intervals. A slot without a curve counts with the VM's largest need, and a VM without any with its
//! baseline. A VM that has moved between hosts has the intervals of all of them, by its UUID.

use std::collections::{BTreeMap, HashMap, HashSet};

use plimsoll_protocol::fleet::{CollectedHost, FleetFile, VmDemands};

/// Bytes of a unit of memory in placing.
const UNIT_BYTES: u64 = 1 << 20;
/// Units of a processor.
const UNITS_PER_PROCESSOR: f64 = 1000.0;
/// Maximum number of slots of a period.
pub const SLOTS_MAX: u64 = 1000;

/// How answers become a fleet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Length of the period into which time is folded.
    pub period_ms: u64,
    /// Share of a host's RAM that its VMs do not get, 0.0 to below 1.0.
    pub reserve_ratio: f64,
    /// Processors of VMs for each processor of a host, above 0.0; `None` to leave processors out.
    pub processors_ratio: Option<f64>,
}

/// Needs or capacities: MiB in each slot, then thousandths of a processor in each slot.
pub type Amounts = Vec<u32>;

/// A host.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// What its VMs may need together.
    pub capacity: Amounts,
}

/// A VM.
#[derive(Debug, Clone, PartialEq)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Its UUID, if it has one.
    pub uuid: Option<String>,
    /// Number of its host.
    pub host: usize,
    /// Whether its UUID is on several hosts: it is not moved, and is on each of them.
    pub is_migrating: bool,
    /// Its size, which a migration copies.
    pub size_bytes: u64,
    /// What it needs.
    pub need: Amounts,
    /// Share of the slots in which its need was measured.
    pub known_ratio: f64,
    /// Whether its use of processors is known; 0 counts otherwise.
    pub processors_known: bool,
}

/// Hosts and their VMs.
#[derive(Debug, Clone, PartialEq)]
pub struct Fleet {
    /// Number of slots.
    pub slots: usize,
    /// The hosts.
    pub hosts: Vec<Host>,
    /// Their VMs.
    pub vms: Vec<Vm>,
    /// What to know of them, each a sentence.
    pub notes: Vec<String>,
}

/// Why answers make no fleet.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FleetError {
    /// Nothing to plan with.
    #[error("no host answered")]
    NoHost,
    /// Answers of different intervals.
    #[error(
        "{target} has intervals of {interval_ms} ms, and others of {expected_ms} ms: collect all of them together"
    )]
    Intervals {
        /// The daemon.
        target: String,
        /// Its interval.
        interval_ms: u64,
        /// That of the first host.
        expected_ms: u64,
    },
    /// The period and the interval do not go together.
    #[error(
        "a period of {period_ms} ms has no whole number of intervals of {interval_ms} ms, from 1 to {SLOTS_MAX}"
    )]
    Period {
        /// The period.
        period_ms: u64,
        /// The interval.
        interval_ms: u64,
    },
    /// Two daemons say that they are the same host.
    #[error(
        "{first} and {second} are both called {host:?}: a host answers twice, or two have one name"
    )]
    Twice {
        /// The name.
        host: String,
        /// A daemon.
        first: String,
        /// Another.
        second: String,
    },
}

impl Host {
    /// Memory that its VMs may have together.
    pub fn memory_bytes(&self) -> u64 {
        self.capacity.first().map_or(0, |&units| bytes(units))
    }
}

/// Memory of so many units.
pub(crate) fn bytes(units: u32) -> u64 {
    u64::from(units) * UNIT_BYTES
}

/// Processors of so many units.
pub(crate) fn processors(units: u32) -> f64 {
    f64::from(units) / UNITS_PER_PROCESSOR
}

/// Units that hold so many bytes.
fn units_up(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX)
}

/// Units within a number that is not negative.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a conversion that saturates"
)]
fn units(value: f64) -> u32 {
    value.max(0.0) as u32
}

/// Largest needs of a slot.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    bytes: u64,
    processors: Option<f64>,
}

/// What is known of a VM, by slot.
type Known = BTreeMap<u64, Slot>;

impl Fleet {
    /// The fleet of all answers.
    ///
    /// # Errors
    ///
    /// Any [`FleetError`].
    pub fn of(file: &FleetFile, settings: &Settings) -> Result<Self, FleetError> {
        let first = file.hosts.first().ok_or(FleetError::NoHost)?;
        let interval_ms = first.demands.interval_ms;
        let period_ms = settings.period_ms;
        let slots = period_ms.checked_div(interval_ms).unwrap_or(0);
        if !(1..=SLOTS_MAX).contains(&slots) || slots * interval_ms != period_ms {
            return Err(FleetError::Period {
                period_ms,
                interval_ms,
            });
        }
        let mut names: HashMap<&str, &str> = HashMap::new();
        // By UUID; names are not unique among hosts.
        let mut known: HashMap<&str, Known> = HashMap::new();
        for host in &file.hosts {
            let demands = &host.demands;
            if demands.interval_ms != interval_ms {
                return Err(FleetError::Intervals {
                    target: host.target.clone(),
                    interval_ms: demands.interval_ms,
                    expected_ms: interval_ms,
                });
            }
            if let Some(other) = names.insert(&demands.host, &host.target) {
                return Err(FleetError::Twice {
                    host: demands.host.clone(),
                    first: other.to_owned(),
                    second: host.target.clone(),
                });
            }
            let begin = begin_ms(host);
            for vm in &demands.vms {
                if let Some(uuid) = &vm.uuid {
                    let known = known.entry(uuid).or_default();
                    add(known, vm, begin, (interval_ms, slots));
                }
            }
        }
        let slots_len = usize::try_from(slots).unwrap_or_default();
        let mut fleet = Self {
            slots: slots_len,
            hosts: Vec::new(),
            vms: Vec::new(),
            notes: Vec::new(),
        };
        let mut places: HashMap<&str, usize> = HashMap::new();
        let mut migrating: HashSet<&str> = HashSet::new();
        for (number, host) in file.hosts.iter().enumerate() {
            let demands = &host.demands;
            let begin = begin_ms(host);
            let memory = demands.total_bytes as f64 * (1.0 - settings.reserve_ratio);
            let processors = match (settings.processors_ratio, demands.processors) {
                (Some(ratio), Some(count)) => units(f64::from(count) * ratio * UNITS_PER_PROCESSOR),
                _ => u32::MAX,
            };
            let mut capacity = vec![units(memory / UNIT_BYTES as f64); slots_len];
            capacity.resize(slots_len * 2, processors);
            fleet.hosts.push(Host {
                name: demands.host.clone(),
                capacity,
            });
            for vm in demands.vms.iter().filter(|vm| vm.present) {
                if let Some(uuid) = vm.uuid.as_deref()
                    && let Some(other) = places.insert(uuid, number)
                {
                    if other != number {
                        migrating.insert(uuid);
                    }
                    fleet.notes.push(match other == number {
                        true => format!(
                            "VM {:?} of {:?} has the UUID of another VM there: each counts with what either of them needs",
                            vm.vm, demands.host
                        ),
                        false => format!(
                            "VM {:?} is on {:?} and on {:?}: it was migrating, or one UUID is used twice; it counts on both, and no move of it is planned until it is on one",
                            vm.vm, fleet.hosts[other].name, demands.host
                        ),
                    });
                }
                let mut own = Known::new();
                let known = match vm.uuid.as_deref().and_then(|uuid| known.get(uuid)) {
                    Some(known) => known,
                    None => {
                        add(&mut own, vm, begin, (interval_ms, slots));
                        &own
                    }
                };
                fleet.vms.push(Vm::new(vm, number, known, slots));
            }
        }
        for vm in &mut fleet.vms {
            vm.is_migrating = vm
                .uuid
                .as_deref()
                .is_some_and(|uuid| migrating.contains(uuid));
        }
        let unknown = fleet.vms.iter().filter(|vm| vm.known_ratio == 0.0).count();
        if unknown > 0 {
            fleet.notes.push(format!(
                "{unknown} of {} VMs have no curve in the period: they count with their baselines",
                fleet.vms.len()
            ));
        }
        let unmeasured = fleet.vms.iter().filter(|vm| !vm.processors_known).count();
        if settings.processors_ratio.is_some() && unmeasured > 0 {
            fleet.notes.push(format!(
                "The processor time of {unmeasured} of {} VMs is not known: it counts as none",
                fleet.vms.len()
            ));
        }
        Ok(fleet)
    }

    /// What all VMs need together.
    pub fn total_need(&self) -> Vec<u64> {
        let mut total = vec![0; self.slots * 2];
        for vm in &self.vms {
            for (total, &need) in total.iter_mut().zip(&vm.need) {
                *total += u64::from(need);
            }
        }
        total
    }
}

/// When a host's first interval begins, by the collecting machine's clock.
fn begin_ms(host: &CollectedHost) -> i128 {
    i128::from(host.demands.since_unix_ms) - i128::from(host.clock_ahead_ms)
}

/// Adds a VM's intervals, of which the first begins at `begin_ms`, to what is known of it. Each counts in the slot in which most of it
/// lies, and in no other, because clocks always differ a little.
fn add(known: &mut Known, vm: &VmDemands, begin_ms: i128, (interval_ms, slots): (u64, u64)) {
    let interval = i128::from(interval_ms);
    for demand in &vm.intervals {
        let from = begin_ms + i128::from(demand.interval) * interval;
        let slot = (from + interval / 2).div_euclid(interval);
        let slot = slot.rem_euclid(i128::from(slots));
        let slot = known.entry(u64::try_from(slot).unwrap_or_default());
        let slot = slot.or_default();
        slot.bytes = slot.bytes.max(demand.need_bytes);
        let most = slot.processors.into_iter();
        let most = most.chain(demand.vcpu_seconds_per_second);
        slot.processors = most.filter(|most| most.is_finite()).reduce(f64::max);
    }
}

impl Vm {
    fn new(vm: &VmDemands, host: usize, known: &Known, slots: u64) -> Self {
        let most = known.values().map(|slot| slot.bytes).max();
        let most = most.unwrap_or(vm.unknown_need_bytes);
        let processors = known.values().filter_map(|slot| slot.processors);
        let busiest = processors.reduce(f64::max);
        let of = |slot: u64| known.get(&slot).copied();
        let memory = (0..slots).map(|slot| {
            let need = of(slot).map_or(most, |slot| slot.bytes);
            units_up(if vm.managed { need } else { vm.size_bytes })
        });
        let time = (0..slots).map(|slot| {
            let used = of(slot).and_then(|slot| slot.processors).or(busiest);
            units((used.unwrap_or(0.0) * UNITS_PER_PROCESSOR).ceil())
        });
        Self {
            name: vm.vm.clone(),
            uuid: vm.uuid.clone(),
            host,
            is_migrating: false,
            size_bytes: vm.size_bytes,
            need: memory.chain(time).collect(),
            known_ratio: known.len() as f64 / slots as f64,
            processors_known: busiest.is_some(),
        }
    }
}
