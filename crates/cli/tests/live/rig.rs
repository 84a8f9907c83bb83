//! Guests and tracers, each a process of its own, and what can be read off them from outside.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plimsoll_skip::{Lack, guests_wanted, skip};
use plimsoll_vm::{
    Accelerator, AcceleratorChoice, ConsoleEvent, Guest, GuestConfig, GuestImage, QemuVm, VmError,
    detect,
};
use serde_json::Value;

/// Longest wait for anything that must come; a guest under TCG on a busy machine boots in 20 s.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Pages in a MiB.
pub const MIB: u64 = 256;
/// The program under test.
pub const PLIMSOLL: &str = env!("CARGO_BIN_EXE_plimsoll");

/// Traces every access that misses the hot set, whatever it costs.
pub const EVERYTHING: &str = "--rate 1/1 --rate-rule fixed --budget none";

static TURN: Mutex<()> = Mutex::new(());
static ACCELERATOR: OnceLock<AcceleratorChoice> = OnceLock::new();

/// A machine on which guests can be traced, for one test at a time: guests share its CPUs.
pub struct Ground {
    pub image: GuestImage,
    accelerator: AcceleratorChoice,
    _turn: MutexGuard<'static, ()>,
}

/// Waits for this test's turn; `None` after saying why there is none here.
pub fn ground() -> Option<Ground> {
    if !guests_wanted() {
        return None;
    }
    let skip_live = |why: String| {
        skip(Lack::Live, format_args!("{why}"));
        None
    };
    // A test that failed leaves nothing behind that the next one minds.
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let qemu = Command::new("qemu-system-x86_64")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if let Err(error) = qemu {
        return skip_live(format!("qemu-system-x86_64: {error}"));
    }
    let image = match GuestImage::locate() {
        Ok(image) => image,
        Err(error) => return skip_live(error.to_string()),
    };
    if fs::metadata("/proc/self").is_ok_and(|this| this.uid() != 0) {
        return skip_live("only root may trace a VM".into());
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().count() > 1 {
        return skip_live("this host swaps, so its VMs are not traced".into());
    }
    let accelerator = *ACCELERATOR.get_or_init(|| match detect(&image).accelerator {
        Accelerator::Kvm => AcceleratorChoice::Kvm,
        Accelerator::Tcg => AcceleratorChoice::Tcg,
    });
    Some(Ground {
        image,
        accelerator,
        _turn: turn,
    })
}

impl Ground {
    /// Describes a guest whose name no other run of these tests gives.
    pub fn guest(&self, name: &str, workload: &str) -> GuestConfig {
        GuestConfig {
            accelerator: self.accelerator,
            ..GuestConfig::new(&format!("{name}-{}", std::process::id()), workload)
        }
    }

    /// Boots a guest of one vCPU and waits until its array is populated.
    pub fn boot(&self, name: &str, workload: &str) -> Subject {
        self.boot_as(&self.guest(name, workload))
    }

    /// Boots a guest and waits until its array is populated.
    pub fn boot_as(&self, config: &GuestConfig) -> Subject {
        let mut guest = Guest::start(&self.image, config).unwrap();
        let populated = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Populated { .. });
        guest.wait_for(PATIENCE, populated).unwrap();
        Subject {
            vm: guest.vm().unwrap(),
            guest,
            told: Vec::new(),
        }
    }

    /// QEMU's word for what runs its instructions.
    pub fn accelerator(&self) -> &'static str {
        match self.accelerator {
            AcceleratorChoice::Kvm => "kvm",
            _ => "tcg",
        }
    }
}

/// A guest that runs its workload.
pub struct Subject {
    pub guest: Guest,
    pub vm: QemuVm,
    told: Vec<(Instant, ConsoleEvent)>,
}

impl Subject {
    pub fn pid(&self) -> String {
        self.vm.pid.to_string()
    }

