//! Requirements of tests with guests on a host, and how many of them run at a time.

use std::collections::hash_map::RandomState;
use std::env;
use std::fs::{self, File};
use std::hash::BuildHasher as _;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_setaffinity};

/// A program, and an option with which it does nothing.
pub const QEMU: (&str, &str) = ("qemu-system-x86_64", "--version");
/// Makes file systems.
pub const MKE2FS: (&str, &str) = ("mke2fs", "-V");
/// Checks file systems.
pub const E2FSCK: (&str, &str) = ("e2fsck", "-V");

/// Names a file to which each test that uses guests appends how long it took.
const TIMES_VARIABLE: &str = "PLIMSOLL_TEST_TIMES";
/// Names the folder of the work that `./dev` runs beside the tests: `pid` is the process above it, and its own tests hold a
/// lock of `quiet`.
const ASIDE_VARIABLE: &str = "PLIMSOLL_ASIDE";
/// Names that file to tests that are part of that work.
const QUIET_VARIABLE: &str = "PLIMSOLL_QUIET";
/// A test that waits for quiet begins before the next one that does not need it.
const PAUSE_FOR_QUIET: Duration = Duration::from_millis(100);
/// Tests that run beside each other, where there are as many CPUs.
const SHARED_MAX: usize = 2;

/// CPUs that tests use at present, of [`cpus`].
static IN_USE: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// A test's use of guests. It ends when it is dropped.
#[must_use]
#[derive(Debug)]
pub struct Turn {
    cpus: usize,
    began: Instant,
    /// Processes that go on after it.
    stopped: Vec<Pid>,
    /// Locked: tests that need quiet and those beside them exclude each other.
    quiet: Option<File>,
}

/// Waits until no other test of this program uses guests: for tests that measure times, costs or rates, which depend on
/// what else uses the host's CPUs. Work of the lowest priority may go on beside it.
pub fn turn() -> Turn {
    Turn::begin(SHARED_MAX)
}

/// The same, and the work that `./dev` runs beside the tests stands still: for tests that compare times with each other.
///
/// # Panics
///
/// If the folder of that work is not what `./dev` makes of it.
pub fn quiet_turn() -> Turn {
    let mut turn = turn();
    if let Some(folder) = env::var_os(ASIDE_VARIABLE).map(PathBuf::from) {
        let quiet = File::create(folder.join("quiet")).unwrap();
        // A test there has deadlines, and comes to its end first.
        quiet.lock().unwrap();
        turn.quiet = Some(quiet);
        let pid = fs::read_to_string(folder.join("pid")).unwrap();
        stop_tree(
            Pid::from_raw(pid.trim().parse().unwrap()).unwrap(),
            &mut turn.stopped,
        );
    }
    turn
}

/// Stops a process, then all that it has started. It starts no more meanwhile.
fn stop_tree(pid: Pid, stopped: &mut Vec<Pid>) {
    // One that has ended has no children either.
    if kill_process(pid, Signal::STOP).is_err() {
        return;
    }
    stopped.push(pid);
    let pid = pid.as_raw_nonzero();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter();
    for thread in threads.flatten().flatten() {
        let children = fs::read_to_string(thread.path().join("children"));
        for child in children.unwrap_or_default().split_whitespace() {
            if let Some(child) = child.parse().ok().and_then(Pid::from_raw) {
                stop_tree(child, stopped);
            }
        }
    }
}

/// Waits until at most one other test of this program uses guests, and that one shares the host as well: for tests whose
/// assertions do not depend on how much of the host a guest gets.
pub fn shared_turn() -> Turn {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    Turn::begin(if cpus < SHARED_MAX { SHARED_MAX } else { 1 })
}

