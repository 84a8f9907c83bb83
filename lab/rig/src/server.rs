//! A server as a process of its own, as users run it.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::try_wait_for;

/// How long a server may take to end after a SIGTERM.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// A server whose output is appended to a log. Dropped, it is killed.
#[derive(Debug)]
pub struct Server {
    child: Child,
    log: PathBuf,
    /// Where in the log its own part begins.
    log_from: u64,
}

impl Server {
    /// Runs `command` and waits until `is_ready`.
    ///
    /// # Errors
    ///
    /// Why it did not start, with its log; nothing is left running.
    pub fn start(
        command: &mut Command,
        log: &Path,
        limit: Duration,
        mut is_ready: impl FnMut(&Self) -> bool,
    ) -> anyhow::Result<Self> {
        let mut server = Self::spawn(command, log)?;
        let ready = try_wait_for("a server that answers", limit, || {
            if let Some(status) = server.child.try_wait()? {
                bail!("it has ended ({status})");
            }
            Ok(is_ready(&server).then_some(()))
        });
        ready.with_context(|| {
            let program = command.get_program().display();
            format!("{program} does not serve; its log: {}", server.log())
        })?;
        Ok(server)
    }

    /// Runs `command`.
    ///
    /// # Errors
    ///
    /// Why it did not start.
    pub fn spawn(command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let file = File::options().create(true).append(true).open(log)?;
        let log_from = file.metadata()?.len();
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| command.get_program().display().to_string())?;
        Ok(Self {
            child,
            log: log.to_owned(),
            log_from,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to its log.
    pub fn log(&self) -> String {
        let read = || {
            let mut file = File::open(&self.log)?;
            file.seek(SeekFrom::Start(self.log_from))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            std::io::Result::Ok(bytes)
        };
        String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
    }

    /// How it ended; `None` while it runs.
    ///
    /// # Errors
    ///
    /// If the kernel no longer has the process.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Sends a SIGTERM and waits until it has ended, at most 30 s.
    ///
    /// # Errors
    ///
    /// If it has not.
    pub fn end(&mut self) -> anyhow::Result<ExitStatus> {
        self.end_by(Signal::TERM, END_TIMEOUT)
    }

    /// Sends a signal and waits until it has ended, at most `limit`.
    ///
    /// # Errors
    ///
    /// If it has not.
    pub fn end_by(&mut self, signal: Signal, limit: Duration) -> anyhow::Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        send(self.pid(), signal)?;
        try_wait_for("the end of a server", limit, || {
            Ok(self.child.try_wait()?)
        })
    }

    /// Ends it at once, as by `kill -9`.
    pub fn kill(&mut self) {
        // Both fail only if it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a process a signal.
///
/// # Errors
///
/// If there is no such process.
pub fn send(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = number.with_context(|| format!("no process has the number {pid}"))?;
    kill_process(pid, signal)
        .with_context(|| format!("no signal to process {}", pid.as_raw_nonzero()))
}

/// CPU time that all threads of a process have used, to 10 ms.
///
/// # Errors
///
/// If there is no such process.
pub fn cpu_time(pid: u32) -> anyhow::Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read '{path}'"))?;
    // proc(5): utime is field 14, stime 15; the name before them may hold anything.
    let fields = stat
        .rsplit_once(')')
        .map_or("", |(_, fields)| fields)
        .split_ascii_whitespace();
    let mut ticks = fields.skip(11).map(str::parse::<u64>);
    let mut next = || {
        ticks
            .next()
            .with_context(|| format!("no CPU time in '{path}'"))
    };
    let ticks = next()?? + next()??;
    let second = u32::try_from(rustix::param::clock_ticks_per_second())?;
    Ok(Duration::from_secs(ticks) / second)
}

/// Whether a process has ended, even if its parent has not waited for it yet.
pub fn has_ended(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_none_or(|(_, fields)| fields.trim_start().starts_with('Z'))
}

/// Finds another program of ours: beside the running one, or in the directory above a test's.
///
/// # Errors
///
/// If it is in neither, with how to build it.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("this program's own file")?;
    let beside = own.with_file_name(name);
    let above = own
        .parent()
        .and_then(Path::parent)
        .map(|above| above.join(name));
    let mut places = [Some(beside.clone()), above].into_iter().flatten();
    places.find(|path| path.is_file()).with_context(|| {
        format!(
            "there is no {}: build it with cargo build --release -p plimsoll -p plimsoll-daemon",
            beside.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait_for;

    #[test]
    fn a_server_is_ended_and_its_part_of_the_log_is_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let file = folder.path().join("ready");
        fs::write(&log, "an earlier one\n").unwrap();
        let mut command = Command::new("sh");
        let script = "echo hello; : >\"$0\"; exec sleep 60";
        let command = command.args(["-c", script]).arg(&file);
        let limit = Duration::from_secs(20);
        let mut server = Server::start(command, &log, limit, |_| file.exists()).unwrap();
        assert_eq!(server.log(), "hello\n");
        assert!(server.ended().unwrap().is_none());
        assert!(!server.end().unwrap().success());
        assert!(has_ended(server.pid()));
    }

    #[test]
    fn a_server_that_ends_at_once_gives_its_reason() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        let command = command.args(["-c", "echo no such disk >&2; exit 1"]);
        let log = folder.path().join("log");
        let refused = Server::start(command, &log, Duration::from_secs(20), |_| false).unwrap_err();
        let text = format!("{refused:#}");
        assert!(text.contains("no such disk"), "{text}");
        assert!(text.contains("has ended (exit status: 1)"), "{text}");
    }

    #[test]
    fn the_cpu_time_of_a_process_grows_while_it_works() {
        let before = cpu_time(std::process::id()).unwrap();
        wait_for("work", Duration::from_secs(60), || {
            std::hint::black_box(
                (0..1_000_000_u64).fold(0, |sum, one| sum ^ std::hint::black_box(one)),
            );
            (cpu_time(std::process::id()).unwrap() >= before + Duration::from_millis(50))
                .then_some(())
        });
        let error = cpu_time(u32::MAX).unwrap_err();
        assert!(
            error.to_string().contains("/proc/4294967295/stat"),
            "{error}"
        );
    }
}
