//! All that is known of a VM, or of a control group: sections of lines, and the curve as bars.

use std::fmt::Write as _;

use plimsoll_flow::{Accelerator, Whole as _};
use plimsoll_output::{csv_table, per_second, printable, short};
use plimsoll_protocol::byte_curve::ByteCurve;
use plimsoll_protocol::group::GroupSummary;
use plimsoll_protocol::subject::{SizesOfInterest, Subject};
use plimsoll_protocol::vm::{CacheView, TraceState, TraceView, VmSummary};

use crate::daemon::curve_of;
use crate::words::{
    UNKNOWN, age, known, maybe_size, name_of, percent, ratio, relative, size, working_set,
};

/// Sizes at which the curve is shown, about.
const CURVE_LINES: u64 = 12;
/// Letters of a bar for a ratio of 1.
const BAR_LETTERS: f64 = 24.0;

/// Sections of lines: a term, its value, what it means.
struct Sections(String);

impl Sections {
    fn head(&mut self, title: &str) {
        let _ = writeln!(self.0, "\n{title}");
    }

    fn line(&mut self, term: &str, value: &str, meaning: &str) {
        let line = format!("  {term:<13} {value:<14} {meaning}");
        let _ = writeln!(self.0, "{}", line.trim_end());
    }
}

/// Everything but the numbers of the curve in full, in sections.
///
/// # Errors
///
/// If its curve is invalid.
pub fn text(subject: &Subject, now_unix_ms: u64) -> anyhow::Result<String> {
    let mut sections = match subject {
        Subject::Vm(view) => of_vm(&view.summary, now_unix_ms),
        Subject::Group(view) => of_group(&view.summary, now_unix_ms),
    };
    curve_section(subject, now_unix_ms, &mut sections)?;
    Ok(sections.0)
}

/// All of a VM but its curve.
fn of_vm(vm: &VmSummary, now_unix_ms: u64) -> Sections {
    let mut kind = match vm.accelerator {
        Some(Accelerator::Tcg) => {
            "emulated (tcg): times do not carry over to real hardware".to_owned()
        }
        Some(accelerator) => accelerator.to_string(),
        None => "accelerator unknown".to_owned(),
    };
    if vm.libvirt {
        kind.push_str(", managed by libvirt");
    }
    if let Some(state) = &vm.stopped {
        let _ = write!(kind, "; its CPUs do not run: {}", printable(state));
    }
    let mut sections = Sections(format!(
        "VM {} (process {}), {kind}\n{}: {}\n",
        printable(&vm.vm),
        vm.pid,
        name_of(vm.status),
        printable(&vm.why),
    ));
    memory(vm, &mut sections);
    promise(vm, &mut sections);
    let overhead = "of its CPU time taken by its tracer";
    tracing(vm.trace.as_ref(), overhead, now_unix_ms, &mut sections);
    if let Some(balloon) = &vm.balloon {
        sections.head("Balloon");
        sections.line("state", &name_of(balloon.state), "");
        let target = "last requested guest memory size";
        sections.line("target", &maybe_size(balloon.target_bytes), target);
        let actual = "what it has of its own";
        sections.line("actual", &size(balloon.actual_bytes), actual);
        let said = match balloon.statistics_age_ms {
            Some(ms) => format!("available memory reported by the guest {} ago", age(ms, 0)),
            None => "its guest has not reported statistics yet".to_owned(),
        };
        sections.line(
            "available",
            &maybe_size(balloon.guest_available_bytes),
            &said,
        );
    } else {
        sections.head("Balloon");
        let reason = match vm.libvirt {
            true => "its size is fixed: it has none, or libvirt.uri does not lead to it",
            false => "its size is fixed: it has none, or no monitor that can be used",
        };
        sections.line("state", "none", reason);
    }
    if let Some(cache) = &vm.cache {
        under_disk(cache, &mut sections);
    }
    sections
}

/// The curve, with its source and the time when it was made.
fn curve_section(
    subject: &Subject,
    now_unix_ms: u64,
    sections: &mut Sections,
) -> anyhow::Result<()> {
    let Some(json) = subject.curve() else {
        sections.head("Curve\n  not known yet");
        return Ok(());
    };
    let curve = curve_of(json)?;
    let (from, age) = subject
        .curve_origin()
        .map_or_else(Default::default, |(source, made)| {
            let from = format!("from {}, ", source.description());
            (from, format!(", {} old", age(now_unix_ms, made)))
        });
    let references = short(json.references as f64);
    sections.head(&format!("Curve ({from}{references} references{age})"));
    sections.0.push_str(&plot(&subject.sizes(), &curve));
    Ok(())
}

