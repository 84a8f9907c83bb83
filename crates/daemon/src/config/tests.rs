use std::fs;

use plimsoll_flow::TraceMethod;
use plimsoll_output::exit::with_causes;
use plimsoll_policy::POLICIES;
use plimsoll_policy::registry::{PRESETS, SEARCHES};
use tempfile::TempDir;

use super::file::File;
use super::*;

/// Every key, as in the shipped file.
const EXAMPLE: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../packaging/plimsoll.toml"
));

fn read(text: &str) -> Result<Config, ConfigError> {
    keys::read(&[File::new(Path::new("p.toml"), text.to_owned())])
}

fn refusal(text: &str) -> String {
    read(text).unwrap_err().to_string()
}

/// The shipped example with its defaults switched on, but for its rules.
fn example_in_force() -> String {
    let lines = EXAMPLE.lines().take_while(|line| !line.contains("[[vm]]"));
    let lines = lines.map(|line| match line.strip_prefix('#') {
        Some(rest) if rest.starts_with(|letter: char| letter.is_ascii_lowercase()) => rest,
        _ => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_shipped_example_holds_the_defaults() {
    assert_eq!(read(EXAMPLE).unwrap(), Config::default());
    let in_force = example_in_force();
    assert_eq!(read(&in_force).unwrap(), Config::default());
    let keys = in_force.lines().filter(|line| line.contains(" = ")).count();
    assert_eq!(keys, 49, "{in_force}");
}

#[test]
fn every_key_is_taken() {
    let config = read(
        r#"
        mode = "act"
        turn_interval = "10s"
        total = "64G"
        [policy]
        name = "isolated"
        search = "annealing"
        seed = 7
        unit = "8M"
        step = "256M"
        gain_min = 0.05
        cooldown = "1m"
        miss_cost = "250us"
        [check]
        after = "90s"
        tolerance = "1/20"
        [balloon]
        patience = "1m"
        [guard]
        headroom = "512M"
        on_exit = "keep"
        [curves]
        from = "caches"
        direct = "30%"
        trace_for = "20m"
        keep = false
        every = "12h"
        [trace]
        enabled = false
        backend = "scan"
        program = "/opt/plimsoll"
        period = "500ms"
        budget = "2%"
        intermittent = true
        window = "1m"
        [history]
        file = "none"
        size_max = 33554432
        keep = "24h"
        [serve]
        socket = "/run/a"
        group = "plimsoll"
        read_only_socket = "none"
        read_only_group = "plimsoll-ro"
        curve_buckets = true
        [tcp]
        listen = "[::1]:7373"
        token_file = "/etc/token"
        certificate = "/etc/chain.pem"
        key = "/etc/key.pem"
        client_ca = "/etc/ca.pem"
        plain_text = true
        read_only = true
        [libvirt]
        uri = "qemu:///system"
        [store]
        socket = "/run/hcache"
        [hosts]
        users = ["root", "4711"]
        [groups]
        watch = ["system.slice/*.service", "**/docker-*.scope"]
        max = 40
        [[vm]]
        name = "web-*"
        uuid = "c7a5fdbd-edaf-9455-926a-d65c16db1809"
        managed = false
        min = "1G"
        max = "2G"
        baseline = "1.5G"
        swap = "1G"
        shares = 3
        max_loss = "25%"
        self_balloon = true
        disk_admin = "/run/web"
        allow_namespaced = true
        "#,
    )
    .unwrap();
    let expected = Config {
        mode: Mode::Act,
        turn_interval: Duration::from_secs(10),
        total_bytes: Some(64 << 30),
        policy: Policy::isolated(Search::Annealing { seed: 7 }),
        unit_bytes: 8 << 20,
        step_bytes: Some(256 << 20),
        gain_min: 0.05,
        cooldown: Duration::from_mins(1),
        miss_cost_ms: 0.25,
        check_after: Duration::from_secs(90),
        tolerance: 0.05,
        balloon_patience: Duration::from_mins(1),
        headroom_bytes: Some(512 << 20),
        host_name: Config::default().host_name,
        gives_back_on_exit: false,
        workflow: Workflow::Cache {
            direct_ratio: 0.3,
            trace_for: Duration::from_mins(20),
            keep: false,
            every: Duration::from_hours(12),
        },
        trace: TraceSettings {
            enabled: false,
            backend: BackendSetting::Method(TraceMethod::AccessedPageScans),
            program: Some("/opt/plimsoll".into()),
            period: Duration::from_millis(500),
            budget: 0.02,
            window: Duration::from_mins(1),
            intermittent: true,
        },
        history: None,
        history_bytes_max: 32 << 20,
        history_keep: Duration::from_hours(24),
        serve: ServeSettings {
            socket: "/run/a".into(),
            group: Some("plimsoll".into()),
            read_only_socket: None,
            read_only_group: Some("plimsoll-ro".into()),
            curve_buckets: true,
            tcp: Some(TcpSettings {
                listen: "[::1]:7373".parse().unwrap(),
                token_file: Some("/etc/token".into()),
                tls: Some(TlsSettings {
                    certificate: "/etc/chain.pem".into(),
                    key: "/etc/key.pem".into(),
                    client_ca: Some("/etc/ca.pem".into()),
                }),
                read_only: true,
            }),
        },
        libvirt: Some("qemu:///system".into()),
        store: Some("/run/hcache".into()),
        groups: GroupSettings {
            watch: ["system.slice/*.service", "**/docker-*.scope"]
                .map(|text| GroupPattern::new(text).unwrap())
                .to_vec(),
            max: 40,
        },
        users: AllowedUsers::of_ids([0, 4711]),
        vms: vec![VmRule {
            name: "web-*".into(),
            uuid: Some("c7a5fdbd-edaf-9455-926a-d65c16db1809".into()),
            managed: Some(false),
            min_bytes: Some(1 << 30),
            max_bytes: Some(2 << 30),
            swap_bytes: Some(1 << 30),
            baseline_bytes: Some(3 << 29),
            shares: Some(3),
            promise: Some(Promise::on_loss(0.25)),
            self_balloon: Some(true),
            disk_admin: Some("/run/web".into()),
            allow_namespaced: Some(true),
        }],
    };
    assert_eq!(config, expected);
    let rest = Config::default().changes_needing_restart(&config);
    assert_eq!(
        rest,
        [
            "history.file",
            "history.size_max",
            "history.keep",
            "serve.socket",
            "serve.group",
            "serve.read_only_socket",
            "serve.read_only_group",
            "serve.curve_buckets",
            "[tcp]",
            "[trace]",
            "balloon.patience",
            "libvirt.uri",
            "store.socket",
            "hosts.users",
            "[groups]",
            "vm.disk_admin",
            "vm.allow_namespaced"
        ]
    );
    assert!(config.changes_needing_restart(&config).is_empty());
}

#[test]
fn policies_have_their_names() {
    let policy = |keys: &str| read(&format!("[policy]\n{keys}")).unwrap().policy;
    assert_eq!(
        policy("name = \"optimal\""),
        Policy::isolated(Search::Optimal)
    );
    assert_eq!(policy("name = \"esx\""), Policy::esx(0.75));
    assert_eq!(
        policy("name = \"esx-sampling\"\nidle_tax = 0"),
        Policy::esx_sampling(0.0)
    );
    assert_eq!(policy("search = \"hull\""), Policy::isolated(Search::Hull));
}

#[test]
fn a_policy_from_working_sets_has_tracers_that_sample_pages() {
    let trace = |policy: &str, period: &str| {
        let text = format!("[policy]\nname = \"{policy}\"\n[trace]\nperiod = \"{period}\"");
        read(&text).unwrap().trace
    };
    let sampling = trace("esx-sampling", "5s");
    assert_eq!(
        sampling.backend,
        BackendSetting::Method(TraceMethod::SampledPages)
    );
    assert_eq!(sampling.period, Duration::from_secs(30));
    let longer = trace("esx-sampling", "1m");
    assert_eq!(longer.period, Duration::from_mins(1));
    assert_eq!(trace("esx", "5s").backend, BackendSetting::Auto);
}

#[test]
fn the_example_and_the_guide_name_every_policy_and_search() {
    let guide = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/configuration.md"
    ));
    let policies = POLICIES.iter().map(|row| row.name);
    let names = policies
        .chain(PRESETS.iter().map(|row| row.name))
        .chain(SEARCHES.iter().map(|row| row.name));
    for name in names {
        let word = format!("\"{name}\"");
        assert!(EXAMPLE.contains(&word), "{name}");
        assert!(guide.contains(&word), "{name}");
    }
}

#[test]
fn the_example_and_the_guide_describe_every_backend_that_gives_curves_of_vms_and_no_other() {
    let guide = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/configuration.md"
    ));
    let line = guide.lines().find(|line| line.contains("| `backend` |"));
    let line = line.unwrap();
    for row in plimsoll_trap::BACKENDS {
        let (name, sees) = (row.name(), row.sees);
        let is_described = row.gives_curve() && row.observes_vms();
        let choice = format!("backend = \"{name}\"");
        assert_eq!(read(&format!("[trace]\n{choice}")).is_ok(), is_described);
        let in_guide = line.contains(&format!("`\"{name}\"`: {sees}"));
        assert_eq!(in_guide, is_described, "{line}");
        let in_example = EXAMPLE.contains(&format!("# \"{name}\": {sees}\n"));
        assert_eq!(in_example, is_described, "{name}");
    }
}

