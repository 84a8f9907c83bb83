//! `plimsoll disk` and `plimsoll run` as their users meet them, as far as no VM is needed.

mod program;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_serve::disk::Report;
use plimsoll_skip::write_program;
use tempfile::TempDir;

use program::{KilledOnDrop, ran};

/// The program with a line of arguments, in which `@` stands for a folder.
fn plimsoll(folder: &TempDir, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    let folder = folder.path().to_str().unwrap();
    let words = line.split_ascii_whitespace();
    command.args(words.map(|word| word.replace('@', folder)));
    command
}

/// A folder with images: `good` of 1 MiB, `odd` whose size is no multiple of 512.
fn images() -> TempDir {
    // In memory, because delayed writes are kept in it.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    for (name, bytes) in [("good.raw", 1 << 20), ("odd.raw", 1000)] {
        let file = File::create(folder.path().join(name)).unwrap();
        file.set_len(bytes).unwrap();
    }
    folder
}

/// A daemon for `good.raw` with all its sockets.
struct DiskServer {
    folder: TempDir,
    child: KilledOnDrop,
    told: String,
}

impl DiskServer {
    fn new(options: &str) -> Self {
        let folder = images();
        let line = "disk serve --name vm --disk @/good.raw,socket=@/disk --control @/control --admin @/admin";
        let child = plimsoll(&folder, &format!("{line} {options}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut child = KilledOnDrop(child);
        let mut lines = BufReader::new(child.0.stdout.take().unwrap());
        let mut told = String::new();
        while !told.contains("disk: serving ") {
            assert!(lines.read_line(&mut told).unwrap() > 0, "{told}");
        }
        Self {
            folder,
            child,
            told,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs what must succeed in silence, and returns what it wrote.
    fn text(&self, line: &str) -> String {
        let (code, text, complaint) = ran(&mut plimsoll(&self.folder, line));
        assert_eq!((code, &*complaint), (Some(0), ""), "{line}");
        text
    }

    fn report(&self) -> Report {
        serde_json::from_str(&self.text("disk stat @/admin -o json")).unwrap()
    }
}

#[test]
fn what_cannot_be_served_is_refused_with_the_reason() {
    let folder = images();
    fs::write(folder.path().join("file"), "text").unwrap();
    let disk = "--disk @/good.raw,socket=@/s";
    for (line, code, reason) in [
        ("", 2, "there is nothing to serve: name a disk"),
        ("--disk @/good.raw", 2, "it needs socket=PATH"),
        (
            "--disk @/good.raw,socket=@/s,cache=1",
            2,
            "'cache=1' is not an option of a disk",
        ),
        (
            "--disk @/good.raw,socket=@/s,queues=0",
            2,
            "queues= takes 1 to 64",
        ),
        ("--disk @/none.raw,socket=@/s", 1, "none.raw: No such file"),
        (
            "--disk @/odd.raw,socket=@/s",
            1,
            "has 1000 bytes: its size must be a positive multiple of 512 bytes",
        ),
        (
            "--disk @/good.raw,socket=@/file",
            1,
            "file exists and is not a socket",
        ),
        ("DISK --cache 1K", 2, "--cache 1KiB: the minimum is 1MiB"),
        (
            "DISK --cache 900T",
            2,
            "--cache 900TiB is more than this machine's memory",
        ),
        (
            "DISK --cache 2M --cache-max 1M",
            2,
            "--cache-max 1MiB is less than --cache 2MiB",
        ),
        (
            "DISK --cache 2M --cache-mode none",
            2,
            "--cache 2MiB contradicts --cache-mode none",
        ),
        (
            "DISK --write delayed --cache-mode none",
            2,
            "--write delayed needs a cache",
        ),
        (
            "DISK --write-error enospc",
            2,
            "name its QMP socket with --monitor",
        ),
        (
            "DISK --write delayed --state /proc",
            1,
            "/proc is not on tmpfs",
        ),
        ("DISK --dirty 10%", 2, "--dirty goes with --write delayed"),
        (
            "DISK --dirty-age 1s",
            2,
            "--dirty-age goes with --write delayed",
        ),
        ("DISK --dirty 2 --write delayed", 2, "'2' is not a rate"),
        ("DISK --name a/b", 2, "a name has 1 to 48 ASCII letters"),
        ("DISK --state @/file", 1, "cannot create the directory"),
        ("DISK --admin @/file", 1, "file exists and is not a socket"),
        ("DISK --record @/none/trace", 1, "none/trace"),
        ("DISK --blk-file @/good.raw", 2, "cannot be used with"),
        (
            "--blk-file @/good.raw",
            2,
            "--blk-file needs --socket-path or --fd",
        ),
        (
            "--blk-file @/good.raw --fd 77",
            1,
            "--fd 77: no such descriptor",
        ),
        ("--blk-file @/good.raw --fd 2", 2, "--fd 2 is not a socket"),
        ("--socket-path @/s", 2, "--blk-file"),
    ] {
        let line = format!("disk serve {}", line.replace("DISK", disk));
        let (ended, out, complaint) = ran(&mut plimsoll(&folder, &line));
        assert_eq!((ended, &*out), (Some(code), ""), "{line}: {complaint}");
        assert!(complaint.starts_with("plimsoll: error: "), "{complaint}");
        assert!(complaint.contains(reason), "{line}: {complaint}");
    }
    assert_eq!(
        fs::read_to_string(folder.path().join("file")).unwrap(),
        "text"
    );
}

#[test]
fn capabilities_are_those_of_the_schema_and_nothing_else_is_done() {
    let folder = images();
    let line = "disk serve --print-capabilities --disk @/none.raw";
    let (code, out, _) = ran(&mut plimsoll(&folder, line));
    let said: serde_json::Value = serde_json::from_str(&out).unwrap();
    let expected = serde_json::json!({"type": "block", "features": ["read-only", "blk-file"]});
    assert_eq!((code, said), (Some(0), expected));
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../packaging/50-plimsoll-blk.json"
    );
    let told: serde_json::Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(told["type"], "block");
    // Started by the name the file tells, it is the same program.
    let link = folder.path().join(
        PathBuf::from(told["binary"].as_str().unwrap())
            .file_name()
            .unwrap(),
    );
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_plimsoll"), &link).unwrap();
    let (code, by_link, _) = ran(Command::new(link).arg("--print-capabilities"));
    assert_eq!((code, by_link), (Some(0), out));
}

#[test]
fn a_daemon_says_what_it_serves_and_ends_well_at_a_signal() {
    for signal in ["-TERM", "-INT"] {
        let mut served =
            DiskServer::new("--cache 8M --write delayed --state @/state --record @/trace");
        assert!(served.told.starts_with("disk: 0 is "), "{}", served.told);
        assert!(served.told.contains("good.raw (1 MiB, "), "{}", served.told);
        let rest = "disk: serving vm, exclusive cache of 8 MiB, up to 2 MiB of writes delayed, control disk at ";
        assert!(served.told.contains(rest), "{}", served.told);
        let sockets = ["disk", "control", "admin"].map(|name| served.path(name));
        assert!(sockets.iter().all(|path| path.exists()));
        assert_eq!(served.child.end_by(signal), Some(0));
        assert!(!served.path("admin").exists());
        // The trace of nothing is a trace.
        assert!(served.path("trace").exists());
    }
}

#[test]
fn an_image_or_socket_in_use_is_left_to_who_uses_it() {
    let served = DiskServer::new("");
    for (line, reason) in [
        (
            "--disk @/good.raw,socket=@/other",
            "is in use: another process holds its lock",
        ),
        (
            "--disk @/more.raw,socket=@/disk",
            "disk is in use: another process listens on it",
        ),
        (
            "--disk @/more.raw,socket=@/other --admin @/admin",
            "another process listens on it",
        ),
    ] {
        let file = File::create(served.path("more.raw")).unwrap();
        file.set_len(4096).unwrap();
        let line = format!("disk serve {line}");
        let (code, _, complaint) = ran(&mut plimsoll(&served.folder, &line));
        assert_eq!(code, Some(1), "{line}: {complaint}");
        assert!(complaint.contains(reason), "{line}: {complaint}");
    }
    assert_eq!(served.report().machine.disks.len(), 1);
}

#[test]
fn a_cache_is_looked_at_and_changed_at_run_time() {
    let served = DiskServer::new("--cache 8M --cache-max 32M");
    assert_eq!(served.text("disk resize @/admin 16M"), "cache 16 MiB\n");
    let report = served.report();
    assert_eq!(
        (&*report.vm, report.machine.engine.cache_bytes),
        ("vm", 16 << 20)
    );
    let ghosts = report.ghosts.unwrap();
    assert_eq!((ghosts.direct_pages, ghosts.expected), (None, None));
    let nothing = "nothing was switched off\n";
    assert_eq!(served.text("disk enable @/admin"), nothing);
    let table = served.text("disk stat @/admin");
    assert!(table.contains("of 16 MiB (0.0 %)"), "{table}");
    let metrics = served.text("disk stat @/admin -o openmetrics");
    assert!(metrics.ends_with("# EOF\n"), "{metrics}");

    let refused = |line: &str, code: i32, reason: &str| {
        let (ended, _, complaint) = ran(&mut plimsoll(&served.folder, line));
        assert_eq!(ended, Some(code), "{line}: {complaint}");
        assert!(complaint.contains(reason), "{line}: {complaint}");
    };
    refused(
        "disk resize @/admin 64M",
        1,
        "the daemon refuses: cache not resized",
    );
    refused(
        "disk resize @/admin 1K",
        1,
        "the daemon refuses: cache not resized",
    );
    refused(
        "disk stat @/admin --out @/curve.svg",
        1,
        "there is no curve",
    );
    refused(
        "disk stat @/admin -o openmetrics --curve",
        2,
        "it goes without --watch and --curve",
    );
    refused(
        "disk stat @/admin -o png --watch",
        2,
        "a picture shows one point in time",
    );
    assert_eq!(served.report().machine.engine.cache_bytes, 16 << 20);
}

#[test]
fn bad_input_on_the_admin_socket_is_told_and_harms_nobody() {
    let served = DiskServer::new("");
    let mut stream = UnixStream::connect(served.path("admin")).unwrap();
    let lines =
        b"\0\xff\n{}\n{\"command\":\"stop\"}\n{\"command\":\"resize\",\"cache_bytes\":1e99}\n";
    stream.write_all(lines).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text.lines().count(), 4, "{text}");
    for line in text.lines() {
        assert!(
            line.starts_with("{\"schema\":1,\"error\":\"invalid request: "),
            "{line}"
        );
    }
    assert_eq!(served.report().machine.disks.len(), 1);
}

#[test]
fn verbs_without_a_daemon_end_with_3() {
    let folder = tempfile::tempdir().unwrap();
    drop(UnixListener::bind(folder.path().join("left")).unwrap());
    for socket in ["@/none", "@/left"] {
        for verb in [
            "stat SOCKET",
            "stat SOCKET --watch",
            "resize SOCKET 2M",
            "enable SOCKET",
        ] {
            let line = format!("disk {}", verb.replace("SOCKET", socket));
            let (code, out, complaint) = ran(&mut plimsoll(&folder, &line));
            assert_eq!((code, &*out), (Some(3), ""), "{line}: {complaint}");
            let begin = "plimsoll: error: no disk daemon answers at ";
            assert!(complaint.starts_with(begin), "{line}: {complaint}");
        }
    }
}

/// A program in place of QEMU that says what it was given, and ends with 7.
fn pretender(folder: &TempDir) {
    let script = "#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 7\n";
    write_program(folder.path().join("qemu"), script);
}

#[test]
fn run_gives_qemu_its_disks_and_passes_its_exit_code_on() {
    let folder = images();
    pretender(&folder);
    let line = "run --state @/vm --disk @/good.raw,serial=web,queues=2 --cache 8M -- @/qemu -m 256 -accel tcg";
    let (code, out, complaint) = ran(&mut plimsoll(&folder, line));
    assert_eq!(code, Some(7), "{complaint}");
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(
        lines[0],
        "run: good, emulated (TCG), memory of 256 MiB made shared (memory-backend-memfd)"
    );
    let state = fs::canonicalize(folder.path().join("vm")).unwrap();
    let chardev = |id: &str, file: &str| {
        let path = state.join(file);
        format!(
            "socket,id=plimsoll-{id},path={},reconnect=1",
            path.display()
        )
    };
    assert_eq!(
        lines[1..],
        [
            "-m",
            "256",
            "-accel",
            "tcg",
            "-name",
            "good",
            "-object",
            "memory-backend-memfd,id=plimsoll-memory,size=268435456,share=on",
            "-machine",
            "memory-backend=plimsoll-memory",
            "-chardev",
            &chardev("disk0", "disk0.sock"),
            "-device",
            "vhost-user-blk-pci,id=plimsoll-disk0-device,chardev=plimsoll-disk0,num-queues=2",
            "-chardev",
            &chardev("control", "control.sock"),
            "-device",
            "vhost-user-blk-pci,id=plimsoll-control-device,chardev=plimsoll-control,num-queues=1",
        ]
    );
    assert!(
        complaint.contains("disk: serving good, exclusive cache of 8 MiB"),
        "{complaint}"
    );
    // The daemon has ended and given the image back.
    File::open(folder.path().join("good.raw"))
        .unwrap()
        .try_lock()
        .unwrap();
}

#[test]
fn run_refuses_what_does_not_go_together_and_starts_nothing() {
    let folder = images();
    pretender(&folder);
    for (line, code, reason) in [
        (
            "run --cache 8M -- @/qemu",
            2,
            "options of a cache need a disk",
        ),
        (
            "run --disk @/good.raw,socket=@/s -- @/qemu",
            2,
            "here sockets are made",
        ),
        (
            "run --disk @/none.raw --state @/vm -- @/qemu",
            1,
            "none.raw: No such file",
        ),
        (
            "run --disk @/odd.raw --state @/vm -- @/qemu",
            1,
            "the disk daemon does not start (exit code 1)",
        ),
        (
            "run -- @/qemu -mem-path /dev/shm",
            2,
            "gives memory that others cannot map",
        ),
        (
            "run -- @/qemu -object memory-backend-ram,id=m,size=1G -machine memory-backend=m",
            2,
            "the memory 'm' cannot be mapped by other processes",
        ),
        ("run -- @/none", 1, "none"),
        ("run --disk @/good.raw", 2, "required"),
    ] {
        let (ended, out, complaint) = ran(&mut plimsoll(&folder, line));
        assert!(!out.contains("\n-"), "QEMU was started by {line}: {out}");
        // setpriv, where it is, is what does not find the program.
        let failed = ended == Some(code) || (line.ends_with("@/none") && ended > Some(0));
        assert!(failed, "{line}: {ended:?} {complaint}");
        assert!(complaint.contains(reason), "{line}: {complaint}");
    }
}

#[test]
fn run_without_a_disk_only_makes_memory_shared() {
    let folder = images();
    pretender(&folder);
    let (code, out, complaint) = ran(&mut plimsoll(&folder, "run --name web -- @/qemu -name own"));
    assert_eq!((code, &*complaint), (Some(7), ""));
    assert!(out.starts_with("run: web, emulated (TCG: the command line has no -accel kvm), "));
    assert!(!out.contains("vhost-user"), "{out}");
    assert!(
        out.contains(
            "\n-object\nmemory-backend-memfd,id=plimsoll-memory,size=134217728,share=on\n"
        )
    );
}

/// `plimsoll run` with a disk, for a QEMU that ends with 7 when `@/end` is there.
struct Run {
    folder: TempDir,
    child: KilledOnDrop,
}

impl Run {
    /// Of a copy of the program, `@/plimsoll`; what it says goes to `complaints`, or to `@/said`.
    fn new(complaints: Option<File>) -> Self {
        let folder = images();
        let said = || File::create(folder.path().join("said")).unwrap();
        let complaints = complaints.unwrap_or_else(said);
        pretender(&folder);
        let script = format!(
            "#!/bin/sh\n: > {0}/began\nwhile [ ! -e {0}/end ]; do sleep 0.05; done\nexit 7\n",
            folder.path().display()
        );
        fs::write(folder.path().join("qemu"), script).unwrap();
        let program = folder.path().join("plimsoll");
        fs::copy(env!("CARGO_BIN_EXE_plimsoll"), &program).unwrap();
        let line = "run --state @/vm --disk @/good.raw -- @/qemu";
        let mut command = Command::new(program);
        command.args(plimsoll(&folder, line).get_args());
        command.stdout(Stdio::null()).stderr(complaints);
        // A process that another test's thread starts has the copy open for writing until it executes its own program.
        let child = loop {
            match command.spawn() {
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                    thread::sleep(Duration::from_millis(5));
                }
                child => break child.unwrap(),
            }
        };
        Self {
            folder,
            child: KilledOnDrop(child),
        }
    }

    /// Waits for a disk daemon that serves and is not `former`, and for QEMU: a daemon that ends before has not started. Its pid.
    fn server(&mut self, former: Option<u32>) -> u32 {
        let run = self.child.0.id();
        let own = format!("/proc/{run}/task/{run}/children");
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.0.try_wait().unwrap() {
                let said = fs::read_to_string(self.folder.path().join("said"));
                panic!("it does not go on: {status}: {said:?}");
            }
            assert!(begin.elapsed() < Duration::from_secs(60));
            let children = fs::read_to_string(&own).unwrap();
            let mut pids = children
                .split_ascii_whitespace()
                .map(|pid| pid.parse().unwrap());
            let serves = |pid: &u32| {
                let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line.contains("\0serve\0") && Some(*pid) != former
            };
            let [admin, began] =
                ["vm/admin.sock", "began"].map(|name| self.folder.path().join(name));
            let answers = || began.exists() && UnixStream::connect(&admin).is_ok();
            if let Some(pid) = pids.find(serves).filter(|_| answers()) {
                return pid;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills the disk daemon, waits for the next one, and ends QEMU; the exit code.
    fn outlives_its_server(mut self) -> Option<i32> {
        let first = self.server(None);
        let killed = Command::new("kill")
            .args(["-KILL", &first.to_string()])
            .status();
        assert!(killed.unwrap().success());
        self.server(Some(first));
        File::create(self.folder.path().join("end")).unwrap();
        self.child.0.wait().unwrap().code()
    }
}

#[test]
fn run_starts_its_disk_daemon_again_also_after_an_upgrade() {
    let mut run = Run::new(None);
    run.server(None);
    let program = run.folder.path().join("plimsoll");
    let new = run.folder.path().join("new");
    fs::write(&new, "another version").unwrap();
    fs::rename(new, program).unwrap();
    assert_eq!(run.outlives_its_server(), Some(7));
}

#[test]
fn run_goes_on_if_nobody_can_read_what_it_says() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    assert_eq!(Run::new(Some(full)).outlives_its_server(), Some(7));
}
