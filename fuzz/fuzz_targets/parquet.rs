//! A file that is perhaps `parquet` ends in references or in an error, never in a panic that
//! gets out and never in more memory than its pages may have.
#![no_main]

use std::io::Write;
use std::sync::Once;

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::{ReferenceBatch, Source};
use plimsoll_fuzz::REFERENCES_MAX;
use plimsoll_source::{Options, open};

static QUIET: Once = Once::new();

fuzz_target!(|bytes: &[u8]| {
    // The decoder's own panics are contained and become errors; libfuzzer would stop at them.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    let read = |bytes: &[u8]| {
        let mut file = tempfile::Builder::new().tempfile_in("/dev/shm").unwrap();
        file.write_all(bytes).unwrap();
        let mut references = 0;
        if let Ok(mut trace) = open(file.path(), &Options::default()) {
            let mut batch = ReferenceBatch::new();
            while let Ok(true) = trace.next_batch(&mut batch) {
                assert!(!batch.is_empty() && batch.len() <= ReferenceBatch::CAPACITY);
                references += batch.len();
                if references > REFERENCES_MAX {
                    break;
                }
            }
        }
    };
    let read = |bytes: &[u8]| {
        let result = std::panic::catch_unwind(|| read(bytes));
        if result.is_err() {
            std::process::abort();
        }
    };
    read(bytes);
    // With a footer that claims the bytes before it.
    if let Ok(length) = u32::try_from(bytes.len()) {
        let head: &[u8] = b"PAR1";
        read(&[head, bytes, &length.to_le_bytes(), b"PAR1"].concat());
    }
});
