//! Operations of QEMU on a VM's whole memory: receiving, sending, saving or dumping it.
//!
//! During these operations QEMU may need a userfaultfd on that memory itself, of which the kernel allows only one, and
//! it reads all of the memory. There are two indications: the names that QEMU gives its threads (with
//! `debug-threads=on`, which libvirt always sets), and its monitor, if it serves no other client. A VM that was started
//! as the target of a migration has received its memory when its CPUs run.
//!
//! Source: QEMU, qapi/migration.json, migration/*.c and dump/dump.c, versions 7.2 to 10.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::identity::read_own;
use crate::{QemuVm, Qmp, VmError};

/// CPU time after which a VM's CPUs have run its guest: starting them and loading their state takes less.
const STARTED_NS: u64 = 100_000_000;

/// Why QEMU has exclusive use of a VM's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transfer {
    /// The VM was started to receive a migration, which has not ended.
    Incoming,
    /// The VM has not been started yet; its memory may be loaded first.
    NotStarted,
    /// The VM is being migrated or saved, or was.
    Outgoing,
    /// A snapshot is taken while the VM runs.
    Snapshot,
    /// Snapshots of the running VM are enabled, so one may begin at any time.
    SnapshotEnabled,
    /// Its memory is dumped to a file, by a thread of its own.
    Dump,
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Incoming => "it is the destination of a migration that has not ended",
            Self::NotStarted => "it has not been started yet",
            Self::Outgoing => "it is being migrated or saved, or has been",
            Self::Snapshot => "a snapshot of its memory is being taken",
            Self::SnapshotEnabled => "its migration capability background-snapshot is on",
            Self::Dump => "it is being dumped",
        })
    }
}

/// Time for which the names of all threads are read after their number changed: a thread gets its name after its start.
const NAMING: Duration = Duration::from_millis(250);
/// Longest time without that, because one may start as another ends.
const INSPECTION_MAX: Duration = Duration::from_millis(500);

/// Watches a process for the beginning of an operation. As long as no thread comes or goes, a check reads the status of
/// one file.
#[derive(Debug)]
pub struct TransferWatch {
    pid: u32,
    threads: Option<u64>,
    changed: Instant,
    inspected: Option<Instant>,
}

impl TransferWatch {
    /// Watches process `pid`.
    pub fn new(pid: u32) -> Self {
        Self {
            pid,
            threads: None,
            changed: Instant::now(),
            inspected: None,
        }
    }

    /// The operation, if one is in progress.
    pub fn check(&mut self) -> Option<Transfer> {
        let now = Instant::now();
        // Its links are the threads and two more.
        let threads = fs::metadata(format!("/proc/{}/task", self.pid));
        let threads = threads.ok().map(|task| task.nlink());
        if threads != self.threads {
            (self.threads, self.changed) = (threads, now);
        }
        let within = |since: Instant, limit| now.saturating_duration_since(since) < limit;
        let is_known = !within(self.changed, NAMING)
            && (self.inspected).is_some_and(|inspected| within(inspected, INSPECTION_MAX));
        if is_known {
            return None;
        }
        self.inspected = Some(now);
        Transfer::of_threads(self.pid)
    }
}

impl Transfer {
    /// Determines the operation from the names of a process's threads; costs one small read per thread.
    pub fn of_threads(pid: u32) -> Option<Self> {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        tasks.flatten().find_map(|task| {
            let name = fs::read_to_string(task.path().join("comm")).ok()?;
            Self::of_thread(name.trim_end())
        })
    }

    fn of_thread(name: &str) -> Option<Self> {
        match name {
            "bg_snapshot" | "mig/snapshot" => Some(Self::Snapshot),
            "live_migration" => Some(Self::Outgoing),
            "dump_thread" => Some(Self::Dump),
            _ if name.starts_with("mig/src/") || name.starts_with("multifdsend_") => {
                Some(Self::Outgoing)
            }
            _ if ["mig/dst/", "postcopy/", "fault-", "multifdrecv_"]
                .iter()
                .any(|start| name.starts_with(start)) =>
            {
                Some(Self::Incoming)
            }
            _ => None,
        }
    }

