//! The control groups of this host that match patterns of paths.
//!
//! A pattern is a path below the root of a hierarchy: in a component `*` stands for any characters and `?` for one, and a component
//! `**` stands for any number of components. Only directories that can lead to a match are read, those nearer to the root first, one
//! inspection reads at most [`DIRECTORIES_MAX`], and no link is followed. So whoever may create groups below one of theirs can hide
//! only groups as deep as those or deeper.
//!
//! Directories may appear, change and vanish at any time, and whoever may create groups chooses their names.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use plimsoll_flow::GroupKind;
use wildmatch::WildMatch;

use crate::VmError;
use crate::cgroup::{
    CgroupMount, CgroupVersion, MemoryGroup, charged_bytes, counts_memory, limit_bytes,
};
use crate::group_name::{GroupName, escaped};

/// Maximum number of directories of groups that one inspection reads.
pub const DIRECTORIES_MAX: usize = 20_000;
/// Maximum length of a group's path, in bytes.
const PATH_BYTES_MAX: usize = 1024;
/// Maximum number of components of a pattern.
const COMPONENTS_MAX: usize = 32;

/// A pattern of paths of control groups.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupPattern {
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq)]
enum Part {
    /// Any number of components.
    AnyPath,
    /// One component.
    Name(WildMatch),
}

/// Positions in a pattern up to which the components of a path match: a bit each.
type Positions = u64;

impl GroupPattern {
    /// Reads a pattern.
    ///
    /// # Errors
    ///
    /// Why it is none, as the end of a sentence about it.
    pub fn new(text: &str) -> Result<Self, String> {
        let below = text.strip_prefix('/').unwrap_or(text);
        let part = |name: &str| match name {
            "" | "." | ".." => Err(format!("has a component {name:?}")),
            "**" => Ok(Part::AnyPath),
            name => Ok(Part::Name(WildMatch::new(name))),
        };
        let parts: Vec<_> = below.split('/').map(part).collect::<Result<_, _>>()?;
        if parts.len() > COMPONENTS_MAX || text.len() > PATH_BYTES_MAX {
            return Err(format!(
                "is longer than {COMPONENTS_MAX} components or {PATH_BYTES_MAX} bytes"
            ));
        }
        Ok(Self { parts })
    }

    /// Whether a path matches.
    pub fn matches(&self, path: &str) -> bool {
        let names = path.split('/').filter(|name| !name.is_empty());
        let reached = names.fold(self.begin(), |at, name| self.step(at, name));
        self.is_end(reached)
    }

    fn begin(&self) -> Positions {
        self.closed(1)
    }

    /// The positions reached by another component; none if no path with this beginning matches.
    fn step(&self, at: Positions, name: &str) -> Positions {
        let mut reached = 0;
        for (index, part) in self.parts.iter().enumerate() {
            if at & (1 << index) == 0 {
                continue;
            }
            match part {
                Part::AnyPath => reached |= 1 << index,
                Part::Name(pattern) if pattern.matches(name) => reached |= 1 << (index + 1),
                Part::Name(_) => {}
            }
        }
        self.closed(reached)
    }

    /// Adds the positions behind parts that match no component at all.
    fn closed(&self, mut at: Positions) -> Positions {
        for (index, part) in self.parts.iter().enumerate() {
            if *part == Part::AnyPath && at & (1 << index) != 0 {
                at |= 1 << (index + 1);
            }
        }
        at
    }

    fn is_end(&self, at: Positions) -> bool {
        at & (1 << self.parts.len()) != 0
    }
}

/// A control group that matches a pattern, and whose memory is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedGroup {
    /// Its path below the root of its hierarchy, beginning with `/`, as the kernel has it.
    pub path: String,
    /// Its directory.
    pub directory: PathBuf,
    /// The version of control groups.
    pub version: CgroupVersion,
    /// Inode of its directory, which distinguishes it from a later group with the same path.
    pub inode: u64,
    /// Number of the first pattern that it matches.
    pub pattern: usize,
    /// Memory charged to it, in bytes; `None` if the kernel does not report it.
    pub charged_bytes: Option<u64>,
    /// Its limit of memory, in bytes; `None` without one.
    pub limit_bytes: Option<u64>,
}

