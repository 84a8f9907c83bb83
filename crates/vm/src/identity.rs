//! Determines which processes are VMs of this host, and which process listens at a socket.
//!
//! Any user can start a program called `qemu-system-x86_64`, with a command line that names another VM's monitor. What
//! a process claims is therefore not used here; only what the kernel reports is: the owner of its executable, its user,
//! its start, and the process that listens at a socket. An executable that was replaced or removed after the start, as
//! by a package upgrade, still has its owner, and its process remains a VM.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::{Uid, User};
use rustix::fs::{FileType, FsWord, Mode, OFlags, ResolveFlags, fstat, fstatfs, open, openat2};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::VmError;

/// Bytes of a command line or an environment that are read: the kernel starts no program with more than 6 MiB of both.
const OWN_BYTES_MAX: u64 = 8 << 20;
/// `statfs` type of FUSE.
const FUSE_SUPER_MAGIC: FsWord = 0x6573_5546;

/// Mode bits that permit users other than the owner to write.
const OTHERS_WRITE: u32 = 0o022;

/// A process, distinguished from later ones with the same process id. Displayed as `PID@START`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId {
    /// Its process id, which may be reused after its end.
    pub pid: u32,
    /// Its start in clock ticks since boot, field 22 of `/proc/PID/stat`.
    pub start_ticks: u64,
}

/// Fields of `/proc/PID/stat`, by their numbers in proc(5), which are above 2.
fn stat_fields<const COUNT: usize>(pid: u32, numbers: [usize; COUNT]) -> Option<[u64; COUNT]> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The name in parentheses may contain any characters, including parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    let mut found = [0; COUNT];
    for (found, number) in found.iter_mut().zip(numbers) {
        *found = fields.get(number - 3)?.parse().ok()?;
    }
    Some(found)
}

impl ProcessId {
    /// Identifies the process that has the process id `pid` now.
    pub fn of_pid(pid: u32) -> Option<Self> {
        let [start_ticks] = stat_fields(pid, [22])?;
        Some(Self { pid, start_ticks })
    }

    /// Identifies the process that listens at the other end.
    pub(crate) fn listening(stream: &UnixStream) -> Option<Self> {
        let peer = getsockopt(stream, PeerCredentials).ok()?;
        Self::of_pid(u32::try_from(peer.pid()).ok()?)
    }

    /// Number of its threads, and size of its mapped address space in bytes; `None` if it has ended. While both stay, it is unlikely
    /// that memory or virtual CPUs came or went, and this is one small read.
    pub fn extent(self) -> Option<[u64; 2]> {
        let [threads, start_ticks, mapped_bytes] = stat_fields(self.pid, [20, 22, 23])?;
        (start_ticks == self.start_ticks).then_some([threads, mapped_bytes])
    }

    /// Whether it still runs, or has ended but was not waited for.
    pub fn is_there(self) -> bool {
        Self::of_pid(self.pid) == Some(self)
    }

    /// Size of its mapped address space in bytes: an upper bound on its guest RAM. `None` if it has ended.
    pub fn mapped_bytes(self) -> Option<u64> {
        self.extent().map(|[_, mapped_bytes]| mapped_bytes)
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.pid, self.start_ticks)
    }
}

impl FromStr for ProcessId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (pid, start_ticks) = text.split_once('@').unwrap_or((text, ""));
        Ok(Self {
            pid: pid.parse()?,
            start_ticks: start_ticks.parse()?,
        })
    }
}

/// Users whose processes can be VMs of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedUsers {
    ids: BTreeSet<u32>,
}

impl AllowedUsers {
    /// Users that are allowed by default, if they exist on this host: root (also for Proxmox's VMs), and the users
    /// under which libvirt starts QEMU on Debian and on Fedora.
    pub const DEFAULT_NAMES: [&str; 3] = ["root", "libvirt-qemu", "qemu"];

    /// The users with these names or ids. A default name that does not exist on this host is ignored.
    ///
    /// # Errors
    ///
    /// The first other name that does not exist on this host.
    pub fn of_names<Name: AsRef<str>>(names: &[Name]) -> Result<Self, String> {
        let mut ids = BTreeSet::new();
        for name in names.iter().map(AsRef::as_ref) {
            match id_of(name) {
                Some(id) => drop(ids.insert(id)),
                None if Self::DEFAULT_NAMES.contains(&name) => {}
                None => return Err(name.to_owned()),
            }
        }
        Ok(Self { ids })
    }

    /// The users with these ids.
    pub fn of_ids(ids: impl IntoIterator<Item = u32>) -> Self {
        Self {
            ids: ids.into_iter().collect(),
        }
    }

