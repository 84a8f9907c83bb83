//! Which control groups are watched: those that match the configured patterns, up to a maximum.
//!
//! They are found in a thread of its own, whose work is at most a fiftieth of the time. If more groups match than may be watched,
//! those of earlier patterns come first; among those of one pattern, first those that are watched already, then those with the most
//! memory. So a group that anybody creates takes the place of another only if it matches an earlier pattern. Of two groups of which
//! one contains the other only the first in this order is watched: each tracer would take marks of idle pages away from the other.
//!
//! A group is its path: one that is made again with the path of an earlier one keeps its name and goes on with its history, and is
//! observed anew.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use plimsoll_protocol::group::LeftOutGroups;
use plimsoll_vm::{GroupListing, GroupName, ListedGroup, escaped};

use crate::background::Background;
use crate::config::GroupSettings;
use crate::host::{DiscoveredGroup, FoundGroups};

/// Minimum pause between two inspections, and the same as a multiple of the time that the last one took.
const PAUSE: (Duration, u32) = (Duration::from_secs(1), 50);
/// Longest wait of the first turn for the first inspection.
const FIRST_MAX: Duration = Duration::from_secs(1);
/// Age of the last inspection from which on the thread counts as stuck; one of the most directories takes seconds.
const HANGS_AFTER: Duration = Duration::from_mins(5);
/// Maximum number of groups that are named beside a reason; the others are counted.
const NAMED: usize = 10;

/// Why the group of a container's monitor is not watched.
const MONITOR: &str = "it holds the monitor of a container (conmon)";
/// Why the group of a pod's own container is not watched.
const PAUSE_CONTAINER: &str = "it holds nothing but a pod's namespaces (pause)";
/// Why one of two groups is not watched.
const NESTED: &str = "it contains a group that is watched, or lies in one";

/// The thread that finds groups. Ends when dropped.
#[derive(Debug)]
pub struct GroupDiscovery {
    /// `None` if no pattern is configured.
    inspections: Option<Background<FoundGroups>>,
}

impl GroupDiscovery {
    /// Starts the thread, if there are patterns.
    pub fn begin(settings: &GroupSettings) -> Self {
        let begin = || {
            let mut selection = Selection::new(settings.clone());
            let inspect = move || {
                let began = Instant::now();
                let found = selection.inspect();
                (found, PAUSE.0.max(began.elapsed() * PAUSE.1))
            };
            Background::begin("groups", "control groups", HANGS_AFTER, inspect)
        };
        Self {
            inspections: (!settings.watch.is_empty()).then(begin),
        }
    }

    /// The groups of the last inspection; waits a second at most for the first one.
    pub fn last(&self) -> FoundGroups {
        let Some(inspections) = &self.inspections else {
            return FoundGroups::default();
        };
        let (found, warning) = inspections.last(FIRST_MAX);
        let mut found = found.unwrap_or_default();
        found.warnings.extend(warning);
        found
    }
}

/// The groups that are watched, kept from one inspection to the next.
#[derive(Debug)]
struct Selection {
    settings: GroupSettings,
    last: FoundGroups,
}

impl Selection {
    fn new(settings: GroupSettings) -> Self {
        Self {
            settings,
            last: FoundGroups::default(),
        }
    }

    fn inspect(&mut self) -> FoundGroups {
        match GroupListing::matching(&self.settings.watch) {
            Ok(listing) => self.select(listing),
            // Groups found earlier have not ended just because the mounts cannot be listed.
            Err(error) => {
                self.last.warnings = vec![format!("control groups: {error}")];
                self.last.clone()
            }
        }
    }

