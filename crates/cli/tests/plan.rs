//! `plimsoll plan` as its users meet it: curves in files, a division out, and no division that breaks a promise.

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use plimsoll_flow::LOG_ERRORS;
use plimsoll_protocol::curve_json::{CurveJson, MissesJson, PointJson};
use plimsoll_protocol::plan::{
    DemandJson, PlanInputs, PlanJson, Policy, Reason, RulesJson, Search,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A curve of 4 KiB pages with steps at sizes in MiB and a band of a tenth, of a VM that had 512 MiB.
fn curve(vm: &str, steps: &[(u64, f64)]) -> CurveJson {
    let points = steps.iter().map(|&(mib, ratio)| PointJson {
        size_pages: mib * 256,
        miss_ratio: ratio,
        low: ratio * 0.9,
        high: (ratio * 1.1).min(1.0),
        misses: None,
    });
    CurveJson {
        schema: 1,
        vm: vm.to_owned(),
        page_bytes: 4096,
        references: 1_000_000,
        baseline_pages: Some(512 * 256),
        vcpu_seconds_per_second: None,
        uncertain_pages: 0,
        log_errors_permille: Vec::new(),
        points: points.collect(),
    }
}

/// One that is content with 336 MiB, and two whose loops fit from 600 MiB on.
fn three() -> [CurveJson; 3] {
    [
        curve("idle", &[(1, 0.5), (330, 0.1)]),
        curve("web", &[(1, 0.9), (400, 0.6), (598, 0.1)]),
        curve("mail", &[(1, 0.9), (400, 0.5), (596, 0.2)]),
    ]
}

/// A folder with files of curves, and the program.
struct Desk(TempDir);

impl Desk {
    /// Each of [`three`] in a file of its own.
    fn new() -> Self {
        let desk = Self(tempfile::tempdir().unwrap());
        for curve in three() {
            let name = format!("{}.json", curve.vm);
            desk.put(&name, &serde_json::to_string(&curve).unwrap());
        }
        desk
    }

    fn put(&self, name: &str, text: &str) {
        fs::write(self.0.path().join(name), text).unwrap();
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command.current_dir(self.0.path()).arg("plan");
        command.args(line.split(' '));
        command
    }

    /// Runs to the end; exit code, standard output, standard error.
    fn ran(&self, line: &str) -> (Option<i32>, String, String) {
        let output = self.command(line).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (out, complaint) = (text(output.stdout), text(output.stderr));
        (output.status.code(), out, complaint)
    }

    /// Runs what must succeed in silence, and returns what it wrote.
    fn stdout(&self, line: &str) -> String {
        let (code, out, complaint) = self.ran(line);
        assert_eq!((code, &*complaint), (Some(0), ""), "{line}");
        out
    }

    fn plan(&self, line: &str) -> PlanJson {
        serde_json::from_str(&self.stdout(&format!("{line} -o json"))).unwrap()
    }

    /// Runs what must end with `code` and without output, saying `said`.
    fn refused(&self, line: &str, code: i32, said: &str) {
        let (ended, out, complaint) = self.ran(line);
        assert_eq!((ended, &*out), (Some(code), ""), "{line}: {complaint}");
        assert!(complaint.contains(said), "{line}: {complaint}");
    }
}

const ALL: &str = "idle.json web.json mail.json --total 1536MiB";

fn targets_mib(plan: &PlanJson) -> Vec<u64> {
    let targets = plan.targets.iter();
    targets.map(|target| target.target_bytes / MIB).collect()
}

#[test]
fn memory_moves_to_who_gains_most_by_it() {
    let desk = Desk::new();
    for search in ["auto", "exhaustive", "optimal", "hull"] {
        let plan = desk.plan(&format!("{ALL} --max-loss 25% --search {search}"));
        assert_eq!(plan.targets[1].target_bytes, 600 * MIB, "{search}");
        assert_eq!(plan.targets[2].target_bytes, 596 * MIB, "{search}");
        assert_eq!(plan.targets[1].reason, Reason::Gains);
        let given: u64 = plan.targets.iter().map(|target| target.target_bytes).sum();
        assert_eq!(given + plan.spare_bytes, 1536 * MIB);
        // 1, 1/6 and 2/5.
        let mean = (0.4f64 / 6.0).cbrt();
        assert!((plan.geometric_mean - mean).abs() < 1e-9, "{plan:?}");
        assert_eq!(plan.geometric_mean_now, 1.0);
    }
    let optimal = desk.plan(&format!("{ALL} --max-loss 25% --policy optimal"));
    assert_eq!(
        (optimal.search, optimal.gap),
        (Some(Search::Optimal), Some(0.0))
    );
}

#[test]
fn limits_of_a_vm_hold_and_a_step_is_not_passed() {
    let desk = Desk::new();
    let limited = desk.plan(&format!(
        "{ALL} --max-loss 25% --vm web:max=512M,max-loss=0% --vm idle:min=400MiB"
    ));
    assert_eq!(limited.targets[1].target_bytes, 512 * MIB);
    assert!(limited.targets[0].target_bytes >= 400 * MIB, "{limited:?}");
    assert_eq!(limited.targets[1].max_loss, Some(0.0));
    let stepped = desk.plan(&format!("{ALL} --max-loss 25% --step 16M"));
    for target in &stepped.targets {
        let change = target.target_bytes.abs_diff(target.current_bytes);
        assert!(change <= 16 * MIB, "{target:?}");
    }
    let held = desk.stdout(&format!("{ALL} --max-loss 25% --gain-min 90%"));
    assert!(
        held.contains("held            nothing is moved: the best allocation would gain"),
        "{held}"
    );
    assert_eq!(
        held.matches("  512 MiB  512 MiB  512 MiB       -").count(),
        3,
        "{held}"
    );
}

#[test]
fn esx_divides_what_is_idle_by_shares_if_it_knows_of_it() {
    let desk = Desk::new();
    let line = format!("{ALL} --max-loss 25% --vm web:shares=300");
    let alike = targets_mib(&desk.plan(&format!("{ALL} --max-loss 25% --policy esx")));
    assert_eq!(alike, [392, 572, 572]);
    let by_curves = targets_mib(&desk.plan(&format!("{line} --policy esx")));
    let [idle, web, mail] = by_curves[..] else {
        panic!("{by_curves:?}");
    };
    // Mail gives what its bound allows: 400 MiB.
    assert!(idle < 392 && mail == 400 && mail < web, "{by_curves:?}");
    let untaxed = desk.plan(&format!("{ALL} --max-loss 25% --policy esx --idle-tax 0%"));
    assert_eq!(targets_mib(&untaxed), [512, 512, 512]);
    let unsampled = desk.plan(&format!("{line} --policy esx-sampling"));
    assert_eq!(targets_mib(&unsampled), [512, 512, 512]);
    assert_eq!(unsampled.targets[0].reason, Reason::NoWorkingSet);
}

#[test]
fn the_table_says_what_an_operator_asks_first() {
    let table = Desk::new().stdout(&format!("{ALL} --max-loss 25% --search optimal"));
    assert_eq!(
        table,
        "policy          isolated sharing, optimal search\n\
         memory          1.5 GiB for 3 VMs, in units of 4 MiB\n\
         \n\
         VM    baseline      now   target    change  misses now   then         band  bound  why\n\
         idle   512 MiB  512 MiB  340 MiB  -172 MiB       1.00x  1.00x  1.00x-1.22x  1.25x  others gain more than it loses\n\
         web    512 MiB  512 MiB  600 MiB   +88 MiB       1.00x  0.17x  0.14x-0.20x  1.25x  gains more than the others\n\
         mail   512 MiB  512 MiB  596 MiB   +84 MiB       1.00x  0.40x  0.33x-0.49x  1.25x  gains more than the others\n\
         \n\
         geometric mean  0.41x of the baselines' misses, now 1.00x; no allocation is better\n\
         spare           0 B\n"
    );
}

#[test]
fn csv_has_bytes_and_quotes_names() {
    let desk = Desk::new();
    let odd = CurveJson {
        vm: "a \"b\",c".to_owned(),
        ..three()[0].clone()
    };
    desk.put("odd.json", &serde_json::to_string(&odd).unwrap());
    let csv = desk.stdout("odd.json --total 512M -o csv");
    let mut lines = csv.lines();
    assert_eq!(
        lines.next(),
        Some(
            "vm,baseline_bytes,current_bytes,target_bytes,relative_now,relative,low,high,max_loss,reason,max_misses_per_second"
        )
    );
    let row = lines.next().unwrap();
    assert!(
        row.starts_with("\"a \"\"b\"\",c\",536870912,536870912,"),
        "{row}"
    );
    assert_eq!(lines.next(), None);
}

#[test]
fn pictures_show_every_vm_whatever_its_name() {
    let desk = Desk::new();
    let odd = curve("</svg>&\u{1b}", &[(1, 0.7), (700, 0.2)]);
    desk.put("odd.json", &serde_json::to_string(&odd).unwrap());
    let line = "idle.json web.json mail.json odd.json --total 2G --max-loss 25%";
    let svg = desk.stdout(&format!("{line} -o svg"));
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("Misses over the baseline's</text>").count(), 4);
    for vm in ["idle", "web", "mail", "&lt;/svg&gt;&amp;\u{fffd}"] {
        assert!(svg.contains(&format!(">{vm}</text>")), "{vm}");
    }
    assert_eq!(desk.stdout("idle.json --total 512M --out plan.png"), "");
    let png = fs::read(desk.0.path().join("plan.png")).unwrap();
    assert!(png.starts_with(b"\x89PNG\r\n"));
}

