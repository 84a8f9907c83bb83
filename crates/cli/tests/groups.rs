//! Real control groups of this host: what the daemon finds of them, and a group of ten thousand processes.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "each test uses its part")]
#[path = "program/mod.rs"]
mod program;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use plimsoll_protocol::client::Client;
use plimsoll_protocol::group::Groups;
use plimsoll_protocol::vm::TraceState;
use plimsoll_rig::{Server, wait_for};
use plimsoll_skip::{Lack, skip};
use plimsoll_vm::{CgroupMount, CgroupVersion};
use rustix::fs::{CWD, Mode, OFlags, mkfifoat, openat};

use program::{KilledOnDrop, ran};

const PLIMSOLL: &str = env!("CARGO_BIN_EXE_plimsoll");
const PATIENCE: Duration = Duration::from_secs(60);
/// Processes of the largest group.
const MANY: usize = 10_000;

/// A control group of the host that counts memory, with what is below it. Dropped, it is removed.
struct TestGroup {
    directory: PathBuf,
    path: String,
}

impl TestGroup {
    /// Creates one; `None` after saying why it cannot.
    fn new(name: &str) -> Option<Self> {
        let path = format!("/plimsoll-{name}-{}", std::process::id());
        for mount in CgroupMount::all().unwrap() {
            let directory = mount.directory.join(&path[1..]);
            if fs::create_dir(&directory).is_err() {
                continue;
            }
            let group = Self {
                directory,
                path: path.clone(),
            };
            let counts = match mount.version {
                CgroupVersion::V1 => group.directory.join("memory.usage_in_bytes").exists(),
                // Those below it count only if it lets them.
                CgroupVersion::V2 => {
                    fs::write(group.directory.join("cgroup.subtree_control"), "+memory").is_ok()
                }
            };
            if counts {
                return Some(group);
            }
        }
        skip(
            Lack::Root,
            "no control group that counts memory can be created",
        );
        None
    }

    fn below(&self, name: &str) -> PathBuf {
        let directory = self.directory.join(name);
        fs::create_dir(&directory).unwrap();
        directory
    }
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        let remove = || {
            for entry in fs::read_dir(&self.directory).ok()?.flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    let _ = fs::remove_dir(entry.path());
                }
            }
            fs::remove_dir(&self.directory).ok()
        };
        // Processes that have just ended may still be members.
        let deadline = Instant::now() + PATIENCE;
        while remove().is_none() && self.directory.exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A process in a group.
fn member_of(group: &Path) -> KilledOnDrop {
    let procs = group.join("cgroup.procs");
    let script = format!("echo $$ > '{}'; exec sleep 600", procs.display());
    KilledOnDrop(Command::new("sh").args(["-c", &script]).spawn().unwrap())
}

/// Ten thousand processes in a group, children of one that is the last. Dropped, all of them end.
struct Crowd {
    folder: tempfile::TempDir,
    group: PathBuf,
    shell: Child,
}

impl Crowd {
    fn start(group: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let gate = folder.path().join("gate");
        mkfifoat(CWD, &gate, Mode::RUSR | Mode::WUSR).unwrap();
        // Each child waits until the pipe is opened for writing.
        let script = format!(
            "echo $$ > '{}/cgroup.procs'; n=0; while [ $n -lt {MANY} ]; do (read line < '{}') & n=$((n + 1)); done; wait",
            group.display(),
            gate.display(),
        );
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", &script]).stdin(Stdio::null()).spawn();
        let crowd = Self {
            folder,
            group: group.to_owned(),
            shell: shell.unwrap(),
        };
        // However slow the machine is, their number grows.
        let mut members = crowd.members();
        while members <= MANY {
            members = wait_for("more processes", PATIENCE, || {
                std::thread::sleep(Duration::from_secs(1));
                Some(crowd.members()).filter(|now| *now > members)
            });
        }
        crowd
    }

