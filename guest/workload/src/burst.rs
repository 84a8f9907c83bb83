//! Memory that a process allocates beside the array, writes, and frees after a while.

use std::hint::black_box;
use std::thread;
use std::time::Duration;

use crate::settings::Burst;

/// Starts a thread that does so to the end of the run.
pub fn begin(burst: Burst) {
    let half = Duration::from_millis(burst.ms / 2);
    thread::spawn(move || {
        loop {
            thread::sleep(half);
            let memory = black_box(vec![1_u8; burst.mib << 20]);
            thread::sleep(half);
            drop(memory);
        }
    });
}
