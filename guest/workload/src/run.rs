//! Running a workload: threads, phases, passes, and their reports.
//!
//! Each thread has its own slice of the array. The first one leads: it moves from
//! phase to phase, keeps time and prints. The others follow at the end of
//! their pass. Each word shared by threads has one writer.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::access::{Random, Scatter, Zipf};
use crate::array::{Memory, Mismatch, PAGE_BYTES, Page, Pages};
use crate::clock::Time;
use crate::console::Line;
use crate::settings::{End, Pattern, Phase, Settings, Work, Writes};
use crate::sys::mark;

/// Visits between two readings of the clock: about 0.1 ms of work.
const BATCH_OPS: u64 = 256;
/// Shortest time between two round lines, in ms; a pass that ends sooner is reported with the next.
const ROUND_MS_MIN: u64 = 100;
/// Longest time between two round lines, in ms; a longer pass is reported in parts.
const ROUND_MS_MAX: u64 = 250;
/// Mismatches of one thread reported individually; the others are counted.
const MISMATCHES_TOLD: u64 = 16;
/// The mark at which visits begin.
const BEGIN: u8 = 1;
/// The mark at which they have ended.
const END: u8 = 2;
/// Bytes that `/proc/self/pagemap` has for a page.
const PAGEMAP_ENTRY_BYTES: usize = 8;
/// Bits of such an entry that hold the page's frame.
const PAGEMAP_FRAME: u64 = (1 << 55) - 1;

/// Runs the workload to its end, if it has one, on a machine of so many CPUs.
pub fn run(settings: &Settings, cpus: usize) {
    Line::new("ready")
        .with("workload", &settings.name)
        .with("pages", settings.array_bytes() / PAGE_BYTES as u64)
        .with("cpus", cpus)
        .with("kernel_ms", Time::now().ms())
        .print();
    match &settings.work {
        Work::Idle => idle(settings.end),
        Work::Array {
            pattern,
            phases,
            phase_ms,
            pages,
        } => run_array(
            settings,
            *pattern,
            &Plan {
                phases,
                phase_ms: *phase_ms,
            },
            *pages,
        ),
    }
}

fn idle(end: End) {
    let start = Time::now();
    mark::<BEGIN>();
    match end {
        End::After { ms } => thread::sleep(Duration::from_millis(ms)),
        End::Once | End::Never => loop {
            thread::sleep(Duration::from_secs(3600));
        },
    }
    mark::<END>();
    print_done(0, start, 0);
}

fn print_done(ops: u64, start: Time, mismatches: u64) {
    Line::new("done")
        .with("ops", ops)
        .with("ms", Time::now().ms_since(start))
        .with("mismatches", mismatches)
        .print();
}

/// The phases and how long each lasts.
struct Plan<'a> {
    phases: &'a [Phase],
    phase_ms: Option<u64>,
}

impl Plan<'_> {
    /// The phase `nth` of the run; after the last comes the first.
    fn phase(&self, nth: usize) -> &Phase {
        &self.phases[nth % self.phases.len()]
    }
}

/// Commands of the leader to the followers.
#[derive(Default)]
struct Lead {
    /// Phases begun before the present one.
    phase_nth: AtomicUsize,
    stop: AtomicBool,
}

/// Progress of a thread; only that thread writes here.
#[derive(Default)]
struct Tally {
    ops: AtomicU64,
    mismatches: AtomicU64,
}

impl Tally {
    fn set(&self, worker: &Worker) {
        self.ops.store(worker.ops, Relaxed);
        self.mismatches.store(worker.mismatches, Relaxed);
    }
}

/// Sums of all threads.
fn totals(tallies: &[Tally]) -> (u64, u64) {
    tallies.iter().fold((0, 0), |(ops, mismatches), tally| {
        (
            ops + tally.ops.load(Relaxed),
            mismatches + tally.mismatches.load(Relaxed),
        )
    })
}

/// How many of `pages` pages belong to the thread `nth` of `threads`.
fn part(pages: u64, nth: u64, threads: u64) -> u64 {
    pages / threads + u64::from(nth < pages % threads)
}

