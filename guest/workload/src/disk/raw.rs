//! Random reads and writes of a raw disk by several threads, each with a model of its own part.
//!
//! The model has for each page the generations that it may hold: one after a write that succeeded, and beside it those of
//! writes that failed since. A read that succeeds must find one of them, whole, which is then the only one: what was read
//! once is what stays there. Reads may fail only where failures are expected (`errors=1`).

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;

use super::Scene;
use super::block::{BLOCK_BYTES, Name, sign};
use super::buffer::Buffer;
use super::counters::Counters;
use super::settings::Raw;
use super::setup::device_bytes;
use super::tally::Tally;
use crate::WorkloadError;
use crate::access::Random;
use crate::clock::Time;
use crate::console::Line;
use crate::machine::switch_cpus;

const PAGE_BYTES: usize = 4096;
const BLOCKS_PER_PAGE: u32 = 4;
/// Pages of a transfer at most.
const CHUNK_PAGES: u32 = 32;
/// Steps between two flushes of a thread, on average.
const STEPS_PER_FLUSH: u64 = 64;
/// How long a device is suspended, or CPUs are stopped.
const SUSPENDED: Duration = Duration::from_millis(50);
/// How often a page that fails is tried before the run gives up.
const TRIES: u32 = 600;

/// Writes all, reads and writes for the configured time, reads all.
pub fn run(scene: &Scene, raw: &Raw) -> Result<Tally, WorkloadError> {
    let device = &scene.ready.device;
    let used = format!("using {}", device.display());
    let during = || WorkloadError::during(&used);
    let bytes = device_bytes(device)?;
    let span = raw.span_mib.map_or(bytes, |mib| bytes.min(mib << 20));
    let pages = u32::try_from(span / PAGE_BYTES as u64 / u64::from(raw.threads));
    let pages = pages.ok().filter(|&pages| pages >= CHUNK_PAGES);
    let Some(pages) = pages else {
        return Err(WorkloadError::Lacking {
            what: format!(
                "{bytes} bytes of disk are no part for each of {} threads",
                raw.threads
            ),
        });
    };
    let mut parts = Vec::new();
    for nth in 0..raw.threads {
        let part = Part::open(device, raw, scene.settings.seed, nth, pages);
        parts.push(part.map_err(during())?);
    }
    scene.phase("populate");
    in_parallel(&mut parts, Part::populate).map_err(during())?;
    scene.phase("measured");
    let before = Counters::now(&scene.ready.disk)?;
    let start = Time::now();
    let over = AtomicBool::new(false);
    let (suspensions, stops) = thread::scope(|scope| {
        let suspending =
            scope.spawn(|| repeat(raw.suspend_ms, &over, || scene.ready.suspend(SUSPENDED)));
        let stopping = scope.spawn(|| {
            repeat(raw.cpus_ms, &over, || {
                switch_cpus(false)?;
                thread::sleep(SUSPENDED);
                switch_cpus(true)
            })
        });
        let worked = work(&mut parts, raw, start).map_err(during());
        over.store(true, Relaxed);
        let suspensions = suspending.join().expect("a thread does not panic")?;
        let stops = stopping.join().expect("a thread does not panic")?;
        worked.map(|()| (suspensions, stops))
    })?;
    scene.phase("verify");
    in_parallel(&mut parts, Part::verify_all).map_err(during())?;
    let tally = total(&parts);
    let sum = |count: fn(&Part) -> u64| parts.iter().map(count).sum::<u64>();
    let line = Line::new("result")
        .with("name", "raw")
        .with("steps", tally.ops)
        .with("reads", tally.read_pages())
        .with("writes", tally.written_pages())
        .with("mismatches", tally.mismatches)
        .with("failed_reads", sum(|part| part.failed.reads))
        .with("failed_writes", sum(|part| part.failed.writes))
        .with("failed_flushes", sum(|part| part.failed.flushes))
        .with("suspensions", suspensions)
        .with("cpu_stops", stops)
        .with("ms", Time::now().ms_since(start));
    Counters::now(&scene.ready.disk)?
        .told_since(&before, line)
        .print();
    Ok(tally)
}

