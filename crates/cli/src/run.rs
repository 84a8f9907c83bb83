//! `plimsoll run`: QEMU with its disks served by a daemon of ours, which is started before it, restarted when it
//! dies, and ended after it.
//!
//! To the command line of QEMU are added, in this order: memory that others can map, unless it has such; a
//! `vhost-user-blk-pci` device for each disk and one for the control disk. The rest stays as it is. What the daemon
//! keeps is in a folder of the VM's name, so that a daemon started anew, or a second run, finds writes that
//! the first one had acknowledged. With `--page-log` comes the plugin that records an emulated machine's page walks.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_vm::{Accelerator, CommandLine, comma_words, escape_commas};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use plimsoll_observe::page_log::{PageLog, PageLogArgs, Recording};
use plimsoll_output::{bail_usage, stop_flag};
use plimsoll_serve::disk::options::{CacheArgs, DiskSpec, name, name_of};

/// How often processes and signals are looked at.
const TURN: Duration = Duration::from_millis(20);
/// How long a daemon may take until it serves; it may have to write back what a former one left.
const START_MAX: Duration = Duration::from_secs(60);
/// Time before a daemon that died is started again, first and at last.
const RESTART: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// A daemon that served for so long is restarted as if for the first time.
const STEADY: Duration = Duration::from_secs(60);
/// Where sockets and state of VMs are, for root; else a folder of the user's own.
const FOLDER: &str = "/run/plimsoll";
/// What the memory added to QEMU is called.
const MEMORY_ID: &str = "plimsoll-memory";
/// Longest path of a Unix socket.
const SOCKET_PATH_MAX: usize = 107;

/// Run QEMU with memory that can be traced and, optionally, disks with an exclusive cache.
///
/// Everything after -- is QEMU's command line. Exits with QEMU's exit code (128 plus the signal number if a signal
/// ended it).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the VM [default: the first image's, without its extension]
    #[arg(long, value_parser = name)]
    name: Option<String>,
    /// Disk to give to the VM: a raw image or a block device, and read-only, serial=TEXT, queues=N, direct=auto|on|off
    #[arg(long, value_name = "IMAGE[,..]")]
    disk: Vec<DiskSpec>,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    page_log: PageLogArgs,
    /// QEMU and its arguments
    #[arg(last = true, required = true, value_name = "QEMU")]
    qemu: Vec<OsString>,
}

/// Runs the command and returns QEMU's exit code.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for what does not go together, and why the daemon or QEMU cannot be started.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<u8> {
    let mut plan = Plan::new(args)?;
    let page_log = PageLog::prepare(&args.page_log, &args.qemu[0], &plan.line)?;
    let logging = page_log.iter().flat_map(PageLog::arguments);
    plan.added.extend(logging);
    let stop = stop_flag()?;
    let accelerator = accelerator(&plan.line);
    writeln!(
        out,
        "run: {}, {accelerator}, {}",
        plan.name, plan.memory_told
    )?;
    out.flush()?;
    let mut daemon = plan.daemon.as_deref().map(Daemon::start).transpose()?;
    let mut qemu = dying_with_us(&args.qemu[0])
        .args(&args.qemu[1..])
        .args(&plan.added)
        .spawn()
        .with_context(|| format!("cannot run {}", args.qemu[0].display()))?;
    let recording = page_log.map(PageLog::record);
    let mut told = false;
    let status = loop {
        if let Some(status) = qemu.try_wait()? {
            break status;
        }
        if stop.load(Ordering::Relaxed) && !told {
            told = true;
            signal(&qemu, Signal::TERM);
        }
        if let Some(daemon) = &mut daemon {
            daemon.look();
        }
        thread::sleep(TURN);
    };
    let recorded = recording.map(Recording::end);
    if let Some(daemon) = daemon {
        daemon.end()?;
    }
    match recorded {
        Some(Ok(recorded)) => writeln!(out, "{recorded}")?,
        // QEMU has said why it did not start.
        Some(Err(error)) if status.success() => return Err(error),
        Some(Err(error)) => eprintln!("plimsoll run: {error:#}"),
        None => {}
    }
    Ok(code(status))
}

