//! The report of a trace: a row for each period, the costs and the curve at the end; tables, CSV, pictures.

use std::io::Write;
use std::time::Duration;

use plimsoll_flow::{
    Accelerator, MissRatioCurve, MissesPerSecond, PageCount, PageSize, Period, ScanCounts,
    TraceMethod, WorkingSet,
};
use plimsoll_observe::{Curves, FullTracingLimit, ObservedPeriod, Observer};
use plimsoll_output::{Format, grouped, per_second};
use plimsoll_plot::{Axis, Chart, Marker, Series, Shade, Unit};
use plimsoll_protocol::tracer::{CandidateLine, FinalLine, PeriodLine, TracerLine};
use plimsoll_trap::{BackendRow, Candidate, Choice, Toucher, Yield, damon_thread};
use plimsoll_vm::Target;

use super::Args;
use plimsoll_observe::description::{of_group, of_process};
use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};
use plimsoll_protocol::size::ByteSize;

/// Points of a curve in JSON.
const POINTS: usize = 1000;
const POINTS_OF_TABLE: usize = 16;

/// Writes what is seen of a VM, in the requested format.
pub(super) struct Report<'a> {
    pub(super) args: &'a Args,
    pub(super) target: &'a Target,
    pub(super) backend: &'static BackendRow,
    /// `None` if the user chose the backend.
    pub(super) choice: Option<&'a Choice>,
    pub(super) totals: Totals,
    /// Whether uses of page cache by `read(2)` are not seen.
    pub(super) is_cache_hidden: bool,
    /// Whether the limit of full tracing was printed.
    pub(super) is_limit_shown: bool,
}

/// Sums over all periods.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) periods: u64,
    traps: u64,
    /// Scans, and the touches that they found.
    scans: u64,
    touches: u64,
    rearmed_pages: u64,
    lost: u64,
    first_touches_unseen: u64,
    length: Duration,
    trap_time: Duration,
    rearm_time: Duration,
    collect_time: Duration,
    overhead_seconds: f64,
    /// Whether the count of all references corrected what was sampled.
    corrected: bool,
    /// Of the last period.
    kinds: Option<ScanCounts>,
    tracked_pages: u64,
    /// Smallest resolution of any period so far, in pages: no curve is defined below it.
    resolution_pages: Option<u64>,
}

impl Totals {
    fn add(&mut self, report: &Period) {
        self.periods += 1;
        self.traps += report.traps.taken;
        self.touches += report.scans.touches;
        self.scans += report.scans.scans;
        self.corrected |= report.scans.touches_of_all > 0;
        self.rearmed_pages += report.rearmed_pages;
        self.lost += report.losses.lost();
        self.first_touches_unseen += report.losses.first_touches_unseen;
        self.length += report.length;
        self.trap_time += report.fault_time;
        self.rearm_time += report.arm_time;
        self.collect_time += report.collect_time;
        self.overhead_seconds += report.overhead_ratio * report.length.as_secs_f64();
        self.kinds = reports_kinds(report.method).then_some(report.scans);
        self.tracked_pages = report.tracked_pages;
        let resolution = report.resolution_pages();
        // A period of scans in which nothing was touched resolves nothing.
        if resolution > 0 {
            self.resolution_pages = Some(
                self.resolution_pages
                    .map_or(resolution, |pages| pages.min(resolution)),
            );
        }
    }