    /// Whether the user is allowed. The user of this process always is.
    pub fn contains(&self, user_id: u32) -> bool {
        self.ids.contains(&user_id) || user_id == Uid::effective().as_raw()
    }

    /// Checks whether a process qualifies as a VM of this host: its user is allowed, and its executable belongs to root
    /// (or to the user of this process) and is not writable by others.
    ///
    /// # Errors
    ///
    /// [`VmError::NotOfThisHost`] with the reason; [`VmError::NoSuchProcess`]; [`VmError::NotPermitted`] if this user
    /// may not inspect the executable.
    pub fn check(&self, pid: u32) -> Result<(), VmError> {
        let refused = |why: String| Err(VmError::NotOfThisHost { pid, why });
        for user_id in users_of(pid)? {
            if !self.contains(user_id) {
                return refused(format!(
                    "its user {} is not in hosts.users",
                    name_of(user_id)
                ));
            }
        }
        // The link leads to the executable's inode, even if its path has been reused.
        let path = format!("/proc/{pid}/exe");
        let executable = fs::metadata(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => VmError::NoSuchProcess { pid },
            _ => VmError::of_file(&path, source),
        })?;
        let owner = executable.uid();
        if owner != 0 && owner != Uid::effective().as_raw() {
            return refused(format!(
                "its executable belongs to user {}, not root",
                name_of(owner)
            ));
        }
        if executable.mode() & OTHERS_WRITE != 0 {
            return refused("others than its owner may write its executable".to_owned());
        }
        Ok(())
    }
}

impl Default for AllowedUsers {
    /// [`AllowedUsers::DEFAULT_NAMES`].
    fn default() -> Self {
        Self::of_ids(Self::DEFAULT_NAMES.into_iter().filter_map(id_of))
    }
}

/// Real, effective and saved user ids of a process.
fn users_of(pid: u32) -> Result<Vec<u32>, VmError> {
    let path = format!("/proc/{pid}/status");
    let gone = || VmError::NoSuchProcess { pid };
    let status = fs::read(path).map_err(|_| gone())?;
    let status = String::from_utf8_lossy(&status);
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let ids = line.ok_or_else(gone)?.split_ascii_whitespace().take(3);
    ids.map(|id| id.parse().map_err(|_| gone())).collect()
}

fn id_of(name: &str) -> Option<u32> {
    let by_name = User::from_name(name).ok().flatten();
    by_name.map_or_else(|| name.parse().ok(), |user| Some(user.uid.as_raw()))
}

fn name_of(user_id: u32) -> String {
    let user = User::from_uid(Uid::from_raw(user_id)).ok().flatten();
    user.map_or_else(|| user_id.to_string(), |user| user.name)
}

/// The processes that may listen at a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listener {
    /// Only this process.
    Process(ProcessId),
    /// Processes of these users.
    Users(AllowedUsers),
}

/// A Unix socket with the processes that may listen at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSocket {
    /// Its path. An absolute path is relative to the root directory of `root`.
    pub path: PathBuf,
    /// The process in whose file system the path is resolved; `None` for this process.
    pub root: Option<ProcessId>,
    /// The processes that may listen at it.
    pub listener: Listener,
}

impl PeerSocket {
    /// A socket at which the process itself listens, with a path in its own file system.
    pub fn of_process(process: ProcessId, path: PathBuf) -> Self {
        Self {
            path,
            root: Some(process),
            listener: Listener::Process(process),
        }
    }

    /// Returns the owner of the socket's file.
    ///
    /// # Errors
    ///
    /// The socket does not exist or cannot be reached.
    pub fn owner(&self) -> io::Result<u32> {
        match self.root {
            Some(process) => Ok(fstat(&open_in_root(process, &self.path)?)?.st_uid),
            None => {
                let there = fs::symlink_metadata(&self.path)?;
                match there.file_type().is_socket() {
                    true => Ok(there.uid()),
                    false => Err(no_socket()),
                }
            }
        }
    }

    /// Connects, and returns the process that listens. Takes at most `timeout`.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::WouldBlock`] if the queue of the socket stays full, [`io::ErrorKind::PermissionDenied`] if
    /// another process listens; nothing was sent.
    pub fn connect(&self, timeout: Duration) -> io::Result<(UnixStream, ProcessId)> {
        let stream = match self.root {
            Some(process) => connect_in_root(process, &self.path, timeout)?,
            None => connect_within(&self.path, timeout)?,
        };
        let peer = getsockopt(&stream, PeerCredentials).map_err(io::Error::from)?;
        let (pid, user_id) = (u32::try_from(peer.pid()).unwrap_or(0), peer.uid());
        let is_right = match &self.listener {
            Listener::Process(process) => pid == process.pid && process.is_there(),
            Listener::Users(users) => users.contains(user_id),
        };
        let whose = match &self.listener {
            Listener::Process(process) => format!("not the VM's process {}", process.pid),
            Listener::Users(_) => "whose user is not in hosts.users".to_owned(),
        };
        match ProcessId::of_pid(pid).filter(|_| is_right) {
            Some(process) => Ok((stream, process)),
            None => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "process {pid} of user {} listens there, {whose}",
                    name_of(user_id)
                ),
            )),
        }
    }
}

