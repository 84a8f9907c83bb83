//! Signed files read and overwritten whole: the micro workloads of \[LS07\] §6.1.
//!
//! A visit reads a file in chunks of 64 KiB and verifies each of its blocks, or overwrites it with
//! the next generation. The same on equal pieces of an encrypted device, through its page cache,
//! shows that data decrypted in place is never taken for data of the disk.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::block::{BLOCK_BYTES, Name, sign};
use super::counters::Counters;
use super::dm::Mapped;
use super::settings::{Order, Signed};
use super::setup::device_bytes;
use super::tally::{Tally, verify_blocks};
use super::{MOUNT, Scene};
use crate::WorkloadError;
use crate::access::{Random, Scatter, Zipf};
use crate::clock::Time;
use crate::console::Line;

const CHUNK_BYTES: usize = 64 << 10;
/// How much more popular the popular tenth is.
const CLASS_FACTOR: u64 = 10;

/// Runs the workload on files.
pub fn run(scene: &Scene, signed: &Signed) -> Result<Tally, WorkloadError> {
    scene.mount()?;
    let folder = Path::new(MOUNT).join("signed");
    fs::create_dir_all(&folder).map_err(WorkloadError::during(folder.display()))?;
    let tally = visit_all(scene, signed, Place::Folder(folder))?;
    scene.unmount()?;
    Ok(tally)
}

/// Runs the workload on an encrypted device over the disk; what the disk held is lost.
pub fn run_encrypted(scene: &Scene, pieces: &Signed, cipher: &str) -> Result<Tally, WorkloadError> {
    let lower = &scene.ready.device;
    let bytes = device_bytes(lower)?;
    let wanted = u64::from(pieces.files) * u64::from(pieces.file_kib) * 1024;
    if wanted > bytes {
        return Err(WorkloadError::Lacking {
            what: format!(
                "{} MiB asked for, the disk has {}",
                wanted >> 20,
                bytes >> 20
            ),
        });
    }
    // Two AES keys of 256 bits, as xts takes them: the first is not equal to the second.
    let key: String = (0..32).map(|nth| format!("{nth:02x}")).collect();
    let tweak = key.chars().rev().collect::<String>();
    let table = format!("{cipher} {key}{tweak} 0 {} 0", lower.display());
    let mapped = Mapped::new("crypt", bytes / 512, "crypt", &table).map_err(
        WorkloadError::during(format_args!("making a device of {cipher}")),
    )?;
    let tally = visit_all(scene, pieces, Place::Device(mapped.path.clone()))?;
    mapped
        .remove()
        .map_err(WorkloadError::during("removing the encrypted device"))?;
    Ok(tally)
}

