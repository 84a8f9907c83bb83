//! State of a process that a tracer must leave unchanged.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::{PATIENCE, POLL, Subject, wait_for};

impl Subject {
    /// QEMU's process id, as an argument of a command.
    pub fn pid(&self) -> String {
        self.vm.pid.to_string()
    }

    /// Checks that no tracer has left anything on the VM's RAM.
    ///
    /// # Panics
    ///
    /// If one has.
    pub fn assert_no_trap_is_left(&self) {
        let states = self.vm.ram_states().unwrap();
        assert!(!states.is_empty());
        assert!(states.iter().all(|state| !state.userfaultfd), "{states:?}");
    }

    /// What a tracer could leave changed of the VM's process.
    pub fn footprint(&self) -> Footprint {
        Footprint::of(self.vm.pid)
    }

    /// Checks that the VM's process is as it was before. It has some time to get there: QEMU itself closes the connection
    /// of a client that left its monitor.
    ///
    /// # Panics
    ///
    /// If something differs after 10 s.
    pub fn assert_left_as(&self, before: &Footprint) {
        let end = Instant::now() + SETTLING;
        let mut now = self.footprint();
        while now != *before && Instant::now() < end {
            thread::sleep(POLL);
            now = self.footprint();
        }
        assert!(now == *before, "{}", before.differences(&now));
    }

    /// Waits until the VM's process is not traced, by ptrace or by traps.
    ///
    /// # Panics
    ///
    /// If somebody still does after [`PATIENCE`].
    pub fn wait_until_untraced(&self) {
        let status = format!("/proc/{}/status", self.vm.pid);
        wait_for("a VM that is not traced", PATIENCE, || {
            let status = fs::read_to_string(&status).unwrap();
            let states = self.vm.ram_states().unwrap();
            // A tracer holds a lock also while it has nothing registered.
            let pagemap = File::open(format!("/proc/{}/pagemap", self.vm.pid)).unwrap();
            let free = status.contains("TracerPid:\t0\n")
                && states.iter().all(|state| !state.userfaultfd)
                && flock(&pagemap, FlockOperation::NonBlockingLockExclusive).is_ok();
            free.then_some(())
        });
    }
}

/// How long a process may take to finish what a tracer's end began.
const SETTLING: Duration = Duration::from_secs(10);

/// The state of a process that a tracer could leave changed.
#[derive(Debug, PartialEq)]
pub struct Footprint {
    /// Its open files.
    descriptors: BTreeMap<u32, PathBuf>,
    /// Per thread: who traces it, and which signals it blocks, ignores and catches.
    threads: BTreeMap<u32, Vec<String>>,
    /// Its executable mappings.
    code: Vec<String>,
}

impl Footprint {
    /// The lines of one that the other lacks.
    fn differences(&self, after: &Self) -> String {
        let [before, after] = [self, after].map(|footprint| format!("{footprint:#?}"));
        let lacking = |lines: &str, others: &str, mark: &str| {
            let others: Vec<_> = others.lines().collect();
            let lines = lines.lines().filter(|line| !others.contains(line));
            lines
                .map(|line| format!("{mark}{line}\n"))
                .collect::<String>()
        };
        lacking(&before, &after, "-") + &lacking(&after, &before, "+")
    }

    /// Reads it.
    ///
    /// # Panics
    ///
    /// If there is no such process.
    pub fn of(pid: u32) -> Self {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let numbered = |name: &str| {
            let entries = fs::read_dir(folder.join(name)).unwrap();
            entries.map(|entry| {
                let entry = entry.unwrap();
                let number = entry.file_name().to_str().unwrap().parse::<u32>().unwrap();
                (number, entry.path())
            })
        };
        let state_of = |status: &str| {
            let kept = ["TracerPid:", "SigBlk:", "SigIgn:", "SigCgt:"];
            let lines = status.lines();
            let lines = lines.filter(|line| kept.iter().any(|key| line.starts_with(key)));
            lines.map(str::to_owned).collect()
        };
        let maps = fs::read_to_string(folder.join("maps")).unwrap();
        Self {
            descriptors: numbered("fd")
                .filter_map(|(number, path)| match fs::read_link(&path) {
                    Ok(target) => Some((number, target)),
                    // One that has been closed since.
                    Err(error) if error.kind() == ErrorKind::NotFound => None,
                    Err(error) => panic!("{}: {error}", path.display()),
                })
                .collect(),
            threads: numbered("task")
                .filter_map(
                    |(thread, path)| match fs::read_to_string(path.join("status")) {
                        Ok(status) => Some((thread, state_of(&status))),
                        // A worker of QEMU that has ended since.
                        Err(error) if error.kind() == ErrorKind::NotFound => None,
                        Err(error) => panic!("{}: {error}", path.display()),
                    },
                )
                .collect(),
            code: maps
                .lines()
                .filter(|line| {
                    let access = line.split_ascii_whitespace().nth(1);
                    access.is_some_and(|access| access.contains('x'))
                })
                .map(str::to_owned)
                .collect(),
        }
    }
}
