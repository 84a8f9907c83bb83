//! A hostile writer of the ring of notices: whatever it puts where, whenever, the reader neither panics nor writes outside
//! its own words, ends each batch after as many records and pages as the ring has, and tells of every loss.
#![no_main]

#[path = "../../crates/disk/tests/notices/guest.rs"]
mod guest;

use guest::{FRAMES_END, Guest, HEADER, NONCE, Record};
use libfuzzer_sys::fuzz_target;
use plimsoll_disk::protocol::{control, ring};
use plimsoll_disk::{BlockSink, Contents, DrainResult, FrameSink, Notice, Notices, Page};

/// Words of the header that are worth a change.
const WORDS: [usize; 11] = [
    ring::AT_MAGIC,
    ring::AT_VERSION,
    ring::AT_RECORDS,
    ring::AT_CHUNKS,
    ring::AT_NONCE,
    ring::AT_HEAD,
    ring::AT_SLOT_HEAD,
    ring::AT_LOST,
    ring::AT_TAIL,
    ring::AT_SLOT_TAIL,
    ring::AT_CHUNK + 8,
];

#[derive(Default)]
struct Frames {
    forgotten: u64,
    told: u64,
}

impl FrameSink for Frames {
    fn forget(&mut self) {
        self.forgotten += 1;
    }

    fn notice(&mut self, notice: Notice, contents: Option<Contents<'_>>) {
        let (frame, to) = match notice {
            Notice::Evict { frame } | Notice::Release { frame } | Notice::Add { frame } => {
                (frame, frame)
            }
            Notice::Migrate { frame, to } => (frame, to),
        };
        assert!(frame.max(to) < FRAMES_END);
        assert!(contents.is_none() || matches!(notice, Notice::Evict { .. }));
        if let Some(Contents::Lazy(ram)) = contents {
            // A frame in the hole of RAM is an error, no more.
            let _ = ram.read(frame * 4096, &mut [0; 4096]);
        }
        self.told += 1;
    }
}

#[derive(Default)]
struct Blocks {
    forgotten: u64,
    puts: u64,
    told: u64,
}

impl BlockSink for Blocks {
    fn put(&mut self, pool: u32, block: u64, _page: &Page) {
        assert!((1..=control::POOLS_MAX).contains(&pool) && block < control::BLOCKS_MAX);
        self.puts += 1;
        self.told += 1;
    }

    fn flush(&mut self, pool: u32, block: u64, count: u32) {
        assert!((1..=control::POOLS_MAX).contains(&pool) && count > 0);
        assert!(block + u64::from(count) <= control::BLOCKS_MAX);
        self.told += 1;
    }

    fn forget(&mut self) {
        self.forgotten += 1;
    }

    fn end_of_batch(&mut self) {}
}

fuzz_target!(|input: &[u8]| {
    let mut guest = Guest::new();
    let mut notices = Notices::default();
    for step in input.as_chunks::<8>().0 {
        let value = u64::from_le_bytes(*step) >> 16;
        match step[0] % 8 {
            0 => {
                let _ = notices.attach(guest.ram.clone(), HEADER, NONCE);
            }
            1 => guest.set(WORDS[usize::from(step[1]) % WORDS.len()], value),
            2 => guest.set(
                WORDS[usize::from(step[1]) % WORDS.len()],
                guest.get(ring::AT_TAIL).wrapping_add(value % 300),
            ),
            3 => guest.set_u32(usize::from(step[1]) * 4 % 0x100, value as u32),
            // In order, with a page.
            4 => {
                guest.head = guest.get(ring::AT_HEAD);
                guest.slot_head = guest.get(ring::AT_SLOT_TAIL);
                if guest.head < 1 << 62 && guest.slot_head < 1 << 62 {
                    let record = Record {
                        other: value >> 8 & 0x3f,
                        ..Record::new(u16::from(step[1] % 8), value & 0xff)
                    };
                    guest.post_page(record, &[step[2]; 4096]);
                }
            }
            5 | 6 => {
                guest.head = guest.get(ring::AT_HEAD);
                if guest.head < 1 << 62 {
                    guest.post(Record {
                        kind: u16::from(step[1] % 8),
                        flags: u16::from(step[1] >> 3 & 7),
                        count: u32::from(step[2]),
                        page: value >> 8 & 0xff | (value >> 47 & 1) << 44,
                        other: value >> 16 & 0x3f,
                        slot: value >> 24 & 7,
                    });
                }
            }
            _ => {
                let before = notices.stats();
                let lost = guest.get(ring::AT_LOST);
                let (mut frames, mut blocks) = (Frames::default(), Blocks::default());
                let drained = notices.drain(&mut frames, &mut blocks);
                let after = notices.stats();
                assert_eq!(
                    after.attached,
                    before.attached && drained != DrainResult::Fault
                );
                let records = after.records - before.records;
                // A ring of 1 MiB of RAM has no more than this, however its header was changed.
                assert!(records <= 1 << 15 && blocks.puts <= 256);
                let bad = after.bad_records - before.bad_records;
                assert_eq!(frames.told + blocks.told + bad, records);
                let loses = bad > 0 || after.lost > before.lost || drained == DrainResult::Fault;
                assert!(!loses || frames.forgotten > 0 && blocks.forgotten > 0);
                if drained == DrainResult::Records {
                    assert_eq!(guest.get(ring::AT_TAIL), guest.get(ring::AT_HEAD));
                    assert_eq!(guest.get(ring::AT_LOST), lost);
                }
            }
        }
    }
});
