//! What VMs had, and get back: RAM that is plugged, a host that runs short, the daemon's end.

use std::sync::Arc;
use std::time::Duration;

use plimsoll_daemon::config::{Config, Workflow};
use plimsoll_daemon::history::{History, Limits, ResizeMark};
use plimsoll_daemon::host::GroupLimit;
use plimsoll_daemon::shared::Command;
use plimsoll_daemon::turn::TICK;
use plimsoll_flow::PageCount;
use plimsoll_protocol::decision::{Kind, Mode, Phase, State};
use plimsoll_protocol::request::SettingsChange;
use plimsoll_vm::ProcessId;

use crate::guests::divided;
use crate::rig::{MIB, Rig, config, search, web};
use crate::simulated::{BalloonBehaviour, SimulatedHost};

const VMS: [&str; 3] = ["web", "search", "scan"];
/// What remains to QEMU of the limit of its control group: 128 MiB and a 64th of the RAM, 16 MiB.
const QEMU_OWN: u64 = 144 * MIB;

/// The limit of a control group.
fn group_limit(directory: &str, bytes: u64) -> GroupLimit {
    GroupLimit {
        directory: directory.into(),
        bytes,
    }
}

#[test]
fn plugged_memory_raises_ceiling_baseline_and_divided_memory() {
    let mut rig = Rig::new(config(Mode::Act));
    rig.add(100, "web", web());
    rig.host.change("web", |vm| vm.direct_bytes = vm.ram_bytes);
    rig.pass(100);
    let before = rig.snapshot().host.memory.divided_bytes;
    let settings = |rig: &Rig| {
        let vms = rig.snapshot().host.vms.clone();
        let vm = vms.into_iter().find(|vm| vm.vm == "web").unwrap();
        (
            vm.ram_bytes,
            vm.settings.max_bytes,
            vm.settings.baseline_bytes,
        )
    };
    let (ram, max, baseline) = settings(&rig);
    assert_eq!((ram, max), (1024 * MIB, 1024 * MIB));
    rig.host.change("web", |vm| {
        vm.ram_bytes += 256 * MIB;
        vm.direct_bytes += 256 * MIB;
    });
    rig.pass(10);
    assert_eq!(
        settings(&rig),
        (ram + 256 * MIB, max + 256 * MIB, baseline + 256 * MIB)
    );
    let divided = rig.snapshot().host.memory.divided_bytes;
    assert_eq!(divided, before + 256 * MIB);
    rig.pass(300);
    assert_eq!(rig.mib("web"), 1280);
    rig.host.change("web", |vm| vm.ram_bytes -= 256 * MIB);
    rig.pass(10);
    assert_eq!(settings(&rig), (ram, max, baseline));
}

#[test]
fn a_vm_does_not_grow_beyond_what_the_limit_of_its_control_group_leaves_it() {
    let start = |limit: Option<u64>| {
        let mut rig = Rig::of_three(config(Mode::Act));
        rig.host.change("search", |vm| {
            vm.direct_bytes = 512 * MIB;
            vm.group_limits
                .extend(limit.map(|bytes| group_limit("search", bytes)));
        });
        rig.host.change("web", |vm| {
            vm.direct_bytes = 600 * MIB;
            vm.group_limits.push(group_limit("web", 700 * MIB));
        });
        divided(&mut rig);
        rig.pass(300);
        rig
    };
    assert!(start(None).mib("search") > 656);
    let mut rig = start(Some(656 * MIB + QEMU_OWN));
    assert!(
        (600..=656).contains(&rig.mib("search")),
        "{}",
        rig.mib("search")
    );
    let vm = |rig: &Rig, name: &str| {
        let vms = rig.snapshot().host.vms.clone();
        vms.into_iter().find(|vm| vm.vm == name).unwrap()
    };
    let search = vm(&rig, "search");
    assert_eq!(search.settings.max_bytes, 656 * MIB);
    let warnings = &rig.snapshot().host.warnings;
    let known = "its control group limits it to 800 MiB";
    assert!(
        warnings.iter().any(|warning| warning.contains(known)),
        "{warnings:?}"
    );
    // What a VM had is not taken from it for that.
    assert_eq!(vm(&rig, "web").settings.max_bytes, 600 * MIB);
    let change = SettingsChange {
        baseline_bytes: Some(700 * MIB),
        ..SettingsChange::default()
    };
    let refusal = rig.ask(|reply| Command::Set("search".to_owned(), change, reply));
    assert!(refusal.unwrap_err().message.contains("control group"));
}

