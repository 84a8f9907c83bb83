//! The tracer of a VM or of a control group: `plimsoll attach` as a child process, whose output is JSON lines.
//!
//! A trap is answered by the tracer, so the tracer is a process of its own: should this daemon hang or die, the guest's
//! accesses are still answered, and the tracer ends at the next line that nobody reads, which removes its traps.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plimsoll_flow::{TraceMethod, WorkingSet};
use plimsoll_protocol::tracer::{PeriodLine, TracerLine};
use plimsoll_protocol::vm::{CurveSource, HeatRow, TraceState, TraceView};
use plimsoll_trap::{BackendRow, BackendSetting, Choice, GroupTarget, assess_group};
use plimsoll_vm::ProcessId;
use rustix::process::{Pid, Signal, kill_process};

use crate::clock::{Clock, Time};
use crate::config::TraceSettings;
use crate::host::{Feed, FeedReport, ObservedCurve};
use crate::vm::pages;

/// Maximum length of a tracer's line: a curve of a thousand points takes a tenth of it.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// Maximum number of rows of a heatmap kept until they are polled.
const HEAT_ROWS_MAX: usize = 64;
/// Cells of a heatmap.
const HEAT_CELLS: u32 = 128;
/// Maximum bytes kept of a tracer's standard error.
const SAID_BYTES_MAX: u64 = 4096;
/// Minimum and maximum time before a tracer that ended is restarted.
const RESTART: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));
/// Periods without a line after which a tracer is replaced, the minimum of that time, and the time allowed for
/// attaching.
const SILENT_PERIODS: u32 = 3;
const SILENCE_MIN: Duration = Duration::from_secs(2);
const ATTACH_MAX: Duration = Duration::from_secs(10);
/// How long a tracer's output may take to arrive after its end; its watchdog writes last.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);
/// Time granted to a tracer to remove its traps.
const END_MAX: Duration = Duration::from_secs(10);

/// The results of the reading thread.
#[derive(Debug, Default)]
struct Read {
    curve: Option<ObservedCurve>,
    working_set: Option<WorkingSet>,
    heat: VecDeque<HeatRow>,
    /// Bytes of RAM that a cell of its rows covers; 0 without any.
    heat_cell_bytes: u64,
    periods: u64,
    /// Of the last line.
    method: Option<TraceMethod>,
    tracking_rate: f64,
    tracked_pages: u64,
    traps_per_second: f64,
    touches_per_second: f64,
    overhead_ratio: f64,
    lost: u64,
    /// Why its backend shows little.
    advice: Option<String>,
    /// Time of the last line, for the supervision of the tracer.
    last: Option<Instant>,
    /// The same since boot, for the age of its results.
    last_since_boot: Option<Duration>,
    /// The beginning of the tracer's standard error.
    errors: String,
    /// Number of invalid lines.
    lost_lines: u64,
    /// The error of the last of them.
    lost_line_error: String,
}

/// Why VMs cannot be traced, as discovery last found; that is renewed while tracers run.
pub type Unobserved = Arc<Mutex<BTreeMap<ProcessId, String>>>;

/// What a tracer observes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TracerTarget {
    /// A VM.
    Vm {
        /// Its process.
        process: ProcessId,
        /// Whether it is traced also in a user namespace of its own.
        allow_namespaced: bool,
    },
    /// A control group.
    Group {
        /// Its directory.
        directory: PathBuf,
    },
}

impl TracerTarget {
    /// The arguments of `attach` that name it, and those that go with its kind.
    fn arguments(&self, settings: &TraceSettings) -> Vec<OsString> {
        let cells = HEAT_CELLS.to_string();
        let mut arguments: Vec<OsString> = Vec::new();
        match self {
            Self::Vm {
                process,
                allow_namespaced,
                ..
            } => {
                arguments.push(process.to_string().into());
                arguments.extend(["--heatmap", &*cells].map(OsString::from));
                arguments.extend(settings.intermittent.then(|| "--intermittent".into()));
                arguments.extend(allow_namespaced.then(|| "--allow-namespaced".into()));
            }
            Self::Group { directory } => {
                let mut name = OsString::from("cgroup:");
                name.push(directory);
                arguments.push(name);
            }
        }
        arguments
    }

    /// The backend: the configured one, if it can observe such a target.
    fn backend(&self, configured: BackendSetting) -> BackendSetting {
        match (self, configured) {
            (Self::Group { .. }, BackendSetting::Method(method))
                if BackendRow::of(method).group.is_none() =>
            {
                BackendSetting::Auto
            }
            _ => configured,
        }
    }
}

