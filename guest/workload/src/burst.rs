//! Memory that a process allocates beside the array, writes, and frees after a while.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use crate::console::Line;
use crate::settings::Burst;

/// Starts a thread that does so to the end of the run, and reports each allocation once it is written. One that the
/// machine cannot provide has no line: the kernel kills the process.
pub fn begin(burst: Burst) {
    let half = Duration::from_millis(burst.ms / 2);
    thread::spawn(move || {
        for index in 0_u64.. {
            thread::sleep(half);
            let begun = Instant::now();
            let memory = black_box(vec![1_u8; burst.mib << 20]);
            Line::new("burst")
                .with("index", index)
                .with("ms", begun.elapsed().as_millis())
                .print();
            thread::sleep(half);
            drop(memory);
        }
    });
}