/// All of a control group but its curve.
fn of_group(group: &GroupSummary, now_unix_ms: u64) -> Sections {
    let mut sections = Sections(format!(
        "control group {} ({}), version {}: only observed\n{}\n",
        printable(&group.group),
        group.kind,
        group.cgroup_version,
        printable(&group.path),
    ));
    for warning in &group.warnings {
        let _ = writeln!(sections.0, "warning: {}", printable(warning));
    }
    sections.head("Memory");
    let charged = "of its processes and page cache, with the groups below it";
    sections.line("charged", &maybe_size(group.charged_bytes), charged);
    let limit = "its own; those of the groups above it count as well";
    let most = group.limit_bytes.map_or_else(|| "none".to_owned(), size);
    sections.line("limit", &most, limit);
    let uses = working_set(group.working_set.as_ref());
    sections.line("uses", &uses, "its working set, by its curve");
    let overhead = "of one CPU's time taken by its tracer";
    tracing(group.trace.as_ref(), overhead, now_unix_ms, &mut sections);
    sections
}

fn memory(vm: &VmSummary, sections: &mut Sections) {
    sections.head("Memory");
    sections.line(
        "size",
        &size(vm.size_bytes),
        "what serves it: its own and its cache",
    );
    let ram = format!("of its own: RAM of {} less its balloon", size(vm.ram_bytes));
    sections.line("own", &size(vm.direct_bytes), &ram);
    let cache = match &vm.cache {
        Some(_) => "capacity of the exclusive cache under its disk",
        None => "there is no cache under its disk",
    };
    sections.line("cache", &size(vm.cache_bytes), cache);
    if vm.target_bytes.is_some() {
        let target = "what it is to have, as decided";
        sections.line("target", &maybe_size(vm.target_bytes), target);
    }
    let uses = working_set(vm.working_set.as_ref());
    sections.line("uses", &uses, "its working set, by its curve");
    let give = "within its limit";
    sections.line("could give", &maybe_size(vm.reclaimable_bytes), give);
    let least = "smallest size within its limit";
    sections.line("needs", &maybe_size(vm.promise_bytes), least);
}

fn promise(vm: &VmSummary, sections: &mut Sections) {
    let settings = &vm.settings;
    sections.head("Promise");
    let baseline = "size that its misses are measured by";
    sections.line("baseline", &size(settings.baseline_bytes), baseline);
    let promise = settings.promise;
    if let Some(max_loss) = promise.max_loss {
        let loss = "most rise of its misses over those at the baseline";
        sections.line("max loss", &percent(max_loss), loss);
    }
    if let Some(most) = promise.max_misses_per_second {
        sections.line("max misses", &format!("{most}/s"), "most misses per second");
    }
    if let Some(max_stall) = promise.max_stall {
        let stall = "most time that it waits for misses, over its vCPU time";
        sections.line("max stall", &percent(max_stall), stall);
    }
    let cost = vm.miss_cost;
    sections.line("miss cost", &cost.to_string(), cost.source.description());
    if let Some(stalled) = vm.memory_stall_ratio {
        let host = "of the time a thread of its QEMU waits for memory of the host";
        sections.line("stalled", &percent(stalled), host);
    }
    let (misses, band) = match &vm.relative {
        Some(at) => (
            ratio(at.expected),
            format!(
                "predicted, over those at the baseline; {} to {} by the band",
                ratio(at.low),
                ratio(at.high)
            ),
        ),
        None => {
            let why = match vm.curve_source {
                Some(_) => "its curve does not resolve its size",
                None => "its curve is not known",
            };
            (UNKNOWN.to_owned(), why.to_owned())
        }
    };
    if let Some(at) = &vm.misses {
        let rate = per_second(at.misses_per_second);
        let limits = format!(
            "predicted, of wall time; {} to {} by the band",
            per_second(at.misses_low_per_second),
            per_second(at.misses_high_per_second)
        );
        sections.line("misses/s", &rate, &limits);
        if let Some(seconds) = vm.vcpu_seconds_per_second {
            let rate = per_second(at.misses_per_second / seconds);
            let busy = format!("per second of vCPU time, of which it uses {seconds:.2} a second");
            sections.line("misses/vCPU s", &rate, &busy);
        }
    }
    sections.line("misses", &misses, &band);
    sections.line("min", &size(settings.min_bytes), "it never gets less");
    sections.line("max", &size(settings.max_bytes), "it never gets more");
    let shares = "its proportional right to memory";
    sections.line("shares", &settings.shares.to_string(), shares);
    let (managed, meaning) = if settings.managed {
        ("yes", "the daemon may move its memory")
    } else {
        ("no", "the daemon moves none of its memory")
    };
    sections.line("managed", managed, meaning);
}

