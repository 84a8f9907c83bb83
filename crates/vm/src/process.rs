//! QEMU processes of this host, from `/proc`.
//!
//! Names, arguments and paths are chosen by the process, so they are read as bytes and need not be UTF-8.

use std::cell::LazyCell;
use std::fs;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_flow::{RamMapping, VmId};
use rustix::fs::statfs;

use crate::identity::{AllowedUsers, PeerSocket, ProcessId, read_in_root, read_own};
use crate::maps::{
    FileSystems, MapEntry, ProcessRam, RamState, guest_ram, parse_maps, process_ram, ram_state,
};
use crate::{CommandLine, HostMemory, Qmp, VmError};
use plimsoll_flow::Accelerator;

/// Type of the file system of huge pages, from <linux/magic.h>.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// Time limit for a monitor to list the threads of its virtual CPUs.
const VCPU_QUERY_TIMEOUT: Duration = Duration::from_millis(300);

/// Longest file of `-readconfig` that is read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A virtual CPU and the thread that runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vcpu {
    /// Its number in the VM, from 0.
    pub index: u32,
    /// Its thread on the host.
    pub thread_id: u32,
}

impl Vcpu {
    /// CPU time that its thread of process `pid` has used, in nanoseconds; `None` if it has ended.
    pub(crate) fn ran_ns(self, pid: u32) -> Option<u64> {
        let path = format!("/proc/{pid}/task/{}/schedstat", self.thread_id);
        let text = fs::read_to_string(path).ok()?;
        text.split_ascii_whitespace().next()?.parse().ok()
    }
}

/// A running VM at the time it was inspected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QemuVm {
    /// The QEMU process.
    pub pid: u32,
    /// Start of that process in clock ticks since boot, which distinguishes it from later ones with the same process
    /// id.
    pub start_ticks: u64,
    /// Its UUID, in lower case; `None` if it has none.
    pub uuid: Option<String>,
    /// The VM's name; `qemu-PID` if it has none.
    pub id: VmId,
    /// Its accelerator; `None` if unknown.
    pub accelerator: Option<Accelerator>,
    /// Its RAM according to the command line, in bytes.
    pub memory_bytes: u64,
    /// Its RAM in the process's address space, one mapping for each backend in the
    /// command line's order; empty if no mapping can be guest RAM.
    pub ram: Vec<RamMapping>,
    /// Its virtual CPUs, by index; empty if unknown. Under
    /// single-threaded TCG one thread runs all of them and is listed once, as CPU 0.
    pub vcpus: Vec<Vcpu>,
    /// Unix sockets of its monitors whose paths are known, in the order in which they are tried.
    pub qmp_sockets: Vec<PathBuf>,
    /// Unix socket of an agent in the guest, if its path is known.
    pub agent_socket: Option<PathBuf>,
    /// Unix sockets that its character devices use: of its monitor, and of the daemons of its devices.
    pub sockets: Vec<PathBuf>,
}

impl QemuVm {
    /// CPU time that the virtual CPUs found on inspection have used, all together; `None` if they are unknown or one was
    /// unplugged.
    pub fn vcpu_time(&self) -> Option<Duration> {
        if self.vcpus.is_empty() {
            return None;
        }
        let ran = self.vcpus.iter().map(|vcpu| vcpu.ran_ns(self.pid));
        ran.sum::<Option<u64>>().map(Duration::from_nanos)
    }

    /// Whether its virtual CPUs are those found on inspection, as far as its threads tell by their names.
    pub(crate) fn has_its_vcpus(&self) -> bool {
        let threads = Process { pid: self.pid }.threads().unwrap_or_default();
        let vcpus = vcpus_by_name(&threads);
        vcpus.is_empty() || vcpus == self.vcpus
    }

