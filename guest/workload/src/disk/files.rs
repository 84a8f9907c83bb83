//! Signed files, or equal pieces of a block device: written whole, read whole or in part, verified.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;

use rustix::fs::{Advice, fadvise};

use super::block::{BLOCK_BYTES, Name, sign};
use super::tally::{Tally, verify_blocks};

const CHUNK_BYTES: usize = 64 << 10;

/// Where the files lie.
pub enum Place {
    /// Files by number.
    Directory(PathBuf),
    /// Pieces of a block device, one after the other.
    Device(PathBuf),
}

/// Files of one size.
pub struct Files {
    place: Place,
    /// Number of the first one.
    first: u32,
    file_bytes: usize,
    /// Generation of each file.
    generations: Vec<u32>,
    seed: u32,
    chunk: Vec<u8>,
    pub tally: Tally,
}

impl Files {
    /// Describes `count` files of `file_kib` KiB each, numbered from `first` on; none is written yet.
    pub fn new(place: Place, first: u32, count: u32, file_kib: u32, seed: u32) -> Self {
        Self {
            place,
            first,
            file_bytes: file_kib as usize * BLOCK_BYTES,
            generations: vec![0; count as usize],
            seed,
            chunk: vec![0; CHUNK_BYTES],
            tally: Tally::default(),
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.generations.len()
    }

    /// Bytes of each.
    pub fn file_bytes(&self) -> usize {
        self.file_bytes
    }

    /// Writes all of them.
    pub fn populate(&mut self) -> std::io::Result<()> {
        for file in 0..self.len() {
            self.write(file)?;
        }
        rustix::fs::sync();
        Ok(())
    }

    /// Writes the next generation of a file.
    pub fn overwrite(&mut self, file: usize) -> std::io::Result<()> {
        self.generations[file] += 1;
        self.write(file)
    }

    /// Reads a file in chunks of 64 KiB and verifies each of its blocks.
    pub fn read(&mut self, file: usize) -> std::io::Result<()> {
        let mut from = self.open(file, false)?;
        let mut name = self.first_block(file);
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

    /// Has the kernel drop a file's pages from memory.
    pub fn drop(&self, file: usize) -> std::io::Result<()> {
        Ok(fadvise(self.open(file, false)?, 0, None, Advice::DontNeed)?)
    }

    /// Reads and verifies `len` bytes of a file, and has the kernel read nothing beside them. `at`
    /// and `len`, at most a chunk, are multiples of 1 KiB.
    pub fn read_part(&mut self, file: usize, at: usize, len: usize) -> std::io::Result<()> {
        let mut from = self.open(file, false)?;
        fadvise(&from, 0, None, Advice::Random)?;
        from.seek_relative(i64::try_from(at).expect("within a file"))?;
        let mut name = self.first_block(file);
        name.number += blocks(at);
        let chunk = &mut self.chunk[..len];
        from.read_exact(chunk)?;
        verify_blocks(&mut self.tally, chunk, name);
        Ok(())
    }

    /// The name of a file's first block.
    fn first_block(&self, file: usize) -> Name {
        Name {
            file: self.first + u32::try_from(file).expect("the settings limit the number of files"),
            number: 0,
            generation: self.generations[file],
            seed: self.seed,
        }
    }

    fn open(&self, file: usize, write: bool) -> std::io::Result<File> {
        let mut options = File::options();
        options.read(!write).write(write);
        match &self.place {
            Place::Directory(directory) => {
                let number = self.first as usize + file;
                options
                    .create(write)
                    .open(directory.join(number.to_string()))
            }
            Place::Device(path) => {
                let mut device = options.open(path)?;
                device.seek(SeekFrom::Start(file as u64 * self.file_bytes as u64))?;
                Ok(device)
            }
        }
    }

    fn write(&mut self, file: usize) -> std::io::Result<()> {
        let mut to = self.open(file, true)?;
        let mut name = self.first_block(file);
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
}

fn blocks(bytes: usize) -> u32 {
    u32::try_from(bytes / BLOCK_BYTES).expect("at most a file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn a_changed_byte_and_an_old_block_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let mut files = Files::new(Place::Directory(directory.path().into()), 0, 20, 70, 5);
        files.populate().unwrap();
        let path = directory.path().join("3");
        let file = File::options().write(true).open(path).unwrap();
        file.write_all_at(b"x", 65 << 10).unwrap();
        files.generations[4] = 1;
        for file in 0..20 {
            files.read(file).unwrap();
        }
        assert_eq!(files.tally.mismatches, 1 + 70);
    }

    #[test]
    fn a_part_is_verified_as_what_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let place = || Place::Directory(directory.path().into());
        let mut files = Files::new(place(), 7, 2, 12, 5);
        files.populate().unwrap();
        for at in [0, 4096, 8192] {
            files.read_part(1, at, 4096).unwrap();
        }
        assert_eq!((files.tally.mismatches, files.tally.read_bytes), (0, 12288));
        let path = directory.path().join("8");
        let file = File::options().write(true).open(path).unwrap();
        file.write_all_at(b"x", 5000).unwrap();
        files.read_part(1, 0, 4096).unwrap();
        assert_eq!(files.tally.mismatches, 0);
        files.read_part(1, 4096, 4096).unwrap();
        assert_eq!(files.tally.mismatches, 1);
    }

    #[test]
    fn a_piece_of_a_device_begins_where_the_one_before_ends() {
        let device = tempfile::NamedTempFile::new().unwrap();
        let place = Place::Device(device.path().into());
        let mut files = Files::new(place, 0, 3, 70, 5);
        files.populate().unwrap();
        files.read(1).unwrap();
        files.read_part(2, 8192, 4096).unwrap();
        assert_eq!(files.tally.mismatches, 0);
        assert_eq!(device.as_file().metadata().unwrap().len(), 3 * 70 * 1024);
    }
}
