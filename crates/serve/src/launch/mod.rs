//! A QEMU whose disks a daemon of ours serves: what is added to its command line, and the daemon's process.
//!
//! Added are, in this order: memory that others can map, unless it has such; a `vhost-user-blk-pci` device for each
//! disk and one for the control disk. The rest stays as it is. The daemon keeps its state in a directory of the VM's
//! name, so that a restarted daemon, or a second run, finds writes that the first one had acknowledged.

mod daemon;
mod memory;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;

use anyhow::Context as _;
use plimsoll_flow::Accelerator;
use plimsoll_output::bail_usage;
use plimsoll_vm::{CommandLine, escape_commas};
use rustix::process::{Pid, Signal, kill_process};

use crate::disk::options::{
    CacheArgs, DiskSpec, WriteError, check_distinct, name, name_from, name_of,
};
use crate::disk::state::{create, directories};
use memory::Memory;

pub use daemon::{Daemon, TURN};

/// Longest path of a Unix socket.
const SOCKET_PATH_MAX: usize = 107;

/// A QEMU and its disks.
#[derive(Debug, clap::Args)]
pub struct LaunchArgs {
    /// Name of the VM [default: that of QEMU's -name, or the first image's without its extension]
    #[arg(long, value_parser = name)]
    name: Option<String>,
    /// Disk to give to the VM: a raw image or a block device, and read-only, serial=TEXT, queues=N, direct=auto|on|off
    #[arg(long, value_name = "IMAGE[,..]")]
    disk: Vec<DiskSpec>,
    #[command(flatten)]
    cache: CacheArgs,
    /// QEMU and its arguments
    #[arg(last = true, required = true, value_name = "QEMU")]
    pub qemu: Vec<OsString>,
}

/// What is started.
#[derive(Debug)]
pub struct Plan {
    /// Name of the VM.
    pub name: String,
    /// QEMU's own command line, as far as it is understood.
    pub line: Vec<String>,
    /// Arguments added to it.
    pub added: Vec<OsString>,
    /// Its memory, as a phrase.
    pub memory_phrase: String,
    /// Arguments of the daemon, if there is one.
    pub daemon: Option<Vec<OsString>>,
    /// The daemon's directory; `None` if `--state` names it.
    _own_directory: Option<OwnDirectory>,
}

/// A directory that is removed with this if it is empty then.
#[derive(Debug)]
struct OwnDirectory(PathBuf);

impl Drop for OwnDirectory {
    fn drop(&mut self) {
        // It stays if there are writes in it, or sockets.
        let _ = fs::remove_dir(&self.0);
    }
}