    /// Determines the operation by querying a monitor.
    ///
    /// # Errors
    ///
    /// Those of [`Qmp::execute`].
    pub fn of_monitor(qmp: &mut Qmp) -> Result<Option<Self>, VmError> {
        let status = qmp.status()?.status;
        if let Some(transfer) = Self::of_status(&status) {
            return Ok(Some(transfer));
        }
        let capabilities = qmp.execute("query-migrate-capabilities", Value::Null)?;
        let mut capabilities = capabilities.as_array().into_iter().flatten();
        let snapshots = capabilities.any(|capability| {
            capability["capability"] == "background-snapshot" && capability["state"] == true
        });
        let migration = qmp.execute("query-migrate", Value::Null)?;
        Ok(match migration["status"].as_str() {
            _ if snapshots => Some(Self::SnapshotEnabled),
            None | Some("none" | "completed" | "failed" | "cancelled") => None,
            Some(_) => Some(Self::Outgoing),
        })
    }

    fn of_status(status: &str) -> Option<Self> {
        match status {
            "inmigrate" => Some(Self::Incoming),
            "prelaunch" | "preconfig" => Some(Self::NotStarted),
            "postmigrate" | "finish-migrate" | "save-vm" | "restore-vm" | "colo" => {
                Some(Self::Outgoing)
            }
            _ => None,
        }
    }
}

impl QemuVm {
    /// Why QEMU has exclusive use of the VM's memory, if it has; `None` also if there is no indication.
    ///
    /// With `monitor`, its monitor is also queried, within that time limit.
    ///
    /// # Errors
    ///
    /// Those of the monitor, if the kernel's data show no operation.
    pub fn transfer(&self, monitor: Option<Duration>) -> Result<Option<Transfer>, VmError> {
        if let Some(transfer) = Transfer::of_threads(self.pid) {
            return Ok(Some(transfer));
        }
        let monitor = monitor.filter(|_| !self.qmp_sockets.is_empty());
        let monitored = monitor.map_or(Ok(None), |limit| {
            Transfer::of_monitor(&mut self.monitor(limit)?)
        });
        match monitored {
            Ok(Some(transfer)) => Ok(Some(transfer)),
            Ok(None) if monitor.is_some() => Ok(None),
            _ if self.waits_for_migration() => Ok(Some(Transfer::Incoming)),
            other => other,
        }
    }

    /// Whether it was started as the target of a migration, and its CPUs have not run.
    pub fn waits_for_migration(&self) -> bool {
        let arguments = read_own(self.pid, "cmdline").unwrap_or_default();
        let mut arguments = arguments.split(|&byte| byte == 0);
        if !arguments.any(|argument| argument == b"-incoming" || argument == b"--incoming") {
            return false;
        }
        let ran = self.vcpus.iter();
        let most_ns = ran.filter_map(|vcpu| vcpu.ran_ns(self.pid)).max();
        most_ns.is_none_or(|most| most < STARTED_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_migrations_are_told_from_others() {
        use Transfer::{Dump, Incoming, Outgoing, Snapshot};
        for (name, expected) in [
            ("live_migration", Some(Outgoing)),
            ("mig/src/main", Some(Outgoing)),
            ("multifdsend_0", Some(Outgoing)),
            ("bg_snapshot", Some(Snapshot)),
            ("mig/snapshot", Some(Snapshot)),
            ("postcopy/listen", Some(Incoming)),
            ("fault-default", Some(Incoming)),
            ("mig/dst/fault", Some(Incoming)),
            ("dump_thread", Some(Dump)),
            ("CPU 0/KVM", None),
            ("worker", None),
            ("call_rcu", None),
            ("qemu-system-x86", None),
        ] {
            assert_eq!(Transfer::of_thread(name), expected, "{name}");
        }
    }

    #[test]
    fn states_in_which_memory_is_loaded_or_saved_are_told_from_others() {
        for status in [
            "running",
            "paused",
            "io-error",
            "guest-panicked",
            "suspended",
        ] {
            assert_eq!(Transfer::of_status(status), None, "{status}");
        }
        for status in [
            "inmigrate",
            "prelaunch",
            "postmigrate",
            "finish-migrate",
            "save-vm",
        ] {
            assert!(Transfer::of_status(status).is_some(), "{status}");
        }
    }

    #[test]
    fn a_thread_of_a_migration_that_begins_is_noticed() {
        let pid = std::process::id();
        assert_eq!(Transfer::of_threads(pid), None);
        let mut watch = TransferWatch::new(pid);
        assert_eq!(watch.check(), None);
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("live_migration".to_owned());
        let thread = thread.spawn(move || ended.recv()).unwrap();
        let start = Instant::now();
        let mut found = None;
        // So that nothing but the number of threads leads to it.
        watch.inspected = Some(start + Duration::from_secs(3600));
        while found.is_none() && start.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
            found = watch.check();
        }
        assert_eq!(found, Some(Transfer::Outgoing));
        drop(end);
        thread.join().unwrap().unwrap_err();
    }
}
