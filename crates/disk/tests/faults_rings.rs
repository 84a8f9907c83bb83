//! Guests that violate the protocol: the daemon survives, counts it, and serves the VM's other disk and the next guest.

mod faults_common;

use fastrand::Rng;
use std::fs::{self, File};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use faults_common::{IMAGE_BYTES, MachineThread, Setup, ram};
use plimsoll_disk::protocol::record;
use plimsoll_driver::{
    Bank, Descriptor, Driver, DriverOptions, NoticeRing, Ram, RamOptions, Record, RingOptions,
};
use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

const NEXT: u16 = Descriptor::NEXT;
const WRITE: u16 = Descriptor::WRITE;
const INDIRECT: u16 = Descriptor::INDIRECT;
/// Where no RAM is: between the banks.
const NOWHERE: u64 = 3 << 30;

fn two_disks() -> MachineThread {
    MachineThread::start(Setup {
        disks: 2,
        ..Setup::default()
    })
}

/// A disk that is used correctly, to check that it is still served.
struct Witness(Driver);

impl Witness {
    fn new(running: &MachineThread) -> Self {
        Self(running.connect(&ram(), 1, DriverOptions::default()))
    }

    fn is_served(&mut self) {
        self.0.write(4096, &[0x77; 4096]).unwrap();
        let mut page = [0; 4096];
        self.0.read(4096, &mut page).unwrap();
        assert_eq!(page, [0x77; 4096]);
    }
}

/// A request taken apart.
struct RequestParts {
    ram: Arc<Ram>,
    header: u64,
    data: u64,
    status: u64,
    table: u64,
}

impl RequestParts {
    fn new(ram: &Arc<Ram>) -> Self {
        Self {
            ram: Arc::clone(ram),
            header: ram.allocate(Bank::Low, 16),
            data: ram.allocate(Bank::Low, 65536),
            status: ram.allocate(Bank::Low, 1),
            table: ram.allocate(Bank::Low, 65536),
        }
    }

    /// Prepares a request of a kind of virtio-blk.
    fn prepare(&self, kind: u32, sector: u64) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.ram.write(self.header, &header);
        self.ram.write(self.status, &[0xff]);
    }

    fn status(&self) -> u8 {
        let mut status = [0];
        self.ram.read(self.status, &mut status);
        status[0]
    }

    fn table(&self, descriptors: &[Descriptor]) {
        for (at, descriptor) in (0..).zip(descriptors) {
            let mut bytes = descriptor.address.to_le_bytes().to_vec();
            bytes.extend(descriptor.bytes.to_le_bytes());
            bytes.extend(descriptor.flags.to_le_bytes());
            bytes.extend(descriptor.next.to_le_bytes());
            self.ram.write(self.table + 16 * at, &bytes);
        }
    }
}

fn descriptor(address: u64, bytes: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor {
        address,
        bytes,
        flags,
        next,
    }
}

/// Waits, at most 20 s, until the device has used `count` entries.
fn used(disk: &mut Driver, count: u16) {
    let end = Instant::now() + Duration::from_secs(20);
    while disk.queue(0).raw_used_index() != count {
        assert!(Instant::now() < end, "entry {count} is not used");
        thread::sleep(Duration::from_micros(200));
    }
}

const IN: u32 = 0;
const OUT: u32 = 1;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
/// No status could be written.
const UNTOUCHED: u8 = 0xff;