#[test]
fn a_picture_has_the_bands_by_which_sizes_are_chosen() {
    let desk = Desk::new();
    let [_, mut known, _] = three();
    // Below its first point all would miss, which is certain.
    known.points[0].size_pages = 0;
    let mut exact = known.clone();
    for point in &mut exact.points {
        (point.low, point.high) = (point.miss_ratio, point.miss_ratio);
    }
    // All sizes have the same error.
    known.log_errors_permille = vec![[100; LOG_ERRORS]; known.points.len()];
    let pictures = [known, exact].map(|curve| {
        desk.put("web.json", &serde_json::to_string(&curve).unwrap());
        desk.stdout("idle.json web.json --total 1G --max-loss 5% -o svg")
    });
    assert_eq!(pictures[0], pictures[1]);
}

#[test]
fn of_many_vms_the_picture_shows_those_that_change() {
    let desk = Desk::new();
    let text: String = (0..40)
        .map(|index| curve(&format!("vm{index}"), &[(1, 0.9), (100 + 10 * index, 0.1)]))
        .map(|curve| serde_json::to_string(&curve).unwrap() + "\n")
        .collect();
    desk.put("many.json", &text);
    let svg = desk.stdout("many.json --total 20G -o svg");
    assert!(svg.contains("16 that change less are not shown"));
    assert_eq!(svg.matches("<g transform").count(), 24);
}