/// Why no backend can observe a control group now, so that no tracer is started in vain.
fn why_group_is_unobserved(directory: &Path) -> Option<String> {
    let group = GroupTarget {
        directory: directory.to_owned(),
        inodes: Vec::new(),
    };
    let chosen = Choice::of_any_memory(assess_group(&group));
    chosen.err().map(|error| error.to_string())
}

/// A tracer, restarted when it ends.
#[derive(Debug)]
pub struct Tracer {
    target: TracerTarget,
    unobserved: Unobserved,
    program: PathBuf,
    settings: TraceSettings,
    clock: Clock,
    read: Arc<Mutex<Read>>,
    child: Option<Child>,
    /// The thread that reads its standard error to the end.
    errors: Option<JoinHandle<()>>,
    /// Time at which it was found to have ended.
    ended: Option<Instant>,
    /// How long it has printed nothing, the last line before that, and when that was last counted.
    silence: Duration,
    heard: Option<Instant>,
    counted: Instant,
    error: Option<String>,
    /// Why it is not started: its target cannot be observed.
    refused: Option<String>,
    restarts: u64,
    wait: Duration,
    again_at: Instant,
    started: Instant,
}

impl Tracer {
    /// Prepares to trace `target`; the tracer starts at the first poll.
    pub fn new(target: TracerTarget, program: PathBuf, settings: &TraceSettings) -> Self {
        let now = Instant::now();
        let settings = TraceSettings {
            backend: target.backend(settings.backend),
            ..settings.clone()
        };
        Self {
            target,
            unobserved: Unobserved::default(),
            program,
            settings,
            clock: Clock::of_host(),
            read: Arc::default(),
            child: None,
            errors: None,
            ended: None,
            silence: Duration::ZERO,
            heard: None,
            counted: now,
            error: None,
            refused: None,
            restarts: 0,
            wait: RESTART.0,
            again_at: now,
            started: now,
        }
    }

    /// Starts only while `unobserved` does not have its VM.
    pub fn unless(mut self, unobserved: &Unobserved) -> Self {
        self.unobserved = Arc::clone(unobserved);
        self
    }

    /// How it observes pages; where it chooses by itself, the first backend for such a target until its first report.
    fn method(&self) -> TraceMethod {
        let first = match self.target {
            TracerTarget::Vm { .. } => TraceMethod::FirstTouches,
            TracerTarget::Group { .. } => TraceMethod::IdlePages,
        };
        match self.settings.backend {
            BackendSetting::Method(method) => method,
            BackendSetting::Auto => lock(&self.read).method.unwrap_or(first),
        }
    }

