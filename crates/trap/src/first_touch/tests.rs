//! Samples of computed VMs, whose truth is known, and of memory of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use plimsoll_flow::FirstTouch;
use plimsoll_skip::{Lack, skip};

use super::*;
use crate::barrier::RemotePageout;
use crate::placement::stay_on_this_cpu;
use crate::sys::{SharedMemory, process_cpu_time, usize_of};
use crate::trial::Toucher;
use crate::trial::TrapCost;
use crate::uffd::Userfault;

/// Three quarters of the RAM have contents; of those a third each is hot, cool and never touched.
fn vm(ram_pages: u64) -> ComputedVm {
    let class = |touches_per_second| PageClass {
        share: 0.25,
        touches_per_second,
    };
    ComputedVm {
        ram_pages,
        classes: vec![class(10.0), class(0.1), class(0.0)],
        arm_cost: Duration::from_micros(20),
        trap_cost: Duration::from_micros(60),
    }
}

fn config(period: Duration) -> TraceConfig {
    TraceConfig {
        period,
        ..TraceConfig::default()
    }
}

/// Observes a VM for some periods: all samples that ended, those that wait, and the periods.
fn observed(
    backend: &mut dyn Backend,
    periods: u64,
) -> (Vec<FirstTouch>, Vec<FirstTouch>, Vec<Period>) {
    let (mut ended, mut waiting, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..periods {
        let mut sink = |seen: &Observation<'_>| {
            let Observation::FirstTouches { samples, touched } = seen else {
                panic!("{seen:?}");
            };
            ended.extend_from_slice(samples.ended);
            waiting = samples.waiting.to_vec();
            assert!(samples.ended.iter().all(|sample| {
                let by = sample.touched_by.unwrap_or(sample.untouched_until);
                sample.armed <= sample.untouched_until
                    && sample.untouched_until <= by
                    && by <= samples.now.vm
            }));
            assert!(touched.len() <= samples.ended.len());
        };
        all.push(
            backend
                .run_period(&AtomicBool::new(false), &mut sink)
                .unwrap(),
        );
    }
    (ended, waiting, all)
}

/// Share of the samples that were touched within `span`, of those that began early enough to be observed for it.
fn touched_within(ended: &[FirstTouch], waiting: &[FirstTouch], span: Duration) -> f64 {
    let (mut touched, mut all) = (0.0, 0.0);
    for sample in ended.iter().chain(waiting) {
        let is_touched = sample
            .touched_by
            .is_some_and(|by| by - sample.armed <= span);
        if is_touched || sample.untouched_until >= sample.armed + span {
            all += 1.0;
            touched += f64::from(u8::from(is_touched));
        }
    }
    touched / all
}

#[test]
fn samples_have_the_touch_times_of_the_vm_whatever_its_size() {
    // From 64 MiB, in which pages are drawn again while they wait, to 1 TiB.
    for ram_pages in [1 << 14, 1 << 24, 1 << 28] {
        let vm = vm(ram_pages);
        let mut sampler = vm.attach(&config(Duration::from_secs(5))).unwrap();
        let (ended, waiting, periods) = observed(&mut sampler, 24);
        let populated = periods[23].populated_pages;
        assert_eq!(populated, ram_pages / 4 * 3);
        for span_ms in [50, 200, 5000, 20_000] {
            let span = Duration::from_millis(span_ms);
            // The samples of the last seconds are not followed for as long.
            let early = Duration::from_secs(120) - span;
            let begun = |samples: &[FirstTouch]| {
                let early = samples.iter().filter(|sample| sample.armed < early);
                early.copied().collect::<Vec<_>>()
            };
            let share = touched_within(&begun(&ended), &begun(&waiting), span);
            let truth = vm.footprint_pages(span) / populated as f64;
            assert!(
                (share - truth).abs() < 0.015,
                "{ram_pages} pages: {share} within {span:?} instead of {truth}"
            );
        }
        let bytes = sampler.waiting_bytes();
        assert!(bytes < 4 << 20, "{bytes} bytes");
    }
}