fn code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

fn signal(child: &Child, signal: Signal) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // It is our child and not waited for: the number is its own. That it may be gone is seen next.
        let _ = kill_process(pid, signal);
    }
}

/// A command whose process the kernel ends with ours, where util-linux is there to ask it.
fn dying_with_us(program: &OsString) -> Command {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let setpriv = std::env::split_paths(&folders)
        .map(|folder| folder.join("setpriv"))
        .find(|file| file.is_file());
    match setpriv {
        // It replaces itself by the program, so the process id stays.
        Some(setpriv) => {
            let mut command = Command::new(setpriv);
            command.args(["--pdeathsig", "TERM", "--"]).arg(program);
            command
        }
        None => Command::new(program),
    }
}

/// What is to be started.
struct Plan {
    name: String,
    /// QEMU's own command line, as far as it is understood.
    line: Vec<String>,
    /// Arguments added to it.
    added: Vec<OsString>,
    /// What is told of its memory.
    memory_told: String,
    /// Arguments of the daemon, if there is one.
    daemon: Option<Vec<OsString>>,
}

impl Plan {
    fn new(args: &Args) -> anyhow::Result<Self> {
        let first = args.disk.first().map(|disk| disk.image.as_path());
        let line: Vec<_> = args.qemu[1..]
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        let of_qemu = CommandLine::parse(&line).name;
        let made = || {
            let of_qemu = of_qemu.as_deref().and_then(|text| name(text).ok());
            of_qemu.unwrap_or_else(|| name_of(first))
        };
        let name = args.name.clone().unwrap_or_else(made);
        let has_daemon = !args.disk.is_empty();
        if !has_daemon && !args.cache.arguments().is_empty() {
            bail_usage!("options of a cache need a disk: name one with --disk IMAGE");
        }
        let mut added = Vec::new();
        if of_qemu.is_none() {
            added.extend(["-name".into(), name.clone().into()]);
        }
        let memory = Memory::of(&line)?;
        let memory_told = memory.add_to(&mut added);
        let daemon = if has_daemon {
            args.cache.engine()?;
            Some(daemon_arguments(args, &name, &mut added)?)
        } else {
            None
        };
        Ok(Self {
            name,
            line,
            added,
            memory_told,
            daemon,
        })
    }
}

/// Makes the VM's folder, adds QEMU's devices, and returns what the daemon is to be told.
fn daemon_arguments(
    args: &Args,
    name: &str,
    added: &mut Vec<OsString>,
) -> anyhow::Result<Vec<OsString>> {
    let folder = args.cache.state.clone();
    let folder = folder.unwrap_or_else(|| user_folder().join(name));
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder);
    let folder = made
        .and_then(|()| fs::canonicalize(&folder))
        .with_context(|| {
            format!(
                "cannot create the directory {}: see --state",
                folder.display()
            )
        })?;
    let socket = |name: &str| -> anyhow::Result<String> {
        let path = folder.join(name);
        match path.into_os_string().into_string() {
            Ok(path) if path.len() <= SOCKET_PATH_MAX => Ok(path),
            _ => bail_usage!(
                "sockets in {} would have too long names: see --state",
                folder.display()
            ),
        }
    };
    let mut arguments: Vec<OsString> = ["disk", "serve", "--name", name].map(Into::into).into();
    let mut device = |id: &str, path: &str, queues: Option<u16>| {
        let path = escape_commas(path);
        let queues = queues.map_or(String::new(), |queues| format!(",num-queues={queues}"));
        added.extend([
            "-chardev".into(),
            format!("socket,id=plimsoll-{id},path={path},reconnect=1").into(),
            "-device".into(),
            format!("vhost-user-blk-pci,id=plimsoll-{id}-device,chardev=plimsoll-{id}{queues}")
                .into(),
        ]);
    };
    for (number, disk) in args.disk.iter().enumerate() {
        if disk.socket.is_some() {
            bail_usage!("--disk: socket= goes with `plimsoll disk serve`; here sockets are made");
        }
        let image = fs::canonicalize(&disk.image)
            .with_context(|| format!("image {}", disk.image.display()))?;
        let mut disk = disk.clone();
        disk.image = image;
        let socket = socket(&format!("disk{number}.sock"))?;
        device(&format!("disk{number}"), &socket, disk.queues);
        arguments.extend(["--disk".into(), disk.at(&socket).into()]);
    }
    let control = socket("control.sock")?;
    device("control", &control, Some(1));
    arguments.extend(["--control".into(), control.into()]);
    arguments.extend(["--admin".into(), socket("admin.sock")?.into()]);
    let mut cache = args.cache.clone();
    cache.state = Some(folder);
    arguments.extend(cache.arguments());
    arguments.extend(["--parent".into(), std::process::id().to_string().into()]);
    Ok(arguments)
}

