//! `plimsoll report wss --compare`: every way of finding a working set, on guests whose working set is known.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plimsoll_rig::{Guest, GuestConfig, GuestImage, PATIENCE};
use plimsoll_vm::{ConsoleEvent, Qmp};
use serde_json::Value;

use crate::rig::{Ground, PLIMSOLL, ground, shared_ground};

const MIB: u64 = 1 << 20;
const ARRAY_MIB: u64 = 48;
const MEMORY_MIB: u64 = 224;

/// A guest whose console goes to a file, line by line as it comes.
struct WatchedGuest {
    pid: String,
    qmp: Option<Qmp>,
    console: PathBuf,
    _folder: tempfile::TempDir,
    _end: Sender<()>,
    listener: Option<JoinHandle<Vec<String>>>,
}

/// Passes lines on until `end` is closed; returns those that tell of a wrong page.
fn listen(mut guest: Guest, mut file: File, end: &Receiver<()>) -> Vec<String> {
    let mut wrong = Vec::new();
    while end.try_recv() != Err(mpsc::TryRecvError::Disconnected) {
        let Ok(line) = guest.next_line(Duration::from_millis(50)) else {
            wrong.push("the guest ended".to_owned());
            break;
        };
        let Some(line) = line else { continue };
        let sound = !matches!(
            line.event,
            Some(ConsoleEvent::Mismatch { .. } | ConsoleEvent::Error { .. })
        );
        if !sound {
            wrong.push(line.text.clone());
        }
        writeln!(file, "{}", line.text).unwrap();
    }
    wrong
}

impl WatchedGuest {
    fn boot(ground: &Ground, name: &str, balloon: bool, workload: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let console = folder.path().join("console");
        // A monitor serves one client: the program gets its own.
        let monitor = format!(
            "unix:{},server=on,wait=off",
            folder.path().join("qmp").display()
        );
        let config = GuestConfig {
            memory_mib: MEMORY_MIB,
            balloon,
            extra_arguments: vec!["-qmp".into(), monitor],
            ..ground.guest(name, workload)
        };
        let image = GuestImage::for_guest(&config).unwrap();
        let mut guest = Guest::start(&image, &config).unwrap();
        let mut file = File::create(&console).unwrap();
        loop {
            let line = guest.next_line(PATIENCE).unwrap().unwrap();
            writeln!(file, "{}", line.text).unwrap();
            if matches!(line.event, Some(ConsoleEvent::Round { .. })) {
                break;
            }
        }
        let (pid, qmp) = (guest.pid().to_string(), guest.qmp().unwrap());
        let (end, ended) = mpsc::channel();
        Self {
            pid,
            qmp: Some(qmp),
            console,
            _folder: folder,
            _end: end,
            listener: Some(thread::spawn(move || listen(guest, file, &ended))),
        }
    }

    fn size_bytes(&mut self) -> u64 {
        self.qmp.as_mut().unwrap().balloon_actual_bytes().unwrap()
    }

    fn compare(&self, words: &str) -> Command {
        let mut command = Command::new(PLIMSOLL);
        command.args(["report", "wss", "--compare", &self.pid]);
        command.args(words.split_ascii_whitespace());
        command.arg("--console").arg(&self.console);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    /// Ends the guest; fails if a page was wrong or it had ended before.
    fn end_soundly(mut self) {
        drop(self._end);
        let wrong = self.listener.take().map(|thread| thread.join().unwrap());
        assert_eq!(wrong, Some(Vec::new()));
    }
}

/// Runs the program and reads its JSON.
fn document(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn answer<'a>(document: &'a Value, estimator: &str) -> &'a Value {
    let all = document["estimators"].as_array().unwrap();
    let found = all.iter().find(|answer| answer["estimator"] == estimator);
    found.unwrap_or_else(|| panic!("{estimator}: {document}"))
}

