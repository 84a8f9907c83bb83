//! `lcs` agrees with a parser of one record after another, whatever pieces the bytes arrive in.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::AccessKind;
use plimsoll_fuzz::{REFERENCES_MAX, outcome};
use plimsoll_source::{Format, Options};

const HEADER_BYTES: usize = 8192;
const MAGIC: [u8; 8] = [0xf0, 0xde, 0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12];

fn naive(version: u8, records: &[u8]) -> Vec<(u64, AccessKind)> {
    let (bytes, operation) = match version {
        1 => (24, None),
        2 => (28, Some(16)),
        3 => (36, Some(20)),
        _ => (36 + (4 << (version - 4)), Some(20)),
    };
    let records = records.chunks(bytes).filter(|record| record.len() == bytes);
    let references = records.filter_map(|record| {
        let page = u64::from_le_bytes(record[4..12].try_into().expect("eight bytes"));
        let kind = match operation.map(|at| record[at]) {
            Some(9) => return None,
            Some(1 | 2 | 12) => AccessKind::Read,
            Some(3..=8 | 10 | 11 | 13 | 14) => AccessKind::Write,
            _ => AccessKind::Unknown,
        };
        Some((page, kind))
    });
    references.collect()
}

// The header is mostly statistics, so that the input is what varies in it: its version, and the records.
fuzz_target!(|bytes: &[u8]| {
    let Some((&version, records)) = bytes.split_first() else {
        return;
    };
    let mut trace = MAGIC.to_vec();
    trace.extend([version, 0, 0, 0, 0, 0, 0, 0]);
    trace.resize(HEADER_BYTES - 8, 0);
    trace.extend(MAGIC);
    trace.extend(records);
    let options = Options {
        format: Some(Format::LCS),
        times: true,
        ..Options::default()
    };
    let (outcome, _) = outcome(&trace, &options);
    if !(1..=8).contains(&version) {
        assert!(outcome.references.is_empty() && outcome.fault.is_some());
        return;
    }
    if outcome.references.len() <= REFERENCES_MAX {
        assert_eq!(outcome.references, naive(version, records));
    }
    // Bytes without our header are refused or read, and never panic.
    let _ = plimsoll_fuzz::references_of(bytes, &[], &options);
});
