//! Configuration of a guest, and QEMU's arguments for it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use plimsoll_flow::Accelerator;
use plimsoll_vm::Detection;

use crate::{GuestError, GuestImage, ProgramsImage};

/// The firmware of a guest without an operating system, in its directory.
pub(super) const ROM: &str = "guest.rom";
/// The balloon: it gives nothing back by itself when the guest runs out of memory.
const BALLOON: &str = "virtio-balloon-pci,id=balloon0,deflate-on-oom=off";
/// Longest serial of a virtio disk.
const SERIAL_BYTES_MAX: usize = 20;
/// Longest kernel command line of x86.
const KERNEL_LINE_BYTES_MAX: usize = 2047;

/// What a guest boots.
#[derive(Debug, Clone, Copy)]
pub enum Boot<'a> {
    /// Linux, with a workload as its `/init`.
    Linux(&'a GuestImage),
    /// A Debian with real programs, of which the workload names a job: lab/programs.
    Programs(&'a ProgramsImage),
    /// A workload without an operating system, of guest/kvm; it has at most two virtual CPUs and no drivers.
    Bare,
}

impl Boot<'_> {
    /// RAM in MiB of a guest whose workload has an array of `array_mib`.
    pub fn memory_mib(self, array_mib: u64) -> u64 {
        match self {
            // A kernel needs 1.6 % of the RAM for its own tables, and page tables of the array.
            Self::Linux(_) | Self::Programs(_) => array_mib + 96 + array_mib / 32,
            Self::Bare => plimsoll_kvm_guest::memory_mib(array_mib),
        }
    }
}

impl<'a> From<&'a ProgramsImage> for Boot<'a> {
    fn from(image: &'a ProgramsImage) -> Self {
        Self::Programs(image)
    }
}

impl<'a> From<&'a GuestImage> for Boot<'a> {
    fn from(image: &'a GuestImage) -> Self {
        Self::Linux(image)
    }
}

/// Which accelerator a guest is to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AcceleratorChoice {
    /// Whatever [`plimsoll_vm::detect`] returns for what the guest boots.
    #[default]
    Auto,
    /// KVM, or fail.
    Kvm,
    /// TCG.
    Tcg,
}

/// Which of our kernels a guest boots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GuestKernel {
    /// Debian 12's Linux 6.1.
    #[default]
    V6_1,
    /// Linux 6.12 of bookworm-backports.
    V6_12,
}

impl GuestKernel {
    /// Version and patch level, as `6.1`.
    pub fn series(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }
}

/// What serves a guest's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskBackend {
    /// A vhost-user-blk daemon, which also gives the disk its serial.
    VhostUser {
        /// The socket it listens at.
        socket: PathBuf,
        /// Queues, from 1.
        queues: u16,
        /// Time between two tries to reach a daemon that is gone, in s; 0: none, and its end
        /// is the end of the disk.
        reconnect_s: u32,
    },
    /// QEMU itself, from a raw image.
    Image {
        /// A file or a block device.
        path: PathBuf,
        /// The serial, at most 20 bytes: letters, digits, `-`, `_` and `.`; empty for none.
        serial: String,
        /// Whether the guest cannot write.
        read_only: bool,
    },
}

/// A virtio disk of a guest; the first one is its `/dev/vda`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestDisk {
    /// What serves it.
    pub backend: DiskBackend,
    /// Options of its device for QEMU beside ours, as `queue-size=64`; may be empty.
    pub options: String,
}

impl GuestDisk {
    /// A disk of one queue served by a daemon, whose reconnection is tried each second.
    pub fn vhost_user(socket: impl Into<PathBuf>) -> Self {
        Self {
            backend: DiskBackend::VhostUser {
                socket: socket.into(),
                queues: 1,
                reconnect_s: 1,
            },
            options: String::new(),
        }
    }

    /// A disk served by QEMU from a raw image, with a serial or an empty one.
    pub fn image(path: impl Into<PathBuf>, serial: &str) -> Self {
        Self {
            backend: DiskBackend::Image {
                path: path.into(),
                serial: serial.to_owned(),
                read_only: false,
            },
            options: String::new(),
        }
    }

