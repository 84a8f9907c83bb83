//! Finds the VMs of this host in a thread of its own, so that no turn waits for a process.
//!
//! A process is inspected only after the kernel's record of it was checked ([`AllowedUsers::check`](plimsoll_vm::AllowedUsers::check)). One that turns
//! out not to be a VM (yet) is inspected again after a pause that doubles, and a round inspects no process after its
//! budget: hundreds of monitors that never answer delay the discovery of others by seconds, and do not delay turns.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_protocol::vm::{BackendRefusal, BackendView};
use plimsoll_trap::{Refusal, TraceConfig, TraceTarget, assess, why_unobserved};
use plimsoll_vm::{AllowedUsers, HeldRam, ProcessId, QemuVm, VmError, qemu_pids};

use crate::background::Background;
use crate::config::Config;
use crate::tracer::lock;

/// Pause between rounds.
const PAUSE: Duration = Duration::from_secs(1);
/// Time of a round after which no further process is inspected.
const BUDGET: Duration = Duration::from_secs(2);
/// Processes inspected at a time: one whose monitor is silent delays few others.
const INSPECTED_AT_ONCE: usize = 16;
/// Minimum and maximum time until a process is inspected again.
const AGAIN: (Duration, Duration) = (Duration::from_millis(900), Duration::from_mins(1));
/// Age at which an assessment of a VM is renewed.
const ASSESSED_AGAIN: Duration = Duration::from_secs(30);
/// Longest wait of the first turn for the first round.
const FIRST_ROUND_MAX: Duration = Duration::from_millis(1500);
/// Age of the last round from which discovery counts as stuck.
const HANGS_AFTER: Duration = Duration::from_mins(1);
/// Maximum number of processes of one kind that are reported one by one; the others are counted.
const DESCRIBED: usize = 5;

/// The processes of a host, as far as discovery needs them.
pub trait Processes: Sync + Send + 'static {
    /// Processes that run a system emulator, judged by their name.
    ///
    /// # Errors
    ///
    /// The reason why they cannot be listed.
    fn list(&self) -> Result<Vec<ProcessId>, VmError>;

    /// Checks by the kernel's record alone whether the process can be a VM.
    ///
    /// # Errors
    ///
    /// The reason why it cannot.
    fn check(&self, process: ProcessId) -> Result<(), VmError>;

    /// Describes it. Takes as long as its monitor.
    ///
    /// # Errors
    ///
    /// The reason why it is not a VM.
    fn describe(&self, process: ProcessId) -> Result<QemuVm, VmError>;

    /// Assesses which tracing backends can observe a VM.
    fn assess(&self, vm: &QemuVm, is_locked: bool) -> VmAssessment;

    /// Whether a VM's RAM is locked in memory; takes about 10 ms for each GiB of it.
    fn is_locked(&self, vm: &QemuVm) -> bool;

    /// Why the host would not get what a VM's balloon takes.
    fn held_ram(&self, vm: &QemuVm, is_locked: bool) -> Option<HeldRam>;
}

/// Which tracing backends can observe a VM.
#[derive(Debug, Clone)]
pub struct VmAssessment {
    /// Each backend that this host's kernel has.
    pub backends: Vec<BackendView>,
    /// Why it cannot be traced as configured; `None` if it can.
    pub why_unobserved: Option<String>,
}

/// The processes of this host.
#[derive(Debug)]
pub struct HostProcesses {
    /// The users whose processes can be VMs.
    users: AllowedUsers,
    /// How each VM may be traced, as of now.
    config: Arc<Mutex<Config>>,
}

impl HostProcesses {
    /// Of the users that the configuration has now; how each VM may be traced is read from it anew.
    pub fn new(config: Arc<Mutex<Config>>) -> Self {
        let users = lock(&config).users.clone();
        Self { users, config }
    }
}

impl Processes for HostProcesses {
    fn list(&self) -> Result<Vec<ProcessId>, VmError> {
        let pids = qemu_pids()?.into_iter();
        Ok(pids.filter_map(ProcessId::of_pid).collect())
    }

    fn check(&self, process: ProcessId) -> Result<(), VmError> {
        self.users.check(process.pid)
    }

    fn describe(&self, process: ProcessId) -> Result<QemuVm, VmError> {
        let vm = QemuVm::of_pid(process.pid)?;
        match vm.process() == process {
            true => Ok(vm),
            false => Err(VmError::OtherProcess { pid: process.pid }),
        }
    }

