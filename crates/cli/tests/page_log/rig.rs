//! Machines with the plugin: started, recorded, heard to their end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use plimsoll_pagelog::log::LogReader;
use plimsoll_pagelog::record::Record;
use plimsoll_pagelog::{Description, RecordSource as _};
use plimsoll_rig::{GuestImage, host, send};
use plimsoll_skip::{Lack, guests_wanted, skip};
use rustix::process::Signal;

/// The program under test.
pub const PLIMSOLL: &str = env!("CARGO_BIN_EXE_plimsoll");
/// QEMU 10, beside the system's own, in the folder of the guests' image.
const QEMU_10: &str = "qemu-10";
/// Longest run of a guest, in s: on a busy machine they are slow.
const PATIENCE_S: &str = "400";

/// A QEMU, and the interface of its plugins.
pub struct Qemu {
    program: PathBuf,
    build: &'static str,
    pub api: u32,
}

impl Qemu {
    pub fn of_the_system() -> Self {
        Self {
            program: "qemu-system-x86_64".into(),
            build: "7.2",
            api: 1,
        }
    }
}

/// What a machine is to be.
pub struct Machine {
    pub memory_mib: u64,
    pub vcpus: u32,
    /// Words of guest/workload/README.md without their prefix.
    pub workload: &'static str,
    /// Arguments for QEMU beside ours.
    pub extra: &'static [&'static str],
}

/// A place where guests are emulated, for one test at a time: guests share its CPUs.
pub struct Ground {
    image: GuestImage,
    _turn: host::Turn,
}

/// Waits for this test's turn; `None` after saying why there is none here.
pub fn ground() -> Option<Ground> {
    if !guests_wanted() {
        return None;
    }
    let turn = host::shared_turn();
    match GuestImage::locate() {
        Ok(image) => Some(Ground { image, _turn: turn }),
        Err(error) => {
            skip(Lack::Live, format_args!("{error}"));
            None
        }
    }
}

/// The QEMUs there are, after saying why one is not.
pub fn each_qemu(ground: &Ground) -> Vec<Qemu> {
    let folder = ground.folder().join(QEMU_10);
    let ten = Qemu {
        program: folder.join("qemu-system-x86_64"),
        build: "10",
        api: 4,
    };
    let mut found = Vec::new();
    for qemu in [Qemu::of_the_system(), ten] {
        let version = Command::new(&qemu.program).arg("--version").output();
        match version {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let is_it = text.contains(&format!("version {}.", qemu.build));
                assert!(is_it, "{}: {text}", qemu.program.display());
                found.push(qemu);
            }
            Err(error) => {
                let reason = fs::read_to_string(folder.join("absent"));
                let reason = reason.unwrap_or_else(|_| error.to_string());
                skip(
                    Lack::Live,
                    format_args!("QEMU {}: {}", qemu.build, reason.trim()),
                );
            }
        }
    }
    found
}

impl Ground {
    /// The folder of the image and of what `./dev setup` makes beside it.
    fn folder(&self) -> &Path {
        self.image.kernel.parent().expect("a file in a folder")
    }

    /// The plugin of a QEMU.
    pub fn plugin(&self, qemu: &Qemu) -> String {
        let name = format!("plimsoll-pagelog-{}.so", qemu.build);
        let plugin = self.folder().join(name);
        plugin.to_str().expect("a path in UTF-8").to_owned()
    }

    /// QEMU and its arguments for a machine that runs until its workload ends.
    fn command_line(&self, qemu: &Qemu, machine: &Machine) -> Vec<String> {
        let mut kernel_line =
            "console=ttyS0 quiet panic=-1 no_timer_check nokaslr cryptomgr.notests transparent_hugepage=never".to_owned();
        if machine.vcpus > 1 {
            kernel_line.push_str(" maxcpus=1");
        }
        for word in machine.workload.split(' ') {
            kernel_line.push_str(&format!(" plimsoll.{word}"));
        }
        let memory = format!("{}M", machine.memory_mib);
        let vcpus = machine.vcpus.to_string();
        let path = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
        let (kernel, initrd) = (path(&self.image.kernel), path(&self.image.initrd));
        let program = path(&qemu.program);
        let words = [
            &program,
            "-accel",
            "tcg",
            "-machine",
            "q35",
            "-cpu",
            "qemu64,-cx16",
            "-m",
            &memory,
            "-smp",
            &vcpus,
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
            "-display",
            "none",
            "-serial",
            "chardev:console",
            "-chardev",
            "stdio,id=console,signal=off",
            "-kernel",
            &kernel,
            "-initrd",
            &initrd,
            "-append",
            &kernel_line,
        ];
        let words = words.iter().chain(machine.extra);
        words.map(|word| (*word).to_owned()).collect()
    }

