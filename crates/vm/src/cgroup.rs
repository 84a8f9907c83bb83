//! Control groups whose memory is counted apart, of version 1 and of version 2.
//!
//! The memory of a group is what is charged to it and to the groups below it: memory that its processes allocated, and
//! files that they were the first to read, mapped or not. A process that moves to another group leaves behind what is
//! charged already. The kernel names the group of a page by the inode of the group's directory.
//!
//! Source: Linux, Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and mm/pagemap.rst (`kpagecgroup`).

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::VmError;

/// Files that exist in groups whose memory is counted, by the version of control groups. The root of version 2 has the
/// second one alone.
const COUNTED: [&str; 2] = ["memory.usage_in_bytes", "memory.stat"];

/// The namespace of control groups of the host, and its name.
const NAMESPACE: &str = "/proc/self/ns/cgroup";
const INITIAL: &str = "cgroup:[4026531835]";

/// A limit of version 1 from which on there is none.
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// A control group with all groups below it, at the time it was inspected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryGroup {
    /// Its directory.
    pub directory: PathBuf,
    /// The version of control groups, which is that of the mount.
    pub version: CgroupVersion,
    /// Inode of its directory, which distinguishes it from a later group with the same path.
    pub inode: u64,
    /// Inodes of all groups, its own and those below it, ascending.
    pub inodes: Vec<u64>,
    /// Process ids of their processes, ascending.
    pub processes: Vec<u32>,
}

/// A version of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupVersion {
    /// A hierarchy for each controller.
    V1,
    /// One hierarchy.
    V2,
}

impl fmt::Display for CgroupVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::V1 => "version 1",
            Self::V2 => "version 2",
        })
    }
}

/// A mounted hierarchy of control groups that can count memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupMount {
    /// Where it is mounted.
    pub directory: PathBuf,
    /// Its version.
    pub version: CgroupVersion,
    /// Whether it is mounted from its root on, and not from the group of this container on.
    pub is_whole: bool,
}

impl CgroupMount {
    /// The hierarchies mounted here, in the order of their mounts.
    ///
    /// # Errors
    ///
    /// [`VmError::File`] if the mounts cannot be listed.
    pub fn all() -> Result<Vec<Self>, VmError> {
        let file = "/proc/self/mountinfo";
        let mountinfo =
            fs::read_to_string(file).map_err(|source| VmError::of_file(file, source))?;
        let is_host = fs::read_link(NAMESPACE).is_ok_and(|name| name == Path::new(INITIAL));
        Ok(Self::parse(&mountinfo, is_host))
    }

    /// Parses `/proc/self/mountinfo`: version 2, and the hierarchy of version 1 that has the memory controller. Malformed
    /// lines are ignored. `is_host`: whether this process is in the host's namespace of control groups; another one has its own
    /// group for a root, and shows what lies above it as `..`.
    pub fn parse(mountinfo: &str, is_host: bool) -> Vec<Self> {
        let of_line = |line: &str| {
            let (mount, source) = line.split_once(" - ")?;
            let root = mount.split(' ').nth(3)?;
            let directory = unescape(mount.split(' ').nth(4)?);
            let is_whole = match is_host {
                true => root == "/",
                false => root.starts_with("/..") && root[1..].split('/').all(|name| name == ".."),
            };
            let mut source = source.split(' ');
            let version = match source.next()? {
                "cgroup2" => CgroupVersion::V2,
                "cgroup" => {
                    let mut options = source.nth(1)?.split(',');
                    options.find(|&option| option == "memory")?;
                    CgroupVersion::V1
                }
                _ => return None,
            };
            Some(Self {
                directory,
                version,
                is_whole,
            })
        };
        mountinfo.lines().filter_map(of_line).collect()
    }
}

/// A path as mountinfo writes it: with blanks, line ends and backslashes as octal numbers.
fn unescape(text: &str) -> PathBuf {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt as _;
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| first == b'\\');
        let octal = octal.and_then(|digits| str::from_utf8(digits).ok());
        let octal = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        rest = if octal.is_some() { &after[3..] } else { after };
        bytes.push(octal.unwrap_or(first));
    }
    OsString::from_vec(bytes).into()
}