#[test]
fn vms_that_share_a_limit_of_a_control_group_keep_it_together() {
    let start = |members: &[&str], spare_bytes| {
        let mut rig = Rig::of_three(config(Mode::Act));
        let count = members.len() as u64;
        let limit_bytes = count * (512 * MIB + QEMU_OWN) + spare_bytes;
        for name in members {
            rig.host.change(name, |vm| {
                vm.group_limits
                    .push(group_limit("machine.slice", limit_bytes));
            });
        }
        for _ in 0..400 {
            rig.pass(1);
            let has = members.iter().map(|name| rig.mib(name)).sum::<u64>();
            assert!(has <= count * 512 + spare_bytes / MIB, "{has} MiB");
        }
        rig
    };
    // What scan gives: all of it, half of what is left, nothing.
    let most = start(&VMS, 0).mib("search");
    assert!(most > 700, "{most}");
    let half = start(&["web", "search"], 200 * MIB).mib("search");
    assert!((600..=612).contains(&half), "{half}");
    let rig = start(&["web", "search"], 0);
    assert_eq!(rig.mib("search"), 512);
    let warnings = &rig.snapshot().host.warnings;
    let known = "limits 2 VMs together to 1312 MiB";
    assert!(
        warnings.iter().any(|warning| warning.contains(known)),
        "{warnings:?}"
    );
    // The total that is configured does not keep it.
    let mut larger = config(Mode::Act);
    larger.total_bytes = Some(2400 * MIB);
    let mut rig = Rig::of_three(larger);
    for name in VMS {
        let limit = group_limit("machine.slice", 3 * (512 * MIB + QEMU_OWN));
        rig.host.change(name, |vm| vm.group_limits.push(limit));
    }
    rig.pass(400);
    assert!(VMS.iter().map(|name| rig.mib(name)).sum::<u64>() <= 1536);
}

#[test]
fn a_dimm_with_which_a_vm_started_can_be_unplugged() {
    let mut rig = Rig::new(config(Mode::Act));
    rig.add(100, "web", web());
    rig.host.change("web", |vm| vm.direct_bytes = vm.ram_bytes);
    rig.pass(100);
    rig.host.change("web", |vm| {
        vm.ram_bytes -= 256 * MIB;
        vm.direct_bytes -= 256 * MIB;
    });
    rig.pass(10);
    let vm = rig.snapshot().host.vms[0].clone();
    let settings = vm.settings;
    assert_eq!(
        (vm.ram_bytes, settings.max_bytes, settings.baseline_bytes),
        (768 * MIB, 768 * MIB, 768 * MIB)
    );
}

#[test]
fn ram_that_is_plugged_while_no_daemon_runs_raises_the_baseline_too() {
    let mut rig = Rig::new(config(Mode::Act));
    rig.add(100, "web", web());
    rig.pass(10);
    let (host, history) = (rig.host.clone(), Arc::clone(&rig.shared.history));
    drop(rig);
    host.change("web", |vm| {
        vm.ram_bytes += 256 * MIB;
        vm.direct_bytes += 256 * MIB;
    });
    let mut later = Rig::with(config(Mode::Act), host, history);
    later.pass(10);
    let baseline = later.snapshot().host.vms[0].settings.baseline_bytes;
    assert_eq!(baseline, 768 * MIB);
}

#[test]
fn a_clock_that_is_set_does_not_keep_memory_from_being_returned() {
    let mut rig = Rig::of_three(config(Mode::Act));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    assert!(rig.mib("scan") < 200);
    rig.host.step_clock(3_600_000);
    rig.turns.begin_return(rig.now);
    rig.until("all is back", |rig| rig.mib("scan") == 512);
}

/// Three VMs of which three quarters are in their caches.
fn traced(headroom_bytes: u64) -> Rig {
    let mut config = config(Mode::Act);
    config.headroom_bytes = Some(headroom_bytes);
    config.workflow = Workflow::Cache {
        direct_ratio: 0.25,
        trace_for: Duration::from_secs(600),
        keep: true,
        every: Duration::from_secs(3600),
    };
    let mut rig = Rig::of_three(config);
    for vm in VMS {
        rig.host.change(vm, |vm| vm.cache_bytes = Some(0));
    }
    rig.until("they are traced", |rig| {
        rig.snapshot().host.phase == Phase::Tracing
    });
    rig
}

/// The sum of their caches in MiB.
fn caches(rig: &Rig) -> u64 {
    let sizes = VMS.map(|vm| rig.host.vm(vm).unwrap().cache_bytes.unwrap());
    sizes.iter().sum::<u64>() / MIB
}

#[test]
fn a_host_that_runs_short_takes_from_caches_first_then_from_vms() {
    let mut rig = traced(1 << 30);
    let had = caches(&rig);
    rig.host.set_available((1 << 30) - 300 * MIB);
    rig.pass(1);
    assert!(caches(&rig) <= had - 300, "{had} {}", caches(&rig));
    for vm in VMS {
        assert_eq!(rig.host.vm(vm).unwrap().direct_bytes, 128 * MIB);
    }
    // It is not given out again until the host has had enough for a while.
    rig.host.set_available((1 << 30) + 100 * MIB);
    let left = caches(&rig);
    rig.pass(120);
    assert!(caches(&rig) <= left, "{left} {}", caches(&rig));
    // Tasks that wait for memory raise what is required, if they do for 5 % of two seconds.
    rig.host.stall(Duration::from_millis(60));
    rig.pass(3);
    assert_eq!(caches(&rig), left);
    rig.host.stall(Duration::from_millis(200));
    rig.pass(3);
    assert!(caches(&rig) < left, "{left} {}", caches(&rig));
}