    fn overhead_ratio(&self) -> f64 {
        self.overhead_seconds / self.length.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

impl Report<'_> {
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
                let vcpus = self.vcpus();
                let accelerator = vm.accelerator.map_or_else(
                    || "accelerator unknown".to_owned(),
                    |accelerator| accelerator.to_string(),
                );
                format!(
                    "{name} (process {}): {} of RAM, {vcpus} vCPU{}, {accelerator}",
                    vm.pid,
                    size(self.ram().unwrap_or_default()),
                    if vcpus == 1 { "" } else { "s" },
                )
            }
            Target::Process(process) => format!("{name}: {}", of_process(process)),
            Target::Group(group) => format!("{name}: {}", of_group(group)),
        }
    }

    fn curve_json(&self, curve: &MissRatioCurve) -> CurveJson {
        let curve = curve.thinned(POINTS);
        CurveJson::new(&self.target.id().0, PageSize::FOUR_KIB, self.ram(), &curve)
    }

    /// Whether a period without a working set shows that no memory was used.
    fn is_idle(&self, period: &Period) -> bool {
        let touches = period.references() + period.distinct_pages;
        let is_hidden = self.is_cache_hidden && period.scans.cache_pages > 0;
        !is_hidden && self.backend.sees_reads && period.tracked_pages > 0 && touches == 0
    }

    /// Why there is no curve.
    pub(super) fn no_curve(&self) -> String {
        let (target, backend) = (self.target, self.backend.name());
        if self.backend.yields == Yield::Sample {
            return format!("the backend {backend} gives working sets alone");
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

    pub(super) fn begin(
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
                writeln!(rows, "{}", self.heading())?;
                for candidate in self.candidates() {
                    let chosen = if candidate.row.method == self.backend.method {
                        "chosen"
                    } else {
                        "not chosen"
                    };
                    writeln!(
                        rows,
                        "Backend {} {chosen}: {candidate}",
                        candidate.row.name()
                    )?;
                }
                let tracing = &self.args.tracing;
                let cost = observer.touch_cost();
                let cost_us = cost.time.as_secs_f64() * 1e6;
                let of = match (cost.toucher, self.accelerator()) {
                    (Toucher::KvmVcpu, _) => " of a KVM vCPU",
                    (Toucher::Thread, Some(Accelerator::Kvm)) => {
                        " of a thread (measured without KVM; a vCPU may lose more)"
                    }
                    (Toucher::Thread, _) => "",
                };
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
                let (period, budget) = (&tracing.period, &tracing.budget);
                let (touches, more) = match self.backend.yields {
                    Yield::FirstTouches if self.backend.method.traps() => {
                        writeln!(
                            rows,
                            "A trap costs {cost_us:.0} µs{of} on this host. Period {period}, budget {budget}.\n",
                        )?;
                        ("traps/s", "  waiting")
                    }
                    Yield::FirstTouches if self.backend.method == TraceMethod::IdlePages => {
                        if let Some(thread) = damon_thread() {
                            writeln!(
                                rows,
                                "DAMON runs on this host (process {thread}) and marks pages idle too: where it does so just before a check, \
                                 a touch is missed."
                            )?;
                        }
                        writeln!(
                            rows,
                            "A touch of an idle page costs {:.0} ns more{of} on this host. Period {period}, budget {budget}.\n",
                            cost_us * 1e3,
                        )?;
                        ("touches/s", "  interval")
                    }
                    Yield::Stream => {
                        writeln!(
                            rows,
                            "Sizes below are of page cache: anonymous memory, and uses of files through mappings, are not observed. \
                             Period {period}, budget {budget}.\n",
                        )?;
                        ("uses/s", "")
                    }
                    Yield::FirstTouches if cost.time.is_zero() => {
                        writeln!(
                            rows,
                            "A touch takes no fault. Period {period}, budget {budget}.\n",
                        )?;
                        ("touches/s", "  interval")
                    }
                    Yield::FirstTouches | Yield::Scans | Yield::Sample => {
                        writeln!(
                            rows,
                            "A minor fault costs {cost_us:.1} µs{of} on this host. Period {period}, budget {budget}.\n",
                        )?;
                        ("touches/s", "  interval")
                    }
                    Yield::References => {
                        let hot_set = tracing.hot_set_pages();
                        writeln!(
                            rows,
                            "A trap costs {cost_us:.0} µs{of} on this host. Period {period}, \
                             hot set up to {hot_set} pages, budget {budget}.\n",
                        )?;
                        let compare = if self.args.compare {
                            "  AET-LRU MAE"
                        } else {
                            ""
                        };
                        ("traps/s", compare)
                    }
                };
                writeln!(
                    rows,
                    "period  working set    rate    tracked {touches:>9}  overhead  watched  lost{more}"
                )?;
            }
        }
        rows.flush()
    }

    pub(super) fn period(
        &mut self,
        format: Format,
        period: &ObservedPeriod,
        rows: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let report = &period.period;
        self.totals.add(report);
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
                    Yield::References if self.args.compare => period.distance().map_or_else(
                        || format!("  {:>11}", "-"),
                        |distance| format!("  {:>11.4}", distance.mean_absolute_error),
                    ),
                    Yield::References | Yield::Stream => String::new(),
                };
                writeln!(
                    rows,
                    "{:>6}  {:>11}  1/{:<5} {:>9} {:>9.0}  {:>6.2} %  {:>5.0} %  {:>4}{more}",
                    report.index,
                    working_set(period.working_set, self.is_idle(report)),
                    report.scale,
                    grouped(report.tracked_pages as f64),
                    report.references() as f64 / seconds,
                    report.overhead_ratio * 100.0,
                    report.window.as_secs_f64() / seconds * 100.0,
                    report.losses.lost(),
                )?;
                let limit = self.limit(report);
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

    fn candidate_line(&self, candidate: &Candidate) -> CandidateLine {
        let cost = candidate.cost();
        CandidateLine {
            backend: candidate.row.method,
            is_chosen: candidate.row.method == self.backend.method,
            curve_seconds: cost.map(|cost| cost.curve.as_secs_f64()),
            touch_seconds: cost.map(|cost| cost.touch.time.as_secs_f64()),
            why: candidate.to_string(),
        }
    }

    fn limit(&self, period: &Period) -> Option<FullTracingLimit> {
        let budget = self.args.tracing.budget_of_period(self.vcpus());
        FullTracingLimit::of(period, budget)
    }

    fn period_line(&self, period: &ObservedPeriod) -> PeriodLine {
        let report = &period.period;
        let yields = self.backend.yields;
        let scans = (!report.method.traps()).then_some(report.scans);
        let idle = scans.filter(|_| reports_kinds(report.method));
        PeriodLine {
            schema: SCHEMA,
            vm: self.target.id().0,
            method: report.method,
            page_bytes: PageSize::FOUR_KIB.bytes(),
            period: report.index,
            seconds: report.length.as_secs_f64(),
            window_seconds: report.window.as_secs_f64(),
            working_set_pages: period.working_set.map(|set| set.size.0),
            working_set_bound: period.working_set.map(|set| set.bound),
            working_set_low_pages: period.working_set_band.map(|(low, _)| low.0),
            working_set_high_pages: period
                .working_set_band
                .and_then(|(_, high)| high)
                .map(|size| size.0),
            scans: scans.map(|scans| scans.scans),
            scan_interval_seconds: scans.map(|scans| scans.interval.as_secs_f64()),
            scan_resolution_pages: scans.map(|scans| scans.resolution_pages),
            touches: scans.map(|scans| scans.touches),
            write_touches: scans.map(|scans| scans.writes),
            swapped_pages: idle.map(|scans| scans.swapped_pages),
            huge_pages: idle.map(|scans| scans.huge_pages),
            cache_pages: idle.map(|scans| scans.cache_pages),
            tracking_rate: 1.0 / f64::from(report.scale),
            hot_set_pages: (yields == Yield::References).then_some(report.traps.hot_set_pages),
            populated_pages: report.populated_pages,
            tracked_pages: report.tracked_pages,
            distinct_pages: report.distinct_pages,
            traps: report.traps.taken,
            samples: (yields == Yield::FirstTouches).then_some(report.samples),
            write_traps: report.traps.writes,
            stray_traps: report.traps.strays,
            rearmed_pages: report.rearmed_pages,
            trap_seconds: report.fault_time.as_secs_f64(),
            rearm_seconds: report.arm_time.as_secs_f64(),
            collect_seconds: report.collect_time.as_secs_f64(),
            overhead_ratio: report.overhead_ratio,
            budget_ran_out: report.budget_exhausted,
            lost: report.losses.lost(),
            first_touches_unseen: report.losses.first_touches_unseen,
            advice: self.limit(report).map(|limit| limit.to_string()),
            mean_absolute_error: period
                .distance()
                .map(|distance| distance.mean_absolute_error),
            curve: self
                .args
                .curve
                .then(|| period.curve.as_ref().map(|curve| self.curve_json(curve))),
            choice: self.choice.filter(|_| report.index == 0).map(|choice| {
                choice
                    .candidates
                    .iter()
                    .map(|one| self.candidate_line(one))
                    .collect()
            }),
            heat_pages: period.heat.clone(),
        }
    }

    pub(super) fn end(
        &self,
        format: Format,
        chosen: Option<&MissRatioCurve>,
        compared: Option<&Curves>,
        rows: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let distance = compared.and_then(Curves::distance);
        match format {
            Format::Csv => {}
            Format::Json => {
                let method = self.backend.method;
                let line = FinalLine {
                    schema: SCHEMA,
                    vm: self.target.id().0,
                    is_final: true,
                    method,
                    periods: self.totals.periods,
                    traps: self.totals.traps,
                    touches: (!method.traps()).then_some(self.totals.touches),
                    overhead_ratio: self.totals.overhead_ratio(),
                    lost: self.totals.lost,
                    curve: chosen.map(|curve| self.curve_json(curve)),
                    aet_curve: compared.map(|curves| self.curve_json(&curves.aet)),
                    mean_absolute_error: distance.map(|distance| distance.mean_absolute_error),
                };
                writeln!(rows, "{}", TracerLine::Final(Box::new(line)).write()?)?;
            }
            Format::Table | Format::Svg | Format::Png => {
                self.costs(rows)?;
                match chosen {
                    Some(curve) => self.curve_table(curve, compared, rows)?,
                    None => writeln!(rows, "\nNo curve: {}.", self.no_curve())?,
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
                (observed, "faults", "unmapped", "scanning")
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
        writeln!(
            rows,
            "Time: {touches} {:.3} s, {arming} {:.3} s, finding pages {:.3} s; overhead {:.2} % of the VM's CPU time.",
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
                    point.miss_ratio * 100.0
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
        let set = curve.size_for(WorkingSet::MISS_RATIO);
        match set {
            Some(set) => writeln!(
                rows,
                "\nWorking set over the whole run: {} (5 % misses).",
                size(set)
            ),
            None => writeln!(rows, "\nMore than 5 % miss at every size that was seen."),
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

    pub(super) fn chart(&self, chosen: &MissRatioCurve, compared: Option<&Curves>) -> Chart {
        let last = chosen
            .points()
            .last()
            .map_or(PageCount(0), |point| point.size);
        let bytes = |pages: PageCount| pages.to_bytes(PageSize::FOUR_KIB);
        let until = bytes(PageCount(last.0 + last.0 / 25 + 1));
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
        Chart {
            title: format!("Miss-ratio curve of {}", self.target),
            subtitle: format!(
                "traced for {:.0} s from outside · {} {} · overhead {:.2} %",
                self.totals.length.as_secs_f64(),
                grouped(chosen.references() as f64),
                self.what_is_counted(),
                self.totals.overhead_ratio() * 100.0,
            ),
            x: Axis::new("Memory size", Unit::Bytes).up_to(until as f64),
            y: Axis::new("Miss ratio", Unit::Share).up_to(1.0),
            shades: vec![Shade {
                from: 0.0,
                to: bytes(resolution).min(until) as f64,
                label: unresolved.to_owned(),
            }],
            series,
            markers: markers.into_iter().collect(),
        }
    }
}

/// Whether a method reports in which kinds of memory its sampled pages lie.
fn reports_kinds(method: TraceMethod) -> bool {
    matches!(method, TraceMethod::IdlePages | TraceMethod::Damon)
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

/// A working set for a reader, with the sign of a bound.
fn working_set(set: Option<WorkingSet>, is_idle: bool) -> String {
    let Some(set) = set else {
        let why = if is_idle { "idle" } else { "unknown" };
        return why.to_owned();
    };
    format!("{}{}", set.bound.sign(), size(set.size))
}
