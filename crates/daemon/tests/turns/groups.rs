//! Control groups are observed beside VMs, and no decision knows of them.

use std::sync::Arc;

use plimsoll_daemon::history::{History, group_id};
use plimsoll_daemon::host::{DiscoveredGroup, FoundGroups};
use plimsoll_protocol::decision::{Mode, State};
use plimsoll_vm::{CgroupVersion, GroupName, ListedGroup};

use crate::rig::{MIB, Rig, config};
use crate::simulated::SimulatedHost;

fn found(groups: &[(&str, u64, u64)]) -> FoundGroups {
    let watched = groups.iter().map(|&(path, inode, mib)| {
        let GroupName { name, kind } = GroupName::of_path(path);
        DiscoveredGroup {
            name,
            kind,
            listed: ListedGroup {
                path: path.to_owned(),
                directory: format!("/sys/fs/cgroup{path}").into(),
                version: CgroupVersion::V2,
                inode,
                pattern: 0,
                charged_bytes: Some(mib * MIB),
                limit_bytes: None,
            },
        }
    });
    FoundGroups {
        watched: watched.collect(),
        ..FoundGroups::default()
    }
}

const WEB: &str = "/system.slice/web.service";

#[test]
fn a_group_is_observed_and_memory_is_divided_as_without_it() {
    let run = |groups: FoundGroups| {
        let mut rig = Rig::of_three(config(Mode::Act));
        rig.host.put_groups(groups);
        rig.until("it divides", |rig| {
            let mut decisions = rig.decisions().into_iter();
            decisions.any(|decision| decision.state == State::Kept)
        });
        rig
    };
    let (with, without) = (run(found(&[(WEB, 1, 4000)])), run(FoundGroups::default()));
    let targets = |rig: &Rig| ["web", "search", "scan"].map(|vm| rig.mib(vm));
    assert_eq!(targets(&with), targets(&without));
    let (host, bare) = (with.snapshot(), without.snapshot());
    assert_eq!(host.host.memory, bare.host.memory);
    assert_eq!((host.host.vms.len(), &host.inputs), (3, &bare.inputs));
    let [group] = &host.host.groups.watched[..] else {
        panic!("{:?}", host.host.groups);
    };
    assert_eq!((&*group.group, group.cgroup_version), ("web.service", 2));
    assert_eq!(group.charged_bytes, Some(4000 * MIB));
    assert_eq!(group.working_set.unwrap().bytes, 2000 * MIB);
    assert_eq!((group.references, host.curves.len()), (1000, 3));
    let curve = &host.group_curves[WEB];
    assert_eq!((&*curve.vm, curve.baseline_pages), ("web.service", None));
}

#[test]
fn history_belongs_to_the_path_and_goes_on_when_a_group_is_made_again() {
    let history = Arc::new(History::nowhere());
    let host = SimulatedHost::default();
    let mut rig = Rig::with(config(Mode::Observe), host, Arc::clone(&history));
    let samples = || {
        let all = history.samples(&group_id(WEB), 0, u64::MAX, 1000);
        let sizes = all.iter().map(|sample| sample.direct_bytes / MIB);
        sizes.collect::<Vec<_>>()
    };
    rig.host.put_groups(found(&[(WEB, 1, 100)]));
    rig.pass(10);
    assert_eq!(samples(), [100, 100]);
    rig.host.put_groups(FoundGroups::default());
    rig.pass(10);
    assert_eq!(rig.snapshot().host.groups.watched.len(), 0);
    assert_eq!(rig.snapshot().group_curves.len(), 0);
    assert_eq!(samples(), [100, 100]);
    rig.host.put_groups(found(&[(WEB, 2, 300)]));
    rig.pass(10);
    assert_eq!(samples(), [100, 100, 300, 300]);
    // No VM of any name has these records.
    let vm = history.samples("web.service", 0, u64::MAX, 1000);
    assert_eq!(vm.len(), 0);
}

#[test]
fn a_group_that_was_made_again_between_two_turns_has_a_tracer_of_its_own() {
    let mut rig = Rig::new(config(Mode::Observe));
    for (inode, tracers) in [(1, 1), (1, 1), (2, 2)] {
        rig.host.put_groups(found(&[(WEB, inode, 100)]));
        rig.pass(5);
        assert_eq!(rig.host.group_tracers(), tracers);
    }
}
