//! Processes and control groups in a guest whose kernel tracks idle pages: what `plimsoll attach` and `plimsolld` find of them there,
//! compared with what they are known to use.
//!
//! Each test boots a guest, whose `/init` is a shell script, and reads its console.

mod apparmor;
mod damon;
mod kvm;
mod page_cache;
mod starving;

use std::path::Path;
use std::time::{Duration, Instant};

use plimsoll_rig::{
    AcceleratorChoice, Guest, GuestConfig, GuestError, GuestImage, GuestKernel, host,
};
use plimsoll_skip::{Lack, guests_wanted, skip};

/// For a guest under TCG on a busy host.
const PATIENCE: Duration = Duration::from_secs(300);
/// Mounts, and a process in a new group: `start GROUP KEY=VALUE...`, whose process id is then `$pid`.
const BEGIN: &str = r#"
export b=/bin/busybox
$b mkdir -p /proc /sys /tmp /dev /cg
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
$b mount -t tmpfs tmp /tmp
echo 1 > /proc/sys/kernel/printk
start() {
    group=/cg/$1
    shift
    $b mkdir -p "$group"
    words=
    for word; do words="$words plimsoll.$word"; done
    # A log of its own: an earlier one would say that this process works before it does.
    started=$((started + 1))
    : > /tmp/log.$started
    $b sh -c "echo \$\$ > $group/cgroup.procs; exec /workload $words" > /tmp/log.$started 2>&1 &
    pid=$!
    while ! $b grep -q round /tmp/log.$started; do $b sleep 0.2; done
}
attach() { /plimsoll attach "$@" 2>&1; echo "exit $?"; }
"#;
/// Version 2, with memory counted in groups of two levels.
const V2: &str = r"
$b mount -t cgroup2 cg /cg
echo +memory > /cg/cgroup.subtree_control
$b mkdir /cg/web
echo +memory > /cg/web/cgroup.subtree_control
";
const V1: &str = "$b mount -t cgroup -o memory cg /cg\n";
const END: &str = "\necho finished\n$b poweroff -f\n";

/// What the script printed; `None` after saying why the test is skipped.
fn run(name: &str, script: &str) -> Option<Vec<String>> {
    run_with(&[], name, script)
}

/// The same with these programs beside `plimsoll`.
fn run_with(programs: &[&Path], name: &str, script: &str) -> Option<Vec<String>> {
    run_in(host::shared_turn, None, &[], programs, name, script)
}

