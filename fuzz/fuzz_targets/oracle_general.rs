//! `oracle-general` yields bytes 4..12 of every 24 and tells a torn record by its offset.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::AccessKind;
use plimsoll_fuzz::references_of;
use plimsoll_source::{Format, Options, SourceError};

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        format: Some(Format::ORACLE_GENERAL),
        ..Options::default()
    };
    // A first byte of 0 is no magic number of a compression.
    let bytes = [&[0], bytes].concat();
    let records = bytes.chunks_exact(24);
    let torn = records.remainder().len();
    let expected: Vec<_> = records
        .map(|record| {
            record[4..12]
                .iter()
                .rev()
                .fold(0, |id, &byte| id << 8 | u64::from(byte))
        })
        .map(|id| (id, AccessKind::Unknown))
        .collect();
    for pieces in [&[][..], &[1, 7, 2, 3, 5]] {
        let (references, fault) = references_of(&bytes, pieces, &options);
        assert_eq!(references, expected);
        match fault {
            None => assert_eq!(torn, 0),
            Some(SourceError::Truncated {
                offset_bytes,
                found_bytes,
                ..
            }) => assert_eq!(
                (offset_bytes, found_bytes),
                (bytes.len() as u64 - torn as u64, torn)
            ),
            Some(other) => panic!("{other}"),
        }
    }
});
