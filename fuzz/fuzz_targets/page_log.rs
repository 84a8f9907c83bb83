//! Any bytes in place of a page log end in a fault, even if their checksums are right; words that a hostile QEMU puts into
//! its ring end the reading or are records that every machine can take; and what is written is read.
#![no_main]

use std::num::NonZeroU64;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use plimsoll_flow::{PageNumber, PageSize};
use plimsoll_pagelog::log::{LogReader, LogWriter, Totals};
use plimsoll_pagelog::machine::{Config, Machine, Mode, Sink};
use plimsoll_pagelog::record::Record;
use plimsoll_pagelog::ring::{Ring, RingWriter};
use plimsoll_pagelog::{BATCH_RECORDS, Description, PageLogError, RecordSource, TlbShape};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a file's head, checksum included.
const HEAD_BYTES: usize = 104;

/// Counts what it gets.
#[derive(Default)]
struct Count(u64);

impl Sink for Count {
    fn drained(&mut self, _vm: usize, pages: &[PageNumber]) {
        self.0 += pages.len() as u64;
    }
}

fn description() -> Description {
    Description {
        ram_bytes: 5 << 30,
        below_4g_bytes: 3 << 30,
        vcpus: 4,
        walks: true,
        references: true,
        only_between_marks: false,
        interval_instructions: NonZeroU64::new(1000),
        filter_pages: 64,
        tlb: Some(TlbShape::default()),
        tlb2: None,
        itlb: None,
        plugin_api: 1,
        tlb_page: PageSize::FOUR_KIB,
    }
}

/// Reads all, and lets both machines run by it.
fn records_of(source: &mut dyn RecordSource) -> (Vec<Record>, Result<(), PageLogError>) {
    let (mut all, mut batch) = (Vec::new(), Vec::new());
    let result = loop {
        let more = source.next_batch(&mut batch);
        assert!(batch.len() <= BATCH_RECORDS);
        all.append(&mut batch);
        match more {
            Ok(true) => {}
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    assert!(!source.next_batch(&mut batch).unwrap() && batch.is_empty());
    for mode in [Mode::Pml, Mode::Prl] {
        let config = Config {
            buffer_entries: 3,
            ..Config::new(mode)
        };
        let mut machine = Machine::new(&config, &[source.description().vcpus]);
        let mut count = Count::default();
        for record in &all {
            machine.push(0, record, &mut count);
        }
        let vm = machine.finish(&mut count).vms[0];
        assert_eq!(vm.drained, count.0);
        assert_eq!(vm.logged, vm.drained + vm.left);
    }
    (all, result)
}

fn summed(bytes: &[u8]) -> Vec<u8> {
    [&xxh3_64(bytes).to_le_bytes(), bytes].concat()
}

fuzz_target!(|bytes: &[u8]| {
    // As they are, as a head, and as a block behind a good head; all under their checksums.
    let empty = LogWriter::new(Vec::new(), &description()).unwrap();
    let empty = empty.finish(Totals::default()).unwrap();
    let (head, end) = empty.split_at(HEAD_BYTES);
    let mut described = head[..HEAD_BYTES - 8].to_vec();
    for (there, byte) in described[24..].iter_mut().zip(bytes) {
        *there = *byte;
    }
    let sum = xxh3_64(&described).to_le_bytes();
    let words: Vec<u64> = bytes
        .chunks_exact(8)
        .take(BATCH_RECORDS)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
        .collect();
    let planes: Vec<u8> = (0..8)
        .flat_map(|plane| words.iter().map(move |word| word.to_le_bytes()[plane]))
        .collect();
    let packed = zstd::encode_all(&planes[..], 1).unwrap();
    let number = |length: usize| u32::try_from(length).unwrap().to_le_bytes();
    let block = [&number(words.len())[..], &number(packed.len()), &packed].concat();
    for file in [
        bytes.to_vec(),
        [&described[..], &sum, end].concat(),
        [head, &summed(bytes)].concat(),
        [head, &summed(&block)].concat(),
    ] {
        if let Ok(mut reader) = LogReader::new(&file[..], "fuzz") {
            let (records, result) = records_of(&mut reader);
            if result.is_ok() {
                // A log that is whole is the same when it is written again.
                let mut writer = LogWriter::new(Vec::new(), reader.description()).unwrap();
                writer.write(&records).unwrap();
                let again = writer.finish(reader.totals().unwrap()).unwrap();
                let mut again = LogReader::new(&again[..], "again").unwrap();
                assert_eq!(again.description(), reader.description());
                assert_eq!(records_of(&mut again).0, records);
            }
        }
    }

    // In a ring whose writer dies behind them.
    let ring = Ring::create(1 << 14).unwrap();
    let mut writer = RingWriter::attach(ring.path(), &description()).unwrap();
    let sent: Vec<Record> = words
        .iter()
        .filter_map(|&word| Record::decode(word).ok())
        .collect();
    writer.write(&sent);
    let mut reader = ring.wait_for_writer(Duration::ZERO, || false).unwrap();
    let (records, result) = records_of(&mut reader);
    assert!(sent.starts_with(&records));
    assert!(result.is_err() || sent.last() == Some(&Record::End));
});