    fn select(&mut self, listing: GroupListing) -> FoundGroups {
        let before = self.last.watched.iter();
        let before: BTreeMap<_, _> = before.map(|group| (&*group.listed.path, group)).collect();
        let mut groups = listing.groups;
        groups.sort_by_cached_key(|group| {
            let known = before.get(&*group.path);
            let is_watched = known.is_some_and(|known| known.listed.inode == group.inode);
            (
                group.pattern,
                !is_watched,
                Reverse(group.charged_bytes),
                group.path.clone(),
            )
        });
        let mut chosen: Vec<ListedGroup> = Vec::new();
        let mut left_out: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for group in groups {
            let is_nested = |other: &ListedGroup| {
                contains(&other.path, &group.path) || contains(&group.path, &other.path)
            };
            let why = if GroupName::is_monitor(&group.path) {
                MONITOR.to_owned()
            } else if group.is_pause() {
                PAUSE_CONTAINER.to_owned()
            } else if chosen.iter().any(is_nested) {
                NESTED.to_owned()
            } else if chosen.len() as u64 >= self.settings.max {
                let most = self.settings.max;
                format!("no more than {most} groups are watched at a time (groups.max)")
            } else {
                chosen.push(group);
                continue;
            };
            left_out.entry(why).or_default().push(escaped(&group.path));
        }
        // Those that have a name keep it, whatever others are called.
        let kept = |group: &ListedGroup| Some(before.get(&*group.path)?.name.clone());
        let mut taken: BTreeSet<_> = chosen.iter().filter_map(kept).collect();
        let discovered = |listed: ListedGroup| {
            let GroupName { name, kind } = GroupName::of_path(&listed.path);
            let name = kept(&listed).unwrap_or_else(|| free_name(name, &listed, &taken));
            taken.insert(name.clone());
            DiscoveredGroup { name, kind, listed }
        };
        let mut watched: Vec<_> = chosen.into_iter().map(discovered).collect();
        watched.sort_by(|one, other| one.name.cmp(&other.name));
        for (path, fault) in listing.faults {
            left_out.entry(fault.to_string()).or_default().push(path);
        }
        let left_out = left_out.into_iter().map(|(why, mut paths)| {
            let count = paths.len() as u64;
            paths.truncate(NAMED);
            LeftOutGroups { why, count, paths }
        });
        let mut warnings = Vec::new();
        if listing.is_contained {
            let contained = "control groups of the host are not seen: none, or only those of this container, are mounted here; mount \
                             the host's /sys/fs/cgroup into it, as the Helm chart does";
            warnings.push(contained.to_owned());
        }
        let cut = "there are more control groups than one inspection reads: give patterns of fewer groups in groups.watch";
        warnings.extend(listing.is_cut.then(|| cut.to_owned()));
        self.last = FoundGroups {
            watched,
            left_out: left_out.collect(),
            warnings,
        };
        self.last.clone()
    }
}

/// The name of a group that is called `name`, or its path if that is `taken`. Two paths can look alike once they are escaped, so
/// that one of them gets the number of its directory.
fn free_name(name: String, listed: &ListedGroup, taken: &BTreeSet<String>) -> String {
    if !taken.contains(&name) {
        return name;
    }
    let mut name = escaped(&listed.path);
    while taken.contains(&name) {
        name = format!("{name}-{}", listed.inode);
    }
    name
}

