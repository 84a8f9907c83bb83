//! The example host, served, queried by the client and by invalid requests.

mod doors;
mod metrics;

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use plimsoll_protocol::client::{Client, ClientError};
use plimsoll_protocol::decision::State;
use plimsoll_protocol::path::{of_vm, query};
use plimsoll_protocol::request::{Choice, RefusalKind, SettingsChange};
use plimsoll_protocol::vm::{KeptCurves, Promise, VmStatus};
use tempfile::TempDir;

use super::serve::{Limits, serve_within};
use super::{Server, example, openapi, serve};
use crate::clock::{self, Clock, Time};
use crate::config::{ServeSettings, TcpSettings};
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

    fn raw_bytes(&self, request: &[u8]) -> Vec<u8> {
        let mut stream = UnixStream::connect(socket(self.folder.path())).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer
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
        curve_buckets: false,
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
fn a_control_group_is_shown_by_name_or_path_and_refuses_what_is_for_vms() {
    let served = ExampleServer::new(|_| {});
    let client = served.client();
    let path = "/system.slice/nginx.service";
    for name in ["nginx.service", path] {
        let group = client.group(name).unwrap();
        assert_eq!(&*group.summary.path, path);
        assert_eq!(group.curve.unwrap().vm, "nginx.service");
        let history = client.group_history(name, None, None, Some(10)).unwrap();
        let shown = (&*history.vm, history.samples.len());
        assert_eq!(shown, ("nginx.service", 0));
    }
    let odd = client.group("/system.slice/odd\u{1b}[2J<b>\n").unwrap();
    assert_eq!(odd.summary.group, r"odd\u{1b}[2J<b>\n");
    assert_eq!(odd.curve, None);
    let host = client.host().unwrap();
    assert_eq!(host.groups.watched.len(), 2);
    assert!(host.vms.iter().all(|vm| vm.vm != "nginx.service"));
    let listed = served.raw(&get("/v1/groups"));
    assert!(listed.contains("groups.max"), "{listed}");
    assert_eq!(kind(client.group("none")), RefusalKind::NotFound);
    let refusal = client.group("none").unwrap_err().to_string();
    assert!(refusal.contains("`plimsoll vms`"), "{refusal}");
    let history = |group: &str| client.group_history(group, None, None, None);
    assert_eq!(kind(history("/none")), RefusalKind::NotFound);
    assert_eq!(kind(history("none")), RefusalKind::NotFound);
    for name in ["nginx.service", path, "cgroup:nginx.service"] {
        let observed = RefusalKind::ObservedOnly;
        assert_eq!(kind(client.vm(name)), observed);
        assert_eq!(kind(client.curve(name)), observed);
        assert_eq!(kind(client.heatmap(name)), observed);
        assert_eq!(kind(client.explain(name)), observed);
        assert_eq!(kind(client.vm_what_if(name, 1 << 20)), observed);
        assert_eq!(kind(client.rightsize(name, 0, 0.95)), observed);
        assert_eq!(kind(client.set(name, &SettingsChange::default())), observed);
    }
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
    let now = client.vm("web").unwrap().summary;
    assert_eq!(right.right_bytes, now.promise_bytes);
    assert!((5..=7).contains(&right.curves), "{right:?}");
    let none = client.rightsize("fresh", 0, 0.95).unwrap();
    assert_eq!((none.curves, none.right_bytes), (0, None));
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
fn needs_over_time_follow_from_the_curves_of_the_history() {
    let example = ExampleServer::new(|_| ());
    let client = example.client();
    let since_unix_ms = clock::unix_ms() - 1_800_000;
    let demands = client.demands(since_unix_ms, 600_000).unwrap();
    assert_eq!(demands.interval_ms, 600_000);
    assert!(demands.processors.is_some_and(|processors| processors > 0));
    let of = |vm: &str| demands.vms.iter().find(|found| found.vm == vm).unwrap();
    // The example's curves never change, so it needs in every interval what it needs now.
    for vm in ["web", "search"] {
        let found = of(vm);
        let now = client.vm(vm).unwrap().summary;
        assert!(found.intervals.len() >= 2, "{found:?}");
        assert_eq!((found.present, &found.uuid), (true, &now.uuid));
        for interval in &found.intervals {
            assert_eq!(interval.need_bytes, now.promise_bytes.unwrap());
        }
    }
    // It has no curve: it counts with its baseline.
    assert_eq!(of("fresh").intervals, []);
    assert_eq!(of("fresh").unknown_need_bytes, 512 << 20);
}

#[test]
fn kept_curves_are_those_of_an_interval() {
    let example = ExampleServer::new(|_| ());
    let client = example.client();
    let now = clock::unix_ms();
    let kept = |since_unix_ms: u64, until_unix_ms: u64| {
        let query = query(&[
            ("since_unix_ms", Some(since_unix_ms.to_string())),
            ("until_unix_ms", Some(until_unix_ms.to_string())),
        ]);
        let kept: KeptCurves = client
            .get(&of_vm("web", &format!("/curves{query}")))
            .unwrap();
        kept.curves
    };
    let all = kept(now - 3_600_000, now);
    assert!((5..=7).contains(&all.len()), "{}", all.len());
    for kept in &all {
        assert!(kept.curve.points.len() <= 48);
        kept.curve.to_curve().unwrap();
    }
    assert_eq!(kept(all[1].unix_ms, all[3].unix_ms), all[1..3]);
    assert_eq!(kept(0, 1), []);
}

#[test]
fn an_answer_that_a_client_has_is_not_sent_again_and_a_large_one_is_compressed() {
    let example = ExampleServer::new(|_| ());
    let ask = |headers: &str| {
        let request = format!(
            "GET /v1/vms/web/curve HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
        );
        example.raw_bytes(request.as_bytes())
    };
    let plain = ask("");
    let head = String::from_utf8_lossy(&plain).to_lowercase();
    let tag = head.split("etag: ").nth(1).unwrap();
    let tag = tag.split("\r\n").next().unwrap();
    for known in [
        tag.to_owned(),
        format!("\"other\", W/{tag}"),
        "*".to_owned(),
    ] {
        let again = ask(&format!("If-None-Match: {known}\r\n"));
        let again = String::from_utf8_lossy(&again);
        assert!(again.starts_with("HTTP/1.1 304 "), "{again}");
        assert!(again.ends_with("\r\n\r\n"), "{again}");
    }
    assert!(ask("If-None-Match: \"other\"\r\n").starts_with(b"HTTP/1.1 200 "));
    let packed = ask("Accept-Encoding: gzip\r\n");
    let end = packed
        .windows(4)
        .position(|part| part == b"\r\n\r\n")
        .unwrap();
    let head = String::from_utf8_lossy(&packed[..end]).to_lowercase();
    assert!(head.contains("content-encoding: gzip"), "{head}");
    assert!(
        packed.len() * 2 < plain.len(),
        "{} of {}",
        packed.len(),
        plain.len()
    );
    // The page's files are not, because everybody may request them without end.
    for path in ["/", "/assets/main.js", "/assets/style.css"] {
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAccept-Encoding: gzip\r\n\r\n"
        );
        let answer = example.raw(request.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert!(!answer.contains("content-encoding"), "{path}");
    }
    // What a client is sent as it happens is not held back to be compressed.
    let events = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n";
    let mut stream = UnixStream::connect(socket(example.folder.path())).unwrap();
    stream.write_all(events).unwrap();
    let mut begin = Vec::new();
    while !begin.windows(6).any(|part| part == b"data: ") {
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).unwrap(), 1);
        begin.push(byte[0]);
    }
}