    /// What the guest told since its array was populated, with the time at which it came.
    pub fn told(&mut self) -> &[(Instant, ConsoleEvent)] {
        // An end is no failure here: what was told before it stands.
        while let Ok(Some(line)) = self.guest.next_line(Duration::ZERO) {
            self.told.extend(line.event.map(|event| (line.at, event)));
        }
        &self.told
    }

    /// Fails if the guest found a page wrong, or gave up.
    pub fn assert_memory_is_sound(&mut self) {
        let wrong = self.told().iter().find(|(_, event)| match event {
            ConsoleEvent::Mismatch { .. } | ConsoleEvent::Error { .. } => true,
            ConsoleEvent::Round { mismatches, .. } | ConsoleEvent::Done { mismatches, .. } => {
                *mismatches > 0
            }
            _ => false,
        });
        assert_eq!(wrong, None);
    }

    /// Fails if the guest does not go on, or found a page wrong.
    pub fn assert_goes_on(&mut self) {
        let from = Instant::now();
        // Of the rounds that come, the first may have ended before.
        self.wait_until(|told| {
            told.iter()
                .filter(|(at, event)| *at > from && matches!(event, ConsoleEvent::Round { .. }))
                .count()
                >= 3
        });
        self.assert_memory_is_sound();
    }

    /// Waits until the workload has ended and read every page once more; fails if one was wrong.
    pub fn assert_ends_with_a_sound_audit(&mut self) {
        self.wait_until(|told| {
            told.iter()
                .any(|(_, event)| matches!(event, ConsoleEvent::Done { .. }))
        });
        self.assert_memory_is_sound();
    }

    /// Fails if a tracer left anything on the VM's RAM.
    pub fn assert_no_trap_is_left(&self) {
        let states = self.vm.ram_states().unwrap();
        assert!(!states.is_empty());
        assert!(states.iter().all(|state| !state.userfaultfd), "{states:?}");
    }

    pub fn footprint(&self) -> Footprint {
        Footprint::of(self.vm.pid)
    }

    /// Waits until nobody traces the VM's process, by ptrace or by traps.
    pub fn wait_until_untraced(&self) {
        let deadline = Instant::now() + PATIENCE;
        let status = format!("/proc/{}/status", self.vm.pid);
        let traced = || {
            let borrowed = !fs::read_to_string(&status)
                .unwrap()
                .contains("TracerPid:\t0\n");
            borrowed
                || self
                    .vm
                    .ram_states()
                    .unwrap()
                    .iter()
                    .any(|state| state.userfaultfd)
        };
        while traced() {
            assert!(
                Instant::now() < deadline,
                "the VM's process is still traced"
            );
        }
    }

    fn wait_until(&mut self, mut enough: impl FnMut(&[(Instant, ConsoleEvent)]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !enough(self.told()) {
            match self.guest.next_line(Duration::from_millis(100)) {
                Ok(line) => self
                    .told
                    .extend(line.and_then(|line| Some((line.at, line.event?)))),
                Err(VmError::GuestEnded { .. }) if enough(&self.told) => return,
                Err(error) => panic!("{error}"),
            }
            assert!(Instant::now() < deadline, "told only {:?}", self.told);
        }
    }
}

/// What of a process a tracer could leave changed.
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
                .map(|(number, path)| (number, fs::read_link(path).unwrap()))
                .collect(),
            threads: numbered("task")
                .map(|(thread, path)| {
                    let status = fs::read_to_string(path.join("status")).unwrap();
                    (thread, state_of(&status))
                })
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

/// A line of `attach -o json` and when it came.
#[derive(Debug)]
pub struct Line {
    pub at: Instant,
    pub json: Value,
}

impl Line {
    /// A number of the line.
    pub fn number(&self, key: &str) -> f64 {
        self.json[key]
            .as_f64()
            .unwrap_or_else(|| panic!("{key} is no number in {}", self.json))
    }

    /// The working set in pages, if one was found.
    pub fn working_set(&self) -> Option<f64> {
        self.json["working_set_pages"].as_f64()
    }

    /// The working set in pages, if more than a bound of it was found.
    pub fn estimate(&self) -> Option<f64> {
        self.working_set()
            .filter(|_| self.json["working_set_bound"] == "estimate")
    }

