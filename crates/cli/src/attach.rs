//! `plimsoll attach`: trace a running VM and print what it needs, period by period.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use clap::ValueEnum;
use plimsoll_flow::{MissRatioCurve, PageCount, PageSize, TraceMethod, WorkingSet};
use plimsoll_protocol::tracer::{FinalLine, PeriodLine, TracerLine};
use plimsoll_trap::{HandlerCpu, RateRule, SCALE_MAX, ScanConfig, TraceConfig, TrapError};
use plimsoll_vm::QemuVm;

use crate::curve_json::{CurveJson, SCHEMA};
use crate::observe::{Curves, LiveEstimator, Observer, Period, WatchConfig};
use crate::size::{ByteSize, Interval, Rate};
use plimsoll_output::{Format, OutputArgs, bail_usage, grouped, stop_flag};
use plimsoll_plot::{Axis, Chart, Marker, Series, Shade, Unit, encode};

/// Points of a curve in JSON.
const POINTS: usize = 1000;
const POINTS_OF_TABLE: usize = 16;

/// Trace a running VM: print its working set every period, and its miss-ratio curve at the end.
///
/// Works on an unmodified QEMU whose RAM is shared memory (memfd or tmpfs), and stops it only for about a millisecond.
/// Ends after --periods, when the VM ends, or at Ctrl-C. The VM is left as it was. Needs root.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The VM: process id or name
    #[arg(value_name = "PID|NAME")]
    vm: String,
    #[command(flatten)]
    tracing: TracingArgs,
    /// Estimator of the curve of trapped references [default: lru]
    #[arg(long, value_enum)]
    estimator: Option<LiveEstimator>,
    /// Show AET and exact LRU on the same references, with their difference
    #[arg(long)]
    compare: bool,
    /// Number of periods [default: until the VM ends]
    #[arg(long, value_name = "N")]
    periods: Option<u64>,
    /// With -o json, include each period's curve
    #[arg(long)]
    curve: bool,
    /// Time that this curve covers [default: the period]
    #[arg(long, value_name = "TIME", requires = "curve")]
    window: Option<Interval>,
    /// With -o json, count accesses by region of the VM's RAM, in this number of regions
    #[arg(long, value_name = "CELLS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    heatmap: Option<u32>,
    #[command(flatten)]
    output: OutputArgs,
}

/// Options of tracing, shared by all verbs that trace.
#[derive(Debug, Clone, clap::Args)]
pub struct TracingArgs {
    /// Method of tracing
    #[arg(long, value_enum, default_value_t = Backend::Trap)]
    backend: Backend,
    /// Length of a period
    #[arg(long, default_value = "5s")]
    period: Interval,
    /// Maximum share of the VM's CPU time that tracing may take; "none" for no limit
    #[arg(long, default_value = "1%")]
    budget: Budget,
    /// Tracking rate (share of the pages traced) in the first period, such as 1/128
    #[arg(long, default_value = "1/128")]
    rate: Rate,
    /// How the tracking rate is adapted
    #[arg(long, value_enum, default_value_t = Rule::Budget)]
    rate_rule: Rule,
    /// With traps, capacity of the hot set (pages left mapped after a trap), in pages [default: 64]
    #[arg(long, value_name = "PAGES")]
    hot_set: Option<u32>,
    /// With traps, number of adjacent pages that are sampled together [default: 1]
    #[arg(long, value_name = "PAGES")]
    group: Option<u32>,
    /// With traps, minimum number of traced pages that should trap in a period; if fewer do, the rate rises [default: 128]
    #[arg(long, value_name = "PAGES")]
    least_pages: Option<u64>,
    /// With scans, CPU time of the VM between two scans [default: adapted to the VM]
    #[arg(long, value_name = "TIME")]
    scan_interval: Option<Interval>,
    /// With scans, distinguish writes from reads
    #[arg(long)]
    writes: bool,
    /// Run the trap handler, or the scanner, on any CPU instead of the busiest vCPU's
    #[arg(long)]
    any_cpu: bool,
    /// Random seed of the samples
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Method of tracing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// Page faults: records every reference past the hot set, in order
    Trap,
    /// Accessed-page scans: checks periodically which sampled pages were accessed; cheaper, and needs no userfaultfd
    Scan,
}

