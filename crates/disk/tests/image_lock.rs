//! An image is used by our server or by QEMU, never by both: whoever comes first keeps it.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use plimsoll_disk::{Direct, DiskError, DiskOptions, ImageLock, Machine, MachineOptions, Socket};
use plimsoll_skip::{Lack, skip};
use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

/// Serves the image, until the machine is dropped.
fn serve(image: &Path, read_only: bool) -> Result<Machine, DiskError> {
    let socket = image.with_extension("socket");
    let _ = fs::remove_file(&socket);
    Machine::new(MachineOptions {
        disks: vec![DiskOptions {
            image: image.to_owned(),
            socket: Socket::Path(socket),
            read_only,
            serial: "test".into(),
            queues: 1,
            direct: Direct::Auto,
        }],
        ..MachineOptions::default()
    })
}

/// The lock for which serving the image is refused, if it is.
fn refused(image: &Path, read_only: bool) -> Option<ImageLock> {
    match serve(image, read_only) {
        Ok(_) => None,
        Err(DiskError::Locked { lock, .. }) => Some(lock),
        Err(error) => panic!("{error}"),
    }
}

/// A folder with an image.
fn place() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    (folder, image)
}

/// A program of QEMU in the background.
struct Qemu(Pid);

impl Qemu {
    /// The storage daemon, exporting the image. An error is what it says.
    fn storage_daemon(image: &Path, read_only: bool) -> Option<Result<Self, String>> {
        let (name, socket) = (image.display(), image.with_extension("qemu"));
        let mut command = Command::new("qemu-storage-daemon");
        let only = if read_only { "on" } else { "off" };
        let writable = if read_only { "off" } else { "on" };
        let socket = socket.display();
        command.args([
            "--blockdev",
            &format!("driver=file,node-name=disk,filename={name},read-only={only}"),
            "--export",
            &format!("type=vhost-user-blk,id=export,node-name=disk,writable={writable},addr.type=unix,addr.path={socket}"),
            "--daemonize",
            "--pidfile",
        ]);
        Self::start(command, image)
    }

    /// A VM that has the image as its disk, and has not begun to run.
    fn vm(image: &Path) -> Option<Result<Self, String>> {
        let mut command = Command::new("qemu-system-x86_64");
        let name = image.display();
        command.args(["-nodefaults", "-display", "none", "-S", "-machine", "q35"]);
        command.args(["-accel", "tcg", "-device", "virtio-blk-pci,drive=disk"]);
        let drive = format!("driver=file,node-name=disk,filename={name}");
        command.args(["-blockdev", &drive, "-daemonize", "-pidfile"]);
        Self::start(command, image)
    }

    fn start(mut command: Command, image: &Path) -> Option<Result<Self, String>> {
        let pid_file = image.with_extension("pid");
        let told = image.with_extension("told");
        // A pipe would be held open by the program in the background.
        let errors = File::create(&told).unwrap();
        let ended = command
            .arg(&pid_file)
            .stdin(Stdio::null())
            .stderr(errors)
            .status();
        let status = match ended {
            Ok(status) => status,
            Err(error) => {
                skip(Lack::Program, format_args!("{command:?}: {error}"));
                return None;
            }
        };
        if !status.success() {
            return Some(Err(fs::read_to_string(told).unwrap()));
        }
        let pid = fs::read_to_string(pid_file).unwrap();
        let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        Some(Ok(Self(pid)))
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
        while test_kill_process(self.0).is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn what_qemus_storage_daemon_uses_is_not_served() {
    let (_folder, image) = place();
    let Some(writer) = Qemu::storage_daemon(&image, false) else {
        return;
    };
    let writer = writer.unwrap();
    // Its exports let others write; ours does not.
    assert_eq!(refused(&image, false), Some(ImageLock::QemuNeeds));
    assert_eq!(refused(&image, true), Some(ImageLock::QemuNeeds));
    drop(writer);
    assert_eq!(refused(&image, false), None);

    let reader = Qemu::storage_daemon(&image, true).unwrap().unwrap();
    assert_eq!(refused(&image, true), None, "both only read");
    drop(reader);
}

#[test]
fn what_is_served_is_refused_by_qemus_storage_daemon() {
    let (_folder, image) = place();
    let served = serve(&image, false).unwrap();
    let Some(writer) = Qemu::storage_daemon(&image, false) else {
        return;
    };
    let told = writer.err().expect("to be refused");
    assert!(told.contains("Failed to get"), "{told}");
    drop(served);
    let served = serve(&image, true).unwrap();
    let writer = Qemu::storage_daemon(&image, false).unwrap();
    assert!(writer.is_err(), "it would write what we keep");
    let reader = Qemu::storage_daemon(&image, true).unwrap();
    drop(reader.expect("both only read"));
    drop(served);
    Qemu::storage_daemon(&image, false).unwrap().unwrap();
}

#[test]
fn a_vm_of_qemu_and_a_server_keep_each_other_away() {
    let (_folder, image) = place();
    let Some(vm) = Qemu::vm(&image) else { return };
    let vm = vm.unwrap();
    assert_eq!(refused(&image, false), Some(ImageLock::QemuDenies));
    assert_eq!(refused(&image, true), Some(ImageLock::QemuNeeds));
    drop(vm);
    let served = serve(&image, false).unwrap();
    let told = Qemu::vm(&image).unwrap().err().expect("to be refused");
    assert!(told.contains("lock"), "{told}");
    drop(served);
    Qemu::vm(&image).unwrap().unwrap();
}

#[test]
fn two_servers_that_begin_at_once_never_both_write() {
    let (_folder, image) = place();
    let image = &image;
    for round in 0..3 {
        let other = image.with_file_name(format!("link{round}"));
        std::os::unix::fs::symlink(image, &other).unwrap();
        let machines = std::thread::scope(|scope| {
            let one = scope.spawn(|| serve(image, false).ok());
            let two = scope.spawn(|| serve(&other, false).ok());
            [one.join().unwrap(), two.join().unwrap()]
        });
        assert_eq!(machines.iter().flatten().count(), 1);
    }
}

/// A loop device, until it is dropped.
struct Loop(PathBuf);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
    }
}

#[test]
fn a_block_device_is_not_served_while_it_is_mounted_nor_mounted_while_it_is_served() {
    let (_folder, image) = place();
    let made = Command::new("losetup")
        .args(["--find", "--show"])
        .arg(&image)
        .output();
    let device = match made {
        Ok(made) if made.status.success() => String::from_utf8(made.stdout).unwrap(),
        other => return skip(Lack::Root, format_args!("losetup: {other:?}")),
    };
    let device = Loop(device.trim().into());
    // The socket's name comes from the image's, which is not in /dev.
    let link = image.with_file_name("device");
    std::os::unix::fs::symlink(&device.0, &link).unwrap();
    // As mount(2) opens a device.
    let claim = || {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .custom_flags(OFlags::EXCL.bits().cast_signed());
        options.open(&device.0)
    };
    let mounted = claim().unwrap();
    assert_eq!(refused(&link, false), Some(ImageLock::Exclusive));
    assert_eq!(refused(&link, true), None);
    drop(mounted);
    let served = serve(&link, false).unwrap();
    assert!(claim().is_err());
    drop(served);
    claim().unwrap();
}