    /// Describes a QEMU process. Reading its memory map requires permission to trace it (same user, or
    /// `CAP_SYS_PTRACE`).
    ///
    /// Describes any process of a program with that name, regardless of its user; [`AllowedUsers::check`] determines
    /// whether it is a VM of this host.
    ///
    /// # Errors
    ///
    /// [`VmError::NoSuchProcess`], [`VmError::NotQemu`], and [`VmError::NotPermitted`] if
    /// this user may not read the map.
    pub fn of_pid(pid: u32) -> Result<Self, VmError> {
        let program = program(pid)?;
        if !is_qemu(&program) {
            return Err(VmError::NotQemu { pid, program });
        }
        let id = ProcessId::of_pid(pid).ok_or(VmError::NoSuchProcess { pid })?;
        let process = Process { pid };
        // Nearly all paths are absolute.
        let folders = LazyCell::new(|| process.folders());
        let command_line = process.command_line(id, &folders)?;
        let entries = parse_maps(&process.read("maps")?)?;
        if entries.is_empty() {
            // Its memory has already been freed, and the process is about to end.
            return Err(VmError::NoSuchProcess { pid });
        }
        let file_systems = process.file_systems(&entries)?;
        let absolute = |socket: &PathBuf| match socket.is_absolute() {
            true => socket.clone(),
            false => absolute(id, &folders, socket),
        };
        let qmp_sockets = command_line.qmp_sockets.iter().map(absolute);
        let qmp_sockets: Vec<_> = qmp_sockets.collect();
        let agent_socket = command_line.agent_socket.as_ref().map(absolute);
        let sockets = command_line.sockets.iter().map(absolute).collect();
        let threads = process.threads()?;
        let mut vcpus = vcpus_by_name(&threads);
        if vcpus.is_empty() {
            let own_id = |thread: &Thread| process.own_thread_id(thread.id);
            vcpus = vcpus_by_monitor(sockets_of(id, &qmp_sockets), &threads, own_id);
            vcpus.sort_by_key(|vcpu| vcpu.index);
        }
        if !id.is_there() {
            return Err(VmError::NoSuchProcess { pid });
        }
        let name = command_line.name.clone();
        Ok(Self {
            pid,
            start_ticks: id.start_ticks,
            uuid: command_line.uuid.clone(),
            id: VmId(name.unwrap_or_else(|| format!("qemu-{pid}"))),
            accelerator: process.accelerator(&command_line, &threads),
            memory_bytes: command_line
                .ram()
                .fold(0, |sum: u64, ram| sum.saturating_add(ram.size_bytes)),
            ram: guest_ram(&entries, &file_systems, &command_line),
            vcpus,
            qmp_sockets,
            agent_socket,
            sockets,
        })
    }

    /// Its process.
    pub fn process(&self) -> ProcessId {
        ProcessId {
            pid: self.pid,
            start_ticks: self.start_ticks,
        }
    }

    /// The sockets of its monitors in the order in which they are tried, at which the process itself must listen. A socket
    /// that another process created for it, as libvirt does, is reserved for that process.
    pub fn monitor_sockets(&self) -> Vec<PeerSocket> {
        sockets_of(self.process(), &self.qmp_sockets)
    }

    /// Connects to one of its monitors; refuses a monitor at which another process listens.
    ///
    /// # Errors
    ///
    /// Those of [`Qmp::connect_to`].
    pub fn monitor(&self, timeout: Duration) -> Result<Qmp, VmError> {
        Qmp::connect_to(&mut self.monitor_sockets(), timeout)
    }

    /// Returns the current state of each mapping of [`ram`](Self::ram).
    ///
    /// Costs a walk over the process's page tables: about 10 ms for each GiB of RAM.
    ///
    /// # Errors
    ///
    /// [`VmError::NoSuchProcess`] if the VM has ended, [`VmError::NotPermitted`].
    pub fn ram_states(&self) -> Result<Vec<RamState>, VmError> {
        let smaps = Process { pid: self.pid }.read("smaps")?;
        let state = |ram| ram_state(&smaps, std::slice::from_ref(ram));
        Ok(self.ram.iter().map(state).collect())
    }
}

/// A running process that is no VM, at the time it was inspected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryProcess {
    /// The process.
    pub process: ProcessId,
    /// Its name, as it chose it.
    pub name: String,
    /// Its memory.
    pub ram: ProcessRam,
}

