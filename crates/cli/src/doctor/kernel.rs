//! What the kernel says of itself in files: versions, privileges, switches.
//!
//! A file that is not there is an answer, not an error: the feature is not built in.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Chapter, Finding};

/// First Linux on which all primitives of the tracer work.
const KERNEL_LEAST: (u32, u32) = (6, 1);

// Numbers of <linux/capability.h>.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_NICE: u32 = 23;
const CAP_CHECKPOINT_RESTORE: u32 = 40;

/// A host's files under a root.
struct Host<'a>(&'a Path);

impl Host<'_> {
    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    fn read(&self, path: &str) -> Option<String> {
        let text = fs::read_to_string(self.path(path)).ok()?;
        Some(text.trim_end().to_owned())
    }
}

/// Goes through the files of the host whose root directory is `root`.
#[must_use]
pub fn examine(root: &Path) -> Vec<Chapter> {
    let host = &Host(root);
    vec![
        Chapter {
            title: "Tracing a VM from outside",
            findings: vec![
                kernel(host),
                privileges(host),
                ptrace(host),
                userfaultfd(host),
                swap(host),
                huge_pages(host),
            ],
        },
        Chapter {
            title: "Other ways to see memory at work",
            findings: vec![
                idle_page_tracking(host),
                damon(host),
                multi_generational_lru(host),
                pressure(host),
                cgroups(host),
            ],
        },
    ]
}

fn kernel(host: &Host<'_>) -> Finding {
    let subject = "kernel";
    let Some(release) = host.read("/proc/sys/kernel/osrelease") else {
        return Finding::no(subject, "no /proc/sys/kernel/osrelease", "mount /proc");
    };
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    let mut next = || numbers.next().and_then(|number| number.parse::<u32>().ok());
    match (next(), next()) {
        (Some(major), Some(minor)) if (major, minor) >= KERNEL_LEAST => {
            Finding::ok(subject, format!("Linux {release}"))
        }
        (Some(_), Some(_)) => Finding::no(
            subject,
            format!("Linux {release}"),
            "pages are taken away from a running VM as Linux 6.1 and later can: use a newer kernel",
        ),
        _ => Finding::limited(
            subject,
            format!("release '{release}' has no version in it"),
            "Linux 6.1 or later is needed",
        ),
    }
}

fn privileges(host: &Host<'_>) -> Finding {
    let subject = "privileges";
    let status = host.read("/proc/self/status").unwrap_or_default();
    let held = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let Some(held) = held else {
        return Finding::limited(
            subject,
            "/proc/self/status does not show the capabilities",
            "CAP_SYS_PTRACE, CAP_SYS_NICE and CAP_CHECKPOINT_RESTORE are needed: run as root",
        );
    };
    let missing: Vec<_> = [
        (CAP_SYS_PTRACE, "CAP_SYS_PTRACE"),
        (CAP_SYS_NICE, "CAP_SYS_NICE"),
        (CAP_CHECKPOINT_RESTORE, "CAP_CHECKPOINT_RESTORE"),
    ]
    .into_iter()
    .filter(|(number, _)| held >> number & 1 == 0)
    .map(|(_, name)| name)
    .collect();
    if missing.is_empty() {
        return Finding::ok(subject, "all that attaching to a VM takes");
    }
    Finding::no(
        subject,
        format!("without {}", missing.join(", ")),
        "to attach to a VM run as root, or with these capabilities",
    )
}

fn ptrace(host: &Host<'_>) -> Finding {
    let subject = "ptrace";
    match host.read("/proc/sys/kernel/yama/ptrace_scope").as_deref() {
        None => Finding::ok(subject, "not restricted by Yama"),
        Some("3") => Finding::no(
            subject,
            "switched off for everybody (kernel.yama.ptrace_scope is 3)",
            "it stays so until the next boot: set kernel.yama.ptrace_scope to 1 in /etc/sysctl.d",
        ),
        Some(scope) => Finding::ok(
            subject,
            format!("open to CAP_SYS_PTRACE (kernel.yama.ptrace_scope is {scope})"),
        ),
    }
}

fn userfaultfd(host: &Host<'_>) -> Finding {
    let subject = "userfaultfd";
    let switch = host.read("/proc/sys/vm/unprivileged_userfaultfd");
    match (switch.as_deref(), host.exists("/dev/userfaultfd")) {
        (None, _) => Finding::no(
            subject,
            "not in this kernel",
            "use a kernel built with CONFIG_USERFAULTFD",
        ),
        (Some("0"), true) => {
            Finding::ok(subject, "for privileged processes, and by /dev/userfaultfd")
        }
        (Some("0"), false) => Finding::limited(
            subject,
            "for privileged processes only: no /dev/userfaultfd",
            "VMs that run as another user cannot be traced: sysctl vm.unprivileged_userfaultfd=1",
        ),
        (Some(_), _) => Finding::ok(subject, "for every process"),
    }
}