#[test]
fn a_trace_of_a_running_vm_is_taken_by_its_last_line() {
    let desk = Desk::new();
    let whole = serde_json::to_string(&three()[1]).unwrap();
    let period = r#"{"schema":1,"vm":"web","period":0,"seconds":5.0,"curve":null}"#;
    let lines =
        format!("{period}\n{{\"schema\":1,\"vm\":\"web\",\"final\":true,\"curve\":{whole}}}\n");
    desk.put("web-trace.json", &lines);
    let [from_file, from_trace] = ["web.json", "web-trace.json"]
        .map(|file| desk.stdout(&format!("idle.json {file} --total 1200M -o json")));
    assert_eq!(from_file, from_trace);
    desk.put("cut.json", period);
    desk.refused(
        "cut.json --total 1G",
        1,
        "'cut.json' has periods of a trace but not its last line",
    );
    // A VM that reused nothing has no curve, and keeps what it has.
    desk.put(
        "still.json",
        r#"{"schema":1,"vm":"still","final":true,"curve":null}"#,
    );
    desk.refused("still.json --total 1G", 2, "add --vm still:baseline=SIZE");
    let plan = desk.plan("still.json web.json --total 1200M --vm still:baseline=512M");
    assert_eq!(plan.targets[0].reason, Reason::Unknown);
    assert_eq!(targets_mib(&plan)[0], 512);
    assert_eq!(plan.targets[0].relative, None);
    let svg = desk.stdout("still.json --total 1200M --vm still:baseline=512M -o svg");
    assert!(svg.contains("1 without a known curve"), "{svg}");
}

