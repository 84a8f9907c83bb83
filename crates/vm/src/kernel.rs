//! The host's kernel: release, settings, and the capabilities of this process.
//!
//! A file that is absent means that the kernel was built without the feature; it is not an error.

use std::fs;
use std::path::{Path, PathBuf};

/// Settings and features of a kernel that determine how VMs can be observed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostKernel {
    /// Its release, such as `6.12.9-cloud-amd64`.
    pub release: Option<String>,
    /// Effective capabilities of this process, as a bit mask, numbered as in capabilities(7).
    pub capabilities: Option<u64>,
    /// `kernel.yama.ptrace_scope`; `None` without Yama.
    pub ptrace_scope: Option<String>,
    /// Whether SELinux enforces a policy.
    pub selinux_enforces: bool,
    /// `vm.unprivileged_userfaultfd`; `None` without userfaultfd.
    pub unprivileged_userfaultfd: Option<String>,
    /// Whether `/dev/userfaultfd` exists.
    pub has_userfaultfd_device: bool,
    /// Swap areas in use.
    pub swap_areas: Vec<String>,
    /// Huge pages for shared memory: the selected setting, empty if none is selected; `None` if not supported.
    pub shared_huge_pages: Option<String>,
    /// Whether idle pages are tracked.
    pub has_idle_bitmap: bool,
    /// Whether DAMON has its directory in sysfs.
    pub has_damon: bool,
    /// Settings of the multi-generational LRU, as the kernel prints them; `None` without it.
    pub lru_generations: Option<String>,
    /// Whether memory pressure is reported (PSI).
    pub has_pressure: bool,
    /// How control groups are mounted.
    pub cgroups: Cgroups,
}

/// How control groups are mounted at `/sys/fs/cgroup`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cgroups {
    /// Version 2, with the memory controller.
    V2,
    /// Version 2, without the memory controller.
    V2WithoutMemory,
    /// Version 1, together with a version 2 without controllers.
    Hybrid,
    /// Version 1.
    V1,
    /// Not mounted.
    #[default]
    Absent,
}

impl HostKernel {
    /// Reads the files of the host whose root directory is `root`.
    pub fn read(root: &Path) -> Self {
        let files = Files(root);
        let status = files.read("proc/self/status").unwrap_or_default();
        let swaps = files.read("proc/swaps").unwrap_or_default();
        let huge_pages = files.read("sys/kernel/mm/transparent_hugepage/shmem_enabled");
        Self {
            release: files.read("proc/sys/kernel/osrelease"),
            capabilities: status
                .lines()
                .find_map(|line| line.strip_prefix("CapEff:"))
                .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()),
            ptrace_scope: files.read("proc/sys/kernel/yama/ptrace_scope"),
            selinux_enforces: files
                .read("sys/fs/selinux/enforce")
                .is_some_and(|mode| mode == "1"),
            unprivileged_userfaultfd: files.read("proc/sys/vm/unprivileged_userfaultfd"),
            has_userfaultfd_device: files.exists("dev/userfaultfd"),
            swap_areas: swaps
                .lines()
                .skip(1)
                .filter_map(|line| line.split_ascii_whitespace().next())
                .map(str::to_owned)
                .collect(),
            shared_huge_pages: huge_pages.map(|text| selected(&text).to_owned()),
            has_idle_bitmap: files.exists("sys/kernel/mm/page_idle/bitmap"),
            has_damon: files.exists("sys/kernel/mm/damon/admin"),
            lru_generations: files.read("sys/kernel/mm/lru_gen/enabled"),
            has_pressure: files.read("proc/pressure/memory").is_some(),
            cgroups: files.cgroups(),
        }
    }

    /// Major and minor number of the release; `None` if it cannot be parsed.
    pub fn version(&self) -> Option<(u32, u32)> {
        let release = self.release.as_deref()?;
        let mut numbers = release.split(|character: char| !character.is_ascii_digit());
        let mut next = || numbers.next()?.parse().ok();
        Some((next()?, next()?))
    }

    /// Whether memory is reclaimed by generations (MGLRU); `None` if what the kernel shows cannot be parsed, or it has none.
    /// Then `read(2)` does not mark a page of the page cache as in use, so that it stays idle (`folio_mark_accessed`).
    pub fn reclaims_by_generations(&self) -> Option<bool> {
        let enabled = self.lru_generations.as_deref()?;
        let parts = u32::from_str_radix(enabled.trim_start_matches("0x"), 16).ok()?;
        Some(parts & 1 != 0)
    }
}

/// A host's files under a root directory.
struct Files<'a>(&'a Path);

impl Files<'_> {
    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    fn read(&self, path: &str) -> Option<String> {
        let text = fs::read_to_string(self.path(path)).ok()?;
        Some(text.trim_end().to_owned())
    }

    fn cgroups(&self) -> Cgroups {
        let controllers = |directory: &str| self.read(&format!("{directory}/cgroup.controllers"));
        match controllers("sys/fs/cgroup") {
            Some(list) if list.split_whitespace().any(|name| name == "memory") => Cgroups::V2,
            Some(_) => Cgroups::V2WithoutMemory,
            None if controllers("sys/fs/cgroup/unified").is_some() => Cgroups::Hybrid,
            None if self.exists("sys/fs/cgroup/memory") => Cgroups::V1,
            None => Cgroups::Absent,
        }
    }
}

/// The selected (bracketed) word of a setting that lists its choices; empty if there is none.
fn selected(switch: &str) -> &str {
    let mut words = switch.split_whitespace();
    words
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_host_has_no_feature() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(HostKernel::read(root.path()), HostKernel::default());
    }

    #[test]
    fn the_version_is_two_numbers() {
        let version = |release: &str| {
            let release = Some(release.to_owned());
            HostKernel {
                release,
                ..HostKernel::default()
            }
            .version()
        };
        assert_eq!(version("6.1.0-18-cloud-amd64"), Some((6, 1)));
        assert_eq!(version("10.0"), Some((10, 0)));
        assert_eq!(version("unknown"), None);
        assert_eq!(version("99999999999.1"), None);
    }

    #[test]
    fn areas_of_swap_and_the_selected_word_are_read() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            "proc/swaps",
            "Filename Type\n/dev/sda2 partition 8 0 -2\n/swap file 8 0 -3\n",
        );
        write(
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "always [advise] never\n",
        );
        write("proc/self/status", "Name:\tx\nCapEff:\t0000000000880000\n");
        let kernel = HostKernel::read(root.path());
        assert_eq!(kernel.swap_areas, ["/dev/sda2", "/swap"]);
        assert_eq!(kernel.shared_huge_pages.as_deref(), Some("advise"));
        assert_eq!(kernel.capabilities, Some(0x88_0000));
    }
}
