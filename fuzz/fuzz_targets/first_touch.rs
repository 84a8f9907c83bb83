//! Whatever samples arrive, the estimator of first touches gives a curve or none, and its size is bounded by the RAM.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use plimsoll_estimator::live::{FIRST_TOUCH, LiveInput, LiveOptions, LiveWindow};
use plimsoll_flow::{FirstTouch, FirstTouches, PageCount, Timestamp};

/// RAM of the VM in pages.
const RAM: u64 = 1 << 20;
/// Most samples of a period: an input that repeats itself finds nothing more.
const SAMPLES_MAX: usize = 64;

/// Reads a time: nanoseconds, milliseconds, seconds, or the longest there is.
fn time(rest: &mut &[u8]) -> Option<Duration> {
    let (&unit, tail) = rest.split_first()?;
    let (number, tail) = tail.split_first_chunk()?;
    *rest = tail;
    let number = u64::from(u16::from_le_bytes(*number));
    Some(match unit % 4 {
        0 => Duration::from_nanos(number),
        1 => Duration::from_millis(number),
        2 => Duration::from_secs(number << (unit / 4)),
        _ => Duration::MAX,
    })
}

fn timestamp(rest: &mut &[u8]) -> Option<Timestamp> {
    Some(Timestamp {
        vm: time(rest)?,
        wall: time(rest)?,
    })
}

fn sample(rest: &mut &[u8]) -> Option<FirstTouch> {
    let (&flags, tail) = rest.split_first()?;
    *rest = tail;
    Some(FirstTouch {
        armed: time(rest)?,
        untouched_until: time(rest)?,
        touched_by: if flags & 1 == 0 {
            Some(time(rest)?)
        } else {
            None
        },
        pages: u32::from(flags >> 1),
    })
}

fn samples(rest: &mut &[u8]) -> Option<Vec<FirstTouch>> {
    let (&count, tail) = rest.split_first()?;
    *rest = tail;
    (0..usize::from(count) % SAMPLES_MAX)
        .map(|_| sample(rest))
        .collect()
}

fuzz_target!(|input: &[u8]| {
    let mut estimator = (FIRST_TOUCH.make)(&LiveOptions {
        ram: PageCount(RAM),
        reach: None,
    });
    let mut rest = input;
    while let Some(ended) = samples(&mut rest) {
        let (Some(waiting), Some(from), Some(now)) = (
            samples(&mut rest),
            timestamp(&mut rest),
            timestamp(&mut rest),
        ) else {
            break;
        };
        estimator.observe(&LiveInput::FirstTouches(FirstTouches {
            ended: &ended,
            waiting: &waiting,
            from,
            now,
            population_pages: RAM * 2 - ended.len() as u64,
        }));
        if let Some(curve) = estimator.curve() {
            assert!(curve.points().iter().all(|point| point.size.0 <= RAM));
        }
        if waiting.len() % 2 == 0 {
            estimator.discard_window();
        }
        let _ = estimator.close_window(&LiveWindow::default());
    }
});
