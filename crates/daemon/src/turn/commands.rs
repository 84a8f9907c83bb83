//! Commands of operators: apply, roll back, pause, resume, change a VM's settings, reload the configuration.

use std::time::Instant;

use plimsoll_flow::PageSize;
use plimsoll_policy::allocate;
use plimsoll_protocol::decision::{Decision, Initiator, Kind, Mode, State};
use plimsoll_protocol::plan::{PlanError, Shortfall};
use plimsoll_protocol::request::{Choice, RefusalKind, SettingsChange};
use plimsoll_protocol::size::ByteSize;
use plimsoll_protocol::vm::VmSummary;

use super::{Stage, Turns};
use crate::config::{BASELINE_BYTES_MIN, SHARES_MAX};
use crate::host::Host;
use crate::shared::{Command, Reply, RequestRefusal};
use crate::vm::Vm;

/// Maximum size that may be set by hand.
const SIZE_MAX: u64 = 1 << 50;

impl<H: Host> Turns<H> {
    /// Answers a command. The client may have disconnected.
    pub fn answer(&mut self, command: Command, now: Instant) {
        match command {
            Command::Apply(choice, reply) => {
                let done = self.apply(choice, now);
                self.reply(reply, done);
            }
            Command::Rollback(choice, reply) => {
                let done = self.roll_back(choice, now);
                self.reply(reply, done);
            }
            Command::Pause(reply) => {
                self.pause();
                self.reply(reply, Ok(()));
            }
            Command::Resume(reply) => {
                self.paused = false;
                let _ = self.history.put_paused(false);
                tracing::info!("resumed");
                self.reply(reply, Ok(()));
            }
            Command::Set(vm, change, reply) => {
                let done = self.set(&vm, change);
                self.reply(reply, done);
            }
            Command::Reload(reply) => {
                let done = self.reload();
                self.reply(reply, done);
            }
        }
    }

    /// Replies once what was done is published: whoever has the answer and asks for the host sees it.
    fn reply<T>(&mut self, to: Reply<T>, done: Result<T, RequestRefusal>) {
        self.publish();
        drop(to.send(done));
    }

    pub(super) fn pause(&mut self) {
        self.paused = true;
        let _ = self.history.put_paused(true);
        self.stop("It was paused");
        tracing::warn!("paused: nothing is moved until resumed");
    }

    pub(super) fn free_to_move(&self) -> Result<(), RequestRefusal> {
        if self.paused {
            return Err(RequestRefusal::new(
                RefusalKind::Conflict,
                "the daemon is paused: resume it first; nothing was moved",
            ));
        }
        match &self.active {
            None => Ok(()),
            Some(active) => Err(RequestRefusal::new(
                RefusalKind::Conflict,
                format!(
                    "decision {} is under way: wait for its end or pause; nothing was moved",
                    active.decision.id
                ),
            )),
        }
    }

    pub(super) fn apply(
        &mut self,
        choice: Choice,
        now: Instant,
    ) -> Result<Decision, RequestRefusal> {
        self.free_to_move()?;
        let Some((decision, pending)) = self.proposal.clone() else {
            let (kind, why) = match &self.infeasible {
                Some(why) if self.guarantee => (RefusalKind::Guarantee, why.clone()),
                Some(why) => (RefusalKind::Conflict, why.clone()),
                None => (
                    RefusalKind::NotFound,
                    "nothing is proposed: no allocation is worth a move, or there is too little data yet"
                        .to_owned(),
                ),
            };
            return Err(RequestRefusal::new(
                kind,
                format!("{why}; nothing was moved"),
            ));
        };
        if choice.decision.is_some_and(|id| id != decision.id) {
            return Err(RequestRefusal::new(
                RefusalKind::Conflict,
                format!(
                    "the proposal is now {}: review and apply that one; nothing was moved",
                    decision.id
                ),
            ));
        }
        self.begin(pending, Initiator::Operator, Some(decision), now);
        self.under_way()
    }

    pub(super) fn under_way(&self) -> Result<Decision, RequestRefusal> {
        let active = self.active.as_ref().map(|active| active.decision.clone());
        let last = || self.history.decisions(None, None, 1).into_iter().next();
        active.or_else(last).ok_or_else(|| {
            RequestRefusal::new(
                RefusalKind::Busy,
                "the decision was carried out, but is not recorded",
            )
        })
    }

