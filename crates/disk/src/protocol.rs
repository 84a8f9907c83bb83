//! Constants and layouts of the protocol between a guest and its disk: the Rust form of
//! `guest/module/plimsoll_protocol.h`, documented in docs/disk-protocol.md.
//!
//! All numbers are little-endian.

use crate::PAGE_BYTES;

const _: () = assert!(cfg!(target_endian = "little") && size_of::<usize>() == 8);

/// Version of the ring and of the control disk; the host supports only this one.
pub const VERSION: u32 = 1;

/// Bytes of a sector, and of everything on the control disk that is no page.
pub const SECTOR_BYTES: usize = 512;

/// The ring's header page: byte offsets of its fields.
pub mod ring {
    /// First word of a ring: `PLMSRNG1`.
    pub const MAGIC: u64 = u64::from_le_bytes(*b"PLMSRNG1");
    /// Maximum number of chunks.
    pub const CHUNKS_MAX: u32 = 480;
    /// Flag: evictions come without contents.
    pub const LAZY: u32 = 1;

    /// u64.
    pub const AT_MAGIC: usize = 0;
    /// u32.
    pub const AT_VERSION: usize = 8;
    /// u32.
    pub const AT_CHUNK_BYTES: usize = 12;
    /// u32.
    pub const AT_RECORDS: usize = 16;
    /// u32.
    pub const AT_SLOTS: usize = 20;
    /// u32.
    pub const AT_CHUNKS: usize = 24;
    /// u32.
    pub const AT_FLAGS: usize = 28;
    /// u64.
    pub const AT_NONCE: usize = 32;
    /// u64, of the guest.
    pub const AT_HEAD: usize = 0x40;
    /// u64, of the guest. The host does not use it.
    pub const AT_SLOT_HEAD: usize = 0x48;
    /// u64, of the guest.
    pub const AT_LOST: usize = 0x50;
    /// u64, of the guest.
    pub const AT_MEMORY_PAGES: usize = 0x58;
    /// u64, of the host.
    pub const AT_TAIL: usize = 0x80;
    /// u64, of the host.
    pub const AT_SLOT_TAIL: usize = 0x88;
    /// u64, of the host.
    pub const AT_ATTACHED: usize = 0x90;
    /// u64 each.
    pub const AT_CHUNK: usize = 0x100;
}

/// A record of the ring.
pub mod record {
    /// Size of one.
    pub const BYTES: usize = 32;

    /// u16.
    pub const AT_TYPE: usize = 0;
    /// u16.
    pub const AT_FLAGS: usize = 2;
    /// u32.
    pub const AT_COUNT: usize = 4;
    /// u64.
    pub const AT_PAGE: usize = 8;
    /// u64.
    pub const AT_OTHER: usize = 16;
    /// u64.
    pub const AT_SLOT: usize = 24;

    /// Type: reclaim evicts a frame.
    pub const EVICT: u16 = 1;
    /// Type: a frame leaves the page cache otherwise.
    pub const RELEASE: u16 = 2;
    /// Type: a frame enters the page cache.
    pub const ADD: u16 = 3;
    /// Type: contents move to another frame.
    pub const MIGRATE: u16 = 4;
    /// Type: a page for the hcache.
    pub const PUT: u16 = 5;
    /// Type: blocks of a pool are no longer valid.
    pub const FLUSH: u16 = 6;

    /// Flag: the record has a slot.
    pub const DATA: u16 = 1;
    /// Flag: a page of the swap cache.
    pub const SWAP: u16 = 2;
}

/// The control disk.
pub mod control {
    use super::{PAGE_BYTES, SECTOR_BYTES};

    /// First word of each valid sector: `PLMSCTL1`.
    pub const MAGIC: u64 = u64::from_le_bytes(*b"PLMSCTL1");
    /// Maximum number of blocks of a get.
    pub const GET_PAGES_MAX: usize = 64;
    /// Pools are numbered from 1 to this.
    pub const POOLS_MAX: u32 = 31;
    /// Blocks of a pool are numbered below this.
    pub const BLOCKS_MAX: u64 = 1 << 44;
    /// Size of the disk.
    pub const SECTORS: u64 = 32 << 47;
    /// Bits of a sector's number below the pool's.
    pub const POOL_SHIFT: u32 = 47;
    /// Sectors of a block, as a shift.
    pub const BLOCK_SHIFT: u32 = 3;

