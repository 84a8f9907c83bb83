//! `plimsoll wss` on runs whose working sets are known.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use plimsoll_flow::{PageCount, PageNumber};
use plimsoll_pagelog::RecordSource;
use plimsoll_pagelog::log::{LogWriter, Totals};
use plimsoll_pagelog::mmu::{Config, EmulatedRecords};
use plimsoll_pagelog::record::{MARK_BEGIN, MARK_END, Record, Walk};
use plimsoll_source::synthetic::{Pattern, Program, Workload};
use serde_json::Value;
use tempfile::TempDir;

const PAGES: u64 = 2_000;
const ROUNDS: u64 = 80;
/// Memory of the machines of page logs.
const RAM_PAGES: u64 = 1 << 14;

/// A folder with runs over an array, and the program.
struct Desk(TempDir);

impl Desk {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, line: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .current_dir(self.0.path())
            .args(line.split(' '))
            .output()
            .unwrap()
    }

    fn text(&self, line: &str) -> String {
        let output = self.run(line);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*complaint), (Some(0), ""), "{line}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.text(&format!("{line} -o json"))).unwrap()
    }

    fn complaint(&self, line: &str, code: i32) -> String {
        let output = self.run(line);
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}: {complaint}");
        assert!(output.stdout.is_empty(), "{line}");
        complaint
    }

    /// Writes a trace of an array program.
    fn array(&self, program: &str) {
        self.text(&format!(
            "trace generate arrays --pages {PAGES} --program {program} --rounds {ROUNDS} --out {program}.plimsoll"
        ));
    }

    /// Writes a page log of the RWRW program, between marks; before it, other pages were written.
    fn log(&self, name: &str, interval: Option<u64>) -> PathBuf {
        let config = Config {
            filter_pages: Some(64),
            interval_references: interval.and_then(|n| n.try_into().ok()),
            ..Config::default()
        };
        let workload = Workload::of(Pattern::Arrays {
            pages: PageCount(PAGES),
            program: Program::Rwrw,
            rounds: ROUNDS,
        });
        let mut source = EmulatedRecords::new(workload.source().unwrap(), &config).unwrap();
        let mut description = source.description().clone();
        description.ram_bytes = RAM_PAGES << 12;
        description.below_4g_bytes = description.ram_bytes;
        let path = self.path(name);
        let mut log = LogWriter::create(&path, &description).unwrap();
        let boot = (10_000..10_500).map(|frame| {
            Record::Walk(Walk {
                vcpu: 0,
                frame: PageNumber(frame),
                step_instructions: 7,
                write: true,
                fetch: false,
                sets_accessed: true,
                sets_dirty: true,
            })
        });
        log.write(&boot.clone().collect::<Vec<_>>()).unwrap();
        let mark = |id| Record::Mark { vcpu: 0, id };
        log.write(&[mark(MARK_BEGIN)]).unwrap();
        let mut batch = Vec::new();
        while source.next_batch(&mut batch).unwrap() {
            // Before its clock, the machine has booted.
            for record in &mut batch {
                if let Record::Clock { instructions, .. } = record {
                    *instructions += 3_500;
                }
            }
            log.write(&batch).unwrap();
        }
        log.write(&[mark(MARK_END)]).unwrap();
        log.write(&boot.collect::<Vec<_>>()).unwrap();
        log.finish(Totals { waits: 3, lost: 0 }).unwrap();
        path
    }
}

/// What an estimator found in a run.
fn found<'a>(json: &'a Value, estimator: &str) -> &'a Value {
    let all = json["estimators"].as_array().unwrap();
    let one = all.iter().find(|found| found["estimator"] == estimator);
    one.unwrap_or_else(|| panic!("no {estimator} in {json}"))
}

fn pages(json: &Value, estimator: &str) -> u64 {
    let found = found(json, estimator);
    found["working_set_pages"]
        .as_u64()
        .unwrap_or_else(|| panic!("{found}"))
}