impl From<Backend> for TraceMethod {
    fn from(backend: Backend) -> Self {
        match backend {
            Backend::Trap => Self::Traps,
            Backend::Scan => Self::AccessedPageScans,
        }
    }
}

/// How the tracking rate is adapted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Rule {
    /// The rate is constant
    Fixed,
    /// Each traced page stands for 128 more pages after a period over budget, for 64 fewer after one with too few traps
    Linear,
    /// Like linear, with steps that grow with the logarithm of the excess
    Log,
    /// Sets the rate directly from the time budget
    Budget,
}

/// A bound of the time taken, or none.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Budget(Option<f64>);

impl std::str::FromStr for Budget {
    type Err = crate::size::QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" {
            return Ok(Self(None));
        }
        text.parse::<Rate>().map(|share| Self(Some(share.get())))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(share) => write!(f, "{} %", share * 100.0),
            None => f.write_str("none"),
        }
    }
}

impl TracingArgs {
    /// The settings of traps or scans, whichever were asked for.
    ///
    /// # Errors
    ///
    /// A [`UsageError`](plimsoll_output::exit::UsageError) for a rate that no whole number of pages stands for, and for
    /// what does not go with traps, or with scans.
    pub fn watch(&self) -> anyhow::Result<WatchConfig> {
        Ok(match self.backend {
            Backend::Trap => WatchConfig::Traps(self.config()?),
            Backend::Scan => WatchConfig::Scans(self.scan_config()?),
        })
    }

    /// The tracer's settings.
    ///
    /// # Errors
    ///
    /// As [`watch`](Self::watch), and if scans were asked for.
    pub fn config(&self) -> anyhow::Result<TraceConfig> {
        if self.backend == Backend::Scan {
            bail_usage!("--backend scan: this is measured with traps alone");
        }
        if self.scan_interval.is_some() || self.writes {
            bail_usage!("--scan-interval and --writes go with --backend scan");
        }
        let default = TraceConfig::default();
        Ok(TraceConfig {
            period: self.period.get(),
            budget: self.budget.0,
            scale: self.scale()?,
            rate_rule: self.rate_rule(),
            hot_set_pages: self.hot_set.unwrap_or(default.hot_set_pages),
            group_pages: self.group.unwrap_or(default.group_pages),
            least_pages: self.least_pages.unwrap_or(default.least_pages),
            seed: self.seed,
            handler_cpu: self.handler_cpu(),
        })
    }

    fn scan_config(&self) -> anyhow::Result<ScanConfig> {
        if self.hot_set.is_some() || self.group.is_some() || self.least_pages.is_some() {
            bail_usage!("--hot-set, --group and --least-pages require --backend trap");
        }
        if matches!(self.rate_rule, Rule::Linear | Rule::Log) {
            bail_usage!("--backend scan goes with --rate-rule budget or fixed");
        }
        Ok(ScanConfig {
            period: self.period.get(),
            budget: self.budget.0,
            scale: self.scale()?,
            rate_rule: self.rate_rule(),
            interval: self.scan_interval.map(Interval::get),
            writes: self.writes,
            seed: self.seed,
            handler_cpu: self.handler_cpu(),
        })
    }

    fn scale(&self) -> anyhow::Result<u32> {
        let scale = (1.0 / self.rate.get()).round();
        if scale > f64::from(SCALE_MAX) {
            bail_usage!("--rate {}: the minimum is 1/{SCALE_MAX}", self.rate);
        }
        if self.budget.0.is_none() && self.rate_rule == Rule::Budget {
            bail_usage!(
                "--budget none leaves --rate-rule budget nothing to follow: add --rate-rule fixed"
            );
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate is above 0 and at most 1, and SCALE_MAX was checked"
        )]
        let scale = scale as u32;
        Ok(scale)
    }

    fn rate_rule(&self) -> RateRule {
        match self.rate_rule {
            Rule::Fixed => RateRule::Fixed,
            Rule::Linear => RateRule::Linear,
            Rule::Log => RateRule::Log,
            Rule::Budget => RateRule::Budget,
        }
    }

    fn handler_cpu(&self) -> HandlerCpu {
        if self.any_cpu {
            HandlerCpu::Any
        } else {
            HandlerCpu::Follow
        }
    }
}

