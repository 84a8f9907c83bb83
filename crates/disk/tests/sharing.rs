//! Two guests of one read-only image, each with a daemon of its own, before one page store: what one of them puts, the
//! other reads only if it is what the image has there.
#![allow(clippy::cast_possible_truncation, reason = "sizes of tests are small")]

#[path = "notices/store.rs"]
mod store;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use plimsoll_disk::protocol::control;
use plimsoll_disk::{
    CacheMode, Direct, DiskError, DiskOptions, EngineOptions, Machine, MachineHandle,
    MachineOptions, PAGE_BYTES, Socket, VictimCacheStats,
};
use plimsoll_driver::{
    ControlDisk, Driver, DriverOptions, FrontendError, NoticeRing, Ram, RamOptions, RingOptions,
};
use plimsoll_hcache::Store;
use rustix::io::Errno;
use store::LocalStore;
use tempfile::TempDir;

const BLOCKS: u64 = 256;
const SERIAL: &str = "an-image";

/// The contents of a block.
fn contents(block: u64) -> [u8; PAGE_BYTES] {
    let mut page = [block as u8; PAGE_BYTES];
    page[..8].copy_from_slice(&block.to_le_bytes());
    page
}

/// An image of [`BLOCKS`] blocks.
fn image() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = folder.path().join("image");
    let image = File::create(&path).unwrap();
    for block in 0..BLOCKS {
        let offset = block * PAGE_BYTES as u64;
        image.write_all_at(&contents(block), offset).unwrap();
    }
    (folder, path)
}

/// The arguments that open a pool of an image.
fn of_image(serial: &str, first_block: u64) -> [u64; 4] {
    let mut bytes = [0; 24];
    bytes[..serial.len()].copy_from_slice(serial.as_bytes());
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let kind = control::POOL_IMAGE | first_block << control::POOL_KIND_BITS;
    [kind, word(0), word(8), word(16)]
}

/// A guest and its daemon.
struct Guest {
    disk: Driver,
    control: ControlDisk,
    ring: NoticeRing,
    handle: MachineHandle,
    thread: Option<JoinHandle<Result<(), DiskError>>>,
    _folder: TempDir,
}

impl Guest {
    fn new(image: &Path, store: &Store, mode: CacheMode, read_only: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mut machine = Machine::new(MachineOptions {
            disks: vec![DiskOptions {
                image: image.to_owned(),
                socket: Socket::Path(at("disk")),
                read_only,
                serial: SERIAL.into(),
                queues: 1,
                direct: Direct::Auto,
            }],
            control: Some(Socket::Path(at("control"))),
            engine: EngineOptions {
                mode,
                cache_bytes: 4 << 20,
                cache_bytes_max: 4 << 20,
                ..EngineOptions::default()
            },
            victim_cache: Some(Box::new(LocalStore::new(store))),
            sweep: false,
            ..MachineOptions::default()
        })
        .unwrap();
        let handle = machine.handle();
        let thread = Some(thread::spawn(move || machine.run()));
        let ram = Ram::new(&RamOptions::default()).unwrap();
        let connect = |name| Driver::connect(&ram, &at(name), DriverOptions::default()).unwrap();
        let disk = connect("disk");
        let mut control = ControlDisk::new(connect("control"));
        let ring = NoticeRing::new(&ram, RingOptions::default());
        control.attach(&ring).unwrap();
        Self {
            disk,
            control,
            ring,
            handle,
            thread,
            _folder: folder,
        }
    }

    fn open(&mut self, arguments: [u64; 4]) -> Result<u32, Errno> {
        match self.control.command(control::POOL_OPEN, arguments) {
            Ok(pool) => Ok(pool.try_into().unwrap()),
            Err(FrontendError::Refused(error)) => Err(Errno::from_io_error(&error).unwrap()),
            Err(error) => panic!("{error}"),
        }
    }

    fn read(&mut self, block: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count * PAGE_BYTES];
        self.disk
            .read(block * PAGE_BYTES as u64, &mut bytes)
            .unwrap();
        bytes
    }

    fn put(&mut self, pool: u32, block: u64, page: &[u8; PAGE_BYTES]) {
        assert!(self.ring.put(pool, block, page));
        self.control.kick().unwrap();
    }

    fn get(&mut self, pool: u32, block: u64) -> Option<Box<[u8; PAGE_BYTES]>> {
        self.control.get(pool, block, 1).unwrap().pop().unwrap()
    }

    fn stats(&self) -> VictimCacheStats {
        self.handle.stats().unwrap().victim_cache
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.handle.stop().unwrap();
        let ran = self.thread.take().unwrap().join();
        if !thread::panicking() {
            ran.unwrap().unwrap();
        }
    }
}

