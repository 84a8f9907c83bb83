//! The cost of traps to a VM: the time of the handler, and the time outside it.
//!
//! From outside only the handler can be timed. The rest (the fault itself, wake-ups, under KVM a kernel thread that
//! resolves the fault while the vCPU halts) was measured on accesses of our own (`trial`), but other hosts, loads and
//! accelerators make it larger. So it is learned from the vCPU threads: the time for which they slept, by the kernel's
//! account (`/proc/PID/task/TID/schedstat`), is compared inside and outside of the windows in which pages trap. The
//! additional loss inside, divided by the traps of the window, is the cost of a trap. Time in which they waited for a
//! CPU counts up to the time that this thread used one: the rest was taken by others. The trial's figure is the lower
//! limit.
//!
//! Only vCPUs that hardly halt by themselves are compared; a VM without such keeps the cost learned last. An estimate
//! is a mean over some periods: the kernel's account may be late by a tick.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use crate::config::TraceConfig;
use crate::error::TrapError;
use crate::process::cpu_time;
use crate::target::TraceTarget;
use crate::trial::{Toucher, TrapCost, measure_for, measure_trap_cost};

/// Share of the time that a vCPU may halt by itself and still be compared.
const HALTS_MAX: f64 = 0.2;
/// Minimum number of traps in a window from which something is learned.
const TRAPS_MIN: u64 = 50;
/// How long the vCPUs are observed before anything is changed in the VM.
const FIRST_REST: Duration = Duration::from_millis(100);
/// Weight of earlier periods, from one period to the next.
const MEMORY: f64 = 0.75;
/// Number of traps that the trial counts for: a few traps of the VM are weak evidence.
const TRIAL_TRAPS: f64 = 500.0;
/// Largest accepted cost, as a multiple of the trial's.
const COST_MAX: u32 = 50;

/// Times of a vCPU thread since some earlier time.
#[derive(Debug, Clone, Copy, Default)]
struct VcpuTime {
    slept: Duration,
    /// Time for which it waited for a CPU.
    waited: Duration,
}

/// The times of the vCPU threads, and the CPU time of this thread.
#[derive(Debug, Clone)]
struct Sample {
    at: Instant,
    /// `None` for a thread that is gone, and all of them where the kernel keeps no account.
    vcpus: Vec<Option<VcpuTime>>,
    own: Duration,
}

/// Reads them, as differences to a first reading.
#[derive(Debug)]
struct VcpuTimes {
    paths: Vec<String>,
    begin: Instant,
    first: Vec<Option<[Duration; 2]>>,
}

impl VcpuTimes {
    fn new(pid: u32, threads: &[u32]) -> Self {
        let path = |thread| format!("/proc/{pid}/task/{thread}/schedstat");
        let mut times = Self {
            paths: threads.iter().map(path).collect(),
            begin: Instant::now(),
            first: Vec::new(),
        };
        times.first = times.read().collect();
        times
    }

    /// Run and wait time of each thread.
    fn read(&self) -> impl Iterator<Item = Option<[Duration; 2]>> {
        let read = |path: &String| parse_schedstat(&fs::read_to_string(path).ok()?);
        self.paths.iter().map(read)
    }

    fn sample(&self) -> Sample {
        let at = Instant::now();
        let elapsed = at - self.begin;
        let vcpus = self.read().zip(&self.first).map(|(now, first)| {
            let (now, first) = (now?, (*first)?);
            let waited = now[1].saturating_sub(first[1]);
            let busy = now[0].saturating_sub(first[0]) + waited;
            Some(VcpuTime {
                slept: elapsed.saturating_sub(busy),
                waited,
            })
        });
        Sample {
            at,
            vcpus: vcpus.collect(),
            own: cpu_time(),
        }
    }
}

/// Time that a thread ran and time that it waited for a CPU, from the line of its schedstat.
fn parse_schedstat(line: &str) -> Option<[Duration; 2]> {
    let mut words = line.split_ascii_whitespace();
    let mut next = || words.next()?.parse().ok().map(Duration::from_nanos);
    Some([next()?, next()?])
}

