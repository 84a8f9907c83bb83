//! The definition of a backend: the trait, its observations, and the row by which it is chosen.
//!
//! Not here: the list of the rows (`registry`).

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use plimsoll_flow::{FirstTouches, PageNumber, Period, ReferenceBatch, TraceMethod};

use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::rate::RateRule;
use crate::refusal::Refusal;
use crate::requirement::Requirement;
use crate::target::{GroupTarget, TraceTarget};
use crate::trial::{TouchCost, Toucher};

/// A VM that is being observed. Dropped, it leaves nothing in the VM.
pub trait Backend: fmt::Debug + Send {
    /// Observes the VM for one period and passes its observations to `sink`, in order.
    ///
    /// Ends early, with a report on the observations so far, when `stop` becomes true or the VM ends.
    ///
    /// # Errors
    ///
    /// [`TrapError::VmGone`] when the VM has ended before anything was observed in this period,
    /// [`TrapError::StayedAccessible`] when its pages cannot be made inaccessible, [`TrapError::Call`] for
    /// errors that should not happen. Observations before the error have been passed on.
    fn run_period(&mut self, stop: &AtomicBool, sink: Sink<'_>) -> Result<Period, TrapError>;

    /// Removes everything from the VM and ends.
    ///
    /// # Errors
    ///
    /// [`TrapError::Call`] if the kernel does not take the RAM back; closing the descriptor, which happens
    /// all the same, has the same effect.
    fn detach(self: Box<Self>) -> Result<(), TrapError> {
        // Most have nothing in the VM between two periods.
        Ok(())
    }

    /// The cost to the VM of one observed touch on this host: as measured before attaching, or learned since.
    fn touch_cost(&self) -> TouchCost;

    /// Pages of the VM's RAM.
    fn ram_pages(&self) -> u64;

    /// Observes from now on the memory that a process has by now, without attaching anew. Returns whether it can: if not, it
    /// must be attached anew.
    ///
    /// # Errors
    ///
    /// As [`run_period`](Self::run_period).
    fn follow(&mut self, _target: &TraceTarget) -> Result<bool, TrapError> {
        Ok(false)
    }

    /// Likewise the groups that a control group has by now.
    fn follow_group(&mut self, _group: &GroupTarget) {}
}

/// An observation of a backend.
#[derive(Debug)]
pub enum Observation<'a> {
    /// References in the order in which they happened.
    References(&'a ReferenceBatch),
    /// References in the order in which they happened, from period to period.
    Stream {
        /// The references.
        references: &'a ReferenceBatch,
        /// Whether none was missed between those before and these, and the sample of pages is the same.
        follows: bool,
    },
    /// The pages touched between two scans, whose order is unknown.
    Scan(Scan<'a>),
    /// Samples that ended in the period or still wait for the first touch of their page.
    FirstTouches {
        /// The samples.
        samples: FirstTouches<'a>,
        /// The references that ended samples.
        touched: &'a ReferenceBatch,
    },
}

impl<'a> Observation<'a> {
    /// The references themselves.
    pub fn references(&self) -> &'a ReferenceBatch {
        match self {
            Self::References(batch)
            | Self::Stream {
                references: batch, ..
            } => batch,
            Self::Scan(scan) => scan.touched,
            Self::FirstTouches { touched, .. } => touched,
        }
    }

    /// Their pages.
    pub fn pages(&self) -> &'a [PageNumber] {
        self.references().pages()
    }
}

/// One scan: what was touched since the scan before.
#[derive(Debug)]
pub struct Scan<'a> {
    /// Time of the scan before, from the start of the window: CPU time of the VM's process for accessed-page
    /// scans, wall time for the others.
    pub from: Duration,
    /// Time of this scan; later than `from`.
    pub to: Duration,
    /// The tracked pages touched in between, each once, in ascending order. A page both read and
    /// written counts as written.
    pub touched: &'a ReferenceBatch,
}

/// Receives the observations of a period.
pub type Sink<'a> = &'a mut dyn FnMut(&Observation<'_>);

/// What a backend's observations amount to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Yield {
    /// References in order, of one period at a time.
    References,
    /// References in order, from period to period.
    Stream,
    /// Scans of the same pages again and again.
    Scans,
    /// Times from a random time to the next touch of a random page.
    FirstTouches,
    /// One check of each page, from which no curve can be made.
    Sample,
}

