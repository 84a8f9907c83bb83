//! What the copy into guest RAM costs at least: a loop of reads alone, beside the same loop with a copy of each.
//!
//! Our daemon reads into buffers of its own and copies from there into the file of the guest's RAM (decision 7), QEMU's
//! reads into a mapping of it. Neither loop has a virtqueue, an engine or a guest.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_disk::{Buffer, Ring};
use rustix::fs::{MemfdFlags, OFlags, memfd_create};

use super::{Args, make_image};
use crate::measure::{Clock, Watch, median};
use crate::title;

const DEPTH: usize = 32;
const READ_BYTES: usize = 64 << 10;
/// Length of a turn.
const TURN: Duration = Duration::from_millis(250);

/// Reads of an image, `DEPTH` at a time.
struct Loop {
    ring: Ring,
    image: Arc<File>,
    /// Of the image.
    places: u64,
    next: u64,
    free: Vec<Buffer>,
    ram: File,
}

impl Loop {
    /// Reads for a turn, and copies each into RAM if `copies`. Returns CPU time of a read in us.
    fn turn(&mut self, copies: bool) -> anyhow::Result<f64> {
        let watch = Watch::start(Clock::Cpu);
        let begun = Instant::now();
        let mut done = 0_u64;
        while begun.elapsed() < TURN || self.free.len() < DEPTH {
            while begun.elapsed() < TURN
                && let Some(buffer) = self.free.pop()
            {
                self.next = (self.next + 1) % self.places;
                let offset = self.next * READ_BYTES as u64;
                self.ring.read(&self.image, offset, buffer, 0, self.next)?;
            }
            self.ring.wait()?;
            while let Some(completion) = self.ring.next() {
                anyhow::ensure!(completion.result? as usize == READ_BYTES, "a short read");
                let buffer = completion.buffer.expect("of a read");
                if copies {
                    let at = completion.token % DEPTH as u64 * READ_BYTES as u64;
                    self.ram.write_all_at(&buffer, at)?;
                }
                self.free.push(buffer);
                done += 1;
            }
        }
        Ok(watch.seconds() * 1e6 / done as f64)
    }
}

/// Runs the part.
pub(super) fn run(args: &Args, out: &mut dyn Write) -> anyhow::Result<()> {
    title(
        out,
        "disk: what a copy into guest RAM adds to reads of 64 KiB, 32 at a time, by a loop that does nothing else",
    )?;
    let folder = tempfile::tempdir_in(&args.folder)?;
    let image = folder.path().join("image");
    make_image(&image, args.image_mib)?;
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(OFlags::DIRECT.bits().cast_signed());
    let ram = File::from(memfd_create("plimsoll-bench", MemfdFlags::CLOEXEC)?);
    ram.set_len((DEPTH * READ_BYTES) as u64)?;
    let mut reads = Loop {
        ring: Ring::new(64)?,
        image: Arc::new(options.open(&image)?),
        places: (args.image_mib << 20) / READ_BYTES as u64,
        next: 0,
        free: (0..DEPTH).map(|_| Buffer::new(READ_BYTES)).collect(),
        ram,
    };
    reads.turn(true)?;
    let mut costs: [Vec<f64>; 2] = Default::default();
    for turn in 0..2 * args.turns {
        for copies in [turn % 2 == 0, turn % 2 == 1] {
            costs[usize::from(copies)].push(reads.turn(copies)?);
        }
    }
    let ratio = median(
        costs[0]
            .iter()
            .zip(&costs[1])
            .map(|(alone, copied)| copied / alone)
            .collect(),
    );
    let [alone, copied] = costs.map(median);
    writeln!(
        out,
        "\nCPU us a read: {alone:.1} alone, {copied:.1} with a copy, {ratio:.2} x"
    )?;
    Ok(())
}