/// How a vCPU spends its time outside of windows, in seconds.
#[derive(Debug, Clone, Copy, Default)]
struct Rest {
    length: f64,
    slept: f64,
    waited: f64,
}

/// Observations of the vCPUs in a period.
#[derive(Debug, Clone, Copy, Default)]
struct WindowLoss {
    /// Time that compared vCPUs lost inside the window beyond what they sleep and wait outside.
    lost_seconds: f64,
    /// Traps in the window, and the handler's time for them.
    traps: u64,
    handler_seconds: f64,
    /// Time of all vCPUs in the window: more cannot be lost.
    vcpu_seconds: f64,
}

/// The account of a tracer's traps.
#[derive(Debug)]
pub struct TrapAccount {
    cost: TrapCost,
    times: VcpuTimes,
    /// Added to the handler's time of a trap.
    outside: Duration,
    /// Traps of the period and the handler's time for them.
    traps: u64,
    handler: Duration,
    /// The end of the window before, and both at the begin of this one.
    rested: Option<Sample>,
    begun: Option<(Sample, u64, Duration)>,
    /// Per vCPU; the past counts ever less.
    rests: Vec<Rest>,
    /// Sums over windows, the past ever lighter.
    learned: [f64; 3],
}

impl TrapAccount {
    /// Begins an account for `target`, in which nothing was changed yet, with a trial of traps on what runs it.
    ///
    /// # Errors
    ///
    /// As [`measure_trap_cost`].
    pub fn measure(
        target: &TraceTarget,
        config: &TraceConfig,
    ) -> Result<(Self, Toucher), TrapError> {
        let mut toucher = Toucher::Thread;
        let account = Self::begin(target.pid, &target.busy_threads(), || {
            let measure = |toucher| measure_trap_cost(config.handler_cpu, toucher);
            let (cost, measured_on) = measure_for(target.pid, measure)?;
            toucher = measured_on;
            Ok(cost)
        })?;
        Ok((account, toucher))
    }

    /// Begins an account for a VM in which nothing was changed yet: observes its vCPUs for a while, during which
    /// `measure` runs a trial.
    ///
    /// # Errors
    ///
    /// Those of `measure`.
    pub fn begin(
        pid: u32,
        vcpu_threads: &[u32],
        measure: impl FnOnce() -> Result<TrapCost, TrapError>,
    ) -> Result<Self, TrapError> {
        let times = VcpuTimes::new(pid, vcpu_threads);
        let from = times.sample();
        let mut account = Self::new(times, measure()?);
        thread::sleep(FIRST_REST.saturating_sub(from.at.elapsed()));
        let to = account.times.sample();
        account.observe_rest(&from, &to);
        Ok(account)
    }

    fn new(times: VcpuTimes, cost: TrapCost) -> Self {
        Self {
            outside: cost.outside_handler,
            traps: 0,
            handler: Duration::ZERO,
            rested: None,
            begun: None,
            rests: vec![Rest::default(); times.paths.len()],
            learned: [0.0; 3],
            times,
            cost,
        }
    }

    /// The cost of a trap to the VM, as far as it is known.
    pub fn trap_cost(&self) -> Duration {
        self.cost.whole.saturating_sub(self.cost.outside_handler) + self.outside
    }

    /// CPU time of whoever traps, in the trial.
    pub fn running(&self) -> Duration {
        self.cost.running
    }

    /// Adds a trap whose handler took `handler`; returns its cost.
    pub fn charge(&mut self, handler: Duration) -> Duration {
        self.traps += 1;
        self.handler += handler;
        handler + self.outside
    }

    /// Records that all sampled pages are inaccessible from now on.
    pub fn window_begins(&mut self) {
        let sample = self.times.sample();
        if let Some(rested) = self.rested.take() {
            self.observe_rest(&rested, &sample);
        }
        self.begun = Some((sample, self.traps, self.handler));
    }

    /// Records that they are made accessible from now on.
    pub fn window_ends(&mut self) {
        let ended = self.times.sample();
        if let Some((begun, traps, handler)) = self.begun.take() {
            let window = WindowLoss {
                lost_seconds: self.lost(&begun, &ended),
                vcpu_seconds: (ended.at - begun.at).as_secs_f64() * begun.vcpus.len() as f64,
                traps: self.traps - traps,
                handler_seconds: (self.handler - handler).as_secs_f64(),
            };
            self.learn(window);
        }
        self.rested = Some(ended);
    }

