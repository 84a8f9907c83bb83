//! Everything a file system and the memory management can do to cached pages, in a random order.
//!
//! Each thread has files of its own and a model of them: which signed block lies where, how much of
//! it is left, what is a hole. Contents are never kept, they follow from the model. A step changes
//! or reads a file in one of many ways; a round also presses on memory, and drops caches now and then.
//! At the end all is read once more, and again after unmounting and mounting.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{FallocateFlags, OFlags, fallocate};

use super::block::{BLOCK_BYTES, Name, sign};
use super::buffer::Buffer;
use super::counters::Counters;
use super::settings::{Stress, Swap};
use super::setup::{memory_kib, write};
use super::tally::Tally;
use super::{MOUNT, Scene};
use crate::WorkloadError;
use crate::access::Random;
use crate::clock::Time;
use crate::console::Line;
use crate::sys::{Mapping, trim};

/// Bytes of a transfer at most; direct ones have whole pages of it.
const CHUNK_BYTES: usize = 64 << 10;
const PAGE_BYTES: u64 = 4096;
const BLOCKS_PER_PAGE: u32 = 4;
/// Empty and small files made and removed by a step.
const SMALL_FILES: u32 = 24;
/// Chunks a step reads of the raw device.
const RAW_CHUNKS: u64 = 8;

/// Runs the stress on ext4, from mount to unmount.
pub fn run(scene: &Scene, stress: &Stress) -> Result<Tally, WorkloadError> {
    scene.mount()?;
    let seed = scene.settings.seed;
    let mut threads = Vec::new();
    for nth in 0..stress.threads {
        let directory = Path::new(MOUNT).join(format!("stress{nth}"));
        let device = Some(scene.ready.device.clone());
        let files = Files::new(&directory, device, stress, seed, nth);
        threads.push(files.map_err(WorkloadError::during(directory.display()))?);
    }
    scene.phase("stress");
    let before = Counters::now(&scene.ready.disk)?;
    let start = Time::now();
    let swaps = scene.settings.machine.swap != Swap::None;
    let mut pressure = Pressure::new(seed);
    for round in 0..stress.rounds {
        scene.provoke()?;
        in_parallel(&mut threads, |files| files.steps(stress.steps))?;
        write("/proc/sys/vm/compact_memory", "1")?;
        let mib = match stress.anon_mib {
            Some(mib) => mib,
            None => spare_mib(swaps)?,
        };
        pressure.press(mib);
        if round % 4 == 3 {
            in_parallel(&mut threads, Files::verify_all)?;
            write("/proc/sys/vm/drop_caches", "3")?;
            in_parallel(&mut threads, Files::verify_all)?;
            let directory = File::open(MOUNT).map_err(WorkloadError::during(MOUNT))?;
            match trim(&directory) {
                // A disk without discard.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
                trimmed => drop(trimmed.map_err(WorkloadError::during("fstrim"))?),
            }
        }
        let so_far = total(&threads, &pressure);
        Line::new("result")
            .with("name", "round")
            .with("index", round)
            .with("reads", so_far.read_pages())
            .with("mismatches", so_far.mismatches)
            .print();
    }
    in_parallel(&mut threads, Files::verify_all)?;
    scene.unmount()?;
    scene.mount()?;
    in_parallel(&mut threads, Files::verify_all)?;
    scene.unmount()?;
    let tally = total(&threads, &pressure);
    let line = Line::new("result")
        .with("name", "stress")
        .with("steps", tally.ops)
        .with("reads", tally.read_pages())
        .with("writes", tally.written_pages())
        .with("mismatches", tally.mismatches)
        .with("anon_pages", pressure.pages)
        .with("ms", Time::now().ms_since(start));
    Counters::now(&scene.ready.disk)?
        .told_since(&before, line)
        .print();
    Ok(tally)
}

fn total(threads: &[Files], pressure: &Pressure) -> Tally {
    let mut tally = Tally {
        mismatches: pressure.mismatches,
        ..Tally::default()
    };
    for files in threads {
        tally.add(&files.tally);
    }
    tally
}

fn in_parallel(
    threads: &mut [Files],
    work: impl Fn(&mut Files) -> std::io::Result<()> + Sync,
) -> Result<(), WorkloadError> {
    let result = thread::scope(|scope| {
        let work = &work;
        let (first, others) = threads.split_first_mut().expect("at least one thread");
        let others: Vec<_> = others
            .iter_mut()
            .map(|files| scope.spawn(move || work(files)))
            .collect();
        let first = work(first);
        let others = others
            .into_iter()
            .map(|other| other.join().expect("a thread does not panic"));
        others.fold(first, std::io::Result::and)
    });
    result.map_err(WorkloadError::during("using the files"))
}

