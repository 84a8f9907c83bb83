//! Parses the console lines of a workload guest.
//!
//! The lines are described in guest/workload/README.md. They come from inside a
//! VM and are not trusted: [`ConsoleEvent::parse`] returns `None` for anything that is not exactly such a line, which
//! includes all lines of the guest's kernel. Unknown keys are ignored, so that a newer
//! guest can report more.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use plimsoll_flow::PageCount;

use crate::KernelMemory;

/// A line of a guest's console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsoleLine {
    /// Time at which its end arrived.
    pub at: Instant,
    /// The line without its end, truncated to 16 KiB.
    pub text: String,
    /// The workload's event; `None` for any other line.
    pub event: Option<ConsoleEvent>,
}

/// An event reported by a workload. Times are the guest's own, in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConsoleEvent {
    /// The workload begins.
    Ready {
        /// Name of the workload.
        workload: String,
        /// Pages in its array.
        pages: PageCount,
        /// Time since the guest's kernel started.
        kernel_ms: u64,
        /// Guests without an operating system: slowdown of ring 0 relative to ring 3.
        kernel_slowdown: Option<u64>,
    },
    /// Every page of the array was written once.
    Populated {
        /// Time that this took.
        ms: u64,
    },
    /// A phase with a new working set begins.
    Step {
        /// Number of the phase, from 0.
        index: u64,
        /// Its working set.
        pages: PageCount,
        /// Time at which it began, since the guest's kernel started.
        start_ms: u64,
    },
    /// Progress since the previous round, or since the array was populated.
    Round {
        /// Number of the round, from 0.
        index: u64,
        /// The working set.
        pages: PageCount,
        /// Visits to pages in this round.
        ops: u64,
        /// Time that they took.
        ms: u64,
        /// Visits since the array was populated.
        total_ops: u64,
        /// Pages with wrong contents since the array was populated.
        mismatches: u64,
        /// Guests without an operating system: time lost by visits since the array was populated.
        stalls: Option<Stalls>,
        /// The longest time that 256 visits took; `None` if the guest does not measure it.
        longest_ms: Option<u64>,
    },
    /// A page did not have the contents that were written to it.
    Mismatch {
        /// Its index in the array.
        page: u64,
        /// Expected value of one of its words.
        expected: u64,
        /// Value found in that word.
        found: u64,
    },
    /// Memory beside the array was allocated and written.
    Burst {
        /// Number of the allocation, from 0.
        index: u64,
        /// Time that it took.
        ms: u64,
    },
    /// Memory statistics of the guest's kernel.
    Memory(KernelMemory),
    /// The workload ended; every page of the array is now read once more (the audit).
    Audit {
        /// Pages in the array.
        pages: PageCount,
    },
    /// The workload and its audit ended; the guest powers off.
    Done {
        /// Visits to pages, excluding the audit's.
        ops: u64,
        /// Time since the array was populated.
        ms: u64,
        /// Pages with wrong contents, including those found by the audit.
        mismatches: u64,
    },
    /// A phase of a disk workload begins, after an idle pause.
    Phase {
        /// Its name.
        name: String,
        /// Length of the pause.
        pause_ms: u64,
    },
    /// All writes of a crash workload up to one are flushed.
    Flushed {
        /// Number of the last write, from 1.
        upto: u64,
    },
    /// A measurement or finding of a disk workload.
    Result {
        /// Its name.
        name: String,
        /// All other keys with their values; of a duplicate key, the last.
        fields: BTreeMap<String, String>,
    },
    /// A message of the guest's kernel about an error during a disk workload.
    Kernel {
        /// The message.
        text: String,
    },
    /// The workload failed; the guest powers off.
    Error {
        /// The workload's error message.
        message: String,
    },
}

/// Visits that took 4 µs or more by the guest's time-stamp counter, because the page was absent on the host or the
/// guest lost the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stalls {
    /// Number of those that took up to 4 ms.
    pub count: u64,
    /// Their total time.
    pub time: Duration,
    /// Total time of the longer ones.
    pub long_time: Duration,
    /// The longest of the round.
    pub longest: Duration,
}