#[test]
fn standard_input_may_hold_several_vms() {
    let desk = Desk::new();
    let mut command = desk.command("- --total 1536M --max-loss 25% -o json");
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let text = three().map(|curve| serde_json::to_string_pretty(&curve).unwrap());
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(text.concat().as_bytes()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let plan: PlanJson = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan, desk.plan(&format!("{ALL} --max-loss 25%")));
}

#[test]
fn recorded_inputs_give_their_decision_again() {
    let desk = Desk::new();
    let demand = |curve: CurveJson| DemandJson {
        vm: curve.vm.clone(),
        curve: Some(curve),
        baseline_bytes: 512 * MIB,
        current_bytes: 512 * MIB,
        floor_bytes: 0,
        ceiling_bytes: None,
        max_loss: Some(0.25),
        max_misses_per_second: None,
        shares: 1,
        working_set_bytes: None,
    };
    let inputs = PlanInputs {
        schema: 1,
        page_bytes: 4096,
        policy: Policy::isolated(Search::Auto),
        rules: RulesJson {
            total_bytes: 1536 * MIB,
            unit_bytes: 4 * MIB,
            step_bytes: None,
            gain_min: 0.0,
            miss_ratio_min: 0.001,
        },
        demands: three().map(demand).to_vec(),
    };
    let text = serde_json::to_string(&inputs).unwrap();
    desk.put("inputs.json", &text);
    let plan = desk.plan("--inputs inputs.json");
    assert_eq!(plan, inputs.plan().unwrap());
    assert_eq!(plan, desk.plan(&format!("{ALL} --max-loss 25%")));
    desk.refused("--inputs inputs.json --total 1G", 2, "cannot be used with");
    desk.refused(
        "--inputs inputs.json --out ./inputs.json",
        2,
        "would be lost",
    );
    desk.put("two.json", &text.repeat(2));
    desk.refused("--inputs two.json", 1, "the inputs of 2 decisions");
    desk.put(
        "later.json",
        &text.replacen("\"schema\":1", "\"schema\":2", 1),
    );
    desk.refused(
        "--inputs later.json",
        1,
        "the inputs have schema 2; only schema 1 is supported",
    );
    desk.refused("--inputs web.json", 1, "cannot read 'web.json': ");
}

#[test]
fn promises_that_cannot_be_kept_are_exit_code_4_with_who_needs_what() {
    let desk = Desk::new();
    let line = "idle.json web.json --total 500M --max-loss 25%";
    desk.refused(line, 4, "and the host has 500 MiB: ");
    desk.refused(line, 4, "at least 332 MiB for idle, 400 MiB for web");
    // A maximum size below what the promise needs: the allocation is printed, and is no success.
    // Whatever size it has now.
    for now in ["", ",current=100M", ",current=300M"] {
        let line = format!("web.json --total 4G --max-loss 25% --vm web:max=300M{now}");
        let (code, out, complaint) = desk.ran(&line);
        assert!(code == Some(4) && out.contains("300 MiB"), "{now}: {out}");
        let said = "VM 'web': its maximum size is less than its max-loss needs: ";
        assert!(complaint.contains(said), "{now}: {complaint}");
    }
    let [_, mut web, _] = three();
    for point in &mut web.points {
        point.misses = Some(MissesJson {
            misses_per_second: point.miss_ratio * 1000.0,
            misses_low_per_second: point.low * 1000.0,
            misses_high_per_second: point.high * 1000.0,
        });
    }
    desk.put("rated.json", &serde_json::to_string(&web).unwrap());
    let with_max = |max: &str| {
        desk.ran(&format!(
            "rated.json --total 4G --vm web:max-misses=700/s{max}"
        ))
    };
    let (code, _, complaint) = with_max("");
    assert_eq!(code, Some(0), "{complaint}");
    let (code, out, complaint) = with_max(",max=300M");
    assert!(code == Some(4) && out.contains("300 MiB"), "{out}");
    let said =
        "VM 'web': its maximum size is less than its max-misses needs: 990.0/s, 700/s are allowed";
    assert!(complaint.contains(said), "{complaint}");
}

