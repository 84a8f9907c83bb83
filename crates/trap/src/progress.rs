//! How long a VM would have taken without traps for what it did with them.
//!
//! References are counted over the time that the VM would have taken undisturbed, so that their number per second does not depend on
//! how much of its time traps take. It is measured in CPU time of the VM's process: what that used while pages
//! were observed, less what traps themselves used, over what it used per second of the whole period. So it does not matter whether
//! another vCPU goes on meanwhile, to whom the host gives its CPUs, or whether the VM has anything to do. The seconds of the period
//! are those without the delay by traps: the time by which the VM got less done in the window than it does between windows, as far
//! as traps can be the cause: [`LOST_MAX`] times their cost by their account (`account`).
//!
//! Unmapping pages interrupts those vCPUs that run on other CPUs meanwhile. What that takes of the CPU time is counted like traps.
//!
//! A trap may use more CPU time of the VM than in a trial, because its working set leaves the CPU's caches: up to 1.8 times
//! as much under TCG on a quiet host, by what the guest counted. On a busy host the trial itself takes longer, and it was less. So the
//! limits are those for half and twice the trial's ([`RUNNING`]). Where traps use most of the CPU time, little is known of
//! the rest, and the limits are far apart.

use std::time::{Duration, Instant};

use plimsoll_flow::Undisturbed;

use crate::sys::process_cpu_time;

/// CPU time of a trap, as a multiple of the trial's, and the share of the CPU time that is left to the VM in any case: for the
/// shortest observed time, the expected and the longest.
const RUNNING: [(f64, f64); 3] = [(2.0, 0.125), (1.0, 0.25), (0.5, 0.4)];
/// Largest delay, as a multiple of what traps cost by their account.
const LOST_MAX: f64 = 3.0;
/// Weight of earlier stretches without traps, from one second of them to the next.
const MEMORY: f64 = 0.75;
/// Shortest stretches of which the CPU time per second is used, in seconds together.
const REST_MIN: f64 = 0.02;

/// The VM's process at some time.
#[derive(Debug, Clone, Copy)]
struct Mark {
    at: Instant,
    /// CPU time that it has used.
    ran: Duration,
    traps: u64,
    interrupted: Duration,
}

/// What it did between two times.
#[derive(Debug, Clone, Copy)]
struct Span {
    /// In seconds.
    length: f64,
    ran: f64,
    traps: f64,
    interrupted: f64,
}

/// Follows a VM through the windows in which it is traced and the rests between them.
#[derive(Debug, Default)]
pub struct Progress {
    pid: u32,
    /// CPU time of a trap in a trial.
    running: Duration,
    /// CPU time without traps and the length of that time in seconds; the past counts ever less.
    rest: [f64; 2],
    /// CPU time that was read last: that of a process that is gone stands still.
    ran: Duration,
    traps: u64,
    interrupted: Duration,
    opened: Option<Mark>,
    /// Since when all is observed, with the number of references until then.
    observed: Option<(Mark, u64)>,
    closed: Option<Mark>,
    ended: Option<Mark>,
    rested: Option<Mark>,
}

impl Span {
    fn between(from: &Mark, to: &Mark) -> Self {
        Self {
            length: (to.at - from.at).as_secs_f64(),
            ran: to.ran.saturating_sub(from.ran).as_secs_f64(),
            traps: (to.traps - from.traps) as f64,
            interrupted: to
                .interrupted
                .saturating_sub(from.interrupted)
                .as_secs_f64(),
        }
    }
}

impl Progress {
    /// Of the process `pid`, to which a trap costs `running` of its CPU time in a trial.
    pub fn new(pid: u32, running: Duration) -> Self {
        Self {
            pid,
            running,
            ..Self::default()
        }
    }

    fn mark(&mut self) -> Mark {
        if let Ok(ran) = process_cpu_time(self.pid) {
            self.ran = ran;
        }
        Mark {
            at: Instant::now(),
            ran: self.ran,
            traps: self.traps,
            interrupted: self.interrupted,
        }
    }

    /// Pages begin to trap from now on.
    pub fn opens(&mut self) {
        (self.traps, self.interrupted) = (0, Duration::ZERO);
        (self.observed, self.closed, self.ended, self.rested) = (None, None, None, None);
        self.opened = Some(self.mark());
    }

    /// That many accesses trapped.
    pub fn trapped(&mut self, accesses: u64) {
        self.traps += accesses;
    }

    /// Interrupts took so much of the VM's CPU time.
    pub fn interrupted(&mut self, time: Duration) {
        self.interrupted += time;
    }

    /// All references are observed from now on; `references` were recorded before.
    pub fn observes(&mut self, references: u64) {
        self.observed = Some((self.mark(), references));
    }

    /// Pages are made accessible from now on.
    pub fn closes(&mut self) {
        self.closed = Some(self.mark());
    }

    /// No page traps any more.
    pub fn rests(&mut self) {
        self.ended = Some(self.mark());
    }

    /// The rest is over.
    pub fn rested(&mut self) {
        let now = self.mark();
        self.rested = Some(now);
        if let Some(from) = self.ended {
            let span = Span::between(&from, &now);
            let keep = MEMORY.powf(span.length);
            for (sum, new) in self.rest.iter_mut().zip([span.ran, span.length]) {
                *sum = *sum * keep + new;
            }
        }
    }

