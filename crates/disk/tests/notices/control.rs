//! The control disk.

use std::sync::atomic::Ordering::Relaxed;

use plimsoll_disk::protocol::{control, record, ring};
use plimsoll_disk::{BadRequest, ControlDisk, DrainResult, PAGE_BYTES, ServedImages, VictimCache};

use crate::guest::{Guest, HEADER, NONCE, Record, command, get_offset};
use crate::store::{LocalStore, store};
use crate::{Notebook, SinkCall};

const EINVAL: u64 = 22;
const ENOENT: u64 = 2;
const EFAULT: u64 = 14;
const ENODEV: u64 = 19;
const EMFILE: u64 = 24;
const ENOSYS: u64 = 38;
const EPROTONOSUPPORT: u64 = 93;
const EOPNOTSUPP: u64 = 95;
const ENOTCONN: u64 = 107;

/// A guest and its control disk.
struct Machine {
    guest: Guest,
    disk: ControlDisk,
    notebook: Notebook,
    sequence: u64,
}

impl Machine {
    fn new(victim_cache: Option<LocalStore>) -> Self {
        let guest = Guest::new();
        let victim_cache = victim_cache.map(|store| Box::new(store) as Box<dyn VictimCache>);
        let mut disk = ControlDisk::new(true, victim_cache, ServedImages::default());
        let mut notebook = Notebook::default();
        disk.set_ram(guest.ram.clone(), &mut notebook);
        Self {
            guest,
            disk,
            notebook,
            sequence: 0,
        }
    }

    /// One whose ring is attached.
    fn attached(victim_cache: Option<LocalStore>) -> Self {
        let mut machine = Self::new(victim_cache);
        assert_eq!(machine.command(control::ATTACH, &[HEADER, NONCE]), Ok(0));
        machine.notebook.take();
        machine
    }

    /// Reads, after a drain, into a buffer of 0xaa.
    fn read(&mut self, offset: u64, bytes: usize) -> Vec<u8> {
        self.disk.drain(&mut self.notebook);
        let mut buffer = vec![0xaa; bytes];
        (self.disk).read(offset, bytes, &mut |at, piece| {
            buffer[at..at + piece.len()].copy_from_slice(piece);
        });
        buffer
    }

    fn word(sector: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(sector[at..at + 8].try_into().unwrap())
    }

