//! A daemon that is killed while it writes leaves a history that contains everything confirmed.

use plimsoll_skip::longer;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use plimsoll_daemon::history::{History, Limits, Persistence, TurnRecord};
use plimsoll_protocol::decision::{
    Decision, HoldingView, Initiator, Kind, Mode, State, Step, StepState,
};
use plimsoll_protocol::vm::Sample;

/// Environment variable with the path to which this program writes until it is killed.
const FILE: &str = "PLIMSOLL_TEST_HISTORY";
const KILLS: usize = 30;
const LIMITS: Limits = Limits {
    bytes_max: 64 << 20,
    keep: Duration::from_hours(24),
};

#[test]
fn what_was_confirmed_survives_kills() {
    if let Some(path) = std::env::var_os(FILE) {
        write_until_killed(Path::new(&path));
    }
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("history.redb");
    drop(History::open(&path, LIMITS).unwrap());
    let mut confirmed = BTreeSet::new();
    for kill in 0..longer(KILLS) as u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "what_was_confirmed_survives_kills",
                "--nocapture",
            ])
            .env(FILE, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let before = confirmed.len();
        let mut read = |line: &str| {
            let id = line
                .strip_prefix("kept ")
                .map(|id| id.parse::<u64>().unwrap());
            confirmed.extend(id);
            id.is_some()
        };
        // Each child gets as far as a confirmation; then it is killed at any point of what follows.
        for line in lines.by_ref() {
            if read(&line.unwrap()) {
                break;
            }
        }
        thread::sleep(Duration::from_millis(kill * 7 % 60));
        child.kill().unwrap();
        for line in lines.map_while(Result::ok) {
            read(&line);
        }
        child.wait().unwrap();
        assert!(
            confirmed.len() > before,
            "kill {kill}: nothing was confirmed"
        );

        let (history, warnings) = History::open(&path, LIMITS).unwrap();
        assert_eq!(warnings, [""; 0], "kill {kill}");
        let decisions = history.decisions(None, None, 1000);
        assert!(Some(&decisions[0].id) >= confirmed.last());
        let expected: Vec<u64> = (1..=decisions[0].id).rev().take(1000).collect();
        let found: Vec<u64> = decisions.iter().map(|decision| decision.id).collect();
        assert_eq!(found, expected, "kill {kill}");
        let open = history.unfinished();
        let lost = open
            .iter()
            .find(|decision| confirmed.contains(&decision.id));
        assert_eq!(lost, None, "kill {kill}");
        assert!(open.len() as u64 <= kill + 1, "kill {kill}");
        // The baseline is written before the decision of the same number.
        let ahead = history.baseline("web").unwrap() - decisions[0].id;
        assert!(ahead <= 1, "kill {kill}: {ahead}");
    }
}

/// Writes decisions and turns, and reports which decisions are durable.
fn write_until_killed(path: &Path) -> ! {
    let history = History::open(path, LIMITS).unwrap().0;
    let newest = history.decisions(None, None, 1);
    let first = newest.first().map_or(1, |decision| decision.id + 1);
    let mut out = std::io::stdout();
    for id in first.. {
        assert_eq!(history.put_baseline("web", id), Persistence::OnDisk);
        let _ = history.put_decision(&decision(id, State::Moving));
        let unix_ms = id * 30_000;
        let sample = Sample {
            unix_ms,
            direct_bytes: id,
            ..Sample::default()
        };
        let moment = TurnRecord {
            vm: "web",
            sample,
            heat: None,
            curve: None,
        };
        history.record_turn(&[moment; 50]);
        if history.put_decision(&decision(id, State::Kept)) == Persistence::OnDisk {
            writeln!(out, "kept {id}").unwrap();
        }
    }
    unreachable!("numbers do not end")
}

fn decision(id: u64, state: State) -> Decision {
    let holding = HoldingView::default();
    Decision {
        schema: 1,
        id,
        unix_ms: id * 30_000,
        kind: Kind::Divide,
        by: Initiator::Daemon,
        mode: Mode::Act,
        state,
        reason: "a test".to_owned(),
        inputs: None,
        plan: None,
        steps: vec![Step {
            vm: "web".to_owned(),
            from: holding,
            to: holding,
            now: holding,
            state: StepState::Done,
            error: None,
        }],
        checks: Vec::new(),
        takes_back: None,
        taken_back_by: None,
        ended_unix_ms: None,
    }
}