impl ListedGroup {
    /// Whether it holds nothing but the process that keeps the namespaces of a pod: `pause` of Kubernetes, or Podman's
    /// `catatonit`, which otherwise is the first process of a container that has others.
    pub fn is_pause(&self) -> bool {
        let GroupName { name, kind } = GroupName::of_path(&self.path);
        if kind != GroupKind::Container {
            return false;
        }
        let is_of_kubernetes = name.starts_with("pod");
        let members = fs::read_to_string(self.directory.join("cgroup.procs")).unwrap_or_default();
        let mut lines = members.lines();
        let (Some(process), None) = (lines.next(), lines.next()) else {
            return false;
        };
        let program = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        match program.trim_end() {
            "pause" => is_of_kubernetes,
            "catatonit" => true,
            _ => false,
        }
    }
}

/// Why a group that matches a pattern cannot be observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupFault {
    /// Its memory is not counted.
    NotCounted,
    /// Its path is not UTF-8, or too long.
    Path,
    /// It may not be read.
    Unreadable,
}

impl std::fmt::Display for GroupFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotCounted => f.write_str(
                "its memory is not counted: its parent does not have memory in cgroup.subtree_control",
            ),
            Self::Path => write!(
                f,
                "its path is not UTF-8, or longer than {PATH_BYTES_MAX} bytes"
            ),
            Self::Unreadable => f.write_str("its directory may not be read"),
        }
    }
}

/// The groups of an inspection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupListing {
    /// Those whose memory can be observed, by path.
    pub groups: Vec<ListedGroup>,
    /// Those that match and cannot be observed: printable path and reason, by path.
    pub faults: Vec<(String, GroupFault)>,
    /// Whether there are more directories than one inspection reads.
    pub is_cut: bool,
    /// Whether no hierarchy is mounted from its root on: only groups of this container, or none, can be found.
    pub is_contained: bool,
}

impl GroupListing {
    /// Finds the groups that match one of `patterns`.
    ///
    /// # Errors
    ///
    /// [`VmError::File`] if the mounts cannot be listed.
    pub fn matching(patterns: &[GroupPattern]) -> Result<Self, VmError> {
        Ok(Self::in_mounts(
            patterns,
            &CgroupMount::all()?,
            DIRECTORIES_MAX,
        ))
    }

    fn in_mounts(
        patterns: &[GroupPattern],
        mounts: &[CgroupMount],
        directories_max: usize,
    ) -> Self {
        let mut found: BTreeMap<String, Result<ListedGroup, GroupFault>> = BTreeMap::new();
        let mut left = directories_max;
        let mut is_cut = false;
        for mount in mounts {
            let begin = patterns.iter().map(GroupPattern::begin).collect();
            let root: (_, _, Vec<Positions>) = (mount.directory.clone(), "/".to_owned(), begin);
            let mut pending = VecDeque::from([root]);
            while let Some((directory, path, at)) = pending.pop_front() {
                let mut ends = patterns.iter().zip(&at);
                let matched = ends.position(|(pattern, &at)| pattern.is_end(at));
                if let Some(pattern) = matched {
                    let listed = of_directory(&directory, &path, mount.version, pattern);
                    // One that has just been removed is none, and one that is counted in another hierarchy is good.
                    if let Some(listed) = listed
                        && !matches!(found.get(&path), Some(Ok(_)))
                    {
                        found.insert(path.clone(), listed);
                    }
                }
                let entries = match fs::read_dir(&directory) {
                    Ok(entries) => entries.flatten(),
                    Err(source) => {
                        if source.kind() == io::ErrorKind::PermissionDenied && matched.is_some() {
                            found.insert(path, Err(GroupFault::Unreadable));
                        }
                        continue;
                    }
                };
                for entry in entries {
                    if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                        continue;
                    }
                    let bytes = entry.file_name();
                    let name = bytes.to_string_lossy();
                    let steps = patterns.iter().zip(&at);
                    let reached: Vec<_> = steps
                        .map(|(pattern, &at)| pattern.step(at, &name))
                        .collect();
                    if reached.iter().all(|&at| at == 0) {
                        continue;
                    }
                    let separator = if path == "/" { "" } else { "/" };
                    let below = format!("{path}{separator}{name}");
                    if bytes.to_str().is_none() || below.len() > PATH_BYTES_MAX {
                        found.entry(below).or_insert(Err(GroupFault::Path));
                        continue;
                    }
                    if left == 0 {
                        is_cut = true;
                        break;
                    }
                    left -= 1;
                    pending.push_back((entry.path(), below, reached));
                }
            }
        }
        let mut listing = Self {
            is_cut,
            is_contained: !mounts.iter().any(|mount| mount.is_whole),
            ..Self::default()
        };
        for (path, group) in found {
            match group {
                Ok(group) => listing.groups.push(group),
                Err(fault) => listing.faults.push((escaped(&path), fault)),
            }
        }
        listing
    }
}

