//! Memory that a store releases is returned to the kernel. The only test of its process: others would change the
//! figures.

use std::fs;

use plimsoll_hcache::{ClientOptions, Handle, PAGE_BYTES, PoolOptions, Store, StoreOptions};

const MIB: u64 = 1 << 20;

/// Memory of this process that is resident, in bytes.
fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    let pages = statm.split(' ').nth(1).unwrap();
    pages.parse::<u64>().unwrap() * PAGE_BYTES as u64
}

#[test]
fn resident_memory_follows_the_capacity() {
    let empty = resident_bytes();
    let store = Store::new(StoreOptions::new(256 * MIB)).unwrap();
    let reserved = resident_bytes() - empty;
    assert!(reserved < 16 * MIB, "an empty store takes {reserved} bytes");
    let client = store.create_client(ClientOptions::new("fills")).unwrap();
    let pool = client.create_pool(PoolOptions::private()).unwrap();
    let fill = || {
        for page in 0..128 * 1024_u32 {
            let handle = Handle {
                pool,
                object: u64::from(page / 1000),
                index: page % 1000,
            };
            let mut contents = [1; PAGE_BYTES];
            contents[..4].copy_from_slice(&page.to_le_bytes());
            assert!(client.put(handle, &contents).unwrap().is_stored());
        }
        resident_bytes()
    };
    for in_steps in [false, true, false] {
        store.resize(256 * MIB).unwrap();
        let full = fill();
        let grown = full - empty;
        assert!(
            (230 * MIB..=272 * MIB).contains(&grown),
            "full, it takes {grown} bytes"
        );
        if in_steps {
            while !store.resize_step(16 * MIB, 1024).unwrap() {}
        } else {
            store.resize(16 * MIB).unwrap();
        }
        let small = resident_bytes();
        assert!(full - small >= 216 * MIB, "of {full} bytes, {small} stay");
        let refilled = fill();
        assert!(
            refilled - empty <= 32 * MIB,
            "of 16 MiB, it takes {}",
            refilled - empty
        );
    }
    drop(client);
    let left = resident_bytes() - empty;
    assert!(left < 32 * MIB, "without pages, it takes {left} bytes");
}
