//! The trace of a VM, process or control group: a row for each period, the costs and the curve at the end.

mod lines;
mod totals;

use std::io::Write;

use plimsoll_flow::{
    Accelerator, MissRatioCurve, MissesPerSecond, PageCount, PageSize, Period, TraceMethod,
    WorkingSet,
};
use plimsoll_observe::args::TracingArgs;
use plimsoll_observe::description::{of_group, of_process};
use plimsoll_observe::{Curves, ObservedPeriod, Observer, TracingLimit, WINDOW_MIN};
use plimsoll_output::{Format, grouped, per_second};
use plimsoll_plot::{Chart, Marker, Series, Shade};
use plimsoll_protocol::size::ByteSize;
use plimsoll_protocol::tracer::TracerLine;
use plimsoll_trap::{BackendRow, Candidate, Choice, TouchCost, Toucher, Yield, damon_thread};
use plimsoll_vm::Target;

pub use totals::Totals;

const POINTS_OF_TABLE: usize = 16;

/// Writes what is seen of a VM, in the requested format.
pub struct TracingReport<'a> {
    tracing: &'a TracingArgs,
    /// Whether AET is compared with exact LRU.
    is_compared: bool,
    /// Whether each period has its curve in JSON.
    has_curves: bool,
    target: &'a Target,
    backend: &'static BackendRow,
    /// `None` if the user chose the backend.
    choice: Option<&'a Choice>,
    /// Sums so far.
    pub totals: Totals,
    /// Whether uses of page cache by `read(2)` are not seen.
    is_cache_hidden: bool,
    /// Whether a limit of what periods show was printed.
    is_limit_shown: bool,
    /// Why the last whole period shows little.
    limit: Option<TracingLimit>,
}

impl<'a> TracingReport<'a> {
    /// Nothing yet of what an observer of a target sees by a backend, which was chosen from others if there is a `choice`.
    pub fn new(
        tracing: &'a TracingArgs,
        target: &'a Target,
        backend: &'static BackendRow,
        choice: Option<&'a Choice>,
        observer: &Observer,
    ) -> Self {
        Self {
            tracing,
            is_compared: false,
            has_curves: false,
            target,
            backend,
            choice,
            totals: Totals::default(),
            is_cache_hidden: observer.is_cache_hidden(),
            is_limit_shown: false,
            limit: None,
        }
    }

    /// Shows AET beside exact LRU, and in JSON each period's curve.
    #[must_use]
    pub fn with(mut self, is_compared: bool, has_curves: bool) -> Self {
        (self.is_compared, self.has_curves) = (is_compared, has_curves);
        self
    }

    /// RAM of a VM; other targets may grow.
    fn ram(&self) -> Option<PageCount> {
        let ram = self.target.vm()?.ram.iter();
        let bytes = ram.map(|ram| ram.len_bytes).sum();
        Some(PageCount::from_bytes(bytes, PageSize::FOUR_KIB))
    }

    /// vCPUs of whose time the budget is a share; a process or a group counts as one.
    fn vcpus(&self) -> usize {
        self.target.vm().map_or(1, |vm| vm.vcpus.len().max(1))
    }

    fn accelerator(&self) -> Option<Accelerator> {
        self.target.vm()?.accelerator
    }

    /// What is traced, in a line.
    fn heading(&self) -> String {
        let name = self.target;
        match self.target {
            Target::Vm(vm) => {
                let vcpus = match vm.vcpus.len() {
                    // QEMU names its threads with -name debug-threads=on, and a monitor lists them.
                    0 => "vCPUs unknown (without debug-threads=on and a monitor; counted as 1)"
                        .to_owned(),
                    1 => "1 vCPU".to_owned(),
                    count => format!("{count} vCPUs"),
                };
                let accelerator = vm.accelerator.map_or_else(
                    || "accelerator unknown".to_owned(),
                    |accelerator| accelerator.to_string(),
                );
                format!(
                    "{name} (process {}): {} of RAM, {vcpus}, {accelerator}",
                    vm.pid,
                    size(self.ram().unwrap_or_default()),
                )
            }
            Target::Process(process) => format!("{name}: {}", of_process(process)),
            Target::Group(group) => format!("{name}: {}", of_group(group)),
        }
    }

