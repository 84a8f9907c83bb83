//! What this daemon has read from the images that it serves read-only: the only contents that a guest may put into a
//! pool that other guests read.
//!
//! A guest is hostile, its kernel and our module in it too. So a pool of an image holds blocks of the *image*, whatever
//! the guest calls them, and a page enters it only if it is what this daemon last read from storage at that block. For
//! that a keyed hash of each block read is kept: `SipHash` under a random 128-bit key of this process
//! ([`RandomState`]), which a guest can neither compute nor, by chance, meet more often than once in 2^64 tries. (The
//! hashes of `frames` need not resist forgery: there a guest deceives only itself.)
//!
//! Guests share a pool if their daemons serve the same image in the same state: device, inode, size and time of change
//! (`ctime`, which every write moves and nobody can set). A block device has no such time; it has no pool.
//!
//! Cost: a hash of each whole block read from an image of which a pool was opened, and 8 bytes for it, allocated for
//! 16 MiB of image at a time.

use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use xxhash_rust::xxh3::xxh3_128;

use crate::{DiskNumber, PAGE_BYTES, Page};

/// Blocks whose hashes are allocated together.
const PIECE: usize = 4096;

/// The 128-bit key of the pool of an image: equal for daemons that serve the same image in the same state.
///
/// # Errors
/// `EOPNOTSUPP` for a block device, whose changes nothing reports; else the result of `fstat(2)`.
pub fn image_pool_key(image: &File) -> Result<u128, Errno> {
    let metadata = image
        .metadata()
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    if metadata.file_type().is_block_device() {
        return Err(Errno::OPNOTSUPP);
    }
    let mut bytes = b"plimsoll image 1".to_vec();
    for word in [metadata.dev(), metadata.ino(), metadata.size()] {
        bytes.extend(word.to_le_bytes());
    }
    for word in [metadata.ctime(), metadata.ctime_nsec()] {
        bytes.extend(word.to_le_bytes());
    }
    Ok(xxh3_128(&bytes))
}

/// An image whose blocks guests can share.
struct ServedImage {
    disk: DiskNumber,
    serial: String,
    file: Arc<File>,
    /// Number of whole blocks.
    blocks: u64,
    /// The key of its pool, once one was opened.
    key: Option<u128>,
    /// Hash of each block read since then; 0 for one that was not.
    hashes: Vec<Option<Box<[u64; PIECE]>>>,
}

/// Whether a page is a block of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is what was last read there.
    Same,
    /// It is something else.
    Different,
    /// The block was not read, so that nothing can be said.
    NotRead,
}

/// An image of which a guest has a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageNumber(usize);

#[derive(Default)]
struct Images {
    images: Vec<ServedImage>,
    hash: RandomState,
}

/// The images that a daemon serves read-only. Clones are the same.
#[derive(Clone, Default)]
pub struct ServedImages(Arc<Mutex<Images>>);

impl ServedImages {
    /// Adds an image that is served read-only and does not change otherwise; guests name it by the disk's serial number.
    pub fn add(&self, disk: DiskNumber, serial: &str, file: Arc<File>, size_bytes: u64) {
        self.lock().images.push(ServedImage {
            disk,
            serial: serial.to_owned(),
            file,
            blocks: size_bytes / PAGE_BYTES as u64,
            key: None,
            hashes: Vec::new(),
        });
    }

    /// The image of the disk with this serial number; from now on what is read from it is recorded.
    ///
    /// # Errors
    /// `ENODEV` if there is none, or more than one; `EOPNOTSUPP` if it cannot be shared.
    pub fn open(&self, serial: &str) -> Result<ImageNumber, Errno> {
        let mut images = self.lock();
        let numbered = images.images.iter_mut().enumerate();
        let mut named = numbered.filter(|(_, image)| image.serial == serial);
        let (Some((number, image)), None) = (named.next(), named.next()) else {
            return Err(Errno::NODEV);
        };
        image.renew()?;
        Ok(ImageNumber(number))
    }

    /// The current key of an image's pool, or `None` if it is unknown. If the image has changed, what was read from
    /// it before is forgotten.
    pub fn key(&self, image: ImageNumber) -> Option<u128> {
        self.lock().images[image.0].renew().ok()
    }

    /// Number of whole blocks of an image.
    pub fn blocks(&self, image: ImageNumber) -> u64 {
        self.lock().images[image.0].blocks
    }

    /// Whether what is read from a disk is recorded.
    pub fn records(&self, disk: DiskNumber) -> bool {
        let images = self.lock();
        let mut images = images.images.iter();
        images.any(|image| image.disk == disk && image.key.is_some())
    }

    /// Records what was read from a disk's storage: whole blocks, from `block` on.
    pub fn was_read(&self, disk: DiskNumber, block: u64, bytes: &[u8]) {
        let mut images = self.lock();
        let Images { images, hash } = &mut *images;
        let Some(image) = images
            .iter_mut()
            .find(|image| image.disk == disk && image.key.is_some())
        else {
            return;
        };
        for (block, page) in (block..image.blocks).zip(bytes.as_chunks::<PAGE_BYTES>().0) {
            let (piece, at) = place(block);
            if image.hashes.len() <= piece {
                image.hashes.resize_with(piece + 1, || None);
            }
            let hashes = image.hashes[piece].get_or_insert_with(|| Box::new([0; PIECE]));
            hashes[at] = keyed(hash, page);
        }
    }

