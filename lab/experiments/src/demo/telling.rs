//! Explains the demonstration while it runs, for a first-time user.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use plimsoll_flow::{PageCount, PageSize};
use plimsoll_observe::ObservedPeriod;
use plimsoll_protocol::decision::{Check, Decision, Kind, Phase, State};
use plimsoll_protocol::plan::TargetJson;

use crate::trio::{BASELINE_MIB, RAM_MIB, ServerCounts, Trio};

/// A server at one time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub(super) vm: String,
    /// Memory of its own and its cache.
    pub(super) bytes: u64,
    pub(super) requests: u64,
    pub(super) misses_per_request: f64,
}

/// Sizes at which the curves are shown, in MiB.
const SHOWN_MIB: [u64; 5] = [48, 64, 80, 96, 128];

pub(super) fn outside(
    trio: &Trio,
    views: &[anyhow::Result<ObservedPeriod>],
    begin: Instant,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    line(
        begin,
        out,
        "The first curves, by the first touches of random pages: how often per second each VM would miss what it uses now, \
         with less memory.",
    )?;
    write!(out, "          VM          ")?;
    for mib in SHOWN_MIB {
        write!(out, "{mib:>7} MiB")?;
    }
    writeln!(out, "   working set   cost of tracing")?;
    for (vm, view) in trio.servers.iter().map(|server| server.name).zip(views) {
        let period = match view {
            Ok(period) => period,
            Err(error) => {
                writeln!(out, "          {vm:<12} not traced: {error:#}")?;
                continue;
            }
        };
        write!(out, "          {vm:<12}")?;
        let curve = period.curve.as_ref();
        for mib in SHOWN_MIB {
            let size = PageCount::from_bytes(mib << 20, PageSize::FOUR_KIB);
            let misses = curve.and_then(|curve| Some(curve.misses_per_second(size)?.expected));
            let misses = misses.map_or("-".to_owned(), |misses| format!("{misses:.0}"));
            write!(out, "{misses:>11}")?;
        }
        let set = period.working_set.map_or("-".to_owned(), |set| {
            let mib = set.size.to_bytes(PageSize::FOUR_KIB) >> 20;
            format!("{}{mib} MiB", set.bound.sign())
        });
        let taken = period.period.overhead_ratio * 100.0;
        writeln!(out, "{set:>14} {taken:>8.1} % of its CPU")?;
    }
    Ok(out.flush()?)
}

pub(super) fn opening(out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "Three servers share {} MiB, {BASELINE_MIB} MiB each (and can have up to {RAM_MIB}):\n  \
         demo-web     reads files by popularity: each page of memory helps a little less than the one before\n  \
         demo-search  reads an index at random: memory helps until all of it fits\n  \
         demo-scan    reads everything in turn: by the time it comes back to a page, that is gone\n\
         Who could do with less, and who should have it? Nothing in the VMs says so. Booting them ...",
        3 * BASELINE_MIB
    )?;
    Ok(out.flush()?)
}

pub(super) fn booted(trio: &Trio, begin: Instant, out: &mut dyn Write) -> anyhow::Result<()> {
    let accelerator = trio.servers[0].accelerator();
    let note = if accelerator == "tcg" {
        " They are emulated (TCG), so only counts are shown, no speeds."
    } else {
        ""
    };
    line(begin, out, &format!("They serve.{note}"))
}

pub(super) fn before(out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "\nBEFORE: equal shares, once their memory is full. A miss is a page that had to come from the disk."
    )?;
    Ok(out.flush()?)
}

pub(super) fn table(rows: &[Row], out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "  VM             memory  requests  misses per request")?;
    for row in rows {
        writeln!(
            out,
            "  {:<12} {:>4} MiB  {:>8}  {:>18.3}",
            row.vm,
            row.bytes >> 20,
            row.requests,
            row.misses_per_request
        )?;
    }
    Ok(out.flush()?)
}

pub(super) fn daemon(page: &str, max_loss: u64, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "\nNow plimsolld is started. It may move memory, and has promised each VM at most {max_loss} % more misses than now.\n\
         Watch it at {page}\n"
    )?;
    Ok(out.flush()?)
}