    pub fn is_final(&self) -> bool {
        self.json["final"] == true
    }
}

/// A running `plimsoll attach -o json`. Dropped, it is killed.
pub struct Attach {
    child: Child,
    lines: mpsc::Receiver<Line>,
    complaint: Option<JoinHandle<String>>,
}

/// What a run of it came to.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    /// The lines not taken before.
    pub lines: Vec<Line>,
    pub complaint: String,
}

impl Ended {
    /// The lines that tell of a period.
    pub fn periods(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| !line.is_final())
    }

    /// The last line.
    pub fn last(&self) -> &Line {
        self.lines.last().expect("at least a final line")
    }

    /// Fails unless the run ended well and without a word.
    pub fn assert_quiet_success(&self) {
        assert_eq!((self.code, &*self.complaint), (Some(0), ""));
        assert!(self.last().is_final(), "{:?}", self.last());
    }
}

impl Attach {
    /// Runs `plimsoll attach VM -o json` with `options`, words between blanks.
    pub fn start(vm: &str, options: &str) -> Self {
        let mut command = Command::new(PLIMSOLL);
        command.args(["attach", vm, "-o", "json"]);
        Self::spawn(command.args(options.split_ascii_whitespace()))
    }

    /// Runs a command that becomes `plimsoll attach -o json`.
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = mpsc::channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || {
            for text in output.lines().map_while(Result::ok) {
                let at = Instant::now();
                let json = serde_json::from_str(&text)
                    .unwrap_or_else(|error| panic!("{error} in line {text:?}"));
                if sender.send(Line { at, json }).is_err() {
                    break;
                }
            }
        });
        let mut errors = child.stderr.take().unwrap();
        let complaint = thread::spawn(move || {
            let mut text = String::new();
            errors.read_to_string(&mut text).unwrap();
            text
        });
        Self {
            child,
            lines,
            complaint: Some(complaint),
        }
    }

    /// The next line.
    pub fn next(&self) -> Line {
        self.lines.recv_timeout(PATIENCE).expect("another line")
    }

    /// The process that it runs as a child, if any.
    pub fn child(&self) -> Option<u32> {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }

    /// Processor time that it has used so far, by the kernel's account.
    pub fn processor_time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // proc(5): utime is field 14, stime 15; the name before them may have blanks.
        let after_name = stat.rsplit_once(") ").unwrap().1;
        let fields: Vec<_> = after_name.split(' ').collect();
        let ticks = [14, 15].map(|field| fields[field - 3].parse::<u64>().unwrap());
        let second = rustix::param::clock_ticks_per_second();
        Duration::from_secs(ticks.iter().sum()) / u32::try_from(second).unwrap()
    }

    /// Takes as many lines as that; beside them the share of one processor that the tracer used meanwhile.
    pub fn lines_and_share(&self, count: usize) -> (Vec<Line>, f64) {
        let (from, before) = (Instant::now(), self.processor_time());
        let lines = (0..count).map(|_| self.next()).collect();
        let used = self.processor_time() - before;
        (lines, used.as_secs_f64() / from.elapsed().as_secs_f64())
    }

    /// Presses Ctrl-C.
    pub fn interrupt(&self) {
        let pid = self.child.id().to_string();
        let sent = Command::new("sh")
            .args(["-c", "kill -INT \"$0\"", &pid])
            .status();
        assert!(sent.unwrap().success());
    }

    /// Waits until the run has ended by itself.
    pub fn end(mut self) -> Ended {
        let lines: Vec<Line> = self.lines.iter().collect();
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "attach does not end");
            thread::sleep(Duration::from_millis(10));
        };
        let complaint = self.complaint.take().map(|reader| reader.join().unwrap());
        Ended {
            code: status.code(),
            lines,
            complaint: complaint.unwrap_or_default(),
        }
    }
}

