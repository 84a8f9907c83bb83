//! The guest's own statistics: Committed_AS, memory in use, refaults.
//!
//! Sources: the console of one of our workload guests, an agent in the guest, or its balloon. Not trusted: the guest
//! may report anything.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use plimsoll_flow::PageSize;
use plimsoll_vm::{ConsoleEvent, GuestAgent, GuestStats, KernelMemory, PeerSocket, QemuVm, Qmp};

use super::{Answer, Figure, Method, POLL, Subject};

/// Time limit for an agent, a monitor, or a balloon's driver to answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Length of the end of a console's file in which the newest lines are searched.
const CONSOLE_BYTES: u64 = 64 << 10;
/// Interval at which a balloon's driver reports, in s.
const STATS_INTERVAL_S: u64 = 1;

/// Contents of a console's file from byte `from` on, at most [`CONSOLE_BYTES`].
fn console_text(path: &Path, from: u64) -> anyhow::Result<String> {
    let read = || {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(CONSOLE_BYTES).read_to_end(&mut bytes)?;
        std::io::Result::Ok(bytes)
    };
    let bytes = read().with_context(|| format!("cannot read '{}'", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Length of a console's file.
fn console_length(path: &Path) -> anyhow::Result<u64> {
    let file = std::fs::metadata(path);
    let file = file.with_context(|| format!("cannot read '{}'", path.display()))?;
    Ok(file.len())
}

/// The newest lines of a console's file, the last one first.
fn console_events(path: &Path) -> anyhow::Result<impl Iterator<Item = ConsoleEvent>> {
    let text = console_text(path, console_length(path)?.saturating_sub(CONSOLE_BYTES))?;
    let events: Vec<_> = text.lines().rev().filter_map(ConsoleEvent::parse).collect();
    Ok(events.into_iter())
}

/// The working set that a workload guest last reported on its console, in bytes; `None` if there is no recent report.
///
/// # Errors
///
/// Why the file cannot be read.
pub fn truth_of_console(path: &Path) -> anyhow::Result<Option<u64>> {
    let reported = console_events(path)?.find_map(|event| match event {
        ConsoleEvent::Step { pages, .. } | ConsoleEvent::Round { pages, .. } => Some(pages),
        _ => None,
    });
    Ok(reported.map(|pages| pages.to_bytes(PageSize::FOUR_KIB)))
}

/// The guest kernel's memory statistics, from its console or its agent.
pub(super) fn kernel_memory(subject: &Subject<'_>) -> anyhow::Result<KernelMemory> {
    if let Some(console) = &subject.options.console {
        let reported = console_events(console)?.find_map(|event| match event {
            ConsoleEvent::Memory(memory) => Some(memory),
            _ => None,
        });
        return reported.with_context(|| {
            format!(
                "'{}' has no memory statistics: does the guest run with plimsoll.memstat_ms?",
                console.display()
            )
        });
    }
    match &subject.vm.agent_socket {
        Some(socket) => Ok(GuestAgent::connect(socket, PATIENCE)?.memory()?),
        None => {
            bail!("the VM has no guest agent at a socket known by path, and no --console was given")
        }
    }
}

/// Length of the console's file; 0 if the guest is queried through its agent, whose answers are current.
pub(super) fn console_end(subject: &Subject<'_>) -> anyhow::Result<u64> {
    let console = subject.options.console.as_deref();
    console.map_or(Ok(0), console_length)
}

/// As [`kernel_memory`], but only from what the console reports after `end`; waits for it, at most `patience`.
pub(super) fn kernel_memory_past(
    subject: &Subject<'_>,
    end: u64,
    patience: Duration,
) -> anyhow::Result<KernelMemory> {
    let Some(console) = &subject.options.console else {
        return kernel_memory(subject);
    };
    let since = Instant::now();
    loop {
        let text = console_text(console, end)?;
        // The text after the last line end is an incomplete line.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let reported = whole
            .lines()
            .rev()
            .find_map(|line| match ConsoleEvent::parse(line) {
                Some(ConsoleEvent::Memory(memory)) => Some(memory),
                _ => None,
            });
        if let Some(memory) = reported {
            return Ok(memory);
        }
        if since.elapsed() >= patience || subject.stopped() {
            bail!(
                "'{}' gets no more memory statistics from the guest",
                console.display()
            );
        }
        std::thread::sleep(POLL);
    }
}

/// The statistics of a VM's balloon. On drop, restores the interval at which the guest reports them.
///
/// A monitor serves one client at a time, so no connection is kept open between queries.
pub(super) struct BalloonStats {
    monitors: Vec<PeerSocket>,
    path: String,
    interval_before_s: u64,
}

impl BalloonStats {
    /// Finds the balloon and sets the interval of the guest's statistics.
    pub(super) fn of(vm: &QemuVm) -> anyhow::Result<Self> {
        let mut monitors = vm.monitor_sockets();
        let mut qmp = Qmp::connect_to(&mut monitors, PATIENCE)?;
        let path = qmp.find_balloon()?.context("the VM has no balloon")?;
        let interval_before_s = qmp.stats_interval_s(&path)?;
        if interval_before_s == 0 || interval_before_s > STATS_INTERVAL_S {
            qmp.set_stats_interval_s(&path, STATS_INTERVAL_S)?;
        }
        Ok(Self {
            monitors,
            path,
            interval_before_s,
        })
    }

    /// Size of the VM, in bytes.
    fn size(&mut self) -> anyhow::Result<u64> {
        Ok(Qmp::connect_to(&mut self.monitors, PATIENCE)?.balloon_actual_bytes()?)
    }

    /// Waits for statistics that are less than two intervals old.
    pub(super) fn stats(&mut self) -> anyhow::Result<GuestStats> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let stats = Qmp::connect_to(&mut self.monitors, PATIENCE)?.guest_stats(&self.path)?;
            match stats {
                Some(stats) if stats.age_s <= 2 * STATS_INTERVAL_S => return Ok(stats),
                stats if Instant::now() >= deadline => bail!(
                    "the guest's balloon driver has reported nothing {}: is the driver loaded, and is the guest running?",
                    stats.map_or("yet".to_owned(), |stats| format!("for {} s", stats.age_s))
                ),
                _ => std::thread::sleep(POLL),
            }
        }
    }
}

impl Drop for BalloonStats {
    fn drop(&mut self) {
        // Nothing polls if the monitor has ended.
        let _ = Qmp::connect_to(&mut self.monitors, PATIENCE)
            .and_then(|mut qmp| qmp.set_stats_interval_s(&self.path, self.interval_before_s));
    }
}

/// Memory committed to the guest's processes.
pub(super) fn committed(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "Committed_AS",
        sees: "memory committed to processes by the guest's kernel",
        whole_vm: false,
    };
    subject.run(method, |answer| {
        // The last line on a console may be older than the memory committed now.
        let end = console_end(subject)?;
        kernel_memory(subject)?;
        let memory = kernel_memory_past(subject, end, PATIENCE)?;
        answer.working_set = Some(Figure::new(memory.committed_bytes));
        Ok(())
    })
}

