//! Curves that are kept of VMs that leave, and of all VMs when the daemon ends.

use plimsoll_daemon::history::History;
use plimsoll_protocol::curve_json::CurveJson;
use plimsoll_protocol::decision::Mode;

use crate::rig::{Rig, config};

const NAMES: [&str; 3] = ["web", "search", "scan"];

/// Times of the curves that are kept of a VM.
fn kept(rig: &Rig, name: &str) -> Vec<u64> {
    let curves = rig.shared.history.curves(name, 0).into_iter();
    curves.map(|(made, _)| made).collect()
}

#[test]
fn the_last_curve_of_a_vm_is_kept_when_it_leaves_or_the_daemon_ends() {
    let mut rig = Rig::of_three(config(Mode::Observe));
    rig.pass(30);
    for name in ["web", "search"] {
        rig.host.end(name);
    }
    rig.pass(10);
    for name in ["web", "search"] {
        assert_eq!(kept(&rig, name).len(), 1, "{name}");
    }
    rig.turns.run(&rig.commands, &|| true, &mut |_| ());
    for name in NAMES {
        assert_eq!(kept(&rig, name).len(), 1, "{name}");
    }
}

#[test]
fn last_curves_are_no_closer_to_others_than_curves_are_kept() {
    for seconds in [650, 900, 1150] {
        let mut rig = Rig::of_three(config(Mode::Observe));
        rig.pass(seconds);
        for name in NAMES {
            rig.host.end(name);
        }
        rig.pass(10);
        let end = rig.host.time().unix_ms;
        for name in NAMES {
            let times = kept(&rig, name);
            let last = *times.last().unwrap();
            assert!(end - last <= 620_000, "{name}: {times:?}, {end}");
            // The first is kept at once, the next one when its turn comes.
            let gaps = times.windows(2).skip(1).map(|pair| pair[1] - pair[0]);
            // A turn may begin a span late.
            assert!(gaps.min().is_none_or(|gap| gap >= 590_000), "{times:?}");
        }
    }
}

#[test]
fn a_curve_that_a_wrong_clock_has_dated_ahead_does_not_stand_for_the_last_one() {
    let history = History::nowhere();
    let curve = |references| CurveJson {
        schema: 1,
        vm: "web".to_owned(),
        page_bytes: 4096,
        references,
        baseline_pages: None,
        vcpu_seconds_per_second: None,
        uncertain_pages: 0,
        log_errors_permille: Vec::new(),
        points: Vec::new(),
    };
    let now_ms = 1_800_000_000_000;
    for (unix_ms, references) in [(now_ms + 86_400_000, 1), (now_ms, 2), (now_ms + 30_000, 3)] {
        history.keep_last_curves(unix_ms, &[curve(references)]);
    }
    let kept = history.curves("web", 0).into_iter();
    let kept: Vec<_> = kept.map(|(_, curve)| curve.references).collect();
    assert_eq!(kept, [2, 1]);
}
