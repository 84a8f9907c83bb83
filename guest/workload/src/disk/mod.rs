//! Workloads on a disk: files or blocks of signed content, verified at every read.
//!
//! Each begins with the machine around it ([`setup`]): kernel modules, the device mapper, swap.
//! Not here: making file systems. The host formats the image; crash, crypt, io and raw use it raw.

mod block;
mod buffer;
mod counters;
mod crash;
mod dm;
mod files;
mod fio;
mod flush;
mod io;
mod kernel_log;
mod raw;
mod serve;
pub mod settings;
mod setup;
mod signed;
mod stress;
mod tally;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

pub use settings::Settings;
pub use setup::{load_drivers, load_liar, swap_for_memory};

use crate::WorkloadError;
use crate::clock::Time;
use crate::console::Line;
use kernel_log::KernelLog;
use settings::Work;
use setup::Ready;
use tally::Tally;

/// Where the disk's file system is mounted.
const MOUNT: &str = "/disk";

/// What a workload uses.
struct Scene<'a> {
    settings: &'a Settings,
    ready: &'a Ready,
}

impl Scene<'_> {
    /// Reports the start of a phase, and waits, so that the host can read its own counters.
    fn phase(&self, name: &str) {
        Line::new("phase")
            .with("name", name)
            .with("pause_ms", self.settings.pause_ms)
            .print();
        thread::sleep(Duration::from_millis(self.settings.pause_ms));
    }

    fn provoke(&self) -> Result<(), WorkloadError> {
        setup::provoke(&self.settings.provoke)
    }

    fn mount(&self) -> Result<(), WorkloadError> {
        std::fs::create_dir_all(MOUNT).map_err(WorkloadError::during(MOUNT))?;
        let device = &self.ready.device;
        mount(device, Path::new(MOUNT), c"ext4", MountFlags::NOATIME, None)
            .map_err(std::io::Error::from)
            .map_err(WorkloadError::during(format_args!(
                "mounting {}",
                device.display()
            )))
    }

    /// Creates a directory in the file system.
    fn directory(&self, name: &str) -> Result<PathBuf, WorkloadError> {
        let directory = Path::new(MOUNT).join(name);
        std::fs::create_dir_all(&directory).map_err(WorkloadError::during(directory.display()))?;
        Ok(directory)
    }

    fn unmount(&self) -> Result<(), WorkloadError> {
        unmount(MOUNT, UnmountFlags::empty())
            .map_err(std::io::Error::from)
            .map_err(WorkloadError::during(format_args!("unmounting {MOUNT}")))
    }
}

/// Runs a disk workload to its end; the machine must be ours alone.
pub fn run(settings: &Settings) -> Result<(), WorkloadError> {
    if !crate::machine::is_init() {
        return Err(WorkloadError::Lacking {
            what: "disk workloads run as a machine's init only".into(),
        });
    }
    // Before all that may complain.
    let mut log = {
        crate::machine::mount_at("/dev", "devtmpfs")?;
        KernelLog::from_now().map_err(WorkloadError::during("/dev/kmsg"))?
    };
    let result = run_logged(settings, &mut log);
    if result.is_err() {
        // Why a module refused, say.
        let _ = log.read();
    }
    result
}

fn run_logged(settings: &Settings, log: &mut KernelLog) -> Result<(), WorkloadError> {
    let crypt = matches!(settings.work, Work::Crypt { .. });
    let ready = Ready::new(&settings.machine, crypt, !settings.provoke.is_empty())?;
    // After the modules: to load one patches the kernel's text.
    let cpus = crate::machine::start_cpus()?;
    let start = Time::now();
    Line::new("ready")
        .with("workload", &settings.name)
        .with("pages", setup::device_bytes(&ready.device)? / 4096)
        .with("cpus", cpus)
        .with("kernel_ms", start.ms())
        .print();
    let scene = Scene {
        settings,
        ready: &ready,
    };
    let tally = match &settings.work {
        Work::Signed(signed) => signed::run(&scene, signed)?,
        Work::Crypt { pieces, cipher } => signed::run_encrypted(&scene, pieces, cipher)?,
        Work::Stress(stress) => stress::run(&scene, stress)?,
        Work::Serve(serve) => serve::run(&scene, serve)?,
        Work::Crash(crash) => crash::run(&scene, crash)?,
        Work::Io(io) => io::run(&scene, io)?,
        Work::Raw(raw) => raw::run(&scene, raw)?,
        Work::Fio(fio) => fio::run(&scene, fio)?,
    };
    scene.phase("end");
    ready.tell_modules()?;
    // Without our modules, what they forgot is memory that nothing refers to.
    if settings.machine.unload || kernel_log::has_leak_detector() {
        ready.unload()?;
    }
    log.search_leaks()
        .map_err(WorkloadError::during("searching leaks"))?;
    tell_end(log, &tally, start)?;
    if settings.machine.stay {
        loop {
            thread::sleep(Duration::from_secs(3600));
        }
    }
    Ok(())
}

fn tell_end(log: &mut KernelLog, tally: &Tally, start: Time) -> Result<(), WorkloadError> {
    log.read().map_err(WorkloadError::during("/dev/kmsg"))?;
    Line::new("result")
        .with("name", "kernel")
        .with("complaints", log.complaints)
        .with("gaps", log.gaps)
        .print();
    Line::new("done")
        .with("ops", tally.ops)
        .with("ms", Time::now().ms_since(start))
        .with("mismatches", tally.mismatches)
        .print();
    Ok(())
}
