//! Storage that fails: what the disk server says of it, and the VM that it pauses until writes succeed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use plimsoll_disk::{DiskStats, MachineStats, VictimCacheStats, boot_id};
use plimsoll_vm::{ProcessId, Qmp, VmError};

use super::report::{PauseReport, RecordReport};

/// Why RAM cannot be accessed.
pub(super) const RAM_ERRORS: &str = "no free huge page, a full tmpfs, or a truncated file";
/// What a VM whose memory is not shared is to be given.
pub(super) const UNSHARED: &str = "the guest uses memory that QEMU does not share: queues there stand still, and requests fail; all memory must have share=on";
/// How often new errors of a disk, or another reason of an hcache, are logged.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// Time limit of a command to the VM's monitor.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(2);
/// Time until a monitor that failed is tried again.
const MONITOR_RETRY: Duration = Duration::from_secs(5);

/// Says when disks begin to fail, how often they do, and when their blocks are written again; that a trace cannot be written; and why an
/// hcache is out of reach.
#[derive(Debug, Default)]
pub(super) struct Journal {
    disks: Vec<Told>,
    has_failed_trace: bool,
    /// Why the hcache was last said to be out of reach, and when.
    hcache: Option<(String, Instant)>,
}

/// What was said of a disk.
#[derive(Debug, Clone, Default)]
struct Told {
    errors: u64,
    ram_errors: bool,
    unshared: bool,
    unwritable: bool,
    unsynced: bool,
    at: Option<Instant>,
}

impl Journal {
    /// The lines to print now.
    pub(super) fn lines(&mut self, disks: &[DiskStats], now: Instant) -> Vec<String> {
        self.disks.resize(disks.len(), Told::default());
        let mut lines = Vec::new();
        for (number, (disk, told)) in disks.iter().zip(&mut self.disks).enumerate() {
            let name = format!("disk: {number} ({})", disk.image);
            let errors = disk.no_space_errors + disk.io_errors;
            let unwritable = disk.unwritable_pages > 0;
            let is_due = told
                .at
                .is_none_or(|at| now.duration_since(at) >= TELL_EVERY);
            if unwritable != told.unwritable || (errors != told.errors && is_due) {
                lines.push(if told.unwritable && !unwritable {
                    format!("{name}: all blocks can be written again, after {}", counts(disk))
                } else {
                    format!(
                        "{name}: {} since the start, the last: {}; {} dirty blocks cannot be written",
                        counts(disk),
                        disk.last_error.as_deref().unwrap_or("unknown"),
                        disk.unwritable_pages
                    )
                });
                told.unwritable = unwritable;
                told.errors = errors;
                told.at = Some(now);
            }
            if disk.ram_errors > 0 && !told.ram_errors {
                lines.push(format!(
                    "{name}: the guest's RAM cannot be accessed ({RAM_ERRORS}): such requests fail, and a queue in it stops until the guest sets it up again"
                ));
                told.ram_errors = true;
            }
            if disk.unshared && !told.unshared {
                lines.push(format!("{name}: {UNSHARED}"));
            }
            told.unshared = disk.unshared;
            if disk.unsynced && !told.unsynced {
                lines.push(format!(
                    "{name}: a sync failed, so earlier writes may be lost: flushes fail until `plimsoll disk enable`"
                ));
            }
            told.unsynced = disk.unsynced;
        }
        lines
    }

    /// The line to print of a trace that cannot be written, once.
    pub(super) fn record_line(&mut self, record: &RecordReport) -> Option<String> {
        let error = record.error.as_ref()?;
        let is_new = !std::mem::replace(&mut self.has_failed_trace, true);
        let trace = record.trace.display();
        is_new.then(|| {
            format!("disk: the trace {trace} cannot be written, and nothing of it is kept: {error}")
        })
    }

