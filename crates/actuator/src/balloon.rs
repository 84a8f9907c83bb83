//! A VM's balloon, through QEMU's monitor (QMP).
//!
//! Setting a target starts the guest's driver, and queries return the size it has reached. The event `BALLOON_CHANGE`
//! contains no more than that, so no connection is kept open for it: a monitor serves one client at a time, and
//! operators and libvirt need it too. Each exchange ends within [`BalloonSettings::timeout`] in every case.

use std::time::{Duration, Instant};

use plimsoll_flow::VmId;
use plimsoll_vm::{
    BlockReads, GuestStats, Listener, PeerSocket, Qmp, RunState, StatsClock, VmError,
};

use crate::endpoints::{ActuatorRow, Endpoints, Role};
use crate::outdated_size::OutdatedSize;
use crate::progress::{Absence, Part, Patience, Tracker};
use crate::stats_interval::StatsInterval;
use crate::{ActuatorError, BalloonRecord, Delivery, MemoryPart, Observation};

pub(crate) static ROW: ActuatorRow = ActuatorRow {
    name: "balloon",
    summary: "the VM's virtio-balloon, through QEMU's monitor",
    role: Role::Direct,
    open: |endpoints| {
        let Endpoints {
            vm,
            memory_bytes,
            monitors,
            balloon,
            ..
        } = endpoints;
        let open = || Balloon::new(vm.clone(), monitors.clone(), *memory_bytes, *balloon);
        Ok((!monitors.is_empty()).then(|| Box::new(open()) as _))
    },
};

/// Targets are multiples of the balloon's pages.
const PAGE_BYTES: u64 = 4096;
/// Error class that QEMU returns for balloon commands if the VM has no balloon.
const NO_BALLOON: &str = "DeviceNotActive";

/// Limits of a balloon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BalloonSettings {
    /// Longest exchange with the monitor; libvirt has its own limit.
    pub timeout: Duration,
    /// How long the guest may take before it counts as late or stuck.
    pub patience: Patience,
    /// Interval at which the guest reports statistics, in s, unless one is set already; once a target was set, also instead of
    /// a longer one. 0 leaves it as it is.
    pub stats_interval_s: u64,
}

impl Default for BalloonSettings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(2),
            patience: Patience::default(),
            stats_interval_s: 2,
        }
    }
}

/// Pause after a monitor that hung, or served another client: the first pause, and the longest for repeated failures.
const QUIET: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(1));

/// A VM's balloon.
#[derive(Debug)]
pub struct Balloon {
    vm: VmId,
    /// The last one that answered first.
    monitors: Vec<PeerSocket>,
    settings: BalloonSettings,
    /// Size of the VM's RAM.
    max_bytes: u64,
    /// The part of it that is virtio-mem. QEMU's balloon does not count it, so it is added to the sizes that QEMU reports
    /// and subtracted from targets.
    virtio_mem_bytes: u64,
    stats_interval: StatsInterval,
    absence: Option<Absence>,
    outdated_size: OutdatedSize,
    tracker: Tracker,
    stats_clock: StatsClock,
    /// Reads of the VM's disks at the last query.
    blocks: Option<BlockReads>,
    /// The state in which its vCPUs did not run at the last query.
    stopped: Option<String>,
    /// End of the pause after a monitor that did not answer, and its error.
    quiet: Option<(Instant, String)>,
    /// Length of the next pause.
    pause: Duration,
}

impl Balloon {
    /// The balloon of a VM with this RAM, whose monitors listen at these sockets. Sends nothing yet.
    pub fn new(
        vm: VmId,
        monitors: Vec<PeerSocket>,
        memory_bytes: u64,
        settings: BalloonSettings,
    ) -> Self {
        Self {
            vm,
            monitors,
            settings,
            max_bytes: memory_bytes,
            virtio_mem_bytes: 0,
            stats_interval: StatsInterval::new(settings.stats_interval_s),
            absence: None,
            outdated_size: OutdatedSize::default(),
            tracker: Tracker::new(settings.patience),
            stats_clock: StatsClock::default(),
            blocks: None,
            stopped: None,
            quiet: None,
            pause: QUIET.0,
        }
    }