#[test]
fn malformed_requests_are_answered_and_counted() {
    let running = two_disks();
    let mut witness = Witness::new(&running);
    let ram = ram();
    let mut disk = running.connect(&ram, 0, DriverOptions::default());
    let parts = RequestParts::new(&ram);
    let (header, data, status) = (parts.header, parts.data, parts.status);
    let head = descriptor(header, 16, NEXT, 1);
    let end = descriptor(status, 1, WRITE, 0);
    let read = |address, bytes| descriptor(address, bytes, NEXT | WRITE, 2);
    let write = |address, bytes| descriptor(address, bytes, NEXT, 2);
    let ram_end = ram.end();

    // What it is, kind of request, descriptors, status. A chain without an end has no place for one.
    let chains: Vec<(&str, u32, Vec<Descriptor>, u8)> = vec![
        (
            "a loop",
            IN,
            vec![head, descriptor(data, 512, NEXT | WRITE, 0)],
            UNTOUCHED,
        ),
        (
            "a loop of one",
            IN,
            vec![descriptor(header, 16, NEXT, 0)],
            UNTOUCHED,
        ),
        (
            "a header alone",
            IN,
            vec![descriptor(header, 16, 0, 0)],
            UNTOUCHED,
        ),
        (
            "a header nowhere",
            IN,
            vec![descriptor(NOWHERE, 16, NEXT, 1), read(data, 512), end],
            IO_ERROR,
        ),
        (
            "a short header",
            IN,
            vec![descriptor(header, 8, NEXT, 1), read(data, 512), end],
            IO_ERROR,
        ),
        (
            "a header to be written",
            IN,
            vec![
                descriptor(header, 16, NEXT | WRITE, 1),
                read(data, 512),
                end,
            ],
            IO_ERROR,
        ),
        (
            "a status to be read",
            IN,
            vec![head, read(data, 512), descriptor(status, 1, 0, 0)],
            UNTOUCHED,
        ),
        (
            "a status nowhere",
            IN,
            vec![head, read(data, 512), descriptor(NOWHERE, 1, WRITE, 0)],
            UNTOUCHED,
        ),
        (
            "a status of nothing",
            IN,
            vec![head, read(data, 512), descriptor(status, 0, WRITE, 0)],
            UNTOUCHED,
        ),
        (
            "a read to nowhere",
            IN,
            vec![head, read(NOWHERE, 512), end],
            IO_ERROR,
        ),
        (
            "a read past the end of RAM",
            IN,
            vec![head, read(ram_end - 512, 1024), end],
            IO_ERROR,
        ),
        (
            "a read past all addresses",
            IN,
            vec![head, read(u64::MAX - 511, 1024), end],
            IO_ERROR,
        ),
        (
            "a read of half a sector",
            IN,
            vec![head, read(data, 256), end],
            IO_ERROR,
        ),
        (
            "a read of everything",
            IN,
            vec![head, read(0, u32::MAX), end],
            IO_ERROR,
        ),
        (
            "a read into what is to be read",
            IN,
            vec![head, write(data, 512), end],
            IO_ERROR,
        ),
        (
            "a write from nowhere",
            OUT,
            vec![head, write(NOWHERE, 512), end],
            IO_ERROR,
        ),
        (
            "a write of what is to be written",
            OUT,
            vec![head, read(data, 512), end],
            IO_ERROR,
        ),
        (
            "a next one beyond the table",
            IN,
            vec![head, descriptor(data, 512, NEXT | WRITE, 9999)],
            UNTOUCHED,
        ),
        (
            "a kind there is not",
            0x1234,
            vec![head, read(data, 512), end],
            UNSUPPORTED,
        ),
        (
            "a discard of half a range",
            DISCARD,
            vec![head, write(data, 8), end],
            IO_ERROR,
        ),
        (
            "a discard of too many ranges",
            DISCARD,
            vec![head, write(data, 65536), end],
            IO_ERROR,
        ),
        (
            "zeroes from nowhere",
            WRITE_ZEROES,
            vec![head, write(NOWHERE, 16), end],
            IO_ERROR,
        ),
    ];
    let (mut count, mut wrong) = (0, Vec::new());
    for (what, kind, chain, expected) in chains {
        parts.prepare(kind, 0);
        for (number, descriptor) in (0..).zip(&chain) {
            disk.queue(0).raw_descriptor(number, descriptor);
        }
        disk.queue(0).raw_offer(0);
        disk.queue(0).raw_kick().unwrap();
        count += 1;
        used(&mut disk, count);
        if parts.status() != expected {
            wrong.push((what, parts.status()));
        }
    }
    assert!(wrong.is_empty(), "answered otherwise: {wrong:?}");
    witness.is_served();
    let stats = running.stats();
    assert_eq!(stats.disks[0].bad_requests, u64::from(count), "{stats:#?}");
    assert!(stats.disks[0].unshared, "{stats:#?}");
    assert_eq!(stats.disks[0].in_flight, 0);
}