    /// Executes a command; returns its value or status.
    fn command(&mut self, number: u32, arguments: &[u64]) -> Result<u64, u64> {
        self.sequence += 1;
        self.write(&command(number, self.sequence, arguments))
            .unwrap();
        let answer = self.read(512, 512);
        assert_eq!(Self::word(&answer, control::ANSWER_MAGIC), control::MAGIC);
        assert_eq!(Self::word(&answer, control::ANSWER_SEQUENCE), self.sequence);
        match Self::word(&answer, control::ANSWER_STATUS) {
            0 => Ok(Self::word(&answer, control::ANSWER_VALUE)),
            status => Err(status),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), BadRequest> {
        self.disk.drain(&mut self.notebook);
        self.disk.write(0, bytes, &mut self.notebook)
    }

    /// Gets blocks: the buffer, and which were found.
    fn get(&mut self, pool: u64, block: u64, count: usize) -> (Vec<u8>, u64) {
        let mut buffer = self.read(get_offset(pool, block), count * PAGE_BYTES + 512);
        let last = buffer.split_off(count * PAGE_BYTES);
        assert_eq!(Self::word(&last, control::GET_MAGIC), control::MAGIC);
        assert_eq!(Self::word(&last, control::GET_POOL), pool);
        assert_eq!(Self::word(&last, control::GET_BLOCK), block);
        assert_eq!(Self::word(&last, control::GET_COUNT), count as u64);
        (buffer, Self::word(&last, control::GET_HITS))
    }

    fn open(&mut self) -> u64 {
        self.command(control::POOL_OPEN, &[0]).unwrap()
    }
}

#[test]
fn the_first_sector_says_what_there_is() {
    let store = store();
    for (victim_cache, features) in [(None, 1), (Some(LocalStore::new(&store)), 3)] {
        let mut machine = Machine::new(victim_cache);
        let info = machine.read(0, 512);
        assert_eq!(&info[..8], b"PLMSCTL1");
        assert_eq!(info[8..16], [1, 0, 0, 0, features, 0, 0, 0]);
        assert!(info[16..].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn other_reads_give_zeros_wherever_they_are() {
    let mut machine = Machine::attached(Some(LocalStore::new(&store())));
    let pool = machine.open();
    machine.guest.put(pool, 0, &[7; PAGE_BYTES]);
    let place = get_offset(pool, 0);
    for (offset, bytes) in [
        (1024, 4096),
        (place, 512),
        (place, 4096),
        (place, 8192),
        (place + 512, 4096 + 512),
        (place, 65 * 4096 + 512),
        (get_offset(0, 8), 4096 + 512),
        (get_offset(pool, control::BLOCKS_MAX - 1), 2 * 4096 + 512),
        (ControlDisk::BYTES - 512, 512),
        (u64::MAX - 511, 4096 + 512),
    ] {
        let buffer = machine.read(offset, bytes);
        assert!(buffer.iter().all(|byte| *byte == 0), "{bytes} at {offset}");
    }
    assert!(machine.read(place, 0).is_empty());
    assert_eq!(
        machine.get(pool, 0, 1),
        (vec![7; PAGE_BYTES], 1),
        "still there"
    );
    // The first sectors in the midst of a longer read.
    let buffer = machine.read(0, 12288);
    assert_eq!(
        (&buffer[..8], &buffer[512..520]),
        (&b"PLMSCTL1"[..], &b"PLMSCTL1"[..])
    );
    assert!(buffer[1024..].iter().all(|byte| *byte == 0));
    assert_eq!(&machine.read(512, 4096)[..8], b"PLMSCTL1");
}

#[test]
fn writes_that_are_no_commands_fail_and_leave_the_answer() {
    let mut machine = Machine::attached(None);
    let good = command(control::KICK, 9, &[]);
    let mut magic = good;
    magic[0] ^= 1;
    let mut long = good.to_vec();
    long.resize(1024, 0);
    let notebook = &mut machine.notebook.clone();
    for (offset, bytes) in [
        (512, &good[..]),
        (1 << 40, &good),
        (0, &[]),
        (0, &good[..511]),
        (0, &long),
        (0, &magic),
    ] {
        let written = machine.disk.write(offset, bytes, notebook);
        assert_eq!(written, Err(BadRequest));
    }
    let answer = machine.read(512, 512);
    assert_eq!(
        Machine::word(&answer, control::ANSWER_SEQUENCE),
        machine.sequence
    );
}

#[test]
fn commands_that_cannot_be_done_say_why() {
    let mut machine = Machine::new(Some(LocalStore::new(&store())));
    assert_eq!(machine.command(control::POOL_OPEN, &[0]), Err(ENOTCONN));
    // By this a guest notices that the host was killed and replaced, which leaves `attached` as it was.
    assert_eq!(machine.command(control::KICK, &[]), Err(ENOTCONN));
    assert_eq!(machine.command(control::ATTACH, &[HEADER, 1]), Err(EINVAL));
    assert_eq!(
        machine.command(control::ATTACH, &[1 << 40, NONCE]),
        Err(EFAULT)
    );
    machine.guest.set_u32(ring::AT_VERSION, 3);
    assert_eq!(
        machine.command(control::ATTACH, &[HEADER, NONCE]),
        Err(EPROTONOSUPPORT)
    );
    machine.guest.set_u32(ring::AT_VERSION, 1);
    assert_eq!(machine.command(control::ATTACH, &[HEADER, NONCE]), Ok(0));
    assert_eq!(machine.command(control::KICK, &[]), Ok(0));
    for kind in [1, 3, 0xff] {
        assert_eq!(machine.command(control::POOL_OPEN, &[kind]), Err(EINVAL));
    }
    assert_eq!(
        machine.command(control::POOL_OPEN, &[control::POOL_IMAGE]),
        Err(ENODEV)
    );
    for pool in [0, 1, 32, u64::MAX] {
        assert_eq!(machine.command(control::POOL_CLOSE, &[pool]), Err(ENOENT));
    }
    for number in [0, 6, u32::MAX] {
        assert_eq!(machine.command(number, &[]), Err(ENOSYS));
    }
    let mut other = command(control::KICK, 1000, &[]);
    other[control::COMMAND_VERSION] = 2;
    machine.write(&other).unwrap();
    let answer = machine.read(512, 512);
    assert_eq!(Machine::word(&answer, control::ANSWER_SEQUENCE), 1000);
    assert_eq!(
        Machine::word(&answer, control::ANSWER_STATUS),
        EPROTONOSUPPORT
    );
    let mut without = Machine::attached(None);
    assert_eq!(without.command(control::POOL_OPEN, &[0]), Err(EOPNOTSUPP));
}

#[test]
fn a_get_gives_the_last_put_once_and_leaves_the_rest_alone() {
    let mut machine = Machine::attached(Some(LocalStore::new(&store())));
    let (one, two) = (machine.open(), machine.open());
    assert_eq!((one, two), (1, 2));
    machine.guest.put(one, 8, &[1; PAGE_BYTES]);
    machine.guest.put(one, 10, &[2; PAGE_BYTES]);
    machine.guest.put(two, 9, &[3; PAGE_BYTES]);
    machine.guest.put(5, 9, &[4; PAGE_BYTES]); // Never opened.
    let (buffer, hits) = machine.get(one, 8, 4);
    assert_eq!(hits, 0b101);
    for (block, byte) in [(0, 1), (1, 0xaa), (2, 2), (3, 0xaa)] {
        let page = &buffer[block * PAGE_BYTES..][..PAGE_BYTES];
        assert!(page.iter().all(|b| *b == byte), "block {block}");
    }
    assert_eq!(machine.get(one, 8, 64).1, 0, "a get removes");
    assert_eq!(machine.get(5, 9, 1).1, 0);
    machine.guest.put(two, 9, &[5; PAGE_BYTES]);
    machine.guest.flush(two, 1, 9);
    assert_eq!(machine.get(two, 9, 1).1, 0, "flushed");
    let stats = machine.disk.victim_cache_stats();
    assert_eq!((stats.available, stats.pools), (true, 2));
    assert_eq!((stats.puts, stats.stored), (5, 4));
    assert_eq!((stats.gets, stats.hits), (70, 2));
    assert_eq!((stats.flushed_blocks, stats.errors), (9, 0));
}

#[test]
fn a_loss_empties_private_pools() {
    let mut machine = Machine::attached(Some(LocalStore::new(&store())));
    let private = machine.open();
    machine.guest.put(private, 1, &[1; PAGE_BYTES]);
    machine.guest.lose(1);
    machine.guest.put(private, 2, &[3; PAGE_BYTES]);
    assert_eq!(machine.get(private, 1, 2).1, 0);
    machine.guest.put(private, 2, &[3; PAGE_BYTES]);
    assert_eq!(machine.get(private, 1, 2).1, 2, "and goes on");
}

#[test]
fn without_a_ring_there_are_no_pools() {
    type End = fn(&mut Machine);
    let ends: [(&str, End); 5] = [
        ("attach", |m| {
            assert_eq!(m.command(control::ATTACH, &[HEADER, NONCE]), Ok(0));
        }),
        ("refused", |m| {
            assert_eq!(m.command(control::ATTACH, &[HEADER, 1]), Err(EINVAL));
        }),
        ("detach", |m| {
            assert_eq!(m.command(control::DETACH, &[NONCE]), Ok(0));
        }),
        ("gone", |m| m.disk.guest_gone(&mut m.notebook)),
        ("fault", |m| {
            m.guest.set(ring::AT_HEAD, 1 << 60);
            assert_eq!(m.disk.drain(&mut m.notebook), DrainResult::Fault);
        }),
    ];
    for (name, end) in ends {
        let mut machine = Machine::attached(Some(LocalStore::new(&store())));
        let pool = machine.open();
        machine.guest.put(pool, 1, &[1; PAGE_BYTES]);
        machine.disk.drain(&mut machine.notebook);
        end(&mut machine);
        assert!(
            machine.notebook.take().contains(&SinkCall::ForgetFrames),
            "{name}"
        );
        assert_eq!(machine.disk.victim_cache_stats().pools, 0, "{name}");
        assert_eq!(machine.get(pool, 1, 1).1, 0, "{name}");
        assert_eq!(
            machine.disk.ring_stats().attached,
            name == "attach",
            "{name}"
        );
    }
    // A detach with another nonce leaves the ring attached.
    let mut machine = Machine::attached(None);
    assert_eq!(machine.command(control::DETACH, &[1]), Ok(0));
    machine.guest.post(Record::new(record::ADD, 1));
    assert_eq!(
        machine.disk.drain(&mut machine.notebook),
        DrainResult::Records
    );
}

#[test]
fn a_pool_that_failed_is_never_used_again() {
    let local = LocalStore::new(&store());
    let (away, calls) = (local.away.clone(), local.calls.clone());
    let mut machine = Machine::attached(Some(local));
    let (pool, other) = (machine.open(), machine.open());
    machine.guest.put(pool, 1, &[1; PAGE_BYTES]);
    machine.guest.put(other, 1, &[2; PAGE_BYTES]);
    machine.disk.drain(&mut machine.notebook);
    away.store(true, Relaxed);
    machine.guest.flush(pool, 1, 1);
    assert_eq!(machine.get(pool, 1, 1).1, 0);
    machine.disk.turn();
    let stats = machine.disk.victim_cache_stats();
    assert_eq!((stats.pools, stats.errors), (2, 1));
    let before = calls.load(Relaxed);
    machine.guest.put(pool, 2, &[3; PAGE_BYTES]);
    assert_eq!(machine.get(pool, 2, 1).1, 0);
    assert_eq!(calls.load(Relaxed), before, "not asked");
    away.store(false, Relaxed);
    assert_eq!(machine.get(pool, 1, 1).1, 0, "the flush has not reached it");
    machine.disk.turn();
    assert_eq!(machine.get(pool, 1, 2).1, 0, "a new one");
    machine.guest.put(pool, 1, &[4; PAGE_BYTES]);
    assert_eq!(machine.get(pool, 1, 1), (vec![4; PAGE_BYTES], 1));
    assert_eq!(machine.get(other, 1, 1).1, 1, "one that did not fail");
}

#[test]
fn pools_run_out() {
    let mut machine = Machine::attached(Some(LocalStore::new(&store())));
    for pool in 1..=31 {
        assert_eq!(machine.open(), pool);
    }
    assert_eq!(machine.command(control::POOL_OPEN, &[0]), Err(EMFILE));
    assert_eq!(machine.command(control::POOL_CLOSE, &[7]), Ok(0));
    assert_eq!(machine.open(), 7);
}