/// Its tracer, with what its cost is a share of.
fn tracing(trace: Option<&TraceView>, overhead: &str, now_unix_ms: u64, sections: &mut Sections) {
    sections.head("Tracing");
    let Some(trace) = trace else {
        sections.line("state", "not traced", "");
        return;
    };
    let process = trace.pid.map(|pid| format!("by process {pid}"));
    let error = trace.error.as_deref().map(printable);
    let meaning = error.or(process).unwrap_or_default();
    sections.line("state", &name_of(trace.state), &meaning);
    if trace.state == TraceState::Refused {
        return;
    }
    sections.line("overhead", &percent(trace.overhead_ratio), overhead);
    let tracked = format!("of its pages: {}", short(trace.tracked_pages as f64));
    sections.line("watched", &percent(trace.tracking_rate), &tracked);
    let (term, rate, meaning) = if trace.method.traps() {
        (
            "traps",
            trace.traps_per_second,
            "traps per second in the last period",
        )
    } else {
        (
            "touches",
            trace.touches_per_second,
            "pages per second that scans found touched in the last period",
        )
    };
    sections.line(term, &format!("{rate:.0} /s"), meaning);
    let periods = trace.last_unix_ms.map_or_else(String::new, |last| {
        format!("the last ended {} ago", age(now_unix_ms, last))
    });
    sections.line("periods", &trace.periods.to_string(), &periods);
    let lost = "references that may be missing, of all periods";
    sections.line("lost", &trace.lost.to_string(), lost);
    if trace.lost_lines > 0 {
        let lines = "reports of its tracer that could not be read";
        sections.line("lost lines", &trace.lost_lines.to_string(), lines);
    }
    if trace.restarts > 0 {
        let restarts = "times that its tracer was started anew";
        sections.line("restarts", &trace.restarts.to_string(), restarts);
    }
}

fn under_disk(cache: &CacheView, sections: &mut Sections) {
    sections.head("Cache under its disk");
    let of = format!("of {} that it may hold", size(cache.capacity_bytes));
    sections.line("used", &size(cache.used_bytes), &of);
    let hits = cache.hits as f64 / (cache.read_blocks as f64).max(1.0);
    let read = format!(
        "of {} blocks read came from it",
        short(cache.read_blocks as f64)
    );
    sections.line("hits", &percent(hits), &read);
    if let Some(why) = &cache.disabled {
        sections.line("DISABLED", "", &printable(why));
    }
}

