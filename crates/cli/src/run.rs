//! `plimsoll run`: QEMU with its disks served by a daemon of ours, which is started before it, restarted when it
//! dies, and ended after it. With `--page-log` comes the plugin that records an emulated machine's page walks.
//!
//! Not here: what is added to QEMU's command line, and the daemon's process (`plimsoll_serve::launch`).

use std::io::Write;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::sync::atomic::Ordering;
use std::thread;

use anyhow::Context as _;
use plimsoll_observe::page_log::{PageLog, PageLogArgs, Recording};
use plimsoll_output::stop_flag;
use plimsoll_serve::launch::{Daemon, LaunchArgs, Plan, TURN, accelerator, signal};
use plimsoll_vm::{LastSignal, dying_with_us};
use rustix::process::Signal;

/// Run QEMU with memory that can be traced and, optionally, disks with an exclusive cache.
///
/// Everything after -- is QEMU's command line, without -daemonize. Exits with QEMU's exit code (128 plus the signal number if a signal
/// ended it).
#[derive(Debug, clap::Args)]
// As clap has it by itself; the man page would lack the `--`.
#[command(override_usage = "plimsoll run [OPTIONS] -- <QEMU>...")]
pub struct Args {
    #[command(flatten)]
    launch: LaunchArgs,
    #[command(flatten)]
    page_log: PageLogArgs,
}

/// Returns QEMU's exit code. `out` gets lines for information; that they cannot be written is no error.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<u8> {
    let mut plan = Plan::new(&args.launch)?;
    let page_log = PageLog::prepare(&args.page_log, &args.launch.qemu[0], &plan.line)?;
    let logging = page_log.iter().flat_map(PageLog::arguments);
    plan.added.extend(logging);
    let stop = stop_flag()?;
    let accelerator = accelerator(&plan.line);
    // That nobody reads this keeps no VM from starting.
    let _ = writeln!(
        out,
        "run: {}, {accelerator}, {}",
        plan.name, plan.memory_phrase
    );
    let _ = out.flush();
    let mut daemon = plan.daemon.as_deref().map(Daemon::start).transpose()?;
    let mut qemu = dying_with_us(&args.launch.qemu[0], LastSignal::Term)
        .args(&args.launch.qemu[1..])
        .args(&plan.added)
        .spawn()
        .with_context(|| format!("cannot run {}", args.launch.qemu[0].display()))?;
    let recording = page_log.map(PageLog::record);
    let mut is_ended = false;
    let status = loop {
        if let Some(status) = qemu.try_wait()? {
            break status;
        }
        if stop.load(Ordering::Relaxed) && !is_ended {
            is_ended = true;
            signal(&qemu, Signal::TERM);
        }
        if let Some(daemon) = &mut daemon {
            daemon.supervise();
        }
        thread::sleep(TURN);
    };
    let recorded = recording.map(Recording::end);
    if let Some(daemon) = daemon {
        daemon.end()?;
    }
    match recorded {
        Some(Ok(recorded)) => {
            let _ = writeln!(out, "{recorded}");
        }
        // QEMU has printed why it did not start.
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
