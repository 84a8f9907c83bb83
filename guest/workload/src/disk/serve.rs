//! Servers that share a host's memory: what they read follows a law, request by request, for as long as wanted.
//!
//! After the machines of \[LS07\] §6.5, each with a miss-ratio curve of its own kind:
//!
//! - *web*: a request reads a file, of rank i with probability proportional to 1 / i^alpha. Each
//!   further page of memory brings a little less than the one before.
//! - *search*: a request reads 8 blocks of 4 KiB, some of them from a small part of the index that is always hot, the
//!   others from anywhere in it. Memory helps evenly until the index fits, then no more.
//! - *scan*: a request reads the next file of a long pass, or one of a few hot ones. Beyond these, memory does not help.
//!
//! Beside each, the paper's light *background* task may run: it reads one large file now and then, each in its
//! turn. All its pages are used again, but so late that no memory worth giving would keep them.
//!
//! One thread does it all, so that the order of what is read follows from the seed and the rate.

use std::thread;
use std::time::Duration;

use super::Scene;
use super::counters::Counters;
use super::files::{Files, Place};
use super::settings::{Background, Hot, Serve, ServeOrder};
use super::tally::Tally;
use crate::WorkloadError;
use crate::access::{Random, Scatter, Zipf};
use crate::clock::Time;
use crate::console::Line;

/// Blocks of an index that a search reads.
const SEARCH_BLOCKS: u64 = 8;
/// Bytes of each.
const SEARCH_BLOCK_BYTES: usize = 4096;
/// How far requests at a fixed rate may fall behind before some are left out, in us.
const BEHIND_US_MAX: u64 = 1_000_000;

/// Serves until the time is over, if it ever is.
pub fn run(scene: &Scene, serve: &Serve) -> Result<Tally, WorkloadError> {
    scene.mount()?;
    let directory = scene.directory("serve")?;
    let mut server = Server::new(
        serve,
        Place::Directory(directory.clone()),
        scene.settings.seed,
    );
    let mut task = serve.background.map(|background| {
        // Numbered on, so that no block of one is a block of the other.
        let place = Place::Directory(directory);
        Task::new(background, place, serve.files, scene.settings.seed)
    });
    scene.phase("populate");
    let populated = server.files.populate();
    populated.map_err(WorkloadError::during("writing the files"))?;
    if let Some(task) = &mut task {
        let populated = task.files.populate();
        populated.map_err(WorkloadError::during("writing the background's files"))?;
    }
    scene.phase("measured");
    let start = Time::now();
    let mut pace = Pace::new(serve.rate);
    let mut report = Report::new(scene, serve.report_s)?;
    let reading = || WorkloadError::during("reading the files");
    loop {
        let now_us = Time::now().us_since(start);
        let over = serve.seconds.is_some_and(|s| now_us >= s * 1_000_000);
        if over || report.every.is_due(now_us) {
            report.write(now_us, &server, task.as_ref(), pace.skipped)?;
        }
        if over {
            break;
        }
        if let Some(task) = &mut task
            && task.every.is_due(now_us)
        {
            task.touch().map_err(reading())?;
        }
        // Even a task that is always due lets a request by.
        let now_us = Time::now().us_since(start);
        if let Some(wait_us) = pace.wait_us(now_us) {
            let of_task = |task: &Task| task.every.wait_us(now_us);
            let end_us = serve.seconds.map_or(u64::MAX, |s| s * 1_000_000);
            let wait_us = wait_us
                .min(report.every.wait_us(now_us))
                .min(task.as_ref().map_or(u64::MAX, of_task))
                .min(end_us.saturating_sub(now_us));
            thread::sleep(Duration::from_micros(wait_us));
        } else {
            server.request().map_err(reading())?;
            server.busy_us += Time::now().us_since(start) - now_us;
        }
    }
    scene.unmount()?;
    let mut tally = server.files.tally;
    if let Some(task) = &task {
        tally.mismatches += task.files.tally.mismatches;
    }
    Ok(tally)
}

