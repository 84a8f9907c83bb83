//! A place for a daemon, guests for it to find, and waiting for both.

use std::any::type_name;
use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_protocol::client::Client;
use plimsoll_protocol::decision::{Decision, State};
use plimsoll_protocol::vm::{HostView, VmSummary};
use plimsoll_skip::{Lack, guests_wanted, skip};
use plimsoll_vm::{ConsoleEvent, Guest, GuestConfig, GuestImage, VmError};

/// Longest wait for anything that must come; guests here are emulated, and machines busy.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;
/// The program that serves disks, and that the daemon traces with.
pub const PLIMSOLL: &str = env!("CARGO_BIN_EXE_plimsoll");

/// Time between two looks at something that tells of no change.
const POLL: Duration = Duration::from_millis(100);
/// Says that a test runs in a process table of its own.
const ALONE: &str = "PLIMSOLL_TEST_ALONE";

static TURN: Mutex<()> = Mutex::new(());

/// Runs `body`, the whole of a test, in a process table of its own: this program is run again for that test alone.
pub fn alone<F: FnOnce()>(body: F) {
    if std::env::var_os(ALONE).is_some() {
        body();
        return;
    }
    if !guests_wanted() {
        return;
    }
    // A test that failed leaves nothing behind that the next one minds.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(why) = ground() {
        skip(Lack::Live, format_args!("{why}"));
        return;
    }
    // As daemon_live::MODULE::TEST::{{closure}}.
    let name = type_name::<F>();
    let name = name.strip_suffix("::{{closure}}").unwrap_or(name);
    let name = name.split_once("::").map_or(name, |(_, name)| name);
    let output = own_processes()
        .arg(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = said(&output);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{name}: {}\n{said}",
        output.status
    );
    print!("{said}");
}

/// What begins a process table that ends with the first process in it.
fn own_processes() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    command
}

/// Whether a daemon and guests can run here, or why not.
fn ground() -> Result<(), String> {
    for (program, option) in [("qemu-system-x86_64", "--version"), ("mke2fs", "-V")] {
        let mut command = Command::new(program);
        command
            .arg(option)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
            .status()
            .map_err(|error| format!("{program}: {error}"))?;
    }
    if fs::metadata("/proc/self").is_ok_and(|this| this.uid() != 0) {
        return Err("only root may trace a VM".into());
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().count() > 1 {
        return Err("this host swaps, so its VMs are not traced".into());
    }
    let own = own_processes().arg("true").output();
    if !own.is_ok_and(|output| output.status.success()) {
        return Err("no process table of one's own (unshare --pid)".into());
    }
    GuestImage::for_guest(&with_balloon("image", 192, "")).map_err(|error| error.to_string())?;
    assert!(
        plimsolld().exists(),
        "{} is not built: cargo build -p plimsoll-daemon, with the profile of this test",
        plimsolld().display()
    );
    Ok(())
}

/// The daemon under test: it is built beside `plimsoll`.
pub fn plimsolld() -> PathBuf {
    Path::new(PLIMSOLL).with_file_name("plimsolld")
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// Waits until `is` gives something; `what` is told if it never does.
pub fn wait<T>(what: &str, mut is: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = is() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited for this in vain: {what}");
        thread::sleep(POLL);
    }
}

/// Sends a process a signal, by its name.
pub fn signal(pid: u32, name: &str) {
    let mut kill = Command::new("kill");
    let sent = kill.args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(sent.success(), "{name} to {pid}");
}

/// Whether a process has ended, even if nobody has heard of it yet.
pub fn has_ended(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_none_or(|(_, fields)| fields.trim_start().starts_with('Z'))
}

/// Where daemons run, one after the other: configuration, socket, history and log.
pub struct Place {
    folder: tempfile::TempDir,
    /// Daemons started here.
    started: Cell<u32>,
}

impl Place {
    pub fn new() -> Self {
        Self {
            folder: tempfile::Builder::new()
                .prefix("plimsolld-")
                .tempdir()
                .unwrap(),
            started: Cell::new(0),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the configuration: short times, and what `keys` say in their place or beside.
    pub fn configure(&self, keys: &str) {
        let folder = self.folder.path().display();
        let common = format!(
            "turn_interval = \"1s\"\n\
             [policy]\ncooldown = \"1h\"\n\
             [check]\nafter = \"3s\"\n\
             [trace]\nperiod = \"1s\"\nbudget = \"20%\"\nwindow = \"1m\"\n\
             [history]\nfile = \"{folder}/history.redb\"\n\
             [serve]\nsocket = \"{folder}/socket\"\nread_only_socket = \"none\"\n"
        );
        let more = self.path("plimsoll.toml.d");
        fs::create_dir_all(&more).unwrap();
        fs::write(self.path("plimsoll.toml"), common).unwrap();
        fs::write(more.join("test.toml"), keys).unwrap();
    }

    /// `plimsolld` with this place's configuration.
    fn command(&self) -> Command {
        let mut command = Command::new(plimsolld());
        command.arg("--config").arg(self.path("plimsoll.toml"));
        command.stdin(Stdio::null());
        command
    }

    /// Configures and starts a daemon, and waits for its first turn.
    pub fn start(&self, keys: &str) -> Daemon<'_> {
        self.configure(keys);
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.path("log"))
            .unwrap();
        self.started.set(self.started.get() + 1);
        writeln!(&log, "--- daemon {}: {keys:?}", self.started.get()).unwrap();
        let log_from = log.metadata().unwrap().len();
        let mut command = self.command();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let mut daemon = Daemon {
            place: self,
            child: command.spawn().unwrap(),
            log_from: usize::try_from(log_from).unwrap(),
        };
        wait("the daemon's first turn", || {
            let ended = daemon.child.try_wait().unwrap();
            assert!(ended.is_none(), "the daemon ended: {ended:?}");
            let client = Client::connect(&self.path("socket")).ok()?;
            client.host().ok().filter(|host| host.turn > 0)
        });
        daemon
    }

    /// Runs a daemon that must end by itself with code 1, and returns what it said.
    pub fn refused(&self) -> String {
        let output = self.command().output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        said(&output)
    }

    pub fn log(&self) -> String {
        let log = fs::read(self.path("log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the daemons' log:\n{}", self.log());
        }
    }
}

/// A daemon that runs; dropped, it is killed.
pub struct Daemon<'a> {
    place: &'a Place,
    child: Child,
    /// Where in the log its part begins.
    log_from: usize,
}

