//! A VM or a control group, as a user names it and as `show`, `report` and `top` show it in full.
//!
//! | named | is |
//! |---|---|
//! | `cgroup:NAME`, `cgroup:/PATH` | the control group of this name or path |
//! | anything else | the VM of this name, or else the control group |

use std::collections::BTreeMap;

use crate::byte_curve::ByteCurve;
use crate::client::{Client, ClientError};
use crate::curve_json::CurveJson;
use crate::group::{GroupSummary, GroupView};
use crate::request::RefusalKind;
use crate::vm::{
    CurveSource, HistoryView, HostView, TraceState, TraceView, VmSummary, VmView, WorkingSetView,
};
use serde::Serialize;

use crate::name_of;

/// How a user names a control group where a VM could be meant.
pub const GROUP: &str = "cgroup:";

/// What a VM or a control group is requested by. The owner of a VM chooses its name, which may begin like that of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// The VM of this name.
    Vm(String),
    /// The control group of this path.
    Group(String),
    /// Whatever a user calls so.
    Written(String),
}

impl Key {
    /// The name as a user would write it.
    pub fn written(&self) -> String {
        match self {
            Self::Vm(name) | Self::Written(name) => name.clone(),
            Self::Group(path) => format!("{GROUP}{path}"),
        }
    }

    /// The answer about the VM or the group, by its name or path.
    fn answer<T>(
        &self,
        vm: impl Fn(&str) -> Result<T, ClientError>,
        group: impl Fn(&str) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let name = match self {
            Self::Vm(name) => return vm(name),
            Self::Group(path) => return group(path),
            Self::Written(name) => name,
        };
        if let Some(name) = name.strip_prefix(GROUP) {
            return group(name);
        }
        match vm(name) {
            Err(error) if error.refusal_kind() == Some(RefusalKind::ObservedOnly) => group(name),
            answer => answer,
        }
    }
}

/// A VM or a control group in a list.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// A VM.
    Vm(&'a VmSummary),
    /// A control group.
    Group(&'a GroupSummary),
}

impl<'a> Entry<'a> {
    /// The VMs of a host, and after them the control groups that are watched.
    pub fn all(host: &'a HostView) -> impl Iterator<Item = Self> {
        let groups = host.groups.watched.iter().map(Self::Group);
        host.vms.iter().map(Self::Vm).chain(groups)
    }

    /// What it is requested by.
    pub fn key(self) -> Key {
        match self {
            Self::Vm(vm) => Key::Vm(vm.vm.clone()),
            Self::Group(group) => Key::Group(group.path.clone()),
        }
    }

    /// Its name.
    pub fn name(self) -> &'a str {
        match self {
            Self::Vm(vm) => &vm.vm,
            Self::Group(group) => &group.group,
        }
    }

    /// What kind of group it is, or `vm`.
    pub fn kind(self) -> String {
        match self {
            Self::Vm(_) => "vm".to_owned(),
            Self::Group(group) => group.kind.to_string(),
        }
    }

    /// The VM, if it is one.
    pub fn vm(self) -> Option<&'a VmSummary> {
        match self {
            Self::Vm(vm) => Some(vm),
            Self::Group(_) => None,
        }
    }

    /// The control group, if it is one.
    pub fn group(self) -> Option<&'a GroupSummary> {
        match self {
            Self::Vm(_) => None,
            Self::Group(group) => Some(group),
        }
    }

    /// Its working set.
    pub fn working_set(self) -> Option<&'a WorkingSetView> {
        match self {
            Self::Vm(vm) => vm.working_set.as_ref(),
            Self::Group(group) => group.working_set.as_ref(),
        }
    }

    /// Its tracer.
    pub fn trace(self) -> Option<&'a TraceView> {
        match self {
            Self::Vm(vm) => vm.trace.as_ref(),
            Self::Group(group) => group.trace.as_ref(),
        }
    }

    /// How it is traced, in few words.
    pub fn traced(self) -> String {
        let trace = self.trace();
        // Only if it is not as it should be.
        let state = match trace {
            None => Some("no".to_owned()),
            Some(trace) if trace.state == TraceState::Tracing => None,
            Some(trace) => Some(name_of(trace.state)),
        };
        let source = match self {
            Self::Vm(vm) => vm.curve_source,
            Self::Group(group) => group.curve_source,
        };
        let emulated = self.vm().is_some_and(VmSummary::is_emulated);
        let losses = trace.is_some_and(|trace| trace.lost > 0);
        let words = [
            state,
            source.map(name_of),
            emulated.then(|| "tcg".to_owned()),
            losses.then(|| "losses".to_owned()),
        ];
        let words: Vec<_> = words.into_iter().flatten().collect();
        words.join(", ")
    }
}

/// A VM or a control group in full.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum Subject {
    /// A VM.
    Vm(Box<VmView>),
    /// A control group.
    Group(Box<GroupView>),
}

impl Subject {
    /// Requests a VM or a control group.
    ///
    /// # Errors
    ///
    /// Those of [`Client::vm`] and [`Client::group`].
    pub fn ask(client: &Client, key: &Key) -> Result<Self, ClientError> {
        key.answer(
            |name| client.vm(name).map(Box::new).map(Self::Vm),
            |name| client.group(name).map(Box::new).map(Self::Group),
        )
    }

    /// Requests the history of a VM or a control group, from a time on.
    ///
    /// # Errors
    ///
    /// Those of [`Client::history`] and [`Client::group_history`].
    pub fn ask_history(
        client: &Client,
        key: &Key,
        since_unix_ms: u64,
        points: usize,
    ) -> Result<HistoryView, ClientError> {
        let (since, points) = (Some(since_unix_ms), Some(points));
        key.answer(
            |name| client.history(name, since, None, points),
            |name| client.group_history(name, since, None, points),
        )
    }

    /// It as a list has it.
    pub fn entry(&self) -> Entry<'_> {
        match self {
            Self::Vm(view) => Entry::Vm(&view.summary),
            Self::Group(view) => Entry::Group(&view.summary),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.entry().name()
    }

    /// Its curve.
    pub fn curve(&self) -> Option<&CurveJson> {
        match self {
            Self::Vm(view) => view.curve.as_ref(),
            Self::Group(view) => view.curve.as_ref(),
        }
    }

    /// The source of its curve, and its time.
    pub fn curve_origin(&self) -> Option<(CurveSource, u64)> {
        match self {
            Self::Vm(view) => view.summary.curve_source.zip(view.summary.curve_unix_ms),
            Self::Group(view) => view.summary.curve_source.zip(view.summary.curve_unix_ms),
        }
    }

    /// The sizes that matter on its curve.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_is_named_like_a_group_is_requested_as_a_vm() {
        let asked = |key: Key| {
            let vm = |name: &str| Ok(format!("vm {name}"));
            key.answer(vm, |name| Ok(format!("group {name}"))).unwrap()
        };
        assert_eq!(asked(Key::Vm("cgroup:x".to_owned())), "vm cgroup:x");
        let path = "/system.slice/nginx.service";
        let group = Key::Group(path.to_owned());
        assert_eq!(group.written(), format!("cgroup:{path}"));
        assert_eq!(asked(group), format!("group {path}"));
        assert_eq!(asked(Key::Written("cgroup:x".to_owned())), "group x");
        assert_eq!(asked(Key::Written("x".to_owned())), "vm x");
    }
}