#[test]
fn the_choice_of_the_backend_can_be_left_to_the_tracer() {
    let config = read("[trace]\nbackend = \"auto\"").unwrap();
    assert_eq!(config.trace.backend, BackendSetting::Auto);
    let help = BackendSetting::AUTO_HELP;
    assert!(EXAMPLE.contains(&format!("# \"auto\": {help}\n")));
}

#[test]
fn unknown_keys_are_reported_with_their_line_and_a_suggestion() {
    assert_eq!(
        refusal("mode = \"act\"\nturn_intervall = \"5s\"\n"),
        "p.toml:2: unknown key 'turn_intervall'; did you mean 'turn_interval'?"
    );
    assert_eq!(
        refusal("[trace]\n\nbugdet = 0.01"),
        "p.toml:3: unknown key 'trace.bugdet'; did you mean 'trace.budget'?"
    );
    assert_eq!(
        refusal("[[vm]]\nname = \"a\"\n[[vm]]\nname = \"b\"\nmaxloss = 0"),
        "p.toml:5: unknown key 'vm.maxloss'; did you mean 'vm.max_loss'?"
    );
    assert_eq!(refusal("colour = 1"), "p.toml:1: unknown key 'colour'");
    assert_eq!(
        refusal("\"a\\u001b[2J\" = 1"),
        "p.toml:1: unknown key 'a [2J'"
    );
}