impl Daemon<'_> {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.place.path("socket")).unwrap()
    }

    /// The host as it is told now. All memory is accounted for, whatever happens.
    pub fn host(&self) -> HostView {
        let host = self.client().host().unwrap();
        let memory = &host.memory;
        let held = memory.vms_direct_bytes + memory.vms_cache_bytes + memory.store_bytes;
        assert_eq!(held + memory.spare_bytes, memory.divided_bytes, "{host:#?}");
        host
    }

    pub fn vm(&self, name: &str) -> VmSummary {
        let host = self.host();
        let found = host.vms.iter().find(|vm| vm.vm == name);
        found
            .unwrap_or_else(|| panic!("no VM {name}: {host:#?}"))
            .clone()
    }

    /// Waits until the host is as it should be.
    pub fn until(&self, what: &str, is: impl Fn(&HostView) -> bool) -> HostView {
        let last = RefCell::new(None);
        let seen = Seen(&last);
        let found = wait(what, || {
            let host = self.host();
            let found = is(&host).then(|| host.clone());
            *last.borrow_mut() = Some(host);
            found
        });
        drop(seen);
        found
    }

    /// Waits until the newest decision is as it should be.
    pub fn until_decision(&self, what: &str, is: impl Fn(&Decision) -> bool) -> Decision {
        let last = RefCell::new(None);
        let seen = Seen(&last);
        let found = wait(what, || {
            self.host();
            let newest = self.decisions().into_iter().next();
            let found = newest.clone().filter(&is);
            *last.borrow_mut() = newest;
            found
        });
        drop(seen);
        found
    }

    /// Waits until the newest decision has this state.
    pub fn until_state(&self, state: State) -> Decision {
        self.until_decision(&format!("a decision that is {state:?}"), |decision| {
            decision.state == state
        })
    }

    /// All decisions, newest first.
    pub fn decisions(&self) -> Vec<Decision> {
        self.client().decisions(None, None, None).unwrap()
    }

    /// Waits until so many more turns have ended.
    pub fn pass_turns(&self, turns: u64) -> HostView {
        let from = self.host().turn;
        self.until("turns", |host| host.turn >= from + turns)
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        self.place.log().split_off(self.log_from)
    }

    /// Waits until it has logged `text`.
    pub fn until_logged(&self, text: &str) {
        wait(text, || self.log().contains(text).then_some(()));
    }

    /// What it answers to `GET path`, head and all.
    pub fn get(&self, path: &str) -> String {
        exchange(
            UnixStream::connect(self.place.path("socket")).unwrap(),
            path,
        )
    }

    /// Sends a signal, waits for its end, and says how that was and how long it took.
    pub fn end_by(mut self, name: &str) -> (ExitStatus, Duration) {
        let from = Instant::now();
        signal(self.pid(), name);
        let status = wait("the daemon's end", || self.child.try_wait().unwrap());
        (status, from.elapsed())
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let host = Client::connect(&self.place.path("socket")).and_then(|client| client.host());
            eprintln!("the host, as the daemon says: {host:#?}");
        }
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tells what was last seen if the wait for it fails.
struct Seen<'a, T: std::fmt::Debug>(&'a RefCell<Option<T>>);

