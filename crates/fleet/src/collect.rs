//! The answers of a fleet's daemons.
//!
//! Each is asked once, several at the same time. One that does not answer is listed as missing with the reason, and the rest is
//! planned without it. A daemon's clock is compared with ours: its intervals are moved by the difference.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::fleet::{CollectedHost, FleetFile, HostDemands, MissingHost, demands_path};
use plimsoll_protocol::path::is_this_host;
use serde::de::DeserializeOwned;
use ureq::Agent;
use ureq::http::{StatusCode, Uri};
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

/// Daemons that are asked at the same time.
const AT_ONCE: usize = 32;
/// Limit on the size of an answer.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Length of the connection's beginning, and of the whole exchange.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Limit on the memory of a host, and on what its VMs have or need: what 48 bits address.
const BYTES_MAX: u64 = 1 << 48;
/// Limit on the processors that a host's VMs use.
const PROCESSORS_MAX: f64 = 65_536.0;

/// How daemons are reached.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// File with the token that is sent to them.
    pub token_file: Option<PathBuf>,
    /// Whether the token is also sent in plain text, to `http` addresses of other hosts.
    pub plain_text: bool,
    /// PEM file with the authorities that may have signed their certificates; required for `https`.
    pub ca_file: Option<PathBuf>,
    /// PEM files with our own certificate and its key.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// Time limit of a request.
    pub time_out: Duration,
}

/// Why nothing could be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// A file cannot be read.
    #[error("cannot read '{}'", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file has no certificate or key.
    #[error("'{}': {why}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// An address gave no usable answer.
    #[error("{address}: {why}")]
    Address {
        /// The address.
        address: String,
        /// Why.
        why: String,
    },
}

/// A client of many daemons.
#[derive(Debug, Clone)]
pub struct Collector {
    agent: Agent,
    token: Option<String>,
    plain_text: bool,
}

