//! The program as its users meet it: what it writes where, and how it ends.

use plimsoll_skip::{Lack, skip, write_program};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use plimsoll_protocol::curve_json::CurveJson;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use tempfile::TempDir;

/// A folder with traces whose curves are known, and the program.
struct Desk(TempDir);

impl Desk {
    /// `loop.ids` is 4 pages, 100 times over: at 4 pages only the first round misses.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("loop.ids"), "1\n2\n3\n4\n".repeat(100)).unwrap();
        fs::write(folder.path().join("empty.ids"), "# nothing\n").unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command.current_dir(self.0.path()).args(line.split(' '));
        command
    }

    /// Whatever signals are ignored here, as they are below a shell's `&`.
    fn command_that_ends_at_signals(&self, line: &str) -> Command {
        let mut command = Command::new("env");
        command
            .current_dir(self.0.path())
            .arg("--default-signal=HUP,INT,QUIT,TERM")
            .arg(env!("CARGO_BIN_EXE_plimsoll"))
            .args(line.split(' '));
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    /// Runs what must succeed in silence, and returns what it wrote.
    fn stdout(&self, line: &str) -> Vec<u8> {
        let output = self.run(line);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*complaint), (Some(0), ""), "{line}");
        output.stdout
    }

    fn text(&self, line: &str) -> String {
        String::from_utf8(self.stdout(line)).unwrap()
    }

    /// Runs what must fail with `code` and without output, and returns the complaint.
    fn complaint(&self, line: &str, code: i32) -> String {
        let output = self.run(line);
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}: {complaint}");
        assert!(output.stdout.is_empty(), "{line}");
        assert!(
            complaint.starts_with("plimsoll: error: "),
            "{line}: {complaint}"
        );
        complaint
    }
}

#[test]
fn csv_gives_the_ratio_at_exactly_the_sizes_asked_for() {
    let desk = Desk::new();
    let known = "size_pages,miss_ratio,low,high\n3,1,1,1\n4,0.01,0.01,0.01\n9,0.01,0.01,0.01\n";
    assert_eq!(desk.text("mrc loop.ids --sizes 3,4,9 -o csv"), known);
    assert_eq!(desk.text("mrc loop.ids --sizes 9,12K,4,4 -o csv"), known);
    assert_eq!(
        desk.text("mrc loop.ids --sizes 3,4,9 --format ids -o csv"),
        known
    );
    let all = desk.text("mrc loop.ids -o csv");
    assert!(all.starts_with("size_pages,miss_ratio,low,high\n"), "{all}");
    assert!(all.ends_with("4,0.01,0.01,0.01\n"), "{all}");
}

#[test]
fn json_is_the_curve_of_schema_1() {
    let json = Desk::new().text("mrc loop.ids --sizes 4 -o json");
    let curve: CurveJson = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (curve.schema, curve.page_bytes, curve.references),
        (1, 4096, 400)
    );
    assert_eq!((&*curve.vm, curve.baseline_pages), ("loop", None));
    assert_eq!(curve.points.len(), 1);
    assert_eq!(curve.points[0].miss_ratio, 0.01);
}

#[test]
fn the_table_says_what_a_reader_asks_first() {
    let table = Desk::new().text("mrc loop.ids --sizes 3,4");
    assert_eq!(
        table,
        "trace       loop\n\
         estimator   exact LRU\n\
         references  400\n\
         page        4 KiB\n\
         working set 4 pages, 16 KiB (5 % misses)\n\
         \n\
         \x20 size (pages)         size  miss ratio\n\
         \x20            3       12 KiB    100.00 %\n\
         \x20            4       16 KiB      1.00 %\n"
    );
}

#[test]
fn pictures_are_of_their_kind_and_files_are_written_whole() {
    let desk = Desk::new();
    let svg = desk.text("mrc loop.ids -o svg");
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("Miss-ratio curve of loop"));
    assert!(
        desk.stdout("mrc loop.ids -o png")
            .starts_with(b"\x89PNG\r\n")
    );
    // The ending of the file says the form; what was there is replaced.
    for (line, file, begins) in [
        ("mrc loop.ids --out a.svg", "a.svg", "<svg "),
        ("mrc loop.ids --out a.csv", "a.csv", "size_pages,"),
        (
            "mrc loop.ids -o json --out a.csv",
            "a.csv",
            "{\"schema\":1,",
        ),
    ] {
        assert_eq!(desk.text(line), "");
        let written = fs::read_to_string(desk.path(file)).unwrap();
        assert!(written.starts_with(begins), "{line}: {written}");
    }
    let files = fs::read_dir(desk.0.path()).unwrap().count();
    assert_eq!(files, 4, "two traces and two results, nothing else");
}

#[test]
fn every_estimator_gives_a_curve_and_its_seed_repeats_it() {
    let desk = Desk::new();
    let pages: String = (0..40_000u64)
        .map(|i| format!("{}\n", i * i % 3001))
        .collect();
    fs::write(desk.path("squares.ids"), pages).unwrap();
    for flags in [
        "lru",
        "aet",
        "lru --threads 2",
        "aet --rate 1/10 --seed 3",
        "shards --rate 50% --seed 3",
        "shards-max --max-samples 100 --seed 3",
        "counter-stacks --seed 3",
        "footprint",
        "ghost --direct 100 --ghost 4M",
    ] {
        let line = format!("mrc squares.ids -o csv --points 100 --estimator {flags}");
        let csv = desk.text(&line);
        assert!((2..=101).contains(&csv.lines().count()), "{flags}: {csv}");
        assert_eq!(csv, desk.text(&line), "{flags}");
    }
    let table = desk.text("mrc squares.ids --estimator shards --rate 0.5");
    assert!(table.contains("SHARDS at rate 1/2\n"), "{table}");
    assert!(table.contains("of which"), "{table}");
}

#[test]
fn a_comparison_is_one_table_with_a_line_for_each_estimator() {
    let desk = Desk::new();
    let pages: String = (0..40_000u64)
        .map(|i| format!("{}\n", i * i % 3001))
        .collect();
    fs::write(desk.path("squares.ids"), pages).unwrap();
    let table = desk.text("mrc squares.ids --estimator all --compare --rate 1/2 --direct 100");
    for name in [
        "MAE",
        "max err",
        "cliff",
        "peak memory",
        "exact LRU ",
        "SHARDS at rate 1/2 ",
        "SHARDS of 8192 pages ",
        "AET ",
        "AET of 1/2 of the pages ",
        "Counter Stacks ",
        "average footprint ",
        "ghost behind 100 pages ",
    ] {
        assert!(table.contains(name), "{name}: {table}");
    }
    let json = desk.text("mrc squares.ids --estimator all --compare -o json");
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["schema"], 1);
    assert_eq!(json["references"], 40_000);
    let rows = json["estimators"].as_array().unwrap();
    assert_eq!(rows.len(), 7);
    assert_eq!(rows[0]["estimator"], "exact LRU");
    assert_eq!(rows[0]["mean_absolute_error"], 0.0);
    for row in rows {
        assert!(
            row["references_per_second"].as_f64().unwrap() > 0.0,
            "{row}"
        );
        assert!(row["peak_memory_bytes"].as_u64().unwrap() > 0, "{row}");
        assert!(row["mean_absolute_error"].as_f64().unwrap() < 0.5, "{row}");
    }
    let csv = desk.text("mrc squares.ids --estimator aet --compare -o csv");
    assert_eq!(csv.lines().count(), 2, "{csv}");
    assert!(csv.starts_with("estimator,mean_absolute_error,max_error,"));
    let svg = desk.text("mrc squares.ids --estimator all -o svg");
    assert!(svg.starts_with("<svg") && svg.contains("Counter Stacks"));
}

