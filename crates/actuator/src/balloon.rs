//! A VM's balloon, by QEMU's monitor.
//!
//! The target is set, and the guest's driver follows; how far, QEMU says when asked. Its event `BALLOON_CHANGE` says
//! no more than that, so no connection is kept for it: a monitor serves one client at a time, and operators and
//! libvirt need it too. Each exchange ends within [`BalloonSettings::timeout`], whatever the monitor does.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use plimsoll_flow::VmId;
use plimsoll_vm::{GuestStats, Qmp, VmError};

use crate::follow::{Absence, Follower, Part, Patience};
use crate::{ActuatorError, Sent};

/// Targets are multiples of the balloon's pages.
const PAGE_BYTES: u64 = 4096;
/// How QEMU refuses what needs a balloon if there is none.
const NO_BALLOON: &str = "DeviceNotActive";

/// How a balloon is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BalloonSettings {
    /// Longest exchange with the monitor.
    pub timeout: Duration,
    /// How long the guest may take.
    pub patience: Patience,
    /// How often the guest is to tell its statistics, in s, if nobody has set that; 0: it is not asked to.
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

/// How long a monitor that hangs, or serves somebody else, is left alone.
const QUIET: std::time::Duration = std::time::Duration::from_secs(5);

/// A VM's balloon.
#[derive(Debug)]
pub struct Balloon {
    vm: VmId,
    socket: PathBuf,
    settings: BalloonSettings,
    /// The VM's RAM.
    max_bytes: u64,
    absence: Option<Absence>,
    follower: Follower,
    /// Until when a monitor that did not answer is not asked again, and what it was.
    quiet: Option<(Instant, String)>,
}

impl Balloon {
    /// The balloon of a VM of so much RAM, whose monitor listens at `socket`. Nothing is asked yet.
    #[must_use]
    pub fn new(vm: VmId, socket: PathBuf, memory_bytes: u64, settings: BalloonSettings) -> Self {
        Self {
            vm,
            socket,
            settings,
            max_bytes: memory_bytes,
            absence: None,
            follower: Follower::new(settings.patience),
            quiet: None,
        }
    }

    /// The VM.
    #[must_use]
    pub fn vm(&self) -> &VmId {
        &self.vm
    }

    /// Sets how much memory the VM is to have, rounded down to 4 KiB. Telling a target again is harmless.
    ///
    /// # Errors
    ///
    /// [`ActuatorError::Target`] for none, or more than the VM's RAM; [`ActuatorError::Set`], which says whether it was
    /// sent.
    pub fn set(&mut self, target_bytes: u64) -> Result<(), ActuatorError> {
        let target_bytes = target_bytes - target_bytes % PAGE_BYTES;
        let max_bytes = self.max_bytes;
        if !(PAGE_BYTES..=max_bytes).contains(&target_bytes) {
            return Err(ActuatorError::Target {
                what: self.name(),
                target_bytes,
                why: format!("expected {PAGE_BYTES} to {max_bytes}, its RAM"),
            });
        }
        let deadline = Instant::now() + self.settings.timeout;
        let mut sent = Sent::No;
        let told = self.connect(deadline).and_then(|mut qmp| {
            sent = Sent::Maybe;
            qmp.within(deadline).set_balloon(target_bytes)
        });
        if let Err(VmError::QmpRefused { class, .. }) = &told {
            sent = Sent::No;
            if class == NO_BALLOON {
                self.absence = Some(Absence::NoDevice);
            }
        }
        if told.is_ok() || sent == Sent::Maybe {
            self.follower
                .tell(target_bytes, told.is_ok(), Instant::now());
        }
        told.map_err(|source| ActuatorError::Set {
            what: self.name(),
            target_bytes,
            sent,
            source: source.into(),
        })
    }

    /// Asks how far the guest has followed, and for its statistics, if it tells any.
    ///
    /// # Errors
    ///
    /// [`ActuatorError::Ask`].
    pub fn look(&mut self) -> Result<Option<GuestStats>, ActuatorError> {
        if let Some((until, why)) = &self.quiet
            && Instant::now() < *until
        {
            return Err(ActuatorError::Ask {
                what: self.name(),
                source: why.clone().into(),
            });
        }
        let asked = self.ask();
        self.quiet = match &asked {
            Err(error @ (VmError::QmpTimeout { .. } | VmError::QmpTaken { .. })) => {
                let why = format!("{error}; it is left alone for {} s", QUIET.as_secs());
                Some((Instant::now() + QUIET, why))
            }
            _ => None,
        };
        asked.map_err(|source| ActuatorError::Ask {
            what: self.name(),
            source: source.into(),
        })
    }

    /// What is known, by the last look.
    #[must_use]
    pub fn part(&self) -> Part {
        let max_bytes = Some(self.max_bytes);
        self.follower.part(max_bytes, self.absence, Instant::now())
    }

    fn name(&self) -> String {
        format!("the balloon of VM {}", self.vm)
    }

    fn connect(&self, deadline: Instant) -> Result<Exchange, VmError> {
        let left = deadline.saturating_duration_since(Instant::now());
        Qmp::connect(&self.socket, left).map(Exchange)
    }

    fn ask(&mut self) -> Result<Option<GuestStats>, VmError> {
        let deadline = Instant::now() + self.settings.timeout;
        let mut qmp = self.connect(deadline)?;
        self.max_bytes = qmp.within(deadline).memory_bytes()?;
        let actual_bytes = match qmp.within(deadline).balloon_actual_bytes() {
            Err(VmError::QmpRefused { class, .. }) if class == NO_BALLOON => {
                self.absence = Some(Absence::NoDevice);
                self.follower.see(self.max_bytes, Instant::now());
                return Ok(None);
            }
            actual_bytes => actual_bytes?,
        };
        self.follower.see(actual_bytes, Instant::now());
        self.absence = None;
        let Some(path) = qmp.within(deadline).find_balloon()? else {
            // It is somewhere else in QEMU's tree, and works without statistics.
            return Ok(None);
        };
        let mut interval_s = qmp.within(deadline).stats_interval_s(&path)?;
        if interval_s == 0 && self.settings.stats_interval_s > 0 {
            interval_s = self.settings.stats_interval_s;
            qmp.within(deadline)
                .set_stats_interval_s(&path, interval_s)?;
        }
        let told = qmp.within(deadline).guest_stats(&path)?;
        // Drivers tell statistics when they begin.
        if told.is_none() && actual_bytes == self.max_bytes {
            self.absence = Some(Absence::NoDriver);
        }
        Ok(told.map(|stats| GuestStats {
            interval_s,
            ..stats
        }))
    }
}

/// A connection for the commands of one exchange.
struct Exchange(Qmp);

impl Exchange {
    /// Gives the next command what is left until `deadline`.
    fn within(&mut self, deadline: Instant) -> &mut Qmp {
        let left = deadline.saturating_duration_since(Instant::now());
        self.0.set_timeout(left);
        &mut self.0
    }
}