    /// Length of a get of `pages` blocks.
    pub const fn get_bytes(pages: usize) -> usize {
        pages * PAGE_BYTES + SECTOR_BYTES
    }

    /// Feature: a disk has an exclusive cache.
    pub const HAS_CACHE: u32 = 1;
    /// Feature: pools can be opened.
    pub const HAS_HCACHE: u32 = 2;

    /// Command: announce a ring.
    pub const ATTACH: u32 = 1;
    /// Command: release a ring.
    pub const DETACH: u32 = 2;
    /// Command: drain the ring.
    pub const KICK: u32 = 3;
    /// Command: open a pool.
    pub const POOL_OPEN: u32 = 4;
    /// Command: close a pool.
    pub const POOL_CLOSE: u32 = 5;

    /// Kind of a pool: of this guest alone.
    pub const POOL_PRIVATE: u64 = 0;
    /// Kind of a pool: of a read-only image, shared by all guests of the image.
    pub const POOL_IMAGE: u64 = 2;
    /// Bits of a pool's kind; above them is its first block on the disk.
    pub const POOL_KIND_BITS: u32 = 8;
    /// Bytes of a disk's serial number.
    pub const SERIAL_BYTES: usize = 20;

    /// In the info sector: u64.
    pub const INFO_MAGIC: usize = 0;
    /// In the info sector: u32.
    pub const INFO_VERSION: usize = 8;
    /// In the info sector: u32.
    pub const INFO_FEATURES: usize = 12;
    /// In a command: u64.
    pub const COMMAND_MAGIC: usize = 0;
    /// In a command: u32.
    pub const COMMAND_VERSION: usize = 8;
    /// In a command: u32.
    pub const COMMAND_COMMAND: usize = 12;
    /// In a command: u64.
    pub const COMMAND_SEQUENCE: usize = 16;
    /// In a command: four u64.
    pub const COMMAND_ARG: usize = 24;
    /// In an answer: u64.
    pub const ANSWER_MAGIC: usize = 0;
    /// In an answer: u64.
    pub const ANSWER_SEQUENCE: usize = 8;
    /// In an answer: u32.
    pub const ANSWER_STATUS: usize = 16;
    /// In an answer: u64.
    pub const ANSWER_VALUE: usize = 24;
    /// In the last sector of a get: u64.
    pub const GET_MAGIC: usize = 0;
    /// In the last sector of a get: u64.
    pub const GET_HITS: usize = 8;
    /// In the last sector of a get: u64.
    pub const GET_POOL: usize = 16;
    /// In the last sector of a get: u64.
    pub const GET_BLOCK: usize = 24;
    /// In the last sector of a get: u32.
    pub const GET_COUNT: usize = 32;
}

/// The u16 at `at`.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

