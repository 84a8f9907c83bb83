//! What the kernel's release, privileges and switches mean for tracing.

use plimsoll_vm::{Cgroups, HostKernel};

use super::{Chapter, Finding};

/// First Linux on which all primitives of the tracer work.
const KERNEL_LEAST: (u32, u32) = (6, 1);

// Numbers of <linux/capability.h>.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_NICE: u32 = 23;
const CAP_CHECKPOINT_RESTORE: u32 = 40;

/// Assesses a kernel.
pub fn examine(host: &HostKernel) -> Vec<Chapter> {
    vec![
        Chapter {
            title: "Tracing a VM from outside".to_owned(),
            findings: vec![
                kernel(host),
                privileges(host),
                ptrace(host),
                selinux(host),
                userfaultfd(host),
                swap(host),
                huge_pages(host),
            ],
        },
        Chapter {
            title: "Other ways to see memory at work".to_owned(),
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

fn kernel(host: &HostKernel) -> Finding {
    let subject = "kernel";
    let Some(release) = &host.release else {
        return Finding::no(subject, "no /proc/sys/kernel/osrelease", "mount /proc");
    };
    match host.version() {
        Some(version) if version >= KERNEL_LEAST => {
            Finding::ok(subject, format!("Linux {release}"))
        }
        Some(_) => Finding::no(
            subject,
            format!("Linux {release}"),
            "pages of a running VM can be unmapped only on Linux 6.1 or later: use a newer kernel",
        ),
        None => Finding::limited(
            subject,
            format!("release '{release}' has no version in it"),
            "Linux 6.1 or later is needed",
        ),
    }
}

fn privileges(host: &HostKernel) -> Finding {
    let subject = "privileges";
    let Some(held) = host.capabilities else {
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

fn ptrace(host: &HostKernel) -> Finding {
    let subject = "ptrace";
    match host.ptrace_scope.as_deref() {
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

fn selinux(host: &HostKernel) -> Finding {
    let subject = "SELinux";
    if !host.selinux_enforces {
        return Finding::ok(subject, "not enforced");
    }
    Finding::limited(
        subject,
        "enforced: its policy may deny VMs (svirt_t) a userfaultfd",
        "where attaching is refused, add the rules of docs/attaching.md (SELinux), or use --backend scan",
    )
}

fn userfaultfd(host: &HostKernel) -> Finding {
    let subject = "userfaultfd";
    let switch = host.unprivileged_userfaultfd.as_deref();
    match (switch, host.has_userfaultfd_device) {
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

fn swap(host: &HostKernel) -> Finding {
    let subject = "swap";
    match host.swap_areas.len() {
        0 => Finding::ok(subject, "none, so that pages taken away stay in memory"),
        count => Finding::limited(
            subject,
            format!("{count} in use"),
            "pages taken away from a VM would be written out: swapoff -a, or write 0 to \
             memory.swap.max of the VM's cgroup",
        ),
    }
}

fn huge_pages(host: &HostKernel) -> Finding {
    let subject = "huge pages";
    let Some(choice) = host.shared_huge_pages.as_deref() else {
        return Finding::ok(subject, "none for shared memory");
    };
    match choice {
        "never" | "deny" | "advise" => Finding::ok(subject, format!("{choice} for shared memory")),
        _ => Finding::limited(
            subject,
            format!("{choice:?} for shared memory"),
            "VMs lose their huge pages while they are traced: write never to \
             /sys/kernel/mm/transparent_hugepage/shmem_enabled to see the cost of tracing alone",
        ),
    }
}

fn idle_page_tracking(host: &HostKernel) -> Finding {
    let subject = "idle pages";
    if host.has_idle_bitmap {
        return Finding::ok(subject, "/sys/kernel/mm/page_idle/bitmap");
    }
    Finding::no(
        subject,
        "not in this kernel",
        "--backend idle, for control groups and any process, needs a kernel with CONFIG_IDLE_PAGE_TRACKING; VMs with shared RAM do not",
    )
}

fn damon(host: &HostKernel) -> Finding {
    let subject = "DAMON";
    if host.has_damon {
        return Finding::ok(subject, "/sys/kernel/mm/damon/admin");
    }
    Finding::no(
        subject,
        "not in this kernel",
        "a kernel with CONFIG_DAMON_SYSFS watches regions of memory; traps do not need it",
    )
}

fn multi_generational_lru(host: &HostKernel) -> Finding {
    let subject = "MGLRU";
    let advice = "generations of pages per VM would show their age; traps do not need them";
    let Some(enabled) = &host.lru_generations else {
        return Finding::no(subject, "not in this kernel", advice);
    };
    match host.reclaims_by_generations() {
        Some(false) => Finding::limited(
            subject,
            "built in but switched off",
            "write y to /sys/kernel/mm/lru_gen/enabled to see generations; idle and damon then miss page cache that is read by read(2)",
        ),
        Some(true) => Finding::ok(
            subject,
            "switched on: idle and damon miss page cache that is read by read(2)",
        ),
        None => Finding::limited(subject, format!("enabled reads '{enabled}'"), advice),
    }
}

fn pressure(host: &HostKernel) -> Finding {
    let subject = "pressure";
    if host.has_pressure {
        return Finding::ok(subject, "/proc/pressure/memory");
    }
    Finding::no(
        subject,
        "not reported by this kernel",
        "boot with psi=1, on a kernel with CONFIG_PSI",
    )
}

fn cgroups(host: &HostKernel) -> Finding {
    let subject = "cgroups";
    let v1 = "boot with systemd.unified_cgroup_hierarchy=1 to bound and watch VMs by cgroup v2";
    match host.cgroups {
        Cgroups::V2 => Finding::ok(subject, "v2 with memory"),
        Cgroups::V2WithoutMemory => Finding::limited(
            subject,
            "v2 without the memory controller",
            "boot without cgroup_disable=memory",
        ),
        Cgroups::Hybrid => Finding::limited(subject, "v1, with an empty v2 beside it", v1),
        Cgroups::V1 => Finding::limited(subject, "v1 only", v1),
        Cgroups::Absent => Finding::no(subject, "none mounted at /sys/fs/cgroup", v1),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
        let chapters = examine(&HostKernel::read(root.path()));
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
    fn a_host_without_files_is_no_panic() {
        let verdicts = verdicts(&[]);
        assert_eq!(verdicts.len(), 12);
        assert_eq!(verdicts[0], ("kernel".to_owned(), No));
    }

    #[test]
    fn the_kernel_is_compared_by_numbers_not_as_text() {
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
            ("SELinux", "sys/fs/selinux/enforce", "1", Limited),
            ("SELinux", "sys/fs/selinux/enforce", "0", Fine),
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
