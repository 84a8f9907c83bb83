//! Processes that a tracer could harm, or that would harm its host: what looks like a VM is any user's program.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_rig::{PATIENCE, wait_for};
use plimsoll_skip::{Lack, longer, skip};
use tempfile::TempDir;

use crate::limits::{UnitLimits, compile};
use crate::refusals::{AS_NOBODY, WORKLOAD, assert_refused, has_setpriv};
use crate::rig::{Attach, PLIMSOLL, boot_with, make_readable, shared_ground, until_ended};

/// The arguments of a VM whose RAM can be traced.
pub const SHARED: [&str; 6] = [
    "-machine",
    "q35,memory-backend=ram",
    "-m",
    "192M",
    "-object",
    "memory-backend-memfd,id=ram,size=192M,share=on",
];

/// A child process that is killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program that exchanges directories as soon as anything appears in its /dev.
struct Exchange {
    process: Process,
    victim: PathBuf,
    lines: Arc<Mutex<Vec<String>>>,
    _folder: TempDir,
}

impl Exchange {
    fn start() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let compiled = compile("exchange", folder.path())?;
        let program = folder.path().join("qemu-system-evil");
        fs::rename(compiled, &program).unwrap();
        let root = folder.path().join("root");
        fs::create_dir(&root).unwrap();
        make_readable(&root, 0o777);
        let victim = folder.path().join("victim");
        fs::write(&victim, "root's\n").unwrap();
        make_readable(&victim, 0o600);
        let mut command = Command::new(AS_NOBODY[0]);
        command.args(&AS_NOBODY[1..]).arg(&program);
        command.args([&root, &victim]).args(["-m", "16M"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        let process = Process(child);
        match output.next() {
            Some(Ok(line)) => assert_eq!(line, "ready"),
            _ => {
                skip(Lack::Program, "no user namespace can be made here");
                return None;
            }
        }
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&lines);
        thread::spawn(move || {
            for line in output.map_while(Result::ok) {
                kept.lock().unwrap().push(line);
            }
        });
        Some(Self {
            process,
            victim,
            lines,
            _folder: folder,
        })
    }

    fn pid(&self) -> String {
        self.process.0.id().to_string()
    }

    /// Fails if anything was made in its file system, or if the victim's owner, mode or contents changed.
    fn assert_nothing_gained(&self) {
        let victim = fs::metadata(&self.victim).unwrap();
        assert_eq!(
            (victim.uid(), victim.gid(), victim.mode() & 0o777),
            (0, 0, 0o600)
        );
        assert_eq!(fs::read_to_string(&self.victim).unwrap(), "root's\n");
        assert_eq!(*self.lines.lock().unwrap(), [""; 0]);
    }
}

#[test]
fn two_hundred_attaches_give_nothing_to_a_process_that_exchanges_directories() {
    let Some(_ground) = shared_ground() else {
        return;
    };
    if !has_setpriv() {
        return;
    }
    let Some(evil) = Exchange::start() else {
        return;
    };
    let pid = evil.pid();
    assert_refused(
        Attach::start(&pid, ""),
        &["user namespace of its own", "--allow-namespaced"],
    );
    let options = format!("--allow-namespaced {BRIEFLY}");
    for _ in 0..longer(200) {
        Attach::start(&pid, &options).end().assert_quiet_success();
    }
    evil.assert_nothing_gained();
}

#[test]
fn a_vm_in_a_user_namespace_of_its_own_is_traced_only_if_that_is_allowed() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let prefix = ["unshare", "--user", "--map-root-user", "--mount"];
    let mut unshare = Command::new(prefix[0]);
    let unshared = unshare.args(&prefix[1..]).arg("true").status();
    if !unshared.is_ok_and(|status| status.success()) {
        skip(Lack::Program, "unshare(1) makes no user namespace here");
        return;
    }
    let mut guest = boot_with(&ground, &prefix, &SHARED, WORKLOAD);
    let footprint = guest.footprint();
    assert_refused(
        Attach::start(&guest.pid(), ""),
        &[
            "user namespace of its own",
            "--allow-namespaced",
            "--backend scan",
        ],
    );
    let traced = |options: &str| {
        let options = format!("--budget 20% --period 1s --periods 2 {options}");
        let ended = Attach::start(&guest.pid(), &options).end();
        ended.assert_quiet_success();
        ended
    };
    let ended = traced("--allow-namespaced");
    assert!(ended.periods().all(|period| period.number("traps") > 0.0));
    traced("--backend scan");
    guest.assert_left_as(&footprint);
    guest.assert_goes_on();
}