#[test]
fn all_estimators_but_sampling_find_an_array_to_the_page() {
    let desk = Desk::new();
    desk.array("rwrw");
    let json = desk.json("wss rwrw.plimsoll --interval 2000 --memory 8000");
    assert_eq!(
        (json["schema"].as_u64(), &json["unit"]),
        (Some(1), &"references".into())
    );
    assert_eq!(json["intervals"], ROUNDS);
    for estimator in ["truth", "prl", "pml", "mrc", "mrc-past-filter"] {
        assert_eq!(pages(&json, estimator), PAGES, "{estimator}");
        assert_eq!(found(&json, estimator)["bound"], "estimate", "{estimator}");
    }
    let prl = found(&json, "prl");
    assert_eq!(
        (&prl["truth_pages"], &prl["error_ratio"]),
        (&PAGES.into(), &0.0.into())
    );
    // A page is logged once a round, less one of 513 that finds its buffer full; hot from the fiftieth on.
    let step = prl["settled_step"].as_u64().unwrap();
    assert!((53..58).contains(&step), "{step}");
    assert_eq!(prl["settled_at"], (step + 1) * 2_000);
    let esx = found(&json, "esx");
    let edge = |name: &str| esx[name].as_u64().unwrap();
    assert!(
        edge("low_pages") <= PAGES && PAGES <= edge("high_pages"),
        "{esx}"
    );
    // Of every 513 walks one finds the buffer full, and nothing else is missed without a clock.
    let logging = &json["logging"][0];
    let walks = PAGES * ROUNDS;
    assert_eq!(
        (&logging["estimator"], &logging["walks"]),
        (&"prl".into(), &walks.into())
    );
    assert_eq!(logging["missed_at_full"], walks / 513);
    assert_eq!(logging["missed_in_handler"], 0);
}

#[test]
fn pml_sees_no_working_set_while_a_program_only_reads() {
    let desk = Desk::new();
    desk.array("rrww");
    let json = desk.json("wss rrww.plimsoll --interval 2000 --estimator pml");
    let written = |step: usize| json["steps"][step]["pml_written_pages"].as_u64().unwrap();
    assert_eq!(
        [written(0), written(39), written(40), written(79)],
        [0, 0, PAGES, PAGES]
    );
    assert_eq!(found(&json, "pml")["settled_step"], 44);
    // All of its run counts: what was written once is in the figure for ever.
    desk.array("wwrr");
    let json = desk.json("wss wwrr.plimsoll --interval 2000 --estimator pml");
    assert_eq!(json["steps"][79]["pml_written_pages"], 0);
    assert_eq!(json["steps"][79]["pml_cumulative_pages"], PAGES);
}

#[test]
fn a_slow_handler_costs_addresses_that_are_counted() {
    let desk = Desk::new();
    desk.array("rwrw");
    let json =
        desk.json("wss rwrw.plimsoll --interval 2000 --estimator prl --drain-cost 100 --buffer 64");
    let logging = &json["logging"][0];
    let of = |name: &str| logging[name].as_u64().unwrap();
    assert!(of("missed_in_handler") > of("walks") / 4, "{logging}");
    assert_eq!(
        of("logged") + of("missed_at_full") + of("missed_in_handler"),
        of("walks")
    );
    assert!(
        logging["host_cpu_ratio"].as_f64().unwrap() > 0.1,
        "{logging}"
    );
}

