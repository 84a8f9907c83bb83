//! Which CPU the trap handler runs on: the vCPU's own.
//!
//! A vCPU that waits for a trap leaves its CPU idle. A handler on that very CPU
//! runs at once and hands it back, where one on another CPU must be woken across CPUs,
//! which costs several times as much in a nested VM. So the handler follows the
//! busiest vCPU thread from CPU to CPU.

use std::fs;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Interval at which the vCPU's CPU is read.
const INTERVAL: Duration = Duration::from_millis(50);

/// Where the trap handler runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HandlerCpu {
    /// On the CPU of the busiest vCPU, wherever that goes.
    #[default]
    Follow,
    /// Where the scheduler puts it.
    Any,
}

/// Keeps the calling thread on a vCPU's CPU; dropped, it may run where it could before.
#[derive(Debug)]
pub struct Placement {
    threads: Vec<(String, u64)>,
    before: Option<CpuSet>,
    looked: Option<Instant>,
    /// Where the thread was moved last.
    cpu: Option<usize>,
}

impl Placement {
    /// Follows `threads` of process `pid`; all of its threads if none are given.
    pub fn new(cpu: HandlerCpu, pid: u32, threads: &[u32]) -> Self {
        let mut threads: Vec<String> = threads.iter().map(u32::to_string).collect();
        if threads.is_empty() {
            let tasks = fs::read_dir(format!("/proc/{pid}/task"))
                .into_iter()
                .flatten();
            threads.extend(tasks.filter_map(|task| task.ok()?.file_name().into_string().ok()));
        }
        let stat = |thread| (format!("/proc/{pid}/task/{thread}/stat"), 0);
        Self {
            threads: threads.into_iter().map(stat).collect(),
            before: (cpu == HandlerCpu::Follow)
                .then(|| sched_getaffinity(None).ok())
                .flatten(),
            looked: None,
            cpu: None,
        }
    }

    /// Moves the calling thread to the busiest thread's CPU; checks at most every 50 ms.
    ///
    /// Calls `leave` while still on a CPU that is about to be left.
    pub fn follow(&mut self, leave: impl FnOnce()) {
        let due = self
            .looked
            .is_none_or(|looked| looked.elapsed() >= INTERVAL);
        let Some(before) = self.before.filter(|_| due) else {
            return;
        };
        self.looked = Some(Instant::now());
        let mut busiest = None;
        for (path, ticks_before) in &mut self.threads {
            let Some((ticks, cpu)) = fs::read_to_string(path)
                .ok()
                .as_deref()
                .and_then(parse_stat)
            else {
                continue;
            };
            let busy = ticks - (*ticks_before).min(ticks);
            *ticks_before = ticks;
            if busiest.is_none_or(|(most, _)| busy > most) {
                busiest = Some((busy, cpu));
            }
        }
        let Some((_, cpu)) = busiest.filter(|&(_, cpu)| cpu < CpuSet::MAX_CPU) else {
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
}

impl Drop for Placement {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // It was this thread's own set, so it is taken back unless CPUs went offline.
            let _ = sched_setaffinity(None, before);
        }
    }
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