#[test]
fn caches_shrink_as_fast_as_others_allocate() {
    const STEP: Duration = Duration::from_millis(100);
    const HEADROOM: u64 = 64 * MIB;
    let mut rig = traced(HEADROOM);
    for vm in VMS {
        rig.host.change(vm, |vm| vm.cache_lag_ms = 80);
    }
    rig.host.set_available(HEADROOM);
    let mut had = caches(&rig);
    for step in 0..40 {
        let available = rig.host.available_bytes();
        assert!(available > 20 * MIB, "after {step} steps");
        rig.host.set_available(available - 20 * MIB);
        rig.turns.tick(rig.now);
        rig.host.pass(STEP);
        rig.now += STEP;
        assert!(caches(&rig) <= had, "{had} {}", caches(&rig));
        had = caches(&rig);
    }
}

/// The sum of the sizes of three VMs in MiB.
fn sizes(rig: &Rig) -> u64 {
    VMS.iter().map(|vm| rig.mib(vm)).sum()
}

/// Three VMs whose memory was divided, and is not again for an hour; a short host does not wait for that.
fn divided_once(headroom_bytes: u64) -> Rig {
    let mut config = config(Mode::Act);
    config.headroom_bytes = Some(headroom_bytes);
    config.cooldown = Duration::from_secs(3600);
    let mut rig = Rig::of_three(config);
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    rig
}

#[test]
fn a_host_without_caches_gets_what_vms_can_give_and_they_get_it_back() {
    const HEADROOM: u64 = 4 << 30;
    for lacking_mib in [200, 3000] {
        let mut rig = divided_once(HEADROOM);
        let had = sizes(&rig);
        rig.host.set_available(HEADROOM - lacking_mib * MIB);
        rig.pass(300);
        let gave = had - sizes(&rig);
        let memory = rig.snapshot().host.memory;
        if lacking_mib == 200 {
            // No more than that, however long it lasts.
            assert!((200..270).contains(&gave), "{gave}");
            assert!(memory.available_bytes >= HEADROOM);
        } else {
            // All that they can do without, which is not enough.
            assert!((300..1000).contains(&gave), "{gave}");
            for (vm, truth) in [("web", web()), ("search", search())] {
                let at = |mib: u64| truth.miss_ratio(PageCount(mib * 256));
                let loss = at(rig.mib(vm)) / at(512);
                assert!(loss <= 1.25 + 1e-9, "{vm}: {loss}");
            }
        }
        let held = memory.vms_direct_bytes;
        assert!(held <= memory.divided_bytes + MIB, "{memory:?}");
        let warnings = rig.snapshot().host.warnings.clone();
        let infeasible = |warning: &String| warning.contains("cannot be allocated");
        assert!(!warnings.iter().any(infeasible), "{warnings:?}");
        rig.host.set_available(1 << 39);
        rig.pass(90);
        assert_eq!(rig.snapshot().host.memory.divided_bytes, 1536 * MIB);
    }
}

#[test]
fn nothing_more_is_taken_once_a_host_has_enough() {
    const HEADROOM: u64 = 4 << 30;
    let mut rig = divided_once(HEADROOM);
    let (had, decisions) = (sizes(&rig), rig.decisions().len());
    rig.host.set_available(HEADROOM - 500 * MIB);
    rig.turns.tick(rig.now);
    rig.host.set_available(HEADROOM + 2000 * MIB);
    rig.pass(50);
    assert_eq!((sizes(&rig), rig.decisions().len()), (had, decisions));
    // Those that had begun to give go on.
    rig.host.set_available(HEADROOM - 500 * MIB);
    rig.until("they give", |rig| sizes(rig) < had);
    rig.host.set_available(HEADROOM + 2000 * MIB);
    let decisions = rig.decisions().len();
    rig.pass(50);
    assert_eq!(rig.decisions().len(), decisions);
}

#[test]
fn vms_give_what_they_do_not_need_also_if_all_their_needs_exceed_the_total() {
    let mut config = config(Mode::Act);
    // Its VMs of 512 MiB need about 380, 500 and 40 MiB.
    config.total_bytes = Some(800 * MIB);
    let mut rig = Rig::of_three(config);
    rig.until("scan gives", |rig| rig.mib("scan") < 200);
    rig.pass(120);
    let snapshot = rig.snapshot();
    let held: u64 = ["web", "search", "scan"].iter().map(|vm| rig.mib(vm)).sum();
    assert!(held < 1100, "{held}");
    let warnings = &snapshot.host.warnings;
    let is_said = |warning: &String| warning.contains("and the host has 800 MiB");
    assert!(warnings.iter().any(is_said), "{warnings:?}");
}

