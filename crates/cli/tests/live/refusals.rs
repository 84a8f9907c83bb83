//! What cannot be traced is refused in words that say why, and goes on as if nobody had asked;
//! and what can be, though it takes a detour.

use std::fs;
use std::path::Path;
use std::process::Command;

use plimsoll_rig::{GuestConfig, Subject};
use plimsoll_skip::{Lack, skip, write_program};

use crate::rig::{
    Attach, EVERYTHING, Ground, PLIMSOLL, boot_with, make_readable, quiet_ground, shared_ground,
};

/// Fails unless the command ends with 1, without output and in words that hold all of `words`.
pub fn assert_refused(attach: Attach, words: &[&str]) {
    let ended = attach.end();
    let complaint = &ended.complaint;
    assert_eq!(ended.code, Some(1), "{complaint}");
    assert!(ended.lines.is_empty(), "{:?}", ended.lines);
    assert!(complaint.starts_with("plimsoll: error: "), "{complaint}");
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
    for word in words {
        assert!(complaint.contains(word), "{word:?} is not in: {complaint}");
    }
}

/// A workload that verifies all it touches.
pub const WORKLOAD: &str = "workload=uniform mib=32 write_ratio=0.5";

#[test]
fn of_private_ram_the_writes_are_chosen_and_a_curve_is_refused_with_the_way_to_start_the_vm() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut guest = boot_with(&ground, &[], &["-m", "192M"], WORKLOAD);
    let footprint = guest.footprint();
    for options in ["", "--backend auto --curve"] {
        assert_refused(
            Attach::start(&guest.pid(), options),
            &["private memory", "-object memory-backend-memfd", "share=on"],
        );
    }
    guest.assert_left_as(&footprint);
    let ended = Attach::start(&guest.pid(), "--backend auto --period 1s --periods 1").end();
    ended.assert_quiet_success();
    assert_eq!(ended.lines[0].json["method"], "write-scan");
    guest.assert_left_as(&footprint);
    guest.assert_goes_on();
}

#[test]
fn locked_ram_is_refused() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let config = GuestConfig {
        extra_arguments: ["-overcommit", "mem-lock=on"].map(str::to_owned).to_vec(),
        ..ground.guest("locked", WORKLOAD)
    };
    let mut subject = ground.boot_as(&config);
    let footprint = subject.footprint();
    assert_refused(
        Attach::start(&subject.pid(), ""),
        &["locked in memory", "mem-lock=on"],
    );
    subject.assert_left_as(&footprint);
    subject.assert_no_trap_is_left();
    subject.assert_goes_on();
}

#[test]
fn a_second_tracer_is_refused_and_the_first_goes_on() {
    let Some(ground) = shared_ground() else {
        return;
    };
    let mut subject = ground.boot("second", WORKLOAD);
    let footprint = subject.footprint();
    let first = Attach::start(&subject.pid(), &format!("{EVERYTHING} --period 500ms"));
    first.next();
    assert_refused(
        Attach::start(&subject.pid(), ""),
        &["another userfaultfd", "wait for it to end"],
    );
    // The one under way when the other came, and one after it.
    for _ in 0..2 {
        let period = first.next();
        assert!(period.number("traps") > 0.0, "{}", period.json);
    }
    first.interrupt();
    first.end().assert_quiet_success();
    subject.assert_left_as(&footprint);
    subject.assert_goes_on();
    subject.assert_no_trap_is_left();
}

#[test]
fn what_is_no_vm_is_refused_by_name() {
    assert_refused(
        Attach::start("a-name-nobody-has", ""),
        &["no running VM is named \"a-name-nobody-has\"", "running: "],
    );
    let this = std::process::id().to_string();
    let said = format!("process {this} is not a VM, and this backend observes only RAM of VMs");
    assert_refused(Attach::start(&this, ""), &[&said]);
    // Process ids end at 2^22 on Linux.
    assert_refused(
        Attach::start("4194305", ""),
        &["there is no process 4194305"],
    );
}

/// Words before a command that make it run as a user without any privilege.
pub const AS_NOBODY: [&str; 4] = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
];

/// Whether commands can be run as another user; says so if not.
pub fn has_setpriv() -> bool {
    let version = Command::new("setpriv").arg("--version").output();
    if let Err(error) = &version {
        skip(Lack::Program, format_args!("setpriv: {error}"));
    }
    version.is_ok()
}

#[test]
fn a_user_without_privilege_is_refused_and_told_which_to_take() {
    let Some(ground) = shared_ground() else {
        return;
    };
    if !has_setpriv() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    make_readable(folder.path(), 0o755);
    let program = folder.path().join("plimsoll");
    write_program(&program, fs::read(PLIMSOLL).unwrap());
    let as_nobody = |vm: &str| {
        let mut command = Command::new(AS_NOBODY[0]);
        command.args(&AS_NOBODY[1..]).arg(&program);
        Attach::spawn(command.args(["attach", vm, "-o", "json", "--backend", "trap"]))
    };

    // Another user's VM hides its memory map.
    let mut subject = ground.boot("not-root", WORKLOAD);
    let footprint = subject.footprint();
    assert_refused(
        as_nobody(&subject.pid()),
        &["not permitted to read /proc/", "run as root"],
    );
    subject.assert_left_as(&footprint);
    subject.assert_goes_on();
    drop(subject);

    // The user's own VM does not, but traps take more.
    let mut guest = boot_as_nobody(&ground);
    let footprint = guest.footprint();
    assert_refused(
        as_nobody(&guest.pid()),
        &[
            "no privilege to",
            "run as root of the host, or with CAP_SYS_PTRACE",
        ],
    );
    guest.assert_left_as(&footprint);
    guest.assert_goes_on();
}

