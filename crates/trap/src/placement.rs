//! Which CPU the trap handler runs on: the vCPU's own.
//!
//! A vCPU that waits for a trap leaves its CPU idle. A handler on that very CPU
//! runs at once and hands it back, where one on another CPU must be woken across CPUs and
//! interrupts the vCPU's CPU for every page that it takes away,
//! which costs several times as much in a nested VM. So the handler follows the
//! busiest vCPU thread from CPU to CPU.
//!
//! The scheduler moves a vCPU that the handler wakes to an idle CPU, if there is one. So a handler whose work takes
//! longer than it did ([`Placement::suspect`]) reads the vCPU's CPU sooner.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Interval at which the busiest vCPU is determined.
const INTERVAL: Duration = Duration::from_millis(50);
/// Minimum interval between two readings of its CPU.
const INTERVAL_MIN: Duration = Duration::from_millis(1);
/// Longest line of a thread's stat file: 52 numbers and a name.
const STAT_BYTES_MAX: usize = 1200;

/// Where the trap handler runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HandlerCpu {
    /// On the CPU of the busiest vCPU, wherever that goes.
    #[default]
    Follow,
    /// Where the scheduler puts it.
    Any,
}

/// A vCPU thread's stat file.
#[derive(Debug)]
struct ThreadStat {
    /// `None` if the thread is gone.
    file: Option<File>,
    /// CPU time at the last reading.
    ticks: u64,
}

impl ThreadStat {
    fn open(pid: u32, thread: u32) -> Self {
        Self {
            file: File::open(format!("/proc/{pid}/task/{thread}/stat")).ok(),
            ticks: 0,
        }
    }

    /// CPU time and CPU.
    fn read(&self) -> Option<(u64, usize)> {
        let mut bytes = [0; STAT_BYTES_MAX];
        let length = self.file.as_ref()?.read_at(&mut bytes, 0).ok()?;
        parse_stat(str::from_utf8(&bytes[..length]).ok()?)
    }
}

/// Keeps the calling thread on a vCPU's CPU; dropped, it may run where it could before.
#[derive(Debug)]
pub struct Placement {
    threads: Vec<ThreadStat>,
    before: Option<CpuSet>,
    /// When the busiest thread was determined.
    determined: Option<Instant>,
    /// When its CPU was read.
    read: Option<Instant>,
    busiest: usize,
    is_suspected: bool,
    /// Where the thread was moved last.
    cpu: Option<usize>,
}

impl Placement {
    /// Follows the busiest of `threads` of process `pid`.
    pub fn new(cpu: HandlerCpu, pid: u32, threads: &[u32]) -> Self {
        let threads = threads.iter();
        let threads = threads.map(|&thread| ThreadStat::open(pid, thread));
        Self {
            threads: threads.collect(),
            before: (cpu == HandlerCpu::Follow)
                .then(|| sched_getaffinity(None).ok())
                .flatten(),
            determined: None,
            read: None,
            busiest: 0,
            is_suspected: false,
            cpu: None,
        }
    }

    /// Records that the vCPU is probably on another CPU by now.
    pub fn suspect(&mut self) {
        self.is_suspected = true;
    }

    /// Moves the calling thread to the busiest thread's CPU; checks at most every 50 ms, or 1 ms if another CPU is
    /// suspected.
    ///
    /// Calls `leave` while still on a CPU that is about to be left.
    pub fn follow(&mut self, leave: impl FnOnce()) {
        let Some(before) = self.before else {
            return;
        };
        let now = Instant::now();
        let is_past = |then: Option<Instant>, interval| {
            then.is_none_or(|then| now.saturating_duration_since(then) >= interval)
        };
        let cpu = if is_past(self.determined, INTERVAL) {
            self.determined = Some(now);
            self.determine()
        } else if self.is_suspected && is_past(self.read, INTERVAL_MIN) {
            let busiest = self.threads.get(self.busiest);
            busiest.and_then(|thread| Some(thread.read()?.1))
        } else {
            return;
        };
        self.read = Some(now);
        self.is_suspected = false;
        let Some(cpu) = cpu.filter(|&cpu| cpu < CpuSet::MAX_CPU) else {
            return;
        };
        // Not on CPUs that an administrator excludes for us.
        if before.is_set(cpu) {
            if self.cpu.replace(cpu) == Some(cpu) {
                return;
            }
            leave();
            let mut only = CpuSet::new();
            only.set(cpu);
            // A CPU that just went offline: stay on the present one until the next check.
            let _ = sched_setaffinity(None, &only);
        }
    }

    /// Determines the thread that was the busiest since the last time; returns its CPU.
    fn determine(&mut self) -> Option<usize> {
        let mut busiest: Option<(u64, usize, usize)> = None;
        for (index, thread) in self.threads.iter_mut().enumerate() {
            let Some((ticks, cpu)) = thread.read() else {
                thread.file = None;
                continue;
            };
            let busy = ticks - thread.ticks.min(ticks);
            thread.ticks = ticks;
            if busiest.is_none_or(|(most, ..)| busy > most) {
                busiest = Some((busy, index, cpu));
            }
        }
        let (_, index, cpu) = busiest?;
        self.busiest = index;
        Some(cpu)
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // It was this thread's own set, so it is taken back unless CPUs went offline.
            let _ = sched_setaffinity(None, before);
        }
    }
}

/// Binds the calling thread to its current CPU, which helps tests too: pages unmapped just before the thread is moved may
/// wait in the queue of the CPU that it left, and stay mapped. Returns the CPU.
pub fn stay_on_this_cpu() -> io::Result<usize> {
    let (cpu, mut only) = (sched_getcpu(), CpuSet::new());
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::Unsupported.into());
    }
    only.set(cpu);
    sched_setaffinity(None, &only)?;
    Ok(cpu)
}

/// Keeps the calling thread off `cpu`; an error if it may use no other.
pub fn leave_cpu(cpu: usize) -> io::Result<()> {
    let mut others = sched_getaffinity(None)?;
    others.unset(cpu);
    Ok(sched_setaffinity(None, &others)?)
}

/// Reads CPU time (ticks) and last CPU of a thread from its stat line.
fn parse_stat(stat: &str) -> Option<(u64, usize)> {
    // The name in parentheses may hold anything; fields count from its end, state first.
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..]
        .split_ascii_whitespace()
        .collect();
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some((ticks(11)? + ticks(12)?, fields.get(36)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_line_is_read_behind_a_name_with_parentheses() {
        let mut fields = vec!["S".to_owned()];
        fields.extend((4..=52).map(|field: u32| field.to_string()));
        let stat = format!("77 (CPU 0) (x) {}", fields.join(" "));
        // proc(5): utime is field 14, stime 15, processor 39.
        assert_eq!(parse_stat(&stat), Some((14 + 15, 39)));
        assert_eq!(parse_stat("77 (CPU"), None);
    }
}