/// Runs the command; `out` is standard output, or a buffer in tests.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) for options that do not go together, why there is no
/// such VM, and why it cannot be traced. A VM that ends while it is traced is no error: what was
/// seen up to there is given.
pub fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    args.output.check()?;
    let config = args.tracing.watch()?;
    if matches!(config, WatchConfig::Scans(_)) && (args.estimator.is_some() || args.compare) {
        bail_usage!("--estimator and --compare go with --backend trap: scans have no order");
    }
    let format = args.output.format();
    if (args.curve || args.heatmap.is_some()) && format != Format::Json {
        bail_usage!(
            "--curve and --heatmap go with -o json, which has room for them in each period"
        );
    }
    let stop = stop_flag()?;
    let vm = plimsoll_vm::find(&args.vm)?;
    let mut observer = Observer::attach(&vm, config, args.estimator.unwrap_or_default())?;
    if let Some(window) = args.window {
        observer.reach_back(window.get());
    }
    if let Some(cells) = args.heatmap {
        observer.count_heat(&vm, cells);
    }

    let picture = format.is_picture();
    let mut file = match args.output.path().filter(|_| !picture) {
        Some(path) => {
            Some(File::create(path).with_context(|| format!("cannot write '{}'", path.display()))?)
        }
        None => None,
    };
    let mut nowhere = std::io::sink();
    let rows: &mut dyn Write = match &mut file {
        Some(file) => file,
        // A picture on standard output stands there alone.
        None if picture && args.output.path().is_none() => &mut nowhere,
        None => out,
    };
    let mut report = Report {
        args,
        vm: &vm,
        totals: Totals::default(),
    };
    report.begin(format, &observer, rows)?;
    let ended = loop {
        if stop.load(Ordering::Relaxed) || args.periods == Some(report.totals.periods) {
            break None;
        }
        match observer.period(&stop) {
            Ok(period) => report.period(format, &period, rows)?,
            Err(end @ TrapError::VmGone { .. }) => break Some(end),
            Err(error) => return Err(error).context(format!("VM {} is no longer traced", vm.id)),
        }
    };
    let (curve, curves) = (observer.curve(), observer.curves());
    let compared = curves.as_ref().filter(|_| args.compare);
    match ended {
        // What was seen stands; there is nothing to detach from.
        Some(end) => eprintln!("plimsoll: {end}"),
        None => observer.detach()?,
    }
    report.end(format, curve.as_ref(), compared, rows)?;
    if picture {
        let curve = curve.context("no page was used twice while the VM was traced: no curve")?;
        let svg = report.chart(&curve, compared).to_svg();
        args.output.write(&encode(svg, format)?, out)?;
    }
    Ok(())
}

/// Writes what is seen of a VM, in the form asked for.
struct Report<'a> {
    args: &'a Args,
    vm: &'a QemuVm,
    totals: Totals,
}

/// Sums over all periods.
#[derive(Debug, Default)]
struct Totals {
    periods: u64,
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
    /// The least that a hot set stood for so far, in pages: below that no curve says anything.
    hidden_pages: Option<u64>,
}

impl Totals {
    fn add(&mut self, report: &plimsoll_flow::Period) {
        self.periods += 1;
        self.traps += report.traps.taken;
        self.touches += report.scans.touches;
        self.scans += report.scans.scans;
        self.rearmed_pages += report.rearmed_pages;
        self.lost += report.losses.lost();
        self.first_touches_unseen += report.losses.first_touches_unseen;
        self.length += report.length;
        self.trap_time += report.fault_time;
        self.rearm_time += report.arm_time;
        self.collect_time += report.collect_time;
        self.overhead_seconds += report.overhead_ratio * report.length.as_secs_f64();
        let hidden = report.resolution_pages();
        // A period of scans in which nothing was touched resolves nothing.
        if hidden > 0 {
            self.hidden_pages = Some(self.hidden_pages.map_or(hidden, |pages| pages.min(hidden)));
        }
    }