#[test]
fn a_move_that_shrinks_vms_goes_on_while_the_host_is_short_and_is_checked() {
    let mut config = config(Mode::Act);
    config.headroom_bytes = Some(1 << 30);
    let mut rig = Rig::of_three(config);
    rig.host
        .change("scan", |vm| vm.follows = BalloonBehaviour::Pace(8 * MIB));
    rig.until("it moves", |rig| rig.mib("scan") < 480);
    let id = rig.newest().id;
    rig.host.set_available((1 << 30) - 100 * MIB);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    let decision = rig.shared.history.decision(id).unwrap();
    assert!(
        matches!(decision.state, State::Kept | State::Partly),
        "{decision:?}"
    );
    assert_eq!(decision.checks.len(), 3);
    assert!(rig.mib("scan") < 200, "{}", rig.mib("scan"));
    assert!(rig.host.available_bytes() >= 1 << 30);
}

#[test]
fn a_host_that_runs_short_takes_all_that_it_lacks_from_the_caches_that_may_be_shrunk() {
    let mut rig = traced(1 << 30);
    let alone = SettingsChange {
        managed: Some(false),
        ..SettingsChange::default()
    };
    rig.ask(|reply| Command::Set("web".to_owned(), alone, reply))
        .unwrap();
    let (web, had) = (rig.mib("web"), caches(&rig));
    rig.host.set_available((1 << 30) - 300 * MIB);
    rig.pass(1);
    assert!(caches(&rig) <= had - 300, "{had} {}", caches(&rig));
    assert_eq!(rig.mib("web"), web);
}

#[test]
fn vms_get_back_what_they_had_when_the_daemon_ends() {
    let mut rig = Rig::of_three(config(Mode::Act));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    assert!(rig.mib("scan") < 200);
    // By this daemon, or by one that follows one that was killed.
    let history = Arc::clone(&rig.shared.history);
    let mut later = Rig::with(config(Mode::Observe), rig.host.clone(), history);
    later.pass(3);
    later.turns.begin_return(later.now);
    later.until("all is back", |rig| {
        ["web", "search", "scan"]
            .iter()
            .all(|vm| rig.mib(vm) == 512)
    });
    assert!(later.host.most_bytes() <= 1536 * MIB);
    // One that was never resized keeps its size, whatever that is.
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.pass(10);
    rig.host.change("web", |vm| vm.direct_bytes = 400 * MIB);
    rig.pass(10);
    rig.turns.begin_return(rig.now);
    rig.pass(20);
    assert_eq!(rig.mib("web"), 400);
}

#[test]
fn a_vm_that_somebody_else_raised_above_its_baseline_keeps_that_when_the_daemon_ends() {
    let ended = || {
        let mut rig = Rig::of_three(config(Mode::Act));
        divided(&mut rig);
        rig.until("it ends", |rig| rig.newest().state.has_ended());
        assert!(rig.mib("scan") < 200 && rig.mib("search") > 520);
        rig
    };
    let raise = |rig: &Rig, name: &str, mib: u64| {
        rig.host.change(name, |vm| {
            vm.direct_bytes = mib * MIB;
            vm.target_bytes = Some(mib * MIB);
        });
    };
    // Whether a decision took from it or gave it memory before.
    for raised in ["scan", "search"] {
        let mut rig = ended();
        raise(&rig, raised, 1000);
        rig.pass(1);
        rig.turns.begin_return(rig.now);
        rig.pass(20);
        let expected = |name: &str| if name == raised { 1000 } else { 512 };
        for name in VMS {
            assert_eq!(rig.mib(name), expected(name), "{name} of {raised}");
        }
    }
    // Before the first decision about it.
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.pass(1);
    raise(&rig, "search", 1000);
    rig.until("it is resized", |rig| {
        let newest = rig.decisions().into_iter().next();
        newest.is_some_and(|newest| newest.state.has_ended()) && rig.mib("search") != 1000
    });
    let has = rig.mib("search");
    assert!((600..1000).contains(&has), "{has}");
    rig.turns.begin_return(rig.now);
    rig.pass(20);
    assert_eq!(rig.mib("search"), has);
    // The next decision takes some of it.
    let mut rig = ended();
    raise(&rig, "search", 1000);
    let before = rig.newest().id;
    rig.until("it is resized", |rig| {
        let newest = rig.newest();
        newest.id > before && newest.state.has_ended()
    });
    let has = rig.mib("search");
    assert!((600..1000).contains(&has), "{has}");
    rig.turns.begin_return(rig.now);
    rig.pass(20);
    assert_eq!(rig.mib("search"), has);
}

#[test]
fn a_vm_that_does_not_answer_when_the_daemon_ends_is_not_waited_for_and_asked_again() {
    let mut rig = Rig::of_three(config(Mode::Act));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    let had = rig.mib("scan");
    rig.host.change("scan", |vm| vm.answers = false);
    rig.turns.begin_return(rig.now);
    assert_eq!(rig.newest().kind, Kind::GiveBack);
    let is_asked = |rig: &Rig| rig.newest().steps.iter().any(|step| step.vm == "scan");
    assert!(!is_asked(&rig), "{:?}", rig.newest());
    for _ in 0..20 {
        rig.host.pass(TICK);
        rig.now += TICK;
        rig.turns.goes_on_returning(rig.now);
    }
    assert_eq!(rig.mib("scan"), had);
    rig.host.change("scan", |vm| vm.answers = true);
    rig.turns.end_return(rig.now);
    assert!(is_asked(&rig));
    for _ in 0..20 {
        rig.host.pass(TICK);
    }
    assert_eq!(rig.mib("scan"), 512);
}

