//! VMs under KVM, in an emulated guest whose processor has AMD's SVM with nested page tables: QEMU as it comes, and a Linux with the
//! module kvm_amd. The VM is a guest without an operating system (`guest/kvm`).

use std::fs;
use std::path::Path;

use plimsoll_rig::host;

use super::{all_rows, assert_found, rows, run_in};

/// `vm NAME WORKLOAD ARGUMENT...`: a VM of 192 MiB with small pages, under KVM or `$accel`, of which `$vm` is then the process.
const VM: &str = r#"
echo never > /sys/kernel/mm/transparent_hugepage/enabled
vm() {
    name=$1 words=$2
    shift 2
    /qemu-system-x86_64 -name $name -accel ${accel:-kvm} -cpu qemu64,-cx16,-svm -m 192M -display none -nodefaults -no-reboot \
        -serial file:/tmp/$name -bios /guest.rom -fw_cfg "name=opt/plimsoll/workload,string=workload=$words" "$@" &
    vm=$!
    $b touch /tmp/$name
    while ! $b grep -q round /tmp/$name; do $b sleep 0.2; done
}
"#;
/// Ends the VM, after checking that it still runs and found its memory as it left it.
pub const LEAVE: &str = r#"
$b sleep 1
before=$($b grep -c round /tmp/$name)
$b sleep 2
after=$($b grep -c round /tmp/$name)
[ "$after" -gt "$before" ] && ! $b grep -q MISMATCH /tmp/$name && echo sound $name
$b kill $vm
# What QEMU says of that is not to lie within another line.
wait $vm
"#;

fn run(name: &str, script: &str) -> Option<Vec<String>> {
    // One for the VM, one for the tracer: as they run by turns, the tracer's time is the VM's.
    let processor = ["-cpu", "qemu64,-cx16,+svm,+npt", "-smp", "2"];
    run_vms(host::turn, &processor, &[], name, script)
}

/// Runs a script that starts VMs, with these programs beside `plimsoll` and QEMU.
pub fn run_vms(
    turn: fn() -> host::Turn,
    arguments: &[&str],
    programs: &[&Path],
    name: &str,
    script: &str,
) -> Option<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    let rom = folder.path().join("guest.rom");
    fs::write(&rom, plimsoll_rig::BARE_GUEST_IMAGE).unwrap();
    let own = [Path::new("/usr/bin/qemu-system-x86_64"), &rom];
    let programs = [&own, programs].concat();
    let script = format!("{VM}{script}");
    run_in(turn, None, arguments, &programs, name, &script)
}

pub fn assert_sound(lines: &[String], name: &str) {
    let sound = format!("sound {name}");
    assert!(lines.contains(&sound), "{name} was harmed");
}

#[test]
fn the_working_set_of_a_vm_with_private_memory_is_found_within_a_twentieth() {
    let script = format!(
        r#"
vm small "sequential mib=64"
echo sequential
attach $vm --backend idle --period 4s --periods 5 --budget 2% -o csv
{LEAVE}
vm large "uniform mib=128 write_ratio=0.2"
echo uniform
attach $vm --backend idle --period 4s --periods 5 --budget 2% -o csv
echo auto
attach $vm --period 2s --periods 1
{LEAVE}
"#
    );
    let Some(lines) = run("kvm-private", &script) else {
        return;
    };
    assert_found(&rows(&lines, "sequential", "uniform")[1..], 64.0, 0.05);
    // 5 % of the visits miss in a memory that holds 95 % of the pages.
    assert_found(&rows(&lines, "uniform", "auto")[1..], 128.0 * 0.95, 0.05);
    let is_printed = |text: &str| lines.iter().any(|line| line.contains(text));
    assert!(is_printed("MiB of RAM, vCPUs unknown"), "{lines:?}");
    assert!(is_printed("Backend idle chosen: Idle pages"), "{lines:?}");
    assert_sound(&lines, "small");
    assert_sound(&lines, "large");
}

#[test]
fn backends_trace_a_vm_and_leave_it_as_it_was_also_when_they_are_killed() {
    const BACKENDS: [&str; 6] = [
        "trap",
        "scan",
        "first-touch",
        "write-scan",
        "sample",
        "damon",
    ];
    let backends = BACKENDS.join(" ");
    let script = format!(
        r#"
vm shared "uniform mib=64 write_ratio=0.2" -machine q35,memory-backend=ram \
    -object memory-backend-memfd,id=ram,size=192M,share=on
for backend in {backends}; do
    echo killed $backend
    /plimsoll attach $vm --backend $backend --period 1s -o csv > /tmp/killed 2>&1 &
    tracer=$!
    while ! $b grep -q ^0, /tmp/killed; do $b sleep 0.1; done
    $b kill -9 $tracer
    $b sleep 1
    echo backend $backend
    attach $vm --backend $backend --period 2s --periods 3 --budget 20% -o csv
done
echo done
{LEAVE}
"#
    );
    let Some(lines) = run("kvm-shared", &script) else {
        return;
    };
    assert_sound(&lines, "shared");
    let is_traced = |line: &&String| *line == "exit 0";
    assert_eq!(lines.iter().filter(is_traced).count(), BACKENDS.len());
    for [backend, next] in [["trap", "scan"], ["scan", "first-touch"]] {
        let [from, to] = [format!("backend {backend}"), format!("killed {next}")];
        // In the first period the rate is not yet adapted.
        assert_found(&all_rows(&lines, &from, &to)[1..], 64.0 * 0.95, 0.05);
    }
}