impl Collector {
    /// A client with this access.
    ///
    /// # Errors
    ///
    /// A file of `access` that cannot be used.
    pub fn new(access: &Access) -> Result<Self, AccessError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut tls = TlsConfig::builder().unversioned_rustls_crypto_provider(provider);
        // Without authorities no certificate is accepted.
        let authorities = match &access.ca_file {
            Some(path) => certificates(path)?,
            None => Vec::new(),
        };
        tls = tls.root_certs(RootCerts::new_with_certs(&authorities));
        if let Some((certificate, key)) = &access.certificate {
            let chain = certificates(certificate)?;
            let private = PrivateKey::from_pem(&read(key)?).map_err(|error| AccessError::Pem {
                path: key.clone(),
                why: error.to_string(),
            })?;
            tls = tls.client_cert(Some(ClientCert::new_with_certs(&chain, private)));
        }
        let agent = Agent::config_builder()
            .tls_config(tls.build())
            .timeout_connect(Some(CONNECT_MAX.min(access.time_out)))
            .timeout_global(Some(access.time_out))
            .max_redirects(0)
            .http_status_as_error(false)
            .proxy(None)
            .build()
            .new_agent();
        let token = match &access.token_file {
            Some(path) => {
                let text = String::from_utf8_lossy(&read(path)?).trim().to_owned();
                Some(text)
            }
            None => None,
        };
        Ok(Self {
            agent,
            token,
            plain_text: access.plain_text,
        })
    }

    /// The text at an address, which gets no token.
    ///
    /// # Errors
    ///
    /// [`AccessError::Address`].
    pub fn text(&self, address: &str) -> Result<String, AccessError> {
        let bytes = self
            .get(address, None)
            .map_err(|why| AccessError::Address {
                address: address.to_owned(),
                why,
            })?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn get(&self, address: &str, token: Option<&str>) -> Result<Vec<u8>, String> {
        check_port(address)?;
        let mut request = self.agent.get(address);
        if let Some(token) = token {
            if !self.plain_text && is_readable(address) {
                return Err(
                    "not asked, as it would get the token in plain text: serve https there, or use --plain-text if nobody else can read that network"
                        .to_owned(),
                );
            }
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let mut response = request.call().map_err(|error| error.to_string())?;
        let status = response.status();
        let body = response.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        let body = body.read_to_vec().map_err(|error| error.to_string())?;
        match status {
            StatusCode::OK => Ok(body),
            StatusCode::NOT_FOUND => {
                Err("status 404: no such VM, or no plimsolld of this version".to_owned())
            }
            StatusCode::UNAUTHORIZED => {
                Err("status 401: it requires a token, or another".to_owned())
            }
            _ => Err(format!("status {status}{}", message_of(&body))),
        }
    }

    /// Asks the daemons at `bases` for `past` until now, in intervals of `interval_ms`.
    pub fn collect(&self, bases: &[String], past: Duration, interval_ms: u64) -> FleetFile {
        let now_unix_ms = unix_ms();
        let past_ms = u64::try_from(past.as_millis()).unwrap_or(u64::MAX);
        let since = now_unix_ms.saturating_sub(past_ms);
        let since_unix_ms = since - since % interval_ms.max(1);
        let answers = self.each(bases, |base| self.demands(base, since_unix_ms, interval_ms));
        let mut file = FleetFile {
            schema: SCHEMA,
            collected_unix_ms: now_unix_ms,
            hosts: Vec::new(),
            missing: Vec::new(),
        };
        for (target, answer) in answers {
            let target = target.clone();
            match answer {
                Ok((clock_ahead_ms, demands)) => file.hosts.push(CollectedHost {
                    target,
                    clock_ahead_ms,
                    demands,
                }),
                Err(why) => file.missing.push(MissingHost { target, why }),
            }
        }
        file.hosts
            .sort_by(|a, b| a.demands.host.cmp(&b.demands.host));
        file.missing.sort_by(|a, b| a.target.cmp(&b.target));
        file
    }

    /// What `work` makes of each of `hosts`, several at the same time; in no order.
    pub(crate) fn each<'a, T: Sync, A: Send>(
        &self,
        hosts: &'a [T],
        work: impl Fn(&T) -> A + Sync,
    ) -> Vec<(&'a T, A)> {
        let waiting: Mutex<VecDeque<&T>> = Mutex::new(hosts.iter().collect());
        let answers = Mutex::new(Vec::new());
        let take = || {
            // Others go on while one is asked.
            let next = || lock(&waiting).pop_front();
            while let Some(host) = next() {
                let answer = work(host);
                lock(&answers).push((host, answer));
            }
        };
        thread::scope(|scope| {
            for _ in 0..AT_ONCE.min(hosts.len()) {
                scope.spawn(take);
            }
        });
        answers.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// A daemon's answer at an address.
    pub(crate) fn ask<T: DeserializeOwned>(&self, address: &str) -> Result<T, String> {
        let body = self.get(address, self.token.as_deref())?;
        serde_json::from_slice(&body).map_err(|error| format!("malformed answer: {error}"))
    }

    fn demands(
        &self,
        base: &str,
        since_unix_ms: u64,
        interval_ms: u64,
    ) -> Result<(i64, HostDemands), String> {
        let address = format!("{base}{}", demands_path(since_unix_ms, interval_ms));
        let before_ms = unix_ms();
        let demands: HostDemands = self.ask(&address)?;
        let ours_ms = before_ms.midpoint(unix_ms());
        check(&demands)?;
        if demands.interval_ms != interval_ms || demands.since_unix_ms != since_unix_ms {
            return Err("it answers for other intervals than those asked for".to_owned());
        }
        let ahead = i128::from(demands.now_unix_ms) - i128::from(ours_ms);
        Ok((i64::try_from(ahead).unwrap_or(i64::MAX), demands))
    }
}

/// Lists hosts of `file` whose answers cannot be used as missing, with the reason: the others can be planned without them.
pub fn set_aside(file: &mut FleetFile) {
    for host in std::mem::take(&mut file.hosts) {
        match check(&host.demands) {
            Ok(()) => file.hosts.push(host),
            Err(why) => file.missing.push(MissingHost {
                target: host.target,
                why,
            }),
        }
    }
}

/// Whether an answer is of our version, and no number in it is beyond all hosts. Otherwise, one daemon could make the sums of a fleet
/// overflow.
fn check(demands: &HostDemands) -> Result<(), String> {
    if demands.schema != SCHEMA {
        return Err(format!("schema {}, not {SCHEMA}", demands.schema));
    }
    let nonsense = |what: String| Err(format!("nonsense: {what}"));
    if !(1..=BYTES_MAX).contains(&demands.total_bytes) || demands.processors == Some(0) {
        let processors = demands.processors;
        let processors = processors.map_or("unknown".to_owned(), |count| count.to_string());
        let bytes = demands.total_bytes;
        return nonsense(format!("{bytes} bytes of RAM, processors: {processors}"));
    }
    let (mut all_bytes, mut all_processors) = (0, 0.0);
    for vm in &demands.vms {
        let needs = vm.intervals.iter().map(|interval| interval.need_bytes);
        let needs = needs.chain([vm.size_bytes, vm.unknown_need_bytes]);
        let bytes = needs.max().unwrap_or_default();
        let used = vm.intervals.iter();
        let used = used.filter_map(|interval| interval.vcpu_seconds_per_second);
        let (least, most) = used.fold((0.0_f64, 0.0_f64), |(least, most), used| {
            (least.min(used), most.max(used))
        });
        if bytes > BYTES_MAX || least < 0.0 || most > PROCESSORS_MAX {
            return nonsense(format!(
                "VM {:?} has or needs {bytes} bytes and {least:?} to {most:?} processors",
                vm.vm
            ));
        }
        if vm.present {
            all_bytes += u128::from(bytes);
            all_processors += most;
        }
    }
    if all_bytes > u128::from(BYTES_MAX) || all_processors > PROCESSORS_MAX {
        return nonsense(format!(
            "its VMs have or need {all_bytes} bytes and {all_processors:?} processors"
        ));
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a daemon explains of a refusal, cut, on one line; nothing if it does not.
fn message_of(body: &[u8]) -> String {
    /// Letters of an explanation: it comes from another host.
    const LETTERS_MAX: usize = 200;
    let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let message = body["message"].as_str().unwrap_or_default();
    let plain = message.chars().filter(|letter| !letter.is_control());
    let message: String = plain.take(LETTERS_MAX).collect();
    match message.is_empty() {
        true => message,
        false => format!(": {message}"),
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

fn read(path: &Path) -> Result<Vec<u8>, AccessError> {
    fs::read(path).map_err(|source| AccessError::File {
        path: path.to_owned(),
        source,
    })
}

fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, AccessError> {
    let wrong = |why: String| AccessError::Pem {
        path: path.to_owned(),
        why,
    };
    let mut found = Vec::new();
    for item in ureq::tls::parse_pem(&read(path)?) {
        if let ureq::tls::PemItem::Certificate(certificate) =
            item.map_err(|error| wrong(error.to_string()))?
        {
            found.push(certificate);
        }
    }
    match found.is_empty() {
        true => Err(wrong("it has no certificate".to_owned())),
        false => Ok(found),
    }
}

/// Whether the port of an address is one. The client would take another number for none, and send the token to the default port.
fn check_port(address: &str) -> Result<(), String> {
    let uri: Uri = address
        .parse()
        .map_err(|error| format!("malformed address: {error}"))?;
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let place = authority.rsplit('@').next().unwrap_or_default();
    let after_host = place.strip_prefix(uri.host().unwrap_or_default());
    match after_host.and_then(|after| after.strip_prefix(':')) {
        Some(port) if !port.parse().is_ok_and(|port: u16| port > 0) => {
            Err(format!("port {port}: expected 1 to 65535"))
        }
        _ => Ok(()),
    }
}

/// Whether others on the network can read what is sent to an address: all but `https` and this host.
fn is_readable(address: &str) -> bool {
    let Ok(uri) = address.parse::<Uri>() else {
        return true;
    };
    !(is_this_host(uri.host().unwrap_or_default()) || uri.scheme_str() == Some("https"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::{Access, Collector, is_readable, message_of};

    #[test]
    fn a_token_is_not_sent_where_the_network_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let token_file = folder.path().join("token");
        fs::write(&token_file, "secret").unwrap();
        let error = |plain_text| {
            let access = Access {
                token_file: Some(token_file.clone()),
                plain_text,
                time_out: Duration::from_millis(10),
                ..Access::default()
            };
            let collector = Collector::new(&access).unwrap();
            // An address for documentation: nobody answers there.
            let answer = collector.ask::<serde_json::Value>("http://192.0.2.1:9");
            answer.unwrap_err()
        };
        assert!(error(false).contains("in plain text"), "{}", error(false));
        assert!(!error(true).contains("in plain text"), "{}", error(true));
    }

    #[test]
    fn a_port_that_is_none_is_refused_before_a_request() {
        let of = |address| super::check_port(address).err();
        for good in [
            "http://127.0.0.1:65535/v1?a=1:99999",
            "https://[::1]:7373/h:0",
            "http://[::1]/v1",
            "http://a@b:1",
            "http://1:11",
        ] {
            assert_eq!(of(good), None, "{good}");
        }
        for (bad, port) in [
            ("http://127.0.0.1:73731/v1", "73731"),
            ("https://[::1]:0", "0"),
            ("http://a:b@c:65536/", "65536"),
        ] {
            let expected = format!("port {port}: expected 1 to 65535");
            assert_eq!(of(bad), Some(expected), "{bad}");
        }
        let file = Collector::new(&Access::default()).unwrap().collect(
            &["http://127.0.0.1:73731".to_owned()],
            Duration::ZERO,
            60_000,
        );
        assert_eq!(file.missing[0].why, "port 73731: expected 1 to 65535");
    }

    #[test]
    fn only_https_and_this_host_are_private() {
        for private in [
            "https://a:7373/v1",
            "http://127.0.0.1:1",
            "http://[::1]:7373/v1/demands?a=1",
            "http://[::ffff:127.0.0.1]:1",
            "HTTP://localhost:1/",
            "http://LOCALHOST",
        ] {
            assert!(!is_readable(private), "{private}");
        }
        for readable in [
            "http://a:7373/v1",
            "http://10.0.0.1",
            "http://127.0.0.1.evil.example:1",
            "http://localhost.evil.example",
            "http://localhost@evil.example:1",
            "http://[fe80::1]:1",
            "a:7373",
            "",
        ] {
            assert!(is_readable(readable), "{readable}");
        }
    }

    #[test]
    fn an_explanation_is_shown_cut_and_without_controls() {
        let of = |body: &str| message_of(body.as_bytes());
        assert_eq!(
            of(
                r#"{"schema":1,"kind":"bad-request","message":"interval_ms=1: expected\u001b 60000 or more"}"#
            ),
            ": interval_ms=1: expected 60000 or more"
        );
        assert_eq!(
            of(&format!(r#"{{"message":"{}"}}"#, "x".repeat(5000))).len(),
            202
        );
        for body in ["", "no JSON", "{}", r#"{"message":7}"#, "[]"] {
            assert_eq!(of(body), "", "{body}");
        }
    }
}