/// Memory that pressure may take without ending the machine, in MiB.
fn spare_mib(swaps: bool) -> Result<u64, WorkloadError> {
    let available = memory_kib("MemAvailable")?;
    let kib = if swaps {
        available / 4 * 3 + memory_kib("SwapFree")? / 2
    } else {
        available / 2
    };
    Ok(kib >> 10)
}

/// Anonymous memory, taken, verified and given back.
struct Pressure {
    random: Random,
    pages: u64,
    mismatches: u64,
}

impl Pressure {
    fn new(seed: u32) -> Self {
        Self {
            random: Random::new(u64::from(seed) ^ 0x616e_6f6e),
            pages: 0,
            mismatches: 0,
        }
    }

    /// Writes so many MiB, then reads them twice: in order and backwards.
    fn press(&mut self, mib: u64) {
        let bytes = usize::try_from(mib << 20).expect("a 64-bit machine");
        let mut memory = vec![0u8; bytes];
        let (pages, _) = memory.as_chunks_mut::<4096>();
        let key = self.random.next();
        let word = |nth: usize| (nth as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ key;
        for (nth, page) in pages.iter_mut().enumerate() {
            let word = word(nth).to_ne_bytes();
            page[..8].copy_from_slice(&word);
            page[4088..].copy_from_slice(&word);
        }
        let wrong = |(nth, page): &(usize, &mut [u8; 4096])| {
            let word = word(*nth).to_ne_bytes();
            page[..8] != word || page[4088..] != word
        };
        self.mismatches += pages.iter_mut().enumerate().filter(wrong).count() as u64;
        self.mismatches += pages.iter_mut().enumerate().rev().filter(wrong).count() as u64;
        self.pages += pages.len() as u64;
    }
}

/// What a block of a file holds: the first `len` bytes of a signed block, then zeros.
#[derive(Debug, Clone, Copy, Default)]
struct Piece {
    /// The file it was written to first; a copy keeps it.
    file: u32,
    generation: u32,
    /// 0 for a hole.
    len: u16,
}

/// A file as it should be.
#[derive(Debug, Clone, Default)]
struct Model {
    /// Length in bytes.
    len: u64,
    /// One for each block begun.
    pieces: Vec<Piece>,
}

impl Model {
    /// Cuts off or adds zeros.
    fn set_len(&mut self, len: u64) {
        self.pieces.resize(blocks_of(len), Piece::default());
        let within = len % BLOCK_BYTES as u64;
        if within > 0
            && let Some(last) = self.pieces.last_mut()
        {
            let within = u16::try_from(within).expect("under a block");
            last.len = last.len.min(within);
        }
        self.len = len;
    }

    /// Blocks from `first` on were written whole.
    fn write(&mut self, first: u32, blocks: u32, file: u32, generation: u32) {
        let end = u64::from(first + blocks) * BLOCK_BYTES as u64;
        if end > self.len {
            self.set_len(end);
        }
        self.pieces[first as usize..][..blocks as usize].fill(Piece {
            file,
            generation,
            len: u16::try_from(BLOCK_BYTES).expect("a small number"),
        });
    }

    fn punch(&mut self, first: u32, blocks: u32) {
        let pieces = self.pieces.iter_mut().skip(first as usize);
        pieces
            .take(blocks as usize)
            .for_each(|piece| *piece = Piece::default());
    }

    /// Verifies what was read from block `first` on.
    fn verify(&self, tally: &mut Tally, first: u32, bytes: &[u8], seed: u32) {
        for (number, bytes) in (first..).zip(bytes.chunks(BLOCK_BYTES)) {
            // Behind the end, a mapped page holds zeros.
            let piece = self
                .pieces
                .get(number as usize)
                .copied()
                .unwrap_or_default();
            let name = Name {
                file: piece.file,
                number,
                generation: piece.generation,
                seed,
            };
            tally.verify(bytes, name, piece.len.into());
        }
    }
}

fn blocks_of(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(BLOCK_BYTES as u64)).expect("a 64-bit machine")
}

/// The files of one thread.
struct Files {
    directory: PathBuf,
    /// The disk below, which is read raw.
    device: Option<PathBuf>,
    models: Vec<Model>,
    /// Largest length of a file, in blocks.
    blocks_max: u32,
    random: Random,
    /// The last write.
    generation: u32,
    seed: u32,
    /// Number of the thread; distinguishes its files from others'.
    thread: u32,
    buffer: Buffer,
    tally: Tally,
}