    fn members(&self) -> usize {
        let members = fs::read_to_string(self.group.join("cgroup.procs"));
        members.unwrap_or_default().lines().count()
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        let _ = self.shell.kill();
        while self.members() > 0 && Instant::now() < deadline {
            // All that wait read its end once it is opened and closed.
            let _ = openat(
                CWD,
                self.folder.path().join("gate"),
                OFlags::WRONLY | OFlags::NONBLOCK,
                Mode::empty(),
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.shell.wait();
    }
}

/// A daemon that watches groups, with its folder.
struct Watcher {
    folder: tempfile::TempDir,
    _server: Server,
}

impl Watcher {
    fn new(watch: &[String], max: u32) -> Option<Self> {
        let program = Path::new(PLIMSOLL).with_file_name("plimsolld");
        if !program.exists() {
            skip(
                Lack::Program,
                "plimsolld is not built: cargo build -p plimsoll-daemon",
            );
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().display();
        let config = format!(
            "turn_interval = \"1s\"\n[history]\nfile = \"{at}/history\"\n\
             [serve]\nsocket = \"{at}/socket\"\nread_only_socket = \"none\"\n\
             [groups]\nwatch = {watch:?}\nmax = {max}\n"
        );
        let file = folder.path().join("plimsoll.toml");
        fs::write(&file, config).unwrap();
        let socket = folder.path().join("socket");
        // In a process table of its own, so that no VM of this host is traced.
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.arg(program).arg("--config").arg(file);
        let server = Server::start(&mut command, &folder.path().join("log"), PATIENCE, |_| {
            let host = Client::connect(&socket).and_then(|client| client.host());
            host.is_ok_and(|host| host.turn > 0)
        });
        Some(Self {
            folder,
            _server: server.unwrap(),
        })
    }

    fn groups(&self) -> Groups {
        let client = Client::connect(&self.folder.path().join("socket")).unwrap();
        client.host().unwrap().groups
    }

    /// Runs a verb; its exit code and all that it wrote.
    fn verb(&self, words: &[&str]) -> (Option<i32>, String) {
        let socket = self.folder.path().join("socket");
        let (code, text, complaint) = ran(Command::new(PLIMSOLL)
            .args(words)
            .arg("--socket")
            .arg(socket));
        (code, text + &complaint)
    }

    fn until<T>(&self, what: &str, is: impl Fn(&Groups) -> Option<T>) -> T {
        wait_for(what, PATIENCE, || is(&self.groups()))
    }
}

#[test]
fn groups_of_this_host_are_watched_with_their_charge_and_dropped_when_they_go() {
    let Some(group) = TestGroup::new("watched") else {
        return;
    };
    let hostile = "odd \u{1b}[2J\u{202e}'--heatmap";
    let (web, odd) = (group.below("web.service"), group.below(hostile));
    let _members = [member_of(&web), member_of(&web)];
    let patterns = [format!("{}/*", &group.path[1..])];
    let Some(watcher) = Watcher::new(&patterns, 8) else {
        return;
    };
    let path = format!("{}/web.service", group.path);
    watcher.until("what is charged to it", |groups| {
        let mut watched = groups.watched.iter();
        let charged = watched.find(|group| group.path == path)?.charged_bytes;
        charged.filter(|&bytes| bytes > 0)
    });
    let groups = watcher.groups();
    let names: Vec<_> = groups.watched.iter().map(|group| &*group.group).collect();
    assert_eq!(names, [r"odd \u{1b}[2J\u{202e}'--heatmap", "web.service"]);
    for group in &groups.watched {
        // With a kernel that tracks idle pages it is traced; otherwise it is said why not.
        let trace = group.trace.as_ref().unwrap();
        let error = trace.error.as_deref().unwrap_or_default();
        assert_eq!(trace.state == TraceState::Refused, !error.is_empty());
        assert!(
            error.is_empty() || error.contains("does not track idle pages"),
            "{group:?}"
        );
        let warning = group.warnings.first();
        assert!(
            error.is_empty() || *warning.unwrap() == format!("it is not traced: {error}"),
            "{group:?}"
        );
    }
    for words in [
        &["vms"][..],
        &["vms", "-o", "csv"],
        &["top", "--once"],
        &["show", &format!("cgroup:{}/{hostile}", group.path)],
    ] {
        let (code, text) = watcher.verb(words);
        assert_eq!(code, Some(0), "{words:?}: {text}");
        assert!(text.contains(r"odd \u{1b}"), "{words:?}: {text}");
        assert!(
            text.chars()
                .all(|letter| letter == '\n' || !letter.is_control()),
            "{text:?}"
        );
    }
    let (code, text) = watcher.verb(&["set", "web.service", "--shares", "7"]);
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.contains("is a control group, which is only observed"),
        "{text}"
    );
    fs::remove_dir(odd).unwrap();
    watcher.until("the end of a group", |groups| {
        (groups.watched.len() == 1).then_some(())
    });
    // What was recorded of it is there under its path.
    let (code, text) = watcher.verb(&[
        "report",
        "wss",
        &format!("cgroup:{}/{hostile}", group.path),
        "-o",
        "csv",
    ]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.lines().count() > 1, "{text}");
}

#[test]
fn more_groups_than_may_be_watched_are_counted() {
    let Some(group) = TestGroup::new("many") else {
        return;
    };
    for index in 0..20 {
        group.below(&format!("{index}.scope"));
    }
    let patterns = [format!("{}/*.scope", &group.path[1..])];
    let Some(watcher) = Watcher::new(&patterns, 3) else {
        return;
    };
    let groups = watcher.groups();
    assert_eq!(groups.watched.len(), 3);
    let [left] = &groups.left_out[..] else {
        panic!("{:?}", groups.left_out);
    };
    assert_eq!((left.count, left.paths.len()), (17, 10));
    let (_, text) = watcher.verb(&["vms"]);
    assert!(
        text.contains("and 13 more: no more than 3 groups are watched"),
        "{text}"
    );
}

#[test]
fn tracing_a_process_costs_a_share_of_one_cpu_and_not_of_a_vms() {
    let sleeper = KilledOnDrop(Command::new("sleep").arg("600").spawn().unwrap());
    let (code, text, complaint) = ran(Command::new(PLIMSOLL).args([
        "attach",
        &sleeper.0.id().to_string(),
        "--backend",
        "write-scan",
        "--period",
        "1s",
        "--periods",
        "1",
    ]));
    if complaint.contains("nothing was changed") {
        skip(
            Lack::Userfaultfd,
            format_args!("writes of a process cannot be traced here: {complaint}"),
        );
        return;
    }
    assert_eq!(code, Some(0), "{complaint}");
    assert!(text.contains(" % of one CPU."), "{text}");
    assert!(!text.contains("VM"), "{text}");
}

#[test]
fn a_group_of_ten_thousand_processes_is_described_and_watched() {
    let Some(group) = TestGroup::new("crowd") else {
        return;
    };
    let crowd = group.below("crowd");
    let _processes = Crowd::start(&crowd);
    let name = format!("cgroup:{}", crowd.display());
    let began = Instant::now();
    let (_, text, complaint) = ran(Command::new(PLIMSOLL).args(["doctor", &name]));
    assert!(text.contains("10001 processes"), "{text}{complaint}");
    let (code, text, complaint) =
        ran(Command::new(PLIMSOLL).args(["attach", &name, "--period", "1s", "--periods", "1"]));
    let is_refused = complaint.contains("the kernel does not track idle pages");
    assert!(
        code == Some(0) || (code == Some(1) && is_refused),
        "{text}{complaint}"
    );
    let took = began.elapsed();
    // Beside other tests, on a machine that may be slow.
    assert!(took < Duration::from_secs(90), "{took:?}");
    if let Some(watcher) = Watcher::new(&[format!("{}/crowd", &group.path[1..])], 1) {
        assert_eq!(watcher.groups().watched.len(), 1);
    }
}