/// The files and who reads them.
struct Server {
    files: Files,
    draw: Draw,
    random: Random,
    /// Whether files are dropped from memory once they are read.
    drops: bool,
    /// Time spent in requests.
    busy_us: u64,
}

/// What draws what is read next; numbers of files, or of blocks in all files.
enum Draw {
    Web { law: Zipf, scatter: Scatter },
    Search { hot: Part, blocks: u64 },
    Scan { hot: Part, next: u64 },
}

/// The first so many, drawn with a probability of so many percent.
struct Part {
    count: u64,
    percent: u64,
}

impl Part {
    fn new(hot: Hot, unit_kib: u64) -> Self {
        Self {
            count: u64::from(hot.kib).div_ceil(unit_kib),
            percent: hot.percent,
        }
    }

    /// One of it, or `None` if none of it is to be drawn.
    fn draw(&self, random: &mut Random) -> Option<u64> {
        (random.below(100) < self.percent).then(|| random.below(self.count))
    }
}

impl Server {
    fn new(serve: &Serve, place: Place, seed: u32) -> Self {
        let mut random = Random::new(seed.into());
        let (files, file_kib) = (u64::from(serve.files), u64::from(serve.file_kib));
        let draw = match serve.order {
            ServeOrder::Web { alpha } => Draw::Web {
                law: Zipf::new(files, alpha),
                scatter: Scatter::new(files, random.next()),
            },
            ServeOrder::Search(hot) => Draw::Search {
                hot: Part::new(hot, 4),
                blocks: files * (file_kib / 4),
            },
            ServeOrder::Scan(hot) => {
                let hot = Part::new(hot, file_kib);
                let next = hot.count;
                Draw::Scan { hot, next }
            }
        };
        Self {
            files: Files::new(place, 0, serve.files, serve.file_kib, seed),
            draw,
            random,
            drops: serve.drop,
            busy_us: 0,
        }
    }

    fn request(&mut self) -> std::io::Result<()> {
        self.files.tally.ops += 1;
        if let Draw::Search { .. } = self.draw {
            for _ in 0..SEARCH_BLOCKS {
                let block = self.next();
                self.read_block(block)?;
            }
            Ok(())
        } else {
            let file = index(self.next());
            self.files.read(file)?;
            if self.drops {
                self.files.drop(file)?;
            }
            Ok(())
        }
    }

    /// The next file; of a search, the next block.
    fn next(&mut self) -> u64 {
        let random = &mut self.random;
        match &mut self.draw {
            Draw::Web { law, scatter } => scatter.place(law.draw(random)),
            Draw::Search { hot, blocks } => {
                let hot = hot.draw(random);
                hot.unwrap_or_else(|| random.below(*blocks))
            }
            Draw::Scan { hot, next } => hot.draw(random).unwrap_or_else(|| {
                let file = *next;
                let after = file + 1;
                *next = if after < self.files.len() as u64 {
                    after
                } else {
                    hot.count
                };
                file
            }),
        }
    }

    fn read_block(&mut self, block: u64) -> std::io::Result<()> {
        let of_file = (self.files.file_bytes() / SEARCH_BLOCK_BYTES) as u64;
        let at = index(block % of_file) * SEARCH_BLOCK_BYTES;
        self.files
            .read_part(index(block / of_file), at, SEARCH_BLOCK_BYTES)
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("a 64-bit machine")
}

/// The background task.
struct Task {
    files: Files,
    next: usize,
    every: Schedule,
}

impl Task {
    fn new(background: Background, place: Place, first: u32, seed: u32) -> Self {
        Self {
            files: Files::new(place, first, background.files, background.file_kib, seed),
            next: 0,
            every: Schedule::new(background.every_ms * 1000),
        }
    }

    fn touch(&mut self) -> std::io::Result<()> {
        self.files.read(self.next)?;
        self.files.tally.ops += 1;
        self.next = (self.next + 1) % self.files.len();
        Ok(())
    }
}

/// What comes due once a period. A period that passed unseen is left out.
struct Schedule {
    period_us: u64,
    next_us: u64,
}

impl Schedule {
    fn new(period_us: u64) -> Self {
        Self {
            period_us,
            next_us: period_us,
        }
    }

