//! Signed files read and overwritten whole: the micro workloads of \[LS07\] §6.1.
//!
//! A visit reads a file in chunks of 64 KiB and verifies each of its blocks, or overwrites it with
//! the next generation. Before each round the page cache may be emptied, as \[M08\] does before each
//! compilation of its table 1. The same on equal pieces of an encrypted device, through its page cache,
//! shows that data decrypted in place is never taken for data of the disk.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::counters::Counters;
use super::dm::MappedDevice;
use super::files::{Files, Place};
use super::flush;
use super::settings::{Order, Signed};
use super::setup::device_bytes;
use super::tally::Tally;
use super::{MOUNT, Scene};
use crate::WorkloadError;
use crate::access::{Random, Scatter, Zipf};
use crate::clock::Time;
use crate::console::Line;
use crate::sys::trim;

/// How much more popular the popular tenth is.
const CLASS_FACTOR: u64 = 10;

/// Runs the workload on files.
pub fn run(scene: &Scene, signed: &Signed) -> Result<Tally, WorkloadError> {
    scene.mount()?;
    let directory = scene.directory("signed")?;
    let tally = visit_all(scene, signed, Place::Directory(directory.clone()))?;
    if signed.trim {
        // What is in a cache behind the page cache then is of no use afterwards.
        flush::flush(scene, signed.flush)?;
        scene.phase("trim");
        discard(&directory).map_err(WorkloadError::during("deleting and trimming"))?;
    }
    scene.unmount()?;
    Ok(tally)
}

/// Deletes the files and has the file system discard their blocks.
fn discard(directory: &Path) -> io::Result<()> {
    fs::remove_dir_all(directory)?;
    // A block is free when the journal says so on disk.
    rustix::fs::sync();
    let bytes = trim(&File::open(MOUNT)?)?;
    Line::new("result")
        .with("name", "trim")
        .with("pages", bytes / 4096)
        .print();
    Ok(())
}

/// Runs the workload on an encrypted device over the disk; what the disk held is lost.
pub fn run_encrypted(scene: &Scene, pieces: &Signed, cipher: &str) -> Result<Tally, WorkloadError> {
    let lower = &scene.ready.device;
    let bytes = device_bytes(lower)?;
    let wanted = u64::from(pieces.files) * u64::from(pieces.file_kib) * 1024;
    if wanted > bytes {
        return Err(WorkloadError::Lacking {
            what: format!(
                "{} MiB requested, but the disk has {}",
                wanted >> 20,
                bytes >> 20
            ),
        });
    }
    // Two AES keys of 256 bits, as xts takes them: the first is not equal to the second.
    let key: String = (0..32).map(|nth| format!("{nth:02x}")).collect();
    let tweak = key.chars().rev().collect::<String>();
    let table = format!("{cipher} {key}{tweak} 0 {} 0", lower.display());
    let mapped = MappedDevice::new("crypt", bytes / 512, "crypt", &table).map_err(
        WorkloadError::during(format_args!("making a device of {cipher}")),
    )?;
    let tally = visit_all(scene, pieces, Place::Device(mapped.path.clone()))?;
    mapped
        .remove()
        .map_err(WorkloadError::during("removing the encrypted device"))?;
    Ok(tally)
}

fn visit_all(scene: &Scene, signed: &Signed, place: Place) -> Result<Tally, WorkloadError> {
    flush::prepare(signed.flush)?;
    let mut visitor = Visitor::new(signed, place, scene.settings.seed);
    scene.phase("populate");
    let populating = visitor.files.populate();
    populating.map_err(WorkloadError::during("writing the files"))?;
    let populated = visitor.files.tally;
    for (phase, rounds) in [("warmup", signed.warmup), ("measured", signed.rounds)] {
        scene.phase(phase);
        let before = Counters::now(&scene.ready.disk)?;
        let (tally, start) = (visitor.files.tally, Time::now());
        for _ in 0..rounds {
            scene.provoke()?;
            flush::flush(scene, signed.flush)?;
            visitor
                .round()
                .map_err(WorkloadError::during("visiting the files"))?;
        }
        let done = visitor.files.tally.since(&tally);
        let line = Line::new("result")
            .with("name", "files")
            .with("phase", phase)
            .with("visits", done.ops)
            .with("reads", done.read_pages())
            .with("writes", done.written_pages())
            .with("mismatches", done.mismatches)
            .with("ms", Time::now().ms_since(start));
        Counters::now(&scene.ready.disk)?
            .told_since(&before, line)
            .print();
    }
    Ok(visitor.files.tally.since(&populated))
}

