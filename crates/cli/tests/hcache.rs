//! `plimsoll hcache` as its users meet it: a server on a socket, and the verbs that speak to it.

mod program;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_hcache::{Handle, PoolId, PoolOptions, Sharing};
use plimsoll_ring::{ConnectOptions, Connection};
use plimsoll_serve::hcache::Report;
use plimsoll_serve::hcache::report::PoolAccess;
use tempfile::TempDir;

use program::{KilledOnDrop, ran};

fn plimsoll(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.arg("hcache").args(line.split(' '));
    command
}

/// A server on a socket of its own.
struct Server {
    folder: TempDir,
    child: KilledOnDrop,
    ready: String,
}

impl Server {
    fn new(options: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let child = plimsoll(&format!("serve {options} --socket"))
            .arg(folder.path().join("socket"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut child = KilledOnDrop(child);
        let mut ready = String::new();
        let mut lines = BufReader::new(child.0.stdout.take().unwrap());
        lines.read_line(&mut ready).unwrap();
        assert!(ready.starts_with("hcache: serving at "), "{ready}");
        Self {
            folder,
            child,
            ready,
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn verb(&self, line: &str) -> Command {
        let mut command = plimsoll(line);
        command.arg("--socket").arg(self.socket());
        command
    }

    /// Runs what must succeed in silence, and returns what it wrote.
    fn text(&self, line: &str) -> String {
        let (code, text, complaint) = ran(&mut self.verb(line));
        assert_eq!((code, &*complaint), (Some(0), ""), "{line}");
        text
    }

    fn report(&self, line: &str) -> Report {
        serde_json::from_str(&self.text(line)).unwrap()
    }

    fn client(&self, name: &str) -> (Connection, PoolId) {
        let options = ConnectOptions::new(name);
        let mut connection = Connection::connect(self.socket(), &options).unwrap();
        let pool = connection.create_pool(PoolOptions::private()).unwrap();
        (connection, pool)
    }
}

fn page(pool: PoolId, index: u32) -> Handle {
    Handle {
        pool,
        object: 1,
        index,
    }
}

/// Gets each page of a loop and puts it back, so many rounds.
fn go_round(connection: &mut Connection, pool: PoolId, pages: u32, rounds: u32) {
    let mut content = [7; 4096];
    for _ in 0..rounds {
        for index in 0..pages {
            connection.get(page(pool, index), &mut content).unwrap();
            connection.put(page(pool, index), &content).unwrap();
        }
    }
}

#[test]
fn what_cannot_be_served_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    for (line, code, reason) in [
        ("--capacity 0", 2, "--capacity 0: the minimum is 1MiB"),
        ("--capacity 1048575", 2, "the minimum is 1MiB"),
        (
            "--capacity 900T",
            2,
            "--capacity 900TiB is more than this machine's memory, ",
        ),
        (
            "--capacity 2M --max-capacity 900T",
            2,
            "--max-capacity 900TiB is more than",
        ),
        (
            "--capacity 2M --max-capacity 1M",
            2,
            "--max-capacity 1MiB is less than --capacity 2MiB",
        ),
        ("--capacity 2X", 2, "'2X' is not a size"),
        ("--capacity 2M --client-max lots", 2, "'lots' is not a size"),
        (
            "--capacity 2M --client-max 1",
            2,
            "--client-max 1: the minimum is 24KiB, and 544KiB for clients with a ring of the usual size",
        ),
        ("--capacity 2M --mode 8", 2, "'8' is not a mode"),
        ("--capacity 2M --mode 1000", 2, "'1000' is not a mode"),
        ("--capacity 2M --workers 0", 2, "0 is not in 1..=256"),
        ("--capacity 2M --share some", 2, "invalid value 'some'"),
        ("--capacity 2M --eviction clock", 2, "s3-fifo, sieve, lru"),
        (
            "--capacity 2M --ghost-rate 1/3",
            2,
            "it must be 1 over a power of two",
        ),
        (
            "--capacity 2M --ghost-rate 1/2 --no-ghost",
            2,
            "cannot be used with",
        ),
        (
            "--capacity 2M --allow-uid nobody",
            2,
            "invalid value 'nobody'",
        ),
    ] {
        let mut serve = plimsoll(&format!("serve {line} --socket"));
        let (ended, out, complaint) = ran(serve.arg(&socket));
        assert_eq!((ended, &*out), (Some(code), ""), "{line}: {complaint}");
        assert!(complaint.starts_with("plimsoll: error: "), "{complaint}");
        assert!(complaint.contains(reason), "{line}: {complaint}");
    }
    // Users who took all descriptors would keep others out.
    let limited = "ulimit -n 99; exec \"$0\" hcache serve --capacity 2M --workers 1 --max-clients \"$1\" --socket \"$2\"";
    let mut serve = Command::new("sh");
    serve.args(["-c", limited, env!("CARGO_BIN_EXE_plimsoll"), "9"]);
    let (code, _, complaint) = ran(serve.arg(&socket));
    let reason = "9 clients need 116 open files, and the limit of this process is 99";
    assert!(complaint.contains(reason), "{complaint}");
    assert_eq!(code, Some(2));
    assert!(!socket.exists());
    // Where no socket can be.
    std::fs::write(&socket, "text").unwrap();
    let mut serve = plimsoll("serve --capacity 2M --socket");
    let (code, _, complaint) = ran(serve.arg(&socket));
    assert_eq!(code, Some(1), "{complaint}");
    assert!(complaint.contains("no socket"), "{complaint}");
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "text");
}

#[test]
fn verbs_without_a_server_end_with_3() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    for line in ["stat", "stat --watch", "resize 2M", "bench --seconds 1"] {
        let (code, out, complaint) = ran(plimsoll(line).arg("--socket").arg(&socket));
        assert_eq!((code, &*out), (Some(3), ""), "{line}: {complaint}");
        let begin = "plimsoll: error: no hcache server answers at ";
        assert!(complaint.starts_with(begin), "{line}: {complaint}");
    }
    let mut both = plimsoll("stat -o metrics --curves");
    assert_eq!(ran(&mut both).0, Some(2));
}

#[test]
fn a_server_says_when_it_is_ready_and_leaves_nothing_at_its_end() {
    for signal in ["-TERM", "-INT"] {
        let mut served = Server::new("--capacity 4M --max-capacity 8M --workers 1 --compress");
        let socket = served.socket();
        let ready = format!(
            "hcache: serving at {}, capacity 4 MiB (up to 8 MiB), 1 worker, LZ4 compression, eviction by s3-fifo\n",
            socket.display()
        );
        assert_eq!(served.ready, ready);
        // The place is taken.
        let mut second = plimsoll("serve --capacity 2M --socket");
        let (code, _, complaint) = ran(second.arg(&socket));
        assert_eq!(code, Some(1));
        assert!(complaint.contains("a server listens at "), "{complaint}");
        let (mut connection, pool) = served.client("web");
        assert_eq!(served.child.end_by(signal), Some(0));
        assert!(!socket.exists());
        assert!(connection.put(page(pool, 0), &[0; 4096]).is_err());
    }
}

#[test]
fn a_killed_servers_socket_is_taken_over() {
    let mut served = Server::new("--capacity 2M");
    assert_eq!(served.child.end_by("-KILL"), None);
    assert_eq!(ran(&mut served.verb("stat")).0, Some(3));
    let mut again = plimsoll("serve --capacity 2M --socket")
        .arg(served.socket())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = String::new();
    let mut lines = BufReader::new(again.stdout.take().unwrap());
    lines.read_line(&mut ready).unwrap();
    assert_eq!(served.report("stat -o json").clients.len(), 0);
    again.kill().unwrap();
    again.wait().unwrap();
}

#[test]
fn statistics_are_the_same_in_every_form() {
    let served = Server::new("--capacity 4M --share client --client-max 3M --workers 2");
    let (mut web, pool) = served.client("we\"b");
    let mut content = [5; 4096];
    for index in 0..10 {
        content[0] = u8::try_from(index).unwrap();
        web.put(page(pool, index), &content).unwrap();
    }
    assert!(web.get(page(pool, 4), &mut content).unwrap() && content[0] == 4);
    assert!(!web.get(page(pool, 4), &mut content).unwrap());
    assert!(web.flush(page(pool, 5)).unwrap());

    let report = served.report("stat -o json");
    assert_eq!((report.schema, report.clients.len()), (1, 1));
    let (server, client) = (&report.store, &report.clients[0]);
    let (store, of_client) = (&server.stats, &client.stats);
    assert_eq!((store.capacity_bytes, store.pages), (4 << 20, 8));
    assert!(store.used_bytes <= store.capacity_bytes && store.metadata_bytes <= store.used_bytes);
    assert_eq!((server.workers, server.sharing), (2, Sharing::WithinClient));
    assert_eq!((&*of_client.name, of_client.pages), ("we\"b", 8));
    assert_eq!(of_client.ceiling_bytes, Some(3 << 20));
    let counters = of_client.counters;
    assert_eq!((counters.puts, counters.gets, counters.hits), (10, 2, 1));
    assert_eq!((counters.flushes, counters.flushed_pages), (1, 1));
    assert_eq!(store.counters, counters);
    assert_eq!(
        (client.pools[0].kind, client.pools[0].pages),
        (PoolAccess::Private, 8)
    );
    assert_eq!(client.curve, None);

    let table = served.text("stat");
    let line = table.lines().find(|line| line.contains("we\"b")).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    assert_eq!(
        words[words.len() - 6..],
        ["8", "50.0", "10", "2", "-", "-"],
        "{table}"
    );
    assert!(
        table.lines().all(|line| line.chars().count() <= 100),
        "{table}"
    );

    let metrics = served.text("stat -o metrics");
    for line in metrics.lines() {
        assert!(is_openmetrics(line), "{line}");
    }
    let sample = "plimsoll_hcache_client_puts_total{client=\"1\",name=\"we\\\"b\"} 10\n";
    assert!(metrics.contains(sample), "{metrics}");
    assert!(metrics.contains("\nplimsoll_hcache_gets_total 2\n"));
    assert!(metrics.contains("\nplimsoll_hcache_server_clients_joined_total 1\n"));
    assert!(metrics.ends_with("\n# EOF\n"));

    drop(web);
    let end = Instant::now() + Duration::from_secs(20);
    while !served.report("stat -o json").clients.is_empty() {
        assert!(Instant::now() < end, "a client that left is still there");
        thread::sleep(Duration::from_millis(10));
    }
    let report = served.report("stat -o json");
    assert_eq!(
        (report.store.stats.pages, report.store.stats.counters.puts),
        (0, 10)
    );
}

/// Whether a line is one of an exposition.
fn is_openmetrics(line: &str) -> bool {
    let is_name = |text: &str| {
        text.starts_with("plimsoll_hcache_")
            && text.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    };
    if let Some(comment) = line.strip_prefix("# ") {
        let words: Vec<_> = comment.splitn(3, ' ').collect();
        return match words[..] {
            ["TYPE", name, kind] => is_name(name) && ["gauge", "counter"].contains(&kind),
            ["UNIT", name, unit] => is_name(name) && name.ends_with(unit),
            ["HELP", name, text] => is_name(name) && text.ends_with('.'),
            _ => comment == "EOF",
        };
    }
    let Some((series, value)) = line.rsplit_once(' ') else {
        return false;
    };
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let Some(mut labels) = labels.strip_suffix('}') else {
        return false;
    };
    while !labels.is_empty() {
        let Some((label, rest)) = labels.split_once("=\"") else {
            return false;
        };
        let mut escaped = false;
        let end = rest.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some(end) = end else { return false };
        if !label.chars().all(|c| c.is_ascii_lowercase() || c == '_') {
            return false;
        }
        labels = rest[end + 1..].trim_start_matches(',');
    }
    is_name(name) && value.parse::<f64>().is_ok_and(|value| value >= 0.0)
}

#[test]
fn a_smaller_capacity_holds_when_resize_returns() {
    let served = Server::new("--capacity 8M --max-capacity 16M --no-ghost");
    let (mut web, pool) = served.client("web");
    let mut content = [0; 4096];
    for index in 0..1500_u32 {
        content[..4].copy_from_slice(&index.to_le_bytes());
        web.put(page(pool, index), &content).unwrap();
    }
    let before = served.report("stat -o json").store.stats;
    assert!((1000..=1500).contains(&before.pages), "{before:?}");
    assert_eq!(served.text("resize 4M"), "capacity 4 MiB\n");
    let after = served.report("stat -o json").store.stats;
    assert_eq!(after.capacity_bytes, 4 << 20);
    assert!(after.used_bytes <= 4 << 20, "{after:?}");
    assert!((500..=1024).contains(&after.pages), "{after:?}");
    assert_eq!(served.text("resize 16M"), "capacity 16 MiB\n");
    for (size, reason) in [("17M", "too large"), ("4K", "too small")] {
        let (code, out, complaint) = ran(&mut served.verb(&format!("resize {size}")));
        assert_eq!((code, &*out), (Some(1), ""));
        assert!(complaint.contains(reason), "{complaint}");
    }
    assert_eq!(ran(&mut served.verb("resize much")).0, Some(2));
    assert_eq!(
        served.report("stat -o json").store.stats.capacity_bytes,
        16 << 20
    );
}

#[test]
fn the_curve_of_a_policy_with_miniatures_falls_about_a_loops_size() {
    for policy in ["s3-fifo", "sieve"] {
        let served = Server::new(&format!("--capacity 8M --eviction {policy}"));
        let (mut connection, pool) = served.client("loop");
        go_round(&mut connection, pool, 1600, 10);
        let report = served.report("stat --curves -o json");
        assert_eq!(report.store.eviction, policy);
        let ghosts = report.ghosts.unwrap();
        assert_eq!((ghosts.one_in, ghosts.unseen_events), (8, 0));
        let client = &report.clients[0];
        assert_eq!(client.expected.as_ref().unwrap().len(), 3);
        let curve = client.curve.as_ref().unwrap();
        let miss_ratio = |pages: u64| {
            let at = curve
                .points
                .partition_point(|point| point.size_pages <= pages);
            curve.points[at - 1].miss_ratio
        };
        // One in eight of 1600 pages is sampled: about 200.
        assert!(miss_ratio(2048) < 0.11, "{policy}: {}", miss_ratio(2048));
        assert!(miss_ratio(512) > 0.4, "{policy}: {}", miss_ratio(512));
    }
}

#[test]
fn a_loops_curve_falls_at_its_size() {
    // A page in an exclusive store is gone once it is got, so the loop needs room for all its pages.
    let served = Server::new("--capacity 4M --ghost-rate 1 --eviction lru");
    let (mut connection, pool) = served.client("loop");
    go_round(&mut connection, pool, 200, 10);
    let report = served.report("stat --curves -o json");
    let client = &report.clients[0];
    let curve = client.curve.as_ref().unwrap();
    assert_eq!(
        (&*curve.vm, curve.page_bytes, curve.references),
        ("loop", 4096, 2000)
    );
    assert_eq!(curve.baseline_pages, Some(200));
    let miss_ratio = |pages: u64| {
        let at = curve
            .points
            .partition_point(|point| point.size_pages <= pages);
        curve.points[at - 1].miss_ratio
    };
    let segment = report.ghosts.unwrap().segment_pages;
    assert!(segment <= 4, "{segment}");
    let first_whole = 200_u64.next_multiple_of(segment);
    assert_eq!((miss_ratio(199), miss_ratio(first_whole)), (1.0, 0.1));
    let hit_ratios: Vec<_> = client
        .expected
        .iter()
        .flatten()
        .map(|e| e.hit_ratio)
        .collect();
    assert_eq!(hit_ratios, [0.0, 0.9, 0.9]);
    assert_eq!(report.ghosts.unwrap().unseen_events, 0);

    let table = served.text("stat --curves");
    assert!(
        table.contains("   90.0  2000  2000  -90.0   +0.0\n"),
        "{table}"
    );
    assert!(
        table.contains("client 1 loop: hit ratio by share\n"),
        "{table}"
    );
    assert!(
        table.contains("     512 KiB    0.0 %\n     800 KiB   90.0 %  now\n"),
        "{table}"
    );

    let served = Server::new("--capacity 4M --no-ghost");
    let (_connection, _) = served.client("loop");
    let table = served.text("stat --curves");
    assert!(
        table.contains("no curve (the server runs with --no-ghost)"),
        "{table}"
    );
    assert_eq!(served.report("stat --curves -o json").ghosts, None);
}

#[test]
fn watch_shows_rates_until_it_is_told_to_stop() {
    let mut served = Server::new("--capacity 4M");
    let (mut connection, pool) = served.client("loop");
    let mut watch = served.verb("stat --watch 1 -o table");
    let mut watch = watch
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    let mut shown = 0;
    while shown < 2 {
        go_round(&mut connection, pool, 10, 10);
        let line = next();
        shown += usize::from(line.contains("puts/s  gets/s"));
    }
    // The server goes first: that is told as it is told without --watch.
    served.child.end_by("-TERM");
    let output = watch.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn the_age_of_a_store_is_that_of_its_report() {
    let served = Server::new("--capacity 4M");
    let age = || served.report("stat -o json").store.stats.age_seconds;
    let ages: Vec<_> = (0..4).map(|_| age()).collect();
    assert!(
        ages.is_sorted_by(|before, after| before < after),
        "{ages:?}"
    );
}

#[test]
fn load_checks_the_pages_that_come_back() {
    let served = Server::new("--capacity 4M --compress");
    let json = served.text("bench --seconds 1 --pages 2000 --batch 16 -o json");
    let load: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&load["schema"], &load["wrong_pages"]),
        (&1.into(), &0.into())
    );
    let (gets, hits) = (
        load["gets"].as_u64().unwrap(),
        load["hits"].as_u64().unwrap(),
    );
    assert!(0 < hits && hits < gets, "{json}");
    let times = ["p50", "p99", "p999"].map(|p| load["get_seconds"][p].as_f64().unwrap());
    assert!(
        0.0 < times[0] && times[0] <= times[1] && times[1] <= times[2],
        "{json}"
    );
    let counters = served.report("stat -o json").store.stats.counters;
    assert_eq!((counters.gets, counters.hits), (gets, hits));

    let table = served.text("bench --seconds 1 --pages 10 --batch 1");
    assert!(
        table.starts_with("load    10 pages (40 KiB), 1 in flight, 50 % puts, "),
        "{table}"
    );
    assert!(table.ends_with(" pages, 0 wrong\n"), "{table}");

    let gets = served.text("bench --seconds 1 --pages 10 --batch 1 --write-ratio 0");
    assert!(gets.contains(", 0 % puts, "), "{gets}");
    assert!(gets.contains("\nputs            0 /s, - refused"), "{gets}");
    let (code, _, complaint) = ran(&mut served.verb("bench --write-ratio 150%"));
    assert_eq!(code, Some(2), "{complaint}");
    assert!(
        complaint.contains("--write-ratio 150%: expected 0 to 1"),
        "{complaint}"
    );
}