    /// Whether a period showed use of memory, or that there was none.
    fn use_seen(&self, observed: &ObservedPeriod) -> Use {
        let period = &observed.period;
        let sees_all = self.backend.sees_reads && !observed.has_hidden_cache;
        match period.references() + period.distinct_pages {
            0 if sees_all && shows_that_nothing_is_used(period) => Use::None,
            0 => Use::Unknown,
            _ => Use::Some,
        }
    }

    /// Why there is no curve.
    pub fn no_curve(&self) -> String {
        let (target, backend) = (self.target, self.backend.name());
        if self.backend.yields == Yield::Sample {
            return format!("the backend {backend} gives working sets alone");
        }
        if let Some(limit) = self.limit {
            return limit.to_string();
        }
        let used = if self.backend.sees_reads {
            "use"
        } else {
            "write"
        };
        if self.totals.traps + self.totals.touches == 0 {
            format!("no {used} of a page was observed while {target} was traced")
        } else {
            format!("no two {used}s of a page could be distinguished while {target} was traced")
        }
    }

    /// Writes what is traced and how.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn begin(
        &self,
        format: Format,
        observer: &Observer,
        rows: &mut dyn Write,
    ) -> std::io::Result<()> {
        match format {
            Format::Json => {}
            Format::Csv => writeln!(
                rows,
                "period,seconds,working_set_pages,working_set_bound,tracking_rate,tracked_pages,\
                 traps,overhead_ratio,lost,touches"
            )?,
            Format::Table | Format::Svg | Format::Png => {
                self.begin_table(&observer.touch_cost(), rows)?;
            }
        }
        rows.flush()
    }

    fn begin_table(&self, cost: &TouchCost, rows: &mut dyn Write) -> std::io::Result<()> {
        writeln!(rows, "{}", self.heading())?;
        for candidate in self.candidates() {
            let is_chosen = candidate.row.method == self.backend.method;
            let chosen = if is_chosen { "chosen" } else { "not chosen" };
            let name = candidate.row.name();
            writeln!(rows, "Backend {name} {chosen}: {candidate}")?;
        }
        if !self.backend.sees_reads {
            writeln!(
                rows,
                "Only writes are observed: what is only read is in no working set and in no curve below."
            )?;
        }
        if self.is_cache_hidden {
            writeln!(
                rows,
                "This kernel reclaims by generations (MGLRU): page cache that is read by read(2) looks idle, and working sets with \
                 page cache are lower bounds."
            )?;
        }
        let (cost, touches, more) = self.cost(cost);
        let hot_set = match self.backend.yields {
            Yield::References => {
                format!("hot set up to {} pages, ", self.tracing.hot_set_pages())
            }
            _ => String::new(),
        };
        let (period, budget) = (&self.tracing.period, &self.tracing.budget);
        writeln!(
            rows,
            "{cost} Period {period}, {hot_set}budget {budget}.\n\n\
             period  working set    rate    tracked {touches:>9}  overhead  watched  lost{more}"
        )
    }

    /// What a touch costs the target, and the heads of the columns that depend on the backend: touches, and one more.
    fn cost(&self, cost: &TouchCost) -> (String, &'static str, &'static str) {
        let us = cost.time.as_secs_f64() * 1e6;
        let of = match (cost.toucher, self.accelerator()) {
            (Toucher::KvmVcpu, _) => " of a KVM vCPU",
            (Toucher::Thread, Some(Accelerator::Kvm)) => {
                " of a thread (measured without KVM; a vCPU may lose more)"
            }
            (Toucher::Thread, _) => "",
        };
        let trap = || format!("A trap costs {us:.0} µs{of} on this host.");
        match self.backend.yields {
            Yield::FirstTouches if self.backend.method.traps() => (trap(), "traps/s", "  waiting"),
            Yield::FirstTouches if self.backend.method == TraceMethod::IdlePages => {
                let damon = damon_thread().map_or_else(String::new, |thread| {
                    format!(
                        "DAMON runs on this host (process {thread}) and marks pages idle too: where it does so just before a check, \
                         a touch is missed.\n"
                    )
                });
                let ns = us * 1e3;
                let cost = format!(
                    "{damon}A touch of an idle page costs {ns:.0} ns more{of} on this host."
                );
                (cost, "touches/s", "  interval")
            }
            Yield::Stream => {
                let sizes = "Sizes below are of page cache: anonymous memory, and uses of files through mappings, are not observed.";
                (sizes.to_owned(), "uses/s", "")
            }
            Yield::FirstTouches if cost.time.is_zero() => {
                let cost = "A touch takes no fault.".to_owned();
                (cost, "touches/s", "  interval")
            }
            Yield::FirstTouches | Yield::Scans | Yield::Sample => {
                let what = match self.backend.method {
                    TraceMethod::WriteScans => "The first write to a page after a scan",
                    _ => "A minor fault",
                };
                let cost = format!("{what} costs {us:.1} µs{of} on this host.");
                (cost, "touches/s", "  interval")
            }
            Yield::References if self.is_compared => (trap(), "traps/s", "  AET-LRU MAE"),
            Yield::References => (trap(), "traps/s", ""),
        }
    }

    /// Writes a period.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn period(
        &mut self,
        format: Format,
        period: &ObservedPeriod,
        rows: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let report = &period.period;
        self.totals.add(report);
        // One that was cut short shows no limit.
        if report.length >= self.tracing.period.get() {
            let budget = self.tracing.budget_of_period(self.vcpus());
            self.limit = TracingLimit::of(report, budget);
        }
        let seconds = report.length.as_secs_f64();
        match format {
            Format::Json => {
                let line = TracerLine::Period(Box::new(self.period_line(period)));
                writeln!(rows, "{}", line.write()?)?;
            }
            Format::Csv => {
                let set = period.working_set;
                let touches = if report.method.traps() {
                    String::new()
                } else {
                    report.scans.touches.to_string()
                };
                writeln!(
                    rows,
                    "{},{seconds:.3},{},{},{},{},{},{:.6},{},{touches}",
                    report.index,
                    set.map(|set| set.size.to_string()).unwrap_or_default(),
                    set.map(|set| set.bound.to_string()).unwrap_or_default(),
                    1.0 / f64::from(report.scale),
                    report.tracked_pages,
                    report.traps.taken,
                    report.overhead_ratio,
                    report.losses.lost(),
                )?;
            }
            Format::Table | Format::Svg | Format::Png => {
                let more = match self.backend.yields {
                    Yield::FirstTouches if report.method.traps() => {
                        format!("  {:>7}", grouped(report.samples.waiting as f64))
                    }
                    Yield::FirstTouches | Yield::Scans | Yield::Sample => {
                        format!("  {:>5.1} ms", report.scans.interval.as_secs_f64() * 1e3)
                    }
                    Yield::References if self.is_compared => period.distance().map_or_else(
                        || format!("  {:>11}", "-"),
                        |distance| format!("  {:>11.4}", distance.mean_absolute_error),
                    ),
                    Yield::References | Yield::Stream => String::new(),
                };
                writeln!(
                    rows,
                    "{:>6}  {:>11}  1/{:<5} {:>9} {:>9.0}  {:>6.2} %  {:>5.0} %  {:>4}{more}",
                    report.index,
                    working_set(period.working_set, self.use_seen(period)),
                    report.scale,
                    grouped(report.tracked_pages as f64),
                    report.references() as f64 / seconds,
                    report.overhead_ratio * 100.0,
                    report.window.as_secs_f64() / seconds * 100.0,
                    report.losses.lost(),
                )?;
                let limit = self.limit.map(|limit| limit.to_string());
                let is_short_lived = is_short_lived(period.working_set, self.use_seen(period));
                let limit = limit.or(is_short_lived.then(|| SHORT_LIVED.to_owned()));
                if let Some(limit) = limit.filter(|_| !self.is_limit_shown) {
                    self.is_limit_shown = true;
                    writeln!(rows, "        {limit}")?;
                }
            }
        }
        rows.flush()?;
        Ok(())
    }

    fn candidates(&self) -> &[Candidate] {
        self.choice.map_or(&[], |choice| &choice.candidates)
    }

    /// Writes costs and curve of the whole trace.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn end(
        &self,
        format: Format,
        chosen: Option<&MissRatioCurve>,
        set: Option<WorkingSet>,
        compared: Option<&Curves>,
        rows: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let distance = compared.and_then(Curves::distance);
        match format {
            Format::Csv => {}
            Format::Json => {
                let line = self.final_line(chosen, compared);
                writeln!(rows, "{}", TracerLine::Final(Box::new(line)).write()?)?;
            }
            Format::Table | Format::Svg | Format::Png => {
                self.costs(rows)?;
                match chosen {
                    Some(curve) => self.curve_table(curve, set, compared, rows)?,
                    None => writeln!(rows, "\nNo curve: {}.", self.no_curve())?,
                }
                if let Some(limit) = self.limit.filter(|_| chosen.is_some()) {
                    writeln!(rows, "\nThe last period: {limit}.")?;
                }
                if let Some(distance) = distance {
                    writeln!(
                        rows,
                        "\nAET against exact LRU on the same references: mean absolute error {:.4}, \
                         largest {:.4} at {}.",
                        distance.mean_absolute_error,
                        distance.max_absolute_error,
                        size(distance.max_at),
                    )?;
                }
            }
        }
        rows.flush()?;
        Ok(())
    }

    /// The stages' cost, \[AET\] §4.3.
    fn costs(&self, rows: &mut dyn Write) -> std::io::Result<()> {
        let totals = &self.totals;
        let traps = format!("{} traps", grouped(totals.traps as f64));
        let (observed, touches, again, arming) = match self.backend.yields {
            Yield::References => (traps, "traps", "re-armed", "re-arming"),
            Yield::FirstTouches if self.backend.method.traps() => {
                (traps, "traps", "armed", "choosing, arming and estimating")
            }
            Yield::Stream => return self.stream_costs(rows),
            Yield::FirstTouches => {
                let checks = grouped(totals.scans as f64);
                let touched = grouped(totals.touches as f64);
                let observed = format!("{checks} checks, {touched} pages touched");
                (
                    observed,
                    "touches",
                    "checked",
                    "setting up, checking and reading",
                )
            }
            Yield::Scans | Yield::Sample => {
                let scans = grouped(totals.scans as f64);
                let touches = grouped(totals.touches as f64);
                let observed = format!("{scans} scans, {touches} touches");
                let again = match self.backend.method {
                    TraceMethod::WriteScans => "protected",
                    _ => "unmapped",
                };
                (observed, "faults", again, "scanning")
            }
        };
        writeln!(
            rows,
            "\n{} periods in {:.1} s: {observed}, {} pages {again}, {} lost, {} first touches unseen.",
            totals.periods,
            totals.length.as_secs_f64(),
            grouped(totals.rearmed_pages as f64),
            grouped(totals.lost as f64),
            grouped(totals.first_touches_unseen as f64),
        )?;
        let base = match self.target {
            Target::Vm(_) => "the VM's CPU time",
            Target::Process(_) | Target::Group(_) => "one CPU",
        };
        writeln!(
            rows,
            "Time: {touches} {:.3} s, {arming} {:.3} s, finding pages {:.3} s; overhead {:.2} % of {base}.",
            totals.trap_time.as_secs_f64(),
            totals.rearm_time.as_secs_f64(),
            totals.collect_time.as_secs_f64(),
            totals.overhead_ratio() * 100.0,
        )?;
        if let Some(kinds) = totals.kinds {
            let count = |pages: u64| grouped(pages as f64);
            writeln!(
                rows,
                "Of the last {} sampled pages {} lay in huge pages, {} were page cache or shared memory, and {} were swapped out.",
                count(totals.tracked_pages),
                count(kinds.huge_pages),
                count(kinds.cache_pages),
                count(kinds.swapped_pages),
            )?;
        }
        Ok(())
    }

    /// The same of a stream, of which no page is armed.
    fn stream_costs(&self, rows: &mut dyn Write) -> std::io::Result<()> {
        let totals = &self.totals;
        writeln!(
            rows,
            "\n{} periods in {:.1} s: {} uses of sampled pages, {} lost.\n\
             Time: in the kernel {:.3} s, reading and estimating {:.3} s; overhead {:.2} % of one CPU.",
            totals.periods,
            totals.length.as_secs_f64(),
            grouped(totals.touches as f64),
            grouped(totals.lost as f64),
            totals.trap_time.as_secs_f64(),
            totals.rearm_time.as_secs_f64(),
            totals.overhead_ratio() * 100.0,
        )
    }

    fn curve_table(
        &self,
        curve: &MissRatioCurve,
        set: Option<WorkingSet>,
        compared: Option<&Curves>,
        rows: &mut dyn Write,
    ) -> std::io::Result<()> {
        let heads = if compared.is_some() {
            "       LRU       AET"
        } else {
            "   misses/s  (band)              share"
        };
        writeln!(
            rows,
            "\nCurve of {} {}:\n\n       size{heads}",
            grouped(curve.references() as f64),
            self.what_is_counted(),
        )?;
        for point in curve.thinned(POINTS_OF_TABLE).points() {
            match compared {
                Some(curves) => writeln!(
                    rows,
                    "{:>11}  {:>6.2} %  {:>6.2} %",
                    size(point.size),
                    curves.lru.miss_ratio(point.size) * 100.0,
                    curves.aet.miss_ratio(point.size) * 100.0,
                )?,
                None => writeln!(
                    rows,
                    "{:>11}  {}  {:>6.2} %",
                    size(point.size),
                    misses(point.misses),
                    point.shown_ratio() * 100.0
                )?,
            }
        }
        if let Some(vcpus) = curve.vcpus() {
            writeln!(
                rows,
                "\nPer second of wall time, in which its vCPUs ran for {vcpus:.2} s; shares are of these {}.",
                self.what_is_counted()
            )?;
        }
        let time = match self.backend.yields {
            // Since the last change of phase, and at most as long as their curve reaches.
            Yield::FirstTouches => "at the end",
            _ => "over the whole run",
        };
        match set {
            None => writeln!(rows, "\nThe working set {time} is unknown."),
            Some(set) if curve.size_for(WorkingSet::MISS_RATIO).is_some() => writeln!(
                rows,
                "\nWorking set {time}: {} (5 % misses).",
                working_set(Some(set), Use::Some)
            ),
            Some(_) => writeln!(rows, "\nMore than 5 % miss at every size that was seen."),
        }
    }

    /// What the curve's ratios are shares of.
    fn what_is_counted(&self) -> &'static str {
        match self.backend.yields {
            Yield::References => "references past the hot set",
            Yield::Stream if self.totals.corrected => {
                "uses of sampled pages, corrected by the count of all"
            }
            Yield::Stream => "uses of sampled pages",
            Yield::FirstTouches => "first touches of sampled pages",
            Yield::Scans | Yield::Sample => "touches found by scans",
        }
    }

    /// The curve of the whole trace.
    pub fn chart(&self, chosen: &MissRatioCurve, compared: Option<&Curves>) -> Chart {
        let last = chosen
            .points()
            .last()
            .map_or(PageCount(0), |point| point.size);
        let bytes = |pages: PageCount| pages.to_bytes(PageSize::FOUR_KIB);
        let until = Chart::end_beyond(bytes(last));
        let of_curve = |name: &str, curve| Series::of_curve(name, curve, PageSize::FOUR_KIB, until);
        let series = match compared {
            Some(curves) => vec![
                of_curve("exact LRU", &curves.lru),
                of_curve("AET", &curves.aet),
            ],
            None => vec![of_curve("", chosen)],
        };
        // Without a hot set the curve begins where it is resolved.
        let first = chosen.points().first().map_or(0, |point| point.size.0);
        let (resolution, unresolved) = match self.backend.yields {
            Yield::FirstTouches => (Some(first), "below the first touches"),
            Yield::References => (self.totals.resolution_pages, "below the hot set"),
            Yield::Stream => (None, ""),
            Yield::Scans | Yield::Sample => {
                (self.totals.resolution_pages, "below the scans' resolution")
            }
        };
        let resolution = PageCount(resolution.unwrap_or_default());
        let markers = chosen.size_for(WorkingSet::MISS_RATIO).map(|set| Marker {
            x: bytes(set) as f64,
            label: format!("working set {} (5 %)", size(set)),
        });
        let subtitle = format!(
            "traced for {:.0} s from outside · {} {} · overhead {:.2} %",
            self.totals.length.as_secs_f64(),
            grouped(chosen.references() as f64),
            self.what_is_counted(),
            self.totals.overhead_ratio() * 100.0,
        );
        let title = format!("Miss-ratio curve of {}", self.target);
        Chart {
            shades: vec![Shade {
                from: 0.0,
                to: bytes(resolution).min(until) as f64,
                label: unresolved.to_owned(),
            }],
            markers: markers.into_iter().collect(),
            ..Chart::of_miss_ratios(title, subtitle, "Memory size", until, series)
        }
    }
}