    /// The line to print of an hcache that is out of reach, or in reach again: one a minute where that changes all the time.
    pub(super) fn hcache_line(
        &mut self,
        hcache: &VictimCacheStats,
        now: Instant,
    ) -> Option<String> {
        let told = self.hcache.as_ref();
        let is_due = told.is_none_or(|(_, at)| now.duration_since(*at) >= TELL_EVERY);
        if hcache.in_reach && told.is_some() && is_due {
            self.hcache = None;
            return Some("disk: the hcache is in reach again".to_owned());
        }
        let why = hcache.failure.as_ref().filter(|_| !hcache.in_reach)?;
        if !is_due || told.is_some_and(|(known, _)| known == why) {
            return None;
        }
        self.hcache = Some((why.clone(), now));
        Some(format!("disk: the hcache is out of reach: {why}"))
    }
}

/// The errors of a disk, counted.
pub(super) fn counts(disk: &DiskStats) -> String {
    format!(
        "{} errors for lack of space and {} others",
        disk.no_space_errors, disk.io_errors
    )
}

/// What became of pausing the VM, as others read it.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedPause(Arc<Mutex<PauseReport>>);

impl SharedPause {
    pub(super) fn get(&self) -> PauseReport {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set(&self, report: PauseReport) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}

/// Pauses the VM by one of its monitors while its writes cannot be stored.
#[derive(Debug)]
pub(super) struct Pause {
    /// None if the VM cannot be paused.
    monitors: Vec<PathBuf>,
    /// Says to the next daemon in which boot, and which process of, the VM was paused by this one.
    marker: Option<PathBuf>,
    /// Whether it paused the VM, and why it did not.
    state: PauseReport,
    /// `state`, as others read it.
    report: SharedPause,
    /// The process that was paused, if it is known.
    process: Option<ProcessId>,
    try_at: Option<Instant>,
}

impl Pause {
    /// For the VM of these monitors; an earlier daemon with the same state directory may have paused it.
    pub(super) fn new(monitors: &[PathBuf], state: Option<&Path>) -> Self {
        let marker = state.map(|state| state.join("paused"));
        let mark = marker.as_ref().map(fs::read_to_string);
        let mark = mark.and_then(Result::ok).unwrap_or_default();
        let mut words = mark.split_whitespace();
        let boot = words.next();
        let error = monitors
            .is_empty()
            .then(|| "no monitor is known (--monitor)".to_owned());
        let paused = boot.is_some() && boot == boot_id().ok().as_deref();
        let state = PauseReport { paused, error };
        let report = SharedPause::default();
        report.set(state.clone());
        Self {
            monitors: monitors.to_owned(),
            state,
            report,
            process: words.next().and_then(|process| process.parse().ok()),
            marker,
            try_at: None,
        }
    }

    /// Whether there is a monitor.
    pub(super) fn is_possible(&self) -> bool {
        !self.monitors.is_empty()
    }

    /// What became of it, now and later.
    pub(super) fn report(&self) -> SharedPause {
        self.report.clone()
    }

    /// Pauses or resumes the VM if the machine asks for it; returns a line to print.
    pub(super) fn follow(&mut self, stats: &MachineStats, now: Instant) -> Option<String> {
        if !self.is_possible() {
            return None;
        }
        // Another process is another VM, which is not to be resumed.
        if self.state.paused && self.process.is_some_and(|process| !process.is_there()) {
            self.forget();
        }
        let line = self.change(stats.engine.wants_pause, now);
        self.report.set(self.state.clone());
        line
    }

    fn change(&mut self, wants: bool, now: Instant) -> Option<String> {
        if wants == self.state.paused {
            self.state.error = None;
            return None;
        }
        if self.try_at.is_some_and(|at| now < at) {
            return None;
        }
        let connected = Qmp::connect_any(&mut self.monitors, MONITOR_TIMEOUT);
        let done = if wants {
            connected.and_then(|mut monitor| self.pause(&mut monitor))
        } else {
            connected.and_then(|mut monitor| self.resume(&mut monitor))
        };
        if wants && matches!(done, Err(VmError::QmpRefused { .. })) {
            // It was answered: the VM runs on.
            self.forget();
        }
        self.state.error = done.as_ref().err().map(VmError::to_string);
        let (what, state) = match wants {
            true => ("paused", "its writes wait"),
            false => ("resumed", "it stays paused"),
        };
        match done {
            Ok(true) => Some(format!("disk: the VM is {what}")),
            Ok(false) => {
                // It stands for another reason.
                self.try_at = Some(now + MONITOR_RETRY);
                None
            }
            Err(error) if wants && self.state.paused => Some(format!(
                "disk: the VM is being paused; its monitor does not answer while its writes wait ({error})"
            )),
            Err(error) => {
                self.try_at = Some(now + MONITOR_RETRY);
                Some(format!("disk: the VM cannot be {what}: {error}; {state}"))
            }
        }
    }

