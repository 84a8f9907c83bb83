//! A daemon of this test's own: it speaks the API over a Unix socket and remembers what it was asked.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::answer::{Acknowledgement, ChangedVm, VmsView};
use plimsoll_protocol::curve_json::MissesJson;
use plimsoll_protocol::decision::{Decision, DecisionsView, State, StepState};
use plimsoll_protocol::plan::{PlanJson, Policy, Reason, Search, TargetJson};
use plimsoll_protocol::request::{HostWhatIf, Refusal, RefusalKind, SettingsChange, VmWhatIf};
use plimsoll_protocol::vm::{Relative, VmStatus, VmSummary};
use serde::Serialize;
use tempfile::TempDir;

use super::host;
use super::program::ran;

/// How it behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Does what it is asked.
    Willing,
    /// Only shows.
    ReadOnly,
    /// Refuses all changes by a guarantee.
    Strict,
    /// Carries moves out in part.
    Clumsy,
    /// Never ends a move.
    Slow,
    /// Has one more VM, whose name is that of no VM.
    Misnamed,
    /// Has neither VMs nor control groups.
    Empty,
    /// Answers what no program understands.
    Mad,
}

/// What it was asked, and how often a decision was looked at.
#[derive(Debug, Default)]
struct RequestLog {
    requests: Vec<String>,
    looks: u32,
}

/// The server; it ends with the process.
pub struct Server {
    folder: TempDir,
    seen: Arc<Mutex<RequestLog>>,
}

impl Server {
    pub fn new(manner: Manner) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let seen = Arc::new(Mutex::new(RequestLog::default()));
        let shared = Arc::clone(&seen);
        thread::spawn(move || {
            for stream in listener.incoming() {
                serve(stream.unwrap(), manner, &shared);
            }
        });
        Self { folder, seen }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// The program with a verb, speaking to this server.
    pub fn verb(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command.args(words).arg("--socket").arg(self.socket());
        command.env("TZ", "UTC");
        command
    }

    /// Runs a verb that must succeed in silence, and returns what it wrote.
    pub fn text(&self, words: &[&str]) -> String {
        let (code, text, complaint) = ran(&mut self.verb(words));
        assert_eq!((code, &*complaint), (Some(0), ""), "{words:?}");
        text
    }

    /// What it was asked, method, path and body, without looks.
    pub fn changes(&self) -> Vec<String> {
        let seen = self.seen.lock().unwrap();
        let changes = seen.requests.iter().filter(|line| !line.starts_with("GET"));
        changes.cloned().collect()
    }
}

fn serve(stream: UnixStream, manner: Manner, seen: &Mutex<RequestLog>) {
    let mut reader = BufReader::new(stream);
    let (mut request, mut body_bytes) = (String::new(), 0);
    // Who only looks whether somebody is there asks nothing.
    if reader.read_line(&mut request).unwrap_or(0) == 0 {
        return;
    }
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).unwrap();
        if header.trim().is_empty() {
            break;
        }
        if let Some(length) = header.to_ascii_lowercase().strip_prefix("content-length:") {
            body_bytes = length.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; body_bytes];
    reader.read_exact(&mut body).unwrap();
    let body = String::from_utf8(body).unwrap();
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let looks = {
        let mut seen = seen.lock().unwrap();
        seen.requests.push(format!("{method} {path} {body}"));
        seen.looks += u32::from(path.starts_with("/v1/decisions/"));
        seen.looks
    };
    let (status, answer) = match manner {
        Manner::Mad => (200, "\u{1b}[2J is no JSON".to_owned()),
        _ => answer(method, path, &body, manner, looks),
    };
    let text = format!(
        "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{answer}",
        answer.len()
    );
    // The client may have had enough.
    let _ = reader.into_inner().write_all(text.as_bytes());
}

type Answer = (u16, String);

fn ok(value: impl Serialize) -> Answer {
    (200, serde_json::to_string(&value).unwrap())
}

fn refused(kind: RefusalKind, message: &str) -> Answer {
    let refusal = Refusal {
        schema: SCHEMA,
        kind,
        message: message.to_owned(),
    };
    (kind.status(), serde_json::to_string(&refusal).unwrap())
}

fn answer(method: &str, path: &str, body: &str, manner: Manner, looks: u32) -> Answer {
    match (method, manner) {
        ("GET", _) | (_, Manner::Willing | Manner::Clumsy | Manner::Slow) => {}
        (_, Manner::Strict) => {
            let why = "web would miss 1.40 of what it was promised\u{1b}[2J; nothing was moved";
            return refused(RefusalKind::Guarantee, why);
        }
        _ => return refused(RefusalKind::ReadOnly, "this socket only shows"),
    }
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let parts: Vec<_> = path.trim_start_matches('/').split('/').collect();
    match (method, &parts[..]) {
        ("GET", ["v1", "host"]) => {
            let mut view = host::host();
            if manner == Manner::Empty {
                view.vms.clear();
                view.groups.watched.clear();
            }
            view.vms
                .extend((manner == Manner::Misnamed).then(host::misnamed));
            ok(view)
        }
        ("GET", ["v1", "vms"]) => ok(VmsView {
            schema: SCHEMA,
            vms: host::host().vms,
        }),
        ("GET", ["v1", "whatif"]) => host_what_if(query),
        ("GET", ["v1", "decisions"]) => ok(DecisionsView {
            schema: SCHEMA,
            decisions: host::decisions(),
        }),
        ("GET", ["v1", "decisions", _]) => ok(decision(match (manner, looks) {
            (Manner::Slow, _) | (_, ..2) => State::Checking,
            (Manner::Clumsy, _) => State::Partly,
            _ => State::Kept,
        })),
        ("POST", ["v1", "apply" | "rollback"]) => ok(decision(State::Moving)),
        ("POST", ["v1", "pause" | "resume"]) => ok(Acknowledgement::DONE),
        (_, ["v1", "vms", vm, rest @ ..]) => {
            let vm = percent_encoding::percent_decode_str(vm)
                .decode_utf8()
                .unwrap();
            if host::group(&vm).is_some() {
                let why = format!("{vm:?} is a control group, which is only observed");
                return refused(RefusalKind::ObservedOnly, &why);
            }
            of_vm(method, &vm, rest, query, body)
        }
        ("GET", ["v1", "groups", group, rest @ ..]) => {
            let group = percent_encoding::percent_decode_str(group);
            let group = group.decode_utf8().unwrap();
            match (host::group(&group), rest) {
                (Some(view), []) => ok(view),
                (Some(view), ["history"]) => ok(host::history(&view.summary.group)),
                _ => refused(RefusalKind::NotFound, "no such control group is watched"),
            }
        }
        _ => refused(RefusalKind::NotFound, "no such page"),
    }
}

