//! The `/init` of a VM that does nothing but use its memory in a known way.
//!
//! What it runs is chosen on the kernel command line (`plimsoll.workload=zipf
//! plimsoll.mib=128 ...`); what happens is told on the console, one line an
//! event. Both are described in README.md beside this crate. Every page of the
//! workload's array carries a signature that each visit verifies, so that whoever
//! traces, moves or caches the VM's memory from outside is caught if a byte changes.
//!
//! Only the array is touched on purpose: the generators need no tables, so that
//! nearly all references a tracer sees are the workload's own (\[AET\] §4, \[PRL\] §6).
//!
//! As process 1 it mounts what it needs and powers the machine off at its end, on
//! an error and on a panic. Started as any other process it takes the same keys
//! as arguments, and leaves the machine alone.
#![forbid(unsafe_code)]

mod access;
mod array;
mod clock;
mod console;
mod machine;
mod run;
mod settings;

use std::process::ExitCode;

use console::Line;
use settings::Settings;

/// Why the workload did not run, or not to its end.
#[derive(Debug, thiserror::Error)]
enum WorkloadError {
    /// The command line asks for something that does not exist; nothing was run.
    #[error(transparent)]
    Settings(#[from] settings::SettingsError),
    /// The array does not fit into the machine; nothing was run.
    #[error("{wanted_mib} MiB asked for, but only {free_mib} MiB are free")]
    Memory { wanted_mib: u64, free_mib: u64 },
    /// The kernel refused what an init needs; nothing was run.
    #[error("{what}: {source}")]
    Machine {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
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
    // Were this process to die, the kernel would only say that init was killed.
    std::panic::set_hook(Box::new(|panic| {
        Line::new("error").rest("message", panic).print();
        machine::power_off();
    }));
    if let Err(error) = machine::prepare().and_then(|text| run(&text)) {
        report(&error);
    }
    machine::power_off();
    ExitCode::FAILURE
}

fn run(text: &str) -> Result<(), WorkloadError> {
    let settings = Settings::parse(text)?;
    machine::check_memory(&settings)?;
    run::run(&settings);
    Ok(())
}

fn report(error: &WorkloadError) {
    Line::new("error").rest("message", error).print();
}
