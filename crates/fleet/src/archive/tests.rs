use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::{Field, Row};
use plimsoll_protocol::SCHEMA;
use plimsoll_protocol::fleet::HostDemands;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::collect::Access;

const UUID: &str = "c7a5fdbd-edaf-9455-926a-d65c16db1809";
/// A day of long ago.
const DAY: u64 = 20_000 * DAY_MS;

/// Answers by what is asked for: `demands`, or `NAME/curves` and `NAME/history` and the start of the day.
type Answers = Arc<Mutex<BTreeMap<String, Value>>>;

/// A daemon that answers so; what is not among the answers is empty.
fn daemon(answers: &Answers) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let answers = Arc::clone(answers);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let request = lines.next().unwrap().unwrap();
            while !lines.next().unwrap().unwrap().is_empty() {}
            let words: Vec<_> = request.split([' ', '/', '?', '=', '&']).collect();
            let key = match words[..] {
                ["GET", _, "v1", "vms", vm, table, "since_unix_ms", since, ..] => {
                    format!("{vm}/{table} {since}")
                }
                _ => "demands".to_owned(),
            };
            let empty = json!({"schema": 1, "vm": "", "curves": [], "samples": []});
            let answer = answers.lock().unwrap().get(&key).cloned().unwrap_or(empty);
            let body = answer.to_string();
            let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length:";
            write!(stream, "{head} {}\r\n\r\n{body}", body.len()).unwrap();
        }
    });
    base
}

fn demands(host: &str, now_unix_ms: u64) -> HostDemands {
    let vm = |vm: &str, uuid: Option<&str>| VmDemands {
        vm: vm.to_owned(),
        uuid: uuid.map(str::to_owned),
        present: true,
        managed: true,
        size_bytes: 1 << 30,
        unknown_need_bytes: 1 << 30,
        intervals: Vec::new(),
    };
    HostDemands {
        schema: SCHEMA,
        host: host.to_owned(),
        now_unix_ms,
        since_unix_ms: DAY,
        interval_ms: DAY_MS,
        processors: None,
        total_bytes: 1 << 32,
        vms: vec![vm("web", Some(UUID)), vm("db", None)],
    }
}

fn curve(unix_ms: u64, low: f64) -> Value {
    json!({"unix_ms": unix_ms, "curve": {
        "schema": 1, "vm": "web", "page_bytes": 4096, "references": 1000, "baseline_pages": 512, "points": [
            {"size_pages": 0, "miss_ratio": 1.0, "low": 1.0, "high": 1.0,
             "misses_per_second": 10.0, "misses_low_per_second": 8.0, "misses_high_per_second": 15.0},
            {"size_pages": 256, "miss_ratio": 0.5, "low": low, "high": 0.75,
             "misses_per_second": 5.0, "misses_low_per_second": 4.0, "misses_high_per_second": 7.5}]}})
}

fn curves(of: &[Value]) -> Value {
    json!({"schema": 1, "vm": "web", "curves": of})
}

fn sample(unix_ms: u64, working_set_bytes: Option<u64>) -> Value {
    json!({"unix_ms": unix_ms, "direct_bytes": 512, "cache_bytes": 0, "target_bytes": null,
        "working_set_bytes": working_set_bytes, "working_set_bound": working_set_bytes.map(|_| "at_least"), "relative": 1.25, "misses_per_second": null, "overhead_ratio": 0.01, "lost": 3})
}

fn collected((target, demands): &(&str, HostDemands)) -> CollectedHost {
    CollectedHost {
        target: (*target).to_owned(),
        clock_ahead_ms: 0,
        demands: demands.clone(),
    }
}

fn archived(hosts: Vec<CollectedHost>, root: &Path) -> Result<Archived, ArchiveError> {
    let access = Access {
        time_out: Duration::from_secs(10),
        ..Access::default()
    };
    let answers = FleetFile {
        schema: SCHEMA,
        collected_unix_ms: 0,
        hosts,
        missing: Vec::new(),
    };
    archive(&Collector::new(&access).unwrap(), answers, root)
}

