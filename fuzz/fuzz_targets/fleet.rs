//! Answers of hosts, and rules, of which a fleet's plan is made.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_fleet::fleet::{Fleet, Settings};
use plimsoll_fleet::place::Aim;
use plimsoll_fleet::rules::Rules;
use plimsoll_fleet::{discovery, plan};
use plimsoll_protocol::fleet::{FleetFile, Goal};

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let (rules, answers) = text.split_once('\0').unwrap_or(("", &text));
    let _ = discovery::of_list(answers);
    let _ = discovery::of_prometheus(answers, "plimsoll");
    let (Ok(rules), Ok(file)) = (
        Rules::parse(rules),
        serde_json::from_str::<FleetFile>(answers),
    ) else {
        return;
    };
    let interval_ms = file
        .hosts
        .first()
        .map_or(1, |host| host.demands.interval_ms);
    let settings = Settings {
        period_ms: interval_ms.saturating_mul(3),
        reserve_ratio: 0.1,
        processors_ratio: Some(1.0),
    };
    let Ok(fleet) = Fleet::of(&file, &settings) else {
        return;
    };
    let _ = plan::report(&file, &fleet);
    for goal in [Goal::Fit, Goal::FewestHosts] {
        let aim = Aim {
            goal,
            survive_loss: true,
            exhaustive: false,
        };
        if let Ok(plan) = plan::plan(&fleet, &rules, aim, Some(1e9)) {
            assert_eq!(plan.vms.len(), fleet.vms.len());
            assert_eq!(plan.hosts.len(), fleet.hosts.len());
        }
    }
});
