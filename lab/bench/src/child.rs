//! Processes of ours: this program again, and servers.

use std::env;
use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};

use anyhow::Context;

/// A process that is killed when this is dropped.
pub(crate) struct ChildProcess(pub(crate) Child);

impl ChildProcess {
    pub(crate) fn start(command: &mut Command) -> anyhow::Result<Self> {
        let child = command.spawn();
        let name = command.get_program().to_string_lossy().into_owned();
        Ok(Self(child.with_context(|| format!("cannot start {name}"))?))
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // A process that has already ended cannot be killed, which is harmless.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// This program with other arguments.
pub(crate) fn ourselves<S: AsRef<OsStr>>(
    args: impl IntoIterator<Item = S>,
) -> anyhow::Result<Command> {
    let mut command = Command::new(env::current_exe()?);
    command.args(args);
    Ok(command)
}

/// Runs this program with other arguments and returns the numbers it printed.
pub(crate) fn numbers<S: AsRef<OsStr>>(
    args: impl IntoIterator<Item = S>,
) -> anyhow::Result<Vec<f64>> {
    let output = ourselves(args)?.stderr(Stdio::inherit()).output()?;
    anyhow::ensure!(
        output.status.success(),
        "a process of ours failed: {}",
        output.status
    );
    let text = String::from_utf8(output.stdout)?;
    text.split_whitespace()
        .map(|word| {
            word.parse()
                .with_context(|| format!("not a number: {word}"))
        })
        .collect()
}