#[test]
fn a_vm_that_is_not_managed_any_more_is_said_to_lack_what_it_had() {
    let mut rig = Rig::of_three(config(Mode::Act));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    let has = rig.mib("scan");
    let warned = |rig: &Rig| {
        let warnings = rig.snapshot().host.warnings.clone();
        warnings
            .into_iter()
            .find(|line| line.contains("not managed"))
    };
    assert_eq!(warned(&rig), None);
    let alone = SettingsChange {
        managed: Some(false),
        ..SettingsChange::default()
    };
    rig.ask(|reply| Command::Set("scan".to_owned(), alone, reply))
        .unwrap();
    rig.pass(10);
    let end = format!("it has {has} MiB of 512 MiB");
    let warning = warned(&rig).unwrap();
    assert!(
        warning.starts_with("scan: ") && warning.ends_with(&end),
        "{warning}"
    );
    // That is what it keeps.
    rig.turns.begin_return(rig.now);
    rig.pass(30);
    assert_eq!((rig.mib("web"), rig.mib("scan")), (512, has));
}

#[test]
fn a_vm_that_is_paused_when_the_daemon_ends_gets_its_memory_when_it_goes_on() {
    let mut rig = Rig::of_three(config(Mode::Act));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    let had = rig.mib("scan");
    let host = rig.host.clone();
    host.change("scan", |vm| vm.follows = BalloonBehaviour::Never);
    rig.turns.begin_return(rig.now);
    for _ in 0..20 {
        host.pass(TICK);
        rig.now += TICK;
        rig.turns.goes_on_returning(rig.now);
    }
    rig.turns.end_return(rig.now);
    assert_eq!((rig.mib("web"), rig.mib("scan")), (512, had));
    let lacks = format!(
        "scan: it lacks {} MiB of the 512 MiB that it had, and gets them when its balloon follows",
        512 - had
    );
    assert_eq!(rig.turns.lacks(), [lacks]);
    host.change("scan", |vm| vm.follows = BalloonBehaviour::Pace(64 * MIB));
    for _ in 0..20 {
        host.pass(TICK);
    }
    assert_eq!(rig.mib("scan"), 512);
    assert!(host.most_bytes() <= 1536 * MIB);
}

/// As a VM of which libvirt's `<memory>` is more than its `<currentMemory>`: its driver takes the difference at boot.
#[test]
fn the_baseline_of_a_vm_that_boots_is_what_its_balloon_leaves_it() {
    let mut rig = Rig::new(config(Mode::Act));
    rig.add(100, "web", web());
    let host = rig.host.clone();
    host.change("web", |vm| vm.follows = BalloonBehaviour::Boots);
    rig.pass(30);
    assert_eq!(rig.shared.history.baseline("web"), None);
    for mib in [400, 300, 256] {
        host.change("web", |vm| {
            vm.follows = BalloonBehaviour::Pace(64 * MIB);
            vm.direct_bytes = mib * MIB;
        });
        rig.pass(5);
    }
    rig.pass(10);
    assert_eq!(rig.shared.history.baseline("web"), Some(256 * MIB));
    // A driver that stays silent is none; if it answers after all, that counts.
    rig.add(101, "late", web());
    host.change("late", |vm| vm.follows = BalloonBehaviour::Boots);
    rig.pass(200);
    assert_eq!(rig.shared.history.baseline("late"), Some(512 * MIB));
    host.change("late", |vm| {
        vm.follows = BalloonBehaviour::Pace(64 * MIB);
        vm.direct_bytes = 384 * MIB;
    });
    rig.pass(20);
    assert_eq!(rig.shared.history.baseline("late"), Some(384 * MIB));
}

#[test]
fn a_vm_that_is_restored_in_another_process_gets_back_what_it_had() {
    let shrunk = || {
        let mut rig = Rig::of_three(config(Mode::Act));
        divided(&mut rig);
        rig.until("it ends", |rig| rig.newest().state.has_ended());
        assert!(rig.mib("scan") < 200);
        let history = Arc::clone(&rig.shared.history);
        (rig.host.clone(), history)
    };
    let (host, history) = shrunk();
    host.change("scan", |vm| vm.pid += 1000);
    let mut later = Rig::with(config(Mode::Observe), host, history);
    later.pass(10);
    later.turns.begin_return(later.now);
    later.until("all is back", |rig| VMS.iter().all(|vm| rig.mib(vm) == 512));
    // One that booted meanwhile has the size that it was started with.
    let (host, history) = shrunk();
    let has = host.vm("scan").unwrap().size_bytes();
    let boot = |host: &SimulatedHost, rig: &mut Rig| {
        host.change("scan", |vm| {
            vm.pid += 1000;
            vm.follows = BalloonBehaviour::Boots;
        });
        rig.pass(10);
        host.change("scan", |vm| vm.follows = BalloonBehaviour::Pace(64 * MIB));
        rig.pass(10);
    };
    let mut later = Rig::with(config(Mode::Observe), host.clone(), Arc::clone(&history));
    boot(&host, &mut later);
    later.turns.begin_return(later.now);
    later.pass(30);
    assert_eq!(later.mib("scan"), has / MIB);
    // After that life, and while no daemon ran, the saved state was restored after all.
    host.change("scan", |vm| vm.pid += 1000);
    let mut later = Rig::with(config(Mode::Observe), host, history);
    later.pass(10);
    later.turns.begin_return(later.now);
    later.until("all is back", |rig| VMS.iter().all(|vm| rig.mib(vm) == 512));
}