    fn assess(&self, vm: &QemuVm, is_locked: bool) -> VmAssessment {
        let target = TraceTarget {
            pid: vm.pid,
            is_vm: true,
            ram: vm.ram.clone(),
            locked: is_locked,
            // Our own tracers would be among them.
            userfault: false,
            vcpu_threads: Vec::new(),
        };
        let (rule, backend) = {
            let config = lock(&self.config);
            let rule = config.settings_for(&vm.id.0, vm.uuid.as_deref());
            (rule, config.trace.backend)
        };
        let config = TraceConfig {
            allow_namespaced: rule.allow_namespaced == Some(true),
            ..TraceConfig::default()
        };
        // That a tracer of ours has it is no property of a VM.
        let lasts = |refusal: &Refusal| !matches!(refusal, Refusal::UserfaultInUse);
        let mut assessments = assess(&target, &config);
        for assessment in &mut assessments {
            assessment.refusals.retain(lasts);
        }
        let first = (assessments.iter())
            .map(|found| (found.row, found.refusals.first().map(Refusal::to_string)));
        let why_unobserved = why_unobserved(first, backend);
        // Nor is what the host's kernel lacks.
        let lacks = |refusal: &Refusal| matches!(refusal, Refusal::NoIdleTracking { .. });
        let assessments = assessments.iter();
        let assessments = assessments.filter(|found| !found.refusals.iter().any(lacks));
        let views = assessments.map(|assessment| BackendView {
            backend: assessment.row.method,
            refusals: assessment.refusals.iter().map(refusal_view).collect(),
        });
        VmAssessment {
            backends: views.collect(),
            why_unobserved,
        }
    }

    fn is_locked(&self, vm: &QemuVm) -> bool {
        let states = vm.ram_states().unwrap_or_default();
        states.iter().any(|state| state.locked)
    }

    fn held_ram(&self, vm: &QemuVm, is_locked: bool) -> Option<HeldRam> {
        vm.held_ram(is_locked)
    }
}

fn refusal_view(refusal: &Refusal) -> BackendRefusal {
    BackendRefusal {
        name: refusal.name().to_owned(),
        why: refusal.to_string(),
        change: refusal.change(),
    }
}

/// Results of the last round.
#[derive(Debug, Clone, Default)]
pub struct DiscoveryResult {
    /// VMs, in the order of their start.
    pub vms: Vec<Arc<QemuVm>>,
    /// Which tracing backends can observe each of them.
    pub backends: BTreeMap<ProcessId, Vec<BackendView>>,
    /// Why those that are not traced cannot be.
    pub unobserved: BTreeMap<ProcessId, String>,
    /// Those whose balloons free nothing on the host, and why.
    pub held: BTreeMap<ProcessId, HeldRam>,
    /// Warnings for the operator.
    pub warnings: Vec<String>,
}

/// The discovery thread. Ends when dropped.
#[derive(Debug)]
pub struct Discovery {
    rounds: Background<DiscoveryResult>,
}

impl Discovery {
    /// Starts the thread.
    pub fn begin(processes: impl Processes) -> Self {
        let mut rounds = Rounds::default();
        let round = move || (rounds.round(&processes), PAUSE);
        Self {
            rounds: Background::begin("discovery", "VMs", HANGS_AFTER, round),
        }
    }

    /// Whether a round has ended, or none is expected to; waits a second at most for the first one.
    pub fn has_ended_once(&self) -> bool {
        let (discovered, warning) = self.rounds.last(FIRST_ROUND_MAX);
        discovered.is_some() || warning.is_some()
    }

    /// The results of the last round; waits a second at most for the first one.
    pub fn last(&self) -> DiscoveryResult {
        let (discovered, warning) = self.rounds.last(FIRST_ROUND_MAX);
        let mut discovered = discovered.unwrap_or_default();
        discovered.warnings.extend(warning);
        discovered
    }
}

/// Why a process is not a VM (yet), and when it is inspected again.
#[derive(Debug)]
struct Pending {
    why: String,
    next: Instant,
    pause: Duration,
}

/// Which tracing backends can observe a VM and whether its balloon frees memory, and the time of the assessment.
#[derive(Debug)]
struct CachedAssessment {
    at: Instant,
    is_locked: bool,
    held: Option<HeldRam>,
    assessment: VmAssessment,
}

