//! The smallest size of each VM within its limit, and the memory saved: by its present curve, or by those kept over time.

use plimsoll_output::{csv_table, per_second, printable, table};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::rightsize::RightsizeView;
use plimsoll_protocol::vm::{Relative, VmStatus, VmSummary};
use serde::{Deserialize, Serialize};

use crate::words::{
    NO_VM, known, maybe_size, name, name_of, percent, ratio, relative, size, working_set,
};

/// The right sizes of VMs, as JSON has them.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Rightsizes {
    /// [`SCHEMA`].
    pub schema: u32,
    /// In the order of the daemon.
    pub vms: Vec<Rightsize>,
    /// Sum of what could be saved, in bytes.
    pub saves_bytes: u64,
}

/// The right size of a VM.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Rightsize {
    /// The VM.
    pub vm: String,
    /// Its status.
    pub status: VmStatus,
    /// What it has.
    pub size_bytes: u64,
    /// Smallest size within its limit; `null` if there is no curve.
    pub right_bytes: Option<u64>,
    /// What would be saved; `null` if its curve is unknown, 0 if it needs more.
    pub saves_bytes: Option<u64>,
    /// What it needs more than it has; 0 if it has enough.
    pub lacks_bytes: Option<u64>,
    /// Misses at that size over those at the baseline.
    pub relative_then: Option<Relative>,
    /// 1.0 and what may be lost; `null` if it is not promised that.
    pub bound: Option<f64>,
}

impl Rightsize {
    fn of(vm: &VmSummary, relative_then: Option<Relative>) -> Self {
        let right = vm.promise_bytes;
        Self {
            vm: vm.vm.clone(),
            status: vm.status,
            size_bytes: vm.size_bytes,
            right_bytes: right,
            saves_bytes: right.map(|right| vm.size_bytes.saturating_sub(right)),
            lacks_bytes: right.map(|right| right.saturating_sub(vm.size_bytes)),
            relative_then,
            bound: vm.settings.promise.max_loss.map(|loss| 1.0 + loss),
        }
    }
}

impl Rightsizes {
    /// Those of VMs, each with its misses at its right size.
    pub fn new(summaries: &[VmSummary], then: &[Option<Relative>]) -> Self {
        let vms = summaries.iter().zip(then);
        let vms: Vec<_> = vms.map(|(vm, then)| Rightsize::of(vm, *then)).collect();
        let saves = vms.iter().filter_map(|vm| vm.saves_bytes);
        Self {
            schema: SCHEMA,
            saves_bytes: saves.fold(0, u64::saturating_add),
            vms,
        }
    }

    /// A row for each VM of `summaries`, with the terms explained.
    pub fn text(&self, summaries: &[VmSummary]) -> String {
        if self.vms.is_empty() {
            return NO_VM.to_owned();
        }
        let table = table!(self.vms.iter().zip(summaries), |(right, vm)| {
            Left "VM": name(&right.vm),
            Left "status": name_of(right.status),
            Right "has": size(right.size_bytes),
            Right "uses": working_set(vm.working_set.as_ref()),
            Right "needs": maybe_size(right.right_bytes),
            Right "saves": maybe_size(right.saves_bytes),
            Right "lacks": right.lacks_bytes.filter(|lacks| *lacks > 0).map(size),
            Right "misses then": relative(right.relative_then.as_ref()),
            Right "bound": right.bound.map(ratio),
        });
        format!(
            "{table}\n{} could be saved in all. needs: smallest size within its limit, by the upper confidence limit;\n\
             misses then: over those at its baseline.\n",
            size(self.saves_bytes)
        )
    }

    /// A line of comma-separated values for each VM.
    pub fn csv(&self) -> String {
        csv_table!(&self.vms, |vm| {
            "vm": printable(&vm.vm),
            "status": name_of(vm.status),
            "size_bytes": vm.size_bytes,
            "right_bytes": vm.right_bytes,
            "saves_bytes": vm.saves_bytes,
            "lacks_bytes": vm.lacks_bytes,
            "relative_then": vm.relative_then.map(|at| at.expected),
            "relative_then_high": vm.relative_then.map(|at| at.high),
            "bound": vm.bound,
        })
    }
}

/// Sizes that suffice for `percentile` percent of the kept curves, a row for each VM with the terms explained.
pub fn text_over_time(views: &[RightsizeView], percentile: u8) -> String {
    if views.is_empty() {
        return NO_VM.to_owned();
    }
    let table = table!(views, |view| {
        Left "VM": name(&view.vm),
        Right "has": size(view.size_bytes),
        Right "right": maybe_size(view.right_bytes),
        Right "curves": view.curves,
        Right "days": view.days,
        Right "confidence": known(view.confidence, percent),
        Right "within bound": known(view.kept_ratio, percent),
        Right "worst day": known(view.kept_worst_day_ratio, percent),
        Right "misses": known(view.relative, ratio),
        Right "misses/s": known(view.misses_per_second, per_second),
        Right "at baseline": known(view.misses_at_baseline_per_second, per_second),
    });
    format!(
        "{table}\nright: enough for {} % of the kept curves, by the upper confidence limit; confidence: share of the days that the others\n\
         predict. Had it been so: share of the curves within its bound, misses over those at its baseline, and a second.\n",
        percentile
    )
}

/// The same as comma-separated values.
pub fn csv_over_time(views: &[RightsizeView]) -> String {
    csv_table!(views, |view| {
        "vm": printable(&view.vm),
        "since_unix_ms": view.since_unix_ms,
        "percentile": view.percentile,
        "size_bytes": view.size_bytes,
        "right_bytes": view.right_bytes,
        "curves": view.curves,
        "days": view.days,
        "confidence": view.confidence,
        "kept_ratio": view.kept_ratio,
        "kept_worst_day_ratio": view.kept_worst_day_ratio,
        "relative": view.relative,
        "misses_per_second": view.misses_per_second,
        "misses_at_baseline_per_second": view.misses_at_baseline_per_second,
    })
}