impl MemoryProcess {
    /// Describes a process. Reading its memory map requires permission to trace it (same user, or `CAP_SYS_PTRACE`).
    ///
    /// # Errors
    ///
    /// [`VmError::NoSuchProcess`]; [`VmError::NoMemory`] for a thread of the kernel, [`VmError::Thread`] for one of a process, other
    /// than its first; [`VmError::NotPermitted`] if this
    /// user may not read the map.
    pub fn of_pid(pid: u32) -> Result<Self, VmError> {
        let id = ProcessId::of_pid(pid).ok_or(VmError::NoSuchProcess { pid })?;
        let process = Process { pid };
        let name = process.read("comm")?.trim_end().to_owned();
        let status = process.read("status")?;
        let of = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
        if let Some(process) = of.and_then(|number| number.trim().parse().ok())
            && process != pid
        {
            return Err(VmError::Thread { pid, process });
        }
        let entries = parse_maps(&process.read("maps")?)?;
        if entries.is_empty() {
            return Err(VmError::NoMemory { pid, name });
        }
        let file_systems = process.file_systems(&entries)?;
        let ram = process_ram(&entries, &file_systems, HostMemory::read()?.total_bytes);
        if !id.is_there() {
            return Err(VmError::NoSuchProcess { pid });
        }
        Ok(Self {
            process: id,
            name,
            ram,
        })
    }

    /// Returns the current state of its mappings, taken together, at the cost of [`QemuVm::ram_states`].
    ///
    /// # Errors
    ///
    /// [`VmError::NoSuchProcess`] if it has ended, [`VmError::NotPermitted`].
    pub fn ram_state(&self) -> Result<RamState, VmError> {
        let pid = self.process.pid;
        let smaps = Process { pid }.read("smaps")?;
        Ok(ram_state(&smaps, &self.ram.mappings))
    }
}

/// Returns the process ids of the QEMU system emulators that run on this host, in ascending order.
///
/// # Errors
///
/// [`VmError::File`] if `/proc` cannot be read.
pub fn qemu_pids() -> Result<Vec<u32>, VmError> {
    let listing = fs::read_dir("/proc").map_err(|source| VmError::of_file("/proc", source))?;
    let mut pids: Vec<u32> = listing
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        // A process that has ended meanwhile is not listed.
        .filter(|&pid| program(pid).is_ok_and(|program| is_qemu(&program)))
        .collect();
    pids.sort_unstable();
    Ok(pids)
}

/// Describes all QEMU processes of this host, by ascending process id, regardless of their users. Those that end
/// meanwhile are left out.
///
/// # Errors
///
/// [`VmError::NotPermitted`] at the first VM whose memory map this user may not read;
/// [`qemu_pids`] and [`QemuVm::of_pid`] list the others.
pub fn running() -> Result<Vec<QemuVm>, VmError> {
    qemu_pids()?
        .into_iter()
        .map(QemuVm::of_pid)
        .filter(|vm| {
            use VmError::{NoSuchProcess, NotQemu};
            !matches!(vm, Err(NoSuchProcess { .. } | NotQemu { .. }))
        })
        .collect()
}

/// Finds a running VM by its process id, by its process id and start (`PID@START`) or, if no QEMU has that number, by
/// its UUID or name, of which `NAME-PID` is one. A number with leading zeros is a name.
///
/// A process id finds any QEMU process, regardless of its user. A UUID or name finds only VMs of the default
/// [`AllowedUsers`], so that no other user can take over a VM's name.
///
/// # Errors
///
/// [`VmError::NoSuchName`] and [`VmError::AmbiguousName`], both of which list the candidates;
/// [`VmError::OtherProcess`]; [`VmError::NoGuestRam`]; those of [`QemuVm::of_pid`].
pub fn find(pid_or_name: &str) -> Result<QemuVm, VmError> {
    let vm = if let Ok(process) = pid_or_name.parse::<ProcessId>() {
        let pid = process.pid;
        let vm = QemuVm::of_pid(pid)?;
        if vm.process() != process {
            return Err(VmError::OtherProcess { pid });
        }
        vm
    } else {
        let by_name = || QemuVm::of_pid(pid_of_name(pid_or_name)?);
        match process_id(pid_or_name).map(QemuVm::of_pid) {
            // A name may be a number.
            Some(Err(error @ (VmError::NoSuchProcess { .. } | VmError::NotQemu { .. }))) => {
                match by_name() {
                    Err(VmError::NoSuchName { .. }) => return Err(error),
                    found => found?,
                }
            }
            Some(found) => found?,
            None => by_name()?,
        }
    };
    if vm.ram.is_empty() {
        return Err(VmError::NoGuestRam {
            pid: vm.pid,
            expected_mib: vm.memory_bytes >> 20,
        });
    }
    Ok(vm)
}

