//! What the guest's kernel complains of, from `/dev/kmsg`.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;

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
const WORDS: [&str; 5] = ["BUG", "WARNING", "Oops", "I/O error", "EXT4-fs error"];

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
        let Some(text) = complaint(record) else {
            return;
        };
        self.complaints += 1;
        if self.complaints <= TOLD_MAX {
            Line::new("kernel").rest("text", text).print();
        }
    }
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
        assert_eq!(text("no record"), None);
        assert_eq!(text("x,1;y"), None);
    }
}