/// What is archived of hosts with these targets.
fn run(hosts: &[(&str, HostDemands)], root: &Path) -> Result<Archived, ArchiveError> {
    archived(hosts.iter().map(collected).collect(), root)
}

fn rows(path: &Path) -> Vec<Row> {
    let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
    reader
        .get_row_iter(None)
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

fn cells(row: &Row) -> Vec<String> {
    let text = |(_, field): (&String, &Field)| match field {
        Field::Str(text) => text.clone(),
        other => other.to_string(),
    };
    row.get_column_iter().map(text).collect()
}

/// A daemon with a curve and two samples of a VM.
fn example() -> Answers {
    let answers = BTreeMap::from([
        (format!("web/curves {DAY}"), curves(&[curve(DAY + 7, 0.25)])),
        (
            format!("web/history {DAY}"),
            json!({"schema": 1, "vm": "web", "samples": [sample(DAY, Some(300)), sample(DAY + DAY_MS - 1, None)]}),
        ),
    ]);
    Arc::new(Mutex::new(answers))
}

#[test]
fn tables_have_the_curves_with_their_bands_and_the_working_sets() {
    let folder = TempDir::new().unwrap();
    let base = daemon(&example());
    let root = folder.path().join("new/archive");
    let found = run(&[(&base, demands("h 1/../x", DAY + DAY_MS))], &root).unwrap();
    assert_eq!(
        (found.written, found.kept, &found.missing[..]),
        (2, 0, &[][..])
    );
    let at = root.join("date=2024-10-04/host=h%201%2F..%2Fx");
    let found: Vec<_> = rows(&at.join("curves.parquet")).iter().map(cells).collect();
    let time = "2024-10-04 00:00:00.007 +00:00";
    let last = ["1000", "2097152", "null"];
    let wanted = [
        ["0", "1.0", "1.0", "1.0", "10.0", "8.0", "15.0"],
        ["1048576", "0.5", "0.25", "0.75", "5.0", "4.0", "7.5"],
    ];
    let wanted = wanted.map(|cells| [&[time, "web", UUID], &cells[..], &last].concat());
    assert_eq!(found, wanted);
    let found: Vec<_> = rows(&at.join("working_sets.parquet"))
        .iter()
        .map(cells)
        .collect();
    assert_eq!(
        found[0][1..],
        [
            "web", UUID, "300", "at_least", "512", "0", "null", "null", "1.25", "0.01", "3"
        ]
    );
    assert_eq!((found.len(), found[1][3].as_str()), (2, "null"));
}

#[test]
fn a_table_is_replaced_until_its_day_is_final() {
    let folder = TempDir::new().unwrap();
    let answers = example();
    let base = daemon(&answers);
    let table = folder.path().join("date=2024-10-04/host=h/curves.parquet");
    let at = |now_ms| run(&[(&base, demands("h", now_ms))], folder.path()).unwrap();
    assert_eq!(at(DAY + 1000).written, 2);
    let two = curves(&[curve(DAY + 7, 0.25), curve(DAY + 600_000, 0.3)]);
    answers
        .lock()
        .unwrap()
        .insert(format!("web/curves {DAY}"), two);
    // A file of an interrupted run is no obstacle.
    fs::write(table.with_extension("parquet.part"), "half").unwrap();
    assert_eq!(at(DAY + DAY_MS + SETTLED_MS - 1).written, 2);
    assert_eq!(rows(&table).len(), 4);
    assert_eq!(at(DAY + DAY_MS + SETTLED_MS).written, 2);
    answers.lock().unwrap().clear();
    let last = fs::read(&table).unwrap();
    let found = at(DAY + DAY_MS + SETTLED_MS);
    assert_eq!((found.written, found.kept), (0, 2));
    assert_eq!(fs::read(&table).unwrap(), last);
    let names = fs::read_dir(table.parent().unwrap()).unwrap();
    let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["curves.parquet", "working_sets.parquet"]);
    // A damaged one is written again.
    fs::write(&table, &last[..last.len() - 9]).unwrap();
    *answers.lock().unwrap() = example().lock().unwrap().clone();
    assert_eq!(at(DAY + DAY_MS + SETTLED_MS).written, 1);
    assert_eq!(rows(&table).len(), 2);
}