impl Files {
    fn new(
        directory: &Path,
        device: Option<PathBuf>,
        stress: &Stress,
        seed: u32,
        thread: u32,
    ) -> std::io::Result<Self> {
        fs::create_dir_all(directory)?;
        let mut files = Self {
            directory: directory.into(),
            device,
            models: vec![Model::default(); stress.files as usize],
            blocks_max: stress.file_kib / BLOCKS_PER_PAGE * BLOCKS_PER_PAGE,
            random: Random::new(u64::from(seed) << 32 | u64::from(thread)),
            generation: 0,
            seed,
            thread,
            buffer: Buffer::new(CHUNK_BYTES),
            tally: Tally::default(),
        };
        for file in 0..files.models.len() {
            // What an earlier run left.
            match fs::remove_file(files.path(file)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => files.write_all(file)?,
            }
        }
        Ok(files)
    }

    fn path(&self, file: usize) -> PathBuf {
        self.directory.join(file.to_string())
    }

    fn open(&self, file: usize, direct: bool) -> std::io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        if direct {
            options.custom_flags(direct_flag());
        }
        options.open(self.path(file))
    }

    fn below(&mut self, bound: u32) -> u32 {
        let drawn = self.random.below(bound.into());
        u32::try_from(drawn).expect("below a number of 32 bits")
    }

    /// Takes steps, each of a kind drawn anew.
    fn steps(&mut self, steps: u64) -> std::io::Result<()> {
        for _ in 0..steps {
            let file = self.below(u32::try_from(self.models.len()).expect("few files")) as usize;
            match self.below(20) {
                0..=3 => self.read(file, false)?,
                4..=5 => self.read(file, true)?,
                6..=7 => self.write(file, false)?,
                8..=9 => self.write(file, true)?,
                10 => self.read_mapped(file)?,
                11 => self.write_mapped(file)?,
                12 => self.truncate(file)?,
                13 => self.punch(file)?,
                14 => self.write_all(file)?,
                15 => self.replace(file)?,
                16 => self.copy(file)?,
                17 => self.read_raw()?,
                18 => self.small_files()?,
                _ => self.open(file, false)?.sync_data()?,
            }
            self.tally.ops += 1;
        }
        Ok(())
    }

    /// A range of blocks: of whole pages if it is for direct I/O.
    fn range(&mut self, direct: bool) -> (u32, u32) {
        let unit = if direct { BLOCKS_PER_PAGE } else { 1 };
        let units = self.blocks_max / unit;
        let first = self.below(units);
        let chunk = u32::try_from(CHUNK_BYTES / BLOCK_BYTES).expect("a small number") / unit;
        let len = 1 + self.below(chunk.min(units - first));
        (first * unit, len * unit)
    }

    fn read(&mut self, file: usize, direct: bool) -> std::io::Result<()> {
        let (first, blocks) = self.range(direct);
        let from = self.open(file, direct)?;
        self.read_range(&from, file, first, blocks)
    }

    fn read_range(
        &mut self,
        from: &File,
        file: usize,
        first: u32,
        blocks: u32,
    ) -> std::io::Result<()> {
        let bytes = &mut self.buffer[..blocks as usize * BLOCK_BYTES];
        let start = u64::from(first) * BLOCK_BYTES as u64;
        let len = from.read_at(bytes, start)?;
        let model = &self.models[file];
        let expected = model.len.saturating_sub(start).min(bytes.len() as u64);
        if len as u64 != expected {
            // Only the end of the file may cut a read short, and must.
            self.tally.mismatches += 1;
            Line::new("MISMATCH")
                .with("page", first / BLOCKS_PER_PAGE)
                .with("file", file)
                .with("is", "length")
                .with("expected", format_args!("{expected:#x}"))
                .with("found", format_args!("{len:#x}"))
                .print();
        }
        model.verify(&mut self.tally, first, &bytes[..len], self.seed);
        Ok(())
    }

    /// Signs a range in the buffer and in the model.
    fn sign(&mut self, file: usize, first: u32, blocks: u32) {
        self.generation += 1;
        // Files of all threads have numbers of their own.
        let number = self.thread << 16 | u32::try_from(file).expect("few files");
        let name = Name {
            file: number,
            number: first,
            generation: self.generation,
            seed: self.seed,
        };
        let bytes = &mut self.buffer[..blocks as usize * BLOCK_BYTES];
        sign(bytes, name);
        self.models[file].write(first, blocks, number, self.generation);
        self.tally.written_bytes += bytes.len() as u64;
    }

    fn write(&mut self, file: usize, direct: bool) -> std::io::Result<()> {
        let (first, blocks) = self.range(direct);
        let to = self.open(file, direct)?;
        self.write_range(&to, file, first, blocks)
    }

    fn write_range(
        &mut self,
        to: &File,
        file: usize,
        first: u32,
        blocks: u32,
    ) -> std::io::Result<()> {
        self.sign(file, first, blocks);
        let bytes = &self.buffer[..blocks as usize * BLOCK_BYTES];
        to.write_all_at(bytes, u64::from(first) * BLOCK_BYTES as u64)
    }

    /// Overwrites from the start to a random end; the rest stays.
    fn write_all(&mut self, file: usize) -> std::io::Result<()> {
        let to = self.open(file, false)?;
        let end = 1 + self.below(self.blocks_max);
        let chunk = CHUNK_BYTES / BLOCK_BYTES;
        for first in (0..end).step_by(chunk) {
            let blocks = (end - first).min(u32::try_from(chunk).expect("a small number"));
            self.write_range(&to, file, first, blocks)?;
        }
        Ok(())
    }

    /// Whole pages of the file, and bytes of it up to `end`, for a mapping.
    fn mapped(&mut self, file: usize) -> std::io::Result<Option<Mapping>> {
        let len = self.models[file].len.next_multiple_of(PAGE_BYTES);
        if len == 0 {
            return Ok(None);
        }
        let len = usize::try_from(len).expect("a 64-bit machine");
        Mapping::new(&self.open(file, false)?, len).map(Some)
    }

    fn read_mapped(&mut self, file: usize) -> std::io::Result<()> {
        let (first, blocks) = self.range(false);
        let Some(mapping) = self.mapped(file)? else {
            return Ok(());
        };
        let pages_end = self.models[file].len.next_multiple_of(PAGE_BYTES);
        let blocks_end = u32::try_from(blocks_of(pages_end)).expect("a small file");
        let end = (first + blocks).min(blocks_end);
        if first < end {
            let bytes = &mut self.buffer[..(end - first) as usize * BLOCK_BYTES];
            mapping.read(first as usize * BLOCK_BYTES, bytes);
            self.models[file].verify(&mut self.tally, first, bytes, self.seed);
        }
        Ok(())
    }

    fn write_mapped(&mut self, file: usize) -> std::io::Result<()> {
        let (first, blocks) = self.range(false);
        let Some(mut mapping) = self.mapped(file)? else {
            return Ok(());
        };
        // Whole blocks inside the file: a mapping does not make it longer.
        let inside = self.models[file].len / BLOCK_BYTES as u64;
        let end = u64::from(first + blocks).min(inside);
        let Some(blocks) = end.checked_sub(first.into()).filter(|&blocks| blocks > 0) else {
            return Ok(());
        };
        let blocks = u32::try_from(blocks).expect("at most what was drawn");
        self.sign(file, first, blocks);
        mapping.write(
            first as usize * BLOCK_BYTES,
            &self.buffer[..blocks as usize * BLOCK_BYTES],
        );
        Ok(())
    }

    /// Cuts the file at any byte; then, mostly, makes it longer again.
    fn truncate(&mut self, file: usize) -> std::io::Result<()> {
        let to = self.open(file, false)?;
        for grows in [false, true] {
            let bound = if grows {
                u64::from(self.blocks_max) * BLOCK_BYTES as u64
            } else {
                self.models[file].len
            };
            if grows && self.below(4) == 0 {
                break;
            }
            let len = self.random.below(bound + 1);
            let len = if grows {
                len.max(self.models[file].len)
            } else {
                len
            };
            to.set_len(len)?;
            self.models[file].set_len(len);
        }
        Ok(())
    }

    fn punch(&mut self, file: usize) -> std::io::Result<()> {
        let (first, blocks) = self.range(false);
        let to = self.open(file, false)?;
        let (start, len) = (u64::from(first) << 10, u64::from(blocks) << 10);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&to, flags, start, len)?;
        self.models[file].punch(first, blocks);
        Ok(())
    }

    /// Unlinks the file while it is open, and begins a new one of that name with a hole in front.
    fn replace(&mut self, file: usize) -> std::io::Result<()> {
        let old = self.open(file, false)?;
        fs::remove_file(self.path(file))?;
        let (first, blocks) = self.range(false);
        self.read_range(&old, file, first, blocks)?;
        drop(old);
        self.models[file] = Model::default();
        self.write(file, false)
    }

    /// Overwrites another file with a copy, by the kernel or through the buffer.
    fn copy(&mut self, from: usize) -> std::io::Result<()> {
        let to = (from + 1) % self.models.len();
        let mut source = self.open(from, false)?;
        let mut target = self.open(to, false)?;
        target.set_len(0)?;
        self.models[to] = Model::default();
        if self.below(2) == 0 {
            std::io::copy(&mut source, &mut target)?;
        } else {
            let mut left = self.models[from].len;
            while left > 0 {
                let len = left.min(CHUNK_BYTES as u64);
                let bytes = &mut self.buffer[..usize::try_from(len).expect("a chunk")];
                source.read_exact(bytes)?;
                target.write_all(bytes)?;
                left -= len;
            }
        }
        self.tally.written_bytes += self.models[from].len;
        self.models[to] = self.models[from].clone();
        Ok(())
    }

    /// Reads the device below, through the page cache or directly; its contents are unknown.
    fn read_raw(&mut self) -> std::io::Result<()> {
        let Some(path) = self.device.clone() else {
            return Ok(());
        };
        let mut options = File::options();
        options.read(true);
        if self.below(2) == 0 {
            options.custom_flags(direct_flag());
        }
        let mut device = options.open(path)?;
        let chunks = device.seek(SeekFrom::End(0))? / CHUNK_BYTES as u64;
        let first = self.random.below(chunks.max(1));
        for chunk in first..chunks.min(first + RAW_CHUNKS) {
            device.read_exact_at(&mut self.buffer, chunk * CHUNK_BYTES as u64)?;
        }
        Ok(())
    }

    /// Creates a directory of small files, reads them, removes them.
    fn small_files(&mut self) -> std::io::Result<()> {
        let directory = self.directory.join("small");
        fs::create_dir(&directory)?;
        self.generation += 1;
        let name = |number| Name {
            file: self.thread << 16 | 0xffff,
            number,
            generation: self.generation,
            seed: self.seed,
        };
        for number in 0..SMALL_FILES {
            let len = number as usize * 40;
            fs::write(
                directory.join(number.to_string()),
                &name(number).block()[..len],
            )?;
        }
        for number in 0..SMALL_FILES {
            let bytes = fs::read(directory.join(number.to_string()))?;
            self.tally.verify(&bytes, name(number), BLOCK_BYTES);
        }
        fs::remove_dir_all(&directory)
    }

    /// Reads every file whole.
    fn verify_all(&mut self) -> std::io::Result<()> {
        let chunk = u32::try_from(CHUNK_BYTES / BLOCK_BYTES).expect("a small number");
        for file in 0..self.models.len() {
            let from = self.open(file, false)?;
            for first in (0..=self.blocks_max).step_by(chunk as usize) {
                self.read_range(&from, file, first, chunk)?;
            }
        }
        Ok(())
    }
}

