//! A VM's tracer: `plimsoll attach` as a child process, whose JSON lines are read.
//!
//! A trap is answered by the tracer, so the tracer is a process of its own: should this daemon hang or die, the guest's accesses are
//! still answered, and the tracer ends at the next line that nobody reads, taking its traps with it.

use std::collections::VecDeque;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_protocol::curve_json::{CurveJson, SCHEMA};
use plimsoll_protocol::vm::{CurveSource, HeatRow, TraceView, WorkingSetView};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use crate::clock::unix_ms;
use crate::config::{TraceBackend, TraceSettings};
use crate::host::{Feed, Seen};

/// Longest line of a tracer: a curve of a thousand points is a tenth of it.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// Rows of a heatmap kept until they are taken.
const HEAT_ROWS_MAX: usize = 64;
/// Cells of a heatmap.
const HEAT_CELLS: u32 = 128;
/// Bytes of what a tracer says on standard error that are kept.
const SAID_BYTES_MAX: u64 = 4096;
/// Time before a tracer that ended is started again, first and at last.
const RESTART: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));
/// How long a tracer has to take its traps with it.
const END_MAX: Duration = Duration::from_secs(10);

/// A period as `plimsoll attach -o json` tells it.
#[derive(Debug, Deserialize)]
struct Line {
    schema: u32,
    #[serde(rename = "final", default)]
    is_final: bool,
    #[serde(default)]
    seconds: f64,
    working_set_pages: Option<u64>,
    working_set_bound: Option<String>,
    #[serde(default)]
    tracking_rate: f64,
    #[serde(default)]
    tracked_pages: u64,
    #[serde(default)]
    traps: u64,
    #[serde(default)]
    overhead_ratio: f64,
    #[serde(default)]
    lost: u64,
    curve: Option<CurveJson>,
    #[serde(default)]
    heat_pages: Vec<u32>,
}

/// What the reading thread has seen.
#[derive(Debug, Default)]
struct Read {
    curve: Option<(CurveJson, u64)>,
    working_set: Option<WorkingSetView>,
    heat: VecDeque<HeatRow>,
    periods: u64,
    tracking_rate: f64,
    tracked_pages: u64,
    traps_per_second: f64,
    overhead_ratio: f64,
    lost: u64,
    last_unix_ms: Option<u64>,
    /// What the tracer said last on standard error.
    said: String,
    /// Lines that were not understood.
    strange: u64,
}

/// A tracer, started again when it ends.
#[derive(Debug)]
pub struct Tracer {
    vm_pid: u32,
    ram_bytes: u64,
    program: PathBuf,
    settings: TraceSettings,
    read: Arc<Mutex<Read>>,
    child: Option<Child>,
    error: Option<String>,
    restarts: u64,
    wait: Duration,
    again_at: Instant,
    started: Instant,
}

impl Tracer {
    /// Prepares to trace the VM of process `vm_pid`; the tracer starts at the first look.
    #[must_use]
    pub fn new(vm_pid: u32, ram_bytes: u64, program: PathBuf, settings: &TraceSettings) -> Self {
        let now = Instant::now();
        Self {
            vm_pid,
            ram_bytes,
            program,
            settings: settings.clone(),
            read: Arc::default(),
            child: None,
            error: None,
            restarts: 0,
            wait: RESTART.0,
            again_at: now,
            started: now,
        }
    }

    fn start(&mut self) -> io::Result<()> {
        let seconds = |time: Duration| format!("{}ms", time.as_millis().max(1));
        let backend = match self.settings.backend {
            TraceBackend::Trap => "trap",
            TraceBackend::Scan => "scan",
        };
        let mut child = Command::new(&self.program)
            .args(["attach", &self.vm_pid.to_string(), "-o", "json", "--curve"])
            .args(["--window", &seconds(self.settings.window)])
            .args(["--period", &seconds(self.settings.period)])
            .args(["--budget", &self.settings.budget.to_string()])
            .args(["--heatmap", &HEAT_CELLS.to_string()])
            .args(["--backend", backend])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let lines = child.stdout.take();
        let said = child.stderr.take();
        self.child = Some(child);
        let read = Arc::clone(&self.read);
        let reading = move || {
            if let Some(lines) = lines {
                read_lines(BufReader::new(lines), &read);
            }
        };
        let read = Arc::clone(&self.read);
        let listening = move || {
            let Some(said) = said else { return };
            let mut text = Vec::new();
            let mut said = said.take(SAID_BYTES_MAX);
            let _ = said.read_to_end(&mut text);
            lock(&read).said = String::from_utf8_lossy(&text).trim().to_owned();
            let _ = io::copy(said.get_mut(), &mut io::sink());
        };
        let thread = |name: &str| thread::Builder::new().name(name.to_owned());
        thread("tracer-lines").spawn(reading)?;
        thread("tracer-said").spawn(listening)?;
        Ok(())
    }