/// A backend as users choose it.
#[derive(Debug)]
pub struct BackendRow {
    /// Its method, which determines its name.
    pub method: TraceMethod,
    /// What it observes, as a sentence for help.
    pub sees: &'static str,
    /// What host and VM must have.
    pub needs: &'static str,
    /// What it costs the VM.
    pub costs: &'static str,
    /// What escapes it.
    pub loses: &'static str,
    /// What it passes on.
    pub yields: Yield,
    /// Whether reads are observed as well as writes.
    pub sees_reads: bool,
    /// Settings that apply to it beyond those of all backends, by their names on the command line.
    pub options: &'static [&'static str],
    /// Rules by which its tracking rate can follow the VM.
    pub rate_rules: &'static [RateRule],
    /// Requirements on VM and caller, depending on the settings, in the order in which refusals are reported.
    pub(crate) requirements: fn(&TraceConfig) -> &'static [Requirement],
    /// Tries it on memory of this process; returns the time that an observed touch takes from a toucher on this host.
    pub trial: fn(Toucher) -> Result<Duration, TrapError>,
    /// Time of a VM that the curve of a period takes for an error of [`CURVE_ERROR`](crate::CURVE_ERROR), by the time of
    /// an observed touch, as measured on guests with known curves; `None` if it is not chosen by itself.
    pub curve_cost: Option<fn(Duration) -> Duration>,
    /// Attaches to a VM, or to another process.
    pub(crate) attach: Attach,
    /// Whether it observes processes that are no VMs.
    pub any_process: bool,
    /// How it observes control groups; `None` if it does not.
    pub group: Option<GroupSupport>,
}

/// How a backend observes a control group.
#[derive(Debug)]
pub struct GroupSupport {
    /// Refuses a group that it cannot observe. Changes nothing.
    pub(crate) check: fn(&GroupTarget) -> Result<(), Refusal>,
    /// Attaches.
    pub(crate) attach: AttachGroup,
}

/// Constructor of a backend on a control group.
type AttachGroup = fn(&GroupTarget, &TraceConfig) -> Result<Box<dyn Backend>, TrapError>;

/// Constructor of a backend.
type Attach = fn(&TraceTarget, &TraceConfig) -> Result<Box<dyn Backend>, TrapError>;

impl BackendRow {
    /// Whether its observations give a curve of all accesses, by which sizes can be decided.
    pub fn gives_curve(&self) -> bool {
        self.sees_reads && self.yields != Yield::Sample
    }

    /// Whether it observes VMs.
    pub fn observes_vms(&self) -> bool {
        !(self.requirements)(&TraceConfig::default()).contains(&Requirement::ControlGroup)
    }

    /// Its name in options and configuration.
    pub const fn name(&self) -> &'static str {
        self.method.name()
    }

    /// What is in the way of observing a VM with this backend, in the order in which attaching finds it.
    pub(crate) fn refusals(
        &self,
        target: &TraceTarget,
        config: &TraceConfig,
    ) -> impl Iterator<Item = Refusal> {
        let pid = target.pid;
        let is_refused = !target.is_vm && !self.any_process;
        let not_a_vm = is_refused.then_some(Refusal::NotAVm { pid });
        let requirements = match is_refused {
            true => [].iter(),
            false => (self.requirements)(config).iter(),
        };
        let refusals =
            requirements.filter_map(|requirement| requirement.check(target, config).err());
        not_a_vm.into_iter().chain(refusals)
    }

    /// What is in the way of observing a control group.
    pub(crate) fn group_refusal(&self, group: &GroupTarget) -> Option<Refusal> {
        match &self.group {
            Some(support) => (support.check)(group).err(),
            None => Some(Refusal::ControlGroup {
                directory: group.directory.clone(),
            }),
        }
    }

    /// Attaches to a control group; observes nothing yet.
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach).
    pub fn attach_group(
        &self,
        group: &GroupTarget,
        config: &TraceConfig,
    ) -> Result<Box<dyn Backend>, TrapError> {
        config.check(self.rate_rules)?;
        match (self.group_refusal(group), &self.group) {
            (Some(refusal), _) => Err(refusal.into()),
            (None, Some(support)) => (support.attach)(group, config),
            (None, None) => unreachable!("a backend without support for groups refuses them"),
        }
    }

    /// Attaches to a running VM from outside; observes nothing yet.
    ///
    /// # Errors
    ///
    /// [`TrapError::Refused`] with the first refusal of [`assess`](crate::assess), before anything is changed in the
    /// VM; every other [`TrapError`], and the VM is unchanged.
    pub fn attach(
        &self,
        target: &TraceTarget,
        config: &TraceConfig,
    ) -> Result<Box<dyn Backend>, TrapError> {
        config.check(self.rate_rules)?;
        if let Some(refusal) = self.refusals(target, config).next() {
            return Err(refusal.into());
        }
        (self.attach)(target, config)
    }
}
