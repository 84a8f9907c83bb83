//! The example host, served, queried by the client and by invalid requests.

use plimsoll_skip::{Lack, skip};
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use plimsoll_protocol::client::{Client, ClientError};
use plimsoll_protocol::decision::State;
use plimsoll_protocol::request::{Choice, RefusalKind, SettingsChange};
use plimsoll_protocol::vm::Promise;
use plimsoll_protocol::vm::VmStatus;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

use super::metrics::text;
use super::serve::{Limits, serve_within};
use super::{ServeError, Server, example, openapi, serve};
use crate::clock::{Clock, Time};
use crate::config::{ServeSettings, TcpSettings, TlsSettings};
use crate::history::History;
use crate::shared::{Command, SharedState};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// An example that is served until this is dropped.
struct ExampleServer {
    folder: TempDir,
    server: Option<Server>,
    turns: Option<JoinHandle<()>>,
}

impl ExampleServer {
    fn new(change: impl FnOnce(&mut ServeSettings)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = settings(folder.path());
        change(&mut settings);
        let (shared, commands) = example::shared();
        let server = serve(Arc::clone(&shared), &settings).unwrap();
        let turns = thread::spawn(move || {
            example::run(&shared, &commands, Duration::from_millis(200));
        });
        Self {
            folder,
            server: Some(server),
            turns: Some(turns),
        }
    }

    fn client(&self) -> Client {
        Client::connect(&socket(self.folder.path())).unwrap()
    }

    fn raw(&self, request: &[u8]) -> String {
        exchange(
            UnixStream::connect(socket(self.folder.path())).unwrap(),
            request,
        )
    }
}

