//! The backend `page-cache` on control groups whose processes read files: its curves compared with closed forms, and with the misses that
//! are counted when a group gets less memory.

use std::path::Path;

use plimsoll_flow::{MissRatioCurve, PageCount};
use plimsoll_protocol::tracer::TracerLine;
use plimsoll_rig::{GuestKernel, host, make_image};
use plimsoll_skip::{Lack, skip};

use super::{V1, V2, between, run_in};

/// Pages of a file that is read: 16 MiB, each of which an emulated guest on a loaded host reads several times in some seconds.
const PAGES: u64 = 4_096;
/// The same where limits of a group's memory are to be less: 40 MiB.
const LIMITED_PAGES: u64 = 10_240;
/// Limits of a group's memory in which the curve is compared with the misses counted.
const LIMITS_MIB: [u64; 5] = [32, 26, 20, 15, 11];
/// A file of a disk for each group, and a process in the group that reads it; and the counts that it printed last.
const FILES: &str = r#"
$b mkdir -p /disk /run
$b mount -t ext4 /dev/nvme0n1 /disk
file() { $b dd if=/dev/zero of=/disk/$1 bs=4096 count=$PAGES 2>/dev/null; }
reads() {
    group=/cg/$1
    $b mkdir -p $group
    $b sh -c "echo \$\$ > $group/cgroup.procs
        /plimsoll trace generate $3 --pages $PAGES --references 1000000000 --scramble --out - | /replay_reads /disk/$2" > /tmp/log.$2 2>&1 &
}
# Consoles have lines of limited length.
curve() {
    echo $1
    shift
    /plimsoll attach cgroup:"$@" --backend page-cache -o json 2>&1 > /tmp/json
    $b tail -n 1 /tmp/json | $b fold -w 1000
    echo
}
counts() { echo $1 $($b tail -n 1 /tmp/log.$2); }
emptied() { $b sync; echo 3 > /proc/sys/vm/drop_caches; }
"#;