#[test]
fn recorded_counters_give_the_curve_of_any_window() {
    let desk = Desk::new();
    // A loop over 500 pages, then one over 2000.
    let loops = (0..40_960u64).map(|i| i % 500);
    let loops = loops.chain((0..40_960u64).map(|i| 10_000 + i % 2_000));
    let pages: String = loops.map(|page| format!("{page}\n")).collect();
    fs::write(desk.path("two.ids"), pages).unwrap();
    let flags = "-o csv --sizes 400,600,1800,2400 --interval 1024 --estimator counter-stacks";
    let whole = desk.text(&format!("mrc two.ids {flags} --stream two.counters"));
    assert_eq!(whole, desk.text(&format!("mrc two.ids {flags}")));
    let sizes = "-o csv --sizes 400,600,1800,2400";
    // Sums in another order differ in their last digits.
    let rounded = |csv: &str| -> Vec<String> {
        let fields = csv.lines().skip(1).flat_map(|row| row.split(','));
        fields
            .map(|field| format!("{:.9}", field.parse::<f64>().unwrap()))
            .collect()
    };
    let recorded = desk.text(&format!("mrc two.counters {sizes}"));
    assert_eq!(rounded(&whole), rounded(&recorded));
    let ratios = |window: &str| -> Vec<f64> {
        let csv = desk.text(&format!("mrc two.counters --window {window} {sizes}"));
        let rows = csv.lines().skip(1);
        rows.map(|row| row.split(',').nth(1).unwrap().parse().unwrap())
            .collect()
    };
    let first = ratios("..40960");
    assert!(first[0] > 0.6 && first[1] < 0.05, "{first:?}");
    let second = ratios("40960..");
    assert!(second[1] > 0.9 && second[3] < 0.1, "{second:?}");

    let usage = [
        (
            "mrc two.ids --window 0..4096",
            "no stream recorded by --stream",
        ),
        ("mrc two.counters --estimator aet", "omit the options"),
        ("mrc two.counters --seed 1", "omit the options"),
        ("mrc two.counters --window 3", "no window"),
        (
            "mrc two.ids --estimator all --stream x",
            "counter-stacks alone",
        ),
        ("mrc two.ids --stream x", "counter-stacks does"),
    ];
    for (line, part) in usage {
        let complaint = desk.complaint(line, 2);
        assert!(complaint.contains(part), "{line}: {complaint}");
    }
    let inside = desk.complaint("mrc two.counters --window 5..4096", 1);
    assert!(inside.contains("inside an interval of 1024"), "{inside}");
    // What is left of a record that was cut short is given, and what is lost is said.
    let record = fs::read(desk.path("two.counters")).unwrap();
    fs::write(desk.path("cut.counters"), &record[..record.len() - 9]).unwrap();
    let cut = desk.run("mrc cut.counters --sizes 600");
    let said = String::from_utf8(cut.stderr).unwrap();
    assert!(
        cut.status.success() && said.contains("is damaged: its last"),
        "{said}"
    );
}

#[test]
fn what_cannot_be_asked_for_ends_with_2_and_says_what_can() {
    let desk = Desk::new();
    let known = [
        ("mrc loop.ids --format punchcard", "oracle-general"),
        ("mrc loop.ids --estimator magic", "shards"),
        (
            "mrc loop.ids -o pdf",
            "possible values: table, csv, json, svg, png",
        ),
        (
            "mrc loop.ids --estimator shards --rate 2",
            "such as 1/128, 0.01 or 1%",
        ),
        (
            "mrc loop.ids --estimator shards --rate 0",
            "above 0 and at most 1",
        ),
        (
            "mrc loop.ids --estimator shards --rate -1",
            "'-1' is not a rate",
        ),
        (
            "mrc loop.ids --estimator counter-stacks --interval 4294967296",
            "from 1 to 2^20 references; got 4294967296",
        ),
        ("mrc loop.ids --rate 0.5", "lru uses every reference"),
        ("mrc loop.ids --seed 1", "--seed: lru does not take it"),
        (
            "mrc loop.ids -o svg --out a.png",
            "of another format than -o",
        ),
        (
            "mrc loop.ids --max-samples 9",
            "lru does not take it; shards-max does",
        ),
        ("mrc loop.ids --estimator aet --threads 2", "lru does"),
        ("mrc loop.ids --threads 0", "--threads"),
        (
            "mrc loop.ids --estimator shards-max --max-samples 0",
            "--max-samples",
        ),
        ("mrc loop.ids --estimator ghost", "--direct SIZE"),
        ("mrc loop.ids --compare --sizes 10", "leave out --sizes"),
        ("mrc loop.ids --sizes 10,12X", "'12X' is not a size"),
        ("mrc loop.ids --sizes 10 --points 5", "cannot be used with"),
        (
            "mrc loop.ids --sizes 4K,1K",
            "--sizes: a size of 1KiB is less than a page, which has 4KiB",
        ),
        ("mrc loop.ids --every 1h --sizes 1K", "less than a page"),
        (
            "mrc loop.ids --estimator ghost --direct 1K",
            "--direct: a size of 1KiB is less than a page",
        ),
        ("mrc loop.ids --points 0", "--points"),
        ("mrc loop.ids --out nowhere/a.csv", "no such directory"),
        ("mrc", "required"),
        ("mrk loop.ids", "mrc"),
    ];
    for (line, part) in known {
        let complaint = desk.complaint(line, 2);
        assert!(complaint.contains(part), "{line}: {complaint}");
    }
}