#[test]
fn indirect_tables_of_any_shape_are_answered() {
    let running = two_disks();
    let mut witness = Witness::new(&running);
    let ram = ram();
    let mut disk = running.connect(&ram, 0, DriverOptions::default());
    let parts = RequestParts::new(&ram);
    let chain = [
        descriptor(parts.header, 16, NEXT, 1),
        descriptor(parts.data, 512, NEXT | WRITE, 2),
        descriptor(parts.status, 1, WRITE, 0),
    ];
    let table = parts.table;
    let nested = [descriptor(table, 48, INDIRECT, 0), chain[1], chain[2]];
    let circle = [
        chain[0],
        descriptor(parts.data, 512, NEXT | WRITE, 0),
        chain[2],
    ];
    let cases = [
        (
            "as it should be",
            descriptor(table, 48, INDIRECT, 0),
            chain,
            Some(0),
        ),
        (
            "of no length",
            descriptor(table, 0, INDIRECT, 0),
            chain,
            None,
        ),
        (
            "of odd length",
            descriptor(table, 47, INDIRECT, 0),
            chain,
            None,
        ),
        ("nowhere", descriptor(NOWHERE, 48, INDIRECT, 0), chain, None),
        (
            "across the end of RAM",
            descriptor(ram.end() - 16, 48, INDIRECT, 0),
            chain,
            None,
        ),
        (
            "of everything, of which three are used",
            descriptor(table, u32::MAX - 15, INDIRECT, 0),
            chain,
            Some(0),
        ),
        (
            "in itself",
            descriptor(table, 48, INDIRECT, 0),
            nested,
            None,
        ),
        (
            "in a circle",
            descriptor(table, 48, INDIRECT, 0),
            circle,
            None,
        ),
    ];
    for (count, (what, pointer, chain, expected)) in (1..).zip(cases) {
        parts.prepare(IN, 0);
        parts.table(&chain);
        disk.queue(0).raw_descriptor(0, &pointer);
        disk.queue(0).raw_offer(0);
        disk.queue(0).raw_kick().unwrap();
        used(&mut disk, count);
        match expected {
            Some(expected) => assert_eq!(parts.status(), expected, "{what}"),
            None => assert_ne!(parts.status(), 0, "{what}"),
        }
    }
    witness.is_served();
}

#[test]
fn rings_with_wild_indices_stop_their_disk_alone() {
    type Break = fn(&mut Driver);
    let breaks: [(&str, Break); 4] = [
        ("an index that jumps", |disk| {
            disk.queue(0).raw_available_index(30_000);
        }),
        ("an index that goes back", |disk| {
            let index = disk.queue(0).available_index();
            disk.queue(0).raw_available_index(index.wrapping_sub(1));
        }),
        ("a head beyond the table", |disk| {
            disk.queue(0).raw_offer(60_000);
        }),
        ("one head, many times", |disk| {
            disk.queue(0).raw_descriptor(0, &descriptor(0, 0, 0, 0));
            (0..128).for_each(|_| disk.queue(0).raw_offer(0));
        }),
    ];
    let running = two_disks();
    let mut witness = Witness::new(&running);
    for (what, wild) in breaks {
        let ram = ram();
        let mut disk = running.connect(&ram, 0, DriverOptions::default());
        disk.write(0, &[1; 4096]).unwrap();
        let before = running.stats().disks[0].bad_requests;
        wild(&mut disk);
        disk.queue(0).raw_kick().unwrap();
        witness.is_served();
        let counted = |stats: &plimsoll_disk::MachineStats| stats.disks[0].bad_requests > before;
        running.wait_for(what, counted);
        disk.hang_up();
        // The next guest has a disk as new.
        let mut next = running.connect(&faults_common::ram(), 0, DriverOptions::default());
        next.read(0, &mut [0; 4096]).unwrap();
        next.stop().unwrap();
    }
}

