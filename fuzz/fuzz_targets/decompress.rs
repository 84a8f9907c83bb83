//! What is compressed reads as what is plain; damaged bytes end in a fault, whatever pieces
//! they arrive in.
#![no_main]

use std::io::Write;

use libfuzzer_sys::fuzz_target;
use plimsoll_fuzz::{outcome, references_of};
use plimsoll_source::{Format, Options};

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        format: Some(Format::ORACLE_GENERAL),
        ..Options::default()
    };
    // As they are: perhaps compressed, most likely damaged.
    let _ = outcome(bytes, &options);

    // Compressed by us, in two members: as if plain. A first byte of 0 is no magic number.
    let plain = [&[0], bytes].concat();
    let (expected, fault) = references_of(&plain, &[], &options);
    let (head, tail) = plain.split_at(plain.len() / 2);
    let bzip2 = |bytes: &[u8]| {
        let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 1).unwrap();
    for packed in [
        [bzip2(head), bzip2(tail)],
        [gzip(head), gzip(tail)],
        [zstd(head), zstd(tail)],
    ] {
        let (references, packed_fault) = references_of(&packed.concat(), &[3], &options);
        assert_eq!(references, expected);
        let [packed_fault, fault] =
            [&packed_fault, &fault].map(|fault| fault.as_ref().map(ToString::to_string));
        assert_eq!(packed_fault, fault);
    }
});