    fn overhead_ratio(&self) -> f64 {
        self.overhead_seconds / self.length.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

impl Report<'_> {
    fn ram(&self) -> PageCount {
        let bytes = self.vm.ram.iter().map(|ram| ram.len_bytes).sum();
        PageCount::from_bytes(bytes, PageSize::FOUR_KIB)
    }

    fn curve_json(&self, curve: &MissRatioCurve) -> CurveJson {
        let curve = curve.thinned(POINTS);
        CurveJson::new(&self.vm.id.0, PageSize::FOUR_KIB, Some(self.ram()), &curve)
    }

    fn begin(
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
                let vcpus = self.vm.vcpus.len().max(1);
                let accelerator = self.vm.accelerator.map_or_else(
                    || "accelerator unknown".to_owned(),
                    |accelerator| accelerator.to_string(),
                );
                writeln!(
                    rows,
                    "VM {} (process {}): {} of RAM, {vcpus} vCPU{}, {accelerator}",
                    self.vm.id,
                    self.vm.pid,
                    size(self.ram()),
                    if vcpus == 1 { "" } else { "s" },
                )?;
                let tracing = &self.args.tracing;
                let cost_us = observer.touch_cost().as_secs_f64() * 1e6;
                let (period, budget) = (&tracing.period, &tracing.budget);
                let (touches, more) = if tracing.backend == Backend::Scan {
                    writeln!(
                        rows,
                        "A minor fault costs {cost_us:.1} µs on this host. Period {period}, budget {budget}.\n",
                    )?;
                    ("touches/s", "  interval")
                } else {
                    let hot_set = tracing
                        .hot_set
                        .unwrap_or(TraceConfig::default().hot_set_pages);
                    writeln!(
                        rows,
                        "A trap costs {cost_us:.0} µs on this host. Period {period}, \
                         hot set up to {hot_set} pages, budget {budget}.\n",
                    )?;
                    let compare = if self.args.compare {
                        "  AET-LRU MAE"
                    } else {
                        ""
                    };
                    ("traps/s", compare)
                };
                writeln!(
                    rows,
                    "period  working set    rate    tracked {touches:>9}  overhead  watched  lost{more}"
                )?;
            }
        }
        rows.flush()
    }

    fn period(
        &mut self,
        format: Format,
        period: &Period,
        rows: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let report = &period.report;
        self.totals.add(report);
        let seconds = report.length.as_secs_f64();
        match format {
            Format::Json => {
                let line = TracerLine::Period(Box::new(self.period_line(period)));
                writeln!(rows, "{}", line.write()?)?;
            }
            Format::Csv => {
                let set = period.working_set;
                let touches = match report.method {
                    TraceMethod::Traps => String::new(),
                    _ => report.scans.touches.to_string(),
                };
                writeln!(
                    rows,
                    "{},{seconds:.3},{},{},{},{},{},{:.6},{},{}",
                    report.index,
                    set.map(|set| set.size.to_string()).unwrap_or_default(),
                    set.map(|set| set.bound.to_string()).unwrap_or_default(),
                    1.0 / f64::from(report.scale),
                    report.tracked_pages,
                    report.traps.taken,
                    report.overhead_ratio,
                    report.losses.lost(),
                    touches,
                )?;
            }
            Format::Table | Format::Svg | Format::Png => {
                let more = match (period.distance, report.method) {
                    (_, TraceMethod::AccessedPageScans) => {
                        format!("  {:>5.1} ms", report.scans.interval.as_secs_f64() * 1e3)
                    }
                    (Some(distance), _) if self.args.compare => {
                        format!("  {:>11.4}", distance.mean_absolute_error)
                    }
                    (None, _) if self.args.compare => format!("  {:>11}", "-"),
                    _ => String::new(),
                };
                writeln!(
                    rows,
                    "{:>6}  {:>11}  1/{:<5} {:>9} {:>9.0}  {:>6.2} %  {:>5.0} %  {:>4}{more}",
                    report.index,
                    working_set(period.working_set),
                    report.scale,
                    grouped(report.tracked_pages as f64),
                    report.references() as f64 / seconds,
                    report.overhead_ratio * 100.0,
                    report.window.as_secs_f64() / seconds * 100.0,
                    report.losses.lost(),
                )?;
            }
        }
        rows.flush()?;
        Ok(())
    }

    fn period_line(&self, period: &Period) -> PeriodLine {
        let report = &period.report;
        let is_trap = report.method == TraceMethod::Traps;
        let scans = (!is_trap).then_some(report.scans);
        PeriodLine {
            schema: SCHEMA,
            vm: self.vm.id.0.clone(),
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
            tracking_rate: 1.0 / f64::from(report.scale),
            hot_set_pages: is_trap.then_some(report.traps.hot_set_pages),
            populated_pages: report.populated_pages,
            tracked_pages: report.tracked_pages,
            distinct_pages: report.distinct_pages,
            traps: report.traps.taken,
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
            mean_absolute_error: period
                .distance
                .filter(|_| self.args.compare)
                .map(|distance| distance.mean_absolute_error),
            curve: self
                .args
                .curve
                .then(|| period.curve.as_ref().map(|curve| self.curve_json(curve))),
            heat_pages: period.heat.clone(),
        }
    }

    fn end(
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
                let method = self.args.tracing.backend.into();
                let line = FinalLine {
                    schema: SCHEMA,
                    vm: self.vm.id.0.clone(),
                    is_final: true,
                    method,
                    periods: self.totals.periods,
                    traps: self.totals.traps,
                    touches: (method != TraceMethod::Traps).then_some(self.totals.touches),
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
                    None => writeln!(
                        rows,
                        "\nNo curve: no page was used twice while the VM was traced."
                    )?,
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

    /// The stages' cost, [AET] §4.3.
    fn costs(&self, rows: &mut dyn Write) -> std::io::Result<()> {
        let totals = &self.totals;
        let (seen, touches, again, looking) = if self.args.tracing.backend == Backend::Scan {
            let scans = grouped(totals.scans as f64);
            let seen = format!("{scans} scans, {} touches", grouped(totals.touches as f64));
            (seen, "faults", "made absent", "scanning")
        } else {
            let seen = format!("{} traps", grouped(totals.traps as f64));
            (seen, "traps", "re-armed", "re-arming")
        };
        writeln!(
            rows,
            "\n{} periods in {:.1} s: {seen}, {} pages {again}, {} lost, {} first touches unseen.",
            totals.periods,
            totals.length.as_secs_f64(),
            grouped(totals.rearmed_pages as f64),
            grouped(totals.lost as f64),
            grouped(totals.first_touches_unseen as f64),
        )?;
        writeln!(
            rows,
            "Time: {touches} {:.3} s, {looking} {:.3} s, finding pages {:.3} s; overhead {:.2} % of the VM's CPU time.",
            totals.trap_time.as_secs_f64(),
            totals.rearm_time.as_secs_f64(),
            totals.collect_time.as_secs_f64(),
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
            "  miss ratio"
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
                    "{:>11}  {:>8.2} %",
                    size(point.size),
                    point.miss_ratio * 100.0
                )?,
            }
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
        match self.args.tracing.backend {
            Backend::Trap => "references past the hot set",
            Backend::Scan => "touches seen by scans",
        }
    }

    fn chart(&self, chosen: &MissRatioCurve, compared: Option<&Curves>) -> Chart {
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
        let hidden = PageCount(self.totals.hidden_pages.unwrap_or_default());
        let markers = chosen.size_for(WorkingSet::MISS_RATIO).map(|set| Marker {
            x: bytes(set) as f64,
            label: format!("working set {} (5 %)", size(set)),
        });
        Chart {
            title: format!("Miss-ratio curve of VM {}", self.vm.id),
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
                to: bytes(hidden).min(until) as f64,
                label: match self.args.tracing.backend {
                    Backend::Trap => "hidden by the hot set".to_owned(),
                    Backend::Scan => "hidden between two scans".to_owned(),
                },
            }],
            series,
            markers: markers.into_iter().collect(),
        }
    }
}

/// A size for a reader.
pub(crate) fn size(pages: PageCount) -> String {
    ByteSize(pages.to_bytes(PageSize::FOUR_KIB)).rounded()
}

/// A working set for a reader, with the sign of a bound.
pub(crate) fn working_set(set: Option<WorkingSet>) -> String {
    let Some(set) = set else {
        return "idle".to_owned();
    };
    format!("{}{}", set.bound.sign(), size(set.size))
}