/// Where the folders of VMs are.
fn user_folder() -> PathBuf {
    let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|own| !own.is_empty());
    match own {
        Some(own) if !rustix::process::geteuid().is_root() => PathBuf::from(own).join("plimsoll"),
        _ => PathBuf::from(FOLDER),
    }
}

/// The daemon's process.
struct Daemon<'a> {
    arguments: &'a [OsString],
    state: State,
    /// Time before the next restart.
    wait: Duration,
}

enum State {
    Runs { child: Child, since: Instant },
    Dead { again_at: Instant },
}

impl<'a> Daemon<'a> {
    /// Starts it and waits until it serves.
    fn start(arguments: &'a [OsString]) -> anyhow::Result<Self> {
        let (mut child, stdout) = spawn(arguments)?;
        let (ready, is_ready) = mpsc::sync_channel(1);
        thread::spawn(move || forward(stdout, &ready));
        let begin = Instant::now();
        while is_ready.try_recv().is_err() {
            if let Some(status) = child.try_wait()? {
                anyhow::bail!("the disk daemon does not start ({})", ended(status));
            }
            if begin.elapsed() > START_MAX {
                signal(&child, Signal::TERM);
                child.wait()?;
                anyhow::bail!(
                    "the disk daemon does not serve after {} s",
                    START_MAX.as_secs()
                );
            }
            thread::sleep(TURN);
        }
        let since = Instant::now();
        Ok(Self {
            arguments,
            state: State::Runs { child, since },
            wait: RESTART.0,
        })
    }

    /// Sees to it that it runs. The guest waits meanwhile: QEMU connects again.
    fn look(&mut self) {
        let now = Instant::now();
        match &mut self.state {
            State::Runs { child, since } => {
                let Ok(Some(status)) = child.try_wait() else {
                    return;
                };
                if since.elapsed() > STEADY {
                    self.wait = RESTART.0;
                }
                eprintln!(
                    "plimsoll run: the disk daemon ended ({}); it is started again in {} ms",
                    ended(status),
                    self.wait.as_millis()
                );
                let again_at = now + self.wait;
                self.wait = (self.wait * 2).min(RESTART.1);
                self.state = State::Dead { again_at };
            }
            State::Dead { again_at } if now >= *again_at => match spawn(self.arguments) {
                Ok((child, stdout)) => {
                    let (ready, _) = mpsc::sync_channel(1);
                    thread::spawn(move || forward(stdout, &ready));
                    self.state = State::Runs { child, since: now };
                }
                Err(error) => {
                    eprintln!("plimsoll run: {error:#}");
                    *again_at = now + self.wait;
                    self.wait = (self.wait * 2).min(RESTART.1);
                }
            },
            State::Dead { .. } => {}
        }
    }

    /// Lets it write back and end.
    fn end(self) -> anyhow::Result<()> {
        let State::Runs { mut child, .. } = self.state else {
            anyhow::bail!(
                "the disk daemon has died; delayed writes, if any, are in its state directory"
            );
        };
        signal(&child, Signal::TERM);
        let status = child.wait()?;
        anyhow::ensure!(
            status.success(),
            "the disk daemon did not end well ({})",
            ended(status)
        );
        Ok(())
    }
}

fn spawn(arguments: &[OsString]) -> anyhow::Result<(Child, ChildStdout)> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // Ctrl-C is for QEMU: the daemon ends after it.
        .process_group(0)
        .spawn()
        .context("cannot start the disk daemon")?;
    let stdout = child.stdout.take().context("the daemon has no output")?;
    Ok((child, stdout))
}

