//! Guests and tracers, each a process of its own, and what can be read off them from outside.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

use plimsoll_flow::Accelerator;
use plimsoll_rig::{
    AcceleratorChoice, GuestConfig, GuestImage, PATIENCE, Subject, cpu_time, has_ended, host,
    median, send, wait_for,
};
use plimsoll_skip::{Lack, guests_wanted, skip};
use plimsoll_vm::detect;
use rustix::process::Signal;
use serde_json::Value;

/// Pages in a MiB.
pub const MIB: u64 = 256;
/// The program under test.
pub const PLIMSOLL: &str = env!("CARGO_BIN_EXE_plimsoll");

/// Traces every access that misses the hot set, whatever it costs.
pub const EVERYTHING: &str = "--rate 1/1 --rate-rule fixed --budget none";

/// A machine on which guests can be traced.
pub struct Ground {
    pub image: GuestImage,
    accelerator: AcceleratorChoice,
    _turn: host::Turn,
}

/// Waits for this test's turn, with the machine for itself; `None` after saying why there is none here.
pub fn ground() -> Option<Ground> {
    ground_of(host::turn)
}

/// The same, and nothing of ours runs beside it.
pub fn quiet_ground() -> Option<Ground> {
    ground_of(host::quiet_turn)
}

/// Waits for this test's turn, beside at most one other test; `None` after saying why there is none here. For tests that
/// assert no times, costs or rates.
pub fn shared_ground() -> Option<Ground> {
    ground_of(host::shared_turn)
}

fn ground_of(begin: fn() -> host::Turn) -> Option<Ground> {
    if !guests_wanted() {
        return None;
    }
    let turn = begin();
    let image = host::installed(&[host::QEMU])
        .and_then(|()| host::can_trace())
        .and_then(|()| GuestImage::locate().map_err(|error| error.to_string()));
    let skip_live = |why: &String| skip(Lack::Live, format_args!("{why}"));
    let image = image.inspect_err(skip_live).ok()?;
    let accelerator = match detect().accelerator {
        Accelerator::Kvm => AcceleratorChoice::Kvm,
        Accelerator::Tcg => AcceleratorChoice::Tcg,
    };
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
        Subject::boot(&self.image, config).unwrap()
    }

    /// QEMU's word for what runs its instructions.
    pub fn accelerator(&self) -> &'static str {
        match self.accelerator {
            AcceleratorChoice::Kvm => "kvm",
            _ => "tcg",
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
    /// What it wrote to its standard error, once that is closed.
    complaint: Arc<OnceLock<String>>,
}

/// What a run of it came to.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// The lines not taken before.
    pub lines: Vec<Line>,
    pub complaint: String,
}

impl Outcome {
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

/// The words of `options`, with the backend of traps unless they name one.
pub fn with_backend(options: &str) -> impl Iterator<Item = &str> {
    let default = (!options.contains("--backend")).then_some(["--backend", "trap"]);
    let default = default.into_iter().flatten();
    default.chain(options.split_ascii_whitespace())
}

impl Attach {
    /// Runs `plimsoll attach VM -o json` with `options`, words between blanks; by traps, unless they name a backend.
    pub fn start(vm: &str, options: &str) -> Self {
        let mut command = Command::new(PLIMSOLL);
        command.args(["attach", vm, "-o", "json"]);
        Self::spawn(command.args(with_backend(options)))
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
        let complaint = Arc::new(OnceLock::new());
        let kept = Arc::clone(&complaint);
        thread::spawn(move || {
            let mut text = Vec::new();
            // Part of it is better than none; the text must be set, somebody may wait for it.
            let _ = errors.read_to_end(&mut text);
            kept.set(String::from_utf8_lossy(&text).into_owned())
                .unwrap();
        });
        Self {
            child,
            lines,
            complaint,
        }
    }

    /// The next line.
    pub fn next(&self) -> Line {
        let line = self.lines.recv_timeout(PATIENCE);
        line.unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => panic!("no further line"),
            RecvTimeoutError::Disconnected => panic!("no further line: {}", self.complaint.wait()),
        })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process that it runs as a child, if any.
    pub fn child(&self) -> Option<u32> {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }

    /// Takes as many lines as that; beside them the share of one processor that the tracer used meanwhile.
    pub fn lines_and_share(&self, count: usize) -> (Vec<Line>, f64) {
        let (from, before) = (Instant::now(), cpu_time(self.pid()).unwrap());
        let lines = (0..count).map(|_| self.next()).collect();
        let used = cpu_time(self.pid()).unwrap() - before;
        (lines, used.as_secs_f64() / from.elapsed().as_secs_f64())
    }

    /// What a tracer costs on this host now however little it traces, in periods of a second: the median of its overheads, and
    /// the share of one processor that it uses. A busy host or a slow one takes several times as long for both as an idle one.
    pub fn least_cost(vm: &str, options: &str) -> (f64, f64) {
        let tracer = Self::start(vm, &format!("{options} --budget 0.1% --period 1s"));
        for _ in 0..2 {
            tracer.next();
        }
        let (lines, share) = tracer.lines_and_share(5);
        tracer.interrupt();
        tracer.end().assert_quiet_success();
        let ratios = lines.iter().map(|line| line.number("overhead_ratio"));
        (median(ratios), share)
    }

    /// Takes the lines that have come.
    pub fn lines_so_far(&self) -> Vec<Line> {
        self.lines.try_iter().collect()
    }

    /// Whether the run has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Presses Ctrl-C.
    pub fn interrupt(&self) {
        send(self.child.id(), Signal::INT).unwrap();
    }

    /// Waits until the run has ended by itself.
    pub fn end(mut self) -> Outcome {
        let lines: Vec<Line> = self.lines.iter().collect();
        let status = wait_for("the end of attach", PATIENCE, || {
            self.child.try_wait().unwrap()
        });
        Outcome {
            code: status.code(),
            signal: status.signal(),
            lines,
            complaint: self.complaint.wait().clone(),
        }
    }
}

/// Waits until a process has ended, even if its parent has not waited for it.
pub fn until_ended(pid: u32) {
    wait_for("the end of a process", PATIENCE, || {
        has_ended(pid).then_some(())
    });
}

impl Drop for Attach {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Boots a guest with `ram` for arguments of machine and RAM, behind the words of `prefix` (as `setpriv ...`).
pub fn boot_with(ground: &Ground, prefix: &[&str], ram: &[&str], workload: &str) -> Subject {
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
    let config = GuestConfig {
        qmp: false,
        ram: Some(words(ram)),
        prefix: words(prefix),
        ..ground.guest("bare", workload)
    };
    // Where any user can read kernel and initrd; once it has booted, it needs neither.
    let folder = tempfile::tempdir().unwrap();
    let image = ground.image.public_copy(folder.path()).unwrap();
    Subject::boot(&image, &config).unwrap()
}

/// Sets a file's permissions.
pub fn make_readable(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}