#[test]
fn what_would_be_follows_from_the_curves() {
    let served = ExampleServer::new(|_| {});
    let client = served.client();
    let less = client.vm_what_if("web", 256 << 20).unwrap();
    assert_eq!(less.status_then, VmStatus::Violating);
    assert!(less.relative_then.unwrap().expected > 2.0);
    let more = client.vm_what_if("web", 1 << 30).unwrap();
    assert_eq!(more.status_then, VmStatus::Safe);
    let above = client.vm_what_if("web", 2 << 30).unwrap();
    assert!(
        above.why.ends_with("it never gets more than 1 GiB"),
        "{}",
        above.why
    );
    // Below its first point a curve says nothing.
    let tiny = client.vm_what_if("web", 4096).unwrap();
    assert_eq!(
        (tiny.status_then, tiny.relative_then),
        (VmStatus::Unknown, None)
    );
    assert!(tiny.why.contains("does not resolve"), "{}", tiny.why);
    let unknown = client.vm_what_if("fresh", 1 << 20).unwrap();
    assert_eq!(
        (unknown.status_then, unknown.relative_then),
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
    let ram_bytes = i64::try_from(client.host().unwrap().memory.total_bytes).unwrap();
    for too_much in [i64::MIN, -ram_bytes - 1] {
        assert_eq!(kind(client.host_what_if(too_much)), RefusalKind::BadRequest);
    }
    let won = client.host_what_if(-ram_bytes).unwrap();
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
        (
            "/v1/demands?interval_ms=59999",
            400,
            "expected 60000 or more",
        ),
        (
            "/v1/demands?since_unix_ms=0&interval_ms=60000",
            400,
            "at most 10000 intervals",
        ),
        ("/v1/vms/nobody/history", 404, "no VM is called"),
        ("/v1/vms/nobody/curves", 404, "no VM is called"),
        (
            "/v1/vms/web/curves?since_unix_ms=9&until_unix_ms=3",
            400,
            "later than until_unix_ms",
        ),
        ("/v1/vms/web/curves?points=3", 400, "points"),
        ("/v1/vms/nobody/explain", 404, "no VM is called"),
        ("/v1/vms/web/whatif", 400, "missing field `size_bytes`"),
        ("/v1/vms/web/whatif?size_bytes=-1", 400, "size_bytes"),
        (
            "/v1/whatif?lose_bytes=99999999999999999999",
            400,
            "lose_bytes",
        ),
        ("/v1/decisions?limit=101", 400, "expected 1 to 100"),
        ("/v1/decisions?limit=0", 400, "expected 1 to 100"),
        (
            "/v1/vms/web/rightsize?since_unix_ms=0&percentile=0",
            400,
            "expected above 0 and at most 1",
        ),
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
fn numbers_within_the_ranges_of_the_description_are_accepted() {
    let served = ExampleServer::new(|_| {});
    for path in [
        "/v1/decisions?limit=1",
        "/v1/decisions?limit=100",
        "/v1/vms/web/history?since_unix_ms=0&points=1",
        "/v1/vms/web/history?points=2000",
        "/v1/vms/web/curves?since_unix_ms=0",
        "/v1/vms/web/rightsize?since_unix_ms=0&percentile=1",
        "/v1/demands?since_unix_ms=0",
        "/v1/demands?interval_ms=60000",
    ] {
        let answer = served.raw(&get(path));
        assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
    }
    let document = serde_json::to_value(openapi::openapi()).unwrap();
    let ranges = |path: &str, name: &str| {
        let parameters = document["paths"][path]["get"]["parameters"].as_array();
        let mut named = parameters.unwrap().iter().filter(|it| it["name"] == name);
        let schema = &named.next().unwrap()["schema"];
        ["minimum", "exclusiveMinimum", "maximum"].map(|limit| schema[limit].as_f64())
    };
    for (path, name, expected) in [
        ("/v1/decisions", "limit", [Some(1.0), None, Some(100.0)]),
        (
            "/v1/vms/{vm}/history",
            "points",
            [Some(1.0), None, Some(2000.0)],
        ),
        (
            "/v1/vms/{vm}/rightsize",
            "percentile",
            [None, Some(0.0), Some(1.0)],
        ),
        ("/v1/demands", "interval_ms", [Some(60_000.0), None, None]),
        ("/v1/demands", "since_unix_ms", [Some(0.0), None, None]),
    ] {
        assert_eq!(ranges(path, name), expected, "{path} {name}");
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
        (summary.vm.settings.promise, summary.vm.settings.shares),
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
fn connections_without_a_request_make_room_and_end_in_time() {
    let limits = Limits {
        strangers: 3,
        admission: Duration::from_millis(700),
        ..Limits::default()
    };
    let (folder, _server, _commands) = without_turns(limits);
    // They send nothing, or never finish.
    let crowd: Vec<_> = (0..20)
        .map(|at| {
            let mut stream = UnixStream::connect(read_only(folder.path())).unwrap();
            // It may have made room already.
            let _ = stream.write_all(&get("/v1/host")[..at]);
            stream
        })
        .collect();
    for door in [socket, read_only] {
        let client = Client::connect(&door(folder.path())).unwrap();
        assert!(client.host().is_ok());
    }
    for mut stream in crowd {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
}

#[test]
fn a_door_whose_clients_are_all_served_opens_again_when_one_leaves() {
    let limits = Limits {
        clients: 2,
        strangers: 2,
        ..Limits::default()
    };
    let (folder, _server, _commands) = without_turns(limits);
    let events = || {
        let mut stream = UnixStream::connect(read_only(folder.path())).unwrap();
        stream.write_all(&get("/v1/events")).unwrap();
        assert!(stream.read(&mut [0; 512]).unwrap() > 0);
        stream
    };
    let (leaving, mut staying) = (events(), events());
    let mut waiting = UnixStream::connect(read_only(folder.path())).unwrap();
    waiting.write_all(&get("/v1/host")).unwrap();
    waiting
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    assert!(waiting.read(&mut [0; 512]).is_err());
    waiting.set_read_timeout(None).unwrap();
    drop(leaving);
    assert!(waiting.read(&mut [0; 512]).unwrap() > 0);
    // The other one was not displaced.
    staying.set_nonblocking(true).unwrap();
    while let Ok(read) = staying.read(&mut [0; 512]) {
        assert!(read > 0);
    }
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
fn the_description_types_path_parameters_and_lets_flattened_fields_be_absent() {
    let document = serde_json::to_value(openapi()).unwrap();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for operation in operations.as_object().unwrap().values() {
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            for parameter in parameters {
                assert!(parameter["schema"].is_object(), "{path}: {parameter}");
            }
            // As the server, which takes no body for `{}`.
            assert_ne!(operation["requestBody"]["required"], true, "{path}");
        }
    }
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        for part in schema["allOf"].as_array().into_iter().flatten() {
            assert!(
                !part.to_string().starts_with(r#"{"oneOf":[{"type":"null"}"#),
                "{name}"
            );
        }
    }
    let point = &document["components"]["schemas"]["PointJson"]["allOf"];
    assert!(point[0]["anyOf"].is_array(), "{point}");
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
