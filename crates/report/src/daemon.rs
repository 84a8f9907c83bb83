//! The connection to plimsolld for interactive programs: its errors with the remedy and the exit code.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use plimsoll_output::exit::{Forbidden, Unreachable, with_causes};
use plimsoll_output::printable;
use plimsoll_protocol::SOCKET;
use plimsoll_protocol::byte_curve::ByteCurve;
use plimsoll_protocol::client::{Client, ClientError};
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::request::RefusalKind;
use plimsoll_protocol::size::Interval;
use plimsoll_protocol::subject::{GROUP, Key};
use plimsoll_protocol::vm::{HostView, VmSummary};

/// Characters of the longest name that is inspected as one that may have been meant.
const NAME_CHARACTERS_MAX: usize = 256;

/// Connection to the daemon.
#[derive(Debug, Clone, clap::Args)]
pub struct SocketArg {
    /// The daemon's socket [default: /run/plimsoll/plimsolld.sock, or, without access to it, the read-only
    /// plimsolld-ro.sock beside it]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

#[cfg(test)]
impl SocketArg {
    /// The daemon at `socket`.
    pub fn at(socket: PathBuf) -> Self {
        Self {
            socket: Some(socket),
        }
    }
}

/// A daemon that was reached. What it is asked fails as [`ask`](Self::ask) does.
#[derive(Debug)]
pub struct Daemon {
    client: Client,
}

#[expect(
    clippy::missing_errors_doc,
    reason = "requests have the errors of `ask`, documented at the type"
)]
impl Daemon {
    /// Reaches the daemon; through its read-only socket if the other may not be opened and none was named.
    ///
    /// # Errors
    ///
    /// [`Unreachable`] if it does not answer.
    pub fn to_read(at: &SocketArg) -> anyhow::Result<Self> {
        let client = match &at.socket {
            Some(socket) => Client::connect(socket),
            None => Client::connect_to_read(),
        };
        Ok(Self {
            client: client.map_err(|error| said(&error))?,
        })
    }

    /// Reaches the daemon as [`to_read`](Self::to_read) does; `None` if none listens there.
    ///
    /// # Errors
    ///
    /// [`Unreachable`] if something listens and does not answer, or refuses us.
    pub fn to_read_if_any(at: &SocketArg) -> anyhow::Result<Option<Self>> {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        let socket = at.socket.as_deref().unwrap_or(Path::new(SOCKET));
        match Client::connect(socket) {
            Err(ClientError::Unreachable { source, .. })
                if matches!(source.kind(), ConnectionRefused | NotFound) =>
            {
                Ok(None)
            }
            _ => Self::to_read(at).map(Some),
        }
    }

    /// Reaches the daemon by the socket for those who may change things.
    ///
    /// # Errors
    ///
    /// [`Unreachable`] if it does not answer.
    pub fn to_change(at: &SocketArg) -> anyhow::Result<Self> {
        let socket = at.socket.as_deref().unwrap_or(Path::new(SOCKET));
        Ok(Self {
            client: Client::connect(socket).map_err(|error| said(&error))?,
        })
    }

    /// Asks for something that is no VM's alone.
    ///
    /// # Errors
    ///
    /// [`Unreachable`], [`Forbidden`] if a limit forbids it, otherwise the daemon's error.
    pub fn ask<T>(&self, ask: impl FnOnce(&Client) -> Result<T, ClientError>) -> anyhow::Result<T> {
        ask(&self.client).map_err(|error| said(&error))
    }

    /// Asks for something of a VM's.
    ///
    /// # Errors
    ///
    /// Those of [`ask`](Self::ask). For a VM that is not there it names one that may have been meant.
    pub fn ask_of<T>(
        &self,
        vm: &str,
        ask: impl FnOnce(&Client, &str) -> Result<T, ClientError>,
    ) -> anyhow::Result<T> {
        ask(&self.client, vm).map_err(|error| {
            if error.refusal_kind() == Some(RefusalKind::NotFound) {
                self.not_found(vm, &error)
            } else {
                said(&error)
            }
        })
    }

    /// Asks for something of a VM's or of a control group's.
    pub fn ask_by<T>(
        &self,
        key: &Key,
        ask: impl FnOnce(&Client, &Key) -> Result<T, ClientError>,
    ) -> anyhow::Result<T> {
        self.ask_of(&key.written(), |client, _| ask(client, key))
    }

    /// The host and its VMs.
    pub fn host(&self) -> anyhow::Result<HostView> {
        self.ask(Client::host)
    }