/// Waits until a process has ended, whether or not its parent has taken note.
pub fn wait_until_ended(pid: u32) {
    let deadline = Instant::now() + PATIENCE;
    let runs = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status"));
        status.is_ok_and(|status| !status.contains("State:\tZ"))
    };
    while runs() {
        assert!(Instant::now() < deadline, "process {pid} goes on");
        thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for Attach {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A guest whose QEMU is started in a way [`GuestConfig`] has no word for. Dropped, it is killed.
pub struct BareGuest {
    child: Child,
    folder: tempfile::TempDir,
}

impl BareGuest {
    /// Runs QEMU with `arguments` for its RAM, behind the words of `prefix` (as `setpriv ...`),
    /// and waits until the array is populated.
    pub fn boot(ground: &Ground, prefix: &[&str], arguments: &[&str], workload: &str) -> Self {
        // Where any user can read kernel and initrd.
        let folder = tempfile::tempdir().unwrap();
        make_readable(folder.path(), 0o755);
        let copy = |from: &Path, name: &str| {
            let path = folder.path().join(name);
            fs::copy(from, &path).unwrap();
            make_readable(&path, 0o644);
            path
        };
        let kernel = copy(&ground.image.kernel, "vmlinuz");
        let initrd = copy(&ground.image.initrd, "initrd");
        let words: String = workload
            .split_ascii_whitespace()
            .map(|word| format!(" plimsoll.{word}"))
            .collect();
        let cpu = if ground.accelerator() == "kvm" {
            "host"
        } else {
            "qemu64,-cx16"
        };
        let mut words_of_command = prefix.iter().chain(&["qemu-system-x86_64"]);
        let mut command = Command::new(words_of_command.next().unwrap());
        command
            .args(words_of_command)
            .args(["-accel", ground.accelerator(), "-cpu", cpu])
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-serial", "chardev:console"])
            .args(["-chardev", "stdio,id=console,signal=off"])
            .arg("-append")
            .arg(format!(
                "console=ttyS0 quiet panic=-1 no_timer_check transparent_hugepage=never{words}"
            ))
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initrd)
            .args(arguments);
        let console = fs::File::create(folder.path().join("console")).unwrap();
        let errors = fs::File::create(folder.path().join("errors")).unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(console)
            .stderr(errors)
            .spawn()
            .unwrap();
        let mut guest = Self { child, folder };
        guest.wait_until(|told| {
            told.iter()
                .any(|event| matches!(event, ConsoleEvent::Populated { .. }))
        });
        guest
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Fails if the guest does not go on, or found a page wrong.
    pub fn assert_goes_on(&mut self) {
        let rounds = |told: &[ConsoleEvent]| {
            let is_round = |event: &&ConsoleEvent| matches!(event, ConsoleEvent::Round { .. });
            told.iter().filter(is_round).count()
        };
        let before = rounds(&self.told());
        self.wait_until(|told| rounds(told) >= before + 3);
        let told = self.told();
        let wrong = told.iter().find(|event| {
            matches!(
                event,
                ConsoleEvent::Round {
                    mismatches: 1..,
                    ..
                }
            ) || matches!(event, ConsoleEvent::Mismatch { .. })
        });
        assert_eq!(wrong, None);
    }

    fn told(&self) -> Vec<ConsoleEvent> {
        let console = fs::read(self.folder.path().join("console")).unwrap();
        let console = String::from_utf8_lossy(&console);
        // A line without its end is still being written.
        let lines = console
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'));
        lines.filter_map(ConsoleEvent::parse).collect()
    }

    fn wait_until(&mut self, mut enough: impl FnMut(&[ConsoleEvent]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !enough(&self.told()) {
            let errors = || fs::read_to_string(self.folder.path().join("errors")).unwrap();
            let ended = self.child.try_wait().unwrap();
            assert_eq!(ended, None, "QEMU ended: {}", errors());
            assert!(Instant::now() < deadline, "told only {:?}", self.told());
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for BareGuest {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sets a file's permissions.
pub fn make_readable(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// The middle value; the upper one of two. Fails without any.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    assert!(!values.is_empty(), "a median of nothing");
    values[values.len() / 2]
}