/// Fails unless a figure lies between two sizes in MiB.
fn assert_between(document: &Value, estimator: &str, low_mib: u64, high_mib: u64) {
    let answer = answer(document, estimator);
    let found = answer["working_set"]["bytes"].as_u64();
    let found = found.unwrap_or_else(|| panic!("{answer}"));
    assert!(
        (low_mib * MIB..=high_mib * MIB).contains(&found),
        "{answer}"
    );
}

fn interrupt(child: &Child) {
    let mut kill = Command::new("kill");
    let sent = kill.args(["-INT", &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
}

#[test]
fn every_way_finds_an_array_and_the_balloon_gets_back_what_it_had() {
    let Some(ground) = ground() else { return };
    // Swap, so that what is taken can be missed.
    let workload = format!(
        "workload=arrays array=RWRW mib={ARRAY_MIB} seconds=0 step_ms=1000000 memstat_ms=250 \
         swap=zram swap_mib=160"
    );
    let mut vm = WatchedGuest::boot(&ground, "compare", true, &workload);
    let full = vm.size_bytes();
    assert_eq!(full, MEMORY_MIB * MIB);
    let words = "--interval 3s --rounds 1 --budget 100% --shrink --shrink-step 1s -o json";
    let found = document(&mut vm.compare(words));
    assert_eq!(found["schema"], 1);
    assert_eq!(found["accelerator"], ground.accelerator());
    assert_eq!(found["truth_bytes"], ARRAY_MIB * MIB);

    // What processes were promised: the array and the little that init needs.
    assert_between(&found, "Committed_AS", ARRAY_MIB, ARRAY_MIB + 12);
    // With the kernel's own.
    assert_between(&found, "balloon statistics", ARRAY_MIB, ARRAY_MIB + 90);
    // Every second pass writes, so that all of it is written within a round.
    assert_between(&found, "write scan", ARRAY_MIB, ARRAY_MIB + 6);
    assert_between(
        &found,
        "curve at 5 %, traps",
        ARRAY_MIB * 8 / 10,
        ARRAY_MIB * 12 / 10,
    );
    assert_between(
        &found,
        "curve at 5 %, accessed-page scan",
        ARRAY_MIB * 8 / 10,
        ARRAY_MIB * 12 / 10,
    );
    // Of 100 pages, as wide as its own confidence says, which covers 95 samples in 100: twice that here.
    let sampling = answer(&found, "sampling (VMware)");
    let bytes = |key| sampling["working_set"][key].as_u64().unwrap();
    let width = bytes("high_bytes") - bytes("low_bytes");
    assert!(
        bytes("bytes").abs_diff(ARRAY_MIB * MIB) <= width,
        "{sampling}"
    );
    // It missed pages, so it was brought below what it needs, which is more than the array.
    let zballoond = answer(&found, "Zballoond");
    assert_eq!(zballoond["working_set"]["bound"], "estimate", "{zballoond}");
    assert_between(&found, "Zballoond", ARRAY_MIB, MEMORY_MIB - 1);
    let smallest = zballoond["rounds_bytes"].as_array().unwrap();
    let smallest = smallest.iter().filter_map(Value::as_u64).min().unwrap();
    assert!(smallest < full - 32 * MIB, "{zballoond}");
    for missing in ["Geiger", "PRL", "PML"] {
        let why = answer(&found, missing)["not_available"].as_str().unwrap();
        assert!(why.contains("plimsoll"), "{why}");
    }
    assert_eq!(vm.size_bytes(), full);

    // Interrupted while the VM is small, it gives all back before it ends.
    let words = "--interval 100ms --rounds 1 --shrink --shrink-step 60s";
    let mut child = vm.compare(words).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while vm.size_bytes() > full - 16 * MIB {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(20));
    }
    interrupt(&child);
    assert!(child.wait().unwrap().success());
    assert_eq!(vm.size_bytes(), full);
    vm.end_soundly();
}

#[test]
fn a_vm_without_balloon_or_words_says_what_is_missing() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let vm = WatchedGuest::boot(&ground, "plain", false, "workload=sequential mib=16");
    let words = "--interval 300ms --rounds 1 --shrink -o json";
    let found = document(&mut vm.compare(words));
    for way in ["balloon statistics", "Zballoond"] {
        let why = answer(&found, way);
        assert_eq!(why["not_available"], "the VM has no balloon", "{why}");
        assert_eq!(why["working_set"], Value::Null);
    }
    let why = answer(&found, "Committed_AS")["not_available"].as_str();
    assert!(why.unwrap().contains("memstat_ms"), "{why:?}");
    // Only reads: it says that it sees none.
    let written = answer(&found, "write scan")["working_set"]["bytes"].as_u64();
    assert!(written.unwrap() < 4 * MIB, "{written:?}");
    let table = vm.compare("--interval 100ms --rounds 1").output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    for words in [
        "its working set is 16 MiB",
        "--shrink",
        "the VM has no balloon",
    ] {
        assert!(table.contains(words), "{table}");
    }
    vm.end_soundly();
}

