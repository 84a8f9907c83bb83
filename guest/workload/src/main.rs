//! The `/init` of a VM that only uses its memory, or a disk, in a defined way.
//!
//! What it runs is chosen on the kernel command line (`plimsoll.workload=zipf
//! plimsoll.mib=128 ...`); events are reported on the console, one line
//! each. Both are described in README.md beside this crate. Every page of the
//! workload's array carries a signature that each visit verifies, and so does every block
//! of a disk, so that whoever traces, moves or caches what the VM uses is caught if a byte changes.
//!
//! Of the memory workloads only the array is touched on purpose: the generators need no tables, so that
//! nearly all references a tracer sees are the workload's own (\[AET\] §4, \[PRL\] §6).
//!
//! As process 1 it mounts what it needs and powers the machine off at its end, on
//! an error and on a panic. Started as any other process it takes the same keys
//! as arguments, and leaves the machine alone; disks are used by process 1 only.

mod access;
mod array;
mod burst;
mod clock;
mod console;
mod disk;
mod keys;
mod machine;
mod run;
mod settings;
mod statistics;
mod sys;

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

use console::Line;
use settings::{Job, Settings};

/// Why the workload did not run, or not to its end.
#[derive(Debug, thiserror::Error)]
enum WorkloadError {
    /// The command line is invalid; nothing was run.
    #[error(transparent)]
    Settings(#[from] keys::SettingsError),
    /// The array does not fit into the machine; nothing was run.
    #[error("{wanted_mib} MiB requested, but only {free_mib} MiB are free")]
    Memory { wanted_mib: u64, free_mib: u64 },
    /// The kernel refused what an init needs; nothing was run.
    #[error("{what}: {source}")]
    Machine {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// The kernel refused what a disk workload does; what it had done is on the disk.
    #[error("{what}: {source}")]
    Disk {
        what: String,
        #[source]
        source: io::Error,
    },
    /// A disk workload needs what the machine does not have.
    #[error("{what}")]
    Lacking { what: String },
}

impl WorkloadError {
    /// Converts an error of the kernel during `what`.
    fn during(what: impl Display) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Disk {
            what: what.to_string(),
            source,
        }
    }
}

fn main() -> ExitCode {
    if !machine::is_init() {
        let text = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
        return match run(&text) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                report(&error);
                ExitCode::FAILURE
            }
        };
    }
    // If this process died, the kernel would only report that init was killed.
    std::panic::set_hook(Box::new(|panic| {
        Line::new("error").rest("message", panic).print();
        machine::power_off();
    }));
    if let Err(error) = machine::prepare().and_then(|text| {
        disk::load_drivers()?;
        run(&text)
    }) {
        report(&error);
    }
    machine::power_off();
    ExitCode::FAILURE
}

fn run(text: &str) -> Result<(), WorkloadError> {
    match Settings::parse(text)? {
        Job::Memory(settings) => {
            disk::swap_for_memory(settings.swap)?;
            disk::load_liar(&settings.lies)?;
            let cpus = machine::start_cpus()?;
            machine::check_memory(settings.array_bytes())?;
            if let Some(ms) = settings.memstat_ms {
                statistics::tell_each(ms);
            }
            if let Some(burst) = settings.burst {
                burst::begin(burst);
            }
            run::run(&settings, cpus);
            Ok(())
        }
        Job::Disk(settings) => disk::run(&settings),
    }
}

fn report(error: &WorkloadError) {
    Line::new("error").rest("message", error).print();
}
