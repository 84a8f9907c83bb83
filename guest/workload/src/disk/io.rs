//! Direct reads, a fixed number in flight: rate and latency of the disk as the guest sees it.
//!
//! Each read in flight is a thread's. What they read is not verified.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use rustix::fs::OFlags;

use super::Scene;
use super::buffer::Buffer;
use super::counters::Counters;
use super::settings::Io;
use super::setup::device_bytes;
use super::tally::Tally;
use crate::WorkloadError;
use crate::access::Random;
use crate::clock::Time;
use crate::console::Line;

/// Stack of a thread.
const STACK_BYTES: usize = 64 << 10;

/// Reads for the configured time, and reports rate and latency.
pub fn run(scene: &Scene, io: &Io) -> Result<Tally, WorkloadError> {
    let device = &scene.ready.device;
    let bytes = device_bytes(device)?;
    let span = io.span_mib.map_or(bytes, |mib| bytes.min(mib << 20));
    let read_bytes = io.block_kib as usize * 1024;
    let blocks = span / read_bytes as u64;
    if blocks == 0 {
        return Err(WorkloadError::Lacking {
            what: format!("the disk has {bytes} bytes, a read {read_bytes}"),
        });
    }
    let flags = i32::try_from(OFlags::DIRECT.bits()).expect("a small flag");
    let file = File::options().read(true).custom_flags(flags).open(device);
    let file = file.map_err(WorkloadError::during(device.display()))?;
    scene.phase("measured");
    let before = Counters::now(&scene.ready.disk)?;
    let next = AtomicU64::new(0);
    let start = Time::now();
    let reader = |nth: u32| {
        let (file, next) = (&file, &next);
        let mut random = Random::new(u64::from(scene.settings.seed) << 32 | u64::from(nth));
        move || -> std::io::Result<Latencies> {
            let mut latencies = Latencies::new();
            let mut buffer = Buffer::new(read_bytes);
            loop {
                let block = if io.random {
                    random.below(blocks)
                } else {
                    next.fetch_add(1, Relaxed) % blocks
                };
                let sent = Time::now();
                file.read_exact_at(&mut buffer, block * read_bytes as u64)?;
                let done = Time::now();
                latencies.add(done.us_since(sent));
                if done.ms_since(start) >= io.seconds * 1000 {
                    return Ok(latencies);
                }
            }
        }
    };
    let all = thread::scope(|scope| {
        let mut readers = Vec::new();
        for nth in 0..io.depth {
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            readers.push(thread.spawn_scoped(scope, reader(nth))?);
        }
        let mut all = Latencies::new();
        for reader in readers {
            all.join(&reader.join().expect("a reader does not panic")?);
        }
        Ok(all)
    });
    let all = all.map_err(WorkloadError::during(format_args!(
        "reading {}",
        device.display()
    )))?;
    let ms = Time::now().ms_since(start).max(1);
    let line = Line::new("result")
        .with("name", "io")
        .with("depth", io.depth)
        .with("order", if io.random { "random" } else { "sequential" })
        .with("block_kib", io.block_kib)
        .with("reads", all.count)
        .with("ms", ms)
        .with("iops", all.count * 1000 / ms)
        .with("mean_us", all.sum_us / all.count.max(1))
        .with("p50_us", all.percentile(50))
        .with("p99_us", all.percentile(99));
    Counters::now(&scene.ready.disk)?
        .told_since(&before, line)
        .print();
    Ok(Tally {
        ops: all.count,
        ..Tally::default()
    })
}

/// Counts of latencies: exact below 16 us, then 16 steps to each power of two.
struct Latencies {
    counts: Vec<u32>,
    count: u64,
    sum_us: u64,
}

/// Steps of a power of two, as a power of two.
const STEP_BITS: u32 = 4;

impl Latencies {
    fn new() -> Self {
        Self {
            counts: vec![0; (64 - STEP_BITS as usize + 1) << STEP_BITS],
            count: 0,
            sum_us: 0,
        }
    }

    fn add(&mut self, us: u64) {
        self.counts[step(us)] += 1;
        self.count += 1;
        self.sum_us += us;
    }

    fn join(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.count += other.count;
        self.sum_us += other.sum_us;
    }

    /// The start of the step below which less than `percent` of the latencies lie.
    fn percentile(&self, percent: u64) -> u64 {
        let rank = (self.count * percent).div_ceil(100).max(1);
        let mut below = 0;
        let step = self.counts.iter().position(|&count| {
            below += u64::from(count);
            below >= rank
        });
        step.map_or(0, start_of)
    }
}

/// The step a latency falls in.
fn step(us: u64) -> usize {
    let shift = us.checked_ilog2().unwrap_or(0).saturating_sub(STEP_BITS);
    let within = usize::try_from(us >> shift).expect("below 32");
    within + ((shift as usize) << STEP_BITS)
}

/// The least latency of a step.
fn start_of(step: usize) -> u64 {
    let shift = (step >> STEP_BITS).saturating_sub(1);
    ((step - (shift << STEP_BITS)) as u64) << shift
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_step_begins_within_a_sixteenth(us: u64) {
            let start = start_of(step(us));
            prop_assert!(start <= us && us - start <= us / 16, "{start}");
            prop_assert!(step(us) < Latencies::new().counts.len());
        }
    }

    #[test]
    fn percentiles_are_those_of_a_sorted_list() {
        let mut latencies = Latencies::new();
        for us in 1..=10 {
            latencies.add(us);
        }
        let mut more = Latencies::new();
        more.add(1 << 20);
        latencies.join(&more);
        assert_eq!(latencies.percentile(50), 6);
        assert_eq!(latencies.percentile(99), 1 << 20);
        assert_eq!((latencies.count, latencies.sum_us), (11, 55 + (1 << 20)));
        assert_eq!(Latencies::new().percentile(50), 0);
    }
}