    /// What the VM did in the last window, in which a trap cost `trap_cost` by its account; nothing is known without the rest
    /// after it.
    pub fn settle(&self, trap_cost: Duration) -> Undisturbed {
        let (Some(opened), Some((from, references_before))) = (self.opened, self.observed) else {
            return Undisturbed::default();
        };
        let (Some(closed), Some(ended), Some(rested)) = (self.closed, self.ended, self.rested)
        else {
            return Undisturbed::default();
        };
        let window = Span::between(&from, &closed);
        let whole = Span::between(&opened, &rested);
        let delay = self.delay(&Span::between(&opened, &ended), trap_cost);
        let times = RUNNING.map(|of| {
            let whole_own = self.own(&whole, of);
            if whole_own > 0.0 {
                self.own(&window, of) / whole_own * (whole.length - delay)
            } else {
                window.length
            }
        });
        let [least, expected, most] = times.map(Duration::from_secs_f64);
        Undisturbed {
            observed: expected,
            limits: [least.min(expected), most.max(expected)],
            references_before,
            delay: Duration::from_secs_f64(delay),
            cpu_time: Duration::from_secs_f64(whole.ran - self.own(&whole, RUNNING[1])),
        }
    }

    /// The VM's own CPU time, with one of [`RUNNING`].
    fn own(&self, span: &Span, (running, left_min): (f64, f64)) -> f64 {
        let trapped = span.traps * self.running.as_secs_f64() + span.interrupted;
        (span.ran - trapped * running).max(span.ran * left_min)
    }

    /// Time by which the VM got less done in a window than it does between windows.
    fn delay(&self, window: &Span, trap_cost: Duration) -> f64 {
        let lost = window.traps * trap_cost.as_secs_f64();
        let [rested, rest] = self.rest;
        if rest < REST_MIN || rested <= 0.0 {
            return lost.min(window.length / 2.0);
        }
        let less = window.length - self.own(window, RUNNING[1]) * rest / rested;
        less.clamp(0.0, window.length.min(lost * LOST_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A window of 1 s and a rest of 3 s, in which the process runs for so long, with a trap of 20 µs each 100 µs, for which it
    /// runs for 4 µs in the trial. Rounded to milliseconds.
    fn settled(ran: Duration, rested: Duration) -> Undisturbed {
        let start = Instant::now();
        let mark = |at: u32, ran, traps| {
            Some(Mark {
                at: start + MS * at,
                ran,
                traps,
                interrupted: Duration::ZERO,
            })
        };
        let mut progress = Progress::new(std::process::id(), Duration::from_micros(4));
        progress.rest = [rested.as_secs_f64(), 3.0];
        progress.opened = mark(0, Duration::ZERO, 0);
        progress.observed = progress.opened.map(|mark| (mark, 7));
        progress.closed = mark(1000, ran, 10_000);
        progress.ended = progress.closed;
        progress.rested = mark(4000, ran + rested, 10_000);
        let found = progress.settle(Duration::from_micros(20));
        let rounded =
            |time: Duration| Duration::from_secs_f64((time.as_secs_f64() * 1e3).round() / 1e3);
        Undisturbed {
            observed: rounded(found.observed),
            limits: found.limits.map(rounded),
            delay: rounded(found.delay),
            cpu_time: rounded(found.cpu_time),
            ..found
        }
    }

    #[test]
    fn a_busy_vm_is_observed_while_no_trap_is_served() {
        // Of its CPU time 40 ms are those of traps, or 20, or 80.
        let found = settled(860 * MS, 3000 * MS);
        assert_eq!(found.observed, 820 * MS);
        assert_eq!(found.limits, [788 * MS, 836 * MS]);
        assert_eq!((found.delay, found.cpu_time), (180 * MS, 40 * MS));
        assert_eq!(found.references_before, 7);
    }

    #[test]
    fn what_others_take_of_its_cpus_delays_it_between_windows_too() {
        let found = settled(460 * MS, 1500 * MS);
        assert_eq!((found.observed, found.delay), (840 * MS, 160 * MS));
    }

    #[test]
    fn interrupts_count_like_traps() {
        let mut progress = Progress::new(std::process::id(), Duration::from_micros(4));
        let span = |traps, interrupted| Span {
            length: 1.0,
            ran: 0.5,
            traps,
            interrupted,
        };
        let own = |span| progress.own(&span, RUNNING[1]);
        assert!((own(span(50_000.0, 0.0)) - 0.3).abs() < 1e-9);
        assert!((own(span(0.0, 0.2)) - 0.3).abs() < 1e-9);
        progress.opens();
        progress.interrupted(MS);
        progress.closes();
        let (opened, closed) = (progress.opened.unwrap(), progress.closed.unwrap());
        assert!((Span::between(&opened, &closed).interrupted - 1e-3).abs() < 1e-9);
    }

    #[test]
    fn a_vm_that_has_time_to_spare_is_not_delayed() {
        let found = settled(340 * MS, 900 * MS);
        assert_eq!((found.observed, found.delay), (1000 * MS, Duration::ZERO));
    }

    #[test]
    fn a_vm_that_hardly_runs_in_its_window_is_not_delayed_by_more_than_traps_can() {
        let found = settled(160 * MS, 3000 * MS);
        assert_eq!(found.delay, 600 * MS);
        assert_eq!(found.observed, 131 * MS);
    }

    #[test]
    fn traps_never_take_all() {
        let found = settled(50 * MS, 3000 * MS);
        assert!(found.limits[0] > Duration::ZERO && found.limits[0] < found.observed);
    }

    #[test]
    fn stretches_without_traps_are_measured() {
        let mut progress = Progress::new(std::process::id(), Duration::ZERO);
        progress.rests();
        let start = Instant::now();
        while start.elapsed() < 30 * MS {
            std::hint::spin_loop();
        }
        progress.rested();
        let [ran, length] = progress.rest;
        assert!(length >= 0.03 && ran > 0.0, "{ran} of {length}");
        assert_eq!(progress.settle(Duration::ZERO), Undisturbed::default());
    }
}
