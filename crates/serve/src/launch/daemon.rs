//! The disk daemon under a QEMU: started before it, restarted when it dies, ended after it.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use plimsoll_vm::own_program;
use rustix::process::Signal;

use super::signal;

/// Polling interval of processes and signals.
pub const TURN: Duration = Duration::from_millis(20);
/// How long a daemon may take until it serves; it may have to write back what a former one left.
const START_MAX: Duration = Duration::from_secs(60);
/// Time before a daemon that died is started again, first and at last.
const RESTART: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// A daemon that served for so long is restarted as if for the first time.
const STEADY: Duration = Duration::from_secs(60);

/// The process of a disk daemon, which is restarted when it dies.
#[derive(Debug)]
pub struct Daemon<'a> {
    arguments: &'a [OsString],
    state: State,
    /// Time before the next restart.
    wait: Duration,
}

#[derive(Debug)]
enum State {
    Runs { child: Child, since: Instant },
    Dead { again_at: Instant },
}

impl<'a> Daemon<'a> {
    /// Starts it and waits until it serves.
    ///
    /// # Errors
    ///
    /// Why it does not.
    pub fn start(arguments: &'a [OsString]) -> anyhow::Result<Self> {
        let (mut child, stdout) = spawn(arguments)?;
        let (ready, is_ready) = mpsc::sync_channel(1);
        thread::spawn(move || forward(stdout, &ready));
        let begin = Instant::now();
        while is_ready.try_recv().is_err() {
            if let Some(status) = child.try_wait()? {
                anyhow::bail!("the disk daemon does not start ({})", ended(status));
            }
            if begin.elapsed() > START_MAX {
                signal(&child, Signal::TERM);
                child.wait()?;
                anyhow::bail!(
                    "the disk daemon does not serve after {} s",
                    START_MAX.as_secs()
                );
            }
            thread::sleep(TURN);
        }
        let since = Instant::now();
        Ok(Self {
            arguments,
            state: State::Runs { child, since },
            wait: RESTART.0,
        })
    }

    /// Restarts it if it has died. The guest waits meanwhile: QEMU reconnects.
    pub fn supervise(&mut self) {
        let now = Instant::now();
        match &mut self.state {
            State::Runs { child, since } => {
                let Ok(Some(status)) = child.try_wait() else {
                    return;
                };
                if since.elapsed() > STEADY {
                    self.wait = RESTART.0;
                }
                print_line(format_args!(
                    "plimsoll run: the disk daemon ended ({}); it is started again in {} ms",
                    ended(status),
                    self.wait.as_millis()
                ));
                let again_at = now + self.wait;
                self.wait = (self.wait * 2).min(RESTART.1);
                self.state = State::Dead { again_at };
            }
            State::Dead { again_at } if now >= *again_at => match spawn(self.arguments) {
                Ok((child, stdout)) => {
                    let (ready, _) = mpsc::sync_channel(1);
                    thread::spawn(move || forward(stdout, &ready));
                    self.state = State::Runs { child, since: now };
                }
                Err(error) => {
                    print_line(format_args!("plimsoll run: {error:#}"));
                    *again_at = now + self.wait;
                    self.wait = (self.wait * 2).min(RESTART.1);
                }
            },
            State::Dead { .. } => {}
        }
    }

    /// Ends it, once it has written back.
    ///
    /// # Errors
    ///
    /// That it had died, or failed at its end.
    pub fn end(self) -> anyhow::Result<()> {
        let State::Runs { mut child, .. } = self.state else {
            anyhow::bail!(
                "the disk daemon has died; delayed writes, if any, are in its state directory"
            );
        };
        signal(&child, Signal::TERM);
        let status = child.wait()?;
        anyhow::ensure!(
            status.success(),
            "the disk daemon did not end well ({})",
            ended(status)
        );
        Ok(())
    }
}

fn spawn(arguments: &[OsString]) -> anyhow::Result<(Child, ChildStdout)> {
    let program = own_program().context("cannot find this program")?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // Ctrl-C is for QEMU: the daemon ends after it.
        .process_group(0)
        .spawn()
        .context("cannot start the disk daemon")?;
    let stdout = child.stdout.take().context("the daemon has no output")?;
    Ok((child, stdout))
}

/// Copies the daemon's lines to standard error, and signals `ready` when it serves.
fn forward(stdout: impl Read, ready: &mpsc::SyncSender<()>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        print_line(format_args!("{line}"));
        if line.starts_with("disk: serving ") {
            // Nobody may wait for it any more.
            let _ = ready.try_send(());
        }
    }
}

/// Writes a line to standard error. That nobody reads it ends neither the VM nor its disks.
fn print_line(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "for no stated reason".to_owned(),
    }
}
