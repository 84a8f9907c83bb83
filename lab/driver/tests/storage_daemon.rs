//! The driver with a device of another implementation: `qemu-storage-daemon`.

use plimsoll_skip::{Lack, skip};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use plimsoll_driver::{
    Bank, Driver, DriverOptions, FrontendError, PAGE_BYTES, Ram, RamOptions, Request, Segment,
    Status,
};
use tempfile::TempDir;

const IMAGE_BYTES: u64 = 16 << 20;

/// A daemon of QEMU with a disk of zeros.
struct Daemon {
    child: Child,
    socket: PathBuf,
    _folder: TempDir,
}

impl Daemon {
    /// Starts a daemon, if it is installed.
    fn start(writable: bool) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(IMAGE_BYTES).unwrap();
        let socket = folder.path().join("socket");
        let started = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &blockdev(&image)])
            .args(["--export", &export(&socket, writable)])
            .stdin(Stdio::null())
            .spawn();
        match started {
            Ok(child) => Some(Self {
                child,
                socket,
                _folder: folder,
            }),
            Err(error) => {
                skip(
                    Lack::Program,
                    format_args!("qemu-storage-daemon (package qemu-system-common): {error}"),
                );
                None
            }
        }
    }

    fn connect(&self, mut options: DriverOptions) -> Driver {
        // It does not track requests in flight.
        options.inflight = false;
        let ram = Ram::new(&RamOptions::default()).unwrap();
        Driver::connect(&ram, &self.socket, options).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn blockdev(image: &Path) -> String {
    let image = image.display();
    format!("driver=file,node-name=disk,discard=unmap,filename={image}")
}

fn export(socket: &Path, writable: bool) -> String {
    let socket = socket.display();
    let writable = if writable { "on" } else { "off" };
    format!(
        "type=vhost-user-blk,id=export,node-name=disk,num-queues=2,writable={writable},\
         addr.type=unix,addr.path={socket}"
    )
}

/// Bytes that identify their position.
fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| u8::try_from((at * 7 + at / 512 * 13 + seed) % 251).unwrap())
        .collect()
}

#[test]
fn what_was_written_is_read_with_all_kinds_of_rings() {
    for (indirect, event_index) in [(true, true), (false, true), (true, false), (false, false)] {
        let Some(daemon) = Daemon::start(true) else {
            return;
        };
        let mut disk = daemon.connect(DriverOptions {
            indirect,
            event_index,
            ..DriverOptions::default()
        });
        assert_eq!(disk.config().capacity_sectors, IMAGE_BYTES / 512);
        assert!(!disk.read_only());
        let written = pattern(1, 2 << 20);
        disk.write(512, &written).unwrap();
        disk.flush().unwrap();
        let mut read = vec![0; written.len()];
        disk.read(512, &mut read).unwrap();
        assert!(read == written, "indirect {indirect}, {event_index}");

        disk.write_zeroes(512, 4096, true).unwrap();
        disk.discard(8192, 4096).unwrap();
        disk.read(512, &mut read[..4096]).unwrap();
        assert!(read[..4096].iter().all(|&byte| byte == 0));
        assert!(disk.identify().unwrap().iter().any(|&byte| byte != 0));
    }
}

#[test]
fn many_requests_of_many_segments_in_both_banks_and_queues_are_done() {
    let Some(daemon) = Daemon::start(true) else {
        return;
    };
    let mut disk = daemon.connect(DriverOptions {
        queues: 2,
        queue_size: 64,
        ..DriverOptions::default()
    });
    let ram = Arc::clone(disk.ram());
    let frames = [Bank::Low, Bank::High].map(|bank| ram.allocate(bank, 64 * PAGE_BYTES));
    // Request n is eight pages, of which each second one is in the other bank.
    let segments_of = |n: u64| -> Vec<Segment> {
        let page = |at: u64| frames[usize::from(at % 2 == 1)] + (n * 8 + at) % 64 * 4096;
        let segments = (0..8).map(|at| Segment {
            address: page(at),
            bytes: 4096,
        });
        segments.collect()
    };
    for n in 0..8 {
        for (at, segment) in segments_of(n).iter().enumerate() {
            let seed = usize::try_from(n).unwrap() * 8 + at;
            ram.write(segment.address, &pattern(seed, PAGE_BYTES));
        }
        let segments = segments_of(n);
        let sector = n * 64;
        let queue = usize::from(n % 2 == 1);
        let write = Request::Write {
            sector,
            segments: &segments,
        };
        disk.submit(queue, &write, n).unwrap();
    }
    let mut done = Vec::new();
    while done.len() < 8 {
        disk.wait().unwrap();
        for queue in 0..2 {
            while let Some(completion) = disk.poll(queue).unwrap() {
                assert_eq!(completion.status, Status::Ok);
                assert_eq!(completion.written, 1);
                done.push(completion.tag);
            }
        }
    }
    done.sort_unstable();
    assert_eq!(done, [0, 1, 2, 3, 4, 5, 6, 7]);
    let mut page = vec![0; PAGE_BYTES];
    for number in 0..64_usize {
        disk.read(number as u64 * 4096, &mut page).unwrap();
        assert!(page == pattern(number, PAGE_BYTES), "page {number}");
    }
}

#[test]
fn a_full_queue_takes_no_more_and_a_read_only_disk_no_write() {
    let Some(daemon) = Daemon::start(false) else {
        return;
    };
    let mut disk = daemon.connect(DriverOptions {
        queue_size: 4,
        ..DriverOptions::default()
    });
    assert!(disk.read_only());
    let failed = disk.write(0, &[1; 512]);
    assert!(matches!(
        failed,
        Err(FrontendError::Failed(Status::IoError))
    ));
    for tag in 0..4 {
        disk.queue(0).submit(&Request::Flush, tag).unwrap();
    }
    let full = disk.queue(0).submit(&Request::Flush, 4);
    assert!(matches!(full, Err(FrontendError::Full)));
    disk.queue(0).notify().unwrap();
    let mut done = 0;
    while done < 4 {
        disk.wait().unwrap();
        while disk.poll(0).unwrap().is_some() {
            done += 1;
        }
    }
    assert_eq!(disk.queue(0).in_flight(), 0);
}

#[test]
fn a_stopped_disk_goes_on_where_it_was_and_a_dead_daemon_is_noticed() {
    let Some(daemon) = Daemon::start(true) else {
        return;
    };
    let mut disk = daemon.connect(DriverOptions::default());
    let written = pattern(3, 65536);
    disk.write(0, &written).unwrap();
    disk.stop().unwrap();
    assert!(matches!(disk.flush(), Err(FrontendError::Disconnected)));
    disk.reconnect().unwrap();
    let mut read = vec![0; written.len()];
    disk.read(0, &mut read).unwrap();
    assert!(read == written);
    drop(daemon);
    assert!(matches!(disk.flush(), Err(FrontendError::Disconnected)));
}