/// State kept from one round to the next.
#[derive(Debug, Default)]
struct Rounds {
    known: BTreeMap<ProcessId, Arc<QemuVm>>,
    pending: BTreeMap<ProcessId, Pending>,
    assessed: BTreeMap<ProcessId, CachedAssessment>,
}

impl Rounds {
    fn round(&mut self, processes: &impl Processes) -> DiscoveryResult {
        let began = Instant::now();
        let mut warnings = Vec::new();
        let mut refused = Vec::new();
        match processes.list() {
            Ok(list) => {
                let mut here = Vec::new();
                for process in list {
                    match processes.check(process) {
                        Ok(()) => here.push(process),
                        Err(VmError::NoSuchProcess { .. }) => {}
                        Err(error) => refused.push(error.to_string()),
                    }
                }
                self.known.retain(|process, _| here.contains(process));
                self.pending.retain(|process, _| here.contains(process));
                self.inspect(processes, &here, began);
            }
            // VMs found earlier that still run have not ended just because the list failed.
            Err(error) => warnings.push(format!("VMs cannot be discovered: {error}")),
        }
        self.assess(processes, began);
        let pending = self.pending.values();
        let pending: Vec<_> = pending.map(|pending| pending.why.clone()).collect();
        warnings.extend(some_of(
            &pending,
            "could not be inspected, or are no VMs (yet)",
        ));
        warnings.extend(some_of(&refused, "are no VMs of this host"));
        let mut vms: Vec<_> = self.known.values().map(Arc::clone).collect();
        vms.sort_by_key(|vm| (vm.start_ticks, vm.pid));
        let assessed = self.assessed.iter();
        let held = assessed.clone();
        DiscoveryResult {
            vms,
            backends: assessed
                .clone()
                .map(|(process, assessed)| (*process, assessed.assessment.backends.clone()))
                .collect(),
            unobserved: assessed
                .filter_map(|(process, assessed)| {
                    Some((*process, assessed.assessment.why_unobserved.clone()?))
                })
                .collect(),
            held: held
                .filter_map(|(process, assessed)| Some((*process, assessed.held?)))
                .collect(),
            warnings,
        }
    }

    /// Assesses VMs that are new or were assessed long ago, until the budget is spent.
    fn assess(&mut self, processes: &impl Processes, began: Instant) {
        self.assessed
            .retain(|process, _| self.known.contains_key(process));
        for (process, vm) in &mut self.known {
            let before = self.assessed.get(process);
            if before.is_some_and(|before| before.at.elapsed() < ASSESSED_AGAIN) {
                continue;
            }
            if began.elapsed() >= BUDGET {
                return;
            }
            // Memory that was unplugged since it was found may be what could not be observed.
            let is_refused = |before: &CachedAssessment| before.assessment.why_unobserved.is_some();
            if before.is_some_and(is_refused)
                && let Ok(now) = processes.describe(*process)
            {
                *vm = Arc::new(now);
            }
            let is_locked = before.map(|before| before.is_locked);
            let is_locked = is_locked.unwrap_or_else(|| processes.is_locked(vm));
            let assessed = CachedAssessment {
                assessment: processes.assess(vm, is_locked),
                held: processes.held_ram(vm, is_locked),
                is_locked,
                at: Instant::now(),
            };
            self.assessed.insert(*process, assessed);
        }
    }