/// Runs `plimsoll lab epsilon`; its lines of JSON, and standard error.
fn epsilon(kernel: &Path, words: &str) -> (bool, Vec<Value>, String) {
    let output = Command::new(PLIMSOLL)
        .args(["lab", "epsilon", "-o", "json", "--kernel"])
        .arg(kernel)
        .args(words.split_ascii_whitespace())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let said = String::from_utf8(output.stderr).unwrap();
    (output.status.success(), lines.collect(), said)
}

#[test]
fn a_kernels_footprint_lies_between_a_size_that_lives_and_one_that_does_not() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let config = GuestConfig {
        balloon: true,
        ..ground.guest("epsilon", "workload=idle")
    };
    let image = GuestImage::for_guest(&config).unwrap();
    let (done, walks, said) = epsilon(&image.kernel, "--memory 160MiB --step 40%");
    assert!(done, "{said}");
    let ways: Vec<_> = walks.iter().map(|walk| walk["way"].clone()).collect();
    assert_eq!(ways, ["boot", "balloon"]);
    for walk in &walks {
        assert_eq!(walk["accelerator"], ground.accelerator());
        // 160, 96 and 57 MiB: Debian's kernel takes some 70.
        let trials = walk["trials"].as_array().unwrap();
        let lived: Vec<_> = trials.iter().map(|trial| trial["lived"].clone()).collect();
        assert_eq!(lived, [true, true, false], "{walk}");
        assert_eq!(walk["epsilon_bytes"], 96 * MIB);
        assert!(!trials[2]["why"].as_str().unwrap().is_empty(), "{walk}");
        // What is free inside is less by what was taken away.
        let free = |index: usize| trials[index]["available_bytes"].as_u64().unwrap();
        let taken = (free(0) - free(1)) / MIB;
        assert!((50..=70).contains(&taken), "{walk}");
    }
}

#[test]
fn a_kernel_that_never_boots_is_told_so() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let garbage = folder.path().join("garbage");
    fs::write(&garbage, vec![7; 8192]).unwrap();
    let (done, walks, said) = epsilon(&garbage, "--memory 128MiB --way boot");
    assert!(!done);
    assert_eq!(walks[0]["epsilon_bytes"], Value::Null);
    assert!(said.contains("does not live with 128 MiB"), "{said}");
    // A kernel that has no init to run.
    let initrd = format!("--initrd {} --alive ready", garbage.display());
    let (done, walks, said) = epsilon(
        &ground.image.kernel,
        &format!("--memory 128MiB --way boot {initrd}"),
    );
    assert!(!done);
    assert_eq!(walks[0]["trials"].as_array().unwrap().len(), 1);
    assert!(said.contains("panic"), "{said}");
    let (done, walks, said) = epsilon(&folder.path().join("none"), "");
    assert!(!done && walks.is_empty());
    assert!(said.contains("none does not exist"), "{said}");
}