    /// QEMU's arguments for the guest's disk `index`.
    fn arguments(&self, index: usize) -> Result<Vec<OsString>, GuestError> {
        let with_path = |before: String, path: &Path, after: String| {
            let mut value = OsString::from(before);
            value.push(escape_commas(path));
            value.push(after);
            value
        };
        let (backend, mut device) = match &self.backend {
            DiskBackend::VhostUser {
                socket,
                queues,
                reconnect_s,
            } => {
                let before = format!("socket,id=disk{index},reconnect={reconnect_s},path=");
                (
                    ["-chardev".into(), with_path(before, socket, String::new())],
                    format!("vhost-user-blk-pci,chardev=disk{index},num-queues={queues}"),
                )
            }
            DiskBackend::Image {
                path,
                serial,
                read_only,
            } => {
                if serial.len() > SERIAL_BYTES_MAX || !is_plain(serial) {
                    return Err(GuestError::GuestConfig {
                        what: format!(
                            "the serial {serial:?}: expected at most {SERIAL_BYTES_MAX} letters, \
                             digits, '-', '_' and '.'"
                        ),
                    });
                }
                let before = format!("if=none,id=disk{index},format=raw,discard=unmap,file=");
                let read_only = if *read_only { "on" } else { "off" };
                let mut device = format!("virtio-blk-pci,drive=disk{index}");
                if !serial.is_empty() {
                    device.push_str(",serial=");
                    device.push_str(serial);
                }
                (
                    [
                        "-drive".into(),
                        with_path(before, path, format!(",read-only={read_only}")),
                    ],
                    device,
                )
            }
        };
        if !self.options.is_empty() {
            device.push(',');
            device.push_str(&self.options);
        }
        let mut arguments: Vec<OsString> = backend.into();
        arguments.extend(["-device".into(), device.into()]);
        Ok(arguments)
    }
}

/// Whether a text holds letters, digits, `-`, `_` and `.` alone.
fn is_plain(text: &str) -> bool {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    text.chars().all(allowed)
}

/// Configuration of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestConfig {
    /// Its name: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Its RAM in MiB. The kernel keeps about 70 MiB of it for itself.
    pub memory_mib: u64,
    /// Its virtual CPUs, from 1. Under TCG the workload starts all but the first.
    pub vcpus: u32,
    /// What it runs, as words `key=value` of guest/workload/README.md without their
    /// prefix: `"workload=zipf mib=64"`.
    pub workload: String,
    /// The accelerator.
    pub accelerator: AcceleratorChoice,
    /// The kernel that [`GuestImage::for_guest`] finds for it.
    pub kernel: GuestKernel,
    /// Its disks, in order.
    pub disks: Vec<GuestDisk>,
    /// Whether it has a balloon, whose driver it loads before the workload begins.
    pub balloon: bool,
    /// Whether a virtio-mem device is among its extra arguments, whose driver it loads before the workload begins.
    pub memory_device: bool,
    /// Whether it gets a monitor socket.
    pub qmp: bool,
    /// Arguments for QEMU beside ours.
    pub extra_arguments: Vec<String>,
    /// Arguments for machine and RAM in place of ours, which make the RAM a memfd that is mapped shared.
    pub ram: Option<Vec<String>>,
    /// Words before QEMU's command line, as `setpriv --reuid=nobody`.
    pub prefix: Vec<String>,
}

impl GuestConfig {
    /// A guest of one virtual CPU and 192 MiB with a monitor.
    pub fn new(name: &str, workload: &str) -> Self {
        Self {
            name: name.to_owned(),
            memory_mib: 192,
            vcpus: 1,
            workload: workload.to_owned(),
            accelerator: AcceleratorChoice::Auto,
            kernel: GuestKernel::default(),
            disks: Vec::new(),
            balloon: false,
            memory_device: false,
            qmp: true,
            extra_arguments: Vec::new(),
            ram: None,
            prefix: Vec::new(),
        }
    }