    /// Inspects processes that are due, those with the shortest pause first, until the budget is spent.
    fn inspect(&mut self, processes: &impl Processes, here: &[ProcessId], began: Instant) {
        let mut due: Vec<_> = here
            .iter()
            .filter(|process| !self.known.contains_key(process))
            .map(|process| (self.pending.get(process), *process))
            .filter(|(pending, _)| pending.is_none_or(|pending| pending.next <= began))
            .map(|(pending, process)| (pending.map(|pending| pending.pause), process))
            .collect();
        due.sort_unstable();
        let workers = due.len().min(INSPECTED_AT_ONCE);
        let due = Mutex::new(due.into_iter());
        let described = Mutex::new(Vec::new());
        let inspect = || {
            while began.elapsed() < BUDGET {
                let next = due.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((pause, process)) = next else {
                    return;
                };
                let result = processes.describe(process);
                let mut described = described.lock().unwrap_or_else(PoisonError::into_inner);
                described.push((process, pause, result));
            }
        };
        thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(inspect);
            }
        });
        let described = described.into_inner();
        for (process, pause, result) in described.unwrap_or_else(PoisonError::into_inner) {
            self.pending.remove(&process);
            let why = match result {
                // A process that has just been started has not mapped its RAM yet.
                Ok(vm) if vm.ram.is_empty() => format!(
                    "process {} ({}) has no guest RAM that could be watched (yet)",
                    process.pid, vm.id
                ),
                Ok(vm) if vm.vcpus.is_empty() => format!(
                    "process {} ({}) does not show its vCPUs (yet): it needs -name ...,debug-threads=on or a QMP monitor that no other client holds",
                    process.pid, vm.id
                ),
                Ok(vm) => {
                    self.known.insert(process, Arc::new(vm));
                    continue;
                }
                Err(VmError::NoSuchProcess { .. } | VmError::OtherProcess { .. }) => continue,
                Err(error) => format!("process {}: {error}", process.pid),
            };
            let pause = pause.map_or(AGAIN.0, |pause| (pause * 2).min(AGAIN.1));
            let pending = Pending {
                why,
                next: Instant::now() + pause,
                pause,
            };
            self.pending.insert(process, pending);
        }
    }
}