fn boot_as_nobody(ground: &Ground) -> Subject {
    let arguments = [
        "-machine",
        "q35,memory-backend=ram",
        "-m",
        "192M",
        "-object",
        "memory-backend-memfd,id=ram,size=192M,share=on",
    ];
    boot_with(ground, &AS_NOBODY, &arguments, WORKLOAD)
}

#[test]
fn a_qemu_of_another_user_is_traced_by_a_device_lent_to_it() {
    let Some(ground) = shared_ground() else {
        return;
    };
    if !has_setpriv() {
        return;
    }
    let may_all = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if may_all.is_ok_and(|text| text.trim() == "1") {
        skip(Lack::Userfaultfd, "any user may call userfaultfd() here");
        return;
    }
    if !Path::new("/dev/userfaultfd").exists() {
        skip(Lack::Userfaultfd, "this host has no /dev/userfaultfd");
        return;
    }
    let mut guest = boot_as_nobody(&ground);
    let footprint = guest.footprint();
    let options = "--budget 20% --period 1s --periods 2";
    let ended = Attach::start(&guest.pid(), options).end();
    ended.assert_quiet_success();
    assert!(ended.periods().all(|period| period.number("traps") > 0.0));
    guest.assert_left_as(&footprint);
    guest.assert_goes_on();
}

/// Turns a swap file on for as long as a command runs, and off again even if this test is killed.
const WITH_SWAP: &str = r#"
    swap=$1; shift
    dd if=/dev/zero of="$swap" bs=1M count=16 2>/dev/null
    chmod 600 "$swap"
    mkswap "$swap" >/dev/null 2>&1 && swapon "$swap" 2>/dev/null || exit 77
    trap 'swapoff "$swap"' EXIT
    "$@"
"#;

/// A command that turns the file `swap` on for as long as the words behind it run.
pub fn with_swap(swap: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", WITH_SWAP, "sh"]).arg(swap);
    command
}

/// Whether a swap file can be turned on; says so if not.
pub fn can_swap(swap: &Path) -> bool {
    let tried = with_swap(swap).arg("true").status().unwrap();
    if tried.code() == Some(77) {
        skip(Lack::Swap, "no swap file can be turned on here");
    }
    tried.success()
}

/// Pages that this host has written to swap.
fn swapped_out_pages() -> u64 {
    let counters = fs::read_to_string("/proc/vmstat").unwrap();
    let mut lines = counters.lines();
    let pages = lines.find_map(|line| line.strip_prefix("pswpout "));
    pages.unwrap().parse().unwrap()
}

#[test]
fn swap_that_is_turned_on_ends_tracing_before_it_is_filled() {
    // Swap is the host's, and would end what other tests trace.
    let Some(ground) = quiet_ground() else { return };
    let folder = tempfile::tempdir().unwrap();
    let swap = folder.path().join("swap");
    if !can_swap(&swap) {
        return;
    }
    let mut subject = ground.boot("swapon", WORKLOAD);
    let footprint = subject.footprint();
    for options in ["", "--backend scan"] {
        // In the middle of a long period, in which pages are made inaccessible all the time.
        let options = format!("{options} {EVERYTHING} --period 5s");
        let attach = Attach::start(&subject.pid(), &options);
        attach.next();
        let before = swapped_out_pages();
        let mut swapping = with_swap(&swap).args(["sleep", "1"]).spawn().unwrap();
        let ended = attach.end();
        assert!(swapping.wait().unwrap().success());
        let written = swapped_out_pages() - before;
        println!("{written} pages were swapped out: {}", ended.complaint);
        assert_eq!(ended.code, Some(1));
        for words in ["swap is on", "tracing was ended", "memory.swap.max"] {
            assert!(ended.complaint.contains(words), "{}", ended.complaint);
        }
        // Swap may be turned on in the middle of a call, which is for 512 pages at most.
        assert!(written <= 512, "{written} pages were swapped out");
        subject.assert_left_as(&footprint);
        subject.assert_no_trap_is_left();
        subject.assert_goes_on();
    }
}

#[test]
fn a_vm_that_may_swap_is_refused() {
    // Swap is the host's, and would end what other tests trace.
    let Some(ground) = quiet_ground() else { return };
    let mut subject = ground.boot("swap", WORKLOAD);
    let footprint = subject.footprint();
    let folder = tempfile::tempdir().unwrap();
    let swap = folder.path().join("swap");
    if !can_swap(&swap) {
        return;
    }
    let mut command = with_swap(&swap);
    command.args([PLIMSOLL, "attach", &subject.pid(), "-o", "json"]);
    command.args(["--backend", "trap"]);
    assert_refused(
        Attach::spawn(&mut command),
        &["swap is on", &swap.display().to_string(), "memory.swap.max"],
    );
    let swaps = fs::read_to_string("/proc/swaps").unwrap();
    assert_eq!(swaps.lines().count(), 1, "swap is left on: {swaps}");
    subject.assert_left_as(&footprint);
    subject.assert_no_trap_is_left();
    subject.assert_goes_on();
}
