//! The machine around a disk workload: modules, disks, the mapper, swap; and its end.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::dm::MappedDevice;
use super::settings::{Machine, Swap};
use crate::WorkloadError;
use crate::clock::Time;
use crate::console::Line;
use crate::machine::mount_at;
use crate::sys::swap_on;

/// Modules, and a file `order` with a line `GROUP FILE` for each, in the order to load them.
const MODULES: &str = "/modules";
const DEBUG: &str = "/sys/kernel/debug";
/// The disk by which plimsoll.ko speaks to the host.
const CONTROL_SERIAL: &str = "plimsoll-control";
/// The disk with programs of a Debian.
pub const TOOLS_SERIAL: &str = "plimsoll-tools";
/// The disk that is swapped to.
const SWAP_SERIAL: &str = "plimsoll-swap";
/// How long a disk may take to appear, in ms.
const DISK_MS: u64 = 20_000;
/// Bytes of a result line before the next one is begun.
const LINE_BYTES: usize = 700;

/// What was set up.
pub struct Ready {
    /// The block device the workload uses.
    pub device: PathBuf,
    /// Name of the virtio disk behind it.
    pub disk: String,
    hcache: Option<MappedDevice>,
    /// Modules of ours that were loaded, the last one first.
    loaded: Vec<&'static str>,
}

impl Ready {
    /// Mounts what is needed, loads modules, finds disks.
    pub fn new(machine: &Machine, crypt: bool, provoke: bool) -> Result<Self, WorkloadError> {
        mount_at("/dev", "devtmpfs")?;
        mount_at(DEBUG, "debugfs")?;
        let modules = Modules::of(Path::new(MODULES))?;
        modules.load("disk", "")?;
        let disk = wait_for_disk(machine.disk.as_deref())?;
        if let Some(on) = machine.mglru {
            switch_mglru(on)?;
        }
        let mut ready = Self {
            device: Path::new("/dev").join(&disk),
            disk,
            hcache: None,
            loaded: Vec::new(),
        };
        if let Some(parameters) = &machine.module {
            let control = disk_with_serial(CONTROL_SERIAL)?;
            let mut words = format!("control=/dev/{control}");
            for (key, value) in parameters {
                words.push_str(&format!(" {key}={value}"));
            }
            modules.load("plimsoll", &words)?;
            ready.loaded.insert(0, "plimsoll");
        }
        if provoke {
            modules.load("test", "")?;
            ready.loaded.insert(0, "plimsoll_test");
        }
        if machine.hcache.is_some() || crypt {
            modules.load("dm", "")?;
        }
        if let Some(words) = &machine.hcache {
            modules.load("hcache", "")?;
            ready.loaded.insert(0, "dm_hcache");
            ready.map_hcache(words)?;
        }
        if crypt {
            modules.load("crypt", "")?;
        }
        start_swap(machine.swap, &modules)?;
        // What was loaded is copied; the files would only take memory.
        fs::remove_dir_all(MODULES).map_err(WorkloadError::during("removing the modules"))?;
        Line::new("result")
            .with("name", "machine")
            .with(
                "kernel",
                rustix::system::uname().release().to_string_lossy(),
            )
            .with("memory_kib", memory_kib("MemTotal")?)
            .with("disk", &ready.disk)
            .with("device", ready.device.display())
            .with("mglru", mglru())
            .print();
        Ok(ready)
    }

    /// Puts the target `hcache` over the disk.
    fn map_hcache(&mut self, words: &str) -> Result<(), WorkloadError> {
        let sectors = device_bytes(&self.device)? / 512;
        let lower = self.device.display();
        let mapped = MappedDevice::new("hcache", sectors, "hcache", &format!("{lower} 0 {words}"))
            .map_err(WorkloadError::during("making the device of target hcache"))?;
        self.device.clone_from(&mapped.path);
        self.hcache = Some(mapped);
        Ok(())
    }

    /// Suspends the device of the target `hcache` for a while, if there is one.
    pub fn suspend(&self, time: Duration) -> Result<(), WorkloadError> {
        let Some(mapped) = &self.hcache else {
            return Ok(());
        };
        let suspended = mapped.suspend().and_then(|()| {
            thread::sleep(time);
            mapped.resume()
        });
        suspended.map_err(WorkloadError::during(
            "suspending the device of target hcache",
        ))
    }

    /// Tells the statistics of our modules.
    pub fn tell_modules(&self) -> Result<(), WorkloadError> {
        if let Some(mapped) = &self.hcache {
            let status = mapped.status();
            let status = status.map_err(WorkloadError::during("status of target hcache"))?;
            Line::new("result")
                .with("name", "dm")
                .rest("text", status)
                .print();
        }
        for module in ["plimsoll", "plimsoll_test"] {
            if self.loaded.contains(&module) {
                tell_stats(module)?;
            }
        }
        Ok(())
    }