impl MemoryGroup {
    /// Finds a group by its path below the root of its hierarchy, or by its directory.
    ///
    /// # Errors
    ///
    /// [`VmError::NoSuchGroup`], [`VmError::GroupWithoutMemory`]; [`VmError::NotPermitted`] if a directory may not be read.
    pub(crate) fn find_in(path: &str, mounts: &[CgroupMount]) -> Result<Self, VmError> {
        let mut without = None;
        for mount in mounts {
            let below = Path::new(path);
            let below = below.strip_prefix(&mount.directory).unwrap_or(below);
            let below = below.strip_prefix("/").unwrap_or(below);
            // No name may lead out of the hierarchy.
            let is_below = below
                .components()
                .all(|name| matches!(name, std::path::Component::Normal(_)));
            let directory = mount.directory.join(below);
            if !is_below || !directory.is_dir() {
                continue;
            }
            if counts_memory(&directory) {
                return Self::of_directory(directory, mount.version);
            }
            without.get_or_insert(directory);
        }
        Err(match without {
            Some(directory) => VmError::GroupWithoutMemory { directory },
            None => VmError::NoSuchGroup {
                path: path.to_owned(),
                looked_in: mounts.iter().map(Self::looked_in).collect(),
            },
        })
    }

    fn looked_in(mount: &CgroupMount) -> String {
        let part = match mount.is_whole {
            true => "",
            false => ", where only the groups of this container are",
        };
        format!("{}{part}", mount.directory.display())
    }

    pub(crate) fn of_directory(
        directory: PathBuf,
        version: CgroupVersion,
    ) -> Result<Self, VmError> {
        let gone = || VmError::GroupGone {
            directory: directory.clone(),
        };
        let inode = fs::metadata(&directory).map_err(|_| gone())?.ino();
        let (mut inodes, mut processes) = (Vec::new(), Vec::new());
        let mut pending = vec![directory.clone()];
        while let Some(group) = pending.pop() {
            // A group below that is removed meanwhile has no processes left.
            let Ok(metadata) = fs::symlink_metadata(&group) else {
                continue;
            };
            inodes.push(metadata.ino());
            // Groups of threads have no list of processes; their processes are listed above them.
            let members = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
            // A process of another namespace is listed as 0.
            processes.extend(parse_members(&members));
            let listing = match fs::read_dir(&group) {
                Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(VmError::of_file(group, source));
                }
                listing => listing.into_iter().flatten(),
            };
            let below = listing.flatten();
            let below = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            pending.extend(below.map(|entry| entry.path()));
        }
        if inodes.is_empty() {
            return Err(gone());
        }
        inodes.sort_unstable();
        processes.sort_unstable();
        processes.dedup();
        Ok(Self {
            directory,
            version,
            inode,
            inodes,
            processes,
        })
    }

    /// Inspects it again.
    ///
    /// # Errors
    ///
    /// [`VmError::GroupGone`] if it was removed, also if there is another group with its path by now.
    pub fn refreshed(&self) -> Result<Self, VmError> {
        let now = Self::of_directory(self.directory.clone(), self.version)?;
        if now.inode != self.inode {
            return Err(VmError::GroupGone {
                directory: self.directory.clone(),
            });
        }
        Ok(now)
    }

    /// Memory charged to it, in bytes; `None` if the kernel does not report it, as for the root of version 2.
    pub fn charged_bytes(&self) -> Option<u64> {
        charged_bytes(&self.directory, self.version)
    }
}

/// Whether the memory of the group of a directory is counted.
pub(crate) fn counts_memory(directory: &Path) -> bool {
    COUNTED.iter().any(|file| directory.join(file).exists())
}

/// Memory charged to the group of a directory, in bytes; `None` if the kernel does not report it.
pub(crate) fn charged_bytes(directory: &Path, version: CgroupVersion) -> Option<u64> {
    let file = match version {
        CgroupVersion::V1 => "memory.usage_in_bytes",
        CgroupVersion::V2 => "memory.current",
    };
    bytes_in(&directory.join(file))
}