    /// Compares a page with what was last read at a block.
    pub fn judge(&self, image: ImageNumber, block: u64, page: &Page) -> Verdict {
        let images = self.lock();
        let (piece, at) = place(block);
        let piece = images.images[image.0].hashes.get(piece);
        match piece
            .and_then(Option::as_ref)
            .map_or(0, |hashes| hashes[at])
        {
            0 => Verdict::NotRead,
            read if read == keyed(&images.hash, page) => Verdict::Same,
            _ => Verdict::Different,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Images> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServedImage {
    /// Its current key. Forgets what was read under another.
    fn renew(&mut self) -> Result<u128, Errno> {
        let key = image_pool_key(&self.file);
        if key.ok() != self.key {
            self.hashes.clear();
            self.key = key.ok();
        }
        key
    }
}

fn place(block: u64) -> (usize, usize) {
    let block = usize::try_from(block).unwrap_or(usize::MAX);
    (block / PIECE, block % PIECE)
}

/// Never 0.
fn keyed(hash: &RandomState, page: &Page) -> u64 {
    hash.hash_one(page).max(1)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const DISK: DiskNumber = DiskNumber(3);

    fn image(blocks: u8) -> (tempfile::NamedTempFile, ServedImages) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for block in 0..blocks {
            file.write_all(&[block; PAGE_BYTES]).unwrap();
        }
        let images = ServedImages::default();
        let size_bytes = u64::from(blocks) * PAGE_BYTES as u64;
        let opened = Arc::new(file.reopen().unwrap());
        images.add(DISK, "root", opened, size_bytes);
        (file, images)
    }

    #[test]
    fn only_what_was_read_at_a_block_is_a_block_of_the_image() {
        let (_file, images) = image(8);
        images.was_read(DISK, 0, &[0; PAGE_BYTES]);
        let root = images.open("root").unwrap();
        assert_eq!(images.judge(root, 0, &[0; PAGE_BYTES]), Verdict::NotRead);
        let two: Vec<u8> = [[5; PAGE_BYTES], [6; PAGE_BYTES]].concat();
        images.was_read(DISK, 5, &two);
        images.was_read(DiskNumber(0), 1, &[1; PAGE_BYTES]);
        assert_eq!(images.judge(root, 5, &[5; PAGE_BYTES]), Verdict::Same);
        assert_eq!(images.judge(root, 6, &[6; PAGE_BYTES]), Verdict::Same);
        assert_eq!(images.judge(root, 5, &[6; PAGE_BYTES]), Verdict::Different);
        let mut bit = [6; PAGE_BYTES];
        bit[4095] ^= 1;
        assert_eq!(images.judge(root, 6, &bit), Verdict::Different);
        for block in [0, 1, 4, 7, 8, u64::MAX] {
            assert_eq!(
                images.judge(root, block, &[1; PAGE_BYTES]),
                Verdict::NotRead
            );
        }
        // Beyond the end nothing is recorded.
        images.was_read(DISK, 7, &two);
        images.was_read(DISK, u64::MAX, &two);
        assert_eq!(images.judge(root, 7, &[5; PAGE_BYTES]), Verdict::Same);
        assert_eq!(images.judge(root, 8, &[6; PAGE_BYTES]), Verdict::NotRead);
    }

    #[test]
    fn an_image_that_changes_has_another_key_and_nothing_was_read_of_it() {
        let (mut file, images) = image(2);
        let root = images.open("root").unwrap();
        let key = images.key(root).unwrap();
        assert_eq!(image_pool_key(file.as_file()).unwrap(), key);
        images.was_read(DISK, 1, &[1; PAGE_BYTES]);
        assert_eq!(images.key(root), Some(key));
        assert_eq!(images.judge(root, 1, &[1; PAGE_BYTES]), Verdict::Same);
        while images.key(root) == Some(key) {
            // The clock of a file system ticks a few hundred times a second.
            file.write_all(&[9]).unwrap();
        }
        assert_eq!(images.judge(root, 1, &[1; PAGE_BYTES]), Verdict::NotRead);
        let (_other, others) = image(2);
        let other = others.open("root").unwrap();
        assert_ne!(others.key(other), Some(key));
    }

    #[test]
    fn a_disk_is_found_by_a_serial_number_that_is_its_own() {
        let (file, images) = image(1);
        assert_eq!(images.open("other"), Err(Errno::NODEV));
        images.open("root").unwrap();
        let opened = Arc::new(file.reopen().unwrap());
        images.add(DiskNumber(4), "root", opened, PAGE_BYTES as u64);
        assert_eq!(images.open("root"), Err(Errno::NODEV));
    }
}
