//! Guest RAM that cannot be accessed: its file has shrunk, its tmpfs is full, or there is no huge page. The daemon survives,
//! answers what it can, and serves the VM's other disk and the next guest.

mod faults_common;

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use faults_common::{MachineThread, Setup, SmallTmpfs, ram};
use plimsoll_disk::CacheMode;
use plimsoll_driver::{
    Bank, Descriptor, Driver, DriverOptions, FrontendError, NoticeRing, Ram, Request, RingOptions,
    Segment, Status,
};
use plimsoll_skip::{Lack, skip};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::FileOffset;

const LOW_BYTES: u64 = 16 << 20;
const HIGH_BYTES: u64 = 32 << 20;
/// Where the high part begins.
const HIGH: u64 = 4 << 30;

const IN: u32 = 0;
const OUT: u32 = 1;
const IO_ERROR: u8 = 1;

fn sized(file: File, bytes: u64) -> Arc<File> {
    file.set_len(bytes).unwrap();
    Arc::new(file)
}

/// RAM in one file that is not a memfd, whose high part follows the low one.
fn ram_in(file: &Arc<File>) -> Arc<Ram> {
    let place = |offset| FileOffset::from_arc(Arc::clone(file), offset);
    Ram::of_files([(place(0), LOW_BYTES), (place(LOW_BYTES), HIGH_BYTES)]).unwrap()
}

fn two_disks(mode: CacheMode) -> MachineThread {
    MachineThread::start(Setup {
        disks: 2,
        mode,
        ..Setup::default()
    })
}

/// Checks that a disk is served for a guest whose RAM is in order.
fn is_served(running: &MachineThread, disk: usize) {
    let mut disk = running.connect(&ram(), disk, DriverOptions::default());
    disk.write(4096, &[0x77; 4096]).unwrap();
    let mut page = [0; 4096];
    disk.read(4096, &mut page).unwrap();
    assert_eq!(page, [0x77; 4096]);
}

/// The banks that a request of 4 KiB is in.
#[derive(Clone, Copy)]
struct Banks {
    header: Bank,
    data: Bank,
    status: Bank,
    /// Of its descriptors, or the ring's own table.
    table: Option<Bank>,
}

const LOW: Banks = Banks {
    header: Bank::Low,
    data: Bank::Low,
    status: Bank::Low,
    table: None,
};

/// Offers a request to a disk without a kick, and returns the address of its status.
fn offer(disk: &mut Driver, kind: u32, banks: Banks) -> u64 {
    let ram = Arc::clone(disk.ram());
    let header = ram.allocate(banks.header, 16);
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    ram.write(header, &bytes);
    let status = ram.allocate(banks.status, 1);
    let writable = if kind == IN { Descriptor::WRITE } else { 0 };
    let chain = [
        (header, 16, Descriptor::NEXT),
        (
            ram.allocate(banks.data, 4096),
            4096,
            Descriptor::NEXT | writable,
        ),
        (status, 1, Descriptor::WRITE),
    ];
    let chain = (1..)
        .zip(chain)
        .map(|(next, (address, bytes, flags))| Descriptor {
            address,
            bytes,
            flags,
            next,
        });
    if let Some(bank) = banks.table {
        let table = ram.allocate(bank, 48);
        for (at, descriptor) in (0..).zip(chain) {
            let mut bytes = descriptor.address.to_le_bytes().to_vec();
            bytes.extend(descriptor.bytes.to_le_bytes());
            bytes.extend(descriptor.flags.to_le_bytes());
            bytes.extend(descriptor.next.to_le_bytes());
            ram.write(table + 16 * at, &bytes);
        }
        let indirect = Descriptor {
            address: table,
            bytes: 48,
            flags: Descriptor::INDIRECT,
            next: 0,
        };
        disk.queue(0).raw_descriptor(0, &indirect);
    } else {
        for (number, descriptor) in (0..).zip(chain) {
            disk.queue(0).raw_descriptor(number, &descriptor);
        }
    }
    disk.queue(0).raw_offer(0);
    status
}

/// A disk whose queue the daemon does not read before it is kicked: its first request was completed.
fn connect(running: &MachineThread, ram: &Arc<Ram>) -> Driver {
    let mut disk = running.connect(ram, 0, DriverOptions::default());
    disk.read(0, &mut [0; 4096]).unwrap();
    disk
}

/// Waits, at most 20 s, until the device has used a second entry.
fn used(disk: &mut Driver) {
    let end = Instant::now() + Duration::from_secs(20);
    while disk.queue(0).raw_used_index() == 1 {
        assert!(Instant::now() < end, "the entry is not used");
        thread::sleep(Duration::from_micros(200));
    }
}

fn status_of(disk: &Driver, address: u64) -> u8 {
    let mut status = [0xff];
    disk.ram().read(address, &mut status);
    status[0]
}

