//! `twitter` agrees with a parser written with `str::split`, whatever pieces the text arrives in.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::AccessKind;
use plimsoll_fuzz::{REFERENCES_MAX, is_skippable_frame, outcome, text_of};
use plimsoll_source::{Format, Options};
use xxhash_rust::xxh3::xxh3_64;

const BLANKS: [char; 4] = [' ', '\t', '\r', '\x0c'];
const WRITES: [&str; 8] = [
    "set", "add", "replace", "cas", "append", "prepend", "incr", "decr",
];

fn number(field: &str) -> Option<u64> {
    let is_number = !field.is_empty() && field.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| field.parse().ok()).flatten()
}

/// Returns the key and the kind, if any, of a line.
fn naive_request(line: &str) -> Option<(&str, Option<AccessKind>)> {
    let (time, rest) = line.split_once(',')?;
    let fields: Vec<_> = rest.rsplitn(6, ',').collect();
    let [ttl, operation, client, value, key_size, key] = fields[..] else {
        return None;
    };
    let of = |field: &str| number(field.trim_matches(BLANKS));
    of(time)?.checked_mul(1_000_000)?;
    of(ttl)?;
    of(client)?;
    u32::try_from(of(key_size)?.checked_add(of(value)?)?).ok()?;
    // A client's name is cut to no length that a number below 2^64 with leading zeros may not exceed.
    (client.trim_matches(BLANKS).len() <= 128).then_some(())?;
    let kind = match operation.trim_matches(BLANKS) {
        "get" | "gets" => Some(AccessKind::Read),
        "delete" => None,
        operation if WRITES.contains(&operation) => Some(AccessKind::Write),
        _ => return None,
    };
    Some((key, kind))
}

/// Returns the references before the first line that is none, and that line's number.
fn naive(text: &str) -> (Vec<(u64, AccessKind)>, Option<u64>) {
    let mut references = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if line.trim_matches(BLANKS).is_empty() {
            continue;
        }
        match naive_request(line) {
            Some((key, Some(kind))) => references.push((xxh3_64(key.as_bytes()), kind)),
            Some((_, None)) => {}
            None => return (references, Some(index as u64 + 1)),
        }
    }
    (references, None)
}

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        format: Some(Format::TWITTER),
        times: true,
        sizes: true,
        ..Options::default()
    };
    let (outcome, line) = outcome(bytes, &options);
    let Some(text) = text_of(bytes) else {
        return;
    };
    if is_skippable_frame(bytes) || outcome.references.len() > REFERENCES_MAX {
        return;
    }
    assert_eq!((outcome.references, line), naive(text));
});