/// The process id that a text is, as it is printed: without leading zeros.
fn process_id(text: &str) -> Option<u32> {
    let pid = text.parse::<u32>().ok()?;
    (pid.to_string() == text).then_some(pid)
}

/// What plimsolld calls a VM whose name another one has: `NAME-PID`.
pub fn second_name(name: &str, pid: u32) -> String {
    format!("{name}-{pid}")
}

fn pid_of_name(name: &str) -> Result<u32, VmError> {
    // Any user can choose a name, so VMs of other users, and processes that merely use a VM's name, are not considered.
    let users = AllowedUsers::default();
    let uuid = name.to_ascii_lowercase();
    let named: Vec<(u32, String, bool)> = qemu_pids()?
        .into_iter()
        .filter(|&pid| !matches!(users.check(pid), Err(VmError::NotOfThisHost { .. })))
        .filter_map(|pid| {
            let (process, id) = (Process { pid }, ProcessId::of_pid(pid)?);
            let folders = LazyCell::new(|| process.folders());
            let line = process.command_line(id, &folders).ok()?;
            let is_it = line.uuid.as_ref() == Some(&uuid);
            let its = line.name.unwrap_or_else(|| format!("qemu-{pid}"));
            let is_it = is_it || its == name;
            Some((pid, its, is_it))
        })
        .collect();
    let found = named.iter().filter(|(_, _, is_it)| *is_it);
    let pids: Vec<u32> = found.map(|&(pid, _, _)| pid).collect();
    let numbered = |(pid, its, _): &&(u32, String, bool)| second_name(its, *pid) == name;
    match pids[..] {
        [pid] => Ok(pid),
        [] => match named.iter().find(numbered) {
            Some(&(pid, ..)) => Ok(pid),
            None => Err(VmError::NoSuchName {
                name: name.to_owned(),
                running: named.into_iter().map(|(_, name, _)| name).collect(),
            }),
        },
        _ => Err(VmError::AmbiguousName {
            name: name.to_owned(),
            pids,
        }),
    }
}

/// A thread and its name.
struct Thread {
    id: u32,
    name: String,
}

/// The directory of a process in `/proc`.
struct Process {
    pid: u32,
}