#[test]
fn the_devices_of_one_trace_are_vms() {
    let desk = Desk::new();
    let part = |curve: &CurveJson| {
        let curve = serde_json::to_string(curve).unwrap();
        format!("{{\"references\":1000000,\"curve\":{curve}}}")
    };
    let of = |by: &str, curves: &[String]| {
        let curves = curves.join(",");
        format!("{{\"schema\":1,\"trace\":\"t\",\"by\":\"{by}\",\"curves\":[{curves}]}}")
    };
    let parts = three().each_ref().map(part);
    desk.put("all.json", &of("device", &parts));
    assert_eq!(
        desk.plan("all.json --total 1536MiB --max-loss 25%"),
        desk.plan(&format!("{ALL} --max-loss 25%"))
    );
    desk.put("every.json", &of("interval", &parts));
    desk.refused(
        "every.json --total 1536M",
        1,
        "'every.json' has curves of intervals",
    );
    desk.put(
        "none.json",
        &of(
            "device",
            &["{\"name\":\"vol-7\",\"curve\":null}".to_owned()],
        ),
    );
    desk.refused(
        "none.json --total 1G",
        1,
        "'none.json' has a device without a curve (vol-7): none of its references was sampled",
    );
    desk.refused(
        "all.json web.json --total 1G",
        2,
        "has a curve of VM web, and so has",
    );
}