    /// Ends a period; returns the cost of all its traps by the estimate so far.
    pub fn settle(&mut self) -> Duration {
        let traps = u32::try_from(std::mem::take(&mut self.traps)).unwrap_or(u32::MAX);
        std::mem::take(&mut self.handler) + self.outside * traps
    }

    fn observe_rest(&mut self, from: &Sample, to: &Sample) {
        let length = (to.at - from.at).as_secs_f64();
        // A short rest weighs little, as the kernel's account may be late.
        let keep = MEMORY.powf(length);
        for (rest, times) in self.rests.iter_mut().zip(from.vcpus.iter().zip(&to.vcpus)) {
            let (Some(from), Some(to)) = times else {
                continue;
            };
            let add = |sum: f64, from: Duration, to: Duration| {
                sum * keep + to.saturating_sub(from).as_secs_f64()
            };
            rest.length = rest.length * keep + length;
            rest.slept = add(rest.slept, from.slept, to.slept);
            rest.waited = add(rest.waited, from.waited, to.waited);
        }
    }

    /// What compared vCPUs lost in a window; 0 if none is compared.
    fn lost(&self, from: &Sample, to: &Sample) -> f64 {
        let length = (to.at - from.at).as_secs_f64();
        let (mut slept, mut waited) = (0.0, 0.0);
        for (rest, times) in self.rests.iter().zip(from.vcpus.iter().zip(&to.vcpus)) {
            let (Some(from), Some(to)) = times else {
                continue;
            };
            // Without any rest there is nothing to compare with.
            if rest.length <= 0.0 || rest.slept > HALTS_MAX * rest.length {
                continue;
            }
            let more = |from: Duration, to: Duration, at_rest: f64| {
                to.saturating_sub(from).as_secs_f64() - at_rest / rest.length * length
            };
            slept += more(from.slept, to.slept, rest.slept);
            waited += more(from.waited, to.waited, rest.waited);
        }
        let own = to.own.saturating_sub(from.own).as_secs_f64();
        slept + waited.clamp(0.0, own)
    }