impl Process {
    fn path(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid))
    }

    fn error(&self, path: PathBuf, source: io::Error) -> VmError {
        // The process ended while the file was open, or has ended but was not waited for yet; in that case
        // the kernel has no mounts to list.
        const ENDED: [i32; 2] = [3, 22]; // ESRCH, EINVAL
        let code = source.raw_os_error().unwrap_or(0);
        if source.kind() == io::ErrorKind::NotFound || ENDED.contains(&code) {
            VmError::NoSuchProcess { pid: self.pid }
        } else {
            VmError::of_file(path, source)
        }
    }

    /// The file systems of its mappings.
    fn file_systems(&self, entries: &[MapEntry]) -> Result<FileSystems, VmError> {
        let mounted = FileSystems::parse(&self.read("mountinfo")?);
        Ok(mounted.with_memfds(entries, |entry| {
            let file = self.path(&format!("map_files/{:x}-{:x}", entry.start, entry.end));
            // Requires CAP_CHECKPOINT_RESTORE, without which shared memory cannot be traced either.
            statfs(&file).is_ok_and(|found| u64::try_from(found.f_type) == Ok(HUGETLBFS_MAGIC))
        }))
    }

    fn read(&self, file: &str) -> Result<String, VmError> {
        self.text(file, fs::read(self.path(file)))
    }

    /// The same of a file that the process itself makes.
    fn read_own(&self, file: &str) -> Result<String, VmError> {
        self.text(file, read_own(self.pid, file))
    }

    fn text(&self, file: &str, read: io::Result<Vec<u8>>) -> Result<String, VmError> {
        match read {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(source) => Err(self.error(self.path(file), source)),
        }
    }

    /// Its command line, with what the files of `-readconfig` say as far as they are there still. `folders` are those in which
    /// it may have been started.
    fn command_line(
        &self,
        id: ProcessId,
        folders: &impl Deref<Target = Vec<PathBuf>>,
    ) -> Result<CommandLine, VmError> {
        let arguments = self.read_own("cmdline")?;
        let arguments: Vec<&str> = arguments.split_terminator('\0').collect();
        let read = |path: PathBuf| read_in_root(id, &path, CONFIG_BYTES_MAX).ok();
        let text_of = |file: &str| {
            let bytes = match Path::new(file) {
                file if file.is_absolute() => read(file.to_owned()),
                file => folders.iter().find_map(|folder| read(folder.join(file))),
            };
            bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        };
        Ok(CommandLine::parse_with_files(&arguments, text_of))
    }

    /// The directories in which it may have been started, the likeliest first: where it is, unless `-daemonize` has led it to
    /// the root since, and where its shell was.
    fn folders(&self) -> Vec<PathBuf> {
        let here = fs::read_link(self.path("cwd")).ok();
        let environment = self.read_own("environ").unwrap_or_default();
        let mut variables = environment.split('\0');
        let shell = variables.find_map(|variable| variable.strip_prefix("PWD="));
        let shell = shell.map(PathBuf::from).filter(|path| path.is_absolute());
        here.into_iter().chain(shell).collect()
    }

    fn threads(&self) -> Result<Vec<Thread>, VmError> {
        let path = self.path("task");
        let listing = fs::read_dir(&path).map_err(|source| self.error(path.clone(), source))?;
        let thread = |entry: fs::DirEntry| {
            let id = entry.file_name().to_str()?.parse().ok()?;
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            Some(Thread {
                id,
                name: name.trim_end().to_owned(),
            })
        };
        Ok(listing.flatten().filter_map(thread).collect())
    }

    /// The id of one of its threads in the process's own namespace of process ids.
    fn own_thread_id(&self, id: u32) -> Option<u32> {
        let status = self.read(&format!("task/{id}/status")).ok()?;
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        // From ours to its own. Kernels without namespaces have no such line.
        match ids {
            Some(ids) => ids.split_ascii_whitespace().next_back()?.parse().ok(),
            None => Some(id),
        }
    }

    /// Determines the accelerator by the most reliable indication: an open KVM VM, then the names of the threads, and
    /// finally the command line, whose first choice may have failed.
    fn accelerator(&self, command_line: &CommandLine, threads: &[Thread]) -> Option<Accelerator> {
        if let Ok(files) = fs::read_dir(self.path("fd")) {
            let is_kvm = files.flatten().any(|file| {
                fs::read_link(file.path())
                    .is_ok_and(|target| target == Path::new("anon_inode:kvm-vm"))
            });
            if is_kvm {
                return Some(Accelerator::Kvm);
            }
        }
        let by_thread = threads.iter().find_map(|thread| {
            match thread
                .name
                .strip_prefix("CPU ")
                .or(thread.name.strip_prefix("ALL CPUs"))?
                .split_once('/')?
                .1
            {
                "KVM" => Some(Accelerator::Kvm),
                "TCG" => Some(Accelerator::Tcg),
                _ => None,
            }
        });
        by_thread.or(match command_line.accelerators[..] {
            [] => Some(Accelerator::Tcg),
            [only] => Some(only),
            _ => None,
        })
    }
}

/// Sockets at which the process itself listens.
fn sockets_of(process: ProcessId, paths: &[PathBuf]) -> Vec<PeerSocket> {
    let paths = paths.iter().cloned();
    paths
        .map(|path| PeerSocket::of_process(process, path))
        .collect()
}

/// The absolute path of a socket: below the first of these directories that has it, otherwise below the first.
fn absolute(process: ProcessId, folders: &[PathBuf], socket: &Path) -> PathBuf {
    let mut paths = folders.iter().map(|folder| folder.join(socket));
    let has = |path: &PathBuf| {
        PeerSocket::of_process(process, path.clone())
            .owner()
            .is_ok()
    };
    let found = paths.clone().find(has).or_else(|| paths.next());
    found.unwrap_or_else(|| socket.to_owned())
}