/// Reads and writes until the time is over.
fn work(parts: &mut [Part], raw: &Raw, start: Time) -> io::Result<()> {
    let mut told = start;
    while Time::now().ms_since(start) < raw.seconds * 1000 {
        in_parallel(parts, |part| part.steps(raw, 64))?;
        if Time::now().ms_since(told) >= 1000 {
            told = Time::now();
            let so_far = total(parts);
            Line::new("result")
                .with("name", "round")
                .with("reads", so_far.read_pages())
                .with("mismatches", so_far.mismatches)
                .print();
        }
    }
    Ok(())
}

/// Does something each so many milliseconds until all is over; returns how often it did.
fn repeat(
    each_ms: Option<u64>,
    over: &AtomicBool,
    mut what: impl FnMut() -> Result<(), WorkloadError>,
) -> Result<u64, WorkloadError> {
    let mut times = 0;
    while let (Some(each_ms), false) = (each_ms, over.load(Relaxed)) {
        thread::sleep(Duration::from_millis(each_ms));
        what()?;
        times += 1;
    }
    Ok(times)
}

fn total(parts: &[Part]) -> Tally {
    let mut tally = Tally::default();
    for part in parts {
        tally.add(&part.tally);
    }
    tally
}

fn in_parallel(
    parts: &mut [Part],
    work: impl Fn(&mut Part) -> io::Result<()> + Sync,
) -> io::Result<()> {
    thread::scope(|scope| {
        let work = &work;
        let workers: Vec<_> = parts
            .iter_mut()
            .map(|part| scope.spawn(move || work(part)))
            .collect();
        let results = workers
            .into_iter()
            .map(|worker| worker.join().expect("a thread does not panic"));
        results.fold(Ok(()), io::Result::and)
    })
}

/// What failed, in requests.
#[derive(Debug, Default)]
struct Failed {
    reads: u64,
    writes: u64,
    flushes: u64,
}

/// The part of the disk that one thread uses.
struct Part {
    file: File,
    /// Number of the first page on the disk.
    first: u32,
    /// Generations that each page may hold, the last one newest; 0: zeros.
    pages: Vec<Vec<u32>>,
    /// The last write.
    generation: u32,
    seed: u32,
    errors: bool,
    random: Random,
    buffer: Buffer,
    tally: Tally,
    failed: Failed,
}

impl Part {
    fn open(device: &Path, raw: &Raw, seed: u32, nth: u32, pages: u32) -> io::Result<Self> {
        let mut options = File::options();
        options.read(true).write(true);
        if raw.direct {
            options.custom_flags(i32::try_from(OFlags::DIRECT.bits()).expect("a small flag"));
        }
        Ok(Self::new(
            options.open(device)?,
            raw.errors,
            seed,
            nth,
            pages,
        ))
    }

    fn new(file: File, errors: bool, seed: u32, nth: u32, pages: u32) -> Self {
        Self {
            file,
            first: nth * pages,
            pages: vec![vec![0]; pages as usize],
            generation: 0,
            seed,
            errors,
            random: Random::new(u64::from(seed) << 32 | u64::from(nth)),
            buffer: Buffer::new(CHUNK_PAGES as usize * PAGE_BYTES),
            tally: Tally::default(),
            failed: Failed::default(),
        }
    }

    fn below(&mut self, bound: u32) -> u32 {
        u32::try_from(self.random.below(bound.into())).expect("below a number of 32 bits")
    }

    /// The name of a page's first block.
    fn name(&self, page: u32, generation: u32) -> Name {
        Name {
            file: self.first + page,
            number: 0,
            generation,
            seed: self.seed,
        }
    }

    fn at(&self, page: u32) -> u64 {
        u64::from(self.first + page) * PAGE_BYTES as u64
    }