    /// Whether it is due, once for each time it is.
    fn is_due(&mut self, now_us: u64) -> bool {
        let due = now_us >= self.next_us;
        if due {
            self.next_us = (now_us / self.period_us + 1) * self.period_us;
        }
        due
    }

    fn wait_us(&self, now_us: u64) -> u64 {
        self.next_us.saturating_sub(now_us)
    }
}

/// When requests are due: at a fixed rate, however long each takes, or one after the other.
struct Pace {
    /// Requests a second.
    rate: Option<u64>,
    /// Requests begun or left out.
    passed: u64,
    /// Requests left out because those before them took too long.
    skipped: u64,
}

impl Pace {
    fn new(rate: Option<u64>) -> Self {
        Self {
            rate,
            passed: 0,
            skipped: 0,
        }
    }

    /// How long the next request has to wait; `None` lets it begin.
    fn wait_us(&mut self, now_us: u64) -> Option<u64> {
        let rate = self.rate?;
        let due_us = self.passed * 1_000_000 / rate;
        if due_us > now_us {
            return Some(due_us - now_us);
        }
        if now_us - due_us > BEHIND_US_MAX {
            let due_by_now = now_us * rate / 1_000_000;
            self.skipped += due_by_now - self.passed;
            self.passed = due_by_now;
        }
        self.passed += 1;
        None
    }
}

/// What was counted up to the last line.
struct Report<'a> {
    scene: &'a Scene<'a>,
    every: Schedule,
    lines: u64,
    told_us: u64,
    busy_us: u64,
    skipped: u64,
    served: Tally,
    touched: Tally,
    counters: Counters,
}

impl<'a> Report<'a> {
    fn new(scene: &'a Scene<'a>, every_s: u64) -> Result<Self, WorkloadError> {
        Ok(Self {
            scene,
            every: Schedule::new(every_s * 1_000_000),
            lines: 0,
            told_us: 0,
            busy_us: 0,
            skipped: 0,
            served: Tally::default(),
            touched: Tally::default(),
            counters: Counters::now(&scene.ready.disk)?,
        })
    }