/// The same when it is its turn, with a kernel of Debian, if one is given, and these arguments of QEMU.
fn run_in(
    turn: fn() -> host::Turn,
    kernel: Option<GuestKernel>,
    arguments: &[&str],
    programs: &[&Path],
    name: &str,
    script: &str,
) -> Option<Vec<String>> {
    if !guests_wanted() {
        return None;
    }
    if let Err(error) = host::installed(&[host::QEMU]) {
        skip(Lack::Live, error);
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_plimsoll"));
    let script = format!("{BEGIN}{script}{END}");
    let programs = [&[program], programs].concat();
    let image = match kernel {
        None => GuestImage::tracking_idle_pages(&script, &programs, folder.path()),
        Some(kernel) => GuestImage::with_script(kernel, &script, &programs, folder.path()),
    };
    let image = match image {
        Ok(image) => image,
        Err(error) => {
            skip(Lack::Program, format!("{error} (./dev setup builds it)"));
            return None;
        }
    };
    let _turn = turn();
    let config = GuestConfig {
        accelerator: AcceleratorChoice::Tcg,
        memory_mib: 768,
        extra_arguments: arguments.iter().copied().map(str::to_owned).collect(),
        ..GuestConfig::new(&format!("{name}-{}", std::process::id()), "")
    };
    let mut guest = Guest::start(&image, &config).unwrap();
    let deadline = Instant::now() + PATIENCE;
    let mut lines = Vec::new();
    loop {
        match guest.next_line(deadline.saturating_duration_since(Instant::now())) {
            Ok(Some(line)) => {
                println!("{}", line.text);
                lines.push(line.text);
            }
            Ok(None) => panic!("the guest is still not done"),
            Err(GuestError::GuestEnded { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let is_finished = lines.iter().any(|line| line == "finished");
    assert!(is_finished, "the script did not come to its end");
    Some(lines)
}

/// A period as `-o csv` prints it.
#[derive(Debug)]
struct Row {
    pages: f64,
    overhead: f64,
}

/// The periods between two lines of the script's own that have a working set.
fn all_rows(lines: &[String], from: &str, to: &str) -> Vec<Row> {
    let lines = lines.iter().skip_while(|line| *line != from).skip(1);
    let of_line = |line: &String| {
        let fields: Vec<_> = line.split(',').collect();
        fields.first()?.parse::<u64>().ok()?;
        Some(Row {
            pages: fields.get(2)?.parse().ok()?,
            overhead: fields.get(7)?.parse().ok()?,
        })
    };
    let lines = lines.take_while(|line| *line != to);
    lines.filter_map(of_line).collect()
}

/// The same without the first one, in which the interval is not yet adapted.
fn rows(lines: &[String], from: &str, to: &str) -> Vec<Row> {
    let mut rows = all_rows(lines, from, to);
    rows.drain(..rows.len().min(1));
    assert!(
        rows.len() >= 3,
        "{from}: too few periods with a working set"
    );
    rows
}

/// Checks the median working set against the truth; returns the median of its cost.
fn assert_found(rows: &[Row], mib: f64, off: f64) -> f64 {
    let truth = mib * 256.0;
    let found = plimsoll_rig::median(rows.iter().map(|row| row.pages));
    let error = found / truth - 1.0;
    let overhead = plimsoll_rig::median(rows.iter().map(|row| row.overhead));
    println!(
        "working set {:.2} MiB of {mib} MiB ({:+.1} %), overhead {:.2} %",
        found / 256.0,
        error * 100.0,
        overhead * 100.0
    );
    assert!(error.abs() < off, "{rows:?}");
    overhead
}

/// Checks the median working set against the truth, and the median of its cost.
fn assert_near(rows: &[Row], mib: f64, off: f64) {
    let overhead = assert_found(rows, mib, off);
    // A look is never cut short, so the last of a period may exceed the budget.
    assert!(overhead < 0.0125, "{rows:?}");
}

#[test]
fn the_working_set_of_a_process_with_private_memory_is_found_within_a_twentieth() {
    let script = format!(
        r"{V2}
start small workload=sequential mib=64
echo sequential
attach $pid --backend idle --period 4s --periods 5 -o csv
$b kill $pid
start large workload=uniform mib=160
echo uniform
attach $pid --backend idle --period 4s --periods 5 --budget 1% -o csv
echo auto
attach $pid --period 2s --periods 1
attach $pid --backend trap
"
    );
    let Some(lines) = run("process", &script) else {
        return;
    };
    assert_near(&rows(&lines, "sequential", "uniform"), 64.0, 0.05);
    // 5 % of the visits miss in a memory that holds 95 % of the pages.
    assert_near(&rows(&lines, "uniform", "auto"), 160.0 * 0.95, 0.05);
    let says = |text: &str| lines.iter().any(|line| line.contains(text));
    assert!(says("Backend idle chosen: Idle pages"), "{lines:?}");
    assert!(
        says("is not a VM, and this backend observes only RAM of VMs"),
        "{lines:?}"
    );
}

#[test]
fn a_control_group_is_found_with_the_groups_below_it_in_both_versions() {
    for (version, mounts) in [("v2", V2), ("v1", V1)] {
        let script = format!(
            r"{mounts}
start web/a workload=sequential mib=48
start web/b workload=sequential mib=32
start other workload=sequential mib=64
echo both
attach cgroup:web --backend idle --period 4s --periods 5 -o csv
echo one
attach cgroup:/cg/web/b --backend idle --period 4s --periods 5 -o csv
echo doctor
/plimsoll doctor cgroup:web
attach cgroup:none
"
        );
        let Some(lines) = run(version, &script) else {
            return;
        };
        assert_near(&rows(&lines, "both", "one"), 80.0, 0.05);
        assert_near(&rows(&lines, "one", "doctor"), 32.0, 0.05);
        let says = |text: &str| lines.iter().any(|line| line.contains(text));
        assert!(says("3 groups, 2 processes"), "{lines:?}");
        assert!(says(r#"there is no control group "none""#), "{lines:?}");
        assert!(
            says("is a control group, and this backend observes processes"),
            "{lines:?}"
        );
    }
}

/// The value of a key in the last line of JSON that has it.
fn last_number(lines: &[String], from: &str, key: &str) -> f64 {
    let key = format!("\"{key}\":");
    let lines = lines.iter().skip_while(|line| *line != from).skip(1);
    let values = lines.filter_map(|line| {
        let (_, rest) = line.split_once(&key)?;
        rest.split([',', '}']).next()?.parse().ok()
    });
    values.last().unwrap_or_else(|| panic!("{from}: no {key}"))
}

#[test]
fn page_cache_huge_pages_and_swapped_pages_are_counted_apart() {
    let script = format!(
        r#"{V2}
$b mkdir -p /cg/web/reader
$b sh -c 'echo $$ > /cg/web/reader/cgroup.procs
    $b dd if=/dev/zero of=/tmp/file bs=1M count=40 2>/dev/null
    while true; do $b cat /tmp/file > /dev/null; done' &
reader=$!
$b sleep 5
echo cache
attach cgroup:web/reader --backend idle --period 4s --periods 5 -o csv
attach cgroup:web/reader --backend idle --period 2s --periods 1 -o json
$b kill $reader
echo always > /sys/kernel/mm/transparent_hugepage/enabled
start huge workload=sequential mib=64
echo huge
attach $pid --backend idle --period 4s --periods 4 -o csv
attach $pid --backend idle --period 2s --periods 1 -o json
$b kill $pid
echo never > /sys/kernel/mm/transparent_hugepage/enabled
$b mkswap /dev/ram0 > /dev/null && $b swapon /dev/ram0
start swapped workload=sequential mib=24
$b kill -STOP $pid
echo 3M > /cg/swapped/memory.reclaim
echo swapped
attach $pid --backend idle --period 2s --periods 1 -o json --rate 1/4 --rate-rule fixed
"#
    );
    let Some(lines) = run("kinds", &script) else {
        return;
    };
    assert_near(&rows(&lines, "cache", "huge"), 40.0, 0.05);
    let share = |from: &str, kind: &str| {
        last_number(&lines, from, kind) / last_number(&lines, from, "tracked_pages")
    };
    let until = |to: &str| -> Vec<String> {
        lines
            .iter()
            .take_while(|line| *line != to)
            .cloned()
            .collect()
    };
    let (cache, huge) = (until("huge"), until("swapped"));
    let cached =
        last_number(&cache, "cache", "cache_pages") / last_number(&cache, "cache", "tracked_pages");
    assert!(cached > 0.9, "{cached} of the pages are page cache");
    let huge =
        last_number(&huge, "huge", "huge_pages") / last_number(&huge, "huge", "tracked_pages");
    assert!(huge > 0.9, "{huge} of the pages lie in huge pages");
    let swapped = share("swapped", "swapped_pages");
    assert!(swapped > 0.05, "{swapped} of the pages are swapped out");
    assert_near(&rows(&lines, "huge", "swapped"), 64.0, 0.05);
}

#[test]
fn a_process_that_executes_another_program_and_a_group_that_is_removed_are_noticed() {
    let script = format!(
        r"{V2}
$b mkdir /cg/turns
$b mkfifo /tmp/go
$b sh -c 'echo $$ > /cg/turns/cgroup.procs
    read line < /tmp/go
    exec /workload plimsoll.workload=sequential plimsoll.mib=56' > /dev/null &
pid=$!
$b sleep 1
($b sleep 3; echo go > /tmp/go) &
echo turns
attach $pid --backend idle --period 4s --periods 6 -o csv
$b kill $pid
echo empty
attach cgroup:turns --backend idle --period 1s --periods 2
($b sleep 3; $b rmdir /cg/turns) &
echo removed
attach cgroup:turns --backend idle --period 1s --periods 20
"
    );
    let Some(lines) = run("turns", &script) else {
        return;
    };
    let found = rows(&lines, "turns", "empty");
    assert_near(&found, 56.0, 0.05);
    let after = |from| {
        let at = lines.iter().position(|line| line == from);
        &lines[at.unwrap()..]
    };
    let exit_after = |from| {
        let mut lines = after(from).iter();
        lines.find(|line| line.starts_with("exit ")).unwrap()
    };
    assert_eq!(exit_after("empty"), "exit 0");
    let is_removed = |line: &String| line.contains("control group /cg/turns was removed");
    assert!(after("removed").iter().any(is_removed), "{lines:?}");
    assert_eq!(exit_after("removed"), "exit 0");
}

/// What the script printed between two of its own lines.
fn between<'a>(lines: &'a [String], from: &str, to: &str) -> Vec<&'a str> {
    let lines = lines.iter().map(String::as_str);
    let mut lines = lines.skip_while(|line| *line != from).skip(1);
    lines.by_ref().take_while(|line| *line != to).collect()
}

#[test]
fn the_daemon_watches_groups_and_follows_them_as_they_come_and_go() {
    let daemon = Path::new(env!("CARGO_BIN_EXE_plimsoll")).with_file_name("plimsolld");
    if !daemon.exists() {
        skip(
            Lack::Program,
            "plimsolld is not built: cargo build -p plimsoll-daemon",
        );
        return;
    }
    let script = format!(
        r#"{V2}
cat() {{ $b cat "$@"; }}
ask() {{ /plimsoll "$@" --socket /tmp/socket 2>&1; echo "exit $?"; }}
start web/small.service workload=sequential mib=32
small=$pid
start web/large.service workload=sequential mib=96
$b mkdir /cg/web/empty.service
cat > /tmp/plimsoll.toml << END
turn_interval = "1s"
[trace]
period = "3s"
window = "12s"
budget = "3%"
[history]
file = "/tmp/history"
[serve]
socket = "/tmp/socket"
read_only_socket = "none"
[groups]
watch = ["web/*.service"]
max = 2
END
/plimsolld --config /tmp/plimsoll.toml > /tmp/daemon 2>&1 &
daemon=$!
while ! /plimsoll vms --socket /tmp/socket -o csv 2> /dev/null | $b grep -q "small.service.*,tracing,"; do $b sleep 1; done
$b sleep 10
echo vms
ask vms -o csv
ask vms
echo show
ask show small.service
echo refused
ask whatif large.service --size 1G
ask set large.service --shares 7
echo history
ask report wss cgroup:/web/large.service -o csv
echo gone
$b kill $small
while ! $b rmdir /cg/web/small.service; do $b sleep 0.2; done 2> /dev/null
$b sleep 4
ask vms -o csv
ask show cgroup:/web/small.service
echo again
start web/small.service workload=sequential mib=32
$b kill $(cat /cg/web/large.service/cgroup.procs)
while ! $b rmdir /cg/web/large.service; do $b sleep 0.2; done 2> /dev/null
$b sleep 4
ask report wss cgroup:/web/small.service -o csv
echo end
$b kill $daemon
wait $daemon
cat /tmp/daemon
$b sleep 3
$b ps | $b grep -c "[p]limsoll attach"
"#
    );
    let Some(lines) = run_with(&[&daemon], "daemon", &script) else {
        return;
    };
    let field = |line: &str, index: usize| line.split(',').nth(index).unwrap().to_owned();
    let listed = between(&lines, "vms", "show");
    let row = |name: &str| {
        let mut rows = listed.iter().filter(|line| line.starts_with(name));
        *rows.next().unwrap_or_else(|| panic!("{name}: {listed:?}"))
    };
    for (name, mib) in [("small.service", 32.0), ("large.service", 96.0)] {
        let bytes: f64 = field(row(name), 8).parse().unwrap();
        let error = bytes / (mib * f64::from(1 << 20)) - 1.0;
        println!(
            "{name}: working set {:.1} MiB of {mib} ({:+.1} %)",
            bytes / f64::from(1 << 20),
            error * 100.0
        );
        assert!(error.abs() < 0.1, "{}", row(name));
        assert!(
            row(name).contains(&format!(",systemd,/web/{name},")),
            "{}",
            row(name)
        );
    }
    assert!(
        listed
            .iter()
            .any(|line| line.contains("not watched: /web/empty.service: no more than 2 groups")),
        "{listed:?}"
    );
    let shown = between(&lines, "show", "refused");
    for part in [
        "control group small.service (systemd), version 2: only observed",
        "/web/small.service",
        "Curve (from",
    ] {
        assert!(
            shown.iter().any(|line| line.contains(part)),
            "{part}: {shown:?}"
        );
    }
    let refused = between(&lines, "refused", "history");
    assert_eq!(
        refused.iter().filter(|line| **line == "exit 4").count(),
        2,
        "{refused:?}"
    );
    let history = between(&lines, "history", "gone");
    assert!(
        history.len() > 8 && history.contains(&"exit 0"),
        "{history:?}"
    );
    // The place of the one that went is taken.
    let gone = between(&lines, "gone", "again");
    assert!(
        gone.iter().any(|line| line.starts_with("empty.service,")),
        "{gone:?}"
    );
    assert!(
        gone.iter().all(|line| !line.starts_with("small.service,")),
        "{gone:?}"
    );
    assert!(gone.contains(&"exit 1"), "{gone:?}");
    // One that was made again goes on with the history of its path.
    let again = between(&lines, "again", "end");
    let times: Vec<u64> = again
        .iter()
        .filter_map(|line| line.split(',').nth(1)?.parse().ok())
        .collect();
    let gap = times
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .max()
        .unwrap();
    assert!(times.len() > 8 && gap > 3000, "{again:?}");
    let end = between(&lines, "end", "finished");
    assert!(
        end.iter().any(|line| line.contains("plimsolld ends")),
        "{end:?}"
    );
    assert_eq!(end.last(), Some(&"0"), "no tracer is left: {end:?}");
}

#[test]
fn other_users_of_the_marks_and_callers_without_rights_are_told_apart() {
    let script = format!(
        r#"{V2}
start web/a workload=sequential mib=32
echo moved
($b sleep 5; for turn in 1 2 3 4 5 6 7 8; do echo 1 > /proc/sys/vm/compact_memory; $b sleep 1; done) &
attach $pid --backend idle --period 4s --periods 5 -o csv
echo damon
$b mkfifo /tmp/never
kdamonds=/sys/kernel/mm/damon/admin/kdamonds
echo 1 > $kdamonds/nr_kdamonds
context=$kdamonds/0/contexts/0
echo 1 > $kdamonds/0/contexts/nr_contexts
echo vaddr > $context/operations
echo 1 > $context/targets/nr_targets
echo $pid > $context/targets/0/pid_target
echo on > $kdamonds/0/state
$b sleep 1
attach cgroup:web --backend idle --period 1s --periods 1
echo off > $kdamonds/0/state
echo 0 > $kdamonds/nr_kdamonds
echo marks
$b sh -c 'exec 9<> /sys/kernel/mm/page_idle/bitmap; read line < /tmp/never' &
marker=$!
$b sleep 1
attach cgroup:web --backend idle --period 1s --periods 1
attach $pid --backend idle --period 1s --periods 1
$b kill $marker
echo rights
$b mkdir -p /etc
echo "nobody:x:65534:65534::/:/bin/busybox" > /etc/passwd
$b chmod 755 /plimsoll /workload
nobody() {{ $b su -s /bin/sh nobody -c "$1" 2>&1; echo "exit $?"; }}
$b ln -sf /bin/busybox /bin/sh
nobody "/plimsoll attach cgroup:web --backend idle --periods 1"
nobody "/plimsoll attach $pid --backend idle --periods 1"
nobody "/plimsoll attach $pid --periods 1"
echo again
echo "$pid"
attach $pid@1 --periods 1
echo forks
$b mkdir /cg/forks
$b sh -c 'echo $$ > /cg/forks/cgroup.procs
    for child in 1 2 3 4 5 6 7 8; do /workload plimsoll.workload=sequential plimsoll.mib=4 > /dev/null & done
    exec /workload plimsoll.workload=sequential plimsoll.mib=4' > /dev/null &
$b sleep 6
attach cgroup:forks --backend idle --period 4s --periods 5 -o csv
"#
    );
    let Some(lines) = run("marks", &script) else {
        return;
    };
    // A page that is moved keeps its mark.
    assert_near(&rows(&lines, "moved", "damon"), 32.0, 0.05);
    let says = |from: &str, to: &str, text: &str| {
        let part = between(&lines, from, to);
        assert!(
            part.iter().any(|line| line.contains(text)),
            "{text}: {part:?}"
        );
    };
    let exits = |from: &str, to: &str, code: &str, count: usize| {
        let part = between(&lines, from, to);
        assert_eq!(
            part.iter().filter(|line| **line == code).count(),
            count,
            "{part:?}"
        );
    };
    says("damon", "marks", "DAMON runs on this host (process ");
    exits("damon", "marks", "exit 0", 1);
    says("marks", "rights", "pages are marked idle by process");
    exits("marks", "rights", "exit 1", 2);
    says(
        "rights",
        "again",
        "no privilege to open /sys/kernel/mm/page_idle/bitmap",
    );
    says("rights", "again", "not permitted to read");
    exits("rights", "again", "exit 1", 3);
    says("again", "forks", "exit 1");
    // Children of a group are its own, whoever started them.
    assert_near(&rows(&lines, "forks", "finished"), 36.0, 0.15);
}
