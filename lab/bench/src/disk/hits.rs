//! Latency of a hit, measured by a guest with a virtqueue.

use std::io::Write;
use std::time::Instant;

use plimsoll_driver::{
    Bank, ControlDisk, Driver, DriverOptions, NoticeRing, PAGE_BYTES, Ram, RamOptions, Request,
    RingOptions, Segment,
};

use super::serve::start_ours;
use super::{Args, make_image};
use crate::measure::median;
use crate::random::Random;
use crate::title;

/// Blocks that are read, evicted and read again.
const BLOCKS: usize = 4096;
/// Frames that they are read into in turn.
const FRAMES: u64 = 64;

/// Runs the part.
pub(super) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        &format!(
            "disk with a cache: reads of 4 KiB in random order, one at a time, {BLOCKS} blocks"
        ),
    )?;
    let folder = tempfile::tempdir_in(&args.folder)?;
    let image = folder.path().join("image");
    make_image(&image, args.image_mib)?;
    let [socket, control] = ["disk", "control"].map(|name| folder.path().join(name));
    let _daemon = start_ours(&image, &socket, Some((64, &control)))?;
    let ram = Ram::new(&RamOptions::default())?;
    let mut disk = Driver::connect(&ram, &socket, DriverOptions::default())?;
    let control = Driver::connect(&ram, &control, DriverOptions::default())?;
    let mut control = ControlDisk::new(control);
    let mut ring = NoticeRing::new(&ram, RingOptions::default());
    control.attach(&ring)?;
    let frames = ram.allocate(Bank::High, usize::try_from(FRAMES)? * PAGE_BYTES);

    let mut page = [0; PAGE_BYTES];
    let mut latencies_us = [Vec::new(), Vec::new()];
    let mut random = Random::new(7);
    let spacing = args.image_mib * 256 / BLOCKS as u64;
    for _ in 0..args.turns.div_ceil(4) {
        for (pass, latencies_us) in latencies_us.iter_mut().enumerate() {
            for at in random.order(BLOCKS) {
                let at = at as u64;
                let block = at * spacing;
                let address = frames + at % FRAMES * PAGE_BYTES as u64;
                let segments = [Segment {
                    address,
                    bytes: 4096,
                }];
                let start = Instant::now();
                disk.execute(&Request::Read {
                    sector: block * 8,
                    segments: &segments,
                })?;
                latencies_us.push(start.elapsed().as_secs_f64() * 1e6);
                ram.read(address, &mut page);
                anyhow::ensure!(page[..8] == block.to_le_bytes(), "wrong contents");
                // The first pass fills the cache, the second empties it.
                let told = match pass {
                    0 => ring.evict(address / 4096, Some(&page)),
                    _ => ring.release(address / 4096),
                };
                anyhow::ensure!(told, "no room in the ring");
            }
        }
    }
    writeln!(out, "\n{:<24} {:>12} {:>12}", "", "median, us", "99 %, us")?;
    for (name, mut latencies_us) in ["from storage", "from the cache"].iter().zip(latencies_us) {
        latencies_us.sort_by(f64::total_cmp);
        let high = latencies_us[latencies_us.len() * 99 / 100];
        let middle = median(latencies_us);
        writeln!(out, "{name:<24} {middle:>12.1} {high:>12.1}")?;
    }
    Ok(())
}