/// A size for a reader.
fn size(pages: PageCount) -> String {
    ByteSize(pages.to_bytes(PageSize::FOUR_KIB)).rounded()
}

/// Misses per second with their band, in columns.
fn misses(misses: Option<MissesPerSecond>) -> String {
    let (rate, band) = misses.map_or_else(Default::default, |misses| {
        let [low, high] = [misses.low, misses.high].map(per_second);
        (per_second(misses.expected), format!("({low} to {high})"))
    });
    format!("{rate:>9}  {band:<17}")
}

/// What a working set without a size shows.
const SHORT_LIVED: &str = "no page lived through a whole period: its memory is freed between uses, so no size can be read from them";

/// What a period shows of the use of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    Some,
    None,
    /// No touch was observed, of too few pages or for too short a time.
    Unknown,
}

/// Whether a period in which no tracked page was touched shows that memory is not used: its window was not closed early, and
/// all pages were tracked, or so many that one touch would have been seen with a probability of 95 % if a share
/// [`WorkingSet::MISS_RATIO`] of the pages had been touched.
fn shows_that_nothing_is_used(period: &Period) -> bool {
    let is_early = period.window.as_secs_f64() < period.length.as_secs_f64() * WINDOW_MIN;
    let expected = period.tracked_pages as f64 * WorkingSet::MISS_RATIO;
    let are_all = period.scale == 1 && period.tracked_pages > 0;
    !is_early && (are_all || expected >= RULE_OF_THREE)
}

