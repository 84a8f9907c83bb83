//! Writes whose survival can be judged after a crash of anything under the guest.
//!
//! Write number n goes to a block that follows from n and the seed, and leaves n there as the
//! generation. After each flush a console line reports the highest number flushed. From that number alone
//! a later run finds the least generation each block must have. A block is wrong if it is older,
//! or if it is not wholly one write.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

use super::Scene;
use super::block::{BLOCK_BYTES, Name, sign};
use super::buffer::Buffer;
use super::settings::{Crash, CrashTask};
use super::setup::device_bytes;
use super::tally::Tally;
use crate::WorkloadError;
use crate::access::Random;
use crate::console::Line;

/// Bytes of a write.
const WRITE_BYTES: usize = 4096;
/// Bytes read at once when blocks are verified.
const READ_BYTES: usize = 64 << 10;

/// Writes or verifies.
pub fn run(scene: &Scene, crash: &Crash) -> Result<Tally, WorkloadError> {
    let device = &scene.ready.device;
    let wanted = u64::from(crash.blocks) * WRITE_BYTES as u64;
    let bytes = device_bytes(device)?;
    if wanted > bytes {
        return Err(WorkloadError::Lacking {
            what: format!(
                "{} MiB requested, but the disk has {}",
                wanted >> 20,
                bytes >> 20
            ),
        });
    }
    let plan = Plan {
        blocks: crash.blocks,
        seed: scene.settings.seed,
    };
    let upto = match crash.task {
        CrashTask::Write { writes } => {
            scene.phase("write");
            let file = open(device, true, crash.direct);
            let file = file.map_err(WorkloadError::during(device.display()))?;
            write(&file, &plan, writes, crash.batch).map_err(WorkloadError::during(
                format_args!("writing {}", device.display()),
            ))?
        }
        CrashTask::Verify { upto } => upto,
    };
    scene.phase("verify");
    let file = open(device, false, true).map_err(WorkloadError::during(device.display()))?;
    let found = verify(&file, &plan, upto).map_err(WorkloadError::during(format_args!(
        "reading {}",
        device.display()
    )))?;
    Line::new("result")
        .with("name", "crash")
        .with("upto", upto)
        .with("blocks", found.judged)
        .with("newer", found.newer)
        .with("old", found.old)
        .with("torn", found.torn)
        .print();
    let mut tally = found.tally;
    tally.ops = upto.into();
    Ok(tally)
}

fn open(device: &Path, write: bool, direct: bool) -> std::io::Result<File> {
    let mut options = File::options();
    options.read(true).write(write);
    if direct {
        let flags = i32::try_from(OFlags::DIRECT.bits()).expect("a small flag");
        options.custom_flags(flags);
    }
    options.open(device)
}

/// Which write goes where.
struct Plan {
    blocks: u32,
    seed: u32,
}

impl Plan {
    /// The block of write `number`, from 1.
    fn block(&self, number: u32) -> u32 {
        let mixed = u64::from(self.seed) << 32 | u64::from(number);
        let block = Random::new(mixed).below(self.blocks.into());
        u32::try_from(block).expect("below a number of 32 bits")
    }

    /// The name of the first KiB of a block, as write `generation` leaves it.
    fn first(&self, block: u32, generation: u32) -> Name {
        Name {
            file: block,
            number: 0,
            generation,
            seed: self.seed,
        }
    }

    /// The newest write up to `upto` of each block, or 0.
    fn newest(&self, upto: u32) -> Vec<u32> {
        let mut newest = vec![0; self.blocks as usize];
        for number in 1..=upto {
            newest[self.block(number) as usize] = number;
        }
        newest
    }
}

/// Writes, flushes, and reports; returns the number of the last write.
fn write(file: &File, plan: &Plan, writes: Option<u32>, batch: u32) -> std::io::Result<u32> {
    let mut buffer = Buffer::new(WRITE_BYTES);
    let mut random = Random::new(plan.seed.into());
    let last = writes.unwrap_or(u32::MAX);
    let mut number = 0;
    while number < last {
        let size = 1 + random.below(batch.into());
        for _ in 0..size.min(u64::from(last - number)) {
            number += 1;
            let block = plan.block(number);
            sign(&mut buffer, plan.first(block, number));
            file.write_all_at(&buffer, u64::from(block) * WRITE_BYTES as u64)?;
        }
        file.sync_data()?;
        Line::new("flushed").with("upto", number).print();
    }
    Ok(number)
}