#[test]
fn a_guest_that_puts_wrong_pages_deceives_no_other() {
    let (_folder, path) = image();
    for mode in [CacheMode::None, CacheMode::Exclusive] {
        let store = store::store();
        let mut hostile = Guest::new(&path, &store, mode, true);
        let mut honest = Guest::new(&path, &store, mode, true);
        let theirs = hostile.open(of_image(SERIAL, 0)).unwrap();
        let pool = honest.open(of_image(SERIAL, 0)).unwrap();

        // A block that it has read, with another block's contents, and one byte off.
        hostile.read(0, 64);
        let mut near = contents(7);
        near[4095] ^= 1;
        for wrong in [contents(8), near, [0; PAGE_BYTES]] {
            hostile.put(theirs, 7, &wrong);
            assert_eq!(honest.get(pool, 7), None);
        }
        // One that it has not read: nobody knows what is there.
        hostile.put(theirs, 100, &[0xbd; PAGE_BYTES]);
        hostile.put(theirs, 101, &contents(101));
        assert_eq!(honest.get(pool, 100), None);
        assert_eq!(honest.get(pool, 101), None);
        // One beyond the image.
        hostile.put(theirs, BLOCKS, &[0xbd; PAGE_BYTES]);
        assert_eq!(honest.get(pool, BLOCKS), None);
        let stats = hostile.stats();
        assert_eq!((stats.refused_different, stats.refused_unread), (3, 2));
        assert_eq!((stats.puts, stats.stored), (6, 0));

        // What is the image's is shared, and stays.
        hostile.put(theirs, 7, &contents(7));
        for _ in 0..2 {
            assert_eq!(honest.get(pool, 7).as_deref(), Some(&contents(7)));
        }
        hostile.put(theirs, 7, &contents(9));
        assert_eq!(honest.get(pool, 7).as_deref(), Some(&contents(7)));
        // Nobody can take it from the others.
        assert!(hostile.ring.flush(theirs, 0, 64));
        hostile.ring.lose(1);
        hostile.control.kick().unwrap();
        assert_eq!(honest.get(pool, 7).as_deref(), Some(&contents(7)));
    }
}

#[test]
fn a_pool_that_begins_elsewhere_has_the_same_blocks_under_other_numbers() {
    let (_folder, path) = image();
    let store = store::store();
    let mut whole = Guest::new(&path, &store, CacheMode::None, true);
    let mut part = Guest::new(&path, &store, CacheMode::None, true);
    let of_whole = whole.open(of_image(SERIAL, 0)).unwrap();
    let of_part = part.open(of_image(SERIAL, 40)).unwrap();
    whole.read(0, 128);
    for block in 0..128 {
        whole.put(of_whole, block, &contents(block));
    }
    assert_eq!(part.get(of_part, 2).as_deref(), Some(&contents(42)));
    // It cannot move the image's contents to other blocks of the others.
    part.read(0, 64);
    part.put(of_part, 2, &contents(2));
    part.put(of_part, 0, &contents(0));
    assert_eq!(part.stats().refused_different, 2);
    for block in 0..64 {
        assert_eq!(
            whole.get(of_whole, block).as_deref(),
            Some(&contents(block))
        );
    }
    // The pool ends with the image, in the middle of a get.
    let last = BLOCKS - 1;
    whole.read(last, 1);
    whole.put(of_whole, last, &contents(last));
    let got = part.control.get(of_part, last - 40, 64).unwrap();
    assert_eq!(got[0].as_deref(), Some(&contents(last)));
    assert!(got[1..].iter().all(Option::is_none));
}

#[test]
fn another_image_has_another_pool_and_so_has_one_that_was_changed() {
    let (_folder, path) = image();
    let (_other_folder, other_path) = image();
    let store = store::store();
    let mut first = Guest::new(&path, &store, CacheMode::None, true);
    let mut other = Guest::new(&other_path, &store, CacheMode::None, true);
    let pool = first.open(of_image(SERIAL, 0)).unwrap();
    let others = other.open(of_image(SERIAL, 0)).unwrap();
    first.read(0, 8);
    first.put(pool, 3, &contents(3));
    assert!(first.get(pool, 3).is_some());
    assert_eq!(other.get(others, 3), None);

    // Its owner writes to the image all the same: what was put is of the past, for the old daemon and a new one.
    // The clock of a file system may tick no more than a few hundred times a second.
    thread::sleep(Duration::from_millis(20));
    let image = File::options().write(true).open(&path).unwrap();
    image.write_all_at(&[1], 3 * PAGE_BYTES as u64).unwrap();
    let mut second = Guest::new(&path, &store, CacheMode::None, true);
    let seconds = second.open(of_image(SERIAL, 0)).unwrap();
    assert_eq!(second.get(seconds, 3), None);
    while first.get(pool, 3).is_some() {
        thread::sleep(Duration::from_millis(10));
    }
    first.put(pool, 3, &contents(3));
    assert_eq!(first.stats().refused_unread, 1);
    let now: [u8; PAGE_BYTES] = first.read(3, 1).try_into().unwrap();
    first.put(pool, 3, &now);
    assert_eq!(second.get(seconds, 3).as_deref(), Some(&now));
}

#[test]
fn only_a_disk_that_cannot_be_written_has_a_pool_for_others() {
    let (_folder, path) = image();
    let store = store::store();
    let mut guest = Guest::new(&path, &store, CacheMode::None, false);
    assert_eq!(guest.open(of_image(SERIAL, 0)), Err(Errno::NODEV));
    drop(guest);
    let mut guest = Guest::new(&path, &store, CacheMode::None, true);
    assert_eq!(guest.open(of_image("", 0)), Err(Errno::NODEV));
    assert_eq!(guest.open(of_image("another", 0)), Err(Errno::NODEV));
    assert_eq!(guest.open(of_image(SERIAL, BLOCKS)), Err(Errno::INVAL));
    // A key that guests agree on.
    assert_eq!(guest.open([1, 7, 7, 0]), Err(Errno::INVAL));
    assert_eq!(guest.open(of_image(SERIAL, BLOCKS - 1)), Ok(1));
}