    pub(super) fn roll_back(
        &mut self,
        choice: Choice,
        now: Instant,
    ) -> Result<Decision, RequestRefusal> {
        if self.paused {
            self.free_to_move()?;
        }
        let can = |decision: &Decision| {
            decision.kind != Kind::Rollback
                && decision.taken_back_by.is_none()
                && !matches!(
                    decision.state,
                    State::Proposed | State::Superseded | State::Failed | State::RolledBack
                )
        };
        let decision = match choice.decision {
            Some(id) => {
                let found = self.history.decision(id).ok_or_else(|| {
                    RequestRefusal::new(
                        RefusalKind::NotFound,
                        format!("there is no decision {id}; nothing was moved"),
                    )
                })?;
                if !can(&found) {
                    return Err(RequestRefusal::new(
                        RefusalKind::Conflict,
                        format!(
                            "decision {id} moved nothing that could be rolled back, or was already rolled back"
                        ),
                    ));
                }
                found
            }
            None => self
                .history
                .decisions(None, None, 100)
                .into_iter()
                .find(|decision| can(decision))
                .ok_or_else(|| {
                    RequestRefusal::new(
                        RefusalKind::NotFound,
                        "there is no decision that could be taken back",
                    )
                })?,
        };
        if let Some(active) = &self.active {
            if active.decision.id != decision.id {
                self.free_to_move()?;
            }
            self.stop("It is taken back by an operator");
        }
        let pending = self.rollback_move(&decision, "Requested by an operator.");
        let Some(pending) = pending else {
            return Err(RequestRefusal::new(
                RefusalKind::NotFound,
                format!(
                    "the VMs have what they had before decision {}, or the most that their limits allow now: nothing was moved",
                    decision.id
                ),
            ));
        };
        self.begin(pending, Initiator::Operator, None, now);
        self.mark_taken_back(decision.id);
        // The daemon must not repeat at once what was just rolled back.
        self.cooldown_until = Some(now + self.config.cooldown);
        self.under_way()
    }

    pub(super) fn set(
        &mut self,
        name: &str,
        change: SettingsChange,
    ) -> Result<VmSummary, RequestRefusal> {
        let bad = |what: String| {
            RequestRefusal::new(
                RefusalKind::BadRequest,
                format!("{what}; nothing was changed"),
            )
        };
        let Some(vm) = self.vms.get(name) else {
            return Err(RequestRefusal::new(
                RefusalKind::NotFound,
                format!("there is no VM {name}; nothing was changed"),
            ));
        };
        let old = if change.reset {
            SettingsChange::default()
        } else {
            vm.change
        };
        let new = SettingsChange {
            reset: false,
            min_bytes: change.min_bytes.or(old.min_bytes),
            max_bytes: change.max_bytes.or(old.max_bytes),
            baseline_bytes: change.baseline_bytes.or(old.baseline_bytes),
            shares: change.shares.or(old.shares),
            managed: change.managed.or(old.managed),
            ..SettingsChange::default()
        }
        .with_promise(change.promise().or(old.promise()));
        let settings = vm.settings_with(&new);
        if settings.min_bytes > settings.max_bytes {
            return Err(bad(format!(
                "the minimum size, {}, is above the maximum, {}",
                ByteSize(settings.min_bytes),
                ByteSize(settings.max_bytes)
            )));
        }
        let given = [change.min_bytes, change.max_bytes, change.baseline_bytes];
        let page_bytes = PageSize::FOUR_KIB.bytes();
        if let Some(size) = given
            .into_iter()
            .flatten()
            .find(|size| !size.is_multiple_of(page_bytes))
        {
            return Err(bad(format!(
                "a size of {size} bytes: expected whole pages of 4 KiB"
            )));
        }
        if settings.baseline_bytes < BASELINE_BYTES_MIN {
            return Err(bad(format!(
                "a baseline of {}: expected {} or more",
                ByteSize(settings.baseline_bytes),
                ByteSize(BASELINE_BYTES_MIN)
            )));
        }
        let most_bytes = vm.most_bytes();
        let limits = [
            ("minimum", change.min_bytes),
            ("maximum", change.max_bytes),
            ("baseline", change.baseline_bytes),
        ];
        let mut limits = limits.into_iter();
        if let Some((what, size)) =
            limits.find_map(|(what, size)| Some((what, size.filter(|size| *size > most_bytes)?)))
        {
            return Err(bad(format!(
                "a {what} of {}: expected at most its RAM{}, {}",
                ByteSize(size),
                match most_bytes < vm.ram_bytes() {
                    true => ", as far as its control group's limit leaves it",
                    false => "",
                },
                ByteSize(most_bytes)
            )));
        }
        if !(1..=SHARES_MAX).contains(&settings.shares) {
            return Err(bad(format!(
                "{} shares: expected 1 to {SHARES_MAX}",
                settings.shares
            )));
        }
        let promise = settings.promise;
        let bounds = [
            ("loss", promise.max_loss, 10.0, "as a share"),
            (
                "number of misses",
                promise.max_misses_per_second,
                1e7,
                "per second",
            ),
            ("stall", promise.max_stall, 1.0, "as a share"),
        ];
        for (name, bound, most, unit) in bounds {
            if let Some(bound) = bound.filter(|bound| !(0.0..=most).contains(bound)) {
                return Err(bad(format!(
                    "a {name} of {bound}: expected 0 to {most}, {unit}"
                )));
            }
        }
        if settings.baseline_bytes > SIZE_MAX || settings.max_bytes > SIZE_MAX {
            return Err(bad("a size above 1 PiB".to_owned()));
        }
        let before = vm.change;
        let shortfall_before = self.shortfall();
        let Some(vm) = self.vms.get_mut(name) else {
            return Err(bad(format!("there is no VM {name}")));
        };
        vm.change = new;
        // A guarantee is given only if all can be kept together.
        let refused = self.shortfall().filter(|now| {
            let before = shortfall_before.as_ref();
            before.is_none_or(|before| now.needed_bytes > before.needed_bytes)
        });
        if let (Some(why), Some(vm)) = (refused, self.vms.get_mut(name)) {
            vm.change = before;
            return Err(RequestRefusal::new(
                RefusalKind::Guarantee,
                format!("with that, {why}; nothing was changed"),
            ));
        }
        let _ = self.history.put_settings(name, &new);
        tracing::info!(vm = name, ?new, "settings changed by hand");
        self.promises_changed(Some(name));
        self.next_turn = Instant::now();
        let vm = &self.vms[name];
        Ok(self.summary(name, vm, self.shared.clock.now()))
    }