/// Reads what a process chooses of its own files in `/proc`, such as its command line, whose length it chooses as well.
///
/// # Errors
///
/// [`io::ErrorKind::FileTooLarge`] if it is longer than any that the kernel starts a program with.
pub(crate) fn read_own(pid: u32, file: &str) -> io::Result<Vec<u8>> {
    read_to(
        fs::File::open(format!("/proc/{pid}/{file}"))?,
        OWN_BYTES_MAX,
    )
}

/// Reads a file to its end.
fn read_to(file: fs::File, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)?;
    match bytes.len() as u64 > bytes_max {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        false => Ok(bytes),
    }
}

/// Reads a regular file by its path in the file system of `process`; never waits for somebody who is to write it.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidInput`] if it is none; [`io::ErrorKind::FileTooLarge`] if it has more than `bytes_max` bytes.
pub(crate) fn read_in_root(process: ProcessId, path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let found = find_in_root(process, path)?;
    let kind = fstat(&found)?;
    let is_regular = FileType::from_raw_mode(kind.st_mode) == FileType::RegularFile;
    // Files of the kernel have no size, and some of them (`/proc/kmsg`) are read as they come; those of FUSE, as its server likes.
    let waits = kind.st_size == 0 || fstatfs(&found)?.f_type == FUSE_SUPER_MAGIC;
    if !is_regular || waits {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is no regular file with contents",
        ));
    }
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    read_to(open(path, flags, Mode::empty())?.into(), bytes_max)
}

/// Opens a socket's file, not the socket, by its path in the file system of `process`.
fn open_in_root(process: ProcessId, path: &Path) -> io::Result<OwnedFd> {
    let socket = find_in_root(process, path)?;
    match FileType::from_raw_mode(fstat(&socket)?.st_mode) {
        FileType::Socket => Ok(socket),
        _ => Err(no_socket()),
    }
}

/// Finds a file, without opening it, by its path in the file system of `process`; links are resolved within that
/// file system. A process that opened it before it changed its root directory (`-chroot`) has it below ours.
fn find_in_root(process: ProcessId, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let directory = |path: &str| open(path, flags | OFlags::DIRECTORY, Mode::empty());
    let root = directory(&format!("/proc/{}/root", process.pid))?;
    if !process.is_there() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let open_below = |root: &OwnedFd| {
        let flags = flags | OFlags::NOFOLLOW;
        openat2(root, path, flags, Mode::empty(), resolve)
    };
    Ok(match open_below(&root) {
        Err(rustix::io::Errno::NOENT) if has_our_mounts(process) => open_below(&directory("/")?)?,
        opened => opened?,
    })
}

/// Whether a process has the mounts of this one.
fn has_our_mounts(process: ProcessId) -> bool {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    let ours = namespace("self");
    ours.is_some() && namespace(&process.pid.to_string()) == ours
}

fn no_socket() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is no socket")
}

/// Connects to a socket by its path in the file system of `process`.
fn connect_in_root(process: ProcessId, path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket = open_in_root(process, path)?;
    // Connects to exactly the socket that was found, even if its path has been reused.
    let link = format!("/proc/self/fd/{}", socket.as_raw_fd());
    connect_within(Path::new(&link), timeout)
}