/// Who visits the files.
struct Visitor {
    files: Files,
    draw: Draw,
    write_percent: u64,
    random: Random,
}

/// What draws the next file.
enum Draw {
    Sequential { next: u64 },
    Random,
    Zipf { law: Zipf, scatter: Scatter },
    Class { popular: u64, scatter: Scatter },
}

impl Visitor {
    fn new(signed: &Signed, place: Place, seed: u32) -> Self {
        let files = u64::from(signed.files);
        let mut random = Random::new(seed.into());
        let draw = match signed.order {
            Order::Sequential => Draw::Sequential { next: 0 },
            Order::Random => Draw::Random,
            Order::Zipf { alpha } => Draw::Zipf {
                law: Zipf::new(files, alpha),
                scatter: Scatter::new(files, random.next()),
            },
            Order::Class => Draw::Class {
                popular: files.div_ceil(10),
                scatter: Scatter::new(files, random.next()),
            },
        };
        Self {
            files: Files::new(place, 0, signed.files, signed.file_kib, seed),
            draw,
            write_percent: signed.write_percent,
            random,
        }
    }

    /// As many visits as there are files.
    fn round(&mut self) -> std::io::Result<()> {
        for _ in 0..self.files.len() {
            let file = usize::try_from(self.next()).expect("a 64-bit machine");
            if self.write_percent > 0 && self.random.below(100) < self.write_percent {
                self.files.overwrite(file)?;
            } else {
                self.files.read(file)?;
            }
            self.files.tally.ops += 1;
        }
        Ok(())
    }

    fn next(&mut self) -> u64 {
        let files = self.files.len() as u64;
        match &mut self.draw {
            Draw::Sequential { next } => {
                let file = *next;
                *next = (file + 1) % files;
                file
            }
            Draw::Random => self.random.below(files),
            Draw::Zipf { law, scatter } => scatter.place(law.draw(&mut self.random)),
            Draw::Class { popular, scatter } => {
                let weight = *popular * CLASS_FACTOR;
                let ticket = self.random.below(weight + files - *popular);
                let rank = match ticket.checked_sub(weight) {
                    None => ticket / CLASS_FACTOR,
                    Some(ticket) => *popular + ticket,
                };
                scatter.place(rank)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::settings::Flush;
    use super::*;

    fn visitor(directory: &Path, order: Order, write_percent: u64) -> Visitor {
        let signed = Signed {
            files: 20,
            file_kib: 70,
            order,
            write_percent,
            warmup: 0,
            rounds: 1,
            flush: Flush::No,
            trim: false,
        };
        let mut visitor = Visitor::new(&signed, Place::Directory(directory.into()), 5);
        visitor.files.populate().unwrap();
        visitor
    }

    #[test]
    fn files_are_read_as_they_were_written() {
        let directory = tempfile::tempdir().unwrap();
        let mut visitor = visitor(directory.path(), Order::Random, 50);
        for _ in 0..5 {
            visitor.round().unwrap();
        }
        let tally = visitor.files.tally;
        assert_eq!((tally.ops, tally.mismatches), (100, 0));
        // 20 files were written to begin with.
        assert_eq!(tally.read_bytes + tally.written_bytes, 120 * (70 << 10));
        assert!(tally.read_bytes > 0 && tally.written_bytes > 20 * (70 << 10));
    }

    #[test]
    fn a_tenth_of_the_files_is_ten_times_as_popular() {
        let directory = tempfile::tempdir().unwrap();
        let mut visitor = visitor(directory.path(), Order::Class, 0);
        let mut visits = vec![0u32; 20];
        let draws = 38_000;
        for _ in 0..draws {
            visits[usize::try_from(visitor.next()).unwrap()] += 1;
        }
        visits.sort_unstable();
        // 2 files of weight 10 and 18 of weight 1: 10000 and 1000 visits.
        assert!(visits[17] < 1200 && visits[0] > 800, "{visits:?}");
        assert!(visits[18] > 9500 && visits[19] < 10_500, "{visits:?}");
    }

    #[test]
    fn files_in_order_come_around() {
        let directory = tempfile::tempdir().unwrap();
        let mut visitor = visitor(directory.path(), Order::Sequential, 0);
        let drawn: Vec<_> = (0..22).map(|_| visitor.next()).collect();
        assert!(drawn.into_iter().eq((0..20).chain(0..2)));
    }
}