fn run_array(settings: &Settings, pattern: Pattern, plan: &Plan, pages: u64) {
    let threads = u64::from(settings.threads);
    let mut memory = Memory::new(usize::try_from(pages).expect("a 64-bit machine"));
    let mut rest: &mut [Page] = memory.pages_mut();
    let (mut first, mut workers) = (0, Vec::new());
    for nth in 0..threads {
        let len = part(pages, nth, threads);
        let (own, others) = rest.split_at_mut(usize::try_from(len).expect("a 64-bit machine"));
        rest = others;
        let pages = Pages::new(own, first, settings.words);
        first += len;
        workers.push(Worker::new(pages, pattern, settings.seed, nth, threads));
    }

    let populate_start = Time::now();
    for worker in &mut workers {
        worker.pages.populate();
    }
    let start = Time::now();
    tell_places(&workers[0].pages);
    Line::new("populated")
        .with("ms", start.ms_since(populate_start))
        .print();

    let lead = Lead::default();
    let tallies: Vec<Tally> = workers.iter().map(|_| Tally::default()).collect();
    mark::<BEGIN>();
    thread::scope(|scope| {
        let (leader, followers) = workers.split_first_mut().expect("at least one thread");
        for (worker, tally) in followers.iter_mut().zip(&tallies[1..]) {
            let lead = &lead;
            scope.spawn(move || worker.follow(plan, lead, tally));
        }
        Leader {
            plan,
            end: settings.end,
            lead: &lead,
            tallies: &tallies,
            start,
            lines: 0,
            phase_nth: 0,
            told_at: start,
            told_ops: 0,
            batch_at: start,
            longest_ms: 0,
        }
        .run(leader);
    });
    mark::<END>();

    Line::new("audit").with("pages", pages).print();
    let wrong: u64 = workers.iter_mut().map(|worker| worker.audit()).sum();
    let (ops, mismatches) = totals(&tallies);
    print_done(ops, start, mismatches + wrong);
}

/// Tells which of the machine's page frames hold the first, the middle and the last page.
///
/// Without the privilege, the kernel shows 0, and so does the line.
fn tell_places(pages: &Pages) {
    let frame_of = |index: usize| {
        let mut entry = [0; PAGEMAP_ENTRY_BYTES];
        let at = pages.address(index) / PAGE_BYTES as u64 * PAGEMAP_ENTRY_BYTES as u64;
        let read =
            File::open("/proc/self/pagemap").and_then(|map| map.read_exact_at(&mut entry, at));
        read.map_or(0, |()| u64::from_le_bytes(entry) & PAGEMAP_FRAME)
    };
    let last = pages.len() - 1;
    Line::new("placed")
        .with("first", frame_of(0))
        .with("middle", frame_of(last / 2))
        .with("last", frame_of(last))
        .print();
}

/// What draws the next page of a pass.
enum Draw {
    Scan,
    Uniform,
    Zipf { law: Zipf, scatter: Scatter },
}

/// One thread: its slice of the array and what it does there.
struct Worker<'array> {
    pages: Pages<'array>,
    draw: Draw,
    random: Random,
    nth: u64,
    threads: u64,
    ops: u64,
    mismatches: u64,
}

impl<'array> Worker<'array> {
    fn new(pages: Pages<'array>, pattern: Pattern, seed: u64, nth: u64, threads: u64) -> Self {
        let len = pages.len() as u64;
        let mut random = Random::new(seed.wrapping_add(nth));
        let draw = match pattern {
            Pattern::Scan => Draw::Scan,
            Pattern::Uniform => Draw::Uniform,
            Pattern::Zipf { alpha } => Draw::Zipf {
                law: Zipf::new(len, alpha),
                scatter: Scatter::new(len, random.next()),
            },
        };
        Self {
            pages,
            draw,
            random,
            nth,
            threads,
            ops: 0,
            mismatches: 0,
        }
    }

    /// Passes once over the phase's pages, or draws one batch of them at random.
    ///
    /// `pass` counts the passes of a phase from 0. After each batch `go_on` is
    /// asked; returns false if it said no.
    fn pass(&mut self, phase: &Phase, pass: u64, mut go_on: impl FnMut(&Self) -> bool) -> bool {
        let pages = part(phase.pages, self.nth, self.threads);
        let write_share = match phase.writes {
            Writes::Share(share) => share,
            Writes::EverySecondPass => (pass % 2) as f64,
        };
        let visits = match self.draw {
            Draw::Scan => pages,
            Draw::Uniform | Draw::Zipf { .. } => BATCH_OPS,
        };
        let mut visited = 0;
        while visited < visits {
            let batch_end = visits.min(visited + BATCH_OPS);
            for visit in visited..batch_end {
                let index = match &self.draw {
                    Draw::Scan => visit,
                    Draw::Uniform => self.random.below(pages),
                    Draw::Zipf { law, scatter } => scatter.place(law.draw(&mut self.random)),
                };
                self.visit(index, write_share);
            }
            self.ops += batch_end - visited;
            visited = batch_end;
            if !go_on(self) {
                return false;
            }
        }
        true
    }