#[test]
fn rows_that_a_daemon_does_not_have_any_more_stay() {
    const MINUTE: u64 = 60_000;
    let folder = TempDir::new().unwrap();
    let samples = |times: &[u64]| {
        let samples = times
            .iter()
            .map(|&minute| sample(DAY + minute * MINUTE, Some(minute)));
        json!({"schema": 1, "vm": "", "samples": samples.collect::<Vec<_>>()})
    };
    let answers = Arc::new(Mutex::new(BTreeMap::from([
        (format!("web/history {DAY}"), samples(&[1, 4, 9, 11, 14])),
        (format!("db/history {DAY}"), samples(&[5, 10])),
        (
            format!("web/curves {DAY}"),
            curves(&[curve(DAY + MINUTE, 0.25)]),
        ),
    ])));
    let base = daemon(&answers);
    let at = |now_ms| run(&[(&base, demands("h", now_ms))], folder.path()).unwrap();
    assert_eq!(at(DAY + 15 * MINUTE).written, 2);
    let day = folder.path().join("date=2024-10-04/host=h");
    let found = || {
        let rows = rows(&day.join("working_sets.parquet"));
        let rows = rows.iter().map(cells);
        let mut rows: Vec<_> = rows.map(|row| format!("{} {}", row[1], row[3])).collect();
        rows.sort();
        rows
    };
    // Restarted without its history: of one VM it has the last minutes, of the others nothing.
    let later = BTreeMap::from([(format!("web/history {DAY}"), samples(&[12, 20]))]);
    *answers.lock().unwrap() = later;
    assert_eq!(at(DAY + DAY_MS + SETTLED_MS).written, 1);
    let all = [
        "db 10", "db 5", "web 1", "web 12", "web 20", "web 4", "web 9",
    ];
    assert_eq!(found(), all);
    assert_eq!(rows(&day.join("curves.parquet")).len(), 2);
    assert_eq!(at(DAY + DAY_MS + SETTLED_MS).kept, 1);
}

#[test]
fn a_file_with_rows_that_cannot_be_read_is_not_replaced() {
    let folder = TempDir::new().unwrap();
    let base = daemon(&example());
    let at = |now_ms| run(&[(&base, demands("h", now_ms))], folder.path()).unwrap();
    assert_eq!(at(DAY + 1000).written, 2);
    let table = folder.path().join("date=2024-10-04/host=h/curves.parquet");
    let mut bytes = fs::read(&table).unwrap();
    bytes[4..40].fill(0xff);
    fs::write(&table, &bytes).unwrap();
    let found = at(DAY + 2000);
    assert_eq!((found.written, found.missing.len()), (0, 1));
    assert!(
        found.missing[0].why.contains("it stays as it is"),
        "{found:?}"
    );
    assert_eq!(fs::read(&table).unwrap(), bytes);
}

#[test]
fn tables_of_an_earlier_version_lack_columns() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("working_sets.parquet");
    let columns = |is_left: &str| -> &'static Columns {
        let columns = WORKING_SETS.iter().copied();
        columns
            .filter(|own| !own.contains(is_left))
            .collect::<Vec<_>>()
            .leak()
    };
    let row = |columns: &Columns| -> Vec<Cell<'static>> {
        let cells = columns.iter().map(|declared| match declared {
            declared if declared.contains("STRING") => Cell::Text("web"),
            declared if declared.contains("DOUBLE") => Cell::Real(0.5),
            _ => Cell::Whole(7),
        });
        cells.collect()
    };
    for (is_left, is_read) in [("working_set_bound", true), ("lost", false)] {
        let columns = columns(is_left);
        let mut old = Table::new(columns, 0);
        old.push(&row(columns));
        old.write(&path).unwrap();
        let mut new = Table::new(WORKING_SETS, 0);
        assert_eq!(
            new.add_earlier(&path, SPAN_MS).is_ok(),
            is_read,
            "{is_left}"
        );
        assert_eq!(new.is_empty(), !is_read);
    }
}