    /// Starts it if it should run, and sees whether it still does.
    fn tend(&mut self) {
        let now = Instant::now();
        if let Some(child) = &mut self.child {
            match child.try_wait() {
                Ok(None) => {
                    if now.duration_since(self.started) > RESTART.1 {
                        self.wait = RESTART.0;
                    }
                    return;
                }
                Ok(Some(status)) => {
                    let said = lock(&self.read).said.clone();
                    let last = said.lines().last().unwrap_or_default();
                    let last = last.strip_prefix("plimsoll: ").unwrap_or(last);
                    self.error = Some(match last {
                        "" => format!("the tracer ended ({status})"),
                        last => last.to_owned(),
                    });
                }
                Err(error) => {
                    self.error = Some(format!("the tracer cannot be waited for: {error}"));
                }
            }
            self.child = None;
            self.again_at = now + self.wait;
            self.wait = (self.wait * 2).min(RESTART.1);
        }
        if now < self.again_at {
            return;
        }
        if self.error.is_some() {
            self.restarts += 1;
        }
        self.started = now;
        match self.start() {
            Ok(()) => {}
            Err(error) => {
                self.error = Some(format!("cannot run {}: {error}", self.program.display()));
                self.again_at = now + self.wait;
                self.wait = (self.wait * 2).min(RESTART.1);
                self.end();
            }
        }
    }

    fn end(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::TERM);
        }
        // It takes its traps with it; whoever ends it does not wait.
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
        CurveSource::Trap
    }

    fn seen(&mut self) -> Seen {
        self.tend();
        let state = match (&self.child, lock(&self.read).periods) {
            (Some(_), 0) => "starting",
            (Some(_), _) => "tracing",
            (None, _) => "failed",
        };
        let mut read = lock(&self.read);
        let warning = match (&self.error, read.strange) {
            (Some(error), _) if self.child.is_none() => Some(format!("it is not traced: {error}")),
            (_, strange) if strange > 0 => {
                Some(format!("{strange} lines of its tracer were not understood"))
            }
            _ => None,
        };
        // What a tracer said that has long been silent is not true any more.
        let reach = self.settings.window.max(self.settings.period * 3);
        let fresh = read
            .last_unix_ms
            .is_some_and(|at| u128::from(unix_ms().saturating_sub(at)) <= reach.as_millis());
        Seen {
            curve: read.curve.clone().filter(|_| fresh),
            working_set: read.working_set.clone().filter(|_| fresh),
            trace: Some(TraceView {
                state: state.to_owned(),
                error: self.error.clone().filter(|_| self.child.is_none()),
                pid: self.child.as_ref().map(Child::id),
                periods: read.periods,
                tracking_rate: read.tracking_rate,
                tracked_pages: read.tracked_pages,
                traps_per_second: read.traps_per_second,
                overhead_ratio: read.overhead_ratio,
                lost: read.lost,
                restarts: self.restarts,
                last_unix_ms: read.last_unix_ms,
            }),
            heat: read.heat.drain(..).collect(),
            heat_cell_bytes: self.ram_bytes.div_ceil(u64::from(HEAT_CELLS)),
            warning,
        }
    }
}

fn lock(read: &Mutex<Read>) -> MutexGuard<'_, Read> {
    // What it guards is whole at every point where a holder could panic.
    read.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads until the tracer ends or writes what is no line.
fn read_lines(mut lines: impl io::BufRead, read: &Mutex<Read>) {
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
            // Too long, or the end in the middle of one.
            lock(read).strange += 1;
            if lines.skip_until(b'\n').is_err() {
                return;
            }
            continue;
        }
        match serde_json::from_slice::<Line>(&line) {
            Ok(line) if line.schema == SCHEMA => take(&mut lock(read), line),
            _ => lock(read).strange += 1,
        }
    }
}