    /// Records a machine from its start to its end in a file; returns what was said.
    pub fn record_in(&self, log: &Path, qemu: &Qemu, machine: &Machine, options: &str) -> String {
        let mut command = with_patience(PLIMSOLL);
        command.arg("run").arg("--page-log").arg(log);
        command.arg("--plugin").arg(self.plugin(qemu));
        command.args(options.split(' ')).arg("--");
        command.args(self.command_line(qemu, machine));
        let (code, out, errors) = Guest::start(&mut command).end();
        assert_eq!(code, Some(0), "{out}{errors}");
        assert!(out.contains("plimsoll: done "), "{out}");
        out
    }

    /// Records a machine from its start to its end.
    pub fn record(&self, qemu: &Qemu, machine: &Machine, options: &str) -> Run {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let out = self.record_in(&log, qemu, machine, options);
        let mut reader = LogReader::open(&log).unwrap();
        let description = reader.description().clone();
        let (mut records, mut batch) = (Vec::new(), Vec::new());
        while reader.next_batch(&mut batch).unwrap() {
            records.append(&mut batch);
        }
        assert_eq!(reader.totals().map(|totals| totals.lost), Some(0));
        let told = format!("page log: {} records (", records.len());
        assert!(out.contains(&told), "{told}: {out}");
        Run {
            description,
            records,
            out,
        }
    }

    /// Starts a machine with `arguments` beside its own.
    pub fn start(&self, qemu: &Qemu, machine: &Machine, arguments: &[&str]) -> Guest {
        let line = self.command_line(qemu, machine);
        Guest::start(with_patience(&line[0]).args(&line[1..]).args(arguments))
    }

    /// Exit code and complaint of `plimsoll run` with options that it refuses.
    pub fn refused(&self, qemu: &Qemu, options: &str, arguments: &str) -> (Option<i32>, String) {
        let mut command = with_patience(PLIMSOLL);
        command.arg("run").args(options.split(' ')).arg("--");
        command
            .arg(&qemu.program)
            .args(arguments.split_ascii_whitespace());
        let (code, _, errors) = Guest::start(&mut command).end();
        (code, errors)
    }
}

/// A command that is ended if it takes too long.
fn with_patience(program: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--foreground", PATIENCE_S, program]);
    command
}

/// A machine that runs. Dropped, it is ended.
pub struct Guest(Option<Child>);

impl Guest {
    fn start(command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        Self(Some(child.unwrap()))
    }

    /// Waits for its end: exit code, output, complaints.
    pub fn end(mut self) -> (Option<i32>, String, String) {
        let child = self.0.take().expect("not ended before");
        let output = child.wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.code(),
            text(&output.stdout),
            text(&output.stderr),
        )
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // It ends its own child then, which a SIGKILL would leave. It may be gone already.
            let _ = send(child.id(), Signal::TERM);
            let _ = child.wait();
        }
    }
}

/// A machine that was recorded.
pub struct Run {
    pub description: Description,
    pub records: Vec<Record>,
    out: String,
}

impl Run {
    /// A number that the guest told: the value of a key of an event.
    pub fn told(&self, event: &str, key: &str) -> u64 {
        let begin = format!("plimsoll: {event} ");
        let line = self.out.lines().find_map(|line| line.strip_prefix(&begin));
        let line = line.unwrap_or_else(|| panic!("no {event} in {}", self.out));
        let values = line
            .split_ascii_whitespace()
            .filter_map(|word| word.split_once('='));
        let value = values
            .filter(|(name, _)| *name == key)
            .map(|(_, value)| value)
            .next();
        value
            .and_then(|value| value.parse().ok())
            .unwrap_or_else(|| panic!("no {key} in {line}"))
    }
}