#[test]
fn answers_that_cannot_be_are_named_and_other_hosts_are_archived() {
    let huge = json!({"schema": 1, "vm": "web", "samples": [sample(DAY, Some(u64::MAX))]});
    let unordered = curves(&[curve(DAY, 0.9)]);
    for (key, answer, why) in [
        (
            "web/curves",
            curves(&[curve(DAY + DAY_MS, 0.25)]),
            "another day",
        ),
        ("web/curves", curves(&[curve(DAY - 1, 0.25)]), "another day"),
        ("web/curves", unordered, "malformed answer"),
        ("web/history", huge, "above 2^63"),
        ("web/history", json!([]), "malformed answer"),
    ] {
        let folder = TempDir::new().unwrap();
        let answers = example();
        answers
            .lock()
            .unwrap()
            .insert(format!("{key} {DAY}"), answer);
        let (bad, good) = (daemon(&answers), daemon(&example()));
        let hosts = [
            (&*bad, demands("bad", DAY + DAY_MS)),
            (&*good, demands("good", DAY + DAY_MS)),
        ];
        let found = run(&hosts, folder.path()).unwrap();
        assert_eq!(found.missing.len(), 1, "{found:?}");
        assert_eq!(found.missing[0].target, bad);
        assert!(found.missing[0].why.contains(why), "{found:?}");
        let day = folder.path().join("date=2024-10-04");
        assert_eq!(rows(&day.join("host=good/curves.parquet")).len(), 2);
        let bad = day.join("host=bad").join(format!(
            "{}.parquet",
            if key.ends_with("curves") {
                "curves"
            } else {
                "working_sets"
            }
        ));
        assert!(!bad.exists());
    }
}

#[test]
fn hosts_of_one_name_or_of_a_wrong_time_are_not_archived() {
    let folder = TempDir::new().unwrap();
    let [first, second] = [(); 2].map(|()| daemon(&example()));
    let hosts = [&first, &second].map(|base| (&**base, demands("twin", DAY + 1000)));
    let found = run(&hosts, folder.path()).unwrap();
    assert_eq!((found.written, found.missing.len()), (0, 2));
    assert!(found.missing[0].why.contains("\"twin\""), "{found:?}");
    let ahead = CollectedHost {
        clock_ahead_ms: 1 << 50,
        ..collected(&(&first, demands("ahead", u64::MAX)))
    };
    let found = archived(vec![ahead], folder.path()).unwrap();
    assert!(found.missing[0].why.contains("ahead"), "{found:?}");
    let behind = CollectedHost {
        clock_ahead_ms: -1000,
        demands: HostDemands {
            since_unix_ms: DAY,
            ..demands("behind", DAY - 1000)
        },
        ..collected(&(&first, demands("behind", DAY)))
    };
    let found = archived(vec![behind], folder.path()).unwrap();
    assert_eq!(found.hosts, 0);
    assert!(found.missing[0].why.contains("1 s behind"), "{found:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn two_do_not_archive_to_one_directory() {
    let folder = TempDir::new().unwrap();
    let held = File::open(folder.path()).unwrap();
    held.lock().unwrap();
    let error = run(&[], folder.path()).unwrap_err();
    assert!(matches!(error, ArchiveError::Taken { .. }), "{error}");
    drop(held);
    assert_eq!(run(&[], folder.path()).unwrap(), Archived::default());
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = run(&[], &file.join("below")).unwrap_err().to_string();
    assert!(error.contains("file/below"), "{error}");
}

#[test]
fn hosts_are_asked_at_the_same_time() {
    // Each waits for the other.
    let (ready, other) = std::sync::mpsc::channel();
    let other = Mutex::new(other);
    let collector = Collector::new(&Access::default()).unwrap();
    let met = collector.each(&[1, 2], |&number| match number {
        1 => other
            .lock()
            .unwrap()
            .recv_timeout(Duration::from_secs(60))
            .is_ok(),
        _ => ready.send(()).is_ok(),
    });
    assert!(met.iter().all(|(_, met)| *met), "{met:?}");
}