    fn learn(&mut self, window: WindowLoss) {
        if window.traps < TRAPS_MIN || window.lost_seconds <= 0.0 {
            return;
        }
        let new = [
            window.lost_seconds,
            window.traps as f64,
            window.handler_seconds,
        ];
        for (sum, new) in self.learned.iter_mut().zip(new) {
            *sum = *sum * MEMORY + new;
        }
        let [lost, traps, handler] = self.learned;
        let outside = (lost - handler) / traps + self.cost.running.as_secs_f64();
        let trial = self.cost.outside_handler.as_secs_f64();
        let outside = (outside * traps + trial * TRIAL_TRAPS) / (traps + TRIAL_TRAPS);
        let least = self.cost.outside_handler_min;
        let most = least + self.cost.whole * COST_MAX;
        let outside = Duration::from_secs_f64(outside.max(0.0)).clamp(least, most);
        let left = (window.vcpu_seconds - window.handler_seconds).max(0.0);
        self.outside = outside.min(Duration::from_secs_f64(left / window.traps as f64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> TrapAccount {
        let us = Duration::from_micros;
        let cost = TrapCost {
            whole: us(20),
            outside_handler: us(8),
            outside_handler_min: us(6),
            running: us(3),
        };
        TrapAccount::new(VcpuTimes::new(std::process::id(), &[]), cost)
    }

    /// What vCPUs slept and waited, in ms.
    fn sample(start: Instant, at_ms: u64, own_ms: u64, vcpus: &[(u64, u64)]) -> Sample {
        let ms = Duration::from_millis;
        let vcpus = vcpus.iter().map(|&(slept, waited)| {
            Some(VcpuTime {
                slept: ms(slept),
                waited: ms(waited),
            })
        });
        Sample {
            at: start + ms(at_ms),
            vcpus: vcpus.collect(),
            own: ms(own_ms),
        }
    }

    #[test]
    fn a_schedstat_line_gives_run_and_wait_time() {
        let us = Duration::from_micros;
        assert_eq!(
            parse_schedstat("1500000 500000 12\n"),
            Some([us(1500), us(500)])
        );
        assert_eq!(parse_schedstat("1500"), None);
        assert_eq!(parse_schedstat(""), None);
    }

    #[test]
    fn the_own_thread_is_seen_to_sleep() {
        let times = VcpuTimes::new(std::process::id(), &[std::process::id()]);
        let before = times.sample();
        thread::sleep(Duration::from_millis(50));
        let after = times.sample();
        let elapsed = after.at - before.at;
        let (Some(before), Some(after)) = (before.vcpus[0], after.vcpus[0]) else {
            return; // a kernel without this account
        };
        let slept = after.slept.saturating_sub(before.slept);
        let ms = Duration::from_millis;
        assert!(
            slept >= ms(30) && slept <= elapsed + ms(10),
            "{slept:?} of {elapsed:?}"
        );
    }

    #[test]
    fn a_thread_that_is_gone_is_not_compared() {
        let (start, mut account) = (Instant::now(), account());
        account.rests = vec![Rest::default(); 2];
        let (from, mut to) = (
            sample(start, 0, 0, &[(0, 0); 2]),
            sample(start, 1000, 0, &[(0, 0); 2]),
        );
        account.observe_rest(&from, &to);
        to.vcpus[0] = None;
        let window = sample(start, 2000, 0, &[(900, 0), (100, 0)]);
        assert!((account.lost(&to, &window) - 0.1).abs() < 1e-6);
    }

    #[test]
    fn what_vcpus_lose_in_windows_is_what_traps_cost() {
        let (start, mut account) = (Instant::now(), account());
        account.rests = vec![Rest::default(); 3];
        // The first is busy, sleeps a twentieth of the time and waits as much; the second sleeps; the third does now
        // and then.
        let from = sample(start, 0, 0, &[(0, 0); 3]);
        let rest = sample(start, 1000, 10, &[(50, 50), (1000, 0), (300, 0)]);
        account.observe_rest(&from, &rest);
        // A window of 2 s in which the first is stopped for 0.9 s more than it would, and waits for 0.6 s more, of
        // which this thread had the CPU for 0.1 s.
        let window = sample(start, 3000, 110, &[(1050, 750), (3000, 0), (2000, 0)]);
        let lost = account.lost(&rest, &window);
        assert!((lost - 1.0).abs() < 1e-6, "{lost}");
        account.learn(WindowLoss {
            lost_seconds: lost,
            traps: 10_000,
            handler_seconds: 0.12,
            vcpu_seconds: 6.0,
        });
        // 100 µs each, of them 12 in the handler; 3 more in which the vCPU ran. The trial's 8 count for 500 traps.
        let outside = account.outside.as_secs_f64() * 1e6;
        assert!(
            (outside - (91.0 * 20.0 + 8.0) / 21.0).abs() < 0.1,
            "{outside}"
        );
        assert_eq!(account.charge(Duration::from_micros(12)).as_micros(), 99);
        assert_eq!(account.settle().as_micros(), 99);
        assert_eq!(account.settle(), Duration::ZERO);
    }

    #[test]
    fn the_trial_is_the_lower_limit() {
        let mut account = account();
        account.learn(WindowLoss {
            lost_seconds: 1e-3,
            traps: 10_000,
            handler_seconds: 0.12,
            vcpu_seconds: 6.0,
        });
        assert_eq!(account.outside, Duration::from_micros(6));
        assert_eq!(account.trap_cost(), Duration::from_micros(18));
        // Few traps show nothing.
        account.learn(WindowLoss {
            lost_seconds: 10.0,
            traps: TRAPS_MIN - 1,
            handler_seconds: 0.0,
            vcpu_seconds: 6.0,
        });
        assert_eq!(account.outside, Duration::from_micros(6));
        // More than all the time there was cannot be lost.
        account.learn(WindowLoss {
            lost_seconds: 3.0,
            traps: 10_000,
            handler_seconds: 0.5,
            vcpu_seconds: 1.0,
        });
        assert_eq!(account.outside, Duration::from_micros(50));
    }
}