/// Passes the daemon's lines on to standard error, and tells when it serves.
fn forward(stdout: impl Read, ready: &mpsc::SyncSender<()>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        eprintln!("{line}");
        if line.starts_with("disk: serving ") {
            // Nobody may wait for it any more.
            let _ = ready.try_send(());
        }
    }
}

fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "for no stated reason".to_owned(),
    }
}

/// What runs the guest's instructions, as QEMU's command line asks.
fn accelerator(line: &[String]) -> &'static str {
    let usable = || {
        let device = fs::File::options().read(true).write(true).open("/dev/kvm");
        device.is_ok()
    };
    match CommandLine::parse(line).accelerators.first() {
        Some(Accelerator::Kvm) if usable() => "KVM",
        Some(Accelerator::Kvm) => "asks for KVM, but /dev/kvm cannot be opened",
        Some(Accelerator::Tcg) => "emulated (TCG)",
        None => "emulated (TCG: the command line has no -accel kvm)",
    }
}

/// The memory of a VM.
#[derive(Debug, PartialEq, Eq)]
enum Memory {
    /// Its command line makes it such that others can map it.
    Shared,
    /// Its command line does not say; so many bytes.
    Plain { bytes: u64 },
}

impl Memory {
    /// Reads QEMU's command line.
    fn of(line: &[String]) -> anyhow::Result<Self> {
        let mut backends: Vec<(String, bool)> = Vec::new();
        let mut used = Vec::new();
        let mut words_left = line.iter().map(String::as_str);
        while let Some(word) = words_left.next() {
            let option = word.strip_prefix("--").or(word.strip_prefix('-'));
            match option {
                Some("object") => backends.extend(backend(words_left.next().unwrap_or_default())),
                Some("machine" | "M") => {
                    let value = comma_words(words_left.next().unwrap_or_default());
                    used.extend(value_of(&value, "memory-backend").map(str::to_owned));
                }
                Some("numa") => {
                    let value = comma_words(words_left.next().unwrap_or_default());
                    used.extend(value_of(&value, "memdev").map(str::to_owned));
                }
                Some("mem-path") => bail_usage!(
                    "-mem-path gives memory that others cannot map: use -object \
                     memory-backend-file,id=ID,size=SIZE,mem-path=PATH,share=on and -machine memory-backend=ID"
                ),
                _ => {}
            }
        }
        for id in &used {
            match backends.iter().find(|(other, _)| other == id) {
                Some((_, true)) => {}
                Some((_, false)) => bail_usage!(
                    "the memory '{id}' cannot be mapped by other processes: it must be a memory-backend-memfd or \
                     memory-backend-file with share=on"
                ),
                None => bail_usage!("there is no -object memory-backend with id={id}"),
            }
        }
        if !used.is_empty() {
            return Ok(Self::Shared);
        }
        let parsed = CommandLine::parse(line);
        let bytes = parsed.memory_bytes.unwrap_or(128 << 20);
        Ok(Self::Plain { bytes })
    }

    /// Adds what is missing, and says what there is then.
    fn add_to(&self, added: &mut Vec<OsString>) -> String {
        match self {
            Self::Shared => "shared memory".to_owned(),
            Self::Plain { bytes } => {
                let object = format!("memory-backend-memfd,id={MEMORY_ID},size={bytes},share=on");
                let machine = format!("memory-backend={MEMORY_ID}");
                added.extend(["-object".into(), object.into()]);
                added.extend(["-machine".into(), machine.into()]);
                let size = plimsoll_protocol::size::ByteSize(*bytes).rounded();
                format!("memory of {size} made shared (memory-backend-memfd)")
            }
        }
    }
}