/// Finds a control group by its path below the root of its hierarchy, by its directory, by its [name](GroupName), or by the
/// identifier of its container (12 digits or more) or of its pod. A path takes precedence; `/` in front means a path alone.
///
/// # Errors
///
/// [`VmError::EmptyGroupName`], [`VmError::NoSuchGroup`], [`VmError::GroupWithoutMemory`], [`VmError::AmbiguousGroup`];
/// [`VmError::NotPermitted`] if a directory may not be read.
pub fn find_group(name: &str) -> Result<MemoryGroup, VmError> {
    find_group_in(name, &CgroupMount::all()?)
}

fn find_group_in(name: &str, mounts: &[CgroupMount]) -> Result<MemoryGroup, VmError> {
    // A path below the root that is empty would be the root.
    if name.is_empty() {
        return Err(VmError::EmptyGroupName);
    }
    let absent = match MemoryGroup::find_in(name, mounts) {
        Err(absent @ VmError::NoSuchGroup { .. }) if !name.starts_with('/') => absent,
        found => return found,
    };
    let every = GroupPattern {
        parts: vec![Part::AnyPath],
    };
    let listing = GroupListing::in_mounts(&[every], mounts, DIRECTORIES_MAX);
    let groups = listing.groups.into_iter();
    let mut groups: Vec<_> = groups
        .filter(|group| GroupName::is_meant(name, &group.path))
        .collect();
    if groups.len() > 1 {
        return Err(VmError::AmbiguousGroup {
            name: name.to_owned(),
            paths: groups.iter().map(|group| escaped(&group.path)).collect(),
        });
    }
    let group = groups.pop().ok_or(absent)?;
    MemoryGroup::of_directory(group.directory, group.version)
}