#[test]
fn a_file_of_ram_that_shrinks_ends_no_daemon() {
    let running = two_disks(CacheMode::Exclusive);
    let high = Bank::High;
    for (what, kind, banks, is_answered) in [
        (
            "a header",
            IN,
            Banks {
                header: high,
                ..LOW
            },
            true,
        ),
        ("data written", OUT, Banks { data: high, ..LOW }, true),
        (
            "a status",
            IN,
            Banks {
                status: high,
                ..LOW
            },
            false,
        ),
        (
            "a table",
            IN,
            Banks {
                table: Some(high),
                ..LOW
            },
            false,
        ),
    ] {
        let file = sized(
            tempfile::tempfile_in("/dev/shm").unwrap(),
            LOW_BYTES + HIGH_BYTES,
        );
        let mut disk = connect(&running, &ram_in(&file));
        let status = offer(&mut disk, kind, banks);
        file.set_len(LOW_BYTES).unwrap();
        let failed = running.stats().disks[0].ram_errors;
        disk.queue(0).raw_kick().unwrap();
        running.wait_for(what, |stats| stats.disks[0].ram_errors > failed);
        if is_answered {
            used(&mut disk);
            assert_eq!(status_of(&disk, status), IO_ERROR, "{what}");
        } else {
            // What the guest could take for an answer is not written.
            assert_eq!(disk.queue(0).raw_used_index(), 1, "{what}");
        }
        assert_eq!(running.stats().disks[0].bad_requests, 0, "{what}");
        is_served(&running, 1);
    }

    // The queue itself.
    let file = sized(
        tempfile::tempfile_in("/dev/shm").unwrap(),
        LOW_BYTES + HIGH_BYTES,
    );
    let mut disk = connect(&running, &ram_in(&file));
    offer(&mut disk, IN, LOW);
    file.set_len(0).unwrap();
    let failed = running.stats().disks[0].ram_errors;
    disk.queue(0).raw_kick().unwrap();
    running.wait_for("a queue", |stats| stats.disks[0].ram_errors > failed);
    drop(disk);
    is_served(&running, 0);
    is_served(&running, 1);
}

#[test]
fn a_ring_of_notices_whose_file_shrinks_is_let_go() {
    let running = two_disks(CacheMode::Exclusive);
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    let file = sized(file, LOW_BYTES + HIGH_BYTES);
    let ram = ram_in(&file);
    let mut control = running.connect_control(&ram);
    control.features().unwrap();
    let end = ram.allocate(Bank::High, 4096) - HIGH;
    let mut ring = NoticeRing::new(&ram, RingOptions::default());
    control.attach(&ring).unwrap();
    assert!(ring.add(5));
    file.set_len(LOW_BYTES + end).unwrap();
    // Whatever the answer.
    let _ = control.kick();
    let stats = running.stats().ring;
    assert_eq!((stats.faults, stats.attached), (1, false));
    is_served(&running, 0);
}

#[test]
fn a_full_tmpfs_of_ram_ends_no_daemon_and_the_request_is_repeated() {
    let Some(small) = SmallTmpfs::new(1) else {
        return;
    };
    let running = two_disks(CacheMode::None);
    let file = tempfile::tempfile_in(small.path()).unwrap();
    let file = sized(file, LOW_BYTES + HIGH_BYTES);
    let mut disk = connect(&running, &ram_in(&file));
    let banks = Banks {
        status: Bank::High,
        ..LOW
    };
    let status = offer(&mut disk, OUT, banks);
    let ballast = small.path().join("ballast");
    let filled = File::create(&ballast).unwrap().write_all(&[1; 1 << 20]);
    assert_eq!(filled.unwrap_err().kind(), ErrorKind::StorageFull);
    disk.queue(0).raw_kick().unwrap();
    running.wait_for("status", |stats| stats.disks[0].ram_errors == 1);
    is_served(&running, 1);

    fs::remove_file(ballast).unwrap();
    disk.reconnect().unwrap();
    used(&mut disk);
    assert_eq!(status_of(&disk, status), 0);
}

/// Whether the host could give a huge page.
fn has_huge_pages() -> bool {
    let free = fs::read_to_string("/proc/meminfo").unwrap();
    let free = free
        .lines()
        .find(|line| line.starts_with("HugePages_Free:"));
    let overcommit = fs::read_to_string("/proc/sys/vm/nr_overcommit_hugepages");
    free.is_none_or(|line| !line.ends_with(" 0")) || overcommit.is_ok_and(|most| most != "0\n")
}

#[test]
fn reads_into_huge_pages_that_cannot_be_had_fail() {
    let flags = MemfdFlags::HUGETLB | MemfdFlags::CLOEXEC;
    let (false, Ok(huge)) = (has_huge_pages(), memfd_create("huge", flags)) else {
        return skip(Lack::Host, "no huge pages, or free ones");
    };
    let running = two_disks(CacheMode::Exclusive);
    let low = sized(tempfile::tempfile_in("/dev/shm").unwrap(), LOW_BYTES);
    let huge = sized(File::from(huge), HIGH_BYTES);
    let parts = [(low, LOW_BYTES), (huge, HIGH_BYTES)];
    let parts = parts.map(|(file, bytes)| (FileOffset::from_arc(file, 0), bytes));
    let ram = Ram::of_files(parts).unwrap();
    let mut disk = running.connect(&ram, 0, DriverOptions::default());
    let segment = |bank| Segment {
        address: ram.allocate(bank, 4096),
        bytes: 4096,
    };
    let (here, nowhere) = ([segment(Bank::Low)], [segment(Bank::High)]);
    let sector = 8;
    for _ in 0..3 {
        let segments = &nowhere;
        let read = disk.execute(&Request::Read { sector, segments });
        assert!(matches!(read, Err(FrontendError::Failed(Status::IoError))));
        let segments = &here;
        disk.execute(&Request::Write { sector, segments }).unwrap();
        disk.execute(&Request::Read { sector, segments }).unwrap();
    }
    assert_eq!(running.stats().disks[0].ram_errors, 3);
    is_served(&running, 1);
}