    /// Writes every page; what fails is tried again.
    fn populate(&mut self) -> io::Result<()> {
        let end = u32::try_from(self.pages.len()).expect("a part of 32 bits");
        for page in (0..end).step_by(CHUNK_PAGES as usize) {
            self.insist(|part| part.write(page, CHUNK_PAGES.min(end - page)))?;
        }
        self.insist(Self::flush)
    }

    /// Tries until it succeeds, while failures are expected; `what` returns whether it did.
    fn insist(&mut self, mut what: impl FnMut(&mut Self) -> io::Result<bool>) -> io::Result<()> {
        for _ in 0..TRIES {
            if what(self)? {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Err(io::Error::other("it fails again and again"))
    }

    fn steps(&mut self, raw: &Raw, steps: u64) -> io::Result<()> {
        for _ in 0..steps {
            let end = u32::try_from(self.pages.len()).expect("a part of 32 bits");
            let first = self.below(end);
            let pages = 1 + self.below(CHUNK_PAGES.min(end - first));
            if self.random.below(STEPS_PER_FLUSH) == 0 {
                self.flush()?;
            } else if self.random.below(100) < raw.write_percent {
                self.write(first, pages.min(1 + pages / 4))?;
            } else {
                self.read(first, pages)?;
            }
            self.tally.ops += 1;
        }
        Ok(())
    }

    /// Whether a request succeeded; counts a failure in `count`, which is an error unless failures are expected.
    fn judge(
        &mut self,
        result: io::Result<()>,
        count: fn(&mut Failed) -> &mut u64,
    ) -> io::Result<bool> {
        match result {
            Err(error) if !self.errors => Err(error),
            Err(_) => {
                *count(&mut self.failed) += 1;
                Ok(false)
            }
            Ok(()) => Ok(true),
        }
    }

    fn flush(&mut self) -> io::Result<bool> {
        let flushed = self.file.sync_data();
        self.judge(flushed, |failed| &mut failed.flushes)
    }

    fn write(&mut self, first: u32, pages: u32) -> io::Result<bool> {
        self.generation += 1;
        for (nth, page) in (first..first + pages).enumerate() {
            let name = self.name(page, self.generation);
            sign(&mut self.buffer[nth * PAGE_BYTES..][..PAGE_BYTES], name);
        }
        let bytes = &self.buffer[..pages as usize * PAGE_BYTES];
        self.tally.written_bytes += bytes.len() as u64;
        let written = self.file.write_all_at(bytes, self.at(first));
        let written = self.judge(written, |failed| &mut failed.writes)?;
        for may_hold in &mut self.pages[first as usize..][..pages as usize] {
            if written {
                may_hold.clear();
            }
            may_hold.push(self.generation);
        }
        Ok(written)
    }

    fn read(&mut self, first: u32, pages: u32) -> io::Result<bool> {
        let at = self.at(first);
        let bytes = &mut self.buffer[..pages as usize * PAGE_BYTES];
        let read = self.file.read_exact_at(bytes, at);
        if !self.judge(read, |failed| &mut failed.reads)? {
            return Ok(false);
        }
        for (nth, page) in (first..first + pages).enumerate() {
            self.verify(page, nth);
        }
        Ok(true)
    }

    /// Verifies the page that was read as number `nth` of the buffer.
    fn verify(&mut self, page: u32, nth: usize) {
        let bytes = &self.buffer[nth * PAGE_BYTES..][..PAGE_BYTES];
        let mut may_hold = &*self.pages[page as usize];
        if may_hold.len() > 1
            && let Some(found) = Name::of(&bytes[..BLOCK_BYTES])
            && let Some(at) = may_hold.iter().position(|&held| held == found.generation)
        {
            may_hold = &may_hold[at..=at];
        }
        let newest = *may_hold.last().expect("a page holds something");
        let zeros = may_hold.contains(&0) && bytes.iter().all(|&byte| byte == 0);
        self.tally.read_bytes += PAGE_BYTES as u64;
        let first = self.name(page, newest);
        if !zeros {
            for (block, number) in bytes.chunks(BLOCK_BYTES).zip(0..BLOCKS_PER_PAGE) {
                let expected = Name { number, ..first };
                if block != expected.block() {
                    self.tally.wrong(block, expected, BLOCK_BYTES);
                }
            }
        }
        if self.pages[page as usize].len() > 1 {
            self.pages[page as usize] = vec![if zeros { 0 } else { newest }];
        }
    }

    /// Reads every page; what fails is tried again.
    fn verify_all(&mut self) -> io::Result<()> {
        let end = u32::try_from(self.pages.len()).expect("a part of 32 bits");
        for page in (0..end).step_by(CHUNK_PAGES as usize) {
            self.insist(|part| part.read(page, CHUNK_PAGES.min(end - page)))?;
        }
        self.insist(Self::flush)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: Raw = Raw {
        threads: 1,
        seconds: 1,
        write_percent: 40,
        direct: false,
        errors: true,
        suspend_ms: None,
        cpus_ms: None,
        span_mib: None,
    };
    const PAGES: u32 = 100;

    fn part() -> Part {
        let file = tempfile::tempfile().unwrap();
        file.set_len(u64::from(PAGES) * PAGE_BYTES as u64).unwrap();
        Part::new(file, true, 9, 0, PAGES)
    }

    #[test]
    fn what_was_written_is_read() {
        let mut part = part();
        part.verify_all().unwrap();
        part.populate().unwrap();
        part.steps(&RAW, 500).unwrap();
        part.verify_all().unwrap();
        assert_eq!(part.tally.mismatches, 0);
        assert!(part.tally.read_pages() > 500);
    }

    #[test]
    fn a_failed_write_leaves_the_old_page_or_the_new_one_and_nothing_else() {
        let mut part = part();
        part.populate().unwrap();
        let writable = part.file.try_clone().unwrap();
        // It can be read and not written.
        let path = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&writable)
        );
        part.file = File::open(path).unwrap();
        assert!(!part.write(0, 2).unwrap());
        assert_eq!(part.failed.writes, 1);
        // The second page is stored all the same.
        let new = part.generation;
        let mut page = [0; PAGE_BYTES];
        sign(&mut page, part.name(1, new));
        writable.write_all_at(&page, PAGE_BYTES as u64).unwrap();
        assert!(part.read(0, 2).unwrap());
        assert_eq!(part.tally.mismatches, 0);
        assert_eq!((&*part.pages[0], &*part.pages[1]), (&[1][..], &[new][..]));
        // What was read stays: the other one is wrong from now on.
        sign(&mut page, part.name(1, 1));
        writable.write_all_at(&page, PAGE_BYTES as u64).unwrap();
        assert!(part.read(0, 2).unwrap());
        assert_eq!(part.tally.mismatches, u64::from(BLOCKS_PER_PAGE));
    }

    #[test]
    fn a_torn_or_older_page_is_found() {
        let mut part = part();
        part.populate().unwrap();
        part.write(5, 1).unwrap();
        let mut page = [0; PAGE_BYTES];
        sign(&mut page, part.name(5, 1));
        part.file.write_all_at(&page[..2048], 5 * 4096).unwrap();
        assert!(part.read(5, 1).unwrap());
        assert_eq!(part.tally.mismatches, 2);
        part.file.write_all_at(&[0; PAGE_BYTES], 6 * 4096).unwrap();
        assert!(part.read(6, 1).unwrap());
        assert_eq!(part.tally.mismatches, 2 + u64::from(BLOCKS_PER_PAGE));
    }

    #[test]
    fn a_failure_that_is_not_expected_ends_the_run() {
        let mut part = part();
        part.populate().unwrap();
        part.errors = false;
        part.file.set_len(0).unwrap();
        part.read(0, 1).unwrap_err();
    }
}
