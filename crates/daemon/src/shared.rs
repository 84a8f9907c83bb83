//! State shared by the control loop and the HTTP server: the last turn's snapshot, and commands with their answers.

use std::collections::BTreeMap;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::{Decision, Phase};
use plimsoll_protocol::group::Groups;
use plimsoll_protocol::plan::PlanInputs;
use plimsoll_protocol::request::{Choice, Event, RefusalKind, SettingsChange};
use plimsoll_protocol::vm::{HeatmapView, HostMemory, HostView, VmSummary};
use tokio::sync::{broadcast, oneshot};

use crate::clock::{Clock, unix_ms};
use crate::config::Config;
use crate::demand;
use crate::history::History;

/// The host as of the last turn. Never changed, only replaced.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The host and its VMs.
    pub host: HostView,
    /// The curves of the VMs.
    pub curves: BTreeMap<String, CurveJson>,
    /// The curves of the control groups, by path.
    pub group_curves: BTreeMap<String, CurveJson>,
    /// The memory that each VM with a curve needs for each of [`demand::PROMISES`], in bytes.
    pub demands: BTreeMap<String, [u64; demand::PROMISES.len()]>,
    /// The heatmaps of the VMs, newest periods last.
    pub heat: BTreeMap<String, Arc<HeatmapView>>,
    /// The policy's input in the last turn; `None` before the first VM.
    pub inputs: Option<PlanInputs>,
    /// The proposal that `apply` would carry out.
    pub proposal: Option<Decision>,
}

impl Snapshot {
    /// The snapshot shown until the first turn has ended.
    pub fn before_the_first_turn(config: &Config) -> Self {
        let now = unix_ms();
        let host = HostView {
            schema: plimsoll_protocol::SCHEMA,
            host: config.host_name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            mode: config.mode,
            paused: false,
            phase: Phase::Whole,
            since_unix_ms: now,
            now_unix_ms: now,
            turn: 0,
            turn_interval_ms: u64::try_from(config.turn_interval.as_millis()).unwrap_or(u64::MAX),
            turn_took_ms: 0.0,
            memory: HostMemory::default(),
            vms: Vec::new(),
            groups: Groups::default(),
            moving: None,
            warnings: vec!["the first turn has not ended yet".to_owned()],
            history_bytes: None,
            daemon_resident_bytes: 0,
        };
        Self {
            host,
            curves: BTreeMap::new(),
            group_curves: BTreeMap::new(),
            demands: BTreeMap::new(),
            heat: BTreeMap::new(),
            inputs: None,
            proposal: None,
        }
    }
}

/// A refusal, with its reason and the resulting state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestRefusal {
    /// Its kind.
    pub kind: RefusalKind,
    /// The message for the client.
    pub message: String,
}

impl RequestRefusal {
    /// Makes a refusal.
    pub fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}

/// Receiver of the answer to a command.
pub type Reply<T> = oneshot::Sender<Result<T, RequestRefusal>>;

/// Commands of clients. The turn loop answers within a tick (a second).
#[derive(Debug)]
pub enum Command {
    /// Carry out a proposal.
    Apply(Choice, Reply<Decision>),
    /// Roll a decision back.
    Rollback(Choice, Reply<Decision>),
    /// Pause: move nothing from now on; a move in progress is stopped.
    Pause(Reply<()>),
    /// Resume moving.
    Resume(Reply<()>),
    /// Change a VM's limits.
    Set(String, SettingsChange, Reply<VmSummary>),
    /// Read the configuration again.
    Reload(Reply<()>),
}

/// State held by both sides.
#[derive(Debug)]
pub struct SharedState {
    /// With the time of its publication, since boot.
    snapshot: RwLock<(Arc<Snapshot>, Duration)>,
    /// The time.
    pub clock: Clock,
    commands: SyncSender<Command>,
    /// Curves, samples and decisions of the past.
    pub history: Arc<History>,
    /// Events, for subscribers.
    pub events: broadcast::Sender<Event>,
}

/// Maximum number of events kept for a slow subscriber.
const EVENTS: usize = 64;

impl SharedState {
    /// Shares `snapshot` until the first turn, and passes commands to the other end of `commands`.
    pub fn new(
        snapshot: Snapshot,
        commands: SyncSender<Command>,
        history: Arc<History>,
        clock: Clock,
    ) -> Self {
        Self {
            snapshot: RwLock::new((Arc::new(snapshot), clock.now().since_boot)),
            clock,
            commands,
            history,
            events: broadcast::channel(EVENTS).0,
        }
    }

    /// The host as of the last turn.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        let snapshot = self.snapshot.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&snapshot.0)
    }

    /// Age of the snapshot.
    pub fn age(&self) -> Duration {
        let snapshot = self.snapshot.read().unwrap_or_else(PoisonError::into_inner);
        self.clock.now().since_boot.saturating_sub(snapshot.1)
    }

    /// Replaces the snapshot, and notifies subscribers.
    pub fn publish(&self, snapshot: Snapshot) {
        let turn = snapshot.host.turn;
        let published = (Arc::new(snapshot), self.clock.now().since_boot);
        *self
            .snapshot
            .write()
            .unwrap_or_else(PoisonError::into_inner) = published;
        self.tell(Event::Turn { turn });
    }

    /// Notifies subscribers; it is no error if there are none.
    pub fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// Passes a command to the turn loop.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Busy`] if the loop is behind or has ended; nothing was changed.
    pub fn command(&self, command: Command) -> Result<(), RequestRefusal> {
        self.commands.try_send(command).map_err(|error| {
            let why = match error {
                TrySendError::Full(_) => {
                    "the daemon is behind with earlier requests; nothing was changed"
                }
                TrySendError::Disconnected(_) => "the daemon is shutting down; nothing was changed",
            };
            RequestRefusal::new(RefusalKind::Busy, why)
        })
    }
}
