//! plimsolld for the demonstration: with a configuration, sockets and a history of its own.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use plimsoll_protocol::client::Client;
use tempfile::TempDir;

/// The program, beside this one.
const PROGRAM: &str = "plimsolld";
/// How long it may take until it answers, and to end.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Time between two looks at something that tells of no change.
const POLL: Duration = Duration::from_millis(50);

/// What the configuration leaves open.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    /// Port of the page on 127.0.0.1; 0 for one that is free.
    pub(super) port: u16,
    /// How long the VMs are traced, in s.
    pub(super) trace_s: u64,
    /// How long the division is measured before it is judged, in s.
    pub(super) check_s: u64,
    /// Share of its memory that a VM keeps while it is traced, in percent.
    pub(super) direct_percent: u64,
    /// Most rise of a VM's misses, in percent.
    pub(super) max_loss_percent: u64,
}

/// A daemon that serves. Dropped, it is ended.
pub(super) struct Daemon {
    folder: TempDir,
    process: Child,
    port: u16,
}

impl Daemon {
    /// Starts one that moves VMs named `demo-*` alone, and whose page is served for those who look.
    ///
    /// # Errors
    ///
    /// Why it did not come up, with its own words; nothing is left running.
    pub(super) fn start(options: Options) -> anyhow::Result<Self> {
        let program = program()?;
        let folder = TempDir::with_prefix("plimsoll-demo-")?;
        let port = match options.port {
            0 => free_port()?,
            port => port,
        };
        let file = folder.path().join("plimsoll.toml");
        fs::write(&file, config(folder.path(), port, options))?;
        let log = File::create(folder.path().join("log"))?;
        let process = Command::new(&program)
            .arg("--config")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| program.display().to_string())?;
        let mut daemon = Self {
            folder,
            process,
            port,
        };
        let deadline = Instant::now() + TIMEOUT;
        while daemon.client().is_err() {
            let ended = daemon.process.try_wait()?.is_some();
            if ended || Instant::now() > deadline {
                bail!("plimsolld does not serve: {}", daemon.said());
            }
            thread::sleep(POLL);
        }
        Ok(daemon)
    }

    /// Reaches it.
    pub(super) fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::connect(&self.folder.path().join("plimsolld.sock"))?)
    }

    /// Where its page is.
    pub(super) fn page(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }

    /// What it wrote to its log.
    pub(super) fn said(&self) -> String {
        let said = fs::read(self.folder.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&said).into_owned()
    }

    /// Asks it to end, and waits until it has; no longer than [`TIMEOUT`].
    fn end(&mut self) -> anyhow::Result<()> {
        let pid = self.process.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status()?;
        let deadline = Instant::now() + TIMEOUT;
        while self.process.try_wait()?.is_none() {
            ensure!(Instant::now() < deadline, "plimsolld does not end");
            thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.end().is_err() {
            // Both fail only if it is gone already.
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

fn program() -> anyhow::Result<PathBuf> {
    let us = std::env::current_exe().context("this program's own file")?;
    let program = us.with_file_name(PROGRAM);
    ensure!(
        program.is_file(),
        "there is no {}: build it with cargo build --release -p plimsoll-daemon",
        program.display()
    );
    Ok(program)
}

/// A port that nobody listens at now.
fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

fn config(folder: &Path, port: u16, options: Options) -> String {
    let folder = folder.display();
    let Options {
        trace_s,
        check_s,
        direct_percent,
        max_loss_percent,
        ..
    } = options;
    format!(
        r#"mode = "act"
turn_interval = "3s"

[check]
after = "{check_s}s"
# Half a minute of misses is a rough measure.
tolerance = "10%"

[curves]
from = "caches"
direct = "{direct_percent}%"
trace_for = "{trace_s}s"
keep = false
every = "24h"

# The caches tell the curves; no VM of this host is traced by traps.
[trace]
enabled = false

[history]
file = "{folder}/history.redb"

[serve]
socket = "{folder}/plimsolld.sock"
read_only_socket = "none"

[tcp]
listen = "127.0.0.1:{port}"
read_only = true

[[vm]]
name = "demo-*"
managed = true
max_loss = "{max_loss_percent}%"

# Others on this host stay as they are.
[[vm]]
name = "*"
managed = false
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_leaves_other_vms_alone_and_serves_the_page_to_lookers() {
        let options = Options {
            port: 0,
            trace_s: 75,
            check_s: 30,
            direct_percent: 65,
            max_loss_percent: 25,
        };
        let text = config(Path::new("/run/demo"), 7373, options);
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let rules: Vec<_> = lines
            .join("\n")
            .split("[[vm]]")
            .map(str::to_owned)
            .collect();
        assert_eq!(rules.len(), 3);
        // Of each setting, the first rule that fits a name and has it decides.
        assert!(rules[1].contains("name = \"demo-*\"\nmanaged = true\nmax_loss = \"25%\""));
        assert!(rules[2].contains("name = \"*\"\nmanaged = false"));
        assert!(rules[0].contains("listen = \"127.0.0.1:7373\"\nread_only = true"));
        assert!(rules[0].contains("direct = \"65%\"\ntrace_for = \"75s\"\nkeep = false"));
    }
}
