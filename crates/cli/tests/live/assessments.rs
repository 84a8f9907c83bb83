//! What `doctor VM` reports of a backend is what `attach` does with it, and in the same words.
//!
//! The VMs are paused before their first instruction: what decides is how they were started.

use std::fs;
use std::process::{Child, Command, Stdio};

use plimsoll_rig::{PATIENCE, host, wait_for};
use plimsoll_skip::{Lack, guests_wanted, skip};
use plimsoll_vm::QemuVm;
use serde_json::Value;

use crate::rig::PLIMSOLL;

/// Shared RAM, as Plimsoll needs it.
const SHARED: [&str; 4] = [
    "-machine",
    "q35,accel=tcg,memory-backend=ram",
    "-object",
    "memory-backend-memfd,id=ram,size=128M,share=on",
];

/// A paused QEMU. Dropped, it is killed.
struct PausedVm(Child);

impl PausedVm {
    /// Starts one with `arguments` for machine and RAM, and waits until its RAM is mapped.
    fn start(arguments: &[&str]) -> Self {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-name", "paused,debug-threads=on"])
            .args(["-S", "-nodefaults", "-display", "none", "-m", "128M"])
            .args(arguments)
            .stdin(Stdio::null());
        let vm = Self(qemu.spawn().unwrap());
        wait_for("the RAM of a VM", PATIENCE, || {
            let found = QemuVm::of_pid(vm.0.id()).ok()?;
            // It starts its CPUs' threads after it has mapped its RAM.
            (!found.ram.is_empty() && !found.vcpus.is_empty()).then_some(())
        });
        vm
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// What `doctor` reports of each backend: its name, and each refusal's name, reason and change.
    fn assessed(&self) -> Vec<(String, Vec<[String; 3]>)> {
        let output = plimsoll(&["doctor", &self.pid(), "-o", "json"]);
        assert!(output.status.success(), "{output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["schema"], 1);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let refusal = |value: &Value| ["name", "why", "change"].map(|key| text(&value[key]));
        let backends = report["backends"].as_array().unwrap().iter();
        backends
            .map(|backend| {
                let refusals = backend["refusals"].as_array().unwrap().iter();
                (text(&backend["backend"]), refusals.map(refusal).collect())
            })
            .collect()
    }

    /// Fails unless exactly `refused` are refused, each with `name` first, and unless each backend attaches, or is refused
    /// in the same words.
    fn assert_assessed(&self, refused: &[&str], name: &str) {
        let assessed = self.assessed();
        let names: Vec<_> = assessed.iter().map(|(backend, _)| &**backend).collect();
        assert_eq!(
            names,
            [
                "trap",
                "scan",
                "write-scan",
                "sample",
                "first-touch",
                "rwp",
                "idle",
                "damon",
                "page-cache"
            ]
        );
        for (backend, refusals) in assessed {
            // What the host's kernel lacks is no property of the VM.
            let is_lacking = |[name, ..]: &[String; 3]| {
                name == "no-idle-tracking" || backend == "rwp" && name == "kernel-too-old"
            };
            // Whose page cache is observed is a control group, whatever the VM.
            if backend == "page-cache" {
                let mut names = refusals.iter().map(|[name, ..]| &**name);
                assert!(
                    names.any(|name| name == "not-a-control-group"),
                    "{refusals:?}"
                );
                continue;
            }
            // This host's DAMON is left alone; guests of the test program `memory` have one to try.
            if refusals.iter().any(is_lacking) || backend == "damon" {
                continue;
            }
            let attach = ["attach", &self.pid(), "--backend", &backend];
            let options = ["--periods", "1", "--period", "100ms"];
            let output = plimsoll(&[&attach[..], &options].concat());
            let complaint = String::from_utf8(output.stderr).unwrap();
            assert_eq!(
                refused.contains(&&*backend),
                !refusals.is_empty(),
                "{refusals:?}"
            );
            let Some([reason, why, change]) = refusals.first() else {
                assert!(output.status.success(), "{backend}: {complaint}");
                continue;
            };
            assert_eq!(reason, name, "{backend}");
            assert_eq!(output.status.code(), Some(1), "{backend}: {complaint}");
            let sentence = format!("{why}; {change}; nothing was changed");
            assert!(
                complaint.contains(&sentence),
                "{sentence:?} is not in: {complaint}"
            );
        }
    }
}

impl Drop for PausedVm {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn plimsoll(arguments: &[&str]) -> std::process::Output {
    Command::new(PLIMSOLL).args(arguments).output().unwrap()
}

/// Whether VMs can be started and traced here; reports if not.
fn can_run() -> bool {
    if !guests_wanted() {
        return false;
    }
    let able = host::installed(&[host::QEMU]).and_then(|()| host::can_trace());
    if let Err(why) = &able {
        skip(Lack::Live, why);
    }
    able.is_ok()
}

#[test]
fn every_backend_attaches_to_shared_ram() {
    if !can_run() {
        return;
    }
    let _turn = host::shared_turn();
    PausedVm::start(&SHARED).assert_assessed(&[], "");
}

#[test]
fn private_ram_is_assessed_as_attach_refuses_it() {
    if !can_run() {
        return;
    }
    let _turn = host::shared_turn();
    let vm = PausedVm::start(&["-machine", "q35,accel=tcg"]);
    vm.assert_assessed(
        &["trap", "scan", "sample", "first-touch"],
        "not-shared-memory",
    );
    let table = plimsoll(&["doctor", &vm.pid()]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("128 MiB of private memory"), "{table}");
    assert!(
        table.contains("-> start it with '-object memory-backend-memfd"),
        "{table}"
    );
}

#[test]
fn locked_ram_is_assessed_as_attach_refuses_it() {
    if !can_run() {
        return;
    }
    let _turn = host::shared_turn();
    let vm = PausedVm::start(&[&SHARED[..], &["-overcommit", "mem-lock=on"]].concat());
    // QEMU locks what it has mapped, its translator's gigabyte too, after its CPUs' threads have started.
    wait_for("locked RAM", PATIENCE, || {
        let states = QemuVm::of_pid(vm.0.id()).ok()?.ram_states().ok()?;
        states.iter().any(|state| state.locked).then_some(())
    });
    vm.assert_assessed(&["trap", "scan", "sample", "first-touch"], "locked");
}

#[test]
fn huge_pages_are_assessed_as_attach_refuses_them() {
    if !can_run() {
        return;
    }
    let _turn = host::shared_turn();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let free = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("HugePages_Free:")?.trim().parse().ok());
    if free.unwrap_or(0_u64) < 64 {
        skip(Lack::Host, "this host has fewer than 64 free huge pages");
        return;
    }
    let object = "memory-backend-memfd,id=ram,size=128M,share=on,hugetlb=on,hugetlbsize=2M";
    let vm = PausedVm::start(&["-machine", SHARED[1], "-object", object]);
    let all = [
        "trap",
        "scan",
        "write-scan",
        "sample",
        "first-touch",
        "idle",
    ];
    vm.assert_assessed(&all, "not-shared-memory");
}

#[test]
fn another_userfaultfd_is_assessed_as_attach_refuses_it() {
    if !can_run() {
        return;
    }
    let _turn = host::shared_turn();
    let vm = PausedVm::start(&SHARED);
    let mut holder = Command::new(PLIMSOLL)
        .args(["attach", &vm.pid(), "--backend", "write-scan"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let is_held = || {
        let (_, refusals) = vm.assessed().swap_remove(0);
        (!refusals.is_empty()).then_some(())
    };
    wait_for("the first tracer", PATIENCE, is_held);
    vm.assert_assessed(&["trap", "write-scan", "first-touch"], "userfault-in-use");
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&holder),
        rustix::process::Signal::INT,
    )
    .unwrap();
    assert!(holder.wait().unwrap().success());
    vm.assert_assessed(&[], "");
}

#[test]
fn a_vm_that_waits_for_its_memory_is_assessed_as_attach_refuses_it() {
    if !can_run() {
        return;
    }
    let _turn = host::shared_turn();
    let vm = PausedVm::start(&[&SHARED[..], &["-incoming", "defer"]].concat());
    let all = [
        "trap",
        "scan",
        "write-scan",
        "sample",
        "first-touch",
        "idle",
    ];
    vm.assert_assessed(&all, "memory-transfer");
}

#[test]
fn a_debugger_is_assessed_as_attach_refuses_it() {
    if !can_run() {
        return;
    }
    let _turn = host::shared_turn();
    let vm = PausedVm::start(&SHARED);
    let strace = Command::new("strace")
        .args(["-qq", "-e", "trace=none", "-p", &vm.pid()])
        .spawn();
    let mut strace = match strace {
        Ok(strace) => strace,
        Err(error) => {
            skip(Lack::Program, format_args!("strace: {error}"));
            return;
        }
    };
    let is_traced = || (!vm.assessed()[0].1.is_empty()).then_some(());
    wait_for("strace", PATIENCE, is_traced);
    vm.assert_assessed(&["trap", "write-scan", "first-touch"], "debugged");
    strace.kill().unwrap();
    strace.wait().unwrap();
}