    /// What the VMs' limits lack to be kept together; `None` if they can be.
    pub(super) fn shortfall(&self) -> Option<Shortfall> {
        let demands = self.demands();
        let error = allocate(&demands, &self.rules(), self.config.policy).err()?;
        match PlanError::of_policy(error, &demands, PageSize::FOUR_KIB) {
            PlanError::Infeasible(shortfall) => Some(shortfall),
            _ => None,
        }
    }

    /// A proposal, or a move in progress, is based on limits that have changed: of `vm`, or of all.
    pub(super) fn promises_changed(&mut self, vm: Option<&str>) {
        self.withdraw();
        let concerned = self
            .active
            .as_ref()
            .is_some_and(|active| match &active.stage {
                Stage::Moving(under_way) => vm.is_none_or(|vm| under_way.involves(vm)),
                Stage::Checking(_) => false,
            });
        if concerned {
            self.stop("What one of its VMs is promised was changed");
        }
    }

    pub(super) fn reload(&mut self) -> Result<(), RequestRefusal> {
        let new = (self.reload)().map_err(|why| {
            tracing::error!("the configuration was not reloaded, the old one holds: {why}");
            RequestRefusal::new(
                RefusalKind::BadRequest,
                format!("{why}; the old configuration holds"),
            )
        })?;
        let restart = self.config.changes_needing_restart(&new);
        if !restart.is_empty() {
            tracing::warn!(
                "these take effect at the next start: {}; keys of [trace], balloon, libvirt and [[vm]] hold at once for VMs that are found later",
                restart.join(", ")
            );
        }
        if new.workflow != self.config.workflow {
            self.stop("The workflow was changed");
        }
        let before: Vec<_> = self.vms.values().map(Vm::settings).collect();
        let was_acting = self.config.mode == Mode::Act;
        self.host.reconfigured(&new);
        self.config = new;
        for (name, vm) in &mut self.vms {
            vm.rule = self.config.settings_for(name, vm.found.uuid.as_deref());
        }
        let stopped = was_acting && self.config.mode != Mode::Act;
        if stopped || self.vms.values().map(Vm::settings).ne(before) {
            self.promises_changed(None);
        }
        self.next_turn = Instant::now();
        tracing::info!("the configuration was reloaded");
        Ok(())
    }
}