/// Decision 12 as it is being carried out; in the end mail's part of it fails if it is done in part.
fn decision(state: State) -> Decision {
    let mut decision = host::decisions().remove(1);
    if !state.has_ended() {
        decision.ended_unix_ms = None;
        decision.checks.clear();
    }
    if state == State::Partly {
        let step = &mut decision.steps[0];
        step.now = step.from;
        step.state = StepState::Stuck;
        step.error = Some("its balloon does not follow\u{1b}[2J; it keeps what it has".to_owned());
    }
    decision.state = state;
    decision
}

fn host_what_if(query: &str) -> Answer {
    let lose_bytes: i64 = query.strip_prefix("lose_bytes=").unwrap().parse().unwrap();
    let short = u64::try_from(lose_bytes).is_ok_and(|bytes| bytes > 120 * host::MIB);
    ok(HostWhatIf {
        schema: SCHEMA,
        lose_bytes,
        plan: (!short).then(plan),
        refusal: short.then(|| "the promises need 136 MiB more than there would be".to_owned()),
    })
}

fn of_vm(method: &str, name: &str, rest: &[&str], query: &str, body: &str) -> Answer {
    let Some(mut view) = host::vm(name) else {
        return refused(RefusalKind::NotFound, "no such VM");
    };
    match (method, rest) {
        ("GET", []) => ok(view),
        ("GET", ["history"]) => ok(host::history(name)),
        ("GET", ["heatmap"]) if view.curve.is_none() => refused(
            RefusalKind::NotFound,
            "it is not traced, so nobody knows where it is busy",
        ),
        ("GET", ["heatmap"]) => ok(host::heatmap(name)),
        ("GET", ["explain"]) => {
            let mut decisions = host::decisions();
            decisions.retain(|decision| decision.steps.iter().any(|step| step.vm == name));
            ok(DecisionsView {
                schema: SCHEMA,
                decisions,
            })
        }
        ("GET", ["whatif"]) => {
            let size_then = query.strip_prefix("size_bytes=").unwrap().parse().unwrap();
            ok(VmWhatIf {
                schema: SCHEMA,
                vm: name.to_owned(),
                size_bytes: view.summary.size_bytes,
                size_then_bytes: size_then,
                misses: view.summary.misses,
                misses_then: Some(MissesJson {
                    misses_per_second: 140.0,
                    misses_low_per_second: 9.24,
                    misses_high_per_second: 23_456.0,
                }),
                vcpu_seconds_per_second: Some(0.5),
                relative: view.summary.relative,
                relative_then: Some(Relative {
                    expected: 1.2,
                    low: 1.1,
                    high: 1.24,
                }),
                status_then: VmStatus::Tight,
                why: "its promise would just be kept".to_owned(),
            })
        }
        ("PATCH", []) => {
            let change: SettingsChange = serde_json::from_str(body).unwrap();
            let settings = &mut view.summary.settings;
            settings.min_bytes = change.min_bytes.unwrap_or(settings.min_bytes);
            settings.promise = change.promise().unwrap_or(settings.promise);
            settings.managed = change.managed.unwrap_or(settings.managed);
            ok(ChangedVm {
                acknowledgement: Acknowledgement::DONE,
                vm: view.summary,
            })
        }
        _ => refused(RefusalKind::NotFound, "no such page"),
    }
}

/// How the host would be divided with less.
fn plan() -> PlanJson {
    let target = |vm: &VmSummary| TargetJson {
        vm: vm.vm.clone(),
        baseline_bytes: vm.settings.baseline_bytes,
        current_bytes: vm.size_bytes,
        target_bytes: vm.promise_bytes.unwrap_or(vm.size_bytes),
        max_loss: vm.settings.promise.max_loss,
        max_misses_per_second: vm.settings.promise.max_misses_per_second,
        misses: None,
        relative_now: vm.relative,
        relative: vm.relative,
        reason: match vm.status {
            VmStatus::Safe => Reason::GivesToItsBound,
            VmStatus::Unknown => Reason::Unknown,
            VmStatus::Tight | VmStatus::Violating => Reason::Kept,
        },
    };
    PlanJson {
        schema: SCHEMA,
        policy: Policy::isolated(Search::Auto),
        search: Some(Search::Optimal),
        total_bytes: 1416 * host::MIB,
        targets: host::host().vms.iter().map(target).collect(),
        geometric_mean: 1.08,
        geometric_mean_now: 1.0,
        gap: Some(0.0),
        spare_bytes: 128 * host::MIB,
        held: None,
    }
}