    fn pause(&mut self, monitor: &mut Qmp) -> Result<bool, VmError> {
        if !monitor.status()?.running {
            return Ok(false);
        }
        self.process = monitor.listener();
        if let (Some(marker), Ok(boot)) = (&self.marker, boot_id()) {
            let process = self.process.map_or(String::new(), |its| its.to_string());
            // Without it the next daemon does not resume the VM.
            let _ = fs::write(marker, format!("{boot}\n{process}"));
        }
        // Whether or not it is answered: QEMU stops the virtual CPUs, then waits for the requests in flight, and answers
        // nothing until they have ended.
        self.state.paused = true;
        monitor.stop()?;
        Ok(true)
    }

    fn resume(&mut self, monitor: &mut Qmp) -> Result<bool, VmError> {
        monitor.cont()?;
        self.forget();
        Ok(true)
    }

    /// The VM is not paused.
    fn forget(&mut self) {
        if let Some(marker) = &self.marker {
            // At worst the next daemon resumes a VM that runs.
            let _ = fs::remove_file(marker);
        }
        (self.state.paused, self.process) = (false, None);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::process::Command;
    use std::sync::mpsc::{Receiver, channel};
    use std::thread;

    use super::*;

    /// How a monitor answers `stop`.
    #[derive(Clone, Copy, PartialEq)]
    enum Answer {
        Success,
        Refusal,
        /// As QEMU does while requests are in flight.
        None,
    }

    /// A monitor of a VM that runs until it is stopped; returns the commands that it gets.
    fn monitor(socket: &Path, to_stop: Answer) -> Receiver<String> {
        let (commands, received) = channel();
        let listener = UnixListener::bind(socket).unwrap();
        thread::spawn(move || {
            let mut running = true;
            while let Ok((mut stream, _)) = listener.accept() {
                let greeting = r#"{"QMP":{"version":{"qemu":{"major":8,"minor":0,"micro":0},"package":""},"capabilities":[]}}"#;
                writeln!(stream, "{greeting}").unwrap();
                let lines = BufReader::new(stream.try_clone().unwrap()).lines();
                for line in lines.map_while(Result::ok) {
                    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
                    let command = line["execute"].as_str().unwrap().to_owned();
                    let mut answer = serde_json::json!({"return": {}, "id": line["id"]});
                    match &*command {
                        "stop" if to_stop == Answer::Refusal => {
                            let error = serde_json::json!({"class": "GenericError", "desc": "no"});
                            answer = serde_json::json!({"error": error, "id": line["id"]});
                        }
                        "stop" => running = false,
                        "cont" => running = true,
                        "query-status" => {
                            let status = if running { "running" } else { "paused" };
                            answer["return"] =
                                serde_json::json!({"running": running, "status": status});
                        }
                        _ => {}
                    }
                    if line["id"].is_null() {
                        answer.as_object_mut().unwrap().remove("id");
                    }
                    if to_stop != Answer::None || command != "stop" {
                        writeln!(stream, "{answer}").unwrap();
                    }
                    if ["stop", "cont"].contains(&&*command) {
                        // The test may be over.
                        let _ = commands.send(command);
                    }
                }
            }
        });
        received
    }

    #[test]
    fn a_vm_is_paused_while_its_writes_fail_and_resumed_by_whoever_serves_then() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("monitor");
        let received = monitor(&socket, Answer::Success);
        let now = Instant::now();
        let mut stats = MachineStats::default();
        let mut pause = Pause::new(std::slice::from_ref(&socket), Some(folder.path()));
        assert_eq!(pause.follow(&stats, now), None);
        stats.engine.wants_pause = true;
        assert_eq!(pause.follow(&stats, now).unwrap(), "disk: the VM is paused");
        assert_eq!(pause.follow(&stats, now), None, "once");
        assert_eq!(received.recv().unwrap(), "stop");
        // This daemon dies, and the next one's writes succeed.
        stats.engine.wants_pause = false;
        let mut pause = Pause::new(std::slice::from_ref(&socket), Some(folder.path()));
        assert_eq!(
            pause.follow(&stats, now).unwrap(),
            "disk: the VM is resumed"
        );
        assert_eq!(received.recv().unwrap(), "cont");
        let mut pause = Pause::new(std::slice::from_ref(&socket), Some(folder.path()));
        assert_eq!(pause.follow(&stats, now), None);
        // What an operator paused is not resumed.
        Qmp::connect(&socket, MONITOR_TIMEOUT)
            .unwrap()
            .stop()
            .unwrap();
        assert_eq!(received.recv().unwrap(), "stop");
        stats.engine.wants_pause = true;
        assert_eq!(pause.follow(&stats, now), None);
        stats.engine.wants_pause = false;
        assert_eq!(pause.follow(&stats, now + MONITOR_RETRY), None);
        assert!(received.try_recv().is_err());
    }

