//! `lackey` agrees with a parser written with `str::split`, for several page sizes,
//! whatever pieces the text arrives in.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::{AccessKind, PageSize};
use plimsoll_fuzz::{REFERENCES_MAX, is_skippable_frame, outcome, text_of};
use plimsoll_source::{Format, Options};

fn naive_access(line: &str, fetches: bool) -> Option<(Option<AccessKind>, u128, u128)> {
    let kind = match line.get(..3)? {
        "I  " => fetches.then_some(AccessKind::Read),
        " L " => Some(AccessKind::Read),
        " S " | " M " => Some(AccessKind::Write),
        _ => return None,
    };
    let (address, length) = line[3..]
        .trim_matches([' ', '\t', '\r', '\x0c'])
        .split_once(',')?;
    if address.starts_with('+') || length.starts_with('+') {
        return None;
    }
    let first = u128::from(u64::from_str_radix(address, 16).ok()?);
    let length = u128::from(length.parse::<u64>().ok()?);
    let is_access = (1..=1 << 20).contains(&length) && first + length <= 1 << 64;
    is_access.then(|| (kind, first, first + length - 1))
}

/// Returns the references before the first line that is none, and that line's number.
fn naive(text: &str, page_bytes: u64, fetches: bool) -> (Vec<(u64, AccessKind)>, Option<u64>) {
    let mut references = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        let of_valgrind = ["==", "--", "**"].iter().any(|mark| line.starts_with(mark));
        if of_valgrind || line.trim_matches([' ', '\t', '\r', '\x0c']).is_empty() {
            continue;
        }
        let Some((kind, first, last)) = naive_access(line, fetches) else {
            return (references, Some(index as u64 + 1));
        };
        let Some(kind) = kind else { continue };
        let pages = first / u128::from(page_bytes)..=last / u128::from(page_bytes);
        references.extend(pages.map(|page| (u64::try_from(page).unwrap(), kind)));
    }
    (references, None)
}

fuzz_target!(|bytes: &[u8]| {
    for (page_bytes, instructions) in [(4096, false), (16, true)] {
        let options = Options {
            format: Some(Format::LACKEY),
            page_size: PageSize::new(page_bytes).unwrap(),
            instructions,
            ..Options::default()
        };
        let (outcome, line) = outcome(bytes, &options);
        let Some(text) = text_of(bytes) else {
            return;
        };
        if is_skippable_frame(bytes) || outcome.references.len() > REFERENCES_MAX {
            return;
        }
        assert_eq!(
            (outcome.references, line),
            naive(text, page_bytes, instructions)
        );
    }
});
