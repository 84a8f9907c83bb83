//! Which backends can observe a VM, and the obstacles of the others, determined without touching the VM.
//!
//! A backend's row lists what it needs, and the same list is checked before it attaches. So what an assessment reports
//! first is what attaching reports.
//!
//! Not here: whether this host's kernel can do what the backend does ([`BackendRow::trial`]); what shows only on
//! attaching, such as a second process that has mapped the RAM.

use crate::backend::BackendRow;
use crate::config::TraceConfig;
use crate::refusal::Refusal;
use crate::registry::BACKENDS;
use crate::target::{GroupTarget, TraceTarget};

/// What a backend can do with a VM, a process or a control group.
#[derive(Debug)]
pub struct Assessment {
    /// The backend.
    pub row: &'static BackendRow,
    /// What is in the way, in the order in which attaching finds it; empty if the backend can attach.
    pub refusals: Vec<Refusal>,
}

/// Assesses every backend for a VM, in the order of [`BACKENDS`]. Changes nothing in the VM.
pub fn assess(target: &TraceTarget, config: &TraceConfig) -> Vec<Assessment> {
    let assessment = |&row: &&'static BackendRow| Assessment {
        row,
        refusals: row.refusals(target, config).collect(),
    };
    BACKENDS.iter().map(assessment).collect()
}

/// Assesses every backend for a control group, in the order of [`BACKENDS`]. Changes nothing.
pub fn assess_group(group: &GroupTarget) -> Vec<Assessment> {
    let assessment = |&row: &&'static BackendRow| Assessment {
        row,
        refusals: row.group_refusal(group).into_iter().collect(),
    };
    BACKENDS.iter().map(assessment).collect()
}

#[cfg(test)]
mod tests {
    use plimsoll_flow::{RamBacking, RamMapping, TraceMethod};

    use crate::refusal::Refusal;

    use super::*;

    fn target(backings: &[RamBacking]) -> TraceTarget {
        let ram = backings.iter().map(|backing| RamMapping {
            address: 0x7f00_0000_0000,
            len_bytes: 1 << 20,
            file_offset_bytes: 0,
            backing: backing.clone(),
        });
        TraceTarget {
            pid: std::process::id(),
            is_vm: true,
            ram: ram.collect(),
            locked: false,
            userfault: false,
            vcpu_threads: vec![],
        }
    }

    /// Names of what is in the way of a backend, without what depends on the host and on the right to list pages.
    fn names(method: TraceMethod, target: &TraceTarget) -> Vec<&'static str> {
        let assessments = assess(target, &TraceConfig::default());
        let mut assessments = assessments.into_iter();
        let assessment = assessments.find(|found| found.row.method == method);
        let names = assessment.unwrap().refusals.into_iter();
        let names = names.map(|refusal| refusal.name());
        names
            .filter(|name| {
                !["no-privilege", "no-admin", "kernel-too-old", "swap-on"].contains(name)
            })
            .collect()
    }

    #[test]
    fn ram_decides_which_backends_can_attach() {
        use RamBacking::{HugeTlb, Private, SharedMemfd, SharedTmpfs};
        let file = RamBacking::File("/var/ram".to_owned());
        let known: [(&[RamBacking], &[_], &[_]); 7] = [
            (&[SharedMemfd], &[], &[]),
            (&[SharedTmpfs, SharedMemfd], &[], &[]),
            (&[Private], &["not-shared-memory"], &[]),
            (&[SharedMemfd, Private], &["not-shared-memory"], &[]),
            (&[HugeTlb], &["not-shared-memory"], &["not-shared-memory"]),
            (&[file], &["not-shared-memory"], &["not-shared-memory"]),
            (&[], &["no-ram"], &["no-ram"]),
        ];
        for (backings, pages, writes) in known {
            let target = target(backings);
            assert_eq!(names(TraceMethod::Traps, &target), pages, "{backings:?}");
            assert_eq!(names(TraceMethod::AccessedPageScans, &target), pages);
            assert_eq!(names(TraceMethod::SampledPages, &target), pages);
            assert_eq!(names(TraceMethod::WriteScans, &target), writes);
        }
    }

    #[test]
    fn a_process_that_is_no_vm_and_a_group_are_observed_by_the_backends_that_say_so() {
        let target = TraceTarget {
            is_vm: false,
            ..target(&[RamBacking::Private])
        };
        let group = GroupTarget {
            directory: "/sys/fs/cgroup/web".into(),
            inodes: vec![1],
        };
        for row in BACKENDS {
            let method = row.method;
            let only = |name: &'static str, is_observed: bool| match is_observed {
                true => vec![],
                false => vec![name],
            };
            let found = names(method, &target);
            assert_eq!(found.contains(&"not-a-vm"), !row.any_process, "{method}");
            if !row.any_process {
                assert_eq!(found, only("not-a-vm", false), "{method}");
            }
            let of_group = row.group_refusal(&group).map(|refusal| refusal.name());
            let is_refused = of_group == Some("control-group");
            assert_eq!(is_refused, row.group.is_none(), "{method}");
        }
    }

    #[test]
    fn everything_that_is_in_the_way_is_listed() {
        let target = TraceTarget {
            locked: true,
            userfault: true,
            ..target(&[RamBacking::Private])
        };
        assert_eq!(
            names(TraceMethod::Traps, &target),
            ["not-shared-memory", "locked", "userfault-in-use"]
        );
        assert_eq!(
            names(TraceMethod::AccessedPageScans, &target),
            ["not-shared-memory", "locked"]
        );
        assert_eq!(
            names(TraceMethod::WriteScans, &target),
            ["userfault-in-use"]
        );
    }

    #[test]
    fn scans_need_a_userfaultfd_only_to_distinguish_writes() {
        let target = TraceTarget {
            userfault: true,
            ..target(&[RamBacking::SharedMemfd])
        };
        let config = TraceConfig {
            writes: true,
            ..TraceConfig::default()
        };
        let row = BackendRow::of(TraceMethod::AccessedPageScans);
        let in_use = |config: &TraceConfig| {
            row.refusals(&target, config)
                .any(|refusal| matches!(refusal, Refusal::UserfaultInUse))
        };
        assert!(in_use(&config));
        assert!(!in_use(&TraceConfig::default()));
    }
}