#[test]
fn what_makes_no_curve_is_refused_with_file_and_point() {
    let desk = Desk::new();
    let good = serde_json::to_string(&three()[1]).unwrap();
    let backwards = {
        let mut curve = three()[1].clone();
        curve.points.swap(1, 2);
        serde_json::to_string(&curve).unwrap()
    };
    let rows = {
        let mut curve = three()[1].clone();
        curve.log_errors_permille = vec![[0; LOG_ERRORS]; 4];
        serde_json::to_string(&curve).unwrap()
    };
    let of_devices = format!(r#"{{"schema":1,"by":"device","curves":[{{"curve":{rows}}}]}}"#);
    let rising = good.replace("\"miss_ratio\":0.1,", "\"miss_ratio\":0.105,\"x\":[],");
    let cases = [
        ("", "'bad.json' has no curve: it is empty"),
        ("[]", "cannot read 'bad.json': "),
        ("{\"schema\":1", "cannot read 'bad.json': EOF while parsing"),
        ("\u{0}\u{1}", "cannot read 'bad.json': "),
        (
            "{\"schema\":1,\"vm\":\"x\"}",
            "'bad.json', VM x: no curve: ",
        ),
        (
            "{\"schema\":1,\"vm\":\"x\",\"points\":[],\"references\":1}",
            "'bad.json', VM x: a curve without 'page_bytes'",
        ),
        (
            &good.replacen("\"schema\":1", "\"schema\":9", 1),
            "'bad.json', VM web: schema 9, where 1 is read",
        ),
        (
            &good.replace("\"page_bytes\":4096", "\"page_bytes\":4000"),
            "'bad.json', VM web: a page cannot have 4000 bytes",
        ),
        (
            &good.replace("\"references\":1000000", "\"references\":0"),
            "'bad.json', VM web: nothing was observed",
        ),
        (
            &backwards,
            "'bad.json', VM web: point 2: size of 102400 pages does not exceed",
        ),
        (
            &good.replace("0.6,", "0.95,"),
            "'bad.json', VM web: point 1: ",
        ),
        (
            &rising.replace("\"high\":0.1", "\"high\":7"),
            "'bad.json', VM web: point 2: ",
        ),
        (
            &rows,
            "'bad.json', VM web: row 3 of log_errors_permille: there are only 3 points",
        ),
        (
            &of_devices,
            "'bad.json', VM web: row 3 of log_errors_permille: there are only 3 points",
        ),
        (&"[".repeat(100_000), "cannot read 'bad.json': "),
    ];
    for (text, said) in cases {
        desk.put("bad.json", text);
        desk.refused("idle.json bad.json --total 1G", 1, said);
    }
    desk.refused(
        "none.json --total 1G",
        1,
        "cannot read 'none.json': No such file",
    );
    desk.refused(". --total 1G", 1, "cannot read '.': ");
}

#[test]
fn what_does_not_go_together_is_a_usage_error() {
    let desk = Desk::new();
    let other_pages = CurveJson {
        vm: "huge".to_owned(),
        page_bytes: 8192,
        ..three()[1].clone()
    };
    desk.put("huge.json", &serde_json::to_string(&other_pages).unwrap());
    let nameless = CurveJson {
        vm: "new".to_owned(),
        baseline_pages: None,
        ..three()[1].clone()
    };
    desk.put("new.json", &serde_json::to_string(&nameless).unwrap());
    for (line, said) in [
        ("web.json", "--total"),
        ("--total 1G", "CURVES"),
        (
            "web.json web.json --total 1G",
            "'web.json' has a curve of VM web, and so has 'web.json'",
        ),
        (
            "web.json huge.json --total 1G",
            "'web.json' counts in pages of 4096 bytes and 'huge.json' in pages of 8192",
        ),
        (
            "new.json --total 1G",
            "'new.json' has no baseline for VM new; add --vm new:baseline=SIZE",
        ),
        (
            "web.json --total 1G --vm wbe:min=1M",
            "--vm wbe: no file has a curve of that VM",
        ),
        (
            "web.json --total 1G --vm web:min=1M --vm web:max=1G",
            "--vm web: given twice",
        ),
        (
            "web.json --total 1G --vm web:size=1M",
            "'size' is not one of min, max",
        ),
        (
            "web.json --total 1G --policy esx --search greedy",
            "--search: policy esx does not take it; only isolated does",
        ),
        (
            "web.json --total 1G --policy optimal --search greedy",
            "--search: policy optimal does not take it",
        ),
        (
            "web.json --total 1G --seed 1",
            "--seed: search auto does not take it; only annealing does",
        ),
        (
            "web.json --total 1G --idle-tax 50%",
            "--idle-tax: policy isolated does not take it; only esx and esx-sampling do",
        ),
        (
            "web.json --total 1G --policy esx --idle-tax 150%",
            "idle_tax must be between 0 and 1; got 1.5",
        ),
        (
            "web.json --total 1G --unit 100",
            "the unit must be at least a page, which has 4KiB; got 100",
        ),
        (
            "web.json --total 1G --step 1",
            "the step must be at least a page, which has 4KiB; got 1",
        ),
        (
            "web.json --total 1G --vm web:min=40M,max=20M",
            "the minimum size of VM web must be at most its maximum size; got 10240 pages",
        ),
        (
            "web.json --total 1G --vm web:max-misses=0",
            "max-misses: '0' is not a number per second: write a number of 0 or more with /s",
        ),
        ("web.json --total 1G --max-loss=-5%", "'-5%' is not a share"),
        (
            "web.json --total 0",
            "the total must be between 1 and 2^52 pages; got 0",
        ),
        (
            "web.json --total 1G -o svg --out no/such/plan.svg",
            "there is no such directory",
        ),
    ] {
        desk.refused(line, 2, said);
    }
}