    /// Takes the mapped device and our modules away.
    pub fn unload(mut self) -> Result<(), WorkloadError> {
        if let Some(mapped) = self.hcache.take() {
            let removed = mapped.remove();
            removed.map_err(WorkloadError::during(
                "removing the device of target hcache",
            ))?;
        }
        for module in &self.loaded {
            let name = CString::new(*module).expect("a name of ours");
            rustix::system::delete_module(&name, 0)
                .map_err(io::Error::from)
                .map_err(WorkloadError::during(format_args!("unloading {module}")))?;
        }
        Line::new("result")
            .with("name", "unloaded")
            .with("modules", self.loaded.len())
            .print();
        Ok(())
    }
}

/// Triggers the configured faults of plimsoll_test.ko.
pub fn provoke(faults: &[(String, String)]) -> Result<(), WorkloadError> {
    for (file, text) in faults {
        write(&format!("{DEBUG}/plimsoll_test/{file}"), text)?;
    }
    Ok(())
}

/// Lines `NAME VALUE` of a module's statistics, as many on one line as go there.
fn tell_stats(module: &str) -> Result<(), WorkloadError> {
    let path = format!("{DEBUG}/{module}/stats");
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        text => text.map_err(WorkloadError::during(&path))?,
    };
    let start = || Line::new("result").with("name", module);
    let mut line = start();
    for pair in text.lines() {
        let Some((name, value)) = pair.split_once(' ') else {
            continue;
        };
        line = line.with(name, value.trim().replace(' ', "_"));
        if line.len() > LINE_BYTES {
            line.print();
            line = start();
        }
    }
    line.print();
    Ok(())
}

/// Loads the drivers of the machine's balloon and of its memory device, if it has them and the initrd has modules.
pub fn load_drivers() -> Result<(), WorkloadError> {
    let directory = Path::new(MODULES);
    if !directory.exists() {
        return Ok(());
    }
    let has = |ids: &[&str]| has_virtio(ids).map_err(WorkloadError::during(PCI_DEVICES));
    let modules = Modules::of(directory)?;
    if has(&["0x1002", "0x1045"])? {
        modules.load("balloon", "")?;
    }
    if has(&["0x1058"])? {
        // What is plugged is used at once, and only for what can be moved away again.
        write(AUTO_ONLINE, "online_movable")?;
        modules.load("mem", "")?;
    }
    Ok(())
}

/// Falsifies the balloon's statistics with these parameters of plimsoll_liar.ko, if there are any.
pub fn load_liar(parameters: &[(String, String)]) -> Result<(), WorkloadError> {
    if parameters.is_empty() {
        return Ok(());
    }
    let words = parameters
        .iter()
        .map(|(name, value)| format!("{name}={value}"));
    let words: Vec<_> = words.collect();
    Modules::of(Path::new(MODULES))?.load("liar", &words.join(" "))
}

/// Enables swap as configured for a memory workload; requires to be process 1.
pub fn swap_for_memory(swap: Swap) -> Result<(), WorkloadError> {
    if swap == Swap::None {
        return Ok(());
    }
    if !crate::machine::is_init() {
        return Err(WorkloadError::Lacking {
            what: "swap is set up by a machine's init only".into(),
        });
    }
    mount_at("/dev", "devtmpfs")?;
    let modules = Modules::of(Path::new(MODULES))?;
    if swap == Swap::Disk {
        modules.load("disk", "")?;
    }
    start_swap(swap, &modules)
}

fn start_swap(swap: Swap, modules: &Modules) -> Result<(), WorkloadError> {
    match swap {
        Swap::None => Ok(()),
        Swap::Disk => swap_to(&Path::new("/dev").join(disk_with_serial(SWAP_SERIAL)?)),
        Swap::Zram { mib } => {
            modules.load("zram", "")?;
            let bytes = mib.map_or(memory_kib("MemTotal")? << 9, |mib| mib << 20);
            write("/sys/block/zram0/disksize", &bytes.to_string())?;
            swap_to(Path::new("/dev/zram0"))
        }
    }
}

/// Where the kernel shows the machine's devices.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";
/// What the kernel does with plugged memory.
const AUTO_ONLINE: &str = "/sys/devices/system/memory/auto_online_blocks";