/// Events that would have been observed with a probability of 95 %: -ln 0.05.
const RULE_OF_THREE: f64 = 3.0;

/// Whether a working set has no size, although memory was used.
fn is_short_lived(set: Option<WorkingSet>, used: Use) -> bool {
    used == Use::Some && set.is_some_and(|set| set.size == PageCount(0))
}

/// A working set for a reader, with the sign of a bound.
fn working_set(set: Option<WorkingSet>, used: Use) -> String {
    match (set, used) {
        _ if is_short_lived(set, used) => "short-lived".to_owned(),
        (Some(set), _) if set.size > PageCount(0) => {
            format!("{}{}", set.bound.sign(), size(set.size))
        }
        (_, Use::None) => "idle".to_owned(),
        _ => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use plimsoll_flow::WorkingSetBound;

    use super::*;

    #[test]
    fn a_working_set_without_a_size_is_no_size() {
        let set = |pages| {
            let (size, bound) = (PageCount(pages), WorkingSetBound::Estimate);
            Some(WorkingSet { size, bound })
        };
        assert_eq!(working_set(set(256), Use::None), "1 MiB");
        let shown = [Use::Some, Use::None, Use::Unknown]
            .map(|used| (working_set(set(0), used), is_short_lived(set(0), used)));
        let expected = [("short-lived", true), ("idle", false), ("unknown", false)];
        assert_eq!(
            shown,
            expected.map(|(text, is_short)| (text.to_owned(), is_short))
        );
        assert_eq!(working_set(None, Use::Some), "unknown");
        assert_eq!(working_set(None, Use::None), "idle");
        assert!(!is_short_lived(set(256), Use::Some) && !is_short_lived(None, Use::Some));
    }

    #[test]
    fn few_pages_or_a_window_that_was_closed_early_do_not_show_that_a_vm_is_idle() {
        let second = Duration::from_secs(1);
        let is_shown = |scale, tracked_pages, window| {
            let period = Period {
                scale,
                tracked_pages,
                ..Period::empty(TraceMethod::Traps, second, window)
            };
            shows_that_nothing_is_used(&period)
        };
        assert!(is_shown(64, 100, second) && is_shown(1, 1, second));
        assert!(!is_shown(64, 1, second) && !is_shown(1, 0, second));
        assert!(!is_shown(64, 765, Duration::from_millis(3)));
    }
}
