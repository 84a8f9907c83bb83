//! plimsolld for the demonstration, with a configuration, sockets and a history of its own.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use plimsoll_protocol::client::Client;
use plimsoll_rig::{Server, program};
use tempfile::TempDir;

/// How long it may take until it answers.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Variable settings of the configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    /// Port of the page on 127.0.0.1; 0 for one that is free.
    pub(super) port: u16,
    /// How long the VMs are traced, in s.
    pub(super) trace_s: u64,
    /// How long an allocation is measured before it is judged, in s.
    pub(super) check_s: u64,
    /// Share of its memory that a VM keeps while it is traced, in percent.
    pub(super) direct_percent: u64,
    /// Bound on the rise of a VM's misses, in percent.
    pub(super) max_loss_percent: u64,
}

/// A daemon that serves. Dropped, it is ended.
pub(super) struct Daemon {
    server: Server,
    folder: TempDir,
    port: u16,
}

impl Daemon {
    /// Starts one that moves memory only of VMs named `demo-*`, and whose page is read-only.
    ///
    /// # Errors
    ///
    /// Why it did not come up, with its log; nothing is left running.
    pub(super) fn start(options: Options) -> anyhow::Result<Self> {
        let folder = TempDir::with_prefix("plimsoll-demo-")?;
        let port = match options.port {
            0 => free_port()?,
            port => port,
        };
        let file = folder.path().join("plimsoll.toml");
        fs::write(&file, config(folder.path(), port, options))?;
        let server = Server::start(
            Command::new(program("plimsolld")?)
                .arg("--config")
                .arg(&file),
            &folder.path().join("log"),
            TIMEOUT,
            |_| Client::connect(&folder.path().join("plimsolld.sock")).is_ok(),
        )?;
        Ok(Self {
            server,
            folder,
            port,
        })
    }

    /// A client of its API.
    pub(super) fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::connect(&self.folder.path().join("plimsolld.sock"))?)
    }

    /// Address of its web page.
    pub(super) fn page(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }

    /// The contents of its log.
    pub(super) fn log(&self) -> String {
        self.server.log()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // If it does not end by itself, it is killed when `server` is dropped.
        let _ = self.server.end();
    }
}

/// A currently unused port.
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

[guard]
# The VMs end with the demo.
on_exit = "keep"

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