/// Connects, or returns [`io::ErrorKind::WouldBlock`] if that takes longer than `timeout`: clients that wait for a
/// monitor in use fill its queue, after which the next one would wait forever.
pub(crate) fn connect_within(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Zero would mean no limit.
    let timeout = timeout.max(Duration::from_millis(1));
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    connect(&socket, &address)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_skip::write_program;
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;
    use std::process::{Child, Command};

    const TIMEOUT: Duration = Duration::from_secs(5);

    fn ourselves() -> ProcessId {
        ProcessId::of_pid(std::process::id()).unwrap()
    }

    struct KilledOnDrop(Child);

    impl Drop for KilledOnDrop {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A process whose executable, a copy of sleep(1), has this mode.
    fn sleeper(folder: &Path, mode: u32) -> KilledOnDrop {
        let program = folder.join("qemu-system-evil");
        write_program(&program, fs::read("/bin/sleep").unwrap());
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        KilledOnDrop(Command::new(program).arg("60").spawn().unwrap())
    }

    #[test]
    fn a_process_is_written_with_its_start_and_read_again() {
        let process = ourselves();
        assert_eq!(process.to_string().parse(), Ok(process));
        assert!(process.is_there());
        let later = ProcessId {
            start_ticks: process.start_ticks + 1,
            ..process
        };
        assert!(!later.is_there());
        assert_eq!(later.mapped_bytes(), None);
        let mapped_bytes = || process.mapped_bytes().unwrap();
        let before = mapped_bytes();
        assert!(before > 1 << 20);
        // Of its own, which stays untouched: 256 MiB, more than others can unmap meanwhile.
        let area = std::hint::black_box(Vec::<u8>::with_capacity(256 << 20));
        assert!(mapped_bytes() > before + (128 << 20));
        drop(area);
        assert!("12".parse::<ProcessId>().is_err());
    }

    #[test]
    fn a_process_id_that_was_used_again_is_another_vm() {
        let folder = tempfile::tempdir().unwrap();
        let sleeper = sleeper(folder.path(), 0o755);
        let process = ProcessId::of_pid(sleeper.0.id()).unwrap();
        let earlier = ProcessId {
            start_ticks: process.start_ticks - 1,
            ..process
        };
        let found = |process: ProcessId| crate::find(&process.to_string()).unwrap_err();
        assert!(matches!(found(earlier), VmError::OtherProcess { .. }));
        assert!(matches!(found(process), VmError::NoGuestRam { .. }));
    }

    #[test]
    fn an_executable_that_others_may_write_makes_no_vm_and_a_deleted_one_does() {
        let folder = tempfile::tempdir().unwrap();
        let users = AllowedUsers::default();
        let good = sleeper(folder.path(), 0o755);
        users.check(good.0.id()).unwrap();
        fs::remove_file(folder.path().join("qemu-system-evil")).unwrap();
        users.check(good.0.id()).unwrap();
        for mode in [0o775, 0o757] {
            let folder = tempfile::tempdir().unwrap();
            let bad = sleeper(folder.path(), mode);
            let error = users.check(bad.0.id()).unwrap_err().to_string();
            assert!(error.contains("may write its executable"), "{error}");
        }
    }

    #[test]
    fn files_that_somebody_writes_while_they_are_read_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("vm.conf");
        fs::write(&file, "[memory]").unwrap();
        let read = |path: &Path, most| read_in_root(ourselves(), path, most);
        assert_eq!(read(&file, 8).unwrap(), b"[memory]");
        let error = read(&file, 7).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        // As /proc/kmsg, whose reader waits, but without taking messages from anybody.
        for path in ["/proc/version", "/dev/null", "/proc"] {
            let error = read(path.as_ref(), 1 << 20).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path}");
        }
        assert!(
            read_own(std::process::id(), "cmdline")
                .unwrap()
                .ends_with(&[0])
        );
    }

    #[test]
    fn users_are_found_by_name_and_by_number() {
        let users = AllowedUsers::of_names(&["root", "4711"]).unwrap();
        assert!(users.contains(0) && users.contains(4711) && !users.contains(4712));
        let unknown = AllowedUsers::of_names(&["root", "nobody of that name"]);
        assert_eq!(unknown, Err("nobody of that name".to_owned()));
        assert!(AllowedUsers::default().contains(0));
    }

    #[test]
    fn only_the_right_listener_is_connected_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let ours = PeerSocket::of_process(ourselves(), path.clone());
        assert_eq!(ours.connect(TIMEOUT).unwrap().1, ourselves());
        let other = sleeper(folder.path(), 0o755);
        let other = ProcessId::of_pid(other.0.id()).unwrap();
        let error = PeerSocket::of_process(other, path.clone())
            .connect(TIMEOUT)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        let of_users = |users| PeerSocket {
            path: path.clone(),
            root: None,
            listener: Listener::Users(users),
        };
        of_users(AllowedUsers::default()).connect(TIMEOUT).unwrap();
    }

    #[test]
    fn a_link_in_the_place_of_a_socket_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let link = folder.path().join("link");
        symlink(&path, &link).unwrap();
        let error = PeerSocket::of_process(ourselves(), link)
            .connect(TIMEOUT)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }

    #[test]
    fn a_listener_whose_queue_is_full_does_not_keep_us() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        let mut waiting = Vec::new();
        let error = loop {
            match connect_within(&socket, Duration::from_millis(1)) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