    fn write(
        &mut self,
        now_us: u64,
        server: &Server,
        task: Option<&Task>,
        skipped: u64,
    ) -> Result<(), WorkloadError> {
        let counters = Counters::now(&self.scene.ready.disk)?;
        let touched = task.map_or(Tally::default(), |task| task.files.tally);
        let of_task = touched.since(&self.touched);
        let of_server = server.files.tally.since(&self.served);
        let line = Line::new("result")
            .with("name", "serve")
            .with("index", self.lines)
            .with("ms", (now_us - self.told_us) / 1000)
            .with("busy_ms", (server.busy_us - self.busy_us) / 1000)
            .with("requests", of_server.ops)
            .with("skipped", skipped - self.skipped)
            .with("reads", of_server.read_pages())
            .with("touches", of_task.ops)
            .with("background_reads", of_task.read_pages())
            .with("mismatches", of_server.mismatches + of_task.mismatches);
        counters.told_since(&self.counters, line).print();
        self.lines += 1;
        (self.told_us, self.busy_us, self.skipped) = (now_us, server.busy_us, skipped);
        (self.served, self.touched) = (server.files.tally, touched);
        self.counters = counters;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(directory: &std::path::Path, order: ServeOrder) -> Server {
        let serve = Serve {
            files: 20,
            file_kib: 16,
            order,
            rate: None,
            drop: false,
            seconds: None,
            report_s: 1,
            background: None,
        };
        let mut server = Server::new(&serve, Place::Directory(directory.into()), 5);
        server.files.populate().unwrap();
        server
    }

    /// How often each of the first `count` is drawn.
    fn drawn(server: &mut Server, count: usize, draws: u32) -> Vec<u32> {
        let mut times = vec![0; count];
        for _ in 0..draws {
            times[index(server.next())] += 1;
        }
        times
    }

    const HOT: Hot = Hot {
        kib: 32,
        percent: 50,
    };

    #[test]
    fn a_request_reads_a_file_or_eight_blocks_and_verifies_them() {
        for (order, bytes) in [
            (ServeOrder::Web { alpha: 1.0 }, 16 << 10),
            (ServeOrder::Search(HOT), 32 << 10),
            (ServeOrder::Scan(HOT), 16 << 10),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let mut server = server(directory.path(), order);
            for _ in 0..50 {
                server.request().unwrap();
            }
            let tally = server.files.tally;
            assert_eq!((tally.ops, tally.mismatches), (50, 0));
            assert_eq!(tally.read_bytes, 50 * bytes, "{order:?}");
        }
    }

    #[test]
    fn a_search_draws_half_from_its_hot_blocks_and_half_from_all() {
        let directory = tempfile::tempdir().unwrap();
        let mut server = server(directory.path(), ServeOrder::Search(HOT));
        let times = drawn(&mut server, 80, 80_000);
        // 8 hot blocks of 80: 40000 draws and 4000 of the others' 40000. Five standard deviations.
        assert!(
            times[..8].iter().all(|n| n.abs_diff(5500) < 370),
            "{times:?}"
        );
        assert!(
            times[8..].iter().all(|n| n.abs_diff(500) < 112),
            "{times:?}"
        );
    }

    #[test]
    fn a_scan_goes_over_all_but_its_hot_files_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let mut server = server(directory.path(), ServeOrder::Scan(HOT));
        let drawn: Vec<_> = (0..1000).map(|_| server.next()).collect();
        let (hot, scanned): (Vec<u64>, Vec<u64>) = drawn.into_iter().partition(|&file| file < 2);
        assert!(hot.len().abs_diff(500) < 80, "{}", hot.len());
        assert!(
            scanned
                .into_iter()
                .eq((2..20).cycle().take(1000 - hot.len()))
        );
    }

    #[test]
    fn the_background_task_reads_each_of_its_files_in_turn() {
        let directory = tempfile::tempdir().unwrap();
        let background = Background {
            files: 3,
            file_kib: 8,
            every_ms: 10,
        };
        let place = Place::Directory(directory.path().into());
        let mut task = Task::new(background, place, 20, 5);
        task.files.populate().unwrap();
        std::fs::remove_file(directory.path().join("22")).unwrap();
        task.touch().unwrap();
        task.touch().unwrap();
        assert!(task.touch().is_err());
        let tally = task.files.tally;
        assert_eq!(
            (tally.ops, tally.read_bytes, tally.mismatches),
            (2, 16 << 10, 0)
        );
    }

    #[test]
    fn requests_keep_their_rate_and_leave_out_what_a_stall_cost() {
        let mut pace = Pace::new(Some(100));
        assert_eq!(pace.wait_us(0), None);
        assert_eq!(pace.wait_us(4_000), Some(6_000));
        assert_eq!(pace.wait_us(10_000), None);
        // Half a second late: caught up with.
        let mut begun = 0;
        while pace.wait_us(500_000).is_none() {
            begun += 1;
        }
        assert_eq!((begun, pace.skipped), (49, 0));
        // Two seconds late: left out.
        assert_eq!(pace.wait_us(2_510_000), None);
        assert_eq!((pace.passed, pace.skipped), (252, 200));
        assert_eq!(pace.wait_us(2_510_000), Some(10_000));
        assert_eq!(Pace::new(None).wait_us(0), None);
    }

    #[test]
    fn what_comes_due_each_period_comes_once_for_each_that_was_seen() {
        let mut every = Schedule::new(100);
        assert!(!every.is_due(99));
        assert_eq!(every.wait_us(99), 1);
        assert!(every.is_due(100));
        assert!(!every.is_due(199));
        assert!(every.is_due(450));
        assert!(!every.is_due(499));
        assert!(every.is_due(500));
    }
}
