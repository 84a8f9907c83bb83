//! Reads the blocks of a disk again and again, checks their contents, and evicts them into the cache under it, so that the cache fills up and stays
//! in use: for tests of a disk daemon without a guest. Prints once a second how many blocks were read so far, and how many were wrong.
//!
//!     evict_blocks DISK-SOCKET CONTROL-SOCKET
//!
//! First it writes the whole disk.

use std::path::Path;
use std::time::{Duration, Instant};

use plimsoll_driver::{
    Bank, ControlDisk, Driver, DriverOptions, FrontendError, NoticeRing, PAGE_BYTES, Page, Ram,
    RamOptions, Request, RingOptions, Segment,
};

/// Frames that blocks are read into in turn.
const FRAMES: usize = 64;
/// Blocks that are written at once.
const WRITTEN: usize = 64;
/// Distance of a block from the one read before; a prime number, so that each is read once before any is read again.
const STRIDE: u64 = 7919;
const INTERVAL: Duration = Duration::from_secs(1);

/// The contents of a block.
fn contents(block: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    for (word, at) in page.chunks_exact_mut(8).zip(0..) {
        word.copy_from_slice(&mix(block << 9 | at).to_le_bytes());
    }
    page
}

/// The finalizer of splitmix64.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn main() -> Result<(), FrontendError> {
    let sockets: Vec<_> = std::env::args_os().skip(1).collect();
    let [disk, control] = sockets.as_slice() else {
        panic!("evict_blocks DISK-SOCKET CONTROL-SOCKET");
    };
    let ram = Ram::new(&RamOptions::default())?;
    let mut disk = Driver::connect(&ram, Path::new(disk), DriverOptions::default())?;
    let control = Driver::connect(&ram, Path::new(control), DriverOptions::default())?;
    let mut control = ControlDisk::new(control);
    let blocks = disk.config().capacity_sectors / 8;
    for first in (0..blocks).step_by(WRITTEN) {
        let written: Vec<_> = (first..blocks).take(WRITTEN).flat_map(contents).collect();
        disk.write(first * PAGE_BYTES as u64, &written)?;
    }
    let mut ring = NoticeRing::new(&ram, RingOptions::default());
    control.attach(&ring)?;
    let frames = ram.allocate(Bank::High, FRAMES * PAGE_BYTES);
    let (mut reads, mut wrong, mut last) = (0_u64, 0_u64, Instant::now());
    loop {
        let block = reads * STRIDE % blocks;
        let address = frames + reads % FRAMES as u64 * PAGE_BYTES as u64;
        let segments = [Segment {
            address,
            bytes: 4096,
        }];
        let request = Request::Read {
            sector: block * 8,
            segments: &segments,
        };
        disk.execute(&request)?;
        reads += 1;
        let mut page = [0; PAGE_BYTES];
        ram.read(address, &mut page);
        wrong += u64::from(page != contents(block));
        // Without room in the ring the block stays out of the cache.
        ring.evict(address / PAGE_BYTES as u64, Some(&page));
        if last.elapsed() >= INTERVAL {
            last = Instant::now();
            println!("reads {reads} wrong {wrong}");
        }
    }
}
