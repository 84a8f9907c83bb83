//! A host whose clock is stepped while a VM is traced. The host is a guest, so that this one's clock is left alone; the VM
//! is a process in it that looks like one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use plimsoll_rig::{Guest, GuestConfig, PATIENCE};
use serde_json::Value;

use crate::limits::compile;
use crate::rig::{Ground, MIB, PLIMSOLL, ground, make_readable};

/// The daemon's configuration: short times, and no files.
const CONFIGURATION: &str = r#"
turn_interval = "1s"
[trace]
backend = "trap"
period = "500ms"
budget = "20%"
[history]
file = "/history.redb"
[serve]
socket = "/run/plimsolld.sock"
read_only_socket = "none"
"#;

/// Size of the VM's RAM, all of which it touches again and again.
const RAM_PAGES: u64 = 16 * MIB;

/// A host in a guest that runs commands, and whose clock is stepped once a second.
struct SteppedHost {
    guest: Guest,
    _folder: tempfile::TempDir,
}

/// The end of a command, with counts since the host's start.
#[derive(Debug, Clone, Copy)]
struct End {
    code: i64,
    /// By a clock that is not stepped.
    milliseconds: i64,
    steps: i64,
    /// How often the daemon called itself well just after a step.
    well: i64,
    unwell: i64,
}

impl End {
    fn read(line: &str) -> Option<Self> {
        let words = line.strip_prefix("END ")?.split(' ');
        let numbers: Vec<i64> = words.filter_map(|word| word.parse().ok()).collect();
        let &[code, milliseconds, steps, well, unwell] = &*numbers else {
            return None;
        };
        Some(Self {
            code,
            milliseconds,
            steps,
            well,
            unwell,
        })
    }
}

/// The libraries that a program is linked with.
fn libraries(program: &Path) -> BTreeSet<PathBuf> {
    let output = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    words.map(PathBuf::from).collect()
}

/// Copies a program and what it is linked with below `root`, without the symbols, which would fill the guest's memory.
fn install(program: &Path, root: &Path, target: &str) {
    let target = root.join(target);
    let stripped = Command::new("strip")
        .arg("-o")
        .args([&target, program])
        .status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(program, &target).unwrap();
    }
    make_readable(&target, 0o755);
    for library in libraries(program) {
        let target = root.join(library.strip_prefix("/").unwrap());
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(library, target).unwrap();
    }
}

impl SteppedHost {
    /// Boots a host that runs `commands` one after the other, and the last again and again.
    fn boot(ground: &Ground, name: &str, commands: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let init = compile("clock", folder.path())?;
        let root = folder.path().join("root");
        for directory in ["bin", "run", "tmp"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        let daemon = Path::new(PLIMSOLL).with_file_name("plimsolld");
        assert!(
            daemon.exists(),
            "{} is not built: cargo build -p plimsoll-daemon, with the profile of this test",
            daemon.display()
        );
        install(&init, &root, "init");
        install(&init, &root, "bin/qemu-system-x86_64");
        install(Path::new(PLIMSOLL), &root, "bin/plimsoll");
        install(&daemon, &root, "bin/plimsolld");
        fs::write(root.join("plimsoll.toml"), CONFIGURATION).unwrap();
        fs::write(root.join("commands"), commands).unwrap();
        let initrd = folder.path().join("initrd");
        let image = ground.image.with_root(&root, &initrd).unwrap();
        let config = GuestConfig {
            memory_mib: 512,
            vcpus: 2,
            qmp: false,
            ..ground.guest(name, "")
        };
        Some(Self {
            guest: Guest::start(&image, &config).unwrap(),
            _folder: folder,
        })
    }

    /// Waits for the end of a command; beside it what it printed.
    fn next(&mut self) -> (Vec<String>, End) {
        let deadline = Instant::now() + PATIENCE;
        let mut printed = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.guest.next_line(left).unwrap();
            let text = line
                .unwrap_or_else(|| panic!("no end of {printed:#?}"))
                .text;
            match End::read(&text) {
                Some(end) => return (printed, end),
                None => printed.push(text),
            }
        }
    }
}

