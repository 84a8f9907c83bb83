//! Periodic lines with the kernel's memory statistics.

use std::time::Duration;
use std::{fs, io, thread};

use crate::console::Line;

/// Keys of a line, and what they are called in `/proc/meminfo`, in KiB.
const MEMINFO: [(&str, &str); 3] = [
    ("committed_kib", "Committed_AS:"),
    ("available_kib", "MemAvailable:"),
    ("swap_free_kib", "SwapFree:"),
];

/// Keys of a line, and what they are called in `/proc/vmstat`.
const VMSTAT: [(&str, &str); 3] = [
    ("refaults", "workingset_refault_file"),
    ("swapped_in", "pswpin"),
    ("major_faults", "pgmajfault"),
];

/// Tells of the memory now, and every `ms` milliseconds from a thread of its own.
pub fn tell_each(ms: u64) {
    thread::spawn(move || {
        loop {
            // Without statistics of the kernel there is nothing to report.
            if let Ok(line) = line() {
                line.print();
            }
            thread::sleep(Duration::from_millis(ms));
        }
    });
}

fn line() -> io::Result<Line> {
    let (meminfo, vmstat) = (
        fs::read_to_string("/proc/meminfo")?,
        fs::read_to_string("/proc/vmstat")?,
    );
    let mut line = Line::new("memory");
    for (key, name) in MEMINFO {
        line = line.with(key, value(&meminfo, name).unwrap_or(0));
    }
    for (key, name) in VMSTAT {
        line = line.with(key, value(&vmstat, name).unwrap_or(0));
    }
    Ok(line)
}

/// The number after `name` at the beginning of a line.
fn value(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == name)
            .then(|| words.next()?.parse().ok())
            .flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_found_by_its_whole_name() {
        let text = "pswpin_more 1\npswpin 22\nCommitted_AS:  128 kB\n";
        assert_eq!(value(text, "pswpin"), Some(22));
        assert_eq!(value(text, "Committed_AS:"), Some(128));
        assert_eq!(value(text, "pswpout"), None);
    }
}