    /// The kernel's command line.
    fn kernel_line(&self, accelerator: Accelerator) -> Result<String, GuestError> {
        let wrong = |what: String| Err(GuestError::GuestConfig { what });
        if self.name.is_empty() || !is_plain(&self.name) {
            return wrong(format!(
                "the name {:?}: expected letters, digits, '-', '_' and '.'",
                self.name
            ));
        }
        if self.memory_mib == 0 || self.vcpus == 0 {
            return wrong(format!(
                "{} MiB and {} virtual CPUs: expected at least one of each",
                self.memory_mib, self.vcpus
            ));
        }
        // Quiet keeps the kernel's lines from running into ours; huge pages would hide
        // which pages are used; a panic must end QEMU, not wait; and on a loaded host an emulated
        // timer may be late, which the kernel's check would take for a broken one. Tests of ciphers
        // and the choice of an address are a quarter of an emulated kernel's start.
        let mut line = String::from(
            "console=ttyS0 quiet panic=-1 transparent_hugepage=never no_timer_check nokaslr cryptomgr.notests",
        );
        // QEMU 7.2's TCG may run an instruction that another CPU is just patching, as a kernel often
        // does while it starts: the workload starts the other CPUs itself when that is over.
        if accelerator == Accelerator::Tcg && self.vcpus > 1 {
            line.push_str(" maxcpus=1");
        }
        for word in self.workload.split_ascii_whitespace() {
            if !word
                .chars()
                .all(|letter| letter.is_ascii_graphic() && letter != '"')
            {
                return wrong(format!("the workload word {word:?}: expected plain ASCII"));
            }
            line.push_str(" plimsoll.");
            line.push_str(word);
        }
        if line.len() > KERNEL_LINE_BYTES_MAX {
            return wrong(format!(
                "a kernel command line of {} bytes: expected at most {KERNEL_LINE_BYTES_MAX}",
                line.len()
            ));
        }
        Ok(line)
    }

    /// QEMU's arguments.
    pub(super) fn arguments(
        &self,
        boot: Boot<'_>,
        detection: &Detection,
        folder: &Path,
        socket: Option<&Path>,
    ) -> Result<Vec<OsString>, GuestError> {
        let accelerator = detection.accelerator;
        let kernel_line = self.kernel_line(accelerator)?;
        let memory = self.memory_mib;
        let mut arguments: Vec<OsString> = Vec::new();
        let mut add = |option: &str, value: String| {
            arguments.push(option.into());
            arguments.push(value.into());
        };
        add("-name", format!("guest={},debug-threads=on", self.name));
        add("-accel", accelerator.to_string());
        let cpu = match accelerator {
            Accelerator::Kvm => detection.cpu_model.as_str(),
            // QEMU 7.2's TCG gets 16-byte compare-and-exchange wrong in newer kernels.
            Accelerator::Tcg => "qemu64,-cx16",
        };
        add("-cpu", cpu.into());
        add("-smp", self.vcpus.to_string());
        if self.ram.is_none() {
            add("-machine", "q35,memory-backend=ram".into());
            add("-m", format!("{memory}M"));
            add(
                "-object",
                format!("memory-backend-memfd,id=ram,size={memory}M,share=on"),
            );
        }
        add("-display", "none".into());
        add("-chardev", "stdio,id=console,signal=off".into());
        add("-serial", "chardev:console".into());
        arguments.extend(self.ram.iter().flatten().map(Into::into));
        arguments.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(Into::into));
        match boot {
            Boot::Linux(image) => {
                arguments.extend(["-kernel".into(), image.kernel.clone().into()]);
                arguments.extend(["-initrd".into(), image.initrd.clone().into()]);
                arguments.extend(["-append".into(), kernel_line.into()]);
            }
            Boot::Programs(image) => {
                arguments.extend(["-kernel".into(), image.kernel.clone().into()]);
                // Its driver is built into the kernel.
                let mut drive = OsString::from("if=none,id=programs,format=raw,snapshot=on,file=");
                drive.push(escape_commas(&image.disk));
                arguments.extend(["-drive".into(), drive]);
                arguments
                    .extend(["-device", "nvme,drive=programs,serial=programs"].map(Into::into));
                let line = format!("root=/dev/nvme0n1 rw init=/init.sh {kernel_line}");
                arguments.extend(["-append".into(), line.into()]);
            }
            Boot::Bare => {
                let vcpus_max = plimsoll_kvm_guest::VCPUS_MAX;
                if self.vcpus > vcpus_max || self.balloon || !self.disks.is_empty() {
                    return Err(GuestError::GuestConfig {
                        what: format!(
                            "a guest without an operating system has at most {vcpus_max} virtual CPUs, no balloon and no disks"
                        ),
                    });
                }
                let rom = folder.join(ROM);
                arguments.extend(plimsoll_kvm_guest::arguments(&rom, &self.workload));
            }
        }
        if let Some(socket) = socket {
            let mut monitor = OsString::from("unix:");
            monitor.push(escape_commas(socket));
            monitor.push(",server=on,wait=off");
            arguments.extend(["-qmp".into(), monitor]);
        }
        for (index, disk) in self.disks.iter().enumerate() {
            arguments.extend(disk.arguments(index)?);
        }
        if self.balloon {
            arguments.extend(["-device", BALLOON].map(Into::into));
        }
        arguments.extend(self.extra_arguments.iter().map(Into::into));
        Ok(arguments)
    }
}