/// A process that waits for its state has an empty balloon, and no driver.
#[test]
fn a_vm_that_is_found_while_its_saved_state_is_read_gets_back_what_it_had() {
    let mut rig = Rig::of_three(config(Mode::Act));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    let (host, history) = (rig.host.clone(), Arc::clone(&rig.shared.history));
    let saved = host.vm("scan").unwrap();
    host.change("scan", |vm| {
        vm.pid += 1000;
        vm.receives = true;
        vm.direct_bytes = vm.ram_bytes;
        vm.follows = BalloonBehaviour::Boots;
    });
    let mut later = Rig::with(config(Mode::Observe), host.clone(), history);
    later.pass(10);
    host.change("scan", |vm| {
        vm.receives = false;
        vm.direct_bytes = saved.direct_bytes;
        vm.follows = saved.follows;
    });
    later.pass(10);
    assert!(later.mib("scan") < 200);
    later.turns.begin_return(later.now);
    later.until("all is back", |rig| VMS.iter().all(|vm| rig.mib(vm) == 512));
}

/// Its target has an empty balloon and all of its RAM until it runs, and the same balloon then.
#[test]
fn a_vm_that_is_migrated_on_its_host_is_not_squeezed_for_its_copy() {
    let mut config = config(Mode::Act);
    config.total_bytes = Some(1400 * MIB);
    let mut rig = Rig::of_three(config);
    let (host, uuid) = (rig.host.clone(), "c7a5fdbd-edaf-9455-926a-d65c16db1809");
    host.change("web", |vm| vm.uuid = Some(uuid.to_owned()));
    divided(&mut rig);
    rig.until("it ends", |rig| rig.newest().state.has_ended());
    rig.pass(120);
    let (before, decisions) = (VMS.map(|vm| rig.mib(vm)), rig.decisions().len());
    let add_copy = |rig: &Rig| {
        rig.add(900, "web-900", web());
        host.change("web-900", |vm| {
            vm.uuid = Some(uuid.to_owned());
            vm.receives = true;
            vm.direct_bytes = vm.ram_bytes;
            vm.follows = BalloonBehaviour::Boots;
        });
    };
    add_copy(&rig);
    rig.pass(120);
    assert_eq!(VMS.map(|vm| rig.mib(vm)), before);
    // Its source still has its memory when it runs.
    let source = host.vm("web").unwrap();
    host.change("web", |vm| vm.stopped = Some("postmigrate"));
    host.change("web-900", |vm| {
        vm.receives = false;
        vm.direct_bytes = source.direct_bytes;
        vm.follows = source.follows;
    });
    rig.pass(120);
    assert_eq!(VMS.map(|vm| rig.mib(vm)), before);
    host.end("web-900");
    host.change("web", |vm| {
        vm.pid = 900;
        vm.stopped = None;
    });
    rig.pass(120);
    assert_eq!(VMS.map(|vm| rig.mib(vm)), before);
    assert_eq!(rig.decisions().len(), decisions, "{:#?}", rig.newest());
    // What comes from another host gets its memory from the others.
    add_copy(&rig);
    host.change("web-900", |vm| vm.uuid = None);
    rig.until("they give", |rig| {
        VMS.map(|vm| rig.mib(vm)).iter().sum::<u64>() < before.iter().sum()
    });
}

/// There is a file where the history's directory is to be: what a VM had cannot be kept, as with a full disk.
#[test]
fn nothing_is_taken_from_vms_while_the_way_back_cannot_be_kept() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().join("history.redb");
    let limits = Limits::of(&config(Mode::Act));
    let (history, warnings) = History::open(&path, limits).unwrap();
    assert!(!warnings.is_empty());
    let host = Rig::of_three(config(Mode::Act)).host;
    let mut rig = Rig::with(config(Mode::Act), host, Arc::new(history));
    rig.pass(120);
    assert!(VMS.iter().all(|vm| rig.mib(vm) == 512));
    let warnings = rig.snapshot().host.warnings.clone();
    let is_named = |warning: &String| warning.contains("nothing is taken from VMs");
    assert!(warnings.iter().any(is_named), "{warnings:?}");
    // It is shown, and an operator may apply it.
    rig.apply().unwrap();
}

