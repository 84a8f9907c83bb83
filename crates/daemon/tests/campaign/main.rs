//! A campaign of random faults against the control loop: guests lie, stall, die and come back, hosts run short, clocks
//! step, operators interfere and the daemon is killed, while the rules of [`rules`] are checked at every target that it
//! sets.
//!
//! A seed that breaks a rule is run again with ever fewer events, and what is left is printed. `PLIMSOLL_SIM_SEED=N`
//! repeats one seed; `PLIMSOLL_SIM_FROM=N` begins with another one than the first.

mod plan;
mod rules;
mod run;
#[allow(dead_code, reason = "shared with other tests")]
#[path = "../common/simulated.rs"]
mod simulated;

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};

use plan::{Event, Plan};
use rules::Finding;
use run::{Covered, RETURN_MAX, run};

/// Turns of the campaign, before `PLIMSOLL_TESTS_LONGER`.
const TURNS: usize = 4000;
/// Runs by which a history is shortened at most.
const SHORTENINGS_MAX: u32 = 400;

type Outcome = Result<Covered, (u64, Finding)>;

fn run_safely(plan: &Plan, events: &[(u64, Event)]) -> Outcome {
    let ran = catch_unwind(AssertUnwindSafe(|| run(plan, events)));
    ran.unwrap_or_else(|_| Err((0, Finding::new("the daemon panicked"))))
}

/// The fewest events that were found to break the same rule.
fn shortened(plan: &Plan, finding: &Finding) -> Vec<(u64, Event)> {
    let mut events = plan.events.clone();
    let mut left = SHORTENINGS_MAX;
    let mut length = events.len().div_ceil(2);
    while length > 0 {
        let mut at = 0;
        while at < events.len() && left > 0 {
            let mut fewer = events.clone();
            fewer.drain(at..(at + length).min(events.len()));
            left -= 1;
            match run_safely(plan, &fewer) {
                Err((_, other)) if other.what == finding.what => events = fewer,
                _ => at += length,
            }
        }
        length = if length == 1 { 0 } else { length.div_ceil(2) };
    }
    events
}

fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is no number")),
    )
}

#[test]
fn no_rule_is_broken_whatever_guests_hosts_and_operators_do() {
    let only = number("PLIMSOLL_SIM_SEED");
    let first = only.or_else(|| number("PLIMSOLL_SIM_FROM")).unwrap_or(0);
    let wanted = plimsoll_skip::longer(TURNS) as u64;
    let mut covered = Covered::default();
    let mut seeds = 0;
    for seed in first.. {
        if covered.turns >= wanted || only.is_some() && seeds > 0 {
            break;
        }
        let plan = Plan::of_seed(seed);
        match run_safely(&plan, &plan.events) {
            Ok(more) => covered.add(&more),
            Err((_, finding)) => {
                let events = shortened(&plan, &finding);
                let (second, finding) = match run_safely(&plan, &events) {
                    Err(found) => found,
                    Ok(_) => (0, finding),
                };
                println!(
                    "seed {seed}: {} of {} events are left:",
                    events.len(),
                    plan.events.len()
                );
                println!("{}", plan.text());
                for (at, event) in events.iter().filter(|(at, _)| *at <= second) {
                    println!("{at:>6} s  {event:?}");
                }
                panic!(
                    "after {} turns of {seeds} seeds, seed {seed} at {second} s: {}: {}\nrepeat it: PLIMSOLL_SIM_SEED={seed} cargo test -p plimsoll-daemon --release --test campaign",
                    covered.turns, finding.what, finding.how
                );
            }
        }
        seeds += 1;
    }
    println!(
        "{seeds} seeds, at most {} s for a return: {covered:?}",
        RETURN_MAX.as_secs()
    );
}
