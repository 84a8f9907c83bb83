//! The backend `damon` on a process and a control group, beside another user of DAMON, and after a tracer that was killed.

use plimsoll_rig::host;

use super::{V2, all_rows, run_in};

/// A kdamond that somebody else sets up and starts.
const ANOTHER: &str = r#"
admin=/sys/kernel/mm/damon/admin/kdamonds
echo 1 > $admin/nr_kdamonds
echo 1 > $admin/0/contexts/nr_contexts
echo vaddr > $admin/0/contexts/0/operations
echo 1 > $admin/0/contexts/0/targets/nr_targets
echo $pid > $admin/0/contexts/0/targets/0/pid_target
echo on > $admin/0/state
"#;

/// The last working set between two lines of the script's own, in pages. What it cost depends on what else the host does.
fn last_set(lines: &[String], from: &str, to: &str) -> f64 {
    let rows = all_rows(lines, from, to);
    let cost = rows.iter().map(|row| row.overhead).sum::<f64>() / rows.len() as f64;
    let last = rows.last().unwrap_or_else(|| panic!("{from}: no period"));
    println!(
        "{from}: {:.1} MiB, cost {:.2} %",
        last.pages / 256.0,
        cost * 100.0
    );
    last.pages
}

#[test]
fn damon_finds_a_working_set_leaves_others_alone_and_nothing_behind() {
    let script = format!(
        r"{V2}
$b mkdir -p /run
start small workload=sequential mib=64
echo process
attach $pid --backend damon --period 2s --periods 5 -o csv
echo group
attach cgroup:small --backend damon --period 2s --periods 3 -o csv
echo killed
/plimsoll attach $pid --backend damon --period 30s --periods 1 > /dev/null 2>&1 &
tracer=$!
$b sleep 4
attach $pid --backend damon --period 1s --periods 1
$b kill -9 $tracer
$b sleep 1
echo left $($b cat /sys/kernel/mm/damon/admin/kdamonds/0/state)
attach $pid --backend damon --period 1s --periods 1 -o csv
echo kdamonds $($b cat /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds)
echo another
{ANOTHER}
attach $pid --backend damon --period 1s --periods 1
/plimsoll doctor $pid
echo state $($b cat $admin/0/state)
"
    );
    // 48 pages are few: what a neighbour takes of the host's time shows.
    let Some(lines) = run_in(host::turn, None, &[], &[], "damon", &script) else {
        return;
    };
    let truth = 64.0 * 256.0;
    for (from, to) in [("process", "group"), ("group", "killed")] {
        let pages = last_set(&lines, from, to);
        // 48 pages in as many strata.
        assert!((pages / truth - 1.0).abs() < 0.07, "{from}: {pages} pages");
    }
    let says = |text: &str| lines.iter().any(|line| line.contains(text));
    assert!(
        says("in use by another tracer of Plimsoll (process"),
        "{lines:?}"
    );
    assert!(says("left on"), "{lines:?}");
    let after = lines.iter().skip_while(|line| *line != "left on");
    let exit = after.clone().find(|line| line.starts_with("exit "));
    assert_eq!(exit.unwrap(), "exit 0", "what was left is removed");
    assert!(says("kdamonds 0"), "{lines:?}");
    let others: Vec<_> = lines.iter().skip_while(|line| *line != "another").collect();
    let refused = others
        .iter()
        .filter(|line| line.contains("in use by kdamond.0 (process"));
    assert_eq!(refused.count(), 2, "by attach and by doctor");
    assert!(others.iter().any(|line| *line == "exit 1"));
    assert!(says("state on"), "it still runs");
}