/// The disk fails between the turn that moves memory and the one before.
#[test]
fn nothing_is_taken_from_vms_if_only_the_move_shows_that_the_way_back_cannot_be_kept() {
    let mut rig = Rig::of_three(config(Mode::Act));
    let mut seconds = 0;
    while rig.decisions().is_empty() {
        rig.pass(1);
        seconds += 1;
        assert!(seconds < 600);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.redb");
    let (history, _) = History::open(&path, Limits::of(&config(Mode::Act))).unwrap();
    let history = Arc::new(history);
    let host = Rig::of_three(config(Mode::Act)).host;
    let mut rig = Rig::with(config(Mode::Act), host, Arc::clone(&history));
    rig.pass(seconds - 1);
    assert!(history.warnings().is_empty());
    std::fs::remove_file(&path).unwrap();
    rig.pass(30);
    assert!(VMS.iter().all(|vm| rig.mib(vm) == 512));
    let scan = rig.host.vm("scan").unwrap();
    let process = ProcessId {
        pid: scan.pid,
        start_ticks: scan.start_ticks,
    };
    assert!(!history.was_resized("scan", process));
}

/// As above, with a VM that was saved while it was shrunk and has been started anew since.
#[test]
fn a_move_that_is_not_begun_leaves_a_saved_vm_its_way_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.redb");
    let anew = |history: History| {
        let mut rig = Rig::of_three(config(Mode::Act));
        let host = rig.host.clone();
        rig = Rig::with(config(Mode::Act), host.clone(), Arc::new(history));
        divided(&mut rig);
        rig.until("it ends", |rig| rig.newest().state.has_ended());
        assert!(rig.mib("scan") < 200);
        let (saved, history) = (host.vm("scan").unwrap(), Arc::clone(&rig.shared.history));
        host.change("scan", |vm| {
            vm.pid += 1000;
            vm.direct_bytes = 512 * MIB;
            vm.target_bytes = None;
        });
        (saved, Rig::with(config(Mode::Act), host, history))
    };
    let (_, mut rig) = anew(History::nowhere());
    let before = rig.decisions().len();
    let mut seconds = 0;
    while rig.decisions().len() == before {
        rig.pass(1);
        seconds += 1;
        assert!(seconds < 600);
    }
    let limits = Limits::of(&config(Mode::Act));
    let (saved, mut rig) = anew(History::open(&path, limits).unwrap().0);
    rig.pass(seconds - 1);
    let history = Arc::clone(&rig.shared.history);
    assert!(history.warnings().is_empty());
    std::fs::remove_file(&path).unwrap();
    rig.pass(10);
    assert!(!history.warnings().is_empty());
    assert_eq!(rig.mib("scan"), 512);
    // Its saved state is restored.
    let host = rig.host.clone();
    host.change("scan", |vm| {
        vm.pid += 1000;
        vm.direct_bytes = saved.direct_bytes;
    });
    let mut later = Rig::with(config(Mode::Observe), host, history);
    later.pass(10);
    assert!(later.mib("scan") < 200);
    later.turns.begin_return(later.now);
    later.until("all is back", |rig| VMS.iter().all(|vm| rig.mib(vm) == 512));
}

#[test]
fn vms_get_back_what_they_had_also_if_that_is_more_than_was_to_be_allocated() {
    // The host has all of it, then 100 MiB of it.
    for (spare, returned) in [(2000, 1536), (100, 1024 + 100)] {
        let mut config = config(Mode::Act);
        config.total_bytes = Some(1024 * MIB);
        config.headroom_bytes = Some(1 << 30);
        for rule in &mut config.vms {
            rule.baseline_bytes = Some(256 * MIB);
        }
        let mut rig = Rig::of_three(config);
        let held = |rig: &Rig| VMS.iter().map(|vm| rig.mib(vm)).sum::<u64>();
        rig.until("all fits", |rig| held(rig) <= 1025);
        rig.until("it ends", |rig| rig.newest().state.has_ended());
        rig.host.set_available((1 << 30) + spare * MIB);
        rig.turns.begin_return(rig.now);
        // Before the next cooldown ends: this one goes on to decide.
        rig.pass(30);
        let has = held(&rig);
        assert!(has + 16 >= returned && has <= returned + 16, "{has}");
    }
}