#[test]
fn requests_of_gigabytes_take_no_memory() {
    let running = two_disks();
    let mut witness = Witness::new(&running);
    // A disk that has room for them.
    let ram = ram();
    let mut disk = running.connect(&ram, 0, DriverOptions::default());
    let parts = RequestParts::new(&ram);
    let before = peak_kib();
    // 1000 times 7 MiB of one buffer, of a disk of 8 MiB; and within the disk, as much as fits.
    for (kind, count, flags) in [(IN, 1000, WRITE), (OUT, 1000, 0), (IN, 1, WRITE)] {
        parts.prepare(kind, 0);
        let mut chain = vec![descriptor(parts.header, 16, NEXT, 1)];
        for at in 0..count {
            chain.push(descriptor(0, 7 << 20, NEXT | flags, at + 2));
        }
        if flags == WRITE && count == 1 {
            // Not over the rings, which begin the RAM.
            chain[1].address = 16 << 20;
        }
        chain.push(descriptor(parts.status, 1, WRITE, 0));
        parts.table(&chain);
        let bytes = u32::try_from(16 * chain.len()).unwrap();
        let pointer = descriptor(parts.table, bytes, INDIRECT, 0);
        let done = disk.queue(0).raw_used_index();
        disk.queue(0).raw_descriptor(0, &pointer);
        disk.queue(0).raw_offer(0);
        disk.queue(0).raw_kick().unwrap();
        used(&mut disk, done.wrapping_add(1));
    }
    witness.is_served();
    assert!(peak_kib() < before + (256 << 10));
}

/// Peak memory of this process in KiB.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let words = line.unwrap().trim().trim_end_matches("kB");
    words.trim().parse().unwrap()
}

#[test]
fn ram_cannot_be_taken_from_under_the_daemon() {
    let running = two_disks();
    let options = RamOptions {
        sealed: false,
        ..RamOptions::default()
    };
    let ram = Ram::new(&options).unwrap();
    let mut disk = running.connect(&ram, 0, DriverOptions::default());
    let refused = ram.file().set_len(options.low_bytes).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    disk.write(0, &[4; 4096]).unwrap();
}

/// A connection whose messages are sent one by one.
fn bare(running: &MachineThread) -> (Frontend, u64) {
    let stream = UnixStream::connect(running.place.socket(0)).unwrap();
    let limit = Some(Duration::from_secs(20));
    stream.set_read_timeout(limit).unwrap();
    let mut frontend = Frontend::from_stream(stream, 64);
    frontend.set_owner().unwrap();
    let features = frontend.get_features().unwrap();
    frontend.get_protocol_features().unwrap();
    frontend
        .set_protocol_features(
            VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::INFLIGHT_SHMFD,
        )
        .unwrap();
    (frontend, features)
}

/// Waits until disk 0 serves a new guest.
fn serves_the_next(running: &MachineThread) {
    let mut next = running.connect(&ram(), 0, DriverOptions::default());
    next.write(0, &[3; 512]).unwrap();
    next.stop().unwrap();
}

