//! What is written as `plimsoll` is read, whatever its pages and the pieces it arrives in; and
//! any bytes in its place end in a fault, even if their checksums are right.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::{AccessKind, PageNumber, PageSize, ReferenceBatch};
use plimsoll_fuzz::{outcome, references_of};
use plimsoll_source::{Compression, Format, Options, WriteOptions, write};
use xxhash_rust::xxh3::xxh3_64;

const KINDS: [AccessKind; 3] = [AccessKind::Read, AccessKind::Write, AccessKind::Unknown];

fuzz_target!(|bytes: &[u8]| {
    let options = Options {
        format: Some(Format::PLIMSOLL),
        ..Options::default()
    };
    // As they are; and as a block under its checksum.
    outcome(bytes, &options);
    let header = b"\x89PLIM\r\n\x1a\x01\0\0\0\0\0\0\0";
    let summed = [&header[..], &xxh3_64(bytes).to_le_bytes(), bytes].concat();
    outcome(&summed, &options);
    let mut cleared = bytes.to_vec();
    for place in [2, 4, 5, 6, 7].into_iter().chain(34..40) {
        if let Some(byte) = cleared.get_mut(place) {
            *byte &= u8::from(place == 2);
        }
    }
    let summed = [&header[..], &xxh3_64(&cleared).to_le_bytes(), &cleared].concat();
    outcome(&summed, &options);

    // As pages of any width, written and read.
    let Some((&shape, rest)) = bytes.split_first() else {
        return;
    };
    let width = usize::from(shape % 8) + 1;
    let mut batch = ReferenceBatch::new();
    let mut expected = Vec::new();
    for repeat in 0..1 + u64::from(shape / 8) * 8 {
        for (index, number) in rest.chunks(width).enumerate() {
            let page = number
                .iter()
                .fold(repeat, |page, &byte| page << 8 | u64::from(byte));
            let kind = KINDS[(index * usize::from(shape)) % 3];
            batch.push(PageNumber(page), kind);
            expected.push((page, kind));
        }
    }
    expected.truncate(plimsoll_fuzz::REFERENCES_MAX);
    let mut trace = Vec::new();
    let write_options = WriteOptions {
        format: Format::PLIMSOLL,
        compression: Compression::Plain,
        page_size: PageSize::FOUR_KIB,
    };
    let mut writer = write(&mut trace, "fuzz", &write_options).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    let (references, fault) = references_of(&trace, &[], &options);
    assert!(fault.is_none() && references.starts_with(&expected));
    let cut = trace.len() - 1 - rest.len() % 60 % trace.len();
    let (references, fault) = references_of(&trace[..cut], &[5, 999], &options);
    assert!(references.len() <= batch.len());
    assert!(fault.is_some() == (cut > 0) || references.len() > plimsoll_fuzz::REFERENCES_MAX);
});