/// Words before a command whose process a filter of system calls kills for any of `calls`.
fn killed_for(program: &Path, calls: &[&str]) -> Vec<String> {
    let number = |call: &&str| match *call {
        "userfaultfd" => "323",
        "socketpair" => "53",
        other => panic!("{other}"),
    };
    let numbers: Vec<_> = calls.iter().map(number).collect();
    vec![
        program.display().to_string(),
        "kill".to_owned(),
        numbers.join(","),
    ]
}

#[test]
fn no_filter_of_system_calls_ends_a_vm_that_is_attached_to() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("limits", folder.path()) else {
        return;
    };
    let Some(limits) = UnitLimits::read() else {
        return;
    };
    let prefix = killed_for(&program, &["userfaultfd", "socketpair"]);
    let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
    let mut guest = boot_with(&ground, &prefix, &SHARED, WORKLOAD);
    let footprint = guest.footprint();
    // Who has a filter of his own cannot suspend it.
    let within = |options: &[&str]| {
        let mut command = limits.command(PLIMSOLL);
        command.args(["attach", &guest.pid(), "-o", "json"]);
        Attach::spawn(command.args(options))
    };
    assert_refused(
        within(&["--backend", "trap"]),
        &["seccomp filter", "--backend scan"],
    );
    within(&["--backend", "scan", "--period", "1s", "--periods", "1"])
        .end()
        .assert_quiet_success();
    // Root can, for the calls of the tracer alone.
    let ended = Attach::start(&guest.pid(), "--budget 20% --period 1s --periods 2").end();
    ended.assert_quiet_success();
    assert!(ended.periods().all(|period| period.number("traps") > 0.0));
    guest.assert_left_as(&footprint);
    guest.assert_goes_on();
}

#[test]
fn a_process_that_spoils_what_a_tracer_does_is_left_or_traced_but_never_believed() {
    let Some(_ground) = shared_ground() else {
        return;
    };
    let Some(mut disturber) = Disturber::start("meddle", &[]) else {
        return;
    };
    let mut failures = Vec::new();
    for _ in 0..longer(100) {
        let ended = Attach::start(&disturber.pid, BRIEFLY).end();
        match ended.code {
            Some(0) => ended.assert_quiet_success(),
            Some(1) => failures.push(ended.complaint),
            other => panic!("{other:?}: {}", ended.complaint),
        }
    }
    println!("{} attaches failed", failures.len());
    failures.sort();
    failures.dedup();
    println!("{}", failures.concat());
    disturber.assert_runs();
}

/// A process that looks like a VM and disturbs those who trace it.
struct Disturber {
    process: Process,
    pid: String,
    _folder: TempDir,
}

impl Disturber {
    /// Starts a program of `tests/live/c`; `arguments` come before those of a VM.
    fn start(name: &str, arguments: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let compiled = compile(name, folder.path())?;
        let program = folder.path().join(format!("qemu-system-{name}"));
        fs::rename(compiled, &program).unwrap();
        let mut command = Command::new(program);
        command.current_dir(folder.path()).args(arguments);
        command.args(["-m", "16M"]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = Process(child.unwrap());
        let mut line = String::new();
        let mut output = BufReader::new(process.0.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Some(Self {
            pid: process.0.id().to_string(),
            process,
            _folder: folder,
        })
    }

    fn assert_runs(&mut self) {
        assert_eq!(self.process.0.try_wait().unwrap(), None, "it was ended");
    }
}

/// A process that puts a file that it serves itself in the place of the device, and whose `ioctl()` does not end.
struct Delaying(Disturber);

impl Delaying {
    /// `until` as the program takes it.
    fn start(until: &str) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() {
            skip(Lack::Host, "this host has no /dev/fuse");
            return None;
        }
        Some(Self(Disturber::start("delay", &["file", until])?))
    }

    /// Lets the call end.
    fn release(&mut self) {
        drop(self.0.process.0.stdin.take());
    }

    /// Its descriptors.
    fn footprint(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.0.pid)).unwrap();
        let links = entries.map(|entry| fs::read_link(entry.unwrap().path()).unwrap());
        let mut links: Vec<_> = links.collect();
        links.sort();
        links
    }

    /// The process that traces it; 0 for none.
    fn tracer(&self) -> u32 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.pid)).unwrap();
        let mut lines = status.lines();
        let tracer = lines.find_map(|line| line.strip_prefix("TracerPid:"));
        tracer.unwrap().trim().parse().unwrap()
    }

    /// Attaches until the process has been quick enough to delay it; returns what was reported, and after how long.
    fn attach_delayed(&self) -> (String, Duration) {
        let delayed = wait_for("an attach that is delayed", PATIENCE, || {
            let from = Instant::now();
            let ended = Attach::start(&self.0.pid, BRIEFLY).end();
            (ended.code != Some(0)).then(|| (ended, from.elapsed()))
        });
        let (ended, took) = delayed;
        assert_eq!(ended.code, Some(1), "{}", ended.complaint);
        (ended.complaint, took)
    }

    /// Fails unless it goes on with these descriptors, and can be traced.
    fn assert_as_before(&mut self, footprint: &[PathBuf]) {
        assert_eq!(self.tracer(), 0);
        assert_eq!(self.footprint(), footprint);
        Attach::start(&self.0.pid, BRIEFLY)
            .end()
            .assert_quiet_success();
        assert_eq!(self.footprint(), footprint);
        self.0.assert_runs();
    }
}

