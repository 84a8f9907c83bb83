//! `ids` agrees with a parser written with `str::split`, whatever pieces the text arrives in.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::AccessKind;
use plimsoll_fuzz::{is_skippable_frame, naive_number, outcome, text_of};
use plimsoll_source::{Format, Options};

/// Returns the pages before the first line that is none, and that line's number.
fn naive(text: &str) -> (Vec<u64>, Option<u64>) {
    let mut pages = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        let content = line.split('#').next().unwrap_or_default();
        let content = content.trim_matches([' ', '\t', '\r', '\x0c']);
        if content.is_empty() || content == "*" {
            continue;
        }
        match naive_number(content) {
            Some(page) => pages.push(page),
            None => return (pages, Some(index as u64 + 1)),
        }
    }
    (pages, None)
}

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        format: Some(Format::IDS),
        ..Options::default()
    };
    let (outcome, line) = outcome(bytes, &options);
    let Some(text) = text_of(bytes) else {
        return;
    };
    if is_skippable_frame(bytes) {
        return;
    }
    let (pages, fault) = naive(text);
    let expected: Vec<_> = pages
        .into_iter()
        .map(|page| (page, AccessKind::Unknown))
        .collect();
    assert_eq!(outcome.references, expected);
    assert_eq!(line, fault);
});