/// The limit of memory of the group of a directory, in bytes; `None` without one. Limits of the groups above it do not count. One that has no
/// limit and nothing in it but one group has that group's: so crun limits a container.
pub(crate) fn limit_bytes(directory: &Path, version: CgroupVersion) -> Option<u64> {
    let file = match version {
        CgroupVersion::V1 => "memory.limit_in_bytes",
        CgroupVersion::V2 => "memory.max",
    };
    // Version 2 has a word for no limit, version 1 the largest number of whole pages.
    let own =
        |directory: &Path| bytes_in(&directory.join(file)).filter(|&bytes| bytes < NO_LIMIT_BYTES);
    own(directory).or_else(|| {
        let members = fs::read_to_string(directory.join("cgroup.procs")).ok()?;
        let entries = fs::read_dir(directory).ok()?.flatten();
        let mut below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        match (members.is_empty(), below.next(), below.next()) {
            (true, Some(only), None) => own(&only.path()),
            _ => None,
        }
    })
}

/// The path below its root of the group that the contents of `/proc/PID/cgroup` name: in the hierarchy of a controller of version 1, or in
/// version 2 for `""`. `None` if they name none, or one outside this process's namespace.
pub(crate) fn path_in<'groups>(groups: &'groups str, controller: &str) -> Option<&'groups str> {
    let path = groups.lines().find_map(|line| {
        let (_, named) = line.split_once(':')?;
        let (controllers, path) = named.split_once(":/")?;
        let mut controllers = controllers.split(',');
        controllers.any(|name| name == controller).then_some(path)
    })?;
    // No name may lead out of the hierarchy.
    let mut names = path.split('/');
    let is_below = names.all(|name| !matches!(name, "." | ".."));
    is_below.then_some(path)
}

/// The limit of memory of a control group, for all processes in it and in the groups below it together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLimit {
    /// The group's directory.
    pub directory: PathBuf,
    /// Its limit in bytes.
    pub bytes: u64,
}

/// The limits of memory that a process is under: those of its group and of the groups above, as far as they are seen from here. A
/// group of version 2 that is above its `memory.high` is slowed down and loses memory, so that it is a limit too.
pub fn memory_limits(pid: u32, mounts: &[CgroupMount]) -> Vec<GroupLimit> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    limits_in(&groups, mounts)
}

/// The limits of the groups in the contents of `/proc/PID/cgroup`, and of those above them.
fn limits_in(groups: &str, mounts: &[CgroupMount]) -> Vec<GroupLimit> {
    let mut limits = Vec::new();
    for mount in mounts {
        let (controller, files): (_, &[_]) = match mount.version {
            CgroupVersion::V1 => ("memory", &["memory.limit_in_bytes"]),
            CgroupVersion::V2 => ("", &["memory.max", "memory.high"]),
        };
        let Some(path) = path_in(groups, controller) else {
            continue;
        };
        let group = mount.directory.join(path);
        let groups = group
            .ancestors()
            .take_while(|group| group.starts_with(&mount.directory));
        for group in groups {
            let bytes = files.iter().filter_map(|file| bytes_in(&group.join(file)));
            let least = bytes.filter(|&bytes| bytes < NO_LIMIT_BYTES).min();
            limits.extend(least.map(|bytes| GroupLimit {
                directory: group.to_owned(),
                bytes,
            }));
        }
    }
    limits
}