    fn visit(&mut self, index: u64, write_share: f64) {
        let index = usize::try_from(index).expect("a 64-bit machine");
        // Nothing is drawn where nothing is to be decided.
        let write = write_share >= 1.0 || write_share > 0.0 && self.random.share() < write_share;
        let verified = if write {
            self.pages.write(index)
        } else {
            self.pages.read(index)
        };
        if let Err(mismatch) = verified {
            report(mismatch, self.mismatches);
            self.mismatches += 1;
        }
    }

    /// Follows the leader's commands until the command to stop.
    fn follow(&mut self, plan: &Plan, lead: &Lead, tally: &Tally) {
        let (mut phase_nth, mut pass) = (0, 0);
        while !lead.stop.load(Relaxed) {
            let led_to = lead.phase_nth.load(Relaxed);
            if led_to != phase_nth {
                (phase_nth, pass) = (led_to, 0);
            }
            self.pass(plan.phase(phase_nth), pass, |worker| {
                tally.set(worker);
                !lead.stop.load(Relaxed)
            });
            pass += 1;
        }
    }

    /// Looks at all pages once more; returns how many are wrong.
    fn audit(&mut self) -> u64 {
        let mut reported = self.mismatches;
        self.pages.audit(|mismatch| {
            report(mismatch, reported);
            reported += 1;
        })
    }
}

fn report(mismatch: Mismatch, before: u64) {
    if before >= MISMATCHES_TOLD {
        return;
    }
    Line::new("MISMATCH")
        .with("page", mismatch.page)
        .with("word", mismatch.word)
        .with("expected", format_args!("{:#x}", mismatch.expected))
        .with("found", format_args!("{:#x}", mismatch.found))
        .print();
}

/// The first thread's other duty: time, phases and lines.
struct Leader<'a> {
    plan: &'a Plan<'a>,
    end: End,
    lead: &'a Lead,
    tallies: &'a [Tally],
    start: Time,
    /// Round lines printed.
    lines: u64,
    /// Phases begun before the present one.
    phase_nth: usize,
    /// When the last line was printed, and what all threads had done by then.
    told_at: Time,
    told_ops: u64,
    /// When the last batch ended.
    batch_at: Time,
    /// The longest batch since the last line: a stall of the machine, if it is more than a few ms.
    longest_ms: u64,
}