#[test]
fn what_fails_ends_with_1_and_names_the_trace_and_the_cause() {
    let desk = Desk::new();
    fs::write(desk.path("broken.ids"), "1\n2\nthree\n").unwrap();
    fs::write(desk.path("empty.csv"), "page,time\n").unwrap();
    let known = [
        ("mrc missing.ids", "missing.ids", "No such file"),
        ("mrc .", "'.'", "directory"),
        ("mrc empty.ids", "empty.ids", "has no references"),
        ("mrc empty.csv --every 1h", "empty.csv", "has no references"),
        ("mrc broken.ids", "broken.ids", "line 3"),
        ("mrc loop.ids --out .", "'.'", "directory"),
        (
            "mrc loop.ids --estimator shards --rate 0.0000001",
            "400 references",
            "higher --rate",
        ),
    ];
    for (line, name, cause) in known {
        let complaint = desk.complaint(line, 1);
        assert!(complaint.contains(name), "{line}: {complaint}");
        assert!(
            complaint.to_lowercase().contains(&cause.to_lowercase()),
            "{line}: {complaint}"
        );
        assert_eq!(complaint.lines().count(), 1, "{complaint}");
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let desk = Desk::new();
    let pages: String = (0..400_000)
        .map(|page| format!("{}\n", page % 90_001))
        .collect();
    fs::write(desk.path("long.ids"), pages).unwrap();
    let sizes: Vec<_> = (1..20_000).map(|size| size.to_string()).collect();
    let mut program = desk
        .command(&format!("mrc long.ids -o csv --sizes {}", sizes.join(",")))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 10];
    program
        .stdout
        .take()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    assert_eq!(&first, b"size_pages");
    let output = program.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_file_that_may_not_grow_is_an_error_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let verb = "trace generate uniform --pages 99 --references 1000000 --out counters";
    let output = Command::new("sh")
        .args(["-c", &format!("ulimit -f 8; exec \"$0\" {verb}")])
        .arg(env!("CARGO_BIN_EXE_plimsoll"))
        .current_dir(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("File too large"), "{output:?}");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn two_signals_at_once_are_one_request_to_end() {
    // As timeout(1) does, but two different ones, which the kernel does not merge; and as a shell whose terminal is closed.
    for signals in [&[Signal::INT, Signal::TERM][..], &[Signal::HUP]] {
        let desk = Desk::new();
        let mut follower = desk.command("mrc - --follow --every 1h --estimator lru -o csv");
        follower.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut follower = follower.spawn().unwrap();
        let pid = Pid::from_child(&follower);
        let mut input = follower.stdin.take().unwrap();
        input.write_all(b"1\n2\n1\n").unwrap();
        let status = format!("/proc/{}/status", follower.id());
        // The last one that is registered.
        while !catches(&status, Signal::HUP) {
            thread::sleep(Duration::from_millis(1));
        }
        for &signal in signals {
            kill_process(pid, signal).unwrap();
        }
        let output = follower.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(!output.stdout.is_empty(), "{output:?}");
    }
}

#[test]
fn a_hang_up_that_is_ignored_stays_so() {
    for verb in ["mrc - --partial counters", "mrc - --follow --every 1h"] {
        let desk = Desk::new();
        let mut program = Command::new("sh")
            .args(["-c", &format!("trap '' HUP; exec \"$0\" {verb}")])
            .arg(env!("CARGO_BIN_EXE_plimsoll"))
            .current_dir(desk.0.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = program.stdin.take().unwrap();
        // Its file is made once some of that is read.
        let references = "1\n2\n".repeat(1 << 14);
        input.write_all(references.as_bytes()).unwrap();
        let status = format!("/proc/{}/status", program.id());
        while !catches(&status, Signal::TERM) {
            thread::sleep(Duration::from_millis(1));
        }
        kill_process(Pid::from_child(&program), Signal::HUP).unwrap();
        input.write_all(b"1\n").unwrap();
        drop(input);
        assert!(program.wait().unwrap().success(), "{verb}");
    }
}

/// Whether the process of a `/proc/PID/status` has a handler of a signal.
fn catches(status: &str, signal: Signal) -> bool {
    let status = fs::read_to_string(status).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = u64::from_str_radix(caught.unwrap().trim(), 16).unwrap();
    caught & (1 << (signal.as_raw() - 1)) != 0
}

#[test]
fn a_file_whose_writing_is_interrupted_is_what_it_was() {
    let verbs = [
        "mrc - --estimator counter-stacks --stream counters",
        "mrc - --partial counters",
        "trace convert - counters",
        "trace generate uniform --pages 9 --references 1000000000000 --out counters",
    ];
    // SIGQUIT leaves no core in the directory.
    let core = getrlimit(Resource::Core);
    let no_core = Rlimit {
        current: Some(0),
        ..core
    };
    setrlimit(Resource::Core, no_core).unwrap();
    let signals = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];
    for (verb, signal) in verbs.into_iter().zip(signals) {
        let desk = Desk::new();
        fs::write(desk.path("counters"), "old").unwrap();
        let files = || fs::read_dir(desk.0.path()).unwrap().count();
        let before = files();
        // It waits for more, because its input stays open.
        let mut program = desk
            .command_that_ends_at_signals(verb)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = program.stdin.take().unwrap();
        // A generator reads nothing.
        let _ = input.write_all("1\n2\n".repeat(1 << 14).as_bytes());
        while files() == before {
            thread::sleep(Duration::from_millis(1));
        }
        // The handlers are installed right after the file is made.
        let status = format!("/proc/{}/status", program.id());
        let is_caught = (0..10_000).any(|_| {
            thread::sleep(Duration::from_millis(1));
            catches(&status, signal)
        });
        if !is_caught {
            // What writes for ever would fill the disk.
            program.kill().unwrap();
        }
        assert!(is_caught, "{verb} does not catch {signal:?}");
        kill_process(Pid::from_child(&program), signal).unwrap();
        let ended = program.wait().unwrap();
        assert_eq!(ended.signal(), Some(signal.as_raw()));
        assert_eq!(files(), before);
        assert_eq!(fs::read_to_string(desk.path("counters")).unwrap(), "old");
    }
}

#[test]
fn a_trace_may_come_through_a_pipe() {
    let mut program = Desk::new()
        .command("mrc - --sizes 1 -o csv")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    program
        .stdin
        .take()
        .unwrap()
        .write_all(b"7\n7\n7\n7\n")
        .unwrap();
    let output = program.wait_with_output().unwrap();
    let csv = String::from_utf8(output.stdout).unwrap();
    assert_eq!(csv, "size_pages,miss_ratio,low,high\n1,0.25,0.25,0.25\n");
}

#[test]
fn help_and_version_go_to_standard_output() {
    let desk = Desk::new();
    let version = concat!("plimsoll ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(desk.text("--version"), version);
    let help = desk.text("--help");
    for verb in ["mrc", "doctor"] {
        assert!(help.contains(verb), "{help}");
        assert!(
            desk.text(&format!("{verb} --help"))
                .contains("Usage: plimsoll")
        );
    }
}

#[test]
fn the_doctor_finds_this_host_in_either_form() {
    let desk = Desk::new();
    let table = desk.text("doctor");
    assert!(table.contains("kernel"), "{table}");
    let json: serde_json::Value = serde_json::from_str(&desk.text("doctor -o json")).unwrap();
    assert_eq!(json["schema"], 1);
    let first = &json["chapters"][0]["findings"][0];
    assert_eq!(first["subject"], "kernel");
    assert!(["ok", "limited", "no"].contains(&first["verdict"].as_str().unwrap()));
}

/// Requests of one disk, each of a page, in every format that is read from a stream, and the
/// pages that they are.
fn streams() -> Vec<(&'static str, Vec<u8>)> {
    let pages: Vec<u64> = (0..30_000u64).map(|n| n * n % 3001).collect();
    let lines = |line: fn(u64) -> String| {
        let lines: String = pages.iter().map(|&page| line(page)).collect();
        lines.into_bytes()
    };
    let records =
        |record: fn(u64) -> Vec<u8>| pages.iter().flat_map(|&page| record(page)).collect();
    vec![
        ("ids", lines(|page| format!("{page}\n"))),
        ("csv", lines(|page| format!("{page},r\n"))),
        ("lackey", lines(|page| format!(" L {:x},8\n", page * 4096))),
        (
            "msr",
            lines(|page| format!("1,usr,0,Read,{},4096,5\n", page * 4096)),
        ),
        (
            "alibaba",
            lines(|page| format!("4,R,{},4096,1\n", page * 4096)),
        ),
        (
            "tencent",
            lines(|page| format!("1538323200,{},8,0,1063\n", page * 8)),
        ),
        (
            "systor",
            lines(|page| format!("1456095145.1,0.1,R,3,{},4096\n", page * 4096)),
        ),
        (
            "spc",
            lines(|page| format!("0,{},4096,R,0.5,x\n", page * 8)),
        ),
        (
            "fiu",
            lines(|page| format!("1 7 cp {} 8 R 6 0 {:032x}\n", page * 8, 7)),
        ),
        (
            "blkparse",
            lines(|page| format!("8,0 1 1 0.1 7 Q R {} + 8 [x]\n", page * 8)),
        ),
        (
            "oracle-general",
            records(|page| {
                let (page, next) = (page.to_le_bytes(), (-1i64).to_le_bytes());
                [&[0; 4], &page[..], &[0, 16, 0, 0], &next].concat()
            }),
        ),
        (
            "vscsi",
            records(|page| {
                let (length, block) = (4096u32.to_le_bytes(), (page * 8).to_le_bytes());
                [
                    &[0; 4],
                    &length[..],
                    &[0; 4],
                    &[0x28, 0, 0, 1],
                    &block,
                    &[0; 8],
                ]
                .concat()
            }),
        ),
    ]
}

impl Desk {
    /// Runs the program with `input` on standard input, through a pipe.
    fn piped(&self, line: &str, input: &[u8]) -> Output {
        let mut program = self
            .command(line)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pipe = program.stdin.take().unwrap();
        std::thread::scope(|scope| {
            // The program may have seen enough: then the pipe is closed.
            scope.spawn(move || pipe.write_all(input));
            program.wait_with_output().unwrap()
        })
    }

    /// Compresses what stands in a file by the system's tool; `None` if there is none.
    fn compressed(&self, tool: &str, name: &str) -> Option<Vec<u8>> {
        let mut command = Command::new(tool);
        command.current_dir(self.0.path()).args(["-c", name]);
        let output = command.output().ok()?;
        output.status.success().then_some(output.stdout)
    }
}

#[test]
fn every_format_but_parquet_is_read_from_standard_input_compressed_or_not() {
    let desk = Desk::new();
    let mut streams = streams();
    fs::write(desk.path("t.ids"), &streams[0].1).unwrap();
    let known = desk.text("mrc t.ids -o csv --sizes 100,1000,1501");
    assert_eq!(desk.text("trace convert t.ids t.plimsoll"), "");
    streams.push(("plimsoll", fs::read(desk.path("t.plimsoll")).unwrap()));
    for (format, bytes) in streams {
        // More than a pipe holds.
        assert!(bytes.len() > 1 << 16 || format == "plimsoll", "{format}");
        fs::write(desk.path("stream"), &bytes).unwrap();
        let column = if format == "csv" {
            " --page-column 1"
        } else {
            ""
        };
        let line = format!("mrc - -o csv --sizes 100,1000,1501 --format {format}{column}");
        let mut inputs = vec![("plain", bytes)];
        for tool in ["bzip2", "gzip", "xz", "zstd"] {
            match desk.compressed(tool, "stream") {
                Some(packed) => inputs.push((tool, packed)),
                None => skip(
                    Lack::Program,
                    format_args!("{format} by {tool}, which is not on this machine"),
                ),
            }
        }
        for (how, input) in inputs {
            let output = desk.piped(&line, &input);
            let complaint = String::from_utf8_lossy(&output.stderr);
            assert_eq!(complaint, "", "{format}, {how}");
            let curve = String::from_utf8_lossy(&output.stdout);
            assert_eq!(curve, known, "{format}, {how}");
        }
    }
    for (line, input) in [
        ("mrc -", &b"PAR1PAR1"[..]),
        ("mrc - --format parquet", b"1\n2\n"),
        ("trace info - --format parquet", b""),
    ] {
        let output = desk.piped(line, input);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{complaint}");
        assert_eq!(
            complaint,
            "plimsoll: error: standard input: parquet is read from its end: \
             it must be an uncompressed regular file\n"
        );
    }
}

#[test]
fn formats_are_told_from_standard_input() {
    let desk = Desk::new();
    for (format, bytes) in streams() {
        // Neither has anything to be told by but a name or a header.
        if matches!(format, "oracle-general" | "csv") {
            continue;
        }
        let output = desk.piped("trace info - -o json", &bytes);
        let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(info["format"], format);
        assert_eq!(info["references"], 30_000, "{format}");
    }
}

#[test]
fn input_that_is_cut_short_or_damaged_ends_with_1_and_names_the_place() {
    let desk = Desk::new();
    let mut streams = streams();
    fs::write(desk.path("t.ids"), &streams[0].1).unwrap();
    desk.text("trace convert t.ids t.plimsoll");
    streams.push(("plimsoll", fs::read(desk.path("t.plimsoll")).unwrap()));
    for (format, mut bytes) in streams {
        let place = match format {
            "oracle-general" | "vscsi" | "plimsoll" => {
                bytes.truncate(bytes.len() - 9);
                "standard input, byte "
            }
            // A text may end anywhere, but not in what is no reference.
            _ => {
                bytes.extend_from_slice(b"?");
                "standard input, line 30001: "
            }
        };
        let column = if format == "csv" {
            " --page-column 1"
        } else {
            ""
        };
        for verb in ["mrc", "trace info", "trace convert"] {
            let to = if verb == "trace convert" {
                " copy.ids"
            } else {
                ""
            };
            let line = format!("{verb} -{to} --format {format}{column}");
            let output = desk.piped(&line, &bytes);
            let complaint = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{line}: {complaint}");
            assert!(complaint.contains(place), "{line}: {complaint}");
            assert!(output.stdout.is_empty(), "{line}");
            assert!(!desk.path("copy.ids").exists(), "{line}");
        }
    }
    for tool in ["bzip2", "gzip", "xz", "zstd"] {
        let Some(mut packed) = desk.compressed(tool, "t.ids") else {
            skip(Lack::Program, format_args!("{tool} is not on this machine"));
            continue;
        };
        packed.truncate(packed.len() / 2);
        let output = desk.piped("mrc -", &packed);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{tool}: {complaint}");
        let place = "cannot read 'standard input' after ";
        assert!(complaint.contains(place), "{tool}: {complaint}");
    }
}

#[test]
fn odd_but_legal_input_gives_the_curve_of_its_references() {
    let desk = Desk::new();
    for (text, references) in [
        (&b"\xef\xbb\xbf1\r\n2\r\n1"[..], 3),
        (b"18446744073709551615\n0\n", 2),
        (b"\xef\xbb\xbfpage,op\r\n7,r\r\n", 1),
        (b"page,op\n", 0),
        (b"\xef\xbb\xbf", 0),
        (b"", 0),
        (b"419,R,18446744073709551615,0,1\n419,R,0,1,1\n", 1),
    ] {
        let output = desk.piped("trace info - -o json", text);
        let info: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        assert_eq!(info["references"], references, "{}", text.escape_ascii());
    }
    // A request that passes the end of all addresses is none.
    let beyond = desk.piped("mrc -", b"419,R,18446744073709551615,2,1\n");
    let complaint = String::from_utf8_lossy(&beyond.stderr);
    assert!(complaint.contains("standard input, line 1: expected a request of at most"));
    assert_eq!(beyond.status.code(), Some(1));
    let complaint = desk.complaint("mrc loop.ids --page-bytes 0", 2);
    assert!(complaint.contains("--page-bytes"), "{complaint}");
}

#[test]
fn a_trace_is_not_lost_to_its_own_result() {
    let desk = Desk::new();
    let before = fs::read(desk.path("loop.ids")).unwrap();
    for (line, part) in [
        (
            "mrc loop.ids --out ./loop.ids",
            "--out: that is a file to read",
        ),
        (
            "mrc loop.ids --estimator counter-stacks --stream loop.ids",
            "--stream: that is a file to read",
        ),
        (
            "mrc loop.ids --estimator counter-stacks --compare --stream new",
            "a comparison records nothing",
        ),
        ("trace convert loop.ids loop.ids", "must be different files"),
        (
            "trace generate loop --pages 9 --references 9 --out q.ids --curve ./q.ids",
            "--curve and --out name one file",
        ),
        ("mrc loop.ids --partial -", "--partial -: name a file"),
        (
            "mrc loop.ids --estimator counter-stacks --stream -",
            "--stream -: name a file",
        ),
        ("mrc --merge - -", "is given twice"),
    ] {
        let complaint = desk.complaint(line, 2);
        assert!(complaint.contains(part), "{line}: {complaint}");
    }
    assert_eq!(fs::read(desk.path("loop.ids")).unwrap(), before);
    assert!(!desk.path("q.ids").exists() && !desk.path("-").exists());
}

#[test]
fn names_of_files_cannot_move_the_cursor() {
    let desk = Desk::new();
    let name = "a\u{1b}[2J\nb.ids";
    let of = |line: &str| desk.complaint(&line.replace("NAME", name), 1);
    let missing = [
        "mrc NAME",
        "wss NAME",
        "trace info NAME",
        "mrc --merge NAME",
    ];
    for line in missing
        .into_iter()
        .chain(["trace convert loop.ids no/NAME"])
    {
        let complaint = of(line);
        assert!(
            complaint.contains("a\u{fffd}[2J\u{fffd}b.ids"),
            "{complaint}"
        );
        assert!(
            !complaint.trim_end().contains(char::is_control),
            "{complaint}"
        );
    }
    fs::write(desk.path(name), "1\nx\n").unwrap();
    for line in [
        "mrc NAME",
        "wss NAME",
        "trace info NAME",
        "mrc NAME --follow --every 1m",
    ] {
        let complaint = of(line);
        assert!(complaint.contains("line 2"), "{complaint}");
        assert!(
            !complaint.trim_end().contains(char::is_control),
            "{complaint}"
        );
    }
}

#[test]
fn a_dash_is_standard_input_or_output() {
    let desk = Desk::new();
    let csv = desk.text("mrc loop.ids -o csv");
    assert_eq!(desk.text("mrc loop.ids -o csv --out -"), csv);
    desk.stdout("mrc loop.ids --partial loop.part");
    let part = fs::read(desk.path("loop.part")).unwrap();
    let merged = desk.piped("mrc --merge - -o csv", &part);
    assert_eq!(String::from_utf8(merged.stdout).unwrap(), csv);
    assert!(!desk.path("-").exists());
}

/// Requests of two volumes over two hours and a little.
const VOLUMES: &str = "419,W,0,4096,1000000\n7,R,0,8192,1000002\n419,W,4096,4096,1000003\n419,R,0,4096,3601000000\n\
                       7,R,0,4096,3601000001\n7,R,0,4096,3600999999\n";

#[test]
fn curves_by_device_are_those_of_each_device_alone() {
    let desk = Desk::new();
    fs::write(desk.path("volumes.csv"), VOLUMES).unwrap();
    for estimator in ["lru", "shards-max --max-samples 9", "aet"] {
        let line = format!("mrc volumes.csv --estimator {estimator} -o csv");
        let all = desk.text(&format!("{line} --by device"));
        for (device, references) in [("419", 3), ("7", 4)] {
            let prefix = format!("{device},{references},");
            let of_device = all.lines().filter_map(|line| line.strip_prefix(&prefix));
            let alone = desk.text(&format!("{line} --device {device}"));
            assert!(of_device.eq(alone.lines().skip(1)), "{device}\n{all}");
        }
    }
    let json = desk.text("mrc volumes.csv --by volume --sizes 2 -o json");
    assert!(json.starts_with(
        r#"{"schema":1,"trace":"volumes","by":"device","late_references":0,"curves":["#
    ));
    let complaint = desk.complaint("mrc loop.ids --by device", 2);
    let expected = "loop.ids: --by is not used by ids traces, only by: msr, alibaba";
    assert!(complaint.contains(expected), "{complaint}");
}

#[test]
fn a_device_of_which_nothing_is_sampled_is_named_without_a_curve() {
    let desk = Desk::new();
    let line = |(device, page)| format!("{device},R,{},4096,1\n", 4096 * page);
    let large = (0..20_000).map(|page| ("1", page % 10_000));
    let requests: String = large.chain([("7", 1), ("7", 1)]).map(line).collect();
    fs::write(desk.path("volumes.csv"), requests).unwrap();
    let of = |output: &str| {
        let line = "mrc volumes.csv --by device --estimator shards --rate 1/50 -o";
        let output = desk.run(&format!("{line} {output}"));
        assert!(output.status.success());
        let notice = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            notice,
            "plimsoll: 1 of 2 parts have no curve, because none of their references was sampled; a higher --rate sees more\n"
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let table = of("table");
    let row = table.lines().last().unwrap();
    assert!(row.starts_with('7') && row.contains("not sampled"), "{row}");
    let json = of("json");
    let part = r#"{"name":"7","references":2,"curve":null}"#;
    assert!(json.contains(part), "{json}");
    of("csv");
}

#[test]
fn a_device_that_does_not_occur_is_an_error_and_nothing_is_written() {
    let desk = Desk::new();
    fs::write(desk.path("volumes.csv"), VOLUMES).unwrap();
    for line in [
        "mrc volumes.csv --device 42",
        "mrc volumes.csv --device 42 --every 1h",
        "mrc volumes.csv --device 42 --partial new",
        "wss volumes.csv --device 42",
        "trace info volumes.csv --device 42",
        "trace convert volumes.csv new --device 42",
        "trace convert volumes.csv - --device 42",
    ] {
        let complaint = desk.complaint(line, 1);
        let expected = "volumes.csv: device '42' does not occur in it";
        assert!(complaint.contains(expected), "{line}: {complaint}");
        assert!(!desk.path("new").exists(), "{line}");
    }
    let seven = "0\n1\n0\n0\n";
    assert_eq!(desk.text("trace convert volumes.csv - --device 7"), seven);
}

#[test]
fn a_chart_of_more_devices_than_colours_is_refused() {
    let desk = Desk::new();
    let lines = (0..9).map(|device| format!("{device},R,0,4096,{device}\n"));
    fs::write(desk.path("many.csv"), lines.clone().collect::<String>()).unwrap();
    let complaint = desk.complaint("mrc many.csv --by device --out many.svg", 2);
    assert!(complaint.contains("there are 9 devices"), "{complaint}");
    fs::write(desk.path("few.csv"), lines.take(8).collect::<String>()).unwrap();
    let svg = desk.text("mrc few.csv --by device -o svg");
    assert!(svg.starts_with("<svg"), "{svg}");
}

#[test]
fn an_interval_has_the_curve_of_its_references_alone_and_late_ones_are_counted() {
    let desk = Desk::new();
    fs::write(desk.path("volumes.csv"), VOLUMES).unwrap();
    // The second hour begins with the fourth request; the last one lies before it.
    let known = "from_s,references,size_pages,miss_ratio,low,high\n0,4,9,1,1,1\n3600,3,9,0.6666666666666666,\
                 0.6666666666666666,0.6666666666666666\n";
    assert_eq!(
        desk.text("mrc volumes.csv --every 1h --sizes 9 -o csv"),
        known
    );
    let table = desk.text("mrc volumes.csv --every 60m --sizes 9");
    assert!(table.contains("late        1 references"), "{table}");
    let json = desk.text("mrc volumes.csv --every 1us -o json");
    for start in ["0s", "2us", "3us", "1h", "3600000001us"] {
        assert!(json.contains(&format!(r#""vm":"{start}""#)), "{json}");
    }
    let hours = (0..4).map(|half| format!("7,R,0,4096,{}\n", half * 9_000_000_000_u64));
    fs::write(desk.path("hours.csv"), hours.collect::<String>()).unwrap();
    let table = desk.text("mrc hours.csv --every 30m");
    for start in ["0s", "150m", "5h", "450m"] {
        let is_of = |line: &&str| line.starts_with(&format!("{start} "));
        assert_eq!(table.lines().filter(is_of).count(), 1, "{table}");
    }
    let svg = desk.text("mrc volumes.csv --every 1h -o svg");
    assert!(svg.contains("by memory size and time"), "{svg}");
    let complaint = desk.complaint("mrc loop.ids --every 1h", 2);
    assert!(
        complaint.contains("--every is not used by ids"),
        "{complaint}"
    );
}

#[test]
fn policies_are_simulated_at_the_sizes_asked_for() {
    let desk = Desk::new();
    // A loop of 4 pages: LRU and FIFO miss always in 3, W-TinyLFU keeps two of them, and 4 hold them all.
    let line = "mrc loop.ids --cache-policy lru,fifo,w-tinylfu --rate 1 --sizes 3,4 -o csv";
    let csv = desk.text(line);
    let rows: Vec<_> = csv.lines().collect();
    assert_eq!(rows[0], "policy,size_pages,miss_ratio");
    let ratio = |row: usize| {
        rows[row]
            .rsplit(',')
            .next()
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    assert_eq!([ratio(1), ratio(3)], [1.0, 1.0], "{csv}");
    for fits in [2, 4, 6] {
        assert_eq!(ratio(fits), 0.01, "{csv}");
    }
    assert!(ratio(5) < 0.6, "{csv}");
    let json = desk.text(&line.replace("csv", "json"));
    assert!(
        json.starts_with(r#"{"schema":1,"trace":"loop","page_bytes":4096,"rate":1.0,"#),
        "{json}"
    );
    assert!(
        desk.text(&line.replace("csv", "svg"))
            .contains("by eviction policy")
    );
    let table = desk.text("mrc loop.ids --cache-policy arc --rate 1 --points 2");
    assert!(table.contains("every reference"), "{table}");
}

#[test]
fn a_simulation_refuses_what_only_estimators_take() {
    let desk = Desk::new();
    let complaint = desk.complaint("mrc loop.ids --cache-policy fifo --max-samples 9", 2);
    assert!(
        complaint.contains("--max-samples: a sample takes only rate and seed"),
        "{complaint}"
    );
    let complaint = desk.complaint("mrc loop.ids --cache-policy fifo --rate 1e-12", 1);
    assert!(complaint.contains("no ratios of 'loop.ids'"), "{complaint}");
    for other in ["--every 1h", "--by device", "--compare", "--estimator lru"] {
        desk.complaint(&format!("mrc loop.ids --cache-policy fifo {other}"), 2);
    }
    let complaint = desk.complaint("mrc loop.ids --cache-policy fifo,lru,fifo", 2);
    assert!(complaint.contains("fifo is named twice"), "{complaint}");
}

#[test]
fn objects_with_sizes_have_curves_over_bytes() {
    let desk = Desk::new();
    // Objects 1 and 2 of 100 and 900 bytes, in turn: 999 bytes hold one of them, which is never the next.
    let record = |object: u64, size: u32| {
        let fields = [
            &9_u32.to_le_bytes()[..],
            &object.to_le_bytes(),
            &size.to_le_bytes(),
            &(-1_i64).to_le_bytes(),
        ];
        fields.concat()
    };
    let records = [
        record(1, 100),
        record(2, 900),
        record(2, 900),
        record(1, 100),
    ]
    .concat();
    fs::write(desk.path("o.oracleGeneral"), records).unwrap();
    let csv = desk.text("mrc o.oracleGeneral --object-sizes --sizes 899,900,1000 -o csv");
    let ratios: Vec<Vec<f64>> = csv
        .lines()
        .skip(1)
        .map(|line| line.split(',').map(|cell| cell.parse().unwrap()).collect())
        .collect();
    let expected = [(899.0, 1.0, 1.0), (900.0, 0.75, 0.55), (1000.0, 0.5, 0.5)];
    assert!(
        ratios
            .iter()
            .map(|row| (row[0], row[1], row[4]))
            .eq(expected),
        "{csv}"
    );
    let table = desk.text("mrc o.oracleGeneral --object-sizes --estimator shards --rate 1");
    assert!(table.contains("objects     1000 B"), "{table}");
    for output in ["json", "svg"] {
        desk.stdout(&format!("mrc o.oracleGeneral --object-sizes -o {output}"));
    }
    let complaint = desk.complaint("mrc loop.ids --object-sizes", 2);
    assert!(
        complaint.contains("--object-sizes is not used by ids traces"),
        "{complaint}"
    );
    let complaint = desk.complaint("mrc o.oracleGeneral --object-sizes --estimator aet", 2);
    assert!(
        complaint.contains("--object-sizes: aet does not take it; lru or shards does"),
        "{complaint}"
    );
}

#[test]
fn blocks_of_a_prompt_hit_in_order() {
    let desk = Desk::new();
    let line = |blocks: &str| format!("{{\"timestamp\": 1, \"hash_ids\": [{blocks}]}}\n");
    // The third request has the second block of the first one, but another first one.
    fs::write(
        desk.path("kv.jsonl"),
        [line("1, 2"), line("1, 2"), line("3, 2")].concat(),
    )
    .unwrap();
    let ratio = |options: &str| {
        let line = format!("mrc kv.jsonl --page-bytes 4096 --sizes 9 -o csv{options}");
        let csv = desk.text(&line);
        csv.lines()
            .nth(1)
            .unwrap()
            .split(',')
            .nth(1)
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    assert_eq!(ratio(""), 0.5);
    assert_eq!(ratio(" --prefix"), 4.0 / 6.0);
    let complaint = desk.complaint("mrc loop.ids --prefix", 2);
    assert!(
        complaint.contains("--prefix is not used by ids traces, only by: mooncake"),
        "{complaint}"
    );
    // Of all blocks, a sample is exact.
    assert_eq!(ratio(" --prefix --estimator shards --rate 1"), 4.0 / 6.0);
    let report = desk.text("mrc kv.jsonl --page-bytes 64K --prefix --estimator aet --sizes 9");
    assert!(report.contains("\npage        64 KiB\n"), "{report}");
    // Without the size of a block, that of a page is an assumption.
    let output = desk.run("mrc kv.jsonl --rate 1 --cache-policy lru,fifo");
    let note = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{note}");
    assert_eq!(
        note.matches("sizes in bytes assume 4096 bytes a block")
            .count(),
        1,
        "{note}"
    );
    assert!(report.contains("of prefixes"), "{report}");
    desk.complaint("mrc kv.jsonl --page-bytes 4K --prefix --estimator all", 2);
    // Block 2 after another beginning is the same block by its number, and another one by its prefix.
    let lines = [line("1, 2"), line("9"), line("9, 2")].concat();
    fs::write(desk.path("kv.jsonl"), lines).unwrap();
    assert_eq!(ratio(" --prefix --estimator lru"), 3.0 / 5.0);
    assert_eq!(ratio(" --prefix --estimator shards --rate 1"), 4.0 / 5.0);
    desk.complaint(
        "mrc kv.jsonl --page-bytes 4K --prefix --estimator lru --seed 1",
        2,
    );
}

#[test]
fn what_is_read_of_a_pipe_by_its_path_is_not_lost() {
    let desk = Desk::new();
    let numbers: String = (0..100_000).map(|number| format!("{number}\n")).collect();
    let line = "trace convert /dev/stdin --from ids piped.parquet";
    let output = desk.piped(line, numbers.as_bytes());
    assert!(output.status.success(), "{output:?}");
    let info = desk.text("trace info piped.parquet -o csv");
    assert!(info.contains(",100000,100000,"), "{info}");
    // A trace of no format ends with an error, although the pipe's writer is gone.
    let fifo = desk.path("fifo");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    std::thread::scope(|scope| {
        scope.spawn(|| fs::write(&fifo, [0x81; 9000]));
        let complaint = desk.complaint("mrc fifo", 1);
        assert!(complaint.contains("fifo"), "{complaint}");
    });
}

#[test]
fn times_that_cannot_be_read_are_left_out_of_parquet_if_asked() {
    let desk = Desk::new();
    fs::write(desk.path("t.csv"), "time,page\n2026-01-01T00:00:00,7\n").unwrap();
    let complaint = desk.complaint("trace convert t.csv t.parquet", 1);
    assert!(complaint.contains("a time in seconds"), "{complaint}");
    assert!(complaint.contains("--pages-only"), "{complaint}");
    desk.stdout("trace convert t.csv t.parquet --pages-only");
    let info = desk.text("trace info t.parquet -o csv");
    assert!(info.contains(",1,1,"), "{info}");
}

#[test]
fn the_least_misses_are_those_of_the_whole_curve() {
    let desk = Desk::new();
    fs::write(
        desk.path("t.csv"),
        format!("time,page\n{}", "0,1\n0,2\n0,3\n0,4\n".repeat(100)),
    )
    .unwrap();
    let table = desk.text("mrc t.csv --estimator lru --every 1m --sizes 2");
    let row = table.lines().last().unwrap();
    assert!(
        row.contains(" 1.00 %") && row.ends_with("100.00 %"),
        "{table}"
    );
    let followed = desk.text("mrc loop.ids --follow --every 1m --estimator lru --sizes 2");
    let row = followed.lines().last().unwrap();
    assert!(
        row.contains(" 1.00 %") && row.ends_with("100.00 %"),
        "{followed}"
    );
}

#[test]
fn a_record_of_counters_tells_the_size_of_its_pages() {
    let desk = Desk::new();
    desk.stdout(
        "mrc loop.ids --page-bytes 64K --estimator counter-stacks --stream counters -o csv",
    );
    let json = |line: &str| -> CurveJson { serde_json::from_str(&desk.text(line)).unwrap() };
    assert_eq!(json("mrc counters -o json").page_bytes, 65_536);
    assert_eq!(
        json("mrc counters --page-bytes 64K -o json").page_bytes,
        65_536
    );
    let complaint = desk.complaint("mrc counters --page-bytes 8K", 2);
    assert!(complaint.contains("pages of 65536 bytes"), "{complaint}");
}

#[test]
fn parquet_keeps_what_curves_by_time_need() {
    let desk = Desk::new();
    fs::write(desk.path("volumes.csv"), VOLUMES).unwrap();
    desk.stdout("trace convert volumes.csv volumes.parquet");
    let line = |name: &str| format!("mrc {name} --every 1h --sizes 9 -o csv");
    assert_eq!(
        desk.text(&line("volumes.parquet")),
        desk.text(&line("volumes.csv"))
    );
    desk.stdout("trace convert volumes.parquet again.parquet");
    assert_eq!(
        desk.text(&line("again.parquet")),
        desk.text(&line("volumes.csv"))
    );
    let complaint = desk.complaint("mrc volumes.parquet --object-sizes", 1);
    assert!(
        complaint.contains("there is no column 'size_bytes'"),
        "{complaint}"
    );
}

#[test]
fn partial_states_of_slices_merge_to_the_curve_of_the_trace() {
    let desk = Desk::new();
    desk.stdout("trace generate zipf --pages 30000 --references 200000 --out all.ids");
    let all = fs::read_to_string(desk.path("all.ids")).unwrap();
    let lines: Vec<_> = all.lines().collect();
    let starts = [0, 50_001, 120_000, lines.len()];
    for (name, pair) in ["a", "b", "c"].iter().zip(starts.windows(2)) {
        let slice = lines[pair[0]..pair[1]].join("\n");
        fs::write(desk.path(&format!("{name}.ids")), slice).unwrap();
    }
    for options in [
        "lru",
        "shards --rate 0.1 --seed 3",
        "shards --rate 1/2000",
        "shards-max --max-samples 100",
    ] {
        let options = format!("--estimator {options}");
        for (name, start) in ["a", "b", "c"].iter().zip(starts) {
            let line = format!("mrc {name}.ids {options} --start {start} --partial {name}.part");
            assert_eq!(desk.text(&line), "");
        }
        let text = |line: &str| desk.text(&format!("{line} -o csv"));
        let expected = text(&format!("mrc all.ids {options}"));
        assert_eq!(text("mrc --merge a.part b.part c.part"), expected);
        assert_eq!(desk.text("mrc --merge b.part c.part --partial bc.part"), "");
        assert_eq!(text("mrc --merge a.part bc.part"), expected);
        let table = desk.text("mrc --merge a.part bc.part");
        let plain = desk.text(&format!("mrc all.ids {options}"));
        let after_name = |table: &str| table.split_once('\n').unwrap().1.to_owned();
        assert_eq!(after_name(&table), after_name(&plain));

        let complaint = desk.complaint("mrc --merge a.part c.part", 1);
        let expected = "'c.part': it begins at reference 120000 of the trace, and those before it end at 50001";
        assert!(complaint.contains(expected), "{complaint}");
        let complaint = desk.complaint("mrc --merge b.part c.part", 1);
        assert!(complaint.contains("the first 50001 references of the trace are missing"));
    }
}

#[test]
fn what_is_no_partial_state_and_options_that_do_not_fit_are_refused() {
    let desk = Desk::new();
    desk.stdout("mrc loop.ids --partial loop.part");
    desk.stdout("mrc loop.ids --estimator shards --start 0 --partial other.part");
    for (line, code, expected) in [
        (
            "mrc --merge loop.ids",
            1,
            "'loop.ids': this is no partial state of a curve",
        ),
        (
            "mrc --merge loop.part none.part",
            1,
            "cannot read 'none.part'",
        ),
        (
            "mrc --merge loop.part other.part",
            1,
            "'other.part': the first is of exact LRU",
        ),
        (
            "mrc --merge loop.part --estimator aet",
            2,
            "omit its options",
        ),
        (
            "mrc --merge loop.part --partial loop.part",
            2,
            "would be lost",
        ),
        (
            "mrc --merge loop.part other.part --partial other.part",
            2,
            "would be lost",
        ),
        ("mrc loop.ids --partial loop.ids", 2, "would be lost"),
        (
            "mrc --merge loop.part other.part --out ./other.part",
            2,
            "would be lost",
        ),
        (
            "mrc loop.ids --estimator counter-stacks --stream x.part --out ./x.part",
            2,
            "one of them would be lost",
        ),
        (
            "mrc loop.part",
            2,
            "'loop.part' is no trace but a partial state: `mrc --merge` reads it",
        ),
        (
            "mrc loop.ids --estimator shards --partial x.part",
            2,
            "(--start N)",
        ),
        (
            "mrc loop.ids --estimator aet --partial x.part",
            2,
            "aet has no partial states; lru, shards, shards-max have",
        ),
        (
            "mrc loop.ids --threads 2 --partial x.part",
            2,
            "several slices at once",
        ),
        (
            "mrc loop.ids --estimator all --partial x.part",
            2,
            "choose one estimator",
        ),
        (
            "mrc loop.ids --partial x.part --out y",
            2,
            "writes no curve",
        ),
    ] {
        let complaint = desk.complaint(line, code);
        assert!(complaint.contains(expected), "{line}: {complaint}");
        assert!(!desk.path("x.part").exists(), "{line}");
    }
    let maps = "mrc loop.ids --partial x.part";
    let merges = "mrc --merge loop.part";
    let of_curves = [
        "--every 1h",
        "--by device",
        "--object-sizes",
        "--prefix",
        "--cache-policy lru",
    ];
    let of_views = ["--points 5", "--sizes 3", "-o csv"];
    let of_traces = ["--format ids", "--device 0", "--page-bytes 8K", "--seed 1"];
    let refused = |line: &'static str, options: &[&'static str]| {
        for option in options {
            let complaint = desk.complaint(&format!("{line} {option}"), 2);
            assert!(complaint.contains("cannot be used with"), "{complaint}");
        }
    };
    refused(maps, &of_curves);
    refused(maps, &of_views);
    refused(merges, &of_curves);
    refused(merges, &of_traces);
    assert!(!desk.path("x.part").exists());
    let mut damaged = fs::read(desk.path("loop.part")).unwrap();
    damaged[100] ^= 1;
    fs::write(desk.path("loop.part"), damaged).unwrap();
    let complaint = desk.complaint("mrc --merge loop.part", 1);
    assert!(
        complaint.contains("'loop.part': the partial state is damaged"),
        "{complaint}"
    );
}

#[test]
fn the_hot_pages_of_a_run_cover_the_next_run_of_the_workload() {
    let desk = Desk::new();
    for (name, seed) in [("before", 1), ("next", 2)] {
        desk.stdout(&format!(
            "trace generate zipf --pages 20000 --references 400000 --seed {seed} --out {name}.plimsoll"
        ));
    }
    // All that the run used, and a list of 1.3 times the pages that the next one uses.
    let of = |top: &str| -> serde_json::Value {
        let line =
            format!("report hot --from before.plimsoll --check next.plimsoll --top {top} -o json");
        serde_json::from_str(&desk.text(&line)).unwrap()
    };
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let used = of("1G")["check"]["used_bytes"].as_u64().unwrap();
    let check = of(&(used * 13 / 10).to_string());
    assert!(number(&check["bytes"]) <= 1.3 * used as f64);
    assert!(number(&check["check"]["uses_covered"]) >= 0.9, "{check}");
    assert!(number(&check["check"]["pages_covered"]) >= 0.9, "{check}");

    let list = desk.text("report hot --from before.plimsoll --top 16K -o csv");
    let lines: Vec<_> = list.lines().collect();
    assert_eq!(
        (lines.len(), lines[0]),
        (5, "begin_bytes,length_bytes,intervals,uses")
    );
    // Used in each of the four intervals.
    assert!(
        lines[1..].iter().all(|line| line.contains(",4096,4,")),
        "{list}"
    );
    let text = desk.text("report hot --from before.plimsoll --check next.plimsoll --top 16K");
    assert!(
        text.starts_with("before.plimsoll: 16 KiB of the "),
        "{text}"
    );
    desk.complaint("report hot", 2);
    desk.complaint("report hot --from before.plimsoll --socket x.sock", 2);
    desk.complaint("report hot --from empty.ids", 1);
    desk.complaint("report hot web --from loop.ids", 2);
}

#[test]
fn a_stream_is_followed_by_the_curve_of_its_last_window() {
    let desk = Desk::new();
    let mut follower = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args("mrc - --follow --every 200ms --window 600ms --estimator lru -o json".split(' '))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stream = follower.stdin.take().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    let mut next =
        || -> serde_json::Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    // A loop over 8 pages, and then nothing: it is in the window, and then it is not.
    stream
        .write_all(&b"1\n2\n3\n4\n5\n6\n7\n8\n".repeat(10))
        .unwrap();
    let mut seen = next();
    while seen["references"] != 80 {
        seen = next();
    }
    let points = seen["curve"]["points"].as_array().unwrap();
    assert_eq!(points.last().unwrap()["size_pages"], 8);
    assert_eq!(points.last().unwrap()["miss_ratio"], 0.1);
    while seen["references"] != 0 {
        seen = next();
    }
    assert!(
        seen["curve"].is_null() && seen["window_ms"].as_u64().unwrap() >= 500,
        "{seen}"
    );
    // The last line need not be ended. The end of the stream is shown, and ends the program.
    stream.write_all(b"9\n9").unwrap();
    drop(stream);
    while seen["references"] != 2 {
        seen = next();
    }
    assert!(follower.wait().unwrap().success());

    fs::write(desk.path("cut.ids"), format!("{}x\n", "1\n".repeat(90_000))).unwrap();
    let complaint = desk.complaint("mrc - --follow --every 10s --window 25s", 2);
    assert!(complaint.contains("a multiple of --every"), "{complaint}");
    let complaint = desk.complaint("mrc cut.ids --follow --every 1m", 1);
    assert!(
        complaint.contains("cut.ids, line 90001: expected"),
        "{complaint}"
    );

    desk.stdout("trace generate uniform --pages 90000 --references 90000 --out many.ids");
    let of = |name: &str| desk.text(&format!("mrc {name} --follow --every 1m -o csv --points 9"));
    let curve = |text: String| -> Vec<String> {
        let lines = text.lines().skip(1);
        lines
            .map(|line| line.split_once(',').unwrap().1.to_owned())
            .collect()
    };
    for packed in ["many.ids.gz", "many.ids.zst"] {
        desk.stdout(&format!("trace convert many.ids {packed}"));
        assert_eq!(curve(of(packed)), curve(of("many.ids")), "{packed}");
    }
    let packed = fs::read(desk.path("many.ids.gz")).unwrap();
    fs::write(desk.path("cut.ids.gz"), &packed[..packed.len() / 2]).unwrap();
    let complaint = desk.complaint("mrc cut.ids.gz --follow --every 1m", 1);
    assert!(
        complaint.contains("cannot read 'cut.ids.gz'"),
        "{complaint}"
    );

    fs::write(desk.path("wrong.ids"), "1\n2\nx\n").unwrap();
    let complaint = desk.complaint("mrc wrong.ids --follow --every 1s", 1);
    assert!(complaint.contains("line 3"), "{complaint}");
    let table = desk.text("mrc loop.ids --follow --every 1m --sizes 2,4");
    assert!(
        table.contains("100.00 %") && table.contains("1.00 %"),
        "{table}"
    );
    for wrong in [
        "mrc - --follow",
        "mrc - --follow --every 1s --window 0..9",
        "mrc - --follow --every 1s --window 1h",
        "mrc - --follow --every 1s --format csv",
        "mrc loop.ids --window 5m",
    ] {
        desk.complaint(wrong, 2);
    }
}

#[test]
fn a_vm_is_started_also_if_nobody_reads_the_output() {
    let desk = Desk::new();
    let qemu = desk.path("qemu");
    write_program(qemu, "#!/bin/sh\ntouch started\nexit 7\n");
    let gone = || std::io::pipe().unwrap().1;
    let ended = desk.command("run -- ./qemu").stdout(gone()).output();
    let ended = ended.unwrap();
    assert_eq!(ended.status.code(), Some(7), "{ended:?}");
    assert!(desk.path("started").exists());
    let failed = desk.command("run -- ./nosuch").stdout(gone()).output();
    assert_ne!(failed.unwrap().status.code(), Some(0));
}

#[test]
fn a_selftest_in_which_nothing_can_be_tested_fails_and_keeps_the_old_report() {
    let desk = Desk::new();
    fs::write(desk.path("report"), "old").unwrap();
    let ended = desk
        .command("selftest --report report")
        .env("PATH", desk.0.path())
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert_eq!(fs::read(desk.path("report")).unwrap(), b"old");
}