impl Drop for ExampleServer {
    fn drop(&mut self) {
        drop(self.server.take());
        let ended = self.turns.take().map(JoinHandle::join);
        assert!(thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("run/plimsolld.sock")
}

fn read_only(folder: &Path) -> PathBuf {
    folder.join("run/plimsolld-ro.sock")
}

fn settings(folder: &Path) -> ServeSettings {
    ServeSettings {
        socket: socket(folder),
        group: None,
        read_only_socket: Some(read_only(folder)),
        read_only_group: None,
        tcp: None,
    }
}

fn tcp(listen: &str) -> TcpSettings {
    TcpSettings {
        listen: listen.parse().unwrap(),
        token_file: None,
        tls: None,
        read_only: false,
    }
}

fn secret(path: PathBuf, text: &str) -> PathBuf {
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    path
}

/// Sends `request`, and reads until the other end closes.
fn exchange(mut stream: impl Read + Write, request: &[u8]) -> String {
    // The other end may have closed before it has read all.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").into_bytes()
}

fn kind<T>(answer: Result<T, ClientError>) -> RefusalKind {
    let error = answer.err().expect("a refusal");
    error.refusal_kind().unwrap_or_else(|| panic!("{error}"))
}

#[test]
fn a_client_sees_the_host_and_all_that_is_known_of_it() {
    let served = ExampleServer::new(|_| {});
    let client = served.client();
    let host = client.host().unwrap();
    let names: Vec<_> = host.vms.iter().map(|vm| vm.vm.as_str()).collect();
    assert_eq!(names, ["fresh", "scan", "search", "web"]);
    assert_eq!(client.vms().unwrap().len(), 4);
    let web = client.vm("web").unwrap();
    assert_eq!(web.summary.size_bytes, 512 << 20);
    assert_eq!(web.curve, Some(client.curve("web").unwrap()));
    assert_eq!(client.vm("fresh").unwrap().curve, None);
    assert_eq!(kind(client.curve("fresh")), RefusalKind::NotFound);
    assert!(!client.heatmap("web").unwrap().rows.is_empty());
    assert_eq!(kind(client.heatmap("fresh")), RefusalKind::NotFound);
    let right = client.rightsize("web", 0, 0.95).unwrap();
    assert_eq!((right.curves, right.right_bytes), (0, None));
    let history = client.history("web", None, None, Some(20)).unwrap();
    assert!((1..=20).contains(&history.samples.len()));
    let ids = |decisions: Vec<plimsoll_protocol::decision::Decision>| -> Vec<_> {
        decisions.iter().map(|decision| decision.id).collect()
    };
    assert_eq!(
        ids(client.decisions(None, None, None).unwrap()),
        [4, 3, 2, 1]
    );
    assert_eq!(ids(client.decisions(None, Some(3), Some(1)).unwrap()), [2]);
    assert_eq!(ids(client.explain("fresh").unwrap()), [0; 0]);
    assert!(ids(client.explain("web").unwrap()).starts_with(&[4, 3, 2]));
    let proposal = client.proposal().unwrap().unwrap();
    assert_eq!((proposal.id, proposal.inputs), (4, None));
    assert!(client.decision(4).unwrap().inputs.is_some());
}

#[test]
fn what_would_be_follows_from_the_curves() {
    let served = ExampleServer::new(|_| {});
    let client = served.client();
    let less = client.vm_what_if("web", 256 << 20).unwrap();
    assert_eq!(less.standing_then, VmStatus::Violating);
    assert!(less.relative_then.unwrap().expected > 2.0);
    let more = client.vm_what_if("web", 1 << 30).unwrap();
    assert_eq!(more.standing_then, VmStatus::Safe);
    let above = client.vm_what_if("web", 2 << 30).unwrap();
    assert!(
        above.why.ends_with("it never gets more than 1 GiB"),
        "{}",
        above.why
    );
    let unknown = client.vm_what_if("fresh", 1 << 20).unwrap();
    assert_eq!(
        (unknown.standing_then, unknown.relative_then),
        (VmStatus::Unknown, None)
    );

    let total = |lose_bytes| {
        client
            .host_what_if(lose_bytes)
            .unwrap()
            .plan
            .unwrap()
            .total_bytes
    };
    assert_eq!(total(0) - total(64 << 20), 64 << 20);
    assert_eq!(total(-(64 << 20)) - total(0), 64 << 20);
    for too_much in [3 << 30, i64::MAX] {
        let none = client.host_what_if(too_much).unwrap();
        assert!(none.plan.is_none() && none.refusal.is_some(), "{none:?}");
    }
    let won = client.host_what_if(i64::MIN).unwrap();
    assert!(won.plan.is_some() != won.refusal.is_some());

    let replay = client.replay(4).unwrap();
    assert!(replay.agrees, "{}", replay.why);
    assert_eq!(kind(client.replay(1)), RefusalKind::NotFound);
}

#[test]
fn a_record_that_was_changed_does_not_agree() {
    let (shared, _commands) = example::shared();
    let mut decision = shared.history.decision(4).unwrap();
    decision.id = 9;
    decision.plan.as_mut().unwrap().targets[0].target_bytes += 4096;
    shared.history.put_decision(&decision);
    let folder = tempfile::tempdir().unwrap();
    let _server = serve(shared, &settings(folder.path())).unwrap();
    let client = Client::connect(&socket(folder.path())).unwrap();
    assert!(!client.replay(9).unwrap().agrees);
}

#[test]
fn what_is_asked_wrongly_is_refused_with_a_reason() {
    let served = ExampleServer::new(|_| {});
    let cases = [
        ("/v1/nothing", 404, "nothing is served at"),
        ("/v1/vms/webb", 404, "did you mean \\\"web\\\"?"),
        (
            "/v1/vms/%1b%5b2J",
            404,
            "no VM is called \\\"\\\\u{1b}[2J\\\"",
        ),
        ("/v1/vms/%ff", 400, "UTF-8"),
        ("/v1/vms?sort=name", 400, "unknown field `sort`"),
        (
            "/v1/vms/web/rightsize?since_unix_ms=0&percentile=95",
            400,
            "percentile=95: expected above 0 and at most 1",
        ),
        ("/v1/vms/web/rightsize", 400, "missing field"),
        ("/v1/vms/nobody/rightsize?since_unix_ms=0", 404, "no VM"),
        (
            "/v1/vms/web/history?points=0",
            400,
            "points=0: expected 1 to 2000",
        ),
        ("/v1/vms/web/history?points=2001", 400, "expected 1 to 2000"),
        (
            "/v1/vms/web/history?since_unix_ms=9&until_unix_ms=3",
            400,
            "later than",
        ),
        (
            "/v1/vms/web/history?points=1&points=2",
            400,
            "duplicate field",
        ),
        ("/v1/vms/nobody/history", 404, "no VM is called"),
        ("/v1/vms/nobody/explain", 404, "no VM is called"),
        ("/v1/vms/web/whatif", 400, "missing field `size_bytes`"),
        ("/v1/vms/web/whatif?size_bytes=-1", 400, "size_bytes"),
        (
            "/v1/whatif?lose_bytes=99999999999999999999",
            400,
            "lose_bytes",
        ),
        ("/v1/decisions?limit=101", 400, "expected 1 to 100"),
        ("/v1/decisions/77", 404, "no decision 77"),
        ("/v1/decisions/x", 400, "/v1/decisions/x"),
        ("/v1/pause", 400, "does not take GET"),
        ("/assets/../Cargo.toml", 404, "no file"),
        ("/assets/%2e%2e/%2e%2e/Cargo.toml", 404, "no file"),
    ];
    for (path, status, why) in cases {
        let answer = served.raw(&get(path));
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{path}: {answer}"
        );
        assert!(
            answer.contains(why) && answer.contains(r#"{"schema":1,"kind":""#),
            "{path}: {answer}"
        );
    }
}

#[test]
fn what_is_no_request_ends_its_connection_and_nothing_else() {
    let served = ExampleServer::new(|_| {});
    let post = |body: &str, length: usize| {
        format!(
            "POST /v1/apply HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
    };
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20));
    let large = post(&"x".repeat(70_000), 70_000);
    let deep = post(&"[".repeat(60_000), 60_000);
    let cases: [(&[u8], &str); 8] = [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "HTTP/1.1 400"),
        (b"GET / HTTP/9.9\r\n\r\n", "HTTP/1.1 400"),
        (long.as_bytes(), "HTTP/1.1 4"),
        (large.as_bytes(), "HTTP/1.1 400"),
        (deep.as_bytes(), "HTTP/1.1 400"),
        (&get("/v1/apply"), "HTTP/1.1 400"),
        (
            post(r#"{"decision":1,"force":true}"#, 27).leak().as_bytes(),
            "HTTP/1.1 400",
        ),
        (post("\u{0}", 1).leak().as_bytes(), "HTTP/1.1 400"),
    ];
    for (request, begin) in cases {
        let answer = served.raw(request);
        assert!(answer.starts_with(begin), "{answer}");
    }
    assert!(
        served
            .raw(&large.into_bytes())
            .contains("length limit exceeded")
    );
    assert_eq!(served.client().host().unwrap().vms.len(), 4);
}

#[test]
fn the_turn_loop_does_what_it_is_told() {
    let served = ExampleServer::new(|_| {});
    let client = served.client();
    client.pause().unwrap();
    assert!(client.host().unwrap().paused);
    assert_eq!(kind(client.apply(Choice::default())), RefusalKind::Conflict);
    client.resume().unwrap();
    client.reload().unwrap();
    let other = Choice { decision: Some(3) };
    assert_eq!(kind(client.apply(other)), RefusalKind::Conflict);
    let applied = client.apply(Choice { decision: Some(4) }).unwrap();
    assert_eq!(applied.state, State::Moving);
    while client.decision(4).unwrap().state != State::Kept {
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(client.proposal().unwrap(), None);
    let back = client.roll_back(Choice::default()).unwrap();
    assert_eq!(back.takes_back, Some(4));

    let change = SettingsChange {
        max_loss: Some(0.5),
        ..SettingsChange::default()
    };
    let summary = client.set("web", &change).unwrap();
    assert_eq!(
        (summary.settings.promise, summary.settings.shares),
        (Promise::on_loss(0.5), 100)
    );
    let forbidden = SettingsChange {
        min_bytes: Some(1 << 40),
        ..SettingsChange::default()
    };
    assert_eq!(kind(client.set("web", &forbidden)), RefusalKind::Guarantee);
    assert_eq!(kind(client.set("nobody", &change)), RefusalKind::NotFound);
}

#[test]
fn a_read_only_door_shows_and_changes_nothing() {
    let served = ExampleServer::new(|_| {});
    let client = Client::connect(&read_only(served.folder.path())).unwrap();
    assert_eq!(client.host().unwrap().vms.len(), 4);
    assert_eq!(kind(client.pause()), RefusalKind::ReadOnly);
    assert_eq!(
        kind(client.set("web", &SettingsChange::default())),
        RefusalKind::ReadOnly
    );
    assert!(!client.host().unwrap().paused);
}

/// A served example whose turn loop is the test's.
fn without_turns(limits: Limits) -> (TempDir, Server, Receiver<Command>) {
    let folder = tempfile::tempdir().unwrap();
    let (shared, commands) = example::shared();
    let server = serve_within(shared, &settings(folder.path()), limits).unwrap();
    (folder, server, commands)
}

#[test]
fn a_turn_loop_that_does_not_answer_is_told_as_such() {
    let limits = Limits {
        command: Duration::from_millis(50),
        ..Limits::default()
    };
    let (folder, server, commands) = without_turns(limits);
    let client = Client::connect(&socket(folder.path())).unwrap();
    assert_eq!(kind(client.pause()), RefusalKind::Busy);
    assert!(matches!(commands.try_recv(), Ok(Command::Pause(_))));
    assert_eq!(client.host().unwrap().vms.len(), 4);
    drop(commands);
    let error = client.resume().unwrap_err().to_string();
    assert_eq!(error, "the daemon is shutting down; nothing was changed");
    server.stop();
    let gone = Client::connect(&socket(folder.path())).unwrap_err();
    assert!(matches!(gone, ClientError::Unreachable { .. }), "{gone}");
}

#[test]
fn a_crowd_at_one_door_does_not_shut_the_other() {
    let limits = Limits {
        connections: 3,
        head: Duration::from_millis(700),
        ..Limits::default()
    };
    let (folder, _server, _commands) = without_turns(limits);
    // They send nothing, or never finish.
    let crowd: Vec<_> = (0..3)
        .map(|at| {
            let mut stream = UnixStream::connect(read_only(folder.path())).unwrap();
            stream.write_all(&get("/v1/host")[..at * 5]).unwrap();
            stream
        })
        .collect();
    assert!(
        Client::connect(&socket(folder.path()))
            .unwrap()
            .host()
            .is_ok()
    );
    // Disconnected after the time limit, they make room.
    for mut stream in crowd {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    assert!(
        Client::connect(&read_only(folder.path()))
            .unwrap()
            .host()
            .is_ok()
    );
}

#[test]
fn sockets_have_their_permissions_and_are_taken_over_only_from_the_dead() {
    let served = ExampleServer::new(|_| {});
    let folder = served.folder.path();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(
        (mode(&socket(folder)), mode(&read_only(folder))),
        (0o660, 0o660)
    );
    let open = ExampleServer::new(|settings| settings.read_only_group = Some("everybody".into()));
    assert_eq!(mode(&read_only(open.folder.path())), 0o666);
    assert_eq!(mode(&socket(open.folder.path())), 0o660);
    let begin = |settings: &ServeSettings| serve(example::shared().0, settings);
    let taken = begin(&settings(folder)).unwrap_err();
    assert!(
        taken
            .to_string()
            .starts_with("another plimsolld serves there"),
        "{taken}"
    );
    assert_eq!(served.client().host().unwrap().vms.len(), 4);

    // The socket of a running server must not be removed; that of a dead one is.
    let elsewhere = tempfile::tempdir().unwrap();
    fs::create_dir(elsewhere.path().join("run")).unwrap();
    let stranger = UnixListener::bind(socket(elsewhere.path())).unwrap();
    let taken = begin(&settings(elsewhere.path())).unwrap_err();
    assert!(matches!(taken, ServeError::Taken { .. }), "{taken}");
    drop(stranger);
    begin(&settings(elsewhere.path())).unwrap().stop();
    assert!(!socket(elsewhere.path()).exists());
    fs::write(socket(elsewhere.path()), "precious").unwrap();
    let file = begin(&settings(elsewhere.path())).unwrap_err();
    assert!(matches!(file, ServeError::NoSocket { .. }), "{file}");
    assert_eq!(fs::read(socket(elsewhere.path())).unwrap(), b"precious");

    let mut nobodys = settings(tempfile::tempdir().unwrap().path());
    nobodys.group = Some("no such group".to_owned());
    let error = begin(&nobodys).unwrap_err();
    assert!(matches!(error, ServeError::NoGroup { .. }), "{error}");
}

#[test]
fn tcp_is_not_opened_to_everybody() {
    let folder = tempfile::tempdir().unwrap();
    let begin = |tcp: TcpSettings| {
        let mut settings = settings(folder.path());
        settings.tcp = Some(tcp);
        serve(example::shared().0, &settings).map(Server::stop)
    };
    let open = |tcp: TcpSettings| matches!(begin(tcp), Err(ServeError::Open { .. }));
    assert!(open(tcp("127.0.0.1:0")));
    for listen in ["0.0.0.0:0", "[::]:0"] {
        let mut everywhere = tcp(listen);
        everywhere.read_only = true;
        assert!(open(everywhere));
    }
    let mut look = tcp("127.0.0.1:0");
    look.read_only = true;
    begin(look).unwrap();

    let path = folder.path().join("token");
    let mut with_token = tcp("127.0.0.1:0");
    with_token.token_file = Some(path.clone());
    let refused = || begin(with_token.clone()).unwrap_err().to_string();
    assert!(refused().contains("No such file"));
    secret(path.clone(), "short");
    assert!(refused().contains("can be guessed"));
    secret(path.clone(), &"two words".repeat(9));
    assert!(refused().contains("one word"));
    secret(path.clone(), &"x".repeat(5000));
    assert!(refused().contains("over 4096 bytes"));
    secret(path.clone(), TOKEN);
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    assert!(refused().contains("others may read"));
    assert!(!socket(folder.path()).exists());
}

#[test]
fn over_tcp_a_token_is_needed_and_foreign_pages_are_kept_out() {
    let token = tempfile::tempdir().unwrap();
    let served = ExampleServer::new(|settings| {
        let mut tcp = tcp("127.0.0.1:0");
        tcp.token_file = Some(secret(token.path().join("token"), &format!("{TOKEN}\n")));
        settings.tcp = Some(tcp);
    });
    let address = served.server.as_ref().unwrap().tcp().unwrap();
    let ask = |method: &str, path: &str, headers: &str| {
        let request = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n");
        exchange(TcpStream::connect(address).unwrap(), request.as_bytes())
    };
    let host = format!("Host: {address}\r\n");
    let bearer = format!("{host}Authorization: Bearer {TOKEN}\r\n");
    let wrong = [
        host.clone(),
        format!("{host}Authorization: Bearer {}\r\n", &TOKEN[1..]),
        format!("{host}Authorization: Basic {TOKEN}\r\n"),
        format!("{host}Authorization: {TOKEN}\r\n"),
    ];
    for headers in wrong {
        for path in ["/v1/host", "/metrics", "/openapi.json", "/v1/nothing"] {
            let answer = ask("GET", path, &headers);
            assert!(answer.starts_with("HTTP/1.1 401 "), "{headers}{answer}");
            assert!(answer.contains("www-authenticate: Bearer"), "{answer}");
        }
    }
    assert!(ask("GET", "/v1/host", &bearer).starts_with("HTTP/1.1 200 "));
    assert!(ask("GET", "/healthz", &host).starts_with("HTTP/1.1 200 "));
    // The page itself holds no secret.
    let page = ask("GET", "/", &host);
    assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
    assert!(
        page.contains("content-security-policy: default-src 'self'"),
        "{page}"
    );
    let tag = page
        .lines()
        .find_map(|line| line.strip_prefix("etag: "))
        .unwrap();
    let known = format!("{host}If-None-Match: {tag}\r\n");
    assert!(ask("GET", "/", &known).starts_with("HTTP/1.1 304 "));

    let (_, token) = bearer.split_once("\r\n").unwrap();
    for host in [
        "",
        "Host: evil.example\r\n",
        "Host: 10.0.0.1\r\n",
        "Host: localhost\r\nHost: evil\r\n",
    ] {
        let answer = ask("GET", "/v1/host", &format!("{host}{token}"));
        assert!(answer.starts_with("HTTP/1.1 400 "), "{host}{answer}");
    }
    for host in ["localhost:1", "127.0.0.1", "[::1]:80"] {
        let answer = ask("GET", "/v1/host", &format!("Host: {host}\r\n{token}"));
        assert!(answer.starts_with("HTTP/1.1 200 "), "{host}{answer}");
    }
    let change = |origin: &str| ask("POST", "/v1/pause", &format!("{bearer}{origin}"));
    for origin in ["http://evil.example", "null", "http://127.0.0.1:1"] {
        let answer = change(&format!("Origin: {origin}\r\n"));
        assert!(answer.starts_with("HTTP/1.1 401 "), "{origin}: {answer}");
        assert!(!answer.contains("access-control"), "{answer}");
    }
    assert!(!served.client().host().unwrap().paused);
    let own = change(&format!("Origin: http://{address}\r\n"));
    assert!(own.starts_with("HTTP/1.1 200 "), "{own}");
    assert!(served.client().host().unwrap().paused);
}

/// A certificate authority and a certificate signed by it: certificate and key in PEM.
fn signed(name: &str) -> (String, String, String) {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let leaf = leaf.signed_by(&key, &authority).unwrap();
    (authority.pem(), leaf.pem(), key.serialize_pem())
}

#[test]
fn over_tls_clients_show_a_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| secret(folder.path().join(name), text);
    let (server_ca, certificate, key) = signed("localhost");
    let (client_ca, client, client_key) = signed("operator");
    let tls = TlsSettings {
        certificate: file("certificate", &certificate),
        key: file("key", &key),
        client_ca: Some(file("client-ca", &client_ca)),
    };
    let served = ExampleServer::new(|settings| {
        let mut tcp = tcp("127.0.0.1:0");
        tcp.tls = Some(tls.clone());
        settings.tcp = Some(tcp);
    });
    let address = served.server.as_ref().unwrap().tcp().unwrap();
    let ask = |shown: Option<(&str, &str)>| {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(server_ca.as_bytes()).unwrap())
            .unwrap();
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_root_certificates(roots);
        let config = match shown {
            None => config.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                config.with_client_auth_cert(chain, key).unwrap()
            }
        };
        let name = ServerName::try_from("localhost").unwrap();
        let tls = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        exchange(
            rustls::StreamOwned::new(tls, TcpStream::connect(address).unwrap()),
            &get("/v1/host"),
        )
    };
    assert!(ask(Some((&client, &client_key))).starts_with("HTTP/1.1 200 "));
    assert_eq!(ask(None), "");
    let (_, stranger, strangers_key) = signed("operator");
    assert_eq!(ask(Some((&stranger, &strangers_key))), "");
    let plain = exchange(TcpStream::connect(address).unwrap(), &get("/v1/host"));
    assert!(!plain.contains("HTTP"), "{plain}");