fn visit_all(scene: &Scene, signed: &Signed, place: Place) -> Result<Tally, WorkloadError> {
    let mut files = Files::new(signed, place, scene.settings.seed);
    scene.phase("populate");
    files
        .populate()
        .map_err(WorkloadError::during("writing the files"))?;
    let populated = files.tally;
    for (phase, rounds) in [("warmup", signed.warmup), ("measured", signed.rounds)] {
        scene.phase(phase);
        let before = Counters::now(&scene.ready.disk)?;
        let (tally, start) = (files.tally, Time::now());
        for _ in 0..rounds {
            scene.provoke()?;
            files
                .round()
                .map_err(WorkloadError::during("visiting the files"))?;
        }
        let done = files.tally.since(&tally);
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
    Ok(files.tally.since(&populated))
}

/// Where the files lie.
enum Place {
    /// Files by number.
    Folder(PathBuf),
    /// Pieces of a block device, one after the other.
    Device(PathBuf),
}

/// The files, and who visits them.
struct Files {
    place: Place,
    file_bytes: usize,
    /// Generation of each file.
    generations: Vec<u32>,
    draw: Draw,
    write_percent: u64,
    random: Random,
    seed: u32,
    chunk: Vec<u8>,
    tally: Tally,
}

/// What draws the next file.
enum Draw {
    Sequential { next: u64 },
    Random,
    Zipf { law: Zipf, scatter: Scatter },
    Class { popular: u64, scatter: Scatter },
}

impl Files {
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
            place,
            file_bytes: signed.file_kib as usize * BLOCK_BYTES,
            generations: vec![0; signed.files as usize],
            draw,
            write_percent: signed.write_percent,
            random,
            seed,
            chunk: vec![0; CHUNK_BYTES],
            tally: Tally::default(),
        }
    }

    fn populate(&mut self) -> std::io::Result<()> {
        for file in 0..self.generations.len() {
            self.write(file)?;
        }
        rustix::fs::sync();
        Ok(())
    }

    /// As many visits as there are files.
    fn round(&mut self) -> std::io::Result<()> {
        for _ in 0..self.generations.len() {
            let file = usize::try_from(self.next()).expect("a 64-bit machine");
            if self.write_percent > 0 && self.random.below(100) < self.write_percent {
                self.generations[file] += 1;
                self.write(file)?;
            } else {
                self.read(file)?;
            }
            self.tally.ops += 1;
        }
        Ok(())
    }

    fn next(&mut self) -> u64 {
        let files = self.generations.len() as u64;
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

    /// The name of a file's first block.
    fn first(&self, file: usize) -> Name {
        Name {
            file: u32::try_from(file).expect("as many as the settings say"),
            number: 0,
            generation: self.generations[file],
            seed: self.seed,
        }
    }

    fn open(&self, file: usize, write: bool) -> std::io::Result<File> {
        let mut options = File::options();
        options.read(!write).write(write);
        match &self.place {
            Place::Folder(folder) => options.create(write).open(folder.join(file.to_string())),
            Place::Device(path) => {
                let mut device = options.open(path)?;
                device.seek(SeekFrom::Start(file as u64 * self.file_bytes as u64))?;
                Ok(device)
            }
        }
    }

    fn write(&mut self, file: usize) -> std::io::Result<()> {
        let mut to = self.open(file, true)?;
        let mut name = self.first(file);
        let mut left = self.file_bytes;
        while left > 0 {
            let chunk = &mut self.chunk[..left.min(CHUNK_BYTES)];
            sign(chunk, name);
            to.write_all(chunk)?;
            left -= chunk.len();
            name.number += blocks(chunk.len());
            self.tally.written_bytes += chunk.len() as u64;
        }
        Ok(())
    }

    fn read(&mut self, file: usize) -> std::io::Result<()> {
        let mut from = self.open(file, false)?;
        let mut name = self.first(file);
        let mut left = self.file_bytes;
        while left > 0 {
            let chunk = &mut self.chunk[..left.min(CHUNK_BYTES)];
            from.read_exact(chunk)?;
            verify_blocks(&mut self.tally, chunk, name);
            left -= chunk.len();
            name.number += blocks(chunk.len());
        }
        Ok(())
    }
}

fn blocks(bytes: usize) -> u32 {
    u32::try_from(bytes / BLOCK_BYTES).expect("at most a chunk")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    fn files(folder: &Path, order: Order, write_percent: u64) -> Files {
        let signed = Signed {
            files: 20,
            file_kib: 70,
            order,
            write_percent,
            warmup: 0,
            rounds: 1,
        };
        let mut files = Files::new(&signed, Place::Folder(folder.into()), 5);
        files.populate().unwrap();
        files
    }

    #[test]
    fn files_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = files(folder.path(), Order::Random, 50);
        for _ in 0..5 {
            files.round().unwrap();
        }
        let tally = files.tally;
        assert_eq!((tally.ops, tally.mismatches), (100, 0));
        // 20 files were written to begin with.
        assert_eq!(tally.read_bytes + tally.written_bytes, 120 * (70 << 10));
        assert!(tally.read_bytes > 0 && tally.written_bytes > 20 * (70 << 10));
    }

    #[test]
    fn a_changed_byte_and_an_old_block_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = files(folder.path(), Order::Sequential, 0);
        let path = |number: u32| folder.path().join(number.to_string());
        let file = File::options().write(true).open(path(3)).unwrap();
        file.write_all_at(b"x", 65 << 10).unwrap();
        files.generations[4] = 1;
        files.round().unwrap();
        assert_eq!(files.tally.mismatches, 1 + 70);
    }

    #[test]
    fn a_tenth_of_the_files_is_ten_times_as_popular() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = files(folder.path(), Order::Class, 0);
        let mut visits = vec![0u32; 20];
        let draws = 38_000;
        for _ in 0..draws {
            visits[usize::try_from(files.next()).unwrap()] += 1;
        }
        visits.sort_unstable();
        // 2 files of weight 10 and 18 of weight 1: 10000 and 1000 visits.
        assert!(visits[17] < 1200 && visits[0] > 800, "{visits:?}");
        assert!(visits[18] > 9500 && visits[19] < 10_500, "{visits:?}");
    }

    #[test]
    fn files_in_order_come_around() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = files(folder.path(), Order::Sequential, 0);
        let drawn: Vec<_> = (0..22).map(|_| files.next()).collect();
        assert!(drawn.into_iter().eq((0..20).chain(0..2)));
    }
}