/// The curve at some sizes, with those that matter marked: misses per second first, if they are known.
pub fn plot(of: &SizesOfInterest, curve: &ByteCurve) -> String {
    if curve.misses.points()[0].misses.is_some() {
        return rates(of, curve);
    }
    let heading = of.baseline_bytes.map_or("", |_| "x baseline (band)");
    let head = format!(
        "  {:>9}  {:<w$}  {:>7}  {heading}",
        "size",
        "misses of its references",
        "",
        w = 24
    );
    let mut text = format!("{}\n", head.trim_end());
    for (bytes, mark) in lines_of(of, curve) {
        let at = curve.at(bytes);
        let over = of.baseline_bytes.map_or_else(String::new, |baseline| {
            format!(
                "{:<21} ",
                relative(curve.relative(bytes, baseline).as_ref())
            )
        });
        let line = format!(
            "  {:>9}  {:<24}  {:>5.1} %  {over}{mark}",
            size(bytes),
            bar(at.miss_ratio),
            at.miss_ratio * 100.0,
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// The sizes of a plot, each with its names.
fn lines_of<'a>(of: &'a SizesOfInterest, curve: &ByteCurve) -> Vec<(u64, &'a str)> {
    let sizes: Vec<_> = of.marks.keys().copied().collect();
    let sizes = curve
        .sizes(of.until(curve), CURVE_LINES, &sizes)
        .into_iter();
    let marked = sizes.map(|bytes| (bytes, of.marks.get(&bytes).map_or("", String::as_str)));
    marked.collect()
}

/// [`plot`] of a curve with misses per second.
fn rates(of: &SizesOfInterest, curve: &ByteCurve) -> String {
    let heading = of.baseline_bytes.map_or("", |_| "x baseline");
    let head = format!(
        "  {:>9}  {:>8}  {:<17}  {:<12}  {:>7}  {heading:>10}",
        "size", "misses/s", "(band)", "share of the", "misses"
    );
    let mut text = format!("{}\n", head.trim_end());
    for (bytes, mark) in lines_of(of, curve) {
        let at = curve.at(bytes);
        let (rate, band) = at.misses.map_or_else(
            || (UNKNOWN.to_owned(), "not resolved".to_owned()),
            |misses| {
                let [low, high] = [misses.low, misses.high].map(per_second);
                (per_second(misses.expected), format!("({low} to {high})"))
            },
        );
        let over = of.baseline_bytes.map_or_else(String::new, |baseline| {
            let relative = curve.relative(bytes, baseline);
            known(relative, |at| ratio(at.expected))
        });
        let share = at.shown_ratio();
        let line = format!(
            "  {:>9}  {rate:>8}  {band:<17}  {:<12}  {:>5.1} %  {over:>10}  {mark}",
            size(bytes),
            bar(share / 2.0),
            share * 100.0,
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// A share as a bar of eighths of characters.
fn bar(share: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = usize::whole((share.clamp(0.0, 1.0) * BAR_LETTERS * 8.0).round());
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

/// The curve as comma-separated values.
pub fn csv(baseline_bytes: Option<u64>, curve: &ByteCurve) -> String {
    csv_table!(curve.misses.points(), |point| {
        "size_bytes": point.size.to_bytes(curve.page_size),
        "miss_ratio": point.miss_ratio,
        "low": point.low,
        "high": point.high,
        "relative": baseline_bytes.and_then(|baseline| {
            let bytes = point.size.to_bytes(curve.page_size);
            Some(curve.relative(bytes, baseline)?.expected)
        }),
        "misses_per_second": point.misses.map(|misses| misses.expected),
        "misses_low_per_second": point.misses.map(|misses| misses.low),
        "misses_high_per_second": point.misses.map(|misses| misses.high),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;
    use plimsoll_protocol::vm::VmView;

    fn shown(vm: &str, change: impl FnOnce(&mut VmView)) -> String {
        let mut view = example::vm(vm).unwrap();
        change(&mut view);
        text(&Subject::Vm(Box::new(view)), example::NOW_UNIX_MS).unwrap()
    }

    #[test]
    fn a_vm_that_no_backend_can_observe_is_shown_with_the_reason_and_without_numbers_of_a_tracer() {
        let why = "no backend that gives a curve can observe it (trap: its RAM is private)";
        let text = shown("web", |view| {
            let trace = view.summary.trace.as_mut().unwrap();
            (trace.state, trace.error) = (TraceState::Refused, Some(why.to_owned()));
        });
        let tracing = text.split_once("\nTracing\n").unwrap().1;
        let tracing = tracing.split_once("\n\n").unwrap().0;
        assert_eq!(tracing, format!("  state         refused        {why}"));
    }

    #[test]
    fn a_vm_that_is_paused_is_shown_as_that() {
        let runs = shown("web", |_| {});
        assert!(!runs.contains("do not run"), "{runs}");
        let text = shown("web", |view| {
            view.summary.stopped = Some("paused\u{7}".to_owned());
        });
        let head = text.lines().next().unwrap();
        assert!(
            head.ends_with("; its CPUs do not run: paused\u{fffd}"),
            "{head}"
        );
    }

    #[test]
    fn a_bar_is_as_long_as_its_share() {
        assert_eq!(bar(0.0), "");
        assert_eq!(bar(1.0), "█".repeat(24));
        assert_eq!(bar(0.5), "█".repeat(12));
        assert_eq!(bar(1.0 / 192.0), "▏");
        assert_eq!(
            (bar(f64::NAN), bar(7.0).chars().count()),
            (String::new(), 24)
        );
    }
}
