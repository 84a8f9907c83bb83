//! The control groups of a turn. They are observed as VMs are, and nothing here reads or changes what is allocated to VMs.

use plimsoll_flow::PageSize;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::group::{GroupSummary, Groups, LeftOutGroups};
use plimsoll_protocol::vm::{Sample, WorkingSetView};
use plimsoll_vm::CgroupVersion;

use super::Turns;
use crate::clock::Time;
use crate::host::{DiscoveredGroup, FoundGroups, Host};
use crate::observed::Observations;
use crate::vm::bytes;

/// A control group that is watched.
pub(super) struct Group {
    found: DiscoveredGroup,
    /// What its tracer shows of it.
    pub(super) seen: Observations,
    warnings: Vec<String>,
}

/// The control groups of a host.
#[derive(Default)]
pub(super) struct WatchedGroups {
    /// By name.
    pub(super) groups: Vec<Group>,
    left_out: Vec<LeftOutGroups>,
}

impl<H: Host> Turns<H> {
    /// Finds groups that appeared or went since the last turn, and takes what the tracers of all of them show.
    pub(super) fn observe_groups(&mut self) {
        let FoundGroups {
            watched,
            left_out,
            warnings,
        } = self.host.groups();
        self.warnings.extend(warnings);
        let mut before = std::mem::take(&mut self.groups.groups);
        self.groups.left_out = left_out;
        for found in watched {
            let same = |group: &Group| group.found.is_same(&found);
            let group = match before.iter().position(same) {
                Some(index) => Group {
                    found,
                    ..before.swap_remove(index)
                },
                None => {
                    tracing::info!(group = found.listed.path, "a control group is watched");
                    let feeds = self.host.open_group(&found, &self.config);
                    Group {
                        found,
                        seen: Observations::by(feeds),
                        warnings: Vec::new(),
                    }
                }
            };
            self.groups.groups.push(group);
        }
        for gone in before {
            tracing::info!(
                group = gone.found.listed.path,
                "a control group is no longer watched"
            );
        }
        for group in &mut self.groups.groups {
            group.warnings = group.seen.refresh(None, |_| true, |_, curve| curve);
        }
    }

    /// The groups for clients.
    pub(super) fn groups_view(&self, now: Time) -> Groups {
        let watched = self.groups.groups.iter();
        Groups {
            watched: watched.map(|group| group.summary(now)).collect(),
            left_out: self.groups.left_out.clone(),
        }
    }
}

impl Group {
    /// Its path below the root of its hierarchy.
    pub(super) fn path(&self) -> &str {
        &self.found.listed.path
    }

    fn summary(&self, now: Time) -> GroupSummary {
        let (listed, seen) = (&self.found.listed, &self.seen);
        let known = seen.known.as_ref();
        GroupSummary {
            group: self.found.name.clone(),
            kind: self.found.kind,
            path: listed.path.clone(),
            cgroup_version: match listed.version {
                CgroupVersion::V1 => 1,
                CgroupVersion::V2 => 2,
            },
            charged_bytes: listed.charged_bytes,
            limit_bytes: listed.limit_bytes,
            working_set: seen.working_set.map(|set| WorkingSetView {
                bytes: bytes(set.size),
                bound: set.bound,
            }),
            curve_source: known.map(|known| known.source),
            references: known.map_or(0, |known| known.curve.references()),
            curve_unix_ms: known.map(|known| now.unix_ms_at(known.since_boot)),
            trace: seen.trace_view(now),
            warnings: self.warnings.clone(),
        }
    }

    /// Its curve as displayed.
    pub(super) fn curve_json(&self) -> Option<CurveJson> {
        let shown = &self.seen.known.as_ref()?.shown;
        Some(CurveJson::new(
            &self.found.name,
            PageSize::FOUR_KIB,
            None,
            shown,
        ))
    }

    /// Its point in the history; `lost` references were lost since the last one.
    pub(super) fn sample(&self, unix_ms: u64, lost: u64) -> Sample {
        Sample {
            unix_ms,
            direct_bytes: self.found.listed.charged_bytes.unwrap_or(0),
            working_set_bytes: self.seen.working_set.map(|set| bytes(set.size)),
            working_set_bound: self.seen.working_set.map(|set| set.bound),
            overhead_ratio: (self.seen.trace.as_ref()).map(|trace| trace.overhead_ratio),
            lost,
            ..Sample::default()
        }
    }
}
