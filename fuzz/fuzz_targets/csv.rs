//! `csv` agrees, where nothing is quoted, with a parser written with `str::split`,
//! whatever columns are asked for and whatever pieces the text arrives in.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::AccessKind;
use plimsoll_fuzz::{is_skippable_frame, naive_number, outcome, text_of};
use plimsoll_source::{Column, Format, Options};

const BLANKS: [char; 4] = [' ', '\t', '\r', '\x0c'];

/// Returns the references of a file whose first column is the page and whose second,
/// if it has one, is the operation; and the line of the first fault.
fn naive(text: &str) -> (Vec<(u64, AccessKind)>, Option<u64>) {
    let mut references = Vec::new();
    let mut is_first = true;
    let first = text
        .lines()
        .find(|line| !line.trim_matches(BLANKS).is_empty());
    let first = first.unwrap_or_default().trim_matches(BLANKS);
    let separator = [',', '\t', ';']
        .into_iter()
        .find(|separator| first.contains(*separator));
    let separator = separator.unwrap_or(',');
    for (index, line) in text.split('\n').enumerate() {
        if line.trim_matches(BLANKS).is_empty() {
            continue;
        }
        let fault = Some(index as u64 + 1);
        let fields: Vec<_> = line
            .split(separator)
            .map(|field| field.trim_matches(BLANKS))
            .collect();
        if fields.len() > 4096 {
            return (references, fault);
        }
        if std::mem::take(&mut is_first) {
            if fields.len() < 2 {
                return (references, fault);
            }
            // A number with a sign is no header, and no page either.
            let number = fields[0].strip_prefix(['-', '+']).unwrap_or(fields[0]);
            if !number.starts_with(|first: char| first.is_ascii_digit()) {
                continue;
            }
        }
        let Some(page) = naive_number(fields[0]) else {
            return (references, fault);
        };
        let kind = match fields.get(1).map(|op| op.to_ascii_lowercase()).as_deref() {
            Some("r" | "read" | "rd" | "l" | "load" | "get" | "08" | "28" | "88" | "a8") => {
                AccessKind::Read
            }
            Some("w" | "write" | "wr" | "s" | "store" | "set" | "put") => AccessKind::Write,
            Some("0a" | "2a" | "8a" | "aa") => AccessKind::Write,
            _ => AccessKind::Unknown,
        };
        references.push((page, kind));
    }
    (references, None)
}

fuzz_target!(|bytes: &[u8]| {
    let mut options = Options {
        format: Some(Format::CSV),
        ..Options::default()
    };
    outcome(bytes, &options);
    options.page_column = Some(Column::Name("a".to_owned()));
    outcome(bytes, &options);
    let with_details = Options {
        page_column: None,
        key_column: Some(Column::Place(2)),
        size_column: Some(Column::Place(1)),
        times: true,
        sizes: true,
        ..options.clone()
    };
    outcome(bytes, &with_details);
    options.page_column = Some(Column::Place(1));
    options.op_column = Some(Column::Place(2));
    let (outcome, line) = outcome(bytes, &options);
    let Some(text) = text_of(bytes) else {
        return;
    };
    // A carriage return within a line ends a record for some readers, a byte-order mark is skipped.
    let lone_return = text.replace("\r\n", "\n").contains('\r');
    if text.contains(['"', '\u{feff}']) || lone_return || is_skippable_frame(bytes) {
        return;
    }
    assert_eq!((outcome.references, line), naive(text));
});
