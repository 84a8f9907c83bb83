//! The programs.

use crate::curves::Law;

/// A program whose touches are known.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    pub name: &'static str,
    pub words: &'static str,
    /// How pages are chosen; `None` for one after the other.
    pub law: Option<Law>,
    /// Of the array; of a program that changes its working set, the largest.
    pub mib: u64,
    /// Whether it changes its working set, as its output says.
    pub is_changing: bool,
}

impl Program {
    pub fn only_reads(&self) -> bool {
        !self.words.contains("write_ratio")
    }
}

pub const PROGRAMS: [Program; 5] = [
    Program {
        name: "one after the other, 64 MiB",
        words: "workload=sequential mib=64",
        law: None,
        mib: 64,
        is_changing: false,
    },
    Program {
        name: "Zipf 1.0, 96 MiB",
        words: "workload=zipf mib=96",
        law: Some(Law::Zipf(1.0)),
        mib: 96,
        is_changing: false,
    },
    Program {
        name: "32, 96 and 64 MiB in turn",
        words: "workload=steps steps_mib=32,96,64 step_ms=8000 seconds=0",
        law: None,
        mib: 96,
        is_changing: true,
    },
    Program {
        name: "at random, 96 MiB",
        words: "workload=uniform mib=96",
        law: Some(Law::Uniform),
        mib: 96,
        is_changing: false,
    },
    Program {
        name: "Zipf 0.6, half of it written, 96 MiB",
        words: "workload=zipf alpha=0.6 mib=96 write_ratio=0.5",
        law: Some(Law::Zipf(0.6)),
        mib: 96,
        is_changing: false,
    },
];

/// So many of them with `--quick`.
pub const QUICK_PROGRAMS: usize = 3;