impl ConsoleEvent {
    /// Parses a console line, with or without its line end.
    pub fn parse(line: &str) -> Option<Self> {
        let line = line.trim_end_matches(['\r', '\n']);
        let (event, keys) = line.strip_prefix("plimsoll: ")?.split_once(' ')?;
        let keys = Keys(keys);
        Some(match event {
            "ready" => Self::Ready {
                workload: keys.text("workload")?.to_owned(),
                pages: keys.pages()?,
                kernel_ms: keys.number("kernel_ms")?,
                kernel_slowdown: keys.number("kernel_slowdown"),
            },
            "populated" => Self::Populated {
                ms: keys.number("ms")?,
            },
            "step" => Self::Step {
                index: keys.number("index")?,
                pages: keys.pages()?,
                start_ms: keys.number("start_ms")?,
            },
            "round" => Self::Round {
                index: keys.number("index")?,
                pages: keys.pages()?,
                ops: keys.number("ops")?,
                ms: keys.number("ms")?,
                total_ops: keys.number("total_ops")?,
                mismatches: keys.number("mismatches")?,
                stalls: keys.stalls(),
                longest_ms: keys.number("longest_ms"),
            },
            "MISMATCH" => Self::Mismatch {
                page: keys.number("page")?,
                expected: keys.hexadecimal("expected")?,
                found: keys.hexadecimal("found")?,
            },
            "burst" => Self::Burst {
                index: keys.number("index")?,
                ms: keys.number("ms")?,
            },
            "memory" => Self::Memory(KernelMemory {
                committed_bytes: keys.number("committed_kib")?.checked_mul(1024)?,
                available_bytes: keys.number("available_kib")?.checked_mul(1024)?,
                swap_free_bytes: keys.number("swap_free_kib")?.checked_mul(1024)?,
                refaulted_pages: keys.number("refaults")?,
                swapped_in_pages: keys.number("swapped_in")?,
                major_faults: keys.number("major_faults")?,
            }),
            "audit" => Self::Audit {
                pages: keys.pages()?,
            },
            "done" => Self::Done {
                ops: keys.number("ops")?,
                ms: keys.number("ms")?,
                mismatches: keys.number("mismatches")?,
            },
            "phase" => Self::Phase {
                name: keys.text("name")?.to_owned(),
                pause_ms: keys.number("pause_ms")?,
            },
            "flushed" => Self::Flushed {
                upto: keys.number("upto")?,
            },
            "result" => Self::Result {
                name: keys.text("name")?.to_owned(),
                fields: keys.fields(),
            },
            "kernel" => Self::Kernel {
                text: keys.0.strip_prefix("text=")?.to_owned(),
            },
            "error" => Self::Error {
                message: keys.0.strip_prefix("message=")?.to_owned(),
            },
            _ => return None,
        })
    }
}

/// `key=value` words of a line.
struct Keys<'line>(&'line str);