    /// Queries the balloon's size and the guest's statistics, if it reports any.
    ///
    /// # Errors
    ///
    /// [`ActuatorError::Query`].
    pub fn query(&mut self) -> Result<Option<GuestStats>, ActuatorError> {
        if let Some((until, why)) = &self.quiet
            && Instant::now() < *until
        {
            return Err(ActuatorError::Query {
                what: self.name(),
                source: why.clone().into(),
            });
        }
        let answer = self.exchange();
        self.quiet = match &answer {
            Err(Failure::Vm(error)) if error.took_its_time() => {
                let pause = self.pause;
                self.pause = (pause * 2).min(QUIET.1);
                let why = format!("{error}; not retried for {} s", pause.as_secs());
                Some((Instant::now() + pause, why))
            }
            _ => {
                self.pause = QUIET.0;
                None
            }
        };
        answer.map_err(|failure| match failure {
            Failure::Vm(source) => ActuatorError::Query {
                what: self.name(),
                source: source.into(),
            },
            Failure::Claim {
                claimed_bytes,
                limit_bytes,
            } => ActuatorError::Claim {
                what: self.name(),
                claimed_bytes,
                limit_bytes,
            },
        })
    }

    /// Returns `claimed_bytes` unless it exceeds what the VM's process has mapped, which is at least its RAM.
    fn checked_ram(&self, claimed_bytes: u64) -> Result<u64, Failure> {
        let limit_bytes = match self.monitors.first().map(|monitor| &monitor.listener) {
            Some(Listener::Process(process)) => process.mapped_bytes().unwrap_or(0),
            _ => u64::MAX,
        };
        if claimed_bytes > limit_bytes {
            return Err(Failure::Claim {
                claimed_bytes,
                limit_bytes,
            });
        }
        Ok(claimed_bytes)
    }

    fn name(&self) -> String {
        format!("the balloon of VM {}", self.vm)
    }

    fn connect(&mut self, deadline: Instant) -> Result<Exchange, VmError> {
        let left = deadline.saturating_duration_since(Instant::now());
        Qmp::connect_to(&mut self.monitors, left).map(Exchange)
    }

    fn exchange(&mut self) -> Result<Option<GuestStats>, Failure> {
        let deadline = Instant::now() + self.settings.timeout;
        let mut qmp = self.connect(deadline)?;
        let guest = self.query_balloon(&mut qmp, deadline)?;
        self.stopped = match qmp.within(deadline).status() {
            Err(VmError::QmpRefused { .. }) => None,
            state => stopped_state(state?),
        };
        Ok(guest)
    }

    fn query_balloon(
        &mut self,
        qmp: &mut Exchange,
        deadline: Instant,
    ) -> Result<Option<GuestStats>, Failure> {
        let ram = qmp.within(deadline).ram()?;
        self.max_bytes = self.checked_ram(ram.fixed_bytes + ram.virtio_mem_bytes)?;
        self.virtio_mem_bytes = ram.virtio_mem_bytes;
        self.blocks = match qmp.within(deadline).block_reads() {
            Err(VmError::QmpRefused { .. }) => None,
            blocks => blocks?,
        };
        let actual_bytes = match qmp.within(deadline).balloon_actual_bytes() {
            Err(VmError::QmpRefused { class, .. }) if class == NO_BALLOON => {
                self.absence = Some(Absence::NoDevice);
                self.tracker.see(self.max_bytes, Instant::now());
                return Ok(None);
            }
            actual_bytes => {
                self.checked_ram(actual_bytes?.saturating_add(self.virtio_mem_bytes))?
            }
        };
        self.absence = None;
        let guest = self.query_guest(qmp, actual_bytes, deadline);
        let report = guest.as_ref().ok().and_then(Option::as_ref);
        let size_bytes = (self.outdated_size).resolve(actual_bytes, report, self.max_bytes);
        self.tracker.see(size_bytes, Instant::now());
        guest
    }

    /// The guest's statistics; `None` if it never reported any.
    fn query_guest(
        &mut self,
        qmp: &mut Exchange,
        actual_bytes: u64,
        deadline: Instant,
    ) -> Result<Option<GuestStats>, Failure> {
        let Some(path) = qmp.within(deadline).find_balloon()? else {
            // The balloon is at another path of QEMU's object tree, and works without statistics.
            return Ok(None);
        };
        let mut interval_s = qmp.within(deadline).stats_interval_s(&path)?;
        if let Some(ours_s) = self.stats_interval.to_set(interval_s) {
            qmp.within(deadline).set_stats_interval_s(&path, ours_s)?;
            self.stats_interval.was_set(interval_s);
            interval_s = ours_s;
        }
        let stats = qmp.within(deadline).guest_stats(&path)?;
        // Drivers report statistics when they start.
        if stats.is_none() && actual_bytes == self.max_bytes {
            self.absence = Some(Absence::NoDriver);
        }
        Ok(stats.map(|mut stats| {
            stats.interval_s = interval_s;
            self.stats_clock.measure(&mut stats);
            stats
        }))
    }