#[test]
fn every_second_is_within_the_budget_from_the_first() {
    let mut sampler = vm(1 << 24).attach(&config(Duration::from_secs(1))).unwrap();
    let (_, _, periods) = observed(&mut sampler, 60);
    for period in &periods {
        assert!(period.overhead_ratio < 0.013, "{period:?}");
        assert!(!period.budget_exhausted);
    }
    let mean = periods
        .iter()
        .map(|period| period.overhead_ratio)
        .sum::<f64>()
        / 60.0;
    assert!((0.009..0.0102).contains(&mean), "{mean}");
    let drawn: u64 = periods.iter().map(|period| period.samples.drawn).sum();
    let empty: u64 = periods.iter().map(|period| period.samples.empty).sum();
    let share = empty as f64 / drawn as f64;
    assert!((share - 0.25).abs() < 0.03, "{share}");
}

#[test]
fn cold_pages_that_are_touched_all_at_once_are_withdrawn() {
    for seed in 0..16 {
        let config = TraceConfig {
            seed,
            ..config(Duration::from_secs(1))
        };
        let mut sampler = vm(1 << 24).attach(&config).unwrap();
        let (_, waiting, _) = observed(&mut sampler, 30);
        assert!(waiting.len() > 1000);
        sampler.touch_all_within(Duration::from_secs(1));
        let (ended, _, periods) = observed(&mut sampler, 5);
        assert!(periods[0].budget_exhausted);
        assert!(periods[0].samples.withdrawn > 0);
        assert!(ended.iter().any(|sample| sample.touched_by.is_none()));
        // A second of the budget, of which the burst takes a half before it is noticed.
        for period in &periods {
            assert!(period.overhead_ratio < 0.02, "seed {seed}: {period:?}");
        }
    }
}

#[test]
fn a_sample_that_is_never_touched_is_withdrawn_at_last() {
    let mut sampler = vm(1 << 24)
        .attach(&config(Duration::from_secs(60)))
        .unwrap();
    let (_, _, periods) = observed(&mut sampler, 15);
    let withdrawn: u64 = periods[..9].iter().map(|p| p.samples.withdrawn).sum();
    assert_eq!(withdrawn, 0);
    assert!(periods[14].samples.withdrawn > 0);
    // No more wait than began within the maximum age.
    let began: u64 = periods[4..].iter().map(|p| p.samples.begun).sum();
    assert!(periods[14].samples.waiting < began);
}

/// CPU time of this process: that of a VM in it.
fn vm_time() -> Duration {
    process_cpu_time(std::process::id()).unwrap()
}

/// Memory of this process with a backend on it; `None` where it cannot trap its own memory.
fn on_own_memory(
    pages: usize,
    config: &TraceConfig,
) -> Option<(Arc<SharedMemory>, FirstTouchSampler)> {
    let memory = Arc::new(SharedMemory::new(pages).unwrap());
    let target = memory.as_target();
    let session = match Session::open(&target, config) {
        Ok(session) => session,
        Err(error) => {
            skip(
                Lack::Userfaultfd,
                format_args!("no pages can be unmapped on this host: {error}"),
            );
            return None;
        }
    };
    // A process cannot inject a call into itself.
    let userfault = match Userfault::open(UserfaultPurpose::Minor, [memory.range()]) {
        Ok(userfault) => userfault,
        Err(error) => {
            skip(
                Lack::Userfaultfd,
                format_args!("this process may not trap its own memory: {error}"),
            );
            return None;
        }
    };
    let cost = TrapCost {
        whole: Duration::from_micros(30),
        outside_handler: Duration::from_micros(20),
        outside_handler_min: Duration::from_micros(20),
        running: Duration::ZERO,
    };
    let account = TrapAccount::begin(target.pid, &[], || Ok(cost)).unwrap();
    let cost = TouchCost {
        time: account.trap_cost(),
        toucher: Toucher::Thread,
    };
    let open = move || -> TrappedVm<RemotePageout> {
        stay_on_this_cpu().unwrap();
        TrappedVm::new(session, userfault, account)
    };
    let sampler = FirstTouchSampler::start(&target, config, cost, open).unwrap();
    Some((memory, sampler))
}

