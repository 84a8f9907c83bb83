//! Processes that the kernel ends with ours, also if ours is killed.

use std::ffi::OsStr;
use std::process::Command;

/// The signal that ends such a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastSignal {
    /// SIGTERM: it may put its affairs in order.
    Term,
    /// SIGKILL: nothing of it is of use.
    Kill,
}

/// A command whose process the kernel ends when the thread that starts it ends, if `setpriv` of util-linux is installed.
pub fn dying_with_us(program: &OsStr, signal: LastSignal) -> Command {
    let places = std::env::var_os("PATH").unwrap_or_default();
    let setpriv = std::env::split_paths(&places)
        .map(|place| place.join("setpriv"))
        .find(|file| file.is_file());
    match setpriv {
        // It replaces itself by the program, so the process id stays.
        Some(setpriv) => {
            let signal = match signal {
                LastSignal::Term => "TERM",
                LastSignal::Kill => "KILL",
            };
            let mut command = Command::new(setpriv);
            command.args(["--pdeathsig", signal, "--"]).arg(program);
            command
        }
        None => Command::new(program),
    }
}
