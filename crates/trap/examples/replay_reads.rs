//! Reads the pages of a file whose numbers come in on standard input, one a line, each by a system call, and prints once a second how
//! many reads there were so far, and how many of them the page cache did not serve: for tests of the backend `page-cache`.
//!
//!     plimsoll trace generate zipf ... | replay_reads FILE
//!
//! Nothing is read ahead, so that a read that is not served is one page of the disk.

use std::fs::{self, File};
use std::io::{self, BufRead as _, Error};
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};

const PAGE_BYTES: u64 = 4096;
const INTERVAL: Duration = Duration::from_secs(1);

fn main() -> io::Result<()> {
    let path = std::env::args_os()
        .nth(1)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let file = File::open(path)?;
    fadvise(&file, 0, None, Advice::Random)?;
    let mut page = [0; 4096];
    let before = disk_bytes()?;
    let (mut reads, mut last) = (0_u64, Instant::now());
    for line in io::stdin().lock().lines() {
        let number: u64 = line?.trim().parse().map_err(Error::other)?;
        file.read_exact_at(&mut page, number * PAGE_BYTES)?;
        reads += 1;
        if last.elapsed() >= INTERVAL {
            last = Instant::now();
            println!(
                "reads {reads} misses {}",
                (disk_bytes()? - before) / PAGE_BYTES
            );
        }
    }
    Ok(())
}

/// Bytes that this process has caused disks to read.
fn disk_bytes() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/io")?;
    let mut lines = text.lines();
    let bytes = lines.find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok());
    bytes.ok_or_else(|| Error::other("the kernel counts no disk reads of processes"))
}