/// Memory that the guest cannot release without swapping, by its balloon's statistics.
pub(super) fn in_use(subject: &Subject<'_>) -> Answer {
    let method = Method {
        estimator: "balloon statistics",
        sees: "memory in use as the guest reports it (total - available)",
        whole_vm: true,
    };
    subject.run(method, |answer| {
        let mut balloon = BalloonStats::of(subject.vm)?;
        let stats = balloon.stats()?;
        let available = stats
            .available_bytes
            .context("the guest does not report available memory")?;
        // Its total is smaller than the VM's RAM by the memory of its firmware and its kernel's image.
        let size = balloon.size()?;
        answer.working_set = Some(Figure::new(size.saturating_sub(available)));
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_line_of_a_console_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        let noise = "x".repeat(200_000);
        let line = |pages| format!("plimsoll: step index=0 pages={pages} start_ms=1\n");
        std::fs::write(
            &path,
            [&*line(7), &noise, "\n", &line(8), "plimsoll: step ind"].concat(),
        )
        .unwrap();
        assert_eq!(truth_of_console(&path).unwrap(), Some(8 * 4096));
        std::fs::write(&path, [&*line(7), &noise].concat()).unwrap();
        assert_eq!(truth_of_console(&path).unwrap(), None);
        std::fs::remove_file(&path).unwrap();
        let error = truth_of_console(&path).unwrap_err();
        assert!(error.to_string().contains("cannot read"), "{error}");
    }
}