#[test]
fn values_out_of_range_are_reported_with_the_range() {
    let known = [
        (
            "mode = \"go\"",
            "p.toml:1: mode = \"go\": expected \"observe\", \"advise\", \"act\"",
        ),
        (
            "turn_interval = \"2h\"",
            "turn_interval = \"2h\": expected a time from 1s to 1h",
        ),
        ("turn_interval = 30", "turn_interval = 30: expected a time"),
        ("total = \"5MB\"", "expected a size from 4KiB to 1024TiB"),
        ("total = \"4097\"", "in whole pages of 4 KiB"),
        ("total = -1", "total = -1: expected a size"),
        (
            "total = 340282366920938463463374607431768211455",
            "total = 340282366920938463463374607431768211455: expected a size",
        ),
        (
            "total = { bytes = 1 }",
            "total = { bytes = 1 }: expected a size",
        ),
        ("total = 2026-11-26", "total = 2026-11-26: expected a size"),
        ("check = 1", "check = 1: expected a section: write [check]"),
        ("vm = 1", "expected rules, each headed [[vm]]"),
        (
            "[policy]\nmiss_cost = \"11s\"",
            "p.toml:2: policy.miss_cost = \"11s\": expected a time from 1us to 10s",
        ),
        (
            "[check]\ntolerance = \"101%\"",
            "p.toml:2: check.tolerance = \"101%\": expected a share from 0 to 1",
        ),
        (
            "[trace]\nbudget = 0",
            "expected a share above 0 and at most 1",
        ),
        (
            "[trace]\nbudget = nan",
            "trace.budget = nan: expected a share",
        ),
        (
            "[trace]\nprogram = \"plimsoll\"",
            "expected a path that begins with /",
        ),
        (
            "[curves]\ndirect = 1.0",
            "expected a share above 0 and below 1",
        ),
        (
            "[policy]\nseed = 9223372036854775808",
            "expected a whole number from 0 to",
        ),
        ("[tcp]\nlisten = \"7373\"", "expected address and port"),
        ("[[vm]]\nname = \"\"", "vm.name = \"\": expected a text"),
        (
            "[[vm]]\nname = \"a\"\nshares = 0",
            "p.toml:3: vm.shares = 0: expected a whole number from 1",
        ),
        (
            "[[vm]]\nname = \"a\"\nmax_loss = \"-5%\"",
            "expected a share from 0% to 1000%",
        ),
        (
            "[[vm]]\nname = \"a\"\nmax_loss = 5",
            "max_loss = 5: expected a share from 0% to 1000%, such as \"5%\" or 0.05",
        ),
        (
            "[[vm]]\nname = \"a\"\nmax_misses = 20",
            "expected a number per second from 0 to 10000000, such as \"20/s\"",
        ),
        (
            "[[vm]]\nname = \"a\"\nmax_stall = \"150%\"",
            "expected a share from 0 to 1",
        ),
    ];
    for (text, expected) in known {
        let error = refusal(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
    let long = format!("[serve]\nsocket = \"/{}\"", "a".repeat(200));
    let error = refusal(&long);
    assert!(
        error.contains("at most 107 bytes") && error.len() < 200,
        "{error}"
    );
}

#[test]
fn patterns_of_control_groups_that_are_none_are_refused_where_they_stand() {
    let long = format!("watch = [\"{}a\"]", "a/".repeat(32));
    let many = format!("watch = [{}]", "\"a\", ".repeat(65));
    for (value, expected) in [
        (
            "watch = \"system.slice\"",
            "a list of paths of control groups",
        ),
        ("watch = [\"\"]", "a list of paths of control groups"),
        ("watch = [\"a/../b\"]", "a list of paths of control groups"),
        (
            "watch = [\"a\", \"a/../b\"]",
            "; path 2 has a component \"..\"",
        ),
        (&long, "; path 1 is longer than 32 components or 1024 bytes"),
        (&many, "at most 64, in which"),
        (&many, "; there are 65"),
        ("watch = [7]", "expected a string"),
        ("max = 0", "a whole number from 1 to 256"),
        ("max = 257", "a whole number from 1 to 256"),
        ("match = []", "unknown key 'groups.match'"),
    ] {
        let refusal = refusal(&format!("[groups]\n{value}"));
        assert!(refusal.contains(expected), "{refusal}");
        assert!(refusal.contains("p.toml:2"), "{refusal}");
    }
    let many = vec!["\"a\""; 65].join(", ");
    assert!(refusal(&format!("[groups]\nwatch = [{many}]")).contains("a list of paths"));
}

#[test]
fn contradictions_are_reported_where_a_key_was_set() {
    let known = [
        (
            "[policy]\nstep = \"1M\"",
            "p.toml:2: policy.step: is less than policy.unit",
        ),
        (
            "[policy]\nunit = \"8M\"\nstep = \"4M\"",
            "p.toml:3: policy.step",
        ),
        (
            "total = \"1M\"",
            "p.toml:1: total: is less than policy.unit",
        ),
        (
            "[trace]\nperiod = \"10m\"",
            "p.toml:2: trace.window: is shorter than trace.period",
        ),
        (
            "[serve]\nsocket = \"/a\"\nread_only_socket = \"/a\"",
            "p.toml:3: serve.read_only_socket: is also serve.socket",
        ),
        (
            "[curves]\nfrom = \"caches\"\nevery = \"1m\"",
            "p.toml:3: curves.every: is shorter",
        ),
        (
            "[policy]\nname = \"esx-sampling\"\n[trace]\nbackend = \"trap\"",
            "p.toml:4: trace.backend: policy esx-sampling samples pages by itself; leave it at \"auto\"",
        ),
        (
            "[policy]\nname = \"esx\"\nsearch = \"hull\"",
            "p.toml:3: policy.search: policy esx does not take it; only isolated does; leave it at \"auto\"",
        ),
        (
            "[tcp]\ntoken_file = \"/t\"",
            "p.toml:2: tcp.token_file: nothing is served",
        ),
        (
            "[tcp]\nlisten = \"1.2.3.4:5\"\nread_only = true",
            "p.toml:2: tcp.listen: needs tcp.token_file or",
        ),
        (
            "[tcp]\nlisten = \"127.0.0.1:5\"",
            "tcp.listen: needs tcp.token_file or",
        ),
        (
            "[tcp]\nlisten = \"1.2.3.4:5\"\ntoken_file = \"/t\"\nread_only = true",
            "p.toml:3: tcp.token_file: clients would send the token to 1.2.3.4:5 in plain text; set tcp.certificate",
        ),
        (
            "[tcp]\nlisten = \"127.0.0.1:5\"\ncertificate = \"/c\"",
            "tcp.certificate: needs tcp.key",
        ),
        (
            "[tcp]\nlisten = \"127.0.0.1:5\"\nkey = \"/c\"",
            "tcp.key: needs tcp.certificate",
        ),
        (
            "[tcp]\nlisten = \"127.0.0.1:5\"\nclient_ca = \"/c\"",
            "tcp.client_ca: needs tcp.certificate and",
        ),
        (
            "\n[[vm]]\nmin = \"1G\"",
            "p.toml:2: vm.name: each rule needs a name",
        ),
        (
            "[[vm]]\nname = \"a\"\nmin = \"2G\"\nmax = \"1G\"",
            "p.toml:1: vm.min: is above vm.max",
        ),
    ];
    for (text, expected) in known {
        let error = refusal(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
    for good in [
        "listen = \"127.0.0.1:5\"\nread_only = true",
        "listen = \"[::1]:5\"\ntoken_file = \"/t\"",
        "listen = \"1.2.3.4:5\"\ntoken_file = \"/t\"\nplain_text = true",
        "listen = \"1.2.3.4:5\"\ntoken_file = \"/t\"\ncertificate = \"/c\"\nkey = \"/k\"",
    ] {
        read(&format!("[tcp]\n{good}")).unwrap();
    }
}

#[test]
fn syntax_errors_are_reported_with_their_line() {
    let error = refusal("mode = \"act\"\n\nmode = \"act\"\n");
    assert!(error.starts_with("p.toml:3: "), "{error}");
    assert!(refusal("a = [").starts_with("p.toml:1: "));
    assert!(refusal(&"[".repeat(100_000)).starts_with("p.toml:1: "));
}

#[test]
fn the_first_rule_that_has_a_setting_decides_it() {
    let config = read(
        r#"
        [[vm]]
        name = "web-1"
        shares = 9
        min = "4G"
        [[vm]]
        name = "web-?"
        shares = 5
        max_loss = "5%"
        [[vm]]
        name = "*"
        shares = 1
        max_loss = "25%"
        managed = true
        max = "2G"
        "#,
    )
    .unwrap();
    let of = |name: &str| {
        let rule = config.settings_for(name, None);
        assert_eq!(rule.name, name);
        let loss = rule.promise.and_then(|promise| promise.max_loss);
        (rule.shares, loss, rule.managed, rule.max_bytes)
    };
    // The minimum of the first rule raises the maximum of the last.
    assert_eq!(
        of("web-1"),
        (Some(9), Some(0.05), Some(true), Some(4 << 30))
    );
    assert_eq!(
        of("web-2"),
        (Some(5), Some(0.05), Some(true), Some(2 << 30))
    );
    assert_eq!(of("db"), (Some(1), Some(0.25), Some(true), Some(2 << 30)));
    let none = Config::default().settings_for("db", None);
    assert_eq!(none, VmRule::for_name("db"));
}

#[test]
fn additions_are_read_by_name_over_the_file() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("plimsoll.toml");
    let additions = folder.path().join("plimsoll.toml.d");
    fs::create_dir(&additions).unwrap();
    fs::write(
        &path,
        "mode = \"advise\"\n[trace]\nbudget = 0.02\nperiod = \"2s\"\n[[vm]]\nname = \"a\"\n",
    )
    .unwrap();
    fs::write(
        additions.join("20-b.toml"),
        "mode = \"observe\"\n[[vm]]\nname = \"c\"\n",
    )
    .unwrap();
    fs::write(
        additions.join("10-a.toml"),
        "mode = \"act\"\n[trace]\nbudget = 0.03\n[[vm]]\nname = \"b\"\n",
    )
    .unwrap();
    fs::write(additions.join("30-c.toml.bak"), "no TOML").unwrap();
    let (config, notes) = Config::load(Some(&path)).unwrap();
    assert_eq!(config.mode, Mode::Observe);
    assert_eq!(config.trace.budget, 0.03);
    assert_eq!(config.trace.period, Duration::from_secs(2));
    let names: Vec<_> = config.vms.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert_eq!(notes.len(), 3);
    assert!(notes[1].ends_with("10-a.toml"), "{notes:?}");

    fs::write(additions.join("10-a.toml"), "[policy]\nstep = \"4K\"\n").unwrap();
    let error = Config::load(Some(&path)).unwrap_err().to_string();
    assert!(error.contains("10-a.toml:2: policy.step"), "{error}");
}

#[test]
fn only_a_file_that_was_asked_for_must_be_there() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("plimsoll.toml");
    assert!(file::files(&path, false).unwrap().is_empty());
    let error = with_causes(&Config::load(Some(&path)).unwrap_err());
    assert!(error.contains("cannot be read: No such file"), "{error}");
    assert_eq!(error.matches("No such file").count(), 1, "{error}");
    let error = Config::load(Some(folder.path())).unwrap_err().to_string();
    assert!(error.contains("expected a regular file"), "{error}");
    fs::write(&path, "# ".repeat(1 << 20)).unwrap();
    let error = Config::load(Some(&path)).unwrap_err().to_string();
    assert!(error.contains("at most 1024 KiB"), "{error}");
    fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(Config::load(Some(&path)).is_err());
}

#[test]
fn a_rule_of_a_uuid_is_for_that_vm_alone() {
    const WEB: &str = "c7a5fdbd-edaf-9455-926a-d65c16db1809";
    let text = format!("[[vm]]\nuuid = \"{}\"\nshares = 7\n", WEB.to_uppercase());
    let config = read(&text).unwrap();
    let shares = |uuid| config.settings_for("web", uuid).shares;
    assert_eq!(shares(Some(WEB)), Some(7));
    assert_eq!(shares(None), None);
    assert_eq!(shares(Some("c7a5fdbd-edaf-9455-926a-d65c16db1800")), None);
    let error = read("[[vm]]\nuuid = \"web\"\n").unwrap_err().to_string();
    assert!(error.contains("expected a UUID"), "{error}");
}

#[test]
fn users_are_those_of_this_host() {
    let config = read("[hosts]\nusers = [\"root\", \"4711\"]\n").unwrap();
    assert!(config.users.contains(4711));
    assert!(!config.users.contains(4712));
    for wrong in ["[\"no such user here\"]", "\"root\"", "[[]]", "[1]"] {
        let error = read(&format!("[hosts]\nusers = {wrong}\n"));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("hosts.users"), "{error}");
    }
}

#[test]
fn what_is_wrong_can_be_left_out_but_not_which_history_is_meant() {
    let read = |text: &str| {
        let (config, errors) =
            keys::read_tolerantly(&[File::new(Path::new("p.toml"), text.to_owned())])?;
        let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
        Ok::<_, ConfigError>((config, errors))
    };
    let good = "[history]\nfile = \"/h\"\n[libvirt]\nuri = \"qemu:///system\"\n[guard]\non_exit = \"keep\"\n\
                [[vm]]\nname = \"web\"\ndisk_admin = \"/d\"\n";
    let expected = super::keys::read(&[File::new(Path::new("p.toml"), good.to_owned())]).unwrap();
    assert_eq!(read(good).unwrap(), (expected.clone(), vec![]));
    let wrong = [
        (
            "[tcp]\nlisten = \"0.0.0.0:7373\"\ntoken_file = \"/t\"\n",
            "in plain text",
        ),
        (
            "turn_interval = \"2h\"\n",
            "p.toml:1: turn_interval = \"2h\"",
        ),
        ("turn_intervall = \"2s\"\n", "p.toml:1: unknown key"),
        ("files = 2 # of the history\n", "p.toml:1: unknown key"),
        ("mode = act\n", "p.toml:1: "),
        ("[of_a_later_version]\n", "p.toml:1: unknown key"),
    ];
    for (wrong, error) in wrong {
        let (config, errors) = read(&format!("{wrong}{good}")).unwrap();
        assert!(errors[0].contains(error), "{wrong}: {errors:?}");
        assert_eq!(config, expected, "{wrong}");
    }
    for wrong in [
        "[[vm]]\nmin = \"2G\"\nmax = \"1G\"\n",
        "[[vm]]\nname = \"x\"\nmin = \"2G\"\nmax = \"1G\"\n",
    ] {
        let (config, errors) = read(&format!("{good}{wrong}")).unwrap();
        assert!(!errors.is_empty(), "{wrong}");
        assert_eq!(config.history, expected.history);
        assert_eq!(config.vms[0], expected.vms[0], "{wrong}: {errors:?}");
    }
    for unclear in [
        "[history]\nfile = 7\n",
        "[history]\nfile = \"/h\n",
        "[histroy]\nfile = \"/h\"\n",
        "[[history]]\nfile = \"/h\"\n",
        "[history]\nfiel = \"/h\"\n",
    ] {
        assert!(read(unclear).is_err(), "{unclear}");
    }
    let many = "a = 1\n".repeat(100);
    assert!(read(&many).is_err());
}