/// The group of a directory; `None` if it has been removed.
fn of_directory(
    directory: &Path,
    path: &str,
    version: CgroupVersion,
    pattern: usize,
) -> Option<Result<ListedGroup, GroupFault>> {
    let inode = fs::symlink_metadata(directory).ok()?.ino();
    if !counts_memory(directory) {
        return directory.is_dir().then_some(Err(GroupFault::NotCounted));
    }
    Some(Ok(ListedGroup {
        path: path.to_owned(),
        directory: directory.to_owned(),
        version,
        inode,
        pattern,
        charged_bytes: charged_bytes(directory, version),
        limit_bytes: limit_bytes(directory, version),
    }))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    fn patterns(texts: &[&str]) -> Vec<GroupPattern> {
        let patterns = texts.iter().map(|text| GroupPattern::new(text));
        patterns.collect::<Result<_, _>>().unwrap()
    }

    /// A hierarchy of version 2 in a directory of the host, with these groups.
    fn hierarchy(groups: &[&str]) -> (tempfile::TempDir, Vec<CgroupMount>) {
        let root = tempfile::tempdir().unwrap();
        for group in groups {
            let directory = root.path().join(group);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("memory.stat"), "anon 0\n").unwrap();
            fs::write(directory.join("memory.current"), "8192\n").unwrap();
            fs::write(directory.join("memory.max"), "max\n").unwrap();
        }
        let mount = CgroupMount {
            directory: root.path().to_owned(),
            version: CgroupVersion::V2,
            is_whole: true,
        };
        (root, vec![mount])
    }

    fn paths(listing: &GroupListing) -> Vec<&str> {
        listing.groups.iter().map(|group| &*group.path).collect()
    }

    #[test]
    fn a_star_stands_within_a_component_and_two_for_components() {
        let known = [
            (
                "system.slice/*.service",
                "/system.slice/nginx.service",
                true,
            ),
            (
                "/system.slice/*.service",
                "/system.slice/nginx.service",
                true,
            ),
            (
                "system.slice/*.service",
                "/system.slice/a/nginx.service",
                false,
            ),
            ("system.slice/*.service", "/system.slice", false),
            ("**/docker-*.scope", "/docker-1.scope", true),
            ("**/docker-*.scope", "/a/b/docker-1.scope", true),
            ("**/docker-*.scope", "/a/docker-1.scope/init", false),
            ("kubepods.slice/**", "/kubepods.slice", true),
            ("kubepods.slice/**", "/kubepods.slice/a/b", true),
            ("a/**/b/**/c", "/a/b/b/x/c", true),
            ("a/**/b/**/c", "/a/c", false),
            ("**", "/", true),
            ("?", "/a", true),
        ];
        for (pattern, path, expected) in known {
            let found = GroupPattern::new(pattern).unwrap().matches(path);
            assert_eq!(found, expected, "{pattern} {path}");
        }
    }

    #[test]
    fn the_patterns_of_the_guide_match_the_paths_that_engines_write() {
        let guide = include_str!("../../../docs/configuration.md");
        let known = [
            ("**/nginx.service", "/system.slice/nginx.service"),
            ("**/docker-*.scope", "/system.slice/docker-4f.scope"),
            ("docker/*", "/docker/4f"),
            ("**/libpod-*.scope", "/machine.slice/libpod-4f.scope"),
            (
                "**/libpod-*.scope",
                "/machine.slice/machine-libpod_pod_3d.slice/libpod-4f.scope",
            ),
            ("libpod_parent/**/libpod-*", "/libpod_parent/libpod-4f"),
            (
                "**/libpod-payload-*",
                "/system.slice/web.service/libpod-payload-4f",
            ),
            ("lxc.payload.*", "/lxc.payload.web"),
            ("lxc/*", "/lxc/101"),
            (
                "**/*-libpod_pod_*.slice",
                "/machine.slice/machine-libpod_pod_3d.slice",
            ),
            (
                "machine.slice/systemd-nspawn@*.service",
                "/machine.slice/systemd-nspawn@web.service",
            ),
            (
                "machine.slice/machine-web.scope",
                "/machine.slice/machine-web.scope",
            ),
            (
                "**/cri-containerd-*.scope",
                "/kubepods.slice/kubepods-pod3d.slice/cri-containerd-4f.scope",
            ),
            ("kubepods/**/pod*/*", "/kubepods/burstable/pod3d/4f"),
            (
                "**/*kubepods*-pod*.slice",
                "/kubepods.slice/kubepods-pod3d.slice",
            ),
            (
                "**/*kubepods*-pod*.slice",
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod3d.slice",
            ),
            ("kubepods/**/pod*", "/kubepods/burstable/pod3d"),
        ];
        for (pattern, path) in known {
            assert!(guide.contains(&format!("`{pattern}`")), "{pattern}");
            let pattern = GroupPattern::new(pattern).unwrap();
            assert!(pattern.matches(path), "{pattern:?} {path}");
        }
    }

    #[test]
    fn no_pattern_of_the_guide_matches_a_vm() {
        let guide = include_str!("../../../docs/configuration.md");
        let (_, table) = guide.split_once("| what | pattern |").unwrap();
        let (table, _) = table.split_once("\n\n").unwrap();
        let columns = table.lines().filter_map(|line| line.split('|').nth(2));
        let patterns = columns.flat_map(|column| column.split('`').skip(1).step_by(2));
        let mut count = 0;
        for text in patterns {
            let pattern = GroupPattern::new(text).unwrap();
            for path in [
                r"/machine.slice/machine-qemu\x2d1\x2dweb.scope",
                "/machine/qemu-1-web.libvirt-qemu",
                "/qemu.slice/101.scope",
            ] {
                assert!(!pattern.matches(path), "{text} {path}");
            }
            count += 1;
        }
        assert!(count > 10, "{count}");
    }

    #[test]
    fn a_pattern_that_is_no_path_is_refused() {
        let long = "a/".repeat(40) + "a";
        let hostile = "**/".repeat(32) + "a";
        for text in ["", "/", "a//b", "../etc", "a/.", "a/", &long, &hostile] {
            let why = GroupPattern::new(text).unwrap_err();
            assert!(!why.is_empty(), "{text:?}");
        }
    }

    #[test]
    fn groups_that_match_are_found_by_the_first_of_their_patterns() {
        let (_root, mounts) = hierarchy(&[
            "",
            "system.slice",
            "system.slice/nginx.service",
            "system.slice/docker-1.scope",
            "web",
        ]);
        let patterns = patterns(&["**/docker-*.scope", "system.slice/*"]);
        let listing = GroupListing::in_mounts(&patterns, &mounts, DIRECTORIES_MAX);
        let expected = [
            "/system.slice/docker-1.scope",
            "/system.slice/nginx.service",
        ];
        assert_eq!(paths(&listing), expected);
        let by: Vec<_> = listing.groups.iter().map(|group| group.pattern).collect();
        assert_eq!(by, [0, 1]);
        let first = &listing.groups[0];
        assert_eq!((first.charged_bytes, first.limit_bytes), (Some(8192), None));
        assert_eq!((listing.faults.len(), listing.is_cut), (0, false));
        fs::write(first.directory.join("memory.max"), "1048576\n").unwrap();
        let listing = GroupListing::in_mounts(&patterns, &mounts, DIRECTORIES_MAX);
        assert_eq!(listing.groups[0].limit_bytes, Some(1 << 20));
    }

    #[test]
    fn groups_that_cannot_be_observed_are_listed_with_the_reason() {
        let (root, mounts) = hierarchy(&["web"]);
        fs::create_dir(root.path().join("not\ncounted")).unwrap();
        fs::create_dir(root.path().join(OsStr::from_bytes(b"no\xffutf8"))).unwrap();
        let deep = format!("web/{0}/{0}/{0}/{0}/{0}", "x".repeat(250));
        fs::create_dir_all(root.path().join(&deep)).unwrap();
        std::os::unix::fs::symlink("/", root.path().join("link")).unwrap();
        let listing = GroupListing::in_mounts(&patterns(&["**"]), &mounts, DIRECTORIES_MAX);
        assert!(paths(&listing).contains(&"/web"));
        let reason = |path: &str| {
            let mut faults = listing.faults.iter();
            faults.find_map(|(at, fault)| at.starts_with(path).then_some(*fault))
        };
        assert_eq!(reason(r"/not\ncounted"), Some(GroupFault::NotCounted));
        assert_eq!(reason("/no\u{fffd}utf8"), Some(GroupFault::Path));
        let too_long = |(at, fault): &(String, GroupFault)| {
            at.starts_with("/web/x") && *fault == GroupFault::Path
        };
        assert!(listing.faults.iter().any(too_long));
        assert_eq!(reason("/link"), None);
    }

    #[test]
    fn an_inspection_of_more_directories_than_the_maximum_says_so() {
        let (_root, mounts) = hierarchy(&["a", "b", "c"]);
        let listing = GroupListing::in_mounts(&patterns(&["*"]), &mounts, 2);
        assert_eq!((listing.groups.len(), listing.is_cut), (2, true));
        let all = GroupListing::in_mounts(&patterns(&["*"]), &mounts, 3);
        assert_eq!((all.groups.len(), all.is_cut), (3, false));
    }

    #[test]
    fn groups_below_those_of_others_hide_none_that_are_nearer_to_the_root() {
        let deep = format!("a/{}", "x/".repeat(200));
        let wide: Vec<_> = (0..200).map(|index| format!("b/y/{index}")).collect();
        let mut groups = vec![&*deep, "c/nginx.service", "d/nginx.service"];
        groups.extend(wide.iter().map(String::as_str));
        let (_root, mounts) = hierarchy(&groups);
        let listing = GroupListing::in_mounts(&patterns(&["**"]), &mounts, 20);
        assert!(listing.is_cut);
        let found = paths(&listing);
        for path in ["/c/nginx.service", "/d/nginx.service"] {
            assert!(found.contains(&path), "{found:?}");
        }
    }

    #[test]
    fn a_group_is_found_by_its_name_and_a_container_by_its_identifier() {
        let id = "4f0c2b7a91d84f0c2b7a91d84f0c2b7a91d84f0c2b7a91d84f0c2b7a91d8abcd";
        let other = "5".repeat(64);
        let pod = "3d1f6f2a-0a8e-4c1b-9a51-2f7c3b1d9e10";
        let slice = format!("kubepods.slice/kubepods-pod{}.slice", pod.replace('-', "_"));
        let docker = format!("system.slice/docker-{id}.scope");
        let guest = format!("{docker}/system.slice/ssh.service");
        let in_pod = format!("{slice}/cri-containerd-{other}.scope");
        let (_root, mounts) = hierarchy(&[
            &docker,
            &guest,
            "system.slice/ssh.service",
            "system.slice/nginx.service",
            &slice,
            &in_pod,
            "web",
            "a/web",
        ]);
        let find = |name: &str| find_group_in(name, &mounts);
        let known = [
            ("nginx.service", "system.slice/nginx.service"),
            ("docker-4f0c2b7a91d8", &docker),
            ("4f0c2b7a91d8", &docker),
            (id, &docker),
            (pod, &slice),
            (&format!("pod{pod}"), &slice),
            (&format!("pod{pod}/{}", &other[..12]), &in_pod),
            (&other, &in_pod),
            // A path comes before a name.
            ("web", "web"),
        ];
        for (name, path) in known {
            let found = find(name).unwrap();
            assert_eq!(found.directory, mounts[0].directory.join(path), "{name}");
        }
        for name in ["4f0c2b7a91d", "docker", "/nginx.service", "nginx", ""] {
            let error = find(name).unwrap_err();
            assert!(!matches!(error, VmError::AmbiguousGroup { .. }), "{error}");
        }
        let error = find("ssh.service").unwrap_err().to_string();
        let expected = format!(
            "one of /system.slice/docker-{id}.scope/system.slice/ssh.service | /system.slice/ssh.service"
        );
        assert!(error.ends_with(&expected), "{error}");
    }

    #[test]
    fn no_name_is_not_the_root() {
        // Of version 2 the root has a memory.stat.
        let (_root, mounts) = hierarchy(&["", "web"]);
        let error = find_group_in("", &mounts).unwrap_err();
        assert!(matches!(error, VmError::EmptyGroupName), "{error}");
        let root = find_group_in("/", &mounts).unwrap();
        assert_eq!(root.inodes.len(), 2);
    }

    #[test]
    fn a_group_that_one_hierarchy_counts_is_good_though_another_does_not() {
        let (first, mut mounts) = hierarchy(&[]);
        fs::create_dir(first.path().join("web")).unwrap();
        let (_second, others) = hierarchy(&["web"]);
        mounts.extend(others);
        for _ in 0..2 {
            let listing = GroupListing::in_mounts(&patterns(&["web"]), &mounts, DIRECTORIES_MAX);
            assert_eq!((paths(&listing), listing.faults.len()), (vec!["/web"], 0));
            mounts.reverse();
        }
    }
}