/// A comma ends a value in QEMU's option lists unless it is doubled.
fn escape_commas(path: &Path) -> OsString {
    use std::os::unix::ffi::OsStringExt as _;
    let mut escaped = Vec::new();
    for &byte in path.as_os_str().as_bytes() {
        escaped.push(byte);
        if byte == b',' {
            escaped.push(byte);
        }
    }
    OsString::from_vec(escaped)
}

#[cfg(test)]
mod tests {
    use plimsoll_vm::KvmSupport;

    use super::*;

    #[test]
    fn words_reach_the_kernel_with_their_prefix() {
        let config = GuestConfig::new("a", "workload=zipf  mib=64");
        let line = config.kernel_line(Accelerator::Tcg).unwrap();
        assert!(line.ends_with(" plimsoll.workload=zipf plimsoll.mib=64"));
    }

    #[test]
    fn only_an_emulated_kernel_starts_on_one_cpu_of_several() {
        let boots_on_one = |accelerator, vcpus| {
            let config = GuestConfig {
                vcpus,
                ..GuestConfig::new("a", "workload=idle")
            };
            let line = config.kernel_line(accelerator).unwrap();
            line.contains(" maxcpus=1 ")
        };
        assert!(boots_on_one(Accelerator::Tcg, 2));
        assert!(!boots_on_one(Accelerator::Tcg, 1));
        assert!(!boots_on_one(Accelerator::Kvm, 2));
    }

    #[test]
    fn a_guest_that_cannot_be_is_refused_before_anything_starts() {
        let image = GuestImage {
            kernel: "/none".into(),
            initrd: "/none".into(),
        };
        let good = GuestConfig {
            accelerator: AcceleratorChoice::Tcg,
            ..GuestConfig::new("a", "workload=idle")
        };
        let tcg = Detection {
            accelerator: Accelerator::Tcg,
            kvm: KvmSupport::None,
            cpu_model: "host".into(),
            reason: String::new(),
        };
        let refused = |config: GuestConfig| {
            config
                .arguments((&image).into(), &tcg, Path::new("/none"), None)
                .unwrap_err()
                .to_string()
        };
        let with_name = |name: &str| GuestConfig {
            name: name.into(),
            ..good.clone()
        };
        assert!(refused(with_name("a,b")).contains("the name \"a,b\""));
        assert!(refused(with_name("")).contains("the name"));
        let no_cpu = GuestConfig {
            vcpus: 0,
            ..good.clone()
        };
        assert!(refused(no_cpu).contains("0 virtual CPUs"));
        let long = GuestConfig {
            workload: "workload=idle ".repeat(200),
            ..good.clone()
        };
        assert!(refused(long).contains("expected at most 2047"));
        let three = GuestConfig {
            vcpus: 3,
            ..good.clone()
        };
        let bare = three.arguments(Boot::Bare, &tcg, Path::new("/none"), None);
        let refused = bare.unwrap_err().to_string();
        assert!(refused.contains("at most 2 virtual CPUs"), "{refused}");
    }

    #[test]
    fn disks_become_arguments_in_order() {
        let words = |disk: &GuestDisk| -> Vec<String> {
            let arguments = disk.arguments(3).unwrap().into_iter();
            arguments.map(|word| word.into_string().unwrap()).collect()
        };
        assert_eq!(
            words(&GuestDisk::vhost_user("/run/a,b")),
            [
                "-chardev",
                "socket,id=disk3,reconnect=1,path=/run/a,,b",
                "-device",
                "vhost-user-blk-pci,chardev=disk3,num-queues=1",
            ]
        );
        let disk = GuestDisk {
            options: "queue-size=64".into(),
            ..GuestDisk::image("/tmp/x", "plimsoll-swap")
        };
        assert_eq!(
            words(&disk),
            [
                "-drive",
                "if=none,id=disk3,format=raw,discard=unmap,file=/tmp/x,read-only=off",
                "-device",
                "virtio-blk-pci,drive=disk3,serial=plimsoll-swap,queue-size=64",
            ]
        );
        let refused = GuestDisk::image("/tmp/x", "a,b").arguments(0).unwrap_err();
        assert!(
            refused.to_string().contains("the serial \"a,b\""),
            "{refused}"
        );
    }

    #[test]
    fn commas_in_a_path_are_doubled() {
        assert_eq!(escape_commas(Path::new("/a,b")), OsString::from("/a,,b"));
    }
}
