//! A hostile user of the control disk: any write and any read, with a ring that it changes at will. Nothing panics, every byte
//! of a read is given or left alone as documented, and a get gives only what was last put and not flushed since.
#![no_main]

#[path = "../../crates/disk/tests/notices/guest.rs"]
mod guest;

use std::collections::HashMap;
use std::io;

use guest::{Guest, HEADER, NONCE, command, get_offset};
use libfuzzer_sys::fuzz_target;
use plimsoll_disk::protocol::{control, ring};
use plimsoll_disk::{
    Contents, ControlDisk, DrainResult, FrameSink, Notice, Page, PoolRequest, ServedImages,
    VictimCache,
};

/// A store that keeps everything and fails now and then.
#[derive(Default)]
struct Naive {
    pools: Vec<Option<HashMap<u64, Page>>>,
    calls: u32,
}

impl Naive {
    fn called(&mut self) -> io::Result<()> {
        self.calls += 1;
        if self.calls.is_multiple_of(97) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }

    fn pool(&mut self, number: u32) -> io::Result<&mut HashMap<u64, Page>> {
        self.called()?;
        Ok(self.pools[number as usize].as_mut().expect("an open pool"))
    }
}

impl VictimCache for Naive {
    fn is_in_reach(&mut self) -> bool {
        true
    }

    fn failure(&self) -> Option<String> {
        None
    }

    fn open(&mut self, _: PoolRequest) -> io::Result<u32> {
        self.pools.push(Some(HashMap::new()));
        Ok(self.pools.len() as u32 - 1)
    }

    fn close(&mut self, pool: u32) -> io::Result<()> {
        let closed = self.pools[pool as usize].take();
        assert!(closed.is_some(), "closed twice");
        Ok(())
    }

    fn put(&mut self, pool: u32, block: u64, page: &Page) -> io::Result<()> {
        self.pool(pool)?.insert(block, *page);
        Ok(())
    }

    fn collect_puts(&mut self) -> io::Result<u64> {
        self.called().map(|()| 0)
    }

    fn get(
        &mut self,
        pool: u32,
        block: u64,
        count: u32,
        found: &mut dyn FnMut(u32, &Page),
    ) -> io::Result<()> {
        let pages = self.pool(pool)?;
        for index in 0..count {
            if let Some(page) = pages.remove(&(block + u64::from(index))) {
                found(index, &page);
            }
        }
        Ok(())
    }

    fn flush(&mut self, pool: u32, block: u64, count: u32) -> io::Result<()> {
        let flushed = block..block + u64::from(count);
        self.pool(pool)?.retain(|block, _| !flushed.contains(block));
        Ok(())
    }

    fn flush_pool(&mut self, pool: u32) -> io::Result<()> {
        self.pool(pool)?.clear();
        Ok(())
    }
}

struct NullSink;

impl FrameSink for NullSink {
    fn forget(&mut self) {}

    fn notice(&mut self, _: Notice, _: Option<Contents<'_>>) {}
}

fuzz_target!(|input: &[u8]| {
    let mut guest = Guest::new();
    let mut disk = ControlDisk::new(
        true,
        Some(Box::new(Naive::default())),
        ServedImages::default(),
    );
    disk.set_ram(guest.ram.clone(), &mut NullSink);
    // What was put last, by pool and block; what may not be found is not in it.
    let mut twin: HashMap<(u64, u64), u8> = HashMap::new();
    for step in input.as_chunks::<8>().0 {
        let value = u64::from_le_bytes(*step) >> 16;
        let (pool, block) = (u64::from(step[1] % 8), value & 0xff);
        match step[0] % 8 {
            0 => {
                let number = u32::from(step[1] % 8);
                let arguments = match number {
                    control::ATTACH => [HEADER, NONCE ^ (value & 1), 0, 0],
                    _ => [value & 0xff, value >> 8 & 1, 0, 0],
                };
                disk.drain(&mut NullSink);
                disk.write(0, &command(number, value, &arguments), &mut NullSink)
                    .unwrap();
                if disk.victim_cache_stats().pools == 0 {
                    twin.clear();
                }
                if number == control::POOL_CLOSE {
                    twin.retain(|(pool, _), _| *pool != arguments[0]);
                }
            }
            1 => {
                let mut bytes = command(control::ATTACH, value, &[HEADER, NONCE]);
                bytes[usize::from(step[1]) * 2] ^= step[2];
                let length = if step[3] < 200 {
                    512
                } else {
                    usize::from(step[3])
                };
                let _ = disk.write(value >> 40, &bytes[..length], &mut NullSink);
                twin.clear();
                disk.guest_gone(&mut NullSink);
                disk.set_ram(guest.ram.clone(), &mut NullSink);
            }
            2 if guest.has_room() && guest.has_slot() => {
                guest.put(pool, block, &[step[7]; 4096]);
                twin.insert((pool, block), step[7]);
            }
            3 if guest.has_room() => {
                let count = u32::from(step[7] % 16);
                guest.flush(pool, block, count);
                let flushed = block..block + u64::from(count);
                twin.retain(|(p, b), _| *p != pool || !flushed.contains(b));
            }
            4 => {
                let offset = value << 9 | u64::from(step[1]) << 56;
                let bytes = usize::from(step[2]) * 512 + (value as usize & 3) * 4096;
                let mut given = 0;
                disk.read(offset, bytes, &mut |at, piece| {
                    assert!(at + piece.len() <= bytes);
                    given += piece.len();
                });
                assert!(given <= bytes);
                // It may have been a get.
                twin.clear();
                disk.guest_gone(&mut NullSink);
                disk.set_ram(guest.ram.clone(), &mut NullSink);
            }
            5 => disk.turn(),
            6 if step[1] == 0 => {
                // What comes of it is anybody's guess, but not a panic.
                guest.set(ring::AT_HEAD, value >> (step[2] % 48));
                disk.drain(&mut NullSink);
                disk.guest_gone(&mut NullSink);
                guest = Guest::new();
                disk.set_ram(guest.ram.clone(), &mut NullSink);
                twin.clear();
            }
            _ => {
                if disk.drain(&mut NullSink) == DrainResult::Fault {
                    guest = Guest::new();
                    disk.set_ram(guest.ram.clone(), &mut NullSink);
                    twin.clear();
                }
                let count = usize::from(step[7] % 64) + 1;
                let bytes = control::get_bytes(count);
                let mut last = None;
                disk.read(get_offset(pool, block), bytes, &mut |at, piece| {
                    if at + piece.len() == bytes {
                        last = Some(piece.to_vec());
                    } else if pool > 0 {
                        let found = block + at as u64 / 4096;
                        let put = twin.remove(&(pool, found));
                        assert_eq!(Some(piece[0]), put, "pool {pool}, block {found}");
                    }
                });
                let last = last.expect("the last sector");
                assert_eq!(last[..8] == control::MAGIC.to_le_bytes(), pool > 0);
            }
        }
    }
});
