//! Metrics, and the dashboards and alerts that ask for them.

use plimsoll_skip::{Lack, skip};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use std::sync::Arc;

use plimsoll_protocol::decision::State;

use super::{exchange, get, settings, socket};
use crate::http::metrics::{Doors, VM_GAUGES, text};
use crate::http::{example, serve};

/// The example's metrics with the curves, and with a VM of a hostile name.
fn metrics() -> String {
    let mut snapshot = example::snapshot(1_800_000_000_000);
    snapshot.host.history_bytes = Some(12345);
    let mut hostile = snapshot.host.vms[3].clone();
    hostile.vm = "a\"} 1\nplimsoll_paused 7\\".to_owned();
    snapshot.host.vms.push(hostile);
    let doors = Doors {
        failed_logins: 7,
        certificate_end_unix_s: Some(1_900_000_000),
    };
    text(&snapshot, [0, 2, 1, 0, 0, 0], doors, true)
}

#[test]
fn metrics_tell_what_the_host_is() {
    let text = metrics();
    for line in [
        "plimsoll_vm_size_bytes{vm=\"web\",uuid=\"c7a5fdbd-edaf-9455-926a-d65c16db1809\"} 536870912",
        "plimsoll_vm_direct_bytes{vm=\"web\",uuid=\"c7a5fdbd-edaf-9455-926a-d65c16db1809\"} 469762048",
        "plimsoll_host_memory_bytes{holder=\"spare\"} 268435456",
        "plimsoll_history_bytes 12345",
        "plimsoll_decisions_total{state=\"kept\"} 2",
        "plimsoll_vm_status{vm=\"fresh\",status=\"unknown\"} 1",
        "plimsoll_trace_overhead_ratio{vm=\"scan\"} 0.0098",
        "plimsoll_trace_lost_references_total{vm=\"scan\"} 3",
        "plimsoll_paused 0",
        "plimsoll_failed_logins_total 7",
        "plimsoll_certificate_end_timestamp_seconds 1900000000",
    ] {
        assert!(text.lines().any(|have| have == line), "{line}\n{text}");
    }
    assert!(
        text.contains("{vm=\"a\\\"} 1\\nplimsoll_paused 7\\\\\",uuid="),
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
fn a_vm_has_fewer_than_a_hundred_series_unless_its_curve_is_wanted() {
    let snapshot = example::snapshot(1_800_000_000_000);
    let series = |curve_buckets| {
        let text = text(&snapshot, [0; 6], Doors::default(), curve_buckets);
        let of_web = |line: &&str| line.contains("vm=\"web\"");
        text.lines().filter(of_web).count()
    };
    assert!((40..100).contains(&series(false)), "{}", series(false));
    assert!(series(true) >= series(false) + 10);
    let text = text(&snapshot, [0; 6], Doors::default(), false);
    assert!(!text.contains("reuse_distance"), "{text}");
}

#[test]
fn a_control_group_has_fewer_than_twenty_series_with_its_kind_and_an_escaped_name() {
    let text = metrics();
    let of = |group: &str| {
        let labels = format!("{{group=\"{group}\",kind=");
        let lines = text.lines().filter(|line| line.contains(&labels));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let nginx = of("nginx.service");
    assert!((10..20).contains(&nginx.len()), "{nginx:?}");
    let info = "plimsoll_group_info{group=\"nginx.service\",kind=\"systemd\",path=\"/system.slice/nginx.service\",version=\"2\"} 1";
    let working_set = "plimsoll_group_working_set_bytes{group=\"nginx.service\",kind=\"systemd\",bound=\"estimate\"} 188743680";
    for line in [
        info,
        working_set,
        "plimsoll_groups 2",
        "plimsoll_groups_left_out 12",
    ] {
        assert!(
            text.lines().any(|written| written == line),
            "{line}\n{text}"
        );
    }
    // A backslash is written as two.
    assert!(!of(r"odd\\u{1b}[2J<b>\\n").is_empty(), "{text}");
    assert!(!text.contains('\u{1b}'));
}

#[test]
fn a_stricter_promise_needs_more_memory() {
    let text = metrics();
    let demand = |promise: &str| {
        let begin = format!("plimsoll_vm_demand_bytes{{vm=\"search\",promise=\"{promise}\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&begin));
        value.unwrap().parse::<u64>().unwrap()
    };
    let (strict, usual, loose) = (demand("1%"), demand("5%"), demand("25%"));
    assert!(loose <= usual && usual <= strict, "{text}");
    assert!(loose < strict, "{loose} {strict}");
    assert!(!text.contains("demand_bytes{vm=\"fresh\""), "{text}");
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
    // The VMs of the example lack some.
    let gauges = VM_GAUGES
        .iter()
        .map(|(name, ..)| format!("plimsoll_{name} "));
    let gauges: String = gauges.collect();
    let told = &names(&samples) | &names(&gauges);
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
    let dashboard = fs::read_to_string(packaging("grafana/plimsoll.json")).unwrap();
    let limits = ["max_loss_ratio", "max_misses_per_second", "max_stall_ratio"];
    for limit in limits.map(|limit| format!("plimsoll_vm_{limit}")) {
        assert!(told.contains(&*limit), "{limit}");
        assert!(names(&dashboard).contains(&*limit), "no panel has {limit}");
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