    fn start(&mut self) -> io::Result<()> {
        let seconds = |time: Duration| format!("{}ms", time.as_millis().max(1));
        let mut child = Command::new(&self.program)
            .args(["attach", "-o", "json", "--curve"])
            .args(self.target.arguments(&self.settings))
            .args(["--window", &seconds(self.settings.window)])
            .args(["--period", &seconds(self.settings.period)])
            .args(["--budget", &self.settings.budget.to_string()])
            .args(["--backend", self.settings.backend.name()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let lines = child.stdout.take();
        let said = child.stderr.take();
        self.child = Some(child);
        let (read, clock) = (Arc::clone(&self.read), self.clock.clone());
        let reading = move || {
            if let Some(lines) = lines {
                read_lines(BufReader::new(lines), &read, &clock);
            }
        };
        let read = Arc::clone(&self.read);
        let listening = move || {
            let Some(said) = said else { return };
            let mut text = Vec::new();
            let mut said = said.take(SAID_BYTES_MAX);
            let _ = said.read_to_end(&mut text);
            lock(&read).errors = String::from_utf8_lossy(&text).trim().to_owned();
            let _ = io::copy(said.get_mut(), &mut io::sink());
        };
        let thread = |name: &str| thread::Builder::new().name(name.to_owned());
        thread("tracer-lines").spawn(reading)?;
        self.errors = Some(thread("tracer-said").spawn(listening)?);
        Ok(())
    }

    /// Whether it has printed nothing for too long. One interval between two polls never counts as more than half of
    /// that limit: if this daemon itself was stopped, lines may be waiting to be read.
    fn is_silent(&mut self, now: Instant) -> bool {
        let last = lock(&self.read).last.filter(|&at| at >= self.started);
        let allowed = (self.settings.period * SILENT_PERIODS).max(SILENCE_MIN)
            + last.map_or(ATTACH_MAX, |_| Duration::ZERO);
        if last == self.heard {
            let interval = now.saturating_duration_since(self.counted);
            self.silence += interval.min(allowed / 2);
        } else {
            (self.silence, self.heard) = (Duration::ZERO, last);
        }
        self.counted = now;
        self.silence >= allowed
    }

    /// Starts the tracer if it should run, and checks whether it still does.
    fn tend(&mut self) {
        let now = Instant::now();
        let is_silent = self.is_silent(now);
        if let Some(child) = &mut self.child {
            match child.try_wait() {
                Ok(None) if is_silent => {
                    // It would not react to a request to end, and its VM may be waiting for it.
                    let _ = child.kill();
                    self.error = Some(format!(
                        "its tracer was silent for more than {SILENT_PERIODS} periods and was ended"
                    ));
                }
                Ok(None) => {
                    if now.duration_since(self.started) > RESTART.1 {
                        self.wait = RESTART.0;
                    }
                    return;
                }
                Ok(Some(status)) => {
                    let ended = *self.ended.get_or_insert(now);
                    let is_read = self.errors.as_ref().is_none_or(JoinHandle::is_finished);
                    if !is_read && now.duration_since(ended) < LAST_WORDS_MAX {
                        return;
                    }
                    if status.success() {
                        // It detached by itself, as when QEMU moves its memory; that is not a failure.
                        self.wait = RESTART.0;
                    }
                    let said = lock(&self.read).errors.clone();
                    let last = said.lines().last().unwrap_or_default();
                    let last = last.strip_prefix("plimsoll: ").unwrap_or(last);
                    let last = last.strip_prefix("error: ").unwrap_or(last);
                    self.error = Some(match last {
                        "" => format!("the tracer ended ({status})"),
                        last => last.to_owned(),
                    });
                }
                Err(error) => {
                    self.error = Some(format!("the tracer cannot be waited for: {error}"));
                }
            }
            if let Some(mut child) = self.child.take() {
                // One that the kernel blocks, as in a frozen control group, ends later; no turn waits for that.
                let wait = move || child.wait();
                let _ = thread::Builder::new().name("tracer-end".into()).spawn(wait);
            }
            self.wait_again(now);
        }
        if let TracerTarget::Vm { process, .. } = &self.target {
            self.refused = lock(&self.unobserved).get(process).cloned();
            if self.refused.is_some() {
                return;
            }
        }
        if now < self.again_at {
            return;
        }
        if let TracerTarget::Group { directory } = &self.target {
            self.refused = why_group_is_unobserved(directory);
            if self.refused.is_some() {
                self.wait_again(now);
                return;
            }
        }
        if self.error.is_some() {
            self.restarts += 1;
        }
        self.started = now;
        (self.ended, self.silence, self.heard, self.counted) = (None, Duration::ZERO, None, now);
        match self.start() {
            Ok(()) => {}
            Err(error) => {
                let why = format!("cannot run {}: {error}", self.program.display());
                self.error = Some(why);
                self.wait_again(now);
                self.end();
            }
        }
    }

    /// Takes note of when it is tried again.
    fn wait_again(&mut self, now: Instant) {
        self.again_at = now + self.wait;
        self.wait = (self.wait * 2).min(RESTART.1);
    }

    fn end(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::TERM);
        }
        // It removes its traps at its end; the caller does not wait for that.
        let wait = move || {
            let deadline = Instant::now() + END_MAX;
            while Instant::now() < deadline {
                if !matches!(child.try_wait(), Ok(None)) {
                    return;
                }
                thread::sleep(Duration::from_millis(20));
            }
            let _ = child.kill();
            let _ = child.wait();
        };
        let _ = thread::Builder::new().name("tracer-end".into()).spawn(wait);
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.end();
    }
}

impl Feed for Tracer {
    fn source(&self) -> CurveSource {
        self.method().into()
    }

