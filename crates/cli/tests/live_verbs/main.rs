//! The live verbs as an operator meets them: the program, and a daemon that speaks the API.

#[path = "../../../report/tests/common/host.rs"]
mod host;
#[path = "../program/mod.rs"]
mod program;
mod server;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use plimsoll_protocol::decision::Decision;
use plimsoll_protocol::vm::HostView;
use serde_json::Value;

use host::HOSTILE;
use program::{KilledOnDrop, ran};
use server::{Manner, Server};

/// What ends up on a terminal: no letter of it moves the cursor but the line end.
fn assert_harmless(text: &str) {
    let harmful = text
        .chars()
        .find(|letter| letter.is_control() && *letter != '\n');
    assert_eq!(harmful, None, "{text:?}");
}

/// Runs a verb that must fail; its exit code, and what it said on standard error.
fn failed(command: &mut Command) -> (i32, String) {
    let (code, _, complaint) = ran(command);
    assert_harmless(&complaint);
    (code.unwrap(), complaint)
}

#[test]
fn vms_is_a_line_for_each_vm_with_its_terms_explained() {
    let server = Server::new(Manner::Willing);
    let expected = "\
host example: advise, whole; turn 120 of 30 s at 2026-11-22 11:31:55
1.5 GiB allocated, 128 MiB spare; 120 MiB could be reclaimed within all limits
";
    let text = server.text(&["vms"]);
    assert!(text.starts_with(expected), "{text}");
    let words = |vm: &str| -> Vec<String> {
        let line = text.lines().find(|line| line.starts_with(vm)).unwrap();
        line.split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(words("web ")[1..4], ["safe", "512", "MiB"]);
    assert_eq!(words("web ").last().unwrap(), "tcg");
    assert_eq!(words("mail ").last().unwrap(), "disk");
    for part in [
        "1.03 ≤ 1.08",
        "480 MiB",
        "≥ 300 MiB",
        "0.98 %",
        "failed, tcg, losses",
        "tcg: emulated",
        "  write-scan  ",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let csv = server.text(&["vms", "-o", "csv"]);
    assert!(
        (csv.lines().nth(1).unwrap()).ends_with(",write-scan,vm,,,,paused\u{fffd}[2J"),
        "{csv}"
    );
    assert!(
        csv.starts_with("vm,pid,accelerator,status,size_bytes,"),
        "{csv}"
    );
    assert!(
        csv.contains("\nweb,1234,tcg,safe,536870912,536870912,0,,168820736,estimate,1.03,"),
        "{csv}"
    );
    assert!(csv.contains(",314572800,at_least,"), "{csv}");
    let json: HostView = serde_json::from_str(&server.text(&["vms", "-o", "json"])).unwrap();
    assert_eq!(json, host::host());
}

#[test]
fn control_groups_stand_below_the_vms_with_an_account_of_those_that_are_not_watched() {
    let server = Server::new(Manner::Willing);
    let text = server.text(&["vms"]);
    let line = text.lines().find(|line| line.starts_with("nginx.service"));
    let words: Vec<_> = line.unwrap().split_whitespace().collect();
    let expected = "nginx.service systemd 300 MiB 512 MiB 180 MiB 0.98 % first-touch /system.slice/nginx.service";
    assert_eq!(words.join(" "), expected);
    for part in [
        "warning: \u{fffd}[2Jodd: it is not traced: the kernel does not track idle pages",
        "not watched: /system.slice/cron.service and 11 more: no more than 2 groups are watched",
        "no allocation counts them",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert_harmless(&text);
    let csv = server.text(&["vms", "-o", "csv"]);
    let line = csv.lines().find(|line| line.starts_with("nginx.service"));
    let expected = "nginx.service,,,,,,,,188743680,estimate,,,,,,,,,,0.0098,tracing,0,,systemd,/system.slice/nginx.service,314572800,536870912,";
    assert_eq!(line, Some(expected));
    assert_harmless(&csv);
}

#[test]
fn a_control_group_is_shown_by_name_or_path_and_what_is_for_vms_ends_with_4() {
    let server = Server::new(Manner::Willing);
    let text = server.text(&["show", "nginx.service"]);
    for part in [
        "control group nginx.service (systemd), version 2: only observed\n/system.slice/nginx.service\n",
        "  charged       300 MiB ",
        "  limit         512 MiB ",
        "  uses          180 MiB ",
        " of one CPU's time taken by its tracer\n",
        "Tracing\n  state         tracing ",
        "Curve (from first touches of sampled pages of its RAM, 123.5k references, 5 s old)",
        " charged\n",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    for absent in ["baseline", "balloon", "could give", "Promise"] {
        assert!(!text.contains(absent), "{absent}\n{text}");
    }
    for name in ["cgroup:nginx.service", "/system.slice/nginx.service"] {
        assert_eq!(server.text(&["show", name]), text);
    }
    let odd = server.text(&["show", "cgroup:/user.slice/\u{1b}[2Jodd\n"]);
    assert_harmless(&odd);
    assert!(odd.contains("warning: it is not traced"), "{odd}");
    let csv = server.text(&["show", "nginx.service", "-o", "csv"]);
    assert!(csv.lines().nth(1).unwrap().ends_with(",,,,"), "{csv}");
    for words in [
        &["whatif", "nginx.service", "--size", "1G"][..],
        &["set", "nginx.service", "--shares", "200"],
        &["explain", "nginx.service"],
        &["report", "heatmap", "nginx.service"],
        &["report", "rightsize", "nginx.service"],
    ] {
        let (code, said) = failed(&mut server.verb(words));
        assert_eq!(code, 4, "{words:?}: {said}");
        assert!(
            said.contains("is a control group, which is only observed"),
            "{said}"
        );
    }
    let (code, said) = failed(&mut server.verb(&["show", "cgroup:none"]));
    assert_eq!(
        (code, &*said),
        (1, "plimsoll: error: no such control group is watched\n")
    );
    let (_, said) = failed(&mut server.verb(&["show", "nginx.servce"]));
    assert!(said.contains("did you mean 'nginx.service'?"), "{said}");
}

#[test]
fn reports_of_curves_and_working_sets_hold_control_groups() {
    let server = Server::new(Manner::Willing);
    let (all, one) = (
        server.text(&["report", "mrc"]),
        server.text(&["report", "mrc", "nginx.service"]),
    );
    assert!(
        all.contains(&one) && one.starts_with("nginx.service: "),
        "{all}"
    );
    assert!(!one.contains("baseline"), "{one}");
    let all = server.text(&["report", "wss"]);
    let one = server.text(&["report", "wss", "cgroup:/system.slice/nginx.service"]);
    assert!(
        all.contains(&one) && one.starts_with("nginx.service\n"),
        "{one}"
    );
    for what in ["mrc", "wss"] {
        let picture = server.text(&["report", what, "nginx.service", "-o", "svg"]);
        assert!(picture.contains(" of nginx.service"), "{what}");
    }
}

#[test]
fn a_vm_that_is_named_like_a_control_group_is_in_the_reports_of_all() {
    let server = Server::new(Manner::Misnamed);
    for what in ["mrc", "wss"] {
        let all = server.text(&["report", what]);
        let (vm, group) = ("\ncgroup:x", "\nnginx.service");
        assert!(all.contains(vm) && all.contains(group), "{what}: {all}");
    }
    // A user who writes it means a control group.
    let (code, said) = failed(&mut server.verb(&["show", "cgroup:x"]));
    assert_eq!(
        (code, &*said),
        (1, "plimsoll: error: no such control group is watched\n")
    );
}

#[test]
fn show_explains_each_term_and_the_curve_at_sizes_that_matter() {
    let server = Server::new(Manner::Willing);
    let web = server.text(&["show", "web"]);
    for part in [
        "VM web (process 1234), emulated (tcg): times do not carry over to real hardware\nsafe: it could give 120 MiB\n",
        "  own           512 MiB        of its own: RAM of 512 MiB less its balloon\n",
        "  needs         392 MiB        smallest size within its limit\n",
        "  max loss      25 %           most rise of its misses over those at the baseline\n",
        "  available     90 MiB         available memory reported by the guest 4 s ago\n",
        "Curve (from traps on its RAM, 123.5k references, 12 s old)\n",
        "    392 MiB  █▌                          6.0 %  1.20 (1.00 to 1.47)   smallest within its limit\n",
        "    512 MiB  █▎                          5.0 %  1.00 (1.00 to 1.00)   now, baseline\n",
    ] {
        assert!(web.contains(part), "{part}\n{web}");
    }
    assert!(web.lines().all(|line| line.chars().count() <= 100), "{web}");
    let without = server.text(&["show", HOSTILE]);
    let fixed = "  state         none           its size is fixed: it has none, or no monitor that can be used\n";
    assert!(without.contains(fixed), "{without}");
    let mail = server.text(&["show", "mail"]);
    assert!(mail.contains("uses          ≥ 300 MiB"), "{mail}");
    assert!(
        mail.contains("hits          75 %           of 1.2M blocks read came from it"),
        "{mail}"
    );
    let csv = server.text(&["show", "web", "-o", "csv"]);
    assert!(
        csv.starts_with(
            "size_bytes,miss_ratio,low,high,relative,misses_per_second,misses_low_per_second,\
             misses_high_per_second\n67108864,0.9,"
        ),
        "{csv}"
    );
    let json: Value = serde_json::from_str(&server.text(&["show", "web", "-o", "json"])).unwrap();
    assert_eq!((&json["schema"], &json["vm"]), (&1.into(), &"web".into()));
    assert_eq!(json["curve"]["points"].as_array().unwrap().len(), 7);
}

#[test]
fn a_report_of_nothing_is_json_and_names_the_reason() {
    let server = Server::new(Manner::Willing);
    let (code, text, said) = ran(&mut server.verb(&["report", "mrc", HOSTILE, "-o", "json"]));
    assert_eq!(
        (code, &*text),
        (
            Some(0),
            "null
"
        )
    );
    assert!(
        said.contains(
            ": its curve is not available yet
"
        ),
        "{said}"
    );
    let server = Server::new(Manner::Empty);
    for what in ["mrc", "wss"] {
        let (code, text, said) = ran(&mut server.verb(&["report", what, "-o", "json"]));
        assert_eq!(
            (code, &*text),
            (
                Some(0),
                "null
"
            ),
            "{what}"
        );
        assert!(said.contains("there is no VM"), "{what}: {said}");
    }
}

#[test]
fn a_name_that_attacks_the_terminal_reaches_it_defused() {
    let server = Server::new(Manner::Willing);
    for words in [
        &["vms"][..],
        &["vms", "-o", "csv"],
        &["show", HOSTILE],
        &["top", "--once"],
        &["report", "mrc"],
        &["report", "wss"],
        &["report", "rightsize"],
        &["report", "rightsize", "-o", "csv"],
        &["report", "overhead"],
        &["report", "promises"],
        &["explain", "mail"],
        &["set", HOSTILE, "--shares", "200"],
        &["whatif", HOSTILE, "--size", "256M"],
    ] {
        let text = server.text(words);
        assert!(!text.is_empty(), "{words:?}");
        assert_harmless(&text);
    }
    let csv = server.text(&["report", "rightsize", HOSTILE, "-o", "csv"]);
    assert!(
        csv.contains("\n\"db,\"\"\u{fffd}[2J\u{fffd}\u{fffd}1m\",unknown,"),
        "{csv}"
    );
    let (code, said) = failed(&mut server.verb(&["show", "no\u{1b}[2J"]));
    assert_eq!(code, 1);
    assert!(said.contains("there is no VM 'no\u{fffd}[2J'"), "{said}");
}

#[test]
fn a_vm_that_is_not_there_is_told_with_one_that_may_have_been_meant() {
    let server = Server::new(Manner::Willing);
    for words in [
        &["show", "wbe"][..],
        &["explain", "wbe"],
        &["set", "wbe", "--managed", "no"],
        &["whatif", "wbe", "--size", "1G"],
        &["report", "wss", "wbe"],
    ] {
        let said = "plimsoll: error: there is no VM 'wbe'; did you mean 'web'?\n";
        assert_eq!(
            failed(&mut server.verb(words)),
            (1, said.to_owned()),
            "{words:?}"
        );
    }
    let (_, said) = failed(&mut server.verb(&["show", "zzz"]));
    assert!(
        said.ends_with("'zzz'; `plimsoll vms` lists those that are\n"),
        "{said}"
    );
    // The VM is there, what was asked of it is not: the daemon's own words.
    let (_, said) = failed(&mut server.verb(&["report", "heatmap", HOSTILE]));
    assert_eq!(
        said,
        "plimsoll: error: it is not traced, so nobody knows where it is busy\n"
    );
}

#[test]
fn without_a_daemon_every_verb_ends_with_3_and_says_how_to_start_it() {
    for words in [
        &["vms"][..],
        &["show", "web"],
        &["top", "--once"],
        &["report", "mrc"],
        &["whatif", "--host-loses", "1G"],
        &["apply"],
        &["rollback"],
        &["explain", "web"],
        &["set", "web", "--reset"],
        &["pause"],
        &["resume"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command
            .args(words)
            .args(["--socket", "/nonexistent/plimsolld.sock"]);
        let (code, said) = failed(&mut command);
        assert_eq!(code, 3, "{words:?}");
        assert_eq!(
            said,
            "plimsoll: error: cannot reach plimsolld at /nonexistent/plimsolld.sock: No such file or directory \
             (os error 2); start it with `systemctl start plimsolld`, or name its socket with --socket PATH\n"
        );
    }
}

#[test]
fn an_answer_that_is_none_is_a_failure_that_leaves_the_terminal_alone() {
    let server = Server::new(Manner::Mad);
    let (code, said) = failed(&mut server.verb(&["vms"]));
    assert_eq!(code, 1);
    assert!(
        said.contains("no usable answer from plimsolld to GET /v1/host"),
        "{said}"
    );
}

#[test]
fn the_read_only_socket_shows_and_refuses_changes() {
    let server = Server::new(Manner::ReadOnly);
    assert!(server.text(&["vms"]).contains("web"));
    for words in [&["pause"][..], &["apply"], &["set", "web", "--shares", "7"]] {
        let (code, said) = failed(&mut server.verb(words));
        assert_eq!(code, 1, "{words:?}");
        let expected = "this socket only shows; changes go through /run/plimsoll/plimsolld.sock\n";
        assert!(said.ends_with(expected), "{said}");
    }
}

#[test]
fn what_a_guarantee_forbids_ends_with_4_and_the_reason() {
    let server = Server::new(Manner::Strict);
    for words in [
        &["apply"][..],
        &["rollback", "--decision", "12"],
        &["set", "web", "--min", "4G"],
    ] {
        let (code, said) = failed(&mut server.verb(words));
        assert_eq!(code, 4, "{words:?}");
        assert!(
            said.contains("web would miss 1.40 of what it was promised"),
            "{said}"
        );
        assert!(said.contains("nothing was moved"), "{said}");
    }
}

#[test]
fn a_vm_that_the_daemon_manages_is_not_shrunk_past_it() {
    let server = Server::new(Manner::Willing);
    let words = ["report", "wss", "web", "--compare", "--shrink"];
    let (code, said) = failed(&mut server.verb(&words));
    assert_eq!(code, 4, "{said}");
    assert!(
        said.contains("plimsolld manages the memory of VM web") && said.contains("plimsoll pause"),
        "{said}"
    );
    assert!(server.changes().is_empty());
}

#[test]
fn apply_waits_for_the_end_if_asked_and_tells_predicted_beside_measured() {
    let server = Server::new(Manner::Willing);
    let begun = server.text(&["apply"]);
    assert!(
        begun.starts_with(
            "Decision 12, 2026-11-22 11:21:55: memory is reallocated, by the daemon in mode act.\n"
        ),
        "{begun}"
    );
    assert!(begun.ends_with("  Memory is being moved.\n"), "{begun}");
    let (code, text, said) = ran(&mut server.verb(&["apply", "--decision", "12", "--wait"]));
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(
        said,
        "decision 12: moving memory\ndecision 12: memory was moved; measuring what came of it\n"
    );
    for part in [
        "  mail: 384 MiB -> 448 MiB (own 320 MiB -> 320 MiB, cache 64 MiB -> 128 MiB), done.\n",
        "  mail: predicted 1.08 (1.02 to 1.14) of the misses at its baseline, measured 0.81 by reads of its disk; limit 1.25: kept. measured for 60 s\n",
        "  web: predicted 1.08 (1.02 to 1.14) of the misses at its baseline, not measured;",
        "  It ended 2026-11-22 11:23:55: done; every VM that could be measured stayed within its limit.\n",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let json = server.text(&["rollback", "-o", "json"]);
    assert_eq!(serde_json::from_str::<Decision>(&json).unwrap().id, 12);
    let asked = [
        r#"POST /v1/apply {"decision":null}"#,
        r#"POST /v1/apply {"decision":12}"#,
        r#"POST /v1/rollback {"decision":null}"#,
    ];
    assert_eq!(server.changes(), asked);
}

#[test]
fn what_was_done_in_part_ends_with_5_and_shows_who_has_what() {
    let server = Server::new(Manner::Clumsy);
    let (code, text, said) = ran(&mut server.verb(&["apply", "--wait"]));
    assert_eq!(code, Some(5));
    assert_harmless(&text);
    let part =
        "stuck; has 384 MiB now: its balloon does not follow\u{fffd}[2J; it keeps what it has\n";
    assert!(text.contains(part), "{text}");
    assert!(
        said.contains("decision 12 was carried out in part"),
        "{said}"
    );
}

#[test]
fn who_no_longer_wants_to_wait_is_told_that_the_move_goes_on() {
    let server = Server::new(Manner::Slow);
    let child = server
        .verb(&["apply", "--wait"])
        .stderr(Stdio::piped())
        .spawn();
    let mut child = KilledOnDrop(child.unwrap());
    let mut said = BufReader::new(child.0.stderr.take().unwrap()).lines();
    // It waits from here on.
    while !said.next().unwrap().unwrap().contains("measuring") {}
    assert_eq!(child.end_by("-INT"), Some(1));
    let last = "plimsoll: error: no longer waiting; decision 12 goes on, and `plimsoll pause` would stop it";
    assert_eq!(said.next().unwrap().unwrap(), last);
}

#[test]
fn set_sends_what_was_named_and_nothing_else() {
    let server = Server::new(Manner::Willing);
    let text = server.text(&[
        "set",
        "web",
        "--min",
        "192M",
        "--max-loss",
        "5%",
        "--managed",
        "no",
    ]);
    assert_eq!(
        text,
        "web: 192 MiB to 512 MiB, baseline 512 MiB, promised at most 5 % more misses than at its baseline, \
         100 shares, not managed: the daemon moves none of its memory\n"
    );
    let asked = r#"PATCH /v1/vms/web {"reset":false,"min_bytes":201326592,"max_loss":0.05,"managed":false}"#;
    assert_eq!(server.changes(), [asked]);
    for words in [
        &["set", "web"][..],
        &["set", "web", "--min", "2G", "--max", "1G"],
        &["set", "web", "--shares", "0"],
        &["set", "web", "--max-loss", "-1%"],
        &["set", "web", "--max-loss", "5"],
        &["set", "", "--reset"],
    ] {
        assert_eq!(failed(&mut server.verb(words)).0, 2, "{words:?}");
    }
    assert_eq!(server.changes().len(), 1);
}

#[test]
fn pause_and_resume_say_what_holds_from_then_on() {
    let server = Server::new(Manner::Willing);
    assert_eq!(
        server.text(&["pause"]),
        "paused: nothing is moved until `plimsoll resume`\n"
    );
    assert_eq!(server.text(&["resume"]), "resumed\n");
    assert_eq!(
        server.changes(),
        ["POST /v1/pause {}", "POST /v1/resume {}"]
    );
}

#[test]
fn explain_tells_a_vms_part_of_each_decision() {
    let server = Server::new(Manner::Willing);
    let text = server.text(&["explain", "mail"]);
    assert!(
        text.starts_with("Decision 13, ") && text.contains("\n\nDecision 12, "),
        "{text}"
    );
    let text = server.text(&["explain", "web"]);
    assert!(text.starts_with("Decision 12, "), "{text}");
    assert!(
        text.contains("  Why: mail gains most by more; web loses least\n"),
        "{text}"
    );
    assert!(text.contains("  web: 576 MiB -> 512 MiB"), "{text}");
    assert!(!text.contains("  mail: "), "{text}");
    assert!(
        !server
            .text(&["explain", "mail", "--limit", "1"])
            .contains("Decision 12")
    );
    let csv = server.text(&["explain", "mail", "-o", "csv"]);
    let line = "12,1795346515000,divide,daemon,kept,mail,402653184,469762048,469762048,done,1.08,0.81,1.25,kept\n";
    assert!(csv.ends_with(line), "{csv}");
}

#[test]
fn whatif_answers_for_a_vm_and_for_the_host() {
    let server = Server::new(Manner::Willing);
    assert_eq!(
        server.text(&["whatif", "web", "--size", "384M"]),
        "web, 512 MiB -> 384 MiB: tight\n\
         misses per second: - now, 140 (9.2 to 23.5k) then\n\
         misses per second of vCPU time: - now, 280 (18 to 46.9k) then\n\
         misses over those at its baseline: 1.03 (0.98 to 1.08) now, 1.20 (1.10 to 1.24) then\n\
         its promise would just be kept\n"
    );
    let text = server.text(&["whatif", "--host-loses", "120M"]);
    assert_harmless(&text);
    let web = text.lines().find(|line| line.starts_with("web")).unwrap();
    assert!(
        web.contains("512 MiB  392 MiB") && web.ends_with("gives-to-its-bound"),
        "{text}"
    );
    assert!(
        text.ends_with(
            "geometric mean of the misses over those at the baselines: 1.00 now, 1.08 then\n"
        ),
        "{text}"
    );
    let csv = server.text(&["whatif", "--host-gains", "1G", "-o", "csv"]);
    assert!(
        csv.contains("\nweb,536870912,411041792,1.03,1.03,1.08,1.25,gives-to-its-bound,\n"),
        "{csv}"
    );
    let (code, said) = failed(&mut server.verb(&["whatif", "--host-loses", "1G"]));
    assert_eq!(code, 4);
    assert!(
        said.ends_with("the promises need 136 MiB more than there would be\n"),
        "{said}"
    );
    for words in [
        &["whatif"][..],
        &["whatif", "web"],
        &["whatif", "--size", "1G"],
        &["whatif", "web", "--host-loses", "1G"],
        &["whatif", "--host-loses", "9000000T"],
    ] {
        assert_eq!(failed(&mut server.verb(words)).0, 2, "{words:?}");
    }
}

#[test]
fn reports_come_as_tables_values_and_pictures() {
    let server = Server::new(Manner::Willing);
    let rightsize = server.text(&["report", "rightsize"]);
    assert!(
        rightsize.contains("\n120 MiB could be saved in all."),
        "{rightsize}"
    );
    let web = rightsize
        .lines()
        .find(|line| line.starts_with("web"))
        .unwrap();
    let words: Vec<_> = web.split_whitespace().collect();
    assert_eq!(
        words[1..],
        "safe 512 MiB 161 MiB 392 MiB 120 MiB 1.20 (1.10 to 1.24) 1.25"
            .split(' ')
            .collect::<Vec<_>>()
    );
    // The check of decision 12 found that of mail kept, and could not measure web. A proposal promises nothing.
    let promises = server.text(&["report", "promises", "-o", "csv"]);
    let rows: Vec<Vec<_>> = promises
        .lines()
        .map(|line| line.split(',').collect())
        .collect();
    assert_eq!(
        rows[0][..6],
        ["vm", "made", "kept", "broken", "unknown", "taken_back"]
    );
    let counts = |vm: &str| {
        rows.iter()
            .find(|row| row[0] == vm)
            .map(|row| row[1..6].to_vec())
    };
    assert_eq!(
        counts("mail"),
        Some(vec!["1", "1", "0", "0", "0"]),
        "{promises}"
    );
    assert_eq!(
        counts("web"),
        Some(vec!["1", "0", "0", "1", "0"]),
        "{promises}"
    );
    assert_eq!(
        counts("all"),
        Some(vec!["2", "1", "0", "1", "0"]),
        "{promises}"
    );
    let of_web = server.text(&["report", "promises", "web", "-o", "json"]);
    let of_web: serde_json::Value = serde_json::from_str(&of_web).unwrap();
    assert_eq!(
        (&of_web["all"]["made"], &of_web["vms"][0]["vm"]),
        (&1.into(), &"web".into())
    );
    let overhead = server.text(&["report", "overhead"]);
    assert!(
        overhead.contains(
            "The daemon: 12.5 ms for the last turn, 20 MiB resident, 3 MiB of history.\n"
        ),
        "{overhead}"
    );
    let wss = server.text(&["report", "wss", "web", "-o", "csv"]);
    assert!(
        wss.starts_with("vm,unix_ms,working_set_bytes,") && wss.lines().count() == 31,
        "{wss}"
    );
    let mrc = server.text(&["report", "mrc", "web", "-o", "csv"]);
    assert!(mrc.contains("\nweb,4096,16384,0.9,"), "{mrc}");
    assert_eq!(
        server
            .text(&["report", "mrc", "-o", "json"])
            .lines()
            .count(),
        3
    );
    for words in [
        &["mrc"][..],
        &["mrc", "web"],
        &["wss", "web"],
        &["wss"],
        &["heatmap", "web"],
    ] {
        let words: Vec<_> = [&["report"], words, &["-o", "svg"]].concat();
        assert!(server.text(&words).ends_with("</svg>\n"), "{words:?}");
    }
    let mut png = server.verb(&["report", "heatmap", "web", "-o", "png"]);
    assert!(png.output().unwrap().stdout.starts_with(b"\x89PNG"));
    let (code, said) = failed(&mut server.verb(&["report", "heatmap", "-o", "svg"]));
    assert_eq!(
        (code, &*said),
        (
            2,
            "plimsoll: error: a picture shows one VM: give its name\n"
        )
    );
}

#[test]
fn top_writes_a_frame_as_text_and_needs_a_terminal_otherwise() {
    let server = Server::new(Manner::Willing);
    let frame = server.text(&["top", "--once"]);
    assert_eq!(frame.lines().count(), 24);
    assert!(
        frame.starts_with("Plimsoll example  mode advise"),
        "{frame}"
    );
    let (code, said) = failed(&mut server.verb(&["top"]));
    assert_eq!(code, 2);
    assert!(said.contains("--once writes one frame as text"), "{said}");
}

#[test]
fn man_pages_and_completions_are_made_for_every_verb_that_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let generate = |what: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        let (code, _, said) = ran(command
            .args(["generate", what])
            .arg(folder.path().join(what)));
        assert_eq!((code, &*said), (Some(0), ""));
    };
    generate("man");
    generate("completions");
    let page = std::fs::read_to_string(folder.path().join("man/plimsoll-report-mrc.1")).unwrap();
    assert!(page.contains(".TH plimsoll-report-mrc 1"), "{page}");
    assert!(!folder.path().join("man/plimsoll-generate.1").exists());
    for shell in ["plimsoll.bash", "_plimsoll", "plimsoll.fish"] {
        let text = std::fs::read_to_string(folder.path().join("completions").join(shell)).unwrap();
        assert!(text.contains("rollback"), "{shell}");
    }
}