fn take(read: &mut Read, line: Line) {
    if line.is_final {
        return;
    }
    let now = unix_ms();
    read.periods += 1;
    read.tracking_rate = line.tracking_rate;
    read.tracked_pages = line.tracked_pages;
    read.traps_per_second = line.traps as f64 / line.seconds.max(f64::MIN_POSITIVE);
    read.overhead_ratio = line.overhead_ratio;
    read.lost = read.lost.saturating_add(line.lost);
    read.last_unix_ms = Some(now);
    read.working_set = line.working_set_pages.map(|pages| WorkingSetView {
        bytes: pages.saturating_mul(4096),
        bound: line
            .working_set_bound
            .unwrap_or_else(|| "estimate".to_owned()),
    });
    if let Some(curve) = line.curve {
        read.curve = Some((curve, now));
    }
    if !line.heat_pages.is_empty() {
        if read.heat.len() == HEAT_ROWS_MAX {
            read.heat.pop_front();
        }
        read.heat.push_back(HeatRow {
            unix_ms: now,
            pages: line.heat_pages,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    fn settings() -> TraceSettings {
        TraceSettings {
            enabled: true,
            backend: TraceBackend::Trap,
            program: None,
            period: Duration::from_secs(5),
            budget: 0.01,
            window: Duration::from_secs(300),
        }
    }

    /// A tracer that is a shell script.
    fn scripted(script: &str) -> (tempfile::TempDir, Tracer) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("tracer");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let tracer = Tracer::new(4711, 128 << 20, program, &settings());
        (folder, tracer)
    }

    fn until(tracer: &mut Tracer, is: impl Fn(&Seen) -> bool) -> Seen {
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
    fn what_a_tracer_says_is_taken_and_what_is_no_period_is_counted() {
        let (_folder, mut tracer) = scripted(
            r#"echo "$*" >&2
            echo '{"schema":1,"vm":"a","period":0,"seconds":2.0,"working_set_pages":10,"working_set_bound":"at-most","tracking_rate":0.5,"tracked_pages":7,"traps":100,"overhead_ratio":0.01,"lost":2,"curve":{"schema":1,"vm":"a","page_bytes":4096,"references":9,"baseline_pages":null,"points":[{"size_pages":2,"miss_ratio":0.5,"low":0.5,"high":0.5}]},"heat_pages":[1,2]}'
            echo '{"schema":2,"seconds":2.0}'
            echo 'no json'
            echo '{"schema":1,"vm":"a","period":1,"seconds":2.0,"traps":4,"lost":3,"overhead_ratio":0.0,"tracking_rate":0.25,"tracked_pages":8,"working_set_pages":null,"curve":null}'
            sleep 600 & wait"#,
        );
        let seen = until(&mut tracer, |seen| {
            seen.trace.as_ref().is_some_and(|trace| trace.periods == 2)
        });
        let trace = seen.trace.unwrap();
        assert_eq!((trace.state.as_str(), trace.lost), ("tracing", 5));
        assert_eq!((trace.tracking_rate, trace.tracked_pages), (0.25, 8));
        assert!((trace.traps_per_second - 2.0).abs() < 1e-9);
        // The newest curve stands until there is a newer one.
        assert_eq!(seen.curve.unwrap().0.references, 9);
        assert_eq!(seen.working_set, None);
        assert_eq!(seen.heat_cell_bytes, 1 << 20);
        assert!(seen.warning.unwrap().starts_with("2 lines"));
    }

    #[test]
    fn a_tracer_that_ends_is_told_of_and_started_again() {
        let (folder, mut tracer) = scripted("echo 'plimsoll: no such VM' >&2; exit 1");
        let seen = until(&mut tracer, |seen| {
            seen.trace
                .as_ref()
                .is_some_and(|trace| trace.state == "failed")
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
            trace.state == "starting" && trace.restarts == 1
        });
    }

    #[test]
    fn a_tracer_that_cannot_be_run_says_so() {
        let mut tracer = Tracer::new(1, 1 << 20, "/no/such/program".into(), &settings());
        let seen = tracer.seen();
        let error = seen.trace.unwrap().error.unwrap();
        assert!(
            error.starts_with("cannot run /no/such/program: "),
            "{error}"
        );
    }

    #[test]
    fn a_line_without_end_is_one_strange_line() {
        let read = Mutex::new(Read::default());
        let size = usize::try_from(LINE_BYTES_MAX).unwrap() + 10;
        let mut text = vec![b'x'; size];
        text.extend(b"\n{\"schema\":1,\"seconds\":1.0}\n{\"schema\":1");
        read_lines(&text[..], &read);
        let read = lock(&read);
        assert_eq!((read.periods, read.strange), (1, 2));
    }
}