#[test]
fn queues_that_are_nowhere_or_of_no_size_are_refused() {
    let running = two_disks();
    let mut witness = Witness::new(&running);
    let file = File::from(memfd_create("faults", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(1 << 20).unwrap();
    let region = |bytes, offset| VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: bytes,
        userspace_addr: 0x10_0000,
        mmap_offset: offset,
        mmap_handle: file.as_raw_fd(),
    };
    // RAM larger than its file, beyond its end, or past all addresses.
    for (bytes, offset) in [(2 << 20, 0), (4096, 1 << 30), (1 << 20, u64::MAX - 4095)] {
        let (frontend, features) = bare(&running);
        // The daemon may disconnect a peer that it refuses.
        let _ = frontend.set_features(features);
        let _ = frontend.set_mem_table(&[region(bytes, offset)]);
        let _ = frontend.get_features();
        drop(frontend);
        serves_the_next(&running);
    }
    let kick = EventFd::new(0).unwrap();
    for (size, place) in [
        (128, 0),
        (128, u64::MAX - 15),
        (128, 0x20_0000),
        (0, 0x10_0000),
        (100, 0x10_0000),
        (u16::MAX, 0x10_0000),
    ] {
        let (mut frontend, features) = bare(&running);
        let addresses = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: place,
            used_ring_addr: place,
            avail_ring_addr: place,
            log_addr: None,
        };
        let _ = frontend.set_features(features);
        let _ = frontend.set_mem_table(&[region(1 << 20, 0)]);
        let _ = frontend.set_vring_num(0, size);
        let _ = frontend.set_vring_addr(0, &addresses);
        let _ = frontend.set_vring_base(0, 77);
        let _ = frontend.set_vring_kick(0, &kick);
        let _ = frontend.set_vring_call(0, &kick);
        let _ = frontend.set_vring_enable(0, true);
        kick.write(1).unwrap();
        // Once it answers, it has read the kick or will not.
        let _ = frontend.get_vring_base(0);
        drop(frontend);
        serves_the_next(&running);
    }
    witness.is_served();
}

#[test]
fn regions_of_requests_in_flight_that_are_noise_do_no_harm() {
    let running = two_disks();
    let mut witness = Witness::new(&running);
    let mut random = Rng::with_seed(5);
    for bytes in [1, 64, 4096, 16384] {
        let file = File::from(memfd_create("faults", MemfdFlags::CLOEXEC).unwrap());
        let noise: Vec<u8> = (0..bytes)
            .map(|_| u8::try_from(random.u64(..256)).unwrap())
            .collect();
        (&file).write_all(&noise).unwrap();
        for claimed in [1, bytes, 1 << 20, u64::MAX] {
            let (mut frontend, features) = bare(&running);
            let region = VhostUserInflight {
                mmap_size: claimed,
                mmap_offset: 0,
                num_queues: 1,
                queue_size: 128,
            };
            let _ = frontend.set_features(features);
            let _ = frontend.set_inflight_fd(&region, file.as_raw_fd());
            let _ = frontend.get_features();
            drop(frontend);
            serves_the_next(&running);
        }
    }
    witness.is_served();
}

#[test]
fn noise_on_the_socket_ends_the_connection_alone() {
    let running = two_disks();
    let mut witness = Witness::new(&running);
    let mut random = Rng::with_seed(3);
    for length in [1, 11, 12, 13, 20, 100, 5000] {
        for _ in 0..4 {
            let mut stream = UnixStream::connect(running.place.socket(0)).unwrap();
            stream
                .set_read_timeout(Some(Duration::from_secs(20)))
                .unwrap();
            let mut bytes: Vec<u8> = (0..length)
                .map(|_| u8::try_from(random.u64(..256)).unwrap())
                .collect();
            if length >= 12 {
                // A kind of message there is, of this version.
                bytes[..4].copy_from_slice(&[u8::try_from(random.u64(..44)).unwrap(), 0, 0, 0]);
                bytes[4..8].copy_from_slice(&[1, 0, 0, 0]);
            }
            // The daemon may disconnect before all messages are sent.
            let _ = stream.write_all(&bytes);
            if length >= 12 {
                let _ = stream.shutdown(std::net::Shutdown::Write);
                let end = stream.read_to_end(&mut Vec::new());
                let waits = end.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
                assert!(!waits, "nobody hung up after {length} bytes of noise");
            }
            drop(stream);
            witness.is_served();
        }
    }
    serves_the_next(&running);
}

