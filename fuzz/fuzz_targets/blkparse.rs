//! `blkparse` agrees with a parser written with `str::split_ascii_whitespace`, for every
//! event, whatever pieces the text arrives in.
#![no_main]

use std::collections::HashMap;

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::AccessKind;
use plimsoll_fuzz::{REFERENCES_MAX, is_skippable_frame, naive_request_pages, outcome, text_of};
use plimsoll_source::{BlockEvent, Format, Options};

/// The words of an event: device, action and what follows.
fn naive_event(line: &str) -> Option<(String, String, Vec<&str>)> {
    let words: Vec<_> = line.split_ascii_whitespace().collect();
    let [device, cpu, sequence, time, process, action, rest @ ..] = &words[..] else {
        return None;
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (major, minor) = device.split_once(',')?;
    let time = time.split('.').collect::<String>();
    let numbers = [major, minor, cpu, sequence, process];
    let is_event = numbers.into_iter().all(digits) && (time.is_empty() || digits(&time));
    is_event.then(|| (device.to_string(), action.to_string(), rest.to_vec()))
}

/// Kind, first sector and sectors of an event; no kind or no sectors make no reference.
fn naive_request(rest: &[&str]) -> Option<(Option<AccessKind>, u128, u128)> {
    let letters = rest.first().copied().unwrap_or_default();
    let kind = match letters.strip_prefix('F').unwrap_or(letters).chars().next() {
        Some('R') => AccessKind::Read,
        Some('W') => AccessKind::Write,
        _ => return Some((None, 0, 0)),
    };
    let sectors = |word: Option<&&str>| {
        let word = word.filter(|word| word.bytes().all(|byte| byte.is_ascii_digit()))?;
        let number = word.parse::<u64>().ok()?;
        number.checked_mul(512)?;
        Some(u128::from(number))
    };
    let starts = |word: Option<&&str>| word.is_some_and(|word| word.starts_with('['));
    if starts(rest.get(1)) {
        return Some((Some(kind), 0, 0));
    }
    let first = sectors(rest.get(1))?;
    match rest.get(2) {
        Some(&"+") => Some((Some(kind), first, sectors(rest.get(3))?)),
        other => starts(other).then_some((Some(kind), first, 0)),
    }
}

/// Returns the references before the first line that is wrong, and that line's number.
fn naive(text: &str, event: &str) -> (Vec<(u64, AccessKind)>, Option<u64>) {
    let mut references = Vec::new();
    let mut devices = HashMap::new();
    let mut in_summary = false;
    for (index, line) in text.split('\n').enumerate() {
        let fault = Some(index as u64 + 1);
        let Some((device, action, rest)) = naive_event(line) else {
            let blank = line.split_ascii_whitespace().next().is_none();
            in_summary |= line.starts_with("CPU") || line.starts_with("Total");
            let input = line.trim_ascii().starts_with("Input file ");
            if blank || in_summary || input {
                continue;
            }
            return (references, fault);
        };
        if action != event {
            continue;
        }
        let Some((kind, first, sectors)) = naive_request(&rest) else {
            return (references, fault);
        };
        if device.len() > 128 {
            return (references, fault);
        }
        let number = devices.len() as u128;
        let device = *devices.entry(device).or_insert(number);
        let Some(kind) = kind.filter(|_| sectors > 0) else {
            continue;
        };
        let (offset, length) = (first * 512, sectors * 512);
        if naive_request_pages(&mut references, device, kind, offset, length).is_none() {
            return (references, fault);
        }
        if references.len() > 2 * REFERENCES_MAX {
            return (references, None);
        }
    }
    (references, None)
}

fuzz_target!(|bytes: &[u8]| {
    for block_event in BlockEvent::ALL {
        let options = Options {
            format: Some(Format::BLKPARSE),
            block_event: Some(block_event),
            ..Options::default()
        };
        let (outcome, line) = outcome(bytes, &options);
        let Some(text) = text_of(bytes) else {
            return;
        };
        if is_skippable_frame(bytes) || outcome.references.len() > REFERENCES_MAX {
            return;
        }
        let expected = naive(text, block_event.name());
        assert_eq!((outcome.references, line), expected);
    }
});
