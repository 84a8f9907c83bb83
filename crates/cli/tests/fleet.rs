//! `plimsoll fleet` with fifty daemons on loopback: one was killed, one is cut off, one has a wrong clock, and one has a token that is not
//! ours. Three are scraped by a real Prometheus and a real VictoriaMetrics.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_daemon::clock::{Clock, Time};
use plimsoll_daemon::config::{ServeSettings, TcpSettings};
use plimsoll_daemon::http::{self, Server};
use plimsoll_fleet::collect::{Access, Collector};
use plimsoll_protocol::fleet::{FleetReport, PlacementJson};
use plimsoll_skip::{Lack, skip};
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
    serve_as(folder, name, name, token, ahead_ms)
}

/// The same under a name that may be none of a file.
fn serve_as(folder: &Path, file: &str, name: &str, token: &str, ahead_ms: u64) -> Server {
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
        socket: folder.join(format!("{file}.sock")),
        group: None,
        read_only_socket: None,
        read_only_group: None,
        curve_buckets: false,
        tcp: Some(TcpSettings {
            listen: ([127, 0, 0, 1], 0).into(),
            token_file: Some(secret(folder.join(format!("{file}.token")), token)),
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
    assert!(text(&found.stderr).contains("hosts without a usable answer: 3"));
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
fn an_archive_has_the_hosts_that_answer_and_is_completed_later() {
    let folder = TempDir::new().unwrap();
    secret(folder.path().join("token"), TOKEN);
    // Of the last two, which have one name, nothing can be archived.
    let servers: Vec<Server> = ["host-0", "../host 1", "twin", "twin"]
        .iter()
        .enumerate()
        .map(|(number, name)| {
            let place = folder.path().join(number.to_string());
            fs::create_dir(&place).unwrap();
            serve_as(&place, "daemon", name, TOKEN, 0)
        })
        .collect();
    let mut targets: Vec<String> = servers
        .iter()
        .map(|server| server.tcp().unwrap().to_string())
        .collect();
    targets.push(format!("127.0.0.1:{}", port()));
    let list = serde_json::json!([{ "targets": targets }]);
    fs::write(folder.path().join("hosts.json"), list.to_string()).unwrap();
    let archive = || {
        let args = "fleet archive kept/here --hosts hosts.json --token-file token --since 1d";
        let found = plimsoll(folder.path(), &args.split(' ').collect::<Vec<_>>());
        let errors = text(&found.stderr);
        assert_eq!(found.status.code(), Some(5), "{errors}");
        let complaint = "hosts not completely archived: 3; the first: ";
        assert!(errors.contains(complaint), "{errors}");
        text(&found.stdout)
    };
    let said = archive();
    assert!(said.starts_with("hosts archived: 2; "), "{said}");
    let mut found = Vec::new();
    for day in fs::read_dir(folder.path().join("kept/here")).unwrap() {
        for host in fs::read_dir(day.unwrap().path()).unwrap() {
            let host = host.unwrap();
            let tables = fs::read_dir(host.path()).unwrap();
            let mut names: Vec<_> = tables
                .map(|table| table.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            assert_eq!(names, ["curves.parquet", "working_sets.parquet"]);
            found.push(host.file_name().into_string().unwrap());
        }
    }
    // The example's past is an hour, which may lie across midnight.
    found.sort();
    found.dedup();
    assert_eq!(found, ["host=..%2Fhost%201", "host=host-0"]);
    assert!(archive().contains("files written: "));
}

/// What a script of contrib/movers makes of moves, and whether it succeeds; `None` without jq.
fn translated(script: &str, vms: &str, moves: &serde_json::Value) -> Option<(bool, String)> {
    let folder = TempDir::new().unwrap();
    let [plan, known] = ["plan.json", "vms.json"].map(|name| folder.path().join(name));
    fs::write(&plan, serde_json::json!({ "moves": moves }).to_string()).unwrap();
    fs::write(&known, vms).unwrap();
    let jq = Command::new("jq").arg("--version").output();
    if let Err(error) = jq {
        skip(Lack::Program, format_args!("jq: {error}"));
        return None;
    }
    let movers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/movers");
    let output = Command::new(movers.join(script))
        .env("PLIMSOLL_VMS", known)
        .stdin(fs::File::open(plan).unwrap())
        .output()
        .unwrap();
    Some((output.status.success(), text(&output.stdout)))
}

#[test]
fn a_plan_becomes_the_commands_of_each_platform() {
    const UUID: &str = "c7a5fdbd-edaf-9455-926a-d65c16db1809";
    let step = |vm: &str, uuid: Option<&str>, from: &str, to: &str| serde_json::json!({"vm": vm, "uuid": uuid, "from": from, "to": to});
    let hostile = "-x'; touch evil";
    // The first moves twice: other VMs wait for its room.
    let moves = serde_json::json!([
        step("web", Some(UUID), "h1", "h2"),
        step(hostile, None, "h2", "h3"),
        step("web", Some(UUID), "h2", "h1"),
    ]);
    let vms = serde_json::json!([
        {"name": "web", "node": "h1", "vmid": 101}, {"name": "web", "node": "h9", "vmid": 104},
        // Another one, where the first stays for a while.
        {"name": "web", "node": "h2", "vmid": 105},
        {"name": hostile, "node": "h2", "vmid": 102},
    ]);
    let vms = vms.to_string();
    let Some((true, virsh)) = translated("virsh", &vms, &moves) else {
        return;
    };
    // A shell takes each for a command with these words.
    let said = Command::new("sh")
        .args([
            "-euc",
            &format!("virsh() {{ printf '[%s]' \"$@\"; echo; }}\n{virsh}"),
        ])
        .output()
        .unwrap();
    let words = |from: &str, domain: &str, to: &str| {
        format!(
            "[-c][qemu+ssh://{from}/system][migrate][--live][--persistent][--undefinesource][--domain={domain}]\
             [--desturi=qemu+ssh://{to}/system]\n"
        )
    };
    let wanted = [
        words("h1", UUID, "h2"),
        words("h2", hostile, "h3"),
        words("h2", UUID, "h1"),
    ];
    assert_eq!(text(&said.stdout), wanted.concat(), "{virsh}");
    let (_, proxmox) = translated("proxmox", &vms, &moves).unwrap();
    let wanted = [("h1", 101, "h2"), ("h2", 102, "h3"), ("h2", 101, "h1")].map(|(from, id, to)| {
        format!("pvesh create /nodes/{from}/qemu/{id}/migrate --target {to} --online 1\n")
    });
    assert_eq!(proxmox, wanted.concat());
    let (_, kubevirt) = translated("kubevirt", &vms, &moves).unwrap();
    let last: serde_json::Value = serde_json::from_str(kubevirt.lines().nth(1).unwrap()).unwrap();
    let spec = serde_json::json!({"vmiName": hostile, "addedNodeSelector": {"kubernetes.io/hostname": "h3"}});
    assert_eq!((kubevirt.lines().count(), &last["spec"]), (3, &spec));
    // Whose target must give memory first.
    let mut full = step("web", Some(UUID), "h1", "h2");
    full["shrink_first_bytes"] = 1.into();
    for script in ["virsh", "proxmox", "kubevirt"] {
        let said = translated(script, &vms, &serde_json::json!([full]));
        assert_eq!(said, Some((false, String::new())), "{script}");
    }
    // KubeVirt's own names of domains.
    let moves = serde_json::json!([{"vm": "prod_db", "uuid": null, "from": "h1", "to": "h2"}]);
    let (_, kubevirt) = translated("kubevirt", &vms, &moves).unwrap();
    let one: serde_json::Value = serde_json::from_str(&kubevirt).unwrap();
    let names = (&one["metadata"]["namespace"], &one["spec"]["vmiName"]);
    assert_eq!(names, (&"prod".into(), &"db".into()));

    // A URI of libvirt may name a program, and a VM that is not there has no number.
    let evil = "h1/system?command=/tmp/evil";
    for (script, vm, from) in [
        ("virsh", "web", evil),
        ("virsh", "web", "-oProxyCommand=x"),
        ("virsh", "web", "h1\n"),
        ("virsh", "a\nb", "h1"),
        ("proxmox", "web", evil),
        ("proxmox", "web", "h7"),
        ("proxmox", "nobody", "h1"),
    ] {
        let moves = serde_json::json!([step(vm, None, from, "h2")]);
        let (succeeds, said) = translated(script, &vms, &moves).unwrap();
        assert!(
            !succeeds && said.is_empty(),
            "{script} {vm:?} {from:?}: {said}"
        );
    }
}

/// A database of metrics that scrapes our daemons, ended when this goes.
struct Scraper {
    process: Child,
    url: String,
}

impl Drop for Scraper {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Time in which samples are there.
const SCRAPED_MAX: Duration = Duration::from_secs(60);

/// A port that nobody has now.
fn port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Starts `program`, which is to scrape `targets`; `None` if it is not installed. `arguments` are those besides its
/// configuration, in which `PORT` stands for its port.
fn scraper(
    folder: &Path,
    program: &str,
    targets: &[String],
    arguments: &[&str],
) -> Option<Scraper> {
    let port = port();
    let rules = match program {
        "prometheus" => {
            let rules =
                Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/prometheus/alerts.yml");
            format!("rule_files: [{rules:?}]\n")
        }
        _ => String::new(),
    };
    let interval = if rules.is_empty() {
        ""
    } else {
        "  evaluation_interval: 1s\n"
    };
    let config = format!(
        "global:\n  scrape_interval: 1s\n{interval}{rules}scrape_configs:\n  - job_name: plimsoll\n    \
         authorization: {{ credentials_file: {:?} }}\n    static_configs: [{{ targets: {targets:?} }}]\n",
        folder.join("token")
    );
    fs::write(folder.join(format!("{program}.yml")), config).unwrap();
    let arguments = arguments
        .iter()
        .map(|argument| argument.replace("PORT", &port.to_string()));
    let process = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    Some(Scraper {
        process,
        url: format!("http://127.0.0.1:{port}"),
    })
}

/// Instances for which a query has a sample, once there are three.
fn instances(collector: &Collector, scraper: &Scraper, query: &str) -> Vec<(String, f64)> {
    let address = format!("{}/api/v1/query?query={query}", scraper.url);
    let deadline = Instant::now() + SCRAPED_MAX;
    loop {
        let answer = collector.text(&address).unwrap_or_default();
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap_or_default();
        let results = answer["data"]["result"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        if results.len() == 3 {
            let value = |result: &serde_json::Value| {
                let value = result["value"][1].as_str().unwrap().parse().unwrap();
                (
                    result["metric"]["instance"].as_str().unwrap().to_owned(),
                    value,
                )
            };
            return results.iter().map(value).collect();
        }
        assert!(Instant::now() < deadline, "{address}: {answer}");
        thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn hosts_are_found_by_prometheus_and_victoria_metrics_and_their_demand_is_recorded() {
    let folder = TempDir::new().unwrap();
    secret(folder.path().join("token"), TOKEN);
    let servers: Vec<Server> = (0..3)
        .map(|number| serve(folder.path(), &format!("host-{number}"), TOKEN, 0))
        .collect();
    let targets: Vec<String> = servers
        .iter()
        .map(|server| server.tcp().unwrap().to_string())
        .collect();
    let access = Access {
        time_out: Duration::from_secs(5),
        ..Access::default()
    };
    let collector = Collector::new(&access).unwrap();
    let expression = "sum%20by(instance)(plimsoll_vm_demand_bytes%7Bpromise%3D%225%25%22%7D)/on(instance)plimsoll_host_total_bytes";
    for (program, package, query, arguments) in [
        (
            "prometheus",
            "prometheus",
            "plimsoll:node_demand:ratio",
            &[
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                "--web.listen-address=127.0.0.1:PORT",
            ][..],
        ),
        (
            "victoria-metrics",
            "victoria-metrics",
            expression,
            &[
                "-promscrape.config=victoria-metrics.yml",
                "-storageDataPath=vm-data",
                "-httpListenAddr=127.0.0.1:PORT",
            ],
        ),
    ] {
        let Some(scraper) = scraper(folder.path(), program, &targets, arguments) else {
            skip(
                Lack::Program,
                format!("{program} is not installed (Debian: {package})"),
            );
            continue;
        };
        for (instance, ratio) in instances(&collector, &scraper, query) {
            assert!(targets.contains(&instance), "{instance}");
            // What three of the example's VMs need of 4 GiB; the fourth has no curve.
            assert!((0.1..0.45).contains(&ratio), "{ratio}");
        }
        let found = plimsoll(
            folder.path(),
            &[
                "fleet",
                "report",
                "--prometheus",
                &scraper.url,
                "--token-file",
                "token",
                "-o",
                "json",
            ],
        );
        assert!(found.status.success(), "{program}: {}", text(&found.stderr));
        let report: FleetReport = serde_json::from_slice(&found.stdout).unwrap();
        let names: Vec<_> = report.hosts.iter().map(|host| host.host.as_str()).collect();
        assert_eq!(names, ["host-0", "host-1", "host-2"], "{program}");
    }
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
        (
            &["report", "list", "--every", "2h"],
            2,
            "cannot be used with",
        ),
        (
            &["place", "list", "--since", "1d"],
            2,
            "cannot be used with",
        ),
        (
            &["collect", "--hosts", "list", "--every", "59s"],
            2,
            "intervals of 59 s: expected 60 s or more",
        ),
        (
            &["report", "--hosts", "list", "--every", "1m"],
            2,
            "fewer than 10000 in the ",
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
            "the rules are malformed in line 1: ",
        ),
    ] {
        let found = plimsoll(folder.path(), &[&["fleet"], args].concat());
        let said = text(&found.stderr);
        assert_eq!(found.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(why), "{args:?}: {said}");
    }
}