fn bytes_in(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The process ids of a `cgroup.procs` file that can be named here. Malformed lines are ignored.
pub fn parse_members(text: &str) -> impl Iterator<Item = u32> {
    text.lines()
        .filter_map(|line| line.trim().parse().ok())
        .filter(|&pid| pid != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 30 0:31 / /sys/fs/cgroup/me\\040mory rw - cgroup cgroup rw,memory
40 30 0:36 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw,nsdelegate
malformed - cgroup2
";

    /// A hierarchy in a directory of the host, in which each group has these files.
    fn hierarchy(version: CgroupVersion) -> (tempfile::TempDir, Vec<CgroupMount>) {
        let root = tempfile::tempdir().unwrap();
        let mount = CgroupMount {
            directory: root.path().to_owned(),
            version,
            is_whole: true,
        };
        (root, vec![mount])
    }

    fn add(mounts: &[CgroupMount], group: &str, members: &str) -> u64 {
        let directory = mounts[0].directory.join(group);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("memory.stat"), "anon 0\n").unwrap();
        fs::write(directory.join("memory.current"), "4096\n").unwrap();
        fs::write(directory.join("cgroup.procs"), members).unwrap();
        fs::metadata(directory).unwrap().ino()
    }

    #[test]
    fn hierarchies_that_count_memory_are_found_among_the_mounts() {
        let found = CgroupMount::parse(MOUNTS, true);
        let mount = |directory: &str, version| CgroupMount {
            directory: directory.into(),
            version,
            is_whole: true,
        };
        assert_eq!(
            found,
            [
                mount("/sys/fs/cgroup/me mory", CgroupVersion::V1),
                mount("/sys/fs/cgroup/unified", CgroupVersion::V2),
            ]
        );
    }

    #[test]
    fn what_a_container_sees_is_told_from_the_whole_hierarchy() {
        // As Docker with runc mounts them, with the host's namespace and with one of its own, and where the host's are mounted.
        let known = [
            (true, "/docker/4f0c2b7a91d8", false),
            (false, "/", false),
            (true, "/", true),
            (false, "/../..", true),
            (false, "/../../docker/4f0c2b7a91d8", false),
        ];
        for (is_host, root, expected) in known {
            for source in ["cgroup cgroup rw,memory", "cgroup2 cgroup rw,nsdelegate"] {
                let line = format!("316 312 0:32 {root} /sys/fs/cgroup ro,nosuid - {source}\n");
                let found = CgroupMount::parse(&line, is_host);
                let found: Vec<_> = found.iter().map(|mount| mount.is_whole).collect();
                assert_eq!(found, [expected], "{is_host} {line}");
            }
        }
    }

    #[test]
    fn a_group_has_the_processes_and_inodes_of_those_below_it() {
        let (_root, mounts) = hierarchy(CgroupVersion::V2);
        let mut inodes = vec![
            add(&mounts, "web", ""),
            add(&mounts, "web/a", "12\n7\n0\n"),
            add(&mounts, "web/a/b", "9\n7\n"),
        ];
        add(&mounts, "web-2", "5\n");
        inodes.sort_unstable();
        let directory = mounts[0].directory.join("web").display().to_string();
        for path in ["web", "/web", "web/", &directory] {
            let group = MemoryGroup::find_in(path, &mounts).unwrap();
            assert_eq!(
                (&group.inodes, &*group.processes),
                (&inodes, &[7, 9, 12][..])
            );
            assert_eq!(group.charged_bytes(), Some(4096));
        }
    }

    #[test]
    fn a_container_of_crun_has_the_limit_of_the_group_in_it() {
        let (_root, mounts) = hierarchy(CgroupVersion::V2);
        let scope = mounts[0].directory.join("libpod-1.scope");
        let limit = || limit_bytes(&scope, CgroupVersion::V2);
        add(&mounts, "libpod-1.scope", "");
        assert_eq!(limit(), None);
        add(&mounts, "libpod-1.scope/container", "7\n");
        fs::write(scope.join("memory.max"), "max\n").unwrap();
        fs::write(scope.join("container/memory.max"), "104857600\n").unwrap();
        assert_eq!(limit(), Some(100 << 20));
        fs::write(scope.join("cgroup.procs"), "9\n").unwrap();
        assert_eq!(limit(), None);
        fs::write(scope.join("memory.max"), "4096\n").unwrap();
        assert_eq!(limit(), Some(4096));
        fs::write(scope.join("cgroup.procs"), "").unwrap();
        fs::write(scope.join("memory.max"), "max\n").unwrap();
        add(&mounts, "libpod-1.scope/other", "");
        assert_eq!(limit(), None);
    }

    #[test]
    fn a_process_is_under_the_least_limit_of_its_groups() {
        // As libvirt places QEMU, below a slice that an operator has limited.
        let path = "machine.slice/machine-qemu\\x2d1\\x2dweb.scope/libvirt/emulator";
        let groups = format!("1:name=systemd:/x\n0::/{path}\n");
        let (_root, mounts) = hierarchy(CgroupVersion::V2);
        add(&mounts, path, "7\n");
        let set = |group: &str, file: &str, text: &str| {
            let group = Path::new(path).ancestors().find(|at| at.ends_with(group));
            fs::write(mounts[0].directory.join(group.unwrap()).join(file), text).unwrap();
        };
        let limits = |groups: &str| {
            let limits = limits_in(groups, &mounts).into_iter();
            let bytes = limits.map(|limit| (limit.directory, limit.bytes));
            bytes.collect::<Vec<_>>()
        };
        assert_eq!(limits(&groups), []);
        set("libvirt/emulator", "memory.max", "max\n");
        set("machine.slice", "memory.max", "8192\n");
        let slice = (mounts[0].directory.join("machine.slice"), 8192);
        assert_eq!(limits(&groups), std::slice::from_ref(&slice));
        set("libvirt", "memory.max", "6000\n");
        set("libvirt", "memory.high", "4096\n");
        let own = mounts[0].directory.join(path).with_file_name("");
        assert_eq!(limits(&groups), [(own, 4096), slice]);
        for other in ["0::/../x", "0::/", "5:memory:/x", ""] {
            assert_eq!(limits(other), [], "{other}");
        }

        let (_root, mounts) = hierarchy(CgroupVersion::V1);
        add(&mounts, "machine/web", "7\n");
        let groups = "9:cpu,cpuacct:/\n8:memory:/machine/web\n0::/y\n";
        let file = mounts[0].directory.join("machine/memory.limit_in_bytes");
        fs::write(&file, "9223372036854771712\n").unwrap();
        assert_eq!(limits_in(groups, &mounts), []);
        fs::write(&file, "4096\n").unwrap();
        assert_eq!(limits_in(groups, &mounts)[0].bytes, 4096);
    }

    #[test]
    fn ten_thousand_processes_are_members_and_none_are_no_error() {
        let (_root, mounts) = hierarchy(CgroupVersion::V2);
        let members: String = (1..=10_000).rev().map(|pid| format!("{pid}\n")).collect();
        add(&mounts, "many", &members);
        add(&mounts, "none", "");
        let many = MemoryGroup::find_in("many", &mounts).unwrap();
        assert_eq!(many.processes, (1..=10_000).collect::<Vec<u32>>());
        let none = MemoryGroup::find_in("none", &mounts).unwrap();
        assert_eq!((none.processes.len(), none.inodes.len()), (0, 1));
    }

    #[test]
    fn a_group_that_is_not_there_or_does_not_count_memory_is_named() {
        let (_root, mounts) = hierarchy(CgroupVersion::V1);
        for path in ["web", "../etc", "a/../../etc", "/"] {
            let error = MemoryGroup::find_in(path, &mounts).unwrap_err();
            let directory = mounts[0].directory.display().to_string();
            assert!(error.to_string().contains(&directory), "{error}");
        }
        fs::create_dir(mounts[0].directory.join("cpu-only")).unwrap();
        let error = MemoryGroup::find_in("cpu-only", &mounts).unwrap_err();
        assert!(
            matches!(error, VmError::GroupWithoutMemory { .. }),
            "{error}"
        );
    }

    #[test]
    fn a_group_that_was_removed_is_gone_even_if_another_took_its_path() {
        let (_root, mounts) = hierarchy(CgroupVersion::V2);
        add(&mounts, "web", "7\n");
        let group = MemoryGroup::find_in("web", &mounts).unwrap();
        assert_eq!(group.refreshed().unwrap(), group);
        // In its place before it is removed, so that it cannot get the same inode.
        add(&mounts, "other", "7\n");
        fs::remove_dir_all(&group.directory).unwrap();
        assert!(matches!(group.refreshed(), Err(VmError::GroupGone { .. })));
        fs::rename(mounts[0].directory.join("other"), &group.directory).unwrap();
        assert!(matches!(group.refreshed(), Err(VmError::GroupGone { .. })));
    }
}