pub(super) fn phase(phase: Phase, begin: Instant, out: &mut dyn Write) -> anyhow::Result<()> {
    let text = match phase {
        Phase::Whole => "All memory is the VMs' own.",
        Phase::Shrinking => {
            "Balloons take memory from the VMs; the same amount goes into a cache under each VM's disk."
        }
        Phase::Tracing => {
            "What a VM evicts goes into its cache, and a block that it reads is looked up there: the counts show how often \
             it would miss with less or more memory."
        }
        Phase::Moving => "Memory is moved from who loses little to who gains most.",
        Phase::Checking => "Moved. Were the promises kept? What is missed now is counted.",
        Phase::GivingBack => {
            "The caches' memory goes back to the VMs: each now has its new size as memory of its own."
        }
    };
    line(begin, out, text)
}

/// Reports changes of a decision since its state `earlier`.
pub(super) fn decision(
    earlier: Option<&Decision>,
    decision: &Decision,
    begin: Instant,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    if earlier.is_none() {
        let what = match decision.kind {
            Kind::Divide => "divide the memory anew",
            Kind::IntoCaches => "move memory into the caches",
            Kind::GiveBack => "give the caches' memory back",
            Kind::Rollback => "take a division back",
        };
        line(
            begin,
            out,
            &format!("Decision {}: {what}. {}", decision.id, decision.reason),
        )?;
        if let Some(plan) = &decision.plan {
            writeln!(out, "          VM             memory     predicted misses")?;
            for target in &plan.targets {
                if let Some(relative) = target.relative.filter(|_| target.vm.starts_with("demo-")) {
                    writeln!(
                        out,
                        "          {:<12} {:>4} > {:>3} MiB  {:>8.2} of before",
                        target.vm,
                        target.current_bytes >> 20,
                        target.target_bytes >> 20,
                        relative.expected
                    )?;
                }
            }
        }
    }
    let has_ended = decision.state.has_ended();
    if has_ended && earlier.is_none_or(|earlier| !earlier.state.has_ended()) {
        for check in &decision.checks {
            writeln!(out, "          {:<12} {}", check.vm, checked(check))?;
        }
        for step in &decision.steps {
            if let Some(error) = &step.error {
                writeln!(out, "          {:<12} {error}", step.vm)?;
            }
        }
        let text = match decision.state {
            State::Kept if decision.checks.is_empty() => "done",
            State::Kept => "done, and every VM stayed within its limit",
            State::RolledBack => "a VM exceeded its limit: it is rolled back",
            State::Partly => "done in part",
            State::Failed => "nothing was moved",
            _ => "stopped",
        };
        line(begin, out, &format!("Decision {}: {text}.", decision.id))?;
    }
    Ok(out.flush()?)
}

/// A check in words: measured compared with predicted.
fn checked(check: &Check) -> String {
    let number = |number: Option<f64>| number.map_or("-".to_owned(), |is| format!("{is:.2}"));
    format!(
        "predicted {}, measured {}, limit {}",
        number(check.predicted.map(|predicted| predicted.expected)),
        number(check.measured),
        number(check.bound)
    )
}

pub(super) fn after(out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "\nAFTER: the same servers with their new sizes, once they have filled what they gained."
    )?;
    Ok(out.flush()?)
}

/// Names the servers that have not filled their memory, with the share that they have.
pub(super) fn cold(cold: &[(&'static str, f64)], out: &mut dyn Write) -> anyhow::Result<()> {
    for (vm, filled) in cold {
        writeln!(
            out,
            "  {vm} has filled {:.0} % of its new memory only, and misses more than it will.",
            filled * 100.0
        )?;
    }
    Ok(out.flush()?)
}

/// Both times side by side.
pub(super) fn compare(
    before: &[ServerCounts],
    after: &[Row],
    division: Option<&Decision>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    table(after, out)?;
    let Some(plan) = division.and_then(|division| division.plan.as_ref()) else {
        writeln!(out, "\nNo allocation was worth a move.")?;
        return Ok(out.flush()?);
    };
    writeln!(
        out,
        "\n  VM            predicted  measured  promised: misses per request, 1.00 is before"
    )?;
    let (mut predicted_sum, mut measured_sum, mut count) = (0.0, 0.0, 0.0);
    for (before, after) in before.iter().zip(after) {
        let of_vm = |target: &&TargetJson| target.vm == after.vm;
        let target = plan.targets.iter().find(of_vm);
        let (Some(target), Some(was)) = (target, before.per_request()) else {
            continue;
        };
        let Some(predicted) = target.relative.map(|relative| relative.expected) else {
            continue;
        };
        let measured = after.misses_per_request / was;
        predicted_sum += predicted.ln();
        measured_sum += measured.ln();
        count += 1.0;
        let bound = 1.0 + target.max_loss.unwrap_or(f64::INFINITY);
        writeln!(
            out,
            "  {:<12} {predicted:>10.2}  {measured:>8.2}  {bound:>8.2}{}",
            after.vm,
            if measured > bound + 0.03 {
                "  ABOVE ITS PROMISE"
            } else {
                ""
            }
        )?;
    }
    if count > 0.0 {
        let mean = |sum: f64| (sum / count).exp();
        writeln!(
            out,
            "  {:<12} {:>10.2}  {:>8.2}",
            "together",
            mean(predicted_sum),
            mean(measured_sum)
        )?;
    }
    Ok(out.flush()?)
}

pub(super) fn saved(folder: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "\nThe plan as a picture, the decision and the curves that led to it: {}",
        folder.display()
    )?;
    Ok(out.flush()?)
}

pub(super) fn kept(page: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "All goes on until Ctrl-C: {page}")?;
    Ok(out.flush()?)
}

