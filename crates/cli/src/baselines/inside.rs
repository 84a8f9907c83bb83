//! What the guest itself says: Committed_AS, memory in use, what it missed.
//!
//! From its console if it is a workload of ours, by an agent in it, or by its balloon. A hint, not a fact: the guest may say anything.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use plimsoll_flow::PageSize;
use plimsoll_vm::{ConsoleEvent, GuestAgent, GuestStats, KernelMemory, QemuVm, Qmp};

use super::{Answer, Found, POLL, Subject, Way};

/// Longest wait for an agent, a monitor, a balloon's driver.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// End of a console's file in which the newest lines are looked for.
const CONSOLE_BYTES: u64 = 64 << 10;
/// How often a balloon's driver is asked.
const STATS_INTERVAL_S: u64 = 1;

/// What a console's file holds from byte `from` on, [`CONSOLE_BYTES`] of it at most.
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

/// Where a console's file ends now.
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

/// The working set that a workload guest last told on its console, in bytes; `None` if it told none lately.
///
/// # Errors
///
/// Why the file cannot be read.
pub fn truth_of_console(path: &Path) -> anyhow::Result<Option<u64>> {
    let told = console_events(path)?.find_map(|event| match event {
        ConsoleEvent::Step { pages, .. } | ConsoleEvent::Round { pages, .. } => Some(pages),
        _ => None,
    });
    Ok(told.map(|pages| pages.to_bytes(PageSize::FOUR_KIB)))
}

/// What the guest's kernel says, by its console or its agent.
pub(super) fn kernel_memory(subject: &Subject<'_>) -> anyhow::Result<KernelMemory> {
    if let Some(console) = &subject.options.console {
        let told = console_events(console)?.find_map(|event| match event {
            ConsoleEvent::Memory(memory) => Some(memory),
            _ => None,
        });
        return told.with_context(|| {
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

/// Where the console's file ends now; 0 where the guest is asked by its agent, which answers as it is.
pub(super) fn console_end(subject: &Subject<'_>) -> anyhow::Result<u64> {
    let console = subject.options.console.as_deref();
    console.map_or(Ok(0), console_length)
}

/// As [`kernel_memory`], by nothing that the console told before `end`; waits for it, at most `patience`.
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
        // What follows the last line's end is a part of a line.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let told = whole
            .lines()
            .rev()
            .find_map(|line| match ConsoleEvent::parse(line) {
                Some(ConsoleEvent::Memory(memory)) => Some(memory),
                _ => None,
            });
        if let Some(memory) = told {
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

/// A VM's balloon, asked for statistics. Dropped, it is asked as often as before.
pub(super) struct Balloon {
    pub(super) qmp: Qmp,
    path: String,
    interval_before_s: Option<u64>,
}

impl Balloon {
    /// Connects to the monitor and finds the balloon.
    pub(super) fn of(vm: &QemuVm) -> anyhow::Result<Self> {
        let socket = vm.qmp_socket.as_deref();
        let socket = socket.context("the VM has no monitor socket known by path")?;
        let mut qmp = Qmp::connect(socket, PATIENCE)?;
        let path = qmp.find_balloon()?.context("the VM has no balloon")?;
        Ok(Self {
            qmp,
            path,
            interval_before_s: None,
        })
    }

    /// Waits until the guest has told statistics less than two intervals ago.
    pub(super) fn stats(&mut self) -> anyhow::Result<GuestStats> {
        if self.interval_before_s.is_none() {
            let before_s = self.qmp.stats_interval_s(&self.path)?;
            if before_s == 0 || before_s > STATS_INTERVAL_S {
                self.qmp
                    .set_stats_interval_s(&self.path, STATS_INTERVAL_S)?;
            }
            self.interval_before_s = Some(before_s);
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.qmp.guest_stats(&self.path)? {
                Some(stats) if stats.age_s <= 2 * STATS_INTERVAL_S => return Ok(stats),
                told if Instant::now() >= deadline => bail!(
                    "the guest's balloon driver has reported nothing {}: is the driver loaded, and is the guest running?",
                    told.map_or("yet".to_owned(), |stats| format!("for {} s", stats.age_s))
                ),
                _ => std::thread::sleep(POLL),
            }
        }
    }
}

impl Drop for Balloon {
    fn drop(&mut self) {
        if let Some(before_s) = self.interval_before_s {
            // A monitor that is gone asks nobody any more.
            let _ = self.qmp.set_stats_interval_s(&self.path, before_s);
        }
    }
}

/// Memory that the guest's processes were promised.
pub(super) fn committed(subject: &Subject<'_>) -> Answer {
    let way = Way {
        estimator: "Committed_AS",
        sees: "what the guest's kernel promised to processes",
        whole_vm: false,
    };
    subject.go(way, |answer| {
        let memory = kernel_memory(subject)?;
        answer.working_set = Some(Found::new(memory.committed_bytes));
        Ok(())
    })
}

/// Memory that the guest could not do without unless it swapped, by its balloon's statistics.
pub(super) fn in_use(subject: &Subject<'_>) -> Answer {
    let way = Way {
        estimator: "balloon statistics",
        sees: "memory in use by the guest's words (total - available)",
        whole_vm: true,
    };
    subject.go(way, |answer| {
        let mut balloon = Balloon::of(subject.vm)?;
        let stats = balloon.stats()?;
        let available = stats
            .available_bytes
            .context("the guest does not report available memory")?;
        // Less than the VM's RAM by what its firmware and its kernel's image hold.
        let size = balloon.qmp.balloon_actual_bytes()?;
        answer.working_set = Some(Found::new(size.saturating_sub(available)));
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