    #[test]
    fn another_vm_than_the_one_that_was_paused_is_not_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("monitor");
        let received = monitor(&socket, Answer::Success);
        let mut ended = Command::new("sleep").arg("60").spawn().unwrap();
        let process = ProcessId::of_pid(ended.id()).unwrap();
        let marker = folder.path().join("paused");
        fs::write(&marker, format!("{}\n{process}", boot_id().unwrap())).unwrap();
        let mut pause = Pause::new(std::slice::from_ref(&socket), Some(folder.path()));
        let report = pause.report();
        assert!(report.get().paused);
        ended.kill().unwrap();
        ended.wait().unwrap();
        let mut stats = MachineStats::default();
        assert_eq!(pause.follow(&stats, Instant::now()), None);
        assert!(!report.get().paused);
        assert!(!marker.exists());
        assert!(received.try_recv().is_err());
        // But paused itself.
        stats.engine.wants_pause = true;
        let line = pause.follow(&stats, Instant::now()).unwrap();
        assert_eq!(line, "disk: the VM is paused");
    }

    #[test]
    fn a_vm_whose_pause_is_not_answered_is_resumed_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("monitor");
        let received = monitor(&socket, Answer::None);
        let mut stats = MachineStats::default();
        stats.engine.wants_pause = true;
        let mut pause = Pause::new(std::slice::from_ref(&socket), None);
        let line = pause.follow(&stats, Instant::now()).unwrap();
        assert!(line.starts_with("disk: the VM is being paused"), "{line}");
        assert_eq!(received.recv().unwrap(), "stop");
        stats.engine.wants_pause = false;
        let line = pause.follow(&stats, Instant::now()).unwrap();
        assert_eq!(line, "disk: the VM is resumed");
        assert_eq!(received.recv().unwrap(), "cont");
    }

    #[test]
    fn a_vm_whose_pause_is_refused_runs_on_and_is_paused_later() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("monitor");
        let received = monitor(&socket, Answer::Refusal);
        let mut stats = MachineStats::default();
        stats.engine.wants_pause = true;
        let mut pause = Pause::new(std::slice::from_ref(&socket), Some(folder.path()));
        let report = pause.report();
        let now = Instant::now();
        let line = pause.follow(&stats, now).unwrap();
        assert!(
            line.starts_with("disk: the VM cannot be paused: "),
            "{line}"
        );
        assert_eq!(received.recv().unwrap(), "stop");
        assert!(!report.get().paused && report.get().error.unwrap().contains("refused"));
        assert!(!folder.path().join("paused").exists());
        assert_eq!(pause.follow(&stats, now), None);
        assert!(pause.follow(&stats, now + MONITOR_RETRY).is_some());
        assert_eq!(received.recv().unwrap(), "stop");
    }

    #[test]
    fn a_vm_is_paused_by_the_monitor_that_no_other_client_holds() {
        let folder = tempfile::tempdir().unwrap();
        let [taken, free] = ["taken", "free"].map(|name| folder.path().join(name));
        // It accepts, and greets nobody.
        let _listener = UnixListener::bind(&taken).unwrap();
        let received = monitor(&free, Answer::Success);
        let mut stats = MachineStats::default();
        stats.engine.wants_pause = true;
        let mut pause = Pause::new(&[taken, free], None);
        let line = pause.follow(&stats, Instant::now()).unwrap();
        assert_eq!(line, "disk: the VM is paused");
        assert_eq!(received.recv().unwrap(), "stop");
    }

    #[test]
    fn a_monitor_that_does_not_answer_is_told_and_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut stats = MachineStats::default();
        stats.engine.wants_pause = true;
        let mut pause = Pause::new(&[folder.path().join("none")], None);
        let now = Instant::now();
        let line = pause.follow(&stats, now).unwrap();
        assert!(
            line.starts_with("disk: the VM cannot be paused: "),
            "{line}"
        );
        assert!(line.ends_with("; its writes wait"), "{line}");
        assert_eq!(pause.follow(&stats, now), None);
        assert!(pause.follow(&stats, now + MONITOR_RETRY).is_some());
    }

    #[test]
    fn the_journal_says_once_why_an_hcache_is_out_of_reach() {
        let mut journal = Journal::default();
        let begin = Instant::now();
        let mut told = |failure: Option<&str>, in_reach, seconds| {
            let hcache = VictimCacheStats {
                available: true,
                in_reach,
                failure: failure.map(str::to_owned),
                ..VictimCacheStats::default()
            };
            journal.hcache_line(&hcache, begin + Duration::from_secs(seconds))
        };
        assert_eq!(told(None, false, 0), None, "it is being connected");
        assert_eq!(told(None, true, 1), None);
        let line = "disk: the hcache is out of reach: no room";
        assert_eq!(told(Some("no room"), false, 2).unwrap(), line);
        assert_eq!(told(Some("no room"), false, 100), None, "once");
        let line = "disk: the hcache is out of reach: it has gone";
        assert_eq!(told(Some("it has gone"), false, 101).unwrap(), line);
        assert_eq!(
            told(Some("no room"), false, 102),
            None,
            "not again and again"
        );
        assert_eq!(told(None, true, 103), None);
        let line = "disk: the hcache is in reach again";
        assert_eq!(told(None, true, 161).unwrap(), line);
        assert_eq!(told(None, true, 162), None);
    }

    #[test]
    fn the_journal_says_when_blocks_fail_and_when_they_are_written_again() {
        let mut journal = Journal::default();
        let begin = Instant::now();
        let mut disk = DiskStats {
            image: "/a.raw".into(),
            ..DiskStats::default()
        };
        let mut told = |disk: &DiskStats, seconds| {
            journal.lines(
                std::slice::from_ref(disk),
                begin + Duration::from_secs(seconds),
            )
        };
        assert_eq!(told(&disk, 0), [""; 0]);
        disk.no_space_errors = 3;
        disk.unwritable_pages = 2;
        disk.last_error = Some("No space left on device (os error 28)".into());
        let line = "disk: 0 (/a.raw): 3 errors for lack of space and 0 others since the start, the last: No space left on \
                    device (os error 28); 2 dirty blocks cannot be written";
        assert_eq!(told(&disk, 1), [line]);
        disk.no_space_errors = 99;
        assert_eq!(told(&disk, 30), [""; 0], "not more than once a minute");
        assert!(told(&disk, 61)[0].contains("99 errors"));
        disk.unwritable_pages = 0;
        let line = "disk: 0 (/a.raw): all blocks can be written again, after 99 errors for lack of space and 0 others";
        assert_eq!(told(&disk, 62), [line]);
        disk.ram_errors = 1;
        assert!(told(&disk, 63)[0].contains("RAM cannot be accessed"));
        disk.unshared = true;
        assert!(told(&disk, 63)[0].ends_with("all memory must have share=on"));
        disk.ram_errors = 2;
        disk.unsynced = true;
        assert!(told(&disk, 63)[0].contains("a sync failed"));
        assert_eq!(told(&disk, 64), [""; 0]);
    }
}