    /// A page, and what it does not get: virtio-mem.
    fn min_bytes(&self) -> u64 {
        PAGE_BYTES.saturating_add(self.virtio_mem_bytes)
    }
}

/// The name of a state in which vCPUs do not run. QEMU's are short, in lowercase with hyphens.
fn stopped_state(state: RunState) -> Option<String> {
    let is_word = |name: &str| {
        let mut letters = name.bytes();
        name.len() <= 32 && letters.all(|letter| letter.is_ascii_lowercase() || letter == b'-')
    };
    match (state.running, is_word(&state.status)) {
        (true, _) => None,
        (false, true) => Some(state.status),
        (false, false) => Some("stopped".to_owned()),
    }
}

/// Why an exchange failed.
enum Failure {
    Vm(VmError),
    /// A reported size that is impossible.
    Claim {
        claimed_bytes: u64,
        limit_bytes: u64,
    },
}

impl From<VmError> for Failure {
    fn from(error: VmError) -> Self {
        Self::Vm(error)
    }
}

impl MemoryPart for Balloon {
    fn poll(&mut self, failures: &mut Vec<ActuatorError>) -> Observation {
        (self.blocks, self.stopped) = (None, None);
        let observed = Observation::of_guest(self.query(), failures);
        Observation {
            blocks: self.blocks,
            stopped: self.stopped.clone(),
            ..observed
        }
    }

    fn part(&self) -> Part {
        let max_bytes = Some(self.max_bytes);
        let part = self.tracker.part(max_bytes, self.absence, Instant::now());
        Part {
            min_bytes: self.min_bytes(),
            ..part
        }
    }

    fn record(&self) -> BalloonRecord {
        BalloonRecord::of(&self.outdated_size, &self.stats_interval)
    }

    fn resume(&mut self, record: BalloonRecord) {
        record.restore(&mut self.outdated_size, &mut self.stats_interval);
    }

    fn want_statistics(&mut self, wanted: bool) -> Result<(), ActuatorError> {
        let Some(former_s) = self.stats_interval.want(wanted) else {
            return Ok(());
        };
        let deadline = Instant::now() + self.settings.timeout;
        let restored = self.connect(deadline).and_then(|mut qmp| {
            match qmp.within(deadline).find_balloon()? {
                Some(path) => qmp.within(deadline).set_stats_interval_s(&path, former_s),
                None => Ok(()),
            }
        });
        restored.map_err(|source| ActuatorError::Query {
            what: self.name(),
            source: source.into(),
        })
    }

    /// [`ActuatorError::Target`] for nothing but virtio-mem, or more than the VM's RAM. Setting a target again is harmless.
    fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        let target_bytes = target_bytes - target_bytes % PAGE_BYTES;
        let max_bytes = self.max_bytes;
        let min_bytes = self.min_bytes();
        if !(min_bytes..=max_bytes).contains(&target_bytes) {
            return Err(ActuatorError::Target {
                what: self.name(),
                target_bytes,
                why: format!("expected {min_bytes} to {max_bytes}, its RAM"),
            });
        }
        self.stats_interval.target_is_set();
        let balloon_target_bytes = target_bytes - self.virtio_mem_bytes;
        let deadline = Instant::now() + self.settings.timeout;
        let mut sent = Delivery::No;
        let outcome = self.connect(deadline).and_then(|mut qmp| {
            sent = Delivery::Maybe;
            qmp.within(deadline).set_balloon(balloon_target_bytes)
        });
        if let Err(VmError::QmpRefused { class, .. }) = &outcome {
            sent = Delivery::No;
            if class == NO_BALLOON {
                self.absence = Some(Absence::NoDevice);
            }
        }
        if outcome.is_ok() || sent == Delivery::Maybe {
            self.tracker
                .tell(target_bytes, outcome.is_ok(), Instant::now());
        }
        outcome.map_err(|source| ActuatorError::Set {
            what: self.name(),
            target_bytes,
            sent,
            source: source.into(),
        })
    }
}

/// A connection for the commands of one exchange.
struct Exchange(Qmp);

impl Exchange {
    /// Limits the next command to the time until `deadline`.
    fn within(&mut self, deadline: Instant) -> &mut Qmp {
        let left = deadline.saturating_duration_since(Instant::now());
        self.0.set_timeout(left);
        &mut self.0
    }
}