impl<'line> Keys<'line> {
    fn text(&self, key: &str) -> Option<&'line str> {
        self.0
            .split(' ')
            .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.text(key)?.parse().ok()
    }

    fn stalls(&self) -> Option<Stalls> {
        let time = |key| self.number(key).map(Duration::from_micros);
        Some(Stalls {
            count: self.number("stalls")?,
            time: time("stalled_us")?,
            long_time: time("long_stalled_us")?,
            longest: time("longest_us")?,
        })
    }

    fn pages(&self) -> Option<PageCount> {
        self.number("pages").map(PageCount)
    }

    /// All keys except the name; the key `text` is the last one and extends to the end of the line.
    fn fields(&self) -> BTreeMap<String, String> {
        let (words, text) = match self.0.split_once(" text=") {
            Some((words, text)) => (words, Some(text)),
            None => (self.0, None),
        };
        let mut fields: BTreeMap<_, _> = words
            .split(' ')
            .filter_map(|word| word.split_once('='))
            .filter(|(key, _)| *key != "name")
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        fields.extend(text.map(|text| ("text".to_owned(), text.to_owned())));
        fields
    }

    fn hexadecimal(&self, key: &str) -> Option<u64> {
        u64::from_str_radix(self.text(key)?.strip_prefix("0x")?, 16).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_line_of_the_protocol_is_read() {
        let read = |line| ConsoleEvent::parse(line).unwrap();
        let pages = PageCount(25_600);
        assert_eq!(
            read("plimsoll: ready workload=zipf pages=25600 kernel_ms=3847\r\n"),
            ConsoleEvent::Ready {
                workload: "zipf".into(),
                pages,
                kernel_ms: 3847,
                kernel_slowdown: None,
            }
        );
        assert!(matches!(
            read(
                "plimsoll: ready workload=uniform pages=256 cpus=1 kernel_ms=0 kernel_slowdown=3187"
            ),
            ConsoleEvent::Ready {
                kernel_slowdown: Some(3187),
                ..
            }
        ));
        assert_eq!(
            read("plimsoll: burst index=4 ms=17"),
            ConsoleEvent::Burst { index: 4, ms: 17 }
        );
        assert_eq!(
            read("plimsoll: populated ms=859"),
            ConsoleEvent::Populated { ms: 859 }
        );
        assert_eq!(
            read("plimsoll: step index=2 pages=25600 start_ms=9000"),
            ConsoleEvent::Step {
                index: 2,
                pages,
                start_ms: 9000
            }
        );
        assert_eq!(
            read(
                "plimsoll: round index=3 pages=25600 ops=9 ms=113 total_ops=435200 mismatches=1 longest_ms=7"
            ),
            ConsoleEvent::Round {
                index: 3,
                pages,
                ops: 9,
                ms: 113,
                total_ops: 435_200,
                mismatches: 1,
                stalls: None,
                longest_ms: Some(7),
            }
        );
        let with_stalls = "plimsoll: round index=3 pages=1 ops=9 ms=1 total_ops=4 mismatches=0 stalls=7 stalled_us=90 \
                           long_stalled_us=5000 longest_us=4500";
        let stalls = match read(with_stalls) {
            ConsoleEvent::Round { stalls, .. } => stalls.unwrap(),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            stalls,
            Stalls {
                count: 7,
                time: Duration::from_micros(90),
                long_time: Duration::from_millis(5),
                longest: Duration::from_micros(4500),
            }
        );
        assert_eq!(
            read("plimsoll: MISMATCH page=7 word=0 expected=0x7 found=0xffffffffffffffff"),
            ConsoleEvent::Mismatch {
                page: 7,
                expected: 7,
                found: u64::MAX
            }
        );
        assert_eq!(
            read(
                "plimsoll: memory committed_kib=4 available_kib=8 swap_free_kib=0 refaults=1 swapped_in=2 major_faults=3"
            ),
            ConsoleEvent::Memory(KernelMemory {
                committed_bytes: 4096,
                available_bytes: 8192,
                swap_free_bytes: 0,
                refaulted_pages: 1,
                swapped_in_pages: 2,
                major_faults: 3,
            })
        );
        assert_eq!(
            read("plimsoll: audit pages=25600"),
            ConsoleEvent::Audit { pages }
        );
        assert_eq!(
            read("plimsoll: done ops=1 ms=2 mismatches=3"),
            ConsoleEvent::Done {
                ops: 1,
                ms: 2,
                mismatches: 3
            }
        );
        assert_eq!(
            read("plimsoll: phase name=measured pause_ms=500"),
            ConsoleEvent::Phase {
                name: "measured".into(),
                pause_ms: 500
            }
        );
        assert_eq!(
            read("plimsoll: flushed upto=77"),
            ConsoleEvent::Flushed { upto: 77 }
        );
        let fields = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter();
            pairs
                .map(|&(key, value)| (key.into(), value.into()))
                .collect()
        };
        assert_eq!(
            read("plimsoll: result name=files reads=12 phase=warmup"),
            ConsoleEvent::Result {
                name: "files".into(),
                fields: fields(&[("reads", "12"), ("phase", "warmup")])
            }
        );
        assert_eq!(
            read("plimsoll: result name=dm text=0 8 hcache gets=3"),
            ConsoleEvent::Result {
                name: "dm".into(),
                fields: fields(&[("text", "0 8 hcache gets=3")])
            }
        );
        assert_eq!(
            read("plimsoll: kernel text=BUG: bad page"),
            ConsoleEvent::Kernel {
                text: "BUG: bad page".into()
            }
        );
        assert_eq!(
            read("plimsoll: error message=64 MiB requested, but only 2 MiB are free"),
            ConsoleEvent::Error {
                message: "64 MiB requested, but only 2 MiB are free".into()
            }
        );
    }

    #[test]
    fn what_is_no_line_of_the_protocol_is_no_event() {
        for line in [
            "",
            "plimsoll: ",
            "plimsoll: done",
            "plimsoll: done ops=1 ms=2",
            "plimsoll: result reads=1",
            "plimsoll: memory committed_kib=18446744073709551615 available_kib=8 swap_free_kib=0 refaults=1 swapped_in=2 major_faults=3",
            "plimsoll: flushed upto=",
            "plimsoll: done ops=1 ms=2 mismatches=-1",
            "plimsoll: round ops=18446744073709551616",
            "[    3.862362] reboot: Power down",
            " plimsoll: populated ms=1",
        ] {
            assert_eq!(ConsoleEvent::parse(line), None, "{line:?}");
        }
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(line in "(plimsoll: (ready|done|step|MISMATCH|error|phase|result|kernel) )?.{0,80}") {
            let _ = ConsoleEvent::parse(&line);
        }
    }
}
