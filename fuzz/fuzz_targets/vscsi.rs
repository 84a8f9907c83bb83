//! `vscsi` agrees with a reader written from the table of its fields, in both versions,
//! whatever pieces the bytes arrive in.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::{AccessKind, PageSize};
use plimsoll_fuzz::{REFERENCES_MAX, outcome, references_of};
use plimsoll_source::{Format, Options};

fn number(bytes: &[u8]) -> u128 {
    let digits = bytes.iter().rev();
    digits.fold(0, |number, &byte| number << 8 | u128::from(byte))
}

/// Returns the references of whole records, until one that is none; sectors are pages.
fn naive(bytes: &[u8], version: u8) -> Vec<(u64, AccessKind)> {
    let mut references = Vec::new();
    let size = if version == 1 { 32 } else { 40 };
    for record in bytes.chunks_exact(size) {
        let (operation, mark, length) = match version {
            1 => (&record[12..14], record[15], &record[4..8]),
            _ => (&record[..2], record[3], &record[8..12]),
        };
        let first = number(&record[16..24]);
        let sectors = number(length).div_ceil(512);
        if mark != version || first >= 1 << 55 {
            break;
        }
        let kind = match number(operation) {
            0x08 | 0x28 | 0x88 | 0xa8 => AccessKind::Read,
            0x0a | 0x2a | 0x8a | 0xaa | 0x2e | 0x8e | 0xae | 0x41 | 0x93 => AccessKind::Write,
            _ => continue,
        };
        if sectors > 0 && first + sectors > 1 << 48 {
            break;
        }
        let pages = first..first + sectors;
        references.extend(pages.map(|page| (u64::try_from(page).unwrap(), kind)));
        if references.len() > REFERENCES_MAX {
            break;
        }
    }
    references
}

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        format: Some(Format::VSCSI),
        page_size: PageSize::new(512).unwrap(),
        ..Options::default()
    };
    // As they are: most likely no trace.
    outcome(bytes, &options);
    // Marked as records of one version, the first four at least.
    for (version, size, mark) in [(1, 32, 15), (2, 40, 3)] {
        // A first byte of 0 is no magic number of a compression.
        let mut trace = [&[0], bytes].concat();
        let marked = trace.chunks_exact_mut(size).take(4096 / size);
        marked.for_each(|record| record[mark] = version);
        let other = 3 - version;
        let (other_size, other_mark) = if other == 1 { (32, 15) } else { (40, 3) };
        let head = &trace[..trace.len().min(4096)];
        if trace.len() < 32 || head.chunks_exact(size).len() == 0 {
            continue;
        }
        let mut others = head.chunks_exact(other_size);
        let ambiguous = others.len() > 0 && others.all(|record| record[other_mark] == other);
        let (references, _) = references_of(&trace, &[1, 7, 2, 3, 5], &options);
        if ambiguous {
            assert!(references.is_empty());
        } else {
            let length = references.len().min(REFERENCES_MAX);
            let expected = naive(&trace, version);
            assert_eq!(references[..length], expected[..expected.len().min(length)]);
            assert!(expected.len() >= length);
        }
    }
});
