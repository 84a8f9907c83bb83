//! A dirty log with any bytes in it, before a daemon of two disks: it refuses to start, or every block of the images is what
//! it was, or has the contents of a valid entry of the log. Entries are read by a naive reader.
#![no_main]

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use plimsoll_disk::{
    CacheMode, Direct, DirtyLog, DirtyPages as _, DiskIdentity, DiskNumber, DiskOptions,
    EngineOptions, Location, Machine, MachineOptions, Socket, WriteMode, boot_id,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Pages that the log holds, and that an engine may have dirty.
const SLOTS: u64 = 8 + 64;
const BLOCKS: u64 = 16;

fn identities(folder: &Path) -> [DiskIdentity; 2] {
    [0, 1].map(|disk| {
        let image = folder.join(format!("image{disk}"));
        let file = File::open(&image).unwrap();
        DiskIdentity::of(DiskNumber(disk), &image, &file, BLOCKS * 4096).unwrap()
    })
}

fn options(folder: &Path) -> MachineOptions {
    let disks = (0..2).map(|disk| DiskOptions {
        image: folder.join(format!("image{disk}")),
        socket: Socket::Path(folder.join(format!("socket{disk}"))),
        read_only: false,
        serial: String::new(),
        queues: 1,
        direct: Direct::Off,
    });
    MachineOptions {
        disks: disks.collect(),
        engine: EngineOptions {
            mode: CacheMode::Exclusive,
            cache_bytes: 1 << 20,
            cache_bytes_max: 1 << 20,
            write: WriteMode::Delayed,
            dirty_pages_max: SLOTS - 64,
            dirty_age_max: Duration::from_secs(60),
            ..EngineOptions::default()
        },
        state: Some(folder.join("state")),
        ..MachineOptions::default()
    }
}

/// The contents of all valid entries of the log, by disk and block. The file ends with the pages, which begin at
/// a multiple of 4 KiB behind the entries of 32 bytes.
fn naive(log: &[u8]) -> HashMap<(u64, u64), HashSet<Vec<u8>>> {
    let mut found: HashMap<_, HashSet<_>> = HashMap::new();
    let slots = SLOTS as usize;
    let pages = log.len() - slots * 4096;
    let entries = pages - (slots * 32).next_multiple_of(4096);
    for slot in 0..slots {
        let word = |at: usize| {
            let at = entries + slot * 32 + at;
            u64::from_le_bytes(log[at..at + 8].try_into().unwrap())
        };
        let page = &log[pages + slot * 4096..][..4096];
        let (number, sequence) = (word(0), word(8));
        if xxh3_64_with_seed(page, number.rotate_left(32) ^ sequence) == word(16) {
            let key = (number >> 50, number & ((1 << 50) - 1));
            found.entry(key).or_default().insert(page.to_vec());
        }
    }
    found
}

fuzz_target!(|input: &[u8]| {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let folder = folder.path();
    fs::create_dir(folder.join("state")).unwrap();
    for disk in 0..2 {
        let image = vec![0x5a; BLOCKS as usize * 4096];
        fs::write(folder.join(format!("image{disk}")), image).unwrap();
    }
    let path = folder.join("state/dirty.log");
    let disks = identities(folder);
    let (choice, input) = input.split_first().unwrap_or((&0, &[]));
    {
        let left = DirtyLog::open(&path, SLOTS, &disks, &boot_id().unwrap()).unwrap();
        let mut log = left.finish(&disks, &HashSet::new()).unwrap();
        for number in 0..u64::from(choice % 8) {
            let disk = DiskNumber((number % 2) as u16);
            let location = Location::new(disk, number * 5 % BLOCKS);
            log.record(location, &[*choice ^ number as u8; 4096])
                .unwrap();
        }
    }
    if choice & 8 != 0 {
        // Its image is another one: what is of it is set aside.
        let image = folder.join("image1");
        let contents = fs::read(&image).unwrap();
        fs::write(folder.join("other"), contents).unwrap();
        fs::rename(folder.join("other"), image).unwrap();
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let bytes = file.metadata().unwrap().len();
    let entries = bytes - SLOTS * 4096 - 4096;
    for change in input.as_chunks::<6>().0 {
        let place = u64::from(u32::from_le_bytes(change[..4].try_into().unwrap()));
        let place = match place & 3 {
            0 => place % 1024,
            1 => entries + place % (8 * 32),
            2 => (2 << 20) + place % 32,
            _ => place % bytes,
        };
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).unwrap();
        let to = match change[5] & 1 {
            // Entries that are exchanged with others, wholly.
            1 if place >= entries && place < entries + 8 * 32 => {
                let mut entry = [0; 32];
                let from = entries + u64::from(change[4] % 8) * 32;
                file.read_exact_at(&mut entry, from).unwrap();
                file.write_all_at(&entry, entries + (place - entries) / 32 * 32)
                    .unwrap();
                continue;
            }
            _ => byte[0] ^ change[4],
        };
        file.write_all_at(&[to], place).unwrap();
    }
    let allowed = naive(&fs::read(&path).unwrap());
    let started = Machine::new(options(folder));
    for disk in 0..2 {
        let image = fs::read(folder.join(format!("image{disk}"))).unwrap();
        assert_eq!(image.len() as u64, BLOCKS * 4096);
        for (block, page) in (0..).zip(image.chunks(4096)) {
            let is_old = page.iter().all(|byte| *byte == 0x5a);
            let is_valid = || {
                allowed
                    .get(&(disk, block))
                    .is_some_and(|all| all.contains(page))
            };
            assert!(is_old || is_valid(), "disk {disk}, block {block}");
            assert!(
                is_old || choice & 8 == 0 || disk == 0,
                "an image that was replaced"
            );
            assert!(
                is_old || started.is_ok(),
                "refused, and written all the same"
            );
        }
    }
    let Ok(machine) = started else { return };
    if input.len() < 6 && choice & 8 == 0 {
        assert_eq!(machine.recovery().written_pages, u64::from(choice % 8));
    }
});