impl Turn {
    fn begin(cpus: usize) -> Self {
        // A test that failed leaves nothing behind that affects the next one.
        let in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let in_use = ENDED.wait_while(in_use, |in_use| *in_use + cpus > SHARED_MAX);
        *in_use.unwrap_or_else(PoisonError::into_inner) += cpus;
        let quiet = env::var_os(QUIET_VARIABLE).map(|path| {
            thread::sleep(PAUSE_FOR_QUIET);
            let quiet = File::create(path).unwrap();
            quiet.lock_shared().unwrap();
            quiet
        });
        Self {
            cpus,
            began: Instant::now(),
            stopped: Vec::new(),
            quiet,
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        for &pid in &self.stopped {
            // Stopped, it has not ended by itself.
            let _ = kill_process(pid, Signal::CONT);
        }
        drop(self.quiet.take());
        *IN_USE.lock().unwrap_or_else(PoisonError::into_inner) -= self.cpus;
        ENDED.notify_all();
        let Some(times) = env::var_os(TIMES_VARIABLE) else {
            return;
        };
        let how = if self.cpus < SHARED_MAX {
            "shared"
        } else {
            "alone"
        };
        let seconds = self.began.elapsed().as_secs_f64();
        let name = thread::current().name().unwrap_or("").to_owned();
        let line = format!("{seconds:6.1} s  {name} ({how})\n");
        // A line of a table; without it nothing is less tested.
        let file = File::options().create(true).append(true).open(times);
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

/// How long the host's CPUs run nothing although a thread of ours is to run: another VM of its hypervisor has them, or
/// other programs. One thread on each CPU wakes up all the time and measures how late it is.
#[derive(Debug)]
pub struct Delays {
    longest_us: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    watchers: Vec<JoinHandle<()>>,
}

/// Time between two wake-ups of a watcher.
const WAKE_UP: Duration = Duration::from_millis(2);

impl Delays {
    /// Begins to watch.
    pub fn watch() -> Self {
        let longest_us = Arc::new(AtomicU64::new(0));
        let is_over = Arc::new(AtomicBool::new(false));
        let watch = |cpu| {
            let (longest_us, is_over) = (Arc::clone(&longest_us), Arc::clone(&is_over));
            move || {
                let mut cpus = CpuSet::new();
                cpus.set(cpu);
                // A CPU that it may not use is watched from another.
                let _ = sched_setaffinity(None, &cpus);
                while !is_over.load(Ordering::Relaxed) {
                    let begin = Instant::now();
                    thread::sleep(WAKE_UP);
                    let late = begin.elapsed().saturating_sub(WAKE_UP).as_micros();
                    let late = u64::try_from(late).unwrap_or(u64::MAX);
                    longest_us.fetch_max(late, Ordering::Relaxed);
                }
            }
        };
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let watchers = (0..cpus).map(|cpu| thread::spawn(watch(cpu))).collect();
        Self {
            longest_us,
            is_over,
            watchers,
        }
    }

    /// Ends the watch; returns the longest delay.
    ///
    /// # Panics
    ///
    /// If a watcher did.
    pub fn end(mut self) -> Duration {
        self.is_over.store(true, Ordering::Relaxed);
        for watcher in self.watchers.drain(..) {
            watcher.join().unwrap();
        }
        Duration::from_micros(self.longest_us.load(Ordering::Relaxed))
    }
}

impl Drop for Delays {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// Checks that programs are installed.
///
/// # Errors
///
/// The first that is not.
pub fn installed(programs: &[(&str, &str)]) -> Result<(), String> {
    for (program, option) in programs {
        let mut command = Command::new(program);
        command
            .arg(option)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
            .status()
            .map_err(|error| format!("{program}: {error}"))?;
    }
    Ok(())
}

/// Whether QEMU may never connect a disk again whose daemon dies before the guest's driver uses it: while the VM boots or is
/// stopped, or while QEMU connects the disk. QEMU 7.2 does so, and 10 does not; its developers mended it in 8.2, and all of 8 are taken
/// for such.
pub fn qemu_may_lose_disks() -> bool {
    static MAY: LazyLock<bool> = LazyLock::new(|| {
        let output = Command::new(QEMU.0).arg(QEMU.1).output();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let version = text.ok().and_then(|text| {
            let mut words = text.split_ascii_whitespace();
            words.find(|word| *word == "version");
            words.next()?.split('.').next()?.parse().ok()
        });
        version.is_none_or(|version: u32| version < 9)
    });
    *MAY
}

/// Checks that VMs can be traced: by root, on a host that does not swap.
///
/// # Errors
///
/// Why not.
pub fn can_trace() -> Result<(), String> {
    if fs::metadata("/proc/self").is_ok_and(|this| this.uid() != 0) {
        return Err("only root may trace a VM".into());
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().count() > 1 {
        return Err("this host swaps, so its VMs are not traced".into());
    }
    Ok(())
}

/// A seed that differs from run to run, printed so that a run can be repeated.
pub fn printed_seed() -> u64 {
    let seed = RandomState::new().hash_one(std::process::id());
    println!("seed {seed}");
    seed
}

/// The middle value, or the mean of the two in the middle.
///
/// # Panics
///
/// Without values.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    assert!(!values.is_empty(), "a median of no values");
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median([4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
    }

    #[test]
    fn a_turn_excludes_all_others_and_shared_turns_only_the_third() {
        // As shared_turn() on two CPUs: on one all turns exclude each other.
        let one_of_two: fn() -> Turn = || Turn::begin(1);
        let begun = |begin: fn() -> Turn| {
            let (sender, receiver) = std::sync::mpsc::channel();
            thread::spawn(move || sender.send(begin()).unwrap());
            receiver
        };
        let short = std::time::Duration::from_millis(200);
        let first = one_of_two();
        let second = one_of_two();
        let third = begun(one_of_two);
        third.recv_timeout(short).unwrap_err();
        drop(first);
        let third = third.recv().unwrap();
        let alone = begun(turn);
        drop(second);
        alone.recv_timeout(short).unwrap_err();
        drop(third);
        let alone = alone.recv().unwrap();
        let shared = begun(one_of_two);
        shared.recv_timeout(short).unwrap_err();
        drop(alone);
        drop(shared.recv().unwrap());
    }

    #[test]
    fn a_stopped_process_and_what_it_started_go_on_after_the_turn() {
        let mut shell = Command::new("sh")
            .args(["-c", "(sleep 60) & echo started; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut started = [0; 8];
        std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut started).unwrap();
        let mut turn = Turn::begin(1);
        stop_tree(Pid::from_child(&shell), &mut turn.stopped);
        let stopped = turn.stopped.clone();
        // The subshell may have become the sleep.
        assert!(stopped.len() >= 2, "{stopped:?}");
        // The third field, behind the name in parentheses.
        let is_stopped = |pid: &Pid| {
            let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap();
            stat.rsplit(')')
                .next()
                .unwrap()
                .trim_start()
                .starts_with('T')
        };
        let wait_until = |state: bool| {
            let began = Instant::now();
            while !stopped.iter().all(|pid| is_stopped(pid) == state) {
                assert!(began.elapsed() < Duration::from_secs(60), "{state}");
                thread::sleep(Duration::from_millis(5));
            }
        };
        wait_until(true);
        drop(turn);
        wait_until(false);
        for pid in stopped {
            kill_process(pid, Signal::KILL).unwrap();
        }
        shell.wait().unwrap();
    }

    #[test]
    fn a_program_that_is_not_installed_is_named() {
        let missing = installed(&[("no-such-program", "-V")]).unwrap_err();
        assert!(missing.starts_with("no-such-program: "), "{missing}");
    }
}