    let begin = |tls: TlsSettings| {
        let mut settings = settings(&folder.path().join("other"));
        settings.tcp = Some(TcpSettings {
            tls: Some(tls),
            ..tcp("127.0.0.1:0")
        });
        serve(example::shared().0, &settings)
            .unwrap_err()
            .to_string()
    };
    let wrong_key = TlsSettings {
        key: file("other-key", &client_key),
        ..tls.clone()
    };
    assert!(begin(wrong_key).contains("certificate"));
    let empty = TlsSettings {
        certificate: file("empty", ""),
        ..tls
    };
    assert!(begin(empty).contains("no certificate"));
}

#[test]
fn events_are_told_as_they_happen_until_the_server_ends() {
    let mut served = ExampleServer::new(|_| {});
    let mut stream = UnixStream::connect(socket(served.folder.path())).unwrap();
    stream.write_all(&get("/v1/events")).unwrap();
    let mut told = String::new();
    let mut buffer = [0; 512];
    while told.matches(r#"data: {"event":"turn","turn":"#).count() < 2 {
        let read = stream.read(&mut buffer).unwrap();
        assert!(read > 0, "{told}");
        told.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
    }
    assert!(told.contains("content-type: text/event-stream"), "{told}");
    served.client().apply(Choice::default()).unwrap();
    while !told.contains(r#"data: {"event":"decision","id":4}"#) {
        let read = stream.read(&mut buffer).unwrap();
        assert!(read > 0, "{told}");
        told.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
    }
    drop(served.server.take());
    stream.read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn a_daemon_whose_turns_do_not_come_is_not_well() {
    let (sender, _commands) = mpsc::sync_channel(1);
    let history = Arc::new(History::nowhere());
    let time = Arc::new(Mutex::new(Time {
        since_boot: Duration::ZERO,
        unix_ms: 1 << 40,
    }));
    let now = Arc::clone(&time);
    let shared = Arc::new(SharedState::new(
        example::snapshot(1 << 40),
        sender,
        history,
        Clock::new(move || *now.lock().unwrap()),
    ));
    let folder = tempfile::tempdir().unwrap();
    let _server = serve(shared, &settings(folder.path())).unwrap();
    let health = || {
        let stream = UnixStream::connect(socket(folder.path())).unwrap();
        exchange(stream, &get("/healthz"))
    };
    let hour_ms = 3_600_000;
    let is_well = |answer: &str| answer.starts_with("HTTP/1.1 200 ");
    assert!(is_well(&health()));
    // The clock was set: the turns come all the same.
    time.lock().unwrap().unix_ms += hour_ms;
    assert!(is_well(&health()));
    let mut hour_later = time.lock().unwrap();
    hour_later.since_boot += Duration::from_millis(hour_ms);
    hour_later.unix_ms -= 2 * hour_ms;
    drop(hour_later);
    let answer = health();
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.contains("3600 s ago"), "{answer}");
}