impl<T: std::fmt::Debug> Drop for Seen<'_, T> {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("last seen: {:#?}", self.0.borrow());
        }
    }
}

/// An HTTP request over TCP; the answer, head and all.
pub fn get_tcp(address: &str, path: &str) -> std::io::Result<String> {
    Ok(exchange(TcpStream::connect(address)?, path))
}

fn exchange(mut stream: impl std::io::Read + std::io::Write, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// A guest with a balloon.
pub fn with_balloon(name: &str, memory_mib: u64, workload: &str) -> GuestConfig {
    GuestConfig {
        memory_mib,
        balloon: true,
        ..GuestConfig::new(name, workload)
    }
}

/// A guest that runs its workload.
pub struct Machine {
    pub guest: Guest,
    told: Vec<(Instant, ConsoleEvent)>,
}

impl Machine {
    /// Boots guests together, and waits until the array of each is populated.
    pub fn boot<const N: usize>(configs: [GuestConfig; N]) -> [Self; N] {
        let mut machines = configs.map(|config| {
            let image = GuestImage::for_guest(&config).unwrap();
            Self::start(&image, &config)
        });
        for machine in &mut machines {
            machine.until_populated();
        }
        machines
    }

    pub fn start(image: &GuestImage, config: &GuestConfig) -> Self {
        Self {
            guest: Guest::start(image, config).unwrap(),
            told: Vec::new(),
        }
    }

    pub fn until_populated(&mut self) {
        let populated = |event: &ConsoleEvent| matches!(event, ConsoleEvent::Populated { .. });
        self.guest.wait_for(PATIENCE, populated).unwrap();
    }

    /// Gives it another size, as somebody did before the daemon came.
    pub fn balloon_to(&mut self, mib: u64) {
        let mut qmp = self.guest.qmp().unwrap();
        qmp.set_balloon(mib * MIB).unwrap();
        wait("the balloon", || {
            (qmp.balloon_actual_bytes().unwrap() == mib * MIB).then_some(())
        });
    }

    /// What it told since its array was populated, with the time at which it came.
    pub fn told(&mut self) -> &[(Instant, ConsoleEvent)] {
        loop {
            match self.guest.next_line(Duration::ZERO) {
                Ok(Some(line)) => self.told.extend(line.event.map(|event| (line.at, event))),
                // What was told before its end stands.
                Ok(None) | Err(VmError::GuestEnded { .. }) => return &self.told,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Waits until it goes on with its work; fails if it found a page wrong.
    pub fn assert_goes_on(&mut self) {
        let from = Instant::now();
        wait("a guest that goes on", || {
            let rounds = self.told().iter().filter(|(at, event)| {
                *at > from
                    && matches!(
                        event,
                        ConsoleEvent::Round { .. } | ConsoleEvent::Result { .. }
                    )
            });
            (rounds.count() >= 3).then_some(())
        });
        self.assert_sound();
    }

    /// Waits until its workload has ended and read every page once more; fails if one was wrong.
    pub fn assert_ends_sound(&mut self) {
        wait("the end of a guest's work", || {
            self.told()
                .iter()
                .any(|(_, event)| matches!(event, ConsoleEvent::Done { .. }))
                .then_some(())
        });
        self.assert_sound();
    }

    /// Fails if it found a page wrong, or gave up.
    pub fn assert_sound(&mut self) {
        let wrong = self.told().iter().find(|(_, event)| match event {
            ConsoleEvent::Mismatch { .. } | ConsoleEvent::Error { .. } => true,
            ConsoleEvent::Round { mismatches, .. } | ConsoleEvent::Done { mismatches, .. } => {
                *mismatches > 0
            }
            ConsoleEvent::Result { fields, .. } => fields
                .get("mismatches")
                .is_some_and(|mismatches| mismatches != "0"),
            _ => false,
        });
        assert_eq!(wrong, None);
    }
}