/// Whether the machine has a virtio device of one of these PCI ids (VIRTIO 1.2, §4.1.2.1).
fn has_virtio(ids: &[&str]) -> io::Result<bool> {
    for entry in fs::read_dir(PCI_DEVICES)? {
        let entry = entry?.path();
        let id = |file| fs::read_to_string(entry.join(file));
        let is_wanted = ids.contains(&id("device")?.trim());
        if is_wanted && id("vendor")?.trim() == "0x1af4" {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Kernel modules of the initrd.
struct Modules {
    /// Group and file, in order.
    files: Vec<(String, PathBuf)>,
}

impl Modules {
    fn of(directory: &Path) -> Result<Self, WorkloadError> {
        let order = fs::read_to_string(directory.join("order")).map_err(WorkloadError::during(
            "this guest's initrd has no kernel modules",
        ))?;
        let file = |line: &str| {
            let (group, file) = line.split_once(' ')?;
            Some((group.to_owned(), directory.join(file)))
        };
        Ok(Self {
            files: order.lines().filter_map(file).collect(),
        })
    }

    /// Loads the modules of a group; the parameters belong to its last one.
    fn load(&self, group: &str, parameters: &str) -> Result<(), WorkloadError> {
        let files: Vec<_> = self.files.iter().filter(|(of, _)| of == group).collect();
        let Some((last, _)) = files.split_last() else {
            return Err(WorkloadError::Lacking {
                what: format!("this guest's initrd has no kernel modules of group {group}"),
            });
        };
        for (_, path) in &files {
            let words = if *path == last.1 { parameters } else { "" };
            let words = CString::new(words).expect("a command line has no zero byte");
            let loaded = File::open(path)
                .and_then(|file| Ok(rustix::system::finit_module(&file, &words, 0)?));
            match loaded {
                // Several groups hold what they share.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                loaded => loaded.map_err(WorkloadError::during(format_args!(
                    "loading {} {}",
                    path.display(),
                    words.to_string_lossy()
                )))?,
            }
        }
        Ok(())
    }
}

/// Names of the virtio disks and their serials.
fn disks() -> io::Result<Vec<(String, String)>> {
    let mut disks = Vec::new();
    for entry in fs::read_dir("/sys/block")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with("vd") {
            let serial = fs::read_to_string(format!("/sys/block/{name}/serial"));
            disks.push((name, serial.unwrap_or_default().trim().to_owned()));
        }
    }
    disks.sort();
    Ok(disks)
}

pub fn disk_with_serial(wanted: &str) -> Result<String, WorkloadError> {
    wait_for(&format!("no disk has the serial {wanted}"), |_, serial| {
        serial == wanted
    })
}

fn wait_for_disk(wanted: Option<&str>) -> Result<String, WorkloadError> {
    match wanted {
        Some(wanted) => wait_for(&format!("there is no disk {wanted}"), |name, serial| {
            name == wanted || serial == wanted
        }),
        None => wait_for("there is no virtio disk", |_, serial| {
            ![CONTROL_SERIAL, SWAP_SERIAL, TOOLS_SERIAL].contains(&serial)
        }),
    }
}

fn wait_for(what: &str, is_it: impl Fn(&str, &str) -> bool) -> Result<String, WorkloadError> {
    let start = Time::now();
    loop {
        let disks = disks().map_err(WorkloadError::during("/sys/block"))?;
        let found = disks.into_iter().find(|(name, serial)| is_it(name, serial));
        if let Some((name, _)) = found
            && Path::new("/dev").join(&name).exists()
        {
            return Ok(name);
        }
        if Time::now().ms_since(start) > DISK_MS {
            return Err(WorkloadError::Lacking { what: what.into() });
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Length of a block device.
pub fn device_bytes(path: &Path) -> Result<u64, WorkloadError> {
    File::open(path)
        .and_then(|mut file| file.seek(SeekFrom::End(0)))
        .map_err(WorkloadError::during(path.display()))
}

/// Writes a swap header (version 1 of `union swap_header`), and swaps there.
fn swap_to(device: &Path) -> Result<(), WorkloadError> {
    let pages = device_bytes(device)? / 4096;
    let last_page = u32::try_from(pages.saturating_sub(1)).unwrap_or(u32::MAX);
    let mut header = vec![0; 4096];
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
    header[4086..].copy_from_slice(b"SWAPSPACE2");
    let swapping = || {
        let mut file = File::options().write(true).open(device)?;
        file.write_all(&header)?;
        file.sync_all()?;
        swap_on(&CString::new(device.as_os_str().as_bytes())?)
    };
    swapping().map_err(WorkloadError::during(format_args!(
        "swapping to {}",
        device.display()
    )))
}

const MGLRU: &str = "/sys/kernel/mm/lru_gen/enabled";

fn switch_mglru(on: bool) -> Result<(), WorkloadError> {
    match fs::write(MGLRU, if on { "y" } else { "n" }) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        written => written.map_err(WorkloadError::during(MGLRU)),
    }
}

/// The switch of the multi-generational LRU as the kernel shows it.
fn mglru() -> String {
    let mut text = String::new();
    match File::open(MGLRU).and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => text.trim().to_owned(),
        Err(_) => "absent".to_owned(),
    }
}

/// Writes to a file of the kernel.
pub fn write(path: &str, text: &str) -> Result<(), WorkloadError> {
    fs::write(path, text).map_err(WorkloadError::during(format_args!(
        "writing {text} to {path}"
    )))
}

/// A line of `/proc/meminfo`, in KiB; 0 if it is not there.
pub fn memory_kib(key: &str) -> Result<u64, WorkloadError> {
    let text =
        fs::read_to_string("/proc/meminfo").map_err(WorkloadError::during("/proc/meminfo"))?;
    let value = text.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?.strip_prefix(':')?;
        rest.split_ascii_whitespace().next()?.parse().ok()
    });
    Ok(value.unwrap_or(0))
}
