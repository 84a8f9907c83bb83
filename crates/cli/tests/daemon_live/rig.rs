//! A place for a daemon, guests for it to find, and waiting for both.

use std::any::type_name;
use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_protocol::client::Client;
use plimsoll_protocol::decision::{Decision, State};
use plimsoll_protocol::vm::{HostView, VmSummary};
use plimsoll_rig::{GuestConfig, GuestImage, PATIENCE, Server, Subject, host, wait_for};
use plimsoll_skip::{Lack, guests_wanted, skip};
use rustix::process::Signal;

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;
/// The program that serves disks, and that the daemon traces with.
pub const PLIMSOLL: &str = env!("CARGO_BIN_EXE_plimsoll");

/// Says that a test runs in a process table of its own.
const ALONE: &str = "PLIMSOLL_TEST_ALONE";

/// Runs `body`, the whole of a test, in a process table of its own: this program is run again for that test alone.
pub fn alone<F: FnOnce()>(body: F) {
    apart(body, host::turn);
}

/// The same beside at most one other test: for tests that assert no times, and leave most of the CPUs to the other.
pub fn beside_another<F: FnOnce()>(body: F) {
    apart(body, host::shared_turn);
}

fn apart<F: FnOnce()>(body: F, begin: fn() -> host::Turn) {
    if std::env::var_os(ALONE).is_some() {
        body();
        return;
    }
    if !guests_wanted() {
        return;
    }
    let _turn = begin();
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
    host::installed(&[host::QEMU, host::MKE2FS])?;
    host::can_trace()?;
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

/// As [`wait_for`], for what must come at all.
pub fn wait<T>(what: &str, is: impl FnMut() -> Option<T>) -> T {
    wait_for(what, PATIENCE, is)
}

/// Sends a process a signal.
pub fn signal(pid: u32, signal: Signal) {
    plimsoll_rig::send(pid, signal).unwrap();
}

/// Where daemons run, one after the other: configuration, socket, history and log.
pub struct DaemonDirectory {
    folder: tempfile::TempDir,
    /// The host's name, if it is not this machine's.
    host: Option<&'static str>,
    /// Daemons started here.
    started: Cell<u32>,
}

impl DaemonDirectory {
    pub fn new() -> Self {
        Self {
            folder: tempfile::Builder::new()
                .prefix("plimsolld-")
                .tempdir()
                .unwrap(),
            host: None,
            started: Cell::new(0),
        }
    }

    /// The same on a host of this name.
    pub fn named(host: &'static str) -> Self {
        let mut directory = Self::new();
        directory.host = Some(host);
        directory
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
             [trace]\nbackend = \"trap\"\nperiod = \"1s\"\nbudget = \"20%\"\nwindow = \"1m\"\n\
             [guard]\non_exit = \"keep\"\n\
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
        let mut command = match self.host {
            None => Command::new(plimsolld()),
            Some(host) => {
                let mut command = Command::new("unshare");
                let script = r#"hostname "$0" && exec "$@""#;
                command.args(["--uts", "sh", "-c", script, host]);
                command.arg(plimsolld());
                command
            }
        };
        command.arg("--config").arg(self.path("plimsoll.toml"));
        command
    }

    /// Configures and starts a daemon, and waits for its first turn.
    pub fn start(&self, keys: &str) -> Daemon<'_> {
        self.configure(keys);
        self.started.set(self.started.get() + 1);
        let log = self.path("log");
        let mut file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .unwrap();
        writeln!(file, "--- daemon {}: {keys:?}", self.started.get()).unwrap();
        let server = Server::start(&mut self.command(), &log, PATIENCE, |_| {
            let host = Client::connect(&self.path("socket")).and_then(|client| client.host());
            host.is_ok_and(|host| host.turn > 0)
        });
        Daemon {
            place: self,
            server: server.unwrap(),
        }
    }

    /// Runs a daemon that must end by itself with code 1, and returns what it said.
    pub fn refused(&self) -> String {
        let output = self.command().output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        said(&output)
    }

    /// Gives VMs back what they had, as the unit does after the daemon's end, which must end with `code`, and returns what was
    /// said.
    pub fn give_back(&self, code: i32) -> String {
        let output = self.command().arg("--give-back").output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        said(&output)
    }

    pub fn log(&self) -> String {
        let log = fs::read(self.path("log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }
}

impl Drop for DaemonDirectory {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the daemons' log:\n{}", self.log());
        }
    }
}

/// A daemon that runs; dropped, it is killed.
pub struct Daemon<'a> {
    place: &'a DaemonDirectory,
    server: Server,
}

impl Daemon<'_> {
    pub fn pid(&self) -> u32 {
        self.server.pid()
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
        let seen = LastValue(&last);
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
        let seen = LastValue(&last);
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
        self.server.log()
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
    pub fn end_by(mut self, signal: Signal) -> (ExitStatus, Duration) {
        let from = Instant::now();
        let status = self.server.end_by(signal, PATIENCE).unwrap();
        (status, from.elapsed())
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let host = Client::connect(&self.place.path("socket")).and_then(|client| client.host());
            eprintln!("the host, as the daemon says: {host:#?}");
        }
    }
}

/// Tells what was last seen if the wait for it fails.
struct LastValue<'a, T: std::fmt::Debug>(&'a RefCell<Option<T>>);

impl<T: std::fmt::Debug> Drop for LastValue<'_, T> {
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

/// Boots guests together, and waits until the array of each is populated.
pub fn boot<const N: usize>(configs: [GuestConfig; N]) -> [Subject; N] {
    let mut guests = configs.map(|config| start(&config));
    for guest in &mut guests {
        guest.until_populated().unwrap();
    }
    guests
}

/// Starts a guest, which boots meanwhile.
pub fn start(config: &GuestConfig) -> Subject {
    Subject::start(&GuestImage::for_guest(config).unwrap(), config).unwrap()
}

/// Gives a guest another size, as somebody did before the daemon came.
pub fn balloon_to(guest: &mut Subject, mib: u64) {
    let mut qmp = guest.guest.qmp().unwrap();
    qmp.set_balloon(mib * MIB).unwrap();
    wait("the balloon", || {
        (qmp.balloon_actual_bytes().unwrap() == mib * MIB).then_some(())
    });
}
