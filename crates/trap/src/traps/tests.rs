use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::arm::{CHUNK_PAGES, chunks, join_neighbours};
use super::*;
use crate::process::TracedProcess;
use crate::ram::{PopulatedPages, Presence, RamLayout};
use crate::refusal::Refusal;
use crate::sample::mix;
use crate::sys::usize_of;
use crate::sys::{AddressRange, SharedMemory};
use crate::trial::TrapCost;

/// The barrier of a tracer inside its target: `MADV_DONTNEED` on our own memory.
#[derive(Debug)]
struct LocalDontneed {
    memory: Arc<SharedMemory>,
    presence: Presence,
    raised: Arc<AtomicBool>,
}

impl PageBarrier for LocalDontneed {
    fn raise(&mut self, ranges: &[AddressRange]) -> io::Result<()> {
        ranges
            .iter()
            .try_for_each(|&range| self.memory.dontneed(range))?;
        self.raised.store(true, Ordering::Release);
        Ok(())
    }

    fn for_each_down(&mut self, range: AddressRange, visit: &mut dyn FnMut(u64)) -> io::Result<()> {
        self.presence.for_each_present(range, |page, _| visit(page))
    }

    fn lower(&mut self, userfault: &Userfault, range: AddressRange) -> io::Result<()> {
        userfault.resolve(range)
    }
}

const PAGES: usize = 300;

/// Lets a thread write `pages` in order under a tracer on the very same memory; returns
/// the tracer's observations and how often each page's counter was incremented.
fn traced(
    config: &TraceConfig,
    pages: &[usize],
) -> Result<(Vec<u64>, Period, Vec<u64>), TrapError> {
    let pid = std::process::id();
    let missing = |source| {
        TrapError::Refused(Refusal::NoPrivilege {
            what: "trap".to_owned(),
            source,
        })
    };
    let memory = Arc::new(SharedMemory::new(PAGES).map_err(missing)?);
    let layout = RamLayout::new([memory.range()]);
    let file = File::from(memory.file().try_clone_to_owned().map_err(missing)?);
    let raised = Arc::new(AtomicBool::new(false));
    let target = TraceTarget {
        is_vm: true,
        pid,
        ram: vec![],
        locked: false,
        userfault: false,
        vcpu_threads: vec![],
    };
    let userfault = Userfault::open(UserfaultPurpose::Minor, layout.ranges()).map_err(missing)?;
    let barrier = LocalDontneed {
        memory: Arc::clone(&memory),
        presence: Presence::open(pid).map_err(missing)?,
        raised: Arc::clone(&raised),
    };
    let populated = PopulatedPages::of_file(&layout, file);
    let process = TracedProcess::open(&target)?;
    let session = Session::assemble(process, layout, populated, barrier, &target, config);
    let cost = TrapCost {
        whole: Duration::ZERO,
        outside_handler: Duration::ZERO,
        outside_handler_min: Duration::ZERO,
        running: Duration::ZERO,
    };
    let account = TrapAccount::begin(pid, &[], || Ok(cost))?;
    let tracer = Tracer::assemble(session, userfault, account, Toucher::Thread, config);
    let mut tracer = Box::new(tracer);
    let mut seen = Vec::new();
    let stop = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !raised.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            for &page in pages {
                memory.word(page).fetch_add(1, Ordering::Relaxed);
            }
            stop.store(true, Ordering::Relaxed);
        });
        let sink = &mut |seen_now: &Observation<'_>| {
            seen.extend(seen_now.pages().iter().map(|page| page.0));
        };
        tracer.run_period(&stop, sink)
    })?;
    tracer.detach()?;
    let counters = (0..PAGES).map(|page| memory.word(page).load(Ordering::Relaxed));
    Ok((seen, report, counters.collect()))
}

/// The references that miss a queue of hot pages, found without the tracer's code.
fn misses_of_naive_queue(pages: impl Iterator<Item = u64>, capacity: usize) -> Vec<u64> {
    let mut queue = VecDeque::new();
    let mut misses = Vec::new();
    for page in pages {
        if !queue.contains(&page) {
            misses.push(page);
            queue.push_back(page);
            if queue.len() > capacity {
                queue.pop_front();
            }
        }
    }
    misses
}

fn config(scale: u32, hot_set_pages: u32) -> TraceConfig {
    TraceConfig {
        period: Duration::from_secs(60),
        budget: None,
        scale,
        rate_rule: RateRule::Fixed,
        hot_set_pages,
        group_pages: 2,
        ..TraceConfig::default()
    }
}

/// Page numbers that repeat at many distances.
fn wandering(count: u64) -> Vec<usize> {
    (0..count)
        .map(|step| usize_of(mix(step) % (1 + step % PAGES as u64)))
        .collect()
}

#[test]
fn the_references_are_those_that_miss_a_naive_queue_of_the_sampled_pages() {
    for (scale, hot_set_pages) in [(1, 1), (1, 16), (4, 8), (7, 400)] {
        let pages = wandering(3000);
        let (seen, report, counters) = match traced(&config(scale, hot_set_pages), &pages) {
            Ok(traced) => traced,
            Err(TrapError::Refused(Refusal::NoPrivilege { source, .. })) => {
                plimsoll_skip::skip(
                    plimsoll_skip::Lack::Userfaultfd,
                    format_args!("this process may not trap its own memory: {source}"),
                );
                return;
            }
            Err(error) => panic!("{error:?}"),
        };
        let sample = Sample::new(scale, 2, mix(mix(1)));
        let sampled = pages
            .iter()
            .map(|&page| page as u64)
            .filter(|&page| sample.contains(page));
        assert_eq!(seen, misses_of_naive_queue(sampled, hot_set_pages as usize));
        assert_eq!(report.traps.taken, seen.len() as u64);
        assert_eq!(report.traps.writes, report.traps.taken);
        assert_eq!(report.losses, PeriodLosses::default());
        // No write of the traced thread was lost.
        let mut expected = vec![0; PAGES];
        pages.iter().for_each(|&page| expected[page] += 1);
        assert_eq!(counters, expected);
    }
}

#[test]
fn runs_are_cut_into_chunks_without_loss() {
    let runs = vec![0..5, 7..2000, 3000..3001];
    let chunks = chunks(&runs);
    let pages = |runs: &[PageRange]| runs.iter().cloned().flatten().collect::<Vec<_>>();
    assert_eq!(
        chunks
            .iter()
            .flat_map(|chunk| pages(chunk))
            .collect::<Vec<_>>(),
        pages(&runs)
    );
    assert!(
        chunks
            .iter()
            .all(|chunk| pages(chunk).len() as u64 <= CHUNK_PAGES)
    );
    assert_eq!(join_neighbours(&[0..1, 1..2, 3..4]), [0..2, 3..4]);
}