/// Name of a memory backend, and whether others can map what it gives.
fn backend(text: &str) -> Option<(String, bool)> {
    let (kind, id, share) = if text.starts_with('{') {
        let object: Value = serde_json::from_str(text).ok()?;
        (
            object["qom-type"].as_str()?.to_owned(),
            object["id"].as_str()?.to_owned(),
            object["share"].as_bool(),
        )
    } else {
        let words = comma_words(text);
        let kind = value_of(&words, "qom-type").or(words.first().map(String::as_str))?;
        let share =
            value_of(&words, "share").map(|share| matches!(share, "on" | "yes" | "true" | "y"));
        (kind.to_owned(), value_of(&words, "id")?.to_owned(), share)
    };
    let shared = match kind.as_str() {
        "memory-backend-memfd" | "memory-backend-shm" => share.unwrap_or(true),
        "memory-backend-file" => share.unwrap_or(false),
        _ if kind.starts_with("memory-backend-") => false,
        _ => return None,
    };
    Some((id, shared))
}

fn value_of<'a>(words: &'a [String], key: &str) -> Option<&'a str> {
    let mut pairs = words.iter().filter_map(|word| word.split_once('='));
    // The last one holds, as in QEMU.
    let (_, value) = pairs.rfind(|(name, _)| *name == key)?;
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn memory_that_others_can_map_is_left_alone() {
        for text in [
            "-object memory-backend-memfd,id=m,size=1G -machine q35,memory-backend=m",
            "-object memory-backend-memfd,id=m,size=1G,share=on -M memory-backend=m",
            "-object memory-backend-file,id=a,size=1G,mem-path=/x,share=on -numa node,memdev=a",
            "--machine memory-backend=m --object memory-backend-file,share=off,share=on,id=m,size=1",
            "-object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"m\",\"share\":true} \
             -machine memory-backend=m",
        ] {
            assert_eq!(Memory::of(&line(text)).unwrap(), Memory::Shared, "{text}");
        }
    }

    #[test]
    fn memory_that_others_cannot_map_is_refused_with_what_would_do() {
        for (text, reason) in [
            (
                "-object memory-backend-ram,id=m,size=1G,share=on -machine memory-backend=m",
                "the memory 'm' cannot be mapped by other processes",
            ),
            (
                "-object memory-backend-memfd,id=m,size=1G,share=off -machine memory-backend=m",
                "the memory 'm' cannot be mapped",
            ),
            (
                "-object memory-backend-file,id=m,size=1G,mem-path=/x -numa node,memdev=m",
                "the memory 'm' cannot be mapped",
            ),
            (
                "-machine q35,memory-backend=m",
                "no -object memory-backend with id=m",
            ),
            (
                "-mem-path /dev/hugepages",
                "use -object memory-backend-file",
            ),
        ] {
            let error = Memory::of(&line(text)).unwrap_err();
            assert!(error.to_string().contains(reason), "{text}: {error}");
            assert!(
                error
                    .downcast_ref::<plimsoll_output::exit::UsageError>()
                    .is_some()
            );
        }
    }

    #[test]
    fn plain_memory_is_made_shared_in_its_size() {
        for (text, bytes) in [
            ("-m 512 -machine q35", 512 << 20),
            ("-nodefaults", 128 << 20),
            (
                "-m size=1G,maxmem=4G -object memory-backend-ram,id=hot,size=1G",
                1 << 30,
            ),
        ] {
            let memory = Memory::of(&line(text)).unwrap();
            assert_eq!(memory, Memory::Plain { bytes }, "{text}");
            let mut added = Vec::new();
            memory.add_to(&mut added);
            let added: Vec<_> = added
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect();
            // What is added is what would be left alone.
            assert_eq!(Memory::of(&added).unwrap(), Memory::Shared);
            assert_eq!(CommandLine::parse(&added).ram()[0].size_bytes, bytes);
        }
    }

    #[test]
    fn the_accelerator_told_is_the_one_asked_for_first() {
        assert_eq!(
            accelerator(&line("-accel tcg -accel kvm")),
            "emulated (TCG)"
        );
        assert!(accelerator(&line("-m 1G")).contains("no -accel kvm"));
        assert!(accelerator(&line("-enable-kvm")).contains("KVM"));
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(
            arguments in prop::collection::vec(
                "-(object|machine|M|numa|mem-path|m)|memory-backend-[a-z=,]{0,20}|[a-z=,{}\":]{0,30}", 0..12,
            ),
        ) {
            let _ = Memory::of(&arguments);
        }
    }
}
