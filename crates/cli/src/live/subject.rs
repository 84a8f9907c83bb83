//! What `show`, `report` and `top` show in full: a VM or a control group.
//!
//! | named | is |
//! |---|---|
//! | `cgroup:NAME`, `cgroup:/PATH` | the control group of this name or path |
//! | anything else | the VM of this name, or else the control group |

use std::collections::BTreeMap;

use plimsoll_protocol::byte_curve::ByteCurve;
use plimsoll_protocol::client::{Client, ClientError};
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::group::{GroupSummary, GroupView};
use plimsoll_protocol::request::RefusalKind;
use plimsoll_protocol::vm::{HistoryView, VmSummary, VmView};

/// How a control group is named where a VM could be meant.
pub const GROUP: &str = "cgroup:";

/// A VM or a control group in full.
#[derive(Debug, Clone)]
pub enum Subject {
    /// A VM.
    Vm(Box<VmView>),
    /// A control group.
    Group(Box<GroupView>),
}

impl Subject {
    /// Asks for what is called `name`.
    ///
    /// # Errors
    ///
    /// Those of [`Client::vm`] and [`Client::group`].
    pub fn ask(client: &Client, name: &str) -> Result<Self, ClientError> {
        let group = |name: &str| client.group(name).map(Box::new).map(Self::Group);
        if let Some(name) = name.strip_prefix(GROUP) {
            return group(name);
        }
        match client.vm(name) {
            Err(error) if error.refusal_kind() == Some(RefusalKind::ObservedOnly) => group(name),
            vm => vm.map(Box::new).map(Self::Vm),
        }
    }

    /// Asks for the history of what is called `name`, from a time on.
    ///
    /// # Errors
    ///
    /// Those of [`Client::history`] and [`Client::group_history`].
    pub fn ask_history(
        client: &Client,
        name: &str,
        since_unix_ms: u64,
        points: usize,
    ) -> Result<HistoryView, ClientError> {
        let (since, points) = (Some(since_unix_ms), Some(points));
        let group = |name: &str| client.group_history(name, since, None, points);
        if let Some(name) = name.strip_prefix(GROUP) {
            return group(name);
        }
        match client.history(name, since, None, points) {
            Err(error) if error.refusal_kind() == Some(RefusalKind::ObservedOnly) => group(name),
            history => history,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Vm(view) => &view.summary.vm,
            Self::Group(view) => &view.summary.group,
        }
    }

    /// Its curve.
    #[must_use]
    pub fn curve(&self) -> Option<&CurveJson> {
        match self {
            Self::Vm(view) => view.curve.as_ref(),
            Self::Group(view) => view.curve.as_ref(),
        }
    }

    /// The sizes that matter on its curve.
    #[must_use]
    pub fn sizes(&self) -> SizesOfInterest {
        match self {
            Self::Vm(view) => SizesOfInterest::of_vm(&view.summary),
            Self::Group(view) => SizesOfInterest::of_group(&view.summary),
        }
    }
}

/// The sizes that matter on a curve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizesOfInterest {
    /// Its present size.
    pub now_bytes: u64,
    /// The size against which misses are compared.
    pub baseline_bytes: Option<u64>,
    /// All of them, each with its names; rising.
    pub marks: BTreeMap<u64, String>,
    /// The most that it may have.
    most_bytes: u64,
}

impl SizesOfInterest {
    /// Those of a VM.
    #[must_use]
    pub fn of_vm(vm: &VmSummary) -> Self {
        let baseline = vm.settings.baseline_bytes;
        Self {
            now_bytes: vm.size_bytes,
            baseline_bytes: Some(baseline),
            marks: marked(&[
                (Some(vm.size_bytes), "now"),
                (Some(baseline), "baseline"),
                (vm.promise_bytes, "smallest within its limit"),
                (vm.target_bytes, "target"),
            ]),
            most_bytes: vm.ram_bytes.max(vm.size_bytes).max(baseline),
        }
    }

    /// Those of a control group.
    #[must_use]
    pub fn of_group(group: &GroupSummary) -> Self {
        let charged = group.charged_bytes.unwrap_or(0);
        let uses = group.working_set.map_or(0, |set| set.bytes);
        Self {
            now_bytes: charged,
            baseline_bytes: None,
            marks: marked(&[
                (group.charged_bytes, "charged"),
                (group.limit_bytes, "limit"),
            ]),
            most_bytes: charged.max(uses),
        }
    }

    /// How far the curve is of interest: to its end, or to the most that it may have.
    #[must_use]
    pub fn until(&self, curve: &ByteCurve) -> u64 {
        let most = self.most_bytes;
        most.max(curve.end_bytes().min(most.saturating_mul(2)))
    }
}

fn marked(sizes: &[(Option<u64>, &str)]) -> BTreeMap<u64, String> {
    let mut marks: BTreeMap<u64, String> = BTreeMap::new();
    for &(bytes, name) in sizes {
        let Some(bytes) = bytes else { continue };
        let names = marks.entry(bytes).or_default();
        if !names.is_empty() {
            names.push_str(", ");
        }
        names.push_str(name);
    }
    marks
}