    fn seen(&mut self) -> FeedReport {
        self.tend();
        let state = match (&self.child, lock(&self.read).periods) {
            (Some(_), 0) => TraceState::Starting,
            (Some(_), _) => TraceState::Tracing,
            (None, _) if self.refused.is_some() => TraceState::Refused,
            (None, _) => TraceState::Failed,
        };
        let error = self.refused.as_ref().or(self.error.as_ref());
        let error = error.filter(|_| self.child.is_none()).cloned();
        // Before the lock, which it takes itself.
        let method = self.method();
        let mut read = lock(&self.read);
        let warning = match (&error, read.lost_lines) {
            (Some(error), _) => Some(format!("it is not traced: {error}")),
            (_, lost) if lost > 0 => Some(format!(
                "{lost} lines of its tracer could not be read, the last because: {}",
                read.lost_line_error
            )),
            _ => read.advice.clone(),
        };
        // Results of a tracer that has long been silent are out of date, and so is the curve of a VM that has long touched
        // nothing; a tracer that rests repeats its last one.
        let reach = self.settings.window.max(self.settings.period * 3);
        let now = self.clock.now().since_boot;
        let is_fresh = |at: Duration| now.saturating_sub(at) <= reach;
        let curve = read.curve.as_ref();
        // One that has ended costs nothing.
        let is_running = self.child.is_some();
        let running = |value: f64| if is_running { value } else { 0.0 };
        FeedReport {
            curve: curve.filter(|curve| is_fresh(curve.since_boot)).cloned(),
            working_set: (read.working_set).filter(|_| read.last_since_boot.is_some_and(is_fresh)),
            trace: Some(TraceView {
                state,
                method,
                error,
                pid: self.child.as_ref().map(Child::id),
                periods: read.periods,
                tracking_rate: read.tracking_rate,
                tracked_pages: read.tracked_pages,
                traps_per_second: running(read.traps_per_second),
                touches_per_second: running(read.touches_per_second),
                overhead_ratio: running(read.overhead_ratio),
                lost: read.lost,
                lost_lines: read.lost_lines,
                restarts: self.restarts,
                last_unix_ms: None,
            }),
            last_period: read.last_since_boot,
            heat: read.heat.drain(..).collect(),
            heat_cell_bytes: read.heat_cell_bytes,
            warning,
        }
    }
}

pub(crate) fn lock<T>(guarded: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data it guards is consistent at every point where a holder could panic.
    guarded.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads until the tracer ends; an invalid line is counted.
fn read_lines(mut lines: impl io::BufRead, read: &Mutex<Read>, clock: &Clock) {
    loop {
        let mut line = Vec::new();
        let got = lines
            .by_ref()
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut line);
        if !matches!(got, Ok(bytes) if bytes > 0) {
            return;
        }
        if line.last() != Some(&b'\n') {
            lock(read).lose_line("it is cut off, or too long".to_owned());
            if lines.skip_until(b'\n').is_err() {
                return;
            }
            continue;
        }
        match TracerLine::read(&line) {
            Ok(TracerLine::Period(period)) => lock(read).take(*period, clock.now()),
            Ok(TracerLine::Final(_)) => {}
            Err(error) => lock(read).lose_line(error.to_string()),
        }
    }
}

impl Read {
    fn lose_line(&mut self, why: String) {
        self.lost_lines += 1;
        self.lost_line_error = why;
    }