#[test]
fn a_page_log_counts_between_its_marks_as_the_trace_does() {
    let desk = Desk::new();
    desk.array("rwrw");
    desk.log("array.pagelog", Some(2_000));
    let of_log = desk.json("wss array.pagelog");
    let of_trace = desk.json(&format!(
        "wss rwrw.plimsoll --interval 2000 --memory {RAM_PAGES}"
    ));
    for estimator in ["truth", "prl", "pml", "esx", "mrc", "mrc-past-filter"] {
        assert_eq!(
            found(&of_log, estimator),
            found(&of_trace, estimator),
            "{estimator}"
        );
    }
    assert_eq!(of_log["steps"], of_trace["steps"]);
    assert_eq!(
        (&of_log["marked"], &of_log["unit"]),
        (&true.into(), &"instructions".into())
    );
    assert_eq!((&of_log["lost"], &of_log["cut"]), (&0.into(), &Value::Null));

    let whole = desk.json("wss array.pagelog --whole");
    assert_eq!(whole["marked"], false);
    assert_eq!(whole["steps"][0]["touched_pages"], PAGES + 500);
}

#[test]
fn a_log_cut_short_is_used_and_says_so_and_a_damaged_one_is_refused() {
    let desk = Desk::new();
    let path = desk.log("array.pagelog", Some(2_000));
    let whole = fs::read(&path).unwrap();
    fs::write(desk.path("cut.pagelog"), &whole[..whole.len() * 9 / 10]).unwrap();
    let json = desk.json("wss cut.pagelog --estimator truth");
    let cut = json["cut"].as_str().unwrap();
    assert!(cut.contains("truncated after"), "{cut}");
    assert_eq!(pages(&json, "truth"), PAGES);
    assert!(desk.text("wss cut.pagelog").contains("\ncut         "));
    // As far as it goes for the hot pages, too; the list of the whole log has no more pages.
    let line = "report hot --from cut.pagelog --check array.pagelog -o json";
    let hot: Value = serde_json::from_str(&desk.text(line)).unwrap();
    assert_eq!(hot["cut"].as_str(), Some(cut), "{hot}");
    assert_eq!(
        (&hot["lost"], &hot["check"]["lost"]),
        (&Value::Null, &0.into())
    );
    assert!(hot["bytes"].as_u64().unwrap() >= PAGES * 4096, "{hot}");
    let text = desk.text("report hot --from cut.pagelog");
    assert!(text.ends_with(" records: only these count\n"), "{text}");

    let mut damaged = whole;
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    fs::write(desk.path("damaged.pagelog"), damaged).unwrap();
    let complaint = desk.complaint("wss damaged.pagelog", 1);
    assert!(complaint.contains("damaged.pagelog, byte "), "{complaint}");
    let complaint = desk.complaint("report hot --from damaged.pagelog", 1);
    assert!(complaint.contains("damaged.pagelog, byte "), "{complaint}");
}