/// Whether the group at path `outer` is that at `inner`, or contains it.
fn contains(outer: &str, inner: &str) -> bool {
    let outer = outer.trim_end_matches('/');
    let rest = inner.strip_prefix(outer);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::process::Command;

    use plimsoll_flow::GroupKind;
    use plimsoll_skip::write_program;
    use plimsoll_vm::{CgroupVersion, GroupFault, GroupPattern};

    use super::*;

    fn selection(watch: &[&str], max: u64) -> Selection {
        let watch = watch.iter().map(|text| GroupPattern::new(text).unwrap());
        Selection::new(GroupSettings {
            watch: watch.collect(),
            max,
        })
    }

    fn listed(path: &str, inode: u64, pattern: usize, mib: u64) -> ListedGroup {
        ListedGroup {
            path: path.to_owned(),
            directory: PathBuf::from(format!("/sys/fs/cgroup{path}")),
            version: CgroupVersion::V2,
            inode,
            pattern,
            charged_bytes: Some(mib << 20),
            limit_bytes: None,
        }
    }

    fn listing(groups: &[ListedGroup]) -> GroupListing {
        GroupListing {
            groups: groups.to_vec(),
            ..GroupListing::default()
        }
    }

    fn names(found: &FoundGroups) -> Vec<&str> {
        found.watched.iter().map(|group| &*group.name).collect()
    }

    #[test]
    fn the_largest_are_watched_and_the_others_are_accounted_for() {
        let mut selection = selection(&["**"], 2);
        let groups = [
            listed("/a", 1, 0, 10),
            listed("/b", 2, 0, 30),
            listed("/c\n", 3, 0, 20),
            listed("/d", 4, 0, 5),
        ];
        let faults = vec![("/e".to_owned(), GroupFault::NotCounted)];
        let found = selection.select(GroupListing {
            faults,
            is_cut: true,
            ..listing(&groups)
        });
        assert_eq!(names(&found), ["b", r"c\n"]);
        assert_eq!(found.watched[1].listed.path, "/c\n");
        let left_out: Vec<_> = found
            .left_out
            .iter()
            .map(|left| (left.count, left.paths.join(" ")))
            .collect();
        assert_eq!(left_out, [(1, "/e".to_owned()), (2, "/a /d".to_owned())]);
        assert!(found.left_out[1].why.contains("groups.max"));
        assert_eq!(found.warnings.len(), 1);
    }

    #[test]
    fn a_daemon_that_sees_the_groups_of_its_container_alone_warns() {
        let mut selection = selection(&["**"], 9);
        let found = selection.select(GroupListing {
            is_contained: true,
            ..listing(&[listed("/", 1, 0, 10)])
        });
        assert_eq!(found.warnings.len(), 1);
        assert!(found.warnings[0].contains("/sys/fs/cgroup"), "{found:?}");
    }

    #[test]
    fn of_groups_that_contain_each_other_one_is_watched() {
        let mut selection = selection(&["**"], 9);
        let groups = [
            listed("/a", 1, 0, 30),
            listed("/a/b", 2, 0, 20),
            listed("/a/b/c", 3, 0, 10),
            listed("/ab", 4, 0, 10),
        ];
        let found = selection.select(listing(&groups));
        assert_eq!(names(&found), ["a", "ab"]);
        assert_eq!(
            (found.left_out[0].count, &*found.left_out[0].why),
            (2, NESTED)
        );
        let root = listed("/", 9, 0, 100);
        let mut selection = Selection::new(selection.settings);
        let found = selection.select(listing(&[groups.to_vec(), vec![root]].concat()));
        assert_eq!(names(&found), ["/"]);
    }

    #[test]
    fn the_container_that_keeps_the_namespaces_of_a_pod_is_not_watched() {
        let folder = tempfile::tempdir().unwrap();
        let mut children = ["app", "pause", "catatonit"].map(|name| {
            let program = folder.path().join(name);
            write_program(&program, fs::read("/bin/sleep").unwrap());
            let sleeper = Command::new(program).arg("60").spawn().unwrap();
            let comm = format!("/proc/{}/comm", sleeper.id());
            while fs::read_to_string(&comm).is_ok_and(|comm| comm.trim_end() != name) {
                std::thread::yield_now();
            }
            sleeper
        });
        let [app, pause, catatonit] = [0, 1, 2].map(|index: usize| children[index].id());
        let id = "4f0c2b7a91d8".repeat(6);
        let pod = "/kubepods.slice/kubepods-pod0a1b2c3d_1111_2222_3333_444455556666.slice/cri-containerd-";
        let group = |inode: u64, path: String, members: &str| {
            let directory = folder.path().join(inode.to_string());
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("cgroup.procs"), members).unwrap();
            ListedGroup {
                directory,
                ..listed(&path, inode, 0, 1)
            }
        };
        let of_pod = |inode: u64| format!("{pod}{inode}{}.scope", &id[..63]);
        let of_podman = |inode: u64| format!("/machine.slice/libpod-{inode}{}.scope", &id[..63]);
        let groups = [
            group(1, of_pod(1), &format!("{pause}\n")),
            group(2, of_pod(2), &format!("{app}\n")),
            group(3, of_pod(3), &format!("{app}\n{pause}\n")),
            // Of no pod.
            group(4, format!("/docker/{}", &id[..64]), &format!("{pause}\n")),
            group(5, of_podman(5), &format!("{catatonit}\n")),
            group(6, of_podman(6), &format!("{catatonit}\n{app}\n")),
        ];
        let found = selection(&["**"], 9).select(listing(&groups));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let mut inodes: Vec<_> = found
            .watched
            .iter()
            .map(|group| group.listed.inode)
            .collect();
        inodes.sort_unstable();
        assert_eq!(inodes, [2, 3, 4, 6]);
        let left_out = (found.left_out[0].count, &*found.left_out[0].why);
        assert_eq!(left_out, (2, PAUSE_CONTAINER));
    }

    #[test]
    fn the_monitor_beside_a_container_is_not_watched() {
        let id = "4f0c2b7a91d8".repeat(6);
        let id = &id[..64];
        let mut selection = selection(&["**/libpod-*.scope"], 9);
        let groups = [
            listed(&format!("/machine.slice/libpod-{id}.scope"), 1, 0, 1),
            listed(
                &format!("/machine.slice/libpod-conmon-{id}.scope"),
                2,
                0,
                30,
            ),
        ];
        let found = selection.select(listing(&groups));
        assert_eq!(names(&found), ["libpod-4f0c2b7a91d8"]);
        assert_eq!(
            (found.left_out[0].count, &*found.left_out[0].why),
            (1, MONITOR)
        );
    }

    #[test]
    fn a_new_group_takes_no_place_but_by_an_earlier_pattern() {
        let mut selection = selection(&["important", "*"], 2);
        let first = [listed("/a", 1, 1, 10), listed("/b", 2, 1, 20)];
        assert_eq!(names(&selection.select(listing(&first))), ["a", "b"]);
        let mut more = first.to_vec();
        more.push(listed("/huge", 3, 1, 5000));
        assert_eq!(names(&selection.select(listing(&more))), ["a", "b"]);
        more.push(listed("/important", 4, 0, 1));
        let found = selection.select(listing(&more));
        assert_eq!(names(&found), ["b", "important"]);
        // One that was made again is a new one.
        more[1] = listed("/b", 9, 1, 20);
        let found = selection.select(listing(&more));
        assert_eq!(names(&found), ["huge", "important"]);
    }

    #[test]
    fn a_group_keeps_its_name_when_another_of_it_appears_and_when_it_is_made_again() {
        let mut selection = selection(&["**"], 9);
        let first = listed("/z/nginx.service", 1, 0, 1);
        assert_eq!(
            names(&selection.select(listing(std::slice::from_ref(&first)))),
            ["nginx.service"]
        );
        let second = listed("/a/nginx.service", 2, 0, 1);
        let both = listing(&[second, first.clone()]);
        let found = selection.select(both);
        assert_eq!(names(&found), ["/a/nginx.service", "nginx.service"]);
        assert_eq!(found.watched[1].listed.path, "/z/nginx.service");
        assert_eq!(found.watched[1].kind, GroupKind::Systemd);
        let again = ListedGroup { inode: 7, ..first };
        let found = selection.select(listing(&[again]));
        assert_eq!(names(&found), ["nginx.service"]);
        assert_eq!(found.watched[0].listed.inode, 7);
    }

    #[test]
    fn groups_whose_paths_look_alike_have_different_names() {
        let mut selection = selection(&["**"], 9);
        let paths = ["/a/x", "/b\t/x", r"/b\t/x"];
        let groups = (1..)
            .zip(paths)
            .map(|(inode, path)| listed(path, inode, 0, 9));
        let groups: Vec<_> = groups.collect();
        for _ in 0..2 {
            let found = selection.select(listing(&groups));
            assert_eq!(names(&found), [r"/b\t/x", r"/b\t/x-3", "x"]);
        }
    }

    #[test]
    fn many_groups_that_are_left_out_are_counted_and_few_are_named() {
        let mut selection = selection(&["**"], 1);
        let groups: Vec<_> = (0..5000)
            .map(|index| listed(&format!("/{index}"), index, 0, 1))
            .collect();
        let found = selection.select(listing(&groups));
        let left = &found.left_out[0];
        assert_eq!((left.count, left.paths.len()), (4999, NAMED));
    }
}