#[test]
fn rings_of_notices_that_break_rules_are_let_go() {
    let running = MachineThread::start(Setup {
        mode: plimsoll_disk::CacheMode::Exclusive,
        ..Setup::default()
    });
    let ram = ram();
    let mut disk = running.connect(&ram, 0, DriverOptions::default());
    let mut control = running.connect_control(&ram);
    let kind = |kind, flags, slot| Record {
        kind,
        flags,
        slot,
        ..Record::default()
    };
    // Records that mean nothing are passed over.
    let mut ring = NoticeRing::new(&ram, RingOptions::default());
    control.attach(&ring).unwrap();
    for record in [
        kind(0, 0, 0),
        kind(999, !record::DATA, u64::MAX),
        Record {
            page: u64::MAX,
            ..kind(record::EVICT, 0, 0)
        },
        Record {
            page: 1,
            other: u64::MAX,
            ..kind(record::MIGRATE, 0, 0)
        },
        Record {
            count: u32::MAX,
            page: u64::MAX,
            other: 99,
            ..kind(record::FLUSH, 0, 0)
        },
    ] {
        ring.raw_record(&record);
    }
    control.kick().unwrap();
    assert_eq!(ring.tail(), 5);
    assert!(running.stats().ring.bad_records >= 2);
    assert_eq!(running.stats().ring.faults, 0);

    // Invalid rings are not read again.
    type Break = fn(&mut NoticeRing);
    let breaks: [Break; 3] = [
        |ring| ring.raw_head(1 << 40),
        |ring| ring.raw_head(ring.head() - 1),
        |ring| {
            ring.raw_slot(&[1; 4096]);
            ring.raw_record(&Record {
                kind: record::EVICT,
                flags: record::DATA,
                slot: 1 << 50,
                ..Record::default()
            });
        },
    ];
    for (faults, wild) in (1..).zip(breaks) {
        let nonce = 1000 + faults;
        let options = RingOptions {
            nonce,
            ..RingOptions::default()
        };
        let mut ring = NoticeRing::new(&ram, options);
        control.attach(&ring).unwrap();
        assert!(ring.add(5));
        control.kick().unwrap();
        wild(&mut ring);
        // Whatever the answer to a kick.
        let _ = control.kick();
        let stats = running.stats();
        assert_eq!((stats.ring.faults, stats.ring.attached), (faults, false));
        disk.write(0, &[6; 4096]).unwrap();
    }
}

#[test]
fn control_disks_are_read_and_written_anywhere_without_harm() {
    let running = MachineThread::start(Setup::default());
    let ram = ram();
    let mut control = running.connect_control(&ram);
    control.features().unwrap();
    let mut random = Rng::with_seed(8);
    let mut bytes = vec![0; 65536];
    let sectors = control.driver().config().capacity_sectors;
    for _ in 0..300 {
        let length = 512 * (1 + usize::try_from(random.u64(..128)).unwrap());
        let sector = random.u64(..sectors - 128);
        // Reads are zeros or gets that find nothing, writes fail: neither matters.
        let _ = control.driver().read(sector * 512, &mut bytes[..length]);
        let _ = control.driver().write(sector * 512, &bytes[..length]);
    }
    for command in [0, 6, 99, u32::MAX] {
        assert!(control.command(command, [u64::MAX; 4]).is_err());
    }
    for address in [1, 4096 + 8, NOWHERE, u64::MAX - 4095] {
        assert!(control.command(1, [address, 1, 0, 0]).is_err());
    }
    assert!(!running.stats().ring.attached);
    let mut disk = running.connect(&ram, 0, DriverOptions::default());
    disk.read(IMAGE_BYTES - 512, &mut [0; 512]).unwrap();
}