fn direct_flag() -> i32 {
    i32::try_from(OFlags::DIRECT.bits()).expect("a small flag")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRESS: Stress = Stress {
        rounds: 1,
        steps: 2000,
        threads: 1,
        files: 5,
        file_kib: 301,
        anon_mib: None,
    };

    fn files(directory: &Path, seed: u32) -> Files {
        Files::new(directory, None, &STRESS, seed, 0).unwrap()
    }

    #[test]
    fn files_are_as_the_model_says_after_many_steps() {
        // Direct I/O needs a file system of a disk, which the directory of this crate has.
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for seed in 0..3 {
            let mut files = files(directory.path(), seed);
            files.steps(STRESS.steps).unwrap();
            files.verify_all().unwrap();
            assert_eq!(files.tally.mismatches, 0, "seed {seed}");
            assert_eq!(files.tally.ops, STRESS.steps);
        }
    }

    #[test]
    fn a_file_that_differs_from_its_model_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let mut files = files(directory.path(), 1);
        files.write_all(2).unwrap();
        files.verify_all().unwrap();
        assert_eq!(files.tally.mismatches, 0);
        // Bytes that should have been cut off.
        let len = files.models[2].len;
        files.models[2].set_len(500);
        files.models[2].set_len(len);
        files.verify_all().unwrap();
        let wrong = files.tally.mismatches;
        assert_eq!(wrong, blocks_of(len) as u64);
        // A file that is shorter than it should be: one read is too short, others are missing whole.
        File::options()
            .write(true)
            .open(files.path(3))
            .unwrap()
            .set_len(0)
            .unwrap();
        files.models[2] = Model::default();
        fs::write(files.path(2), "").unwrap();
        files.verify_all().unwrap();
        assert!(files.tally.mismatches > wrong);
    }

    #[test]
    fn anonymous_memory_stays_as_it_was_written() {
        let mut pressure = Pressure::new(1);
        pressure.press(3);
        assert_eq!((pressure.pages, pressure.mismatches), (768, 0));
    }
}