fn swap(host: &Host<'_>) -> Finding {
    let subject = "swap";
    let swaps = host.read("/proc/swaps").unwrap_or_default();
    match swaps.lines().skip(1).count() {
        0 => Finding::ok(subject, "none, so that pages taken away stay in memory"),
        count => Finding::limited(
            subject,
            format!("{count} in use"),
            "pages taken away from a VM would be written out: swapoff -a, or write 0 to \
             memory.swap.max of the VM's cgroup",
        ),
    }
}

fn huge_pages(host: &Host<'_>) -> Finding {
    let subject = "huge pages";
    let switch = host.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let Some(switch) = switch else {
        return Finding::ok(subject, "none for shared memory");
    };
    match chosen(&switch) {
        Some(choice @ ("never" | "deny" | "advise")) => {
            Finding::ok(subject, format!("{choice} for shared memory"))
        }
        choice => Finding::limited(
            subject,
            format!("{} for shared memory", choice.unwrap_or("unknown")),
            "VMs lose their huge pages while they are traced: write never to \
             /sys/kernel/mm/transparent_hugepage/shmem_enabled to see the cost of tracing alone",
        ),
    }
}

/// The word in brackets of a switch that lists its choices.
fn chosen(switch: &str) -> Option<&str> {
    switch
        .split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

fn idle_page_tracking(host: &Host<'_>) -> Finding {
    let subject = "idle pages";
    if host.exists("/sys/kernel/mm/page_idle/bitmap") {
        return Finding::ok(subject, "/sys/kernel/mm/page_idle/bitmap");
    }
    Finding::no(
        subject,
        "not in this kernel",
        "a kernel with CONFIG_IDLE_PAGE_TRACKING tells which pages are idle; traps do not need it",
    )
}

fn damon(host: &Host<'_>) -> Finding {
    let subject = "DAMON";
    if host.exists("/sys/kernel/mm/damon/admin") {
        return Finding::ok(subject, "/sys/kernel/mm/damon/admin");
    }
    Finding::no(
        subject,
        "not in this kernel",
        "a kernel with CONFIG_DAMON_SYSFS watches regions of memory; traps do not need it",
    )
}

fn multi_generational_lru(host: &Host<'_>) -> Finding {
    let subject = "MGLRU";
    let advice = "generations of pages per VM would show their age; traps do not need them";
    let Some(enabled) = host.read("/sys/kernel/mm/lru_gen/enabled") else {
        return Finding::no(subject, "not in this kernel", advice);
    };
    match u32::from_str_radix(enabled.trim_start_matches("0x"), 16) {
        Ok(0) => Finding::limited(
            subject,
            "built in but switched off",
            "write y to /sys/kernel/mm/lru_gen/enabled",
        ),
        Ok(_) => Finding::ok(subject, "switched on"),
        Err(_) => Finding::limited(subject, format!("enabled reads '{enabled}'"), advice),
    }
}

fn pressure(host: &Host<'_>) -> Finding {
    let subject = "pressure";
    if host.read("/proc/pressure/memory").is_some() {
        return Finding::ok(subject, "/proc/pressure/memory");
    }
    Finding::no(
        subject,
        "not told by this kernel",
        "boot with psi=1, on a kernel with CONFIG_PSI",
    )
}

fn cgroups(host: &Host<'_>) -> Finding {
    let subject = "cgroups";
    let controllers = |folder: &str| host.read(&format!("{folder}/cgroup.controllers"));
    let has_memory =
        |controllers: &str| controllers.split_whitespace().any(|name| name == "memory");
    let v1 = "boot with systemd.unified_cgroup_hierarchy=1 to bound and watch VMs by cgroup v2";
    match controllers("/sys/fs/cgroup") {
        Some(list) if has_memory(&list) => Finding::ok(subject, "v2 with memory"),
        Some(_) => Finding::limited(
            subject,
            "v2 without the memory controller",
            "boot without cgroup_disable=memory",
        ),
        None if controllers("/sys/fs/cgroup/unified").is_some() => {
            Finding::limited(subject, "v1, with an empty v2 beside it", v1)
        }
        None if host.exists("/sys/fs/cgroup/memory") => Finding::limited(subject, "v1 only", v1),
        None => Finding::no(subject, "none mounted at /sys/fs/cgroup", v1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict::{self, Limited, No, Ok as Fine};

    /// A host laid out as files.
    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    fn verdicts(files: &[(&str, &str)]) -> Vec<(String, Verdict)> {
        let root = host(files);
        let chapters = examine(root.path());
        let findings = chapters.into_iter().flat_map(|chapter| chapter.findings);
        findings
            .inspect(|finding| {
                assert_eq!(finding.advice.is_none(), finding.verdict == Fine);
            })
            .map(|finding| (finding.subject, finding.verdict))
            .collect()
    }

    fn verdict(subject: &str, files: &[(&str, &str)]) -> Verdict {
        let verdicts = verdicts(files);
        verdicts.iter().find(|(name, _)| name == subject).unwrap().1
    }

    #[test]
    fn a_host_that_has_everything_is_well() {
        let files = [
            ("proc/sys/kernel/osrelease", "6.12.9-cloud-amd64\n"),
            ("proc/self/status", "Name:\tx\nCapEff:\t000001fffeffffff\n"),
            ("proc/sys/kernel/yama/ptrace_scope", "1\n"),
            ("proc/sys/vm/unprivileged_userfaultfd", "0\n"),
            ("dev/userfaultfd", ""),
            ("proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n"),
            (
                "sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size advise [never] deny force\n",
            ),
            ("sys/kernel/mm/page_idle/bitmap", ""),
            ("sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "0\n"),
            ("sys/kernel/mm/lru_gen/enabled", "0x0007\n"),
            ("proc/pressure/memory", "some avg10=0.00\n"),
            ("sys/fs/cgroup/cgroup.controllers", "cpu io memory pids\n"),
        ];
        let verdicts = verdicts(&files);
        assert!(
            verdicts.iter().all(|(_, verdict)| *verdict == Fine),
            "{verdicts:?}"
        );
    }

    #[test]
    fn a_host_that_says_nothing_is_no_panic() {
        let verdicts = verdicts(&[]);
        assert_eq!(verdicts.len(), 11);
        assert_eq!(verdicts[0], ("kernel".to_owned(), No));
    }

    #[test]
    fn the_kernel_is_compared_by_numbers_not_by_letters() {
        let kernel = |release| verdict("kernel", &[("proc/sys/kernel/osrelease", release)]);
        let known = [
            ("6.1.0-18-cloud-amd64", Fine),
            ("6.18.44", Fine),
            ("10.0", Fine),
            ("5.15.0", No),
            ("6.0.19", No),
            ("unknown", Limited),
            ("99999999999.1", Limited),
        ];
        for (release, verdict) in known {
            assert_eq!(kernel(release), verdict, "{release}");
        }
    }

    #[test]
    fn each_switch_that_stands_in_the_way_is_seen() {
        let known = [
            (
                "privileges",
                "proc/self/status",
                "CapEff:\t0000000000000000",
                No,
            ),
            (
                "privileges",
                "proc/self/status",
                "CapEff:\t0000000000880000",
                No,
            ),
            (
                "privileges",
                "proc/self/status",
                "CapEff:\t0000010000880000",
                Fine,
            ),
            (
                "privileges",
                "proc/self/status",
                "CapEff:\tnonsense",
                Limited,
            ),
            ("ptrace", "proc/sys/kernel/yama/ptrace_scope", "3", No),
            ("ptrace", "proc/sys/kernel/yama/ptrace_scope", "2", Fine),
            (
                "userfaultfd",
                "proc/sys/vm/unprivileged_userfaultfd",
                "0",
                Limited,
            ),
            (
                "userfaultfd",
                "proc/sys/vm/unprivileged_userfaultfd",
                "1",
                Fine,
            ),
            (
                "swap",
                "proc/swaps",
                "Filename\n/dev/sda2 partition",
                Limited,
            ),
            (
                "huge pages",
                "sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "[always] within_size advise never",
                Limited,
            ),
            ("MGLRU", "sys/kernel/mm/lru_gen/enabled", "0x0000", Limited),
            (
                "cgroups",
                "sys/fs/cgroup/cgroup.controllers",
                "cpu io",
                Limited,
            ),
            (
                "cgroups",
                "sys/fs/cgroup/unified/cgroup.controllers",
                "",
                Limited,
            ),
            ("cgroups", "sys/fs/cgroup/memory/tasks", "", Limited),
        ];
        for (subject, path, content, expected) in known {
            assert_eq!(
                verdict(subject, &[(path, content)]),
                expected,
                "{path}: {content}"
            );
        }
    }
}