impl Leader<'_> {
    fn run(&mut self, worker: &mut Worker) {
        loop {
            if self.end == End::Once && self.phase_nth == self.plan.phases.len() {
                break;
            }
            self.lead.phase_nth.store(self.phase_nth, Relaxed);
            if !self.run_phase(worker) {
                break;
            }
            self.phase_nth += 1;
        }
        self.lead.stop.store(true, Relaxed);
    }

    /// Runs one phase; returns false if the run ended within.
    fn run_phase(&mut self, worker: &mut Worker) -> bool {
        let phase = self.plan.phase(self.phase_nth);
        let phase_start = Time::now();
        Line::new("step")
            .with("index", self.phase_nth)
            .with("pages", phase.pages)
            .with("start_ms", phase_start.ms())
            .print();
        for pass in 0.. {
            let go_on = worker.pass(phase, pass, |worker| self.after_batch(worker, phase));
            let now = Time::now();
            let phase_over = self
                .plan
                .phase_ms
                .is_some_and(|ms| now.ms_since(phase_start) >= ms);
            if !go_on || phase_over || now.ms_since(self.told_at) >= ROUND_MS_MIN {
                self.tell_round(now, phase);
            }
            if !go_on {
                return false;
            }
            if phase_over {
                break;
            }
        }
        true
    }

    fn after_batch(&mut self, worker: &Worker, phase: &Phase) -> bool {
        self.tallies[0].set(worker);
        let now = Time::now();
        self.longest_ms = self.longest_ms.max(now.ms_since(self.batch_at));
        self.batch_at = now;
        if now.ms_since(self.told_at) >= ROUND_MS_MAX {
            self.tell_round(now, phase);
        }
        match self.end {
            End::Once | End::Never => true,
            End::After { ms } => now.ms_since(self.start) < ms,
        }
    }

    fn tell_round(&mut self, now: Time, phase: &Phase) {
        let (ops, mismatches) = totals(self.tallies);
        Line::new("round")
            .with("index", self.lines)
            .with("pages", phase.pages)
            .with("ops", ops - self.told_ops)
            .with("ms", now.ms_since(self.told_at))
            .with("total_ops", ops)
            .with("mismatches", mismatches)
            .with("longest_ms", self.longest_ms)
            .print();
        self.lines += 1;
        (self.told_at, self.told_ops) = (now, ops);
        // Printing is no stall.
        (self.batch_at, self.longest_ms) = (Time::now(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Visits of one pass, as counts per page, with the writes among them.
    fn passes(pattern: Pattern, writes: Writes, passes: u64) -> (Vec<u64>, u64) {
        const PAGES: u64 = 600;
        let mut memory = Memory::new(600);
        let mut pages = Pages::new(memory.pages_mut(), 0, 8);
        pages.populate();
        let mut worker = Worker::new(pages, pattern, 1, 0, 1);
        let phase = Phase {
            pages: PAGES,
            writes,
        };
        for pass in 0..passes {
            assert!(worker.pass(&phase, pass, |_| true));
        }
        let (ops, mismatches, wrong) = (worker.ops, worker.mismatches, worker.audit());
        assert_eq!((mismatches, wrong), (0, 0));
        let versions = memory.pages_mut().iter().map(|page| page[64]).collect();
        (versions, ops)
    }

    #[test]
    fn a_scan_visits_every_page_once_a_pass() {
        let (versions, ops) = passes(Pattern::Scan, Writes::Share(1.0), 3);
        assert_eq!((versions, ops), (vec![3; 600], 1800));
    }

    #[test]
    fn rwrw_writes_in_every_second_pass() {
        let (versions, ops) = passes(Pattern::Scan, Writes::EverySecondPass, 5);
        assert_eq!((versions, ops), (vec![2; 600], 3000));
    }

    #[test]
    fn a_quarter_of_the_visits_writes_if_asked_to() {
        let (versions, ops) = passes(Pattern::Uniform, Writes::Share(0.25), 100);
        let share = versions.iter().sum::<u64>() as f64 / ops as f64;
        assert!((share - 0.25).abs() < 0.02, "{share}");
    }

    #[test]
    fn a_zipf_workload_spreads_its_popular_pages() {
        let (versions, ops) = passes(Pattern::Zipf { alpha: 1.0 }, Writes::Share(1.0), 400);
        let mut by_count: Vec<_> = (0..600).collect();
        by_count.sort_by_key(|&page: &usize| std::cmp::Reverse(versions[page]));
        // 1 / H(600) = 0.143 of all visits go to the first rank.
        let first = versions[by_count[0]] as f64 / ops as f64;
        assert!((first - 0.143).abs() < 0.01, "{first}");
        assert!(by_count[..10].iter().any(|&page| page > 300));
        assert!(by_count[..10].iter().any(|&page| page < 300));
    }

    #[test]
    fn a_pass_ends_when_told() {
        let mut memory = Memory::new(1000);
        let mut pages = Pages::new(memory.pages_mut(), 0, 8);
        pages.populate();
        let mut worker = Worker::new(pages, Pattern::Scan, 1, 0, 1);
        let phase = Phase {
            pages: 1000,
            writes: Writes::Share(0.0),
        };
        assert!(!worker.pass(&phase, 0, |worker| worker.ops < 512));
        assert_eq!(worker.ops, 512);
    }

    proptest! {
        #[test]
        fn parts_of_all_threads_make_the_whole(pages in 1u64..10_000, threads in 1u64..64) {
            let sum: u64 = (0..threads).map(|nth| part(pages, nth, threads)).sum();
            prop_assert_eq!(sum, pages);
        }

        #[test]
        fn a_threads_part_of_a_phase_lies_in_its_slice(
            pages in 1u64..10_000, phase in 1u64..10_000, threads in 1u64..64, nth in 0u64..64,
        ) {
            let phase = phase.min(pages);
            prop_assert!(part(phase, nth, threads) <= part(pages, nth, threads));
        }
    }
}
