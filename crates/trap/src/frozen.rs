//! Whether a process is frozen by its control group, as those of a paused container are.
//!
//! No call that is made in such a process returns before it is thawed: with version 1 its thread does not even stop.
//!
//! Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`cgroup.events`) and cgroup-v1/freezer-subsystem.rst.

use std::fs;
use std::path::Path;

use crate::refusal::Refusal;

/// Where version 2 of control groups is mounted, alone or beside version 1, and the freezer of version 1.
const GROUPS: [&str; 2] = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
const FREEZER: &str = "sys/fs/cgroup/freezer";

/// Refuses a frozen process; proc and sys are read under `root`.
pub fn check(pid: u32, root: &Path) -> Result<(), Refusal> {
    let groups = fs::read_to_string(root.join(format!("proc/{pid}/cgroup"))).unwrap_or_default();
    let is_frozen = groups.lines().any(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else {
            return false;
        };
        let read = |mount: &str, file: &str| {
            let directory = root.join(mount).join(group.trim_start_matches('/'));
            fs::read_to_string(directory.join(file)).unwrap_or_default()
        };
        match controllers {
            // Also where a group above it is frozen.
            "" => GROUPS.iter().any(|mount| {
                let events = read(mount, "cgroup.events");
                events.lines().any(|event| event == "frozen 1")
            }),
            "freezer" => matches!(read(FREEZER, "freezer.state").trim(), "FREEZING" | "FROZEN"),
            _ => false,
        }
    });
    match is_frozen {
        true => Err(Refusal::Frozen { pid }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether process 42 of a host with these files is refused.
    fn is_refused(files: &[(&str, &str)]) -> bool {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        check(42, root.path()).is_err()
    }

    #[test]
    fn a_process_of_a_paused_container_is_refused() {
        // As Podman with crun and systemd writes them, and Docker with runc and version 1.
        let second = (
            "proc/42/cgroup",
            "0::/machine.slice/libpod-1.scope/container\n",
        );
        let events = "sys/fs/cgroup/machine.slice/libpod-1.scope/container/cgroup.events";
        let first = (
            "proc/42/cgroup",
            "6:freezer:/docker/1\n4:memory:/docker/1\n0::/\n",
        );
        let state = "sys/fs/cgroup/freezer/docker/1/freezer.state";
        let known = [
            (second, events, "populated 1\nfrozen 1\n", true),
            (second, events, "populated 1\nfrozen 0\n", false),
            (first, state, "FROZEN\n", true),
            (first, state, "THAWED\n", false),
        ];
        for (groups, file, text, expected) in known {
            assert_eq!(
                is_refused(&[groups, (file, text)]),
                expected,
                "{file} {text}"
            );
        }
        assert!(!is_refused(&[second]) && !is_refused(&[]));
    }
}
