//! `plimsoll fleet` with fifty daemons on loopback: one was killed, one is cut off, one has a wrong clock, and some have a token that is not
//! ours.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use plimsoll_daemon::clock::{Clock, Time};
use plimsoll_daemon::config::{ServeSettings, TcpSettings};
use plimsoll_daemon::http::{self, Server};
use plimsoll_protocol::fleet::{FleetReport, PlacementJson};
use tempfile::TempDir;

#[allow(dead_code, reason = "shared with the daemon's tests")]
#[path = "../../daemon/tests/common/example.rs"]
mod example;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
const HOSTS: usize = 50;
const HOUR_MS: u64 = 3_600_000;

/// A file with `text`, for its owner alone.
fn secret(path: PathBuf, text: &str) -> PathBuf {
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// Serves an example host under this name.
fn serve(folder: &Path, name: &str, token: &str, ahead_ms: u64) -> Server {
    let (mut shared, _) = example::shared();
    let own = Clock::of_host();
    let clock = Clock::new(move || {
        let now = own.now();
        Time {
            unix_ms: now.unix_ms + ahead_ms,
            ..now
        }
    });
    Arc::get_mut(&mut shared).unwrap().clock = clock;
    let mut snapshot = (*shared.snapshot()).clone();
    name.clone_into(&mut snapshot.host.host);
    for vm in &mut snapshot.host.vms {
        // A UUID names one VM of all hosts.
        vm.uuid = None;
    }
    shared.publish(snapshot);
    let settings = ServeSettings {
        socket: folder.join(format!("{name}.sock")),
        group: None,
        read_only_socket: None,
        read_only_group: None,
        curve_buckets: false,
        tcp: Some(TcpSettings {
            listen: ([127, 0, 0, 1], 0).into(),
            token_file: Some(secret(folder.join(format!("{name}.token")), token)),
            tls: None,
            read_only: true,
        }),
    };
    http::serve(shared, &settings).unwrap()
}

fn plimsoll(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(args)
        .current_dir(folder)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_fleet_is_planned_with_the_hosts_that_answer_and_the_others_are_named() {
    let folder = TempDir::new().unwrap();
    let mut servers: Vec<Server> = (0..HOSTS - 2)
        .map(|number| {
            let ahead_ms = if number == 7 { HOUR_MS } else { 0 };
            let token = if number == 9 {
                "another-token-than-ours"
            } else {
                TOKEN
            };
            serve(folder.path(), &format!("host-{number:02}"), token, ahead_ms)
        })
        .collect();
    let cut_off = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut targets: Vec<String> = servers
        .iter()
        .map(|server| server.tcp().unwrap().to_string())
        .collect();
    let killed = serve(folder.path(), "killed", TOKEN, 0);
    targets.push(killed.tcp().unwrap().to_string());
    drop(killed);
    targets.push(cut_off.local_addr().unwrap().to_string());
    let list = serde_json::json!([{"targets": targets, "labels": {"job": "plimsoll"}}]);
    fs::write(folder.path().join("hosts.json"), list.to_string()).unwrap();
    secret(folder.path().join("token"), TOKEN);

    let found = plimsoll(
        folder.path(),
        &[
            "fleet",
            "collect",
            "--hosts",
            "hosts.json",
            "--token-file",
            "token",
            "--since",
            "1d",
            "--time-out",
            "3s",
        ],
    );
    assert_eq!(found.status.code(), Some(5), "{}", text(&found.stderr));
    assert!(text(&found.stderr).contains("3 hosts did not answer"));
    fs::write(folder.path().join("fleet.json"), &found.stdout).unwrap();
    // From here on nobody has to answer.
    servers.clear();

    let found = plimsoll(
        folder.path(),
        &["fleet", "report", "fleet.json", "-o", "json"],
    );
    assert_eq!(found.status.code(), Some(5));
    let report: FleetReport = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!(report.hosts.len(), HOSTS - 3);
    let mut whys: Vec<_> = report
        .missing
        .iter()
        .map(|missing| missing.why.as_str())
        .collect();
    whys.sort_unstable_by_key(|why| why.len());
    assert!(
        whys.iter().any(|why| why.contains("requires a token")),
        "{whys:?}"
    );
    assert!(whys.iter().any(|why| why.contains("refused")), "{whys:?}");
    assert!(whys.iter().any(|why| why.contains("timeout")), "{whys:?}");
    let [clock] = &report.clocks[..] else {
        panic!("{:?}", report.clocks);
    };
    assert_eq!(clock.host, "host-07");
    assert!(clock.ahead_ms.abs_diff(3_600_000) < 5000, "{clock:?}");
    // Each host has 4 GiB less a tenth. Its VMs need what the example's promises do; one without a curve its baseline.
    let needs: u64 = report.vms[..4].iter().map(|vm| vm.need_bytes).sum();
    for host in &report.hosts {
        assert_eq!((host.vms, host.survives_loss), (4, Some(true)));
        assert_eq!(host.capacity_bytes >> 20, 3686);
        assert_eq!(host.sum_of_peaks_bytes, needs);
    }

    let place = |more: &[&str]| {
        let args = [
            "fleet",
            "place",
            "fleet.json",
            "--goal",
            "fewest-hosts",
            "--no-cpu",
        ];
        plimsoll(folder.path(), &[&args[..], more].concat())
    };
    let found = place(&["--survive-loss", "-o", "json", "--bandwidth", "10G"]);
    assert_eq!(found.status.code(), Some(5), "{}", text(&found.stderr));
    let plan: PlacementJson = serde_json::from_slice(&found.stdout).unwrap();
    assert!(plan.fits && plan.survives_loss == Some(true));
    let used = plan.hosts_used;
    assert_eq!(used.before, HOSTS as u64 - 3);
    assert!(
        used.at_least <= used.after && used.after <= used.at_least + 2,
        "{used:?}"
    );
    assert!(
        plan.moves
            .iter()
            .all(|step| step.copy_s.is_some_and(|s| s > 0.0))
    );
    let table = text(&place(&[]).stdout);
    assert!(table.contains("its host is emptied"), "{table}");

    fs::write(
        folder.path().join("rules.toml"),
        "[[stay]]\nvms = [\"*\"]\n",
    )
    .unwrap();
    let table = text(&place(&["--rules", "rules.toml"]).stdout);
    assert!(table.starts_with("No VM has to move."), "{table}");
}

#[test]
fn what_is_asked_wrongly_is_refused_with_a_reason() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("list"), "[]").unwrap();
    fs::write(folder.path().join("no-list"), "{}").unwrap();
    for (args, code, why) in [
        (&["report"][..], 2, "which hosts?"),
        (&["report", "--hosts", "list"], 2, "there is no host"),
        (
            &["report", "--hosts", "no-list"],
            1,
            "is no list of targets",
        ),
        (
            &["report", "--hosts", "missing"],
            1,
            "cannot read 'missing'",
        ),
        (
            &["report", "--prometheus", "http://127.0.0.1:1"],
            1,
            "http://127.0.0.1:1/api/v1/targets",
        ),
        (&["report", "no-list"], 1, "is not of `fleet collect`"),
        (
            &["report", "list", "--hosts", "list"],
            2,
            "cannot be used with",
        ),
        (&["report", "list", "--reserve", "100%"], 2, "below 100 %"),
        (&["place", "list", "--cpu-ratio", "0"], 2, "above 0"),
        (
            &["place", "list", "--bandwidth", "10GiB"],
            2,
            "is not a bandwidth",
        ),
        (
            &["place", "list", "--rules", "list"],
            1,
            "the rules are malformed",
        ),
    ] {
        let found = plimsoll(folder.path(), &[&["fleet"], args].concat());
        let said = text(&found.stderr);
        assert_eq!(found.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(why), "{args:?}: {said}");
    }
}