/// Options for observing a process of a few pages.
const BRIEFLY: &str = "--period 10ms --periods 1 --budget none --rate-rule fixed --rate 1/16";

#[test]
fn a_process_that_delays_a_call_is_left_as_it_was_by_a_deadline() {
    let Some(_ground) = shared_ground() else {
        return;
    };
    let Some(mut delaying) = Delaying::start("interrupted") else {
        return;
    };
    let footprint = delaying.footprint();
    let (complaint, took) = delaying.attach_delayed();
    println!("after {took:?}: {complaint}");
    let delayed = "delays ioctl(USERFAULTFD_IOC_NEW)";
    for words in [delayed, "more than 1 s", "its thread continues unchanged"] {
        assert!(complaint.contains(words), "{complaint}");
    }
    assert!(took < Duration::from_secs(30), "{took:?}");
    delaying.assert_as_before(&footprint);
}

#[test]
fn a_process_whose_call_cannot_be_interrupted_is_restored_when_it_returns() {
    let Some(_ground) = shared_ground() else {
        return;
    };
    let Some(mut delaying) = Delaying::start("released") else {
        return;
    };
    let footprint = delaying.footprint();
    let (complaint, took) = delaying.attach_delayed();
    println!("after {took:?}: {complaint}");
    assert!(took < Duration::from_secs(30), "{took:?}");
    for words in [
        "cannot be interrupted",
        "lets its thread continue unchanged",
    ] {
        assert!(complaint.contains(words), "{complaint}");
    }
    let keeper = delaying.tracer();
    assert!(
        complaint.contains(&format!("process {keeper}, which must not be ended")),
        "{complaint}"
    );
    assert_refused(
        Attach::start(&delaying.0.pid, ""),
        &["is traced by process"],
    );
    delaying.release();
    until_ended(keeper);
    delaying.assert_as_before(&footprint);
}

#[test]
fn a_vm_that_can_open_no_more_files_is_left_as_it_was() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut guest = boot_with(&ground, &[], &SHARED, WORKLOAD);
    let pid = guest.pid();
    let footprint = guest.footprint();
    let descriptors = || {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let numbers = entries.map(|entry| entry.unwrap().file_name());
        let numbers = numbers.map(|name| name.to_str().unwrap().parse::<u64>().unwrap());
        numbers.collect::<std::collections::BTreeSet<_>>()
    };
    let before = descriptors();
    // Four are open at once: two sockets, the device and the userfaultfd.
    for free in 0..=4 {
        let limit = (0..)
            .filter(|number| !before.contains(number))
            .nth(free)
            .unwrap();
        let limited = Command::new("prlimit")
            .args(["--pid", &pid, &format!("--nofile={limit}:")])
            .status();
        if !limited.is_ok_and(|status| status.success()) {
            skip(Lack::Program, "prlimit(1)");
            return;
        }
        let attach = Attach::start(&pid, "--period 200ms --periods 1");
        match free {
            0 | 1 => assert_refused(attach, &["socketpair() failed", "Too many open files"]),
            2 => assert_refused(attach, &["too many files open", "--backend scan"]),
            3 => assert_refused(attach, &["USERFAULTFD_IOC_NEW", "Too many open files"]),
            _ => attach.end().assert_quiet_success(),
        }
        assert_eq!(descriptors(), before);
    }
    guest.assert_left_as(&footprint);
    guest.assert_goes_on();
}