    fn take(&mut self, line: PeriodLine, time: Time) {
        self.periods += 1;
        self.method = Some(line.method);
        self.tracking_rate = line.tracking_rate;
        self.tracked_pages = line.tracked_pages;
        self.traps_per_second = line.traps as f64 / line.seconds;
        self.touches_per_second = line.touches.unwrap_or(0) as f64 / line.seconds;
        self.overhead_ratio = line.overhead_ratio;
        self.lost = self.lost.saturating_add(line.lost);
        self.advice = line.advice;
        self.last = Some(Instant::now());
        self.last_since_boot = Some(time.since_boot);
        let set = line.working_set_pages.zip(line.working_set_bound);
        self.working_set = set.map(|(count, bound)| WorkingSet {
            size: pages(count.saturating_mul(line.page_bytes)),
            bound,
        });
        if let Some(curve) = line.curve.flatten() {
            match ObservedCurve::read(&curve, time.since_boot) {
                Ok(curve) => self.curve = Some(curve),
                Err(error) => self.lose_line(format!("invalid curve: {error}")),
            }
        }
        let heat = line.heat_pages.zip(line.heat_ram_pages);
        if let Some((pages, ram_pages)) = heat.filter(|(pages, _)| !pages.is_empty()) {
            let ram_bytes = ram_pages.saturating_mul(line.page_bytes);
            let cell_bytes = ram_bytes.div_ceil(pages.len() as u64);
            // Rows of another size of its RAM lie elsewhere.
            if std::mem::replace(&mut self.heat_cell_bytes, cell_bytes) != cell_bytes {
                self.heat.clear();
            }
            if self.heat.len() == HEAT_ROWS_MAX {
                self.heat.pop_front();
            }
            self.heat.push_back(HeatRow {
                unix_ms: time.unix_ms,
                pages,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_flow::{
        CurvePoint, MissRatioCurve, PageCount, PageSize, TraceMethod, WorkingSetBound,
    };
    use plimsoll_protocol::SCHEMA;
    use plimsoll_protocol::curve_json::CurveJson;
    use plimsoll_skip::write_program;
    use plimsoll_trap::{BACKENDS, Yield};
    use std::fs;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn settings() -> TraceSettings {
        TraceSettings {
            enabled: true,
            backend: BackendSetting::Method(TraceMethod::Traps),
            program: None,
            period: Duration::from_secs(5),
            budget: 0.01,
            window: Duration::from_secs(300),
            intermittent: false,
        }
    }

    const PROCESS: ProcessId = ProcessId {
        pid: 4711,
        start_ticks: 7,
    };

    fn vm(allow_namespaced: bool) -> TracerTarget {
        TracerTarget::Vm {
            process: PROCESS,
            allow_namespaced,
        }
    }

    /// A tracer that is a shell script.
    fn scripted(script: &str) -> (tempfile::TempDir, Tracer) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("tracer");
        write_program(&program, format!("#!/bin/sh\n{script}\n"));
        let tracer = Tracer::new(vm(false), program, &settings());
        (folder, tracer)
    }

    fn until(tracer: &mut Tracer, is: impl Fn(&FeedReport) -> bool) -> FeedReport {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let seen = tracer.seen();
            if is(&seen) {
                return seen;
            }
            assert!(Instant::now() < deadline, "{seen:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn only_a_rule_allows_calls_in_a_user_namespace() {
        let folder = tempfile::tempdir().unwrap();
        for allowed in [false, true] {
            let script = r#"case "$*" in *" --allow-namespaced"*) echo yes >&2 ;; *) echo no >&2 ;; esac; exit 1"#;
            let program = folder.path().join(format!("tracer-{allowed}"));
            write_program(&program, format!("#!/bin/sh\n{script}\n"));
            let mut tracer = Tracer::new(vm(allowed), program, &settings());
            let seen = until(&mut tracer, |seen| {
                seen.trace
                    .as_ref()
                    .is_some_and(|trace| trace.error.is_some())
            });
            let error = seen.trace.unwrap().error.unwrap();
            assert!(
                error.contains(if allowed { "yes" } else { "no" }),
                "{error}"
            );
        }
    }

    #[test]
    fn a_group_is_traced_by_its_directory_whatever_that_is_called_and_without_options_of_vms() {
        let target = TracerTarget::Group {
            directory: "/sys/fs/cgroup/a\n--heatmap 7".into(),
        };
        let settings = TraceSettings {
            intermittent: true,
            ..settings()
        };
        let arguments = target.arguments(&settings);
        assert_eq!(arguments, ["cgroup:/sys/fs/cgroup/a\n--heatmap 7"]);
        // Traps cannot observe a group, and idle pages can.
        let idle = BackendSetting::Method(TraceMethod::IdlePages);
        assert_eq!(target.backend(settings.backend), BackendSetting::Auto);
        assert_eq!(target.backend(idle), idle);
        let vm = vm(false);
        assert_eq!(vm.backend(settings.backend), settings.backend);
        assert_eq!(
            vm.arguments(&settings),
            ["4711@7", "--heatmap", "128", "--intermittent"]
        );
    }

    #[test]
    fn a_step_of_the_time_of_day_keeps_no_working_set_and_drops_none() {
        let line = period(|_| {});
        let (_folder, mut tracer) = scripted(&format!("echo '{line}'; sleep 60"));
        let (boot_s, unix_ms) = (
            Arc::new(AtomicU64::new(1000)),
            Arc::new(AtomicU64::new(1 << 40)),
        );
        let (boot, unix) = (Arc::clone(&boot_s), Arc::clone(&unix_ms));
        tracer.clock = Clock::new(move || Time {
            since_boot: Duration::from_secs(boot.load(Ordering::SeqCst)),
            unix_ms: unix.load(Ordering::SeqCst),
        });
        until(&mut tracer, |seen| seen.working_set.is_some());
        unix_ms.fetch_add(3_600_000, Ordering::SeqCst);
        assert!(tracer.seen().working_set.is_some());
        unix_ms.fetch_sub(7_200_000, Ordering::SeqCst);
        boot_s.fetch_add(301, Ordering::SeqCst);
        assert!(tracer.seen().working_set.is_none());
    }

    #[test]
    fn a_curve_that_no_line_renews_is_dropped_while_lines_come() {
        let folder = tempfile::tempdir().unwrap();
        let flag = folder.path().join("idle");
        let curve = MissRatioCurve::new(vec![CurvePoint::exact(PageCount(2), 0.5)], 9).unwrap();
        let curve = CurveJson::new("a", PageSize::FOUR_KIB, None, &curve);
        let busy = period(|line| line.curve = Some(Some(curve)));
        let idle = period(|line| line.curve = Some(None));
        let flag_path = flag.display();
        let (_folder, mut tracer) = scripted(&format!(
            "echo '{busy}'; while [ ! -e {flag_path} ]; do sleep 0.01; done; echo '{idle}'; sleep 60"
        ));
        let boot_s = Arc::new(AtomicU64::new(1000));
        let boot = Arc::clone(&boot_s);
        tracer.clock = Clock::new(move || Time {
            since_boot: Duration::from_secs(boot.load(Ordering::SeqCst)),
            unix_ms: 1 << 40,
        });
        until(&mut tracer, |seen| seen.curve.is_some());
        boot_s.fetch_add(301, Ordering::SeqCst);
        fs::write(&flag, "").unwrap();
        let seen = until(&mut tracer, |seen| {
            seen.trace.as_ref().is_some_and(|trace| trace.periods == 2)
        });
        assert!(seen.working_set.is_some() && seen.curve.is_none());
    }

    /// A period as `plimsoll attach` writes it.
    fn period(change: impl FnOnce(&mut PeriodLine)) -> String {
        let mut line = PeriodLine {
            schema: SCHEMA,
            vm: "a".to_owned(),
            method: TraceMethod::Traps,
            page_bytes: 4096,
            period: 0,
            seconds: 2.0,
            window_seconds: 2.0,
            working_set_pages: Some(10),
            working_set_bound: Some(WorkingSetBound::AtMost),
            working_set_low_pages: None,
            working_set_high_pages: None,
            tracking_rate: 0.5,
            hot_set_pages: Some(64),
            scan_resolution_pages: None,
            populated_pages: 100,
            tracked_pages: 7,
            distinct_pages: 7,
            traps: 100,
            touches: None,
            scans: None,
            scan_interval_seconds: None,
            samples: None,
            write_traps: 0,
            write_touches: None,
            swapped_pages: None,
            huge_pages: None,
            cache_pages: None,
            stray_traps: 0,
            rearmed_pages: 0,
            trap_seconds: 0.0,
            rearm_seconds: 0.0,
            collect_seconds: 0.0,
            overhead_ratio: 0.01,
            budget_ran_out: false,
            lost: 2,
            first_touches_unseen: 0,
            advice: None,
            mean_absolute_error: None,
            curve: None,
            choice: None,
            heat_pages: None,
            heat_ram_pages: None,
        };
        change(&mut line);
        TracerLine::Period(Box::new(line)).write().unwrap()
    }

    fn curve() -> CurveJson {
        let point = CurvePoint::exact(PageCount(2), 0.5);
        let curve = MissRatioCurve::new(vec![point], 9).unwrap();
        CurveJson::new("a", PageSize::FOUR_KIB, None, &curve)
    }

    #[test]
    fn what_attach_writes_is_read_and_what_is_no_period_is_counted() {
        let first = period(|line| {
            line.curve = Some(Some(curve()));
            line.heat_pages = Some(vec![1, 2]);
            line.heat_ram_pages = Some(512);
        });
        let second = period(|line| {
            line.period = 1;
            line.traps = 4;
            line.lost = 3;
            line.tracking_rate = 0.25;
            line.tracked_pages = 8;
            line.working_set_pages = None;
            line.working_set_bound = None;
        });
        // A field that was renamed is no zero.
        let renamed = first.replace("\"lost\"", "\"losses\"");
        let script = format!(
            r#"echo "$*" >&2
            echo '{first}'
            echo '{{"schema":2,"seconds":2.0}}'
            echo 'no json'
            echo '{renamed}'
            echo '{second}'
            sleep 600 & wait"#
        );
        let (_folder, mut tracer) = scripted(&script);
        let seen = until(&mut tracer, |seen| {
            seen.trace.as_ref().is_some_and(|trace| trace.periods == 2)
        });
        let trace = seen.trace.unwrap();
        assert_eq!((trace.state, trace.lost), (TraceState::Tracing, 5));
        assert_eq!((trace.tracking_rate, trace.tracked_pages), (0.25, 8));
        assert!((trace.traps_per_second - 2.0).abs() < 1e-9);
        assert_eq!(trace.lost_lines, 3);
        // The newest curve stays until there is a newer one.
        assert_eq!(seen.curve.unwrap().curve.references(), 9);
        assert_eq!(seen.working_set, None);
        assert_eq!(seen.heat_cell_bytes, 1 << 20);
        let warning = seen.warning.unwrap();
        assert!(warning.starts_with("3 lines"), "{warning}");
        assert!(warning.contains("missing field `lost`"), "{warning}");
    }

    #[test]
    fn a_bound_a_page_size_and_a_backend_keep_their_meaning() {
        let read = Mutex::new(Read::default());
        let line = period(|line| {
            line.method = TraceMethod::AccessedPageScans;
            line.page_bytes = 16384;
            line.working_set_bound = Some(WorkingSetBound::AtLeast);
            line.traps = 0;
            line.touches = Some(60);
        });
        read_lines(format!("{line}\n").as_bytes(), &read, &Clock::of_host());
        let read = lock(&read);
        let set = read.working_set.unwrap();
        assert_eq!(
            (set.size, set.bound),
            (PageCount(40), WorkingSetBound::AtLeast)
        );
        assert_eq!(
            (read.traps_per_second, read.touches_per_second),
            (0.0, 30.0)
        );
        let scans = TraceSettings {
            backend: BackendSetting::Method(TraceMethod::AccessedPageScans),
            ..settings()
        };
        let mut tracer = Tracer::new(vm(false), "/no/such/program".into(), &scans);
        assert_eq!(tracer.source(), CurveSource::Scan);
        assert_eq!(
            tracer.seen().trace.unwrap().method,
            TraceMethod::AccessedPageScans
        );
    }

    #[test]
    fn the_source_of_a_curve_is_what_its_backend_yields() {
        for row in BACKENDS {
            let source = match row.yields {
                Yield::References => CurveSource::Trap,
                Yield::Stream => CurveSource::PageCache,
                Yield::Scans | Yield::Sample => CurveSource::Scan,
                Yield::FirstTouches => CurveSource::FirstTouch,
            };
            assert_eq!(CurveSource::from(row.method), source, "{}", row.name());
        }
    }

    #[test]
    fn a_tracer_that_chose_its_backend_reports_which() {
        let line = period(|line| line.method = TraceMethod::AccessedPageScans);
        let (_folder, mut tracer) = scripted(&format!("echo '{line}'; sleep 60"));
        tracer.settings.backend = BackendSetting::Auto;
        assert_eq!(tracer.source(), CurveSource::FirstTouch);
        let seen = until(&mut tracer, |seen| {
            seen.trace.as_ref().is_some_and(|trace| trace.periods == 1)
        });
        assert_eq!(seen.trace.unwrap().method, TraceMethod::AccessedPageScans);
        assert_eq!(tracer.source(), CurveSource::Scan);
    }

    #[test]
    fn a_tracer_that_ends_is_told_of_and_started_again() {
        let (folder, mut tracer) = scripted("echo 'plimsoll: no such VM' >&2; exit 1");
        let seen = until(&mut tracer, |seen| {
            seen.trace
                .as_ref()
                .is_some_and(|trace| trace.state == TraceState::Failed)
        });
        let trace = seen.trace.unwrap();
        assert_eq!(trace.error.as_deref(), Some("no such VM"));
        assert_eq!(
            seen.warning.as_deref(),
            Some("it is not traced: no such VM")
        );
        fs::write(
            folder.path().join("tracer"),
            "#!/bin/sh\nsleep 600 & wait\n",
        )
        .unwrap();
        until(&mut tracer, |seen| {
            let trace = seen.trace.as_ref().unwrap();
            trace.state == TraceState::Starting && trace.restarts == 1
        });
    }

    #[test]
    fn a_tracer_that_falls_silent_is_ended_and_replaced() {
        let line = period(|_| {});
        let (_folder, mut tracer) = scripted(&format!("cat <<'EOF'\n{line}\nEOF\nexec sleep 600"));
        tracer.settings.period = Duration::from_millis(100);
        let first = until(&mut tracer, |seen| {
            seen.trace.as_ref().unwrap().periods == 1
        });
        let pid = first.trace.unwrap().pid.unwrap();
        let seen = until(&mut tracer, |seen| {
            seen.trace.as_ref().unwrap().state == TraceState::Failed
        });
        let error = seen.trace.unwrap().error.unwrap();
        assert!(error.contains("silent for more than 3 periods"), "{error}");
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        until(&mut tracer, |_| {
            rustix::process::test_kill_process(pid).is_err()
        });
        until(&mut tracer, |seen| {
            let trace = seen.trace.as_ref().unwrap();
            trace.restarts == 1 && trace.periods == 2
        });
    }

    #[test]
    fn a_tracer_is_not_ended_because_the_daemon_was_stopped() {
        let (_folder, mut tracer) = scripted("exec sleep 600");
        let start = tracer.started;
        let after = |seconds| start + Duration::from_secs(seconds);
        // Nobody polled for an hour: its lines may not have been read yet.
        assert!(!tracer.is_silent(after(3600)));
        assert!(!tracer.is_silent(after(3601)));
        lock(&tracer.read).last = Some(after(3602));
        assert!(!tracer.is_silent(after(3602)));
        assert!(!tracer.is_silent(after(3617)));
        assert!(tracer.is_silent(after(3632)));
    }

    #[test]
    fn what_the_watchdog_of_a_dead_tracer_says_is_its_error() {
        let script = "(sleep 0.05; echo 'plimsoll: it served no access' >&2) & kill -9 $$";
        let (_folder, mut tracer) = scripted(script);
        let seen = until(&mut tracer, |seen| {
            seen.trace.as_ref().unwrap().state == TraceState::Failed
        });
        let error = seen.trace.unwrap().error;
        assert_eq!(error.as_deref(), Some("it served no access"));
    }

    #[test]
    fn a_tracer_that_cannot_be_run_says_so() {
        let program = "/no/such/program".into();
        let mut tracer = Tracer::new(vm(false), program, &settings());
        let seen = tracer.seen();
        let error = seen.trace.unwrap().error.unwrap();
        assert!(
            error.starts_with("cannot run /no/such/program: "),
            "{error}"
        );
    }

    #[test]
    fn a_vm_that_cannot_be_observed_has_not_failed_and_is_traced_once_it_can_be() {
        let line = period(|_| {});
        let (_folder, tracer) = scripted(&format!("echo '{line}'; sleep 60"));
        let TracerTarget::Vm { process, .. } = &tracer.target else {
            panic!("{:?}", tracer.target);
        };
        let process = *process;
        let why = "no backend that gives a curve can observe it";
        let unobserved = Unobserved::default();
        lock(&unobserved).insert(process, why.to_owned());
        let mut tracer = tracer.unless(&unobserved);
        for _ in 0..3 {
            let seen = tracer.seen();
            let trace = seen.trace.unwrap();
            assert_eq!(
                (trace.state, trace.error.as_deref(), trace.restarts),
                (TraceState::Refused, Some(why), 0)
            );
            let warning = format!("it is not traced: {why}");
            assert_eq!(seen.warning, Some(warning));
        }
        lock(&unobserved).clear();
        let seen = until(&mut tracer, |seen| {
            seen.trace.as_ref().is_some_and(|trace| trace.periods == 1)
        });
        let trace = seen.trace.unwrap();
        assert_eq!((trace.error, trace.restarts), (None, 0));
        // What is found while it runs does not end it.
        lock(&unobserved).insert(process, why.to_owned());
        let trace = tracer.seen().trace.unwrap();
        assert_eq!((trace.state, trace.error), (TraceState::Tracing, None));
    }

    #[test]
    fn a_group_that_cannot_be_traced_is_tried_again_later() {
        let target = TracerTarget::Group {
            directory: "/no/such/group".into(),
        };
        // Whether or not this host's kernel can observe groups.
        let mut tracer = Tracer::new(target, "/no/such/program".into(), &settings());
        for failures in 1..4 {
            tracer.again_at = Instant::now();
            for _ in 0..2 {
                let trace = tracer.seen().trace.unwrap();
                let is_refused = why_group_is_unobserved("/no/such/group".as_ref()).is_some();
                let state = match is_refused {
                    true => TraceState::Refused,
                    false => TraceState::Failed,
                };
                assert_eq!(trace.state, state);
                assert!(!trace.error.unwrap().is_empty());
                // The second time it is too early.
                assert_eq!(tracer.wait, RESTART.0 * 2_u32.pow(failures));
            }
        }
    }

    #[test]
    fn a_line_without_end_is_one_strange_line() {
        let read = Mutex::new(Read::default());
        let size = usize::try_from(LINE_BYTES_MAX).unwrap() + 10;
        let mut text = vec![b'x'; size];
        text.extend(format!("\n{}\n{{\"schema\":1", period(|_| {})).into_bytes());
        read_lines(&text[..], &read, &Clock::of_host());
        let read = lock(&read);
        assert_eq!((read.periods, read.lost_lines), (1, 2));
    }
}