/// The name of the program that a process runs, without its directory.
fn program(pid: u32) -> Result<String, VmError> {
    let process = Process { pid };
    match fs::read_link(process.path("exe")) {
        Ok(target) => {
            let name = target.file_name().unwrap_or_default().to_string_lossy();
            Ok(name.trim_end_matches(" (deleted)").to_owned())
        }
        // Another user's process still lists its arguments; a kernel thread, and a process
        // that has ended but was not waited for, only a name.
        Err(_) => {
            let arguments = process.read_own("cmdline")?;
            let first = arguments.split('\0').next().unwrap_or_default();
            match Path::new(first).file_name() {
                Some(name) => Ok(name.to_string_lossy().into_owned()),
                None => Ok(format!("[{}]", process.read("comm")?.trim_end())),
            }
        }
    }
}

fn is_qemu(program: &str) -> bool {
    // NixOS installs a wrapper, and moves the program to `.qemu-system-x86_64-wrapped`.
    let program = program.strip_prefix('.').unwrap_or(program);
    program.starts_with("qemu-system-") || program == "qemu-kvm"
}

/// The virtual CPUs that threads tell by their names, by index.
fn vcpus_by_name(threads: &[Thread]) -> Vec<Vcpu> {
    let mut vcpus: Vec<_> = threads.iter().filter_map(vcpu_of_thread).collect();
    vcpus.sort_by_key(|vcpu| (vcpu.index, vcpu.thread_id));
    vcpus
}

/// Parses the names that QEMU gives its threads under `debug-threads=on`.
fn vcpu_of_thread(thread: &Thread) -> Option<Vcpu> {
    let index = match thread.name.strip_prefix("CPU ") {
        Some(rest) => rest.split_once('/')?.0.parse().ok()?,
        None if thread.name.starts_with("ALL CPUs/") => 0,
        None => return None,
    };
    Some(Vcpu {
        index,
        thread_id: thread.id,
    })
}