/// Another process takes memory of the host, and gives back more of it, or less, before the daemon ends.
#[test]
fn what_a_host_lacked_is_returned_at_the_end_as_far_as_the_host_has_it_then() {
    const HEADROOM: u64 = 4 << 30;
    for (available, is_short) in [(HEADROOM + 2000 * MIB, false), (HEADROOM - 50 * MIB, true)] {
        // By this daemon, or by one that follows one that was killed.
        for follows in [false, true] {
            let with_headroom = |mode| Config {
                headroom_bytes: Some(HEADROOM),
                ..config(mode)
            };
            let mut rig = Rig::of_three(with_headroom(Mode::Act));
            divided(&mut rig);
            rig.until("it ends", |rig| rig.newest().state.has_ended());
            rig.host.set_available(HEADROOM - 200 * MIB);
            rig.pass(60);
            let left = sizes(&rig);
            assert!(left < 1400, "{left}");
            rig.host.set_available(available);
            if follows {
                let history = Arc::clone(&rig.shared.history);
                rig = Rig::with(with_headroom(Mode::Observe), rig.host.clone(), history);
                rig.pass(3);
            }
            let decisions = rig.decisions().len();
            rig.turns.begin_return(rig.now);
            for _ in 0..20 {
                rig.host.pass(TICK);
                rig.now += TICK;
                rig.turns.goes_on_returning(rig.now);
            }
            rig.turns.end_return(rig.now);
            // It is not repeated while nothing has changed.
            assert_eq!(rig.decisions().len(), decisions + 1);
            let lacks = rig.turns.lacks();
            if !is_short {
                assert!(VMS.iter().all(|vm| rig.mib(vm) == 512), "{lacks:?}");
                continue;
            }
            assert!(sizes(&rig) <= left, "{left} {}", sizes(&rig));
            let why = "withheld, because the host should keep 4096 MiB available";
            let errors = rig.newest().steps.into_iter().filter_map(|step| step.error);
            let errors: Vec<_> = errors.collect();
            assert!(errors.iter().any(|error| error.contains(why)), "{errors:?}");
            assert!(lacks.iter().any(|lack| lack.ends_with(why)), "{lacks:?}");
            // As far as it has it, also later.
            rig.host.set_available(HEADROOM + 2000 * MIB);
            rig.turns.end_return(rig.now);
            assert_eq!(rig.decisions().len(), decisions + 2);
        }
    }
}

#[test]
fn a_daemon_that_follows_one_that_was_killed_has_resized_vms_from_its_first_turn() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.pass(2);
    assert!(!rig.turns.has_resized());
    divided(&mut rig);
    let history = Arc::clone(&rig.shared.history);
    let mut later = Rig::with(config(Mode::Observe), rig.host.clone(), history);
    later.pass(1);
    assert!(later.turns.has_resized());
}

/// Its monitor hangs, and without names of its threads nothing but the monitor shows its vCPUs.
#[test]
fn a_vm_that_was_resized_and_is_not_discovered_again_is_named_at_the_end() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.pass(2);
    let process = ProcessId::of_pid(std::process::id()).unwrap();
    let mark = ResizeMark {
        process: Some(process),
        ..ResizeMark::default()
    };
    let history = &rig.shared.history;
    let _ = history.put_baseline("hangs", 512 * MIB);
    let _ = history.put_mark("hangs", mark);
    let lacks = rig.turns.lacks();
    assert_eq!(lacks.len(), 1, "{lacks:?}");
    let begin = format!("hangs: its process {} cannot be inspected", process.pid);
    assert!(lacks[0].starts_with(&begin), "{lacks:?}");
    let unmanaged = SettingsChange {
        managed: Some(false),
        ..SettingsChange::default()
    };
    let _ = history.put_settings("hangs", &unmanaged);
    assert!(rig.turns.lacks().is_empty());
}

#[test]
fn vms_get_back_what_they_had_when_the_daemon_ends_in_the_middle_of_a_move() {
    let mut config = config(Mode::Act);
    config.workflow = Workflow::Cache {
        direct_ratio: 0.5,
        trace_for: Duration::from_secs(60),
        keep: false,
        every: Duration::from_secs(120),
    };
    let mut rig = Rig::of_three(config);
    for vm in VMS {
        rig.host.change(vm, |vm| vm.cache_bytes = Some(0));
    }
    let own = |rig: &Rig| rig.host.vm("search").unwrap().direct_bytes / MIB;
    rig.until("search gains", |rig| own(rig) > 640);
    rig.until("it shrinks into its cache", |rig| own(rig) < 506);
    assert_eq!(rig.newest().kind, Kind::IntoCaches);
    // What was to go into the cache comes back, and the return begins meanwhile.
    rig.ask(Command::Pause).unwrap();
    let target = rig.host.vm("search").unwrap().target_bytes.unwrap();
    assert!(own(&rig) < 508 && target > 508 * MIB);
    rig.turns.begin_return(rig.now);
    rig.pass(30);
    for vm in VMS {
        let vm = rig.host.vm(vm).unwrap();
        let cache = vm.cache_bytes.unwrap();
        assert_eq!((vm.direct_bytes / MIB, cache / MIB), (508, 4));
    }
}

#[test]
fn no_plan_takes_what_a_balloon_does_not_get() {
    let mut rig = Rig::of_three(config(Mode::Act));
    rig.host.change("scan", |vm| vm.plugged_bytes = 400 * MIB);
    rig.pass(900);
    let has = rig.mib("scan");
    assert!((401..440).contains(&has), "{has}");
    for decision in rig.decisions() {
        assert_eq!(decision.state, State::Kept, "{decision:?}");
    }
}