#[test]
fn a_trace_during_which_the_clock_is_stepped_is_as_any_other() {
    let Some(ground) = ground() else { return };
    let command = "/bin/plimsoll attach stepped -o json --period 500ms --periods 12 \
                   --backend trap --rate 1/32 --rate-rule fixed --budget none\n";
    let Some(mut host) = SteppedHost::boot(&ground, "stepped", command) else {
        return;
    };
    let (printed, end) = host.next();
    println!("{end:?}\n{}", printed.join("\n"));
    assert_eq!(end.code, 0);
    // Six periods an hour too long or too short, if they were measured by the clock that is stepped.
    assert!(end.steps >= 4);
    let mut lines: Vec<Value> = printed
        .iter()
        // The kernel may have something to report, too.
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let last = lines.pop().unwrap();
    assert_eq!(
        (&last["final"], &last["periods"]),
        (&true.into(), &12.into())
    );
    let number = |line: &Value, key: &str| {
        let number = line[key].as_f64();
        number.unwrap_or_else(|| panic!("{key} is no number in {line}"))
    };
    let sum = |key| lines.iter().map(|line| number(line, key)).sum::<f64>();
    assert_eq!(lines.len(), 12);
    for (index, line) in lines.iter().enumerate() {
        assert_eq!(line["period"], index);
        // The host may be late.
        assert!(number(line, "seconds") > 0.45, "{line}");
        assert!(
            number(line, "window_seconds") <= number(line, "seconds"),
            "{line}"
        );
    }
    assert!(sum("seconds") * 1000.0 <= end.milliseconds as f64);
    for line in lines.iter().chain([&last]) {
        assert!(
            (0.0..=1.0).contains(&number(line, "overhead_ratio")),
            "{line}"
        );
    }
    assert!(sum("traps") > 0.0);
    assert_eq!(sum("traps"), number(&last, "traps"));
    let is_estimate = |line: &&Value| line["working_set_bound"] == "estimate";
    let estimates: Vec<_> = lines.iter().filter(is_estimate).collect();
    assert!(estimates.len() >= 3, "{estimates:#?}");
    for line in estimates {
        let found = number(line, "working_set_pages") / RAM_PAGES as f64;
        assert!((found - 1.0).abs() <= 0.1, "{line}");
    }
}

#[test]
fn a_daemon_whose_clock_is_stepped_keeps_its_tracer_and_dates_what_it_shows() {
    /// Steps after the first answer that has a curve.
    const STEPS: i64 = 7;
    /// Age of a curve that is no hour old.
    const AGE_MAX_MS: i64 = 60_000;
    let Some(ground) = ground() else { return };
    let commands = "/bin/plimsolld --config /plimsoll.toml &\n\
                    /bin/plimsoll vms -o json --socket /run/plimsolld.sock\n";
    let Some(mut host) = SteppedHost::boot(&ground, "stepped-daemon", commands) else {
        return;
    };
    let deadline = Instant::now() + PATIENCE;
    let mut answers: Vec<(Value, End)> = Vec::new();
    let mut others = Vec::new();
    let stepped = |answers: &[(Value, End)]| match answers {
        [first, .., last] => last.1.steps - first.1.steps,
        _ => 0,
    };
    while stepped(&answers) < STEPS {
        assert!(Instant::now() < deadline, "{answers:#?} {others:#?}");
        let (printed, end) = host.next();
        for line in printed {
            // A line of the daemon's log may come in the midst of an answer.
            let Ok(answer) = serde_json::from_str::<Value>(&line) else {
                others.push(line);
                continue;
            };
            if answers.is_empty() && answer["vms"][0]["curve_unix_ms"].is_null() {
                continue;
            }
            answers.push((answer, end));
        }
    }
    let (first, _) = &answers[0];
    let (last, end) = &answers[answers.len() - 1];
    println!("{} answers, {end:?}: {last}", answers.len());
    assert!(end.well > 0);
    assert_eq!(end.unwell, 0);
    let trace = |answer: &Value| answer["vms"][0]["trace"].clone();
    for (answer, _) in &answers {
        let vm = &answer["vms"][0];
        let millis = |value: &Value| value.as_i64().unwrap_or_else(|| panic!("{answer}"));
        for at in [&vm["curve_unix_ms"], &vm["trace"]["last_unix_ms"]] {
            let age = millis(&answer["now_unix_ms"]) - millis(at);
            assert!((0..=AGE_MAX_MS).contains(&age), "{age}: {answer}");
        }
        assert_eq!(trace(answer)["state"], "tracing", "{answer}");
        assert_eq!(trace(answer)["pid"], trace(first)["pid"], "{answer}");
        assert_eq!(trace(answer)["restarts"], 0, "{answer}");
        assert_eq!(trace(answer)["lost_lines"], 0, "{answer}");
        assert!(!vm["working_set"].is_null(), "{answer}");
    }
    let periods = |answer| trace(answer)["periods"].as_u64();
    assert!(periods(last) > periods(first), "{last}");
}
