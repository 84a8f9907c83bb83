//! Reads the blocks of a disk at random, checks their contents, and evicts them into the cache under it, so that the cache fills up and stays
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
const FRAMES: u64 = 64;
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
    for block in 0..blocks {
        disk.write(block * PAGE_BYTES as u64, &contents(block))?;
    }
    let mut ring = NoticeRing::new(&ram, RingOptions::default());
    control.attach(&ring)?;
    let frames = ram.allocate(Bank::High, FRAMES as usize * PAGE_BYTES);
    let (mut reads, mut wrong, mut last) = (0_u64, 0_u64, Instant::now());
    loop {
        let block = mix(reads) % blocks;
        let address = frames + reads % FRAMES * PAGE_BYTES as u64;
        let bytes = PAGE_BYTES as u32;
        let segments = [Segment { address, bytes }];
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
