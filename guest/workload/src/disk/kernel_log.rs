//! What the guest's kernel complains of, from `/dev/kmsg`.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;

use crate::console::Line;

/// Complaints reported individually; the others are counted.
const TOLD_MAX: u64 = 16;
/// Maximum bytes reported of one.
const TEXT_BYTES: usize = 400;
/// Longest record of `/dev/kmsg`.
const RECORD_BYTES: usize = 8192;
/// Priority of errors; those below are worse.
const ERROR: u32 = 3;
/// What makes a record of any priority a complaint.
const WORDS: [&str; 8] = [
    "BUG",
    "WARNING",
    "Oops",
    "I/O error",
    "EXT4-fs error",
    "ODEBUG",
    "INFO: trying to register non-static key",
    "INFO: lockdep is turned off",
];
/// What the leak detector of a debug kernel found.
const LEAKS: &str = "/sys/kernel/debug/kmemleak";
/// How old memory must be to count as a leak, and some more, in ms.
const LEAK_AGE_MS: u64 = 6000;

/// The kernel's log from a point in time on.
pub struct KernelLog {
    file: File,
    /// Errors, and lines that speak of one.
    pub complaints: u64,
    /// Gaps: records that were overwritten before they were read.
    pub gaps: u64,
}

impl KernelLog {
    /// Starts behind the newest record.
    pub fn from_now() -> io::Result<Self> {
        let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).expect("a small flag");
        let mut file = File::options()
            .read(true)
            .custom_flags(nonblock)
            .open("/dev/kmsg")?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self {
            file,
            complaints: 0,
            gaps: 0,
        })
    }

    /// Reads new lines, and reports the first complaints.
    pub fn read(&mut self) -> io::Result<()> {
        let mut record = vec![0; RECORD_BYTES];
        loop {
            match self.file.read(&mut record) {
                Ok(0) => return Ok(()),
                Ok(len) => self.take(&String::from_utf8_lossy(&record[..len])),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.gaps += 1,
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&mut self, record: &str) {
        if let Some(text) = complaint(record) {
            self.complain(&text);
        }
    }

    fn complain(&mut self, text: &str) {
        self.complaints += 1;
        if self.complaints <= TOLD_MAX {
            Line::new("kernel").rest("text", text).print();
        }
    }

    /// Lets a debug kernel search for memory that nothing refers to any more; each leak is a complaint.
    pub fn search_leaks(&mut self) -> io::Result<()> {
        if !has_leak_detector() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(LEAK_AGE_MS));
        // Twice, because what moved meanwhile may hide from one search, and a leak is reported by its second.
        fs::write(LEAKS, "scan")?;
        fs::write(LEAKS, "scan")?;
        for leak in leaks(&fs::read_to_string(LEAKS)?) {
            self.complain(&leak);
        }
        Ok(())
    }
}

/// Whether this is a kernel that finds leaks.
pub fn has_leak_detector() -> bool {
    Path::new(LEAKS).exists()
}

/// What is leaked, with where it was allocated, each in a line.
fn leaks(report: &str) -> Vec<String> {
    let mut leaks: Vec<String> = Vec::new();
    for line in report.lines() {
        if line.starts_with("unreferenced object") {
            leaks.push(line.to_owned());
        } else if let (Some(leak), true) = (leaks.last_mut(), line.contains("+0x")) {
            // `[<address>] function+offset/size [module]`
            let place = line.split_once("] ").map_or(line, |(_, place)| place);
            if leak.len() + place.len() < TEXT_BYTES {
                leak.push(' ');
                leak.push_str(place.trim());
            }
        }
    }
    leaks
}

/// The text of a record that complains: `priority,sequence,time,flags;text`, then lines of keys.
fn complaint(record: &str) -> Option<String> {
    let (head, text) = record.split_once(';')?;
    let text = text.lines().next()?;
    let priority: u32 = head.split(',').next()?.parse().ok()?;
    let complains = priority & 7 <= ERROR || WORDS.iter().any(|word| text.contains(word));
    complains.then(|| text.chars().take(TEXT_BYTES).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_words_of_error_are_complaints() {
        let text = |record| complaint(record);
        assert_eq!(
            text("3,1,5,-;blk_update_request: critical\n SUBSYSTEM=block\n"),
            Some("blk_update_request: critical".into())
        );
        assert_eq!(
            text("4,2,6,-;WARNING: CPU: 0\n"),
            Some("WARNING: CPU: 0".into())
        );
        assert_eq!(text("6,3,7,-;EXT4-fs (vda): mounted\n"), None);
        assert_eq!(text("30,3,7,-;a daemon's note\n"), None);
        assert_eq!(
            text("27,3,7,-;a daemon's error\n"),
            Some("a daemon's error".into())
        );
        assert_eq!(
            text("4,3,7,-;INFO: trying to register non-static key.\n"),
            Some("INFO: trying to register non-static key.".into())
        );
        assert_eq!(text("no record"), None);
        assert_eq!(text("x,1;y"), None);
    }

    #[test]
    fn a_leak_is_an_object_and_where_it_was_allocated() {
        let report = "unreferenced object 0xffff888004b0a000 (size 64):\n  comm \"insmod\", pid 1, jiffies 4\n  \
                      hex dump (first 32 bytes):\n    00 00 00 00  ....\n  backtrace:\n    \
                      [<000000006c1b>] kmalloc_trace+0x26/0x90\n    [<0000c>] ring_new+0x1/0x2 [plimsoll]\n\
                      unreferenced object 0xffff (size 8):\n";
        assert_eq!(
            leaks(report),
            [
                "unreferenced object 0xffff888004b0a000 (size 64): kmalloc_trace+0x26/0x90 ring_new+0x1/0x2 [plimsoll]",
                "unreferenced object 0xffff (size 8):",
            ]
        );
        assert_eq!(leaks(""), [""; 0]);
    }
}