/// The u32 at `at`.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The u64 at `at`.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Stores a u32 at `at`.
pub(crate) fn set_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// Stores a u64 at `at`.
pub(crate) fn set_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use plimsoll_skip::{Lack, skip};
    use std::fmt::Write as _;
    use std::process::Command;

    use super::{PAGE_BYTES, SECTOR_BYTES, VERSION, control, record, ring};

    /// Pairs of an expression of the C header and its value here.
    fn pairs() -> Vec<(&'static str, u64)> {
        let size = |bytes: usize| bytes as u64;
        vec![
            ("PLIMSOLL_VERSION", VERSION.into()),
            ("PLIMSOLL_PAGE", size(PAGE_BYTES)),
            ("PLIMSOLL_RING_MAGIC", ring::MAGIC),
            ("PLIMSOLL_CHUNKS_MAX", ring::CHUNKS_MAX.into()),
            ("PLIMSOLL_LAZY", ring::LAZY.into()),
            ("sizeof(struct plimsoll_ring)", size(PAGE_BYTES)),
            (
                "offsetof(struct plimsoll_ring, magic)",
                size(ring::AT_MAGIC),
            ),
            (
                "offsetof(struct plimsoll_ring, version)",
                size(ring::AT_VERSION),
            ),
            (
                "offsetof(struct plimsoll_ring, chunk_bytes)",
                size(ring::AT_CHUNK_BYTES),
            ),
            (
                "offsetof(struct plimsoll_ring, records)",
                size(ring::AT_RECORDS),
            ),
            (
                "offsetof(struct plimsoll_ring, slots)",
                size(ring::AT_SLOTS),
            ),
            (
                "offsetof(struct plimsoll_ring, chunks)",
                size(ring::AT_CHUNKS),
            ),
            (
                "offsetof(struct plimsoll_ring, flags)",
                size(ring::AT_FLAGS),
            ),
            (
                "offsetof(struct plimsoll_ring, nonce)",
                size(ring::AT_NONCE),
            ),
            ("offsetof(struct plimsoll_ring, head)", size(ring::AT_HEAD)),
            (
                "offsetof(struct plimsoll_ring, slot_head)",
                size(ring::AT_SLOT_HEAD),
            ),
            ("offsetof(struct plimsoll_ring, lost)", size(ring::AT_LOST)),
            (
                "offsetof(struct plimsoll_ring, memory_pages)",
                size(ring::AT_MEMORY_PAGES),
            ),
            ("offsetof(struct plimsoll_ring, tail)", size(ring::AT_TAIL)),
            (
                "offsetof(struct plimsoll_ring, slot_tail)",
                size(ring::AT_SLOT_TAIL),
            ),
            (
                "offsetof(struct plimsoll_ring, attached)",
                size(ring::AT_ATTACHED),
            ),
            (
                "offsetof(struct plimsoll_ring, chunk)",
                size(ring::AT_CHUNK),
            ),
            ("sizeof(struct plimsoll_record)", size(record::BYTES)),
            (
                "offsetof(struct plimsoll_record, type)",
                size(record::AT_TYPE),
            ),
            (
                "offsetof(struct plimsoll_record, flags)",
                size(record::AT_FLAGS),
            ),
            (
                "offsetof(struct plimsoll_record, count)",
                size(record::AT_COUNT),
            ),
            (
                "offsetof(struct plimsoll_record, page)",
                size(record::AT_PAGE),
            ),
            (
                "offsetof(struct plimsoll_record, other)",
                size(record::AT_OTHER),
            ),
            (
                "offsetof(struct plimsoll_record, slot)",
                size(record::AT_SLOT),
            ),
            ("PLIMSOLL_EVICT", record::EVICT.into()),
            ("PLIMSOLL_RELEASE", record::RELEASE.into()),
            ("PLIMSOLL_ADD", record::ADD.into()),
            ("PLIMSOLL_MIGRATE", record::MIGRATE.into()),
            ("PLIMSOLL_PUT", record::PUT.into()),
            ("PLIMSOLL_FLUSH", record::FLUSH.into()),
            ("PLIMSOLL_DATA", record::DATA.into()),
            ("PLIMSOLL_SWAP", record::SWAP.into()),
            ("PLIMSOLL_CONTROL_MAGIC", control::MAGIC),
            ("PLIMSOLL_GET_PAGES_MAX", size(control::GET_PAGES_MAX)),
            ("PLIMSOLL_POOLS_MAX", control::POOLS_MAX.into()),
            ("PLIMSOLL_BLOCKS_MAX", control::BLOCKS_MAX),
            ("PLIMSOLL_CONTROL_SECTORS", control::SECTORS),
            (
                "PLIMSOLL_GET_SECTOR(3, 5)",
                3 << control::POOL_SHIFT | 5 << control::BLOCK_SHIFT,
            ),
            ("PLIMSOLL_HAS_CACHE", control::HAS_CACHE.into()),
            ("PLIMSOLL_HAS_HCACHE", control::HAS_HCACHE.into()),
            ("PLIMSOLL_ATTACH", control::ATTACH.into()),
            ("PLIMSOLL_DETACH", control::DETACH.into()),
            ("PLIMSOLL_KICK", control::KICK.into()),
            ("PLIMSOLL_POOL_OPEN", control::POOL_OPEN.into()),
            ("PLIMSOLL_POOL_CLOSE", control::POOL_CLOSE.into()),
            ("PLIMSOLL_POOL_PRIVATE", control::POOL_PRIVATE),
            ("PLIMSOLL_POOL_IMAGE", control::POOL_IMAGE),
            ("PLIMSOLL_POOL_KIND_BITS", control::POOL_KIND_BITS.into()),
            ("PLIMSOLL_SERIAL_BYTES", size(control::SERIAL_BYTES)),
            ("sizeof(struct plimsoll_info)", size(SECTOR_BYTES)),
            (
                "offsetof(struct plimsoll_info, magic)",
                size(control::INFO_MAGIC),
            ),
            (
                "offsetof(struct plimsoll_info, version)",
                size(control::INFO_VERSION),
            ),
            (
                "offsetof(struct plimsoll_info, features)",
                size(control::INFO_FEATURES),
            ),
            ("sizeof(struct plimsoll_command)", size(SECTOR_BYTES)),
            (
                "offsetof(struct plimsoll_command, magic)",
                size(control::COMMAND_MAGIC),
            ),
            (
                "offsetof(struct plimsoll_command, version)",
                size(control::COMMAND_VERSION),
            ),
            (
                "offsetof(struct plimsoll_command, command)",
                size(control::COMMAND_COMMAND),
            ),
            (
                "offsetof(struct plimsoll_command, sequence)",
                size(control::COMMAND_SEQUENCE),
            ),
            (
                "offsetof(struct plimsoll_command, arg)",
                size(control::COMMAND_ARG),
            ),
            ("sizeof(struct plimsoll_answer)", size(SECTOR_BYTES)),
            (
                "offsetof(struct plimsoll_answer, magic)",
                size(control::ANSWER_MAGIC),
            ),
            (
                "offsetof(struct plimsoll_answer, sequence)",
                size(control::ANSWER_SEQUENCE),
            ),
            (
                "offsetof(struct plimsoll_answer, status)",
                size(control::ANSWER_STATUS),
            ),
            (
                "offsetof(struct plimsoll_answer, value)",
                size(control::ANSWER_VALUE),
            ),
            ("sizeof(struct plimsoll_get)", size(SECTOR_BYTES)),
            (
                "offsetof(struct plimsoll_get, magic)",
                size(control::GET_MAGIC),
            ),
            (
                "offsetof(struct plimsoll_get, hits)",
                size(control::GET_HITS),
            ),
            (
                "offsetof(struct plimsoll_get, pool)",
                size(control::GET_POOL),
            ),
            (
                "offsetof(struct plimsoll_get, block)",
                size(control::GET_BLOCK),
            ),
            (
                "offsetof(struct plimsoll_get, count)",
                size(control::GET_COUNT),
            ),
        ]
    }

    #[test]
    fn the_header_in_c_says_the_same() {
        let mut program = String::from(
            "#include <stddef.h>\n#include <stdio.h>\n#include \"plimsoll_protocol.h\"\nint main(void) {\n",
        );
        for (expression, _) in pairs() {
            writeln!(
                program,
                "printf(\"%llu\\n\", (unsigned long long)({expression}));"
            )
            .unwrap();
        }
        program.push_str("return 0; }\n");
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("layout.c");
        let binary = folder.path().join("layout");
        std::fs::write(&source, program).unwrap();
        let header = concat!(env!("CARGO_MANIFEST_DIR"), "/../../guest/module");
        let compiled = Command::new("cc")
            .args(["-Wall", "-Werror", "-I", header, "-o"])
            .arg(&binary)
            .arg(&source)
            .status();
        match compiled {
            Ok(status) => assert!(status.success(), "{status}"),
            Err(error) => {
                skip(Lack::Program, format_args!("no C compiler ({error})"));
                return;
            }
        }
        let output = Command::new(&binary).output().unwrap();
        let values = String::from_utf8(output.stdout).unwrap();
        let values = values.lines().map(|line| line.parse::<u64>().unwrap());
        let expressions = pairs();
        assert_eq!(values.clone().count(), expressions.len());
        for ((expression, here), there) in expressions.into_iter().zip(values) {
            assert_eq!(there, here, "{expression}");
        }
    }
}