#[test]
fn the_committed_description_is_the_servers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    let mut now = openapi().to_pretty_json().unwrap();
    now.push('\n');
    if std::env::var_os("PLIMSOLL_WRITE_OPENAPI").is_some() {
        fs::write(&path, &now).unwrap();
    }
    let hint = "run this test with PLIMSOLL_WRITE_OPENAPI=1 to write it anew";
    assert!(
        fs::read_to_string(path).unwrap() == now,
        "docs/openapi.json is old: {hint}"
    );
}

/// The example's metrics, with a VM of a hostile name.
fn metrics() -> String {
    let mut snapshot = example::snapshot(1_800_000_000_000);
    snapshot.host.history_bytes = Some(12345);
    let mut hostile = snapshot.host.vms[3].clone();
    hostile.vm = "a\"} 1\nplimsoll_paused 7\\".to_owned();
    snapshot.host.vms.push(hostile);
    text(&snapshot, [0, 2, 1, 0, 0, 0])
}

#[test]
fn metrics_tell_what_the_host_is() {
    let text = metrics();
    for line in [
        "plimsoll_vm_size_bytes{vm=\"web\"} 536870912",
        "plimsoll_vm_direct_bytes{vm=\"web\"} 469762048",
        "plimsoll_host_memory_bytes{holder=\"spare\"} 268435456",
        "plimsoll_history_bytes 12345",
        "plimsoll_decisions_total{state=\"kept\"} 2",
        "plimsoll_vm_standing{vm=\"fresh\",standing=\"unknown\"} 1",
        "plimsoll_trace_overhead_ratio{vm=\"scan\"} 0.0098",
        "plimsoll_trace_lost_references_total{vm=\"scan\"} 3",
        "plimsoll_paused 0",
    ] {
        assert!(text.lines().any(|have| have == line), "{line}\n{text}");
    }
    assert!(
        text.contains("{vm=\"a\\\"} 1\\nplimsoll_paused 7\\\\\"}"),
        "{text}"
    );
    assert!(!text.contains("plimsoll_vm_promise_bytes{vm=\"fresh\"}"));
    let bound = "plimsoll_vm_working_set_bytes{vm=\"scan\",bound=\"at_least\"} ";
    assert!(text.contains(bound), "{text}");
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn the_curve_as_a_histogram_rises_to_all_references() {
    let text = metrics();
    let begin = "plimsoll_vm_reuse_distance_bytes_bucket{vm=\"search\",le=\"";
    let buckets: Vec<(f64, f64)> = text
        .lines()
        .filter_map(|line| line.strip_prefix(begin)?.split_once("\"} "))
        .map(|(bound, count)| (bound.parse().unwrap(), count.parse().unwrap()))
        .collect();
    assert!((10..=40).contains(&buckets.len()));
    assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
    assert_eq!(buckets.last(), Some(&(f64::INFINITY, 1_250_000.0)));
    // The curve of "search" is 0.80 below 224 MiB and 0.05 above 320.
    let at = |mib: f64| {
        buckets
            .iter()
            .find(|bucket| bucket.0 == mib * 1_048_576.0)
            .unwrap()
            .1
    };
    assert_eq!(at(192.0), 1_250_000.0 * 0.2);
    assert_eq!(at(384.0), 1_250_000.0 * 0.95);
    let first = "plimsoll_vm_first_references{vm=\"search\"} 62500";
    assert!(text.lines().any(|line| line == first), "{text}");
}

#[test]
fn promtool_reads_the_metrics() {
    let promtool = || Program::new("promtool");
    if promtool().arg("--version").output().is_err() {
        skip(
            Lack::Program,
            "promtool is not installed (Debian: prometheus)",
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Only with a timestamp would it take samples from a file.
    let timed = metrics().lines().fold(String::new(), |text, line| {
        let time = if line.starts_with('#') {
            ""
        } else {
            " 1800000000"
        };
        text + line + time + "\n"
    });
    fs::write(folder.path().join("metrics"), timed).unwrap();
    let read = promtool()
        .args([
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            "metrics",
            "blocks",
        ])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(
        read.status.success(),
        "{}",
        String::from_utf8_lossy(&read.stderr)
    );
    let rules = packaging("prometheus/alerts.yml");
    let checked = promtool()
        .args(["check", "rules"])
        .arg(rules)
        .output()
        .unwrap();
    assert!(
        checked.status.success(),
        "{}",
        String::from_utf8_lossy(&checked.stderr)
    );
}

fn packaging(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../packaging")
        .join(file)
}

/// Our metric names in a text.
fn names(text: &str) -> BTreeSet<&str> {
    text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'))
        .filter(|word| word.starts_with("plimsoll_"))
        .collect()
}

#[test]
fn dashboards_and_alerts_ask_only_for_what_is_told() {
    let text = metrics();
    let samples: String = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(|line| [line.split(['{', ' ']).next().unwrap_or_default(), "\n"])
        .collect();
    let told = names(&samples);
    assert!(told.len() > 50, "{told:?}");
    for file in ["grafana/plimsoll.json", "prometheus/alerts.yml"] {
        let asked = fs::read_to_string(packaging(file)).unwrap();
        if file.ends_with("json") {
            serde_json::from_str::<serde_json::Value>(&asked).unwrap();
        }
        let asked = names(&asked);
        assert!(asked.len() > 5, "{file}");
        let unknown: Vec<_> = asked.difference(&told).collect();
        assert!(unknown.is_empty(), "{file}: {unknown:?}");
    }
}

#[test]
fn decisions_are_counted_once_and_when_they_end() {
    let (shared, _commands) = example::shared();
    let folder = tempfile::tempdir().unwrap();
    let _server = serve(Arc::clone(&shared), &settings(folder.path())).unwrap();
    let kept = || {
        let stream = UnixStream::connect(socket(folder.path())).unwrap();
        let text = exchange(stream, &get("/metrics"));
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("plimsoll_decisions_total{state=\"kept\"} "));
        line.unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(kept(), 0);
    let mut decision = shared.history.decision(4).unwrap();
    decision.state = State::Kept;
    shared.history.put_decision(&decision);
    assert_eq!((kept(), kept()), (1, 1));
    // More than are read at a time.
    for id in 5..255 {
        decision.id = id;
        shared.history.put_decision(&decision);
    }
    assert_eq!((kept(), kept()), (251, 251));
}
