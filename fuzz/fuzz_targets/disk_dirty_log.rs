//! A dirty log with any bytes in it: it is refused, or the pages it gives have the right checksums, and none twice.
#![no_main]

use std::collections::HashSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt as _;

use libfuzzer_sys::fuzz_target;
use plimsoll_disk::{DirtyLog, DirtyPages as _, DiskIdentity, DiskNumber, Location};

const SLOTS: u64 = 8;

fuzz_target!(|input: &[u8]| {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dirty");
    let disks = [DiskIdentity {
        disk: 0,
        image: "image".into(),
        device: 1,
        inode: 2,
        size_bytes: 1 << 30,
        modified_ns: Some(0),
    }];
    let (choice, input) = input.split_first().unwrap_or((&0, &[]));
    let valid = choice % 8;
    if choice & 8 == 0 {
        // A good log, changed in some places: 4 bytes of place, 1 of change.
        let mut log = DirtyLog::open(&path, SLOTS, &disks, "boot")
            .unwrap()
            .finish(&disks, &HashSet::new())
            .unwrap();
        for block in 0..u64::from(valid) {
            let location = Location::new(DiskNumber(0), block);
            log.record(location, &[choice ^ block as u8; 4096]).unwrap();
        }
        drop(log);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let bytes = file.metadata().unwrap().len();
        let entries = bytes - (SLOTS + 1) * 4096;
        // One bit of the location and one of the sequence cancel out in the checksum. No write that is cut off changes both:
        // what it does not write is zero. So a run changes one of them.
        let spared = if choice & 16 == 0 { 0..8 } else { 8..16 };
        for change in input.as_chunks::<5>().0 {
            let place = u64::from(u32::from_le_bytes(change[..4].try_into().unwrap()));
            // Mostly the header and, before the pages, the marks and entries.
            let place = match place & 3 {
                0 => place % 512,
                1 => entries + place % 256,
                2 => (2 << 20) + place % 16,
                _ => place % bytes,
            };
            if place >= entries && place < entries + SLOTS * 32 && spared.contains(&(place % 32)) {
                continue;
            }
            let mut byte = [0];
            file.read_exact_at(&mut byte, place).unwrap();
            file.write_all_at(&[byte[0] ^ change[4]], place).unwrap();
        }
    } else {
        fs::write(&path, input).unwrap();
    }
    let Ok(left) = DirtyLog::open(&path, SLOTS, &disks, "boot") else {
        return;
    };
    let mut seen = HashSet::new();
    for page in left.pages() {
        let (location, page) = page.unwrap();
        assert!(seen.insert(location));
        let byte = choice ^ location.block() as u8;
        assert!(location.block() < u64::from(valid) && page.iter().all(|b| *b == byte));
    }
    assert_eq!(seen.len(), left.len());
    if choice & 8 == 0 && input.len() < 5 {
        assert_eq!(seen.len(), usize::from(valid));
    }
    assert!(left.finish(&disks, &HashSet::new()).unwrap().is_empty());
});