/// Queries a monitor that is free; ignores threads that do not belong to the process. QEMU reports the ids that its threads have
/// in its own namespace of process ids: `own_id`.
fn vcpus_by_monitor(
    mut sockets: Vec<PeerSocket>,
    threads: &[Thread],
    own_id: impl Fn(&Thread) -> Option<u32>,
) -> Vec<Vcpu> {
    let answer = Qmp::connect_to(&mut sockets, VCPU_QUERY_TIMEOUT).and_then(|mut qmp| qmp.vcpus());
    let reported = answer.unwrap_or_default();
    let vcpu = |vcpu: Vcpu| {
        let is_its = |thread: &&Thread| own_id(thread) == Some(vcpu.thread_id);
        let thread_id = threads.iter().find(is_its)?.id;
        Some(Vcpu { thread_id, ..vcpu })
    };
    reported.into_iter().filter_map(vcpu).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_skip::write_program;
    use std::process::{Command, Stdio};

    #[test]
    fn threads_tell_their_cpu_by_name() {
        let index = |name: &str| {
            let thread = Thread {
                id: 9,
                name: name.into(),
            };
            vcpu_of_thread(&thread).map(|vcpu| vcpu.index)
        };
        assert_eq!(index("CPU 0/KVM"), Some(0));
        assert_eq!(index("CPU 12/TCG"), Some(12));
        assert_eq!(index("ALL CPUs/TCG"), Some(0));
        for other in [
            "CPU x/KVM",
            "worker",
            "qemu-system-x86",
            "CPU 4294967296/KVM",
        ] {
            assert_eq!(index(other), None, "{other}");
        }
    }

    #[test]
    fn a_socket_is_found_where_qemu_was_started_also_if_it_has_left_that_directory() {
        let here = tempfile::tempdir().unwrap();
        let shell = tempfile::tempdir().unwrap();
        let ours = ProcessId::of_pid(std::process::id()).unwrap();
        let folders = [here.path().to_owned(), shell.path().to_owned()];
        let found = || absolute(ours, &folders, Path::new("qmp"));
        assert_eq!(found(), here.path().join("qmp"));
        let _listener = std::os::unix::net::UnixListener::bind(shell.path().join("qmp")).unwrap();
        assert_eq!(found(), shell.path().join("qmp"));
        let _nearer = std::os::unix::net::UnixListener::bind(here.path().join("qmp")).unwrap();
        assert_eq!(found(), here.path().join("qmp"));
        let path = absolute(ours, &folders, Path::new("/run/qmp"));
        assert_eq!(path, Path::new("/run/qmp"));
        let process = Process { pid: ours.pid };
        assert_eq!(process.own_thread_id(ours.pid), Some(ours.pid));
        assert_eq!(process.folders()[0], std::env::current_dir().unwrap());
    }

    #[test]
    fn a_vm_of_a_configuration_file_has_what_that_says() {
        let folder = tempfile::tempdir().unwrap();
        // A shell that is called as QEMU is.
        let program = folder.path().join("qemu-system-none");
        write_program(&program, fs::read("/bin/sh").unwrap());
        let text = "[memory]\nsize = \"96M\"\n[name]\nguest = \"conf\"\n\
             [chardev \"m\"]\nbackend = \"socket\"\npath = \"qmp\"\nserver = \"on\"\n\
             [mon]\nchardev = \"m\"\nmode = \"control\"\n";
        fs::write(folder.path().join("vm.conf"), text).unwrap();
        let mut child = Command::new(&program)
            .args(["-c", "read end", "-readconfig", "vm.conf"])
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        // The kernel sets it shortly after the program has begun.
        while fs::read(format!("/proc/{}/cmdline", child.id())).is_ok_and(|line| line.is_empty()) {
            std::thread::yield_now();
        }
        let vm = QemuVm::of_pid(child.id());
        fs::remove_file(folder.path().join("vm.conf")).unwrap();
        let without = QemuVm::of_pid(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        let (vm, without) = (vm.unwrap(), without.unwrap());
        assert_eq!((vm.id.0.as_str(), vm.memory_bytes), ("conf", 96 << 20));
        assert_eq!(vm.qmp_sockets, [folder.path().join("qmp")]);
        assert_eq!(without.id.0, format!("qemu-{}", without.pid));
    }

    #[test]
    fn a_vm_is_found_by_the_name_that_the_daemon_gives_the_second_of_a_name() {
        let folder = tempfile::tempdir().unwrap();
        // A shell that is called as QEMU is.
        let program = folder.path().join("qemu-system-none");
        write_program(&program, fs::read("/bin/sh").unwrap());
        let mut child = Command::new(&program)
            .args(["-c", "read end", "-name", "guest=twin"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        while fs::read(format!("/proc/{}/cmdline", child.id())).is_ok_and(|line| line.is_empty()) {
            std::thread::yield_now();
        }
        let found = find(&format!("twin-{}", child.id()));
        let other = find(&format!("twin-{}", child.id() + 1));
        child.kill().unwrap();
        child.wait().unwrap();
        // A shell has no RAM of a guest.
        let error = found.unwrap_err();
        assert!(
            matches!(error, VmError::NoGuestRam { pid, .. } if pid == child.id()),
            "{error}"
        );
        assert!(matches!(other, Err(VmError::NoSuchName { .. })));
    }

    #[test]
    fn this_test_is_a_process_but_not_qemu() {
        let error = find(&std::process::id().to_string()).unwrap_err();
        assert!(matches!(error, VmError::NotQemu { .. }), "{error}");
    }

    #[test]
    fn a_process_that_is_not_there_is_said_not_to_be() {
        // The largest process id on Linux is 2^22.
        let error = find("4194305").unwrap_err();
        assert!(matches!(error, VmError::NoSuchProcess { pid: 4_194_305 }));
    }

    #[test]
    fn a_number_with_leading_zeros_is_a_name() {
        assert_eq!(process_id("7"), Some(7));
        assert_eq!(["007", "+7", "7 ", "x"].map(process_id), [None; 4]);
        let error = find(&format!("0{}", std::process::id())).unwrap_err();
        assert!(matches!(error, VmError::NoSuchName { .. }), "{error}");
    }

    #[test]
    fn a_name_nobody_has_is_said_to_be_unknown() {
        let error = find("a name nobody has").unwrap_err();
        assert!(matches!(error, VmError::NoSuchName { .. }), "{error}");
    }

    #[test]
    fn only_system_emulators_are_vms() {
        let emulators = [
            "qemu-system-x86_64",
            "qemu-kvm",
            ".qemu-system-x86_64-wrapped",
        ];
        assert!(emulators.into_iter().all(is_qemu));
        assert!(!["qemu-img", "qemu-x86_64", "bash"].into_iter().any(is_qemu));
    }
}