fn line(begin: Instant, out: &mut dyn Write, text: &str) -> anyhow::Result<()> {
    writeln!(out, "{:>5.0} s   {text}", begin.elapsed().as_secs_f64())?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_protocol::SCHEMA;
    use plimsoll_protocol::decision::{Initiator, Mode, Verdict};
    use plimsoll_protocol::plan::{PlanJson, Policy, Reason, Search};
    use plimsoll_protocol::vm::Relative;

    fn division(state: State) -> Decision {
        let search = Search::Optimal;
        let relative = |expected| {
            Some(Relative {
                expected,
                low: expected,
                high: expected,
            })
        };
        let target = TargetJson {
            vm: "demo-web".to_owned(),
            baseline_bytes: 160 << 20,
            current_bytes: 160 << 20,
            target_bytes: 148 << 20,
            max_loss: Some(0.25),
            max_misses_per_second: None,
            misses: None,
            relative_now: relative(1.0),
            relative: relative(1.2),
            reason: Reason::Gives,
        };
        Decision {
            schema: SCHEMA,
            id: 2,
            unix_ms: 0,
            kind: Kind::Divide,
            by: Initiator::Daemon,
            mode: Mode::Act,
            state,
            reason: "It pays.".to_owned(),
            inputs: None,
            plan: Some(PlanJson {
                schema: SCHEMA,
                policy: Policy::isolated(search),
                search: Some(search),
                total_bytes: 160 << 20,
                targets: vec![target],
                geometric_mean: 1.2,
                geometric_mean_now: 1.0,
                gap: Some(0.0),
                spare_bytes: 0,
                held: None,
            }),
            steps: Vec::new(),
            checks: vec![Check {
                vm: "demo-web".to_owned(),
                predicted: relative(1.2),
                measured: Some(1.17),
                by: "its disk".to_owned(),
                bound: Some(1.25),
                misses: None,
                stall: None,
                verdict: Verdict::Kept,
                why: String::new(),
            }],
            takes_back: None,
            taken_back_by: None,
            ended_unix_ms: None,
        }
    }

    fn told(earlier: Option<&Decision>, now: &Decision) -> String {
        let mut out = Vec::new();
        decision(earlier, now, Instant::now(), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_decision_is_told_when_it_is_taken_and_when_it_has_ended() {
        let (moving, kept) = (division(State::Moving), division(State::Kept));
        let first = told(None, &moving);
        assert!(first.contains("Decision 2: divide the memory anew. It pays."));
        assert!(first.contains("160 > 148 MiB") && first.contains("1.20 of before"));
        assert!(!first.contains("measured 1.17"));
        assert_eq!(told(Some(&moving), &division(State::Checking)), "");
        let last = told(Some(&moving), &kept);
        assert!(last.contains("predicted 1.20, measured 1.17, limit 1.25"));
        assert!(last.contains("every VM stayed within its limit"));
        assert_eq!(told(Some(&kept), &kept), "");
    }

    #[test]
    fn who_misses_more_than_promised_is_named() {
        let compared = |misses_per_request| {
            let before = ServerCounts {
                requests: 100,
                misses: 100.0,
                error: 0.0,
            };
            let after = Row {
                vm: "demo-web".to_owned(),
                bytes: 148 << 20,
                requests: 100,
                misses_per_request,
            };
            let mut out = Vec::new();
            compare(&[before], &[after], Some(&division(State::Kept)), &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert!(!compared(1.27).contains("ABOVE"));
        assert!(compared(1.29).contains("1.20      1.29      1.25  ABOVE ITS PROMISE"));
    }
}