/// The first of these warnings, and the number of the others.
fn some_of(warnings: &[String], what: &str) -> Vec<String> {
    let (first, rest) = warnings.split_at(warnings.len().min(DESCRIBED));
    let mut some = first.to_vec();
    if !rest.is_empty() {
        some.push(format!("{} more processes {what}", rest.len()));
    }
    some
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    use crate::config::VmRule;
    use plimsoll_flow::{RamBacking, RamMapping, TraceMethod, VmId};
    use plimsoll_trap::BackendSetting;
    use plimsoll_vm::Vcpu;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A host with one VM behind `silent` processes whose monitors do not answer for this long.
    #[derive(Default)]
    struct Hostile {
        silent: u32,
        silence: Duration,
        inspected: Arc<AtomicUsize>,
    }

    const VCPU: Vcpu = Vcpu {
        index: 0,
        thread_id: 9,
    };

    fn process(pid: u32) -> ProcessId {
        ProcessId {
            pid,
            start_ticks: 7,
        }
    }

    fn vm(process: ProcessId, vcpus: Vec<Vcpu>) -> QemuVm {
        QemuVm {
            pid: process.pid,
            start_ticks: process.start_ticks,
            id: VmId(format!("vm{}", process.pid)),
            memory_bytes: 1 << 20,
            ram: vec![RamMapping {
                address: 1 << 30,
                len_bytes: 1 << 20,
                file_offset_bytes: 0,
                backing: RamBacking::SharedMemfd,
            }],
            vcpus,
            ..QemuVm::default()
        }
    }

    impl Processes for Hostile {
        fn list(&self) -> Result<Vec<ProcessId>, VmError> {
            Ok((1..=self.silent + 1).map(process).collect())
        }

        fn check(&self, _: ProcessId) -> Result<(), VmError> {
            Ok(())
        }

        fn describe(&self, process: ProcessId) -> Result<QemuVm, VmError> {
            self.inspected.fetch_add(1, Ordering::Relaxed);
            if process.pid > self.silent {
                return Ok(vm(process, vec![VCPU]));
            }
            thread::sleep(self.silence);
            Ok(vm(process, Vec::new()))
        }

        fn assess(&self, vm: &QemuVm, is_locked: bool) -> VmAssessment {
            let config = Config::default();
            HostProcesses::new(Arc::new(Mutex::new(config))).assess(vm, is_locked)
        }

        fn is_locked(&self, _: &QemuVm) -> bool {
            true
        }

        fn held_ram(&self, _: &QemuVm, is_locked: bool) -> Option<HeldRam> {
            is_locked.then_some(HeldRam::Locked)
        }
    }

    /// Memory that no backend can observe, until it is unplugged.
    #[test]
    fn a_vm_that_could_not_be_observed_is_looked_at_again() {
        struct Unplugs(AtomicUsize);
        impl Processes for Unplugs {
            fn list(&self) -> Result<Vec<ProcessId>, VmError> {
                Ok(vec![process(1)])
            }
            fn check(&self, _: ProcessId) -> Result<(), VmError> {
                Ok(())
            }
            fn describe(&self, process: ProcessId) -> Result<QemuVm, VmError> {
                let times = self.0.fetch_add(1, Ordering::Relaxed) as u64;
                Ok(QemuVm {
                    memory_bytes: times,
                    ..vm(process, vec![VCPU])
                })
            }
            fn assess(&self, vm: &QemuVm, _: bool) -> VmAssessment {
                VmAssessment {
                    backends: Vec::new(),
                    why_unobserved: (vm.memory_bytes == 0).then(|| "a DIMM".to_owned()),
                }
            }
            fn is_locked(&self, _: &QemuVm) -> bool {
                false
            }
            fn held_ram(&self, _: &QemuVm, _: bool) -> Option<HeldRam> {
                None
            }
        }
        let host = Unplugs(AtomicUsize::new(0));
        let mut rounds = Rounds::default();
        assert_eq!(rounds.round(&host).unobserved.len(), 1);
        assert_eq!(rounds.round(&host).unobserved.len(), 1, "not at once");
        for assessed in rounds.assessed.values_mut() {
            assessed.at = assessed.at.checked_sub(ASSESSED_AGAIN).unwrap();
        }
        let found = rounds.round(&host);
        assert_eq!(found.unobserved.len(), 0);
        assert_eq!(found.vms[0].memory_bytes, 1);
    }

    #[test]
    fn a_tracer_that_has_a_vm_is_no_property_of_the_vm() {
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .spawn()
            .unwrap();
        // As tracers claim a process.
        let pagemap = fs::File::open(format!("/proc/{}/pagemap", child.id())).unwrap();
        pagemap.try_lock().unwrap();
        let config = Config::default();
        let process = ProcessId::of_pid(child.id()).unwrap();
        let views = HostProcesses::new(Arc::new(Mutex::new(config)))
            .assess(&vm(process, Vec::new()), false);
        let views = views.backends;
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!views.is_empty());
        for refusal in views.iter().flat_map(|view| &view.refusals) {
            assert_ne!(refusal.name, "userfault-in-use", "{views:?}");
        }
    }

    #[test]
    fn a_rule_decides_whether_a_vm_in_a_user_namespace_of_its_own_is_refused() {
        let mut command = std::process::Command::new("unshare");
        command.args(["--user", "sleep", "600"]);
        let Ok(mut child) = command.spawn() else {
            plimsoll_skip::skip(plimsoll_skip::Lack::Program, "unshare(1)");
            return;
        };
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/user")).unwrap();
        let mut is_apart = || {
            let pid = child.id().to_string();
            child
                .try_wait()
                .unwrap()
                .is_none()
                .then(|| namespace(&pid) != namespace("self"))
        };
        let apart = loop {
            match is_apart() {
                Some(false) => thread::sleep(Duration::from_millis(5)),
                Some(true) => break true,
                None => break false,
            }
        };
        if !apart {
            plimsoll_skip::skip(
                plimsoll_skip::Lack::Program,
                "unshare(1) makes no user namespace here",
            );
            return;
        }
        let process = ProcessId {
            pid: child.id(),
            start_ticks: 1,
        };
        let vm = vm(process, Vec::new());
        let refusals = |allow_namespaced| {
            let rule = VmRule {
                allow_namespaced,
                ..VmRule::for_name("*")
            };
            let config = Config {
                vms: vec![rule],
                ..Config::default()
            };
            let views = HostProcesses::new(Arc::new(Mutex::new(config)))
                .assess(&vm, false)
                .backends;
            let names = views
                .into_iter()
                .flat_map(|view| view.refusals)
                .map(|refusal| refusal.name);
            names
                .filter(|name| name == "foreign-user-namespace")
                .count()
        };
        assert!(refusals(None) > 0);
        assert_eq!(refusals(None), refusals(Some(false)));
        assert_eq!(refusals(Some(true)), 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_vm_that_the_configured_backend_cannot_observe_is_found_with_the_reason() {
        let vm = |backing: RamBacking| {
            let ours = ProcessId::of_pid(std::process::id()).unwrap();
            let mut vm = vm(ours, Vec::new());
            vm.ram[0].backing = backing;
            vm
        };
        // Which needs nothing of this host but the right to read its own memory's tables.
        let mut config = Config::default();
        let why = |config: &Config, vm: &QemuVm| {
            let config = config.clone();
            HostProcesses::new(Arc::new(Mutex::new(config)))
                .assess(vm, false)
                .why_unobserved
        };
        config.trace.backend = BackendSetting::Method(TraceMethod::Traps);
        let private = why(&config, &vm(RamBacking::Private)).unwrap();
        assert!(
            private.contains("(trap: the VM's RAM is private memory"),
            "{private}"
        );
        config.trace.backend = BackendSetting::Auto;
        let huge = why(&config, &vm(RamBacking::HugeTlb)).unwrap();
        assert!(
            huge.starts_with("no backend can observe it (trap, scan, "),
            "{huge}"
        );
    }

    #[test]
    fn every_vm_is_assessed_and_its_lock_is_kept() {
        let host = Hostile::default();
        let mut rounds = Rounds::default();
        for _ in 0..2 {
            let discovered = rounds.round(&host);
            let backends = &discovered.backends[&discovered.vms[0].process()];
            for row in plimsoll_trap::BACKENDS {
                // Which this host's kernel may lack.
                let is_of_kernel = row.any_process && row.gives_curve();
                let mut assessed = backends.iter().map(|view| view.backend);
                assert!(assessed.any(|method| method == row.method) || is_of_kernel);
            }
            assert_eq!(backends[0].refusals[0].name, "locked");
            assert!(discovered.held.into_values().eq([HeldRam::Locked]));
            for assessed in rounds.assessed.values_mut() {
                assert!(assessed.is_locked);
                assessed.at = Instant::now().checked_sub(ASSESSED_AGAIN).unwrap();
            }
        }
        rounds.known.clear();
        rounds.assess(&host, Instant::now());
        assert!(rounds.assessed.is_empty());
    }

    #[test]
    fn silent_monitors_are_tried_less_and_less_and_keep_no_round() {
        let inspected = Arc::new(AtomicUsize::new(0));
        let host = Hostile {
            silent: 500,
            silence: Duration::from_millis(100),
            inspected: Arc::clone(&inspected),
        };
        let mut rounds = Rounds::default();
        let mut longest = Duration::ZERO;
        let mut found = 0;
        for _ in 0..4 {
            let began = Instant::now();
            found = rounds.round(&host).vms.len();
            longest = longest.max(began.elapsed());
        }
        assert_eq!(found, 1);
        assert!(longest < BUDGET + Duration::from_secs(1), "{longest:?}");
        let first = inspected.load(Ordering::Relaxed);
        assert!(first >= 501, "{first}");
        let pauses = rounds.pending.values().map(|pending| pending.pause);
        assert!(pauses.max() > Some(AGAIN.0));
        let shown = rounds.round(&host).warnings;
        assert_eq!(shown.len(), DESCRIBED + 1, "{shown:?}");
    }

    #[test]
    fn nobody_waits_for_a_process_that_hangs() {
        let host = Hostile {
            silent: 500,
            silence: Duration::from_secs(3),
            inspected: Arc::default(),
        };
        let discovery = Discovery::begin(host);
        let began = Instant::now();
        for _ in 0..50 {
            assert!(discovery.last().vms.is_empty());
        }
        let took = began.elapsed();
        assert!(took < Duration::from_secs(2), "{took:?}");
    }

    #[test]
    fn a_process_of_the_same_number_is_another_one() {
        struct ReusedPid(Mutex<u64>);
        impl Processes for ReusedPid {
            fn list(&self) -> Result<Vec<ProcessId>, VmError> {
                let start_ticks = *self.0.lock().unwrap();
                Ok(vec![ProcessId {
                    pid: 1,
                    start_ticks,
                }])
            }
            fn check(&self, _: ProcessId) -> Result<(), VmError> {
                Ok(())
            }
            fn describe(&self, process: ProcessId) -> Result<QemuVm, VmError> {
                Ok(vm(process, vec![VCPU]))
            }
            fn assess(&self, _: &QemuVm, _: bool) -> VmAssessment {
                VmAssessment {
                    backends: Vec::new(),
                    why_unobserved: None,
                }
            }
            fn is_locked(&self, _: &QemuVm) -> bool {
                false
            }
            fn held_ram(&self, _: &QemuVm, _: bool) -> Option<HeldRam> {
                None
            }
        }
        let host = ReusedPid(Mutex::new(1));
        let mut rounds = Rounds::default();
        assert_eq!(rounds.round(&host).vms[0].start_ticks, 1);
        *host.0.lock().unwrap() = 2;
        let vms = rounds.round(&host).vms;
        assert_eq!((vms.len(), vms[0].start_ticks), (1, 2));
    }
}