    /// The daemon's time so long ago, in Unix milliseconds.
    pub fn time_before(&self, age: Interval) -> anyhow::Result<u64> {
        let age_ms = u64::try_from(age.get().as_millis()).unwrap_or(u64::MAX);
        Ok(self.host()?.now_unix_ms.saturating_sub(age_ms))
    }

    /// The VM of a name, or all without one.
    pub fn vms(&self, named: Option<&str>) -> anyhow::Result<Vec<VmSummary>> {
        match named {
            Some(vm) => Ok(vec![self.ask_of(vm, Client::vm)?.summary]),
            None => self.ask(Client::vms),
        }
    }

    /// The error where `vm` was not found: the daemon's words if the VM is there and something of it is not.
    fn not_found(&self, vm: &str, error: &ClientError) -> anyhow::Error {
        let Ok(HostView { vms, groups, .. }) = self.client.host() else {
            return said(error);
        };
        let groups = groups.watched.iter().map(|group| &*group.group);
        let names: Vec<_> = vms.iter().map(|vm| &*vm.vm).chain(groups).collect();
        if names.contains(&vm) || vm.starts_with(GROUP) {
            return said(error);
        }
        let meant = match nearest(vm, &names) {
            Some(name) => format!("did you mean '{}'?", printable(name)),
            None => "`plimsoll vms` lists those that are".to_owned(),
        };
        anyhow!("there is no VM '{}'; {meant}", printable(vm))
    }
}

/// The name with the fewest characters to change, if that is at most a third of them.
fn nearest<'a>(name: &str, names: &[&'a str]) -> Option<&'a str> {
    let letters = |text: &str| text.chars().count();
    let mended =
        |other: &str| strsim::damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    let near = names
        .iter()
        .filter(|other| letters(other).max(letters(name)) <= NAME_CHARACTERS_MAX)
        .map(|other| (mended(other), *other))
        .filter(|(mended, other)| *mended <= letters(other).max(letters(name)).div_ceil(3));
    near.min().map(|(_, other)| other)
}

/// A curve of the daemon's, validated.
///
/// # Errors
///
/// If it is no miss-ratio curve.
pub fn curve_of(json: &CurveJson) -> anyhow::Result<ByteCurve> {
    ByteCurve::new(json).with_context(|| {
        let vm = printable(&json.vm);
        format!("the daemon sent an invalid curve of VM {vm}")
    })
}

/// What a refusal means here.
fn said(error: &ClientError) -> anyhow::Error {
    let words = printable(&with_causes(error));
    match error {
        ClientError::Unreachable { .. } => {
            let what_to_do = if error.is_permission_denied() {
                "only root and the socket's group may open it"
            } else {
                "start it with `systemctl start plimsolld`, or name its socket with --socket PATH"
            };
            Unreachable(anyhow!("{words}; {what_to_do}")).into()
        }
        ClientError::Unanswered { .. } => Unreachable(anyhow!(words)).into(),
        ClientError::Refused(refusal) => match refusal.kind {
            RefusalKind::Guarantee | RefusalKind::ObservedOnly => Forbidden(words).into(),
            RefusalKind::ReadOnly => anyhow!("{words}; changes go through {SOCKET}"),
            _ => anyhow!(words),
        },
        _ => anyhow!(words),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_protocol::curve_json::PointJson;

    #[test]
    fn an_invalid_curve_is_an_error_that_names_the_vm() {
        let curve = |miss_ratio, page_bytes| CurveJson {
            schema: 1,
            vm: "\u{1b}[2J".to_owned(),
            page_bytes,
            references: 100,
            baseline_pages: Some(512),
            vcpu_seconds_per_second: None,
            uncertain_pages: 0,
            log_errors_permille: Vec::new(),
            points: vec![PointJson {
                size_pages: 256,
                miss_ratio,
                low: 0.0,
                high: 1.0,
                misses: None,
            }],
        };
        assert!(curve_of(&curve(0.5, 4096)).is_ok());
        let error = curve_of(&curve(f64::NAN, 4096)).unwrap_err().to_string();
        assert_eq!(error, "the daemon sent an invalid curve of VM \u{fffd}[2J");
        assert!(curve_of(&curve(0.5, 0)).is_err());
    }

    #[test]
    fn a_name_that_may_have_been_meant_is_found_and_no_other() {
        let names = ["web", "mail", "db-main", "db-copy"];
        assert_eq!(nearest("wbe", &names), Some("web"));
        assert_eq!(nearest("DB-mian", &names), Some("db-main"));
        assert_eq!(nearest("zzz", &names), None);
        assert_eq!(nearest("web", &[]), None);
        let long = "x".repeat(10_000);
        assert_eq!(nearest(&long, &[&long]), None);
    }
}