#[test]
fn what_cannot_be_is_refused_with_its_reason() {
    let desk = Desk::new();
    desk.array("rwrw");
    desk.log("array.pagelog", Some(2_000));
    desk.log("timeless.pagelog", None);
    for (line, code, reason) in [
        (
            "wss array.pagelog --interval 5",
            2,
            "--interval: 'array.pagelog' is a page log",
        ),
        ("wss array.pagelog --tlb 64x4", 2, "--tlb: "),
        ("wss array.pagelog --memory 1G", 2, "--memory: "),
        ("wss array.pagelog --format ids", 2, "--format: "),
        ("wss array.pagelog --device 1", 2, "--device: "),
        ("wss array.pagelog --page-bytes 64K", 2, "--page-bytes: "),
        ("wss array.pagelog --steps -o json", 2, "--steps: "),
        (
            "report hot --from array.pagelog --interval 7",
            2,
            "intervals of its own",
        ),
        (
            "mrc array.pagelog",
            2,
            "is no trace but a page log: `wss` reads it",
        ),
        ("wss timeless.pagelog", 1, "has no intervals"),
        ("report hot --from timeless.pagelog", 1, "has no intervals"),
        ("wss array.pagelog --out array.pagelog", 2, "would be lost"),
        ("wss missing.pagelog", 1, "missing.pagelog"),
        ("wss rwrw.plimsoll --tlb 48x4", 2, "is not a TLB shape"),
        ("wss rwrw.plimsoll --omega 0", 2, "--omega"),
        ("wss rwrw.plimsoll --sample-pages 0", 2, "--sample-pages"),
        (
            "wss rwrw.plimsoll --window 4 --times 5",
            2,
            "--times 5: at most --window",
        ),
        (
            "wss rwrw.plimsoll --warm-up 200%",
            2,
            "--warm-up 200%: at most 1",
        ),
        ("wss rwrw.plimsoll --memory 1K", 2, "less than a page"),
        (
            "wss rwrw.plimsoll --interval 2000 --memory 10",
            1,
            "in a memory of 10 pages the last is page 9",
        ),
        (
            "wss rwrw.plimsoll --whole",
            2,
            "--whole: 'rwrw.plimsoll' is no page log",
        ),
        (
            "wss rwrw.plimsoll --estimator truth --tau 3",
            2,
            "--tau: --estimator truth does not take it, only prl",
        ),
        (
            "wss rwrw.plimsoll --estimator esx --drain-cost 3",
            2,
            "--drain-cost: --estimator esx does not take it, only prl, pml",
        ),
        (
            "wss rwrw.plimsoll --estimator prl --memory 1G",
            2,
            "--memory: only --estimator esx takes it",
        ),
    ] {
        let complaint = desk.complaint(line, code);
        assert!(complaint.contains(reason), "{line}: {complaint}");
    }
}

#[test]
fn what_nobody_found_says_why() {
    let desk = Desk::new();
    desk.array("rwrw");
    let json = desk.json("wss rwrw.plimsoll --interval 1000000");
    for (estimator, reason) in [
        ("truth", "shorter than an interval"),
        ("prl", "shorter than an interval"),
        ("esx", "give --memory"),
    ] {
        let found = found(&json, estimator);
        assert!(
            found["reason"].as_str().unwrap().contains(reason),
            "{found}"
        );
        assert_eq!(found["working_set_pages"], Value::Null);
    }
    // Fewer rounds than τ: a lower bound.
    let json = desk.json("wss rwrw.plimsoll --interval 2000 --tau 100 --estimator prl");
    let prl = found(&json, "prl");
    assert_eq!(
        (&prl["bound"], &prl["working_set_pages"]),
        (&"at_least".into(), &0.into())
    );
    assert_eq!(prl["error_ratio"], -1.0);
}

#[test]
fn tables_and_pictures_are_of_their_kind() {
    let desk = Desk::new();
    desk.array("rwrw");
    let table = desk.text("wss rwrw.plimsoll --interval 2000 --epsilon 1MiB");
    for line in [
        "intervals   80 intervals of 2000 references",
        "truth       pages touched within 4 intervals",
        "kernel      1 MiB added to prl, not in its error",
        "prl                 8.81 MiB   2256  +0.00 %  interval ",
        "esx                        -                  give --memory",
    ] {
        assert!(table.contains(line), "{line}\n{table}");
    }
    let csv = desk.text("wss rwrw.plimsoll --interval 2000 --estimator mrc -o csv");
    assert!(csv.contains("\nmrc,2000,estimate,,,2000,0,,,\n"), "{csv}");
    let steps = desk.text("wss rwrw.plimsoll --interval 2000 --estimator prl --steps -o csv");
    assert_eq!(steps.lines().count() as u64, ROUNDS + 1);
    assert!(steps.contains("\n0,2000,2000,2000,0,,,,,,,\n"), "{steps}");
    let table = desk.text("wss rwrw.plimsoll --interval 2000 --estimator prl --steps");
    assert!(
        table.contains("prl hot") && !table.contains("esx"),
        "{table}"
    );
    let svg = desk.text("wss rwrw.plimsoll --interval 2000 -o svg");
    assert!(svg.starts_with("<svg ") && svg.contains("prl settled: 7.81 MiB"));
}