/// Runs a script in a guest with an empty disk, whose files have so many pages.
fn run(kernel: GuestKernel, name: &str, pages: u64, script: &str) -> Option<Vec<String>> {
    let plimsoll = Path::new(env!("CARGO_BIN_EXE_plimsoll"));
    let reader = plimsoll.with_file_name("examples").join("replay_reads");
    if !reader.exists() {
        skip(
            Lack::Program,
            "replay_reads is not built: cargo build -p plimsoll-trap --examples",
        );
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    make_image(&disk, 512, true).unwrap();
    let drive = format!("file={},format=raw,if=none,id=cache", disk.display());
    let device = ["-drive", &drive, "-device", "nvme,drive=cache,serial=cache"];
    let script = format!("PAGES={pages}\n{FILES}{script}");
    run_in(
        host::shared_turn,
        Some(kernel),
        &device,
        &[&reader],
        name,
        &script,
    )
}

/// The curve that the script printed under a name.
fn curve(lines: &[String], name: &str) -> MissRatioCurve {
    let line = between(lines, name, "").concat();
    match TracerLine::read(line.as_bytes()) {
        Ok(TracerLine::Final(line)) => line.curve.unwrap().to_curve().unwrap(),
        other => panic!("{name}: {other:?}"),
    }
}

/// Checks the curve of uniform reads of so many pages.
fn assert_uniform(curve: &MissRatioCurve, pages: u64) {
    for eighth in 1..8 {
        let size = pages * eighth / 8;
        let (found, truth) = (curve.miss_ratio(PageCount(size)), 1.0 - eighth as f64 / 8.0);
        println!("{size} pages: {found:.3}, truth {truth:.3}");
        assert!((found - truth).abs() < 0.06, "{size}: {found}, not {truth}");
    }
}

#[test]
fn a_group_has_the_uses_of_those_below_it_and_of_no_other_in_both_versions() {
    for (kernel, version, mounts) in [
        (GuestKernel::V6_1, "v1", V1),
        (GuestKernel::V6_12, "v2", V2),
    ] {
        let script = format!(
            r"{mounts}
for name in a b c; do file $name; done
emptied
reads web/a a uniform
reads web/b b uniform
reads other c uniform
$b sleep 3
curve both web --period 3s --periods 3 --budget 30%
curve one web/b --period 3s --periods 3 --budget 30%
attach cgroup:web/b --period 2s --periods 2
attach 1 --backend page-cache
$b mkdir /cg/removed
(until $b grep -q '^ *1 ' /tmp/removed; do $b sleep 1; done; $b rmdir /cg/removed) &
attach cgroup:removed --backend page-cache --period 1s --periods 60 > /tmp/removed
$b cat /tmp/removed
"
        );
        let Some(lines) = run(kernel, version, PAGES, &script) else {
            return;
        };
        assert_uniform(&curve(&lines, "both"), 2 * PAGES);
        assert_uniform(&curve(&lines, "one"), PAGES);
        let says = |text: &str| {
            let is_said = lines.iter().any(|line| line.contains(text));
            assert!(is_said, "not said: {text}");
        };
        // By itself DAMON is preferred, where the kernel has it.
        says(match kernel {
            GuestKernel::V6_1 => "Backend page-cache chosen",
            GuestKernel::V6_12 => "Backend damon chosen",
        });
        says("uses of sampled pages, 0 lost");
        says("process 1 is not a control group");
        says("control group /cg/removed was removed");
    }
}

/// What a reader had printed: reads, and those of them that the page cache did not serve.
fn counts(lines: &[String], from: &str) -> [f64; 2] {
    let line = lines.iter().find_map(|line| line.strip_prefix(from));
    let words: Vec<_> = line
        .unwrap_or_else(|| panic!("no {from}"))
        .split(' ')
        .collect();
    [1, 3].map(|at| words[at].parse().unwrap())
}

#[test]
fn misses_in_less_memory_are_those_of_the_curve() {
    let patterns = ["uniform", "zipf"];
    let mut script = V2.to_owned();
    let of_each = |script: &mut String, text: &dyn Fn(&str) -> String| {
        script.extend(patterns.iter().map(|pattern| text(pattern)));
    };
    of_each(&mut script, &|pattern| format!("file {pattern}\n"));
    of_each(&mut script, &|pattern| {
        format!("emptied\nreads {pattern} {pattern} {pattern}\n$b sleep 8\n")
    });
    of_each(&mut script, &|pattern| {
        format!("curve {pattern} {pattern} --period 10s --periods 2 --budget 20%\n")
    });
    for limit in LIMITS_MIB {
        of_each(&mut script, &|pattern| {
            format!("echo {limit}M > /cg/{pattern}/memory.max\n")
        });
        script.push_str("$b sleep 4\n");
        of_each(&mut script, &|pattern| {
            format!(
                "counts {pattern}{limit}-from {pattern}
echo {pattern}{limit}-size $($b grep '^file ' /cg/{pattern}/memory.stat)\n"
            )
        });
        script.push_str("$b sleep 6\n");
        of_each(&mut script, &|pattern| {
            format!("counts {pattern}{limit}-to {pattern}\n")
        });
    }
    let Some(lines) = run(GuestKernel::V6_12, "limits", LIMITED_PAGES, &script) else {
        return;
    };
    for pattern in patterns {
        let curve = curve(&lines, pattern);
        for limit in LIMITS_MIB {
            let at = format!("{pattern}{limit}");
            let [from, to] = ["from", "to"].map(|end| counts(&lines, &format!("{at}-{end} ")));
            let measured = (to[1] - from[1]) / (to[0] - from[0]);
            let size = format!("{at}-size file ");
            let size = lines.iter().find_map(|line| line.strip_prefix(&size));
            let pages = PageCount(size.unwrap().parse::<u64>().unwrap() / 4096);
            let predicted = curve.miss_ratio(pages);
            println!(
                "{pattern}: {:.1} MiB of page cache: predicted {predicted:.3}, measured {measured:.3} of {} reads",
                pages.0 as f64 / 256.0,
                to[0] - from[0]
            );
            assert!((predicted - measured).abs() < 0.05, "{at} MiB");
        }
    }
}