impl Plan {
    /// Completes QEMU's command line, and makes the directory of the daemon if there is one.
    ///
    /// # Errors
    ///
    /// A [`UsageError`](plimsoll_output::exit::UsageError) for options that contradict each other, and why the directory
    /// cannot be created.
    pub fn new(args: &LaunchArgs) -> anyhow::Result<Self> {
        let first = args.disk.first().map(|disk| disk.image.as_path());
        let line: Vec<_> = args.qemu[1..]
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        if line
            .iter()
            .any(|word| word == "-daemonize" || word == "--daemonize")
        {
            bail_usage!(
                "-daemonize: QEMU would leave this program, which takes that for the end of the VM; omit it, and put `plimsoll run` itself in the background"
            );
        }
        let of_qemu = CommandLine::parse(&line).name;
        let made = || match &of_qemu {
            Some(text) => name_from(text),
            None => name_of(first),
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
        let memory_phrase = memory.add_to(&mut added);
        let by_name = directories().join(&name);
        let state = args.cache.state.as_deref();
        // From here on, so that a plan that fails leaves nothing.
        let own_directory = (has_daemon && state.is_none()).then(|| OwnDirectory(by_name.clone()));
        let daemon = if has_daemon {
            args.cache.engine()?;
            let directory = state.unwrap_or(&by_name);
            Some(daemon_arguments(args, &name, directory, &line, &mut added)?)
        } else {
            None
        };
        Ok(Self {
            name,
            line,
            added,
            memory_phrase,
            daemon,
            _own_directory: own_directory,
        })
    }
}

/// Makes the VM's directory, adds QEMU's devices, and returns the daemon's arguments.
fn daemon_arguments(
    args: &LaunchArgs,
    name: &str,
    directory: &Path,
    line: &[String],
    added: &mut Vec<OsString>,
) -> anyhow::Result<Vec<OsString>> {
    let mut disks = args.disk.clone();
    for disk in &mut disks {
        if disk.socket.is_some() {
            bail_usage!("--disk: socket= goes with `plimsoll disk serve`; here sockets are made");
        }
        disk.image = fs::canonicalize(&disk.image)
            .with_context(|| format!("image {}", disk.image.display()))?;
    }
    check_distinct(&disks, args.cache.record.as_deref())?;
    create(directory)?;
    let directory = fs::canonicalize(directory)
        .with_context(|| format!("cannot find the directory {}", directory.display()))?;
    let socket = |name: &str| -> anyhow::Result<String> {
        let path = directory.join(name);
        match path.into_os_string().into_string() {
            Ok(path) if path.len() <= SOCKET_PATH_MAX => Ok(path),
            _ => bail_usage!(
                "sockets in {} would have too long names: see --state",
                directory.display()
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
    for (number, disk) in disks.iter().enumerate() {
        let socket = socket(&format!("disk{number}.sock"))?;
        device(&format!("disk{number}"), &socket, disk.queues);
        arguments.extend(["--disk".into(), disk.at(&socket).into()]);
    }
    let control = socket("control.sock")?;
    device("control", &control, Some(1));
    arguments.extend(["--control".into(), control.into()]);
    arguments.extend(["--admin".into(), socket("admin.sock")?.into()]);
    let mut cache = args.cache.clone();
    cache.state = Some(directory);
    if cache.write_error() != WriteError::Report && cache.monitors.is_empty() {
        cache.monitors = CommandLine::parse(line).qmp_sockets;
    }
    cache.check_monitor()?;
    arguments.extend(cache.arguments());
    arguments.extend(["--parent".into(), std::process::id().to_string().into()]);
    Ok(arguments)
}

/// Sends a signal to a child process.
pub fn signal(child: &Child, signal: Signal) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // It is our child and not waited for: the number is its own. Its end is noticed by the next poll.
        let _ = kill_process(pid, signal);
    }
}

/// What runs the guest's instructions, as QEMU's command line requests.
pub fn accelerator(line: &[String]) -> &'static str {
    let usable = || {
        let device = fs::File::options().read(true).write(true).open("/dev/kvm");
        device.is_ok()
    };
    match CommandLine::parse(line).accelerators.first() {
        Some(Accelerator::Kvm) if usable() => "KVM",
        Some(Accelerator::Kvm) => "requests KVM, but /dev/kvm cannot be opened",
        Some(Accelerator::Tcg) => "emulated (TCG)",
        None => "emulated (TCG: the command line has no -accel kvm)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;
    use plimsoll_output::exit::UsageError;

    fn line(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[derive(Debug, clap::Parser)]
    struct Program {
        #[command(flatten)]
        launch: LaunchArgs,
    }

    fn plan(words: &[&str]) -> anyhow::Result<Plan> {
        let words = std::iter::once(&"run").chain(words);
        Plan::new(&Program::try_parse_from(words).unwrap().launch)
    }

    #[test]
    fn a_qemu_that_would_leave_is_refused_before_anything_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("a.raw");
        fs::write(&image, [0; 4096]).unwrap();
        let (image, state) = (image.to_str().unwrap(), folder.path().join("state"));
        let disk = ["--disk", image, "--state", state.to_str().unwrap()];
        for option in ["-daemonize", "--daemonize"] {
            for disk in [&disk[..], &[]] {
                let error = plan(&[disk, &["--", "qemu", option]].concat()).unwrap_err();
                assert!(error.is::<UsageError>(), "{error:#}");
                assert!(error.to_string().contains("-daemonize"), "{error:#}");
            }
        }
        assert!(!state.exists());
        assert!(plan(&["--", "qemu", "-name", "daemonize"]).is_ok());
    }

    #[test]
    fn a_plan_that_fails_leaves_no_directory() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let image = folder.path().join("nosuch.raw");
        let (image, at) = (image.to_str().unwrap(), state.to_str().unwrap());
        let error = plan(&["--disk", image, "--state", at, "--", "qemu"]).unwrap_err();
        assert!(error.to_string().contains("nosuch.raw"), "{error:#}");
        assert!(!state.exists());
    }

    #[test]
    fn an_image_given_twice_is_called_that() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("a.raw");
        fs::write(&image, [0; 4096]).unwrap();
        let state = folder.path().join("state");
        let (image, at) = (image.to_str().unwrap(), state.to_str().unwrap());
        let twice = |options: &str| {
            let disk = format!("{image}{options}");
            plan(&[
                "--disk", &disk, "--disk", &disk, "--state", at, "--", "qemu",
            ])
        };
        let error = twice("").unwrap_err();
        assert!(error.is::<UsageError>(), "{error:#}");
        assert!(error.to_string().contains("twice"), "{error:#}");
        assert!(twice(",read-only").is_ok());
    }

    #[test]
    fn the_name_is_qemus_as_far_as_a_name_can_be() {
        for (given, expected) in [("web", "web"), ("guest=we,,b", "we-b"), ("a b.c", "a-b.c")] {
            let plan = plan(&["--", "qemu", "-name", given]).unwrap();
            assert_eq!(plan.name, expected);
            assert!(plan.added.iter().all(|word| word != "-name"));
        }
    }

    #[test]
    fn the_directory_of_a_vm_is_removed_unless_something_is_left_in_it() {
        let folder = tempfile::tempdir().unwrap();
        for left in [None, Some("dirty.log")] {
            let directory = folder.path().join("web");
            fs::create_dir(&directory).unwrap();
            if let Some(left) = left {
                fs::write(directory.join(left), "").unwrap();
            }
            drop(OwnDirectory(directory.clone()));
            assert_eq!(directory.exists(), left.is_some());
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
}