/// What is found on the disk.
#[derive(Debug, Default)]
struct BlockCounts {
    /// Blocks that were written and flushed, and so must hold something.
    judged: u64,
    /// Blocks that hold a later write than they must.
    newer: u64,
    old: u64,
    torn: u64,
    tally: Tally,
}

fn verify(file: &File, plan: &Plan, upto: u32) -> std::io::Result<BlockCounts> {
    let newest = plan.newest(upto);
    let mut found = BlockCounts::default();
    let mut buffer = Buffer::new(READ_BYTES);
    let per_read = READ_BYTES / WRITE_BYTES;
    for (first, generations) in (0..).step_by(per_read).zip(newest.chunks(per_read)) {
        let bytes = &mut buffer[..generations.len() * WRITE_BYTES];
        file.read_exact_at(bytes, u64::from(first) * WRITE_BYTES as u64)?;
        found.tally.read_bytes += bytes.len() as u64;
        let blocks = bytes.chunks_exact(WRITE_BYTES);
        for ((block, &least), bytes) in (first..).zip(generations).zip(blocks) {
            found.judge(plan, block, least, bytes);
        }
    }
    Ok(found)
}

impl BlockCounts {
    /// Judges a block that must hold the write `least` or a later one; 0: it may hold anything
    /// that is not a torn write of this run.
    fn judge(&mut self, plan: &Plan, block: u32, least: u32, bytes: &[u8]) {
        let names: Vec<_> = bytes.chunks_exact(BLOCK_BYTES).map(Name::of).collect();
        let ours = |name: &Option<Name>| name.is_some_and(|name| name.seed == plan.seed);
        if least == 0 && !names.iter().any(ours) {
            return;
        }
        self.judged += u64::from(least > 0);
        let generation = names[0].map_or(0, |name| name.generation);
        let first = plan.first(block, generation);
        let is_whole = names
            .iter()
            .zip(0..)
            .all(|(&name, number)| name == Some(Name { number, ..first }));
        if !names.iter().any(ours) {
            // The write is lost whole.
            self.old += 1;
        } else if !is_whole || plan.block(generation) != block {
            self.torn += 1;
        } else if generation < least {
            self.old += 1;
        } else {
            self.newer += u64::from(generation > least);
            return;
        }
        let wrong = names.iter().zip(0..).find(|&(&name, number)| {
            name != Some(Name {
                number,
                ..plan.first(block, least)
            })
        });
        let number = wrong.map_or(0, |(_, number)| number);
        let expected = Name {
            number,
            ..plan.first(block, least)
        };
        self.tally.wrong(
            &bytes[number as usize * BLOCK_BYTES..][..BLOCK_BYTES],
            expected,
            BLOCK_BYTES,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan {
        blocks: 50,
        seed: 3,
    };

    fn written(writes: u32) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(50 * WRITE_BYTES as u64).unwrap();
        assert_eq!(write(&file, &PLAN, Some(writes), 8).unwrap(), writes);
        file
    }

    fn verdict(file: &File, upto: u32) -> (u64, u64, u64) {
        let found = verify(file, &PLAN, upto).unwrap();
        assert_eq!(found.tally.mismatches, found.old + found.torn);
        (found.newer, found.old, found.torn)
    }

    #[test]
    fn what_was_written_is_found() {
        let file = written(40);
        assert_eq!(verdict(&file, 40), (0, 0, 0));
        assert!(verify(&file, &PLAN, 40).unwrap().judged > 20);
        let (newer, old, torn) = verdict(&file, 20);
        assert!(newer > 0 && (old, torn) == (0, 0));
        // Another run's blocks are no concern of this one.
        let other = Plan { seed: 4, ..PLAN };
        assert_eq!(verify(&file, &other, 0).unwrap().tally.mismatches, 0);
    }

    #[test]
    fn what_was_flushed_and_is_not_there_is_found() {
        let file = written(40);
        let (_, old, torn) = verdict(&file, 60);
        assert!(old > 5 && torn == 0, "old {old}, torn {torn}");
    }

    #[test]
    fn a_torn_or_misplaced_block_is_found() {
        let file = written(40);
        let block = PLAN.block(40);
        let at = u64::from(block) * WRITE_BYTES as u64;
        let mut half = [0; 2048];
        sign(&mut half, PLAN.first(block, 7));
        file.write_all_at(&half, at).unwrap();
        assert_eq!(verdict(&file, 40), (0, 0, 1));
        // A block whole in itself, but of another place.
        let mut other = [0; WRITE_BYTES];
        sign(&mut other, PLAN.first((block + 1) % 50, 40));
        file.write_all_at(&other, at).unwrap();
        assert_eq!(verdict(&file, 40), (0, 0, 1));
    }
}