#[test]
fn pages_that_are_touched_end_their_samples_and_others_wait() {
    const PAGES: usize = 4096;
    let config = TraceConfig {
        budget: Some(0.2),
        ..config(Duration::from_millis(250))
    };
    let Some((memory, mut sampler)) = on_own_memory(PAGES, &config) else {
        return;
    };
    let stop = Arc::new(AtomicBool::new(false));
    let toucher = {
        let (memory, stop) = (Arc::clone(&memory), Arc::clone(&stop));
        // The first quarter, again and again.
        thread::spawn(move || {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                (0..PAGES / 4).for_each(|page| {
                    memory.word(page).fetch_add(1, Ordering::Relaxed);
                });
                rounds += 1;
                thread::sleep(Duration::from_millis(10));
            }
            rounds
        })
    };
    let (mut touched, mut last) = (Vec::new(), None);
    for _ in 0..8 {
        let period = sampler.run_period(&AtomicBool::new(false), &mut |seen| {
            touched.extend(seen.pages().iter().map(|page| usize_of(page.0)));
        });
        let period = period.unwrap();
        assert!(period.length >= config.period, "{period:?}");
        last = Some(period);
    }
    let last = last.unwrap();
    assert_eq!(last.populated_pages, PAGES as u64);
    assert!(touched.len() > 50, "{last:?}");
    assert!(touched.iter().all(|&page| page < PAGES / 4));
    // Three of four samples are never touched.
    assert!(last.samples.waiting > touched.len() as u64, "{last:?}");
    // Those whose touch may have been a neighbour's, between two periods.
    let vanished = usize_of(last.samples.vanished);
    assert!(vanished * 5 < touched.len(), "{last:?}");
    // Nobody runs a period, and accesses go on all the same.
    let begin = Instant::now();
    for page in 0..PAGES {
        memory.word(page).fetch_add(0, Ordering::Relaxed);
    }
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    stop.store(true, Ordering::Relaxed);
    let rounds = toucher.join().unwrap();
    Box::new(sampler).detach().unwrap();
    for page in 0..PAGES {
        let expected = if page < PAGES / 4 { rounds } else { 0 };
        assert_eq!(memory.word(page).load(Ordering::Relaxed), expected);
    }
}

#[test]
fn between_periods_the_memory_is_free_and_touches_are_found_afterwards() {
    const PAGES: usize = 1 << 16;
    let config = TraceConfig {
        budget: Some(0.2),
        // Few enough that the checks are affordable.
        rate_rule: RateRule::Fixed,
        scale: 128,
        ..config(Duration::from_millis(500))
    };
    let Some((memory, mut sampler)) = on_own_memory(PAGES, &config) else {
        return;
    };
    let (_, waiting, _) = observed(&mut sampler, 1);
    assert!(!waiting.is_empty());
    // As QEMU does to find out whether it can take background snapshots.
    drop(Userfault::open(UserfaultPurpose::Minor, [memory.range()]).unwrap());
    let from = vm_time();
    for page in 0..PAGES {
        memory.word(page).fetch_add(1, Ordering::Relaxed);
    }
    let by = vm_time();
    let (ended, still, periods) = observed(&mut sampler, 1);
    let samples = periods[0].samples;
    assert_eq!(periods[0].traps.taken, 0);
    // Of those that one fault may have mapped, one counts.
    assert!(samples.vanished <= samples.touched, "{samples:?}");
    assert_eq!(samples.touched + samples.vanished, waiting.len() as u64);
    for sample in ended.iter().filter(|sample| sample.touched_by.is_some()) {
        let touched_by = sample.touched_by.unwrap();
        assert!(
            sample.untouched_until <= from && touched_by >= by,
            "{sample:?}"
        );
    }
    // Their successors trap again.
    assert!(!still.is_empty());
    for page in 0..PAGES {
        assert_eq!(memory.word(page).fetch_add(1, Ordering::Relaxed), 1);
    }
    Box::new(sampler).detach().unwrap();
}

#[test]
fn a_page_that_loses_its_contents_is_no_longer_waited_for() {
    let config = TraceConfig {
        budget: Some(0.5),
        ..config(Duration::from_millis(300))
    };
    let Some((memory, mut sampler)) = on_own_memory(256, &config) else {
        return;
    };
    let (_, waiting, _) = observed(&mut sampler, 1);
    assert!(!waiting.is_empty());
    rustix::fs::fallocate(
        memory.file(),
        rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
        0,
        256 * 4096,
    )
    .unwrap();
    let (_, _, periods) = observed(&mut sampler, 1);
    assert_eq!(periods[0].populated_pages, 0);
    // From then on every draw is one without contents.
    let (_, _, periods) = observed(&mut sampler, 1);
    let samples = periods[0].samples;
    assert!(samples.drawn > 0, "{samples:?}");
    assert_eq!(samples.empty + samples.begun, samples.drawn, "{samples:?}");
    Box::new(sampler).detach().unwrap();
}
