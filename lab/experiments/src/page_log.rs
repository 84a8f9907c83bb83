//! Page logs of guests of ours.

use std::ffi::OsStr;

use anyhow::Context as _;
use plimsoll_observe::page_log::{PageLog, PageLogArgs};
use plimsoll_rig::{AcceleratorChoice, GuestConfig};

/// Makes the ring and the file for a guest of ours, and has its QEMU load the plugin. `args` must name a file.
///
/// # Errors
///
/// As [`PageLog::prepare`].
pub fn page_log_of(args: &PageLogArgs, guest: &mut GuestConfig) -> anyhow::Result<PageLog> {
    // As the rig starts guests.
    let memory = format!("{}M", guest.memory_mib);
    let line = ["-machine", "q35", "-m", &memory].map(str::to_owned);
    let log = PageLog::prepare(args, OsStr::new(plimsoll_vm::QEMU), &line)?
        .context("no file is named for the page log")?;
    guest.accelerator = AcceleratorChoice::Tcg;
    for word in log.arguments() {
        let word = word
            .into_string()
            .ok()
            .context("the plugin's path is not UTF-8")?;
        guest.extra_arguments.push(word);
    }
    Ok(log)
}
